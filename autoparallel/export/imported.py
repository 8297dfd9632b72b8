"""`import_plan`: settings of Megatron-LM, DeepSpeed, accelerate or torchtitan as a plan by hand."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoparallel.errors import PlanError, shown
from autoparallel.export.degrees import ep_by_hand
from autoparallel.export.megatron_rules import LAYOUT, Flags, flags_of, layout_stages
from autoparallel.planning.by_hand import ByHand
from autoparallel.plans.files import data_of, text_of
from autoparallel.schedule.schedules import SCHEDULES, Schedule, usual

_INSTANCES = "num-distributed-optimizer-instances"
#: Arguments that are read; and those that divide or delay the step's work in ways that a plan by hand cannot say.
_MEGATRON_READ = {"tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
                  "expert-model-parallel-size", "expert-tensor-parallel-size", "sequence-parallel", LAYOUT,
                  "micro-batch-size", "global-batch-size", "use-distributed-optimizer", "use-megatron-fsdp",
                  "use-torch-fsdp2", "data-parallel-sharding-strategy", "recompute-granularity", "recompute-method",
                  "recompute-num-layers", "recompute-activations", "recompute-modules", "num-layers",
                  "num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage",
                  "cpu-offloading-num-layers"}
_OTHERS = ("optimizer-cpu-offload", "fine-grained-activation-offloading", _INSTANCES, "outer-dp-sharding-strategy",
           "tensor-parallel-num-weight-shards", "decoder-first-pipeline-num-layers",
           "decoder-last-pipeline-num-layers", "use-tp-pp-dp-mapping", "torch-fsdp2-no-reshard-after-forward")
#: The files that are read.
_KINDS = ("DeepSpeed's .json, accelerate's .yaml, a torchtitan recipe's .py, or a text with Megatron-LM's arguments "
          "(--tensor-model-parallel-size 8 ...)")


@dataclass(frozen=True)
class Imported:
    """``by_hand``: the degrees, for `autoparallel.plan(..., by_hand=...)`. ``ignored``: settings of the file that
    divide or delay the step's work, and that a plan by hand cannot say. ``missing``: what the file does not state of a
    plan by hand, and how to give it."""

    by_hand: ByHand
    ignored: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def import_plan(path: str | Path, num_devices: int | None = None) -> Imported:
    """The plan that a file says: DeepSpeed's JSON, accelerate's YAML, a torchtitan recipe (.py), or any text with
    Megatron-LM's arguments.

    num_devices: of the job, for files that do not state it (Megatron-LM's never do).

    Raises PlanError for a file that cannot be read or is none of these, for values that a plan cannot have, and if its
    degrees do not make up ``num_devices``.
    """
    if num_devices is not None and (isinstance(num_devices, bool) or not isinstance(num_devices, int)
                                    or num_devices < 1):
        raise PlanError(f"num_devices is {shown(num_devices)}: give a whole number, 1 or more")
    text, suffix = text_of(path, "settings", _KINDS), Path(path).suffix
    reader: Callable[[str, str, int | None], Imported]
    if suffix == ".json":
        reader = _deepspeed
    elif suffix in (".yaml", ".yml"):
        reader = _accelerate
    elif suffix == ".py":
        reader = _torchtitan
    elif "--" in text:
        reader = _megatron
    else:
        raise PlanError(f"{path} is none of the files that are read: give {_KINDS}")
    found = reader(text, str(path), num_devices)
    hand = found.by_hand if num_devices is None else found.by_hand.on(num_devices)
    ranks = ["the number of ranks, and with it dp: give num_devices (--devices)"] if hand.dp is None else []
    parts = ["the sequences of a micro-batch: add micro_batch=... to the plan by hand (without it "
             + ("one" if hand.pp > 1 else "all of a rank's") + ")"] if hand.micro_batch is None else []
    return replace(found, by_hand=hand, missing=(*ranks, *parts))


def _megatron(text: str, origin: str, num_devices: int | None) -> Imported:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    try:
        words = shlex.split("\n".join(lines).replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise PlanError(f"{origin} is no shell text: {error}") from error
    ends = [number for number, word in enumerate(words) if word in (")", ";", "&&")]
    flags = flags_of([word for number, word in enumerate(words) if number not in ends],
                     num_devices or 1, {})
    known = set(flags.given) & (_MEGATRON_READ | set(_OTHERS))
    if not known:
        raise PlanError(f"{origin} has none of Megatron-LM's arguments (--tensor-model-parallel-size 8 ...)")
    zero = 1 if flags.on("use-distributed-optimizer") else 0
    if flags.on("use-megatron-fsdp"):
        named = str(flags.given.get("data-parallel-sharding-strategy", "optim_grads_params"))
        zero = {"no_shard": 0, "optim": 1, "optim_grads": 2}.get(named, 3)
    elif flags.on("use-torch-fsdp2"):
        zero = 3
    dp = flags.dp if num_devices is not None else None
    instances = flags.number(_INSTANCES) if zero and dp is not None else 1
    values: dict[str, Any] = {
        "dp": dp, "tp": flags.tp, "pp": flags.pp, "cp": flags.cp,
        "ep": ep_by_hand(flags.ep, flags.tp if flags.etp == 1 else 1, dp), "zero": zero,
        "shards": dp // instances if instances > 1 and dp is not None else None, "virtual": _virtual(flags),
        "sequence_parallel": flags.on("sequence-parallel") and flags.tp > 1,
        "micro_batch": flags.number("micro-batch-size") if "micro-batch-size" in flags.given else None,
        "recompute": _recompute(flags)}
    known_instances = {_INSTANCES, "outer-dp-sharding-strategy"} if instances > 1 else set[str]()
    ignored = [f"--{name}" for name in flags.given if name in _OTHERS and name not in known_instances]
    if flags.ep > 1 and flags.etp > 1:
        ignored.append(f"--expert-tensor-parallel-size {flags.etp}" + (
            "" if flags.on("expert-tensor-parallel-size") else " (its default)"))
    if flags.on(LAYOUT) and len({stage.count("t") for stage in layout_stages(str(flags[LAYOUT]))}) > 1:
        ignored.append(f"--{LAYOUT}")
    return Imported(ByHand(**values), tuple(ignored))


def _recompute(flags: Flags) -> str:
    if flags.on("cpu-offloading-num-layers"):
        return "offload"
    default = "selective" if flags.on("recompute-activations") else "none"
    return str(flags.given.get("recompute-granularity", default))


def _virtual(flags: Flags) -> int:
    if flags.on("num-layers-per-virtual-pipeline-stage"):
        return max(1, flags.number("num-layers") // flags.pp // flags.number("num-layers-per-virtual-pipeline-stage"))
    if flags.on(LAYOUT):
        return max(1, len(layout_stages(str(flags[LAYOUT]))) // flags.pp)
    return flags.number("num-virtual-stages-per-pipeline-rank")


def _deepspeed(text: str, origin: str, num_devices: int | None) -> Imported:
    data = data_of(text, origin)
    if not isinstance(data, dict) or not {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu",
                                          "pipeline", "tensor_parallel"} & set(data):
        raise PlanError(f"{origin} is no configuration of DeepSpeed's: it has no zero_optimization or "
                        f"train_micro_batch_size_per_gpu; give {_KINDS}")
    zero = data.get("zero_optimization") or {}
    stage, micro = zero.get("stage", 0), data.get("train_micro_batch_size_per_gpu")
    stages = (data.get("pipeline") or {}).get("stages", 1)
    shards = zero.get("mics_shard_size", -1)
    again = data.get("activation_checkpointing")
    if isinstance(micro, int) and isinstance(batch := data.get("train_batch_size"), int) and (
            micro < 1 or batch < 1 or batch % micro):
        raise PlanError(f"{origin}: train_batch_size {batch} is no multiple of train_micro_batch_size_per_gpu {micro}, "
                        "which DeepSpeed refuses")
    values: dict[str, Any] = {
              "dp": _ranks_of(data, origin), "tp": max(1, (data.get("tensor_parallel") or {}).get("autotp_size", 1)),
              "zero": stage,
              "cp": data.get("sequence_parallel_size", 1), "pp": 1 if stages == "auto" else stages,
              "ep": (data.get("expert_parallel") or {}).get("autoep_size", 1),
              "shards": shards if shards > 0 else None, "micro_batch": None if micro == "auto" else micro,
              "recompute": "none" if again is None else "offload" if again.get("cpu_checkpointing") else "full"}
    ignored = [f"zero_optimization.{key}" for key in ("offload_param", "offload_optimizer", "zero_hpz_partition_size",
                                                      "zero_quantized_weights", "zero_quantized_gradients")
               if (zero.get(key) or {}) not in ({}, 1) and _counts(zero[key])]
    return Imported(ByHand(**values), tuple(ignored))


def _ranks_of(data: Mapping[str, Any], origin: str) -> int | None:
    """Data-parallel ranks: what is missing in DeepSpeed's own check of the batch, if all three sizes are numbers."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    sizes = [data[key] for key in keys if isinstance(data.get(key), int) and data[key] > 0]
    if len(sizes) < len(keys):
        return None
    batch, micro, accumulated = sizes
    if batch % (micro * accumulated):
        raise PlanError(f"{origin}: train_batch_size {batch} is no multiple of train_micro_batch_size_per_gpu x "
                        f"gradient_accumulation_steps = {micro} x {accumulated}, which DeepSpeed refuses")
    return int(batch // (micro * accumulated))


def _counts(setting: Any) -> bool:
    return not (isinstance(setting, Mapping) and setting.get("device") in (None, "none"))


def _accelerate(text: str, origin: str, num_devices: int | None) -> Imported:
    import yaml

    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PlanError(f"{origin} is no YAML: {error}") from error
    if not isinstance(data, dict) or "distributed_type" not in data:
        raise PlanError(f"{origin} is no configuration of accelerate's: it has no distributed_type; give {_KINDS}")
    fsdp, sizes = data.get("fsdp_config") or {}, data.get("parallelism_config") or {}

    def size(name: str, default: int = 1) -> int:
        return int(sizes.get(f"parallelism_config_{name}_size", default))

    tp, cp = size("tp"), size("cp") * size("sp")
    ranks = data.get("num_processes") if isinstance(data.get("num_processes"), int) else None
    if ranks is not None and (ranks < 1 or ranks % (tp * cp)):
        raise PlanError(f"{origin}: num_processes is {ranks}: give a multiple of the tensor- and context-parallel "
                        f"ranks, {tp * cp}")
    left = None if ranks is None else max(1, ranks // (tp * cp))
    is_fsdp = data["distributed_type"] == "FSDP"
    shards = size("dp_shard", 1 if sizes else left or 1) if is_fsdp else 1
    dp = size("dp_replicate") * shards if sizes else left
    zero = _zero_of(fsdp) if is_fsdp and shards * cp > 1 else 0
    ignored = [f"fsdp_config.{key}" for key in ("fsdp_offload_params",) if fsdp.get(key) is True]
    ignored += [key for key in ("deepspeed_config", "megatron_lm_config") if data.get(key)]
    values: dict[str, Any] = {
        "dp": dp, "tp": tp, "cp": cp, "zero": zero, "shards": shards if zero and shards != dp else None,
        "recompute": "full" if fsdp.get("fsdp_activation_checkpointing") is True else "none"}
    return Imported(ByHand(**values), tuple(ignored))


def _zero_of(fsdp: Mapping[str, Any]) -> int:
    """The ZeRO stage of FSDP 2's reshard_after_forward, or of FSDP 1's sharding strategy."""
    strategy = str(fsdp.get("fsdp_sharding_strategy", fsdp.get("fsdp_reshard_after_forward", True))).upper()
    return {"TRUE": 3, "FALSE": 2, "FULL_SHARD": 3, "1": 3, "SHARD_GRAD_OP": 2, "2": 2, "NO_SHARD": 0,
            "HYBRID_SHARD": 3}.get(strategy, 3)


def _torchtitan(text: str, origin: str, num_devices: int | None) -> Imported:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise PlanError(f"{origin} is no Python: {error}") from error
    found: dict[str, Any] = {}
    named = set()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        inside = call.func.value.id if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) \
            else ""
        named |= {name, inside}
        if name in ("ParallelismConfig", "TrainingConfig", "replace"):
            for keyword in call.keywords:
                if keyword.arg and isinstance(keyword.value, (ast.Constant, ast.List, ast.UnaryOp)):
                    found[keyword.arg] = ast.literal_eval(keyword.value)
    if "ParallelismConfig" not in named and {"fully_shard", "init_device_mesh", "parallelize_module"} & named:
        raise PlanError(f"{origin} is a program for torch alone, which states no degrees\n  An exported one is priced "
                        "by exported.by_hand, which autoparallel export prints.")
    if "ParallelismConfig" not in named:
        raise PlanError(f"{origin} has no ParallelismConfig(...): a torchtitan recipe is required")
    ignored: tuple[str, ...] = ("spmd_backend",) if found.get("spmd_backend") else ()
    if _schedule(found) is None:
        ignored += ("pipeline_parallel_schedule",)
    return Imported(ByHand(**_of_torchtitan(found, named, num_devices)), ignored)


def _schedule(found: Mapping[str, Any]) -> Schedule | None:
    """The schedule of torchtitan's settings; None: one that we do not have."""
    name = found.get("pipeline_parallel_schedule", SCHEDULES[usual()].torch_name)
    return next((how for how in SCHEDULES.values() if how.torch_name == name), None)


def _of_torchtitan(found: Mapping[str, Any], named: set[str], num_devices: int | None) -> dict[str, Any]:
    tp, pp = found.get("tensor_parallel_degree", 1), found.get("pipeline_parallel_degree", 1)
    replicas, shards = found.get("data_parallel_replicate_degree", 1), found.get("data_parallel_shard_degree", -1)
    cp = found.get("context_parallel_degree", 1)
    if shards == -1 and num_devices is not None:
        shards = max(1, num_devices // (replicas * tp * pp * cp))
    dp = None if shards == -1 else replicas * shards
    reshard = found.get("fsdp_reshard_after_forward", "default")
    zero = 0 if shards * cp == 1 else {"always": 3, "never": 2}.get(reshard, 3 if pp == 1 else 2)
    how = _schedule(found)
    schedule = how.name if how is not None and how.name not in (usual(), usual(2)) else None
    parts, experts = found.get("module_fqns_per_model_part"), found.get("expert_parallel_degree", 1)
    tokens, sequence = found.get("num_tokens_per_microbatch_per_dp_rank"), found.get("max_context_length")
    each = found.get("num_pp_microbatches", 1) if pp > 1 else 1
    return {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "zero": zero,
            "ep": ep_by_hand(experts, tp, dp),
            "shards": shards if zero and replicas > 1 and shards > 0 else None,
            "schedule": schedule if pp > 1 else None,
            "virtual": len(parts) // pp if parts and pp > 1 else 1,
            "micro_batch": max(1, tokens // sequence // each) if tokens and sequence else None,
            "recompute": "full" if "FullAC" in named else "selective" if "SelectiveAC" in named else "none",
            "sequence_parallel": bool(tp > 1 and found.get("enable_sequence_parallel", True))}


__all__ = ["Imported", "import_plan"]
