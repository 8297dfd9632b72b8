"""Buckets by size, by axis, by number and by name: those of the program, their prices, and sizes by price."""

from __future__ import annotations

import gc
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autoparallel
from autoparallel import Cluster, Plan
from autoparallel.errors import PlanError
from autoparallel.partition import split_batch
from autoparallel.planning import bucket_sizes
from autoparallel.planning.bound_kinds import Kind
from autoparallel.planning.bucket_sizes import LEAST_GAIN, TRIED
from autoparallel.planning.candidates import Candidate
from autoparallel.plans import Hybrid
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer
from autoparallel.pricing.overlap_simulation import RankStep
from autoparallel.replanning import bucket_bytes_of
from autoparallel.schedule.async_windows import AsyncWindows, Read
from autoparallel.schedule.fusion import AUTO_SIZE, Fusion, in_buckets
from autoparallel.strategies.space import StrategySpace
from cost_models import collectives
from tests.support.captured import graph_of, plan_again, plan_of
from tests.support.models import CASES
from tests.support.overlapped import Calls
from tests.support.ranks import mesh_of
from tests.support.reference import (
    Trained,
    assert_same_gradients,
    gradients_of,
    scalar,
    train_reference,
)
from tests.support.tiers import slow

MIB = 2**20
BLOCKS = ("model.layers.0.*", "model.layers.1.*")


def _local() -> Cluster:
    return Cluster.load("local-cpu", num_devices=4)


# ---------------------------------------------------------------------------------------------------------- the buckets


def test_a_bucket_has_at_most_so_many_values() -> None:
    assert in_buckets([1, 1, 1, 1, 1], 3) == [[0, 1], [2, 3, 4]]
    assert in_buckets([1, 1, 1, 1, 1], 3, count=2) == [[0], [1, 2], [3, 4]]
    assert in_buckets([1, 1, 1, 1, 1], math.inf, last=1, count=3) == [[0], [1, 2, 3], [4]]


def _reductions(*axes: str, named: tuple[int | None, ...] = ()) -> list[Read]:
    return [Read(None, "reduction", axis, "float32", 10.0, point, named=(named or (None,) * len(axes))[point])
            for point, axis in enumerate(axes)]


def test_axes_have_sizes_of_their_own() -> None:
    """Sums over several axes together have the least of theirs."""
    reads = _reductions("data", "data", "model", "model", "data+model", "data+model")
    fusion = Fusion((("model", 10.0),))
    assert [pair.steps for pair in AsyncWindows(reads, 20.0, fusion=fusion).reduced] == [
        (0, 1), (4,), (5,), (2,), (3,)]
    assert fusion.bytes_on("data+model", 20.0) == 10.0 and fusion.bytes_on("data", 20.0) == 20.0


def test_named_parameters_are_one_bucket_of_any_size() -> None:
    """The others are divided by size, and what is named lies in no bucket of theirs."""
    reads = _reductions(*["data"] * 5, named=(0, None, 0, None, 0))
    assert [pair.steps for pair in AsyncWindows(reads, 20.0).reduced] == [(1, 3), (0, 2, 4)]
    gathers = [read._replace(kind="gather", block=f"layers.{read.place}") for read in reads]
    assert sorted(pair.steps for pair in AsyncWindows(gathers, 5.0).gathered) == [(0, 2, 4), (1,), (3,)]


def test_a_block_is_gathered_as_one_unless_sizes_are_given() -> None:
    """Of two blocks of three parameters and one of no block, each larger than a bucket."""
    blocks = [*["layers.0"] * 3, *["layers.1"] * 3, None]
    reads = [Read(None, "gather", "data", "float32", 40 * MIB, place, block) for place, block in enumerate(blocks)]

    def found(**how: Any) -> list[tuple[int, ...]]:
        return sorted(pair.steps for pair in AsyncWindows(reads, **how).gathered)

    assert found() == [(0, 1, 2), (3, 4, 5), (6,)]
    assert found(fusion=Fusion(most=2)) == [(0,), (1, 2), (3,), (4, 5), (6,)]
    assert found(fusion=Fusion(blocks=False)) == [(n,) for n in range(7)]


# ----------------------------------------------------------------------------------------------------------- the prices


