"""`autoparallel.replan`: plans after a change of cluster, and the bytes and seconds of moving the training state."""

from __future__ import annotations

import functools
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autoparallel
from autoparallel.capture import OpGraph, capture
from autoparallel.cli import app
from autoparallel.errors import InfeasibleError, PlanError
from autoparallel.layout.placement import parse_layout
from autoparallel.layout.shapes import local_boxes
from autoparallel.plan_cli import cluster_of
from autoparallel.planning.state_moves import Move, moved, read_by
from autoparallel.plans import Plan
from autoparallel.replanning import Candidate, Replan, near, origins
from cost_models import Cluster
from tests.support.captured import planning_on
from tests.support.tiers import slow

WIDTH, BATCH = 64, 48


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.frozen(x).square().mean()


def job(batch: int = BATCH) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    with torch.device("meta"):
        return Deep(), (torch.empty(batch, WIDTH),)


@functools.cache
def captured_job() -> OpGraph:
    return capture(*job())


def machine(devices: int) -> Cluster:
    """Hosts of four devices."""
    whole = Cluster.load("h100-sxm", num_devices=64, software="none")
    inner, outer = whole.links[0], whole.links[-1]
    return replace(whole, links=(replace(inner, num_devices=4), outer), num_devices=devices)


@functools.cache
def planned(by_hand: str, devices: int = 16) -> Plan:
    model, example = job()
    with planning_on(captured_job()):
        return autoparallel.plan(model, machine(devices), example_inputs=example, by_hand=by_hand)


def replanned(plan: Plan, devices: int, **options: Any) -> Replan:
    model, example = job()
    with planning_on(captured_job()):
        return autoparallel.replan(plan, machine(devices), model, example_inputs=example,
                                   **{"time_limit_s": 0.1, "horizon_steps": 1000, **options})


# ---------------------------------------------------------------------------------------------------------- the moves

def elements(plan: Plan) -> list[set[tuple[Any, ...]]]:
    """By device, the elements of parameters that it has: (name, index, ...), one by one."""
    found = [set[tuple[Any, ...]]() for _ in range(math.prod(plan.axes[0]))]
    stages = plan.known.stage_parameters if plan.known is not None else ()
    for name, shape in plan.model.parameters.items():
        on = [number for number, names in enumerate(stages) if name in names] or [0]
        layout = parse_layout("·".join(plan.strategies[name]))
        for rank, at in itertools.product(plan.hybrid.ranks_of(*on), itertools.product(*map(range, plan.mesh_shape))):
            number = rank
            for size, place in zip(plan.mesh_shape, at, strict=True):
                number = number * size + place
            for starts, _, sizes in local_boxes(shape, layout, plan.mesh_shape, at):
                found[number] |= {(name, *index) for index in itertools.product(
                    *(range(start, start + size) for start, size in zip(starts, sizes, strict=True)))}
    return found


