"""What the checks of a call cost: steps with all of them on and off, in turn, in one run.

    python -m benchmarks.checks [--ranks 2] [--steps 40] [--step-ms 100]

Checks: guards of the trace, replaced parameters (also of the original), transforms around the call, the call that the
ranks make (`Together.agree`), and the comparison of inputs at its usual period.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import time
from collections.abc import Iterator
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
        for owner, name, instead in ((Together, "agree", lambda *a, **k: None), (Places, "check", lambda self: None),
                                     (Originals, "check", lambda self: None),
                                     (module, "refuse_transforms", lambda leaves: None),
                                     (Forms, "find", lambda self, key, leaves: self.first()),
                                     (Inputs, "are_compared", lambda self: False)):
            off.enter_context(patch.object(owner, name, instead))
        yield


def measured(rank: int, ranks: int, port: int, steps: int, step_ms: float, depth: int, found: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port, is_master=False), rank=rank,
                            world_size=ranks, timeout=datetime.timedelta(seconds=120))
    width, batch = 256, 64
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

    while True:  # a batch for which a step takes as long as asked, by the CPU's time: others may use the machine
        x = torch.randn(batch, width)
        taken = torch.tensor(statistics.median(step(x, True)[1] for _ in range(5)))
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        if float(taken) > 0.6e-3 * step_ms or batch > 2**16:
            break
        batch *= 2
    for _ in range(steps):
        for on in (True, False):
            seconds[on].append(step(x, on))
    if rank == 0:
        clock, cpu = zip(*seconds[True], strict=True), zip(*seconds[False], strict=True)
        (on_s, on_cpu_s), (off_s, off_cpu_s) = (tuple(map(statistics.median, times)) for times in (clock, cpu))
        found.put({"batch": batch, "on_s": on_s, "off_s": off_s, "on_cpu_s": on_cpu_s, "off_cpu_s": off_cpu_s})
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
    result |= {"ranks": given.ranks, "steps": given.steps, "share": result["on_s"] / result["off_s"] - 1,
               "checks_s": result["on_s"] - result["off_s"],
               "cpu_share": result["on_cpu_s"] / result["off_cpu_s"] - 1, "load_average": os.getloadavg()[0],
               "torch": torch.__version__, "date": datetime.date.today().isoformat()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
