"""Step costs, live intervals and a subset of strategies -> the search problem, with a node per decision and an edge per
use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np

from autoparallel import clock
from autoparallel.layout import RedistributionTable
from autoparallel.plans import Hybrid
from autoparallel.pricing.counts import ExecutionCounts
from autoparallel.pricing.gradient_memory import GradientMemory
from autoparallel.pricing.live_intervals import Liveness
from autoparallel.pricing.pipeline_buffers import Buffer
from autoparallel.pricing.stage_devices import memory_shares
from autoparallel.pricing.step_cost import ALL_EXPOSED, Exposed, Picked, StepCosts
from autoparallel.pricing.unit_costs import Prices
from autoparallel.pricing.window_memory import WindowMemory
from autoparallel.search.model.interned import firsts, paired
from autoparallel.search.model.problem import Edge, Node, Problem, Repeats, User, unchecked
from autoparallel.strategies.space import Strategy, StrategySet, StrategySpace, TensorUse

Allowed = Mapping[int, np.ndarray]
#: Seconds per penalty: more than any step takes.
FAULT_S = 1e3
#: A device's memory limit, where there is none, beside limits of other tiers.
MOST_BYTES = 1e15
#: Largest share of all results' bytes that an op repeated as a side computation may produce.
SIDE_SHARE = 1e-3


class Penalties(Protocol):
    """Soft constraints: the number of violations by strategy, and by (source, target) strategy (see
    `planning.baselines`)."""

    def decision_penalties(self, index: int) -> np.ndarray: ...

    def use_penalties(self, use: TensorUse, table: RedistributionTable) -> np.ndarray: ...


class SpacePricer:
    """Builds search problems of one strategy graph, with all strategies or a subset for each decision.

    ``limit_bytes``: the memory limit per device; of an unequal cluster that of the smallest, of which bytes on a larger
    one take as small a share as of its own. ``allowed``: strategy numbers by decision that pins leave (other
    decisions are free); it holds in every problem. ``penalties`` outweigh all costs. ``exposed``: as in `StepCosts`.

    Side computations (positions, causal masks, rotary tables: no input, no gradient, few bytes) are repeated on every
    rank; taking a shard of the result is local.
    """

    def __init__(
        self,
        prices: Prices,
        limit_bytes: float = float("inf"),
        allowed: Allowed | None = None,
        penalties: Penalties | None = None,
        counts: ExecutionCounts | None = None,
        exposed: Exposed = ALL_EXPOSED,
    ) -> None:
        self.penalties, self.prices, self.space, self.limit_bytes = penalties, prices, prices.space, limit_bytes
        self.counts = counts or ExecutionCounts(prices.space, training=prices.training)
        self.costs = StepCosts(prices, self.counts, exposed)
        self.live = Liveness(self.counts, () if self.counts.one_for_all else memory_shares(prices, self.counts.hybrid))
        self.windows = WindowMemory(self.counts, self.live)
        self.gradients = GradientMemory(prices, self.counts, self.live, self.costs.gradients)
        self.allowed = {**_side_computations(self.space), **(allowed or {})}
        self.axis_names = self.space.axis_names
        self.tier_limits: Mapping[str, float] = {}

    def within(self, tier_limits: Mapping[str, float]) -> SpacePricer:
        """A copy whose problems also keep the training state on the host and on disk to limits, in bytes for each
        device; their peaks are of the tier with the largest share of its limit."""
        other = copy(self)
        other.tier_limits = tier_limits
        other.limit_bytes = min(self.limit_bytes, MOST_BYTES)
        return other

    @property
    def num_nodes(self) -> int:
        return len(self.space)

    def choices(self, decision: int) -> np.ndarray:
        """The strategy numbers of a decision that pins allow."""
        return self._choices[decision]

    @cached_property
    def _choices(self) -> list[np.ndarray]:
        whole = {size: np.arange(size) for size in {len(s.strategies) for s in self.space.strategy_sets}}
        found = [whole[len(s.strategies)] for s in self.space.strategy_sets]
        for decision, left in self.allowed.items():
            found[decision] = left
        return found

    def axis_strategies(self, node: int, axis: int) -> Sequence[int]:
        s = self.space.strategy_sets[node]
        equivalent = node if node in self.allowed else -1
        return self.costs.memo.once(
            ("rows", id(s), equivalent, axis), lambda: np.unique(s.array[self.choices(node), axis]).tolist()
        )

    def strategies(self, node: int) -> Sequence[Strategy]:
        s = self.space.strategy_sets[node]
        return [s.strategies[c] for c in self.choices(node)]

    def repeat_strategy(self, node: int, axis: int) -> int:
        return self.axis_strategies(node, axis)[0]

    def full(self) -> Problem:
        """The problem with all strategies that pins allow."""
        return _Builder(self, self._choices).problem()

    @property
    def where(self) -> str:
        """The mesh of a stage, as errors name it."""
        return f"on a mesh of {' x '.join(map(str, self.space.mesh_shape))}"

    def without_memory(self) -> Problem:
        """`full`, with nothing of memory in its edges, and with no limit."""
        builder = _Builder(self, self._choices)
        return Problem(builder.nodes(), builder.seconds_only(), name=self.where)

    def of_uses(self) -> Problem:
        """`full`, with no edges but those of uses: without buffers, and what is gathered for a while."""
        builder = _Builder(self, self._choices)
        return Problem(builder.nodes(), builder.edges(), self.limit_bytes, self.where)

    def exposing(self, share: Exposed) -> SpacePricer:
        """A copy with another ``exposed``."""
        other = copy(self)
        other.costs = copy(self.costs)
        other.costs.exposed = share
        return other

    def overlapping(self, **how: Any) -> SpacePricer:
        """A copy with these fields of ``Hybrid`` (``pieces``, ``experts_overlap``, ``fusion`` with or without
        ``blocks``), which change no cost but what overlap saves."""
        other = copy(self)
        other.counts = copy(self.counts)
        other.counts.hybrid = replace(self.counts.hybrid, **how)
        return other

    def bucketed(self, hybrid: Hybrid) -> SpacePricer:
        """The pricer of a step configuration that differs in its buckets."""
        counts = copy(self.counts)
        counts.hybrid = hybrid
        return SpacePricer(self.prices, self.limit_bytes, self.allowed, self.penalties, counts)

    def full_like(self, problem: Problem) -> Problem:
        """`full`, from that of a pricer that differs in ``exposed`` only."""
        edges = _Builder(self, self._choices).edges()
        return problem.with_edges(edges.followed_by(problem.edges[len(edges):]))

    def problem(self, allowed: Sequence[Sequence[Strategy]]) -> Problem:
        """The problem with these strategies only, for each decision; strategies that a decision lacks are skipped."""
        chosen = []
        for decision, strategies in enumerate(allowed):
            position, free = self.space.strategy_sets[decision].position, set(self.choices(decision).tolist())
            numbers = [position[tuple(x)] for x in strategies if tuple(x) in position]
            chosen.append(np.array([n for n in numbers if n in free], dtype=np.int64))
        return _Builder(self, chosen).problem()

    def choice_of(self, strategies: Sequence[Strategy]) -> tuple[int, ...]:
        """The choice in `full()` of one strategy per decision."""
        found = self.costs.kinds.numbers(strategies).tolist()
        for decision, left in self.allowed.items():
            found[decision] = int(np.searchsorted(left, found[decision]))
        return tuple(found)

    def choice_near(self, strategies: Sequence[Strategy]) -> tuple[int, ...]:
        """As `choice_of`, with the first allowed strategy for decisions whose strategy pins forbid."""
        found = []
        for decision, strategy in enumerate(strategies):
            places = np.flatnonzero(self.choices(decision) == self.space.strategy_sets[decision].position[strategy])
            found.append(int(places[0]) if len(places) else 0)
        return tuple(found)

    def strategies_of(self, choice: Sequence[int]) -> list[Strategy]:
        """The strategies of a choice in `full()`; the inverse of `choice_of`."""
        numbers = list(choice)
        for decision, left in self.allowed.items():
            numbers[decision] = left[numbers[decision]]
        return [s.strategies[number] for s, number in zip(self.space.strategy_sets, numbers, strict=True)]


class _Builder:
    """Builds the problem of a pricer with the strategy numbers ``chosen``, by decision."""

    def __init__(self, pricer: SpacePricer, chosen: Sequence[np.ndarray]) -> None:
        self.pricer, self.chosen, self.space, self.costs = pricer, chosen, pricer.space, pricer.costs
        self.counts, self.live, self.penalties = pricer.counts, pricer.live, pricer.penalties
        self.kinds, self.memo = pricer.costs.kinds, pricer.costs.memo
        self.picks = self._picks()

    def problem(self) -> Problem:
        clock.did("decisions read", len(self.chosen))
        edges = self.edges()
        single = [self._buffer(buffer) for buffer in self.counts.buffers]
        if self.counts.hybrid.prefetches:
            single += [edge for use in self.space.uses if self.counts.prefetches(use) for edge in self._gathered(use)]
        single += self.pricer.windows.edges(self.costs, self.chosen)
        single += self.pricer.gradients.edges(self.chosen)
        single += self._gradients() + self._in_tiers()    # last, where the record looks for them
        return Problem(self.nodes(), edges.followed_by(single), self.pricer.limit_bytes, self.pricer.where)

    def _picks(self) -> np.ndarray:
        """A number for each array of choices; equal arrays have equal numbers."""
        known: dict[bytes, int] = self.memo.once("picks", dict)
        numbers = {id(c): known.setdefault(c.tobytes(), len(known)) for c in {id(c): c for c in self.chosen}.values()}
        return np.array([numbers[id(c)] for c in self.chosen], np.int64)

    def nodes(self) -> Repeats[Node]:
        """A node per decision, memoised by equivalence class and choices."""
        intervals, copies = self.live.decision_intervals
        kinds, picks = self.kinds.decisions, self.picks
        inside = np.zeros(len(kinds), np.int64)
        inside[sorted(self.counts.saved.inside_only)] = 1
        first, which = firsts(paired(paired(paired(kinds, picks), inside), np.unique(copies, return_inverse=True)[1]))
        models = [self.memo.once(("node", int(kinds[at]), int(picks[at]), int(inside[at]), float(copies[at])),
                                 partial(self._node, at, float(copies[at]))) for at in first]
        made = Repeats(models, which, name=[decision.name for decision in self.space.decisions], interval=intervals)
        if self.penalties is None:
            return made
        times = self.counts.multiplicities
        penalties = [FAULT_S * times[index] * self.penalties.decision_penalties(index)[numbers]
                     for index, numbers in enumerate(self.chosen)]
        return _dearer(made, [(one.tobytes(),) for one in penalties], penalties.__getitem__)

    def _node(self, index: int, copies: float) -> Node:
        """A node; different classes may share costs or usages."""
        decision, s, numbers = self.space.decisions[index], self.space.strategy_sets[index], self.chosen[index]
        pick, cost = int(self.picks[index]), self.costs.of(index)
        costs = self.memo.once(("total", id(cost), pick), lambda: cost.total[numbers])
        found = self.costs.decision_bytes(index)
        usages = self.memo.once(("usage", id(found), pick, copies), lambda: found[numbers] * copies)
        strategies = s.strategies if len(numbers) == len(s.strategies) else tuple(s.strategies[n] for n in numbers)
        return Node(decision.name, costs, usages, strategies=strategies)

    def edges(self) -> Repeats[Edge]:
        """An edge per use, memoised by equivalence class and choices of its ends."""
        clock.did("decisions read", len(self.space.uses))
        (sources, targets), (intervals, copies), uses = self.kinds.use_ends, self.live.copy_intervals, self.space.uses
        kinds = self._use_kinds()
        first, which = firsts(paired(kinds, np.unique(copies, return_inverse=True)[1]))

        def model(at: int) -> Edge:
            key = (int(self.kinds.uses[at]), int(self.picks[sources[at]]), int(self.picks[targets[at]]),
                   float(copies[at]))
            exposed = self.costs.exposed.of(uses[at], bool(self.kinds.parameter_uses[at]))
            return self.memo.once(("edge", *key, exposed), lambda: self._edge(uses[at], float(copies[at])))

        made = Repeats([model(at) for at in first], which, source=sources.tolist(), target=targets.tolist(),
                       interval=intervals)
        if self.penalties is None:
            return made
        times, table = self.counts.multiplicities, self.pricer.prices.redistribution.table
        penalties = [self.penalties.use_penalties(use, table(use)) for use in uses]

        def more(at: int) -> np.ndarray:
            rows, columns = self.chosen[uses[at].source], self.chosen[uses[at].target]
            return FAULT_S * times[uses[at].target] * penalties[at][rows[:, None], columns]

        return _dearer(made, [(id(one), times[use.target]) for use, one in zip(uses, penalties, strict=True)], more)

    def _use_kinds(self) -> np.ndarray:
        """A number per use: equal numbers mean equal edges, but for their memory."""
        sources, targets = self.kinds.use_ends
        found = paired(paired(self.kinds.uses, self.picks[sources]), self.picks[targets])
        if not self.costs.exposed.by_use:
            return found
        known = dict[object, int]()
        ways = [self.costs.exposed.of(use, self.counts.of_parameter[use.source]) for use in self.space.uses]
        return paired(found, np.array([known.setdefault(one, len(known)) for one in ways], np.int64))

    def seconds_only(self) -> Repeats[Edge]:
        """The same without memory."""
        (sources, targets), uses = self.kinds.use_ends, self.space.uses
        clock.did("decisions read", len(uses))
        first, which = firsts(self._use_kinds())
        return Repeats([self._edge(uses[at]) for at in first], which, source=sources.tolist(), target=targets.tolist())

    def _edge(self, use: TensorUse, copies: float | None = None) -> Edge:
        """An edge; different classes may share costs or usages. ``copies``: of what it holds (None: without memory)."""
        rows, columns = self._picked(use.source), self._picked(use.target)
        seconds = self.costs.use_s(use, rows, columns)
        if copies is None:
            return Edge(use.source, use.target, seconds)
        key, of_parameter = self.costs.use_key(use), self.counts.of_parameter[use.source]

        def held() -> np.ndarray | None:
            usages = self.costs.copy_bytes(use)[rows.numbers[:, None], columns.numbers] * copies
            return usages if usages.any() else None

        return Edge(use.source, use.target, seconds, self.memo.once(
            ("copies", key, rows.pick, columns.pick, copies, of_parameter, self.costs.parameters.fetches(use)), held))

    def _picked(self, index: int) -> Picked:
        return Picked(self.chosen[index], int(self.picks[index]))

    def _buffer(self, buffer: Buffer) -> Edge:
        """A zero-cost edge with the bytes of a message buffer, by the layout of the value sent."""
        use = buffer.use
        s, shape = self.space.strategy_sets[use.source], (len(self.chosen[use.source]), len(self.chosen[use.target]))
        num_bytes = self.pricer.prices.local_bytes(use.meta, s.outputs[use.output])[self.chosen[use.source]]
        copies = buffer.copies * self.live.share(buffer.stage)
        usages = np.broadcast_to(copies * num_bytes[:, None], shape)
        return Edge(use.source, use.target, np.zeros(shape), usages, self.live.buffer_interval(buffer.stage))

    def _gathered(self, use: TensorUse) -> Iterator[Edge]:
        """A zero-cost edge with the bytes of intermediate results of a parameter's gathers."""
        usages = self.costs.gathered_bytes(use, self._picked(use.source), self._picked(use.target))
        if usages.any():
            yield Edge(use.source, use.target, np.zeros(usages.shape), usages, self.live.gathered_interval(use))

    def _gradients(self) -> list[Edge]:
        """Zero-cost edges with the bytes of gradients on their way to the host, or until they are let go."""
        found, first = [], {use.source: use for use in reversed(self.space.uses)}
        for index, last in self.costs.gradients.last_in_flight().items():
            use, interval = first[index], self.live.leaving_interval(index, last)
            share = self.live.share(*self.counts.stages_of[index])
            num_bytes = share * self.costs.gradients.bytes_of(index)[self.chosen[index]]
            shape = len(self.chosen[index]), len(self.chosen[use.target])
            found.append(Edge(index, use.target, np.zeros(shape), np.broadcast_to(num_bytes[:, None], shape), interval))
        return found

    def _in_tiers(self) -> list[Edge]:
        """Zero-cost edges with the bytes of parameters' states in limited tiers, as shares of the device's limit, at
        times of their own after the step: one for each tier and pipeline rank."""
        found, ranks = list[Edge](), len(self.counts.hybrid.groups)
        begin, first = ranks * (2 * len(self.space) + 2), {use.source: use for use in reversed(self.space.uses)}
        for number, (tier, limit) in enumerate(self.pricer.tier_limits.items()):
            for decision in self.space.decisions:
                if decision.kind != "parameter" or (use := first.get(index := decision.index)) is None:
                    continue
                num_bytes = self.costs.tiers.bytes_in(index, tier)[self.chosen[index]] * self.counts.held[index]
                shape = len(self.chosen[index]), len(self.chosen[use.target])
                usages = np.broadcast_to((num_bytes * self.pricer.limit_bytes / limit)[:, None], shape)
                at = begin + number * ranks + self.counts.stages_of[index][0] % ranks
                found.append(Edge(index, use.target, np.zeros(shape), usages, (at, at + 1)))
        return found


