"""Strategy space x prices x turns -> the search problem. A redistributed copy uses memory on its edge."""

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
from autoparallel.pricing.unit_costs import PricedStep, Prices, dtype_name
from autoparallel.search.model.interned import firsts, paired
from autoparallel.search.model.problem import Edge, Node, Problem, Repeats, unchecked
from autoparallel.strategies.space import Strategy, StrategySet, StrategySpace, TensorUse
from cost_models import collectives, compute

Allowed = Mapping[int, np.ndarray]
Made = TypeVar("Made")
#: Seconds that one fault counts for: more than any step takes.
FAULT_S = 1e3
SIDE_SHARE = 1e-3


class OpSeconds(NamedTuple):
    """Of an op in a step: forward (with what goes to the host), once more for backward, and backward (with what comes
    back)."""

    forward: float
    again: float
    backward: float


class Move(NamedTuple):
    """The steps that a link takes, and a number: the same for links of a kind between the same strategies."""

    use: TensorUse
    path: Sequence[PricedStep]
    kind: int


class Penalties(Protocol):
    """Choices that should not be taken (see `autoparallel.planning.baselines`): a count by strategy."""

    def decision_penalties(self, index: int) -> np.ndarray: ...

    def use_penalties(self, use: TensorUse, table: RedistributionTable) -> np.ndarray: ...


