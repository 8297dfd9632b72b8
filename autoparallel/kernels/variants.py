"""Strategies that are not the op itself on shards but functions of their own.

A variant is called with the op's arguments as local shards, with ``axes``, the names of the mesh axes that it is used
on, and with the further keywords that its `Variant` asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from autoparallel.kernels import groups
from autoparallel.kernels.collectives import all_reduce_tensor, redistribute
from autoparallel.kernels.expert_dispatch import dispatched_experts
from autoparallel.kernels.flash import grouped_attention, takes_groups
from autoparallel.kernels.halo import on_rows, on_windows
from autoparallel.kernels.linear_sections import cut_sections
from autoparallel.kernels.norm import batch_norm_of_shards, norm_of_shards
from autoparallel.kernels.ring import ring_attention
from autoparallel.kernels.softmax import places_of_shards, softmax_of_shards
from autoparallel.kernels.sparse_rows import local_ids, own_bags, own_ids, own_rows
from autoparallel.kernels.tracing import is_traced
from autoparallel.layout.shapes import served
from autoparallel.ops.embedding_bag import embedding_bag

_library = torch.library.Library("autoparallel", "FRAGMENT")


def vocabulary_embedding(
    weight: torch.Tensor, ids: torch.Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False,
    sparse: bool = False, *, start: int, length: int, axes: tuple[str, ...] = ()
) -> torch.Tensor:
    """Embedding of the ids in this rank's shard of the vocabulary, zeros for the others: a summand of the whole.

    ``weight``: [shard, hidden], its first row is row ``start`` of the whole table, of ``length`` rows. Returns
    [*ids, hidden].
    """
    if sparse:
        return own_rows(weight, ids, start, length, padding_idx)
    own = own_ids(ids, start, weight.shape[0])
    rows = F.embedding(local_ids(ids, own, start, length), weight)
    if padding_idx >= 0:  # that row gets no gradient
        rows = torch.where((ids == padding_idx).unsqueeze(-1), rows.detach(), rows)
    return rows * own.unsqueeze(-1).to(rows.dtype)


def vocabulary_bags(
    weight: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, offsets: torch.Tensor | None, mode: int,
    last: bool, padding_idx: int | None, sparse: bool = False, *, start: int, length: int, axes: tuple[str, ...] = ()
) -> torch.Tensor:
    """Embedding bags summed over the ids in this rank's shard of the vocabulary: a summand of the whole.

    ``weight``: [shard, hidden], its first row is row ``start`` of the whole table, of ``length`` rows. Returns
    [bags, hidden].
    """
    if sparse:
        return own_bags(weight, ids, weights, offsets, mode, last, padding_idx, start, length)
    own = own_ids(ids, start, weight.shape[0])
    if padding_idx is not None:
        own &= ids != padding_idx
    counted = own.to(weight.dtype) if weights is None else weights * own.to(weight.dtype)
    return embedding_bag(weight, local_ids(ids, own, start, length), counted, offsets, mode, last, None)


def class_cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, weight: None = None, reduction: int = 2, ignore_index: int = -100,
    *_: Any, start: int, length: int, axes: tuple[str, ...]
) -> torch.Tensor:
    """Summed cross-entropy of logits [n, shard of the classes], cut over ``axes``, with target [n]; equal on all ranks.

    The shard begins at class ``start`` of ``length``; targets that are no class fail, as those of the whole. Exchanges
    three numbers per target: the maximum, the sum of exponentials, the target's logit.
    """
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = x.detach().amax(dim=1)
    for name in axes:
        top = all_reduce_tensor(top, groups.current(name), "max")
    own, counts = own_ids(target, start, logits.shape[1]), target != ignore_index
    exponentials = torch.exp(x - top.unsqueeze(1)).sum(dim=1)
    column = local_ids(target, own, start, length).masked_fill(~counts, 0)
    rows = torch.arange(len(column), device=column.device)
    picked = x[rows, column].masked_fill(~own, 0)  # a gather would keep x for backward
    for name in axes:
        exponentials = redistribute(exponentials, name, "P", "I")
        picked = redistribute(picked, name, "P", "I")
    losses = torch.log(exponentials) + top - picked
    return torch.where(counts, losses, torch.zeros_like(losses)).sum().to(logits.dtype)


def causal_queries(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: None = None, dropout_p: float = 0.0,
    is_causal: bool = True, *, scale: float | None = None, enable_gqa: bool = False, start: int,
    axes: tuple[str, ...] = (),
) -> torch.Tensor:
    """Causal attention of a shard of queries, which begins at query ``start``, over all keys up to the shard's end."""
    seen = start + q.shape[2]
    k, v = k[:, :, :seen], v[:, :, :seen]
    mask: torch.Tensor
    if is_traced() or (q.shape[1] != k.shape[1] and not takes_groups(q, k, v)):
        mask = torch.ones(q.shape[2], seen, dtype=torch.bool, device=q.device).tril(start)
    else:
        with _disable_current_modes():  # recompute="selective" is a mode, under which torch cannot make its mask
            mask = causal_lower_right(q.shape[2], seen)
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
    return grouped_attention(q, k, v, mask, scale=scale)


