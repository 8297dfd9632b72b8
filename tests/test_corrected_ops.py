"""Ops of DTensors on a parallel module's mesh that torch computes wrongly: results and gradients are the whole's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import prune

import autoparallel
from autoparallel.errors import InputError
from autoparallel.runtime.hints import add_hint_of_rows, add_hints
from tests.support.ranks import mesh_of

Op = Callable[..., Any]
X = torch.linspace(-3, 3, 35).view(5, 7).sin() + torch.eye(5, 7)
IMAGES = torch.linspace(-4, 4, 120).view(3, 2, 4, 5).sin()
FILTERS, BIAS = torch.linspace(-1, 1, 54).view(3, 2, 3, 3).cos(), torch.linspace(1, 2, 3)
OPS: dict[str, tuple[Op, tuple[Tensor, ...]]] = {
    "sum so far": (lambda x: x.cumsum(-1) + x.cumsum(-2), (X,)),
    "product so far": (lambda x: x.detach().cumprod(-1) + x.detach().cumprod(-2), (X,)),
    "log of sums": (lambda x: x.logcumsumexp(-1) + x.logcumsumexp(-2), (X,)),
    "reductions of all dims": (lambda x: x.sum([], keepdim=True) + x.mean([], True) + x.std([], keepdim=True)
                               + torch.linalg.vector_norm(x, dim=[]) + x.var([]) + x.nansum([]), (X,)),
    "largest of all": (lambda x: x.amax(), (X,)), "smallest of all": (lambda x: (-x).amin(), (X,)),
    "largest norms": (lambda x: torch.linalg.vector_norm(x, float("inf")), (X,)),
    "largest of all, that keeps dims": (lambda x: x.amax([], keepdim=True) - (x > 0).sum([], keepdim=True), (X,)),
    "logs of sums that keep dims": (lambda x: x - x.logsumexp(0, keepdim=True) + x.logsumexp((0, -1), True), (X,)),
    "log of sums over no dim, which are all": (lambda x: x.logsumexp((), keepdim=True), (X,)),
    "determinant of columns": (lambda x: torch.linalg.det(x[:, :5]), (X,)),
    "log of determinant": (lambda x: torch.linalg.slogdet(x[:, 1:6])[1], (X,)),
    "determinant of the transposed": (lambda x: torch.linalg.det(x[:, :5].T), (X,)),
    "pooled image": (lambda x: F.adaptive_avg_pool2d(x, (3, 4)), (IMAGES[:, 0],)),
    "shortened rows": (lambda x: x.detach().renorm(2, 0, 1.5) + x.detach().clone().renorm_(1, -1, 2), (X,)),
    "norms in place": (lambda x: x.detach().norm(dim=0).clamp_(min=1.7) + x.sum(0).sub_(1).relu_(), (X,)),
    "selected": (lambda x: x.select(-1, 2) + x.select(-1, 0), (X,)),
    "selected of one row a rank": (lambda x: x.select(-1, 2), (X[:2],)),
    "distances": (lambda x, y: torch.cdist(x, y) + torch.cdist(x, y, 1), (X, X[:3] + 1)),
    "distances of samples": (torch.cdist, (IMAGES[:, 0], IMAGES[:, 1])),
    "distances of samples to the same rows": (torch.cdist, (IMAGES[:, 0], IMAGES[0, 1])),
    "distances of many rows": (torch.cdist, (X.repeat(6, 1) + torch.arange(30)[:, None], X)),
    "weight norm": (lambda v, g: torch._weight_norm(v, g, 0), (X, X[:, :1].abs() + 1)),
    "weight norm of columns": (lambda v, g: torch._weight_norm(v, g, 1), (X, X[:1].abs() + 1)),
    "convolution": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (IMAGES, FILTERS, BIAS)),
    "transposed convolution": (lambda x, w, b: F.conv_transpose2d(x, w.transpose(0, 1), b, 2), (IMAGES, FILTERS, BIAS)),
    "convolution of a sequence": (lambda x, w: F.conv1d(x, w, stride=2), (IMAGES[:, :, 0], FILTERS[:, :, 0])),
}
INTEGERS: dict[str, Op] = {
    "left": lambda n: (n << 2) + n.sum(0) + (n.sum(0) << 1), "right": lambda n: (n >> 1) - (n.sum() >> 2),
    "by each": lambda n: n.sum(0) << n.abs().sum(0) % 3, "in place": lambda n: (n + 1).__ilshift__(1),
}


def shards(value: Tensor, mesh: Any, dim: int | None) -> Any:
    """Sharded along a dim, or whole (None)."""
    placement = Replicate() if dim is None else Shard(min(dim, value.dim() - 1))
    return distribute_tensor(value, mesh, [placement], src_data_rank=None).detach()


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def compare(dims: tuple[int | None, ...]) -> None:
    """Each argument sharded along each of the dims; shards are unequal."""
    mesh = autoparallel.compile(nn.Linear(2, 2), mesh_of(2), example_inputs=(torch.ones(2, 2),)).mesh
    for name, (function, values) in OPS.items():
        expected = [value.clone().requires_grad_() for value in values]
        one = function(*expected)
        weights = torch.linspace(1, 2, one.numel()).view(one.shape)
        if one.requires_grad:
            (one * weights).sum().backward()
        for laid in product(dims, repeat=len(values)):
            ours = [shards(value, mesh, dim).requires_grad_() for value, dim in zip(values, laid, strict=True)]
            found = whole(function(*ours))
            pairs = [(found, one)]
            if one.requires_grad:
                (found * weights).sum().backward()
                pairs += [(whole(a.grad), b.grad) for a, b in zip(ours, expected, strict=True)]
            for a, b in pairs:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=lambda text, k=(name, laid): f"{k}: {text}")


@pytest.mark.parametrize("dims", [(None, 0), (1, 3)])
def test_results_and_gradients_are_those_of_the_whole(ranks: Any, dims: tuple[int | None, ...]) -> None:
    """Scans along dims counted from the end, determinants of selections, convolutions of shards, weight norm."""
    ranks(2).run(compare, dims)


def shift() -> None:
    mesh = autoparallel.compile(nn.Linear(2, 2), mesh_of(2), example_inputs=(torch.ones(2, 2),)).mesh
    numbers = (X * 9).int()
    for function in INTEGERS.values():
        for dim in (0, 1, None):
            torch.testing.assert_close(whole(function(shards(numbers, mesh, dim))), function(numbers))


def test_shifted_bits_are_those_of_the_whole(ranks: Any) -> None:
    ranks(2).run(shift)


def convolve_summands() -> None:
    """The bias counts once."""
    mesh = autoparallel.compile(nn.Linear(2, 2), mesh_of(2), example_inputs=(torch.ones(2, 2),)).mesh
    images = DTensor.from_local(IMAGES * (0.3 if mesh.get_rank() else 0.7), mesh, [Partial()], run_check=False)
    found = F.conv2d(images, shards(FILTERS, mesh, None), shards(BIAS, mesh, None))
    torch.testing.assert_close(whole(found), F.conv2d(IMAGES, FILTERS, BIAS))


def test_a_convolution_of_summands_adds_its_bias_once(ranks: Any) -> None:
    ranks(2).run(convolve_summands)


@pytest.mark.parametrize(("error", "hint"), [
    (RuntimeError("aten.add.Tensor got mixed torch.Tensor and DTensor, need to"), 'outputs="whole"'),
    (RuntimeError("While copying the parameter, an exception occurred : ('aten.copy_.default got mixed torch.Tensor "
                  "and DTensor, need to"), "parallel.load_state_dict("),
    (NotImplementedError("Operator aten.histc does not have a sharding strategy registered."), "value.full_tensor()"),
    (RuntimeError("as_strided not supported with DTensor"), "value.full_tensor()"),
    (RuntimeError("('Attempted to unbind along the sharded dimension 0. ', 'It cannot be"), "value.full_tensor()"),
    (RuntimeError("Cannot flatten unevenly sharded tensor: dimension 0 (size 7)"), 'outputs="whole"'),
    (RuntimeError("aten.nonzero.default\n\nSharding propagation failed for aten.index.Tensor("), "value.full_tensor()"),
    (RuntimeError("in-place operations that require placement changes are not supported."), "value.copy_("),
    (RuntimeError("Attempted to access the data pointer on an invalid python storage."), "parallel.save_pretrained("),
    (RuntimeError("The tensor has a non-zero number, but its data is not allocated yet."), "torch.stack("),
    (RuntimeError("trying to differentiate twice a function that was marked with @once_differentiable"), "baseline="),
])
def test_a_script_that_torch_ends_is_told_what_to_write(monkeypatch: pytest.MonkeyPatch, capsys: Any, error: Exception,
                                                         hint: str) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    add_hints.__wrapped__()
    sys.excepthook(type(error), error, None)
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("loss", [
    lambda x, y: nn.functional.cross_entropy(x, y), lambda x, y: x - y[:, None],
    lambda x, y: nn.functional.binary_cross_entropy_with_logits(x, y[:, None].expand(4, 8).float())])
def test_a_loss_of_all_rows_with_the_targets_of_one_rank_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Any,
                                                                   loss: Any) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    add_hint_of_rows.__wrapped__()
    with pytest.raises((RuntimeError, ValueError)) as raised:
        loss(torch.zeros(8, 8), torch.zeros(4, dtype=torch.int64))
    sys.excepthook(raised.type, raised.value, None)
    assert "x, y = parallel.shard_batch((x, y))" in capsys.readouterr().err


def write_over_summands() -> None:
    """Where a view has the same memory, it is refused, or both are written."""
    mesh = autoparallel.compile(nn.Linear(2, 2), mesh_of(2), example_inputs=(torch.ones(2, 2),)).mesh
    sums = shards(X, mesh, 0).sum(0)
    view = sums[2:5]
    with pytest.raises(RuntimeError, match="in-place operations that require placement changes"):
        sums.clamp_(max=0.5)
    sums.mul_(2)
    torch.testing.assert_close(whole(view), X.sum(0)[2:5] * 2)
    del view
    torch.testing.assert_close(whole(sums.clamp_(max=0.5)), (X.sum(0) * 2).clamp(max=0.5))


def test_summands_are_added_up_before_they_are_written_over(ranks: Any) -> None:
    ranks(2).run(write_over_summands)


def prune_shards() -> None:
    """At the next call: it takes the weight for another parameter and a product of it."""
    parallel = autoparallel.compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), mesh_of(2), baseline="fsdp",
                                    zero_stage=3, example_inputs=(torch.ones(4, 4),))
    prune.l1_unstructured(parallel.get_submodule("0"), "weight", 0.5)
    with pytest.raises(InputError, match=r"0\.weight is gone .*\n.*change the model \(prune .*\) before it is"):
        parallel(torch.ones(4, 4))


def test_pruning_after_compile_is_refused(ranks: Any) -> None:
    ranks(2).run(prune_shards)


def write_into_a_plain_loss() -> str:
    """A DTensor added in place to a plain scalar, as the script is told of it."""
    parallel = autoparallel.compile(nn.Linear(2, 2), mesh_of(2), example_inputs=(torch.ones(2, 2),))
    loss, told = torch.ones(2, requires_grad=True).sum(), StringIO()
    with pytest.raises(AssertionError) as raised, redirect_stderr(told):
        loss += parallel.weight.square().sum()
    with redirect_stderr(told):
        sys.excepthook(raised.type, raised.value, raised.tb)
    return told.getvalue()


def test_a_dtensor_written_into_a_plain_loss_is_told(ranks: Any) -> None:
    for told in ranks(2).run(write_into_a_plain_loss):
        assert "Write loss = loss + term in place of loss += term" in told


def leave() -> None:
    mesh = autoparallel.compile(nn.Linear(2, 2), mesh_of(2), example_inputs=(torch.ones(2, 2),)).mesh
    for method in ("numpy", "tolist"):
        with pytest.raises(InputError, match=rf"{method}\(\) is asked of .*Shard.*\n  Write value.full_tensor"):
            getattr(shards(X, mesh, 0), method)()
    with pytest.raises(RuntimeError, match="its data is not allocated yet"):  # (what to write is told: see above)
        torch.tensor([shards(X, mesh, 0).norm()])


def test_arrays_and_lists_of_shards_are_refused(ranks: Any) -> None:
    ranks(2).run(leave)
