"""Plans: their text, their file, their evidence; given plans and pins are what runs; baselines keep their pattern."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

import autoparallel
from autoparallel import Cluster, Plan
from autoparallel.errors import InfeasibleError, PlanError, SearchError
from autoparallel.layout import INVARIANT, REPLICATE, shard
from autoparallel.lower import count_collectives, emit
from autoparallel.plan_cli import progress_line
from autoparallel.plans import BlockLayouts, CollectiveUse, Evidence, Prediction
from autoparallel.plans.reports.text import sensitivities, text_report
from autoparallel.pricing import Prices, SpacePricer
from autoparallel.search import evaluate
from autoparallel.strategies.space import StrategySpace
from tests.support.captured import graph_of, plan_of
from tests.support.models import CASES
from tests.support.ranks import mesh_of
from tests.support.reference import (
    assert_same_gradients,
    assert_same_loss,
    assert_same_parameters,
    train,
    train_reference,
)
from tests.support.tiers import slow

LAYERS = 2
AXES = ("dp", "tp")


def planned(case_name: str, mesh_shape: tuple[int, ...] = (2, 2), cluster: str = "h100-sxm", **options: Any) -> Plan:
    """Planned once for options that differ in what is left out only."""
    given = {name: value for name, value in options.items() if value is not None}
    return _planned(case_name, mesh_shape, cluster, **given)


@functools.cache
def _planned(case_name: str, mesh_shape: tuple[int, ...], cluster: str, **options: Any) -> Plan:
    machine = Cluster.load(cluster, num_devices=torch.Size(mesh_shape).numel())
    return plan_of(case_name, machine, mesh_shape=mesh_shape,
                   axis_names=AXES[-len(mesh_shape):] if len(mesh_shape) <= len(AXES) else None, **options)


@functools.cache
def space_of(case_name: str, mesh_shape: tuple[int, ...] = (2, 2)) -> StrategySpace:
    return StrategySpace(graph_of(case_name), mesh_shape, AXES[-len(mesh_shape):])


def prices_of(case_name: str, mesh_shape: tuple[int, ...], cluster: str = "h100-sxm", direct: bool = False) -> Prices:
    machine = Cluster.load(cluster, num_devices=torch.Size(mesh_shape).numel())
    return Prices(space_of(case_name, mesh_shape), machine, direct=direct)


# ------------------------------------------------------------------------------------------------ as text and as a file

names = st.text(min_size=1, max_size=8)
numbers = st.floats(0, 1e30, allow_nan=False)
USES = st.builds(CollectiveUse, names, names, names, st.integers(0, 2**60), numbers, numbers)
MESHES = st.lists(st.tuples(st.integers(1, 64), names), min_size=1, max_size=3, unique_by=lambda axis: axis[1])
PLANS = MESHES.flatmap(lambda axes: st.builds(
    Plan,
    fingerprint=names,
    mesh_shape=st.just(tuple(size for size, _ in axes)),
    axis_names=st.just(tuple(name for _, name in axes)),
    strategies=st.dictionaries(names, st.tuples(*[names for _ in axes]), max_size=3),
    cluster=names,
    evidence=st.builds(Evidence, names, numbers, numbers, numbers, names, st.dictionaries(names, numbers, max_size=2)),
    prediction=st.builds(
        Prediction, *[numbers] * 8,
        collectives=st.lists(USES, max_size=2).map(tuple),
        repeated_ops=st.lists(names, max_size=2).map(tuple),
    ),
    blocks=st.lists(
        st.builds(BlockLayouts, st.lists(names, min_size=1, max_size=2).map(tuple),
                  st.lists(st.tuples(names, names, names), max_size=2).map(tuple)),
        max_size=2,
    ).map(tuple),
    pins=st.dictionaries(names, names, max_size=2),
))


@settings(max_examples=50)
@given(PLANS)
def test_any_plan_survives_json(made: Plan) -> None:
    assert Plan.from_json(made.to_json()) == made


def test_a_saved_plan_loads_equal_and_reads_well(tmp_path: Path) -> None:
    made = planned("llama")
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["version"] == 2 and data["axis_names"] == ["dp", "tp"]
    assert set(data["strategies"]) == {decision.name for decision in space_of("llama").decisions}


def test_diff_names_what_differs() -> None:
    """Nothing between equal plans, one line for one changed decision, and the mesh."""
    made = planned("mlp")
    assert made.diff(made).splitlines() == [made.diff(made)] and made.diff(made).startswith("0 differences")
    changed = dataclasses.replace(made, strategies={**made.strategies, "relu": ("wat", "part")})
    head, line = made.diff(changed).splitlines()
    assert head.startswith("1 differences; predicted step")
    assert line == f"relu: {'·'.join(made.strategies['relu'])} -> wat·part"
    fewer = dataclasses.replace(made, strategies={k: v for k, v in made.strategies.items() if k != "relu"})
    assert made.diff(fewer).splitlines()[1].endswith("-> nothing")
    assert "mesh: (2, 2) -> (4,)" in made.diff(planned("mlp", (4,)))


def test_the_report_has_its_parts() -> None:
    """Step time and its parts, memory, every collective, equal blocks told once, bound, gap and planning time."""
    made = planned("llama", baseline="tensor_parallel")
    text = made.report(details=True)
    assert text == text_report(made, 100, details=True) and max(map(len, text.splitlines())) <= 100
    assert made.report() == text_report(made) != text
    for part in ("h100-sxm", made.fingerprint, "forward compute", "backward compute", "optimizer", "tensor parallel",
                 "exposed communication", "whole step", "memory of the fullest rank", "activations",
                 "not searched: baseline tensor_parallel", "planning, seconds of a core: capture"):
        assert part in text, part
    for use in made.prediction.collectives:
        assert re.search(rf"{use.kind}\s+.\s+{use.axis}\s+.\s+{use.direction}\s+.\s+{use.count}\b", text), use
    assert "model.layers.0-1 (2 equal blocks)" in text


# ------------------------------------------------------------------------------------------------------------- evidence


@pytest.mark.parametrize(("case_name", "options"), [
    ("mlp", {}), ("gpt2", {}), slow("bert", {"search": "exact"}), ("llama", {"baseline": "fsdp"}),
    ("mlp", {"baseline": "ddp"}), slow("resnet", {"search": "recursive"}),
])
def test_the_objective_is_the_price_of_the_plan(case_name: str, options: dict[str, Any]) -> None:
    """Objective = `evaluate` on the whole problem = sum of the prediction's parts, and not below the bound."""
    made = planned(case_name, **options)
    pricer = SpacePricer(prices_of(case_name, (2, 2), direct=made.direct))
    judged = evaluate(pricer.full(), pricer.choice_of(made.strategies_on(pricer.space)))
    assert made.evidence.objective_s == judged.objective
    assert made.prediction.added_s - made.prediction.waiting_s == pytest.approx(judged.objective, rel=1e-9)
    assert made.prediction.peak_bytes == judged.peak_bytes
    assert made.evidence.lower_bound_s <= judged.objective * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("search", ["recursive", "ilp", "exact"])
