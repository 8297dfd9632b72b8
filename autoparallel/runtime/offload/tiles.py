"""Tiles: the parts of a rank's shards whose states are in memory together while the optimizer steps them.

The states of all parameters are laid out one after another in one range of bytes, the same for each state. A tile is a
window of this range; a parameter may be in several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoparallel.schedule.tiers import BLOCK_BYTES, padded


@dataclass(frozen=True)
class Region:
    """Elements ``start`` to ``stop`` of a flat local shard, whose states begin at byte ``offset`` of the range."""

    parameter: int
    start: int
    stop: int
    item_bytes: int
    offset: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def end(self) -> int:
        """The byte after the last."""
        return self.offset + self.size * self.item_bytes


@dataclass(frozen=True)
class Tile:
    """The regions in bytes ``begin`` to ``end`` of the range, whose ends are multiples of `BLOCK_BYTES`."""

    number: int
    begin: int
    end: int
    regions: tuple[Region, ...]


def regions_of(bounds: Sequence[tuple[int, int]], item_bytes: Sequence[int], numbers: Sequence[int]
               ) -> tuple[Region, ...]:
    """A region for each parameter, by its number, of its elements between ``bounds``; empty ones too."""
    found, offset = list[Region](), 0
    for number, (start, stop), width in zip(numbers, bounds, item_bytes, strict=True):
        found.append(Region(number, start, stop, width, offset))
        offset = int(padded(found[-1].end))
    return tuple(found)


def tiles_of(regions: Sequence[Region], tile_bytes: int) -> tuple[Tile, ...]:
    """The tiles of these regions, of ``tile_bytes`` (a multiple of `BLOCK_BYTES`) each but the last."""
    total = int(padded(max((region.end for region in regions), default=0), BLOCK_BYTES))
    count = max(1, -(-total // tile_bytes))
    parts: list[list[Region]] = [[] for _ in range(count)]
    for region in regions:
        first, last = region.offset // tile_bytes, max(region.offset, region.end - 1) // tile_bytes
        for number in range(min(first, count - 1), min(last, count - 1) + 1):
            begin = max(region.offset, number * tile_bytes)
            end = min(region.end, (number + 1) * tile_bytes)
            start = region.start + (begin - region.offset) // region.item_bytes
            stop = region.start + (end - region.offset) // region.item_bytes
            parts[number].append(Region(region.parameter, start, stop, region.item_bytes, begin))
    return tuple(Tile(number, number * tile_bytes, min(total, (number + 1) * tile_bytes), tuple(part))
                 for number, part in enumerate(parts))
