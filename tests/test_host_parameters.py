"""Parameters in the memory of the host, fetched for each use: equal to the bit with those of device memory; few at a
time on the device; planned, priced and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import autoparallel
from autoparallel.errors import PlanError
from autoparallel.kernels import fetching, groups, regather
from autoparallel.kernels.buckets import begin_all_gathers
from autoparallel.plans import Plan
from autoparallel.schedule.tiers import Offload
from benchmarks.published_offload import ROWS
from cost_models import Cluster
from tests.support.captured import plan_of
from tests.support.models import CASES
from tests.support.offloaded import Options, differing, resumed_in_tiers, trained
from tests.support.ranks import mesh_of
from tests.support.reference import Trained, assert_same_parameters, train_reference
from tests.support.tiers import slow


@pytest.mark.ranks
@pytest.mark.parametrize(("case", "shape", "options", "norm", "calls"), [
    slow("llama", (2,), {}, 0.5, 1), slow("llama", (4,), {}, 0.5, 1),
    ("llama", (2,), {"micro_batches": 2, "recompute": "offload"}, None, 1),
    ("gpt2", (1,), {"micro_batches": 4, "recompute": "full"}, None, 1),
    slow("llama", (2, 2), {"micro_batches": 2, "recompute": "full"}, 0.5, 2),
    slow("llama", (1,), {"micro_batches": 4, "copies": 4, "recompute": "full"}, None, 1),
    ("llama", (2, 2), {"micro_batches": 4, "pipeline_stages": 2, "recompute": "full"}, 0.5, 1),
    slow("gpt2", (2, 2), {"micro_batches": 2, "pipeline_stages": 2, "schedule": "gpipe"}, None, 1),
    slow("gpt2", (2, 2), {"micro_batches": 4, "pipeline_stages": 4, "schedule": "interleaved"}, None, 2),
    slow("gpt2", (4,), {"micro_batches": 4, "copies": 2, "recompute": "full"}, 0.5, 2),
    slow("bert", (2, 2), {"micro_batches": 2, "copies": 2}, None, 1),
    slow("deepseek_v3", (2,), {"micro_batches": 4, "copies": 4, "recompute": "selective"}, None, 1),
    slow("llama", (1,), {}, None, 1),
    slow("bert", (4,), {"recompute": "selective"}, None, 1),
    slow("bert", (2,), {"micro_batches": 8, "reduce_dtype": "float32"}, 0.1, 2),
    slow("mixtral", (2, 2), {}, None, 1),
    slow("mixtral", (1,), {"recompute": "full"}, 0.5, 1),
])
def test_equal_to_parameters_on_the_device(ranks: Any, case: str, shape: tuple[int, ...], options: Options,
                                           norm: float | None, calls: int) -> None:
    """Losses, gradients, states and parameters, to the bit; and as one process."""
    pool, options = ranks(int(torch.Size(shape).numel())), {"zero_stage": 3, **options}
    kept = pool.run(trained, case, shape, options, "none", norm, calls, timeout_s=200)
    moved = pool.run(trained, case, shape, options, "parameters", norm, calls, timeout_s=200)
    for before, after in zip(kept, moved, strict=True):
        assert differing(after, before) == []
        counted, predicted = after["memory"]
        assert counted["device"] == counted["disk"] == 0 and counted["host"] <= 1.05 * predicted + 8192
    most, predicted = max(after["memory"][0]["host"] for after in moved), moved[0]["memory"][1]
    if options.get("recompute") != "offload":    # whose saved tensors are not of the optimizer
        assert most == pytest.approx(predicted, rel=0.05, abs=8192)
    if norm is None and calls == 1:
        expected = train_reference(CASES[case], "adamw", num_steps=3, batch_size=8)
        everything = Trained(0, [], {}, expected.parameters | moved[0]["whole"], {})
        assert moved[0]["losses"][:3] == pytest.approx(expected.losses, rel=1e-5)
        assert_same_parameters(everything.parameters, expected, 1e-4)


def fetched(recompute: str, copies: int) -> tuple[int, int, int, float]:
    """Bytes of the largest live set of fetched copies in a step, of all that are fetched, of all parameters, and of the
    first as planned."""
    case = CASES["llama"]
    args, kwargs = case.inputs(8)
    several = {"micro_batches": 4, "copies": copies} if copies > 1 else {}
    parallel = autoparallel.compile(case.build(), mesh_of(1), example_inputs=args, example_kwargs=kwargs,
                                    offload="parameters", bucket_bytes=4096, recompute=recompute, **several)
    live: list[tuple[StorageWeakRef, int]] = []
    most, every, forward, again = 0, 0, fetching.Fetches.forward, regather.begin_copies

    def counted(finish: Any) -> Any:
        nonlocal most, every
        made = [(StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes()) for x in finish()]
        live[:] = [*(one for one in live if not one[0].expired()), *made]
        most, every = max(most, sum(size for _, size in live)), every + sum(size for _, size in made)
        return finish

    def again_counted(copies: Any) -> Any:
        counted(copies.ready)
        return copies

    with patch.object(fetching.Fetches, "forward", lambda *given: counted(forward(*given))), \
            patch.object(regather, "begin_copies", lambda *given: again_counted(again(*given))):
        with torch.no_grad():
            parallel(*args, **kwargs)
        every = 0
        parallel.step(*args, **kwargs)
    assert parallel.plan.known is not None and parallel.plan.known.memory is not None
    memory = parallel.plan.known.memory
    at = [memory.kinds.index(kind) for kind in ("gathered parameters", "gradients")]
    planned = max(sum(row[kind] for kind in at) for row in memory.num_bytes)
    return most, every, sum(p.nbytes for p in parallel.parameters()), planned


@pytest.mark.ranks
@pytest.mark.parametrize(("recompute", "copies"), [
    ("none", 1), slow("full", 1), slow("none", 4), ("full", 4), slow("full", 2)])
def test_few_parameters_are_on_the_device_at_a_time(ranks: Any, recompute: str, copies: int) -> None:
    """Each is fetched at most twice for all micro-batches that run at a time."""
    (most, every, everything, planned), = ranks(1).run(fetched, recompute, copies)
    whole_blocks = recompute == "full" or copies > 1    # of which there are two
    assert 0 < most < everything * (0.9 if whole_blocks else 0.5)
    assert most <= 1.3 * planned
    assert 1.5 * everything < every / (2 if copies == 2 else 1) <= 2 * everything


def gathered_alone() -> list[int]:
    """Addresses of the memory of two tensors gathered in one bucket on one rank."""
    (axis,) = groups.bind(mesh_of(1)).values()
    made = begin_all_gathers([torch.ones(4), torch.ones(6)], axis, [(0, (4,)), (0, (6,))])()
    return [x.untyped_storage().data_ptr() for x in made]


@pytest.mark.ranks
def test_a_bucket_gathered_on_one_rank_is_in_memory_of_its_own(ranks: Any) -> None:
    """By which ZeRO-3 finds in backward what to gather again."""
    (addresses,) = ranks(1).run(gathered_alone)
    assert len(set(addresses)) == 2


def planned(devices: int = 4, cluster: str = "a100-sxm", **options: Any) -> Plan:
    return plan_of("llama", Cluster.load(cluster, num_devices=devices, software="none"), **options)


@pytest.mark.parametrize("devices", [1, 4])
def test_they_leave_the_device_in_a_plan(devices: int) -> None:
    kept, moved = (planned(devices, mesh_shape=(devices,), zero_stage=3, offload=tier)
                   for tier in ("none", "parameters"))
    assert moved.hybrid.offload == Offload("host", parameters="host") and moved.strategies == kept.strategies
    states = kept.prediction.state_bytes
    assert moved.prediction.state_bytes == 0 and moved.prediction.host_bytes == pytest.approx(states)
    assert moved.known is not None and moved.known.memory is not None
    assert "gathered parameters" in moved.known.memory.kinds
    gathers = [how for step in moved.known.redistributions for how in step.how if "gather" in how]
    assert bool(gathers) == (devices > 1)    # on one rank they would be copies in vain
    assert "parameters, gradients and optimizer states in the memory of the host" in " ".join(moved.report().split())
    assert Plan.from_json(moved.to_json()).hybrid == moved.hybrid


def test_fetches_that_compute_does_not_hide_are_counted() -> None:
    """Twice per step and parameter (forward, and backward again) over a link of 1 MB/s; over a fast one, none."""
    machine = Cluster.load("a100-sxm", num_devices=1, software="none")
    slow_link = replace(machine, host=replace(machine.host, to_device_bytes_per_s=1e6))

    def of(cluster: Cluster, tier: str) -> Any:
        return plan_of("gpt2", cluster, mesh_shape=(1,), zero_stage=3, offload=tier).prediction

    here, there, fast = of(slow_link, "host"), of(slow_link, "parameters"), of(machine, "parameters")
    count = sum(p.numel() for p in CASES["gpt2"].build().parameters())
    more = there.forward_communication_s - here.forward_communication_s
    again = there.backward_communication_s - here.backward_communication_s
    assert more == pytest.approx(4 * count / 1e6, rel=0.05)
    assert 0.8 * more < again <= 1.01 * more    # what backward does not read is not fetched again
    assert fast.forward_communication_s == pytest.approx(of(machine, "host").forward_communication_s)


@pytest.mark.slow
def test_micro_batches_at_a_time_share_what_moves() -> None:
    """Of four, parameters are fetched twice for all, and one gradient leaves."""
    machine = Cluster.load("a100-sxm", num_devices=1, software="none")
    slow_link = replace(machine, host=replace(machine.host, to_device_bytes_per_s=1e6, from_device_bytes_per_s=1e6))
    args, kwargs = CASES["gpt2"].inputs(8)
    alone, all_four, two = (autoparallel.plan(
        CASES["gpt2"].build(), slow_link, example_inputs=args, example_kwargs=kwargs, mesh_shape=(1,), zero_stage=3,
        offload="parameters", recompute="full", micro_batches=4, copies=copies).prediction for copies in (1, 4, 2))
    for direction in ("forward_communication_s", "backward_communication_s"):
        least, most, middle = (getattr(one, direction) for one in (all_four, alone, two))
        assert most == pytest.approx(4 * least, rel=0.02) and middle == pytest.approx(2 * least, rel=0.02)


def test_by_hand_and_exported() -> None:
    plan = planned(by_hand="dp=4,zero=3,offload=parameters")
    assert plan.hybrid.offload.parameters and plan.hybrid.zero_stage == 3
    assert "offload=parameters" in plan.evidence.stop_reason
    zero = json.loads(autoparallel.export_plan(plan, "deepspeed").files["ds_config.json"])["zero_optimization"]
    assert zero["offload_param"]["device"] == zero["offload_optimizer"]["device"] == "cpu"
    lost = "".join(one.what for one in autoparallel.export_plan(plan, "fsdp2").lost)
    assert "parameters, gradients and optimizer states in the host's memory" in lost
    assert planned(by_hand="dp=4,zero=3", offload="parameters").hybrid == plan.hybrid


@pytest.mark.parametrize(("options", "told"), [
    ({"zero_stage": 1, "offload": "parameters"}, "zero_stage=1: take zero_stage=3"),
    ({"pipeline_stages": 2, "micro_batches": 2, "offload": "parameters", "schedule": "zero_bubble"}, "two parts: take"),
    ({"offload": "parameters", "offload_fraction": 0.5}, "offload_fraction=0.5 is of offload='host' or 'disk'"),
    ({"by_hand": "dp=4,zero=1,offload=parameters"}, "zero_stage=1: take zero_stage=3"),
    ({"by_hand": "dp=4,offload=tape"}, "offload is 'tape'; there are"),
    ({"by_hand": "dp=4,offload=host", "offload": "disk"}, "leave one of the two out"),
])
def test_what_does_not_go_together_is_refused(options: Options, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        planned(**options)


@pytest.mark.slow
def test_published_capacities() -> None:
    """ZeRO-Offload's 10B with states and gradients on the host of one V100, ZeRO-3 Offload's 40B with parameters too;
    neither without."""
    rows = {row.name: row for row in ROWS}
    for name, zero in (("ZeRO-Offload 10B", 2), ("ZeRO-3 Offload 40B", 3)):
        row = rows[name]
        fits, room = row.plan()[0].prediction, 34.3e9 - 1.5e9
        there = replace(row, hand=f"dp=1,zero={zero},recompute=full,micro_batch=1").plan()[0].prediction
        assert fits.peak_bytes < room < there.peak_bytes and fits.host_bytes > 0


def saved_and_loaded(folder: Path) -> list[bool]:
    """A model on the meta device; checkpoints into another tier and back; a compiled program is refused."""
    case = CASES["gpt2"]
    args, kwargs = case.inputs(8)
    with pytest.raises(PlanError, match="take offload='host', or backend='eager'"):
        autoparallel.compile(case.build(), mesh_of(2), example_inputs=args, example_kwargs=kwargs,
                             offload="parameters", backend="aot_eager")
    return resumed_in_tiers(folder, "parameters", [("none", False), ("parameters", True), ("host", False)])


@pytest.mark.ranks
def test_checkpoints_and_models_without_values(ranks: Any, tmp_path: Path) -> None:
    for found in ranks(2).run(saved_and_loaded, tmp_path):
        assert found == [True, True, True, True]


def test_a_fetch_alone_is_a_copy_whose_gradient_comes_back() -> None:
    value = torch.ones(3, requires_grad=True)
    fetched = fetching.fetch(value, "host", "cpu")
    (fetched * torch.arange(3.0)).sum().backward()
    assert fetched.data_ptr() != value.data_ptr() and torch.equal(fetched, value)
    assert value.grad is not None and value.grad.tolist() == [0, 1, 2]
