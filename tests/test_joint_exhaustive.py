"""Small cases of which all combinations are planned in full: no plan is below its combination's bound, and the joint
search finds the best of them."""

from __future__ import annotations

import itertools
import math
import random
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from autoparallel.errors import InfeasibleError, PlanError
from autoparallel.partition import Splits
from autoparallel.planning import candidate_bounds
from autoparallel.planning.bound_kinds import Kind
from autoparallel.planning.candidates import Candidate, Fixed
from autoparallel.planning.joint_candidates import JointSearch
from autoparallel.planning.joint_search import _TrialPlans
from autoparallel.planning.memory_bounds import least_fitting_s
from autoparallel.planning.one_mesh import plan_on
from autoparallel.planning.options import Options
from autoparallel.planning.step_bounds import Work
from autoparallel.plans import Hybrid, Plan
from autoparallel.pricing.layer_overlap import LayerOverlap
from autoparallel.schedule.activation_windows import NOWHERE
from autoparallel.schedule.pieces import TRIED
from autoparallel.search import MemoryLimitError
from autoparallel.search.model.problem import Edge, Node, Problem
from tests.support.small_joint import SmallCase

#: Combinations of a case that are planned in full.
SOME = 10


#: Of the seeds of bounds those that run by default: in 18 a wide head leaves its pipeline rank the fewest blocks.
QUICK = (18,)


@pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow)
                                            for seed in (0, *range(2, 60)) if seed not in QUICK)])
def test_no_plan_is_below_the_bound_of_its_combination(seed: int) -> None:
    """Neither in seconds nor in bytes; before its decision graph is bounded, and after, when the bound is no less."""
    case = SmallCase(seed)
    bounds = case.search.step_bounds
    for candidate, made in case.planned(random.Random(seed).sample(case.combinations, SOME)):
        even_s, step_s = bounds.step_s(candidate), made.prediction.step_s
        while bounds.tighten(candidate):
            pass
        assert 0 < even_s <= bounds.step_s(candidate) <= step_s * (1 + 1e-9), candidate
        assert case.search.bounds.least_bytes(candidate) <= made.prediction.peak_bytes


@pytest.mark.parametrize("seed", [5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 7, 8, 11, 14, 18))])
def test_no_pipeline_in_pairs_is_below_its_bound(seed: int) -> None:
    """Of two micro-batches at a time, as a user may ask of any pipeline."""
    case, pairs = SmallCase(seed), list[Candidate]()
    for candidate in (one for one in case.combinations if one.hybrid.stages > 1):
        with suppress(PlanError):
            pairs.append(replace(candidate, hybrid=replace(candidate.hybrid, copies=2)))
    bounds = case.search.step_bounds
    for candidate, made in case.planned([one for one in pairs if one.hybrid.micro_batches == 2][:2]):
        while bounds.tighten(candidate):
            pass
        assert bounds.step_s(candidate) <= made.prediction.step_s * (1 + 1e-9), candidate
        assert case.search.bounds.least_bytes(candidate) <= made.prediction.peak_bytes


@pytest.mark.parametrize(("seed", "unequal"), [
    (18, False), *(pytest.param(seed, False, marks=pytest.mark.slow) for seed in (1, *range(3, 300)) if seed != 18),
    *(pytest.param(seed, True, marks=pytest.mark.slow) for seed in (1, 2, 10, 14, 18, 19, 21, 22, 28, 31))])
