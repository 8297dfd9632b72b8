"""Starts a command on local ranks by torchrun's agent, with a plan. The one file that touches torchrun."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from autoparallel.errors import LaunchError
from autoparallel.launch import host_list
from autoparallel.launch.elastic import Failed, keep_running
from autoparallel.launch.replanned import new_plan
from autoparallel.launch.roll_call import RollCall
from autoparallel.launch.world import ELASTIC, MODEL, PLAN_FILE
from autoparallel.plans import Plan

#: Rank 0 makes the ranks' store anew after each change of hosts: of a store that the agents share, torch 2.13 tells
#: hosts that come later no address.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def run_command(command: Sequence[str], *, plan: Path | None = None, ranks: int | None = None, nodes: int = 1,
                node_rank: int = 0, master: str | None = None, max_restarts: int = 0, min_ranks: int | None = None,
                min_nodes: int | None = None, join_timeout_s: float = 600.0, model: str | None = None) -> bool:
    """Run ``command`` on ``ranks`` processes of this host, each with torchrun's variables; whether all succeeded.

    plan: its file; `autoparallel.init` reads it on each rank.
    ranks: on this host; None: the plan's devices over the hosts, else a process a GPU, or one.
    nodes, node_rank, master: hosts of the job, this one's number, and ``host:port`` of the first, or of their list
        (``autoparallel host-list``), with min_nodes.
    max_restarts: how often all ranks are started again after one failed.
    min_ranks: of one host: where a signal ends ranks, the others start again without them, if so many are left.
    min_nodes: of several hosts: the job starts, and goes on, with so many of them.
    join_timeout_s: how long hosts wait for each other before the start.
    model: the plan's, as for ``autoparallel plan``: of which other numbers of ranks get a new plan, with min_ranks
        perhaps for fewer than are left. None, or no plan found: `autoparallel.init` has no plan then.

    Raises LaunchError for a command that is not there, or ranks that do not fit the plan; PlanError for the plan.
    """
    if not command or shutil.which(command[0]) is None:
        raise LaunchError(f"cannot start {command[0] if command else 'nothing'}: write a command after --, as in "
                          "autoparallel launch plan.json -- python train.py")
    if nodes > 1 and master is None:
        raise LaunchError(f"{nodes} hosts need --master host:port, the address of the first one, the same on all")
    if nodes == 1 and master is not None:
        raise LaunchError(f"--master {master} is where several hosts meet, and there is one: give --nodes, the number "
                          "of hosts, or leave it out")
    if node_rank >= nodes and min_nodes is None:
        raise LaunchError(f"--node-rank is {node_rank} and --nodes {nodes}: give --nodes, the number of hosts, and on "
                          "each another number from 0 on")
    count = _count(plan, ranks, nodes)
    _check_elastic(count, nodes, min_ranks, min_nodes)
    if plan is not None:
        os.environ[PLAN_FILE] = str(plan.resolve())
    if min_ranks is not None or min_nodes is not None:
        os.environ[ELASTIC] = "1"
    if min_nodes is not None:
        os.environ[OWN_STORE] = "1"
        if model is not None:
            os.environ[MODEL] = model
    # "--": torchrun takes an argument of the command for its own if it begins like one of its own (--log, --run)
    rest = ["--no-python", "--", *command]
    if min_ranks is None:
        where, store, listed = ["--standalone"], None, False
        if nodes > 1:
            call = _roll_call(nodes, min_nodes or nodes, node_rank, master, join_timeout_s)
            store = call.hold()
            listed = host_list.is_list(store)
            where = _hosts(call, min_nodes, listed)
        done = not _torchrun([*where, f"--nproc-per-node={count}", f"--max-restarts={max_restarts}", *rest])
        if store is not None and listed:
            host_list.end(store)
        del store                                        # host 0 serves the job's store until here
        return done

    def left(ranks: int, lost: Sequence[int]) -> int:
        made = new_plan(os.environ[PLAN_FILE], model, ranks) if plan is not None and model is not None else ""
        if not made:
            return ranks
        file = Path(folder) / f"plan-of-{ranks}.json"
        file.write_text(made)
        os.environ[PLAN_FILE] = str(file)
        return math.prod(Plan.from_json(made).axes[0])

    with TemporaryDirectory() as folder:
        return keep_running(lambda ranks: _torchrun(["--standalone", f"--nproc-per-node={ranks}", *rest]), count,
                            min_ranks, max_restarts, left)


def _roll_call(nodes: int, least: int, number: int, master: str | None, timeout_s: float) -> RollCall:
    """Raises LaunchError for a ``master`` that is no address."""
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(?::(\d{1,5}))?", master or "")
    if found is None or not 0 < (port := int(found[2] or 29500)) < 2**16:
        raise LaunchError(f"--master is {master}: write host:port, for example host0:29500")
    return RollCall(found[1].strip("[]"), port, nodes, number, least, timeout_s)


def _hosts(call: RollCall, min_nodes: int | None, listed: bool) -> list[str]:
    """torchrun's arguments for the hosts of the job. ``listed``: their list is on another machine. Raises LaunchError
    for a list of hosts that all have to stay."""
    if listed and min_nodes is None:
        raise LaunchError(f"--master {call.master} is a list of hosts (autoparallel host-list), of jobs that go on "
                          "without some: give --min-nodes, the fewest hosts that go on; or the address of host 0")
    if min_nodes is None:
        return [f"--nnodes={call.nodes}", f"--node-rank={call.number}", f"--master-addr={call.host}",
                f"--master-port={call.port}"]
    return [f"--nnodes={min_nodes}:{call.nodes}", "--rdzv-backend=c10d", "--rdzv-id=autoparallel",
            f"--rdzv-endpoint={call.master}", f"--rdzv-conf=is_host={int(call.number == 0 and not listed)}"]


def _check_elastic(ranks: int, nodes: int, min_ranks: int | None, min_nodes: int | None) -> None:
    """Raises LaunchError for fewest ranks, or hosts, that are more than there are, or of another kind of job."""
    if min_ranks is not None and nodes > 1:
        raise LaunchError(f"--min-ranks {min_ranks} is of one host, and there are {nodes}: give --min-nodes, the "
                          "fewest hosts that go on")
    if min_nodes is not None and nodes == 1:
        raise LaunchError(f"--min-nodes {min_nodes} is of several hosts, and there is one: give --min-ranks, the "
                          "fewest ranks that go on")
    for name, least, most in (("--min-ranks", min_ranks, ranks), ("--min-nodes", min_nodes, nodes)):
        if least is not None and not 1 <= least <= most:
            raise LaunchError(f"{name} is {least}: give a number from 1 to {most}, with which the job starts")


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
        asked = f"{nodes} host{'s' * (nodes != 1)} with {ranks or 'as many'} process{'es' * (ranks != 1)} each"
        instead = f"--ranks {devices // nodes}, or leave it out" if devices % nodes == 0 else (
            f"--nodes, a number that divides {devices}")
        if ranks is not None and nodes == 1 and devices % ranks == 0:
            instead += f"; for {ranks} on each of {devices // ranks} hosts, --nodes {devices // ranks} on each of them"
        raise LaunchError(f"the plan {plan} is for {devices} devices, and {asked} were asked for: give {instead}")
    return ranks


def _torchrun(arguments: list[str]) -> list[Failed]:
    """torchrun with these arguments; the ranks of this host that failed, for which the agent has printed why. Exits as
    a signal does that ends this process (a platform's preemption, Ctrl-C), for which the agent ends the ranks first."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(arguments))
    except SignalException as error:
        said = f"autoparallel launch: {error.sigval.name} has ended the job, and all ranks of this host"
        print(said, file=sys.stderr, flush=True)
        raise SystemExit(128 + error.sigval) from None
    except ChildFailedError as error:
        print(error)
        return [Failed(one.local_rank, one.exitcode) for one in error.failures.values()]
    return []


__all__ = ["run_command"]
