"""Capture: one normal form, nothing lost, nothing silently changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from autoparallel.capture import OpGraph, Ref, capture, find_blocks
from autoparallel.capture.passes import attention_mask_runs, attention_masks
from autoparallel.capture.passes.compositions import COMPOSITIONS
from autoparallel.errors import CaptureError
from autoparallel.runtime.interpret import values_of
from tests.models import CASES


def traced(function: Any, *inputs: torch.Tensor) -> list[str]:
    """Op names of a function of tensors."""
    return [node.op_name for node in captured(function, *inputs).of_kind("op")]


def captured(function: Any, *inputs: torch.Tensor) -> OpGraph:
    class Model(nn.Module):
        def forward(self, *args: torch.Tensor) -> Any:
            return function(*args)

    return capture(Model(), inputs)


def outputs(graph: OpGraph, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What the graph computes."""
    known = {Ref(node.index): graph.constant_tensors[node.path] for node in graph.of_kind("buffer")}
    known |= {Ref(node.index): inputs[int(node.path)] for node in graph.of_kind("input")}
    made = values_of(graph, graph.outputs, known, torch.device("cpu"))
    return tuple(made[ref] for ref in graph.outputs)


X = torch.ones(4, 6)


def test_views_have_one_form() -> None:
    assert traced(lambda x: x.view(2, -1).unsqueeze(0).flatten(), X) == ["aten.reshape.default"]
    assert traced(lambda x: x.t().transpose(0, 1), X) == ["aten.permute.default"] * 2
    assert traced(lambda x: x.split(3, dim=1)[1] + 1, X) == ["aten.slice.Tensor", "aten.add.Tensor"]


def test_means_are_sums() -> None:
    assert traced(lambda x: x.mean(), X) == ["aten.sum.dim_IntList", "aten.mul.Tensor"]
    names = traced(lambda x, y: nn.functional.cross_entropy(x, y), X, torch.zeros(4, dtype=torch.long))
    assert names[0] == "aten.cross_entropy_loss.default" and names[-1] == "aten.div.Tensor"


def test_in_place_ops_become_functional() -> None:
    assert traced(lambda x: (x + 1).add_(2).relu_(), X) == ["aten.add.Tensor"] * 2 + ["aten.relu.default"]


def through_a_slice(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1].clone()
    y[:, 0] = 7
    return y


