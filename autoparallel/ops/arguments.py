"""Arguments of ops: by name, and for a shard those that are sizes or numbers of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoparallel.layout.shapes import Shape

aten = torch.ops.aten


#: Position of the argument that is the result's shape.
SIZE_ARGUMENT = {aten.reshape.default: 1, aten.expand.default: 1, aten.full.default: 0, aten.zeros.default: 0,
                 aten.ones.default: 0}
#: Ops whose channels (dim 1 of the result) are cut together with their groups: position of the number of groups.
GROUPS_ARGUMENT = {aten.conv1d.default: 6, aten.conv2d.default: 6, aten.conv3d.default: 6, aten.group_norm.default: 1,
                   aten.conv_transpose1d.default: 6, aten.conv_transpose2d.input: 6, aten.conv_transpose3d.input: 6}


def arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """An op's arguments by schema name, defaults included."""
    declared = op._schema.arguments
    given = dict(zip((a.name for a in declared), args, strict=False))
    return {**{a.name: a.default_value for a in declared}, **given, **kwargs}


def fitted(target: Any, args: Sequence[Any], made: Shape, whole: Shape) -> list[Any]:
    """The op's arguments for a shard: sizes become the local result shape ``made``, groups are scaled by
    ``made[1] / whole[1]``. ``whole``: the global result shape."""
    local = list(args)
    if target in SIZE_ARGUMENT:
        local[SIZE_ARGUMENT[target]] = list(made)
    position = GROUPS_ARGUMENT.get(target, len(local))
    if position < len(local) and local[position] > 1:
        local[position] = local[position] * made[1] // whole[1]
    return local
