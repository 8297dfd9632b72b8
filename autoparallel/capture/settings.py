"""Settings of the process that a forward may ask torch for: functions of torch (`torch.is_grad_enabled()`), and
attributes of its backends (`torch.backends.mkldnn.enabled`). A trace may see other ones than the call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.backends import ContextProp

#: Functions of torch; `torch.export` traces with gradients, whatever they are outside.
_FUNCTIONS: Mapping[str, Callable[[], Any]] = {name: getattr(torch, name) for name in (
    "is_grad_enabled", "is_inference_mode_enabled", "are_deterministic_algorithms_enabled",
    "is_deterministic_algorithms_warn_only_enabled", "get_deterministic_debug_mode", "get_float32_matmul_precision",
    "get_num_threads", "get_num_interop_threads", "is_anomaly_enabled", "is_anomaly_check_nan_enabled",
    "is_warn_always_enabled")}
_BACKENDS = "torch.backends."
_GET = ContextProp.__get__
#: What `torch.export` sets by itself.
_OF_EXPORT = ("is_grad_enabled", "is_inference_mode_enabled", "torch.backends.mkldnn.enabled")

#: (setting, value, globals of the function that asks) -> what it is told
Ask = Callable[[str, Any, Mapping[str, Any]], Any]


def reader(name: str) -> Callable[[], Any]:
    """A function that reads a setting."""
    found: Callable[[], Any] = _FUNCTIONS[name] if name in _FUNCTIONS else dict(_of_backends())[name].getter
    return found


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
    for name, function in _FUNCTIONS.items():
        setattr(torch, name, _asking(ask, name, function))
    names = {id(setting): name for name, setting in _of_backends()}

    def get(setting: Any, *owner: Any) -> Any:
        value = _GET(setting, *owner)
        return ask(names[id(setting)], value, sys._getframe(1).f_globals) if id(setting) in names else value

    ContextProp.__get__ = get  # type: ignore[method-assign]


def remove() -> None:
    """Have torch answer again."""
    for name, function in _FUNCTIONS.items():
        setattr(torch, name, function)
    ContextProp.__get__ = _GET  # type: ignore[method-assign]


def _asking(ask: Ask, name: str, function: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: ask(name, function(), sys._getframe(1).f_globals)


def _of_backends() -> Iterator[tuple[str, Any]]:
    """The settings of the backends that are imported, by dotted name."""
    for path, module in list(sys.modules.items()):
        if path.startswith(_BACKENDS):
            for owner in type(module).__mro__:
                for name, setting in vars(owner).items():
                    if isinstance(setting, ContextProp):
                        yield f"{path}.{name}", setting


__all__ = ["ambient", "answer", "install", "reader", "remove"]
