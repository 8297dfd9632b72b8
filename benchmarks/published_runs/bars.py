"""The error bars of plans (`cost_models.accuracy`), from runs left out of the fit."""

from __future__ import annotations

from collections import defaultdict
from datetime import date

import numpy as np

from benchmarks.published_runs import fit
from benchmarks.published_runs.compare import compare, pairs_left_out
from benchmarks.published_runs.rows import Row, read
from cost_models.accuracy import FILE
from cost_models.profile import lineage, load

#: Shares of runs at which measured over predicted memory is kept.
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
#: So few runs of a kind show no error of their own.
FEWEST = 3
Errors = dict[str, dict[str, list[float]]]


def write(rows: list[Row]) -> None:
    """Write the file of error bars."""
    lines = [f"# Written on {date.today()} by `python -m benchmarks.published_runs --accuracy`: relative errors of",
             "# predicted step times, and measured over predicted peak memory. See accuracy.py."]
    for software, devices in sorted(errors(rows).items()):
        for device, found in devices.items():
            if len(found) >= FEWEST:
                p50, p90 = np.quantile(found, [0.5, 0.9])
                lines += ["", f'[time."{software}"."{device}"]', f"runs = {len(found)}", f"p50 = {p50:.3f}",
                          f"p90 = {p90:.3f}"]
    ratios = [1 / (1 + e) for p in compare(rows, load())[0] if (e := p.memory_error) is not None]
    lines += ["", "[memory]", f"runs = {len(ratios)}", f"shares = {list(SHARES)}",
              f"ratios = {[round(float(q), 3) for q in np.quantile(ratios, SHARES)]}"]
    FILE.write_text("\n".join(lines) + "\n", "utf-8")


def errors(rows: list[Row]) -> Errors:
    """Absolute relative errors of step times by software (each of its lineage) and device (its family, and "all"):
    under constants fitted without the run's source, or, of software that one source alone ran, without a fifth of its
    runs."""
    alone = _of_one_source(rows)
    apart = pairs_left_out(rows, lambda known: [sample.source for sample in known])
    folded = pairs_left_out(rows, lambda known: fit.folds(known, 5))
    found: Errors = defaultdict(lambda: defaultdict(list))
    for pairs, single in ((apart, False), (folded, True)):
        for pair in pairs:
            run = read(pair.row)
            if pair.error is not None and (run.stack in alone) == single:
                for software in lineage(run.stack)[1:]:
                    for device in (lineage(run.machine)[1], "all"):
                        found[software][device].append(abs(pair.error))
    return found


def _of_one_source(rows: list[Row]) -> set[str]:
    sources = defaultdict[str, set[str]](set)
    for pair in compare(rows, load())[0]:
        if pair.predicted_s is not None:
            sources[read(pair.row).stack].add(pair.source)
    return {software for software, known in sources.items() if len(known) == 1}


