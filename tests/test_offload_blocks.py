"""offload="auto" with as few blocks outside of the device as memory requires; groups of tiers in searches, `fit`,
`replan` and on the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import autoparallel
from autoparallel.capture import capture
from autoparallel.cli import app
from autoparallel.errors import InfeasibleError, PlanError
from autoparallel.planning.offloading import fastest_tier
from autoparallel.planning.options import Options
from autoparallel.planning.reduced_model import reduced_model
from autoparallel.plans import Plan
from autoparallel.schedule.tiers import ON_DEVICE, offload_of
from cost_models import Cluster
from tests.support.ranks import mesh_of

ONE = Cluster.load("a100-sxm", num_devices=1, software="none")
SLOW = replace(ONE.host, to_device_bytes_per_s=1e8, from_device_bytes_per_s=1e8)
BLOCKS = tuple(f"layers.{number}" for number in range(8))


class Deep(nn.Module):
    """Eight equal blocks."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def planned(cluster: Cluster = ONE, **options: Any) -> Plan:
    with torch.device("meta"):
        return autoparallel.plan(Deep(), cluster, example_inputs=(torch.empty(64, 256),), **options)


plan_of_one = cache(lambda: planned(mesh_shape=(1,)))


def away(options: Options) -> float:
    """How many blocks' parameters leave the device."""
    if isinstance(options.offload, Mapping):
        return sum(place == "parameters" for place in options.offload.values())
    return 9 if options.offload == "parameters" else -1


@pytest.mark.parametrize(("fit", "tried", "found"), [
    (1, [9, 4, 2], 2), (3, [9, 4, 2], 4), (5, [9, 4, 6], 6), (7, [9, 4, 6], 9), (10, [9], 0)])
def test_as_few_blocks_leave_as_memory_requires(fit: int, tried: list[int], found: int) -> None:
    """By bisection of quarters of eight blocks, then all parameters. ``fit``: the least number with which a plan fits;
    each block more takes longer."""
    made = list[float]()

    def make(options: Options) -> Plan:
        count = away(options)
        if count > 0:
            made.append(count)
        if count < fit:
            raise InfeasibleError("too much")
        plan = plan_of_one()
        return replace(plan, hybrid=replace(plan.hybrid, offload=options.tier, zero_stage=3),
                       prediction=replace(plan.prediction, forward_s=1 + count))

    options = Options(offload="auto", tiers=("host", "parameters"))
    if not found:
        with pytest.raises(InfeasibleError):
            fastest_tier(options, ONE, make, blocks=BLOCKS)
    else:
        chosen = fastest_tier(options, ONE, make, blocks=BLOCKS).hybrid.offload
        named = "parameters" if found == 9 else {**{f"{path}.*": "parameters" for path in BLOCKS[:found]}, "*": "host"}
        assert chosen.place == named
    assert made == tried


def test_a_slower_plan_of_some_blocks_is_not_taken() -> None:
    def make(options: Options) -> Plan:
        count = away(options)
        if count < 0:
            raise InfeasibleError("too much")
        plan = plan_of_one()
        return replace(plan, hybrid=replace(plan.hybrid, offload=options.tier, zero_stage=3),
                       prediction=replace(plan.prediction, forward_s=10.0 - count))

    assert fastest_tier(Options(offload="auto"), ONE, make, blocks=BLOCKS).hybrid.offload == offload_of("parameters")


@pytest.mark.slow
@pytest.mark.parametrize("joint", [False, True])
def test_auto_moves_some_blocks_over_a_slow_link(joint: bool) -> None:
    """Where fetches are what takes long: the plan fits, and is no slower than with all parameters on the host."""
    link = replace(ONE, host=SLOW)
    fixed: dict[str, Any] = {"cluster": link, "joint": joint, "zero_stage": 3, "recompute": "none", "micro_batches": 1,
                             "bucket_bytes": 2**16, "time_limit_s": 4.0, **({} if joint else {"mesh_shape": (1,)})}
    whole, host = planned(**fixed, offload="parameters"), planned(**fixed, offload="host")
    limit = (whole.prediction.peak_bytes + host.prediction.peak_bytes) / 2
    assert whole.prediction.peak_bytes < limit < host.prediction.peak_bytes
    found = planned(**fixed, offload="auto", memory_limit_bytes=limit)
    assert found.prediction.peak_bytes <= limit and found.prediction.step_s < whole.prediction.step_s
    groups = found.hybrid.offload.groups
    assert 2 <= len(groups) <= 6 and groups == tuple((f"{path}.*", "parameters") for path in BLOCKS[:len(groups)])
    with pytest.raises(InfeasibleError):
        planned(**fixed, offload={**{f"{path}.*": "parameters" for path in BLOCKS[:len(groups) - 2]}, "*": "host"},
                memory_limit_bytes=limit)


def test_blocks_stand_for_others_in_the_same_tiers() -> None:
    """In the model of reduced depth that a joint search estimates; the first of eight blocks is unlike the others."""
    graph = capture(Deep(), (torch.empty(4, 256),), {})
    some = offload_of({f"layers.{number}.*": "parameters" for number in range(4)})
    whole, parts = reduced_model(graph), reduced_model(graph, some)
    assert len(list(whole.graph.of_kind("parameter"))) == 2 * 4 and len(list(parts.graph.of_kind("parameter"))) == 2 * 5
    counted = {node.path: parts.stands_for[node.name] for node in parts.graph.of_kind("parameter")}
    assert {path: n for path, n in counted.items() if "weight" in path} == {
        "layers.0.weight": 1, "layers.1.weight": 1, "layers.2.weight": 2, "layers.4.weight": 3, "layers.7.weight": 1}
    mixed = offload_of({f"layers.{number}.*": "host" for number in (2, 5)})
    kept = [node.path for node in reduced_model(graph, mixed).graph.of_kind("parameter") if "weight" in node.path]
    assert kept == [f"layers.{number}.weight" for number in (0, 1, 2, 3, 5, 6, 7)]


