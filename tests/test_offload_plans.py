"""Tiers of optimizer states in plans: seconds, bytes of each tier, the choice of one, limits."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch

import autoparallel
from autoparallel.errors import ClusterError, InfeasibleError, PlanError
from autoparallel.partition import Splits
from autoparallel.planning.offloading import fastest_tier
from autoparallel.planning.options import Options, options_of
from autoparallel.planning.tier_bounds import TierBounds
from autoparallel.plans import Plan
from autoparallel.schedule.tiers import BLOCK_BYTES, BUFFERS, TILE_BYTES, Offload, offload_of
from benchmarks.published_offload import SOFTWARE, STEPS, left_out
from cost_models import Cluster, offload
from cost_models.memory import optimizer_step_s, step_bytes
from tests.support.captured import graph_of, plan_again, plan_of
from tests.support.models import CASES
from tests.support.tiers import slow

PLAIN = Cluster.load("a100-sxm", num_devices=4, software="none")
CPU = Cluster.load("local-cpu", num_devices=4)


def planned(cluster: Cluster = PLAIN, case: str = "llama", **options: Any) -> Plan:
    return plan_of(case, cluster, **{"mesh_shape": (4,), **options})


def test_known_answers() -> None:
    """ZeRO-Infinity's bandwidths at 70 TFLOP/s, and CPU Adam's bytes."""
    peak = 70e12
    assert offload.efficiency(offload.parameter_intensity(1024, 1), 70e9, peak) == pytest.approx(0.506, abs=5e-4)
    assert offload.efficiency(offload.state_intensity(1024, 2), 1.5e12, peak) == pytest.approx(0.917, abs=1e-3)
    assert offload.efficiency(offload.checkpoint_intensity(2048, 1), 2e9, peak) == pytest.approx(0.584, abs=5e-4)
    assert step_bytes("megatron-bfloat16", "adamw") == 30
    fast = replace(PLAIN, num_devices=8, host=replace(PLAIN.host, memory_bandwidth_bytes_per_s=100e9))
    there = {"gradients_there": True, "parameters_there": True}
    assert offload.host_step(1e9, "megatron-bfloat16", "adamw", fast, **there).step_s == pytest.approx(0.30)


@pytest.mark.parametrize(("parameters", "published_s"), [(1e9, 0.22), (4e9, 1.03), (10e9, 2.57)])
def test_a_step_takes_what_cpu_adam_was_measured_to_take(parameters: float, published_s: float) -> None:
    """ZeRO-Offload, table 4: on a DGX-2, of which one device is at work. The rate is that of the two larger."""
    dgx2 = Cluster.load("v100-dgx-2", num_devices=1, software="none")
    there = {"gradients_there": True, "parameters_there": True}
    step = offload.host_step(parameters, "megatron-bfloat16", "adamw", dgx2, **there)
    assert step.step_s == pytest.approx(published_s, rel=0.18 if parameters == 1e9 else 0.02)


def test_a_host_step_by_hand() -> None:
    """2^30 elements in float32 on half a host, two devices to a switch: 8 bytes down, 4 up, 28 in host memory; 8 of
    states from disk and back; all of them through host memory."""
    host, count = PLAIN.host, 2**30
    step = offload.host_step(count, "float32", "adamw", PLAIN, on_disk=True)
    assert step.step_s == pytest.approx((28 + 12 + 16) * count / (2 * host.memory_bandwidth_bytes_per_s))
    assert step.fetch_s == pytest.approx(
        8 * count / (host.from_device_bytes_per_s / 2) + 8 * count / (2 * host.disk_read_bytes_per_s))
    assert step.put_s == pytest.approx(
        4 * count / (host.to_device_bytes_per_s / 2) + 8 * count / (2 * host.disk_write_bytes_per_s))
    assert step.total_s == max(step.fetch_s, step.step_s, step.put_s)
    here = offload.host_step(count, "float32", "adamw", CPU)      # stepped in place
    assert here.total_s == here.step_s == pytest.approx(optimizer_step_s(count, "float32", "adamw", CPU.device))


def test_what_devices_of_a_host_share() -> None:
    """Memory, disks and cores by all devices at work, a link by those of one switch; never more than there are."""
    def rates(name: str, *counts: int, machine: str = "a100-sxm") -> list[float]:
        found = [offload.known_rate(Cluster.load(machine, num_devices=n), name) for n in counts]
        return [rate / found[0] for rate in found]

    for name in ("memory_bandwidth_bytes_per_s", "disk_read_bytes_per_s", "step_elements_per_s"):
        assert rates(name, 8, 64, 4, 1) == pytest.approx([1, 1, 2, 8])
    assert rates("from_device_bytes_per_s", 1, 2, 8, 64) == pytest.approx([1, 0.5, 0.5, 0.5])
    assert rates("to_device_bytes_per_s", 1, 3, 16, machine="v100-dgx-2") == pytest.approx([1, 1 / 3, 1 / 4])
    assert rates("to_device_bytes_per_s", 1, 8, machine="h100-sxm") == [1, 1]
    assert rates("disk_read_bytes_per_s", 1, 2, machine="local-cpu") == [1, 1]    # a host of any number of processes
    assert offload.known_rate(CPU, "disk_read_bytes_per_s") == CPU.host.disk_read_bytes_per_s
    with pytest.raises(ClusterError, match="devices_per_switch must be a whole number"):
        replace(PLAIN.host, devices_per_switch=1.5)


def test_few_cores_bind_before_memory() -> None:
    """A host's step takes the longer of its cores' and its memory's time."""
    there = {"gradients_there": True, "parameters_there": True}
    eight = Cluster.load("a100-sxm", num_devices=8, software="none")
    one_core = replace(eight, host=replace(eight.host, step_elements_per_s=eight.host.step_elements_per_s / 16 / 4))
    by_memory, by_core = (offload.host_step(1e9, "float32", "adamw", c, **there).step_s for c in (eight, one_core))
    assert by_memory == pytest.approx(28e9 / eight.host.memory_bandwidth_bytes_per_s)
    assert by_core == pytest.approx(4.0) and by_core > by_memory


