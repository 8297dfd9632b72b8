"""What is possible: every combination of one axis's placements, tried on shards.

A combination says how each input and each output lies on an axis: in shards, whole, or as summands. It is possible
when the op on each rank's inputs gives each rank's outputs, on every draw.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from autoparallel.capture.graph import TensorMeta, is_floating
from autoparallel.layout import PARTIAL, REPLICATE, Placement, layout_fits, local_box, local_shape, shard
from autoparallel.ops.arguments import GROUPS_ARGUMENT, SIZE_ARGUMENT, fitted
from benchmarks.rule_truth.cases import Case, called_with

Placed = tuple[Placement, ...]
Combination = tuple[Placed, Placed]
TOLERANCE = {torch.float64: 1e-6, torch.complex128: 1e-6}
OTHER_TOLERANCE = 1e-4


def placements(meta: TensorMeta, num_ranks: int) -> list[Placement]:
    """What a tensor may be on an axis; summands only of numbers that are measured, not of those that count."""
    cuts = [shard(d) for d in range(len(meta.shape)) if layout_fits(meta.shape, (shard(d),), (num_ranks,))]
    return [REPLICATE, *cuts, *([PARTIAL] if is_floating(meta.dtype) else [])]


def input_combinations(case: Case, num_ranks: int) -> list[Placed]:
    """All but the one of whole inputs, which is always right."""
    choices = [placements(meta, num_ranks) for meta in case.inputs]
    return list(itertools.islice(itertools.product(*choices), 1, None))


def count_combinations(case: Case, num_ranks: int) -> int:
    count = 1
    for meta in case.inputs:
        count *= len(placements(meta, num_ranks))
    return count


def held(whole: Tensor, p: Placement, num_ranks: int, seed: int = 0) -> list[Tensor]:
    """What each rank holds of a tensor; summands are random."""
    if p.is_shard:
        boxes = (local_box(tuple(whole.shape), (p,), (num_ranks,), (rank,)) for rank in range(num_ranks))
        return [whole.narrow(p.dim, offsets[p.dim], shape[p.dim]) for offsets, shape in boxes]
    if p == PARTIAL and not is_floating(whole.dtype):
        return [whole, *(torch.zeros_like(whole) for _ in range(num_ranks - 1))]
    if p == PARTIAL:
        generator, scale = torch.Generator().manual_seed(seed), largest(whole) or 1.0  # so that no digits are lost
        parts = [scale * torch.randn(whole.shape, generator=generator, dtype=whole.dtype) for _ in range(num_ranks - 1)]
        return [*parts, whole - sum(parts)]
    return [whole] * num_ranks


def lies(found: Sequence[Tensor], p: Placement, whole: Tensor) -> bool:
    """Whether what the ranks have found is ``whole`` in placement ``p``."""
    if p == PARTIAL:
        equivalent = all(f.shape == whole.shape for f in found)
        return equivalent and same(torch.stack(list(found)).sum(0), whole, max(map(largest, found)))
    return all(same(f, expected) for f, expected in zip(found, held(whole, p, len(found)), strict=True))


def same(found: Tensor, expected: Tensor, scale: float = 0.0) -> bool:
    """Equal but for rounding, measured against the largest entry, or that of what was added up (``scale``)."""
    if found.shape != expected.shape:
        return False
    if not is_floating(expected.dtype):
        return torch.equal(found.to(expected.dtype), expected)
    tolerance = TOLERANCE.get(expected.dtype, OTHER_TOLERANCE) * max(scale, largest(expected))
    return torch.allclose(found.to(expected.dtype), expected, rtol=0.0, atol=tolerance, equal_nan=True)


def largest(value: Tensor) -> float:
    """The largest finite entry's size; 0 without one."""
    finite = value.detach()[value.isfinite()].abs()
    return float(finite.max()) if len(finite) else 0.0


