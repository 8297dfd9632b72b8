"""A model that reads Python values of every kind, and edits of them between calls."""

from __future__ import annotations

import argparse
import array
import enum
import functools
import os
import random
import threading
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn

CONTEXT: ContextVar[float] = ContextVar("CONTEXT", default=1.0)
LOCAL = threading.local()
GLOBAL: dict[str, Any] = {}
VARIABLE = "AUTOPARALLEL_TEST_EDIT"


class Mode(enum.Enum):
    A = 1
    B = 2


@dataclass
class Inner:
    a: float = 1.0
    seq: tuple[float, ...] = (1.0, 2.0)


@dataclass
class Config:
    scale: float = 1.0
    inner: Inner = field(default_factory=Inner)
    names: dict[str, Any] = field(default_factory=lambda: {"k": [1.0, {"z": 0.5}]})


class Slots:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0


class Gain:
    LEVEL = 1.0

    def __init__(self) -> None:
        self.own = 1.0

    @property
    def gain(self) -> float:
        return self.own * GLOBAL["f"] * self.LEVEL

    def __rmul__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


class Base(nn.Module):
    CONSTANT = 1.0
    TABLE = {"t": 1.0}  # noqa: RUF012


@functools.lru_cache
def cached_factor(n: int) -> float:
    return n * GLOBAL["f"]


def closure() -> tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, float]]:
    state = {"c": 1.0}
    return lambda x: x * state["c"], state


class Model(Base):
    """Layers, a batch norm, and values: in configs, containers, slots, closures, classes, globals, settings."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm, self.drop, self.ln = nn.BatchNorm1d(4), nn.Dropout(0.0), nn.LayerNorm(4)
        self.register_buffer("buf", torch.ones(4))
        self.register_buffer("brief", torch.ones(4), persistent=False)
        self.plain, self.cfg, self.slots, self.object, self.mode = torch.ones(4), Config(), Slots(), Gain(), Mode.A
        self.nested: dict[str, Any] = {"l": [1.0, [2.0, (3.0,)]], "od": OrderedDict(a=1.0)}
        self.function, self.cell = closure()
        self.part = functools.partial(torch.mul, other=1.0)
        self.space = SimpleNamespace(w=1.0, sub=SimpleNamespace(u=[1.0]))
        self.queue, self.set, self.usual = deque([1.0, 2.0]), {1.0}, defaultdict(lambda: 1.0)
        self.acts, self.act, self.order = {"relu": torch.relu, "tanh": torch.tanh}, "tanh", [0, 1, 2]
        self.user, self.listed, self.array = UserDict(a=1.0), UserList([1.0]), array.array("d", [1.0])
        self.bytes, self.options = bytearray(b"\x01"), argparse.Namespace(v=1.0, sub=argparse.Namespace(w=1.0))
        self.chained, self.counter = ChainMap({"a": 1.0}, {"b": 1.0}), Counter(a=1)
        self.view, self.functions = MappingProxyType(self.nested["od"]), [lambda x: x * GLOBAL["f"]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = self.acts[self.act](self.layers[number](x))
        x = self.of_containers(self.of_objects(self.ln(self.drop(self.norm(x)))))
        return self.of_settings(x) * self.buf + self.brief * self.plain

    def of_objects(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.cfg.scale * self.cfg.inner.a + self.cfg.inner.seq[-1] + self.cfg.names["k"][1]["z"]
        x = x * self.slots.value * self.object.gain * self.object
        x = self.part(self.function(x)) * self.space.w * self.space.sub.u[0] * self.CONSTANT * self.TABLE["t"]
        x = x * GLOBAL["f"] * GLOBAL["deep"][0]["x"] * cached_factor(1) * vars(self).get("hidden", 1.0)
        x = x * self.options.v * self.options.sub.w * CONTEXT.get() * LOCAL.value * float(os.environ[VARIABLE])
        return x * (3 if self.mode is Mode.B else 1) * (self.extra if hasattr(self, "extra") else 1)

    def of_containers(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.nested["l"][1][1][0] + self.nested["od"]["a"] * self.queue[0] + sum(self.set) + self.usual["q"]
        for function in self.functions:
            x = function(x)
        x = x * self.user["a"] * self.listed[0] * self.array[0] * self.bytes[0]
        return x * self.chained["b"] * self.counter["a"] * self.view["a"]

    def of_settings(self, x: torch.Tensor) -> torch.Tensor:
        x = x * (2 if torch.is_autocast_enabled("cpu") else 1) * (13 if torch.is_inference_mode_enabled() else 1)
        x = x * (5 if torch.get_default_dtype() is torch.float64 else 1) * (1.7 if torch.get_num_threads() > 1 else 1)
        x = x * (7 if torch.are_deterministic_algorithms_enabled() else 1) * (1.9 if torch.is_anomaly_enabled() else 1)
        x = x * (11 if torch.get_float32_matmul_precision() == "high" else 1)
        x = x * (1.1 if torch.backends.mkldnn.enabled else 1) * (1.25 if self.layers[1].training else 1)
        return x * (1.5 if any(p.requires_grad for p in self.layers[0].parameters()) else 1)


@dataclass(frozen=True)
class Edited:
    """A model and its parallel module, which share their attributes; parameters and buffers are edited on both."""

    model: Any
    parallel: Any
    draw: random.Random

    @property
    def number(self) -> float:
        return self.draw.choice([0.5, 2.0, -1.5, 3.25])

    @property
    def coin(self) -> bool:
        return self.draw.random() < 0.5

    def on_both(self, edit: Callable[[Any], object]) -> None:
        with torch.no_grad():
            for one in (self.model, self.parallel):
                edit(one)


def _usual(e: Edited) -> None:
    e.model.usual.pop("q", None)
    e.model.usual.default_factory = functools.partial(float, e.number)


def _swap_layers(e: Edited) -> None:
    layers = e.parallel.layers
    layers[0], layers[1] = layers[1], layers[0]


def _swap_functions(e: Edited) -> None:
    e.model.acts["relu"], e.model.acts["tanh"] = e.model.acts["tanh"], e.model.acts["relu"]


def _function(e: Edited) -> None:
    factor = e.number
    e.model.function = lambda x: x * factor


def _function_with_default(e: Edited) -> None:
    def function(x: torch.Tensor, factor: float = e.number) -> torch.Tensor:
        return x * factor

    e.model.function = function


def _default(e: Edited) -> None:
    if e.model.function.__defaults__:
        e.model.function.__defaults__ = (e.number,)


def _code(e: Edited) -> None:
    if e.model.function.__closure__ is None:
        e.model.function.__code__ = (lambda x: x * 0.25).__code__


def _layer_norm(e: Edited) -> None:
    if e.draw.random() < 0.1:
        before = nn.LayerNorm.forward
        nn.LayerNorm.forward = lambda self, x: before(self, x) * 1.01  # type: ignore[method-assign]


def _global(e: Edited) -> None:
    GLOBAL["f"] = e.number


def _global_and_cache(e: Edited) -> None:
    GLOBAL["f"] = e.number
    cached_factor.cache_clear()


def _without_extra(e: Edited) -> None:
    if hasattr(e.model, "extra"):
        del e.model.extra


def _frozen(e: Edited) -> None:
    trainable = e.coin
    e.on_both(lambda one: one.layers[0].requires_grad_(trainable))


def _part_mode(e: Edited) -> None:
    mode = e.coin
    e.on_both(lambda one: one.layers[1].train(mode))


def _buffer(name: str, write: Callable[[torch.Tensor, float], object]) -> Callable[[Edited], None]:
    def edit(e: Edited) -> None:
        number = e.number
        e.on_both(lambda one: write(getattr(one, name), number))

    return edit


def _put(path: str, key: Any) -> Callable[[Edited], None]:
    """Put a number into a container of the model's, at a dotted path."""
    return lambda e: functools.reduce(getattr, path.split("."), e.model).__setitem__(key, e.number)


