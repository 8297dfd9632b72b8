"""What communication of parameters runs beside compute (`lower.overlap`), by simulating a step of one rank.

The prices that the search adds up let everything wait for everything. The program of a step in one turn posts gathers
of parameters ahead of their readers, and reductions of gradients behind them: they go by the streams of the links that
they cross, in order, while compute goes on; with ZeRO-3 backward posts gathers ahead, too, and so does each of several
turns. Else, in several turns and in pipelines, only the last turn goes backward beside reductions of what turns read,
if gradients are reduced once a step.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from autoparallel.layout import COLLECTIVES
from autoparallel.plans import Hybrid
from autoparallel.pricing.problem import Move, SpacePricer
from autoparallel.pricing.unit_costs import PricedStep
from autoparallel.schedule.async_windows import TOP, AsyncWindows, Pair, Read, ToAsk, kind_of, places
from autoparallel.strategies.space import Strategy, TensorUse
from cost_models.timeline import Task, equal_slowdown, simulate

COMPUTE = "compute"
LEAST_SHARE = 0.01


def least_exposed(pricer: SpacePricer) -> tuple[float, float]:
    """What share of the seconds in which parameters are gathered, and of those in which their gradients are reduced, a
    step takes at least: all of them where nothing runs beside compute, else what both take longer by while they do (and
    so much that none is taken for nothing)."""
    hybrid = pricer.counts.hybrid
    share = max(LEAST_SHARE, pricer.prices.cluster.device.overlap_slowdown - 1.0)
    if not _hides(pricer) or hybrid.stages > 1:  # a pipeline's last turn hides little
        return 1.0, 1.0
    return share if _equivalent(hybrid) else 1.0, share


def hidden_s(pricer: SpacePricer, strategies: Sequence[Strategy], stages: Sequence[int] = (0,)) -> float:
    """Seconds by which what a rank of these stages does is shorter than the sum of its parts."""
    if not _hides(pricer):
        return 0.0
    slowdown = pricer.prices.cluster.device.overlap_slowdown
    return pricer.once(("hidden", tuple(strategies), tuple(stages)),
                       lambda: _Plan(pricer, strategies, stages).step().hidden_s(slowdown))


def _hides(pricer: SpacePricer) -> bool:
    """Whether anything runs beside compute: in each turn, or where turns read parameters once, and reduce once. (Zero
    bubble makes gradients of weights last of all.)"""
    hybrid = pricer.counts.hybrid
    put_off = hybrid.schedule == "zero_bubble" and hybrid.stages > 1
    return pricer.prices.training and (_equivalent(hybrid) or (hybrid.zero_stage < 2 and not put_off))


def _equivalent(hybrid: Hybrid) -> bool:
    """Whether a step is one turn, or several that all do the same: gather, and reduce."""
    return hybrid.is_plain or hybrid.prefetches


class _Step:
    """Tasks of one rank, in the order in which its program posts them; the program waits for some of them."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._compute_s = 0.0
        self._after: tuple[int, ...] = ()

    def issue(self, seconds: float, stream: str) -> int:
        """Work for which the program does not wait here; returns its number."""
        self.flush()
        self.tasks.append(Task(seconds, stream, self._after))
        return len(self.tasks) - 1

    def wait(self, tasks: Sequence[int]) -> None:
        self.flush()
        self._after = (*self._after, *tasks)

    def work(self, seconds: float, stream: str = COMPUTE) -> None:
        """What the program does, or waits for at once."""
        if stream == COMPUTE:
            self._compute_s += seconds
        elif seconds:
            self.wait([self.issue(seconds, stream)])

    def flush(self) -> None:
        """Compute so far is a task."""
        if self._compute_s:
            self.tasks.append(Task(self._compute_s, COMPUTE, self._after))
            self._compute_s, self._after = 0.0, (len(self.tasks) - 1,)

    def hidden_s(self, slowdown: float) -> float:
        """By how much the step is shorter than its tasks one after the other."""
        streams = sorted({task.stream for task in self.tasks} | {COMPUTE})
        alone = sum(task.duration_s for task in self.tasks)
        return max(0.0, alone - simulate(self.tasks, equal_slowdown(streams, slowdown)).total_s)


