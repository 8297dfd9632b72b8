"""Capture: one normal form, nothing lost, nothing silently changed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from autoparallel.capture import Ref, capture, find_blocks
from autoparallel.capture.passes.compositions import COMPOSITIONS
from autoparallel.errors import CaptureError
from tests.support.captured import Weighed, as_tuple, captured, outputs, traced
from tests.support.models import CASES

X = torch.ones(4, 6)


def test_views_have_one_form() -> None:
    assert traced(lambda x: x.view(2, -1).unsqueeze(0).flatten(), X) == ["aten.reshape.default"]
    assert traced(lambda x: x.t().transpose(0, 1), X) == ["aten.permute.default"] * 2
    assert traced(lambda x: x.split(3, dim=1)[1] + 1, X) == ["aten.slice.Tensor", "aten.add.Tensor"]


def test_means_are_sums() -> None:
    assert traced(lambda x: x.mean(), X) == ["aten.sum.dim_IntList", "aten.mul.Tensor"]
    assert traced(lambda x: x.sum().mean(-1, keepdim=True), X) == ["aten.sum.dim_IntList"]  # of one number
    names = traced(lambda x, y: nn.functional.cross_entropy(x, y), X, torch.zeros(4, dtype=torch.long))
    assert names[0] == "aten.cross_entropy_loss.default" and names[-1] == "aten.div.Tensor"


def test_defaults_of_in_place_ops_are_those_of_the_functional_ones() -> None:
    """bernoulli_() draws with a chance of 0.5, as bernoulli.p has to be told."""
    graph = captured(lambda x: torch.empty_like(x).bernoulli_(0.5), torch.ones(4, 3))
    (value,) = outputs(graph, torch.ones(4, 3))
    assert set(value.flatten().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("options", [(), (0.5,), (3.0, 2.0)])
def test_normal_numbers_are_written_in_place(options: tuple[float, ...]) -> None:
    """As `torch.distributions.Normal.rsample` draws, which autoencoders do."""
    graph, x = captured(lambda x: torch.empty_like(x).normal_(*options) + x, X), torch.ones(4, 6)
    torch.manual_seed(3)
    (value,) = outputs(graph, x)
    torch.manual_seed(3)
    torch.testing.assert_close(value, torch.empty(4, 6).normal_(*options) + x)


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
    torch.testing.assert_close(outputs(captured(function, x), x), as_tuple(function(x)))


def test_any_and_all_are_counts() -> None:
    """Of which each rank has a summand; over no dims they reduce nothing."""
    x = torch.tensor([[0.0, 2.0, 1.0], [0.0, 0.0, float("nan")]])
    for function in (torch.any, torch.all):
        assert traced(function, x)[0] == "aten.count_nonzero.dim_IntList"
        for arguments in ((), (1, True), ((0, 1),), ((),)):
            for value in (x, x > 0, x[0, 0], (x > 0).to(torch.uint8)):
                if value.dim() == 0 and arguments and arguments[0] not in (0, ()):
                    continue
                made, expected = outputs(captured(lambda x, f=function, a=arguments: f(x, *a), value), value)[0], \
                    function(value, *arguments)
                assert made.dtype == expected.dtype and torch.equal(made, expected)


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
    torch.testing.assert_close(outputs(graph, x), as_tuple(WRITTEN_AS_OTHERS[name](x)), equal_nan=True)


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
    torch.testing.assert_close(outputs(graph, x, mask), as_tuple(same(x, mask)))
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
        torch.testing.assert_close(outputs(graph, x), as_tuple(model(x)))


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
        assert re.search(r"tests/(test_capture|support/captured)\.py:?", str(caught.value))
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


def test_empty_tensors_are_dropped() -> None:
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
    case = CASES["transformer_encoder"]
    small, args, kwargs = case.build(), *case.inputs(8)
    assert capture(small, args, kwargs).fingerprint == capture(case.build(), args, kwargs).fingerprint
    other_args, other_kwargs = case.inputs(4)
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

    with pytest.raises(CaptureError, match=r"running statistics that are no buffers, .*mean"):
        capture(Model(), (torch.randn(2, 3, 4), torch.zeros(3), torch.ones(3)))
