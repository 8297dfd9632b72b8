"""recompute="auto": the fewest recomputed blocks that memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoparallel.capture.blocks import block_path
from autoparallel.errors import InfeasibleError, SearchError
from autoparallel.partition.stages import Stages
from autoparallel.plans import Plan
from autoparallel.schedule.in_flight import in_flight
from autoparallel.search import clock
from autoparallel.strategies.space import StrategySpace


def blocks_by_stage(space: StrategySpace, stages: Stages) -> list[list[str]]:
    """Paths of the blocks of each stage, in order; a block on several stages belongs to the first."""
    found: list[list[str]] = [[] for _ in range(len(stages))]
    seen: set[str] = set()
    for decision, on in zip(space.decisions, stages.of_decisions(len(space)), strict=True):
        path = block_path(space.graph.nodes[decision.node].module_path) if decision.kind == "op" else None
        if path is not None and path not in seen:
            seen.add(path)
            found[on[0]].append(path)
    return found


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
