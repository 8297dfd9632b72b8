"""Attention cut along the sequence: causal shards of queries, and ring attention. (Expert dispatch: test_experts.)"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import autoparallel
from autoparallel.capture import capture
from autoparallel.kernels import flash, ring
from autoparallel.kernels.groups import Axis
from autoparallel.pricing import Prices
from autoparallel.pricing.exchanges import RingRounds
from autoparallel.pricing.unit_costs import OpPrice
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster
from tests.support.ranks import mesh_of
from tests.support.tiers import slow


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", ["cpu", "plain"])
def test_kernels_with_logarithms(kernel: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped queries; the plain products are what devices without a flash kernel run."""
    monkeypatch.setattr(flash, "_kernel", lambda q, v: kernel)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 6, 8, generator=generator, requires_grad=True) for h in (4, 2, 2))
    expected = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    gradient = torch.randn(expected.shape, generator=generator)
    wanted = torch.autograd.grad(expected, (q, k, v), gradient)
    with torch.no_grad():
        out, logs, state = flash.attend(q, k, v, causal, 8**-0.5)
        found = flash.attend_backward(gradient, q, k, v, out, logs, causal, 8**-0.5, state)
    torch.testing.assert_close(out, expected)
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two)


class Attention(torch.nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True).square().sum()


