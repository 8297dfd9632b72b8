"""How often each site and link of a program works in one step, and how long its values live.

Time runs over the sites of a rank's stages forward (site i at time i) and backward (site i at time 2N - i); the ranks'
times follow one another, so that one limit holds for each of them. What backward needs lives from the one to the other,
once for each micro-batch in flight; what is recomputed lives only while its block runs again. Parameters, gradients and
optimizer state live always.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from autoparallel.capture import TensorMeta
from autoparallel.capture.blocks import block_path
from autoparallel.plans import Hybrid
from autoparallel.schedule.in_flight import in_flight
from autoparallel.strategies.space import StrategySet, StrategySpace, TensorUse

#: Classes of ops (`Rule.op_class`) whose results recompute="selective" keeps, as `lower.recompute` does.
KEPT_CLASSES = frozenset({"matmul", "attention", "conv"})


#: A value (site, output), or a copy ("copy", site, input).
Value = tuple[int, int] | tuple[str, int, int]


class LiveInterval(NamedTuple):
    """When a value is there, and how many of it."""

    interval: tuple[int, int]
    copies: float = 1


class LiveIntervals(NamedTuple):
    """The same of many: a row (start, end) each, and copies."""

    intervals: np.ndarray
    copies: np.ndarray

    @classmethod
    def of(cls, starts: np.ndarray, ends: np.ndarray) -> LiveIntervals:
        return cls(np.stack([starts, ends], axis=1), np.ones(len(starts)))

    def put(self, which: np.ndarray | int, starts: np.ndarray | int, ends: np.ndarray | int,
            copies: np.ndarray | float) -> None:
        self.intervals[which, 0], self.intervals[which, 1], self.copies[which] = starts, ends, copies


class Summing(NamedTuple):
    """How gradients of parameters are summed over ranks: many at once, in a type of ``scale`` times the bytes."""

    in_buckets: bool = False
    scale: float = 1.0


#: One collective for each gradient, in its own type.
ALONE = Summing()


class Buffer(NamedTuple):
    """So many times the value that a link reads, on a stage: to send or to receive it."""

    use: TensorUse
    stage: int
    copies: int


class ExecutionCounts:
    """A hybrid step over one strategy space; ``stages_of`` has for each site the stages that run it, in order (all
    the first without a pipeline; several for tied parameters and what each stage computes itself).

    In a reduced-depth model (`planning.reduced_model`) a decision counts for ``multiplicities`` decisions, and one rank
    of the first stage holds ``held`` times its values.
    """

    def __init__(self, space: StrategySpace, hybrid: Hybrid | None = None,
                 stages_of: Sequence[tuple[int, ...]] | None = None, training: bool = True,
                 multiplicities: Sequence[int] | None = None, held: Sequence[float] | None = None) -> None:
        self.space, self.hybrid = space, hybrid or Hybrid()
        self.multiplicities, self.held = multiplicities or [1] * len(space), held or [1] * len(space)
        self.one_for_all, self._num_decisions = held is not None, len(space)
        self.stages_of = stages_of if stages_of is not None else [(0,)] * len(space)
        self.in_one = [*map(len, set(self.stages_of))] == [1]  # all sites on one stage, and the same
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
        """Whether the value is sent to the stage that reads it."""
        return not self.in_one and self.stages_of[use.target][0] > self.stages_of[use.source][-1]

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """Of what is sent, on each stage that sends or gets it.

        There is one for each micro-batch in flight, and some that are on their way (`_pending`). A stage that passes
        a value on has it twice.
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
        """Buffers beyond those of micro-batches in flight, at the fullest moment: of what a stage sends on (gradients
        that come back), and of what it receives (the next value, gradients that it sends).

        Where a stage takes micro-batches up as it gives others back, torch's 1F1B has the last message of each kind
        until the next; of a rank's stages that take turns, one has a message under way, and a stage on several ranks
        one each way. While gradients of weights are put off, those of outputs are kept.
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
        """The whole of a step on the stage's rank."""
        return self._start(stage), self._start(stage) + 2 * self._num_decisions + 1

    def _block(self, index: int) -> tuple[int, str] | None:
        decision = self.space.decisions[index]
        if decision.kind not in ("op", "shared_read"):
            return None
        node = decision.node if decision.ref is None else decision.ref.node
        path = block_path(self.space.graph.nodes[node].module_path)
        return (self.stages_of[index][0], path) if path and self.hybrid.recomputed(path) else None

    def _block_inputs(self) -> frozenset[Value]:
        """Values (site, output) that blocks keep to run again, or that others need of them; what passes a value on
        stands for that value."""
        found: set[Value] = set()
        for use in reversed(self.within):  # in the order of their targets
            target, rule = use.target, self.space.strategy_sets[use.target].rule
            passes_on = self.space.decisions[target].kind == "shared_read" or (rule is not None and rule.alias)
            crosses = self.block_of[use.source] != self.block_of[target]
            wanted = self.block_of[target] is not None or (use.source, use.output) in self.kept
            if (crosses and wanted) or (passes_on and (target, 0) in found):
                found.add((use.source, use.output))
        return frozenset(found)

    def _results_kept(self) -> frozenset[Value]:
        """What recompute="selective" keeps whether backward needs it or not, so that it need not be made again."""
        if self.hybrid.recompute != "selective":
            return frozenset()
        inside = (i for i, block in enumerate(self.block_of) if block is not None and not self.again(i))
        return frozenset((i, 0) for i in inside if self.space.strategy_sets[i].output_metas[0].requires_grad)

    def _is_parameter(self, index: int) -> bool:
        decision = self.space.decisions[index]
        if decision.kind == "shared_read":
            return all(self.space.decisions[k.source].kind == "parameter" for k in self.space.uses_by[index])
        return decision.kind == "parameter"

    # --- how often --------------------------------------------------------------------------------------------------

    def again(self, index: int) -> bool:
        """Whether the site runs again in backward."""
        if self.block_of[index] is None or self.hybrid.recompute == "offload":
            return False
        rule = self.space.strategy_sets[index].rule
        return self.hybrid.recompute == "full" or rule is None or rule.op_class not in KEPT_CLASSES

    def _away(self, index: int) -> bool:
        """Whether what the site makes is not on the device between forward and backward."""
        return self.again(index) or (self.hybrid.recompute == "offload" and self.block_of[index] is not None)

    def offloads(self, index: int) -> int:
        """How often in a step what the op makes is moved to the host and back."""
        if self.hybrid.recompute != "offload" or not self._inside(index):
            return 0
        return self._count(index) * self.multiplicities[index] if index in self._first_need else 0

    def offloads_copy(self, use: TensorUse) -> int:
        """How often in a step a redistributed copy is."""
        if self.hybrid.recompute != "offload" or self.of_parameter[use.source] or not self._copy_away(use):
            return 0
        return self._count(use.target) * self.multiplicities[use.target]

    def _count(self, index: int, stage: int | None = None) -> int:
        """How many micro-batches a rank of the stage runs that has the site (by default the first of several)."""
        return self.micro_batches_on(self.stages_of[index][0] if stage is None else stage)

    def micro_batches_on(self, stage: int) -> int:
        """How many micro-batches a rank of the stage runs. A sketch has no stages, and runs all."""
        return (
            self.hybrid.micro_batches
            if self.one_for_all
            else self._micro_batches_by_group[stage % len(self.hybrid.groups)]
        )

    @cached_property
    def _micro_batches_by_group(self) -> list[int]:
        return [self.hybrid.micro_batches_on(group) for group in range(len(self.hybrid.groups))]

    def op_times(self, index: int, stage: int | None = None) -> tuple[int, int]:
        """How often the op runs (forward, backward) in a step, on a rank of the stage. A block that runs again ends
        where the last op that backward needs anything of begins (torch's early stop), or where it is done, if that is
        its result."""
        count = self._count(index, stage) * self.multiplicities[index]
        return count * (2 if index in self.runs_again else 1), count

    @cached_property
    def runs_again(self) -> frozenset[int]:
        """Sites that run again in backward, before their block ends."""
        inside = ((index, block) for index, block in enumerate(self.block_of) if block is not None)
        return frozenset(index for index, block in inside if self.again(index) and index < self._ends_again[block])

    @cached_property
    def _ends_again(self) -> dict[tuple[int, str], int]:
        """By block, the site before which it ends when it runs again; its own end, if backward comes in parts."""
        if self.hybrid.schedule == "zero_bubble" and self.hybrid.stages > 1:
            return {block: end + 1 for block, end in self.block_end.items()}
        found = dict.fromkeys(self.block_end, 0)
        for index, (block, s) in enumerate(zip(self.block_of, self.space.strategy_sets, strict=True)):
            saves = s.rule is not None and (s.rule.saves or s.rule.saves_output)
            if block is not None and s.rule is not None and saves and any(m.requires_grad for m in s.output_metas):
                found[block] = index + s.rule.saves_output
        return found

    def use_times(self, use: TensorUse, stage: int | None = None) -> tuple[int, int]:
        """How often the link's redistribution runs (forward, backward) in a step, on a rank of the stage."""
        some = self.multiplicities[use.target]
        count, again = self._count(use.target, stage) * some, self.reads_again(use)
        if self.of_parameter[use.source]:
            return {0: (some, some), 1: (some, some), 2: (some, count), 3: (count + again * count, count)}[
                self.hybrid.zero_stage]
        return count * (2 if again else 1), count

    def reads_again(self, use: TensorUse) -> bool:
        """Whether the redistribution runs again for backward: with a block, or as ZeRO-3 gathers again."""
        if self.of_parameter[use.source]:
            return self.gathers_again(use)
        block = self.block_of[use.target] if self.hybrid.recompute == "full" else None
        return block is not None and use.target <= self._ends_again[block]

    def prefetches(self, use: TensorUse) -> bool:
        """Whether ZeRO-3 gathers what the link reads, ahead of its readers."""
        return self.of_parameter[use.source] and self.hybrid.prefetches

    def gathers_again(self, use: TensorUse) -> bool:
        """Whether backward asks for what ZeRO-3 gathered: an op that keeps it, or a block that runs again with it."""
        if self.hybrid.zero_stage < 3:
            return False
        return ("copy", use.target, use.position) in self.kept or self.block_of[use.target] is not None

    def summing(self, use: TensorUse) -> Summing:
        """How gradients of what the link reads are summed: in buckets (`lower.fuse`), in which type."""
        if not (self.of_parameter[use.source] and self._trainable(use.meta)):
            return ALONE
        dtype = self.hybrid.sum_dtype or use.meta.dtype
        once = self.hybrid.is_plain or self.hybrid.zero_stage < 2
        return Summing(once, dtype.itemsize / use.meta.dtype.itemsize)

    def _trainable(self, meta: TensorMeta) -> bool:
        return meta.requires_grad and bool(self.kept)

    def accumulator_bytes(self, meta: TensorMeta) -> int:
        """For each element of a parameter, of sums over turns that are more precise than its gradient and beside it."""
        if self.hybrid.sum_dtype is None or self.hybrid.is_plain or not self._trainable(meta):
            return 0
        found = torch.promote_types(meta.dtype, self.hybrid.sum_dtype)
        return 0 if found == meta.dtype else found.itemsize

    def ranks_with(self, index: int) -> tuple[int, ...]:
        """The ranks of the pipeline axis that have a parameter, and add up their gradients of it."""
        decision, groups = self.space.decisions[index], self.hybrid.groups
        if decision.kind != "parameter" or not self._trainable(self.space.strategy_sets[index].output_metas[0]):
            return ()
        stages = (groups.index(max(groups)),) if self.one_for_all else self.stages_of[index]
        return self.hybrid.ranks_of(*stages)

    def sums(self, use: TensorUse) -> int:
        """How often a gradient of what the link reads is added to those before."""
        if self.hybrid.micro_batches == 1:
            return 0
        trainable = self.space.decisions[use.source].kind == "parameter" and self._trainable(use.meta)
        return (self._count(use.target) - 1) * self.multiplicities[use.target] if trainable else 0

    # --- how long ---------------------------------------------------------------------------------------------------

    def _at(self, index: int) -> tuple[int, int]:
        """The start of the rank of the site's (first) stage, and its turning point."""
        return int(self._starts[index]), 2 * self._num_decisions

    @cached_property
    def _starts(self) -> np.ndarray:
        """By site, of the rank of its first stage."""
        return self._by_stage(self._start)

    def _by_stage(self, what: Callable[[int], float]) -> np.ndarray:
        """By site, of its first stage."""
        known = {stages: what(stages[0]) for stages in set(self.stages_of)}
        return np.array([known[stages] for stages in self.stages_of])

    def _start(self, stage: int) -> int:
        """The start of the stage's rank: the stages of one rank hold what they hold at the same time."""
        return stage % len(self.hybrid.groups) * (2 * self._num_decisions + 2)

    def turning_of(self, stage: int) -> int:
        """The moment between forward and backward of a stage's rank."""
        return self._start(stage) + self._num_decisions

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations a stage holds at its fullest moment."""
        return self._in_flight[stage]

    @cached_property
    def _in_flight(self) -> list[int]:
        return [in_flight(self.hybrid, stage) for stage in range(self.hybrid.stages)]

    @cached_property
    def decision_intervals(self) -> LiveIntervals:
        """Of what each site makes."""
        decisions, start, turning = np.arange(self._num_decisions), self._starts, 2 * self._num_decisions
        last = np.array([self.last_use.get(index, index) for index in range(self._num_decisions)], np.int64)
        found = LiveIntervals.of(start + decisions, start + np.maximum(decisions, last) + 1)
        late = np.zeros(self._num_decisions)
        late[list(self.by_parameter)] = self._late[list(self.by_parameter)]
        if (some := np.flatnonzero(late)).size:  # gradients of weights that are put off
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
        """Of the redistributed copy that each link makes."""
        uses, targets = self.space.uses, np.array([use.target for use in self.space.uses], np.int64)
        found = LiveIntervals.of(self._starts[targets] + targets, self._starts[targets] + targets + 1)
        kept = [number for number, use in enumerate(uses)
                if ("copy", use.target, use.position) in self.kept and not self._is_gathered(use)]
        inside = np.array([self._copy_away(uses[number]) for number in kept], bool)
        self._keep(found, np.array(kept, np.int64), targets[kept], inside, np.zeros(len(kept)), targets[kept])
        for number, use in enumerate(uses):
            if self.of_parameter[use.source] and (life := self._parameter_life(use)) is not None:
                found.put(number, *life.interval, life.copies)
        return self._over(found, targets)

    @cached_property
    def _held(self) -> np.ndarray:
        return np.array(self.held, float)

    @cached_property
    def _late(self) -> np.ndarray:
        """By site, micro-batches whose gradients of weights a zero-bubble stage puts off; it keeps all they need."""
        return self._by_stage(self._late_of)

    def _over(self, found: LiveIntervals, decisions: np.ndarray) -> LiveIntervals:
        """Lives in the first stages of these sites, on all. What several stages hold counts in those between as well:
        the search has one limit for one time."""
        for number, index in enumerate(decisions.tolist() if not self.in_one else ()):
            if len(stages := self.stages_of[index]) > 1:
                shifts = [self._start(stage) - self._start(stages[0]) for stage in stages]
                found.intervals[number] += (min(shifts), max(shifts))
        return found

    @cached_property
    def _first_need(self) -> dict[int, int]:
        """By site of which backward needs anything, the first op that does (0: it is kept without)."""
        found: dict[int, int] = {}
        for value in self.kept:
            if len(value) == 2:
                needs = self.first_saver.get(value, 0)
                found[value[0]] = min(needs, found.get(value[0], needs))
        return found

    def _inside(self, index: int) -> bool:
        """Whether what the site makes is needed by its block only, and not on the device until that runs backward."""
        if self.block_of[index] is None or not self._away(index):
            return False
        outputs = range(len(self.space.strategy_sets[index].output_metas))
        return not any((index, o) in self.checkpoints for o in outputs)

    def _copy_away(self, use: TensorUse) -> bool:
        """Whether a copy that backward needs is made again, or brought back from the host."""
        kept = ("copy", use.target, use.position) in self.kept and self.block_of[use.target] is not None
        return kept and (self.hybrid.recompute == "full" or self._away(use.target))

    def _late_of(self, stage: int) -> int:
        h = self.hybrid
        if h.schedule != "zero_bubble":
            return 0
        if self.one_for_all and h.recompute != "none":  # the last rank, which puts off most; else part of `held`
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
        """Set the lives of what backward needs of these sites: by ``savers`` and later ops, with so many gradients of
        it; ``inside``: by their block only, which makes it again or gets it back.

        What only ops behind the stage's last parameter need is not kept for gradients of weights that are put off.
        """
        start, turning, late = self._starts[decisions], 2 * self._num_decisions, self._late[decisions]
        put_off = np.where(inside & (self.hybrid.recompute == "offload"), 0, late)  # which comes back for each part
        last = self._by_stage(lambda stage: self.last_trainable.get(stage, 2 * self._num_decisions))[decisions]
        held = self._by_stage(self.in_flight)[decisions] - np.where(savers > last, late, 0)
        count = np.where(inside, put_off, held) + gradients
        found.put(numbers, start + decisions, start + turning + 1 - decisions, self._held[decisions] * count)
        in_block = np.array([self.block_of[index] is not None for index in decisions.tolist()], bool)
        again = in_block & inside & (put_off + gradients == 0)
        ends = np.array([self.block_end[self.block_of[index]] for index in decisions[again].tolist()], np.int64)
        found.put(numbers[again], start[again] + turning - ends, start[again] + turning + 1 - decisions[again], 1)

    def _is_gathered(self, use: TensorUse) -> bool:
        """Whether ZeRO-3 gathers what the link reads."""
        return self.of_parameter[use.source] and self.hybrid.zero_stage == 3

    def _parameter_life(self, use: TensorUse) -> LiveInterval | None:
        """Of the copy of a parameter that turns read, or that ZeRO-3 gathers ahead."""
        if self.hybrid.zero_stage < 3 and not self.hybrid.is_plain:
            apart = self.accumulator_bytes(use.meta) > 0
            sums = self.hybrid.zero_stage < 2 and self._count(use.target) > 1 and not apart
            start, turning = self._at(use.target)
            return LiveInterval(
                (start, start + turning + 1), self.held[use.source] * (2 if sums else 1)
            )  # and its gradient
        return self._gathered_life(use) if self.prefetches(use) else None

    def _gathered_life(self, use: TensorUse) -> LiveInterval:
        """Of what ZeRO-3 gathers: it is on its way while what was asked for before it is used. Backward holds more than
        forward at the same site, so if it asks for it, that is the time that counts."""
        (start, turning), own, before = self._at(use.target), self._read_at(use.target), self._asked_before(use, 1)
        if self.gathers_again(use):
            return LiveInterval((start + turning - before[1], start + turning - use.target + 1))
        return LiveInterval((start + before[0], start + own[1] + 1))

    def gathered_interval(self, use: TensorUse) -> tuple[int, int]:
        """Of what ZeRO-3 gathers over one axis to gather it over the next: it is on its way before that is, and there
        until that is done."""
        (start, turning), own, before = self._at(use.target), self._read_at(use.target), self._asked_before(use, 2)
        if self.gathers_again(use):
            return start + turning - before[1], start + turning - own[
                1
            ] + 1  # the next are posted before this is waited for
        return start + before[0], start + own[0] + (before == own)

    def _asked_before(self, use: TensorUse, count: int) -> tuple[int, int]:
        """Where what is read so many places before what the link reads is read: before it in backward, if that asks
        for it. (The first, where there are not so many.)"""
        places, numbers = self._all_read_at
        number = numbers[self._read_at(use.target)] + (count if self.gathers_again(use) else -count)
        return places[min(max(number, 0), len(places) - 1)]

    def _read_at(self, target: int) -> tuple[int, int]:
        """The first and the last site of the block that reads a parameter for this one; itself, if in none."""
        block = self.block_of[target]
        return (target, target) if block is None else (self._block_begin[block], self.block_end[block])

    @cached_property
    def _all_read_at(self) -> tuple[list[tuple[int, int]], Mapping[tuple[int, int], int]]:
        """All places at which parameters are read, in order; and their numbers."""
        places = sorted({self._read_at(index) for index in self.by_parameter})
        return places, {place: number for number, place in enumerate(places)}

    @cached_property
    def _block_begin(self) -> dict[tuple[int, str], int]:
        return {block: index for index, block in reversed(list(enumerate(self.block_of))) if block is not None}

    def _kept_values(self) -> frozenset[Value]:
        """What backward needs, where it is made.

        What an aliasing op or a hub passes on is its input's memory, so a need of theirs is a need of their input's.
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
    """What backward of an op needs: its output, these inputs; what an op passes on is not needed by the op itself."""

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
    last: dict[int, int] = {}
    for use in reversed(uses):  # in the order of their targets
        passes_on = space.decisions[use.target].kind == "shared_read"
        read = last.get(use.target, use.target) if passes_on else use.target
        last[use.source] = max(last.get(use.source, 0), read)
    return last
