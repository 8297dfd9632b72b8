"""A parallel module's parameters are copies on the mesh: what is done to the originals, or to a DTensor as if it were a
plain tensor, is refused or told, and state dicts pass through the modules' hooks."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx

import autoparallel
from autoparallel.errors import CaptureError, InputError
from autoparallel.runtime import originals
from tests.support.ranks import mesh_of
from tests.support.tiers import slow, with_slow

X = torch.linspace(-1, 1, 24).view(4, 6)


class Scaled(nn.Module):
    """Its scale is in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 6), 1.0

    def get_extra_state(self) -> Any:
        return {"scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


class Renamed(nn.Linear):
    """Reads files of an older version, where the weight was transposed."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if f"{prefix}kernel" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel").t()
        super()._load_from_state_dict(state_dict, prefix, *args)
        with torch.no_grad():
            self.bias.mul_(2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scaled, self.last = nn.Linear(6, 6), Scaled(), Renamed(6, 6)
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scaled(self.first(x)).tanh())


@pytest.fixture
def pair(mesh_of_one: Any) -> tuple[Any, Any]:
    """A model, and the parallel module that was made of it and called."""
    torch.manual_seed(0)
    model = Net()
    return model, autoparallel.compile(model, mesh_of_one, example_inputs=(X,))


def assign_data(model: Any, parallel: Any) -> None:
    parallel.first.bias.data = model.first.bias.data * 2


def assign_from_vector(model: Any, parallel: Any) -> None:
    nn.utils.vector_to_parameters(torch.zeros(sum(p.numel() for p in model.parameters())), parallel.parameters())


def step_the_original(model: Any, parallel: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel(X).sum().backward()
    optimizer.step()


def call_the_original(model: Any, parallel: Any) -> None:
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    model(X).sum().backward()
    optimizer.step()


def tie_the_original(model: Any, parallel: Any) -> None:
    model.first.bias = model.last.bias
    parallel(X)


def replace_a_part(model: Any, parallel: Any) -> None:
    model.first = nn.Identity()
    parallel(X)


def in_forward_mode(model: Any, parallel: Any) -> None:
    with forward_ad.dual_level():
        parallel(forward_ad.make_dual(X, X))


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "data": (assign_data, "assigning to the data of a DTensor"),
    "vector": (assign_from_vector, "assigning to the data of a DTensor"),
    "optimizer of the original": (step_the_original, "SGD has parameters of the model that was given to compile"),
    "call of the original": (call_the_original, "SGD has parameters of a parallel module, which have no gradients"),
    "converted original": (lambda m, p: (m.double(), p(X)), "was converted to another dtype"),
    "tied original": (tie_the_original, "first has another bias than when it was compiled"),
    "part of the original": (replace_a_part, "the model has another first than when it was compiled"),
    "pickle": (lambda m, p: pickle.dumps(p), "cannot be pickled"),
    "compile()": (lambda m, p: p.compile(), "Leave parallel.compile() out"),
    "make_fx": (lambda m, p: make_fx(lambda x: p(x))(X), "within make_fx"),
    "jit": (lambda m, p: torch.jit.trace(p, X), "within torch.jit.trace"),
    "vmap": (lambda m, p: torch.func.vmap(p)(X[None]), "within a transform of torch.func"),
    "forward mode": (in_forward_mode, "within forward-mode differentiation"),
    "meta": (lambda m, p: p.to("meta"), "cannot become torch.float32 on meta"),
}


@pytest.mark.parametrize("name", with_slow(
    REFUSED, "vector", "call of the original", "part of the original", "make_fx", "jit", "meta"))
def test_changes_that_a_copy_does_not_see_are_refused(pair: tuple[Any, Any], name: str) -> None:
    change, said = REFUSED[name]
    with pytest.raises(InputError) as found:
        change(*pair)
    assert said in str(found.value)


def test_an_optimizer_of_a_model_that_is_trained_itself_steps_it(pair: tuple[Any, Any]) -> None:
    model, _ = pair
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), model.first.bias.detach().clone()
    model(X).sum().backward()
    optimizer.step()
    assert not torch.equal(model.first.bias, before)


def test_share_memory_shares_the_shards(pair: tuple[Any, Any]) -> None:
    model, parallel = pair
    parallel.share_memory()
    assert parallel.first.bias.to_local().is_shared()
    torch.testing.assert_close(parallel(X), model(X))


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def warned() -> Iterator[list[str]]:
    handler = Warnings()
    logging.getLogger("autoparallel").addHandler(handler)
    yield handler.lines
    logging.getLogger("autoparallel").removeHandler(handler)


def test_values_written_to_the_original_are_told_once(pair: tuple[Any, Any], warned: list[str]) -> None:
    model, parallel = pair
    with torch.no_grad():
        model.first.bias.zero_()
    parallel(X)
    parallel(X)
    assert [line for line in warned if "was written to" in line] == [
        "of the Net that was compiled, first.bias was written to: its parallel module has values of its own, which "
        "stay as they are (parallel.load_state_dict(...) sets them)"]


def put_data(model: Any) -> None:
    model.first.bias.data = torch.zeros_like(model.first.bias)


#: What is done to the original, and what a warning says of it.
TOLD: dict[str, tuple[Callable[[Any], object], str]] = {
    "data": (put_data, "first.bias was written to"),
    "buffer": (lambda m: m.count.fill_(2.0), "count was written to"),
    "other buffer": (lambda m: setattr(m, "count", torch.ones(())), "count was written to"),
    "hook": (lambda m: m.first.weight.register_hook(lambda gradient: None), "parameters have other hooks"),
    "frozen": (lambda m: m.first.weight.requires_grad_(False), "requires_grad of first.weight was set"),
}


@pytest.mark.parametrize("name", with_slow(TOLD, "other buffer", "frozen"))
def test_what_is_done_to_the_original_is_told(pair: tuple[Any, Any], warned: list[str], name: str) -> None:
    (model, parallel), (change, said) = pair, TOLD[name]
    change(model)
    parallel(X)
    parallel(X)
    assert sum(said in line for line in warned) == 1, warned


#: How a script resets gradients after a step, and whether those of the parallel module are.
RESETS: dict[str, tuple[Callable[[Any, Any, Any], object], bool]] = {
    "original": (lambda model, parallel, optimizer: model.zero_grad(), False),
    "none": (lambda model, parallel, optimizer: None, False),
    "parallel": (lambda model, parallel, optimizer: parallel.zero_grad(), True),
    "optimizer": (lambda model, parallel, optimizer: optimizer.zero_grad(), True),
    "zeros": (lambda model, parallel, optimizer: optimizer.zero_grad(set_to_none=False), True),
}


def test_an_original_that_takes_device_memory_is_told(mesh_of_one: Any, warned: list[str],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(memory_bytes: float, model: nn.Module | None = None) -> None:
        monkeypatch.setattr(originals, "memory_of", lambda device: memory_bytes)
        parallel = autoparallel.compile(model or nn.Linear(6, 6), mesh_of_one, example_inputs=(X,))
        for _ in range(2):
            parallel(X)

    assert originals.memory_of(torch.device("cpu")) == math.inf
    models = [nn.Linear(6, 6) for _ in range(3)]
    compiled(1000, models[0])
    monkeypatch.setattr(originals, "ELSEWHERE", ())    # as if the CPU were an accelerator
    compiled(1e6, models[1])
    compiled(1000)      # of which nobody else has the original
    assert warned == []
    compiled(1000, models[2])
    assert len(warned) == 1 and "parameters occupy 0.0 GiB of cpu in addition" in warned[0]


@pytest.mark.parametrize("name", RESETS)
@pytest.mark.parametrize(("batches", "options"), [
    (1, {}), slow(2, {}), slow(1, {"foreach": True}), slow(1, {"fused": True})])
def test_gradients_that_are_not_reset_after_a_step_are_told(pair: tuple[Any, Any], warned: list[str], name: str,
                                                            batches: int, options: dict[str, bool]) -> None:
    """Also by optimizers that set all gradients to zero together, which torch counts as no change of them."""
    (model, parallel), (reset, resets) = pair, RESETS[name]
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, **options)
    for _ in range(3):
        for _ in range(batches):
            parallel(X).sum().backward()
        optimizer.step()
        reset(model, parallel, optimizer)
    told = [line for line in warned if line.startswith("gradients are added to those that SGD has stepped with")]
    assert len(told) == (0 if resets else 1), warned


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_another_loss_that_are_reset_before_a_step_are_not_told(pair: tuple[Any, Any], warned: list[str],
                                                                             set_to_none: bool) -> None:
    """A GAN's critic gets gradients of the generator's loss after its step."""
    optimizer = torch.optim.SGD(pair[1].parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad(set_to_none)
        pair[1](X).sum().backward()
        optimizer.step()
        pair[1](X).sum().backward()
    assert not any("has stepped with already" in line for line in warned), warned


@pytest.mark.parametrize("name", [slow("none"), slow("optimizer"), "zeros"])
def test_gradients_in_host_memory_that_are_not_reset_are_told(mesh_of_one: Any, warned: list[str], name: str) -> None:
    parallel = autoparallel.compile(Net(), mesh_of_one, example_inputs=(X,), offload="host")
    (reset, resets), optimizer = RESETS[name], parallel.optimizer(torch.optim.SGD, lr=0.1)
    for _ in range(3):
        parallel(X).sum().backward()
        optimizer.step()
        reset(None, parallel, optimizer)
    assert sum("has stepped with already" in line for line in warned) == (0 if resets else 1), warned


def test_modes_and_requires_grad_of_the_original_are_shared(pair: tuple[Any, Any]) -> None:
    model, parallel = pair
    model.eval()
    parallel(X)
    assert not parallel.training and not parallel.first.training
    parallel.train()
    model.first.eval()
    parallel(X)
    assert parallel.training and not parallel.first.training
    parallel.first.train()
    parallel(X)
    assert parallel.first.training
    model.first.requires_grad_(False)
    parallel(X).sum().backward()
    assert parallel.first.weight.grad is None and parallel.last.weight.grad is not None
    parallel.requires_grad_(True)
    parallel(X).sum().backward()
    assert parallel.first.weight.grad is not None


def test_parameters_of_two_parallel_modules_are_told(pair: tuple[Any, Any], mesh_of_one: Any,
                                                     warned: list[str]) -> None:
    model, _ = pair
    other = nn.Sequential(model.first, nn.ReLU())
    autoparallel.compile(other, mesh_of_one, example_inputs=(X,))
    assert any(line.startswith("0.weight of Sequential is also a parameter of a Net") for line in warned)


def trained(parallel: Any, *others: Any) -> torch.optim.Optimizer:
    """One step, of several parallel modules together; returns its optimizer."""
    optimizer = torch.optim.SGD([p for one in (parallel, *others) for p in one.parameters()], lr=0.1)
    for one in (parallel, *others):
        one(X).sum().backward()
    optimizer.step()
    return optimizer


#: What is done with two parallel modules of one model, and whether one of them is used with values that the other's
#: training did not change.
TWICE: dict[str, tuple[Callable[[Any, Any], object], bool]] = {
    "evaluated": (lambda a, b: (a(X), trained(a), b(X), trained(a), b(X), trained(b)), True),
    "called before": (lambda a, b: (a(X), b(X), trained(a), b(X)), True),
    "trained in turn": (lambda a, b: (a(X), b(X), trained(a), trained(b)), True),
    "trained together": (lambda a, b: (a(X), b(X), trained(a, b)), True),
    "not trained": (lambda a, b: (a(X), b(X)), False),
    "not used": (lambda a, b: (a(X), b(X), trained(a), trained(a)), False),
    "loaded": (lambda a, b: (a(X), b(X), trained(a), b.load_state_dict(a.state_dict()), b(X), trained(a)), False),
}


@pytest.mark.parametrize("name", with_slow(TWICE, "evaluated", "called before", "not used"))
def test_a_model_that_is_compiled_twice_is_told_where_one_misses_the_others_training(
        mesh_of_one: Any, warned: list[str], name: str) -> None:
    (use, told), model = TWICE[name], nn.Linear(6, 6)
    use(*(autoparallel.compile(model, mesh_of_one) for _ in range(2)))
    assert sum("two parallel modules are used, and one was trained" in line for line in warned) == told, warned


def test_a_model_that_is_compiled_again_with_the_trained_values_is_not_told(mesh_of_one: Any, warned: list[str]
                                                                            ) -> None:
    model = nn.Linear(6, 6)
    first = autoparallel.compile(model, mesh_of_one, example_inputs=(X,))
    trained(first)
    model.load_state_dict({name: value.full_tensor() for name, value in first.state_dict().items()})
    second = autoparallel.compile(model, mesh_of_one)
    torch.testing.assert_close(second(X), first(X))
    assert not any("two parallel modules are used" in line for line in warned), warned


def test_hooks_of_all_modules_are_refused(pair: tuple[Any, Any]) -> None:
    hook = nn.modules.module.register_module_forward_hook(lambda module, given, made: None)
    try:
        with pytest.raises(CaptureError, match="a hook of all modules is registered"):
            pair[1](X)
    finally:
        hook.remove()
    torch.testing.assert_close(pair[1](X), pair[0](X))


def test_state_dicts_pass_through_hooks_methods_and_extra_state(pair: tuple[Any, Any]) -> None:
    model, parallel = pair
    torch.manual_seed(1)
    saved = Net()
    saved.scaled.scale = 3.0
    state = saved.state_dict()
    state["last.kernel"] = state.pop("last.weight").t()
    called: list[str] = []
    for one in (model, expected := copy.deepcopy(model)):
        one.first.register_load_state_dict_pre_hook(
            lambda module, values, prefix, *args: values.update({f"{prefix}bias": values[f"{prefix}bias"] + 1}))
    parallel.first.register_load_state_dict_post_hook(lambda module, odd: called.append(type(module).__name__))
    found, right = parallel.load_state_dict(state), expected.load_state_dict(state)
    assert (found, called) == (right, ["Linear"])
    assert parallel.scaled.scale == 3.0 and parallel.state_dict()["scaled._extra_state"] == {"scale": 3.0}
    torch.testing.assert_close(parallel(X), expected(X))


def test_state_dicts_without_versions_load_as_torch_loads_them(mesh_of_one: Any) -> None:
    """torch takes no count of batches from them, and names what is missing in the model's order."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    state = {name: value + 1 for name, value in model.state_dict().items() if name != "1.num_batches_tracked"}
    parallel: Any = autoparallel.compile(copy.deepcopy(model), mesh_of_one, example_inputs=(X,))
    for values in (state, {"1.bias": state["1.bias"], "0.odd": X}):
        strict = values is state
        assert parallel.load_state_dict(values, strict) == model.load_state_dict(values, strict)
    torch.testing.assert_close(parallel.eval()(X), model.eval()(X))
    state["1.num_batches_tracked"] = torch.tensor(5)
    parallel.load_state_dict(state)
    assert int(parallel.state_dict()["1.num_batches_tracked"]) == 5


def test_a_models_own_extra_state_is_in_its_state_dict(mesh_of_one: Any) -> None:
    parallel: Any = autoparallel.compile(Scaled(), mesh_of_one, example_inputs=(X,))
    parallel.scale = 2.0
    state = parallel.state_dict()
    parallel.scale = 5.0
    parallel.load_state_dict(state)
    assert parallel.scale == 2.0


def numbers_of_parts() -> list[str]:
    """What asking a DTensor output, or a number made of it, for a Python number raises."""
    parallel: Any = autoparallel.compile(nn.Linear(6, 3), mesh_of(2), baseline="ddp")
    made, said = parallel(X), []
    for number in (lambda: made.sum().item(), lambda: float(made.max()), lambda: bool((made > 0).all())):
        try:
            said.append(str(number()))
        except InputError as error:
            said.append(str(error).splitlines()[0])
    with pytest.raises(InputError, match=r'full_tensor\(\)\.numpy.*outputs="whole"'):
        made.numpy()
    assert isinstance(made.sum().full_tensor().item(), float)
    return said


def test_python_numbers_of_a_part_are_refused(ranks: Any) -> None:
    for said in ranks(2).run(numbers_of_parts, timeout_s=60):
        assert all("a Python number is asked of a DTensor []" in line for line in said), said


@pytest.mark.parametrize("offload", [None, "host"])
def test_a_meta_model_gets_its_values_wherever_optimizer_states_are(mesh_of_one: Any, offload: str | None) -> None:
    """What is kept of its parameters are no weak references, which would keep `load_state_dict` from filling them."""
    with torch.device("meta"):
        model = nn.Linear(6, 6)
    parallel: Any = autoparallel.compile(model, mesh_of_one, example_inputs=(X,), offload=offload)
    parallel.load_state_dict((real := nn.Linear(6, 6)).state_dict())
    torch.testing.assert_close(parallel(X), real(X))


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def __getitem__(self, number: int) -> nn.Module:
        return self.layers[number]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers[0](x)
        return made


def test_parts_by_number_are_the_parallel_modules(mesh_of_one: DeviceMesh) -> None:
    given: dict[str, Any] = {"example_inputs": (torch.ones(2, 4),)}
    parallel = autoparallel.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), mesh_of_one, **given)
    assert parallel[0].weight is parallel[-2].weight is parallel.get_parameter("0.weight")
    with pytest.raises(IndexError):
        parallel[2]
    with pytest.raises(InputError, match="a module without a program"):
        parallel[:1]
    chosen = autoparallel.compile(Chosen(), mesh_of_one, **given)
    assert chosen[0].weight is chosen.get_parameter("layers.0.weight")
    with pytest.raises(TypeError, match="'Linear' object is not subscriptable"):
        autoparallel.compile(nn.Linear(4, 4), mesh_of_one, **given)[0]