def one_by_one(old: Plan, new: Plan, came_from: tuple[int | None, ...], host: int) -> tuple[float, float, int, int]:
    """Most elements that a device receives (or sends) inside hosts, and between them; all received; lost."""
    before, after = elements(old), elements(new)
    have = [before[number] if number is not None else set() for number in came_from]
    loads = [[0.0] * (2 * len(have)) for _ in range(2)]
    for device, wanted in enumerate(after):
        for element in wanted - have[device]:
            near_by = [d for d, some in enumerate(have) if element in some and d // host == device // host]
            level, givers = (0, near_by) if near_by else (1, [d for d, some in enumerate(have) if element in some])
            if not givers:
                continue
            loads[level][device] += 1
            for giver in givers:
                loads[level][len(have) + giver] += 1 / len(givers)
    lost = len(set[tuple[Any, ...]]().union(*after) - set[tuple[Any, ...]]().union(*have))
    return max(loads[0]), max(loads[1]), round(sum(loads[0][:len(have)]) + sum(loads[1][:len(have)])), lost


def interleaved(plan: Plan, parts: int) -> Plan:
    """The plan with rows in shards of so many parts each."""
    return replace(plan, strategies={
        name: tuple(f"S(0;{parts})" if name in plan.model.parameters and one == "S(0)" else one for one in strategy)
        for name, strategy in plan.strategies.items()})


@pytest.mark.parametrize(("first_parts", "second_parts"), [slow(4, 1), (1, 2), slow(4, 4), slow(2, 4)])
def test_moves_of_interleaved_shards_are_those_counted_element_by_element(first_parts: int, second_parts: int) -> None:
    first, second = interleaved(planned("dp=4,tp=4"), first_parts), interleaved(planned("dp=6,tp=2", 12), second_parts)
    assert f"S(0;{max(first_parts, second_parts)})" in f"{first.strategies} {second.strategies}"
    came_from, items = origins(16, (4, 5, 6, 7), 12), dict.fromkeys(first.model.parameters, 10.0)
    found = moved(first, second, machine(12), came_from, items)
    inside, between, received, lost = one_by_one(first, second, came_from, 4)
    assert not lost and found.sent_bytes == 10 * received
    rates = [machine(12).message_bytes_per_s(level) for level in (0, 1)]
    assert found.seconds == pytest.approx(10 * max(inside / rates[0], between / rates[1]))


@pytest.mark.parametrize(("old", "new", "devices", "lost"), [
    ("dp=4,tp=4", "dp=6,tp=2", 12, (4, 5, 6, 7)),
    ("dp=4,tp=4,zero=3", "dp=4,tp=4,zero=3", 16, (1,)),
    ("dp=4,pp=2,tp=2,zero=1,shards=2", "dp=3,pp=4,zero=1", 12, (4, 5, 6, 7)),
    slow("dp=8,pp=2", "dp=4,tp=3,zero=3", 12, (12, 13, 14, 15)),
    slow("dp=12,zero=3", "dp=16", 16, ()),
])
def test_moves_are_those_counted_element_by_element(old: str, new: str, devices: int, lost: tuple[int, ...]) -> None:
    first = planned(old, 12 if "12" in old else 16)
    second, came_from = planned(new, devices), origins(math.prod(first.axes[0]), lost, devices)
    cluster, items = machine(devices), dict.fromkeys(first.model.parameters, 10.0)
    found = moved(first, second, cluster, came_from, items)
    inside, between, received, gone = one_by_one(first, second, came_from, 4)
    assert found.lost_bytes == 10 * gone
    if gone:
        assert found.read_bytes == 10 * sum(map(len, elements(second))) and not found.sent_bytes
        assert found == replace(read_by(second, cluster, items), lost_bytes=found.lost_bytes)
    else:
        assert found.sent_bytes == 10 * received and received
        rates = [cluster.message_bytes_per_s(level) for level in (0, 1)]
        assert found.seconds == pytest.approx(10 * max(inside / rates[0], between / rates[1]))


def test_a_cluster_that_stays_moves_nothing() -> None:
    plan = planned("dp=4,pp=2,tp=2,zero=1")
    items = dict.fromkeys(plan.model.parameters, 10.0)
    assert moved(plan, plan, machine(16), origins(16, (), 16), items) == Move(0.0)


def test_cards_that_devices_share_slow_messages_down() -> None:
    cluster = machine(16)
    shared = replace(cluster, links=(cluster.links[0], replace(cluster.links[1], nics_per_host=1)))
    assert shared.message_bytes_per_s(1) == cluster.message_bytes_per_s(1) / 4
    assert shared.message_bytes_per_s(0) == cluster.message_bytes_per_s(0)


# ----------------------------------------------------------------------------------------------------------- the plans

def test_replicas_send_and_the_least_total_wins() -> None:
    found = replanned(planned("dp=4,tp=4"), 12)
    assert found.source == "peers" and found.lost == (12, 13, 14, 15) and found.best.move.lost_bytes == 0
    same = next(one for one in found.candidates if one.title == "same degrees")
    assert same.plan is not None and same.devices == 12 and same.move.seconds == 0  # a replica less: nothing moves
    totals = [one.total_s(1000) for one in found.candidates]
    assert found.best.total_s(1000) == min(totals) and found.plan is found.best.plan
    assert found.plan.model.inputs == planned("dp=4,tp=4").model.inputs
    text = found.report(200)
    assert text.startswith("16 devices before, 12 of h100-sxm now: ") and "sent by the devices that have it" in text
    told = json.loads(found.to_json())
    assert told["schema"] == "autoparallel.replan" and told["candidates"][told["best"]]["total_s"] == min(totals)


def test_a_short_horizon_counts_the_move_and_a_long_one_the_step() -> None:
    quick = Candidate("quick step", 4, planned("dp=4,tp=4"), Move(100.0))
    slow = replace(quick, title="no move", move=Move(0.0), plan=replace(quick.plan, prediction=replace(
        quick.plan.prediction, fixed_s=1.0)))  # type: ignore[union-attr, type-var] # it has a plan
    found = Replan(machine(4), 8, (), 10.0, "peers", (quick, slow))
    assert found.best is slow and replace(found, steps=1e6).best is quick


@pytest.mark.slow
def test_shards_without_a_replica_come_from_a_checkpoint() -> None:
    found = replanned(planned("dp=16,zero=3"), 12)
    assert found.source == "checkpoint" and found.best.move.lost_bytes > 0 and found.best.move.sent_bytes == 0
    assert "are on no device left" in found.report(200) and "steps to come" in found.report(200)
    assert found.best.move.lost_bytes == 4 * (WIDTH + 1) * WIDTH * 12 / 4  # AdamW, 4 of 16; the frozen one is whole
    again = replanned(planned("dp=4,tp=4"), 12, source="checkpoint")
    assert again.source == "checkpoint" and again.best.move.read_bytes > 0 and again.best.move.lost_bytes == 0


def test_plans_near_the_old_one_keep_the_batch_and_say_where_it_does_not_divide() -> None:
    found = list(near(planned("dp=16"), 20))
    said = "a global batch of 48 is not divided by 20 data-parallel ranks"
    assert found[0] == ("same degrees, all devices", 20, said)
    name, devices, hand = found[1]
    assert (name, devices, str(hand)) == ("same degrees", 16, "dp=16,micro_batch=3")
    fewer = {name: str(hand) for name, _, hand in near(planned("dp=16"), 8)}
    assert fewer["same degrees"] == "dp=8,micro_batch=6"
    assert fewer["same degrees, in micro-batches"] == "dp=8,micro_batch=3"
    found = list(near(planned("dp=4,tp=4"), 15))
    assert found[0][1:] == (15, "4 x 3 ranks are not 15 devices") and found[1][1] == 12
    saved = next(near(planned("dp=16,recompute=selective,saved_on=disk"), 16))[2]
    assert str(saved) == "dp=16,micro_batch=3,recompute=selective,saved_on=disk"


@pytest.mark.slow
def test_a_spare_takes_the_place_of_the_lost() -> None:
    plan = planned("dp=4,tp=4")
    found = replanned(plan, 16, lost=[0, 1, 2, 3])
    kept = next(one for one in found.candidates if one.title == "as it was")
    whole = 4 * (WIDTH + 1) * WIDTH * 12 + WIDTH * WIDTH * 4
    assert kept.plan is plan and found.source == "peers" and 0 < kept.move.sent_bytes <= 1.2 * whole


@pytest.mark.slow
def test_a_loaded_plan_is_planned_again(tmp_path: Path) -> None:
    plan = planned("dp=2,pp=4,tp=2")
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.record is not None and loaded.record.stage_parameters
    found, live = (next(one for one in replanned(each, 12).candidates if one.title == "half the pipeline")
                   for each in (loaded, plan))
    assert found.move == live.move and found.plan is not None
    with pytest.raises(PlanError, match="which pipeline stage has which parameter"):
        replanned(replace(loaded, record=replace(loaded.record, stage_parameters=())), 12)


@pytest.mark.parametrize(("options", "told"), [
    ({"source": "tape"}, "give 'peers' or 'checkpoint'"), ({"horizon_steps": 0}, "horizon_steps is 0"),
    ({"horizon_s": 1.0}, "give one of them"), ({"lost": [16]}, "from 0 to 15"), ({"lost": "1"}, "from 0 to 15"),
    ({"told": 3}, "give a function"), ({"optimizer": "sgd"}, "give the optimizer and dtype of the plan")])
def test_what_cannot_be_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        replanned(planned("dp=4,tp=4"), 12, **options)


def test_another_batch_is_refused() -> None:
    model, example = job(2 * BATCH)
    with pytest.raises(PlanError, match="the global batch must stay"):
        autoparallel.replan(planned("dp=4,tp=4"), machine(12), model, example_inputs=example, time_limit_s=1.0)
    wrong: Any = "plan.json"
    with pytest.raises(PlanError, match="give a Plan"):
        autoparallel.replan(wrong, machine(12), model, example_inputs=example)
    wrong = "h100-sxm"
    with pytest.raises(PlanError, match="give a Cluster"):
        autoparallel.replan(planned("dp=4,tp=4"), wrong, model, example_inputs=example)


def test_nothing_fits() -> None:
    with pytest.raises(InfeasibleError, match="no plan was found for 12 devices"):
        replanned(planned("dp=4,tp=4"), 12, memory_limit_bytes=1e3)


# --------------------------------------------------------------------------------------------------------- the command

def factory(batch: int, sequence: int) -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, Any]]:
    return (*job(batch), {})


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    model, example = job()
    plan = autoparallel.plan(model, Cluster.load("h100-sxm", num_devices=24), example_inputs=example, by_hand="dp=24")
    plan.save(tmp_path / "plan.json")
    call = ["replan", str(tmp_path / "plan.json"), "tests.test_replanning:factory", "--time-limit", "1"]
    done = CliRunner().invoke(app, [*call, "--lost-hosts", "1", "--lost", "0", "--output", str(tmp_path / "new.json")])
    assert done.exit_code == 0 and "24 devices before, 16 of h100-sxm now" in done.output
    assert math.prod(Plan.load(tmp_path / "new.json").axes[0]) in (8, 16)
    done = CliRunner().invoke(app, [*call, "--devices", "32", "--json", "--from-checkpoint"])
    told = json.loads(done.stdout[done.stdout.index("{"):])
    assert (told["devices"], told["before"], told["lost"], told["source"]) == (32, 24, [], "checkpoint")
    for words, said in ((["--lost-hosts", "1", "--lost", "3"], "numbered from 0 to 2"),
                        (["--lost", "x"], "numbered from 0 to 2"), (["--lost-hosts", "3"], "no device is left")):
        assert said in str(CliRunner().invoke(app, [*call, *words]).exception)


