"""A plan as DeepSpeed's JSON configuration (0.19)."""

from __future__ import annotations

import json
from typing import Any

from autoparallel.errors import PlanError
from autoparallel.export.degrees import Degrees, Lost, states_lost
from autoparallel.plans import Plan
from autoparallel.schedule.schedules import SCHEDULES, usual

FILE = "ds_config.json"
VERSION = "0.19.8"


def deepspeed(plan: Plan, degrees: Degrees) -> tuple[dict[str, str], Degrees]:
    """The configuration, and the degrees that it has. Raises PlanError with the rule of DeepSpeed's that a plan
    breaks."""
    hand = degrees.hand
    _check(plan, degrees)
    config: dict[str, Any] = {
        "train_batch_size": degrees.batch, "train_micro_batch_size_per_gpu": degrees.micro_batch,
        "gradient_accumulation_steps": degrees.roles.micro_batches,
        "zero_optimization": {"stage": hand.zero, **({"overlap_comm": True} if hand.zero else {}),
                              **_offloaded(plan, degrees)}}
    if plan.model.dtype in ("bfloat16", "float16"):
        config["bf16" if plan.model.dtype == "bfloat16" else "fp16"] = {"enabled": True}
    if plan.hybrid.reduce_dtype is not None:
        config["communication_data_type"] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[
            plan.hybrid.reduce_dtype]
    if hand.tp > 1:
        config["tensor_parallel"] = {"autotp_size": hand.tp}
    if hand.cp > 1:
        config["sequence_parallel_size"] = hand.cp
    if hand.ep > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": hand.ep}
    if hand.pp > 1:
        config["pipeline"] = {"stages": hand.pp, "partition": "best"}
    if hand.recompute in ("full", "offload"):
        config["activation_checkpointing"] = {"cpu_checkpointing": hand.recompute == "offload"}
    lost = [states_lost(plan)] if plan.hybrid.offload.is_away and not _offloaded(plan, degrees) else []
    said = degrees.losing([*lost, *_lost(degrees)], schedule=None, sequence_parallel=False,
                          recompute="none" if hand.recompute == "selective" else hand.recompute)
    return {FILE: json.dumps(config, indent=2) + "\n"}, said


def _offloaded(plan: Plan, degrees: Degrees) -> dict[str, Any]:
    """Where the file says that optimizer states, and parameters, are: on the host with ZeRO, a part of the states, and
    parameters, with ZeRO-3. It says the same of all parameters."""
    away, zero = plan.hybrid.offload, degrees.hand.zero
    if away.groups or away.states != "host" or not zero or (away.fraction < 1 and zero < 3):
        return {}
    return {"offload_optimizer": {"device": "cpu", "pin_memory": True,
                                  **({"ratio": away.fraction} if away.fraction < 1 else {})},
            **({"offload_param": {"device": "cpu", "pin_memory": True}} if away.moves_parameters else {})}


def _check(plan: Plan, d: Degrees) -> None:
    hand, heads = d.hand, plan.model.heads
    rules = [
        (hand.pp > 1 and hand.zero > 1, f"a pipeline goes with ZeRO 0 or 1, and the plan has {hand.zero}"),
        (hand.ep > 1 and hand.tp > 1, "expert parallelism (AutoEP) does not go with tensor parallelism (AutoTP)"),
        (plan.model.experts % hand.ep != 0, f"{plan.model.experts} experts are not divided by {hand.ep} ranks"),
        (hand.cp > 1 and heads % hand.cp != 0,
         f"Ulysses cuts attention by heads, and {heads} are not divided by {hand.cp} ranks"),
        (hand.virtual > 1, "its pipelines have one stage a rank"),
        (hand.zero > 0 and d.shards < d.dp,
         f"ZeRO shards over all {d.dp} data-parallel ranks, not over {d.shards} of them (MiCS was removed in 0.19.8)"),
        (hand.pp > 1 and hand.cp > 1, "a pipeline does not go with Ulysses' sequence parallelism"),
    ]
    if said := [text for breaks, text in rules if breaks]:
        raise PlanError("DeepSpeed would refuse this plan: " + "; ".join(said))


def _lost(d: Degrees) -> list[Lost]:
    hand, found = d.hand, list[Lost]()
    if hand.sequence_parallel:
        found.append(Lost("norms cut along the sequence over the tensor-parallel ranks", "norms on whole sequences"))
    if d.experts_on_tensor:
        found.append(Lost("whole experts divided over the tensor-parallel ranks", "experts as AutoTP cuts them"))
    if hand.cp > 1:
        found.append(Lost("attention with the sequence cut", "Ulysses: all-to-all to heads and back; in the script "
                          "UlyssesSPAttentionHF.register_with_transformers"))
    if hand.recompute != "none":
        found.append(Lost(f"recompute {hand.recompute}", "nothing by the file alone: in the script "
                          "model.gradient_checkpointing_enable()"))
    if hand.pp > 1:
        how = SCHEDULES[hand.schedule or usual(hand.virtual)]
        text = "its own" if "deepspeed" in how.frameworks else SCHEDULES[usual()].title
        found.append(Lost(f"a pipeline with {list(d.layers_by_stage)} layers by stage and schedule "
                          f"{how.name}", f"{text} schedule, on stages of a PipelineModule that the "
                          "script makes"))
    return found


__all__ = ["FILE", "VERSION", "deepspeed"]
