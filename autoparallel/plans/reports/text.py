"""Reports as text for a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoparallel.errors import printable
from autoparallel.plans.answers import Choice, Comparison, Sensitivity
from autoparallel.plans.plan import Plan
from autoparallel.plans.reports.build import report_of
from autoparallel.plans.reports.comparison import explained, left_out_rows, other_rows
from autoparallel.plans.reports.report import Collectives, Report
from autoparallel.plans.reports.summary import state_said
from autoparallel.plans.reports.units import bytes_str, percent_str, percent_up, seconds_str

#: Lines of the details of a block, and letters of all pins, at most.
MOST_LINES, MOST_LETTERS = 200, 1000
LAYOUTS = ("strategies and layouts have an entry per mesh axis: S(d) a shard of dim d, S(d;k) a shard of each of its k "
           "parts (n;k: the product that reads such a weight), R and I replicated (I: not changed by any rank), P a "
           "partial sum")


class ReportConsole(Console):
    """A console that takes strings as plain text: names from models and files are no markup, emoji or escape codes. In
    narrow tables they are wrapped, never cut off."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)
        if self.width < 1:    # COLUMNS=0, as of terminals without a size
            self.width = 80

    def render_str(self, text: str, **options: Any) -> Text:
        plain = super().render_str(printable(text), **options)
        plain.overflow = "fold"
        return plain


def as_text(print_to: Callable[[ReportConsole], None], width: int) -> str:
    """The text that ``print_to`` prints to a console of ``width`` columns."""
    console = ReportConsole(file=(written := io.StringIO()), width=width, force_terminal=False)
    print_to(console)
    return written.getvalue()


def text_report(plan: Plan, width: int = 100, details: bool = False) -> str:
    """The report of a plan as text of ``width`` columns."""
    return as_text(lambda console: print_report(report_of(plan), console, details), width)


