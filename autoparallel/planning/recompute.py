"""recompute="auto": the fewest recomputed blocks that memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoparallel.errors import InfeasibleError, SearchError
from autoparallel.plans import Plan
from autoparallel.schedule.in_flight import in_flight
from autoparallel.search import clock


def fewest_recomputed(whole: Plan, blocks: Sequence[Sequence[str]], make: Callable[[tuple[str, ...]], Plan],
                      deadline: float = float("inf")) -> Plan:
    """The fastest plan found that recomputes some blocks; ``whole`` recomputes all of them.

    A stage with h micro-batches in flight keeps the activations of b / h blocks, for one b of all stages. The largest b
    for which ``make(paths of recomputed blocks)`` finds a plan is searched by bisection, until `search.clock` reaches
    ``deadline``. At least one block is recomputed; a stage recomputes its first blocks.
    """
    held = [in_flight(whole.hybrid, stage) for stage in range(len(blocks))]
    budgets = sorted({k * h for of_stage, h in zip(blocks, held, strict=True) for k in range(len(of_stage) + 1)})[:-1]
    best, low, high = whole, 0, len(budgets) - 1
    while low < high and clock.now() < deadline:
        middle = (low + high + 1) // 2
        again = tuple(path for of_stage, h in zip(blocks, held, strict=True)
                      for path in of_stage[: max(0, len(of_stage) - budgets[middle] // h)])
        try:
            made = make(again)
        except (InfeasibleError, SearchError):  # does not fit, or no plan was found in time
            high = middle - 1
            continue
        low = middle
        best = min(best, made, key=lambda plan: plan.prediction.step_s)
    return best
