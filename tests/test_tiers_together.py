"""Parameters, gradients and states in tiers of their own, on the host and on disk: equal to the bit with those of
device memory, bytes of each tier as planned, threads of steps, plans, refusals."""

from __future__ import annotations

import gc
import logging
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import autoparallel
from autoparallel.errors import InfeasibleError, InputError, PlanError
from autoparallel.planning.offloading import ON_DISK, fastest_tier
from autoparallel.planning.options import Options as PlanOptions
from autoparallel.plans import Plan
from autoparallel.runtime.offload.mapped import MappedFiles
from autoparallel.schedule.tiers import PLACES, Offload, offload_of
from cost_models import Cluster, offload
from cost_models.memory import TrainingState
from tests.support.captured import plan_of
from tests.support.offloaded import Options, Wide, check_as_one_process, differing, local, resumed_in_tiers, trained
from tests.support.ranks import mesh_of
from tests.support.tiers import slow

PLAIN = Cluster.load("a100-sxm", num_devices=4, software="none")


@pytest.mark.ranks
@pytest.mark.parametrize(("case", "shape", "tier", "options", "norm", "calls"), [
    slow("llama", (2,), "host/host/disk", {}, 0.5, 1), slow("llama", (4,), "host/host/disk", {}, 0.5, 1),
    ("gpt2", (1,), "disk/disk/disk", {"micro_batches": 4, "recompute": "full"}, None, 1),
    ("bert", (2, 2), "device/host/disk", {"zero_stage": 1, "micro_batches": 2}, 0.5, 2),
    slow("llama", (2, 2), "disk/disk/disk", {"recompute": "full"}, 0.5, 2),
    slow("gpt2", (2,), "host/disk/disk", {"micro_batches": 2, "reduce_dtype": "float32"}, None, 1),
    slow("mixtral", (2,), "host/disk/disk", {}, None, 2),
    slow("gpt2", (4,), "device/host/disk", {"zero_stage": 0}, None, 1),
    slow("gpt2", (4,), "device/host/disk", {"zero_stage": 2, "micro_batches": 8}, None, 1),
    slow("llama", (4,), "device/host/disk", {"zero_stage": 3, "recompute": "selective"}, 0.1, 1),
    slow("bert", (2,), "host/host/disk", {"micro_batches": 8, "recompute": "selective"}, 0.1, 2),
    slow("mixtral", (1,), "host/host/disk", {"recompute": "full"}, 0.5, 1),
    slow("bert", (4,), "disk/disk/disk", {"micro_batches": 2}, None, 1),
])
def test_equal_to_all_on_the_device(ranks: Any, tmp_path: Path, case: str, shape: tuple[int, ...], tier: str,
                                    options: Options, norm: float | None, calls: int) -> None:
    """Losses, gradients, states and parameters, to the bit; and as one process. Bytes of each tier as predicted."""
    pool = ranks(int(torch.Size(shape).numel()))
    options = {"zero_stage": 3, **options}
    kept = pool.run(trained, case, shape, options, "none", norm, calls, timeout_s=200)
    moved = pool.run(trained, case, shape, {**options, "disk_path": tmp_path}, tier, norm, calls, timeout_s=200)
    for before, after in zip(kept, moved, strict=True):
        assert differing(after, before) == []
        assert after["memory"][0]["device"] == 0 and after["memory"][0]["host"] > 0
    for name, at in (("memory", "host"), ("disk", "disk")):
        most, planned = max(after["memory"][0][at] for after in moved), moved[0][name][1]
        rooms = 4096 * 2 * len(moved[0]["parameters"]) if at == "disk" and tier.count("disk") > 1 else 0
        assert planned > 0 and planned <= most * 1.05 + 3 * 8192 and most <= 1.05 * planned + 3 * 8192 + rooms
    if norm is None and calls == 1:
        check_as_one_process(case, moved[0])
    assert list(tmp_path.iterdir()) == []


