"""The optimizer's step while backward goes on: each tile once the gradients of its parameters are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from autoparallel.errors import InputError
from autoparallel.kernels import host_copies
from autoparallel.runtime.offload.gradients import HostGradients, is_on_host
from autoparallel.runtime.offload.tile_steps import TileSteps
from autoparallel.runtime.offload.tiles import Tile
from autoparallel.runtime.offload.work import local_of

#: A part of the optimizer's states, and a tile of it, by their numbers.
_Place = tuple[int, int]


@dataclass
class _Backward:
    """What one backward has stepped. ``task``: its number in autograd, or what stands for several; ``gradients``: by
    parameter, with its versions when it was stepped; ``left``: the parameters of each tile whose gradient is not there;
    ``options``: the groups'."""

    task: object
    options: list[dict[str, Any]]
    left: dict[_Place, set[int]]
    gradients: dict[int, tuple[Tensor, tuple[int, int]]] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)
    given: set[_Place] = field(default_factory=set)
    steps: dict[int, TileSteps[Any]] = field(default_factory=dict)
    notes: list[Future[Any]] = field(default_factory=list)


class BackwardSteps:
    """Steps the tiles of an optimizer's parts during backward. ``groups``: returns the optimizer's, of which
    `load_state_dict` makes others; ``moves``: what brings gradients to the host (None: programs do, or they stay on the
    device); ``begin``: part number, stream of the device -> what steps its tiles; ``lets_go``: of gradients, when their
    tile is stepped, which then is within `arrived`.

    Between backward and ``step()`` some parameters have new values and others not. What would go unnoticed then is
    refused: another backward, other options, a gradient that was changed.
    """

    def __init__(self, parameters: Sequence[Tensor], groups: Callable[[], Sequence[Mapping[str, Any]]],
                 tiles: Mapping[int, Sequence[Tile]], moves: HostGradients | None,
                 begin: Callable[[int, Any], TileSteps[Any]], lets_go: bool = False) -> None:
        self._parameters, self._groups, self._moves, self._begin = parameters, groups, moves, begin
        self._lets_go = lets_go
        self._tiles = {(part, tile.number): tile for part, some in tiles.items() for tile in some}
        self._places: dict[int, list[_Place]] = {}    # by parameter, its tiles
        for place, tile in self._tiles.items():
            for region in tile.regions:
                self._places.setdefault(region.parameter, []).append(place)
        self._now: _Backward | None = None
        self._together: object | None = None

    @contextmanager
    def one_backward(self) -> Iterator[None]:
        """Within, several calls of autograd give each parameter one gradient."""
        self._together = object()
        try:
            yield
        finally:
            self._together = None

    def check_backward(self) -> None:
        """Within a backward: raises InputError if another one has begun a step that did not end."""
        if self._now is not None and self._now.task != self._task:
            raise _second_backward()

    @property
    def _task(self) -> object:
        return self._together or torch._C._current_graph_task_id()

    def arrived(self, number: int) -> None:
        """A parameter has its gradient. Raises InputError if this is a second one before the step."""
        parameter, task = self._parameters[number], self._task
        if parameter.grad is None or number not in self._places:
            return
        if torch.is_grad_enabled():
            raise InputError("backward(create_graph=True) makes gradients that can be differentiated, and this plan "
                             "steps with them during backward (step_in_backward=True)\n  Compile without "
                             "step_in_backward.")
        if self._now is None:
            self._now = _Backward(task, _options(self._groups()), {
                place: {region.parameter for region in tile.regions if self._parameters[region.parameter].requires_grad}
                for place, tile in self._tiles.items()})
        now = self._now
        if now.task != task or number in now.arrived:
            raise _second_backward()
        now.arrived.add(number)
        gradient, like = parameter.grad, getattr(parameter, "placements", None)
        if getattr(gradient, "placements", None) != like:
            return    # `step` redistributes it
        if self._lets_go:
            self._there(now, number, gradient, None)
            return
        read = host_copies.now(local_of(parameter).device)    # nothing reads the parameter after this in backward
        if self._moves is not None and is_on_host(gradient):
            now.notes.append(self._moves.then(partial(self._there, now, number, gradient, read)))
        else:
            self._there(now, number, gradient, read)

    def _there(self, now: _Backward, number: int, gradient: Tensor, read: Any) -> None:
        """The gradient is in the memory where it will be read: step the tiles that wait for no other. ``read``: the
        event after which the parameter may be written to."""
        stream = host_copies.after(read, local_of(self._parameters[number]).device)
        now.gradients[number] = gradient, _versions(gradient)
        for place in self._places[number]:
            now.left[place].discard(number)
            if not now.left[place]:
                if place[0] not in now.steps:
                    now.steps[place[0]] = self._begin(place[0], stream)
                now.given.add(place)
                now.steps[place[0]].give(self._tiles[place])
                torch.autograd.graph.increment_version(    # so that reads of saved parameters that come later are told
                    [local_of(self._parameters[region.parameter]) for region in self._tiles[place].regions])
                if self._lets_go:
                    self._let_go(now, self._tiles[place])

    def _let_go(self, now: _Backward, tile: Tile) -> None:
        for number in (region.parameter for region in tile.regions if region.parameter in now.gradients):
            parameter = self._parameters[number]
            parameter.grad = gone = _gone(parameter)
            now.gradients[number] = gone, _versions(gone)

    def end(self) -> set[_Place]:
        """Wait for what backward has given; returns the tiles that are stepped. Raises their errors, and InputError
        where something that they have read is another now."""
        now, self._now = self._now, None
        if now is None:
            return set()
        for one in now.notes:
            one.result()
        for steps in now.steps.values():
            steps.end()
        if now.options != _options(self._groups()):
            raise InputError("options of the optimizer changed after backward had stepped with them (step_in_backward="
                             "True)\n  Change learning rates and the like before backward: scheduler.step() after "
                             "optimizer.step().")
        for number, (gradient, versions) in now.gradients.items():
            changed = gradient is not self._parameters[number].grad or _versions(gradient) != versions
            if changed and any(place in now.given for place in self._places[number]):
                raise InputError("a gradient was changed after backward had stepped with it (step_in_backward=True)\n  "
                                 "Leave out what reads or writes gradients between backward and optimizer.step(), as "
                                 "clipping and scaling, or compile without step_in_backward.")
            if isinstance(gradient, _Gone):
                self._parameters[number].grad = None
        return now.given

    def abandon(self) -> None:
        """Forget what a backward has begun, with its gradients."""
        now, self._now = self._now, None
        for number in now.arrived if now is not None else ():
            self._parameters[number].grad = None

    def check_ended(self, what: str) -> None:
        """Raises InputError, if a backward has begun a step, for ``what`` would read its parameters."""
        if self._now is not None:
            raise InputError(f"{what} before optimizer.step(), and backward has stepped some parameters already "
                             "(step_in_backward=True)\n  Call optimizer.step() after backward, before anything else; "
                             "after a backward that failed, load the last checkpoint with a new optimizer.")


