"""Prices are sums over what runs, whichever search chose it; limits are kept."""

from __future__ import annotations

import pytest
import torch

from autoparallel import Cluster, Plan
from autoparallel.capture import capture
from autoparallel.compiler import plan
from autoparallel.pricing import Prices, SpacePricer
from autoparallel.rules.space import StrategySpace
from autoparallel.search import evaluate
from tests.models import CASES


@pytest.mark.parametrize("case_name", ["llama", "bert", "resnet"])
@pytest.mark.parametrize("search", ["exact", "ilp", "recursive"])
def test_the_price_is_the_sum_over_what_runs(case_name: str, search: str) -> None:
    """Objective = evaluate on the whole problem = parts of the report; the bound is below; searches agree."""
    case = CASES[case_name]
    args, kwargs = case.inputs(8)
    cluster = Cluster.load("h100-sxm", num_devices=4)
    model = case.build()
    made = plan(model, cluster, example_inputs=args, example_kwargs=kwargs, mesh_shape=(2, 2), search=search)
    space = StrategySpace(capture(model, args, kwargs), (2, 2))
    pricer = SpacePricer(Prices(space, cluster))
    judged = evaluate(pricer.full(), pricer.choice_of(made.labels(space)))
    assert made.evidence.objective_s == judged.objective
    assert made.prediction.step_s == pytest.approx(judged.objective, rel=1e-9)
    assert made.evidence.lower_bound_s <= judged.objective
    optimum = plan(model, cluster, example_inputs=args, example_kwargs=kwargs, mesh_shape=(2, 2), search="exact")
    assert made.evidence.objective_s <= optimum.evidence.objective_s * (1.05 if search == "recursive" else 1 + 1e-6)
    assert optimum.evidence.lower_bound_s <= made.evidence.objective_s * (1 + 1e-9)


def test_a_memory_limit_is_kept_and_costs_time() -> None:
    case = CASES["llama"]
    _, kwargs = case.inputs(8)
    cluster = Cluster.load("h100-sxm", num_devices=4)

    def at(limit: float | None) -> Plan:
        return plan(case.build(), cluster, example_kwargs=kwargs, mesh_shape=(4,), memory_limit_bytes=limit)

    free = at(None)
    limit = free.prediction.peak_bytes * 0.6
    bound = at(limit)
    assert bound.prediction.peak_bytes <= limit < free.prediction.peak_bytes
    assert bound.evidence.objective_s > free.evidence.objective_s


def test_a_bias_does_not_stand_in_for_the_gradient_of_an_input() -> None:
    """Backward of a layer whose input needs no gradient is one product, with a bias or without."""
    cluster = Cluster.load("h100-sxm", num_devices=1)
    x = torch.zeros(512, 4096)

    def backward_flops_s(bias: bool) -> float:
        layer = torch.nn.Linear(4096, 4096, bias=bias)
        space = StrategySpace(capture(layer, (x,), {}), (1,))
        (site,) = [s for s in space.sites if s.kind == "op"]
        return float(Prices(space, cluster).op(space.strategies[site.index]).backward_s[0])

    assert backward_flops_s(bias=True) == pytest.approx(backward_flops_s(bias=False), rel=0.01)
