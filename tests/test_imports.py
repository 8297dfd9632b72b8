"""Imports run down only: each room of the package imports the rooms beneath it, and the leaves import no torch."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Rooms from top to bottom; those of one line do not import one another.
LEVELS = (
    ("cli",),
    ("plan_cli", "capacity_cli", "selftest"),
    ("demo", "doctor", "calibration", "verification", "integrations", "optim", "advice", "sizing"),
    ("api", "export"),
    ("compiler",),
    ("planning",),
    ("runtime",),
    ("launch", "partition", "backends"),
    ("pricing",),
    ("lower",),
    ("plans",),
    ("kernels", "strategies"),
    ("rules",),
    ("capture",),
    ("ops", "schedule"),
    ("layout", "search"),
    ("models",),
    ("errors", "garbage"),
)
LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@functools.cache
def all_imports_of(path: Path) -> tuple[tuple[int, str], ...]:
    """Modules that a file imports, anywhere in it, with the line."""
    found = list[tuple[int, str]]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module] if node.module != "autoparallel" else [f"autoparallel.{a.name}" for a in node.names]
            found += [(node.lineno, name) for name in names]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
    return tuple(found)


def imports_of(path: Path) -> list[tuple[int, str]]:
    """Modules of the package that a file imports."""
    return [(line, name) for line, name in all_imports_of(path) if name.split(".")[0] == "autoparallel"]


def test_every_room_has_a_level() -> None:
    found = {p.name if p.is_dir() else p.stem for p in (ROOT / "autoparallel").iterdir()
             if (p.is_dir() and (p / "__init__.py").exists()) or (p.suffix == ".py" and p.stem != "__init__")}
    assert found == set(LEVEL)


@pytest.mark.parametrize("room", sorted(LEVEL))
def test_imports_run_down(room: str) -> None:
    home = ROOT / "autoparallel" / room
    files = home.rglob("*.py") if home.is_dir() else [home.with_suffix(".py")]
    up = [f"{path.relative_to(ROOT)}:{line} imports {module}" for path in files for line, module in imports_of(path)
          if room_of(module) not in ("", room) and LEVEL[room_of(module)] <= LEVEL[room]]
    assert not up


@pytest.mark.parametrize("leaf", ["autoparallel/search", "cost_models"])
def test_leaves_import_no_torch(leaf: str) -> None:
    outside = {"torch", "transformers"}
    found = [f"{path.relative_to(ROOT)}:{line}" for path in (ROOT / leaf).rglob("*.py")
             for line, name in all_imports_of(path) if name.split(".")[0] in outside]
    assert not found


def test_nothing_installed_imports_tests() -> None:
    found = [str(path.relative_to(ROOT)) for home in ("autoparallel", "cost_models", "benchmarks")
             for path in (ROOT / home).rglob("*.py") for _, name in all_imports_of(path)
             if name.split(".")[0] == "tests"]
    assert not sorted(set(found))
