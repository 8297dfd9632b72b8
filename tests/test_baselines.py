"""The classical plans come out exactly, counted on the emitted programs; and prices are sums over what runs."""

from __future__ import annotations

from typing import Any

import pytest

from autoparallel import Cluster, Plan
from autoparallel.capture import capture
from autoparallel.compiler import plan
from autoparallel.lower import check, count_collectives, emit
from autoparallel.pricing import Prices, SpacePricer
from autoparallel.rules.space import StrategySpace
from autoparallel.search import evaluate
from tests.models import CASES

LAYERS = 2
Counts = dict[tuple[str, str], int]


def emitted(case_name: str, num_ranks: int, **options: Any) -> tuple[Counts, StrategySpace, Plan]:
    """Collectives of the first rank's program; scalars do not count."""
    case = CASES[case_name]
    args, kwargs = case.inputs(8)
    cluster = Cluster.load("h100-sxm", num_devices=num_ranks)  # gloo would rather reduce than scatter
    model = case.build()
    made = plan(model, cluster, example_inputs=args, example_kwargs=kwargs, mesh_shape=(num_ranks,), **options)
    space = StrategySpace(capture(model, args, kwargs), (num_ranks,))
    program = emit(space, made.labels(space), Prices(space, cluster).path, (0,))
    check(program, space, (0,))
    return count_collectives(program), space, made


def read_parameters(space: StrategySpace) -> int:
    read = {link.source for link in space.links}
    return sum(site.kind == "parameter" and site.index in read for site in space.sites)


@pytest.mark.parametrize("case_name", ["mlp", "llama", "gpt2", "vit"])
def test_ddp_reduces_each_gradient_once_and_nothing_else(case_name: str) -> None:
    counts, space, _ = emitted(case_name, 4, baseline="ddp")
    assert counts == {("backward", "all_reduce"): read_parameters(space)}


@pytest.mark.parametrize("case_name", ["mlp", "llama", "gpt2", "vit"])
def test_fsdp_gathers_each_parameter_and_scatters_each_gradient(case_name: str) -> None:
    counts, space, made = emitted(case_name, 4, baseline="fsdp")
    num_parameters = read_parameters(space)
    assert counts == {("forward", "all_gather"): num_parameters, ("backward", "reduce_scatter"): num_parameters}
    assert all(made.strategies[s.name][0].startswith("S(") for s in space.sites if s.kind == "parameter")


def test_tensor_parallel_is_megatrons() -> None:
    """Two all-reduces per layer forward and two backward, and one backward before the head."""
    counts, _, made = emitted("llama", 2, baseline="tensor_parallel")
    assert counts == {("forward", "all_reduce"): 2 * LAYERS, ("backward", "all_reduce"): 2 * LAYERS + 1}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, rows in (("self_attn.q_proj", "S(0)"), ("self_attn.k_proj", "S(0)"), ("self_attn.v_proj", "S(0)"),
                           ("self_attn.o_proj", "S(1)"), ("mlp.gate_proj", "S(0)"), ("mlp.down_proj", "S(1)")):
            assert made.strategies[f"{prefix}{name}.weight"] == (rows,)


def test_sequence_parallel_has_pairs_instead() -> None:
    """Before each pair of products an all-gather, after it a reduce-scatter; no all-reduce of activations.

    The first gather is saved where the embedding, cheap, is looked up whole on every rank.
    """
    counts, _, _ = emitted("llama", 2, baseline="sequence_parallel")
    assert counts["forward", "reduce_scatter"] == 2 * LAYERS
    assert 2 * LAYERS <= counts["forward", "all_gather"] <= 2 * LAYERS + 1  # with the one before the head
    assert counts["backward", "reduce_scatter"] == counts["forward", "all_gather"]
    assert counts["backward", "all_gather"] == counts["forward", "reduce_scatter"]
    assert ("forward", "all_reduce") not in counts


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
