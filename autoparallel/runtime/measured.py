"""A recorded step as rows of boxes and seconds by part: the measured counterpart of the predicted timeline.

On a rank's compute row lie the runs of its stages and in them the ops; collectives lie on the row of the link of their
mesh axis, as in the prediction. What a compute row waits for is no compute; what neither computes nor communicates is
idle (bubbles, waits, the host). Sends and receives of a pipeline are shown, and count as idle where nothing else runs,
as the prediction counts them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoparallel.plans.reports.step_parts import (
    ATTENTION,
    CHECKS,
    COLLECTIVES,
    IDLE,
    INSIDE,
    OTHERS,
    OVERLAPPED,
    PRODUCTS,
)
from autoparallel.plans.reports.timeline import SAID
from autoparallel.runtime.op_ranges import OP, RUN, OpRange
from autoparallel.runtime.recorded import Recorded, Recording

#: Communication as the thread that asks for it records it, and the ranges of autograd, which compute nothing.
ASKED, ENGINE = ("c10d::", "_c10d_functional::"), ("autograd::", "torch::autograd::")
BACKWARD = "autograd::engine::evaluate_function: "
#: Ops within compiled graphs, and kernels, by their names.
PRODUCT_NAMES = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::_grouped_mm", "aten::convolution",
                 "aten::conv", "aten::mkldnn", "mkldnn::_linear", "mkl::")
SENDS = ("gloo:send", "gloo:recv", "c10d::send", "c10d::recv")
#: Kinds of collectives by what process groups and NCCL's kernels call them, in letters alone.
COLLECTIVE_NAMES = {"allgather": "all_gather", "allreduce": "all_reduce", "reducescatter": "reduce_scatter",
                    "alltoall": "all_to_all", "broadcast": "broadcast"}
COMPUTE, NO_AXIS = "compute", "collectives"
Interval = tuple[float, float]


@dataclass(frozen=True)
class Calls:
    """A rank's collectives of one kind: how many, their seconds, and those in which the rank computes nothing."""

    count: int
    seconds: float
    exposed_s: float


@dataclass(frozen=True)
class MeasuredStep:
    """The measured step of one rank. ``rows``: names of streams; ``boxes``: (name, kind, row, start, end, what else).
    ``parts``: seconds by `step_parts.PARTS`; ``collectives``: by kind."""

    total_s: float
    rows: tuple[str, ...]
    boxes: tuple[tuple[str, str, int, float, float, Mapping[str, str]], ...]
    parts: Mapping[str, float]
    collectives: Mapping[str, Calls]
    held: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class _Context:
    """Where an event is: its op, the stage and micro-batch, whether backward; ``computes``: the part ("": nothing);
    ``asks``: within communication; ``again``: forward run for backward."""

    op: int = -1
    run: str = ""
    backward: bool = False
    again: bool = False
    asks: bool = False
    computes: str = ""


@dataclass
class _Placed:
    """An event with its context and the number of the one that encloses it (-1: none)."""

    event: Recorded
    context: _Context
    parent: int
    children: list[Interval] = field(default_factory=list)


