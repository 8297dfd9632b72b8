"""How far predictions are off: per source, and among plans of one job."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.published_runs.rows import Row

GIB = 2.0**30


@dataclass(frozen=True)
class Pair:
    """A row with what was predicted; seconds, and bytes where they were measured."""

    row: Row
    source: str
    measured_s: float | None
    predicted_s: float | None
    measured_bytes: float | None = None
    predicted_bytes: float | None = None

    @property
    def error(self) -> float | None:
        """(predicted - measured)/measured step time."""
        if self.measured_s is None or self.predicted_s is None:
            return None
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float | None:
        """The same for peak memory."""
        if not self.measured_bytes or not self.predicted_bytes:
            return None
        return self.predicted_bytes / self.measured_bytes - 1


def measured_s(row: Row) -> float | None:
    """Measured step time, else what the row derives from a measured throughput."""
    value = (row.get("measured") or {}).get("step_time_s") or (row.get("derived") or {}).get("step_time_s")
    return float(value) if isinstance(value, int | float) and value > 0 else None


def measured_bytes(row: Row) -> float | None:
    """Measured peak memory; rows whose notes say GiB, or that a tool of torch printed, count 2^30."""
    value = (row.get("measured") or {}).get("peak_memory_gb")
    if not isinstance(value, int | float) or value <= 0:
        return None
    return float(value) * (GIB if "GiB" in str(row.get("notes") or "") else 1e9)


def source(row: Row) -> str:
    """The prefix of a row's id, else its source's title."""
    name = str(row.get("id") or "").rsplit("-", 1)[0]
    return name or str((row.get("source") or {}).get("title") or "unknown")


def job(row: Row) -> tuple[object, ...]:
    """What must agree for rows to be plans of one job: software, model, hardware, devices, batch."""
    m, h, p = (row.get(key) or {} for key in ("model", "hardware", "plan"))
    model = tuple(m.get(key) for key in ("name", "layers", "hidden", "heads", "seq_len"))
    where = (row.get("source") or {}).get("locator") if source(row) == "mbridge" else None
    return (source(row), where, *model, h.get("gpu"), h.get("n_gpus"), p.get("global_batch"), p.get("precision"))


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Correlation of ranks; ties share their mean rank.

    >>> spearman([1, 2, 3], [10, 30, 20])
    0.5
    """
    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(), y - y.mean()
    scale = math.sqrt(float((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale else math.nan


def ranks(values: Sequence[float]) -> np.ndarray:
    """From 0; ties share their mean."""
    _, place, count = np.unique(np.asarray(values, dtype=float), return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count + 1) / 2)[place]


def plans(pairs: Iterable[Pair]) -> list[tuple[int, float, float]]:
    """For each job with three plans or more: how many, Spearman's rho of the times, and regret: how much longer the
    plan predicted fastest takes than the fastest."""
    jobs: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for pair in pairs:
        if pair.measured_s and pair.predicted_s:
            jobs[job(pair.row)].append((pair.measured_s, pair.predicted_s))
    found = []
    for times in jobs.values():
        if len(times) < 3:
            continue
        measured, predicted = zip(*times, strict=True)
        chosen = measured[int(np.argmin(predicted))]
        found.append((len(times), spearman(measured, predicted), chosen / min(measured) - 1))
    return found


def contradicted(pairs: Sequence[Pair]) -> set[int]:
    """Numbers of rows that cannot both be typical: of two with the same plan, the one that does more in each
    micro-batch (more sequences, or wider layers) took less time."""
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, pair in enumerate(pairs):
        if pair.measured_s:
            alike[_kind(pair)].append(number)
    return {number for numbers in alike.values() for a in numbers for b in numbers
            if (pairs[a].measured_s or 0.0) > (pairs[b].measured_s or 0.0) and _does_less(pairs[a].row, pairs[b].row)
            for number in (a, b)}


def _kind(pair: Pair) -> tuple[object, ...]:
    """All that rows must agree in, but how much a micro-batch is and how wide layers are."""
    m, h, p = (dict(pair.row.get(key) or {}) for key in ("model", "hardware", "plan"))
    steps = (p.pop("global_batch", None) or 0) / ((p.get("dp") or 1) * (p.pop("micro_batch", None) or 1))
    model = tuple(m.get(key) for key in ("layers", "seq_len", "vocab"))
    return (pair.source, model, steps, str(sorted(h.items())), str(sorted(p.items())))


def _does_less(a: Row, b: Row) -> bool:
    """Whether one micro-batch of a is less work than one of b."""
    sizes = [((row.get("model") or {}).get("hidden") or 0, (row.get("plan") or {}).get("micro_batch") or 0)
             for row in (a, b)]
    return sizes[0] != sizes[1] and all(x <= y for x, y in zip(*sizes, strict=True))


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The figures of one source, or of all."""
    errors = np.array([pair.error for pair in pairs if pair.error is not None])
    memory = np.array([pair.memory_error for pair in pairs if pair.memory_error is not None])
    groups = plans(pairs)
    rho = [r for _, r, _ in groups if not math.isnan(r)]
    return {
        "rows": len(pairs),
        "predicted": len(errors),
        "median": _mean(np.median, np.abs(errors)),
        "mean": _mean(np.mean, np.abs(errors)),
        "p90": _mean(lambda e: np.quantile(e, 0.9), np.abs(errors)),
        "bias": _mean(np.mean, errors),
        "jobs": len(groups),
        "spearman": float(np.mean(rho)) if rho else None,
        "regret": float(np.mean([g for _, _, g in groups])) if groups else None,
        "memory_rows": len(memory),
        "memory_mean": _mean(np.mean, np.abs(memory)),
        "memory_median": _mean(np.median, np.abs(memory)),
    }


def _mean(what: Any, values: np.ndarray) -> float | None:
    return float(what(values)) if len(values) else None


def table(by_source: Mapping[str, Mapping[str, Any]]) -> str:
    """The summaries as a Markdown table, errors in per cent."""
    head = ("source", "rows", "predicted", "median", "mean", "p90", "bias", "jobs", "Spearman", "regret",
            "memory: rows", "mean")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, s in by_source.items():
        cells = [name, s["rows"], s["predicted"], *(_percent(s[key]) for key in ("median", "mean", "p90")),
                 _percent(s["bias"], "+"), s["jobs"], "" if s["spearman"] is None else f"{s['spearman']:.2f}",
                 _percent(s["regret"]), s["memory_rows"], _percent(s["memory_mean"])]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def over_sources(by_source: Mapping[str, Mapping[str, Any]]) -> str:
    """The median over sources of their median errors."""
    medians = [s["median"] for name, s in by_source.items() if name != "all" and s["median"] is not None]
    return f"median over {len(medians)} sources: {_percent(_mean(np.median, np.array(medians)))}"


def _percent(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{100 * value:{sign}.1f}"
