"""An optimizer of torch whose states are on the host or on disk between steps, and are stepped on the host."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoparallel.errors import InputError
from autoparallel.kernels import host_copies
from autoparallel.runtime.agree import made_equally
from autoparallel.runtime.offload.gradients import HostGradients
from autoparallel.runtime.offload.in_backward import BackwardSteps, StepsInBackward
from autoparallel.runtime.offload.mapped import MappedFiles
from autoparallel.runtime.offload.states import (
    beside,
    check_entries,
    check_kind,
    names_of,
    scalars_in,
    take_options,
)
from autoparallel.runtime.offload.stores import Disk, Memory, Store
from autoparallel.runtime.offload.threads import with_threads
from autoparallel.runtime.offload.tile_steps import TileSteps
from autoparallel.runtime.offload.tiles import Region, Tile, regions_of, tiles_of
from autoparallel.runtime.offload.work import Work, as_sharded, gradient_of, local_of
from autoparallel.schedule.tiers import BLOCK_BYTES, Offload, buffer_bytes, listed, padded


@dataclass(frozen=True)
class Limits:
    """What states on one rank may take: bytes of host memory and of disk (inf: any), and the folder of its files."""

    host_bytes: float = math.inf
    disk_bytes: float = math.inf
    disk_path: Path | None = None

    @staticmethod
    def of(host_bytes: float | None, disk_bytes: float | None, disk_path: Path | None) -> Limits:
        """None: no limit."""
        return Limits(math.inf if host_bytes is None else host_bytes, math.inf if disk_bytes is None else disk_bytes,
                      disk_path)


class _Part:
    """Regions of some shards in one store, in tiles that step on one device. ``regions``: by the parameter's number in
    the optimizer."""

    def __init__(self, regions: Sequence[Region], tile_bytes: int, make: Callable[[int], Store], on_host: bool) -> None:
        self.regions, self.tiles = {region.parameter: region for region in regions}, tiles_of(regions, tile_bytes)
        self.store, self.on_host = make(self.tiles[-1].end), on_host

    def load(self, tile: Tile, states: Mapping[int, Mapping[str, Any]], parameters: Sequence[Tensor]) -> None:
        """Fill a tile by states of whole shards, by parameter and name."""
        for region in tile.regions:
            for name, view in self.store.views(tile, region, parameters[region.parameter].dtype).items():
                if name in (entries := states.get(region.parameter, {})):
                    view.copy_(local_of(entries[name]).reshape(-1)[region.start : region.stop])
        self.store.write(tile)


class _Entries(Mapping[str, Any]):
    """The state of a parameter by name, as torch's optimizers keep it in ``state[parameter]``; read from its tier when
    asked for."""

    def __init__(self, optimizer: OffloadedOptimizer, number: int) -> None:
        self._optimizer, self._number = optimizer, number

    def __getitem__(self, name: str) -> Any:
        return self._optimizer._value(self._number, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._optimizer._names_of(self._number))

    def __len__(self) -> int:
        return len(self._optimizer._names_of(self._number))


class OffloadedOptimizer(StepsInBackward, torch.optim.Optimizer):
    """Steps of ``kind``, an element-wise optimizer of torch, on this rank's shards, tile by tile on the host.

    ``offload``: the tiers of a parameter, and its tiles. ``prefetch``: the next tile is fetched, and the one before
    written, while a tile is stepped. ``gradients``: what moves them to the host, if they go;
    ``files``: of parameters and gradients on disk; ``threads``: of a step (None: torch's); ``made``: the module's other
    optimizers, which share the limits; ``in_backward``: tiles are stepped while backward goes on. Parameter groups,
    schedulers, ``state_dict`` and ``load_state_dict`` are those of ``kind``; numbers are too, to the bit, where it
    steps on the CPU with the same kernel (``fused=True`` is taken if ``kind`` has it and the options name none).
    Raises InputError.
    """

    def __init__(self, kind: Any, params: Any, options: Mapping[str, Any], offload: Callable[[Tensor], Offload],
                 limits: Limits, prefetch: bool = True, gradients: HostGradients | None = None,
                 files: MappedFiles | None = None, threads: int | None = None,
                 made: Iterable[OffloadedOptimizer] = (), in_backward: bool = False) -> None:
        check_kind(kind, options)
        self._sealed, self._broken, self._others = False, "", 0
        super().__init__(params, {})
        self.defaults = take_options(kind, options, self.param_groups)
        self._away, self._prefetch, self._gradients, self._files = offload, prefetch, gradients, files
        self.kind: Any = kind
        self.threads, self._limits, self._made_before = threads, limits, made
        self._parameters, self._group_of, self._tiers = list[Tensor](), list[int](), list[Offload]()
        self._names = list[tuple[tuple[str, ...], tuple[str, ...]]]()  # by group, as `names_of` has them
        self._scalars: dict[int, dict[str, Any]] = {}  # by parameter that has states
        self._parts = list[_Part]()
        self._new: dict[int, dict[str, Any]] = {}  # scalars of parameters that this step has stepped
        self._steps_early = in_backward
        self._lay_out(0)
        self._sealed = True

    def _lay_out(self, first_group: int) -> None:
        """Lay out the states of the groups from the first on, in parts of their own."""
        groups = self.param_groups[first_group:]
        parameters = [p for group in groups for p in group["params"]]
        names = [names_of(self.kind, group, torch.float32) for group in groups]
        kept = list(dict.fromkeys(name for _, elements in names for name in elements))
        tiers = list(map(self._away, parameters))
        self._parts += self._divided(parameters, tiers, kept)
        self._parameters += parameters
        self._tiers += tiers
        self._group_of += [number for number, group in enumerate(groups, first_group) for _ in group["params"]]
        self._names += names
        if self._steps_early:
            self._step_early(len(self._parameters) - len(parameters))

    def _step_early(self, first: int) -> None:
        """Step tiles during backward from now on; parameters from the ``first`` on are not watched yet."""
        own = weakref.ref(self)

        def alive() -> OffloadedOptimizer:
            optimizer = own()
            assert optimizer is not None
            return optimizer

        def begin(number: int, stream: Any) -> TileSteps[list[Work]]:
            optimizer = alive()
            parameters = optimizer._parameters
            return optimizer._steps_of(number, stream, lambda n: gradient_of(parameters[n]), ahead=True)

        tiles = {number: part.tiles for number, part in enumerate(self._parts) if part.on_host}
        self.backward_steps = BackwardSteps(self._parameters, lambda: alive().param_groups, tiles, self._gradients,
                                          begin)
        for number in range(first, len(self._parameters)):
            if self._parameters[number].requires_grad:    # else, if trained later, it is stepped by step()
                self._parameters[number].register_post_accumulate_grad_hook(partial(_arrived, own, number))

    def _divided(self, parameters: Sequence[Tensor], tiers: Sequence[Offload], names: Sequence[str]) -> list[_Part]:
        """The shards of more parameters in parts: what stays on the device, what is on the host, and on disk."""
        sizes, widths = [local_of(p).numel() for p in parameters], [p.element_size() for p in parameters]
        moved = [int(one.moved(size, width)) for one, size, width in zip(tiers, sizes, widths, strict=True)]
        first, places = len(self._parameters), [one.states for one in tiers]

        def regions(bounds: Iterable[tuple[int, int]], chosen: Iterable[bool]) -> tuple[Region, ...]:
            some = [(number, ends, width) for number, (ends, width, one) in enumerate(zip(
                bounds, widths, chosen, strict=True), first) if one]
            return regions_of([ends for _, ends, _ in some], [width for *_, width in some], [one[0] for one in some])

        rest = regions(zip(moved, sizes, strict=True), [place == "device" or count < size for place, count, size in zip(
            places, moved, sizes, strict=True)])
        away = {tier: regions([(0, count) for count in moved], [place == tier for place in places])
                for tier in ("host", "disk")}
        self._check_limits([*zip(self._parameters, self._tiers, strict=True), *zip(parameters, tiers, strict=True)],
                           len(names), {tier: int(padded(max((r.end for r in some), default=0), BLOCK_BYTES))
                                        for tier, some in away.items()})
        found = list[_Part]()
        if rest:
            device = local_of(parameters[rest[0].parameter - first]).device
            found.append(_Part(rest, 2**62, lambda size: Memory(names, size, device, "device"), on_host=False))
        for tier, some in away.items():
            if some:
                tile_bytes = next(one.tile_bytes for one in tiers if one.states == tier)
                found.append(_Part(some, tile_bytes, partial(
                    _store, tier, self._limits.disk_path, names, tile_bytes), on_host=True))
        return found

    def _check_limits(self, parameters: Sequence[tuple[Tensor, Offload]], count: int, num_bytes: Mapping[str, int]
                      ) -> None:
        """``num_bytes`` of each of ``count`` states more, by tier, with those there are of all ``parameters``."""
        beside = _with_others(self._made_before, [p for p, _ in parameters])
        limits, needed = self._limits, _states_by_tier(chain(self._parts, *(other._parts for other in beside)))
        tile_bytes = parameters[0][1].tile_bytes
        parameters = [*parameters, *(pair for other in beside
                                     for pair in zip(other._parameters, other._tiers, strict=True))]
        needed["host"] += count * (num_bytes["host"] + int(buffer_bytes(num_bytes["disk"], tile_bytes)))
        needed["disk"] += count * num_bytes["disk"] + (0 if self._files is None else self._files.num_bytes)
        needed["host"] += sum(local_of(p).nbytes * sum(what != "optimizer states" for what in one.in_tier("host"))
                              for p, one in parameters if p.requires_grad)
        for name, tier, limit in (("host_memory_limit_bytes", "host", limits.host_bytes),
                                  ("disk_limit_bytes", "disk", limits.disk_bytes)):
            if needed[tier] > limit:
                what = list(dict.fromkeys(what for _, one in parameters for what in one.in_tier(tier)))
                if tier == "host" and num_bytes["disk"]:
                    what.append("tiles of optimizer states")
                raise InputError(f"{listed(what)} need {needed[tier]:,.0f} bytes on this rank, and {name} is "
                                 f"{limit:,.0f}: give at least that, or plan with more devices, a smaller "
                                 "offload_fraction or another tier")

    # --- a step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient; returns what ``closure`` does. An error half way leaves
        parameters of both states: later steps are refused until a checkpoint is loaded."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_whole()
        _refuse_sparse(self._parameters)
        gradients = [gradient_of(p) for p in self._parameters]
        self._others = max(self._others, _others_on_host(self._tiers, self._parameters, gradients))
        stream = _stream_of(self._parameters)
        try:
            done = self.backward_steps.end() if self.backward_steps is not None else ()
            for number, part in enumerate(self._parts):
                left = [tile for tile in part.tiles if (number, tile.number) not in done]
                steps = self._steps_of(number, stream, gradients.__getitem__, self._prefetch and len(left) > 1)
                for tile in left:
                    steps.give(tile)
                steps.end()
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise
        made, self._new = self._new, {}
        self._made(made)
        return loss

    def _steps_of(self, number: int, stream: Any, gradient: Callable[[int], Tensor | None], ahead: bool
                  ) -> TileSteps[list[Work]]:
        """What fetches the states, parameters and gradients of tiles of a part, steps them and writes them back."""
        part, threads = self._parts[number], self.threads or torch.get_num_threads()

        def fetch(tile: Tile) -> list[Work]:
            part.store.read(tile, any(region.parameter in self._scalars for region in tile.regions))
            with host_copies.under(stream), torch.no_grad():
                return [Work(region, local_of(self._parameters[region.parameter]), gradient(region.parameter),
                             part.on_host) for region in tile.regions]

        def step(tile: Tile, work: Sequence[Work]) -> None:
            with torch.no_grad(), with_threads(threads):
                self._step_tile(part, tile, work, self._new)

        def put(tile: Tile, work: Sequence[Work]) -> None:
            with host_copies.under(stream), torch.no_grad():
                for one in work:
                    one.put()
                    one.parameter.grad = None    # whose memory optimizers of tiles keep until they are collected
            part.store.write(tile)

        return TileSteps(fetch, step, put, ahead)

    def _step_tile(self, part: _Part, tile: Tile, work: Sequence[Work], made: dict[int, dict[str, Any]]) -> None:
        """Let an optimizer of ``kind`` step the tile's regions, with their states; what parameters have then, but for
        states in the store, is added to ``made``."""
        groups = [{**{key: value for key, value in group.items() if key not in ("params", "param_names")},
                   "params": [one.parameter for one in work if self._group_of[one.region.parameter] == number]}
                  for number, group in enumerate(self.param_groups)]
        inner = self.kind([group for group in groups if group["params"]])
        views = [part.store.views(tile, one.region, one.parameter.dtype) for one in work]
        for one, states in zip(work, views, strict=True):
            if (known := self._scalars.get(one.region.parameter)) is not None:
                own = {name: states[name] for name in self._elements_of(one.region.parameter)}
                fused = self.param_groups[self._group_of[one.region.parameter]].get("fused")
                inner.state[one.parameter] = {**beside(one.parameter, known, bool(fused)), **own}
        inner.step()
        for one, states in zip(work, views, strict=True):
            if one.parameter.grad is None:
                continue
            found = inner.state[one.parameter]
            for name in self._elements_of(one.region.parameter):
                if found[name].data_ptr() != states[name].data_ptr():
                    states[name].copy_(found[name])
            made[one.region.parameter] = {key: value for key, value in found.items() if key not in states}
        inner.state.clear()
        inner.param_groups.clear()

    def _made(self, made: Mapping[int, dict[str, Any]]) -> None:
        for number, scalars in sorted(made.items()):    # whichever order backward had
            self._scalars[number] = scalars
            self.state[self._parameters[number]] = _Entries(self, number)

    # --- states -----------------------------------------------------------------------------------------------------

    def _elements_of(self, number: int) -> Sequence[str]:
        """Names of the states of a parameter that have a value for each element."""
        return self._names[self._group_of[number]][1]

    def _names_of(self, number: int) -> Sequence[str]:
        return (*self._scalars[number], *self._elements_of(number))

    def _value(self, number: int, name: str) -> Any:
        """A state of a parameter: a number, or a tensor sharded as the parameter."""
        self.check_stepped("a read of the optimizer's state")
        if name in self._scalars[number]:
            return self._scalars[number][name]
        self._check_whole()
        parameter = self._parameters[number]
        parts = [part.store.whole(region, parameter.dtype)[name] for part in self._parts
                 if (region := part.regions.get(number)) is not None]
        local = local_of(parameter)
        flat = parts[0] if len(parts) == 1 else torch.cat([part.to(local.device) for part in reversed(parts)])
        return as_sharded(parameter, flat.view(local.shape))

    def state_dict(self) -> dict[str, Any]:
        """As torch's. Tensors of states in one tier are views of it: of files mapped into memory, if they are on
        disk."""
        self.check_stepped("state_dict()")
        self._check_whole()
        found = super().state_dict()
        return {**found, "state": {key: dict(entries) for key, entries in found["state"].items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As torch's: states are copied into their tier. Raises InputError, with nothing changed, for states of other
        names, shapes or placements than this optimizer's."""
        self.check_stepped("load_state_dict()")
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        if len(keys) != len(self._parameters):
            raise InputError(f"the state dict is of {len(keys)} parameters, and the optimizer has "
                             f"{len(self._parameters)}: load what an optimizer of the same parameters has saved")
        states = {number: dict(state_dict["state"][key]) for number, key in enumerate(keys)
                  if state_dict["state"].get(key)}
        for number, entries in states.items():
            check_entries(self.kind, number, self._parameters[number], self._names[self._group_of[number]], entries)
        super().load_state_dict({**state_dict, "state": {}})
        self._broken = "load_state_dict did not end"
        for part in self._parts:
            for tile in part.tiles:
                part.load(tile, states, self._parameters)
        self._broken, self._scalars = "", {}
        self._made({number: scalars_in(entries, self._elements_of(number),
                                        bool(self.param_groups[self._group_of[number]].get("fused")))
                    for number, entries in states.items()})

    # --- the rest ---------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Bytes of states by tier on this rank ("device", "host", "disk"), counted by storages and files; on the host
        with the tiles of states on disk, or with the gradients and parameters that are there, as they were at most. On
        a machine without accelerators device and host are the same memory."""
        found = _states_by_tier(self._parts)
        found["host"] += max(self._others, self._gradients.largest_bytes if self._gradients is not None else 0)
        found["disk"] += 0 if self._files is None else self._files.num_bytes
        return found

    def close(self) -> None:
        """Free states and their files; later steps raise InputError."""
        self._broken = "the optimizer was closed"
        for part in self._parts:
            part.store.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; all ranks call this. Raises InputError on all, with nothing changed, where the states of the
        group do not fit into the limits or onto the disk."""
        if self._sealed:
            self.check_stepped("add_param_group()")
        super().add_param_group(param_group)
        if not self._sealed:
            return
        try:
            made_equally("a parameter group", lambda: self._lay_out(len(self.param_groups) - 1), lambda _: "")
        except BaseException:
            self.param_groups.pop()
            raise

    def _check_whole(self) -> None:
        if self._broken:
            raise InputError(f"the optimizer's states are not whole ({self._broken}): load the last checkpoint with a "
                             "new optimizer, parallel.load(folder, parallel.optimizer(...))")


def _arrived(owner: weakref.ref[OffloadedOptimizer], number: int, parameter: Tensor) -> None:
    """The hook of a parameter whose gradient is there. (A sparse one `step` refuses.)"""
    optimizer, is_sparse = owner(), parameter.grad is not None and parameter.grad.is_sparse
    if optimizer is not None and optimizer.backward_steps is not None and not is_sparse:
        optimizer.backward_steps.arrived(number)


def _store(tier: str, disk_path: Path | None, names: Sequence[str], tile_bytes: int, num_bytes: int) -> Store:
    if tier == "host":
        return Memory(names, num_bytes, torch.device("cpu"), "host")
    assert disk_path is not None
    return Disk(names, num_bytes, tile_bytes, disk_path)


def _states_by_tier(parts: Iterable[_Part]) -> dict[str, int]:
    found = dict.fromkeys(("device", "host", "disk"), 0)
    for part in parts:
        for tier, num_bytes in part.store.tier_bytes().items():
            found[tier] += num_bytes
    return found


def _with_others(made: Iterable[OffloadedOptimizer], parameters: Sequence[Tensor]) -> list[OffloadedOptimizer]:
    """The optimizers that keep states beside one of these parameters: of other parameters, and not closed. (One of the
    same parameters is about to be replaced.)"""
    own = set(map(id, parameters))
    return [other for other in made if not other._broken and own.isdisjoint(map(id, other._parameters))]


def _stream_of(parameters: Iterable[Tensor]) -> Any:
    """The current stream of the device of these parameters; None on a CPU."""
    devices = (local_of(p).device for p in parameters)
    return host_copies.current(next((device for device in devices if device.type != "cpu"), host_copies.HOST))


def _refuse_sparse(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise InputError(f"the gradient of a parameter {list(parameter.shape)} is sparse (sparse=True), and "
                             "steps on the host take dense ones\n  Leave such tables out, parallel.optimizer(kind, "
                             "params), and give them to an optimizer of their own, as torch.optim.SparseAdam.")


def _others_on_host(tiers: Sequence[Offload], parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> int:
    """Bytes of the gradients and parameters that are in host memory."""
    found = 0
    for away, parameter, gradient in zip(tiers, parameters, gradients, strict=True):
        found += gradient.nbytes if gradient is not None and away.gradients == "host" else 0
        found += local_of(parameter).nbytes if away.parameters == "host" else 0
    return found


__all__ = ["Limits", "OffloadedOptimizer"]
