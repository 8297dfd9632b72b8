"""Plans for Megatron-LM, DeepSpeed, torchtitan and accelerate: what their own checks accept, and back again."""

from __future__ import annotations

import ast
import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate
from typer.testing import CliRunner

import autoparallel
from autoparallel.cli import app
from autoparallel.errors import PlanError
from autoparallel.export import FORMATS
from autoparallel.export.megatron import layout_of
from autoparallel.export.megatron_rules import RULES, broken, flags_of
from autoparallel.planning.by_hand import ByHand
from autoparallel.plans.reports.units import bytes_str
from autoparallel.plans.roles import roles_of
from benchmarks.zoo import build
from cost_models import Cluster
from tests.support.captured import plan_again
from tests.support.decoder import IDS, Decoder
from tests.support.tiers import slow, with_slow

DIGITS = "tensor-model-parallel-size 2"


@functools.cache
def planned(by_hand: str, dtype: torch.dtype = torch.float32) -> autoparallel.Plan:
    return plan_again(decoder(dtype), Cluster.load("h100-sxm", num_devices=4), by_hand=by_hand, example_inputs=(IDS,))


@functools.cache
def decoder(dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder().to(dtype)


@functools.cache
def mixture() -> Any:
    return build("mixtral")


@functools.cache
def of_experts(by_hand: str) -> autoparallel.Plan:
    return plan_again(mixture(), Cluster.load("h100-sxm", num_devices=4), by_hand=by_hand,
                      example_kwargs={"input_ids": IDS, "labels": IDS})


# ------------------------------------------------------------------------------------------------- Megatron's rules

_BATCH = "--micro-batch-size 1 --global-batch-size 8 "
#: By rule: arguments that it accepts and that it refuses, on 8 processes; environment by "NAME=value" in front.
ROWS = {
    "world": ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 3"),
    "experts' world": ("--expert-model-parallel-size 4 --num-experts 8", "--expert-model-parallel-size 3 "
                       "--num-experts 9"),
    "batch": ("--micro-batch-size 1 --global-batch-size 16", "--micro-batch-size 3 --global-batch-size 16"),
    "layers": ("--num-layers 8 --pipeline-model-parallel-size 4", "--num-layers 6 --pipeline-model-parallel-size 4"),
    "virtual layers": ("--num-layers 16 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 "
                       "--global-batch-size 8", "--num-layers 20 --pipeline-model-parallel-size 4 "
                       "--num-layers-per-virtual-pipeline-stage 2 --global-batch-size 8"),
    "layout stages": ("--num-layers 3 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|ttL",
                      "--num-layers 3 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|tL"),
    "layout": ("--num-layers 4 --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et|(t|)*2,tL",
               "--num-layers 5 --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et|(t|)*2,tL"),
    "layout mtp": ("--num-layers 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tmL",
                   "--num-layers 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettm|||L"),
    "one interleaving": ("--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 2 --num-layers 8",
                         "--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 2 "
                         "--pipeline-model-parallel-size 2 --num-layers 8"),
    "interleaving": ("--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 2 --num-layers 8",
                     "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 2 --num-layers 8 "
                     "--no-overlap-p2p-communication"),
    "interleaved micro-batches": (
        "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 4 --num-layers 8 --micro-batch-size 1 "
        "--global-batch-size 8",
        "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 4 --num-layers 8 --micro-batch-size 1 "
        "--global-batch-size 10"),
    "heads": (f"--{DIGITS} --num-attention-heads 4", f"--{DIGITS} --num-attention-heads 5"),
    "query groups": ("--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2",
                     "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 3"),
    "experts": ("--expert-model-parallel-size 4 --num-experts 8", "--expert-model-parallel-size 4 --num-experts 6"),
    "sequence": ("--context-parallel-size 2 --seq-length 8", "--context-parallel-size 2 --seq-length 6"),
    "context hierarchy": ("--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2",
                          "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 4"),
    "sequence parallel": (f"--{DIGITS} --sequence-parallel", "--sequence-parallel"),
    "experts with tensor": (f"--{DIGITS} --sequence-parallel --expert-model-parallel-size 2 --num-experts 4",
                            f"--{DIGITS} --expert-model-parallel-size 2 --num-experts 4"),
    "tensor overlap": (f"--{DIGITS} --sequence-parallel --tp-comm-overlap", f"--{DIGITS} --tp-comm-overlap"),
    "gather overlap": ("--overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer",
                       "--overlap-param-gather --overlap-grad-reduce"),
    "gather with step": (
        "--overlap-param-gather-with-optimizer-step --overlap-param-gather --overlap-grad-reduce "
        "--use-distributed-optimizer --num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 2 "
        "--num-layers 8", "--overlap-param-gather-with-optimizer-step --overlap-param-gather --overlap-grad-reduce "
        "--use-distributed-optimizer"),
    "torch fsdp": ("--use-torch-fsdp2 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights "
                   "--ckpt-format torch_dist", "--use-torch-fsdp2 --untie-embeddings-and-output-weights "
                   "--ckpt-format torch_dist --use-distributed-optimizer"),
    "megatron fsdp": ("--use-megatron-fsdp --ckpt-format fsdp_dtensor", "--use-megatron-fsdp --ckpt-format torch_dist"),
    "connections": (f"CUDA_DEVICE_MAX_CONNECTIONS=1 --{DIGITS}", "CUDA_DEVICE_MAX_CONNECTIONS=8 --" + DIGITS),
    "recompute": ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
                  "--recompute-granularity selective --recompute-method uniform"),
    "activation offload": ("--cpu-offloading-num-layers 2", "--cpu-offloading-num-layers 2 --recompute-granularity "
                           "selective"),
}


