"""The optimizer's step on the host while backward goes on: each tile once the gradients of its parameters are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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
    """What one backward has stepped. ``task``: its number in autograd; ``gradients``: by parameter, with its versions
    when it was stepped; ``left``: the parameters of each tile whose gradient is not there; ``options``: the groups'."""

    task: int
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
    device); ``begin``: part number, stream of the device -> what steps its tiles.

    Between backward and ``step()`` some parameters have new values and others not. What would go unnoticed then is
    refused: another backward, other options, a gradient that was changed.
    """

    def __init__(self, parameters: Sequence[Tensor], groups: Callable[[], Sequence[Mapping[str, Any]]],
                 tiles: Mapping[int, Sequence[Tile]], moves: HostGradients | None,
                 begin: Callable[[int, Any], TileSteps[Any]]) -> None:
        self._parameters, self._groups, self._moves, self._begin = parameters, groups, moves, begin
        self._tiles = {(part, tile.number): tile for part, some in tiles.items() for tile in some}
        self._places: dict[int, list[_Place]] = {}    # by parameter, its tiles
        for place, tile in self._tiles.items():
            for region in tile.regions:
                self._places.setdefault(region.parameter, []).append(place)
        self._now: _Backward | None = None

    @property
    def is_pending(self) -> bool:
        """Whether a backward has begun a step that did not end."""
        return self._now is not None

    def arrived(self, number: int) -> None:
        """A parameter has its gradient. Raises InputError if this is a second one before the step."""
        parameter, task = self._parameters[number], torch._C._current_graph_task_id()
        if parameter.grad is None or parameter.grad.is_sparse or number not in self._places:
            return
        if self._now is None:
            self._now = _Backward(task, _options(self._groups()), {
                place: {region.parameter for region in tile.regions if self._parameters[region.parameter].requires_grad}
                for place, tile in self._tiles.items()})
        now = self._now
        if now.task != task or number in now.arrived:
            raise InputError("a gradient came before optimizer.step() had ended the last one: its plan steps during "
                             "backward (step_in_backward=True), and each backward needs a step() of its own\n  Call "
                             "optimizer.step() after each backward; compile without step_in_backward to add gradients "
                             "up.")
        now.arrived.add(number)
        gradient, like = parameter.grad, getattr(parameter, "placements", None)
        if getattr(gradient, "placements", None) != like:
            return    # `step` redistributes it
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
        return now.given

    def check_ended(self, what: str) -> None:
        """Raises InputError, if a backward has begun a step, for ``what`` would read its parameters."""
        if self._now is not None:
            raise InputError(f"{what} before optimizer.step(), and backward has stepped some parameters already "
                             "(step_in_backward=True)\n  Call optimizer.step() after backward, before anything else; "
                             "after a backward that failed, load the last checkpoint with a new optimizer.")


def _versions(gradient: Tensor) -> tuple[int, int]:
    """Of a DTensor and its shard: ops on the one do not count on the other."""
    return gradient._version, local_of(gradient)._version


def _options(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{key: float(value) if isinstance(value, Tensor) else value for key, value in group.items()
             if key not in ("params", "param_names")} for group in groups]


__all__ = ["BackwardSteps"]
