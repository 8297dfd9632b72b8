"""Plans by hand: the layouts that people write, priced and run, and combinations that cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import autoparallel
from autoparallel.cli import app
from autoparallel.errors import InfeasibleError, InputError, PlanError
from autoparallel.models import load_model
from autoparallel.planning.by_hand import ByHand
from autoparallel.plans.roles import roles_of
from cost_models import Cluster
from tests.support.captured import plan_of
from tests.support.tiers import slow

Lines = dict[str, tuple[str, str]]


def priced(by_hand: Any, devices: int = 4, batch: int = 8, **options: Any) -> autoparallel.Plan:
    return plan_of("llama", Cluster.load("h100-sxm", num_devices=devices), batch, by_hand=by_hand, **options)


def block_of(plan: autoparallel.Plan) -> Lines:
    """(strategy, layout of the result) by op of a decoder layer."""
    found = next(block for block in plan.blocks if any("layers.0" in path for path in block.paths))
    return {name: (strategy, layout) for name, strategy, layout in found.lines}


def test_sequence_parallelism_does_not_gather_weights_that_are_transposed() -> None:
    """GPT-2's layers read a view of their weight: few tokens are no reason to gather it as the sequence is."""
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 768, "n_head": 12, "vocab_size": 1024}
    model, _, batch = load_model(config, 8, 512, "bfloat16")
    plan = autoparallel.plan(model, Cluster.load("h100-sxm", num_devices=4), example_kwargs=batch,
                             by_hand="tp=4,sequence_parallel")
    cut = {name: strategy for block in plan.blocks for name, strategy, _ in block.lines if name.startswith("mlp.c_")}
    assert cut == {"mlp.c_fc linear": "n", "mlp.c_proj linear": "k"}
    assert roles_of(plan).tensor == 4 and roles_of(plan).axes[0].sequence


def collectives_of(plan: autoparallel.Plan) -> set[tuple[str, str, str]]:
    """Those of more than a few bytes."""
    return {(use.kind, use.axis, use.direction) for use in plan.prediction.collectives if use.num_bytes > 1000}


def test_data_parallelism_reduces_gradients_only() -> None:
    plan = priced("dp=4")
    assert (plan.mesh_shape, plan.axis_names) == ((4,), ("dp",))
    assert collectives_of(plan) == {("all_reduce", "dp", "backward")}
    assert plan.evidence.stop_reason == "by hand: dp=4"


def test_zero_3_gathers_and_scatters() -> None:
    plan = priced({"zero": 3})
    assert plan.hybrid.zero_stage == 3
    assert {("all_gather", "dp", "forward"), ("reduce_scatter", "dp", "backward")} <= collectives_of(plan)


def test_shards_inside_a_host_and_copies_across() -> None:
    plan = priced("dp=4,zero=3,shards=2")
    assert (plan.mesh_shape, plan.axis_names) == ((2, 2), ("dp", "shard"))
    assert {("all_reduce", "dp", "backward"), ("all_gather", "shard", "forward")} <= collectives_of(plan)


def test_tensor_parallelism_cuts_columns_then_rows() -> None:
    lines = block_of(priced("dp=2,tp=2"))
    assert lines["self_attn.q_proj linear"][0].endswith("n") and lines["self_attn.o_proj linear"][0].endswith("k")
    assert lines["mlp.up_proj linear"][0].endswith("n") and lines["mlp.down_proj linear"][0].endswith("k")
    assert lines["self_attn scaled_dot_product_attention"] == ("b·h", "S(0)·S(1)")


@pytest.mark.slow
def test_sequence_parallelism_cuts_norms_along_the_sequence() -> None:
    cluster = Cluster.load("h100-sxm", num_devices=4, software="none")    # whose ops take no less for a host's launches
    plain, cut = (block_of(plan_of("llama", cluster, 8, by_hand=f"tp=2,dp=2{more}"))
                  for more in ("", ",sequence_parallel"))
    assert plain["post_attention_layernorm rms_norm"][1] == "S(0)·I"
    assert cut["post_attention_layernorm rms_norm"][1] == "S(0)·S(1)"


def test_context_parallelism_sends_keys_around() -> None:
    plan = priced("dp=2,cp=2")
    assert plan.axis_names == ("dp", "cp")
    assert block_of(plan)["self_attn scaled_dot_product_attention"][0] in ("b·ring", "b·queries")


@pytest.mark.parametrize(("degrees", "zero"), [("dp=2,cp=2", 3), slow("dp=2,cp=2", 1), slow("cp=4", 3), ("cp=4", 1)])
def test_context_parallelism_gathers_its_stored_weights(degrees: str, zero: int) -> None:
    """A product cut by the shard of its weight that a rank stores would be tensor parallelism."""
    plan = priced(f"{degrees},zero={zero}")
    lines = block_of(plan)
    assert lines["self_attn scaled_dot_product_attention"][0].split("·")[-1] in ("ring", "queries")
    assert {strategy.split("·")[-1] for name, (strategy, _) in lines.items() if "_proj" in name} == {"b1"}
    assert "context parallel" in plan.summary().lower() and "tensor parallel" not in plan.summary().lower()


