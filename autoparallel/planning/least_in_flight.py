"""A lower bound of the activations that a pipeline holds, given the length of its step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autoparallel.plans import Hybrid
from autoparallel.pricing import equal_stages_s
from autoparallel.schedule.in_flight import in_flight
from autoparallel.schedule.pipeline_tasks import MORE
from autoparallel.schedule.step_config import as_rounds

#: Coefficients of each stage's share of the blocks.
Row = dict[int, float]


def least_in_flight(hybrid: Hybrid, step_length: float) -> float:
    """A lower bound of the micro-batches in flight per block, as a mean over all blocks, for every division of the
    blocks into stages. ``step_length``: the longest step, in units of one micro-batch's seconds through all blocks on
    one rank.

    A linear program over each stage's share of the blocks. Its rows are lower bounds of the step: the work of each
    rank, and `first_waits`. Infinite where no division has so short a step.
    """
    from ortools.linear_solver import pywraplp

    if hybrid.copies > 1:
        return hybrid.copies * least_in_flight(as_rounds(hybrid), step_length / hybrid.copies)
    if step_length < equal_stages_s(hybrid, float(hybrid.micro_batches)) * (1 - 1e-9):
        return float("inf")
    step_length = min(step_length, 2.0 * hybrid.micro_batches)    # more than any division takes
    solver = pywraplp.Solver.CreateSolver("GLOP")
    shares = [solver.NumVar(0.0, 1.0, "") for _ in range(hybrid.stages)]
    solver.Add(solver.Sum(shares) == 1.0)
    for row, most in _rows(hybrid, step_length):
        bound = solver.Constraint(-solver.infinity(), most)
        for stage, times in row.items():
            bound.SetCoefficient(shares[stage], times)
    held = solver.Objective()
    for stage, share in enumerate(shares):
        held.SetCoefficient(share, float(in_flight(hybrid, stage)))
    held.SetMinimization()
    return float(held.Value()) if solver.Solve() == solver.OPTIMAL else float("inf")


def _rows(hybrid: Hybrid, step_length: float) -> Iterator[tuple[Row, float]]:
    """The rows of the linear program: coefficients of the stages' shares, and the upper limit of their sum."""
    ranks, count = hybrid.pipeline_ranks, hybrid.micro_batches
    simulated = count <= MORE * ranks or hybrid.stages == ranks    # of others the seconds are extrapolated
    for rank in range(ranks):
        if simulated and not hybrid.pipelining.splits_backward:
            yield from ((row, step_length) for row in first_waits(hybrid, rank))
        else:
            yield dict.fromkeys(hybrid.stages_of(rank), float(count)), step_length


def first_waits(hybrid: Hybrid, rank: int) -> Iterator[Row]:
    """Lower bounds of a step, one for each stage of a rank, as coefficients of the stages' seconds (forward and
    backward of one micro-batch): the work of the rank, and its idle seconds before the first forward and after the last
    backward of that stage."""
    own = hybrid.stages_of(rank)
    actions = [(kind, stage) for kind, stage, _ in hybrid.pipelining.order(hybrid, rank)]
    for stage in own:
        begin, end = actions.index(("F", stage)), len(actions) - 1 - actions[::-1].index(("B", stage))
        meanwhile = [Counter(at for kind, at in some if kind == only)
                     for some, only in ((actions[:begin], "F"), (actions[end + 1 :], "B"))]
        if len(actions) - 1 - end + begin > sum(some.total() for some in meanwhile):
            continue    # the rank runs forwards and backwards there
        row = dict.fromkeys(range(stage), 1.0)
        yield row | {at: row.get(at, 0.0) + hybrid.micro_batches - max(some[at] for some in meanwhile) for at in own}


__all__ = ["first_waits", "least_in_flight"]
