"""Functions of torch and operators of tensors on rows picked by their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from autoparallel.capture.tracing.frames import writes_to_part
from autoparallel.capture.tracing.masked_rows.constant_masks import always
from autoparallel.capture.tracing.masked_rows.control_flow import REGIONS, refused
from autoparallel.capture.tracing.masked_rows.indexing import harmless, is_nested, joined, nested, picked
from autoparallel.capture.tracing.masked_rows.places import SCATTERS, are_places, read_at, written_at
from autoparallel.capture.tracing.masked_rows.types import Mask, Place, Rows, Tensorlike
from autoparallel.errors import CaptureError

Tensor = torch.Tensor
aten = torch.ops.aten
#: What each row needs no other row for, beside what is element-wise: and where these have ``dim``, not to be the rows'.
BY_ROW = {"softmax": 1, "log_softmax": 1, "sum": 1, "mean": 1, "norm": 2, "amax": 1, "amin": 1, "argmax": 1, "chunk": 2,
          "split": 2, "unsqueeze": 1, "squeeze": 1, "normalize": 2, "glu": 1, "logsumexp": 1, "unflatten": 1, "std": 1,
          "var": 1, "max": 1, "min": 1, "argmin": 1, "cumsum": 1, "topk": 2}
#: Those that work on the first argument's last dims, and how many these are.
TRAILING = {"linear": 1, "layer_norm": 1, "rms_norm": 1, "dropout": 0, "embedding": 0, "one_hot": 0}
#: Those whose first argument has places, which are to be inside a table.
OF_PLACES = frozenset({"embedding", "one_hot"})
COPIES = frozenset({"to", "type_as", "float", "double", "half", "bfloat16", "long", "int", "bool", "detach", "clone",
                    "contiguous", "type", "zeros_like", "ones_like", "full_like"})
#: What has finite gradients wherever its arguments are finite. Before anything else, rows that are not valid are filled
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


#: Maxima and minima over rows, and their neutral element. (Of no rows: an error.)
EXTREMES = {"max": -math.inf, "amax": -math.inf, "min": math.inf, "amin": math.inf}
#: Functions that make tensors of given sizes.
MADE = frozenset({"ones", "zeros", "full", "new_ones", "new_zeros", "new_full"})


def made(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of one of `MADE`; rows, where the first size is the number of rows that the data say."""
    name = function.__name__
    own, rest = list(args[: name.startswith("new_")]), list(args[name.startswith("new_"):])
    if "size" in kwargs:
        sizes = kwargs.pop("size")
    elif rest and isinstance(rest[0], tuple | list):
        sizes = rest.pop(0)
    else:
        sizes, rest = rest, []
    sizes, own = list(sizes), [o.value if isinstance(o, Rows) else o for o in own]
    if any(hasattr(size, "of_rows") for size in sizes[1:]):
        raise refused(f"{name} of a size that the data say")
    mask: Mask | None = getattr(sizes[0], "of_rows", None) if sizes else None
    if mask is None:
        return function(*own, sizes, *rest, **kwargs)
    value = function(*own, [*mask.cells.shape, *sizes[1:]], *rest, **kwargs)
    return Rows(mask, harmless(value, mask))


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function of rows and places; where it is not to be had of rows whose number the data say, that
    of a mask that is always the same is."""
    try:
        return _call(function, args, kwargs)
    except CaptureError:
        known = always((args, kwargs))
        if known is None:
            raise
        with REGIONS.ours():
            return function(*known[0], **known[1])


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(function, "__name__", "")
    name = name.strip("_")
    if name == "index_add" and isinstance(args[2], Place):
        return _index_add(function, *args, **kwargs)
    if name in SCATTERS:
        return written_at(function, name, *args, **kwargs)
    if name == "index_select" and len(args) == 3 and not isinstance(args[0], Rows) and args[1] % args[0].dim() == 0:
        if isinstance(args[2], Place):
            return picked(args[0], args[2])
        if are_places(args[2]) and args[2].dim() == 1:
            return read_at(args[0], args[2])
    if name == "getitem" and isinstance(args[0], Place) and is_nested(args[1], args[0].mask):
        return Place(nested(args[1]), args[0].dim)
    if name in ("cat", "concat", "stack"):
        return _joined(function, name, *args, **kwargs)
    rows = [a for a in (*args, *kwargs.values()) if isinstance(a, Rows)]
    if not rows or any(isinstance(a, Place) for a in args):
        raise refused(f"{name} of places whose number the data say")
    first = rows[0]
    if name == "getitem":
        return _part(*args)
    if name in MADE:
        return made(function, *args, **kwargs)
    if name == "expand_as" and len(rows) == 2 and not rows[1].front and first.dim() == rows[1].dim():
        return first.of(first.value.expand(torch.broadcast_shapes(first.value.shape, rows[1].value.shape)))
    if name in ("view", "reshape"):
        sizes = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
        return _reshaped(first, list(sizes))
    if any(r.mask is not first.mask for r in rows):
        raise refused(f"{name} of rows picked by different masks")
    if first.front:
        raise refused(f"{name} of rows picked along another dim than the first")
    if name in ("cross_entropy", "nll_loss"):
        return _of_classes(function, *args, **kwargs)
    if name == "kl_div" and kwargs.get("reduction") == "batchmean":
        return call(function, args, {**kwargs, "reduction": "sum"}) / first.mask.valid().sum()
    if name == "gather":
        return _gathered(function, *args, **kwargs)
    if name in LOSSES and kwargs.get("reduction", "mean") != "none":
        reduction = kwargs.pop("reduction", "mean")
        return _reduced(call(function, args, {**kwargs, "reduction": "none"}), reduction)
    if name in EXTREMES and len(args) == 1 and not kwargs and first.mask.least and first.dtype.is_floating_point:
        return function(first.chosen(EXTREMES[name]))
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
    if getattr(function, "__name__", "") in IN_PLACE and isinstance(args[0], Rows) and writes_to_part():
        function = getattr(torch, NAMED[name])  # as in Python: what is written back is a new tensor
    with REGIONS.ours():
        plain, named = _filled_where_singular(function, name, args, kwargs)
        result = function(*plain, **named)
    return type(result)(map(first.of, result)) if isinstance(result, tuple | list) else first.of(result)


def _filled_where_singular(function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
                           ) -> tuple[list[Any], dict[str, Any]]:
    """The arguments as tensors."""
    own = getattr(function, "__name__", "")
    regular = NAMED.get(name, name) in REGULAR

    def plain(a: Any) -> Any:
        if not isinstance(a, Rows):
            return a
        return a.chosen() if name in OF_PLACES else a.value if regular else a.filled()

    found = [plain(a) for a in args]
    if own in IN_PLACE or (own.endswith("_") and not own.endswith("__")):
        shapes = [a.shape for a in found if isinstance(a, Tensor)]
        if not isinstance(args[0], Rows) or torch.broadcast_shapes(*shapes) != args[0].value.shape:
            raise refused(f"{name} in place of rows whose number the data say")
        found[0] = args[0].value if regular else args[0].value.copy_(found[0])
    return found, {k: plain(v) for k, v in kwargs.items()}


def _meets_rows(other: Tensor | Rows, rank: int) -> bool:
    """Whether a tensor has a dim that broadcasting would align with the rows' dim."""
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
    if is_nested(index, rows.mask) and not rows.front:
        mask = nested(index)
        return Rows(mask, harmless(rows.value, mask))
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, Tensor | Tensorlike) for i in index):
        raise refused("a part of rows whose number the data say")
    if index and index[0] is Ellipsis:
        return rows.of(rows.value[index])
    if len(index) <= rows.front:  # of the dims before the rows'
        part = rows.value[(slice(None),) * (rows.extra + 1) + index]
        return Rows(rows.mask, part, rows.front - (rows.value.dim() - part.dim()))
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
    return total / (rows.mask.valid().sum() * each).to(total.dtype)


