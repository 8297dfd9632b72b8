"""Compiled programs under many plans: drawn and by hand, pipelines, several micro-batches at a time."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import autoparallel
from autoparallel.backends import aot, two_parts
from autoparallel.backends.traced import STARTS
from autoparallel.runtime import pipeline, stage_module
from tests.support.compiled import DDP, FSDP, Way, check
from tests.support.models import CASES
from tests.support.ranks import mesh_of, restores
from tests.support.tiers import slow

aten = torch.ops.aten
BOTH = ("aot_eager", "inductor")
FSDP_3 = {"baseline": "fsdp", "zero_stage": 3}


@pytest.mark.slow
@pytest.mark.timeout(3700)
@pytest.mark.parametrize("case_name", ["mlp", "transformer_encoder", "gpt2", "llama", "bert", "vit", "resnet"])
@pytest.mark.parametrize("backend", BOTH)
def test_the_whole_table(ranks: Any, case_name: str, backend: str) -> None:
    check(ranks, case_name, DDP, FSDP, ((4,), {"baseline": "tensor_parallel"}), ((2, 2), {}), ((2, 2), {"random": 0}),
          backend=backend, timeout_s=3600)


@pytest.mark.slow
@pytest.mark.timeout(3700)
@pytest.mark.parametrize("first", range(0, 10, 2))
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("case_name", ["mlp", "llama", "gpt2", "bert", "resnet"])
@pytest.mark.parametrize("backend", BOTH)
def test_random_plans(ranks: Any, backend: str, case_name: str, shape: tuple[int, ...], first: int) -> None:
    """Twenty of each model, against one process."""
    check(ranks, case_name, *((shape, {"random": seed}) for seed in (first, first + 1)), backend=backend, alone=True,
          timeout_s=3600)


@pytest.mark.slow
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("way", [
    ((2, 2), {}), ((2, 2), {"by_hand": "dp=2,tp=2"}), ((2, 2), {"by_hand": "dp=2,tp=2,zero=3,sequence_parallel"}),
    ((2, 2), {"by_hand": "dp=4,zero=3", "recompute": "full"})], ids=str)
def test_two_axes_by_inductor(ranks: Any, way: Way) -> None:
    check(ranks, "llama", way, backend="inductor", alone=True, timeout_s=1800)


@pytest.mark.slow
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("options", [{"schedule": "gpipe"}, {"schedule": "1f1b"},
                                     {"schedule": "interleaved", "pipeline_stages": 4},
                                     {"schedule": "zero_bubble"}, {"schedule": "zero_bubble", "zero_stage": 2},
                                     {"schedule": "zero_bubble", "recompute": "full"},
                                     {"schedule": "zero_bubble", "by_block": True},
                                     {"schedule": "zero_bubble", **FSDP_3},
                                     {"schedule": "zero_bubble", **FSDP_3, "by_block": True},
                                     {"schedule": "zero_bubble", **FSDP_3, "recompute": "full"},
                                     {"schedule": "1f1b", "zero_stage": 3},
                                     {"schedule": "1f1b", "recompute": "full"},
                                     {"schedule": "1f1b", "recompute": "selective"},
                                     {"schedule": "1f1b", "copies": 2},
                                     {"schedule": "1f1b", "copies": 2, "recompute": "full"}], ids=str)
@pytest.mark.parametrize("backend", BOTH)
def test_pipelines(ranks: Any, options: dict[str, Any], backend: str) -> None:
    way: Way = ((2, 2), {"pipeline_stages": 2, "micro_batches": 4, **options})
    check(ranks, "gpt2", way, backend=backend, alone=True, timeout_s=1800)
    if backend == "aot_eager":
        check(ranks, "gpt2_dropout", way, backend=backend)


# ------------------------------------------------------------------------------ several micro-batches at a time


@pytest.mark.parametrize(("case_name", "way"), [
    slow("gpt2_dropout", ((2, 2), {"micro_batches": 2, "copies": 2, "baseline": "tensor_parallel"})),
    ("mlp", ((4,), {"micro_batches": 4, "copies": 2, "baseline": "fsdp", "zero_stage": 3})),
    slow("gpt2_dropout", ((2, 2), {"micro_batches": 4, "copies": 2, "baseline": "tensor_parallel", "by_block": True})),
    slow("gpt2_dropout", ((4,), {"micro_batches": 4, "copies": 2, "baseline": "fsdp", "zero_stage": 3,
                                 "by_block": True})),
    slow("gpt2_dropout", ((4,), {"micro_batches": 4, "copies": 4, "baseline": "fsdp", "zero_stage": 3,
                                 "recompute": "full"})),
    slow("gpt2_dropout", ((2, 2), {"micro_batches": 4, "copies": 4, "zero_stage": 2, "recompute": "selective"})),
    slow("llama", ((4,), {"micro_batches": 4, "copies": 2, "baseline": "fsdp", "zero_stage": 3})),
    slow("llama", ((2, 2), {"micro_batches": 4, "copies": 2, "zero_stage": 1, "recompute": "offload"})),
    slow("llama", ((2, 2), {"micro_batches": 4, "copies": 2, "zero_stage": 2, "baseline": "fsdp", "by_block": True})),
    slow("llama", ((2, 2), {"micro_batches": 4, "copies": 2, "zero_stage": 3, "recompute": "full", "by_block": True})),
    slow("bert", ((2, 2), {"micro_batches": 4, "copies": 4, "zero_stage": 1, "baseline": "sequence_parallel"})),
    slow("deepseek_v3", ((2, 2), {"micro_batches": 4, "copies": 4, "zero_stage": 2})),
], ids=str)
def test_copies(ranks: Any, case_name: str, way: Way) -> None:
    """Node by node they compute the result of one micro-batch after the other (`test_copies.py`)."""
    check(ranks, case_name, way)


@pytest.mark.slow
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("options", [{"baseline": "tensor_parallel"}, {"baseline": "fsdp", "zero_stage": 3},
                                     {"baseline": "sequence_parallel", "zero_stage": 0}], ids=str)
def test_copies_by_inductor(ranks: Any, options: dict[str, Any]) -> None:
    check(ranks, "gpt2", ((4,), {"micro_batches": 4, "copies": 2, **options}), backend="inductor", alone=True,
          timeout_s=1800)


def order_of_copies(copies: int) -> list[list[str]]:
    """Of the forward and the backward graph of a tensor-parallel MLP: products, and large collectives as they are
    issued and awaited."""
    case, found = CASES["mlp"], list[list[str]]()

    def noted(graph: GraphModule) -> Any:
        names = list[str]()
        large = [node for node in graph.graph.nodes if node.target in STARTS and node.args[0].meta["val"].numel() > 1]
        for node in graph.graph.nodes:
            if node in large or node.target in (aten.mm.default, aten.addmm.default):
                names.append("issue" if node in large else "product")
            elif any(start in large for start in node.all_input_nodes):
                names.append("await")
        found.append(names)
        return make_boxed_func(graph.forward)

    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build(), mesh_of(2), example_inputs=args, example_kwargs=kwargs,
                                    backend="aot_eager", baseline="tensor_parallel", micro_batches=2, copies=copies)
    with mock.patch.object(aot, "_as_it_is", noted):
        parallel.step(*args, **kwargs)
    return found


def test_one_copy_is_sent_while_another_computes(ranks: Any) -> None:
    (alone, _), (two, _) = (ranks(2).run(order_of_copies, copies) for copies in (1, 2))
    assert alone[0] == ["product", "product", "issue", "await"]
    assert two[0] == ["product", "product", "issue", "product", "product", "issue", "await", "await"]


# ------------------------------------------------------------------------------------------- backward in two parts


@pytest.mark.parametrize("generates", [False, slow(True)])
def test_gradients_of_weights_are_a_part_of_their_own(generates: bool) -> None:
    """The second part reads what backward saved after the first one ran."""
    def forward(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor]:
        for weight in weights:
            x = (x @ weight).tanh()
        return (x,)

    torch.manual_seed(0)
    given = [torch.randn(4, 6, requires_grad=True), *(torch.randn(6, 6, requires_grad=True) for _ in range(3))]
    expected = torch.autograd.grad(forward(*given)[0].square().sum(), given)
    traced = make_fx(forward, tracing_mode="fake")(*(x.detach() for x in given))
    made = aot.compile_graph(traced, given, aot.Passes(lambda joint: None, lambda module, backward: None,
                                                       lambda module: None), generates, put_off=(1, 2, 3))
    result = made(*given)[0]
    assert result.grad_fn is not None and result.grad_fn.name() == two_parts.NODE
    result.grad_fn.register_prehook(lambda _: two_parts.runs_next(dict(enumerate(given))))
    with two_parts.putting_off() as put_off:
        result.square().sum().backward()
    torch.testing.assert_close(given[0].grad, expected[0])
    assert all(weight.grad is None for weight in given[1:])
    ((weights, gradients),) = put_off.later
    assert [id(weight) for weight in weights] == [id(weight) for weight in given[1:]]
    torch.testing.assert_close(tuple(gradients()), expected[1:])
    made(*given)[0].square().sum().backward()
    torch.testing.assert_close(tuple(weight.grad for weight in given[1:]), expected[1:])


def test_no_second_part_where_the_first_computes_everything() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.sin, (x,))
    graph.output((first, first, None))
    assert two_parts.halves(GraphModule({}, graph), (1, 2)) is None
    assert two_parts.halves(GraphModule({}, graph), ()) is None


@restores(stage_module, "WHOLE_UP_TO")
def put_off_on_a_stage(shape: tuple[int, ...], options: dict[str, Any], whole: bool) -> tuple[int, int]:
    """Weights whose gradients a rank's second parts gave in a step of four micro-batches, and its trained weights."""
    case, found = CASES["gpt2"], list[int]()
    if not whole:
        stage_module.WHOLE_UP_TO = 0
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build(), mesh_of(*shape), example_inputs=args, example_kwargs=kwargs,
                                    backend="aot_eager", pipeline_stages=2, micro_batches=4, schedule="zero_bubble",
                                    **options)
    second = pipeline.compiled_backward_of_weights

    def counted(module: Any, later: Any, reduces: bool) -> None:
        found.append(sum(len(weights) for weights, _ in later))
        second(module, later, reduces)

    with mock.patch.object(pipeline, "compiled_backward_of_weights", counted):
        parallel.step(*args, **kwargs)
    return sum(found), sum(p.requires_grad for p in parallel.parameters())


@pytest.mark.parametrize(("shape", "options", "whole"), [((2,), {}, True), ((2, 2), FSDP_3, True),
                                                         ((2, 2), FSDP_3, False)])
def test_a_stage_puts_off_the_gradients_of_its_weights(ranks: Any, shape: tuple[int, ...], options: dict[str, Any],
                                                       whole: bool) -> None:
    """The first stage has no gradients of inputs to send, and runs backward whole. With ZeRO-3 a stage is one graph,
    however many blocks it has: a weight that is gathered between two graphs would not be put off."""
    found = ranks(math.prod(shape)).run(put_off_on_a_stage, shape, options, whole)
    (first, _), (last, weights) = found[0], found[-1]
    assert first == 0
    assert last == 4 * weights
