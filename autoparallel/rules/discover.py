"""Rules of ops without a described rule, found by running the ops on shards.

Small random tensors stand for the op's own: equal sizes stay equal, so that what may be cut together is seen. Each way
of cutting them is proven as a user's rule is (`proof.prove`): in 2 and 3 shards, forward and gradients, at several
magnitudes, and with what is cut as long as it is (or not claimed, where that is too much to run). An op that runs on no
such tensors (one of its arguments is a size) is tried at its own sizes, if they are small, and claimed for just the
numbers of shards that were tried. An op that draws numbers, or has a result that depends on them, stays whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from autoparallel.capture.graph import Node, OpGraph, Ref, TensorMeta
from autoparallel.errors import RuleError
from autoparallel.layout import PARTIAL, REPLICATE, Placement, shard
from autoparallel.rules.proof import PIECES, as_usual, call, prove
from autoparallel.rules.rule import AxisStrategy, Rule

#: Sizes that stand for the op's own. Odd ones first: shards are then uneven; of others only even shards are claimed.
STAND_INS = ((7, 9, 11, 13, 15, 17), (12, 18, 24, 30, 36, 42))
MAGNITUDES = (1.0, 1e-2, 10.0)
MOST_CUTS, MOST_ELEMENTS = 256, 1 << 24
#: Of an op tried at its own sizes: elements of its inputs, and shards.
MOST_OF_ITS_OWN, MOST_PIECES = 1 << 20, 16
#: Strategies found, by op, constants and tensor forms: trying an op takes seconds, and models repeat few forms.
_FOUND: dict[object, tuple[AxisStrategy, ...]] = {}


def discover(graph: OpGraph, node: Node, plain: Rule) -> Rule | None:
    """The rule with the strategies found besides repeating the op; None if there are none."""
    metas = [graph.meta(ref) for ref in node.inputs]
    constants = repr(pytree.tree_map_only(Ref, lambda ref: None, (node.args, dict(node.kwargs))))
    key = (node.target, constants, tuple(metas))
    if key not in _FOUND:
        with as_usual():
            _FOUND[key] = tuple(_axis_strategies(node, metas))
    if not _FOUND[key]:
        return None
    return Rule(plain.inputs, plain.outputs, {}, flops=plain.flops, saves=plain.saves, variants=_FOUND[key])


@dataclass(frozen=True)
class _Trial:
    """The op on stand-ins of its tensors, as a function of them. ``sizes``: of the stand-ins; none where the tensors'
    own are taken."""

    run: Callable[..., list[Tensor]]
    shapes: tuple[tuple[int, ...], ...]
    metas: tuple[TensorMeta, ...]
    sizes: Sequence[int]

    def divided(self, length: int) -> list[tuple[int, ...]]:
        """What the number of shards of a dim of this length must divide, for shards of which the trial tells; where
        that is up to the trial, the largest first."""
        if not self.sizes:
            return [(n,) for n in range(MOST_PIECES, 1, -1) if length % n == 0]
        return [()] if self.sizes is STAND_INS[0] else [(length,)]

    def counts(self, axis_strategy: AxisStrategy) -> Sequence[int]:
        """Numbers of shards to try."""
        (most,) = axis_strategy.even if not self.sizes and axis_strategy.even else (0,)
        return [n for n in range(2, most + 1) if most % n == 0] if most else PIECES

    def at_length(self, length: int) -> _Trial:
        """With the dims of this length as they are."""
        shapes = (tuple(true if true == length else n for true, n in zip(meta.shape, shape, strict=True))
                  for meta, shape in zip(self.metas, self.shapes, strict=True))
        return replace(self, shapes=tuple(shapes))

    def tensors(self, magnitude: float, seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [_drawn(meta.dtype, shape, magnitude, generator)
                for meta, shape in zip(self.metas, self.shapes, strict=True)]


def _with_a_hole(tensors: Sequence[Tensor]) -> list[Tensor]:
    for t in tensors:
        if t.is_floating_point() and t.numel():
            t.view(-1)[0] = math.nan
    return list(tensors)


def _drawn(dtype: torch.dtype, shape: tuple[int, ...], magnitude: float, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return (magnitude * torch.randn(shape, generator=generator, device="cpu")).to(dtype)
    return torch.randint(0, 2, shape, generator=generator, device="cpu").to(dtype)


def _axis_strategies(node: Node, metas: Sequence[TensorMeta]) -> Iterator[AxisStrategy]:
    for sizes in (*STAND_INS, ()):
        trial = _trial(node, metas, sizes)
        if trial is not None:
            yield from _proven(trial)
            return


def _trial(node: Node, metas: Sequence[TensorMeta], sizes: Sequence[int]) -> _Trial | None:
    """The op on example tensors with these ``sizes`` (or its own, if ()); None if it does not run on them, or gives
    other results when run twice."""
    distinct = sorted({n for meta in metas for n in meta.shape if n != 1})
    if not distinct or (sizes and len(distinct) > len(sizes)):
        return None
    stands: Mapping[int, int] = {1: 1, **dict(zip(distinct, sizes or distinct, strict=False))}
    shapes = tuple(tuple(stands[n] for n in meta.shape) for meta in metas)
    if not sizes and sum(math.prod(shape) for shape in shapes) > MOST_OF_ITS_OWN:
        return None
    trial = _Trial(partial(call, node), shapes, tuple(metas), sizes)
    expected = [tuple(stands.get(n, -1 if sizes else n) for n in meta.shape) for meta in node.outputs]
    try:
        first, second = trial.run(*trial.tensors(1.0)), trial.run(*trial.tensors(1.0))
    except RuleError:
        return None
    equivalent = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return trial if equivalent and [tuple(t.shape) for t in first] == expected else None


def _proven(trial: _Trial) -> Iterator[AxisStrategy]:
    for cuts in _cuts(trial.shapes):
        outputs = _outputs_of(trial, cuts)
        if outputs is None:
            continue
        name = ",".join(str(p) for p in cuts)
        size = next(meta.shape[p.dim] for meta, p in zip(trial.metas, cuts, strict=True) if p.is_shard)
        axis_strategies = (AxisStrategy(name, cuts, outputs, name, even) for even in trial.divided(size))
        yield from itertools.islice(
            (axis_strategy for axis_strategy in axis_strategies if _holds(trial, axis_strategy)), 1
        )
    floating = [i for i, meta in enumerate(trial.metas) if meta.dtype.is_floating_point]
    results = len(trial.run(*trial.tensors(1.0)))
    for group in sorted({(i,) for i in floating} | {tuple(floating)} - {()}):
        inputs = tuple(PARTIAL if i in group else REPLICATE for i in range(len(trial.metas)))
        axis_strategy = AxisStrategy(f"linear({','.join(map(str, group))})", inputs, (PARTIAL,) * results)
        if _holds(trial, axis_strategy):
            yield axis_strategy


def _cuts(shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[Placement, ...]]:
    """Every choice of at most one dim per tensor, all of one size."""
    for size in sorted({n for shape in shapes for n in shape if n != 1}):
        options = [[REPLICATE, *(shard(d) for d, n in enumerate(shape) if n == size)] for shape in shapes]
        yield from itertools.islice(itertools.product(*options), 1, MOST_CUTS)


def _outputs_of(trial: _Trial, cuts: tuple[Placement, ...]) -> tuple[Placement, ...] | None:
    """How the results of two shards make the whole results: joined along a dim, or added up."""
    tensors = trial.tensors(1.0)
    halves = [[t.chunk(2, p.dim)[half] if p.is_shard else t for t, p in zip(tensors, cuts, strict=True)]
              for half in (0, 1)]
    try:
        whole, made = trial.run(*tensors), [trial.run(*half) for half in halves]
    except RuleError:
        return None
    found = [_joining(value, parts) for value, *parts in zip(whole, *made, strict=True)]
    return None if None in found else tuple(p for p in found if p is not None)


def _joining(whole: Tensor, parts: Sequence[Tensor]) -> Placement | None:
    for dim in range(whole.dim()):
        others = all(part.shape[:dim] + part.shape[dim + 1 :] == whole.shape[:dim] + whole.shape[dim + 1 :]
                     for part in parts)
        if others and sum(part.shape[dim] for part in parts) == whole.shape[dim] and \
                _near(torch.cat(list(parts), dim), whole):
            return shard(dim)
    if whole.is_floating_point() and all(part.shape == whole.shape for part in parts) and \
            _near(torch.stack(list(parts)).sum(0), whole):
        return PARTIAL
    return None


def _near(a: Tensor, b: Tensor) -> bool:
    wide = torch.complex128 if a.is_complex() else torch.float64
    return a.dtype == b.dtype and torch.allclose(a.to(wide), b.to(wide), rtol=1e-4, atol=1e-6)


def _holds(trial: _Trial, axis_strategy: AxisStrategy) -> bool:
    """Whether a strategy is proven on small tensors, and with the sharded dim at its true length: a window of 64 has no
    effect on shorter tensors."""
    counts = trial.counts(axis_strategy)
    try:
        for length in {
            meta.shape[p.dim] for meta, p in zip(trial.metas, axis_strategy.inputs, strict=True) if p.is_shard
        }:
            true = trial.at_length(length)
            if sum(math.prod(shape) for shape in true.shapes) > MOST_ELEMENTS:
                return False
            for shards in counts:
                prove(true.run, "op", axis_strategy, shards, true.tensors(1.0))
        for magnitude, shards in itertools.product(MAGNITUDES, counts):
            prove(trial.run, "op", axis_strategy, shards, trial.tensors(magnitude))
        if PARTIAL in axis_strategy.inputs:  # an op that passes over what is no number
            prove(trial.run, "op", axis_strategy, counts[0], _with_a_hole(trial.tensors(1.0)))
    except RuleError:
        return False
    return True
