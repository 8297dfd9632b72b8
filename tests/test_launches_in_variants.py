"""Communication inside the variant of an op is what its rule declares: kind, bytes and number of launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from autoparallel.plans import Hybrid
from autoparallel.pricing.exchanges import Inside
from autoparallel.strategies.space import Strategy, StrategySet
from tests.support.launch_order import Drawn, drawn_of
from tests.support.tiers import slow

#: Launches by (action, bytes on the fullest rank).
Launches = Counter[tuple[str, float]]
RANKS = 4


def told(inside: Iterable[Inside], strategy: int, trained: bool) -> Launches:
    """The launches that a rule declares. What goes around a ring together is one message per round; neighbours
    exchange borders in one all-to-all."""
    found, rings = Launches(), Counter[tuple[str, int]]()
    for one in inside:
        exchange, num_bytes = one.exchange, float(one.num_bytes[strategy])
        times = exchange.forward + exchange.backward * trained
        if not one.seconds[strategy]:
            continue
        if exchange.action in ("ring", "ring_gradients"):
            rings[exchange.action, times] += int(num_bytes)
        else:
            action = "all_to_all" if exchange.action == "neighbours" else exchange.action
            found[action, num_bytes * (RANKS if action == "all_gather" else 1)] += times
    for (_, times), together in rings.items():
        found["all_to_all", float(together)] += times * (RANKS - 1)
    return +found


def ran(drawn: Drawn, strategies: list[Strategy]) -> Launches:
    """What ranks launch inside ops in a step; an all-to-all in which nobody sends anything is no message."""
    by_rank = [[event[1:] for event in one.events if event[0] == "launch"]
               for one in drawn.recorded_with(strategies).steps(Hybrid(), within_ops=True).values()]
    found = Launches()
    for launch in zip(*by_rank, strict=True):
        actions, axes, sizes = zip(*launch, strict=True)
        assert len(set(actions)) == len(set(axes)) == 1
        found[actions[0], max(sizes)] += max(sizes) > 0
    return +found


def rows_of(s: StrategySet, variant: str) -> list[int]:
    return [number for number, row in enumerate(s.axis_strategies) if row.variant == variant and row.inside]


def check(drawn: Drawn, variant: str, count: int = 1) -> None:
    """For the first ``count`` ops that have the variant, each alone in its plan."""
    sets = drawn.space.strategy_sets
    plain = [next(st for st in s.strategies
                  if not any(s.axis_strategies[row].inside for row in s.array[s.position[st]].tolist())) for s in sets]
    ops = [index for index, s in enumerate(sets) if rows_of(s, variant)][:count]
    assert ops
    for index in ops:
        s = sets[index]
        rows = rows_of(s, variant)
        strategy = next(st for st in s.strategies if s.array[s.position[st]].tolist() in [[row] for row in rows])
        trained = any(meta.requires_grad for meta in s.output_metas)
        declared = told(drawn.prices.op_of(index).inside, s.position[strategy], trained)
        strategies = [*plain[:index], strategy, *plain[index + 1 :]]
        assert ran(drawn, strategies) == declared, drawn.space.decisions[index].name


class Attention(nn.Module):
    """Ring attention: lengths that four ranks divide."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal, self.weight = causal, nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x @ self.weight
        return F.scaled_dot_product_attention(q, q + 1, q * 2, is_causal=self.causal).square().sum()


class Borders(nn.Module):
    """Convolutions and pools with and without borders."""

    def __init__(self, kernel: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, kernel, stride, kernel // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().sum()


def drawn(model: nn.Module, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Drawn:
    return Drawn(model, (x,), {}, (RANKS,), 0, Hybrid(), monkeypatch)


@pytest.mark.parametrize("causal", [True, False])
def test_ring_attention(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check(drawn(Attention(causal), torch.randn(2, 2, 16, 8), monkeypatch), "ring")


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), slow(5, 1), (1, 1), slow(3, 2)])
def test_borders(kernel: int, stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = drawn(Borders(kernel, stride), torch.randn(2, 3, 16, 16), monkeypatch)
    check(made, "windows", 2 if kernel > 1 else 1)


@pytest.mark.parametrize(("case_name", "variant"), [
    ("gpt2", "sections"), ("gpt2", "norms"), ("gpt2", "classes"), slow("mixtral", "softmax"),
    *(slow("llama", variant) for variant in ("ring", "classes")), slow("resnet", "windows"),
    slow("bert", "norms"), slow("vit", "norms"), slow("gpt2", "ring"),
])
def test_variants_of_models(case_name: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(drawn_of(case_name, (RANKS,), 0, Hybrid(), monkeypatch), variant)
