"""`autoparallel.init`: process group, device and mesh of this process, whoever started it."""

from __future__ import annotations

import atexit
import logging
import math
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoparallel.errors import LaunchError, MeshError, shown
from autoparallel.kernels.groups import destroy_groups, ordered_mesh, say_here, say_leaving
from autoparallel.launch.environment import Identity, identity_of, is_scheduler, tasks_beside_srun
from autoparallel.launch.meeting import of_attempt, store_of
from autoparallel.launch.replanned import replanned
from autoparallel.plans import Plan

_LOG = logging.getLogger("autoparallel")
#: The plan file that `autoparallel launch` gives to the ranks.
PLAN_FILE = "AUTOPARALLEL_PLAN"
#: Set where the number of ranks may change: the plan file counts for the number that it is for.
ELASTIC = "AUTOPARALLEL_ELASTIC"
#: The plan's model, where other numbers of ranks get a plan of their own.
MODEL = "AUTOPARALLEL_MODEL"
MOST_TIMEOUT_S = 1e6


@dataclass(frozen=True)
class World:
    """This process in its job. ``launcher``: who started it ("alone": nobody; "unknown": the group was there before).

    ``rank``, ``size``: its number in the job, and the number of processes; ``local_rank``, ``local_size``: those on its
    host. ``device``: where its tensors belong.
    ``mesh``: all devices of the job, with the axes asked for, the plan's, or one called "devices". ``plan``: the one
    given, to pass to `autoparallel.compile`.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    mesh: DeviceMesh
    plan: Plan | None = None


def init(mesh_shape: Sequence[int] | None = None, axis_names: Sequence[str] | None = None, *,
         plan: Plan | str | Path | None = None, launcher: str | None = None, device: str | None = None,
         backend: str | None = None, timeout_s: float = 600.0) -> World:
    """Set up the process group, this rank's device and a mesh, as the launcher's environment says.

    The same script runs under torchrun, mpirun (Open MPI, MPICH, Intel MPI, MVAPICH), srun, msrun, Ray Train, and alone
    (one rank). Also sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which other
    libraries read. A process group that is there already is kept. Groups are destroyed when the script ends.

    mesh_shape, axis_names: the mesh's axes, slowest links first; None: the plan's, or one axis. Devices are laid out
        host after host, however the launcher numbered the ranks.
    plan: a plan or its file; None: the file that ``autoparallel launch plan.json`` names. With ``--min-ranks`` or
        ``--min-nodes`` it counts while there are as many ranks as its devices; then a new one (``--model``), or none
        and one axis.
    launcher: the one that counts where several describe this process: torchrun, openmpi, mpich, mvapich, slurm, msrun.
    device: "cpu" or "cuda"; None: "cuda" where there is one.
    backend: as of torch's init_process_group; None: gloo, and NCCL for tensors on GPUs.
    timeout_s: of the start and of each collective.

    Raises LaunchError if the environment describes no rank, or two; MeshError for a mesh of another number of devices.
    """
    if is_scheduler(os.environ):
        _LOG.info("msrun's scheduler process runs no training: it ends")
        raise SystemExit(0)
    kind = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    if not isinstance(kind, str) or kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise LaunchError(f"device is {shown(device)}: 'cpu', or 'cuda' where torch finds a GPU, is required")
    _check(launcher, backend, timeout_s)
    identity = identity_of(os.environ, launcher)
    size = _size(identity)
    chosen = _plan_of(plan, size)
    replans = plan is None and chosen is None and mesh_shape is None and axis_names is None and (
        {PLAN_FILE, MODEL} <= os.environ.keys())
    shape, names = _axes(mesh_shape, axis_names, chosen, size)
    local_rank, local_size = _join(identity, kind, backend, timedelta(seconds=timeout_s))
    if replans:
        chosen = replanned(os.environ[PLAN_FILE], os.environ[MODEL], size)
        shape, names = _axes(None, None, chosen, size)
    mine = torch.device("cpu") if kind == "cpu" else torch.device("cuda", torch.cuda.current_device())
    _leave_at_exit()
    name = identity.launcher if identity else "alone" if dist.get_world_size() == 1 else "unknown"
    return World(name, dist.get_rank(), dist.get_world_size(), local_rank, local_size, mine,
                 _mesh(kind, shape, names, chosen.devices if chosen is not None else ()), chosen)


def _mesh(kind: str, shape: tuple[int, ...], names: tuple[str, ...] | None, devices: Sequence[int] = ()
          ) -> DeviceMesh:
    """The mesh, host after host: where a launcher deals ranks out in another way (mpirun --map-by node, srun
    --distribution=cyclic), the last axes, with the fastest links, still lie within hosts. ``devices``: their numbers in
    this order at each place of the mesh (`Plan.devices`); empty: as they are."""
    hosts = [""] * dist.get_world_size()
    if len(hosts) > 1:
        dist.all_gather_object(hosts, socket.gethostname())
    order = sorted(range(len(hosts)), key=lambda rank: hosts.index(hosts[rank]))
    order = [order[device] for device in devices] if devices else order
    if order == list(range(len(hosts))):
        return init_device_mesh(kind, shape, mesh_dim_names=names)
    why = "the plan has equal hosts side by side" if devices else "ranks of a host do not follow one another"
    _LOG.info("%s: the mesh takes them in the order %s", why, order)
    return ordered_mesh(kind, order, shape, names or [f"axis{number}" for number in range(len(shape))])


def _check(launcher: Any, backend: Any, timeout_s: Any) -> None:
    for name, value in (("launcher", launcher), ("backend", backend)):
        if value is not None and not isinstance(value, str):
            raise LaunchError(f"{name} is {shown(value)}: give its name, or None")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= MOST_TIMEOUT_S:
        raise LaunchError(f"timeout_s is {shown(timeout_s)}: give seconds, above 0 and at most {MOST_TIMEOUT_S:g}")


@cache
def _leave_at_exit() -> None:
    """Destroy the process groups when the script has come to its end: their threads must not outlive the interpreter.
    Not after an uncaught error, since others may still wait in a collective."""

    def leave() -> None:
        if getattr(sys, "last_value", None) is None:
            say_leaving()
            destroy_groups()

    atexit.register(leave)


def _plan_of(plan: Plan | str | Path | None, size: int) -> Plan | None:
    given = plan if plan is not None else os.environ.get(PLAN_FILE)
    found = given if given is None or isinstance(given, Plan) else Plan.load(given)
    if plan is None and found is not None and math.prod(found.axes[0]) != size and ELASTIC in os.environ:
        if MODEL not in os.environ:
            _LOG.warning("the plan %s is for %d devices, and there are %d ranks now: world.plan is None, and the mesh "
                         "has one axis", given, math.prod(found.axes[0]), size)
        return None
    return found


def _size(identity: Identity | None) -> int:
    """The number of ranks. Raises LaunchError if a process group that is there already says otherwise, and for a number
    of ranks without this one's."""
    if not dist.is_initialized():
        if identity is None and os.environ.get("WORLD_SIZE", "1") != "1":
            raise LaunchError(f"WORLD_SIZE is {shown(os.environ['WORLD_SIZE'])} and no rank (RANK) is set: each "
                              "process would train alone. Start them by a launcher, as torchrun, set "
                              "RANK, or unset WORLD_SIZE")
        if identity is None and (tasks := tasks_beside_srun(os.environ) or 1) > 1:
            _LOG.warning("this process runs alone, and its Slurm job has %d tasks: srun python ... starts them", tasks)
        return identity.size if identity else 1
    rank, size = dist.get_rank(), dist.get_world_size()
    if identity and (identity.rank, identity.size) != (rank, size):
        raise LaunchError(f"{identity.launcher} says rank {identity.rank} of {identity.size}, and the process group "
                          f"that is there already rank {rank} of {size}: call autoparallel.init() before others make "
                          "a group, or unset the launcher's variables")
    return size


