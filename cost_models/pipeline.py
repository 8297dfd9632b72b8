"""Pipeline schedules in closed form: seconds of a step, and what is in flight. `timeline` simulates the same programs.

    stage 0   F0 F1 F2 F3 B0 F4 B1 ...          p stages, m micro-batches, v chunks of layers on each stage
    stage 1      F0 F1 F2 B0 F3 B1 ...
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from cost_models.errors import ClusterError
from cost_models.timeline import Task


def pipeline_s(stage_s: Sequence[float], micro_batches: int, virtual: int = 1, replicas: Sequence[int] = ()) -> float:
    """Seconds of 1F1B or GPipe with ``stage_s`` seconds of forward and backward of one micro-batch on each stage.

    The slowest stage works all the time; filling and draining take every other stage once, and with ``virtual`` chunks
    a v-th of that (Narayanan et al. 2021, section 2.2; for unequal stages Alpa's sum + (m - 1) max):

        m max_i t_i + (sum_i t_i - max_i t_i)/v

    Where ``replicas[i]`` ranks share the micro-batches of stage i (PipeDream; Narayanan et al. 2019), it hands
    one on in every t_i/k_i seconds, and the slowest of these, c, counts. What divides all k_i, g, makes g pipelines:

        m c + (sum_i t_i - g c)

    >>> pipeline_s([1.0, 1.0, 1.0, 1.0], 8), pipeline_s([1.0, 1.0, 1.0, 1.0], 8, virtual=3)
    (11.0, 9.0)
    >>> pipeline_s([1.0, 3.0], 6), pipeline_s([1.0, 3.0], 6, replicas=(1, 3))
    (19.0, 9.0)
    """
    if not stage_s or min(stage_s) < 0 or micro_batches < 1 or virtual < 1:
        raise ClusterError(f"a pipeline needs stages of no negative time and one micro-batch and chunk or more, not "
                           f"{len(stage_s)} stages, {micro_batches} micro-batches, {virtual} chunks")
    groups = replicas or [1] * len(stage_s)
    slowest = max(seconds / ranks for seconds, ranks in zip(stage_s, groups, strict=True))
    return micro_batches * slowest + (sum(stage_s) - math.gcd(*groups) * slowest) / virtual


def blocks_of_stages(blocks: int, stages: int, ends: bool = False) -> list[int]:
    """Blocks of each stage: counts as equal as can be, larger ones first. ``ends``: what lies before the blocks, and
    what after them, count as a block each (DeepSpeed's partition_method "type:transformer|embedding", Megatron's
    --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split).

    >>> blocks_of_stages(7, 3), blocks_of_stages(70, 12, ends=True)
    ([3, 2, 2], [5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5])

    Raises ClusterError for a stage without a block, but for ends that hold nothing else.
    """
    each, left = divmod(blocks + 2 * ends, stages)
    counts = [each + (stage < left) for stage in range(stages)]
    counts[0] -= ends
    counts[-1] -= ends
    if min(counts) < (0 if ends else 1):
        raise ClusterError(f"{blocks} blocks do not make {stages} stages of one block or more: take fewer stages")
    return counts


def one_forward_one_backward(forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int,
                             replicas: Sequence[int] = ()) -> list[Task]:
    """The tasks of 1F1B, one rank for each stage or ``replicas`` of them, to be simulated."""
    p, tasks, number = len(forward_s), list[Task](), dict[tuple[str, int, int], int]()
    groups = list(replicas or [1] * p)
    orders = [(stage, order(warm_up(groups, stage), range(place, micro_batches, ranks)))
              for stage, ranks in enumerate(groups) for place in range(ranks)]
    for stage, actions in orders:
        for kind, micro in actions:
            number[kind, stage, micro] = len(number)
    for rank, (stage, actions) in enumerate(orders):
        for kind, micro in actions:
            if kind == "F":
                after = [("F", stage - 1, micro)] if stage else []
            else:
                after = [("B", stage + 1, micro)] if stage < p - 1 else [("F", stage, micro)]
            seconds = forward_s[stage] if kind == "F" else backward_s[stage]
            tasks.append(Task(seconds, "compute", tuple(number[key] for key in after), rank, f"{kind}{micro}"))
    return tasks


def warm_up(replicas: Sequence[int], stage: int) -> int:
    """Forwards of 1F1B before the first backward, of each of the ``replicas[stage]`` ranks of a stage: one, and what
    the next stage has begun with.

    >>> [warm_up((1, 1, 1), stage) for stage in range(3)], [warm_up((1, 3), stage) for stage in range(2)]
    ([3, 2, 1], [4, 1])
    """
    found = 1
    for ranks, next_ranks in reversed(list(itertools.pairwise(replicas[stage:]))):
        found = 1 + -(-next_ranks * found // ranks)
    return found


def order(warm_up: int, micro_batches: Sequence[int]) -> list[tuple[str, int]]:
    """What one rank does with its micro-batches: some forwards, then one of each, then the backwards that are left."""
    made = [("F", micro) for micro in micro_batches[:warm_up]]
    for number, micro in enumerate(micro_batches):
        made.append(("B", micro))
        made += [("F", later) for later in micro_batches[warm_up + number : warm_up + number + 1]]
    return made
