"""What a forward reads beside its arguments, in other forms than plain attributes: changed between calls, the parallel
module computes what the model then computes."""

from __future__ import annotations

import os
import threading
from argparse import Namespace
from array import array
from collections import ChainMap, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import is_grad_enabled as tells_gradients
from torch import nn

import autoparallel
from tests.support.tiers import with_slow

CONTEXT: ContextVar[float] = ContextVar("CONTEXT", default=1.0)
LOCAL = threading.local()
LOCAL.value = 1.0
VARIABLE = "AUTOPARALLEL_TEST_VALUE"


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0


class NamespaceOfTwo(Namespace):
    value = property(lambda self: 2.0)


class ListWithValue(list[float]):
    value = 1.0


class DictWithValue(dict[str, float]):
    value = 1.0


class Base(nn.Module):
    GAIN = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.slotted = nn.Linear(4, 4), nn.LayerNorm(4), Slotted()
        self.queue, self.array, self.bytes = deque([1.0]), array("d", [1.0]), bytearray(b"\x01")
        self.user, self.listed, self.options = UserDict(a=1.0), UserList([1.0]), Namespace(inner=Namespace(value=1.0))
        self.table = {"a": 1.0}
        self.both = ListWithValue([1.0]), DictWithValue(a=1.0)
        self.view, self.chained = MappingProxyType(self.table), ChainMap({}, {"a": 1.0})
        self.function: Callable[..., Any] = times
        self.usual = defaultdict(partial(float, 1.0), a=1.0)


class Model(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layer(x)) * self.slotted.value * self.queue[0] * self.array[0] * self.bytes[0]
        x = x * self.user["a"] * self.listed[0] * self.options.inner.value * self.view["a"] * self.chained["a"]
        x = self.function(x) * self.GAIN * CONTEXT.get() * LOCAL.value * float(os.environ.get(VARIABLE, "1.0"))
        x = x * (3 if torch.are_deterministic_algorithms_enabled() else 1) * (5 if torch.is_anomaly_enabled() else 1)
        x = x * (7 if torch.get_float32_matmul_precision() == "high" else 1)
        x = x * (9 if torch.backends.mkldnn.enabled else 1) * (11 if torch.backends.cuda.matmul.allow_tf32 else 1)
        x = x * (2 if tells_gradients() else 1) * self.both[0].value * self.both[1].value
        x = x * (3 if torch.backends.cuda.flash_sdp_enabled() else 1) * (3 if torch.is_autocast_cache_enabled() else 1)
        return x * (5 if torch.backends.mha.get_fastpath_enabled() else 1) * times.gain * self.usual["a"]