def _nothing(index: int) -> None:
    """What is done at a site where nothing is."""


#: Tasks by the pair that posted them.
_Pending = dict[Pair, list[int]]


class _Way(NamedTuple):
    """One step of redistribution: before which site, seconds forward, of the same again for backward, and backward, and
    by which streams."""

    target: int
    forward: tuple[float, str]
    again_s: float
    backward: tuple[float, str]


class _Plan:
    """A plan's step on a rank of some stages: by site the stage that has it (`stage_of`; None: none of them), what it
    sends (`sent`), by place which steps of parameters the program waits for there (`waited`), and all those steps
    (`ways`), which `windows` tells apart; ``read_by_ops`` are gathers whose results ops read. Turns that all do the
    same are simulated as one that takes as long as all."""

    def __init__(self, pricer: SpacePricer, strategies: Sequence[Strategy], stages: Sequence[int] = (0,)) -> None:
        self.pricer, self.space, self.counts = pricer, pricer.space, pricer.counts
        self.strategies, self.stages = strategies, tuple(stages)
        self.equivalent, self.numbers = _equivalent(self.counts.hybrid), pricer.numbers(strategies)
        self.count = 1 if self.equivalent else self.counts.micro_batches_on(stages[0])
        held = {holders: next((stage for stage in holders if stage in stages), None)
                for holders in set(self.counts.stages_of)}
        self.stage_of = [held[holders] for holders in self.counts.stages_of]
        sent, waited = defaultdict[int, list[_Way]](list), defaultdict[int, list[_Way]](list)
        self.ways: list[_Way] = []
        self._times: dict[int, list[tuple[Any, ...]]] = {}
        self.moves = [move for move in pricer.moves(strategies) if self.stage_of[move.use.target] is not None]
        first = self._once()
        for move, before in zip(self.moves, first, strict=True):
            ways = self._ways_of(move)
            waited[move.use.target] += ways[:before]
            (self.ways if self.counts.of_parameter[move.use.source] else sent[move.use.target]).extend(ways[before:])
        self.reads, by_ops = self._reads(first)
        self.windows = AsyncWindows(self.reads)
        self.read_by_ops = frozenset(n for step in by_ops for n in self.windows.gather_stages(step)[:1])
        for number, place in self.windows.waited():
            way = self.ways[number]
            waited[way.target if place is None else place].append(way)
        self.sent = {target: ways for target, ways in sent.items() if ways}
        self.waited = {place: ways for place, ways in waited.items() if ways}

    def _once(self) -> list[int]:
        """How many steps of each move ZeRO-3 takes before its turns, as `lower.reads.split_reads` has it: those before
        the first that communicates."""
        found, hubs = [0] * len(self.moves), set[int]()
        for number, (use, path, _) in enumerate(
            self.moves if self.equivalent and not self.counts.hybrid.is_plain else ()
        ):
            if self.space.decisions[use.source].kind == "parameter" or use.source in hubs:
                found[number] = sum(1 for _ in itertools.takewhile(lambda s: s.step.forward not in COLLECTIVES, path))
                if found[number] == len(path) and self.space.decisions[use.target].kind == "shared_read":
                    hubs.add(use.target)
        return found

    def _reads(self, first: Sequence[int]) -> tuple[list[Read], list[int]]:
        """As `lower.overlap.reads_of` finds them in the program, but for the first so many steps of each move; of those
        the last before each op, by number."""
        place, looks = self._places(first), dict[int, list[tuple[str, str, str, float]]]()
        found, by_ops = list[Read](), list[int]()
        passed: dict[int, int | None] = {}  # by hub, the last step on the way to it
        for (use, path, kind), before in zip(self.moves, first, strict=True):
            if self.counts.of_parameter[use.source]:
                last = passed.get(use.source)
                if kind not in looks:
                    looks[kind] = [self._look(use, step) for step in path]
                for look in looks[kind][before:]:
                    found.append(Read(last, *look, place(use.target)))
                    last = len(found) - 1
                if self.space.decisions[use.target].kind == "shared_read":
                    passed[use.target] = last
                elif last is not None:
                    by_ops.append(last)
        return found, by_ops

    def _look(self, use: TensorUse, priced: PricedStep) -> tuple[str, str, str, float]:
        """Kind, axis, dtype and bytes of a step."""
        step, _, elements = priced
        kind = kind_of(step.forward, step.backward, use.meta.requires_grad)
        num_bytes = float(elements * use.meta.dtype.itemsize) if kind else 0.0
        return kind, self.space.axis_names[step.axis], str(use.meta.dtype), num_bytes

    def _places(self, first: Sequence[int]) -> Callable[[int], int]:
        """Where what a site reads must be there (`lower.windows.places`)."""
        if not (self.equivalent and self.counts.block_end):
            return lambda index: index
        runs = {move.use.target for move, before in zip(self.moves, first, strict=True) if len(move.path) > before}
        runs |= {
            decision.index
            for decision in self.space.decisions
            if decision.kind == "op" and self.stage_of[decision.index] is not None
        }
        return places((index, self.counts.block_of[index]) for index in sorted(runs)).__getitem__

    def _ways_of(self, move: Move) -> list[_Way]:
        """The steps of a link; all links that are alike take as long."""
        if move.kind not in self._times:
            self._times[move.kind] = [self._times_of(move.use, step) for step in move.path]
        return [_Way(move.use.target, *times) for times in self._times[move.kind]]

    def _times_of(self, use: TensorUse, priced: PricedStep) -> tuple[Any, ...]:
        step, seconds, _ = priced
        streams = [self._stream(step.axis) if kind in COLLECTIVES else COMPUTE
                   for kind in (step.forward, step.backward)]
        there, back = self.counts.use_times(use, self.stage_of[use.target])
        again = max(0, there - back) * seconds[0]
        return (min(there, back) * seconds[0], streams[0]), again, (back * seconds[1], streams[1])

    def _stream(self, axis: int) -> str:
        crossed = self.pricer.prices.groups[axis].crossed
        return crossed[-1][1].name if crossed else COMPUTE

    def step(self) -> _Step:
        """Forward, backward the other way round, optimizer."""
        step, pending = _Step(), _Pending()
        if self.equivalent:
            marked = {*self.windows.events, *self.waited} - {TOP}
            self._read(step, TOP, pending)
            self._forward(step, marked, lambda index: self._read(step, index, pending))

            def reduce(index: int) -> None:
                self._reduce(step, index, pending)
                step.work(self._sums_s.get(index, 0.0))

            self._backward(step, {*marked, *self.asked, *self._sums_s}, _Again(step, self).read, reduce)
            self._reduce(step, TOP, pending)
        else:
            self._in_micro_batches(step, pending)
        step.work(self._updates_s())
        step.flush()
        return step

    def _in_micro_batches(self, step: _Step, pending: _Pending) -> None:
        """Parameters are read, then turns run alone, but for the last of several: it posts what is reduced together
        once it has the last gradient of it, if turns read that. What is left is reduced at the end."""
        places = sorted({TOP, *self.windows.events, *self.waited})
        for place in places:
            self._read(step, place, pending)
        step.work((self.count - 1) * self._turn_s() + (self.count - 2) * sum(self._sums_s.values()))
        early = defaultdict[int, list[Pair]](list)
        for pair in (*self.windows.reduced, *self.windows.gathered):
            if self.count > 1 and all(self.windows.is_last(n) for n in pair.steps):
                early[min(self._first_reader(self.ways[n].target) for n in pair.steps)].append(pair)

        def reduce(index: int) -> None:
            step.work(self._sums_s.get(index, 0.0))
            for pair in early.get(index, ()):
                self._issue(step, pair, pending)

        self._forward(step)
        self._backward(step, {*early, *self._sums_s}, after=reduce)
        for place in reversed(places):
            self._reduce(step, place, pending)

    def _first_reader(self, target: int) -> int:
        """The first op that reads what is there for a site: its own, or of a hub's readers."""
        if self.space.decisions[target].kind != "shared_read":
            return target
        readers = self.space.readers_of.get(target, ())
        return min((reader for reader in readers if self.stage_of[reader] is not None), default=target)

    @cached_property
    def _sums_s(self) -> Mapping[int, float]:
        """By site, seconds in which turns add gradients of what it reads to those before; of each turn but the first,
        where turns differ."""
        found = defaultdict[int, float](float)
        for use in (move.use for move in self.moves if self.counts.sums(move.use)):
            seconds = self.pricer.sums_s(use)[self.numbers[use.source], self.numbers[use.target]]
            found[use.target] += float(seconds) / (1 if self.equivalent else max(1, self.count - 1))
        return found

    def _read(self, step: _Step, place: int, pending: _Pending) -> None:
        for begins, pair in self.windows.events.get(place, ()):
            if begins:
                pending[pair] = [step.issue(*way.forward) for way in self._of(pair) if way.forward[0]]
            else:
                step.wait(pending.pop(pair))
        for way in self.waited.get(place, ()):
            step.work(*way.forward)

    @cached_property
    def asked(self) -> Mapping[int, Sequence[int]]:
        """Gathers whose results ops read, by the site whose backward asks for them: the last that reads them, or with
        which a block ends."""
        found = defaultdict[int, list[int]](list)
        for number in (pair.steps[0] for pair in self.windows.gathered):
            if number in self.read_by_ops:
                target = self.ways[number].target
                block = self.counts.block_of[target]
                found[self._last_reader(target) if block is None else self.counts.block_end[block]].append(number)
        return found

    def _last_reader(self, target: int) -> int:
        """The last op that reads what is there for a site: itself, or what passes it on to."""
        rule = self.space.strategy_sets[target].rule
        if self.space.decisions[target].kind != "shared_read" and (rule is None or not rule.alias):
            return target
        return max((self._last_reader(reader) for reader in self.space.readers_of.get(target, ())), default=target)

    def _reduce(self, step: _Step, place: int, pending: _Pending) -> None:
        for way in reversed(self.waited.get(place, ())):
            step.work(way.again_s, way.forward[1])
            step.work(*way.backward)
        for begins, pair in reversed(self.windows.events.get(place, ())):
            if begins:
                step.wait(pending[pair])
            elif pair not in pending:
                self._issue(step, pair, pending)

    def _issue(self, step: _Step, pair: Pair, pending: _Pending) -> None:
        ways = self._of(pair)  # one all_reduce for all of a bucket
        pending[pair] = [step.issue(sum(way.backward[0] for way in ways), ways[0].backward[1])]

    def _forward(self, step: _Step, marked: Collection[int] = (), before: Callable[[int], None] = _nothing) -> None:
        """A turn forward; what is done before each of the marked sites."""
        until, done = self._forward_s, 0
        for index in sorted({*marked, *self.sent}):
            step.work((until[index] - until[done]) / self.count)
            done = index
            if index in marked:
                before(index)
            for way in self.sent.get(index, ()):
                step.work(way.forward[0] / self.count, way.forward[1])
        step.work((until[-1] - until[done]) / self.count)

    def _backward(self, step: _Step, marked: Collection[int], before: Callable[[int], None] = _nothing,
                  after: Callable[[int], None] = _nothing) -> None:
        """A turn backward; what is done before and after each of the marked sites."""
        until, done = self._backward_s, len(self.space)
        for index in sorted({*marked, *self.sent}, reverse=True):
            step.work((until[done] - until[index + 1]) / self.count)
            done = index
            if index in marked:
                before(index)
            step.work((until[index + 1] - until[index]) / self.count)
            for way in reversed(self.sent.get(index, ())):
                step.work(way.again_s / self.count, way.forward[1])
                step.work(way.backward[0] / self.count, way.backward[1])
            if index in marked:
                after(index)
        step.work(until[done] / self.count)

    def _turn_s(self) -> float:
        """A turn alone, without sums of gradients."""
        sent = sum(way.forward[0] + way.again_s + way.backward[0] for ways in self.sent.values() for way in ways)
        return (self._forward_s[-1] + self._backward_s[-1] + sent) / self.count

    def _of(self, pair: Pair) -> list[_Way]:
        return [self.ways[number] for number in pair.steps]

    @cached_property
    def _forward_s(self) -> list[float]:
        """Seconds of forward of all sites before each, and of all."""
        return self._until(0)

    @cached_property
    def _backward_s(self) -> list[float]:
        """The same of backward, with what runs again for it."""
        return self._until(1)

    def _until(self, part: int) -> list[float]:
        found, which = self._seconds
        return [0.0, *np.cumsum(np.array([seconds[part] for seconds in found])[which]).tolist()]

    def _updates_s(self) -> float:
        """Seconds of the optimizer's steps."""
        found, which = self._seconds
        return float(np.array([seconds[2] for seconds in found])[which].sum())

    @cached_property
    def _seconds(self) -> tuple[list[tuple[float, float, float]], np.ndarray]:
        """Seconds of sites forward, backward and of the optimizer; which of them each site takes."""
        return self.pricer.each(("seconds", self.stages), self.pricer.decision_codes(self.strategies), self._priced)

    def _priced(self, index: int) -> tuple[float, float, float]:
        number, stage, kind = int(self.numbers[index]), self.stage_of[index], self.space.decisions[index].kind
        if stage is None:
            return 0.0, 0.0, 0.0
        if kind == "shared_read":
            return 0.0, self.counts.op_times(index, stage)[1] * float(self.pricer.shared_read_s(index)[number]), 0.0
        if kind == "op":
            forward, again, backward = self.pricer.op_s(index, number, stage)
            return forward, again + backward, 0.0
        return 0.0, 0.0, float(self.pricer.parameter_s(index)[number]) if kind == "parameter" else 0.0


