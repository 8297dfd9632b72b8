"""Micro-batches: the program of one part of the batch, whose results combine to exactly those of the whole batch.

Micro-batches are treated as ranks of a mesh axis that run one after the other, so the rules give the placement of each
value along that axis. Only these redistributions are possible between micro-batches:

    I -> R                                   nothing to do: gradients accumulate
    any, of a value that needs neither       computed once for the whole batch, in the prologue (the number of valid
    parameters nor a gradient                tokens, all positions)
    P or S of an output                      the loss is the sum of the micro-batches' losses, an output is concatenated
    I or R -> P, of a value that depends     each micro-batch adds its share: the value over their number (a penalty of
    neither on the batch nor on chance       weights, or a number, that is added to the loss)

Anything else that a model computes across its batch (statistics of batch norm) is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar, cast

import numpy as np
import torch
import torch.utils._pytree as pytree

from autoparallel import clock
from autoparallel.capture import OpGraph, Ref, TensorMeta
from autoparallel.capture.graph import Node, is_floating
from autoparallel.capture.outputs import loss_output
from autoparallel.errors import InfeasibleError, InputError
from autoparallel.layout import Layout, Placement, RedistributionTable, local_shape
from autoparallel.ops.arguments import SIZE_ARGUMENT
from autoparallel.ops.batch_norm import batch_norm
from autoparallel.ops.embedding_bag import embedding_bag
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer
from autoparallel.search import solve
from autoparallel.strategies.space import Decision, Strategy, StrategySpace, TensorUse
from cost_models import Cluster

aten = torch.ops.aten
T = TypeVar("T")
#: Penalties: of a value in the prologue (scaled by its size), of a share, and of a redistribution that is impossible.
PROLOGUE, SHARED, IMPOSSIBLE = 1e-2, 1e-5, 1.0


@dataclass(frozen=True)
class Feed:
    """An input of the micro-batch program: value ``ref`` of the whole program, split along ``dim`` (-1: not split)."""

    ref: Ref
    dim: int = -1


@dataclass(frozen=True)
class Share:
    """Value ``ref`` over the number of micro-batches, each of which adds so much to a sum."""

    ref: Ref


@dataclass(frozen=True)
class MicroBatches:
    """A program split into ``count`` micro-batches.

    ``whole``: the program of the batch. ``body``: the program of one micro-batch, with inputs ``feeds`` in order.
    ``results``: how the outputs combine: P summed, S(d) concatenated along d, I any of them. ``loss``: the number of
    the output from which backward starts (None: there is no scalar loss).
    """

    whole: OpGraph
    count: int
    body: OpGraph
    feeds: tuple[Feed, ...]
    results: tuple[Placement | None, ...]
    loss: int | None


def batch_size(graph: OpGraph) -> int:
    """The length of dim 0 of the first input with dims. Raises InputError if there is none."""
    for node in graph.of_kind("input"):
        if node.outputs[0].shape:
            return node.outputs[0].shape[0]
    raise InputError("micro-batches need an input with a batch dim (dim 0); this call has none")


def split_batch(graph: OpGraph, count: int) -> MicroBatches:
    """Split a program into ``count`` micro-batches.

    Raises InputError if ``count`` does not divide the batch, InfeasibleError if the model computes across samples in a
    way that micro-batches cannot.
    """
    return Splits(graph)(count)


class Splits:
    """Splits one program into micro-batches, and keeps the result for each count, and what else is made of it `once`.

    Placements along the batch are found for the smallest factor of a count, and hold for the count where it divides
    every dim that they cut: a further count takes half of the first one's time. (The first of DeepSeek-V3's 61 layers
    takes two seconds.)"""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self._returned = replace(graph, outputs=graph.outputs[: graph.out_spec.num_leaves], left=())    # of a step
        self._made: dict[int, MicroBatches] = {}
        self._others: dict[object, object] = {}
        self._impossible: dict[int, str] = {}    # why, by the smallest factor of a count

    def __call__(self, count: int) -> MicroBatches:
        """As `split_batch`, with its errors."""
        if count not in self._made:
            self._made[count] = self._split(count) if count != 1 else _unsplit(self.graph)
        return self._made[count]

    def once(self, key: object, make: Callable[[], T]) -> T:
        """What ``make`` returned at the first call with this ``key``."""
        if key not in self._others:
            self._others[key] = make()
        return cast(T, self._others[key])

    def _split(self, count: int) -> MicroBatches:
        batch = batch_size(self.graph)
        if not batch:
            raise InputError(f"{count} micro-batches of an empty batch (dim 0 of the first input is 0): leave such "
                             "batches out, or give micro_batches=1")
        if count < 1 or batch % count:
            counts = [n for n in range(1, batch + 1) if batch % n == 0]
            raise InputError(f"{count} micro-batches do not divide the batch of {batch}: take one of {counts}")
        least = next(n for n in range(2, count + 1) if count % n == 0)
        if least in self._impossible:
            raise InfeasibleError(self._impossible[least])
        try:
            cut = self.once(("cut", least), lambda: _cut(self._returned, least))
        except InfeasibleError as error:
            self._impossible[least] = str(error)
            raise
        if not cut.divides_by(count):
            cut = _cut(self._returned, count)
        clock.did("decisions made", len(self.graph.nodes))
        return _Splitter(cut, count).run()


def _unsplit(graph: OpGraph) -> MicroBatches:
    inputs = {int(node.path): Feed(Ref(node.index)) for node in graph.of_kind("input")}
    feeds = tuple(inputs.get(i, Feed(Ref(-1))) for i in range(max(inputs, default=-1) + 1))
    results = tuple(Placement("I") if isinstance(value, Ref) else None for value in graph.outputs)
    return MicroBatches(graph, 1, graph, feeds, results, loss_output(graph))


class _BatchAxis:
    """Penalties on placements along the micro-batch axis (see `pricing.Penalties`)."""

    def __init__(self, space: StrategySpace, batch: int) -> None:
        self.space, self.batch = space, batch
        self.loss = loss_output(space.graph)
        self.free = _free_of_parameters(space)
        self.varying = _varying(space, batch)
        self.most = max((k.meta.num_elements for k in space.uses if k.source in self.free), default=1)

    def decision_penalties(self, index: int) -> np.ndarray:
        decision, s = self.space.decisions[index], self.space.strategy_sets[index]
        if decision.kind not in ("parameter", "input"):    # micro-batches exchange nothing inside an op
            exchanges = np.array([bool(axis_strategy.inside) for axis_strategy in s.axis_strategies])
            return np.asarray(exchanges[s.array].any(axis=1), float)
        shape = s.output_metas[0].shape
        cut = decision.kind == "input" and bool(shape) and shape[0] == self.batch
        return np.array([s.output_layout(x)[0] != Placement("S", 0) if cut else s.output_layout(x)[0].is_shard
                         for x in s.strategies], dtype=float)

    def use_penalties(self, use: TensorUse, table: RedistributionTable) -> np.ndarray:
        s, t = self.space.strategy_sets[use.source], self.space.strategy_sets[use.target]
        sources = [s.output_layout(x, use.output)[0] for x in s.strategies]
        targets = [t.input_layout(x, use.position)[0] for x in t.strategies]
        return np.array([[self.penalty(use, p, q) for q in targets] for p in sources])

    def penalty(self, use: TensorUse, source: Placement, target: Placement) -> float:
        """The penalty of a use between two placements; `IMPOSSIBLE` if micro-batches cannot do it."""
        decision = self.space.decisions[use.target]
        if decision.kind == "output" and int(decision.path) == self.loss:
            return IMPOSSIBLE if source.kind != "P" and use.meta.requires_grad else 0.0
        if source == target or (source.kind, target.kind) == ("I", "R") or decision.kind == "output":
            return 0.0
        if target.kind == "P":
            replicated = not source.is_shard and source.kind != "P" and use.source not in self.varying
            return SHARED if replicated and is_floating(use.meta.dtype) else IMPOSSIBLE
        if use.source not in self.free:
            return IMPOSSIBLE
        return PROLOGUE * use.meta.num_elements / self.most  # a prologue's value is held whole

    def check(self, strategies: Sequence[Strategy]) -> None:
        """Raises InfeasibleError naming the ops that still communicate between micro-batches under the chosen
        strategies."""
        found, of_loss = list[str](), False
        for use in self.space.uses:
            source = self.space.strategy_sets[use.source].output_layout(strategies[use.source], use.output)[0]
            target = self.space.strategy_sets[use.target].input_layout(strategies[use.target], use.position)[0]
            if self.penalty(use, source, target) >= IMPOSSIBLE:
                of_loss = of_loss or (not found and use.meta.num_elements == 1)
                found.append(self._describe(use))
        for index, strategy in enumerate(strategies):
            if self.decision_penalties(index)[self.space.strategy_sets[index].position[strategy]]:
                found.append(self.space.decisions[index].name)
        if found and (norms := _batch_norms(self.space.graph)):
            when, instead = " in training mode", "group norm, or these modules in eval mode"
            if not _with_running_statistics(self.space.graph):
                when, instead = "", "or group norm"
            named = ", ".join(norms[:3]) + (" and others" if len(norms) > 3 else "")
            raise InfeasibleError(f"the batch cannot be split into micro-batches, because batch norm{when} takes the "
                                  f"mean over all of its samples: {named}. Use micro_batches=1, {instead}")
        if found and (bags := _bags_by_offsets(self.space.graph)):
            raise InfeasibleError(
                "the batch cannot be split into micro-batches, because the ids of EmbeddingBag with offsets are one "
                f"list for all samples, without rows to cut: {'; '.join(map(self._node, bags[:3]))}. Give it 2-d ids, "
                "a row for each bag, filled up with its padding_idx (which no mode counts), and no offsets; or use "
                "micro_batches=1")
        if found:
            across = self._first_across(shares=False) or self._first_across(shares=True)
            found = found if across is None else [across]
            raise InfeasibleError(
                "the batch cannot be split into micro-batches, because the model computes across its samples: "
                + "; ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
                + (". Use micro_batches=1, or a loss that is a mean or sum over samples (not a root, a quotient or a "
                   "maximum of one)" if of_loss else
                   ". Use micro_batches=1, or a model that treats samples apart (batch norm in eval mode does)"))

    def _first_across(self, shares: bool) -> str | None:
        """The first op that cannot have its micro-batch's part of the values that need a gradient and depend on the
        batch; None if each can for itself. (The search breaks the rules where that is cheapest, which is seldom
        there.) ``shares``: whether tensors are computed from shares of weights, by which every linear op could run."""
        possible: list[set[Strategy]] = []
        for decision, s in zip(self.space.decisions, self.space.strategy_sets, strict=True):
            wrong, parts = self.decision_penalties(decision.index), decision.index in self.varying
            parted = [k for k, meta in enumerate(s.output_metas) if parts and meta.requires_grad]
            left = [x for x, penalty in zip(s.strategies, wrong, strict=True) if not penalty
                    and all(s.output_layout(x, k)[0].kind in ("S", "P") for k in parted)]
            for use in self.space.uses_by.get(decision.index, ()):
                t = self.space.strategy_sets[use.source]
                made = {t.output_layout(x, use.output)[0] for x in possible[use.source]}
                refused = (IMPOSSIBLE,) if shares or use.meta.num_elements == 1 else (IMPOSSIBLE, SHARED)
                left = [x for x in left if any(self.penalty(use, p, s.input_layout(x, use.position)[0]) not in refused
                                               for p in made)]
            if not left:
                return self._described(decision) if decision.kind == "op" else None
            possible.append(set(left))
        return None

    def _describe(self, use: TensorUse) -> str:
        return self._described(self.space.decisions[use.source])

    def _described(self, decision: Decision) -> str:
        return self._node(self.space.graph.nodes[decision.node if decision.ref is None else decision.ref.node])

    @staticmethod
    def _node(node: Node) -> str:
        return f"{node}{', ' + node.source if node.source else ''}"


def _with_running_statistics(graph: OpGraph) -> list[str]:
    """Paths of modules whose running mean a call writes, as batch norm in training does."""
    return [path for name in graph.mutations for path, _, leaf in [name.rpartition(".")] if leaf == "running_mean"]


def _batch_norms(graph: OpGraph) -> list[str]:
    """Paths of these, and of batch norms without running statistics."""
    norms = [node.module_path for node in graph.of_kind("op") if node.target is batch_norm]
    return list(dict.fromkeys([*_with_running_statistics(graph), *norms]))


def _bags_by_offsets(graph: OpGraph) -> list[Node]:
    """Bags of embeddings whose first ids a tensor of offsets says."""
    return [node for node in graph.of_kind("op") if node.target is embedding_bag and node.args[3] is not None]


def _free_of_parameters(space: StrategySpace) -> frozenset[int]:
    """Decisions whose values depend neither on parameters nor on random numbers, and need no gradient."""
    found: set[int] = set()
    for decision, s in zip(space.decisions, space.strategy_sets, strict=True):
        uses = space.uses_by.get(decision.index, ())
        plain = decision.kind in ("input", "buffer") or (
            decision.kind == "op" and not (s.rule is not None and s.rule.random)
        )
        if plain and not any(m.requires_grad for m in s.output_metas) and all(k.source in found for k in uses):
            found.add(decision.index)
    return frozenset(found)


def _varying(space: StrategySpace, batch: int) -> frozenset[int]:
    """Decisions whose values differ between micro-batches: they depend on the batch or on random numbers."""
    found: set[int] = set()
    for decision, s in zip(space.decisions, space.strategy_sets, strict=True):
        shape = s.output_metas[0].shape if decision.kind == "input" else ()
        draws = s.rule is not None and s.rule.random
        if shape[:1] == (batch,) or draws or any(k.source in found for k in space.uses_by.get(decision.index, ())):
            found.add(decision.index)
    return frozenset(found)


@dataclass(frozen=True)
class _Cut:
    """Placements of all values along the micro-batch axis: a strategy for each decision of ``space``."""

    space: StrategySpace
    strategies: Sequence[Strategy]
    loss: int | None

    @cached_property
    def layouts(self) -> Mapping[Ref, Layout]:
        """The layout of each op's, parameter's, buffer's and input's outputs."""
        return {
            Ref(decision.node, output): s.output_layout(strategy, output)
            for decision, s, strategy in zip(self.space.decisions, self.space.strategy_sets, self.strategies,
                                             strict=True)
            if decision.ref is None for output in range(len(s.output_metas))
        }

    def divides_by(self, count: int) -> bool:
        """Whether ``count`` divides all dims that are cut."""
        nodes = self.space.graph.nodes
        return all(nodes[ref.node].outputs[ref.output].shape[placement.dim] % count == 0
                   for ref, (placement,) in self.layouts.items() if placement.is_shard)


def _cut(graph: OpGraph, count: int) -> _Cut:
    """The placements for ``count`` micro-batches. Raises InfeasibleError as `split_batch`."""
    space = StrategySpace(graph, (count,), ("micro_batch",))
    micro_batches = _BatchAxis(space, batch_size(graph))
    counts = ExecutionCounts(space, training=False)    # micro-batches add up gradients, also sparse ones
    pricer = SpacePricer(Prices(space, Cluster.load("local-cpu", num_devices=count)), penalties=micro_batches,
                         counts=counts)
    strategies = pricer.strategies_of(solve(pricer.full(), "auto", pricer=pricer).choice)
    micro_batches.check(strategies)
    return _Cut(space, strategies, micro_batches.loss)


class _Splitter:
    """Builds the program of one micro-batch from placements."""

    def __init__(self, cut: _Cut, count: int) -> None:
        self.cut, self.space, self.strategies, self.count = cut, cut.space, cut.strategies, count
        self.graph, self.layouts = self.space.graph, cut.layouts
        self.decision_of = {d.node: d.index for d in self.space.decisions if d.ref is None}
        self.feeds: dict[Feed, int] = {}
        self.nodes: list[Node] = []
        self.refs: dict[Ref | Feed | Share, Ref] = {}

    def run(self) -> MicroBatches:
        reads = {node.index: self._reads(node) for node in self.graph.of_kind("op")}
        needed = self._needed(reads)
        for node in self.graph:
            if node.index in needed and node.kind in ("parameter", "buffer"):
                self._copy(node, node.args, node.path)
        for index in sorted(needed):
            for read in reads.get(index, ()):
                if isinstance(read, Feed):
                    self._feed(read)
        for index in sorted(needed):
            node = self.graph.nodes[index]
            if node.kind == "input":
                (placement,) = self.layouts[Ref(index)]
                self.refs[Ref(index)] = self._feed(Feed(Ref(index), placement.dim if placement.is_shard else -1))
        for index in sorted(needed):
            if index in reads:
                self._op(self.graph.nodes[index], reads[index])
        outputs = tuple(self.refs[v] if isinstance(v, Ref) else v for v in self.graph.outputs)
        self._add(Node(0, "output", "output", None, outputs, {}, ()))
        mutations = {name: self.refs[ref] for name, ref in self.graph.mutations.items()}
        body = replace(self.graph, nodes=tuple(self.nodes), outputs=outputs, mutations=mutations)
        results = tuple(self.layouts[v][0] if isinstance(v, Ref) else None for v in self.graph.outputs)
        return MicroBatches(self.graph, self.count, body, tuple(self.feeds), results, self.cut.loss)

    def _reads(self, node: Node) -> list[Ref | Feed | Share]:
        """The inputs of a node in the micro-batch program, in argument order: the value itself, its share, or a feed of
        the prologue."""
        found: list[Ref | Feed | Share] = []
        decision = self.decision_of[node.index]
        strategy_set = self.space.strategy_sets[decision]
        for use, ref in zip(self.space.uses_by.get(decision, ()), node.inputs, strict=True):
            source = self.space.strategy_sets[use.source].output_layout(self.strategies[use.source], use.output)[0]
            target = strategy_set.input_layout(self.strategies[decision], use.position)[0]
            same = source == target or (source.kind, target.kind) == ("I", "R")
            found.append(ref if same else Share(ref) if target.kind == "P" else
                         Feed(ref, target.dim if target.is_shard else -1))
        return found

    def _needed(self, reads: Mapping[int, Sequence[Ref | Feed | Share]]) -> set[int]:
        stack = [v.node for v in (*self.graph.outputs, *self.graph.mutations.values()) if isinstance(v, Ref)]
        needed: set[int] = set()
        while stack:
            index = stack.pop()
            if index not in needed:
                needed.add(index)
                own = (read.ref if isinstance(read, Share) else read for read in reads.get(index, ()))
                stack.extend(ref.node for ref in own if isinstance(ref, Ref))
        return needed

    def _local(self, meta: TensorMeta, layout: Layout) -> TensorMeta:
        return replace(meta, shape=local_shape(meta.shape, layout, (self.count,), (0,)))

    def _add(self, node: Node) -> Node:
        made = replace(node, index=len(self.nodes))
        self.nodes.append(made)
        return made

    def _copy(self, node: Node, args: tuple[object, ...], path: str) -> None:
        outputs = tuple(self._local(m, self.layouts[Ref(node.index, o)]) for o, m in enumerate(node.outputs))
        made = self._add(replace(node, args=args, outputs=outputs, path=path))
        for output in range(len(outputs)):
            self.refs[Ref(node.index, output)] = Ref(made.index, output)

    def _feed(self, feed: Feed) -> Ref:
        if feed not in self.refs:
            node, number = self.graph.nodes[feed.ref.node], len(self.feeds)
            layout = (Placement("S", feed.dim) if feed.dim >= 0 else Placement("I"),)
            meta = self._local(node.outputs[feed.ref.output], layout)
            name = node.name if node.kind == "input" and feed.dim >= 0 else f"{node.name}_whole_{number}"
            made = self._add(Node(0, name, "input", None, (), {}, (meta,), path=str(number)))
            self.feeds[feed] = number
            self.refs[feed] = Ref(made.index)
        return self.refs[feed]

    def _shared(self, share: Share, node: Node) -> None:
        if share not in self.refs:
            whole = self.graph.nodes[share.ref.node]
            meta = whole.outputs[share.ref.output]
            made = self._add(Node(0, f"{whole.name}_share_{share.ref.output}", "op", aten.div.Tensor,
                                  (self.refs[share.ref], self.count), {}, (meta,), node.module_path, node.source,
                                  no_grad=node.no_grad))
            self.refs[share] = Ref(made.index)

    def _op(self, node: Node, reads: Sequence[Ref | Feed | Share]) -> None:
        for read in reads:
            if isinstance(read, Share):
                self._shared(read, node)
        values = iter(reads)
        args, kwargs = pytree.tree_map(
            lambda leaf: self.refs[next(values)] if isinstance(leaf, Ref) else leaf, (node.args, dict(node.kwargs))
        )
        if (position := SIZE_ARGUMENT.get(node.target)) is not None:
            shape = self._local(node.outputs[0], self.layouts[Ref(node.index)]).shape
            args = (*args[:position], list(shape), *args[position + 1 :])
        self._copy(replace(node, kwargs=kwargs), args, node.path)