def _dearer(users: Repeats[User], kinds: Sequence[tuple[object, ...]], more: Callable[[int], np.ndarray]
            ) -> Repeats[User]:
    """Nodes, or edges, with penalties on their costs (``more``: by number); those that are alike and whose penalties
    are of one of ``kinds`` share the sum."""
    models, which, known = list[User](), list[int](), dict[tuple[object, ...], int]()
    for number, (model, kind) in enumerate(zip(users.which.tolist(), kinds, strict=True)):
        place = known.setdefault((model, *kind), len(models))
        if place == len(models):
            models.append(unchecked(users.models[model], costs=users.models[model].costs + more(number)))
        which.append(place)
    return Repeats(models, np.array(which, np.int64), **users.own)


def _side_computations(space: StrategySpace) -> dict[int, np.ndarray]:
    """The repeated strategies of side computations, by decision: ops that depend on no input, need no gradient, and
    produce at most `SIDE_SHARE` of a rank's bytes."""
    from_input = {decision.index for decision in space.decisions if decision.kind == "input"}
    for use in space.uses:  # ordered by target
        if use.source in from_input:
            from_input.add(use.target)
    ops = [decision.index for decision in space.decisions if decision.kind == "op" and decision.index not in from_input]
    work = {id(s): s for s in space.strategy_sets if s.rule is not None}
    sizes = {key: sum(m.num_bytes for m in s.output_metas) for key, s in work.items()}
    most = SIDE_SHARE * sum(sizes[id(s)] for s in space.strategy_sets if id(s) in sizes) / math.prod(space.mesh_shape)
    whole = {key: np.flatnonzero((s.array == 0).all(axis=1)) for key, s in work.items()
             if sizes[key] <= most and _is_aside(s)}
    return {index: whole[key] for index in ops if (key := id(space.strategy_sets[index])) in whole}


def _is_aside(s: StrategySet) -> bool:
    """Whether an op has no gradient, and is not a plain fill (whose shards cost nothing)."""
    filled = s.rule is not None and not s.input_metas and not s.rule.fixed
    return not filled and not any(m.requires_grad for m in (*s.input_metas, *s.output_metas))
