"""Steps on the device while backward goes on: the same numbers to the bit, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import autoparallel
from autoparallel.errors import InputError
from autoparallel.runtime.hints import _told
from autoparallel.runtime.shard_steps import ELEMENTWISE
from tests.support.models import CASES
from tests.support.offloaded import Net, local
from tests.support.ranks import mesh_of
from tests.support.tiers import slow, with_slow

X = torch.linspace(-1, 1, 64).view(8, 8)
Left = tuple[list[float], list[Tensor], dict[str, Tensor]]
#: Bytes of a bucket of the models of these tests, which are small.
BUCKET = 4096


def has_gone(parameter: Tensor) -> bool:
    return parameter.grad is not None and "let go" in repr(parameter.grad)


def states_of(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {f"{number}.{name}": local(value.to_dense() if getattr(value, "is_sparse", False) else value)
            for number, entries in optimizer.state_dict()["state"].items()
            for name, value in entries.items() if isinstance(value, Tensor)}


def assert_equal(found: Left, expected: Left) -> None:
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
    assert found[2].keys() == expected[2].keys()
    assert all(torch.equal(found[2][name], expected[2][name]) for name in found[2])


def trained(case_name: str, shape: tuple[int, ...], options: dict[str, Any], kind: str, early: bool) -> Left:
    """Losses, parameters and states after some steps, of which backward lets all gradients go if ``early``."""
    case = CASES[case_name]
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build(), mesh_of(*shape), example_inputs=args, example_kwargs=kwargs,
                                    **options, step_in_backward=early)
    how = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = parallel.optimizer(getattr(torch.optim, kind), lr=1e-2, tile_bytes=BUCKET, **how)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses = []
    for _ in range(3):
        losses.append(float(parallel.step(*args, **kwargs)))
        assert not early or all(map(has_gone, parallel.parameters()))
        optimizer.step()
        assert not early or all(p.grad is None for p in parallel.parameters())
        optimizer.zero_grad()
        scheduler.step()
    return losses, [local(p) for p in parallel.parameters()], states_of(optimizer)


@pytest.mark.ranks
@pytest.mark.parametrize(("case", "shape", "options", "kind"), [
    slow("llama", (2,), {"baseline": "ddp", "zero_stage": 0}, "AdamW"),
    ("gpt2", (2,), {"baseline": "fsdp", "zero_stage": 3, "recompute": "full"}, "SGD"),
    ("bert", (2,), {"zero_stage": 2, "micro_batches": 2}, "AdamW"),
    ("gpt2", (2,), {"pipeline_stages": 2, "micro_batches": 4, "schedule": "1f1b"}, "Adagrad"),    # a tied weight
    slow("gpt2", (2,), {"pipeline_stages": 4, "micro_batches": 4, "schedule": "interleaved", "zero_stage": 1}, "AdamW"),
    slow("bert", (2, 2), {"pipeline_stages": 2, "micro_batches": 4, "schedule": "zero_bubble", "zero_stage": 2}, "SGD"),
    slow("llama", (3,), {"stage_replicas": (1, 2), "micro_batches": 4}, "AdamW"),
    slow("llama", (2,), {"micro_batches": 4, "copies": 2, "zero_stage": 3}, "AdamW"),
    slow("mixtral", (2, 2), {"zero_stage": 1}, "AdamW"),
    slow("llama", (2,), {"zero_stage": 2, "backend": "aot_eager"}, "AdamW"),
    slow("bert", (2,), {"zero_stage": 3, "backend": "aot_eager", "baseline": "fsdp"}, "Adagrad"),
    slow("llama", (2,), {"recompute": "offload", "zero_stage": 3}, "AdamW"),
])
def test_the_same_to_the_bit(ranks: Any, case: str, shape: tuple[int, ...], options: dict[str, Any], kind: str) -> None:
    pool = ranks(int(torch.Size(shape).numel()))
    after, early = (pool.run(trained, case, shape, options, kind, one, timeout_s=200) for one in (False, True))
    for expected, found in zip(after, early, strict=True):
        assert_equal(found, expected)


def stepped(mesh: DeviceMesh, early: bool, make: Callable[[Any], list[torch.optim.Optimizer]],
            model: Callable[[], nn.Module] = Net, batch: tuple[Tensor, ...] = (X,), **options: Any) -> Left:
    """As `trained`, of a model of these tests by optimizers of its own."""
    parallel = autoparallel.compile(model(), mesh, example_inputs=batch, **options, step_in_backward=early)
    optimizers, losses = make(parallel), []
    for _ in range(3):
        loss = parallel(*batch)
        loss.backward()
        losses.append(float(loss.detach()))
        assert not early or any(map(has_gone, parallel.parameters()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    states = {f"{number} {name}": value for number, optimizer in enumerate(optimizers)
              for name, value in states_of(optimizer).items()}
    return losses, [local(p) for p in parallel.parameters()], states


@pytest.mark.parametrize("kind", with_slow(
    [kind.__name__ for kind in ELEMENTWISE], "Adamax", "NAdam", "RAdam", "Adagrad", "ASGD", "Rprop", "Adadelta",
    "RMSprop"))
def test_every_optimizer_steps_as_after_backward(mesh_of_one: DeviceMesh, kind: str) -> None:
    """With groups that have options of their own."""
    def make(parallel: Any) -> list[torch.optim.Optimizer]:
        weights = [p for p in parallel.parameters() if p.dim() > 1]
        biases = [p for p in parallel.parameters() if p.dim() == 1]
        return [parallel.optimizer(getattr(torch.optim, kind), [{"params": weights, "lr": 0.1}, {"params": biases}],
                                   tile_bytes=0)]

    assert_equal(stepped(mesh_of_one, True, make), stepped(mesh_of_one, False, make))


class Tables(nn.Module):
    """Tables with sparse gradients, one of them looked up twice, below a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items, self.tags = nn.Embedding(24, 8, sparse=True), nn.EmbeddingBag(16, 8, sparse=True)
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        read = self.items(ids[:, 0]) * self.items(ids[:, 1]) + self.tags(tags)
        return (self.head(read) - 1).square().mean()


