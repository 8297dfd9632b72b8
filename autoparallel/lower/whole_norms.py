"""Norms as one op where nothing cuts what they sum.

Capture writes batch norm out as sums and element-wise ops (`capture/passes/batch_norm.py`), so that a batch cut over
ranks gets synchronised statistics by itself. Where a rank has the whole batch, no communication stands between these
ops, and they become torch's own batch norm again, which is several times as fast. An RMS norm on a CPU, of which torch
has no kernel, becomes ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from autoparallel.kernels.collectives import item
from autoparallel.kernels.norm import rms_norm, whole_batch_norm

aten = torch.ops.aten


@dataclass(frozen=True)
class _Norm:
    """A batch norm that was written out. ``last``: the node of its result; ``inside``: its other nodes; ``running``:
    for mean and variance, the buffer's old value and the node of the new one."""

    x: FxNode
    weight: FxNode | None
    bias: FxNode | None
    running: tuple[tuple[FxNode, FxNode], ...]
    momentum: float
    eps: float
    last: FxNode
    inside: tuple[FxNode, ...]


def whole_norms(module: GraphModule) -> GraphModule:
    """The same program with each batch norm whose ops follow each other as one op, and RMS norms as
    `kernels.norm.rms_norm`. Changes and returns ``module``."""
    for node in list(module.graph.nodes):
        if node.target is aten.rms_norm.default:
            node.target = rms_norm
        if node.target is aten.rsqrt.default and (norm := _norm_of(node)) is not None:
            _replace(module, norm)
    module.recompile()
    return module


def _replace(module: GraphModule, norm: _Norm) -> None:
    graph = module.graph
    buffers: list[FxNode | None] = [*(old for old, _ in norm.running)] or [None, None]
    with graph.inserting_after(norm.last):
        args = norm.x, norm.weight, norm.bias, *buffers, norm.momentum, norm.eps
        made = graph.call_function(whole_batch_norm, args)
    made.meta = {key: norm.last.meta[key] for key in ("decision", "block") if key in norm.last.meta}
    after = made
    for number, old in enumerate((norm.last, *(new for _, new in norm.running))):
        with graph.inserting_after(after):
            after = graph.call_function(item, (made, number))
        after.meta = dict(old.meta)
        old.replace_all_uses_with(after)
    waiting = [norm.last, *norm.inside]
    while left := [node for node in waiting if node.users]:  # users first
        _erase(module, [node for node in waiting if not node.users])
        waiting = left
    _erase(module, waiting)


def _erase(module: GraphModule, nodes: list[FxNode]) -> None:
    for node in nodes:
        module.graph.erase_node(node)


def _norm_of(root: FxNode) -> _Norm | None:
    """The batch norm whose 1 / deviation this is; None if it is not one, or has a step of communication in it."""
    inside: list[FxNode] = [root]

    def of(node: Any, target: Any) -> tuple[Any, ...]:
        """The arguments of an inner node; () if it is another op."""
        if not isinstance(node, FxNode) or node.target is not target:
            return ()
        inside.append(node)
        return node.args

    variance, eps = _two(of(root.args[0], aten.add.Tensor))
    squares, scale = _two(of(variance, aten.mul.Tensor))
    square, dims = _two(of(squares, aten.sum.dim_IntList)[:2])
    centred, same = _two(of(square, aten.mul.Tensor))
    x, mean = _two(of(centred, aten.sub.Tensor))
    total, scale_too = _two(of(mean, aten.mul.Tensor))
    x_too, dims_too = _two(of(total, aten.sum.dim_IntList)[:2])
    if x is None or x is not x_too or centred is not same or dims != dims_too or not isinstance(eps, float):
        return None
    value = x.meta["val"]
    if list(dims) != [0, *range(2, value.dim())] or value.dtype.itemsize < 4:
        return None
    count = value.numel() // max(1, value.shape[1])
    last = _other_user(root, ())
    if count < 2 or not scale == scale_too == 1.0 / count or last is None or last.target is not aten.mul.Tensor:
        return None
    if set(last.args) != {centred, root}:
        return None
    last, weight, bias = _scaled(last, value, inside)
    found = [one for one in (_running(mean, inside), _running(squares, inside)) if one is not None]
    if not _fit(found, value, count):
        return None
    ends = {last, *(one.new for one in found)}
    if any(user not in inside and user not in ends for node in inside if node not in ends for user in node.users):
        return None
    return _Norm(x, weight, bias, tuple((one.old, one.new) for one in found), found[0].share if found else 0.0, eps,
                 last, tuple(node for node in dict.fromkeys(inside) if node is not last))


