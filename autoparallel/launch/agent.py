"""Starts a command on local ranks by torchrun's agent, with a plan. The one file that touches torchrun."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from autoparallel.errors import LaunchError
from autoparallel.launch.world import PLAN_FILE
from autoparallel.plans import Plan


def run_command(command: Sequence[str], *, plan: Path | None = None, ranks: int | None = None, nodes: int = 1,
                node_rank: int = 0, master: str | None = None, max_restarts: int = 0) -> bool:
    """Run ``command`` on ``ranks`` processes of this host, each with torchrun's variables; whether all succeeded.

    plan: its file; `autoparallel.init` reads it on each rank.
    ranks: on this host; None: the plan's devices over the hosts, else a process a GPU, or one.
    nodes, node_rank, master: hosts of the job, this one's number, and ``host:port`` of the first.
    max_restarts: how often all ranks are started again after one failed.

    Raises LaunchError for a command that is not there, or ranks that do not fit the plan; PlanError for the plan.
    """
    if not command or shutil.which(command[0]) is None:
        raise LaunchError(f"cannot start {command[0] if command else 'nothing'}: write a command after --, as in "
                          "autoparallel launch plan.json -- python train.py")
    if nodes > 1 and master is None:
        raise LaunchError(f"{nodes} hosts need --master host:port, the address of the first one, the same on all")
    count = _count(plan, ranks, nodes)
    if plan is not None:
        os.environ[PLAN_FILE] = str(plan.resolve())
    host, _, port = (master or "").partition(":")
    where = ["--standalone"] if nodes == 1 else [
        f"--nnodes={nodes}", f"--node-rank={node_rank}", f"--master-addr={host}", f"--master-port={port or 29500}"]
    # "--": torchrun takes an argument of the command for its own if it begins like one of its own (--log, --run)
    return _torchrun([*where, f"--nproc-per-node={count}", f"--max-restarts={max_restarts}", "--no-python", "--",
                      *command])


def _count(plan: Path | None, ranks: int | None, nodes: int) -> int:
    """Processes to start on this host: ``ranks``; else the plan's devices by hosts, or without a plan one per GPU.
    Raises LaunchError if they do not make up the plan's devices."""
    import torch

    if plan is None:
        return ranks if ranks is not None else max(1, torch.cuda.device_count())
    devices = math.prod(Plan.load(plan).axes[0])
    if ranks is None and devices % nodes == 0:
        ranks = devices // nodes
    if ranks is None or ranks * nodes != devices:
        raise LaunchError(f"the plan {plan} is for {devices} devices, and {nodes} hosts with {ranks or 'as many'} "
                          f"processes each were asked for: together they must be {devices}")
    return ranks


def _torchrun(arguments: list[str]) -> bool:
    """torchrun with these arguments. Raises no error if a rank failed: the agent has printed which and why."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        print(error)
        return False
    return True


__all__ = ["run_command"]
