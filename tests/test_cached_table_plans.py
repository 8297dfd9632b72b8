"""Plans with caches of tables on the host: prices, bytes, files, programs and refusals; a cache by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import autoparallel
from autoparallel.capture import capture
from autoparallel.errors import PinError, PlanError
from autoparallel.kernels import host_copies, table_cache
from autoparallel.kernels.host_lookups import cross
from autoparallel.kernels.table_cache import RowCache, cached_bags, cached_rows
from autoparallel.lower import emit
from autoparallel.lower.lookup_pass import look_up_in_caches
from autoparallel.planning.reduced_model import reduced_model
from autoparallel.plans import Plan
from autoparallel.pricing import Prices
from autoparallel.schedule.table_caches import TableCache
from autoparallel.strategies.host_lookups import HostLookups
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster
from tests.support.live_bytes import LiveBytes
from tests.support.ranks import mesh_of
from tests.support.two_memories import DEVICE, TwoMemories, memory_of

TABLE, DIM, IDS = 20_000, 64, 1_500


class Ranked(nn.Module):
    """A table of ids, and a linear layer."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TABLE, DIM, sparse=sparse), nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids)).square().mean()


def bytes_on_device(shape: tuple[int, ...], placement: Any, options: dict[str, Any]) -> dict[str, float]:
    """The training state of a step as predicted for the device and its host, and as it is there after backward."""
    with torch.device("meta"):
        model = Ranked()
    pinned = {"embed": autoparallel.Cached(4_000), "embed.weight": placement}
    parallel = autoparallel.compile(model, mesh_of(*shape), example_inputs=(torch.arange(IDS),), optimizer="adam",
                                    pins=pinned, **options)
    with LiveBytes() as live:
        parallel.init_weights()
        table: Any = parallel.get_parameter("embed.weight")
        rest = [p for name, p in parallel.named_parameters() if name != "embed.weight"]
        made: Any = [torch.optim.SparseAdam([table]), torch.optim.Adam(rest)]
        for number in range(4):
            for one in made:
                one.zero_grad()
            parallel.step(torch.randperm(TABLE)[:IDS])
            for one in made if number < 3 else ():
                one.step()
        on_host = [value.to_local() for value in (table, *made[0].state[table].values()) if isinstance(value, DTensor)]
        there = live.total(without=[*on_host, table.cache.stand_in])
    p = parallel.plan.prediction
    return {"device": p.state_bytes, "there": there, "host": p.host_bytes,
            "on host": sum(value.nbytes for value in on_host)}


@pytest.mark.ranks
@pytest.mark.parametrize(("shape", "placement", "options"), [
    ((1,), (Replicate(),), {}), ((2,), (Shard(0),), {}), ((2,), (Shard(1),), {"micro_batches": 2})])
def test_the_device_and_its_host_have_the_bytes_planned(ranks: Any, shape: tuple[int, ...], placement: Any,
                                                         options: dict[str, Any]) -> None:
    found = ranks(int(torch.tensor(shape).prod())).run(bytes_on_device, shape, placement, options, timeout_s=120)
    assert max(one["on host"] for one in found) == found[0]["host"]
    assert max(one["there"] for one in found) == pytest.approx(found[0]["device"], rel=0.05)


def planned(pin: Any, model: Any = None, **options: Any) -> Plan:
    with torch.device("meta"):
        model, ids = model or Ranked(), torch.zeros(IDS, dtype=torch.long)
    shape = options.pop("mesh_shape", (1,))
    cluster = Cluster.load("h100-sxm", num_devices=int(torch.tensor(shape).prod()))
    return autoparallel.plan(model, cluster, example_inputs=(ids,), mesh_shape=shape,
                             pins=None if pin is None else {"embed": pin}, **{"optimizer": "adam", **options})


