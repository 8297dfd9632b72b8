"""The run's state beside parameters and optimizer: seed and call count of random ops (dropout)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autoparallel.errors import InputError, shown
from autoparallel.runtime.inputs import all_have

if TYPE_CHECKING:
    from autoparallel.runtime.state import State

_VERSION = 1


def run_state(state: State) -> dict[str, int]:
    """Seed of the random ops and number of calls that have drawn from it."""
    return {"version": _VERSION, "seed": state.seed, "calls": state.calls}


def load_run_state(state: State, given: Any) -> None:
    """Resume from a `run_state`. Raises InputError for an invalid one, and on all ranks if theirs differ."""
    check_state("the run's state", given, _VERSION, ("seed", "calls"))
    start(state, given["seed"], given["calls"])


def start(state: State, seed: Any, calls: int) -> None:
    """Let random ops draw from ``seed`` as after ``calls`` calls. All ranks call this; InputError if they differ."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InputError(f"seed is {shown(seed)}: give a whole number, the same on all ranks")
    state.together.check()
    state.together.agree("manual_seed or load_run_state")
    if (found := all_have(f"seed {seed} after {calls} calls", state.device)) is not None:
        raise InputError(f"random ops need one seed on all ranks: {found}\n  Give all the same (not seed + rank): "
                         "ranks draw different numbers for different samples by themselves.")
    state.seed, state.calls = seed, calls


def check_state(what: str, state: Any, version: int, counts: Sequence[str], flags: Sequence[str] = ()) -> None:
    """Raises InputError if ``state`` is no mapping of this version with integers ``counts`` and booleans ``flags``."""
    if not isinstance(state, Mapping) or state.get("version") != version:
        given = f"has version {shown(state.get('version'))}" if isinstance(state, Mapping) else f"is {shown(state)}"
        raise InputError(f"{what} {given}: give what was saved by version {version} of it")
    for name in (*counts, *flags):
        value = state.get(name)
        if not isinstance(value, int) or isinstance(value, bool) != (name in flags) or (name != "seed" and value < 0):
            raise InputError(f"{what} has {name} {shown(value)}: give what was saved, unchanged")
