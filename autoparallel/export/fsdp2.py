"""A plan as a Python file for torch alone: fully_shard, parallelize_module, pipelining, as a person would write it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from autoparallel.export.degrees import Degrees, Lost, as_data, departing, head_size, some
from autoparallel.export.fsdp2_template import TEMPLATE
from autoparallel.export.tensor_styles import Styles, styles_of
from autoparallel.plans import Plan
from autoparallel.plans.roles import AxisRole
from autoparallel.schedule.schedules import SCHEDULES, usual

FILE = "parallel_fsdp2.py"
#: Recompute that keeps results of ops, as the file says it.
_KEPT = {"selective": "Products and attention are", "all_but_attention": "Attention is"}
_CLASSES = ("ColwiseParallel", "ParallelStyle", "RowwiseParallel", "SequenceParallel", "loss_parallel",
            "parallelize_module")


def fsdp2(plan: Plan, degrees: Degrees) -> tuple[dict[str, str], Degrees]:
    """The file, and the degrees that it has: what torch has no public API for is data-parallel instead, and listed.
    Raises PlanError, with the list, where the batch has no rows for more data-parallel ranks."""
    import jinja2

    degrees = _expressible(plan, degrees)
    styles = _styles(plan, degrees)
    degrees = replace(degrees, lost=tuple(_without_style(degrees, styles)))
    degrees = degrees.losing(_lost(plan, degrees, styles), sequence_parallel=_is_along_sequence(degrees))
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
                                     undefined=jinja2.StrictUndefined)
    text = environment.from_string(TEMPLATE).render(_values(plan, degrees, styles))
    return {FILE: re.sub(r"\n{4,}", "\n\n\n", text)}, degrees


def _expressible(plan: Plan, d: Degrees) -> Degrees:
    if d.hand.cp > 1:
        d = as_data(plan, d, "context", f"the sequence over {d.hand.cp} ranks (torch's context_parallel is "
                    "experimental, and cuts buffers within a training loop)")
    if d.hand.ep > 1:
        d = as_data(plan, d, "expert", f"experts over {d.hand.ep} ranks (torch has no expert-parallel style)")
    if d.hand.pp > 1 and not _decoder(plan, d):
        d = as_data(plan, d, "pipeline", f"a pipeline of {d.hand.pp} ranks (it needs a decoder whose embedding, "
                    "layers, norm and head, with a weight of its own, are modules in this order)")
    if why := _no_styles(plan, d):
        d = as_data(plan, d, "tensor", f"products over {d.hand.tp} tensor-parallel ranks ({why})")
    wraps = d.dp > 1 or d.hand.recompute != "none"
    return _without_split_backward(d) if wraps and d.hand.pp > 1 and SCHEDULES[d.roles.schedule].splits_backward else d


def _without_split_backward(d: Degrees) -> Degrees:
    """fully_shard and checkpoint_wrapper know of whole backwards only: of a backward without the weights' gradients
    they lose these, unsaid."""
    fits = d.roles.micro_batches >= d.hand.pp * d.hand.virtual
    without = next(name for name, how in SCHEDULES.items() if how.all_forwards)
    schedule = usual(d.hand.virtual) if d.hand.virtual > 1 or fits else without
    roles = replace(d.roles, schedule=schedule)
    lost = Lost(f"schedule {d.roles.schedule} (torch's loses gradients with fully_shard and checkpoint_wrapper)",
                f"schedule {schedule}")
    return replace(d, roles=roles).losing([lost], schedule=schedule if schedule == without else None)


def _without_style(d: Degrees, styles: Styles | None) -> Iterator[Lost]:
    """What the degrees leave out; but on axes with styles products without one are whole on every rank, as those of
    the plan are that all ranks compute."""
    told = {departing(axis): axis for axis in d.roles.axes if axis.role == "tensor" and styles is not None}
    for one in d.lost:
        axis = told.get(one)
        if axis is None:
            yield one
        elif others := tuple(text for text in axis.departures if not text.endswith("(replicated)")):
            yield departing(replace(axis, departures=others), "whole on every rank of the axis")


def _styles(plan: Plan, d: Degrees) -> Styles | None:
    # by name: where the pipeline's ranks are data-parallel instead, the roles have an axis that the plan has not
    axes = [plan.axis_names.index(axis.name) for axis in d.roles.axes if axis.role == "tensor" and axis.size > 1]
    return styles_of(plan, axes) if axes else None


def _no_styles(plan: Plan, d: Degrees) -> str:
    """Why parallelize_module cannot cut the plan's tensor-parallel products ("": it can)."""
    styles = _styles(plan, d)
    if styles is None:
        return ""
    if not styles.any:
        return ("ColwiseParallel and RowwiseParallel take nn.Linear and nn.Embedding, and none of these is one: "
                + some(styles.left))
    uneven = [name for name in (*styles.columns, *styles.rows) if _parts(plan, name) % d.hand.tp]
    return f"they do not divide the rows or heads of {some(uneven)} evenly" if uneven else ""


