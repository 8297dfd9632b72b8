"""Small models drawn at random: a few lines of Python over one tensor, from every family of ops that rules describe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

Shape = tuple[int, ...]
SIZES = (2, 3, 4, 6, 8)
MOST_ELEMENTS = 5000
NAMES = {"torch": torch, "F": F}


@dataclass(frozen=True)
class Program:
    """``lines`` make x and at last loss, of ``parameters`` and ``inputs`` (ids below a number; x itself is real)."""

    x: Shape
    lines: tuple[str, ...]
    parameters: tuple[tuple[str, Shape], ...]
    inputs: tuple[tuple[str, Shape, int], ...]

    def __str__(self) -> str:
        made = [f"# x{list(self.x)}", *(f"# {name}{list(shape)}" for name, shape in self.parameters),
                *(f"# {name}{list(shape)} < {high}" for name, shape, high in self.inputs)]
        return "\n".join([*made, *self.lines])

    def model(self) -> nn.Module:
        return Written(self)

    def values(self) -> dict[str, Tensor]:
        """Inputs, the same at every call."""
        generator = torch.Generator().manual_seed(11)
        ids = {name: torch.randint(high, shape, generator=generator) for name, shape, high in self.inputs}
        return {"x": torch.randn(self.x, generator=generator, dtype=torch.float64), **ids}


class Written(nn.Module):
    """A program as a model whose output has a loss."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(12)
        for name, shape in program.parameters:
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(value))
        self.code = compile("\n".join(program.lines), "<program>", "exec")

    def forward(self, **inputs: Tensor) -> SequenceClassifierOutput:
        values = {**NAMES, **dict(self.named_parameters()), **inputs}
        exec(self.code, values)
        return SequenceClassifierOutput(loss=values["loss"], logits=values["x"])


@dataclass
class Writer:
    """Writes a program line by line, with the shape of x so far known from tensors on the meta device."""

    draw: Callable[[Any], Any]
    x: Tensor
    first: Shape = ()
    lines: list[str] = field(default_factory=list)
    parameters: list[tuple[str, Shape]] = field(default_factory=list)
    inputs: list[tuple[str, Shape, int]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=lambda: dict(NAMES))

    @property
    def shape(self) -> Shape:
        return tuple(self.x.shape)

    def pick(self, choices: Any) -> Any:
        return self.draw(st.sampled_from(list(choices)))

    def dim(self) -> int:
        return self.pick(range(len(self.shape)))

    def size(self) -> int:
        return self.pick(SIZES)

    def parameter(self, *shape: int) -> str:
        name = f"p{len(self.parameters)}"
        self.parameters.append((name, shape))
        self.values[name] = torch.empty(shape, device="meta", dtype=torch.float64)
        return name

    def ids(self, high: int, *shape: int) -> str:
        name = f"i{len(self.inputs)}"
        self.inputs.append((name, shape, high))
        self.values[name] = torch.empty(shape, device="meta", dtype=torch.int64)
        return name

    def line(self, expression: str) -> None:
        """``x = expression``, unless that is too large or has no dims left."""
        made = eval(expression, {**self.values, "x": self.x})
        if made.dim() and made.dim() <= 5 and made.numel() <= MOST_ELEMENTS:
            self.x = made
            self.lines.append(f"x = {expression}")

    def program(self) -> Program:
        return Program(self.first, tuple(self.lines), tuple(self.parameters), tuple(self.inputs))


Family = Callable[[Writer], None]
FAMILIES: list[Family] = []


def family(write: Family) -> Family:
    FAMILIES.append(write)
    return write


# ------------------------------------------------------------------------------------------------------------ families


@family
def linear(w: Writer) -> None:
    length, made = w.shape[-1], w.size()
    kind = w.pick(["linear", "biased", "matmul", "gram", "addmm"])
    if kind == "gram" and len(w.shape) > 1:
        w.line("torch.matmul(x, x.transpose(-1, -2)) * 0.2")
    elif kind == "matmul":
        w.line(f"torch.matmul(x, {w.parameter(length, made)}) * 0.4")
    elif kind == "addmm" and len(w.shape) == 2:
        bias = w.parameter(*w.pick([(made,), (1, made), (w.shape[0], made)]))
        w.line(f"torch.addmm({bias}, x, {w.parameter(length, made)}, alpha=0.3)")
    else:
        bias = f", {w.parameter(made)}" if kind == "biased" else ""
        w.line(f"F.linear(x, {w.parameter(made, length)}{bias}) * 0.4")


@family
def einsum(w: Writer) -> None:
    length, made = w.shape[-1], w.size()
    equations = ["...k,kn->...n", "...k,k->...k", "...k,kn->n..."]
    if len(w.shape) == 3:
        equations += ["abk,kn->bna", "abk,akn->abn", "abk,cbk->ac"]
    equation = w.pick(equations)
    shape = {"k": (length,), "kn": (length, made), "akn": (w.shape[0], length, made),
             "cbk": (made, *w.shape[1:])}[equation.split("->")[0].split(",")[1]]
    w.line(f"torch.einsum({equation!r}, x, {w.parameter(*shape)}) * 0.3")


