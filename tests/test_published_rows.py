"""Rows of published runs are understood, or refused with a reason."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published_runs import AbstainError, explain, predict
from benchmarks.published_runs.predict import profile_of
from benchmarks.published_runs.price import Pricer
from benchmarks.published_runs.rows import Model, read
from cost_models.profile import load
from tests.support.published_rows import BRIDGE, EXPERTS, FSDP, row, seconds


@pytest.mark.parametrize(("changes", "says"), [
    ({"model__hidden": None}, "model.hidden is not stated"),
    ({"model__heads": None}, "model.heads"),
    ({"model__seq_len": None}, "seq_len"),
    ({"model__hybrid_mamba": True}, "state-space"),
    ({"hardware__gpu": "TPU v4"}, "TPU v4"),
    ({"plan__micro_batch": None, "plan__global_batch": None}, "neither the micro-batch nor the global batch"),
    ({"plan__tp": 0}, "at least 1"),
    ({"plan__dp": 0}, "at least 1"),
    ({"model__heads": 0}, "impossible sizes"),
    ({"model__layers": 9.5}, "not a whole number"),
])
def test_missing_fields_are_named(changes: dict[str, Any], says: str) -> None:
    assert predict(row(**changes)) is None
    with pytest.raises(AbstainError, match=says):
        explain(row(**changes))


def test_the_rates_of_a_simulator_are_not_the_machines() -> None:
    """vTrain's configurations say 150 GB/s; gradients of 1.3 GB are summed over two of its GPUs in 6.7 ms."""
    rates = [read(row(hardware__intra_bw=words)).cluster.links[0].bandwidth_bytes_per_s
             for words in (None, "150 GB/s (vTrain config intra_node_bandwidth)", "200 GB/s")]
    assert rates[0] == rates[1] > 2.2e11 and rates[2] == 2e11


@pytest.mark.parametrize("part", ["source", "measured", "derived", "id"])
def test_rows_may_lack_what_is_not_needed(part: str) -> None:
    short = row()
    del short[part]
    assert predict(short) is not None


@pytest.mark.parametrize("value", [{}, {"model": None}, {"model": {}, "plan": {}, "hardware": {}}, {"plan": 3}])
def test_nonsense_is_refused(value: dict[str, Any]) -> None:
    assert predict(value) is None


@settings(max_examples=60)
@given(st.data())
def test_any_field_may_be_absent(data: st.DataObject) -> None:
    """A row with fields missing gives a positive prediction or None, never an error."""
    changed = row()
    for part in ("model", "hardware", "plan"):
        for name in data.draw(st.sets(st.sampled_from(sorted(changed[part])), max_size=4)):
            changed[part][name] = None
    prediction = predict(changed)
    assert prediction is None or (prediction["step_time_s"] > 0 and prediction["peak_memory_bytes"] > 0)


NONSENSE = st.sampled_from([0, 1, -1, 3, 7, 1.5, 10**9, 10**15, 1e300, math.nan, math.inf, True, "", "full", "8", [],
                            {}, "ZeRO-3", "FULL_SHARD", "0 GB/s", "1.2.3 GB/s", "0 Gb/s per GPU", {"dispatcher": 3}])


def check_any_field(data: st.DataObject) -> None:
    """Fields changed to what they never hold: a finite prediction or None, and never an error."""
    changed = row(model__moe=dict(EXPERTS), plan__ep=8, plan__fsdp=None, plan__overlap=None, plan__grad_accum=None,
                  hardware__intra_bw=None, hardware__gpu_mem_gb=80)
    for part in data.draw(st.lists(st.sampled_from(["model", "hardware", "plan", "source", "moe"]), max_size=3)):
        target = changed["model"].get("moe") if part == "moe" else changed[part]
        if isinstance(target, dict) and target:
            target[data.draw(st.sampled_from(sorted(target)))] = data.draw(NONSENSE)
    prediction = predict(changed)
    if prediction is not None:
        parts = (prediction[key] for key in ("step_time_s", "peak_memory_bytes", "mfu"))
        assert all(0 < value < math.inf for value in parts)


@settings(max_examples=40)
@given(st.data())
def test_any_field_may_be_anything(data: st.DataObject) -> None:
    check_any_field(data)


@pytest.mark.slow
@settings(max_examples=400)
@given(st.data())
def test_any_field_may_be_anything_many_times(data: st.DataObject) -> None:
    check_any_field(data)


