"""Async windows: where communication of parameters is launched and awaited, to overlap with compute.

`lower.overlap_pass` applies them to the nodes of a program and `pricing.overlap_simulation` to the tensor uses of a
plan, so that what is priced is what runs.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from autoparallel.schedule.fusion import BY_SIZE, Fusion, in_buckets
from autoparallel.schedule.step_config import BUCKET_BYTES, Hybrid

#: Size of the bucket whose gradients backward makes first, as in DistributedDataParallel, so that reductions start
#: early; and size from which on a bucket of gathers ends with its block. At most `Hybrid.bucket_bytes`.
FIRST_BUCKET_BYTES = 2**20
#: Gathers that are launched further ahead than the next bucket: at most this size (and `Hybrid.bucket_bytes`), since
#: they take memory.
PREFETCH_BYTES = 4 * 2**20
#: Where gathered parameters stay until backward: so many times the largest bucket may be pending before a bucket.
AHEAD = 2
#: The program point before all decisions.
TOP = -1


class Read(NamedTuple):
    """One redistribution step on the path from a parameter to its readers.

    ``after``: the number of the step before it (None: it reads the parameter). ``kind``: "gather"; "reduction" of a
    gradient (no communication in forward); or "". ``num_bytes``: of the result on the fullest rank (0 if the kind is
    ""), so that all ranks issue the same collectives in the same order. ``place``: the program point of its reader, or
    of the start of the reader's block, if a block's parameters are gathered together. ``block``: the reader's block;
    ``backward``: the step's action on the gradient. ``named``: the number of the bucket that the plan names for the
    parameter (`Fusion.number_of`).
    """

    after: int | None
    kind: str
    axis: str
    dtype: str
    num_bytes: float
    place: int
    block: object = None
    backward: str = ""
    named: int | None = None

    @property
    def bucket(self) -> int:
        """``named``, which orders; -1: none."""
        return -1 if self.named is None else self.named


class Pair(NamedTuple):
    """An async window: its steps, issued together, and the program points before which it is launched and awaited."""

    steps: tuple[int, ...]
    begin: int
    end: int


class Event(NamedTuple):
    """The launch or the wait of an async window; or "run": a synchronous step, alone in ``pair``."""

    action: Literal["launch", "wait", "run"]
    pair: Pair


def kind_of(forward: str, backward: str, trainable: bool) -> str:
    """`Read.kind` of a step with these forward and backward actions."""
    if forward in ("all_gather", "fetch"):  # from other ranks, or from the host
        return "gather"
    return "reduction" if trainable and (forward, backward) == ("none", "all_reduce") else ""


def places(decisions: Iterable[tuple[int, object]]) -> dict[int, int]:
    """The program point at which each decision needs its parameters, from (decision, block) pairs in program order: the
    decision itself outside blocks (None), else the first of consecutive decisions of its block."""
    found: dict[int, int] = {}
    for block, run in itertools.groupby(decisions, lambda decision: decision[1]):
        members = [index for index, _ in run]
        found.update((index, index if block is None else members[0]) for index in members)
    return found


class AsyncWindows:
    """The async windows of a program's parameter reads, given in program order, in buckets of at most
    ``bucket_bytes``, or as ``fusion`` says; ``stays``: whether gathered parameters are kept until backward (`starts`).
    ``adds``: gradients are added to those of other micro-batches, or let go once they are stepped with, and a bucket of
    them takes memory of its own until it is awaited: where backward launches the next one.

    ``gathered``: one window per bucket of gathers for one block with the same axis, dtype and backward; a path may have
    several gathers in sequence. ``reduced``: one window per bucket of gradient reductions with the same axis, dtype and
    position on their paths; only reductions with which a path begins. All other steps are synchronous.
    """

    def __init__(self, reads: Sequence[Read], bucket_bytes: float = BUCKET_BYTES, stays: bool = False,
                 adds: bool = False, fusion: Fusion = BY_SIZE) -> None:
        self.reads, self.bucket_bytes, self.fusion = reads, bucket_bytes, fusion
        self.stays, self.adds = stays, adds
        self._users = defaultdict[int, list[int]](list)
        for number, read in enumerate(reads):
            if read.after is not None:
                self._users[read.after].append(number)
        self._follow = [0] * len(reads)
        for number in reversed(range(len(reads))):
            self._follow[number] = max((self._follow[u] + bool(reads[u].kind) for u in self._users[number]), default=0)
        self._depth: dict[int, int] = {}  # by reduction, the number of reductions before it on its path
        for number, read in enumerate(reads):
            if read.kind == "reduction" and (read.after is None or read.after in self._depth):
                self._depth[number] = 0 if read.after is None else self._depth[read.after] + 1
        self.gathered = self._gathered()
        self.reduced = self._reduced()

    @classmethod
    def of(cls, reads: Sequence[Read], hybrid: Hybrid) -> AsyncWindows:
        """The windows of a step configuration: of the program that reads parameters (`Hybrid.reads_each`: of a
        micro-batch)."""
        stays = hybrid.keeps_gathered and not hybrid.reads_each
        adds = hybrid.reads_each or hybrid.offload.in_backward
        return cls(reads, hybrid.bucket_bytes, stays, adds, hybrid.fusion)

    def _gathered(self) -> list[Pair]:
        """A bucket of gathers is awaited at its first consumer, or where the next gather of the same parameters
        starts. It is launched where the preceding buckets are awaited, or earlier while at most `PREFETCH_BYTES` are
        pending."""
        found, begins, bucket_of = list[Pair](), dict[int, int](), dict[int, tuple[int, ...]]()
        steps = sorted((n for n, read in enumerate(self.reads) if read.kind == "gather"), key=self._follow.__getitem__)
        for _, level in itertools.groupby(steps, self._follow.__getitem__):
            needed = {n: self._needed(n, begins) for n in level}
            buckets = self._gather_buckets(sorted(needed, key=needed.__getitem__), bucket_of)
            ends = {bucket: min(needed[n] for n in bucket) for bucket in buckets}
            groups = [list(g) for _, g in itertools.groupby(sorted(ends, key=ends.__getitem__), ends.__getitem__)]
            sizes = [sum(self.reads[n].num_bytes for bucket in group for n in bucket) for group in groups]
            for after, group in zip(starts(sizes, self.bucket_bytes, self.stays), groups, strict=True):
                begin = TOP if after < 0 else ends[groups[after][0]]
                for bucket in group:
                    found.append(Pair(bucket, begin, ends[bucket]))
                    begins.update(dict.fromkeys(bucket, begin))
                    bucket_of.update(dict.fromkeys(bucket, bucket))
        return found

    def _gather_buckets(self, gathers: Sequence[int], bucket_of: Mapping[int, tuple[int, ...]]
                        ) -> list[tuple[int, ...]]:
        """Buckets of gathers (in the order in which they are needed) of equal axis, dtype and backward: for one block
        (of any size, unless the plan gives sizes), or for several until there are `FIRST_BUCKET_BYTES`; or of the
        parameters that the plan joins by name.
        ``bucket_of``: buckets of later gathers on their paths, which a bucket does not mix."""
        runs, size, block = list[list[int]](), 0.0, None
        named = defaultdict[int, list[int]](list)
        for number in gathers:
            read = self.reads[number]
            if read.named is not None:
                named[read.named].append(number)
                continue
            if not runs or (read.block != block and size >= min(FIRST_BUCKET_BYTES, self.bucket_bytes)):
                runs.append([])
                size = 0.0
            runs[-1].append(number)
            size, block = size + read.num_bytes, read.block

        def kind(number: int) -> tuple[object, ...]:
            read = self.reads[number]
            return read.axis, read.dtype, read.backward, sorted(self._next_buckets(number, bucket_of))

        return [bucket for run in (*runs, *named.values())
                for bucket in self._buckets(sorted(run, key=kind), kind, whole=self._is_of_blocks(run))]

    def _is_of_blocks(self, gathers: Sequence[int]) -> bool:
        """Whether these gathers are one bucket of any size: all of blocks, where the plan gives no sizes."""
        return self.fusion.blocks and all(self.reads[number].block is not None for number in gathers)

    def _next_buckets(self, number: int, bucket_of: Mapping[int, tuple[int, ...]]) -> set[tuple[int, ...]]:
        """The buckets of the next gathers on the paths through a step."""
        found = set[tuple[int, ...]]()
        for user in self._users[number]:
            found |= {bucket_of[user]} if user in bucket_of else self._next_buckets(user, bucket_of)
        return found

    def _place(self, number: int) -> int:
        return self.reads[number].place

    def _reduced(self) -> list[Pair]:
        """One window per bucket, in forward order (backward launches at ``end`` and waits at ``begin``). It ends at the
        first read of the bucket, or where a later step of one of its paths begins: there all its gradients exist. The
        first reduction of a path begins at the top, unless its gradients are added to others; it and a later one where
        the bucket before it is read, so that backward launches that bucket before it waits for this one."""

        def kind(number: int) -> tuple[int, str, str, int, int]:
            read = self.reads[number]
            return self._follow[number], read.axis, read.dtype, self._depth[number], read.bucket

        begins = {step: pair.begin for pair in self.gathered for step in pair.steps}
        found, read_at = list[Pair](), list[int]()
        for follow, level in itertools.groupby(sorted(self._depth, key=kind), lambda n: self._follow[n]):
            buckets = self._buckets(level, kind, FIRST_BUCKET_BYTES)
            ends = {bucket: min(self._needed(n, begins) for n in bucket) for bucket in buckets}
            read_at = read_at if follow else list(ends.values())
            for bucket, end in ends.items():
                before = [place for place in read_at if place < end and (self.adds or self._depth[bucket[0]])]
                found.append(Pair(bucket, max(before, default=TOP), end))
                begins.update(dict.fromkeys(bucket, found[-1].begin))
        return found

    def _buckets(self, steps: Iterable[int], kind: Callable[[int], object], last: float = math.inf,
                 whole: bool = False) -> Iterator[tuple[int, ...]]:
        """Steps of one kind (consecutive in ``steps``) in buckets; ``last``: see `in_buckets`. Those of a named bucket
        are one, and ``whole`` ones, but for the number of parameters that the plan gives."""
        for _, equivalent in itertools.groupby(steps, kind):
            numbers = list(equivalent)
            first = self.reads[numbers[0]]
            if first.named is not None:
                yield tuple(numbers)
                continue
            most = math.inf if whole else self.fusion.bytes_on(first.axis, self.bucket_bytes)
            sizes = [self.reads[n].num_bytes for n in numbers]
            for bucket in in_buckets(sizes, most, last, self.fusion.most):
                yield tuple(numbers[i] for i in bucket)

    def _needed(self, number: int, begins: Mapping[int, int]) -> int:
        """The program point before which a step must be complete: its reader's, or the start of the next step on its
        path."""
        after = (begins[u] if u in begins else self._needed(u, begins) for u in self._users[number])
        return min([self._place(number), *after])

    @cached_property
    def events(self) -> dict[int, list[Event]]:
        """Launches, waits and synchronous steps before each program point, in order; backward runs them in reverse."""
        done = {step for pair in (*self.gathered, *self.reduced) for step in pair.steps}
        found = {place: [event for one in events for event in (*self._runs_before(one, place, done), one)]
                 for place, events in sorted(self._launches_and_waits.items())}
        for number in range(len(self.reads)):
            if number not in done:
                found.setdefault(self._place(number), []).append(_run(number, self._place(number)))
        return found

    def _runs_before(self, event: Event, place: int, done: set[int]) -> Iterator[Event]:
        """The synchronous steps on the paths to a launch at ``place`` that are not ``done``: the program comes to the
        reader later."""
        for number in event.pair.steps if event.action == "launch" else ():
            path, at = list[int](), self.reads[number].after
            while at is not None and at not in done and self._place(at) >= place:
                path.append(at)
                at = self.reads[at].after
            done.update(path)
            yield from (_run(step, place) for step in reversed(path))

    @cached_property
    def _launches_and_waits(self) -> dict[int, list[Event]]:
        found = defaultdict[int, list[Event]](list)
        for depth in sorted(set(self._depth.values())):
            level = [pair for pair in self.reduced if self._depth[pair.steps[0]] == depth]
            for pair in level:
                found[pair.begin].append(Event("launch", pair))
            for pair in level:
                if self._follow[pair.steps[0]]:
                    found[pair.end].append(Event("wait", pair))
        for pair in self.reduced:
            if not self._follow[pair.steps[0]]:
                found[pair.end].append(Event("wait", pair))
        ordered = sorted(self.gathered, key=lambda pair: -self._follow[pair.steps[0]])  # in the order of their paths
        for _, gather_stages in itertools.groupby(ordered, lambda pair: self._follow[pair.steps[0]]):
            level = list(gather_stages)
            for pair in level:
                if pair.begin == pair.end:
                    found[pair.begin].append(Event("launch", pair))
            for pair in level:
                found[pair.end].append(Event("wait", pair))
        for pair in self.gathered:
            if pair.begin < pair.end:
                found[pair.begin].append(Event("launch", pair))
        return found

    def gather_stages(self, number: int) -> list[int]:
        """The gathers on the path to a step, the step included, last first."""
        found: list[int] = []
        at: int | None = number
        while at is not None:
            if self.reads[at].kind == "gather":
                found.append(at)
            at = self.reads[at].after
        return found

    def sent_after(self, number: int) -> int:
        """The number of gathers and reductions behind a step, on the longest of its paths."""
        return self._follow[number]

    def is_last(self, number: int) -> bool:
        """Whether the step is the last of its path."""
        return not self._users[number]


def _run(number: int, place: int) -> Event:
    return Event("run", Pair((number,), place, place))


def starts(sizes: Sequence[float], bucket_bytes: float, stays: bool = False) -> list[int]:
    """For each group of gathers, the group at whose end it is launched (-1: at the top): the preceding group, or an
    earlier one while at most `PREFETCH_BYTES` are pending. ``sizes``: bytes of each group.

    ``stays``: gathered parameters are kept until backward, so that an early gather takes no memory at the peak. A group
    is then launched while the groups that are pending before it take up to `AHEAD` times the largest of them all, and
    these with it: among experts' weights about a block ahead, as FSDP2 does.

    >>> mixtures = [5e7, 1e5, 7e8] * 3                          # attention, router and experts of three layers
    >>> starts(mixtures, 25 * 2**20)
    [-1, 0, 1, 2, 3, 4, 5, 6, 7]
    >>> starts(mixtures, 25 * 2**20, stays=True)
    [-1, -1, -1, -1, -1, -1, 2, 2, 2]
    >>> starts([5e7, 5e8, 2.5e8] * 3, 25 * 2**20, stays=True)   # attention; the experts' two weights, read one by one
    [-1, -1, -1, -1, -1, 1, 2, 2, 4]
    """
    limit, found = min(PREFETCH_BYTES, bucket_bytes), list[int]()
    for number, num_bytes in enumerate(sizes):
        first, pending, largest = number, num_bytes, num_bytes
        while first and pending + sizes[first - 1] <= max(limit, (1 + AHEAD) * largest if stays else limit):
            first -= 1
            pending, largest = pending + sizes[first], max(largest, sizes[first])
        found.append(first - 1)
        found[first:number] = [min(before, first - 1) for before in found[first:number]]
    return found
