"""What a model's modules have to say about a state dict that is loaded: hooks, methods of their own, extra state.

torch calls them module by module with the entries below the module. A module with a `_load_from_state_dict` of its own
loads into a stand-in with whole tensors, whose values the parallel module then takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from autoparallel.errors import InputError

EXTRA = "_extra_state"
_COUNT = "num_batches_tracked"


@dataclass
class Entries:
    """The entries to load by name; ``extra``: names of those that are modules' extra state; ``afterwards``: calls to
    make when all is loaded, with (missing, unexpected) names."""

    values: dict[str, Any] = field(default_factory=dict)
    extra: set[str] = field(default_factory=set)
    afterwards: list[Callable[[Any], Any]] = field(default_factory=list)


def entries_for(model: nn.Module, parallel: nn.Module, state: Mapping[str, Any]) -> Entries:
    """The entries of ``state`` as the modules of ``model`` want them. Raises InputError for what they refuse."""
    found = Entries()
    _visit(model, parallel, dict(state), "", getattr(state, "_metadata", None) or {}, found)
    return found


def add_extra_state(model: nn.Module, parallel: nn.Module, state: Any, prefix: str) -> None:
    """Add the extra state of the model itself to a state dict of ``parallel``, whose class has none."""
    kind: Any = type(model)
    if kind.get_extra_state is not nn.Module.get_extra_state and isinstance(state, dict):
        state[f"{prefix}{EXTRA}"] = kind.get_extra_state(parallel)


def _visit(module: nn.Module, part: nn.Module, local: dict[str, Any], prefix: str, metadata: Mapping[str, Any],
           found: Entries) -> None:
    if _loads_itself(module):
        _load_stand_in(module, local, prefix, metadata)
    else:
        for hook in _hooks("_load_state_dict_pre_hooks", module, part):
            hook(local, prefix, metadata.get(prefix[:-1], {}), True, [], [], [])
        _count_batches(module, part, local, prefix, metadata)
    kind: Any = type(module)
    if kind.set_extra_state is not nn.Module.set_extra_state and f"{prefix}{EXTRA}" in local:
        found.extra.add(f"{prefix}{EXTRA}")
        found.afterwards.append(partial(_set_extra_state, part, kind, local[f"{prefix}{EXTRA}"]))
    for name, child in module._modules.items():
        below = f"{prefix}{name}."
        inside = {key: local.pop(key) for key in list(local) if key.startswith(below)}
        if child is None or (inner := part._modules.get(name)) is None:
            found.values.update(inside)
        else:
            _visit(child, inner, inside, below, metadata, found)
    found.values.update(local)
    found.afterwards += [partial(hook, part) for hook in _hooks("_load_state_dict_post_hooks", module, part)]


def _hooks(table: str, module: nn.Module, part: nn.Module) -> list[Any]:
    """Hooks of a module and its part, which have one table of them, but at the root."""
    tables = {id(vars(m)[table]): vars(m)[table] for m in (module, part)}
    return [hook for hooks in tables.values() for hook in hooks.values()]


def _set_extra_state(part: nn.Module, kind: Any, value: Any, odd: Any) -> None:
    kind.set_extra_state(part, value)


def _loads_itself(module: nn.Module) -> bool:
    """Whether a module has a `_load_from_state_dict` of its own. (Of those of torch's layers see `_count_batches`.)"""
    method: Any = type(module)._load_from_state_dict
    return method is not nn.Module._load_from_state_dict and not method.__module__.startswith("torch.nn.")


def _count_batches(module: nn.Module, part: nn.Module, local: dict[str, Any], prefix: str,
                   metadata: Mapping[str, Any]) -> None:
    """A state dict without versions of modules (old ones, and plain dicts) may lack the number of batches that batch
    norm has seen, which torch then leaves as it is."""
    version, kept = metadata.get(prefix[:-1], {}).get("version"), part._buffers.get(_COUNT)
    if isinstance(module, _NormBase) and module.track_running_stats and (version is None or version < 2):
        start = torch.tensor(0) if kept is None or kept.is_meta else kept
        local.setdefault(f"{prefix}{_COUNT}", start)


def _load_stand_in(module: nn.Module, local: dict[str, Any], prefix: str, metadata: Mapping[str, Any]) -> None:
    """Let a copy of the module, with tensors of its own, load; ``local`` then has its values."""
    if odd := [name for name, value in local.items() if isinstance(value, DTensor) and "." not in name[len(prefix):]]:
        raise InputError(f"{odd[0]} is a DTensor, and {type(module).__name__} has a _load_from_state_dict of its own, "
                         "which takes whole tensors\n  Give whole ones: value.full_tensor(), called on all ranks.")
    made = module.__class__.__new__(module.__class__)
    tensors = {**module._parameters, **module._buffers}
    empty = {name: t if t is None else torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
    parameters = {name: t if (t := empty[name]) is None else nn.Parameter(t, t.is_floating_point())
                  for name in module._parameters}
    made.__dict__.update(module.__dict__, _parameters=parameters,
                         _buffers={name: empty[name] for name in module._buffers})
    before = {name: (t, t._version) for name, t in {**parameters, **made._buffers}.items() if t is not None}
    errors: list[str] = []
    with torch.no_grad():
        made._load_from_state_dict(local, prefix, dict(metadata.get(prefix[:-1], {})), True, [], [], errors)
    if errors:
        raise InputError(f"{type(module).__name__} cannot load the state dict: {'; '.join(errors)}")
    for name, value in {**made._parameters, **made._buffers}.items():
        if value is not None and (name not in before or before[name][0] is not value
                                  or before[name][1] != value._version):
            local[f"{prefix}{name}"] = value.detach()


__all__ = ["EXTRA", "Entries", "add_extra_state", "entries_for"]