@pytest.mark.parametrize(("gpu", "memory", "machine"), [
    ("A100", None, "a100-sxm"), ("A100-40GB", None, "a100-sxm-40"), ("NVIDIA A100-SXM4-80GB", 80, "a100-sxm"),
    ("A100 PCIe", 80, "a100-pcie"), ("A100", 40, "a100-sxm-40"), ("V100", None, "v100-sxm-32"),
    ("Tesla V100-SXM2-16GB", None, "v100-sxm-16"), ("NVIDIA H100 80GB HBM3", None, "h100-sxm"),
    ("H100-96GB-HBM2e-500W", 96, "h100-hbm2e"), ("H800", None, "h100-sxm"), ("H200", None, "h200"),
    ("GB200 NVL72", None, "gb200-nvl72"), ("B200-192GB", None, "b200"), ("MI300X", None, "mi300x"),
])
def test_machines_are_known_by_many_names(gpu: str, memory: float | None, machine: str) -> None:
    assert read(row(hardware__gpu=gpu, hardware__gpu_mem_gb=memory)).machine == machine


@pytest.mark.parametrize("gpu", ["H100 PCIe", "GH200", "L40S", "TPU v4", "", None, 3])
def test_other_machines_are_refused(gpu: Any) -> None:
    with pytest.raises(AbstainError, match="no description of GPU"):
        read(row(hardware__gpu=gpu))


def test_unknown_sources_are_dated_by_what_they_do() -> None:
    nobody = {"source__title": "somebody's blog"}
    llama = {"model__gated_mlp": True, "model__kv_heads": 8}
    assert read(row(**nobody)).stack == "megatron-2022"
    assert read(row(**nobody, plan__sequence_parallel=None, plan__recompute="full")).stack == "megatron-2021"
    assert read(row(**nobody, **llama)).stack == "megatron-core"
    assert read(row(**nobody, hardware__gpu="H100-80GB")).stack == "megatron-core"
    assert read(row(**nobody, **FSDP)).stack == "torch-eager"
    assert read(row(**nobody, **FSDP, plan__compile=True)).stack == "torch-compile"
    assert read(row(source__title="Megatron-LM README", hardware__gpu="H100-80GB")).stack == "megatron-core"


@pytest.mark.parametrize(("stated", "stage"), [(None, 0), (0, 0), (1, 1), (3.0, 3), ("ZeRO-3", 3), ("stage2", 2),
                                               ("prefer_reduce_scatter", 2), (True, 2), (False, 0)])
def test_stages_of_zero_in_numbers_and_words(stated: Any, stage: int) -> None:
    assert read(row(plan__zero=stated)).plan.zero_stage == stage


def test_named_modules_are_recomputed() -> None:
    """Megatron-Core's selective recomputation: more modules take longer, and none is free."""
    bridge = {"source__title": "NVIDIA Megatron-Bridge performance summary", "plan__sequence_parallel": None,
              "model__moe": EXPERTS}
    times = [seconds(**bridge, plan__recompute=how) for how in
             ("none", "selective:core_attn", "selective:core_attn,moe_act", "selective:core_attn,moe_act,moe")]
    assert times == sorted(times) and times[0] < times[1] < times[2] < times[3]


def test_dispatch_as_stated() -> None:
    bridge = {"source__title": "NVIDIA Megatron-Bridge performance summary", "plan__tp": 1, "plan__pp": 1,
              "plan__virtual_stages": None, "plan__dp": 64, "model__moe": EXPERTS, "plan__ep": 64,
              "plan__micro_batch": 8, "plan__global_batch": 512}
    ways = [{}, {"dispatcher": "alltoall"}, {"ep": "EP overlap off"}, {"ep": "EP overlap on"}]
    plain, copies, off, on = (seconds(**bridge, plan__overlap=how) for how in ways)
    assert on < plain < off and plain < copies




def test_vectors_of_experts_are_added_apart() -> None:
    """GPT-OSS's experts have biases, and half of its layers look back 128 tokens."""
    oss, other = (Pricer(run, profile_of(run, load())) for run in
                  (read(row(**BRIDGE, model__name=name)) for name in ("GPT OSS 120B", "Other 120B")))
    assert oss.m.window == 128 and other.m.window == 0
    assert oss.layer.attention_s()[0] < 0.6 * other.layer.attention_s()[0]
    more = oss.layer.elementwise(True) - other.layer.elementwise(True)
    assert more == pytest.approx(oss.machine.tokens * 8 * (1024 + 12288) * 28)
    fused = read(row(**{**BRIDGE, "source__locator": "26.08 NeMo", "plan__precision": "MXFP8"},
                     model__name="GPT OSS 120B"))
    assert Pricer(fused, profile_of(fused, load())).layer.elementwise(True) == other.layer.elementwise(True)


