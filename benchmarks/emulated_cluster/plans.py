"""The plans that are measured: found by search, classical, and hybrid ones as people make them by hand."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import autoparallel
from autoparallel import Cluster, Plan
from autoparallel.errors import AutoparallelError
from autoparallel.planning.meshes import mesh_shapes
from benchmarks.emulated_cluster.subjects import Subject, captured_once

SEARCH, JOINT = "search", "joint search"


@dataclass(frozen=True)
class Spec:
    """A plan to be made: a name, the options of `autoparallel.plan`, and what kind it is: search, joint, plain
    (one micro-batch), hybrid, or equal (of a cluster without its slow hosts and links)."""

    name: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Made:
    """A plan, and the names of the specs that it came out of (several may be the same plan)."""

    specs: tuple[Spec, ...]
    plan: Plan

    @property
    def name(self) -> str:
        return ", ".join(spec.name for spec in self.specs)

    def has(self, *kinds: str) -> bool:
        return any(spec.kind in kinds for spec in self.specs)


def plain(num_ranks: int) -> Iterator[Spec]:
    """What the search makes of each mesh, and the classical plans."""
    shapes = mesh_shapes(num_ranks)
    for shape in shapes:
        yield Spec(f"search {_text(shape)}", "plain", {"mesh_shape": shape})
    for name in ("ddp", "fsdp"):
        yield Spec(f"{name} {_text(shapes[0])}", "plain", {"mesh_shape": shapes[0], "baseline": name})
    for shape in shapes:
        for name in ("tensor_parallel", "sequence_parallel"):
            yield Spec(f"{name} {_text(shape)}", "plain", {"mesh_shape": shape, "baseline": name})


def hybrid(num_ranks: int) -> Iterator[Spec]:
    """Pipelines, data and tensor parallelism, ZeRO and recomputation in usual mixtures, the most different first."""
    half, quarter = num_ranks // 2, num_ranks // 4
    yield _piped(2, (half,), 4, "ddp", "1f1b")
    yield _zero(num_ranks, 2, 2)
    yield _piped(2, (half,), 4, "tensor_parallel", "1f1b")
    if quarter > 1:
        yield _piped(2, (quarter, 2), 4, "tensor_parallel", "1f1b")
        yield _piped(4, (quarter,), 8, "ddp", "1f1b")
        yield _piped(4, (quarter,), 4, "tensor_parallel", "1f1b")
    yield _piped(2, (half,), 4, "fsdp", "1f1b", zero_stage=1)
    yield _piped(2, (half,), 4, "ddp", "1f1b", recompute="full")
    yield _zero(num_ranks, 2, 1, recompute="full")
    yield _piped(2, (half,), 4, "ddp", "gpipe")
    yield _piped(2, (half,), 4, "ddp", "interleaved", pipeline_stages=4)
    yield _piped(2, (half,), 4, "tensor_parallel", "zero_bubble")
    yield _piped(2, (half,), 8, "tensor_parallel", "1f1b")
    yield _zero(num_ranks, 2, 3)
    if quarter > 1:
        yield _piped(4, (quarter,), 4, "ddp", "gpipe")
        yield _piped(4, (quarter,), 8, "tensor_parallel", "1f1b")
        yield _piped(4, (quarter,), 4, "fsdp", "1f1b", zero_stage=2)
    yield _zero(num_ranks, 2, 1)
    yield _piped(2, (half,), 4, "tensor_parallel", "gpipe", recompute="full")
    yield _piped(num_ranks, (1,), 8, "ddp", "1f1b")


def multi_copy(num_ranks: int) -> Iterator[Spec]:
    """ZeRO-3 and tensor-parallel plans with micro-batches one after the other, and several at a time (multi-copy)."""
    for copies, again in itertools.product((1, 4), ({}, {"recompute": "full"})):
        yield _zero(num_ranks, 4, 3, copies=copies, **again)
    shapes = [(num_ranks,), *([(num_ranks // 2, 2)] if num_ranks > 2 else [])]
    for shape, name in itertools.product(shapes, ("tensor_parallel", "sequence_parallel")):
        for count, copies in ((1, 1), (2, 1), (2, 2)):
            options = {"mesh_shape": shape, "micro_batches": count, "copies": copies, "baseline": name, "zero_stage": 0}
            yield Spec(f"{name} {_text(shape)}, {count} micro-batches, {copies} copies", "hybrid", options)


def piped_copies(num_ranks: int) -> Iterator[Spec]:
    """Pipelines of two tensor-parallel stages, which run their micro-batches one after the other, and in pairs."""
    for again, copies in itertools.product(({}, {"recompute": "full"}), (1, 2)):
        yield _piped(2, (num_ranks // 2,), 8, "tensor_parallel", "1f1b", copies=copies, **again)


def _zero(num_ranks: int, micro_batches: int, stage: int, **more: Any) -> Spec:
    options = {"mesh_shape": (num_ranks,), "micro_batches": micro_batches, "zero_stage": stage, "baseline": "fsdp",
               **more}
    return Spec(f"zero {stage} {num_ranks}, {micro_batches} micro-batches{_copies(more)}{_recomputed(more)}",
                "hybrid", options)


def _copies(more: Mapping[str, Any]) -> str:
    return f", {more['copies']} copies" if "copies" in more else ""


def _recomputed(more: Mapping[str, Any]) -> str:
    return ", recompute" if "recompute" in more else ""


def _piped(pipeline: int, stage: tuple[int, ...], micro_batches: int, name: str, schedule: str, **more: Any) -> Spec:
    options = {"mesh_shape": (pipeline, *stage), "pipeline_stages": pipeline, "micro_batches": micro_batches,
               "schedule": schedule, "zero_stage": 0, "baseline": name, **more}
    extra = (f" zero {more['zero_stage']}" if "zero_stage" in more else "") + _copies(more) + _recomputed(more)
    return Spec(f"pipeline {pipeline} x {name} {_text(stage)}, {micro_batches} micro-batches, {schedule}{extra}",
                "hybrid", options)


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def specs(num_ranks: int, most: int | None = None, only_hybrid: bool = False, only_copies: bool = False) -> list[Spec]:
    """The searches, then plain and hybrid plans in turn, at most so many of these together. ``only_hybrid``: those
    and the joint search; ``only_copies``: `multi_copy`, of both `piped_copies`, and the joint search."""
    joint = Spec(JOINT, "joint", {"joint": True})
    if only_copies:
        return [joint, *list((piped_copies if only_hybrid else multi_copy)(num_ranks))[:most]]
    if only_hybrid:
        return [joint, *list(hybrid(num_ranks))[:most]]
    sides = [list(plain(num_ranks)), list(hybrid(num_ranks))]
    mixed = [side[i] for i in range(max(map(len, sides))) for side in sides if i < len(side)]
    return [Spec(SEARCH, "search"), joint, *mixed[:most]]


def equal(wanted: list[Spec]) -> list[Spec]:
    """The same plans, made for equal machines."""
    return [Spec(f"equal: {spec.name}", "equal", spec.options) for spec in wanted]


def make(subject: Subject, cluster: Cluster, wanted: list[Spec]) -> tuple[list[Made], list[str]]:
    """The distinct plans, and what could not be made with the reason."""
    found: dict[str, Made] = {}
    refused = []
    plain = replace(cluster, slow=())
    for spec in wanted:
        try:
            with captured_once(subject):
                on = plain if spec.kind == "equal" else cluster
                plan = autoparallel.plan(subject.build(), on, example_kwargs=dict(subject.batch()), **spec.options)
        except AutoparallelError as error:
            refused.append(f"{spec.name}: {error}")
            continue
        key = _decisions(plan)
        found[key] = Made((*found[key].specs, spec), found[key].plan) if key in found else Made((spec,), plan)
    return list(found.values()), refused


def _decisions(plan: Plan) -> str:
    """What a plan decides, without what explains it."""
    data = json.loads(plan.to_json())
    return json.dumps([data.get(key) for key in ("mesh_shape", "strategies", "direct", "hybrid", "devices")])