def measured_step(recording: Recording, ops: Sequence[OpRange], links: Mapping[str, str]) -> MeasuredStep:
    """The step of a rank; ``links``: by mesh axis, the link that names its row."""
    places = _Places(recording.events, ops)
    boxes = list[tuple[str, str, str, float, float, Mapping[str, str]]]()
    work = defaultdict[str, list[Interval]](list)
    for part, interval in places.computed():
        work[part].append(interval)
    asked, by_kind = defaultdict[str, list[Interval]](list), defaultdict[str, list[Interval]](list)
    for event, context, collective in places.communication():
        if event.name.startswith(SENDS):
            kind = "send" if "send" in event.name else "receive"
            boxes.append((kind, "exchange", kind, event.start_s, event.end_s, {"op": event.name}))
            continue
        op = ops[context.op] if context.op >= 0 else None
        part, kind, said = _purpose(event, context, op)
        asked[part].append((event.start_s, event.end_s))
        by_kind[collective].append((event.start_s, event.end_s))
        row = links.get(op.axis, op.axis) if op is not None and op.axis else next(
            iter(links.values())) if len(links) == 1 else NO_AXIS
        boxes.append((said, kind, row, event.start_s, event.end_s, {"op": event.name, "part": part}))
    boxes += places.boxes()
    rows, placed = _lanes(boxes)
    total_s = recording.total_s
    parts = {part: _length(some) for part, some in work.items()}
    parts |= {part: sum(end - start for start, end in some) for part, some in asked.items()}
    busy_s = _length(itertools.chain(*work.values(), *asked.values()))
    parts[OVERLAPPED] = min(0.0, busy_s - sum(parts.values()))
    parts[IDLE] = max(0.0, total_s - busy_s)
    computed = list(itertools.chain(*work.values()))
    collectives = {kind: Calls(len(some), sum(end - start for start, end in some),
                               _length([*computed, *some]) - _length(computed)) for kind, some in by_kind.items()}
    return MeasuredStep(total_s, rows, placed, parts, collectives, recording.held)


