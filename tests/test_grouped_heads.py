"""Attention of grouped queries: no repeated keys and values are kept or sent, and gradients are the model's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend

import autoparallel
from autoparallel.capture import capture
from autoparallel.kernels import flash, variants
from autoparallel.layout.shapes import most_heads_read, shard_of
from autoparallel.pricing import Prices
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster
from tests.support.ranks import mesh_of
from tests.support.tiers import slow, with_slow

aten = torch.ops.aten
attention = nn.functional.scaled_dot_product_attention
HEADS, GROUPS, WIDTH, TOKENS = 8, 2, 4, 6
TIMES = HEADS // GROUPS
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def repeat_kv(x: Tensor, times: int = TIMES) -> Tensor:
    """[batch, groups, tokens, width] -> [batch, heads, tokens, width], as transformers writes it."""
    b, groups, tokens, width = x.shape
    return x[:, :, None].expand(b, groups, times, tokens, width).reshape(b, groups * times, tokens, width)


def late(x: Tensor) -> Tensor:
    """Repeated before heads are brought in front."""
    return x.transpose(1, 2).repeat_interleave(TIMES, dim=2).transpose(1, 2)


def cast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q.double(), repeat_kv(k).double(), repeat_kv(v).double(), is_causal=True).float()


def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :1].expand(-1, HEADS, -1, -1) for x in (k, v))
    return attention(q, k, v)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask for each head, which depends on the data."""
    return attention(q, repeat_kv(k), repeat_kv(v), q.sum(-1, keepdim=True) > torch.linspace(-2, 0.5, TOKENS))


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Numbers that need gradients."""
    return attention(q, repeat_kv(k), repeat_kv(v), q.mean(1, keepdim=True) @ k[:, :1].mT)


GROUPED: dict[str, Function] = {
    "repeat_kv": lambda q, k, v: attention(q, repeat_kv(k), repeat_kv(v), is_causal=True),
    "repeat_interleave":
        lambda q, k, v: attention(q, k.repeat_interleave(TIMES, 1), v.repeat_interleave(TIMES, 1), scale=0.3),
    "before heads are in front": lambda q, k, v: attention(q, late(k), late(v), is_causal=True),
    "cast": cast, "one head": one_head, "masked": masked, "biased": biased,
    "other widths": lambda q, k, v: attention(q, repeat_kv(k), repeat_kv(v[..., :3]), is_causal=True),
    "fewer queries": lambda q, k, v: attention(q[:, :, :3], repeat_kv(k), repeat_kv(v), is_causal=True),
    "enable_gqa": lambda q, k, v: attention(q, k, v, is_causal=True, enable_gqa=True),
}


def without_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        key = repeat_kv(k)
    return attention(q, key, repeat_kv(v)) + k.sum()


OTHERS: dict[str, Function] = {
    "in turn": lambda q, k, v: attention(q, k.repeat(1, TIMES, 1, 1), v.repeat(1, TIMES, 1, 1)),
    "keys only": lambda q, k, v: attention(q, repeat_kv(k), torch.cat([v] * TIMES, 1)),
    "another op between": lambda q, k, v: attention(q, repeat_kv(k), repeat_kv(v).sin()),
    "other numbers": lambda q, k, v: attention(q, repeat_kv(k), repeat_kv(v[:, :1], HEADS)),
    "along the tokens":
        lambda q, k, v: attention(q[:, :GROUPS], k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)),
    "of three dims": lambda q, k, v: attention(q[0], repeat_kv(k)[0], repeat_kv(v)[0]),
    "without a gradient": without_gradient,
}


class Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.q, self.k, self.v = (nn.Linear(5, heads * WIDTH) for heads in (HEADS, GROUPS, GROUPS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.function(q, k, v).square().mean()


def called(model: nn.Module, x: Tensor) -> Any:
    """Of the model's attention: whether its queries are grouped, and its operands' shapes; and the graph."""
    graph = capture(model, (x,))
    (node,) = (n for n in graph.of_kind("op") if n.target is aten.scaled_dot_product_attention.default)
    return bool(node.kwargs.get("enable_gqa")), [graph.meta(ref).shape for ref in node.inputs], graph


@pytest.mark.parametrize("name", with_slow(GROUPED, "before heads are in front", "cast", "biased", "other widths",
                                           "fewer queries"))
def test_heads_that_are_repeated_are_read_once(name: str) -> None:
    grouped, shapes, graph = called(Model(GROUPED[name]), torch.randn(2, TOKENS, 5))
    assert grouped and [shape[1] for shape in shapes[1:3]] == [1 if name == "one head" else GROUPS] * 2
    assert not any(len(out.shape) == 5 for node in graph.of_kind("op") for out in node.outputs)


@pytest.mark.parametrize("name", with_slow(OTHERS, "along the tokens", "of three dims", "another op between"))
def test_other_repetitions_stay(name: str) -> None:
    assert not called(Model(OTHERS[name]), torch.randn(2, TOKENS, 5))[0]


@pytest.mark.parametrize(("name", "repeats"), [
    *((name, False) if name in ("repeat_kv", "cast", "one head", "biased", "other widths", "in turn", "keys only")
      else slow(name, False) for name in {**GROUPED, **OTHERS}),
    *((name, True) if name in ("repeat_kv", "masked", "in turn") else slow(name, True)
      for name in {**GROUPED, **OTHERS})])
def test_loss_and_gradients_are_the_models(name: str, repeats: bool, mesh_of_one: DeviceMesh,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """``repeats``: as on a device whose kernel takes repeated heads only."""
    if repeats:
        monkeypatch.setattr(flash, "takes_groups", lambda *call: False)
    torch.manual_seed(0)
    model, x = Model({**GROUPED, **OTHERS}[name]), torch.randn(2, TOKENS, 5)
    expected = model(x)
    expected.backward()
    parallel = autoparallel.compile(model, mesh_of_one, example_inputs=(x,))
    loss = parallel(x)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for (name, found), (_, parameter) in zip(parallel.named_parameters(), model.named_parameters(), strict=True):
        made: Any = found.grad
        torch.testing.assert_close(made.full_tensor(), parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


class Fused(nn.Module):
    """Queries, keys and values in one projection; ``turned``: queries and keys as new tensors, as after rotation."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned, self.layer = turned, nn.Linear(5, (HEADS + 2 * GROUPS) * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.layer(x).split([heads * WIDTH for heads in (HEADS, GROUPS, GROUPS)], -1)
        q, k, v = (part.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for part in parts)
        q, k = (q * 2, k * 2) if self.turned else (q, k)
        return attention(q, repeat_kv(k), repeat_kv(v), is_causal=True)


