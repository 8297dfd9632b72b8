"""Rows picked by their values, whose number only the data say: all rows, and a mask of those that are meant.

    place, = torch.where(mask)              no op: place stands for the dim of ``mask``
    rows = layer(x[place])                  layer(x), of which the rows where ``mask`` is true are meant
    y.index_add_(0, place, rows)     ->     y + torch.where(mask, layer(x), 0)
    x[mask].mean()                   ->     torch.where(mask, x, 0).sum() / mask.sum()

So are loops over experts written, over those that are hit too (`for e in hit.nonzero():`), and branches that save work
(`if mask.any():`; `row_loops.py`). What is computed is dense: every expert of every row, each of which may be cut.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autoparallel.capture.branches import length_in_branch
from autoparallel.capture.row_loops import REGIONS, Chosen, refused
from autoparallel.capture.sources import calls

Tensor = torch.Tensor
aten = torch.ops.aten
#: What each row needs no other row for, beside what is element-wise: and where these have ``dim``, not to be the rows'.
BY_ROW = {"softmax": 1, "log_softmax": 1, "sum": 1, "mean": 1, "norm": 2, "amax": 1, "amin": 1, "argmax": 1, "chunk": 2,
          "split": 2, "unsqueeze": 1, "squeeze": 1, "normalize": 2, "glu": 1, "logsumexp": 1, "unflatten": 1, "std": 1,
          "var": 1, "max": 1, "min": 1, "argmin": 1, "cumsum": 1, "topk": 2}
#: Those that work on the first argument's last dims, and how many these are.
TRAILING = {"linear": 1, "layer_norm": 1, "rms_norm": 1, "dropout": 0, "embedding": 0, "one_hot": 0}
COPIES = frozenset({"to", "type_as", "float", "double", "half", "bfloat16", "long", "int", "bool", "detach", "clone",
                    "contiguous", "type", "zeros_like", "ones_like", "full_like"})
#: What has finite gradients wherever its arguments are finite. Before anything else, rows that are not meant are filled
#: again: else a gradient of zero for them, times infinity, would spoil those of parameters that they were made with.
REGULAR = frozenset({*COPIES, *TRAILING, *(BY_ROW.keys() - {"norm", "normalize", "std"}), "matmul", "mm", "add", "sub",
                     "mul", "neg", "abs", "relu", "gelu", "silu", "sigmoid", "tanh", "softplus", "leaky_relu", "elu",
                     "clamp", "maximum", "minimum", "where", "masked_fill", "square", "mse_loss", "l1_loss",
                     "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "lt", "le", "gt", "ge", "eq",
                     "ne", "bitwise_and", "bitwise_or", "bitwise_not", "logical_and", "logical_or", "logical_not"})
IN_PLACE = frozenset({"__iadd__", "__imul__", "__isub__", "__itruediv__", "__idiv__"})
#: Operators' names that are not their ops'.
NAMED = {"truediv": "div", "rtruediv": "div", "invert": "bitwise_not", "and": "bitwise_and", "or": "bitwise_or",
         "radd": "add", "rsub": "sub", "rmul": "mul", "rpow": "pow", "iadd": "add", "imul": "mul", "isub": "sub",
         "itruediv": "div", "idiv": "div", "mod": "remainder"}
LOSSES = frozenset({"kl_div", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
                    "binary_cross_entropy_with_logits"})


class _Tensorlike:
    """What torch's functions and a tensor's operators take as a tensor, and hand to `_call`."""

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        """A tensor, where a model asks by isinstance; torch's own C++ would take it at its word."""
        frame = sys._getframe(1)
        return Tensor if frame.f_code is torch.is_tensor.__code__ or calls(frame, "isinstance") else type(self)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        return _call(function, tuple(args), dict(kwargs or {}))

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
    setattr(_Tensorlike, f"__{_name}__", _operator(f"__{_name}__"))


