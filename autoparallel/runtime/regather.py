"""ZeRO-3's second half: a parameter gathered for forward is not kept for backward, but gathered again there.

While a program runs under `regathering`, what autograd would save of a gathered parameter is replaced by the way to
gather it (torch.autograd.graph.saved_tensors_hooks).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from autoparallel.lower.collectives import redistribute
from autoparallel.runtime import groups

Make = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class _Gathered:
    """A gathered tensor that is still alive (so that nothing else has its memory), and how to make it anew."""

    tensor: weakref.ref[torch.Tensor]
    make: Make


@dataclass(frozen=True)
class _View:
    """What autograd saved: a view of a gathered tensor."""

    make: Make
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


_gathered: ContextVar[dict[int, _Gathered] | None] = ContextVar("gathered", default=None)


@contextmanager
def regathering() -> Iterator[None]:
    """Run a forward whose `gather` results are made again in backward."""
    token = _gathered.set({})
    try:
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _gathered.reset(token)


def _pack(tensor: torch.Tensor) -> Any:
    found = _found(tensor)
    if found is None:
        return tensor.detach()  # a result that its own op keeps would otherwise keep the op
    return _View(found.make, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _unpack(saved: Any) -> torch.Tensor:
    if not isinstance(saved, _View):
        return saved
    with torch.no_grad():
        return saved.make().as_strided(saved.size, saved.stride, saved.offset)


def _found(tensor: torch.Tensor) -> _Gathered | None:
    table = _gathered.get() or {}
    found = table.get(tensor.untyped_storage().data_ptr())
    return found if found is not None and found.tensor() is not None else None


def gather(value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`redistribute`, whose result is to be made again in backward."""
    axes, before = groups.bound(), _found(value)
    made = redistribute(value, *args, **kwargs)
    kept = None if before is not None else value.detach()

    def make() -> torch.Tensor:
        source = kept if before is None else before.make()
        assert source is not None
        with groups.use(axes):
            return redistribute(source, *args, **kwargs)

    table = _gathered.get()
    if table is not None:
        table[made.untyped_storage().data_ptr()] = _Gathered(weakref.ref(made), make)
    return made


def gather_again(program: GraphModule, gathers: Callable[[Any], bool]) -> GraphModule:
    """The same program with the steps for which ``gathers`` is true made again in backward."""
    for node in program.graph.nodes:
        if gathers(node):
            node.target = gather
    program.recompile()
    return program
