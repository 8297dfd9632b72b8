"""The redistributions of a plan on one rank, and the async windows in which those of parameters run."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from autoparallel.capture import TensorMeta
from autoparallel.layout import COLLECTIVES, SUMS, Layout, Step
from autoparallel.layout.redistribution import Axes, name_of
from autoparallel.layout.shapes import largest_local_shape
from autoparallel.pricing.counts import ExecutionCounts, parts_reading
from autoparallel.pricing.problem import SpacePricer
from autoparallel.pricing.redistribution_costs import PricedStep
from autoparallel.pricing.step_cost import Move, prices_of_stage
from autoparallel.schedule.async_windows import TOP, AsyncWindows, Read, kind_of, places
from autoparallel.strategies.space import Strategy, TensorUse

#: The stream of ops; collectives run on the streams of the links that they cross.
COMPUTE = "compute"


class Message(NamedTuple):
    """A collective over a mesh axis; ``num_bytes``: on the fullest rank, of what it sends in an all-to-all, else of the
    larger of its input and its result, with the padding of uneven shards."""

    action: str
    axis: str
    num_bytes: float


class Timed(NamedTuple):
    """Seconds of one direction of a redistribution step, its stream, its collective (None: no communication), and how
    often it runs."""

    seconds: float
    stream: str
    message: Message | None
    times: float = 1.0

    def per(self, count: float) -> Timed:
        """The share of one of ``count`` equal micro-batches."""
        return self._replace(seconds=self.seconds / count, times=self.times / count)


class TimedStep(NamedTuple):
    """One redistribution step before decision ``target``: its action in forward; forward, forward again for backward,
    and backward."""

    target: int
    action: str
    forward: Timed
    again: Timed
    backward: Timed


class RankReads:
    """The redistributions of a plan on a rank of one stage.

    ``equivalent``: all micro-batches do the same: each gathers (with ZeRO-2 only the first, for all) and reduces.
    ``members``: the decisions that the stage has, in order; ``here``: by decision, whether it does. ``sent``:
    redistribution steps of activations, by decision; ``paths``: the same by operand, without ``shared_views``: those of
    views of parameters, by decision, if multi-copy micro-batches share them. ``parameter_steps``: the steps of
    parameters, in the order of ``windows.events``, or if they are ``synchronous`` (ZeRO-3 with zero bubble) among those
    of ``sent``; ``names``: of the parameters of ``reads``; ``last_step``: by use (target, position) of a parameter, the
    number of the last step on the path to it.
    ``once``: by move, the number of its first steps, without communication, that run once for all micro-batches, though
    gradients go through them after each; ``once_steps``: these steps by use.
    """

    def __init__(self, pricer: SpacePricer, strategies: Sequence[Strategy], stage: int = 0) -> None:
        self.pricer, self.space, self.counts = pricer, pricer.space, pricer.counts
        self.prices, hybrid = prices_of_stage(pricer.prices, pricer.counts, stage), self.counts.hybrid
        self.stage, self.equivalent = stage, hybrid.is_plain or hybrid.reads_each
        self.members = members_of(pricer).get(stage, [])
        self.here = [False] * len(self.space)
        for index in self.members:
            self.here[index] = True
        self.numbers = pricer.costs.kinds.numbers(strategies)
        self.parameter_steps: list[TimedStep] = []
        self._times: dict[int, list[tuple[Any, ...]]] = {}
        self.moves = pricer.costs.memo.once(("moves by stage", tuple(strategies)),
                                            lambda: _by_stage(pricer, strategies)).get(stage, [])
        self.once = self._once()
        self.names: list[str] = []
        self.reads, self.last_step = self._reads(self.once)
        self.synchronous = hybrid.reads_alone
        self.windows = AsyncWindows.of([] if self.synchronous else self.reads, hybrid)
        sent = defaultdict[int, list[TimedStep]](list)
        self.once_steps = dict[tuple[int, int], list[TimedStep]]()
        self.paths = defaultdict[int, list[list[TimedStep]]](list)
        self.shared_views = defaultdict[int, list[TimedStep]](list)
        self._of_uses = dict[tuple[int, int], list[TimedStep]]()
        for move, before in zip(self.moves, self.once, strict=True):
            steps = self.timed_steps(move)
            if self.counts.of_parameter[move.use.source]:
                self.once_steps[move.use.target, move.use.position] = steps[:before]
                self.parameter_steps += (steps := steps[before:])
                steps = steps if self.synchronous else []
                sent[move.use.target] += steps
            else:
                sent[move.use.target] += steps
                if self.counts.views[move.use.source] and hybrid.alternates:
                    self.shared_views[move.use.target] += steps
                else:
                    self.paths[move.use.target].append(steps)
            if hybrid.puts_off_weights or self.counts.views[move.use.source]:
                self._of_uses[move.use.target, move.use.position] = steps
        self.sent = {target: steps for target, steps in sent.items() if steps}

    def _once(self) -> list[int]:
        """`once`: where micro-batches read parameters, the steps before the first that communicates (as
        `lower.parameter_reads.split_reads`)."""
        found, shared_reads = [0] * len(self.moves), set[int]()
        for number, (use, path, _) in enumerate(self.moves if self.counts.hybrid.reads_each else ()):
            if self.space.decisions[use.source].kind == "parameter" or use.source in shared_reads:
                stays = (_communicates(use, priced.step) for priced in path)
                found[number] = next(itertools.compress(itertools.count(), stays), len(path))
                if found[number] == len(path) and self.space.decisions[use.target].kind == "shared_read":
                    shared_reads.add(use.target)
        return found

    @property
    def once_of_leaves(self) -> Sequence[int]:
        """By move, the number of its first steps that run before the micro-batches, which read what these make."""
        if self.counts.hybrid.reads_each:
            return self.once
        return [len(move.path) if self.counts.of_parameter[move.use.source] else 0 for move in self.moves]

    def steps_of(self, use: TensorUse) -> Sequence[TimedStep]:
        """The steps among those of ``sent`` of a use; of a view of parameters, or of any use if backward has two
        parts."""
        return self._of_uses.get((use.target, use.position), ())

    def _reads(self, first: Sequence[int]) -> tuple[list[Read], dict[tuple[int, int], int | None]]:
        """The parameter reads, as `lower.overlap_pass.reads_of` finds them in the program, without the ``first`` steps
        of each move; and `last_step`."""
        place, looks = self._places(first), dict[int, list[Read]]()
        found, last_step = list[Read](), dict[tuple[int, int], int | None]()
        passed: dict[int, int | None] = {}  # by shared read, the last step on the path to it
        of = dict[int, str]()  # by parameter and shared read, the parameter's name
        for (use, path, kind), before in zip(self.moves, first, strict=True):
            if self.counts.of_parameter[use.source]:
                last = passed.get(use.source)
                decision = self.space.decisions[use.source]
                if decision.kind == "parameter":
                    of[use.source] = decision.path
                if kind not in looks:
                    looks[kind] = [self._look(use, step) for step in path]
                for look in looks[kind][before:]:
                    where, block = place(use.target), self.space.blocks[use.target]
                    named = self.counts.hybrid.fusion.number_of(of[use.source])
                    found.append(look._replace(after=last, place=where, block=block, named=named))
                    self.names.append(of[use.source])
                    last = len(found) - 1
                last_step[use.target, use.position] = last
                if self.space.decisions[use.target].kind == "shared_read":
                    passed[use.target], of[use.target] = last, of[use.source]
        return found, last_step

    def _look(self, use: TensorUse, priced: PricedStep) -> Read:
        """The `Read` of a redistribution step, but for its program point and the step before it."""
        step, _, elements = priced
        kind = kind_of(step.forward, step.backward, use.meta.requires_grad)
        num_bytes = float(elements * use.meta.dtype.itemsize) if kind else 0.0
        return Read(None, kind, name_of(step.axes, self.space.axis_names), str(use.meta.dtype), num_bytes, TOP, None,
                    step.backward)

    def _places(self, first: Sequence[int]) -> Callable[[int], int]:
        """The program point at which each decision needs its parameters (`async_windows.places`)."""
        gathered = self.counts.blocks.gathered
        if not (self.equivalent and any(gathered)):
            return lambda index: index
        runs = {move.use.target for move, before in zip(self.moves, first, strict=True) if len(move.path) > before}
        runs |= {index for index in self.members if self.space.decisions[index].kind == "op"}
        return places((index, gathered[index]) for index in sorted(runs)).__getitem__

    def timed_steps(self, move: Move) -> list[TimedStep]:
        """The steps of a move; moves of one equivalence class share their times."""
        if move.kind not in self._times:
            self._times[move.kind] = [self._times_of(move.use, step) for step in move.path]
        return [TimedStep(move.use.target, *times) for times in self._times[move.kind]]

    def piece_of(self, use: TensorUse, priced: PricedStep, pieces: int) -> TimedStep:
        """The step of one of so many equal pieces of an activation."""
        seconds = self.prices.redistribution.piece_s(use.meta, priced.step, pieces)
        action, *times = self._times_of(use, priced._replace(seconds=seconds))
        some = (time if time.message is None else time._replace(
            message=time.message._replace(num_bytes=time.message.num_bytes / pieces)) for time in times)
        return TimedStep(use.target, action, *some)

    def _times_of(self, use: TensorUse, priced: PricedStep) -> tuple[Any, ...]:
        step, seconds, _ = priced
        times = self.counts.use_times(use, self.stage, int(self.numbers[use.target]))
        message = self._message(use.meta, step, step.forward, step.before, step.after, 1.0)
        forward = Timed(times.forward * seconds[0], self._stream(step.axes, message), message, times.forward)
        message = None
        if use.meta.requires_grad and self.pricer.prices.training:  # no seconds where backward does not come
            message = self._message(use.meta, step, step.backward, step.after, step.before,
                                    self.counts.summing(use).scale if step.backward in SUMS else 1.0)
        stream = self._stream(step.axes, message if times.backward else None)
        backward = Timed(times.backward * seconds[1], stream, message, times.backward)
        again = times.again / parts_reading(self.counts, use, self.stage)
        return step.forward, forward, forward._replace(seconds=again * seconds[0], times=again), backward

    def _message(self, meta: TensorMeta, step: Step, action: str, source: Layout, target: Layout, scale: float
                 ) -> Message | None:
        """The collective of an action from layout to layout; ``scale``: bytes sent per byte of the tensor."""
        if action not in COLLECTIVES:
            return None
        mesh_shape = self.space.mesh_shape
        shard = source if action in ("all_gather", "all_to_all") else target
        elements = math.prod(largest_local_shape(meta.shape, shard, mesh_shape))
        if action in ("all_gather", "reduce_scatter"):
            elements *= self.prices.groups[step.axes].size
        return Message(action, name_of(step.axes, self.space.axis_names), scale * elements * meta.dtype.itemsize)

    def latency_s(self, steps: Sequence[Timed]) -> float:
        """Seconds by which the collective of a bucket takes longer than the shares as which its steps are priced: those
        of an even bucket (`EvenBuckets`), or of a block's. None in a reduced-depth model, whose steps
        stand for several blocks'."""
        sent = [step for step in steps if step.message is not None and step.seconds]
        if not sent or self.counts.one_for_all:
            return 0.0
        message = sent[0].message
        assert message is not None
        sizes = np.array([step.message.num_bytes for step in sent if step.message is not None])
        prices = self.prices.redistribution.single
        full, hybrid = prices.block_bytes, self.counts.hybrid
        if message.action == "all_reduce":
            full = self.counts.buckets.even(hybrid.fusion.bytes_on(message.axis, hybrid.bucket_bytes))
        more_s = prices.messages.latency_s(message.action, self._axes_of[message.axis], sizes, full)
        return max(step.times for step in sent) * more_s

    @cached_property
    def _axes_of(self) -> Mapping[str, Axes]:
        return {name_of(axes, self.space.axis_names): axes for axes in self.prices.groups}

    def _stream(self, axes: Axes, message: Message | None) -> str:
        return COMPUTE if message is None else self.stream_of(axes)

    def stream_of(self, axes: Axes) -> str:
        """The stream of the collectives over mesh axes."""
        crossed = self.prices.groups[axes].crossed
        return crossed[-1][1].name if crossed else COMPUTE

    def in_several_ops(self, index: int) -> bool:
        """Whether an op runs as several, so that gradients of its last inputs are complete first: a product, which
        reads its weight through a view, or a norm of shards."""
        s = self.space.strategy_sets[index]
        is_product = s.rule is not None and s.rule.op_class == "matmul"
        return is_product or any(s.axis_strategies[r].variant == "norms" for r in s.array[self.numbers[index]].tolist())

    def arrival(self, number: int) -> tuple[int, int]:
        """When backward completes the gradient of the result of a path's last step: (negated decision whose backward
        does, order among those of the decision)."""
        target = self.parameter_steps[number].target
        reader = self.first_reader(target)
        position = next(use.position for use in self.space.uses_by[reader] if (
            use.source == target or self.last_step.get((reader, use.position)) == number))
        return -reader, -position if self.in_several_ops(reader) else position

    def first_reader(self, target: int) -> int:
        """The first op that reads the result of a use: the target, or the first reader of a shared read."""
        if self.space.decisions[target].kind != "shared_read":
            return target
        readers = self.space.readers_of.get(target, ())
        return min((reader for reader in readers if self.here[reader]), default=target)


def members_of(pricer: SpacePricer) -> Mapping[int, list[int]]:
    """By stage, the decisions that it runs, in order."""
    return pricer.costs.memo.once("members", lambda: _members(pricer.counts))


def _members(counts: ExecutionCounts) -> Mapping[int, list[int]]:
    found = defaultdict[int, list[int]](list)
    for index, stages in enumerate(counts.stages_of):
        for stage in stages if index not in counts.unused else ():
            found[stage].append(index)
    return found


def _by_stage(pricer: SpacePricer, strategies: Sequence[Strategy]) -> Mapping[int, Sequence[Move]]:
    """A plan's redistributions by the stage on whose ranks they run."""
    counts, found = pricer.counts, defaultdict[int, list[Move]](list)
    for move in pricer.costs.moves(strategies):
        for stage in counts.stages_of[move.use.target] if move.use.target not in counts.unused else ():
            found[stage].append(move)
    return found


def _communicates(use: TensorUse, step: Step) -> bool:
    """Whether a step of a parameter communicates, forward or backward."""
    return step.forward in COLLECTIVES or (use.meta.requires_grad and step.backward in COLLECTIVES)
