"""The parallel module behaves as the original: state, modes, inputs and outputs, meta models, other shapes."""

from __future__ import annotations

import copy
import dataclasses
import logging
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autoparallel
from autoparallel.runtime.shared import SharedGradients
from cost_models import Cluster
from tests.support.batch_rows import Rows, example, rows_of, whole
from tests.support.models import CASES
from tests.support.overlapped import Tied
from tests.support.ranks import mesh_of
from tests.support.reference import gathered, gradients_of
from tests.support.tiers import slow


def modes_and_state() -> list[str]:
    """Names, state dict round trip, eval and no_grad, output structure."""
    model, _, kwargs = example("bert")
    parallel = autoparallel.compile(model, mesh_of(2, 2), example_kwargs=kwargs, baseline="fsdp")
    wrong = []
    if [n for n, _ in parallel.named_parameters()] != [n for n, _ in model.named_parameters()]:
        wrong.append("parameter names")
    if set(parallel.state_dict()) != set(model.state_dict()):
        wrong.append("state dict names")
    if not all(isinstance(p, DTensor) for p in parallel.parameters()):
        wrong.append("parameters are DTensors")
    with torch.no_grad():
        output, expected = parallel(**kwargs), model(**kwargs)
    if type(output) is not type(expected) or list(output) != list(expected):
        wrong.append(f"structure {type(output)}")
    if not torch.allclose(whole(output.logits), expected.logits, atol=1e-5):
        wrong.append("logits")
    changed = {name: value + 1 if value.is_floating_point() else value for name, value in model.state_dict().items()}
    parallel.load_state_dict(changed)
    for name, value in gathered(parallel.state_dict().items()).items():
        if not torch.equal(value, changed[name]):
            wrong.append(f"loaded {name}")
    return wrong


def test_names_state_and_structure(ranks: Any) -> None:
    assert ranks(4).run(modes_and_state) == [[]] * 4


def loaded_in_stages() -> list[str]:
    """A whole state dict in a pipeline: names with other values than given; and one name too many is told."""
    _, parallel, _ = rows_of((2,), {"pipeline_stages": 2, "micro_batches": 2})
    given = {name: torch.randn_like(value) for name, value in Rows().state_dict().items()}
    result = parallel.load_state_dict(given)
    wrong = [name for name, value in gathered(parallel.state_dict().items()).items() if not value.equal(given[name])]
    with pytest.raises(RuntimeError, match=r"unexpected \['more'"):    # torch's class; ours is an InputError, too
        parallel.load_state_dict({**given, "more": torch.zeros(1)})
    return [*wrong, *result.missing_keys, *result.unexpected_keys]


def test_pipelines_load_whole_state_dicts(ranks: Any) -> None:
    assert ranks(2).run(loaded_in_stages) == [[]] * 2


def sharded_inputs() -> list[float]:
    """Losses with plain tensors, with `shard_batch`, with DTensors cut otherwise than the plan reads them."""
    from torch.distributed.tensor import Shard, distribute_tensor

    model, _, kwargs = example("llama")
    mesh = mesh_of(4)
    parallel = autoparallel.compile(model, mesh, example_kwargs=kwargs, baseline="ddp")
    batch = parallel.shard_batch(kwargs)
    assert all(isinstance(v, DTensor) and v.to_local().shape[0] == 2 for v in batch.values())
    other = {k: distribute_tensor(v, mesh, [Shard(1)]) for k, v in kwargs.items()}
    return [float(parallel(**b).loss) for b in (kwargs, batch, other)] + [float(model(**kwargs).loss)]


def test_plain_and_distributed_inputs_mean_the_same(ranks: Any) -> None:
    for losses in ranks(4).run(sharded_inputs):
        assert max(losses) - min(losses) < 1e-5 * losses[-1]


def other_shapes() -> tuple[list[float], list[str]]:
    """A batch, another, and the first again: relative differences of loss and a gradient, and what is announced."""
    case = CASES["llama"]
    model = case.build()
    parallel = autoparallel.compile(model, mesh_of(2, 2))
    found, announced = list[float](), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: announced.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autoparallel").addHandler(handler)
    for batch in (8, 4, 8):
        _, kwargs = case.inputs(batch)
        parallel.zero_grad(set_to_none=True) if found else None
        model.zero_grad(set_to_none=True)
        loss, expected = parallel(**kwargs).loss, model(**kwargs).loss
        loss.backward()
        expected.backward()
        found.append(float((loss - expected).abs() / expected))
        mine, theirs = gathered((n, p.grad) for n, p in parallel.named_parameters()), dict(model.named_parameters())
        name = "model.layers.0.mlp.up_proj.weight"
        found.append(float((mine[name] - theirs[name].grad).abs().max() / theirs[name].grad.abs().max()))
    logging.getLogger("autoparallel").removeHandler(handler)
    return found, announced


def test_calls_of_other_shapes_are_traced_anew(ranks: Any) -> None:
    told = ranks(4).run(other_shapes)
    assert all(max(found) < 1e-5 for found, _ in told)
    assert ["another form (form 2)" in line and "int64[4, " in line for _, lines in told for line in lines] == [True]