@dataclass(frozen=True, eq=False)
class Mask:
    """Which cells are meant."""

    cells: Tensor
    version: int

    def meant(self) -> Tensor:
        """Those that would be come by: under the conditions of the branches that we are in."""
        if self.cells._version != self.version:
            raise refused("rows picked by a mask that has been written to since")
        made = self.cells
        for condition in REGIONS.conditions():
            made = made & condition
        return made

    def count(self) -> Tensor:
        """The number of rows, whatever branch asks for it."""
        made = self.cells.sum()
        made.of_rows = self  # type: ignore[attr-defined]
        return made


@dataclass(frozen=True, eq=False)
class Place(_Tensorlike):
    """One of the tensors that `torch.where(mask)` gives: the places of the cells that are meant, along dim ``dim``."""

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
    """What `mask.nonzero()` gives."""

    mask: Mask

    def __iter__(self) -> Iterator[Chosen]:
        cells = self.mask.cells
        if cells.dim() != 1:
            raise refused("a loop over places of several dims")
        return REGIONS.loop(cells, sys._getframe(1))

    def __getattr__(self, name: str) -> Any:
        raise refused(f"{name} of places whose number the data say")

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
class Rows(_Tensorlike):
    """Of ``value`` the first dims are those of ``mask`` (or of length 1) and stand for one, the rows; ``front`` dims of
    length 1 are before it."""

    mask: Mask
    value: Tensor
    front: int = 0

    @property
    def extra(self) -> int:
        return self.mask.cells.dim() - 1

    @property
    def shape(self) -> Shape:
        return Shape((*(1,) * self.front, -1, *self.value.shape[self.extra + 1:]), self.mask)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    ndim = property(dim)
    dtype = property(lambda self: self.value.dtype)
    device = property(lambda self: self.value.device)
    requires_grad = property(lambda self: self.value.requires_grad)

    def of(self, value: Tensor) -> Rows:
        return Rows(self.mask, value, self.front)

    def filled(self) -> Tensor:
        """All rows, of which those that are not meant are numbers at which functions have finite gradients; and what is
        before them has gradients of zero, whatever becomes of these."""
        return self.value if self.dtype is torch.bool else _filled(self.value, self.mask, 0.5)

    def chosen(self, fill: Any = 0) -> Tensor:
        """The rows that are meant, and ``fill`` for the others; all dims of the mask."""
        meant = self.mask.meant()
        meant = meant.reshape(*meant.shape, *(1,) * (self.value.dim() - meant.dim()))
        return torch.where(meant, self.value, torch.full_like(self.value, fill))

    def __len__(self) -> int:
        return _length(sys._getframe(1))

    def numel(self) -> Tensor:
        return self.mask.count() * math.prod(self.value.shape[self.extra + 1:])


def _length(frame: FrameType) -> int:
    """In the head of a branch, what lets the program go on."""
    found = length_in_branch(frame, lambda x: x.mask.count() if isinstance(x, Place | Rows) else len(x))
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


# ------------------------------------------------------------------------------------------- what torch's functions do


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(function, "__name__", "")
    name = name.strip("_")
    if name == "index_add":
        return _index_add(function, *args, **kwargs)
    if name == "index_select" and len(args) == 3 and args[1] == 0 and isinstance(args[2], Place):
        return picked(args[0], args[2])
    if name == "getitem" and isinstance(args[0], Place) and _is_nested(args[1], args[0].mask):
        return Place(_nested(args[1]), args[0].dim)
    if name in ("cat", "concat", "stack"):
        return _joined(function, name, *args, **kwargs)
    rows = [a for a in (*args, *kwargs.values()) if isinstance(a, Rows)]
    if not rows or any(isinstance(a, Place) for a in args):
        raise refused(f"{name} of places whose number the data say")
    first = rows[0]
    if name == "getitem":
        return _part(*args)
    if name in ("view", "reshape"):
        sizes = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
        return _reshaped(first, list(sizes))
    if any(r.mask is not first.mask or r.front for r in rows):
        raise refused(f"{name} of rows picked by different masks")
    if name in ("cross_entropy", "nll_loss"):
        return _of_classes(function, *args, **kwargs)
    if name == "kl_div" and kwargs.get("reduction") == "batchmean":
        return _call(function, args, {**kwargs, "reduction": "sum"}) / first.mask.meant().sum()
    if name == "gather":
        return _gathered(function, *args, **kwargs)
    if name in LOSSES and kwargs.get("reduction", "mean") != "none":
        reduction = kwargs.pop("reduction", "mean")
        return _reduced(_call(function, args, {**kwargs, "reduction": "none"}), reduction)
    if name in ("sum", "mean") and len(args) == 1 and not kwargs:
        return _reduced(first, name)
    if name in ("sum", "mean") and _along_rows(first, *args[1:], **kwargs):
        return _reduced(first, name, along=True, keepdim=kwargs.get("keepdim", False))
    return _by_row(function, name, first, args, kwargs)


