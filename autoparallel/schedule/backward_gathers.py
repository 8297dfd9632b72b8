"""The gathers that ZeRO-3 repeats in backward: which are launched ahead, and when each is awaited.

The one policy of the run (`kernels.regather`, where values are tensors) and of the simulation
(`pricing.overlap_simulation`, where a gather is a task and its values are nothing).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from autoparallel.schedule.async_windows import PREFETCH_BYTES

Value = TypeVar("Value")
Group = TypeVar("Group")
#: Awaits the gathered values that were begun.
Finish = Callable[[], Sequence[Value]]


@dataclass(frozen=True)
class View(Generic[Value]):
    """A view of value ``number`` of a gather: one that backward reads, or the source of a further gather."""

    gather: Gather[Value]
    number: int

    def of(self, whole: Value) -> Value:
        """The view of the gathered value."""
        return whole


@dataclass(eq=False)
class Gather(Generic[Value]):
    """A bucket of gathers, or one synchronous step on the path of a parameter, that backward repeats from ``sources``.
    ``begin(numbers, sources)``: issues it for some of the values.

    ``place``: of a bucket that is prefetched, the last program point of its readers (else -1). By value: ``sizes``,
    bytes on the fullest rank, and ``uses``, reads left in backward. ``pending``: the values that an issued gather
    brings, and the function that awaits them; ``held``: awaited values with reads left."""

    begin: Callable[[Sequence[int], Sequence[Value]], Finish[Value]]
    sources: tuple[Value | View[Value], ...]
    place: int = -1
    sizes: tuple[float, ...] = ()
    uses: list[int] = field(default_factory=list)
    pending: tuple[tuple[int, ...], Finish[Value]] | None = None
    held: dict[int, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.uses = [0] * len(self.sources)

    def is_left(self) -> bool:
        """Whether backward is still to request the gather."""
        return not self.held and any(self.uses)

    def num_bytes(self) -> float:
        return sum(size for size, uses in zip(self.sizes, self.uses, strict=True) if uses)

    def stages(self) -> list[list[Gather[Value]]]:
        """The prefetched gathers on the paths from the shards to these values, the last first."""
        before: list[list[Gather[Value]]] = []
        for gather in dict.fromkeys(s.gather for s in self.sources if isinstance(s, View)):
            for number, stage in enumerate(gather.stages()):
                before += [[]] if number == len(before) else []
                before[number] += [one for one in stage if one not in before[number]]
        return [[self], *before] if self.place >= 0 else before

    def issue(self, asked: Sequence[int] = ()) -> None:
        """Issue the gather of the values with reads left and of those ``asked`` for, unless it is pending; gathered
        sources are awaited first."""
        if self.pending is None:
            numbers = tuple(n for n, uses in enumerate(self.uses) if uses or n in asked)
            if numbers:
                self.pending = numbers, self.begin(numbers, self._sources(numbers))

    def alone(self, number: int) -> Value:
        """One of the values, gathered by itself: backward reads it again, or somebody reads it outside of backward."""
        return self.begin((number,), self._sources((number,)))()[0]

    def _sources(self, numbers: Sequence[int]) -> list[Value]:
        wanted: dict[Gather[Value], list[int]] = {}
        for source in (self.sources[n] for n in numbers):
            if isinstance(source, View):
                wanted.setdefault(source.gather, []).append(source.number)
        made = {gather: gather.made(asked) for gather, asked in wanted.items()}
        return [source.of(made[source.gather][source.number]) if isinstance(source, View) else source
                for source in (self.sources[n] for n in numbers)]

    def made(self, asked: Sequence[int]) -> dict[int, Value]:
        """The gathered values of these numbers, awaited. (`BackwardGathers.read` issues the next gathers as well.)"""
        while not all(n in self.held for n in asked):
            self.issue(asked)
            assert self.pending is not None
            (numbers, finish), self.pending = self.pending, None
            self.held.update(zip(numbers, finish(), strict=True))
        found = {n: self.held[n] for n in asked}
        self.held = {n: value for n, value in self.held.items() if self.uses[n]}
        return found


class BackwardGathers(Generic[Value]):
    """The gathers of one forward that its backward repeats; ``bucket_bytes``: as in `AsyncWindows`."""

    def __init__(self, bucket_bytes: float) -> None:
        self._ahead: list[Gather[Value]] = []
        self._to_ask = ToAsk[Gather[Value]](Gather.is_left, Gather.num_bytes, bucket_bytes)
        self._most_stages = 0

    def add(self, gather: Gather[Value]) -> None:
        """A bucket that is prefetched, in the order in which forward launches them."""
        self._ahead.append(gather)
        self._to_ask.add(gather, gather.place)
        self._most_stages = max(self._most_stages, len(gather.stages()))

    def save(self, view: View[Value]) -> None:
        """Backward will read this view (once more). A synchronous step reads its source as an op does."""
        gather = view.gather
        gather.uses[view.number] += 1
        if gather.place < 0 and gather.uses[view.number] == 1 and isinstance(source := gather.sources[0], View):
            self.save(source)

    def read(self, view: View[Value]) -> Value:
        """The view, for backward; issues the prefetches that are due at this program point."""
        gather, number = view.gather, view.number
        if gather.uses[number] < 1:
            return view.of(gather.alone(number))
        if number not in gather.held:
            self._make(gather, number)
        made = gather.held[number]
        gather.uses[number] -= 1
        if not gather.uses[number]:
            del gather.held[number]
        return view.of(made)

    def _make(self, gather: Gather[Value], number: int) -> None:
        if gather.place >= 0:
            self._prefetch(gather.place)
            gather.made([number])
        else:
            source = gather.sources[0]
            made = gather.begin((0,), [self.read(source) if isinstance(source, View) else source])
            (gather.held[0],) = made()

    def _prefetch(self, place: int) -> None:
        for stage in range(self._most_stages):
            for gather in self._to_ask.at(place, stage):
                path = gather.stages()
                nearer = (one for earlier in path[:stage] for one in earlier)
                if len(path) > stage and not any(one.pending or one.held for one in nearer):
                    for one in path[stage]:
                        one.issue(_asked_of(one, path[stage - 1]) if stage else ())

    def settle(self) -> None:
        """Await issued gathers that backward did not read."""
        for gather in self._ahead:
            pending, gather.pending = gather.pending, None
            if pending is not None:
                pending[1]()
            gather.held.clear()


def _asked_of(gather: Gather[Value], later: Sequence[Gather[Value]]) -> list[int]:
    """The numbers in a bucket that later gathers will ask for."""
    return [source.number for one in later for source, uses in zip(one.sources, one.uses, strict=True)
            if uses and isinstance(source, View) and source.gather is gather]


class ToAsk(Generic[Group]):
    """The prefetch order of backward's gathers: by program point, last first. ``left`` tells whether a gather is still
    to be requested, ``size`` its bytes; ``bucket_bytes``: as in `AsyncWindows`."""

    def __init__(self, left: Callable[[Group], bool], size: Callable[[Group], float], bucket_bytes: float) -> None:
        self._left, self._size, self._most = left, size, min(PREFETCH_BYTES, bucket_bytes)
        self._places, self._groups = list[int](), list[list[Group]]()  # ascending negated program points

    def add(self, gather: Group, place: int) -> None:
        at = bisect.bisect_left(self._places, -place)
        if self._places[at : at + 1] != [-place]:
            self._places.insert(at, -place)
            self._groups.insert(at, [])
        self._groups[at].append(gather)

    def at(self, place: int, gather_stage: int = 0) -> list[Group]:
        """The gathers to launch when backward requests those of ``place``: these, those of the next program point, and
        more while at most `PREFETCH_BYTES` are pending (`starts` in reverse). For ``gather_stage`` s, the gathers whose
        s-th earlier gather on their path is launched now: those of s program points further on."""
        groups = self._from(place)
        found, num_bytes = list(next(itertools.islice(groups, gather_stage, None), ())), 0.0
        for number, group in enumerate(groups):
            num_bytes += sum(map(self._size, group))
            if number and num_bytes > self._most:
                break
            found += group
        return found

    def _from(self, place: int) -> Iterator[list[Group]]:
        """The remaining gathers of a program point (perhaps none), then of the points before it that have any."""
        start = bisect.bisect_left(self._places, -place)
        if self._places[start : start + 1] != [-place]:
            yield []
        for number in range(start, len(self._groups)):
            group = [one for one in self._groups[number] if self._left(one)]
            if group or self._places[number] == -place:
                yield group
