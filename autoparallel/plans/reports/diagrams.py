"""What a page says of the mesh and of blocks: devices with their groups, ops in order with their redistributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoparallel.plans.record import Redistribution
from autoparallel.plans.reports.blocks import BlockRows, part_of
from autoparallel.plans.reports.report import Report
from autoparallel.plans.reports.words import AxisWords

#: Hosts of a mesh that are drawn, at most, and devices of one.
MOST_HOSTS, MOST_DEVICES = 8, 64


@dataclass(frozen=True)
class DeviceCell:
    """A device by its rank, its coordinates on the axes, and the number of its group along each axis."""

    rank: int
    coordinates: tuple[int, ...]
    groups: tuple[int, ...]


def hosts(axes: Sequence[AxisWords], devices: int, host_devices: int) -> list[list[DeviceCell]]:
    """The first hosts, with their devices; ranks lie row by row, so that the last axis runs over neighbours."""
    sizes = [axis.size for axis in axes]
    per_host = max(1, min(host_devices or devices, MOST_DEVICES))
    shown = min(devices, MOST_HOSTS * per_host)
    cells = [_cell(rank, sizes) for rank in range(shown)]
    return [cells[first : first + per_host] for first in range(0, shown, per_host)]


def _cell(rank: int, sizes: Sequence[int]) -> DeviceCell:
    coordinates, rest = [], rank
    for size in reversed(sizes):
        coordinates.append(rest % size)
        rest //= size
    coordinates.reverse()
    groups = []
    for axis in range(len(sizes)):
        number = 0
        for other, size in enumerate(sizes):
            number = number * size + coordinates[other] if other != axis else number
        groups.append(number)
    return DeviceCell(rank, tuple(coordinates), tuple(groups))


@dataclass(frozen=True)
class Flow:
    """An item of a block's diagram: ops of one module, or (``moved``) a redistribution before them."""

    name: str
    part: str
    layout: str
    ops: int = 0
    moved: Redistribution | None = None
    reads: tuple[Redistribution, ...] = ()


def block_flow(block: BlockRows, moves: Sequence[Redistribution]) -> list[Flow]:
    """The ops of a block in order, those of one module together, with the redistributions of activations between them
    and of parameters next to the ops that read them."""
    names = [name for name, _, _ in block.lines]
    before: dict[int, list[Redistribution]] = {}
    for move in moves:
        if (place := _place(names, move)) is not None:
            before.setdefault(place, []).append(move)
    found = list[Flow]()
    for number, (name, _, layout) in enumerate(block.lines):
        here = before.get(number, ())
        found += [Flow(move.source, "", move.after, moved=move) for move in here if not move.of_parameter]
        module = name.rsplit(" ", 1)[0] if " " in name else name
        reads = tuple(move for move in here if move.of_parameter)
        if found and found[-1].moved is None and found[-1].name == module and found[-1].layout == layout:
            last = found[-1]
            found[-1] = Flow(module, last.part, layout, last.ops + 1, None, (*last.reads, *reads))
        else:
            found.append(Flow(module, part_of(name), layout, 1, None, reads))
    return found


def _place(names: Sequence[str], move: Redistribution) -> int | None:
    """The line that reads: the first of that name after the one that makes the tensor."""
    after = names.index(move.source) + 1 if move.source in names else 0
    places = [number for number, name in enumerate(names) if name == move.target]
    return next((number for number in places if number >= after), places[0] if places else None)


def moves_of(report: Report, number: int) -> list[Redistribution]:
    """The redistributions in the block of this number."""
    if report.record is None:
        return []
    title = report.blocks[number].title
    first = "" if title == "outside blocks" else report.blocks[number].first
    labels = {axis.name: axis.label for axis in report.axes}
    return [replace(move, how=_steps_said(move.how, labels)) for move in report.record.redistributions
            if move.block == first]


def _steps_said(how: Sequence[str], labels: Mapping[str, str]) -> tuple[str, ...]:
    """Equal steps on several axes as one: "all-gather over data-inner and data-outer"."""
    axes: dict[str, list[str]] = {}
    for step in how:
        action, _, axis = step.partition(" over ")
        axes.setdefault(action, []).append(labels.get(axis, axis))
    return tuple(f"{action} over {' and '.join(names)}" for action, names in axes.items())


__all__ = ["DeviceCell", "Flow", "block_flow", "hosts", "moves_of"]
