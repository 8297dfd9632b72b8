"""Every bad input of the first issue: an error of our own tree that says what was given, what is required, what to do.

The sites of the messages differ; `says` checks that all three parts are there, in one place for one kind of mistake.
"""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from typer.testing import CliRunner

import autoparallel
from autoparallel import Cluster, Plan
from autoparallel.api import plan
from autoparallel.cli import app
from autoparallel.errors import (
    AutoparallelError,
    CaptureError,
    ClusterError,
    InfeasibleError,
    InputError,
    MeshError,
    PinError,
    PlanError,
    SearchError,
)
from autoparallel.models import load_model
from autoparallel.runtime.mesh import cluster_of
from tests.models import CASES
from tests.ranks import mesh_of


def planned(case_name: str = "mlp", mesh_shape: tuple[int, ...] | None = (2, 2), **options: Any) -> Plan:
    case = CASES[case_name]
    args, kwargs = case.inputs(8)
    return plan(case.build(), Cluster.load("local-cpu", num_devices=torch.Size(mesh_shape or (4,)).numel()),
                example_inputs=args, example_kwargs=kwargs, mesh_shape=mesh_shape, **options)


def says(error: type[AutoparallelError], *parts: str, of: Callable[[], Any]) -> str:
    """`of()` raises this error and its message has all the parts."""
    with pytest.raises(error) as caught:
        of()
    message = str(caught.value)
    missing = [part for part in parts if part not in message]
    assert not missing, f"{missing} not in: {message}"
    return message


def message_of(call: Callable[[], Any]) -> str:
    """For jobs on ranks: type and message of our own error, or what came instead."""
    try:
        call()
    except AutoparallelError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"not ours: {type(error).__name__}: {error}"
    return "no error"


# ---------------------------------------------------------------------------------------------------------- the model


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        if y.mean() > 0:  # this line
            return y
        return -y


