"""Lower bounds of the exposed seconds of an activation's redistribution that overlaps with linear layers: with those
that read the value, or with the one that makes it; whole (`schedule.activation_windows`), or in pieces
(`schedule.pieces`).

Of p pieces of a redistribution of c seconds and a product of W seconds the first (of an operand), or the last (of a
result), overlaps with nothing, so that both run at once in (p - 1) / p * min(c, W) seconds at most:

    an operand        forward: pieces and products             backward: pieces, and the weights' gradients
    a result          forward: pieces and products             backward: pieces, and products of the operand's gradient

The seconds of overlap count in part, as communication slows compute down. Pieces together take no less than the whole,
so that the whole bounds what remains. Products take the time of host and device together (`Prices.whole`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from autoparallel.layout import COLLECTIVES, Placement
from autoparallel.layout.redistribution import Axes, actions_of
from autoparallel.pricing.unit_costs import Prices
from autoparallel.schedule.activation_windows import NOWHERE
from autoparallel.schedule.pieces import Acting, gathers, reduces
from autoparallel.strategies.space import TensorUse

#: The share of a linear layer's backward that makes its weight's gradient: one of two products of equal work.
OF_WEIGHT = 0.5


class LayerOverlap(NamedTuple):
    """The linear layers that a redistribution may overlap with. ``share``: the part of the overlapped seconds that
    counts; ``pieces``: the most; ``readers``: the layers that read the result; ``only_layers``: whether nothing else
    reads it; ``maker``: the layer whose result is redistributed, if nothing else reads that (`NOWHERE`: none).
    Layers with equal strategy sets may have one's number, so that equal uses have equal values."""

    share: float
    pieces: int
    readers: tuple[int, ...] = ()
    only_layers: bool = False
    maker: int = NOWHERE


def exposed_s(prices: Prices, use: TensorUse, layers: LayerOverlap) -> tuple[np.ndarray, np.ndarray]:
    """The least exposed seconds (forward, backward) of one execution of a use's redistribution, by (source strategy,
    target strategy)."""
    sent = [prices.redistribution.use_s(use, times) for times in ((1, 0), (0, 1))]
    rows = prices.space.strategy_sets[use.source].outputs[use.output]
    columns = prices.space.strategy_sets[use.target].inputs[use.position]
    sends_once, gathers_once, reduces_once = (
        (_num_steps(prices, use, kind) == 1)[rows[:, None], columns] for kind in (_sends, gathers, reduces))
    most = [np.zeros(()), np.zeros(())]
    if layers.readers:
        forward_s, operand_s, weights_s = _of_readers(prices, use, layers)
        pieced = sends_once & gathers_once & layers.only_layers
        most = [np.where(pieced, at_once_s(sent[0], forward_s, layers.pieces), 0.0),
                at_once_s(sent[1], np.where(pieced, operand_s, 0.0), layers.pieces, weights_s)]
    if layers.maker != NOWHERE:
        price, pieced = prices.whole.op_of(layers.maker), sends_once & reduces_once
        made_s = price.forward_s, (1 - OF_WEIGHT) * price.backward_s
        most = [np.maximum(other, np.where(pieced, at_once_s(one, seconds[:, None], layers.pieces), 0.0))
                for other, one, seconds in zip(most, sent, made_s, strict=True)]
    forward, backward = (one - (1 - layers.share) * np.where(np.isfinite(one), other, 0.0)
                         for one, other in zip(sent, most, strict=True))
    return forward, backward


def at_once_s(sent_s: np.ndarray, products_s: np.ndarray, pieces: int, after_s: np.ndarray | None = None
              ) -> np.ndarray:
    """The most seconds in which a redistribution of ``sent_s`` overlaps with products of ``products_s`` in ``pieces``.
    ``after_s``: compute after the last product, with which the last piece may overlap (None: all of it waits)."""
    overlapped = (pieces - 1) / pieces
    if after_s is None:
        return np.minimum(overlapped * sent_s, overlapped * products_s)
    return np.minimum(sent_s, overlapped * products_s + after_s)


def _of_readers(prices: Prices, use: TensorUse, layers: LayerOverlap) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By strategy of the target, the most seconds of the readers' products in forward, of their operands' gradients,
    and of their weights' gradients that may be put off until the operand's gradient is on its way."""
    space = prices.space
    if space.decisions[use.target].kind != "shared_read":
        price = prices.whole.op_of(use.target)
        return price.forward_s, (1 - OF_WEIGHT) * price.backward_s, OF_WEIGHT * price.backward_s
    results = space.strategy_sets[use.target].outputs[0]
    forward_s, backward_s, put_off_s = (np.zeros(len(results)) for _ in range(3))
    for reader in layers.readers:
        operand, price = space.uses_by[reader][0], prices.whole.op_of(reader)
        reads = space.strategy_sets[reader].inputs[operand.position]
        equal = results[:, None] == reads
        forward_s += np.where(equal, price.forward_s, 0.0).max(axis=1)
        backward_s += np.where(equal, price.backward_s, 0.0).max(axis=1)
        sends = _num_steps(prices, operand, _sends_back) > 0
        put_off_s += np.where(sends[results[:, None], reads], 0.0, price.backward_s).max(axis=1)
    return forward_s, (1 - OF_WEIGHT) * backward_s, OF_WEIGHT * put_off_s


class _Actions(NamedTuple):
    """What a step of a path does."""

    forward: str
    backward: str
    source: Placement


def _sends(step: Acting) -> bool:
    return step.forward in COLLECTIVES or step.backward in COLLECTIVES


def _sends_back(step: Acting) -> bool:
    return step.backward in COLLECTIVES


def _num_steps(prices: Prices, use: TensorUse, is_counted: Callable[[Acting], bool]) -> np.ndarray:
    """The number of such steps on a use's path, by (layout, layout); infinite without a path."""
    def count(axes: Axes, source: Placement, target: Placement, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        step = _Actions(*actions_of(axes, source, target, prices.space.mesh_shape), source)
        return np.full(len(before), float(is_counted(step)))

    return prices.redistribution.summed_along(use, f"steps: {is_counted.__name__}", count)


__all__ = ["OF_WEIGHT", "LayerOverlap", "at_once_s", "exposed_s"]
