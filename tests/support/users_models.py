"""Models as users write them, with autocast, hooks, custom functions, adapters and buffers that change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BATCH, WIDTH = 8, 16


def x(*shape: int) -> Tensor:
    return torch.randn(shape or (BATCH, WIDTH), generator=torch.Generator().manual_seed(3))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))


class Model(nn.Module):
    """Parts, and a function of them that is the forward."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


@dataclass(frozen=True)
class Case:
    """`around`: what the call happens in; `tolerance`: of gradients, in the max-norm."""

    model: Model
    args: tuple[Any, ...] = field(default_factory=lambda: (x(),))
    kwargs: dict[str, Any] = field(default_factory=dict)
    around: Callable[[], Any] = contextlib.nullcontext
    tolerance: float = 1e-5


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


def bfloat16() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


@case
def experts_in_a_loop() -> Case:
    """Each on the tokens that chose it, as mixtures of experts are written by hand; and a loss of some tokens."""
    def forward(m: Any, x: Tensor) -> Tensor:
        weights, ids = m.router(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        chosen = F.one_hot(ids, num_classes=3).permute(2, 1, 0)
        for number in (chosen.sum((-1, -2)) > 0).nonzero():
            which, token = torch.where(chosen[number].squeeze(0))
            rows = m.experts[number](x[None, token].reshape(-1, WIDTH)) * weights[token, which, None]
            out.index_add_(0, token, rows)
        counted = x[:, 0] > -0.5
        return F.cross_entropy(out[counted], ids[counted, 0]) + m.shared(x[counted]).square().mean()

    experts = nn.ModuleList(mlp() for _ in range(3))
    return Case(Model(forward, router=nn.Linear(WIDTH, 3), experts=experts, shared=mlp()))


@case
def autocast_within() -> Case:
    """One region in another, which turns it off for a norm."""
    def forward(m: Any, x: Tensor) -> Tensor:
        with bfloat16():
            q = m.q(x).view(BATCH, 6, 2, 8).transpose(1, 2)
            made = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
            with torch.autocast("cpu", enabled=False):
                normed = m.norm(made.float() + x)
            joined = torch.cat([m.o(normed), normed], -1)
            return joined.float().square().mean() + normed.softmax(-1).square().mean()

    parts = {"q": nn.Linear(WIDTH, WIDTH), "o": nn.Linear(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH)}
    return Case(Model(forward, **parts), (x(BATCH, 6, WIDTH),), tolerance=2e-2)


@case
def autocast_around() -> Case:
    def forward(m: Any, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(m.c(m.norm(m.a(x))), target)

    model = Model(forward, a=mlp(), norm=nn.LayerNorm(WIDTH), c=nn.Linear(WIDTH, 5))
    return Case(model, (x(), torch.arange(BATCH) % 5), around=bfloat16, tolerance=2e-2)


@case
def autocast_of_layers_without_bias() -> Case:
    """Which alone tell a trace that low precision meets weights in float32; and a batch norm between."""
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.d(m.norm(m.c((m.b(m.a(x)) @ m.w).unflatten(1, (4, 4)))))
        assert y.dtype == torch.bfloat16
        return y.float().square().mean()

    parts = {"a": nn.Linear(WIDTH, WIDTH, bias=False), "b": nn.Linear(WIDTH, WIDTH, bias=False),
             "c": nn.Conv1d(4, 8, 3, bias=False), "norm": nn.BatchNorm1d(8), "d": nn.Conv1d(8, 4, 1, bias=False)}
    return Case(Model(forward, w=nn.Parameter(x(WIDTH, WIDTH)), **parts), around=bfloat16, tolerance=4e-2)


@case
def autocast_of_reading_at_points() -> Case:
    """Which takes one type only, and not low precision."""
    def forward(m: Any, x: Tensor) -> Tensor:
        image, places = m.a(x).unflatten(1, (1, 4, 4)), x.tanh().unflatten(1, (1, 8, 2))
        return m.b(F.grid_sample(image, places, align_corners=True).flatten(1)).float().square().mean()

    return Case(Model(forward, a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(8, 3)), around=bfloat16, tolerance=2e-2)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Twofold(torch.autograd.Function):
    """Two results, an argument that is no tensor, and a gradient that is not the forward's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, k: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        ctx.k = k
        return x * y * k, x + y

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.saved_tensors
        return (g * y * ctx.k + h) / 2, g * x * ctx.k + h, None


twofold = Twofold.apply  # bound before anything is traced


@case
def functions_with_a_backward_of_their_own() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        one, two = twofold(m.a(x), m.b(x), 3.0)
        return (StraightThrough.apply(one) * x).mean() + two.square().mean()

    return Case(Model(forward, a=mlp(), b=mlp()))


class Optional(torch.autograd.Function):
    """Results of which some are None, as of fused heads that compute only what is asked for; one in a tuple."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, both: bool) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(x)
        return (None, x.square(), None, (x > 0).float()) if both else (x.square(),)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None]:
        given = gradients[1] if len(gradients) > 1 else gradients[0]
        assert given is not None
        return given * ctx.saved_tensors[0], None


@case
def functions_with_results_that_are_none() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        none, one, also_none, positive = Optional.apply(m.a(x), True)
        assert none is None and also_none is None
        alone, = Optional.apply(m.b(x), False)
        return (one * positive).mean() + alone.sin().mean()

    return Case(Model(forward, a=mlp(), b=mlp()))


@case
def checkpoints() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = checkpoint(m.b, m.a(x), use_reentrant=True)
        return checkpoint(m.c, x, use_reentrant=False).square().mean()

    return Case(Model(forward, a=mlp(), b=mlp(), c=mlp()))


@case
def gradients_off_and_on_again() -> Case:
    """A parameter that is only read without gradients has none: a zero would be decayed by AdamW."""
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = m.teacher(x).softmax(-1)
            with torch.enable_grad():
                made = m.student(x)
        return -(target * made.log_softmax(-1)).sum(-1).mean()

    return Case(Model(forward, teacher=mlp(), student=mlp()))


@case
def frozen_and_unused() -> Case:
    model = Model(lambda m, x: m.c(m.b(m.a(x))).square().mean(), a=mlp(), b=mlp(), c=mlp(), unused=mlp())
    model.b.requires_grad_(False)
    return Case(model)


class Adapter(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, layer.in_features) / 10)
        self.up = nn.Parameter(torch.randn(layer.out_features, 4) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2 * F.linear(F.linear(x, self.down), self.up)


@case
def adapters() -> Case:
    parts = {"a": Adapter(nn.Linear(WIDTH, 32)), "b": Adapter(nn.Linear(32, WIDTH))}
    return Case(Model(lambda m, x: m.b(F.relu(m.a(x))).square().mean(), **parts))


@case
def two_precisions() -> Case:
    return Case(Model(lambda m, x: m.b(m.a(x.double()).float()).square().mean(), a=mlp().double(), b=mlp()))


@case
def complex_rotary_embedding() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        micro_batch = torch.polar(torch.ones_like(m.angles), m.angles)
        q = torch.view_as_complex(m.q(x).reshape(BATCH, 6, 4, 4, 2)) * micro_batch[:, None]
        q = torch.view_as_real(q).flatten(3).transpose(1, 2)
        made = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return m.o(made.transpose(1, 2).reshape(BATCH, 6, 32)).square().mean()

    parts = {"q": nn.Linear(WIDTH, 32), "o": nn.Linear(32, WIDTH), "angles": torch.arange(24.0).view(6, 4) / 10}
    return Case(Model(forward, **parts), (x(BATCH, 6, WIDTH),))


@case
def compiled_and_hooked_parts() -> Case:
    model = Model(lambda m, x: m.b(m.a(x)).square().mean(), a=mlp(), b=torch.compile(mlp(), backend="eager"))
    model.a.compile(backend="eager")
    model.a.register_forward_hook(lambda module, inputs, output: 2 * output)
    return Case(model)


@case
def one_part_twice() -> Case:
    return Case(Model(lambda m, x: (m.a(m.a(x)) + x).square().mean(), a=mlp()))


@case
def nested_and_optional_inputs() -> Case:
    def forward(m: Any, batch: dict[str, Any], mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        made = m.a(batch["x"][0]) * batch["weights"] * scale
        return (made if mask is None else made * mask).square().mean()

    batch = {"x": [x(), None], "weights": x(BATCH, 1)}
    return Case(Model(forward, a=mlp()), (batch,), {"mask": None, "scale": 3.0})


@case
def buffers_that_change() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.count.add_(1)
        m.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return (m.a(x) - m.average * m.count).square().mean()

    return Case(Model(forward, a=mlp(), count=torch.zeros(()), average=torch.zeros(WIDTH)))


@case
def written_in_place() -> Case:
    """Through views, and by ``out=`` (spectral norm's power iteration)."""
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).clone()
        h.add_(1).mul_(2)
        h[:, 0] = 0
        h.masked_fill_(h > 2, 0.5)
        return m.b(h).square().mean()

    return Case(Model(forward, a=mlp(), b=nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))))


