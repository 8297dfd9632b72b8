"""Functions that a trace does not see, and branches on values: traced, turned into a choice, or refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.utils._device import _device_constructors

from autoparallel.capture import Ref, capture
from autoparallel.errors import CaptureError
from autoparallel.runtime.interpret import values_of
from tests.support.captured import Weighed
from tests.support.tiers import with_slow


def hidden_by_no_grad(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    with torch.no_grad():
        y.clamp_(-1, 1)
    return y


def hidden_by_detach(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    y.detach().mul_(2)
    return y


def hidden_by_data(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    y.data = y.data * 2
    return y


@pytest.mark.parametrize("function", [hidden_by_no_grad, hidden_by_detach, hidden_by_data], ids=lambda f: f.__name__)
def test_writes_that_gradients_do_not_see_are_refused(function: Any) -> None:
    """Autograd goes on as if nothing had been written: no functional program has such gradients."""
    with pytest.raises(CaptureError, match=r"gradients flow through without|assigns to the data of a tensor"):
        capture(Weighed(function), (torch.randn(4, 6),))


@pytest.mark.parametrize("trained, advice", [(True, "linear(x, weight * mask)"), (False, "theirs.lerp_(ours, 1 - m)")])
def test_writes_to_the_data_of_parameters_are_refused_with_what_to_write(trained: bool, advice: str) -> None:
    """Masked convolutions; the momentum encoder of contrastive learning."""
    class Masked(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data *= self.weight.data.tril()
            return super().forward(x)

    model = Masked(4, 4)
    model.weight.requires_grad_(trained)
    with pytest.raises(CaptureError, match=r"(?s)data of a parameter.*self\.weight\.data \*=.*" + re.escape(advice)):
        capture(model, (torch.randn(2, 4),))


def vmapped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((a - b) ** 2).sum()

    h = torch.vmap(lambda row: nn.functional.layer_norm(row * w, (6,)))(x)
    h = torch.vmap(torch.vmap(lambda number: torch.where(number > 0, torch.tanh(number / 5) * 5, -2.0)))(h)
    return torch.vmap(torch.vmap(distance, (None, 0)), (0, None))(h, h) + torch.vmap(torch.dot, (0, None))(x, w)


def vmapped_products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Of a matrix that all samples share and a vector of each."""
    shared = torch.outer(w, w)
    h = torch.vmap(lambda row: shared @ row + torch.mv(shared, row) * shared.mv(row))(x)
    h = h + torch.vmap(torch.matmul, (None, 0))(shared, x) + torch.vmap(lambda row: torch.outer(row, w) @ row)(x)
    steep = torch.vmap(torch.func.grad(lambda row: (shared @ row).square().sum()))(x)
    return h + steep + torch.vmap(torch.vmap(lambda one: (shared[:, :1] @ one[None]).sum()))(x)


def twice_differentiated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A gradient of a gradient, each in the loss; norms keep what has no derivative of its own. (Torch's own third
    derivative of layer and batch norm is wrong; that of group norm is right.)"""
    x = x.detach().requires_grad_()
    y = nn.functional.group_norm(nn.functional.rms_norm(x * w, (6,), w).sigmoid() * w, 2)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), [x], create_graph=True)
    return (first * second).sum() + y.sum()


def a_step_of_descent(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The weight is stepped, with a gradient through the step; one that is not asked for again is constant."""
    near = w * 2
    steps = torch.autograd.grad((x * near).tanh().sum(), (w, near), create_graph=True)
    (still,) = torch.autograd.grad((x * w).square().sum(), w)
    return ((w - steps[0] - 0.1 * steps[1]) * x * still).sum()


