"""A plan in the field's words: what each mesh axis is for, and a sentence for the whole."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autoparallel.plans.plan import Plan
from autoparallel.plans.record import Workload
from autoparallel.plans.reports.units import bytes_str, seconds_str
from autoparallel.plans.roles import AxisRole, products_of, roles_of
from autoparallel.schedule.multi_copy import runs_by_block
from autoparallel.schedule.step_config import BUCKET_BYTES, Hybrid, first_axis_of, ranks_told

ZERO = {1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3 (FSDP)"}
PARALLEL = {"data": "data parallel", "tensor": "tensor parallel", "context": "context parallel",
            "expert": "data and expert parallel", "replicated": "computed by every rank"}
#: The training state that no rank has whole, by ZeRO stage.
_SHARDED = {1: "optimizer states", 2: "gradients and optimizer states", 3: "parameters"}
_RECOMPUTES = {"selective": "selective recompute", "all_but_attention": "recompute of all but attention",
               "full": "full recompute"}
#: Attention on a context-parallel axis, each rank with some of its heads; products around it on a tensor-parallel axis.
HEADS = "cut by heads (as DeepSpeed-Ulysses)"
AROUND_HEADS = "context parallel, around attention by heads (as DeepSpeed-Ulysses)"
#: Modules named in a departure, at most.
MOST_NAMES = 5
#: Weights stored whole of at least this share of all elements, by module's name, are named.
FEW = 0.005
#: Axes of whose products' FLOPs a smaller share has the role say so.
MOST = 0.75
#: Letters of a module's name, at most.
LONGEST = 60
_GENERIC = re.compile(r"axis\d+|devices")


@dataclass(frozen=True)
class AxisWords:
    """A mesh axis: its ``label`` in reports (its name, or after its role), what it does in ``words``, the slowest link
    that its groups cross ("": not known), whether it cuts the vocabulary, and products of another role. ``shards``,
    ``sequence``, ``experts``, ``share``: as in `plans.roles.AxisRole`."""

    name: str
    label: str
    size: int
    role: str
    words: str
    link: str = ""
    vocabulary: bool = False
    departures: tuple[str, ...] = ()
    shards: bool = False
    sequence: bool = False
    experts: bool = False
    share: float = 1.0

    @property
    def has_strategies(self) -> bool:
        """Whether ops are cut along it: not the pipeline's, nor that of ranks by speed."""
        return self.role not in ("pipeline", "speed")


def axis_words(plan: Plan, work: Workload | None) -> tuple[AxisWords, ...]:
    """The axes of the whole mesh, the pipeline's (or that of ranks by speed) first; slowest links first."""
    roles, links = roles_of(plan), dict(work.links) if work else {}
    labels, every = _labels(roles.axes), Counter(_short(product.module or "the model") for product in products_of(plan))
    first = first_axis_of(plan.hybrid)
    found = [AxisWords(first, first, plan.hybrid.pipeline_ranks, first, _first_axis(plan), links.get(first, ""))
             ] if plan.hybrid.pipeline_ranks > 1 else []
    for number, (axis, label) in enumerate(zip(roles.axes, labels, strict=True)):
        vocabulary = _cut_by_vocabulary(plan, number)
        departures = (*_folded(axis, every, bool(vocabulary) and axis.role != "tensor", roles.zero_stage),
                      *_stored_whole(plan, axis)) if axis.size > 1 else ()    # one rank has the whole anyway
        said = "".join([_words(axis, roles.zero_stage), f"; {' and '.join(vocabulary)} by vocabulary" if vocabulary
                        else ""])
        found.append(AxisWords(axis.name, label, axis.size, axis.role, said, links.get(axis.name, ""),
                               bool(vocabulary), departures, axis.shards, axis.sequence, axis.experts, axis.share))
    return tuple(found)


def _labels(axes: Iterable[AxisRole]) -> list[str]:
    """Generic names give way to the role; of several axes with one role the outer is on the slower links."""
    axes, found = list(axes), []
    for axis in axes:
        equal = [other for other in axes if other.role == axis.role and _GENERIC.fullmatch(other.name)]
        place = equal.index(axis) if axis in equal else 0
        ends = ("-outer", "-inner") if len(equal) == 2 else tuple(f"-{n}" for n in range(len(equal)))
        label = axis.role + (ends[place] if len(equal) > 1 else "")
        taken = {other.name for other in axes}
        found.append(label if _GENERIC.fullmatch(axis.name) and label not in taken else axis.name)
    return found


