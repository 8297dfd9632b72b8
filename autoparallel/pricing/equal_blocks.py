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
from autoparallel.strategies.space import Strategy


@dataclass
class _Phase:
    """Seconds of a block in forward, or in backward, of all that it stands for: of its work, and of communication of
    parameters by stream."""

    work_s: float = 0.0
    sent_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def hidden_s(self, share: float, alone: float) -> float:
        """Seconds that blocks hide among their own kind, beside what the simulated step hides. ``share``: of the work
        that communication may overlap with; ``alone``: how much of that is of the block that the step has."""
        work_s, longest_s = share * self.work_s, max(self.sent_s.values(), default=0.0)
        return min(max(0.0, longest_s - alone * work_s), (1 - alone) * work_s)


def with_equals(pricer: SpacePricer, strategies: Sequence[Strategy], found: Hidden) -> Hidden:
    """The seconds saved by overlap (``found``: in the simulated step of a reduced-depth model) with those of equal
    blocks among one another, where every micro-batch overlaps: in a steady state, in which the longest of work and
    streams counts. No more is hidden than is sent, less the slowdown."""
    hybrid, pace = pricer.counts.hybrid, min(1.0, max(0.0, 2 - pricer.prices.device.overlap_slowdown))
    if not pricer.prices.training or not hybrid.overlaps_each or max(pricer.counts.multiplicities, default=1) == 1:
        return found
    blocks, sent_s = _phases(pricer, strategies)
    total_s, rounds = 0.0, 1 if hybrid.is_plain else hybrid.micro_batches // hybrid.copies
    for several, forward, backward in blocks:
        alone = min(1.0, hybrid.stages / several)
        total_s += forward.hidden_s(1 / rounds if hybrid.zero_stage < 3 else 1.0, alone)    # gathered once for all
        total_s += backward.hidden_s(1.0, alone)
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
        for step, seconds, _ in path:
            there_s, back_s = times.forward * seconds[0], times.again * seconds[0] + times.backward * seconds[1]
            crossed = pricer.prices.groups[step.axis].crossed
            for phase, action, sent_s in ((forward, step.forward, there_s), (backward, step.backward, back_s)):
                if action in COLLECTIVES and counts.of_parameter[use.source] and crossed:
                    phase.sent_s[crossed[-1][1].name] += sent_s
                    whole_s += sent_s
                else:
                    phase.work_s += sent_s
    return list(found.values()), whole_s


__all__ = ["with_equals"]
