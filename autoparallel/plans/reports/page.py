"""The report as one HTML page: no network, no inline styles or handlers, everything escaped.

The template gets numbers and text; jinja2 escapes all of it. Style and script are inlined, and allowed by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoparallel.errors import PlanError, printable
from autoparallel.plans.plan import Plan
from autoparallel.plans.reports import diagrams, pictures, units
from autoparallel.plans.reports.build import report_of
from autoparallel.plans.reports.comparison import explained, left_out_rows, other_rows, trials_of
from autoparallel.plans.reports.glossary import GLOSSARY
from autoparallel.plans.reports.report import Report
from autoparallel.plans.reports.summary import LOOSE, MOST_UNUSUAL, attention_first, state_said
from autoparallel.plans.reports.timeline import timeline_of

if TYPE_CHECKING:
    from jinja2 import Template

FOLDER = Path(__file__).with_name("templates")
#: Letters of a name that are shown; the rest is left out.
MOST_LETTERS = 1000
#: Points of the search's history that make a picture.
LEAST_POINTS = 3


def page(plan: Plan) -> str:
    """The page of a plan. Raises PlanError without jinja2."""
    report = report_of(plan)
    style, script = (_text(name) for name in ("page.css", "page.js"))
    return _template().render(
        report=report, style=style, script=script, policy=_policy(style, script), glossary=GLOSSARY,
        pictures=_pictures(plan, report), timelines=_timelines(plan, report), hosts=_hosts(report),
        flows=_flows(report), explained=explained, loose=LOOSE, state_said=state_said,
        others=other_rows(report),
        left_out=left_out_rows(report), unusual=attention_first(report), most_unusual=MOST_UNUSUAL,
    )


def check_jinja2() -> None:
    """Raises PlanError without jinja2."""
    _template()


def _policy(style: str, script: str) -> str:
    """The Content-Security-Policy: this style, this script, and nothing else."""
    return (f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
            "base-uri 'none'; form-action 'none'")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


@cache
def _text(name: str) -> str:
    return (FOLDER / name).read_text("utf-8")


@cache
def _template() -> Template:
    try:
        from jinja2 import Environment, StrictUndefined, select_autoescape
        from markupsafe import Markup
    except ImportError as error:
        raise PlanError("pages need jinja2: pip install 'autoparallel[report]'") from error
    made = Environment(autoescape=select_autoescape(default=True, default_for_string=True), undefined=StrictUndefined,
                       trim_blocks=True, lstrip_blocks=True, finalize=_shown)
    made.filters.update(seconds=units.seconds_str, bytes=units.bytes_str, percent=units.percent_str,
                        percent_up=units.percent_up, count=units.count_str, large=units.large_str, verbatim=Markup)
    return made.from_string(_text("page.html.j2"))


def _shown(value: Any) -> Any:
    """Text without control characters and of bearable length; numbers without needless digits. Style and script are
    marked as ours, and stay."""
    if isinstance(value, float):
        return f"{value:g}"
    if type(value) is not str:
        return value
    text = printable(value)
    return text if len(text) <= MOST_LETTERS else text[:MOST_LETTERS] + "..."


def _timelines(plan: Plan, report: Report) -> list[pictures.Picture]:
    """The timeline, in one picture or two; where there is none, an empty picture says why."""
    if report.record is None:
        return []
    try:
        return pictures.timeline_pictures(timeline_of(plan), plan.prediction.step_s, plan.prediction.fixed_s)
    except PlanError as error:
        return [pictures.Picture(0, 0, (), note=str(error))]


def _pictures(plan: Plan, report: Report) -> dict[str, pictures.Picture]:
    """The pictures that the plan's record has numbers for."""
    found = dict[str, pictures.Picture]()
    record = report.record
    if record is None:
        return found
    if record.memory is not None and record.memory.at:
        found["memory"] = pictures.memory_picture(record.memory, report.memory.limit_bytes)
    if record.stages:
        found["held"] = pictures.pipeline_memory_picture(timeline_of(plan), report.memory)
    if record.trials:
        found["trials"] = pictures.scatter_picture(trials_of(report), report.memory.limit_bytes)
    if len(record.search) >= LEAST_POINTS:
        found["search"] = pictures.search_picture(record.search)
    if record.sensitivities:
        found["tornado"] = pictures.tornado_picture(record.sensitivities, report.speed.step_s)
    return found


def _hosts(report: Report) -> list[list[diagrams.DeviceCell]]:
    if report.record is None:
        return []
    work = report.record.workload
    return diagrams.hosts(report.axes, work.devices, work.host_devices)


def _flows(report: Report) -> list[list[diagrams.Flow]]:
    return [diagrams.block_flow(block, diagrams.moves_of(report, number))
            for number, block in enumerate(report.blocks)]


__all__ = ["check_jinja2", "page"]
