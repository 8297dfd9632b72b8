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
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from autoparallel.layout import COLLECTIVES
from autoparallel.lower.posting import TOP, Pair, Posting, Read, ToAsk, kind_of, places
from autoparallel.plans import Hybrid
from autoparallel.pricing.prices import PricedStep
from autoparallel.pricing.problem import SpacePricer
from autoparallel.rules.space import Label, Link, Site
from cost_models.timeline import Task, equal_slowdown, simulate

COMPUTE = "compute"
LEAST_SHARE = 0.01


def least_exposed(pricer: SpacePricer) -> tuple[float, float]:
    """What share of the seconds in which parameters are gathered, and of those in which their gradients are reduced, a
    step takes at least: all of them where nothing runs beside compute, else what both take longer by while they do (and
    so much that none is taken for nothing)."""
    hybrid = pricer.turns.hybrid
    share = max(LEAST_SHARE, pricer.prices.cluster.device.overlap_slowdown - 1.0)
    if not _hides(pricer) or hybrid.stages > 1:  # a pipeline's last turn hides little
        return 1.0, 1.0
    return share if _alike(hybrid) else 1.0, share


def hidden_s(pricer: SpacePricer, labels: Sequence[Label], stages: Sequence[int] = (0,)) -> float:
    """Seconds by which what a rank of these stages does is shorter than the sum of its parts."""
    if not _hides(pricer):
        return 0.0
    slowdown = pricer.prices.cluster.device.overlap_slowdown
    return pricer.once(("hidden", tuple(labels), tuple(stages)),
                       lambda: _Plan(pricer, labels, stages).step().hidden_s(slowdown))


def _hides(pricer: SpacePricer) -> bool:
    """Whether anything runs beside compute: in each turn, or where turns read parameters once, and reduce once. (Zero
    bubble makes gradients of weights last of all.)"""
    hybrid = pricer.turns.hybrid
    put_off = hybrid.schedule == "zero_bubble" and hybrid.stages > 1
    return pricer.prices.training and (_alike(hybrid) or (hybrid.zero_stage < 2 and not put_off))


def _alike(hybrid: Hybrid) -> bool:
    """Whether a step is one turn, or several that all do the same: gather, and reduce."""
    return hybrid.is_plain or hybrid.gathers_ahead


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


#: Tasks by the pair that posted them.
_OnTheWay = dict[Pair, list[int]]


class _Way(NamedTuple):
    """One step of redistribution: before which site, seconds forward, of the same again for backward, and backward, and
    by which streams."""

    target: int
    forward: tuple[float, str]
    again_s: float
    backward: tuple[float, str]


