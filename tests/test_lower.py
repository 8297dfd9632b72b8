"""Lowering: the emitted program is readable, passes its own check, and no corruption of it does.

Nothing here runs but `test_ranks_with_other_programs_get_an_error`: emission and check need no process group.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Node as FxNode

import autoparallel
from autoparallel import Cluster
from autoparallel.api import plan
from autoparallel.capture import capture
from autoparallel.errors import InputError, LoweringError
from autoparallel.kernels.collectives import STEP_FUNCTIONS, all_gather, all_reduce_in_place
from autoparallel.layout import COLLECTIVES, local_shape, parse_layout
from autoparallel.layout.redistribution import ACTIONS
from autoparallel.lower import Program, check, count_collectives, emit, order_digest
from autoparallel.lower.in_place import sum_in_place
from autoparallel.lower.overlapped import overlapped
from autoparallel.planning.baselines import NAMES as BASELINES
from autoparallel.plans import Hybrid
from autoparallel.pricing import Prices
from autoparallel.strategies.space import Strategy, StrategySpace
from tests.support.captured import graph_of, plan_of
from tests.support.models import CASES
from tests.support.ranks import mesh_of
from tests.support.tiers import slow

AXES = ("dp", "tp", "pp")
STEPS = set(STEP_FUNCTIONS.values())


@functools.cache
def space_of(case_name: str, mesh_shape: tuple[int, ...] = (2, 2)) -> tuple[StrategySpace, Prices]:
    space = StrategySpace(graph_of(case_name), mesh_shape, AXES[: len(mesh_shape)])
    return space, Prices(space, Cluster.load("h100-sxm", num_devices=torch.Size(mesh_shape).numel()))


def baseline_strategies(case_name: str, baseline: str, mesh_shape: tuple[int, ...] = (2, 2)) -> list[Strategy]:
    space, prices = space_of(case_name, mesh_shape)
    made = plan_of(case_name, prices.cluster, mesh_shape=mesh_shape, axis_names=space.axis_names, baseline=baseline)
    return made.strategies_on(space)


def random_strategies(space: StrategySpace, seed: int) -> list[Strategy]:
    draw = random.Random(seed)
    return [draw.choice(s.strategies) for s in space.strategy_sets]


def emit_mlp(baseline: str = "tensor_parallel", coordinate: Sequence[int] = (0, 0)) -> tuple[Program, StrategySpace]:
    """A new program at each call: the tests corrupt it."""
    space, prices = space_of("mlp")
    return emit(space, mlp_labels(baseline), prices.path, coordinate), space


@functools.cache
def mlp_labels(baseline: str) -> tuple[Strategy, ...]:
    return tuple(baseline_strategies("mlp", baseline))


def steps_of(program: Program) -> list[FxNode]:
    return [node for node in program.module.graph.nodes if node.target in STEPS]


def call_of(program: Program, name: str) -> FxNode:
    return next(n for n in program.module.graph.nodes if n.op == "call_function" and n.target.__name__ == name)


# ------------------------------------------------------------------------------------------------------ what is emitted


def test_the_program_reads_as_a_list() -> None:
    """One line for each step, with its axis, source and target, and each value's local shape."""
    program, _ = emit_mlp()
    text = program.module.print_readable(print_output=False)
    found = re.findall(r"\w+: \"f32\[[\d, ]*\]\" = \w*collectives_(\w+)\(\w+, '(\w+)', '([^']+)', '([^']+)'", text)
    expected = [(n.target.__name__, *n.args[1:]) for n in steps_of(program)]
    assert found == expected
    assert ("all_reduce", "tp", "P", "I") in found, "Megatron's g"
    assert ("reduce_gradient", "dp", "I", "R") in found, "data parallelism's gradients"
    assert 'param_up_weight: "f32[32, 32]"' in text, "64 rows on two ranks"
    assert re.search(r'linear: "f32\[4, 32\]" = torch.ops.aten.linear.default\(', text), "half batch, half columns"


