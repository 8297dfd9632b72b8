"""How many devices a job takes: sizes of clusters that do what is asked, and the time that failures leave."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autoparallel
from autoparallel.cli import app
from autoparallel.errors import InputError, PlanError
from autoparallel.sizing import Target
from cost_models.goodput import HOUR_S, Failures
from tests.support.tiers import slow

WIDTH, ROWS, MOST = 2048, 65_536, 4


def wide(devices: int) -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, Any]]:
    """Enough work that devices make it faster; the same batch for any number."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)).bfloat16()
        return model, (torch.empty(ROWS, WIDTH, dtype=torch.bfloat16),), {}


@functools.cache
def sized(**asked: float) -> autoparallel.Sizing:
    return autoparallel.size(wide, **{"most": MOST, "time_limit_s": 0.5, **asked})


def steps() -> dict[int, float]:
    """Seconds of a step by number of devices."""
    return {one.devices: one.step_s for one in sized(step_s=1e-9).sizes}


@pytest.mark.parametrize("most", [2, slow(MOST)])
def test_nothing_does_what_is_impossible(most: int) -> None:
    found = sized(step_s=1e-9, most=most)
    assert found.best is None and all(one.lacks(found.target) == "too slow" for one in found.sizes)
    assert [one.devices for one in found.sizes] == [1, 2, 4][:most]
    assert all(more.step_s < fewer.step_s for fewer, more in itertools.pairwise(found.sizes))
    assert "None of these" in found.report()


@pytest.mark.slow
def test_the_fewest_devices_that_are_fast_enough() -> None:
    found = sized(step_s=1.01 * steps()[4])
    assert found.best is not None and found.best.devices == 4
    assert {one.devices for one in found.sizes} == {1, 2, 3, 4}
    assert found.best.plan is not None and found.best.step_s == steps()[4]
    few = sized(step_s=1.01 * steps()[1])
    assert [one.devices for one in few.sizes] == [1]


@pytest.mark.slow
def test_days_are_of_the_whole_run() -> None:
    seconds = steps()
    count = 1e6 * ROWS
    found = sized(count=count, days=1.01e6 * seconds[2] / 86_400)
    assert found.best is not None and found.best.devices == 2
    assert found.best.days(count) == pytest.approx(1e6 * seconds[2] / 86_400)
    assert found.best.price(count) is None  # the known cluster has no price
    assert "days" in found.report()


def test_too_few_days_for_the_peak_of_all_devices_are_not_searched() -> None:
    """A search for each number of devices took minutes."""
    asked = list[int]()

    def model(devices: int) -> Any:
        asked.append(devices)
        return wide(devices)

    found = autoparallel.size(model, count=1e15, days=1e-9, most=100)
    least = 1e15 * 5 * 8 * WIDTH**2 / 989e12 / 64 / 86_400    # no gradient of the input
    assert found.best is None and [one.devices for one in found.sizes] == [64] and set(asked) == {1}
    assert found.sizes[0].refused == f"takes {least:.3g} days at peak FLOP/s"
    assert found.sizes[0].refused in " ".join(found.report(200).split())


def test_the_cheapest_is_chosen_where_there_are_prices() -> None:
    """More devices are faster, and cost more for the same work: the fewest are the cheapest."""
    machine, sizes = autoparallel.Cluster.load("h100-sxm"), sized(step_s=1e-9, most=2).sizes
    with_price = [replace(one, cluster=replace(one.cluster, device=replace(machine.device, price_per_hour=2.0)))
                  for one in sizes]
    target = Target(count=1e6 * ROWS, days=1e6)
    found = autoparallel.Sizing(target, tuple(with_price))
    prices = [one.price(target.count) or 0.0 for one in with_price]
    assert found.best is not None and found.best.price(target.count) == min(prices)
    assert prices[0] == pytest.approx(1e6 * sizes[0].step_s / 3600 * 2.0)
    none = autoparallel.Sizing(replace(target, budget=0.5 * min(prices)), tuple(with_price))
    assert none.best is None and {one.lacks(none.target) for one in none.sizes} == {"too expensive"}


def test_days_that_are_just_too_many_are_told_so() -> None:
    """1.04 days of 1 was told as 1.0 days, too slow."""
    one = sized(step_s=1e-9, most=2).sizes[0]
    count = 1.04 * 86_400 * one.per_s
    found = autoparallel.Sizing(Target(count=count, days=1.0), (one,))
    assert one.lacks(found.target) == "too slow" and " 1.04 " in found.report()
    enough = autoparallel.Sizing(Target(count=count / 100, days=1.0), (one,))
    assert "0.0104 days" in enough.report()


def test_jobs_that_do_not_fit_are_reported() -> None:
    found = sized(step_s=10.0, memory_limit_bytes=1e6)
    assert found.best is None and all("B a device" in one.refused for one in found.sizes)


