"""Advice: the techniques to use, their prices, and what more bandwidth or memory would change."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import autoparallel
from autoparallel.cli import app
from autoparallel.errors import PlanError
from cost_models import Cluster
from tests.support.captured import plan_again
from tests.support.decoder import IDS, Decoder
from tests.support.tiers import slow

CLUSTER = Cluster.load("h100-sxm", num_devices=4)
DECODER = Decoder()


@functools.cache
def advice(memory_bytes: float | None = None) -> autoparallel.Advice:
    return autoparallel.advise(Decoder(), CLUSTER, example_inputs=(IDS,), memory_limit_bytes=memory_bytes, search_s=0)


def test_the_best_is_the_fastest_that_fits() -> None:
    found = advice()
    assert found.best is not None and found.best.fits
    assert found.best.step_s == min(one.step_s for one in found.alternatives if one.fits)
    assert len({str(one.by_hand) for one in found.alternatives}) == len(found.alternatives) > 8
    prices = {str(one.by_hand): one.step_s for one in found.alternatives}
    by_hand = plan_again(DECODER, CLUSTER, example_inputs=(IDS,), by_hand="dp=4,zero=1")
    assert prices["dp=4,zero=1"] == by_hand.prediction.step_s


@pytest.mark.slow
def test_it_tells_how_far_it_is_and_searches_the_same_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()
    monkeypatch.setattr("autoparallel.compiler.capture", lambda *call: pytest.fail("traced again"))
    found = autoparallel.advise(Decoder(), CLUSTER, example_inputs=(IDS,), search_s=0.1, progress=told.append)
    assert found.searched is not None
    assert {str(one.by_hand) for one in found.alternatives} <= {line.split(": ")[0] for line in told}
    assert any(line.startswith("joint search (") and "best" in line for line in told)


def test_techniques_have_the_prices_of_plans_with_and_without_them() -> None:
    found = advice()
    for one in found.techniques:
        assert (one.with_it is found.best) == one.used
        if one.with_it is not None and one.without is not None:
            assert one.used == (one.with_it.step_s <= one.without.step_s)
    names = [one.name for one in found.techniques]
    assert "tensor parallelism" in names and "recompute of activations" in names
    assert "expert parallelism" not in names  # the model has no experts


@pytest.mark.slow
def test_little_memory_makes_it_shard() -> None:
    whole = next(one for one in advice().alternatives if str(one.by_hand) == "dp=4")
    small = advice(0.6 * whole.peak_bytes)
    assert small.best is not None and small.best.peak_bytes <= 0.6 * whole.peak_bytes
    assert str(small.best.by_hand) != "dp=4"
    memory = small.changes[-1]
    assert memory.what == "memory per device" and memory.best is not None
    assert memory.best.step_s <= small.best.step_s


@pytest.mark.slow
def test_micro_batches_and_recompute_go_together() -> None:
    """Where neither alone fits."""
    one = replace(CLUSTER, num_devices=1)
    peaks = [plan_again(DECODER, one, example_inputs=(IDS,), by_hand=f"dp=1{more}").prediction.peak_bytes
             for more in ("", ",micro_batch=1", ",recompute=full", ",micro_batch=1,recompute=full")]
    assert peaks[3] < min(peaks[:3])
    found = autoparallel.advise(Decoder(), one, example_inputs=(IDS,), search_s=0,
                                memory_limit_bytes=(peaks[3] + min(peaks[:3])) / 2)
    assert found.best is not None and found.best.by_hand.micro_batch == 1
    assert found.best.by_hand.recompute in ("full", "selective", "auto")


@functools.cache
def prices_on_one_device() -> dict[str, tuple[float, float]]:
    """Seconds of a step and peak bytes, by what is written after dp=1."""
    one, prices = replace(CLUSTER, num_devices=1), dict[str, tuple[float, float]]()
    for more in ("micro_batch=1", "micro_batch=2", "micro_batch=4", "micro_batch=2,recompute=full", "recompute=full"):
        made = plan_again(DECODER, one, example_inputs=(IDS,), by_hand=f"dp=1,{more}").prediction
        prices[more] = made.step_s, made.peak_bytes
    return prices


@pytest.mark.parametrize("largest", [slow("micro_batch=2"), "recompute=full"])
@pytest.mark.slow
def test_micro_batches_are_as_large_as_fit_unless_recompute_is_faster(largest: str) -> None:
    one, prices = replace(CLUSTER, num_devices=1), prices_on_one_device()
    limit = 1.01 * prices[largest][1]
    fastest = min((step_s, more) for more, (step_s, peak_bytes) in prices.items() if peak_bytes <= limit)[1]
    assert fastest == largest and prices["micro_batch=1"][1] <= limit
    found = autoparallel.advise(Decoder(), one, example_inputs=(IDS,), search_s=0, memory_limit_bytes=limit)
    assert found.best is not None and str(found.best.by_hand) == f"dp=1,{largest}"
    assert len({str(alternative.by_hand) for alternative in found.alternatives}) == len(found.alternatives)


@pytest.mark.slow
def test_no_memory_is_said() -> None:
    none = advice(1.0)
    assert none.best is None and not none.exports
    assert "no plan by hand fits" in none.report()


def test_where_nothing_fits_servers_do_not_pay_either() -> None:
    found = autoparallel.advise(torch.nn.Linear(4, 4), CLUSTER, example_inputs=(torch.zeros(4, 4),), search_s=0,
                                memory_limit_bytes=1.0)
    assert found.best is None and found.servers is None
    told = CliRunner().invoke(app, ["advise", "tests.support.reported:factory", "--devices", "2", "--time-limit", "0",
                                    "--memory-limit", "1kB", "--sequence-length", "16"])
    assert told.exit_code == 3 and "inf s" not in told.output


@pytest.mark.slow
def test_twice_the_bandwidth_is_as_a_faster_cluster() -> None:
    found = advice()
    [change] = [one for one in found.changes if one.what.startswith("bandwidth")]
    link = replace(CLUSTER.links[0], bandwidth_bytes_per_s=2 * CLUSTER.links[0].bandwidth_bytes_per_s)
    faster = autoparallel.advise(Decoder(), replace(CLUSTER, links=(link, *CLUSTER.links[1:])), example_inputs=(IDS,),
                                 search_s=0)
    assert change.best is not None and faster.best is not None
    assert change.best.step_s == pytest.approx(faster.best.step_s)


def test_the_report_names_all() -> None:
    text = advice().report(160)
    assert "what to use" in text and "twice the bandwidth" in text and "megatron_args.sh" in text


def test_seconds_are_checked() -> None:
    with pytest.raises(PlanError, match="progress is 3"):
        autoparallel.advise(torch.nn.Linear(4, 4), CLUSTER, example_inputs=(torch.zeros(4, 4),), progress=3)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="search_s is -1"):
        autoparallel.advise(torch.nn.Linear(4, 4), CLUSTER, example_inputs=(torch.zeros(4, 4),), search_s=-1)


@pytest.mark.slow
def test_the_command_line_writes_files_for_each_framework(tmp_path: Path) -> None:
    config = Path(__file__).parents[1] / "benchmarks/configs/small-llama.json"
    told = CliRunner().invoke(app, ["advise", str(config), "--devices", "4", "--sequence-length", "128", "--time-limit",
                                    "5", "--output", str(tmp_path / "advice")])
    assert told.exit_code == 0, told.output
    assert "a searched plan takes" in told.stdout
    assert (tmp_path / "advice/plan.json").exists() and (tmp_path / "advice/fsdp2/parallel_fsdp2.py").exists()


def decoder(batch: int, length: int) -> Any:
    return Decoder(), (IDS,), {}


def test_the_folder_has_the_searched_plan_where_none_by_hand_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                  ) -> None:
    """--output was ignored without a word."""
    plan = plan_again(DECODER, CLUSTER, example_inputs=(IDS,), by_hand="dp=4,zero=1")
    found = autoparallel.Advice(CLUSTER, 1e9, (), (), (), plan, {})
    monkeypatch.setattr(autoparallel, "advise", lambda *_, **__: found)
    told = CliRunner().invoke(app, ["advise", f"{__name__}:decoder", "--devices", "4", "--output", str(tmp_path / "o")])
    assert told.exit_code == 0 and "plan.json: " in told.stdout, (told.output, told.exception)
    assert autoparallel.Plan.load(tmp_path / "o/plan.json").fingerprint == plan.fingerprint
