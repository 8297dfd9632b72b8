"""Text of a file as JSON data, and plans as a whole: what a file may say that a search never would."""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from collections import Counter
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from autoparallel.errors import PlanError, shown
from autoparallel.plans.record import check_record
from cost_models import files as cost_files
from cost_models.files import is_nested, read_regular

if TYPE_CHECKING:
    from autoparallel.plans.plan import Evidence, Plan, Prediction

#: Of a plan file, uncompressed; that of Llama-3-405B (126 layers) has 630 kB, and 43 kB compressed.
MOST_BYTES = 2**27
_GZIP = b"\x1f\x8b"
#: How deep lists and objects lie in one another in a plan, at most: prediction, collectives, one of them.
MOST_DEEP = 16
MOST_DEVICES = 2**24


def text_of(path: Any, what: str = "plan file", instead: str = "a file that plan.save or autoparallel plan --output "
            "has written") -> str:
    """The text of a regular file, also of one that gzip has compressed. Raises PlanError for anything else, without
    waiting for it, which says ``what`` was to be read, and what to give ``instead``."""
    try:
        found = read_regular(path, MOST_BYTES)
    except (OSError, TypeError, ValueError) as error:
        why = getattr(error, "strerror", error)
        raise PlanError(f"cannot read the {what} {path}: {why}; give {instead}") from error
    try:
        return unpacked(found).decode("utf-8")
    except (EOFError, OSError, ValueError, zlib.error) as error:
        if not isinstance(error, UnicodeDecodeError):
            raise PlanError(f"cannot read the {what} {path}: {error}; give {instead}") from error
        raise PlanError(f"{path} is not JSON: {error}") from error


def packed(data: bytes) -> bytes:
    """Compressed by gzip, the same for the same data; data that are so already stay as they are."""
    return data if data.startswith(_GZIP) else gzip.compress(data, mtime=0)


def unpacked(data: bytes) -> bytes:
    """The contrary of `packed`. Raises ValueError for more than `MOST_BYTES`."""
    if not data.startswith(_GZIP):
        return data
    found = gzip.GzipFile(fileobj=io.BytesIO(data)).read(MOST_BYTES + 1)
    if len(found) > MOST_BYTES:
        raise ValueError(f"uncompressed it has more than {MOST_BYTES:,} bytes")
    return found


def data_of(text: str | bytes, origin: str) -> Any:
    """JSON as Python has it. Raises PlanError for text that is none, and for an object that says a key twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
            raise PlanError(f"{origin} has the key {shown(twice)} twice in one object: leave one")
        return found

    try:
        data = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"{origin} is not JSON: {error}") from error
    if is_nested(data, MOST_DEEP):
        raise PlanError(f"{origin} is not a plan: its lists and objects lie more than {MOST_DEEP} deep")
    return data


def nearest(name: str, known: Collection[str]) -> str:
    """``'cut' (is it 'cuts'?)``: a name that is not known, with the one that is nearest, if any is near."""
    return shown(name) + cost_files.nearest(name, known)


# ---------------------------------------------------------------------------------------------------- a plan as a whole


def check_plan(plan: Plan) -> None:
    """Raises PlanError for values that no plan has: meshes that are none, names that do not go together, times and
    bytes that are no amounts."""
    axes = len(plan.mesh_shape)
    if axes != len(plan.axis_names) or min(plan.mesh_shape, default=0) < 1:
        raise PlanError(f"mesh_shape {plan.mesh_shape} and axis_names {plan.axis_names} are no mesh")
    if len(set(plan.axis_names)) < axes:
        raise PlanError(f"axis_names {plan.axis_names} has a name twice: each axis needs another")
    if (devices := math.prod(plan.mesh_shape) * plan.hybrid.pipeline_ranks) > MOST_DEVICES:
        raise PlanError(f"mesh_shape and hybrid.pipeline_ranks are {devices:.3g} devices; at most {MOST_DEVICES:,} are "
                        "possible")
    if plan.devices and sorted(plan.devices) != list(range(devices)):
        raise PlanError(f"devices are {shown(list(plan.devices))}: give each of 0-{devices - 1} once, or none")
    for name, strategy in plan.strategies.items():
        if len(strategy) != axes:
            raise PlanError(f"strategies[{name!r}] is {shown(strategy)}: give one name for each of {axes} mesh axes")
    _check_blocks(plan)
    _check_cuts(plan)
    if plan.record is not None:
        check_record(plan.record)
    for where, value in (*_amounts(plan.prediction), *_evidence(plan.evidence)):
        if not value >= 0:  # nor nan
            raise PlanError(f"{where} is {value!r}: give an amount, 0 or more")


def _check_blocks(plan: Plan) -> None:
    for number, block in enumerate(plan.blocks):
        if not block.paths:
            raise PlanError(f"blocks[{number}].paths is empty: name the blocks that it stands for")
        amounts = all(0 <= one < math.inf for one in block.flops)
        if block.flops and not (amounts and len(block.flops) == len(block.lines)):
            raise PlanError(f"blocks[{number}].flops must have an amount, 0 or more, for each of {len(block.lines)} "
                            "lines, or be empty")


def _check_cuts(plan: Plan) -> None:
    cuts, stages = plan.hybrid.cuts, plan.hybrid.stages
    if len(set(cuts)) < len(cuts) or len(cuts) not in (0, stages - 1):
        raise PlanError(f"hybrid.cuts are {len(cuts)} ops for {stages} stages: name {stages - 1}, each once")
    if unknown := [name for name in cuts if name not in plan.strategies]:
        raise PlanError(f"hybrid.cuts has {nearest(unknown[0], plan.strategies)}, of which strategies says nothing")


def _amounts(p: Prediction) -> Iterator[tuple[str, float]]:
    """Seconds, bytes and counts that are finite, by their places; nan for those that are not."""
    plain = {name: value for name, value in vars(p).items() if isinstance(value, (int, float))}
    for name, value in {**plain, "step_s": p.step_s}.items():
        low = name == "hidden_s"  # communication overlapped with compute may slow it down by more than it hides
        yield f"prediction.{name}", abs(_finite(value)) if low else _finite(value)
    for number, use in enumerate(p.collectives):
        for name in ("count", "num_bytes", "seconds"):
            yield f"prediction.collectives[{number}].{name}", _finite(getattr(use, name))


def _evidence(e: Evidence) -> Iterator[tuple[str, float]]:
    """The numbers of the evidence, by their names in a plan file; gaps and bounds that were not proven are infinite."""
    yield "evidence.objective_s", _finite(e.objective_s)
    yield "evidence.lower_bound_s", 0.0 if e.lower_bound_s == -math.inf else _finite(e.lower_bound_s)
    yield "evidence.gap", math.inf if e.gap == math.inf else _finite(e.gap)
    if e.step_bound_s is not None:
        yield "evidence.step_bound_s", math.inf if e.step_bound_s == math.inf else _finite(e.step_bound_s)
    for name, value in e.seconds.items():
        yield f"evidence.seconds[{name!r}]", _finite(value)


def _finite(value: float) -> float:
    """The number, nan where a float cannot be it."""
    return float(value) if abs(value) < 1e300 else math.nan


__all__ = ["check_plan", "data_of", "nearest", "packed", "text_of", "unpacked"]
