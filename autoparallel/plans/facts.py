"""Facts of the planned model that its strategies do not tell: shapes, heads, experts, where pipeline stages begin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoparallel.capture import OpGraph  # and torch with it: plans are read and shown without


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model that rules of thumb and exported files need.

    ``inputs``, ``parameters``: shapes by name, of the whole batch and of whole parameters. ``dtype``: of most
    parameters' elements. ``heads``: of the first attention (0: none). ``experts``: of the first mixture (0: none).
    ``stage_starts``: of pipeline stages 1, 2, ... the module path of the first op, and the share of its
    repeated block's ops that come before it (0 outside blocks)."""

    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtype: str = "float32"
    heads: int = 0
    experts: int = 0
    stage_starts: tuple[tuple[str, float], ...] = ()

    def departures(self, graph: OpGraph, whole: bool) -> list[str]:
        """What ``graph`` has otherwise, in words; ``whole``: it is the program of the whole batch."""
        if not self.parameters:
            return []    # a plan without facts
        parameters = {node.path: node.outputs[0].shape for node in graph.of_kind("parameter")}
        inputs = {node.name: node.outputs[0].shape for node in graph.of_kind("input")} if whole else self.inputs
        found = [*_odd("parameter", self.parameters, parameters), *_odd("input", self.inputs, inputs)]
        if self.dtype != (now := main_dtype(graph)):
            found.append(f"parameters are {now}, the plan's {self.dtype}")
        return found or ["parameters and inputs are the plan's: ops, train or eval mode, or frozen parameters differ"]


def main_dtype(graph: OpGraph) -> str:
    """The dtype of most parameters' elements."""
    elements: Counter[str] = Counter()
    for node in graph.of_kind("parameter"):
        elements[str(node.outputs[0].dtype).removeprefix("torch.")] += node.outputs[0].num_elements
    return elements.most_common(1)[0][0] if elements else "float32"


def _odd(kind: str, planned: Mapping[str, tuple[int, ...]], here: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Names that only one of both has, and shapes that differ."""
    shapes = [name for name, shape in planned.items() if name in here and tuple(here[name]) != tuple(shape)]
    told = [f"{kind} {shapes[0]} is {list(here[shapes[0]])}, the plan's {list(planned[shapes[0]])}{_others(shapes)}"
            ] if shapes else []
    if new := [name for name in here if name not in planned]:
        told.append(f"the model has the {kind} {new[0]}{_others(new)}, which the plan has not")
    if gone := [name for name in planned if name not in here]:
        told.append(f"the plan has the {kind} {gone[0]}{_others(gone)}, which the model has not")
    return told


def _others(names: Collection[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
