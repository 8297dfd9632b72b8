"""Activations' communication overlapped with compute of the same micro-batch, as `schedule.activation_windows` has it.

A redistribution step of an activation becomes `begin_step` and `end_step`, with compute between the two, and linear
layers that read its result `later` and `linear`, so that backward sends their input's gradient before it computes those
of their parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode

from autoparallel.kernels.async_communication import begin_step, end_step
from autoparallel.kernels.expert_dispatch import take_results
from autoparallel.kernels.in_pieces import reduced_product
from autoparallel.kernels.put_off import later, linear
from autoparallel.layout import COLLECTIVES
from autoparallel.schedule.activation_windows import NOWHERE, PRODUCTS, Travel, activation_windows
from autoparallel.schedule.step_config import Hybrid


def overlap_activations(module: GraphModule, hybrid: Hybrid) -> GraphModule:
    """The same program with activations' communication overlapped with compute, as the step configuration has it."""
    windows = windows_of(module, hybrid)
    return _Writer(module, windows).run() if windows else module


@dataclass(frozen=True)
class ProgramWindow:
    """A window in a program: of the steps ``path`` number ``begun`` is launched behind node ``after`` (None: where the
    path begins) and awaited before node ``reader``; ``put_off``: linear layers."""

    path: Sequence[FxNode]
    begun: int
    after: FxNode | None
    reader: FxNode
    put_off: Sequence[FxNode]


def windows_of(module: GraphModule, hybrid: Hybrid) -> list[ProgramWindow]:
    """The windows of a program."""
    finder = ActivationPaths(module)
    travels = [finder.travel(path) for path in finder.travelling]
    nodes = [node for node in finder.order if "decision" in node.meta]
    products = sorted({node.meta["decision"] for node in nodes if node.meta.get("op_class") in PRODUCTS})
    blocks = {node.meta["decision"]: node.meta.get("block") for node in nodes}
    found = list[ProgramWindow]()
    for number, ahead, put_off in activation_windows(travels, products, blocks.get, hybrid):
        path = finder.travelling[number]
        layers = [node for node in finder.layers[path[-1]] if node.meta["decision"] in put_off]
        after = path[0].all_input_nodes[0] if ahead else None
        found.append(ProgramWindow(path, finder.last(path), after, finder.reader(path), layers))
    return found


def communicates_backward(step: FxNode) -> bool:
    """Whether the gradient of a step communicates."""
    return step.meta["step"].backward in COLLECTIVES and bool(step.meta["global_meta"].requires_grad)


def communicates(step: FxNode) -> bool:
    """Whether a step communicates, forward or backward."""
    return step.meta["step"].forward in COLLECTIVES or communicates_backward(step)


