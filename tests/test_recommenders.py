"""DLRM and Wide & Deep: tables whole, cut by rows, by columns and by both, planned and by pins, are one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import autoparallel
from cost_models import Cluster
from tests.support.ranks import mesh_of
from tests.support.recommenders import DLRM, WIDTH, WideAndDeep, example, trained
from tests.support.tiers import slow


def on_mesh(kind: type[nn.Module], shape: tuple[int, ...], options: dict[str, Any], optimizer: str) -> Any:
    model, batch = example(kind)
    parallel = autoparallel.compile(model, mesh_of(*shape), example_inputs=batch, **options)
    placed = {name: p.placements for name, p in parallel.named_parameters() if "tables" in name or "wide" in name}
    return *trained(parallel, batch, optimizer), placed


ROW, COLUMN = {"tables.*.weight": (Shard(0),)}, {"tables.*.weight": (Shard(1),)}


@pytest.mark.parametrize(("kind", "shape", "options", "optimizer"), [
    (DLRM, (4,), {"pins": ROW}, "Adagrad"),
    slow(WideAndDeep, (4,), {"pins": COLUMN}, "Adagrad"),
    (DLRM, (2, 2), {"pins": {"tables.*.weight": (Shard(0), Shard(1))}}, "AdamW"),
    slow(DLRM, (4,), {"pins": COLUMN}, "Adagrad"), slow(WideAndDeep, (4,), {"pins": ROW}, "Adagrad"),
    slow(DLRM, (2, 2), {"pins": {"tables.*.weight": (Replicate(), Shard(0))}}, "Adagrad"),
    slow(DLRM, (4,), {}, "AdamW"), slow(WideAndDeep, (2, 2), {}, "AdamW"), slow(DLRM, (4,), {"zero_stage": 3}, "AdamW"),
    slow(WideAndDeep, (4,), {"baseline": "fsdp"}, "Adagrad"), slow(DLRM, (2, 2), {"micro_batches": 2, "pins": {
        "tables.*.weight": (Shard(0), Shard(0))}}, "AdamW")])
def test_equal_to_one_process(ranks: Any, kind: type[nn.Module], shape: tuple[int, ...], options: dict[str, Any],
                              optimizer: str) -> None:
    losses, parameters = trained(*example(kind), optimizer)
    for found, made, placed in ranks(4).run(on_mesh, kind, shape, options, optimizer, timeout_s=120):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, wanted in parameters.items():
            assert float((made[name] - wanted).abs().max()) <= 1e-4 * max(float(wanted.abs().max()), 0.05), name
        for pattern, placements in options.get("pins", {}).items():
            tables = [value for name, value in placed.items() if name.startswith(pattern.split("*")[0])]
            assert tables and all(value == placements for value in tables)


def big(rows: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    with torch.device("meta"):
        model, batch = example(DLRM)
        model.tables[2] = nn.EmbeddingBag(rows, WIDTH, mode="sum")
        return model, batch


def test_a_table_beyond_the_device_is_cut() -> None:
    """Its weight, gradient and optimizer's state are four times the limit; the small ones stay whole."""
    cluster = Cluster.load("h100-sxm", num_devices=8)
    rows = 50_000_000
    limit = rows * WIDTH * 4.0  # a quarter of weight, gradient and two moments
    model, batch = big(rows)
    plan = autoparallel.plan(model, cluster, example_inputs=batch, mesh_shape=(8,), memory_limit_bytes=limit)
    assert 4 * rows * WIDTH * 4 / 8 <= plan.prediction.peak_bytes <= limit
    assert plan.strategies["tables.2.weight"] in (("S(0)",), ("S(1)",))
    assert plan.strategies["tables.1.weight"] == ("I",)


class Wide(nn.Module):
    """Four tables of 20 million rows, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20_000_000, 64, mode="sum") for _ in range(4))
        self.top = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1))

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.cat([table(ids[:, number]) for number, table in enumerate(self.tables)], 1)
        return F.mse_loss(self.top(z).squeeze(-1), y)


def test_the_plan_is_torchrecs_data_flow() -> None:
    """Tables by rows, the MLP data parallel; the pooled vectors of all tables are scattered in one call each way, and
    no gradient of a table is reduced."""
    with torch.device("meta"):
        model, batch = Wide(), (torch.zeros(65536, 4, 8, dtype=torch.long), torch.zeros(65536))
    plan = autoparallel.plan(model, Cluster.load("h100-sxm", num_devices=8), example_inputs=batch, mesh_shape=(8,),
                             optimizer="adagrad")
    assert all(plan.strategies[f"tables.{number}.weight"] == ("S(0)",) for number in range(4))
    pooled = 65536 * 4 * 64 * 4.0
    large = {(use.kind, use.direction): (use.count, use.num_bytes) for use in plan.prediction.collectives
             if use.num_bytes > 1e7}
    assert large == {("reduce_scatter", "forward"): (1, pooled), ("all_gather", "backward"): (1, pooled)}