def test_fit_takes_groups() -> None:
    """Of 50 MB of training state for 12.6 MB of parameters."""
    def deep(batch: int) -> Any:
        with torch.device("meta"):
            return Deep(512), (torch.empty(batch, 512),), {}

    groups = {f"layers.{number}.*": "parameters" for number in range(6)}
    found = autoparallel.fit(deep, ONE, memory_limit_bytes=14e6, time_limit_s=3.0, smallest=8, most=8,
                             tiers=["none", groups], bucket_bytes=2**18)
    none, some = found.tiers
    assert none.plan is None and some.plan is not None and some.plan.hybrid.offload == offload_of(groups)
    text = " ".join(found.report().split())
    assert "of layers.0.*, layers.1.*, 2 more, layers.4.* and layers.5.*: parameters" in text
    with pytest.raises(PlanError, match="no parameter's name matches 'blocks"):
        autoparallel.fit(deep, ONE, smallest=8, tiers=[{"blocks.*": "host"}])
    with pytest.raises(PlanError, match="or mappings to them from patterns"):
        autoparallel.fit(deep, ONE, smallest=8, tiers=["tape"])


@pytest.mark.slow
def test_replanning_keeps_groups() -> None:
    four = replace(ONE, num_devices=4)
    groups = {"layers.0.*": "host", "layers.1.*": "disk"}
    plan = planned(four, mesh_shape=(4,), zero_stage=1, offload=groups)
    with torch.device("meta"):
        found = autoparallel.replan(plan, replace(four, num_devices=2), Deep(), example_inputs=(torch.empty(64, 256),),
                                    time_limit_s=2.0)
    made = [one.plan for one in found.candidates if one.plan is not None]
    assert made and all(one.hybrid.offload == offload_of(groups) for one in made)


CONFIG = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.mark.slow
def test_the_command_line(tmp_path: Path) -> None:
    config, written = tmp_path / "llama.json", tmp_path / "plan.json"
    config.write_text(json.dumps(CONFIG))
    call = ["plan", str(config), "--mesh", "2", "--sequence-length", "32", "--time-limit", "2", "--cluster", "a100-sxm",
            "--output", str(written), "--compare-by-hand", "none", "--offload"]
    done = CliRunner().invoke(app, [*call, "model.embed*=disk, model.layers.0.*=host"])
    assert done.exit_code == 0, done.output
    assert Plan.load(written).hybrid.offload.place == {"model.embed*": "disk", "model.layers.0.*": "host"}
    for wrong, told in (("host,embed*=disk", "give one tier for all parameters, or by names"),
                        ("embed*=disk", "no parameter's name matches"), ("a*=host,a*=disk", "'a*' is given twice")):
        done = CliRunner().invoke(app, [*call, wrong])
        assert done.exit_code != 0 and told in " ".join(f"{done.output} {done.exception}".split())


@pytest.mark.slow
def test_fit_on_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "llama.json"
    config.write_text(json.dumps(CONFIG))
    fits = CliRunner().invoke(app, ["fit", str(config), "--cluster", "a100-sxm", "--devices", "1", "--most", "1",
                                    "--sequence-length", "32", "--offload", "model.layers.0.*=host",
                                    "--time-limit", "0.1"])
    assert fits.exit_code == 0 and "model.layers.0.*=host" in fits.output


def trained(away: dict[str, Any]) -> tuple[list[float], list[Tensor], Any]:
    """Losses, shards, and the plan's tiers."""
    torch.manual_seed(0)
    x, model = torch.linspace(-1, 1, 64 * 256).view(64, 256), Deep()
    for number, p in enumerate(model.parameters()):
        torch.nn.init.normal_(p, std=0.05, generator=torch.Generator().manual_seed(number))
    fixed: dict[str, Any] = {} if "plan" in away else {"zero_stage": 3, "recompute": "none", "micro_batches": 1,
                                                   "bucket_bytes": 2**16}
    parallel = autoparallel.compile(model, mesh_of(1), example_inputs=(x,), **fixed, **away,
                                    cluster=replace(ONE, host=SLOW))
    optimizer, losses = parallel.optimizer(torch.optim.AdamW, lr=0.01, fused=True), list[float]()
    for _ in range(3):
        losses.append(parallel.step(x).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.to_local().detach().clone() for p in parallel.parameters()], parallel.plan


@pytest.mark.ranks
def test_auto_trains_with_some_blocks_on_the_host(ranks: Any) -> None:
    """Chosen under a memory limit, by `compile`: to the bit as the same layout with all in device memory."""
    pool = ranks(1)
    host, whole = (pool.run(trained, {"offload": tier}) for tier in ("host", "parameters"))
    limit = (host[0][2].prediction.peak_bytes + whole[0][2].prediction.peak_bytes) / 2
    some = pool.run(trained, {"offload": "auto", "memory_limit_bytes": limit})
    plan = some[0][2]
    kept = pool.run(trained, {"plan": replace(plan, hybrid=replace(plan.hybrid, offload=ON_DEVICE))})
    for (losses, shards, _), (expected, before, _) in zip(some, kept, strict=True):
        assert losses == expected and all(torch.equal(a, b) for a, b in zip(shards, before, strict=True))
    assert plan.prediction.peak_bytes <= limit and plan.prediction.step_s <= whole[0][2].prediction.step_s
    assert 0 < len(plan.hybrid.offload.groups) < 8 and plan.hybrid.offload.moves_parameters