def test_priced_by_what_misses_move() -> None:
    """A known answer on one device: the rows that are missed and their two states come up, and as many go down; hits
    cost nothing there; the step is the device's."""
    device, host, cached = (planned(pin) for pin in (None, "host", autoparallel.Cached(0.2, hits=0.75)))
    table, missed, p = TABLE * DIM * 4, 0.25 * IDS * DIM * 4 * 3, cached.prediction
    assert cached.hybrid.cached == (TableCache("embed.weight", 4000, 0.75),)
    whole, launch_s = 8 * 35.3e9, 5e-6    # one device alone has its host's memory for itself
    assert p.crossings_s == pytest.approx(2 * (missed / 48e9 + launch_s))
    assert p.lookups_forward_s == pytest.approx(4 * missed / whole + launch_s) and p.lookups_backward_s == 0
    assert p.optimizer_s == device.prediction.optimizer_s < host.prediction.optimizer_s
    assert p.host_bytes == 3 * table and p.step_s < p.uncached_s == host.prediction.step_s
    assert planned(autoparallel.Cached(0.2, hits=1.0)).prediction.crossings_s == pytest.approx(2 * launch_s)
    assert planned(autoparallel.Cached(0.2)).hybrid.cached[0].hits == 0.2
    assert planned(autoparallel.Cached(10**9)).hybrid.cached[0].rows == TABLE
    words = cached.report(width=200)
    assert "embed.weight in the memory of the host, 4,000 rows cached on the devices (75% hits expected)" in words
    assert "a step without caches predicted at" in words and "do not pay" not in words


def test_what_does_not_pay_is_told() -> None:
    model = Ranked()
    model.embed.weight.requires_grad_(False)    # which is not stepped, so that nothing is saved but what hits spare
    plan = planned(autoparallel.Cached(100, hits=0.0), model)
    assert 0 < plan.prediction.uncached_s < plan.prediction.step_s and "so that they do not pay" in plan.summary()


def test_plan_files_and_other_searches_have_caches(tmp_path: Path) -> None:
    pin = autoparallel.Cached(1000, hits=0.5)
    plan = planned(pin, mesh_shape=(2,))
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.hybrid == plan.hybrid and again.prediction == plan.prediction
    assert again.pins == {"embed": "host, 1,000 rows cached, hits 0.5"}
    assert planned(pin, mesh_shape=(2,), joint=True, time_limit_s=5.0).hybrid.cached == plan.hybrid.cached
    assert planned(pin, offload="auto").hybrid.cached == plan.hybrid.cached
    alone = planned(autoparallel.Cached(2000, hits=0.5), mesh_shape=(2,))
    assert alone.prediction.state_bytes > plan.prediction.state_bytes and "cached" in plan.diff(alone)


@pytest.mark.parametrize(("pin", "options", "error", "said"), [
    (autoparallel.Cached(10), {"model": Ranked(sparse=False)}, PinError, "is dense.*\n.*\n  Write sparse=True"),
    (autoparallel.Cached(10), {"offload": "host"}, PlanError, "holds its optimizer states beside its rows"),
    (autoparallel.Cached(9), {"pins": {"embed": autoparallel.Cached(9), "embed.*": "host"}}, PinError, "pinned twice"),
    (autoparallel.Cached(10), {"pins": {"head": autoparallel.Cached(10)}}, PinError, "reads head.weight"),
])
def test_refused_at_planning(pin: Any, options: dict[str, Any], error: type[Exception], said: str) -> None:
    some = {name: value for name, value in options.items() if name != "pins"}
    with pytest.raises(error, match=said):
        if "pins" in options:
            autoparallel.plan(Ranked(), Cluster.load("h100-sxm", num_devices=1), mesh_shape=(1,),
                              example_inputs=(torch.zeros(8, dtype=torch.long),), **options)
        else:
            planned(pin, **some)


@pytest.mark.parametrize(("rows", "hits"), [(0, None), (1.5, None), (0.0, None), (True, None), ("5", None), (5, 1.5)])
def test_caches_have_rows_and_a_share_of_hits(rows: Any, hits: Any) -> None:
    with pytest.raises(PinError, match="give"):
        autoparallel.Cached(rows, hits=hits)


