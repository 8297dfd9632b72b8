"""Plans on unequal clusters: prices by hand arithmetic, cuts by speed, the order of hosts, and a pipeline that runs."""

from __future__ import annotations

import dataclasses
import logging
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typer.testing import CliRunner

import autoparallel
from autoparallel.capture import capture
from autoparallel.cli import app
from autoparallel.errors import InfeasibleError, MeshError, PlanError
from autoparallel.export.degrees import degrees_of
from autoparallel.partition import Splits, stages_of
from autoparallel.planning.one_mesh import plan_on
from autoparallel.planning.options import options_of
from autoparallel.plans import Hybrid, Plan
from autoparallel.plans.reports.timeline import timeline_of
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer, step_s
from autoparallel.pricing.parameter_prices import parameter_update_s
from autoparallel.pricing.stage_devices import along_pipeline
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster, Device, Link
from cost_models.unequal import OtherHosts, Slow
from tests.support.captured import graph_of, plan_of
from tests.support.launching import output_of
from tests.support.models import CASES
from tests.support.ranks import mesh_of
from tests.support.reference import (
    SEED,
    Trained,
    assert_same_parameters,
    gathered,
    make_optimizer,
    scalar,
    train_reference,
)
from tests.support.small_joint import SmallCase
from tests.support.steps import assert_one_process

FAST = Device("fast", {"float32": 1e12}, 1e15, 1.0, 1e12, 0.0)
#: Two hosts of one device; nothing but products takes time.
PLAIN = Cluster("toy", FAST, (Link("wire", 1, 0.0, 1e15), Link("net", 2, 0.0, 1e15, nics_per_host=1)), 2, ("ring",))


