"""Fitting the constants: Levenberg-Marquardt on log(predicted/measured), drawn back to the priors.

A constant belongs to a device, a generation of software or a network, never to a row or a source. So that 611 rows of
small models do not outvote the rest, a source's n rows count as sqrt(n); errors beyond 8 % count linearly (Huber).
Shares are fitted as their logits, times as their logarithms.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published_runs.constants import Constants, Table, lineage, load
from benchmarks.published_runs.price import Pricer
from benchmarks.published_runs.rows import Run

PRIORS = Path(__file__).with_name("priors.toml")
SHARES = frozenset({"share", "share8", "share4", "misaligned", "memory", "attention", "legacy", "library", "attend",
                    "hide_tensor", "hide_experts", "hide_data", "hide_pipe", "network"})
HUBER = 0.08
#: A constant one unit (of its logit or logarithm) off its prior weighs as much as a source of one row 4 % off.
PULL = 0.04

_DEEPSPEED = ("library", "passes", "sync_s", "host_s", "host_backward", "host_call_s", "micro_s", "step_s")
_BLACKWELL = ("b200", "b300", "gb200", "gb300")

#: (table, entry, name) of what is fitted; all else stays at its prior.
FREE: tuple[tuple[str, str, str], ...] = (
    *(("devices", entry, "share") for entry in ("default", "v100", "a100", "a100-sxm-40", "h100", "h100-hbm2e")),
    *(("devices", entry, "share8") for entry in ("h100", "h100-hbm2e", *_BLACKWELL)),
    *(("devices", entry, "share4") for entry in ("gb200", "gb300")),
    *(("devices", entry, "ramp") for entry in ("default", "a100")),
    *(("devices", entry, "attention") for entry in ("default", "a100", "h100", "h100-hbm2e")),
    ("devices", "h100", "legacy"), ("devices", "default", "memory"), ("devices", "default", "misaligned"),
    *(("stacks", "megatron-2021", name) for name in ("library", "passes")),
    *(("stacks", "megatron-2022", name) for name in ("library", "passes", "hide_tensor")),
    *(("stacks", "megatron-deepspeed", name) for name in _DEEPSPEED),
    *(("stacks", "composer", name) for name in ("library", "attend", "passes", "loss_bytes", "interference", "step_s")),
    *(("stacks", "torch-fsdp", name) for name in ("passes", "quantise", "interference")),
    *(("stacks", "megatron-core", name) for name in ("passes", "hide_tensor")),
    ("stacks", "nemo", "hide_tensor"), ("stacks", "nemo", "hide_pipe"), ("stacks", "nemo", "quantise"),
    ("stacks", "nemo", "step_s"),
    *(("stacks", f"nemo-{release}", name) for release in ("25.09", "25.11", "26.02", "26.06")
      for name in ("passes", "hide_experts", "host_experts")),
    *(("networks", entry, "network") for entry in ("default", "omni-path", "roce", "infiniband")),
)


@dataclass(frozen=True)
class Sample:
    """A run and its measured step time."""

    run: Run
    measured_s: float
    source: str


def log_errors(table: Table, samples: Iterable[Sample]) -> np.ndarray:
    """log(predicted/measured) of each sample."""
    return np.array([math.log(Pricer(s.run, Constants.of(s.run, table)).step().step_s / s.measured_s) for s in samples])


def fit(samples: Sequence[Sample], start: Table | None = None, rounds: int = 8,
        say: Callable[[str], None] = lambda line: None) -> Table:
    """The constants that the samples suggest, starting at ``start`` or the priors."""
    return _Fit(samples, start or load(PRIORS), say).go(rounds)


def warm(fitted: Table) -> Table:
    """The priors with what is fitted taken from earlier constants: a start nearer to the end."""
    table = load(PRIORS)
    for kind, entry, name in FREE:
        if name in fitted[kind].get(entry, {}):
            table[kind].setdefault(entry, {})[name] = fitted[kind][entry][name]
    return table


def leave_one_out(samples: Sequence[Sample], fitted: Table) -> Iterator[tuple[str, Table]]:
    """For each source the constants that the fit would give without its rows.

    By linear response: log errors are taken as linear in the (transformed) constants around the full fit, and the same
    cost is minimised without the source's rows. A constant that only those rows determine goes back to its prior.
    """
    task = _Fit(samples, fitted, lambda line: None)
    x = task.current()
    e = log_errors(task.table(x), samples)
    slopes = task.slopes(e, x)
    for source in dict.fromkeys(sample.source for sample in samples):
        kept = np.array([sample.source != source for sample in samples], dtype=float)
        step = np.zeros_like(x)
        for _ in range(30):
            curvature, slope = task.normal(e + slopes @ step, slopes, x + step, kept)
            step = step - np.linalg.solve(curvature, slope)
        yield source, task.table(x + step)


class _Fit:
    def __init__(self, samples: Sequence[Sample], start: Table, say: Callable[[str], None]) -> None:
        self.samples, self.start, self.say = samples, start, say
        count = Counter(sample.source for sample in samples)
        self.weight = np.array([count[sample.source] ** -0.5 for sample in samples])
        priors = load(PRIORS)
        self.rows = [[n for n, sample in enumerate(samples) if concerns(free, sample.run, priors)] for free in FREE]
        self.free = [n for n, rows in enumerate(self.rows) if rows]
        self.prior = np.array([inward(FREE[n][2], lookup(priors, FREE[n])) for n in self.free])

    def table(self, x: np.ndarray) -> Table:
        table = deepcopy(self.start)
        for n, value in zip(self.free, x, strict=True):
            kind, entry, name = FREE[n]
            table[kind].setdefault(entry, {})[name] = outward(name, float(value))
        return table

    def cost(self, e: np.ndarray, x: np.ndarray) -> float:
        size = np.abs(e)
        huber = np.where(size < HUBER, e**2, 2 * HUBER * size - HUBER**2)
        return float(self.weight @ huber + PULL**2 * ((x - self.prior) ** 2).sum())

    def slopes(self, e: np.ndarray, x: np.ndarray) -> np.ndarray:
        """d e/d x by differences, each over the rows that the constant concerns."""
        slopes = np.zeros((len(e), len(x)))
        for column, n in enumerate(self.free):
            moved = x.copy()
            moved[column] += 0.02
            rows = self.rows[n]
            slopes[rows, column] = (log_errors(self.table(moved), [self.samples[r] for r in rows]) - e[rows]) / 0.02
        return slopes

    def current(self) -> np.ndarray:
        return np.array([inward(FREE[n][2], lookup(self.start, FREE[n])) for n in self.free])

    def normal(
        self, e: np.ndarray, slopes: np.ndarray, x: np.ndarray, kept: Any = 1.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Curvature and slope of half the cost, with Huber's weights, over the rows ``kept``."""
        weight = kept * self.weight * np.minimum(1, HUBER / np.maximum(np.abs(e), 1e-9))
        curvature = slopes.T @ (weight[:, None] * slopes) + PULL**2 * np.eye(len(x))
        return curvature, slopes.T @ (weight * e) + PULL**2 * (x - self.prior)

    def go(self, rounds: int) -> Table:
        x = self.current()
        e, damping = log_errors(self.table(x), self.samples), 1e-2
        cost = self.cost(e, x)
        for number in range(rounds):
            curvature, slope = self.normal(e, self.slopes(e, x), x)
            for _ in range(6):
                step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -slope).clip(-0.7, 0.7)
                tried = log_errors(self.table(x + step), self.samples)
                lower = self.cost(tried, x + step)
                if lower < cost:
                    break
                damping *= 5
            else:
                break
            gained, x, e, cost, damping = cost - lower, x + step, tried, lower, max(damping / 5, 1e-4)
            size = np.abs(np.expm1(e))
            self.say(f"round {number + 1}: cost {cost:.4f}, median error {np.median(size):.4f}, mean {size.mean():.4f}")
            if gained < 1e-3 * cost:
                break
        return self.table(x)


def concerns(free: tuple[str, str, str], run: Run, table: Table) -> bool:
    """Whether a run takes that constant, rather than one of a narrower entry."""
    kind, entry, name = free
    path = lineage({"devices": run.machine, "stacks": run.stack, "networks": run.network}[kind])
    given = [at for at in path if name in table[kind].get(at, {}) or (kind, at, name) in FREE]
    return given[-1] == entry


def lookup(table: Table, free: tuple[str, str, str]) -> float:
    """The value of a constant, inherited if its entry has none of its own."""
    kind, entry, name = free
    found = [table[kind][at][name] for at in lineage(entry) if name in table[kind].get(at, {})]
    return found[-1]


def inward(name: str, value: float) -> float:
    """To a scale without limits."""
    if name in SHARES:
        value = min(max(value, 1e-3), 1 - 1e-3)
        return math.log(value / (1 - value))
    return math.log(max(value, 1e-9))


def outward(name: str, value: float) -> float:
    """And back."""
    return 1 / (1 + math.exp(-value)) if name in SHARES else math.exp(value)