@pytest.mark.slow
def test_what_context_parallelism_cannot_cut_is_named() -> None:
    """Experts get flat tokens, which a shard of each sequence is not."""
    said = plan_of("mixtral", Cluster.load("h100-sxm", num_devices=4), 8, by_hand="cp=4,zero=3").evidence.stop_reason
    assert "a context-parallel axis does not cut routed_experts" in said and "along the sequence" in said


def test_pipelines_run_micro_batches_by_schedule() -> None:
    plan = priced("pp=2,dp=2,micro_batch=1")
    assert (plan.hybrid.stages, plan.hybrid.pipeline_ranks, plan.hybrid.micro_batches) == (2, 2, 4)
    assert (plan.mesh_shape, plan.hybrid.schedule) == ((2,), "1f1b")
    assert priced("pp=2,virtual=2").hybrid.schedule == "interleaved"


def test_a_plan_that_does_not_fit_is_priced() -> None:
    least = priced("dp=4").prediction.peak_bytes
    cluster = Cluster.load("h100-sxm", num_devices=4)
    assert least < cluster.device.usable_bytes
    with pytest.raises(InfeasibleError):
        priced("dp=4", memory_limit_bytes=least / 2)
    small = replace(cluster, device=replace(cluster.device, memory_bytes=least / 2, reserved_bytes=0.0))
    plan = plan_of("llama", small, by_hand="dp=4")
    assert plan.prediction.peak_bytes == least


def test_as_few_blocks_as_memory_requires_are_recomputed() -> None:
    free, full = (priced(f"dp=4,recompute={how}").prediction.peak_bytes for how in ("none", "full"))
    assert priced("dp=4,recompute=auto").prediction == priced("dp=4").prediction
    limit = (free + full) / 2
    plan = priced("dp=4,recompute=auto", memory_limit_bytes=limit)
    assert plan.hybrid.recompute == "full" and plan.hybrid.recompute_blocks == ("model.layers.0",)
    assert full < plan.prediction.peak_bytes <= limit
    with pytest.raises(InfeasibleError, match="needs"):
        priced("dp=4,recompute=auto", memory_limit_bytes=full / 2)


