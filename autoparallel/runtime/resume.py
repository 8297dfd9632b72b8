"""What a run needs to go on beside parameters and the optimizer's state: the seed and count of calls, for dropout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autoparallel.errors import InputError, shown
from autoparallel.runtime.inputs import all_have

if TYPE_CHECKING:
    from autoparallel.runtime.state import State

_VERSION = 1


def run_state(state: State) -> dict[str, int]:
    """The seed that random ops draw from, and how many calls have drawn."""
    return {"version": _VERSION, "seed": state.seed, "calls": state.calls}


def load_run_state(state: State, given: Any) -> None:
    """Go on after so many calls from this seed.

    Raises InputError for what is no such state, and on all ranks where they have different ones.
    """
    check_state("the run's state", given, _VERSION, ("seed", "calls"))
    start(state, given["seed"], given["calls"])


def start(state: State, seed: Any, calls: int) -> None:
    """Let random ops draw from the seed, as after so many calls. All ranks call this."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InputError(f"seed is {shown(seed)}: give a whole number, the same on all ranks")
    state.together.check()
    if (found := all_have(f"seed {seed} after {calls} calls", state.device)) is not None:
        raise InputError(f"random ops need one seed on all ranks: {found}\n  Give all the same (not seed + rank): "
                         "ranks draw different numbers for different samples by themselves.")
    state.seed, state.calls = seed, calls


def check_state(what: str, state: Any, version: int, counts: Sequence[str], flags: Sequence[str] = ()) -> None:
    """Raises InputError for what is no such state, or of another version."""
    if not isinstance(state, Mapping) or state.get("version") != version:
        given = f"has version {shown(state.get('version'))}" if isinstance(state, Mapping) else f"is {shown(state)}"
        raise InputError(f"{what} {given}: give what was saved by version {version} of it")
    for name in (*counts, *flags):
        value = state.get(name)
        if not isinstance(value, int) or isinstance(value, bool) != (name in flags) or (name != "seed" and value < 0):
            raise InputError(f"{what} has {name} {shown(value)}: give what was saved, unchanged")
