"""State of any objects (schedulers, loaders, averaged copies, records of losses) in a checkpoint.

DCP reads the entries that the reader names. An object that has just been made may name fewer than were saved, or lists
and tensors of other lengths: so the structure of what was saved is saved too, and says what is to be read.
"""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autoparallel.errors import InputError
from autoparallel.runtime.failing import reached
from autoparallel.runtime.inputs import digest, hash_of

_LOG = logging.getLogger("autoparallel")
#: Entries of an object in a checkpoint.
STRUCTURE, TENSORS = "autoparallel_structure", "tensors"
Path = tuple[Any, ...]


@dataclass(frozen=True)
class _Tensor:
    """Stands for a tensor in a structure. ``ranks``: of its mesh; () of a plain tensor, with a ``digest`` of it."""

    name: str
    ranks: tuple[int, ...]
    digest: int


def packed(name: str, state: Any) -> dict[str, Any]:
    """An object's state for DCP, with what only some ranks have of it (stages of a pipeline). All ranks call this.

    Warns if ranks have different values, of which the first rank's are saved. Raises InputError for values that cannot
    be pickled, and for tensors by number on several stages, which would have one name.
    """
    tensors: dict[str, torch.Tensor] = {}
    mine, failure = _apart(state, tensors), ""
    try:
        text = pickle.dumps(mine)
    except Exception as error:
        text, failure = b"", f"{type(error).__name__}: {error}"
    found: list[Any] = [None] * dist.get_world_size()
    with reached():
        dist.all_gather_object(found, (hash_of(text), failure))
        if failures := [(rank, why) for rank, (_, why) in enumerate(found) if why]:
            raise InputError(f"the state of {name} cannot be saved on rank {failures[0][0]}: {failures[0][1]}")
        if any(one != found[0] for one in found):
            dist.all_gather_object(found, text)
            mine = _merged(name, [pickle.loads(one) for one in found])
    return {STRUCTURE: pickle.dumps(mine), TENSORS: tensors}


def to_read(state: Any, structure: Any, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors by name for what is saved: the object's own where they fit, else new ones, whole. ``saved``: DCP's
    metadata of them."""
    own: dict[str, torch.Tensor] = {}
    _apart(state, own)
    asked = {}
    for one in _tensors_of(structure):
        value, entry = own.get(one.name), saved[one.name]
        fits = value is not None and tuple(value.shape) == tuple(entry.size) and value.dtype == entry.properties.dtype
        asked[one.name] = value if fits and value is not None else torch.zeros(
            entry.size, dtype=entry.properties.dtype, device=None if value is None else value.device)
    return asked


def of_this_rank(state: Any, structure: Any) -> Any:
    """The structure that was saved, less what only other ranks' objects have (other stages of a pipeline)."""
    mine = set(_paths(state))
    found: list[Any] = [None] * dist.get_world_size()
    with reached():
        dist.all_gather_object(found, hash_of(sorted(map(repr, mine))))
        if all(one == found[0] for one in found):
            return structure
        dist.all_gather_object(found, mine)
    others = set().union(*found) - mine

    def less(value: Any, path: Path) -> Any:
        if not isinstance(value, dict):
            return value
        kept = copy.copy(value)
        for key in value:
            if (*path, key) in others:
                del kept[key]
            else:
                kept[key] = less(value[key], (*path, key))
        return kept

    return less(structure, ())


def unpacked(structure: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state that was saved."""
    return _mapped(structure, lambda value, _: tensors[value.name] if isinstance(value, _Tensor) else value)


def _apart(state: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The state with a `_Tensor` in place of each tensor, which is put into ``tensors``."""

    def taken(value: Any, path: Path) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        name = "".join(f"[{key!r}]" for key in path)
        tensors[name] = value = value.detach()
        if isinstance(value, DTensor):
            return _Tensor(name, tuple(value.device_mesh.mesh.flatten().tolist()), 0)
        return _Tensor(name, (), int(digest(value)) if value.layout == torch.strided and not value.is_meta else 0)

    return _mapped(state, taken)


def _mapped(value: Any, change: Callable[[Any, Path], Any], path: Path = ()) -> Any:
    """Dicts, lists and tuples (and their subclasses) anew, with ``change(leaf, path)`` for each leaf."""
    if isinstance(value, dict):
        made: Any = copy.copy(value)        # of its class, with its attributes
        for key in value:
            made[key] = _mapped(value[key], change, (*path, key))
        return made
    if type(value) is list or isinstance(value, tuple):
        parts = [_mapped(part, change, (*path, number)) for number, part in enumerate(value)]
        return parts if type(value) is list else value._make(parts) if hasattr(value, "_make") else tuple(parts)
    return change(value, path)


def _merged(name: str, found: list[Any]) -> Any:
    """One structure of all ranks': dicts with all keys, else the first rank's values."""
    made, different = found[0], set[str]()
    for rank, theirs in enumerate(found[1:], start=1):
        made = _joined(name, made, theirs, (), different, rank)
    if different and dist.get_rank() == 0:
        _LOG.warning("%s differs between ranks in %s: the checkpoint has the first rank's, which all ranks load", name,
                     ", ".join(sorted(different)))
    return made


def _joined(name: str, one: Any, other: Any, path: Path, different: set[str], rank: int) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        made = copy.copy(one)
        for key in other:
            made[key] = _joined(name, one[key], other[key], (*path, key), different, rank) if key in one else other[key]
        return made
    if isinstance(one, _Tensor) and isinstance(other, _Tensor) and one.ranks != other.ranks and any(
            isinstance(key, int) for key in path):
        raise InputError(f"{name} has tensors by number, {one.name} on rank 0 and on rank {rank} those of another "
                         "stage of the pipeline: they would have one name. Give the optimizer itself, or an object "
                         "that has them by the parameters' names")
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        for number, (mine, theirs) in enumerate(zip(one, other, strict=False)):
            _joined(name, mine, theirs, (*path, number), different, rank)
        if len(one) == len(other):
            return one
    same = one == other if isinstance(one, _Tensor) else pickle.dumps(one) == pickle.dumps(other)
    if not same and not (isinstance(one, _Tensor) and one.ranks):
        different.add("".join(f"[{key!r}]" for key in path) or "its value")
    return one


def _tensors_of(structure: Any) -> Iterator[_Tensor]:
    found: list[_Tensor] = []
    _mapped(structure, lambda value, _: found.append(value) if isinstance(value, _Tensor) else None)
    yield from found


def _paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Paths of all entries of dicts."""
    for key in value if isinstance(value, dict) else ():
        yield (*path, key)
        yield from _paths(value[key], (*path, key))


__all__ = ["STRUCTURE", "TENSORS", "of_this_rank", "packed", "to_read", "unpacked"]
