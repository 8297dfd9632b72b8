"""Results that a recomputed block keeps whole, of ops that run as several ops of torch.

Ring attention calls torch's attention once a round. A selective checkpoint would keep the result, keys and values of
each round; backward needs the result of all rounds only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

T = TypeVar("T")
#: The results of the block that runs; None where none are kept.
_current: ContextVar[KeptResults | None] = ContextVar("kept results", default=None)


class KeptResults:
    """Of one run of a block: what its first run makes by `once`, and its later runs take, in order."""

    def __init__(self) -> None:
        self._made, self._next, self._is_first = list[Any](), 0, True

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """The block runs in this context, first forward, then for its recompute."""
        self._next, token = 0, _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            self._is_first = False

    def hold(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        """Hold what ``pack`` makes of each tensor, which ``unpack`` gives back."""
        self._made = pytree.tree_map_only(torch.Tensor, lambda one: _Packed(pack(one), unpack), self._made)

    def once(self, make: Callable[[], T]) -> T:
        """What ``make`` gives, the first time."""
        if self._is_first:
            made = make()
            self._made.append(_detached(made))
            return made
        self._next += 1
        again: T = _detached(pytree.tree_map_only(_Packed, _Packed.unpacked, self._made[self._next - 1]))
        return again


class _Packed:
    def __init__(self, packed: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
        self._packed, self._unpack = packed, unpack

    def unpacked(self) -> torch.Tensor:
        return self._unpack(self._packed)


def once(make: Callable[[], T]) -> T:
    """What ``make`` gives. In a block that keeps results it is not called for the recompute. It may not need gradients
    of what it does (as in the forward of a `torch.autograd.Function`)."""
    if (kept := _current.get()) is None:
        return make()
    with unseen():
        return kept.once(make)


def unseen() -> AbstractContextManager[object]:
    """A context in which torch's selective checkpoint, which numbers the calls of each op, sees none."""
    selective = isinstance(_get_current_dispatch_mode(), (_CachingTorchDispatchMode, _CachedTorchDispatchMode))
    return _pop_mode_temporarily() if selective else nullcontext()


def _detached(made: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, made)


__all__ = ["KeptResults", "once", "unseen"]