def telling(case: Case) -> bool:
    """Whether wrong shards could be told from right ones: outputs differ in their entries, or from draw to draw."""
    if any(not meta.num_elements for meta in case.inputs):
        return False
    draws = [case.run(values) for values in case.draws]
    return all(_varies([made[output] for made in draws]) for output in range(len(draws[0])))


def _varies(draws: Sequence[Tensor]) -> bool:
    """One output, on all draws."""
    first = draws[0].flatten()
    if not len(first) or not (first.isfinite() & (first != 0)).any():
        return False
    within = bool((first != first[0]).any())
    between = len(draws) == 1 or any(not torch.equal(first, other.flatten()) for other in draws[1:])
    return within or (between and first.dtype is not torch.bool)


class Shards:
    """A case on the shards of one axis: one draw, with its inputs cut in every way once."""

    def __init__(self, case: Case, values: Sequence[Tensor], num_ranks: int) -> None:
        self.case, self.values, self.num_ranks = case, values, num_ranks
        self.whole = case.run(values)
        self.held: Callable[[int, Placement], list[Tensor]] = cache(
            lambda position, p: held(values[position], p, num_ranks, seed=position)
        )

    def outputs(self, inputs: Placed, asked: Sequence[set[Placement]]) -> list[set[Placement]]:
        """Of the placements asked about, those in which the outputs lie when the inputs lie so."""
        if self.case.node.target in SIZE_ARGUMENT or self.case.node.target in GROUPS_ARGUMENT:
            (choices,) = asked
            return [{p for p in choices if self._outputs(inputs, [{p}])[0]}]
        return self._outputs(inputs, asked)

    def _outputs(self, inputs: Placed, asked: Sequence[set[Placement]]) -> list[set[Placement]]:
        nothing: list[set[Placement]] = [set() for _ in asked]
        made = next(iter(asked[0]), REPLICATE)
        found: list[tuple[Tensor, ...]] = []
        for rank in range(self.num_ranks):
            try:
                found.append(self._rank(inputs, made, rank))
            except Exception:  # whatever an op says to shards that do not fit each other
                return nothing
            if len(found[-1]) != len(asked):
                return nothing
            asked = [self._of_that_shape(o, ps, found[-1][o], rank) for o, ps in enumerate(asked)]
            if not all(asked):
                return nothing
        return [{p for p in ps if lies([f[o] for f in found], p, self.whole[o])} for o, ps in enumerate(asked)]

    def _rank(self, inputs: Placed, made: Placement, rank: int) -> tuple[Tensor, ...]:
        node = self.case.node
        args, kwargs = called_with(node, [self.held(position, p)[rank] for position, p in enumerate(inputs)])
        shape = local_shape(node.outputs[0].shape, (made,), (self.num_ranks,), (rank,))
        results = node.target(*fitted(node.target, args, shape, node.outputs[0].shape), **kwargs)
        return tuple(results) if isinstance(results, (tuple, list)) else (results,)

    def _of_that_shape(self, output: int, asked: set[Placement], found: Tensor, rank: int) -> set[Placement]:
        whole = tuple(self.whole[output].shape)
        return {p for p in asked if local_shape(whole, (p,), (self.num_ranks,), (rank,)) == tuple(found.shape)}


def possible(case: Case, num_ranks: int) -> set[Combination]:
    """Every combination that is right on every draw."""
    draws = [Shards(case, values, num_ranks) for values in case.draws]
    everything = [_placed(meta, num_ranks) for meta in case.node.outputs]
    found: set[Combination] = set()
    for inputs in input_combinations(case, num_ranks):
        outputs = everything
        for shards in draws:
            outputs = shards.outputs(inputs, outputs)
            if not all(outputs):
                break
        found |= {(inputs, made) for made in itertools.product(*outputs)}
    return found


def _placed(meta: TensorMeta, num_ranks: int) -> set[Placement]:
    """Outputs may be summands where they can be added at all."""
    return {*placements(meta, num_ranks), *([PARTIAL] if meta.dtype is not torch.bool else [])}