def _by_row(function: Callable[..., Any], name: str, first: Rows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rank = first.dim()
    if name in BY_ROW:
        at = BY_ROW[name]
        dim = kwargs.get("dim", args[at] if len(args) > at else None)
        if not isinstance(dim, int) or dim % (rank + (name == "unsqueeze")) == 0:
            raise refused(f"{name} along rows whose number the data say")
        shifted = dim if dim < 0 else dim + first.extra
        kwargs = {**kwargs, "dim": shifted} if "dim" in kwargs else kwargs
        args = args if "dim" in kwargs else (*args[:at], shifted, *args[at + 1:])
    elif name in ("matmul", "mm"):
        if not isinstance(args[0], Rows) or isinstance(args[1], Rows) or args[1].dim() != 2 or rank < 2:
            raise refused("a product of rows whose number the data say")
    elif name in TRAILING:
        rest = TRAILING[name]
        of_others = any(isinstance(a, Rows) for a in (*args[1:], *kwargs.values()))
        if of_others or rank <= (len(args[1]) if name.endswith("_norm") else rest):
            raise refused(f"{name} of rows whose number the data say")
    elif name not in COPIES | LOSSES and not _element_wise(name):
        raise refused(f"{name} of rows whose number the data say")
    else:
        others = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor | Rows)]
        if any(_meets_rows(a, rank) for a in others):
            raise refused(f"{name} of rows whose number the data say and of all rows")
    with REGIONS.ours():
        plain, named = _filled_where_singular(function, name, args, kwargs)
        made = function(*plain, **named)
    return type(made)(first.of(m) for m in made) if isinstance(made, tuple | list) else first.of(made)


def _filled_where_singular(function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
                           ) -> tuple[list[Any], dict[str, Any]]:
    """The arguments as tensors."""
    own = getattr(function, "__name__", "")
    regular = NAMED.get(name, name) in REGULAR

    def plain(a: Any) -> Any:
        return a if not isinstance(a, Rows) else a.value if regular else a.filled()

    made = [plain(a) for a in args]
    if own in IN_PLACE or (own.endswith("_") and not own.endswith("__")):
        shapes = [a.shape for a in made if isinstance(a, Tensor)]
        if not isinstance(args[0], Rows) or torch.broadcast_shapes(*shapes) != args[0].value.shape:
            raise refused(f"{name} in place of rows whose number the data say")
        made[0] = args[0].value if regular else args[0].value.copy_(made[0])
    return made, {k: plain(v) for k, v in kwargs.items()}


def _meets_rows(other: Tensor | Rows, rank: int) -> bool:
    """Whether it has a dim that the rows' would be put beside."""
    if isinstance(other, Rows):
        return other.dim() != rank
    return other.dim() > rank or (other.dim() == rank and other.shape[0] != 1)


@lru_cache(maxsize=256)
def _element_wise(name: str) -> bool:
    """In all its forms (`max` of two tensors is, of one it is not)."""
    if name in ("where", "masked_fill", "hardswish"):
        return True
    packet = getattr(aten, NAMED.get(name, name), None)
    forms = [getattr(packet, o) for o in packet.overloads()] if packet is not None else []
    of_tensors = [f for f in forms if f._schema.arguments and not any(a.is_out for a in f._schema.arguments)
                  and any(str(a.type) == "Tensor" for a in f._schema.arguments)]
    return bool(of_tensors) and all(torch.Tag.pointwise in f.tags for f in of_tensors)