def _joined(function: Any, name: str, parts: Any, dim: int = 0) -> Rows:
    """Side by side, or one after another."""
    first = next(p for p in parts if isinstance(p, Rows))
    if name != "stack" and dim % first.dim() == first.front:
        return _one_after_another(parts, first)
    equivalent = all(
        isinstance(p, Rows) and p.mask is first.mask and not p.front and p.dim() == first.dim() for p in parts
    )
    if not equivalent or dim % (first.dim() + (name == "stack")) == 0:
        raise refused(f"{name} of rows whose number the data say")
    with REGIONS.ours():
        return first.of(function(_equivalent(*parts), dim if dim < 0 else dim + first.extra))


def _one_after_another(parts: Sequence[Any], first: Rows) -> Rows:
    """Rows that are not picked among them are all valid."""
    equal = all(p.dim() == first.dim() and (not isinstance(p, Rows) or (p.front, p.extra) == (first.front, 0))
                for p in parts)
    if not equal:
        raise refused("rows one after another that are of other forms")
    with REGIONS.ours():
        values = [p.value.expand(p.mask.cells.shape[0], *p.value.shape[1:]) if isinstance(p, Rows)
                  else p.movedim(first.front, 0) for p in parts]
        masks: list[Mask | int] = [p.mask if isinstance(p, Rows) else p.shape[first.front] for p in parts]
        return Rows(joined(masks, first.device), torch.cat(values), first.front)


def _equivalent(*parts: Rows) -> list[Tensor]:
    """With the same dims of the mask, which are of length 1 where all rows are the same."""
    dims = parts[0].extra + 1
    shape = torch.broadcast_shapes(*(p.value.shape[:dims] for p in parts))
    return [p.value.expand(*shape, *p.value.shape[dims:]) for p in parts]


def _gathered(function: Any, rows: Any, dim: int, index: Any) -> Rows:
    if not (isinstance(rows, Rows) and isinstance(index, Rows)) or rows.dim() != index.dim() or dim % rows.dim() == 0:
        raise refused("gather of rows whose number the data say")
    values, places = _equivalent(rows, index.of(index.chosen()))
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


__all__ = ["MADE", "call", "made"]
