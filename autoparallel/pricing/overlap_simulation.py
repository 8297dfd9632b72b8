"""Seconds saved by communication of parameters overlapped with compute, by simulating one rank's step.

The additive cost assumes no overlap. The emitted program (`lower.overlap_pass`) launches gathers of parameters ahead of
their readers, and gradient reductions as soon as gradients exist; they run in order on the stream of the links that
they cross, while compute continues. This holds for a step of one micro-batch, and for each micro-batch with ZeRO-3,
whose backward prefetches as well. Otherwise, with several micro-batches and in pipelines, only the backward of the last
micro-batch overlaps with gradient reductions, if gradients are reduced once per step.
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
from autoparallel.plans.record import Span
from autoparallel.pricing.problem import Move, SpacePricer
from autoparallel.pricing.unit_costs import PricedStep
from autoparallel.schedule.async_windows import TOP, AsyncWindows, Pair, Read, ToAsk, kind_of, places
from autoparallel.strategies.space import Strategy, StrategySpace, TensorUse
from cost_models.timeline import Task, equal_slowdown, simulate

COMPUTE = "compute"
#: Smallest share of overlapped seconds that counts, so that no communication is free.
LEAST_SHARE = 0.01


def least_exposed(pricer: SpacePricer) -> tuple[float, float]:
    """The smallest exposed fractions of the seconds of (parameter gathers, gradient reductions): 1 where nothing
    overlaps with compute, else the slowdown of both while they overlap, at least `LEAST_SHARE`."""
    hybrid = pricer.counts.hybrid
    share = max(LEAST_SHARE, pricer.prices.device.overlap_slowdown - 1.0)
    if not _hides(pricer) or hybrid.stages > 1:  # the last micro-batch of a pipeline hides little
        return 1.0, 1.0
    return share if _equivalent(hybrid) else 1.0, share


def hidden_s(pricer: SpacePricer, strategies: Sequence[Strategy], stages: Sequence[int] = (0,)) -> float:
    """Seconds saved by overlap on one rank of these stages."""
    if not _hides(pricer):
        return 0.0
    slowdown = pricer.prices.device.overlap_slowdown
    return pricer.once(("hidden", tuple(strategies), tuple(stages)),
                       lambda: _Plan(pricer, strategies, stages).step().hidden_s(slowdown))


def spans(pricer: SpacePricer, strategies: Sequence[Strategy], stages: Sequence[int] = (0,)) -> list[Span]:
    """The timeline of one rank of these stages as `hidden_s` simulates it; where nothing overlaps, one task after the
    other."""
    step = _Plan(pricer, strategies, stages).step()
    if _hides(pricer):
        streams = sorted({task.stream for task in step.tasks} | {COMPUTE})
        line = simulate(step.tasks, equal_slowdown(streams, pricer.prices.device.overlap_slowdown))
        start_s, end_s = line.start_s.tolist(), line.end_s.tolist()
    else:
        end_s = list(itertools.accumulate(task.duration_s for task in step.tasks))
        start_s = [0.0, *end_s[:-1]]
    return [
        (_said(pricer.space, label), task.stream, begin, end,
         tuple(n for n in dict.fromkeys(task.after) if step.tasks[n].stream != task.stream))
        for task, label, begin, end in zip(step.tasks, step.labels, start_s, end_s, strict=True)
    ]


def _said(space: StrategySpace, label: Label) -> str:
    """A label as text: what it does, and the blocks (outside blocks the ops) in which."""
    what, *ends = label
    names = [space.blocks[index] or space.decisions[index].name for index in ends if 0 <= index < len(space)]
    return " ".join([what, " to ".join(dict.fromkeys(names))]).strip()


def _hides(pricer: SpacePricer) -> bool:
    """Whether anything overlaps with compute: in every micro-batch, or if parameters are gathered and gradients reduced
    once per step. (Zero bubble computes weight gradients last, so nothing is left to overlap with.)"""
    hybrid = pricer.counts.hybrid
    put_off = hybrid.schedule == "zero_bubble" and hybrid.stages > 1
    return pricer.prices.training and (_equivalent(hybrid) or (hybrid.zero_stage < 2 and not put_off))


def _equivalent(hybrid: Hybrid) -> bool:
    """Whether all micro-batches do the same: there is one, or each gathers and reduces (ZeRO-3)."""
    return hybrid.is_plain or hybrid.prefetches


#: What a task does, and the first and the last decision for which.
Label = tuple[str, int, int]
UNNAMED: Label = ("", TOP, TOP)


class _Step:
    """The tasks of one rank in issue order; the program awaits some of them. ``labels``: of each task."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.labels: list[Label] = []
        self._compute_s = 0.0
        self._label: Label | None = None
        self._after: tuple[int, ...] = ()

    def issue(self, seconds: float, stream: str, label: Label = UNNAMED) -> int:
        """Launch asynchronous work on a stream; returns its task number."""
        self.flush()
        self._add(Task(seconds, stream, self._after), label)
        return len(self.tasks) - 1

    def _add(self, task: Task, label: Label) -> None:
        self.tasks.append(task)
        self.labels.append(label)

    def wait(self, tasks: Sequence[int]) -> None:
        """Later work waits for these tasks."""
        self.flush()
        self._after = (*self._after, *tasks)

    def work(self, seconds: float, stream: str = COMPUTE, label: Label = UNNAMED) -> None:
        """Compute, or synchronous work on another stream."""
        if stream == COMPUTE:
            if seconds:
                if self._label is not None and self._label[0] != label[0]:
                    self.flush()
                self._compute_s += seconds
                self._label = label if self._label is None else (self._label[0], self._label[1], label[2])
        elif seconds:
            self.wait([self.issue(seconds, stream, label)])

    def flush(self) -> None:
        """Turn the compute accumulated so far into a task."""
        if self._compute_s:
            assert self._label is not None
            self._add(Task(self._compute_s, COMPUTE, self._after), self._label)
            self._compute_s, self._label, self._after = 0.0, None, (len(self.tasks) - 1,)

    def hidden_s(self, slowdown: float) -> float:
        """Seconds by which the simulated step is shorter than the sum of its tasks."""
        streams = sorted({task.stream for task in self.tasks} | {COMPUTE})
        alone = sum(task.duration_s for task in self.tasks)
        return max(0.0, alone - simulate(self.tasks, equal_slowdown(streams, slowdown)).total_s)


