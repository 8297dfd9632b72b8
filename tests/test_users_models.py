"""Models as users write them: what they do beside calling layers changes no number, nor which gradients there are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import autoparallel
from autoparallel.capture import capture
from autoparallel.errors import CaptureError, InfeasibleError, RuleError
from autoparallel.ops.user_function import user_function
from autoparallel.strategies.space import StrategySpace
from benchmarks.rounding import largest_entry
from cost_models import Cluster
from tests.support.models import CASES as MODELS
from tests.support.ranks import mesh_of
from tests.support.reference import differences, gathered, gradients_of
from tests.support.tiers import slow
from tests.support.users_models import BATCH, CASES, WIDTH, Model, StraightThrough, bfloat16, mlp, x

TENSOR_PARALLEL = {"baseline": "tensor_parallel"}


def wrong(name: str, mesh_shape: tuple[int, ...], options: dict[str, Any]) -> list[str]:
    """What of the case differs from one process."""
    torch.manual_seed(0)
    one = CASES[name]()
    torch.manual_seed(0)
    many = CASES[name]()
    parallel = autoparallel.compile(many.model, mesh_of(*mesh_shape), **options)
    with one.around():
        expected = one.model(*one.args, **one.kwargs)
    with many.around():
        actual = parallel(*many.args, **many.kwargs)
    expected.backward()
    actual.backward()
    found = differences({"loss": actual.detach()}, {"loss": expected.detach()})
    wanted, have = gradients_of(one.model), gradients_of(parallel)
    if wanted.keys() != have.keys():
        return [f"{name}: gradients of {sorted(wanted.keys() ^ have.keys())}"]
    none = one.tolerance / 10    # what rounding leaves of a sum that cancels, as a share of the largest gradient
    zero = [n for n, g in wanted.items() if largest_entry({n: g}) < none * largest_entry(wanted)]
    found += differences(have, wanted, zero)
    found += differences(gathered(parallel.named_buffers()), gathered(one.model.named_buffers()))
    return [f"{name}: {d}" for d in found if d.error > one.tolerance]


@pytest.mark.parametrize(("mesh_shape", "options"), [
    slow((2,), {}), ((2,), TENSOR_PARALLEL), slow((2, 2), {}), slow((2, 2), TENSOR_PARALLEL)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_users_models_compute_the_same(ranks: Any, name: str, mesh_shape: tuple[int, ...], options: dict[str, Any]
                                       ) -> None:
    for found in ranks(math.prod(mesh_shape)).run(wrong, name, mesh_shape, options, timeout_s=100):
        assert not found, "\n".join(found)


class Hiding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Writing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Returning(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Any:
        return {"number": (x, 2), "list": [x], "none": (None,)}[kind]


@pytest.mark.parametrize(("kind", "said"), [("number", "returns a int"), ("list", "returns a list"),
                                            ("none", "returns no tensor")])
def test_functions_return_tensors(kind: str, said: str) -> None:
    """(It was pybind's text.)"""
    with pytest.raises(CaptureError, match=f"Returning.apply {said}"):
        capture(Model(lambda m, x: Returning.apply(m.a(x), kind)[0].sum(), a=nn.Linear(WIDTH, WIDTH)), (x(),))


def test_functions_that_cannot_be_kept_are_refused() -> None:
    with pytest.raises(CaptureError, match="given a Linear, which may hide tensors"):
        capture(Model(lambda m, x: Hiding.apply(x, m.a).sum(), a=nn.Linear(WIDTH, WIDTH)), (x(),))
    with pytest.raises(CaptureError, match="Writing writes in place"):
        capture(Model(lambda m, x: Writing.apply(m.a(x)).sum(), a=nn.Linear(WIDTH, WIDTH)), (x(),))


def test_the_same_call_of_a_function_is_the_same_op() -> None:
    """In every trace, so that plans fit; another class of the same name is another op."""
    def names(function: Any) -> list[str]:
        graph = capture(Model(lambda m, x: function.apply(m.a(x)).sum(), a=nn.Linear(WIDTH, WIDTH)), (x(),))
        return [n.args[0] for n in graph.of_kind("op") if n.target is user_function]

    def another() -> Any:
        class Local(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x + 1

        return Local

    assert names(StraightThrough) == names(StraightThrough) and len(names(StraightThrough)) == 1
    assert names(another()) != names(another())


def test_autocast_of_another_device_is_refused() -> None:
    """A trace on the meta device does not show what it would do."""
    def forward(m: Any, x: Tensor) -> Tensor:
        with bfloat16():
            return m.a(x).float().sum()

    with torch.device("meta"):
        model, given = Model(forward, a=nn.Linear(WIDTH, WIDTH)), torch.empty(BATCH, WIDTH)
    with pytest.raises(CaptureError, match="cannot be traced with tensors on meta"):
        capture(model, (given,))
    with bfloat16(), pytest.raises(CaptureError, match="cannot be traced with tensors on meta"):
        capture(model, (given,))


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def drawn() -> list[float]:
    """What a Function that draws numbers gives, of ranks whose own generators differ."""
    torch.manual_seed(0)
    model = autoparallel.compile(Model(lambda m, x: Noisy.apply(m.a(x)), a=mlp()), mesh_of(4), baseline="ddp")
    torch.manual_seed(torch.distributed.get_rank())
    made = model(x())
    return gathered([("y", made)])["y"].flatten().tolist()  # type: ignore[no-any-return]


def test_functions_draw_the_same_numbers_on_ranks_that_repeat_them(ranks: Any) -> None:
    first, *others = ranks(4).run(drawn)
    assert all(other == first for other in others)


class Largest(torch.autograd.Function):
    """It looks across samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / x.abs().max()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_functions_across_samples_refuse_micro_batches() -> None:
    model = Model(lambda m, x: Largest.apply(m.a(x)).square().mean(), a=mlp())
    with pytest.raises(InfeasibleError, match="cannot be split into micro-batches"):
        autoparallel.plan(model, Cluster.load("local-cpu", num_devices=4), example_inputs=(x(),), micro_batches=2,
                          time_limit_s=0.1)


class Scaled(torch.autograd.Function):
    """A gradient that is half of the forward's; it runs on its own width only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return scale * x.view(-1, WIDTH)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.scale / 2 * gradient, None


def test_a_function_may_have_a_rule() -> None:
    model, given = Model(lambda m, x: Scaled.apply(m.a(x), 2.0).sum(), a=nn.Linear(WIDTH, WIDTH)), (x(),)

    def decision() -> tuple[str, set[str]]:
        space = StrategySpace(capture(model, given), (2,))
        number = next(
            s.index for s in space.decisions if s.kind == "op" and "Scaled" in space.graph.nodes[s.node].op_name
        )
        return space.graph.nodes[space.decisions[number].node].op_name, {
            row.name for row in space.strategy_sets[number].axis_strategies
        }

    assert decision() == ("tests.test_users_models.Scaled", {"repeat", "part", "S(0)", "linear(0)"})  # as discovered
    with pytest.raises(RuleError, match="is wrong"):
        autoparallel.register_rule(Scaled, "x[b, k] -> y[b, k]", arguments={"scale": 2.0}, example=(x(),))
    autoparallel.register_rule(Scaled, "x[b, .] -> y[b, .]", linear=("x",), arguments={"scale": 2.0}, example=(x(),))
    assert decision()[1] == {"repeat", "part", "linear(0)", "b"}


def with_caches(name: str) -> tuple[list[str], list[str]]:
    """What differs from one process of loss and gradients, and of the cache, when a model returns its cache."""
    case = MODELS[name]
    args, kwargs = case.inputs(8)
    one, many = case.build(), case.build()
    one.config.use_cache = many.config.use_cache = True
    parallel = autoparallel.compile(many, mesh_of(2, 2))
    expected, actual = one(*args, **kwargs), parallel(*args, **kwargs)
    expected.loss.backward()
    actual.loss.backward()
    found = differences({"loss": actual.loss.detach(), **gradients_of(parallel)},
                        {"loss": expected.loss.detach(), **gradients_of(one)})
    assert type(actual.past_key_values) is type(expected.past_key_values)
    caches = [gathered((str(i), t) for i, t in enumerate(pytree.tree_leaves(out.past_key_values)))
              for out in (actual, expected)]
    assert caches[0]
    found += differences(*caches)
    return [str(d) for d in found if d.error > 1e-5], list(caches[0])


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_that_return_their_caches(ranks: Any, name: str) -> None:
    """As Hugging Face's do unless they are told not to."""
    for wrong_ones, cached in ranks(4).run(with_caches, name, timeout_s=100):
        assert not wrong_ones
        assert len(cached) == 4


def test_data_dependent_models_are_refused_with_a_remedy() -> None:
    def counting(m: Any, x: Tensor) -> Tensor:
        return torch.bincount(x.long().flatten()) * m.a.weight.sum()

    def casting(m: Any, x: Tensor) -> Tensor:
        return m.a.to(torch.float64)(x.double())

    def curved(m: Any, x: Tensor) -> Tensor:
        return torch.vmap(torch.func.hessian(lambda row: m.a(row).sin().sum()))(x)

    for forward, message in ((counting, "Give minlength"), (casting, r"casts its own Linear .* to torch.float64"),
                             (curved, r"torch.func.grad of torch.func.grad")):
        with pytest.raises(CaptureError, match=message):
            capture(Model(forward, a=nn.Linear(WIDTH, WIDTH)), (x(),))
        nn.Linear(WIDTH, WIDTH)  # no transform is left behind


def test_inputs_of_a_meta_model_may_be_anywhere() -> None:
    args, kwargs = MODELS["gpt2"].inputs(8)
    with torch.device("meta"):
        model = MODELS["gpt2"].build()
    assert len(capture(model, args, kwargs)) == len(capture(MODELS["gpt2"].build(), args, kwargs))
