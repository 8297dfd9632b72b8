"""Published runs: rows are understood or refused with a reason, predictions hold physics and the pinned figures."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published_runs import AbstainError, explain, predict, report
from benchmarks.published_runs.__main__ import compare, line
from benchmarks.published_runs.fit import (
    FREE,
    PRIORS,
    SHARES,
    SPREAD,
    Fitted,
    Sample,
    concerns,
    fit,
    folds,
    inward,
    log_errors,
    lookup,
    outward,
)
from benchmarks.published_runs.predict import profile_of
from benchmarks.published_runs.price import Pass, Pricer, larger, places
from benchmarks.published_runs.report import Pair, contradicted
from benchmarks.published_runs.rows import Model, read
from cost_models.profile import dump, load


def row(**changes: Any) -> dict[str, Any]:
    """Korthikanti et al. 2022, table 5: 175B on 64 A100s with selective recomputation; dotted keys change it."""
    base: dict[str, Any] = {
        "id": "korth-004",
        "source": {"title": "Korthikanti et al., Reducing Activation Recomputation, Table 5"},
        "model": {"name": "Megatron-175B", "layers": 96, "hidden": 12288, "ffn": 49152, "heads": 96, "kv_heads": 96,
                  "vocab": 51200, "seq_len": 2048, "gated_mlp": False, "tied_embeddings": True, "moe": None},
        "hardware": {"gpu": "A100-80GB", "n_gpus": 64, "gpus_per_node": 8, "inter_bw": "HDR InfiniBand (Selene)"},
        "plan": {"dp": 1, "tp": 8, "pp": 8, "cp": 1, "virtual_stages": 3, "schedule": "interleaved-1f1b", "zero": 0,
                 "sequence_parallel": True, "micro_batch": 1, "global_batch": 64, "recompute": "selective",
                 "precision": "fp16/bf16"},
        "measured": {"step_time_s": 13.75},
        "derived": {},
    }
    for key, value in changes.items():
        part, name = key.split("__")
        base[part][name] = value
    return base


FSDP: dict[str, Any] = {"plan__dp": 64, "plan__tp": 1, "plan__pp": 1, "plan__virtual_stages": None, "plan__zero": 3,
                        "plan__fsdp": "FULL_SHARD", "plan__schedule": "none", "plan__sequence_parallel": None}
EXPERTS = {"experts": 64, "topk": 8, "expert_ffn": 1024, "shared_ffn": 1024, "moe_layers": 90}


def seconds(**changes: Any) -> float:
    prediction = predict(row(**changes))
    assert prediction is not None
    return float(prediction["step_time_s"])


def gigabytes(**changes: Any) -> float:
    prediction = predict(row(**changes))
    assert prediction is not None
    return float(prediction["peak_memory_bytes"]) / 1e9


# --- figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "measured_s"), [
    ({}, 13.75),
    ({"plan__recompute": "full", "plan__sequence_parallel": False}, 18.13),
    ({"model__layers": 48, "model__hidden": 6144, "model__ffn": 24576, "model__heads": 64, "model__kv_heads": 64,
      "plan__pp": 1, "plan__virtual_stages": 1, "plan__micro_batch": 4, "plan__global_batch": 4,
      "hardware__n_gpus": 8}, 1.10),
    ({"model__layers": 128, "model__hidden": 25600, "model__ffn": 102400, "model__heads": 160, "model__kv_heads": 160,
      "plan__pp": 64, "plan__virtual_stages": 1, "plan__schedule": "1f1b", "plan__global_batch": 512,
      "hardware__n_gpus": 512}, 71.49),
])
def test_korthikanti_table_5(changes: dict[str, Any], measured_s: float) -> None:
    assert seconds(**changes) == pytest.approx(measured_s, rel=0.09)


def test_utilisation_counts_no_recomputation() -> None:
    """Korthikanti et al. print 51.4 % for the 175B model."""
    prediction = predict(row())
    assert prediction is not None
    assert prediction["mfu"] * prediction["step_time_s"] == pytest.approx(0.514 * 13.75, rel=0.01)


def test_parts_add_up() -> None:
    parts = explain(row(plan__dp=2, hardware__n_gpus=128, plan__global_batch=128))["parts_s"]
    assert parts["pipeline_s"] + parts["data_s"] + parts["optimizer_s"] < parts["step_s"]
    assert parts["pipeline_s"] + parts["data_s"] + parts["optimizer_s"] == pytest.approx(parts["step_s"], rel=0.01)
    assert 0 < parts["bubble_s"] < 0.1 * parts["step_s"]    # 7 of 64 micro-batches, in thirds


@pytest.mark.parametrize(("name", "billions"), [("dense", 174.6), ("experts", 671.0)])
def test_parameters_are_those_of_the_papers(name: str, billions: float) -> None:
    model = read(row()).model
    if name == "experts":
        deepseek = {"name": "DeepSeekV3", "layers": 61, "hidden": 7168, "ffn": 18432, "heads": 128, "kv_heads": 128,
                    "vocab": 129280, "seq_len": 4096, "gated_mlp": True, "tied_embeddings": False,
                    "moe": {"experts": 256, "topk": 8, "expert_ffn": 2048, "shared_ffn": 2048, "moe_layers": 58}}
        model = read({**row(), "model": deepseek}).model
    assert model.parameters() / 1e9 == pytest.approx(billions, rel=0.002)


def test_full_recomputation_costs_a_forward() -> None:
    full, selective = (explain(row(plan__recompute=how))["parts_s"] for how in ("full", "selective"))
    extra = full["layer_backward_s"] - selective["layer_backward_s"]
    assert 0.8 * full["layer_forward_s"] < extra < full["layer_forward_s"]


# --- physics --------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.sampled_from(["none", "selective", "full"]),
       st.booleans())
def test_more_work_takes_longer(tp: int, pp: int, recompute: str, flash: bool) -> None:
    title = "MosaicML llm-foundry" if flash else "Megatron-LM"
    plan = {"plan__tp": tp, "plan__pp": pp, "plan__dp": 64 // tp // pp, "plan__virtual_stages": 1,
            "plan__recompute": recompute, "source__title": title}
    least = seconds(**plan)
    assert seconds(**plan, plan__global_batch=128) > least
    assert seconds(**plan, model__layers=104) > least
    assert seconds(**plan, model__seq_len=4096) > least
    assert seconds(**plan, model__ffn=65536) > least


@settings(max_examples=30)
@given(st.sampled_from(["200 Gb/s per node", "400 Gb/s per node", "1600 Gb/s per node"]), st.booleans(),
       st.sampled_from([1, 8]))
def test_a_slower_link_never_makes_a_plan_faster(network: str, fsdp: bool, tp: int) -> None:
    plan = FSDP if fsdp else {"plan__tp": tp, "plan__dp": 8 // tp}
    fast, slow = seconds(**plan, hardware__inter_bw=network), seconds(**plan, hardware__inter_bw="100 Gb/s per node")
    assert slow >= fast
    assert seconds(**plan, hardware__intra_bw="100 GB/s") >= seconds(**plan, hardware__intra_bw="200 GB/s")


@settings(max_examples=40)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([0, 1, 3]), st.booleans(),
       st.sampled_from(["none", "selective", "full"]))
def test_sharding_more_never_uses_more_memory(tp: int, dp: int, zero: int, parallel: bool, recompute: str) -> None:
    plan = {"plan__pp": 1, "plan__virtual_stages": 1, "plan__zero": zero, "plan__recompute": recompute,
            "plan__fsdp": "FULL_SHARD" if zero == 3 else None}
    least = gigabytes(**plan, plan__tp=tp, plan__dp=dp, plan__sequence_parallel=parallel)
    assert gigabytes(**plan, plan__tp=2 * tp, plan__dp=dp, plan__sequence_parallel=parallel) <= least
    assert gigabytes(**plan, plan__tp=tp, plan__dp=2 * dp, plan__sequence_parallel=parallel) <= least


def test_defect_activation_memory_left_out() -> None:
    """Larger micro-batches and longer sequences take memory; what is gathered by FSDP does too."""
    assert gigabytes(plan__micro_batch=2) > gigabytes() + 5
    assert gigabytes(model__seq_len=4096) > gigabytes() + 5
    state = 16 * 174.6 / 64    # parameters, gradients and Adam's state in float32, over 64 devices
    assert gigabytes(**FSDP, plan__recompute="full") > state + 3


def test_defect_zero_and_tensor_parallelism_divided_twice() -> None:
    """ZeRO divides what tensor parallelism leaves, once: 174.6e9 x 12 bytes over 8 x 8 devices, no less."""
    plan = {"plan__tp": 8, "plan__dp": 8, "plan__pp": 1, "plan__virtual_stages": 1, "plan__recompute": "full"}
    saved = gigabytes(**plan, plan__zero=0) - gigabytes(**plan, plan__zero=1)
    more = 1 + load()["stacks"]["default"]["fragments"]
    assert saved == pytest.approx(more * 12 * 174.6 / 8 * 7 / 8, rel=0.01)


def test_recomputation_trades_memory() -> None:
    none, selective, full = (gigabytes(plan__recompute=how) for how in ("none", "selective", "full"))
    assert none > selective > full


def test_activations_in_flight_are_those_of_the_schedule() -> None:
    """Interleaving holds 1 + (p - 1)/(p v) times as much on the first stage (Korthikanti et al., section 4.2.3)."""
    from benchmarks.published_runs.peak import activation_bytes, layer_bytes

    def saved(**changes: Any) -> float:
        run = read(row(**changes))
        pricer = Pricer(run, profile_of(run, load()))
        return activation_bytes(pricer, 0) - 0.5 * layer_bytes(pricer, False)

    plain, dealt = saved(plan__virtual_stages=1, plan__schedule="1f1b"), saved()
    assert dealt / plain == pytest.approx(1 + 7 / 24)
    assert saved(plan__virtual_stages=1, plan__schedule="gpipe") / plain == 64 / 8


def test_saved_activations_are_korthikantis() -> None:
    """s b h (10 + (24 + 5 a s/h)/t), all of it over t with sequence parallelism (their equations 2 and 4)."""
    from benchmarks.published_runs.peak import layer_bytes

    for parallel in (False, True):
        run = read(row(plan__recompute="none", plan__sequence_parallel=parallel))
        pricer = Pricer(run, profile_of(run, load()))
        m, s, t = run.model, run.model.seq_len, run.plan.tensor
        scores = 5 * m.heads * s / m.hidden
        paper = s * m.hidden * (10 / (t if parallel else 1) + (24 + scores) / t)
        assert layer_bytes(pricer, False) == pytest.approx(paper)


def test_a_token_goes_once_to_a_place() -> None:
    assert places(1, 8) == 1
    assert places(64, 1) == pytest.approx(1)
    assert places(8, 8) < 8 and places(10**6, 8) == pytest.approx(8, rel=1e-4)


def test_experts_cost_less_than_they_weigh() -> None:
    mixed = {"model__moe": EXPERTS, "source__title": "NVIDIA Megatron-Bridge performance summary", "plan__ep": 8}
    model = read(row(**mixed)).model
    assert model.parameters(active=True) < model.parameters()
    spread, together = seconds(**mixed), seconds(**{**mixed, "plan__ep": 1})
    assert spread > 0 and together > 0
    assert gigabytes(**mixed) < gigabytes(**{**mixed, "plan__ep": 1})


def test_boards_of_four_make_eight_tensor_ranks_slow() -> None:
    boards = {"hardware__intra_bw": "NVLink (NVLink 4 inter-gpu connects)"}
    assert [link.num_devices for link in read(row(**boards)).cluster.links[:2]] == [4, 8]
    half = {"plan__tp": 4, "plan__dp": 2}
    slower = [seconds(**plan, **boards) / seconds(**plan) for plan in ({}, half)]
    assert slower[0] > 1.05 and slower[0] > slower[1] + 0.02


def test_large_jobs_use_64_of_a_rack_of_72() -> None:
    rack = {"hardware__gpu": "GB200", "hardware__gpus_per_node": 4, "plan__tp": 1, "model__moe": EXPERTS,
            "source__title": "NVIDIA Megatron-Bridge performance summary", "plan__dp": 16, "plan__pp": 16,
            "plan__virtual_stages": 1, "plan__global_batch": 256, "plan__ep": 16, "hardware__n_gpus": 256}
    run = read(row(**rack))
    pricer = Pricer(run, profile_of(run, load()))
    assert [count for count, _ in pricer.group("expert").levels] == [16, 1]
    assert read(row(**{**rack, "plan__pp": 4})).cluster.links[0].num_devices == 72


def test_fsdp_by_host_gathers_inside_it() -> None:
    whole, hybrid = (read(row(**FSDP | {"plan__fsdp": kind})) for kind in ("FSDP", "HSDP"))
    gather = [Pricer(run, profile_of(run, load())).fsdp_s(False)[0] for run in (whole, hybrid)]
    assert gather[1] < gather[0]


def test_compiling_fuses_element_wise_work() -> None:
    plan = FSDP | {"source__title": "torchtitan benchmark", "plan__recompute": "none"}
    assert seconds(**plan, plan__compile=True) < seconds(**plan, plan__compile=False)


def test_the_smooth_maximum() -> None:
    assert larger(0.0, 0.0) == 0.0 and larger(2.0, 0.0) == 2.0
    assert 1.0 < larger(1.0, 1.0) < 1.15


def test_ranks_tied_by_collectives_hide_less_of_their_hosts() -> None:
    constants = replace(profile_of(read(row()), load()), tied=2.0, hide_tensor=0.0)
    assert Pass(1.0, 0.0, 0.0, 1.0).seconds(constants) == larger(1.0, 1.0) < 1.15
    assert Pass(0.5, 0.5, 0.0, 1.0).seconds(constants) == pytest.approx(2**0.5)


def test_an_odd_vocabulary_slows_the_head() -> None:
    """Megatron pads it; vTrain's traces have 50,257 columns on one rank, 25,128, which start on 16 bytes, on two."""
    traced = {"source__title": "vTrain", "plan__virtual_stages": 1, "plan__sequence_parallel": None,
              "source__locator": "data/ground_truth_single.csv", "hardware__n_gpus": 8, "plan__pp": 1}

    def head(vocab: int, tensor: int) -> float:
        run = read(row(**traced, model__vocab=vocab, plan__tp=tensor, plan__dp=8 // tensor))
        constants = profile_of(run, load())
        return Pricer(run, replace(constants, loss_bytes=0.0)).head_s()

    assert head(50257, 1) > 1.3 * head(50304, 1)
    assert head(50257, 2) < 0.45 * head(50257, 1)


# --- rows -----------------------------------------------------------------------------------------------------------


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
def test_what_is_missing_is_named(changes: dict[str, Any], says: str) -> None:
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


@settings(max_examples=150)
@given(st.data())
def test_any_field_may_be_anything(data: st.DataObject) -> None:
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


def test_what_is_named_is_run_again() -> None:
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


BRIDGE = {"source__title": "NVIDIA Megatron-Bridge performance summary", "source__locator": "26.04 NeMo Container",
          "hardware__gpu": "GB200", "plan__tp": 1, "plan__pp": 1, "plan__virtual_stages": None, "plan__dp": 64,
          "model__moe": EXPERTS, "plan__ep": 64, "plan__micro_batch": 4, "plan__global_batch": 1280,
          "plan__recompute": None}


def test_vectors_of_experts_are_added_apart() -> None:
    """GPT-OSS's experts have biases, and half of its layers look back 128 tokens."""
    oss, other = (Pricer(run, profile_of(run, load())) for run in
                  (read(row(**BRIDGE, model__name=name)) for name in ("GPT OSS 120B", "Other 120B")))
    assert oss.m.window == 128 and other.m.window == 0
    assert oss.attention_s()[0] < 0.6 * other.attention_s()[0]
    more = oss.elementwise(True) - other.elementwise(True)
    assert more == pytest.approx(oss.tokens * 8 * (1024 + 12288) * 28)
    fused = read(row(**{**BRIDGE, "source__locator": "26.08 NeMo", "plan__precision": "MXFP8"},
                     model__name="GPT OSS 120B"))
    assert Pricer(fused, profile_of(fused, load())).elementwise(True) == other.elementwise(True)


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
        return Pricer(replace(run, plan=replace(run.plan, **changes)), profile_of(run, load())).expert_kernels()

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
    elements = sum(n * k * count for _, n, k, count in bf16.linears(False))
    more = bf16.layer(False)[1].compute_s - fp16.layer(False)[1].compute_s
    rate = bf16.device.memory_bandwidth_bytes_per_s * bf16.device.memory_bandwidth_efficiency
    assert more == pytest.approx(12 * elements / rate)
    once = {"plan__micro_batch": 64, "plan__global_batch": 64, "plan__pp": 1, "plan__dp": 1}
    assert priced(plan__precision="bf16", **once).grow_s(1e9) == 0.0
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
    small, large, all_memory = (pricer.traffic_s(1e9, size) for size in (1e6, 1e9, math.inf))
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


# --- causes of errors -----------------------------------------------------------------------------------------------


def test_the_slowest_of_many_devices_sets_the_pace() -> None:
    some, many = (explain(row(plan__dp=dp, hardware__n_gpus=64 * dp, plan__global_batch=64 * dp))["parts_s"]
                  for dp in (1, 32))
    assert 1.005 < many["layer_forward_s"] / some["layer_forward_s"] < 1.1


def test_sharded_parameters_are_gathered_beside_compute_or_before_it() -> None:
    """DeepSpeed of 2021 gathers tensor by tensor, when each is needed."""
    run = read(row(**FSDP))
    deepspeed, torch = (Pricer(run, profile_of(replace(run, stack=name), load()))
                        for name in ("megatron-deepspeed", "torch-compile"))
    assert deepspeed.beside(1.0, 1.0) > 1.9 and torch.beside(1.0, 1.0) < 1.7
    assert deepspeed.fsdp_s(False)[0] > torch.fsdp_s(False)[0]


def test_utilisations_tell_how_many_layers_are_run_again() -> None:
    """Of 70 % of the layers, where hardware utilisation is 0.38 x (1 + 0.7/3); by default torch's choice of ops."""
    changes = {**FSDP, "source__title": "fms-fsdp", "plan__recompute": "selective", "plan__compile": True,
               "plan__dp": 1, "hardware__n_gpus": 1, "plan__global_batch": 1}
    told = {"step_time_s": 1.0, "mfu": 0.38, "hfu": 0.38 * (1 + 0.7 / 3)}
    parts = explain(row(**changes) | {"measured": told})["parts_s"]
    none = explain(row(**changes | {"plan__recompute": "none"}))["parts_s"]
    extra = parts["layer_backward_s"] - none["layer_backward_s"]
    assert extra == pytest.approx(0.7 * none["layer_forward_s"], rel=0.05)


def test_plans_that_columns_do_not_tell_are_not_predicted() -> None:
    with pytest.raises(AbstainError, match="nnScaler"):
        explain(row(source__title="nnScaler (OSDI 2024)"))


# --- fitting and reporting ------------------------------------------------------------------------------------------


def test_constants_belong_to_no_row_and_no_source() -> None:
    kinds = {"devices", "stacks", "networks"}
    assert {kind for kind, _, _ in FREE} == kinds == set(load())
    text = json.dumps(load())
    assert not any(word in text for word in ("korth", "bigsci", "vtrain", "mbridge", "mpt"))


def test_committed_constants_are_within_physics() -> None:
    table = load()
    for kind, entry, name in FREE:
        value = lookup(table, (kind, entry, name))
        assert 0 < value < (1 if name in SHARES else math.inf)
        off = (inward(name, value) - inward(name, lookup(load(PRIORS), (kind, entry, name)))) / SPREAD[name]
        assert abs(off) < 4, f"{entry}'s {name} is {off:.1f} standard deviations off its prior"


def test_the_fit_finds_what_made_the_data(tmp_path: Path) -> None:
    """Times priced with other constants, then fitted from the priors: little is left of the errors."""
    truth = load(PRIORS)
    truth["devices"]["a100"]["share"] = 0.78
    truth["stacks"]["megatron-2022"]["passes"] = 1.1
    runs = [read(row(plan__recompute=how, plan__micro_batch=mb)) for how in ("full", "selective") for mb in (1, 2)]
    made = [Sample(run, Pricer(run, profile_of(run, truth)).step().step_s, "made") for run in runs]
    before = abs(log_errors(load(PRIORS), made)).max()
    after = abs(log_errors(fit(made), made)).max()
    assert after < 0.02 and after < before / 3, (before, after)
    file = tmp_path / "constants.toml"
    file.write_text(dump(truth, "a test"), "utf-8")
    assert load(file) == truth


def test_constants_leave_alone_the_runs_that_they_do_not_concern() -> None:
    """Which the fit prices no second time."""
    runs = [read(row()), read(row(**FSDP)), read(row(model__moe=EXPERTS, source__title="NeMo", plan__tp=1, plan__dp=8)),
            read(row(hardware__gpu="H100-80GB", plan__precision="fp8", plan__tp=1, plan__pp=1, plan__dp=1,
                     hardware__n_gpus=1, plan__virtual_stages=1, source__title="torchtitan"))]
    made, before = [Sample(run, 1.0, "") for run in runs], load()
    for free in FREE:
        table = {kind: {entry: dict(values) for entry, values in entries.items()} for kind, entries in before.items()}
        table[free[0]].setdefault(free[1], {})[free[2]] = 0.9 * lookup(before, free)
        changed = log_errors(table, made) != log_errors(before, made)
        assert not [run for run, moved in zip(runs, changed, strict=True) if moved and not concerns(free, run)], free


def test_a_source_left_out_does_not_count() -> None:
    """A constant that only its rows determine goes back to its prior; others stay where the rest puts them."""
    other = "MosaicML llm-foundry MPT training benchmarks"
    runs = [(read(row()), "first"), (read(row(**FSDP, source__title=other)), "second")]
    made = [Sample(run, 1.1 * Pricer(run, profile_of(run, load(PRIORS))).step().step_s, name) for run, name in runs]
    fitted = fit(made)
    mine, theirs = ("stacks", "megatron-2022", "passes"), ("stacks", "composer", "passes")
    left = dict(Fitted(made, fitted).without(["first", "second"]))
    priors = load(PRIORS)
    beyond = [lookup(table, mine) / lookup(table, ("stacks", "megatron", "passes"))
              for table in (left["first"], fitted)]
    assert beyond[0] == pytest.approx(1, abs=0.01) and beyond[1] > 1.03
    assert lookup(left["first"], theirs) > 1.01 * lookup(priors, theirs)


def test_parts_by_chance_hold_as_much_of_every_source() -> None:
    one = Sample(read(row()), 1.0, "")
    made = [replace(one, source=source) for source in "a" * 13 + "b" * 7 + "c" * 2]
    parts = folds(made, 5)
    assert parts == folds(made, 5) != folds(made, 5, seed=1)
    for source, least in (("a", 2), ("b", 1), ("c", 0)):
        counts = [sum(part == number for part, sample in zip(parts, made, strict=True) if sample.source == source)
                  for number in range(5)]
        assert set(counts) <= {least, least + 1}
    assert sorted(map(parts.count, range(5))) == [4, 4, 4, 5, 5]


def test_what_all_show_moves_those_that_nobody_measured() -> None:
    """Products slower than the prior on one machine make every machine's slower, its own most."""
    truth = load(PRIORS)
    for entry, values in truth["devices"].items():
        values["share"] = 0.6 if entry == "a100" else values.get("share", 0.8)
    runs = [read(row(plan__micro_batch=mb, plan__global_batch=64 * mb)) for mb in (1, 2, 4)]
    made = [Sample(run, Pricer(run, profile_of(run, truth)).step().step_s, f"made {n}") for n, run in enumerate(runs)]
    fitted, priors = fit(made), load(PRIORS)
    drop = {entry: inward("share", lookup(priors, ("devices", entry, "share")))
            - inward("share", lookup(fitted, ("devices", entry, "share"))) for entry in ("a100", "gb200-nvl72")}
    assert 0.05 < drop["gb200-nvl72"] < drop["a100"]


@given(st.floats(0.01, 0.99))
def test_scales_go_there_and_back(value: float) -> None:
    for name in ("share", "host_s"):
        assert outward(name, inward(name, value)) == pytest.approx(value)


def test_the_report_counts_what_it_says() -> None:
    rows = [row(measured__step_time_s=13.0), row(plan__recompute="full", measured__step_time_s=18.0),
            row(plan__recompute="none", measured__step_time_s=13.5, measured__peak_memory_gb=60.0),
            row(model__hidden=None)]
    pairs, abstained = compare(rows, load())
    assert list(abstained.values()) == [1]
    found = report.summary(pairs)
    assert (found["rows"], found["predicted"], found["memory_rows"], found["jobs"]) == (4, 3, 1, 1)
    errors = [abs(pair.error) for pair in pairs if pair.error is not None]
    assert found["mean"] == pytest.approx(sum(errors) / 3)
    times = [pair.predicted_s for pair in pairs[:3]]
    assert found["regret"] == pytest.approx([13.0, 18.0, 13.5][times.index(min(times))] / 13.0 - 1)
    assert "GiB" in line(pairs[2])
    assert report.table({"korth": found}).count("\n") == 2


def test_rows_that_contradict_one_another_are_told() -> None:
    """Four sequences in less time than two, and wider layers in less than narrow ones; not what differs otherwise."""
    cases = [({"plan__micro_batch": 2, "plan__global_batch": 16}, 3.0),
             ({"plan__micro_batch": 4, "plan__global_batch": 32}, 2.0),     # contradicts the first
             ({"plan__micro_batch": 8, "plan__global_batch": 64}, 4.0),
             ({"plan__micro_batch": 8, "plan__global_batch": 32}, 1.0),     # fewer of them
             ({"plan__micro_batch": 8, "plan__global_batch": 64, "plan__tp": 4}, 1.0)]
    pairs = [Pair(row(**changes), "a", seconds, None) for changes, seconds in cases]
    assert contradicted(pairs) == {0, 1}
    wide = replace(pairs[2], row=row(**cases[2][0], model__hidden=25600), measured_s=3.5)
    assert contradicted([*pairs, wide]) == {0, 1, 2, 5}
    assert contradicted([pairs[0], replace(pairs[1], source="b")]) == set()


def test_ranks_share_ties() -> None:
    assert report.spearman([1, 1, 2], [1, 1, 2]) == pytest.approx(1)
    assert report.spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert math.isnan(report.spearman([1, 1], [1, 2]))


# --- closed form and captured graphs --------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "attn_pdrop": 0.0},
    "llama": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 2, "num_attention_heads": 16,
              "num_key_value_heads": 4, "vocab_size": 32000},
    "mixtral": {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 2, "num_attention_heads": 16,
                "num_key_value_heads": 4, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
}
CLOSED: dict[str, dict[str, Any]] = {
    "gpt2": {"hidden": 768, "ffn": 3072, "heads": 12, "kv_heads": 12, "vocab": 50257, "gated_mlp": False,
             "tied_embeddings": True},
    "llama": {"hidden": 1024, "ffn": 2816, "heads": 16, "kv_heads": 4, "vocab": 32000, "gated_mlp": True,
              "tied_embeddings": False},
    "mixtral": {"hidden": 1024, "ffn": None, "heads": 16, "kv_heads": 4, "vocab": 32000, "gated_mlp": True,
                "tied_embeddings": False, "moe": {"experts": 8, "topk": 2, "expert_ffn": 3584, "shared_ffn": 0}},
}


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_closed_form_agrees_with_captured_graphs(name: str) -> None:
    """FLOP of products and of attention, and parameters, within 3 % of what capture and the rules find."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from autoparallel.capture import capture
    from autoparallel.rules.registry import find_rule

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **SHAPES[name]))
    ids = torch.zeros(2, 512, dtype=torch.long, device="meta")
    graph = capture(model, (), {"input_ids": ids, "labels": ids, "use_cache": False})
    captured = {"matmul": 0.0, "attention": 0.0}
    for rule, _ in (find_rule(graph, node) for node in graph.of_kind("op")):
        if rule.op_class in captured:
            captured[rule.op_class] += rule.flops

    sizes = {"name": name, "layers": 2, "seq_len": 512, **CLOSED[name]}
    alone = {"plan__tp": 1, "plan__pp": 1, "plan__virtual_stages": 1, "plan__micro_batch": 2, "plan__global_batch": 2}
    run = read({**row(**alone), "model": sizes})
    pricer, m = Pricer(run, profile_of(run, load())), run.model
    products = [*pricer.linears(run.model.experts is not None), (pricer.tokens, m.vocab / m.layers, m.hidden, 1)]
    assert m.layers * sum(2.0 * a * b * c * n for a, b, c, n in products) == pytest.approx(captured["matmul"], rel=0.03)
    attention = m.layers * 4.0 * 2 * m.heads * m.head_dim * m.seq_len**2 / 2  # causal
    assert attention == pytest.approx(captured["attention"], rel=0.03)
    positions = m.seq_len * 2 * m.hidden if name == "gpt2" else 0
    assert m.parameters() + positions == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.03)
