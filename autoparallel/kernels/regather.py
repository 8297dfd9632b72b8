"""ZeRO-3's second half: a parameter gathered for forward is not kept for backward, but gathered again there.

While a program runs under `regathering`, what autograd would save of a gathered parameter is replaced by the way to
gather it (torch.autograd.graph.saved_tensors_hooks). What forward gathers ahead of its readers, backward gathers ahead
of where it asks for it, too: the other way round, by the same rule (`schedule.async_windows.starts`).
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
    """A gathered parameter, and how to gather it anew, of ``source`` (which may be gathered, too).

    ``place``: where forward reads it, if it is gathered ahead of that (else -1), of so many bytes on the fullest rank;
    ``uses``: how often backward is still to ask for it; ``pending``: its value, if it is."""

    begin: Callable[[torch.Tensor], Finish]
    source: torch.Tensor | _View
    place: int = -1
    num_bytes: float = 0.0
    uses: int = 0
    pending: Finish | None = None

    def gather_stages(self) -> list[_Gathered]:
        """What is gathered ahead on its way, the last first."""
        before = self.source.gathered.gather_stages() if isinstance(self.source, _View) else []
        return [self, *before] if self.place >= 0 else before

    def issue(self) -> None:
        if self.pending is None:
            source = self.source
            self.pending = self.begin(source.of(source.gathered.made()) if isinstance(source, _View) else source)

    def made(self) -> torch.Tensor:
        """The value; `_Run.made` also posts what comes next."""
        self.issue()
        finish, self.pending = self.pending, None
        assert finish is not None
        return finish()


@dataclass
class _Run:
    """One forward: what it gathered, by the memory that has it (while the tensor lives, nothing else has that); and
    what it gathered ahead, in order."""

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
        """What backward asks for; what it asks for next is on its way then."""
        if asked.place < 0 or asked.uses < 1 or _current_backward() < 0:
            return asked.made()
        if self.backward != _current_backward():
            self.backward = _current_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self.settle)
        for gather_stage in range(self.most_gather_stages):
            for gathered in self.to_ask.at(asked.place, gather_stage):
                way = gathered.gather_stages()
                if len(way) > gather_stage and not any(nearer.pending for nearer in way[:gather_stage]):
                    way[gather_stage].issue()
        asked.uses -= 1
        return asked.made()

    def settle(self) -> None:
        """Wait for what was posted, and no backward asked for."""
        for gathered in self.ahead:
            finish, gathered.pending = gathered.pending, None
            if finish is not None:
                finish()


@dataclass(frozen=True)
class _View:
    """A view of a gathered tensor, which autograd saved, or that is gathered further."""

    gathered: _Gathered
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class _Saved:
    """What autograd saved. (Views do not know the run: it has what is gathered of them, and would not be let go.)"""

    run: _Run
    view: _View


_run: ContextVar[_Run | None] = ContextVar("run", default=None)


@contextmanager
def regathering() -> Iterator[None]:
    """Run a forward whose `gather` and `begin_gather` results are made again in backward."""
    token = _run.set(_Run())
    try:
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _run.reset(token)


def _pack(tensor: torch.Tensor) -> torch.Tensor | _Saved:
    kept, run = _kept(tensor), _run.get()
    if run is None or not isinstance(kept, _View):
        return tensor.detach()  # a result that its own op keeps would otherwise keep the op
    kept.gathered.uses += 1
    return _Saved(run, kept)


def _unpack(saved: torch.Tensor | _Saved) -> torch.Tensor:
    if not isinstance(saved, _Saved):
        return saved
    with torch.no_grad():
        return saved.view.of(saved.run.made(saved.view.gathered))


def _kept(tensor: torch.Tensor) -> torch.Tensor | _View:
    """What is kept of a tensor for backward: how to make it again, if it was gathered."""
    run = _run.get()
    if run is None or (found := run.find(tensor)) is None:
        return tensor.detach()
    return _View(found, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def gather(value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`redistribute`, whose result is to be made again in backward."""
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
    """`async_communication.begin_gather`, whose result (`end`) is to be made again in backward."""
    where, run, kept = groups.current(axis), _run.get(), _kept(value)
    begun = async_communication.begin_gather(value, axis, source, target, source_sizes, **kwargs)
    if run is None:
        return begun
    dim = Placement.parse(source).dim
    gathered = _Gathered(lambda again: begin_all_gather(again, where, dim, source_sizes), kept, place, num_bytes)
    run.add_prefetched(gathered)
    return replace(begun, again=gathered)


def end(begun: async_communication.Begun) -> tuple[torch.Tensor, ...]:
    """`async_communication.end`."""
    made, run = async_communication.end(begun), _run.get()
    if run is not None and begun.again is not None:
        run.add(made[0], begun.again)
    return made