def test_every_search_plans_what_is_too_wide_for_elimination(search: str) -> None:
    made, auto = planned("bert", (2, 2, 2), "local-cpu", search=search), wide_plan()
    assert made.evidence.lower_bound_s <= made.evidence.objective_s <= 1.05 * auto.evidence.objective_s


@functools.cache
def wide_plan() -> Plan:
    return planned("bert", (2, 2, 2), "local-cpu")


@pytest.mark.parametrize("baseline", [None, slow("ddp"), "fsdp", "tensor_parallel", slow("sequence_parallel")])
def test_predicted_collectives_are_those_of_the_program(baseline: str | None) -> None:
    """The report's counts, kind by kind (it counts scalars too, which the program's count leaves out)."""
    made = planned("llama", baseline=baseline)
    prices = prices_of("llama", (2, 2), direct=made.direct)
    program = emit(prices.space, made.strategies_on(prices.space), prices.path, (0, 0))
    predicted: dict[tuple[str, str], int] = {}
    for use in made.prediction.collectives:
        predicted[use.direction, use.kind] = predicted.get((use.direction, use.kind), 0) + use.count
    scalars = [n.meta["step"] for n in program.module.graph.nodes
               if "step" in n.meta and n.meta["global_meta"].num_elements <= 1]
    for (direction, kind), count in count_collectives(program).items():
        few = sum(getattr(step, direction) == kind for step in scalars)
        assert count <= predicted[direction, kind] <= count + few


@pytest.mark.parametrize("case_name", ["mlp", pytest.param("llama", marks=pytest.mark.slow)])
def test_alternatives_are_other_plans_and_no_better(case_name: str) -> None:
    made = planned(case_name)
    others = made.alternatives(3)
    assert others and all(o.evidence.objective_s >= made.evidence.lower_bound_s for o in others)
    assert [o.evidence.objective_s for o in others] == sorted(o.evidence.objective_s for o in others)
    seen = {json.dumps(p.strategies) for p in (made, *others)}
    assert len(seen) == 1 + len(others)


