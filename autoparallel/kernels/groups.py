"""Mesh axes at run time: process group, size and rank of an axis name.

Emitted programs name axes; `bind` resolves the names on a mesh. The one file that asks torch for process groups.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    GroupName,
    _register_process_group,
    _resolve_process_group,
    _unregister_process_group,
)

from autoparallel.errors import MeshError
from autoparallel.kernels.bucket_memory import BucketMemory
from autoparallel.layout.redistribution import Axes, name_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Axis:
    """One mesh axis as this rank sees it. ``group_name``: its `common_name`; ``buckets``: memory of the gradients
    reduced along it."""

    name: str
    size: int
    rank: int
    group_name: str
    buckets: BucketMemory = field(default_factory=BucketMemory, compare=False, repr=False)


_current: ContextVar[Mapping[str, Axis] | None] = ContextVar("axes", default=None)


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """The mesh's own axis names, or axis0, axis1, ... when it has none."""
    return tuple(mesh.mesh_dim_names or (f"axis{i}" for i in range(mesh.ndim)))


def bind(mesh: DeviceMesh) -> dict[str, Axis]:
    """The axes of a mesh for this rank.

    Raises MeshError when there is no process group, or this rank is not on the mesh.
    """
    if not dist.is_initialized():
        raise MeshError("no process group: call torch.distributed.init_process_group first "
                        "(torchrun sets what it needs)")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise MeshError(f"rank {dist.get_rank()} is not on the mesh {mesh}")
    return {
        name: Axis(name, mesh.size(i), coordinate[i], common_name(mesh.get_group(i)))
        for i, name in enumerate(axis_names(mesh))
    }


#: Process group -> its name by `common_name`.
_NAMES: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
_numbers = itertools.count()


def common_name(group: dist.ProcessGroup) -> str:
    """A name of the group for torch's functional collectives, the same on all ranks that name their groups in the same
    order. (torch's own differ between the groups of one mesh axis, so that each rank would have code of its own.)"""
    if group not in _NAMES:
        name = _NAMES[group] = f"autoparallel_{next(_numbers)}"
        _register_process_group(GroupName(name), group)
        weakref.finalize(group, _unregister_process_group, GroupName(name)).atexit = False
    return _NAMES[group]


_LEFT = "autoparallel/left"


def say_here(store: dist.Store, rank: int) -> None:
    """Publish this rank's process ID to the ranks of its host, which see by it whether the process runs still (one that
    ends by os._exit, or is killed, tells nothing)."""
    with suppress(OSError, RuntimeError):  # (no /proc: not Linux)
        store.append(_processes_key(), f"{rank}:{os.getpid()} ")  # type: ignore[attr-defined]


def rank_that_ended(store: dist.Store) -> int | None:
    """A rank of this host whose process, published by `say_here`, has ended (None: none is known)."""
    with suppress(OSError, RuntimeError):
        said = store.get(_processes_key()).decode().split() if store.check([_processes_key()]) else []
        for rank, process in (map(int, one.split(":")) for one in said):
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                return rank
            except PermissionError:
                continue
    return None


def _processes_key() -> str:
    """The store's key for processes that share one PID namespace: those of a host, or of a container there."""
    return f"autoparallel/processes/{socket.gethostname()}/{Path('/proc/self/ns/pid').readlink()}"


def say_leaving() -> None:
    """Tell ranks that would make a group with this one that its script has ended: nothing else ends their wait."""
    if dist.is_initialized() and dist.group.WORLD is not None and dist.get_world_size() > 1:
        with suppress(RuntimeError):  # the process that hosts the store may have ended, too
            dist.group.WORLD.get_group_store().set(_LEFT, str(dist.get_rank()))


def rank_that_left(store: dist.Store) -> int | None:
    """A rank that has said so in this store (None: none has)."""
    with suppress(RuntimeError):
        return int(store.get(_LEFT)) if store.check([_LEFT]) else None
    return None