def _heads_of_groups(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, shards: Sequence[int], axes: Sequence[str], attend: str = "",
    scale: float | None = None, enable_gqa: bool = True, start: int | None = None,
) -> torch.Tensor:
    """Attention of a shard of queries' heads, with those heads of keys and values that serve them.

    ``shards``: the first head of the shard and the number of all heads, of queries and of keys. ``k`` and ``v`` have
    all heads, or a shard with those that are needed. ``attend``: the variant that computes the
    attention where other axes are cut, with ``axes`` and ``start`` as its arguments ("": torch's attention).
    """
    first, heads, first_key, groups = shards
    found = served(first, q.shape[1], heads // groups)
    begin, end, common = min(found) - first_key, max(found) + 1 - first_key, math.gcd(*found.values())
    k, v = (x[:, begin:end] for x in (k, v))
    if len(set(found.values())) > 1:    # repeated as often as it takes that each serves as many
        times = [number // common for number in found.values()]
        k, v = (torch.cat([x[:, n : n + 1].expand(-1, m, -1, -1) for n, m in enumerate(times)], 1) for x in (k, v))
    if not attend:
        return grouped_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)
    rest = {"start": start} if start is not None else {}
    made: torch.Tensor = VARIANTS[attend].function(q, k, v, attn_mask, dropout_p, is_causal, scale=scale,
                                                   enable_gqa=True, axes=tuple(axes), **rest)
    return made


_library.define("heads_of_groups(Tensor q, Tensor k, Tensor v, Tensor? attn_mask=None, float dropout_p=0.0, "
                "bool is_causal=False, *, int[] shards, str[] axes, str attend=\"\", float? scale=None, "
                "bool enable_gqa=True, int? start=None) -> Tensor")
_library.impl("heads_of_groups", _heads_of_groups, "CompositeImplicitAutograd")
heads_of_groups = torch.ops.autoparallel.heads_of_groups.default


@dataclass(frozen=True)
class Variant:
    """The function of a variant, and the keywords that `emit` passes to it.

    ``start``: pass the global offset of the shard of this (operand, dim); dim None: the cut one. ``length``: and, as
    that, the dim's global length. ``shards``: pass, of the first two operands, the global offset of the
    shard and the global length, of this dim. ``runs``: called with ``attend``, the name of another variant that takes
    other axes, and the keywords of that. ``cuts``: pass ``op``, ``dims`` (the cut dim of each axis) and ``sizes`` (its
    global lengths in first operand and result)."""

    function: Callable[..., Any]
    start: tuple[int, int | None] | None = None
    length: bool = False
    cuts: bool = False
    shards: int | None = None
    runs: bool = False


VARIANTS = {
    "vocabulary": Variant(vocabulary_embedding, (0, 0), length=True),
    "vocabulary of bags": Variant(vocabulary_bags, (0, 0), length=True),
    "classes": Variant(class_cross_entropy, (0, 1), length=True),
    "queries": Variant(causal_queries, (0, 2)),
    "heads": Variant(heads_of_groups, shards=1, runs=True),
    "ring": Variant(ring_attention),
    "dispatch": Variant(dispatched_experts),
    "windows": Variant(on_windows, cuts=True),
    "sections": Variant(cut_sections),
    "rows": Variant(on_rows, cuts=True),
    "norms": Variant(norm_of_shards, cuts=True),
    "batch norm": Variant(batch_norm_of_shards, cuts=True),
    "softmax": Variant(softmax_of_shards, cuts=True),
    "places": Variant(places_of_shards, (0, None), cuts=True),
}
