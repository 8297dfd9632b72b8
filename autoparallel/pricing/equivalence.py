"""Equivalence classes of decisions and tensor uses: equal numbers mean equal costs, so each class is priced once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, reduce
from typing import Any

import numpy as np

from autoparallel.pricing.counts import ExecutionCounts
from autoparallel.pricing.unit_costs import Prices
from autoparallel.search.model.interned import paired
from autoparallel.strategies.space import Strategy


class Equivalence:
    """The equivalence classes of a strategy graph under these unit costs and execution counts."""

    def __init__(self, prices: Prices, counts: ExecutionCounts) -> None:
        self.prices, self.counts, self.space = prices, counts, prices.space
        self._numbers: dict[tuple[Strategy, ...], np.ndarray] = {}

    @cached_property
    def decisions(self) -> np.ndarray:
        """The equivalence class of each decision: equal numbers mean equal costs."""
        counts = self.counts
        if counts.in_one:
            return self.anywhere
        return _equivalent([self.anywhere, numbered(counts.stages_of) if counts.alike is None else counts.alike,
                            [index in counts.unused for index in range(len(self.space))]])

    @cached_property
    def anywhere(self) -> np.ndarray:
        """The same, as if all decisions ran on one stage."""
        counts, count = self.counts, len(self.space)
        facts: list[Sequence[Any] | np.ndarray] = [numbered(map(id, self.space.strategy_sets)), self.readers,
                                                   counts.of_parameter]
        facts += [fact for fact in (counts.multiplicities, counts.held) if len(set(fact)) > 1]  # of a reduced model
        facts.append([index in self.space.differentiated for index in range(count)])
        if counts.hybrid.offload.groups:
            facts.append(numbered(counts.away))
        if any(self.prices.chains):
            facts.append(numbered(self.prices.chains))
        if self.prices.cluster.profile is not None:  # hosts launch ahead in blocks only
            facts.append([bool(block) for block in self.space.blocks])
        if counts.lookups.names:
            facts.append([index in counts.lookups.tables or index in counts.lookups.ops for index in range(count)])
        if counts.lookups.cached:
            facts.append(numbered(map(counts.lookups.cached.get, range(count))))
        if counts.sparse.density:
            facts.append([counts.sparse.density.get(index, -1.0) for index in range(count)])
        if counts.hybrid.recompute != "none":
            facts += [[index in counts.blocks.runs_again for index in range(count)],
                      numbered(map(counts.offloads, range(count)))]
        return _equivalent(facts)

    @cached_property
    def uses(self) -> np.ndarray:
        """The equivalence class of each use; equal numbers mean equal costs."""
        counts, uses, (sources, outputs, targets, positions) = self.counts, self.space.uses, self._columns.T
        facts: list[Sequence[Any] | np.ndarray] = [self.decisions[sources], outputs, self.decisions[targets],
                                                   positions]
        if counts.hybrid.recompute != "none" or counts.hybrid.zero_stage == 3:
            facts += [list(map(counts.reads_again, uses)), numbered(map(counts.offloads_copy, uses))]
        if counts.hybrid.alternates:
            facts.append(np.array(counts.views, bool)[sources])
        return _equivalent(facts)

    def decision_codes(self, strategies: Sequence[Strategy]) -> np.ndarray:
        """A number per decision, equal for equivalent decisions (`decisions`) with equal strategies."""
        return self.decisions * self.most_choices + self.numbers(strategies)

    def use_codes(self, strategies: Sequence[Strategy]) -> np.ndarray:
        """A number per use, equal for equivalent uses (`uses`) between equal strategies."""
        numbers, (sources, targets) = self.numbers(strategies), self.use_ends
        return (self.uses * self.most_choices + numbers[sources]) * self.most_choices + numbers[targets]

    def numbers(self, strategies: Sequence[Strategy]) -> np.ndarray:
        """The number of each decision's strategy, memoised."""
        key = tuple(strategies)
        if key not in self._numbers:
            self._numbers[key] = np.array(
                [s.position[strategy] for s, strategy in zip(self.space.strategy_sets, key, strict=True)], np.int64)
        return self._numbers[key]

    @cached_property
    def most_choices(self) -> int:
        return max((len(s.strategies) for s in self.space.strategy_sets), default=0)

    @cached_property
    def use_ends(self) -> tuple[np.ndarray, np.ndarray]:
        """(sources, targets) of all uses."""
        return self._columns[:, 0], self._columns[:, 2]

    @cached_property
    def _columns(self) -> np.ndarray:
        """(source, output, target, position) of all uses; shape (uses, 4)."""
        columns = list(zip(*self.space.uses, strict=True))[:4] or [()] * 4
        return np.stack([np.array(column, np.int64) for column in columns], axis=1)

    @cached_property
    def parameter_uses(self) -> np.ndarray:
        """Whether each use reads a parameter."""
        return np.array(self.counts.of_parameter, bool)[self.use_ends[0]]

    @cached_property
    def readers(self) -> np.ndarray:
        """The number of ops and shared reads that read each decision's results."""
        sources, targets = self.use_ends
        counted = np.array([decision.kind in ("op", "shared_read") for decision in self.space.decisions], bool)
        return np.bincount(sources[counted[targets]], minlength=len(self.space))


def _equivalent(facts: Sequence[Sequence[Any] | np.ndarray]) -> np.ndarray:
    """A number per position, equal where all facts are equal."""
    first, *rest = (np.unique(np.asarray(fact), return_inverse=True)[1].reshape(-1) for fact in facts)
    return reduce(paired, rest, first)


def numbered(values: Iterable[object]) -> list[int]:
    """Numbers of values in order of appearance (independent of addresses); equal values have equal numbers."""
    numbers = dict[object, int]()
    return [numbers.setdefault(value, len(numbers)) for value in values]
