"""Seconds of a rank's compute in a step by decision, and cumulative, for the simulation of its overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from autoparallel.pricing.activation_steps import ActivationSteps
from autoparallel.pricing.layer_overlap import OF_WEIGHT
from autoparallel.pricing.rank_reads import RankReads
from autoparallel.strategies.space import Strategy


class RankSeconds:
    """Seconds of a step on a rank of one stage; those of what is here."""

    def __init__(self, reads: RankReads, strategies: Sequence[Strategy], activations: ActivationSteps) -> None:
        self.reads, self.pricer, self.activations = reads, reads.pricer, activations
        self.strategies, self.stage, self.numbers = strategies, reads.stage, reads.numbers

    @cached_property
    def forward_s(self) -> list[float]:
        """Cumulative forward seconds: before each decision, and in total; without layers in pieces and mixtures."""
        return _before(self._each(0))

    @cached_property
    def backward_s(self) -> list[float]:
        """Cumulative backward seconds, without recompute, layers in pieces, mixtures whose rows travel and gradients of
        weights that are put off.
        The sum of the gradients of a value that travels is made by its first reader."""
        each = self._each(2)
        for layer, seconds in self.put_off_s.items():
            each[layer] -= seconds
        for target, reader in self.activations.shared.items():
            each[reader] += each[target]
            each[target] = 0.0
        return _before(each)

    @cached_property
    def put_off_s(self) -> Mapping[int, float]:
        """Seconds of the gradients of weights that are put off, by linear layer."""
        found, which = self._by_class
        return {layer: OF_WEIGHT * found[which[layer]][2] for layer in self.activations.put_off}

    @cached_property
    def in_parts_s(self) -> float:
        """Seconds of layers in pieces and of mixtures whose rows travel, as the search counts them: whole."""
        found, which = self._by_class
        return sum(found[which[index]][0] + found[which[index]][2] for index in self._in_parts)

    @property
    def _in_parts(self) -> list[int]:
        return [*self.activations.in_pieces, *self.activations.mixtures]

    @cached_property
    def again_s(self) -> list[float]:
        """Seconds of recompute, by decision."""
        found, which = self._by_class
        return [found[number][1] for number in which.tolist()]

    def _each(self, part: int) -> np.ndarray:
        """Seconds by decision; none of layers in pieces and of mixtures whose rows travel."""
        found, which = self._by_class
        each = np.array([seconds[part] for seconds in found])[which]
        each[self._in_parts] = 0.0
        return each

    @cached_property
    def updates_s(self) -> float:
        """Seconds of the optimizer's updates."""
        found, which = self._by_class
        return float(np.array([seconds[3] for seconds in found])[which].sum())

    @cached_property
    def _by_class(self) -> tuple[list[tuple[float, float, float, float]], np.ndarray]:
        """Seconds (forward, recompute, backward, optimizer) of each equivalence class; the class of each decision."""
        costs, members = self.pricer.costs, self.reads.members
        here = costs.kinds.decision_codes(self.strategies)[members]
        found, of_here = costs.memo.each(("seconds", self.stage), here, lambda at: self._priced(members[at]))
        which = np.full(len(self.reads.here), len(found))
        which[members] = of_here
        return [*found, (0.0, 0.0, 0.0, 0.0)], which

    def _priced(self, index: int) -> tuple[float, float, float, float]:
        cost = self.pricer.costs.of(index, self.stage)
        forward, again, backward, *_, update = (float(s[self.numbers[index]]) for s in cost)
        return forward, again, backward, update


def _before(each: np.ndarray) -> list[float]:
    """Cumulative seconds: before each decision, and in total."""
    return [0.0, *np.cumsum(each).tolist()]
