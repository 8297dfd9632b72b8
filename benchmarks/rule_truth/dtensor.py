"""DTensor's rules, asked: which outputs it makes of inputs placed so, without moving anything.

The one file that touches DTensor here. A combination is claimed when the op runs on DTensors of these placements under
`ExplicitRedistributionContext`, which refuses every redistribution, also inside an op that DTensor takes apart. Some of
its ops are programs with communication of their own (argmax of a cut dim), which the op on shards cannot confirm: a
claim that shards do not confirm is run as DTensor runs it, on all ranks at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor._utils import ExplicitRedistributionContext

from autoparallel.layout import PARTIAL, REPLICATE, Placement, shard, to_torch
from benchmarks.rule_truth.cases import Case
from benchmarks.rule_truth.truth import Combination, Placed, held, lies


@contextmanager
def meshes(sizes: tuple[int, ...]) -> Iterator[dict[int, DeviceMesh]]:
    """A mesh of one axis for each size, of ranks that are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=max(sizes), store=FakeStore())
    try:
        yield {size: DeviceMesh("cpu", list(range(size))) for size in sizes}
    finally:
        dist.destroy_process_group()


def claimed(case: Case, asked: Iterable[Placed], mesh: DeviceMesh) -> Iterator[Combination]:
    """Those of the inputs' placements for which DTensor has a rule and moves nothing first, with the outputs'."""
    values = case.draws[0]
    operand = cache(lambda position, p: _placed(values[position], p, mesh, position))
    for inputs in asked:
        try:
            with torch.no_grad(), ExplicitRedistributionContext(strict=True):
                made = case.run([operand(position, p) for position, p in enumerate(inputs)])
        except Exception:
            continue
        found = [_read(value.placements[0]) if isinstance(value, DTensor) else None for value in made]
        if None not in found:
            yield inputs, tuple(p for p in found if p is not None)


def kept(case: Case, combination: Combination, mesh: DeviceMesh) -> bool:
    """Whether what DTensor's own program makes, on every draw, is what it says of the outputs."""
    return all(_kept(case, values, combination, mesh) for values in case.draws)


def _kept(case: Case, values: tuple[Tensor, ...], combination: Combination, mesh: DeviceMesh) -> bool:
    inputs, outputs = combination
    whole = case.run(values)
    shards = [held(v, p, mesh.size(), seed) for seed, (v, p) in enumerate(zip(values, inputs, strict=True))]
    ranks = range(mesh.size())
    try:
        with torch.no_grad(), LocalTensorMode(frozenset(ranks)), ExplicitRedistributionContext(strict=True):
            local = [LocalTensor({rank: mine[rank].contiguous() for rank in ranks}) for mine in shards]
            operands = [_wrapped(mine, v, p, mesh) for mine, v, p in zip(local, values, inputs, strict=True)]
            found = [_on_ranks(value, mesh.size()) for value in case.run(operands)]
    except Exception:  # also of communication that one process cannot play
        return False
    return all(lies(f, p, w) for f, p, w in zip(found, outputs, whole, strict=True))


def _on_ranks(value: Tensor, num_ranks: int) -> list[Tensor]:
    """What each rank holds of a DTensor that was made on all ranks at once."""
    assert isinstance(value, DTensor)
    local = value.to_local()
    assert isinstance(local, LocalTensor)
    return [local._local_tensors[rank] for rank in range(num_ranks)]


def _placed(whole: Tensor, p: Placement, mesh: DeviceMesh, seed: int) -> DTensor:
    return _wrapped(held(whole, p, mesh.size(), seed)[0].contiguous(), whole, p, mesh)


def _wrapped(local: Tensor, whole: Tensor, p: Placement, mesh: DeviceMesh) -> DTensor:
    stride = torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, to_torch((p,)), run_check=False, shape=whole.shape, stride=stride)


def _read(placement: TorchPlacement) -> Placement | None:
    """None for what has no name among ours: what is reduced in other ways than by a sum, interleaved pieces."""
    if placement.is_replicate():
        return REPLICATE
    if placement.is_shard() and type(placement).__name__ == "Shard":
        return shard(placement.dim)  # type: ignore[attr-defined]
    return PARTIAL if type(placement) is Partial and placement.is_partial("sum") else None
