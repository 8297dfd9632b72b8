"""The original's memory is freed once only its parallel module has it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakSet, proxy, ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import autoparallel
from autoparallel.errors import InputError
from autoparallel.runtime.let_go import Root
from tests.support.models import BATCH_SIZE, CASES
from tests.support.ranks import mesh_of
from tests.support.tiers import slow, with_slow

X = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))


class Recurrent(nn.Module):
    """A list of parameters, a tied one, a buffer that is written, and code that asks for the mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.first = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        y: Tensor = self.last(torch.tanh(self.first(self.layer(x)[0])))
        return y * 2 if self.training else y


def losses(model: Any, x: Tensor) -> list[float]:
    """Of two steps, then of another mode and of another shape."""
    found = []
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        found.append(float(loss))
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        model.zero_grad()
    model.eval()
    return [*found, float(model(x).square().mean()), float(model(x[:2]).square().mean()), float(model.seen)]


def test_its_parameters_are_freed_at_the_next_call(mesh_of_one: Any) -> None:
    wanted, model = losses(Recurrent(), X), Recurrent()
    parameters, root = [ref(p) for p in model.parameters()], ref(model)
    parallel = autoparallel.compile(model, mesh_of_one, example_inputs=(X,))
    parallel(X)
    assert all(p() is not None for p in parameters)
    del model
    assert root() is None
    again = autoparallel.compile(Recurrent(), mesh_of_one, example_inputs=(X,))
    assert losses(again, X) == pytest.approx(wanted, rel=1e-5)
    parallel(X)
    assert all(p() is None for p in parameters)
    assert all(p.is_meta for p in parallel._state.model.parameters()) and float(parallel.seen) == 2


@pytest.mark.slow
def test_a_model_that_is_freed_in_inference_mode_can_be_trained(mesh_of_one: Any) -> None:
    wanted = losses(Recurrent(), X)
    parallel: Any = autoparallel.compile(Recurrent().eval(), mesh_of_one, example_inputs=(X,))
    with torch.inference_mode():
        for rows in (2, 3):
            parallel(X[:rows])
    assert all(p.is_meta for p in parallel._state.model.parameters())
    parallel.train().seen.zero_()
    assert losses(parallel, X) == pytest.approx(wanted, rel=1e-5)


def test_without_an_example_they_are_freed_at_the_second_call(mesh_of_one: Any) -> None:
    model = Recurrent()
    first = ref(model.first.weight)
    model = autoparallel.compile(model, mesh_of_one)
    model(X)
    model(X)
    assert first() is None and model.last.weight is model.first.weight


def test_whoever_has_the_original_has_its_values(mesh_of_one: Any) -> None:
    model = Recurrent()
    parallel = autoparallel.compile(model, mesh_of_one, example_inputs=(X,))
    for _ in range(2):
        torch.testing.assert_close(parallel(X), model(X))


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x) * 2
        return made


def test_whoever_has_a_part_has_its_values(mesh_of_one: Any) -> None:
    inner = nn.Linear(8, 8)
    wanted = inner(X).detach()
    parallel = autoparallel.compile(Doubled(inner), mesh_of_one, example_inputs=(X,))
    parallel(X)
    torch.testing.assert_close(inner(X), wanted)
    torch.testing.assert_close(autoparallel.compile(Doubled(inner), mesh_of_one)(X), wanted * 2)
    inner.weight.requires_grad_(False)
    parallel(X).sum().backward()
    assert parallel.inner.weight.grad is None and parallel.inner.bias.grad is not None
    weight = ref(inner.weight)
    del inner
    parallel.eval()(X)     # asked again with another form
    parallel(X)
    assert weight() is None