def faults(text: str) -> set[str]:
    words = text.split()
    environment = dict(word.split("=") for word in words if word.startswith("CUDA_"))
    given = [word for word in words if not word.startswith("CUDA_")]
    if "--global-batch-size" not in given:
        given += _BATCH.split()
    fsdp = "fsdp" in text and "CUDA_DEVICE" not in text
    return {rule.name for rule in broken(flags_of(given, 8, environment or ({} if fsdp else _ONE)))}


_ONE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_every_rule_has_a_row() -> None:
    assert list(ROWS) == [rule.name for rule in RULES]


@pytest.mark.parametrize("name", list(ROWS))
def test_a_rule_of_megatron_s(name: str) -> None:
    accepted, refused = ROWS[name]
    assert faults(accepted) == set() and name in faults(refused)


@pytest.mark.parametrize(("layers", "text"), [((1, 2, 2, 1), "Et|(tt|)*2,tL"), ((3, 1), "Ettt|tL"),
                                              ((1, 2, 1, 1), "Et|(tt|)*1,(t|)*1,tL")])
def test_uneven_stages_are_a_layout(layers: tuple[int, ...], text: str) -> None:
    assert layout_of(layers) == text
    words = ["--num-layers", str(sum(layers)), "--pipeline-model-parallel-size", str(len(layers)),
             "--pipeline-model-parallel-layout", text, *_BATCH.split()]
    assert broken(flags_of(words, 8, _ONE)) == []


#: Plans of 4 (or 8) ranks, and what Megatron's refusal says ("": accepted).
PLANS = [
    ("dp=4", ""), ("dp=4,zero=1", ""), ("dp=4,zero=2", ""), ("dp=4,zero=3", ""), ("dp=4,zero=1,shards=2", ""),
    ("dp=4,zero=3,shards=2", ""), ("tp=4", "query groups"), ("dp=2,tp=2", ""), ("dp=2,tp=2,sequence_parallel", ""),
    ("dp=2,tp=2,zero=3", ""), ("dp=2,cp=2", ""), ("cp=4", ""), ("dp=2,pp=2", ""),
    ("dp=2,pp=2,recompute=full", ""), ("tp=2,pp=2,sequence_parallel", ""), ("dp=2,pp=2,schedule=gpipe", ""),
    ("dp=2,pp=2,recompute=offload", "activation offload"), ("dp=4,recompute=selective", ""),
    ("dp=4,recompute=offload", ""), ("dp=4,micro_batch=1,zero=1", ""),
]