def test_software_adds_passes_to_a_host_step() -> None:
    """Conversions of gradients and parameters, norm and scaling, at the share of the rate that software reaches."""
    plain, deepspeed = (Cluster.load("a100-sxm", num_devices=8, software=name) for name in ("none", SOFTWARE))
    assert deepspeed.profile is not None and deepspeed.profile.kept("bfloat16") == "bfloat16-master"
    there = {"gradients_there": True, "parameters_there": True}
    bare, whole = (offload.host_step(1e9, "bfloat16-master", "adamw", c, **there).step_s for c in (plain, deepspeed))
    passes = (28 + 12 + deepspeed.profile.update_bytes) / 28
    assert whole / bare == pytest.approx(passes / deepspeed.profile.host_memory)


def test_the_share_of_host_memory_is_that_of_published_steps() -> None:
    """The profile has what `benchmarks.published_offload` fits; half of the steps are within 15 % of what the others
    give, all within a third."""
    deepspeed = Cluster.load("a100-sxm", software=SOFTWARE).profile
    assert deepspeed is not None and deepspeed.host_memory == pytest.approx(
        statistics.median(step.share for step in STEPS), abs=0.005)
    errors = sorted(abs(step.predicted(left_out(step)) / step.published - 1) for step in STEPS)
    assert errors[1] < 0.15 and errors[-1] < 0.34


