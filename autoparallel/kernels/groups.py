"""Mesh axes at run time: the process group, size and rank behind an axis name.

The emitted program names axes only; `bind` resolves them for the mesh that it runs on. (This file is the one place
that asks torch for process groups.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from autoparallel.errors import MeshError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Axis:
    """One mesh axis as this rank sees it."""

    name: str
    size: int
    rank: int
    group_name: str


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
        name: Axis(name, mesh.size(i), coordinate[i], mesh.get_group(i).group_name)
        for i, name in enumerate(axis_names(mesh))
    }


@dataclass(frozen=True)
class MeshPosition:
    """Where this rank stands: its place on the pipeline axis, and the mesh that its stage is sharded over.

    ``whole`` is the mesh as given; ``mesh`` is the same without its first axis when that is a pipeline.
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
    """This rank's place; the first axis is the pipeline's when that has several ranks.

    Raises MeshError when the first axis has another size than the pipeline.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if pipeline_ranks == 1:
        return MeshPosition(mesh, mesh, 0, 1)
    if mesh.size(0) != pipeline_ranks:
        raise MeshError(f"the plan has a pipeline of {pipeline_ranks} ranks and the mesh's first axis "
                        f"{mesh.size(0)}: the first axis is the pipeline's")
    names = axis_names(mesh)
    if mesh.ndim == 1:
        mesh = DeviceMesh(mesh.device_type, mesh.mesh.unsqueeze(1), mesh_dim_names=(*names, "alone"))
    elif mesh.mesh_dim_names is None:
        mesh = DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=names)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise MeshError(f"rank {dist.get_rank()} is not on the mesh {mesh}")
    return MeshPosition(mesh, mesh[axis_names(mesh)[1:]], coordinate[0], pipeline_ranks)


@contextmanager
def use(axes: Mapping[str, Axis]) -> Iterator[None]:
    """Run emitted code on these axes."""
    token = _current.set(axes)
    try:
        yield
    finally:
        _current.reset(token)


def bound() -> Mapping[str, Axis]:
    """The axes that emitted code runs on now."""
    return _current.get() or {}


def current(name: str) -> Axis:
    axes = _current.get()
    if axes is None or name not in axes:
        raise MeshError(f"mesh axis {name!r} is not bound: run the module through autoparallel.compile, or in "
                        "groups.use")
    return axes[name]