@pytest.mark.parametrize(("asked", "said"), [
    ({}, "nothing is asked"), ({"days": 3.0}, "number of its tokens"), ({"step_s": -1.0}, "step_s is -1.0"),
    ({"count": math.nan, "days": 1.0}, "count is nan"), ({"step_s": 1.0, "most": 0}, "most is 0"),
    ({"step_s": 1.0, "count": 1e9, "budget": 5.0}, "the budget is 5, and h100-sxm has no price")])
def test_nonsense_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        autoparallel.size(wide, **asked)


# ------------------------------------------------------------------------------------------------------------ goodput


def test_goodput_is_that_of_simulated_runs() -> None:
    failures = Failures(restart_s=600.0, checkpoint_s=30.0, repair_s=12 * HOUR_S)
    for spares in (0, 2, 8):
        runs = [failures.simulated(16_384, 900.0, spares, 300, seed) for seed in range(10)]
        assert sum(runs) / len(runs) == pytest.approx(failures.goodput(16_384, 900.0, spares), rel=0.05)


def test_the_best_interval_is_young_and_dalys() -> None:
    """sqrt(2 C / f) where checkpoints and failures are rare."""
    failures = Failures(per_device_hour=1e-6, restart_s=60.0, checkpoint_s=5.0)
    best_s = failures.best_interval_s(1024)
    assert best_s == pytest.approx(math.sqrt(2 * 5.0 / failures.per_s(1024)), rel=0.02)
    around = [failures.training(1024, factor * best_s) for factor in (0.5, 1.0, 2.0)]
    assert around[1] == max(around)
    never = Failures(per_device_hour=0.0)
    assert never.best_interval_s(8) == math.inf and never.training(8, math.inf) == 1.0
    free = Failures(restart_s=600.0, checkpoint_s=0.0)
    assert free.best_interval_s(8) == 0.0
    assert free.training(8, 0.0) == pytest.approx(free.training(8, 1e-3), rel=1e-6)


def test_more_spares_never_hurt() -> None:
    shares = [Failures().available(16_384, spares) for spares in range(40)]
    assert shares == sorted(shares) and 0 < shares[0] < 0.2 and shares[-1] > 0.999
    assert 0 <= Failures(repair_s=1e7).available(100_000, 500) <= 1


@pytest.mark.parametrize(("words", "said"), [
    (["--devices", "16384"], "16384 devices fail every 3.09 h"),
    (["--devices", "1"], "1 device fails every 2112 days"), ([], "give --devices, or --plan"),
    (["--devices", "8", "--spares", "two"], "give numbers of hosts"),
    (["--devices", "8", "--hours-between-failures", "0"], "give hours above 0"),
    (["--devices", "8", "--hours-between-failures", "inf"], "give hours above 0"),
    (["--devices", "8", "--restart", "inf"], "--restart is inf: give a number"),
    (["--devices", "8", "--checkpoint", "inf"], "--checkpoint is inf: give a number"),
    (["--devices", "8", "--repair", "inf"], "--repair is inf: give a number"),
    (["--devices", "8", "--checkpoint", "0"], "with checkpoints every 0 s of training")])
def test_the_command(words: list[str], said: str) -> None:
    answer = CliRunner().invoke(app, ["goodput", *words])
    assert said in answer.output or said in str(answer.exception)


def test_the_command_says_the_steps_of_a_plan(tmp_path: Path) -> None:
    plan = sized(step_s=1e-9, most=2).sizes[-1].plan
    assert plan is not None
    plan.save(tmp_path / "plan.json")
    answer = CliRunner().invoke(app, ["goodput", "--plan", str(tmp_path / "plan.json")])
    assert answer.exit_code == 0 and "a day" in answer.output and answer.output.startswith("2 devices")
    assert "its time" in answer.output and "100 % of its time" not in answer.output
    other = CliRunner().invoke(app, ["goodput", "--plan", str(tmp_path / "plan.json"), "--devices", "8"])
    assert "are those of 2 devices" in str(other.exception)


@pytest.mark.parametrize(("words", "said"), [
    (["--step-time", "0"], "--step-time is 0: give a number above 0"),
    (["--tokens", "1e9", "--days", "nan"], "--days is nan: give a number above 0"),
    (["--tokens", "-5", "--days", "1"], "--tokens is -5: give the number of tokens"),
    (["--tokens", "1e9", "--budget", "10"], "give --step-time, or --tokens and --days"),
    (["--days", "1"], "give the number of its tokens as --tokens")])
def test_size_refuses_in_the_options_that_were_written(words: list[str], said: str) -> None:
    told = CliRunner().invoke(app, ["size", "some:factory", "--cluster", "h100-sxm", *words])
    assert isinstance(told.exception, InputError) and said in str(told.exception)


def test_fit_refuses_unknown_tiers_by_the_option() -> None:
    told = CliRunner().invoke(app, ["fit", "some:factory", "--cluster", "h100-sxm", "--offload", "none,moon"])
    assert "--offload has 'moon': give some of none, host" in str(told.exception)