class AsksForANumber(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()  # that line


class HasABranchInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Branches()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class WritesToItsInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2


class WritesToAView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[0] = 0
        return x * 2


class MeanOfSquares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


class MakesASparseTensor(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to_sparse()  # here


def plan_of(model: nn.Module) -> Plan:
    return plan(model, Cluster.load("local-cpu", num_devices=2), example_inputs=(torch.ones(4, 4),), mesh_shape=(2,))


@pytest.mark.parametrize("model", [Branches(), HasABranchInside()], ids=["branch", "inner"])
def test_a_branch_on_data_names_the_users_line(model: nn.Module) -> None:
    """The file, the line and its text, however deep in the model."""
    number = 1 + Path(__file__).read_text().splitlines().index("        if y.mean() > 0:  # this line")
    says(CaptureError, "decides by the values of a tensor", f"{__file__}:{number} in forward: if y.mean() > 0:",
         "shapes and Python values only", "torch.where(condition, a, b)", of=lambda: plan_of(model))


def test_a_number_out_of_data_is_refused() -> None:
    message = says(CaptureError, of=lambda: plan_of(AsksForANumber()))
    assert "that line" in message or ".item()" in message or "_local_scalar_dense" in message, message


def test_sparse_tensors_are_refused() -> None:
    says(CaptureError, "a sparse tensor", f'"{__file__}"', "x.to_sparse()  # here", "keep it dense",
         of=lambda: plan_of(MakesASparseTensor()))


@pytest.mark.parametrize("backward", [
    lambda f, x: f(x).sum().backward(),
    lambda f, x: f(x).sum().backward(inputs=[f.weight]),
    lambda f, x: torch.autograd.backward([f(x).sum()]),
    lambda f, x: called_backward(f(x).sum()),
])
def test_backward_inside_a_model_is_refused(backward: Any) -> None:
    """Gradients that it left were not those of the original."""
    model = Outer(lambda f, x: (backward(f, x), f(x))[1])
    says(CaptureError, "calls backward() as it runs", f"at {__file__}:", "torch.autograd.grad(outputs, inputs)",
         of=lambda: plan_of(model))


def test_other_threads_call_backward_while_a_model_is_traced() -> None:
    gradients: list[Tensor] = []

    def other() -> None:
        x = torch.ones(3, requires_grad=True)
        (x * 2).sum().backward()
        gradients.extend([x.grad] if x.grad is not None else [])

    def run(f: nn.Module, x: Tensor) -> Tensor:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return f(x)

    assert plan_of(Outer(run)).prediction.step_s > 0
    assert [g.tolist() for g in gradients] == [[2.0] * 3] * len(gradients) and gradients


class OwnGradient(torch.autograd.Function):
    """Its forward makes the gradient, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            (own**3).sum().backward()
        ctx.save_for_backward(own.grad)
        return (own**3).detach().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * gradient


def test_a_function_may_call_backward_as_it_runs() -> None:
    assert plan_of(Outer(lambda f, x: OwnGradient.apply(f(x)))).prediction.step_s > 0


class Bags(nn.Module):
    """As facebookresearch/dlrm's tables."""

    def __init__(self, tables: nn.Module, frozen: bool = False) -> None:
        super().__init__()
        self.tables, self.linear = nn.ModuleList([tables.requires_grad_(not frozen)]), nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        read = self.tables[0](ids)
        return self.linear(read[:, 0] if read.dim() == 3 else read).sum()


class Gathers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(16, 4))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table.gather(0, ids, sparse_grad=True).sum()


@pytest.mark.parametrize(("model", "parts"), [
    (Bags(nn.EmbeddingBag(16, 8, mode="sum", sparse=True)), ("in tables.0", "model.tables.0.sparse = False")),
    (Bags(nn.Embedding(16, 8, sparse=True)), ("in tables.0", "Write sparse=False (of torch's", "Adam, Adagrad")),
    (Gathers(), ("Write sparse_grad=False, and", "sparse_grad=True).sum()")),
])
def test_sparse_gradients_are_refused(model: nn.Module, parts: tuple[str, ...]) -> None:
    """They ran forward, and failed in backward."""
    machine = Cluster.load("local-cpu", num_devices=2)
    says(CaptureError, "makes a sparse gradient", *parts, of=lambda: plan(
        model, machine, example_inputs=(torch.zeros(8, 4, dtype=torch.int64),), mesh_shape=(2,)))


def test_frozen_tables_may_be_sparse() -> None:
    machine = Cluster.load("local-cpu", num_devices=2)
    for table in (nn.EmbeddingBag(16, 8, sparse=True), nn.Embedding(16, 8, sparse=True)):
        made = plan(Bags(table, frozen=True), machine, example_inputs=(torch.zeros(8, 4, dtype=torch.int64),),
                    mesh_shape=(2,))
        assert made.prediction.step_s > 0


def test_a_call_that_the_model_does_not_take_names_what_it_takes() -> None:
    """And no line of Python's own."""
    machine = Cluster.load("local-cpu", num_devices=2)
    message = says(CaptureError, "Linear cannot be called so: missing a required argument: 'input'", "takes (input",
                   of=lambda: plan(nn.Linear(2, 2), machine, mesh_shape=(2,)))
    assert ".py:" not in message


def called_backward(loss: Tensor, run: Any = torch.autograd.backward) -> None:
    run(loss)


class Outer(nn.Module):
    """Runs a function of its input and of a layer deep inside, and of that only."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Inner(function)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


class Inner(nn.Module):
    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear, x)  # the function's line


F = nn.functional
TYPES_REFUSED = {
    "linear": (lambda f, x: f(x.long()), "float32, float32, float32", "torch.float32"),
    "matmul": (lambda f, x: f(x) @ x.double(), "float32, float32", "torch.float32"),
    "half": (lambda f, x: f(x) @ x.half(), "float32, float32", "torch.float32"),
    "addmm": (lambda f, x: torch.addmm(x, f(x), x.int()), "float32, float32, float32", "torch.float32"),
    "softmax": (lambda f, x: f(x) + x.long().softmax(-1), "(float32)", "torch.float32"),
    "gelu": (lambda f, x: f(x) + F.gelu(x.long()), "(float32)", "torch.float32"),
    "loss": (lambda f, x: F.cross_entropy(f(x), torch.zeros(4, dtype=torch.int32)), "(float32, int64)", "torch.int64"),
    "layer_norm": (lambda f, x: F.layer_norm(f(x), (4,), torch.ones(4).double()), "float32, float32", "torch.float32"),
    "group_norm": (lambda f, x: f(F.group_norm(x, 2, x[0].half())), "float32, float32", "torch.float32"),
    "index_add": (lambda f, x: f(x).index_add(0, torch.tensor([0]), x[:1].double()), "float32, int64, float32",
                  "torch.float32"),
    "index": (lambda f, x: f(x).index_add(0, torch.tensor([0], dtype=torch.int16), x[:1]), "float32, int64, float32",
              "torch.int64"),
    "bitwise": (lambda f, x: f(x) + ((x > 0) & x), "bool, bool", "torch.bool"),
}


@pytest.mark.parametrize("name", TYPES_REFUSED)
def test_types_that_the_model_itself_does_not_take(name: str) -> None:
    """Where torch raises, naming module and line (a trace of tensors without data runs through them)."""
    function, wanted, write = TYPES_REFUSED[name]
    model = Outer(function)
    with pytest.raises(RuntimeError):
        model(torch.rand(4, 4))
    message = says(CaptureError, __file__, "in layers.0", "This call: (float32[4, 4])",
                   of=lambda: plan_of(model))
    assert wanted in message and f"Write x.to({write})" in message and "torch says: " in message, message


TYPES_TAKEN = {
    "a table's rows": (lambda f, x: f(F.embedding(torch.zeros(4, dtype=torch.int32), x)), None),
    "products of integers": (lambda f, x: f(x) + x.long() @ x.long(), None),
    "promotion": (lambda f, x: f(x) + x.half() * x.long() + (x > 0), None),
    "a norm's parameters": (lambda f, x: F.layer_norm(f(x).bfloat16(), (4,), torch.ones(4)), None),
    "autocast": (lambda f, x: F.grid_sample(f(x)[None, None], x[None, :, None, :2], align_corners=True),
                 torch.bfloat16),
    "the only row": (lambda f, x: f(x[:1])[torch.zeros(1, dtype=torch.int64)], None),
    "quotients": (lambda f, x: f(x) + x.long() // (x.long() + 1) + x.long() % (x.long() + 2), None),
    **{f"{name} of {low}": (lambda f, x, low=low, mask=mask: f(x) + mask(x.double(), low).float(), None)
       for low in (-torch.finfo(torch.float64).max, torch.finfo(torch.float64).max)
       for name, mask in {
           "masked_fill": lambda x, low: x.masked_fill(x > 0, low),
           "where": lambda x, low: torch.where(x > 0, x, low),
           "full": lambda x, low: torch.full((4, 4), low, dtype=torch.float64).triu(1) + x,
           "clamp": lambda x, low: x.clamp(min=low) * (x > 0),
           "pad": lambda x, low: F.pad(x, (1, 1), value=low)[:, 1:-1] * (x > 0),
           "index_fill": lambda x, low: x.index_fill(1, torch.tensor([0, 1]), low)}.items()},
    "masks": (lambda f, x: f(x).masked_fill(x > 0, 0.0) + torch.where(x > 0, f(x), 0), None),
    "an attention's mask": (lambda f, x: F.scaled_dot_product_attention(*[f(x)[None, None]] * 3, x[None] > 2), None),
}


@pytest.mark.parametrize("name", TYPES_TAKEN)
def test_types_that_the_model_takes(name: str) -> None:
    """Other types than one are no reason to refuse."""
    function, low = TYPES_TAKEN[name]
    model = Outer(function)
    with torch.autocast("cpu", dtype=low or torch.bfloat16, enabled=low is not None):
        model(torch.ones(4, 4))
        assert plan_of(model).prediction.step_s > 0


@pytest.mark.parametrize(("function", "parts"), [
    (lambda f, x: {}["missing"], ("KeyError: 'missing'",)),
    (lambda f, x: f(x)[12], ("IndexError: index 12 is out of bounds",)),
    (lambda f, x: f(x) @ torch.ones(7, 7), ("RuntimeError: a and b must have same reduction dim",)),
    (lambda f, x: f(x, x), ("TypeError: ", "positional argument")),
    (lambda f, x: f(x[:, :3]), ("RuntimeError: ", "in layers.0.linear (Linear)")),
    (lambda f, x: f(x).nothing, ("AttributeError: ", "'nothing'")),
])
def test_a_forward_that_fails_names_module_and_line(function: Any, parts: tuple[str, ...]) -> None:
    says(CaptureError, "Outer could not be traced: ", "in layers.0", f"at {__file__}", "a call that the model itself",
         "This call: (float32[4, 4])", *parts, of=lambda: plan_of(Outer(function)))


@pytest.mark.parametrize("model", [WritesToItsInput(), WritesToAView()], ids=["input", "view"])
def test_writing_to_an_input_is_refused(model: nn.Module) -> None:
    """With what to write instead; and the caller's tensor is left as it was."""
    x = torch.ones(4, 4)
    machine = Cluster.load("local-cpu", num_devices=2)
    message = says(CaptureError, of=lambda: plan(model, machine, example_inputs=(x,), mesh_shape=(2,)))
    assert "in place" in message and ("clone()" in message or "out-of-place" in message), message
    assert torch.equal(x, torch.ones(4, 4))


# ----------------------------------------------------------------------------------------------------- group and mesh


def test_no_process_group() -> None:
    says(MeshError, "no process group", "torchrun", "autoparallel.init()",
         of=lambda: autoparallel.compile(nn.ReLU(), 4))


def meshes_of_other_sizes() -> list[str]:
    from torch.distributed.device_mesh import DeviceMesh

    part = DeviceMesh("cpu", [[0], [1]])
    machine = Cluster.load("local-cpu", num_devices=2)
    return [message_of(lambda: autoparallel.compile(nn.Linear(2, 2), part)),
            message_of(lambda: autoparallel.compile(nn.Linear(2, 2), 3)),
            message_of(lambda: cluster_of(mesh_of(4), machine)),
            message_of(lambda: autoparallel.compile(nn.Linear(2, 2), mesh_of(4), cluster="local-gpu"))]


def test_a_mesh_of_another_size_than_the_world(ranks: Any) -> None:
    for smaller, more, machine, unknown in ranks(4).run(meshes_of_other_sizes):
        assert "MeshError" in smaller and "2 devices (2, 1)" in smaller and "the world 4 ranks" in smaller
        assert "every rank must be on the mesh" in smaller
        assert "MeshError: 3 devices were asked for and the world has 4 ranks: start 3 processes" in more
        assert "MeshError: the cluster has 2 devices and the mesh 4" in machine
        assert "ClusterError" in unknown and "local-gpu" in unknown and "local-cpu" in unknown


# ------------------------------------------------------------------------------------------------------------- inputs


def other_calls() -> dict[str, Any]:
    """A model compiled for a batch of 8, called in other forms; and parameters asked for too early."""
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
    single = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
    single.load_state_dict(model.state_dict())
    early = autoparallel.compile(model, mesh_of(4))
    found: dict[str, Any] = {
        "parameters": message_of(lambda: list(early.parameters())),
        "state": message_of(early.state_dict),
        "plan": message_of(lambda: early.plan),
    }
    parallel = autoparallel.compile(model, mesh_of(4), example_inputs=(torch.ones(8, 8),), baseline="fsdp")
    before = [(id(p), p._local_tensor.data_ptr(), p.placements) for p in parallel.parameters()]
    errors = []
    for shape in ((8, 8), (16, 8), (3, 8), (2, 5, 8)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        single.zero_grad()
        parallel.zero_grad()
        expected, actual = single(x), parallel(x)
        actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
        expected.square().sum().backward()
        actual.square().sum().backward()
        errors.append(float((actual - expected).detach().abs().max()))
        pairs = zip(single.parameters(), parallel.parameters(), strict=True)
        errors += [float((q.grad.full_tensor() - p.grad).abs().max() / p.grad.abs().max()) for p, q in pairs]
    found["errors"] = errors
    found["in place"] = before == [(id(p), p._local_tensor.data_ptr(), p.placements) for p in parallel.parameters()]
    found["structure"] = message_of(lambda: parallel(torch.ones(8, 8), torch.ones(8, 8)))
    found["keyword"] = message_of(lambda: parallel(y=torch.ones(8, 8)))
    found["wrong shape"] = message_of(lambda: parallel(torch.ones(8, 9)))
    found["step"] = message_of(lambda: parallel.step(torch.ones(8, 8)))
    return found


def test_other_calls_are_traced_anew_or_refused(ranks: Any) -> None:
    """Other shapes: the right result from the same parameters, where they are. What the model itself does not take is
    an error of ours that carries the model's own."""
    for found in ranks(4).run(other_calls):
        for early in ("parameters", "state", "plan"):
            assert found[early].startswith("InputError: the model has not been traced yet"), found[early]
            assert "call it once, or give example_inputs" in found[early]
        assert max(found["errors"]) < 1e-5 and found["in place"]
        assert "CaptureError" in found["structure"] and "positional argument" in found["structure"]
        assert "This call: (float32[8, 8], float32[8, 8])" in found["structure"]
        assert "Traced before: (float32[8, 8]); (float32[16, 8])" in found["structure"], found["structure"]
        assert "CaptureError" in found["keyword"] and "'input'" in found["keyword"]
        assert "CaptureError" in found["wrong shape"] and "9" in found["wrong shape"]
        assert "InputError: step needs a scalar loss" in found["step"] and "return the loss" in found["step"]


def calls_of_other_types() -> list[str]:
    """Integers for a linear layer, in each way to compile and call; then the right call."""
    model, x = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)), torch.ones(8, 8)
    parallel = autoparallel.compile(model, mesh_of(2), example_inputs=(x,), baseline="tensor_parallel")
    wrong = x.long()
    return [message_of(lambda: parallel(wrong)),
            message_of(lambda: parallel.step(wrong)),
            message_of(lambda: parallel.shard_batch((wrong,))),
            message_of(lambda: autoparallel.compile(model, mesh_of(2), example_inputs=(wrong,))),
            message_of(lambda: autoparallel.compile(model, 2, example_inputs=(wrong,))),
            message_of(lambda: autoparallel.compile(model, mesh_of(2))(wrong)),
            message_of(lambda: parallel(x))]