@case
def numbers_read_off_tensors() -> Case:
    """Counts that say how long they are, a batch norm whose statistics are means over all batches, parts cast to what
    they are."""
    def forward(m: Any, x: Tensor, groups: Tensor) -> Tensor:
        m.b = m.b.to(torch.float32)
        h = m.b(m.norm(m.a(x).unflatten(1, (4, 4))).flatten(1))
        sums = torch.bincount(groups, h[:, 0].detach(), minlength=5)
        return (h * (1 + groups.bincount(minlength=5)[groups].unsqueeze(1))).square().mean() + sums.square().mean()

    return Case(Model(forward, a=mlp(), b=nn.Linear(WIDTH, WIDTH), norm=nn.BatchNorm1d(4, momentum=None)),
                (x(), torch.arange(BATCH) ** 2 % 5))


@case
def transformer_with_masks() -> Case:
    """As in torch's tutorials: masks are given, and torch looks whether they are causal."""
    def forward(m: Any, source: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        padding = torch.zeros(source.shape[:2], dtype=torch.bool).index_fill(1, torch.tensor([5]), True)
        y = m.net(source, target, tgt_mask=mask, src_key_padding_mask=padding, memory_key_padding_mask=padding)
        return (y * target).sin().mean()

    net = nn.Transformer(WIDTH, 2, 1, 1, 32, dropout=0.0, batch_first=True)
    return Case(Model(forward, net=net), (x(4, 6, WIDTH), x(4, 8, WIDTH), net.generate_square_subsequent_mask(8)))


@case
def nothing_divides() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        q = m.q(x)
        return m.o(F.scaled_dot_product_attention(q, q, x, is_causal=True)).square().mean()

    return Case(Model(forward, q=nn.Linear(WIDTH, WIDTH), o=nn.Linear(WIDTH, WIDTH)), (x(5, 3, 7, WIDTH),))
