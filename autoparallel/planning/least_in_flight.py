"""The least that the ranks of a pipeline hold of its blocks, where a step may take so long at most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autoparallel.plans import Hybrid
from autoparallel.schedule.in_flight import in_flight
from autoparallel.schedule.pipeline_tasks import MORE

#: Coefficients of each stage's share of the blocks.
Row = dict[int, float]


def least_in_flight(hybrid: Hybrid, turns: float) -> float:
    """The micro-batches in flight on the stage of a block, as a mean over all blocks, however these are divided into
    stages, if a step takes no longer than one micro-batch of all blocks on one rank ``turns`` times.

    A linear program over the shares of the blocks that the stages have. A rank's stages together, and the other ranks
    once for each of a rank's stages, are what a step takes at least (`cost_models.pipeline.pipeline_s`). Where a rank
    has several stages it also waits for its first micro-batch at each of them, which the ranks before it run there, and
    they for its gradient (`first_waits`). Infinite where no step is so short.
    """
    from ortools.linear_solver import pywraplp

    turns = min(turns, 2.0 * hybrid.micro_batches)    # more than any division takes
    solver = pywraplp.Solver.CreateSolver("GLOP")
    shares = [solver.NumVar(0.0, 1.0, "") for _ in range(hybrid.stages)]
    solver.Add(solver.Sum(shares) == 1.0)
    for row, most in _rows(hybrid, turns):
        bound = solver.Constraint(-solver.infinity(), most)
        for stage, times in row.items():
            bound.SetCoefficient(shares[stage], times)
    held = solver.Objective()
    for stage, share in enumerate(shares):
        held.SetCoefficient(share, float(in_flight(hybrid, stage)))
    held.SetMinimization()
    return float(held.Value()) if solver.Solve() == solver.OPTIMAL else float("inf")


def _rows(hybrid: Hybrid, turns: float) -> Iterator[tuple[Row, float]]:
    """Of each bound of a step the times that it counts the share of each stage, and the most that these add up to."""
    ranks, count = hybrid.pipeline_ranks, hybrid.micro_batches
    virtual = hybrid.stages // ranks * hybrid.pipelining.bubble_parts
    for rank in range(ranks):
        yield dict.fromkeys(hybrid.stages_of(rank), count - 1 / virtual), turns - 1 / virtual
    if hybrid.stages > ranks and count <= MORE * ranks and not hybrid.pipelining.splits_backward:
        for rank in range(ranks):
            yield from ((row, turns) for row in first_waits(hybrid, rank))


def first_waits(hybrid: Hybrid, rank: int) -> Iterator[Row]:
    """By stage of a rank, what a step takes at least: all that the rank runs, and its waits for the first forward of
    that stage and after the last backward of it, less what it runs meanwhile. Each as the times that it counts the
    seconds of a forward and a backward on each stage."""
    own = hybrid.stages_of(rank)
    actions = [(kind, stage) for kind, stage, _ in hybrid.pipelining.order(hybrid, rank)]
    for stage in own:
        begin, end = actions.index(("F", stage)), len(actions) - 1 - actions[::-1].index(("B", stage))
        meanwhile = [Counter(at for kind, at in some if kind == only)
                     for some, only in ((actions[:begin], "F"), (actions[end + 1 :], "B"))]
        if len(actions) - 1 - end + begin > sum(some.total() for some in meanwhile):
            continue    # forwards and backwards among both
        row = dict.fromkeys(range(stage), 1.0)
        yield row | {at: row.get(at, 0.0) + hybrid.micro_batches - max(some[at] for some in meanwhile) for at in own}


__all__ = ["first_waits", "least_in_flight"]
