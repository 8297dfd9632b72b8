"""What torch's profiler recorded of a call, as plain events: the only reader of its files.

The events are read from the trace that `torch.profiler` exports, whose form is documented, rather than from its Python
objects, which leave out what links a kernel to the op that launched it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

#: The name of the range around the whole call.
WHOLE = "autoparallel: the step"
#: Kinds of events that run on a GPU.
ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
#: Communication that runs beside the thread that asked for it, as the process groups record it.
BESIDE = ("gloo:", "nccl:")
#: No backward's sequence number is as large: torch gives this one to what has none.
MOST_SEQUENCE = 2**63


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event: seconds from the start of the call; the thread that it ran on, or the ``stream`` of a GPU. ``link``:
    the number that an op and the kernels that it launched have in common. ``sequence``: the number that a forward op
    and its backward have in common (-1: none)."""

    name: str
    kind: str
    thread: int
    start_s: float
    end_s: float
    link: int = -1
    sequence: int = -1
    stream: int | None = None

    @property
    def is_beside(self) -> bool:
        return self.name.startswith(BESIDE) and self.stream is None


@dataclass(frozen=True)
class Recording:
    """The events of a call by start, its seconds, and (seconds, bytes) of the GPU's tensors (empty on CPU)."""

    events: tuple[Recorded, ...]
    total_s: float
    held: tuple[tuple[float, float], ...] = ()


def recorded(call: Callable[[], object], device: torch.device) -> Recording:
    """Run ``call`` under the profiler."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, profile_memory=on_gpu) as found, record_function(WHOLE):
        call()
        if on_gpu:
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return _read(events)


def _read(events: list[dict[str, Any]]) -> Recording:
    (whole,) = (event for event in events if event.get("name") == WHOLE and event.get("cat") == "user_annotation")
    start, length = float(whole["ts"]), float(whole["dur"])
    found = sorted(_events(events, start, length), key=lambda event: (event.start_s, -event.end_s))
    held = sorted((max(0.0, (float(e["ts"]) - start) * 1e-6), float(e["args"]["Total Allocated"]))
                  for e in events if e.get("name") == "[memory]" and e["args"].get("Device Type") == 1)
    return Recording(tuple(found), length * 1e-6, tuple(held))


def _events(events: list[dict[str, Any]], start: float, length: float) -> Iterator[Recorded]:
    """The events within the whole call, but the call itself."""
    for event in events:
        kind = event.get("cat", "")
        if event.get("ph") != "X" or kind not in ("cpu_op", "user_annotation", *ON_GPU) or event["name"] == WHOLE:
            continue
        begin, end = float(event["ts"]) - start, float(event["ts"]) + float(event["dur"]) - start
        if begin < 0 or begin > length:
            continue
        told = event.get("args", {})
        sequence = int(told.get("Sequence number", -1))
        yield Recorded(event["name"], kind, int(event["tid"]), begin * 1e-6, min(end, length) * 1e-6,
                       int(told.get("External id", -1)), sequence if sequence < MOST_SEQUENCE else -1,
                       int(told.get("stream", 0)) if kind in ON_GPU else None)


__all__ = ["ON_GPU", "Recorded", "Recording", "recorded"]
