"""Small problems with every number given: search, paths between layouts, clocks of schedules."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from autoparallel.layout import Placement, parse_layout
from autoparallel.layout.redistribution import ACTIONS, COLLECTIVES, Axes, LayoutSpace, RedistributionTable, Step
from autoparallel.search import Edge, MemoryLimitError, Node, Problem, evaluate, solve
from cost_models.memory import in_flight_micro_batches
from cost_models.pipeline import one_forward_one_backward, order, pipeline_s
from cost_models.timeline import Task, Timeline, simulate


def test_two_ops_on_two_machine_views() -> None:
    """FlexFlow: costs 1 / 3 and 4 / 1, a move costs 5: both on the second view, in 4."""
    nodes = tuple(Node(name, np.array(costs), np.zeros(2)) for name, costs in (("k1", (1.0, 3.0)), ("k2", (4.0, 1.0))))
    found = solve(Problem(nodes, (Edge(0, 1, 5.0 * (1 - np.eye(2))),)))
    assert found.choice == (1, 1) and found.objective == found.lower_bound == 4.0


def test_a_chain_of_three() -> None:
    """nnScaler: two partitions each, of 1 / 2, 0.5 / 1 and 1 / 2; the first everywhere, with what it sends, in 2.8."""
    nodes = tuple(Node(str(i), np.array([1.0, 2.0]) * scale, np.zeros(2)) for i, scale in enumerate((1.0, 0.5, 1.0)))
    edges = tuple(Edge(i, i + 1, np.array([[sent, 1.0], [1.0, 0.0]])) for i, sent in enumerate((0.1, 0.2)))
    found = solve(Problem(nodes, edges))
    assert found.choice == (0, 0, 0) and found.objective == pytest.approx(2.8)
    assert found.lower_bound == pytest.approx(2.8)
    assert evaluate(Problem(nodes, edges), (1, 1, 1)).objective == pytest.approx(5.0)


def test_three_ops_beyond_the_memory_budget() -> None:
    """nnScaler: ops of 8, 5 and 11 bytes have no solution within 10; 24 would do."""
    nodes = tuple(Node(str(size), np.zeros(1), np.array([size]), (0, 1)) for size in (8.0, 5.0, 11.0))
    with pytest.raises(MemoryLimitError) as caught:
        solve(Problem(nodes, (), 10.0))
    assert caught.value.needed_bytes == caught.value.sufficient_bytes == 24.0
    assert evaluate(Problem(nodes, (), 24.0), (0, 0, 0)).feasible


def paths(shape: tuple[int, ...], mesh_shape: tuple[int, ...], priced: str) -> RedistributionTable:
    """By the bytes that are sent one way ("bytes"), or by Colossal-AI's table ("colossal")."""
    def cost(axes: Axes, source: Placement, target: Placement, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        n, (forward, backward) = math.prod(mesh_shape[axis] for axis in axes), ACTIONS[source.kind, target.kind]
        sent = np.maximum(before, after)
        if priced == "colossal":
            return _colossal(forward, before, n) + _colossal(backward, before, n)
        if forward not in COLLECTIVES:
            return np.full(len(before), 1e-3)
        return (n - 1) / n * sent * (2 if forward == "all_reduce" else 1)

    return RedistributionTable(LayoutSpace(shape, mesh_shape, requires_grad=priced == "colossal"), 1, cost)


def _colossal(action: str, num_elements: np.ndarray, n: int) -> np.ndarray:
    """Colossal-AI, alpha and beta 1: by elements of the shard before the step, whichever the collective; an all_to_all
    among n n/2 times as expensive, what is local 10."""
    share = (n - 1) / n * num_elements
    return {"all_gather": 1.1 + share, "reduce_scatter": 1.001 + share, "all_reduce": 1.01 + 2 * share,
            "all_to_all": 1.001 + share / n * (n / 2), "none": 0 * share}.get(action, 10 + 0 * share)


#: Replicas, summands and shards of dims on each side, as nnScaler writes layouts; ours on a mesh that has them as axes;
#: how many collectives (all groups counted) and local steps it takes.
RVD = [
    ("(1,8,1,1,1) -> (8,1,1,1,1)", (8,), "P", "I", {"all_reduce": 1}),
    ("(8,1,1,1,1) -> (1,1,8,1,1)", (8,), "I", "S(0)", {"slice": 1}),
    ("(1,4,1,1,2) -> (4,1,1,1,2)", (4, 2), "P·S(2)", "I·S(2)", {"all_reduce": 2}),
    ("(1,2,1,4) -> (1,1,1,8)", (4, 2), "S(1)·P", "S(1)·S(1)", {"reduce_scatter": 4}),
    ("(1,2,1,2) -> (1,1,4,1)", (2, 2), "P·S(1)", "S(0)·S(0)", {"reduce_scatter": 2, "all_to_all": 2}),
    ("(1,4,1,1,2) -> (2,1,2,1,2)", (2, 2, 2), "P·P·S(2)", "I·S(0)·S(2)", {"reduce_scatter": 4, "all_reduce": 4}),
]


@pytest.mark.parametrize(("stated", "mesh_shape", "source", "target", "expected"), RVD)
def test_between_replicas_partial_sums_and_shards(stated: str, mesh_shape: tuple[int, ...], source: str, target: str,
                                                  expected: dict[str, int]) -> None:
    """nnScaler's paths, by the bytes sent: the same collectives, in as many groups of ranks."""
    shape = (32, 64, 128) if stated.count(",") == 8 else (256, 256)
    found: Counter[str] = Counter()
    for step in paths(shape, mesh_shape, "bytes").path(parse_layout(source), parse_layout(target)):
        ranks = math.prod(mesh_shape[axis] for axis in step.axes)
        found[step.forward] += math.prod(mesh_shape) // ranks if step.forward in COLLECTIVES else 1
    assert found == expected


def test_shards_of_another_dim_on_two_axes() -> None:
    """Colossal-AI on 4 x 4 goes [R,S01,R] -> [R,S0,R] -> [S0,R,R] -> [S01,R,R]: all_gather, all_to_all, slice.

    Ours never makes a larger shard: three all_to_alls, by its own table a third of the price.
    """
    table = paths((64, 32, 16), (4, 4), "colossal")
    whole = 64 * 32 * 16
    layouts = [parse_layout(text) for text in ("S(1)·S(1)", "S(1)·I", "S(0)·I", "S(0)·S(0)")]
    stated = [Step((axis,), before, after)
              for axis, before, after in zip((1, 0, 1), layouts, layouts[1:], strict=False)]
    assert [step.forward for step in stated] == ["all_gather", "all_to_all", "slice"]
    elements = [whole / 16, whole / 4, whole / 4]
    price = sum(float(_colossal(action, np.array(n), 4))
                for step, n in zip(stated, elements, strict=True) for action in (step.forward, step.backward))
    assert price == pytest.approx((1.1 + 1536 + 10) + 2 * (1.001 + 3072) + (10 + 1.1 + 6144))
    ours = table.path(layouts[0], layouts[-1])
    assert [step.forward for step in ours] == ["all_to_all"] * 3
    found = float(table.seconds[table.space.index(layouts[0]), table.space.index(layouts[-1])])
    assert found == pytest.approx(3 * 2 * (1.001 + 768)) and found < 0.34 * price


def gpipe(stages: int, micro_batches: int) -> list[Task]:
    """All forwards, then all backwards, each of one clock."""
    tasks, number = list[Task](), dict[tuple[str, int, int], int]()
    for stage in range(stages):
        for kind, micro in order(micro_batches, range(micro_batches)):
            number[kind, stage, micro] = len(number)
    for kind, stage, micro in number:
        before = stage - 1 if kind == "F" else stage + 1
        after = (number[kind, before, micro],) if 0 <= before < stages else ()
        tasks.append(Task(1.0, "compute", after, stage, f"{kind}{micro}"))
    return tasks


def in_flight(line: Timeline, stage: int) -> int:
    """Micro-batches that have begun and not ended, at most, on a stage."""
    held = most = 0
    for task in sorted((i for i, t in enumerate(line.tasks) if t.rank == stage), key=lambda i: float(line.start_s[i])):
        held += 1 if line.tasks[task].name.startswith("F") else -1
        most = max(most, held)
    return most


@pytest.mark.parametrize("stages", [2, 3, 4, 6, 8, 16, 32])
def test_clocks_of_schedules(stages: int) -> None:
    """Alpa: 2(p + m - 1) clocks and one to apply gradients, GPipe as 1F1B; 1F1B holds p - i micro-batches on stage i.

    In closed form for all its micro-batches; simulated for those that take no time.
    """
    for micro_batches in (1, 2, 4, 8, 16, 32, 64, 128):
        clocks = 2 * (stages + micro_batches - 1)
        assert pipeline_s([2.0] * stages, micro_batches) == clocks
        if stages * micro_batches <= 128:
            one = simulate(one_forward_one_backward([1.0] * stages, [1.0] * stages, micro_batches))
            all_first = simulate(gpipe(stages, micro_batches))
            assert one.total_s == all_first.total_s == clocks
            for stage in range(stages):
                held = in_flight_micro_batches("1f1b", stage, stages, micro_batches)
                assert in_flight(one, stage) == held == min(stages - stage, micro_batches)
                assert in_flight(all_first, stage) == micro_batches