def meta_model(load: bool) -> tuple[float, list[str]]:
    """A meta-device Llama gets its weights; |loss - expected| and parameters whose shard is too large."""
    case = CASES["llama"]
    _, kwargs = case.inputs(8)
    real = case.build()
    with torch.device("meta"):
        model = type(real)(real.config).train()
    fake = {k: torch.empty_like(v, device="meta") for k, v in kwargs.items()}
    parallel = autoparallel.compile(model, mesh_of(4), example_kwargs=fake, baseline="fsdp")
    if load:
        parallel.load_state_dict(real.state_dict())
    else:
        parallel.init_weights()
        plain = {n: whole(p) for n, p in parallel.named_parameters()}
        real.load_state_dict(plain, strict=False)
    missing = [n for n, p in parallel.named_parameters() if p.to_local().numel() * 4 > p.numel() + 4 * p.shape[-1]]
    return float((parallel(**kwargs).loss - real(**kwargs).loss).abs()), missing


def test_meta_models_load_a_state_dict(ranks: Any) -> None:
    for difference, too_large in ranks(4).run(meta_model, True):
        assert difference < 1e-5 and not too_large


def test_meta_models_initialise_their_local_shards(ranks: Any) -> None:
    for difference, too_large in ranks(4).run(meta_model, False):
        assert difference < 1e-5 and not too_large


def input_gradient() -> float:
    """The gradient of an input that asks for one, against one process's."""
    model = CASES["transformer_encoder"].build()
    args, kwargs = CASES["transformer_encoder"].inputs(8)
    leaves = [a.clone().requires_grad_(a.is_floating_point()) for a in args]
    named = {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in kwargs.items()}
    again = [a.detach().clone().requires_grad_(a.requires_grad) for a in leaves]
    named_again = {k: v.detach().clone().requires_grad_(v.requires_grad) for k, v in named.items()}
    parallel = autoparallel.compile(model, mesh_of(2, 2), example_inputs=leaves, example_kwargs=named)
    CASES["transformer_encoder"].loss(parallel(*leaves, **named)).backward()
    CASES["transformer_encoder"].loss(model(*again, **named_again)).backward()
    pairs = [*zip(leaves, again, strict=True), *((named[k], named_again[k]) for k in named)]
    return max(float((a.grad - b.grad).abs().max() / b.grad.abs().max()) for a, b in pairs if a.requires_grad)


def test_inputs_get_their_gradients(ranks: Any) -> None:
    assert max(ranks(4).run(input_gradient)) < 1e-5


def step_losses() -> tuple[float, float]:
    case = CASES["gpt2"]
    _, kwargs = case.inputs(8)
    model = case.build()
    parallel = autoparallel.compile(model, mesh_of(4), example_kwargs=kwargs)
    loss = parallel.step(**kwargs)
    assert all(p.grad is not None for p in parallel.parameters())
    return float(loss), float(model(**kwargs).loss)


def test_step_runs_forward_and_backward(ranks: Any) -> None:
    for mine, expected in ranks(4).run(step_losses):
        assert abs(mine - expected) < 1e-5 * expected


