"""Softmax, its kin and places of maxima along a cut dim, where the ranks exchange numbers of each row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoparallel.capture import capture
from autoparallel.strategies.space import StrategySpace
from benchmarks.model_zoo import TOLERANCE, Candidate, Ranks, toy_cluster, truth, worst_error
from benchmarks.networks import Output
from benchmarks.rule_truth.claims import claims
from tests.support.rule_cases import case_of, strategies_that_hold

aten = torch.ops.aten

#: Op and arguments (a tuple is a tensor's shape), and the rows along what it reduces or normalises.
CASES: dict[str, tuple[tuple[Any, ...], set[str]]] = {
    "softmax": ((aten.softmax.int, (2, 3, 12), -1), {"along d2"}),
    "softmax, uneven": ((aten.softmax.int, (2, 5, 3), 1), {"along d1"}),
    "log_softmax": ((aten.log_softmax.int, (4, 9), 1), {"along d1"}),
    "log_softmax, of the first dim": ((aten.log_softmax.int, (7, 3), 0), {"along d0"}),
    "logsumexp": ((aten.logsumexp.default, (4, 9), [1]), {"along d1"}),
    "logsumexp, of two dims": ((aten.logsumexp.default, (4, 9, 5), [0, -1], True), {"along d0", "along d2"}),
    "argmax": ((aten.argmax.default, (4, 9), 1), {"along d1"}),
    "argmin, kept": ((aten.argmin.default, (5, 3), 0, True), {"along d0"}),
    "argmax of everything": ((aten.argmax.default, (4, 9, 5)), {"along d0", "along d1", "along d2"}),
    "argmin of everything, kept": ((aten.argmin.default, (4, 1, 5), None, True), {"along d0", "along d2"}),
    "max": ((aten.max.dim, (4, 9), 1), {"along d1"}),
    "min, kept": ((aten.min.dim, (5, 4, 3), -2, True), {"along d1"}),
}


@pytest.mark.parametrize("name", list(CASES))
def test_along_a_cut_dim(name: str) -> None:
    """Even and uneven shards on 2, 3 and 4 ranks, forward and gradients."""
    arguments, rows = CASES[name]
    assert {row for row in strategies_that_hold(*arguments) if row.startswith("along")} == rows


@pytest.mark.parametrize("op", [aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim])
def test_of_equal_values_the_first_is_the_best(op: Any) -> None:
    """As in one process; and what is no number wins."""
    few = torch.tensor([[1.0, 2, 2, 1, 2], [0, 0, 0, 0, 0], [1, 3, torch.nan, 3, torch.nan]], dtype=torch.float64)
    infinite = torch.full((3, 5), -torch.inf, dtype=torch.float64)
    infinite[1], infinite[2, 3] = torch.inf, torch.nan
    arguments = [(1,), (0,), ()] if "arg" in str(op) else [(1,), (0,)]
    for rest in arguments:
        case = replace(case_of(op, (3, 5), *rest), draws=((few,), (infinite,)))
        for num_ranks in (2, 3, 5):
            found = [claim for claim in claims(case, num_ranks)[0] if claim.axis_strategy.startswith("along")]
            assert not [claim for claim in found if claim.wrong]
            assert found or (rest == (0,) and num_ranks == 5)


class OneOfEach(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 13))

    def forward(self, x: Tensor) -> Any:
        y = x * self.weight
        most, place = y.max(-1)
        made = (y.softmax(-1).square().sum(-1) + y.log_softmax(-1)[:, 3] + y.logsumexp(-1) + most
                + (place + y.argmin(-1)).float())
        return Output(loss=made.square().sum(), logits=made)


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_along_a_dim_that_several_axes_cut(mesh: tuple[int, ...]) -> None:
    """13 places on 2 x 2 ranks: shards of 4, 3, 4 and 2."""
    model, inputs = OneOfEach(), {"x": torch.randn(6, 13, generator=torch.Generator().manual_seed(0))}
    space = StrategySpace(capture(model, (), inputs), mesh)
    chosen, cut = [], 0
    for s in space.strategy_sets:
        along = next((number for number, one in enumerate(s.axis_strategies) if one.name.startswith("along")), 0)
        chosen.append((along,) * len(mesh) if (along,) * len(mesh) in s.strategies else s.strategies[0])
        cut += chosen[-1] == (along,) * len(mesh) != s.strategies[0]
    assert cut == 5
    cluster = toy_cluster()
    found = worst_error(truth(model, inputs), Ranks(Candidate(space, tuple(chosen)), cluster).step(model, inputs))
    assert found[0] <= TOLERANCE, found
