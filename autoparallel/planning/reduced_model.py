"""The reduced-depth model: of many equal blocks the first, one that stands for all between, and the last.

Its costs are those of the model (a block that stands for k blocks counts k times), computed in a time that does not
grow with depth.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch.utils._pytree as pytree

from autoparallel.capture import OpGraph, Ref
from autoparallel.capture.blocks import Block, block_path, equal_blocks, form_of
from autoparallel.capture.graph import Node
from autoparallel.plans import Hybrid
from autoparallel.schedule.in_flight import in_flight
from autoparallel.schedule.table_caches import TableCache
from autoparallel.schedule.tiers import ON_DEVICE, Offload
from autoparallel.strategies.space import Decision, Strategy, StrategySpace


@dataclass(frozen=True)
class ReducedModel:
    """A program with fewer blocks than the model.

    ``stands_for``: by node name, the number of the model's nodes that it represents, for nodes of equal blocks, ops
    between these, and placeholders that only one block reads (other nodes: 1). ``twins``: by name of a removed node,
    its representative.
    """

    graph: OpGraph
    stands_for: Mapping[str, int]
    num_blocks: int
    twins: Mapping[str, str]

    def counts(self, space: StrategySpace) -> list[int]:
        """The number of the model's decisions that each decision represents. The shared read of a value that an op
        outside of blocks reads counts once, since there it has all readers of the values that it represents."""
        inside = self.inside(space)
        return [1 if decision.kind == "shared_read" and not all(inside[reader] for reader in space.readers_of.get(
                    decision.index, ())) else self.stands_for.get(_node_name(decision), 1)
                for decision in space.decisions]

    def inside(self, space: StrategySpace) -> list[bool]:
        """Whether each decision is in a block, or between equal ones, or is read by a single block only."""
        return [_node_name(decision) in self.stands_for for decision in space.decisions]

    def strategies(self, space: StrategySpace, small: StrategySpace, strategies: Sequence[Strategy]) -> list[Strategy]:
        """Strategies on the model's strategy graph ``space``, copied from ``strategies`` of the representatives on
        ``small``."""
        known = {decision.name: strategy for decision, strategy in zip(small.decisions, strategies, strict=True)}
        found = []
        for decision, s in zip(space.decisions, space.strategy_sets, strict=True):
            name, *rest = decision.name.split(":")
            found.append(known.get(":".join([self.twins.get(name, name), *rest]), s.strategies[0]))
        return found

    def held(self, space: StrategySpace, hybrid: Hybrid) -> list[float]:
        """By decision, the number of its values on the fullest pipeline rank, relative to one decision of the first
        stage (with as many micro-batches in flight).

        Each rank has an even share of the blocks; every rank of a replicated stage has all of the stage's. The first
        rank has what comes before the blocks, the last what comes after; one rank is assumed to have both, a slight
        overestimate. With zero bubble the last rank holds the most output gradients of deferred weight gradients (with
        recompute, all saved tensors that these need: see `ExecutionCounts`).
        """
        first, groups = in_flight(hybrid, 0), hybrid.groups
        chunks = range(0, hybrid.stages, len(groups))
        share = sum(in_flight(hybrid, stage) for stage in chunks) / len(chunks) / first
        if hybrid.replicas:
            share = max(ranks * in_flight(hybrid, stage) for stage, ranks in enumerate(groups)) / max(groups) / first
        counted = hybrid.pipelining.splits_backward and hybrid.recompute == "none"
        deferred = (hybrid.pipeline_ranks - 1) / first if counted else 0.0
        products = {use.target for use in space.uses if space.decisions[use.source].kind == "parameter"}
        last = in_flight(hybrid, hybrid.stages - 1) / first
        inside = self.inside(space)
        end = max((i for i, held in enumerate(inside) if held), default=len(inside))
        found = []
        for decision, count in zip(space.decisions, self.counts(space), strict=True):
            kept = decision.kind in ("parameter", "buffer", "input")
            if inside[decision.index]:
                copies = share * (1 + deferred * (decision.index in products))
                found.append(count * max(groups) / hybrid.pipeline_ranks * (1.0 if kept else copies))
            else:
                found.append(1.0 if kept or decision.index <= end else last)
        return found


def _node_name(decision: Decision) -> str:
    return decision.name.split(":")[0]


def reduced_model(graph: OpGraph, offload: Offload = ON_DEVICE, tables: Collection[str] = (),
                  cached: Collection[TableCache] = ()) -> ReducedModel:
    """The reduced-depth model of a program; programs with at most three equal blocks stay as they are. One block stands
    for others with parameters in the same tiers only. ``tables``: those on the host, and the caches of some."""
    caches = {one.name: replace(one, name="") for one in cached}
    templates = equal_blocks(graph)
    twin: dict[int, int] = {}
    stands_for: dict[str, int] = {}
    attached = set[int]()
    for equal in templates:
        equivalent = _with_following(graph, equal, attached)
        for block in equivalent:
            stands_for.update({graph.nodes[i].name: 1 for i in (*block.nodes, *_parameters(graph, block))})
        for _, run in groupby(equivalent[1:-1], lambda block: _tiers(graph, block, offload, tables, caches)):
            _fold(graph, list(run), twin, stands_for)
    twins = {graph.nodes[index].name: graph.nodes[other].name for index, other in twin.items()}
    return ReducedModel(_without(graph, twin) if twin else graph, stands_for, sum(map(len, templates)), twins)


def _with_following(graph: OpGraph, blocks: list[Block], attached: set[int]) -> list[Block]:
    """Equal blocks, each but the first and the last with the ops outside of blocks that lie between it and the next
    one, as the activations of ``x = relu(layer(x))``; where these differ, without. ``attached``: the ops that belong to
    blocks of other templates already, to which those found here are added."""
    more = [[node.index for node in graph.nodes[block.nodes[-1] + 1 : following.nodes[0]] if node.kind == "op"
             and block_path(node.module_path) is None and node.index not in attached]
            for block, following in pairwise(blocks)]
    middle = [replace(block, nodes=(*block.nodes, *own)) for block, own in zip(blocks[1:-1], more[1:], strict=True)]
    if len({form_of(graph, block.nodes) for block in middle}) != 1:
        return blocks
    attached.update(index for own in more[1:] for index in own)
    return [blocks[0], *middle, blocks[-1]]


def _fold(graph: OpGraph, run: list[Block], twin: dict[int, int], stands_for: dict[str, int]) -> None:
    """Fill ``twin``: nodes of equal blocks are represented by the first's."""
    kept = run[0]
    members = [*kept.nodes, *_parameters(graph, kept)]
    for block in run[1:]:
        twin.update(zip([*block.nodes, *_parameters(graph, block)], members, strict=True))
    stands_for.update({graph.nodes[index].name: len(run) for index in members})


