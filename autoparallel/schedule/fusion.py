"""How collectives of parameters and gradients are joined in buckets: by size, by number, by name."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from autoparallel.errors import PlanError, shown


@dataclass(frozen=True)
class Fusion:
    """The limits of buckets of gathers and gradient reductions, in addition to `Hybrid.bucket_bytes`.

    ``axis_bytes``: (mesh axis, bytes) where the groups of an axis have a size of their own; sums over several axes
    together have the least of theirs. ``most``: the parameters of a bucket, at most (None: any number). ``names``:
    patterns of parameters' names; those that a pattern matches (the first that does) are one bucket, of any size.
    ``blocks``: the gathers of a block's parameters are one bucket, whatever the sizes, as FSDP2 has them; else they are
    divided by size, too. ``given``: the sizes are the user's; else the search has chosen them, or may.
    """

    axis_bytes: tuple[tuple[str, float], ...] = ()
    most: int | None = None
    names: tuple[str, ...] = ()
    blocks: bool = True
    given: bool = False

    def __post_init__(self) -> None:
        for axis, num_bytes in self.axis_bytes:
            if not 0 <= num_bytes < math.inf:
                raise PlanError(f"bucket_bytes of axis {axis!r} is {shown(num_bytes)}: give a number, 0 or more")
        if len({axis for axis, _ in self.axis_bytes}) < len(self.axis_bytes):
            raise PlanError(f"bucket_bytes {list(self.axis_bytes)} has an axis twice: give each one size")
        if self.most is not None and self.most < 1:
            raise PlanError(f"buckets of {shown(self.most)} parameters at most: give a number, 1 or more")

    def bytes_on(self, axis: str, otherwise: float) -> float:
        """The largest bucket of a mesh axis, or of several ("data+model"); ``otherwise``: `Hybrid.bucket_bytes`."""
        return bytes_on(self.axis_bytes, axis, otherwise)

    def number_of(self, name: str | None) -> int | None:
        """The number of the pattern whose bucket a parameter is in; None: of none."""
        return next((number for number, pattern in enumerate(self.names)
                     if name is not None and fnmatchcase(name, pattern)), None)

    def check_axes(self, axis_names: Collection[str]) -> None:
        """Raises PlanError for a size of an axis that the mesh lacks."""
        for axis, _ in self.axis_bytes:
            if axis not in axis_names:
                raise PlanError(f"bucket_bytes has a size for the axis {axis!r}, and the mesh of a stage has "
                                f"{list(axis_names)}: name these, or give one number for all")


#: Reductions of one size on all axes, gathers by block.
BY_SIZE = Fusion()
#: In place of a size: the search chooses.
AUTO_SIZE = "auto"


def bytes_on(axis_bytes: Sequence[tuple[str, float]], axis: str, otherwise: float) -> float:
    """`Fusion.bytes_on`."""
    known = dict(axis_bytes)
    return min(known.get(one, otherwise) for one in axis.split("+")) if known else otherwise


def in_buckets(sizes: Iterable[float], most: float, last: float = math.inf, count: int | None = None
               ) -> list[list[int]]:
    """Group values of these sizes, in order, into buckets of ``most`` bytes or one value, filled from the end; returns
    their numbers. ``last``: the limit of the last bucket, if that is less. ``count``: of the values of a bucket."""
    sizes, buckets, size = list(sizes), list[list[int]](), 0.0
    for number in reversed(range(len(sizes))):
        limit = most if len(buckets) > 1 else min(last, most)
        if not buckets or size + sizes[number] > limit or len(buckets[-1]) == count:
            buckets.append([])
            size = 0.0
        buckets[-1].append(number)
        size += sizes[number]
    return [bucket[::-1] for bucket in reversed(buckets)]


__all__ = ["AUTO_SIZE", "BY_SIZE", "Fusion", "bytes_on", "in_buckets"]