@pytest.mark.parametrize(("locator", "gpu", "name", "precision", "graphs", "dispatcher"), [
    ("26.04 NeMo", "GB200", "DeepSeekV3", "MXFP8", "parts", ""),
    ("26.08 NeMo", "GB200", "DeepSeekV3", "MXFP8", "step", ""),
    ("26.04 NeMo", "B200", "DeepSeekV3", "MXFP8", "none", ""),
    ("26.04 NeMo", "H100-80GB", "Qwen3_235B_a22B", "FP8", "none", "alltoall"),
    ("25.11 NeMo", "B200", "Qwen3_30B_a3B", "FP8-MX", "none", "alltoall"),
    ("", "B200", "DeepSeekV3", "MXFP8", "none", ""),
])
def test_recipes_fill_in_what_tables_leave_out(locator: str, gpu: str, name: str, precision: str, graphs: str,
                                               dispatcher: str) -> None:
    plan = read(row(**{**BRIDGE, "source__locator": locator, "hardware__gpu": gpu}, model__name=name,
                    plan__precision=precision)).plan
    assert (plan.graphs, plan.dispatcher) == (graphs, dispatcher)


def test_experts_are_launched_one_by_one_but_by_graphs() -> None:
    run = read(row(**BRIDGE))

    def kernels(**changes: Any) -> float:
        return Pricer(replace(run, plan=replace(run.plan, **changes)), profile_of(run, load())).layer.expert_kernels()

    times = [kernels(graphs=graphs) for graphs in ("none", "parts", "step")]
    assert times[0] > times[1] > times[2]
    assert kernels(expert=8) - kernels(expert=64) == pytest.approx(7 * load()["stacks"]["default"]["host_expert"])


def test_deepspeed_sums_gradients_of_two_bytes_in_float32() -> None:
    """18 bytes an element of every micro-batch, 6 in fp16, none where there is but one; 4 bytes go over the network."""
    def priced(**changes: Any) -> Pricer:
        run = read(row(source__title="BigScience BLOOM", **changes))
        return Pricer(run, profile_of(run, load()))

    bf16, fp16 = (priced(plan__precision=precision) for precision in ("bf16", "fp16"))
    assert (bf16.run.gradient_bytes, bf16.p.zero_stage, fp16.run.gradient_bytes, fp16.p.zero_stage) == (4, 1, 2, 0)
    elements = sum(n * k * count for _, n, k, count in bf16.layer.linears(False))
    more = bf16.layer.passes(False)[1].compute_s - fp16.layer.passes(False)[1].compute_s
    rate = bf16.machine.device.memory_bandwidth_bytes_per_s * bf16.machine.device.memory_bandwidth_efficiency
    assert more == pytest.approx(12 * elements / rate)
    once = {"plan__micro_batch": 64, "plan__global_batch": 64, "plan__pp": 1, "plan__dp": 1}
    assert priced(plan__precision="bf16", **once).machine.grow_s(1e9) == 0.0
    assert not read(row(plan__precision="bf16")).float32_sums


def test_layers_traced_alone_are_not_run_again() -> None:
    """vTrain's rows say "full", but no A100 could be as fast if they were."""
    traced = row(source__title="vTrain measured validation data", source__locator="data/ground_truth_single.csv",
                 plan__recompute="full")
    assert (read(traced).stack, read(traced).plan.recompute) == ("traced", "none")
    others = row(source__title="vTrain measured validation data", plan__recompute="full")
    assert (read(others).stack, read(others).plan.recompute) == ("megatron-deepspeed", "full")


def test_small_tensors_are_found_in_the_cache() -> None:
    run = read(row())
    pricer = Pricer(run, profile_of(run, load()))
    small, large, all_memory = (pricer.machine.traffic_s(1e9, size) for size in (1e6, 1e9, math.inf))
    assert 0.45 * all_memory < small < 0.6 * all_memory
    assert 0.98 * all_memory < large < all_memory


def test_numbers_do_not_leak_from_what_was_measured() -> None:
    told = predict(row())
    assert told == predict({**row(), "measured": {}, "derived": {}})


@pytest.mark.parametrize(("locator", "gpu", "stack"), [
    ("26.04.01 NeMo Container / LLAMA3_70B", "GB300", "nemo-26.02"), ("26.08 NeMo", "GB300", "nemo-26.06"),
    ("26.08 NeMo", "H100-80GB", "nemo-26.02"), ("25.07 NeMo", "B200", "nemo-25.09"), ("", "B200", "megatron-core"),
])
def test_releases_are_generations(locator: str, gpu: str, stack: str) -> None:
    dated = row(source__title="NVIDIA Megatron-Bridge performance summary", source__locator=locator, hardware__gpu=gpu)
    assert read(dated).stack == stack


def test_a_model_checks_its_sizes() -> None:
    with pytest.raises(AbstainError, match="impossible sizes"):
        Model(1, 8, 8, 2, 4, 4, 8, 8)
