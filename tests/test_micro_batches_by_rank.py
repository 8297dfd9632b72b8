"""Micro-batches by rank: their division by speed, prices by hand arithmetic, the search that finds them, and ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import autoparallel
from autoparallel.capture import capture
from autoparallel.cli import app
from autoparallel.errors import InputError, PlanError
from autoparallel.partition import Splits
from autoparallel.planning.joint_candidates import JointSearch
from autoparallel.planning.joint_plan import fixed_by
from autoparallel.planning.one_mesh import plan_on
from autoparallel.planning.options import options_of
from autoparallel.planning.unequal_hosts import by_speed
from autoparallel.plans import Hybrid, Plan
from autoparallel.pricing import Prices
from autoparallel.pricing.stage_devices import slowest_rank
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster, Device, Link
from cost_models.unequal import Slow
from tests.support.captured import plan_of
from tests.support.ranks import mesh_of
from tests.support.reference import SEED

#: Three hosts of one device; nothing but products takes time, and all-reduces between hosts.
HOSTS = Cluster("toy", Device("fast", {"float32": 1e12}, 1e15, 1.0, 1e12, 0.0), (
    Link("wire", 1, 0.0, 1e15), Link("net", 3, 0.0, 1e9, nics_per_host=1)), 3, ("ring",))
#: The last one takes three times as long.
UNEQUAL = dataclasses.replace(HOSTS, slow=(Slow((2,), 1 / 3),))


class Product(nn.Module):
    """One product, and a loss."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mean()


def planned(cluster: Cluster = UNEQUAL, rows: int = 7 * 512, **options: Any) -> Plan:
    return autoparallel.plan(Product(), cluster, example_inputs=(torch.zeros(rows, 256),), optimizer="sgd", **options)


# --- division -----------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([1.0, 1.5, 2.0, 3.0]), min_size=1, max_size=4), st.integers(0, 8))
def test_no_other_division_is_done_earlier(paces: list[float], more: int) -> None:
    def seconds(division: tuple[int, ...]) -> float:
        return max(count / pace for count, pace in zip(division, paces, strict=True))

    def all_of(total: int, ranks: int) -> list[tuple[int, ...]]:
        if ranks == 1:
            return [(total,)]
        return [(first, *rest) for first in range(1, total - ranks + 2) for rest in all_of(total - first, ranks - 1)]

    total = len(paces) + more
    found = by_speed(total, paces)
    assert sum(found) == total and min(found) >= 1
    assert seconds(found) == min(map(seconds, all_of(total, len(paces))))


@pytest.mark.parametrize(("ranks", "count", "by_rank", "options", "message"), [
    (2, 4, (3, 2), {}, r"micro_batches=\[3, 2\] are not the 4 micro-batches of a step"),
    (2, 3, (3, 0), {}, "give each rank one or more"),
    (3, 4, (3, 1), {}, "are for 2 ranks, and the mesh's first axis has 3: give a number for each"),
    (1, 4, (4,), {}, "do not go with one rank: give one number"),
    (2, 4, (3, 1), {"stages": 2}, "do not go with 2 pipeline stages, whose ranks run equally many: give one number"),
    (2, 4, (2, 2), {"copies": 2}, "do not go with copies=2: leave copies out"),
])
def test_what_cannot_be_is_refused(ranks: int, count: int, by_rank: tuple[int, ...], options: dict[str, Any],
                                   message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Hybrid(count, pipeline_ranks=ranks, by_rank=by_rank, **options)


def test_options_that_are_no_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match=r"micro_batches is \(3, 0\): give a whole number, 1 or more, or how many each"):
        planned(micro_batches=(3, 0))
    with pytest.raises(PlanError, match="micro_batches by rank are of 2 ranks, which do not divide 3 devices"):
        planned(micro_batches=(3, 1))


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("options", [{"pipeline_stages": 2}, {"stage_replicas": (1, 2)}, {"schedule": "1f1b"},
                                     {"copies": 3}])
def test_options_that_do_not_go_with_it_are_refused(joint: bool, options: dict[str, Any]) -> None:
    """(The joint search took no notice of stages and schedules.)"""
    with pytest.raises(PlanError, match=r"do not go with|there is one stage"):
        planned(joint=joint, micro_batches=(3, 3, 3), **options)


# --- prices -------------------------------------------------------------------------------------------------------


def test_a_step_takes_as_long_as_the_slowest_rank_and_the_sum_of_gradients() -> None:
    """A micro-batch of 512 rows takes 2 x 512 x 256 x 256 FLOP at 1e12 a second forward, and as much for the gradient
    of the weight. Its 256 x 256 elements of 4 bytes are summed once by a ring of three: 2 x 2/3 of them are sent."""
    each, summed = 2 * 2 * 512 * 256 * 256 / 1e12, 2 * 2 / 3 * 256 * 256 * 4 / 1e9
    for by_rank, slowest in (((3, 3, 1), 3), ((2, 2, 3), 9), ((5, 1, 1), 5)):
        made = planned(mesh_shape=(3, 1), micro_batches=by_rank)
        assert made.hybrid.by_rank == by_rank and made.prediction.waiting_s == 0.0
        assert made.prediction.step_s == pytest.approx(slowest * each + summed, rel=1e-2)
        (use,) = made.prediction.collectives
        assert (use.kind, use.axis, use.count, use.num_bytes) == ("all_reduce", "speed", 3, 3 * 256 * 256 * 4)


