"""The gathers that ZeRO-3's backward repeats on a rank, and where backward reads them, for the simulation.

`kernels.regather` notes them as forward runs; here they follow from the inputs that ops save. When each is launched and
awaited, `schedule.backward_gathers` says for both.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from autoparallel.pricing.rank_reads import RankReads, TimedStep
from autoparallel.pricing.recomputing import Block
from autoparallel.schedule.async_windows import Pair
from autoparallel.schedule.backward_gathers import BackwardGathers, Finish, Gather, View
from autoparallel.strategies.space import TensorUse

#: Launches steps of parameters again: (steps, whether to await them at once) -> their wait.
Begin = Callable[[Sequence[TimedStep], bool], Finish[None]]
#: A gathered value (None: none, but stored parameters or other values).
Gathered = View[None] | None


class BackwardReads:
    """``by_decision``: the gathered values that the backward of each decision reads, or of the recomputed block that
    it starts, in order. Nothing without ZeRO-3. ``experts_at``: mixtures of experts whose compute comes later in the
    program -> behind which decision."""

    def __init__(self, reads: RankReads, begin: Begin, experts_at: Mapping[int, int]) -> None:
        self._experts_at = experts_at
        self.reads, self.space, self.counts, self._begin = reads, reads.space, reads.counts, begin
        self._gathers = BackwardGathers[None](self.counts.hybrid.bucket_bytes)
        self._buckets, self._steps = dict[Pair, Gather[None]](), dict[int, Gathered]()
        self._bucket_of = {number: pair for pair in reads.windows.gathered for number in pair.steps}
        self._views: dict[int, Gathered] = {}  # by view of a parameter
        found = defaultdict[int, list[View[None]]](list)
        self.by_decision: Mapping[int, Sequence[View[None]]] = found
        if self.counts.hybrid.zero_stage < 3:
            return
        for action, pair in itertools.chain.from_iterable(events for _, events in sorted(reads.windows.events.items())):
            if action == "launch" and pair.steps[0] in self._bucket_of:
                self._gathers.add(self._bucket(pair))
        for place, view in self._saved():
            self._gathers.save(view)
            if place in self.space.differentiated:
                found[place].append(view)

    def read(self, index: int) -> None:
        """Launch the gathers that backward of a decision requests or prefetches, and await those that it requests."""
        for view in self.by_decision.get(index, ()):
            self._gathers.read(view)

    def settle(self) -> None:
        """Await launched gathers that backward did not read."""
        self._gathers.settle()

    def _saved(self) -> Iterator[tuple[int, View[None]]]:
        """Pairs (decision whose backward reads it, gathered value) of what ops and recomputed blocks save."""
        blocks, inputs = self.counts.blocks, dict[tuple[Block, int, int], tuple[int, View[None]]]()
        at = self._experts_at
        for index in sorted(self.reads.members, key=lambda index: at[index] + 0.5 if index in at else index):
            if not (uses := self.space.uses_by.get(index)):
                continue
            block, needed = blocks.of[index], self.counts.saved.inputs_needed(index)
            for use in reversed(uses) if block is None else uses:  # what an op reads last, its backward needs first
                view = self._of(use) if block is None else self._into(block, use)
                if self.counts.views[index]:
                    self._views[index] = view
                if view is None:
                    continue
                if block is not None:
                    inputs.setdefault((block, id(view.gather), view.number), (self._start_of(block), view))
                elif use.position in needed and not self._skips(use):
                    yield index, view
        yield from inputs.values()

    def _skips(self, use: TensorUse) -> bool:
        skips = self.counts.saved.skips(use)
        return skips is not None and bool(skips[self.reads.numbers[use.target]])

    def _of(self, use: TensorUse) -> Gathered:
        """The gathered value that a use brings to its target."""
        if self.counts.of_parameter[use.source]:
            number = self.reads.last_step[use.target, use.position]
            return None if number is None else self._step(number)
        if not self.counts.views[use.source]:
            return None
        view = self._views.get(use.source)
        for timed in self.reads.steps_of(use):
            view = self._alone(timed, view)
        return view

    def _into(self, block: Block, use: TensorUse) -> Gathered:
        """The gathered value that a recomputed block reads for a use: redistributions of views are its own, and those
        of parameters unless they are prefetched."""
        if self.counts.of_parameter[use.source]:
            if not self.reads.synchronous:
                return self._of(use)
            is_shared = self.space.decisions[use.source].kind == "shared_read"
            outside = is_shared and self.counts.blocks.of[use.source] != block
            return self._of(self.space.uses_by[use.source][0]) if outside else None
        return None if self.counts.blocks.of[use.source] == block else self._views.get(use.source)

    def _start_of(self, block: Block) -> int:
        """The decision whose backward starts the block's recompute."""
        return self.counts.blocks.starts.get(block, self.counts.blocks.last[block])

    def _step(self, number: int) -> Gathered:
        """The result of a step on the path of a parameter."""
        if number not in self._steps:
            pair = self._bucket_of.get(number)
            self._steps[number] = (self._alone(self.reads.parameter_steps[number], self._before(number))
                                   if pair is None else View(self._bucket(pair), pair.steps.index(number)))
        return self._steps[number]

    def _before(self, number: int) -> Gathered:
        after = self.reads.reads[number].after
        return None if after is None else self._step(after)

    def _bucket(self, pair: Pair) -> Gather[None]:
        if pair not in self._buckets:
            steps = [self.reads.parameter_steps[n] for n in pair.steps]
            reads = [self.reads.reads[n] for n in pair.steps]
            self._buckets[pair] = Gather(
                lambda numbers, _: self._begin([steps[n] for n in numbers], False),
                tuple(map(self._before, pair.steps)),
                max(read.place for read in reads), tuple(read.num_bytes for read in reads))
        return self._buckets[pair]

    def _alone(self, timed: TimedStep, source: Gathered) -> Gathered:
        """The result of a synchronous step."""
        if timed.action == "none":
            return source
        return View(Gather(lambda numbers, _: self._begin([timed], True), (source,)), 0)
