"""Tables that are looked up on the host beside groups of parameters in tiers: equal to the bit with all else on the
device, bytes of each tier as planned, prices, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import autoparallel
from autoparallel.capture import capture
from autoparallel.errors import PlanError
from autoparallel.planning.reduced_model import reduced_model
from autoparallel.runtime.initialise import is_table
from autoparallel.schedule.tiers import ON_DEVICE
from cost_models import Cluster
from tests.support.captured import plan_again
from tests.support.ranks import mesh_of
from tests.support.recommenders import DLRM, example, trained
from tests.support.tiers import slow

CLUSTER = Cluster.load("h100-sxm", num_devices=2)
IDS = torch.zeros(64, dtype=torch.long)
HOST: dict[str, Any] = {"tables*": "host"}
ROWS = {**HOST, "tables.*.weight": (Shard(0),)}
GROUPS = {"top.*": "parameters", "bottom.*": "host"}
ON_DISK = {"tables.2*": "disk", "top.*": "disk/disk/disk", "*": "host"}
LARGE = {"tables.0*": "host", "tables.2*": "host"}


def in_groups(shape: tuple[int, ...], options: dict[str, Any], disk: str) -> Any:
    """Losses and shards of four steps, bytes by tier, the plan. ``disk``: a folder, if states go there."""
    model, batch = example(DLRM)
    parallel: Any = autoparallel.compile(model, mesh_of(*shape), example_inputs=batch, **options,
                                         disk_path=disk or None)
    stepper: Any = parallel.optimizer(torch.optim.AdamW, lr=0.05)
    losses = []
    for _ in range(4):
        losses.append(float(parallel.step(*batch)))
        stepper.step()
        stepper.zero_grad()
    return {"losses": losses, "memory": stepper.memory() if parallel.plan.hybrid.offload.is_away else {},
            "shards": {name: p.to_local().detach().clone() for name, p in parallel.named_parameters()},
            "whole": {name: p.full_tensor().detach() for name, p in parallel.named_parameters()},
            "tables": {name for name, p in parallel.named_parameters() if is_table(p)}, "plan": parallel.plan}


@pytest.mark.ranks
@pytest.mark.parametrize(("shape", "options"), [
    ((2,), {"pins": HOST, "offload": GROUPS}),
    ((2,), {"pins": ROWS, "offload": ON_DISK, "micro_batches": 2}),
    ((2,), {"pins": LARGE, "offload": {"tables.*": "parameters"}}),
    slow((2, 2), {"pins": HOST, "offload": {"tables.*": "host/host/disk", "top.*": "disk"}}),
    slow((4,), {"pins": LARGE, "offload": {"tables.[02]*": "disk", "*": "disk/disk/disk"}, "micro_batches": 2}),
])
def test_tables_beside_groups_in_tiers(ranks: Any, shape: tuple[int, ...], options: dict[str, Any], tmp_path: Path
                                       ) -> None:
    """To the bit as with the same tables on the host and all else on the device; each tier has the bytes planned."""
    losses, parameters = trained(*example(DLRM), "AdamW")
    pool = ranks(int(torch.Size(shape).numel()))
    found = pool.run(in_groups, shape, options, str(tmp_path) if "disk" in str(options) else "", timeout_s=120)
    plan = found[0]["plan"]
    kept = pool.run(in_groups, shape, {"plan": replace(plan, hybrid=replace(plan.hybrid, offload=ON_DEVICE))}, "",
                    timeout_s=120)
    for one, other in zip(found, kept, strict=True):
        assert one["tables"] == other["tables"] == {*plan.hybrid.on_host}
        assert one["losses"] == other["losses"] and one["losses"] == pytest.approx(losses, rel=1e-5)
        assert all(torch.equal(shard, other["shards"][name]) for name, shard in one["shards"].items())
        for name, wanted in parameters.items():
            assert float((one["whole"][name] - wanted).abs().max()) <= 1e-4 * max(float(wanted.abs().max()), 0.05), name
    on_disk = bool(plan.hybrid.offload.in_tier("disk"))
    blocks = 2 * (1 + on_disk * (3 + len(parameters))) * 4096    # of two states, and of tiles and small files
    for tier, planned_bytes in (("host", plan.prediction.host_bytes), ("disk", plan.prediction.disk_bytes)):
        most = max(one["memory"][tier] for one in found)
        assert 0.95 * planned_bytes <= most <= 1.05 * planned_bytes + blocks, tier


class Layers(nn.Module):
    """Eight blocks with a table each, as models with embeddings of each layer have them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"embed": nn.Embedding(512, 32), "up": nn.Linear(32, 32)})
                                    for _ in range(8))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.zeros(len(ids), 32, device=ids.device)
        layer: Any
        for layer in self.layers:
            x = x + layer["up"](x + layer["embed"](ids)).tanh()
        return x.square().mean()


