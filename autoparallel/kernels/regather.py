"""Reshard after forward (ZeRO-3): a parameter gathered for forward is not kept for backward, but gathered again.

While a program runs under `regathering`, a gathered parameter that autograd would save is replaced by a recipe that
gathers it again (torch.autograd.graph.saved_tensors_hooks). Gathers that forward prefetches, backward prefetches as
well, in reverse order and by the same rule (`schedule.async_windows.starts`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autoparallel.kernels import async_communication, groups
from autoparallel.kernels.collectives import Finish, Sizes, begin_all_gather, redistribute
from autoparallel.layout import Placement
from autoparallel.schedule.async_windows import ToAsk

_current_backward = torch._C._current_graph_task_id


@dataclass(eq=False)
class _Gathered:
    """A gathered parameter and the recipe that gathers it again from ``source`` (possibly gathered itself).

    ``place``: program point of its reader, if prefetched (else -1); ``num_bytes`` on the fullest rank; ``uses``: reads
    left in backward; ``pending``: awaits an issued gather."""

    begin: Callable[[torch.Tensor], Finish]
    source: torch.Tensor | _View
    place: int = -1
    num_bytes: float = 0.0
    uses: int = 0
    pending: Finish | None = None

    def gather_stages(self) -> list[_Gathered]:
        """The prefetched gathers on the path from the shard to this tensor, the last first."""
        before = self.source.gathered.gather_stages() if isinstance(self.source, _View) else []
        return [self, *before] if self.place >= 0 else before

    def issue(self) -> None:
        """Issue the gather unless it is pending; a gathered source is awaited first."""
        if self.pending is None:
            source = self.source
            self.pending = self.begin(source.of(source.gathered.made()) if isinstance(source, _View) else source)

    def made(self) -> torch.Tensor:
        """The gathered tensor, awaited. (`_Run.made` issues the next gathers as well.)"""
        self.issue()
        finish, self.pending = self.pending, None
        assert finish is not None
        return finish()


@dataclass
class _Run:
    """The gathers of one forward. ``found``: by address of the result's memory, which is unique while the tensor lives;
    ``ahead``: prefetched ones, in order; ``backward``: id of the running backward."""

    found: dict[int, tuple[weakref.ref[torch.Tensor], _Gathered]] = field(default_factory=dict)
    ahead: list[_Gathered] = field(default_factory=list)
    to_ask: ToAsk[_Gathered] = field(default_factory=lambda: ToAsk(lambda gathered: gathered.uses > 0))
    most_gather_stages: int = 0
    backward: int = -1

    def add_prefetched(self, gathered: _Gathered) -> None:
        self.ahead.append(gathered)
        self.to_ask.add(gathered, gathered.place, gathered.num_bytes)
        self.most_gather_stages = max(self.most_gather_stages, len(gathered.gather_stages()))

    def add(self, made: torch.Tensor, gathered: _Gathered) -> None:
        self.found[made.untyped_storage().data_ptr()] = weakref.ref(made), gathered

    def find(self, tensor: torch.Tensor) -> _Gathered | None:
        alive, gathered = self.found.get(tensor.untyped_storage().data_ptr(), (None, None))
        return gathered if alive is not None and alive() is not None else None

    def made(self, asked: _Gathered) -> torch.Tensor:
        """The gathered tensor that backward reads; issues the prefetches that are due at this program point."""
        if asked.place < 0 or asked.uses < 1 or _current_backward() < 0:
            return asked.made()
        if self.backward != _current_backward():
            self.backward = _current_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self.settle)
        for gather_stage in range(self.most_gather_stages):
            for gathered in self.to_ask.at(asked.place, gather_stage):
                path = gathered.gather_stages()
                if len(path) > gather_stage and not any(nearer.pending for nearer in path[:gather_stage]):
                    path[gather_stage].issue()
        asked.uses -= 1
        return asked.made()

    def settle(self) -> None:
        """Await issued gathers that backward did not read."""
        for gathered in self.ahead:
            finish, gathered.pending = gathered.pending, None
            if finish is not None:
                finish()


@dataclass(frozen=True)
class _View:
    """A view of a gathered tensor: one that autograd saved, or the source of a further gather."""

    gathered: _Gathered
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
def regathering() -> Iterator[None]:
    """Run a forward whose `gather` and `begin_gather` results are gathered again in backward."""
    token = _run.set(_Run())
    try:
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _run.reset(token)


def _pack(tensor: torch.Tensor) -> torch.Tensor | _Saved:
    kept, run = _kept(tensor), _run.get()
    if run is None or not isinstance(kept, _View):
        return tensor.detach()  # an op that saves its own result would otherwise be a reference cycle
    kept.gathered.uses += 1
    return _Saved(run, kept)


def _unpack(saved: torch.Tensor | _Saved) -> torch.Tensor:
    if not isinstance(saved, _Saved):
        return saved
    with torch.no_grad():
        return saved.view.of(saved.run.made(saved.view.gathered))


def _kept(tensor: torch.Tensor) -> torch.Tensor | _View:
    """The recipe of a gathered tensor; any other tensor, detached."""
    run = _run.get()
    if run is None or (found := run.find(tensor)) is None:
        return tensor.detach()
    return _View(found, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def gather(value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`redistribute`, whose result is gathered again in backward."""
    axes, run, kept = groups.bound(), _run.get(), _kept(value)
    made = redistribute(value, *args, **kwargs)

    def begin(source: torch.Tensor) -> Finish:
        with groups.use(axes):
            again = redistribute(source, *args, **kwargs)
        return lambda: again

    if run is not None:
        run.add(made, _Gathered(begin, kept))
    return made


def begin_gather(value: torch.Tensor, axis: str, source: str, target: str, *, source_sizes: Sizes, place: int,
                 num_bytes: float, **kwargs: Any) -> async_communication.Begun:
    """`async_communication.begin_gather`, whose result (from `end`) is gathered again in backward, with prefetch.

    ``place``: program point of its reader; ``num_bytes``: of the fullest rank's result.
    """
    where, run, kept = groups.current(axis), _run.get(), _kept(value)
    begun = async_communication.begin_gather(value, axis, source, target, source_sizes, **kwargs)
    if run is None:
        return begun
    dim = Placement.parse(source).dim
    gathered = _Gathered(lambda again: begin_all_gather(again, where, dim, source_sizes), kept, place, num_bytes)
    run.add_prefetched(gathered)
    return replace(begun, again=gathered)


def end(begun: async_communication.Begun) -> tuple[torch.Tensor, ...]:
    """`async_communication.end`; notes the recipe of its result."""
    made, run = async_communication.end(begun), _run.get()
    if run is not None and begun.again is not None:
        run.add(made[0], begun.again)
    return made


