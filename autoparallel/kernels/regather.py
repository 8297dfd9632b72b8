"""Reshard after forward (ZeRO-3): a parameter gathered for forward is not kept for backward, but gathered again.

While a program runs under `regathering`, a gathered parameter that autograd would save is replaced by a recipe that
gathers it again (torch.autograd.graph.saved_tensors_hooks). Gathers that forward prefetches, backward prefetches as
well, in reverse order and by the same rule (`schedule.backward_gathers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autoparallel.kernels import async_communication, groups
from autoparallel.kernels.buckets import begin_gathers_of
from autoparallel.kernels.collectives import Sizes, redistribute
from autoparallel.kernels.host_copies import begin as begin_copies
from autoparallel.kernels.saved_views import Form, Here, has_storage
from autoparallel.layout import Placement
from autoparallel.schedule.backward_gathers import BackwardGathers, Gather, View

_current_backward = torch._C._current_graph_task_id
_Gather = Gather[torch.Tensor]


@dataclass(frozen=True)
class _View(View[torch.Tensor]):
    """A view of a gathered tensor: one that autograd saved, or the source of a further gather."""

    form: Form

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return self.form.view(whole)


class _Run:
    """The gathers of one forward. ``found``: by address of the result's storage (also an empty one has its own);
    ``backward``: id of the running backward."""

    def __init__(self, bucket_bytes: float) -> None:
        self.gathers = BackwardGathers[torch.Tensor](bucket_bytes)
        self.found: dict[int, tuple[StorageWeakRef, _Gather, int]] = {}
        self.backward = -1

    def add(self, made: torch.Tensor, gather: _Gather, number: int) -> None:
        storage = made.untyped_storage()
        self.found[storage._cdata] = StorageWeakRef(storage), gather, number

    def find(self, tensor: torch.Tensor) -> tuple[_Gather, int] | None:
        found = self.found.get(tensor.untyped_storage()._cdata) if has_storage(tensor) else None
        return None if found is None or found[0].expired() else found[1:]

    def read(self, view: _View) -> torch.Tensor:
        """The tensor that autograd saved."""
        if _current_backward() < 0:
            return view.of(view.gather.alone(view.number))
        if self.backward != _current_backward():
            self.backward = _current_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self.gathers.settle)
        return self.gathers.read(view)


@dataclass(frozen=True)
class _Saved:
    """In place of a tensor that autograd saved. (`_View` has no reference to the run: that would be a cycle, and memory
    would not be freed.)"""

    run: _Run
    view: _View


_run: ContextVar[_Run | None] = ContextVar("run", default=None)
_gathers: ContextVar[bool] = ContextVar("gathers", default=False)


def gathers_parameter() -> bool:
    """Whether `gather_parameter` runs."""
    return _gathers.get()


@contextmanager
def regathering(bucket_bytes: float) -> Iterator[None]:
    """Run a forward whose `gather` and `begin_gather` results are gathered again in backward, in the order that
    `BackwardGathers` finds with ``bucket_bytes``."""
    token = _run.set(_Run(bucket_bytes))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        _run.reset(token)


def pack(tensor: torch.Tensor) -> Here | _Saved:
    """What autograd keeps of a tensor: the recipe of a gathered one, or the tensor."""
    kept, run = _kept(tensor), _run.get()
    if run is None or not isinstance(kept, _View):
        return Here(tensor)
    run.gathers.save(kept)
    return _Saved(run, kept)


def unpack(saved: Here | _Saved) -> torch.Tensor:
    """The tensor, for backward; gathered again if it is a recipe."""
    if isinstance(saved, Here):
        return saved.read()
    with torch.no_grad():
        return saved.run.read(saved.view)


def _kept(tensor: torch.Tensor) -> torch.Tensor | _View:
    """The recipe of a gathered tensor; any other tensor, detached."""
    run = _run.get()
    if run is None or (found := run.find(tensor)) is None:
        return tensor.detach()
    return _View(*found, Form.of(tensor))


def gather(value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`redistribute`, whose result is made again in backward (unless it is a view)."""
    axes, run, kept = groups.bound(), _run.get(), _kept(value)
    made = redistribute(value, *args, **kwargs)

    def begin(numbers: Sequence[int], sources: Sequence[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor]]:
        with groups.use(axes):
            again = redistribute(sources[0], *args, **kwargs)
        return lambda: [again]

    if run is not None and made.untyped_storage()._cdata != value.untyped_storage()._cdata:
        run.add(made, _Gather(begin, (kept,)), 0)
    return made


def gather_parameter(value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`gather` on the path of a stored parameter, whose result recompute="selective" does not keep, unlike those of
    other collectives."""
    token = _gathers.set(True)
    try:
        return gather(value, *args, **kwargs)
    finally:
        _gathers.reset(token)


def begin_gathers(axis: str, steps: Sequence[tuple[str, str, Sizes]], *values: torch.Tensor, place: int,
                  num_bytes: Sequence[float], **kwargs: Any) -> async_communication.Begun:
    """`async_communication.begin_gathers`, whose results (from `end`) are gathered again in backward, with prefetch.

    ``place``: the last program point of their readers; ``num_bytes``: of the fullest rank's results.
    """
    where, run, kept = groups.current(axis), _run.get(), tuple(map(_kept, values))
    begun = async_communication.begin_gathers(axis, steps, *values, **kwargs)
    if run is None:
        return begun
    cuts = [(Placement.parse(source), sizes) for source, _, sizes in steps]

    def begin(numbers: Sequence[int], sources: Sequence[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor]]:
        return begin_gathers_of(sources, where, [cuts[n][0] for n in numbers], [cuts[n][1] for n in numbers])

    gathered = _Gather(begin, kept, place, tuple(num_bytes))
    run.gathers.add(gathered)
    return replace(begun, again=gathered)


def begin_fetches(device: str, *values: torch.Tensor, place: int, num_bytes: Sequence[float]
                  ) -> async_communication.Begun:
    """`async_communication.begin_fetches`, whose results (from `end`) are fetched again in backward, with prefetch;
    ``place`` and ``num_bytes`` as of `begin_gathers`."""
    run, kept = _run.get(), tuple(map(_kept, values))
    begun = async_communication.begin_fetches(device, *values)
    if run is None:
        return begun

    def begin(numbers: Sequence[int], sources: Sequence[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor]]:
        return begin_copies(sources, torch.device(device)).ready

    fetched = _Gather(begin, kept, place, tuple(num_bytes))
    run.gathers.add(fetched)
    return replace(begun, again=fetched)


def end(begun: async_communication.Begun) -> tuple[torch.Tensor, ...]:
    """`async_communication.end`; notes the recipes of its results."""
    made, run = async_communication.end(begun), _run.get()
    if run is not None and begun.again is not None:
        for number, tensor in enumerate(made):
            run.add(tensor, begun.again, number)
    return made