def counted(tier: str, folder: Path, micro_batches: int) -> tuple[dict[str, int], float, float, int]:
    """Bytes by tier after two steps, those planned on the host and on disk, and bytes of parameters, gradients and
    buffers that are in ordinary memory."""
    x = torch.randn(8, 192)
    parallel = autoparallel.compile(Wide(), mesh_of(2), example_inputs=(x,), zero_stage=3, offload=tier,
                                    disk_path=folder, micro_batches=micro_batches)
    optimizer: Any = parallel.optimizer(torch.optim.AdamW)
    for _ in range(2):
        parallel.step(x)
        in_files = parallel._state.files
        optimizer.step()
        there = [local_memory(p) for p in parallel.parameters()] + [local_memory(p.grad) for p in parallel.parameters()]
        optimizer.zero_grad()
    p = parallel.plan.prediction
    assert in_files is None or in_files.num_bytes > 0
    return optimizer.memory(), p.host_bytes, p.disk_bytes, sum(there)


def local_memory(value: Any) -> int:
    """Bytes of a shard that are no part of a mapped file, by the system's own list."""
    shard = value._local_tensor
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= shard.data_ptr() < end and line.endswith("(deleted)"):    # a file without a name
            return 0
    return int(shard.nbytes)


@pytest.mark.ranks
@pytest.mark.parametrize(("tier", "micro_batches", "kept"), [
    slow("disk/disk/disk", 1, 0), ("disk/disk/disk", 4, 0), ("host/disk/disk", 2, 1), ("host/host/disk", 1, 2)])
def test_bytes_of_each_tier(ranks: Any, tmp_path: Path, tier: str, micro_batches: int, kept: int) -> None:
    """Within 5 % of the plan's; of what is on disk nothing is in the process's own memory. ``kept``: how many of
    parameters and gradients are."""
    each = 4 * (192 * 192 + 192) * 4 / 2
    for memory, host, disk, ordinary in ranks(2).run(counted, tier, tmp_path, micro_batches):
        assert memory["disk"] == pytest.approx(disk, rel=0.05) == pytest.approx((4 - kept) * each, rel=0.05)
        assert memory["host"] == pytest.approx(host, rel=0.05) == pytest.approx((kept + 6) * each, rel=0.05)    # tiles
        assert memory["device"] == 0 and ordinary == pytest.approx(kept * each, rel=0.01)


