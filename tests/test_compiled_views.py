"""Views of redistributed tensors that compiled parts hand to ops which run node by node: gradients pass the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import autoparallel
from autoparallel.backends.left_out import views_left_out
from autoparallel.kernels.collectives import reduce_gradient
from tests.support.ranks import mesh_of
from tests.support.tiers import slow


class Masked(nn.Module):
    """Rows that the data pick, which no graph is traced with, times a view of a weight."""

    def __init__(self, view: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.weight, self.view = nn.Linear(6, 6), nn.Parameter(torch.randn(12, 6)), view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, weight = self.first(x), self.weight.t() if self.view == "transposed" else self.weight.split(6)[1]
        kept = rows[(x.sum(1) > 0)]
        return (kept @ weight).square().sum()


def mixture(name: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    common = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_experts_per_tok": 2, "use_cache": False}
    if name == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(
            num_key_value_heads=2, num_local_experts=8, **common))
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(
        num_key_value_heads=4, n_routed_experts=8, n_shared_experts=1, moe_intermediate_size=16, q_lora_rank=None,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=0, n_group=1,
        topk_group=1, **common))


def gradients(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made = model(**batch)
    (made if isinstance(made, torch.Tensor) else made.loss).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: (g.full_tensor() if hasattr(g, "full_tensor") else g).detach() for name, g in found.items()}


def experts_of(name: str, by_hand: str, backend: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients of one process and of the ranks."""
    ids = torch.arange(8 * 12).view(8, 12) * 7 % 64
    batch = {"input_ids": ids, "labels": ids}
    cluster = autoparallel.Cluster.load("local-cpu", num_devices=4)
    plan = autoparallel.plan(mixture(name), cluster, example_kwargs=batch, by_hand=by_hand)
    parallel = autoparallel.compile(mixture(name), mesh_of(*plan.mesh_shape), plan=plan, example_kwargs=batch,
                                    backend=backend)
    return gradients(mixture(name), batch), gradients(parallel, batch)


@pytest.mark.parametrize(("name", "by_hand", "backend"), [
    ("mixtral", "dp=4,ep=2", "aot_eager"), slow("deepseek", "dp=4,ep=2", "aot_eager"),
    slow("mixtral", "dp=4,ep=2", "inductor"), slow("deepseek", "dp=4,ep=2,zero=3", "aot_eager"),
    slow("mixtral", "dp=2,tp=2,ep=2", "aot_eager"), slow("mixtral", "dp=2,tp=2", "aot_eager"),
    slow("deepseek", "tp=4", "aot_eager"),
])
def test_gradients_of_experts_are_summed_over_their_copies(ranks: Any, name: str, by_hand: str, backend: str) -> None:
    """Kernels of experts read transposed weights, and experts run between compiled graphs."""
    for expected, found in ranks(4).run(experts_of, name, by_hand, backend, timeout_s=300):
        assert found.keys() == expected.keys()
        for key, gradient in found.items():
            torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-6, msg=key)


def test_what_is_left_out() -> None:
    """A view of a step of an input, and a step of what the part makes; not a step of an input, nor a view of what the
    part makes by another op."""
    graph = torch.fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    step = graph.call_function(reduce_gradient, (weight, "data", "I", "R"))
    view = graph.call_function(torch.ops.aten.permute.default, (step, [1, 0]))
    direct = graph.call_function(reduce_gradient, (weight, "model", "I", "R"))
    made = graph.call_function(torch.ops.aten.sin.default, (x,))
    plain = graph.call_function(torch.ops.aten.permute.default, (made, [1, 0]))
    stepped = graph.call_function(reduce_gradient, (made, "model", "I", "R"))
    outside = graph.call_function(torch.cat, ([view, direct, plain, stepped],))
    graph.output(outside)
    assert views_left_out(graph, lambda node: None if node is outside else "") == {view, stepped}


def test_each_contiguous_run_of_a_part_is_a_graph() -> None:
    """What the second graph reads of the first leaves that, though both are of one part, and so do views of it."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(torch.ops.aten.sin.default, (x,))
    stepped = graph.call_function(reduce_gradient, (made, "model", "I", "R"))
    view = graph.call_function(torch.ops.aten.permute.default, (stepped, [1, 0]))
    outside = graph.call_function(torch.cat, ([view],))
    later = graph.call_function(torch.ops.aten.add.Tensor, (stepped, outside))
    graph.output(later)
    assert views_left_out(graph, lambda node: None if node is outside else "") == {stepped}


def of_masked(view: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    batch = {"x": torch.randn(16, 6, generator=torch.Generator().manual_seed(1))}
    parallel = autoparallel.compile(Masked(view), mesh_of(2), example_kwargs=batch, baseline="ddp",
                                    backend="aot_eager")
    return gradients(Masked(view), batch), gradients(parallel, batch)


@pytest.mark.parametrize("view", ["transposed", "split"])
def test_views_of_weights_read_by_ops_that_are_not_traced(ranks: Any, view: str) -> None:
    for expected, found in ranks(2).run(of_masked, view, timeout_s=100):
        for key, gradient in found.items():
            torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-6, msg=key)


class Stepped(nn.Module):
    """What a product made, cut along its columns by a second product, is read by an op that is not traced too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x).tanh()
        kept = made[x.sum(1) > 0]
        return (self.third(self.second(made).relu()) * made).sum() + (kept ** 2).sum() + self.second(kept).sin().sum()


def of_stepped() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    batch = {"x": torch.randn(16, 6, generator=torch.Generator().manual_seed(1))}
    cluster = autoparallel.Cluster.load("local-cpu", num_devices=2)
    plan = autoparallel.plan(Stepped(), cluster, example_kwargs=batch, mesh_shape=(2,),
                             pins={"second.weight": (Shard(0),), "third.weight": (Shard(1),)})
    parallel = autoparallel.compile(Stepped(), mesh_of(2), plan=plan, example_kwargs=batch, backend="aot_eager")
    return gradients(Stepped(), batch), gradients(parallel, batch)


def test_steps_of_what_a_part_makes_read_by_ops_that_are_not_traced(ranks: Any) -> None:
    for expected, found in ranks(2).run(of_stepped, timeout_s=100):
        for key, gradient in found.items():
            torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-6, msg=key)
