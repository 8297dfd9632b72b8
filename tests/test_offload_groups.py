"""Tiers of training state by groups of parameters: equal to the bit with all in device memory, bytes of each tier as
planned, prices, the choice of blocks, refusals."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autoparallel
from autoparallel.errors import InfeasibleError, InputError, PlanError
from autoparallel.plans import Plan
from autoparallel.schedule.tiers import offload_of
from cost_models import Cluster, offload
from tests.support.captured import plan_of
from tests.support.models import CASES
from tests.support.offloaded import Net, Options, Wide, check_as_one_process, differing, in_file, local, trained
from tests.support.ranks import mesh_of
from tests.support.reference import gathered
from tests.support.tiers import slow

PLAIN = Cluster.load("a100-sxm", num_devices=4, software="none")
STATES = {"model.embed*": "disk", "model.layers.0.*": "host"}
BLOCK = {"*layers.0.*": "parameters", "*embed*": "disk", "*": "host"}


def planned(cluster: Cluster = PLAIN, **options: Any) -> Plan:
    return plan_of("llama", cluster, **{"mesh_shape": (4,), **options})


def elements(pattern: str) -> int:
    return sum(p.numel() for name, p in CASES["llama"].build().named_parameters() if name.startswith(pattern))


@pytest.mark.parametrize("tier", [slow("host"), "parameters", slow("disk/disk/disk")])
def test_one_tier_for_all_is_the_group_of_all(tier: str) -> None:
    """However the names are divided, prices are those of one tier."""
    whole = planned(zero_stage=3, offload=tier)
    assert planned(zero_stage=3, offload={"*": tier}).hybrid.offload == whole.hybrid.offload == offload_of(tier)
    parts = planned(zero_stage=3, offload={"model.layers.1*": tier, "model*": tier, "lm_head*": tier})
    assert parts.strategies == whole.strategies
    for name in ("step_s", "optimizer_s", "peak_bytes", "state_bytes", "host_bytes", "disk_bytes"):
        assert getattr(parts.prediction, name) == pytest.approx(getattr(whole.prediction, name)), (tier, name)


def test_each_group_has_the_price_of_its_tier() -> None:
    """Bytes of every tier, and the seconds of the step, by hand: AdamW in float32 on four devices, ZeRO-1."""
    kept, plan = planned(zero_stage=1), planned(zero_stage=1, offload=STATES)
    assert plan.strategies == kept.strategies
    there, far = elements("model.layers.0.") / 4, elements("model.embed") / 4
    p = plan.prediction
    assert p.disk_bytes == pytest.approx(8 * far, rel=0.01)
    assert p.host_bytes == pytest.approx(12 * there + 3 * 8 * far, rel=0.05, abs=3 * 2 * 4096)    # with three tiles
    assert kept.prediction.state_bytes - p.state_bytes == pytest.approx(12 * there + 8 * far, rel=0.01)
    rest = kept.prediction.optimizer_s * (1 - 4 * (there + far) * 16 / kept.prediction.state_bytes / 4)
    seconds = (offload.host_step(there, "float32", "adamw", PLAIN, False, True).total_s
               + offload.host_step(far, "float32", "adamw", PLAIN, True).total_s)
    assert p.optimizer_s == pytest.approx(float(seconds) + rest, rel=0.02)
    text = " ".join(plan.report().split())
    assert "of model.embed*: optimizer states on disk; of model.layers.0.*: gradients and optimizer states in the " \
        "memory of the host" in text
    again = Plan.from_json(plan.to_json())
    assert again.hybrid == plan.hybrid and again.hybrid.offload.of("model.layers.0.mlp.up_proj.weight").place == "host"
    assert again.hybrid.offload.place == STATES


def test_only_what_moves_is_exposed() -> None:
    """Over a slow link: the fetches of one of two blocks, its gradients, and nothing of the other's."""
    slow_link = replace(PLAIN, num_devices=1, host=replace(
        PLAIN.host, to_device_bytes_per_s=1e6, from_device_bytes_per_s=1e6))
    alone: dict[str, Any] = {"cluster": slow_link, "mesh_shape": (1,), "zero_stage": 3}
    kept, whole = planned(**alone).prediction, planned(**alone, offload="parameters").prediction
    some = planned(**alone, offload={"model.layers.0.*": "parameters"}).prediction
    share = elements("model.layers.0.") / elements("")
    assert 4 * elements("model.layers.0.") / 1e6 == pytest.approx(
        some.forward_communication_s - kept.forward_communication_s, rel=0.05)
    assert some.forward_communication_s - kept.forward_communication_s == pytest.approx(
        share * (whole.forward_communication_s - kept.forward_communication_s), rel=0.05)
    assert some.host_bytes == pytest.approx(16 * elements("model.layers.0."), rel=0.01)
    assert 0 < kept.state_bytes - some.state_bytes == pytest.approx(some.host_bytes, rel=0.01)