def _parts(plan: Plan, name: str) -> int:
    """The parts into which the columns of a projection may be cut: its heads, where they are known."""
    rows, columns = plan.model.parameters.get(f"{name}.weight", (0, 0))
    size = head_size(plan)
    if size and name.endswith(("q_proj", "k_proj", "v_proj")):
        return rows // size
    return columns // size if size and name.endswith("o_proj") else rows


def _is_along_sequence(d: Degrees) -> bool:
    """Whether all tensor-parallel axes, which are one in the file, cut norms along the sequence, from the first of
    equal layers to the last."""
    tensor = [axis for axis in d.roles.axes if axis.role == "tensor" and axis.size > 1]
    return bool(tensor and d.layers) and all(axis.sequence for axis in tensor)


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
    if d.hand.sequence_parallel and not _is_along_sequence(d):
        where = "on one of two tensor-parallel axes" if d.layers else "in a model without a list of layers"
        found.append(Lost(f"norms along the sequence {where}", "norms on whole sequences"))
    if plan.hybrid.reduce_dtype and not d.hand.zero and d.hand.tp == d.hand.pp == 1:
        found.append(Lost(f"gradients summed in {plan.hybrid.reduce_dtype}", "in the parameters' dtype (DDP)"))
    return found


def _values(plan: Plan, d: Degrees, styles: Styles | None) -> dict[str, Any]:
    wraps = d.hand.zero > 0 or (d.dp > 1 and (d.hand.tp > 1 or d.hand.pp > 1))
    axes = _mesh(d, wraps)
    rules = _rules(d, styles)
    written = " ".join(style for _, style in rules) + "parallelize_module() ParallelStyle()"
    written += " DTensor() Replicate() Shard()" if d.hand.sequence_parallel else ""
    written += " loss_parallel()" if styles and styles.head else ""
    return {
        "roles": str(d.roles), "ranks": d.ranks, "torch_version": torch.__version__.split("+")[0], "lost": d.lost,
        "shape": tuple(axis.size for axis in axes), "names": tuple(axis.name for axis in axes),
        "layers": _layers(d), "wraps": wraps,
        "ddp": d.dp > 1 and not wraps, "data": [axis.name for axis in axes if axis.role == "data"],
        "reshard": d.hand.zero == 3, "keeps": d.hand.zero in (0, 1) and wraps,
        "reduce_dtype": plan.hybrid.reduce_dtype if wraps else None,
        "styles": rules, "placements": [name for name in ("DTensor", "Replicate", "Shard") if f"{name}(" in written],
        "classes": sorted(name for name in _CLASSES if f"{name}(" in written),
        "tensor": next((axis.name for axis in axes if axis.role == "tensor"), None),
        "sequence": d.hand.sequence_parallel, "loss_parallel": bool(styles and styles.head),
        "recompute": d.hand.recompute, "kept": _KEPT.get(d.hand.recompute), "micro_batches": d.roles.micro_batches,
        "pipeline": _pipeline(plan, d) if d.hand.pp > 1 else None}


def _mesh(d: Degrees, wraps: bool) -> list[AxisRole]:
    """The file's mesh: axes of a role are one, and of data-parallel ones there is one that replicates and one that
    shards (of size 1 where FSDP only adds gradients up)."""
    axes = [axis for axis in d.roles.axes if axis.size > 1]
    groups = [[axis for axis in axes if axis.role == "data" and not axis.shards],
              [axis for axis in axes if axis.role == "data" and axis.shards],
              [axis for axis in axes if axis.role == "tensor"]]
    found = [AxisRole("_".join(axis.name for axis in group), math.prod(axis.size for axis in group), group[0].role)
             for group in groups if group]
    if wraps and groups[0] and not groups[1]:
        found.insert(1, AxisRole("unsharded", 1, "data"))
    return ([AxisRole("pipeline", d.hand.pp, "pipeline")] if d.hand.pp > 1 else []) + found


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
    return {"ranks": d.hand.pp, "stages": ends, "schedule": SCHEDULES[d.roles.schedule].torch_class,
            "single": not SCHEDULES[d.roles.schedule].several_stages, **_decoder(plan, d)}


__all__ = ["FILE", "fsdp2"]
