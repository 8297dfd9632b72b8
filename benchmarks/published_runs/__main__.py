"""``python -m benchmarks.published_runs --runs FILE``: predictions against measurements.

``--fit`` fits the constants anew and writes them; ``--leave-one-out`` fits without each source in turn and predicts
that source, ``--folds 5`` without a fifth of all rows in turn; ``--accuracy`` does both and writes the error bars of
plans;
``--by-plan N`` prices N rows of each source by `autoparallel.plan` too, each row's plan given by hand."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.published_runs import bars, fit, report, routes
from benchmarks.published_runs.compare import Parts, compare, pairs_left_out, samples
from benchmarks.published_runs.report import Pair
from benchmarks.published_runs.rows import Row
from cost_models import accuracy
from cost_models.profile import FILE, dump, load


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published_runs", description=__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="JSON list of rows")
    parser.add_argument("--source", help="only rows whose id starts so")
    parser.add_argument("--rows", action="store_true", help="print each row too")
    parser.add_argument("--fit", action="store_true", help=f"fit the constants and write {FILE.name}")
    parser.add_argument("--leave-one-out", action="store_true", help="errors of each source under constants fitted "
                        "without it")
    parser.add_argument("--folds", type=int, default=0, help="errors of rows left out by chance, in so many parts")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--accuracy", action="store_true", help=f"write the errors by software and device to "
                        f"{accuracy.FILE.name}")
    parser.add_argument("--by-plan", type=int, default=0, metavar="N", help="rows of each source to price by plans of "
                        "captured models too")
    options = parser.parse_args()
    rows = json.loads(options.runs.read_text("utf-8"))
    rows = [row for row in rows if not options.source or str(row.get("id", "")).startswith(options.source)]
    if options.fit:
        refit(rows)
    pairs, abstained = compare(rows, load())
    print(show(pairs))
    print(without_contradictions(pairs))
    for (name, reason), count in sorted(abstained.items()):
        print(f"abstained: {name}, {count} rows: {reason}")
    if options.rows:
        print("\n".join(line(pair) for pair in pairs))
    figures: dict[str, Any] = {"fitted": by_source(pairs)}
    if options.accuracy:
        found = bars.LeftOut.of(rows)
        bars.write(rows, found)
        figures["left_out"], figures["inside"] = by_source(found.apart), found.coverage()
        print("\nEach source under constants fitted without it:\n" + report.table(figures["left_out"])
              + f"\n{report.over_sources(figures['left_out'])}"
              + "\ninside p50 and p90 of the other sources' errors, by what those ran:")
        for kind, (count, p50, p90) in figures["inside"].items():
            print(f"{kind}: {count} runs, {p50:.0%}, {p90:.0%}")
    if options.by_plan:
        figures["by_plan"] = routes.compare(rows, options.by_plan)
        print(f"\nBy plans of captured models, {options.by_plan} rows of each source:\n"
              + routes.table(figures["by_plan"]))
    if options.leave_one_out and not options.accuracy:
        figures["left_out"] = left_out(rows, lambda known: [sample.source for sample in known])
        print("\nEach source under constants fitted without it:\n" + report.table(figures["left_out"])
              + f"\n{report.over_sources(figures['left_out'])}")
    if options.folds:
        figures["folds"] = left_out(rows, lambda known: fit.folds(known, options.folds))
        print(f"\nEach row under constants fitted without it and others, 1 in {options.folds} of every source:\n"
              + report.table(figures["folds"]))
    if options.output:
        options.output.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")


def by_source(pairs: list[Pair]) -> dict[str, dict[str, Any]]:
    """Summaries of each source and of all."""
    groups = defaultdict[str, list[Pair]](list)
    for pair in pairs:
        groups[pair.source].append(pair)
    return {name: report.summary(group) for name, group in groups.items()} | {"all": report.summary(pairs)}


def show(pairs: list[Pair]) -> str:
    return report.table(by_source(pairs))


def without_contradictions(pairs: list[Pair]) -> str:
    """Regret where no row says that more work takes less time."""
    odd = report.contradicted(pairs)
    groups = report.plans(pair for number, pair in enumerate(pairs) if number not in odd)
    mean = sum(regret for _, _, regret in groups) / max(1, len(groups))
    return (f"without {len(odd)} rows that contradict one another (more work in less time): {len(groups)} jobs, regret "
            f"{100 * mean:.1f}")


def line(pair: Pair) -> str:
    """One row: seconds, and bytes where they were measured."""
    parts = [str(pair.row.get("id"))]
    if pair.error is not None:
        parts.append(f"{pair.measured_s:.4g} s measured, {pair.predicted_s:.4g} s predicted, {100 * pair.error:+.1f} %")
    if pair.memory_error is not None:
        gib = report.GIB
        parts.append(f"{pair.measured_bytes / gib:.1f} GiB, {pair.predicted_bytes / gib:.1f} predicted, "    # type: ignore[operator]
                     f"{100 * pair.memory_error:+.1f} %")
    return "  ".join(parts)


def refit(rows: list[Row]) -> None:
    known = list(samples(rows).values())
    table = fit.fit(known, load(), rounds=12, say=print)
    head = (f"Fitted on {date.today()} to {len(known)} published runs by `python -m benchmarks.published_runs --fit`;\n"
            "what neither fit.FREE nor a parent moves is as in priors.toml. Meaning and units: profile.py.")
    FILE.write_text(dump(table, head), "utf-8")


def left_out(rows: list[Row], parts: Parts) -> dict[str, dict[str, Any]]:
    """Each source's summary, every row under constants fitted without those of its part (`fit.Fitted`)."""
    return by_source(pairs_left_out(rows, parts)[0])


if __name__ == "__main__":
    main()
