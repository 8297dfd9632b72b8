"""The model that a parallel module was made of, after its parameters were placed: a parallel module has copies of them.

What is done to the originals instead is told: a parameter or submodule put in place of another one, another dtype and
an optimizer of the original's parameters are refused; hooks, written values (of a buffer once, since the original may
write to its own), parameters that two parallel modules have, and a parallel module of a model that is used after
another one of it was trained are warned of. (Modes and ``requires_grad`` are shared:
`State`.)
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import deepcopy
from itertools import chain
from operator import attrgetter, is_
from typing import Any
from weakref import WeakSet, WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import nn

from autoparallel.errors import InputError

_LOG = logging.getLogger("autoparallel")
#: Parameters of which parallel modules have copies, by id, and the model of the latest.
_COPIED: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
_MODELS: dict[int, ref[nn.Module]] = {}
#: Of all parallel modules. (Weak references to the copies themselves would keep `init_weights` from filling them.)
_ALL: WeakSet[Originals] = WeakSet()
_version, _kind = attrgetter("_version"), attrgetter("dtype", "device")
#: Of a device's memory, what an original may keep untold; and where it takes none.
TOLD_SHARE, ELSEWHERE = 0.01, ("cpu", "meta")
_hooks = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


class Originals:
    """The parameters, buffers and submodules of ``model`` at the time they were copied.

    ``copies``: the parallel module's parameters and buffers, by the ids of ``model``'s."""

    def __init__(self, model: nn.Module, copies: Mapping[int, torch.Tensor]) -> None:
        self.model = model
        self.copies = [(copies[id(one)], one) for one in model.parameters() if id(one) in copies]
        _ALL.add(self)
        self.paths = [path for path, _ in model.named_modules() for _ in range(2)]
        self.tables: list[dict[str, Any]] = [table for module in model.modules()
                                             for table in (module._parameters, module._modules)]
        self.before = [dict(table) for table in self.tables]
        self.counts = list(map(len, self.tables))
        self.values = [value for table in self.before for value in table.values()]
        self.parameters = dict(model.named_parameters())
        self.tensors: dict[str, torch.Tensor] = {name: tensor for name, tensor in (
            *self.parameters.items(), *model.named_buffers()) if tensor.layout == torch.strided}
        self.buffers = [(module._buffers, leaf, f"{path}.{leaf}".strip("."))
                        for path, module in model.named_modules() for leaf in module._buffers]
        self.placed, self.told = self._placed(), set[str]()
        self.kinds, self.hooks = list(map(_kind, self.tensors.values())), self._hooks()
        self.versions, self.trained = self._versions(), self._trainable()
        self.tells_of_memory, self.as_copied = True, self.versions
        #: Whether an optimizer has stepped the copies; the copies' versions at the first step of another parallel
        #: module of the model, until this one's next call.
        self.is_trained, self.behind = False, list[int]()
        if any(other.is_trained and other.as_copied == self.versions for other in self.others()):
            self.fall_behind()
        for gone in _MODELS.keys() - _COPIED.keys():
            del _MODELS[gone]
        for name, parameter in self.parameters.items():
            other = _MODELS.get(id(parameter), lambda: None)() if _is_copied(parameter) else None
            if other is not None and vars(other) is not vars(model) and dist.get_rank() == 0:
                _LOG.warning("%s of %s is also a parameter of a %s that was compiled: each parallel module has a copy, "
                             "and to train one does not train the other", name, type(model).__name__,
                             type(other).__name__)
            _COPIED[id(parameter)], _MODELS[id(parameter)] = parameter, ref(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Originals:
        pairs = deepcopy(self.copies, memo)
        return Originals(deepcopy(self.model, memo), {id(parameter): copied for copied, parameter in pairs})

    def others(self) -> list[Originals]:
        """Those of the other parallel modules of the same model."""
        return [other for other in _ALL if other is not self and vars(other.model) is vars(self.model)]

    def fall_behind(self) -> None:
        """Another parallel module of the model is trained: from now on the copies have other values."""
        self.behind = self._versions_of_copies()

    def tell_if_behind(self) -> None:
        """Warn of copies that another parallel module's training did not change, and nothing since. (Once.)"""
        behind, self.behind = self.behind, []
        if behind and behind == self._versions_of_copies():
            self._tell("two parallel modules are used, and one was trained: each has a copy of the parameters, and to "
                       "train one does not train the other\n  Use one of them for both, or give the other the trained "
                       "values: other.load_state_dict(trained.state_dict()).")

    def _versions_of_copies(self) -> list[int]:
        """Changed by what writes to the DTensors, and by optimizers, which step their shards."""
        return [_version(tensor) for copied, _ in self.copies
                for tensor in (copied, getattr(copied, "_local_tensor", copied))]

    def holders(self) -> list[Any]:
        """The containers in here of the original's parameters."""
        return [*self.copies, *self.before, self.values, self.parameters, self.tensors]

    def _versions(self) -> list[Any]:
        """Of each tensor: changed by what writes to it, or gives it other memory."""
        return list(zip(map(_version, self.tensors.values()), map(torch.Tensor.data_ptr, self.tensors.values()),
                        strict=True))

    def _placed(self) -> list[torch.Tensor | None]:
        return [table.get(leaf) for table, leaf, _ in self.buffers]

    def newly_trainable(self) -> dict[str, bool]:
        """``requires_grad`` of the parameters of which it was set since `take_trainable`; warns of it."""
        now = self._trainable()
        changed = {name: new for name, was, new in zip(self.parameters, self.trained, now, strict=True) if was != new}
        if changed:
            self.trained = now
            self._tell(f"requires_grad of {next(iter(changed))} was set, as it now is in its parallel module")
        return changed

    def take_trainable(self) -> None:
        self.trained = self._trainable()

    def _trainable(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.parameters.values()]

    def _hooks(self) -> list[int]:
        return [sum(map(len, filter(None, _hooks(parameter)))) for parameter in self.parameters.values()]

    def check(self) -> None:
        """Raises InputError if the original has another parameter or submodule, or tensors of other dtypes; warns if
        one was written to, or has other hooks."""
        self.tell_if_behind()
        if self.tells_of_memory:
            self.tells_of_memory = False
            self._tell_of_memory()
        if list(map(len, self.tables)) != self.counts or not all(
                map(is_, chain.from_iterable(map(dict.values, self.tables)), self.values)):
            self._refuse()
        if list(map(_kind, self.tensors.values())) != self.kinds:
            raise InputError(f"the {type(self.model).__name__} that was compiled was converted to another dtype or "
                             "device, and its parallel module was not\n  Convert the model before it is compiled.")
        if (hooks := self._hooks()) != self.hooks:
            self.hooks = hooks
            self._tell("parameters have other hooks, which do not run in its parallel module "
                       "(register them with parallel.get_parameter(...))")
        names = []
        if (now := self._versions()) != self.versions:
            names = [name for name, a, b in zip(self.tensors, self.versions, now, strict=True) if a != b]
            self.versions = now
        if not all(map(is_, placed := self._placed(), self.placed)):
            names += [name for (_, _, name), a, b in zip(self.buffers, self.placed, placed, strict=True) if a is not b]
            self.placed = placed
        if names := [name for name in names if name in self.parameters or name not in self.told]:
            self.told.update(names)
            which = f"{names[0]} was" if len(names) == 1 else f"{names[0]} and {len(names) - 1} others were"
            self._tell(f"{which} written to: its parallel module has values of its own, which stay as they are "
                       "(parallel.load_state_dict(...) sets them)")

    def _tell_of_memory(self) -> None:
        """Warn of an original model whose parameters occupy GPU memory."""
        kept = defaultdict[torch.device, float](float)
        for parameter in self.parameters.values():
            if parameter.device.type not in ELSEWHERE:
                kept[parameter.device] += parameter.nbytes
        for device, num_bytes in kept.items():
            if num_bytes > TOLD_SHARE * memory_of(device):
                self._tell(f"parameters occupy {num_bytes / 2**30:.1f} GiB of {device} in addition to those of its "
                           "parallel module, and predicted memory leaves them out: keep no reference to the model "
                           "(model = autoparallel.compile(model, ...)), or build it on the CPU or on the meta device")

    def _tell(self, what: str) -> None:
        """Warn of a change of the original, on rank 0."""
        if dist.get_rank() == 0:
            _LOG.warning("of the %s that was compiled, %s", type(self.model).__name__, what)

    def _refuse(self) -> None:
        for path, table, before in zip(self.paths, self.tables, self.before, strict=True):
            if names := [name for name in {**before, **table} if before.get(name) is not table.get(name)]:
                raise InputError(f"{path or 'the model'} has another {names[0]} than when it was compiled: the "
                                 "parallel module has a copy of what it was\n  Give new values by "
                                 "parallel.load_state_dict(...); change the model before it is compiled.")


