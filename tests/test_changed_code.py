"""Code and objects behind a forward, changed between calls: functions, classes, imported modules, caches."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import autoparallel
from autoparallel.capture import capture
from autoparallel.errors import CaptureError, InputError
from tests.support.tiers import with_slow

VALUES = {"gain": 2.0}
MODULE = ModuleType("tests_changed_module")
PATCH = pytest.MonkeyPatch()
X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)


class Config:
    kind = 1.0

    @property
    def gain(self) -> float:
        return VALUES["gain"]

    def __rmul__(self, x: torch.Tensor) -> torch.Tensor:
        return x * VALUES["gain"]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + VALUES["gain"]


class Meta(type):
    level = 1.0


class Levelled(metaclass=Meta):
    pass


def scaled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def call(*args: Any) -> torch.Tensor:
        return function(*args) * VALUES["gain"]

    return call


@functools.lru_cache
def cached_gain() -> float:
    return VALUES["gain"]


@functools.lru_cache
def cached_angles(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(n).float().cos(), torch.arange(n).float().sin()


@functools.lru_cache
def cached_noise(n: int) -> torch.Tensor:
    return torch.randn(n)


@functools.cache
def cached_twice(weight: torch.Tensor) -> torch.Tensor:
    return weight * 2


class Layer(nn.Linear):
    def factor(self) -> float:
        return 1.0


class Doubled(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Model(nn.Module):
    """A layer, and what ``read`` makes of its output."""

    def __init__(self, read: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.config, self.functions, self.k = Layer(4, 4), Config(), [lambda x: x * VALUES["gain"]], 2.0
        self.name, self.objects, self.read = "gain", {"a": [Config()]}, read
        self.weak, self.weakly = weakref.ref(self.config), weakref.WeakValueDictionary(a=self.config)
        self.array = np.array([{"k": 2.0}], dtype=object)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self, self.layer(x))


def imports(model: Any, x: torch.Tensor) -> torch.Tensor:
    import tests_changed_module

    return x * tests_changed_module.gain


def imports_a_name(model: Any, x: torch.Tensor) -> torch.Tensor:
    from tests_changed_module import gain

    return x * gain


def imports_by_text(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * importlib.import_module("tests_changed_module").gain


@scaled
def decorated(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _gain(model: Any) -> None:
    VALUES["gain"] = 3.0


def _module_gain(model: Any) -> None:
    MODULE.gain = 3.0  # type: ignore[attr-defined]


def _replaced(model: Any) -> None:
    sys.modules["tests_changed_module"] = other = ModuleType("tests_changed_module")
    other.gain = 4.0  # type: ignore[attr-defined]


def _cleared(model: Any) -> None:
    VALUES["gain"] = 3.0
    cached_gain.cache_clear()


def _k(model: Any) -> None:
    model.k = 3.0


def _absent(model: Any) -> None:
    model.absent = 3.0


def _class(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(Layer, name, value)


#: What is read, and how it is changed.
CHANGES: dict[str, tuple[Callable[[Any, torch.Tensor], Any], Callable[[Any], object]]] = {
    "class attribute of an object": (lambda m, x: x * m.config.kind, lambda m: setattr(Config, "kind", 3.0)),
    "property of an object": (lambda m, x: x * m.config.gain, _gain),
    "operator of an object": (lambda m, x: x * m.config, _gain),
    "call of an object": (lambda m, x: m.config(x), _gain),
    "object in containers": (lambda m, x: m.objects["a"][0](x), _gain),
    "function of torch": (
        lambda m, x: nn.functional.softplus(x), lambda m: PATCH.setattr(nn.functional, "softplus", torch.neg)),
    "method of tensors": (lambda m, x: x.relu(), lambda m: PATCH.setattr(torch.Tensor, "relu", lambda x: -x)),
    "value in torch": (lambda m, x: x * torch.inf if torch.inf < 9 else x, lambda m: PATCH.setattr(torch, "inf", 2.0)),
    "weak reference": (lambda m, x: x * m.weak().kind, lambda m: setattr(m.config, "kind", 3.0)),
    "weak dictionary": (lambda m, x: x * m.weakly["a"].kind, lambda m: setattr(m.config, "kind", 3.0)),
    "array of objects": (lambda m, x: x * m.array[0]["k"], lambda m: m.array[0].update(k=3.0)),
    "function in a list": (lambda m, x: m.functions[0](x), _gain),
    "attribute of a metaclass": (lambda m, x: x * Levelled.level, lambda m: setattr(Meta, "level", 3.0)),
    "decorator": (decorated, _gain),
    "import": (imports, _module_gain),
    "import of a name": (imports_a_name, _module_gain),
    "import by text": (imports_by_text, _module_gain),
    "imported module replaced": (imports, _replaced),
    "module by getattr": (lambda m, x: x * getattr(MODULE, m.name), _module_gain),
    "global by text": (lambda m, x: x * globals()["VALUES"]["gain"], _gain),
    "vars": (lambda m, x: x * vars(m)["k"], _k),
    "__dict__ of what is absent": (lambda m, x: x * m.__dict__.get("absent", 1.0), _absent),
    "object.__getattribute__": (lambda m, x: x * object.__getattribute__(m, "k"), _k),
    "cache cleared": (lambda m, x: x * cached_gain(), _cleared),
    "forward of a class that had none": (lambda m, x: x, _class("forward", lambda self, x: x * 5)),
    "__call__ of a class that had none": (
        lambda m, x: x, _class("__call__", lambda self, x: nn.Module.__call__(self, x) * 5)),
    "class of a layer": (lambda m, x: x, lambda m: setattr(m.layer, "__class__", Doubled)),
    "bases of a class": (lambda m, x: x * m.layer.factor(), lambda m: setattr(Layer, "__bases__", (Halved,))),
}


class Halved(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


@pytest.fixture(autouse=True)
def unchanged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every change undone after each test."""
    MODULE.gain = VALUES["gain"] = 2.0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tests_changed_module", MODULE)
    for function in (cached_gain, cached_angles, cached_noise, cached_twice):
        function.cache_clear()
    yield
    PATCH.undo()
    Layer.__bases__ = (nn.Linear,)
    Config.kind, Meta.level = 1.0, 1.0
    for name in {"forward", "__call__"} & vars(Layer).keys():
        delattr(Layer, name)


