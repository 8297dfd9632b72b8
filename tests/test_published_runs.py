"""Predictions of published runs: the pinned figures, physics, captured graphs against closed forms."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published_runs import AbstainError, explain, predict
from benchmarks.published_runs.compare import compare
from benchmarks.published_runs.layer import Pass, places
from benchmarks.published_runs.predict import profile_of
from benchmarks.published_runs.price import Pricer
from benchmarks.published_runs.rows import read
from cost_models.compute import larger
from cost_models.profile import load
from tests.support.published_rows import EXPERTS, FSDP, gigabytes, row, seconds
from tests.support.tiers import slow

PLAIN_RUNS = Path(predict.__code__.co_filename).with_name("plain_runs.json")

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


def test_runs_that_are_not_among_the_fitted_rows() -> None:
    """Thirteen runs of torchtitan and Megatron-LM; torch recomputes by op by a known policy, so memory is known."""
    rows = json.loads(PLAIN_RUNS.read_text("utf-8"))
    pairs, abstained = compare(rows, load())
    assert len(pairs) == 13 and not abstained
    assert np.median([abs(pair.error) for pair in pairs if pair.error is not None]) <= 0.03
    eager = [pair.memory_error for pair in pairs if pair.row["id"] in ("titan-plain-1", "titan-plain-3")]
    assert eager == pytest.approx([0, 0], abs=0.02)


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
    assert [count for count, _ in pricer.machine.group("expert").levels] == [16, 1]
    assert read(row(**{**rack, "plan__pp": 4})).cluster.links[0].num_devices == 72


def test_fsdp_by_host_gathers_inside_it() -> None:
    whole, hybrid = (read(row(**FSDP | {"plan__fsdp": kind})) for kind in ("FSDP", "HSDP"))
    gather = [Pricer(run, profile_of(run, load())).parameters.fsdp_s(False)[0] for run in (whole, hybrid)]
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
    assert deepspeed.parameters.beside(1.0, 1.0) > 1.9 and torch.parameters.beside(1.0, 1.0) < 1.7
    assert deepspeed.parameters.fsdp_s(False)[0] > torch.parameters.fsdp_s(False)[0]


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


@pytest.mark.parametrize("name", ["gpt2", slow("llama"), slow("mixtral")])
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
    products = [*pricer.layer.linears(run.model.experts is not None),
                (pricer.machine.tokens, m.vocab / m.layers, m.hidden, 1)]
    assert m.layers * sum(2.0 * a * b * c * n for a, b, c, n in products) == pytest.approx(captured["matmul"], rel=0.03)
    attention = m.layers * 4.0 * 2 * m.heads * m.head_dim * m.seq_len**2 / 2  # causal
    assert attention == pytest.approx(captured["attention"], rel=0.03)
    positions = m.seq_len * 2 * m.hidden if name == "gpt2" else 0
    assert m.parameters() + positions == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.03)
