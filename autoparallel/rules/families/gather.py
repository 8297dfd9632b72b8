"""Reading and writing places that tensors name: index, gather, scatter and their kin.

The places may be cut (each rank reads its own from the whole), and so may the dims that no place is named in.
"""

from __future__ import annotations

from dataclasses import replace

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
                flops=float(op.out.num_elements), op_class="gather", saves=frozenset({0, 1}))


@rule_for(aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce)
def scatter(op: OpView) -> Rule | None:
    """Along ``dim`` all that is written must be known; other dims together, where every tensor has all of them."""
    rule = _scattered(op)
    reduces = rule is not None and op.target in (aten.scatter.reduce, aten.scatter.value_reduce)
    return replace(rule, linear=(), saves=frozenset(range(len(op.inputs)))) if reduces else rule  # type: ignore[type-var]


@rule_for(aten.scatter_reduce.two)
def scatter_reduce(op: OpView) -> Rule | None:
    if op.arg("reduce") == "sum" and op.arg("include_self"):
        return scatter_add(op)
    rule = _scattered(op)
    linear = _linear_in(op.arg("reduce"), bool(op.arg("include_self")))
    return replace(rule, linear=linear, saves=frozenset({0, 1, 2}), saves_output=True) if rule is not None else None


def _linear_in(reduce: str, include_self: bool) -> tuple[frozenset[int], ...]:
    """Sums and means are linear in the tensor and in what is written to it together, a product in the tensor."""
    if reduce in ("sum", "mean"):
        return (frozenset({0, 2}),)
    return (frozenset({0}),) if reduce == "prod" and include_self else ()


@rule_for(aten.scatter_add.default)
def scatter_add(op: OpView) -> Rule | None:
    """The added values may be sharded: each rank adds its own to the tensor's first summand."""
    rule = _scattered(op)
    if rule is None or op.shapes[1] != op.shapes[2]:
        return rule
    dim = op.arg("dim") % len(op.out.shape)
    added = tuple("i" if d == dim and op.shapes[1][dim] != 1 else f for d, f in enumerate(rule.inputs[1]))
    sizes = {**rule.sizes, "i": op.shapes[1][dim]} if "i" in added else rule.sizes
    return replace(rule, inputs=(rule.inputs[0], added, added), sizes=sizes, reduce=frozenset({"i"}) & sizes.keys(),
                   additive=frozenset({0}))


def _scattered(op: OpView) -> Rule | None:
    if not op.out.shape:
        return None
    dim = op.arg("dim") % len(op.out.shape)
    same = [len({shape[d] for shape in op.shapes}) == 1 for d in range(len(op.out.shape))]
    names = tuple(f"d{d}" if d != dim and same[d] and n != 1 else None for d, n in enumerate(op.out.shape))
    sizes = {f: op.out.shape[d] for d, f in enumerate(names) if f}
    written = frozenset({0, 2}) if len(op.shapes) == 3 else frozenset()
    return Rule((names,) * len(op.shapes), (names,), sizes, linear=(written,) if written else (),
                flops=float(op.out.num_elements), op_class="gather", saves=frozenset({1}))


@rule_for(aten.index_add.default, aten.index_copy.default)
def index_add(op: OpView) -> Rule | None:
    """Rows added (or written) at places: rows that are added may be cut as in `scatter_add`."""
    x, places = op.shapes[:2]
    if not x or len(places) != 1:
        return None
    dim = op.arg("dim") % len(x)
    names = [f"d{d}" if d != dim and n != 1 else None for d, n in enumerate(x)]
    adds = op.target is aten.index_add.default and places[0] != 1
    sizes = {f: x[d] for d, f in enumerate(names) if f} | ({"i": places[0]} if adds else {})
    place = "i" if adds else None
    return Rule((tuple(names), (place,), (*names[:dim], place, *names[dim + 1 :])), (tuple(names),), sizes,
                reduce=frozenset({"i"}) & sizes.keys(), additive=frozenset({0}), linear=(frozenset({0, 2}),),
                flops=float(op.out.num_elements), op_class="gather", saves=frozenset({1, 2}))


