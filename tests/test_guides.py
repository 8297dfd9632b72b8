"""The scripts of the guides run as they stand, on several ranks and in one process, with the same numbers."""

from __future__ import annotations

import doctest
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autoparallel.cli import app
from tests.support.launching import ROOT, guide, output_of
from tests.support.tiers import slow

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(("page", "number", "several"), [
    ("transformers.md", 0, "2"), slow("transformers.md", 0, "4"), slow("transformers.md", 1, "4"),
    slow("lightning.md", 0, "4"), slow("lightning.md", 1, "4"), slow("export.md", 0, "4"), slow("inference.md", 0, "4"),
    slow("offload.md", 0, "4"), slow("parameter-servers.md", 0, "4"), slow("checking.md", 0, "4")])
def test_a_guides_script(page: str, number: int, several: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in {"transformers.md": ("accelerate", "transformers"), "lightning.md": ("lightning",)}.get(page, ()):
        pytest.importorskip(needed)
    script = tmp_path / "train.py"
    script.write_text(guide(page, number))
    lines = []
    for ranks in (several, "1"):
        folder = tmp_path / ranks
        folder.mkdir()
        monkeypatch.chdir(folder)
        command = [sys.executable, str(script)] if ranks == "1" else [
            sys.executable, "-m", "autoparallel", "launch", "--ranks", ranks, "--", sys.executable, str(script)]
        lines.append(next(line for line in output_of(command).splitlines() if "final" in line))
    many, one = ([float(word) for word in line.split()[1:]] for line in lines)
    assert len(many) >= 1 and many == pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize("number", [slow(0), 1])
def test_commands_print_what_the_guide_to_sizes_says(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for spaces at the ends of lines."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/guides/sizing.md").read_text()
    command, printed = re.findall(r"```bash\nautoparallel (.*?)\n```\n\n```text\n(.*?)\n```", page, re.S)[number]
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, (done.output, done.exception)
    assert [line.rstrip() for line in done.stdout.splitlines()] == printed.splitlines()


def test_figures_of_the_guide_to_offloaded_states() -> None:
    failed, tried = doctest.testfile(str(ROOT / "docs/guides/offload.md"), module_relative=False)
    assert failed == 0 and tried
