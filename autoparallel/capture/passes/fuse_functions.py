"""Functions that torch has as one op and models write out: GELU, SiLU, RMS norm and layer norm.

    0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))  -> aten.gelu(x, "tanh")        "gelu_new", "gelu_fast"
    0.5 x (1 + erf(x / sqrt(2)))                     -> aten.gelu(x)
    x sigmoid(x)                                     -> aten.silu(x)
    x rsqrt(mean(x^2) + eps) [* weight]              -> aten.rms_norm(x, shape, weight, eps)
    (x - mean(x)) rsqrt(var(x) + eps) [* weight [+ bias]]
                                                     -> aten.layer_norm(x, shape, weight, bias, eps)

One op reads and writes memory once and keeps its input for backward, where its parts keep up to six tensors. In 16 bits
GELU and SiLU are rounded once, not after each part. A norm is rounded where the model rounds it: one that the model
computes in 16 bits stays as it is, and a weight behind a cast to 16 bits stays apart. Norms with eps added to the
deviation, not to the variance, or with the deviation of a sample (n - 1), are no layer norms and stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph
from torch.fx import Node as FxNode

from autoparallel.capture.passes.editing import Node, emit
from autoparallel.capture.passes.editing import replace as replace_node

aten = torch.ops.aten

#: Coefficients of a polynomial in two variables, by the power of each.
_Powers = dict[tuple[int, int], float]
_ROOT = math.sqrt(2.0 / math.pi)
#: The argument of tanh, erf or sigmoid, as a polynomial of x.
_ARGUMENTS: Mapping[Any, _Powers] = {
    aten.tanh.default: {(1, 0): _ROOT, (3, 0): 0.044715 * _ROOT}, aten.erf.default: {(1, 0): math.sqrt(0.5)},
    aten.sigmoid.default: {(1, 0): 1.0}}
#: Limits of the walk: ops of an expression, and ops between tanh, erf or sigmoid and the result.
_MOST_OPS, _MOST_ABOVE = 12, 4


@dataclass(frozen=True)
class _Found:
    """A function that is written out. ``last``: the node of its result, ``inside``: its other nodes; ``op``,
    ``source``, ``args``, ``options``: the op, its first argument, the rest, and its keyword arguments."""

    last: Node
    inside: frozenset[Node]
    op: Any
    source: Node
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] | None = None

    def is_alone(self, kept: Iterable[Node]) -> bool:
        """Whether nothing else reads its parts, and gradients flow through all of them or none."""
        nodes = {*self.inside, self.last}
        return (nodes.isdisjoint(kept) and all(user in nodes for node in self.inside for user in node.users)
                and len({_is_without_gradient(node) for node in nodes}) == 1)

    def put(self, graph: Graph, mutations: dict[str, Node]) -> None:
        source, dtype = self.source, self.last.meta["val"].dtype
        with graph.inserting_before(self.last):
            if source.meta["val"].dtype != dtype:
                source = emit(graph, self.last, aten.to.dtype, source, dtype)
            made = emit(graph, self.last, self.op, source, *self.args, **(self.options or {}))
        replace_node(self.last, made, mutations)
        for node in sorted(self.inside, reverse=True):
            if not node.users:
                graph.erase_node(node)


def _is_node(value: Any) -> bool:
    return isinstance(value, FxNode)


def _is_without_gradient(node: Node) -> bool:
    return bool(node.meta.get("no_grad"))


def gather_functions(graph: Graph, mutations: dict[str, Node]) -> None:
    """Replace each such function by its op."""
    for node in list(graph.nodes):
        for finder in _FINDERS.get(node.target, ()):
            found = finder(node)
            if found is not None and found.is_alone(mutations.values()):
                found.put(graph, mutations)
                break


# --- activations -------------------------------------------------------------------------------------------------

def _activation(root: Node) -> _Found | None:
    """The activation of which this is the tanh, erf or sigmoid."""
    silu = root.target is aten.sigmoid.default
    wanted = {(1, 1): 1.0} if silu else {(1, 0): 0.5, (1, 1): 0.5}      # of x and of this
    top, above, candidates = root, list[Node](), list[Node]()
    while len(top.users) == 1 and len(above) < _MOST_ABOVE:
        (top,) = top.users
        above.append(top)
        candidates += _factors(top, {root, *above})
        for x in candidates:
            seen = set[Node]()
            if _is_near(_expanded(top, x, root, seen), wanted, top) \
                    and _is_near(_expanded(root.args[0], x, None, seen), _ARGUMENTS[root.target], top) \
                    and x.meta["val"].shape == top.meta["val"].shape:
                inside = frozenset({root, *above, *seen} - {top, x})
                if silu:
                    return _Found(top, inside, aten.silu.default, x)
                approximate = "tanh" if root.target is aten.tanh.default else "none"
                return _Found(top, inside, aten.gelu.default, x, options={"approximate": approximate})
    return None


def _factors(product: Node, below: set[Node]) -> list[Node]:
    """Candidates for x in a product: its factors, and the tensor that a factor is a multiple or a cast of."""
    found = list[Node]()
    if product.target is aten.mul.Tensor:
        for factor in product.args:
            if _is_node(factor) and factor not in below:
                found.append(factor)
                if factor.target in (aten.mul.Tensor, aten.to.dtype) and _is_node(factor.args[0]):
                    found.append(factor.args[0])
    return found


def _expanded(value: Any, x: Node, function: Node | None, seen: set[Node]) -> _Powers | None:
    """An expression as a polynomial of x and of ``function``, by their powers; None if it is none. ``seen``: takes its
    nodes. A cast of x to a type that holds its numbers is x."""
    if isinstance(value, int | float):
        return {(0, 0): float(value)}
    if value is x:
        return {(1, 0): 1.0}
    if value is function:
        return {(0, 1): 1.0}
    if not _is_node(value) or len(seen) > _MOST_OPS:
        return None
    combined, args = _COMBINED.get(value.target), value.args
    if combined is None or value.kwargs:
        return None
    seen.add(value)
    if value.target is aten.to.dtype:
        wide, narrow = args[1], args[0].meta["val"].dtype
        return _expanded(args[0], x, function, seen) if torch.promote_types(wide, narrow) == wide else None
    made = [_expanded(one, x, function, seen) for one in args]
    return None if any(one is None for one in made) else combined(*made)


def _product(a: _Powers, b: _Powers) -> _Powers:
    made = _Powers()
    for (i, j), c in a.items():
        for (k, m), d in b.items():
            made[i + k, j + m] = made.get((i + k, j + m), 0.0) + c * d
    return made


def _sum(a: _Powers, b: _Powers) -> _Powers:
    return {power: a.get(power, 0.0) + b.get(power, 0.0) for power in {**a, **b}}


def _power(a: _Powers, b: _Powers) -> _Powers | None:
    exponent = b.get((0, 0), 0.0)
    if exponent not in (1.0, 2.0, 3.0):
        return None
    made = a
    for _ in range(int(exponent) - 1):
        made = _product(made, a)
    return made


def _quotient(a: _Powers, b: _Powers) -> _Powers | None:
    divisor = b.get((0, 0), 0.0)
    return {power: c / divisor for power, c in a.items()} if set(b) == {(0, 0)} and divisor else None


_COMBINED: Mapping[Any, Callable[..., _Powers | None]] = {
    aten.mul.Tensor: _product, aten.add.Tensor: _sum, aten.pow.Tensor_Scalar: _power, aten.div.Tensor: _quotient,
    aten.square.default: lambda a: _product(a, a), aten.to.dtype: lambda a, _: a}


def _is_near(found: _Powers | None, wanted: _Powers, result: Node) -> bool:
    """Whether coefficients are equal but for rounding in the type of ``result``."""
    if found is None or set(found) != set(wanted):
        return False
    tolerance = 1e-15 if result.meta["val"].dtype is torch.float64 else 1e-8
    return all(math.isclose(found[power], c, rel_tol=tolerance) for power, c in wanted.items())


# --- norms -------------------------------------------------------------------------------------------------------

def _rms_norm(root: Node) -> _Found | None:
    """The RMS norm of which this is the rsqrt, or the sqrt that divides."""
    mean, eps = _arguments(root.args[0], aten.add.Tensor)
    squares, dims, nodes = _mean(mean)
    x = _squared(squares)
    if x is None or not isinstance(eps, float) or len(root.users) != 1:
        return None
    (last,), shape = root.users, _normalised_shape(x, dims)
    is_cast = x.target is aten.to.dtype and _is_without_gradient(x) == _is_without_gradient(root)
    sources = (x, x.args[0]) if is_cast else (x,)
    if shape is None or _normed(last, root) not in sources or last.meta["val"].dtype != x.meta["val"].dtype:
        return None
    found = _Found(last, frozenset({root, root.args[0], squares, *nodes}), aten.rms_norm.default, x, (shape,))
    found, weight = _joined(found, aten.mul.Tensor)
    return _rounded(replace(found, args=(shape, weight, eps)))


def _layer_norm(root: Node) -> _Found | None:
    """The layer norm of which this is the rsqrt, or the sqrt that divides. The weight may be a factor of the
    numerator."""
    variance, eps = _arguments(root.args[0], aten.add.Tensor)
    if not isinstance(eps, float) or len(root.users) != 1:
        return None
    (last,) = root.users
    numerator, weight, inside = _normed(last, root), None, {root, root.args[0]}
    if numerator is not None and numerator.target is aten.mul.Tensor:
        inside.add(numerator)
        a, b = numerator.args
        numerator, weight = (a, b) if _is_node(a) and a.target is aten.sub.Tensor else (b, a)
    x, mean = _arguments(numerator, aten.sub.Tensor)
    source, dims, of_mean = _mean(mean)
    if x is None or source is not x:
        return None
    of_variance, shape = _variance(variance, x, mean, dims), _normalised_shape(x, dims)
    if of_variance is None or shape is None or last.meta["val"].dtype != x.meta["val"].dtype \
            or (weight is not None and not _fits(weight, shape, last)):
        return None
    found = _Found(last, frozenset({*inside, numerator, *of_mean, *of_variance}), aten.layer_norm.default, x, (shape,))
    bias = None
    if weight is None:
        found, weight = _joined(found, aten.mul.Tensor)
    if weight is not None:
        found, bias = _joined(found, aten.add.Tensor)
    return _rounded(replace(found, args=(shape, weight, bias, eps)))


def _mean(mean: Any) -> tuple[Any, Any, tuple[Node, ...]]:
    """The tensor of which this is the mean, the dims, which it keeps, and the nodes; (None, None, ()) for another."""
    total, share = _arguments(mean, aten.mul.Tensor)
    source, dims, kept = _arguments(total, aten.sum.dim_IntList, 3)
    if source is None or not kept or not dims:
        return None, None, ()
    count = math.prod(source.meta["val"].shape[d] for d in dims)
    return (source, dims, (mean, total)) if count and share == 1.0 / count else (None, None, ())


def _variance(variance: Any, x: Node, mean: Node, dims: Sequence[int]) -> tuple[Node, ...] | None:
    """The nodes of the variance of all elements (not of a sample) of x along dims; None for something else."""
    if _is_node(variance) and variance.target in (aten.var.dim, aten.var.correction):
        given = dict(zip(("x", "dim", "unbiased", "keepdim"), variance.args, strict=False)) | variance.kwargs
        whole = given.get("unbiased", given.get("correction", True)) in (False, 0)
        return (variance,) if given["x"] is x and given["dim"] == dims and whole and given.get("keepdim") else None
    squares, along, nodes = _mean(variance)
    centred = _squared(squares)
    if centred is None or along != dims or _arguments(centred, aten.sub.Tensor) != (x, mean):
        return None
    return *nodes, squares, centred


def _normalised_shape(x: Node, dims: Sequence[int] | None) -> list[int] | None:
    """The sizes of the dims, if these are the last ones of x, which has 32 or 64 bits; else None."""
    value = x.meta["val"]
    if not dims or value.dtype not in (torch.float32, torch.float64):
        return None
    first = value.dim() - len(dims)
    is_last = sorted(d % value.dim() for d in dims) == list(range(first, value.dim()))
    return list(value.shape[first:]) if is_last else None


def _arguments(node: Any, target: Any, count: int = 2) -> tuple[Any, ...]:
    """The arguments of an op; None for each if it is another one."""
    fits = _is_node(node) and node.target is target and len(node.args) == count and not node.kwargs
    return node.args if fits else (None,) * count


def _squared(squares: Any) -> Node | None:
    x, exponent = _arguments(squares, aten.pow.Tensor_Scalar)
    if x is not None and exponent == 2:
        return x
    (x,) = _arguments(squares, aten.square.default, 1)
    if x is not None:
        return x
    x, same = _arguments(squares, aten.mul.Tensor)
    return x if x is same else None


def _normed(last: Node, root: Node) -> Node | None:
    """The tensor that is multiplied by the rsqrt, or divided by the sqrt."""
    x, scale = _arguments(last, aten.mul.Tensor if root.target is aten.rsqrt.default else aten.div.Tensor)
    if x is root and root.target is aten.rsqrt.default:
        x, scale = scale, x
    return x if scale is root and _is_node(x) else None


def _joined(norm: _Found, op: Any) -> tuple[_Found, Node | None]:
    """The norm followed by ``op`` with a weight or bias (a tensor of its shape and type), and that tensor; if anything
    else reads the norm, the norm as it is, and None."""
    last = norm.last
    user = next(iter(last.users)) if len(last.users) == 1 else None
    other: Any = next((one for one in _arguments(user, op) if one is not last), None)
    if user is None or not _fits(other, norm.args[0], last):
        return norm, None
    return replace(norm, last=user, inside=norm.inside | {last}), other


def _fits(weight: Any, shape: Sequence[int], norm: Node) -> bool:
    """Whether this is a weight, or bias, of a norm."""
    return (_is_node(weight) and list(weight.meta["val"].shape) == list(shape)
            and weight.meta["val"].dtype == norm.meta["val"].dtype)


def _rounded(norm: _Found) -> _Found:
    """The norm of a 16-bit tensor without the casts to 32 bits and back, which torch's op does inside."""
    cast, last = norm.source, norm.last
    user = next(iter(last.users)) if len(last.users) == 1 else None
    if cast.target is not aten.to.dtype or norm.args[1] is not None or user is None or user.target is not aten.to.dtype:
        return norm
    narrow = cast.args[0].meta["val"].dtype
    if user.args[1] != narrow or norm.source.meta["val"].dtype is not torch.float32 \
            or narrow not in (torch.float16, torch.bfloat16) \
            or _is_without_gradient(cast) != _is_without_gradient(last):
        return norm
    others = {one for one in cast.users if one not in norm.inside and one is not last}
    return replace(norm, last=user, source=cast.args[0], inside=norm.inside | {last} | (set() if others else {cast}))


#: In order: the first that finds one is taken.
_FINDERS: Mapping[Any, tuple[Callable[[Node], _Found | None], ...]] = {
    **dict.fromkeys(_ARGUMENTS, (_activation,)),
    **dict.fromkeys((aten.rsqrt.default, aten.sqrt.default), (_layer_norm, _rms_norm))}

__all__ = ["gather_functions"]
