"""A model that changes between calls never runs a stale program: it is compiled again, or refused by name."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autoparallel
from autoparallel.capture import capture
from autoparallel.errors import CaptureError, InputError
from tests.support.ranks import RankError, mesh_of

SCALE = 2.0
SETTINGS: dict[str, Any] = {"shift": 1.0, "powers": [1, 2]}


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE + SETTINGS["shift"]


class Changing(nn.Module):
    """A model that reads all kinds of things beside its arguments."""

    sign = 1.0
    slope_of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.0)
        self.act = nn.LeakyReLU(0.1)
        self.last = nn.Linear(8, 6)
        self.scale, self.options, self.config = 1.5, {"bias": 0.5}, SimpleNamespace(gain=1.0)
        self.offset, self.table = torch.linspace(0, 1, 6), np.ones(6)
        self.register_buffer("weights", torch.linspace(1, 2, 6))

    def forward(self, x: torch.Tensor, power: float = 1.0) -> torch.Tensor:
        y = self.last(self.drop(self.act(self.norm(self.first(x)))))
        y = _scaled(y) * self.scale * self.sign * self.config.gain + self.options["bias"] + self.offset
        if not torch.is_grad_enabled():
            y = y + 3.0
        if str(power) == "-0.0":
            y = -y
        if not x.is_contiguous():
            y = y * 0.5
        return y * self.weights * self.slope_of_class + float(self.table[1])


def _set(path: str, name: str, value: Any) -> Callable[[nn.Module], None]:
    return lambda model: setattr(model.get_submodule(path) if path else model, name, value)


def _in_place(model: Any) -> None:
    model.offset.mul_(2.0)


def _content(model: Any) -> None:
    model.options["bias"] = 4.0


def _config(model: Any) -> None:
    model.config.gain = 0.25


def _hook(model: Any) -> None:
    model.act.register_forward_hook(lambda module, given, made: made * 2.0)


def _pre_hook(model: Any) -> None:
    model.last.register_forward_pre_hook(lambda module, given: (given[0] + 1.0,))


def _forward(model: Any) -> None:
    model.act.forward = torch.sigmoid


def _buffer(model: Any) -> None:
    model.weights = torch.linspace(2, 3, 6)


#: name -> a change of the model, whichever of the two it is made on.
EDITS: dict[str, Callable[[nn.Module], None]] = {
    "scale": _set("", "scale", 5.0), "minus zero": _set("", "scale", -0.0), "class attribute": _set("", "sign", -1.0),
    "eps": _set("norm", "eps", 0.5), "slope": _set("act", "negative_slope", 0.7), "offset": _set("", "offset",
                                                                                                  torch.ones(6)),
    "offset in place": _in_place, "content": _content, "config": _config, "hook": _hook, "pre-hook": _pre_hook,
    "forward": _forward, "buffer": _buffer,
}


def differs(parallel: nn.Module, expected: nn.Module, *args: Any) -> float:
    """The largest difference of two calls."""
    made = parallel(*args)
    made = made.full_tensor() if hasattr(made, "full_tensor") else made
    return float((made - expected(*args)).abs().max())


def after_edits(names: list[str], on_original: bool) -> list[tuple[str, float]]:
    """After each edit of the parallel module, or of the model that it was made of, how far it is from a model with the
    same edits."""
    torch.manual_seed(3)
    model, x = Changing().eval(), torch.randn(8, 6)
    expected = copy.deepcopy(model)
    parallel = autoparallel.compile(model, mesh_of(2), baseline="ddp")
    found = [("first", differs(parallel, expected, x))]
    for name in names:
        EDITS[name](expected)
        EDITS[name](model if on_original and name != "buffer" else parallel)
        found.append((name, differs(parallel, expected, x)))
    return found


def test_item_1_a_changed_attribute_is_no_stale_program(ranks: Any) -> None:
    for found in ranks(2).run(after_edits, list(EDITS), False, timeout_s=120):
        assert [name for name, error in found if not error < 1e-5] == []


def test_item_1_a_change_of_the_original_counts_too(ranks: Any) -> None:
    for found in ranks(2).run(after_edits, ["scale", "eps", "content", "forward"], True, timeout_s=120):
        assert [name for name, error in found if not error < 1e-5] == []


def modes_strides_and_globals() -> list[tuple[str, float]]:
    global SCALE
    model, x = Changing().eval(), torch.randn(8, 6)
    parallel, found = autoparallel.compile(model, mesh_of(2), baseline="ddp"), []
    with torch.no_grad():
        found.append(("first call without gradients", differs(parallel, model, x)))
    found.append(("with gradients", differs(parallel, model, x)))
    with torch.no_grad():
        found.append(("without gradients again", differs(parallel, model, x)))
    found += [(f"power {power}", differs(parallel, model, x, power)) for power in (0.0, -0.0, 0.0)]
    found.append(("strides", differs(parallel, model, x.t().contiguous().t())))
    SCALE, before = 7.0, SCALE
    SETTINGS["shift"] = 3.0
    found.append(("globals", differs(parallel, model, x)))
    SCALE, SETTINGS["shift"] = before, 1.0
    parallel.sign = -1.0
    found.append(("attribute over the class's", differs(parallel, model, x)))
    Changing.slope_of_class = 2.0
    found.append(("class attribute", differs(parallel, model, x)))
    Changing.slope_of_class = 1.0
    globals()["_scaled"], own = (lambda x: x * 3), _scaled
    found.append(("function", differs(parallel, model, x)))
    globals()["_scaled"] = own
    model.table[1] = 9.0
    found.append(("array", differs(parallel, model, x)))
    parallel.train()
    parallel.drop.p = 1.0  # drops all
    model.train()
    found.append(("dropout", differs(parallel, model, x)))
    return found


def test_item_1_modes_strides_scalars_and_globals(ranks: Any) -> None:
    for found in ranks(2).run(modes_strides_and_globals, timeout_s=120):
        assert [name for name, error in found if not error < 1e-5] == []


def known_again() -> tuple[int, int, list[str]]:
    """Numbers of programs after a change, and after it is undone; warnings of the change."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autoparallel").addHandler(handler)
    parallel, x = autoparallel.compile(Changing().eval(), mesh_of(2), baseline="ddp"), torch.randn(8, 6)
    parallel(x)
    parallel.epoch = 7  # nothing reads it
    parallel.act.note = "seen"
    parallel(x)
    parallel.scale = 3.0
    parallel(x)
    changed = len(parallel._state.forms)
    parallel.scale = 1.5
    parallel(x)
    logging.getLogger("autoparallel").removeHandler(handler)
    return changed, len(parallel._state.forms), said


