"""Reading and writing places that tensors name: index, index_select, gather, index_put, scatter.

The places may be cut (each rank reads its own from the whole), and so may the dims that no place is named in.
"""

from __future__ import annotations

import torch

from autoparallel.capture.graph import Ref
from autoparallel.rules.registry import OpView, rule_for
from autoparallel.rules.rule import Dims, Rule

aten = torch.ops.aten


def _indexed(op: OpView) -> tuple[list[int], list[Dims], Dims, Dims, dict[str, int]] | None:
    """Of ``x[.., index, ..]``: indexed dims, factors of each index, of x, and of the result; sizes of the factors."""
    indices, x = op.arg("indices"), op.shapes[0]
    at = [d for d, index in enumerate(indices) if index is not None]
    metas = [op.meta(index) for index in indices if isinstance(index, Ref)]
    if any(meta.dtype in (torch.bool, torch.uint8) for meta in metas):
        return None
    places = torch.broadcast_shapes(*(meta.shape for meta in metas))
    kept = tuple(f"d{d}" if d not in at and n != 1 else None for d, n in enumerate(x))
    found: Dims = tuple(f"i{k}" if n != 1 else None for k, n in enumerate(places))
    own = [tuple(f if n != 1 else None for f, n in zip(found[len(found) - len(m.shape) :], m.shape, strict=True))
           for m in metas]
    together = at == list(range(at[0], at[-1] + 1))  # else numpy puts the places first
    before = list(range(at[0])) if together else []
    after = [d for d in range(len(x)) if d not in at and d not in before]
    out = (*(kept[d] for d in before), *found, *(kept[d] for d in after))
    sizes = {f: x[d] for d, f in enumerate(kept) if f} | {f: n for f, n in zip(found, places, strict=True) if f}
    return at, own, kept, out, sizes


@rule_for(aten.index.Tensor)
def index(op: OpView) -> Rule | None:
    dims = _indexed(op)
    if dims is None:
        return None
    _, own, x, out, sizes = dims
    return Rule((x, *own), (out,), sizes, linear=(frozenset({0}),), flops=float(op.out.num_elements),
                op_class="gather", saves=frozenset(range(1, len(op.inputs))))


@rule_for(aten.index_put.default)
def index_put(op: OpView) -> Rule | None:
    """Places stay whole: each rank must know all that is written; only dims that no place is named in are cut."""
    dims = _indexed(op)
    if dims is None:
        return None
    _, own, x, out, sizes = dims
    kept = {f: n for f, n in sizes.items() if f.startswith("d")}
    values, last = op.shapes[-1], tuple(f if f in kept else None for f in out)
    written = tuple(f if n != 1 else None for f, n in zip(last[len(last) - len(values) :], values, strict=True))
    whole = tuple((None,) * len(dims) for dims in own)
    return Rule((x, *whole, written), (x,), kept, linear=(frozenset({0, len(op.inputs) - 1}),),
                flops=float(op.out.num_elements), op_class="gather", saves=frozenset(range(1, len(op.inputs) - 1)))


@rule_for(aten.index_select.default)
def index_select(op: OpView) -> Rule | None:
    x = op.shapes[0]
    if not x or len(op.shapes[1]) != 1:
        return None
    dim = op.arg("dim") % len(x)
    kept = [f"d{d}" if d != dim and n != 1 else None for d, n in enumerate(x)]
    place = "i" if op.out.shape[dim] != 1 else None
    sizes = {f: x[d] for d, f in enumerate(kept) if f} | ({"i": op.out.shape[dim]} if place else {})
    return Rule((tuple(kept), (place,)), ((*kept[:dim], place, *kept[dim + 1 :]),), sizes,
                linear=(frozenset({0}),), flops=float(op.out.num_elements), op_class="gather", saves=frozenset({1}))


@rule_for(aten.gather.default)
def gather(op: OpView) -> Rule | None:
    """Along ``dim`` the places may be cut; other dims together, where both tensors have all of them."""
    x, places = op.shapes
    if not x:
        return None
    dim = op.arg("dim") % len(x)
    together = [f"d{d}" if d != dim and n == m != 1 else None for d, (n, m) in enumerate(zip(x, places, strict=True))]
    out = [*together]
    out[dim] = "i" if places[dim] != 1 else None
    sizes = {f: places[d] for d, f in enumerate(out) if f}
    return Rule((tuple(together), tuple(out)), (tuple(out),), sizes, linear=(frozenset({0}),),
                flops=float(op.out.num_elements), op_class="gather", saves=frozenset({1}))


@rule_for(aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
def scatter(op: OpView) -> Rule | None:
    """Along ``dim`` all that is written must be known; other dims together, where every tensor has all of them."""
    if not op.out.shape:
        return None
    dim = op.arg("dim") % len(op.out.shape)
    same = [len({shape[d] for shape in op.shapes}) == 1 for d in range(len(op.out.shape))]
    names = tuple(f"d{d}" if d != dim and same[d] and n != 1 else None for d, n in enumerate(op.out.shape))
    sizes = {f: op.out.shape[d] for d, f in enumerate(names) if f}
    written = frozenset({0, 2}) if len(op.shapes) == 3 else frozenset()
    return Rule((names,) * len(op.shapes), (names,), sizes, linear=(written,) if written else (),
                flops=float(op.out.num_elements), op_class="gather", saves=frozenset({1}))
