"""Number arguments: one compiled form for all their values, which all ranks must agree on."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoparallel
from autoparallel.capture import capture, capture_for_any
from autoparallel.capture.any_numbers import is_same, with_values_in
from tests.support.ranks import RankError, mesh_of
from tests.support.tiers import slow


class Scaled(nn.Module):
    """A model with numbers in many places: factors, limits, exponents, blends."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16, dtype=dtype), nn.Linear(16, 4, dtype=dtype)

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0, heat: float = 1.0, count: int = 1,
                mode: str = "mean") -> Tensor:
        h = F.gelu(self.first(x) * scale).clamp(max=2 * heat)
        h = h.add(h.tanh(), alpha=scale) / (1 + heat ** 2)
        h = torch.where(h > scale / 10, h, scale / 10).masked_fill(h > 1e3, heat)
        made = self.last(h) / heat + count / 8 - 1 / count
        return ((made - y) ** 2).mean() * scale + (made.float() * heat).mean()


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(8, 6, generator=generator).to(dtype), torch.randn(8, 4, generator=generator).to(dtype))


#: Usual numbers, and those that a symbol is not trusted with.
VALUES = [*(0.1 * n for n in range(1, 10)), 1.0, 2, 0.0, -0.0, math.inf, math.nan, 1e-300, 1e300]


def run(model: nn.Module, call: Callable[..., Any], scale: Any, heat: Any, count: int, dtype: torch.dtype
        ) -> dict[str, Tensor]:
    """Loss and gradients of a call."""
    x, y = batch(dtype)
    loss = call(x, y, scale, heat=heat, count=count)
    if loss.requires_grad:
        loss.backward()
    found = {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}
    for p in model.parameters():
        p.grad = None
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}


def many_scales(options: dict[str, Any], by_step: bool, dtype: torch.dtype) -> tuple[int, list[float]]:
    """How many forms ten calls with other scales compile, and the largest error of each call."""
    torch.manual_seed(0)
    model = Scaled(dtype)
    parallel = autoparallel.compile(copy.deepcopy(model), mesh_of(2), **options)
    call = parallel.step if by_step else parallel
    errors = []
    for n in range(10):
        numbers = 0.1 + 0.2 * n, 1.5 - 0.1 * n, n + 1, dtype
        expected, found = run(model, model, *numbers), run(parallel, call, *numbers)
        errors.append(max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-6))
                          for a, b in ((expected[name], found[name]) for name in found)))
    return parallel._state.forms.compiled, errors


@pytest.mark.ranks
@pytest.mark.parametrize(("options", "by_step", "dtype"), [
    ({"baseline": "tensor_parallel"}, False, torch.float32),
    ({"baseline": "ddp"}, True, torch.bfloat16),
    ({"baseline": "ddp", "backend": "aot_eager"}, True, torch.float32),
    ({"pipeline_stages": 2, "micro_batches": 2, "recompute": "full"}, True, torch.float32),
], ids=["tensor_parallel", "bfloat16", "traced", "pipeline"])
def test_item_16_ten_scales_compile_one_program_more(ranks: Any, options: dict[str, Any], by_step: bool,
                                                     dtype: torch.dtype) -> None:
    for compiled, errors in ranks(2).run(many_scales, options, by_step, dtype, timeout_s=100):
        assert compiled == 2
        assert max(errors) < (1e-5 if dtype is torch.float32 else 0.05)


