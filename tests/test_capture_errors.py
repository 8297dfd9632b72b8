"""Models that cannot be captured: the error names the user's line and says what to write instead."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoparallel import Cluster, Plan
from autoparallel.api import plan
from autoparallel.capture import capture
from autoparallel.capture.passes import dtype_check
from autoparallel.errors import (
    CaptureError,
)
from tests.support.messages import says
from tests.support.tiers import with_slow


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


class HidesALayer(nn.Module):
    """Its second layer is in a list, which registers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.others = nn.Linear(4, 4), [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return self.others[0](self.first(x))


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
    says(CaptureError, "is a sparse_coo tensor", f'"{__file__}"', "x.to_sparse()  # here", "Keep it dense",
         of=lambda: plan_of(MakesASparseTensor()))


@pytest.mark.parametrize("model", [HidesALayer(), nn.Sequential(HidesALayer(), nn.ReLU())], ids=["whole", "part"])
def test_parameters_that_are_not_registered_are_refused(model: nn.Module) -> None:
    """They would get no gradient."""
    says(CaptureError, "reads a parameter float32[4, 4] that requires a gradient and is not registered",
         f"at {__file__}:", "torch.nn.ModuleList", "requires_grad_(False)", of=lambda: plan_of(model))


def test_layers_that_are_not_registered_nor_trained_are_constants() -> None:
    model = HidesALayer()
    model.others[0].requires_grad_(False)
    assert plan_of(model).prediction.step_s > 0


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


@dataclass
class Pair:
    x: Tensor


def test_containers_that_torch_does_not_know() -> None:
    model = nn.Linear(4, 4)
    says(CaptureError, "Linear is given a Pair", "torch.export.register_dataclass(Pair)", "its tensors one by one",
         of=lambda: capture(model, (Pair(torch.zeros(4, 4)),)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8, sparse=True), nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids)).sum()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 4))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, 2 * self.weight, sparse=True).sum()


class Gathers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(16, 4))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table.gather(0, ids, sparse_grad=True).sum()


@pytest.mark.parametrize(("model", "parts"), [
    (Bags(nn.Embedding(16, 8, sparse=True, scale_grad_by_freq=True)),
     ("in tables.0", "without scale_grad_by_freq", "model.tables.0.sparse = False", "Adam, Adagrad")),
    (Tied(), ("in table", "return self.head(self.table(ids)).sum() reads table.weight too", "its gradient is dense")),
    (Scaled(), ("Its table is no parameter, but computed by mul", "Write sparse=False, and")),
    (Gathers(), ("of nn.Embedding, nn.EmbeddingBag", "Write sparse_grad=False, and", "sparse_grad=True).sum()")),
])
def test_sparse_gradients_are_refused(model: nn.Module, parts: tuple[str, ...]) -> None:
    """Those of other ops than lookups, and of tables that others read."""
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


F, aten = nn.functional, torch.ops.aten
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


@pytest.mark.parametrize("name", ["the only row", "a table's rows", "index_fill of 1.7976931348623157e+308", "masks"])
def test_examples_on_a_gpu_stop_no_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a row out of range ends the process, so what is tried must be in range at once; wrong types still show."""
    raised: list[BaseException] = []
    values, error = dtype_check._values, dtype_check._error

    def noted(*args: Any) -> Any:
        raised.extend(filter(None, [found := error(*args)]))
        return found

    monkeypatch.setattr(dtype_check, "_values", lambda device: values(torch.device("cuda")))
    monkeypatch.setattr(dtype_check, "_error", noted)
    test_types_that_the_model_takes(name)
    assert raised == []
    test_types_that_the_model_itself_does_not_take("index")
    assert raised != []


@pytest.mark.parametrize(("op", "shapes", "dtypes", "more"), [
    (aten.masked_scatter.default, ((9, 9), (9, 9), (4,)), (torch.float32, torch.bool, torch.float32), {}),
    (aten.repeat_interleave.self_Tensor, ((9,), (9,)), (torch.float32, torch.int64), {"dim": 0, "output_size": 20}),
    (aten.index_select.default, ((1, 9), (9,)), (torch.float32, torch.int64), {}),
])
def test_a_gpu_tries_no_op_whose_kernel_asserts(op: Any, shapes: tuple[tuple[int, ...], ...],
                                                dtypes: tuple[torch.dtype, ...], more: dict[str, Any],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CPU takes is not tried there, and neither is an op that asserts sums or counts of its values."""
    graph, devices, error = torch.fx.Graph(), list[str](), dtype_check._error
    with FakeTensorMode():
        values = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in zip(shapes, dtypes, strict=True)]
    inputs = [graph.placeholder(f"x{number}") for number in range(len(values))]
    for node, value in zip(inputs, values, strict=True):
        node.meta["val"] = value
    args = (inputs[0], 0, inputs[1]) if op is aten.index_select.default else tuple(inputs)
    node = graph.call_function(op, args, more)
    monkeypatch.setattr(dtype_check, "_error",
                        lambda *given: (devices.append(given[3].type), error(*given[:3], torch.device("cpu")))[1])
    assert dtype_check.refusal(node) is None
    assert set(devices) == {"cpu"}


