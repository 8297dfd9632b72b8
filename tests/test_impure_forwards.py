"""A forward that changes what its next call reads, or reads what changes by itself, is refused; what it computes once
and keeps is not. The user's objects are left as they were."""

from __future__ import annotations

import collections
import cProfile
import datetime
import gc
import importlib
import itertools
import os
import queue
import random
import secrets
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from time import perf_counter as seconds
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from autoparallel.capture import capture
from autoparallel.capture.variables import read_by
from autoparallel.errors import CaptureError
from tests.support.tiers import with_slow

X = torch.ones(2, 4)
COUNTS = {"calls": 0}
NUMBERS = itertools.count(1)


class Model(nn.Module):
    """A layer whose result is scaled by ``scale(model, result)``, and a value that it may use."""

    def __init__(self, scale: Callable[[Any, Tensor], Any], value: Any = None) -> None:
        super().__init__()
        self.layer, self.value, self.scale = nn.Linear(4, 4), value, scale

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y * self.scale(self, y)


def counted(model: Any, y: Tensor) -> float:
    model.value["n"] += 1
    return model.value["n"]


def appended(model: Any, y: Tensor) -> float:
    model.value.append(1.0)
    return len(model.value)


def carried(model: Any, y: Tensor) -> Tensor:
    model.value["h"] = y.detach() + model.value["h"]
    return model.value["h"]


def in_object(model: Any, y: Tensor) -> float:
    model.value.n += 1
    return model.value.n


def in_array(model: Any, y: Tensor) -> float:
    model.value[0] += 1
    return float(model.value[0])


def globally(model: Any, y: Tensor) -> float:
    COUNTS["calls"] += 1
    return COUNTS["calls"]


def by_default(model: Any, y: Tensor, seen: list[int] = []) -> float:  # noqa: B006
    seen.append(1)
    return len(seen)


def seeded(model: Any, y: Tensor) -> Tensor:
    torch.manual_seed(0)
    return torch.rand(4)