def test_explaining_a_choice() -> None:
    made = planned("mlp")
    chosen, *others = made.explain("up.weight")
    assert chosen.strategy == made.strategies["up.weight"] and chosen.resolved_s == made.evidence.objective_s
    assert others
    for other in others:
        assert other.alone_s >= other.least_s * (1 - 1e-9) >= made.evidence.lower_bound_s * (1 - 2e-9)
        assert other.resolved_s is None or other.alone_s >= other.resolved_s * (1 - 1e-9)
    with pytest.raises(PlanError, match=r"no op, parameter or input 'weight'; is it one of \['up.weight'"):
        made.explain("weight")
    for travelled in (Plan.from_json(made.to_json()), pickle.loads(pickle.dumps(made))):
        assert travelled == made
        with pytest.raises(PlanError, match="read from a file"):
            travelled.explain("up.weight")


@pytest.mark.slow
def test_effects_of_bandwidth_and_memory() -> None:
    """As planning anew for such machines says; a slower link, or less memory, never makes a step shorter."""
    free = planned("llama", memory_limit_bytes=math.inf)
    limit = 0.8 * free.prediction.peak_bytes
    made = planned("llama", memory_limit_bytes=limit)
    found = {(s.what, s.factor): s for s in made.sensitivity((0.25, 4.0))}
    machine = Cluster.load("h100-sxm", num_devices=4)
    wires = f"bandwidth of {machine.links[0].name}"
    assert found.keys() == {(what, factor) for what in (wires, "memory limit") for factor in (0.25, 4.0)}
    step_s = made.prediction.step_s
    assert found[wires, 0.25].held_s > step_s > found[wires, 4.0].held_s
    assert all(s.best_s <= s.held_s for s in found.values())
    assert all((s.num_others > 0) == (s.best_s < s.held_s) for s in found.values())
    slow = dataclasses.replace(machine.links[0], bandwidth_bytes_per_s=machine.links[0].bandwidth_bytes_per_s / 4)
    slower = dataclasses.replace(machine, links=(slow, *machine.links[1:]))
    again = plan_of("llama", slower, mesh_shape=(2, 2), axis_names=AXES, memory_limit_bytes=limit)
    assert found[wires, 0.25].best_s == pytest.approx(again.prediction.step_s, rel=2e-3)
    assert found["memory limit", 4.0].held_s == step_s
    assert found["memory limit", 4.0].best_s == pytest.approx(free.prediction.step_s, rel=2e-3)
    assert found["memory limit", 0.25].held_s == math.inf
    with pytest.raises(PlanError, match="read from a file"):
        Plan.from_json(made.to_json()).sensitivity()


@pytest.mark.parametrize(("error", "said"), [(SearchError("no time is left"), "none found"),
                                             (InfeasibleError("they are too large"), "none fits")])
def test_that_no_plan_was_found_is_not_that_none_fits(error: Exception, said: str) -> None:
    peak = planned("mlp").prediction.peak_bytes
    study = planned("mlp", memory_limit_bytes=peak).study
    assert study is not None

    def elsewhere(cluster: Cluster, limit: float, held: bool) -> Plan:
        if not held:
            raise error
        return study.elsewhere(cluster, limit, held)

    found = dataclasses.replace(study, elsewhere=elsewhere).sensitivity((0.5, 2.0))
    assert all(s.none_found == (said == "none found") and s.best_s == s.held_s for s in found)
    table = dict(zip(("what", "held", "best"), [list(sensitivities(1.0, found).columns[c].cells) for c in (0, 2, 3)],
                     strict=True))
    by_memory = [n for n, what in enumerate(table["what"]) if what == "memory limit"]
    assert [table["held"][n] == "does not fit" for n in by_memory] == [True, False]
    assert [table["best"][n] == said for n in by_memory] == [True, False]
    assert (table["best"][by_memory[1]] == f"{table['held'][by_memory[1]]} or less") == (said == "none found")


# ------------------------------------------------------------------------------------------------------------ baselines


def counted(case_name: str, num_ranks: int, baseline: str, cluster: str = "h100-sxm") -> dict[tuple[str, str], int]:
    made = planned(case_name, (num_ranks,), cluster, baseline=baseline)
    prices = prices_of(case_name, (num_ranks,), cluster, made.direct)
    return count_collectives(emit(prices.space, made.strategies_on(prices.space), prices.path, (0,)))


def num_parameters(case_name: str) -> int:
    """Those that the program reads and that learn; tied ones once."""
    space = space_of(case_name, (4,))
    read = {use.source for use in space.uses if use.meta.requires_grad}
    return sum(decision.kind == "parameter" and decision.index in read for decision in space.decisions)


