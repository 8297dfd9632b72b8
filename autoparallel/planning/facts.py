"""Facts of the planned model, read from its program."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoparallel.capture import OpGraph, find_blocks
from autoparallel.capture.blocks import block_path
from autoparallel.planning.options import Options
from autoparallel.plans.facts import ModelFacts, main_dtype
from autoparallel.plans.reports.units import bytes_str
from autoparallel.pricing.op_costs import kept_precision
from autoparallel.schedule.tiers import ON_DEVICE, Offload
from autoparallel.search.model.problem import MemoryLimitError
from cost_models import Cluster
from cost_models.memory import TrainingState, training_state


def facts_of(graph: OpGraph, body: OpGraph, cuts: Sequence[str]) -> ModelFacts:
    """Facts of the model for plan files, from the program of the whole batch. ``cuts``: the ops of ``body``, the
    program of a micro-batch, at which stages begin."""
    inputs = {node.name: node.outputs[0].shape for node in graph.of_kind("input")}
    parameters = {node.path: node.outputs[0].shape for node in graph.of_kind("parameter")}
    return ModelFacts(inputs, parameters, main_dtype(graph), _heads(graph), _experts(graph),
                      _starts(body, cuts) if cuts else ())


def whole_state(graph: OpGraph, cluster: Cluster, options: Options, away: Offload = ON_DEVICE) -> TrainingState:
    """Bytes of all weights, and of the trained weights' gradients and optimizer states, but for what is ``away`` or
    let go during backward, and for tables that the options put on the host. Of sparse gradients, of the rows that are
    looked up."""
    found, rows = TrainingState(0.0, 0.0, 0.0), graph.sparse_tables
    for node in graph.of_kind("parameter"):
        if node.path in options.on_host:
            continue
        meta, tiers = node.outputs[0], away.of(node.path)
        own = TrainingState(float(meta.num_bytes), 0.0, 0.0)
        if meta.requires_grad:
            own = training_state(meta.num_elements, kept_precision(meta, cluster), options.optimizer)
        found = TrainingState(found.parameters + float(own.parameters) * (not tiers.moves_parameters),
                              found.gradients + float(own.gradients) * rows.get(node.path, 1.0)
                              * (not tiers.moves_gradients and not tiers.steps_there),
                              found.optimizer + float(own.optimizer) * (not tiers.is_away))
    return found


def told_of_gradients(error: Exception, graph: OpGraph, cluster: Cluster, options: Options) -> str:
    """What to say beside the error of a step that does not fit: that it may, if gradients did not live together; "" if
    it lacks more bytes than they take, divided evenly over the devices, or they do not already."""
    lacks = error.needed_bytes - error.limit_bytes if isinstance(error, MemoryLimitError) else math.inf
    num_bytes = whole_state(graph, cluster, options).gradients / cluster.num_devices
    if options.tier.is_away or options.tier.in_backward or lacks > num_bytes:
        return ""
    return (f" With step_in_backward=True it may fit: gradients, {bytes_str(num_bytes)} a device or more, are let go "
            "one after the other.")


def block_paths(graph: OpGraph) -> list[str]:
    """The paths of blocks that have parameters, in order."""
    owners = {block_path(node.path) for node in graph.of_kind("parameter")}
    return [block.path for block in find_blocks(graph) if block.path in owners]


def _starts(body: OpGraph, cuts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    nodes = {node.name: node for node in body.of_kind("op")}
    before = {index: place / len(block.nodes) for block in find_blocks(body) for place, index in enumerate(block.nodes)}
    return tuple((nodes[cut].module_path, before.get(nodes[cut].index, 0.0)) for cut in cuts)


def _heads(graph: OpGraph) -> int:
    for node in graph.of_kind("op"):
        if "scaled_dot_product_attention" in node.op_name or "flex_attention" in node.op_name:
            shape = graph.nodes[node.inputs[0].node].outputs[node.inputs[0].output].shape
            return shape[-3] if len(shape) > 2 else 0
    return 0


def _experts(graph: OpGraph) -> int:
    for node in graph.of_kind("op"):
        if "routed_experts" in node.op_name:
            shapes = [graph.nodes[ref.node].outputs[ref.output].shape for ref in node.inputs]
            return int(shapes[-1][0])
    return 0


__all__ = ["block_paths", "facts_of", "told_of_gradients", "whole_state"]