def threads_seen(count: int | None) -> tuple[int, int, int, str]:
    """Threads within a step, after it and as planned; the warning."""
    torch.set_num_threads(1)
    seen: list[int] = []

    class Watched(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            seen.append(torch.get_num_threads())
            return super().step(closure)

    x, told = torch.randn(4, 192), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autoparallel").addHandler(handler)
    parallel = autoparallel.compile(Wide(), mesh_of(1), example_inputs=(x,), offload="host")
    with patch("autoparallel.runtime.offload.states.steps_shards", return_value=True), \
            patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        optimizer: Any = parallel.optimizer(Watched, threads=count)
    parallel.step(x)
    optimizer.step()
    logging.getLogger("autoparallel").removeHandler(handler)
    with pytest.raises(InputError, match="threads is 0: give a whole number"):
        parallel.optimizer(torch.optim.AdamW, threads=0)
    return seen[-1], torch.get_num_threads(), optimizer.threads, "".join(told)


@pytest.mark.ranks
@pytest.mark.parametrize("count", [None, 3, 1])
def test_threads_of_a_step_are_the_cores_of_the_host(ranks: Any, count: int | None) -> None:
    """As under torchrun, with one thread of torch's."""
    cores = len(os.sched_getaffinity(0))
    for within, after, planned, told in ranks(1).run(threads_seen, count):
        assert within == planned == (count or cores) and after == 1
        assert ("OMP_NUM_THREADS=1" in told and "threads=1" in told) == (count is None and cores > 1)


def stepped_with(threads: int) -> list[Tensor]:
    x = torch.linspace(-1, 1, 4 * 192).view(4, 192)
    parallel = autoparallel.compile(Wide(), mesh_of(1), example_inputs=(x,), offload="host")
    optimizer = parallel.optimizer(torch.optim.AdamW, threads=threads, lr=0.1)
    for _ in range(3):
        parallel.step(x)
        optimizer.step()
        optimizer.zero_grad()
    return [local(p) for p in parallel.parameters()]


@pytest.mark.ranks
def test_threads_do_not_change_numbers(ranks: Any) -> None:
    one, three = (ranks(1).run(stepped_with, count)[0] for count in (1, 3))
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


def test_rooms_of_files_are_used_again(tmp_path: Path) -> None:
    files = MappedFiles(tmp_path, [4096, 100, 0])
    assert files.num_bytes == 8192 and list(tmp_path.iterdir()) == []
    first, second = files.copy_of(torch.arange(25.0)), files.empty(torch.Size([2, 3]), torch.bfloat16)
    assert files.num_bytes == 8192 and first.tolist() == list(map(float, range(25)))
    again = first.view(5, 5)
    assert files.holds(again[1:]) and files.holds(second) and not files.holds(torch.ones(3))
    del first
    third = files.empty(torch.Size([10]), torch.float32)    # no room: ``again`` has it still
    assert files.num_bytes == 3 * 4096 and again[4, 4] == 24
    del again, second
    gc.collect()
    others = [files.empty(torch.Size([7]), torch.int64) for _ in range(2)]
    assert files.num_bytes == 3 * 4096 and len({x.data_ptr() for x in (third, *others)}) == 3
    assert files.empty(torch.Size([0, 4]), torch.float32).shape == (0, 4)
    with pytest.raises(InputError, match="has no room for parameters and gradients of"):
        MappedFiles(tmp_path, [2**62])


def refused_early(folder: Path) -> list[str]:
    """Errors of a full disk on one rank, and of limits."""
    x, found, allocate = torch.ones(4, 192), list[str](), os.posix_fallocate

    def full(*given: Any) -> None:
        if torch.distributed.get_rank() == 1:
            raise OSError(28, "No space left on device")
        allocate(*given)

    def made(**more: Any) -> Any:
        return autoparallel.compile(Wide(), mesh_of(2), example_inputs=(x,), offload="disk/disk/disk",
                                    disk_path=folder, **more)

    with patch("os.posix_fallocate", full), pytest.raises(InputError) as error:
        made()
    found.append(str(error.value))
    for more in ({"disk_limit_bytes": 1e5}, {"host_memory_limit_bytes": 100}):
        with pytest.raises((InfeasibleError, InputError)) as refused:
            made(**more).optimizer(torch.optim.AdamW)
        found.append(str(refused.value))
    return found


@pytest.mark.ranks
def test_refused_before_training(ranks: Any, tmp_path: Path) -> None:
    for full, disk, host in ranks(2).run(refused_early, tmp_path):
        assert "No space left on device" in full and "no room for parameters and gradients" in full
        assert "disk_limit_bytes is 1e+05" in disk and "host_memory_limit_bytes is 100" in host
    assert list(tmp_path.iterdir()) == []


def planned(cluster: Cluster = PLAIN, **options: Any) -> Plan:
    return plan_of("llama", cluster, **options)


@pytest.mark.parametrize("tier", ["host/host/disk", *(slow(tier) for tier in PLACES if tier.count("/"))])
def test_a_plan_counts_each_tier(tier: str) -> None:
    """Bytes of each tier, and seconds of the step by hand."""
    kept, moved = (planned(mesh_shape=(4,), zero_stage=3, offload=place) for place in ("none", tier))
    each, away = kept.prediction.state_bytes / 4, offload_of(tier)
    amount = {"parameters": each, "gradients": each, "optimizer states": 2 * each}
    assert moved.hybrid.offload == away and away.place == tier
    assert moved.prediction.disk_bytes == pytest.approx(sum(amount[what] for what in away.in_tier("disk")), rel=0.01)
    tiles = 3 * 2 * each
    assert moved.prediction.host_bytes == pytest.approx(
        sum(amount[what] for what in away.in_tier("host")) + tiles, rel=0.05, abs=3 * 2 * 4096)
    step = offload.host_step(each / 4, "float32", "adamw", PLAIN, True, away.moves_gradients, away.moves_parameters,
                             away.in_tier("disk"))
    assert moved.prediction.optimizer_s == pytest.approx(float(step.total_s), rel=0.02)
    text = " ".join(moved.report().split())
    assert all(what in text for what in ("optimizer states on disk", *(
        ["gradients in the memory of the host"] if away.gradients == "host" else [])))
    assert Plan.from_json(moved.to_json()).hybrid == moved.hybrid
    assert planned(by_hand=f"dp=4,zero=3,offload={tier}").hybrid.offload == away
    lost = "".join(one.what for one in autoparallel.export_plan(planned(by_hand=f"dp=4,zero=3,offload={tier}"),
                                                                "deepspeed").lost)
    assert "optimizer states on disk" in lost


def test_files_are_read_and_written_at_the_rates_of_mapped_ones() -> None:
    """In float32 without a master: 4 bytes of a gradient and of a parameter read beside 8 of states, 4 written."""
    host, count = PLAIN.host, 2**30
    read, written = (2 * rate for rate in (host.disk_read_bytes_per_s, host.disk_write_bytes_per_s))
    step = offload.host_step(count, "float32", "adamw", PLAIN, True, True, True, ("parameters", "gradients"))
    assert step.fetch_s == pytest.approx(count * (8 + 8 / offload.MAPPED_READ) / read)
    assert step.put_s == pytest.approx(count * (8 + 4 / offload.MAPPED_WRITE) / written)
    there = float(offload.fetch_s(1e9, PLAIN)) + 1e9 / (offload.MAPPED_READ * read)
    assert offload.fetch_s(1e9, PLAIN, on_disk=True) == pytest.approx(there)
    once, added = (float(offload.gradients_s(1e9, PLAIN, adds, on_disk=True)) for adds in (False, True))
    assert once == pytest.approx(float(offload.gradients_s(1e9, PLAIN)) + 1e9 / (offload.MAPPED_WRITE * written))
    assert added > once + 1e9 / (offload.MAPPED_READ * read) * 0.99


one_plan = cache(lambda: planned(mesh_shape=(4,)))


@pytest.mark.parametrize(("host_bytes", "disk", "tier"), [
    (1e9, True, "host"), (20.0, True, "disk"), (20.0, False, ""), (1e9, False, "host")])
def test_tiers_that_cannot_hold_the_state_are_not_searched(host_bytes: float, disk: bool, tier: str) -> None:
    """Of 400 bytes of states, 100 a device, on devices of 60: only where they fit is a plan made."""
    plan, tried = one_plan(), list[str]()
    cluster = replace(PLAIN, host=replace(PLAIN.host, disk_read_bytes_per_s=1e9 * disk, memory_bytes=4 * host_bytes))

    def make(options: PlanOptions) -> Plan:
        tried.append(str(options.offload))
        if options.offload in ("none", "device/host/disk"):
            raise InfeasibleError("too much")
        return replace(plan, hybrid=replace(plan.hybrid, offload=options.tier, zero_stage=3))

    options, state = PlanOptions(offload="auto", memory_limit_bytes=60.0), TrainingState(100.0, 100.0, 400.0)
    if not tier:
        with pytest.raises(InfeasibleError, match=r"need 150 bytes of the device .*need 125 bytes of the host"):
            fastest_tier(options, cluster, make, lambda chosen: state)
        assert tried == []
        return
    assert fastest_tier(options, cluster, make, lambda chosen: state).hybrid.offload.place == tier
    # with a part of the states on the host too much stays on the device
    assert tried == (["host"] if tier == "host" else ["disk", "disk/disk/disk"])


def test_what_does_not_go_together_is_refused() -> None:
    assert ON_DISK[0] == "disk" and len({offload_of(place) for place in PLACES}) == len(PLACES)
    for wrong, told in (
            ({"states": "host", "parameters": "disk"}, "do not go together: take one of"),
            ({"states": "disk", "gradients": "host", "fraction": 0.5}, "leave offload_fraction out"),
            ({"states": "disk", "gradients": "tape"}, "unknown tier 'tape' of gradients")):
        with pytest.raises(PlanError, match=told):
            Offload(**wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="unknown offload 'disk/host/disk'; there are"):
        planned(offload="disk/host/disk")
    with pytest.raises(PlanError, match=r"offload='host/host/disk' fetches each parameter.*take zero_stage=3"):
        planned(offload="host/host/disk", zero_stage=1)


def saved_and_loaded(folder: Path) -> list[bool]:
    """From disk to memory and back by a checkpoint; a model on the meta device."""
    others = [("none", False), ("disk/disk/disk", True), ("host/host/disk", False)]
    return resumed_in_tiers(folder, "disk/disk/disk", others)


@pytest.mark.ranks
def test_checkpoints_and_models_without_values(ranks: Any, tmp_path: Path) -> None:
    for found in ranks(2).run(saved_and_loaded, tmp_path):
        assert found == [True, True, True, True]