class _Plan:
    """A plan's step on a rank of some stages: its sites, with the stage that has each (`stage_of`), by site what it
    sends (`sent`), by place which steps of parameters the program waits for there (`waited`), and all those steps
    (`ways`), which `posting` tells apart; ``read_by_ops`` are gathers whose results ops read. Turns that all do the
    same are simulated as one that takes as long as all."""

    def __init__(self, pricer: SpacePricer, labels: Sequence[Label], stages: Sequence[int] = (0,)) -> None:
        self.pricer, self.space, self.turns, self.labels = pricer, pricer.space, pricer.turns, labels
        self.alike = _alike(self.turns.hybrid)
        self.count = 1 if self.alike else self.turns.turns_on(stages[0])
        self.stage_of = {index: stage for index, holders in enumerate(self.turns.stages_of)
                         for stage in reversed(holders) if stage in stages}
        self.sites = [site for site in self.space.sites if site.index in self.stage_of]
        self.numbers = [s.position[label] for s, label in zip(self.space.strategies, labels, strict=True)]
        sent, waited = defaultdict[int, list[_Way]](list), defaultdict[int, list[_Way]](list)
        self.ways: list[_Way] = []
        self._op_s = {site.index: self._priced(site) for site in self.sites}
        steps = [(link, path) for link, path in pricer.paths(labels) if link.target in self.stage_of]
        read = list[tuple[Link, Sequence[PricedStep]]]()
        for (link, path), first in zip(steps, self._once(steps), strict=True):
            read.append((link, path[first:]))
            if path:
                ways = [self._way(link, step) for step in path]
                waited[link.target] += ways[:first]
                (self.ways if self.turns.of_parameter[link.source] else sent[link.target]).extend(ways[first:])
        self.reads, by_ops = self._reads(read)
        self.posting = Posting(self.reads)
        self.read_by_ops = frozenset(n for step in by_ops for n in self.posting.hops(step)[:1])
        for number, place in self.posting.waited():
            way = self.ways[number]
            waited[way.target if place is None else place].append(way)
        self.sent: Mapping[int, list[_Way]] = dict(sent)
        self.waited: Mapping[int, list[_Way]] = dict(waited)

    def _once(self, steps: Sequence[tuple[Link, Sequence[PricedStep]]]) -> list[int]:
        """How many steps of each link ZeRO-3 takes before its turns, as `lower.reads.split_reads` has it: those before
        the first that communicates."""
        found, hubs = [0] * len(steps), set[int]()
        for number, (link, path) in enumerate(steps if self.alike and not self.turns.hybrid.is_plain else ()):
            if self.space.sites[link.source].kind == "parameter" or link.source in hubs:
                found[number] = sum(1 for _ in itertools.takewhile(lambda s: s.step.forward not in COLLECTIVES, path))
                if found[number] == len(path) and self.space.sites[link.target].kind == "hub":
                    hubs.add(link.target)
        return found

    def _reads(self, steps: Sequence[tuple[Link, Sequence[PricedStep]]]) -> tuple[list[Read], list[int]]:
        """As `lower.overlap.reads_of` finds them in the program; of those the last before each op, by number."""
        runs = dict.fromkeys(link.target for link, path in steps if path)
        runs |= dict.fromkeys(site.index for site in self.sites if site.kind == "op")
        place = places((index, self.turns.block_of[index] if self.alike else None) for index in sorted(runs))
        found, by_ops = list[Read](), list[int]()
        passed: dict[int, int | None] = {}  # by hub, the last step on the way to it
        for link, path in steps:
            if self.turns.of_parameter[link.source]:
                last, meta = passed.get(link.source), link.meta
                for step, _, elements in path:
                    kind = kind_of(step.forward, step.backward, meta.requires_grad)
                    found.append(Read(last, kind, self.space.axis_names[step.axis], str(meta.dtype),
                                      float(elements * meta.dtype.itemsize) if kind else 0.0, place[link.target]))
                    last = len(found) - 1
                if self.space.sites[link.target].kind == "hub":
                    passed[link.target] = last
                elif last is not None:
                    by_ops.append(last)
        return found, by_ops

    def _way(self, link: Link, priced: PricedStep) -> _Way:
        step, seconds, _ = priced
        streams = [self._stream(step.axis) if kind in COLLECTIVES else COMPUTE
                   for kind in (step.forward, step.backward)]
        there, back = self.turns.link_times(link, self.stage_of[link.target])
        again = max(0, there - back) * seconds[0]
        return _Way(link.target, (min(there, back) * seconds[0], streams[0]), again, (back * seconds[1], streams[1]))

    def _stream(self, axis: int) -> str:
        crossed = self.pricer.prices.groups[axis].crossed
        return crossed[-1][1].name if crossed else COMPUTE

    def step(self) -> _Step:
        """Forward, backward the other way round, optimizer."""
        step = _Step()
        sites, on_the_way = [site for site in self.sites if site.kind != "parameter"], _OnTheWay()
        if self.alike:
            self._read(step, TOP, on_the_way)
            marked = {*self.posting.events, *self.waited}
            for site in sites:
                if site.index in marked:
                    self._read(step, site.index, on_the_way)
                self._forward(step, site)
            again = _Again(step, self)
            for site in reversed(sites):
                if site.index in self.asked:
                    again.read(site.index)
                self._backward(step, site)
                if site.index in marked:
                    self._reduce(step, site.index, on_the_way)
                step.work(self._sums_s(site))
            self._reduce(step, TOP, on_the_way)
        else:
            self._in_turns(step, sites, on_the_way)
        for site in self.sites:
            if site.kind == "parameter":
                step.work(float(self.pricer.parameter_s(site.index)[self.numbers[site.index]]))
        step.flush()
        return step

    def _in_turns(self, step: _Step, sites: Sequence[Site], on_the_way: _OnTheWay) -> None:
        """Parameters are read, then turns run alone, but for the last of several: it posts what is reduced together
        once it has the last gradient of it, if turns read that. What is left is reduced at the end."""
        order = (TOP, *range(len(self.space)))
        for place in order:
            self._read(step, place, on_the_way)
        once = _Step()
        for site in sites:
            self._forward(once, site)
            self._backward(once, site)
        once.flush()
        summed = {site.index: self._sums_s(site) / max(1, self.count - 1) for site in sites}
        step.work((self.count - 1) * sum(task.duration_s for task in once.tasks)
                  + (self.count - 2) * sum(summed.values()))
        early = defaultdict[int, list[Pair]](list)
        for pair in (*self.posting.reduced, *self.posting.gathered):
            if self.count > 1 and all(self.posting.is_last(n) for n in pair.steps):
                early[min(self._first_reader(self.ways[n].target) for n in pair.steps)].append(pair)
        for site in sites:
            self._forward(step, site)
        for site in reversed(sites):
            self._backward(step, site)
            step.work(summed[site.index])
            for pair in early[site.index]:
                self._post(step, pair, on_the_way)
        for place in reversed(order):
            self._reduce(step, place, on_the_way)

    def _first_reader(self, target: int) -> int:
        """The first op that reads what is there for a site: its own, or of a hub's readers."""
        if self.space.sites[target].kind != "hub":
            return target
        readers = self.space.readers_of.get(target, ())
        return min((reader for reader in readers if reader in self.stage_of), default=target)

    def _sums_s(self, site: Site) -> float:
        """Seconds in which turns add gradients of what the site reads to those before."""
        if self.turns.hybrid.micro_batches == 1:
            return 0.0
        links = [link for link in self.space.links_into.get(site.index, ()) if self.turns.sums(link)]
        return sum(float(self.pricer.sums_s(k)[self.numbers[k.source], self.numbers[k.target]]) for k in links)

    def _read(self, step: _Step, place: int, on_the_way: _OnTheWay) -> None:
        for begins, pair in self.posting.events.get(place, ()):
            if begins:
                on_the_way[pair] = [step.post(*way.forward) for way in self._of(pair) if way.forward[0]]
            else:
                step.wait(on_the_way.pop(pair))
        for way in self.waited.get(place, ()):
            step.work(*way.forward)

    @cached_property
    def asked(self) -> Mapping[int, Sequence[int]]:
        """Gathers whose results ops read, by the site whose backward asks for them: the last that reads them, or with
        which a block ends."""
        found = defaultdict[int, list[int]](list)
        for number in (pair.steps[0] for pair in self.posting.gathered):
            if number in self.read_by_ops:
                target = self.ways[number].target
                block = self.turns.block_of[target]
                found[self._last_reader(target) if block is None else self.turns.block_end[block]].append(number)
        return found

    def _last_reader(self, target: int) -> int:
        """The last op that reads what is there for a site: itself, or what passes it on to."""
        rule = self.space.strategies[target].rule
        if self.space.sites[target].kind != "hub" and (rule is None or not rule.alias):
            return target
        return max((self._last_reader(reader) for reader in self.space.readers_of.get(target, ())), default=target)

    def _reduce(self, step: _Step, place: int, on_the_way: _OnTheWay) -> None:
        for way in reversed(self.waited.get(place, ())):
            step.work(way.again_s, way.forward[1])
            step.work(*way.backward)
        for begins, pair in reversed(self.posting.events.get(place, ())):
            if begins:
                step.wait(on_the_way[pair])
            elif pair not in on_the_way:
                self._post(step, pair, on_the_way)

    def _post(self, step: _Step, pair: Pair, on_the_way: _OnTheWay) -> None:
        ways = self._of(pair)  # one all_reduce for all of a bucket
        on_the_way[pair] = [step.post(sum(way.backward[0] for way in ways), ways[0].backward[1])]

    def _forward(self, step: _Step, site: Site) -> None:
        for way in self.sent.get(site.index, ()):
            step.work(way.forward[0] / self.count, way.forward[1])
        step.work(self._op_s[site.index][0] / self.count)

    def _backward(self, step: _Step, site: Site) -> None:
        step.work(self._op_s[site.index][1] / self.count)
        for way in reversed(self.sent.get(site.index, ())):
            step.work(way.again_s / self.count, way.forward[1])
            step.work(way.backward[0] / self.count, way.backward[1])

    def _of(self, pair: Pair) -> list[_Way]:
        return [self.ways[number] for number in pair.steps]

    def _priced(self, site: Site) -> tuple[float, float]:
        """Seconds of forward, and of backward with what runs again for it."""
        number, stage = self.numbers[site.index], self.stage_of[site.index]
        if site.kind == "hub":
            return 0.0, self.turns.op_times(site.index, stage)[1] * float(self.pricer.hub_s(site.index)[number])
        if site.kind != "op":
            return 0.0, 0.0
        forward, again, backward = self.pricer.op_s(site.index, number, stage)
        return forward, again + backward


