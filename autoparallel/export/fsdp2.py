"""A plan as a Python file for torch alone: fully_shard, parallelize_module, pipelining, as a person would write it."""

from __future__ import annotations

import re
from typing import Any

import torch

from autoparallel.errors import PlanError
from autoparallel.export.degrees import Degrees, Lost
from autoparallel.export.fsdp2_template import TEMPLATE
from autoparallel.export.tensor_styles import Styles, styles_of
from autoparallel.plans import Plan
from autoparallel.plans.roles import AxisRole

FILE = "parallel_fsdp2.py"
_CLASSES = ("ColwiseParallel", "ParallelStyle", "RowwiseParallel", "SequenceParallel", "loss_parallel",
            "parallelize_module")
_SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
              "zero_bubble": "ScheduleInterleavedZeroBubble"}


def fsdp2(plan: Plan, degrees: Degrees) -> tuple[dict[str, str], list[Lost]]:
    """The file, and what is lost. Raises PlanError for what torch has no public API for."""
    import jinja2

    styles = _styles(plan, degrees)
    _check(plan, degrees, styles)
    lost = _lost(plan, degrees, styles)
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
                                     undefined=jinja2.StrictUndefined)
    text = environment.from_string(TEMPLATE).render(_values(plan, degrees, styles, [*degrees.lost, *lost]))
    return {FILE: re.sub(r"\n{4,}", "\n\n\n", text)}, lost


def _styles(plan: Plan, d: Degrees) -> Styles | None:
    axes = [number for number, axis in enumerate(d.roles.axes) if axis.role == "tensor" and axis.size > 1]
    if len(axes) > 1:
        raise PlanError("parallelize_module takes a mesh of one axis, and the plan has two tensor-parallel ones")
    return styles_of(plan, axes[0]) if axes else None


def _check(plan: Plan, d: Degrees, styles: Styles | None) -> None:
    hand, uneven = d.hand, [size for size in (d.hand.tp,) if size > 1]
    rules = [
        (hand.cp > 1, "torch's context_parallel is experimental and cuts buffers inside a training loop, which a file "
         "of functions cannot: leave out cp, or run the plan by autoparallel.compile"),
        (hand.ep > 1, "torch has no expert-parallel style (torchtitan, Megatron-LM and DeepSpeed have one)"),
        (styles is not None and not styles.any, "torch's ColwiseParallel and RowwiseParallel take nn.Linear and "
         "nn.Embedding, and none of the products cut by this plan is one ("
         + ", ".join(styles.left[:3] if styles else []) + ")"),
        (bool(uneven) and any(plan.model.parameters.get(f"{name}.weight", (0,))[0] % hand.tp for name in
                              (styles.columns if styles else [])), "columns are not divided evenly"),
        (hand.pp > 1 and not _decoder(plan, d), "pipelines need a decoder whose embedding, layers, norm and head (with "
         "a weight of its own) are modules in this order"),
    ]
    if said := [text for breaks, text in rules if breaks]:
        raise PlanError("a file for torch alone cannot say this plan: " + "; ".join(said))


def _decoder(plan: Plan, d: Degrees) -> dict[str, str]:
    """Names of the parts of a decoder: ``base`` (whose forward takes inputs_embeds), ``embedding``, ``norm``, ``head``;
    empty if the model is none."""
    outside = next((block.lines for block in plan.blocks if block.paths == ("outside blocks",)), ())
    modules = list(dict.fromkeys((name.split(" ")[0], name.split(" ")[-1]) for name, _, _ in outside
                                 if len(name.split(" ")) > 1))
    if not d.layers or not modules:
        return {}
    base = d.layers[0].rsplit(".", 2)[0]
    embeddings = [module for module, op in modules if op == "embedding"]
    norms = [module for module, op in modules if module.startswith(base + ".") and op != "embedding"]
    heads = [module for module, op in modules if op == "linear" and not module.startswith(base + ".")]
    if len(embeddings) != 1 or len(set(norms)) != 1 or len(heads) != 1:
        return {}
    if f"{heads[0]}.weight" not in plan.model.parameters:
        return {}
    return {"base": base, "embedding": embeddings[0], "norm": norms[0], "head": heads[0]}


def _lost(plan: Plan, d: Degrees, styles: Styles | None) -> list[Lost]:
    found = []
    if styles is not None and styles.left:
        names = [re.sub(r"\.\d+\.", ".*.", name) for name in styles.left]
        found.append(Lost(f"tensor parallelism of {', '.join(dict.fromkeys(names))}",
                          "whole on every rank of the axis: torch has no style for it"))
    if plan.hybrid.reduce_dtype and not d.hand.zero and d.hand.tp == d.hand.pp == 1:
        found.append(Lost(f"gradients summed in {plan.hybrid.reduce_dtype}", "in the parameters' dtype (DDP)"))
    return found