@pytest.mark.parametrize(("by_hand", "said"), [
    ("dp=3", r"dp x tp x pp x cp = 3 x 1 x 1 x 1 = 3, and the cluster has 4 devices"),
    ("tp=0", "tp is 0: give a whole number, 1 or more"),
    ("tq=2", "unknown key 'tq'; there are dp, tp"), (" ", "by_hand is ' ': give text such as"),
    ("tp", "'tp' has no value: write tp=..."),
    ("tp=2,tp=2", "tp is given twice"),
    ("virtual=2", "virtual=2 stages of each pipeline rank need pp of 2 or more"),
    ("sequence_parallel", "give tp of 2 or more"),
    ("zero=4", "zero is 4: give 0, 1, 2 or 3"),
    ("dp=2,tp=2,micro_batch=3", "a batch of 8 is not divided by dp x micro_batch = 2 x 3"),
    ("recompute=some", "recompute is 'some'; there are"),
    ("schedule=fast", "schedule is 'fast'; there are"),
    ("dp=4,ep=3", "dp must be a multiple of ep"),
    ("pp=4,dp=1,micro_batch=4", "schedule '1f1b' needs at least as many micro-batches as its 4 stages"),
    (4, "by_hand is 4: give text such as"),
    ("dp=4,schedule=gpipe", "schedule=gpipe is of a pipeline"),
    ("dp=4,ep=2", "no parameter of the model is known to have a dim of experts"),
    ("dp=4,recompute=offload,saved_on=device", "recompute offload, which keeps nothing there: give host or disk"),
])
def test_impossible_plans_are_refused_with_the_rule(by_hand: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        priced(by_hand)


def test_what_is_no_plan_to_compare_with_is_refused_by_its_name() -> None:
    with pytest.raises(PlanError, match="compare_by_hand is 4: give a plan by hand as text"):
        plan_of("llama", Cluster.load("h100-sxm", num_devices=4), compare_by_hand=4)


def test_options_decided_by_hand_are_not_given_twice() -> None:
    with pytest.raises(PlanError, match="by_hand decides mesh_shape, micro_batches"):
        priced("dp=4", mesh_shape=(4,), micro_batches=2)


def test_text_and_mapping_are_the_same() -> None:
    text = "dp=2,tp=2,pp=2,zero=1,recompute=full,sequence_parallel"
    assert ByHand.of(text) == ByHand.of({"dp": 2, "tp": 2, "pp": 2, "zero": 1, "recompute": "full",
                                         "sequence_parallel": True})
    assert str(ByHand.of(text)) == text


@pytest.mark.parametrize("by_hand", ["dp=4,zero=true", {"dp": 4, "zero": 1.0}, "tp=2,sequence_parallel=no", "dp=--5",
                                     {"tp": 2, "sequence_parallel": 1}, "dp=\u00b2"])
def test_values_of_other_types_are_refused(by_hand: Any) -> None:
    with pytest.raises(PlanError, match=r"by_hand: (zero|sequence_parallel|dp) is"):
        priced(by_hand)


def test_micro_batches_need_a_loss() -> None:
    with pytest.raises(InputError, match="micro-batches need a scalar loss"):
        autoparallel.plan(torch.nn.Linear(4, 4), Cluster.load("h100-sxm", num_devices=2), by_hand="dp=2,micro_batch=1",
                          example_inputs=(torch.zeros(8, 4),))


def test_a_group_of_one_shards_nothing() -> None:
    whole, sharded = (priced(f"dp=4,zero=1{more}").prediction.state_bytes for more in (",shards=1", ""))
    assert whole > 2 * sharded


@pytest.mark.slow
def test_the_command_line_compares_with_a_plan_by_hand() -> None:
    config = Path(__file__).parents[1] / "benchmarks/configs/small-llama.json"
    told = CliRunner().invoke(app, ["plan", str(config), "--mesh", "4", "--sequence-length", "128", "--software",
                                    "torch-compile", "--compare-by-hand", "tp=4"])
    assert told.exit_code == 0 and "this plan beside by hand dp=1,tp=4" in told.stdout
    assert "Tensor parallel 4" in told.stdout


class Sums(torch.nn.Module):
    """Running sums along the sequence, of which every rank needs all."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embedding(x)).cumsum(1).sum()


def test_departures_from_roles_are_named() -> None:
    plan = autoparallel.plan(Sums(), Cluster.load("h100-sxm", num_devices=2), by_hand="cp=2",
                             example_inputs=(torch.zeros(8, 16, dtype=torch.long),))
    assert ("1 layouts depart from its roles: all-gather over cp of linear for cumsum (S(1) to I), which the role "
            "'context' has not") in plan.evidence.stop_reason


@pytest.mark.parametrize(("shape", "by_hand", "said"), [
    ((8, 64), "cp=2", "cuts activations along dim 1, the sequence, and this model has none"),
    ((8, 64), "tp=2,sequence_parallel", "cuts activations along dim 1, the sequence, and this model has none"),
])
def test_sequences_are_not_guessed(shape: tuple[int, ...], by_hand: str, said: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    with pytest.raises(PlanError, match=said):
        autoparallel.plan(model, Cluster.load("h100-sxm", num_devices=2), by_hand=by_hand,
                          example_inputs=(torch.zeros(shape),))


class Pictures(torch.nn.Module):
    """Attention over 16 patches of pictures, whose dim 1 are colours."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = x.flatten(2).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(patches, patches, patches).sum()


def test_channels_are_no_sequence() -> None:
    with pytest.raises(PlanError, match=r"dim 1 of input .* of shape \(8, 32, 4, 4\), whose 32 is no sequence"):
        autoparallel.plan(Pictures(), Cluster.load("h100-sxm", num_devices=2), by_hand="cp=2",
                          example_inputs=(torch.zeros(8, 32, 4, 4),))


def test_pipelines_are_cut_by_blocks() -> None:
    blocks = len({path for block in priced("dp=4").blocks for path in block.paths if "layers" in path})
    assert priced("pp=2,dp=2,split=blocks").hybrid.stages == 2 and blocks % 2 == 0
    with pytest.raises(PlanError, match=f"{blocks} blocks do not make {2 * blocks} stages"):
        priced(f"pp=2,dp=2,virtual={blocks},split=blocks")
    with pytest.raises(PlanError, match="split is 'layers'"):
        priced("pp=2,split=layers")


def test_recompute_is_compute_without_the_exchange_of_experts() -> None:
    """What experts send again counts as communication, as every other redistribution that recompute repeats."""
    whole, again = (plan_of("mixtral", Cluster.load("h100-sxm", num_devices=4), by_hand=f"dp=4,ep=4,zero=1{more}")
                    .prediction for more in ("", ",recompute=full"))
    assert again.forward_s - again.recompute_s == pytest.approx(whole.forward_s, rel=1e-9)
    assert 0 < again.recompute_s < whole.forward_s
    assert again.forward_communication_s > whole.forward_communication_s
