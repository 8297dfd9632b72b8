"""Flexible attention: score and mask functions, under random plans, against the same attention written by hand.

Torch's own has no backward on CPU; its forward there is compared too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.modeling_outputs import SequenceClassifierOutput

from autoparallel.capture import capture
from autoparallel.strategies.space import StrategySpace
from benchmarks.model_zoo import truth
from tests.support.random_plans import TOLERANCE, error_under
from tests.support.tiers import slow

LENGTH, HEADS, SHARED, DIM = 12, 4, 2, 4
DOCUMENTS = torch.tensor([0] * 5 + [1] * 7)
COMPILED = torch.compile(flex_attention)
#: The keywords of a call, from the module.
Options = Callable[[Any], dict[str, Any]]


def biased(m: Any) -> dict[str, Any]:
    """Causal, with a slope and a learnt bias by head and place."""
    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(i >= j, torch.tanh(s / 5) * 5 + 0.1 * (j - i) + m.bias[h, i], -float("inf"))

    return {"score_mod": score}


def documents(m: Any) -> dict[str, Any]:
    """A mask made where it is used."""
    device = m.bias.device
    mask = create_block_mask(lambda b, h, i, j: (i >= j) & (m.documents[i] == m.documents[j]), None, None, LENGTH,
                             LENGTH, device=device)
    return {"block_mask": mask}


def windowed(m: Any) -> dict[str, Any]:
    """A mask made before, under which the first place reads nothing; scores are divided."""
    return {"block_mask": m.window, "scale": 0.3}


WINDOW = create_block_mask(lambda b, h, i, j: (i > j) & (i - j < 4), None, None, LENGTH, LENGTH, device="cpu")
OPTIONS = [biased, documents, windowed]


def allowed(options: Options) -> Tensor:
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    by_name = {"biased": i >= j, "documents": (i >= j) & (DOCUMENTS[:, None] == DOCUMENTS),
               "windowed": (i > j) & (i - j < 4)}
    return by_name[options.__name__]


def by_hand(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(HEADS // SHARED, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (0.3 if m.options is windowed else 1 / math.sqrt(DIM))
    if m.options is biased:
        places = torch.arange(LENGTH)
        scores = torch.tanh(scores / 5) * 5 + 0.1 * (places - places[:, None]) + m.bias[:, :, None]
    mask = allowed(m.options)
    weights = torch.softmax(scores.masked_fill(~mask, -1e30), -1) * mask.any(-1, keepdim=True)
    return weights @ v


def flexible(call: Callable[..., Any]) -> Callable[..., Tensor]:
    def attention(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made: Tensor = call(q, k, v, enable_gqa=True, **m.options(m))
        return made

    return attention


class Model(nn.Module):
    def __init__(self, options: Options, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.options, self.attention, self.window = options, attention, WINDOW
        self.make, self.out = nn.Linear(16, (HEADS + 2 * SHARED) * DIM), nn.Linear(HEADS * DIM, 16)
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH))
        self.register_buffer("documents", DOCUMENTS)

    def forward(self, x: Tensor) -> SequenceClassifierOutput:
        made = self.make(x).unflatten(-1, (HEADS + 2 * SHARED, DIM)).transpose(1, 2)
        y = self.attention(self, *made.split([HEADS, SHARED, SHARED], 1))
        logits = self.out(y.transpose(1, 2).flatten(2))
        return SequenceClassifierOutput(loss=logits.square().mean() + 0.0 * self.bias.sum(), logits=logits)


@pytest.mark.parametrize(("options", "call"), [slow(biased, flex_attention), (documents, COMPILED),
                                               slow(windowed, flex_attention)], ids=["biased", "compiled", "windowed"])
def test_flexible_attention_is_what_its_functions_say(options: Options, call: Callable[..., Any]) -> None:
    mine, model = (Model(options, attention).double() for attention in (by_hand, flexible(call)))
    inputs = {"x": torch.randn(4, LENGTH, 16, dtype=torch.float64)}
    expected, graph = truth(mine, inputs), capture(model, (), inputs)
    for mesh in ((3,), (2, 2)):
        space = StrategySpace(graph, mesh)
        products = [
            s
            for decision, s in zip(space.decisions, space.strategy_sets, strict=True)
            if decision.name.startswith("matmul")
        ]
        assert len(products) == 2 and all(len(s.strategies) > 1 for s in products)
        for plan in range(2):
            error, name = error_under(model, inputs, expected, space, plan)
            assert error <= TOLERANCE, f"{name} on {mesh}, plan {plan}"


@pytest.mark.parametrize("options", [pytest.param(o, marks=pytest.mark.slow) for o in OPTIONS],
                         ids=lambda options: options.__name__)
def test_torch_computes_the_same_forward(options: Options) -> None:
    mine, model = (Model(options, attention) for attention in (by_hand, flexible(flex_attention)))
    with torch.no_grad():
        x = torch.randn(2, LENGTH, 16)
        torch.testing.assert_close(model(x).logits, mine(x).logits)


@pytest.mark.slow
def test_that_all_scores_are_computed_is_said_once_a_trace() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            made: Tensor = flex_attention(flex_attention(x, y, y), y, y)
            return made

    inputs = torch.zeros(1, 2, 6, 4), torch.zeros(1, 2, 9, 4)
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"all its scores at once, 6 x 9 a head") as told:
            capture(Twice(), inputs)
        assert sum("flex_attention" in str(w.message) for w in told) == 1
