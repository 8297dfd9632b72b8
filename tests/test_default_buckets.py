"""Sizes of buckets where the user gives none: the smallest that takes hardly longer than the best."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

import autoparallel
from autoparallel import Cluster, Plan
from autoparallel.capture import capture
from autoparallel.partition import split_batch
from autoparallel.planning import bucket_sizes, joint_search
from autoparallel.planning.bound_kinds import Kind
from autoparallel.planning.bucket_sizes import LARGEST_BYTES, MOST_LONGER, USUAL
from autoparallel.planning.candidates import Candidate
from autoparallel.planning.one_mesh import plan_on
from autoparallel.planning.options import Options
from autoparallel.planning.study import Study
from autoparallel.plans import Hybrid
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer
from autoparallel.pricing.step_seconds import StepSeconds
from autoparallel.replanning import bucket_bytes_of
from autoparallel.schedule.fusion import Fusion
from autoparallel.search.model.problem import evaluate
from autoparallel.strategies.space import StrategySpace
from cost_models import Device, Link
from tests.support.captured import graph_of, plan_again, plan_of
from tests.support.overlapped import Calls
from tests.support.ranks import mesh_of
from tests.support.tiers import slow

MIB = 2**20
#: Pins of parameters that every rank has whole.
REPLICATED = {"layers.*.weight": (Replicate(),)}


class Wide(torch.nn.Module):
    """Layers of 16 MiB each."""

    def __init__(self, layers: int = 40) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2048, 2048, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


with torch.device("meta"):
    WIDE = Wide()
    GRAPH = capture(WIDE, (torch.empty(64 * 2048, 2048),))


def _wide(devices: int, **options: Any) -> Plan:
    cluster = Cluster.load("h100-sxm", num_devices=devices, software="none")
    return plan_again(WIDE, cluster, (torch.empty(64 * devices, 2048, device="meta"),),
                      **{"mesh_shape": (devices,), "baseline": "ddp", **options})


@pytest.fixture(scope="module")
def made() -> Plan:
    """On 2,048 ranks."""
    return _wide(2048)


def test_the_smallest_size_is_taken_that_takes_hardly_longer_than_the_best(made: Plan) -> None:
    steps = {size: _wide(2048, bucket_bytes=size).prediction.step_s for size in USUAL}
    most_s = (1 + MOST_LONGER) * min(steps.values())
    chosen = min(size for size, step_s in steps.items() if step_s <= most_s)
    assert chosen > USUAL[0] and made.hybrid.bucket_bytes == chosen
    assert made.prediction.step_s == steps[chosen]


def test_few_ranks_keep_25_mib_and_no_step_is_priced_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where larger buckets cannot save 3 %, their steps are not simulated."""
    monkeypatch.setattr(bucket_sizes, "_Sizes", None)
    assert _wide(8).hybrid == Hybrid(zero_stage=_wide(8).hybrid.zero_stage)
    for cluster in (Cluster.load("local-cpu", num_devices=4), Cluster.load("local-cpu", num_devices=8)):
        for baseline in ("ddp", "fsdp"):
            made = plan_of("llama", cluster, mesh_shape=(cluster.num_devices,), baseline=baseline)
            assert (made.hybrid.bucket_bytes, made.hybrid.fusion) == (25 * MIB, Fusion())


def test_a_plan_its_problem_and_its_bound_are_of_the_chosen_size() -> None:
    made = _wide(2048, baseline=None, pins=REPLICATED, search="exact")
    assert made.hybrid.bucket_bytes > 25 * MIB
    space = StrategySpace(split_batch(GRAPH, 1).body, made.mesh_shape)
    cluster = Cluster.load("h100-sxm", num_devices=2048, software="none")
    pricer = SpacePricer(Prices(space, cluster), counts=ExecutionCounts(space, made.hybrid))
    judged = evaluate(pricer.full(), pricer.choice_of(made.strategies_on(space)))
    assert made.evidence.objective_s == judged.objective and made.prediction.peak_bytes == judged.peak_bytes
    assert made.prediction.added_s - made.prediction.waiting_s == pytest.approx(judged.objective, rel=1e-9)
    best = _wide(2048, baseline=None, pins=REPLICATED, search="exact", bucket_bytes=made.hybrid.bucket_bytes)
    assert 0 < made.evidence.lower_bound_s <= best.evidence.objective_s
    assert isinstance(made.study, Study) and made.study.solution.objective == judged.objective


def test_the_file_the_report_and_plans_again_know_the_size(made: Plan, tmp_path: Any) -> None:
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").hybrid == made.hybrid
    assert f"buckets of {made.hybrid.bucket_bytes / MIB:.0f} MiB" in " ".join(made.report().split())
    given = _wide(2048, bucket_bytes=made.hybrid.bucket_bytes)
    assert bucket_bytes_of(made.hybrid) is None and bucket_bytes_of(given.hybrid) == made.hybrid.bucket_bytes
    assert bucket_bytes_of(replace(made.hybrid, bucket_bytes=1e6)) == 1e6    # of an older file