def _step_of(plan: Plan, cluster: Cluster) -> RankStep:
    space = StrategySpace(split_batch(graph_of("llama"), 1).body, plan.mesh_shape)
    pricer = SpacePricer(Prices(space, cluster, direct=plan.direct), counts=ExecutionCounts(space, plan.hybrid))
    return RankStep(pricer, plan.strategies_on(space))


@pytest.mark.parametrize("size", [20_000, 400 * MIB])
def test_a_bucket_takes_as_long_as_one_all_reduce_of_its_bytes(size: int) -> None:
    """Not the share of a full one: a bucket of 400 MiB that holds 100 KB has the latency of a whole message."""
    cluster = _local()
    made = _step_of(plan_of("llama", cluster, mesh_shape=(4,), baseline="ddp", bucket_bytes=size), cluster)
    step, group = made.step(), made.pricer.prices.groups[0,]
    launched = [(task, label) for task, label in zip(step.tasks, step.labels, strict=True) if label[0] == "reduce"]
    assert len(launched) == len(made.reads.windows.reduced)
    told = sorted(sum(made.reads.reads[n].num_bytes for n in pair.steps) for pair in made.reads.windows.reduced)
    found = sorted(task.duration_s for task, _ in launched)
    for num_bytes, seconds in zip(told, found, strict=True):
        alone = float(collectives.all_reduce_s(num_bytes, group))
        assert alone <= seconds * (1 + 1e-9) and seconds <= 1.5 * alone + float(
            collectives.copy_s(num_bytes, cluster.device))


def test_a_size_that_makes_the_same_buckets_has_the_same_price() -> None:
    steps = {size: plan_of("llama", _local(), mesh_shape=(4,), baseline="ddp", bucket_bytes=size).prediction.step_s
             for size in (25 * MIB, 100 * MIB, 400 * MIB)}
    assert steps[100 * MIB] == pytest.approx(steps[25 * MIB], rel=2e-3)
    assert steps[400 * MIB] == pytest.approx(steps[25 * MIB], rel=2e-3)


class Deep(torch.nn.Module):
    """Layers of 4 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


DEEP = Deep()


def _deep(**options: Any) -> Plan:
    return plan_again(DEEP, Cluster.load("h100-sxm", num_devices=16, software="none"), (torch.zeros(16384, 1024),),
                      **{"mesh_shape": (2, 8), "axis_names": ("data", "model"), "baseline": "ddp", **options})


def test_auto_is_the_fastest_of_all_sizes() -> None:
    """Small buckets cost latency, and the last of large ones lies open behind backward."""
    steps = {size: _deep(bucket_bytes=size).prediction.step_s for size in TRIED}
    made = _deep(bucket_bytes="auto")
    chosen = made.hybrid.fusion.bytes_on("data+model", made.hybrid.bucket_bytes)
    assert made.prediction.step_s == steps[int(chosen)]
    assert made.prediction.step_s <= min(steps.values()) * (1 + LEAST_GAIN)
    assert max(steps.values()) > 1.01 * min(steps.values())
    assert made.prediction.step_s <= _deep().prediction.step_s


def test_gathers_are_by_block_or_by_size_as_is_faster() -> None:
    """Of blocks of 128 MiB: over all of 64 GPUs at once, one message of a block has least latency; over hosts and then
    within them, parts of it are on both kinds of links at a time."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(8)))
                                      for _ in range(6)))
    cluster, args = Cluster.load("h100-sxm", num_devices=64), (torch.empty(65536, 2048, device="meta"),)

    flat, by_size, deep = (plan_again(model, cluster, args, baseline="fsdp", mesh_shape=shape, bucket_bytes=most)
                           for shape, most in (((64,), None), ((64,), 25 * MIB), ((8, 8), None)))
    assert flat.hybrid.fusion.blocks and flat.prediction.step_s < 0.95 * by_size.prediction.step_s
    assert not deep.hybrid.fusion.blocks


