"""One program for all values of a call's numbers, where that is proven equal to the program of these values."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from autoparallel.capture.build import canonical_call, capture
from autoparallel.capture.graph import Node, OpGraph
from autoparallel.capture.numbers import is_number, with_values
from autoparallel.errors import CaptureError

_LOG = logging.getLogger(__name__)


def capture_for_any(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], wanted: Sequence[int]
                    ) -> OpGraph:
    """`capture`, with as many of the numbers ``wanted`` (places among the call's leaves) as inputs as can be.

    A program that reads numbers at each call is taken if with the values of this call it is, op by op, the program that
    has them as constants; ``OpGraph.fixed`` has the others with the reason.
    """
    plain = capture(model, args, kwargs)
    if not wanted:
        return plain
    leaves = pytree.tree_leaves(canonical_call(args, kwargs))
    found, fixed = plain, dict[int, str]()
    tried = [tuple(wanted)] if len(wanted) == 1 else [tuple(wanted), *((place,) for place in wanted)]
    for places in tried:
        together = tuple(sorted({*found.numbers, *places}))
        if together == found.numbers:
            break  # all of them were taken at once
        made, why = _for_any(model, args, kwargs, together, plain, leaves)
        if made is not None:
            found = made
        elif len(places) == 1:
            fixed[places[0]] = why
    return replace(found, fixed=fixed)


def _for_any(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], numbers: Sequence[int],
             plain: OpGraph, leaves: Sequence[Any]) -> tuple[OpGraph | None, str]:
    """The program that reads these numbers at each call; or None and why there is none."""
    try:
        made = capture(model, args, kwargs, numbers)
    except CaptureError as error:
        _LOG.info("numbers %s stay constants: %s", numbers, error)
        return None, _reason(str(error))
    except Exception as error:  # a pass that computes with a number: there is the program with constants
        _LOG.info("numbers %s stay constants", numbers, exc_info=True)
        return None, f"{type(error).__name__} while it was traced"
    same = is_same(with_values_in(made, leaves), plain)
    return (made, "") if same else (None, "its type or value decides what is computed")


def is_same(one: OpGraph, other: OpGraph) -> bool:
    """Whether two programs have the same ops with the same arguments in the same order, and equal constants."""
    return _text(one) == _text(other)


def with_values_in(graph: OpGraph, leaves: Sequence[Any]) -> OpGraph:
    """The program with the values of a call as constants."""
    nodes = tuple(replace(node, args=with_values(node.args, leaves), kwargs=with_values(dict(node.kwargs), leaves))
                  for node in graph.nodes)
    return replace(graph, nodes=nodes)


def _text(graph: OpGraph) -> tuple[object, ...]:
    """Equal for equal programs."""
    spelled = replace(graph, nodes=tuple(map(_spelled, graph.nodes)))
    return (*spelled.lines(), str(graph.out_spec), *map(repr, graph.constant_tensors.values()))


def _spelled(node: Node) -> Node:
    """An op with all its arguments by name. (A trace leaves out those that have the default value.)"""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node
    given = dict(node.kwargs)
    for place, declared in enumerate(node.target._schema.arguments):
        value = node.args[place] if place < len(node.args) else given.get(declared.name, declared.default_value)
        default = declared.has_default_value() and is_number(value) and value == declared.default_value
        given[declared.name] = declared.default_value if default else value
    return replace(node, args=(), kwargs=given)


def _reason(error: str) -> str:
    """Why a trace was refused, with the user's line."""
    line = next((line.strip() for line in error.splitlines() if line.startswith("  at ")), "")
    what = "forward decides by it" if "decides by the values" in error else error.splitlines()[0]
    return f"{what} {line}".strip()


__all__ = ["capture_for_any", "is_same", "with_values_in"]