class _Places:
    """The events with their contexts. An event's context is that of the event around it on its thread, a kernel's that
    of the op that launched it; backward takes the op of its forward."""

    def __init__(self, events: Sequence[Recorded], ops: Sequence[OpRange]) -> None:
        self.ops, self.placed = ops, list[_Placed]()
        self.forward: dict[int, list[tuple[float, _Context]]] = {}
        self.beside = [event for event in events if event.is_beside]
        self.kernels = [event for event in events if event.stream is not None]
        hosts = [event for event in events if event.stream is None and not event.is_beside]
        for which in (False, True):  # first what forward ops there are, then with the ops that backward has of them
            self.placed.clear()
            for _, some in itertools.groupby(sorted(hosts, key=lambda e: (e.thread, e.start_s, -e.end_s)),
                                             key=lambda e: e.thread):
                self._nest(some, which)
            if not which:
                self._learn()
        self.by_link = {placed.event.link: placed for placed in self.placed if placed.event.link >= 0}

    def _nest(self, events: Iterable[Recorded], knows: bool) -> None:
        open_: list[int] = []
        for event in events:
            while open_ and self.placed[open_[-1]].event.end_s <= event.start_s:
                open_.pop()
            parent = open_[-1] if open_ else -1
            around = self.placed[parent].context if open_ else _Context()
            self.placed.append(_Placed(event, self._context(event, around, knows), parent))
            if open_:
                self.placed[parent].children.append((event.start_s, min(event.end_s, self.placed[parent].event.end_s)))
            open_.append(len(self.placed) - 1)

    def _context(self, event: Recorded, around: _Context, knows: bool) -> _Context:
        name = event.name
        if name.startswith(OP):
            return replace(around, op=int(name.removeprefix(OP)), again=around.backward)
        if name.startswith(RUN):
            return replace(around, run=name.removeprefix(RUN))
        if name.startswith(BACKWARD):
            found = self._forward_of(event) if knows else None
            return _Context(backward=True) if found is None else _Context(found.op, found.run, True)
        if name.startswith(ASKED):
            return replace(around, asks=True, computes="")
        if around.asks or event.kind != "cpu_op":
            return around
        if name.startswith(PRODUCT_NAMES) and not (around.op >= 0 and not self.ops[around.op].compiled):
            return replace(around, computes=PRODUCTS)
        if around.computes:
            return replace(around, computes=ATTENTION) if "attention" in name else around
        if ("::" in name and not name.startswith(ENGINE)) or name.startswith("## Call Compiled"):
            return replace(around, computes=self._part(around, name))
        return around

    def _part(self, around: _Context, name: str) -> str:
        if "attention" in name:
            return ATTENTION
        return self.ops[around.op].part if around.op >= 0 else OTHERS

    def _learn(self) -> None:
        """Keep the forward ops by the number that they have in common with their backward."""
        for placed in self.placed:
            event, context = placed.event, placed.context
            if event.sequence >= 0 and not event.name.startswith(ENGINE) and context.op >= 0:
                self.forward.setdefault(event.sequence, []).append((event.start_s, context))
        for some in self.forward.values():
            some.sort(key=lambda one: one[0])

    def _forward_of(self, event: Recorded) -> _Context | None:
        """The context of the forward op of a backward: the last before it with its number. (An op that needs no
        gradient shows the number that the next gets.)"""
        some = self.forward.get(event.sequence, [])
        at = bisect_left(some, event.start_s, key=lambda one: one[0])
        return some[at - 1][1] if at else None

    def computed(self) -> Iterator[tuple[str, Interval]]:
        """The time in which this rank computes, by part: of ops without those in them, or of kernels."""
        for event in self.kernels:
            if not _is_communication(event):
                context = self._of_kernel(event)
                yield context.computes or self._part(context, event.name), (event.start_s, event.end_s)
        if self.kernels:
            return
        for placed in self.placed:
            if placed.context.computes and not placed.context.asks:
                for interval in _less(placed.event, placed.children):
                    yield placed.context.computes, interval

    def _of_kernel(self, event: Recorded) -> _Context:
        placed = self.by_link.get(event.link)
        return placed.context if placed is not None else _Context()

    def communication(self) -> Iterator[tuple[Recorded, _Context, str]]:
        """Collectives, sends and receives, with the context of the op that asked for them, and the kind that was asked
        for: gloo's reduce-scatter, for one, is an all-reduce of which each rank keeps its part."""
        for event in self.kernels:
            if _is_communication(event):
                yield event, self._of_kernel(event), _kind(event.name)
        if self.kernels:
            return
        asked = [placed for placed in self.placed if placed.event.name.startswith("c10d::") and not (
            placed.parent >= 0 and self.placed[placed.parent].event.name.startswith("c10d::"))
            and not placed.event.name.startswith(SENDS)]
        left = iter(sorted(asked, key=lambda placed: placed.event.start_s))
        for event in self.beside:  # a process group runs its collectives in the order in which they were asked for
            if event.name.startswith(SENDS):
                yield event, _Context(), _kind(event.name)
                continue
            placed = next(left, None)
            if placed is not None and placed.event.start_s <= event.start_s:
                yield event, placed.context, _kind(placed.event.name)
            else:
                yield event, _Context(), _kind(event.name)

    def boxes(self) -> Iterator[tuple[str, str, str, float, float, Mapping[str, str]]]:
        """The compute row: runs of stages, and in them ops, forward and backward; on a GPU its kernels."""
        for event in self.kernels:
            if not _is_communication(event):
                context = self._of_kernel(event)
                op = self.ops[context.op] if context.op >= 0 else None
                yield (f"{op.name}: {event.name}" if op else event.name, "backward" if context.backward else
                       "forward", COMPUTE, event.start_s, event.end_s, self._said(context, op))
        runs = [*self._forward_runs(), *self._backward_runs()]
        for stage_run, kind, start_s, end_s in runs:
            stage, micro = stage_run.split()
            yield (f"{SAID[kind]} of micro-batch {micro}, stage {stage}", SAID[kind],
                   "runs" if self.kernels else COMPUTE, start_s, end_s, {})
        for placed in self.placed if not self.kernels else ():
            context, event = placed.context, placed.event
            if context.op < 0 or not event.name.startswith((OP, BACKWARD)):
                continue
            op = self.ops[context.op]
            kind = "exchange" if op.axis and op.part == OTHERS else "backward" if context.backward else "forward"
            said = "again: " if context.again else "backward of " if context.backward else ""
            yield said + op.name, kind, COMPUTE, event.start_s, event.end_s, self._said(context, op)

    def _said(self, context: _Context, op: OpRange | None) -> dict[str, str]:
        if op is None:
            return {}
        return {"block": op.block, "part": op.part, "direction": "backward" if context.backward else "forward",
                **({"axis": op.axis} if op.axis else {})}

    def _forward_runs(self) -> Iterator[tuple[str, str, float, float]]:
        for placed in self.placed:
            if placed.event.name.startswith(RUN):
                yield placed.context.run, "F", placed.event.start_s, placed.event.end_s

    def _backward_runs(self) -> Iterator[tuple[str, str, float, float]]:
        """Backward ops of one run, one after the other on a thread."""
        ops = [p for p in self.placed if p.event.name.startswith(BACKWARD) and p.context.run]
        for (run, _), some in itertools.groupby(ops, key=lambda p: (p.context.run, p.event.thread)):
            members = [p.event for p in some]
            yield run, "B", members[0].start_s, members[-1].end_s


