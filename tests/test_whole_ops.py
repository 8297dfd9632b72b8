"""Ops without a rule of torch's for DTensors, on a parallel module's mesh: results and gradients are the whole's."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import autoparallel
from autoparallel.errors import InputError
from autoparallel.runtime import gathered
from tests.support.ranks import mesh_of
from tests.support.tiers import slow

Op = Callable[..., Any]
X = torch.linspace(-3, 3, 35).view(5, 7).sin() + torch.eye(5, 7) * 0.5
Y, TOKENS = torch.tensor([0, 1, 2, 0, 1]), torch.linspace(-2, 2, 105).view(5, 3, 7).sin()
OPS: dict[str, tuple[Op, tuple[Tensor, ...]]] = {
    "trace": (lambda x: (x.T @ x).trace() + x.trace(), (X,)),
    "products": (lambda x: x.prod(0).sum() + x.prod(1).square().sum(), (X,)),
    "products so far": (lambda x: x.cumprod(0).sum() + x.cumprod(-1).square().sum(), (X,)),
    "largest so far": (lambda x: x.cummax(0).values.sum() + x.cummin(1).values.square().sum(), (X,)),
    "taken": (lambda x: x.take(torch.tensor([0, 5, 9, 30, 5])).square().sum(), (X,)),
    "distances of all pairs": (lambda x: F.pdist(x).sum(), (X,)),
    "windows": (lambda x: x.unfold(1, 3, 1).square().mean() + x.unfold(0, 3, 2).pow(3).mean(), (X,)),
    "parts of which one is read": (lambda x: x.split([2, 3])[0].square().sum() + x.split(3, 1)[1].sum(), (X,)),
    "scaled by the batch": (lambda x: ((x - x.mean(0)) / (x.std(0) + 1e-6)).pow(3).mean() + x.std(), (X,)),
    "norms of several kinds": (lambda x: torch.stack([x.norm(), x.sum(), x.max(), x.norm(1)]).square().sum()
                               + torch.cat([x.norm(dim=0), x.sum(0), x.amax(0)]).square().sum(), (X,)),
    "preferences": (lambda x: -F.logsigmoid(x[:4:2] - x[1:4:2]).mean(), (X,)),
    "margins": (lambda x, y: F.multi_margin_loss(x, y), (X, Y)),
    "bilinear": (lambda x, w: F.bilinear(x, x, w).square().sum(), (X, torch.linspace(0, 1, 98).view(2, 7, 7))),
    "sequences": (lambda x, y: F.ctc_loss(x.log_softmax(-1).transpose(0, 1), y[:, None] + 1, y * 0 + 3, y * 0 + 1),
                  (TOKENS, Y)),
    "all tokens of unequal rows": (lambda x, y: F.cross_entropy(x.view(-1, 7), y[:, None].expand(5, 3).reshape(-1))
                                   + x.flatten().logsumexp(0) + x.prod() * 1e9, (TOKENS, Y)),
    "places in order": (lambda x: F.hardtanh(x, -0.5, 0.5).pow(3).sum() + F.prelu(x, x[0, :1].abs()).sum(), (X,)),
    "normed rows": (lambda x: F.group_norm(x, 1).pow(3).sum(), (X,)),
    "means of windows": (lambda x: F.avg_pool1d(x[None], 2).pow(3).sum(), (X,)),
    "places in a list": (lambda x: (torch.bucketize(x.detach(), torch.linspace(-1, 1, 5)) * x).sum(), (X,)),
    "any": (lambda x: (x > 0).any() * 1.0 + ((x > 1).any(0) * 2 * x).sum() + (x > 1).any(1).sum() * x.sum(), (X,)),
}
PLACES, ROWS = torch.tensor([0, 3, 4]), torch.linspace(0, 1, 21).view(3, 7)
COLUMN = torch.arange(5)[:, None]
OPS |= {
    "quantiles": (lambda x: x.quantile(0.3) + x.quantile(torch.tensor([0.1, 0.5]), dim=1).square().sum()
                  + x.nanquantile(0.5, dim=0, keepdim=True).sum(), (X,)),
    "shapes in place": (lambda x: (turned(x) @ x).square().sum(), (X,)),
    "filled places": (lambda x: x.clone().index_fill_(0, PLACES, 2.0).square().sum()
                      + x.index_fill(1, PLACES, torch.tensor(2.0)).pow(3).sum(), (X,)),
    "put": (lambda x: x.clone().put_(PLACES * 5, ROWS[:, 3]).square().sum()
            + x.clone().put_(PLACES * 0, ROWS[:, 3], accumulate=True).pow(3).sum(), (X,)),
    "rows put": (lambda x: x.clone().index_put_((PLACES,), ROWS).square().sum()
                 + x.clone().index_put_((PLACES * 0,), ROWS, accumulate=True).pow(3).sum()
                 + x.clone().index_put_((X > 0,), torch.tensor(5.0)).pow(3).sum(), (X,)),
    "rows added": (lambda x: x.clone().index_add_(0, PLACES, ROWS).square().sum()
                   + x.index_add(0, PLACES, ROWS, alpha=2).pow(3).sum(), (X,)),
    "rows copied": (lambda x: x.clone().index_copy_(0, PLACES, ROWS).square().sum()
                    + x.index_reduce(0, PLACES, ROWS, "amax").pow(3).sum(), (X,)),
    "scattered": (lambda x: x.clone().scatter_(1, COLUMN, 1.0).square().sum()
                  + x.clone().scatter_(1, COLUMN, COLUMN * 0.1).pow(3).sum()
                  + x.scatter_add(1, COLUMN, COLUMN * 0.1).pow(3).sum()
                  + x.scatter_reduce(1, COLUMN, COLUMN * 0.1, "amax").pow(3).sum(), (X,)),
    "gathered": (lambda x: x.gather(1, COLUMN).square().sum() + x.index_select(0, PLACES).pow(3).sum()
                 + x.repeat_interleave(torch.tensor([1, 0, 2, 1, 1]), 0).pow(3).sum(), (X,)),
    "masked": (lambda x: x.masked_fill(X > 0, 2.0).square().sum() + x.masked_select(X > 0).pow(3).sum(), (X,)),
    "counted": (lambda x: (x > 0).nonzero().sum() * x.sum() + (x > 0).long().flatten().bincount()[1] * x.sum(), (X,)),
    "blocks and mirrors": (lambda x: torch.block_diag(x, x).square().sum()
                           + F.pad(x, (1, 1), mode="reflect").pow(3).sum(), (X,)),
}
OPS["copied lists"] = (lambda x: copied(x).sum() * x.sum(), (X,))
LAYOUTS = (Shard(0), Shard(1), Replicate(), Partial())


def copied(value: Any) -> Any:
    copy = torch.zeros_like(value)
    torch._foreach_copy_([copy], [value.detach() * 2])
    return copy


def turned(value: Any) -> Any:
    """The transpose, by ops that change a shape in place."""
    copy = value.clone()
    for method, dims in (("unsqueeze_", (1,)), ("transpose_", (0, 2)), ("squeeze_", (1,))):
        getattr(copy, method)(*dims)
    return copy


def laid(value: Tensor, mesh: Any, placement: Any) -> Any:
    if isinstance(placement, Partial):
        return DTensor.from_local(value * (0.3 if mesh.get_rank() else 0.7), mesh, [placement], run_check=False)
    return distribute_tensor(value, mesh, [placement], src_data_rank=None)


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def compare(names: tuple[str, ...], layouts: tuple[Any, ...]) -> None:
    """In each layout of the first argument, of unequal shards; summands come from an op, as they do in scripts."""
    mesh = autoparallel.compile(nn.Linear(2, 2), mesh_of(2), example_inputs=(torch.ones(2, 2),)).mesh
    for name, placement in product(names, layouts):
        function, (value, *others) = OPS[name]
        expected, ours = value.clone().requires_grad_(), laid(value, mesh, placement).detach().requires_grad_()
        rows = placement if placement == Shard(0) else Replicate()
        found = function(ours * 1, *(laid(v, mesh, rows if len(v) == len(value) else Replicate()) for v in others))
        one = function(expected, *others)
        for made in (found, one):
            made.backward()
        for a, b in ((found, one), (ours.grad, expected.grad)):
            torch.testing.assert_close(whole(a), b, rtol=1e-4, atol=1e-4,
                                       msg=lambda text, k=(name, placement): f"{k}: {text}")


@pytest.mark.parametrize("layouts", [LAYOUTS[:1], slow(LAYOUTS[1:])])
def test_results_and_gradients_are_those_of_the_whole(ranks: Any, layouts: tuple[Any, ...]) -> None:
    ranks(2).run(compare, tuple(OPS), layouts)


def differ() -> None:
    """Plain places, which a script gives, are of the whole. (`squeeze_` changed the shape of shards only, and losses of
    [8, 1] and [8] were those of all pairs.)"""
    mesh = autoparallel.compile(nn.Linear(2, 2), mesh_of(2), example_inputs=(torch.ones(2, 2),)).mesh
    with pytest.raises(InputError, match="give the same on all ranks"):
        laid(X, mesh, Shard(0)).take(torch.tensor([mesh.get_rank()]))
    with pytest.raises(RuntimeError, match=r"got mixed torch.Tensor and DTensor"):    # outside of backward, as before
        torch.cat([laid(X, mesh, Shard(0)), X])
    for op in (lambda x: x.gather(1, COLUMN[:3] * 0), lambda x: x.scatter_(1, COLUMN[:3] * 0, 1.0),    # a rank's rows
               lambda x: torch.zeros(5, 7).index_add_(0, PLACES, x[:3])):
        with pytest.raises(RuntimeError, match=r"got mixed torch.Tensor and DTensor"):
            op(laid(X, mesh, Shard(0)))
    with pytest.raises(InputError, match=r"squeeze_ is asked of a DTensor \[5, 1\].*is a view.*\n  Write value"):
        laid(X[:, :1], mesh, Shard(0)).view(5, 1).squeeze_(-1)


def test_plain_places_that_differ_and_squeeze_in_place_of_a_view_are_refused(ranks: Any) -> None:
    ranks(2).run(differ)


def told() -> list[str]:
    """Warnings of rank 0: of tensors of 1 MiB and more that are gathered, one for each op."""
    mesh = autoparallel.compile(nn.Linear(2, 2), mesh_of(2), example_inputs=(torch.ones(2, 2),)).mesh
    large, rows = torch.ones(513, 1024), torch.ones(512, 1024)
    found: list[str] = []
    gathered._told.clear()
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())     # type: ignore[method-assign]
    logging.getLogger("autoparallel").addHandler(handler)
    for value in (X, large):
        laid(value, mesh, Replicate()).take(torch.tensor([1]))          # each rank has all of it
        laid(value, mesh, Shard(0)).take(torch.tensor([1]))
        laid(value, mesh, Shard(0)).view(-1)                            # of unequal shards
        laid(value, mesh, Shard(0))[torch.tensor([1])]
    laid(rows, mesh, Shard(0)).take(torch.tensor([1]))                  # told already
    laid(rows, mesh, Shard(0)).view(-1)
    logging.getLogger("autoparallel").removeHandler(handler)
    return found


def test_large_tensors_that_are_gathered_are_told_with_their_size_and_line(ranks: Any) -> None:
    first, second = ranks(2).run(told)
    assert second == []
    assert [text.split(" ")[0] for text in first] == ["take", "view", "index"]
    assert re.search(r"take of a DTensor \[513, 1024\] with .*2 MiB.*\n  at .*test_whole_ops.py:\d+ in told: "
                     r"laid\(value, mesh, Shard\(0\)\)\.take", first[0])