def forked(model: Any, y: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return seeded(model, y)


def after_collection(model: Any, y: Tensor) -> float:
    """Watched (by its name for a clock), and collects garbage meanwhile."""
    gc.collect()
    return 2.0 if model.value else time.time()


#: name -> (scale, value, words of the refusal)
REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[], Any], str]] = {
    "count in a dict": (counted, lambda: {"n": 0}, "changes what is in value (dict: 'n' was 0 and is 1)"),
    "Counter": (counted, collections.Counter, "adds to value and reads it"),
    "count in a list of a dict": (lambda m, y: _first(m.value["n"]), lambda: {"n": [0]}, "element 0 was 0 and is 1"),
    "list that grows": (appended, list, "adds to value and reads it"),
    "list that shrinks": (lambda m, y: m.value.pop(), lambda: [1.0, 2.0], "it had 2 elements and has 1"),
    "tensor under a new name": (lambda m, y: m.value.setdefault(len(m.value), y) + sum(m.value.values()), dict,
                                "adds to"),
    "deque": (lambda m, y: m.value.rotate(1) or m.value[0], lambda: collections.deque([1.0, 2.0]), "element 0 was 1.0"),
    "tensor in a dict": (carried, lambda: {"h": torch.zeros(2, 4)}, "'h' was a tensor and is a tensor"),
    "field of an object": (in_object, lambda: SimpleNamespace(n=0), "'n' was 0 and is 1"),
    "array": (in_array, lambda: np.zeros(2), "it was written to"),
    "global dict": (globally, lambda: None, "changes what is in COUNTS"),
    "default argument": (by_default, lambda: None, "adds to"),
    "list iterator": (lambda m, y: next(m.value), lambda: iter([1.0, 2.0]), "reads value, which is or has a list_iter"),
    "zip": (lambda m, y: sum(a * b for a, b in m.value), lambda: zip([1.0], [2.0], strict=True), "has a zip"),
    "iterator in a dict": (lambda m, y: next(m.value["it"]), lambda: {"it": itertools.cycle([1.0])}, "has a cycle"),
    "iterator in an object": (lambda m, y: next(m.value.it), lambda: SimpleNamespace(it=iter([1.0])), "list_iterator"),
    "method of an iterator": (lambda m, y: m.value(), lambda: iter([1.0]).__next__, "list_iterator"),
    "global iterator": (lambda m, y: next(NUMBERS), lambda: None, "reads NUMBERS"),
    "queue": (lambda m, y: m.value.get_nowait(), lambda: _filled(queue.Queue()), "has a Queue"),
    "Random": (lambda m, y: m.value.uniform(1, 2), lambda: random.Random(1), "has a Random"),
    "Generator": (lambda m, y: float(m.value.random()), lambda: np.random.default_rng(1), "has a Generator"),
    "time": (lambda m, y: time.time(), lambda: None, "asks time.time()"),
    "imported clock": (lambda m, y: seconds(), lambda: None, "asks time.perf_counter()"),
    "now": (lambda m, y: datetime.datetime.now().second, lambda: None, "asks datetime.now()"),
    "today": (lambda m, y: datetime.date.today().day, lambda: None, "asks date.today()"),
    "urandom": (lambda m, y: os.urandom(1)[0], lambda: None, "urandom()"),
    "uuid": (lambda m, y: uuid.uuid4().int % 7, lambda: None, "urandom()"),
    "secrets": (lambda m, y: secrets.randbelow(9), lambda: None, "urandom()"),
    "default_rng": (lambda m, y: float(np.random.default_rng().random()), lambda: None, "urandom()"),
    "file": (lambda m, y: len(m.value.read_text()), lambda: Path(__file__), "asks io.open()"),
    "whether a file is there": (lambda m, y: 2.0 if m.value.exists() else 3.0, lambda: Path(__file__), "posix.stat()"),
    "seed": (seeded, lambda: None, "sets the state of torch's generator"),
    "seed of a fork": (forked, lambda: None, "sets the state of torch's generator"),
    "new Random": (lambda m, y: random.Random().random(), lambda: None, "random.Random() without a seed"),
}


def _first(counts: list[int]) -> int:
    counts[0] += 1
    return counts[0]


def _filled(made: Any) -> Any:
    made.put(1.0)
    return made


@pytest.mark.parametrize("name", with_slow(
    REFUSED, "count in a list of a dict", "list that shrinks", "deque", "default argument", "zip", "iterator in a dict",
    "iterator in an object", "global iterator", "Random", "imported clock", "today", "uuid", "secrets", "default_rng",
    "seed of a fork"))
def test_item_1_memory_clocks_and_chance_are_refused(name: str) -> None:
    scale, value, said = REFUSED[name]
    with pytest.raises(CaptureError) as found:
        capture(Model(scale, value()), (X,))
    assert said in str(found.value)


@pytest.mark.parametrize(("scale", "value", "left"), [
    (counted, {"n": 3}, {"n": 3}),
    (appended, [5.0], [5.0]),
    (in_object, SimpleNamespace(n=2), SimpleNamespace(n=2)),
    (lambda m, y: m.value.pop(), [1.0, 2.0], [1.0, 2.0]),
    (lambda m, y: m.value.rotate(1) or 1.0, collections.deque([1.0, 2.0]), collections.deque([1.0, 2.0])),
    (_first, [0], [0]),
])
def test_what_a_refused_forward_changed_is_put_back(scale: Any, value: Any, left: Any) -> None:
    model = Model(scale if scale is not _first else lambda m, y: _first(m.value), value)
    with pytest.raises(CaptureError):
        capture(model, (X,))
    assert model.value == left


def test_what_a_refused_forward_reads_is_not_used_up() -> None:
    numbers = iter([1.0, 2.0])
    with pytest.raises(CaptureError):
        capture(Model(lambda m, y: next(m.value), numbers), (X,))
    assert next(numbers) == 1.0