def test_calls_of_other_types_are_refused_before_they_run(ranks: Any) -> None:
    """On every rank, and the process groups stay as they are (the ranks failed in the product, and closed them)."""
    for *refused, after in ranks(2).run(calls_of_other_types):
        for said in refused:
            assert said.startswith("CaptureError: aten.linear.default does not take tensors of these types: int64[8, 8]"
                                   ", float32[12, 8], float32[12]"), said
            assert "in 0\n" in said and "Write x.to(torch.float32)" in said and "This call: (int64[8, 8])" in said
        assert after == "no error"


def models_on_ranks_already() -> list[str]:
    """Given by themselves and as a part; then one that is not."""
    from torch.distributed.fsdp import fully_shard

    mesh, x = mesh_of(2), torch.ones(8, 8)
    ours = autoparallel.compile(nn.Linear(8, 8), mesh, example_inputs=(x,))
    ddp, fsdp = nn.parallel.DistributedDataParallel(nn.Linear(8, 8)), fully_shard(nn.Linear(8, 8), mesh=mesh)
    return [message_of(lambda m=model: autoparallel.compile(m, mesh, example_inputs=(x,)))
            for model in (ours, nn.Sequential(ours), ddp, fsdp, nn.Sequential(nn.Linear(8, 8)))]