class StepsInBackward:
    """What steps parameters during backward: an optimizer of states on the host or disk, or the steps on the device.
    ``backward_steps``: None where backward steps nothing."""

    backward_steps: BackwardSteps | None = None

    def check_stepped(self, what: str) -> None:
        """Raises InputError if a backward has stepped parameters that ``what`` reads, and no `step()` has ended it."""
        if self.backward_steps is not None:
            self.backward_steps.check_ended(what)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Within, backward steps nothing."""
        self.check_stepped("another step was run")
        steps, self.backward_steps = self.backward_steps, None
        try:
            yield
        finally:
            self.backward_steps = steps


def _second_backward() -> InputError:
    return InputError("a gradient came before optimizer.step() had ended the last one: its plan steps during backward "
                      "(step_in_backward=True), and each backward needs a step() of its own\n  Call optimizer.step() "
                      "after each backward; compile without step_in_backward to add gradients up.")


class _Gone(Tensor):
    """In the place of a gradient that was let go: without values, so that whoever reads or writes to it is told."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _read(str(func))

    def _read(self, *_: Any, **__: Any) -> Any:
        raise _read("a method of DTensors")

    full_tensor = to_local = redistribute = coalesce = to_dense = _read

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"gradient of {list(self.shape)}, let go during backward"


def _read(how: str) -> InputError:
    return InputError("the gradient of a parameter is read or written to, and backward has stepped with it and let it "
                      f"go (step_in_backward=True): {how}\n  Leave out what reads or writes gradients between backward "
                      "and optimizer.step(), as clipping, scaling and logging of norms, or compile without "
                      "step_in_backward.")


def _gone(parameter: Tensor) -> Tensor:
    """In the place of the parameter's gradient."""
    made = Tensor._make_wrapper_subclass(
        _Gone, parameter.shape, dtype=parameter.dtype, device=parameter.device)
    return cast(Tensor, made)


def _versions(gradient: Tensor) -> tuple[int, int]:
    """Of a DTensor and its shard: ops on the one do not count on the other."""
    return gradient._version, local_of(gradient)._version


def _options(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{key: float(value) if isinstance(value, Tensor) else value for key, value in group.items()
             if key not in ("params", "param_names")} for group in groups]


__all__ = ["BackwardSteps", "StepsInBackward"]
