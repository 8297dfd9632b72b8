"""Expected ratios of the joint search's estimates to bounds: those of the closed form of a Gaussian process."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autoparallel.planning.estimate_order import CURVE, HOPE, LEVEL, REACH, SLOPE, Ratios


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