@pytest.mark.parametrize(("by_hand", "refused"), [
    slow(*row) if number % 3 or row[0].startswith(("dp=4,zero", "dp=2,pp=2,s")) else row
    for number, row in enumerate(PLANS)])
def test_plans_pass_megatron_s_checks_or_are_refused_with_the_rule(by_hand: str, refused: str, tmp_path: Path) -> None:
    plan = planned(by_hand)
    if by_hand == "tp=4":
        assert autoparallel.export_plan(plan, "megatron").files  # 2 groups of queries: a divisor of 4
        plan, refused = replace(plan, model=replace(plan.model, heads=6)), "heads"
    if refused:
        with pytest.raises(PlanError, match=f"rule '{refused}'"):
            autoparallel.export_plan(plan, "megatron")
        return
    made = autoparallel.export_plan(plan, "megatron")
    [path] = made.save(tmp_path)
    found = autoparallel.import_plan(path, num_devices=4)
    assert found.by_hand == made.by_hand and found.missing == ()
    unstated = autoparallel.import_plan(path)
    assert unstated.by_hand.dp is None and "give num_devices (--devices)" in unstated.missing[0]


@pytest.mark.slow
def test_experts_are_exported_to_megatron() -> None:
    text = autoparallel.export_plan(of_experts("dp=4,ep=2"), "megatron").files["megatron_args.sh"]
    assert "--expert-model-parallel-size 2" in text and "--num-experts 4" in text
    lost = autoparallel.export_plan(of_experts("dp=2,tp=2"), "megatron").lost
    assert "whole experts" in lost[0].what  # without sequence parallelism Megatron has no experts over tensor ranks
    with pytest.raises(PlanError, match="rule 'experts with tensor'"):
        autoparallel.export_plan(of_experts("dp=2,ep=2,tp=2"), "megatron")


@pytest.mark.slow
@pytest.mark.parametrize(("by_hand", "ep", "lost"), [("dp=2,ep=2,tp=2,sequence_parallel", 1, "experts over 2 data-"),
                                                     ("dp=2,tp=2,sequence_parallel", 1, ""),
                                                     ("dp=4,ep=4,zero=1", 4, "")])
def test_experts_come_back_from_megatron(by_hand: str, ep: int, lost: str, tmp_path: Path) -> None:
    """Its expert-parallel ranks are neighbours: with as many tensor-parallel ones, those."""
    made = autoparallel.export_plan(of_experts(by_hand), "megatron")
    [path] = made.save(tmp_path)
    found = autoparallel.import_plan(path, num_devices=4)
    assert found.by_hand == made.by_hand and made.by_hand.ep == ep and found.ignored == ()
    assert [one.what.startswith(lost) for one in made.lost] == ([True] if lost else [])


def test_columns_of_experts_over_tensor_ranks_are_ignored_by_name(tmp_path: Path) -> None:
    path = tmp_path / "arguments.txt"
    path.write_text("--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --sequence-parallel")
    assert autoparallel.import_plan(path).ignored == ("--expert-tensor-parallel-size 2 (its default)",)


@pytest.mark.slow
@pytest.mark.parametrize("by_hand", ["dp=2,tp=2", "dp=4,ep=2,zero=2", "dp=4"])
def test_experts_come_back_from_torchtitan(by_hand: str, tmp_path: Path) -> None:
    """Its expert-parallel ranks are tensor-parallel ones first, over which a plan by hand deals experts by itself."""
    made = autoparallel.export_plan(of_experts(by_hand), "torchtitan")
    [path] = made.save(tmp_path)
    assert autoparallel.import_plan(path).by_hand == made.by_hand


