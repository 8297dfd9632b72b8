"""Models that are compiled at their first call, and the optimizers made of their parameters before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import partial, update_wrapper
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

import autoparallel
from autoparallel.errors import InputError
from autoparallel.layout import from_torch
from autoparallel.runtime.initialise import as_dtensor, local_shard
from autoparallel.runtime.module import ParallelModule
from autoparallel.runtime.state import WHOLE_WITHOUT_LOSS

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Preparation:
    """Makes parallel modules with these options of `autoparallel.compile`, and does what waits for their traces."""

    def __init__(self, options: Mapping[str, Any] | None,
                 context: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self.options, self._context = dict(options or {}), context
        self._pending: dict[int, list[Callable[[], Any]]] = {}
        self._untraced: dict[int, tuple[nn.Module, ParallelModule]] = {}
        self._trained: MutableMapping[nn.Parameter, str] = WeakTensorKeyDictionary()  # by whom, and under which name

    def parallelise(self, model: nn.Module, call: Call | None = None) -> ParallelModule:
        """The parallel module of a model, traced if there is an example call (of global tensors). Its calls run within
        the context, after what waits for its trace; outputs are whole, as `AutoparallelAccelerator` says. Raises
        InputError for a trained parameter of another model that was prepared."""
        self._check_shared(model)
        options = dict(self.options)
        world = autoparallel.init(plan=options.pop("plan", None))
        if world.plan is not None:
            options["plan"] = world.plan
        mesh = options.pop("mesh", None) or (world.mesh if world.plan or call is None else world.size)
        if call is not None:
            options.update(example_inputs=call[0], example_kwargs=call[1])
        with self._context():
            made = autoparallel.compile(model, mesh, **options)
        if "outputs" not in options:
            made._state.outputs = WHOLE_WITHOUT_LOSS
        for name in ("forward", "step"):
            made.__dict__[name] = _Prepared(self, made, name)
        if call is None:  # summaries read parameters before the first call; modes are noted, and put back after it
            told = {"named_parameters": model.named_parameters, "named_modules": partial(_modules_to_be, made, model),
                    "state_dict": model.state_dict}
            for name in told:
                self.when_traced(made, partial(made.__dict__.pop, name))
            empty = {name: vars(made)[name] for name in ("_parameters", "_buffers")}
            made.__dict__.update(told, _parameters=model._parameters, _buffers=model._buffers,
                                 trace=partial(_trace_first, made, empty))
            self._untraced[id(made)] = model, made
            self.when_traced(made, partial(self._untraced.pop, id(made)))
        return made

    def _check_shared(self, model: nn.Module) -> None:
        kind = type(model).__name__
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter in self._trained:
                raise InputError(f"{kind} and another module have a parameter together, {name} in {kind} and "
                                 f"{self._trained[parameter]}: each is compiled by itself, and would train a copy of it"
                                 "\n  Make one nn.Module of both, whose forward calls them, and have that alone "
                                 "compiled.")
        self._trained.update({parameter: f"{name} in {kind}" for name, parameter in model.named_parameters()
                              if parameter.requires_grad})

    def when_traced(self, model: ParallelModule, action: Callable[[], Any]) -> None:
        """Do it now, or when the model is traced, before its first call runs."""
        if model._state.forms:
            action()
        else:
            self._pending.setdefault(id(model), []).append(action)

    def moves(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer, if it has parameters of models that are not traced yet, step their parallel modules'."""
        for model, made in self._untraced.values():
            self.when_traced(made, partial(move_optimizer, optimizer, model, made))

    @contextmanager
    def traced(self, model: ParallelModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """The context of a call, before which the model is traced and what waits for that is done."""
        with self._context():
            if id(model) in self._pending:
                model.trace(*model.taken(args, kwargs), called="forward")
                for action in self._pending.pop(id(model)):
                    action()
            yield


class _Prepared:
    """A method of a parallel module within the context of its `Preparation`; a copied module has one of its own."""

    def __init__(self, preparation: Preparation, model: ParallelModule, name: str) -> None:
        update_wrapper(self, getattr(type(model), name).__get__(model))
        self._of = preparation, model, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        preparation, model, name = self._of
        with preparation.traced(model, args, kwargs):
            return getattr(type(model), name)(model, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Prepared:
        preparation, model, name = self._of
        return _Prepared(preparation, deepcopy(model, memo), name)


def _trace_first(made: ParallelModule, empty: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """The first trace, before which the root has its original's parameters and buffers; then it has none."""
    made.__dict__.pop("trace")
    made.__dict__.update(empty)
    return made.trace(*args, **kwargs)


def _modules_to_be(made: ParallelModule, model: nn.Module, memo: set[nn.Module] | None = None, prefix: str = "",
                   remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a parallel module will have, by their names, which are the original's before the trace."""
    for name, module in model.named_modules(memo, prefix, remove_duplicate):
        yield name, made if module is model else module


def move_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, parallel: ParallelModule) -> None:
    """Let an optimizer of the original's parameters step the parallel module's; its state becomes shards. Parameters
    of other pipeline stages are left out."""
    own = dict(nn.Module.named_parameters(parallel, remove_duplicate=False))
    placed = {id(p): own.get(name) for name, p in model.named_parameters(remove_duplicate=False)}
    for group in optimizer.param_groups:
        moved = [placed.get(id(p), p) for p in group["params"]]
        group["params"] = list({id(p): p for p in moved if p is not None}.values())
    for old in [p for p in optimizer.state if id(p) in placed]:
        values, new = optimizer.state.pop(old), placed[id(old)]
        if new is not None:
            optimizer.state[new] = {name: _like(value, new) for name, value in values.items()}


def whole_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state dict with whole tensors, as of one process. All ranks call this."""
    return pytree.tree_map(lambda value: value.full_tensor() if isinstance(value, DTensor) else value,
                           optimizer.state_dict())


def load_whole_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state dict with whole tensors; each parameter's become shards as the parameter is."""
    optimizer.load_state_dict(state)
    for parameter, values in optimizer.state.items():
        optimizer.state[parameter] = {name: _like(value, parameter) for name, value in values.items()}


def _like(value: Any, parameter: torch.Tensor) -> Any:
    """A whole tensor of the parameter's shape as its shards; anything else as it is."""
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or (
            value.shape != parameter.shape or value.dim() == 0):
        return value
    mesh, layout = parameter.device_mesh, from_torch(tuple(parameter.placements))
    mine = local_shard(value, mesh, layout).to(parameter.to_local().device).contiguous().clone()
    return as_dtensor(mine, mesh, layout, tuple(value.shape))


__all__ = ["Call", "Preparation", "load_whole_state", "move_optimizer", "whole_state"]
