"""Programs that a backend compiles: losses, gradients and buffers as node by node, under every kind of step."""

from __future__ import annotations

import threading
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch.distributed import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

import autoparallel
from autoparallel import backends
from autoparallel.backends import agreement, aot, moving
from autoparallel.errors import InputError, PlanError
from autoparallel.kernels import groups, rng, seeded
from autoparallel.plans import Hybrid
from autoparallel.runtime import stage_module
from autoparallel.schedule.tiers import Offload
from tests.support.compiled import DDP, FSDP, Way, check
from tests.support.models import CASES
from tests.support.offloaded import local
from tests.support.ranks import mesh_of, restores
from tests.support.reference import gradients_of
from tests.support.tiers import slow

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
RECOMPUTED: Way = ((2, 2), {"baseline": "fsdp", "recompute": "full", "zero_stage": 3})
SELECTIVE: Way = ((4,), {"baseline": "ddp", "recompute": "selective"})    # attention is one op of several results
FSDP_3 = {"baseline": "fsdp", "zero_stage": 3}
OFFLOADED: Way = ((2, 2), {"baseline": "fsdp", "recompute": "offload", "zero_stage": 3})


@pytest.mark.parametrize(("case_name", "way"), [
    ("llama", SELECTIVE), slow("llama", OFFLOADED), ("mlp", RECOMPUTED), slow("gpt2", RECOMPUTED),
    slow("llama", RECOMPUTED), slow("llama", DDP)])
def test_transformers_traced(ranks: Any, case_name: str, way: Way) -> None:
    check(ranks, case_name, way)


@pytest.mark.parametrize("way", [((2, 2), {"random": 5}), slow(FSDP)], ids=str)
def test_mlp_by_inductor(ranks: Any, way: Way) -> None:
    """In the drawn plan a gather waits while the next op is computed, for which Inductor took what was being sent."""
    check(ranks, "mlp", way, backend="inductor")


@pytest.mark.parametrize(("case_name", "way"), [
    ("mlp", ((4,), {"micro_batches": 2, "zero_stage": 3})),
    slow("gpt2_dropout", ((2, 2), {"pipeline_stages": 2, "micro_batches": 4})),
    ("gpt2_dropout", ((2, 2), {"pipeline_stages": 2, "micro_batches": 4, "schedule": "zero_bubble"})),
    ("gpt2_dropout", ((2, 2), {"pipeline_stages": 2, "micro_batches": 4, "schedule": "zero_bubble", **FSDP_3}))],
    ids=str)
def test_steps_in_micro_batches_and_stages(ranks: Any, case_name: str, way: Way) -> None:
    check(ranks, case_name, way)


def test_block_by_block_with_dropout(ranks: Any) -> None:
    check(ranks, "gpt2_dropout", ((4,), {"baseline": "fsdp", "zero_stage": 3, "by_block": True}))


class Branch(nn.Module):
    """A block, ``width`` wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(x)))


@restores(stage_module, "WHOLE_UP_TO")
def of_blocks_equal_on_some_ranks() -> tuple[list[int], list[torch.Tensor], list[torch.Tensor]]:
    """This rank's widths; gradients of one process, and of the model compiled block by block."""
    stage_module.WHOLE_UP_TO = 0
    torch.manual_seed(0)
    x, model = torch.randn(4, 8), nn.Sequential(*map(Branch, (6, 6, 5, 5)))
    parallel = autoparallel.compile(deepcopy(model), mesh_of(2), example_inputs=(x,), backend="aot_eager",
                                    baseline="tensor_parallel")
    for module in (model, parallel):
        module(x).square().mean().backward()
    widths = [len(local(p)) for name, p in parallel.named_parameters() if name.endswith("up.weight")]
    return widths, list(gradients_of(model).values()), list(gradients_of(parallel).values())


def test_parts_that_are_equal_on_some_ranks_only(ranks: Any) -> None:
    """The rank that compiled one part for both compared no collectives for the second, for which the other waited."""
    first, second = ranks(2).run(of_blocks_equal_on_some_ranks)
    assert (first[0], second[0]) == ([3, 3, 3, 3], [3, 3, 2, 2])
    for _, expected, actual in (first, second):
        torch.testing.assert_close(actual, expected)


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_experts_run_between_compiled_graphs(ranks: Any) -> None:
    check(ranks, "mixtral", ((2, 2), {"random": 0}))