def destroy_groups() -> None:
    """Destroy this process's groups, if any; call it right before the process ends.

    Waits until gloo's threads have released the tensors of the last collectives. That takes the interpreter, and a
    thread that asks for it while the interpreter ends aborts the process ("terminate called without an active
    exception", torch 2.13).
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    resting, until = 0, time.monotonic() + _REST_AT_MOST_S
    while resting < 2 and time.monotonic() < until:  # a thread that only lacked the interpreter has it during a sleep
        time.sleep(0.01)
        resting = resting + 1 if _gloo_rests() else 0


_REST_AT_MOST_S = 5.0


def _gloo_rests() -> bool:
    """Whether gloo's threads wait for work; as Linux tells, and nobody elsewhere."""
    threads = [task.parent for task in Path("/proc/self/task").glob("*/comm") if _text(task) == "pt_gloo_runloop\n"]
    return all(_text(thread / "stat").rpartition(")")[2].split()[:1] in (["S"], []) for thread in threads)


def _text(path: Path) -> str:
    """A file's text; empty if its thread has just ended."""
    try:
        return path.read_text()
    except OSError:
        return ""


@dataclass(frozen=True)
class MeshPosition:
    """This rank's coordinate on the pipeline axis, and the mesh over which its stage is sharded.

    ``whole``: the mesh as given. ``mesh``: the same, without its first axis if that is the pipeline's.
    """

    whole: DeviceMesh
    mesh: DeviceMesh
    pipeline_rank: int
    pipeline_ranks: int

    @property
    def axis_names(self) -> tuple[str, ...]:
        return axis_names(self.mesh)

    @property
    def coordinate(self) -> tuple[int, ...]:
        return tuple(self.mesh.get_coordinate() or ())

    @property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        return self.whole.get_group(0) if self.pipeline_ranks > 1 else None


def position_on(mesh: DeviceMesh, pipeline_ranks: int) -> MeshPosition:
    """This rank's position; the mesh's first axis is the pipeline's if ``pipeline_ranks`` > 1.

    Raises MeshError when the first axis has another size than ``pipeline_ranks``, or this rank is not on the mesh.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if pipeline_ranks == 1:
        return MeshPosition(mesh, mesh, 0, 1)
    if mesh.size(0) != pipeline_ranks:
        raise MeshError(f"the plan has a pipeline of {pipeline_ranks} ranks and the mesh's first axis "
                        f"{mesh.size(0)}: the first axis is the pipeline's")
    names, groups = axis_names(mesh), [mesh.get_group(axis) for axis in range(mesh.ndim)]
    if mesh.ndim == 1:
        mesh = DeviceMesh.from_group([*groups, _alone()], mesh.device_type, mesh.mesh.unsqueeze(1),
                                     mesh_dim_names=(*names, "alone"))
    elif mesh.mesh_dim_names is None:
        mesh = DeviceMesh.from_group(groups, mesh.device_type, mesh.mesh, mesh_dim_names=names)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise MeshError(f"rank {dist.get_rank()} is not on the mesh {mesh}")
    return MeshPosition(mesh, mesh[axis_names(mesh)[1:]], coordinate[0], pipeline_ranks)


def joint_axis(position: MeshPosition, axes: Axes) -> tuple[Axis, dist.ProcessGroup]:
    """The ranks of several axes of a stage's mesh together, with a process group of their own, for sums (in which the
    order of ranks does not matter). All ranks of the whole mesh call this; each makes the groups of all."""
    first = position.whole.ndim - position.mesh.ndim    # a pipeline's axis comes before those of a stage
    dims = [first + axis for axis in axes]
    ranks_last = position.whole.mesh.movedim(dims, list(range(-len(dims), 0)))
    own: dist.ProcessGroup | None = None
    for ranks in ranks_last.reshape(-1, math.prod(ranks_last.shape[-len(dims):])).tolist():
        made = dist.new_group(ranks)
        own = made if dist.get_rank() in ranks else own
    assert own is not None
    return Axis(name_of(axes, position.axis_names), own.size(), own.rank(), common_name(own)), own


def ordered_mesh(kind: str, ranks: Sequence[int], shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """The mesh whose places, row by row, are these ranks in any order. All ranks call this. (torch's own DeviceMesh
    sorts the ranks of each group, so that ranks of a group and places on the mesh would differ.)"""
    from torch.distributed.device_mesh import DeviceMesh

    places = torch.tensor(list(ranks), dtype=torch.int).view(*shape)
    own = list[dist.ProcessGroup]()
    for axis in range(places.ndim):
        for column in places.movedim(axis, -1).reshape(-1, places.shape[axis]).tolist():
            made = dist.new_group(column, sort_ranks=False)
            if dist.get_rank() in column:
                own.append(made)
    if places.ndim == 1:
        return DeviceMesh.from_group(own[0], kind, mesh_dim_names=tuple(names))
    return DeviceMesh.from_group(own, kind, places, mesh_dim_names=tuple(names))


def ascends(mesh: DeviceMesh) -> bool:
    """Whether the mesh's ranks ascend along each axis, as those of a group that torch has sorted."""
    return all(bool((mesh.mesh.diff(dim=axis) > 0).all()) for axis in range(mesh.ndim))


