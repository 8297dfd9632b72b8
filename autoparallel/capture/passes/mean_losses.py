"""Losses that average, written as sums over counts: a sum is a summand per rank, and no local size enters a count."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph

from autoparallel.capture.passes.compositions import Rewrite
from autoparallel.capture.passes.editing import Node, argument, emit

aten = torch.ops.aten


def _reduced(graph: Graph, node: Node, reduction: int) -> Node:
    """The loss op with another reduction: none (0) or sum (2)."""
    names = [declared.name for declared in node.target._schema.arguments]
    positional = names[: max(len(node.args), names.index("reduction") + 1)]
    values = {name: reduction if name == "reduction" else argument(node, name) for name in positional}
    rest = {name: value for name, value in node.kwargs.items() if name not in values}
    return emit(graph, node, node.target, *values.values(), **rest)


def mean_loss(graph: Graph, node: Node) -> Node | None:
    """loss(x, y, reduction="mean") -> loss(x, y, reduction="sum") / n, where n is the number of elements that
    reduction="none" has. None, that is no change, for other reductions."""
    if argument(node, "reduction") != 1:
        return None
    count = _reduced(graph, node, 0).meta["val"].numel()
    return emit(graph, node, aten.mul.Tensor, _reduced(graph, node, 2),
                1.0 / count if count else math.nan)


def mean_cross_entropy(graph: Graph, node: Node) -> Node | None:
    """Mean over the targets that count -> sum / count, both of which may be summed over ranks."""
    target = argument(node, "target")
    if target.meta["val"].is_floating_point():
        return mean_loss(graph, node)
    if argument(node, "reduction") != 1:
        return None
    total, weight = _reduced(graph, node, 2), argument(node, "weight")
    counts = emit(graph, node, aten.ne.Scalar, target, argument(node, "ignore_index"))
    if weight is None:
        counts = emit(graph, node, aten.to.dtype, counts, torch.float32)
    else:  # a target counts as much as its class weighs
        place = emit(graph, node, aten.where.ScalarOther, counts, target, 0)
        weighed = emit(graph, node, aten.index.Tensor, emit(graph, node, aten.detach.default, weight), [place])
        counts = emit(graph, node, aten.where.ScalarOther, counts, weighed, 0.0)
    counts = emit(graph, node, aten.sum.dim_IntList, counts, list(range(target.meta["val"].dim())), False)
    return emit(graph, node, aten.div.Tensor, total, counts)


LOSSES = (aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
          aten.kl_div.default, aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
          aten.soft_margin_loss.default, aten.poisson_nll_loss.default, aten.hinge_embedding_loss.default,
          aten.cosine_embedding_loss.default, aten.triplet_margin_loss.default, aten.margin_ranking_loss.default,
          aten.multi_margin_loss.default, aten.multilabel_margin_loss.default)
AVERAGED_LOSSES: dict[Any, Rewrite] = {
    aten.cross_entropy_loss.default: mean_cross_entropy, aten.nll_loss_nd.default: mean_cross_entropy,
    **dict.fromkeys(LOSSES, mean_loss),
}
