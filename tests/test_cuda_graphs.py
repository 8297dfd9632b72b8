"""Programs recorded as CUDA graphs: the same numbers, nothing stale. Here a recording runs again in its memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph

import autoparallel
from autoparallel.backends import check_replays, replayed
from autoparallel.backends.replayed import MANY, Replayed
from autoparallel.backends.untraceable import why_not_traced
from autoparallel.errors import InputError, PlanError
from autoparallel.plans import Hybrid
from autoparallel.schedule.tiers import Offload
from tests.support.models import BATCH_SIZE, CASES
from tests.support.ranks import mesh_of
from tests.support.reference import (
    Trained,
    assert_same_gradients,
    assert_same_loss,
    assert_same_parameters,
    train,
    train_reference,
)
from tests.support.tiers import slow


class Again:
    """Runs again where a GPU would replay, and writes what it makes where the first run made it."""

    def warm_up(self, run: Callable[[], object]) -> None:
        run()

    def record(self, run: Callable[[], Sequence[Tensor | None]]) -> tuple[Sequence[Tensor | None], Callable[[], None]]:
        first, graded = run(), torch.is_grad_enabled()

        def replay() -> None:
            with torch.set_grad_enabled(graded):
                made = run()
            for kept, x in zip(first, made, strict=True):
                if kept is not None and x is not None:
                    kept.detach().copy_(x.detach())

        return first, replay


class Two(nn.Module):
    """Two results, of which the second is often not used, and a number."""

    def forward(self, x: Tensor, weight: Tensor) -> dict[str, Any]:
        product = x @ weight
        return {"loss": product.square().mean(), "product": product, "rows": x.shape[0]}


def recorded(starts: int | None = 0) -> tuple[Replayed, Tensor, Callable[[int], Tensor]]:
    module = Replayed(Two(), (False, True), None if starts is None else frozenset([starts]), Again)
    weight = nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(1)))
    return module, weight, lambda seed: torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))


def expected(weight: Tensor, x: Tensor, name: str = "loss") -> tuple[Tensor, Tensor]:
    leaf = weight.detach().clone().requires_grad_()
    value = Two()(x, leaf)[name].sum()
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def gradient_of(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def test_each_call_has_its_own_results_and_gradients() -> None:
    module, weight, inputs = recorded()
    kept = []
    for seed in range(4):
        weight.grad = None
        made = module(inputs(seed), weight)
        made["loss"].backward()
        assert made["rows"] == 2
        kept.append((made["loss"].detach(), made["product"].detach(), gradient_of(weight), weight.detach().clone()))
        with torch.no_grad():
            weight -= 0.1 * gradient_of(weight)
    assert module.recorded == 1
    for seed, (loss, product, gradient, before) in enumerate(kept):
        value, wanted = expected(before, inputs(seed))
        torch.testing.assert_close((loss, gradient), (value, wanted))
        torch.testing.assert_close(product, inputs(seed) @ before)


def test_gradients_add_up_over_calls() -> None:
    module, weight, inputs = recorded()
    for seed in range(4):
        module(inputs(seed), weight)["loss"].backward()
    torch.testing.assert_close(weight.grad, sum(expected(weight, inputs(seed))[1] for seed in range(4)))


def test_backward_from_another_result_is_right_at_once_and_recorded_then() -> None:
    module, weight, inputs = recorded()
    for seed in range(5):
        weight.grad = None
        module(inputs(seed), weight)["product"].sum().backward()
        torch.testing.assert_close(weight.grad, expected(weight, inputs(seed), "product")[1])
    assert module.recorded == 2


def test_several_calls_before_their_backwards(caplog: pytest.LogCaptureFixture) -> None:
    """The recording holds the activations of one of them; the others run without."""
    module, weight, inputs = recorded()
    for seed in range(3):
        weight.grad = None
        first, second = (module(inputs(number), weight)["loss"] for number in (seed, seed + 9))
        (first + second).backward()
        torch.testing.assert_close(weight.grad, sum(expected(weight, inputs(number))[1] for number in (seed, seed + 9)))
    kept = [module(inputs(seed), weight)["loss"] for seed in range(4)]     # none of which goes backward
    torch.testing.assert_close(kept, [expected(weight, inputs(seed))[0] for seed in range(4)])
    assert module.recorded == 1 and caplog.text.count("wait for their backward") == 1


def test_a_second_backward_and_one_to_differentiate_are_refused() -> None:
    module, weight, inputs = recorded()
    module(inputs(0), weight)["loss"].backward()
    loss = module(inputs(1), weight)["loss"]
    loss.backward(retain_graph=True)
    with pytest.raises(InputError, match="a second backward"):
        loss.backward()
    with pytest.raises(InputError, match="cannot be differentiated"):
        module(inputs(2), weight)["loss"].backward(create_graph=True)
    module(inputs(3), weight)["loss"].backward()


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def test_a_backward_that_reaches_no_result() -> None:
    module, weight, inputs = recorded()
    for seed in range(4):
        NoGradient.apply(module(inputs(seed), weight)["loss"]).backward()
    assert weight.grad is None and module.recorded == 1


def test_other_results_in_turn_run_without(caplog: pytest.LogCaptureFixture) -> None:
    module, weight, inputs = recorded()
    for seed in range(8):
        weight.grad = None
        name = ("loss", "product")[seed % 2]
        module(inputs(seed), weight)[name].sum().backward()
        torch.testing.assert_close(weight.grad, expected(weight, inputs(seed), name)[1])
    assert module.recorded == 2 and caplog.text.count("starts from different results") == 1


def test_parameters_that_moved_are_recorded_again(caplog: pytest.LogCaptureFixture) -> None:
    module, weight, inputs = recorded()
    for seed in range(MANY + 2):
        loss = module(inputs(seed), weight)["loss"].detach()
        torch.testing.assert_close(loss, expected(weight, inputs(seed))[0])
        weight = nn.Parameter(weight.detach().clone() + 1)
    assert module.recorded == MANY + 1 and caplog.text.count("have new memory") == 1


def test_without_gradients_and_in_inference_mode() -> None:
    module, weight, inputs = recorded()
    for seed in range(3):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                loss = module(inputs(seed), weight)["loss"]
            torch.testing.assert_close(loss.clone(), expected(weight, inputs(seed))[0])
        loss = module(inputs(seed), weight)["loss"]
        loss.backward()
    assert module.recorded == 2


@contextmanager
def recording() -> Iterator[None]:
    """Within, `compile` takes ``cuda_graphs`` on CPUs."""
    with patch("autoparallel.backends.check_replays"), patch.object(replayed, "CudaRecorder", Again):
        yield


def trained(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> tuple[Trained, int]:
    """Four steps of training, and how often the program was recorded."""
    case = CASES[name]
    args, kwargs = case.inputs(BATCH_SIZE)
    with recording():
        parallel = autoparallel.compile(case.build(), mesh_of(*shape), example_inputs=args, example_kwargs=kwargs,
                                        cuda_graphs=True, **options)
        made, compiled = train(parallel, case, "sgd", 4), parallel._state.forms.first()
    assert compiled is not None
    return made, getattr(compiled.forward, "recorded", 0)


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "shape", "options"), [
    ("llama", (4,), {"baseline": "tensor_parallel", "pieces": 2}),
    slow("gpt2", (2, 2), {"zero_stage": 3, "recompute": "full"}),
    slow("resnet", (4,), {"baseline": "ddp"}), ("mlp", (2, 2), {"backend": "aot_eager", "zero_stage": 1}),
    slow("llama", (2, 2), {"backend": "aot_eager", "zero_stage": 1}),
    slow("bert", (4,), {"baseline": "fsdp", "backend": "inductor"}), slow("t5", (4,), {"recompute": "selective"}),
    slow("vit", (2, 2), {}), slow("llama", (4,), {"backend": "aot_eager", "baseline": "tensor_parallel"}),
], ids=str)
def test_training_on_ranks(ranks: Any, name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    actual, recordings = ranks(4).run(trained, name, shape, options)[0]
    expected = train_reference(CASES[name], "sgd", 4)
    assert_same_loss(actual, expected)
    assert_same_gradients(actual.gradients, expected, tolerance=1e-5)
    assert_same_parameters(actual.parameters, expected, tolerance=1e-4)
    assert recordings == 1


def test_rows_by_number_have_a_known_shape_and_by_a_mask_have_not() -> None:
    """The latter run between compiled graphs, and are not recorded."""
    graph = Graph()
    x, ids, mask, other = (graph.placeholder(name) for name in ("x", "ids", "mask", "other"))
    ids.meta["val"], mask.meta["val"] = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.bool)
    why = [why_not_traced(graph.call_function(torch.ops.aten.index.Tensor, (x, by)))
           for by in ([ids], [None, ids], [mask], [ids, mask], [other])]
    assert why[:2] == [None, None] and all(one is not None and "depends on the data" in one for one in why[2:])


def on_one(mesh: DeviceMesh, model: nn.Module, *args: Tensor, **options: Any) -> Any:
    with recording():
        return autoparallel.compile(model, mesh, example_inputs=args, cuda_graphs=True,
                                    cluster="h200", **options)


def test_dropout_runs_without_and_evaluation_with(mesh_of_one: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    parallel = on_one(mesh_of_one, nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.ones(8, 4))
    with recording():
        drawn = [parallel(torch.ones(8, 4)) for _ in range(3)]
        parallel.eval()
        whole = [parallel(torch.ones(8, 4)) for _ in range(3)]
    assert not torch.equal(drawn[1], drawn[2]) and torch.equal(whole[1], whole[2])
    assert "without CUDA graphs: it draws random numbers (aten.dropout" in caplog.text
    found = [made for made in parallel._state.forms._used if isinstance(made.forward, Replayed)]
    assert [made.forward.recorded for made in found] == [1]


def test_a_copy_has_recordings_of_its_own_parameters(mesh_of_one: DeviceMesh) -> None:
    first = on_one(mesh_of_one, nn.Linear(4, 4), torch.ones(2, 4))
    with recording():
        [first(torch.ones(2, 4)) for _ in range(2)]
        second = copy.deepcopy(first)
        with torch.no_grad():
            for p in second.parameters():
                p.zero_()
        found = [(float(first(torch.ones(2, 4)).abs().sum()), float(second(torch.ones(2, 4)).abs().sum()))
                 for _ in range(3)]
    assert all(one > 0 and other == 0 for one, other in found)


@pytest.mark.slow
def test_decoding_replays(mesh_of_one: DeviceMesh) -> None:
    """Each token is a call of one form."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)).eval()
    ids = torch.randint(0, 64, (2, 4))
    how: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    with recording():
        parallel = autoparallel.compile(model, mesh_of_one, example_kwargs={"input_ids": ids}, cuda_graphs=True,
                                        cluster="h200")
        found = [parallel.generate(ids, **how) for _ in range(2)]
    assert all(torch.equal(tokens, model.generate(ids, **how)) for tokens in found)
    assert [made.forward.calls for made in parallel._state.forms._used][-1] == {False: 10}
    assert [made.forward.recorded for made in parallel._state.forms._used] == [0, 1, 1]


