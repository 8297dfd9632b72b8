"""Overlap among the equal blocks for which one of a reduced-depth model stands.

In the simulated step of that model, communication of a block's parameters overlaps with the blocks before and after
it. Where it stands for several, that of most of them overlaps with blocks of their own kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from autoparallel.layout import COLLECTIVES
from autoparallel.pricing.overlap_simulation import Hidden
from autoparallel.pricing.problem import SpacePricer
from autoparallel.schedule.async_windows import kind_of
from autoparallel.strategies.space import Strategy


@dataclass
class _Phase:
    """Seconds of a block in forward, or in backward, of all that it stands for: of its work, and of communication of
    parameters by stream. ``awaited``: streams of communication that work waits for, behind what was launched before."""

    work_s: float = 0.0
    sent_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    awaited: set[str] = field(default_factory=set)

    def hidden_s(self, alone: float) -> float:
        """Seconds that blocks hide among their own kind, beside what the simulated step hides; ``alone``: how much of
        the work is of the block that the step has."""
        longest_s = max((sent_s for stream, sent_s in self.sent_s.items() if stream not in self.awaited), default=0.0)
        return min(max(0.0, longest_s - alone * self.work_s), (1 - alone) * self.work_s)


def with_equals(pricer: SpacePricer, strategies: Sequence[Strategy], found: Hidden) -> Hidden:
    """The seconds saved by overlap (``found``: in the simulated step of a reduced-depth model) with those of equal
    blocks among one another, where each prefetches what it gathers (ZeRO-3): in a steady state, in which the longest of
    work and streams counts. No more is hidden than is sent, less the slowdown."""
    hybrid, pace = pricer.counts.hybrid, pricer.prices.device.saved_by_overlap
    if not (pricer.prices.training and hybrid.prefetches and max(pricer.counts.multiplicities) > 1):
        return found
    blocks, sent_s = _phases(pricer, strategies)
    total_s = sum(phase.hidden_s(min(1.0, hybrid.stages / several)) for several, *phases in blocks for phase in phases)
    saved_s = max(0.0, min(pace * total_s, pace * sent_s - found.total))
    if hybrid.copies == 1:
        return found._replace(each=found.each + saved_s)
    return found._replace(once=found.once + saved_s)


def _phases(pricer: SpacePricer, strategies: Sequence[Strategy]) -> tuple[list[tuple[int, _Phase, _Phase]], float]:
    """For each block that stands for several: how many, its forward and its backward; and the seconds of all
    communication of parameters."""
    space, counts, numbers = pricer.space, pricer.counts, pricer.costs.kinds.numbers(strategies)
    found, whole_s = dict[str | None, tuple[int, _Phase, _Phase]](), 0.0
    for index, block in enumerate(space.blocks):
        if block is not None and counts.multiplicities[index] > 1:
            _, forward, backward = found.setdefault(block, (counts.multiplicities[index], _Phase(), _Phase()))
            cost, number = pricer.costs.of(index), numbers[index]
            forward.work_s += float(cost.forward[number])
            backward.work_s += float(cost.again[number] + cost.backward[number])
    for use, path, _ in pricer.costs.moves(strategies):
        _, forward, backward = found.get(space.blocks[use.target], (0, _Phase(), _Phase()))
        times = counts.use_times(use, choice=int(numbers[use.target]))
        begins = True    # with reductions, of which no others are async
        for step, seconds, _ in path:
            there_s, back_s = times.forward * seconds[0], times.again * seconds[0] + times.backward * seconds[1]
            crossed = pricer.prices.groups[step.axes].crossed
            kind = kind_of(step.forward, step.backward, use.meta.requires_grad)
            begins &= kind == "reduction"
            is_async = counts.of_parameter[use.source] and (begins or kind == "gather")
            for phase, action, sent_s in ((forward, step.forward, there_s), (backward, step.backward, back_s)):
                stream = crossed[-1][1].name if crossed and action in COLLECTIVES and sent_s else None
                if is_async and stream is not None:
                    phase.sent_s[stream] += sent_s
                    whole_s += sent_s
                    continue
                phase.work_s += sent_s
                if stream is not None:
                    phase.awaited.add(stream)
    return list(found.values()), whole_s


__all__ = ["with_equals"]