@pytest.mark.parametrize(("tier", "fraction"), [("host", 1.0), ("host", 0.5), ("disk", 1.0)])
def test_states_leave_the_device_in_a_plan(tier: str, fraction: float) -> None:
    there = planned(zero_stage=1)
    away = planned(zero_stage=1, offload=tier, offload_fraction=fraction)
    assert away.strategies == there.strategies and away.hybrid.offload == Offload(tier, fraction)
    each = there.prediction.state_bytes / 4        # of parameter, gradient and two moments
    states, gradients = 2 * each, each if away.hybrid.offload.moves_gradients else 0.0
    moved = there.prediction.state_bytes - away.prediction.state_bytes - gradients
    assert moved == pytest.approx(fraction * states, rel=0.02)
    # the peak is at the loss, where gradients of parameters are in no tier yet
    assert there.prediction.peak_bytes - away.prediction.peak_bytes == pytest.approx(moved, rel=0.02)
    on_disk = tier == "disk"
    assert away.prediction.disk_bytes == pytest.approx(moved if on_disk else 0)
    assert away.prediction.host_bytes == pytest.approx(min(BUFFERS * 2 * TILE_BYTES, BUFFERS * moved) if on_disk else
                                                       moved + gradients, rel=0.05, abs=BUFFERS * 2 * BLOCK_BYTES)
    elements = moved / 8 / fraction
    by_hand = offload.host_step(fraction * elements, "float32", "adamw", PLAIN, on_disk, gradients > 0).total_s
    rest = (1 - fraction) * there.prediction.optimizer_s
    assert away.prediction.optimizer_s == pytest.approx(by_hand + rest, rel=0.02)
    text = away.report()
    assert ("on disk" in text) == on_disk and "optimizer states" in text
    assert away.known is not None and away.known.memory is not None
    kinds = dict(zip(away.known.memory.kinds, zip(*away.known.memory.num_bytes, strict=True), strict=True))
    assert max(kinds.get("optimizer state", (0.0,))) == pytest.approx((1 - fraction) * states, rel=0.05, abs=200)
    begins = kinds["gradients"][0] if "gradients" in kinds else 0.0
    assert begins == pytest.approx(each - gradients, rel=0.02) and max(kinds["gradients"]) == pytest.approx(each, 0.02)
    assert Plan.from_json(away.to_json()).hybrid == away.hybrid


@pytest.mark.slow
def test_auto_takes_a_tier_only_where_memory_binds() -> None:
    options = {"zero_stage": 1, "recompute": "none", "time_limit_s": 5.0}
    whole = planned(**options, offload="auto")
    assert whole.hybrid.offload == Offload() and whole.strategies == planned(**options).strategies
    with pytest.raises(InfeasibleError) as error:
        planned(**options, memory_limit_bytes=0)
    assert error.value.needed_bytes is not None
    limit = error.value.needed_bytes - 0.4 * whole.prediction.state_bytes / 2
    some = planned(**options, offload="auto", memory_limit_bytes=limit)
    half = planned(**options, offload="host", offload_fraction=0.5, memory_limit_bytes=limit)
    assert some.hybrid.offload.states == "host" and some.prediction.peak_bytes <= limit
    assert some.prediction.step_s <= half.prediction.step_s  # more on the host leaves room for a faster sharding
    assert "states in device memory do not fit" in some.evidence.stop_reason


@pytest.mark.parametrize(("fits", "tier", "fraction"), [
    ({"none": 1.0}, "device", 1.0), ({"host": 1.0}, "host", 1.0), ({"host": 0.75}, "host", 0.75),
    ({"host": 0.1}, "host", 0.25), ({"disk": 1.0, "host": 2.0}, "disk", 1.0)])
def test_the_order_of_tiers(fits: dict[str, float], tier: str, fraction: float) -> None:
    """``fits``: tiers with the least share of states with which a plan fits."""
    plan = planned(CPU)

    def make(options: Options) -> Plan:
        if options.tier.fraction < fits.get(str(options.offload), 9.0):
            raise InfeasibleError("too much")
        return replace(plan, hybrid=replace(plan.hybrid, offload=options.tier))

    assert fastest_tier(Options(offload="auto"), CPU, make).hybrid.offload == Offload(tier, fraction)
    if tier == "disk":
        with pytest.raises(InfeasibleError, match="too much \\(offload='host': too much\\)"):
            fastest_tier(Options(offload="auto", tiers=("host",)), CPU, make)