@pytest.mark.parametrize("name", with_slow(TYPES_TAKEN, *(
    name for name in TYPES_TAKEN if name.endswith(f" of {-torch.finfo(torch.float64).max}")), "promotion", "quotients"))
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


class DrawsFromItsOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=self.own)  # its own


def test_generators_of_the_user_are_refused() -> None:
    says(CaptureError, "from a torch.Generator", "# its own", "Leave the generator out", "outside of forward",
         of=lambda: plan_of(DrawsFromItsOwn()))


@dataclass
class Found:
    loss: Tensor


class ReturnsADataclass(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return Found(super().forward(x).mean())


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).mean()


def test_a_result_of_an_unknown_type_is_refused_with_the_way_to_make_it_known() -> None:
    with pytest.raises(CaptureError, match=r"returns a Found.*\n.*torch.export.register_dataclass\(Found\)"):
        capture(ReturnsADataclass(4, 4), (torch.ones(2, 4),), {})


def test_rows_that_are_scaled_in_forward_are_refused_with_the_way_to_scale_them() -> None:
    ids = torch.arange(6).view(3, 2)
    with pytest.raises(CaptureError, match=r"has max_norm(.*\n)*.*weight.mul_\(\(max_norm / "):
        capture(Scaled(6, 4, max_norm=1.0), (ids,), {})
    scaled, plain = Scaled(6, 4, max_norm=1.0), Scaled(6, 4)
    plain.load_state_dict(scaled.state_dict())
    with torch.no_grad():
        plain.weight.mul_((1.0 / (plain.weight.norm(dim=1, keepdim=True) + 1e-7)).clamp(max=1))
    torch.testing.assert_close(plain(ids), scaled(ids))


class ReadsAnAttribute(nn.Linear):
    """Of its weight, in one of three ways; ``how`` "no": it has one and does not read it."""

    def __init__(self, how: str) -> None:
        super().__init__(4, 4)
        self.how = how
        self.weight.factor = 3.0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        factor = {"no": lambda: 1.0, "get": lambda: getattr(self.weight, "factor", 1.0),
                  "read": lambda: self.weight.factor,  # type: ignore[attr-defined]
                  "ask": lambda: 2.0 if hasattr(self.weight, "factor") else 1.0}[self.how]()
        return super().forward(x) * factor


@pytest.mark.parametrize("how", ["get", "read", "ask"])
def test_attributes_of_parameters_are_refused_where_forward_reads_them(how: str) -> None:
    """A trace has other tensors for these: ``getattr(weight, name, default)`` would give the default."""
    with pytest.raises(CaptureError, match=r"reads weight.factor, an attribute of a tensor(.*\n)*.*of the module"):
        capture(ReadsAnAttribute(how), (torch.ones(2, 4),), {})
    assert len(capture(ReadsAnAttribute("no"), (torch.ones(2, 4),), {}).of_kind("op"))


def test_a_long_argument_is_cut_short() -> None:
    message = says(CaptureError, "could not be traced", "This call: ([0.5, ", "characters)",
                   of=lambda: capture(nn.Linear(4, 4), ([0.5] * 1000,)))
    assert len(message) < 2000
