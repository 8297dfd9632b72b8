"""What every benchmark states: machine, versions, repeats, spread."""

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
    """Seconds of repeated runs."""

    minimum_s: float
    median_s: float
    maximum_s: float
    repeats: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Spread:
        return Spread(min(seconds), statistics.median(seconds), max(seconds), len(seconds))


def conditions() -> dict[str, Any]:
    """Machine, versions and date."""
    import torch

    import autoparallel

    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?")
    memory = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory) / 2**20, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "autoparallel": autoparallel.__version__,
        "load": os.getloadavg()[0],
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def as_json(value: Any) -> Any:
    """Dataclasses as dicts, all the way down."""
    if isinstance(value, dict):
        return {k: as_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(v) for v in value]
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value