@pytest.mark.ranks
@pytest.mark.parametrize(("case", "shape", "away", "options", "norm", "calls"), [
    slow("llama", (2,), STATES, {"zero_stage": 1}, 0.5, 1), slow("llama", (4,), STATES, {"zero_stage": 1}, 0.5, 1),
    slow("llama", (2,), BLOCK, {"zero_stage": 3, "micro_batches": 2}, None, 1),
    ("gpt2", (2, 2), {"*h.0.*": "device/host/disk", "*wte*": "host"}, {"zero_stage": 2, "micro_batches": 2}, 0.5, 2),
    ("gpt2", (1,), {"*h.1.*": "disk/disk/disk", "*h.0.mlp*": "host/disk/disk"}, {"zero_stage": 3}, None, 1),
    slow("llama", (4,), {"*layers.0.*": "host/host/disk", "*": "host"}, {"zero_stage": 3, "recompute": "full"}, 0.5, 2),
    slow("gpt2", (2, 2), {"*h.0.*": "host", "*wte*": "disk"},
         {"pipeline_stages": 2, "micro_batches": 4, "zero_stage": 1}, 0.5, 1),
    slow("bert", (4,), {"*layer.0.*": "disk", "*embed*": "host"}, {"zero_stage": 0}, None, 1),
    slow("bert", (2,), {"*layer.0.*": "host"}, {"zero_stage": 2, "micro_batches": 4, "reduce_dtype": "float32"},
         0.1, 2),
    slow("mixtral", (4,), {"*experts*": "parameters"}, {"zero_stage": 3}, None, 1),
])
def test_equal_to_all_on_the_device(ranks: Any, tmp_path: Path, case: str, shape: tuple[int, ...], away: Options,
                                    options: Options, norm: float | None, calls: int) -> None:
    """Losses, gradients, states and parameters, to the bit; and as one process. Bytes of each tier as predicted."""
    pool = ranks(int(torch.Size(shape).numel()))
    kept = pool.run(trained, case, shape, options, "none", norm, calls, timeout_s=200)
    where = {"disk_path": tmp_path} if any("disk" in tier for tier in away.values()) else {}
    moved = pool.run(trained, case, shape, {**options, **where}, away, norm, calls, timeout_s=200)
    for before, after in zip(kept, moved, strict=True):
        assert differing(after, before) == []
    for name, at in (("memory", "host"), ("disk", "disk")):
        most, predicted = max(after["memory"][0][at] for after in moved), moved[0][name][1]
        rooms = 4096 * 2 * len(moved[0]["parameters"]) if at == "disk" else 0    # of mapped files, a block each
        assert 0.95 * predicted - 2 * 4096 <= most <= 1.05 * predicted + 2 * 4096 + rooms
        assert (predicted > 0) == (at == "host" or any("disk" in tier for tier in away.values()))    # tiles are there
    if norm is None and calls == 1:
        check_as_one_process(case, moved[0])
    assert list(tmp_path.iterdir()) == []


GROUPS = {"layers.0.*": "parameters", "layers.1.*": "disk", "layers.2.*": "disk/disk/disk"}
X = torch.linspace(-1, 1, 8 * 192).view(8, 192)


def wide(folder: Path, groups: Any = GROUPS, **more: Any) -> Any:
    return autoparallel.compile(Wide(), mesh_of(2), example_inputs=(X,), zero_stage=3, offload=groups,
                                disk_path=folder, **more)


def counted(folder: Path, micro_batches: int) -> tuple[dict[str, int], Any, dict[str, tuple[bool, bool]]]:
    """Bytes by tier after two steps, the prediction, and by layer whether its weight and its gradient are in a file."""
    parallel = wide(folder, micro_batches=micro_batches)
    optimizer: Any = parallel.optimizer(torch.optim.AdamW)
    for _ in range(2):
        parallel.step(X)
        optimizer.step()
        where = {name: (in_file(p), in_file(p.grad)) for name, p in parallel.named_parameters() if "weight" in name}
        optimizer.zero_grad()
    return optimizer.memory(), parallel.plan.prediction, where


