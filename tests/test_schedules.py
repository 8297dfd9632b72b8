"""The table of pipeline schedules: its facts agree with each other and with torch, and a new entry is all it takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules as torch_schedules
from typer.testing import CliRunner

import autoparallel
from autoparallel.cli import app
from autoparallel.errors import LaunchError, PlanError
from autoparallel.kernels import groups
from autoparallel.planning import by_hand
from autoparallel.planning.options import Options
from autoparallel.plans.reports.timeline import timeline_of
from autoparallel.runtime.pipeline import Pipeline
from autoparallel.schedule.in_flight import in_flight, in_flight_by_bytes
from autoparallel.schedule.pipeline_tasks import PipelineTasks, StageTimes
from autoparallel.schedule.schedules import SCHEDULES, Action, Schedule, counted_in_flight
from autoparallel.schedule.step_config import Hybrid
from cost_models import Cluster
from cost_models.memory import in_flight_micro_batches
from cost_models.timeline import simulate
from tests.support.decoder import IDS, Decoder
from tests.support.launch_order import check_order
from tests.support.tiers import slow


def configurations(name: str) -> Iterator[Hybrid]:
    """All that the schedule can run of these."""
    for micro_batches, ranks, chunks in itertools.product((1, 2, 3, 4, 5, 7, 8, 12, 15), (2, 3, 4), (1, 2, 3)):
        for replicas in ((), (ranks - 1, 1), (1, ranks - 1)):
            try:
                yield Hybrid(micro_batches, 2 if replicas else ranks * chunks, ranks, name, replicas=replicas)
            except PlanError:
                continue


@pytest.mark.parametrize("name", SCHEDULES)
def test_micro_batches_in_flight_are_those_of_the_order(name: str) -> None:
    for hybrid in configurations(name):
        stages = range(hybrid.stages)
        assert [in_flight(hybrid, s) for s in stages] == [counted_in_flight(hybrid, s) for s in stages], hybrid


@pytest.mark.parametrize("name", SCHEDULES)
def test_moments_of_most_bytes_hold_what_is_put_off(name: str) -> None:
    """Never fewer bytes than at the moment of most micro-batches, nor fewer micro-batches than are put off."""
    for hybrid in configurations(name):
        stages = range(hybrid.stages)
        for sizes in ([1.0 for _ in stages], [float(10 ** (stage % 4)) for stage in stages], [0.0 for _ in stages]):
            found, most = in_flight_by_bytes(hybrid, sizes), [in_flight(hybrid, stage) for stage in stages]
            put_off = [SCHEDULES[name].deferred(hybrid, stage) for stage in stages]
            assert all(held >= late for held, late in zip(found, put_off, strict=True))
            assert found == most or len(set(sizes)) > 1
            for rank in range(hybrid.pipeline_ranks):
                own = hybrid.stages_of(rank)
                assert sum(sizes[s] * found[s] for s in own) >= sum(sizes[s] * most[s] for s in own)


@pytest.mark.parametrize(("name", "published", "chunks"), [
    ("gpipe", "gpipe", 1), ("1f1b", "1f1b", 1), ("interleaved", "interleaved-1f1b", 2),
    ("interleaved", "interleaved-1f1b", 3), ("zero_bubble", "zero-bubble", 1), ("zero_bubble", "zero-bubble", 2),
])
def test_micro_batches_in_flight_are_the_published_ones(name: str, published: str, chunks: int) -> None:
    """Where these hold: micro-batches in multiples of the ranks."""
    for ranks, rounds in itertools.product((2, 3, 4, 8), (1, 2, 5)):
        hybrid = Hybrid(ranks * rounds, ranks * chunks, ranks, name)
        for rank in range(ranks):
            held = sum(in_flight(hybrid, stage) for stage in hybrid.stages_of(rank))
            assert held == in_flight_micro_batches(published, rank, ranks, hybrid.micro_batches, chunks)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_runs_once_and_none_waits_for_ever(name: str) -> None:
    how = SCHEDULES[name]
    for hybrid in configurations(name):
        tasks = PipelineTasks(hybrid, (StageTimes(1.0, 2.0),) * hybrid.stages)
        actions = list(itertools.chain.from_iterable(tasks.orders))
        kinds = "FBW" if how.splits_backward else "FB"
        assert sorted(actions) == sorted(itertools.product(kinds, range(hybrid.stages), range(hybrid.micro_batches)))
        assert simulate(tasks.tasks).total_s >= 3.0 * hybrid.micro_batches
        for order in tasks.orders:
            place = {action: number for number, action in enumerate(order)}
            assert all(place[before, s, m] < place[kind, s, m] for kind, s, m in order
                       for before in kinds[: kinds.index(kind)]), hybrid


@pytest.mark.parametrize("how", SCHEDULES.values(), ids=lambda how: str(how.name))
def test_torch_has_each_schedule(how: Schedule) -> None:
    several = issubclass(getattr(torch_schedules, how.torch_class), torch_schedules.PipelineScheduleMulti)
    assert several == how.several_stages


@pytest.mark.parametrize("name", SCHEDULES)
def test_texts_for_users_have_each_name(name: str) -> None:
    shown = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "200"}).output
    assert all(name in text for text in (shown, autoparallel.plan.__doc__ or "", by_hand.__doc__ or ""))


# --------------------------------------------------------------------------------------------------------- a new one


def breadth_first(hybrid: Hybrid, rank: int) -> Iterator[Action]:
    """Lamy-Poirier 2022: each stage of a rank runs all micro-batches before the next one."""
    own, micro_batches = hybrid.stages_of(rank), range(hybrid.micro_batches)
    yield from (("F", stage, micro) for stage in own for micro in micro_batches)
    yield from (("B", stage, micro) for stage in reversed(own) for micro in reversed(micro_batches))


@pytest.fixture
def looped(monkeypatch: pytest.MonkeyPatch) -> Schedule:
    """A schedule that torch has and the table has not: the entry, and nothing else."""
    how = Schedule("looped_bfs", "looped BFS", "LoopedBFS", breadth_first, several_stages=True, all_forwards=True)
    monkeypatch.setitem(SCHEDULES, how.name, how)
    return how


@pytest.mark.parametrize("zero_stage", [slow(1), 3])
def test_an_entry_of_the_table_runs_as_it_is_simulated(looped: Schedule, zero_stage: int,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    check_order("bert", (2,), 0, Hybrid(4, 4, 2, looped.name, zero_stage=zero_stage), monkeypatch)


def test_an_entry_of_the_table_is_planned_reported_and_exported(looped: Schedule) -> None:
    plan = autoparallel.plan(Decoder(layers=4), Cluster.load("h100-sxm", num_devices=4), example_inputs=(IDS,),
                             by_hand=f"dp=2,pp=2,virtual=2,schedule={looped.name}")
    assert "looped BFS, 2 stages a rank" in plan.summary()
    many = plan.hybrid.micro_batches
    assert [in_flight(plan.hybrid, stage) for stage in range(4)] == [many] * 4
    assert sum(box.kind == "forward" for box in timeline_of(plan).boxes) == 4 * many
    assert autoparallel.Plan.from_json(plan.to_json()).hybrid == plan.hybrid
    titan, megatron = (autoparallel.export_plan(plan, name) for name in ("torchtitan", "megatron"))
    assert any("LoopedBFS" in text for text in titan.files.values())
    assert any(one.instead == "interleaved 1F1B" for one in megatron.lost)


@pytest.mark.parametrize(("options", "ranks", "name"), [
    (Options(pipeline_stages=4, micro_batches=4), 2, "interleaved"),
    (Options(pipeline_stages=2, micro_batches=2), 2, "1f1b"),
    (Options(stage_replicas=(1, 3), micro_batches=3), 4, "1f1b"),
])
def test_the_schedule_that_is_taken_where_none_is_asked_for(options: Options, ranks: int, name: str) -> None:
    """That of several stages on each rank is one that runs them."""
    assert options.hybrid(ranks).schedule == name


def test_pipelines_of_gpus_over_gloo_are_refused(mesh_of_one: DeviceMesh) -> None:
    """gloo's transport reads memory of the CPU. (Processes that ran pipelines so on an H200 ended by SIGSEGV.)"""
    group, gpu = mesh_of_one.get_group(), torch.device("cuda", 0)
    assert groups.sends(group, torch.device("cpu")) and not groups.sends(group, gpu)
    with pytest.raises(LaunchError, match="cpu:gloo,cuda:nccl"):
        Pipeline(Hybrid(2, 2, 2), {}, group, gpu)
