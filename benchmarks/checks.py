"""What the checks of a call cost: pairs of steps with all of them on and off, in an order drawn anew, in one run.

    python -m benchmarks.checks [--ranks 2] [--steps 40] [--step-ms 100]

Checks: guards of the trace, replaced parameters (also of the original), transforms around the call, the call that the
ranks make (`Together.agree`), and the comparison of inputs at its usual period.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from autoparallel.runtime import module
from autoparallel.runtime.failing import Together
from autoparallel.runtime.form import Forms
from autoparallel.runtime.guards import Places
from autoparallel.runtime.inputs import Inputs
from autoparallel.runtime.originals import Originals


class Layers(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(),
                                                  nn.Dropout(0.1)) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@contextmanager
def unchecked() -> Iterator[None]:
    """All checks of calls off."""
    with ExitStack() as off:
        for owner, name, instead in ((Together, "ask", lambda *a, **k: None), (Places, "check", lambda self: None),
                                     (Originals, "check", lambda self: None),
                                     (module, "refuse_transforms", lambda leaves: None),
                                     (Forms, "find", lambda self, key, leaves: self.first()),
                                     (Inputs, "are_compared", lambda self: False)):
            off.enter_context(patch.object(owner, name, instead))
        yield


def summary(on: Sequence[tuple[float, float]], off: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Medians of pairs of steps, each run one after the other: seconds without checks, and of the checks."""
    found = {}
    for name, with_s, without_s in zip(("", "cpu_"), zip(*on, strict=True), zip(*off, strict=True), strict=True):
        found[f"{name}off_s"] = off_s = statistics.median(without_s)
        found[f"{name}checks_s"] = checks_s = statistics.median(a - b for a, b in zip(with_s, without_s, strict=True))
        found[f"{name}share"] = checks_s / off_s
    return found


def measured(rank: int, ranks: int, port: int, steps: int, step_ms: float, depth: int, found: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port, is_master=False), rank=rank,
                            world_size=ranks, timeout=datetime.timedelta(seconds=120))
    width = 256
    parallel = autoparallel.compile(Layers(width, depth), init_device_mesh("cpu", (ranks,)), baseline="ddp")
    seconds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}

    def step(x: torch.Tensor, on: bool) -> tuple[float, float]:
        """Seconds by the clock, and of this process's CPU."""
        with ExitStack() as stack:
            if not on:
                stack.enter_context(unchecked())
            dist.barrier()
            began = time.perf_counter(), time.process_time()
            parallel.step(x)
            return time.perf_counter() - began[0], time.process_time() - began[1]

    def batch_of(step_s: float) -> int:
        """A batch with which a step takes so long by the clock."""
        seconds = torch.tensor([statistics.median(step(torch.randn(rows, width), True)[0] for _ in range(9))
                                for rows in (64, 512)])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        least, more = seconds.tolist()
        return max(8, 64 + round((step_s - least) / (more - least) * (512 - 64)) // 8 * 8)

    batch = batch_of(1e-3 * step_ms)
    x, order = torch.randn(batch, width), random.Random(0)
    for _ in range(5):
        step(x, True)
    for _ in range(steps):
        for on in order.sample([True, False], 2):
            seconds[on].append(step(x, on))
    if rank == 0:
        found.put({"batch": batch} | summary(seconds[True], seconds[False]))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--step-ms", type=float, default=100.0)
    options.add_argument("--depth", type=int, default=12)
    given = options.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = mp.get_context("spawn").SimpleQueue()
    mp.spawn(measured, (given.ranks, store.port, given.steps, given.step_ms, given.depth, found), given.ranks)
    result = found.get()
    result |= {"ranks": given.ranks, "steps": given.steps, "load_average": os.getloadavg()[0],
               "torch": torch.__version__, "date": datetime.date.today().isoformat()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