def test_unread_attributes_cost_nothing_and_undone_changes_are_recognised(ranks: Any) -> None:
    found = ranks(2).run(known_again, timeout_s=60)
    assert [counts[:2] for counts in found] == [(2, 2)] * 2
    assert ["since scale was 1.5 and is 3.0" in line for line in found[0][2]] == [True]


def replaced(what: str) -> str:
    model, x = Changing().eval(), torch.randn(8, 6)
    parallel: Any = autoparallel.compile(model, mesh_of(2), baseline="ddp")
    parallel(x)
    if what == "parameter":
        parallel.first.weight = nn.Parameter(torch.zeros(8, 6))
    elif what == "module":
        parallel.act = nn.GELU()
    elif what == "buffer":
        parallel.weights = torch.zeros(6, dtype=torch.float64)
    elif what == "both":
        parallel.act.negative_slope, model.act.negative_slope = 0.3, 0.4
    elif what == "part":
        return str(_error_of(lambda: parallel.first(x)))
    elif what == "compiled":
        with pytest.raises(CaptureError) as caught:
            autoparallel.compile(parallel.first, parallel.mesh, example_inputs=(x,))
        return str(caught.value)
    return str(_error_of(lambda: parallel(x)))


def _error_of(call: Callable[[], Any]) -> InputError | None:
    try:
        call()
    except InputError as error:
        return error
    return None


@pytest.mark.parametrize(("what", "said"), [
    ("parameter", "first.weight was replaced (DTensor float32[8, 6], then Parameter float32[8, 6])"),
    ("module", "act was replaced (LeakyReLU, then GELU)"),
    ("buffer", "weights was replaced (Tensor float32[6], then Tensor float64[6])"),
    ("both", "act.negative_slope is 0.3 in the parallel module and 0.4 in the model that it was made of"),
    ("part", "and call parallel(x, part=\"first\"): each is a program of the same parameters"),
    ("compiled", "a part of a parallel module runs by an argument of the whole model's forward"),
])
def test_item_2_replaced_parts_and_calls_of_parts_are_refused(ranks: Any, what: str, said: str) -> None:
    for found in ranks(2).run(replaced, what, timeout_s=60):
        assert said in found


class Carrying(nn.Module):
    """Forward leaves something for the next call."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer, self.what = nn.Linear(4, 4), what
        self.state, self.count, self.table, self.seen = torch.zeros(4), 0, None, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.what == "tensor":
            self.state = y.detach().sum(0) + self.state
            return y + self.state
        if self.what == "count":
            self.count += 1
            return y * self.count
        if self.what == "hook":
            y.register_hook(lambda gradient: gradient * 2)
        if self.what == "table" and self.table is None:
            self.table = torch.arange(4.0)
        self.seen = y
        return y if self.table is None else y + self.table


@pytest.mark.parametrize(("what", "said"), [
    ("tensor", "reads state and assigns another value to it"), ("count", "reads count and assigns another value"),
    ("hook", "forward calls register_hook on a value"),
])
def test_state_kept_between_calls_is_refused(what: str, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        capture(Carrying(what), (torch.zeros(2, 4),))


class Drawing(nn.Module):
    """Drops its layer at random, by numbers that no trace follows."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.draw() < 0.5 else self.layer(x)


