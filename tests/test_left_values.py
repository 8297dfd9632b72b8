"""Tensors that forward leaves in attributes have the values of the last call, with gradients; lists that grow and
objects are refused where they are read, never an older value."""

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
from torch.distributed.tensor import DTensor, Shard

import autoparallel
from autoparallel.capture import capture
from autoparallel.errors import CaptureError, InputError
from tests.support.ranks import mesh_of
from tests.support.tiers import slow, with_slow

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


def nested(model: Any) -> Any:
    (x, one) = model.last["x"]
    return x * one


#: What a script reads after a call.
READ: dict[str, Callable[[Any], Any]] = {
    "sum": penalties,
    "stack": lambda m: torch.stack([layer.penalty for layer in m.layers]),
    "last block": lambda m: 0.1 * m.layers[3].penalty,
    "method": lambda m: m.all_penalties(),
    "item": lambda m: m.layers[1].penalty.item(),
    "truth": lambda m: bool(m.layers[1].penalty),
    "of the model": lambda m: m.total,
    "asked for": lambda m: getattr(m, "total", None) if hasattr(m, "total") else None,
    "in a dict": nested,
    "if it is a tensor": lambda m: sum(p for p in (layer.penalty for layer in m.layers) if isinstance(p, Tensor)),
}
#: What is refused -> the attribute that is named.
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "list": (lambda m: [*m.layers[2].seen], "layers.2.seen"),
    "of an object": (lambda m: m.layers[0].context.mean, "layers.0.context"),
    "of a new object": (lambda m: m.layers[0].made.mean, "layers.0.made"),
    "of a copy": (lambda m: penalties(copy.deepcopy(m)), "layers.0.penalty"),
    "of the model's copy": (lambda m: copy.deepcopy(m).total + 1, "total"),
}


@pytest.fixture
def parallel(mesh_of_one: Any) -> Any:
    return autoparallel.compile(Net(), mesh_of_one, example_inputs=(X,))


@pytest.mark.parametrize("name", with_slow(
    READ, "stack", "last block", "method", "item", "truth", "asked for", "in a dict"))
def test_attributes_have_the_tensors_of_the_last_call(mesh_of_one: Any, name: str) -> None:
    model = Net()
    parallel = autoparallel.compile(copy.deepcopy(model), mesh_of_one)
    for x in (X, X + 1):
        parallel(x), model(x)
        torch.testing.assert_close(READ[name](parallel), READ[name](model))


@pytest.mark.parametrize("name", with_slow(REFUSED, "of an object", "of a new object", "of the model's copy"))
def test_lists_that_grow_objects_and_copies_are_refused(parallel: Any, name: str) -> None:
    read, attribute = REFUSED[name]
    parallel(X)
    with pytest.raises(InputError, match=rf"^{attribute} is read, where forward leaves tensors"):
        read(parallel)


