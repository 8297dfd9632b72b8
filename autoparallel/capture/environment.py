"""Which variables of the process's environment a user's functions read while they are traced."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from autoparallel.capture.contents import is_users
from autoparallel.capture.variables import ENVIRONMENT, Variable

_CLASS: Any = type(os.environ)
_ITEM, _KEYS, _SIZE = _CLASS.__getitem__, _CLASS.__iter__, _CLASS.__len__


def install(reads: Callable[[Variable], None]) -> None:
    """Tell of each variable that is read from now on, in any thread; of all (`ENVIRONMENT`) where all are listed."""

    def item(environment: Any, key: Any) -> Any:
        tell(Variable(key, environment))
        return _ITEM(environment, key)

    def keys(environment: Any) -> Iterator[Any]:
        tell(ENVIRONMENT)
        return _KEYS(environment)

    def size(environment: Any) -> int:
        tell(ENVIRONMENT)
        return _SIZE(environment)

    def tell(variable: Variable) -> None:
        if _is_read_by_user():
            reads(variable)

    _CLASS.__getitem__, _CLASS.__iter__, _CLASS.__len__ = item, keys, size


def remove() -> None:
    _CLASS.__getitem__, _CLASS.__iter__, _CLASS.__len__ = _ITEM, _KEYS, _SIZE


def _is_read_by_user() -> bool:
    """Whether a user's function asks the environment, and not a module that is being imported: it does so once."""
    names = _callers(sys._getframe(3))
    asking = next((name for name in names if name not in ("os", "collections.abc")), "")
    return is_users({"__name__": asking}) and next((
        name for name in names if name.startswith(("importlib.", "autoparallel."))), "").startswith("autoparallel.")


def _callers(frame: FrameType | None) -> Iterator[str]:
    """Modules of the functions that run, the innermost first."""
    while frame is not None:
        yield str(frame.f_globals.get("__name__"))
        frame = frame.f_back