class Bags(nn.Module):
    """Lookups one by one, and in bags."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bags = nn.Embedding(23, 8, sparse=True), nn.EmbeddingBag(23, 8, mode="sum", sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.embed(ids).sum(1) + self.bags(ids)).square().mean()


def test_programs_for_gpus_look_up_in_caches() -> None:
    """Of a shard of rows with its bounds; nothing crosses between the memories but in the cache."""
    model, example, cluster = Bags(), (torch.zeros(8, 3, dtype=torch.long),), Cluster.load("h100-sxm", num_devices=2)
    space = StrategySpace(capture(model, example), (2,), ("data",))
    names = ("embed", "bags")
    pins = {**dict.fromkeys(names, autoparallel.Cached(6)), **{f"{name}.weight": (Shard(0),) for name in names}}
    plan = autoparallel.plan(model, cluster, example_inputs=example, mesh_shape=(2,), pins=pins, axis_names=("data",))
    program = emit(space, plan.strategies_on(space), Prices(space, cluster, "adam").path, (1,), "cuda")
    look_up_in_caches(program.module, HostLookups(space, plan.hybrid.on_host, plan.hybrid.cached).cached)
    nodes = program.module.graph.nodes
    found = {node.target: node.kwargs for node in nodes if node.target in (cached_rows, cached_bags)}
    assert len(found) == 2 and all((given["start"], given["length"]) == (12, 23) for given in found.values())
    assert not [node for node in nodes if node.target is cross]


def test_a_cache_holds_the_rows_that_were_used_last() -> None:
    table = torch.arange(20.0).view(10, 2)
    cache = RowCache(table.clone(), 3, torch.device("cpu"))
    state = cache.attach(torch.zeros(10, 2))
    for rows in ([1, 2, 3], [2, 4], [3, 4], [4, 5]):    # 5 takes the slot of 2, which 3 has outlived
        times = torch.ones(len(rows), dtype=torch.long)
        held = cache.held(torch.tensor(rows), [cache.table, state], times, writes=True)
        assert held.slots is None and torch.equal(held.values[0][held.at], table[rows])
        held.values[1][held.at] += 1
    told = cache.lookups()
    assert (told.ids, told.hits, told.loaded, told.written) == (9, 4, 5, 2)
    assert state.host[[1, 2]].tolist() == [[1, 1], [2, 2]] and not state.host[3:].any()
    many = cache.held(torch.tensor([0, 4, 6, 7, 8]), [cache.table, state], writes=True)    # more than there are slots
    assert many.slots is not None and int((many.slots < 0).sum()) == 2
    many.values[1].fill_(9.0)
    cache.put_back(torch.tensor([0, 4, 6, 7, 8]), [cache.table, state], many)
    cache.flush(for_reading=True)
    assert state.host[:, 0].tolist() == [9, 1, 2, 2, 9, 1, 9, 9, 9, 0] and torch.equal(cache.table.host, table)


def test_rows_whose_loading_failed_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.arange(20.0).view(10, 2)
    cache = RowCache(table.clone(), 3, torch.device("cpu"))
    cache.held(torch.tensor([0, 1, 2]), [cache.table], writes=True).values[0].add_(1)
    with monkeypatch.context() as patch:
        patch.setattr(table_cache, "_from_host", Mock(side_effect=MemoryError("no pinned memory")))
        with pytest.raises(MemoryError):
            cache.held(torch.tensor([2, 3]), [cache.table])
    table[:3] += 1
    for rows in ([3, 4], [0, 1, 2]):
        held = cache.held(torch.tensor(rows), [cache.table])
        assert torch.equal(held.values[0][held.at], table[rows])


def look_up(weight: Tensor, ids: Tensor, how: str, shard: bool) -> Tensor:
    """Rows, or bags of two, of the whole table or of a shard of which it is the second half."""
    bounds = {"start": len(weight), "length": 2 * len(weight)} if shard else {}
    if how == "rows":
        return cached_rows(weight, ids, 3 + shard * len(weight), **bounds).sum(1)
    return cached_bags(weight, ids, None, None, 0, False, None, **bounds)


@pytest.mark.parametrize(("how", "shard"), [("rows", False), ("bags", False), ("rows", True), ("bags", True)])
@pytest.mark.parametrize("slots", [4, 12, 40])
def test_tensors_of_the_device_and_its_host_meet_in_copies_alone(how: str, shard: bool, slots: int,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """On an emulated device, with steps in its rows: as a table in one memory."""
    monkeypatch.setattr(host_copies, "begin", lambda sources, device: host_copies.Copies(tuple(
        source.to(device) for source in sources)))
    monkeypatch.setattr(table_cache, "_memory", memory_of)
    torch.manual_seed(0)
    plain = torch.randn(40, 4, dtype=torch.double)
    host, first = plain.clone(), 40 * shard
    with TwoMemories():
        cache = RowCache(host, slots, DEVICE)
        state = cache.attach(torch.zeros_like(host))
        stepped = torch.zeros_like(plain)
        for _ in range(6):
            ids = torch.randint(first, first + 40, (5, 2))
            weight = cache.stand_in.detach().requires_grad_()
            made = look_up(weight, ids.to(DEVICE), how, shard)
            made.sum().backward()
            local = plain.clone().requires_grad_()
            wanted = nn.functional.embedding(ids - first, local, padding_idx=3 if how == "rows" else None).sum(1)
            wanted.sum().backward()
            assert made.device == DEVICE and torch.equal(made.detach().cpu(), wanted.detach())
            assert weight.grad is not None and local.grad is not None
            gradient = weight.grad.coalesce()
            assert torch.equal(gradient.cpu().to_dense(), local.grad)
            rows, columns = gradient._indices()[0], [cache.table, state]
            held = cache.held(rows, columns, writes=True)
            for value, by in zip(held.values, (-0.1, 1.0), strict=True):
                value.index_add_(0, held.at, gradient._values() * by)
            cache.put_back(rows, columns, held)
            plain, stepped = plain - 0.1 * local.grad, stepped + local.grad
        cache.flush(for_reading=True)
    assert torch.allclose(host, plain, rtol=1e-12) and torch.equal(state.host, stepped)


def test_replanned_jobs_keep_caches() -> None:
    with torch.device("meta"):
        model, ids = Ranked(), torch.zeros(IDS, dtype=torch.long)
    plan = planned(autoparallel.Cached(1000, hits=0.5), mesh_shape=(2,))
    found = autoparallel.replan(plan, Cluster.load("h100-sxm", num_devices=1), model, example_inputs=(ids,))
    assert plan.hybrid.cached in [one.plan.hybrid.cached for one in found.candidates if one.plan is not None]


class Layers(nn.Module):
    """Eight blocks with a table each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"embed": nn.Embedding(64, 8, sparse=True), "up": nn.Linear(8, 8)})
                                    for _ in range(8))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.zeros(len(ids), 8)
        layer: Any
        for layer in self.layers:
            x = x + layer["up"](x + layer["embed"](ids)).tanh()
        return x.square().mean()


