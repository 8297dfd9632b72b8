"""Reads that give another value at each call: clocks, files, numbers drawn outside of torch; seeds set by a model."""

from __future__ import annotations

import datetime
import functools
import gc
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from autoparallel.capture.contents import PYTHONS, is_users


class RandomNumbers:
    """The states of the generators of random numbers, as they are when it is made."""

    def __init__(self) -> None:
        self._python, self._torch = random.getstate(), torch.get_rng_state()
        self._numpy: Any = np.random.get_state()

    def restore(self) -> str:
        """Set them back. Returns the name of one that a trace cannot follow, if numbers were drawn from it."""
        drawn = "Python's random" if random.getstate() != self._python else ""
        now: Any = np.random.get_state()
        if now[2:] != self._numpy[2:] or not np.array_equal(now[1], self._numpy[1]):
            drawn = drawn or "numpy.random"
        if drawn and not others_run():
            random.setstate(self._python)
            np.random.set_state(self._numpy)
        if not others_run():  # whose numbers would come again
            torch.set_rng_state(self._torch)
        return drawn


class OthersDrawError(Exception):
    """Random numbers were drawn while a model was traced, by it or by another thread: trace again, watching this
    thread."""


class Watch:
    """Whether this thread draws from Python's or numpy's generator (``draws``), which clock, file or source of chance a
    user's function asks (``asked``), and whether one sets the state of torch's generator (``seeds``)."""

    def __init__(self) -> None:
        self.draws, self.seeds, self.asked = False, False, ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = sys.getprofile()
        own = {name: getattr(np.random, name) for name in _NUMPY_DRAWS}
        for name, function in own.items():    # a profiler does not see Cython's functions
            setattr(np.random, name, self._seen_here(function))
        sys.setprofile(self._look)
        try:
            yield
        finally:
            _profile_again(before)
            for name, function in own.items():
                setattr(np.random, name, function)

    def _look(self, frame: Any, event: str, function: Any) -> None:
        if event == "c_call":
            owner = getattr(function, "__self__", None)
            if owner is PYTHONS:
                self.draws = True
            elif owner is torch.default_generator and function.__name__ in _SEEDS:
                self.seeds = self.seeds or _is_asked_by_user(frame)
            elif (id(owner), getattr(function, "__name__", "")) in _CLOCKS and _is_asked_by_user(frame):
                self.asked = f"{getattr(owner, '__name__', type(owner).__name__)}.{function.__name__}()"
        elif event == "call" and frame.f_code is _SEEDED and frame.f_locals.get("x") is None \
                and _is_asked_by_user(frame.f_back):
            self.asked = "random.Random() without a seed"

    def _seen_here(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls in this thread are seen."""
        thread = threading.get_ident()

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.draws = self.draws or threading.get_ident() == thread
            return function(*args, **kwargs)

        return call


def _profile_again(profiler: Any) -> None:
    """Let the profiler go on that ran before: a function, or a cProfile.Profile, which is none."""
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        profiler.enable()


def _key(function: Any) -> tuple[int, str]:
    return id(function.__self__), function.__name__


def _is_asked_by_user(frame: Any) -> bool:
    """Whether a user's function asks, itself or through modules that ask for those who call them."""
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    if frame is not None and any(frame.f_code is getattr(called, "__code__", None) for called in gc.callbacks):
        return False  # a library that measures the collector, of whatever happens to run
    return frame is not None and is_users(frame.f_globals) and not _is_importing(frame)


def _is_importing(frame: Any) -> bool:
    """Whether a module is imported, which asks once: torch imports some when they are needed first."""
    while frame is not None and frame.f_globals.get("__name__") != "importlib._bootstrap":
        frame = frame.f_back
    return frame is not None


def may_ask(value: Any) -> bool:
    """Whether a value is a function that tells the time or draws from the machine, or a class of such."""
    if isinstance(value, ModuleType):
        return False
    if getattr(value, "__module__", None) in _CHANCE or value is np.random.default_rng:
        return True
    return isinstance(value, BuiltinFunctionType) and value.__self__ is not None and _key(value) in _CLOCKS


_SEEDED = random.Random.__init__.__code__
#: Modules that draw for those who call them.
_CHANCE = ("random", "secrets", "uuid")
#: Those, and modules that ask files for them, or set seeds.
_BETWEEN = (*_CHANCE, "pathlib", "genericpath", "posixpath", "json", "pickle", "contextlib", "torch.random",
            "numpy.lib._npyio_impl", "torch._compile", "torch._dynamo.eval_frame")
#: Methods of torch's generator that set its state.
_SEEDS = ("manual_seed", "set_state", "seed")
_OF_TIME = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time",
            "process_time_ns", "thread_time", "thread_time_ns", "localtime", "gmtime", "ctime")
_CLOCKS = frozenset(map(_key, (*(getattr(time, name) for name in _OF_TIME), open, os.open, os.stat,
                               os.listdir, os.scandir, os.urandom, datetime.datetime.now,
                               datetime.datetime.utcnow, datetime.datetime.today, datetime.date.today)))
#: Names in a function that may ask a clock or the machine's chance, which are watched for.
ASKING = frozenset({*_OF_TIME, "urandom", "now", "utcnow", "today", "secrets", "uuid", "uuid1", "uuid4", "Random",
                    "SystemRandom", "default_rng"})
#: Names in a user's own function that may ask a file, or set a seed. (Installed libraries look for files in many
#: places, and to watch makes a trace more than twice as long.)
OPENING = frozenset({"open", "read_text", "read_bytes", "exists", "isfile", "isdir", "listdir", "scandir", "iterdir",
                     "getmtime", "load", "manual_seed", "set_rng_state", "fork_rng"})
#: Functions of numpy's global generator.
_NUMPY_DRAWS = tuple(name for name in np.random.__all__ if name not in ("default_rng", "get_state")
                     and callable(value := getattr(np.random, name)) and not isinstance(value, type))


def draws_by_numpy(value: Any) -> bool:
    return any(value is getattr(np.random, name) for name in _NUMPY_DRAWS)


def others_run() -> bool:
    """Whether other threads run that may draw numbers: neither this one, nor ours, nor the one that tqdm leaves."""
    here = threading.get_ident()
    return any(t.ident != here and not t.name.startswith("autoparallel ") and not type(t).__module__.startswith("tqdm")
               for t in threading.enumerate())
