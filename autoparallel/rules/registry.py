"""The registry of rules: families register builders by op; an op without a rule is repeated on every rank."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from autoparallel.capture.graph import Node, OpGraph, Ref, TensorMeta, copies
from autoparallel.ops.user_function import function_of, user_function
from autoparallel.rules.rule import Rule

Builder = Callable[["OpView"], Rule | None]
FAMILIES = ("matmul", "einsum", "experts", "attention", "pointwise", "views", "reduce", "order", "norm", "conv",
            "embedding", "gather", "linalg", "recurrent", "spectral", "loss", "factory")
#: Rule builders by op, written by `register` when a family is imported and by users' `register_rule`.
_BUILDERS: dict[Any, Builder] = {}
#: Ops whose rule is a user's: families that are loaded later do not replace it.
_USERS: set[Any] = set()


class OpView:
    """The arguments of a rule builder: values by schema name, tensors as `TensorMeta`s."""

    def __init__(self, graph: OpGraph, node: Node) -> None:
        self.target = node.target
        self.outputs = node.outputs
        self.inputs: tuple[TensorMeta, ...] = tuple(graph.meta(ref) for ref in node.inputs)
        self.node = node
        self.copies = copies(graph, node)
        self._graph = graph

    def arg(self, name: str) -> Any:
        """The value of a schema argument (its default when not given); Refs become TensorMetas."""
        for position, argument in enumerate(self.target._schema.arguments):
            if argument.name == name:
                if name in self.node.kwargs:
                    value = self.node.kwargs[name]
                elif position < len(self.node.args):
                    value = self.node.args[position]
                else:
                    value = argument.default_value
                return self._graph.meta(value) if isinstance(value, Ref) else value
        raise KeyError(f"{self.target} has no argument {name!r}")

    @property
    def arguments(self) -> dict[str, Any]:
        """All of them by schema name, as `arg` gives them."""
        return {argument.name: self.arg(argument.name) for argument in self.target._schema.arguments}

    def meta(self, ref: Ref) -> TensorMeta:
        """The `TensorMeta` of a tensor inside a list argument."""
        return self._graph.meta(ref)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [meta.shape for meta in self.inputs]

    @property
    def out(self) -> TensorMeta:
        return self.outputs[0]


def rule_for(*targets: Any) -> Callable[[Builder], Builder]:
    """Register a builder for these ops (or names such as "mylib::op", of libraries that need not be there).

    It may return None: then the op is repeated on every rank.
    """

    def register(builder: Builder) -> Builder:
        for target in targets:
            _BUILDERS[target] = builder
        return builder

    return register


def describe(target: Any, builder: Builder) -> None:
    """As `rule_for`, of a user's op: instead of whatever describes it here. None: as an op that nobody describes."""
    _load_families()
    _USERS.add(target)
    _BUILDERS[target] = builder


@lru_cache(maxsize=1)
def _load_families() -> None:
    for family in FAMILIES:
        importlib.import_module(f"autoparallel.rules.families.{family}")


def find_rule(graph: OpGraph, node: Node) -> tuple[Rule, bool]:
    """(rule, known): the op's rule, and False when it is only the last resort."""
    view = OpView(graph, node)
    target = function_of(node.args[0]) if node.target is user_function else node.target
    builder = _builder_of(target)
    rule = builder(view) if builder is not None else None
    if rule is None and (builder is None or target in _USERS):
        rule = _discovered(graph, node, repeated(view))
    return (rule, True) if rule is not None else (repeated(view), False)


def _discovered(graph: OpGraph, node: Node, plain: Rule) -> Rule | None:
    from autoparallel.rules.discover import discover

    return discover(graph, node, plain)


def family_of(target: Any) -> str | None:
    """The family file that describes an op; None where none does."""
    builder = _builder_of(target)
    return builder.__module__.rpartition(".")[2] if builder is not None else None


def _builder_of(target: Any) -> Builder | None:
    _load_families()
    if isinstance(target, type):  # a torch.autograd.Function
        return _BUILDERS.get(target)
    builder = _BUILDERS.get(target) or _BUILDERS.get(target._schema.name)
    if builder is None and torch.Tag.pointwise in getattr(target, "tags", ()):
        return _BUILDERS["pointwise"]
    return builder


def repeated(view: OpView) -> Rule:
    """The last resort: every tensor whole, the work done on every rank."""
    random = torch.Tag.nondeterministic_seeded in getattr(view.target, "tags", ())
    return Rule(
        tuple((None,) * len(m.shape) for m in view.inputs),
        tuple((None,) * len(m.shape) for m in view.outputs),
        {},
        flops=float(view.out.num_elements) if view.outputs else 0.0,
        saves=frozenset(i for i, m in enumerate(view.inputs) if m.requires_grad),
        random=random,
    )
