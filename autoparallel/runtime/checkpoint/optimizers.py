"""An optimizer's state by the parameters' names, as a checkpoint holds it: ``state.<name>.<key>`` and
``param_groups.<name>.<key>``, whatever the order of parameters and groups, and on whichever rank a parameter lies.

(The layout is that of torch's ``get_optimizer_state_dict``. That function takes a step to make states that are not
there yet, which counts; a parameter that has had no gradient has no state here, as in the optimizer's own
``state_dict``.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from autoparallel.errors import InputError
from autoparallel.runtime.sparse_gradients import start_states

_LOG = logging.getLogger("autoparallel")
_STATE, _GROUPS = "state.", "param_groups."
_NAMED = 3  # names in a message


def states_by_name(parallel: nn.Module, optimizer: torch.optim.Optimizer, nothing: Any = None) -> dict[str, Any]:
    """The optimizer's state and the options of each parameter's group; of sparse momentum, which DCP does not write,
    all rows. ``nothing``: a parameter that stands for none."""
    found, flat = optimizer.state_dict(), dict[str, Any]()
    for (_, name, key), packed in _places(parallel, optimizer, found, nothing):
        flat |= {f"{_STATE}{name}.{part}": _dense(value) for part, value in _flat(found["state"].get(key, {}))}
        flat |= {f"{_GROUPS}{name}.{part}": value for part, value in packed.items() if part != "params"}
    return flat


def wanted(parallel: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], nothing: Any = None
           ) -> dict[str, Any]:
    """What of a checkpoint's entries ``saved`` (this optimizer's part of DCP's metadata, by key) is to be read: the
    optimizer's own tensors where it has them, else new ones. A parameter that has no state there has none here.

    Raises InputError for an optimizer of another kind, or parameters that the checkpoint's optimizer did not have.
    """
    start_states(optimizer)
    if not optimizer.state and any(key.startswith(_STATE) for key in saved):     # all states, made by a step: all that
        get_optimizer_state_dict(parallel, optimizer, options=StateDictOptions())   # stay are written next
    here, asked = states_by_name(parallel, optimizer, nothing), dict[str, Any]()
    places = list(_places(parallel, optimizer, optimizer.state_dict(), nothing))
    known = _by_parameter(saved, {name for (_, name, _), _ in places})
    for (parameter, name, _), packed in places:
        _check_kind(name, set(packed) - {"params"}, optimizer, set(known[_GROUPS].get(name, ())))
        for prefix in (_STATE, _GROUPS):
            for key in (f"{prefix}{name}.{part}" for part in known[prefix].get(name, ())):
                asked[key] = here.get(key) if _fits(here.get(key), saved[key]) else _made(parameter, saved[key])
    return asked


def take(parallel: nn.Module, optimizer: torch.optim.Optimizer, read: Mapping[str, Any], nothing: Any = None) -> None:
    """Give the optimizer what was read of `wanted`. Options that the checkpoint lacks stay as they are. Raises
    InputError where parameters of one group had different options."""
    packed = optimizer.state_dict()
    places = list(_places(parallel, optimizer, packed, nothing))
    known = _by_parameter(read, {name for (_, name, _), _ in places})
    states: dict[Any, dict[str, Any]] = {}
    options: dict[int, tuple[str, dict[str, Any]]] = {}
    for (_, name, key), group in places:
        if mine := known[_STATE].get(name):
            states[key] = _nested(mine)
        theirs = known[_GROUPS].get(name, {})
        first, others = options.setdefault(id(group), (name, theirs))
        if odd := [part for part in {**theirs, **others} if repr(theirs.get(part)) != repr(others.get(part))]:
            part = odd[0]
            raise InputError(f"{first} and {name} are in one group of the optimizer, and the checkpoint has the option "
                             f"{part} as {others.get(part)!r} for one and {theirs.get(part)!r} for the other: make the "
                             "optimizer with the groups of the one that was saved")
    groups = [{**group, **options[id(group)][1]} if id(group) in options else group for group in packed["param_groups"]]
    optimizer.load_state_dict({**packed, "state": states, "param_groups": groups})


def tell_of_rest(what: str, left: set[str]) -> None:
    """Warn of entries of a checkpoint that no rank's optimizer has asked for."""
    names = sorted({key.removeprefix(_STATE).rpartition(".")[0] for key in left if key.startswith(_STATE)})
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        _LOG.warning("the checkpoint has states of %s for %s%s, which it does not step now: they are not loaded", what,
                     ", ".join(names[:_NAMED]), more)


