"""The loss among a program's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.utils._pytree as pytree

from autoparallel.capture.graph import OpGraph, Ref


def loss_output(graph: OpGraph) -> int | None:
    """The number of the loss output: the only output, or the one named ``loss``, or the first; None if it is not a
    scalar."""
    numbers = _numbered(graph.out_spec)
    found = numbers if isinstance(numbers, int) else getattr(numbers, "loss", None)
    if found is None and isinstance(numbers, Mapping):
        found = numbers.get("loss")
    if found is None and isinstance(numbers, (tuple, list)) and numbers:
        found = numbers[0]
    if not isinstance(found, int) or not isinstance(value := graph.outputs[found], Ref):
        return None
    return found if graph.meta(value).shape == () else None


def _numbered(spec: pytree.TreeSpec) -> Any:
    """The output structure with output numbers for tensors, and None for nested structures (caches cannot hold
    numbers)."""
    if spec.is_leaf():
        return 0
    values: list[int | None] = []
    start = 0
    for child in spec.children():
        values.append(start if child.is_leaf() else None)
        start += child.num_leaves
    assert spec.type is not None
    return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(values, spec.context)
