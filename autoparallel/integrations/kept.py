"""Reading a data loader in advance without side effects: attributes and random generators are restored."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

#: How many objects within one another are looked at: a subset of a dataset with a transform that has a generator.
_DEPTH = 4
#: Entries of a container that may be objects with generators, as transforms are; more are samples.
_LONGEST = 64


@contextmanager
def as_they_were(*objects: Any) -> Iterator[None]:
    """Restore, at the end of the block, the attributes of these objects and of the objects in their attributes, and the
    states of their random generators (of torch, Python and numpy). Contents of containers are not restored, and
    containers of more than `_LONGEST` entries are not searched for generators."""
    found = dict[int, Any]()
    for value in objects:
        _collect(value, found, _DEPTH)
    attributes = [(value, dict(vars(value))) for value in found.values() if hasattr(value, "__dict__")]
    states = [state for value in found.values() if (state := _state(value)) is not None]
    try:
        yield
    finally:
        for value, before in attributes:
            now = vars(value)
            for name in [name for name in now if name not in before]:
                del now[name]
            now.update(before)
        for give_back in states:
            give_back()


def _collect(value: Any, found: dict[int, Any], depth: int) -> None:
    """``value`` and what it holds, by id, where it has attributes or random numbers of its own."""
    if id(value) in found or isinstance(value, (type, ModuleType, torch.nn.Module, torch.Tensor)):
        return
    if isinstance(value, (list, tuple, dict)):
        for one in (value.values() if isinstance(value, dict) else value) if len(value) <= _LONGEST else ():
            _collect(one, found, depth)
        return
    held = [getattr(value, "__self__", None)]
    if isinstance(value, partial):
        held += [value.func, *value.args, *value.keywords.values()]
    if isinstance(getattr(value, "__dict__", None), dict):
        held += vars(value).values()
    elif _state(value) is None and held == [None]:
        return
    found[id(value)] = value
    if depth:
        for one in held:
            _collect(one, found, depth - 1)


def _state(generator: Any) -> Callable[[], Any] | None:
    """A function that gives the generator its present state back; None: it is no generator."""
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    return None


__all__ = ["as_they_were"]
