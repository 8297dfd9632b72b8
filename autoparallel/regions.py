"""`autoparallel.study`: which kind of plan is the fastest, by sequence length, global batch and number of devices.

At each point the usual plans by hand (`planning.usual.recipes`) and those with context parallelism are priced, and the
joint search is asked too, if wanted. A plan's kind is its set of traits, by `plans.roles`; a trait that the fastest
plans have on one side of a boundary is told in words, with the gain over the fastest plan without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from torch import nn

from autoparallel.api import plan
from autoparallel.capture import OpGraph, capture
from autoparallel.errors import InfeasibleError, InputError, PlanError, SearchError, shown
from autoparallel.partition import Splits
from autoparallel.planning.options import MODEL_AND_CALL, Options
from autoparallel.planning.usual import EXPERTS, recipes, usual_plans
from autoparallel.plans import Plan
from autoparallel.plans.reports.units import bytes_str
from autoparallel.plans.roles import roles_of
from cost_models import Cluster

#: Degrees of context parallelism that are priced at a point, the smallest that the batch allows first.
MOST_CONTEXT = 3
#: A gain below this is no reason to tell.
LEAST_GAIN = 0.005
#: What a point is of, from the innermost loop outwards.
AXES = ("sequence", "batch", "devices")
DATA = "data parallel"


@dataclass(frozen=True)
class Found:
    """The fastest plan of one kind that fits at a point. ``traits``: in words; ``text``: by hand, or "search"."""

    traits: tuple[str, ...]
    text: str
    step_s: float
    peak_bytes: float

    @property
    def kind(self) -> str:
        return ", ".join(self.traits)


@dataclass(frozen=True)
class Point:
    """A combination of ``sequence`` (tokens), global ``batch`` (sequences) and ``devices``, and the fastest plan of
    each kind that fits there, fastest first; ``priced`` plans in all. ``refused``: why there is none."""

    sequence: int
    batch: int
    devices: int
    found: tuple[Found, ...] = ()
    priced: int = 0
    refused: str = ""

    @property
    def best(self) -> Found | None:
        return next(iter(self.found), None)

    def fastest(self, trait: str, has: bool) -> float:
        """Seconds of the fastest plan with, or without, a trait; inf if none fits."""
        return next((one.step_s for one in self.found if (trait in one.traits) == has), math.inf)


@dataclass(frozen=True)
class Regions:
    """The points of a study on one cluster, ordered by devices, batch and sequence."""

    cluster: str
    points: tuple[Point, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that are the fastest somewhere, most points first."""
        count = dict[str, int]()
        for best in (point.best for point in self.points):
            if best is not None:
                count[best.kind] = count.get(best.kind, 0) + 1
        return tuple(sorted(count, key=lambda kind: (-count[kind], kind)))

    @property
    def told(self) -> tuple[str, ...]:
        """Where a trait of plans begins or ceases to pay, a sentence each."""
        traits = dict.fromkeys(trait for point in self.points if point.best for trait in point.best.traits)
        rules = dict[tuple[str, str], list[tuple[str, float]]]()
        for axis in AXES:
            for trait in traits:
                for rule, where, gain in _rules(self.points, axis, trait):
                    rules.setdefault((trait, rule), []).append((where, gain))
        return tuple(_sentence(trait, rule, found) for (trait, rule), found in rules.items())


# ---------------------------------------------------------------------------------------------------------- the sweep


