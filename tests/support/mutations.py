"""Valid data with some of its values replaced, dropped, moved, scaled or renamed: for fuzzing what reads files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-3, 3) | st.floats() | st.text(max_size=6)
    | st.sampled_from([10**30, 10**400, "1f1b", "interleaved", "full", "S(0)", "axis0", "unlimited", "\x1b[31m"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=5)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (object or list, key or index) in it."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


def mutate(draw: Callable[..., Any], valid: Any) -> Any:
    """A copy with one to three changes."""
    made = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        known = places(made)
        if not known:
            break
        place, key = known[draw(st.integers(0, len(known) - 1))]
        kind = draw(st.sampled_from(["replace", "scale", "drop", "take", "rename"]))
        if kind == "drop":
            del place[key]
        elif kind == "take":
            other, from_key = known[draw(st.integers(0, len(known) - 1))]
            place[key] = copy.deepcopy(other[from_key])
        elif kind == "rename" and isinstance(place, dict):
            place[f"{key}{draw(st.text(max_size=2))}"] = place.pop(key)
        elif kind == "scale" and isinstance(place[key], (int, float)):
            place[key] *= draw(st.sampled_from([-1, 0, 2, 10**9, 1e300]))
        else:
            place[key] = draw(VALUES)
    return made


def spoil(draw: Callable[..., Any], text: str) -> str:
    """One in five texts with a part cut out and some letters put in."""
    if draw(st.integers(0, 4)):
        return text
    at = draw(st.integers(0, len(text)))
    return text[:at] + draw(st.text(max_size=3)) + text[at + draw(st.integers(0, 20)):]
