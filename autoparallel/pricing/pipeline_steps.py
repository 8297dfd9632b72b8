"""The communication of each rank of a pipeline in a step: that of its stages (`overlap_simulation`) in the order of
forwards and backwards (`schedule.pipeline_tasks`), with the messages between stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autoparallel.pricing.backward_reads import BackwardReads
from autoparallel.pricing.overlap_simulation import RankStep
from autoparallel.pricing.parameter_buckets import Pending
from autoparallel.pricing.problem import SpacePricer
from autoparallel.pricing.step_tasks import Launch, Passed, StepTasks, Wait
from autoparallel.schedule.schedules import Action
from autoparallel.schedule.step_config import as_rounds
from autoparallel.strategies.space import Strategy


class SentValue(NamedTuple):
    """A value that crosses a cut: its bytes on a rank, and whether its gradient comes back."""

    num_bytes: float
    trained: bool


class PipelineRankStep:
    """The step of a plan on pipeline rank ``rank``. ``sent``: by cut, the values that cross it, in order."""

    def __init__(self, pricer: SpacePricer, strategies: Sequence[Strategy], rank: int,
                 sent: Sequence[Sequence[SentValue]]) -> None:
        self.hybrid, self.rank, self.sent = pricer.counts.hybrid, rank, [list(values) for values in sent]
        self.stages = {stage: (RankStep(pricer, strategies, stage), Pending())
                       for stage in self.hybrid.stages_of(rank)}

    def communication(self) -> list[Launch | Wait | Passed]:
        """Launches and waits of collectives, sends, and waits for what is received, in the order of the rank."""
        rounds = as_rounds(self.hybrid)
        count = len(rounds.micro_batches_of(self.rank))
        step, to_run, left = StepTasks(), set(self.stages), dict.fromkeys(self.stages, count)
        put_off = dict[tuple[int, int], BackwardReads | None]()
        for own, pending in self.stages.values():
            own.begin(step, pending)
        for action in self.hybrid.pipelining.order(rounds, self.rank):
            kind, stage, number = action
            own, pending = self.stages[stage]
            step.events += self._passed(action, sent=False)
            if kind == "F":
                own.round.forward(step, pending, first=stage in to_run)
                to_run.discard(stage)
            elif kind == "W":
                left[stage] -= 1
                own.round.backward_of_weights(step, pending, put_off.pop((stage, number)), last=not left[stage])
            elif self.hybrid.puts_off_weights:
                put_off[stage, number] = own.round.backward_of_inputs(step)
            else:
                left[stage] -= 1
                own.round.backward(step, pending, last=not left[stage])
            step.events += self._passed(action, sent=True)
        for own, pending in self.stages.values():
            own.finish(step, pending)
        return step.events

    def _passed(self, action: Action, sent: bool) -> list[Passed]:
        """What a forward or backward of a round receives, or sends: values of its micro-batches, or their gradients."""
        kind, stage, number = action
        other = stage + 1 if (kind == "F") == sent else stage - 1
        if kind == "W" or not 0 <= other < self.hybrid.stages:
            return []
        peer = self.hybrid.rank_of(other, number)
        return [Passed(sent, peer, value.num_bytes) for value in self.hybrid.copies * self.sent[min(stage, other)]
                if kind == "F" or value.trained]