@pytest.mark.ranks
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_bytes_of_each_tier(ranks: Any, tmp_path: Path, micro_batches: int) -> None:
    """Within 5 % of the plan's. Of four equal layers one has all on the host, one its states on disk, one all there."""
    each = 4 * (192 * 192 + 192) / 2
    for memory, p, where in ranks(2).run(counted, tmp_path, micro_batches):
        assert memory["disk"] == pytest.approx(p.disk_bytes, rel=0.05) == pytest.approx((2 + 4) * each, rel=0.05)
        tiles = 3 * 2 * 2 * each
        assert memory["host"] == pytest.approx(p.host_bytes, rel=0.05) == pytest.approx(4 * each + tiles, rel=0.05)
        assert memory["device"] == pytest.approx(2 * each, rel=0.05, abs=2 * 4096)    # whole blocks
        assert p.state_bytes == pytest.approx((2 + 4) * each, rel=0.05)
        assert where == {"layers.0.weight": (False, False), "layers.1.weight": (False, False),
                         "layers.2.weight": (True, True), "layers.3.weight": (False, False)}
    assert list(tmp_path.iterdir()) == []


def stepped(parallel: Any, optimizer: torch.optim.Optimizer, times: int) -> None:
    for _ in range(times):
        parallel.step(X)
        optimizer.step()
        optimizer.zero_grad()


def resumed(folder: Path, groups: Any, then: Any) -> list[Tensor]:
    """Parameters after four steps; and after two of these from a checkpoint, under other tiers."""
    parallel = wide(folder, groups) if groups != "none" else wide(folder, "auto")
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=0.01, fused=True)
    stepped(parallel, optimizer, 2)
    parallel.save(folder / "runs", optimizer, step=2)
    other = wide(folder, then)
    again = other.optimizer(torch.optim.AdamW, lr=0.5, fused=True)
    other.load(folder / "runs", again)
    found = []
    for one, steps in ((parallel, optimizer), (other, again)):
        stepped(one, steps, 2)
        found.append(torch.cat([value.flatten() for value in gathered(one.named_parameters()).values()]))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(("groups", "then"), [
    (GROUPS, {"layers.3.*": "disk", "layers.1.*": "parameters"}), slow("none", GROUPS),
    slow(GROUPS, "disk/disk/disk")])
def test_checkpoints_are_for_any_groups(ranks: Any, tmp_path: Path, groups: Any, then: Any) -> None:
    for whole, found in ranks(2).run(resumed, tmp_path, groups, then):
        assert torch.equal(whole, found)


def four_steps(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    """The last loss of four steps, the last two of which step the second layer too."""
    for number in range(4):
        if number == 2:
            optimizer.add_param_group({"params": list(model.b.parameters()), "lr": 0.02})
        loss = model(x + number)
        loss.backward()
        optimizer.step()
        model.zero_grad()
    return float(loss)


def loops(folder: Path) -> list[Any]:
    """Of a module with `Net`'s layers in tiers of their own: the losses of a copy and the original trained alike, the
    bytes of both, a group added later, and what a plain optimizer of each layer says."""
    def net() -> Any:
        return autoparallel.compile(Net(), mesh_of(2), example_inputs=(x,), zero_stage=1, disk_path=folder,
                                    offload={"a.*": "device/host/disk"})

    x = torch.linspace(-1, 1, 64).view(8, 8)
    parallel = net()
    other = copy.deepcopy(parallel)
    made = [one.optimizer(torch.optim.AdamW, list(one.a.parameters()), lr=0.1) for one in (parallel, other)]
    losses = [four_steps(one, optimizer, x) for one, optimizer in zip((parallel, other), made, strict=True)]
    plain = net()
    plain(x).backward()
    torch.optim.AdamW(plain.b.parameters()).step()
    with pytest.raises(InputError, match="keeps optimizer states on the disk"):
        torch.optim.AdamW(plain.parameters()).step()
    states = made[0].state_dict()["state"]
    return [losses, [one.memory() for one in made], gathered(parallel.named_parameters()),
            [local(states[number]["exp_avg"]).numel() for number in range(4)], [p.numel() // 2 for p in (
                *parallel.a.parameters(), *parallel.b.parameters())]]


