"""Moving training state from the devices of one plan to those of another: bytes that each device lacks, and seconds.

A device of the new plan keeps what it has. Each other part comes from the nearest devices that have it, which send
equal shares, all devices at the same time. A device sends and receives at once, by the links of each level at once;
the one that takes longest counts.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoparallel.errors import PlanError
from autoparallel.layout.placement import Layout, parse_layout
from autoparallel.plans import Plan
from cost_models import Cluster
from cost_models.offload import known_rate

Floats = NDArray[np.float64]
#: Entries of a table of devices and shards that are held at a time.
MOST_ENTRIES = 2**24
NO_CELL = -1


@dataclass(frozen=True)
class Move:
    """``seconds`` until all devices have their state. ``sent_bytes``: between devices, ``read_bytes``: from a
    checkpoint, of all devices together. ``lost_bytes``: of state, each element counted once, that no device has."""

    seconds: float
    sent_bytes: float = 0.0
    read_bytes: float = 0.0
    lost_bytes: float = 0.0


class _Held(NamedTuple):
    """Where a parameter lies: its layout on the mesh of a stage, and the pipeline ranks that have it."""

    layout: Layout
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class _Boxes:
    """The shard of one parameter on each device, as the half-open box from ``low`` to ``high`` [device, dim], in
    elements; devices without any have an empty one."""

    low: Floats
    high: Floats

    def at(self, devices: Sequence[int | None]) -> _Boxes:
        """Those of some devices; None has nothing."""
        nothing = np.zeros((1, self.low.shape[1]))
        where = [len(self.low) if device is None else device for device in devices]
        return _Boxes(np.concatenate([self.low, nothing])[where], np.concatenate([self.high, nothing])[where])

    @property
    def elements(self) -> Floats:
        return np.prod(self.high - self.low, axis=1)

    def shared(self, other: _Boxes) -> Floats:
        """Elements that each of these boxes and each of the others have in common [this, other]."""
        found = np.ones((len(self.low), len(other.low)))
        for dim in range(self.low.shape[1]):
            ends = np.minimum(self.high[:, None, dim], other.high[None, :, dim])
            found *= np.maximum(0.0, ends - np.maximum(self.low[:, None, dim], other.low[None, :, dim]))
        return found


def moved(old: Plan, new: Plan, cluster: Cluster, came_from: Sequence[int | None], item_bytes: Mapping[str, float]
          ) -> Move:
    """Moving state from the devices of ``old`` to the first devices of ``cluster``, on which ``new`` runs.

    came_from: of each device in the order of ``cluster`` (others that still have state may follow) the number that it
        had in ``old``; None: it has no state.
    item_bytes: bytes of state of one element, by parameter.

    Where a part of the state is on none of them, all devices read a checkpoint: the others' state is of a later step.
    Raises PlanError for plans without the parameters' shapes, or of other parameters.
    """
    loads = _Loads.none(cluster, len(came_from))
    for (shape, before, after, each), count in _classes(old, new, item_bytes).items():
        for part in _parts(shape, before, after):
            loads.add(_boxes(old, part, before), _boxes(new, part, after), came_from, count * each)
    if loads.lost_bytes:
        return read_by(new, cluster, item_bytes, loads.lost_bytes)
    seconds = max((float(np.maximum(loads.received, loads.sent)[level].max()) / cluster.message_bytes_per_s(level)
                   for level in range(len(cluster.links))), default=0.0)
    return Move(seconds, float(loads.received.sum()))


def read_by(new: Plan, cluster: Cluster, item_bytes: Mapping[str, float], lost_bytes: float = 0.0) -> Move:
    """All devices of a plan read their state from a checkpoint, at the rate of the cluster's disks. Raises
    ClusterError where the cluster does not say that rate."""
    per_device = np.zeros(math.prod(new.axes[0]))
    for (shape, _, after, each), count in _classes(new, new, item_bytes).items():
        for part in _parts(shape, after):
            per_device += count * each * _boxes(new, part, after).elements
    seconds = float(per_device.max()) / known_rate(cluster, "disk_read_bytes_per_s")
    return Move(seconds, read_bytes=float(per_device.sum()), lost_bytes=lost_bytes)


@dataclass
class _Loads:
    """Bytes that each device receives and sends, by level of the links [level, device]."""

    domains: tuple[int, ...]
    received: Floats
    sent: Floats
    lost_bytes: float = 0.0

    @staticmethod
    def none(cluster: Cluster, devices: int) -> _Loads:
        levels = len(cluster.links)
        return _Loads(tuple(link.num_devices for link in cluster.links), np.zeros((levels, devices)),
                      np.zeros((levels, devices)))

    def add(self, before: _Boxes, after: _Boxes, came_from: Sequence[int | None], item_bytes: float) -> None:
        """Count a parameter. ``before``, ``after``: shards on the devices of the old and the new plan."""
        corners = np.concatenate([before.low, before.high], axis=1)
        filled = before.elements > 0
        cells, cell_of = np.full((0, corners.shape[1]), 0.0), np.full(len(corners), NO_CELL)
        cells, cell_of[filled] = np.unique(corners[filled], axis=0, return_inverse=True)
        dims = before.low.shape[1]
        shards = _Boxes(cells[:, :dims], cells[:, dims:])
        own = np.array([NO_CELL if device is None else cell_of[device] for device in came_from])
        held = np.zeros(len(cells), bool)
        held[own[own >= 0]] = True
        self.lost_bytes += item_bytes * float(shards.elements[~held].sum())
        wanting = np.flatnonzero(after.elements > 0)
        rows = max(1, MOST_ENTRIES // max(1, len(cells)))
        demands = [np.zeros((len(cells), -(-len(own) // size))) for size in self.domains]
        for start in range(0, len(wanting), rows):
            devices = wanting[start:start + rows]
            self._receive(devices, after.at(devices.tolist()).shared(shards) * item_bytes, own, demands)
        self._send(own, demands)

    def _holders(self, own: NDArray[np.int64], size: int, cells: int) -> Floats:
        """The number of devices that have a shard, in each domain of so many devices [shard, domain]."""
        found, having = np.zeros((cells, -(-len(own) // size))), np.flatnonzero(own >= 0)
        np.add.at(found, (own[having], having // size), 1.0)
        return found

    def _receive(self, devices: NDArray[np.int64], needs: Floats, own: NDArray[np.int64], demands: Sequence[Floats]
                 ) -> None:
        """Count what devices lack, ``needs`` [device, shard] less their own, at the innermost level that has it."""
        having = own[devices] >= 0
        needs[np.flatnonzero(having), own[devices][having]] = 0.0
        for level, size in enumerate(self.domains):
            there = self._holders(own, size, needs.shape[1])[:, devices // size].T > 0
            taken = needs * there
            self.received[level, devices] += taken.sum(axis=1)
            np.add.at(demands[level].T, devices // size, taken)
            needs = np.where(there, 0.0, needs)

    def _send(self, own: NDArray[np.int64], demands: Sequence[Floats]) -> None:
        """Count what is taken from each domain's holders of a shard, in equal shares."""
        having = np.flatnonzero(own >= 0)
        for level, (size, demand) in enumerate(zip(self.domains, demands, strict=True)):
            shares = demand / np.maximum(1.0, self._holders(own, size, len(demand)))
            self.sent[level, having] += shares[own[having], having // size]


def _classes(old: Plan, new: Plan, item_bytes: Mapping[str, float]
             ) -> Counter[tuple[tuple[int, ...], _Held, _Held, float]]:
    """How many parameters there are of each shape, place before and after, and bytes an element."""
    before, after = _held(old), _held(new)
    if before.keys() != after.keys():
        other = sorted(before.keys() ^ after.keys())[0]
        raise PlanError(f"one of the two plans has the parameter {other!r} and the other has not: both must be of one "
                        "model")
    return Counter((old.model.parameters[name], before[name], after[name], item_bytes[name]) for name in before)


def _held(plan: Plan) -> dict[str, _Held]:
    """Where each parameter lies. Raises PlanError for a file that does not say it."""
    names = [name for name in plan.model.parameters if name in plan.strategies]
    if not names:
        raise PlanError("the plan's file says nothing of the parameters' shapes (another version wrote it): plan again")
    stages: dict[str, list[int]] = {}
    if plan.hybrid.stages > 1:
        record = plan.known
        if record is None or not record.stage_parameters:
            raise PlanError("the plan's file does not say which pipeline stage has which parameter (another version "
                            "wrote it): plan again")
        for stage, members in enumerate(record.stage_parameters):
            for name in members:
                stages.setdefault(name, []).append(stage)
    return {name: _Held(parse_layout("·".join(plan.strategies[name])),
                        plan.hybrid.ranks_of(*(stages.get(name, ()) if stages else (0,)))) for name in names}


@dataclass(frozen=True)
class _Part:
    """Part ``number`` of ``count``, by dim, of a parameter of this shape: of one all shards are boxes."""

    shape: tuple[int, ...]
    count: tuple[int, ...]
    number: tuple[int, ...]

    def bounds(self, dim: int, parts: int = 0) -> tuple[float, float]:
        """Where it begins and ends; ``parts``: where the one of so many parts does that has it."""
        parts = parts or self.count[dim]
        number, size = self.number[dim] * parts // self.count[dim], self.shape[dim] / parts
        return number * size, (number + 1) * size


def _parts(shape: tuple[int, ...], *held: _Held) -> Iterator[_Part]:
    """The parts that interleaved layouts cut; the whole, where there are none."""
    shape = shape or (1,)
    count = tuple(math.lcm(*(p.parts for one in held for p in one.layout if p.is_shard and p.dim == dim))
                  for dim in range(len(shape)))
    for number in itertools.product(*map(range, count)):
        yield _Part(shape, count, number)


def _boxes(plan: Plan, part: _Part, held: _Held) -> _Boxes:
    """What each device of a plan has of a part of a parameter."""
    mesh, dims = plan.mesh_shape, range(len(part.shape))
    each = math.prod(mesh)
    of_dim = [max((p.parts for p in held.layout if p.is_shard and p.dim == dim), default=1) for dim in dims]
    low, high = (np.tile([part.bounds(dim, of_dim[dim])[end] for dim in dims], (each, 1)) for end in (0, 1))
    for placement, ranks, at in zip(held.layout, mesh, np.indices(mesh).reshape(len(mesh), -1), strict=True):
        if placement.is_shard:
            begin, end = low[:, placement.dim], high[:, placement.dim]
            step = np.ceil((end - begin) / ranks)
            low[:, placement.dim] = np.minimum(end, begin + at * step)
            high[:, placement.dim] = np.minimum(end, low[:, placement.dim] + step)
    own = np.array([part.bounds(dim) for dim in dims]).T
    low = np.clip(low, *own)
    high = np.maximum(low, np.clip(high, *own))
    found = _Boxes(*(np.zeros((each * plan.hybrid.pipeline_ranks, len(part.shape))) for _ in range(2)))
    for rank in held.ranks:
        found.low[rank * each:(rank + 1) * each], found.high[rank * each:(rank + 1) * each] = low, high
    return found


__all__ = ["Move", "moved", "read_by"]