def _set(path: str, side: str = "model") -> Callable[[Edited], None]:
    """Set an attribute of the model's or of the parallel module's, by a dotted path."""
    *owners, name = path.split(".")
    return lambda e: setattr(functools.reduce(getattr, owners, getattr(e, side)), name, e.number)


EDITS: dict[str, Callable[[Edited], object]] = {
    "config": _set("cfg.scale"), "config in config": lambda e: setattr(e.model.cfg, "inner", Inner(e.number)),
    "config by the parallel module": _set("cfg.inner.a", "parallel"),
    "tuple of a config": lambda e: setattr(e.model.cfg.inner, "seq", (1.0, e.number)),
    "dict in a list of a config": lambda e: e.model.cfg.names["k"][1].update(z=e.number),
    "tuple in lists": lambda e: e.model.nested["l"][1].__setitem__(1, (e.number,)),
    "list in a list": lambda e: e.model.nested["l"].__setitem__(1, [2.0, (e.number,)]),
    "ordered dict": lambda e: e.model.nested["od"].update(a=e.number), "slots": _set("slots.value"),
    "other slots": lambda e: setattr(e.model, "slots", Slots()), "object": _set("object.own"),
    "class of an object": lambda e: setattr(Gain, "LEVEL", e.number),
    "mode": lambda e: setattr(e.model, "mode", e.draw.choice(list(Mode))), "closure": _put("cell", "c"),
    "partial": lambda e: setattr(e.model, "part", functools.partial(torch.mul, other=e.number)),
    "keyword of a partial": _put("part.keywords", "other"), "namespace": _set("space.w"),
    "list in a namespace": _put("space.sub.u", 0), "class": lambda e: setattr(type(e.model), "CONSTANT", e.number),
    "base class": lambda e: setattr(Base, "CONSTANT", e.number), "table of a class": lambda e: Base.TABLE.update(
        t=e.number), "global": _global, "global and cache": _global_and_cache,
    "dict in a global": lambda e: GLOBAL["deep"][0].update(x=e.number),
    "list in a global": lambda e: GLOBAL["deep"].insert(0, {"x": e.number}),
    "order": lambda e: e.draw.shuffle(e.model.order), "layers swapped": _swap_layers,
    "name of a function": lambda e: setattr(e.model, "act", e.draw.choice(["relu", "tanh"])),
    "functions swapped": _swap_functions, "function in a list": lambda e: e.model.functions.append(torch.sin),
    "deque": lambda e: e.model.queue.appendleft(e.number), "set": lambda e: e.model.set.add(e.number),
    "defaultdict": _put("usual", "q"), "default of a dict": _usual, "frozen": _frozen, "mode of a part": _part_mode,
    "batch norm in eval mode": lambda e: e.on_both(lambda one: one.norm.eval()),
    "momentum": lambda e: setattr(e.parallel.norm, "momentum", e.draw.choice([0.1, 0.5, None])),
    "eps of a batch norm": lambda e: setattr(e.parallel.norm, "eps", e.draw.choice([1e-5, 0.5])),
    "eps of a layer norm": lambda e: setattr(e.parallel.ln, "eps", e.draw.choice([1e-5, 0.5])),
    "buffer": _buffer("buf", lambda buffer, number: buffer.fill_(number)),
    "data of a buffer": _buffer("buf", lambda buffer, number: buffer.data.fill_(number)),
    "data of a brief buffer": _buffer("brief", lambda buffer, number: buffer.data.mul_(number)),
    "weights": lambda e: e.on_both(lambda one: one.layers[0].weight.data.mul_(1.5)),
    "data of a tensor": lambda e: e.model.plain.data.fill_(e.number),
    "other data of a tensor": lambda e: setattr(e.model.plain, "data", torch.full((4,), e.number)),
    "tensor": lambda e: setattr(e.parallel, "plain", torch.full((4,), e.number)),
    "memory of a tensor": lambda e: e.model.plain.set_(torch.full((4,), e.number)),
    "shape of a tensor": lambda e: setattr(e.model, "plain", torch.full((1,), e.number)),
    "default dtype": lambda e: torch.set_default_dtype(e.draw.choice([torch.float64, torch.float32])),
    "deterministic": lambda e: torch.use_deterministic_algorithms(e.coin),
    "precision": lambda e: torch.set_float32_matmul_precision(e.draw.choice(["high", "highest"])),
    "mkldnn": lambda e: setattr(torch.backends.mkldnn, "enabled", e.coin),
    "threads": lambda e: torch.set_num_threads(e.draw.choice([1, 2])),
    "anomaly": lambda e: torch.autograd.set_detect_anomaly(e.coin),
    "new attribute": lambda e: setattr(e.model if e.coin else e.parallel, "extra", e.number),
    "attribute deleted": _without_extra, "hidden attribute": _set("hidden"), "function": _function,
    "function with a default": _function_with_default, "default": _default, "code": _code,
    "forward hook": lambda e: (e.model if e.coin else e.parallel).ln.register_forward_hook(lambda m, i, o: o * 1.75),
    "forward of a part": lambda e: setattr(e.parallel.layers[2], "forward", MethodType(
        lambda self, x: nn.functional.linear(x, self.weight) * 2, e.parallel.layers[2])),
    "forward of a class": _layer_norm, "UserDict": _put("user", "a"), "UserList": _put("listed", 0),
    "array": _put("array", 0), "bytearray": lambda e: e.model.bytes.__setitem__(0, e.draw.randrange(1, 9)),
    "options": _set("options.v"), "options in options": _set("options.sub.w"),
    "context": lambda e: CONTEXT.set(e.number), "thread's value": lambda e: setattr(LOCAL, "value", e.number),
    "environment": lambda e: os.environ.update({VARIABLE: str(e.number)}),
    "ChainMap": lambda e: e.model.chained.maps[1].update(b=e.number),
    "Counter": lambda e: e.model.counter.update(a=e.draw.randrange(1, 4)),
}


@contextmanager
def undone() -> Iterator[None]:
    """With all that edits change outside of the model as it is at first, and so again afterwards."""
    forward = nn.LayerNorm.forward
    with ExitStack() as stack:
        stack.callback(_reset, forward, torch.get_num_threads(), torch.get_float32_matmul_precision())
        _reset(forward, 1, "highest")
        yield


def _reset(forward: Any, threads: int, precision: str) -> None:
    nn.LayerNorm.forward = forward  # type: ignore[method-assign]
    if "CONSTANT" in vars(Model):
        del Model.CONSTANT
    Base.CONSTANT = Gain.LEVEL = LOCAL.value = 1.0
    Base.TABLE = {"t": 1.0}
    GLOBAL.update(f=1.0, deep=[{"x": 1.0}])
    cached_factor.cache_clear()
    CONTEXT.set(1.0)
    os.environ[VARIABLE] = "1.0"
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(precision)
    torch.backends.mkldnn.enabled = True  # type: ignore[assignment]
    torch.set_num_threads(threads)
    torch.autograd.set_detect_anomaly(False)
