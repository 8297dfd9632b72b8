"""What a forward asks and writes while it is traced is as in a call of the model, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.compiler import is_exporting as is_exported

import autoparallel
from autoparallel.capture import capture
from autoparallel.errors import CaptureError
from tests.support.users_models import Model

X = torch.linspace(-1, 1, 32).view(8, 4)
SPARSE = torch.eye(8).to_sparse()


def model_of(function: Callable[..., Any], **parts: Any) -> Model:
    torch.manual_seed(0)
    return Model(function, layer=nn.Linear(4, 4), **parts)


def asks(model: Any, x: Tensor) -> Tensor:
    """As if a compiler, which it may not be, could not follow the first way."""
    traced = torch.compiler.is_compiling() or is_exported() or torch.compiler.is_exporting() \
        or torch._dynamo.is_compiling()
    y: Tensor = model.layer(x)
    return y.sum() * 100 if traced else y.sum()


def moves_to_its_device(model: Any, x: Tensor) -> Tensor:
    model.seen = model.seen.to(x.device)
    model.seen += 1
    y: Tensor = model.layer(x) * model.seen.clone()
    return y.sum()


def writes_by_another_name(model: Any, x: Tensor) -> Tensor:
    seen = model.seen.to(x)
    seen.add_(1)
    y: Tensor = model.layer(x) * model.seen.clone()
    return y.sum()


def assigns_to_itself(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model.layer(x)
    model.seen[1:] = y.detach()[0, 1:]
    model.seen = model.seen
    return (y * model.seen.clone()).sum()


@pytest.mark.parametrize("function", [asks, moves_to_its_device, writes_by_another_name, assigns_to_itself])
def test_calls_compute_the_same(mesh_of_one: Any, function: Callable[..., Any]) -> None:
    model: Any = model_of(function, seen=torch.ones(4))
    parallel: Any = autoparallel.compile(model_of(function, seen=torch.ones(4)), mesh_of_one)
    for x in (X, X + 1):
        found, expected = parallel(x), model(x)
        found.backward()
        expected.backward()
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(parallel.seen, model.seen)
    torch.testing.assert_close(parallel.layer.weight.grad.full_tensor(), model.layer.weight.grad)


def registers(model: Any, x: Tensor) -> Tensor:
    if not hasattr(model, "table"):
        model.register_buffer("table", torch.arange(4.0))
    y: Tensor = model.layer(x) * model.table
    return y.sum()


def registers_and_assigns(model: Any, x: Tensor) -> Tensor:
    """torch.export writes the buffer's new value to another input of the program."""
    y: Tensor = registers(model, x)
    model.table = model.table + 1
    return y


def makes_a_layer(model: Any, x: Tensor) -> Tensor:
    model.late = nn.Linear(4, 4)
    y: Tensor = model.late(model.layer(x))
    return y.sum()


def puts_into_the_table(model: Any, x: Tensor) -> Tensor:
    model._buffers["seen"] = model._buffers["seen"] + 1
    y: Tensor = model.layer(x) * model.seen
    return y.sum()


def drops(model: Any, x: Tensor) -> Tensor:
    y: Tensor = (model.layer(x) * model.seen).sum()
    del model.seen
    return y


def swaps(model: Any, x: Tensor) -> Tensor:
    model.seen, model.other = model.other, model.seen
    y: Tensor = model.layer(x) * model.seen
    return y.sum()


def makes_a_sparse_tensor(model: Any, x: Tensor) -> Tensor:
    made = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.ones(2), (8, 8))
    return torch.sparse.mm(made, model.layer(x)).sum()


def has_a_sparse_buffer(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model.graph @ model.layer(x)
    return y.sum()


def reads_a_sparse_global(model: Any, x: Tensor) -> Tensor:
    return torch.sparse.mm(SPARSE, model.layer(x)).sum()


#: forward -> words of the refusal
REFUSED: dict[Callable[..., Any], str] = {
    registers: "makes table, and a program has the parameters, buffers and submodules that the model had",
    registers_and_assigns: "makes table, and a program has",
    makes_a_layer: "makes late",
    puts_into_the_table: "puts another tensor in seen",
    drops: "removes seen",
    swaps: "assigns to a buffer a tensor that is another buffer",
    makes_a_sparse_tensor: r"is a sparse_coo tensor \[8, 8\], and programs have dense ones",
    has_a_sparse_buffer: "graph is a sparse_coo tensor",
    reads_a_sparse_global: "is a sparse_coo tensor",
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_what_a_program_would_not_do_is_refused(function: Callable[..., Any]) -> None:
    model = model_of(function, seen=torch.ones(4), other=torch.zeros(4), graph=SPARSE)
    names = [name for name, _ in (*model.named_buffers(), *model.named_modules())]
    with pytest.raises(CaptureError, match=REFUSED[function]):
        capture(model, (X,))
    assert [name for name, _ in (*model.named_buffers(), *model.named_modules())] == names
