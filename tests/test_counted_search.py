"""The planner's search counts work in place of time: equal calls find equal plans, however busy the machine."""

from __future__ import annotations

import itertools
import math
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest

import autoparallel
from autoparallel import Plan, clock
from cost_models import Cluster
from tests.support.captured import plan_of
from tests.support.tiers import slow

SOURCES = Path(autoparallel.__file__).parent


def planned(time_limit_s: float, case_name: str = "mlp") -> Plan:
    return plan_of(case_name, Cluster.load("h100-sxm", num_devices=8), joint=True, time_limit_s=time_limit_s)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall clock that ends no search: limits here are too short for a busy machine."""
    monkeypatch.setattr(clock, "EMERGENCY", math.inf)


def answer(plan: Plan) -> tuple[Any, ...]:
    return plan.mesh_shape, plan.hybrid, plan.strategies, plan.prediction.step_s, plan.evidence.combinations


def make_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which each look at a clock finds that some seconds have passed."""
    seconds, draw = itertools.count(0, 1), random.Random(0)
    for name in ("thread_time", "process_time"):
        monkeypatch.setattr(time, name, lambda: next(seconds) * draw.uniform(0.5, 3.0))


@pytest.mark.parametrize(("case_name", "time_limit_s"), [("mlp", 0.02), slow("llama", 0.8)])
def test_a_busy_machine_finds_the_same_plan(case_name: str, time_limit_s: float, patient: None,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the limit leaves some combinations out, of which a longer one estimates more."""
    quick = planned(time_limit_s, case_name)
    combinations = quick.evidence.combinations
    assert combinations is not None and combinations.left > 0
    with monkeypatch.context() as patch:
        make_slow(patch)
        assert answer(planned(time_limit_s, case_name)) == answer(quick)
    more = planned(10 * time_limit_s, case_name).evidence.combinations
    assert more is not None and more.estimated > combinations.estimated


def test_the_wall_clock_ends_a_search_that_takes_too_long_and_the_plan_says_so(monkeypatch: pytest.MonkeyPatch
                                                                              ) -> None:
    monkeypatch.setattr(clock, "EMERGENCY", 0.0)
    plan = planned(20.0)
    assert "ended by the wall clock" in plan.evidence.stop_reason and clock.was_late()
    monkeypatch.setattr(clock, "EMERGENCY", math.inf)
    assert "wall clock" not in planned(0.02).evidence.stop_reason and not clock.was_late()


def test_seconds_are_those_of_units() -> None:
    with clock.counted(1.0):
        before = clock.now()
        clock.did("moves tried", 10)
        with clock.counted(5.0):
            clock.did("moves tried", 10)
        assert clock.now() - before == pytest.approx(20 * clock.RATES["moves tried"])
        assert clock.is_counted()
    assert not clock.is_counted()


def test_all_units_are_counted_somewhere() -> None:
    used = {unit for path in SOURCES.rglob("*.py") for unit in re.findall(r'clock\.did\("([^"]+)"', path.read_text())}
    assert used == clock.RATES.keys()
