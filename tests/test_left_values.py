"""Tensors that forward leaves in attributes and lists: who reads them gets an error, never an older value."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import autoparallel
from autoparallel.capture import capture
from autoparallel.errors import CaptureError, InputError

X = torch.linspace(-1, 1, 24).view(4, 6)


class Notes:
    mean: Any


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(6, 6), list[Tensor]()
        self.penalty: Any = 0.0
        self.context, self.made = Notes(), cast(Any, None)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x)
        self.penalty = made.square().mean()
        self.seen.append(made)
        self.context.mean, self.made = made.mean(), Notes()
        self.made.mean = self.context.mean
        self.taken = made
        del self.taken
        self.length = len(x)
        return made.tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = nn.ModuleList(Layer() for _ in range(4)), 2.0
        self.total: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.total = self.all_penalties()
        self.last = {"x": (x, 1)}
        return x.sum() * self.scale + self.total

    def all_penalties(self) -> Any:
        return penalties(self)


def penalties(model: Any) -> Any:
    return sum(layer.penalty for layer in model.layers if hasattr(layer, "penalty"))


#: What a script reads after a call -> the attribute that is named.
READ: dict[str, tuple[Callable[[Any], Any], str]] = {
    "sum": (penalties, "layers.0.penalty"),
    "stack": (lambda m: torch.stack([layer.penalty for layer in m.layers]), "layers.0.penalty"),
    "last block": (lambda m: 0.1 * m.layers[3].penalty, "layers.3.penalty"),
    "method": (lambda m: m.all_penalties(), "layers.0.penalty"),
    "item": (lambda m: m.layers[1].penalty.item(), "layers.1.penalty"),
    "truth": (lambda m: bool(m.layers[1].penalty), "layers.1.penalty"),
    "list": (lambda m: [*m.layers[2].seen], "layers.2.seen"),
    "of the model": (lambda m: m.total, "total"),
    "asked for": (lambda m: getattr(m, "total", None), "total"),
    "in a dict": (lambda m: m.last["x"], "last"),
    "if it is a tensor": (lambda m: sum(p for p in (layer.penalty for layer in m.layers) if isinstance(p, Tensor)),
                          "layers.0.penalty"),
    "of an object": (lambda m: m.layers[0].context.mean, "layers.0.context"),
    "of a new object": (lambda m: m.layers[0].made.mean, "layers.0.made"),
    "of a copy": (lambda m: penalties(copy.deepcopy(m)), "layers.0.penalty"),
}


@pytest.fixture
def parallel(mesh_of_one: Any) -> Any:
    return autoparallel.compile(Net(), mesh_of_one, example_inputs=(X,))


@pytest.mark.parametrize("name", READ)
def test_tensors_left_in_attributes_are_refused(parallel: Any, name: str) -> None:
    read, attribute = READ[name]
    parallel(X)
    with pytest.raises(InputError, match=rf"^{attribute} is read, where forward leaves tensors"):
        read(parallel)


def test_parts_with_such_attributes_are_copied_and_pickled(parallel: Any) -> None:
    notes = parallel.layers[0].penalty
    for other in (copy.copy(notes), copy.deepcopy(notes), pickle.loads(pickle.dumps(notes))):
        assert repr(other) == "<layers.0.penalty: not kept by a parallel module>"
        assert not isinstance(other, nn.Parameter)


TABLES: dict[int, Tensor] = {}


class Keeps(nn.Module):
    """Tables that the first call makes as an argument is, of which they read no value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mask = nn.Linear(6, 6), cast(Any, None)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in TABLES:
            TABLES[len(x)] = torch.arange(6).type_as(x) + torch.ones_like(x)
        if self.mask is None:
            self.mask = x.new_ones(6, 6).tril()
        made: Tensor = self.linear(x) @ self.mask + TABLES[len(x)]
        return made


def test_tables_made_like_an_argument_are_kept(mesh_of_one: Any) -> None:
    model = Keeps()
    parallel = autoparallel.compile(model, mesh_of_one)
    results = [parallel(x).detach() for x in (X, X + 1)]
    assert not TABLES
    torch.testing.assert_close(results, [model(x).detach() for x in (X, X + 1)])