def code_on_a_mesh() -> list[str]:
    """The graphs that a rank compiles on a mesh of two axes, as code."""
    case, found = CASES["mlp"], list[str]()

    def noted(graph: GraphModule) -> Any:
        found.append(graph.code)
        return make_boxed_func(graph.forward)

    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build(), mesh_of(2, 2), example_inputs=args, example_kwargs=kwargs,
                                    backend="aot_eager", baseline="fsdp")
    with mock.patch.object(aot, "_as_it_is", noted):
        case.loss(parallel(*args, **kwargs)).backward()
    return found


def test_ranks_of_a_mesh_make_the_same_code(ranks: Any) -> None:
    """Torch numbers the process groups of one mesh axis, and each rank compiled code of its own for its number."""
    first, *others = ranks(4).run(code_on_a_mesh)
    assert "all_gather" in first[0] and len(first) == 2
    assert others == [first] * 3


def left_alone() -> tuple[dict[str, Any], dict[str, Any], int]:
    """Torch's settings before and after a compiled call, and the graphs that Dynamo makes of the parallel module."""
    from torch._dynamo.utils import counters
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    def settings() -> dict[str, Any]:
        found = {**inductor_config.get_config_copy(), **functorch_config.get_config_copy()}
        return found | {"grad": torch.is_grad_enabled(), "seed": torch.initial_seed()}

    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(8, 4)
    before = settings()
    parallel = autoparallel.compile(model, mesh_of(1), example_inputs=(x,), backend="aot_eager")
    expected = parallel(x)
    after = settings()
    counters.clear()
    assert torch.equal(torch.compile(parallel, backend="eager")(x), expected)
    return before, after, counters["stats"]["unique_graphs"]