@pytest.mark.parametrize(("seconds", "tier"), [
    ({"none": 3.0, "host": 2.0, "host 0.5": 1.5, "host 0.25": 1.8, "parameters": 2.5}, Offload("host", 0.5)),
    ({"none": 3.0, "host": 2.0, "parameters": 1.0}, Offload("host", parameters="host")),
    ({"none": 3.0, "host": 2.99, "parameters": 9.0}, Offload()),
    ({"none": 3.0, "disk": 1.0}, Offload()),
    ({"parameters": 5.0, "disk": 1.0}, Offload("host", parameters="host")),
])
def test_tiers_are_compared_by_price(seconds: dict[str, float], tier: Offload) -> None:
    """``seconds``: of the plans of those that fit; that of the device recomputes, as memory binds it. Disk is for what
    fits nowhere else; what is faster by less than 1 % stays on the device."""
    plan = planned(CPU)
    binding = replace(plan, hybrid=replace(plan.hybrid, recompute="full"))

    def make(options: Options) -> Plan:
        name = named(options)
        if name not in seconds:
            raise InfeasibleError("too much")
        zero = 3 if options.offload == "parameters" else plan.hybrid.zero_stage
        return replace(binding, hybrid=replace(binding.hybrid, offload=options.tier, zero_stage=zero),
                       prediction=replace(plan.prediction, forward_s=seconds[name]))

    found = fastest_tier(Options(offload="auto"), CPU, make)
    assert found.hybrid.offload == tier
    if tier.is_away and "none" in seconds:
        assert "times as fast as with states in device memory" in found.evidence.stop_reason


class Told:
    """Bounds: the tiers that may fit, and least seconds of some."""

    def __init__(self, fit: Collection[str], least_s: dict[str, float]) -> None:
        self.fit, self.least_s = fit, least_s

    def may_fit(self, options: Options) -> bool:
        return named(options) in self.fit

    def may_beat(self, options: Options, seconds: float) -> bool:
        return self.least_s.get(named(options), 0.0) < seconds


def named(options: Options) -> str:
    return f"{options.offload}" + (f" {options.offload_fraction}" if options.offload_fraction else "")


@pytest.mark.parametrize(("here", "fit", "least_s", "tried", "tier"), [
    # nothing fits on the device: the part is planned, the rest is slower by its bound
    (math.inf, ("host 0.75", "host", "parameters"), {"host": 30.0, "parameters": 29.0}, ["none", "host 0.75"],
     Offload("host", 0.75)),
    # no part fits by its bound
    (math.inf, ("host", "parameters"), {"parameters": 29.0}, ["none", "host"], Offload("host")),
    # it fits on the device, and bounds leave nothing to search, or one part
    (20.0, ("host 0.25", "host 0.5", "host", "parameters"),
     {"host 0.25": 20.0, "host 0.5": 21.0, "host": 30.0, "parameters": 30.0}, ["none"], Offload()),
    (20.0, ("host 0.25", "host 0.5", "host", "parameters"), {"host 0.5": 21.0, "host": 30.0, "parameters": 30.0},
     ["none", "host 0.25"], Offload("host", 0.25)),
    # less than 1 % is no gain
    (10.0, ("host",), {"host": 9.95}, ["none"], Offload()),
])
def test_bounds_leave_out_tiers(here: float, fit: Collection[str], least_s: dict[str, float], tried: list[str],
                                tier: Offload) -> None:
    """Each plan takes 10 s, on the device ``here``; parts of the states come before all of them."""
    plan, made = planned(CPU), list[str]()

    def make(options: Options) -> Plan:
        made.append(named(options))
        seconds = here if options.offload == "none" else 10.0
        if seconds == math.inf:
            raise InfeasibleError("too much")
        return replace(plan, hybrid=replace(plan.hybrid, offload=options.tier, recompute="full", zero_stage=3),
                       prediction=replace(plan.prediction, forward_s=seconds))

    found = fastest_tier(Options(offload="auto"), CPU, make, bounds=Told(fit, least_s))
    assert made == tried and found.hybrid.offload == tier


@pytest.mark.parametrize(("tier", "fraction"), [("host", 0.5), slow("host", None), slow("parameters", None),
                                                slow("disk", None)])
@pytest.mark.slow
def test_bounds_of_tiers_are_below_their_plans(tier: str, fraction: float | None) -> None:
    """And what they rule out has no plan."""
    options: dict[str, Any] = {"offload": tier, "offload_fraction": fraction}
    plan = planned(**options, mesh_shape=None, by_hand="dp=4,zero=3")
    chosen = options_of({**options, "time_limit_s": 3.0})
    bounds = TierBounds(Splits(graph_of("llama")), PLAIN, None)
    even = bounds._search(chosen).bounds
    (update_s, more_s), even_s = even.host_update(plan.hybrid), plan.prediction.optimizer_s
    assert even_s * 0.7 < update_s <= even_s * 1.001 and 0 <= more_s <= update_s    # small parameters are not cut
    assert bounds.may_fit(chosen) and bounds.may_beat(chosen, 1.1 * plan.prediction.step_s)
    assert not bounds.may_beat(chosen, update_s) and not bounds.may_fit(replace(chosen, memory_limit_bytes=100.0))


