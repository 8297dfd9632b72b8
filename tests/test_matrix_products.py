"""Matrix products on meshes of two and three axes: the classical algorithms are strategies of the space.

2-D (SUMMA): both operands in shards over both axes, gathered along one each. 3-D: each axis cuts one index, sums over
the last. 2.5-D: as 3-D, with operands whole on the last axis.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from transformers.modeling_outputs import SequenceClassifierOutput

from autoparallel.capture import capture
from autoparallel.pricing import Prices, SpacePricer
from autoparallel.search import evaluate
from autoparallel.strategies.space import Strategy, StrategySpace
from benchmarks.model_zoo import Candidate, Ranks, truth, worst_error
from tests.support.random_plans import TOLERANCE, cluster
from tests.support.tiers import with_slow

#: Mesh, storage of x [m, k] and of w [k, n], and what the product cuts, by axis.
PRODUCTS = {
    "2-D": ((2, 2), ("S(0)", "S(1)"), ("S(0)", "S(1)"), ("m", "n")),
    "2-D, uneven": ((3, 2), ("S(0)", "S(1)"), ("S(0)", "S(1)"), ("m", "n")),
    "2.5-D": ((2, 2, 2), ("S(0)", "S(1)", "I"), ("S(0)", "S(1)", "I"), ("m", "n", "k")),
    "3-D": ((2, 2, 2), ("S(0)", "S(1)", "S(1)"), ("S(0)", "S(1)", "S(0)"), ("m", "n", "k")),
}


class Product(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = torch.nn.Parameter(torch.randn(8, 12, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> SequenceClassifierOutput:
        y = torch.matmul(x, self.w)
        return SequenceClassifierOutput(loss=y.sin().sum(), logits=y)


@pytest.mark.parametrize("name", with_slow(PRODUCTS, "2-D", "3-D"))
def test_products_on_several_axes(name: str) -> None:
    mesh, *wanted = PRODUCTS[name]
    model, inputs = Product(), {"x": torch.randn(10, 8, dtype=torch.float64)}
    expected, graph = truth(model, inputs), capture(model, (), inputs)
    space, machine = StrategySpace(graph, mesh), cluster(math.prod(mesh))
    named = dict(zip(("x", "w", "matmul"), wanted, strict=True))
    assert named.keys() <= {decision.name for decision in space.decisions}
    pricer = SpacePricer(Prices(space, machine))
    for plan in range(3):
        draw, chosen = random.Random(plan), list[Strategy]()
        for decision, s in zip(space.decisions, space.strategy_sets, strict=True):
            own = [strategy for strategy in s.strategies if s.names(strategy) == named.get(decision.name)]
            assert own or decision.name not in named, f"{decision.name} has no strategy {named[decision.name]}"
            chosen.append(draw.choice(own or s.strategies))
        assert math.isfinite(evaluate(pricer.full(), pricer.choice_of(chosen)).objective)
        model.zero_grad()
        error, worst = worst_error(expected, Ranks(Candidate(space, tuple(chosen)), machine).step(model, inputs))
        assert error <= TOLERANCE, f"{worst}, plan {plan}"
