"""What every benchmark states: machine, versions, repeats, spread, date."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Seconds of repeated runs: ``Spread.of([3.0, 1.0, 2.0])`` is minimum 1, quartiles 1.5, 2 and 2.5, maximum 3, of 3
    repeats."""

    minimum_s: float
    lower_s: float
    median_s: float
    upper_s: float
    maximum_s: float
    repeats: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Spread:
        return Spread(min(seconds), *quartiles(seconds), max(seconds), len(seconds))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile, each interpolated between its neighbours.

    >>> quartiles([3.0, 1.0, 2.0])
    (1.5, 2.0, 2.5)
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, median, upper


def conditions() -> dict[str, Any]:
    """Machine, versions, date, and how busy the machine was with other work (load average at this moment)."""
    import torch

    import autoparallel

    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?")
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(_kib("/proc/meminfo", "MemTotal") / 2**20, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "autoparallel": autoparallel.__version__,
        "load_average_1_minute": round(os.getloadavg()[0], 2),
    }


def cpu_s() -> float:
    """CPU seconds of this process and of those that it has started and seen end."""
    return sum(os.times()[:4])


def peak_memory_bytes() -> int:
    """The most resident memory this process ever had.

    From VmHWM: ``ru_maxrss`` survives exec, so that a subprocess would report its parent's peak.
    """
    return _kib("/proc/self/status", "VmHWM") * 2**10


def _kib(path: str, key: str) -> int:
    return next((int(line.split()[1]) for line in _lines(path) if line.startswith(key + ":")), 0)


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def as_json(value: Any) -> Any:
    """Dataclasses as dicts, all the way down."""
    if hasattr(value, "__dataclass_fields__"):
        return as_json(asdict(value))
    if isinstance(value, dict):
        return {k: as_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(v) for v in value]
    return value
