"""Lookups in tables of embeddings; bags of embeddings as one op with one result: ``weight[v, d], ids -> y[b, d]``."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

SUM, MEAN, MAX = 0, 1, 2
_library = torch.library.Library("autoparallel", "FRAGMENT")
_library.define("embedding_bag(Tensor weight, Tensor ids, Tensor? weights, Tensor? offsets, int mode, bool last, "
                "int? padding_idx, bool sparse=False) -> Tensor")


def _embedding_bag(weight: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, offsets: torch.Tensor | None,
                   mode: int, last: bool, padding_idx: int | None, sparse: bool = False) -> torch.Tensor:
    return F.embedding_bag(ids, weight, offsets, mode=("sum", "mean", "max")[mode], per_sample_weights=weights,
                           include_last_offset=last, padding_idx=padding_idx, sparse=sparse)


_library.impl("embedding_bag", _embedding_bag, "CompositeImplicitAutograd")
embedding_bag = torch.ops.autoparallel.embedding_bag.default
#: The ops that look up rows of a table, which is their first operand.
LOOKUPS = frozenset({torch.ops.aten.embedding.default, embedding_bag})