IDS = torch.arange(16).view(8, 2) * 7 % 24, torch.arange(24).view(8, 3) * 5 % 16


def with_tables(kind: str, parallel: Any) -> list[torch.optim.Optimizer]:
    tables, rest = list(parallel.parameters())[:2], list(parallel.parameters())[2:]
    how = {"momentum": 0.9} if kind == "SGD" else {}
    return [parallel.optimizer(getattr(torch.optim, kind), tables, lr=0.1, tile_bytes=0, **how),
            parallel.optimizer(torch.optim.AdamW, rest, lr=0.1, tile_bytes=0)]


SPARSE = ("SparseAdam", "Adagrad", "SGD")


@pytest.mark.parametrize("kind", with_slow(SPARSE, "Adagrad", "SGD"))
def test_sparse_gradients_of_tables(mesh_of_one: DeviceMesh, kind: str) -> None:
    after, early = (stepped(mesh_of_one, one, partial(with_tables, kind), Tables, IDS) for one in (False, True))
    assert_equal(early, after)
    rows = early[1][0] != Tables().items.weight
    assert rows.any() and not rows.all()


def tables_on_ranks(kind: str, options: dict[str, Any], early: bool) -> Left:
    return stepped(mesh_of(2), early, partial(with_tables, kind), Tables, IDS, **options)


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "options"), [
    ("SparseAdam", {"pins": dict.fromkeys(("items.weight", "tags.weight"), (Shard(0),))}),
    ("SGD", {"pins": dict.fromkeys(("items.weight", "tags.weight"), (Shard(1),)), "zero_stage": 3}),
    ("Adagrad", {"pins": {"items": "host", "tags": "host"}}),
])
def test_sharded_tables(ranks: Any, kind: str, options: dict[str, Any]) -> None:
    after, early = (ranks(2).run(tables_on_ranks, kind, options, one) for one in (False, True))
    for expected, found in zip(after, early, strict=True):
        assert_equal(found, expected)


# --- what users do ----------------------------------------------------------------------------------------------------

Made = tuple[Any, Any]


def made(mesh: DeviceMesh, early: bool = True, **how: Any) -> Made:
    parallel = autoparallel.compile(Net(), mesh, example_inputs=(X,), step_in_backward=early)
    return parallel, parallel.optimizer(torch.optim.AdamW, lr=0.1, tile_bytes=0, **how)


def in_a_closure(parallel: Any, optimizer: Any) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = parallel(X)
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) > 0


def two_calls(parallel: Any, optimizer: Any) -> None:
    (parallel(X) + parallel(X + 1)).backward()
    optimizer.step()


def hooked(parallel: Any, optimizer: Any) -> None:
    """Hooks of gradients, before they are added and after, run before the step."""
    seen = list[float]()
    first = next(parallel.parameters())
    first.register_hook(lambda gradient: gradient * 2)
    first.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.full_tensor().abs().sum())))
    for number in range(2):
        parallel(X + number).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(seen) == 2 and all(seen)