def test_blocks_with_equal_caches_stand_for_one_another() -> None:
    graph = capture(Layers(), (torch.zeros(4, dtype=torch.long),), {})
    tables = [f"layers.{number}.embed.weight" for number in range(8)]

    def kept(rows: list[int]) -> list[int]:
        cached = [TableCache(name, count, 0.5) for name, count in zip(tables, rows, strict=True)]
        found = reduced_model(graph, tables=tables, cached=cached).graph.of_kind("parameter")
        return [int(node.path.split(".")[1]) for node in found if "embed" in node.path]

    assert kept([8] * 8) == [0, 1, 7] and kept([8] * 4 + [16] * 4) == [0, 1, 4, 7]


FAILS = """
import torch
from torch import nn
import autoparallel

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, ids):
        return self.head(self.table(ids)).sum()

w = autoparallel.init()
ids = torch.arange(6)
m = autoparallel.compile(Model(), w.mesh, example_inputs=(ids,), pins={"table": autoparallel.Cached(5)})
o = torch.optim.SGD([m.table.weight], weight_decay=0.1)
l = m(ids)
l.backward()
try:
    o.step()
except RuntimeError as error:
    print(error)
"""


@pytest.mark.ranks
def test_processes_end_after_a_step_that_failed(tmp_path: Path) -> None:
    """As their modules are taken apart, torch takes no tensor that changes hands meanwhile."""
    (tmp_path / "fails.py").write_text(FAILS)
    done = subprocess.run([sys.executable, str(tmp_path / "fails.py")], capture_output=True, text=True, timeout=100)
    assert "add(sparse, dense) is not supported" in done.stdout and done.returncode == 0, done.stderr


class LookingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(23, 8, sparse=True), nn.Linear(8, 8)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return x + self.mix(x + self.table(ids)).sin()


class LookingBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LookingBlock() for _ in range(2))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(ids, x)
        return x.square().mean()


def counted_with(recompute: str) -> tuple[tuple[int, int], ...]:
    """Ids and hits of each table after two steps."""
    torch.manual_seed(0)
    call = torch.randint(23, (12,)), torch.randn(12, 8)
    parallel = autoparallel.compile(LookingBlocks(), mesh_of(1), example_inputs=call, recompute=recompute,
                                    pins={"blocks*table": autoparallel.Cached(23)})
    for _ in range(2):
        parallel(*call).backward()
    return tuple((found.ids, found.hits) for found in parallel.table_lookups().values())


@pytest.mark.ranks
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_lookups_that_recompute_repeats_count_once(ranks: Any, recompute: str) -> None:
    (found,), (wanted,) = (ranks(1).run(counted_with, how, timeout_s=120) for how in (recompute, "none"))
    assert found == wanted == ((2 * 12, 12),) * 2
