"""Fused projections: one op that gives the sections, each of which can be cut."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoparallel
from autoparallel.capture import OpGraph, capture
from autoparallel.ops.linear_sections import linear_sections
from cost_models import Cluster
from tests.support.fused import EVEN, Attention, build
from tests.support.ranks import mesh_of
from tests.support.tiers import slow


def ops(graph: OpGraph) -> list[Any]:
    return [node.target for node in graph.of_kind("op")]


@pytest.mark.parametrize("case", [
    ("split", (4, 4, 4)), ("unbind", (4, 4, 4)), ("slices", (4, 2, 2)), ("slices", (4, 2, 2), False),
])
def test_slices_of_a_linear_layer_become_sections(case: Any) -> None:
    model, x = build(*case)
    graph = capture(model, (x,))
    (fused,) = (node for node in graph.of_kind("op") if node.target is linear_sections)
    assert fused.args[3] == [8 * n for n in case[1]]
    assert torch.ops.aten.slice.Tensor not in ops(graph)
    assert torch.ops.aten.select.int not in ops(graph)


def test_projections_not_split_along_features_stay() -> None:
    """Another reader; overlapping slices; slices of a head's dims; too small sections; a slice without gradient."""

    class Model(nn.Module):
        def __init__(self, way: int, width: int = 32) -> None:
            super().__init__()
            self.way, self.layer = way, nn.Linear(8, width)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            match self.way:
                case 0:
                    return y[:, :16] + y[:, 16:] + y.sum()
                case 1:
                    return y[:, :20].sum() + y[:, 12:].sum()
                case 2:
                    return y.view(-1, 4, 8)[..., :4] + y.view(-1, 4, 8)[..., 4:]
                case 3:
                    return y[:, :28].sum() + y[:, 28:].sum()
            with torch.no_grad():
                gate = y[:, :16].sigmoid()
            return gate * y[:, 16:]

    for way in range(5):
        assert linear_sections not in ops(capture(Model(way), (torch.randn(4, 8),))), way


def run_case(case: Any, mesh_shape: tuple[int, ...], strategy: tuple[str, ...], recompute: str) -> dict[str, float]:
    """Largest differences from one process, of the loss and of each gradient."""
    model, x = build(*case)
    expected = model(x)
    expected.backward()
    mesh = mesh_of(*mesh_shape)
    given = {"example_inputs": (x,), "recompute": recompute}
    plan = autoparallel.plan(model, Cluster.load("local-cpu", num_devices=mesh.size()), mesh_shape=mesh_shape,
                             axis_names=mesh.mesh_dim_names, **given)
    (name,) = (n for n in plan.strategies if n.startswith("linear_sections") and ":" not in n)
    plan = dataclasses.replace(plan, strategies={**plan.strategies, name: strategy})
    parallel = autoparallel.compile(build(*case)[0], mesh, plan=plan, example_inputs=(x,))
    loss = parallel(x)
    loss.backward()
    found = {"loss": float((loss - expected).detach().abs() / expected.detach().abs())}
    for (key, parameter), wanted in zip(parallel.named_parameters(), model.parameters(), strict=True):
        gradient = parameter.grad.full_tensor()  # type: ignore[union-attr]
        found[key] = float((gradient - wanted.grad).abs().max() / wanted.grad.abs().max())  # type: ignore[union-attr]
    return found


GROUPED, UNEVEN = ("slices", (4, 2, 2), False), ("unbind", (5, 5, 5), True, 2)


@pytest.mark.parametrize(("case", "mesh_shape", "strategy"), [
    (EVEN, (4,), ("n",)), (("unbind", (4, 4, 4)), (2, 2), ("b0", "n")), (EVEN, (2, 2), ("n", "k")),
    slow(EVEN, (2, 2), ("k", "n")), (EVEN, (2, 2), ("n", "linear(1,2)")), slow(EVEN, (4,), ("k",)),
    slow(EVEN, (2, 2), ("b1", "b0")),
    slow(GROUPED, (4,), ("n",)), (GROUPED, (2, 2), ("part", "n")), (UNEVEN, (4,), ("n",)), slow(UNEVEN, (3,), ("n",)),
    slow(UNEVEN, (2, 2), ("n", "b1")),
])
def test_sections_are_cut(ranks: Any, case: Any, mesh_shape: tuple[int, ...], strategy: tuple[str, ...]) -> None:
    num_ranks = 3 if mesh_shape == (3,) else 4
    for found in ranks(num_ranks).run(run_case, case, mesh_shape, strategy, "none", timeout_s=100):
        assert max(found.values()) < 1e-5, found


def test_sections_are_recomputed(ranks: Any) -> None:
    for found in ranks(4).run(run_case, EVEN, (2, 2), ("b0", "n"), "full", timeout_s=100):
        assert max(found.values()) < 1e-5, found


def test_tensor_parallel_attention_moves_no_fused_projection() -> None:
    """Where the batch cannot be cut, heads are, and the fused result is never gathered. No interleaved shard of unequal
    sections has a part of each: rows of the weight are exchanged."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Attention("split", (32, 16, 16), dim=128)
        model.qkv, model.out = nn.Linear(4096, 2 * 4096), nn.Linear(4096, 4096)
        x = torch.randn(1, 8192, 4096)
    plan = autoparallel.plan(model, Cluster.load("h100-sxm", num_devices=8), example_inputs=(x,), mesh_shape=(8,))
    (name,) = (n for n in plan.strategies if n.startswith("linear_sections") and ":" not in n)
    (attention,) = (n for n in plan.strategies if n.startswith("scaled_dot_product_attention") and ":" not in n)
    assert (plan.strategies[name], plan.strategies[attention]) == (("n",), ("h",))
    exchanged = [use for use in plan.prediction.collectives if use.kind == "all_to_all in sections"]
    assert [(use.direction, use.count) for use in exchanged] == [("backward", 2), ("forward", 2)]  # weight and bias
    assert exchanged[1].seconds < plan.prediction.forward_communication_s
    assert re.search(r"all_to_all in sections\s+.\s+\S+\s+.\s+forward\s+.\s+2\b", plan.report(140, True))
