"""Lower bounds of the exposed seconds of redistributions of activations, beside the linear layers that read or
make the value: whole, or in pieces (`schedule.pieces`, `schedule.activation_windows`).

Of p pieces of a redistribution of c seconds and a product of W seconds the first (of what is read), or the last (of
what is made), overlaps with nothing, so that both run at once in (p - 1) / p * min(c, W) seconds at most:

    an operand        forward: pieces and products             backward: pieces, and the weights' gradients
    a result          forward: pieces and products             backward: pieces, and products of the operand's gradient

Of what overlaps a share counts, by which it slows compute down. Pieces take no less than the whole, so that the whole
bounds what overlaps less what they take longer. Products take what host and device do (`Prices.whole`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autoparallel.layout import COLLECTIVES, Placement
from autoparallel.layout.redistribution import ACTIONS, Axes
from autoparallel.pricing.unit_costs import Prices
from autoparallel.schedule.activation_windows import NOWHERE
from autoparallel.strategies.space import TensorUse

#: The share of a linear layer's backward that makes its weight's gradient: one of two products of equal work.
OF_WEIGHT = 0.5
#: Weights with which one number counts all steps of a path that communicate, those that gather, and those that sum.
GATHERS, SUMS = 1e3, 1e6


class BesideLayers(NamedTuple):
    """The linear layers beside which a redistribution may run. ``share``: of what overlaps, the part that counts;
    ``pieces``: the most; ``readers``: the layers that read the result; ``alone``: whether nothing else reads it;
    ``maker``: the layer whose result it takes, if nothing else does (`NOWHERE`: none). Layers with equal strategy
    sets may have one's number, so that equal uses have equal values."""

    share: float
    pieces: int
    readers: tuple[int, ...] = ()
    alone: bool = False
    maker: int = NOWHERE


def exposed_s(prices: Prices, use: TensorUse, beside: BesideLayers) -> tuple[np.ndarray, np.ndarray]:
    """The least exposed seconds (forward, backward) of one execution of a use's redistribution, by (source strategy,
    target strategy)."""
    sent, counts = [prices.redistribution.use_s(use, times) for times in ((1, 0), (0, 1))], _counts(prices, use)
    most = [np.zeros(()), np.zeros(())]
    if beside.readers:
        forward_s, operand_s, weights_s = _of_readers(prices, use, beside)
        pieced = (counts == 1 + GATHERS) & beside.alone
        most = [np.where(pieced, at_once_s(sent[0], forward_s, beside.pieces), 0.0),
                at_once_s(sent[1], np.where(pieced, operand_s, 0.0), beside.pieces, weights_s)]
    if beside.maker != NOWHERE:
        price, pieced = prices.whole.op_of(beside.maker), counts == 1 + SUMS
        made_s = price.forward_s, (1 - OF_WEIGHT) * price.backward_s
        most = [np.maximum(other, np.where(pieced, at_once_s(one, seconds[:, None], beside.pieces), 0.0))
                for other, one, seconds in zip(most, sent, made_s, strict=True)]
    forward, backward = (one - (1 - beside.share) * np.where(np.isfinite(one), other, 0.0)
                         for one, other in zip(sent, most, strict=True))
    return forward, backward


def at_once_s(sent_s: np.ndarray, products_s: np.ndarray, pieces: int, after_s: np.ndarray | None = None
              ) -> np.ndarray:
    """The most seconds in which a redistribution of ``sent_s`` overlaps with products of ``products_s`` in ``pieces``.
    ``after_s``: of compute behind the last product, beside the last piece of what is sent (None: all of it waits)."""
    apart = (pieces - 1) / pieces
    if after_s is None:
        return np.minimum(apart * sent_s, apart * products_s)
    return np.minimum(sent_s, apart * products_s + after_s)


def _of_readers(prices: Prices, use: TensorUse, beside: BesideLayers) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By strategy of the target, the most seconds of the readers' products in forward, of their operands' gradients,
    and of their weights' gradients that may be put off until the operand's gradient is on its way."""
    space = prices.space
    if space.decisions[use.target].kind != "shared_read":
        price = prices.whole.op_of(use.target)
        return price.forward_s, (1 - OF_WEIGHT) * price.backward_s, OF_WEIGHT * price.backward_s
    results = space.strategy_sets[use.target].outputs[0]
    alike, local = np.zeros(len(results)), np.zeros(len(results))
    forward_s = np.zeros(len(results))
    for reader in beside.readers:
        operand, price = space.uses_by[reader][0], prices.whole.op_of(reader)
        reads = space.strategy_sets[reader].inputs[operand.position]
        equal = results[:, None] == reads
        forward_s += np.where(equal, price.forward_s, 0.0).max(axis=1)
        alike += np.where(equal, price.backward_s, 0.0).max(axis=1)
        sends = _sends_back(prices, operand)[results[:, None], reads]
        local += np.where(sends, 0.0, price.backward_s).max(axis=1)
    return forward_s, (1 - OF_WEIGHT) * alike, OF_WEIGHT * local


def _counts(prices: Prices, use: TensorUse) -> np.ndarray:
    """Of the path of a use the steps that communicate, those that gather times `GATHERS`, and those that sum times
    `SUMS`, added up; by (source strategy, target strategy). As `schedule.pieces.gathers` and `reduces` have it."""
    def count(axes: Axes, source: Placement, target: Placement, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        forward, backward = ACTIONS[source.kind, target.kind]
        sends, gathers = forward in COLLECTIVES or backward in COLLECTIVES, forward == "all_gather" and (
            backward in COLLECTIVES)
        return np.full(len(before), sends + gathers * GATHERS + (source.kind == "P" and forward in COLLECTIVES) * SUMS)

    rows = prices.space.strategy_sets[use.source].outputs[use.output]
    columns = prices.space.strategy_sets[use.target].inputs[use.position]
    return prices.redistribution.summed_along(use, "steps", count)[rows[:, None], columns]


def _sends_back(prices: Prices, use: TensorUse) -> np.ndarray:
    """Whether the path of a use communicates in backward, by (layout, layout); also where there is no path."""
    def count(axes: Axes, source: Placement, target: Placement, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        return np.full(len(before), float(ACTIONS[source.kind, target.kind][1] in COLLECTIVES))

    return prices.redistribution.summed_along(use, "sends back", count) > 0


__all__ = ["OF_WEIGHT", "BesideLayers", "at_once_s", "exposed_s"]
