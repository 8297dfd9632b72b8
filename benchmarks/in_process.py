"""All ranks of a mesh as threads of this process, whose collectives meet in memory.

The emitted programs run as they are, on their own shards and in their own order; only the five functional collectives
that they call are replaced. A few hundred tiny collectives take milliseconds, so that a plan can be judged in the time
that starting four processes takes.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from autoparallel.kernels import collectives, groups
from autoparallel.kernels.groups import Axis
from autoparallel.layout.redistribution import axes_together, name_of

TIMEOUT_S = 60.0
Coordinate = tuple[int, ...]
_REDUCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stacked: stacked.sum(0), "max": lambda stacked: stacked.amax(0)
}


class Group:
    """The ranks along one axis: each brings a value, and gets all of them."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.brought: list[Any] = [None] * size

    def exchange(self, what: str, value: Any) -> list[Any]:
        """The values that all ranks bring to this meeting, which must be of one kind."""
        rank = _here.rank[id(self)]
        self.brought[rank] = (what, value)
        self.barrier.wait()
        found = list(self.brought)
        self.barrier.wait()  # nobody brings the next value before all have read this one
        if {name for name, _ in found} != {what}:
            raise RuntimeError(f"ranks call different collectives: {[name for name, _ in found]}")
        return [value for _, value in found]


_here = threading.local()
_groups: dict[str, Group] = {}


# In the namespace of torch's functional collectives, whose results recompute="selective" keeps.
_library = torch.library.Library("_c10d_functional", "FRAGMENT")
_library.define("in_memory(Tensor x) -> Tensor")


def _collective(x: torch.Tensor) -> torch.Tensor:
    _here.count = collectives_run() + 1
    made: torch.Tensor = _here.collective(x)
    return made


_library.impl("in_memory", _collective, "CompositeExplicitAutograd")


def collectives_run() -> int:
    """The number of collectives that this rank has run."""
    return getattr(_here, "count", 0)


def _run(collective: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    _here.collective = collective
    made: torch.Tensor = torch.ops._c10d_functional.in_memory.default(x)
    return made


class Collectives:
    """`torch.ops._c10d_functional`, as far as lowering uses it. (Nothing runs where an earlier result is taken again,
    by selective recompute.)"""

    @staticmethod
    def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @staticmethod
    def all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
        return _run(lambda x: _REDUCE[op](torch.stack(_groups[group].exchange(f"all_reduce {op}", x))).to(x.dtype), x)

    @staticmethod
    def all_reduce_(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
        return x.copy_(Collectives.all_reduce(x.clone(), op, group))  # nobody writes what others still read

    @staticmethod
    def all_gather_into_tensor_out(x: torch.Tensor, size: int, group: str, *, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(_run(lambda x: torch.cat(_groups[group].exchange("all_gather", x)), x))

    @staticmethod
    def reduce_scatter_tensor(x: torch.Tensor, op: str, size: int, group: str) -> torch.Tensor:
        def collective(x: torch.Tensor) -> torch.Tensor:
            met = _groups[group]
            whole = _REDUCE[op](torch.stack(met.exchange(f"reduce_scatter {op}", x)))
            return whole.chunk(size)[_here.rank[id(met)]].to(x.dtype, copy=True)

        return _run(collective, x)

    @staticmethod
    def all_to_all_single(x: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> torch.Tensor:
        def collective(x: torch.Tensor) -> torch.Tensor:
            met = _groups[group]
            rank = _here.rank[id(met)]
            mine = [theirs.split(list(sizes))[rank] for theirs, sizes in met.exchange("all_to_all", (x, sent))]
            if [len(local_shard) for local_shard in mine] != list(received):
                raise RuntimeError(f"rank {rank} expects shards of {list(received)}, gets {[len(p) for p in mine]}")
            return torch.cat(mine)

        return _run(collective, x)


@contextmanager
def _met_in_memory(mesh_shape: Sequence[int], names: Sequence[str]) -> Iterator[None]:
    real = collectives._c10d
    collectives._c10d = Collectives()  # type: ignore[assignment]
    _groups.clear()
    for coordinate in coordinates(mesh_shape):
        for axis in axes_of(mesh_shape, names, coordinate):
            _groups.setdefault(axis.group_name, Group(axis.size))
    try:
        yield
    finally:
        collectives._c10d = real


def axes_of(mesh_shape: Sequence[int], names: Sequence[str], coordinate: Coordinate) -> list[Axis]:
    """The mesh axes as the rank at ``coordinate`` sees them, and those that sum together."""
    found = []
    for axes in axes_together(mesh_shape):
        sizes, at = (tuple(values[axis] for axis in axes) for values in (mesh_shape, coordinate))
        others = [None if axis in axes else place for axis, place in enumerate(coordinate)]
        name = name_of(axes, names)
        found.append(Axis(name, math.prod(sizes), int(np.ravel_multi_index(at, sizes)), f"{name} at {others}"))
    return found


def coordinates(mesh_shape: Sequence[int]) -> list[Coordinate]:
    return list(itertools.product(*(range(size) for size in mesh_shape)))


def on_every_rank(mesh_shape: Sequence[int], names: Sequence[str], work: Callable[[Coordinate], Any]
                  ) -> dict[Coordinate, Any]:
    """``work(coordinate)`` on all ranks at once; the first exception of a rank is raised here."""
    first: list[BaseException] = []

    def rank(coordinate: Coordinate) -> Any:
        axes = {axis.name: axis for axis in axes_of(mesh_shape, names, coordinate)}
        _here.rank = {id(_groups[axis.group_name]): axis.rank for axis in axes.values()}
        try:
            with groups.use(axes):
                return work(coordinate)
        except BaseException as error:
            first.append(error)
            for group in _groups.values():
                group.barrier.abort()  # the others wait for this rank no longer
            raise

    ranks = coordinates(mesh_shape)
    with _met_in_memory(mesh_shape, names), ThreadPoolExecutor(len(ranks)) as pool:
        made = {coordinate: pool.submit(rank, coordinate) for coordinate in ranks}
    if first:
        raise first[0]
    return {coordinate: future.result() for coordinate, future in made.items()}
