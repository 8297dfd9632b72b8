"""recompute="auto": the fewest recomputed blocks that memory allows, whole or all but attention, or blocks whose saved
tensors leave the device."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from autoparallel import clock
from autoparallel.errors import InfeasibleError, SearchError
from autoparallel.plans import Hybrid, Plan
from autoparallel.schedule.in_flight import in_flight
from autoparallel.schedule.step_config import KEEPS

#: The least share of recompute in a step for which plans that offload are searched.
WORTH_MOVING = 0.01
#: Attention's results are kept if that saves at least this share of the recompute: they take memory, so that more
#: blocks may have to be recomputed. (Chosen, not measured.)
WORTH_KEEPING = 0.05
#: Chooses so many of a stage's blocks, given their paths in order.
Pick = Callable[[Sequence[str], int], Sequence[str]]


def less_recomputed(whole: Plan, blocks: Sequence[Sequence[str]], make: Callable[[Hybrid], Plan],
                    deadline: float = math.inf, saved_tiers: Sequence[str] = ()) -> Plan:
    """The fastest plan found that recomputes, or offloads, fewer of the ``blocks`` (paths by stage) than ``whole``,
    which does all. If it recomputes them whole, attention's results are kept where that fits and is faster. One that
    recomputes is compared with plans in which what is saved of blocks, all of it or what "selective" keeps, is in the
    first of ``saved_tiers`` with room for it, of as few blocks as memory requires. Searches until ``deadline`` of
    `clock`."""
    def fewer(how: Plan, pick: Pick, until: float) -> Plan:
        return fewest_recomputed(how, blocks, lambda some: make(replace(how.hybrid, recompute_blocks=some)), until,
                                 pick=pick)

    if whole.hybrid.saved_on != "device":
        return fewer(whole, spread, deadline)
    whole = keeping_attention(whole, make)
    best = fewer(whole, first, (clock.now() + deadline) / 2 if saved_tiers else deadline)
    p = best.prediction
    if best.hybrid.puts_off_weights or p.recompute_s < WORTH_MOVING * p.step_s:
        return best
    for tier in saved_tiers:
        found = list[Plan]()
        for share, kind in zip((1 / 2, 1), KEEPS, strict=True):
            with suppress(InfeasibleError, SearchError):
                leaving = make(replace(whole.hybrid, recompute=kind, saved_on=tier, recompute_blocks=None))
                found.append(fewer(leaving, spread, clock.now() + share * (deadline - clock.now())))
        if found:
            return min(best, *found, key=lambda plan: plan.prediction.step_s)
    return best


def kinds_of(hybrid: Hybrid) -> tuple[str, ...]:
    """The kinds of recompute that the plans of a step configuration may have: its own, and in place of whole blocks
    all but attention, which comes first."""
    whole = hybrid.recompute == "full" and not hybrid.puts_off_weights
    return ("all_but_attention", "full") if whole else (hybrid.recompute,)


def keeping_attention(whole: Plan, make: Callable[[Hybrid], Plan]) -> Plan:
    """The plan; or, if it recomputes whole blocks, the one that recomputes all but attention, where that fits, is
    faster and saves the share `WORTH_KEEPING` of the recompute."""
    for kind in kinds_of(whole.hybrid)[:-1]:
        with suppress(InfeasibleError, SearchError):
            kept, p = make(replace(whole.hybrid, recompute=kind, recompute_blocks=None)), whole.prediction
            if kept.prediction.recompute_s <= (1 - WORTH_KEEPING) * p.recompute_s:
                return min(whole, kept, key=lambda plan: plan.prediction.step_s)
    return whole


def first(paths: Sequence[str], number: int) -> Sequence[str]:
    """The first blocks: recomputed last in backward, when the kept values of others are freed."""
    return paths[:number]


def spread(paths: Sequence[str], number: int) -> Sequence[str]:
    """Blocks at equal distances: the compute of those between hides copies. The last block, which gains nothing, only
    if all are taken.

    >>> spread("abcdef", 2), spread("abcd", 3)
    (['a', 'd'], ['a', 'b', 'c'])
    """
    return [paths[at * len(paths) // number] for at in range(number)]


def fewest_recomputed(whole: Plan, blocks: Sequence[Sequence[str]], make: Callable[[tuple[str, ...]], Plan],
                      deadline: float = math.inf, none_bytes: float | None = None, pick: Pick = first) -> Plan:
    """The fastest plan found that recomputes some blocks; ``whole`` recomputes all of them.

    A stage with h micro-batches in flight holds the activations of a block h times. Every rank of the pipeline keeps
    those of as many blocks as come to at most ``b`` of these: first in its stages with the smallest h, of these in the
    later ones. The largest b for which ``make(paths of recomputed blocks)`` finds a plan within the memory limit of
    ``whole`` is searched until `clock` reaches ``deadline``: where the line through the peaks of two plans reaches the
    limit, and every third time by bisection. ``none_bytes``: the peak without recompute, if it is known. At least one
    block is recomputed; ``pick`` chooses a stage's blocks.
    """
    held = [in_flight(whole.hybrid, stage) for stage in range(len(blocks))]
    sizes, limit_bytes = [len(of_stage) for of_stage in blocks], whole.prediction.limit_bytes or math.inf
    *budgets, every = sorted({0, *_budgets(whole.hybrid, sizes, held)})
    peaks = {0: whole.prediction.peak_bytes} | ({} if none_bytes is None else {every: none_bytes})
    best, low, high, tries = whole, 0, len(budgets) - 1, 0
    while low < high and clock.now() < deadline:
        middle = (low + high + 1) // 2
        if tries % 3 < 2 and len(peaks) > 1:
            middle = min(max(bisect_right(budgets, _reaching(limit_bytes, peaks)) - 1, low + 1), high)
        tries += 1
        kept = _kept(whole.hybrid, sizes, held, budgets[middle])
        again = tuple(path for of_stage, some in zip(blocks, kept, strict=True)
                      for path in pick(of_stage, len(of_stage) - some))
        try:
            made = make(again)
        except (InfeasibleError, SearchError):  # does not fit, or no plan was found in time
            high = middle - 1
            continue
        peaks[budgets[middle]] = made.prediction.peak_bytes
        if made.prediction.peak_bytes > limit_bytes:
            high = middle - 1
            continue
        low, best = middle, min(best, made, key=lambda plan: plan.prediction.step_s)
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
    """The budget whose peak is the limit, on the line through the largest known peak within it and the next one, or
    where all are within it the one before.

    >>> _reaching(5.0, {0: 1.0, 8: 9.0}), _reaching(5.0, {0: 1.0, 2: 3.0}), _reaching(5.0, {0: 1.0, 8: 1.0})
    (4.0, 4.0, inf)
    """
    known = sorted(peaks.items())
    within = sum(peak <= limit_bytes for _, peak in known)
    (before, less), (last, more) = known[min(max(within, 1), len(known) - 1) - 1:][:2]
    return last + (limit_bytes - more) * (last - before) / (more - less) if more > less else math.inf