def attend_on_ranks(mesh_shape: tuple[int, ...], causal: bool, strategy: tuple[str, ...], length: int
                    ) -> dict[str, float]:
    """Largest difference from one process, of the loss and of each gradient."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, heads, length, 16, generator=generator, requires_grad=True) for heads in (4, 2, 2)]
    model = Attention(causal)
    expected = model(*given)
    wanted = torch.autograd.grad(expected, given)
    mesh = mesh_of(*mesh_shape)
    plan = autoparallel.plan(model, Cluster.load("local-cpu", num_devices=mesh.size()), example_inputs=tuple(given),
                             mesh_shape=mesh_shape, axis_names=mesh.mesh_dim_names)
    name = next(n for n in plan.strategies if n.startswith("scaled_dot_product_attention") and ":" not in n)
    plan = dataclasses.replace(plan, strategies={**plan.strategies, name: strategy})
    parallel = autoparallel.compile(model, mesh, example_inputs=tuple(given), plan=plan)
    leaves = [x.detach().clone().requires_grad_() for x in given]
    loss = parallel(*leaves)
    loss.backward()
    found = {"loss": float((loss.detach() - expected.detach()).abs() / expected.detach().abs())}
    for letter, leaf, gradient in zip("qkv", leaves, wanted, strict=True):
        assert leaf.grad is not None
        found[letter] = float((leaf.grad - gradient).abs().max() / gradient.abs().max())
    return found


@pytest.mark.parametrize(("mesh_shape", "causal", "strategy"), [
    ((4,), True, ("queries",)), ((4,), True, ("ring",)), slow((4,), False, ("ring",)), slow((2,), True, ("ring",)),
    ((2, 2), True, ("queries", "queries")),
    ((2, 2), True, ("ring", "h")), slow((2, 2), True, ("b", "ring")), ((2, 2), False, ("s", "ring")),
    slow((2, 2), False, ("ring", "s")), ((2, 2), True, ("queries", "linear(2)")), slow((2, 2), True, ("part", "ring")),
])
def test_attention_cut_along_the_sequence(ranks: Any, mesh_shape: tuple[int, ...], causal: bool,
                                          strategy: tuple[str, ...], length: int = 8) -> None:
    for found in ranks(math.prod(mesh_shape)).run(attend_on_ranks, mesh_shape, causal, strategy, length, timeout_s=100):
        assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize(("mesh_shape", "length"), [((4,), 12), slow((4,), 4), slow((4,), 16), slow((3,), 12)])
def test_rings_of_shards_that_are_halved_and_that_are_not(ranks: Any, mesh_shape: tuple[int, ...], length: int) -> None:
    """Of an odd number of rows no two chunks can be made."""
    test_attention_cut_along_the_sequence(ranks, mesh_shape, True, ("ring",), length)


def test_rows_that_stand_apart() -> None:
    """Rings within rings, and rings of parts of the queries that cross its shards, are not offered."""
    q, k = torch.randn(2, 4, 8, 16, requires_grad=True), torch.randn(2, 2, 8, 16, requires_grad=True)

    def pairs(causal: bool) -> set[tuple[str, ...]]:
        space = StrategySpace(capture(Attention(causal), (q, k, k)), (2, 2))
        s = next(s for decision, s in zip(space.decisions, space.strategy_sets, strict=True)
                 if decision.name == "scaled_dot_product_attention")
        return {s.names(strategy) for strategy in s.strategies}

    causal, free = pairs(True), pairs(False)
    assert ("queries", "queries") in causal and ("ring", "h") in causal
    assert not causal & set(itertools.product(("ring",), ("ring", "queries")))
    assert not causal & set(itertools.product(("ring", "queries"), ("ring",)))
    assert ("ring", "s") in free and ("s", "ring") in free and ("ring", "ring") not in free


def test_prices_of_variants() -> None:
    """The last of n causal shards is 2 - 1/n even shares, unless these are halved; then a ring takes what shards of
    heads take, and its messages, as far as they do not travel while a round is computed."""
    price, at = prices_of_attention(4104)
    assert {one.exchange.action for one in price.inside} == {"ring", "ring_gradients"}    # no chunks move
    assert price.forward_s[at["h"]] < price.forward_s[at["queries"]] < 2 * price.forward_s[at["h"]]
    assert price.forward_s[at["queries"]] < price.forward_s[at["repeat"]]
    exposed = list[float]()
    for length in (4096, 65536):
        halved, at = prices_of_attention(length)
        own, sent, seconds = at["ring"], [0.0, 0.0], 0.0
        for one in halved.inside:
            sent = [sent[0] + one.forward_s[own], sent[1] + one.backward_s[own]]
            seconds += one.seconds[own] * (one.exchange.action == "ring")
        assert halved.forward_s[own] == pytest.approx(halved.forward_s[at["h"]] + sent[0])
        assert halved.backward_s[own] == pytest.approx(halved.backward_s[at["h"]] + sent[1])
        assert halved.forward_s[at["queries"]] > 1.5 * halved.forward_s[at["h"]]
        exposed.append(sum(one.forward_s[own] for one in halved.inside if one.exchange.action == "ring") / seconds)
    assert exposed[0] > 0.8    # work is short
    assert exposed[1] == pytest.approx(0.3)    # all travels meanwhile, at an overlap_slowdown of 1.3


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("work_s", [0.0, 1.0, 4.0, 20.0])
def test_exposed_messages_of_rings_are_those_of_each_round(ranks: int, work_s: float) -> None:
    rounds = RingRounds(ranks, np.array([2.0]), np.array([3.0]), saves=0.7)
    forward = backward = 0.0
    for number in range(ranks):
        keys, gradients = 2.0 * (number < ranks - 1), 3.0 * (number > 1)
        forward += keys - 0.7 * min(keys, work_s / ranks)
        backward += keys + gradients - 0.7 * min(keys + gradients, work_s / ranks)
    assert rounds.exposed_forward_s(np.array([work_s])) == pytest.approx(forward)
    assert rounds.exposed_backward_s(np.array([work_s])) == pytest.approx(backward + 3.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_messages_of_rings_are_priced_in_the_dtype_in_which_they_travel(dtype: torch.dtype,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of keys and values are sums in float32 or better."""
    sent = dict[str, set[torch.dtype]](ring=set(), ring_gradients=set())

    def begin(values: list[Tensor], axis: Axis) -> Any:
        sent[action] |= {value.dtype for value in values}
        return lambda: values

    monkeypatch.setattr(ring, "begin_shifted", begin)
    monkeypatch.setattr(ring, "shifted", lambda values, axis: begin(values, axis)())
    one = ring._Ring(Axis("x", 3, 0, ""), False, 1.0, 1)
    q, k, v = (torch.randn(1, 2, 4, 8, dtype=dtype) for _ in range(3))
    action = "ring"
    out, logs, state = one.attend(q, k, v)
    assert sent["ring"] == {dtype}
    action = "ring_gradients"
    one.gradients(torch.ones_like(out), q, k, v, out, logs, state)
    x = torch.empty(1, 2, 12, 8, dtype=dtype, device="meta", requires_grad=True)
    s = next(s for s in StrategySpace(capture(Attention(False), (x, x, x)), (3,)).strategy_sets
             if any(row.variant == "ring" for row in s.axis_strategies))
    priced = {exchange.action: exchange.bytes_per_element for row in s.axis_strategies if row.variant == "ring"
              for exchange in row.inside}
    of_gradients = (sent["ring_gradients"] - {dtype}) or {dtype}
    assert priced == {"ring": dtype.itemsize, "ring_gradients": of_gradients.pop().itemsize}


def prices_of_attention(length: int) -> tuple[OpPrice, dict[str, int]]:
    """Of causal attention on 8 ranks, and the places of some strategies."""
    x = torch.empty(1, 16, length, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
    space = StrategySpace(capture(Attention(True), (x, x, x)), (8,))
    prices = Prices(space, Cluster.load("h100-sxm", num_devices=8, software="none"))
    s = next(s for s in space.strategy_sets if any(one.variant == "ring" for one in s.axis_strategies))
    return prices.op(s), {name: s.position[(s.axis_strategy_named(name),)]
                          for name in ("repeat", "h", "queries", "ring")}
