"""Forward of a micro-batch on a rank, and the blocks that its backward runs again, as tasks of the simulator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

from autoparallel.pricing.activation_steps import Action, ActivationSteps, Running
from autoparallel.pricing.expert_exchanges import MixtureAction
from autoparallel.pricing.multi_copy import At
from autoparallel.pricing.rank_reads import RankReads
from autoparallel.pricing.rank_seconds import RankSeconds
from autoparallel.pricing.step_tasks import StepTasks


class ForwardTasks:
    """Forward of one micro-batch of a round."""

    def __init__(self, reads: RankReads, activations: ActivationSteps, seconds: RankSeconds) -> None:
        self.copies, self.activations, self.seconds = reads.counts.hybrid.copies, activations, seconds

    def run(self, step: StepTasks, part: tuple[int, int], count: float, marked: Collection[int], before: At) -> None:
        """Run the decisions from the first to the second of ``part`` (excluded) in one of ``count`` rounds; calls
        ``before`` at the ``marked`` ones."""
        (done, stop), share = part, count * self.copies
        until, sent = self.seconds.forward_s, self.activations
        run = Running(step, lambda timed: timed.forward.per(share), "activations", "forward", share)
        at = {*marked, *sent.ahead, *sent.before, *sent.pieced}
        for index in sorted(index for index in at if done <= index < stop):
            step.compute((until[index] - until[done]) / share, ("forward", done, index))
            done = index
            run.forward(sent.ahead.get(index, ()))
            if index in marked:
                before(index)
            run.forward(sent.before.get(index, ()))
            if (pieced := sent.pieced.get(index)) is not None:
                pieced.forward(step, count)
        step.compute((until[stop] - until[done]) / share, ("forward", done, stop - 1))


class RecomputeTasks:
    """The recompute of blocks by the backward of one micro-batch of a round."""

    def __init__(self, reads: RankReads, activations: ActivationSteps, seconds: RankSeconds) -> None:
        self.counts, self.members = reads.counts, reads.members
        self.activations, self.seconds = activations, seconds

    def run(self, step: StepTasks, index: int, count: float) -> None:
        """Run the block again that the backward of a decision starts (if any), in one of ``count`` rounds."""
        if not (members := self.members_by_start.get(index)):
            return
        share, sends_again = count * self.counts.hybrid.copies, self.counts.blocks.sends_again
        sent = self.activations
        run = Running(step, lambda timed: timed.again.per(share), "activations again", "recompute", share)
        ahead = sorted(place for place in sent.ahead if members[0] <= place <= members[-1])
        for member in members:
            while ahead and ahead[0] <= member:
                run.forward(_of_mixtures(sent.ahead[ahead.pop(0)], sends_again))
            run.forward(action for action in sent.before.get(member, ())
                        if sends_again or isinstance(action, Action))
            pieced, again_s = sent.pieced.get(member), self.seconds.again_s[member]
            if pieced is not None and (again_s or member in self._ends):
                pieced.forward(step, count, "recompute", counted=bool(again_s))
            elif member not in sent.in_pieces and not (sends_again and member in sent.mixtures):
                step.compute(again_s / share, ("recompute", member, member))

    @cached_property
    def members_by_start(self) -> Mapping[int, Sequence[int]]:
        """The decisions of each block that is run again, by the one whose backward starts it."""
        blocks, found = self.counts.blocks, defaultdict[int, list[int]](list)
        for index in self.members:
            if (block := blocks.of[index]) is not None:
                found[blocks.starts.get(block, blocks.last[block])].append(index)
        return found

    @cached_property
    def start_of(self) -> Mapping[int, int]:
        """By mixture whose result is taken after the decision whose backward would start the recompute of its block:
        that decision. Backward comes to the mixture's end first, which saves the order of its rows."""
        blocks, found = self.counts.blocks, dict[int, int]()
        for index, mixture in self.activations.mixtures.items():
            block = blocks.of[index]
            start = None if block is None else blocks.starts.get(block)
            if start is not None and mixture.window.is_open and index < start < mixture.window.reader:
                found[index] = start
        return found

    @cached_property
    def _ends(self) -> Collection[int]:
        """The ops with which recompute of their blocks ends (in pieces they run again to save what they read)."""
        return self.counts.blocks.ends.values() if self.counts.blocks.sends_again else ()


def _of_mixtures(actions: Iterable[Action | MixtureAction], runs_again: bool) -> list[MixtureAction]:
    """The parts of mixtures, if they run again; what else is ahead is not in recomputed blocks."""
    return [action for action in actions if runs_again and isinstance(action, MixtureAction)]


__all__ = ["ForwardTasks", "RecomputeTasks"]
