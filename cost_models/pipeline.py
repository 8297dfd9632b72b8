"""Pipeline schedules in closed form: seconds of a step, and what is in flight. `timeline` simulates the same programs.

    stage 0   F0 F1 F2 F3 B0 F4 B1 ...          p stages, m micro-batches, v chunks of layers on each stage
    stage 1      F0 F1 F2 B0 F3 B1 ...
"""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.errors import ClusterError
from cost_models.timeline import Task


def pipeline_s(stage_s: Sequence[float], micro_batches: int, virtual: int = 1) -> float:
    """Seconds of 1F1B or GPipe with ``stage_s`` seconds of forward and backward of one micro-batch on each stage.

    The slowest stage works all the time; filling and draining take every other stage once, and with ``virtual`` chunks
    a v-th of that (Narayanan et al. 2021, section 2.2; for unequal stages Alpa's sum + (m - 1) max):

        m max_i t_i + (sum_i t_i - max_i t_i)/v

    >>> pipeline_s([1.0, 1.0, 1.0, 1.0], 8), pipeline_s([1.0, 1.0, 1.0, 1.0], 8, virtual=3)
    (11.0, 9.0)
    """
    if not stage_s or min(stage_s) < 0 or micro_batches < 1 or virtual < 1:
        raise ClusterError(f"a pipeline needs stages of no negative time and one micro-batch and chunk or more, not "
                           f"{len(stage_s)} stages, {micro_batches} micro-batches, {virtual} chunks")
    slowest = max(stage_s)
    return micro_batches * slowest + (sum(stage_s) - slowest) / virtual


def one_forward_one_backward(forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int) -> list[Task]:
    """The tasks of 1F1B, one rank for each stage, to be simulated: stage i starts with p - i forwards."""
    p, tasks, number = len(forward_s), list[Task](), dict[tuple[str, int, int], int]()
    orders = [_order(p - stage, micro_batches) for stage in range(p)]
    for stage, order in enumerate(orders):
        for kind, micro in order:
            number[kind, stage, micro] = len(number)
    for stage, order in enumerate(orders):
        for kind, micro in order:
            if kind == "F":
                after = [("F", stage - 1, micro)] if stage else []
            else:
                after = [("B", stage + 1, micro)] if stage < p - 1 else [("F", stage, micro)]
            seconds = forward_s[stage] if kind == "F" else backward_s[stage]
            tasks.append(Task(seconds, "compute", tuple(number[key] for key in after), stage, f"{kind}{micro}"))
    return tasks


def _order(warm_up: int, micro_batches: int) -> list[tuple[str, int]]:
    """What one stage does, in order: some forwards, then one of each, then the backwards that are left."""
    first = min(warm_up, micro_batches)
    order = [("F", micro) for micro in range(first)]
    for micro in range(micro_batches):
        order.append(("B", micro))
        if first + micro < micro_batches:
            order.append(("F", first + micro))
    return order
