"""Reshard after forward (ZeRO-3): a parameter gathered for forward is not kept for backward, but gathered again.

While a program runs under `regathering`, a gathered parameter that autograd would save is replaced by a recipe that
gathers it again (torch.autograd.graph.saved_tensors_hooks). Gathers that forward prefetches, backward prefetches as
well, in reverse order and by the same rule (`schedule.async_windows.starts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autoparallel.kernels import async_communication, groups
from autoparallel.kernels.collectives import Sizes, begin_all_gathers, redistribute
from autoparallel.layout import Placement
from autoparallel.schedule.async_windows import ToAsk

_current_backward = torch._C._current_graph_task_id


@dataclass(eq=False)
class _Gathered:
    """A bucket of gathered parameters and the recipe that gathers them again from ``sources`` (possibly gathered
    themselves). ``begin(numbers, sources)``: issues the gather of some of them.

    ``place``: the last program point of their readers, if prefetched (else -1); by parameter, ``sizes``: bytes on the
    fullest rank, and ``uses``: reads left in backward; ``pending``: which of them an issued gather brings, and the
    function that awaits it; ``held``: awaited ones with reads left."""

    begin: Callable[[Sequence[int], Sequence[torch.Tensor]], Callable[[], Sequence[torch.Tensor]]]
    sources: tuple[torch.Tensor | _View, ...]
    place: int = -1
    sizes: tuple[float, ...] = ()
    uses: list[int] = field(default_factory=list)
    pending: tuple[tuple[int, ...], Callable[[], Sequence[torch.Tensor]]] | None = None
    held: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.uses = [0] * len(self.sources)

    def is_left(self) -> bool:
        """Whether backward is still to request the gather."""
        return not self.held and any(self.uses)

    def num_bytes(self) -> float:
        return sum(size for size, uses in zip(self.sizes, self.uses, strict=True) if uses)

    def gather_stages(self) -> list[list[_Gathered]]:
        """The prefetched gathers on the paths from the shards to these tensors, the last first."""
        before: list[list[_Gathered]] = []
        for gathered in dict.fromkeys(s.gathered for s in self.sources if isinstance(s, _View)):
            for number, stage in enumerate(gathered.gather_stages()):
                before += [[]] if number == len(before) else []
                before[number] += [one for one in stage if one not in before[number]]
        return [[self], *before] if self.place >= 0 else before

    def issue(self, asked: Sequence[int] = ()) -> None:
        """Issue the gather of the tensors with reads left and of those ``asked`` for, unless it is pending; gathered
        sources are awaited first."""
        if self.pending is None:
            numbers = tuple(n for n, uses in enumerate(self.uses) if uses or n in asked)
            if numbers:
                self.pending = numbers, self.begin(numbers, self._sources(numbers))

    def alone(self, number: int) -> torch.Tensor:
        """One of the tensors, gathered by itself: backward reads it again, or somebody reads it outside of backward."""
        return self.begin((number,), self._sources((number,)))()[0]

    def _sources(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        wanted: dict[_Gathered, list[int]] = {}
        for source in (self.sources[n] for n in numbers):
            if isinstance(source, _View):
                wanted.setdefault(source.gathered, []).append(source.number)
        made = {gathered: gathered.made(asked) for gathered, asked in wanted.items()}
        return [source.of(made[source.gathered][source.number]) if isinstance(source, _View) else source
                for source in (self.sources[n] for n in numbers)]

    def made(self, asked: Sequence[int]) -> dict[int, torch.Tensor]:
        """The gathered tensors of these numbers, awaited. (`_Run.made` issues the next gathers as well.)"""
        while not all(n in self.held for n in asked):
            self.issue(asked)
            assert self.pending is not None
            (numbers, finish), self.pending = self.pending, None
            self.held.update(zip(numbers, finish(), strict=True))
        found = {n: self.held[n] for n in asked}
        self.held = {n: tensor for n, tensor in self.held.items() if self.uses[n]}
        return found


@dataclass
class _Run:
    """The gathers of one forward. ``to_ask``: those that backward is to prefetch. ``found``: by address of the
    result's memory, which is unique while that is alive; ``ahead``: prefetched ones, in order; ``backward``: id of the
    running backward."""

    to_ask: ToAsk[_Gathered]
    found: dict[int, tuple[StorageWeakRef, _Gathered, int]] = field(default_factory=dict)
    ahead: list[_Gathered] = field(default_factory=list)
    most_gather_stages: int = 0
    backward: int = -1

    def add_prefetched(self, gathered: _Gathered) -> None:
        self.ahead.append(gathered)
        self.to_ask.add(gathered, gathered.place)
        self.most_gather_stages = max(self.most_gather_stages, len(gathered.gather_stages()))

    def add(self, made: torch.Tensor, gathered: _Gathered, number: int) -> None:
        storage = made.untyped_storage()
        self.found[storage.data_ptr()] = StorageWeakRef(storage), gathered, number

    def find(self, tensor: torch.Tensor) -> tuple[_Gathered, int] | None:
        found = self.found.get(tensor.untyped_storage().data_ptr())
        return None if found is None or found[0].expired() else found[1:]

    def made(self, asked: _Gathered, number: int) -> torch.Tensor:
        """The gathered tensor that backward reads; issues the prefetches that are due at this program point."""
        if asked.place < 0 or asked.uses[number] < 1 or _current_backward() < 0:
            return asked.alone(number)
        if self.backward != _current_backward():
            self.backward = _current_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self.settle)
        if number not in asked.held:
            self._prefetch(asked.place)
        made = asked.made([number])[number]
        asked.uses[number] -= 1
        if not asked.uses[number]:
            asked.held.pop(number, None)
        return made

    def _prefetch(self, place: int) -> None:
        for gather_stage in range(self.most_gather_stages):
            for gathered in self.to_ask.at(place, gather_stage):
                path = gathered.gather_stages()
                nearer = (one for stage in path[:gather_stage] for one in stage)
                if len(path) > gather_stage and not any(one.pending or one.held for one in nearer):
                    for one in path[gather_stage]:
                        one.issue(_asked_of(one, path[gather_stage - 1]) if gather_stage else ())

    def settle(self) -> None:
        """Await issued gathers that backward did not read."""
        for gathered in self.ahead:
            pending, gathered.pending = gathered.pending, None
            if pending is not None:
                pending[1]()
            gathered.held.clear()


def _asked_of(gathered: _Gathered, later: Sequence[_Gathered]) -> list[int]:
    """The numbers in a bucket that later gathers will ask for."""
    return [source.number for one in later for source, uses in zip(one.sources, one.uses, strict=True)
            if uses and isinstance(source, _View) and source.gathered is gathered]


@dataclass(frozen=True)
class _View:
    """A view of a gathered tensor: one that autograd saved, or the source of a further gather."""

    gathered: _Gathered
    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class _Saved:
    """In place of a tensor that autograd saved. (`_View` has no reference to the run: that would be a cycle, and memory
    would not be freed.)"""

    run: _Run
    view: _View


_run: ContextVar[_Run | None] = ContextVar("run", default=None)


@contextmanager
def regathering(bucket_bytes: float) -> Iterator[None]:
    """Run a forward whose `gather` and `begin_gather` results are gathered again in backward, in the order that
    `ToAsk` finds with ``bucket_bytes``."""
    token = _run.set(_Run(ToAsk(_Gathered.is_left, _Gathered.num_bytes, bucket_bytes)))
    try:
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _run.reset(token)


def _pack(tensor: torch.Tensor) -> torch.Tensor | _Saved:
    kept, run = _kept(tensor), _run.get()
    if run is None or not isinstance(kept, _View):
        return tensor.detach()  # an op that saves its own result would otherwise be a reference cycle
    kept.gathered.uses[kept.number] += 1
    return _Saved(run, kept)


def _unpack(saved: torch.Tensor | _Saved) -> torch.Tensor:
    if not isinstance(saved, _Saved):
        return saved
    with torch.no_grad():
        return saved.view.of(saved.run.made(saved.view.gathered, saved.view.number))


def _kept(tensor: torch.Tensor) -> torch.Tensor | _View:
    """The recipe of a gathered tensor; any other tensor, detached."""
    run = _run.get()
    if run is None or (found := run.find(tensor)) is None:
        return tensor.detach()
    return _View(*found, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def gather(value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`redistribute`, whose result is gathered again in backward."""
    axes, run, kept = groups.bound(), _run.get(), _kept(value)
    made = redistribute(value, *args, **kwargs)

    def begin(numbers: Sequence[int], sources: Sequence[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor]]:
        with groups.use(axes):
            again = redistribute(sources[0], *args, **kwargs)
        return lambda: [again]

    if run is not None:
        run.add(made, _Gathered(begin, (kept,)), 0)
    return made


