"""Which communication of parameters runs beside compute, and where it begins and ends.

`overlap` asks this for a program's lines and `pricing.beside` for a plan's links, so that what is priced is what runs.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

#: As torch's DistributedDataParallel. So much is on its way ahead of its readers, too, or one parameter at least.
BUCKET_BYTES = 25 * 2**20
Gather = TypeVar("Gather")
#: The place before all sites.
TOP = -1


class Read(NamedTuple):
    """One step on the way from a parameter to its readers.

    ``after``: the step before it, by number (None: the parameter). ``kind``: a "gather", the "reduction" of a gradient
    (nothing is sent forward), or "" for others. ``num_bytes`` are those of the result on the fullest rank (of others
    0), so that all ranks post the same in the same order; ``place`` is the site that reads it, or at which that site's
    block begins.
    """

    after: int | None
    kind: str
    axis: str
    dtype: str
    num_bytes: float
    place: int


class Pair(NamedTuple):
    """Steps that one begin and one end stand for, and before which sites these are."""

    steps: tuple[int, ...]
    begin: int
    end: int


class Event(NamedTuple):
    """A pair begins, or ends."""

    begins: bool
    pair: Pair


def kind_of(forward: str, backward: str, trainable: bool) -> str:
    """`Read.kind` of a step by its actions."""
    if forward == "all_gather":
        return "gather"
    return "reduction" if trainable and (forward, backward) == ("none", "all_reduce") else ""


def places(decisions: Iterable[tuple[int, object]]) -> dict[int, int]:
    """Where what each site reads must be there: of sites and their blocks, in the order of the program, the site itself
    (where the block is None), or the first of the run of its block."""
    found: dict[int, int] = {}
    for block, run in itertools.groupby(decisions, lambda decision: decision[1]):
        members = [index for index, _ in run]
        found.update((index, index if block is None else members[0]) for index in members)
    return found


class AsyncWindows:
    """Reads, in the order of the program, told apart: reduced in buckets, gathered ahead, or waited for.

    Reduced are the reductions that a way begins with, many at once by axis, dtype and place on the way; gathered are
    all gathers, of which a way may have several, one after the other.
    """

    def __init__(self, reads: Sequence[Read]) -> None:
        self.reads = reads
        self._users = defaultdict[int, list[int]](list)
        for number, read in enumerate(reads):
            if read.after is not None:
                self._users[read.after].append(number)
        self._follow = [0] * len(reads)
        for number in reversed(range(len(reads))):
            self._follow[number] = max((self._follow[u] + bool(reads[u].kind) for u in self._users[number]), default=0)
        self._depth: dict[int, int] = {}  # of what is reduced, how many reductions are before
        for number, read in enumerate(reads):
            if read.kind == "reduction" and (read.after is None or read.after in self._depth):
                self._depth[number] = 0 if read.after is None else self._depth[read.after] + 1
        self.gathered = self._gathered()
        self.reduced = self._reduced()

    def _gathered(self) -> list[Pair]:
        """Gathers end where they are read, or where the next on their way begins. They begin where those before them
        end, or earlier, as far as no more than `BUCKET_BYTES` are on their way."""
        found, begins = list[Pair](), dict[int, int]()
        steps = sorted((n for n, read in enumerate(self.reads) if read.kind == "gather"), key=self._follow.__getitem__)
        for _, level in itertools.groupby(steps, self._follow.__getitem__):
            ends = {n: self._needed(n, begins) for n in level}
            groups = [list(g) for _, g in itertools.groupby(sorted(ends, key=ends.__getitem__), ends.__getitem__)]
            sizes = [sum(self.reads[n].num_bytes for n in group) for group in groups]
            for after, group in zip(starts(sizes), groups, strict=True):
                begin = TOP if after < 0 else ends[groups[after][0]]
                found += [Pair((n,), begin, ends[n]) for n in group]
                begins.update(dict.fromkeys(group, begin))
        return found

    def _place(self, number: int) -> int:
        return self.reads[number].place

    def _reduced(self) -> list[Pair]:
        """Buckets end where the first is read, or where what follows on its way begins: so what comes first backward is
        done. A way's first reduction begins at the top; others where the bucket before theirs is read, so that backward
        posts that one, too, before it waits for this one."""

        def kind(number: int) -> tuple[int, str, str, int]:
            read = self.reads[number]
            return self._follow[number], read.axis, read.dtype, self._depth[number]

        begins = {step: pair.begin for pair in self.gathered for step in pair.steps}
        found, read_at = list[Pair](), list[int]()
        for follow, level in itertools.groupby(sorted(self._depth, key=kind), lambda n: self._follow[n]):
            ends = {bucket: min(self._needed(n, begins) for n in bucket) for bucket in self._buckets(level, kind)}
            read_at = read_at if follow else list(ends.values())
            for bucket, end in ends.items():
                before = [place for place in read_at if place < end and self._depth[bucket[0]]]
                found.append(Pair(bucket, max(before, default=TOP), end))
                begins.update(dict.fromkeys(bucket, found[-1].begin))
        return found

    def _buckets(self, steps: Iterable[int], kind: Callable[[int], object]) -> Iterator[tuple[int, ...]]:
        for _, equivalent in itertools.groupby(steps, kind):
            numbers = list(equivalent)
            for bucket in in_buckets([self.reads[n].num_bytes for n in numbers]):
                yield tuple(numbers[i] for i in bucket)

    def _needed(self, number: int, begins: Mapping[int, int]) -> int:
        """The place before which a step must be done: its own, or where what comes after it begins."""
        after = (begins[u] if u in begins else self._needed(u, begins) for u in self._users[number])
        return min([self._place(number), *after])

    @cached_property
    def events(self) -> dict[int, list[Event]]:
        """What begins and ends before each site, in order (backward goes the other way round)."""
        found = defaultdict[int, list[Event]](list)
        for depth in sorted(set(self._depth.values())):
            level = [pair for pair in self.reduced if self._depth[pair.steps[0]] == depth]
            for pair in level:
                found[pair.begin].append(Event(True, pair))
            for pair in level:
                if self._follow[pair.steps[0]]:
                    found[pair.end].append(Event(False, pair))
        for pair in self.reduced:
            if not self._follow[pair.steps[0]]:
                found[pair.end].append(Event(False, pair))
        ways = sorted(self.gathered, key=lambda pair: -self._follow[pair.steps[0]])  # the first on a way first
        for _, gather_stages in itertools.groupby(ways, lambda pair: self._follow[pair.steps[0]]):
            level = list(gather_stages)
            for pair in level:
                if pair.begin == pair.end:
                    found[pair.begin].append(Event(True, pair))
            for pair in level:
                found[pair.end].append(Event(False, pair))
        for pair in self.gathered:
            if pair.begin < pair.end:
                found[pair.begin].append(Event(True, pair))
        return found

    def gather_stages(self, number: int) -> list[int]:
        """The gathers on the way to a step, and it, the last first."""
        found: list[int] = []
        at: int | None = number
        while at is not None:
            if self.reads[at].kind == "gather":
                found.append(at)
            at = self.reads[at].after
        return found

    def is_last(self, number: int) -> bool:
        """Whether no step comes after this one on any way."""
        return not self._users[number]

    def waited(self) -> Iterator[tuple[int, int | None]]:
        """The other steps, by number, with the place at which they are needed before their reader (None: not)."""
        begins = {step: pair.begin for pair in (*self.gathered, *self.reduced) for step in pair.steps}
        for number in range(len(self.reads)):
            if number not in begins:
                needed = self._needed(number, begins)
                yield number, needed if needed < self._place(number) else None


def in_buckets(sizes: Sequence[float]) -> list[list[int]]:
    """Numbers of values of so many bytes, in order, in buckets of at most `BUCKET_BYTES` or one value."""
    buckets: list[list[int]] = []
    size = 0.0
    for number, num_bytes in enumerate(sizes):
        if not buckets or size + num_bytes > BUCKET_BYTES:
            buckets.append([])
            size = 0.0
        buckets[-1].append(number)
        size += num_bytes
    return buckets


class ToAsk(Generic[Gather]):
    """Gathers that backward may ask for, by where they are read, the last first; ``left`` tells those that it still
    will ask for."""

    def __init__(self, left: Callable[[Gather], bool]) -> None:
        self._left = left
        self._places, self._groups = list[int](), list[list[tuple[Gather, float]]]()  # by place, below zero

    def add(self, gather: Gather, place: int, num_bytes: float) -> None:
        at = bisect.bisect_left(self._places, -place)
        if self._places[at : at + 1] != [-place]:
            self._places.insert(at, -place)
            self._groups.insert(at, [])
        self._groups[at].append((gather, num_bytes))

    def at(self, place: int, gather_stage: int = 0) -> list[Gather]:
        """Which gathers are posted where backward asks for what is read at a place: those of that place, and the next
        as `starts` has it, the other way round. Of what comes so many hops before a gather: that of those which are
        posted so many places later."""
        groups = self._from(place)
        found, num_bytes = [gather for gather, _ in next(itertools.islice(groups, gather_stage, None), ())], 0.0
        for number, group in enumerate(groups):
            num_bytes += sum(size for _, size in group)
            if number and num_bytes > BUCKET_BYTES:
                break
            found += [gather for gather, _ in group]
        return found

    def _from(self, place: int) -> Iterator[list[tuple[Gather, float]]]:
        """What is left of a place, which may be nothing, and of those before it that have any."""
        start = bisect.bisect_left(self._places, -place)
        if self._places[start : start + 1] != [-place]:
            yield []
        for number in range(start, len(self._groups)):
            group = [one for one in self._groups[number] if self._left(one[0])]
            if group or self._places[number] == -place:
                yield group


def starts(sizes: Sequence[float]) -> list[int]:
    """For each group of gathers of so many bytes, the one at whose end it begins (-1: at the top): the one before, or
    an earlier one, as far as no more than `BUCKET_BYTES` are on their way."""
    found, oldest, size = [], 0, 0.0
    for number, num_bytes in enumerate(sizes):
        size += num_bytes
        while oldest < number and size > BUCKET_BYTES:
            size -= sizes[oldest]
            oldest += 1
        found.append(oldest - 1)
    return found