def test_models_that_are_on_several_ranks_already(ranks: Any) -> None:
    """A trace ran their collectives, or what closes process groups."""
    for own, held, ddp, fsdp, after in ranks(2).run(models_on_ranks_already):
        assert own == held and own.startswith("CaptureError: the model has a ParallelModule, which is on several ranks")
        assert ddp.startswith("CaptureError: the model has a DistributedDataParallel") and "was made of" in ddp
        assert "CaptureError: parameters of the model are DTensors already (weight, bias)" in fsdp, fsdp
        assert "before fully_shard" in fsdp and after == "no error"


def edited_plans() -> list[str]:
    x = torch.ones(8, 8)
    plan = autoparallel.compile(nn.Linear(8, 8), mesh_of(2), example_inputs=(x,)).plan
    blocks = dataclasses.replace(plan.hybrid, recompute="full", recompute_blocks=("layers.7",))
    wrong = [dataclasses.replace(plan, mesh_shape=(3,)), dataclasses.replace(plan, hybrid=blocks), plan]
    return [message_of(lambda p=p: autoparallel.compile(nn.Linear(8, 8), 2, example_inputs=(x,), plan=p))
            for p in wrong]


def test_plans_for_another_count_of_devices_or_other_blocks(ranks: Any) -> None:
    for count, blocks, after in ranks(2).run(edited_plans):
        assert count.startswith("MeshError: the plan is for a mesh of (3,), and 2 devices were asked for: start 3")
        assert blocks.startswith("PlanError: the plan recomputes blocks ['layers.7'], which the model has not")
        assert after == "no error"


def conversions() -> list[Any]:
    """To other types, after the first call and before it."""
    x = torch.ones(8, 8)
    parallel = autoparallel.compile(nn.Linear(8, 8), mesh_of(2), example_inputs=(x,))
    late = autoparallel.compile(nn.Linear(8, 8), mesh_of(2))
    return [message_of(lambda: parallel.half()), message_of(lambda: parallel.to("meta")),
            message_of(lambda: parallel.to("cpu").float()), message_of(lambda: parallel(x)),
            late.bfloat16()(x.bfloat16()).dtype, [p.dtype for p in late.parameters()]]


def test_a_parallel_module_is_converted_before_its_first_call_only(ranks: Any) -> None:
    """After it, ranks failed in the next call, and before it nothing was converted."""
    for half, meta, same, after, made, parameters in ranks(2).run(conversions):
        assert half.startswith("InputError: weight is torch.float32 on cpu, and cannot become torch.float16 on cpu")
        assert "Convert the model before it is called" in half and "init_weights()" in meta
        assert same == after == "no error"
        assert made == torch.bfloat16 and parameters == [torch.bfloat16] * 2