def test_a_program_for_torch_alone_is_not_read_back(tmp_path: Path) -> None:
    [path] = autoparallel.export_plan(planned("dp=4,zero=3"), "fsdp2").save(tmp_path)
    with pytest.raises(PlanError, match="a program for torch alone, which states no degrees"):
        autoparallel.import_plan(path)


@pytest.mark.slow
def test_recompute_of_experts_is_asked_of_megatron_by_its_own_name() -> None:
    """Its "mlp" is that of layers without experts."""
    for plan, has in ((planned("dp=4,recompute=selective"), False), (of_experts("dp=4,recompute=selective"), True)):
        made = autoparallel.export_plan(plan, "megatron")
        assert (" mlp moe\n" in made.files["megatron_args.sh"]) == has == ("and experts" in made.lost[-1].instead)


def test_types_are_reported() -> None:
    plan = planned("dp=4", torch.bfloat16)
    text = autoparallel.export_plan(plan, "megatron").files["megatron_args.sh"]
    assert "--bf16\n" in text and "--grad-reduce-in-bf16" in text
    assert json.loads(autoparallel.export_plan(plan, "deepspeed").files["ds_config.json"])["bf16"] == {"enabled": True}


def test_master_weights_that_others_add_are_listed() -> None:
    """Their optimizers hold 12 bytes an element in float32, where the plan's hold 4: AdamW's two states in bfloat16."""
    plan = planned("dp=4", torch.bfloat16)
    more = 8 * sum(math.prod(shape) for shape in plan.model.parameters.values())
    for to in ("megatron", "deepspeed", "accelerate", "torchtitan"):
        [lost] = [one for one in autoparallel.export_plan(plan, to).lost if "master weights" in one.what]
        assert lost.instead == f"float32 master weights and optimizer states, {bytes_str(more)} more a device"
    for one, to in ((plan, "fsdp2"), (planned("dp=4"), "megatron")):
        assert "master weights" not in str(autoparallel.export_plan(one, to).lost)


# ------------------------------------------------------------------------------------------------ the others' readers


_DEEPSPEED = ["dp=4", "dp=4,zero=1", "dp=4,zero=2,micro_batch=1", "dp=4,zero=3", "dp=2,tp=2", "dp=2,cp=2",
              "dp=2,pp=2,zero=1", "dp=2,pp=2,schedule=gpipe", "dp=4,recompute=full", "dp=4,recompute=selective",
              "dp=2,tp=2,sequence_parallel"]


@pytest.mark.parametrize("by_hand", with_slow(
    _DEEPSPEED, "dp=4,zero=1", "dp=2,tp=2", "dp=2,pp=2,zero=1", "dp=4,recompute=full"))
def test_deepspeed_s_file_comes_back_the_same(by_hand: str, tmp_path: Path) -> None:
    made = autoparallel.export_plan(planned(by_hand), "deepspeed")
    [path] = made.save(tmp_path)
    found = autoparallel.import_plan(path)
    assert found == autoparallel.import_plan(path, num_devices=4)
    assert (found.by_hand, found.ignored, found.missing) == (made.by_hand, (), ())
    assert (found.by_hand.dp or 1) * found.by_hand.tp * found.by_hand.cp * found.by_hand.pp == 4


def test_a_batch_that_deepspeed_refuses_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}')
    with pytest.raises(PlanError, match="train_batch_size 10 is no multiple of"):
        autoparallel.import_plan(path)