def compiled(model: nn.Module, mesh: Any) -> Any:
    return autoparallel.compile(model, mesh, example_inputs=(X,), check_inputs=0)


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@pytest.mark.parametrize("name", with_slow(
    CHANGES, "property of an object", "operator of an object", "object in containers", "weak dictionary",
    "function in a list", "value in torch", "attribute of a metaclass", "import", "import of a name", "import by text",
    "global by text", "vars", "object.__getattribute__", "forward of a class that had none", "array of objects"))
def test_the_next_call_computes_with_the_change(mesh_of_one: Any, name: str) -> None:
    read, change = CHANGES[name]
    torch.manual_seed(0)
    model = Model(read)
    parallel, before = compiled(model, mesh_of_one), model(X)
    torch.testing.assert_close(whole(parallel(X)), before)
    change(model)
    assert not torch.allclose(model(X), before)
    torch.testing.assert_close(whole(parallel(X)), model(X))


def test_a_part_may_be_given_another_class(mesh_of_one: Any) -> None:
    """It is the original's then, too."""
    model = Model(lambda m, x: x)
    parallel = compiled(model, mesh_of_one)
    parallel.get_submodule("layer").__class__ = Doubled
    torch.testing.assert_close(whole(parallel(X)), model(X))
    assert type(model.layer) is Doubled


def test_a_function_may_keep_tables_which_have_data_afterwards(mesh_of_one: Any) -> None:
    """(The original was left with tensors of the trace.) What it keeps later is no change."""
    model = Model(lambda m, x: x * cached_angles(4)[0] + cached_angles(4)[1])
    parallel = compiled(model, mesh_of_one)
    torch.testing.assert_close(whole(parallel(X)), model(X))
    cached_angles(7)
    torch.testing.assert_close(whole(parallel(X)), model(X))
    assert parallel._state.forms.compiled == 1