def step_hooks(parallel: Any, optimizer: Any) -> None:
    """Those of ``step`` run once."""
    seen = list[str]()
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    parallel(X).backward()
    optimizer.step()
    assert seen == ["before", "after"]


def unfrozen(parallel: Any, optimizer: Any) -> None:
    first, *_ = parallel.parameters()
    first.requires_grad_(False)
    parallel(X).backward()
    assert first.grad is None
    optimizer.step()
    optimizer.zero_grad()
    first.requires_grad_(True)
    parallel(X).backward()
    optimizer.step()


def restored(parallel: Any, optimizer: Any) -> None:
    """A new optimizer with the states of one before takes its place."""
    parallel(X).backward()
    optimizer.step()
    optimizer.zero_grad()
    known = deepcopy(optimizer.state_dict())
    other = parallel.optimizer(torch.optim.AdamW, lr=0.3, tile_bytes=0)
    other.load_state_dict(known)
    parallel(X).backward()
    other.step()


def verified(parallel: Any, optimizer: Any) -> None:
    """A verification steps nothing."""
    before = [local(p) for p in parallel.parameters()]
    parallel.verify(X, steps=1)
    assert all(torch.equal(a, local(b)) for a, b in zip(before, parallel.parameters(), strict=True))


def grown(parallel: Any, optimizer: Any) -> None:
    """A group that is added later."""
    first, *rest = parallel.parameters()
    other = parallel.optimizer(torch.optim.AdamW, rest, lr=0.1, tile_bytes=0)
    other.add_param_group({"params": [first], "lr": 0.5})
    for _ in range(2):
        parallel(X).backward()
        other.step()
        other.zero_grad()


def failed(parallel: Any, optimizer: Any) -> None:
    """A backward that failed: the last checkpoint is loaded, with a new optimizer."""
    known = deepcopy(parallel.state_dict())
    hook = next(parallel.parameters()).register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        parallel(X).backward()
    hook.remove()
    parallel.zero_grad()
    parallel.load_state_dict(known)
    other = parallel.optimizer(torch.optim.AdamW, lr=0.1, tile_bytes=0)
    parallel(X).backward()
    other.step()


def grown_meanwhile(parallel: Any, optimizer: Any) -> None:
    """A group that is added between forward and backward is stepped by ``step``."""
    first, *rest = parallel.parameters()
    other = parallel.optimizer(torch.optim.AdamW, rest, lr=0.1, tile_bytes=0)
    loss = parallel(X)
    other.add_param_group({"params": [first], "lr": 0.5})
    loss.backward()
    other.step()


@pytest.mark.parametrize("act", with_slow(
    [in_a_closure, two_calls, hooked, step_hooks, unfrozen, restored, verified, grown, grown_meanwhile, failed],
    step_hooks, verified, grown, unfrozen))