class Products(nn.Module):
    """``count`` equal products, and a loss."""

    def __init__(self, count: int, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def slow(cluster: Cluster, *devices: int, speed: float = 0.5) -> Cluster:
    return dataclasses.replace(cluster, slow=(Slow(devices, speed),))


def planned(cluster: Cluster, micro_batches: int = 8, **options: Any) -> Plan:
    return autoparallel.plan(Products(6), cluster, example_inputs=(torch.zeros(4096, 256),), mesh_shape=(2, 1),
                             pipeline_stages=2, micro_batches=micro_batches, schedule="gpipe", **options)


# --- prices by hand -----------------------------------------------------------------------------------------------


def pricer_of(cluster: Cluster, ranks: int, cuts: tuple[str, ...] = ("linear_3",)) -> SpacePricer:
    """Of two stages that are cut there, on so many ranks each."""
    micro = Splits(capture(Products(6), (torch.zeros(4096, 256),)))(8)
    hybrid = Hybrid(8, stages=2, pipeline_ranks=2, schedule="gpipe", cuts=cuts)
    space = StrategySpace(micro.body, (ranks,))
    counts = ExecutionCounts(space, hybrid, stages_of(space, micro.loss, hybrid).of_decisions(len(space)))
    return SpacePricer(Prices(space, cluster, "sgd", stages=2), counts=counts)


def priced(cluster: Cluster, cuts: tuple[str, ...]) -> float:
    """Seconds of two stages that are cut there."""
    pricer = pricer_of(cluster, 1, cuts)
    return step_s(pricer, [s.strategies[0] for s in pricer.space.strategy_sets], [(0.0, 0.0)])


def test_a_stage_takes_the_time_of_its_own_devices() -> None:
    """Six products of a micro-batch of 512 rows take 2 x 512 x 256 x 256 FLOP at 1e12 a second forward, and as much
    for each gradient (of the first layer's input there is none): the slower stage counts for each micro-batch, the
    other once."""
    one = 2 * 512 * 256 * 256 / 1e12
    first, second = one * (3 * 3 - 1), one * 3 * 3
    for cluster, (a, b) in ((PLAIN, (1, 1)), (slow(PLAIN, 1), (1, 2)), (slow(PLAIN, 0), (2, 1)),
                            (slow(PLAIN, 0, 1), (2, 2))):
        expected = a * first + b * second + 7 * max(a * first, b * second)
        assert priced(cluster, ("linear_3",)) == pytest.approx(expected, rel=1e-2)


def test_a_longer_first_stage_works_while_the_last_one_does() -> None:
    """Of five products the first stage has three, of 8 parts of work in each micro-batch, 3 of them forward, and the
    last two, of 6 parts. The first waits before its first backward, as its second forward is shorter than the last
    stage's work, and before its last one."""
    one = 2 * 512 * 256 * 256 / 1e12
    made = autoparallel.plan(Products(5), PLAIN, example_inputs=(torch.zeros(4096, 256),), mesh_shape=(2, 1),
                             pipeline_stages=2, micro_batches=8, schedule="1f1b", optimizer="sgd")
    assert made.hybrid.cuts == ("linear_3",)
    assert made.prediction.step_s == pytest.approx((8 * 8 + (6 - 3) + (6 - 5)) * one, rel=5e-3)
    assert timeline_of(made).total_s == pytest.approx(made.prediction.step_s)


#: Four hosts of two devices, joined by wires that take 1 s for 1e9 bytes; nothing else takes as much.
WIRED = Cluster("wired", Device("fast", {"float32": 1e15}, 1e30, 1.0, 1e12, 0.0), (
    Link("wire", 2, 0.0, 1e30), Link("net", 8, 0.0, 1e9, nics_per_host=1)), 8, ("ring",))
THIN = dataclasses.replace(WIRED, slow=(Slow((4, 5), 1.0, bandwidth=0.5),))


def test_a_stage_sends_by_the_nics_of_its_own_hosts() -> None:
    """Of two stages, the second has the host with half the bandwidth: its all-reduces take twice as long."""
    even, thin = (pricer_of(one, 4) for one in (WIRED, THIN))
    per_stage = [0.0, 0.0]
    for before, after, use in zip(even.full().edges, thin.full().edges, even.space.uses, strict=False):
        (stage,) = even.counts.stages_of[use.target]
        if even.space.decisions[use.source].kind == "parameter":
            sent = before.costs > 1e-9    # all else takes less
            assert after.costs[sent] == pytest.approx((1.0, 2.0)[stage] * before.costs[sent])
            per_stage[stage] += float(after.costs.max())
    assert per_stage[0] >= 3 * 2 * 3 / 4 * 256 * 256 * 4 / 1e9


def test_prices_of_stages_are_between_those_of_the_best_and_the_slowest_nics() -> None:
    space = StrategySpace(graph_of("mlp"), (2, 2))
    all_thin = dataclasses.replace(WIRED, slow=(Slow(tuple(range(8)), 1.0, bandwidth=0.5),))
    best, whole, slowest = (Prices(space, one, stages=2) for one in (WIRED, THIN, all_thin))
    first, second = whole.of_ranks((0,)), whole.of_ranks((1,))
    for use in space.uses:
        of = [prices.redistribution.use_s(use) for prices in (best, whole.of_device(), first, second, whole, slowest)]
        assert all((a <= b * (1 + 1e-12)).all() for a, b in pairwise(of))
        assert all((a == b).all() for a, b in ((of[1], of[2]), (of[3], of[4]), (of[4], of[5])))
    assert any((first.redistribution.use_s(use) < second.redistribution.use_s(use)).any() for use in space.uses)
    messages = [along_pipeline(whole, ranks) for ranks in ((0,), (0, 1), ())]
    rates = [group.levels[-1][1].bandwidth_bytes_per_s for group in (*messages, along_pipeline(whole.of_device()))]
    assert rates == [1e9, 0.5e9, 0.5e9, 1e9]


def test_without_a_pipeline_all_wait_for_the_slowest() -> None:
    args = (torch.zeros(4096, 256),)
    seconds = [autoparallel.plan(Products(3), one, example_inputs=args, mesh_shape=(2,), baseline="ddp",
                                 optimizer="sgd").prediction.added_s for one in (PLAIN, slow(PLAIN, 0), slow(PLAIN, 1))]
    assert seconds[1:] == pytest.approx([2 * seconds[0]] * 2, rel=1e-2)


@pytest.mark.parametrize("software", ["none", "torch-eager", "torch-compile"])
def test_a_mesh_of_two_kinds_is_never_faster_than_one_of_either(software: str) -> None:
    h100, a100 = (Cluster.load(name, 16, software) for name in ("h100-sxm", "a100-sxm"))
    both = dataclasses.replace(h100, others=(OtherHosts("a100-sxm", tuple(range(8, 16)), a100.device, a100.profile),))
    space = StrategySpace(graph_of("gpt2", 16), (4, 4))
    mixed, *each = (Prices(space, one) for one in (both, h100, a100))
    for decision, s in zip(space.decisions, space.strategy_sets, strict=True):
        if decision.kind == "op" and s.rule is not None and not s.rule.fixed:
            least = [prices.op_of(decision.index) for prices in each]
            got, inside = mixed.op_of(decision.index), mixed.op_of(decision.index).inside
            if not inside:
                assert (got.forward_s >= least[0].forward_s * (1 - 1e-9)).all()
                assert (got.forward_s >= least[1].forward_s * (1 - 1e-9)).all()
        elif decision.kind == "parameter":
            assert (parameter_update_s(mixed, s) >= parameter_update_s(each[1], s) * (1 - 1e-9)).all()


# --- search -------------------------------------------------------------------------------------------------------


def test_a_slow_stage_gets_fewer_layers() -> None:
    """Speeds of 1 and 1/2: four and two of the six layers; the plan beats the best cut into equal stages by the
    timeline, and the summary says what each rank gets."""
    equal, uneven = planned(PLAIN), planned(slow(PLAIN, 1))
    assert equal.hybrid.cuts == ("linear_3",) and uneven.hybrid.cuts == ("linear_4",)
    graph = capture(Products(6), (torch.zeros(4096, 256),))
    as_equal = plan_on(Splits(graph)(8), slow(PLAIN, 1), (1,), None, options_of({}), equal.hybrid)
    assert as_equal.prediction.step_s > 1.3 * uneven.prediction.step_s > 1.3 * equal.prediction.step_s
    assert "Unequal devices: pipeline rank 0 on devices 0 (1 fast) has" in uneven.summary()
    assert "pipeline rank 1 on devices 1 (1 fast at 50% speed)" in uneven.summary()
    assert "Unequal" not in equal.summary()


def test_slow_hosts_share_a_stage() -> None:
    """Hosts 0 and 2 of four are slow: a stage of both, and one of the others, is faster than two stages that wait for
    one slow host each."""
    wide = dataclasses.replace(PLAIN, links=(PLAIN.links[0], dataclasses.replace(PLAIN.links[1], num_devices=4)),
                               num_devices=4)
    args, options = (torch.zeros(4096, 256),), {"mesh_shape": (2, 2), "pipeline_stages": 2, "micro_batches": 8,
                                                "schedule": "gpipe", "time_limit_s": 20.0}
    made = autoparallel.plan(Products(6), slow(wide, 0, 2), example_inputs=args, **options)
    spread = autoparallel.plan(Products(6), slow(wide, 0, 1, 2, 3), example_inputs=args, **options)
    assert made.devices == (1, 3, 0, 2)
    assert spread.prediction.step_s > 1.3 * made.prediction.step_s
    assert "pipeline rank 1 on devices 0, 2 (2 fast at 50% speed)" in made.summary()
    assert Plan.from_json(made.to_json()).devices == made.devices


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}])
def test_the_joint_search_finds_what_a_slow_host_does_in_time(options: dict[str, Any]) -> None:
    """Sixteen H100, host 1 at half the speed: data parallelism over all waits for the slow host in each op. The plan
    found has fewer micro-batches for it, or (of two, which are not divided by speed) a pipeline. It beats the best plan
    for equal devices."""
    cluster = Cluster.load("h100-sxm", num_devices=16)
    model, args = Products(12, 4096), (torch.zeros(65536, 4096),)
    on_equal, made = (autoparallel.plan(model, one, example_inputs=args, joint=True, time_limit_s=0.5, **options)
                      for one in (cluster, slow(cluster, *range(8, 16))))
    held = plan_on(Splits(capture(model, args))(on_equal.hybrid.micro_batches), slow(cluster, *range(8, 16)),
                   on_equal.mesh_shape, None, options_of({}), on_equal.hybrid)
    assert held.prediction.step_s > 1.05 * made.prediction.step_s
    assert made.hybrid.stages > 1 if options else made.hybrid.by_rank == (3, 1)
    assert made.evidence.step_bound_s is not None and made.evidence.step_bound_s <= made.prediction.step_s


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in [0, *range(2, 40)])])
def test_no_plan_on_unequal_devices_is_below_its_bound(seed: int) -> None:
    case = SmallCase(seed, unequal=True)
    bounds = case.search.step_bounds
    for candidate, made in case.planned(case.combinations[:: max(1, len(case.combinations) // 10)]):
        even_s, step = bounds.step_s(candidate), made.prediction.step_s
        while bounds.tighten(candidate):
            pass
        assert 0 < even_s <= bounds.step_s(candidate) <= step * (1 + 1e-9), candidate


# --- memory -------------------------------------------------------------------------------------------------------


def of_two_memories(first: float, second: float, more: Device = FAST) -> Cluster:
    """Two devices of equal speed and so many bytes."""
    small = dataclasses.replace(more, name="small", memory_bytes=second)
    return dataclasses.replace(PLAIN, device=dataclasses.replace(FAST, memory_bytes=first),
                               others=(OtherHosts("small", (1,), small),))


def test_a_stage_may_fill_its_own_devices() -> None:
    """The first of two stages needs most, as it holds more micro-batches: it fits where its device has the memory,
    though the other has half as much. Its bytes count as its share of the smallest device's."""
    alike = planned(PLAIN)
    first, second = (stage.state_bytes + 8 * stage.activation_bytes for stage in alike.known.stages)
    uneven = of_two_memories(2.2 * first, 1.1 * max(first, second))
    made = planned(uneven)
    assert made.prediction.limit_bytes == pytest.approx(1.1 * max(first, second))
    assert made.prediction.peak_bytes < alike.prediction.peak_bytes * (1 + 1e-9)
    assert [s.state_bytes for s in made.known.stages] == [s.state_bytes for s in alike.known.stages]
    assert made.prediction.state_bytes == pytest.approx(alike.prediction.state_bytes)
    assert "Bytes on a larger device are told as its share" in made.summary()


@pytest.mark.slow
def test_memory_of_the_faster_devices_is_used() -> None:
    """The fast device gets four of six layers and has memory for them; on a device as small as the other they do not
    fit, nor with a limit that is the same for all."""
    needed = [stage.state_bytes + 8 * stage.activation_bytes for stage in planned(slow(PLAIN, 1)).known.stages]
    limit = 1.1 * needed[1]
    assert needed[0] > 1.2 * limit
    slower = dataclasses.replace(FAST, peak_flops_per_s={"float32": 5e11})
    made = planned(of_two_memories(2 * needed[0], limit, slower))
    assert made.hybrid.cuts == ("linear_4",)
    for cluster, options in ((of_two_memories(limit, limit, slower), {}),
                             (of_two_memories(2 * needed[0], limit, slower), {"memory_limit_bytes": limit})):
        with pytest.raises(InfeasibleError):
            planned(cluster, **options)


# --- what is told -------------------------------------------------------------------------------------------------


def test_the_command_line_says_what_a_cluster_is(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('based_on = "h100-sxm"\nname = "ours"\n[[slow]]\nhosts = [1]\nspeed = 0.5\n')
    shown = CliRunner().invoke(app, ["clusters", str(path), "--devices", "16"])
    assert shown.output.splitlines()[:3] == ["ours: 16 devices, 8 a host, unequal",
                                             "  devices 0-7: H100 SXM5 80GB, 80 GiB",
                                             "  devices 8-15: H100 SXM5 80GB at 50% speed, 80 GiB"]
    refused = CliRunner().invoke(app, ["clusters", str(path)])
    assert refused.exit_code and "host 1 is named, and 8 devices are on hosts 0-0" in str(refused.exception)


@pytest.mark.slow
def test_an_export_lists_the_order_of_hosts() -> None:
    cluster = slow(Cluster.load("h100-sxm", num_devices=16), *range(8))
    plan = plan_of("llama", cluster, 16, by_hand="dp=8,pp=2,micro_batch=1")
    assert plan.devices == (*range(8, 16), *range(8))
    assert "start the ranks on the cluster's devices 8-15, 0-7" in str(degrees_of(plan).lost)


# --- on ranks -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_an_uneven_pipeline_equals_one_process(ranks: Any) -> None:
    """Llama on four ranks, two of which are slow: the plan of that cluster runs, with fewer layers on the slow ones."""
    cluster = slow(Cluster.load("local-cpu", num_devices=4), 2, 3, speed=0.25)
    plans = [plan_of("llama", one, mesh_shape=(2, 2), pipeline_stages=2, micro_batches=4)
             for one in (Cluster.load("local-cpu", num_devices=4), cluster)]
    assert plans[0].hybrid.cuts != plans[1].hybrid.cuts
    assert_one_process(ranks, "llama", (2, 2), {"plan": dataclasses.replace(plans[1], record=plans[1].known)})


def train_reordered(plan: Plan) -> tuple[Trained, list[list[int]], list[str]]:
    """Run on each rank: two steps of Llama on the devices of the plan; the mesh; what is warned of on another mesh."""
    case, told = CASES["llama"], list[str]()
    args, kwargs = case.inputs(8)
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())    # type: ignore[method-assign]    # one test's own
    logging.getLogger("autoparallel").addHandler(handler)
    autoparallel.compile(case.build(), mesh_of(2, 2), plan=plan)
    parallel = autoparallel.compile(case.build(), 4, plan=plan, example_inputs=args, example_kwargs=kwargs)
    logging.getLogger("autoparallel").removeHandler(handler)
    torch.manual_seed(SEED)
    stepper, losses = make_optimizer("sgd", parallel.parameters()), []
    for _ in range(2):
        losses.append(scalar(parallel.step(*args, **kwargs)))
        stepper.step()
        stepper.zero_grad()
    return Trained(losses[0], losses, {}, gathered(parallel.named_parameters()), {}), parallel.mesh.mesh.tolist(), told


@pytest.mark.ranks
def test_a_reordered_pipeline_equals_one_process(ranks: Any) -> None:
    """Ranks 0 and 2 are slow: the second stage is theirs."""
    wide = dataclasses.replace(PLAIN, links=(PLAIN.links[0], dataclasses.replace(PLAIN.links[1], num_devices=4)),
                               num_devices=4)
    plan = plan_of("llama", slow(wide, 0, 2), mesh_shape=(2, 2), pipeline_stages=2, micro_batches=4)
    assert plan.devices == (1, 3, 0, 2)
    expected = train_reference(CASES["llama"], "sgd", num_steps=2, batch_size=8)
    found = ranks(4).run(train_reordered, dataclasses.replace(plan, record=None), timeout_s=120)
    for rank, (trained, mesh, told) in enumerate(found):
        assert mesh == [[1, 3], [0, 2]]
        assert trained.losses == pytest.approx(expected.losses, rel=1e-5)
        assert_same_parameters(expected.parameters | trained.parameters, expected)
        first = "model.layers.0.self_attn.q_proj.weight" in trained.parameters
        assert first == (rank in (1, 3))
        assert any("in the order [1, 3, 0, 2], and the mesh has the ranks [0, 1, 2, 3]" in line for line in told)
    assert {name for trained, *_ in found for name in trained.parameters} == set(expected.parameters)


def compile_descending(places: list[Any]) -> str:
    """Run on each rank: what is said of a mesh whose groups torch sorts."""
    case = CASES["mlp"]
    try:
        autoparallel.compile(case.build(), DeviceMesh("cpu", torch.tensor(places)))
    except MeshError as error:
        return str(error)
    return ""


@pytest.mark.ranks
@pytest.mark.parametrize("places", [[1, 0], [[1, 0], [2, 3]]])
def test_a_mesh_whose_groups_are_in_another_order_is_refused(ranks: Any, places: list[Any]) -> None:
    """Also by ranks 2 and 3 of the second mesh, whose own groups are as they should be."""
    for said in ranks(torch.tensor(places).numel()).run(compile_descending, places, timeout_s=30):
        assert "process group is of the ranks [0, 1] in this order: give a mesh whose ranks ascend" in said


@pytest.mark.ranks
def test_the_mesh_takes_the_devices_of_a_plan(tmp_path: Path) -> None:
    script, plan = tmp_path / "train.py", planned(slow(PLAIN, 0))
    assert plan.devices == (1, 0)
    plan.save(tmp_path / "plan.json")
    script.write_text("import autoparallel\nworld = autoparallel.init()\n"
                      "if world.rank == 0:\n    print(world.mesh.mesh.tolist())\n")
    command = [sys.executable, "-m", "autoparallel", "launch", str(tmp_path / "plan.json"), "--",
               sys.executable, str(script)]
    assert output_of(command).splitlines()[-1] == "[[1], [0]]"


@pytest.mark.parametrize("devices", [(1, 1), (0, 1, 2), (2, 1)])
def test_a_plan_of_other_devices_is_refused(devices: tuple[int, ...]) -> None:
    text = dataclasses.replace(planned(slow(PLAIN, 0)), devices=devices).to_json()
    with pytest.raises(PlanError, match="give each of 0-1 once, or none"):
        Plan.from_json(text)
