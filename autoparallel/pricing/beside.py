"""What communication of parameters runs beside compute (`lower.overlap`), by simulating a step of one rank.

The prices that the search adds up let everything wait for everything. The program of a step in one turn posts gathers
of parameters ahead of their readers, and reductions of gradients behind them: they go by the streams of the links that
they cross, in order, while compute goes on. Steps in several turns, and pipelines, are taken to hide nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoparallel.layout import COLLECTIVES, Step
from autoparallel.lower.posting import TOP, Pair, Posting, Read, kind_of, places
from autoparallel.pricing.problem import SpacePricer
from autoparallel.rules.space import Label, Link, Site
from cost_models.timeline import Task, equal_slowdown, simulate

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
    """One step of redistribution: before which site, seconds forward and backward, and by which streams."""

    target: int
    forward: tuple[float, str]
    backward: tuple[float, str]


class _Plan:
    """A plan's step: what runs on each site, what the program waits for there (`waited`), and steps of parameters
    (`ways`), which `posting` tells apart."""

    def __init__(self, pricer: SpacePricer, labels: Sequence[Label]) -> None:
        self.pricer, self.space, self.turns, self.labels = pricer, pricer.space, pricer.turns, labels
        self.waited: dict[int, list[_Way]] = defaultdict(list)
        self.ways: list[_Way] = []
        steps = {link: self._path(link) for site in self.space.sites
                 for link in self.space.links_into.get(site.index, ())}
        self.reads = self._reads(steps)
        for link, path in steps.items():
            (self.ways if self.turns.of_parameter[link.source] else self.waited[link.target]).extend(
                self._way(link, step) for step in path)
        self.posting = Posting(self.reads, self.turns.hybrid.zero_stage < 3)
        for number, place in self.posting.waited():
            way = self.ways[number]
            self.waited[way.target if place is None else place].append(way)

    def _path(self, link: Link) -> Sequence[Step]:
        source = self.space.strategies[link.source].output_layout(self.labels[link.source], link.output)
        target = self.space.strategies[link.target].input_layout(self.labels[link.target], link.position)
        return self.pricer.prices.path(link.meta, source, target) if source != target else ()

    def _reads(self, steps: Mapping[Link, Sequence[Step]]) -> list[Read]:
        """As `lower.overlap.reads_of` finds them in the program."""
        runs = dict.fromkeys(link.target for link, path in steps.items() if path)
        runs |= dict.fromkeys(site.index for site in self.space.sites if site.kind == "op")
        place = places((index, self.turns.block_of[index]) for index in sorted(runs))
        found: list[Read] = []
        passed: dict[int, int | None] = {}  # by hub, the last step on the way to it
        for link, path in steps.items():
            if self.turns.of_parameter[link.source]:
                last, layouts = passed.get(link.source), self.space.spaces(link.meta)
                for step in path:
                    kind = kind_of(step.forward, step.backward, link.meta.requires_grad)
                    num_bytes = layouts.local_elements[layouts.index(step.after)] * link.meta.dtype.itemsize
                    found.append(Read(last, kind, self.space.axis_names[step.axis], str(link.meta.dtype),
                                      float(num_bytes), place[link.target]))
                    last = len(found) - 1
                passed[link.target] = last
        return found

    def _way(self, link: Link, step: Step) -> _Way:
        seconds = self.pricer.prices.step_s(link.meta, step, self.turns.summing(link))
        streams = [self._stream(step.axis) if kind in COLLECTIVES else COMPUTE
                   for kind in (step.forward, step.backward)]
        there, back = self.turns.link_times(link)
        again = max(0, there - back) * seconds[0]
        return _Way(link.target, (min(there, back) * seconds[0], streams[0]),
                    (again + back * seconds[1], streams[1]))

    def _stream(self, axis: int) -> str:
        crossed = self.pricer.prices.groups[axis].crossed
        return crossed[-1][1].name if crossed else COMPUTE

    def step(self) -> _Step:
        """Forward, backward the other way round, optimizer."""
        step = _Step()
        sites, events = [site for site in self.space.sites if site.kind != "parameter"], self.posting.events
        on_the_way: dict[Pair, list[int]] = {}

        def forward(place: int) -> None:
            for begins, pair in events.get(place, ()):
                if begins:
                    on_the_way[pair] = [step.post(*way.forward) for way in self._of(pair) if way.forward[0]]
                else:
                    step.wait(on_the_way[pair])
            for way in self.waited[place]:
                step.work(*way.forward)

        def backward(place: int) -> None:
            for way in reversed(self.waited[place]):
                step.work(*way.backward)
            for begins, pair in reversed(events.get(place, ())):
                if begins:
                    step.wait(on_the_way[pair])
                else:
                    ways = self._of(pair)  # one all_reduce for all of a bucket
                    on_the_way[pair] = [step.post(sum(way.backward[0] for way in ways), ways[0].backward[1])]

        forward(TOP)
        for site in sites:
            forward(site.index)
            step.work(self._op_s(site)[0])
        for site in reversed(sites):
            step.work(self._op_s(site)[1])
            backward(site.index)
        backward(TOP)
        for site in self.space.sites:
            if site.kind == "parameter":
                step.work(float(self.pricer.prices.parameter_s(self.space.strategies[site.index])[self._number(site)]))
        step.flush()
        return step

    def _of(self, pair: Pair) -> list[_Way]:
        return [self.ways[number] for number in pair.steps]

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
