"""DTensor's rules, asked: which outputs it makes of inputs placed so, without moving anything.

The one file that touches DTensor here. A combination is claimed when the op runs on DTensors of these placements under
`ExplicitRedistributionContext`, which refuses every redistribution, also inside an op that DTensor takes apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor._utils import ExplicitRedistributionContext

from autoparallel.layout import PARTIAL, REPLICATE, Placement, shard, to_torch
from benchmarks.rule_truth.cases import Case
from benchmarks.rule_truth.truth import Placed, held


@contextmanager
def meshes(sizes: tuple[int, ...]) -> Iterator[dict[int, DeviceMesh]]:
    """A mesh of one axis for each size, of ranks that are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=max(sizes), store=FakeStore())
    try:
        yield {size: DeviceMesh("cpu", list(range(size))) for size in sizes}
    finally:
        dist.destroy_process_group()


def claimed(case: Case, inputs: Placed, mesh: DeviceMesh) -> Placed | None:
    """The outputs' placements, or None where DTensor has no rule or would move something first."""
    values = case.draws[0]
    operands = [_placed(v, p, mesh, seed) for seed, (v, p) in enumerate(zip(values, inputs, strict=True))]
    try:
        with torch.no_grad(), ExplicitRedistributionContext(strict=True):
            made = case.run(operands)
    except Exception:
        return None
    found = [_read(value.placements[0]) if isinstance(value, DTensor) else None for value in made]
    return tuple(p for p in found if p is not None) if None not in found else None


def _placed(whole: Tensor, p: Placement, mesh: DeviceMesh, seed: int) -> DTensor:
    mine = held(whole, p, mesh.size(), seed)[0].contiguous()
    stride = torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(mine, mesh, to_torch((p,)), run_check=False, shape=whole.shape, stride=stride)


def _read(placement: TorchPlacement) -> Placement | None:
    """None for what has no name among ours: other sums than plain ones, interleaved pieces."""
    if placement.is_replicate():
        return REPLICATE
    if placement.is_shard() and type(placement).__name__ == "Shard":
        return shard(placement.dim)  # type: ignore[attr-defined]
    return PARTIAL if placement.is_partial("sum") else None
