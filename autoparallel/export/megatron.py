"""A plan as arguments of Megatron-LM's pretrain scripts, refused where Megatron's own checks would."""

from __future__ import annotations

import shlex
from itertools import groupby

from autoparallel.errors import PlanError
from autoparallel.export.degrees import Degrees, Lost, ep_by_hand, experts_beside_tensor
from autoparallel.export.megatron_rules import LAYOUT, VERSION, broken, flags_of
from autoparallel.plans import Plan
from autoparallel.schedule.schedules import SCHEDULES, usual

FILE = "megatron_args.sh"
Argument = tuple[str, ...]


def megatron(plan: Plan, degrees: Degrees) -> tuple[dict[str, str], Degrees]:
    """A shell file that sets MEGATRON_ARGS, and the degrees that it has. Raises PlanError with the rule that a plan
    breaks."""
    lost: list[Lost] = []
    arguments = [*_degrees(degrees, lost), *_pipeline(degrees, lost), *_storage(plan, degrees, lost),
                 *_recompute(plan, degrees, lost), *_batches(plan, degrees), *_model(plan, degrees)]
    environment = _environment(degrees)
    flags = flags_of([word for argument in arguments for word in argument], degrees.ranks, environment)
    if faults := broken(flags):
        raise PlanError("Megatron-LM would refuse this plan: " + "; ".join(f"{rule.text} (rule {rule.name!r})"
                                                                           for rule in faults))
    said = degrees.losing(lost, schedule=None, ep=ep_by_hand(degrees.hand.ep, degrees.hand.tp, degrees.dp))
    lines = ["# Arguments of this plan for Megatron-LM, checked against " + VERSION + ".",
             f"# {degrees.roles}, on {degrees.ranks} processes.",
             *(f"# Not expressed: {one.what}. Instead: {one.instead}." for one in said.lost),
             *(f"export {name}={value}" for name, value in environment.items()),
             "MEGATRON_ARGS=(", *(f"  {shlex.join(argument)}" for argument in arguments), ")", "",
             "# torchrun ... pretrain_gpt.py \"${MEGATRON_ARGS[@]}\" and the model's size, data and optimizer", ""]
    return {FILE: "\n".join(lines)}, said


def _degrees(d: Degrees, lost: list[Lost]) -> list[Argument]:
    hand, expert = d.hand, d.hand.ep
    if d.experts_on_tensor and hand.sequence_parallel:
        expert = d.roles.expert
    elif d.experts_on_tensor:
        lost.append(Lost("whole experts divided over the tensor-parallel ranks", "each expert's columns and rows are"))
    lost += experts_beside_tensor(hand)
    sizes = {"tensor-model-parallel-size": hand.tp, "pipeline-model-parallel-size": hand.pp,
             "context-parallel-size": hand.cp, "expert-model-parallel-size": expert}
    found: list[Argument] = [(f"--{name}", str(size)) for name, size in sizes.items() if size > 1]
    if expert > 1:
        found += [("--expert-tensor-parallel-size", "1"), ("--moe-token-dispatcher-type", "alltoall")]
    return found + ([("--sequence-parallel",)] if hand.sequence_parallel else [])


def _pipeline(d: Degrees, lost: list[Lost]) -> list[Argument]:
    hand = d.hand
    if hand.pp == 1:
        return []
    how = None if hand.schedule is None else SCHEDULES[hand.schedule]
    if how is not None and "megatron" not in how.frameworks:
        waits = 0.0 if how.all_forwards else None  # 1F1B waits as long, with less memory
        lost.append(Lost(f"schedule {hand.schedule}", SCHEDULES[usual(hand.virtual)].title, waits))
    if len(set(d.layers_by_stage)) > 1:
        return [(f"--{LAYOUT}", layout_of(d.layers_by_stage))]
    return [("--num-virtual-stages-per-pipeline-rank", str(hand.virtual))] if hand.virtual > 1 else []


def layout_of(layers_by_stage: tuple[int, ...]) -> str:
    """A layout string, with runs of equal stages folded.

    >>> layout_of((1, 2, 2, 1))
    'Et|(tt|)*2,tL'
    """
    first, *middle, last = layers_by_stage
    folded = "".join(f"({'t' * count}|)*{len(list(run))}," for count, run in groupby(middle))
    return f"E{'t' * first}|{folded}{'t' * last}L"