class Squares(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def squares() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Squares(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


GIVEN = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


def compiled_for_a_count(options: dict[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...] | None, float]:
    """(the mesh's shape and names, the loss) of a model compiled for four devices."""
    parallel = autoparallel.compile(squares(), 4, example_inputs=(GIVEN,), **options)
    loss = float(parallel.step(GIVEN))
    return tuple(parallel.mesh.shape), parallel.mesh.mesh_dim_names, loss


def test_a_device_count_leaves_the_axes_to_the_search(ranks: Any) -> None:
    """They are the plan's, whether it is given or found; a pipeline's comes first."""
    local = Cluster.load("local-cpu", num_devices=4)
    inside = dataclasses.replace(local.links[0], num_devices=2)
    outside = dataclasses.replace(inside, name="slow", num_devices=4, bandwidth_bytes_per_s=1e6)
    hosts = dataclasses.replace(local, links=(inside, outside))
    best = autoparallel.plan(squares(), hosts, example_inputs=(GIVEN,))
    two_axes = autoparallel.plan(squares(), hosts, example_inputs=(GIVEN,), mesh_shape=(2, 2))
    loss = pytest.approx(squares()(GIVEN).item(), rel=1e-5)
    for options, made in (({"cluster": hosts}, best), ({"plan": best}, best), ({"plan": two_axes}, two_axes)):
        for found in ranks(4).run(compiled_for_a_count, options):
            assert found == (made.mesh_shape, made.axis_names, loss)
    for shape, names, found in ranks(4).run(compiled_for_a_count, {"pipeline_stages": 2, "schedule": "gpipe"}):
        assert shape[0] == 2 and names is not None and names[0] == "pipeline" and found == loss


def penalised(search: dict[str, Any]) -> float:
    """Error of the gradients of a loss in which the gradients themselves occur (a gradient penalty)."""
    def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
        first = torch.autograd.grad(model(GIVEN), list(model.parameters()), create_graph=True)
        sum(whole_with_gradient(g).square().sum() for g in first).backward()  # type: ignore[union-attr]
        return gradients_of(model)

    wanted = gradients(squares())
    have = gradients(autoparallel.compile(squares(), mesh_of(2, 2), example_inputs=(GIVEN,), **search))
    return max(float((have[n] - g).abs().max() / g.abs().max()) for n, g in wanted.items())


def whole_with_gradient(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("baseline", [None, slow("ddp"), "fsdp", slow("tensor_parallel"), "sequence_parallel"])
def test_gradients_of_gradients(ranks: Any, baseline: str | None) -> None:
    assert max(ranks(4).run(penalised, {"baseline": baseline})) < 1e-5


class WithMethods(nn.Linear):
    """A method that calls the model, and a property of its parameters."""

    def training_loss(self, x: torch.Tensor) -> torch.Tensor:
        return (self(x) - 1).square().mean()

    @cached_property
    def size(self) -> float:
        return float(sum(full(p).detach().square().sum() for p in self.parameters()))

    @property
    def norm(self) -> float:
        return self.size**0.5


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def trained_by_methods() -> list[tuple[float, float, float]]:
    """Losses and size of the parameters after each step, of one process and of four."""
    found = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        one = WithMethods(16, 16)
        torch.manual_seed(0)
        many = autoparallel.compile(WithMethods(16, 16), mesh_of(4), baseline="fsdp", example_inputs=(GIVEN[:, :16],))
    for model in (one, many):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model.training_loss(GIVEN[:, :16])
            loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
            loss.backward()
            optimizer.step()
        found.append((float(loss.detach()), model.size, model.in_features))
    assert many.norm == pytest.approx(many.size**0.5)
    return found


def test_methods_of_the_original_use_the_trained_parameters(ranks: Any) -> None:
    for one, many in ranks(4).run(trained_by_methods):
        assert many == pytest.approx(one, rel=1e-5)


def generated(baseline: str | None, use_cache: bool) -> list[Any]:
    """Whether greedy tokens are one process's; and drawn tokens."""
    model = CASES["llama"].build().eval()
    ids = torch.arange(20).reshape(4, 5)
    parallel = autoparallel.compile(model, mesh_of(2, 2), example_kwargs={"input_ids": ids}, baseline=baseline)
    call = {"max_new_tokens": 2, "use_cache": use_cache}
    greedy = parallel.generate(ids, do_sample=False, **call)
    return [isinstance(parallel, type(model)), torch.equal(greedy, model.generate(ids, do_sample=False, **call)),
            parallel.generate(ids, do_sample=True, **call).tolist()]


@pytest.mark.parametrize(("baseline", "use_cache"), [slow(None, True), ("tensor_parallel", False)])
def test_hugging_face_models_generate(ranks: Any, baseline: str | None, use_cache: bool) -> None:
    results = ranks(4).run(generated, baseline, use_cache, timeout_s=200)
    for *same, drawn in results:
        assert all(same) and drawn == results[0][-1]


def test_a_step_that_fails_leaves_gradients_that_ranks_share() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = before = torch.full((3,), 2.0)
    shared = SharedGradients({"weight": parameter}.__getitem__, {"weight": (0, 1)}, {}, None, 0.0)
    with pytest.raises(RuntimeError, match="no more memory"), shared.added_up() as read:
        read["weight"].sum().backward()
        raise RuntimeError("no more memory")
    assert parameter.grad is before and before.tolist() == [2.0] * 3


def copied_and_trained(mesh_shape: tuple[int, ...], options: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Parameters of a model after one step, and of a copy that was made then and took another; by one process without
    a mesh."""
    ids = torch.arange(8 * 6).view(8, 6) % 19
    model: Any = Tied()
    if mesh_shape:
        model = autoparallel.compile(model, mesh_of(*mesh_shape), example_inputs=(ids, ids + 1), **options)
    for number in range(2):
        trained = model if number == 0 else copy.deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        if "micro_batches" in options:
            trained.step(ids, ids + 1)
        else:
            trained(ids, ids + 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [gathered(found.named_parameters()) for found in (model, trained)]


@pytest.mark.parametrize(("mesh_shape", "options"), [
    ((2,), {"baseline": "fsdp"}), ((2,), {"baseline": "ddp", "pipeline_stages": 2, "micro_batches": 2}),
])
def test_a_copy_learns_by_itself(ranks: Any, mesh_shape: tuple[int, ...], options: dict[str, Any]) -> None:
    expected = copied_and_trained((), {})
    for found in ranks(2).run(copied_and_trained, mesh_shape, options):
        for mine, others in zip(found, expected, strict=True):
            assert mine and set(mine) <= set(others)
            for name, value in mine.items():
                torch.testing.assert_close(value, others[name], rtol=1e-5, atol=1e-6)
