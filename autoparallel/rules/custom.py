"""Rules for users' own ops: one line, proven on the spot against the op itself.

    autoparallel.register_rule("mylib::scaled_linear", "x[*b, k], w[n, k] -> y[*b, n]", reduce="k")
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoparallel.errors import RuleError, shown
from autoparallel.rules.registry import OpView, rule_for
from autoparallel.rules.rule import Row, Rule, einsum_rule, parse_tensor

PIECES = (2, 3)
STAR_DIMS, FACTOR_SIZE = 2, 6  # a factor's size divides by every number of pieces


def register_rule(
    op: str | Any,
    pattern: str,
    *,
    reduce: str = "",
    additive: str = "",
    linear: Sequence[str] = (),
    flops_per_point: float | None = None,
    arguments: Mapping[str, Any] | None = None,
    example: Sequence[Tensor] | None = None,
) -> None:
    """Tell how a custom op may be cut, in the notation of `einsum_rule`.

    ``op`` is ``"library::name"`` or ``"library::name.overload"``, the op itself, or a torch.autograd.Function (whose
    ``apply`` is then given the tensors, and after them the values of ``arguments``). A factor that the result lacks is
    summed over; ``reduce`` names such factors, ``additive`` inputs added to that sum (a bias), ``linear`` groups of
    inputs in which the op is jointly linear. ``flops_per_point`` per product of all factor sizes (2 where something is
    reduced, else 1). The rule is proven before it counts: every way of cutting is run in 2 and 3 pieces and compared
    with the whole, forward and gradients, on ``example`` tensors (or random ones whose factors all have size 6) and the
    keyword ``arguments``.

    Raises RuleError when the op is unknown, the pattern does not fit, or the op does otherwise than the rule says.
    """
    if not isinstance(pattern, str):
        raise RuleError(f"the pattern is {shown(pattern)}: give text, for example 'x[*b, k], w[n, k] -> y[*b, n]'")
    target = _resolve(op)
    points = flops_per_point if flops_per_point is not None else 2.0 if reduce else 1.0

    def rule_of(inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Rule:
        several = len(inputs) > 1
        return einsum_rule(pattern, inputs, outputs, reduce=reduce, additive=additive, linear=linear,
                           flops_per_point=points, op_class="matmul" if reduce and several else "elementwise",
                           saves=frozenset(range(len(inputs))))

    tensors = list(example) if example is not None else _random_inputs(pattern)
    run = partial(_outputs, target, arguments or {})
    rule = rule_of([t.shape for t in tensors], [t.shape for t in run(*tensors)])
    for row in rule.rows():
        for pieces in PIECES:
            if row.factor or any(p.kind == "P" for p in row.inputs):
                prove(run, str(target), row, pieces, tensors)

    @rule_for(target)
    def builder(view: OpView) -> Rule:
        return rule_of(view.shapes, [meta.shape for meta in view.outputs])


def _resolve(op: str | Any) -> Any:
    if isinstance(op, type) and not issubclass(op, torch.autograd.Function):
        raise RuleError(f"{op} is neither an op nor a torch.autograd.Function")
    if not isinstance(op, str):
        return op.default if isinstance(op, torch._ops.OpOverloadPacket) else op
    match = re.fullmatch(r"(\w+)::(\w+)(?:\.(\w+))?", op)
    if match is None:
        raise RuleError(f"cannot read the op {op!r}: write library::name or library::name.overload")
    try:
        return getattr(getattr(getattr(torch.ops, match[1]), match[2]), match[3] or "default")
    except AttributeError:
        raise RuleError(f"there is no op {op!r}: import the module that defines it (torch.library.custom_op) first"
                        ) from None


def _random_inputs(pattern: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    left = pattern.split("->")[0]
    found = []
    for text in re.findall(r"\w+\s*\[[^\]]*\]", left):
        _, dims = parse_tensor(text)
        shape = [n for d in dims for n in ([FACTOR_SIZE] * STAR_DIMS if d and d.startswith("*") else [FACTOR_SIZE])]
        found.append(torch.randn(shape, generator=generator))
    return found


def _outputs(target: Any, arguments: Mapping[str, Any], *tensors: Tensor) -> list[Tensor]:
    try:
        if isinstance(target, type) and issubclass(target, torch.autograd.Function):
            made = target.apply(*tensors, *arguments.values())
        else:
            made = target(*tensors, **arguments)
    except Exception as error:
        shapes = [list(t.shape) for t in tensors]
        raise RuleError(f"{target} does not run on tensors of shapes {shapes}: {error}. Give example= (tensors) and "
                        "arguments= (the rest) that it runs on") from error
    return list(made) if isinstance(made, (tuple, list)) else [made]


def prove(run: Callable[..., list[Tensor]], op: str, row: Row, pieces: int, tensors: Sequence[Tensor]) -> None:
    """Run the row in pieces and compare with the whole, forward and gradients; nothing where it does not apply.

    Raises RuleError when they differ, or ``run`` does.
    """
    lengths = [t.shape[p.dim] for t, p in zip(tensors, row.inputs, strict=True) if p.is_shard]
    if any(n % pieces for n in lengths if row.even) or any(-(-n // -(-n // pieces)) != pieces for n in lengths):
        return
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    whole = run(*leaves)
    try:
        by_rank = [run(*inputs) for inputs in _cut(row, leaves, pieces)]
    except RuleError as error:
        raise RuleError(f"the rule of {op} is wrong: cutting {row.name!r} into {pieces} pieces: {error}") from error
    together = [_joined(p, [values[o] for values in by_rank]) for o, p in enumerate(row.outputs)]
    for value, found in zip(whole, together, strict=True):
        _compare(op, row, pieces, "result", value, found)
    wanted = [t for t in leaves if t.requires_grad]
    pairs = [(a, b) for a, b in zip(whole, together, strict=True) if a.requires_grad]
    if wanted and pairs:
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(a.shape, generator=generator).to(a) for a, _ in pairs]
        try:
            right = _gradients([a for a, _ in pairs], weights, wanted)
        except RuntimeError:  # an op that has no derivative
            return
        try:
            made = _gradients([b for _, b in pairs], weights, wanted)
        except RuntimeError as error:
            raise RuleError(f"the rule of {op} is wrong: cutting {row.name!r} into {pieces} pieces, backward: {error}"
                            ) from error
        for value, found in zip(right, made, strict=True):
            _compare(op, row, pieces, "gradient", value, found)


def _cut(row: Row, tensors: Sequence[Tensor], pieces: int) -> Iterator[list[Tensor]]:
    """Each rank's inputs."""
    generator = torch.Generator().manual_seed(pieces)
    summed = [_summands(t, pieces, generator) if p.kind == "P" else []
              for t, p in zip(tensors, row.inputs, strict=True)]
    for rank in range(pieces):
        yield [
            t.chunk(pieces, p.dim)[rank] if p.is_shard else parts[rank] if parts else t
            for t, p, parts in zip(tensors, row.inputs, summed, strict=True)
        ]