@rule_for(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(op: OpView) -> Rule | None:
    """Other dims than the one whose places are filled may be cut."""
    if not op.out.shape:
        return None
    dim = op.arg("dim") % len(op.out.shape)
    names = tuple(f"d{d}" if d != dim and n != 1 else None for d, n in enumerate(op.out.shape))
    sizes = {f: op.out.shape[d] for d, f in enumerate(names) if f}
    rest = tuple((None,) * len(shape) for shape in op.shapes[1:])
    zero = len(op.inputs) == 2 and op.arg("value") == 0
    together = (frozenset({0, 2}),) if len(op.inputs) == 3 else (frozenset({0}),) if zero else ()
    return Rule((names, *rest), (names,), sizes, linear=together, flops=float(op.out.num_elements), op_class="gather",
                saves=frozenset({1}))


@rule_for(aten.index_reduce.default)
def index_reduce(op: OpView) -> Rule | None:
    rule = index_add(op)
    if rule is None:
        return None
    whole = [tuple(None if f == "i" else f for f in dims) for dims in rule.inputs]
    return replace(rule, inputs=tuple(whole), sizes={f: n for f, n in rule.sizes.items() if f != "i"},
                   reduce=frozenset(), additive=frozenset(), saves=frozenset({0, 1, 2}), saves_output=True,
                   linear=_linear_in(op.arg("reduce"), bool(op.arg("include_self"))))


@rule_for(aten.take.default)
def take(op: OpView) -> Rule:
    """Places of the flattened tensor, which stays whole."""
    own = _own(op.shapes[1])
    return Rule(((None,) * len(op.shapes[0]), own), (own,), {f"d{d}": n for d, n in enumerate(op.shapes[1]) if n != 1},
                linear=(frozenset({0}),), flops=float(op.out.num_elements), op_class="gather", saves=frozenset({1}))


@rule_for(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(op: OpView) -> Rule:
    """One sorted row for all, or a row for each row of values."""
    table, own = op.shapes[0], _own(op.out.shape)
    rows: Dims = (None,) if len(table) == 1 else (*own[:-1], None)
    inputs = [rows if shape == table and i != 1 else own for i, shape in enumerate(op.shapes)]
    return Rule(tuple(inputs), (own,), {f"d{d}": n for d, n in enumerate(op.out.shape) if n != 1},
                flops=4.0 * op.out.num_elements, op_class="gather")


@rule_for(aten.isin.Tensor_Tensor)
def isin(op: OpView) -> Rule:
    return _looked_up(op)


def _looked_up(op: OpView) -> Rule:
    """Each element is looked up in a table that all have."""
    return Rule((_own(op.shapes[0]), (None,) * len(op.shapes[1])), (_own(op.out.shape),),
                {f"d{d}": n for d, n in enumerate(op.out.shape) if n != 1}, flops=4.0 * op.out.num_elements,
                op_class="gather")


@rule_for(aten.bucketize.Tensor)
def bucketize(op: OpView) -> Rule:
    """How many boundaries are before each element, which adds up over shards of them."""
    rule = _looked_up(op)
    count = op.shapes[1][0]
    if count < 2:
        return rule
    return replace(rule, inputs=(rule.inputs[0], ("n",)), sizes={**rule.sizes, "n": count}, reduce=frozenset({"n"}))


@rule_for(aten.masked_scatter.default)
def masked_scatter(op: OpView) -> Rule:
    """Which value goes where depends on the whole mask: no dim may be sharded."""
    return Rule(tuple((None,) * len(shape) for shape in op.shapes), ((None,) * len(op.out.shape),), {},
                linear=(frozenset({0, 2}),), flops=float(op.out.num_elements), op_class="gather", saves=frozenset({1}))


@rule_for(aten.repeat_interleave.self_Tensor)
def repeated_rows(op: OpView) -> Rule | None:
    """As often as a tensor says: other dims may be cut."""
    if op.arg("dim") is None:
        return None
    x, dim = op.shapes[0], op.arg("dim") % len(op.shapes[0])
    names = tuple(f"d{d}" if d != dim and n != 1 else None for d, n in enumerate(x))
    sizes = {f: x[d] for d, f in enumerate(names) if f}
    return Rule((names, (None,) * len(op.shapes[1])), (names,), sizes, linear=(frozenset({0}),),
                flops=float(op.out.num_elements), op_class="gather", saves=frozenset({1}))


@rule_for(aten.one_hot.default)
def one_hot(op: OpView) -> Rule:
    own = _own(op.shapes[0])
    return Rule((own,), ((*own, None),), {f"d{d}": n for d, n in enumerate(op.shapes[0]) if n != 1},
                flops=float(op.out.num_elements))


def _own(shape: tuple[int, ...]) -> Dims:
    return tuple(f"d{d}" if n != 1 else None for d, n in enumerate(shape))