class Weird(nn.Module):
    """A parameter of its own and no way to initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def meta_parameters() -> list[str]:
    x = torch.ones(4, 8)
    with torch.device("meta"):
        model, weird = nn.Linear(8, 8), Weird()
    parallel = autoparallel.compile(model, mesh_of(4), example_inputs=(x,))
    odd = autoparallel.compile(weird, mesh_of(4), example_inputs=(x,))
    state = nn.Linear(8, 8).state_dict()
    return [
        message_of(lambda: parallel(x)),
        message_of(lambda: odd.init_weights()),
        message_of(lambda: parallel.load_state_dict({"weight": state["weight"]})),
        message_of(lambda: parallel.load_state_dict({**state, "other": state["bias"]})),
        message_of(lambda: parallel.load_state_dict({**state, "bias": torch.ones(9)})),
        message_of(lambda: (parallel.load_state_dict(state), parallel(x))),
        message_of(lambda: parallel(x[:2])),
    ]


def test_meta_parameters_want_values(ranks: Any) -> None:
    for call, weird, missing, unexpected, shape, right, again in ranks(4).run(meta_parameters):
        assert re.match(r"InputError: (weight|bias) is still on the meta device: call init_weights\(\) or load", call)
        assert "Weird" in weird and "reset_parameters" in weird and "load a state dict instead" in weird
        assert "missing ['bias'], unexpected []" in missing and "strict=False" in missing
        assert "missing [], unexpected ['other']" in unexpected
        assert "bias has shape [8], the value given [9]" in shape
        assert right == "no error" and again == "no error", "another batch is traced anew, on meta again"


# --------------------------------------------------------------------------------------------------------------- pins


@pytest.mark.parametrize(("pins", "parts"), [
    ({"up.weigth": Shard(0)}, ("'up.weigth' names no parameter, input or module", "did you mean", "'up.weight'")),
    ({"up.weight": Shard(0)}, ("gives 1 placements", "2 axes ['axis0', 'axis1']", "one per axis, or a dict")),
    ({"up.weight": [Shard(0)] * 3}, ("gives 3 placements", "2 axes")),
    ({"up.weight": {"tp": Shard(0)}}, ("names mesh axes ['tp']", "the mesh has ['axis0', 'axis1']")),
    ({"up.bias": (Shard(1), Replicate())}, ("up.bias is float32[64]", "no dim 1")),
    ({"up.weight": (Partial(), Replicate())}, ("up.weight (float32[64, 32]) cannot be (Partial(), Replicate())",
                                                   "on one axis it can be Replicate(), Shard(0), Shard(1) (a dim")),
    ({"up.weight": {"axis0": Shard(-2)}}, ("float32[64, 32]", "count from the front", "write Shard(0)")),
    ({"up.weight": (Partial("avg"), Replicate())}, ("'up.weight'", "only Partial('sum')")),
    ({"up.weight": {"axis0": "columns"}}, ("'up.weight'", "columns")),
])
def test_pins_that_cannot_hold(pins: dict[str, Any], parts: tuple[str, ...]) -> None:
    says(PinError, *parts, of=lambda: planned(pins=pins))


def test_pins_that_contradict_each_other() -> None:
    says(PinError, "up.weight", of=lambda: planned(pins={"up.*": {"axis0": Shard(0)}, "up.weight": {
        "axis0": Replicate()}}))


def test_a_shard_that_leaves_ranks_without_elements() -> None:
    """Ten classes on a mesh of (2, 8)."""
    says(PinError, "head.bias", "float32[10]", "a dim must leave every rank at least one element",
         of=lambda: planned("transformer_encoder", (2, 8), pins={"head.bias": {"axis1": Shard(0)}}))


# -------------------------------------------------------------------------------------------------------------- plans


def test_plan_files_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    says(PlanError, "cannot read the plan file", str(file), "No such file", of=lambda: Plan.load(file))
    data = json.loads(planned().to_json())
    without = {k: v for k, v in data.items() if k != "strategies"}
    for text, parts in (
        ("not { json", (str(file), "is not JSON")),
        ("[]", (str(file), "plan format version None")),
        (json.dumps({**data, "version": 1}), ("plan format version 1", "reads 2", "plan again")),
        (json.dumps(without), ("is not a plan of format 2", "strategies")),
        (json.dumps({**data, "evidence": {"solver": "x"}}), ("is not a plan of format 2",)),
        (json.dumps({**data, "mesh_shape": 4}), ("is not a plan of format 2",)),
        (json.dumps({**data, "strategies": []}), ("is not a plan of format 2",)),
        (json.dumps({**data, "mesh_shape": [4]}), ("mesh_shape (4,) and axis_names", "no mesh")),
        (json.dumps({**data, "mesh_shape": ["2", 2]}), ("mesh_shape[0] is '2', not int",)),
        (json.dumps({**data, "strategies": {"x": [1]}}), ("strategies['x'][0] is 1, not str",)),
        (json.dumps({**data, "hybrid": {**data["hybrid"], "micro_batches": "2"}}), ("micro_batches is '2', not int",)),
        (json.dumps({**data, "hybrid": {**data["hybrid"], "cut": []}}), ("hybrid has a key 'cut' (is it 'cuts'?)",)),
        (json.dumps({**data, "prediction": {**data["prediction"], "forward_s": None}}), ("forward_s is None",)),
        ("[" * 5000, (str(file), "is not JSON")),
    ):
        file.write_text(text)
        says(PlanError, *parts, of=lambda: Plan.load(file))
    for path in (None, 3, b"plan.json", "a\0b"):
        says(PlanError, "cannot read the plan file", of=lambda p=path: Plan.load(p))  # type: ignore[misc]
        says(PlanError, "cannot write the file", of=lambda p=path: planned().save(p))  # type: ignore[misc]
    says(PlanError, "plan is None", "Plan.load(path)", of=lambda: Plan.from_json(None))  # type: ignore[arg-type]


def wrong_plans(wrong: list[Plan]) -> list[str]:
    case = CASES["mlp"]
    args, _ = case.inputs(8)
    mesh = mesh_of(2, 2, axes=("axis0", "axis1"))
    return [message_of(lambda p=p: autoparallel.compile(case.build(), mesh, example_inputs=args, plan=p))  # type: ignore[misc]
            for p in wrong]


def test_plans_of_others(ranks: Any) -> None:
    """Of another mesh, model, batch; edited to what is not there or does not fit."""
    right = planned()

    def edited(**strategies: tuple[str, ...]) -> Plan:
        return dataclasses.replace(right, strategies={**right.strategies, **strategies})

    case = CASES["mlp"]
    machine = Cluster.load("local-cpu", num_devices=4)
    batch = plan(case.build(), machine, example_inputs=case.inputs(16)[0], mesh_shape=(2, 2))
    wrong = [planned(mesh_shape=(4,)), planned("llama"), batch, edited(linear=("b0", "wat")), edited(linear=("b0",))]
    for mesh, model, other_batch, name, count in ranks(4).run(wrong_plans, wrong):
        assert "PlanError: the plan is for a mesh of shape (4,), this mesh has (2, 2)" in mesh
        for said in (model, other_batch):
            assert "PlanError: the plan belongs to another program" in said
            assert "the same model, mode, shapes and dtypes are required" in said
        assert "PlanError: 'linear' has no strategy 'wat'; it has ['repeat'" in name
        assert "PlanError" in count and "linear" in count


# ----------------------------------------------------------------------------------------------------- limits and names


@pytest.mark.slow
def test_item_19_a_memory_limit_too_small_for_the_options_says_what_fits_without_them() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x).square().mean()

    x, options = torch.randn(4096, 1024), {"mesh_shape": (8,), "memory_limit_bytes": 28e6, "time_limit_s": 2.0}
    message = says(InfeasibleError, "GiB), use more devices", "This is with baseline='ddp'. By joint=True, without, ",
                   of=lambda: autoparallel.plan(Loss(), "h100-sxm", example_inputs=(x,), baseline="ddp", **options))
    found = re.search(r"without, ([\d.]+) GiB a device are enough: pipeline_stages=(\d+), micro_batches=(\d+), "
                      r"zero_stage=(\d), recompute='(\w+)'", message)
    assert found is not None and float(found[1]) * 2**30 <= 28e6
    stages, micro_batches, zero_stage = map(int, found.groups()[1:4])
    plan = autoparallel.plan(Loss(), "h100-sxm", example_inputs=(x,), joint=True, pipeline_stages=stages,
                             micro_batches=micro_batches, zero_stage=zero_stage, recompute=found[5], **options)
    assert plan.prediction.peak_bytes <= 28e6


def test_a_memory_limit_too_small_says_which_would_do() -> None:
    """And the one that it names does."""
    message = says(InfeasibleError, "no plan fits in 1,000 bytes", "more than the limit", "use more devices",
                   of=lambda: planned(memory_limit_bytes=1000))
    with pytest.raises(InfeasibleError) as caught:
        planned(memory_limit_bytes=1000)
    needed = caught.value.needed_bytes  # type: ignore[attr-defined]
    assert f"needs {needed:,.0f} bytes, {needed - 1000:,.0f} more" in message
    assert f"Raise the limit to {needed:,.0f} bytes" in message
    assert planned(memory_limit_bytes=needed).prediction.peak_bytes <= needed
    with pytest.raises(InfeasibleError):
        planned(memory_limit_bytes=needed * 0.5)


def test_a_memory_limit_that_pins_exceed_names_them() -> None:
    """Only the pin that keeps a parameter whole, and what would do without it."""
    with pytest.raises(InfeasibleError) as caught:
        planned(memory_limit_bytes=1000, micro_batches=1)
    least = caught.value.needed_bytes  # type: ignore[attr-defined]
    pins = {"x": (Shard(0), Shard(0)), "up.weight": (Replicate(), Replicate())}
    message = says(InfeasibleError, "With the pins 'up.weight' every plan needs at least", "GiB more than the limit",
                   "GiB without 'up.weight'", of=lambda: planned(memory_limit_bytes=least, pins=pins, micro_batches=1))
    assert "'x'" not in message


@pytest.mark.parametrize(("call", "error", "parts"), [
    (lambda: Cluster.load("h200-pcie"), ClusterError, ("h200-pcie", "h100-sxm", "local-cpu")),
    (lambda: planned(search="annealing"), SearchError, ("annealing", "ilp", "recursive", "exact")),
    (lambda: planned(baseline="megatron"), PlanError, ("'megatron'", "tensor_parallel", "sequence_parallel")),
    (lambda: planned(optimizer="shampoo"), ClusterError, ("shampoo", "adamw", "sgd")),
    (lambda: planned(recompute="some"), PlanError, ("unknown recompute 'some'", "'full'", "'auto'")),
    (lambda: planned(joint=True, schedule="zb"), PlanError, ("unknown schedule 'zb'", "zero_bubble")),
    (lambda: planned(zero_stage=True), PlanError, ("unknown zero_stage True", "[0, 1, 2, 3]")),
    (lambda: planned(micro_batch=2), PlanError, ("unknown option 'micro_batch'", "['micro_batches']")),
    (lambda: planned(loss_fn=nn.MSELoss()), PlanError, ("unknown option 'loss_fn'", "'pins'", "'reduce_dtype'")),
])
def test_unknown_names_list_the_known(call: Callable[[], Any], error: type[AutoparallelError], parts: Any) -> None:
    says(error, *parts, of=call)


@pytest.mark.parametrize(("options", "error", "parts"), [
    ({"memory_limit_bytes": -5}, PlanError, ("memory_limit_bytes is -5", "bytes per device as a number, 0 or more")),
    ({"memory_limit_bytes": float("nan")}, PlanError, ("memory_limit_bytes is nan", "0 or more")),
    ({"memory_limit_bytes": "70GiB"}, PlanError, ("memory_limit_bytes is '70GiB'", "70e9; inf: no limit")),
    ({"time_limit_s": -1}, PlanError, ("time_limit_s is -1", "seconds as a number, 0 or more")),
    ({"micro_batches": 0}, PlanError, ("micro_batches is 0", "a whole number, 1 or more")),
    ({"micro_batches": 2.0}, PlanError, ("micro_batches is 2.0", "a whole number")),
    ({"joint": True, "micro_batches": 0}, PlanError, ("micro_batches is 0", "1 or more")),
    ({"pipeline_stages": -2}, PlanError, ("pipeline_stages is -2", "a whole number, 1 or more")),
    ({"stage_replicas": 2}, PlanError, ("stage_replicas is 2", "for example (1, 3)")),
    ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)}, PlanError, ("type SGD", "'adamw'")),
    ({"pins": ["up.weight"]}, PinError, ("pins is ['up.weight']", "by name pattern", "Replicate()")),
    ({"pins": {0: Shard(0)}}, PinError, ("by name pattern",)),
    ({"mesh_shape": (0,)}, MeshError, ("mesh_shape is (0,)", "each 1 or more, for example (2, 4)")),
    ({"mesh_shape": 4}, MeshError, ("mesh_shape is 4", "sizes of the axes")),
    ({"mesh_shape": ()}, MeshError, ("mesh_shape is ()", "sizes of the axes")),
    ({"mesh_shape": (4, 2)}, ClusterError, ("a mesh of (4, 2) needs 8 devices, the cluster has 4", "num_devices=8")),
    ({"axis_names": "ab"}, MeshError, ("axis_names is 'ab'", "('data', 'model')")),
    ({"axis_names": ("a", "a")}, MeshError, ("axis_names ('a', 'a')", "twice")),
    ({"axis_names": ("a",), "pipeline_stages": 2, "micro_batches": 2}, MeshError, ("1 axis names", "(2, 2)")),
    ({"axis_names": ("a", "b", "c"), "mesh_shape": None}, MeshError, ("4 devices are not cut into 3 axes",)),
    ({"cluster": 4}, ClusterError, ("type int", "h100-sxm", "TOML file")),
    ({"example_inputs": torch.ones(8, 32)}, InputError, ("type Tensor", "(x,) for one argument x")),
    ({"example_inputs": {"x": torch.ones(8, 32)}}, InputError, ("a mapping", "as example_kwargs")),
    ({"example_kwargs": [torch.ones(8, 32)]}, InputError, ("type list", "a dict of the call's keyword arguments")),
    ({"example_inputs": None}, CaptureError, ("missing a required argument: 'x'", "takes (x")),
    ({"example_inputs": (torch.ones(8, 32).to_sparse(),)}, InputError, ("a sparse_coo tensor", "x.to_dense()")),
    ({"example_inputs": (torch.nested.nested_tensor([torch.ones(8, 32)]),)}, InputError, ("a nested tensor", "a mask")),
    ({"axis_names": 3}, MeshError, ("axis_names is 3", "('data', 'model')")),
    ({"joint": "no"}, PlanError, ("joint is 'no'", "True or False")),
    ({"memory_limit_bytes": 10**400}, PlanError, ("memory_limit_bytes is of type int", "bytes per device")),
    ({"model": torch.jit.script(nn.Linear(32, 32))}, CaptureError, ("torch.jit", "the original module")),
    ({"model": torch.relu}, CaptureError, ("relu", "an instance of torch.nn.Module", "whose forward calls it")),
])
def test_options_and_arguments_of_other_kinds(options: dict[str, Any], error: type[AutoparallelError], parts: Any
                                              ) -> None:
    """Each named, with what it is and what to write; before anything is traced."""
    case = CASES["mlp"]
    given = {"model": case.build(), "cluster": Cluster.load("local-cpu", num_devices=4),
             "example_inputs": case.inputs(8)[0], "mesh_shape": (2, 2), **options}
    says(error, *parts, of=lambda: plan(given.pop("model"), given.pop("cluster"), **given))


def keywords_of_plan() -> list[str]:
    """With a mesh and with a count of devices, before and after tracing."""
    x, names = torch.ones(4, 8), [{"joint": True}, {"mesh_shape": (2,)}, {"axis_names": ("data",)}]
    made = [lambda m=mesh, e=example, k=keywords: autoparallel.compile(nn.Linear(8, 8), m, example_inputs=e, **k)
            for mesh in (mesh_of(2), 2) for example in (None, (x,)) for keywords in names]
    return [message_of(call) for call in made]


def test_keywords_of_plan_given_to_compile_say_where_they_belong(ranks: Any) -> None:
    for said in ranks(2).run(keywords_of_plan):
        for joint, shape, names in zip(said[::3], said[1::3], said[2::3], strict=True):
            assert joint.startswith("PlanError: joint belongs to autoparallel.plan")
            assert "joint=True)" in joint and "autoparallel.compile(model, mesh, plan=plan)" in joint
            assert shape.startswith("PlanError: mesh_shape belongs to autoparallel.plan")
            assert "init_device_mesh(" in shape and "count of devices" in shape
            assert names.startswith("PlanError: axis_names belongs to autoparallel.plan") and "mesh_dim_names" in names


def test_keywords_of_compile_given_to_plan_say_where_they_belong() -> None:
    says(PlanError, "plan belongs to autoparallel.compile", "compile(model, mesh, plan=plan)",
         of=lambda: planned(plan=planned()))
    says(PlanError, "mesh belongs to autoparallel.compile", "mesh_shape=(2, 4)", of=lambda: planned(mesh=(2, 2)))


@pytest.mark.parametrize("count", [2.5, "4", True])
def test_counts_of_devices_that_are_none(count: Any) -> None:
    says(ClusterError, f"num_devices is {count!r}", "a whole number", of=lambda: Cluster.load("local-cpu", count))


def test_a_cluster_may_be_a_path(tmp_path: Path) -> None:
    """As for `Cluster.load`."""
    file = tmp_path / "ours.toml"
    file.write_text('based_on = "local-cpu"\nname = "ours"\nnum_devices = 2\n')
    case = CASES["mlp"]
    assert plan(case.build(), file, example_inputs=case.inputs(8)[0], mesh_shape=(2,)).cluster == "ours"


def test_axis_names_without_a_mesh_choose_how_many_axes() -> None:
    """Four devices are one axis or two; with names, pins by name hold in whatever is tried."""
    found = planned(mesh_shape=None, axis_names=("data", "model"), pins={"up.weight": {"model": Shard(0)}})
    assert found.mesh_shape == (2, 2) and found.axis_names == ("data", "model")
    assert planned(mesh_shape=None, axis_names=("data",)).mesh_shape == (4,)


def test_a_joint_search_that_finds_nothing_says_why() -> None:
    """No combination, no memory (what it names as too little is), no time."""
    says(InfeasibleError, "on 4 devices allows pipeline_stages=3", "fix fewer options",
         of=lambda: planned(joint=True, mesh_shape=None, pipeline_stages=3))
    with pytest.raises(InfeasibleError) as caught:
        planned(joint=True, mesh_shape=None, memory_limit_bytes=10)
    assert "fits in 10 bytes" in str(caught.value) and "Raise memory_limit_bytes" in str(caught.value)
    needed = caught.value.needed_bytes  # type: ignore[attr-defined]
    assert f"more than {needed:,.0f} bytes" in str(caught.value)
    assert 10 < needed < planned(joint=True, mesh_shape=None, memory_limit_bytes=1e9).prediction.peak_bytes
    says(InfeasibleError, "time_limit_s=0", "give more",
         of=lambda: planned(joint=True, mesh_shape=None, time_limit_s=0))


def test_questions_to_a_plan_that_have_no_answer(tmp_path: Path) -> None:
    found = planned()
    for k in (0, -1, "3"):
        says(PlanError, f"alternatives({k!r})", "1 or more", of=lambda k=k: found.alternatives(k))  # type: ignore[misc]
    for factors in ((0.0,), (-1,), (float("inf"),), 2.0):
        says(PlanError, f"sensitivity({factors!r})", "above 0, for example (0.5, 2.0)",
             of=lambda f=factors: found.sensitivity(f))  # type: ignore[misc]
    says(PlanError, "'linea'", "is it one of ['linear'", "plan.strategies", of=lambda: found.explain("linea"))
    says(PlanError, "['linear']", "is it one of", of=lambda: found.explain(["linear"]))  # type: ignore[arg-type]
    says(PlanError, "'wat'", "is it one of", "plan.strategies", of=lambda: found.explain("wat"))
    says(PlanError, "'plan.json'", "Plan.load(path)", of=lambda: found.diff("plan.json"))  # type: ignore[arg-type]
    says(PlanError, "cannot write the file", "No such file", of=lambda: found.save(tmp_path / "no" / "plan.json"))
    file = tmp_path / "plan.json"
    file.write_bytes(b"\xd0\xff")
    says(PlanError, str(file), "is not JSON", of=lambda: Plan.load(file))


@pytest.mark.parametrize("batch", ["plain", "mean", "loss"])
def test_a_batch_of_no_samples_has_a_plan(batch: str) -> None:
    """As torch runs it (a mean of nothing is nan); ops on nothing were priced as nan."""
    machine, x = Cluster.load("local-cpu", num_devices=2), torch.ones(0, 32)
    model, args = {"plain": (nn.Sequential(nn.Linear(32, 64), nn.ReLU()), (x,)),
                   "mean": (MeanOfSquares(), (x,)), "loss": (nn.MSELoss(), (x, x))}[batch]
    found = plan(model, machine, example_inputs=args, mesh_shape=(2,))
    assert 0 < found.prediction.step_s < 1


@pytest.mark.parametrize(("config", "parts"), [
    ([], ("no model_type",)),
    (3, ("no model_type",)),
    ({"model_type": ["llama"]}, ("no model_type",)),
    ({"model_type": "llama", "architectures": "LlamaForCausalLM"}, ("architectures is 'LlamaForCausalLM'", "a list")),
    ({"model_type": "resnet", "architectures": ["ResNetModel"], "embedding_size": 8, "hidden_sizes": [8],
      "depths": [1]}, ("image_size is None", "write module:function")),
    ({"model_type": "lama"}, ("no model_type 'lama'", "'llama'")),
    ({"model_type": "llama", "architectures": ["Nope"]}, ("cannot make Nope", "no attribute Nope")),
    ({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 3}, ("cannot make a causal", "multiple of")),
])
def test_configs_that_make_no_model(tmp_path: Path, config: Any, parts: Any) -> None:
    """The file is named, and what transformers says of it."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    says(InputError, str(file), *parts, of=lambda: load_model(str(file), 2, 8, "float32"))


