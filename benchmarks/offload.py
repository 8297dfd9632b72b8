"""Optimizer states on the host and on disk: `python -m benchmarks.offload FOLDER`.

One rank, AdamW of ``--parameters`` elements, host memory for tiles of a quarter of the states. Steps with states in
device memory, on the host, and on disk with and without prefetch run in turn, with a measurement of the disk beside
each: the same bytes read and written at once by the same code, without an optimizer. Prints medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from autoparallel.runtime.offload.stores import Disk
from autoparallel.runtime.offload.tiles import regions_of, tiles_of

WIDTH, ROUNDS = 4096, 7


class Layers(nn.Module):
    """Square layers of ``WIDTH``."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh() / 10
        return x.square().mean()


def seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


class Bound:
    """Reads and writes all bytes of the states, both at once."""

    def __init__(self, elements: int, tile_bytes: int, folder: Path) -> None:
        self.tiles = tiles_of(regions_of([(0, elements)], [4], [0]), tile_bytes)
        self.stores = [Disk(("exp_avg", "exp_avg_sq"), self.tiles[-1].end, tile_bytes, folder) for _ in range(2)]
        self._each(self.stores[0].write)

    def _each(self, move: Callable[[Any], None]) -> None:
        for tile in self.tiles:
            move(tile)

    def run(self) -> None:
        with ThreadPoolExecutor(2) as pool:
            found = [pool.submit(self._each, lambda tile: self.stores[0].read(tile, True)),
                     pool.submit(self._each, self.stores[1].write)]
            for one in found:
                one.result()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parameters", type=float, default=1.3e8)
    given = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layers = max(1, round(given.parameters / WIDTH**2))
    elements, x = layers * WIDTH**2, torch.ones(4, WIDTH)
    mesh, model = init_device_mesh("cpu", (1,)), Layers(layers)
    limit = 8 * elements / 4
    runs: dict[str, tuple[Any, Any]] = {}
    for name, away in (("device", {}), ("host", {"offload": "host"}),
                       ("disk", {"offload": "disk", "disk_path": given.folder, "host_memory_limit_bytes": limit})):
        parallel = autoparallel.compile(model, mesh, example_inputs=(x,), **away)
        fused = {} if away else {"fused": True}
        for prefetch in (True, False) if name == "disk" else (True,):
            optimizer = parallel.optimizer(torch.optim.AdamW, prefetch=prefetch, **fused)
            runs[name if prefetch else f"{name}, no prefetch"] = parallel, optimizer
    for parallel, _ in runs.values():
        parallel.step(x)  # gradients stay
    tile_bytes = runs["disk"][0].plan.hybrid.offload.tile_bytes
    bound, taken = Bound(elements, tile_bytes, given.folder), dict[str, list[float]]()
    for number in range(ROUNDS + 1):
        for name, call in [*((name, optimizer.step) for name, (_, optimizer) in runs.items()), ("bound", bound.run)]:
            once = seconds(call)
            if number:
                taken.setdefault(name, []).append(once)
    print(f"{elements:,} parameters, states {8 * elements:,} bytes, tiles of {tile_bytes:,}, "
          f"load {os.getloadavg()[0]:.0f}")
    for name, some in taken.items():
        memory = runs[name][1].memory() if name in ("host", "disk") else ""
        print(f"{name:20} median {statistics.median(some):.3f} s, {min(some):.3f} to {max(some):.3f} {memory}")
    ratios = [a / b for a, b in zip(taken["disk"], taken["bound"], strict=True)]
    print(f"disk over bound: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")
    print(f"predicted: {runs['disk'][0].plan.prediction.optimizer_s:.3f} s")


if __name__ == "__main__":
    main()