@pytest.mark.parametrize("read", [
    pytest.param(lambda m, x: x + cached_noise(4), id="random numbers"),
    pytest.param(lambda m, x: x @ cached_twice(m.layer.weight), id="parameters")])
def test_results_that_a_cache_would_keep_are_refused(mesh_of_one: Any, read: Any) -> None:
    with pytest.raises(CaptureError, match=r"kept by functools\.lru_cache"):
        compiled(Model(read), mesh_of_one)


class Fills(nn.Module):
    def forward(self, x: torch.Tensor, kept: dict[str, Any]) -> torch.Tensor:
        kept["x"] = x * 2
        return x


def test_a_forward_that_writes_into_its_arguments_is_refused(mesh_of_one: Any) -> None:
    with pytest.raises(CaptureError, match="changes a dict that it is given"):
        capture(Fills(), (X, {}))


class Delegating(nn.Module):
    """Its methods are those of an inner module, as peft's are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Merging()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Merging(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def merge(self) -> None:
        with torch.no_grad():
            self.weight.mul_(2.0)


def test_methods_of_inner_modules_change_the_parallel_module(mesh_of_one: Any) -> None:
    """(They changed the original's parameters, of which it has copies.)"""
    model = Delegating()
    expected = copy.deepcopy(model)
    parallel = compiled(model, mesh_of_one)
    for one in (parallel, expected):
        one.merge()
    torch.testing.assert_close(whole(parallel(X)), expected(X))


def test_checkpoint_around_a_parallel_module(mesh_of_one: Any) -> None:
    """Equal, also where the call within compiles; refused where it would draw other numbers again."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), X.clone().requires_grad_()
    expected, parallel = copy.deepcopy(model), compiled(model, mesh_of_one)
    for one in (parallel, expected):
        checkpoint(one, x, use_reentrant=False).square().sum().backward()
    torch.testing.assert_close(whole(parallel.get_parameter("0.weight").grad), expected[0].weight.grad)
    for reentrant in (False, True):
        with pytest.raises(InputError, match=r"dropout is called within torch\.utils\.checkpoint"):
            checkpoint(compiled(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), mesh_of_one), x,
                       use_reentrant=reentrant)


class OfEachSample(nn.Module):
    """The length of each sample's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def loss(values: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(self.net, values, (row[None],)).square().sum()

        made = torch.vmap(torch.func.grad(loss), (None, 0))(dict(self.net.named_parameters()), x)
        return torch.stack([value.flatten(1).norm(dim=1) for value in made.values()]).norm(dim=0)


def test_gradients_within_forward_are_compiled(mesh_of_one: Any) -> None:
    """(Compiling put hooks of saved tensors around the trace, under which torch.func takes no gradients.)"""
    model = OfEachSample()
    torch.testing.assert_close(whole(compiled(model, mesh_of_one)(X)), model(X))
    found = checkpoint(compiled(OfEachSample(), mesh_of_one), X.clone().requires_grad_(), use_reentrant=False)
    assert found.shape == model(X).shape
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value + 1, lambda value: value - 1):
        parallel = compiled(nn.Linear(4, 4), mesh_of_one)
        parallel(X)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_cached_parametrizations_are_refused(mesh_of_one: Any) -> None:
    parallel = compiled(parametrizations.weight_norm(nn.Linear(4, 4)), mesh_of_one)
    with parametrize.cached(), pytest.raises(InputError, match=r"within torch\.nn\.utils\.parametrize\.cached"):
        parallel(X)
    parallel(X)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        return made * 2 if function is nn.functional.linear else made


def test_modes_of_torch_functions_are_refused_but_the_default_devices(mesh_of_one: Any) -> None:
    """A program calls other functions than the model."""
    parallel = compiled(nn.Linear(4, 4), mesh_of_one)
    with Doubling(), pytest.raises(InputError, match="within a TorchFunctionMode"):
        parallel(X)
    with torch.device("cpu"):
        parallel(X)
