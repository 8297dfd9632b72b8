"""Pins: placements that the user fixes; the search decides the rest.

    pins={"*.q_proj.weight": (Replicate(), Shard(0)),       a parameter's storage, one placement per mesh axis
          "model.layers.*.mlp": {"tp": Replicate()},        a module's output, on one axis only
          "input_ids": {"dp": Shard(0)},                    an input
          "tables*": "host"}                                tables, looked up there (`strategies/host_lookups.py`);
                                                            `Cached(rows=10_000)`: with rows on the device
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from autoparallel.errors import PinError
from autoparallel.layout import Placement, from_torch
from autoparallel.schedule.table_caches import Cached
from autoparallel.strategies.host_lookups import HOST, host_patterns
from autoparallel.strategies.space import Decision, StrategySpace

Pin = Sequence[Any] | Mapping[str, Any] | Any


def apply_pins(space: StrategySpace, pins: Mapping[str, Pin], in_stages: bool = False) -> dict[int, np.ndarray]:
    """The strategy numbers that the pins allow, by decision (decisions without a pin are left out).

    Raises PinError if a pattern matches nothing, or if no strategy has the placements; the message names possible ones,
    and says, of a program ``in_stages``, which axis is the pipeline's.
    """
    allowed: dict[int, np.ndarray] = {}
    for pattern, pin in _placements(pins):
        decisions = _matches(space, pattern)
        wanted = _per_axis(space, pattern, pin, in_stages)
        for decision in decisions:
            before = allowed.get(decision.index, np.arange(len(space.strategy_sets[decision.index].strategies)))
            left = before[_holds(space, decision.index, wanted)[before]]
            if not len(left):
                raise PinError(_why_not(space, decision, pattern, wanted))
            allowed[decision.index] = left
    return allowed


def pin_strings(space: StrategySpace, pins: Mapping[str, Pin]) -> dict[str, str]:
    """Pins as text, by pattern, for the plan."""
    return {
        **{pattern: "·".join("*" if p is None else str(p) for p in _per_axis(space, pattern, pin))
           for pattern, pin in _placements(pins)},
        **{pattern: str(pins[pattern]) for pattern in host_patterns(pins)},
    }


def _placements(pins: Mapping[str, Pin]) -> Iterator[tuple[str, Pin]]:
    """Those that are placements."""
    for pattern, pin in pins.items():
        if isinstance(pin, str) and pin != HOST:
            raise PinError(f"pin {pattern!r} is {pin!r}: give a placement for each mesh axis, or {HOST!r} for a table "
                           "that is looked up in the memory of the host")
        if not isinstance(pin, (str, Cached)):
            yield pattern, pin


def _per_axis(space: StrategySpace, pattern: str, pin: Pin, in_stages: bool = False) -> list[Placement | None]:
    names = space.axis_names
    if isinstance(pin, Mapping):
        unknown = [axis for axis in pin if axis not in names]
        if unknown:
            raise PinError(f"pin {pattern!r} names mesh axes {unknown}; {_axes(space, in_stages)}")
        given = [pin.get(axis) for axis in names]
    else:
        given = list(pin) if isinstance(pin, (tuple, list)) else [pin]
        if len(given) != len(names):
            raise PinError(f"pin {pattern!r} gives {len(given)} placements; {_axes(space, in_stages)}")
    try:
        return [None if p is None else from_torch((p,))[0] for p in given]
    except (ValueError, AttributeError) as error:
        raise PinError(f"pin {pattern!r}: {error}") from None


def _axes(space: StrategySpace, in_stages: bool) -> str:
    """The axes that a pin may name, and how, in words."""
    if in_stages and math.prod(space.mesh_shape) == 1:
        return "the pipeline has all ranks of the mesh, so that no stage is cut: leave the pin out"
    names = list(space.axis_names)
    which = "beside the first, which is the pipeline's, the mesh has" if in_stages else "the mesh has"
    return f"{which} {len(names)} axes {names}: write one per axis, or a dict by axis name"


def _matches(space: StrategySpace, pattern: str) -> list[Decision]:
    graph = space.graph
    pattern = graph.aliases.get(pattern, pattern)
    placeholders = [s for s in space.decisions if s.kind in ("parameter", "input") and fnmatchcase(s.name, pattern)]
    if placeholders:
        return placeholders
    paths = {parent for node in graph.of_kind("op") for parent in _parents(node.module_path)}
    found = []
    for path in sorted(p for p in paths if fnmatchcase(p, pattern)):
        last = max(n.index for n in graph.of_kind("op") if (n.module_path + ".").startswith(path + "."))
        found.append(space.decisions[space.decision_named[graph.nodes[last].name]])
    if not found:
        names = [s.name for s in space.decisions if s.kind in ("parameter", "input")] + sorted(paths)
        close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5) or names[:3]
        raise PinError(f"pin {pattern!r} names no parameter, input or module; did you mean {close}?")
    return found


def _parents(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _holds(space: StrategySpace, index: int, wanted: Sequence[Placement | None]) -> np.ndarray:
    strategy_set = space.strategy_sets[index]

    def fits(p: Placement, w: Placement | None) -> bool:
        return w is None or p == w or (w.kind == "I" and p.kind == "R")

    return np.array([
        all(fits(p, w) for p, w in zip(strategy_set.output_layout(strategy), wanted, strict=True))
        for strategy in strategy_set.strategies
    ])


def _why_not(space: StrategySpace, decision: Decision, pattern: str, wanted: Sequence[Placement | None]) -> str:
    strategy_set = space.strategy_sets[decision.index]
    meta = strategy_set.output_metas[0]
    text = ", ".join("None" if w is None else _written(w) for w in wanted)
    for w in wanted:
        if w is not None and w.is_shard and w.dim >= len(meta.shape):
            return f"pin {pattern!r}: {decision.name} is {meta} and has no dim {w.dim} to shard"
        if w is not None and w.is_shard and w.dim < 0:
            front = f"write Shard({w.dim + len(meta.shape)})" if w.dim + len(meta.shape) >= 0 else "there are fewer"
            return f"pin {pattern!r}: {decision.name} is {meta}; dims count from the front, not as {w.dim}: {front}"
    can = ", ".join(
        sorted({_written(p) for strategy in strategy_set.strategies for p in strategy_set.output_layout(strategy)})
    )
    return (f"pin {pattern!r}: {decision.name} ({meta}) cannot be ({text}) on a mesh of {space.mesh_shape}; "
            f"on one axis it can be {can} (a dim must leave every rank at least one element)")


def _written(placement: Placement) -> str:
    """The placement in torch's notation."""
    if placement.is_interleaved:
        return f"_StridedShard({placement.dim}, split_factor={placement.parts})"
    return {"S": f"Shard({placement.dim})", "P": "Partial()"}.get(placement.kind, "Replicate()")
