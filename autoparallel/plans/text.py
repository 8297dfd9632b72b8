"""The text report of a plan."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoparallel.errors import printable
from autoparallel.plans.answers import Choice, Sensitivity
from autoparallel.plans.plan import Plan, Prediction
from autoparallel.schedule.step_config import Hybrid

MOST_LINES = 40


class ReportConsole(Console):
    """A console that takes strings as plain text: names from models and files are no markup, emoji or escape codes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def text_report(plan: Plan, width: int = 100) -> str:
    """The report of a plan as text of ``width`` columns: step time by part, memory, collectives, layouts by block,
    gap."""
    console = ReportConsole(file=io.StringIO(), width=width, force_terminal=False)
    print_report(plan, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def print_report(plan: Plan, console: ReportConsole) -> None:
    """Print the report on ``console``, in colour on a terminal."""
    mesh = " x ".join(f"{name}={n}" for name, n in zip(plan.axis_names, plan.mesh_shape, strict=True))
    evidence, p = plan.evidence, plan.prediction
    console.print(f"plan for {mesh} on {plan.cluster}, program {plan.fingerprint}", style="bold")
    if plan.hybrid != Hybrid():
        console.print(_hybrid(plan.hybrid))
    if plan.pins:
        console.print("pins: " + ", ".join(f"{k} = {v}" for k, v in plan.pins.items()))
    table = Table(title="predicted step", title_justify="left")
    table.add_column("part")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    for part, seconds in _parts(p):
        if not seconds and part in ("waiting in the pipeline", "overlapped with compute", "framework, once a step"):
            continue
        table.add_row(part, seconds_str(seconds), f"{seconds / p.step_s:.1%}" if p.step_s else "-")
    console.print(table)
    if p.p90:
        console.print(f"half of such predictions are within {p.p50:.0%} of the measured step, nine in ten within "
                      f"{p.p90:.0%}: {p.basis}")
    console.print(f"memory per rank: {bytes_str(p.state_bytes)} parameters, gradients and optimizer state + "
                  f"{bytes_str(p.activation_bytes)} activations; peak {bytes_str(p.peak_bytes)}"
                  + (f" of {bytes_str(p.limit_bytes)} that tensors may take" if p.limit_bytes else "")
                  + (f"; {bytes_str(p.host_bytes)} in the host's memory" if p.host_bytes else ""))
    console.print(_collectives(plan))
    console.print("strategies and layouts have an entry per mesh axis: S(d) a shard of dim d, R and I replicated "
                  "(I: not changed by any rank), P a partial sum", highlight=False)
    for block in plan.blocks:
        console.print(_block(block.paths, block.lines))
    if p.repeated_ops:
        console.print(f"no rule, so repeated on every rank: {', '.join(p.repeated_ops)}")
    console.print(f"search {evidence.solver}: objective {seconds_str(evidence.objective_s)}, lower bound "
                  f"{seconds_str(evidence.lower_bound_s)}, gap {evidence.gap:.2%} ({evidence.stop_reason})")
    if evidence.step_bound_s is not None and p.step_s:
        console.print(f"no combination's step is below {seconds_str(evidence.step_bound_s)} (ops divided evenly, no "
                      f"communication): at most {1 - evidence.step_bound_s / p.step_s:.0%} less than this plan's")
    phases = {k: v for k, v in evidence.seconds.items() if not k.startswith("search:")}
    console.print("planning: " + ", ".join(f"{k} {v:.2f} s" for k, v in phases.items()))


def comparison(ours: Plan, theirs: Plan, name: str) -> Table:
    """Two plans side by side, part by part; parts on which they differ most have the difference."""
    table = Table(title=f"beside the plan by hand {name}", title_justify="left")
    for column in ("part", "ours", "by hand", "difference"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for (part, a), (_, b) in zip(_parts(ours.prediction), _parts(theirs.prediction), strict=True):
        if a or b:
            table.add_row(part, seconds_str(a), seconds_str(b), seconds_str(b - a) if abs(b - a) > 1e-6 else "")
    for part, a, b in (("peak memory", ours.prediction.peak_bytes, theirs.prediction.peak_bytes),):
        table.add_row(part, bytes_str(a), bytes_str(b), "")
    table.add_row("layout", _axes(ours), _axes(theirs), "")
    return table


def _parts(p: Prediction) -> list[tuple[str, float]]:
    return [("forward compute", p.forward_s), ("backward compute", p.backward_s), ("optimizer", p.optimizer_s),
            ("forward communication", p.forward_communication_s),
            ("backward communication", p.backward_communication_s), ("waiting in the pipeline", p.waiting_s),
            ("overlapped with compute", -p.hidden_s), ("framework, once a step", p.fixed_s), ("whole step", p.step_s)]


def _axes(plan: Plan) -> str:
    mesh = " x ".join(f"{name}={n}" for name, n in zip(plan.axis_names, plan.mesh_shape, strict=True))
    h = plan.hybrid
    stages = f"{h.stages} stages, " if h.stages > 1 else ""
    return f"{mesh}; {stages}{h.micro_batches} micro-batches, ZeRO {h.zero_stage}, recompute {h.recompute}"


def _hybrid(h: Hybrid) -> str:
    micro_batches = f"{' + '.join(map(str, h.replicas))} ranks share the micro-batches, " if h.replicas else ""
    pipeline = (f"{h.stages} stages on a pipeline of {h.pipeline_ranks} ({micro_batches}schedule {h.schedule}, cut at "
                f"{', '.join(h.cuts)}), " if h.stages > 1 else "")
    blocks = h.recompute_blocks
    some = "" if blocks is None else f" of {len(blocks)} blocks ({', '.join(blocks)})"
    summed = f", gradients summed in {h.reduce_dtype}" if h.reduce_dtype else ""
    return (f"{pipeline}{h.micro_batches} micro-batches, ZeRO stage {h.zero_stage}, recompute {h.recompute}{some}"
            f"{summed}")


def _collectives(plan: Plan) -> Table:
    table = Table(title="collectives in one step (gradients of unsharded parameters in buckets)", title_justify="left")
    for column in ("collective", "axis", "direction"):
        table.add_column(column)
    for column in ("count", "bytes per rank", "time"):
        table.add_column(column, justify="right")
    for use in plan.prediction.collectives:
        table.add_row(use.kind, use.axis, use.direction, str(use.count), bytes_str(use.num_bytes),
                      seconds_str(use.seconds))
    return table


def _block(paths: tuple[str, ...], lines: tuple[tuple[str, str, str], ...]) -> Table:
    title = paths[0] if len(paths) == 1 else f"{paths[0]} ... {paths[-1]} ({len(paths)} equal blocks)"
    table = Table(title=title, title_justify="left")
    for column in ("op", "strategy", "result"):
        table.add_column(column)
    for line in lines[:MOST_LINES]:
        table.add_row(*line)
    if len(lines) > MOST_LINES:
        table.add_row(f"... {len(lines) - MOST_LINES} more", "", "")
    return table


def seconds_str(seconds: float) -> str:
    """Seconds with three digits and a unit: 12.3 ms."""
    if seconds < 0:
        return f"-{seconds_str(-seconds)}"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def bytes_str(count: float) -> str:
    """Bytes with three digits and a binary unit: 1.25 GiB."""
    for scale, unit in ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def sensitivities(step_s: float, found: Sequence[Sensitivity]) -> Table:
    """The answers of `Study.sensitivity` as a table; ``step_s``: the plan's step time."""
    table = Table(title=f"sensitivity of the step time of {seconds_str(step_s)}", title_justify="left")
    for column in ("what", "factor", "this plan", "best plan", "changed ops"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for s in found:
        held = "does not fit" if s.held_s == float("inf") else seconds_str(s.held_s)
        best = "none found" if s.none_found else "none fits" if s.best_s == float("inf") else seconds_str(s.best_s)
        table.add_row(s.what, f"{s.factor:g}", held, best, str(s.num_others))
    return table


def explanation(name: str, choices: Sequence[Choice]) -> Table:
    """The answer of `Study.explain` for decision ``name`` as a table."""
    table = Table(title=f"{name}: step time with each strategy", title_justify="left")
    for column in ("strategy", "all else unchanged", "best plan with it", "lower bound"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for c in choices:
        alone = "not possible" if c.alone_s == float("inf") else seconds_str(c.alone_s)
        resolved = "" if c.resolved_s is None else "none" if c.resolved_s == float("inf") else seconds_str(c.resolved_s)
        table.add_row("·".join(c.strategy), alone, resolved, seconds_str(c.least_s))
    return table