def test_buffers_are_written(mesh_of_one: DeviceMesh) -> None:
    model = nn.BatchNorm1d(4)
    plain, parallel = copy.deepcopy(model), on_one(mesh_of_one, model, torch.randn(8, 4))
    for seed in range(4):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        with recording():
            torch.testing.assert_close(parallel(x), plain(x))
    assert parallel._state.forms.first().forward.recorded == 1
    torch.testing.assert_close(dict(parallel.named_buffers()), dict(plain.named_buffers()))


def test_a_cpu_is_refused(mesh_of_one: DeviceMesh) -> None:
    with pytest.raises(PlanError, match="there are CUDA graphs on GPUs only, and the mesh is of 'cpu'"):
        autoparallel.compile(nn.Linear(4, 4), mesh_of_one, example_inputs=(torch.ones(2, 4),), cuda_graphs=True)


@pytest.mark.parametrize(("hybrid", "size", "how", "told"), [
    (Hybrid(2), 1, "nccl", "2 micro-batches"), (Hybrid(2, 2, 2, "1f1b"), 2, "nccl", "2 stages"),
    (Hybrid(recompute="offload"), 1, "nccl", "to the host"),
    (Hybrid(offload=Offload(in_backward=True)), 1, "nccl", "all gradients at its end"),
    (Hybrid(), 2, "gloo", "gloo sends by the host"),
    (Hybrid(), 2, "nccl", ""), (Hybrid(), 1, "gloo", ""),
])
def test_what_cannot_be_recorded_is_refused(hybrid: Hybrid, size: int, how: str, told: str) -> None:
    mesh = Mock(device_type="cuda", size=lambda: size)
    position: Any = Mock(mesh=mesh, whole=mesh)
    with patch("torch.distributed.get_backend", return_value=how):
        if not told:
            return check_replays(hybrid, position)
        with pytest.raises(PlanError, match=told):
            check_replays(hybrid, position)