@pytest.mark.parametrize("turned", [True, False])
def test_of_a_fused_projection_only_the_values_are_kept(turned: bool, mesh_of_one: DeviceMesh) -> None:
    torch.manual_seed(0)
    model, x = Fused(turned), torch.randn(2, TOKENS, 5)
    parallel = autoparallel.compile(model, mesh_of_one, example_inputs=(x,))
    whole, saved = 4 * 2 * TOKENS * model.layer.out_features, list[int]()

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        made: Any = parallel(x)
    assert (whole in saved) != turned
    torch.testing.assert_close(made.full_tensor() if hasattr(made, "full_tensor") else made, model(x))


# --- kernels -----------------------------------------------------------------------------------------------------


def operands(dtype: torch.dtype = torch.float32, tokens: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, tokens, heads, 16, generator=generator).to(dtype).transpose(1, 2).requires_grad_()
            for heads in (HEADS, GROUPS, GROUPS)]


def kept_bytes(function: Callable[[], Tensor]) -> int:
    """Bytes of the storages that are saved for backward."""
    saved = dict[int, int]()

    def note(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        function()
    return sum(saved.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("repeats", [False, True])
def test_no_copies_are_kept(dtype: torch.dtype, repeats: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if repeats:
        monkeypatch.setattr(flash, "takes_groups", lambda *call: False)
    q, k, v = operands(dtype)
    logs = 4 * q.shape[0] * q.shape[1] * q.shape[2]
    assert kept_bytes(lambda: flash.grouped_attention(q, k, v, is_causal=True)) == 2 * q.nbytes + 2 * k.nbytes + logs
    assert kept_bytes(lambda: attention(q, repeat_kv(k), repeat_kv(v))) == 4 * q.nbytes + logs


def test_products_are_no_kernel_for_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU in single precision, where torch has a fused kernel for repeated heads only."""
    q, k, v = operands()
    assert flash.takes_groups(q, k, v)
    with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):
        assert not flash.takes_groups(q, k, v)
    flash_only, chosen = SDPBackend.FLASH_ATTENTION.value, torch._fused_sdp_choice

    def choice(*call: Any, enable_gqa: bool) -> int:
        return SDPBackend.MATH.value if enable_gqa else chosen(*call)

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    logs = 4 * q.shape[0] * q.shape[1] * q.shape[2]
    assert chosen(q, q, q) == flash_only
    assert kept_bytes(lambda: flash.grouped_attention(q, k, v)) == 2 * q.nbytes + 2 * k.nbytes + logs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 2), (2, 4), (HEADS, 2), (2, HEADS)])
def test_keys_and_values_may_have_different_numbers_of_heads(heads: tuple[int, int], dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, n, 64, 16).to(dtype).requires_grad_() for n in (HEADS, *heads))
    made, expected = (attend(q, k, v, enable_gqa=True) for attend in (flash.grouped_attention, attention))
    torch.testing.assert_close(made, expected)
    wanted = torch.autograd.grad(expected.float().square().sum(), (q, k, v))
    for found, one in zip(torch.autograd.grad(made.float().square().sum(), (q, k, v)), wanted, strict=True):
        torch.testing.assert_close(found, one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bits_are_as_exact_as_of_copies(dtype: torch.dtype) -> None:
    """Torch's kernel for grouped queries adds them up in 16 bits on a CPU."""
    wanted = [x.detach().double().requires_grad_() for x in operands(dtype)]
    exact = torch.autograd.grad(attention(*wanted, is_causal=True, enable_gqa=True).square().sum(), wanted)

    def errors(function: Function) -> list[float]:
        given = operands(dtype)
        found = torch.autograd.grad(function(*given).float().square().sum(), given)
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]

    ours = errors(lambda q, k, v: flash.grouped_attention(q, k, v, is_causal=True))
    copies = errors(GROUPED["repeat_kv"])
    torchs = errors(GROUPED["enable_gqa"])
    assert max(abs(a - b) / b for a, b in zip(ours, copies, strict=True)) < 0.02
    assert torchs[1] > 1.2 * ours[1]


def test_dropout_and_second_gradients_are_those_of_torchs_products() -> None:
    given = [x.double().detach().requires_grad_() for x in operands(tokens=5)]
    made = []
    for attend in (flash.grouped_attention, GROUPED["repeat_kv"]):
        torch.manual_seed(3)
        call: Any = {"dropout_p": 0.5} if attend is flash.grouped_attention else {}
        made.append(attend(*given, **call))
    torch.manual_seed(3)
    expected = attention(given[0], repeat_kv(given[1]), repeat_kv(given[2]), dropout_p=0.5)
    torch.testing.assert_close(made[0], expected)
    assert not torch.allclose(made[0], made[1])
    with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(
            lambda *x: flash.grouped_attention(*x, is_causal=True), [x[:1, :, :2] for x in given], atol=1e-6)


@pytest.mark.parametrize("mask", ["", "bool", "numbers"])
def test_the_kernel_of_repeated_heads_on_a_gpu_is_called_as_it_asks(mask: str) -> None:
    """On tensors without values, which check arguments, types and sizes. (It has run on no GPU yet.)"""
    q, k, v = (torch.empty(2, heads, 6, 16, device="meta", requires_grad=True) for heads in (HEADS, GROUPS, GROUPS))
    given, bias = [q, k, v], None
    if mask:
        learned = torch.empty(2, 1, 6, 6, device="meta", dtype=torch.bool if mask == "bool" else torch.float32,
                              requires_grad=mask == "numbers")
        given += [learned] if mask == "numbers" else []
        bias = flash._bias(learned, q, k)
        assert bias.shape == (2, HEADS, 6, 6) and bias.stride()[-2:] == (8, 1) and bias.stride(1) == 0
        for odd in (torch.zeros(6, 20)[:, 2:18], torch.zeros(16, 6).T, torch.zeros(6, 1)):
            made = flash._bias(odd.to("meta"), q, torch.empty(2, GROUPS, 16, 16, device="meta"))
            assert made.shape == (2, HEADS, 6, 16) and made.stride(-1) == 1 and made.stride(-2) % 8 == 0
    made = flash._Repeated.apply(q, k, v, bias, 0.0, not mask, None)
    assert made.shape == q.shape
    for x, gradient in zip(given, torch.autograd.grad(made.sum(), given), strict=True):
        assert gradient.shape == x.shape and gradient.dtype == x.dtype


def test_traced_programs_keep_no_copies_either() -> None:
    """The kernel is picked by the device of a traced tensor, and what is saved are its operands."""
    from torch._functorch.aot_autograd import aot_function

    kept = []

    def note(graph: Any, inputs: Any) -> Any:
        kept.append([tuple(x.shape) for x in inputs])
        return graph

    for dtype in (torch.float32, torch.bfloat16):
        given = operands(dtype)
        traced = aot_function(lambda *x: flash.grouped_attention(*x, is_causal=True), note, note)
        found = torch.autograd.grad(traced(*given).float().square().sum(), given)
        expected = torch.autograd.grad(flash.grouped_attention(*given, is_causal=True).float().square().sum(), given)
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two)
        assert sum(shape == (2, GROUPS, 64, 16) for shape in kept[-1]) == 2
        assert sum(shape == (2, HEADS, 64, 16) for shape in kept[-1]) == 3, "queries, result and its gradient"


# --- shards ------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention; the sum of its squares, or the sum of each head, [heads]."""

    def __init__(self, dropout: float = 0.0, by_head: bool = False) -> None:
        super().__init__()
        self.dropout, self.by_head = dropout, by_head

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        key, value = (repeat_kv(x, q.shape[1] // x.shape[1]) for x in (k, v))
        made = attention(q, key, value, is_causal=True, dropout_p=self.dropout)
        return made.sum((0, 2, 3)) if self.by_head else made.square().sum()


class Grouped(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, is_causal=True, enable_gqa=True).square().sum()


def on_mesh(model: nn.Module, given: list[Tensor], mesh_shape: tuple[int, ...], strategy: tuple[str, ...],
            backend: str) -> Any:
    """The parallel module whose attention is cut by ``strategy``."""
    mesh = mesh_of(*mesh_shape)
    plan = autoparallel.plan(model, Cluster.load("local-cpu", num_devices=4), example_inputs=tuple(given),
                             mesh_shape=mesh_shape, axis_names=mesh.mesh_dim_names)
    name = next(n for n in plan.strategies if n.startswith("scaled_dot_product_attention") and ":" not in n)
    plan = dataclasses.replace(plan, strategies={**plan.strategies, name: strategy})
    return autoparallel.compile(model, mesh, example_inputs=tuple(given), plan=plan, backend=backend, outputs="whole")


def attend_on_ranks(mesh_shape: tuple[int, ...], strategy: tuple[str, ...], groups: int, backend: str
                    ) -> dict[str, float]:
    """Largest difference from one process, of the loss and of each gradient."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, heads, 8, 16, generator=generator, requires_grad=True) for heads in (HEADS, groups, groups)]
    model = Attention()
    parallel = on_mesh(model, given, mesh_shape, strategy, backend)
    leaves = [x.detach().clone().requires_grad_() for x in given]
    loss, expected = parallel(*leaves), model(*given)
    loss.backward()
    wanted = torch.autograd.grad(expected, given)
    found = {"loss": float((loss.detach() - expected.detach()).abs() / expected.detach().abs())}
    for letter, leaf, gradient in zip("qkv", leaves, wanted, strict=True):
        assert leaf.grad is not None
        found[letter] = float((leaf.grad - gradient).abs().max() / gradient.abs().max())
    return found


@pytest.mark.parametrize(("mesh_shape", "strategy", "groups"), [
    ((4,), ("heads",), 2), ((2, 2), ("h", "heads"), 2), ((2, 2), ("heads", "heads"), 2), slow((4,), ("h",), 4),
    slow((2, 2), ("ring", "heads"), 2), ((2, 2), ("heads", "queries"), 2), slow((2, 2), ("b", "heads"), 4),
])
def test_more_ranks_than_heads_of_keys(ranks: Any, mesh_shape: tuple[int, ...], strategy: tuple[str, ...],
                                       groups: int) -> None:
    for found in ranks(4).run(attend_on_ranks, mesh_shape, strategy, groups, "eager", timeout_s=100):
        assert max(found.values()) < 1e-5, found


def test_more_ranks_than_heads_of_keys_compiled(ranks: Any) -> None:
    for found in ranks(4).run(attend_on_ranks, (2, 2), ("h", "heads"), 2, "aot_eager", timeout_s=100):
        assert max(found.values()) < 1e-5, found


def drop_on_ranks(strategy: tuple[str, ...], backend: str) -> tuple[list[float], list[float]]:
    """By head, sums of attention with dropout of equal heads: on the ranks, and without dropout in this process."""
    generator = torch.Generator().manual_seed(0)
    one = torch.rand(64, 1, 8, 16, generator=generator)
    given = [one.repeat(1, heads, 1, 1).requires_grad_() for heads in (HEADS, 2, 2)]
    model = Attention(dropout=0.25, by_head=True)
    made = on_mesh(model, given, (4,), strategy, backend)(*given)
    made.sum().backward()
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in given)
    return made.tolist(), Attention(by_head=True)(*given).tolist()


@pytest.mark.parametrize(("strategy", "backend"), [
    (("heads",), "eager"), slow(("heads",), "aot_eager"), slow(("b",), "eager"), (("b",), "aot_eager")])
def test_shards_of_heads_with_dropout_draw_numbers_of_their_own(ranks: Any, strategy: tuple[str, ...], backend: str
                                                                ) -> None:
    found = ranks(4).run(drop_on_ranks, strategy, backend, timeout_s=100)
    sums, without = found[0]
    assert all(one == found[0] for one in found) and len(set(sums)) == HEADS
    assert all(abs(a / b - 1) < 0.05 for a, b in zip(sums, without, strict=True)), "dropout keeps the mean"


def test_rings_are_priced_by_the_heads_that_go_around() -> None:
    """8 heads of keys: of those a rank sends 4, 2 or 1, where the heads of queries are cut in 2, 4 or 8."""
    q, k = (torch.empty(1, heads, 4096, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
            for heads in (32, 8))
    found = list[float]()
    for ranks in (2, 4, 8, 16):
        space = StrategySpace(capture(Attention(), (q, k, k)), (2, ranks))
        s = next(s for s in space.strategy_sets if any(one.variant == "ring" for one in s.axis_strategies))
        inside = Prices(space, Cluster.load("h100-sxm", num_devices=2 * ranks, software="none")).op(s).inside
        row = s.position[(s.axis_strategy_named("ring"), s.axis_strategy_named("heads"))]
        found.append(sum(float(one.num_bytes[row]) for one in inside
                         if (one.axis, one.exchange.input, one.exchange.action) == (0, 1, "ring")))
    assert found == [size * 2048 * 128 * 2 for size in (4, 2, 1, 1)]


@pytest.mark.parametrize(("heads", "groups", "parts", "most"), [
    (32, 8, (4,), 2), (32, 8, (2, 8), 1), (8, 2, (3,), 3), (40, 10, (4,), 5), (6, 3, (2,), 3), (40, 10, (5,), 2)])
def test_heads_that_a_ring_sends_are_those_that_are_priced(heads: int, groups: int, parts: tuple[int, ...], most: int,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """40 heads on 4 ranks: the first one's 10 are served by 4, 4 and 2 of the keys' heads, sent as [0, 0, 1, 1, 2]."""
    sent = list[int]()

    def attend(q: Tensor, k: Tensor, v: Tensor, *call: Any, **options: Any) -> Tensor:
        sent.append(k.shape[1])
        return flash.grouped_attention(q, k, v)

    monkeypatch.setitem(variants.VARIANTS, "ring", variants.Variant(attend))
    q, k = torch.randn(1, heads, 8, 16), torch.randn(1, groups, 8, 16)
    expected, ranks = attention(q, k, k, enable_gqa=True), math.prod(parts)
    for rank in range(ranks):
        first, size = shard_of(heads, ranks, rank)
        made = variants.heads_of_groups(q[:, first : first + size], k, k, shards=(first, heads, 0, groups), axes=("x",),
                                        attend="ring")
        torch.testing.assert_close(made, expected[:, first : first + size])
    assert max(sent) == most_heads_read(heads, groups, parts) == most


def test_rings_take_as_many_heads_of_values_as_of_keys() -> None:
    """Torch's kernels, which rings run, read others beyond the end of what there is."""
    for values in (4, 2):
        q, k, v = (torch.randn(2, heads, 8, 16, requires_grad=True) for heads in (8, 4, values))
        names = {one.name for s in StrategySpace(capture(Grouped(), (q, k, v)), (4,)).strategy_sets
                 for one in s.axis_strategies}
        assert "queries" in names and ("ring" in names) == (values == 4)


def test_heads_are_cut_further_on_later_axes_only() -> None:
    q, k = torch.randn(2, 8, 8, 16, requires_grad=True), torch.randn(2, 2, 8, 16, requires_grad=True)
    space = StrategySpace(capture(Attention(), (q, k, k)), (2, 2))
    s = next(s for decision, s in zip(space.decisions, space.strategy_sets, strict=True)
             if decision.name == "scaled_dot_product_attention")
    pairs = {s.names(strategy) for strategy in s.strategies}
    assert {("h", "heads"), ("heads", "heads"), ("heads", "b"), ("ring", "heads")} <= pairs
    assert ("heads", "h") not in pairs and ("h", "h") not in pairs    # 2 heads of keys on 4 ranks
