"""Rows picked by their values: loops over experts, masked losses and masked writes compute what they say."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoparallel
from autoparallel.capture import Ref, capture
from autoparallel.errors import CaptureError
from autoparallel.runtime.interpret import values_of
from tests.support.ranks import mesh_of
from tests.support.tiers import with_slow

TOKENS, WIDTH, EXPERTS, CHOSEN = 10, 6, 4, 2


class Model(nn.Module):
    """Tokens, and scores of experts for each; the function has the experts."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(inplace=True), nn.Linear(8, WIDTH))
                                     for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, 5)
        self.bias = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, scores: Tensor) -> Any:
        return self.function(self, x, scores)


FUNCTIONS: dict[str, Callable[..., Any]] = {}


def function(made: Callable[..., Any]) -> Callable[..., Any]:
    FUNCTIONS[made.__name__] = made
    return made


def routed(scores: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = scores.softmax(-1).topk(CHOSEN, dim=-1)
    return weights / weights.sum(-1, keepdim=True), ids


@function
def mixtral(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    """As transformers wrote it."""
    weights, ids = routed(scores)
    final = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
    for number in range(EXPERTS):
        idx, top_x = torch.where(mask[number])
        if top_x.shape[0] == 0:
            continue
        current = x[None, top_x].reshape(-1, WIDTH)
        current = m.experts[number](current) * weights[top_x, idx, None]
        final.index_add_(0, top_x, current.to(x.dtype))
    return final


@function
def of_those_hit(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    """As dbrx has it, with an expert more than there are."""
    weights, ids = routed(scores)
    final = torch.zeros_like(x)
    with torch.no_grad():
        mask = F.one_hot(ids, num_classes=EXPERTS + 1).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    stacked = torch.stack([e[0].weight for e in m.experts])
    for number in hit:
        number = number[0]
        if number == EXPERTS:
            continue
        with torch.no_grad():
            idx, top_x = torch.where(mask[number])
        states = m.experts[number](x[top_x]) + F.linear(x[top_x], stacked[number])[:, :WIDTH]
        final.index_add_(0, top_x, states * weights[top_x, idx, None])
    return final


@function
def litgpts_mixtral(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    """As litgpt writes it: in place, to places that come once."""
    weights, ids = routed(scores)
    masks = (ids.unsqueeze(-1) == torch.arange(EXPERTS)).permute(2, 0, 1)
    y = torch.zeros_like(x)
    for mask, expert in zip(masks, m.experts, strict=True):
        token_idx, expert_idx = torch.where(mask)
        y[token_idx] += weights[token_idx, expert_idx, None] * expert(x[token_idx])
    return y


@function
def twice(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    idx, _ = torch.where(scores > 0)
    out = x.clone()
    out[idx] = x[idx] * m.bias
    return out


@function
def twice_in_place(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    token, number = torch.where(scores > 0)
    out[token] += x[token] * scores[token, number, None] * m.bias
    return out


@function
def by_mask(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    weights, ids = routed(scores)
    out = torch.zeros_like(x)
    for k in range(CHOSEN):
        for number, expert in enumerate(m.experts):
            mask = ids[:, k] == number
            if mask.any():
                out[mask] += weights[mask, k].unsqueeze(-1) * expert(x[mask])
    return out


@function
def by_number(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    choice = scores.argmax(-1)
    out = x.clone()
    for number in range(EXPERTS):
        idx = (choice == number).nonzero().squeeze(-1)
        if idx.numel() > 0:
            rows = x.index_select(0, idx)
            out[idx] = m.experts[number](rows) * scores[idx, number].sigmoid()[:, None]
    return out


@function
def of_two_dims(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    x, scores = x.view(2, 5, WIDTH), scores.view(2, 5, EXPERTS)
    out = torch.zeros_like(x)
    for number in range(EXPERTS):
        mask = scores.argmax(-1) == number
        out[mask] = m.experts[number](x[mask])
    return out


@function
def skipped(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number in range(EXPERTS):
        mask = scores[:, number] > 0.5
        if not mask.any():
            continue
        out[mask] += m.experts[number](x[mask])
    return out


@function
def under_another_condition(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    """The rows are written only if some others are there."""
    out = x * m.bias
    if (scores[:, 0] > 1.0).any() and out is not None:
        mask = scores[:, 1] > 0
        out[mask] = m.head(x[mask])[:, :1] + m.bias
    return out


@function
def masked_loss(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    """Of masked tokens."""
    mask = scores[:, 0] > -0.5
    labels = torch.where(scores[:, 1] > -9, scores.argmax(-1), -100)
    return F.cross_entropy(m.head(x)[mask], labels[mask], label_smoothing=0.1)


@function
def means(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    mask = scores > 0
    rows = x[mask[:, 0]]
    return (F.mse_loss(m.head(rows), torch.ones(1, 5)) + (rows * m.bias).mean() + scores[mask].sum()
            + (rows @ m.head.weight.t()).softmax(dim=1).norm(dim=-1).sum() + scores.masked_select(mask).exp().mean())


@function
def written_in_place(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    """Rows that are read are copies."""
    h = x * m.bias
    rows = h[scores[:, 0] > 0]
    rows.mul_(2)
    rows += 1
    return h.sum() + rows.square().sum()


@function
def singular_elsewhere(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    """Of other rows gradients would be infinite, or no numbers."""
    weight = (scores[:, 0] * m.bias[0]).relu()
    hit, h = weight > 0, x * m.bias
    small = h.abs() < 0.5
    return ((h[hit] / weight[hit].unsqueeze(-1)).sum() + weight[hit].log().sum() + (m.bias[0] / weight[hit]).sum()
            + (1e3 * h[small]).clamp(max=5.0).exp().sum() + (h[small] * m.bias[0] + 2).rsqrt().sum())


@function
def singular_behind_parameters(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    """Whatever other rows were filled with, some function of it is singular: zero times infinity would be its gradient
    of the parameters that are before it."""
    hit, below, inner = scores[:, 0] > 0, x < 0, x[:, 0].abs() < 0.9
    distance = (m.head(x[hit]) - m.head(x.flip(0)[hit])).pow(2).sum(-1).sqrt()
    inside = x.sigmoid()[below] * m.bias[0]
    return (distance.sum() + (-x[below] * m.bias[1]).sqrt().sum() + (1 - inside).log().sum()
            + (x[inner][:, 0] * m.bias[2]).acos().sum() + m.head(x[hit]).std(dim=-1).sum())


@function
def places_out_of_range_elsewhere(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    labels = torch.where(scores[:, 0] > 0, scores.argmax(-1), -100)
    known = labels != -100
    named = F.embedding(labels[known], m.head.weight)
    likely = m.head(x)[known].log_softmax(-1).gather(1, labels[known].unsqueeze(1))
    return (F.one_hot(labels[known], EXPERTS) * scores[known]).sum() + (named * m.bias).sum() + likely.sum()


@function
def by_length(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    out = x * m.bias
    for number in range(EXPERTS):
        idx, = torch.where(scores.argmax(-1) == number)
        if not len(idx):
            continue
        out[idx] = m.experts[number](x[idx])
    mask = scores[:, 0] > 0
    rows = x[mask]
    if len(rows) > 3:
        out[mask] = m.experts[0](rows)
    return out


@function
def rows_of_rows(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    hit = scores[:, 0] > -0.5
    rows, labels = x[hit], scores.argmax(-1)[hit]
    other = labels != 1
    idx = hit.nonzero().squeeze(-1)
    return (F.cross_entropy(m.head(rows)[other], labels[other]) + F.nll_loss(m.head(rows).log_softmax(-1), labels)
            + m.head(x)[idx[scores[idx, 1] > 0]].square().sum())


@function
def side_by_side(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    """And sums along the rows, as of prototypes; and what asks whether rows are a tensor."""
    token, number = torch.where(scores > 0)
    rows = x[token]
    rows = rows * (isinstance(rows, Tensor) + torch.is_tensor(rows))
    pairs = torch.cat([rows * m.bias, scores[token, number, None]], dim=1)
    sums = torch.stack([m.head(x)[scores.argmax(-1) == n].sum(0) for n in range(EXPERTS)])
    hit = scores[:, 1] > 0.1
    even = F.kl_div((scores[hit] * m.bias[0]).log_softmax(-1), scores[hit].softmax(-1), reduction="batchmean")
    return pairs.square().mean(dim=0).sum() + sums.square().mean() + even


@function
def asked_twice(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    """The same tests of the same tensors pick the same rows."""
    labels, pad = scores.argmax(-1), scores[:, 0] > 0.5
    left = (m.head(x)[labels != 1] * x[labels != 1][:, :5]).mean()
    return F.cross_entropy(m.head(x)[~pad], labels[~pad]) + left + x[pad.long().bool()].sum()


@function
def places_in_one_tensor(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    """Places of two dims by `nonzero()`, whose number is asked for."""
    out, (weights, ids) = torch.zeros_like(x), routed(scores)
    for number, expert in enumerate(m.experts):
        places = (ids == number).nonzero()
        if places.numel() == 0:
            continue
        rows, kth = places.unbind(1)
        out.index_add_(0, places[:, 0], expert(x[rows]) * weights[rows, kth, None])
    return out


@function
def largest_of_some(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    """Of picked rows and others there is a largest, as of edges and loops."""
    rows = torch.cat([m.head(x)[scores[:, 0] > 0], m.head(x[:2])])
    return (rows / rows.max()).square().sum() + rows.min() * scores.sum()


def draws() -> list[tuple[Tensor, Tensor]]:
    """All experts are hit; some are not; one is."""
    g = torch.Generator().manual_seed(1)
    x, scores = torch.randn(TOKENS, WIDTH, generator=g), torch.randn(TOKENS, EXPERTS, generator=g)
    few, one = scores.clone(), torch.full_like(scores, -1.0)
    few[:, 2:] -= 9.0
    one[:, 1:3] = torch.tensor([2.0, 0.4])
    return [(x, scores), (x, few), (x.flip(0), one)]


@pytest.mark.parametrize("name", with_slow(
    FUNCTIONS, "litgpts_mixtral", "by_mask", "singular_behind_parameters", "by_length", "side_by_side", "asked_twice",
    "places_in_one_tensor", "largest_of_some", "by_number", "skipped", "places_out_of_range_elsewhere", "of_two_dims",
    "means", "twice"))
def test_rows_by_value(name: str) -> None:
    """Forward and gradients, on values that the trace did not see."""
    torch.manual_seed(0)
    model = Model(FUNCTIONS[name])
    graph = capture(model, draws()[0])
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **graph.constant_tensors}
    for inputs in draws():
        known = {Ref(n.index): inputs[int(n.path)] for n in graph.of_kind("input")}
        known |= {Ref(n.index): state[n.path] for kind in ("parameter", "buffer") for n in graph.of_kind(kind)}
        made = values_of(graph, graph.outputs, known, torch.device("cpu"))[graph.outputs[0]]
        expected = model(*inputs)
        torch.testing.assert_close(made, expected, equal_nan=True)  # a mean over no rows
        parameters = list(model.parameters())
        both = [torch.autograd.grad(y.square().sum(), parameters, allow_unused=True) for y in (made, expected)]
        for ours, theirs in zip(*both, strict=True):
            zeros = torch.zeros(())  # an expert that is not hit may have none
            if ours is None or theirs is None:
                ours, theirs = (zeros if g is None else g.sum() for g in (ours, theirs))
            torch.testing.assert_close(ours, theirs, equal_nan=True)


def counted(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    hits = 0
    for _ in (scores.sum(0) > 0).nonzero():
        hits += 1
    return x * hits


def added_up(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    total = x * m.bias
    for number in (scores.sum(0) > 0).nonzero():
        total = total + m.bias * int(number)
    return total


def numbered(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for place, number in enumerate((scores.sum(0) > 0).nonzero()):
        mask = scores.argmax(-1) == number
        out[mask] = x[mask] * place
    return out


def collected(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    found = []
    for number in (scores.sum(0) > 0).nonzero():
        found.append(m.bias * int(number))
    return torch.stack(found).sum() * x


def written_whole(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    if (scores > 0).any():
        out[0] = m.bias
    return out + x


def left_over(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number in (scores.sum(0) > 0).nonzero():
        rows = m.experts[number](x)
        out[scores.argmax(-1) == 0] = rows[scores.argmax(-1) == 0]
    return rows + out


def across(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    return x[scores[:, 0] > 0].cumsum(0).sum()


def met(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    return (x[scores[:, 0] > 0] + x[scores[:, 1] > 0]).sum()


def contracted(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    mask = scores[:, 0] > 0
    return x[mask].t() @ x[mask]


def mask_written(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    mask = scores[:, 0] > 0
    rows = x[mask]
    mask[0] = True
    return rows.sum()


def largest(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    rows = x[scores[:, 0] > 0]
    return (rows / rows.max()).sum()


def written_in_part(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    rows = x[scores[:, 0] > 0]
    rows[rows[:, 0] > 0] -= 1
    return rows.sum()


def kept_in_a_list(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    """The function that is called in the branch has an effect beside its result."""
    losses = []

    def expert(number: int, rows: Tensor) -> Tensor:
        losses.append(m.bias.sum() * number)
        return m.experts[number](rows)

    out = torch.zeros_like(x)
    for number in range(EXPERTS):
        mask = scores.argmax(-1) == number
        if mask.any():
            out[mask] = expert(number, x[mask])
    return out + torch.stack(losses).sum()


def returned(m: Any, x: Tensor, scores: Tensor) -> Any:
    kept = []

    def expert(rows: Tensor) -> Tensor:
        kept.append(m.bias * 2)
        return rows * kept[-1]

    out, mask = torch.zeros_like(x), scores[:, 0] > 0
    if mask.any():
        out[mask] = expert(x[mask])
    return out, kept


def of_another_rank(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    out = torch.zeros(TOKENS, TOKENS)
    mask = scores[:, 0] > 0
    out[mask] = x[:, 0][mask]
    return out


def of_what_was_written(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    labels = scores.argmax(-1)
    rows = x[labels != 1]
    labels[:2] = 1
    return (rows * x[labels != 1]).sum()


def of_a_written_test(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    labels = scores.argmax(-1)
    rows, again = x[labels != 1], labels != 1
    again[:2] = False
    return (rows * x[again]).sum()


def columns(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    return x[:, x[0] > 0].sum()


@pytest.mark.parametrize("refused", with_slow(
    [counted, added_up, numbered, collected, written_whole, left_over, across, met, contracted, mask_written, largest,
     written_in_part, kept_in_a_list, of_another_rank, of_what_was_written, of_a_written_test, columns],
    counted, collected, written_whole, across, numbered, left_over, contracted, largest, kept_in_a_list,
    of_another_rank, of_what_was_written, columns))
def test_more_than_dynamic_rows_is_refused(refused: Any) -> None:
    with pytest.raises(CaptureError, match=rf"(?s)(the data|by the values|written to since).*test_ragged.py:\d+ in "
                                           rf"{refused.__name__}.*Write torch.where"):
        capture(Model(refused), draws()[0])


def test_tensors_of_a_branch_are_not_returned() -> None:
    with pytest.raises(CaptureError, match="Model returns what is made in lines that the data say whether to run"):
        capture(Model(returned), draws()[0])


def on_ranks(name: str) -> float:
    """The largest error of outputs and gradients on two ranks."""
    torch.manual_seed(0)
    model = Model(FUNCTIONS[name])
    parallel = autoparallel.compile(copy.deepcopy(model), mesh_of(2), baseline="tensor_parallel")
    errors = list[float]()
    for inputs in draws():
        expected, found = model(*inputs), parallel(*inputs)
        found = found.full_tensor() if isinstance(found, DTensor) else found
        errors.append(float((expected - found).abs().max()))
        for call in (expected, found):
            call.square().sum().backward()
        for theirs, ours in zip(model.parameters(), parallel.parameters(), strict=True):
            if theirs.grad is not None:
                assert isinstance(ours.grad, DTensor)
                error = (theirs.grad - ours.grad.full_tensor()).abs().max() / theirs.grad.abs().max().clamp(min=1e-6)
                errors.append(float(error))
            theirs.grad = ours.grad = None
    return max(errors)


@pytest.mark.ranks
def test_item_20_litgpts_mixtral_on_ranks(ranks: Any) -> None:
    assert max(ranks(2).run(on_ranks, "litgpts_mixtral", timeout_s=100)) < 1e-5