def test_nothing_of_the_process_changes(ranks: Any) -> None:
    ((before, after, graphs),) = ranks(1).run(left_alone)
    assert before == after
    assert graphs == 0, "torch.compile leaves a parallel module as it is"


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_more_of_llama(ranks: Any) -> None:
    check(ranks, "llama", FSDP, ((2, 2), {}), ((4,), {"baseline": "fsdp", "recompute": "full"}),
          ((4,), {"micro_batches": 2, "zero_stage": 1}), ((2, 2), {"by_block": True, "recompute": "full"}),
          ((4,), {"by_block": True, "micro_batches": 2, "zero_stage": 3}),
          ((4,), {"by_block": True, "micro_batches": 4, "zero_stage": 2, "baseline": "fsdp"}))


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_gpt2_by_inductor_under_a_drawn_plan(ranks: Any) -> None:
    """Its loss was wrong by 5e-3: Inductor wrote to what an awaited gather was sending."""
    check(ranks, "gpt2", ((2, 2), {"random": 0}), backend="inductor", timeout_s=1500)


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_dropout_draws_the_numbers_of_eager(ranks: Any) -> None:
    check(ranks, "gpt2_dropout", DDP, ((4,), {"baseline": "ddp", "recompute": "full"}), backend="inductor",
          timeout_s=900)


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_zero_stages(ranks: Any, zero_stage: int) -> None:
    check(ranks, "llama", ((4,), {"micro_batches": 2, "zero_stage": zero_stage}),
          ((2, 2), {"zero_stage": zero_stage, "reduce_dtype": "float32"}),
          ((2, 2), {"pipeline_stages": 2, "micro_batches": 4, "zero_stage": zero_stage}))


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("recompute", ["full", "selective", "offload"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_recompute(ranks: Any, recompute: str, backend: str) -> None:
    check(ranks, "gpt2_dropout", ((4,), {"baseline": "ddp", "recompute": recompute}),
          ((4,), {"baseline": "fsdp", "recompute": recompute, "zero_stage": 3}), backend=backend)


# ---------------------------------------------------------------------------------------------------- without processes


@pytest.mark.parametrize(("op", "args"), [
    (aten.dropout.default, (torch.randn(8, 16), 0.3, True)),
    (aten.scaled_dot_product_attention.default, (*(torch.randn(2, 4, 8, 16),) * 3, None, 0.2)),
    (aten.rand_like.default, (torch.randn(8, 16),)),
    (aten.randn.default, ([4, 5],)),
    (aten.bernoulli.default, (torch.rand(5, 5),)),
    (aten.multinomial.default, (torch.rand(5, 5), 3)),
    (aten.alpha_dropout.default, (torch.randn(8, 16), 0.3, True)),
    (aten.alpha_dropout.default, (torch.randn(8, 16), 0.5, True)),    # the default of bernoulli_, not of bernoulli
])
def test_a_traced_random_op_draws_what_the_op_draws(op: Any, args: tuple[Any, ...]) -> None:
    draws = [(0, 3, 1)]
    traced = make_fx(lambda seeds, *given: seeded.seeded_op(op, seeds, 0, *given))(seeded.seeds_of([0], draws), *args)
    for call_seed in (5, 6):
        with rng.use_seed(call_seed):
            expected = rng.random_op(op, 3, 1, *args)
        assert torch.equal(traced(seeded.seeds_of([call_seed], draws), *args), expected)


def test_ranks_with_the_same_graph_compile_in_turn(mesh_of_one: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those with another one at the same time."""
    monkeypatch.setattr(agreement.dist, "is_initialized", lambda: True)
    store, events = HashStore(), list[str]()
    monkeypatch.setattr(agreement, "_get_default_store", lambda: store)
    same, other = (symbolic_trace(lambda x, n=n: x + n) for n in (1, 2))
    entered = threading.Event()

    def second() -> None:
        entered.set()
        with agreement.one_first(same):
            events.append("second")

    thread = threading.Thread(target=second)
    with agreement.one_first(same):
        thread.start()
        assert entered.wait(10)
        with agreement.one_first(other):
            events.append("other")
        thread.join(0.2)
        events.append("first")
    thread.join(10)
    assert events == ["other", "first", "second"]


def test_a_node_that_reads_a_later_one_moves_behind_it() -> None:
    """The later one stays with all that it reads: a bucket of gradients does, of which ranks have different parts."""
    graph = Graph()
    x = graph.placeholder("x")
    first, product = graph.call_function(torch.relu, (x,)), graph.call_function(torch.sin, (x,))
    bucket = graph.call_function(torch.exp, (product,))
    with graph.inserting_before(product):
        part = graph.call_function(torch.neg, (bucket,))
    assert moving._sorted(graph.nodes) == [x, first, product, bucket, part]


class Recognizer(nn.Module):
    """A recurrent layer and a loss between compiled graphs: neither has a trace that holds."""

    def __init__(self, kind: type[nn.Module], dropout: float) -> None:
        super().__init__()
        self.layers, self.out = kind(8, 8, 2, batch_first=True, dropout=dropout), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        log_probs = self.out(self.layers(x)[0]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, labels, torch.full((4,), 6), torch.full((4,), 2))


@pytest.mark.parametrize(("kind", "dropout"), [
    (nn.LSTM, 0.4), slow(nn.LSTM, 0.0), slow(nn.GRU, 0.0), slow(nn.GRU, 0.4)])
def test_recurrent_layers_and_losses_of_alignments(mesh_of_one: DeviceMesh, kind: type[nn.Module], dropout: float,
                                                   caplog: pytest.LogCaptureFixture) -> None:
    """Under AOTAutograd an LSTM on CPUs saved None for backward, and the loss's fake tensors had no shape."""
    torch.manual_seed(0)
    model, batch = Recognizer(kind, dropout), (torch.randn(4, 6, 8), torch.randint(1, 5, (4, 2)))
    found = {}
    for backend in ("eager", "aot_eager"):
        parallel = autoparallel.compile(model, mesh_of_one, example_inputs=batch, backend=backend)
        parallel.manual_seed(3)
        loss = parallel(*batch)
        loss.backward()
        found[backend] = {"loss": loss.detach(), **gradients_of(parallel)}
    torch.testing.assert_close(found["aot_eager"], found["eager"])
    assert "a recurrent layer" in caplog.text and "ctc_losses" in caplog.text


@pytest.mark.parametrize(("size", "converted"), [(4, False), (64, True)])
def test_convolutions_keep_their_layout_where_weights_are_larger_than_images(size: int, converted: bool) -> None:
    """Inductor copied each weight and its gradient into channels-last, and a ResNet on small images was slower than
    eagerly."""
    found = list[bool]()

    def noted(graph: GraphModule, examples: Any, **kwargs: Any) -> Any:
        found.append(inductor_config.layout_optimization)
        return make_boxed_func(graph.forward)

    def forward(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
        return (F.conv2d(x, weight),)

    given = [torch.randn(2, 16, size, size), torch.randn(16, 16, 3, 3, requires_grad=True)]
    traced = make_fx(forward, tracing_mode="fake")(*(x.detach() for x in given))
    passes = aot.Passes(lambda joint: None, lambda module, backward: None, lambda module: None)
    with mock.patch.object(compile_fx, "compile_fx_inner", noted):
        aot.compile_graph(traced, given, passes, generates=True)
    assert found[0] is converted, "of the forward graph; that of backward follows it"
    assert inductor_config.layout_optimization


def test_other_backends_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match="unknown backend 'nvfuser'"):
        backends.chosen("nvfuser", "cpu")
    assert backends.chosen("auto", "cpu") == "eager"


@pytest.mark.parametrize(("hybrid", "message"), [
    (Hybrid(4, 2, 2, "zero_bubble", zero_stage=3, recompute="offload"), "'zero_bubble'.*makes a stage one graph"),
    (Hybrid(zero_stage=3, offload=Offload("host", parameters="host")), "fetches parameters op by op"),
])
def test_steps_that_graphs_cannot_run_are_refused(hybrid: Hybrid, message: str) -> None:
    backends.check("eager", hybrid)
    with pytest.raises(PlanError, match=message):
        backends.check("inductor", hybrid)


@pytest.mark.parametrize("backend", ["aot_eager", slow("inductor")])
def test_gradients_of_compiled_programs_are_differentiated_within_the_model_only(mesh_of_one: DeviceMesh, backend: str
                                                                                 ) -> None:
    """As in the inner loop of MAML."""
    x = torch.ones(8, 6)
    parallel = autoparallel.compile(nn.Linear(6, 2), mesh_of_one, example_inputs=(x,), backend=backend)
    with pytest.raises(InputError, match=r'create_graph=True.*\n  Compile with backend="eager"'):
        torch.autograd.grad(parallel(x).square().mean(), list(parallel.parameters()), create_graph=True)
    parallel(x).square().mean().backward()
    assert all(p.grad is not None for p in parallel.parameters())


def test_backward_of_a_compiled_program_runs_once(mesh_of_one: DeviceMesh) -> None:
    """Torch refuses a second one only where the graph saves what it makes, which other parts, whose gradients have
    been added then, may not."""
    x = torch.ones(8, 6)
    for model in (nn.Linear(6, 2), nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))):
        parallel = autoparallel.compile(model, mesh_of_one, example_inputs=(x,), backend="aot_eager")
        loss = parallel(x).square().mean()
        with pytest.raises(InputError, match=r"retain_graph=True.*\n  Add the losses up"):
            loss.backward(retain_graph=True)
        assert all(p.grad is None for p in parallel.parameters())
        loss.backward()
        assert all(p.grad is not None for p in parallel.parameters())


def test_collectives_that_send_the_same_are_not_merged(mesh_of_one: DeviceMesh) -> None:
    """Other ranks may send different tensors. (Rank 0 of a ring of causal attention has no gradients of later keys: it
    sends zeros in each layer, and had one collective for all.)"""
    name, found = groups.common_name(mesh_of_one.get_group()), list[moving.Collective]()

    def forward(x: torch.Tensor) -> tuple[torch.Tensor]:
        sums = [c10d.wait_tensor(c10d.all_reduce(torch.zeros_like(x), "sum", name)) for _ in range(2)]
        return ((x * sums[0]).exp() * sums[1],)

    def each(module: GraphModule, backward: bool) -> None:
        found.extend(moving.order_of(module))

    x = torch.randn(4, requires_grad=True)
    traced = make_fx(forward, tracing_mode="fake")(x.detach())
    aot.compile_graph(traced, [x], aot.Passes(lambda joint: None, each, lambda module: None), generates=False)
    assert len(found) == 2