class SpacePricer:
    """Builds problems for one strategy space: all strategies, or only some labels of each site.

    ``allowed`` (choice numbers by site; sites left out are free) holds what pins leave; it binds every problem.
    ``penalties`` are priced above everything else. ``exposed``: the shares that count of the seconds of gathers of
    parameters, and of reductions of their gradients (`overlap_simulation.least_exposed`).

    Side computations (positions, causal masks, rotary tables: nothing of the input, no gradient, hardly any bytes) are
    done on every rank; who needs a piece of one takes it, which is local.
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
        """Choice numbers (into the site's strategies) that pins leave."""
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
        """The problem with every strategy that pins leave."""
        return self._problem(self._choices)

    def exposing(self, share: tuple[float, float]) -> SpacePricer:
        """The same with another ``exposed``."""
        other = copy(self)
        other.exposed = share
        return other

    def full_like(self, problem: Problem) -> Problem:
        """The same, made of that of a pricer which differs by ``exposed`` only: links of parameters cost otherwise."""
        edges = self._edges(self._choices, self._picks(self._choices))
        return problem.with_edges(edges.followed_by(problem.edges[len(edges):]))

    def problem(self, allowed: Sequence[Sequence[Strategy]]) -> Problem:
        """The problem with exactly these labels; labels that a site does not have are left out."""
        chosen = []
        for decision, strategies in enumerate(allowed):
            position, free = self.space.strategy_sets[decision].position, set(self.choices(decision).tolist())
            numbers = [position[tuple(x)] for x in strategies if tuple(x) in position]
            chosen.append(np.array([n for n in numbers if n in free], dtype=np.int64))
        return self._problem(chosen)

    def choice_of(self, strategies: Sequence[Strategy]) -> tuple[int, ...]:
        """Choice numbers in `full()` of one label per site."""
        found = self.numbers(strategies).tolist()
        for decision, left in self.allowed.items():
            found[decision] = int(np.searchsorted(left, found[decision]))
        return tuple(found)

    def choice_near(self, strategies: Sequence[Strategy]) -> tuple[int, ...]:
        """The same for labels that pins may forbid: of such a site the first choice."""
        found = []
        for decision, strategy in enumerate(strategies):
            places = np.flatnonzero(self.choices(decision) == self.space.strategy_sets[decision].position[strategy])
            found.append(int(places[0]) if len(places) else 0)
        return tuple(found)

    def strategies_of(self, choice: Sequence[int]) -> list[Strategy]:
        """The inverse of `choice_of`."""
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
        """Numbers of these choices; equal choices, equal number."""
        known: dict[bytes, int] = self.once("picks", dict)
        numbers = {id(c): known.setdefault(c.tobytes(), len(known)) for c in {id(c): c for c in chosen}.values()}
        return np.array([numbers[id(c)] for c in chosen], np.int64)

    def once(self, key: object, make: Callable[[], Made]) -> Made:
        """What is made for a key, the first time; what is alike has one."""
        if key not in self._made:
            self._made[key] = make()
        found: Made = self._made[key]
        return found

    def _nodes(self, chosen: Sequence[np.ndarray], picks: np.ndarray) -> Repeats[Node]:
        """One per site; those of a kind with the same choices are made once."""
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
        """Kinds that differ otherwise may share costs, or usages."""
        decision, s = self.space.decisions[index], self.space.strategy_sets[index]
        times, shared = self.counts.op_times(index), self.counts.ranks_with(index)
        key = (id(s), pick, decision.kind, int(self.readers[index]) if decision.kind == "shared_read" else 0)
        costs = self.once(("cost", *key, times, self.counts.offloads(index), shared),
                          lambda: self._decision_s(index, times)[numbers])
        usages = self.once(("usage", *key, copies), lambda: self.decision_bytes(index)[numbers] * copies)
        strategies = s.strategies if len(numbers) == len(s.strategies) else tuple(s.strategies[n] for n in numbers)
        return Node(decision.name, costs, usages, strategies=strategies)

    def _decision_s(self, index: int, times: tuple[int, int]) -> np.ndarray:
        s, kind = self.space.strategy_sets[index], self.space.decisions[index].kind
        if kind == "op":
            price, moved = self.prices.op(s), self.offload_s(index)
            return times[0] * price.forward_s + times[1] * price.backward_s + moved[0] + moved[1]
        if kind == "shared_read":
            return times[1] * self.shared_read_s(index)
        if kind == "parameter":
            return self.counts.multiplicities[index] * (self.parameter_s(index) + self.shared_s(index))
        return np.zeros(len(s.strategies))

    def op_s(self, index: int, number: int, stage: int) -> OpSeconds:
        """What a strategy of an op takes in a step, on a rank of the stage."""
        s, times, moves = (
            self.space.strategy_sets[index],
            self.counts.op_times(index, stage),
            self.counts.offloads(index),
        )

        def first() -> OpSeconds:
            price, (there, back) = self.prices.op(s), self.offload_s(index)
            once, again, backward = float(price.forward_s[number]), times[0] - times[1], float(price.backward_s[number])
            return OpSeconds(times[1] * once + float(there[number]), again * once,
                             times[1] * backward + float(back[number]))

        return self.once(("op", id(s), number, times, moves), first)

    def parameter_s(self, index: int) -> np.ndarray:
        """Seconds of the optimizer's step for a parameter, by strategy."""
        s = self.space.strategy_sets[index]
        return self.once(("updated", id(s)), lambda: self.prices.parameter_s(s))

    def shared_bytes(self, index: int) -> np.ndarray:
        """Of a parameter's gradient, in the type in which ranks of the pipeline add it up; by strategy."""
        s, dtype = self.space.strategy_sets[index], self.counts.hybrid.sum_dtype
        meta = s.output_metas[0]
        return (dtype or meta.dtype).itemsize / meta.dtype.itemsize * self.prices.local_bytes(meta, s.outputs[0])

    def shared_s(self, index: int) -> np.ndarray:
        """Seconds of adding up the gradients that several ranks of the pipeline have of a parameter, by strategy."""
        ranks = self.counts.ranks_with(index)
        if len(ranks) < 2:
            return self._nothing(len(self.space.strategy_sets[index].strategies))[0]
        shape = (self.counts.hybrid.pipeline_ranks, *self.space.mesh_shape)
        return self.prices.bucket_s(self.prices.cluster.group(shape, 0, ranks), self.shared_bytes(index))

    def shared_read_s(self, index: int) -> np.ndarray:
        """Seconds of adding up the gradients from a value's readers once, by strategy."""
        s, readers = self.space.strategy_sets[index], int(self.readers[index])
        return self.once(("shared_read", id(s), readers), lambda: self.prices.sum_s(s, readers))

    def offload_s(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds in a step of moving what an op makes to the host, and back for backward, by strategy."""
        if not (times := self.counts.offloads(index)):
            return self._nothing(len(self.space.strategy_sets[index].strategies))
        return self._moved_s(times, self.decision_bytes(index))

    def _nothing(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        return self.once(("nothing", size), lambda: (np.zeros(size),) * 2)

    def offload_copy_s(self, use: TensorUse) -> tuple[np.ndarray, np.ndarray]:
        """The same of a redistributed copy, by (strategy of the link's source, of its target)."""
        times = self.counts.offloads_copy(use)
        return self._moved_s(times, self.prices.use_copies(use))

    def _moved_s(self, times: int, num_bytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        cluster = self.prices.cluster
        seconds = [times * collectives.host_copy_s(num_bytes, cluster, to_device) for to_device in (False, True)]
        return np.where(num_bytes > 0, seconds[0], 0.0), np.where(num_bytes > 0, seconds[1], 0.0)

    def decision_bytes(self, index: int) -> np.ndarray:
        """Bytes that a site holds, once, by strategy."""
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
                total = total + s.rule.work_bytes * self.prices.share_of_work(s)
        return total

    def _sums_bytes(self, meta: TensorMeta, numbers: np.ndarray) -> np.ndarray:
        """Bytes of sums of gradients beside the gradients, for layout numbers of a parameter."""
        return self.counts.accumulator_bytes(meta) / meta.dtype.itemsize * self.prices.local_bytes(meta, numbers)

    def _copy_bytes(self, use: TensorUse) -> np.ndarray:
        """Bytes of the redistributed copy that a link makes, and of its gradients' sums where those are apart: instead
        of the sums of the piece it was made of. By (strategy of the link's source, of its target)."""
        copies = self.prices.use_copies(use)
        if not self.counts.of_parameter[use.source] or self.counts.hybrid.zero_stage >= 2:
            return copies
        source, target = self.space.strategy_sets[use.source], self.space.strategy_sets[use.target]
        whole = self._sums_bytes(use.meta, target.inputs[use.position])
        local_shard = self._sums_bytes(use.meta, source.outputs[use.output])
        return np.where(copies > 0, copies + np.maximum(whole[None, :] - local_shard[:, None], 0.0), 0.0)

    def _edges(self, chosen: Sequence[np.ndarray], picks: np.ndarray) -> Repeats[Edge]:
        """One per link; those of a kind between the same choices are made once."""
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
        """Kinds that differ otherwise may share costs, or usages."""
        key, of_parameter = self._use_key(use, rows, columns), self.counts.of_parameter[use.source]
        costs = self._use_costs(use, rows, columns)

        def held() -> np.ndarray | None:
            usages = self._copy_bytes(use)[np.ix_(rows, columns)] * copies
            return usages if usages.any() else None

        return Edge(use.source, use.target, costs, self.once(("copies", key, copies, of_parameter), held))

    def _use_key(self, use: TensorUse, rows: np.ndarray, columns: np.ndarray) -> tuple[object, ...]:
        """The same for links that are alike between these choices of their ends."""
        source, target = self.space.strategy_sets[use.source], self.space.strategy_sets[use.target]
        return id(source), rows.tobytes(), use.output, id(target), columns.tobytes(), use.position

    def _use_costs(self, use: TensorUse, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Seconds of a link between these choices of its ends."""
        times, (there, back) = self.counts.use_times(use), self.exposed
        counted = (there * times[0], back * times[1]) if self.counts.of_parameter[use.source] else times
        sums, summing, moves = self.counts.sums(use), self.counts.summing(use), self.counts.offloads_copy(use)
        return self.once(("use", self._use_key(use, rows, columns), counted, sums, summing, moves), lambda: (
            self.prices.use_s(use, counted, summing) + (self.sums_s(use) if sums else 0.0)
            + (sum(self.offload_copy_s(use)) if moves else 0.0))[np.ix_(rows, columns)])

    def moves(self, strategies: Sequence[Strategy]) -> Sequence[Move]:
        """What links do between the labels of their ends, in the order of their targets; of those that do nothing only
        those of parameters."""
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
        """What is made for each distinct code, once for all plans, from where it is first; and which each is of."""
        values, first, which = np.unique(codes, return_index=True, return_inverse=True)
        made = [self.once((name, code), partial(make, at))
                for code, at in zip(values.tolist(), first.tolist(), strict=True)]
        return made, which.reshape(-1)

    def numbers(self, strategies: Sequence[Strategy]) -> np.ndarray:
        """Their numbers among the strategies of each site."""
        return self.once(("numbers", tuple(strategies)), lambda: np.array(
            [s.position[strategy] for s, strategy in zip(self.space.strategy_sets, strategies, strict=True)], np.int64))

    def decision_codes(self, strategies: Sequence[Strategy]) -> np.ndarray:
        """By site a number, the same for sites of a kind (`decision_kinds`) that have the same strategy."""
        return self.decision_kinds * self.most_choices + self.numbers(strategies)

    @cached_property
    def most_choices(self) -> int:
        return max((len(s.strategies) for s in self.space.strategy_sets), default=0)

    @cached_property
    def use_ends(self) -> tuple[np.ndarray, np.ndarray]:
        """The sources and the targets of all links."""
        return self._uses[:, 0], self._uses[:, 2]

    @cached_property
    def _uses(self) -> np.ndarray:
        """A row (source, output, target, position) per link."""
        columns = list(zip(*self.space.uses, strict=True))[:4] or [()] * 4
        return np.stack([np.array(column, np.int64) for column in columns], axis=1)

    @cached_property
    def parameter_uses(self) -> np.ndarray:
        """Whether each link reads a parameter."""
        return np.array(self.counts.of_parameter, bool)[self.use_ends[0]]

    @cached_property
    def decision_kinds(self) -> np.ndarray:
        """By site a number, the same for those that work alike: all of their prices are the same."""
        counts, count = self.counts, len(self.space)
        facts: list[Sequence[Any] | np.ndarray] = [_numbered(map(id, self.space.strategy_sets)), self.readers,
                                                   counts.of_parameter]
        facts += [fact for fact in (counts.multiplicities, counts.held) if len(set(fact)) > 1]  # of a sketch
        if not counts.in_one:
            facts.append(_numbered(counts.stages_of))
        if counts.hybrid.recompute != "none":
            facts += [[index in counts.runs_again for index in range(count)], list(map(counts.offloads, range(count)))]
        return _equivalent(facts)

    @cached_property
    def use_kinds(self) -> np.ndarray:
        """The same of links."""
        counts, uses, (sources, outputs, targets, positions) = self.counts, self.space.uses, self._uses.T
        facts: list[Sequence[Any] | np.ndarray] = [self.decision_kinds[sources], outputs, self.decision_kinds[targets],
                                                   positions]
        if counts.hybrid.recompute != "none" or counts.hybrid.zero_stage == 3:
            facts += [list(map(counts.reads_again, uses)), list(map(counts.offloads_copy, uses))]
        return _equivalent(facts)

    @cached_property
    def readers(self) -> np.ndarray:
        """How many ops and hubs read what each site makes."""
        sources, targets = self.use_ends
        counted = np.array([decision.kind in ("op", "shared_read") for decision in self.space.decisions], bool)
        return np.bincount(sources[counted[targets]], minlength=len(self.space))

    def _steps(self, use: TensorUse, of_source: Strategy, of_target: Strategy) -> Sequence[PricedStep]:
        source = self.space.strategy_sets[use.source].output_layout(of_source, use.output)
        target = self.space.strategy_sets[use.target].input_layout(of_target, use.position)
        return self.prices.steps(use.meta, source, target, self.counts.summing(use)) if source != target else ()

    def _buffer(self, buffer: Buffer, chosen: Sequence[np.ndarray]) -> Edge:
        """An edge that costs nothing and takes the bytes of a buffer, by the layout of what is sent."""
        use = buffer.use
        s, shape = self.space.strategy_sets[use.source], (len(chosen[use.source]), len(chosen[use.target]))
        num_bytes = self.prices.local_bytes(use.meta, s.outputs[use.output])[chosen[use.source]]
        usages = np.broadcast_to(buffer.copies * num_bytes[:, None], shape)
        return Edge(use.source, use.target, np.zeros(shape), usages, self.counts.buffer_interval(buffer.stage))

    def _shards(self, use: TensorUse, chosen: Sequence[np.ndarray]) -> Iterator[Edge]:
        """An edge that costs nothing and takes the bytes of what is gathered on the way to what the link reads."""
        rows, columns = chosen[use.source], chosen[use.target]
        usages = self.once(("shards", self._use_key(use, rows, columns)),
                           lambda: self.prices.use_gathered(use)[np.ix_(rows, columns)])
        if usages.any():
            yield Edge(use.source, use.target, np.zeros(usages.shape), usages, self.counts.gathered_interval(use))

    def sums_s(self, use: TensorUse) -> np.ndarray:
        """Seconds in which a parameter's gradients of several turns are added up (two reads and a write of each, or one
        read and both of a more precise sum), by (strategy of the link's source, of its target)."""
        source, target = self.space.strategy_sets[use.source], self.space.strategy_sets[use.target]
        rows, columns = source.outputs[use.output], target.inputs[use.position]
        if self.counts.hybrid.zero_stage >= 2:  # of the pieces that are stored
            held = np.broadcast_to(self.prices.local_bytes(use.meta, rows)[:, None], (len(rows), len(columns)))
        else:  # of what the ops read
            held = np.broadcast_to(self.prices.local_bytes(use.meta, columns)[None], (len(rows), len(columns)))
        device, apart = self.prices.cluster.device, self.counts.accumulator_bytes(use.meta) / use.meta.dtype.itemsize
        moved = (1 + 2 * apart if apart else 3) * held
        return self.counts.sums(use) * compute.op_time_s("elementwise", 0.0, moved, dtype_name(use.meta), device)


def _equivalent(facts: Sequence[Sequence[Any] | np.ndarray]) -> np.ndarray:
    """Numbers: equal for those of which all facts are."""
    first, *rest = (np.unique(np.asarray(fact), return_inverse=True)[1].reshape(-1) for fact in facts)
    return reduce(paired, rest, first)


def _numbered(values: Iterable[object]) -> list[int]:
    """Equal values, equal number: in the order in which they come, so that it does not depend on where they lie."""
    numbers = dict[object, int]()
    return [numbers.setdefault(value, len(numbers)) for value in values]


def _side_computations(space: StrategySpace) -> dict[int, np.ndarray]:
    """Ops that read no input and need no gradient, with at most `SIDE_SHARE` of what all ops make on a rank: only
    repeated."""
    from_input = {decision.index for decision in space.decisions if decision.kind == "input"}
    for use in space.uses:  # in the order of their targets
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
    """Whether ops of these strategies have nothing to do with gradients, and are not made in pieces for nothing."""
    filled = s.rule is not None and not s.input_metas and not s.rule.fixed
    return not filled and not any(m.requires_grad for m in (*s.input_metas, *s.output_metas))
