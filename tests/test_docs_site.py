"""The documentation's site: it builds without network, and its picture of the rooms is that of the imports."""

from __future__ import annotations

import re
from pathlib import Path

import networkx as nx
import pytest
from typer.main import get_command

from autoparallel.cli import app
from tests.support.sources import LEVEL, ROOT, imports_of, room_of

EVERYWHERE = {"axis_names", "clock", "errors", "garbage"}


def rooms() -> nx.DiGraph:
    """Imports between rooms without those that others imply."""
    found = nx.DiGraph()
    for room in LEVEL.keys() - EVERYWHERE:
        found.add_node(room)
        home = ROOT / "autoparallel" / room
        for path in home.rglob("*.py") if home.is_dir() else [home.with_suffix(".py")]:
            found.add_edges_from((room, to) for one in imports_of(path)
                                 if (to := room_of(one.module)) not in ("", room, *EVERYWHERE))
    return nx.transitive_reduction(found)


def test_the_picture_shows_the_imports() -> None:
    picture = re.search(r"```mermaid\ngraph TD\n(.*?)```", (ROOT / "docs/architecture.md").read_text(), re.S)
    assert picture
    expected = rooms()
    lines = {f"    {a} --> {b}" for a, b in expected.edges} | {f"    {room}" for room in nx.isolates(expected)}
    said = "\n".join(sorted(lines, key=lambda line: (LEVEL[line.split()[0]], line)))
    assert set(picture.group(1).splitlines()) == lines, f"docs/architecture.md should say:\n{said}"


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("material")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    search = (tmp_path / "concepts/search/index.html").read_text()
    assert "the plan of least cost that fits" in search and (tmp_path / "index.html").read_text().count("demo")
    for page in tmp_path.rglob("*.html"):
        outside = re.findall(r'(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert not [link for link in outside if not link.startswith(("https://squidfunk", "https://www.mkdocs"))], page


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs/concepts/cli.md").read_text()
    assert set(re.findall(r"^\| `(.*?)` \|", page, re.M)) == set(get_command(app).commands)  # type: ignore[attr-defined]
