"""Interleaved DTensors, done where torch is wrong: checkpoints, and changes of placement on meshes of several axes.

Distributed checkpoints (DCP) describe each rank's shard by one offset, as if it were one box: of an interleaved one
they would hold chunks that overlap, and load other rows than the rank has. Here it has as many chunks as boxes, and
such a checkpoint is as any other: it loads into any layout.

On a mesh of several axes torch takes ``_StridedShard`` for an order in which axes cut a dim, and gives wrong values or
an error where the dim moves to another axis, or where several axes cut it (torch 2.13). Here such a tensor is whole in
between, and cut axis by axis, the leftmost first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, _api, _dispatch, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from autoparallel.layout import Box, from_torch, local_boxes, local_shape

#: torch's function that changes the placements of a local tensor.
_CHANGE = "redistribute_local_tensor"


def handle(is_ours: Callable[[DeviceMesh], bool]) -> None:
    """Do so from now on, with changes of placement on meshes for which ``is_ours`` is true."""
    for module in (_redistribute, _dispatch, _api):  # those whose name for it is called
        setattr(module, _CHANGE, _by_the_whole(getattr(module, _CHANGE), is_ours))
    for name, own in (("__create_write_items__", _write_items), ("__create_chunk_list__", _chunks),
                      ("__get_tensor_shard__", _chunk)):
        setattr(DTensor, name, _of_interleaved(own, getattr(DTensor, name)))


def _by_the_whole(torchs: Callable[..., torch.Tensor], is_ours: Callable[[DeviceMesh], bool]
                  ) -> Callable[..., torch.Tensor]:
    @wraps(torchs)
    def redistributed(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, **kwargs: Any) -> torch.Tensor:
        ends = source.placements, target.placements
        if source.mesh.ndim > 1 and ends[0] != ends[1] and any(
                isinstance(p, _StridedShard) for p in (*ends[0], *ends[1])) and is_ours(source.mesh):
            between = tuple(p if p == q and p.is_partial() else Replicate() for p, q in zip(*ends, strict=True))
            spec = DTensorSpec(source.mesh, between, tensor_meta=source.tensor_meta)
            if between not in ends or any(map(_is_nested, ends)):
                gathered = _gathered if _is_nested(ends[0]) else torchs
                local, source = local if ends[0] == between else gathered(local, source, spec), spec
            if _is_nested(ends[1]):
                return _cut(local, target)
        return torchs(local, source, target, **kwargs)

    return redistributed


def _is_nested(placements: Sequence[Placement]) -> bool:
    """Whether several axes cut one dim, one of them by parts: ops of torch take such placements on their way."""
    dims = [p.dim for p in placements if isinstance(p, Shard | _StridedShard)]
    return len(set(dims)) < len(dims) and any(isinstance(p, _StridedShard) for p in placements)


def _cut(value: torch.Tensor, target: DTensorSpec, axes: int | None = None) -> torch.Tensor:
    """This rank's shard of a whole tensor, cut by the first ``axes`` (None: all), the leftmost first."""
    mesh = target.mesh
    for axis, placement in enumerate(target.placements[:axes]):
        if isinstance(placement, Shard | _StridedShard):
            value = placement._split_tensor(value, mesh.size(axis), with_padding=False)[0][mesh.get_local_rank(axis)]
    return value


def _gathered(local: torch.Tensor, source: DTensorSpec, _: DTensorSpec) -> torch.Tensor:
    """The inverse of `_cut`."""
    whole = torch.empty(source.shape, device="meta")
    for axis, placement in reversed(list(enumerate(source.placements))):
        if isinstance(placement, Shard | _StridedShard):
            shape = list(_cut(whole, source, axis).shape)
            local = placement._to_replicate_tensor(local, source.mesh, axis, shape)
    return local


def _of_interleaved(own: Callable[..., Any], torchs: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(torchs)
    def method(tensor: DTensor, *args: Any) -> Any:
        interleaved = any(isinstance(placement, _StridedShard) for placement in tensor.placements)
        boxes = _boxes(tensor) if interleaved else ()
        return own(tensor, boxes, *args) if len(boxes) > 1 else torchs(tensor, *args)

    return method


def _boxes(tensor: DTensor) -> tuple[Box, ...]:
    """The boxes of this rank's shard; () where its cut is not one of our layouts (an uneven one of torch's)."""
    layout, mesh, shape = from_torch(tuple(tensor.placements)), tensor.device_mesh, tuple(tensor.shape)
    place = mesh.get_coordinate()
    if place is None or local_shape(shape, layout, mesh.shape, place) != tuple(tensor._local_tensor.shape):
        return ()
    return local_boxes(shape, layout, mesh.shape, place)


def _write_items(tensor: DTensor, boxes: tuple[Box, ...], name: str, _: Any) -> list[WriteItem]:
    from torch.distributed.checkpoint.planner_helpers import _create_write_items_for_dtensor

    pattern = _create_write_items_for_dtensor(name, tensor)
    assert pattern.tensor_data is not None
    return [replace(pattern, index=MetadataIndex(name, chunk.offsets),
                    tensor_data=replace(pattern.tensor_data, chunk=chunk)) for chunk in _chunks(tensor, boxes)]


def _chunks(_: DTensor, boxes: tuple[Box, ...]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.shape)) for box in boxes]


def _chunk(tensor: DTensor, boxes: tuple[Box, ...], index: MetadataIndex) -> torch.Tensor:
    (box,) = (box for box in boxes if index.offset is not None and tuple(index.offset) == box.offsets)
    chunk = tensor.to_local()
    for dim, (start, length) in enumerate(zip(box.local_offsets, box.shape, strict=True)):
        chunk = chunk.narrow(dim, start, length)
    return chunk


__all__ = ["handle"]
