"""Mixtures of experts whose rows travel to the ranks of their experts: which may, and the bytes on their way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoparallel.pricing.exchanges import Inside
from autoparallel.rules.rule import Exchange
from autoparallel.strategies.space import StrategySet

#: The name of the variant of which rows travel (`kernels.variants.VARIANTS`).
DISPATCH = "dispatch"


def sends_rows(strategy_set: StrategySet) -> bool:
    """Whether some strategy sends rows of a mixture to the ranks of their experts."""
    return any(one.variant == DISPATCH for one in strategy_set.axis_strategies)


def rows_bytes(inside: Sequence[Inside], count: int) -> np.ndarray:
    """Bytes of a mixture's rows on their way, or of their results, whichever are more: sent and received, by ``count``
    strategies."""
    moved = dict[Exchange, np.ndarray]()
    for one in inside:
        if one.variant == DISPATCH and not one.exchange.fixed:
            there = np.where(one.seconds > 0, one.num_bytes, 0.0)
            moved[one.exchange] = moved.get(one.exchange, 0.0) + there
    *rows, results = moved.values() or [np.zeros(count)]
    return 2.0 * np.maximum(sum(rows, np.zeros(count)), results)


__all__ = ["DISPATCH", "rows_bytes", "sends_rows"]