def _words(axis: AxisRole, zero_stage: int) -> str:
    text = PARALLEL[axis.role]
    if axis.shards:
        text += f", {_SHARDED[zero_stage or 1]} in shards ({ZERO[zero_stage or 1]})"
    if axis.sequence:
        text += ", norms along the sequence"
    if axis.experts and axis.role != "expert":
        text += ", experts too"
    return text


def _first_axis(plan: Plan) -> str:
    h = plan.hybrid
    if h.by_rank:
        return f"data parallel by speed ({ranks_told(h.by_rank)} of {h.micro_batches} micro-batches)"
    per_rank = f", {h.stages // h.pipeline_ranks} stages a rank" if h.stages > h.pipeline_ranks else ""
    shared = f", stages on {' + '.join(map(str, h.replicas))} ranks" if h.replicas else ""
    return f"pipeline parallel ({h.pipelining.title}{per_rank}{shared})"


def _cut_by_vocabulary(plan: Plan, axis: int) -> list[str]:
    """Which of the embedding of tokens, and the classes of the loss, are cut by the vocabulary on an axis."""
    wanted = {"embedding": ("vocabulary", "embedding"), "cross_entropy_loss": ("classes", "loss")}
    return list(dict.fromkeys(
        wanted[op][1] for block in plan.blocks for name, strategy, _ in block.lines
        if (op := name.rsplit(" ", 1)[-1]) in wanted and wanted[op][0] == strategy.split("·")[axis]))


def _folded(axis: AxisRole, every: Counter[str], vocabulary: bool, zero_stage: int) -> Iterator[str]:
    """Departures by role: "q_proj, k_proj (160 ops) are data parallel with ZeRO-1". ``every``: how many products have
    each short name; departures that are not all of them are told as "(60 of 64 ops)"."""
    found: dict[str, Counter[str]] = {}
    for text in axis.departures:
        where, _, role = text.rpartition(": ")
        (path, op), role = where.rsplit(" ", 1), role.rpartition("(")[2].rstrip(")")
        by_heads = axis.role == "context" and role == "tensor" and "attention" in op
        found.setdefault(HEADS if by_heads else role, Counter())[_short(path)] += 1
    for role, counts in found.items():
        names, total = list(counts), counts.total()
        said = ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
        of = sum(every[name] for name in names)
        times = f" ({total} of {of} ops)" if total < of else f" ({total} ops)" if total > 1 else ""
        what = "in shards by vocabulary" if vocabulary and role == "tensor" and total == 1 else PARALLEL.get(role, role)
        what = AROUND_HEADS if axis.role == "tensor" and role == "context" and axis.by_heads else what
        what += f" with {ZERO[zero_stage or 1]}" if role == "data" and axis.departures_shard else ""
        yield f"{said}{times} {'are' if total > 1 else 'is'} {what}"


def _stored_whole(plan: Plan, axis: AxisRole) -> Iterator[str]:
    """Of an axis that shards parameters those that it stores whole, if they are more than a few: "weights of k_proj,
    v_proj are stored whole"."""
    found, shapes = Counter[str](), plan.model.parameters
    for name in axis.whole:
        found[_short(name.rpartition(".")[0] or name)] += math.prod(shapes[name])
    least = FEW * sum(map(math.prod, shapes.values()))
    if names := [name for name, count in found.items() if count >= least]:
        said = ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
        yield f"weights of {said} are stored whole"


def _short(name: str) -> str:
    """The last word of a module's path that is no number.

    >>> _short("model.layers.3.self_attn.q_proj"), _short("experts.3"), _short("3")
    ('q_proj', 'experts', 'module 3')
    """
    found = next((part for part in reversed(name.split(".")) if not part.isdigit()), f"module {name}")
    return found if len(found) <= LONGEST else f"{found[:LONGEST]}..."


# ------------------------------------------------------------------------------------------ the whole as a sentence


def title(plan: Plan, axes: Iterable[AxisWords]) -> str:
    """The plan in one sentence, without its end: "Data parallel 8 with ZeRO-1 over NVLink 4, 2 micro-batches"."""
    axes = [axis for axis in axes if axis.size > 1]
    parts = [*(_axes_said(plan, axes) if axes else ["one device"]), *_settings(plan)]
    text = ", ".join(parts)
    return text[:1].upper() + text[1:]