def read_before_and_after(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x + 1
    before = y.sum()
    y[0].add_(1)
    return before, y


def two_views_of_one_tensor(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    left, flat = y.t()[:3], y.view(-1)
    left.mul_(flat[-1])
    flat[5] = 2
    return left + y[:, :3].t()


def a_piece_of_a_split(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.split(2, dim=1)[1].neg_()
    return y


def places_of_complex_numbers(x: torch.Tensor) -> torch.Tensor:
    """As a Fourier operator writes its lowest frequencies; torch has no derivative of a complex slice_scatter."""
    y = torch.fft.rfft(x)
    y[1:3, ::2], y[..., 1] = y[:2, ::2] * 2, y[:, 0]
    return torch.fft.irfft(y)


def a_copy_is_not_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    copied = y.t().reshape(-1)
    copied.zero_()
    return y + copied.sum()


def dims_in_other_orders(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.movedim(0, 1)[2], y.mT[5], y.swapaxes(0, 1)[3] = 1, 2, y.T[0]
    y.narrow(0, 1, 2).mul_(3)
    return y


def diagonals(x: torch.Tensor) -> torch.Tensor:
    """As losses of redundancy write them; pow_.Scalar is pow.Tensor_Scalar."""
    y = x @ x.t()
    torch.diagonal(y).add_(-1).pow_(2)
    z = x @ x.t()
    z.fill_diagonal_(-9)
    return y + z


@pytest.mark.parametrize("function", [through_a_slice, read_before_and_after, two_views_of_one_tensor,
                                      a_piece_of_a_split, places_of_complex_numbers, dims_in_other_orders, diagonals,
                                      a_copy_is_not_a_view], ids=lambda f: f.__name__)
def test_writing_through_views(function: Any) -> None:
    """The functional program computes what the writing one does; in whisper's, BART's and T5's labels it is needed."""

    x = torch.randn(4, 6)
    torch.testing.assert_close(outputs(captured(function, x), x), _tuple(function(x)))


class Weighed(nn.Module):
    """A function of an input and of a parameter that has an op's name."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.std = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, self.std)


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
    with pytest.raises(CaptureError, match=r"gradients flow through without|assigns to a tensor's data"):
        capture(Weighed(function), (torch.randn(4, 6),))


def vmapped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((a - b) ** 2).sum()

    h = torch.vmap(lambda row: nn.functional.layer_norm(row * w, (6,)))(x)
    h = torch.vmap(torch.vmap(lambda number: torch.where(number > 0, torch.tanh(number / 5) * 5, -2.0)))(h)
    return torch.vmap(torch.vmap(distance, (None, 0)), (0, None))(h, h) + torch.vmap(torch.dot, (0, None))(x, w)


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


def reading_data(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w * (x * w).data / x.std().data


@pytest.mark.parametrize("function", [vmapped, twice_differentiated, differentiated_norms, a_step_of_descent,
                                      gradients_of_convolutions, derivatives_of_functions, counts, gaussian_likelihood,
                                      distributions, temporal_classification, reading_data], ids=lambda f: f.__name__)
def test_what_a_trace_does_not_see_is_traced(function: Any) -> None:
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


def test_asserts_of_values_are_left_out_and_told() -> None:
    """prophetnet's and ibert's."""
    with pytest.warns(UserWarning, match=r"does not check what .*test_capture.py:\d+ checks: ") as told:
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
    with pytest.raises(CaptureError, match=rf"(?s)decides by the values .*test_capture.py:\d+ in {function.__name__}: "
                                           "if .*Write torch.where"):
        capture(Weighed(function), (torch.randn(4, 6),))


def test_any_and_all_are_counts() -> None:
    """Of which each rank has a summand; over no dims they reduce nothing."""
    x = torch.tensor([[0.0, 2.0, 1.0], [0.0, 0.0, float("nan")]])
    for function in (torch.any, torch.all):
        assert traced(function, x)[0] == "aten.count_nonzero.dim_IntList"
        for arguments in ((), (0,), (1, True), ((0, 1),), ((),)):
            for value in (x, x > 0, x[0, 0], (x > 0).to(torch.uint8)):
                if value.dim() == 0 and arguments and arguments[0] not in (0, ()):
                    continue
                made, expected = outputs(captured(lambda x, f=function, a=arguments: f(x, *a), value), value)[0], \
                    function(value, *arguments)
                assert made.dtype == expected.dtype and torch.equal(made, expected)


def test_functions_that_the_data_choose_are_refused() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cond(w.sum() > 0, lambda x: x * 2, lambda x: x.sin(), (x * w,))

    with pytest.raises(CaptureError, match=r"(?s)torch.cond of functions .*Write torch.where"):
        capture(Weighed(function), (torch.randn(4, 6),))


def test_an_output_that_does_not_depend_on_an_input_is_refused() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((x * w).sum(), [w, x.detach()])[0]

    with pytest.raises(CaptureError, match="does not depend"):
        capture(Weighed(function), (torch.randn(4, 6),))


def test_names_are_each_given_once() -> None:
    """A parameter may be called as an op is, and plans are by name."""
    graph = capture(Weighed(lambda x, w: x.std() * w), (torch.randn(4, 6),))
    names = [node.name for node in graph]
    assert len(set(names)) == len(names) and names[:1] == ["std"]


RENAMED = {target._schema.name.split("::")[1] for target in COMPOSITIONS} - {"diff", "index_put"}
WRITTEN_AS_OTHERS: dict[str, Any] = {
    "means of numbers": lambda x: tuple(
        x.masked_fill(x > 0.5, torch.nan).nanmean(*args) for args in ((), (1,), ((0, -1), True))),
    "conjugate transpose": lambda x: torch.complex(x, x + 1).mH,
    "stacks": lambda x: (torch.hstack([x, x]), torch.vstack([x[0], x[1]]), torch.dstack([x, x]),
                         torch.hstack([x[0], x[1]]), torch.column_stack([x[:, 0], x])),
    "splits": lambda x: (*x.hsplit(2), *x.vsplit([1, 2]), *x.reshape(2, 3, 4).dsplit(2), x[0].hsplit(3)[1]),
    "products": lambda x: (torch.inner(x, x), torch.tensordot(x, x, ([0], [0])), torch.kron(x, x[0]),
                           torch.tensordot(x.reshape(2, 2, 6), x.reshape(6, 2, 2), ([-1, 0], [0, 2]))),
    "rotations": lambda x: tuple(torch.rot90(x.reshape(2, 3, 4), k, (0, -1)) for k in range(-1, 4)),
    "pixels": lambda x: (nn.functional.pixel_shuffle(x.reshape(4, 2, 3), 2),
                         nn.functional.pixel_unshuffle(x.reshape(1, 1, 4, 6), 2),
                         nn.functional.channel_shuffle(x.reshape(1, 6, 2, 2), 3)),
    "places along a dim": lambda x: (torch.take_along_dim(x, -torch.arange(2).reshape(1, 2), 1),
                                     torch.take_along_dim(x, torch.arange(9))),
    "orders": lambda x: (torch.msort(x), torch.diff(x, n=0, dim=0, prepend=x), torch.diff(x, dim=0)),
    "products of sets": lambda x: torch.cartesian_prod(x[0], x[1, :2], x[2, :3]),
    "sums to a size": lambda x: (x.reshape(2, 2, 6).sum_to_size(2, 1), x.sum_to_size(4, 6)),
    "diagonals": lambda x: (torch.diag(x, 1), torch.diag(x[0], -1), torch.diagflat(x, 1), torch.linalg.diagonal(x)),
    "trapezoids": lambda x: (torch.trapezoid(x, dim=0), torch.trapezoid(x, dx=3.0), torch.trapezoid(x, x[0] ** 2),
                             torch.cumulative_trapezoid(x, x**2, dim=0), torch.trapezoid(x, x[:1] ** 2)),
    "tiles": lambda x: (x.tile(2), x.tile(2, 1, 3)),
}


@pytest.mark.parametrize("name", list(WRITTEN_AS_OTHERS))
def test_ops_that_are_others(name: str) -> None:
    """The same values, of ops that are not the ones that were called."""
    x = torch.randn(4, 6, dtype=torch.float64)
    graph = captured(WRITTEN_AS_OTHERS[name], x)
    assert not any(node.op_name.split(".")[1] in RENAMED for node in graph.of_kind("op"))
    torch.testing.assert_close(outputs(graph, x), _tuple(WRITTEN_AS_OTHERS[name](x)), equal_nan=True)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_mask_that_is_written_to_chooses(accumulate: bool) -> None:
    """Of values that are the same in all places of the mask; others have as many rows as the mask has places."""
    x, mask = torch.randn(4, 6), torch.tensor([True, False, True, True])

    def same(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x.index_put((mask,), torch.arange(6.0), accumulate=accumulate)

    def each(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x.index_put((mask,), x[:3], accumulate=accumulate)

    graph = captured(same, x, mask)
    assert "aten.where.self" in [node.op_name for node in graph.of_kind("op")]
    torch.testing.assert_close(outputs(graph, x, mask), _tuple(same(x, mask)))
    assert "aten.index_put.default" in traced(each, x, mask)


def test_constants_are_new_at_every_call() -> None:
    """``torch.tensor([...])`` in a model, also written to."""
    def model(x: torch.Tensor) -> torch.Tensor:
        scale, places = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), torch.tensor([2, 0])
        scale[1:3].mul_(10)
        return (x * scale)[places]

    x = torch.randn(4, 6)
    graph = captured(model, x)
    assert not graph.mutations
    for _ in range(2):
        torch.testing.assert_close(outputs(graph, x), _tuple(model(x)))


def _tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def test_writing_to_memory_seen_elsewhere_is_refused() -> None:
    def through_an_expansion(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y.expand(1, 4, 6).add_(1)
        return y

    with pytest.raises(CaptureError, match="read later under another name"):
        traced(through_an_expansion, X)
    with pytest.raises(CaptureError, match="in place to its input"):
        traced(lambda x: x.add_(1), X)


def test_a_shape_that_depends_on_the_data_is_refused() -> None:
    """JetMoE takes as many rows as each expert has tokens."""
    for function in (lambda x: x[x[:, 0] > 0].cumsum(0), lambda x: x.unique()):
        with pytest.raises(CaptureError, match="shape depends on the data") as caught:
            traced(function, X)
        assert "test_capture.py" in str(caught.value)
    with pytest.raises(CaptureError, match=r"(?s)shape depends on the data.*Return all rows"):
        traced(lambda x: x[x[:, 0] > 0] * 2, X)


class Dropping(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.share, self.layer = share, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.rand([]) < self.share:
            return x
        return self.layer(x)


def test_layers_that_are_never_dropped() -> None:
    """As transformers' time series models have them; those that are dropped now and then are refused."""
    assert "aten.linear.default" in [node.op_name for node in capture(Dropping(0.0), (X,))]
    with pytest.raises(CaptureError, match="decides by the values"):
        capture(Dropping(0.1), (X,))


def test_masks_that_read_by_place_inside_vmap() -> None:
    """Of transformers' models that see images and texts: `mask_function`, with torch's own mode for `x[place]`."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    def function(groups: torch.Tensor) -> torch.Tensor:
        def same(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return groups[query] == groups[key]

        with TransformGetItemToIndex():
            return torch.vmap(torch.vmap(same, (None, 0)), (0, None))(torch.arange(5), torch.arange(5))

    groups = torch.tensor([0, 0, 1, 1, 0])
    assert torch.equal(outputs(captured(function, groups), groups)[0], groups[:, None] == groups)


def test_pieces_without_elements_are_dropped() -> None:
    """Phi-3's rotary embedding turns the whole head, and then joins it with the rest: nothing."""
    assert traced(lambda x: torch.cat([x[:, :6] * 2, x[:, 6:]], 1), X) == ["aten.mul.Tensor"]


def test_synonyms_are_one_op() -> None:
    assert traced(lambda x: torch.concat([torch.multiply(x, x), x.absolute()]), X) == [
        "aten.mul.Tensor", "aten.abs.default", "aten.cat.default"]
    assert traced(lambda x: x.movedim(0, 1).swapaxes(0, 1) + torch.empty_like(x), X) == [
        "aten.permute.default", "aten.permute.default", "aten.full.default", "aten.add.Tensor"]


def test_mean_losses_are_sums() -> None:
    functional = nn.functional
    names = traced(lambda x, y: functional.binary_cross_entropy_with_logits(x, y), X, X)
    assert names == ["aten.binary_cross_entropy_with_logits.default", "aten.mul.Tensor"]
    names = traced(lambda x, y: functional.nll_loss(x, y), X, torch.zeros(4, dtype=torch.long))
    assert names[0] == "aten.nll_loss_nd.default" and names[-1] == "aten.div.Tensor"


def test_repeats_are_expands() -> None:
    """Of which every dim can be cut as of other views."""
    assert traced(lambda x: x.repeat(2, 1, 3) + 0, X)[:3] == ["aten.reshape.default", "aten.expand.default",
                                                            "aten.reshape.default"]
    assert traced(lambda x: x.repeat_interleave(3, dim=1) + 0, X)[:3] == ["aten.reshape.default",
                                                                        "aten.expand.default", "aten.reshape.default"]


def test_one_tensor_given_twice_is_two_inputs() -> None:
    ids = torch.zeros(2, 8, dtype=torch.long)
    graph = capture(CASES["llama"].build(), (), {"input_ids": ids, "labels": ids})
    embedding = next(node for node in graph if node.op_name == "aten.embedding.default")
    assert graph.nodes[embedding.inputs[1].node].name == "input_ids"


def test_tied_parameters_are_one() -> None:
    graph = capture(CASES["gpt2"].build(), *CASES["gpt2"].inputs(8))
    assert graph.aliases["lm_head.weight"] == "transformer.wte.weight"
    (tied,) = [node for node in graph.of_kind("parameter") if node.path == "transformer.wte.weight"]
    uses = graph.consumers[Ref(tied.index)]
    readers = {graph.nodes[index].op_name for index, _ in uses}
    assert readers == {"aten.embedding.default", "aten.linear.default"}


def test_repeated_blocks_share_a_template() -> None:
    blocks = find_blocks(capture(CASES["llama"].build(), *CASES["llama"].inputs(8)))
    layers = [b for b in blocks if b.path.startswith("model.layers.")]
    assert len(layers) == 2 and layers[0].template == layers[1].template
    assert len(layers[0].nodes) == len(layers[1].nodes)


def test_fingerprint_tells_programs_apart() -> None:
    small, args, kwargs = CASES["llama"].build(), *CASES["llama"].inputs(8)
    assert capture(small, args, kwargs).fingerprint == capture(CASES["llama"].build(), args, kwargs).fingerprint
    other_args, other_kwargs = CASES["llama"].inputs(4)
    assert capture(small, args, kwargs).fingerprint != capture(small, other_args, other_kwargs).fingerprint


def test_batch_norm_updates_its_buffers() -> None:
    graph = capture(nn.BatchNorm2d(3), (torch.zeros(2, 3, 4, 4),))
    assert sorted(graph.mutations) == ["num_batches_tracked", "running_mean", "running_var"]
    assert "aten.batch_norm.default" not in {node.op_name for node in graph}


@pytest.mark.parametrize("norm", [
    lambda x, m, v: nn.functional.batch_norm(x, m, v, training=True),
    lambda x, m, v: nn.functional.instance_norm(x, m, v),
])
def test_statistics_that_are_inputs_are_refused(norm: Any) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
            return norm(x, mean, variance)

    with pytest.raises(CaptureError, match=r"running statistics that are the model's inputs .*mean"):
        capture(Model(), (torch.randn(2, 3, 4), torch.zeros(3), torch.ones(3)))


def attention_inputs_under(mask_of: Any, length: int = 6) -> tuple[int, bool]:
    """How many tensors attention reads, and whether it is causal, for a mask computed in the model."""

    def attend(q: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask_of(q))

    class Model(nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return attend(q) + attend(q + 1)

    q = torch.randn(2, 3, length, 4)
    graph = capture(Model(), (q,))
    first, _ = [n for n in graph.of_kind("op") if n.op_name.startswith("aten.scaled_dot_product")]
    outputs = [v for v in graph.outputs if isinstance(v, Ref)]
    (node,) = graph.of_kind("input")
    found = values_of(graph, outputs, {Ref(node.index): q}, torch.device("cpu"))[outputs[0]]
    torch.testing.assert_close(found, Model()(q))
    return len(first.inputs), bool(first.kwargs.get("is_causal"))


def positions(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = torch.arange(q.shape[-2])
    return p[:, None], p[None, :]


def packed(q: torch.Tensor) -> torch.Tensor:
    """As Hugging Face writes it: causal, within samples that counted positions tell apart."""
    row, column = positions(q)
    counted = torch.arange(q.shape[-2])[None].expand(q.shape[0], -1)
    sample = (counted.diff(dim=-1, prepend=counted[:, :1] - 1) != 1).cumsum(-1)
    same = sample[:, None, :, None] == sample[:, None, None, :]
    return (column <= row) & same


def packed_by_sample(q: torch.Tensor) -> torch.Tensor:
    """The same, looked up sample by sample."""
    counted = torch.arange(q.shape[-2])[None].expand(q.shape[0], -1)
    sample = (counted.diff(dim=-1, prepend=counted[:, :1] - 1) != 1).cumsum(-1)
    batch, (row, column) = torch.arange(q.shape[0])[:, None, None, None], positions(q)
    same = sample[batch, row[None, None]] == sample[batch, column[None, None]]
    return torch.where((column <= row) & same, 0.0, -torch.inf)


def test_masks_that_say_nothing_are_dropped() -> None:
    assert attention_inputs_under(lambda q: positions(q)[1] <= positions(q)[0]) == (3, True)
    assert attention_inputs_under(packed) == (3, True)
    assert attention_inputs_under(lambda q: torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool)) == (3, False)


def triangle(q: torch.Tensor) -> torch.Tensor:
    """As torch writes it: minus infinity above the diagonal."""
    length = q.shape[-2]
    return torch.full((length, length), -torch.inf).triu(1)


def least(q: torch.Tensor) -> torch.Tensor:
    """As Hugging Face writes it for eager attention."""
    row, column = positions(q)
    return torch.where(column <= row, 0.0, torch.finfo(q.dtype).min)


def test_masks_of_numbers_that_say_nothing_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As runs of keys, whole, and in blocks."""
    for cells, runs in ((attention_masks.BLOCK_CELLS, 64), (attention_masks.BLOCK_CELLS, 0), (12, 0)):
        monkeypatch.setattr(attention_masks, "BLOCK_CELLS", cells)
        monkeypatch.setattr(attention_mask_runs, "MOST_RUNS", runs)
        assert attention_inputs_under(triangle) == (3, True)
        assert attention_inputs_under(least) == (3, True)
        assert attention_inputs_under(lambda q: triangle(q) * 0.5 + 1) == (4, False)
        assert attention_inputs_under(lambda q: least(q) / 1e38) == (4, False)
        assert attention_inputs_under(lambda q: torch.zeros(q.shape[-2], q.shape[-2])) == (3, False)


def test_masks_that_say_something_stay() -> None:
    """A sliding window, one that looks ahead by one, one that differs by sample, one of the data."""
    assert attention_inputs_under(lambda q: (positions(q)[1] <= positions(q)[0]) & (
        positions(q)[0] - positions(q)[1] < 3)) == (4, False)
    assert attention_inputs_under(lambda q: (positions(q)[1] <= positions(q)[0]) & (
        positions(q)[1] > positions(q)[0] - 3)) == (4, False)
    assert attention_inputs_under(lambda q: positions(q)[1] <= positions(q)[0] + 1) == (4, False)
    assert attention_inputs_under(lambda q: positions(q)[1].flip(-1) <= positions(q)[0]) == (4, False)
    assert attention_inputs_under(lambda q: packed(q) & (positions(q)[0] - positions(q)[1]
                                                         < 6 - torch.arange(2)[:, None, None, None])) == (4, False)
    assert attention_inputs_under(lambda q: (q.sum((1, 3)) > 0)[:, None, None, :] | torch.eye(6).bool()) == (4, False)


def test_masks_of_any_length_are_recognised_by_runs() -> None:
    """One of 2^18 tokens has 7 x 10^10 cells."""
    def kind(mask: Callable[[], torch.Tensor]) -> str:
        graph = make_fx(mask, tracing_mode="fake")().graph
        return attention_masks.kind_of(graph.output_node().args[0])

    rows, columns = (lambda: torch.arange(1 << 18)[:, None]), lambda: torch.arange(1 << 18)[None]
    assert kind(lambda: (columns() <= rows()) & (columns() < 1 << 18)) == "causal"
    assert kind(lambda: (columns() <= rows()) | (columns() == 5)) == ""
    assert kind(lambda: rows() - columns() >= 0) == ""    # not known to be runs
    assert kind(lambda: torch.where(columns() > rows(), -torch.inf, 0.0)) == "causal"
    assert kind(lambda: columns() < rows()) == ""
    assert kind(lambda: (columns() <= rows()) | (columns() > rows())) == "all"


def test_large_masks_are_compared_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_masks, "BLOCK_CELLS", 12)
    monkeypatch.setattr(attention_mask_runs, "MOST_RUNS", 0)
    assert attention_inputs_under(packed) == (3, True)
    assert attention_inputs_under(packed_by_sample, 10) == (3, True)
    assert attention_inputs_under(lambda q: packed_by_sample(q).roll(1, -1), 10) == (4, False)
    assert attention_inputs_under(lambda q: (positions(q)[1] <= positions(q)[0]) | (positions(q)[1] == 5)) == (4, False)
    monkeypatch.setattr(attention_masks, "MOST_CELLS", 35)
    assert attention_inputs_under(packed) == (4, False)


def test_a_shared_mask_is_made_once() -> None:
    """As numbers, and so it is saved once for backward."""

    class Model(nn.Module):
        def forward(self, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                q = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
            return q

    graph = capture(Model(), (torch.randn(2, 3, 6, 4), torch.ones(6, 6, dtype=torch.bool).tril()))
    assert [n.op_name for n in graph.of_kind("op")].count("aten.where.self") == 1
    readers = [n for n in graph.of_kind("op") if n.op_name.startswith("aten.scaled_dot_product")]
    assert len(readers) == 3 and len({n.inputs[3] for n in readers}) == 1
