"""Expert dispatch (expert parallelism): tokens and experts are sharded over one axis; rows are sent to the ranks of
their experts and back.

How many rows there are of each expert depends on the data: ranks exchange these numbers first, and the host waits for
them. Rows are sent in the order of their experts, so that the numbers tell the expert of each row that arrives.
"""

from __future__ import annotations

import torch

from autoparallel.kernels import groups
from autoparallel.kernels.collectives import exchanged_rows, rows_exchanged_together
from autoparallel.layout import shards
from autoparallel.ops.routed_experts import body_of, routed_experts


def dispatched_experts(body: str, tokens: torch.Tensor, ids: torch.Tensor, by_row: list[torch.Tensor],
                       weights: list[torch.Tensor], first: int = 0, *, axes: tuple[str, ...]) -> torch.Tensor:
    """`ops.routed_experts` of this rank's tokens over all experts; each rank holds the weights of a shard of experts.

    ``tokens`` [t, ...], ``ids`` [t * k] the expert of each row, ``by_row`` tensors with one row per id, ``weights`` the
    shard's. ``axes``: the one mesh axis. Returns [t * k, ...], rows in the order of ``ids``.
    """
    (name,) = axes
    axis = groups.current(name)
    lengths = shards(body_of(body).num_experts, axis.size)
    own = lengths[axis.rank]
    _, order = torch.sort(ids, stable=True)
    counts = torch.bincount(ids, minlength=sum(lengths))
    theirs = exchanged_rows(counts, axis, [own] * axis.size, lengths)
    by_rank = torch.stack([part.sum() for part in counts.split(lengths)]), theirs.view(axis.size, own).sum(1)
    sent, received = torch.stack(by_rank).tolist()
    each = max(1, ids.shape[0] // max(1, tokens.shape[0]))
    rows, *row_values = rows_exchanged_together(
        [tokens[order // each], *(value[order] for value in by_row)], axis, received, sent)
    experts = torch.arange(first, first + own, device=ids.device).repeat(axis.size)
    experts = torch.repeat_interleave(experts, theirs, output_size=sum(received))
    made = routed_experts(body, rows, experts, row_values, weights, first)
    back = exchanged_rows(made, axis, sent, received)
    return torch.zeros_like(back).index_put((order,), back)  # (`index_copy` would save ``back``)