class _Again:
    """What ZeRO-3 gathers again in a plan's backward, as `runtime.regather` does."""

    def __init__(self, step: _Step, plan: _Plan) -> None:
        self.step, self.plan = step, plan
        gathers = [n for pair in plan.posting.gathered if plan.ways[n := pair.steps[0]].again_s]
        self.still, self.under_way, self.left = set(gathers), dict[int, int](), set(gathers) & plan.read_by_ops
        self.ways = {n: plan.posting.hops(n) for n in gathers if n in self.left}
        self.to_ask = ToAsk[int](self.left.__contains__)
        for number in self.ways:
            self.to_ask.add(number, plan.reads[number].place, plan.reads[number].num_bytes)
        self.most_hops = max(map(len, self.ways.values()), default=0)

    def read(self, index: int) -> None:
        """What backward of a site asks for is waited for; what it asks for next is posted."""
        for asked in self.plan.asked[index]:
            for hop in range(self.most_hops):
                for number in self.to_ask.at(self.plan.reads[asked].place, hop):
                    way = self.ways[number]
                    if len(way) > hop and not any(n in self.under_way for n in way[:hop]):
                        self._post(way[hop:])
            self.left.discard(asked)
            self._wait(asked)

    def _post(self, way: Sequence[int]) -> None:
        """The first, of what is gathered before it."""
        if way[0] in self.still:
            self.still.remove(way[0])
            if way[1:]:
                self._post(way[1:])
                self._wait(way[1])
            again = self.plan.ways[way[0]]
            self.under_way[way[0]] = self.step.post(again.again_s, again.forward[1])

    def _wait(self, number: int) -> None:
        if (task := self.under_way.pop(number, None)) is not None:
            self.step.wait([task])