def times(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return x * factor


times.gain = 1.0  # type: ignore[attr-defined]


def halved(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5


CHANGES: dict[str, Callable[[Model, pytest.MonkeyPatch], object]] = {
    "slots": lambda m, patch: setattr(m.slotted, "value", 2.0),
    "deque": lambda m, patch: m.queue.appendleft(2.0),
    "array": lambda m, patch: m.array.__setitem__(0, 2.0),
    "bytearray": lambda m, patch: m.bytes.__setitem__(0, 2),
    "UserDict": lambda m, patch: m.user.update(a=2.0),
    "UserList": lambda m, patch: m.listed.insert(0, 2.0),
    "Namespace": lambda m, patch: setattr(m.options.inner, "value", 2.0),
    "class of an object": lambda m, patch: setattr(m.options.inner, "__class__", NamespaceOfTwo),
    "attribute of a list": lambda m, patch: setattr(m.both[0], "value", 2.0),
    "attribute of a dict": lambda m, patch: setattr(m.both[1], "value", 2.0),
    "MappingProxyType": lambda m, patch: m.table.update(a=2.0),
    "ChainMap": lambda m, patch: m.chained.maps[1].update(a=2.0),
    "attribute of a subclass": lambda m, patch: patch.setattr(Model, "GAIN", 2.0, raising=False),
    "attribute of a base class": lambda m, patch: patch.setattr(Base, "GAIN", 2.0),
    "ContextVar": lambda m, patch: CONTEXT.set(2.0),
    "threading.local": lambda m, patch: patch.setattr(LOCAL, "value", 2.0),
    "environment": lambda m, patch: patch.setenv(VARIABLE, "2.0"),
    "defaults of a function": lambda m, patch: patch.setattr(times, "__defaults__", (2.0,)),
    "code of a function": lambda m, patch: patch.setattr(times, "__code__", halved.__code__),
    "forward of a library's class": lambda m, patch: patch.setattr(nn.LayerNorm, "forward", lambda self, x: x * 2),
    "deterministic algorithms": lambda m, patch: torch.use_deterministic_algorithms(True),
    "anomaly detection": lambda m, patch: torch.autograd.set_detect_anomaly(True),
    "precision of products": lambda m, patch: torch.set_float32_matmul_precision("high"),
    "default of a dict": lambda m, patch: (m.usual.clear(), setattr(m.usual, "default_factory", partial(float, 2.0))),
    "field of a function": lambda m, patch: patch.setattr(times, "gain", 2.0),
    "TF32 in products": lambda m, patch: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "attention's backend": lambda m, patch: torch.backends.cuda.enable_flash_sdp(False),
    "fast path of attention": lambda m, patch: torch.backends.mha.set_fastpath_enabled(False),
    "autocast's cache": lambda m, patch: torch.set_autocast_cache_enabled(False),
    "gradients, by an imported function": lambda m, patch: torch._C._set_grad_enabled(False),
    "a backend's flag": lambda m, patch: patch.setattr(torch.backends.mkldnn, "enabled", False),
}


@pytest.fixture
def settings() -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    yield
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.mha.set_fastpath_enabled(True)
    torch.set_autocast_cache_enabled(True)
    torch._C._set_grad_enabled(True)
    CONTEXT.set(1.0)


@pytest.mark.parametrize("change", with_slow(
    CHANGES, "array", "bytearray", "UserDict", "UserList", "class of an object", "attribute of a dict", "ChainMap",
    "attribute of a subclass", "attribute of a base class", "threading.local", "code of a function",
    "forward of a library's class", "anomaly detection", "precision of products", "field of a function",
    "TF32 in products", "fast path of attention", "autocast's cache", "gradients, by an imported function",
    "MappingProxyType", "slots", "Namespace", "attribute of a list", "attention's backend"))
def test_item_1_values_that_change_between_calls(mesh_of_one: Any, settings: None, change: str,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(8, 4)
    parallel = autoparallel.compile(model, mesh_of_one, example_inputs=(x,))
    before = model(x)
    torch.testing.assert_close(parallel(x), before)
    CHANGES[change](model, monkeypatch)
    found, expected = parallel(x), model(x)
    assert not torch.allclose(expected, before)
    torch.testing.assert_close(found, expected)


class Reading(nn.Module):
    """Reads variables of the environment in each form."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if VARIABLE in os.environ:
            x = x * float(os.environ[VARIABLE])
        if os.getenv(f"{VARIABLE}_2"):
            x = x * 2
        return self.layer(x)


class Listing(Reading):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * sum(name.startswith(VARIABLE) for name in os.environ)


def test_item_1_variables_of_the_environment(mesh_of_one: Any, monkeypatch: pytest.MonkeyPatch,
                                             caplog: pytest.LogCaptureFixture) -> None:
    """A change of a variable that forward read, or of any where forward lists all, makes another compiled form; a
    change of another variable (Inductor sets some) does not."""
    x = torch.randn(8, 4)
    monkeypatch.setenv(f"{VARIABLE}_3", "1")
    for kind in (Reading, Listing):
        model = kind()
        parallel = autoparallel.compile(model, mesh_of_one, example_inputs=(x,))
        for name in ("AUTOPARALLEL_TEST_OTHER", VARIABLE, f"{VARIABLE}_2", f"{VARIABLE}_4"):
            caplog.clear()
            with monkeypatch.context() as patch:
                patch.setenv(name, "3.0")
                torch.testing.assert_close(parallel(x), model(x))
            is_read = kind is Listing or name in (VARIABLE, f"{VARIABLE}_2")
            assert ("another form" in caplog.text) == is_read, name


#: As in a script's loop: globals with the names of an attribute and of a key that forward reads.
loss = shift = 0.0


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = 2.0

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (batch["loss"] + self.shift).sum()


def test_globals_with_the_names_of_attributes_are_not_read(mesh_of_one: Any) -> None:
    """Each step of a script that calls its loss so compiled again."""
    global loss, shift
    batch = {"loss": torch.ones(3)}
    parallel = autoparallel.compile(Named(), mesh_of_one, example_inputs=(batch,))
    for number in range(3):
        loss = shift = float(parallel(batch)) + number
    assert loss == 9.0 + 2 and shift == loss and parallel._state.forms.compiled == 1


class AsCython(type):
    """The class of a class, with a descriptor for its module, as Cython's of functions for several types."""

    __module__ = property(lambda cls: "compiled")  # type: ignore[assignment]


KINDS = {"compiled": AsCython("Compiled", (), {})}


class ReadsCompiled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if isinstance(x, KINDS["compiled"]) else x * 3


def test_classes_of_compiled_functions_are_read(mesh_of_one: Any) -> None:
    parallel = autoparallel.compile(ReadsCompiled(), mesh_of_one)
    assert torch.equal(parallel(torch.ones(2)), torch.full((2,), 3.0))
