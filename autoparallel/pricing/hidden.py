"""Seconds of a step saved by overlap, and its timeline, as `overlap_simulation` simulates a rank's step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autoparallel.plans import Hybrid
from autoparallel.plans.record import Span
from autoparallel.pricing.alike_stages import alike_stages
from autoparallel.pricing.overlap_simulation import Hidden, RankStep
from autoparallel.pricing.problem import SpacePricer
from autoparallel.pricing.rank_reads import COMPUTE
from autoparallel.pricing.step_cost import ALL_EXPOSED, Exposed
from autoparallel.pricing.step_tasks import Label
from autoparallel.strategies.space import Strategy, StrategySpace
from cost_models.timeline import equal_slowdown, simulate

#: Smallest share of overlapped seconds that counts, so that no communication is free.
LEAST_SHARE = 0.01
#: Of communication that overlap may hide, the parts that count in the searches for a faster plan with overlap. (None
#: finds plans that send more than compute hides.)
COUNTED = 0.0, 0.25


def least_exposed(pricer: SpacePricer) -> Exposed:
    """The smallest exposed fractions: 1 where nothing overlaps with compute (and of activations of one micro-batch, of
    which little does), else the slowdown of both while they overlap, at least `LEAST_SHARE`."""
    hybrid = pricer.counts.hybrid
    share = max(LEAST_SHARE, pricer.prices.device.overlap_slowdown - 1.0)
    if not _hides(pricer):
        return ALL_EXPOSED
    late = hybrid.stages > 1 and not hybrid.overlaps_each    # the last micro-batch hides little
    return Exposed(share if hybrid.overlaps_each else 1.0,
                   share if _overlaps_parameters(hybrid) and not late else 1.0, share if hybrid.alternates else 1.0)


def hidden(pricer: SpacePricer, strategies: Sequence[Strategy], stages: Sequence[int] = (0,)) -> Hidden:
    """The seconds saved by overlap on one rank of these stages."""
    if not _hides(pricer):
        return Hidden()
    hybrid = pricer.counts.hybrid
    how = hybrid.pieces, hybrid.experts_overlap, hybrid.fusion.blocks    # `SpacePricer.overlapping`
    found: _Stages = pricer.costs.memo.once(("hidden", tuple(strategies), how),
                                            lambda: _Stages(pricer, strategies))
    return Hidden(*map(sum, zip(*map(found.of, stages), strict=True)))


class _Stages:
    """What overlap saves on the stages of a plan; of those that run alike one is simulated."""

    def __init__(self, pricer: SpacePricer, strategies: Sequence[Strategy]) -> None:
        several = pricer.counts.hybrid.stages > 2    # of two, neither is between others
        self.pricer, self.strategies = pricer, strategies
        self.first = alike_stages(pricer, strategies) if several else range(pricer.counts.hybrid.stages)
        self._known: dict[int, Hidden] = {}

    def of(self, stage: int) -> Hidden:
        first = self.first[stage]
        if first not in self._known:
            self._known[first] = _hidden_on(self.pricer, self.strategies, first)
        return self._known[first]


def _hidden_on(pricer: SpacePricer, strategies: Sequence[Strategy], stage: int) -> Hidden:
    slowdown = pricer.prices.device.overlap_slowdown
    step = RankStep(pricer, strategies, stage, _hides_activations(pricer))
    found = step.hidden(slowdown)
    if pricer.prices.cluster.profile is None or not (step.activations.overlaps or step.activations.pieced):
        return found
    alone = RankStep(pricer, strategies, stage, activations=False).hidden(slowdown)
    return alone._replace(activations=found.total - alone.total)


def hidden_s(pricer: SpacePricer, strategies: Sequence[Strategy]) -> float:
    """Seconds saved by overlap, of all stages together."""
    found = hidden(pricer, strategies, range(pricer.counts.hybrid.stages))
    return found.total + found.activations


def spans(pricer: SpacePricer, strategies: Sequence[Strategy]) -> list[Span]:
    """The timeline of one rank without a pipeline as `hidden_s` simulates it; where nothing overlaps, one task after
    the other."""
    step = RankStep(pricer, strategies, activations=_hides_activations(pricer)).step()
    if _hides(pricer):
        streams = sorted({task.stream for task in step.tasks} | {COMPUTE})
        line = simulate(step.tasks, equal_slowdown(streams, pricer.prices.device.overlap_slowdown))
        start_s, end_s = line.start_s.tolist(), line.end_s.tolist()
    else:
        end_s = list(itertools.accumulate(task.duration_s for task in step.tasks))
        start_s = [0.0, *end_s[:-1]]
    return [
        (_said(pricer.space, label), task.stream, begin, end,
         tuple(n for n in dict.fromkeys(task.after) if step.tasks[n].stream != task.stream))
        for task, label, begin, end in zip(step.tasks, step.labels, start_s, end_s, strict=True)
    ]


def _said(space: StrategySpace, label: Label) -> str:
    """A task label as text: the kind of work and its blocks, or its op if it is outside blocks."""
    what, *ends = label
    names = [space.blocks[index] or space.decisions[index].name for index in ends if 0 <= index < len(space)]
    return " ".join([what, " to ".join(dict.fromkeys(names))]).strip()


def _hides(pricer: SpacePricer) -> bool:
    """Whether anything overlaps with compute: communication of parameters, or of activations of several copies."""
    hybrid = pricer.counts.hybrid
    return pricer.prices.training and (_overlaps_parameters(hybrid) or hybrid.alternates)


def _hides_activations(pricer: SpacePricer) -> bool:
    """Whether the overlap of activations is simulated; software of others has a share (`Profile.hide_tensor`)."""
    profile = pricer.prices.cluster.profile
    return profile is None or profile.overlaps_activations > 0


def _overlaps_parameters(hybrid: Hybrid) -> bool:
    """Whether communication of parameters overlaps with compute: in every micro-batch, or gradients that are reduced
    once per step with the last one's backward; in zero bubble with the second part of a backward."""
    return not hybrid.reads_alone