def test_a_tables_price_is_that_of_its_own_tiers() -> None:
    """Whatever groups others are in; a table that no pin names is fetched as any parameter."""
    model = Layers()

    def made(pins: dict[str, Any], offload: Any) -> Any:
        return plan_again(model, CLUSTER, (IDS,), mesh_shape=(1,), pins=pins, offload=offload, zero_stage=3).prediction

    pins, table, layer = {"layers.[0-3].embed": "host"}, 512 * 32 * 4, (32 * 32 + 32) * 4
    alone = made(pins, None)
    assert alone.host_bytes == pytest.approx(4 * 4 * table)
    beside = made(pins, {"*.up.*": "parameters"})
    assert beside.host_bytes == pytest.approx(4 * 4 * table + 8 * 4 * layer)
    assert (beside.lookups_forward_s, beside.lookups_backward_s, beside.crossings_s) == (
        alone.lookups_forward_s, alone.lookups_backward_s, alone.crossings_s)
    assert made(pins, {"*.embed.*": "parameters"}).host_bytes == pytest.approx(8 * 4 * table)
    states = made(pins, {"layers.[01].embed*": "disk"})
    assert states.disk_bytes == pytest.approx(2 * 2 * table)
    assert states.host_bytes == pytest.approx(2 * 2 * table + 2 * 4 * table + 3 * 2 * 2 * table, rel=0.01)    # tiles


def test_blocks_with_a_table_on_the_host_stand_for_their_like() -> None:
    graph = capture(Layers(), (IDS,), {})
    tables = [f"layers.{number}.embed.weight" for number in range(4)]
    kept = {node.path for node in reduced_model(graph, tables=tables).graph.of_kind("parameter")}
    assert {name for name in kept if "embed" in name} == {f"layers.{n}.embed.weight" for n in (0, 1, 4, 7)}
    joint = autoparallel.plan(Layers(), CLUSTER, example_inputs=(IDS,),
                              pins={"layers.[0-3].embed": "host"}, offload={"*.up.*": "host"}, time_limit_s=3.0)
    assert len(joint.hybrid.on_host) == 4 and joint.hybrid.offload.groups == (("*.up.*", "host"),)


def test_a_table_in_a_group_on_disk_is_refused_and_others_are_not() -> None:
    fixed: dict[str, Any] = {"example_inputs": (IDS,), "pins": {"*embed": "host"}, "mesh_shape": (1,)}
    beside = autoparallel.plan(Layers(), CLUSTER, **fixed, offload={"*.up.*": "disk/disk/disk"})
    assert len(beside.hybrid.on_host) == 8 and beside.prediction.disk_bytes == 8 * 4 * (32 * 32 + 32) * 4
    with pytest.raises(PlanError, match=r"layers.3.embed.weight.*take a tier with parameters and gradients in memory"):
        autoparallel.plan(Layers(), CLUSTER, **fixed, offload={"*.up.*": "host", "layers.3.*": "disk/disk/disk"})