def _nothing(index: int) -> None:
    """No action at a decision."""


#: Task numbers by the async window that launched them.
_Pending = dict[Pair, list[int]]


class _TimedStep(NamedTuple):
    """One redistribution step before decision ``target``: (seconds, stream) forward and backward, and seconds of
    running forward again for backward."""

    target: int
    forward: tuple[float, str]
    again_s: float
    backward: tuple[float, str]


def _targets(what: str, steps: Sequence[_TimedStep]) -> Label:
    """The label of redistributions of parameters, or of activations, by the decisions that read them."""
    targets = [timed.target for timed in steps]
    return what, min(targets), max(targets)


class _Plan:
    """The step of a plan on a rank of some stages. Equal micro-batches are simulated as one of their total length.

    ``stage_of``: by decision, its stage on this rank (None: not here). ``sent``: redistribution steps of activations,
    by decision. ``parameter_steps``: the steps of parameters, classified by ``windows``. ``waited``: the synchronous
    ones of them, by program point. ``read_by_ops``: gathers whose results ops read.
    """

    def __init__(self, pricer: SpacePricer, strategies: Sequence[Strategy], stages: Sequence[int] = (0,)) -> None:
        self.pricer, self.space, self.counts = pricer, pricer.space, pricer.counts
        self.strategies, self.stages = strategies, tuple(stages)
        self.equivalent, self.numbers = _equivalent(self.counts.hybrid), pricer.numbers(strategies)
        self.count = 1 if self.equivalent else self.counts.micro_batches_on(stages[0])
        held = {holders: next((stage for stage in holders if stage in stages), None)
                for holders in set(self.counts.stages_of)}
        self.stage_of = [held[holders] for holders in self.counts.stages_of]
        sent, waited = defaultdict[int, list[_TimedStep]](list), defaultdict[int, list[_TimedStep]](list)
        self.parameter_steps: list[_TimedStep] = []
        self._times: dict[int, list[tuple[Any, ...]]] = {}
        self.moves = [move for move in pricer.moves(strategies) if self.stage_of[move.use.target] is not None]
        first = self._once()
        for move, before in zip(self.moves, first, strict=True):
            steps = self._timed_steps(move)
            waited[move.use.target] += steps[:before]
            (self.parameter_steps if self.counts.of_parameter[move.use.source] else sent[move.use.target]).extend(
                steps[before:]
            )
        self.reads, by_ops = self._reads(first)
        self.windows = AsyncWindows(self.reads)
        self.read_by_ops = frozenset(n for step in by_ops for n in self.windows.gather_stages(step)[:1])
        for number, place in self.windows.waited():
            timed = self.parameter_steps[number]
            waited[timed.target if place is None else place].append(timed)
        self.sent = {target: steps for target, steps in sent.items() if steps}
        self.waited = {place: steps for place, steps in waited.items() if steps}

    def _once(self) -> list[int]:
        """The number of steps of each move that ZeRO-3 runs once, before its micro-batches: those before the first that
        communicates (as `lower.parameter_reads.split_reads`)."""
        found, shared_reads = [0] * len(self.moves), set[int]()
        for number, (use, path, _) in enumerate(
            self.moves if self.equivalent and not self.counts.hybrid.is_plain else ()
        ):
            if self.space.decisions[use.source].kind == "parameter" or use.source in shared_reads:
                found[number] = sum(1 for _ in itertools.takewhile(lambda s: s.step.forward not in COLLECTIVES, path))
                if found[number] == len(path) and self.space.decisions[use.target].kind == "shared_read":
                    shared_reads.add(use.target)
        return found

    def _reads(self, first: Sequence[int]) -> tuple[list[Read], list[int]]:
        """The parameter reads, as `lower.overlap_pass.reads_of` finds them in the program, without the ``first`` steps
        of each move; and the numbers of the last read before each op."""
        place, looks = self._places(first), dict[int, list[Read]]()
        found, by_ops = list[Read](), list[int]()
        passed: dict[int, int | None] = {}  # by shared read, the last step on the path to it
        for (use, path, kind), before in zip(self.moves, first, strict=True):
            if self.counts.of_parameter[use.source]:
                last = passed.get(use.source)
                if kind not in looks:
                    looks[kind] = [self._look(use, step) for step in path]
                for look in looks[kind][before:]:
                    where, block = place(use.target), self.space.blocks[use.target]
                    found.append(look._replace(after=last, place=where, block=block))
                    last = len(found) - 1
                if self.space.decisions[use.target].kind == "shared_read":
                    passed[use.target] = last
                elif last is not None:
                    by_ops.append(last)
        return found, by_ops

    def _look(self, use: TensorUse, priced: PricedStep) -> Read:
        """A step as `Read` describes it, but for its place and what is before it."""
        step, _, elements = priced
        kind = kind_of(step.forward, step.backward, use.meta.requires_grad)
        num_bytes = float(elements * use.meta.dtype.itemsize) if kind else 0.0
        return Read(None, kind, self.space.axis_names[step.axis], str(use.meta.dtype), num_bytes, TOP, None,
                    step.backward)

    def _places(self, first: Sequence[int]) -> Callable[[int], int]:
        """The program point at which each decision needs its parameters (`async_windows.places`)."""
        if not (self.equivalent and self.counts.block_end):
            return lambda index: index
        runs = {move.use.target for move, before in zip(self.moves, first, strict=True) if len(move.path) > before}
        runs |= {
            decision.index
            for decision in self.space.decisions
            if decision.kind == "op" and self.stage_of[decision.index] is not None
        }
        return places((index, self.counts.block_of[index]) for index in sorted(runs)).__getitem__

    def _timed_steps(self, move: Move) -> list[_TimedStep]:
        """The steps of a move; moves of one equivalence class share their times."""
        if move.kind not in self._times:
            self._times[move.kind] = [self._times_of(move.use, step) for step in move.path]
        return [_TimedStep(move.use.target, *times) for times in self._times[move.kind]]

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
        """The tasks of a step: forward, backward in reverse order, optimizer."""
        step, pending = _Step(), _Pending()
        if self.equivalent:
            marked = {*self.windows.events, *self.waited} - {TOP}
            self._read(step, TOP, pending)
            self._forward(step, marked, lambda index: self._read(step, index, pending))

            def reduce(index: int) -> None:
                self._reduce(step, index, pending)
                step.work(self._sums_s.get(index, 0.0), COMPUTE, ("backward", index, index))

            self._backward(step, {*marked, *self.asked, *self._sums_s}, _Again(step, self).read, reduce)
            self._reduce(step, TOP, pending)
        else:
            self._in_micro_batches(step, pending)
        step.work(self._updates_s(), COMPUTE, ("optimizer", TOP, TOP))
        step.flush()
        return step

    def _in_micro_batches(self, step: _Step, pending: _Pending) -> None:
        """Parameters are gathered, then the micro-batches run without overlap. The last of several launches the
        reduction of a bucket once its last gradient arrives, if micro-batches read its result directly. All other
        gradients are reduced at the end."""
        places = sorted({TOP, *self.windows.events, *self.waited})
        for place in places:
            self._read(step, place, pending)
        step.work((self.count - 1) * self._micro_batch_s() + (self.count - 2) * sum(self._sums_s.values()),
                  COMPUTE, ("micro-batches before the last", TOP, TOP))
        early = defaultdict[int, list[Pair]](list)
        for pair in (*self.windows.reduced, *self.windows.gathered):
            if self.count > 1 and all(self.windows.is_last(n) for n in pair.steps):
                early[min(self._first_reader(self.parameter_steps[n].target) for n in pair.steps)].append(pair)

        def reduce(index: int) -> None:
            step.work(self._sums_s.get(index, 0.0), COMPUTE, ("backward", index, index))
            for pair in early.get(index, ()):
                self._issue(step, pair, pending)

        self._forward(step)
        self._backward(step, {*early, *self._sums_s}, after=reduce)
        for place in reversed(places):
            self._reduce(step, place, pending)

    def _first_reader(self, target: int) -> int:
        """The first op that reads the result of a use: the target, or the first reader of a shared read."""
        if self.space.decisions[target].kind != "shared_read":
            return target
        readers = self.space.readers_of.get(target, ())
        return min((reader for reader in readers if self.stage_of[reader] is not None), default=target)

    @cached_property
    def _sums_s(self) -> Mapping[int, float]:
        """By decision, seconds of accumulating the gradients of its parameters; per micro-batch after the first, where
        micro-batches differ."""
        found = defaultdict[int, float](float)
        for use in (move.use for move in self.moves if self.counts.sums(move.use)):
            seconds = self.pricer.sums_s(use)[self.numbers[use.source], self.numbers[use.target]]
            found[use.target] += float(seconds) / (1 if self.equivalent else max(1, self.count - 1))
        return found

    def _read(self, step: _Step, place: int, pending: _Pending) -> None:
        for begins, pair in self.windows.events.get(place, ()):
            if begins:
                steps = self._of(pair)  # one all_gather for the bucket
                seconds, label = sum(timed.forward[0] for timed in steps), _targets("gather", steps)
                pending[pair] = [step.issue(seconds, steps[0].forward[1], label)] if seconds else []
            else:
                step.wait(pending.pop(pair))
        for timed in self.waited.get(place, ()):
            seconds, stream = timed.forward
            step.work(seconds, stream, _targets("gather", [timed]))

    @cached_property
    def asked(self) -> Mapping[int, Sequence[int]]:
        """Gathers whose results ops read, by the decision whose backward requests them: their last reader, or the last
        decision of the reader's block."""
        found = defaultdict[int, list[int]](list)
        for number in (n for pair in self.windows.gathered for n in pair.steps):
            if number in self.read_by_ops:
                target = self.parameter_steps[number].target
                block = self.counts.block_of[target]
                found[self._last_reader(target) if block is None else self.counts.block_end[block]].append(number)
        return found

    def _last_reader(self, target: int) -> int:
        """The last op that reads the result of a use: the target, or the last reader behind views and shared reads."""
        rule = self.space.strategy_sets[target].rule
        if self.space.decisions[target].kind != "shared_read" and (rule is None or not rule.alias):
            return target
        return max((self._last_reader(reader) for reader in self.space.readers_of.get(target, ())), default=target)

    def _reduce(self, step: _Step, place: int, pending: _Pending) -> None:
        for timed in reversed(self.waited.get(place, ())):
            step.work(timed.again_s, timed.forward[1], _targets("gather again", [timed]))
            step.work(*timed.backward, _targets("reduce", [timed]))
        for begins, pair in reversed(self.windows.events.get(place, ())):
            if begins:
                step.wait(pending[pair])
            elif pair not in pending:
                self._issue(step, pair, pending)

    def _issue(self, step: _Step, pair: Pair, pending: _Pending) -> None:
        steps = self._of(pair)  # one all_reduce for the bucket
        seconds, label = sum(timed.backward[0] for timed in steps), _targets("reduce", steps)
        pending[pair] = [step.issue(seconds, steps[0].backward[1], label)]

    def _forward(self, step: _Step, marked: Collection[int] = (), before: Callable[[int], None] = _nothing) -> None:
        """One forward pass; calls ``before`` at the marked decisions."""
        until, done = self._forward_s, 0
        for index in sorted({*marked, *self.sent}):
            step.work((until[index] - until[done]) / self.count, COMPUTE, ("forward", done, index))
            done = index
            if index in marked:
                before(index)
            for timed in self.sent.get(index, ()):
                step.work(timed.forward[0] / self.count, timed.forward[1], _targets("activations", [timed]))
        step.work((until[-1] - until[done]) / self.count, COMPUTE, ("forward", done, len(until) - 2))

    def _backward(self, step: _Step, marked: Collection[int], before: Callable[[int], None] = _nothing,
                  after: Callable[[int], None] = _nothing) -> None:
        """One backward pass; calls ``before`` and ``after`` at the marked decisions."""
        until, done = self._backward_s, len(self.space)
        for index in sorted({*marked, *self.sent}, reverse=True):
            step.work((until[done] - until[index + 1]) / self.count, COMPUTE, ("backward", done - 1, index + 1))
            done = index
            if index in marked:
                before(index)
            step.work((until[index + 1] - until[index]) / self.count, COMPUTE, ("backward", index, index))
            for timed in reversed(self.sent.get(index, ())):
                step.work(timed.again_s / self.count, timed.forward[1], _targets("activations again", [timed]))
                step.work(timed.backward[0] / self.count, timed.backward[1],
                          _targets("gradients of activations", [timed]))
            if index in marked:
                after(index)
        step.work(until[done] / self.count, COMPUTE, ("backward", done - 1, 0))

    def _micro_batch_s(self) -> float:
        """Seconds of one micro-batch without overlap and without gradient accumulation."""
        sent = sum(timed.forward[0] + timed.again_s + timed.backward[0]
                   for steps in self.sent.values() for timed in steps)
        return (self._forward_s[-1] + self._backward_s[-1] + sent) / self.count

    def _of(self, pair: Pair) -> list[_TimedStep]:
        return [self.parameter_steps[number] for number in pair.steps]

    @cached_property
    def _forward_s(self) -> list[float]:
        """Cumulative forward seconds: before each decision, and in total."""
        return self._until(0)

    @cached_property
    def _backward_s(self) -> list[float]:
        """Cumulative backward seconds, with recompute."""
        return self._until(1)

    def _until(self, part: int) -> list[float]:
        found, which = self._seconds
        return [0.0, *np.cumsum(np.array([seconds[part] for seconds in found])[which]).tolist()]

    def _updates_s(self) -> float:
        """Seconds of the optimizer's updates."""
        found, which = self._seconds
        return float(np.array([seconds[2] for seconds in found])[which].sum())

    @cached_property
    def _seconds(self) -> tuple[list[tuple[float, float, float]], np.ndarray]:
        """Seconds (forward, backward, optimizer) of each equivalence class, and the class of each decision."""
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
    """The gathers of ZeRO-3's backward, as `kernels.regather` runs them: of a bucket, those parameters that backward
    reads."""

    def __init__(self, step: _Step, plan: _Plan) -> None:
        self.step, self.plan = step, plan
        self.bucket_of = {n: pair for pair in plan.windows.gathered for n in pair.steps}
        self.numbers = {pair: [n for n in pair.steps if plan.parameter_steps[n].again_s]
                        for pair in plan.windows.gathered}
        self.still = {pair for pair, numbers in self.numbers.items() if numbers}
        self.pending = dict[Pair, int]()
        self.left = {pair for pair in self.still if any(n in plan.read_by_ops for n in self.numbers[pair])}
        self.paths = {pair: self._stages(pair) for pair in plan.windows.gathered if pair in self.left}
        self.to_ask = ToAsk[Pair](self.left.__contains__, self._num_bytes)
        for pair in self.paths:
            self.to_ask.add(pair, max(plan.reads[n].place for n in pair.steps))
        self.most_gather_stages = max(map(len, self.paths.values()), default=0)

    def _stages(self, pair: Pair) -> list[list[Pair]]:
        """The buckets on the paths to this one, the last first."""
        paths = (self.plan.windows.gather_stages(n) for n in self.numbers[pair])
        return [list(dict.fromkeys(self.bucket_of[n] for n in stage if n is not None))
                for stage in itertools.zip_longest(*paths)]

    def _num_bytes(self, pair: Pair) -> float:
        return sum(self.plan.reads[n].num_bytes for n in self.numbers[pair])

    def read(self, index: int) -> None:
        """Launch the gathers that backward of a decision requests or prefetches, and await those that it requests."""
        asked = (n for n in self.plan.asked.get(index, ()) if self.plan.parameter_steps[n].again_s)
        for pair in dict.fromkeys(self.bucket_of[n] for n in asked):
            if pair not in self.left:
                continue
            for gather_stage in range(self.most_gather_stages):
                for other in self.to_ask.at(max(self.plan.reads[n].place for n in pair.steps), gather_stage):
                    path = self.paths[other]
                    nearer = (one for stage in path[:gather_stage] for one in stage)
                    if len(path) > gather_stage and not any(one in self.pending for one in nearer):
                        self._issue(path[gather_stage:])
            self.left.discard(pair)
            self._wait(pair)

    def _issue(self, path: Sequence[Sequence[Pair]]) -> None:
        """Launch the gathers ``path[0]``; those before them on their paths (last first) are launched and awaited."""
        for pair in path[0]:
            if pair not in self.still:
                continue
            self.still.remove(pair)
            if path[1:]:
                self._issue(path[1:])
                for earlier in path[1]:
                    self._wait(earlier)
            again = [self.plan.parameter_steps[n] for n in self.numbers[pair]]
            seconds, label = sum(one.again_s for one in again), _targets("gather again", again)
            self.pending[pair] = self.step.issue(seconds, again[0].forward[1], label)

    def _wait(self, pair: Pair) -> None:
        if (task := self.pending.pop(pair, None)) is not None:
            self.step.wait([task])
