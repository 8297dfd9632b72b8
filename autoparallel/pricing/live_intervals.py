"""Live intervals of values in a step, for the memory of a rank.

Time is discrete: of N decisions, decision i runs forward at time i and backward at time 2N - i. The times of the
pipeline's ranks follow one another, so that one memory limit applies to each of them. A saved tensor lives from its
forward to its backward, once per micro-batch in flight; a recomputed value lives only while its block runs again.
Parameters, gradients and optimizer state live during the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autoparallel.pricing.counts import ExecutionCounts
from autoparallel.pricing.recomputing import Block
from autoparallel.pricing.saved_values import last_uses
from autoparallel.strategies.space import TensorUse


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


def sums_gradients(counts: ExecutionCounts, use: TensorUse) -> bool:
    """Whether the gradient of a gathered parameter is kept beside it, whole and in its own dtype, while those of
    several micro-batches add up."""
    hybrid = counts.hybrid
    return (not hybrid.is_plain and hybrid.zero_stage < 2 and counts.count(use.target) > 1
            and not counts.accumulator_bytes(use.meta))


class Liveness:
    """The live intervals of one step with these execution counts. ``shares``: by group of pipeline ranks, what a byte
    there counts, where memories differ and one limit holds for all (empty: 1 each)."""

    def __init__(self, counts: ExecutionCounts, shares: Sequence[float] = ()) -> None:
        self._shares = shares
        self.counts, self.space, self.hybrid = counts, counts.space, counts.hybrid
        self.blocks, self.saved, self.stages_of = counts.blocks, counts.saved, counts.stages_of
        self._num_decisions = len(self.space)
        self._by_parameter = sorted({k.target for k in self.space.uses if counts.of_parameter[k.source]})
        self._first_reader = {use.source: use.target for use in reversed(self.space.uses)}
        self._last_trainable = {self.stages_of[i][0]: i for i in self._by_parameter}

    @cached_property
    def decision_intervals(self) -> LiveIntervals:
        """The live intervals of each decision's results."""
        decisions, start, turning = np.arange(self._num_decisions), self.starts, 2 * self._num_decisions
        last_use = last_uses(self.space, [use for use in self.space.uses if not self.counts.crosses(use)])
        last = np.array([last_use.get(index, index) for index in range(self._num_decisions)], np.int64)
        found = LiveIntervals.of(start + decisions, start + np.maximum(decisions, last) + 1)
        late = np.zeros(self._num_decisions)
        late[self._by_parameter] = self._late[self._by_parameter]
        if (some := np.flatnonzero(late)).size:  # deferred weight gradients
            found.put(some, start[some] + some, start[some] + turning + 1 - some, self._held[some] * late[some])
        kept = np.array(sorted(self.saved.first_need), np.int64)
        inside = np.array([self.saved.inside(index) for index in kept.tolist()], bool)
        savers = np.array([self.saved.first_need[index] for index in kept.tolist()], np.int64)
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
        found = LiveIntervals.of(self.starts[targets] + targets, self.starts[targets] + targets + 1)
        kept = [number for number, use in enumerate(uses)
                if self.saved.copy_is_kept(use) and not self.counts.gathers_again(use)]
        inside = np.array([self.saved.copy_is_away(uses[number]) for number in kept], bool)
        self._keep(found, np.array(kept, np.int64), targets[kept], inside, np.zeros(len(kept)), targets[kept])
        for number, use in enumerate(uses):
            if self.counts.of_parameter[use.source] and (live := self._parameter_interval(use)) is not None:
                found.put(number, *live.interval, live.copies)
            elif self.counts.views[use.source] and self.counts.gathers_again(use):
                turned = int(self.starts[use.target]) + 2 * self._num_decisions - use.target
                found.put(number, turned, turned + 1, 1)
            elif self.counts.views[use.source] and self.hybrid.alternates:
                found.copies[number] /= self.hybrid.copies  # which share it
        return self._over(found, targets)

    def gathered_interval(self, use: TensorUse) -> tuple[int, int]:
        """The live interval of a ZeRO-3 gather's intermediate result (gathered over one axis, not yet over the next):
        it is prefetched one reader earlier than the final result, and lives until the next gather completes."""
        start, turning = int(self.starts[use.target]), 2 * self._num_decisions
        own, before = self.blocks.around(use.target), self._asked_before(use, 2)
        if self.counts.gathers_again(use):
            # the next gathers are launched before this one is awaited
            return start + turning - before[1], start + turning - own[1] + 1
        return start + before[0], start + own[0] + (before == own)

    def leaving_interval(self, parameter: int, last: int | None) -> tuple[int, int]:
        """The live interval of a gradient on its way to the host: from its first reader's backward to that of decision
        ``last`` (None: the end of backward)."""
        turned = int(self.starts[parameter]) + 2 * self._num_decisions
        return turned - self._first_reader[parameter], turned + 1 - (0 if last is None else last)

    def buffer_interval(self, stage: int) -> tuple[int, int]:
        """The whole step, on the stage's rank."""
        return self._start(stage), self._start(stage) + 2 * self._num_decisions + 1

    def turning_of(self, stage: int) -> int:
        """The time between forward and backward on the stage's rank."""
        return self._start(stage) + self._num_decisions

    def share(self, *stages: int) -> float:
        """What a byte counts that is on these stages."""
        return max((self._shares[stage % len(self._shares)] for stage in stages), default=1.0) if self._shares else 1.0

    def _start(self, stage: int) -> int:
        """The start time of the stage's rank; stages of one rank share their times, as they hold memory together."""
        return stage % len(self.hybrid.groups) * (2 * self._num_decisions + 2)

    @cached_property
    def starts(self) -> np.ndarray:
        """The start of the rank of each decision's first stage."""
        return self._by_stage(self._start)

    def _by_stage(self, what: Callable[[int], float]) -> np.ndarray:
        """``what(stage)`` of each decision's first stage."""
        known = {stages: what(stages[0]) for stages in set(self.stages_of)}
        return np.array([known[stages] for stages in self.stages_of])

    @cached_property
    def _held(self) -> np.ndarray:
        return np.array(self.counts.held, float)

    @cached_property
    def _late(self) -> np.ndarray:
        """By decision, the micro-batches whose weight gradients a zero-bubble stage defers, with their saved
        tensors."""
        return self._by_stage(self.counts.deferred_of)

    def _over(self, found: LiveIntervals, decisions: np.ndarray) -> LiveIntervals:
        """Extend intervals in the first stages of these decisions to all their stages. Stages between count as well: an
        interval is contiguous. Bytes count by the smallest memory."""
        if self._shares:
            shares = np.array([self.share(*stages) for stages in self.stages_of])
            np.multiply(found.copies, shares[decisions], out=found.copies)
        for number, index in enumerate(decisions.tolist() if not self.counts.in_one else ()):
            if len(stages := self.stages_of[index]) > 1:
                shifts = [self._start(stage) - self._start(stages[0]) for stage in stages]
                found.intervals[number] += (min(shifts), max(shifts))
        return found

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
        start, turning, late = self.starts[decisions], 2 * self._num_decisions, self._late[decisions]
        put_off = np.where(inside & (self.hybrid.saved_on != "device"), 0, late)  # fetched again for each part
        last = self._by_stage(lambda stage: self._last_trainable.get(stage, 2 * self._num_decisions))[decisions]
        held = self._by_stage(self.counts.in_flight.__getitem__)[decisions] - np.where(savers > last, late, 0)
        count = np.where(inside, put_off, held) + gradients
        found.put(numbers, start + decisions, start + turning + 1 - decisions, self._held[decisions] * count)
        in_block = np.array([self.blocks.evicted[index] is not None for index in decisions.tolist()], bool)
        again = in_block & inside & (put_off + gradients == 0)
        back = [(self.blocks.evicted[index], self.blocks.moves(index)) for index in decisions[again].tolist()]
        known = {(block, fetched): self._resident_from(block, fetched) for block, fetched in set(back) if block}
        resident = np.array([known[both] for both in back], np.int64)
        together = self.hybrid.copies if self.hybrid.alternates else 1    # of several, recomputed at a time
        found.put(numbers[again], start[again] + np.maximum(decisions[again], resident),
                  start[again] + turning + 1 - decisions[again], together)

    def _resident_from(self, block: Block, fetched: bool) -> int:
        """The time from which recomputed values of a block are on the device for backward: its recompute. Of
        ``fetched`` ones: backward of the next offloaded block (in two parts: their own); of the last, its forward."""
        turning = 2 * self._num_decisions
        if not fetched:
            return turning - self.blocks.last[block]
        following = self.blocks.next_offloaded[block]
        if following is None:
            return 0
        return turning - self.blocks.last[block if self.hybrid.puts_off_weights else following]

    def _parameter_interval(self, use: TensorUse) -> LiveInterval | None:
        """The live interval of a gathered parameter: of the step with several micro-batches; from forward to backward
        of a block that reads it again; prefetched by ZeRO-3 (None: as any copy)."""
        start, turning = int(self.starts[use.target]), 2 * self._num_decisions
        if self.hybrid.zero_stage < 3 and not self.hybrid.is_plain:
            copies = 2 if sums_gradients(self.counts, use) else 1  # and its gradient
            return LiveInterval((start, start + turning + 1), self.counts.held[use.source] * copies)
        if self.hybrid.zero_stage < 3 and self.blocks.evicted[use.target] is not None and (
                self.blocks.again(use.target) or self.saved.copy_is_kept(use)):
            return LiveInterval((start + use.target, start + turning + 1 - use.target), self.counts.held[use.target])
        return self._gathered_copy_interval(use) if self.counts.prefetches(use) else None

    def _gathered_copy_interval(self, use: TensorUse) -> LiveInterval:
        """The live interval of a parameter prefetched by ZeRO-3: from the use of the parameter before it. If backward
        gathers it again, backward's interval: it holds more than forward at the same decision."""
        start, turning = int(self.starts[use.target]), 2 * self._num_decisions
        own, before = self.blocks.around(use.target), self._asked_before(use, 1)
        several = self.hybrid.copies > 1    # which all read it, one after the other
        if self.counts.gathers_again(use):
            read_last = own[0] if several else use.target
            return LiveInterval((start + turning - before[1], start + turning - read_last + 1))
        held = several or self.blocks.evicted[use.target] is not None    # which holds it to its end
        last = own[1] if held else use.target
        return LiveInterval((start + before[0], start + last + 1))

    def _asked_before(self, use: TensorUse, count: int) -> tuple[int, int]:
        """The reader of parameters ``count`` positions before this use's: in backward order if backward gathers again,
        else in forward order (or the first one)."""
        places, numbers = self._all_read_at
        number = numbers[self.blocks.around(use.target)] + (count if self.counts.gathers_again(use) else -count)
        return places[min(max(number, 0), len(places) - 1)]

    @cached_property
    def _all_read_at(self) -> tuple[list[tuple[int, int]], Mapping[tuple[int, int], int]]:
        """All (first, last) readers of parameters, in order, and their positions."""
        places = sorted({self.blocks.around(index) for index in self._by_parameter})
        return places, {place: number for number, place in enumerate(places)}