def study(
    model: Callable[[int, int], tuple[nn.Module, Sequence[Any], Mapping[str, Any]]],
    cluster: str | Path = "h100-sxm",
    *,
    sequences: Sequence[int],
    batches: Sequence[int],
    devices: Sequence[int],
    refine: int = 1,
    joint: bool = False,
    time_limit_s: float = 10.0,
    software: str | None = None,
    optimizer: str = "adamw",
    told: Callable[[Point], None] = lambda point: None,
) -> Regions:
    """Which kind of plan is the fastest at each sequence length, global batch and number of devices.

    model: from (global batch, sequence length), (model, example inputs, example keyword inputs).
    cluster: a known name or a TOML file. sequences: tokens. batches: sequences of a step. devices: of the cluster.
    refine: how often the interval between two lengths whose fastest plans are of different kinds is halved.
    joint: ask the joint search, too, for ``time_limit_s`` at each point.
    software: whose speed counts, by a name of `cost_models.profile.SOFTWARE`. optimizer: whose state is counted.
    told: called with each point when it is planned.

    Points whose model raises InputError, as of more tokens than it has positions, have no plan; if no point has one,
    that is raised. Raises PlanError for axes that are not whole numbers above 0.
    """
    axes = [_numbers(name, values) for name, values in (("sequences", sequences), ("batches", batches),
                                                        ("devices", devices))]
    if isinstance(refine, bool) or not isinstance(refine, int) or not 0 <= refine <= 8:
        raise PlanError(f"refine is {shown(refine)}: give a whole number from 0 to 8")
    if not callable(model) or isinstance(model, type | nn.Module):
        raise PlanError(f"model is {shown(model)}: give a function of (global batch, sequence length), which returns "
                        f"{MODEL_AND_CALL}")
    machines = {count: Cluster.load(cluster, count, software) for count in axes[2]}
    options = Options(optimizer=optimizer)
    found, refusals = list[Point](), list[InputError]()

    def at(batch: int, sequence: int, counts: Iterable[int]) -> list[Point]:
        try:
            made = model(batch, sequence)
        except InputError as error:
            refusals.append(error)
            for point in (left := [Point(sequence, batch, count, refused=str(error)) for count in counts]):
                told(point)
            return left
        if not isinstance(made, tuple) or len(made) != 3:
            raise PlanError(f"the model of a batch of {batch} and {sequence} tokens is {shown(made)}: return "
                             f"{MODEL_AND_CALL}")
        network, args, kwargs = made
        split, points = Splits(capture(network, args, kwargs)), []
        for count in counts:
            plans, refused = _priced(split, machines[count], options, batch)
            if joint:
                plans += _searched(network, args, kwargs, machines[count], optimizer, time_limit_s)
            points.append(Point(sequence, batch, count, _best_of_kinds(plans, machines[count]), len(plans),
                                "" if plans else refused))
            told(points[-1])
        return points

    for batch in axes[1]:
        here = [point for sequence in axes[0] for point in at(batch, sequence, axes[2])]
        for _ in range(refine):
            here += [point for sequence, counts in _between(here).items() for point in at(batch, sequence, counts)]
        found += here
    if refusals and not any(point.found for point in found):
        raise refusals[0]
    return Regions(next(iter(machines.values())).name,
                   tuple(sorted(found, key=lambda one: (one.devices, one.batch, one.sequence))))


def _between(points: Sequence[Point]) -> dict[int, list[int]]:
    """Lengths halfway between neighbours whose fastest plans are of different kinds, and the devices for which."""
    found = dict[int, list[int]]()
    for devices, line in _lines(points, "sequence"):
        for one, other in pairwise(line):
            middle = (one.sequence + other.sequence) // 2
            if one.sequence < middle < other.sequence and _kind(one) != _kind(other):
                found.setdefault(middle, []).append(devices.devices)
    return found


def _priced(split: Splits, cluster: Cluster, options: Options, batch: int) -> tuple[list[tuple[str, Plan]], str]:
    """The usual plans, and those with context parallelism, that fit; and why the last of the others does not."""
    texts = dict.fromkeys(text.replace("recompute=auto", "recompute=full")
                          for text in (*_usual(split.graph, cluster), *context_recipes(cluster, batch)))
    found = usual_plans(split, cluster, options, texts=texts)
    large = [f"{text} needs {bytes_str(made.prediction.peak_bytes)} a device" for text, made in found.priced.items()
             if made.prediction.peak_bytes > found.limit_bytes]
    left_out = [f"{one.by_hand}: {one.why}" for one in found.left_out]
    return list(found.fitting), (large or left_out or ["no plan is known for it"])[-1]


def _usual(graph: OpGraph, cluster: Cluster) -> Iterator[str]:
    experts = any(EXPERTS in node.op_name for node in graph.of_kind("op"))
    yield from recipes(cluster.num_devices, cluster.devices_per_host, experts)
    for zero in (1, 3):
        yield f"dp={cluster.num_devices},zero={zero},recompute=full"