def kept(model: Any, y: Tensor) -> Tensor:
    if y.shape not in model.value:
        model.value[y.shape] = torch.arange(4.0)
    table: Tensor = model.value[y.shape]
    return table


def noted(model: Any, y: Tensor) -> float:
    model.value.append(y)
    return 2.0


@pytest.mark.parametrize(("scale", "value"), [
    (kept, {}),
    (noted, []),  # for others to read
    (lambda m, y: m.value["n"] * 2, collections.defaultdict(float)),
    (lambda m, y: random.Random(3).random(), None),
    (lambda m, y: float(np.random.default_rng(3).random()), None),
    (lambda m, y: sum(map(float, m.value)), [1.0, 2.0]),
    (lambda m, y: next(iter(m.value)), [1.0, 2.0]),
])
def test_what_every_call_computes_alike_is_traced(scale: Any, value: Any) -> None:
    model = Model(scale, value)
    before = list(value) if value is not None else None
    assert len(capture(model, (X,)).nodes) > 0
    assert (list(value) if value is not None else None) == before


def test_clocks_of_who_measures_the_collector_are_not_the_models() -> None:
    """(hypothesis does: any trace that was watched could be refused.)"""
    def measures(phase: str, info: Any) -> None:
        time.perf_counter()

    gc.callbacks.append(measures)
    try:
        capture(Model(after_collection, 1), (X,))
    finally:
        gc.callbacks.remove(measures)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = torch.utils.checkpoint.checkpoint(self.norm, x, use_reentrant=False)
        return made


def test_running_statistics_in_a_checkpoint_are_told() -> None:
    with pytest.warns(UserWarning, match="BatchNorm1d is in a checkpoint: its running statistics count"):
        capture(Checkpointed(), (X,))


def test_a_script_under_cprofile_captures_and_is_profiled_on() -> None:
    """As by python -m cProfile: its profiler is no function."""
    profile, model = cProfile.Profile(), Model(lambda model, y: model.value.now.numel(), SimpleNamespace(now=X))
    with profile:
        capture(model, (X,), {})
        sorted([1])
    assert any("sorted" in str(row.code) for row in profile.getstats())


def test_adapters_are_not_followed_into_all_that_their_libraries_can_make() -> None:
    """From peft's forward, by the names of methods, to constructors of transformers, and to psutil, which asks clocks:
    the trace was watched, and took twice as long."""
    pytest.importorskip("peft")
    from tests.support.language import adapted, llama

    plain, read = read_by(llama()), read_by(adapted())
    assert not read.may_ask
    assert len(read.names) < 2 * len(plain.names) and len(read.variables) < 2 * len(plain.variables)


def test_libraries_of_formulas_are_not_followed() -> None:
    """Of sympy 4,400 names were followed, by a model that names it or that has a checkout beside it which does."""
    formulas = pytest.importorskip("sympy")
    read = read_by(Model(lambda model, y: y * float(formulas.simplify("2 + 2")), SimpleNamespace()))
    assert len(read.names) < 100 and len(read.variables) < 100


class Made:
    def __init__(self) -> None:
        self.began = time.time()


class MadeToo(Made):
    def __init__(self) -> None:
        super().__init__()


def test_a_clock_that_a_constructor_of_the_users_asks_is_seen() -> None:
    with pytest.raises(CaptureError, match=r"asks time\.time\(\)"):
        capture(Model(lambda model, y: MadeToo().began, SimpleNamespace(wide=1.0)), (X,))


def test_a_module_that_is_imported_first_while_a_model_is_traced_may_ask(tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_late.py").write_text("import time\nBEGAN = time.time()\n")
    monkeypatch.syspath_prepend(tmp_path)

    def scale(model: Any, y: Tensor) -> float:
        importlib.import_module("imported_late")
        return model.value.now

    capture(Model(scale, SimpleNamespace(now=2.0)), (X,), {})
