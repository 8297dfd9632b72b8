"""Strategy graph, unit costs and execution counts -> the search problem, with a node per decision and an edge per
use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from autoparallel.capture import TensorMeta
from autoparallel.layout import RedistributionTable
from autoparallel.pricing.counts import Buffer, ExecutionCounts
from autoparallel.pricing.op_costs import dtype_name, share_of_work
from autoparallel.pricing.unit_costs import PricedStep, Prices
from autoparallel.search.model.interned import firsts, paired
from autoparallel.search.model.problem import Edge, Node, Problem, Repeats, unchecked
from autoparallel.strategies.space import Strategy, StrategySet, StrategySpace, TensorUse
from cost_models import collectives, compute

Allowed = Mapping[int, np.ndarray]
Made = TypeVar("Made")
#: Seconds per penalty: more than any step takes.
FAULT_S = 1e3
#: Largest share of all results' bytes that an op repeated as a side computation may produce.
SIDE_SHARE = 1e-3


class OpSeconds(NamedTuple):
    """Seconds of an op in a step: forward (with moves to the host), recompute, backward (with moves from the host)."""

    forward: float
    again: float
    backward: float


class Move(NamedTuple):
    """A use, its redistribution steps, and the number of its equivalence class: equal uses between equal strategies."""

    use: TensorUse
    path: Sequence[PricedStep]
    kind: int


class Penalties(Protocol):
    """Soft constraints: the number of violations by strategy, and by (source, target) strategy (see
    `planning.baselines`)."""

    def decision_penalties(self, index: int) -> np.ndarray: ...

    def use_penalties(self, use: TensorUse, table: RedistributionTable) -> np.ndarray: ...


class SpacePricer:
    """Builds search problems of one strategy graph, with all strategies or a subset for each decision.

    ``limit_bytes``: the memory limit per device. ``allowed``: strategy numbers by decision that pins leave (other
    decisions are free); it holds in every problem. ``penalties`` outweigh all costs. ``exposed``: the fractions of the
    seconds of parameter gathers and of gradient reductions that count (`overlap_simulation.least_exposed`).

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
        exposed: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self.penalties, self.exposed = penalties, exposed
        self.counts = counts or ExecutionCounts(prices.space, training=prices.training)
        self.prices, self.space, self.limit_bytes = prices, prices.space, limit_bytes
        self.allowed = {**_side_computations(self.space), **(allowed or {})}
        self.axis_names = self.space.axis_names
        self._made: dict[object, Any] = {}

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
        return self.once(
            ("rows", id(s), equivalent, axis), lambda: np.unique(s.array[self.choices(node), axis]).tolist()
        )

    def strategies(self, node: int) -> Sequence[Strategy]:
        s = self.space.strategy_sets[node]
        return [s.strategies[c] for c in self.choices(node)]

    def repeat_row(self, node: int, axis: int) -> int:
        return self.axis_strategies(node, axis)[0]

    def full(self) -> Problem:
        """The problem with all strategies that pins allow."""
        return self._problem(self._choices)

    def exposing(self, share: tuple[float, float]) -> SpacePricer:
        """A copy with another ``exposed``."""
        other = copy(self)
        other.exposed = share
        return other

    def full_like(self, problem: Problem) -> Problem:
        """`full`, from that of a pricer that differs in ``exposed`` only: only edges from parameters are priced
        again."""
        edges = self._edges(self._choices, self._picks(self._choices))
        return problem.with_edges(edges.followed_by(problem.edges[len(edges):]))

    def problem(self, allowed: Sequence[Sequence[Strategy]]) -> Problem:
        """The problem with these strategies only, for each decision; strategies that a decision lacks are skipped."""
        chosen = []
        for decision, strategies in enumerate(allowed):
            position, free = self.space.strategy_sets[decision].position, set(self.choices(decision).tolist())
            numbers = [position[tuple(x)] for x in strategies if tuple(x) in position]
            chosen.append(np.array([n for n in numbers if n in free], dtype=np.int64))
        return self._problem(chosen)

    def choice_of(self, strategies: Sequence[Strategy]) -> tuple[int, ...]:
        """The choice in `full()` of one strategy per decision."""
        found = self.numbers(strategies).tolist()
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

    def _problem(self, chosen: Sequence[np.ndarray]) -> Problem:
        picks = self._picks(chosen)
        edges = self._edges(chosen, picks)
        single = [self._buffer(buffer, chosen) for buffer in self.counts.buffers]
        if self.counts.hybrid.prefetches:
            single += [edge for use in self.space.uses if self.counts.prefetches(use)
                       for edge in self._shards(use, chosen)]
        return Problem(self._nodes(chosen, picks), edges.followed_by(single), self.limit_bytes, "strategy space")

    def _picks(self, chosen: Sequence[np.ndarray]) -> np.ndarray:
        """A number for each array of choices; equal arrays have equal numbers."""
        known: dict[bytes, int] = self.once("picks", dict)
        numbers = {id(c): known.setdefault(c.tobytes(), len(known)) for c in {id(c): c for c in chosen}.values()}
        return np.array([numbers[id(c)] for c in chosen], np.int64)

    def once(self, key: object, make: Callable[[], Made]) -> Made:
        """Memoise ``make()`` under ``key``."""
        if key not in self._made:
            self._made[key] = make()
        found: Made = self._made[key]
        return found

    def _nodes(self, chosen: Sequence[np.ndarray], picks: np.ndarray) -> Repeats[Node]:
        """A node per decision, memoised by equivalence class and choices."""
        intervals, copies = self.counts.decision_intervals
        first, which = firsts(paired(paired(self.decision_kinds, picks), np.unique(copies, return_inverse=True)[1]))
        models = [self.once(("node", int(self.decision_kinds[at]), int(picks[at]), float(copies[at])),
                            partial(self._node, at, chosen[at], int(picks[at]), float(copies[at]))) for at in first]
        made = Repeats(models, which, name=[decision.name for decision in self.space.decisions], interval=intervals)
        if self.penalties is None:
            return made
        penalties = [
            FAULT_S * self.penalties.decision_penalties(index)[numbers] for index, numbers in enumerate(chosen)
        ]
        return Repeats([unchecked(node, costs=node.costs + more) for node, more in zip(made, penalties, strict=True)])

    def _node(self, index: int, numbers: np.ndarray, pick: int, copies: float) -> Node:
        """A node; different classes may share costs or usages."""
        decision, s = self.space.decisions[index], self.space.strategy_sets[index]
        times, shared = self.counts.op_times(index), self.counts.ranks_with(index)
        key = (id(s), pick, decision.kind, int(self.readers[index]) if decision.kind == "shared_read" else 0,
               self.prices.chains[index])
        costs = self.once(("cost", *key, times, self.counts.offloads(index), shared),
                          lambda: self._decision_s(index, times)[numbers])
        usages = self.once(("usage", *key, copies), lambda: self.decision_bytes(index)[numbers] * copies)
        strategies = s.strategies if len(numbers) == len(s.strategies) else tuple(s.strategies[n] for n in numbers)
        return Node(decision.name, costs, usages, strategies=strategies)

    def _decision_s(self, index: int, times: tuple[int, int]) -> np.ndarray:
        """Seconds of a decision per step, run ``times`` (forward, backward), by strategy."""
        s, kind = self.space.strategy_sets[index], self.space.decisions[index].kind
        if kind == "op":
            price, moved = self.prices.op_of(index), self.offload_s(index)
            return times[0] * price.forward_s + times[1] * price.backward_s + moved[0] + moved[1]
        if kind == "shared_read":
            return times[1] * self.shared_read_s(index)
        if kind == "parameter":
            return self.counts.multiplicities[index] * (self.parameter_s(index) + self.shared_s(index))
        return np.zeros(len(s.strategies))

    def op_s(self, index: int, number: int, stage: int) -> OpSeconds:
        """Seconds of strategy ``number`` of an op per step, on a rank of the stage."""
        s, times, moves = (
            self.space.strategy_sets[index],
            self.counts.op_times(index, stage),
            self.counts.offloads(index),
        )

        def first() -> OpSeconds:
            price, (there, back) = self.prices.op_of(index), self.offload_s(index)
            once, again, backward = float(price.forward_s[number]), times[0] - times[1], float(price.backward_s[number])
            return OpSeconds(times[1] * once + float(there[number]), again * once,
                             times[1] * backward + float(back[number]))

        return self.once(("op", id(s), self.prices.chains[index], number, times, moves), first)

    def parameter_s(self, index: int) -> np.ndarray:
        """Seconds of a parameter's optimizer update, by strategy."""
        s = self.space.strategy_sets[index]
        return self.once(("updated", id(s)), lambda: self.prices.parameter_s(s))

    def shared_bytes(self, index: int) -> np.ndarray:
        """Bytes of a parameter's gradient in the dtype in which pipeline ranks sum it, by strategy."""
        s, dtype = self.space.strategy_sets[index], self.counts.hybrid.sum_dtype
        meta = s.output_metas[0]
        return (dtype or meta.dtype).itemsize / meta.dtype.itemsize * self.prices.local_bytes(meta, s.outputs[0])

    def shared_s(self, index: int) -> np.ndarray:
        """Seconds of summing a parameter's gradients over the pipeline ranks that hold it, by strategy."""
        ranks = self.counts.ranks_with(index)
        if len(ranks) < 2:
            return self._nothing(len(self.space.strategy_sets[index].strategies))[0]
        shape = (self.counts.hybrid.pipeline_ranks, *self.space.mesh_shape)
        return self.prices.bucket_s(self.prices.cluster.group(shape, 0, ranks), self.shared_bytes(index))

    def shared_read_s(self, index: int) -> np.ndarray:
        """Seconds of summing the gradients from a value's readers once, by strategy."""
        s, readers = self.space.strategy_sets[index], int(self.readers[index])
        return self.once(("shared_read", id(s), readers), lambda: self.prices.costs.sum_s(s, readers))

    def offload_s(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds per step of moving an op's results (to the host, back for backward), by strategy."""
        if not (times := self.counts.offloads(index)):
            return self._nothing(len(self.space.strategy_sets[index].strategies))
        return self._moved_s(times, self.decision_bytes(index))

    def _nothing(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        return self.once(("nothing", size), lambda: (np.zeros(size),) * 2)

    def offload_copy_s(self, use: TensorUse) -> tuple[np.ndarray, np.ndarray]:
        """As `offload_s`, for a use's redistributed copy; by (source strategy, target strategy)."""
        times = self.counts.offloads_copy(use)
        return self._moved_s(times, self.prices.use_copies(use))

    def _moved_s(self, times: int, num_bytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        cluster = self.prices.cluster
        seconds = [times * collectives.host_copy_s(num_bytes, cluster, to_device) for to_device in (False, True)]
        return np.where(num_bytes > 0, seconds[0], 0.0), np.where(num_bytes > 0, seconds[1], 0.0)

    def decision_bytes(self, index: int) -> np.ndarray:
        """Bytes of one copy of a decision's results (for a parameter its whole training state), by strategy."""
        s, kind = self.space.strategy_sets[index], self.space.decisions[index].kind
        return self.once(("bytes", id(s), kind), lambda: self._bytes_of(s, kind))

    def _bytes_of(self, s: StrategySet, kind: str) -> np.ndarray:
        if kind == "parameter":
            return self.prices.parameter_bytes(s) + self._sums_bytes(s.output_metas[0], s.outputs[0])
        total = self.prices.exchanged_bytes(s)
        if kind in ("shared_read", "output", "update") or (s.rule is not None and s.rule.alias):
            return total
        for meta, numbers in zip(s.output_metas, s.outputs, strict=True):
            total = total + self.prices.local_bytes(meta, numbers)
        if s.rule is not None and self.prices.training:
            for i, size in s.rule.extra_bytes.items():
                meta = s.input_metas[i]
                total = total + size / meta.dtype.itemsize * self.prices.local_bytes(meta, s.inputs[i])
            if s.rule.work_bytes:
                total = total + s.rule.work_bytes * share_of_work(s)
        return total

    def _sums_bytes(self, meta: TensorMeta, numbers: np.ndarray) -> np.ndarray:
        """Bytes of gradient accumulators kept beside the gradients, for layout numbers of a parameter."""
        return self.counts.accumulator_bytes(meta) / meta.dtype.itemsize * self.prices.local_bytes(meta, numbers)

    def _copy_bytes(self, use: TensorUse) -> np.ndarray:
        """Bytes of the redistributed copy of a use, and of its gradient's accumulator where that is separate (it
        replaces the accumulator of the stored shard). By (source strategy, target strategy)."""
        copies = self.prices.use_copies(use)
        if not self.counts.of_parameter[use.source] or self.counts.hybrid.zero_stage >= 2:
            return copies
        source, target = self.space.strategy_sets[use.source], self.space.strategy_sets[use.target]
        whole = self._sums_bytes(use.meta, target.inputs[use.position])
        local_shard = self._sums_bytes(use.meta, source.outputs[use.output])
        return np.where(copies > 0, copies + np.maximum(whole[None, :] - local_shard[:, None], 0.0), 0.0)

    def _edges(self, chosen: Sequence[np.ndarray], picks: np.ndarray) -> Repeats[Edge]:
        """An edge per use, memoised by equivalence class and choices of its ends."""
        (sources, targets), (intervals, copies), uses = self.use_ends, self.counts.copy_intervals, self.space.uses
        kinds = paired(paired(self.use_kinds, picks[sources]), picks[targets])
        first, which = firsts(paired(kinds, np.unique(copies, return_inverse=True)[1]))

        def model(at: int) -> Edge:
            rows, columns = chosen[sources[at]], chosen[targets[at]]
            key = int(self.use_kinds[at]), int(picks[sources[at]]), int(picks[targets[at]]), float(copies[at])
            exposed = self.exposed if self.parameter_uses[at] else None
            return self.once(("edge", *key, exposed), lambda: self._edge(uses[at], rows, columns, float(copies[at])))

        made = Repeats([model(at) for at in first], which, source=sources.tolist(), target=targets.tolist(),
                       interval=intervals)
        if self.penalties is None:
            return made
        penalties = [FAULT_S * self.penalties.use_penalties(use, self.prices.table(use.meta))[
            np.ix_(chosen[use.source], chosen[use.target])] for use in uses]
        return Repeats([unchecked(edge, costs=edge.costs + more) for edge, more in zip(made, penalties, strict=True)])

    def _edge(self, use: TensorUse, rows: np.ndarray, columns: np.ndarray, copies: float) -> Edge:
        """An edge; different classes may share costs or usages."""
        key, of_parameter = self._use_key(use, rows, columns), self.counts.of_parameter[use.source]
        costs = self._use_costs(use, rows, columns)

        def held() -> np.ndarray | None:
            usages = self._copy_bytes(use)[np.ix_(rows, columns)] * copies
            return usages if usages.any() else None

        return Edge(use.source, use.target, costs, self.once(("copies", key, copies, of_parameter), held))

    def _use_key(self, use: TensorUse, rows: np.ndarray, columns: np.ndarray) -> tuple[object, ...]:
        """A key that equivalent uses between these choices share."""
        source, target = self.space.strategy_sets[use.source], self.space.strategy_sets[use.target]
        return id(source), rows.tobytes(), use.output, id(target), columns.tobytes(), use.position

    def _use_costs(self, use: TensorUse, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Seconds of a use per step, by (row choice, column choice)."""
        times, (there, back) = self.counts.use_times(use), self.exposed
        counted = (there * times[0], back * times[1]) if self.counts.of_parameter[use.source] else times
        sums, summing, moves = self.counts.sums(use), self.counts.summing(use), self.counts.offloads_copy(use)
        return self.once(("use", self._use_key(use, rows, columns), counted, sums, summing, moves), lambda: (
            self.prices.use_s(use, counted, summing) + (self.sums_s(use) if sums else 0.0)
            + (sum(self.offload_copy_s(use)) if moves else 0.0))[np.ix_(rows, columns)])

    def moves(self, strategies: Sequence[Strategy]) -> Sequence[Move]:
        """The redistributions of a plan, ordered by target. Uses without a redistribution are left out, unless they
        read a parameter."""
        def found() -> list[Move]:
            numbers, kinds = self.numbers(strategies), self.use_kinds
            sources, targets = self.use_ends
            codes = (kinds * self.most_choices + numbers[sources]) * self.most_choices + numbers[targets]
            paths, which = self.each("steps", codes, lambda at: self._steps(
                self.space.uses[at], strategies[sources[at]], strategies[targets[at]]))
            some = np.array([bool(path) for path in paths], bool)[which] | self.parameter_uses
            return [Move(self.space.uses[at], paths[kind], kind)
                    for at, kind in zip(np.flatnonzero(some).tolist(), which[some].tolist(), strict=True)]

        return self.once(("moves", tuple(strategies)), found)

    def each(self, name: object, codes: np.ndarray, make: Callable[[int], Made]) -> tuple[list[Made], np.ndarray]:
        """``make(first position)`` for each distinct code, memoised under ``name``; and the number of each position's
        code."""
        values, first, which = np.unique(codes, return_index=True, return_inverse=True)
        made = [self.once((name, code), partial(make, at))
                for code, at in zip(values.tolist(), first.tolist(), strict=True)]
        return made, which.reshape(-1)

    def numbers(self, strategies: Sequence[Strategy]) -> np.ndarray:
        """The number of each decision's strategy."""
        return self.once(("numbers", tuple(strategies)), lambda: np.array(
            [s.position[strategy] for s, strategy in zip(self.space.strategy_sets, strategies, strict=True)], np.int64))

    def decision_codes(self, strategies: Sequence[Strategy]) -> np.ndarray:
        """A number per decision, equal for equivalent decisions (`decision_kinds`) with equal strategies."""
        return self.decision_kinds * self.most_choices + self.numbers(strategies)

    @cached_property
    def most_choices(self) -> int:
        return max((len(s.strategies) for s in self.space.strategy_sets), default=0)

    @cached_property
    def use_ends(self) -> tuple[np.ndarray, np.ndarray]:
        """(sources, targets) of all uses."""
        return self._uses[:, 0], self._uses[:, 2]

    @cached_property
    def _uses(self) -> np.ndarray:
        """(source, output, target, position) of all uses; shape (uses, 4)."""
        columns = list(zip(*self.space.uses, strict=True))[:4] or [()] * 4
        return np.stack([np.array(column, np.int64) for column in columns], axis=1)

    @cached_property
    def parameter_uses(self) -> np.ndarray:
        """Whether each use reads a parameter."""
        return np.array(self.counts.of_parameter, bool)[self.use_ends[0]]

    @cached_property
    def decision_kinds(self) -> np.ndarray:
        """The equivalence class of each decision: equal numbers mean equal costs."""
        counts, count = self.counts, len(self.space)
        facts: list[Sequence[Any] | np.ndarray] = [_numbered(map(id, self.space.strategy_sets)), self.readers,
                                                   counts.of_parameter]
        facts += [fact for fact in (counts.multiplicities, counts.held) if len(set(fact)) > 1]  # of a reduced model
        if any(self.prices.chains):
            facts.append(_numbered(self.prices.chains))
        if not counts.in_one:
            facts.append(_numbered(counts.stages_of))
        if counts.hybrid.recompute != "none":
            facts += [[index in counts.runs_again for index in range(count)], list(map(counts.offloads, range(count)))]
        return _equivalent(facts)

    @cached_property
    def use_kinds(self) -> np.ndarray:
        """The equivalence class of each use; equal numbers mean equal costs."""
        counts, uses, (sources, outputs, targets, positions) = self.counts, self.space.uses, self._uses.T
        facts: list[Sequence[Any] | np.ndarray] = [self.decision_kinds[sources], outputs, self.decision_kinds[targets],
                                                   positions]
        if counts.hybrid.recompute != "none" or counts.hybrid.zero_stage == 3:
            facts += [list(map(counts.reads_again, uses)), list(map(counts.offloads_copy, uses))]
        return _equivalent(facts)

    @cached_property
    def readers(self) -> np.ndarray:
        """The number of ops and shared reads that read each decision's results."""
        sources, targets = self.use_ends
        counted = np.array([decision.kind in ("op", "shared_read") for decision in self.space.decisions], bool)
        return np.bincount(sources[counted[targets]], minlength=len(self.space))

    def _steps(self, use: TensorUse, of_source: Strategy, of_target: Strategy) -> Sequence[PricedStep]:
        source = self.space.strategy_sets[use.source].output_layout(of_source, use.output)
        target = self.space.strategy_sets[use.target].input_layout(of_target, use.position)
        return self.prices.steps(use.meta, source, target, self.counts.summing(use)) if source != target else ()

    def _buffer(self, buffer: Buffer, chosen: Sequence[np.ndarray]) -> Edge:
        """A zero-cost edge with the bytes of a message buffer, by the layout of the value sent."""
        use = buffer.use
        s, shape = self.space.strategy_sets[use.source], (len(chosen[use.source]), len(chosen[use.target]))
        num_bytes = self.prices.local_bytes(use.meta, s.outputs[use.output])[chosen[use.source]]
        usages = np.broadcast_to(buffer.copies * num_bytes[:, None], shape)
        return Edge(use.source, use.target, np.zeros(shape), usages, self.counts.buffer_interval(buffer.stage))

    def _shards(self, use: TensorUse, chosen: Sequence[np.ndarray]) -> Iterator[Edge]:
        """A zero-cost edge with the bytes of intermediate results of a parameter's gathers."""
        rows, columns = chosen[use.source], chosen[use.target]
        usages = self.once(("shards", self._use_key(use, rows, columns)),
                           lambda: self.prices.use_gathered(use)[np.ix_(rows, columns)])
        if usages.any():
            yield Edge(use.source, use.target, np.zeros(usages.shape), usages, self.counts.gathered_interval(use))

    def sums_s(self, use: TensorUse) -> np.ndarray:
        """Seconds per step of accumulating a parameter's gradients over micro-batches (two reads and a write each; with
        a separate accumulator one read of the gradient, a read and a write of the accumulator). By (source strategy,
        target strategy)."""
        source, target = self.space.strategy_sets[use.source], self.space.strategy_sets[use.target]
        rows, columns = source.outputs[use.output], target.inputs[use.position]
        if self.counts.hybrid.zero_stage >= 2:  # gradients of stored shards
            held = np.broadcast_to(self.prices.local_bytes(use.meta, rows)[:, None], (len(rows), len(columns)))
        else:  # gradients of gathered parameters
            held = np.broadcast_to(self.prices.local_bytes(use.meta, columns)[None], (len(rows), len(columns)))
        device, apart = self.prices.device, self.counts.accumulator_bytes(use.meta) / use.meta.dtype.itemsize
        moved = (1 + 2 * apart if apart else 3) * held
        return self.counts.sums(use) * compute.op_time_s("elementwise", 0.0, moved, dtype_name(use.meta), device)


def _equivalent(facts: Sequence[Sequence[Any] | np.ndarray]) -> np.ndarray:
    """A number per position, equal where all facts are equal."""
    first, *rest = (np.unique(np.asarray(fact), return_inverse=True)[1].reshape(-1) for fact in facts)
    return reduce(paired, rest, first)


def _numbered(values: Iterable[object]) -> list[int]:
    """Numbers of values in order of appearance (independent of addresses); equal values have equal numbers."""
    numbers = dict[object, int]()
    return [numbers.setdefault(value, len(numbers)) for value in values]


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
