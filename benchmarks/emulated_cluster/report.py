"""Predicted against measured: errors, order, and what the search's choice costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Row:
    """One plan on one network: medians by launch, seconds; what was predicted; and what the devices were late by."""

    model: str
    inter: str
    plan: str
    kinds: tuple[str, ...]
    predicted_s: float
    launches_s: tuple[float, ...]
    busy_s: float
    predicted_busy_s: float
    overrun: float

    @property
    def measured_s(self) -> float:
        return statistics.median(self.launches_s)

    @property
    def spread(self) -> float:
        """Of the launches, over their median."""
        return (max(self.launches_s) - min(self.launches_s)) / self.measured_s

    @property
    def error(self) -> float:
        """(predicted - measured)/measured."""
        return self.predicted_s / self.measured_s - 1

    @property
    def line(self) -> str:
        return (f"{self.model} {self.inter} {self.plan}: {self.measured_s:.3f} s, predicted {self.predicted_s:.3f} s "
                f"({self.error:+.1%}), spread {self.spread:.1%}, late {self.overrun:.1%}")


@dataclass(frozen=True)
class Summary:
    """Of one model on one network. ``search_regret``: how much longer the search's takes than the fastest plan of one
    micro-batch; ``joint_ratio``: the joint search's plan over the fastest other."""

    model: str
    inter: str
    plans: int
    median_error: float
    mean_error: float
    largest_error: float
    spearman: float
    search_regret: float | None
    joint_ratio: float | None


def summary(rows: Sequence[Row]) -> Summary:
    """Of the rows of one model and network."""
    errors = [abs(row.error) for row in rows]
    first = rows[0]
    plain, others = _has("search", "plain"), _has("plain", "hybrid")
    return Summary(
        first.model, first.inter, len(rows), statistics.median(errors), statistics.mean(errors), max(errors),
        spearman([r.predicted_s for r in rows], [r.measured_s for r in rows]),
        _over_best(rows, _has("search"), plain, -1.0), _over_best(rows, _has("joint"), others, 0.0),
    )


def unequal_lines(rows: Sequence[Row]) -> list[str]:
    """Of each model and network of unequal hosts: the joint search's plan beside the best by hand, and the best plan
    of equal machines beside it."""
    found = []
    for key in dict.fromkeys((row.model, row.inter) for row in rows):
        some = [row for row in rows if (row.model, row.inter) == key]
        mine = next((row.measured_s for row in some if "joint" in row.kinds), None)
        hand, equal = ([row.measured_s for row in some if kind in row.kinds] for kind in ("hybrid", "equal"))
        if mine is not None and hand and equal:
            found.append(f"{key[0]} {key[1]}: the plan takes {mine / min(*hand, *equal):.3f} of the best by hand; "
                         f"the best plan of equal machines takes {min(equal) / mine:.3f} times as long")
    return found


def _has(*kinds: str) -> Callable[[Row], bool]:
    return lambda row: bool(set(kinds) & set(row.kinds))


def _over_best(rows: Sequence[Row], chosen: Callable[[Row], bool], among: Callable[[Row], bool], shift: float
               ) -> float | None:
    mine = [row.measured_s for row in rows if chosen(row)]
    others = [row.measured_s for row in rows if among(row)]
    return mine[0] / min(others) + shift if mine and others else None


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Correlation of the ranks; equal values share their mean rank.

    >>> spearman([1.0, 2.0, 3.0, 4.0], [10.0, 30.0, 20.0, 40.0])
    0.8
    """
    a, b = _ranks(x), _ranks(y)
    a, b = a - a.mean(), b - b.mean()
    norm = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return round(float((a * b).sum()) / norm, 12) if norm else 1.0


def _ranks(values: Sequence[float]) -> np.ndarray:
    x = np.asarray(values, dtype=float)
    return (x[:, None] > x).sum(axis=1) + (x[:, None] == x).sum(axis=1) / 2


def summaries(rows: Sequence[Row]) -> list[Summary]:
    """One for each model and network, in order."""
    keys = dict.fromkeys((row.model, row.inter) for row in rows)
    return [summary([row for row in rows if (row.model, row.inter) == key]) for key in keys]


def tables(rows: Sequence[Row]) -> list[Any]:
    """For a terminal: the plans, fastest first, and the summaries."""
    from rich.table import Table

    plans = Table(title="step time, measured and predicted", title_justify="left")
    for column in ("model", "NIC", "plan", "measured", "spread", "predicted", "error", "compute", "predicted", "late"):
        plans.add_column(column, justify="left" if column in ("model", "NIC", "plan") else "right")
    for row in sorted(rows, key=lambda r: (r.model, r.inter, r.measured_s)):
        plans.add_row(row.model, row.inter, row.plan, _ms(row.measured_s), f"{row.spread:.1%}", _ms(row.predicted_s),
                      f"{row.error:+.1%}", _ms(row.busy_s), _ms(row.predicted_busy_s), f"{row.overrun:.1%}")
    overall = Table(title="overall", title_justify="left")
    for column in ("model", "NIC", "plans", "error: median", "mean", "largest", "Spearman", "search regret",
                   "joint over best other"):
        overall.add_column(column, justify="left" if column in ("model", "NIC") else "right")
    for s in summaries(rows):
        overall.add_row(s.model, s.inter, str(s.plans), f"{s.median_error:.1%}", f"{s.mean_error:.1%}",
                        f"{s.largest_error:.1%}", f"{s.spearman:.3f}",
                        "" if s.search_regret is None else f"{s.search_regret:.1%}",
                        "" if s.joint_ratio is None else f"{s.joint_ratio:.3f}")
    return [plans, overall]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