def check_order(mesh: DeviceMesh) -> None:
    """Raises MeshError where this rank has another place in an axis's group than on the mesh, so that shards would be
    taken for others."""
    for axis, (name, place) in enumerate(zip(axis_names(mesh), mesh.get_coordinate() or (), strict=False)):
        if dist.get_rank(group := mesh.get_group(axis)) != place:
            raise MeshError(f"axis {name!r} of the mesh {mesh.mesh.tolist()} has this rank at place {place}, and its "
                            f"process group is of the ranks {dist.get_process_group_ranks(group)} in this order: give "
                            "a mesh whose ranks ascend along each axis (autoparallel.init(plan=plan) makes one in a "
                            "plan's order)")


def group_of(axis: Axis) -> dist.ProcessGroup:
    """The process group of an axis."""
    return _resolve_process_group(GroupName(axis.group_name))


def sends(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ranks of the group can send each other tensors on this device. gloo reads memory of the CPU only: its
    send of GPU memory ends the process."""
    kind = torch.device(device.type)
    return kind.type == "cpu" or kind not in group._device_types or group._get_backend(kind).name() != "gloo"


def apart() -> dist.ProcessGroup | None:
    """A new gloo group of all ranks, for messages apart from the programs' collectives, which do not wait for a device;
    None if the default process group sends the CPU's tensors by something else. All ranks call this."""
    world, cpu = dist.group.WORLD, torch.device("cpu")
    if world is None or not dist.is_gloo_available():
        return None
    devices = [cpu] if cpu in world._device_types else world._device_types    # of NCCL alone there is none for the CPU
    backend = world._get_backend(devices[0])
    if devices == [cpu] and backend.name() != "gloo":
        return None
    try:
        return dist.new_group(backend="gloo", timeout=getattr(getattr(backend, "options", None), "_timeout", None))
    except RuntimeError as error:
        raise MeshError("gloo, by which ranks compare their calls, cannot connect them: a rank has ended, or has not "
                        "come so far (look at the first error of all ranks), or hosts need GLOO_SOCKET_IFNAME, set on "
                        f"each to its network interface\n  {str(error).splitlines()[0]}") from error


#: Default process group -> the group of this rank alone.
_ALONE: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def _alone() -> dist.ProcessGroup:
    """The group of this rank alone, made once. All ranks call this."""
    world = dist.group.WORLD
    assert world is not None
    if world not in _ALONE:
        _ALONE[world] = dist.new_subgroups(1)[0]
    return _ALONE[world]


def release(groups: Sequence[dist.ProcessGroup]) -> None:
    """Destroy process groups of this rank's, with their threads and connections, unless they are already."""
    if dist.is_initialized():
        for group in groups:
            if group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)


@contextmanager
def use(axes: Mapping[str, Axis]) -> Iterator[None]:
    """Make these axes current for emitted code."""
    token = _current.set(axes)
    try:
        yield
    finally:
        _current.reset(token)


def bound() -> Mapping[str, Axis]:
    """The current axes by name; empty outside `use`."""
    return _current.get() or {}


def current(name: str) -> Axis:
    """The current axis of this name. Raises MeshError outside `use`."""
    axes = _current.get()
    if axes is None or name not in axes:
        raise MeshError(f"mesh axis {name!r} is not bound: run the module through autoparallel.compile, or in "
                        "groups.use")
    return axes[name]
