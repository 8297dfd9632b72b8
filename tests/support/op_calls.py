"""One op with its arguments, and its rule as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
import transformers.integrations.moe  # noqa: F401, its op of experts' products
from torch import Tensor

from autoparallel.capture import OpGraph, Ref, TensorMeta
from autoparallel.capture.graph import Node
from autoparallel.ops.arguments import fitted
from autoparallel.rules import Rule, find_rule

aten = torch.ops.aten


@dataclass(frozen=True)
class OpCall:
    """An op with its arguments; tensors among them are the inputs."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def inputs(self) -> list[Tensor]:
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def run(self, inputs: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        """The op on other inputs (and, for views, on other result sizes)."""
        remaining = iter(inputs)
        args, kwargs = pytree.tree_map(
            lambda leaf: next(remaining) if isinstance(leaf, Tensor) else leaf, (self.args, self.kwargs)
        )
        if sizes is not None:
            args = fitted(self.op, args, tuple(sizes), tuple(self.run(self.inputs)[0].shape))
        result = self.op(*args, **kwargs)
        return list(result) if isinstance(result, (tuple, list)) else [result]

    def rule(self) -> tuple[Rule, bool]:
        metas = [TensorMeta(tuple(t.shape), t.dtype, t.is_floating_point()) for t in self.inputs]
        nodes = [Node(i, f"x{i}", "input", None, (), {}, (m,)) for i, m in enumerate(metas)]
        numbers = iter(range(len(metas)))
        args, kwargs = pytree.tree_map(
            lambda leaf: Ref(next(numbers)) if isinstance(leaf, Tensor) else leaf, (self.args, self.kwargs)
        )
        results = tuple(TensorMeta(tuple(t.shape), t.dtype, t.is_floating_point()) for t in self.run(self.inputs))
        node = Node(len(nodes), "op", "op", self.op, tuple(args), kwargs, results)
        spec = pytree.tree_structure(())
        return find_rule(OpGraph((*nodes, node), spec, spec, {}, (), {}, {}), node)


def call(op: Any, *args: Any, **kwargs: Any) -> OpCall:
    return OpCall(op, args, kwargs)


def table(made: OpCall) -> list[str]:
    """The axis strategies of an op's rule, as in rules/README.md."""
    rule, known = made.rule()
    assert known, f"{made.op} has no rule"
    return [
        f"{r.name}: {' '.join(map(str, r.inputs))} -> {' '.join(map(str, r.outputs))}" for r in rule.axis_strategies()
    ]


def f(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape) + len(shape)))


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(3))


def mask(*shape: int) -> Tensor:
    return f(*shape) > 0