def test_ranks_stay_in_the_order_that_is_given() -> None:
    """Host 0 is slow, and gets the one micro-batch that is written for it."""
    first = dataclasses.replace(HOSTS, slow=(Slow((0,), 1 / 3),))
    right, wrong = (planned(first, 7 * 2**14, mesh_shape=(3,), micro_batches=numbers)
                    for numbers in ((1, 3, 3), (3, 3, 1)))
    assert right.devices == wrong.devices == ()
    assert wrong.prediction.step_s > 2.5 * right.prediction.step_s


# --- search -------------------------------------------------------------------------------------------------------


def test_the_joint_search_divides_micro_batches_by_speed() -> None:
    """Of three hosts the first is slow: the others come first, and run three of seven micro-batches each."""
    cluster = dataclasses.replace(HOSTS, slow=(Slow((0,), 1 / 3),))
    rows = 7 * 2**17    # so many that the sum of gradients hardly counts
    made, equal = planned(cluster, rows, joint=True), planned(cluster, rows, mesh_shape=(3,))
    assert made.hybrid.by_rank == (3, 3, 1) and made.devices == (1, 2, 0)
    assert equal.prediction.step_s > 2 * made.prediction.step_s
    assert "(joint=True also tries pipelines and micro-batches by their speed)" in " ".join(equal.summary().split())
    assert "joint=True" not in made.summary()
    assert made.evidence.step_bound_s is not None and made.evidence.step_bound_s <= made.prediction.step_s
    assert planned(cluster, rows, joint=True, micro_batches=(5, 1, 1)).hybrid.by_rank == (5, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "options"), [
    (HOSTS, {}), (UNEQUAL, {"micro_batches": 1}), (UNEQUAL, {"copies": 2, "micro_batches": 14})])
def test_nothing_is_divided_on_equal_hosts_or_against_the_options(cluster: Cluster, options: dict[str, Any]) -> None:
    assert planned(cluster, 7 * 2**17, joint=True, **options).hybrid.by_rank == ()


class Blocks(nn.Module):
    """Equal residual blocks, which are nearly all of the step."""

    def __init__(self, count: int = 20, width: int = 256) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
                                    for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.mean()


def test_no_bound_is_above_a_plan_where_memory_is_limited() -> None:
    """Bounds that price memory would take each rank for a stage that runs all micro-batches."""
    two = dataclasses.replace(HOSTS, num_devices=2, slow=(Slow((1,), 1 / 3),),
                              device=dataclasses.replace(HOSTS.device, memory_bytes=64e9))
    with torch.device("meta"):
        graph = capture(Blocks(), (torch.zeros(2**17, 256),))
    options = options_of({"micro_batches": (3, 1), "zero_stage": 1, "recompute": "none", "optimizer": "sgd"})
    fixed = fixed_by(options, (2, 1), two)
    search = JointSearch(graph, two, fixed, "sgd", options.limit_bytes(two))
    (candidate,) = search.space.first_round()
    made = plan_on(Splits(graph)(4), two, (1,), None, options, candidate.hybrid)
    while search.step_bounds.tighten(candidate, 1.05 * made.prediction.step_s):
        pass
    assert 0 < search.step_bounds.step_s(candidate) <= made.prediction.step_s * (1 + 1e-9)


def test_of_ranks_that_take_as_long_the_slowest_devices_are_priced() -> None:
    prices = Prices(StrategySpace(capture(Product(), (torch.zeros(512, 256),)), (1,)), UNEQUAL, stages=3)
    assert slowest_rank(prices, Hybrid(7, pipeline_ranks=3, by_rank=(3, 3, 1))) == 2
    assert slowest_rank(prices, Hybrid(7, pipeline_ranks=3, by_rank=(4, 2, 1))) == 0


# --- what is told -------------------------------------------------------------------------------------------------


