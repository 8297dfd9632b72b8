"""Strategies that are not the op itself on pieces: vocabulary-parallel embedding and cross-entropy."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from autoparallel.lower.collectives import all_reduce_tensor, redistribute
from autoparallel.runtime import groups


def vocabulary_embedding(
    weight: torch.Tensor, ids: torch.Tensor, padding_idx: int = -1, *, start: int
) -> torch.Tensor:
    """Rows of ids that lie in this rank's piece of the vocabulary, zeros for the rest: a summand of the embedding.

    ``weight``: [piece, hidden], whose first row is row ``start`` of the whole table.
    """
    own = (ids >= start) & (ids < start + weight.shape[0])
    rows = F.embedding((ids - start).masked_fill(~own, 0), weight)
    if padding_idx >= 0:  # that row gets no gradient
        rows = torch.where((ids == padding_idx).unsqueeze(-1), rows.detach(), rows)
    return rows * own.unsqueeze(-1).to(rows.dtype)


def class_cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, *, start: int, axes: tuple[str, ...]
) -> torch.Tensor:
    """Summed cross-entropy of logits [n, piece of the classes] cut over ``axes``; target [n]; the same on every rank.

    Exchanges three numbers per target: maximum, sum of exponentials, the target's own logit.
    """
    x = logits.float()
    top = x.detach().amax(dim=1)
    for name in axes:
        top = all_reduce_tensor(top, groups.current(name), "max")
    place = target - start
    own = (place >= 0) & (place < logits.shape[1])
    exponentials = torch.exp(x - top.unsqueeze(1)).sum(dim=1)
    picked = x.gather(1, place.masked_fill(~own, 0).unsqueeze(1)).squeeze(1) * own
    for name in axes:
        exponentials = redistribute(exponentials, name, "P", "I")
        picked = redistribute(picked, name, "P", "I")
    losses = torch.log(exponentials) + top - picked
    return torch.where(target != ignore_index, losses, torch.zeros_like(losses)).sum().to(logits.dtype)