def _fit(running: list[_Running], value: torch.Tensor, count: int) -> bool:
    """Whether there are no running statistics, or those that batch norm keeps of ``count`` values per channel."""
    if len(running) != 2:
        return not running
    momentum = running[0].share
    equal = all(one.old.meta["val"].shape == value.shape[1:2] and one.old.meta["val"].dtype == value.dtype
                and one.kept == 1.0 - momentum for one in running)
    return equal and running[1].share == 1.0 / (count - 1) * momentum


def _two(args: tuple[Any, ...]) -> tuple[Any, Any]:
    return args if len(args) == 2 else (None, None)


def _other_user(node: FxNode, known: tuple[FxNode, ...]) -> FxNode | None:
    """The one user that is not known, if there is one only."""
    others = [user for user in node.users if user not in known]
    return others[0] if len(others) == 1 else None


def _scaled(node: FxNode, value: torch.Tensor, inside: list[FxNode]) -> tuple[FxNode, FxNode | None, FxNode | None]:
    """The result of ``node`` times a weight plus a bias, where there are such, and these [channels]."""
    found: list[FxNode | None] = []
    for target in (aten.mul.Tensor, aten.add.Tensor):
        user, vector = _other_user(node, ()), None
        if user is not None and user.target is target and len(user.args) == 2 and user.args[0] is node:
            vector = _vector(user.args[1], value)
        found.append(vector)
        if vector is not None:
            assert user is not None and isinstance(user.args[1], FxNode)
            if not any(user.args[1] is one for one in inside):
                inside += [node, *([user.args[1]] if len(user.args[1].users) == 1 else [])]
            node = user
    return node, found[0], found[1]


def _vector(wide: Any, value: torch.Tensor) -> FxNode | None:
    """The vector [channels] that was reshaped to multiply or add along dim 1."""
    if not isinstance(wide, FxNode) or wide.target is not aten.reshape.default:
        return None
    vector = wide.args[0]
    fits = isinstance(vector, FxNode) and vector.meta["val"].shape == (value.shape[1],)
    shape = (1, value.shape[1], *(1 for _ in range(value.dim() - 2)))
    same = fits and vector.meta["val"].dtype == value.dtype  # type: ignore[union-attr]
    return vector if same and tuple(wide.args[1]) == shape else None  # type: ignore[arg-type, return-value]


class _Running(NamedTuple):
    """A running statistic: its old value, the node of the new one, the shares of the batch and of the old value."""

    old: FxNode
    new: FxNode
    share: float
    kept: float


def _running(statistic: FxNode, inside: list[FxNode]) -> _Running | None:
    """The running statistic into which this one of the batch goes, if there is one."""
    chain = [statistic]
    for target in (aten.detach.default, aten.reshape.default, aten.mul.Tensor):
        users = [user for user in chain[-1].users if user.target is target and user not in inside]
        if len(users) != 1:
            return None
        chain.append(users[0])
    new, share = _other_user(chain[-1], ()), chain[-1].args[1]
    if new is None or new.target is not aten.add.Tensor or not isinstance(kept := new.args[0], FxNode):
        return None
    if kept.target is not aten.mul.Tensor or len(kept.users) != 1 or not isinstance(old := kept.args[0], FxNode):
        return None
    if not isinstance(share, float) or not isinstance(rest := kept.args[1], float):
        return None
    inside += [*chain[1:], kept, new]
    return _Running(old, new, share, rest)


__all__ = ["whole_norms"]