def test_the_joint_search_finds_the_best_of_all_combinations(seed: int, unequal: bool) -> None:
    """Of unequal devices the best is zero bubble in 1, 18, 22 and 28, and has micro-batches by rank in 2 and 14."""
    case = SmallCase(seed, unequal)
    every = [made.prediction.step_s for _, made in case.planned(case.combinations)]
    if not every:
        with pytest.raises(InfeasibleError):
            case.jointly()
        return
    made = case.jointly()
    assert made.prediction.step_s <= min(every) * (1 + 1e-6)
    assert made.evidence.step_bound_s is not None and made.evidence.step_bound_s <= min(every) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_priced_memory_bounds_all_choices_that_fit(seed: int) -> None:
    """Of three equal blocks and an end, each recomputed or not: more seconds, mostly fewer bytes. The bound is not
    above the best choice that fits, but above the best of all where that does not fit."""
    draw = np.random.default_rng(seed)
    seconds, num_bytes = draw.uniform(1, 9, (2, 2, 3)), draw.uniform(1, 9, (2, 2, 3))    # by node, recomputed, choice
    seconds[:, 1] = seconds[:, 0] + draw.uniform(0, 4, (2, 3))
    num_bytes[:, 1] *= 0.4
    table = draw.uniform(0, 3, (3, 3))
    equal = 3

    def way(recomputed: int) -> Problem:
        nodes = [Node("block", equal * seconds[0, recomputed], equal * num_bytes[0, recomputed], (0, 2)),
                 Node("copy", np.zeros(3), np.zeros(3)),
                 Node("end", seconds[1, recomputed], num_bytes[1, recomputed], (0, 2)),
                 Node("later", np.zeros(1), np.ones(1), (2, 3))]
        return Problem(nodes, [Edge(1, 0, equal * table)])

    ways, several = [way(0), way(1)], [True, True, False, False]
    of_block = [(min(table[:, choice]) + seconds[0, r, choice], num_bytes[0, r, choice])
                for r in range(2) for choice in range(3)]
    of_end = [(seconds[1, r, choice], num_bytes[1, r, choice]) for r in range(2) for choice in range(3)]
    plans = [(math.fsum(one[0] for one in plan), math.fsum(one[1] for one in plan))
             for plan in itertools.product(*[of_block] * equal, of_end)]
    free_s, least = min(plans)[0], min(held for _, held in plans)
    assert least_fitting_s(ways, several, 1, math.inf) == pytest.approx(free_s)
    for room in (least, *np.quantile([held for _, held in plans], (0.02, 0.1, 0.3))):
        best = min(cost for cost, held in plans if held <= room)
        bound = least_fitting_s(ways, several, 1, room)
        assert free_s * (1 - 1e-9) <= bound <= best * (1 + 1e-9)
    best = min(cost for cost, held in plans if held <= least)
    assert least_fitting_s(ways, several, 1, least) > free_s + 0.3 * (best - free_s)


@pytest.mark.slow
def test_bounds_rise_where_memory_binds() -> None:
    """Of a step that holds more than half of the memory, and of one with all of it; nor is a plan below."""
    case = SmallCase(5)
    free, alone = Candidate(Hybrid(), (case.cluster.num_devices,)), Candidate(Hybrid(recompute="full"), (
        case.cluster.num_devices,))
    bounds, plans = dict[float, list[float]](), dict[float, float]()
    fits = plan_on(Splits(case.graph)(1), case.cluster, free.mesh_shape, None, Options(), free.hybrid)
    for share in (1.0, 0.5):
        limit = share * fits.prediction.peak_bytes
        search = JointSearch(case.graph, case.cluster, Fixed(), "adamw", limit)
        for candidate in (free, alone):
            while search.step_bounds.tighten(candidate):
                pass
        bounds[share] = [search.step_bounds.step_s(candidate) for candidate in (free, alone)]
        made = plan_on(Splits(case.graph)(1), case.cluster, free.mesh_shape, None,
                       Options(memory_limit_bytes=limit), alone.hybrid)
        plans[share] = made.prediction.step_s
    assert bounds[0.5][0] > 1.01 * bounds[1.0][0] and bounds[0.5][1] > bounds[1.0][1]
    assert bounds[0.5][1] <= bounds[0.5][0] and bounds[0.5][1] <= plans[0.5]


def test_communication_that_nothing_can_hide_counts_whole() -> None:
    """In a block of a norm, two linear layers and a sum: what the norm reads waits; the first layer's operand, and the
    second one's result, wait for a piece of theirs, and for more where it takes longer than the layer; the sum's other
    term travels beside both. Of a pipeline that puts
    gradients of weights off all waits."""
    case = SmallCase(30)    # on 8 devices, with norms
    kind = Kind.of(Candidate(Hybrid(4, 2, 2), (2, 2)))
    prices = case.search._prices_of_device(4, 2, (2, 2), 1.0)
    space, exposed = prices.space, kind.least_exposed(prices)
    assert exposed.by_use is not None
    inside = {path for path in space.blocks if path}
    found = dict[str, set[object]]()
    for use in space.uses:
        if space.decisions[use.source].kind != "parameter" and space.blocks[use.target] in inside:
            node = space.graph.nodes[space.decisions[use.target].node]
            found.setdefault(node.op_name, set()).add(exposed.of(use, False))
    share, pieces = exposed.activations, max(TRIED)
    assert {ways for name, some in found.items() if "norm" in name for ways in some} == {(1.0, 1.0)}
    of_linear, of_add = ([one for name, some in found.items() if what in name for one in some
                          if isinstance(one, LayerOverlap)] for what in ("linear", "add"))
    assert of_linear and all((one.share, one.pieces, one.only_layers) == (share, pieces, True) for one in of_linear)
    assert any(one.maker != NOWHERE and not one.readers for one in of_add)
    of_piece = 1 - (1 - share) * (pieces - 1) / pieces
    least = kind.least_exposed(prices, limited=False).by_use
    assert least is not None and {(of_piece, share), (of_piece, of_piece)} <= set(least.values())
    late = kind._replace(puts_off=True).least_exposed(prices)
    assert late.by_use is None and late.activations == 1.0 > exposed.activations
    once, each = (kind._replace(zero_stage=stage).least_exposed(prices) for stage in (1, 3))
    assert once.gathers > each.gathers and once.reductions == each.reductions


