"""Fitting the constants: Levenberg-Marquardt on log(predicted/measured), each constant held near its parent's.

A constant belongs to a device, a generation of software or a network, never to a row or a source. What is fitted is how
far it is from its prior, beyond how far its parent is from its own (`cost_models.profile.lineage`): what all devices
show moves those that nobody measured too. `SPREAD` says how far is far. So that 611 rows of small models do not
outvote the rest, a source's n rows count as sqrt(n). Shares are fitted as their logits, times as their logarithms.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published_runs.predict import profile_of
from benchmarks.published_runs.price import Pricer
from benchmarks.published_runs.rows import Run
from cost_models.profile import Table, lineage, load

PRIORS = Path(__file__).with_name("priors.toml")
SHARES = frozenset({"share", "share8", "share4", "misaligned", "memory", "attention", "legacy", "library", "attend",
                    "host_graphed", "hide_tensor", "hide_experts", "hide_data", "hide_pipe", "network"})
#: From here on an error counts less and less (Cauchy): whoever is far off lacks a fact, not a constant.
FAR = 0.12
#: A source's rows are off by this much, whatever the constants: what one standard deviation of a constant weighs.
NOISE = 0.055
#: One standard deviation of a constant about its parent, in its logit or logarithm. Guesses; those of `loss_bytes`,
#: `step_s` and `update_bytes` twice as far as was guessed, which predicts sources and rows left out better.
SPREAD = {
    "share": 0.25, "share8": 0.25, "share4": 0.25, "ramp": 0.4, "misaligned": 0.5, "memory": 0.3, "uneven": 0.5,
    "attention": 0.25, "legacy": 0.3, "library": 0.5, "attend": 0.5, "passes": 0.35, "eager": 0.4, "quantise": 0.4,
    "loss_bytes": 0.6,
    "host_s": 0.4, "host_backward": 0.2, "tied": 0.7, "host_experts": 0.7, "host_expert": 0.7, "host_graphed": 0.7,
    "host_call_s": 0.5, "micro_s": 0.7, "step_s": 1.4, "sync_s": 0.7, "update_bytes": 1.0,
    "hide_tensor": 0.7, "hide_experts": 1.0, "hide_data": 0.7, "hide_pipe": 0.7,
    "interference": 0.5, "network": 0.5,
}

Free = tuple[str, str, str]

#: Which runs a constant concerns, where not all of its device or software (the others need not be priced anew).
CONCERNS: dict[str, Callable[[Run], bool]] = {
    "share8": lambda run: run.plan.precision == "fp8",
    "share4": lambda run: run.plan.precision == "fp4",
    "quantise": lambda run: run.plan.precision != "bf16",
    **dict.fromkeys(("host_experts", "host_expert", "host_graphed", "hide_experts"),
                    lambda run: run.model.experts is not None),
    **dict.fromkeys(("host_call_s", "sync_s", "hide_tensor", "tied"), lambda run: run.plan.tensor > 1),
    "hide_pipe": lambda run: run.plan.pipeline > 1,
    "interference": lambda run: run.plan.fsdp,
    "uneven": lambda run: run.plan.devices > 1,
    "eager": lambda run: run.stack == "torch-eager",
}

#: (table, entry, name) of what is fitted; all else stays at its prior, but for what its parents do.
FREE: tuple[Free, ...] = tuple(
    (kind, entry, name)
    for kind, entries, names in (
        ("devices", "default", "share share8 share4 ramp misaligned memory uneven attention legacy"),
        ("devices", "v100 a100 a100-sxm-40 hopper h100-hbm2e blackwell gb200 gb300 b200 b300", "share attention"),
        ("devices", "hopper h100-hbm2e blackwell gb200 gb300 b200 b300", "share8"),
        ("devices", "gb200 gb300", "share4"),
        ("devices", "a100 hopper blackwell", "ramp memory"),
        ("stacks", "default", "passes eager quantise loss_bytes host_s host_backward host_experts host_expert "
                              "host_graphed host_call_s tied micro_s step_s sync_s update_bytes interference"),
        ("stacks", "megatron", "loss_bytes"),
        ("stacks", "megatron megatron-2021 megatron-2022 megatron-deepspeed", "library passes hide_tensor"),
        ("stacks", "megatron-deepspeed", "host_s micro_s step_s sync_s update_bytes"),
        ("stacks", "traced", "library passes loss_bytes hide_tensor host_s host_backward host_call_s tied micro_s "
                             "step_s sync_s update_bytes"),
        ("stacks", "composer", "attend passes loss_bytes interference step_s"),
        ("stacks", "torch", "quantise interference"),
        ("stacks", "torch-fsdp", "passes quantise interference"),
        ("stacks", "core", "passes quantise hide_tensor hide_pipe"),
        ("stacks", "nemo", "passes quantise hide_tensor hide_pipe hide_experts host_experts step_s"),
        ("stacks", "nemo-25.09 nemo-25.11 nemo-26.02 nemo-26.06", "passes hide_experts"),
        ("networks", "default omni-path roce infiniband", "network"),
    )
    for entry in entries.split() for name in names.split()
)


@dataclass(frozen=True)
class Sample:
    """A run and its measured step time."""

    run: Run
    measured_s: float
    source: str


def log_errors(table: Table, samples: Iterable[Sample]) -> np.ndarray:
    """log(predicted/measured) of each sample."""
    return np.array([math.log(Pricer(s.run, profile_of(s.run, table)).step().step_s / s.measured_s) for s in samples])


def fit(samples: Sequence[Sample], start: Table | None = None, rounds: int = 12,
        say: Callable[[str], None] = lambda line: None) -> Table:
    """The constants that the samples suggest; ``start`` only says where the search begins, else at the priors. Slopes,
    the larger part of the work, are taken once a round."""
    task = _Fit(samples)
    x = task.shifts(start or task.priors)
    e = task.exact(x)
    for number in range(rounds):
        before = task.cost(e, x)
        x = task.descend(x, task.slopes(e, x))
        e = task.exact(x)
        size = np.abs(np.expm1(e))
        cost = task.cost(e, x)
        say(f"round {number + 1}: cost {cost:.4f}, median error {np.median(size):.4f}, mean {size.mean():.4f}")
        if before - cost < 1e-3 * before:
            break
    return task.table(x)


class Fitted:
    """Fitted constants, and how the samples' errors change with them: `without` fits to some of the samples anew, with
    errors taken as linear about these constants."""

    def __init__(self, samples: Sequence[Sample], table: Table) -> None:
        self.task = _Fit(samples)
        self.x, self.errors = self.task.shifts(table), log_errors(table, samples)
        self.slopes = self.task.slopes(self.errors, self.x)

    def without(self, parts: Sequence[object]) -> Iterator[tuple[object, Table]]:
        """For each part of the samples the constants that a fit without them gives."""
        for part in dict.fromkeys(parts):
            kept = np.array([other != part for other in parts], dtype=float)
            yield part, self.task.table(self.task.descend(self.x, self.slopes, kept, self._near))

    def _near(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(self.errors + self.slopes @ (x - self.x))


def folds(samples: Sequence[Sample], count: int, seed: int = 0) -> list[int]:
    """A part for each sample, by chance: as many samples to each part, and of each source as nearly so as can be."""
    order = np.random.default_rng(seed).permutation(len(samples))
    dealt = sorted(order, key=lambda n: samples[n].source)
    found = np.zeros(len(samples), dtype=int)
    found[dealt] = np.arange(len(samples)) % count
    return found.tolist()


class _Fit:
    """``x``: by how many standard deviations each constant is off its prior, its parents' part taken out."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples
        count = Counter(sample.source for sample in samples)
        self.weight = np.array([count[sample.source] ** -0.5 for sample in samples])
        self.priors = load(PRIORS)
        self.rows = {free: [n for n, s in enumerate(samples) if concerns(free, s.run)] for free in FREE}
        self.free = [free for free in FREE if self.rows[free]]

    @cached_property
    def given(self) -> list[tuple[Free, float, list[int]]]:
        """Every value of the table: its prior on the scale without limits, and which shifts move it."""
        found = {(kind, entry, name) for kind, entries in self.priors.items() for entry, values in entries.items()
                 for name in values} | set(FREE)
        place = {free: n for n, free in enumerate(self.free)}
        return [((kind, entry, name), inward(name, lookup(self.priors, (kind, entry, name))),
                 [place[kind, at, name] for at in lineage(entry) if (kind, at, name) in place])
                for kind, entry, name in sorted(found, key=lambda at: (at[0], len(lineage(at[1])), at[1]))]

    def table(self, x: np.ndarray) -> Table:
        table: Table = {kind: {} for kind in self.priors}
        for (kind, entry, name), prior, movers in self.given:
            value = lookup(self.priors, (kind, entry, name))
            if movers:
                value = outward(name, prior + SPREAD[name] * float(x[movers].sum()))
            table[kind].setdefault(entry, {})[name] = value
        return table

    def shifts(self, table: Table) -> np.ndarray:
        """The inverse of `table`."""
        off = {free: (inward(free[2], lookup(table, free)) - inward(free[2], lookup(self.priors, free)))
               / SPREAD[free[2]] for free in self.free}
        x = []
        for kind, entry, name in self.free:
            above = [at for at in lineage(entry)[:-1] if (kind, at, name) in off]
            x.append(off[kind, entry, name] - (off[kind, above[-1], name] if above else 0.0))
        return np.array(x)

    def cost(self, e: np.ndarray, x: np.ndarray, kept: Any = 1.0) -> float:
        return float((kept * self.weight) @ (FAR**2 * np.log1p((e / FAR) ** 2)) + NOISE**2 * (x @ x))

    def slopes(self, e: np.ndarray, x: np.ndarray) -> np.ndarray:
        """d e/d x by differences, each over the rows that the constant concerns."""
        slopes = np.zeros((len(e), len(x)))
        for column, free in enumerate(self.free):
            moved, rows = x.copy(), self.rows[free]
            moved[column] += 0.05
            slopes[rows, column] = (log_errors(self.table(moved), [self.samples[r] for r in rows]) - e[rows]) / 0.05
        return slopes

    def exact(self, x: np.ndarray) -> np.ndarray:
        return log_errors(self.table(x), self.samples)

    def descend(self, x: np.ndarray, slopes: np.ndarray, kept: Any = 1.0,
                errors: Callable[[np.ndarray], np.ndarray] | None = None) -> np.ndarray:
        """At most 12 damped steps, until one gains less than a thousandth; ``errors``: at constants, else priced."""
        errors = errors or self.exact
        e, damping = errors(x), 1e-2
        cost = self.cost(e, x, kept)
        for _ in range(12):
            weight = kept * self.weight / (1 + (e / FAR) ** 2)
            curvature = slopes.T @ (weight[:, None] * slopes) + NOISE**2 * np.eye(len(x))
            slope = slopes.T @ (weight * e) + NOISE**2 * x
            for _ in range(6):
                step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -slope).clip(-2.0, 2.0)
                tried = errors(x + step)
                lower = self.cost(tried, x + step, kept)
                if lower < cost:
                    break
                damping *= 5
            else:
                break
            gained, x, e, cost, damping = cost - lower, x + step, tried, lower, max(damping / 5, 1e-4)
            if gained < 1e-3 * cost:
                break
        return x


def concerns(free: Free, run: Run) -> bool:
    """Whether a run's step time depends on a constant."""
    kind, entry, name = free
    return entry in lineage(names(run)[kind]) and CONCERNS.get(name, lambda run: True)(run)


def names(run: Run) -> dict[str, str]:
    """What a run's constants are looked up by."""
    return {"devices": run.machine, "stacks": run.stack, "networks": run.network}


def lookup(table: Table, free: Free) -> float:
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