def test_files_and_modules_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("broken", "def f(:"), ("raises", "1 / 0")):
        (tmp_path / f"{name}.py").write_text(text)
    file = tmp_path / "config.json"
    file.write_bytes(b"\xd0\xff")
    for source, part in ((str(file), "cannot read the config file"), ("broken:f", "broken:f: SyntaxError"),
                         ("raises:f", "raises:f: ZeroDivisionError"), (":f", ":f: ValueError: Empty module name")):
        says(InputError, part, of=lambda s=source: load_model(s, 2, 8, "float32"))  # type: ignore[misc]


@pytest.mark.parametrize("command", [["plan", "x.json"], ["calibrate"]])
def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, command: list[str]) -> None:
    """It failed after minutes of measuring or planning."""
    for output in (tmp_path / "no" / "file", tmp_path):
        found = CliRunner().invoke(app, [*command, "--output", str(output)])
        assert isinstance(found.exception, InputError)
        assert f"--output {output} cannot be written" in str(found.exception)


def makes_two(batch: int, length: int) -> Any:
    return nn.Linear(2, 2), (torch.ones(batch, 2),)


def makes_trouble(batch: int, length: int) -> Any:
    raise KeyError("boom")


def test_factories_that_make_no_call() -> None:
    says(InputError, "makes_two returned", "(model, args, kwargs)",
         of=lambda: load_model(f"{__name__}:makes_two", 2, 8, "float32"))
    says(InputError, "makes_trouble(2, 8) raised KeyError: 'boom'", "the batch and the sequence length",
         of=lambda: load_model(f"{__name__}:makes_trouble", 2, 8, "float32"))
    says(InputError, "unknown dtype 'int8'", "bfloat16", of=lambda: load_model(f"{__name__}:makes_two", 2, 8, "int8"))