def _summands(t: Tensor, pieces: int, generator: torch.Generator) -> list[Tensor]:
    """Parts that differ in every element, also in sign: shares alone would pass for summands of a norm. What is no
    number is so in the first part only."""
    missing = t.isnan()
    known = t.masked_fill(missing, 0.0)
    scale = _largest(known.detach())
    apart = [scale * torch.randn(t.shape, generator=generator).to(t) for _ in range(pieces - 1)]
    first, *rest = [known / pieces + one for one in (*apart, -sum(apart, torch.zeros_like(t)))]
    return [torch.where(missing, t, first), *rest]


def _joined(placement: Any, values: Sequence[Tensor]) -> Tensor:
    if placement.is_shard:
        return torch.cat(list(values), placement.dim)
    return torch.stack(list(values)).sum(0) if placement.kind == "P" else values[0]


def _gradients(values: Sequence[Tensor], weights: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(list(values), list(wanted), list(weights), retain_graph=True, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted, strict=True)]


def _largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


def _compare(op: str, row: Row, pieces: int, what: str, expected: Tensor, found: Tensor) -> None:
    shape = expected.shape == found.shape
    expected, found = (t.detach().to(torch.complex128 if t.is_complex() else torch.float64) for t in (expected, found))
    if shape and torch.equal(expected.isnan(), found.isnan()):
        expected, found = (t.masked_fill(t.isnan(), 0.0) for t in (expected, found))
    error = _largest(expected - found) / (_largest(expected) or 1.0) if shape else float("inf")
    if not error <= 1e-4:
        layouts = f"{' '.join(map(str, row.inputs))} -> {' '.join(map(str, row.outputs))}"
        raise RuleError(
            f"the rule of {op} is wrong: cutting {row.name!r} into {pieces} pieces ({layouts}) gives a {what} that "
            f"differs by {error:.1e} of its largest entry: write . for a dim that must stay whole, name an input that "
            "is added once in additive=, leave a group out of linear=")
