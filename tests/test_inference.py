"""Plans of inference: without gradients and optimizer state, with the cache of keys and values; decode by memory
bandwidth."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import autoparallel
from autoparallel.errors import InputError, PlanError
from cost_models import Cluster
from tests.support.language import windowed
from tests.support.models import CASES
from tests.support.ranks import mesh_of

CONTEXT, SEQUENCES = 12, 4


@functools.cache
def model() -> Any:
    return CASES["llama"].build()


def planned(cluster: Cluster | None = None, **how: Any) -> autoparallel.Plan:
    machine = cluster or Cluster.load("h100-sxm", num_devices=4)
    return autoparallel.plan(model(), machine, **{"mesh_shape": (4,), "phase": "decode", "context": CONTEXT, **how})


def test_nothing_is_trained_and_the_model_stays_as_it_was() -> None:
    plan = planned(concurrent=SEQUENCES)
    p = plan.prediction
    weights = sum(t.numel() * t.element_size() for t in model().parameters())
    assert p.backward_s == p.optimizer_s == p.backward_communication_s == 0 and p.state_bytes <= weights
    assert model().training and all(t.requires_grad for t in model().parameters())
    assert "decode for latency: 4 sequences at once" in plan.evidence.stop_reason


def test_phases_have_plans_of_their_own() -> None:
    prefill, decode = (planned(phase=phase, concurrent=SEQUENCES) for phase in ("prefill", "decode"))
    assert prefill.model.inputs["input_ids"] == (SEQUENCES, CONTEXT)
    assert decode.model.inputs["input_ids"] == (SEQUENCES, 1)
    keys = [shape for name, shape in decode.model.inputs.items() if len(shape) == 4 and shape[2] == CONTEXT]
    assert len(keys) == 2 * len(model().model.layers)  # keys and values
    assert decode.prediction.step_s < prefill.prediction.step_s
    assert "no published run of inference to compare with" in decode.summary()  # those of training say nothing of it


@pytest.mark.slow
def test_decode_takes_the_time_to_read_weights_and_cache() -> None:
    cluster = Cluster.load("h100-sxm", num_devices=1, software="none")
    slow = replace(cluster, device=replace(cluster.device, memory_bandwidth_bytes_per_s=1e6, launch_s=0.0))
    plan = planned(slow, mesh_shape=(1,), concurrent=1)
    shapes = [shape for name, shape in plan.model.parameters.items() if "embed" not in name]
    read = 4 * sum(torch.Size(shape).numel() for shape in shapes)
    assert plan.prediction.forward_s >= 0.95 * read / 1e6
    longer = planned(slow, mesh_shape=(1,), concurrent=1, context=100 * CONTEXT)
    assert longer.prediction.forward_s > 1.5 * plan.prediction.forward_s  # the cache is read, too


@pytest.mark.slow
def test_the_cache_counts_in_memory_and_is_cut_where_memory_is_short() -> None:
    few, many = (planned(context=CONTEXT * k, concurrent=SEQUENCES).prediction for k in (1, 100))
    cache = 2 * 2 * SEQUENCES * CONTEXT * 99 * 4 * 16 * 4  # layers, keys and values, heads, width, bytes
    assert many.peak_bytes - few.peak_bytes > cache / 4 / 2  # at most four shards; grouped heads are half as many
    limit = 0.6 * many.peak_bytes
    short = planned(context=CONTEXT * 100, concurrent=SEQUENCES, memory_limit_bytes=limit)
    caches = [layout for name, layout in short.strategies.items() if name.startswith("past_key_values")]
    cut = [layout for layout in caches if "S" in layout[0]]
    assert short.prediction.peak_bytes <= limit and cut


@pytest.mark.slow
def test_throughput_takes_as_many_sequences_as_fit() -> None:
    one = planned(objective="throughput", concurrent=1).prediction.peak_bytes
    plan = planned(objective="throughput", memory_limit_bytes=1.3 * one)
    count = plan.model.inputs["input_ids"][0]
    assert count > 1 and plan.prediction.peak_bytes <= 1.3 * one
    assert f"decode for throughput: {count} sequences" in plan.evidence.stop_reason


@pytest.mark.parametrize(("how", "said"), [
    ({"phase": "both"}, "phase is 'both'; there are"), ({"objective": "speed"}, "objective is 'speed'"),
    ({"context": 0}, "context is 0: give tokens"), ({"concurrent": 1.5}, "concurrent is 1.5: give sequences"),
    ({"micro_batches": 2}, "micro_batches belong to a training step")])
def test_impossible_options_are_refused(how: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        planned(**how)


def test_models_without_a_cache_are_refused() -> None:
    with pytest.raises(InputError, match="no transformers model that generates"):
        autoparallel.plan(torch.nn.Linear(4, 4), "h100-sxm", phase="decode", context=8)


def generated(kind: str) -> tuple[bool, int]:
    """Whether tokens under a plan of decode are one process's, and how many programs were compiled after it."""
    frozen: Any = (CASES["llama"].build() if kind == "llama" else windowed(kind)).eval().requires_grad_(False)
    ids = torch.arange(SEQUENCES * 5).reshape(SEQUENCES, 5) % frozen.config.vocab_size
    plan = autoparallel.plan(frozen, Cluster.load("local-cpu", num_devices=4), mesh_shape=(4,), phase="decode",
                             context=CONTEXT, concurrent=SEQUENCES)
    with torch.no_grad():
        parallel: Any = autoparallel.compile(
            frozen, mesh_of(4), plan=plan,
            example_kwargs=autoparallel.inference_call(frozen, "decode", CONTEXT, SEQUENCES))
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": CONTEXT + 1 - 5, "use_cache": True,
            "do_sample": False}
    tokens = parallel.generate(ids, **call)
    return torch.equal(tokens, frozen.generate(ids, **call)), parallel._state.forms.compiled


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_plan_of_decode_runs_in_generate(ranks: Any, kind: str) -> None:
    for same, compiled in ranks(4).run(generated, kind, timeout_s=200):
        assert same and compiled == 2