def test_a_product_that_only_its_sum_reads_is_summed_in_place() -> None:
    program, _ = emit_mlp()
    assert [node.target for node in overlapped(program.module, Hybrid()).graph.nodes].count(all_reduce_in_place) == 1
    program, _ = emit_mlp()
    product = call_of(program, "all_reduce").all_input_nodes[0]
    with program.module.graph.inserting_after(product):
        program.module.graph.call_function(torch.ops.aten.exp.default, (product,)).meta = dict(product.meta)
    assert not any(node.target is all_reduce_in_place for node in sum_in_place(program.module, Hybrid()).graph.nodes)


def test_counts_are_the_steps_collectives() -> None:
    program, _ = emit_mlp("fsdp")
    assert count_collectives(program) == {("forward", "all_gather"): 8, ("backward", "reduce_scatter"): 8}


@pytest.mark.parametrize("case_name", ["mlp", slow("llama")])
def test_every_rank_issues_the_same_collectives(case_name: str) -> None:
    """On an uneven mesh too; other plans issue others."""
    space, prices = space_of(case_name, (2, 3))
    digests = set()
    for seed in range(3):
        strategies = random_strategies(space, seed)
        programs = [emit(space, strategies, prices.path, c) for c in itertools.product(range(2), range(3))]
        assert len({order_digest(p) for p in programs}) == 1
        digests.add(order_digest(programs[0]))
    assert len(digests) == 3


def test_the_digest_detects_orders_that_would_hang() -> None:
    """A collective less, another axis, another size; but not the rank that it is for."""
    program, _ = emit_mlp()
    digest = order_digest(program)
    assert digest == order_digest(emit_mlp(coordinate=(1, 1))[0])
    assert len({digest, order_digest(emit_mlp("ddp")[0]), order_digest(emit_mlp("fsdp")[0])}) == 3
    step = call_of(program, "all_reduce")
    step.update_arg(1, "dp")
    assert order_digest(program) != digest
    step.update_arg(1, "tp")
    assert order_digest(program) == digest
    step.replace_all_uses_with(step.args[0])  # type: ignore[arg-type]
    program.module.graph.erase_node(step)
    assert order_digest(program) != digest


@pytest.mark.parametrize("seed", range(3))
def test_sizes_of_an_uneven_mesh_add_up(seed: int) -> None:
    """The shards along a cut dim, as each step has them, are this rank's and add up to what the step gathers."""
    space, prices = space_of("mlp", (2, 3))
    program = emit(space, random_strategies(space, seed), prices.path, (1, 2))
    for node in steps_of(program):
        step, shape = node.meta["step"], node.meta["global_meta"].shape
        for key, mine, p in (("source_sizes", step.before, step.source), ("target_sizes", step.after, step.target)):
            assert (key in node.kwargs) == p.is_shard
            if p.is_shard:
                (axis,) = step.axes
                whole = (*mine[:axis], *parse_layout("I"), *mine[axis + 1 :])
                here, there = (local_shape(shape, x, space.mesh_shape, (1, 2))[p.dim] for x in (mine, whole))
                sizes = node.kwargs[key]
                assert sizes[(1, 2)[axis]] == here and sum(sizes) == there


# ------------------------------------------------------------------------------------------------------------ the check


@pytest.mark.parametrize("case_name", ["mlp", "llama", slow("gpt2"), slow("resnet")])
def test_emitted_programs_pass(case_name: str) -> None:
    """Random plans on an even and an uneven mesh, on every rank."""
    for mesh_shape, seed in (((2, 2), 0), ((2, 2), 1), ((2, 3), 2)):
        space, prices = space_of(case_name, mesh_shape)
        strategies = random_strategies(space, seed)
        for coordinate in ((0, 0), tuple(n - 1 for n in mesh_shape)):
            check(emit(space, strategies, prices.path, coordinate), space, coordinate)


@pytest.mark.slow
@pytest.mark.parametrize("case_name", list(CASES))
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 3), (2, 2, 2)])
def test_all_emitted_programs_pass(case_name: str, mesh_shape: tuple[int, ...]) -> None:
    space, prices = space_of(case_name, mesh_shape)
    plans = [baseline_strategies(case_name, name, mesh_shape) for name in BASELINES]
    plans += [random_strategies(space, seed) for seed in range(5)]
    for strategies in plans:
        for coordinate in itertools.product(*(range(n) for n in mesh_shape)):
            check(emit(space, strategies, prices.path, coordinate), space, coordinate)


