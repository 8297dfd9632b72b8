"""GELU, SiLU, RMS and layer norms that a model writes out are one op, and nothing that only looks like one is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import autoparallel
from autoparallel.capture import capture
from autoparallel.kernels.norm import rms_norm
from tests.support.tiers import slow, with_slow

aten = torch.ops.aten
F = nn.functional
WIDE = 6


class Model(nn.Module):
    """A layer, then ``function`` of its result and of a weight."""

    def __init__(self, function: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(4, WIDE, dtype=dtype)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDE, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x), self.weight)


def squares(x: Tensor, eps: float = 1e-5) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True) + eps


def cast_norm(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(squares(wide))).to(x.dtype)


def bert_norm(x: Tensor, w: Tensor) -> Tensor:
    u = x.mean(-1, keepdim=True)
    s = (x - u).pow(2).mean(-1, keepdim=True)
    return w * ((x - u) / torch.sqrt(s + 1e-12)) + w


def centred_once(x: Tensor, w: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5) * w


def weight_first(x: Tensor, w: Tensor) -> Tensor:
    u = x.mean(-1, keepdim=True)
    return w + w * (x - u) / torch.sqrt(((x - u) ** 2).mean(-1, keepdim=True) + 1e-6)


def of_variance(x: Tensor, w: Tensor) -> Tensor:
    return w * ((x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)) + w


def of_corrected_variance(x: Tensor, w: Tensor) -> Tensor:
    variance = torch.var(x, (-2, -1), correction=0, keepdim=True)
    return (x - x.mean((-2, -1), keepdim=True)) / torch.sqrt(variance + 1e-5)


def cast_layer_norm(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    u = wide.mean(-1, keepdim=True)
    return w * ((wide - u) * torch.rsqrt((wide - u).pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) + w


def annotated_transformer(x: Tensor, w: Tensor) -> Tensor:
    return w * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + w


def of_a_sample(x: Tensor, w: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5)


def of_another_mean(x: Tensor, w: Tensor) -> Tensor:
    u = x.mean(-1, keepdim=True)
    return (x - u) * torch.rsqrt((x - u.tanh()).pow(2).mean(-1, keepdim=True) + 1e-5)


def mean_read_twice(x: Tensor, w: Tensor) -> Tensor:
    u = x.mean(-1, keepdim=True)
    return (x - u) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5) + u


def centred_along_rows(x: Tensor, w: Tensor) -> Tensor:
    return (x - x.mean(0, keepdim=True)) * torch.rsqrt(x.var(0, keepdim=True, unbiased=False) + 1e-5)


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Any]] = {
    "gelu_new":
        (lambda x, w: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))),
         aten.gelu.default),
    "gelu_fast": (lambda x, w: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
                  aten.gelu.default),
    "cdf": (lambda x, w: x * (0.5 * (1 + torch.erf(x / math.sqrt(2.0)))), aten.gelu.default),
    "halved last": (lambda x, w: x * (1 + torch.erf(x * math.sqrt(0.5))) / 2, aten.gelu.default),
    "silu": (lambda x, w: x * torch.sigmoid(x), aten.silu.default),
    "rms": (lambda x, w: w * (x * torch.rsqrt(squares(x))), aten.rms_norm.default),
    "rms divided": (lambda x, w: x / torch.sqrt(squares(x)) * w, aten.rms_norm.default),
    "rms of products": (lambda x, w: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6), aten.rms_norm.default),
    "rms, cast": (cast_norm, aten.rms_norm.default),
    "rms + 1": (lambda x, w: x * torch.rsqrt(squares(x)) * (1.0 + w), aten.rms_norm.default),
    "rms of two dims": (lambda x, w: x * torch.rsqrt(x.square().mean((-2, -1), keepdim=True) + 1e-5),
                        aten.rms_norm.default),
    "layer norm of BERT": (bert_norm, aten.layer_norm.default),
    "layer norm, centred once": (centred_once, aten.layer_norm.default),
    "layer norm, weight first": (weight_first, aten.layer_norm.default),
    "layer norm, variance": (of_variance, aten.layer_norm.default),
    "layer norm of two dims": (of_corrected_variance, aten.layer_norm.default),
    "layer norm, cast": (cast_layer_norm, aten.layer_norm.default),
}
#: Ops that are not rounded in 16 bits as their parts are.
NORMS = (aten.rms_norm.default, aten.layer_norm.default)

#: Forms of a function of which another one is there too.
LIKE_OTHERS = ("gelu_fast", "halved last", "rms of products", "rms of two dims", "layer norm, centred once",
               "layer norm, variance", "layer norm of two dims")
OTHERS: dict[str, tuple[Callable[..., Tensor], torch.dtype]] = {
    "other coefficient": (lambda x, w: 0.5 * x * (1 + torch.tanh(0.7979 * (x + 0.044715 * x ** 3))), torch.float32),
    "coefficient of few digits in 64 bits":
        (lambda x, w: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x ** 3))), torch.float64),
    "no half": (lambda x, w: x * (1 + torch.erf(x / math.sqrt(2.0))), torch.float32),
    "of another tensor": (lambda x, w: 0.5 * x * (1 + torch.erf(w / math.sqrt(2.0))), torch.float32),
    "quick": (lambda x, w: x * torch.sigmoid(1.702 * x), torch.float32),
    "gate of another": (lambda x, w: w * torch.sigmoid(x), torch.float32),
    "gate read twice": (lambda x, w: x * (gate := torch.sigmoid(x)) + gate, torch.float32),
    "scale read twice": (lambda x, w: x * (scale := torch.rsqrt(squares(x))) + scale, torch.float32),
    "gate without gradient": (lambda x, w: x * torch.sigmoid(x.detach()), torch.float32),
    "of another dim": (lambda x, w: x * torch.rsqrt(x.square().mean(0, keepdim=True) + 1e-5), torch.float32),
    "sum": (lambda x, w: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-5), torch.float32),
    "cubes": (lambda x, w: x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-5), torch.float32),
    "in 16 bits": (lambda x, w: x * torch.rsqrt(squares(x)), torch.bfloat16),
    "multiplied by the root": (lambda x, w: x * torch.sqrt(squares(x)), torch.float32),
    "annotated transformer": (annotated_transformer, torch.float32),
    "variance of a sample": (of_a_sample, torch.float32),
    "variance around another": (of_another_mean, torch.float32),
    "mean read twice": (mean_read_twice, torch.float32),
    "centred along rows": (centred_along_rows, torch.float32),
    "root over it": (lambda x, w: torch.sqrt(squares(x)) / x, torch.float32),
}


def ops(model: nn.Module, x: Tensor) -> list[Any]:
    return [node.target for node in capture(model, (x,)).of_kind("op")]


@pytest.mark.parametrize(("name", "dtype"), [
    *((name, torch.float32) if name not in LIKE_OTHERS else slow(name, torch.float32) for name in FUNCTIONS),
    *((name, torch.bfloat16) if name in ("gelu_new", "silu", "rms", "rms, cast", "rms + 1")
      else slow(name, torch.bfloat16) for name in FUNCTIONS)])
def test_a_function_written_out_is_one_op(name: str, dtype: torch.dtype) -> None:
    function, op = FUNCTIONS[name]
    found = ops(Model(function, dtype), torch.randn(3, 4, dtype=dtype))
    stays = dtype is torch.bfloat16 and op in NORMS and "cast" not in name
    assert (op in found) != stays
    if not stays:
        in_16 = dtype is torch.bfloat16    # a cast norm's weight and bias stay apart
        apart = {"rms, cast": in_16, "layer norm, cast": 2 * in_16, "rms + 1": True}.get(name, False)
        assert len(found) == 2 + apart, found


@pytest.mark.parametrize("name", with_slow(
    OTHERS, "coefficient of few digits in 64 bits", "of another tensor", "gate of another", "scale read twice", "cubes",
    "variance around another", "centred along rows", "mean read twice", "root over it"))
def test_what_only_looks_like_one_stays(name: str) -> None:
    function, dtype = OTHERS[name]
    fused = {aten.gelu.default, aten.silu.default, *NORMS}
    assert fused.isdisjoint(ops(Model(function, dtype), torch.randn(3, 4, dtype=dtype)))


def test_a_part_without_gradients_stays_apart() -> None:
    def gated(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.rsqrt(squares(x))
        return x * scale

    assert aten.rms_norm.default not in ops(Model(gated), torch.randn(3, 4))


def without_cast(x: Tensor, w: Tensor) -> Tensor:
    """The squares are of a cast without gradients, the product is not."""
    with torch.no_grad():
        wide = x.float()
    return x * torch.rsqrt(squares(wide))


def cast_twice_read(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        wide = x.float()
    return x * (wide * torch.rsqrt(squares(wide))).to(x.dtype) + wide.to(x.dtype)


@pytest.mark.parametrize("function", [without_cast, cast_twice_read])
def test_gradients_flow_through_casts_as_in_the_model(function: Callable[..., Tensor], mesh_of_one: DeviceMesh) -> None:
    """Not around one without gradients, nor into it."""
    torch.manual_seed(0)
    model, x = Model(function, torch.bfloat16), torch.randn(8, 4, dtype=torch.bfloat16)
    model(x).float().square().sum().backward()
    expected = model.layer.weight.grad
    model.zero_grad()
    parallel = autoparallel.compile(model, mesh_of_one, example_inputs=(x,))
    parallel(x).float().square().sum().backward()
    gradient: Any = dict(parallel.named_parameters())["layer.weight"].grad
    torch.testing.assert_close(gradient.full_tensor(), expected, rtol=0.05, atol=0.05)


def test_programs_on_a_cpu_run_the_kernel(mesh_of_one: DeviceMesh) -> None:
    x = torch.randn(8, 4)
    parallel = autoparallel.compile(Model(FUNCTIONS["rms"][0]), mesh_of_one, example_inputs=(x,))
    made: Any = parallel(x)
    names, waiting = set[str](), [made.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            names.add(node.name())
            waiting += [function for function, _ in node.next_functions]
    assert "_RmsNormBackward" in names


def test_a_norm_of_complex_numbers_is_torchs(mesh_of_one: DeviceMesh) -> None:
    def norm(x: Tensor, w: Tensor) -> Tensor:
        return torch.view_as_real(F.rms_norm(torch.complex(x, x.cos()), (WIDE,), eps=1e-5)).sin()

    torch.manual_seed(0)
    model, x = Model(norm), torch.randn(8, 4)
    model(x).sum().backward()
    expected = model.layer.weight.grad
    model.zero_grad()
    parallel = autoparallel.compile(model, mesh_of_one, example_inputs=(x,))
    parallel(x).sum().backward()
    gradient: Any = dict(parallel.named_parameters())["layer.weight"].grad
    torch.testing.assert_close(gradient.full_tensor(), expected)


def test_a_norm_of_no_elements_stays() -> None:
    assert aten.rms_norm.default not in ops(Model(lambda x, w: x[:, :0] * torch.rsqrt(squares(x[:, :0]))),
                                            torch.randn(3, 4))


@pytest.mark.parametrize("name", with_slow(FUNCTIONS, *LIKE_OTHERS))
def test_values_and_gradients_are_the_models(name: str, mesh_of_one: DeviceMesh) -> None:
    torch.manual_seed(0)
    model, x = Model(FUNCTIONS[name][0]), torch.randn(8, 4)
    expected = model(x)
    expected.square().sum().backward()
    parallel = autoparallel.compile(model, mesh_of_one, example_inputs=(x,))
    made = parallel(x)
    made.square().sum().backward()
    whole = made.full_tensor() if isinstance(made, DTensor) else made
    torch.testing.assert_close(whole, expected, atol=1e-6, rtol=1e-6)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert "layer.weight" in gradients
    for name, p in parallel.named_parameters():
        if name in gradients:
            gradient: Any = p.grad
            torch.testing.assert_close(gradient.full_tensor(), gradients[name], atol=1e-5, rtol=1e-5)


def test_the_kernel_of_rms_norms_is_torchs_and_keeps_less() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, dtype=torch.float64)
    w.requires_grad_()
    for shape, weight in (((4,), w), ((4,), None), ((3, 4), None)):
        torch.testing.assert_close(rms_norm(x, shape, weight, 1e-5), F.rms_norm(x, shape, weight, 1e-5))
    torch.testing.assert_close(rms_norm(x.float(), (4,)), F.rms_norm(x.float(), (4,)))
    small, weight = 1e-2 * x.bfloat16(), w.bfloat16()     # so that eps, which is not given, counts
    torch.testing.assert_close(rms_norm(small, (4,), weight), F.rms_norm(small, (4,), weight))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, (4,), w, 1e-5), (x, w))
    assert torch.autograd.gradgradcheck(lambda x, w: rms_norm(x, (4,), w, 1e-5), (x, w))

    def kept(norm: Callable[..., Tensor]) -> int:
        saved = dict[int, int]()

        def note(t: Tensor) -> Tensor:
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            norm(x, (4,), w, 1e-5).sum()
        return sum(saved.values())

    assert kept(rms_norm) == x.nbytes + w.nbytes + x.nbytes // 4     # and a number a row
    assert kept(F.rms_norm) >= 2 * x.nbytes

