"""Commands on saved plans (``show``, ``diff``, ``explain``, ...), and what they share with ``autoparallel plan``.

Nothing here imports torch before a command needs it: ``show`` of a saved plan takes a fraction of a second.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoparallel import clock
from autoparallel.errors import InputError, PlanError

if TYPE_CHECKING:
    from autoparallel.plans import Plan
    from cost_models import Cluster

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN.json", help="a plan that `autoparallel plan --output`, or "
                                          "plan.save, has written")]
Html = Annotated[Path | None, typer.Option(help="write the report here, as one page that needs no network")]
Trace = Annotated[Path | None, typer.Option(help="write the predicted step here, for ui.perfetto.dev")]
Details = Annotated[bool, typer.Option("--details", help="every op and collective")]
AsJson = Annotated[bool, typer.Option("--json", help="the report as JSON on stdout (docs/report_schema.md)")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="the summary only")]
Model = Annotated[str, typer.Argument(help="a Hugging Face config file (JSON) or its folder, or module:function, or "
                                      "path/to/file.py:function")]
SequenceLength = Annotated[int | None, typer.Option(min=1, help="tokens per sequence; 2048 by default, or as many as a "
                                                        "model with fewer embeddings of positions takes")]
Dtype = Annotated[str | None, typer.Option(help="of a config's model: bfloat16 (the default, where the devices have a "
                                           "rate for it), float16, float32 or float64")]
Software = Annotated[str | None, typer.Option(help="whose speed counts: torch-eager, torch-compile, megatron-core, "
                                              "megatron-2021, ... (an unknown name lists all), or none; by default as "
                                              "the cluster's description says, torch-eager for the known ones")]
Optimizer = Annotated[str, typer.Option(help="whose state is counted in memory: adafactor, adagrad, adam, adamw, "
                                        "adamw-amsgrad, rmsprop, sgd or sgd-momentum")]
MemoryLimit = Annotated[str | None, typer.Option(help="the most that tensors may take on a device, for example 70GiB; "
                                                 "by default its memory less what the process takes and the error "
                                                 "of predictions")]
#: Seconds between two lines of progress where there is no terminal.
EVERY_S = 10.0


def add_to(app: typer.Typer) -> None:
    """Add the commands, and ``--version``."""
    app.callback()(_main)
    for command in (show, diff, compare_trace, explain, alternatives, sensitivity, doctor):
        app.command()(command)


def _say_version(asked: bool) -> None:
    if asked:
        import autoparallel

        typer.echo(f"autoparallel {autoparallel.__version__}")
        raise typer.Exit


def _main(version: Annotated[bool, typer.Option("--version", callback=_say_version, is_eager=True,
                                                help="print the version and end")] = False) -> None:
    """The fastest correct way to run a PyTorch model on these devices."""


def show(plan: PlanFile, html: Html = None, trace: Trace = None, details: Details = False, as_json: AsJson = False,
         quiet: Quiet = False) -> None:
    """Report on a saved plan."""
    from autoparallel.plans import Plan

    check_page(html)
    check_output(trace, "--trace")
    check_apart(plan=plan, html=html, trace=trace)
    check_details(details, quiet, as_json)
    tell(Plan.load(plan), details, as_json, quiet, html, trace)


def tell(plan: Plan, details: bool, as_json: bool, quiet: bool, html: Path | None, trace: Path | None) -> None:
    """Print the report of a plan, and write page and trace."""
    from autoparallel.plans.reports.build import report_of
    from autoparallel.plans.reports.data import report_json

    if html is not None:
        plan.save_html(html)
    if trace is not None:
        plan.save_trace(trace)
    report = report_of(plan)
    if as_json:
        typer.echo(report_json(report))
        return
    from autoparallel.plans.reports import text

    console = text.ReportConsole()
    if quiet:
        text.print_summary(report, console)
        return
    text.print_report(report, console, details)
    if report.record is not None:
        for found in report.record.comparisons:
            console.print(text.comparison_table(found))
        for name, choices in report.record.explanations.items():
            console.print(text.explanation(name, choices))
        if report.record.alternatives or report.record.left_out:
            console.print(text.alternatives_table(report, details))
        if report.record.sensitivities:
            console.print(text.sensitivities(report.speed.step_s, report.record.sensitivities))
    for path, what in ((html, "page"), (trace, "trace")):
        if path is not None:
            typer.echo(f"{what} written to {path}")


def diff(first: PlanFile, second: PlanFile, details: Details = False, as_json: AsJson = False) -> None:
    """Compare two saved plans; exit code 1 if they differ."""
    from autoparallel.plans import Plan
    from autoparallel.plans.reports.build import report_of
    from autoparallel.plans.reports.comparison import compare
    from autoparallel.plans.reports.data import comparison_json

    ours, theirs = Plan.load(first), Plan.load(second)
    found = compare(report_of(ours), report_of(theirs), (str(first), str(second)))
    _, *lines = ours.diff(theirs).split("\n")
    of_job = (("cluster", ours.cluster, theirs.cluster), ("program", ours.fingerprint, theirs.fingerprint))
    lines = [*(f"{what}: {mine} -> {other}" for what, mine, other in of_job if mine != other), *lines]
    if as_json:
        typer.echo(comparison_json(found))
    else:
        from autoparallel.plans.reports import text

        console = text.ReportConsole()
        console.print(text.comparison_table(found))
        more = "" if details or not lines else "; each: --details"
        console.print(f"{len(lines)} entr{'y' if len(lines) == 1 else 'ies'} of the plan "
                      f"differ{'s' * (len(lines) == 1)}{more}")
        for line in lines if details else ():
            console.print(line)
    raise typer.Exit(1 if lines else 0)


def compare_trace(
    predicted: Annotated[Path, typer.Argument(metavar="PREDICTED.json", help="a trace that `--trace` has written")],
    measured: Annotated[Path | None, typer.Argument(metavar="MEASURED.json", help="a trace that parallel.profile has "
                                                    "written; without it the first has both")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the comparison as JSON (docs/report_schema.md)")] = False,
) -> None:
    """Compare a predicted step with a measured one, by kind of op."""
    from autoparallel.plans.reports.data import trace_comparison_json
    from autoparallel.plans.reports.step_parts import compare_traces

    found = compare_traces(predicted, predicted if measured is None else measured)
    typer.echo(trace_comparison_json(found) if as_json else str(found))


def explain(plan: PlanFile, name: Annotated[str | None, typer.Argument(help="an op, parameter or input")] = None
            ) -> None:
    """Say what each strategy of an op, parameter or input costs; without NAME list those that were asked for."""
    from autoparallel.plans.reports import text

    record, console = _record(plan), text.ReportConsole()
    if name is None:
        if not record.explanations:
            raise _not_asked(plan, "does not say what strategies of an op cost", "--explain NAME")
        for known in record.explanations:
            console.print(known)
    elif name in record.explanations:
        console.print(text.explanation(name, record.explanations[name]))
    else:
        raise _not_asked(plan, f"does not say what the strategies of {name!r} cost", f"--explain {name}")


def alternatives(plan: PlanFile) -> None:
    """List other plans that were found, by how much slower they are."""
    from autoparallel.plans.reports import text
    from autoparallel.plans.reports.build import report_of

    if not _record(plan).alternatives:
        raise _not_asked(plan, "has no other plans", "--alternatives 3")
    text.ReportConsole().print(text.alternatives_table(report_of(_load(plan)), details=True))


def sensitivity(plan: PlanFile) -> None:
    """Say what half or twice the bandwidth or the memory would mean."""
    from autoparallel.plans.reports import text

    found = _record(plan).sensitivities
    if not found:
        raise _not_asked(plan, "does not say how sensitive it is", "--sensitivity")
    text.ReportConsole().print(text.sensitivities(_load(plan).prediction.step_s, found))


def _load(path: Path) -> Plan:
    from autoparallel.plans import Plan

    return Plan.load(path)


def _record(path: Path) -> Any:
    record = _load(path).record
    if record is None:
        raise PlanError(f"{path} was written without a record of its search: plan again with this version")
    return record


def _not_asked(path: Path, what: str, option: str) -> PlanError:
    return PlanError(f"{path} {what}, and a saved plan has no search to ask: run `autoparallel plan ... "
                     f"{option} --output {path}`")


def doctor() -> None:
    """Check versions, devices, links and what works here; exit code 1 if something that is needed does not."""
    from autoparallel.doctor import findings

    good = True
    for finding in findings():
        good = good and (finding.works or not finding.needed)
        mark = "ok  " if finding.works else "FAIL" if finding.needed else "--  "
        typer.echo(f"{mark} {finding.what}: {finding.said}")
    raise typer.Exit(0 if good else 1)


def cluster_of(plan: Plan, given: str | None, devices: int) -> Cluster:
    """So many devices of the cluster of a saved plan, or of another one, with the plan's software. A plan for a cluster
    that has a known one's name and other figures has its own. Raises InputError where only a file says what the plan's
    is."""
    from cost_models import Cluster, known_clusters
    from cost_models.calibrate import of_description

    if given is None and plan.cluster not in known_clusters():
        raise InputError(f"the plan was made for the cluster {plan.cluster!r} of a TOML file: give that file as "
                         "--cluster FILE")
    software, described = None, ""
    if plan.record is not None:
        software, described = plan.record.workload.software or "none", plan.record.workload.described
    if given is None and described:
        return of_description(described, devices, software)
    return Cluster.load(given or plan.cluster, num_devices=devices, software=software)


def tell_figures(plan: Plan, given: str | None) -> None:
    """Say which of two clusters of one name `cluster_of` takes."""
    if given is None and plan.record is not None and plan.record.workload.described:
        typer.secho(f"the plan's {plan.cluster} has other figures than the known cluster of that name: the plan's "
                    f"count. For the known ones: --cluster {plan.cluster}", err=True)


# ------------------------------------------------------------------------------------------------------------- progress


class Progress:
    """How far a search is, on stderr: a line that changes on a terminal, else a line every `EVERY_S` seconds."""

    def __init__(self, time_limit_s: float, quiet: bool = False) -> None:
        self.time_limit_s, self.quiet, self.started = time_limit_s, quiet, time.monotonic()
        self.said_s, self.status = 0.0, None
        if not quiet and sys.stderr.isatty():
            from rich.console import Console

            self.status = Console(stderr=True, markup=False).status("capture and prices")

    def __enter__(self) -> Progress:
        if self.status is not None:
            self.status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        if self.status is not None:
            self.status.stop()
        if kind is KeyboardInterrupt:
            typer.echo("interrupted, with no plan: nothing is written", err=True)

    def __call__(self, phase: str, best_s: float, bound_s: float) -> None:
        self.says(progress_line(phase, best_s, bound_s, self.time_limit_s - clock.spent_s()))

    def says(self, line: str) -> None:
        """Show a line."""
        passed = time.monotonic() - self.started
        if self.status is not None:
            self.status.update(line)
        elif not self.quiet and passed - self.said_s >= EVERY_S:
            self.said_s = passed
            typer.echo(f"{passed:.0f} s: {line}", err=True)


def progress_line(phase: str, best_s: float, bound_s: float, left_s: float | None = None) -> str:
    """How far the search is, in a line."""
    from autoparallel.plans.reports.units import percent_up

    left = ""
    if left_s is not None:
        left = f", {left_s:.0f} s of work left" if left_s > 0 else ", ending with the best in full"
    if best_s == float("inf"):
        below = f", none below {bound_s:.4g} s" if bound_s > -float("inf") else ""
        return f"search ({phase}): no plan yet{below}{left}; Ctrl-C ends the search"
    above = f", at most {percent_up(best_s / bound_s - 1)} slower than the best" if 0 < bound_s <= best_s else ""
    bound = f", bound {bound_s:.4g} s{above}" if bound_s > -float("inf") else ""
    return f"search ({phase}): best {best_s:.4g} s{bound}{left}; Ctrl-C takes the best"


def check_output(path: Path | None, option: str = "--output") -> None:
    """Raises InputError for a file that cannot be written, before the work of which it tells."""
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        why = ("it is a folder" if path.is_dir() else f"there is no folder {path.parent}" if not path.parent.is_dir()
               else "you may not write there")
        raise InputError(f"{option} {path} cannot be written, {why}: give a file in a folder that is there")


def check_folder(path: Path | None) -> None:
    """Raises InputError for an --output that is to be a folder and cannot be one, before the work."""
    if path is None:
        return
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        why = "you may not write there" if there.is_dir() else f"{there} is a file"
        raise InputError(f"--output {path} cannot be written, {why}: give a folder, which need not be there yet")


def check_apart(**files: Path | None) -> None:
    """Raises InputError for two of these that are one file, by the option (or argument) of each."""
    named = dict[Path, str]()
    for name, path in files.items():
        if path is None or (path.exists() and not path.is_file()):    # as /dev/null
            continue
        option = "PLAN.json" if name == "plan" else f"--{name}"
        other = named.setdefault(path.resolve(), option)
        if other != option:
            raise InputError(f"{other} and {option} are one file, {path}, which would hold the latter only: give each "
                             "a name of its own")


def check_details(details: bool, quiet: bool, as_json: bool) -> None:
    """Raises InputError for details of a report that is not printed."""
    if details and (quiet or as_json):
        other, why = ("--quiet", "prints the summary only") if quiet else ("--json", "has all of the report")
        raise InputError(f"--details has no use with {other}, which {why}: give one of them")


def check_page(path: Path | None) -> None:
    """Raises InputError for a page that cannot be written, and PlanError without jinja2, before the work."""
    check_output(path, "--html")
    if path is not None:
        from autoparallel.plans.reports.page import check_jinja2

        check_jinja2()


__all__ = ["AsJson", "Details", "Dtype", "Html", "MemoryLimit", "Model", "Optimizer", "Progress", "Quiet",
           "SequenceLength", "Software", "Trace", "add_to", "check_apart", "check_details", "check_folder",
           "check_output", "check_page", "cluster_of", "progress_line", "tell", "tell_figures"]
