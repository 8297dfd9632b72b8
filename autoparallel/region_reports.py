"""Reports of a study (`autoparallel.regions`): tables, JSON, and a picture of the regions as SVG."""

from __future__ import annotations

import json
from html import escape
from itertools import groupby

from rich.table import Column, Table

from autoparallel.plans.reports.text import ReportConsole, as_text
from autoparallel.plans.reports.units import seconds_str
from autoparallel.regions import Point, Regions, quantity

SCHEMA, VERSION = "autoparallel.study", 1
#: Fills of the kinds, from that with most points on; then grey.
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#44bb99")
NONE_FITS = "none"
_CELL_W, _CELL_H, _LEFT, _TOP, _ROW = 120, 34, 110, 54, 20


def print_regions(found: Regions, console: ReportConsole) -> None:
    """Print where which trait pays, then a row for each point."""
    points, plans = len(found.points), sum(one.priced for one in found.points)
    console.print(f"{points} point{'s' * (points != 1)} on {found.cluster}, {plans} plan{'s' * (plans != 1)}.")
    for sentence in found.told:
        console.print(f"- {sentence}")
    if len(found.kinds) == 1:
        console.print(f"- {found.kinds[0]} is the fastest wherever there is a plan.")
    by_hand = Column("by hand", overflow="fold")  # to be copied: never cut short
    table = Table("devices", "batch", "sequence", "step", "fastest plan", by_hand, "next kind", "", box=None,
                  pad_edge=False)
    for point in found.points:
        table.add_row(*_row(point))
    console.print(table)


def _row(point: Point) -> tuple[str, ...]:
    place = (str(point.devices), str(point.batch), quantity("sequence", point.sequence).removesuffix(" tokens"))
    if point.best is None:
        return (*place, "-", NONE_FITS, "", point.refused, "")
    second = point.found[1] if len(point.found) > 1 else None
    slower = ("", "") if second is None else (second.kind, f"+{second.step_s / point.best.step_s - 1:.1%}")
    return (*place, seconds_str(point.best.step_s), point.best.kind, point.best.text, *slower)


def report(found: Regions, width: int = 140) -> str:
    """The same as text of ``width`` columns."""
    return as_text(lambda console: print_regions(found, console), width)


def to_json(found: Regions) -> str:
    """The study for programs; seconds and bytes."""
    points = [{"devices": point.devices, "batch": point.batch, "sequence": point.sequence, "priced": point.priced,
               "refused": point.refused,
               "plans": [{"kind": one.kind, "traits": list(one.traits), "by_hand": one.text, "step_s": one.step_s,
                          "peak_bytes": one.peak_bytes} for one in point.found]} for point in found.points]
    return json.dumps({"schema": SCHEMA, "version": VERSION, "cluster": found.cluster, "kinds": list(found.kinds),
                       "told": list(found.told), "points": points}, indent=1, allow_nan=False)


def to_svg(found: Regions) -> str:
    """A grid for each batch: lengths to the right, devices upwards, each cell in the colour of the fastest kind."""
    fill = dict(zip(found.kinds, COLOURS, strict=False))
    lengths = sorted({point.sequence for point in found.points})
    counts = sorted({point.devices for point in found.points}, reverse=True)
    width = max(_LEFT + _CELL_W * len(lengths) + 20, 460)
    parts, y = list[str](), 0
    for batch, some in groupby(sorted(found.points, key=lambda one: one.batch), lambda one: one.batch):
        parts.append(_text(10, y + 22, f"{quantity('batch', batch)} on {found.cluster}", "title"))
        for column, length in enumerate(lengths):
            parts.append(_text(_LEFT + _CELL_W * column + 6, y + 44, quantity("sequence", length)))
        for row, count in enumerate(counts):
            parts.append(_text(10, y + _TOP + _CELL_H * row + 22, quantity("devices", count)))
        for point in some:
            x = _LEFT + _CELL_W * lengths.index(point.sequence)
            parts += _cell(point, x, y + _TOP + _CELL_H * counts.index(point.devices), fill)
        y += _TOP + _CELL_H * len(counts) + 16
    for kind in found.kinds:
        parts.append(f'<rect x="10" y="{y + 4}" width="14" height="12" fill="{fill.get(kind, "#bbbbbb")}"/>')
        parts.append(_text(32, y + 15, kind))
        y += _ROW
    style = "text{font:13px sans-serif;fill:#222}.title{font-weight:bold}.cell{fill:#fff}rect{stroke:#fff}"
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 12}" role="img">'
            f'<title>Fastest kind of plan</title><style>{style}</style>'
            f'<rect width="{width}" height="{y + 12}" fill="#fff"/>' + "".join(parts) + "</svg>\n")


def _cell(point: Point, x: int, y: int, fill: dict[str, str]) -> list[str]:
    best = point.best
    colour = "#eeeeee" if best is None else fill.get(best.kind, "#bbbbbb")
    said = point.refused or NONE_FITS if best is None else f"{best.kind}: {seconds_str(best.step_s)}, {best.text}"
    return [f'<rect x="{x}" y="{y}" width="{_CELL_W}" height="{_CELL_H}" fill="{colour}"><title>{escape(said)}</title>'
            "</rect>", _text(x + 6, y + 22, "-" if best is None else seconds_str(best.step_s), "cell")]


def _text(x: int, y: int, said: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}"{f" class={chr(34)}{kind}{chr(34)}" if kind else ""}>{escape(said)}</text>'


__all__ = ["print_regions", "report", "to_json", "to_svg"]
