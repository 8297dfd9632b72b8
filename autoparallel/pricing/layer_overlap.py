"""Lower bounds of the exposed seconds of an activation's redistribution that overlaps with linear layers: with those
that read the value, or with the one that makes it; whole (`schedule.activation_windows`), or in pieces
(`schedule.pieces`).

Of p pieces of a redistribution of c seconds and a product of W seconds the first (of an operand), or the last (of a
result), overlaps with nothing, so that both run at once in (p - 1) / p * min(c, W) seconds at most:

    an operand        forward: pieces and products             backward: pieces, and the weights' gradients
    a result          forward: pieces and products             backward: pieces, and products of the operand's gradient

The seconds of overlap count in part, as communication slows compute down. What products and redistributions take longer
in pieces, and copies that put received pieces in their place, is taken off the seconds that overlap saves. Products
take the time of host and device together (`Prices.whole`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from autoparallel.layout import COLLECTIVES, Placement
from autoparallel.layout.redistribution import Axes, actions_of
from autoparallel.pricing.unit_costs import Prices
from autoparallel.schedule.activation_windows import NOWHERE
from autoparallel.schedule.pieces import TRIED, Acting, gathers, reduces
from autoparallel.strategies.space import TensorUse
from cost_models import collectives

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

    @property
    def tried(self) -> list[int]:
        """The numbers of pieces that plans may have."""
        return [pieces for pieces in sorted({*TRIED, self.pieces}) if pieces <= self.pieces]


#: Placements and local bytes of a step's value before it, and after it.
_Ends = tuple[Placement, Placement, np.ndarray, np.ndarray]


class _Products(NamedTuple):
    """Seconds of products in pieces, by strategy: of forward, of the operands' gradients, and of the weights' gradients
    with which a redistribution may overlap; and by how much the first two exceed those of whole products."""

    forward: np.ndarray
    operands: np.ndarray
    weights: np.ndarray
    longer: tuple[np.ndarray, np.ndarray]

    @property
    def by_row(self) -> _Products:
        """With the strategies along the first of two dims."""
        forward, operands, weights, *longer = (one[:, None] for one in (*self[:3], *self.longer))
        return _Products(forward, operands, weights, (longer[0], longer[1]))


def exposed_s(prices: Prices, use: TensorUse, layers: LayerOverlap) -> tuple[np.ndarray, np.ndarray]:
    """The least exposed seconds (forward, backward) of one execution of a use's redistribution, with those that
    products take longer in pieces, by (source strategy, target strategy). Not negative, as pieces take no less time
    than the whole."""
    sent = [prices.redistribution.use_s(use, times) for times in ((1, 0), (0, 1))]
    rows = prices.space.strategy_sets[use.source].outputs[use.output]
    columns = prices.space.strategy_sets[use.target].inputs[use.position]
    sends_once, gathers_once, reduces_once = (
        (_num_steps(prices, use, kind) == 1)[rows[:, None], columns] for kind in (_sends, gathers, reduces))
    saved, hidden = [np.zeros(()), np.zeros(())], 1 - layers.share

    def save(pieced: np.ndarray, own: _Products, after_s: np.ndarray | None = None) -> None:
        """What pieces save, where there are any: overlap, less what they take longer than ``sent`` and whole products.
        ``after_s``: compute in backward after the last product."""
        for at, (one, products_s, longer_s) in enumerate(zip(in_pieces, (own.forward, own.operands), own.longer,
                                                             strict=True)):
            overlapped_s = at_once_s(one.seconds, products_s, pieces, after_s if at else None)
            gained_s = hidden * overlapped_s - longer_s - (one.seconds - sent[at]) - one.put_s
            saved[at] = np.maximum(saved[at], np.where(pieced, gained_s, 0.0))

    for pieces in layers.tried:
        in_pieces = [_in_pieces(prices, use, sent[at], pieces, backward=bool(at)) for at in range(2)]
        if layers.readers:
            own = _of_readers(prices, use, layers, pieces)
            saved[1] = np.maximum(saved[1], hidden * np.minimum(sent[1], own.weights))    # without pieces
            save(sends_once & gathers_once & layers.only_layers, own, own.weights)
        if layers.maker != NOWHERE:
            save(sends_once & reduces_once, _products(prices, layers.maker, pieces).by_row)
    forward, backward = (one - np.where(np.isfinite(one), np.minimum(one, other), 0.0)    # but for rounding
                         for one, other in zip(sent, saved, strict=True))
    return forward, backward


class _Pieces(NamedTuple):
    """Seconds of all pieces of a redistribution, and of the copies that put them in their place, by (source strategy,
    target strategy)."""

    seconds: np.ndarray
    put_s: np.ndarray


def _in_pieces(prices: Prices, use: TensorUse, sent_s: np.ndarray, pieces: int, backward: bool) -> _Pieces:
    """The redistribution of ``sent_s``, in pieces."""
    rows = prices.space.strategy_sets[use.source].outputs[use.output]
    columns = prices.space.strategy_sets[use.target].inputs[use.position]

    def summed(what: str, of_step: Callable[[str, Axes, _Ends], np.ndarray]) -> np.ndarray:
        def value(axes: Axes, source: Placement, target: Placement, before: np.ndarray, after: np.ndarray
                  ) -> np.ndarray:
            action = actions_of(axes, source, target, prices.space.mesh_shape)[backward]
            ends = (target, source, after, before) if backward else (source, target, before, after)
            return of_step(action, axes, ends) if action in COLLECTIVES else np.zeros(len(before))

        found = prices.redistribution.summed_along(use, f"{pieces} pieces {what}, backward: {backward}", value)
        return np.where(np.isfinite(found), found, 0.0)[rows[:, None], columns]

    def longer_s(action: str, axes: Axes, ends: _Ends) -> np.ndarray:
        source, target, before, after = ends
        action_s = prices.redistribution.single.action_s
        whole_s, piece_s = (action_s(action, axes, source, target, before / count, after / count)
                            for count in (1, pieces))
        return np.maximum(pieces * piece_s - whole_s, 0.0)

    def put_s(action: str, axes: Axes, ends: _Ends) -> np.ndarray:
        source, target, _, received = ends
        in_order = all(placement.in_order for placement in (source, target) if placement.is_shard)
        return np.asarray(collectives.copy_s(received, prices.device)) if in_order else np.zeros(len(received))

    return _Pieces(sent_s + summed("longer", longer_s), summed("put", put_s))


def at_once_s(sent_s: np.ndarray, products_s: np.ndarray, pieces: int, after_s: np.ndarray | None = None
              ) -> np.ndarray:
    """The most seconds in which a redistribution of ``sent_s`` overlaps with products of ``products_s`` in ``pieces``.
    ``after_s``: compute after the last product, with which the last piece may overlap (None: all of it waits)."""
    overlapped = (pieces - 1) / pieces
    if after_s is None:
        return np.minimum(overlapped * sent_s, overlapped * products_s)
    return np.minimum(sent_s, overlapped * products_s + after_s)


def _products(prices: Prices, layer: int, pieces: int) -> _Products:
    """Of one layer."""
    whole, piece = prices.whole.op_of(layer), prices.whole.piece_of(layer, pieces)
    forward_s, operands_s = pieces * piece.forward_s, pieces * (1 - OF_WEIGHT) * piece.backward_s
    longer = forward_s - whole.forward_s, operands_s - (1 - OF_WEIGHT) * whole.backward_s
    return _Products(forward_s, operands_s, OF_WEIGHT * whole.backward_s, longer)


def _of_readers(prices: Prices, use: TensorUse, layers: LayerOverlap, pieces: int) -> _Products:
    """By strategy of the target, the most seconds of the readers' products (of weights' gradients: of those that may be
    put off until the operand's gradient is on its way), and the least by which they take longer."""
    space = prices.space
    if space.decisions[use.target].kind != "shared_read":
        return _products(prices, use.target, pieces)
    results = space.strategy_sets[use.target].outputs[0]
    forward_s, operands_s, put_off_s, *longer = (np.zeros(len(results)) for _ in range(5))
    for reader in layers.readers:
        operand, own = space.uses_by[reader][0], _products(prices, reader, pieces)
        reads = space.strategy_sets[reader].inputs[operand.position]
        equal = results[:, None] == reads
        forward_s += np.where(equal, own.forward, 0.0).max(axis=1)
        operands_s += np.where(equal, own.operands, 0.0).max(axis=1)
        sends = _num_steps(prices, operand, _sends_back) > 0
        put_off_s += np.where(sends[results[:, None], reads], 0.0, own.weights).max(axis=1)
        for total, one in zip(longer, own.longer, strict=True):
            total += np.where(equal.any(axis=1), np.where(equal, one, np.inf).min(axis=1), 0.0)
    return _Products(forward_s, operands_s, put_off_s, (longer[0], longer[1]))


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
