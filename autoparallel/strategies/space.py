"""The strategy graph of a program on a mesh: its decisions, the tensors between them, the strategies of each.

    decision      a node: an op's strategy; the storage layout of a parameter, buffer or input; the layout of an output;
                  a buffer's new value; a shared read (the layout in which a value with several readers is read)
    tensor use    an edge: one tensor from a decision to a decision; one redistribution where the two layouts differ
    strategy      a choice for a decision: the number of an axis strategy for each mesh axis

The search prices these nodes and edges, the plan records the choices, lowering emits one op or redistribution for each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from autoparallel.axis_names import JOINED, apart
from autoparallel.capture import OpGraph, Ref, TensorMeta
from autoparallel.capture.blocks import block_path
from autoparallel.capture.graph import Node
from autoparallel.capture.outputs import loss_output
from autoparallel.errors import MeshError
from autoparallel.layout import INVARIANT, PARTIAL, REPLICATE, Layout, LayoutSpace, Placement, shard, without_gradient
from autoparallel.rules.registry import find_rule
from autoparallel.rules.rule import AxisStrategy, Rule
from autoparallel.strategies.interleaved import interleaved_placements, with_interleaved

Strategy = tuple[int, ...]


class Decision(NamedTuple):
    """A node of the strategy graph.

    ``kind``: parameter, buffer, input, op, shared_read, output or update (a buffer's new value). ``node``: the graph
    node of an op or placeholder; ``ref``: the value of a shared read, output or update.
    """

    index: int  # type: ignore[assignment]  # a tuple has a method of this name
    name: str
    kind: str
    node: int = -1
    ref: Ref | None = None
    path: str = ""


class TensorUse(NamedTuple):
    """An edge of the strategy graph: output ``output`` of decision ``source``, read as input ``position`` of
    ``target``."""

    source: int
    output: int
    target: int
    position: int
    meta: TensorMeta


class StrategySet:
    """All strategies of a decision; decisions with equal signatures share one set.

    ``axis_strategies``: the choices along one mesh axis. ``strategies[c]``: strategy c, the number of an axis strategy
    for each mesh axis; ``array`` has the same as integers (strategies, axes). ``inputs[i][c]`` and ``outputs[o][c]``:
    numbers of the layouts of input i and output o in the tensor's `LayoutSpace`. ``known``: the op has a rule.
    """

    def __init__(
        self,
        axis_strategies: Sequence[AxisStrategy],
        inputs: Sequence[TensorMeta],
        outputs: Sequence[TensorMeta],
        mesh_shape: tuple[int, ...],
        spaces: Spaces,
        rule: Rule | None = None,
        known: bool = True,
    ) -> None:
        self.rule, self.known, self.mesh_shape = rule, known, mesh_shape
        self.input_metas, self.output_metas = tuple(inputs), tuple(outputs)
        self.axis_strategies = _distinct(axis_strategies, inputs, outputs)
        spaces_in, spaces_out = [spaces(m) for m in inputs], [spaces(m) for m in outputs]
        allowed = [
            [r for r, axis_strategy in enumerate(self.axis_strategies) if _even(axis_strategy, (n,))]
            for n in mesh_shape
        ]
        grid = list(itertools.product(*allowed))
        strategies = np.array(grid, dtype=np.int64).reshape(len(grid), len(mesh_shape))
        keep = np.array([self._compatible(strategy) for strategy in grid], dtype=bool)
        self.inputs = [
            self._numbers(strategies, s, [axis_strategy.inputs[i] for axis_strategy in self.axis_strategies])
            for i, s in enumerate(spaces_in)
        ]
        self.outputs = [
            self._numbers(strategies, s, [axis_strategy.outputs[o] for axis_strategy in self.axis_strategies])
            for o, s in enumerate(spaces_out)
        ]
        for numbers, space in zip(self.inputs + self.outputs, spaces_in + spaces_out, strict=True):
            keep &= space.legal[numbers]
        self.array = strategies[keep]
        self.strategies: tuple[Strategy, ...] = tuple(map(tuple, self.array.tolist()))
        self.inputs = [numbers[keep] for numbers in self.inputs]
        self.outputs = [numbers[keep] for numbers in self.outputs]

    @staticmethod
    def _numbers(strategies: np.ndarray, space: LayoutSpace, placements: Sequence[object]) -> np.ndarray:
        codes = np.array([space.code(p) for p in placements], dtype=np.int64)  # type: ignore[arg-type]
        return (codes[strategies] * space.radices).sum(axis=1)

    def _compatible(self, strategy: Strategy) -> bool:
        """Whether these axis strategies may be combined: none excludes another, or stands before one that it is inside
        of, and evenly divided sizes stay even."""
        for i, r in enumerate(strategy):
            one, later = self.axis_strategies[r], [self.axis_strategies[o] for o in strategy[i + 1 :]]
            if one.inner and any(other.factor == one.factor and not other.inner for other in later):
                return False
            if self.axis_strategies[r].apart and self.axis_strategies[r].apart & {
                self.axis_strategies[o].name for o in (*strategy[:i], *strategy[i + 1 :])
            }:
                return False
        shards: dict[str, int] = {}
        for r, n in zip(strategy, self.mesh_shape, strict=True):
            if (factor := self.axis_strategies[r].factor) and not self.axis_strategies[r].inner:
                shards[factor] = shards.get(factor, 1) * n
        return all(
            size % shards[self.axis_strategies[r].factor] == 0
            for r in strategy
            if self.axis_strategies[r].factor
            for size in self.axis_strategies[r].even
        )

    @cached_property
    def position(self) -> Mapping[Strategy, int]:
        return {strategy: c for c, strategy in enumerate(self.strategies)}

    def axis_strategy_named(self, name: str) -> int:
        """The number of the axis strategy of that name. Raises KeyError if there is none."""
        for number, axis_strategy in enumerate(self.axis_strategies):
            if axis_strategy.name == name:
                return number
        raise KeyError(name)

    def names(self, strategy: Strategy) -> tuple[str, ...]:
        return tuple(self.axis_strategies[r].name for r in strategy)

    def input_layout(self, strategy: Strategy, position: int) -> Layout:
        return tuple(self.axis_strategies[r].inputs[position] for r in strategy)

    def output_layout(self, strategy: Strategy, output: int = 0) -> Layout:
        return tuple(self.axis_strategies[r].outputs[output] for r in strategy)


def _even(axis_strategy: AxisStrategy, cuts: tuple[int, ...]) -> bool:
    return all(size % n == 0 for n in cuts for size in axis_strategy.even)


def _distinct(
    axis_strategies: Sequence[AxisStrategy], inputs: Sequence[TensorMeta], outputs: Sequence[TensorMeta]
) -> tuple[AxisStrategy, ...]:
    """The axis strategies with I for R on values without gradient, without duplicates (the first of each stays)."""
    found: dict[object, AxisStrategy] = {}
    for axis_strategy in axis_strategies:
        ins = tuple(
            p if m.requires_grad else without_gradient(p) for p, m in zip(axis_strategy.inputs, inputs, strict=True)
        )
        outs = tuple(
            p if m.requires_grad else without_gradient(p) for p, m in zip(axis_strategy.outputs, outputs, strict=True)
        )
        made = replace(axis_strategy, inputs=ins, outputs=outs)
        found.setdefault((ins, outs, axis_strategy.variant), made)
    return tuple(found.values())


class Spaces:
    """`LayoutSpace` by tensor shape, memoised. ``interleaved``: placements of some shapes beside those of all."""

    def __init__(self, mesh_shape: tuple[int, ...], interleaved: Mapping[tuple[int, ...], tuple[Placement, ...]]
                 ) -> None:
        self.mesh_shape, self.interleaved = mesh_shape, interleaved
        self._made: dict[tuple[tuple[int, ...], bool], LayoutSpace] = {}

    def __call__(self, meta: TensorMeta) -> LayoutSpace:
        key = (meta.shape, meta.requires_grad)
        if key not in self._made:
            self._made[key] = LayoutSpace(meta.shape, self.mesh_shape, meta.requires_grad,
                                          self.interleaved.get(meta.shape, ()))
        return self._made[key]


def _counts(graph: OpGraph) -> list[list[int]]:
    """The number of readers of each output, by node."""
    found = [[0] * len(node.outputs) for node in graph]
    for node in graph:
        for ref in node.inputs:
            found[ref.node][ref.output] += 1
    return found


def _identities(meta: TensorMeta, kinds: str, interleaved: Sequence[Placement] = ()) -> list[AxisStrategy]:
    placements = [p for p in (INVARIANT, REPLICATE, PARTIAL) if p.kind in kinds]
    placements += [shard(d) for d, size in enumerate(meta.shape) if size > 1]
    placements += interleaved
    return [AxisStrategy(str(p), (p,), (p,), factor=str(p) if p.is_shard else "") for p in placements]


class StrategySpace:
    """The strategy graph of a program on a mesh of ``mesh_shape``.

    ``stored``: layouts of parameters that lie there already. ``decisions``; ``uses``, ordered by target and by the
    target's inputs; ``strategy_sets``, one for each decision. Raises MeshError if ``axis_names`` do not match the mesh.
    """

    def __init__(self, graph: OpGraph, mesh_shape: Sequence[int], axis_names: Sequence[str] | None = None,
                 stored: Mapping[str, Layout] | None = None) -> None:
        self.graph = graph
        self.mesh_shape = tuple(mesh_shape)
        self.axis_names = tuple(axis_names or (f"axis{i}" for i in range(len(self.mesh_shape))))
        if len(self.axis_names) != len(self.mesh_shape):
            raise MeshError(f"{len(self.axis_names)} axis names {self.axis_names} for a mesh of {self.mesh_shape}: "
                            "give one for each axis")
        if joined := [name for name in self.axis_names if len(apart(name)) > 1]:
            raise MeshError(f"the axis name {joined[0]!r} has a {JOINED!r}, which joins the names of several axes: "
                            "give another name")
        self.spaces = Spaces(self.mesh_shape, interleaved_placements(graph, self.mesh_shape, stored or {}))
        self.decisions: list[Decision] = []
        self.uses: list[TensorUse] = []  # ordered by target, then by the target's inputs
        self.strategy_sets: list[StrategySet] = []
        self._sets: dict[object, StrategySet] = {}
        self._readers, self._source = _counts(graph), list[list[tuple[int, int]]]()  # by node and output
        for node in graph:
            if node.kind == "output":
                self._add_results()
            else:
                self._add_node(node)

    def __len__(self) -> int:
        return len(self.decisions)

    @cached_property
    def decision_named(self) -> Mapping[str, int]:
        return {decision.name: decision.index for decision in self.decisions}

    @cached_property
    def uses_by(self) -> Mapping[int, tuple[TensorUse, ...]]:
        """The tensor uses of each decision's inputs, in order, by decision."""
        found: dict[int, list[TensorUse]] = {}
        for use in self.uses:
            found.setdefault(use.target, []).append(use)
        return {target: tuple(uses) for target, uses in found.items()}

    @cached_property
    def readers_of(self) -> Mapping[int, tuple[int, ...]]:
        """The readers of each decision's outputs, in order, by decision."""
        found: dict[int, list[int]] = {}
        for use in self.uses:
            found.setdefault(use.source, []).append(use.target)
        return {source: tuple(targets) for source, targets in found.items()}

    @cached_property
    def differentiated(self) -> frozenset[int]:
        """The decisions through which backward runs: from the loss, or from all outputs if there is none, to what they
        are computed from, but not through ops without a gradient."""
        loss, reached, found = loss_output(self.graph), set[int](), set[int]()
        for decision in reversed(self.decisions):
            if decision.kind == "output":
                runs = loss is None or int(decision.path) == loss
            else:
                runs = decision.index in reached and self._differentiable(decision)
            if runs:
                found.add(decision.index)
                reached.update(u.source for u in self.uses_by.get(decision.index, ()) if u.meta.requires_grad)
        return frozenset(found)

    def _differentiable(self, decision: Decision) -> bool:
        if decision.kind == "op":
            node = self.graph.nodes[decision.node]
            stops = node.no_grad or node.target is torch.ops.aten.detach.default
            return not stops and any(meta.requires_grad for meta in node.outputs)
        return decision.kind != "update"

    @cached_property
    def blocks(self) -> list[str | None]:
        """By decision, the block (`capture.blocks.block_path`) of an op or shared read; None outside of blocks."""
        nodes = self.graph.nodes
        origins = [decision.node if decision.ref is None else decision.ref.node for decision in self.decisions]
        return [block_path(nodes[origin].module_path) if decision.kind in ("op", "shared_read") else None
                for decision, origin in zip(self.decisions, origins, strict=True)]

    def _add_decision(self, strategy_set: StrategySet, name: str, kind: str, node: int, ref: Ref | None, path: str,
                  inputs: Sequence[Ref]) -> int:
        """Add a decision and the tensor uses of its inputs; returns its number."""
        index, nodes = len(self.decisions), self.graph.nodes
        self.decisions.append(Decision(index, name, kind, node, ref, path))
        self.strategy_sets.append(strategy_set)
        for position, value in enumerate(inputs):
            source, output = self._source[value.node][value.output]
            self.uses.append(TensorUse(source, output, index, position, nodes[value.node].outputs[value.output]))
        return index

    def _add_node(self, node: Node) -> None:
        index = self._add_decision(self._set_of(node), node.name, node.kind, node.index, None, node.path, node.inputs)
        self._source.append([(index, output) for output in range(len(node.outputs))])
        for output, readers in enumerate(self._readers[node.index]):
            if readers > 1 and node.outputs[output].requires_grad:
                self._add_shared_read(Ref(node.index, output), node)

    def _add_shared_read(self, ref: Ref, node: Node) -> None:
        meta = self.graph.meta(ref)
        name = f"{node.name}:{ref.output}:read" if len(node.outputs) > 1 else f"{node.name}:read"
        strategy_set = self._shared(("shared_read", meta), lambda: self._identity(
            meta, _identities(meta, "IRP", self.spaces(meta).interleaved)))
        self._source[ref.node][ref.output] = (
            self._add_decision(strategy_set, name, "shared_read", -1, ref, node.path, [ref]),
            0,
        )

    def _add_results(self) -> None:
        for number, value in enumerate(self.graph.outputs):
            if isinstance(value, Ref):
                self._add_end(f"output:{number}", "output", value, "I", str(number))
        for name, value in self.graph.mutations.items():
            self._add_end(f"update:{name}", "update", value, "", name)

    def _add_end(self, name: str, kind: str, ref: Ref, kinds: str, path: str) -> None:
        meta = self.graph.meta(ref)
        if kind == "update":
            strategy_set = self._shared((kind, meta), lambda: self._only_whole(meta))
        else:
            strategy_set = self._shared((kind, meta), lambda: self._identity(meta, _identities(meta, kinds)))
        self._add_decision(strategy_set, name, kind, -1, ref, path, [ref])

    def _shared(self, key: object, make: Callable[[], StrategySet]) -> StrategySet:
        found = self._sets.get(key)
        if found is None:
            found = self._sets[key] = make()
        return found

    def _identity(self, meta: TensorMeta, axis_strategies: Sequence[AxisStrategy]) -> StrategySet:
        return StrategySet(axis_strategies, [meta], [meta], self.mesh_shape, self.spaces)

    def _only_whole(self, meta: TensorMeta) -> StrategySet:
        axis_strategies = [AxisStrategy("I", (INVARIANT,), (INVARIANT,))]
        return StrategySet(axis_strategies, [meta], [meta], self.mesh_shape, self.spaces)

    def _set_of(self, node: Node) -> StrategySet:
        if node.kind == "op":
            return self._shared(("op", self.graph.op_kinds[node.index]), lambda: self._op_set(node))
        return self._shared((node.kind, node.outputs), lambda: self._stored_set(node.kind, node.outputs[0]))

    def _stored_set(self, kind: str, meta: TensorMeta) -> StrategySet:
        axis_strategies = [AxisStrategy("I", (), (INVARIANT,))]
        if kind != "buffer":
            interleaved = self.spaces(meta).interleaved if kind == "parameter" else ()
            axis_strategies = [AxisStrategy(r.name, (), r.outputs, r.factor)
                               for r in _identities(meta, "I", interleaved)]
        return StrategySet(axis_strategies, [], [meta], self.mesh_shape, self.spaces)

    def _op_set(self, node: Node) -> StrategySet:
        rule, known = find_rule(self.graph, node)
        inputs = [self.graph.meta(ref) for ref in node.inputs]
        axis_strategies = with_interleaved(node, rule, [self.spaces(m).interleaved for m in (*inputs, *node.outputs)])
        return StrategySet(axis_strategies, inputs, node.outputs, self.mesh_shape, self.spaces, rule, known)


def is_parameter(space: StrategySpace, index: int) -> bool:
    """Whether a decision's value is a parameter, or a shared read of parameters."""
    decision = space.decisions[index]
    if decision.kind == "shared_read":
        return all(space.decisions[use.source].kind == "parameter" for use in space.uses_by[index])
    return decision.kind == "parameter"