def memory_of(device: torch.device) -> float:
    """Bytes of an accelerator's memory; inf where torch does not tell."""
    tell = getattr(getattr(torch, device.type, None), "get_device_properties", None)
    return float(getattr(tell(device), "total_memory", math.inf)) if tell is not None else math.inf


def _is_copied(parameter: Any) -> bool:
    return _COPIED.get(id(parameter)) is parameter


def refuse_originals(optimizer: torch.optim.Optimizer, parameters: Iterable[Any]) -> None:
    """Raises InputError for an optimizer of parameters that parallel modules have copies of, and that have no
    gradients themselves: it would train nothing."""
    if not _COPIED:
        return
    originals = [p for p in parameters if _is_copied(p) and p.requires_grad]
    if originals and all(p.grad is None for p in originals):
        raise InputError(f"{type(optimizer).__name__} has parameters of the model that was given to compile, which "
                         "have no gradients: the parallel module has copies\n  Make it of the parallel module's: "
                         f"{type(optimizer).__name__}(parallel.parameters(), ...).")


def take_training(parameters: Iterable[torch.Tensor]) -> None:
    """An optimizer is about to step ``parameters`` for the first time: other parallel modules of the same models do not
    see it. Warns where these are trained, too."""
    ids = {id(parameter) for parameter in parameters if parameter.grad is not None}
    trained = [each for each in _ALL if any(id(copied) in ids for copied, _ in each.copies)]
    for each in trained:
        each.tell_if_behind()
    for each in trained:
        if not each.is_trained:
            each.is_trained = True
            for other in each.others():
                other.fall_behind()
    for each in trained[1:]:
        each.tell_if_behind()


def refuse_idle(optimizer: torch.optim.Optimizer, parameters: Iterable[Any]) -> None:
    """Raises InputError for an optimizer of parallel modules' parameters without gradients, where those that they were
    made of have some: the model was called in place of the parallel module."""
    idle = set(map(id, parameters))
    if any(id(copied) in idle and parameter.grad is not None for each in _ALL for copied, parameter in each.copies):
        raise InputError(f"{type(optimizer).__name__} has parameters of a parallel module, which have no gradients, "
                         "and the model that was compiled has some\n  Call the parallel module in its place: "
                         "loss = parallel(...), loss.backward().")


__all__ = ["Originals", "refuse_idle", "refuse_originals", "take_training"]
