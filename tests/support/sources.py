"""Source files of the project: their statements and imports, and the order of the package's rooms."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Rooms from top to bottom; those of one line do not import one another.
LEVELS = (
    ("__main__",),
    ("cli",),
    ("job_cli",),
    ("capacity_cli", "selftest"),
    ("plan_cli",),
    ("region_reports",),
    ("demo", "doctor", "calibration", "verification", "integrations", "advice", "sizing", "fitting", "regions",
     "replanning"),
    ("api", "export"),
    ("compiler",),
    ("planning",),
    ("runtime", "servers"),
    ("launch", "partition", "backends"),
    ("pricing",),
    ("lower",),
    ("plans",),
    ("strategies",),
    ("kernels", "rules"),
    ("capture",),
    ("ops", "schedule"),
    ("layout", "search"),
    ("models", "optim"),
    ("axis_names", "clock", "errors", "garbage"),
)
LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}


def short(path: Path) -> str:
    """A path as seen from the root of the project."""
    return str(path.relative_to(ROOT))


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def statements_of(path: Path) -> Iterator[ast.AST]:
    """All statements of a file, nested ones included, without their expressions: a tenth of the nodes of its tree.
    Trees are not kept: Python's garbage collector would go through them again and again."""
    return _within(ast.parse(path.read_text()))


def _within(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from _within(child)


@dataclass(frozen=True)
class Import:
    """A module that a file imports anywhere in it; ``private``: a name with an underscore in front is taken from it."""

    line: int
    module: str
    private: bool = False


@functools.cache
def all_imports_of(path: Path) -> tuple[Import, ...]:
    """In the order of the file; of names taken from `autoparallel` itself, the modules of these names."""
    found = list[Import]()
    for node in statements_of(path):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module] if node.module != "autoparallel" else [f"autoparallel.{a.name}" for a in node.names]
            private = any(alias.name.startswith("_") for alias in node.names)
            found += [Import(node.lineno, name, private) for name in names]
        elif isinstance(node, ast.Import):
            found += [Import(node.lineno, alias.name) for alias in node.names]
    return tuple(found)


def imports_of(path: Path) -> list[Import]:
    """Imports of modules of the package."""
    return [found for found in all_imports_of(path) if found.module.split(".")[0] == "autoparallel"]