def _part(rows: Rows, index: Any) -> Rows:
    """All rows, and parts of the other dims."""
    if _is_nested(index, rows.mask) and not rows.front:
        mask = _nested(index)
        return Rows(mask, _harmless(rows.value, mask))
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, Tensor | _Tensorlike) for i in index):
        raise refused("a part of rows whose number the data say")
    if index and index[0] is Ellipsis:
        return rows.of(rows.value[index])
    if rows.front or not index or index[0] != slice(None):
        raise refused("a part of rows whose number the data say")
    return rows.of(rows.value[(slice(None),) * rows.extra + index])


def _reshaped(rows: Rows, sizes: list[int]) -> Rows:
    rest = rows.value.shape[rows.extra + 1:]
    if sizes and isinstance(sizes[0], Tensor) and getattr(sizes[0], "of_rows", None) is rows.mask:
        sizes = [-1, *sizes[1:]]
    known = bool(sizes) and not isinstance(sizes[0], Tensor) and sizes[0] == -1 and -1 not in sizes[1:]
    if not known or math.prod(sizes[1:]) != math.prod(rest):
        raise refused("rows whose number the data say in another shape")
    return Rows(rows.mask, rows.value.reshape(*rows.value.shape[: rows.extra + 1], *sizes[1:]))


def _along_rows(rows: Rows, dim: Any = None, keepdim: bool = False) -> bool:
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    return isinstance(dim, int) and dim % rows.dim() == 0


def _reduced(rows: Rows, how: str, along: bool = False, keepdim: bool = False) -> Tensor:
    """Of all numbers, or along the rows."""
    shape = torch.broadcast_shapes(rows.value.shape[: rows.extra + 1], rows.mask.cells.shape)
    chosen = rows.chosen()
    total = chosen.sum(list(range(len(shape)))) if along else chosen.sum()
    total = total.unsqueeze(0) if keepdim else total
    if how == "sum":
        return total
    each = 1 if along else math.prod(rows.value.shape[len(shape):])
    return total / (rows.mask.meant().sum() * each).to(total.dtype)


def _joined(function: Any, name: str, parts: Any, dim: int = 0) -> Rows:
    """Side by side."""
    first = parts[0]
    alike = all(isinstance(p, Rows) and p.mask is first.mask and not p.front and p.dim() == first.dim() for p in parts)
    if not alike or dim % (first.dim() + (name == "stack")) == 0:
        raise refused(f"{name} of rows whose number the data say")
    with REGIONS.ours():
        return first.of(function(_alike(*parts), dim if dim < 0 else dim + first.extra))


def _alike(*parts: Rows) -> list[Tensor]:
    """With the same dims of the mask, which are of length 1 where all rows are the same."""
    dims = parts[0].extra + 1
    shape = torch.broadcast_shapes(*(p.value.shape[:dims] for p in parts))
    return [p.value.expand(*shape, *p.value.shape[dims:]) for p in parts]


def _gathered(function: Any, rows: Any, dim: int, index: Any) -> Rows:
    if not (isinstance(rows, Rows) and isinstance(index, Rows)) or rows.dim() != index.dim() or dim % rows.dim() == 0:
        raise refused("gather of rows whose number the data say")
    values, places = _alike(rows, index)
    return rows.of(function(values, dim if dim < 0 else dim + rows.extra, places))


def _of_classes(function: Any, logits: Rows, target: Any, *args: Any, **kwargs: Any) -> Tensor:
    fits = isinstance(target, Rows) and not target.dtype.is_floating_point and logits.dim() == 2
    if not fits or args or kwargs.get("reduction") == "none":
        raise refused(f"{function.__name__} of rows whose number the data say")
    ignored = kwargs.get("ignore_index", -100)
    classes = logits.value.shape[-1]
    labels = target.chosen(ignored)
    values = logits.value.expand(*labels.shape, classes)
    return function(values.reshape(-1, classes), labels.reshape(-1), **kwargs)