def damage(position: int, value: str) -> Callable[[Program], FxNode]:
    """Another argument of a collective: 1 is its axis, 2 and 3 are the placements it goes from and to."""

    def of(program: Program) -> FxNode:
        step = call_of(program, "all_reduce")
        step.update_arg(position, value)
        return step

    return of


another_target, another_source, no_placement = damage(3, "R"), damage(2, "I"), damage(3, "Q")
another_axis, no_axis = damage(1, "dp"), damage(1, "xp")


def another_function(program: Program) -> FxNode:
    step = call_of(program, "all_reduce")
    step.target = all_gather
    return step


def a_missing_step(program: Program) -> FxNode:
    """The summands reach the loss."""
    step = call_of(program, "all_reduce")
    (reader,) = step.users
    step.replace_all_uses_with(step.args[0])  # type: ignore[arg-type]
    program.module.graph.erase_node(step)
    return reader


def a_missing_gradient_reduction(program: Program) -> FxNode:
    """Forward values stay right; only the gradients would be wrong."""
    step = call_of(program, "reduce_gradient")
    (reader,) = step.users
    step.replace_all_uses_with(step.args[0])  # type: ignore[arg-type]
    program.module.graph.erase_node(step)
    return reader


def a_step_twice(program: Program) -> FxNode:
    step = call_of(program, "all_reduce")
    with program.module.graph.inserting_after(step):
        again = program.module.graph.call_function(step.target, step.args)
    again.meta = dict(step.meta)
    step.replace_all_uses_with(again)
    again.update_arg(0, step)
    return again


def another_layout(program: Program) -> FxNode:
    """R for I says nothing about shapes, and all about gradients."""
    node = call_of(program, "relu.default")
    node.meta["layout"] = parse_layout("S(0)·R")
    return node


def a_layout_of_another_shape(program: Program) -> FxNode:
    node = call_of(program, "relu.default")
    node.meta["layout"] = parse_layout("I·I")
    return node


def a_layout_that_cannot_be(program: Program) -> FxNode:
    node = call_of(program, "relu.default")
    node.meta["layout"] = parse_layout("S(2)·I")
    return node


def another_op(program: Program) -> FxNode:
    node = call_of(program, "relu.default")
    node.target = torch.ops.aten.gelu.default
    return node


def a_tensor_less(program: Program) -> FxNode:
    node = call_of(program, "linear.default")
    node.args = node.args[:2]
    return node


def a_summand_as_result(program: Program) -> FxNode:
    """The last reduction is left out: each rank would return its own part of the loss."""
    output = next(n for n in program.module.graph.nodes if n.op == "output")
    step = [n for n in steps_of(program) if n.meta["global_meta"].shape == ()][-1]
    output.args = (((step.args[0],), (), ()),)
    return output


@pytest.mark.parametrize("corrupt", [
    another_target, another_source, no_placement, another_axis, no_axis, another_function, a_missing_step,
    a_missing_gradient_reduction, a_step_twice, another_layout, a_layout_of_another_shape, a_layout_that_cannot_be,
    another_op, a_tensor_less, a_summand_as_result,
], ids=lambda corrupt: corrupt.__name__)
def test_corrupted_programs_are_refused(corrupt: Callable[[Program], FxNode]) -> None:
    """The error names the line of the value that is wrong, or of the first one that reads it."""
    program, space = emit_mlp()
    check(program, space, (0, 0))
    wrong = corrupt(program)
    with pytest.raises(LoweringError, match="the emitted program is wrong at") as caught:
        check(program, space, (0, 0))
    said = str(caught.value)
    named = [wrong, *wrong.users]
    assert any(f"%{n.name} :" in said or (n.op == "output" and "return" in said) for n in named), said


def test_a_vocabulary_variant_is_not_the_plain_embedding() -> None:
    """On a shard of the table, plain look-up would read other rows (or none)."""
    space, prices = space_of("llama", (2,))
    decision = space.decision_named["embedding"]
    strategy = (space.strategy_sets[decision].axis_strategy_named("vocabulary"),)
    strategies = random_strategies(space, 0)
    strategies[decision] = strategy
    program = emit(space, strategies, prices.path, (0,))
    check(program, space, (0,))
    node = call_of(program, "vocabulary_embedding")
    node.target, node.kwargs = torch.ops.aten.embedding.default, {}
    with pytest.raises(LoweringError, match="embedding"):
        check(program, space, (0,))


