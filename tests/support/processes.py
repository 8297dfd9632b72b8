"""Processes that a test starts, noted; the default tier starts none."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.process import BaseProcess
from typing import Any
from unittest.mock import patch

#: The process in which HiGHS runs, which is part of planning, the first question of Python's module `platform`, and the
#: list of fonts that matplotlib makes once on a machine.
ALLOWED = ("highs_worker.py", "['uname', '-p']", "'fc-list'")


@contextmanager
def started() -> Iterator[list[str]]:
    """Commands and names of processes that this one starts meanwhile, by subprocess, multiprocessing or fork, those
    ALLOWED excepted. They run as ever."""
    found = list[str]()

    def noting(call: Callable[..., Any], text: Callable[..., str]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            told = text(*args, **kwargs)
            if not any(allowed in told for allowed in ALLOWED):
                found.append(told)
            return call(*args, **kwargs)

        return noted

    with ExitStack() as patches:
        for owner, name, text in (
            (subprocess.Popen, "__init__", lambda popen, args, *_, **__: str(args)),
            (BaseProcess, "start", lambda process: process.name),
            (os, "fork", lambda: "os.fork()"),
        ):
            patches.enter_context(patch.object(owner, name, noting(getattr(owner, name), text)))
        yield found
