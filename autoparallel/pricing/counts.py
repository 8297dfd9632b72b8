"""Execution counts of decisions and tensor uses in one step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from autoparallel.capture import TensorMeta
from autoparallel.plans import Hybrid
from autoparallel.pricing.pipeline_buffers import Buffer, stage_buffers
from autoparallel.pricing.recomputing import RecomputedBlocks, Recomputing
from autoparallel.pricing.saved_values import SavedValues
from autoparallel.schedule.in_flight import in_flight_by_bytes
from autoparallel.schedule.tiers import ON_DEVICE, Offload
from autoparallel.strategies.host_lookups import HostLookups
from autoparallel.strategies.space import StrategySpace, TensorUse, is_parameter
from autoparallel.strategies.sparse_tables import SparseTables


class Summing(NamedTuple):
    """How gradients of parameters are summed over ranks: in buckets of ``bucket_bytes`` (0: each by itself), or of the
    sizes ``axis_bytes`` of mesh axes (`Fusion`), in a dtype of ``scale`` times the bytes.
    ``in_block``: the value is a trainable parameter that is gathered with the others of its block, where software does
    so."""

    bucket_bytes: float = 0.0
    scale: float = 1.0
    in_block: bool = False
    axis_bytes: tuple[tuple[str, float], ...] = ()


class UseTimes(NamedTuple):
    """Executions of a use's redistribution in a step: forward, forward again for backward, and backward."""

    forward: int
    again: int
    backward: int


class Offloads(NamedTuple):
    """How often per step a saved value is copied to the host (and on to the disk), and back."""

    there: int
    back: int


#: One collective per gradient, in its own dtype.
ALONE = Summing()
#: Of a value that stays on the device.
NO_OFFLOADS = Offloads(0, 0)


def _trainable(counts: ExecutionCounts, meta: TensorMeta) -> bool:
    return meta.requires_grad and bool(counts.saved.kept)


class EvenBuckets:
    """The fewest equal buckets that the gradients of all parameters fill together, by the most bytes of a bucket: a
    gradient's sum is priced as its share of one. ``multiplicities``: as of `ExecutionCounts`; ``sum_dtype``: in which
    gradients are summed (None: the parameter's)."""

    def __init__(self, space: StrategySpace, multiplicities: Sequence[int], sum_dtype: torch.dtype | None) -> None:
        metas = [(some, space.strategy_sets[decision.index].output_metas[0]) for some, decision in zip(
            multiplicities, space.decisions, strict=True) if decision.kind == "parameter"]
        self.total = float(sum(some * meta.num_elements * (sum_dtype or meta.dtype).itemsize
                               for some, meta in metas if meta.requires_grad))

    def even(self, most: float) -> float:
        """Bytes of each of them."""
        return self.total / math.ceil(self.total / most) if most and self.total else most