def _index_add(function: Any, x: Tensor, dim: int, place: Any, rows: Any, *, alpha: float = 1) -> Tensor:
    if not isinstance(place, Place) or not isinstance(rows, Rows) or place.mask is not rows.mask or dim or rows.front:
        raise refused("index_add of rows whose number the data say")
    if x.shape[0] != place.mask.cells.shape[place.dim]:
        raise refused("index_add to fewer rows than the mask is of")
    added = rows.chosen()
    others = [d for d in range(rows.extra + 1) if d != place.dim]
    added = added.sum(others) if others else added
    added = added if alpha == 1 else added * alpha
    return x.add_(added) if function.__name__.endswith("_") else x + added


# ----------------------------------------------------------------------------------------------- what tensors are asked


def nonzero(mask: Tensor, as_tuple: bool = False) -> Any:
    marked = _mask_of(mask if mask.dtype is torch.bool else mask != 0)
    return tuple(Place(marked, d) for d in range(mask.dim())) if as_tuple else Places(marked)


def picks(index: Any) -> bool:
    """Whether an index picks rows by their values."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(i, Place | Chosen | Places) or _is_mask(i) for i in parts)


def _is_mask(index: Any) -> bool:
    return unknown(index) and index.dtype is torch.bool and index.dim() > 0


def unknown(x: Any) -> bool:
    """Whether it is a tensor whose values a trace does not have."""
    return isinstance(x, FakeTensor) and x.constant is None


_MASKS: dict[int, Mask] = {}


def _mask_of(cells: Tensor) -> Mask:
    """The same for the same tensor."""
    known = _MASKS.get(id(cells))
    if known is None or known.cells is not cells or known.version != cells._version:
        known = _MASKS[id(cells)] = Mask(cells, cells._version)
    return known


_NESTED: dict[int, tuple[Rows, int, Mask]] = {}


def _is_nested(index: Any, mask: Mask) -> bool:
    """Whether it picks rows of rows."""
    return isinstance(index, Rows) and index.mask is mask and index.dtype is torch.bool and index.dim() == 1


def _nested(index: Rows) -> Mask:
    """The same for the same index."""
    known = _NESTED.get(id(index))
    if known is None or known[0] is not index or known[1] != index.value._version:
        cells = index.mask.cells & index.value
        known = _NESTED[id(index)] = index, index.value._version, Mask(cells, cells._version)
    return known[2]


def picked(x: Tensor, index: Any) -> Any:
    """``x[index]``."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(i, Places) for i in parts):
        raise refused("an index of places whose number the data say")
    plain = [i for i in parts if not isinstance(i, Chosen)]
    if len(plain) < len(parts):
        return x[tuple(_number(i, x.shape[d]) if isinstance(i, Chosen) else i for d, i in enumerate(parts))]
    front = next(n for n, i in enumerate(parts) if i is not None)
    parts = parts[front:]
    if _is_mask(parts[0]):
        mask, used = _mask_of(parts[0]), parts[0].dim()
        if x.shape[:used] != parts[0].shape:
            raise refused("rows picked by a mask of another length")
        rest, dims = parts[1:], list(range(used))
    else:
        places = [i for i in parts if isinstance(i, Place)]
        if not isinstance(parts[0], Place):
            raise refused("rows picked along another dim than the first")
        mask, used = places[0].mask, len(places)
        if parts[:used] != places or any(p.mask is not mask for p in places):
            raise refused("rows picked by several masks")
        if any(x.shape[d] != mask.cells.shape[p.dim] for d, p in enumerate(places)):
            raise refused("rows picked of fewer than the mask is of")
        rest, dims = parts[used:], [p.dim for p in places]
    if len(set(dims)) < len(dims) or any(isinstance(i, Tensor | _Tensorlike) for i in rest):
        raise refused("rows picked by several indices")
    order = sorted(range(used), key=lambda d: dims[d])
    value = x.permute(*order, *range(used, x.dim())) if order != list(range(used)) else x
    shape = [mask.cells.shape[d] if d in dims else 1 for d in range(mask.cells.dim())]
    value = value.reshape(*shape, *x.shape[used:])
    if rest:
        value = value[(*(slice(None),) * len(shape), *rest)]
    return Rows(mask, _harmless(value, mask), front)


