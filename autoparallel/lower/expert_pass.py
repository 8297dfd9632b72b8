"""Experts' all-to-all overlapped with compute of the same micro-batch, as `schedule.expert_windows` has it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode

from autoparallel.kernels.expert_dispatch import dispatched_experts, run_experts, send_rows, take_results
from autoparallel.schedule.activation_windows import PRODUCTS
from autoparallel.schedule.expert_windows import ExpertWindow, alternates_experts, expert_windows
from autoparallel.schedule.step_config import Hybrid


def overlap_experts(module: GraphModule, hybrid: Hybrid) -> GraphModule:
    """The same program, in which rows of a mixture of experts leave where it stood, and are computed and awaited
    later; with multi-copy the three parts follow each other, and `lower.multi_copy_pass` puts another micro-batch
    between them."""
    apart = alternates_experts(hybrid)
    windows = {node: window for node, window in windows_of(module, hybrid) if window.is_open or apart}
    return _written(module, windows) if windows else module


def windows_of(module: GraphModule, hybrid: Hybrid) -> list[tuple[FxNode, ExpertWindow]]:
    """The mixtures whose rows travel, and their windows."""
    mixtures = [node for node in module.graph.nodes if node.target is dispatched_experts and node.users]
    if not mixtures:
        return []
    nodes = [node for node in module.graph.nodes if node.meta.get("decision") is not None]
    products = sorted({node.meta["decision"] for node in nodes if node.meta.get("op_class") in PRODUCTS})
    blocks = {node.meta["decision"]: node.meta.get("block") for node in nodes}
    asked = [(node.meta["decision"], _reader(node).meta.get("decision", node.meta["decision"])) for node in mixtures]
    return list(zip(mixtures, expert_windows(asked, products, blocks.get, hybrid), strict=False))


def _reader(node: FxNode) -> FxNode:
    """The first node that reads the result of another."""
    users = set(node.users)
    while node not in users:
        node = node.next
    return node


def _written(module: GraphModule, windows: dict[FxNode, ExpertWindow]) -> GraphModule:
    graph, made = Graph(), dict[FxNode, FxNode]()
    last = {node.meta["decision"]: node for node in module.graph.nodes if "decision" in node.meta}
    before, after = (defaultdict[FxNode, list[Callable[[], None]]](list) for _ in range(2))
    for node, window in windows.items():
        send, run, take = _parts(graph, made, node)
        before[node].append(send)
        after[last[window.behind]].append(run)
        if window.is_open:
            before[_reader(node)].append(take)
        else:
            after[last[window.behind]].append(take)
    for node in module.graph.nodes:
        for action in before[node]:
            action()
        if node not in windows:
            made[node] = graph.node_copy(node, made.__getitem__)
        for action in after[node]:
            action()
    graph.lint()
    return GraphModule(module, graph, class_name=type(module).__name__)


def _parts(graph: Graph, made: dict[FxNode, FxNode], node: FxNode) -> Iterator[Callable[[], None]]:
    """Functions that write the three parts of a mixture."""
    body, tokens, ids, by_row, weights, first = node.args
    sent = list[FxNode]()

    def described(part: FxNode) -> FxNode:
        part.meta = {key: node.meta[key] for key in ("decision", "block", "of_parameter") if key in node.meta}
        return part

    def of(values: Sequence[FxNode]) -> list[FxNode]:
        return [made[value] for value in values]

    def send() -> None:
        args = body, made[tokens], made[ids], of(by_row), first  # type: ignore[index,arg-type]
        sent.append(described(graph.call_function(send_rows, args, node.kwargs)))

    def run() -> None:
        args = body, sent[0], of(weights), first  # type: ignore[arg-type]
        sent.append(described(graph.call_function(run_experts, args)))

    def take() -> None:
        made[node] = graph.call_function(take_results, (sent[1],))
        made[node].meta = dict(node.meta)

    yield from (send, run, take)


__all__ = ["overlap_experts", "windows_of"]