class Penalised(nn.Module):
    """Leaves what is summed over the batch, what has a row per sample, and what has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.first(x).tanh()
        self.first.penalty, self.known = self.hidden.square().mean(), self.hidden.detach()
        self.spread: list[Any] = [self.hidden.mean(), {"by feature": self.hidden.std(0)}]
        made: Tensor = self.second(self.hidden)
        return made


def penalised(model: Any, steps: int = 3) -> list[Any]:
    """Losses to which the attributes are added, gradients, and the trained parameters."""
    found, optimizer = list[Any](), None
    for _ in range(steps):
        loss = model(X).square().mean() + model.first.penalty + model.hidden.abs().mean()
        loss = loss + model.spread[0] + model.spread[1]["by feature"].sum()
        optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert not model.known.requires_grad and model.hidden.requires_grad
        found += [loss.detach(), *(p.grad for p in model.parameters())]
    return [*map(whole, (*found, model.known, *model.parameters()))]


def whole(value: Tensor) -> Tensor:
    return value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()


def penalised_on_mesh(options: dict[str, Any]) -> list[Any]:
    return penalised(autoparallel.compile(Penalised(), mesh_of(2), example_inputs=(X,), **options))


@pytest.mark.parametrize("options", [
    {"pins": {"x": (Shard(0),)}}, {"pins": {"x": (Shard(0),)}, "outputs": "whole"},
    {"pins": {"first.weight": (Shard(0),)}}, {"baseline": "fsdp", "zero_stage": 3, "recompute": "full"},
    {"baseline": "tensor_parallel", "backend": "aot_eager"}])
def test_they_are_added_to_the_loss_on_ranks(ranks: Any, options: dict[str, Any]) -> None:
    expected = penalised(Penalised())
    for found in ranks(2).run(penalised_on_mesh, options):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Moded(nn.Module):
    """Leaves what ``leave`` says in training, and otherwise what ``otherwise`` does."""

    kept: Any = None

    def __init__(self, otherwise: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.otherwise = nn.Linear(6, 6), otherwise
        self.penalty: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x)
        if self.training:
            self.penalty = made.square().mean()
            self.kept = made.detach()
            return made
        read = self.otherwise(self, made)
        return made if read is None else made + read


class InBlocks(nn.Module):
    def __init__(self, otherwise: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Moded(otherwise) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def puts_none(layer: Any, made: Tensor) -> None:
    layer.penalty = None


def puts_zero(layer: Any, made: Tensor) -> None:
    layer.penalty = 0.0


def puts_nothing(layer: Any, made: Tensor) -> None:
    """The attribute keeps what the last call left there."""


MODED: list[Callable[[Callable[[Any, Tensor], Any]], Any]] = [Moded, InBlocks]


def last_of(model: Any) -> Any:
    return model.layers[5] if hasattr(model, "layers") else model


@pytest.mark.parametrize(("make", "otherwise"), [
    (Moded, puts_none), slow(InBlocks, puts_zero), (Moded, puts_nothing),
    slow(InBlocks, puts_none), slow(Moded, puts_zero), slow(InBlocks, puts_nothing)])
def test_calls_of_two_forms_leave_values_in_one_attribute(mesh_of_one: Any, make: Any, otherwise: Any) -> None:
    model = make(otherwise)
    parallel: Any = autoparallel.compile(copy.deepcopy(model), mesh_of_one)
    for training in (True, False, False, True, False):
        for one in (model, parallel):
            one.train(training)(X + training)
        found, expected = (last_of(one).penalty for one in (parallel, model))
        assert type(found) is type(expected)
        assert expected is None or torch.allclose(torch.as_tensor(found), torch.as_tensor(expected))
    assert type(last_of(copy.deepcopy(parallel)).penalty) is type(expected) or otherwise is puts_nothing
    assert parallel._state.forms.compiled == 2


def reads(layer: Any, made: Tensor) -> Any:
    return layer.kept


@pytest.mark.parametrize("make", MODED)
def test_calls_that_read_what_those_of_another_form_left_are_refused(mesh_of_one: Any, make: Any) -> None:
    """They would compute with what was there before: the value of the first trace."""
    model = make(reads)
    parallel: Any = autoparallel.compile(copy.deepcopy(model), mesh_of_one)
    parallel.eval()
    torch.testing.assert_close(parallel(X).detach(), model.eval()(X).detach())    # nothing was left yet
    for _ in range(2):
        parallel.train()(X)
        with pytest.raises(InputError, match=r"forward reads (layers.0.)?kept, in which a call of another form"):
            parallel.eval()(X)
    for one in (model, parallel):
        for layer in getattr(one, "layers", [one]):
            layer.kept = None
    torch.testing.assert_close(parallel(X).detach(), model(X).detach())


@pytest.mark.parametrize("make", MODED)
def test_values_over_a_class_attribute_can_be_deleted(mesh_of_one: Any, make: Any) -> None:
    parallel: Any = autoparallel.compile(make(puts_nothing), mesh_of_one)
    for _ in range(2):
        parallel(X)
        assert last_of(parallel).kept.shape == X.shape
        del last_of(parallel).kept
        assert last_of(parallel).kept is None


@pytest.mark.filterwarnings("error:The tensor attribute")
def test_nobody_is_warned_of_attributes_that_are_kept(mesh_of_one: Any) -> None:
    autoparallel.compile(Moded(puts_none), mesh_of_one, example_inputs=(X,))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x).square()
        self.penalty = made.mean()
        return made.mean()


def test_steps_in_micro_batches_leave_none(mesh_of_one: Any) -> None:
    parallel: Any = autoparallel.compile(Twice(), mesh_of_one, micro_batches=2)
    parallel.step(X)
    assert hasattr(parallel, "penalty")
    with pytest.raises(InputError, match=r"^penalty is read, where forward leaves tensors"):
        parallel.penalty + 1


def test_batches_made_between_call_and_read_change_nothing(mesh_of_one: Any) -> None:
    parallel: Any = autoparallel.compile(Twice(), mesh_of_one)
    loss = parallel(X)
    parallel.shard_batch((X + 1,))
    torch.testing.assert_close(parallel.penalty, loss)
    parallel.penalty.backward()
    assert parallel.linear.weight.grad is not None


def test_parts_with_such_attributes_are_copied_and_pickled(parallel: Any) -> None:
    parallel(X)
    notes = copy.deepcopy(parallel).layers[0].penalty
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


@pytest.mark.parametrize("before", [clear, slow(delete)])
def test_attributes_may_be_set_before_each_call(parallel: Any, before: Callable[[Any], None]) -> None:
    model = Net()
    parallel.load_state_dict(model.state_dict())
    for _ in range(4):
        before(parallel)
        parallel(X), model(X)
        for name in ("sum", "of the model"):
            torch.testing.assert_close(READ[name](parallel), READ[name](model))
        with pytest.raises(InputError, match="is read, where forward leaves tensors"):
            REFUSED["list"][0](parallel)
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