def _values(plan: Plan, d: Degrees, styles: Styles | None, lost: list[Lost]) -> dict[str, Any]:
    axes = _mesh(d)
    data = [axis for axis in d.roles.axes if axis.role == "data" and axis.size > 1]
    wraps = d.hand.zero > 0 or (bool(data) and (d.hand.tp > 1 or d.hand.pp > 1))
    names = [name for name, _ in axes]
    rules = _rules(d, styles)
    written = " ".join(style for _, style in rules) + "parallelize_module() ParallelStyle()"
    written += " DTensor() Replicate() Shard()" if d.hand.sequence_parallel else ""
    written += " loss_parallel()" if styles and styles.head else ""
    sharding = _data_axes(d, wraps)
    return {
        "roles": str(d.roles), "ranks": d.ranks, "torch_version": torch.__version__.split("+")[0], "lost": lost,
        "shape": tuple(size for _, size in axes), "names": tuple(names), "layers": _layers(d), "wraps": wraps,
        "ddp": bool(data) and not wraps, "data": sharding, "data_ranks": d.dp,
        "reshard": d.hand.zero == 3, "keeps": d.hand.zero in (0, 1) and wraps,
        "reduce_dtype": plan.hybrid.reduce_dtype if wraps else None,
        "styles": rules, "placements": [name for name in ("DTensor", "Replicate", "Shard") if f"{name}(" in written],
        "classes": sorted(name for name in _CLASSES if f"{name}(" in written),
        "tensor": next((a.name for a in d.roles.axes if a.role == "tensor"), None),
        "sequence": d.hand.sequence_parallel, "loss_parallel": bool(styles and styles.head),
        "recompute": d.hand.recompute, "micro_batches": d.roles.micro_batches,
        "pipeline": _pipeline(plan, d) if d.hand.pp > 1 else None}


def _mesh(d: Degrees) -> list[tuple[str, int]]:
    """Axes of the mesh, with one of size 1 over which nothing is sharded where FSDP only adds gradients up."""
    axes = [(axis.name, axis.size) for axis in d.roles.axes if axis.size > 1]
    wraps = d.hand.zero > 0 or d.hand.tp > 1 or d.hand.pp > 1
    data = [name for name, _ in axes if _axis(d, name).role == "data"]
    if data and wraps and not any(axis.shards for axis in d.roles.axes):
        axes.insert(max(i for i, (name, _) in enumerate(axes) if name in data) + 1, ("unsharded", 1))
    return ([("pipeline", d.hand.pp)] if d.hand.pp > 1 else []) + axes


def _data_axes(d: Degrees, wraps: bool) -> list[str]:
    """The axes for fully_shard: those that replicate, then the one that shards."""
    data = [axis for axis in d.roles.axes if axis.role == "data" and axis.size > 1]
    shards = [axis.name for axis in data if axis.shards]
    if len(shards) > 1 or len(data) - len(shards) > 1:
        raise PlanError("a file for torch alone cannot say this plan: fully_shard takes one axis that replicates and "
                        f"one that shards, and the plan has {[axis.name for axis in data]}")
    whole = [axis.name for axis in data if not axis.shards]
    return whole + (shards or (["unsharded"] if wraps and whole else []))


def _axis(d: Degrees, name: str) -> AxisRole:
    return next(axis for axis in d.roles.axes if axis.name == name)


def _layers(d: Degrees) -> str:
    return d.layers[0].rpartition(".")[0] if d.layers else ""


def _rules(d: Degrees, styles: Styles | None) -> list[tuple[str, str]]:
    """(name pattern, style) lines of the tensor-parallel plan, with a pattern for equal layers."""
    if styles is None:
        return []
    sequence = d.hand.sequence_parallel
    each: list[tuple[str, str]] = []
    each += [(name, "ColwiseParallel()") for name in styles.columns]
    each += [(name, "RowwiseParallel(output_layouts=Shard(1))" if sequence else "RowwiseParallel()")
             for name in styles.rows]
    each += [(name, "ColwiseParallel(output_layouts=Replicate())") for name in styles.whole_columns]
    each += [(name, "RowwiseParallel(input_layouts=Replicate())") for name in styles.whole_rows]
    each += [(name, "RowwiseParallel(input_layouts=Replicate())") for name in styles.embeddings]
    if sequence:
        each += [(name, "SequenceParallel(use_local_output=True)") for name in styles.norms]
        cut = {name for name in styles.inside if not any(row.startswith(name + ".") for row in styles.rows)}
        each += [(name, 'Sequence(argument="whole", result="cut")' if name in cut else 'Sequence(argument="whole")')
                 for name in styles.inside]
        each += [(d.layers[0], 'Sequence(argument="cut")'), (d.layers[-1], 'Sequence(result="whole")')]
    found = list(dict.fromkeys((_pattern(d, name), style) for name, style in each))
    if styles.head:
        found.append((styles.head, "ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)"))
    return found


def _pattern(d: Degrees, name: str) -> str:
    layers = _layers(d)
    return re.sub(rf"^{re.escape(layers)}\.\d+\.", f"{layers}.*.", name) if layers else name


def _pipeline(plan: Plan, d: Degrees) -> dict[str, Any]:
    ends, first = [], 0
    for count in d.layers_by_stage:
        ends.append((first, first + count))
        first += count
    return {"ranks": d.hand.pp, "stages": ends, "schedule": _SCHEDULES[d.roles.schedule],
            "single": d.roles.schedule in ("gpipe", "1f1b"), **_decoder(plan, d)}


__all__ = ["FILE", "fsdp2"]