class ExecutionCounts:
    """Counts of one step (`Hybrid`) over one strategy graph.

    ``stages_of``: by decision, the stages that run it, in order (several for tied parameters and side computations; the
    default is one stage; none for what no stage needs, whose values count on the first and whose work does not,
    ``unused``). ``alike``: numbers by decision; equal decisions with equal numbers take equally long on their stages
    (default: those on the same stages). In a reduced-depth model (`planning.reduced_model`) a decision counts for
    ``multiplicities`` decisions, and one rank holds ``held`` times the values that a decision of the first stage has in
    a step. ``slowest``: with micro-batches by rank, the rank whose seconds count. ``recomputing``: how the software
    recomputes. ``blocks``: the recomputed blocks. ``saved``: the values kept for backward. ``of_parameter``, ``views``:
    by decision, whether its value is a parameter (also read by several), or a view of parameters. ``lookups``: tables
    on the host, and the ops that read them. ``sparse``: tables with sparse gradients. ``away``: by decision, the tiers
    of a parameter. ``buckets``: of gradients.
    """

    def __init__(self, space: StrategySpace, hybrid: Hybrid | None = None,
                 stages_of: Sequence[tuple[int, ...]] | None = None, training: bool = True,
                 multiplicities: Sequence[int] | None = None, held: Sequence[float] | None = None,
                 recomputing: Recomputing | None = None, alike: np.ndarray | None = None, slowest: int = 0) -> None:
        self.space, self.hybrid, self.alike, self.slowest = space, hybrid or Hybrid(), alike, slowest
        self.multiplicities, self.held = multiplicities or [1] * len(space), held or [1] * len(space)
        self.one_for_all = held is not None
        self.stages_of = [stages or (0,) for stages in stages_of] if stages_of is not None else [(0,)] * len(space)
        self.unused = frozenset(index for index, stages in enumerate(stages_of or ()) if not stages)
        self._by_group = [*self.hybrid.by_rank[slowest : slowest + 1]] or [
            self.hybrid.micro_batches_on(group) for group in range(len(self.hybrid.groups))]
        self.in_one = [*map(len, set(self.stages_of))] == [1]  # all decisions on one stage
        self.blocks = RecomputedBlocks(space, self.hybrid, self.stages_of, recomputing or Recomputing())
        crossing = frozenset((use.target, use.position) for use in space.uses if self.crosses(use))
        self.buckets = EvenBuckets(space, self.multiplicities, self.hybrid.sum_dtype)
        self.saved = SavedValues(space, self.blocks, crossing, training)
        self.of_parameter = [is_parameter(space, index) for index in range(len(space))]
        self.views = _views_of_parameters(space, self.of_parameter)
        self.lookups, self.sparse = HostLookups(space, self.hybrid.on_host, self.hybrid.cached), SparseTables(
            space, training)
        offload, tables = self.hybrid.offload, self.lookups.names
        self.away: list[Offload] = [offload.of(decision.path, tables) if decision.kind == "parameter" else ON_DEVICE
                                    for decision in space.decisions]

    def crosses(self, use: TensorUse) -> bool:
        """Whether the value is sent to a later stage."""
        return not self.in_one and self.stages_of[use.target][0] > self.stages_of[use.source][-1]

    def op_times(self, index: int, stage: int | None = None) -> tuple[int, int]:
        """Executions (forward, backward) of an op per step, on a rank of the stage; recompute counts as forward."""
        count = self.count(index, stage) * self.multiplicities[index]
        return count * (2 if index in self.blocks.runs_again else 1), count

    def use_times(self, use: TensorUse, stage: int | None = None, choice: int | None = None) -> UseTimes:
        """Executions of a use's redistribution per step, on a rank of the stage. ``choice``: the number of the target's
        strategy (None: one that saves what the op does)."""
        some = self.multiplicities[use.target]
        if use.target in self.unused:
            return UseTimes(0, 0, 0)
        count, again = self.count(use.target, stage) * some, self.reads_again(use)
        if choice is not None and (skips := self.skips(use)) is not None:
            again &= not skips[choice]
        if self.of_parameter[use.source] or (self.views[use.source] and self.hybrid.alternates):
            count //= self.hybrid.copies  # which share what is gathered and reduced
        forward = backward = count
        if self.of_parameter[use.source]:
            forward = count if self.hybrid.zero_stage == 3 else some
            backward = count if self.hybrid.zero_stage >= 2 else some
        repeats = parts_reading(self, use, stage) if again else 0
        return UseTimes(forward, repeats * count, backward if use.target in self.space.differentiated else 0)

    def count(self, index: int, stage: int | None = None) -> int:
        """Micro-batches per rank of a stage that has the decision (default: the first such stage)."""
        if index in self.unused:
            return 0
        return self.micro_batches_on(self.stages_of[index][0] if stage is None else stage)

    def micro_batches_on(self, stage: int) -> int:
        """Micro-batches per rank of a stage; all of them in a reduced-depth model, which has no stages."""
        return self.hybrid.micro_batches if self.one_for_all else self._by_group[stage % len(self._by_group)]

    def reads_again(self, use: TensorUse) -> bool:
        """Whether the redistribution runs again for backward: in a recomputed block, or as a ZeRO-3 gather."""
        block = self.blocks.of[use.target] if self.blocks.sends_again else None
        before_block = self.of_parameter[use.source] and (self.hybrid.zero_stage < 3 or self.hybrid.prefetches)
        if before_block or block is None:
            return self.gathers_again(use)
        return use.target <= self.blocks.starts.get(block, -1) or use.target < self.blocks.ends[block]

    def prefetches(self, use: TensorUse) -> bool:
        """Whether the use reads a parameter that ZeRO-3 prefetches."""
        return self.of_parameter[use.source] and self.hybrid.prefetches

    def gathers_again(self, use: TensorUse) -> bool:
        """Whether ZeRO-3 redistributes a parameter again in backward, rather than keep the result: an op saves it, or a
        recomputed block reads it. (The same for views of parameters, but recomputed blocks have theirs inside.)"""
        inside = self.blocks.of[use.target] is not None
        if self.hybrid.zero_stage < 3 or not (self.of_parameter[use.source] or (self.views[use.source] and not inside)):
            return False
        return self.saved.copy_is_kept(use) or inside

    def skips(self, use: TensorUse) -> np.ndarray | None:
        """Whether each strategy of the target spares what `gathers_again` would repeat; None: no strategy does."""
        spares = self.gathers_again(use) and self.blocks.of[use.target] is None
        return self.saved.skips(use) if spares else None

    def offloads(self, index: int) -> Offloads:
        """How often per step the op's results are copied to the host and back."""
        leaves = self.blocks.moves(index) and self.saved.inside(index) and index in self.saved.first_need
        return self._offloads(index) if leaves else NO_OFFLOADS

    def offloads_copy(self, use: TensorUse) -> Offloads:
        """How often per step a redistributed copy is copied to the host and back."""
        leaves = self.blocks.moves(use.target) and not self.of_parameter[use.source]
        return self._offloads(use.target) if leaves and self.saved.copy_is_away(use) else NO_OFFLOADS

    def _offloads(self, index: int) -> Offloads:
        """Copies of what a decision saves. Those of the last block need not come back where its backward follows its
        forward at once: they are on the device still."""
        some, block, at_once = self.multiplicities[index], self.blocks.evicted[index], self.in_flight == [1]
        stays = at_once and block is not None and self.blocks.next_offloaded[block] is None
        there = self.count(index) * some
        return Offloads(there, self.count(index) * (some - stays))

    def summing(self, use: TensorUse) -> Summing:
        """How the gradients of the value that a use reads are summed: in buckets or not, and in which dtype."""
        if not (self.of_parameter[use.source] and _trainable(self, use.meta)):
            return ALONE
        dtype = self.hybrid.sum_dtype or use.meta.dtype
        scale, together = dtype.itemsize / use.meta.dtype.itemsize, not self.hybrid.reads_alone
        if not together:
            return Summing(0.0, scale)
        return Summing(self.buckets.even(self.hybrid.bucket_bytes), scale, True, tuple(
            (axis, self.buckets.even(most)) for axis, most in self.hybrid.fusion.axis_bytes))

    def accumulator_bytes(self, meta: TensorMeta) -> int:
        """Bytes per element of a gradient accumulator more precise than the gradient, kept beside it (0: none)."""
        if self.hybrid.sum_dtype is None or self.hybrid.is_plain or not _trainable(self, meta):
            return 0
        found = torch.promote_types(meta.dtype, self.hybrid.sum_dtype)
        return 0 if found == meta.dtype else found.itemsize

    def ranks_with(self, index: int) -> tuple[int, ...]:
        """The ranks of the pipeline axis that hold a parameter and sum its gradients; empty for other decisions."""
        decision, groups = self.space.decisions[index], self.hybrid.groups
        if decision.kind != "parameter" or not _trainable(self, self.space.strategy_sets[index].output_metas[0]):
            return ()
        stages = (groups.index(max(groups)),) if self.one_for_all else self.stages_of[index]
        return self.hybrid.ranks_of(*stages)

    def sums(self, use: TensorUse) -> int:
        """How often per step a gradient of the parameter that a use reads is added to its accumulator."""
        if self.hybrid.micro_batches == 1:
            return 0
        trainable = self.space.decisions[use.source].kind == "parameter" and _trainable(self, use.meta)
        return max(0, self.count(use.target) - 1) * self.multiplicities[use.target] if trainable else 0

    @cached_property
    def in_flight(self) -> list[int]:
        """By stage, the micro-batches whose activations it holds when its rank holds most bytes of saved values, as
        they are before anything is sharded."""
        saved = Counter[int]()
        for index in () if self.one_for_all or self.in_one else self.saved.first_need:
            stored = self.space.decisions[index].kind in ("parameter", "buffer", "input")
            if not stored and not self.saved.inside(index):
                metas = self.space.strategy_sets[index].output_metas
                saved[self.stages_of[index][0]] += sum(meta.num_bytes for number, meta in enumerate(metas)
                                                       if (index, number) in self.saved.kept)
        return in_flight_by_bytes(self.hybrid, [saved[stage] for stage in range(self.hybrid.stages)])

    def deferred_of(self, stage: int) -> int:
        """Micro-batches whose weight gradients the stage defers."""
        h = self.hybrid
        if self.one_for_all and h.recompute != "none":  # the last rank defers most; otherwise part of `held`
            stage = h.pipeline_ranks - 1
        return h.pipelining.deferred(h, stage)

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers of every value that crosses a cut, on each stage that sends or receives it."""
        return stage_buffers(self)


def parts_reading(counts: ExecutionCounts, use: TensorUse, stage: int | None) -> int:
    """How many parts of a backward (zero bubble has two) read an op's operand: the second computes the gradient of a
    weight, the first those of other operands. The first stage has one part."""
    on_first = not counts.one_for_all and (counts.stages_of[use.target][0] if stage is None else stage) == 0
    reads = use.meta.requires_grad and counts.blocks.of[use.target] is None
    return 2 if counts.hybrid.puts_off_weights and reads and not on_first else 1


def _views_of_parameters(space: StrategySpace, of_parameter: Sequence[bool]) -> list[bool]:
    """By decision, whether it is an op that makes a view of parameters, or of such views."""
    found = [False] * len(space)
    for index, s in enumerate(space.strategy_sets):
        if s.rule is not None and s.rule.alias and (uses := space.uses_by.get(index, ())):
            found[index] = all(of_parameter[use.source] or found[use.source] for use in uses)
    return found
