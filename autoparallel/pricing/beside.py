"""What communication of parameters runs beside compute (`lower.overlap`), by simulating a step of one rank.

The prices that the search adds up let everything wait for everything. The program of a step in one turn posts gathers
of parameters ahead of their readers, and reductions of gradients behind them: they go by the streams of the links that
they cross, in order, while compute goes on. Steps in several turns, and pipelines, are taken to hide nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from autoparallel.layout import COLLECTIVES
from autoparallel.lower.overlap import in_buckets, starts
from autoparallel.pricing.problem import SpacePricer
from autoparallel.rules.space import Label, Link, Site
from cost_models.timeline import Task, equal_slowdown, simulate

#: Seconds, and by which stream.
Bucket = tuple[float, str]
COMPUTE = "compute"
LEAST_SHARE = 0.01


def least_exposed(pricer: SpacePricer) -> float:
    """What share of the seconds of communication of parameters a step takes at least: all of them where nothing runs
    beside compute, else what both take longer by while they do (and so much that none is taken for nothing)."""
    hybrid = pricer.turns.hybrid
    if not (hybrid.is_plain and hybrid.zero_stage < 3 and pricer.prices.training):
        return 1.0
    return max(LEAST_SHARE, pricer.prices.cluster.device.overlap_slowdown - 1.0)


def hidden_s(pricer: SpacePricer, labels: Sequence[Label]) -> float:
    """Seconds by which a step of this plan is shorter than the sum of its parts."""
    if not (pricer.turns.hybrid.is_plain and pricer.prices.training):
        return 0.0
    return _Plan(pricer, labels).step().hidden_s(pricer.prices.cluster.device.overlap_slowdown)


class _Step:
    """Tasks of one rank, in the order in which its program posts them; the program waits for some of them."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._compute_s = 0.0
        self._after: tuple[int, ...] = ()

    def post(self, seconds: float, stream: str) -> int:
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
            self.wait([self.post(seconds, stream)])

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


@dataclass(frozen=True)
class _Way:
    """One step of redistribution: seconds forward and backward, and by which streams."""

    forward: tuple[float, str]
    backward: tuple[float, str]
    place: int
    num_bytes: float
    #: Axis, dtype, and how many steps with communication follow.
    kind: tuple[str, str, int]


