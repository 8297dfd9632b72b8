"""Examples in the documentation run as tests."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import autoparallel
import cost_models

ROOT = Path(__file__).parent.parent
PAGES = sorted(p for p in [ROOT / "README.md", *ROOT.glob("autoparallel/**/README.md"), ROOT / "cost_models/README.md"])
MODULES = sorted(
    module.name
    for package in (autoparallel, cost_models)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_readme_examples(page: Path) -> None:
    failed, _ = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_every_package_has_a_readme() -> None:
    packages = {ROOT / "autoparallel", ROOT / "cost_models", ROOT / "tests", ROOT / "benchmarks", ROOT / "notebooks"}
    packages |= {p.parent for p in ROOT.glob("autoparallel/*/__init__.py")}
    missing = sorted(str(p.relative_to(ROOT)) for p in packages if not (p / "README.md").exists())
    assert not missing


@pytest.mark.ranks
def test_leaves_import_no_torch() -> None:
    """cost_models and search are usable without torch."""
    code = "import sys, cost_models, autoparallel.search; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
