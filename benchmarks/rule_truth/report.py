"""Figures per op and per family: a table to read and an object to keep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from benchmarks.rule_truth.study import Counts, Judged, OpStudy

COLUMNS = ("ops", "of them without a rule", "cases", "possible", "right", "wrong", "missed", "share", "DTensor right",
           "DTensor not right", "DTensor's alone")
LINES_KEPT = 12


@dataclass(frozen=True)
class Figures:
    """Of several cases, each counted once. An op is without a rule where no case of it has one."""

    ops: int
    ops_without_rule: int
    cases: int
    counts: Counts
    dtensor_alone: int

    @property
    def share(self) -> float:
        return self.counts.right / self.counts.possible if self.counts.possible else 1.0

    def row(self) -> list[str]:
        c = self.counts
        return [*map(str, (self.ops, self.ops_without_rule, self.cases, c.possible, c.right, c.wrong,
                           c.possible - c.right)), f"{self.share:.1%}",
                *map(str, (c.dtensor_right, c.dtensor_wrong, self.dtensor_alone))]

    def as_json(self) -> dict[str, Any]:
        return {**{k: v for k, v in asdict(self).items() if k != "counts"}, **asdict(self.counts),
                "missed": self.counts.possible - self.counts.right, "share": round(self.share, 4)}


def distinct(studies: Iterable[OpStudy]) -> list[Judged]:
    """The cases of all ops of the database, each once."""
    return list({judged.case: judged for study in studies for judged in study.judged}.values())


def figures(judged: Sequence[Judged]) -> Figures:
    known: dict[str, bool] = defaultdict(bool)
    for j in judged:
        known[j.op] |= j.known
    total = sum((j.counts for j in judged), Counts())
    return Figures(len(known), sum(not k for k in known.values()), len(judged), total,
                   sum(len(j.dtensor_only) for j in judged))


def grouped(judged: Iterable[Judged], by: str) -> dict[str, Figures]:
    """``by``: "op" (of the normal form) or "family"."""
    groups: dict[str, list[Judged]] = defaultdict(list)
    for j in judged:
        groups[getattr(j, by)].append(j)
    return {name: figures(group) for name, group in sorted(groups.items())}


def table(title: str, rows: Mapping[str, Figures]) -> Table:
    made = Table("", *COLUMNS, title=title)
    for name, of_it in rows.items():
        made.add_row(name, *of_it.row())
    return made


def line(study: OpStudy) -> str:
    """One op of the database, as it is done."""
    c = figures(study.judged).counts
    left_out = "; ".join(f"{why} ({count})" for why, count in study.left_out.items())
    return (f"{study.name}: {study.num_samples} samples, {len(study.judged)} cases; possible {c.possible}, "
            f"right {c.right}, wrong {c.wrong}; DTensor {c.dtensor_right}, {c.dtensor_wrong}"
            + (f"; left out: {left_out}" if left_out else ""))


def lines_by_op(judged: Iterable[Judged], what: str) -> dict[str, list[str]]:
    """Of each op the first few lines of ``wrong``, ``missed``, ``dtensor_only`` or ``dtensor_wrong``."""
    found: dict[str, list[str]] = defaultdict(list)
    for j in judged:
        found[j.op] += getattr(j, what)
    return {op: lines[:LINES_KEPT] for op, lines in sorted(found.items()) if lines}