class _Plan:
    """A plan's step, told apart as `lower.overlap` does the program."""

    def __init__(self, pricer: SpacePricer, labels: Sequence[Label]) -> None:
        self.pricer, self.space, self.turns, self.labels = pricer, pricer.space, pricer.turns, labels
        self.first: dict[object, int] = {}
        for index, block in enumerate(self.turns.block_of):
            self.first.setdefault(block, index)
        self.waited: dict[int, list[_Way]] = defaultdict(list)
        self.reduced: list[_Way] = []
        self.gathered: list[_Way] = []
        for link in sorted(self.space.links, key=lambda k: k.target):
            self._tell(link)

    def _tell(self, link: Link) -> None:
        """Tell the steps of a link that wait from those that are posted."""
        source = self.space.strategies[link.source].output_layout(self.labels[link.source], link.output)
        target = self.space.strategies[link.target].input_layout(self.labels[link.target], link.position)
        if source == target:
            return
        prices, block = self.pricer.prices, self.turns.block_of[link.target]
        times, summing = self.turns.link_times(link), self.turns.summing(link)
        layouts, path = self.space.spaces(link.meta), prices.path(link.meta, source, target)
        posted = self.turns.of_parameter[link.source] and self.turns.hybrid.zero_stage < 3
        reduces_only = posted
        for number, step in enumerate(path):
            seconds = prices.step_s(link.meta, step, summing)
            streams = [self._stream(step.axis) if kind in COLLECTIVES else COMPUTE
                       for kind in (step.forward, step.backward)]
            follow = sum(later.forward == "all_gather" or (later.forward, later.backward) == ("none", "all_reduce")
                         for later in path[number + 1 :])
            elements = max(layouts.local_elements[layouts.index(x)] for x in (step.before, step.after))
            way = _Way((times[0] * seconds[0], streams[0]), (times[1] * seconds[1], streams[1]),
                       link.target if block is None else self.first[block],
                       float(elements) * link.meta.dtype.itemsize,
                       (self.space.axis_names[step.axis], str(link.meta.dtype), follow))
            reduces_only = reduces_only and (step.forward, step.backward) == ("none", "all_reduce")
            if reduces_only:
                self.reduced.append(way)
            elif posted and step.forward == "all_gather" and not follow:
                self.gathered.append(way)
            else:
                self.waited[link.target].append(way)

    def _stream(self, axis: int) -> str:
        crossed = self.pricer.prices.groups[axis].crossed
        return crossed[-1][1].name if crossed else COMPUTE

    def step(self) -> _Step:
        """Forward, backward the other way round, reductions that nothing can hide, optimizer."""
        step = _Step()
        sites = [site for site in self.space.sites if site.kind != "parameter"]
        ends, begins = self._gathers()
        on_the_way: dict[int, list[int]] = {}

        def post(groups: Sequence[int]) -> None:
            for group in groups:
                on_the_way[group] = [step.post(*way.forward) for way in ends[group]]

        post(begins[-1])
        at = {group[0].place: number for number, group in enumerate(ends)}
        for site in sites:
            if site.index in at:
                step.wait(on_the_way[at[site.index]])
                post(begins[at[site.index]])
            for way in self.waited[site.index]:
                step.work(*way.forward)
            step.work(self._op_s(site)[0])
        reduced_at, reduced_last = self._buckets()
        left: list[int] = []
        for site in reversed(sites):
            step.work(self._op_s(site)[1])
            for way in reversed(self.waited[site.index]):
                step.work(*way.backward)
            if site.index in at:
                for group in reversed(begins[at[site.index]]):
                    step.wait(on_the_way[group])
                on_the_way[at[site.index]] = [step.post(*way.backward) for way in ends[at[site.index]]]
            left += [step.post(*bucket) for bucket in reduced_at[site.index]]
        for group in begins[-1]:
            step.wait(on_the_way[group])
        step.wait(left)
        for follow in sorted(reduced_last):
            step.wait([step.post(*bucket) for bucket in reduced_last[follow]])
        for site in self.space.sites:
            if site.kind == "parameter":
                step.work(float(self.pricer.prices.parameter_s(self.space.strategies[site.index])[self._number(site)]))
        step.flush()
        return step

    def _number(self, site: Site) -> int:
        return self.space.strategies[site.index].position[self.labels[site.index]]

    def _op_s(self, site: Site) -> tuple[float, float]:
        """Seconds of forward, and of backward with what runs again for it."""
        number, times = self._number(site), self.turns.op_times(site.index)
        if site.kind == "hub":
            return 0.0, times[1] * float(self.pricer.hub_s(site.index)[number])
        if site.kind != "op":
            return 0.0, 0.0
        price = self.pricer.prices.op(self.space.strategies[site.index])
        there, back = (float(moved[number]) for moved in self.pricer.offload_s(site.index))
        forward = float(price.forward_s[number])
        return (times[1] * forward + there,
                (times[0] - times[1]) * forward + times[1] * float(price.backward_s[number]) + back)

    def _gathers(self) -> tuple[list[list[_Way]], dict[int, list[int]]]:
        """Gathers by where they end; and which groups begin where each ends (-1: at the top)."""
        by_place = sorted(self.gathered, key=lambda way: way.place)  # what a block reads may stand apart
        ends = [list(group) for _, group in groupby(by_place, lambda way: way.place)]
        begins: dict[int, list[int]] = {number: [] for number in range(-1, len(ends))}
        for number, after in enumerate(starts([sum(way.num_bytes for way in group) for group in ends])):
            begins[after].append(number)
        return ends, begins

    def _buckets(self) -> tuple[dict[int, list[Bucket]], dict[int, list[Bucket]]]:
        """Reductions in buckets, by the site behind whose backward they are posted; and those that wait for others, by
        how many."""
        at, last = defaultdict[int, list[Bucket]](list), defaultdict[int, list[Bucket]](list)
        for (_, _, follow), alike in groupby(sorted(self.reduced, key=lambda way: way.kind), lambda way: way.kind):
            ways = list(alike)
            for numbers in in_buckets([way.num_bytes for way in ways]):
                bucket = sum(ways[i].backward[0] for i in numbers), ways[0].backward[1]
                (last[follow] if follow else at[min(ways[i].place for i in numbers)]).append(bucket)
        return at, last
