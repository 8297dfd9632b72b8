"""Expected ratios of the joint search's estimates to bounds: a Gaussian process over what is near, and the trend."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from autoparallel.planning.candidates import Candidate
from autoparallel.planning.estimate_order import (
    BY_HAND,
    CURVE,
    HOPE,
    LEVEL,
    NOISE,
    REACH,
    SLOPE,
    UNFIT,
    EstimateOrder,
    Ratios,
)
from autoparallel.plans import Hybrid


@pytest.mark.parametrize("count", [1, 2, 40])
def test_ratios_are_those_of_the_closed_form(count: int) -> None:
    """Also where a point is observed twice, as by a plan by hand and by an estimate."""
    draw = np.random.default_rng(count)
    candidates, prior = draw.integers(0, 4, (60, 3)).astype(float), draw.random(60)
    seen, noises, found = draw.integers(0, 60, count), draw.choice([0.05, 0.15], count), draw.normal(size=count)
    ratios = Ratios(candidates, prior)
    for at, noise, log_ratio in zip(seen, noises, found, strict=True):
        ratios.learn(candidates[at], prior[at], log_ratio, noise)

    def covariance(one: np.ndarray, two: np.ndarray) -> float:
        linear = float((one - candidates.mean(axis=0)) @ (two - candidates.mean(axis=0)))
        return LEVEL**2 + SLOPE**2 * linear + CURVE**2 * math.exp(-np.abs(one - two).sum() / REACH)

    among = np.array([[covariance(candidates[i], candidates[j]) for j in seen] for i in seen]) + np.diag(noises**2)
    for candidate, mean in zip(candidates, prior, strict=True):
        with_seen = np.array([covariance(candidate, candidates[i]) for i in seen])
        weights = np.linalg.solve(among, with_seen)
        variance = covariance(candidate, candidate) - weights @ with_seen
        expected = mean + weights @ (found - prior[seen]) - HOPE * math.sqrt(variance)
        assert ratios.expected()[np.flatnonzero((candidates == candidate).all(axis=1) & (prior == mean))] == (
            pytest.approx(expected, abs=1e-9))


def test_ratios_follow_what_is_near_and_the_trend() -> None:
    """Along the first coordinate the ratio doubles with each step; the second says nothing."""
    points = np.array([[x, y] for x in range(6) for y in range(3)], float)
    ratios = Ratios(points, np.full(len(points), 0.1))
    assert (ratios.expected() == 0.1).all()
    for x, y in ((0, 0), (1, 2), (3, 0)):
        ratios.learn(np.array([x, y], float), 0.1, x * math.log(2), NOISE)
    expected = dict(zip(map(tuple, points.tolist()), ratios.expected(), strict=True))
    assert expected[3, 0] == pytest.approx(3 * math.log(2), abs=0.05)
    rising = [expected[x, 1] for x in range(6)]
    assert rising == sorted(rising) and expected[5, 0] > expected[3, 0]
    assert expected[2, 0] == pytest.approx(2 * math.log(2), abs=0.4)


def test_a_plan_by_hand_says_less_than_an_estimate() -> None:
    """Of its own combination too: a person's layouts may be slower than those that a search finds."""
    points = np.array([[0.0], [4.0]])
    expected = []
    for noise in (NOISE, BY_HAND):
        ratios = Ratios(points, np.zeros(2))
        ratios.learn(points[0], 0.0, 1.0, noise)
        expected.append(ratios.expected()[0])
    assert expected[1] < expected[0] < 1.0


def _order() -> EstimateOrder:
    """Of candidates with 1 to 64 micro-batches, which take 0.3 of the limit, and 0.01 more with each step."""
    def fullness(candidate: Candidate) -> float:
        return 0.3 + 0.01 * math.log2(candidate.hybrid.micro_batches)

    return EstimateOrder([Candidate(Hybrid(2**n), (8,)) for n in range(7)], lambda c: 1.0, lambda c: 0.0, fullness)


def test_what_fits_tells_of_candidates_that_need_as_much_memory_or_less() -> None:
    order, alone = _order(), _order()
    known = Candidate(Hybrid(4), (8,), 1.0)
    alone.learn(known)
    order.learn(known, fits=True)
    gained = alone.excess - order.excess
    assert gained[2] == pytest.approx(alone.unfit[2]) and gained[1] > 0.9 * alone.unfit[1]
    assert (gained[3:] == 0).all()


def test_others_are_expected_to_take_as_much_more_than_their_bounds() -> None:
    """With a bound of 0.32 and a plan that takes all of the memory 0.32 fits and 0.33 is not known to; with one that
    leaves 0.02 of it 0.34 fits."""
    for filled, fits in ((1.0, 3), (0.98, 5)):
        order = _order()
        order.learn(dataclasses.replace(Candidate(Hybrid(4), (8,), 1.0), filled=filled), fits=True)
        assert np.flatnonzero(order.fits).tolist() == list(range(fits))


@pytest.mark.parametrize("seconds", [math.inf, UNFIT])
def test_what_takes_several_times_its_bound_is_as_what_does_not_fit(seconds: float) -> None:
    """The ratios of others stay. More is expected of those that need as much memory or more, unless one is known to
    fit."""
    order = _order()
    order.learn(Candidate(Hybrid(8), (8,), 1.0), fits=True)
    before, ratios = order.excess, order.ratios.expected()
    order.learn(Candidate(Hybrid(4), (8,), seconds))
    assert (order.ratios.expected() == ratios).all() and (order.excess[:2] == before[:2]).all()
    assert order.excess[3] == before[3] and (order.excess[4:6] > before[4:6]).all()


def test_a_candidate_without_a_finite_bound_leaves_the_ratios_finite() -> None:
    """Its estimate is infinite, too: of a model that computes across samples, with several micro-batches."""
    order = EstimateOrder([Candidate(Hybrid(2**n), (8,)) for n in range(3)], lambda c: math.inf, lambda c: 0.0,
                          lambda c: 0.5)
    order.learn(Candidate(Hybrid(4), (8,)))
    assert np.isfinite(order.excess).all()
