"""Attributes in which forward leaves tensors (``self.penalty = y.square().mean()``), as extra outputs of the program
after forward's own.

The first hook after forward appends their values to its return value, so that torch.export traces them; `take` splits
the two again. Only tensors, and lists, tuples and dicts of them, are kept (`Dependencies.left` has all names).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

#: Structures in which tensors are kept, and what else may be in them.
_CONTAINERS = (list, tuple, dict)
_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True)
class Left:
    """An attribute ``name`` of the module ``path``: its value has the structure ``spec``, and its leaves are the
    program's outputs from number ``first`` on."""

    path: str
    name: str
    spec: pytree.TreeSpec
    first: int


def can_be_returned(value: Any) -> bool:
    """Whether a value is a traced tensor, or a structure of such and plain values."""
    leaves, spec = pytree.tree_flatten(value)
    return (any(type(leaf) is FakeTensor for leaf in leaves) and _is_plain(spec)
            and all(type(leaf) in (FakeTensor, *_PLAIN) for leaf in leaves))


def _is_plain(spec: pytree.TreeSpec) -> bool:
    return spec.is_leaf() or (spec.type in _CONTAINERS and all(map(_is_plain, spec.children())))


def take(program: ExportedProgram, given: tuple[tuple[str, str], ...], kept: Mapping[str, tuple[str, ...]]
         ) -> tuple[pytree.TreeSpec, tuple[Left, ...]]:
    """The structure of what forward returns, and the attributes that the program keeps: those of ``given``, which the
    hook has added in this order, that are among the ``kept``, by module path. Others are taken out of the graph."""
    spec = program.call_spec.out_spec
    if not given:
        return spec, ()
    returned, added = spec.children()
    found, first, gone, number = list[Left](), returned.num_leaves, set[int](), returned.num_leaves
    for (path, name), structure in zip(given, added.children(), strict=True):
        leaves = range(number, number := number + structure.num_leaves)
        if name in kept.get(path, ()):
            found.append(Left(path, name, structure, first))
            first += len(leaves)
        else:
            gone.update(leaves)
    _take_out(program, gone)
    return returned, tuple(found)


def _take_out(program: ExportedProgram, gone: set[int]) -> None:
    """Remove user outputs from the program's graph, by number."""
    output = program.graph.output_node()
    specs, values = program.graph_signature.output_specs, output.args[0]
    users = iter(range(len(specs)))
    stays = [spec.kind is not OutputKind.USER_OUTPUT or next(users) not in gone for spec in specs]
    output.args = (tuple(value for value, stay in zip(values, stays, strict=True) if stay),)
    specs[:] = [spec for spec, stay in zip(specs, stays, strict=True) if stay]


__all__ = ["Left", "can_be_returned", "take"]
