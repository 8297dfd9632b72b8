"""The joint search's trial plans of the whole model: their order, repeats with less memory, and full searches."""

from __future__ import annotations

import dataclasses
import math

import pytest

import autoparallel
from autoparallel.errors import SearchError
from autoparallel.planning.candidates import Candidate
from autoparallel.planning.joint_search import PIPELINE_EXCESS, _TrialPlans
from autoparallel.plans import Hybrid
from autoparallel.search import NotRepairedError
from cost_models import Cluster
from tests.support.captured import plan_of


def test_trial_plans_are_ordered_by_the_ratios_of_their_kind() -> None:
    """Pipelines are expected to take longer than estimated, until one did not; one that does not fit holds back only
    what runs like it; without an estimate that fits, all are searched in full."""
    some = plan_of("mlp", Cluster.load("h100-sxm", num_devices=2), mesh_shape=(2,))
    took: dict[Candidate, float] = {}
    order: list[Candidate] = []

    def in_full(candidate: Candidate, seconds: float, search: str = "auto") -> autoparallel.Plan:
        order.append(candidate)
        if candidate not in took:
            raise SearchError("does not fit")
        more = took[candidate] - some.prediction.step_s
        return dataclasses.replace(some, prediction=dataclasses.replace(some.prediction, waiting_s=more))

    def candidate(stages: int, micro_batches: int, estimate_s: float) -> Candidate:
        hybrid = Hybrid(micro_batches, stages, stages, "1f1b", (), 1, "none")
        return Candidate(hybrid, (2,), estimate_s, lambda space: [])

    alone, two, four, six = candidate(1, 1, 1.05), candidate(2, 8, 1.0), candidate(4, 8, 1.2), candidate(2, 16, 0.9)
    took.update({alone: 1.2, two: 1.0})
    trial_plans = _TrialPlans(in_full, lambda candidate, best_s: candidate)
    trial_plans.add([alone, two, four, six])
    trial_plans.run(math.inf)
    assert order == [six, alone, two] and trial_plans.best_s == pytest.approx(1.0)
    lost = _TrialPlans(in_full, lambda candidate, best_s: candidate)
    lost.add([dataclasses.replace(two, estimate_s=math.inf, first=None)])
    lost.run(-math.inf)
    order.clear()
    lost.search_on(-math.inf)
    assert [c.hybrid for c in order] == [two.hybrid] and lost.best is None


def test_all_that_may_be_the_best_are_searched_in_full() -> None:
    """Those within two percent, with a trial plan or without, but for those whose bound is above the best plan; after
    the deadline none."""
    some = plan_of("mlp", Cluster.load("h100-sxm", num_devices=2), mesh_shape=(2,))
    order: list[int] = []

    def in_full(candidate: Candidate, seconds: float, search: str = "auto") -> autoparallel.Plan:
        order.append(candidate.hybrid.micro_batches)
        more = (1.0 if search == "local" else 0.99) - some.prediction.step_s
        return dataclasses.replace(some, prediction=dataclasses.replace(some.prediction, waiting_s=more))

    def trials() -> _TrialPlans:
        made = _TrialPlans(in_full, lambda candidate, best_s: candidate,
                           floor=lambda candidate: 0.995 if candidate.hybrid.micro_batches == 4 else 0.5)
        made.add([Candidate(Hybrid(count), (2,), estimate_s, lambda space: [])
                  for count, estimate_s in ((1, 0.99), (2, 0.995), (4, 0.997), (8, 1.2))])
        made.run(math.inf)
        order.clear()
        return made

    found = trials()
    found.search_on(math.inf)
    assert order == [1, 2] and found.best_s == pytest.approx(0.99)
    trials().search_on(-math.inf)
    assert not order


def test_plans_that_are_known_are_expected_to_take_their_seconds() -> None:
    """The estimates of others are multiplied by what trial plans of their kind took beyond them, these not."""
    some = plan_of("mlp", Cluster.load("h100-sxm", num_devices=2), mesh_shape=(2,))
    took = {0: 1.6, 1: 1.2, 2: 1.1}    # by ZeRO stage

    def in_full(candidate: Candidate, seconds: float, search: str = "auto") -> autoparallel.Plan:
        more = took[candidate.hybrid.zero_stage] - some.prediction.step_s
        return dataclasses.replace(some, prediction=dataclasses.replace(some.prediction, waiting_s=more))

    known, first, last = (Candidate(Hybrid(8, 2, 2, zero_stage=zero), (2,), estimate_s, lambda space: [])
                          for zero, estimate_s in ((1, 1.3), (0, 1.0), (2, 1.29)))
    trial_plans = _TrialPlans(in_full, lambda candidate, best_s: candidate)
    trial_plans.left, trial_plans.sure = [known], {known}
    trial_plans.add([first, last])
    assert trial_plans.expected_s(known) == 1.3 and trial_plans.expected_s(first) == 1.0 * PIPELINE_EXCESS
    trial_plans.run(math.inf)    # 0 (1.6 for 1.07), then 1 before 2, of which 1.6 times 1.29 s are expected
    assert [candidate.hybrid.zero_stage for candidate in trial_plans.trial_s] == [0, 1]
    assert trial_plans.expected_s(last) == pytest.approx(1.6 * 1.29)
    longer = Candidate(Hybrid(16, 4, 4), (2,), 1.0, lambda space: [])
    assert trial_plans.expected_s(longer) == PIPELINE_EXCESS    # of another kind, of which nothing is known


