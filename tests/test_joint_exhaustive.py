"""Small cases of which all combinations are planned in full: no plan is below its combination's bound, and the joint
search finds the best of them."""

from __future__ import annotations

import random

import pytest

from autoparallel.errors import InfeasibleError
from tests.support.small_joint import SmallCase

#: Combinations of a case that are planned in full.
SOME = 10


#: Of the seeds of bounds those that run by default: in 18 a wide head leaves its pipeline rank the fewest blocks.
QUICK = (0, 2, 18)


@pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 60)
                                            if seed not in QUICK)])
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


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 300))])
def test_the_joint_search_finds_the_best_of_all_combinations(seed: int) -> None:
    case = SmallCase(seed)
    every = [made.prediction.step_s for _, made in case.planned(case.combinations)]
    if not every:
        with pytest.raises(InfeasibleError):
            case.jointly()
        return
    made = case.jointly()
    assert made.prediction.step_s <= min(every) * (1 + 1e-6)
    assert made.evidence.step_bound_s is not None and made.evidence.step_bound_s <= min(every) * (1 + 1e-9)