@pytest.mark.slow
def test_limits_of_a_plan() -> None:
    with pytest.raises(InfeasibleError, match="host_memory_limit_bytes is 10: take more devices"):
        planned(offload="host", host_memory_limit_bytes=10)
    with pytest.raises(InfeasibleError, match="disk_limit_bytes is 10"):
        planned(offload="disk", disk_limit_bytes=10)
    with pytest.raises(InfeasibleError, match="disk_limit_bytes is 10: take more devices or more micro-batches"):
        planned(recompute="selective", saved_on="disk", disk_limit_bytes=10)
    unknown = replace(PLAIN, host=replace(PLAIN.host, disk_read_bytes_per_s=0.0))
    with pytest.raises(ClusterError, match="add disk_read_bytes_per_s to"):
        planned(unknown, offload="disk")
    with pytest.raises(PlanError, match="offload is 'none'"):
        planned(offload="none", offload_fraction=0.5)
    with pytest.raises(PlanError, match="disk_path belongs to"):
        planned(disk_path="/tmp")
    with pytest.raises(PlanError, match="unknown tier 'tape'"):
        Offload("tape")


@pytest.mark.slow
def test_a_joint_search_takes_as_many_micro_batches_as_the_host_has_memory_for() -> None:
    two = replace(PLAIN, num_devices=2)
    free, limit = (planned(two, mesh_shape=None, joint=True, recompute="offload", time_limit_s=0.5,
                           host_memory_limit_bytes=most) for most in (None, 80_000))
    assert free.hybrid.micro_batches == 1 and free.prediction.host_bytes > 2 * 80_000
    assert limit.hybrid.micro_batches >= 4 and limit.prediction.host_bytes <= 80_000
    with pytest.raises(InfeasibleError, match="host_memory_limit_bytes is 1e\\+03: take more micro-batches"):
        planned(two, mesh_shape=None, joint=True, recompute="offload", time_limit_s=0.5, host_memory_limit_bytes=1000)


def test_an_older_plan_file_has_its_states_on_the_device() -> None:
    data = json.loads(planned().to_json())
    assert data["hybrid"].pop("offload") == {"states": "device", "fraction": 1.0, "tile_bytes": TILE_BYTES,
                                             "parameters": "device", "gradients": "device", "groups": [],
                                             "in_backward": False}
    assert Plan.from_json(json.dumps(data)).hybrid.offload == Offload()
    for states, parameters, place in (("device", False, "none"), ("host", False, "host"), ("host", True, "parameters"),
                                      ("disk", False, "disk")):
        data["hybrid"]["offload"] = {"states": states, "fraction": 1.0, "tile_bytes": 4096, "parameters": parameters}
        data["hybrid"]["zero_stage"] = 3
        assert Plan.from_json(json.dumps(data)).hybrid.offload == offload_of(place, tile_bytes=4096)


def test_tiles_keep_to_the_limit_of_host_memory() -> None:
    """Three tiles of two moments."""
    plan = planned(offload="disk", host_memory_limit_bytes=60_000)
    assert plan.hybrid.offload.tile_bytes == 8192 and plan.prediction.host_bytes == BUFFERS * 2 * 8192
    with pytest.raises(PlanError, match="give a multiple of 4096"):
        Offload("disk", tile_bytes=1000)


def test_by_hand() -> None:
    plan = planned(mesh_shape=None, by_hand="dp=4,zero=1", offload="host")
    assert plan.hybrid.offload == Offload("host") and plan.prediction.host_bytes > 0


def test_exports_say_it_or_that_it_is_lost() -> None:
    plan = planned(mesh_shape=None, by_hand="dp=4,zero=3,micro_batch=1", offload="host", offload_fraction=0.5)
    made = autoparallel.export_plan(plan, "deepspeed")
    assert json.loads(made.files["ds_config.json"])["zero_optimization"]["offload_optimizer"] == {
        "device": "cpu", "pin_memory": True, "ratio": 0.5}
    assert all("optimizer states" not in lost.what for lost in made.lost)
    disk = replace(plan, hybrid=replace(plan.hybrid, offload=Offload("disk")))
    for one, to in ((plan, "fsdp2"), (plan, "torchtitan"), (plan, "megatron"), (plan, "accelerate"),
                    (disk, "deepspeed")):
        assert "optimizer states" in "".join(lost.what for lost in autoparallel.export_plan(one, to).lost), to


