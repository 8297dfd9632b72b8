"""Rules that users give for their own ops are proven on the spot, and then used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoparallel
from autoparallel import Cluster
from autoparallel.errors import RuleError
from tests.ranks import mesh_of


@torch.library.custom_op("ap_test::scaled_linear", mutates_args=())
def scaled_linear(x: Tensor, w: Tensor, scale: float = 2.0) -> Tensor:
    return scale * (x @ w.t())


@scaled_linear.register_fake
def _(x: Tensor, w: Tensor, scale: float = 2.0) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[0])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.scale = inputs[2]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    x, w = ctx.saved_tensors
    g = ctx.scale * gradient
    return g @ w, g.flatten(0, -2).t() @ x.flatten(0, -2), None


scaled_linear.register_autograd(_backward, setup_context=_setup)
RIGHT = "x[*b, k], w[n, k] -> y[*b, n]"


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 128).reshape(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.ap_test.scaled_linear(x, self.weight, 3.0).square().sum()


@pytest.mark.parametrize(("op", "pattern", "options", "part"), [
    ("aten::amax", "x[a, k] -> y[a]", {"arguments": {"dim": [1]}}, "cutting 'k' into 2 pieces"),
    ("ap_test::scaled_linear", "x[*b, k], w[k, n] -> y[*b, n]", {"reduce": "k"}, "cutting 'k' into 2 pieces"),
    ("ap_test::scaled_linear", RIGHT, {"reduce": "k", "linear": ["x w"]}, "is wrong"),
    ("ap_test::scaled_linear", "x[*b, k] -> y[*b, n]", {"reduce": "k"}, "does not run on"),
    ("ap_test::nothing", RIGHT, {}, "there is no op 'ap_test::nothing'"),
    ("scaled_linear", RIGHT, {}, "write library::name"),
    ("ap_test::scaled_linear", None, {}, "the pattern is None: give text"),
])
def test_a_wrong_rule_is_refused(op: str, pattern: Any, options: dict[str, Any], part: str) -> None:
    with pytest.raises(RuleError) as error:
        autoparallel.register_rule(op, pattern, **options)
    assert part in str(error.value), error.value


def loss_and_gradient(pins: Any) -> tuple[float, Tensor, int]:
    autoparallel.register_rule("ap_test::scaled_linear", RIGHT, reduce="k", linear=["x", "w"])
    x = torch.linspace(0, 1, 64).reshape(4, 16)
    parallel = autoparallel.compile(Custom(), mesh_of(4), example_inputs=(x,), pins=pins)
    loss = parallel(x)
    loss.backward()
    gradient = parallel.weight.grad
    return loss.item(), gradient.full_tensor(), gradient.to_local().numel()


@pytest.mark.parametrize("dim", [0, 1])
def test_a_right_rule_is_used(ranks: Any, dim: int) -> None:
    """The weight cut by rows (a column of the result) and by columns (a sum)."""
    from torch.distributed.tensor import Shard

    x = torch.linspace(0, 1, 64).reshape(4, 16)
    model = Custom()
    expected = model(x)
    expected.backward()
    assert model.weight.grad is not None
    for loss, gradient, pieces in ranks(4).run(loss_and_gradient, {"weight": (Shard(dim),)}):
        assert loss == pytest.approx(expected.item(), rel=1e-5) and pieces == 32
        torch.testing.assert_close(gradient, model.weight.grad)


def test_a_registered_op_is_not_repeated() -> None:
    x = torch.zeros(4, 16)
    cluster = Cluster.load("h100-sxm", num_devices=4)
    autoparallel.register_rule("ap_test::scaled_linear", RIGHT, reduce="k", linear=["x", "w"])
    assert not autoparallel.plan(Custom(), cluster, example_inputs=(x,), mesh_shape=(4,)).prediction.repeated_ops
