"""Ops that AOTAutograd cannot trace, since shapes within them depend on data, or values that a trace would fix; and
recurrent layers."""

from __future__ import annotations

import torch
from torch.fx import Node as FxNode

from autoparallel.kernels import rng
from autoparallel.kernels.expert_dispatch import dispatched_experts, run_experts, send_rows, take_results
from autoparallel.kernels.numbers import with_numbers
from autoparallel.ops.ctc import ctc_losses
from autoparallel.ops.routed_experts import body_of, routed_experts

aten = torch.ops.aten
#: Not traced by torch.compile either.
RECURRENT = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
_TAGS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def _selects(index: object) -> bool:
    """Whether an index of ``x[index]`` is a mask, or may be one."""
    if not isinstance(index, FxNode):
        return False
    value = index.meta.get("val")
    return value is None or value.dtype in (torch.bool, torch.uint8)


def why_not_traced(node: FxNode) -> str | None:
    """Why a node cannot be part of a traced graph; None if it can."""
    op = node.args[0] if node.target is rng.random_op else node.target    # with dropout between its layers, or without
    if op in RECURRENT:
        return f"{op}, a recurrent layer, of which a trace has each step in time, or on CPUs lacks what backward needs"
    return why_data_decide(node)


def why_data_decide(node: FxNode) -> str | None:
    """Why the shapes or values within a node depend on the data, so that no trace and no recording holds for the next
    call; None if they do not."""
    if node.target in (dispatched_experts, send_rows, run_experts, take_results):
        return "dispatch of tokens to experts, whose number depends on the data"
    if node.target is with_numbers:
        return f"{node.args[0]} with a number argument, which each call brings"
    if node.target is routed_experts:
        body, weights = node.args[0], node.args[4]
        some = weights[0].meta["val"].shape[0] < body_of(str(body)).num_experts  # type: ignore[index,union-attr]
        return "experts of this rank, whose tokens' number depends on the data" if some else None
    if node.target is ctc_losses:
        return f"{node.target}, within which shapes depend on the lengths"
    if node.target is aten.index.Tensor and not any(map(_selects, node.args[1])):  # type: ignore[arg-type]
        return None    # rows by their numbers
    if any(tag in getattr(node.target, "tags", ()) for tag in _TAGS):
        return f"{node.target}, the shape of whose result depends on the data"
    return None