def _axes_said(plan: Plan, axes: list[AxisWords]) -> Iterator[str]:
    zero = roles_of(plan).zero_stage
    for role in ("speed", "data", "expert", "context", "tensor", "pipeline", "replicated"):
        some = [axis for axis in axes if axis.role == role]
        if not some:
            continue
        degree, mesh = _product(some), f" ({' x '.join(str(axis.size) for axis in some)})" if len(some) > 1 else ""
        if role in ("pipeline", "speed"):
            yield some[0].words.replace("parallel", f"parallel {degree}") + _over(some)
        elif role == "replicated":
            yield f"{degree} ranks{mesh} that compute the same{_over(some)}"
        else:
            least = min(axis.share for axis in some)
            what = "FLOPs" if any(block.flops for block in plan.blocks) else "products"
            part = f" for {least:.0%} of the {what}".replace("%", " %") if least < MOST else ""
            yield f"{PARALLEL[role]} {degree}{mesh}{part}{_stored(some, zero)}{_over(some)}"


def _stored(some: list[AxisWords], zero: int) -> str:
    """ZeRO, FSDP and HSDP of data and expert axes; the sequence of tensor axes."""
    sharded = [axis for axis in some if axis.shards]
    text = ""
    if sharded:
        text = f" with {ZERO[zero or 1]}"
        text += f" among {_product(sharded)} (hybrid sharded, HSDP)" if len(sharded) < len(some) else ""
    if any(axis.sequence for axis in some):
        text += " with sequence parallelism"
    if any(axis.experts and axis.role != "expert" for axis in some):
        text += ", experts too"
    return text


def _over(some: Iterable[AxisWords]) -> str:
    links = list(dict.fromkeys(axis.link for axis in some if axis.link))
    return f" over {' and '.join(links)}" if links else ""


def _product(axes: Iterable[AxisWords]) -> int:
    count = 1
    for axis in axes:
        count *= axis.size
    return count


def _how_at_a_time(h: Hybrid) -> str:
    ways = ["interleave"] * h.alternates + ["run block by block"] * runs_by_block(h)
    return " and ".join(ways)


def _settings(plan: Plan) -> Iterator[str]:
    h = plan.hybrid
    if h.micro_batches > 1:
        yield f"{h.micro_batches} micro-batches" + (
            f", of which {h.copies} at a time {_how_at_a_time(h)} (multi-copy)" if h.copies > 1 else "")
    if h.pieces > 1:
        yield f"linear layers in {h.pieces} pieces that overlap with communication"
    if not h.experts_overlap:
        yield "experts' rows sent and awaited without other work between, which would not pay"
    if h.recompute != "none":
        where = {"device": [], "host": ["saved tensors in the host's memory"], "disk": ["saved tensors on disk"]}
        how = " and ".join([*([] if h.recompute == "offload" else [_RECOMPUTES[h.recompute]]), *where[h.saved_on]])
        every = {path for block in plan.blocks for path in block.paths if path != "outside blocks"}
        some = f"{len(h.recompute_blocks)} of " if h.recompute_blocks is not None else "all "
        yield f"{how} on {some}{len(every)} blocks"
    if said := h.offload.told():
        yield said
    if h.on_host:
        cached = {one.name: one for one in h.cached}
        if there := [name for name in h.on_host if name not in cached]:
            yield f"{_tables(there)} looked up in the memory of the host"
        for rows, hits in dict.fromkeys((one.rows, one.hits) for one in h.cached):
            names = [one.name for one in h.cached if (one.rows, one.hits) == (rows, hits)]
            yield (f"{_tables(names)} in the memory of the host, {rows:,} rows cached on the devices ({hits:.0%} hits "
                   "expected)")
        if h.cached and (without_s := plan.prediction.uncached_s):
            pays = "" if without_s > plan.prediction.step_s else ", so that they do not pay"
            yield f"a step without caches predicted at {seconds_str(without_s)}{pays}"
    if h.reduce_dtype:
        yield f"gradients summed in {h.reduce_dtype}"
    yield from _bucket_settings(h)


def _bucket_settings(h: Hybrid) -> Iterator[str]:
    """Buckets of gathers and reductions, where they are not the usual ones."""
    if h.bucket_bytes != BUCKET_BYTES:
        yield f"buckets of {bytes_str(h.bucket_bytes)}"
    for axis, num_bytes in h.fusion.axis_bytes:
        yield f"buckets of {bytes_str(num_bytes)} over {axis}"
    if h.fusion.most is not None:
        yield f"buckets of {h.fusion.most} parameters at most"
    if h.fusion.names:
        yield f"one bucket for each of {', '.join(h.fusion.names)}"


def _tables(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} tables ({names[0]}, ...)"


__all__ = ["AxisWords", "axis_words", "title"]