def test_steps_during_backward_and_jobs_planned_again_have_the_sizes_that_they_need() -> None:
    """Memory of the first is counted by the default size; the second keep sizes that somebody gave."""
    cluster, how = _local(), {"mesh_shape": (4,), "baseline": "fsdp"}
    assert not plan_of("mlp", cluster, **how, step_in_backward=True).hybrid.fusion.blocks
    for given, kept in ((None, None), (25 * MIB, 25 * MIB), (5 * MIB, 5 * MIB), ({"axis0": 5 * MIB}, AUTO_SIZE)):
        made = plan_of("mlp", cluster, **how, bucket_bytes=given)
        assert made.hybrid.fusion.blocks == (given is None)
        assert bucket_bytes_of(made.hybrid) == kept


@pytest.mark.parametrize("size", [MIB, 400 * MIB])
def test_bounds_are_of_the_buckets_of_the_combination(size: int) -> None:
    hybrid = Hybrid(2, zero_stage=1, bucket_bytes=size, fusion=Fusion(blocks=False, given=True))
    bounded = Kind.of(Candidate(hybrid, (4,))).hybrid
    assert (bounded.bucket_bytes, bounded.fusion) == (size, hybrid.fusion)


def test_auto_leaves_a_size_that_makes_no_other_buckets() -> None:
    made = plan_of("llama", _local(), mesh_shape=(4,), baseline="ddp", bucket_bytes="auto")
    assert made.hybrid.bucket_bytes == 25 * MIB and made.hybrid.fusion == Fusion()