def _tiers(graph: OpGraph, block: Block, offload: Offload, tables: Collection[str], caches: Mapping[str, TableCache]
           ) -> list[tuple[Offload, bool, TableCache | None]]:
    """Of each parameter, whether it is a table on the host, and its cache without the name."""
    names = [graph.nodes[index].path for index in _parameters(graph, block)] if offload.groups or tables else []
    return [(offload.of(name, tables), name in tables, caches.get(name)) for name in names]


def _parameters(graph: OpGraph, block: Block) -> list[int]:
    """Parameters and buffers that only this block reads, in the order of their first read."""
    inside = set(block.nodes)
    found = dict.fromkeys(
        ref.node for index in block.nodes for ref in graph.nodes[index].inputs
        if graph.nodes[ref.node].kind in ("parameter", "buffer")
        and all(user in inside for user, _ in graph.consumers[ref])
    )
    return list(found)


def _without(graph: OpGraph, twin: Mapping[int, int]) -> OpGraph:
    place: dict[int, int] = {}
    nodes: list[Node] = []

    def moved(ref: Ref) -> Ref:
        return Ref(place[twin.get(ref.node, ref.node)], ref.output)

    for node in graph:
        if node.index in twin:
            continue
        place[node.index] = len(nodes)
        args, kwargs = pytree.tree_map_only(Ref, moved, (node.args, dict(node.kwargs)))
        nodes.append(replace(node, index=len(nodes), args=args, kwargs=kwargs))
    outputs = tuple(moved(v) if isinstance(v, Ref) else v for v in graph.outputs)
    mutations = {name: moved(ref) for name, ref in graph.mutations.items() if ref.node not in twin}
    return replace(graph, nodes=tuple(nodes), outputs=outputs, mutations=mutations)
