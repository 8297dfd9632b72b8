"""The error bars of plans (`cost_models.accuracy`), from runs left out of the fit."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np

from benchmarks.published_runs import fit
from benchmarks.published_runs.compare import compare, pairs_left_out
from benchmarks.published_runs.report import Pair
from benchmarks.published_runs.rows import Row, Run, read
from cost_models.accuracy import FILE, error_bar
from cost_models.profile import Profile, lineage, load

#: Shares of runs at which measured over predicted memory is kept.
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
#: So few runs of a kind show no error of their own.
FEWEST = 3
Bars = dict[str, dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class Error:
    """Absolute relative error of a run's step time under constants fitted without it."""

    size: float
    run: Run
    source: str


@dataclass(frozen=True)
class LeftOut:
    """Runs under constants fitted without their source (``apart``), and without a fifth of all runs (``folded``)."""

    apart: list[Pair]
    folded: list[Pair]

    @classmethod
    def of(cls, rows: list[Row]) -> LeftOut:
        return cls(*pairs_left_out(rows, lambda known: [sample.source for sample in known],
                                   lambda known: fit.folds(known, 5)))

    def errors(self) -> list[Error]:
        """Of every run, without its source; of software that one source alone ran, without a fifth of its runs."""
        apart, sources = _errors(self.apart), defaultdict[str, set[str]](set)
        for error in apart:
            sources[error.run.stack].add(error.source)
        alone = {software for software, known in sources.items() if len(known) == 1}
        return [error for errors, single in ((apart, False), (_errors(self.folded), True)) for error in errors
                if (error.run.stack in alone) == single]

    def coverage(self) -> dict[str, tuple[int, float, float]]:
        """Number of runs, and shares of them whose error, without their source, is inside p50 and p90 of bars that know
        nothing of their source either: of software that other sources ran on this generation of devices ("like it"),
        only on others ("elsewhere"), or that none ran ("none")."""
        known, inside = self.errors(), defaultdict[str, list[tuple[bool, bool]]](list)
        for source in dict.fromkeys(pair.source for pair in self.apart):
            bars = table(error for error in known if error.source != source)
            for error in _errors(pair for pair in self.apart if pair.source == source):
                bar = error_bar(Profile.of(error.run.machine, error.run.stack), bars, list(kinds_of(error.run)),
                                error.run.plan.devices)
                elsewhere = "elsewhere" if "extrapolated" in bar.basis else "like it"
                kind = "none" if bar.basis.startswith("no ") else elsewhere
                inside[kind].append((error.size <= bar.p50, error.size <= bar.p90))
        return {kind: (len(found), *_shares(found)) for kind, found in inside.items()}


def _shares(found: list[tuple[bool, bool]]) -> tuple[float, float]:
    first, second = np.mean(found, axis=0)
    return float(first), float(second)


def write(rows: list[Row], left_out: LeftOut) -> None:
    """Write the file of error bars."""
    ratios = [1 / (1 + e) for p in compare(rows, load())[0] if (e := p.memory_error) is not None]
    FILE.write_text(written(table(left_out.errors()), len(ratios), np.quantile(ratios, SHARES).tolist()), "utf-8")


def written(bars: Bars, runs: int, ratios: Sequence[float]) -> str:
    """The file of error bars as text; ``ratios`` of measured to predicted memory at `SHARES`, of so many runs."""
    lines = [f"# Written on {date.today()} by `python -m benchmarks.published_runs --accuracy`: relative errors of",
             "# predicted step times, and measured over predicted peak memory. See accuracy.py."]
    for software, devices in sorted(bars.items()):
        for device, bar in devices.items():
            lines += ["", f'[time."{software}"."{device}"]', f"runs = {bar['runs']}", f"p50 = {bar['p50']:.3f}",
                      f"p90 = {bar['p90']:.3f}", f"kinds = {json.dumps(bar['kinds'])}",
                      f"most_devices = {bar['most_devices']}"]
    lines += ["", "[memory]", f"runs = {runs}", f"shares = {list(SHARES)}",
              f"ratios = {[round(float(q), 3) for q in ratios]}"]
    return "\n".join(lines) + "\n"


def table(errors: Iterable[Error]) -> Bars:
    """Number of runs and quantiles of their errors, what kinds of plans they had and on how many devices at most, by
    software (each of its lineage) and device (its family, and "all")."""
    found: dict[str, dict[str, list[Error]]] = defaultdict(lambda: defaultdict(list))
    for error in errors:
        for software in lineage(error.run.stack)[1:]:
            for device in (lineage(error.run.machine)[1], "all"):
                found[software][device].append(error)
    return {software: {device: _bar(some) for device, some in devices.items() if len(some) >= FEWEST}
            for software, devices in found.items()}


def _bar(errors: list[Error]) -> dict[str, Any]:
    p50, p90 = np.quantile([error.size for error in errors], [0.5, 0.9])
    kinds = {kind for error in errors for kind in kinds_of(error.run)}
    return {"runs": len(errors), "p50": float(p50), "p90": float(p90), "kinds": sorted(kinds),
            "most_devices": max(error.run.plan.devices for error in errors)}


def kinds_of(run: Run) -> Iterator[str]:
    """The kinds of `cost_models.accuracy.KINDS` that a run's plan has."""
    yield from ["pipeline"] if run.plan.pipeline > 1 else []
    yield from ["tensor or context"] if run.plan.tensor > 1 or run.plan.context > 1 else []
    yield from ["expert"] if run.model.experts is not None else []


def _errors(pairs: Iterable[Pair]) -> list[Error]:
    return [Error(abs(pair.error), read(pair.row), pair.source) for pair in pairs if pair.error is not None]
