"""Files are written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

import autoparallel
from autoparallel.cli import main
from autoparallel.errors import PlanError
from cost_models.files import write_whole


def _plan() -> autoparallel.Plan:
    return autoparallel.plan(torch.nn.Linear(4, 4), autoparallel.Cluster.load("h100-sxm", num_devices=2),
                             example_inputs=(torch.zeros(8, 4),), mesh_shape=(2,))


def test_item_13_a_full_disk_leaves_the_plan_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, path = _plan(), tmp_path / "plan.json"
    made.save(path)
    before = path.read_text()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlanError, match="No space left on device"):
        made.save(path)
    assert path.read_text() == before and [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_links_are_followed_and_modes_kept(tmp_path: Path) -> None:
    real, link = tmp_path / "real.txt", tmp_path / "link.txt"
    real.write_text("before")
    real.chmod(0o640)
    link.symlink_to(real)
    write_whole(link, "after")
    assert link.is_symlink() and real.read_text() == "after" and stat.S_IMODE(real.stat().st_mode) == 0o640


FACTORY = """
import torch
def made(batch, sequence):
    return torch.nn.Linear(4, 4), (torch.zeros(batch, 4),), {}
"""


def test_item_13_the_cli_saves_its_plan_before_what_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "factory_of_a_layer.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["autoparallel", "plan", "factory_of_a_layer:made", "--devices", "2",
                                     "--global-batch", "8", "--output", "plan.json", "--by-hand", "dp=2",
                                     "--alternatives", "1"])
    with pytest.raises(SystemExit):
        main()
    assert autoparallel.Plan.load(tmp_path / "plan.json").mesh_shape == (2,)