class _Again:
    """What ZeRO-3 gathers again in a plan's backward, as `runtime.regather` does."""

    def __init__(self, step: _Step, plan: _Plan) -> None:
        self.step, self.plan = step, plan
        gathers = [n for pair in plan.windows.gathered if plan.ways[n := pair.steps[0]].again_s]
        self.still, self.pending, self.left = set(gathers), dict[int, int](), set(gathers) & plan.read_by_ops
        self.ways = {n: plan.windows.gather_stages(n) for n in gathers if n in self.left}
        self.to_ask = ToAsk[int](self.left.__contains__)
        for number in self.ways:
            self.to_ask.add(number, plan.reads[number].place, plan.reads[number].num_bytes)
        self.most_gather_stages = max(map(len, self.ways.values()), default=0)

    def read(self, index: int) -> None:
        """What backward of a site asks for is waited for; what it asks for next is posted."""
        for asked in self.plan.asked.get(index, ()):
            for gather_stage in range(self.most_gather_stages):
                for number in self.to_ask.at(self.plan.reads[asked].place, gather_stage):
                    way = self.ways[number]
                    if len(way) > gather_stage and not any(n in self.pending for n in way[:gather_stage]):
                        self._issue(way[gather_stage:])
            self.left.discard(asked)
            self._wait(asked)

    def _issue(self, way: Sequence[int]) -> None:
        """The first, of what is gathered before it."""
        if way[0] in self.still:
            self.still.remove(way[0])
            if way[1:]:
                self._issue(way[1:])
                self._wait(way[1])
            again = self.plan.ways[way[0]]
            self.pending[way[0]] = self.step.issue(again.again_s, again.forward[1])

    def _wait(self, number: int) -> None:
        if (task := self.pending.pop(number, None)) is not None:
            self.step.wait([task])
