"""A plan for the ranks that a job has now, made by ``autoparallel replan`` in a process of its own."""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from autoparallel.plans import Plan

_LOG = logging.getLogger("autoparallel")
_KEY = "autoparallel/plan of {} ranks"
#: How long the other ranks wait for the plan; a launcher ends them where rank 0 fails.
LONGEST_WAIT = timedelta(hours=1)


def replanned(plan: str, model: str, ranks: int) -> Plan | None:
    """The plan for all ``ranks`` by which a job of several hosts goes on from a checkpoint, the same on all of them,
    made on rank 0. None where none is found.

    plan: the file of the plan for another number of ranks. model: as for ``autoparallel plan``.
    """
    assert dist.group.WORLD is not None
    store, key = dist.group.WORLD.get_group_store(), _KEY.format(ranks)
    if dist.get_rank() == 0 and not store.check([key]):
        store.set(key, new_plan(plan, model, ranks, "--all-devices"))
    store.wait([key], LONGEST_WAIT)
    text = store.get(key).decode()
    return Plan.from_json(text) if text else None


def new_plan(plan: str, model: str, ranks: int, *options: str) -> str:
    """The plan for at most ``ranks`` ranks by which a job goes on from a checkpoint, as JSON; "" where there is none.
    Either is logged. ``options``: of the command."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        done = subprocess.run([sys.executable, "-m", "autoparallel", "replan", plan, model, "--devices", str(ranks),
                               "--from-checkpoint", "--output", str(file), *options],
                              capture_output=True, text=True)
        if done.returncode == 0:
            _LOG.warning("a new plan in place of %s: %s", plan, done.stdout.partition("\n")[0])
            return file.read_text()
    _LOG.warning("no new plan in place of %s for %d ranks: world.plan is None, and the mesh has one axis\n%s", plan,
                 ranks, done.stderr.strip())
    return ""


__all__ = ["new_plan", "replanned"]