def test_hosts_without_a_limit_are_told_as_those_of_the_plan(tmp_path: Path) -> None:
    """A plan on local processes was said to have 1 hosts of 2147483648 devices."""
    model, args = job()
    with planning_on(captured_job()):
        plan = autoparallel.plan(model, Cluster.load("local-cpu", 2), example_inputs=args, mesh_shape=(2,),
                                 baseline="ddp")
    plan.save(tmp_path / "plan.json")
    told = CliRunner().invoke(app, ["replan", str(tmp_path / "plan.json"), "some:factory", "--lost", "7"])
    assert str(told.exception).startswith("--lost 7: the plan has 1 host of 2 devices, number 0; give numbers of these")


@pytest.mark.parametrize("name", ["local-cpu", "h100-sxm"])
def test_a_cluster_with_a_known_name_and_other_figures_is_the_plans(tmp_path: Path, name: str) -> None:
    """As `verify` and `calibrate` write them; the known one of that name was taken."""
    known = Cluster.load(name, 2)
    slower = replace(known, links=tuple(replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / 7)
                                        for link in known.links))
    model, args = job()
    for cluster in (known, slower):
        with planning_on(captured_job()):
            plan = autoparallel.plan(model, cluster, example_inputs=args, mesh_shape=(2,), baseline="ddp")
        plan.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        assert cluster_of(loaded, None, 1) == replace(cluster, num_devices=1)
        assert cluster_of(loaded, name, 2) == known
        told = CliRunner().invoke(app, ["replan", str(tmp_path / "plan.json"), "some:factory", "--lost", "7"])
        assert ("the plan's count" in told.output) == (cluster is slower)
        for now in (known, slower):
            titles = [one.title for one in autoparallel.replan(loaded, now, model, example_inputs=args,
                                                               time_limit_s=0).candidates]
            assert ("as it was" in titles) == (now is cluster)


def test_a_long_move_is_told_alike_in_sentence_and_table() -> None:
    """A move of 3.09 h had 11135 s in the table."""
    model, args = job()
    with planning_on(captured_job()):
        plan = autoparallel.plan(model, machine(2), example_inputs=args, mesh_shape=(2,), baseline="ddp")
    one = Candidate("search", 2, plan, Move(11_135.0))
    said = Replan(machine(2), 4, (), 1.0, "checkpoint", (one,)).report()
    assert "a move of 3.09 h." in said and "11135 s" not in said
