"""Placements and layouts: how a tensor lies on the axes of a mesh, forward and backward.

A placement says both what each rank of one mesh axis holds and what the gradient of that value will be:

    | placement | each rank holds            | its gradient is | spmd-types |
    |-----------|----------------------------|-----------------|------------|
    | S(d)      | its shard of dim d         | S(d)            | V, S(d)    |
    | S(d;k)    | its shard of each k-th     | S(d;k)          | -          |
    |           | of dim d, in order         |                 |            |
    | R         | all, for its own work      | P               | R          |
    | I         | all, for everybody's work  | replicated      | I          |
    | P         | a summand                  | replicated      | P          |

R and I are both torch's ``Replicate()``; they differ only in what backward must do. A value that needs no gradient is
never R: I says the same. A layout is one placement per mesh axis; a dim sharded by several axes is cut by the
leftmost axis first, as DTensor does.

S(d;k) is an interleaved shard (torch's ``_StridedShard(d, split_factor=k)``): a fused projection of k results has k
parts, and each rank has an equal shard of each. S(d) is S(d;1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement as TorchPlacement


class Placement(NamedTuple):
    """One of ``S(dim)``, ``S(dim;parts)``, ``R``, ``I``, ``P`` on one mesh axis."""

    kind: str
    dim: int = -1
    parts: int = 1

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"

    @property
    def is_interleaved(self) -> bool:
        return self.parts > 1

    @property
    def in_order(self) -> bool:
        """Whether shards in the order of the ranks are the whole in memory: S(0)."""
        return self.dim == 0 and self.parts == 1

    def __str__(self) -> str:
        if self.parts > 1:
            return f"S({self.dim};{self.parts})"
        return f"S({self.dim})" if self.kind == "S" else self.kind

    @staticmethod
    def parse(text: str) -> Placement:
        """The inverse of ``str``.

        >>> Placement.parse("S(1)") == shard(1), Placement.parse("S(0;3)") == shard(0, parts=3)
        (True, True)
        """
        if text in ("R", "I", "P"):
            return Placement(text)
        if match := re.fullmatch(r"S\((\d+)(?:;(\d+))?\)", text):
            return shard(int(match[1]), int(match[2] or 1))
        raise ValueError(f"not a placement: {text!r} (one of S(dim), S(dim;parts), R, I, P)")


REPLICATE = Placement("R")
INVARIANT = Placement("I")
PARTIAL = Placement("P")
Layout = tuple[Placement, ...]


@cache
def shard(dim: int, parts: int = 1) -> Placement:
    return Placement("S", dim, parts)


def dual(placement: Placement) -> Placement:
    """The placement of the gradient of a value: S is its own dual, R and P are duals, I is its own."""
    return {"R": PARTIAL, "P": REPLICATE}.get(placement.kind, placement)


def invariant_on_unit_axes(layout: Layout, mesh_shape: Sequence[int]) -> Layout:
    """The layout with I on axes of one rank, which has the whole tensor in each placement.

    >>> layout_str(invariant_on_unit_axes((shard(0), PARTIAL), (2, 1)))
    'S(0)·I'
    """
    return tuple(INVARIANT if ranks == 1 else p for p, ranks in zip(layout, mesh_shape, strict=True))


def layout_str(layout: Layout) -> str:
    """``S(0)·I``, one placement per axis."""
    return "·".join(map(str, layout))


def parse_layout(text: str) -> Layout:
    return tuple(Placement.parse(part) for part in text.split("·"))


def without_gradient(placement: Placement) -> Placement:
    """The placement of a value that needs no gradient: R and I are one."""
    return INVARIANT if placement == REPLICATE else placement


def to_torch(layout: Layout) -> tuple[TorchPlacement, ...]:
    """As ``torch.distributed.tensor`` placements (R and I both become ``Replicate()``)."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    return tuple(
        _StridedShard(p.dim, split_factor=p.parts) if p.is_interleaved else Shard(p.dim) if p.is_shard
        else Partial() if p.kind == "P" else Replicate() for p in layout
    )


def from_torch(placements: tuple[TorchPlacement, ...]) -> Layout:
    """From torch's placements; ``Replicate()`` becomes I (what an optimizer or a caller means by it)."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    out: list[Placement] = []
    for p in placements:
        if isinstance(p, _StridedShard):
            out.append(shard(p.dim, int(p.split_factor)))
        elif isinstance(p, Shard):
            out.append(shard(p.dim))
        elif isinstance(p, Partial):
            if p.reduce_op != "sum":
                raise ValueError(f"only Partial('sum') can be placed, not {p}")
            out.append(PARTIAL)
        elif isinstance(p, Replicate):
            out.append(INVARIANT)
        else:
            raise ValueError(f"unknown placement {p}: use Shard, Replicate or Partial")
    return tuple(out)