class Deciding(nn.Module):
    """A model that branches on one number, makes a size of another, and only computes with the third."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor, limit: float, rows: int, scale: float) -> Tensor:
        made = self.last(x) * scale
        return made[:rows] if limit > 1.0 else -made[:rows]


def decided() -> tuple[int, list[bool], list[str]]:
    """Forms, whether calls with all kinds of numbers are right, and what was told."""
    told = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("autoparallel")
    log.addHandler(handler)
    torch.manual_seed(0)
    model, x = Deciding(), torch.randn(8, 6)
    parallel = autoparallel.compile(copy.deepcopy(model), mesh_of(2), baseline="ddp")
    calls = [(0.5, 4, 1.0), (2.0, 4, 1.5), (2.0, 6, 2.5), (0.5, 4, 0.1), *((0.5, 4, value) for value in VALUES)]
    right = []
    for call in calls:
        made: Any = parallel(x, *call)
        whole = made.full_tensor() if hasattr(made, "full_tensor") else made
        right.append(torch.allclose(whole, model(x, *call), equal_nan=True))
    log.removeHandler(handler)
    return parallel._state.forms.compiled, right, told


@pytest.mark.ranks
def test_item_16_a_branch_on_a_number_keeps_a_call_form_for_each_value(ranks: Any) -> None:
    (forms, right, told), other = ranks(2).run(decided, timeout_s=100)
    assert all(right) and all(other[1])
    # (0.5, 4, 1.0), then with limit 2.0, with 6 rows, 0.5 again with any scale; 2, which is no float; 0.0, -0.0, inf,
    # NaN
    assert forms == other[0] == 4 + 1 + 4
    told = [line for line in told if "is compiled for a call" not in line]
    assert len(told) == 3, told
    assert any(line.startswith("Deciding: scale is an input of the program from now on") for line in told)
    assert any("each value of limit has a compiled form of its own: forward decides by it" in line for line in told)
    assert any("each value of rows has a compiled form of its own: " in line for line in told)


def differing() -> None:
    rank = torch.distributed.get_rank()
    parallel = autoparallel.compile(Scaled(), mesh_of(2), baseline="ddp")
    for scale in (1.0, 2.0, 3.0, 4.0 + rank):
        parallel(*batch(), scale)


@pytest.mark.ranks
def test_item_16_ranks_with_other_numbers_are_refused(ranks: Any) -> None:
    with pytest.raises(RankError, match=r"ranks make different calls: .*, 4.0\).* on rank 0; .*, 5.0\).* on rank 1"):
        ranks(2).run(differing)


def under_autocast(x: Tensor, s: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return ((x @ x.t()) * s + s).float() / s


FUNCTIONS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "factor": lambda x, s: x * s / (1 + s) - s ** 2 + 2.0 ** s,
    "alpha": lambda x, s: x.add(x, alpha=s).addcmul(x, x, value=-s),
    "limits": lambda x, s: x.clamp(-s, s).where(x > s, s / 2).masked_fill(x < -s, s),
    "powers": lambda x, s: (x.abs() + 1) ** s + s ** x + x.lerp(x.tanh(), s / 10),
    "in place": lambda x, s: x.clone().mul_(s).add_(s).clamp_(max=s),
    "activations": lambda x, s: F.softplus(x, beta=s) + F.elu(x, alpha=s) + F.leaky_relu(x, s),
    "under autocast": lambda x, s: under_autocast(x, s),
    "recomputed": lambda x, s: checkpoint(lambda y: (y * s).sin(), x, use_reentrant=False),
    "filled": lambda x, s: x + torch.full_like(x, s) + torch.full((4,), s),
    "compared": lambda x, s: x * (s > 1.5) + (x > s) + (x == s),
    "drawn": lambda x, s: x + torch.randn_like(x) * s,
    "branch": lambda x, s: x if s > 1.5 else -x,
    "text": lambda x, s: x * len(str(s)),
    "table": lambda x, s: x * {1.0: 2.0, 2: 3.0}.get(s, 4.0),
    "kind": lambda x, s: x if isinstance(s, (int, float)) else -x,
    "root": lambda x, s: x * (2.5 - s) ** 0.5,
    "maths": lambda x, s: x * math.sqrt(s) * max(s, 1.2) * float(s),
    "rate": lambda x, s: F.dropout(x, s / 10),
    "sizes": lambda x, s: x[: int(s)] * int(s),
    "norm": lambda x, s: x.norm(p=s),
    "identity": lambda x, s: x * (s - s + 1) * (s / s),
}
CONSTANT = ("branch", "text", "table", "kind", "root", "maths", "rate", "sizes", "norm")


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, number: Any) -> Tensor:
        return self.function(x * self.weight, number)


@pytest.mark.parametrize(("name", "kind"), [
    *(slow(name, float) if name in ("powers", "activations", "recomputed", "filled", "compared", "alpha", "drawn",
                                    "text", "kind", "maths", "norm") else (name, float) for name in FUNCTIONS),
    slow("factor", int), ("alpha", int), slow("table", int), ("sizes", int)])
def test_a_program_for_all_numbers_is_that_of_each(name: str, kind: type) -> None:
    model, x, (first, *others) = Applied(FUNCTIONS[name]), torch.randn(3, 4), [kind(n) for n in (2, 1, -3)]
    graph = capture_for_any(model, (x, first), {}, [1])
    assert graph.numbers == (() if name in CONSTANT else (1,)), graph.fixed
    assert (1 in graph.fixed) == (name in CONSTANT)
    if graph.numbers:
        for value in others:
            if name in ("limits", "activations") and value < 0:
                continue
            assert is_same(with_values_in(graph, [x, value]), capture(model, (x, value)))


def test_numbers_of_a_model_on_the_meta_device_and_of_repeated_blocks() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x: Tensor, scale: float) -> Tensor:
            return x + self.inner(x) * scale * 0.5

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(5))

        def forward(self, x: Tensor, scale: float) -> Tensor:
            for block in self.blocks:
                x = block(x, scale)
            return x

    with torch.device("meta"):
        model, x = Blocks(), torch.randn(3, 4)
    graph = capture_for_any(model, (x, 2.0), {}, [1])
    assert graph.numbers == (1,)
    assert is_same(with_values_in(graph, [x, 0.3]), capture(model, (x, 0.3)))


class Reversed(torch.autograd.Function):
    """Gradients are reversed, by a factor that a schedule changes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Any) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return -ctx.factor * gradient, None


class Adversarial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor, factor: Any) -> Tensor:
        return Reversed.apply(self.layer(x), factor).square().sum()


def test_a_number_that_a_function_takes_is_told_to_be_given_as_a_tensor(mesh_of_one: Any,
                                                                        caplog: pytest.LogCaptureFixture) -> None:
    """Each value of a gradient reversal's schedule compiles the model again; as a tensor none does."""
    torch.manual_seed(1)
    model, x = Adversarial(), torch.ones(8, 6)
    parallel = autoparallel.compile(copy.deepcopy(model), mesh_of_one, example_inputs=(x, 0.5))
    for compiled, values in ((2, [0.5, 0.75, 0.9]), (1, map(torch.tensor, [0.5, 0.75, 0.9]))):
        before = parallel._state.forms.compiled
        for value in values:
            for each in (model, parallel):
                each.zero_grad()
                each(x, value).backward()
            torch.testing.assert_close(parallel.layer.weight.grad.full_tensor(), model.layer.weight.grad)
        assert parallel._state.forms.compiled - before == compiled
    (told,) = [record.getMessage() for record in caplog.records if "has a compiled form" in record.getMessage()]
    assert "Reversed.apply takes it" in told and "torch.tensor(value)" in told