@pytest.mark.parametrize("case_name", ["gpt2", "llama", "mlp", slow("bert")])
def test_ddp_is_one_all_reduce_per_gradient(case_name: str) -> None:
    assert counted(case_name, 4, "ddp") == {("backward", "all_reduce"): num_parameters(case_name)}


@pytest.mark.parametrize("case_name", ["gpt2", "llama", "mlp", "bert"])
def test_fsdp_is_one_gather_per_parameter_and_one_scatter_per_gradient(case_name: str) -> None:
    each = num_parameters(case_name)
    assert counted(case_name, 4, "fsdp") == {("forward", "all_gather"): each, ("backward", "reduce_scatter"): each}


def test_tensor_parallel_is_two_all_reduces_per_layer_each_way() -> None:
    """And one more backward, before the head."""
    assert counted("llama", 2, "tensor_parallel") == {
        ("forward", "all_reduce"): 2 * LAYERS, ("backward", "all_reduce"): 2 * LAYERS + 1,
    }


@pytest.mark.parametrize("how", [{"baseline": "tensor_parallel", "mesh_shape": (2,)}, {"by_hand": "tp=2"}], ids=str)
def test_tensor_parallel_cuts_matrices_that_autocast_converts(how: dict[str, Any]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    with torch.autocast("cpu", torch.bfloat16):
        made = autoparallel.plan(model, Cluster.load("h100-sxm", num_devices=2),
                                 example_inputs=(torch.zeros(8, 16, 64),), **how)
    assert [name for key, (name, *_) in made.strategies.items() if key.startswith("linear")] == ["n", "k"]


@pytest.mark.slow
def test_sequence_parallel_cuts_matrices_that_autocast_converts() -> None:
    """A converted weight is not gathered as the sequence's activations are."""
    args, kwargs = CASES["llama"].inputs(8)

    def cut(enabled: bool) -> list[str]:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            made = autoparallel.plan(CASES["llama"].build(), Cluster.load("h100-sxm", num_devices=4),
                                     example_inputs=args, example_kwargs=kwargs, by_hand="tp=4,sequence_parallel")
        return [name for key, (name, *_) in made.strategies.items() if key.startswith("linear") and ":" not in key]

    assert cut(True) == cut(False) and set(cut(True)) == {"n", "k"}


def test_sequence_parallel_is_pairs_instead() -> None:
    """An all-gather before each pair of products and before the head, a reduce-scatter after each pair.

    Before the first layer there is none where every rank looks up the whole sequence, as is cheaper on this machine.
    (Norm weights, read by shards of the sequence, still need the sum of their gradients.)
    """
    found = counted("llama", 2, "sequence_parallel")
    assert found["forward", "reduce_scatter"] == found["backward", "all_gather"] == 2 * LAYERS
    assert found["forward", "all_gather"] == found["backward", "reduce_scatter"] in (2 * LAYERS, 2 * LAYERS + 1)
    assert set(found) - {("backward", "all_reduce")} == {
        (direction, kind) for direction in ("forward", "backward") for kind in ("all_gather", "reduce_scatter")
    }


@pytest.mark.parametrize("cluster", ["h100-sxm", "a100-sxm", "local-cpu"])
def test_fsdp_is_fsdp_on_every_machine(cluster: str) -> None:
    """Two ranks of local-cpu reduce-scatter slower than they all-reduce: still FSDP, if it was asked for."""
    each = num_parameters("mlp")
    assert counted("mlp", 2, "fsdp", cluster) == {("forward", "all_gather"): each, ("backward", "reduce_scatter"): each}


def test_fsdp_on_two_axes_sends_as_little_between_hosts_as_on_one() -> None:
    """Each rank its own part of what it has: not whole parameters, gathered inside the host first."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(2)))
    cluster, x = Cluster.load("h100-sxm", num_devices=16, software="none"), torch.randn(64, 512)
    plans = [autoparallel.plan(layers, cluster, example_inputs=(x,), mesh_shape=shape, baseline="fsdp")
             for shape in ((16,), (2, 8))]
    one_axis, two_axes = [plan.prediction.collectives for plan in plans]
    whole = 2 * 512 * 512 * 4
    assert [use.num_bytes for use in one_axis if use.direction == "forward"] == [whole]
    between = [use for use in two_axes if use.axis == "axis0"]
    assert {use.kind: use.num_bytes for use in between} == {"all_gather": whole / 8, "reduce_scatter": whole / 8}


# ------------------------------------------------------------------------------------------------------------- on ranks


def train_plan(case_name: str, made: Plan | None, pins: dict[str, Any] | None = None) -> tuple[Any, Plan, list[str]]:
    """(what training left, the plan that ran, the placements of all parameters) on a (2, 2) mesh."""
    case = CASES[case_name]
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build(), mesh_of(2, 2, axes=AXES), example_inputs=args, example_kwargs=kwargs,
                                    plan=made, pins=pins)
    trained = train(parallel, case, "sgd", num_steps=3)
    return trained, parallel.plan, [f"{n}: {p.placements}" for n, p in parallel.named_parameters()]


def assert_as_one_process(trained: Any, case_name: str) -> None:
    expected = train_reference(CASES[case_name], "sgd", num_steps=3)
    assert_same_loss(trained, expected)
    assert_same_gradients(trained.gradients, expected)
    assert_same_parameters(trained.parameters, expected)


def test_a_loaded_plan_is_the_plan_that_runs(ranks: Any, tmp_path: Path) -> None:
    """A plan that the search would not choose here, through its file, on a tiny Llama: same plan, same numbers."""
    planned("llama", baseline="sequence_parallel").save(tmp_path / "plan.json")
    made = Plan.load(tmp_path / "plan.json")
    for trained, ran, _ in ranks(4).run(train_plan, "llama", made):
        assert ran == made
        assert_as_one_process(trained, "llama")


PINS = {
    "*.q_proj.weight": (Replicate(), Shard(0)),
    "model.norm.weight": {"tp": Shard(0)},
    "input_ids": {"dp": Shard(0)},
    "model.layers.*.mlp": {"tp": Shard(1)},
}


def test_pins_are_honoured_by_the_search() -> None:
    """A parameter's storage, an input, a module's output; on one axis or on all."""
    made, space = planned_with_pins(), space_of("llama")
    strategies = made.strategies_on(space)

    def layout(name: str) -> Any:
        index = space.decision_named[name]
        return space.strategy_sets[index].output_layout(strategies[index])

    for layer in range(LAYERS):
        assert layout(f"model.layers.{layer}.self_attn.q_proj.weight") == (INVARIANT, shard(0))
        path = f"model.layers.{layer}.mlp"
        last = [n for n in space.graph.of_kind("op") if (n.module_path + ".").startswith(path + ".")][-1]
        assert layout(last.name)[1] == shard(1)
    assert layout("model.norm.weight")[1] == shard(0)
    assert layout("input_ids")[0] == shard(0)
    assert made.pins["*.q_proj.weight"] == "I·S(0)" and made.pins["input_ids"] == "S(0)·*"
    assert made.evidence.objective_s >= planned("llama").evidence.objective_s


def planned_with_pins() -> Plan:
    return plan_of("llama", Cluster.load("h100-sxm", num_devices=4), mesh_shape=(2, 2), axis_names=AXES, pins=PINS)


def test_a_pinned_replica_may_be_read_for_different_work() -> None:
    """Replicate() pins what ranks hold of an output: I and R hold the same."""
    made = plan_of("mlp", Cluster.load("h100-sxm", num_devices=2), mesh_shape=(2,), pins={"up": Replicate()})
    space = StrategySpace(graph_of("mlp"), (2,))
    index = space.decision_named["linear"]
    assert space.strategy_sets[index].output_layout(made.strategies_on(space)[index])[0] in (INVARIANT, REPLICATE)


def test_a_pinned_model_computes_the_same(ranks: Any) -> None:
    for trained, ran, placements in ranks(4).run(train_plan, "llama", None, PINS):
        assert "model.layers.0.self_attn.q_proj.weight: (Replicate(), Shard(dim=0))" in placements
        assert ran.pins["model.norm.weight"] == "*·S(0)"
        assert_as_one_process(trained, "llama")


def test_a_plan_edited_by_hand_runs_as_edited(ranks: Any) -> None:
    """DDP's plan with one product's columns cut instead of its batch."""
    made = planned("mlp", baseline="ddp")
    edited = dataclasses.replace(made, strategies={**made.strategies, "linear": ("b0", "n")})
    assert edited.diff(made).startswith("1 differences")
    for trained, ran, _ in ranks(4).run(train_plan, "mlp", edited):
        assert ran.strategies["linear"] == ("b0", "n")
        assert_as_one_process(trained, "mlp")


def test_progress_in_a_line() -> None:
    """Of the command line: before and after the first plan."""
    assert progress_line("bound", float("inf"), 0.25) == (
        "search (bound): no plan yet, none below 0.25 s; Ctrl-C ends the search")
    assert "best 0.5 s, bound 0.25 s, at most 100 % slower than the best" in progress_line("better", 0.5, 0.25)
    assert ", at most 0.5 % slower than the best" in progress_line("better", 0.005298, 0.005272)    # not 0 %