class ActivationPaths:
    """``order``: the place of each node; ``travelling``: the paths of activations that communicate; ``layers``: by the
    last step of such a path, the linear layers that read its result and whose parameters are there by then."""

    def __init__(self, module: GraphModule) -> None:
        self.order = {node: number for number, node in enumerate(module.graph.nodes)}
        paths = list[list[FxNode]]()
        for node in self.order:
            if node.op == "call_function" and "step" in node.meta and not node.meta["of_parameter"]:
                if paths and self._goes_on(paths[-1][-1], node):
                    paths[-1].append(node)
                else:
                    paths.append([node])
        self.travelling = [path for path in paths if any(map(communicates, path)) and path[-1].users]
        self._path_of = {path[self.last(path)]: path for path in self.travelling}
        self.layers = defaultdict[FxNode, list[FxNode]](list)
        for node in self.order:
            if node.target is torch.ops.aten.linear.default and (path := self._sent_by(node)) is not None:
                self.layers[path[-1]].append(node)

    @staticmethod
    def _goes_on(last: FxNode, node: FxNode) -> bool:
        return node.all_input_nodes[0] is last and node.meta["decision"] == last.meta["decision"]

    @staticmethod
    def last(path: Sequence[FxNode]) -> int:
        """The number of the last step of a path that communicates."""
        return max(number for number, step in enumerate(path) if communicates(step))

    def reader(self, path: Sequence[FxNode]) -> FxNode:
        """The first node that reads the result of a path."""
        return min(path[-1].users, key=self.order.__getitem__)

    def travel(self, path: Sequence[FxNode]) -> Travel:
        source, target = path[0].all_input_nodes[0], path[0].meta["decision"]
        layers = tuple(node.meta["decision"] for node in self.layers[path[-1]])
        by_op = (source.op != "placeholder" and "step" not in source.meta
                 and source.target not in (reduced_product, take_results))    # made where they are read
        reader = self.reader(path).meta.get("decision", target)
        return Travel(source.meta["decision"] if by_op else NOWHERE, target, reader, layers)

    def _sent_by(self, layer: FxNode) -> Sequence[FxNode] | None:
        """The path by which the gradient of a linear layer's input travels, if the parameters' gradients are made in
        the layer alone, and can be put off."""
        x, *parameters = (arg for arg in layer.args if isinstance(arg, FxNode))
        if not all(node.meta["global_meta"].requires_grad for node in (x, *parameters)):
            return None
        while "step" in x.meta and not communicates_backward(x):
            x = x.all_input_nodes[0]
        path = self._path_of.get(x)
        if path is None or not all(node.meta["of_parameter"] for node in parameters):
            return None
        first = self.order[self.reader(path)]
        return path if all(self.order[node] < first for node in parameters) else None


class _Writer:
    """Writes a program with windows. ``made``: old node -> new node."""

    def __init__(self, module: GraphModule, windows: Sequence[ProgramWindow]) -> None:
        self.module, self.graph, self.made = module, Graph(), dict[FxNode, FxNode]()
        self.moved = {step for window in windows for step in window.path}
        self.before, self.after = (defaultdict[FxNode, list[Callable[[], None]]](list) for _ in range(2))
        self.parameters = dict[FxNode, FxNode]()
        for window in windows:
            begin, end = self._actions(window)
            (self.before[window.path[0]] if window.after is None else self.after[window.after]).append(begin)
            self.before[window.reader].append(end)

    def run(self) -> GraphModule:
        for node in self.module.graph.nodes:
            for action in self.before[node]:
                action()
            if node in self.parameters:
                self._layer(node)
            elif node not in self.moved:
                self._copy(node)
            for action in self.after[node]:
                action()
        self.graph.lint()
        return GraphModule(self.module, self.graph, class_name=type(self.module).__name__)

    def _copy(self, node: FxNode) -> None:
        self.made[node] = self.graph.node_copy(node, self.made.__getitem__)

    def _actions(self, window: ProgramWindow) -> Iterator[Callable[[], None]]:
        steps, begun = window.path, list[FxNode]()
        step = steps[window.begun]

        def begin() -> None:
            for earlier in steps[: window.begun]:
                self._copy(earlier)
            args = self.made[step.all_input_nodes[0]], *step.args[1:]
            begun.append(self._described(self.graph.call_function(begin_step, args, step.kwargs), step))

        def end() -> None:
            for layer in window.put_off:
                parameters = tuple(self.made[arg] for arg in layer.args[1:] if isinstance(arg, FxNode))
                self.parameters[layer] = self._described(self.graph.call_function(later, parameters), layer)
            self.made[step] = self._described(self.graph.call_function(end_step, (begun[0],)), step)
            for rest in steps[window.begun + 1 :]:
                self._copy(rest)

        yield from (begin, end)

    def _layer(self, node: FxNode) -> None:
        made = self.graph.call_function(linear, (self.made[node.all_input_nodes[0]], self.parameters[node]))
        made.meta = dict(node.meta)
        self.made[node] = made

    @staticmethod
    def _described(made: FxNode, node: FxNode) -> FxNode:
        made.meta = {key: value for key, value in node.meta.items() if key != "step"}
        return made


__all__ = ["ActivationPaths", "ProgramWindow", "communicates", "overlap_activations", "windows_of"]
