"""Products in pieces: a linear layer whose operand or result is redistributed runs piece by piece of its rows, so that
one piece travels while the next is computed (asynchronous tensor parallelism; ``Hybrid.pieces`` says how many).

    operand gathered    forward: the gathers of all pieces start, each product waits for its piece
                        backward: each piece of the operand's gradient leaves when it is computed; then the weights'
    result reduced      forward: each piece of the result leaves when it is computed
                        backward: the gathers of all pieces start, each product waits for its piece

`lower.pieces_pass` writes it into programs and `pricing.pieced_products` prices it, so that what is priced is what
runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from autoparallel.layout import COLLECTIVES, Layout, Placement
from autoparallel.layout.redistribution import Step
from autoparallel.schedule.activation_windows import NOWHERE, overlaps_activations
from autoparallel.schedule.step_config import Hybrid

#: The numbers of pieces that a search tries.
TRIED = (2, 4)


class Cut(NamedTuple):
    """Where rows are cut into pieces: along ``dim``; ``inside``: which the redistribution's own shards cut too, so that
    each piece has a part of every shard."""

    dim: int
    inside: bool = False


class Candidate(NamedTuple):
    """A redistribution of an activation with one step that communicates, the one before its readers if ``gathers``,
    else the one behind its source. ``target``: the decision before which it is. ``readers``: the linear layers that
    read its result, if nothing else does; ``maker``: the linear layer whose result it takes, if nothing else reads
    that."""

    target: int
    cut: Cut
    readers: tuple[int, ...] = ()
    maker: int = NOWHERE


class Pieced(NamedTuple):
    """Layers in pieces. ``number``: of the candidate; ``behind``: they make the value that is redistributed, else they
    read it."""

    number: int
    layers: tuple[int, ...]
    behind: bool
    cut: Cut


def runs_in_pieces(hybrid: Hybrid) -> bool:
    """Whether layers of this step configuration run in pieces."""
    return hybrid.pieces > 1 and overlaps_activations(hybrid)


def cut_of(shape: Sequence[int], step: Step, mesh_shape: Sequence[int], pieces: int) -> Cut | None:
    """Where the rows (all dims but the last) of a tensor of global ``shape`` are cut into equal pieces for a step: the
    first dim that the step does not cut, else its own. None: no dim can be cut evenly on all ranks.

    >>> from autoparallel.layout.placement import INVARIANT, PARTIAL, shard
    >>> reduce_scatter = Step((0,), (PARTIAL,), (shard(1),))
    >>> cut_of((8, 512, 64), reduce_scatter, (4,), 2), cut_of((1, 512, 64), reduce_scatter, (4,), 2)
    (Cut(dim=0, inside=False), Cut(dim=1, inside=True))
    >>> cut_of((1, 510, 64), reduce_scatter, (4,), 2) is None
    True
    """
    placements = step.source, step.target
    own = next((placement.dim for placement in placements if placement.is_shard), None)
    layout: Layout = step.before if step.source.is_shard else step.after
    inside = None
    for dim in range(len(shape) - 1):
        cutting = [ranks for placement, ranks in zip(layout, mesh_shape, strict=True)
                   if placement.is_shard and placement.dim == dim]
        if any(_deals(placement, dim) for placement in layout) or shape[dim] % (math.prod(cutting) * pieces):
            continue
        if dim != own:
            return Cut(dim)
        inside = Cut(dim, inside=True)
    return inside


def _deals(placement: Placement, dim: int) -> bool:
    return placement.is_interleaved and placement.dim == dim


class Acting(Protocol):
    """A step's actions and source placement, as a `Step` has them."""

    @property
    def forward(self) -> str: ...

    @property
    def backward(self) -> str: ...

    @property
    def source(self) -> Placement: ...


def gathers(step: Acting) -> bool:
    """Whether a step gathers an operand: S -> R."""
    return step.forward == "all_gather" and step.backward in COLLECTIVES


def reduces(step: Acting) -> bool:
    """Whether a step sums the results of a layer: P -> S, R or I."""
    return step.source.kind == "P" and step.forward in COLLECTIVES


def pieced_products(candidates: Sequence[Candidate], block_of: Callable[[int], str | None]) -> list[Pieced]:
    """The layers that run in pieces, each by one redistribution: rather its operand's than its result's. A layer and
    its redistribution are in one block.

        >>> some = [Candidate(4, Cut(0), maker=2), Candidate(1, Cut(0), readers=(2, 3)), Candidate(6, Cut(0), maker=5)]
        >>> for one in pieced_products(some, lambda index: None):
        ...     print(one)
        Pieced(number=1, layers=(2, 3), behind=False, cut=Cut(dim=0, inside=False))
        Pieced(number=2, layers=(5,), behind=True, cut=Cut(dim=0, inside=False))
    """
    found, taken = dict[int, Pieced](), set[int]()
    for behind in (False, True):
        for number, one in enumerate(candidates):
            layers = (one.maker,) * (one.maker != NOWHERE) if behind else one.readers
            block = block_of(one.target)
            if layers and number not in found and not taken.intersection(layers) and all(
                    block_of(layer) == block for layer in layers):
                found[number] = Pieced(number, layers, behind, one.cut)
                taken.update(layers)
    return [found[number] for number in sorted(found)]


__all__ = ["TRIED", "Acting", "Candidate", "Cut", "Pieced", "cut_of", "gathers", "pieced_products", "reduces",
           "runs_in_pieces"]
