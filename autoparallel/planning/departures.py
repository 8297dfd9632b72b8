"""Where a plan by hand departs from the usual roles of its axes, by name; and whether dim 1 is a sequence at all."""

from __future__ import annotations

from collections.abc import Sequence

from autoparallel.capture import OpGraph
from autoparallel.errors import PlanError
from autoparallel.layout import layout_str
from autoparallel.planning.baselines import Baseline
from autoparallel.planning.by_hand import ByHand
from autoparallel.pricing import SpacePricer
from autoparallel.strategies.space import Strategy

#: Departures that are named; of the others the count is told.
MOST_NAMED = 3


def departures(by: Baseline, pricer: SpacePricer, strategies: Sequence[Strategy]) -> list[str]:
    """Where a plan departs from the roles of its axes, in execution order: parameters and inputs in other layouts,
    redistributions of other kinds."""
    space, numbers = pricer.space, pricer.costs.kinds.numbers(strategies)
    found = []
    for decision, s in zip(space.decisions, space.strategy_sets, strict=True):
        if by.decision_penalties(decision.index)[numbers[decision.index]] >= 1:
            if decision.kind == "op":
                found.append(_of_op(by, decision.index, decision.name))
                continue
            layout = layout_str(tuple(s.axis_strategies[r].outputs[0] for r in strategies[decision.index]))
            found.append(f"{decision.kind} {decision.name} is {layout}, not as the roles "
                         f"{', '.join(by.roles)} lay it out")
    for use, path, _ in pricer.costs.moves(strategies):
        for priced in path:
            step = priced.step
            for axis in (axis for axis in step.axes if by.penalty(use, axis, step.source, step.target) >= 1):
                source, target = (space.decisions[index].name for index in (use.source, use.target))
                kind = step.forward if step.forward != "none" else step.backward
                found.append(f"{kind.replace('_', '-')} over {space.axis_names[axis]} of {source} for {target} "
                             f"({layout_str(step.before)} to {layout_str(step.after)}), which the role "
                             f"{by.roles[axis]!r} has not")
    return found


def _of_op(by: Baseline, index: int, name: str) -> str:
    if by.are_experts(index):
        return (f"rows of {name} do not travel to their experts over the expert-parallel axis, or other axes do not "
                "divide its tokens")
    return f"a context-parallel axis does not cut {name} along the sequence"


def told(found: Sequence[str]) -> str:
    """Departures as the end of a sentence; "" for none."""
    if not found:
        return ""
    more = f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f"; {len(found)} layouts depart from its roles: " + "; ".join(found[:MOST_NAMED]) + more


def check_sequences(graph: OpGraph, hand: ByHand) -> None:
    """Refuse to cut dim 1 where it is no sequence. Raises PlanError naming the input and the dim.

    Sequences are dim 1 of integer inputs of two dims (tokens), and whatever has the length of attention's queries.
    """
    if hand.cp == 1 and not hand.sequence_parallel:
        return
    key = f"cp={hand.cp}" if hand.cp > 1 else "sequence_parallel"
    lengths = _sequence_lengths(graph)
    if not lengths:
        raise PlanError(f"by_hand: {key} cuts activations along dim 1, the sequence, and this model has none: no input "
                        f"of tokens (integers, two dims) and no attention: leave {key} out")
    for node in graph.of_kind("input") if hand.cp > 1 else ():
        shape = node.outputs[0].shape
        if len(shape) > 1 and shape[1] > 1 and shape[1] not in lengths:
            raise PlanError(f"by_hand: {key} cuts dim 1 of input {node.name!r} of shape {tuple(shape)}, whose "
                            f"{shape[1]} is no sequence: sequences here are of "
                            f"{', '.join(map(str, sorted(lengths)))}. Leave cp out, or pass "
                            "inputs as (batch, sequence, ...)")


def _sequence_lengths(graph: OpGraph) -> set[int]:
    found = set[int]()
    for node in graph.of_kind("input"):
        meta = node.outputs[0]
        if len(meta.shape) == 2 and not (meta.dtype.is_floating_point or meta.dtype.is_complex):
            found.add(meta.shape[1])
    for node in graph.of_kind("op"):
        if "attention" in node.op_name and node.inputs:
            query = graph.nodes[node.inputs[0].node].outputs[node.inputs[0].output]
            if len(query.shape) > 2:
                found.add(query.shape[-2])
    return {length for length in found if length > 1}


__all__ = ["check_sequences", "departures", "told"]
