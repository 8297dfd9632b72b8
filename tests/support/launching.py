"""Processes that launchers start, the scripts of the guides, and their results in one process."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from autoparallel.launch.environment import FAMILIES

ROOT = Path(__file__).parents[2]


def clean_environment() -> dict[str, str]:
    """This process's environment without any launcher's variables, and with the project on the path."""
    names = {name for family in FAMILIES for name in (*family.rank, *family.size, *family.local_rank)}
    kept = {name: value for name, value in os.environ.items()
            if name not in names and not name.startswith(("MASTER_", "TORCHELASTIC", "SLURM", "AUTOPARALLEL"))}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def output_of(command: list[str], **more: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env={**clean_environment(), **more})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def guide(page: str, number: int = 0) -> str:
    """A Python script of a guide."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides" / page).read_text(), re.S)[number]


def guides_model() -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """The guide's model and batch, made by its own lines."""
    names: dict[str, Any] = {}
    lines = guide("launch.md").replace("world = autoparallel.init()", "").split("parallel = ")[0]
    exec(compile(lines, "launch.md", "exec"), names)
    return names["model"], names["batch"]


@functools.cache
def loss_of_one_process() -> str:
    """The loss of the launchers' guide after its three steps, without autoparallel."""
    model, batch = guides_model()
    for _ in range(3):
        model.zero_grad()
        loss = model(*batch)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    return f"{float(loss.detach()):.6f}"


def mpirun_of(kind: str) -> list[str]:
    """The command of one MPI, by what ``--version`` of the ones there says; skips where it is not installed."""
    for name in ("mpirun", f"mpirun.{'openmpi' if kind == 'Open MPI' else 'mpich'}"):
        if path := shutil.which(name):
            said = subprocess.run([path, "--version"], capture_output=True, text=True, env=clean_environment()).stdout
            if ("Open MPI" if kind == "Open MPI" else "HYDRA") in said:
                return [path, *(["--oversubscribe"] if kind == "Open MPI" else [])]
    pytest.skip(f"{kind} is not installed (Debian: apt-get install openmpi-bin mpich)")