def _purpose(event: Recorded, context: _Context, op: OpRange | None) -> tuple[str, str, str]:
    """The part of a collective, its kind of box, and its name."""
    if op is None:
        return CHECKS, "other", event.name
    if op.compiled:
        return INSIDE, "exchange", f"{event.name} ({op.name})"
    gathers = "gather" in event.name.lower()
    if op.of_parameter or (not op.axis and gathers):  # ZeRO-3 gathers again where backward of an op reads it
        reduces = context.backward and not context.again and not gathers
        what = "gradients" if reduces else "parameters"
        return COLLECTIVES[what], "reduce" if reduces else "gather", f"{event.name} ({op.name})"
    said = f"{event.name} ({'backward of ' if context.backward and not context.again else ''}{op.name})"
    return COLLECTIVES["activations"], "exchange", said


def _kind(name: str) -> str:
    """
    >>> _kind("gloo:all_reduce"), _kind("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgs)")
    ('all_reduce', 'reduce_scatter')
    """
    letters = "".join(filter(str.isalpha, name.lower()))
    return next((kind for word, kind in COLLECTIVE_NAMES.items() if word in letters), "other")


def _is_communication(event: Recorded) -> bool:
    return event.name.lower().startswith(("nccl", "rccl"))


def _less(event: Recorded, children: Sequence[Interval]) -> Iterator[Interval]:
    """The time of an event without those in it."""
    at = event.start_s
    for start_s, end_s in children:
        if start_s > at:
            yield at, start_s
        at = max(at, end_s)
    if event.end_s > at:
        yield at, event.end_s


def _length(intervals: Iterable[Interval]) -> float:
    """Seconds of the union."""
    total, until = 0.0, 0.0
    for start_s, end_s in sorted(intervals):
        total += max(0.0, end_s - max(start_s, until))
        until = max(until, end_s)
    return total


def _lanes(boxes: Iterable[tuple[str, str, str, float, float, Mapping[str, str]]]
           ) -> tuple[tuple[str, ...], tuple[tuple[str, str, int, float, float, Mapping[str, str]], ...]]:
    """Rows on which boxes nest: what overlaps with a part of another on its row gets a row beside it."""
    rows, found = list[str](), []
    open_: dict[str, list[float]] = {}
    for name, kind, stream, start_s, end_s, told in sorted(boxes, key=lambda box: (
            box[2] != COMPUTE, box[2], box[3], -box[4])):
        for lane in itertools.count(1):
            row = stream if lane == 1 else f"{stream} ({lane})"
            ends = open_.setdefault(row, [])
            while ends and ends[-1] <= start_s:
                ends.pop()
            if not ends or end_s <= ends[-1]:
                break
        ends.append(end_s)
        if row not in rows:
            rows.append(row)
        found.append((name, kind, rows.index(row), start_s, end_s, told))
    return tuple(rows), tuple(found)


__all__ = ["Calls", "MeasuredStep", "measured_step"]
