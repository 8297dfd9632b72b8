"""Expert dispatch (expert parallelism): tokens and experts are sharded over one axis; rows are sent to the ranks of
their experts and back.

The row counts depend on the data: ranks exchange them first, and the host waits for them.
"""

from __future__ import annotations

import itertools

import torch

from autoparallel.kernels import groups
from autoparallel.kernels.collectives import exchanged_rows
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
    ends = torch.tensor(list(itertools.accumulate(lengths)), device=ids.device)
    owner, order = torch.sort(torch.searchsorted(ends, ids, right=True), stable=True)
    counts = torch.bincount(owner, minlength=axis.size)
    each = [1] * axis.size
    sent, received = counts.tolist(), exchanged_rows(counts, axis, each, each).tolist()
    rows = exchanged_rows(tokens[order // (ids.shape[0] // tokens.shape[0])], axis, received, sent)
    theirs = exchanged_rows(ids[order], axis, received, sent)
    row_values = [exchanged_rows(value[order], axis, received, sent) for value in by_row]
    made = routed_experts(body, rows, theirs, row_values, weights, first)
    back = exchanged_rows(made, axis, sent, received)
    return torch.zeros_like(back).index_put((order,), back)  # (`index_copy` would save ``back``)
