"""`autoparallel.bound`: rows that the data pick, padded to a bound; the same with and without autoparallel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoparallel
from autoparallel.capture import capture
from autoparallel.errors import BoundError, CaptureError, InputError
from tests.support.ranks import mesh_of

BATCH, LENGTH, WIDTH, MOST = 8, 6, 4, 5


class MaskedTokens(nn.Module):
    """Of each sample some tokens go through a layer more; the loss is of these, and of the sequence they are put to."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.more, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        picked = autoparallel.bound(x[..., 0] > 0, at_most=MOST)
        rows = self.more(picked.take(hidden)).tanh()
        losses = F.cross_entropy(self.head(rows).flatten(0, -2), picked.places.flatten() % 3, reduction="none")
        mean = (losses * picked.valid.flatten()).sum() / picked.valid.sum()
        return mean + picked.put(hidden, rows).square().mean()


def of_picked_rows(m: MaskedTokens, x: Tensor) -> Tensor:
    """The same, as torch has it."""
    hidden, mask = m.embed(x), x[..., 0] > 0
    rows, out = m.more(hidden[mask]).tanh(), hidden.clone()
    out[mask] = rows
    return F.cross_entropy(m.head(rows), mask.nonzero()[:, -1] % 3) + out.square().mean()


def given(seed: int) -> Tensor:
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))
    x[0, :, 0] = -1.0  # of one sample none
    x[:, 0, 0] = -1.0  # and of none all
    return x


@pytest.mark.parametrize("x", [given(0), given(1), given(0)[1]], ids=["batch", "another", "sample"])
def test_item_20_a_bound_gives_what_the_mask_gives(x: Tensor) -> None:
    torch.manual_seed(0)
    model = MaskedTokens()
    both = [model(x), of_picked_rows(model, x)]
    torch.testing.assert_close(*both)
    torch.testing.assert_close(*(torch.autograd.grad(y, list(model.parameters())) for y in both))


def test_places_are_in_order_and_padded() -> None:
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    picked = autoparallel.bound(mask, at_most=4)
    assert picked.places.tolist() == [[0, 2, 0, 0], [0, 0, 0, 0], [0, 1, 2, 0]]
    assert picked.valid.sum(-1).tolist() == [2, 0, 3] and picked.valid.shape == (3, 4)
    x = torch.arange(6.0).reshape(3, 1, 2).expand(3, 3, 2) + 1
    assert picked.take(x)[0].tolist() == [[1, 2], [1, 2], [0, 0], [0, 0]]
    rows = torch.full((3, 4, 2), float("nan"))
    rows[picked.valid] = 7.0
    assert torch.equal(picked.put(x, rows), torch.where(mask[..., None], 7.0, x))


def test_wrong_arguments_are_refused_and_nothing_is_dropped() -> None:
    mask = torch.tensor([True, True, False])
    with pytest.raises(BoundError, match=r"(?s)2 true elements .* at most 1\n  Give a larger at_most="):
        autoparallel.bound(mask, at_most=1)
    for wrong, most in ((mask.int(), 1), ([True], 1), (torch.tensor(True), 1), (mask, 0), (mask, True), (mask, 2**31)):
        with pytest.raises(InputError, match=r"bound takes a bool tensor|at_most="):
            autoparallel.bound(wrong, at_most=most)  # type: ignore[arg-type]
    picked = autoparallel.bound(mask, at_most=2)
    with pytest.raises(InputError, match=r"x has shape \[4\]: required is \[3\]"):
        picked.take(torch.ones(4))
    with pytest.raises(InputError, match=r"rows has shape \[3\]: required is \[2\]"):
        picked.put(torch.ones(3), torch.ones(3))
    with pytest.raises(InputError, match=r"do not fit x of torch.float32 \[3, 2\]"):
        picked.put(torch.ones(3, 2), torch.ones(2, 1))


def test_item_20_refusals_name_the_bound() -> None:
    class Sorted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0].sort().values[0] * x

    with pytest.raises(CaptureError, match=r"a shape depends on the data(?s:.*)autoparallel.bound\(mask, at_most=n\)"):
        capture(Sorted(), (torch.randn(8),))


def errors_on_ranks(options: dict[str, Any]) -> float:
    torch.manual_seed(0)
    model = MaskedTokens()
    parallel = autoparallel.compile(copy.deepcopy(model), mesh_of(2, 2), example_inputs=(given(0),), **options)
    found = []
    for seed in (0, 1):
        model.zero_grad()
        parallel.zero_grad()
        expected = model(given(seed))
        expected.backward()
        loss = parallel.step(given(seed))
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        found.append(float((loss - expected).detach().abs()))
        for theirs, ours in zip(model.parameters(), parallel.parameters(), strict=True):
            assert theirs.grad is not None and isinstance(ours.grad, DTensor)
            found.append(float((theirs.grad - ours.grad.full_tensor()).abs().max() / theirs.grad.abs().max()))
    return max(found)


@pytest.mark.parametrize("options", [
    {"baseline": "ddp"}, {"micro_batches": 2}, pytest.param({"backend": "inductor"}, marks=pytest.mark.slow),
], ids=lambda options: next(iter(options)))
def test_item_20_a_bound_on_ranks(ranks: Any, options: dict[str, Any]) -> None:
    assert max(ranks(4).run(errors_on_ranks, options, timeout_s=150)) < 1e-5


def too_many() -> str:
    parallel = autoparallel.compile(MaskedTokens(), mesh_of(2), baseline="ddp", example_inputs=(given(0),))
    x = given(0)
    x[-1, :, 0] = 1.0  # of the last sample, which the last rank has
    try:
        parallel(x)
    except (BoundError, autoparallel.errors.PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_more_than_the_bound_is_an_error_on_all_ranks(ranks: Any) -> None:
    pool = ranks(2)
    try:
        first, last = pool.run(too_many, timeout_s=100)
    finally:
        pool.stop()  # its process groups are closed
    assert last.startswith("BoundError: a mask of shape") and "6 true elements" in last
    assert first.startswith("PeerError: rank 1 failed: BoundError: a mask") and "6 true elements" in first