@pytest.mark.ranks
def test_groups_are_added_and_modules_copied(ranks: Any, tmp_path: Path) -> None:
    """As torch's optimizer in one process; a layer that stays on the device may have a plain optimizer."""
    model, x = Net(), torch.linspace(-1, 1, 64).view(8, 8)
    optimizer = torch.optim.AdamW(model.a.parameters(), lr=0.1)
    loss = four_steps(model, optimizer, x)
    for (mine, theirs), (memory, again), whole, kept, expected in ranks(2).run(loops, tmp_path):
        assert mine == theirs == pytest.approx(loss, rel=1e-5) and memory == again
        assert memory["device"] > 0 and memory["disk"] > 0 and kept == expected
        for name, value in model.named_parameters():
            torch.testing.assert_close(whole[name], value.detach(), rtol=1e-5, atol=1e-6)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("away", "told"), [
    ({"embed": "host"}, "no parameter's name matches 'embed'; of .* there are .*: write '\\*' for any letters"),
    ({"model.*": "tape"}, "unknown offload 'tape' of 'model.\\*'; there are \\['none', 'host'"),
    ({"model.*": "auto"}, "unknown offload 'auto' of"),
    ({}, "empty mapping: give tiers by patterns of names"),
    ({3: "host"}, "3 is no pattern of names"),
    ({"*": "host", "model.*": "disk"}, "the first pattern that matches holds: give it last"),
    ({"model.*": "host", "model.layers.*": "disk"}, "patterns before 'model.layers.\\*' have all parameters"),
])
def test_what_is_no_group_is_refused(away: Any, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        planned(offload=away)


def test_a_tied_parameter_has_one_name() -> None:
    with pytest.raises(PlanError, match=r"'lm_head\*' matches is known as transformer\.wte\.weight, to which"):
        plan_of("gpt2", PLAIN, offload={"lm_head*": "host"})


@pytest.mark.parametrize(("options", "told"), [
    ({"zero_stage": 1, "offload": {"model.layers.0.*": "parameters"}}, "zero_stage=1: take zero_stage=3"),
    ({"offload": {"model.layers.0.*": "host"}, "offload_fraction": 0.5}, "offload_fraction=0.5 is of offload='host'"),
    ({"mesh_shape": None, "by_hand": "dp=4,zero=3,offload=embed*=disk,lm_head*=host"}, "as the option beside it"),
    ({"mesh_shape": None, "by_hand": {"dp": 4, "offload": {"*": "host"}}}, "as the option beside it"),
    ({"pipeline_stages": 2, "micro_batches": 2, "offload": {"model.layers.0.*": "parameters"}}, "2 pipeline stages"),
])
def test_what_does_not_go_together_is_refused(options: Options, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        planned(**options)


def test_a_limit_counts_all_groups() -> None:
    with pytest.raises(InfeasibleError, match=r"embed\*': 'disk'.*needs .* bytes of disk.*disk_limit_bytes is 10"):
        planned(offload=STATES, disk_limit_bytes=10, time_limit_s=0.1)
    small = planned(offload=STATES, host_memory_limit_bytes=2e5)
    assert small.hybrid.offload.tile_bytes < offload_of("disk").tile_bytes
    assert all(one.tile_bytes == small.hybrid.offload.tile_bytes for one in small.hybrid.offload.each)


@pytest.mark.slow
def test_by_hand_joint_and_exported() -> None:
    """Beside a plan by hand; in a joint search; files of others do not have it, and say so."""
    plan = planned(mesh_shape=None, by_hand="dp=4,zero=3", offload={"model.layers.0.*": "parameters"})
    assert plan.hybrid.offload.place == {"model.layers.0.*": "parameters"} and plan.hybrid.zero_stage == 3
    for to in ("deepspeed", "fsdp2"):
        lost = "".join(one.what for one in autoparallel.export_plan(plan, to).lost)
        assert "of model.layers.0.*: parameters, gradients and optimizer states in the host's memory" in lost
    zero = json.loads(autoparallel.export_plan(plan, "deepspeed").files["ds_config.json"])["zero_optimization"]
    assert "offload_param" not in zero and "offload_optimizer" not in zero
    joint = planned(mesh_shape=None, joint=True, offload=STATES, time_limit_s=0.1)
    assert joint.hybrid.offload == offload_of(STATES) and joint.prediction.disk_bytes > 0