def test_the_best_trial_plans_are_tried_with_fewer_recomputed_blocks() -> None:
    """Where one of them could become the best: not those that are slower without any recompute."""
    some = plan_of("mlp", Cluster.load("h100-sxm", num_devices=2), mesh_shape=(2,))

    def plan(micro_batches: int, step_s: float, recompute_s: float) -> autoparallel.Plan:
        more = dataclasses.replace(some.prediction, waiting_s=step_s - some.prediction.step_s, recompute_s=recompute_s)
        hybrid = Hybrid(micro_batches, recompute="full" if recompute_s else "none")
        return dataclasses.replace(some, prediction=more, hybrid=hybrid)

    plans = {1: plan(1, 1.0, 0.0), 2: plan(2, 1.1, 0.3), 4: plan(4, 1.2, 0.1)}

    def in_full(candidate: Candidate, seconds: float, search: str = "auto") -> autoparallel.Plan:
        return plans[candidate.hybrid.micro_batches]

    trial_plans, asked = _TrialPlans(in_full, lambda candidate, best_s: candidate), list[int]()
    for made in plans.values():
        candidate = Candidate(made.hybrid, (2,), 0.9, lambda space: [])
        trial_plans.trial_s[candidate] = trial_plans.take(candidate, 1.0)

    def less(made: autoparallel.Plan, deadline: float, seconds: float, search: str = "auto") -> autoparallel.Plan:
        asked.append(made.hybrid.micro_batches)
        return plan(2, 0.9, 0.1)

    trial_plans.recompute_less(less, math.inf)
    assert asked == [2] and trial_plans.best_s == pytest.approx(0.9)
    trial_plans.search_on(math.inf)
    assert trial_plans.planned == 3


def test_candidates_above_their_estimated_memory_are_estimated_with_less() -> None:
    """A trial plan that does not fit is estimated again with less memory, by the factor of its excess, if possible."""
    some = plan_of("mlp", Cluster.load("h100-sxm", num_devices=2), mesh_shape=(2,))
    rooms: list[float] = []

    def in_full(candidate: Candidate, seconds: float, search: str = "auto") -> autoparallel.Plan:
        if candidate.room == 1.0:
            raise NotRepairedError("a trial plan", 125.0, 100.0)
        return some

    def estimate(candidate: Candidate, best_s: float) -> Candidate:
        rooms.append(candidate.room)
        return dataclasses.replace(candidate, estimate_s=2.0 if candidate.hybrid.micro_batches == 8 else math.inf)

    def trial_plans_of(micro_batches: int) -> _TrialPlans:
        trial_plans = _TrialPlans(in_full, estimate)
        trial_plans.add([Candidate(Hybrid(micro_batches, 2, 2), (2,), 1.0, lambda space: [])])
        trial_plans.run(math.inf)
        return trial_plans

    found, lost = trial_plans_of(8), trial_plans_of(4)
    assert found.best == some and lost.best is None and rooms == [0.8, 0.8]
    assert [c.estimate_s for c in found.updated()] == [math.inf, some.prediction.step_s]
    assert isinstance(lost.failure, NotRepairedError)


def test_a_plan_that_was_repaired_holds_back_only_what_keeps_as_much() -> None:
    """Of a pipeline of GPT-3 530B a trial plan with ZeRO-3 and no recompute took 1.73 times its estimate, for it was
    repaired until it fitted: selective recompute on the same pipeline, which took 1.1 times, is tried after it, and so
    are another mesh and other micro-batches, which keep another number of bytes; not the same in pieces."""
    some = plan_of("mlp", Cluster.load("h100-sxm", num_devices=2), mesh_shape=(2,))
    order: list[Candidate] = []

    def in_full(candidate: Candidate, seconds: float, search: str = "auto") -> autoparallel.Plan:
        order.append(candidate)
        ratio = 1.1 if candidate.hybrid.recompute == "selective" else 1.73
        more = dataclasses.replace(some.prediction, waiting_s=ratio * candidate.estimate_s - some.prediction.step_s)
        return dataclasses.replace(some, prediction=more)

    def candidate(mesh: tuple[int, ...], recompute: str, estimate_s: float, count: int = 8, pieces: int = 1
                  ) -> Candidate:
        hybrid = Hybrid(count, 6, 2, "interleaved", zero_stage=3, recompute=recompute, pieces=pieces)
        return Candidate(hybrid, mesh, estimate_s, lambda space: [])

    first, same = candidate((4, 2), "none", 1.0), candidate((4, 2), "none", 1.01, pieces=2)
    mesh, selective = candidate((8,), "none", 1.02), candidate((4, 2), "selective", 1.03)
    others = candidate((4, 2), "none", 1.015, count=16)
    trial_plans = _TrialPlans(in_full, lambda candidate, best_s: candidate)
    trial_plans.add([selective, mesh, same, others, first])
    trial_plans.run(math.inf)
    assert order == [first, others, mesh, selective] and trial_plans.best_s == pytest.approx(1.1 * 1.03)
