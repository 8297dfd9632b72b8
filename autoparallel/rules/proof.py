"""An axis strategy of a rule against the op itself: run on shards, and on the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from autoparallel.capture.graph import Node, Ref
from autoparallel.capture.passes.autocast import without_autocast
from autoparallel.errors import RuleError
from autoparallel.rules.rule import AxisStrategy

PIECES = (2, 3)
#: Of the largest entry.
TOLERANCE = 1e-4
Run = Callable[..., list[Tensor]]


@contextmanager
def as_usual() -> Iterator[None]:
    """Gradients on and no autocast, whatever the caller has set; random numbers are as they were afterwards."""
    with ExitStack() as stack:
        for context in (torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]),
                        without_autocast()):
            stack.enter_context(context)
        yield


def call(node: Node, *tensors: Tensor) -> list[Tensor]:
    """The op of a node with its other arguments.

    Raises RuleError for whatever a user's op raises: it is not for such tensors.
    """
    given = iter(tensors)
    args, kwargs = pytree.tree_map_only(Ref, lambda ref: next(given), (node.args, dict(node.kwargs)))
    try:
        made = node.target(*args, **kwargs)
    except Exception as error:
        raise RuleError(str(error)) from error
    return list(made) if isinstance(made, (tuple, list)) else [made]


def prove(
    run: Run, op: str, strategy: AxisStrategy, shards: int, tensors: Sequence[Tensor], tolerance: float = TOLERANCE
) -> None:
    """Run it on this many shards and compare with the whole, forward and gradients; nothing where the sizes do
    not allow so many.

    Raises RuleError when they differ by more than ``tolerance`` of the largest entry, or ``run`` does.
    """
    lengths = [t.shape[p.dim] for t, p in zip(tensors, strategy.inputs, strict=True) if p.is_shard]
    if any(n % shards for n in lengths if strategy.even) or any(-(-n // -(-n // shards)) != shards for n in lengths):
        return
    leaves = [t.detach().clone().requires_grad_(_has_gradient(t)) for t in tensors]
    whole = run(*leaves)
    wrong = f"the rule of {op} is wrong: cutting {strategy.name!r} into {shards} shards"
    try:
        by_rank = [run(*inputs) for inputs in _cut(strategy, leaves, shards)]
    except RuleError as error:
        raise RuleError(f"{wrong}: {error}") from error
    if any(len(values) != len(whole) for values in by_rank):
        raise RuleError(f"{wrong}: {[len(values) for values in by_rank]} results instead of {len(whole)} each")
    together = [_joined(p, [values[o] for values in by_rank], f"{wrong}, result {o}")
                for o, p in enumerate(strategy.outputs)]
    for value, found in zip(whole, together, strict=True):
        _compare(wrong, strategy, "result", value, found, tolerance)
    wanted = [t for t in leaves if t.requires_grad]
    pairs = [(a, b) for a, b in zip(whole, together, strict=True) if a.requires_grad]
    if wanted and pairs:
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(a.shape, generator=generator, device="cpu").to(a) for a, _ in pairs]
        try:
            right = _gradients([a for a, _ in pairs], weights, wanted)
        except RuntimeError:  # an op that has no derivative
            return
        try:
            made = _gradients([b for _, b in pairs], weights, wanted)
        except RuntimeError as error:
            raise RuleError(f"{wrong}, backward: {error}") from error
        for value, found in zip(right, made, strict=True):
            _compare(wrong, strategy, "gradient", value, found, tolerance)


def _has_gradient(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _cut(strategy: AxisStrategy, tensors: Sequence[Tensor], shards: int) -> Iterator[list[Tensor]]:
    """Each rank's inputs: contiguous, as they are when a program runs."""
    generator = torch.Generator().manual_seed(shards)
    summed = [_summands(t, shards, generator) if p.kind == "P" else []
              for t, p in zip(tensors, strategy.inputs, strict=True)]
    for rank in range(shards):
        yield [
            t.chunk(shards, p.dim)[rank].contiguous() if p.is_shard else parts[rank] if parts else t
            for t, p, parts in zip(tensors, strategy.inputs, summed, strict=True)
        ]


def _summands(t: Tensor, shards: int, generator: torch.Generator) -> list[Tensor]:
    """Parts that differ in every element, also in sign: shares alone would pass for summands of a norm. What is no
    number is so in the first part only."""
    missing = t.isnan()
    known = t.masked_fill(missing, 0.0)
    scale = _largest(known.detach())
    apart = [scale * torch.randn(t.shape, generator=generator, device="cpu").to(t) for _ in range(shards - 1)]
    first, *rest = [known / shards + one for one in (*apart, -sum(apart, torch.zeros_like(t)))]
    return [torch.where(missing, t, first), *rest]


def _joined(placement: Any, values: Sequence[Tensor], wrong: str) -> Tensor:
    if placement.is_shard:
        others = {value.shape[: placement.dim] + value.shape[placement.dim + 1 :] for value in values}
        if len(others) > 1:
            raise RuleError(f"{wrong}: shapes {[list(value.shape) for value in values]} do not join along dim "
                            f"{placement.dim}")
        return torch.cat(list(values), placement.dim)
    if placement.kind != "P":
        return values[0]
    if len({value.shape for value in values}) > 1:
        raise RuleError(f"{wrong}: shapes {[list(value.shape) for value in values]} do not add up")
    if values[0].dtype == torch.bool:
        raise RuleError(f"{wrong}: it is of type bool, which does not add up")
    return torch.stack(list(values)).sum(0, dtype=values[0].dtype)


def _gradients(values: Sequence[Tensor], weights: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(list(values), list(wanted), list(weights), retain_graph=True, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted, strict=True)]


def _largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


def _compare(wrong: str, strategy: AxisStrategy, what: str, expected: Tensor, found: Tensor, tolerance: float) -> None:
    same = expected.shape == found.shape and expected.dtype == found.dtype
    error = _difference(expected.detach(), found.detach()) if same else float("inf")
    if not error <= tolerance:
        layouts = f"{' '.join(map(str, strategy.inputs))} -> {' '.join(map(str, strategy.outputs))}"
        differs = f"differs by {error:.1e} of its largest entry" if same else \
            f"is {found.dtype} {list(found.shape)} instead of {expected.dtype} {list(expected.shape)}"
        raise RuleError(
            f"{wrong} ({layouts}) gives a {what} that {differs}: write . for a dim that must stay whole, name an input "
            "that is added once in additive=, leave a group out of linear=")


def _difference(expected: Tensor, found: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest finite entry; nan if their non-finite entries
    differ."""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    expected, found = expected.to(wide), found.to(wide)
    known = expected.isfinite()
    others = torch.where(known, 0.0, expected), torch.where(known, 0.0, found)
    if not torch.equal(*(t.nan_to_num(0.5, 2.0, -2.0) if not t.is_complex() else t.isnan() for t in others)):
        return float("nan")
    expected, found = expected.masked_fill(~known, 0.0), found.masked_fill(~known, 0.0)
    return _largest(expected - found) / (_largest(expected) or 1.0)
