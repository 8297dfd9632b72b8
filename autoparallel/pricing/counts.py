"""Execution counts of decisions and tensor uses in one step, and live intervals of values.

Time is discrete: of N decisions, decision i runs forward at time i and backward at time 2N - i. The times of the
pipeline's ranks follow one another, so that one memory limit applies to each of them. A saved tensor lives from its
forward to its backward, once per micro-batch in flight; a recomputed value lives only while its block runs again.
Parameters, gradients and optimizer state live during the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from autoparallel.capture import TensorMeta
from autoparallel.plans import Hybrid
from autoparallel.schedule.in_flight import in_flight
from autoparallel.strategies.space import StrategySet, StrategySpace, TensorUse

#: Op classes (`Rule.op_class`) whose results recompute="selective" keeps, as in `lower.recompute_pass`.
KEPT_CLASSES = frozenset({"matmul", "attention", "conv"})


#: A value (decision, output), or a redistributed copy ("copy", decision, input).
Value = tuple[int, int] | tuple[str, int, int]


class LiveInterval(NamedTuple):
    """The interval [start, end) in which a value lives, and the number of copies."""

    interval: tuple[int, int]
    copies: float = 1


class LiveIntervals(NamedTuple):
    """Live intervals of many values: ``intervals`` (n, 2) as (start, end), ``copies`` (n,)."""

    intervals: np.ndarray
    copies: np.ndarray

    @classmethod
    def of(cls, starts: np.ndarray, ends: np.ndarray) -> LiveIntervals:
        return cls(np.stack([starts, ends], axis=1), np.ones(len(starts)))

    def put(self, which: np.ndarray | int, starts: np.ndarray | int, ends: np.ndarray | int,
            copies: np.ndarray | float) -> None:
        self.intervals[which, 0], self.intervals[which, 1], self.copies[which] = starts, ends, copies


class Recomputing(NamedTuple):
    """How software recomputes: whether a block's recompute ends where backward has all it needs (torch's early stop),
    and whether "selective" runs the core of attention again and nothing else (Megatron), or all but products,
    attention and convolutions."""

    early_stop: bool = True
    core_only: bool = False


class Summing(NamedTuple):
    """How gradients of parameters are summed over ranks: in buckets or not, in a dtype of ``scale`` times the bytes.
    ``of_parameter``: the value is a trainable parameter, which software may gather block by block."""

    in_buckets: bool = False
    scale: float = 1.0
    of_parameter: bool = False


#: One collective per gradient, in its own dtype.
ALONE = Summing()


class Buffer(NamedTuple):
    """Send and receive buffers on a stage: ``copies`` of the value that ``use`` reads."""

    use: TensorUse
    stage: int
    copies: int


class ExecutionCounts:
    """Counts and live intervals of one step (`Hybrid`) over one strategy graph.

    ``stages_of``: by decision, the stages that run it, in order (several for tied parameters and side computations; the
    default is one stage). In a reduced-depth model (`planning.reduced_model`) a decision counts for ``multiplicities``
    decisions, and one rank holds ``held`` times the values that a decision of the first stage has in a step.
    ``recomputing``: how the software recomputes.
    """

    def __init__(self, space: StrategySpace, hybrid: Hybrid | None = None,
                 stages_of: Sequence[tuple[int, ...]] | None = None, training: bool = True,
                 multiplicities: Sequence[int] | None = None, held: Sequence[float] | None = None,
                 recomputing: Recomputing | None = None) -> None:
        self.space, self.hybrid, self.recomputing = space, hybrid or Hybrid(), recomputing or Recomputing()
        self.multiplicities, self.held = multiplicities or [1] * len(space), held or [1] * len(space)
        self.one_for_all, self._num_decisions = held is not None, len(space)
        self.stages_of = stages_of if stages_of is not None else [(0,)] * len(space)
        self.in_one = [*map(len, set(self.stages_of))] == [1]  # all decisions on one stage
        self.within = [use for use in space.uses if not self._crosses(use)]
        self.first_saver: dict[Value, int] = {}
        self.kept = self._kept_values() if training else frozenset()
        self.last_use = _last_uses(space, self.within)
        blocks = self.hybrid.recompute != "none"
        self.block_of = [self._block(index) if blocks else None for index in range(len(space))]
        self.block_end = {block: index for index, block in enumerate(self.block_of) if block is not None}
        self.checkpoints = self._block_inputs() if blocks else frozenset()
        self.kept |= self.checkpoints | (self._results_kept() if training else frozenset())
        self.of_parameter = [self._is_parameter(index) for index in range(len(space))]
        self.by_parameter = frozenset(k.target for k in space.uses if self.of_parameter[k.source])
        self.last_trainable = {self.stages_of[i][0]: i for i in sorted(self.by_parameter)}

    def _crosses(self, use: TensorUse) -> bool:
        """Whether the value is sent to a later stage."""
        return not self.in_one and self.stages_of[use.target][0] > self.stages_of[use.source][-1]

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers of every value that crosses a cut, on each stage that sends or receives it.

        One per micro-batch in flight, plus pending ones (`_pending`). A stage that forwards a value has both kinds.
        """
        crossing = sorted((k for k in self.space.uses if self._crosses(k)), key=lambda k: self.stages_of[k.target])
        last = {(k.source, k.output): k for k in crossing}
        found = []
        for use in last.values():
            first, end = self.stages_of[use.source][0], self.stages_of[use.target][0]
            for stage in range(first, end + 1):
                sent, received = self._pending(stage)
                held = self.in_flight(stage)
                copies = (stage < end) * (held + sent) + (stage > first) * (held + received)
                found.append(Buffer(use, stage, copies))
        return tuple(found)

    def _pending(self, stage: int) -> tuple[int, int]:
        """The largest number of buffers beyond those of micro-batches in flight: (of values sent and of the gradients
        received for them, of values received and of the gradients sent for them).

        In its steady state torch's 1F1B keeps the last message of each kind until the next. Of the interleaved stages
        of a rank one has a message pending; a replicated stage has one in each direction. A zero-bubble stage keeps the
        output gradients of deferred weight gradients.
        """
        h, ranks = self.hybrid, self.hybrid.pipeline_ranks
        rank, again = stage % ranks, h.micro_batches > ranks
        if h.replicas:
            return (1, 1) if h.micro_batches_on(stage) > self.in_flight(stage) else (0, 0)
        if h.schedule == "1f1b":
            return (2, 1) if h.micro_batches > self.in_flight(stage) else (0, 0)
        if h.schedule == "interleaved":
            return int(stage == rank and (again or rank > 0)), (1 + again) * (stage >= h.stages - ranks and rank > 0)
        if h.schedule == "zero_bubble":
            return self._late_of(stage) + (rank == 0 and again), int(stage >= h.stages - ranks and rank > 0)
        return 0, 0

    def buffer_interval(self, stage: int) -> tuple[int, int]:
        """The whole step, on the stage's rank."""
        return self._start(stage), self._start(stage) + 2 * self._num_decisions + 1

    def _block(self, index: int) -> tuple[int, str] | None:
        path = self.space.blocks[index]
        return (self.stages_of[index][0], path) if path and self.hybrid.recomputed(path) else None

    def _block_inputs(self) -> frozenset[Value]:
        """Values (decision, output) that a block keeps: its inputs, which it reads when it runs again, and its values
        that others need. Views and shared reads stand for the values that they pass on."""
        found: set[Value] = set()
        for use in reversed(self.within):  # ordered by target
            target, rule = use.target, self.space.strategy_sets[use.target].rule
            passes_on = self.space.decisions[target].kind == "shared_read" or (rule is not None and rule.alias)
            crosses = self.block_of[use.source] != self.block_of[target]
            wanted = self.block_of[target] is not None or (use.source, use.output) in self.kept
            if (crosses and wanted) or (passes_on and (target, 0) in found):
                found.add((use.source, use.output))
        return frozenset(found)

    def _results_kept(self) -> frozenset[Value]:
        """Results that recompute="selective" keeps, whether backward needs them or not, to avoid running their ops
        again."""
        if self.hybrid.recompute != "selective":
            return frozenset()
        inside = (i for i, block in enumerate(self.block_of) if block is not None and not self.again(i))
        return frozenset((i, 0) for i in inside if self.space.strategy_sets[i].output_metas[0].requires_grad)

    def _is_parameter(self, index: int) -> bool:
        decision = self.space.decisions[index]
        if decision.kind == "shared_read":
            return all(self.space.decisions[k.source].kind == "parameter" for k in self.space.uses_by[index])
        return decision.kind == "parameter"

    # --- execution counts -------------------------------------------------------------------------------------------

    def again(self, index: int) -> bool:
        """Whether recompute runs the decision again in backward."""
        if self.block_of[index] is None or self.hybrid.recompute == "offload":
            return False
        rule = self.space.strategy_sets[index].rule
        if self.hybrid.recompute == "selective" and self.recomputing.core_only:
            return rule is not None and rule.op_class == "attention"
        return self.hybrid.recompute == "full" or rule is None or rule.op_class not in KEPT_CLASSES

    def _away(self, index: int) -> bool:
        """Whether the decision's results leave the device between forward and backward (recomputed or offloaded)."""
        return self.again(index) or (self.hybrid.recompute == "offload" and self.block_of[index] is not None)

    def offloads(self, index: int) -> int:
        """How often per step the op's results are moved to the host and back."""
        if self.hybrid.recompute != "offload" or not self._inside(index):
            return 0
        return self._count(index) * self.multiplicities[index] if index in self._first_need else 0

    def offloads_copy(self, use: TensorUse) -> int:
        """How often per step a redistributed copy is moved to the host and back."""
        if self.hybrid.recompute != "offload" or self.of_parameter[use.source] or not self._copy_away(use):
            return 0
        return self._count(use.target) * self.multiplicities[use.target]

    def _count(self, index: int, stage: int | None = None) -> int:
        """Micro-batches per rank of a stage that has the decision (default: the first such stage)."""
        return self.micro_batches_on(self.stages_of[index][0] if stage is None else stage)

    def micro_batches_on(self, stage: int) -> int:
        """Micro-batches per rank of a stage; all of them in a reduced-depth model, which has no stages."""
        return (
            self.hybrid.micro_batches
            if self.one_for_all
            else self._micro_batches_by_group[stage % len(self.hybrid.groups)]
        )

    @cached_property
    def _micro_batches_by_group(self) -> list[int]:
        return [self.hybrid.micro_batches_on(group) for group in range(len(self.hybrid.groups))]

    def op_times(self, index: int, stage: int | None = None) -> tuple[int, int]:
        """Executions (forward, backward) of an op per step, on a rank of the stage; recompute counts as forward."""
        count = self._count(index, stage) * self.multiplicities[index]
        return count * (2 if index in self.runs_again else 1), count

    @cached_property
    def runs_again(self) -> frozenset[int]:
        """Decisions that recompute runs again: those before the early stop of their block."""
        inside = ((index, block) for index, block in enumerate(self.block_of) if block is not None)
        return frozenset(index for index, block in inside if self.again(index) and index < self._ends_again[block])

    @cached_property
    def _ends_again(self) -> dict[tuple[int, str], int]:
        """By block, the decision before which its recompute stops: the last op that saves an input, or after the last
        op that saves its result (torch's early stop); the end of the block with zero bubble, whose backward has two
        parts."""
        if not self.recomputing.early_stop or (self.hybrid.schedule == "zero_bubble" and self.hybrid.stages > 1):
            return {block: end + 1 for block, end in self.block_end.items()}
        found = dict.fromkeys(self.block_end, 0)
        for index, (block, s) in enumerate(zip(self.block_of, self.space.strategy_sets, strict=True)):
            saves = s.rule is not None and (s.rule.saves or s.rule.saves_output)
            if block is not None and s.rule is not None and saves and any(m.requires_grad for m in s.output_metas):
                found[block] = index + s.rule.saves_output
        return found

    def use_times(self, use: TensorUse, stage: int | None = None) -> tuple[int, int]:
        """Executions (forward, backward) of a use's redistribution per step, on a rank of the stage."""
        some = self.multiplicities[use.target]
        count, again = self._count(use.target, stage) * some, self.reads_again(use)
        if self.of_parameter[use.source]:
            return {0: (some, some), 1: (some, some), 2: (some, count), 3: (count + again * count, count)}[
                self.hybrid.zero_stage]
        return count * (2 if again else 1), count

    def reads_again(self, use: TensorUse) -> bool:
        """Whether the redistribution runs again for backward: in a recomputed block, or as a ZeRO-3 gather."""
        if self.of_parameter[use.source]:
            return self.gathers_again(use)
        block = self.block_of[use.target] if self.hybrid.recompute == "full" else None
        return block is not None and use.target <= self._ends_again[block]

    def prefetches(self, use: TensorUse) -> bool:
        """Whether the use reads a parameter that ZeRO-3 prefetches."""
        return self.of_parameter[use.source] and self.hybrid.prefetches

    def gathers_again(self, use: TensorUse) -> bool:
        """Whether ZeRO-3 gathers the parameter again in backward: an op saves it, or a recomputed block reads it."""
        if self.hybrid.zero_stage < 3:
            return False
        return ("copy", use.target, use.position) in self.kept or self.block_of[use.target] is not None

    def summing(self, use: TensorUse) -> Summing:
        """How the gradients of the value that a use reads are summed: in buckets or not, and in which dtype."""
        if not (self.of_parameter[use.source] and self._trainable(use.meta)):
            return ALONE
        dtype = self.hybrid.sum_dtype or use.meta.dtype
        once = self.hybrid.is_plain or self.hybrid.zero_stage < 2
        return Summing(once, dtype.itemsize / use.meta.dtype.itemsize, True)

    def _trainable(self, meta: TensorMeta) -> bool:
        return meta.requires_grad and bool(self.kept)

    def accumulator_bytes(self, meta: TensorMeta) -> int:
        """Bytes per element of a gradient accumulator more precise than the gradient, kept beside it (0: none)."""
        if self.hybrid.sum_dtype is None or self.hybrid.is_plain or not self._trainable(meta):
            return 0
        found = torch.promote_types(meta.dtype, self.hybrid.sum_dtype)
        return 0 if found == meta.dtype else found.itemsize

    def ranks_with(self, index: int) -> tuple[int, ...]:
        """The ranks of the pipeline axis that hold a parameter and sum its gradients; empty for other decisions."""
        decision, groups = self.space.decisions[index], self.hybrid.groups
        if decision.kind != "parameter" or not self._trainable(self.space.strategy_sets[index].output_metas[0]):
            return ()
        stages = (groups.index(max(groups)),) if self.one_for_all else self.stages_of[index]
        return self.hybrid.ranks_of(*stages)

    def sums(self, use: TensorUse) -> int:
        """How often per step a gradient of the parameter that a use reads is added to its accumulator."""
        if self.hybrid.micro_batches == 1:
            return 0
        trainable = self.space.decisions[use.source].kind == "parameter" and self._trainable(use.meta)
        return (self._count(use.target) - 1) * self.multiplicities[use.target] if trainable else 0

    # --- live intervals ---------------------------------------------------------------------------------------------

    def _at(self, index: int) -> tuple[int, int]:
        """The start of the rank of the decision's (first) stage, and 2N, the length from forward to backward."""
        return int(self._starts[index]), 2 * self._num_decisions

    @cached_property
    def _starts(self) -> np.ndarray:
        """The start of the rank of each decision's first stage."""
        return self._by_stage(self._start)

    def _by_stage(self, what: Callable[[int], float]) -> np.ndarray:
        """``what(stage)`` of each decision's first stage."""
        known = {stages: what(stages[0]) for stages in set(self.stages_of)}
        return np.array([known[stages] for stages in self.stages_of])

    def _start(self, stage: int) -> int:
        """The start time of the stage's rank; stages of one rank share their times, as they hold memory together."""
        return stage % len(self.hybrid.groups) * (2 * self._num_decisions + 2)

    def turning_of(self, stage: int) -> int:
        """The time between forward and backward on the stage's rank."""
        return self._start(stage) + self._num_decisions

    def in_flight(self, stage: int) -> int:
        """The largest number of micro-batches whose activations the stage holds at once."""
        return self._in_flight[stage]

    @cached_property
    def _in_flight(self) -> list[int]:
        return [in_flight(self.hybrid, stage) for stage in range(self.hybrid.stages)]

    @cached_property
    def decision_intervals(self) -> LiveIntervals:
        """The live intervals of each decision's results."""
        decisions, start, turning = np.arange(self._num_decisions), self._starts, 2 * self._num_decisions
        last = np.array([self.last_use.get(index, index) for index in range(self._num_decisions)], np.int64)
        found = LiveIntervals.of(start + decisions, start + np.maximum(decisions, last) + 1)
        late = np.zeros(self._num_decisions)
        late[list(self.by_parameter)] = self._late[list(self.by_parameter)]
        if (some := np.flatnonzero(late)).size:  # deferred weight gradients
            found.put(some, start[some] + some, start[some] + turning + 1 - some, self._held[some] * late[some])
        kept = np.array(sorted(self._first_need), np.int64)
        inside = np.array([self._inside(index) for index in kept.tolist()], bool)
        savers = np.array([self._first_need[index] for index in kept.tolist()], np.int64)
        self._keep(found, kept, kept, inside, late[kept], savers)
        stored = np.array(
            [decision.kind in ("parameter", "buffer", "input") for decision in self.space.decisions], bool
        )
        found.put(stored, start[stored], start[stored] + turning + 1, self._held[stored])
        return self._over(found, decisions)

    @cached_property
    def copy_intervals(self) -> LiveIntervals:
        """The live intervals of each use's redistributed copy."""
        uses, targets = self.space.uses, np.array([use.target for use in self.space.uses], np.int64)
        found = LiveIntervals.of(self._starts[targets] + targets, self._starts[targets] + targets + 1)
        kept = [number for number, use in enumerate(uses)
                if ("copy", use.target, use.position) in self.kept and not self._is_gathered(use)]
        inside = np.array([self._copy_away(uses[number]) for number in kept], bool)
        self._keep(found, np.array(kept, np.int64), targets[kept], inside, np.zeros(len(kept)), targets[kept])
        for number, use in enumerate(uses):
            if self.of_parameter[use.source] and (live := self._parameter_interval(use)) is not None:
                found.put(number, *live.interval, live.copies)
        return self._over(found, targets)

    @cached_property
    def _held(self) -> np.ndarray:
        return np.array(self.held, float)

    @cached_property
    def _late(self) -> np.ndarray:
        """By decision, the micro-batches whose weight gradients a zero-bubble stage defers, with their saved
        tensors."""
        return self._by_stage(self._late_of)

    def _over(self, found: LiveIntervals, decisions: np.ndarray) -> LiveIntervals:
        """Extend intervals in the first stages of these decisions to all their stages. Stages between count as well: an
        interval is contiguous."""
        for number, index in enumerate(decisions.tolist() if not self.in_one else ()):
            if len(stages := self.stages_of[index]) > 1:
                shifts = [self._start(stage) - self._start(stages[0]) for stage in stages]
                found.intervals[number] += (min(shifts), max(shifts))
        return found

    @cached_property
    def _first_need(self) -> dict[int, int]:
        """By decision with saved results, the first op that saves one (0: kept without being needed)."""
        found: dict[int, int] = {}
        for value in self.kept:
            if len(value) == 2:
                needs = self.first_saver.get(value, 0)
                found[value[0]] = min(needs, found.get(value[0], needs))
        return found

    def _inside(self, index: int) -> bool:
        """Whether the decision's results are needed only inside its block and leave the device until its backward."""
        if self.block_of[index] is None or not self._away(index):
            return False
        outputs = range(len(self.space.strategy_sets[index].output_metas))
        return not any((index, o) in self.checkpoints for o in outputs)

    def _copy_away(self, use: TensorUse) -> bool:
        """Whether a saved redistributed copy is recomputed, or fetched from the host."""
        kept = ("copy", use.target, use.position) in self.kept and self.block_of[use.target] is not None
        return kept and (self.hybrid.recompute == "full" or self._away(use.target))

    def _late_of(self, stage: int) -> int:
        """Micro-batches whose weight gradients the stage defers."""
        h = self.hybrid
        if h.schedule != "zero_bubble":
            return 0
        if self.one_for_all and h.recompute != "none":  # the last rank defers most; otherwise part of `held`
            stage = h.pipeline_ranks - 1
        return min(stage % h.pipeline_ranks, h.micro_batches)

    def _keep(
        self,
        found: LiveIntervals,
        numbers: np.ndarray,
        decisions: np.ndarray,
        inside: np.ndarray,
        gradients: np.ndarray,
        savers: np.ndarray,
    ) -> None:
        """Set the live intervals ``numbers`` of saved values of ``decisions``.

        ``inside``: needed by their block only, which recomputes or fetches them. ``gradients``: gradients of them that
        are kept as well. ``savers``: the first ops that save them; values that only ops after the stage's last
        parameter save are not kept for deferred weight gradients.
        """
        start, turning, late = self._starts[decisions], 2 * self._num_decisions, self._late[decisions]
        put_off = np.where(inside & (self.hybrid.recompute == "offload"), 0, late)  # fetched again for each part
        last = self._by_stage(lambda stage: self.last_trainable.get(stage, 2 * self._num_decisions))[decisions]
        held = self._by_stage(self.in_flight)[decisions] - np.where(savers > last, late, 0)
        count = np.where(inside, put_off, held) + gradients
        found.put(numbers, start + decisions, start + turning + 1 - decisions, self._held[decisions] * count)
        in_block = np.array([self.block_of[index] is not None for index in decisions.tolist()], bool)
        again = in_block & inside & (put_off + gradients == 0)
        ends = np.array([self.block_end[self.block_of[index]] for index in decisions[again].tolist()], np.int64)
        found.put(numbers[again], start[again] + turning - ends, start[again] + turning + 1 - decisions[again], 1)

    def _is_gathered(self, use: TensorUse) -> bool:
        """Whether the use reads a parameter that ZeRO-3 gathers."""
        return self.of_parameter[use.source] and self.hybrid.zero_stage == 3

    def _parameter_interval(self, use: TensorUse) -> LiveInterval | None:
        """The live interval of a gathered parameter: of the step with several micro-batches, or prefetched by ZeRO-3
        (None: as any copy)."""
        if self.hybrid.zero_stage < 3 and not self.hybrid.is_plain:
            apart = self.accumulator_bytes(use.meta) > 0
            sums = self.hybrid.zero_stage < 2 and self._count(use.target) > 1 and not apart
            start, turning = self._at(use.target)
            return LiveInterval(
                (start, start + turning + 1), self.held[use.source] * (2 if sums else 1)
            )  # and its gradient
        return self._gathered_copy_interval(use) if self.prefetches(use) else None

    def _gathered_copy_interval(self, use: TensorUse) -> LiveInterval:
        """The live interval of a parameter prefetched by ZeRO-3: from the use of the parameter before it. If backward
        gathers it again, backward's interval: it holds more than forward at the same decision."""
        (start, turning), own, before = self._at(use.target), self._read_at(use.target), self._asked_before(use, 1)
        if self.gathers_again(use):
            return LiveInterval((start + turning - before[1], start + turning - use.target + 1))
        return LiveInterval((start + before[0], start + own[1] + 1))

    def gathered_interval(self, use: TensorUse) -> tuple[int, int]:
        """The live interval of a ZeRO-3 gather's intermediate result (gathered over one axis, not yet over the next):
        it is prefetched one reader earlier than the final result, and lives until the next gather completes."""
        (start, turning), own, before = self._at(use.target), self._read_at(use.target), self._asked_before(use, 2)
        if self.gathers_again(use):
            return start + turning - before[1], start + turning - own[
                1
            ] + 1  # the next gathers are launched before this one is awaited
        return start + before[0], start + own[0] + (before == own)

    def _asked_before(self, use: TensorUse, count: int) -> tuple[int, int]:
        """The reader of parameters ``count`` positions before this use's: in backward order if backward gathers again,
        else in forward order (or the first one)."""
        places, numbers = self._all_read_at
        number = numbers[self._read_at(use.target)] + (count if self.gathers_again(use) else -count)
        return places[min(max(number, 0), len(places) - 1)]

    def _read_at(self, target: int) -> tuple[int, int]:
        """(first, last) decision of the block of ``target``; outside blocks the decision itself, twice."""
        block = self.block_of[target]
        return (target, target) if block is None else (self._block_begin[block], self.block_end[block])

    @cached_property
    def _all_read_at(self) -> tuple[list[tuple[int, int]], Mapping[tuple[int, int], int]]:
        """All (first, last) readers of parameters, in order, and their positions."""
        places = sorted({self._read_at(index) for index in self.by_parameter})
        return places, {place: number for number, place in enumerate(places)}

    @cached_property
    def _block_begin(self) -> dict[tuple[int, str], int]:
        return {block: index for index, block in reversed(list(enumerate(self.block_of))) if block is not None}

    def _kept_values(self) -> frozenset[Value]:
        """Values and copies that backward needs; also fills `first_saver`.

        Views and shared reads use the memory of their inputs, so a saved view counts as its input.
        """
        space, kept = self.space, set[Value]()
        known = {key: _Needs.of(s) for key, s in {id(s): s for s in space.strategy_sets}.items()}
        needs = [known[id(s)] for s in space.strategy_sets]
        for index in range(len(needs) - 1, -1, -1):
            passes_on, output, inputs = needs[index]
            passes_on = passes_on or space.decisions[index].kind == "shared_read"
            if output:
                kept.add((index, 0))
                self.first_saver[index, 0] = index
            if not inputs and not (passes_on and (index, 0) in kept):
                continue
            saver = self.first_saver.get((index, 0), index) if passes_on else index
            for use in space.uses_by.get(index, ()):
                if passes_on or use.position in inputs:
                    kept.add(("copy", index, use.position))
                    if not self._crosses(use):
                        value = (use.source, use.output)
                        kept.add(value)
                        before = self.first_saver.get(value, saver)
                        self.first_saver[value] = saver if saver < before else before
        return frozenset(kept)


class _Needs(NamedTuple):
    """What backward of an op needs: its output, and these inputs. ``passes_on``: the op is a view."""

    passes_on: bool
    output: bool
    inputs: Collection[int]

    @classmethod
    def of(cls, s: StrategySet) -> _Needs:
        rule = s.rule
        if rule is None:
            return cls(False, False, ())
        grad = any(m.requires_grad for m in s.output_metas)
        output = bool(rule.saves_output) and s.output_metas[0].requires_grad
        return cls(rule.alias, output, rule.saves if grad and not rule.alias else ())


def _last_uses(space: StrategySpace, uses: Sequence[TensorUse]) -> dict[int, int]:
    """The last reader of each decision's results, also through shared reads."""
    last: dict[int, int] = {}
    for use in reversed(uses):  # ordered by target
        passes_on = space.decisions[use.target].kind == "shared_read"
        read = last.get(use.target, use.target) if passes_on else use.target
        last[use.source] = max(last.get(use.source, 0), read)
    return last