def test_auto_keeps_to_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket is a copy of its gradients."""
    monkeypatch.setattr(bucket_sizes, "LEAST_GAIN", -1.0)    # take each size that is tried, where it fits
    free = _deep(bucket_bytes="auto")
    assert free.hybrid.bucket_bytes == 100 * MIB
    limit = free.prediction.peak_bytes + 10 * MIB
    assert _deep(bucket_bytes="auto", memory_limit_bytes=limit).hybrid.bucket_bytes < 25 * MIB


def test_plans_say_their_buckets(tmp_path: Any) -> None:
    made = _deep(bucket_bytes={"model": 5 * MIB}, buckets=["layers.0.*", "layers.1.*"])
    assert made.hybrid.fusion == Fusion((("model", 5 * MIB),), None, ("layers.0.*", "layers.1.*"), False, given=True)
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").hybrid == made.hybrid
    report = " ".join(made.report().split())
    assert "buckets of 5 MiB over model" in report and "one bucket for each of layers.0.*" in report
    older = json.loads(made.to_json())
    del older["hybrid"]["fusion"]
    assert Plan.from_json(json.dumps(older)).hybrid == replace(made.hybrid, fusion=Fusion())
    assert "buckets of 4 parameters at most" in " ".join(_deep(buckets=4).report().split())


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(("options", "said"), [
    ({"buckets": ["layer.0.*"]}, r"no parameter's name matches 'layer\.0\.\*'.*'layers\.0\.weight'"),
    ({"buckets": ["layers.*", "layers.0.*"]}, r"patterns before 'layers\.0\.\*' have all parameters"),
    ({"buckets": 0}, "give the most parameters of a bucket, 1 or more"),
    ({"buckets": "layers.*"}, r"patterns of the names of each bucket's, \['layers\.0\.\*'"),
    ({"bucket_bytes": {"rows": 1e6}}, r"axis 'rows', and the mesh of a stage has \['data', 'model'\]"),
    ({"bucket_bytes": {"data": -1}}, "or by mesh axis"),
    ({"bucket_bytes": "small"}, "or 'auto'"),
    ({"bucket_bytes": {"data": 1e6}, "mesh_shape": None, "axis_names": None}, "the mesh is searched: give mesh_shape"),
    ({"buckets": ["layers.*"], "baseline": "fsdp", "zero_stage": 3},
     r"(?s)'layers\.\*' has parameters that do not travel together.*other parameters of layers\.0: layers\.0\.weight.*"
     "pattern for each"),
    ({"buckets": 2, "zero_stage": 3, "micro_batches": 4, "schedule": "zero_bubble", "pipeline_stages": 2,
      "baseline": None, "axis_names": None}, "moves each parameter by itself"),
])
def test_buckets_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        _deep(**options)


# --------------------------------------------------------------------------------------------------- programs on ranks


def on_ranks(backend: str, baseline: str, shape: tuple[int, ...], options: dict[str, Any],
             hybrid: dict[str, Any] | None = None) -> tuple[Trained, dict[str, int], int]:
    """On each rank: loss and gradients of a step, collectives of its backward, process groups that it has made.
    ``hybrid``: fields in which the plan differs."""
    case, mesh = CASES["llama"], mesh_of(*shape)
    args, kwargs = case.inputs(8)
    autoparallel.compile(torch.nn.Linear(4, 4), mesh_of(4), example_inputs=(torch.zeros(8, 4),))    # once for all
    gc.collect()
    groups = len(dist.distributed_c10d._world.pg_map)
    options = {"baseline": baseline, **options}
    if hybrid is not None:
        made = autoparallel.plan(case.build(), _local(), example_inputs=args, example_kwargs=kwargs, mesh_shape=shape,
                                 **options)
        options = {"plan": replace(made, hybrid=replace(made.hybrid, **hybrid))}
    parallel = autoparallel.compile(case.build(), mesh, example_inputs=args, example_kwargs=kwargs, backend=backend,
                                    **options)
    loss = case.loss(parallel(*args, **kwargs))
    with Calls() as calls:
        loss.backward()
    made = len(dist.distributed_c10d._world.pg_map) - groups
    counts = {"all_reduce": 0, "reduce_scatter": 0}
    for op, times in calls.counts.items():
        name = "reduce_scatter" if op.startswith("reduce_scatter") else "all_reduce"
        counts[name] += times * op.startswith(("all_reduce", "sum_bucket", "reduce_scatter"))
    return Trained(scalar(loss), [], gradients_of(parallel), {}, {}), counts, made


#: Options, and the all-reduces of backward under the baseline ddp.
FORMS = [
    ({}, 1),
    ({"buckets": [*BLOCKS, "*"]}, 3),
    ({"buckets": 10}, 3),
    slow({"bucket_bytes": {"x": 0}}, 21),
    slow({"bucket_bytes": "auto"}, 1),
]


@pytest.mark.parametrize("backend", ["eager", slow("aot_eager")])
@pytest.mark.parametrize(("options", "sums"), FORMS, ids=str)
def test_programs_have_the_buckets_that_are_asked_for(ranks: Any, backend: str, options: dict[str, Any], sums: int
                                                      ) -> None:
    """Of data parallelism over two axes; and one process's loss and gradients. The one group that is made is that of
    both axes together, which the plan sums over."""
    expected = train_reference(CASES["llama"], "sgd", num_steps=1, batch_size=8)
    for trained, counts, groups in ranks(4).run(on_ranks, backend, "ddp", (2, 2), options, timeout_s=100):
        assert trained.loss == pytest.approx(expected.loss, rel=1e-5)
        assert_same_gradients(trained.gradients, expected)
        assert (counts["all_reduce"], groups) == (sums, 1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_scattered_gradients_go_in_the_buckets_that_are_named(ranks: Any, backend: str) -> None:
    expected = train_reference(CASES["llama"], "sgd", num_steps=1, batch_size=8)
    options = {"buckets": [f"{block[:-1]}{part}.*.weight" for block in BLOCKS for part in ("self_attn", "mlp")]}
    for trained, counts, groups in ranks(4).run(on_ranks, backend, "fsdp", (4,), options, timeout_s=100):
        assert trained.loss == pytest.approx(expected.loss, rel=1e-5)
        assert_same_gradients(trained.gradients, expected)
        assert (counts["reduce_scatter"], groups) == (5, 0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("blocks", "count"), [(True, 5), (False, 21)])
def test_blocks_larger_than_a_bucket_travel_as_one(ranks: Any, backend: str, blocks: bool, count: int) -> None:
    """Two blocks, two tables and a norm; else each parameter by itself."""
    expected = train_reference(CASES["llama"], "sgd", num_steps=1, batch_size=8)
    for trained, counts, _ in ranks(4).run(on_ranks, backend, "fsdp", (4,), {}, {
            "bucket_bytes": 10.0, "fusion": Fusion(blocks=blocks)}, timeout_s=100):
        assert trained.loss == pytest.approx(expected.loss, rel=1e-5)
        assert_same_gradients(trained.gradients, expected)
        assert counts["reduce_scatter"] == count