def test_a_size_that_does_not_fit_is_not_taken(made: Plan) -> None:
    """A bucket is a copy of its gradients."""
    limit = made.prediction.peak_bytes + 10 * MIB
    assert made.hybrid.bucket_bytes > 50 * MIB
    assert _wide(2048, memory_limit_bytes=limit).hybrid.bucket_bytes == 25 * MIB


def test_a_trial_plan_has_the_usual_size_and_its_answer_the_chosen_one(made: Plan) -> None:
    options = Options(search="local", pins=REPLICATED)
    cluster = Cluster.load("h100-sxm", num_devices=2048, software="none")
    trial = plan_on(split_batch(GRAPH, 1), cluster, (2048,), None, options, options.hybrid(1), made.strategies_on)
    assert trial.hybrid.bucket_bytes == 25 * MIB and isinstance(trial.study, Study) and trial.study.answer is not None
    answer = trial.study.answer()
    assert answer.hybrid.bucket_bytes > 25 * MIB and answer.strategies == trial.strategies
    assert answer.prediction.step_s < trial.prediction.step_s / (1 + MOST_LONGER)
    assert isinstance(answer.study, Study) and answer.study.answer is None


def test_a_joint_search_ends_with_the_chosen_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its answer is a trial plan, which no full search continues."""
    monkeypatch.setattr(joint_search, "MOST_FULL", 0)
    found = _wide(2048, baseline=None, joint=True, pins=REPLICATED, micro_batches=1, recompute="none",
                  pipeline_stages=1, time_limit_s=3)
    assert found.hybrid.bucket_bytes > 25 * MIB


@pytest.mark.parametrize(("given", "size"), [(False, LARGEST_BYTES), (True, 25 * MIB)])
def test_bounds_are_of_the_largest_size_that_may_be_chosen(given: bool, size: int) -> None:
    assert Kind.of(Candidate(Hybrid(2, fusion=Fusion(given=given)), (4,))).hybrid.bucket_bytes == size


@pytest.mark.parametrize("name", ["h100-sxm", "a100-sxm", "local-cpu"])
@pytest.mark.parametrize("devices", [8, 64, 2048])
def test_a_byte_in_a_larger_bucket_takes_no_longer(name: str, devices: int) -> None:
    """So that the bound of the largest size holds for all."""
    devices = min(devices, 8) if name == "local-cpu" else devices
    cluster = Cluster.load(name, num_devices=devices)
    space = StrategySpace(graph_of("mlp"), (devices,))
    seconds = StepSeconds(space, cluster, Prices(space, cluster).groups)
    sizes = [size * MIB for size in (1, 5, 25, 37, 50, 72, 100, 200, 400)]
    each = [float(seconds.bucket_s(seconds.groups[0,], torch.tensor(1e5).numpy(), size)) for size in sizes]
    assert each == sorted(each, reverse=True) or math.isclose(each[0], each[-1])


# ------------------------------------------------------------------------------------------------- programs on ranks


def sums_of_backward(backend: str) -> tuple[int, int, float]:
    """On each rank: the plan's size in MiB, the all-reduces of a backward, and how far its gradients are from one
    process's (largest difference over largest gradient)."""
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(24))), torch.randn(8, 1024)
    model(x).square().sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    device = Device("far", {"float32": 1e12}, 1e12, 1.0, 1e12, 0.0, overlap_slowdown=1.0)
    far = Cluster("far", device, (Link("net", 4, 1.0, 1e9),), 4)
    parallel: Any = autoparallel.compile(model, mesh_of(4), example_inputs=(x,), cluster=far, baseline="ddp",
                                         backend=backend)
    loss = parallel(x).square().sum()
    with Calls() as calls:
        loss.backward()
    sums = sum(times for op, times in calls.counts.items() if op.startswith(("all_reduce", "sum_bucket")))
    errors = [float((one.grad.full_tensor() - expected[name]).abs().max() / expected[name].abs().max())
              for name, one in parallel.named_parameters()]
    return int(parallel.plan.hybrid.bucket_bytes) // MIB, sums, max(errors)


@pytest.mark.parametrize("backend", ["eager", slow("aot_eager")])
def test_programs_have_the_chosen_buckets(ranks: Any, backend: str) -> None:
    """Of 96 MiB of gradients over links of much latency: the last layer's, whose gradient is first, and the others."""
    for size, sums, error in ranks(4).run(sums_of_backward, backend, timeout_s=100):
        assert (size, sums) == (100, 2) and error < 1e-4