def test_half_precision_has_its_master_on_the_host() -> None:
    """By software that keeps one: 12 bytes of a parameter leave the device, and the 2 of its gradient."""
    cluster = Cluster.load("a100-sxm", num_devices=4, software="megatron-core")
    model, args, kwargs = CASES["llama"].build().to(torch.bfloat16), *CASES["llama"].inputs(8)
    there, away = (plan_again(model, cluster, args, kwargs, mesh_shape=(4,), zero_stage=1, offload=tier)
                   for tier in ("none", "host"))
    count = sum(p.numel() for p in model.parameters())
    assert away.prediction.host_bytes == pytest.approx(14 * count / 4, rel=0.05)
    assert there.prediction.state_bytes - away.prediction.state_bytes == pytest.approx(away.prediction.host_bytes)


@pytest.mark.slow
def test_gradients_on_their_way_are_few() -> None:
    """With buckets of 2 KiB no more than two, and the next gradient, are on the device; of four micro-batches each
    moves them once, and what exceeds backward is counted."""
    plain = {"zero_stage": 2, "mesh_shape": (2, 2), "bucket_bytes": 2**11}
    few, many = (planned(offload="host", micro_batches=count, **plain) for count in (1, 4))
    for plan in (few, many):
        assert plan.known is not None and plan.known.memory is not None
        at = plan.known.memory.kinds.index("gradients")
        largest = max(row[at] for row in plan.known.memory.num_bytes)
        assert 4096 <= largest <= 2 * 2**11 + 4096 < plan.prediction.host_bytes / 3 / 2.5    # 4096: the largest of them
    slow = replace(PLAIN, host=replace(PLAIN.host, from_device_bytes_per_s=1e6))
    hand = "dp=4,zero=2"
    once, often = (planned(slow, mesh_shape=None, offload="host", by_hand=f"{hand},micro_batch={each}").prediction
                   for each in (2, 1))
    kept = planned(slow, mesh_shape=None, by_hand=hand).prediction
    moving_s = kept.state_bytes / 4 / (1e6 / 2)    # gradients, by a link that two devices share
    assert once.backward_communication_s - kept.backward_communication_s == pytest.approx(moving_s, rel=0.1)
    assert often.backward_communication_s - once.backward_communication_s == pytest.approx(moving_s, rel=0.1)
    hidden = planned(mesh_shape=None, offload="host", by_hand=hand).prediction
    assert hidden.backward_communication_s == pytest.approx(
        planned(mesh_shape=None, by_hand=hand).prediction.backward_communication_s)


@pytest.mark.slow
def test_limits_of_host_and_disk_hold_within_the_search() -> None:
    """The plan that is fastest without a limit keeps states whole on each rank; within one it cuts them."""
    fast = replace(PLAIN, host=replace(PLAIN.host, memory_bandwidth_bytes_per_s=1e15, from_device_bytes_per_s=1e15,
                                       to_device_bytes_per_s=1e15, disk_read_bytes_per_s=1e15,
                                       disk_write_bytes_per_s=1e15))
    for tier, named in (("host", "host_memory_limit_bytes"), ("disk", "disk_limit_bytes")):
        def amount(plan: Plan, tier: str = tier) -> float:
            return plan.prediction.host_bytes if tier == "host" else plan.prediction.disk_bytes

        free = planned(fast, offload=tier)
        least = planned(fast, offload=tier, zero_stage=3)
        assert amount(least) < 0.5 * amount(free)
        limit = (amount(least) + amount(free)) / 2
        found = planned(fast, offload=tier, **{named: limit})
        assert amount(found) <= limit < amount(free) and "within host and disk" in found.evidence.stop_reason
        assert found.prediction.step_s >= free.prediction.step_s
        with pytest.raises(InfeasibleError, match=named):
            planned(fast, offload=tier, **{named: 0.9 * amount(least)})
