"""What the rules claim, run as it is emitted: each axis strategy of an op on shards, forward and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autoparallel.layout import INVARIANT, PARTIAL, REPLICATE, Placement
from autoparallel.lower import emit
from autoparallel.rules.rule import AxisStrategy
from autoparallel.strategies.space import Strategy, StrategySet, StrategySpace
from benchmarks.in_process import on_every_rank
from benchmarks.rule_truth.cases import Case
from benchmarks.rule_truth.truth import Combination, held, lies

#: What a gradient is where the value is so.
DUAL = {"R": PARTIAL, "I": INVARIANT, "P": INVARIANT}


@dataclass(frozen=True)
class Claim:
    """A way to run the op that the rules allow on an axis, and what is wrong with it ("" when nothing is)."""

    combination: Combination
    axis_strategy: str
    wrong: str = ""


def claims(case: Case, num_ranks: int) -> tuple[list[Claim], bool]:
    """Every claim for an axis of so many ranks, tried; and whether the op has a rule at all."""
    try:
        space = StrategySpace(case.graph, (num_ranks,))
    except Exception as error:
        return [Claim(((), ()), "the rule itself", f"{type(error).__name__}: {str(error).strip()[:200]}")], True
    decision = next(decision.index for decision in space.decisions if decision.kind == "op")
    strategy_set = space.strategy_sets[decision]
    found = []
    for strategy in strategy_set.strategies:
        axis_strategy = strategy_set.axis_strategies[strategy[0]]
        inputs, outputs = (tuple(map(_whole, placed)) for placed in (axis_strategy.inputs, axis_strategy.outputs))
        if any(p != REPLICATE for p in (*inputs, *outputs)):
            found.append(
                Claim((inputs, outputs), axis_strategy.name, _Trial(case, space, decision, strategy).verdict())
            )
    return found, strategy_set.known


def _whole(p: Placement) -> Placement:
    return REPLICATE if p == INVARIANT else p


class _Trial:
    """One claim, on the ranks of one axis."""

    def __init__(self, case: Case, space: StrategySpace, decision: int, strategy: Strategy) -> None:
        self.case, self.space = case, space
        self.axis_strategy: AxisStrategy = space.strategy_sets[decision].axis_strategies[strategy[0]]
        self.strategies = self._strategies(decision, strategy)
        (self.num_ranks,) = space.mesh_shape

    def _strategies(self, op: int, strategy: Strategy) -> list[Strategy]:
        """The op as claimed; its inputs in shards as it reads them (whole ones stand for summands too)."""
        strategies = [strategy_set.strategies[0] for strategy_set in self.space.strategy_sets]
        strategies[op] = strategy
        for use in self.space.uses_by[op]:
            strategies[use.source] = _storing(
                self.space.strategy_sets[use.source], self.axis_strategy.inputs[use.position]
            )
        return strategies

    def verdict(self) -> str:
        programs = [emit(self.space, self.strategies, lambda *_: (), (rank,)).module for rank in range(self.num_ranks)]
        for number, values in enumerate(self.case.draws):
            leaves = [v.detach().clone().requires_grad_(m.requires_grad)
                      for v, m in zip(values, self.case.inputs, strict=True)]
            whole = self.case.run(leaves)
            shards = [
                [t.detach().clone().requires_grad_(m.requires_grad) for t in held(v, p, self.num_ranks, seed=i)]
                for i, (v, p, m) in enumerate(zip(values, self.axis_strategy.inputs, self.case.inputs, strict=True))
            ]
            try:
                wrong = self._judge(programs, leaves, whole, shards, gradients=number == 0)
            except Exception as error:
                wrong = f"{type(error).__name__}: {str(error).strip()[:200]}"
            if wrong:
                return wrong
        return ""

    def _judge(self, programs: Sequence[torch.nn.Module], leaves: list[Tensor], whole: Sequence[Tensor],
               shards: list[list[Tensor]], gradients: bool) -> str:
        weights = [_weights(value) if gradients and value.requires_grad else None for value in whole]
        asked = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        try:
            right = _gradients(whole, weights, [leaves[i] for i in asked])
        except Exception:  # an op that has no derivative here
            weights, right = [None] * len(whole), []
        shares = [held(w, _dual(p), self.num_ranks, seed=9) if w is not None else [None] * self.num_ranks
                  for w, p in zip(weights, self.axis_strategy.outputs, strict=True)]

        def work(coordinate: tuple[int, ...]) -> tuple[Sequence[Tensor], list[Tensor]]:
            (rank,) = coordinate
            made = programs[rank](*(p[rank] for p in shards))[0]
            return made, _gradients(made, [s[rank] for s in shares], [shards[i][rank] for i in asked])

        found = self._on_ranks(work)
        for output, (value, p) in enumerate(zip(whole, self.axis_strategy.outputs, strict=True)):
            if not lies([made[output].detach() for made, _ in found], _whole(p), value.detach()):
                return f"output {output} is not the whole's"
        for place, (i, gradient) in enumerate(zip(asked, right, strict=False)):
            if not lies([mine[place] for _, mine in found], _whole(_dual(self.axis_strategy.inputs[i])), gradient):
                return f"the gradient of input {i} is not the whole's"
        return ""

    def _on_ranks(self, work: Callable[[tuple[int, ...]], tuple[Sequence[Tensor], list[Tensor]]]
                  ) -> list[tuple[Sequence[Tensor], list[Tensor]]]:
        if self.axis_strategy.variant:  # which communicates
            made = on_every_rank((self.num_ranks,), self.space.axis_names, work)
            return [made[rank,] for rank in range(self.num_ranks)]
        return [work((rank,)) for rank in range(self.num_ranks)]


def _storing(strategy_set: StrategySet, p: Placement) -> Strategy:
    wanted = p if p.is_shard else INVARIANT
    return next(strategy for strategy in strategy_set.strategies if strategy_set.output_layout(strategy) == (wanted,))


def _dual(p: Placement) -> Placement:
    return p if p.is_shard else DUAL[p.kind]


def _weights(value: Tensor) -> Tensor:
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(7), dtype=value.dtype)


def _gradients(values: Sequence[Tensor], weights: Sequence[Tensor | None], wanted: Sequence[Tensor]) -> list[Tensor]:
    pairs = [(v, w) for v, w in zip(values, weights, strict=True) if w is not None and v.requires_grad]
    if not pairs or not wanted:
        return [torch.zeros_like(t) for t in wanted]
    return list(torch.autograd.grad([v for v, _ in pairs], list(wanted), [w for _, w in pairs],
                                    materialize_grads=True))