def test_calibrate_takes_no_cards_below_one() -> None:
    found = CliRunner().invoke(app, ["calibrate", "--output", "x.toml", "--nics-per-host", "0"])
    assert found.exit_code == 2 and "--nics-per-host" in found.output and "Invalid value" in found.output


@pytest.mark.parametrize("option", ["--devices", "--global-batch", "--sequence-length"])
def test_the_command_line_takes_no_counts_below_one(option: str) -> None:
    found = CliRunner().invoke(app, ["plan", "x.json", option, "0"])
    assert found.exit_code == 2 and option in found.output and "Invalid value" in found.output


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(8)


def odd_calls() -> list[str]:
    parallel = autoparallel.compile(nn.Linear(8, 8), mesh_of(2), example_inputs=(torch.ones(4, 8),))
    wrong: Any = parallel
    full = nn.Linear(8, 8).state_dict()
    return [
        message_of(lambda: parallel(torch.ones(4, 8, device="meta"))),
        message_of(lambda: wrong(torch.ones(4, 8).numpy())),
        message_of(lambda: wrong.shard_batch(3)),
        message_of(lambda: wrong.dataloader(Samples(), 0)),
        message_of(lambda: wrong.load_state_dict(None)),
        message_of(lambda: wrong.load_state_dict({**full, "bias": 3})),
        message_of(lambda: wrong.load_state_dict({**full, "epoch": 3}, strict=False)),
        message_of(lambda: wrong.load_state_dict({**full, "bias": torch.ones(8, device="meta")})),
        message_of(lambda: wrong.load_state_dict({**full, "bias": torch.ones(8).to_sparse()})),
        message_of(lambda: parallel(torch.ones(4, 8).to_sparse())),
        message_of(lambda: wrong.clip_grad_norm_(None)),
        message_of(lambda: wrong.clip_grad_norm_(1.0, "two")),
        message_of(lambda: wrong.dataloader(Samples(), 4, sampler=[0])),
        message_of(lambda: wrong.dataloader(Samples(), 4, batch_sampler=[[0]])),
        message_of(lambda: [parallel(batch) for batch in parallel.dataloader(Samples(), 4)]),
        message_of(lambda: parallel(torch.ones(4, 8))),
    ]


