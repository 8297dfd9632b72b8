"""Norms along a cut dim, where the ranks add up the statistics, compute what the whole computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoparallel.pricing import Prices
from cost_models import Cluster
from tests.test_rule_truth import case_of, rows_that_hold

aten = torch.ops.aten
OF_INSTANCES = (None, None, True, 0.1, 1e-5, False)

#: Op and arguments (a tuple is a tensor's shape), and the rows of dims that are normed along.
CASES: dict[str, tuple[tuple[Any, ...], set[str]]] = {
    "layer": ((aten.layer_norm.default, (2, 3, 12), [12], (12,), (12,)), {"norm d2"}),
    "layer, of two dims": ((aten.layer_norm.default, (2, 5, 6), [5, 6], (5, 6), (5, 6)), {"norm d1", "norm d2"}),
    "layer, without a scale": ((aten.layer_norm.default, (2, 9), [9], None, None, 0.1), {"norm d1"}),
    "RMS": ((aten.rms_norm.default, (2, 3, 12), [12], (12,)), {"norm d2"}),
    "RMS, of two dims": ((aten.rms_norm.default, (2, 5, 6), [5, 6], None, 0.1), {"norm d1", "norm d2"}),
    "group": ((aten.group_norm.default, (2, 4, 5, 6), 2, (4,), (4,)), {"norm d2", "norm d3"}),
    "group, without a scale": ((aten.group_norm.default, (3, 6, 7), 3), {"norm d2"}),
    "instance": ((aten.instance_norm.default, (2, 4, 6, 5), (4,), (4,), *OF_INSTANCES), {"norm d2", "norm d3"}),
}


@pytest.mark.parametrize("name", list(CASES))
def test_norms_on_pieces(name: str) -> None:
    """Even and uneven pieces on 2, 3 and 4 ranks, forward and gradients."""
    arguments, rows = CASES[name]
    assert {row for row in rows_that_hold(*arguments) if row.startswith("norm")} == rows


def test_what_is_added_up_is_priced() -> None:
    """Two numbers of each row, however many ranks there are: mean and deviation, and two sums for the gradient."""
    from autoparallel.strategies.space import StrategySpace

    case = case_of(aten.layer_norm.default, (2, 3, 64), [64], (64,), (64,))
    for num_ranks in (2, 4):
        space = StrategySpace(case.graph, (num_ranks,))
        prices = Prices(space, Cluster.load("h100-sxm", num_devices=num_ranks))
        decision = next(decision.index for decision in space.decisions if decision.kind == "op")
        inside = prices.op(space.strategy_sets[decision]).inside
        sent = {(i.exchange.forward, i.exchange.backward): float(i.num_bytes[i.seconds > 0].max()) for i in inside}
        assert sent == {(2, 0): 2 * 3 * 4.0, (0, 1): 2 * 2 * 3 * 4.0}