def _axes(shape: Sequence[int] | None, names: Sequence[str] | None, plan: Plan | None, size: int
          ) -> tuple[tuple[int, ...], tuple[str, ...] | None]:
    for name, value, parts in (("mesh_shape", shape, int), ("axis_names", names, str)):
        if value is not None and not (isinstance(value, list | tuple | torch.Size) and all(
                isinstance(part, parts) and not isinstance(part, bool) for part in value)):
            raise MeshError(f"{name} is {shown(value)}: give a tuple, for example (2, 4) and ('data', 'model')")
    if shape is None:
        if names is not None:
            raise MeshError(f"axis_names are {shown(names)}: give mesh_shape, their sizes, too")
        shape, names = ((size,), ("devices",)) if plan is None else plan.axes
    elif plan is not None and tuple(shape) != plan.axes[0]:
        raise MeshError(f"mesh_shape is {tuple(shape)} and the plan's {plan.axes[0]}: leave it out")
    if math.prod(shape) != size or (names is not None and len(names) != len(shape)):
        raise MeshError(f"a mesh of {tuple(shape)} with the axes {names and tuple(names)} has {math.prod(shape)} "
                        f"devices, and {size} processes were started: as many processes as devices, and a name for "
                        "each axis, are required")
    return tuple(shape), None if names is None else tuple(names)


def _join(identity: Identity | None, kind: str, backend: str | None, timeout: timedelta) -> tuple[int, int]:
    """Make the process group unless there is one, and pick the device; returns local rank and size."""
    backend = backend or ("gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl")
    if identity is None:
        _pick_device(kind, int(os.environ.get("LOCAL_RANK", "0")))
        if not dist.is_initialized():
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return 0, 1
    os.environ.update(identity.variables)
    store = None
    if not dist.is_initialized():
        store = store_of(identity, timeout)
    local = _on_host(identity, store)
    os.environ.update(LOCAL_RANK=str(local[0]), LOCAL_WORLD_SIZE=str(local[1]))
    _pick_device(kind, local[0])
    if store is not None:
        dist.init_process_group(backend, store=of_attempt(store), rank=identity.rank, world_size=identity.size,
                                timeout=timeout)
        assert dist.group.WORLD is not None
        say_here(dist.group.WORLD.get_group_store(), identity.rank)
    return local


def _on_host(identity: Identity, store: dist.Store | None) -> tuple[int, int]:
    """Rank and size on this host: as the launcher says, else counted by host names."""
    if identity.local_rank is not None and identity.local_size is not None:
        return identity.local_rank, identity.local_size
    hosts: list[str] = [""] * identity.size
    if store is None:
        dist.all_gather_object(hosts, socket.gethostname())
    else:
        store.set(f"host of {identity.rank}", socket.gethostname())
        hosts = [store.get(f"host of {rank}").decode() for rank in range(identity.size)]
    mine = [rank for rank, host in enumerate(hosts) if host == hosts[identity.rank]]
    local_rank = mine.index(identity.rank) if identity.local_rank is None else identity.local_rank
    return local_rank, len(mine)


def _pick_device(kind: str, local_rank: int) -> None:
    """Make the GPU of this rank current: the one of its number, or the only one that it sees."""
    if kind != "cuda":
        return
    count = torch.cuda.device_count()
    if local_rank >= count > 1:
        raise LaunchError(f"this is rank {local_rank} on its host, which has {count} GPUs: start at most one process a "
                          "GPU")
    torch.cuda.set_device(local_rank if local_rank < count else 0)


__all__ = ["ELASTIC", "MODEL", "PLAN_FILE", "World", "init"]