# ------------------------------------------------------------------------------------------------------------- on ranks


def compile_something_else(kind: str) -> str:
    """Rank 1 compiles another model, or the same with other inputs or another plan."""
    other = torch.distributed.get_rank() == 1
    width = 32 if kind == "width" and other else 16
    layers = [nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8)]
    model = nn.Sequential(*layers, *([nn.Linear(8, 8)] if kind == "depth" and other else []))
    x = torch.ones(8 if kind == "batch" and other else 4, 8)
    baseline = "fsdp" if kind == "baseline" and other else "ddp"
    try:
        autoparallel.compile(model, mesh_of(2), example_inputs=(x,), baseline=baseline)
    except (InputError, LoweringError) as error:
        return str(error)
    return "compiled"


@pytest.mark.parametrize(("kind", "expected"), [
    ("width", r"ranks \[1\].*do all ranks compile the same model"),
    ("depth", r"ranks make different calls: .* of a model of 4 modules and 4 parameters on rank 0; .* of a model of "
              r"5 modules and 6 parameters on rank 1"),
    ("batch", r"ranks make different calls: .*float32\[4, 8\].* on rank 0; .*float32\[8, 8\].* on rank 1")])
def test_ranks_with_other_programs_get_an_error(ranks: Any, kind: str, expected: str) -> None:
    """On both ranks, at once, where running would hang."""
    for said in ranks(2).run(compile_something_else, kind, timeout_s=30):
        assert re.search(expected, said, re.DOTALL), said


def test_collectives_have_functions() -> None:
    """Every step that communicates forward is a line that says so by its name."""
    for (source, target), function in STEP_FUNCTIONS.items():
        forward = ACTIONS[source, target][0]
        assert (function.__name__ in COLLECTIVES) == (forward in COLLECTIVES)
        assert forward not in COLLECTIVES or function.__name__ == forward


class Filled(nn.Module):
    """Tensors of one number, of the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = torch.zeros(len(x), 4, 16) + torch.full((len(x), 1, 16), 2.0)
        return (self.layer(x)[:, None] * factor + torch.ones(len(x), 4, 1)).square().mean()


FILLED_INPUT = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def filled_sharded(rows: tuple[str, ...]) -> float:
    """The loss, in two micro-batches, with all such tensors cut the same way."""
    best = plan(Filled(), Cluster.load("local-cpu", num_devices=4), example_inputs=(FILLED_INPUT,),
                mesh_shape=(2, 2), axis_names=("x", "y"), micro_batches=2)
    made = [n for n in best.strategies if n.partition("_")[0] in ("zeros", "full", "ones") and ":" not in n]
    assert len(made) == 3
    cut = dataclasses.replace(best, strategies={**best.strategies, **dict.fromkeys(made, rows)})
    parallel = autoparallel.compile(Filled(), mesh_of(2, 2), example_inputs=(FILLED_INPUT,), plan=cut)
    return float(parallel.step(FILLED_INPUT))


def test_constant_tensors_are_made_in_shards(ranks: Any) -> None:
    expected = Filled()(FILLED_INPUT).item()
    for rows in (("d0", "d0"), ("d0", "repeat"), ("repeat", "d0")):
        assert ranks(4).run(filled_sharded, rows) == pytest.approx([expected] * 4, rel=1e-5)


def test_numbers_are_made_on_the_programs_device() -> None:
    """Not on the host, from which each call would copy them and wait."""
    class Masked(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.where(x > 0, torch.full((), 0.5), torch.zeros(4)) + x

    space = StrategySpace(capture(Masked(), (torch.randn(4, 4),)), (1,))
    first = [s.strategies[0] for s in space.strategy_sets]
    factories = torch.ops.aten.full.default, torch.ops.aten.zeros.default
    program = emit(space, first, lambda *_: (), (0,), "cuda")
    made = [node for node in program.module.graph.nodes if node.target in factories]
    assert len(made) == 2 and all(node.kwargs["device"].type == "cuda" for node in made)
