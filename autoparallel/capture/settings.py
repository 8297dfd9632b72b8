"""Settings of the process that a forward may ask torch for: functions of torch (`torch.is_grad_enabled()`), and
attributes of its backends (`torch.backends.mkldnn.enabled`). A trace may see other ones than the call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.backends import ContextProp

#: Whether a model is traced. Installed libraries, which take other ways to the same values there, are told that it is.
TRACED = ("torch.compiler.is_compiling", "torch.compiler.is_exporting")
#: Modules of torch whose functions of these names ask those.
_NAMES_OF_OLD = ("torch._utils", "torch._dynamo", "torch._dynamo.external_utils")
#: Functions of torch by dotted name, with their owner; `torch.export` traces with gradients, whatever they are outside.
_FUNCTIONS: Mapping[str, tuple[Any, Callable[[], Any]]] = {
    **{name: (torch, getattr(torch, name)) for name in (
        "is_grad_enabled", "is_inference_mode_enabled", "are_deterministic_algorithms_enabled",
        "is_deterministic_algorithms_warn_only_enabled", "get_deterministic_debug_mode", "get_float32_matmul_precision",
        "get_num_threads", "get_num_interop_threads", "is_anomaly_enabled", "is_anomaly_check_nan_enabled",
        "is_warn_always_enabled", "is_autocast_cache_enabled", "initial_seed")},
    **{name: (torch.compiler, getattr(torch.compiler, name.rpartition(".")[2])) for name in TRACED},
    "torch.backends.mha.get_fastpath_enabled": (torch.backends.mha, torch.backends.mha.get_fastpath_enabled)}
#: Functions that torch's modules ask when a user asks for a setting of a backend.
_WITHIN: Mapping[str, Callable[..., Any]] = {
    name: getattr(torch._C, name) for name in dir(torch._C) if name.startswith("_get_") and any(p in name for p in (
        "cublas", "cudnn", "_sdp", "blas", "linalg", "qengine", "fp32", "fill_uninitialized"))}
#: The modules that do.
_ASKING = ("torch.backends", "torch.utils.deterministic")
#: Calls of those functions that a trace has seen, by name with arguments.
_CALLS: dict[str, Callable[[], Any]] = {}
_BACKENDS = "torch.backends."
_GET = ContextProp.__get__
#: What `torch.export` sets by itself.
_OF_EXPORT = ("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_cache_enabled",
              "torch.backends.mkldnn.enabled", *TRACED)

#: (setting, value, globals of the function that asks) -> what it is told
Ask = Callable[[str, Any, Mapping[str, Any]], Any]


def reader(name: str) -> Callable[[], Any]:
    """A function that reads a setting."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name][1]
    if name in _CALLS:
        return _CALLS[name]
    path, _, setting = name.rpartition(".")
    found: Callable[[], Any] = next(vars(owner)[setting] for owner in type(sys.modules[path]).__mro__
                                    if setting in vars(owner)).getter
    return found


def function_of(value: Any) -> Callable[[], Any] | None:
    """What a name stands for that a user has imported, `from torch import is_grad_enabled`: the function as it answers
    while a model is traced; None for other values."""
    return next((getattr(owner, name.rpartition(".")[2]) for name, (owner, function) in _FUNCTIONS.items()
                 if value is function), None)


def ambient() -> dict[str, Any]:
    """The settings of a call, before a trace of it changes them."""
    return {name: reader(name)() for name in _OF_EXPORT}


def answer(name: str, outside: Mapping[str, Any], inside: Any) -> Any:
    """What a forward is told that asks for a setting: as in the call, which `ambient` has as ``outside``, unless the
    forward itself has changed it, to ``inside``."""
    if name == "is_grad_enabled":
        return outside[name] and inside
    if name == "is_inference_mode_enabled":
        return outside[name] or inside
    return outside.get(name, inside)


def install(ask: Ask) -> None:
    """Have ``ask`` answer all who read a setting."""
    for name, (owner, function) in _FUNCTIONS.items():
        setattr(owner, name.rpartition(".")[2], _asking(ask, name, function))
    for name, function in _WITHIN.items():
        setattr(torch._C, name, _asking_within(ask, name, function))
    names = {id(setting): name for name, setting in _of_backends()}

    def get(setting: Any, *owner: Any) -> Any:
        value = _GET(setting, *owner)
        return ask(names[id(setting)], value, sys._getframe(1).f_globals) if id(setting) in names else value

    ContextProp.__get__ = get  # type: ignore[method-assign]


def remove() -> None:
    """Have torch answer again."""
    for name, (owner, function) in _FUNCTIONS.items():
        setattr(owner, name.rpartition(".")[2], function)
    for name, function in _WITHIN.items():
        setattr(torch._C, name, function)
    ContextProp.__get__ = _GET  # type: ignore[method-assign]


def _asking(ask: Ask, name: str, function: Callable[[], Any]) -> Callable[[], Any]:
    if name not in TRACED:
        return lambda: ask(name, function(), sys._getframe(1).f_globals)

    def asked() -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__") in _NAMES_OF_OLD:
            frame = frame.f_back    # torch._dynamo.is_compiling()
        return ask(name, function(), frame.f_globals)

    return asked


def _asking_within(ask: Ask, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def asked(*args: Any) -> Any:
        value, frame = function(*args), sys._getframe(1)
        while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_ASKING):
            frame = frame.f_back
        setting = f"torch._C.{name}{args}"
        _CALLS[setting] = partial(function, *args)
        return ask(setting, value, frame.f_globals)

    return asked


def _of_backends() -> Iterator[tuple[str, Any]]:
    """The settings of the backends that are imported, by dotted name."""
    for path in [path for path in list(sys.modules) if path.startswith(_BACKENDS)]:
        for owner in type(sys.modules[path]).__mro__:
            for name, setting in vars(owner).items():
                if isinstance(setting, ContextProp):
                    yield f"{path}.{name}", setting


__all__ = ["TRACED", "ambient", "answer", "function_of", "install", "reader", "remove"]