def print_summary(report: Report, console: ReportConsole) -> None:
    """The first screen: a question a row, the entries of a list below one another."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")  # plans by hand are words of up to 80 letters
    for answer in report.first_screen:
        for number, entry in enumerate(answer.entries):
            label = "" if number else answer.label
            rows.add_row(label, entry, style="bold" if answer.label == "plan" else "")
    console.print(rows)


def print_report(report: Report, console: ReportConsole, details: bool = False) -> None:
    """Print the report on ``console``, in colour on a terminal; with ``details`` every op and collective."""
    print_summary(report, console)
    console.print()
    console.print(_axes(report))
    if report.pins:
        said = ", ".join(f"{k} = {v}" for k, v in report.pins)
        console.print("pins: " + (said if len(said) <= MOST_LETTERS else said[:MOST_LETTERS] + "..."))
    console.print(_times(report))
    if report.speed.p90:
        console.print(f"typical error of such predictions {percent_str(report.speed.p50)} (the median, above or "
                      f"below), of nine in ten at most {percent_str(report.speed.p90)}: {report.speed.basis}")
    console.print(_memory(report))
    if report.record is not None and (state := report.record.workload.state_bytes):
        console.print(f"counted as {state_said(state)}")
    console.print(_collectives(report, details))
    console.print(_blocks(report))
    if report.interleaved:
        console.print("stored by section, a shard of each on each rank: "
                      + ", ".join(f"{name} {layout}" for name, layout in report.interleaved))
    if details and report.cuts:
        console.print(f"pipeline stages begin at: {', '.join(report.cuts)}")
    if details and report.recomputed:
        console.print(f"blocks with recompute: {', '.join(report.recomputed)}")
    if details:
        console.print(LAYOUTS)
        for block in report.blocks:
            console.print(_lines(block.title, block.lines))
    else:
        console.print("every op and collective: --details, or plan.report(details=True)")
    if report.repeated_ops:
        console.print(f"no rule, so repeated on every rank: {', '.join(report.repeated_ops)}")
    _print_proof(report, console)


def _print_proof(report: Report, console: ReportConsole) -> None:
    proof = report.proof
    gap = "" if proof.within is None else f", at most {percent_up(proof.within)} above it"
    if proof.searched:
        over = "added up over the pipeline's ranks, " if any(axis.role == "pipeline" for axis in report.axes) else ""
        console.print(f"search: {over}without overlap and waits {seconds_str(proof.objective_s)}, lower bound "
                      f"{seconds_str(proof.lower_bound_s)}{gap}; {proof.said}")
    else:
        console.print(f"not searched: {proof.reason}")
    if proof.combinations is not None:
        console.print(f"combinations: {proof.combinations}")
    if proof.step_bound_s is not None:
        console.print(f"no combination's step is below {seconds_str(proof.step_bound_s)} (equal stages, all overlap "
                      "that is possible)")
    phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in proof.phases)
    console.print(f"planning, seconds of a core: {phases}")
    console.print(f"program {report.fingerprint} on {report.cluster}")


def _axes(report: Report) -> Table:
    table = _table("mesh axes, slowest links first", ("axis", "ranks", "what for", "link"), right=("ranks",))
    for axis in report.axes:
        name = axis.label if axis.label == axis.name else f"{axis.label} ({axis.name})"
        table.add_row(name, str(axis.size), "; ".join([axis.words, *axis.departures]), axis.link)
    return table


def _times(report: Report) -> Table:
    table = _table("predicted step", ("part", "time", "share"), right=("time", "share"))
    step_s = report.speed.step_s
    for time in report.times:
        if time.seconds and not time.beside:
            table.add_row(time.part, seconds_str(time.seconds), percent_str(time.seconds / step_s) if step_s else "-")
    table.add_row("whole step", seconds_str(step_s), "100 %", style="bold")
    for time in report.times:
        if time.seconds and time.beside:
            table.add_row(f"beside it: {time.part}", seconds_str(time.seconds), "")
    return table


def _memory(report: Report) -> Table:
    memory = report.memory
    where = f" (peak: {memory.fullest})" if memory.fullest else ""
    table = _table(f"memory of the fullest rank{where}", ("kind", "bytes"), right=("bytes",))
    for kind, num_bytes in memory.kinds:
        if num_bytes:
            table.add_row(kind, bytes_str(num_bytes))
    table.add_row("peak", bytes_str(memory.peak_bytes), style="bold")
    if memory.limit_bytes:
        whole = f", of {bytes_str(memory.device_bytes)}" if memory.device_bytes else ""
        table.add_row(f"that tensors may take{whole}", bytes_str(memory.limit_bytes))
    if memory.host_bytes:
        table.add_row("in the host's memory", bytes_str(memory.host_bytes))
    if memory.disk_bytes:
        table.add_row("on disk", bytes_str(memory.disk_bytes))
    return table


def _collectives(report: Report, details: bool) -> Table:
    """By purpose, kind and axis; with details also by direction. At the end how much of all is exposed."""
    columns = ("moves", "collective", "axis", *(("direction",) if details else ()), "tensors", "bytes", "time")
    table = _table("collectives of a rank in one step, by the tensors moved (those of one bucket travel together and "
                   "share its time)", columns, right=("tensors", "bytes", "time"))
    rows: dict[tuple[str, ...], list[Collectives]] = {}
    for use in report.collectives:
        key = (use.purpose or "not known", use.kind, use.axis, *((use.direction,) if details else ()))
        rows.setdefault(key, []).append(use)
    for row, some in rows.items():
        table.add_row(*row, str(sum(u.count for u in some)), bytes_str(sum(u.num_bytes for u in some)),
                      seconds_str(sum(u.seconds for u in some)))
    table.add_section()
    for what, seconds in report.collectives_s:
        table.add_row(what, *[""] * (len(columns) - 2), seconds_str(seconds))
    return table


def _blocks(report: Report) -> Table:
    axes = [axis.label for axis in report.axes if axis.has_strategies]
    table = _table("what is cut by what, on each axis", ("block", "part", "ops", *axes), right=("ops",))
    for block in report.blocks:
        for number, row in enumerate(block.rows):
            table.add_row("" if number else block.title, row.part, str(row.ops), *row.cut_by)
    return table


def _lines(title: str, lines: Sequence[tuple[str, str, str]]) -> Table:
    table = _table(title, ("op", "strategy", "result"))
    for line in lines[:MOST_LINES]:
        table.add_row(*line)
    if len(lines) > MOST_LINES:
        table.add_row(f"... {len(lines) - MOST_LINES} more", "", "")
    return table


def _table(title: str, columns: Iterable[str], right: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


# ------------------------------------------------------------------------------------------ answers and comparisons


def comparison_table(found: Comparison) -> Table:
    """Two plans side by side, by part; then what differs."""
    table = _table(f"{found.names[0]} beside {found.names[1]}", ("", *found.names, "saved"), right=("saved",))
    for row in found.rows:
        table.add_row(row.what, row.texts[0], row.texts[1], seconds_str(row.saved_s) if row.saved_s else "")
    return table


def sensitivities(step_s: float, found: Sequence[Sensitivity]) -> Table:
    """The answers of `Study.sensitivity` as a table; ``step_s``: the plan's step time."""
    table = _table(f"sensitivity of the step time of {seconds_str(step_s)} (pipeline, mesh, micro-batches, ZeRO and "
                   "recompute stay)",
                   ("what", "factor", "this plan", "best sharding", "changed ops"),
                   right=("factor", "this plan", "best sharding", "changed ops"))
    for s in found:
        held = "does not fit" if s.held_s == float("inf") else seconds_str(s.held_s)
        least = seconds_str(s.best_s) + (" or less" if s.none_found else "")  # this plan's, where no other was found
        best = least if s.best_s < float("inf") else "none found" if s.none_found else "none fits"
        table.add_row(s.what, f"{s.factor:g}", held, best, str(s.num_others))
    return table


def explanation(name: str, choices: Sequence[Choice]) -> Table:
    """The answer of `Study.explain` for decision ``name`` as a table."""
    columns = ("strategy", "all else unchanged", "best plan with it", "lower bound")
    table = _table(f"{name}: step with each strategy, without overlap and waits", columns, right=columns[1:])
    for row in explained(choices):
        table.add_row(*row)
    return table


def alternatives_table(report: Report, details: bool = False) -> Table:
    """Other plans, by how much slower they are and whether predictions are that exact; with ``details`` also the first
    of their differences, and the usual plans by hand that were not priced."""
    table = _table("other plans", ("plan", "step", "slower by", "peak memory", *(("differs in",) if details else ())),
                   right=("step", "slower by", "peak memory"))
    for _, (name, *figures, differs) in other_rows(report):
        table.add_row(name, *figures, *((differs,) if details else ()))
    left_out = left_out_rows(report)
    for name, why, least in left_out if details else ():
        table.add_row(name, "", why, least, "")
    if left_out and not details:
        table.caption = f"{len(left_out)} usual plans were not priced: --details says why"
    return table


__all__ = ["ReportConsole", "alternatives_table", "as_text", "comparison_table", "explanation", "print_report",
           "print_summary", "sensitivities", "text_report"]
