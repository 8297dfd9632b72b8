"""Names and fields from models and files reach the terminal as text: no markup, no emoji, no escape codes."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import autoparallel
from autoparallel.cli import main
from autoparallel.errors import printable
from autoparallel.plans.reports.build import report_of
from autoparallel.plans.reports.report import Collectives
from autoparallel.plans.reports.text import ReportConsole, as_text, print_report

HOSTILE = ["[/red]", "[bold red]x[/bold red]", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", ":smile:", "a\rb", "\u202egnp"]


class Named(nn.Module):
    """A model with a part of this name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name.replace(".", "_"), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return next(self.children())(x)


def _plan(name: str = "part") -> autoparallel.Plan:
    return autoparallel.plan(Named(name), autoparallel.Cluster.load("h100-sxm", num_devices=2),
                             example_inputs=(torch.zeros(8, 4),), mesh_shape=(2,))


@pytest.mark.parametrize("name", HOSTILE)
def test_item_18_hostile_names_are_shown_as_they_are(name: str) -> None:
    made = dataclasses.replace(_plan(name), cluster=name, axis_names=(name,), pins={name: name})
    file = io.StringIO()
    print_report(report_of(made), ReportConsole(file=file, force_terminal=True, width=200, color_system=None))
    for text in (made.report(), file.getvalue()):
        assert printable(name) in text
        assert not any(c in text.replace("\x1b[1m", "").replace("\x1b[0m", "") for c in "\x1b\x07\r\u202e")


def test_item_18_errors_on_the_command_line_are_plain_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["autoparallel", "plan", "no\x1b[31mmodule:made", "--mesh", "2"])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert "no\\x1b[31mmodule" in said and "\x1b" not in said


def test_digits_that_are_no_numbers_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
                                                ) -> None:
    monkeypatch.setattr("sys.argv", ["autoparallel", "plan", "some:factory", "--mesh", "²x2"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and "cannot read the mesh '²x2'" in capsys.readouterr().err


def test_other_encodings_get_help(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", written)
    monkeypatch.setattr("sys.argv", ["autoparallel", "plan", "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    written.flush()
    assert not end.value.code and b"--sequence-length" in written.buffer.getvalue()


class Full(io.StringIO):
    """A file on a disk without room."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_disk_is_told_in_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    _plan().save(tmp_path / "plan.json")
    monkeypatch.setattr("sys.argv", ["autoparallel", "show", str(tmp_path / "plan.json"), *options])
    monkeypatch.setattr("sys.stdout", Full())
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: the output could not be written: No space left on device\n"


def test_exit_codes_are_the_same_where_no_error_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``autoparallel diff a.json b.json > log 2>&1`` on a full disk has not found that plans differ (1)."""
    _plan().save(tmp_path / "plan.json")
    for other in ("plan.json", "none.json"):
        monkeypatch.setattr("sys.argv", ["autoparallel", "diff", *(str(tmp_path / n) for n in ("plan.json", other))])
        monkeypatch.setattr("sys.stdout", Full())
        monkeypatch.setattr("sys.stderr", Full())
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2


def test_terminals_without_a_size_are_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    report, file = report_of(_plan()), io.StringIO()
    print_report(report, ReportConsole(file=file))
    assert file.getvalue() == as_text(lambda console: print_report(report, console), 80)


@pytest.mark.parametrize("width", [80, 50])
def test_narrow_tables_are_wrapped_and_not_cut_off(width: int) -> None:
    uses = tuple(Collectives("activations", kind, "data-outer", "forward", 1, 1e9, 1e-3)
                 for kind in ("reduce_scatter", "all_to_all in dispatch"))
    report = dataclasses.replace(report_of(_plan("layer")), collectives=uses)
    said = as_text(lambda console: print_report(report, console), width)
    assert "\u2026" not in said and max(map(len, said.split("\n"))) <= width
    assert ("reduce_scatter" in said and "in dispatch" in said) or width < 80
