"""The joint search where hardly anything fits: it ends near its limit, with the sparing plan. All that it tries is
bounded beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from autoparallel import Plan, clock
from autoparallel.planning.bounding import Bounding, Known
from autoparallel.planning.candidates import Candidate
from autoparallel.planning.joint_plan import bound_below
from autoparallel.planning.joint_search import MOST_LATE, _TrialPlans
from autoparallel.plans import Hybrid
from autoparallel.search import MemoryLimitError, NotRepairedError
from cost_models import Cluster
from tests.support.captured import plan_of

#: Seconds of the search, of a trial plan, and of a full search, which is not cut short; bytes of the limit.
LIMIT_S, TRIAL_S, FULL_S, LIMIT_BYTES = 4.0, 0.05, 1.5, 100.0
#: Combinations by their micro-batches; that of so many takes the fewest bytes.
COUNTS, SPARING = (*range(1, 31),), 17


def combination(count: int) -> Candidate:
    return Candidate(Hybrid(count, zero_stage=1 + 2 * (count == SPARING)), (2,), 1.0, lambda space: [])


class Tight:
    """Full searches of combinations that count work; all but ``fits`` take too many bytes. ``repairs``: whether trial
    plans tell how many."""

    def __init__(self, fits: int | None, repairs: bool = True) -> None:
        self.fits, self.repairs, self.searched = fits, repairs, list[int]()
        self.plan = plan_of("mlp", Cluster.load("h100-sxm", num_devices=2), mesh_shape=(2,))

    def __call__(self, candidate: Candidate, seconds: float, search: str | None = None) -> Plan:
        count = candidate.hybrid.micro_batches
        clock.did("moves tried", (TRIAL_S if search == "local" else FULL_S) / clock.RATES["moves tried"])
        needed = LIMIT_BYTES + 1 + 10 * abs(count - SPARING)
        if search == "local":
            if self.repairs:
                raise NotRepairedError("", needed, LIMIT_BYTES)
            raise MemoryLimitError("", needed, LIMIT_BYTES)
        self.searched.append(count)
        if count == self.fits:
            return self.plan
        raise MemoryLimitError("", needed, LIMIT_BYTES, 2 * needed)

    def search(self, sparing: Sequence[Candidate] = ()) -> tuple[_TrialPlans, float]:
        """Trial plans, then full searches; and the counted seconds of both."""
        with clock.counted(LIMIT_S):
            trials = _TrialPlans(self, lambda candidate, best_s: replace(candidate, first=None), least_s=3.0)
            trials.add([combination(count) for count in COUNTS if count != SPARING or self.repairs])
            trials.run(0.75 * LIMIT_S)
            trials.search_on(LIMIT_S, sparing)
            return trials, clock.spent_s()


def test_a_search_of_which_nothing_fits_ends_near_its_limit() -> None:
    """Not after a full search of each combination; the error is of the one that lacks the least."""
    tight = Tight(fits=None)
    trials, spent_s = tight.search()
    assert trials.best is None and spent_s <= LIMIT_S + (MOST_LATE + 1) * FULL_S < len(COUNTS) * FULL_S
    assert isinstance(trials.nearest, MemoryLimitError)
    assert trials.nearest.needed_bytes == LIMIT_BYTES + 1 and trials.nearest.sufficient_bytes < math.inf


def test_the_combination_that_lacks_the_fewest_bytes_is_searched_first() -> None:
    """As its trial plan told."""
    tight = Tight(fits=SPARING)
    trials, spent_s = tight.search()
    assert trials.best is not None and tight.searched[0] == SPARING
    assert spent_s <= LIMIT_S + FULL_S


@pytest.mark.parametrize("fits", [SPARING, 1])
def test_sparing_combinations_take_turns_with_those_that_were_estimated(fits: int) -> None:
    """Where trial plans tell nothing: one without an estimate, of the fewest bytes, is the second."""
    tight = Tight(fits, repairs=False)
    trials, spent_s = tight.search([combination(SPARING)])
    assert trials.best is not None and set(tight.searched[:2]) >= {fits}
    assert spent_s <= LIMIT_S + MOST_LATE * FULL_S


def test_an_estimate_below_a_known_plan_of_its_combination_is_tried() -> None:
    """A plan by hand, whose seconds are sure, does not stand in the way of a better one; a worse estimate is none."""
    with clock.counted(LIMIT_S):
        search = Tight(fits=None)
        trials = _TrialPlans(search, lambda candidate, best_s: replace(candidate, first=None))
        known, other = combination(1), combination(2)
        trials.left, trials.sure = [known], {known}
        better, worse = replace(known, estimate_s=0.9), replace(known, estimate_s=1.1)
        trials.add([worse, other])
        assert trials.left == [known, other]
        trials.add([better])
        assert trials.left == [known, other, better]
        trials.run(0.1 * TRIAL_S)
        assert next(iter(trials.trial_s)) == better


def test_neighbours_of_a_combination_that_was_told_of_itself_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One estimated in the first round may be the best of the second only."""
    bounding, told = Bounding(lambda: pytest.fail("no bounds are raised here")), list[Any]()
    monkeypatch.setattr(bounding._beside, "tell", told.append)
    first, second = combination(1), combination(2)
    bounding.others([first])
    for candidate in (first, second, second):
        bounding.around(candidate)
    bounding.others([first, second])
    assert [[c.key for c in (*one.others, *one.around)] for one in told if isinstance(one, Known)] == [
        [first.key], [first.key], [second.key], [second.key]]
    assert [bool(one.around) for one in told] == [False, True, True, False]


def test_a_bound_above_the_plan_is_told_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_of("mlp", Cluster.load("h100-sxm", num_devices=2))
    step_s, several = plan.prediction.step_s, replace(plan.hybrid, stages=2, pipeline_ranks=3,
                                                                  micro_batches=2, replicas=(1, 2))
    assert bound_below(plan, 0.5 * step_s) == 0.5 * step_s
    assert bound_below(plan, step_s * (1 + 1e-12)) == step_s
    assert bound_below(replace(plan, hybrid=several), 2 * step_s) == step_s and not caplog.text
    assert bound_below(plan, 2 * step_s) is None
    assert "the bound is wrong, and left out; please report the model" in caplog.text