def test_what_users_do_gives_the_same(mesh_of_one: DeviceMesh, act: Callable[[Any, Any], None]) -> None:
    found = []
    for early in (True, False):
        parallel, optimizer = made(mesh_of_one, early)
        act(parallel, optimizer)
        found.append([local(p) for p in parallel.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_copies_of_a_module_step_their_own_parameters(mesh_of_one: DeviceMesh) -> None:
    parallel, _ = made(mesh_of_one)
    other = deepcopy(parallel)
    optimizer = other.optimizer(torch.optim.AdamW, lr=0.1, tile_bytes=0)
    other(X).backward()
    optimizer.step()
    changed = [not torch.equal(local(a), local(b)) for a, b in zip(parallel.parameters(), other.parameters(),
                                                                   strict=True)]
    assert all(changed)
    other(X).backward()
    with pytest.raises(InputError, match="AdamW would step them after it"):
        torch.optim.AdamW(other.parameters()).step()


# --- what is refused --------------------------------------------------------------------------------------------------


def twice(parallel: Any, optimizer: Any) -> None:
    first, second = parallel(X), parallel(X + 1)
    first.backward()
    second.backward()


def clipped(parallel: Any, optimizer: Any) -> None:
    parallel(X).backward()
    parallel.clip_grad_norm_(1.0)


def clipped_by_torch(parallel: Any, optimizer: Any) -> None:
    parallel(X).backward()
    nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)


def scaled_step(parallel: Any, optimizer: Any) -> None:
    with autoparallel.GradScaler("cpu").scaling():
        parallel.step(X)


def reset(parallel: Any, optimizer: Any) -> None:
    parallel(X).backward()
    optimizer.zero_grad()
    optimizer.step()


def other_rate(parallel: Any, optimizer: Any) -> None:
    parallel(X).backward()
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.step()


def saved(parallel: Any, optimizer: Any) -> None:
    parallel(X).backward()
    optimizer.state_dict()


def weights_saved(parallel: Any, optimizer: Any) -> None:
    parallel(X).backward()
    parallel.state_dict()


def weights_written(parallel: Any, optimizer: Any) -> None:
    parallel(X).backward()
    parallel.save_pretrained("nowhere")


def again(parallel: Any, optimizer: Any) -> None:
    parallel(X).backward()
    parallel(X)


def differentiated(parallel: Any, optimizer: Any) -> None:
    parallel(X).backward(create_graph=True)


def plain(parallel: Any, optimizer: Any) -> None:
    other = torch.optim.SGD(parallel.parameters(), lr=0.1)
    del optimizer
    other.step()


def not_elementwise(parallel: Any, optimizer: Any) -> None:
    parallel.optimizer(torch.optim.Muon, [p for p in parallel.parameters() if p.dim() == 2])


REFUSED: list[tuple[Callable[[Any, Any], None], str]] = [
    (twice, "each backward needs a step() of its own"), (clipped, "clip_grad_norm_ before optimizer.step()"),
    (clipped_by_torch, "the gradient of a parameter is read or written to, and backward has stepped with it"),
    slow(scaled_step, "gradients are scaled (GradScaler)"),
    (reset, "a gradient was changed after backward had stepped with it"),
    (other_rate, "options of the optimizer changed after backward had stepped with them"),
    (saved, "state_dict() before optimizer.step()"), slow(weights_saved, "state_dict() before optimizer.step()"),
    slow(weights_written, "save_pretrained before optimizer.step()"),
    (again, "the module was called before optimizer.step()"),
    (differentiated, "backward(create_graph=True) makes gradients that can be differentiated"),
    (plain, "the plan steps parameters during backward (step_in_backward=True), and SGD would step them after it"),
    (not_elementwise, "Muon is not element-wise"),
]


@pytest.mark.parametrize(("act", "wanted"), REFUSED)
def test_what_is_refused(mesh_of_one: DeviceMesh, act: Callable[[Any, Any], None], wanted: str) -> None:
    parallel, optimizer = made(mesh_of_one)
    with pytest.raises(InputError) as error:
        act(parallel, optimizer)
    assert wanted in str(error.value)


@pytest.mark.parametrize("kind", [autoparallel.GradScaler, torch.amp.GradScaler])
def test_scaled_gradients_are_refused_before_anything_is_stepped(mesh_of_one: DeviceMesh, kind: Any) -> None:
    """Backward stepped with gradients of the scaled loss, and `scaler.step` was refused after it."""
    parallel, optimizer = made(mesh_of_one)
    before = [local(p).clone() for p in parallel.parameters()]
    with pytest.raises(InputError, match=r"gradients are scaled \(GradScaler\), and the plan"):
        kind("cpu").scale(parallel(X)).backward()
    assert all(torch.equal(local(p), old) for p, old in zip(parallel.parameters(), before, strict=True))
    off = kind("cpu", enabled=False)
    off.scale(parallel(X)).backward()
    off.step(optimizer)
    assert not all(torch.equal(local(p), old) for p, old in zip(parallel.parameters(), before, strict=True))


def test_two_backwards_of_one_call_are_refused_before_they_compute(mesh_of_one: DeviceMesh) -> None:
    """They would compute with parameters that are stepped already."""
    parallel, _ = made(mesh_of_one)
    loss = parallel(X)
    loss.backward(retain_graph=True)
    with pytest.raises(InputError, match="each backward needs a step"):
        loss.backward()


class Detached(Net):
    """A weight is read without gradient, too, below the layer that trains it."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(x, self.a.weight[:8]).tanh()
        return super().forward(nn.functional.linear(x, self.b.weight.detach()[:, :8]).tanh())


def test_a_parameter_that_is_read_after_its_step_is_torchs_error(mesh_of_one: DeviceMesh) -> None:
    """Not numbers of its new values; a hint below the traceback says what to write."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        stepped(mesh_of_one, True, lambda parallel: [parallel.optimizer(torch.optim.SGD, lr=0.1, tile_bytes=0)],
                Detached)
    _told(lambda *_: None, RuntimeError, raised.value, None)
    assert "Compile without step_in_backward" in raised.value.__notes__[0]


def test_differentiable_optimizers_are_refused(mesh_of_one: DeviceMesh) -> None:
    with pytest.raises(InputError, match="differentiable=True steps within autograd"):
        made(mesh_of_one, differentiable=True)
