"""An optimizer of torch that steps its parameters on the device while backward goes on, a bucket of them at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from autoparallel.errors import InputError
from autoparallel.runtime.offload.in_backward import BackwardSteps, StepsInBackward
from autoparallel.runtime.offload.tile_steps import TileSteps
from autoparallel.runtime.offload.tiles import Region, Tile
from autoparallel.runtime.offload.work import local_of
from autoparallel.runtime.optimizers import compute_on_shards, step_some
from autoparallel.runtime.shard_steps import ELEMENTWISE, steps_shards
from autoparallel.schedule.fusion import in_buckets

#: Parameters by group of an optimizer.
_Groups = list[list[Tensor]]


class DeviceSteps(StepsInBackward):
    """Steps parameters of ``optimizer``, which torch has made, during backward: each bucket of ``bucket_bytes``, or one
    parameter, once its gradients are there, which are let go then. ``optimizer.step()`` steps the others. Lives as long
    as the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, bucket_bytes: float) -> None:
        self._optimizer, self._bucket_bytes = weakref.ref(optimizer), bucket_bytes
        self._known: Mapping[int, int] = {}    # by id of a parameter that is watched, its number
        self._hooks: dict[int, Any] = {}
        self._laid_out_for: list[tuple[int, bool]] | None = None
        self._buckets = list[_Groups]()
        compute_on_shards(optimizer)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_state_dict_pre_hook(lambda _: self.check_stepped("state_dict()"))
        optimizer.register_load_state_dict_pre_hook(lambda *_: self.check_stepped("load_state_dict()"))
        self.watch()

    def watch(self) -> None:
        """Step the optimizer's parameters, as its groups have them now, in backward from now on, after other hooks of
        theirs."""
        optimizer = self._optimizer()
        assert optimizer is not None
        if self.backward_steps is None and self._laid_out_for is not None:    # idle
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        trained = [p.requires_grad and not p.is_meta for p in parameters]
        if (laid_out_for := [*zip(map(id, parameters), trained, strict=True)]) != self._laid_out_for:
            self._laid_out_for = laid_out_for
            self._lay_out(optimizer, parameters, trained)
        for parameter in (p for p in parameters if id(p) in self._hooks):
            hooks, own = cast(Any, parameter)._post_accumulate_grad_hooks, self._hooks[id(parameter)].id
            if next(reversed(hooks)) != own:
                hooks[own] = hooks.pop(own)    # autograd reads it as a dict, which `move_to_end` leaves as it is

    def _lay_out(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor], trained: list[bool]) -> None:
        """Divide the trained parameters into buckets, from the last to the first, as backward gives gradients."""
        group_of = [number for number, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        chosen = [number for number, is_trained in enumerate(trained) if is_trained]
        sizes = [local_of(parameters[number]).nbytes for number in chosen]
        numbers = [[chosen[n] for n in bucket] for bucket in in_buckets(sizes, self._bucket_bytes)]
        self._buckets = [[[parameters[n] for n in some if group_of[n] == group]
                          for group in range(len(optimizer.param_groups))] for some in numbers]
        self._known = {id(parameters[number]): number for some in numbers for number in some}
        own, alive = weakref.ref(self), self._optimizer

        def groups() -> list[dict[str, Any]]:
            there = alive()
            return [] if there is None else there.param_groups

        self.backward_steps = BackwardSteps(
            parameters, groups, {0: _tiles(numbers, parameters)}, None,
            lambda *_: TileSteps(lambda tile: tile.number, partial(_step, own), lambda *_: None, ahead=False),
            lets_go=True)
        for number in (number for some in numbers for number in some):
            if id(parameters[number]) not in self._hooks:
                self._hooks[id(parameters[number])] = parameters[number].register_post_accumulate_grad_hook(
                    partial(_arrived, own))

    def shares_with(self, other: DeviceSteps) -> bool:
        """Whether the two step some of the same parameters."""
        return not self._known.keys().isdisjoint(other._known)

    def give_up(self) -> None:
        """Step nothing in backward any more; what a backward has begun is forgotten."""
        while self._hooks:
            self._hooks.popitem()[1].remove()
        if self.backward_steps is not None:
            self.backward_steps.abandon()

    def arrived(self, parameter: Tensor) -> None:
        """A parameter has its gradient."""
        if self.backward_steps is not None and (number := self._known.get(id(parameter))) is not None:
            self.backward_steps.arrived(number)

    def step_bucket(self, number: int) -> None:
        """Step the parameters of a bucket."""
        optimizer = self._optimizer()
        assert optimizer is not None
        step_some(optimizer, self._buckets[number])

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The hook of ``optimizer.step()``: ends what backward has begun. A closure runs before."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        given: tuple[Any, Any] | None = None
        if closure is not None and not isinstance(optimizer, torch.optim.SparseAdam):    # which refuses it
            self.check_stepped("optimizer.step(closure)")
            with torch.enable_grad():
                loss = closure()
            given = (args[0], lambda: loss), {}
        if self.backward_steps is not None:
            self.backward_steps.end()
        return given

    def one_backward(self) -> AbstractContextManager[None]:
        """Within, several calls of autograd give each parameter one gradient."""
        return nullcontext() if self.backward_steps is None else self.backward_steps.one_backward()


def check_steps(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> None:
    """Raises InputError for optimizers that do not step parameters one by one, each on its rank's shard."""
    if not (steps_shards(kind) or kind is torch.optim.SparseAdam):
        raise InputError(f"{kind.__name__} is not element-wise, or steps in its own way, and cannot step parameters "
                         f"during backward (step_in_backward=True)\n  Take one of "
                         f"{', '.join(one.__name__ for one in (*ELEMENTWISE, torch.optim.SparseAdam))} of torch.optim, "
                         "or compile without step_in_backward.")
    if options.get("differentiable"):
        raise InputError("differentiable=True steps within autograd, and this plan steps during backward "
                         "(step_in_backward=True)\n  Compile without step_in_backward.")


def _tiles(buckets: Iterable[Iterable[int]], parameters: list[Tensor]) -> tuple[Tile, ...]:
    """Each bucket of parameters, by their numbers, as a tile of whole shards."""
    def region(number: int) -> Region:
        local = local_of(parameters[number])
        return Region(number, 0, local.numel(), local.element_size(), 0)

    return tuple(Tile(place, 0, 0, tuple(map(region, some))) for place, some in enumerate(buckets))


def _step(owner: Callable[[], DeviceSteps | None], _: Tile, bucket: int) -> None:
    if (steps := owner()) is not None:
        steps.step_bucket(bucket)


def _arrived(owner: Callable[[], DeviceSteps | None], parameter: Tensor) -> None:
    """The hook of a parameter whose gradient is there."""
    if (steps := owner()) is not None:
        steps.arrived(parameter)


__all__ = ["DeviceSteps", "check_steps"]