@pytest.mark.parametrize(("name", "text", "said"), [
    ("ds.json", '{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 3}', "16 is no multiple of"),
    ("a.yaml", "distributed_type: FSDP\nnum_processes: -3\n", "num_processes is -3"),
    ("m.sh", "--tensor-model-parallel-size 2 --micro-batch-size 0", "micro_batch is 0"),
])
def test_numbers_that_cannot_be_are_not_passed_over(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(PlanError, match=said):
        autoparallel.import_plan(tmp_path / name)


def test_devices_that_a_file_does_not_have_are_refused(tmp_path: Path) -> None:
    [path] = autoparallel.export_plan(planned("dp=2,tp=2"), "deepspeed").save(tmp_path)
    with pytest.raises(PlanError, match="and the cluster has 8 devices"):
        autoparallel.import_plan(path, num_devices=8)
    with pytest.raises(PlanError, match="num_devices is 0"):
        autoparallel.import_plan(path, num_devices=0)


@pytest.mark.parametrize("by_hand", _DEEPSPEED[:7])
def test_deepspeed_reads_its_configuration(by_hand: str, tmp_path: Path) -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    made = autoparallel.export_plan(planned(by_hand), "deepspeed")
    [path] = made.save(tmp_path)
    data, ranks = json.loads(path.read_text()), made.by_hand.dp or 1
    assert data["train_batch_size"] == 8 == (
        data["train_micro_batch_size_per_gpu"] * data["gradient_accumulation_steps"] * ranks)
    data.pop("sequence_parallel_size", None)  # it is taken as a share of this one process
    read = config.DeepSpeedConfig({**data, "train_batch_size": 8 // ranks})  # as of one rank
    assert read.zero_optimization_stage == made.by_hand.zero


@pytest.mark.parametrize("by_hand", ["dp=4", "dp=4,zero=2", "dp=4,zero=3,recompute=full", "dp=4,zero=3,shards=2",
                                     "dp=2,tp=2,zero=3", "dp=2,cp=2,zero=2", "tp=4", "dp=4,zero=1", "cp=4",
                                     "dp=4,zero=2,recompute=selective", "dp=4,recompute=full"])
def test_accelerate_reads_its_configuration(by_hand: str, tmp_path: Path) -> None:
    args = pytest.importorskip("accelerate.commands.config.config_args")
    from accelerate.parallelism_config import ParallelismConfig

    made = autoparallel.export_plan(planned(by_hand), "accelerate")
    [path] = made.save(tmp_path)
    read = args.load_config_from_file(str(path))
    assert read.num_processes == 4
    if sizes := read.parallelism_config:
        config = ParallelismConfig(**{key.removeprefix("parallelism_config_"): size for key, size in sizes.items()})
        assert config.total_size == 4
    found = autoparallel.import_plan(path)
    assert found.by_hand == made.by_hand and "add micro_batch=... to the plan by hand" in found.missing[0]


#: Of `torchtitan.config.ParallelismConfig` at b5bcd76c6.
TORCHTITAN = {
    "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward",
    "enable_fsdp_symm_mem", "tensor_parallel_degree", "enable_sequence_parallel", "spmd_backend",
    "pipeline_parallel_degree", "module_fqns_per_model_part", "pipeline_parallel_layers_per_stage",
    "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers",
    "pipeline_parallel_schedule", "pipeline_parallel_schedule_csv", "num_pp_microbatches", "context_parallel_degree",
    "context_parallel_load_balancer", "expert_parallel_degree"}


@pytest.mark.parametrize("by_hand", ["dp=4", "dp=4,zero=3", "dp=4,zero=3,shards=2", "dp=2,tp=2,sequence_parallel",
                                     "dp=2,cp=2,zero=3", "dp=2,pp=2,micro_batch=1,recompute=full",
                                     "dp=4,zero=2,micro_batch=1", "dp=4,zero=1", "dp=2,cp=2",
                                     "dp=2,pp=2,schedule=gpipe"])
def test_a_recipe_for_torchtitan(by_hand: str, tmp_path: Path) -> None:
    made = autoparallel.export_plan(planned(by_hand), "torchtitan")
    [path] = made.save(tmp_path)
    calls = {ast.unparse(call.func): {k.arg: k.value for k in call.keywords}
             for call in ast.walk(ast.parse(path.read_text())) if isinstance(call, ast.Call)}
    given = calls["ParallelismConfig"]
    assert set(given) <= TORCHTITAN and "num_tokens_per_train_step" in calls["replace"]
    product = 1
    for name in ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "context_parallel",
                 "pipeline_parallel"):
        product *= ast.literal_eval(given[f"{name}_degree"])
    assert product == 4
    found = autoparallel.import_plan(path)
    assert (found.by_hand, found.ignored, found.missing) == (made.by_hand, (), ())


def test_a_schedule_of_torchtitan_that_is_none_of_ours_is_named(tmp_path: Path) -> None:
    [path] = autoparallel.export_plan(planned("dp=2,pp=2,schedule=gpipe"), "torchtitan").save(tmp_path)
    text = path.read_text()
    assert "GPipe" in text and "schedule" not in autoparallel.import_plan(path).ignored
    path.write_text(text.replace("GPipe", "DualPipeV"))
    assert autoparallel.import_plan(path).ignored == ("pipeline_parallel_schedule",)


@pytest.mark.parametrize(("by_hand", "to", "said"), [
    ("dp=2,pp=2,zero=2,micro_batch=1", "deepspeed", "a pipeline goes with ZeRO 0 or 1"),
    ("dp=4,zero=3,shards=2", "deepspeed", "MiCS was removed"),
    ("dp=2,pp=2", "accelerate", "no pipelines"),
    ("dp=2,tp=2", "accelerate", "in shards"),
    ("dp=4,recompute=offload", "torchtitan", "does not offload"),
])
def test_plans_that_a_framework_refuses_are_refused(by_hand: str, to: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        autoparallel.export_plan(planned(by_hand), to)


def test_what_is_lost_has_its_price() -> None:
    lost = autoparallel.export_plan(planned("dp=4,zero=1,micro_batch=1"), "accelerate").lost
    assert lost[0].seconds and lost[0].seconds > 0
    plan = planned("dp=4,recompute=full")
    some = replace(plan, hybrid=replace(plan.hybrid, recompute_blocks=("layers.0",)))
    [lost_one] = autoparallel.export_plan(some, "megatron").lost
    assert lost_one.seconds == pytest.approx(plan.prediction.forward_s / 2)


def test_axes_on_which_all_compute_the_same_are_data_parallel_instead() -> None:
    whole = dict.fromkeys(("weight", "bias", "input"), (Replicate(),))
    plan = autoparallel.plan(torch.nn.Linear(8, 8), Cluster.load("h100-sxm", num_devices=4), mesh_shape=(4,),
                             example_inputs=(torch.zeros(4, 8),), pins=whole, zero_stage=0)
    assert "S" not in str(plan.strategies["input"])
    made = autoparallel.export_plan(plan, "megatron")
    assert made.lost[0].what == "the same work on all ranks of axis0 (4 ranks)"
    assert made.lost[0].instead == "these ranks are data-parallel" and made.by_hand == ByHand(dp=4, micro_batch=1)
    odd = replace(plan, model=replace(plan.model, inputs={"input": (6, 8)}))
    with pytest.raises(PlanError, match=r"not expressible: the same work .*: 4 do not divide a batch of 6\."):
        autoparallel.export_plan(odd, "megatron")


@pytest.mark.parametrize("to", FORMATS)
def test_a_searched_plan_of_one_device_is_exported(to: str) -> None:
    plan = plan_again(decoder(), Cluster.load("h100-sxm", num_devices=1), example_inputs=(IDS,))
    assert [axis.role for axis in roles_of(plan).axes] == ["replicated"]
    assert autoparallel.export_plan(plan, to).files


def test_names_that_would_be_programs_are_refused() -> None:
    plan = planned("dp=4")
    evil = replace(plan, blocks=(replace(plan.blocks[-1], paths=('x.0"""\nimport os',)),))
    with pytest.raises(PlanError, match="cannot be written"):
        autoparallel.export_plan(evil, "fsdp2")


@pytest.mark.parametrize(("text", "suffix", "said"), [
    ("{}", ".json", "no configuration of DeepSpeed's"), ("a: 1", ".yaml", "no distributed_type"),
    ("x = 1", ".py", "no ParallelismConfig"), ("train it", ".sh", "is none of"), ("--lr 3", ".sh", "has none of")])
def test_files_that_are_no_settings(text: str, suffix: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / f"file{suffix}"
    path.write_text(text)
    with pytest.raises(PlanError, match=said):
        autoparallel.import_plan(path)


def test_settings_that_a_plan_by_hand_cannot_say_are_named(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3, "offload_optimizer": '
                    '{"device": "cpu"}}}')
    found = autoparallel.import_plan(path)
    assert found.by_hand == ByHand(zero=3) and found.ignored == ("zero_optimization.offload_optimizer",)
    assert len(found.missing) == 2  # ranks, and micro-batches


@pytest.mark.slow
def test_the_command_line_exports_and_imports(tmp_path: Path) -> None:
    planned("dp=2,tp=2,sequence_parallel").save(tmp_path / "plan.json")
    run = CliRunner().invoke
    told = run(app, ["export", str(tmp_path / "plan.json"), "--to", "megatron", "--output", str(tmp_path)])
    assert told.exit_code == 0, told.output
    told = run(app, ["import", str(tmp_path / "megatron_args.sh")])
    assert told.stdout.strip() == "tp=2,micro_batch=4,sequence_parallel"
    assert "does not state the number of ranks" in told.stderr
    told = run(app, ["import", str(tmp_path / "megatron_args.sh"), "--devices", "4"])
    assert told.stdout.strip() == "dp=2,tp=2,micro_batch=4,sequence_parallel" and not told.stderr
    config = Path(__file__).parents[1] / "benchmarks/configs/small-llama.json"
    told = run(app, ["plan", str(config), "--devices", "4", "--sequence-length", "128", "--by-hand",
                     f"@{tmp_path / 'megatron_args.sh'}", "--output", str(tmp_path / "small.json")])
    assert told.exit_code == 0 and "tensor parallel 2 with sequence parallelism" in " ".join(told.stdout.split())
    told = run(app, ["export", str(tmp_path / "small.json"), "--to", "accelerate", "--model", str(config)])
    assert "ZeRO 2 or 3" in str(told.exception)  # accelerate's rule
    told = run(app, ["export", str(tmp_path / "small.json"), "--to", "torchtitan", "--model", str(config)])
    priced, ours = told.stderr.splitlines()[-1].split(": a step takes ")[1].split(", and the plan's ")
    assert priced == ours  # a plan by hand, exported as it is


@pytest.mark.slow
def test_what_was_exported_is_priced_with_the_plans_software_and_optimizer(tmp_path: Path) -> None:
    """And whether it fits: what a file cannot say may have saved memory."""
    config, file = Path(__file__).parents[1] / "benchmarks/configs/small-llama.json", str(tmp_path / "plan.json")
    run = CliRunner().invoke
    told = run(app, ["plan", str(config), "--devices", "4", "--sequence-length", "128", "--by-hand", "dp=4",
                     "--software", "composer", "--optimizer", "sgd", "--output", file])
    assert told.exit_code == 0, told.output
    told = run(app, ["export", file, "--to", "megatron", "--model", str(config)])
    priced, ours = told.stderr.splitlines()[-1].split(": a step takes ")[1].split(", and the plan's ")
    assert priced == ours and "fit" not in told.stderr
    plan = autoparallel.Plan.load(file)
    replace(plan, prediction=replace(plan.prediction, limit_bytes=plan.prediction.peak_bytes / 2)).save(file)
    told = run(app, ["export", file, "--to", "megatron", "--model", str(config)])
    assert "it does not fit: " in told.stderr and "recompute=auto" in told.stderr
    replace(plan, cluster="ours").save(file)    # as of a TOML file with that name
    told = run(app, ["export", file, "--to", "megatron", "--model", str(config)])
    assert "cluster 'ours' of a TOML file: give that file as --cluster FILE" in str(told.exception)