def differentiated_norms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    y = nn.functional.batch_norm(nn.functional.layer_norm(x * w, (6,), w).sigmoid(), None, None, w, w, True)
    (found,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return (found * x).sin().sum()


def gradients_of_convolutions(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    image = torch.outer(x.flatten(), x.flatten())[None, None, :13, :11].expand(2, 4, 13, 11).detach().requires_grad_()
    kernel = torch.outer(w, w)[:3, :3].expand(8, 2, 3, 3)
    y = nn.functional.conv2d(image, kernel, stride=(2, 3), padding=1, groups=2)
    y = nn.functional.conv_transpose2d(nn.functional.avg_pool2d(y.tanh(), 2), kernel, stride=2)
    y = nn.functional.max_pool2d(y.square(), 2)
    (found,) = torch.autograd.grad(y, image, torch.ones_like(y), create_graph=True)
    return (found * image).sum()


def derivatives_of_functions(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """torch.func: of the whole batch, of each sample, of what all samples share, along a direction, twice."""
    def energy(row: torch.Tensor) -> torch.Tensor:
        return (row * w).sin().square().sum()

    def told(weights: dict[str, torch.Tensor], row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (weights["w"] * row).tanh().sum(), row * 2

    slope, value = torch.func.grad_and_value(energy)(x)
    steep = torch.vmap(torch.func.grad(lambda row: torch.func.grad(energy)(row).square().sum()))(x)
    each, twice = torch.vmap(torch.func.grad(told, has_aux=True), (None, 0))({"w": w * w}, x)
    tables = torch.vmap(torch.func.jacrev(lambda row, by: (row * by).cumsum(0).tanh(), argnums=1), (0, None))(x, w)
    made, back = torch.func.vjp(lambda a, b: (a * b).sin(), x, w)
    along = torch.func.jvp(lambda a: (a * w).cumsum(1).tanh(), (x,), (back(made)[0],))[1]
    return slope * value + steep * each["w"] + twice * tables.sum(2) + along * back(made)[1]


def gaussian_likelihood(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Of variances of each number, of each row, and of all; some are below the least."""
    loss, means = nn.functional.gaussian_nll_loss, x * w
    return (loss(means, x, means.square(), full=True, eps=0.3) + loss(means, x, w[:4].square(), reduction="sum")
            + loss(means, x, 2.0, reduction="none"))


def counts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    groups = torch.tensor([1, 4, 1, 0])
    return x * w * torch.bincount(groups, (x * w).detach()[:, 0], minlength=6) * groups.bincount(minlength=6)


def distributions(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Which look whether their parameters are allowed."""
    normal = torch.distributions.Normal(x, w.exp())
    chosen = torch.distributions.Categorical(logits=x * w)
    prior = torch.distributions.Normal(torch.zeros(6), torch.ones(6))
    divergence = torch.distributions.kl_divergence(normal, prior)
    return normal.log_prob(x * w) + divergence + (chosen.entropy() + chosen.log_prob(torch.arange(4)))[:, None]


def temporal_classification(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Targets in rows or one after another, lengths as tensors or numbers, a path that does not exist."""
    scores = (x * w).expand(9, 4, 6).cumsum(0).log_softmax(-1)
    rows, lengths, long = torch.arange(20).reshape(4, 5) % 5 + 1, torch.tensor([9, 8, 9, 2]), (5, 3, 1, 4)
    loss = nn.functional.ctc_loss
    whole = loss(scores, rows, lengths, torch.tensor(long), reduction="sum", zero_infinity=True)
    each = loss(scores, rows.flatten()[:13], (9, 8, 9, 2), long, reduction="none", zero_infinity=True)
    one = nn.CTCLoss()(scores[:, 0], rows[0], torch.tensor(9), torch.tensor(5))
    return whole + each + one + loss(scores, rows, lengths, torch.tensor(long), blank=5, zero_infinity=True)


def weight_norms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Along a dim from either end, and over all dims, which torch writes -1."""
    v, each = torch.outer(w, w + 1)[:4], x[:, :1].detach()
    made = (torch._weight_norm(v, g, dim) for g, dim in ((each, 0), (each, -2), (w, 1), (w[2], -1)))
    return sum(made) * x


def reading_data(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w * (x * w).data / x.std().data


@pytest.mark.parametrize("function", with_slow(
    [vmapped, vmapped_products, twice_differentiated, differentiated_norms, a_step_of_descent,
     gradients_of_convolutions, derivatives_of_functions, counts, gaussian_likelihood, distributions,
     temporal_classification, weight_norms, reading_data], vmapped_products, derivatives_of_functions,
    twice_differentiated, gradients_of_convolutions, distributions),
                         ids=lambda f: f.__name__)
def test_functions_that_a_trace_does_not_see_are_traced(function: Any) -> None:
    """Value and gradient are the model's own, in float64."""
    model, x = Weighed(function).double(), torch.randn(4, 6, dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        graph = capture(model, (x,))
        expected = model(x)
    finally:
        torch.set_default_dtype(torch.float32)
    known = {Ref(n.index): graph.constant_tensors[n.path] for n in graph.of_kind("buffer")}
    known |= {Ref(n.index): x for n in graph.of_kind("input")} | {Ref(n.index): model.std
                                                                 for n in graph.of_kind("parameter")}
    actual = values_of(graph, graph.outputs, known, torch.device("cpu"))[graph.outputs[0]]
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*torch.autograd.grad(actual.sum(), model.std),
                               *torch.autograd.grad(expected.sum(), model.std))


def asserting(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    assert torch.all(w > -9).item(), "weights"
    assert w.max().item() < 9
    assert x.isnan().sum() == 0 and w.isnan().sum() == 0
    if x is not None and not (w < 9).all():
        raise ValueError("weights")
    return x * w


def clamped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """As transformers' detr does, only that 0.4 is too large."""
    h = x * w
    if h.isinf().any() or (h.abs() > 0.4).any():
        most = torch.finfo(h.dtype).tiny + 0.4
        h = torch.clamp(h, min=-most, max=most)
    return h


def clamped_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for bound in (0.5, 0.3):
        if x.dtype == torch.float32 and not (x <= bound).all():
            x = x.clamp(max=bound)
    return x * w


@pytest.mark.parametrize("large", [0.1, 0.35, 2.0])
@pytest.mark.parametrize("function", [clamped, clamped_twice])
def test_a_branch_that_clamps_is_a_choice(function: Any, large: float) -> None:
    """Whichever way the example's values had it go, forward and gradient."""
    model, x = Weighed(function), torch.full((4, 6), 0.01)
    graph = capture(model, (x,))
    x[1, 2] = large
    known = {Ref(n.index): x for n in graph.of_kind("input")} | {Ref(n.index): model.std
                                                                 for n in graph.of_kind("parameter")}
    actual = values_of(graph, graph.outputs, known, torch.device("cpu"))[graph.outputs[0]]
    expected = model(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(made.sum(), model.std) for made in (actual, expected)))


def test_asserts_of_values_are_dropped_with_a_warning() -> None:
    """prophetnet's and ibert's."""
    with pytest.warns(UserWarning, match=r"does not check what .*test_capture_functions.py:\d+ checks: ") as told:
        graph = capture(Weighed(asserting), (torch.randn(4, 6),))
    assert [node.op_name for node in graph.of_kind("op")] == ["aten.mul.Tensor"] and len(told) == 5


def rooted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if (w > 0).all():
        x = x.sqrt()  # whose gradient is infinite where it would not be computed
    return x * w


def counting(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    positive = 0
    if (x > 0).all():
        positive = 1
    return x * w + positive


def either(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        x = x.clamp(max=1)
    else:
        x = x * 2.0
        x = x.clamp(min=0)
    return x * w


def writing(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x * w
    if (h > 0).all():
        h = torch.clamp(h, max=1, out=h.detach())
    return h


@pytest.mark.parametrize("function", [rooted, counting, either, writing])
def test_other_branches_on_values_are_refused_with_their_line(function: Any) -> None:
    place = rf"test_capture_functions.py:\d+ in {function.__name__}"
    with pytest.raises(CaptureError, match=rf"(?s)decides by the values .*{place}: if .*Write torch.where"):
        capture(Weighed(function), (torch.randn(4, 6),))


def test_functions_that_the_data_choose_are_refused() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cond(w.sum() > 0, lambda x: x * 2, lambda x: x.sin(), (x * w,))

    with pytest.raises(CaptureError, match=r"(?s)torch.cond of functions .*Write torch.where"):
        capture(Weighed(function), (torch.randn(4, 6),))


@pytest.mark.parametrize("call", [
    lambda net, x: torch.cond(x.sum() > 0, lambda x: net(x), lambda x: -net(x), (x,)),
    lambda net, x: scan(lambda total, row: (total + net(row), row.clone()), torch.zeros(6), x)[0]])
def test_functions_with_parameters_for_ops_of_torch_are_refused(call: Any) -> None:
    """(torch's text told to mend the line.)"""
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> Any:
            return call(self.net, x)

    with pytest.raises(CaptureError, match=r"(?s)Net hands functions to an op .*test_capture_functions.py:\d+.*"
                                           r"Write torch.where"):
        capture(Net(), (torch.randn(4, 6),))


def test_an_output_that_does_not_depend_on_an_input_is_refused() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((x * w).sum(), [w, x.detach()])[0]

    with pytest.raises(CaptureError, match="does not depend"):
        capture(Weighed(function), (torch.randn(4, 6),))


class Made(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.device("cpu"):
            return x + torch.ones(6)


def test_torch_follows_devices_after_a_trace() -> None:
    """(torch kept our stand-ins for ones, zeros and full as the functions that do, if a trace asked first.)"""
    _device_constructors.cache_clear()
    capture(Made(), (torch.ones(4, 6),))
    with torch.device("meta"):
        assert torch.ones(2).is_meta and torch.zeros(2).is_meta and torch.full((2,), 1.0).is_meta
