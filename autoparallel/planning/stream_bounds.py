"""Lower bounds of steps whose communication of parameters may take longer than their compute.

A step takes no less than its compute, and no less than the communication on any stream that runs beside; so no less
than any weighted mean of the two. The least weighted mean over all plans is the optimum of the decision graph with
other prices of communication. (The Lagrangian dual of the smallest maximum of the two.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autoparallel.search.low_width.bucket_elimination import Eliminator
from autoparallel.search.model.problem import Problem

#: Weights that are tried.
TRIED = 3


@dataclass(frozen=True)
class Mixture:
    """No step is below ``seconds``, plus ``weight`` times the compute that is not in the decision graph."""

    weight: float
    seconds: float


@dataclass(frozen=True)
class Overlap:
    """How communication of parameters overlaps with compute: over so many ``streams``, slowed by ``slowdown`` (a
    fraction), by software that hides the fraction ``hidden`` of what could be hidden."""

    streams: int
    slowdown: float
    hidden: float = 1.0

    @property
    def exposed(self) -> float:
        """The fraction of communication that counts where compute takes longer."""
        return 1 - self.hidden * (1 - self.slowdown / self.streams)

    def weighted(self, share: float) -> tuple[float, float]:
        """The weight of compute, and that of communication, where compute has ``share`` of the mean of the two."""
        sent = (share * self.slowdown + 1 - share) / self.streams
        return 1 - self.hidden * (1 - share), 1 - self.hidden * (1 - sent)


def mixtures(eliminator: Eliminator, problem: Problem, whole: Problem, overlap: Overlap, choice: tuple[int, ...]
             ) -> Iterator[Mixture]:
    """Bounds of decision graph ``problem``, in which communication of parameters counts by `Overlap.exposed`; in
    ``whole`` it counts in full. None where ``choice``, the optimum, computes for longer than it communicates."""
    left, costs = overlap.exposed, problem.costs
    if left >= 1.0:
        return
    less = whole.costs.priced(costs, np.full(len(costs), -1.0))
    sent = less.map(lambda array: np.nan_to_num(array, nan=0.0, posinf=0.0, neginf=0.0) / (1 - left))

    def is_sending(choice: tuple[int, ...]) -> bool:
        cells = problem.cells(choice)
        sent_s = float(sent.take(cells).sum())
        computed_s = float(costs.take(cells).sum()) - left * sent_s
        return sent_s / overlap.streams > computed_s + overlap.slowdown * sent_s / overlap.streams

    low, high = 0.0, 1.0
    if not is_sending(choice):
        return
    for _ in range(TRIED):
        share = (low + high) / 2
        computing, sending = overlap.weighted(share)
        found, choice = eliminator.solve(costs.priced(sent, np.full(len(costs), sending / computing - left)))
        yield Mixture(computing, computing * found)
        low, high = (low, share) if is_sending(choice) else (share, high)


__all__ = ["Mixture", "Overlap", "mixtures"]
