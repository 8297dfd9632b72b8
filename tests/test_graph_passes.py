"""Passes over traced graphs: what is bucketed, when it is issued and awaited, what backward repeats."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import autoparallel
from autoparallel.backends import agreement, buckets, compiled
from autoparallel.backends.compiled import CompiledPart, Lowering
from autoparallel.backends.moving import Collective, order_of
from autoparallel.backends.traced import GATHER, REDUCE, WAIT, aten
from autoparallel.capture import OpGraph, capture
from autoparallel.errors import LoweringError
from autoparallel.kernels import groups
from autoparallel.kernels.groups import Axis
from autoparallel.lower import emit
from autoparallel.pricing import Prices
from autoparallel.schedule.step_config import BUCKET_BYTES
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster
from tests.support.captured import planning_on
from tests.support.tiers import slow

AXIS = Axis("x", 4, 0, "0")
LAYERS = 3


class Residual(nn.Module):
    """Layers of two linear maps each, of 16,384 weights a map."""

    def __init__(self) -> None:
        super().__init__()
        maps = [nn.Sequential(nn.Linear(64, 256, False), nn.ReLU(), nn.Linear(256, 64, False)) for _ in range(LAYERS)]
        self.layers = nn.ModuleList(maps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


X = torch.zeros(32, 64)


@functools.cache
def captured_residual() -> OpGraph:
    return capture(Residual(), (X,))


Graphs = Callable[..., tuple[GraphModule, GraphModule]]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Forward and backward graph of rank 0 of four, without a process group: compiled, not run."""
    monkeypatch.setattr(agreement, "_gathered", lambda value, axis: [value] * axis.size)
    monkeypatch.setattr(compiled, "name_what_is_sent", lambda module: None)  # other names of the same collectives
    found: list[GraphModule] = []
    each = compiled._Passes.each

    def noted(self: Any, module: GraphModule, backward: bool) -> None:
        each(self, module, backward)
        found.append(module)

    monkeypatch.setattr(compiled._Passes, "each", noted)

    def made(baseline: str, regathers: bool = False, recompute: str = "none", bucket_bytes: float = BUCKET_BYTES
             ) -> tuple[GraphModule, GraphModule]:
        cluster = Cluster.load("local-cpu", num_devices=4)
        with planning_on(captured_residual()):
            plan = autoparallel.plan(Residual(), cluster, example_inputs=(X,), mesh_shape=(4,), baseline=baseline,
                                     axis_names=("x",))
        space = StrategySpace(captured_residual(), (4,), ("x",))
        program = emit(space, plan.strategies_on(space), Prices(space, cluster).path, coordinate=(0,))
        how = Lowering(False, regathers, recompute, lambda node: node.meta.get("block"), bucket_bytes)
        (part,) = compiled.compiled(program.module, how).children()
        assert isinstance(part, CompiledPart)
        metas = {node.name: node.meta for node in program.module.graph.find_nodes(op="placeholder")}
        local = [torch.zeros(metas[node.name]["val"].shape, requires_grad=metas[node.name]["reads"])
                 for node in part.flat.module.graph.find_nodes(op="placeholder")]
        found.clear()
        with groups.use({"x": AXIS}):
            part._compiled(local, ())
        forward, backward = found
        return forward, backward

    return made


def numbers(module: GraphModule, target: Any) -> list[int]:
    """The places of the nodes of an op in a graph."""
    return [n for n, node in enumerate(module.graph.nodes) if node.target is target]


def lengths(module: GraphModule, op: str) -> list[int | None]:
    return [made.length for made in order_of(module) if op in made.op]


def test_gradients_are_summed_in_one_bucket(graphs: Graphs) -> None:
    _, backward = graphs("ddp")
    assert lengths(backward, "all_reduce") == [2 * LAYERS * 16384]