def _harmless(value: Tensor, mask: Mask) -> Tensor:
    """A copy in which rows that are not meant are finite, and places within any table."""
    if value.dtype is torch.bool:
        return value.clone()
    return _filled(value, mask, 0.5 if value.is_floating_point() or value.is_complex() else 0)


def _filled(value: Tensor, mask: Mask, fill: float) -> Tensor:
    """Of numbers that are whole, 0.5 is 1."""
    meant = mask.meant()
    for d in range(meant.dim()):
        if value.shape[d] != meant.shape[d]:
            meant = meant.any(d, keepdim=True)
    whole = not (value.is_floating_point() or value.is_complex())
    others = torch.full_like(value, math.ceil(fill) if whole else fill)
    return torch.where(meant.reshape(*meant.shape, *(1,) * (value.dim() - meant.dim())), value, others)


def _number(chosen: Chosen, length: int) -> int | slice:
    """A place beyond the end is one that is never chosen (dbrx asks for one expert more than there are)."""
    number = min(chosen.number, length - 1)
    return slice(number, number + 1) if chosen.rank else number


def put(x: Tensor, index: Any, value: Any) -> bool:
    """``x[index] = value``; False where that is not of rows."""
    if not isinstance(value, Rows) and not isinstance(index, Place):
        return False
    if not isinstance(value, Rows):
        raise refused("what is written to places whose number the data say")
    own = index.mask if isinstance(index, Place) else _mask_of(index) if _is_mask(index) else None
    if own is not value.mask or (isinstance(index, Place) and own.cells.dim() != 1) or value.front:
        raise refused("rows written to other places than they are of")
    if value.value.dim() != x.dim():
        raise refused("rows of another number of dims written")
    x.copy_(torch.where(_wide(own.meant(), x), value.value, x))
    return True


def _wide(cells: Tensor, x: Tensor) -> Tensor:
    return cells.reshape(*cells.shape, *(1,) * (x.dim() - cells.dim()))


@contextmanager
def rows_by_value() -> Iterator[None]:
    """For one trace."""
    try:
        yield
    finally:
        REGIONS.close()
        _MASKS.clear()
        _NESTED.clear()


#: What a tensor is asked that picks rows by their values.
ASKED = {torch.nonzero: nonzero, Tensor.nonzero: nonzero, torch.argwhere: nonzero, Tensor.argwhere: nonzero}


def asked(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call of a tensor comes to where it is of rows picked by their values; NotImplemented for any other."""
    if not args or not isinstance(args[0], Tensor) or isinstance(args[0], _Tensorlike):
        return NotImplemented
    if function in ASKED and unknown(args[0]):
        return nonzero(*args, **kwargs)
    if function is torch.where and len(args) == 1 and not kwargs and unknown(args[0]):
        return nonzero(args[0], as_tuple=True)
    if function in (torch.masked_select, Tensor.masked_select) and _is_mask(args[1]) and args[0].shape == args[1].shape:
        return picked(args[0], args[1])
    if function is Tensor.__getitem__ and picks(args[1]):
        return picked(*args)
    if function is Tensor.__setitem__ and (isinstance(args[2], Rows) or picks(args[1])) and put(*args):
        return None
    name = getattr(function, "__name__", "")
    writes = function is Tensor.__setitem__ or (name.endswith("_") and not name.endswith("__"))
    ours = function is Tensor.index_add_ and any(isinstance(a, Place) for a in args)
    if writes and not ours and not REGIONS.writing and REGIONS.open and REGIONS.conditions():
        raise refused(f"{name.strip('_')} in place where the data say whether")
    return NotImplemented


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Those in what a call is given, or gives."""
    if isinstance(value, Rows):
        yield value.value
    elif isinstance(value, Tensor) and not isinstance(value, _Tensorlike):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_of(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_of(each)


__all__ = ["asked", "rows_by_value", "tensors_of"]
