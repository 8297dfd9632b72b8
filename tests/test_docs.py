"""Examples in the documentation run as tests."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MANUALS = [page for package in ("autoparallel", "cost_models") for page in (ROOT / package).glob("**/README.md")]
PAGES = sorted([ROOT / "README.md", ROOT / "docs/concepts/cost-model.md", *MANUALS])
SOURCES = sorted(path for package in ("autoparallel", "cost_models") for path in (ROOT / package).rglob("*.py"))
EXAMPLES = [path for path in SOURCES if ">>> " in path.read_text()]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_readme_examples(page: Path) -> None:
    failed, _ = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


@pytest.mark.parametrize("path", EXAMPLES, ids=module_of)
def test_docstring_examples(path: Path) -> None:
    failed, tried = doctest.testmod(importlib.import_module(module_of(path)))
    assert failed == 0 and tried


def test_every_module_can_be_imported() -> None:
    """Of the extras all but TRL are installed for tests: it brings `datasets`."""
    for path in SOURCES:
        try:
            importlib.import_module(module_of(path))
        except ModuleNotFoundError as error:
            if (error.name, path.name) != ("trl", "sft.py"):
                raise


def test_every_package_has_a_readme() -> None:
    packages = {ROOT / "autoparallel", ROOT / "cost_models", ROOT / "tests", ROOT / "benchmarks", ROOT / "notebooks"}
    packages |= {p.parent for p in ROOT.glob("autoparallel/*/__init__.py")}
    missing = sorted(str(p.relative_to(ROOT)) for p in packages if not (p / "README.md").exists())
    assert not missing


@pytest.mark.ranks
def test_leaves_import_no_torch() -> None:
    """cost_models and search are usable without torch; so are the command line and all reports of saved plans, and the
    first of these needs no pages and pictures either."""
    reports = "autoparallel.cli, autoparallel.plans.reports.text, autoparallel.plans.reports.data"
    for modules, lazy in (("cost_models, autoparallel.search", ("torch",)),
                          (reports, ("torch", "jinja2", "matplotlib", "networkx", "ortools", "autoparallel.search")),
                          ("autoparallel.plans.reports.page", ("torch", "matplotlib"))):
        code = f"import sys, {modules}; assert not set({lazy}) & set(sys.modules), set({lazy}) & set(sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