def _places(parallel: nn.Module, optimizer: torch.optim.Optimizer, packed: Mapping[str, Any], nothing: Any
            ) -> Iterator[tuple[tuple[nn.Parameter, str, Any], dict[str, Any]]]:
    """((parameter, its name, its key in the optimizer's state dict), its packed group). Raises InputError for one that
    is not the module's."""
    names = {id(parameter): name for name, parameter in parallel.named_parameters()}
    for group, theirs in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        for parameter, key in zip(group["params"], theirs["params"], strict=True):
            if parameter is nothing:
                continue
            if (name := names.get(id(parameter))) is None:
                raise InputError(f"the optimizer has a parameter {list(parameter.shape)} that is not this module's: "
                                 "give it parallel.parameters(), and other parameters to an optimizer of their own")
            yield (parameter, name, key), theirs


def _by_parameter(entries: Mapping[str, Any], names: set[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Entries by their prefix, the parameter's name and the rest of the key; of these parameters only."""
    found: dict[str, dict[str, dict[str, Any]]] = {_STATE: {}, _GROUPS: {}}
    for key, value in entries.items():
        prefix = next((prefix for prefix in found if key.startswith(prefix)), None)
        name = key.removeprefix(prefix or "").rpartition(".")[0]
        while prefix is not None and name and name not in names:     # the rest of the key may have dots, too
            name = name.rpartition(".")[0]
        if prefix is not None and name:
            found[prefix].setdefault(name, {})[key[len(prefix) + len(name) + 1 :]] = value
    return found


def _check_kind(name: str, mine: set[str], optimizer: torch.optim.Optimizer, theirs: set[str]) -> None:
    if not theirs:
        raise InputError(f"the checkpoint's optimizer did not have {name}, which this one steps: make an optimizer of "
                         "the same parameters, load, and add the others by add_param_group")
    lacking = sorted((mine & set(optimizer.defaults)) - theirs)
    if lacking and (odd := sorted(theirs - mine)):
        raise InputError(f"the checkpoint's optimizer has the options {odd}, and {type(optimizer).__name__} has "
                         f"{lacking}: load it into one of the same kind")


def _fits(value: Any, saved: Any) -> bool:
    """Whether a value that is here can take what is saved."""
    if not isinstance(saved, TensorStorageMetadata):
        return not isinstance(value, torch.Tensor)
    return isinstance(value, torch.Tensor) and tuple(value.shape) == tuple(saved.size)


def _made(parameter: nn.Parameter, saved: Any) -> Any:
    """A new value for what is saved of a parameter: laid out as the parameter is, if it has its shape."""
    if not isinstance(saved, TensorStorageMetadata):
        return None
    if tuple(saved.size) == tuple(parameter.shape) and isinstance(parameter, DTensor):
        return torch.zeros_like(parameter, dtype=saved.properties.dtype)
    return torch.zeros(saved.size, dtype=saved.properties.dtype, device=parameter.device if saved.size else None)


def _flat(state: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """A parameter's state, of which some optimizers nest a part, by keys joined by dots."""
    for key, value in state.items():
        if isinstance(value, dict) and all(isinstance(part, str) for part in value):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """What `_flat` has made flat."""
    made: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        place = made
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return made


def _dense(value: Any) -> Any:
    return value.to_dense() if isinstance(value, torch.Tensor) and value.is_sparse else value


__all__ = ["states_by_name", "take", "tell_of_rest", "wanted"]