def test_the_first_bucket_is_reduced_beside_compute(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", 2 * 16384 * 4)
    _, backward = graphs("ddp", bucket_bytes=4 * 16384 * 4)
    assert lengths(backward, "all_reduce") == [2 * 16384, 4 * 16384]
    products = numbers(backward, aten.mm.default)
    assert numbers(backward, REDUCE)[0] < products[5] < products[-1] < numbers(backward, WAIT)[0]


def test_parameters_are_gathered_a_bucket_ahead(graphs: Graphs) -> None:
    forward, _ = graphs("fsdp", bucket_bytes=2 * 16384 * 4)
    assert lengths(forward, "all_gather") == [2 * 4096] * LAYERS
    issued, products = numbers(forward, GATHER), numbers(forward, aten.mm.default)
    waits = [n for n in numbers(forward, WAIT) if list(forward.graph.nodes)[n].args[0].target is GATHER]
    assert issued[0] < waits[0] < issued[1] < products[0] < waits[1] < issued[2] < products[2] < waits[2]


@pytest.mark.parametrize("regathers", [False, True])
def test_backward_gathers_again_for_zero_3_only(graphs: Graphs, regathers: bool) -> None:
    forward, backward = graphs("fsdp", regathers)
    assert sum(n or 0 for n in lengths(backward, "all_gather")) == (2 * LAYERS - 1) * 4096 * regathers
    saved = [node.meta["val"].numel() for node in forward.graph.output_node().all_input_nodes]
    assert (16384 in saved) != regathers, "whole weights are saved for backward, or gathered again"


def test_results_of_backward_own_their_memory(graphs: Graphs) -> None:
    """A view of a shard would keep the whole bucket."""
    _, backward = graphs("fsdp")
    shards = [node for node in backward.graph.output_node().all_input_nodes if node.meta["val"].numel() == 4096]
    assert len(shards) == 2 * LAYERS
    if lengths(backward, "all_reduce"):  # each rank keeps a part of the sum
        assert all(node.target is aten.clone.default for node in shards)


@pytest.mark.parametrize(("recompute", "repeated"), [slow("none", 0), ("full", LAYERS)])
def test_blocks_are_recomputed_from_their_inputs(graphs: Graphs, recompute: str, repeated: int) -> None:
    """Backward repeats a block's first product; its second one only makes the block's result, which is saved."""
    _, backward = graphs("ddp", recompute=recompute)
    assert len(numbers(backward, aten.mm.default)) == 4 * LAYERS - 1 + repeated


def test_sums_of_activations_are_awaited_where_they_are_read(graphs: Graphs) -> None:
    """They share the parameters' group, and are in none of their buckets."""
    forward, backward = graphs("tensor_parallel")
    for module, count in ((forward, LAYERS), (backward, LAYERS - 1)):
        activations = [node for node in module.graph.nodes if node.target is REDUCE and node.meta["val"].dim() == 2
                       and node.meta["val"].shape == (32, 64)]
        assert len(activations) == count
        assert all(next(iter(node.users)).target is WAIT for node in activations)


def test_gradients_of_weights_are_computed_while_sums_of_activations_travel(graphs: Graphs) -> None:
    """Of the layer's first weight, and of the second of the one before, which the sum does not need."""
    _, backward = graphs("tensor_parallel")
    place = {node: number for number, node in enumerate(backward.graph.nodes)}
    starts = [node for node in place if node.target is REDUCE and node.meta["val"].shape == (32, 64)]
    products = numbers(backward, aten.mm.default)
    beside = [sum(place[start] < number < place[next(iter(start.users))] for number in products) for start in starts]
    assert len(beside) == LAYERS - 1 and min(beside) >= 1


@pytest.mark.parametrize("theirs", [[], [Collective("sum", "0", 8)], [Collective("gather", "0", 4)]])
def test_another_order_of_collectives_is_an_error(monkeypatch: pytest.MonkeyPatch, theirs: list[Collective]) -> None:
    mine = [Collective("sum", "0", 4)]

    def gathered(value: Any, axis: Axis) -> list[Any]:
        return [value, [collective.seen_by(axis.group_name) for collective in theirs]]

    monkeypatch.setattr(agreement, "_gathered", gathered)
    with pytest.raises(LoweringError, match="collective 0 of a compiled graph is sum of 4 elements on rank 0 of axis"):
        agreement.check_order(mine, [AXIS])


def test_lengths_may_differ_along_other_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_gathered", lambda value, axis: [value, ["sum"]])
    agreement.check_order([Collective("sum", "1", 4)], [AXIS])


