"""A plan as a torchtitan recipe: a Python module with one function (b5bcd76c6, August 2026)."""

from __future__ import annotations

from typing import Any

from autoparallel.errors import PlanError
from autoparallel.export.degrees import (
    Degrees,
    Lost,
    ep_by_hand,
    experts_beside_tensor,
    more_reductions_s,
    sharded_by_context,
)
from autoparallel.plans import Plan
from autoparallel.schedule.schedules import SCHEDULES

FILE = "autoparallel_recipe.py"
VERSION = "b5bcd76c6 (August 2026)"
_TEMPLATE = '''"""{roles}, on {ranks} devices, for torchtitan {version}.

    torchtitan's own launcher, with --module autoparallel_recipe --config planned
{lost}"""

from dataclasses import replace

from torchtitan.config import ParallelismConfig
{imports}from torchtitan.models.llama3.config_registry import llama3_8b as recipe  # put the recipe of your model here
from torchtitan.trainer import Trainer


def planned() -> Trainer.Config:
    config = recipe()
    config.parallelism = ParallelismConfig(
{parallelism}
    )
    config.training = replace(
        config.training,
{training}
    )
{recompute}    return config
'''


def torchtitan(plan: Plan, degrees: Degrees) -> tuple[dict[str, str], Degrees]:
    """The recipe, and the degrees that it has. Raises PlanError with the rule of torchtitan's that a plan breaks."""
    hand = degrees.hand
    _check(plan, degrees)
    by_context = sharded_by_context(hand)
    said = degrees.losing([*by_context, *_lost(plan, degrees)], zero=2 if hand.zero == 1 or by_context else hand.zero,
                          shards=1 if by_context and degrees.dp > 1 else hand.shards,
                          ep=ep_by_hand(hand.ep, hand.tp, degrees.dp))
    parallelism = _parallelism(degrees)
    tokens = degrees.micro_batch * degrees.sequence
    training: dict[str, Any] = {
        "num_tokens_per_microbatch_per_dp_rank": tokens * (degrees.roles.micro_batches if hand.pp > 1 else 1),
        "num_tokens_per_train_step": degrees.batch * degrees.sequence, "max_context_length": degrees.sequence}
    if plan.hybrid.reduce_dtype:
        training["mixed_precision_reduce"] = plan.hybrid.reduce_dtype
    kind = {"full": "FullAC", "selective": "SelectiveAC"}.get(hand.recompute)
    text = _TEMPLATE.format(
        roles=degrees.roles, ranks=degrees.ranks, version=VERSION,
        lost="".join(f"\nNot expressed: {one.what}. Instead: {one.instead}." for one in said.lost) + "\n"
        if said.lost else "",
        parallelism=_arguments(parallelism), training=_arguments(training),
        imports=f"from torchtitan.distributed.activation_checkpoint import {kind}\n" if kind else "",
        recompute=f"    config.activation_checkpoint = {kind}.Config()\n" if kind else "")
    return {FILE: text}, said


def _arguments(values: dict[str, Any]) -> str:
    return "\n".join(f"        {name}={value!r}," for name, value in values.items())


def _parallelism(d: Degrees) -> dict[str, Any]:
    hand = d.hand
    shards = d.shards if hand.zero else 1
    found: dict[str, Any] = {
        "data_parallel_replicate_degree": d.dp // shards, "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": "always" if hand.zero == 3 else "never",
        "tensor_parallel_degree": hand.tp, "enable_sequence_parallel": hand.sequence_parallel,
        "context_parallel_degree": hand.cp, "expert_parallel_degree": d.roles.expert,
        "pipeline_parallel_degree": hand.pp}
    if hand.pp > 1:
        found |= {"pipeline_parallel_schedule": SCHEDULES[d.roles.schedule].torch_name,
                  "num_pp_microbatches": d.roles.micro_batches,
                  "module_fqns_per_model_part": _parts(d.layers_by_stage)}
    return found


def _parts(layers_by_stage: tuple[int, ...]) -> list[list[str]]:
    """The modules of each stage, by torchtitan's names in its decoders.

    >>> _parts((1, 1))
    [['tok_embeddings', 'layers.0'], ['layers.1', 'norm', 'output']]
    """
    found, first = list[list[str]](), 0
    for count in layers_by_stage:
        found.append([f"layers.{layer}" for layer in range(first, first + count)])
        first += count
    found[0].insert(0, "tok_embeddings")
    found[-1] += ["norm", "output"]
    return found


def _check(plan: Plan, d: Degrees) -> None:
    hand = d.hand
    shards = d.shards if hand.zero else 1
    tokens = d.micro_batch * d.sequence
    parts = (hand.tp if hand.sequence_parallel else 1) * (2 * hand.cp if hand.cp > 1 else 1)
    rules = [
        (not d.sequence, "its sizes are in tokens, and no input of the plan has a sequence (two dims)"),
        (d.roles.expert > 1 and shards * hand.cp * hand.tp % d.roles.expert != 0,
         f"expert-parallel ranks ({d.roles.expert}) divide shards x context x tensor ({shards} x {hand.cp} x "
         f"{hand.tp}): take ZeRO 2 or 3"),
        (tokens % parts != 0, f"the {tokens} tokens of a micro-batch are not divided by {parts}"),
        (hand.recompute == "offload", "it does not offload activations layer by layer"),
    ]
    if said := [text for breaks, text in rules if breaks]:
        raise PlanError("torchtitan would refuse this plan: " + "; ".join(said))


def _lost(plan: Plan, d: Degrees) -> list[Lost]:
    hand, found = d.hand, list[Lost]()
    if hand.zero == 1:
        found.append(Lost("ZeRO 1: gradients whole until the end of the step", "FSDP that reduces them after each "
                          "micro-batch", more_reductions_s(plan, d.roles)))
    if hand.tp > 1:
        found.append(Lost("the layout of each op over the tensor-parallel ranks", "the sharding that torchtitan's "
                          "model has"))
    found += experts_beside_tensor(hand)
    if hand.recompute == "selective":
        found.append(Lost("recompute of all but products and attention", "torchtitan's list of ops"))
    return found


__all__ = ["FILE", "VERSION", "torchtitan"]