def begin_gathers(axis: str, steps: Sequence[tuple[str, str, Sizes]], *values: torch.Tensor, place: int,
                  num_bytes: Sequence[float], **kwargs: Any) -> async_communication.Begun:
    """`async_communication.begin_gathers`, whose results (from `end`) are gathered again in backward, with prefetch.

    ``place``: the last program point of their readers; ``num_bytes``: of the fullest rank's results.
    """
    where, run, kept = groups.current(axis), _run.get(), tuple(map(_kept, values))
    begun = async_communication.begin_gathers(axis, steps, *values, **kwargs)
    if run is None:
        return begun
    cuts = [(Placement.parse(source).dim, sizes) for source, _, sizes in steps]

    def begin(numbers: Sequence[int], sources: Sequence[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor]]:
        return begin_all_gathers(sources, where, [cuts[n] for n in numbers])

    gathered = _Gathered(begin, kept, place, tuple(num_bytes))
    run.add_prefetched(gathered)
    return replace(begun, again=gathered)


def end(begun: async_communication.Begun) -> tuple[torch.Tensor, ...]:
    """`async_communication.end`; notes the recipes of its results."""
    made, run = async_communication.end(begun), _run.get()
    if run is not None and begun.again is not None:
        for number, tensor in enumerate(made):
            run.add(tensor, begun.again, number)
    return made
