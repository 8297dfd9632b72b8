"""The pictures of the page as matplotlib figures, for notebooks: the same shapes, drawn by another hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoparallel.errors import PlanError
from autoparallel.plans.plan import Plan
from autoparallel.plans.reports import pictures
from autoparallel.plans.reports.build import report_of
from autoparallel.plans.reports.comparison import trials_of
from autoparallel.plans.reports.timeline import timeline_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Inches of a figure's width; of its height for each 100 units of a picture.
WIDTH_IN, PER_100_IN = 10.0, 1.1
HATCHES = ("", "//", "..", "xx", "\\\\", "--", "++", "oo")
#: The kinds of a timeline's boxes, in the order of their colours, which are the same in all timelines.
ORDER = ("forward", "recompute", "backward", "optimizer", "gather", "reduce", "exchange", "other", "earlier")
#: The shapes that only tell what the mouse points at, and those drawn as lines.
READING, LIMIT = "reading", "limit"


class Plots:
    """``plan.plot``: each method gives a matplotlib Figure, which a notebook shows and ``savefig`` writes.

    Raises PlanError where the plan has no numbers for a picture, and without matplotlib
    (``pip install 'autoparallel[plot]'``).
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def timeline(self) -> Figure:
        """The predicted step: a row for each stream (of each rank of a pipeline)."""
        line = timeline_of(self.plan)
        p = self.plan.prediction
        return _figure(pictures.timeline_pictures(line, p.step_s, p.fixed_s), "The predicted step")

    def memory(self) -> Figure:
        """Memory of the fullest rank by kind, along forward and backward, with the limit; of a pipeline also over its
        schedule."""
        report = report_of(self.plan)
        if report.record is None or report.record.memory is None or not report.record.memory.at:
            raise PlanError("the plan does not tell its memory along the step: plan again with this version")
        some = [pictures.memory_picture(report.record.memory, report.memory.limit_bytes)]
        if report.record.stages:
            some.append(pictures.pipeline_memory_picture(timeline_of(self.plan), report.memory))
        return _figure(some, "Memory of the fullest rank")

    def pareto(self) -> Figure:
        """Step time against memory of the combinations that a joint search tried, with the Pareto front."""
        report = report_of(self.plan)
        if report.record is None or not report.record.trials:
            raise PlanError("no combinations were tried beside this plan: autoparallel.plan(..., joint=True) tries "
                            "them")
        return _figure([pictures.scatter_picture(trials_of(report), report.memory.limit_bytes)],
                       "Combinations that were tried")


def _figure(some: list[pictures.Picture], title: str) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError("plots need matplotlib: pip install 'autoparallel[plot]'") from error
    heights = [max(1.2, picture.height / 100 * PER_100_IN) for picture in some]
    figure = Figure(figsize=(WIDTH_IN, sum(heights) + 1.0), layout="constrained")
    areas = figure.subplots(len(some), 1, squeeze=False, height_ratios=heights)[:, 0]
    for area, picture in zip(areas, some, strict=True):
        _draw(area, picture)
    figure.suptitle(title)
    figure.supxlabel("\n".join(picture.note for picture in some if picture.note), fontsize="small", parse_math=False)
    return figure


def _draw(area: Axes, picture: pictures.Picture) -> None:
    """A picture's shapes in its own units; y grows downwards, as on the page, while marks count from below."""
    from matplotlib.patches import Patch

    kinds = list(picture.kinds) or sorted({shape.kind for shape in picture.shapes} - {READING, LIMIT})
    for shape in picture.shapes:
        if shape.kind != READING:
            area.add_patch(_patch(shape, _look(kinds, shape.kind)))
    area.set_xlim(0, picture.width)
    area.set_ylim(max(picture.height, 1.0), 0)
    area.set_xticks([mark.at for mark in picture.x_marks], [mark.text for mark in picture.x_marks])
    rows = [pictures.ROW * (number + 0.5) for number in range(len(picture.rows))]
    area.set_yticks(rows or [picture.height - mark.at for mark in picture.y_marks],
                    list(picture.rows) or [mark.text for mark in picture.y_marks])
    for label in (*area.get_xticklabels(), *area.get_yticklabels()):
        label.set_parse_math(False)
    keys = [Patch(label=kind.replace("$", r"\$"), **_look(kinds, kind)) for kind in kinds if kind != LIMIT]
    keys += [Patch(label=shape.said, **_look(kinds, LIMIT)) for shape in picture.shapes if shape.kind == LIMIT]
    area.legend(handles=keys, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")


def _look(kinds: list[str], kind: str) -> dict[str, Any]:
    """Colour and texture of a kind. (Areas of memory are called m0, m1, ... in the order of their kinds.)"""
    if kind == LIMIT:
        return {"color": "crimson"}
    if kind in ORDER:
        number = ORDER.index(kind)
    elif kind in kinds:
        number = kinds.index(kind)
    else:
        number = int(kind.removeprefix("m"))
    return {"facecolor": f"C{number % 10}", "edgecolor": "white", "linewidth": 0.2,
            "hatch": HATCHES[number % len(HATCHES)]}


def _patch(shape: pictures.Shape, look: dict[str, Any]) -> Any:
    from matplotlib.patches import Ellipse, Polygon, Rectangle

    if shape.points:
        return Polygon(shape.points, closed=True, **look)
    if shape.height:
        return Rectangle((shape.x, shape.y), shape.width, shape.height, **look)
    return Ellipse((shape.x, shape.y), 2 * shape.width, 2 * shape.width, **look)


__all__ = ["Plots"]