@pytest.mark.parametrize(("draw", "said"), [(random.random, "Python's random"), (np.random.rand, "numpy.random")])
def test_numbers_drawn_outside_of_torch_are_refused_and_put_back(draw: Callable[[], float], said: str) -> None:
    random.seed(3)
    np.random.seed(3)
    expected = draw()
    random.seed(3)
    np.random.seed(3)
    with pytest.raises(CaptureError, match=said):
        capture(Drawing(draw), (torch.zeros(2, 4),))
    assert draw() == expected


@pytest.mark.parametrize("what", ["table", "plain"])
def test_capture_leaves_the_attributes_as_they_were(what: str) -> None:
    model = Carrying(what)
    capture(model, (torch.zeros(2, 4),))
    assert model.seen is None and model.table is None


def test_item_2_backward_hooks_of_modules_are_refused_and_forward_hooks_announced() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    seen: list[Any] = []
    handle = model[0].register_forward_hook(lambda module, given, made: seen.append(made))
    with pytest.warns(UserWarning, match="forward hooks are traced as part of the model"):
        capture(model, (torch.zeros(2, 4),))
    handle.remove()
    model[0].register_full_backward_hook(lambda *args: None)
    with pytest.raises(CaptureError, match="0 has a backward hook"):
        capture(model, (torch.zeros(2, 4),))


def hooked_before() -> tuple[torch.Tensor, int]:
    """The gradient that the optimizer sees, and how often hooks ran, of hooks set before compile."""
    torch.manual_seed(1)
    model, calls = nn.Linear(4, 4), []
    model.weight.register_hook(lambda gradient: gradient * 3.0)
    model.bias.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.shape))
    parallel = autoparallel.compile(model, mesh_of(2), baseline="fsdp")
    parallel(torch.ones(4, 4)).sum().backward()
    return parallel.weight.grad.full_tensor(), len(calls)


def test_item_2_hooks_that_parameters_had_before_are_called(ranks: Any) -> None:
    for gradient, calls in ranks(2).run(hooked_before, timeout_s=60):
        assert torch.equal(gradient, torch.full((4, 4), 12.0)) and calls == 1


class Strided(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.as_strided((4, 3), (1, 2), 1) * 2.0


def strided(transposed: list[bool]) -> list[float]:
    parallel = autoparallel.compile(Strided(), mesh_of(2))
    xs = [torch.arange(24.0).view(6, 4).t() if t else torch.arange(24.0).view(4, 6) for t in transposed]
    return [differs(parallel, Strided(), x) for x in xs]


def test_item_1_as_strided_reads_the_memory_that_the_call_gives(ranks: Any) -> None:
    assert ranks(2).run(strided, [False, True, False], timeout_s=60) == [[0.0] * 3] * 2


def random_edits(seed: int, count: int) -> list[str]:
    """Edits drawn at random, on the parallel module and on a model of its own; each call is equal or refused."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model = Changing().eval()
    expected, x = copy.deepcopy(model), torch.randn(8, 6)
    parallel: Any = autoparallel.compile(model, mesh_of(2), baseline="ddp")
    wrong, differs_at = [], 0.0
    for number in range(count):
        kind = draw.choice(["number", "mode", "input", "buffer", "config", "undo", "freeze"])
        value = draw.choice([0.5, 1.0, 2.0])
        args: tuple[Any, ...] = (x,)
        for one in (expected, parallel):
            if kind == "number":
                _set("", "scale", value)(one)
                _set("act", "negative_slope", value / 10)(one)
            elif kind == "mode":
                one.norm.train(value > 1.0)
            elif kind == "buffer":
                with torch.no_grad():
                    one.weights.mul_(value)
            elif kind == "config":
                one.config.gain = one.options["bias"] = value
            elif kind == "undo":
                one.scale = 1.5
            elif kind == "freeze":
                one.first.weight.requires_grad_(value > 1.0)
        if kind == "input":
            args = draw.choice([(x, -0.0), (x, 0.0), (x.t().contiguous().t(),), (x[:4],)])
        with torch.set_grad_enabled(draw.random() < 0.7):
            differs_at = differs(parallel, expected, *args)
        if not differs_at < 1e-4:
            wrong.append(f"{number}: {kind} {value} differs by {differs_at}")
    return wrong


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 40))])
def test_random_edits_between_calls_are_never_wrong(ranks: Any, seed: int) -> None:
    assert ranks(2).run(random_edits, seed, 25, timeout_s=280) == [[], []]


def test_a_rank_error_is_raised_as_such(ranks: Any) -> None:
    """What `replaced` catches is what a user meets: without the catch it fails on all ranks."""
    with pytest.raises(RankError, match="cannot be called by itself"):
        ranks(2).run(_calls_a_part, timeout_s=60)


def _calls_a_part() -> None:
    parallel: Any = autoparallel.compile(Changing().eval(), mesh_of(2), baseline="ddp")
    parallel(torch.randn(8, 6))
    parallel.first(torch.randn(8, 6))
