"""The model that a parallel module was made of, after its parameters were placed: a parallel module has copies of them.

What is done to the originals instead is told: a parameter or submodule put in place of another one and an optimizer of
the original's parameters are refused, written values and parameters that two parallel modules have are warned of.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from copy import deepcopy
from itertools import chain
from operator import attrgetter, is_
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import nn

from autoparallel.errors import InputError

_LOG = logging.getLogger("autoparallel")
#: Parameters of which parallel modules have copies, by id, and the model of the latest.
_COPIED: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
_MODELS: dict[int, ref[nn.Module]] = {}
_version = attrgetter("_version")


class Originals:
    """The parameters and submodules of ``model`` at the time they were copied."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths = [path for path, _ in model.named_modules() for _ in range(2)]
        self.tables: list[dict[str, Any]] = [table for module in model.modules()
                                             for table in (module._parameters, module._modules)]
        self.before = [dict(table) for table in self.tables]
        self.counts = list(map(len, self.tables))
        self.values = [value for table in self.before for value in table.values()]
        self.parameters = dict(model.named_parameters())
        self.versions = self._versions()
        for gone in _MODELS.keys() - _COPIED.keys():
            del _MODELS[gone]
        for name, parameter in self.parameters.items():
            other = _MODELS.get(id(parameter), lambda: None)() if _is_copied(parameter) else None
            if other is not None and other is not model and dist.get_rank() == 0:
                _LOG.warning("%s of %s is also a parameter of a %s that was compiled: each parallel module has a copy, "
                             "and to train one does not train the other", name, type(model).__name__,
                             type(other).__name__)
            _COPIED[id(parameter)], _MODELS[id(parameter)] = parameter, ref(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Originals:
        return Originals(deepcopy(self.model, memo))

    def _versions(self) -> list[int]:
        return list(map(_version, self.parameters.values()))

    def check(self) -> None:
        """Raises InputError if the original has another parameter or submodule; warns if one was written to."""
        if list(map(len, self.tables)) != self.counts or not all(
                map(is_, chain.from_iterable(map(dict.values, self.tables)), self.values)):
            self._refuse()
        if (now := self._versions()) != self.versions:
            names = [name for name, a, b in zip(self.parameters, self.versions, now, strict=True) if a != b]
            self.versions = now
            if dist.get_rank() == 0:
                _LOG.warning("%s of the %s that was compiled was written to: its parallel module has values of its "
                             "own, which stay as they are (parallel.load_state_dict(...) sets them)",
                             names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} others",
                             type(self.model).__name__)

    def _refuse(self) -> None:
        for path, table, before in zip(self.paths, self.tables, self.before, strict=True):
            if names := [name for name in {**before, **table} if before.get(name) is not table.get(name)]:
                raise InputError(f"{path or 'the model'} has another {names[0]} than when it was compiled: the "
                                 "parallel module has a copy of what it was\n  Give new values by "
                                 "parallel.load_state_dict(...); change the model before it is compiled.")


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


__all__ = ["Originals", "refuse_originals"]
