"""Pictures of a report as numbers: what the page draws, in the units of its drawing areas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from autoparallel.plans.answers import Sensitivity
from autoparallel.plans.record import MemoryProfile, Trial
from autoparallel.plans.reports.report import Memory
from autoparallel.plans.reports.timeline import Box, Timeline
from autoparallel.plans.reports.units import bytes_str, percent_str, seconds_str

#: Boxes of a timeline and points of a scatter that are drawn, at most.
MOST_BOXES, MOST_POINTS = 5000, 300
#: A limit of so many times the peak is above the picture.
FAR = 4.0
#: Rows of a timeline; with more, each rank of a pipeline has one.
MOST_ROWS = 24
#: The least share of a step whose seconds a note tells.
LEAST_TOLD = 0.001
WIDTH, HEIGHT, ROW = 1000.0, 300.0, 24.0
#: The height of the strip below the axis, for points without a place on it.
BELOW = 24.0


@dataclass(frozen=True)
class Shape:
    """A rectangle, circle (``width`` is its radius) or polygon (``points``), of a kind, and what a reader is told."""

    kind: str
    said: str
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0
    points: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Mark:
    """A place on an axis with its text."""

    at: float
    text: str


@dataclass(frozen=True)
class Picture:
    """Shapes in an area, with marks on both axes, labels of rows, kinds for the legend, and a note."""

    width: float
    height: float
    shapes: tuple[Shape, ...]
    x_marks: tuple[Mark, ...] = ()
    y_marks: tuple[Mark, ...] = ()
    rows: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    note: str = ""


def timeline_pictures(line: Timeline, step_s: float, fixed_s: float = 0.0) -> list[Picture]:
    """Rows of boxes: the whole step, or, of more than `MOST_BOXES`, its beginning and its end. ``step_s``: predicted;
    ``fixed_s``: what no box has, since the framework takes it for each step and micro-batch."""
    note, more_s = f"Simulated: {seconds_str(line.total_s)}", step_s - fixed_s - line.total_s
    note += f"; the framework takes {seconds_str(fixed_s)} of a step" if fixed_s >= LEAST_TOLD * step_s else ""
    note += (f"; the prediction counts {seconds_str(more_s)} more of waiting, as equal stages have"
             if more_s >= LEAST_TOLD * step_s else "")
    note += f": predicted {seconds_str(step_s)}."
    left_out = {number for number, row in enumerate(line.rows) if row.stream != "compute"} \
        if len(line.rows) > MOST_ROWS and line.pipelined else set()
    boxes = [box for box in line.boxes if box.end_s > box.start_s and box.row not in left_out]
    note += " Sends and exposed communication are counted, and not drawn." if left_out else \
        " A micro-batch's recompute is drawn before its backward, its exposed communication at its end." \
        if line.pipelined else (" Compute overlapped with communication takes longer; the table counts that as exposed "
                                "communication." if len(line.rows) > 1 else "")
    if len(boxes) <= MOST_BOXES:
        return [_window(line, boxes, (0.0, line.total_s), left_out, note)]
    half = MOST_BOXES // 2
    first = (0.0, sorted(box.start_s for box in boxes)[half])
    last = (sorted(box.end_s for box in boxes)[-half], line.total_s)
    note += " The picture has beginning and end; a trace (--trace) has all."
    return [_window(line, boxes, first, left_out, ""), _window(line, boxes, last, left_out, note)]


def _window(line: Timeline, boxes: Sequence[Box], window: tuple[float, float], left_out: set[int], note: str
            ) -> Picture:
    """The boxes between two times."""
    begin, end = window
    scale = WIDTH / (end - begin) if end > begin else 0.0
    shown = [number for number in range(len(line.rows)) if number not in left_out]
    height = {number: place * ROW for place, number in enumerate(shown)}
    shapes = []
    for box in sorted(boxes, key=lambda box: (box.row, box.start_s)):
        if box.end_s > begin and box.start_s < end:
            left, right = max(box.start_s, begin), min(box.end_s, end)
            said = f"{box.name}: {seconds_str(box.end_s - box.start_s)}, from {seconds_str(box.start_s)}"
            shapes.append(Shape(box.kind, said, _round((left - begin) * scale), height[box.row] + 2,
                                max(0.05, _round((right - left) * scale)), ROW - 4))
    several = len({row.rank for row in line.rows}) > 1
    rows = tuple(": ".join([*([f"rank {line.rows[n].rank}"] if several else []),
                            *([] if left_out else [line.rows[n].stream])]) for n in shown)
    marks = tuple(Mark(share * WIDTH, seconds_str(begin + share * (end - begin)) if begin or share else "0")
                  for share in (0.0, 0.25, 0.5, 0.75, 1.0))
    return Picture(WIDTH, len(rows) * ROW, tuple(shapes), marks, (), rows, _kinds(shapes), note)


def memory_picture(memory: MemoryProfile, limit_bytes: float) -> Picture:
    """Areas by kind over forward and backward, one on the other, and the limit."""
    peak = max(sum(row) for row in memory.num_bytes)
    far = limit_bytes > FAR * peak
    top = 1.05 * (peak if far else max(peak, limit_bytes)) or 1.0
    below, shapes = [0.0] * len(memory.at), list[Shape]()
    xs = [_round(passed / 2 * WIDTH) for passed in memory.passed]
    for number, kind in enumerate(memory.kinds):
        above = [low + row[number] for low, row in zip(below, memory.num_bytes, strict=True)]
        edge = [*zip(xs, above, strict=True), *reversed([*zip(xs, below, strict=True)])]
        most = max(row[number] for row in memory.num_bytes)
        shapes.append(Shape(f"m{number}", f"{kind}: at most {bytes_str(most)}", points=tuple(
            (x, _round(HEIGHT - y / top * HEIGHT)) for x, y in edge)))
        below = above
    if limit_bytes and not far:
        shapes.append(Shape("limit", f"limit {bytes_str(limit_bytes)}", 0.0, HEIGHT - limit_bytes / top * HEIGHT, WIDTH,
                            1.5))
    for x, place, row in zip(xs, memory.at, memory.num_bytes, strict=True):
        parts = ", ".join(f"{kind} {bytes_str(count)}" for kind, count in zip(memory.kinds, row, strict=True) if count)
        shapes.append(Shape("reading", f"{place}: {bytes_str(sum(row))} ({parts})", x - 2.5, 0.0, 5.0, HEIGHT))
    marks = (Mark(0.0, "forward"), Mark(WIDTH / 2, "backward"), Mark(WIDTH, "end"))
    return Picture(WIDTH, HEIGHT, tuple(shapes), marks, tuple(_marks(top, HEIGHT, bytes_str)), (), memory.kinds,
                   f"The limit, {bytes_str(limit_bytes)}, lies above the picture." if far else "")


def pipeline_memory_picture(line: Timeline, memory: Memory) -> Picture:
    """Bytes on the fullest rank of a pipeline over the step's schedule: what stays, activations above it, and the
    limit."""
    limit_bytes = memory.limit_bytes
    rank, points = max(enumerate(line.held), key=lambda item: max(held for _, held in item[1]))
    stays, peak = min(held for _, held in points), max(held for _, held in points)
    far = limit_bytes > FAR * peak
    top, across = 1.05 * (peak if far else max(peak, limit_bytes)) or 1.0, WIDTH / (line.total_s or 1.0)
    corners = [(0.0, stays)]
    for (at, held), (_, before) in zip(points[1:], points, strict=False):  # it changes at once, and stays until then
        corners += [(at, before), (at, held)]
    corners.append((line.total_s, points[-1][1]))

    def placed(at_s: float, held: float) -> tuple[float, float]:
        return _round(at_s * across), _round(HEIGHT - held / top * HEIGHT)

    shapes = [Shape("m0", f"parameters, gradients and optimizer state: {bytes_str(stays)}", 0.0,
                    _round(HEIGHT - stays / top * HEIGHT), WIDTH, _round(stays / top * HEIGHT)),
              Shape("m1", f"activations: at most {bytes_str(peak - stays)}", points=(
                  placed(0.0, stays), *(placed(*corner) for corner in corners), placed(line.total_s, stays)))]
    if limit_bytes and not far:
        shapes.append(Shape("limit", f"limit {bytes_str(limit_bytes)}", 0.0, HEIGHT - limit_bytes / top * HEIGHT, WIDTH,
                            1.5))
    every = max(1, len(points) // MOST_POINTS)
    shapes += [Shape("reading", f"{seconds_str(at_s)}: {bytes_str(held)}", placed(at_s, held)[0] - 1.5, 0.0, 3.0,
                     HEIGHT) for at_s, held in points[::every]]
    marks = tuple(Mark(share * WIDTH, seconds_str(share * line.total_s) if share else "0")
                  for share in (0.0, 0.25, 0.5, 0.75, 1.0))
    note = (f"Rank {rank} of the pipeline, the fullest; by whole micro-batches. Tensor by tensor, as plans are judged, "
            f"the peak is {bytes_str(memory.peak_bytes)}.") + (
        f" The limit, {bytes_str(limit_bytes)}, lies above the picture." if far else "")
    return Picture(WIDTH, HEIGHT, tuple(shapes), marks, tuple(_marks(top, HEIGHT, bytes_str)), (),
                   ("parameters, gradients, optimizer state", "activations"), note)


def scatter_picture(trials: Sequence[Trial], limit_bytes: float) -> Picture:
    """Step time (right) against memory (up) of the combinations tried; those of which only the time was estimated lie
    below the axis. The Pareto front: nothing is both faster and smaller."""
    some = sorted(trials, key=lambda trial: (trial.estimated, trial.step_s))[:MOST_POINTS]
    fast = min(trial.step_s for trial in some)
    slow = max([trial.step_s for trial in some if trial.step_s <= 4 * fast] + [fast * 1.01])
    top = max([trial.peak_bytes for trial in some] + [limit_bytes]) * 1.05 or 1.0
    front, shapes, floor = _front(some), list[Shape](), HEIGHT - BELOW
    for trial in some:
        if trial.step_s > slow:
            continue
        kind = "estimated" if trial.estimated else "front" if trial in front else "planned"
        height = trial.peak_bytes / top * (floor - 8) if trial.peak_bytes else -BELOW / 2
        shapes.append(Shape(kind, f"{trial.what}: {seconds_str(trial.step_s)}, {_known(trial)}",
                            _round(10 + (trial.step_s - fast) / (slow - fast) * (WIDTH - 20)),
                            _round(floor - height), 6.0))
    if limit_bytes:
        shapes.append(Shape("limit", f"limit {bytes_str(limit_bytes)}", 0.0, floor - limit_bytes / top * (floor - 8),
                            WIDTH, 1.5))
    left = len(trials) - sum(shape.kind != "limit" for shape in shapes)
    note = f"{left} combinations that are slower, or more than {MOST_POINTS}, are not drawn. " if left else ""
    if any(not trial.peak_bytes for trial in some):
        note += "Below the axis: only the time is estimated, on a model of fewer blocks; the memory is not known."
    marks = tuple(Mark(10 + share * (WIDTH - 20), seconds_str(fast + share * (slow - fast))) for share in (0, 0.5, 1))
    return Picture(WIDTH, HEIGHT, tuple(shapes), marks, tuple(_marks(top, floor - 8, bytes_str, BELOW)), (),
                   _kinds(shapes), note.strip())


def _known(trial: Trial) -> str:
    """The memory of a combination, or why it is not known."""
    if trial.too_large:
        return "estimated; planned in full, no plan that fits was found"
    return f"{bytes_str(trial.peak_bytes)} (planned)" if trial.peak_bytes else "estimated, memory not known"


def _front(trials: Iterable[Trial]) -> set[Trial]:
    found, least = set[Trial](), math.inf
    for trial in sorted((t for t in trials if t.peak_bytes), key=lambda t: (t.step_s, t.peak_bytes)):
        if trial.peak_bytes < least:
            found.add(trial)
            least = trial.peak_bytes
    return found


def search_picture(points: Sequence[tuple[float, str, float, float]]) -> Picture:
    """Best cost and bound after each phase of each search, in the order in which they were told."""
    top = max(best for _, _, best, _ in points) * 1.05 or 1.0
    start, last = min(at for at, *_ in points), max(at for at, *_ in points)
    length = last - start or 1.0
    shapes = []
    for at, phase, best, bound in points:
        x = _round(10 + (at - start) / length * (WIDTH - 20))
        for kind, value in (("best", best), ("bound", bound)):
            shapes.append(Shape(kind, f"{at:.2f} s, {phase}: {kind} {seconds_str(value)}", x,
                                _round(HEIGHT - 8 - value / top * (HEIGHT - 16)), 5.0))
    marks = tuple(Mark(10 + share * (WIDTH - 20), f"{start + share * length:.1f} s") for share in (0, 0.5, 1))
    return Picture(WIDTH, HEIGHT, tuple(shapes), marks, tuple(_marks(top, HEIGHT, seconds_str)), (), ("best", "bound"))


def tornado_picture(found: Sequence[Sensitivity], step_s: float) -> Picture:
    """The change of the step with each link's bandwidth or the memory limit, widest first; bars to the right are
    slower."""
    finite = [s for s in found if math.isfinite(s.best_s)]
    reach = max([abs(s.best_s - step_s) for s in finite] + [1e-12])
    names = sorted({s.what for s in found},
                   key=lambda what: -max([abs(s.best_s - step_s) for s in finite if s.what == what] + [0.0]))
    shapes = []
    for s in found:
        row, change = names.index(s.what), s.best_s - step_s
        if not math.isfinite(change):
            shapes.append(Shape("slower", f"{s.what} x {s.factor:g}: no plan fits", WIDTH / 2, row * ROW + 4, WIDTH / 2,
                                ROW - 8))
            continue
        width = abs(change) / reach * (WIDTH / 2 - 10)
        shapes.append(Shape(
            "slower" if change > 0 else "faster",
            f"{s.what} x {s.factor:g}: {seconds_str(s.best_s)} ({'+' if change > 0 else ''}"
            f"{percent_str(change / step_s)})",
            _round(WIDTH / 2 - (width if change < 0 else 0)), row * ROW + 4, max(1.0, _round(width)), ROW - 8))
    return Picture(WIDTH, len(names) * ROW, tuple(shapes), (Mark(WIDTH / 2, seconds_str(step_s)),), (), tuple(names),
                   ("slower", "faster"))


def _marks(most: float, length: float, text: Callable[[float], str], below: float = 0.0) -> Iterator[Mark]:
    """Five marks from nothing, at the height ``below``, to the most."""
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        yield Mark(_round(below + share * length), text(share * most) if share else "0")


def _kinds(shapes: Iterable[Shape]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(shape.kind for shape in shapes))


def _round(value: float) -> float:
    return round(value, 2)


__all__ = ["Picture", "memory_picture", "pipeline_memory_picture", "scatter_picture", "search_picture",
           "timeline_pictures", "tornado_picture"]
