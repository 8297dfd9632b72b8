"""Names for what a program runs: while a step is profiled, each op runs in a range (`torch.profiler.record_function`)
that says which op, or redistribution step, of the plan it is.

The programs are run node by node by `torch.fx.Interpreter` in that time, with the same ops in the same order. A
compiled part is one range: what is inside has the names of its kernels only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import GraphModule, Interpreter
from torch.fx import Node as FxNode
from torch.profiler import record_function

from autoparallel.backends.compiled import CompiledPart
from autoparallel.kernels.collectives import item
from autoparallel.layout.redistribution import name_of
from autoparallel.plans.reports.step_parts import ATTENTION, OTHERS, PRODUCTS
from autoparallel.runtime.stage_module import StageModule
from autoparallel.strategies.space import StrategySpace

#: How the names of the ranges begin: of an op, and of one run of a stage.
OP, RUN = "autoparallel op ", "autoparallel run "
_PARTS = {"matmul": PRODUCTS, "conv": PRODUCTS, "attention": ATTENTION}


@dataclass(frozen=True)
class OpRange:
    """One call in a program. ``part``: the kind of work in reports (`step_parts.PARTS`); ``axis``: the mesh axis that
    it communicates on ("": none); ``of_parameter``: what is communicated is a parameter, backward its gradient;
    ``compiled``: a graph of many ops."""

    name: str
    block: str
    part: str
    axis: str = ""
    of_parameter: bool = False
    compiled: bool = False


class OpRanges:
    """The ranges of a program's ops, numbered as they first run."""

    def __init__(self, space: StrategySpace) -> None:
        self.space = space
        self.found: list[OpRange] = []
        self._numbers: dict[FxNode, int] = {}

    def range_of(self, node: FxNode, module: nn.Module | None) -> str:
        """The name of a node's range; ``module``: what it calls, if it is one."""
        if node not in self._numbers:
            self._numbers[node] = len(self.found)
            self.found.append(self._described(node, module))
        return f"{OP}{self._numbers[node]}"

    def _described(self, node: FxNode, module: nn.Module | None) -> OpRange:
        block = node.meta.get("block") or ""
        if module is not None:
            return OpRange(block or node.name, block, OTHERS, compiled=isinstance(module, CompiledPart))
        step, target = node.meta.get("step"), getattr(node.target, "__name__", str(node.target))
        if step is None and "decision" not in node.meta:    # begin_... and end, of several parameters
            pair = node.args[0] if target == "end" else node
            axis = str(pair.args[0]) if isinstance(pair, FxNode) else ""
            return OpRange(f"{target} of {_told(node)}", block, OTHERS, axis, True)
        name = self._name(node.meta["decision"]) if "decision" in node.meta else node.name
        if target in ("begin_step", "end_step"):
            begun = node.args[0] if target == "end_step" else node
            axis = str(begun.args[1]) if isinstance(begun, FxNode) else ""
            return OpRange(f"{target} for {name}", block, OTHERS, axis)
        if step is not None:
            return OpRange(f"{target} for {name}", block, OTHERS, name_of(step.axes, self.space.axis_names),
                        bool(node.meta.get("reads")))
        if target == "cross":
            return OpRange(f"{name}: {node.args[1]} to {node.args[2]}", block, OTHERS)
        rule = self.space.strategy_sets[node.meta["decision"]].rule
        axes = node.kwargs.get("axes") or ("",)
        return OpRange(name, block, _PARTS.get("" if rule is None else rule.op_class, OTHERS),
                    str(axes[0]) if isinstance(axes, (tuple, list)) else "")

    def _name(self, index: int) -> str:
        """An op by its module and what it is; others by their names."""
        decision = self.space.decisions[index]
        if decision.kind != "op":
            return decision.name
        node = self.space.graph.nodes[decision.node]
        return f"{node.module_path} {node.op_name.removeprefix('aten.').rsplit('.', 1)[0]}".strip()


def _told(node: FxNode) -> str:
    """How many values a pair of `begin_...` and `end` moves."""
    begin: Any = node.args[0] if getattr(node.target, "__name__", "") == "end" else node
    count = len(begin.all_input_nodes) if isinstance(begin, FxNode) else 1
    return f"{count} parameter{'s' if count != 1 else ''}"


class _Named(Interpreter):
    """Runs a program node by node, each op or compiled module within its range (`OpRanges.range_of`)."""

    def __init__(self, module: GraphModule, ops: OpRanges) -> None:
        super().__init__(module)
        self.ops = ops

    def run_node(self, n: FxNode) -> Any:
        if n.op not in ("call_function", "call_module") or n.target is item:
            return super().run_node(n)
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        if module is not None and not isinstance(module, CompiledPart):  # a recomputed block, whose ops have their own
            return super().run_node(n)
        with record_function(self.ops.range_of(n, module)):
            return super().run_node(n)


@contextmanager
def named(roots: Mapping[int, nn.Module], ops: OpRanges) -> Iterator[None]:
    """All programs in the modules ``roots``, by stage, run with ranges; afterwards they run as before."""
    changed = dict[nn.Module, Any]()
    for stage, root in roots.items():
        for module in root.modules():
            if isinstance(module, GraphModule):
                changed[module] = _Named(module, ops).run
        if isinstance(root, StageModule):
            changed[root] = _run_of(root, stage)
    for module, forward in changed.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"]


def _run_of(module: StageModule, stage: int) -> Any:
    """A stage's forward in a range for each micro-batch."""
    forward = module.forward

    def run(*received: Any, micro_batch: int) -> Any:
        with record_function(f"{RUN}{stage} {micro_batch}"):
            return forward(*received, micro_batch=micro_batch)

    return run


__all__ = ["OP", "RUN", "OpRange", "OpRanges", "named"]
