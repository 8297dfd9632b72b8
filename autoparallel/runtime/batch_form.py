"""The form of a loader's batches: their structure, and the shards of them that this rank has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.utils._pytree as pytree

from autoparallel.errors import InputError
from autoparallel.layout import INVARIANT, Layout, local_box
from autoparallel.runtime import initialise

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def is_texts(value: Any) -> bool:
    """Whether a value is the texts of a batch's samples, as torch's collate function makes of one text each."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(text, (str, bytes)) for text in value)


def flattened(batch: Any) -> tuple[list[Any], Any]:
    """The leaves of a batch and its structure, which is the same for all numbers of samples: their texts are a leaf."""
    return pytree.tree_flatten(batch, is_leaf=is_texts)


@dataclass(frozen=True)
class Form:
    """Structure of a batch and the layouts in which the program reads it, by leaf number.

    ``whole``: each rank reads whole batches; else only the rows of its shards. ``in_parts``: of these it reads only the
    part of each sample that its shards have (`reading.Reader.parts`). ``plain``: leaves that stay plain tensors.
    """

    layouts: Mapping[int, Layout]
    shapes: Sequence[tuple[int, ...] | None]
    spec: Any
    mesh: DeviceMesh
    whole: bool
    in_parts: bool = False
    plain: frozenset[int] = frozenset()

    @staticmethod
    def of(batch: Any, layouts: Mapping[int, Layout], mesh: DeviceMesh, whole: bool,
           plain: frozenset[int] = frozenset()) -> Form:
        leaves, spec = flattened(batch)
        shapes = [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        whole = whole or not layouts or any(map(is_texts, leaves))    # which a rank has of all samples
        return Form(layouts, shapes, spec, mesh, whole, plain=plain)

    @property
    def has_equal_cuts(self) -> bool:
        """Whether all tensors are cut along dim 0 over the same axes: two ranks read the same rows or disjoint ones."""
        return len({tuple(p.is_shard and p.dim == 0 for p in layout) for layout in self.layouts.values()}) < 2

    def box(self, number: int, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offsets, lengths) of this rank's shard of leaf ``number`` with global shape ``shape``."""
        return local_box(shape, self.layouts[number], self.mesh.shape, self.mesh.get_coordinate() or ())

    @property
    def parts(self) -> list[tuple[slice, ...] | None]:
        """By leaf, the part of a sample that this rank's shards have (None: all of it)."""
        found: list[tuple[slice, ...] | None] = [None] * len(self.shapes)
        for number, layout in self.layouts.items():
            if any(p.is_shard and p.dim > 0 for p in layout):
                offsets, lengths = self.box(number, cast(Any, self.shapes[number]))
                found[number] = tuple(slice(first, first + length)
                                      for first, length in zip(offsets[1:], lengths[1:], strict=True))
        return found

    def rows(self, num_samples: int) -> range:
        """The rows of a batch that this rank reads: at least one, also if its shards are empty."""
        if self.whole:
            return range(num_samples)
        found = []
        for number in self.layouts:
            (first, *_), (length, *_) = self.box(number, (num_samples, *cast(Any, self.shapes[number])[1:]))
            if length:
                found.append(range(first, first + length))
        return range(min(r.start for r in found), max(r.stop for r in found)) if found else range(1)

    def fits(self, leaves: Sequence[Any], spec: Any) -> bool:
        """Whether a batch has the example's structure and numbers of dims; lengths may differ."""
        dims = [leaf.dim() if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        return bool(spec == self.spec) and dims == [None if shape is None else len(shape) for shape in self.shapes]


@dataclass(frozen=True)
class Placing:
    """Puts batches, or the rows of one that this rank has read, on the device: as DTensors in the form's layouts.

    ``as_dtensors``: what is not cut too, for plain tensors mean this rank's rows.
    """

    form: Form
    device: torch.device
    as_dtensors: bool

    def placed(self, rows: Any, count: int) -> Any:
        """The rows of a batch of ``count`` samples, placed. Raises InputError for another structure than the form's,
        where only some rows were read."""
        leaves, spec = flattened(rows)
        plain = self.form.plain if spec == self.form.spec else frozenset()
        if fits := self.form.fits(leaves, spec):
            leaves = [self._shard(i, leaf, count) if i in self.form.layouts else leaf for i, leaf in enumerate(leaves)]
        elif not self.form.whole:
            raise InputError(f"a batch has another structure than the dataset's first sample makes: {spec}, not "
                             f"{self.form.spec}\n  Give samples of one structure, or a collate_fn that makes it.")
        placed = [self._whole(leaf, self.as_dtensors and i not in plain) for i, leaf in enumerate(leaves)]
        return pytree.tree_unflatten(placed, spec) if fits or self.form.whole else rows

    def _shard(self, number: int, value: torch.Tensor, count: int) -> torch.Tensor:
        read = self.form.rows(count)
        read_part = self.form.in_parts and self.form.parts[number] is not None
        shape = tuple(value.shape) if self.form.whole else (count, *value.shape[1:])
        shape = (count, *cast(Any, self.form.shapes[number])[1:]) if read_part else shape
        offsets, lengths = self.form.box(number, shape)
        if read_part:
            offsets = (offsets[0], *(0 for _ in offsets[1:]))
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            before = 0 if self.form.whole or dim else read.start
            value = value.narrow(dim, offset - before if length else 0, length)
        return initialise.as_dtensor(self._moved(value).contiguous(), self.form.mesh, self.form.layouts[number],
                                     torch.Size(shape))

    def _whole(self, value: Any, as_dtensor: bool) -> Any:
        """A leaf that is not cut."""
        if not isinstance(value, torch.Tensor) or isinstance(value, initialise.DTensor):
            return value
        mesh = self.form.mesh
        value = self._moved(value)
        return initialise.as_dtensor(value, mesh, (INVARIANT,) * mesh.ndim) if as_dtensor else value

    def _moved(self, value: torch.Tensor) -> torch.Tensor:
        """On the device; without waiting, if the loader has pinned it."""
        if value.is_meta:
            raise InputError("a tensor of the dataset is on the meta device, and has no values: give a real one")
        return value.to(self.device, non_blocking=value.is_pinned())


__all__ = ["Form", "Placing", "flattened", "is_texts"]
