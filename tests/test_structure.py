"""Structure of the code: classes and test files of bounded size, READMEs that list the files of their folders."""

from __future__ import annotations

import ast
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.support.sources import ROOT, all_imports_of, short, statements_of

SOURCES = [p for room in ("autoparallel", "cost_models", "benchmarks") for p in sorted((ROOT / room).rglob("*.py"))]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MANUALS = [ROOT / "cost_models/README.md", *sorted((ROOT / "autoparallel").rglob("README.md"))]
MOST_METHODS, MOST_TEST_LINES = 20, 500
#: Classes whose documented public methods alone are more; their methods delegate.
FACADES = {"ParallelModule"}


def test_no_class_has_more_than_20_methods() -> None:
    found = [(node.name, sum(isinstance(member, ast.FunctionDef) for member in node.body))
             for path in SOURCES for node in statements_of(path) if isinstance(node, ast.ClassDef)]
    large = {name for name, count in found if count > MOST_METHODS}
    assert large == FACADES


def test_facades_delegate() -> None:
    """A method of a facade has at most twelve statements, nested ones included, after its docstring."""
    for path in SOURCES:
        text = path.read_text()
        for node in statements_of(path) if any(f"class {name}" in text for name in FACADES) else ():
            if isinstance(node, ast.ClassDef) and node.name in FACADES:
                sizes = {f.name: sum(isinstance(part, ast.stmt) for part in ast.walk(f)) - 2 for f in node.body
                         if isinstance(f, ast.FunctionDef)}
                assert max(sizes.values()) <= 12, sizes


@pytest.mark.parametrize("path", TESTS, ids=short)
def test_test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_TEST_LINES


def private_sources(path: Path) -> set[str]:
    """Modules of this project from which a file imports private names."""
    return {found.module for found in all_imports_of(path) if found.private
            and found.module.split(".")[0] in ("autoparallel", "cost_models", "benchmarks", "tests")}


def test_private_names_are_imported_by_the_tests_of_their_module_only() -> None:
    """A test file imports private names from one module at most, which it tests; none from other tests."""
    found = {short(path): names for path in TESTS if (names := private_sources(path))}
    assert all(len(names) == 1 and not next(iter(names)).startswith("tests.") for names in found.values()), found


def test_tests_share_nothing_but_helpers() -> None:
    """No file imports a test file; helpers are in `tests/support/`, or in a folder beside its tests."""
    found = {short(path): names for path in TESTS if (names := [
        one.module for one in all_imports_of(path) if re.match(r"tests\.(\w+\.)?test_", one.module)])}
    assert not found


def files_named(page: Path) -> set[str]:
    """Names of Python files and of folders in the first column of the tables of a README."""
    rows = "\n".join(line.split("|")[1] for line in page.read_text().splitlines() if line.startswith("|"))
    return set(re.findall(r"`([\w./]+(?:\.py|/))`", rows))


@pytest.mark.parametrize("page", MANUALS, ids=short)
def test_manuals_of_rooms_are_short(page: Path) -> None:
    """Two screens, with the data that comes in and goes out, an example and how to change it."""
    text = page.read_text()
    assert len(text.splitlines()) <= (120 if page.parent.name == "cost_models" else 100)
    if page.parent.name not in ("autoparallel", "cost_models"):
        assert re.search(r"\bIn: .*\bOut:\s", text, re.S) and ">>> " in text
        assert re.search(r"^## How to (change|add)", text, re.M)


@pytest.mark.parametrize("page", MANUALS, ids=short)
def test_manuals_list_the_files_there_are(page: Path) -> None:
    """Files named in tables exist, and all files of the folder are named: themselves, or a folder within that has
    them. Folders with a README of their own are left to that."""
    folder, named, text = page.parent, files_named(page), page.read_text()
    own = [other.parent for other in MANUALS if other.parent != folder and folder in other.parents]
    files = [p for p in folder.rglob("*.py") if p.name != "__init__.py" and not any(o in p.parents for o in own)]
    missing = [short(p) for p in files if f"{p.name}`" not in text
               and not any(f"{part.relative_to(folder)}/" in named for part in p.parents if folder in part.parents)]
    bases = (folder, ROOT / "autoparallel", ROOT, *{p.parent for p in files})
    absent = sorted(name for name in named if not any((base / name).exists() for base in bases))
    assert not missing and not absent


def test_the_manual_of_the_tests_names_each_file() -> None:
    """By its name or by a pattern; all that is named is there."""
    named = re.findall(r"`([\w*./]+\.py)`", (ROOT / "tests/README.md").read_text())
    files = [path.name for folder in ("tests", "tests/support") for path in (ROOT / folder).glob("*.py")]
    missing = [name for name in files if name != "__init__.py"
               and not any(fnmatch(name, pattern.split("/")[-1]) for pattern in named)]
    absent = [pattern for pattern in named if not list((ROOT / "tests").glob(pattern))
              and not list((ROOT / "tests/support").glob(pattern))]
    assert not missing and not absent


def test_the_docker_file_copies_what_the_package_needs_and_runs_the_demo() -> None:
    """It cannot be built here. Its files are there, all packages among them, and its command is one of ours."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert all((ROOT / name).exists() for name in copied)
    assert copied == {"pyproject.toml", "README.md", "LICENSE", *(name.rstrip("*") for name in packages)}
    assert lines[-1] == 'CMD ["autoparallel", "demo"]'
