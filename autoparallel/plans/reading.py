"""JSON values -> dataclasses by their declared types. Errors name the field that does not fit."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from autoparallel.errors import PlanError, shown
from autoparallel.plans.files import nearest


def read(kind: Any, value: Any, where: str = "") -> Any:
    """``value``, parsed from JSON, as a ``kind``: a dataclass, tuple, mapping, union with None, or plain type.
    ``where``: the field's path in errors. Raises PlanError."""
    origin, parts, is_ours = get_origin(kind), get_args(kind), is_dataclass(kind)
    if is_ours and isinstance(value, dict):
        value = kind.upgraded(value) if hasattr(kind, "upgraded") else value
        hints = _hints(kind)
        if unknown := [name for name in value if name not in hints]:
            raise PlanError(f"{where or 'the plan'} has a key {nearest(unknown[0], hints)} that is not known; there "
                            f"are {list(hints)}")
        if missing := [f.name for f in fields(kind) if f.name not in value and _is_needed(f)]:
            raise PlanError(f"{where or 'the plan'} has {list(value)[:20]}: {missing} are missing")
        return kind(**{name: read(hints[name], given, f"{where}.{name}".lstrip(".")) for name, given in value.items()})
    if origin is types.UnionType and not (value is None and type(None) in parts):
        return read(next(part for part in parts if part is not type(None)), value, where)
    if origin is tuple and isinstance(value, list) and (parts[-1] is ... or len(value) == len(parts)):
        each = [parts[0]] * len(value) if parts[-1] is ... else parts
        pairs = zip(each, value, strict=True)
        return tuple(read(part, given, f"{where}[{i}]") for i, (part, given) in enumerate(pairs))
    if origin is Mapping and isinstance(value, dict):
        return {name: read(parts[1], given, f"{where}[{name!r}]") for name, given in value.items()}
    if origin is types.UnionType or type(value) is kind or (kind is float and type(value) is int):
        return value
    raise PlanError(f"{where or 'the plan'} is {shown(value)}, not {getattr(kind, '__name__', kind)}")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Types of the fields that are stored in JSON: those that count in comparison."""
    found = get_type_hints(kind, localns={"Study": object})
    return {f.name: found[f.name] for f in fields(kind) if f.compare}


def _is_needed(field: Any) -> bool:
    return field.compare and field.default is MISSING and field.default_factory is MISSING
