"""Expert dispatch (expert parallelism): tokens and experts are sharded over one axis; rows are sent to the ranks of
their experts and back.

How many rows there are of each expert depends on the data: ranks exchange these numbers first, and the host waits for
them. Rows are sent in the order of their experts, so that the numbers tell the expert of each row that arrives.

    rows = send_rows(...)          backward: awaits the gradients of rows
    made = run_experts(rows, ...)  awaits the rows; backward: awaits the gradients of results, sends those of rows
    take_results(made)             awaits the results; backward: sends their gradients

What runs between these calls runs while rows, or results, are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from autoparallel.kernels import groups
from autoparallel.kernels.async_communication import Begun, Gradients, Values, begin, end
from autoparallel.kernels.collectives import begin_rows_exchanged, rows_exchanged_together
from autoparallel.kernels.groups import Axis
from autoparallel.layout import shards
from autoparallel.ops.routed_experts import body_of, routed_experts


@dataclass(frozen=True)
class Rows:
    """Rows on their way to other ranks (`async_communication.Sending`); their gradients go back. ``received``,
    ``sent``: how many from and to each rank."""

    axis: Axis
    received: Sequence[int]
    sent: Sequence[int]

    def forward(self, values: Values) -> Callable[[], Values]:
        return begin_rows_exchanged(values, self.axis, self.received, self.sent)

    def backward(self, gradients: Gradients) -> Callable[[], Gradients]:
        there = [g for g in gradients if g is not None]
        finish, given = begin_rows_exchanged(there, self.axis, self.sent, self.received), [g is None for g in gradients]

        def finished() -> Gradients:
            made = iter(finish())
            return tuple(None if none else next(made) for none in given)

        return finished

    def backward_at_once(self, gradients: Gradients) -> Gradients:
        made = iter(rows_exchanged_together([g for g in gradients if g is not None], self.axis, self.sent,
                                            self.received))
        return tuple(None if g is None else next(made) for g in gradients)


@dataclass(frozen=True)
class SentRows:
    """Result of `send_rows`: rows on their way to their experts. ``order``: the sorted rows among those of the tokens;
    ``experts``: of each row that arrives."""

    begun: Begun
    there: Rows
    order: torch.Tensor
    experts: torch.Tensor


@dataclass(frozen=True)
class SentResults:
    """Result of `run_experts`: results on their way to the ranks of their tokens."""

    begun: Begun
    order: torch.Tensor


def send_rows(body: str, tokens: torch.Tensor, ids: torch.Tensor, by_row: list[torch.Tensor], first: int = 0, *,
              axes: tuple[str, ...]) -> SentRows:
    """Begin to send rows to the ranks of their experts; arguments as of `dispatched_experts`."""
    (name,) = axes
    axis = groups.current(name)
    lengths = shards(body_of(body).num_experts, axis.size)
    own = lengths[axis.rank]
    counts = torch.bincount(ids, minlength=sum(lengths))
    finish = begin_rows_exchanged([counts], axis, [own] * axis.size, lengths)
    _, order = torch.sort(ids, stable=True)    # and the rows in this order, while the numbers travel
    each = max(1, ids.shape[0] // max(1, tokens.shape[0]))
    rows = tokens[order // each], *(value[order] for value in by_row)
    (theirs,) = finish()
    by_rank = torch.stack([part.sum() for part in counts.split(lengths)]), theirs.view(axis.size, own).sum(1)
    sent, received = torch.stack(by_rank).tolist()
    there = Rows(axis, received, sent)
    begun = begin(there, *rows)
    experts = torch.arange(first, first + own, device=ids.device).repeat(axis.size)
    return SentRows(begun, there, order, torch.repeat_interleave(experts, theirs, output_size=sum(received)))


def run_experts(body: str, sent: SentRows, weights: list[torch.Tensor], first: int = 0) -> SentResults:
    """Await the rows, compute their experts, and begin to send the results back."""
    rows, *by_row = end(sent.begun)
    made = routed_experts(body, rows, sent.experts, by_row, weights, first)
    there = sent.there
    return SentResults(begin(Rows(there.axis, there.sent, there.received), made), sent.order)


def take_results(sent: SentResults) -> torch.Tensor:
    """Await the results, and put them in the order of the tokens' rows."""
    (back,) = end(sent.begun)
    return torch.zeros_like(back).index_put((sent.order,), back)  # (`index_copy` would save ``back``)


def dispatched_experts(body: str, tokens: torch.Tensor, ids: torch.Tensor, by_row: list[torch.Tensor],
                       weights: list[torch.Tensor], first: int = 0, *, axes: tuple[str, ...]) -> torch.Tensor:
    """`ops.routed_experts` of this rank's tokens over all experts; each rank holds the weights of a shard of experts.

    ``tokens`` [t, ...], ``ids`` [t * k] the expert of each row, ``by_row`` tensors with one row per id, ``weights`` the
    shard's, which begins at expert ``first``. ``axes``: the one mesh axis. Returns [t * k, ...], rows in the order of
    ``ids``.
    """
    return take_results(run_experts(body, send_rows(body, tokens, ids, by_row, first, axes=axes), weights, first))


__all__ = ["Rows", "SentResults", "SentRows", "dispatched_experts", "run_experts", "send_rows", "take_results"]