@family
def attention(w: Writer) -> None:
    if len(w.shape) != 3:
        return
    b, s, h = w.shape
    heads = w.pick([n for n in (1, 2, 3, 4) if h % n == 0])
    split = f"reshape({b}, {s}, {heads}, {h // heads}).transpose(1, 2)"
    causal = w.pick([", is_causal=True", "", f", attn_mask={w.parameter(s, s)}"])
    key = f"(x * {w.parameter(h)})"
    w.line(f"F.scaled_dot_product_attention(x.{split}, {key}.{split}, x.{split}{causal}).transpose(1, 2)"
           f".reshape({b}, {s}, {h})")


@family
def convolution(w: Writer) -> None:
    if len(w.shape) not in (3, 4):
        return
    n, channels, made = len(w.shape) - 2, w.shape[1], w.size()
    kernel = w.pick([1, 3] if min(w.shape[2:]) > 2 else [1])
    groups = w.pick([g for g in (1, 2, channels) if channels % g == 0 and made % g == 0])
    weight = w.parameter(made, channels // groups, *(kernel,) * n)
    bias = w.pick(["None", w.parameter(made)])
    padding = w.pick([kernel // 2, f"{kernel // 2}, stride=2", f"{kernel - 1}, dilation=2", "0", "'same'"])
    w.line(f"F.conv{n}d(x, {weight}, {bias}, padding={padding}, groups={groups}) * 0.3")


@family
def pool(w: Writer) -> None:
    if len(w.shape) not in (3, 4) or min(w.shape[2:]) < 2:
        return
    n = len(w.shape) - 2
    untied = f"x + {w.parameter(*w.shape)}"
    kind = w.pick([f"F.avg_pool{n}d(x, 2)", f"F.avg_pool{n}d(x, 3, 1, 1)", f"F.max_pool{n}d({untied}, 2)",
                   f"F.max_pool{n}d({untied}, 3, 2, 1)", f"F.max_pool{n}d({untied}, 2, ceil_mode=True)",
                   f"F.adaptive_avg_pool{n}d(x, 1)", f"F.adaptive_avg_pool{n}d(x, 2)",
                   "F.interpolate(x, scale_factor=2)"])
    w.line(kind)


@family
def norm(w: Writer) -> None:
    length, channels = w.shape[-1], w.shape[1] if len(w.shape) > 1 else 1
    kinds = [f"F.layer_norm(x, ({length},), {w.parameter(length)}, {w.parameter(length)})",
             f"F.rms_norm(x, ({length},), {w.parameter(length)})"]
    if len(w.shape) in (3, 4) and w.shape[0] > 1:
        scale = w.parameter(channels)
        groups = w.pick([g for g in (1, 2, 3) if channels % g == 0])
        kinds += [f"F.group_norm(x, {groups}, {scale}, eps=0.1)",
                  f"F.batch_norm(x, None, None, {scale}, training=True, eps=0.1)"]
        kinds += [f"F.instance_norm(x, weight={scale}, eps=0.1)"] if max(w.shape[2:]) > 1 else []
    w.line(w.pick(kinds))


@family
def softmax(w: Writer) -> None:
    w.line(f"{w.pick(['torch.softmax', 'torch.log_softmax', 'F.normalize'])}(x, dim={w.dim()})")


@family
def embedding(w: Writer) -> None:
    table = w.parameter(w.size() + 3, w.shape[-1])
    high = w.parameters[-1][1][0]
    w.line(f"x + F.embedding({w.ids(high, *w.shape[:-1])}, {table})")


@family
def gather(w: Writer) -> None:
    d, many = w.dim(), w.size()
    places = [*w.shape]
    places[d] = many
    n = w.shape[d]
    kinds = [
        f"torch.gather(x, {d}, {w.ids(n, *places)})",
        f"torch.index_select(x, {d}, {w.ids(n, many)})",
        f"x[{':, ' * d}{w.ids(n, many, 2)}]",
        f"torch.scatter_add(x, {d}, {w.ids(n, *places)}, {w.parameter(*places)})",
        f"torch.index_add(x, {d}, {w.ids(n, many)}, {w.parameter(*places)})",
        f"torch.scatter(x, {d}, torch.arange({n}, device=x.device).reshape({_along(w.shape, d)}).expand({w.shape}), "
        "x * 0.5)",
        f"torch.take_along_dim(x, {w.ids(n, *places)}, {d})",
    ]
    w.line(w.pick(kinds))


def _along(shape: Shape, dim: int) -> Shape:
    return tuple(n if d == dim else 1 for d, n in enumerate(shape))


@family
def views(w: Writer) -> None:
    rank, d = len(w.shape), w.dim()
    order = w.draw(st.permutations(range(rank)))
    kinds = [f"x.permute({order})", f"x.unsqueeze({d})", "x.flatten()",
             f"x.unsqueeze({d}).expand({[*w.shape[:d], 2, *w.shape[d:]]})"]
    if rank > 1:
        at = w.pick(range(rank - 1))
        kinds += [f"x.flatten({at}, {at + 1})"] * 3
    for factor in (2, 3):
        if w.shape[d] % factor == 0:
            kinds += [f"x.unflatten({d}, ({factor}, -1))", f"x.unflatten({d}, (-1, {factor}))"]
    if w.shape[d] > 1:
        kinds += [f"x.narrow({d}, 1, {w.shape[d] - 1})", f"x.select({d}, 1)", f"x.unfold({d}, 2, 1)"]
    w.line(w.pick(kinds))


@family
def together(w: Writer) -> None:
    d, rank = w.dim(), len(w.shape)
    kinds = [f"torch.cat([x, x * 0.5], {d})", f"torch.stack([x, {w.parameter(*w.shape)}], {d})",
             f"torch.roll(x, 1, {d})", f"torch.flip(x, [{d}])", f"F.pad(x, {[1, 0] * w.pick(range(1, rank + 1))})",
             f"torch.cat(x.chunk(2, {d})[::-1], {d})"]
    if rank > 1:
        kinds += ["torch.tril(x)", "torch.diagonal(x, 0, 0, 1)"]
    w.line(w.pick(kinds))


@family
def reduction(w: Writer) -> None:
    d, keep = w.dim(), w.pick([True, False])
    name = w.pick(["sum", "mean", "logsumexp", "var", "linalg.vector_norm", "amax"])
    tie = f" + {w.parameter(*w.shape)}" if name == "amax" else ""
    if name == "var" and w.shape[d] == 1:
        return
    made = f"torch.{name}(x{tie}, dim={d}, keepdim={keep})"
    w.line(f"x - {made}" if keep else made)


@family
def along(w: Writer) -> None:
    d, name = w.dim(), w.pick(["cumsum", "logcumsumexp", "cumprod", "diff", "sort", "topk"])
    if name == "sort":
        w.line(f"torch.sort(x + {w.parameter(*w.shape)}, dim={d})[0]")
    elif name == "topk":
        w.line(f"torch.topk(x + {w.parameter(*w.shape)}, {w.pick(range(1, w.shape[d] + 1))}, dim={d})[0]")
    elif name != "diff" or w.shape[d] > 1:
        w.line(f"torch.{name}(x, dim={d})")


@family
def elementwise(w: Writer) -> None:
    d = w.dim()
    broadcast = w.parameter(*_along(w.shape, d))
    full = w.parameter(*w.shape)
    for _ in range(w.pick([1, 2])):
        w.line(w.pick([
            "torch.tanh(x)", "F.gelu(x)", "x * torch.sigmoid(x)", "x / 2", "1 - x", "-x * x * 0.1", "torch.sin(x)",
            f"x + {broadcast}", f"x * {broadcast}", f"F.relu(x + {full})", f"torch.where({full} > 0, x, 0.0)",
            f"torch.lerp(x, {broadcast}, 0.3)", f"x.masked_fill({full} > 0.5, 0.0)",
            f"torch.addcmul(x, {full}, {broadcast}, value=0.5)", f"torch.maximum(x, {full})", "x.clone().mul_(2)",
        ]))


LOSSES = ("x.square().mean()", "torch.tanh(x).sum()", "F.mse_loss(x, {like})", "F.smooth_l1_loss(x, {like})",
          "F.cross_entropy(x.reshape(-1, {last}), {labels})", "-torch.log_softmax(x, -1).mean()",
          "F.kl_div(torch.log_softmax(x, -1), torch.softmax({like}, -1), reduction='batchmean')")


@st.composite
def programs(draw: Callable[[Any], Any], most_lines: int = 5) -> Program:
    """From one to a few families' ops, then a loss."""
    first = tuple(draw(st.lists(st.sampled_from(SIZES), min_size=2, max_size=3)))
    w = Writer(draw, torch.empty(first, device="meta", dtype=torch.float64), first)
    w.line(f"x * {w.parameter(first[-1])}")
    for _ in range(draw(st.integers(1, most_lines))):
        draw(st.sampled_from(FAMILIES))(w)
    loss = w.pick(LOSSES)
    last, rows = w.shape[-1], w.x.numel() // w.shape[-1]
    like = w.parameter(*w.shape) if "{like}" in loss else ""
    labels = w.ids(last, rows) if "{labels}" in loss else ""
    scale = " + p0.square().sum()"  # a norm may forget p0: of a gradient that is all rounding no error can be told
    w.lines.append("loss = " + loss.format(like=like, last=last, labels=labels) + scale)
    return w.program()


def named(lines: str, x: Shape, parameters: dict[str, Shape] | None = None,
          inputs: dict[str, tuple[Shape, int]] | None = None) -> Program:
    """A program written by hand."""
    return Program(x, tuple(line.strip() for line in lines.strip().splitlines()), tuple((parameters or {}).items()),
                   tuple((name, shape, high) for name, (shape, high) in (inputs or {}).items()))