def test_whoever_has_its_parameters_is_told_what_they_are(mesh_of_one: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    parameters = list(model.parameters())
    model = autoparallel.compile(model, mesh_of_one, example_inputs=(X,))
    optimizer = torch.optim.SGD(parameters, 0.1)
    model(X).sum().backward()
    with pytest.raises(InputError, match="parameters of the model that was given to compile"):
        optimizer.step()


@pytest.mark.parametrize("example", [slow({}), {"example_inputs": (X,)}])
def test_two_parallel_modules_of_one_original(mesh_of_one: Any, example: dict[str, Any]) -> None:
    def made() -> tuple[Any, ...]:
        model = Doubled(nn.Linear(8, 8))
        whole, part = (autoparallel.compile(one, mesh_of_one, **example) for one in (model, model.inner))
        return whole, autoparallel.compile(model, mesh_of_one, **example), part, model(X)

    first, second, part, wanted = made()
    for _ in range(2):
        for parallel in (first, second):
            torch.testing.assert_close(parallel(X), wanted)
        torch.testing.assert_close(part(X) * 2, wanted)
    for parallel in (first, second, part):
        parallel.eval()(X)


def test_initial_weights_are_not_drawn_over_values(mesh_of_one: Any) -> None:
    parallel = autoparallel.compile(nn.Linear(8, 8), mesh_of_one, example_inputs=(X,))
    wanted = parallel(X)
    parallel.init_weights()
    torch.testing.assert_close(parallel(X), wanted)
    assert parallel._state.model.weight.is_meta


class WithTensors(nn.Module):
    """Tensors that are neither parameters nor buffers, and made without a device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rows, self.scale = nn.Linear(8, 8), nn.Embedding(4, 8), torch.arange(8.0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * self.scale + self.rows(torch.arange(x.shape[0]))[:, None] + torch.ones(8)
        return y


def test_later_traces_find_the_device_that_it_had(mesh_of_one: Any) -> None:
    model = WithTensors()
    wanted = [model(X).detach(), model(X[:2]).detach()]
    weight = ref(model.layer.weight)
    model = autoparallel.compile(model, mesh_of_one, example_inputs=(X,))
    torch.testing.assert_close(model(X), wanted[0])
    torch.testing.assert_close(model.eval()(X[:2]), wanted[1])
    assert weight() is None


def test_a_copy_has_no_original_of_its_own(mesh_of_one: Any) -> None:
    model = Recurrent()
    parallel = autoparallel.compile(model, mesh_of_one, example_inputs=(X,))
    second = copy.deepcopy(parallel)
    torch.testing.assert_close(second(X), parallel(X))
    assert second._state.originals is None and model.first.weight.device.type == "cpu"
    torch.testing.assert_close(second.eval()(X), model.eval()(X))


def test_state_is_loaded_and_saved_without_the_original(mesh_of_one: Any, tmp_path: Any) -> None:
    parallel = autoparallel.compile(Recurrent(), mesh_of_one, example_inputs=(X,))
    parallel(X)
    kept = {name: value.clone() for name, value in parallel.state_dict().items()}
    parallel.save(tmp_path / "state")
    with torch.no_grad():
        for p in parallel.parameters():
            p.zero_()
    parallel.load(tmp_path / "state")
    assert parallel.state_dict().keys() == Recurrent().state_dict().keys()
    for name, value in parallel.state_dict().items():
        torch.testing.assert_close(value, kept[name])
    assert not parallel.load_state_dict(Recurrent().state_dict()).missing_keys


class Other(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


@pytest.mark.slow
def test_a_class_that_the_original_is_given_is_the_programs(mesh_of_one: Any) -> None:
    model = Recurrent()
    parallel = autoparallel.compile(model, mesh_of_one, example_inputs=(X,))
    before = parallel(X)
    model.__class__ = Other
    torch.testing.assert_close(parallel(X), before + 1)


@pytest.mark.slow
def test_transformers_models_are_freed_and_generate(mesh_of_one: Any) -> None:
    case = CASES["llama"]
    _, kwargs = case.inputs(BATCH_SIZE)
    model = case.build().eval()
    ids = kwargs["input_ids"][:2, :4]
    how: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 2, "do_sample": False}
    wanted, first = model.generate(ids, **how), ref(next(model.parameters()))  # type: ignore[operator]
    model = autoparallel.compile(model, mesh_of_one, example_kwargs=kwargs)
    assert torch.equal(model.generate(ids, **how), wanted)
    assert first() is None


class Parent:
    def __init__(self, model: nn.Module) -> None:
        self.model = model


def with_method(model: nn.Module) -> None:
    model.act = model.forward


def with_patched_forward(model: nn.Module) -> None:
    model.forward = MethodType(type(model).forward, model)  # type: ignore[method-assign]


def with_parent(model: nn.Module) -> None:
    vars(model.first)["parent"] = [model]


def with_object(model: nn.Module) -> None:
    vars(model.first)["parent"] = Parent(model)


def with_closure(model: nn.Module) -> None:
    vars(model.first)["count"] = lambda: len(list(model.parameters()))


def with_partial(model: nn.Module) -> None:
    vars(model.first)["count"] = {"one": partial(len, model)}


def with_hook(model: nn.Module) -> None:
    model.first.register_forward_hook(MethodType(lambda self, module, args, output: output, model))


def with_weak_reference(model: nn.Module) -> None:
    vars(model.first)["parent"] = ref(model)


def with_proxy(model: nn.Module) -> None:
    vars(model.first)["parent"] = [proxy(model)]


def with_weak_set(model: nn.Module) -> None:
    vars(model.first)["parents"] = WeakSet([model])


class Slots:
    __slots__ = ("model",)

    def __init__(self, model: nn.Module) -> None:
        self.model = model


def with_slots(model: nn.Module) -> None:
    vars(model.first)["parent"] = Slots(model)


def with_default(model: nn.Module) -> None:
    def first(*, of: nn.Module = model) -> Tensor:
        return next(of.parameters())

    vars(model.first)["count"] = first


@pytest.mark.parametrize("give", with_slow(
    [with_method, with_patched_forward, with_parent, with_object, with_closure, with_partial, with_hook,
     with_weak_reference, with_proxy, with_weak_set, with_slots, with_default],
    with_patched_forward, with_parent, with_closure, with_partial, with_hook, with_proxy, with_weak_set, with_slots,
    with_default))
def test_a_model_that_refers_to_itself_stays(mesh_of_one: Any, give: Callable[[nn.Module], None]) -> None:
    """What it reads by way of itself must be seen."""
    model = Recurrent()
    give(model)
    assert Root(model).module is model
    parallel = autoparallel.compile(model, mesh_of_one, example_inputs=(X,))
    wanted = model(X)
    del model
    for _ in range(2):
        torch.testing.assert_close(parallel(X), wanted)
    assert parallel._state.originals is not None


class WithSlots(Doubled):
    __slots__ = ("scale",)


class WithEnd(Doubled):
    def __del__(self) -> None:
        self.inner.is_open = False


class ADict(Doubled, dict[str, Any]):
    __hash__ = nn.Module.__hash__


@pytest.mark.parametrize("kind", [WithSlots, WithEnd, ADict])
def test_a_model_that_is_more_than_its_attributes_stays(kind: type[Doubled]) -> None:
    model = kind(nn.Linear(2, 2))
    assert Root(model).module is model


class Unread(Mapping[str, int]):
    """A mapping that raises where its values are missing."""

    def __getitem__(self, name: str) -> int:
        raise RuntimeError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(["missing"])

    def __len__(self) -> int:
        return 1


class Unset(Recurrent):
    """Has such a mapping, and lets nobody set a tensor."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and name in self.__dict__.get("_buffers", {}) and self.settings:
            raise RuntimeError(name)
        super().__setattr__(name, value)

    def __init__(self) -> None:
        self.__dict__["settings"] = {}
        super().__init__()
        self.settings = Unread()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(self.first(x))[0] + self.seen
        return y


def test_methods_of_the_users_are_not_called(mesh_of_one: Any) -> None:
    model = Unset()
    wanted = model(X).detach()
    model = autoparallel.compile(model, mesh_of_one, example_inputs=(X,))
    torch.testing.assert_close(model(X), wanted)
    torch.testing.assert_close(model.eval()(X[:2]), wanted[:2])
    assert model._state.originals is None


@pytest.mark.parametrize("parametrize", [weight_norm, slow(spectral_norm)])
def test_parametrized_and_empty_modules_are_freed(mesh_of_one: Any, parametrize: Any) -> None:
    model = Doubled(nn.Sequential(parametrize(nn.Linear(8, 8)), nn.Sequential()))
    first = ref(next(model.parameters()))
    model = autoparallel.compile(model.eval(), mesh_of_one, example_inputs=(X,))
    copied = copy.deepcopy(model)
    torch.testing.assert_close(model(X), copied(X))
    assert first() is None
    torch.testing.assert_close(model(X[:2]), copied(X[:2]))


SCALED = nn.Linear(8, 8)


class ByName(Doubled):
    """Reads an attribute of itself by a global's name."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x) * vars(SCALED)["model"].scale
        return y


def test_attributes_are_seen_by_any_name(mesh_of_one: Any) -> None:
    model = ByName(nn.Linear(8, 8))
    model.scale, vars(SCALED)["model"] = 2.0, model
    try:
        parallel = autoparallel.compile(model, mesh_of_one, example_inputs=(X,))
        before = parallel(X)
        model.scale = 6.0
        torch.testing.assert_close(parallel(X), before * 3)
    finally:
        del vars(SCALED)["model"]


def test_a_root_that_is_parametrized_before_its_first_call(mesh_of_one: Any) -> None:
    model = nn.Linear(8, 8)
    parallel = autoparallel.compile(model, mesh_of_one)
    weight_norm(model)
    torch.testing.assert_close(parallel(X), model(X))


def test_other_models_have_a_root_of_ours() -> None:
    for model in (Recurrent(), nn.Sequential(nn.Linear(2, 2)), CASES["gpt2"].build(), CASES["t5"].build()):
        root = Root(model).module
        assert root is not model and type(root) is type(model) and vars(root) is vars(model)


def on_one_rank(steps: int) -> tuple[list[float], bool]:
    """Losses where rank 0 alone keeps the original: its later traces have values, and the others' have none."""
    model = Doubled(Recurrent())
    kept = model if dist.get_rank() == 0 else None
    parallel = autoparallel.compile(model, mesh_of(2), example_inputs=(X,), zero_stage=3, outputs="whole")
    del model
    found = [float(parallel(X[:rows]).square().mean().detach()) for rows in range(4, 4 - steps, -1)]
    return found, (kept is None) == (parallel._state.originals is None)


def test_ranks_need_not_let_go_together(ranks: Any) -> None:
    model = Doubled(Recurrent())
    wanted = [float(model(X[:rows]).square().mean().detach()) for rows in (4, 3, 2)]
    for found, is_right in ranks(2).run(on_one_rank, 3, timeout_s=100):
        assert is_right and found == pytest.approx(wanted, rel=1e-4)
