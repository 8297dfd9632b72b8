"""Interprets an operator graph op by op, for values that a step needs before its first micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.utils._pytree as pytree

from autoparallel.capture import OpGraph, Ref
from autoparallel.capture.graph import on_device
from autoparallel.capture.numbers import with_values
from autoparallel.errors import InputError
from autoparallel.kernels.numbers import call_numbers


def values_of(graph: OpGraph, wanted: Iterable[Ref], known: Mapping[Ref, torch.Tensor], device: torch.device
              ) -> dict[Ref, torch.Tensor]:
    """The values ``wanted`` with all intermediate ones, computed from ``known``, which must have the placeholders
    needed (else InputError)."""
    found = dict(known)
    needed: set[int] = set()
    stack = [ref for ref in wanted if ref not in found]
    while stack:
        node = graph.nodes[stack.pop().node]
        if node.kind != "op":
            raise InputError(f"{node} is not known")
        if node.index not in needed:
            needed.add(node.index)
            stack.extend(ref for ref in node.inputs if ref not in found)
    for index in sorted(needed):
        node = graph.nodes[index]
        given = with_values((node.args, dict(node.kwargs)), call_numbers())
        args, kwargs = pytree.tree_map_only(Ref, found.__getitem__, given)
        made = node.target(*args, **on_device(node.target, kwargs, device))
        for output, value in enumerate(made if isinstance(made, (tuple, list)) else (made,)):
            found[Ref(index, output)] = value
    return found