def test_reports_files_and_exports_say_how_many_each_rank_runs() -> None:
    cluster = dataclasses.replace(Cluster.load("h100-sxm", 32), slow=(Slow(tuple(range(16, 32)), 0.5),))
    made = plan_of("llama", cluster, 64, mesh_shape=(2, 16), micro_batches=(3, 1), baseline="ddp")
    told = " ".join(made.summary().split())
    assert "Data parallel 2 by speed (3 and 1 of 4 micro-batches) over InfiniBand NDR, data parallel 16" in told
    assert "rank 0 on devices 0-15 (16 H100 SXM5 80GB) has 3 micro-batches; rank 1" in told
    assert "at 50% speed) has 1 micro-batch." in told
    assert made.axes == ((2, 16), ("speed", "axis0"))
    again = Plan.from_json(made.to_json())
    assert again.hybrid == made.hybrid and json.loads(made.to_json())["hybrid"]["by_rank"] == [3, 1]
    exported = autoparallel.export_plan(made, "fsdp2")
    assert "micro-batches by rank, [3, 1]" in exported.lost[0].what
    assert "these ranks are data-parallel, 2 micro-batches" in exported.lost[0].instead


def test_the_command_line_takes_numbers_by_rank(tmp_path: Path) -> None:
    cluster, output = tmp_path / "ours.toml", tmp_path / "plan.json"
    cluster.write_text('based_on = "h100-sxm"\nname = "ours"\nnum_devices = 16\n[[slow]]\nhosts = [1]\nspeed = 0.5\n')
    model = Path("benchmarks/configs/small-llama.json")
    command = ["plan", str(model), "--cluster", str(cluster), "--global-batch", "64", "--mesh", "2x8",
               "--output", str(output), "--compare-by-hand", "none"]
    done = CliRunner().invoke(app, [*command, "--micro-batches", "3,1"])
    assert done.exit_code == 0, done.output
    assert Plan.load(output).hybrid.by_rank == (3, 1)
    refused = CliRunner().invoke(app, [*command, "--micro-batches", "3;1"])
    assert isinstance(refused.exception, InputError) and "cannot read the micro-batches '3;1'" in str(refused.exception)


# --- on ranks -----------------------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(20, 16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = self.down(torch.relu(self.up(self.table(ids).mean(1))))
        return nn.functional.mse_loss(found, target)


def used_in_every_way(micro_batches: tuple[int, ...] | None, shape: tuple[int, ...], zero_stage: int
                      ) -> list[torch.Tensor]:
    """Run on each rank: two clipped steps; then the loss and the gradients of a plain call, the loss of a step without
    gradients, and that of the model in eval mode. ``micro_batches``: None: of one process."""
    torch.manual_seed(SEED)
    model, ids, target = Words(), torch.randint(0, 20, (16, 5)), torch.randn(16, 16)
    parallel: Any = model if micro_batches is None else autoparallel.compile(
        model, mesh_of(*shape), micro_batches=micro_batches, zero_stage=zero_stage, example_inputs=(ids, target))
    step = getattr(parallel, "step", None)

    def losses() -> torch.Tensor:
        if step is not None:
            return step(ids, target)
        loss = parallel(ids, target)
        if torch.is_grad_enabled():
            loss.backward()
        return loss.detach()

    stepper, found = torch.optim.AdamW(parallel.parameters(), lr=1e-2), list[Any]()
    for _ in range(2):
        found.append(losses())
        found.append(nn.utils.clip_grad_norm_(parallel.parameters(), 0.1))
        stepper.step()
        stepper.zero_grad()
    loss = parallel(ids, target)
    loss.backward()
    found += [loss.detach(), *(p.grad for p in parallel.parameters())]
    with torch.no_grad():
        found.append(losses())
        found.append(parallel.eval()(ids, target))
    return [(one.full_tensor() if hasattr(one, "full_tensor") else one).double() for one in found]


def norms_of(first: str) -> list[float]:
    """Run on each rank: the norm of the gradients of a step and of a plain call; before them a trace of either."""
    torch.manual_seed(SEED)
    ids, target = torch.randint(0, 20, (16, 5)), torch.randn(16, 16)
    parallel = autoparallel.compile(Words(), mesh_of(2), micro_batches=(3, 1))
    parallel.trace((ids, target), step=first == "step")
    parallel.step(ids, target)
    found = [float(parallel.clip_grad_norm_(1e9))]
    parallel.zero_grad()
    parallel(ids, target).backward()
    return [*found, float(parallel.clip_grad_norm_(1e9))]


@pytest.mark.ranks
def test_the_first_call_may_be_plain(ranks: Any) -> None:
    """Gradients are summed, and count once, as where it is a step."""
    (step, _), (plain, _) = (ranks(2).run(norms_of, first) for first in ("step", "plain"))
    assert plain == pytest.approx(step) and step[0] == pytest.approx(step[1])


@pytest.mark.ranks
@pytest.mark.parametrize(("shape", "micro_batches", "zero_stage"), [
    ((2,), (3, 1), 1),
    pytest.param((2, 2), (1, 3), 3, marks=pytest.mark.slow),
])
def test_steps_calls_and_evaluation_equal_one_process(ranks: Any, shape: tuple[int, ...],
                                                      micro_batches: tuple[int, ...], zero_stage: int) -> None:
    expected = used_in_every_way(None, (), 0)
    for found in ranks(torch.Size(shape).numel()).run(used_in_every_way, micro_batches, shape, zero_stage):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