@pytest.mark.parametrize("seed", [18, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 7, 30))])
def test_messages_at_cuts_take_no_less_than_their_bound(seed: int) -> None:
    """And in some plan hardly more: its cuts send what is divided evenly."""
    case, shares = SmallCase(seed), list[float]()
    pipelines = [c for c in case.combinations if c.hybrid.stages > 1]
    for candidate, made in case.planned(random.Random(seed).sample(pipelines, min(SOME, len(pipelines)))):
        record = made.known
        assert record is not None
        sent_s = 2 * candidate.hybrid.micro_batches * sum(stage.send_s for stage in record.stages)
        shares.append(case.search.bounds.sends_s(candidate) / sent_s)
    assert min(shares) > 0 and 0.5 < max(shares) <= 1 + 1e-9


def test_bubbles_make_all_of_a_micro_batch_longer() -> None:
    """Seconds in pipelines between the shortest and the longest are on the line between them, or above."""
    work = Work(10.0, 18.0, 2.0)
    assert [work.at(longer, 4.0) for longer in (1.0, 1.5, 2.0)] == [10.0, 14.0, 18.0]
    assert work.at(2.5, 4.0) == 18.0 and work.at(2.5, 7.0) == 20.5 and Work(10.0, 10.0, 1.0).at(1.5, 4.0) == 12.0


def test_steps_of_few_micro_batches_bound_those_of_more() -> None:
    """With as much of the cache as tensors of the most micro-batches find; not those of more than the search tries."""
    case = SmallCase(30)
    bounds, (fewest, *counts) = case.search.step_bounds, case.search.space.micro_batches(1)
    kind = Kind.of(Candidate(Hybrid(fewest), (case.cluster.num_devices,))).least(fewest)
    work = {count: bounds._least_work(kind.least(count)).alone_s for count in counts}
    bounds._bound_more(kind)
    more_s = bounds.found.more[kind].alone_s
    assert bounds._least_work(kind, math.inf).alone_s < more_s <= min(work.values()) * (1 + 1e-9)
    tried, beyond = (Candidate(Hybrid(count), (case.cluster.num_devices,)) for count in (counts[-1], 2 * counts[-1]))
    assert bounds._known_work_s(tried, 1.0) >= more_s and bounds._most(kind) == counts[-1]
    assert bounds._known_work_s(beyond, 1.0) == bounds.even.work_s(beyond)


def test_recompute_that_memory_forces_is_worked_out_once_for_all_zero_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends on neither ZeRO nor sharding, and is what it is for each by itself."""
    case, worked_out = SmallCase(0), list[Hybrid]()
    original = candidate_bounds._forced_s
    monkeypatch.setattr(candidate_bounds, "_forced_s", lambda h, *given: worked_out.append(h) or original(h, *given))
    some = [Candidate(Hybrid(4, zero_stage=zero, recompute="full"), (4,)) for zero in (1, 2, 3)]
    bounds, work_s = case.search.bounds, case.search.bounds.work_s(some[0])
    bounds.limit = (bounds.least_bytes(some[0]) + bounds.least_bytes(
        replace(some[0], hybrid=replace(some[0].hybrid, recompute="none")))) / 2
    found = [bounds.forced_again_s(one, work_s) for one in some]
    assert len(worked_out) == 1 and found[0] > 0 and len(set(found)) == 1
    bounds.limit *= 2
    assert bounds.forced_again_s(some[0], work_s) < found[0] and len(worked_out) == 2


def test_if_nothing_fits_the_error_tells_what_is_enough() -> None:
    """That of a full search, not the bound of a trial plan, though it is less."""
    def in_full(candidate: Candidate, seconds: float, search: str = "auto") -> Plan:
        needed = 5.0 if search == "local" else 9.0 - candidate.hybrid.micro_batches
        raise MemoryLimitError("", needed, 4.0, math.inf if search == "local" else 9.0)

    trials = _TrialPlans(in_full, lambda candidate, best_s: candidate)
    trials.add([Candidate(Hybrid(count), (2,), 1.0, lambda space: []) for count in (1, 2)])
    trials.run(math.inf)
    assert isinstance(trials.nearest, MemoryLimitError) and trials.nearest.needed_bytes == 5.0
    trials.search_on(math.inf)
    assert (trials.nearest.needed_bytes, trials.nearest.sufficient_bytes) == (7.0, 9.0)
