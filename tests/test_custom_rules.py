"""Rules that users give for their own ops are proven on the spot, and then used."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoparallel
from autoparallel import Cluster
from autoparallel.errors import RuleError
from tests.support.ranks import mesh_of


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


def function(forward: Any, backward: Any = None) -> Any:
    """A torch.autograd.Function of tensors; without a backward its gradient is that of the forward."""
    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Any:
            ctx.save_for_backward(*tensors)
            return forward(*tensors)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            if backward is not None:
                return backward(*ctx.saved_tensors, *gradients)
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in ctx.saved_tensors]
                made = forward(*leaves)
                wanted = [t for t in leaves if t.requires_grad]
                found = iter(torch.autograd.grad(made, wanted, *gradients))
                return tuple(next(found) if t.requires_grad else None for t in leaves)

    return Made


CALLS = iter(range(10**9))
ELEMENTWISE = "x[a, b] -> y[a, b]"


def row_of_zeros(*shape: int) -> list[Tensor]:
    return [torch.zeros(shape)]


@pytest.mark.parametrize(("op", "pattern", "options", "part"), [
    ("aten::amax", "x[a, k] -> y[a]", {"arguments": {"dim": [1]}}, "cutting 'k' into 2 shards"),
    ("ap_test::scaled_linear", "x[*b, k], w[k, n] -> y[*b, n]", {"reduce": "k"}, "dims that are always equal have one"),
    ("ap_test::scaled_linear", "x[*b, k], w[n, kk] -> y[*b, n]", {"reduce": "k kk"}, "dims that are always equal have"),
    ("ap_test::scaled_linear", RIGHT, {"reduce": "k", "linear": ["x w"]}, "is wrong"),
    ("ap_test::scaled_linear", "x[*b, k] -> y[*b]", {"reduce": "k"}, "does not run on"),
    ("ap_test::nothing", RIGHT, {}, "there is no op 'ap_test::nothing'"),
    ("scaled_linear", RIGHT, {}, "write library::name"),
    ("ap_test::scaled_linear", None, {}, "the pattern is None: give text"),
])
def test_a_wrong_rule_is_refused(op: str, pattern: Any, options: dict[str, Any], part: str) -> None:
    with pytest.raises(RuleError) as error:
        autoparallel.register_rule(op, pattern, **options)
    assert part in str(error.value), error.value


CUMSUM = function(lambda x: x.cumsum(0))


@pytest.mark.parametrize(("op", "pattern", "options", "part"), [
    # examples whose sizes or values hide what cutting does
    (CUMSUM, ELEMENTWISE, {"example": [torch.randn(1, 1)]}, "cutting 'a' into 2 shards"),
    (CUMSUM, ELEMENTWISE, {"example": [torch.randn(1, 8)]}, "cutting 'a' into 2 shards"),
    (CUMSUM, ELEMENTWISE, {"example": [torch.zeros(4, 4)]}, "cutting 'a' into 2 shards"),
    (CUMSUM, ELEMENTWISE, {"example": [torch.zeros(4, 4, dtype=torch.int64)]}, "cutting 'a' into 2 shards"),
    ("aten::cummax", "x[a, b] -> y[a, b], z[a, b]", {"example": [torch.ones(6, 6)], "arguments": {"dim": 0}}, "'a'"),
    (function(lambda x: x.cumsum(0) if (x >= 0).all() else x.new_zeros(()).view(2)), ELEMENTWISE,
     {"example": [torch.ones(4, 4)]}, "cutting 'a' into 2 shards"),  # of numbers above 0 only
    (function(lambda x: x.cumsum(0) if not x.any() else x.new_zeros(()).view(2)), ELEMENTWISE,
     {"example": [torch.zeros(4, 4, dtype=torch.int64)]}, "has equal entries, which hide"),
    (function(lambda x: x * 0), ELEMENTWISE, {}, "gives the same number everywhere"),
    (function(lambda x: x if x.shape[0] == 6 else x.cumsum(0)), ELEMENTWISE, {"example": [torch.randn(6, 6)]}, "'a'"),
    (function(lambda x: x.view(-1, 2, x.shape[1]).sum(1).repeat_interleave(2, 0)), ELEMENTWISE,
     {"example": [torch.randn(4, 6)]}, "does not run with a = 5"),
    (function(lambda x: x.view(-1, 2, x.shape[1]).sum(1).repeat_interleave(2, 0)), ELEMENTWISE, {},
     "does not run on tensors of shapes"),  # of pairs of rows
    # values that show it at some magnitude
    (function(lambda x: torch.where(x.abs().max() > 8, x.cumsum(0), x)), ELEMENTWISE, {}, "cutting 'a'"),
    # gradients
    (function(lambda x: x * 2, lambda x, g: g / g.norm()), ELEMENTWISE, {}, "gives a gradient"),
    (function(lambda x: x * 2, lambda x, g: g.flip(0)), "x[a, .] -> y[a, .]", {}, "gives a gradient"),
    (function(lambda x: x * 1j, lambda x, g: -1j * g.cumsum(0)), ELEMENTWISE,
     {"example": [torch.randn(4, 4, dtype=torch.complex64)]}, "gives a gradient"),
    # results
    (function(lambda x: x.max(), lambda x, g: g.expand_as(x)), "x[a] -> y[]", {}, "gives a result"),
    (function(lambda x: (x > 0).any(), lambda x, g: None), "x[a] -> y[]", {}, "type bool, which does not add up"),
    (function(lambda x: x.softmax(0)), ELEMENTWISE, {}, "cutting 'a'"),
    (function(lambda x: x[:3]), ELEMENTWISE, {}, "factor a is"),
    (function(lambda x: x.flatten()), ELEMENTWISE, {}, "gives 2 dims to a tensor of shape"),
    (function(lambda x: [x, x]), ELEMENTWISE, {}, "1 results, the op 1 and 2"),
    (function(lambda x: x.sum().item()), ELEMENTWISE, {}, "an op with a rule returns tensors"),
    # what is not a function of its inputs
    (function(lambda x: x + torch.rand_like(x)), ELEMENTWISE, {}, "not the same twice"),
    ("aten::bernoulli", ELEMENTWISE, {"example": [torch.full((6, 6), 0.5)]}, "not the same twice"),
    (function(lambda x: x + next(CALLS)), ELEMENTWISE, {}, "not the same twice"),
    ("aten::add_.Tensor", "x[a], y[a] -> z[a]", {}, "writes to its inputs"),
    (function(lambda x: x.detach().add_(1) * 1, lambda x, g: g), ELEMENTWISE, {}, "writes to the tensors"),
    (function(lambda x: x.as_strided(x.shape, (x.shape[1], 1)) * 2, lambda x, g: g * 2), ELEMENTWISE, {},
     "other numbers for the same tensors in other memory"),
    # claims beside the pattern
    ("ap_test::scaled_linear", RIGHT, {"reduce": "kk"}, "has no factor 'kk'; the nearest is 'k'"),
    ("ap_test::scaled_linear", RIGHT, {"reduce": "n"}, "has the factor 'n', so it is not summed over"),
    ("ap_test::scaled_linear", RIGHT, {"reduce": ["k"]}, "reduce has ['k']: give names as text"),
    ("ap_test::scaled_linear", RIGHT, {"reduce": "k", "additive": "wight"}, "no input 'wight'; the nearest is 'w'"),
    ("ap_test::scaled_linear", RIGHT, {"reduce": "k", "linear": ["z"]}, "has no input 'z'; it has ['w', 'x']"),
    ("ap_test::scaled_linear", RIGHT, {"reduce": "k", "linear": [""]}, "a group without inputs"),
    ("ap_test::scaled_linear", RIGHT, {"reduce": "k", "linear": "x w"}, "give a list of groups"),
    ("ap_test::scaled_linear", RIGHT, {"reduce": "k", "additive": "w"}, "has every factor of reduce='k'"),
    ("ap_test::scaled_linear", RIGHT, {"additive": "x"}, "has every factor of reduce=''"),
    # patterns
    (CUMSUM, "x[a, b]", {}, "one ->"),
    (CUMSUM, "x[a, b] y[a] -> z[a, b]", {}, "with commas between them"),
    (CUMSUM, "x[a, b] -> y[a, b] -> z[a, b]", {}, "one ->"),
    (CUMSUM, "x[a b] -> y[a b]", {}, "'a b' is no factor"),
    (CUMSUM, "x[a, a] -> y[a, .]", {}, "the factor 'a' twice"),
    (CUMSUM, "x[*a, *b] -> y[*a, *b]", {}, "more than one *"),
    (CUMSUM, "x[*a, a0] -> y[*a, a0]", {}, "'a0' is also a dim of '*a'"),
    (CUMSUM, "x[rows, b] -> y[row, b]", {}, "no input has the factor 'row' of a result; the nearest is 'rows'"),
    (CUMSUM, "x[a, b], x[a, b] -> y[a, b]", {}, "two tensors are called 'x'"),
    (CUMSUM, "x[a, b, c] -> y[a, b, c]", {"example": [torch.randn(4, 4)]}, "gives 3 dims to a tensor of shape [4, 4]"),
    # costs
    *((CUMSUM, "x[., b] -> y[., b]", {"flops_per_point": cost}, "flops_per_point is")
      for cost in (float("nan"), float("inf"), -1.0, "2", True, lambda n: n)),
    # examples and arguments
    (CUMSUM, "x[., b] -> y[., b]", {"example": torch.randn(4, 4)}, "give a list of the op's tensors"),
    (CUMSUM, "x[., b] -> y[., b]", {"example": [row_of_zeros(4, 4), row_of_zeros(4, 4)]}, "one example"),
    (CUMSUM, "x[., b] -> y[., b]", {"example": [torch.randn(4, 4)] * 2}, "1 inputs and 1 results, the op 2 and 1"),
    (CUMSUM, "x[., b] -> y[., b]", {"example": []}, "1 inputs and 1 results, the op 0 and 1"),
    (CUMSUM, "x[., b] -> y[., b]", {"example": [torch.empty(4, 4, device="meta")]}, "give plain tensors with values"),
    (CUMSUM, "x[., b] -> y[., b]", {"arguments": [1]}, "arguments is [1]: give a dict"),
    (nn.ReLU, ELEMENTWISE, {}, "neither an op nor a torch.autograd.Function"),
    (torch.relu, ELEMENTWISE, {}, "neither an op nor a torch.autograd.Function"),
])
def test_nothing_is_believed_untried(op: Any, pattern: str, options: dict[str, Any], part: str) -> None:
    with pytest.raises(RuleError) as error:
        autoparallel.register_rule(op, pattern, **options)
    assert part in str(error.value), error.value


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_gradients_are_proven_where_they_are_off(grad: Any) -> None:
    with grad(), pytest.raises(RuleError, match="gives a gradient"):
        autoparallel.register_rule(function(lambda x: x * 2, lambda x, g: g.cumsum(0)), ELEMENTWISE)


@pytest.mark.parametrize(("op", "pattern", "options"), [
    (function(lambda x: x.log()), ELEMENTWISE, {"example": [torch.rand(1, 4)]}),
    (function(lambda x: x.masked_fill(x > 0, -torch.inf)), ELEMENTWISE, {}),
    (function(lambda x: x.round(), lambda x, g: g), ELEMENTWISE, {"example": [torch.zeros(4, 4)]}),
    (function(lambda x, i: x[i]), "x[., c], i[b] -> y[b, c]", {"example": [torch.randn(4, 2), torch.zeros(2).long()]}),
    (function(lambda x, i: x[i]), "x[., c], i[b] -> y[b, c]", {"example": [torch.randn(4, 2), torch.tensor([3])]}),
    (torch.ops.aten.linalg_cholesky, "x[b, ., .] -> y[b, ., .]", {"example": [torch.eye(4).repeat(2, 1, 1)]}),
    ("aten::binary_cross_entropy", "x[a], t[a] -> y[a]",
     {"example": [torch.rand(3), torch.rand(3)], "arguments": {"reduction": 0}}),
    (function(lambda x: x.sum(0), lambda x, g: g.expand_as(x)), "x[*b, k] -> y[k]", {"reduce": "b", "linear": ["x"],
                                                                              "example": [torch.randn(3, 2)]}),
    (function(lambda x, y: x + y), "x[a, b], y[a, b] -> z[a, b]", {"example": [torch.randn(3, 2), torch.randn(1, 2)]}),
    (function(lambda x: x.view(-1)[: x.numel()].view(x.shape) * 3), ELEMENTWISE, {}),  # of contiguous tensors only
])
def test_right_rules_are_taken(op: Any, pattern: str, options: dict[str, Any]) -> None:
    autoparallel.register_rule(op, pattern, **options)


@torch.library.custom_op("ap_test::running", mutates_args=())
def running(x: Tensor, dim: int = 0, once: bool = False) -> Tensor:
    """Sums before each entry; of float64 only the first, of three dims along the last, of 64 rows on none."""
    if x.dtype == torch.float64:
        return x.cumsum(0)
    if x.dim() == 3:
        return x.cumsum(2)
    if x.shape[1] >= 64:
        return x + x.roll(32, 1)
    return x.clone() if once else x.cumsum(dim)


running.register_fake(lambda x, dim=0, once=False: torch.empty_like(x))


def test_a_new_call_of_a_rule_is_proven_anew() -> None:
    """Other arguments, types, numbers of dims and lengths: for them the rule does not count, which is said."""
    autoparallel.register_rule("ap_test::running", "x[*b, k] -> y[*b, k]", arguments={"once": True},
                               example=[torch.randn(4, 4)])
    op = torch.ops.ap_test.running

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = strategies_of(lambda x: op(x, once=True), torch.randn(8, 16))
    assert found == {"b0", "k"}
    for call, x, right in [(lambda x: op(x), torch.randn(8, 16), {"S(1)"}),
                           (lambda x: op(x, 1, False), torch.randn(8, 16), {"S(0)"}),
                           (lambda x: op(x, once=True), torch.randn(8, 16, dtype=torch.float64), {"S(1)"}),
                           (lambda x: op(x, once=True), torch.randn(8, 16, 4), {"S(0)", "S(1)"}),
                           (lambda x: op(x, once=True), torch.randn(8, 64), {"S(0)"})]:
        with pytest.warns(UserWarning, match="does not hold for a call"):
            found = strategies_of(call, x)
        assert {name for name in found if "linear" not in name} == right, (x.shape, x.dtype)


def strategies_of(call: Any, *tensors: Tensor) -> set[str]:
    """The ways to cut the only op."""
    from autoparallel.capture import capture
    from autoparallel.rules import find_rule

    class Model(nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return call(*given)

    graph = capture(Model(), tensors)
    (node,) = graph.of_kind("op")
    return {s.name for s in find_rule(graph, node)[0].axis_strategies()} - {"repeat", "part"}


def test_a_rule_of_a_known_op_replaces_ours() -> None:
    from autoparallel.rules import registry

    target = torch.ops.aten.tan.default
    before = registry._BUILDERS.get(target)
    try:
        autoparallel.register_rule("aten::tan", "x[a, .] -> y[a, .]")
        assert strategies_of(torch.tan, torch.randn(8, 16)) == {"a"}
    finally:
        registry._USERS.discard(target)
        registry._BUILDERS.pop(target)
        if before is not None:
            registry._BUILDERS[target] = before


def test_low_precision_is_proven_by_its_own_rounding() -> None:
    autoparallel.register_rule("ap_test::scaled_linear", RIGHT, reduce="k", linear=["x", "w"])
    x = torch.randn(8, 4096, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = strategies_of(lambda x, w: torch.ops.ap_test.scaled_linear(x, w), x, torch.randn(6, 4096).bfloat16())
    assert found == {"b0", "k", "n", "linear(0)", "linear(1)"}


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
    for loss, gradient, shards in ranks(4).run(loss_and_gradient, {"weight": (Shard(dim),)}):
        assert loss == pytest.approx(expected.item(), rel=1e-5) and shards == 32
        torch.testing.assert_close(gradient, model.weight.grad)


def test_a_registered_op_is_not_repeated() -> None:
    x = torch.zeros(4, 16)
    cluster = Cluster.load("h100-sxm", num_devices=4)
    autoparallel.register_rule("ap_test::scaled_linear", RIGHT, reduce="k", linear=["x", "w"])
    assert not autoparallel.plan(Custom(), cluster, example_inputs=(x,), mesh_shape=(4,)).prediction.repeated_ops
