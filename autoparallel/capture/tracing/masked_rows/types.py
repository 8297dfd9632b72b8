"""Rows picked by their values, and their places: the types that stand for them while a model is traced (`ragged`)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from autoparallel.capture.tracing.frames import calls
from autoparallel.capture.tracing.masked_rows.control_flow import REGIONS, Chosen, refused
from autoparallel.capture.tracing.value_branches import length_in_branch

Tensor = torch.Tensor


class Tensorlike:
    """Base of types that pass for tensors: functions of torch and operators on them are handed to `_call`."""

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        """A tensor, where a model asks by isinstance; torch's own C++ would take it at its word."""
        frame = sys._getframe(1)
        return Tensor if frame.f_code is torch.is_tensor.__code__ or calls(frame, "isinstance") else type(self)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        return _call(function, tuple(args), dict(kwargs or {}))

    def __setitem__(self, index: Any, value: Any) -> None:
        raise refused("a part of rows whose number the data say, written to")

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name)
        if callable(method):
            return lambda *args, **kwargs: _call(method, (self, *args), kwargs)
        return _call(method.__get__, (self,), {})


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: _call(getattr(Tensor, name), (self, *args), {})


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "matmul", "neg", "abs",
              "mod", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "invert", "getitem", "iadd", "imul", "isub",
              "itruediv"):
    setattr(Tensorlike, f"__{_name}__", _operator(f"__{_name}__"))


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from autoparallel.capture.tracing.masked_rows.torch_functions import call  # which is written in these types

    return call(function, args, kwargs)


@dataclass(frozen=True, eq=False)
class Mask:
    """A mask of valid cells, of which ``least`` are known to be valid whatever the data say."""

    cells: Tensor
    version: int
    least: int = 0

    def unchanged(self) -> Tensor:
        """The cells; raises CaptureError where they have been written to since."""
        if self.cells._version != self.version:
            raise refused("rows picked by a mask that has been written to since")
        return self.cells

    def valid(self) -> Tensor:
        """The rows that are reached under the conditions of the enclosing branches."""
        made = self.unchanged()
        for condition in REGIONS.conditions():
            made = made & condition
        return made

    def count(self) -> Tensor:
        """The number of rows, whatever branch asks for it."""
        made = self.cells.sum()
        made.of_rows = self  # type: ignore[attr-defined]
        return made


@dataclass(frozen=True, eq=False)
class Place(Tensorlike):
    """One of the tensors that `torch.where(mask)` returns: the places of the valid cells along dim ``dim``."""

    mask: Mask
    dim: int
    ndim = 1

    @property
    def shape(self) -> Shape:
        return Shape((-1,), self.mask)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> Tensor:
        return self.mask.count()

    def __len__(self) -> int:
        return _length(sys._getframe(1))


@dataclass(frozen=True, eq=False)
class Places:
    """The result of `mask.nonzero()`."""

    mask: Mask

    def __iter__(self) -> Iterator[Chosen]:
        cells = self.mask.cells
        if cells.dim() != 1:
            raise refused("a loop over places of several dims")
        return REGIONS.loop(cells, sys._getframe(1))

    def __getattr__(self, name: str) -> Any:
        raise refused(f"{name} of places whose number the data say")

    @property
    def shape(self) -> Shape:
        return Shape((-1, self.mask.cells.dim()), self.mask)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> Tensor:
        return self.mask.count() if self.mask.cells.dim() == 1 else self.mask.count() * self.mask.cells.dim()

    def __len__(self) -> int:
        return _length(sys._getframe(1))

    def unbind(self, dim: int = 0) -> tuple[Place, ...]:
        if dim not in (1, -1):
            raise refused("places whose number the data say, one by one")
        return tuple(Place(self.mask, d) for d in range(self.mask.cells.dim()))

    def flatten(self, *_: int) -> Place:
        if self.mask.cells.dim() != 1:
            raise refused("places of several dims in another shape")
        return Place(self.mask, 0)

    squeeze = view = reshape = flatten

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple) and len(index) == 2 and index[0] == slice(None) and isinstance(index[1], int):
            return Place(self.mask, index[1] % self.mask.cells.dim())
        raise refused("a part of places whose number the data say")


@dataclass(frozen=True, eq=False)
class Rows(Tensorlike):
    """Of ``value`` the first dims are those of ``mask`` (or of length 1) and stand for one, the rows; in the shape, the
    next ``front`` dims are before it."""

    mask: Mask
    value: Tensor
    front: int = 0

    @property
    def extra(self) -> int:
        return self.mask.cells.dim() - 1

    @property
    def shape(self) -> Shape:
        rest = self.value.shape[self.extra + 1:]
        return Shape((*rest[: self.front], -1, *rest[self.front:]), self.mask)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    ndim = property(dim)
    dtype = property(lambda self: self.value.dtype)
    device = property(lambda self: self.value.device)
    layout = property(lambda self: self.value.layout)
    is_cuda = property(lambda self: self.value.is_cuda)
    requires_grad = property(lambda self: self.value.requires_grad)

    def of(self, value: Tensor) -> Rows:
        return Rows(self.mask, value, self.front)

    def filled(self) -> Tensor:
        """All rows. Rows that are not valid have a value at which functions have finite gradients; no gradient goes
        from them to their inputs."""
        return self.value if self.dtype is torch.bool else filled(self.value, self.mask, 0.5)

    def chosen(self, fill: Any = 0) -> Tensor:
        """The valid rows, with ``fill`` in place of the others; all dims of the mask."""
        valid = self.mask.valid()
        valid = valid.reshape(*valid.shape, *(1,) * (self.value.dim() - valid.dim()))
        return torch.where(valid, self.value, torch.full_like(self.value, fill))

    def __len__(self) -> int:
        return _length(sys._getframe(1))

    def numel(self) -> Tensor:
        each = math.prod(self.value.shape[self.extra + 1:])
        return self.mask.count() if each == 1 else self.mask.count() * each


def _length(frame: FrameType) -> int:
    """In the head of a branch, what lets the program go on."""
    found = length_in_branch(frame, lambda x: x.mask.count() if isinstance(x, Place | Places | Rows) else len(x))
    if found is None:
        raise refused("the number of rows that the data say")
    return found


class Shape(tuple[int, ...]):
    """Sizes, of which the rows' is a number that the program computes."""

    mask: Mask

    def __new__(cls, sizes: Sequence[int], mask: Mask) -> Shape:
        made = super().__new__(cls, sizes)
        made.mask = mask
        return made

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(found, tuple):
            return Shape(found, self.mask) if -1 in found else found
        return self.mask.count() if found == -1 else found

    def __iter__(self) -> Iterator[Any]:
        return (self[d] for d in range(len(self)))

    def __add__(self, other: tuple[Any, ...]) -> Shape:
        return Shape(super().__add__(other), self.mask)


def filled(value: Tensor, mask: Mask, fill: float) -> Tensor:
    """Of numbers that are whole, 0.5 is 1."""
    valid = mask.valid()
    for d in range(valid.dim()):
        if value.shape[d] != valid.shape[d]:
            valid = valid.any(d, keepdim=True)
    whole = not (value.is_floating_point() or value.is_complex())
    others = torch.full_like(value, math.ceil(fill) if whole else fill)
    return torch.where(valid.reshape(*valid.shape, *(1,) * (value.dim() - valid.dim())), value, others)


__all__ = ["Mask", "Place", "Places", "Rows", "Tensorlike", "filled"]