def test_calls_and_other_attributes_are_as_before(parallel: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    parallel.load_state_dict(model.state_dict())
    for x in (X, X + 1, X):
        torch.testing.assert_close(parallel(x).detach(), model(x).detach())
    assert parallel._state.forms.compiled == 1
    torch.testing.assert_close(parallel(X[:2]).detach(), model(X[:2]).detach())
    assert parallel._state.forms.compiled == 2    # of other lengths, which reads the attributes as they were made
    assert parallel.scale == 2.0 and not hasattr(parallel.layers[0], "taken")
    parallel.layers[0].penalty, parallel.total = 3.0, 4.0    # until the next call
    assert (parallel.layers[0].penalty, parallel.total) == (3.0, 4.0)
    torch.testing.assert_close(parallel(X).detach(), model(X).detach())


def clear(model: Any) -> None:
    for layer in model.layers:
        layer.penalty, layer.seen = 0.0, []
    model.total = None


def delete(model: Any) -> None:
    for layer in model.layers:
        if "penalty" in vars(layer):
            del layer.penalty


@pytest.mark.parametrize("before", [clear, delete])
def test_attributes_that_are_set_before_each_call_are_refused_after_it(parallel: Any, before: Callable[[Any], None]
                                                                       ) -> None:
    for _ in range(4):
        before(parallel)
        parallel(X)
        for read in ("sum", "of the model", "list"):
            with pytest.raises(InputError, match="is read, where forward leaves tensors"):
                READ[read][0](parallel)
    assert parallel._state.forms.compiled <= 2    # not one of each call


LOSSES: list[Tensor] = []


def to_a_global(model: Any, made: Tensor) -> None:
    LOSSES.append(made.mean())


def to_an_object(model: Any, made: Tensor) -> None:
    model.context.losses["last"] = made.mean()


def to_a_default(model: Any, made: Tensor, losses: list[Tensor] = []) -> None:  # noqa: B006
    losses.append(made)


class Adds(nn.Module):
    def __init__(self, add: Callable[[Any, Tensor], None], context: Any) -> None:
        super().__init__()
        self.linear, self.add, self.context = nn.Linear(6, 6), add, context

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x)
        self.add(self, made)
        return made.sum()


@pytest.mark.parametrize("add", [to_a_global, to_an_object, to_a_default])
def test_tensors_added_where_scripts_read_them_are_refused(add: Callable[[Any, Tensor], None]) -> None:
    context = SimpleNamespace(losses={})
    with pytest.raises(CaptureError, match="adds tensors to what is in"):
        capture(Adds(add, context), (X,))
    assert not LOSSES and not context.losses


class Seen:
    def __init__(self) -> None:
        self.last: Any = None
        self.all = list[Tensor]()

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.last = output

    def append(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.all.append(output)


def in_variable(layer: nn.Module) -> Callable[[], Any]:
    last: Any = None

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal last
        last = output

    layer.register_forward_hook(hook)
    return lambda: last


def in_object(layer: nn.Module) -> Callable[[], Any]:
    layer.register_forward_hook(seen := Seen())
    return lambda: seen.last


def by_method(layer: nn.Module) -> Callable[[], Any]:
    seen = Seen()
    layer.register_forward_hook(seen.append)
    return lambda: seen.all or None


def in_argument(layer: nn.Module) -> Callable[[], Any]:
    def note(into: Any, module: nn.Module, args: Any, output: Tensor) -> None:
        into.last = output

    layer.register_forward_hook(partial(note, seen := SimpleNamespace(last=None)))
    return lambda: seen.last


@pytest.mark.filterwarnings("ignore:forward hooks are traced")
@pytest.mark.parametrize("register", [in_variable, in_object, by_method, in_argument])
def test_hooks_keep_no_tensors_of_a_trace(register: Callable[[nn.Module], Callable[[], Any]]) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    kept = register(model[0])
    if register is by_method:    # what is added to a list is only warned of
        capture(model, (X,))
    else:
        with pytest.raises(CaptureError, match=r"None.* a tensor"):
            capture(model, (X,))
    assert kept() is None
