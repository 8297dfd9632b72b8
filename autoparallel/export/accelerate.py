"""A plan as the YAML that `accelerate launch --config_file` reads (accelerate 1.15)."""

from __future__ import annotations

from typing import Any

from autoparallel.errors import PlanError
from autoparallel.export.degrees import Degrees, Lost, more_reductions_s, sharded_by_context
from autoparallel.plans import Plan

FILE = "accelerate.yaml"


def accelerate(plan: Plan, degrees: Degrees) -> tuple[dict[str, str], Degrees]:
    """The configuration, and the degrees that it has. Raises PlanError with the rule of accelerate's that a plan
    breaks."""
    import yaml

    hand = degrees.hand
    replicas, shards = (degrees.dp // degrees.shards, degrees.shards) if hand.zero else (degrees.dp, 1)
    _check(degrees, replicas, shards)
    mixed = {"bfloat16": "bf16", "float16": "fp16"}.get(plan.model.dtype, "no")
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE", "mixed_precision": mixed, "num_machines": 1,
        "num_processes": degrees.ranks, "machine_rank": 0, "rdzv_backend": "static"}
    plain = not hand.zero and hand.tp == hand.cp == 1
    if plain:
        config["distributed_type"] = "MULTI_GPU" if degrees.ranks > 1 else "NO"
    else:
        config |= {"distributed_type": "FSDP", "fsdp_config": _fsdp(plan, degrees), "parallelism_config": {
            f"parallelism_config_{name}_size": size for name, size in (
                ("dp_replicate", replicas), ("dp_shard", shards), ("tp", hand.tp), ("cp", hand.cp))}}
    said = degrees.losing([*sharded_by_context(hand), *_lost(plan, degrees, plain)],
                          zero=2 if not plain and hand.zero < 2 and degrees.shards * hand.cp > 1 else hand.zero,
                          micro_batch=None, sequence_parallel=False,
                          recompute="full" if hand.recompute == "full" and not plain else "none")
    return {FILE: yaml.safe_dump(config, sort_keys=False)}, said


def _fsdp(plan: Plan, d: Degrees) -> dict[str, Any]:
    return {"fsdp_version": 2, "fsdp_reshard_after_forward": d.hand.zero == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_offload_params": False, "fsdp_activation_checkpointing": d.hand.recompute == "full"}


def _check(d: Degrees, replicas: int, shards: int) -> None:
    hand = d.hand
    rules = [
        (hand.pp > 1, "it has no pipelines in training"),
        (hand.ep > 1, "it has no expert parallelism"),
        ((hand.tp > 1 or hand.cp > 1) and replicas > 1 and shards == 1,
         "tensor or context parallelism goes with data parallelism in shards (ZeRO 2 or 3) only"),
    ]
    if said := [text for breaks, text in rules if breaks]:
        raise PlanError("accelerate cannot run this plan: " + "; ".join(said))


def _lost(plan: Plan, d: Degrees, plain: bool) -> list[Lost]:
    hand, found = d.hand, list[Lost]()
    if hand.zero == 1:
        found.append(Lost("ZeRO 1: gradients whole until the end of the step", "ZeRO 2: reduced after each micro-batch",
                          more_reductions_s(plan, d.roles)))
    if hand.tp > 1:
        found.append(Lost("the layout of each op over the tensor-parallel ranks", "the model's own tp_plan: in the "
                          "script from_pretrained(..., tp_plan='auto')"))
    if hand.sequence_parallel:
        found.append(Lost("norms cut along the sequence over the tensor-parallel ranks", "norms on whole sequences"))
    if hand.recompute in ("selective", "offload") or (plain and hand.recompute != "none"):
        found.append(Lost(f"recompute {hand.recompute}", "nothing by the file alone: in the script "
                          "model.gradient_checkpointing_enable()"))
    if d.roles.micro_batches > 1:
        found.append(Lost(f"{d.roles.micro_batches} micro-batches", "in the script Accelerator("
                          f"gradient_accumulation_steps={d.roles.micro_batches})"))
    return found


__all__ = ["FILE", "accelerate"]
