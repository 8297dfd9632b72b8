"""recompute="auto": the fewest recomputed blocks that memory allows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from autoparallel import clock
from autoparallel.errors import InfeasibleError, SearchError
from autoparallel.plans import Hybrid, Plan
from autoparallel.schedule.in_flight import in_flight


def fewest_recomputed(whole: Plan, blocks: Sequence[Sequence[str]], make: Callable[[tuple[str, ...]], Plan],
                      deadline: float = float("inf")) -> Plan:
    """The fastest plan found that recomputes some blocks; ``whole`` recomputes all of them.

    A stage with h micro-batches in flight holds the activations of a block h times. Every rank of the pipeline keeps
    those of as many blocks as come to at most ``b`` of these: first in its stages with the smallest h, of these in the
    later ones. The largest b for which ``make(paths of recomputed blocks)`` finds a plan is searched until
    `clock` reaches ``deadline``: every other time by bisection, else where the peaks of two plans let the next
    one's reach the memory limit. At least one block is recomputed; a stage recomputes its first blocks.
    """
    held = [in_flight(whole.hybrid, stage) for stage in range(len(blocks))]
    sizes = [len(of_stage) for of_stage in blocks]
    budgets = sorted({0, *_budgets(whole.hybrid, sizes, held)})[:-1]
    best, low, high, tries = whole, 0, len(budgets) - 1, 0
    peaks = {0: whole.prediction.peak_bytes}
    while low < high and clock.now() < deadline:
        middle = (low + high + 1) // 2
        if tries % 2 and len(peaks) > 1:
            reached = bisect_right(budgets, _reaching(whole.prediction.limit_bytes, peaks)) - 1
            middle = min(max(reached, low + 1), high)
        tries += 1
        kept = _kept(whole.hybrid, sizes, held, budgets[middle])
        again = tuple(path for of_stage, some in zip(blocks, kept, strict=True)
                      for path in of_stage[: len(of_stage) - some])
        try:
            made = make(again)
        except (InfeasibleError, SearchError):  # does not fit, or no plan was found in time
            high = middle - 1
            continue
        low, peaks[budgets[middle]] = middle, made.prediction.peak_bytes
        best = min(best, made, key=lambda plan: plan.prediction.step_s)
    return best


def _budgets(hybrid: Hybrid, sizes: Sequence[int], held: Sequence[int]) -> Iterator[int]:
    """The budgets at which a rank can keep the activations of one more block."""
    for rank in range(hybrid.pipeline_ranks):
        budget = 0
        for stage in _cheapest_first(hybrid.stages_of(rank), held):
            for _ in range(sizes[stage]):
                budget += held[stage]
                yield budget


def _kept(hybrid: Hybrid, sizes: Sequence[int], held: Sequence[int], budget: int) -> list[int]:
    """The number of blocks of each stage whose activations are kept."""
    kept = [0] * len(sizes)
    for rank in range(hybrid.pipeline_ranks):
        left = budget
        for stage in _cheapest_first(hybrid.stages_of(rank), held):
            kept[stage] = min(sizes[stage], left // held[stage])
            left -= kept[stage] * held[stage]
    return kept


def _cheapest_first(stages: Sequence[int], held: Sequence[int]) -> list[int]:
    return sorted(stages, key=lambda stage: (held[stage], -stage))


def _reaching(limit_bytes: float, peaks: dict[int, float]) -> float:
    """The budget whose peak is the limit, on the line through the last two known peaks."""
    (before, less), (last, more) = list(pairwise(sorted(peaks.items())))[-1]
    return last + (limit_bytes - more) * (last - before) / (more - less) if more > less else float("inf")