def context_recipes(cluster: Cluster, batch: int) -> Iterator[str]:
    """FSDP with context parallelism by the smallest degrees by which the batch is divided; by the smallest also with
    tensor parallelism inside the host. Where ranks have several sequences, also one at a time.

    >>> list(context_recipes(Cluster.load("h100-sxm", 16), 4))[:3]
    ['cp=4,zero=3', 'cp=4,zero=3,recompute=full', 'cp=8,zero=3']
    """
    devices, inner = cluster.num_devices, min(cluster.num_devices, cluster.devices_per_host)
    for tensor in (1, inner):
        ranks = devices // tensor
        degrees = [cp for cp in range(2, ranks + 1) if ranks % cp == 0 and batch % (ranks // cp) == 0]
        for cp in degrees[:MOST_CONTEXT if tensor == 1 else 1] if devices % tensor == 0 else ():
            by = f"tp={tensor},sequence_parallel," if tensor > 1 else ""
            at_once = ("", ",micro_batch=1") if batch > ranks // cp else ("",)
            yield from (f"{by}cp={cp},zero=3{size}{more}" for size in at_once for more in ("", ",recompute=full"))


def _searched(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], cluster: Cluster, optimizer: str,
              time_limit_s: float) -> list[tuple[str, Plan]]:
    """The joint search's plan, if there is one."""
    try:
        made = plan(model, cluster, example_inputs=args, example_kwargs=kwargs, joint=True, optimizer=optimizer,
                    time_limit_s=time_limit_s)
    except (InfeasibleError, SearchError):
        return []
    return [("search", made)]


def _best_of_kinds(plans: Sequence[tuple[str, Plan]], cluster: Cluster) -> tuple[Found, ...]:
    """The fastest of each kind, fastest first."""
    found = dict[tuple[str, ...], Found]()
    for text, made in sorted(plans, key=lambda item: item[1].prediction.step_s):
        traits = traits_of(made, cluster)
        found.setdefault(traits, Found(traits, text, made.prediction.step_s, made.prediction.peak_bytes))
    return tuple(found.values())


def traits_of(made: Plan, cluster: Cluster) -> tuple[str, ...]:
    """A plan in words that are the same for plans of other degrees: what it cuts besides the batch, whether inside
    hosts or over them, and how it stores parameters."""
    roles, found, inside = roles_of(made), list[str](), 1
    if roles.pipeline_ranks > 1:
        found.append("pipeline")
    for axis in reversed(roles.axes):
        span, inside = inside * axis.size, inside * axis.size
        place = "over hosts" if span > cluster.devices_per_host else "inside hosts"
        if axis.size > 1 and axis.role in ("tensor", "context", "expert"):
            found.append(f"{axis.role} parallel {place}")
    if roles.data > 1 or roles.zero_stage:
        found.append("FSDP" if roles.zero_stage == 3 else f"ZeRO-{roles.zero_stage}" if roles.zero_stage else DATA)
    return tuple(dict.fromkeys(found)) or ("one device",)


# ----------------------------------------------------------------------------------------------------------- in words


def _lines(points: Sequence[Point], axis: str) -> Iterator[tuple[Point, list[Point]]]:
    """Points that differ along one axis only, with the first of them."""
    others = [name for name in AXES if name != axis]

    def fixed(point: Point) -> tuple[int, ...]:
        return tuple(getattr(point, name) for name in others)

    for _, some in groupby(sorted(points, key=lambda one: (fixed(one), getattr(one, axis))), fixed):
        line = list(some)
        yield line[0], line


def _rules(points: Sequence[Point], axis: str, trait: str) -> Iterator[tuple[str, str, float]]:
    """(rule, where it holds, gain) of a trait that begins or ceases to be the fastest plans' along an axis, once."""
    for first, line in _lines(points, axis):
        some = [point for point in line if point.best is not None]
        has = [trait in point.best.traits for point in some if point.best is not None]
        changes = [place for place, (one, other) in enumerate(pairwise(has)) if one != other]
        if len(changes) != 1:
            continue
        place = changes[0]
        inside = some[place + 1:] if has[-1] else some[:place + 1]
        gains = [point.fastest(trait, False) / point.fastest(trait, True) - 1 for point in inside]
        if max(gains) < LEAST_GAIN:
            continue
        before, after = (quantity(axis, getattr(some[at], axis)) for at in (place, place + 1))
        rule = f"pays beyond {before} (from {after} on)" if has[-1] else f"pays up to {before} (not from {after} on)"
        yield rule, " and ".join(quantity(name, getattr(first, name)) for name in reversed(AXES) if name != axis), \
            max(gains)


def _sentence(trait: str, rule: str, found: Sequence[tuple[str, float]]) -> str:
    most = max(gain for _, gain in found)
    gain = "nothing else fits" if math.isinf(most) else f"up to {most:.0%} faster than the best plan without"
    places = "; ".join(dict.fromkeys(where for where, _ in found))
    return f"{trait[0].upper()}{trait[1:]} {rule}: {gain} ({places})."


def quantity(axis: str, value: int) -> str:
    """
    >>> quantity("sequence", 98304), quantity("batch", 16), quantity("devices", 64)
    ('96k tokens', 'a batch of 16', '64 devices')
    """
    if axis == "batch":
        return f"a batch of {value:,}"
    if axis == "devices":
        return f"{value:,} devices"
    return f"{value // 1024:,}k tokens" if value % 1024 == 0 else f"{value:,} tokens"


def _kind(point: Point) -> str:
    return "" if point.best is None else point.best.kind


def _numbers(name: str, values: Any) -> list[int]:
    if isinstance(values, str) or not isinstance(values, Sequence) or not values or not all(
            isinstance(one, int) and not isinstance(one, bool) and one > 0 for one in values):
        raise PlanError(f"{name} is {shown(values)}: give whole numbers above 0, as [4096, 32768]")
    return sorted(set(values))


__all__ = ["Found", "Point", "Regions", "context_recipes", "quantity", "study", "traits_of"]
