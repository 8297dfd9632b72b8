"""Random generators that datasets, samplers and collators keep in attributes or further within, or that their functions
read: found, seeded and restored."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from inspect import getclosurevars
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

#: How many objects within one another are looked at: a subset of a dataset with a transform that has a generator.
_DEPTH = 4
#: Entries of a container that may be objects with generators, as transforms are; more are samples.
_LONGEST = 64
#: Kinds of random generators.
_KINDS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)


@contextmanager
def as_they_were(*objects: Any) -> Iterator[None]:
    """Restore, at the end of the block, the attributes of these objects and of the objects in their attributes, and the
    states of their random generators (of torch, Python and numpy). Contents of containers are not restored, and
    containers of more than `_LONGEST` entries are not searched for generators."""
    found = _held_by(objects)
    attributes = [(value, dict(vars(value))) for value in found if hasattr(value, "__dict__")]
    states = [restoring(value) for value in found if isinstance(value, _KINDS)]
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


def generators_of(*objects: Any) -> list[Any]:
    """The random generators (of torch, Python and numpy) in these objects, as far as `as_they_were` searches."""
    return [value for value in _held_by(objects) if isinstance(value, _KINDS)]


def _held_by(objects: tuple[Any, ...]) -> list[Any]:
    found = dict[int, Any]()
    for value in objects:
        _collect(value, found, _DEPTH)
    return list(found.values())


def _collect(value: Any, found: dict[int, Any], depth: int) -> None:
    """``value`` and what it holds, by id, where it has attributes or random numbers of its own."""
    if id(value) in found or isinstance(value, (type, ModuleType, torch.nn.Module, torch.Tensor)):
        return
    if isinstance(value, (list, tuple, dict)):
        for one in (value.values() if isinstance(value, dict) else value) if len(value) <= _LONGEST else ():
            _collect(one, found, depth)
        return
    held = [value.__self__ if isinstance(value, (MethodType, BuiltinMethodType)) else None]
    if isinstance(value, partial):
        held += [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        with suppress(ValueError):  # a variable of the function around it that has no value yet
            read = getclosurevars(value)
            held += [*read.nonlocals.values(), *(one for one in read.globals.values() if isinstance(one, _KINDS))]
    if isinstance(getattr(value, "__dict__", None), dict):
        held += vars(value).values()
    elif not isinstance(value, _KINDS) and held == [None]:
        return
    found[id(value)] = value
    if depth:
        for one in held:
            _collect(one, found, depth - 1)


def seed_generator(generator: Any, seed: int) -> None:
    """Let a generator draw from ``seed``."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed % 2**32 if isinstance(generator, np.random.RandomState) else seed)


def restoring(generator: Any) -> Callable[[], Any]:
    """A function that gives a generator its present state back."""
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return partial(generator.set_state, generator.get_state())
    return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)


__all__ = ["as_they_were", "generators_of", "restoring", "seed_generator"]
