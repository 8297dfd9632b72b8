"""Imports run down only: each room of the package imports the rooms beneath it, and the leaves import no torch."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from unittest.mock import patch

import pytest

import autoparallel
from autoparallel.schedule.schedules import SCHEDULES
from tests.support.sources import LEVEL, ROOT, all_imports_of, imports_of, room_of, short


@pytest.mark.parametrize("name", ["errors", "optim"])
def test_modules_are_read_through_the_package(name: str) -> None:
    """After ``import autoparallel`` alone, as torch.optim is after ``import torch``."""
    with patch.dict(vars(autoparallel)):
        vars(autoparallel).pop(name, None)
        assert getattr(autoparallel, name) is importlib.import_module(f"autoparallel.{name}")


def test_every_room_has_a_level() -> None:
    found = {p.name if p.is_dir() else p.stem for p in (ROOT / "autoparallel").iterdir()
             if (p.is_dir() and (p / "__init__.py").exists()) or (p.suffix == ".py" and p.stem != "__init__")}
    assert found == set(LEVEL)


@pytest.mark.parametrize("room", sorted(LEVEL))
def test_imports_run_down(room: str) -> None:
    home = ROOT / "autoparallel" / room
    files = home.rglob("*.py") if home.is_dir() else [home.with_suffix(".py")]
    up = [f"{short(path)}:{found.line} imports {found.module}" for path in files for found in imports_of(path)
          if room_of(found.module) not in ("", room) and LEVEL[room_of(found.module)] <= LEVEL[room]]
    assert not up


@pytest.mark.parametrize("leaf", ["autoparallel/search", "cost_models"])
def test_leaves_import_no_torch(leaf: str) -> None:
    outside = {"torch", "transformers"}
    found = [f"{short(path)}:{found.line}" for path in (ROOT / leaf).rglob("*.py")
             for found in all_imports_of(path) if found.module.split(".")[0] in outside]
    assert not found


#: Schedules by name; docstrings may have them. `export/megatron_rules.py` has Megatron-LM's words.
SCHEDULE = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, SCHEDULES))})(?![\w-])", re.IGNORECASE)


def test_schedules_are_known_by_name_in_one_file() -> None:
    """Other code asks their fields; no name is compared, listed or written into a message."""
    home = ROOT / "autoparallel"
    found = [f"{short(path)}:{node.lineno} has {node.value!r}" for path in home.rglob("*.py")
             if path not in (home / "schedule" / "schedules.py", home / "export" / "megatron_rules.py")
             if SCHEDULE.search(text := path.read_text("utf-8"))
             for node in values_of(ast.parse(text)) if SCHEDULE.search(node.value)]
    assert not found


def test_no_source_asks_a_schedule_for_its_name() -> None:
    """Nor do the price list and the benchmarks, which may name schedules."""
    found = [f"{short(path)}:{node.lineno}" for home in ("cost_models", "benchmarks")
             for path in (ROOT / home).rglob("*.py") if SCHEDULE.search(text := path.read_text("utf-8"))
             for node in ast.walk(ast.parse(text))
             if isinstance(node, ast.MatchValue) or (isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq))
             if any(isinstance(part, ast.Constant) and isinstance(part.value, str) and SCHEDULE.fullmatch(part.value)
                    for part in ast.walk(node))]
    assert not found


def values_of(tree: ast.Module) -> Iterator[ast.Constant]:
    """The strings of a file, without docstrings."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node


def test_nothing_installed_imports_tests() -> None:
    found = [f"{short(path)}:{found.line}" for home in ("autoparallel", "cost_models", "benchmarks")
             for path in (ROOT / home).rglob("*.py") for found in all_imports_of(path)
             if found.module.split(".")[0] == "tests"]
    assert not found


@pytest.mark.ranks
def test_reports_import_neither_torch_nor_numpy() -> None:
    """`autoparallel show` answers at once."""
    code = ("import sys; import autoparallel.cli, autoparallel.plans.reports.build, autoparallel.plans.reports.text\n"
            "print(sorted({'torch', 'numpy'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60,
                          check=True)
    assert done.stdout.strip() == "[]"