def test_calls_with_what_is_no_tensor(ranks: Callable[[int], Any]) -> None:
    """And calls after them work."""
    for meta, numpy, batch, loader, state, value, left_out, *others, after in ranks(2).run(odd_calls):
        empty, sparse, call, norm, kind, sampler, batches, bare = others
        for said, name in ((empty, "bias"), (sparse, "bias")):
            assert said.startswith("InputError: state dict has tensors on the meta device") and name in said
        assert "InputError: an input is a sparse_coo tensor" in call and "x.to_dense()" in call
        assert "InputError: max_norm is None" in norm and "InputError: norm_type is 'two'" in kind
        for said in (sampler, batches):
            assert "sampler is not for this loader" in said and "shuffle, seed and the epoch" in said
        assert bare == "no error", "samples that are tensors"
        assert "InputError: an input is on the meta device" in meta and "give real ones" in meta
        assert "CaptureError" in numpy and "numpy.ndarray" in numpy and "This call: (of type ndarray)" in numpy
        assert "InputError: a batch is of type int" in batch and "a tuple of arguments" in batch
        assert "InputError: batch_size is 0" in loader and "1 or more" in loader
        assert "InputError: a state dict is a mapping" in state and "NoneType" in state
        assert "InputError: state dict has no tensors for ['bias']" in value
        assert left_out == "no error", "strict=False loads the rest"
        assert after == "no error"


def test_input_errors_are_in_the_tree() -> None:
    """One except clause catches them all; each is also the built-in that a caller would expect."""
    for error, also in ((InputError, ValueError), (PinError, ValueError), (PlanError, ValueError),
                        (InfeasibleError, ValueError), (MeshError, RuntimeError), (CaptureError, RuntimeError)):
        assert issubclass(error, AutoparallelError) and issubclass(error, also)


# ------------------------------------------------------------------------------------------------------------ hybrids


def test_an_axis_without_a_name() -> None:
    says(MeshError, "1 axis names ('dp',)", "(2, 2)", "one for each axis", of=lambda: planned(axis_names=("dp",)))


def call_a_pipeline() -> list[str]:
    case = CASES["mlp"]
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build(), mesh_of(2, 2), example_inputs=args, example_kwargs=kwargs,
                                    pipeline_stages=2, schedule="gpipe")
    wrong = dataclasses.replace(parallel.plan, hybrid=dataclasses.replace(parallel.plan.hybrid, cuts=("x",)))
    return [
        message_of(lambda: parallel(*args, **kwargs)),
        message_of(lambda: parallel.shard_batch(args)),
        message_of(lambda: autoparallel.compile(case.build(), mesh_of(4), plan=parallel.plan)),
        message_of(lambda: autoparallel.compile(case.build(), mesh_of(2, 2), example_inputs=args, plan=wrong)),
        message_of(lambda: autoparallel.compile(case.build(), mesh_of(2, 2), plan=parallel.plan, micro_batches=2,
                                                baseline="ddp")),
    ]


def test_what_a_pipeline_refuses(ranks: Callable[[int], Any]) -> None:
    for call, shard, mesh, cuts, both in ranks(4).run(call_a_pipeline):
        assert call.startswith("InputError") and "2 pipeline stages" in call and "step(...)" in call
        assert shard.startswith("InputError") and "step(...)" in shard
        assert mesh.startswith("MeshError") and "pipeline of 2 ranks" in mesh and "first axis 4" in mesh
        assert cuts.startswith("PlanError") and "['x'] do not make 2 stages" in cuts
        assert both.startswith("PlanError: the plan decides baseline, micro_batches: leave them out")


def test_stages_that_no_part_of_the_devices_can_take() -> None:
    says(PlanError, "3 pipeline stages", "4 devices", of=lambda: planned(pipeline_stages=3, mesh_shape=None))


def test_a_joint_search_picks_the_axes_itself() -> None:
    says(PlanError, "leave out axis_names and baseline", of=lambda: planned(joint=True, baseline="ddp"))
    says(PlanError, "leave out axis_names and baseline", of=lambda: planned(joint=True, axis_names=("a", "b")))