def _storage(plan: Plan, d: Degrees, lost: list[Lost]) -> list[Argument]:
    """Flags for the storage of parameters, gradients and optimizer state."""
    hand, found = d.hand, list[Argument]()
    if hand.zero == 1:
        found = [("--use-distributed-optimizer",), ("--overlap-grad-reduce",), ("--overlap-param-gather",)]
        if d.shards < d.dp:
            found.append(("--num-distributed-optimizer-instances", str(d.dp // d.shards)))
    elif hand.zero > 1:
        strategy = "optim_grads" if hand.zero == 2 else "optim_grads_params"
        found = [("--use-megatron-fsdp",), ("--data-parallel-sharding-strategy", strategy),
                 ("--use-distributed-optimizer",), ("--ckpt-format", "fsdp_dtensor")]
        if d.shards < d.dp:
            found += [("--num-distributed-optimizer-instances", str(d.dp // d.shards)),
                      ("--outer-dp-sharding-strategy", "no_shard")]
    elif d.dp > 1:
        found = [("--overlap-grad-reduce",)]
    if plan.model.dtype in ("bfloat16", "float16"):
        found.append(("--bf16",) if plan.model.dtype == "bfloat16" else ("--fp16",))
        summed = plan.hybrid.reduce_dtype or plan.model.dtype
        if summed == "bfloat16":
            found.append(("--grad-reduce-in-bf16",))
    elif plan.hybrid.reduce_dtype not in (None, "float32"):
        lost.append(Lost(f"gradients summed in {plan.hybrid.reduce_dtype}", "in float32"))
    return found


def _recompute(plan: Plan, d: Degrees, lost: list[Lost]) -> list[Argument]:
    how = d.hand.recompute
    if how == "full":
        return [("--recompute-granularity", "full"), ("--recompute-method", "uniform"), ("--recompute-num-layers", "1")]
    if how == "selective":
        experts = ("moe",) if plan.model.experts else ()    # "mlp" is of layers without experts
        lost.append(Lost("recompute of all but products and attention",
                         f"of attention's core, norms and whole MLPs{' and experts' if experts else ''}"))
        return [("--recompute-granularity", "selective"),
                ("--recompute-modules", "core_attn", "layernorm", "mlp", *experts)]
    if how == "offload":
        if d.hand.pp > 1:
            raise PlanError("Megatron-LM would refuse this plan: --cpu-offloading-num-layers goes with one pipeline "
                            "rank and without recompute (rule 'activation offload')")
        return [("--cpu-offloading-num-layers", str(max(1, len(d.layers) - 1)))]
    return []


def _batches(plan: Plan, d: Degrees) -> list[Argument]:
    return [("--micro-batch-size", str(d.micro_batch)), ("--global-batch-size", str(d.batch))]


def _model(plan: Plan, d: Degrees) -> list[Argument]:
    """The facts of the model that Megatron's checks read."""
    found: list[Argument] = [("--num-layers", str(len(d.layers)))] if d.layers else []
    if heads := plan.model.heads:
        found.append(("--num-attention-heads", str(heads)))
        if (groups := _query_groups(plan, heads)) not in (0, heads):
            found += [("--group-query-attention",), ("--num-query-groups", str(groups))]
    if d.sequence:
        found.append(("--seq-length", str(d.sequence)))
    return found + ([("--num-experts", str(plan.model.experts))] if plan.model.experts else [])


def _query_groups(plan: Plan, heads: int) -> int:
    """By the rows of the first projections of queries and keys (0: not known)."""
    rows = {key: next((shape[0] for name, shape in plan.model.parameters.items() if name.endswith(key)), 0)
            for key in ("q_proj.weight", "k_proj.weight")}
    queries, keys = rows.values()
    return heads * keys // queries if queries and keys else 0


def _environment(d: Degrees) -> dict[str, str]:
    if d.hand.zero > 1:
        return {}
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if d.hand.tp > 1 or d.hand.cp > 1 else {}


__all__ = ["FILE", "layout_of", "megatron"]
