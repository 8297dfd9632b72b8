"""Where rows of tokens travel to the ranks of their experts and back, overlapped with compute that does not need them.

    forward     rows leave at the mixture; experts compute behind product ``behind``; results are awaited at ``reader``
    backward    gradients of results leave at ``reader``; experts compute; gradients of rows are awaited at the mixture

Products between a mixture and the first reader of its result, such as shared experts, run meanwhile: the first half
of them while rows travel, the others while results do. Without any, and where ``Hybrid.experts_overlap`` is not set,
the three parts follow each other; but with multi-copy another micro-batch runs between two of them.

`lower.expert_pass` applies the windows to a program and `pricing.expert_exchanges` to a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from autoparallel.schedule.activation_windows import overlaps_activations
from autoparallel.schedule.pieces import runs_in_pieces
from autoparallel.schedule.step_config import Hybrid


class ExpertWindow(NamedTuple):
    """The decisions at which the parts of a mixture of experts run: rows leave at ``mixture``, experts compute right
    behind ``behind``, results are awaited before ``reader``."""

    mixture: int
    behind: int
    reader: int

    @property
    def is_open(self) -> bool:
        """Whether anything runs between the parts."""
        return self.behind != self.mixture


def overlaps_experts(hybrid: Hybrid) -> bool:
    """Whether products of the same micro-batch may run between the parts of a mixture."""
    return hybrid.experts_overlap and overlaps_activations(hybrid) and not runs_in_pieces(hybrid)


def alternates_experts(hybrid: Hybrid) -> bool:
    """Whether other micro-batches, which alternate with this one, run between the parts of a mixture."""
    return hybrid.experts_overlap and hybrid.alternates


def products_between(mixture: int, reader: int, products: Iterable[int], block_of: Callable[[int], str | None]
                     ) -> list[int]:
    """The products between a mixture and the first reader of its result, if all are in one block."""
    return [product for product in products if mixture < product < reader
            and block_of(product) == block_of(mixture) == block_of(reader)]


def expert_windows(mixtures: Iterable[tuple[int, int]], products: Sequence[int], block_of: Callable[[int], str | None],
                   hybrid: Hybrid) -> list[ExpertWindow]:
    """The windows of a program. ``mixtures``: those whose rows travel, with the first decision that reads their result;
    ``products``, ``block_of``: as of `activation_windows`.

        >>> expert_windows([(3, 9)], [3, 4, 6, 7, 10], lambda index: None, Hybrid())
        [ExpertWindow(mixture=3, behind=6, reader=9)]
        >>> expert_windows([(3, 4)], [3, 4], lambda index: None, Hybrid())
        [ExpertWindow(mixture=3, behind=3, reader=3)]
    """
    found = list[ExpertWindow]()
    for mixture, reader in mixtures if overlaps_activations(hybrid) or alternates_experts(hybrid) else ():
        between = products_between(mixture, reader, products, block_of)
        if between and overlaps_experts(hybrid):
            found.append(ExpertWindow(mixture, between[(len(between) - 1) // 2], reader))
        else:
            found.append(ExpertWindow(mixture, mixture, mixture))
    return found


__all__ = ["ExpertWindow", "alternates_experts", "expert_windows", "overlaps_experts", "products_between"]
