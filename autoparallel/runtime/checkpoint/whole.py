"""Whole tensors of a parallel module, one at a time, on rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autoparallel.kernels.groups import MeshPosition


def whole_tensors(values: Mapping[str, torch.Tensor], names: Sequence[str], position: MeshPosition,
                  device: torch.device) -> Iterator[tuple[str, torch.Tensor | None]]:
    """(name, whole tensor in host memory on rank 0, None on others) of each name, in order. All ranks call this.

    ``values``: what this rank holds, by name; with a pipeline other ranks hold the rest. At any time a rank has its
    values and one whole tensor.
    """
    owners = _owners(values, position)
    for name in names:
        mine = values.get(name)
        whole = None if mine is None or owners[name] != position.pipeline_rank else _gathered(mine)
        if position.pipeline_group is not None:
            whole = _sent_to_first(whole, owners[name], position, device)
        yield name, None if whole is None or dist.get_rank() != 0 else whole.cpu()


def _gathered(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def _owners(values: Mapping[str, torch.Tensor], position: MeshPosition) -> dict[str, int]:
    """By name of each tensor, the pipeline rank that sends it to rank 0: the lowest that holds it (tied parameters lie
    on several stages), so rank 0 itself where it does."""
    if (group := position.pipeline_group) is None:
        return dict.fromkeys(values, 0)
    held: list[list[str]] = [[] for _ in range(position.pipeline_ranks)]
    dist.all_gather_object(held, list(values), group=group)
    return {name: stage for stage in reversed(range(position.pipeline_ranks)) for name in held[stage]}


def _sent_to_first(whole: torch.Tensor | None, owner: int, position: MeshPosition, device: torch.device
                   ) -> torch.Tensor | None:
    """The tensor on global rank 0, from the pipeline rank ``owner`` of the same column of the mesh."""
    group = position.pipeline_group
    assert group is not None
    ranks = dist.get_process_group_ranks(group)
    if 0 not in ranks or ranks[owner] == 0:
        return whole
    if dist.get_rank() == ranks[owner]:
        assert whole is not None
        whole = whole.to(device).contiguous()
        dist.send_object_list([tuple(whole.shape), whole.dtype], 0, group=group, device=device)
        dist.send(whole, 0, group=group)
        return None
    if dist.get_rank() != 0:
        return None
    box: list[object] = [None, None]
    dist.recv_object_list(box, ranks[owner], group=group, device=device)
    shape, dtype = box
    whole = torch.empty(shape, dtype=dtype, device=device)  # type: ignore[call-overload]
    dist.recv(whole, ranks[owner], group=group)
    return whole


__all__ = ["whole_tensors"]
