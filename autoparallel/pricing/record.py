"""The part of a report that the prediction does not have: FLOPs and tokens of a step, and memory by kind along it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from statistics import fmean

import numpy as np

from autoparallel.capture import OpGraph, Ref
from autoparallel.layout import COLLECTIVES, Step, layout_str
from autoparallel.layout.redistribution import name_of
from autoparallel.plans.record import MemoryProfile, Redistribution, Workload
from autoparallel.pricing.live_intervals import sums_gradients
from autoparallel.pricing.op_costs import dtype_name, kept_precision, operands_of, share_of_work, worked_in
from autoparallel.pricing.problem import SpacePricer
from autoparallel.schedule.step_config import first_axis_of
from autoparallel.search.model.problem import Problem
from autoparallel.strategies.space import Strategy, StrategySet, StrategySpace
from cost_models import Cluster, Group, compute
from cost_models.calibrate import told_apart
from cost_models.memory import precision, training_state

#: Op classes whose FLOPs count, as they run on matrix units.
COUNTED = frozenset({"matmul", "attention", "conv"})
#: Backward FLOPs per forward FLOP that a model needs: a product for each of two operands.
BACKWARD = 2.0
KINDS = ("parameters", "gradients", "optimizer state", "gathered parameters", "activations", "communication buffers",
         "inputs and buffers")
#: Places of a memory profile, at most.
MOST_PLACES = 240


def workload(pricer: SpacePricer, strategies: Sequence[Strategy]) -> Workload:
    """The work of one step of ``strategies`` (tokens or samples, parameters, FLOPs) and the devices that do it."""
    space, cluster, hybrid = pricer.space, pricer.prices.cluster, pricer.counts.hybrid
    unit, count, tokens_of = _counted(pricer)
    model, run, dtypes = _flops(pricer, strategies)
    dtype = max(dtypes, key=lambda name: dtypes[name]) if dtypes else "float32"
    sizes = (hybrid.pipeline_ranks, *space.mesh_shape)
    groups = {name_of(axes, space.axis_names): _link(group) for axes, group in pricer.prices.groups.items()}
    if hybrid.pipeline_ranks > 1:
        groups[first_axis_of(hybrid)] = _link(cluster.group(sizes, 0))
    kinds = [cluster.kinds((number,))[0].device for number in range(math.prod(sizes))] if cluster.is_unequal else [
        cluster.device]
    parameters = sum(space.strategy_sets[d.index].output_metas[0].num_elements
                     for d in space.decisions if d.kind == "parameter")
    return Workload(
        unit, count * hybrid.micro_batches, float(parameters), model * hybrid.micro_batches, run * hybrid.micro_batches,
        dtype, fmean(compute.peak_flops_per_s("matmul", dtype, one) for one in kinds), math.prod(sizes),
        " and ".join(dict.fromkeys(one.name for one in kinds)),
        min(one.memory_bytes for one in kinds), cluster.devices_on_host,
        cluster.price_per_hour, _mean([one.watts for one in kinds]), groups,
        tuple(_links_within(cluster)),
        _state_bytes(pricer), cluster.profile.software if cluster.profile is not None else "", tokens_of,
        described=told_apart(cluster),
    )


def _mean(values: Sequence[float]) -> float:
    """The mean of what is known of all (0: not of all)."""
    return fmean(values) if all(values) else 0.0


def _links_within(cluster: Cluster) -> Iterator[str]:
    """The links by which the devices reach one another, innermost first: on one host the first alone."""
    joined = 1
    for link in cluster.links:
        if joined == 1 or joined < cluster.num_devices:
            yield link.name
        joined *= link.num_devices


def _state_bytes(pricer: SpacePricer) -> dict[str, float]:
    """Bytes of one element of most trained parameters: its own, its gradient's and its optimizer states'."""
    space, prices, counts = pricer.space, pricer.prices, dict[str, float]()
    for d in space.decisions:
        meta = space.strategy_sets[d.index].output_metas[0]
        if d.kind == "parameter" and meta.requires_grad and prices.training:
            kept = kept_precision(meta, prices.cluster)
            counts[kept] = counts.get(kept, 0.0) + meta.num_elements
    if not counts:
        return {}
    kept = max(counts, key=counts.__getitem__)
    one, master = training_state(1, kept, prices.optimizer), precision(kept).master
    states = f"{prices.optimizer} states" + (f" with {master} master copy" if master else "")
    return {"parameter": float(one.parameters), "gradient": float(one.gradients), states: float(one.optimizer)}


def _link(group: Group) -> str:
    return group.slowest.name


def _counted(pricer: SpacePricer) -> tuple[str, float, str]:
    """The unit of progress of one micro-batch ("tokens" or "samples"), how many of them it has, and of what they are
    (`Workload.tokens_of`)."""
    graph = pricer.space.graph
    inputs = [node.outputs[0] for node in graph.of_kind("input") if node.outputs[0].shape]
    whole = [m.num_elements for m in inputs if not m.dtype.is_floating_point and len(m.shape) == 2]
    attends = any(s.rule is not None and s.rule.op_class == "attention" for s in pricer.space.strategy_sets)
    if attends and whole:
        looked_up = _looked_up(graph)
        return "tokens", float(sum(looked_up) or max(whole)), "encoder and decoder" if len(looked_up) == 2 else ""
    return "samples", float(inputs[0].shape[0]) if inputs else 0.0, ""


def _looked_up(graph: OpGraph) -> list[int]:
    """Numbers of tokens by lookup in one table, by inputs that are integers: the table that gives most rows. An
    encoder and a decoder share theirs; positions that no input has are no tokens."""
    tables: dict[int, list[int]] = {}
    for node in graph.of_kind("op"):
        if node.op_name.removeprefix("aten.").split(".")[0] == "embedding" and _reads_integers(graph, node.inputs[1]):
            tables.setdefault(node.inputs[0].node, []).append(graph.meta(node.inputs[1]).num_elements)
    return max(tables.values(), key=sum, default=[])


def _reads_integers(graph: OpGraph, indices: Ref) -> bool:
    """Whether indices are computed from an input of integers."""
    seen, ahead = set[int](), [indices.node]
    while ahead:
        node = graph.nodes[ahead.pop()]
        if node.kind == "input" and not node.outputs[0].dtype.is_floating_point:
            return True
        ahead += [ref.node for ref in node.inputs if ref.node not in seen]
        seen.update(ref.node for ref in node.inputs)
    return False


def _flops(pricer: SpacePricer, strategies: Sequence[Strategy]) -> tuple[float, float, dict[str, float]]:
    """FLOPs of a micro-batch on all devices: (as the model needs them, as they run), and the first by dtype."""
    space, runs_again = pricer.space, pricer.counts.blocks.runs_again
    codes = pricer.costs.kinds.decision_codes(strategies)
    found, which = pricer.costs.memo.each("flops", codes, lambda at: _flops_of(pricer, strategies, at))
    model, run, dtypes = 0.0, 0.0, dict[str, float]()
    for decision, kind in zip(space.decisions, which.tolist(), strict=True):
        own, ran, again, dtype = found[kind]
        model, run = model + own, run + ran + (again if decision.index in runs_again else 0.0)
        dtypes[dtype] = dtypes.get(dtype, 0.0) + own
    return model, run, dtypes


def _flops_of(pricer: SpacePricer, strategies: Sequence[Strategy], index: int) -> tuple[float, float, float, str]:
    """FLOPs of one op on all devices: (as the model needs them, as they run, of running forward again), and the
    dtype."""
    s = pricer.space.strategy_sets[index]
    if pricer.space.decisions[index].kind != "op" or s.rule is None or s.rule.op_class not in COUNTED:
        return 0.0, 0.0, 0.0, "float32"
    backward = _wanted(s) if pricer.prices.training else 0.0
    number = s.position[strategies[index]]
    forward = s.rule.flops * float(share_of_work(s)[number]) * math.prod(pricer.space.mesh_shape)
    return (s.rule.flops * (1 + BACKWARD * backward), forward * (1 + s.rule.backward_flops * backward), forward,
            dtype_name(worked_in(s)))


def _wanted(s: StrategySet) -> float:
    """The share of an op's products in backward that are needed: none for operands without a gradient."""
    if not any(m.requires_grad for m in s.output_metas):
        return 0.0
    operands = operands_of(s)
    return sum(s.input_metas[i].requires_grad for i in operands) / len(operands) if operands else 1.0


def redistributions(pricer: SpacePricer, strategies: Sequence[Strategy], blocks: Collection[str]
                    ) -> tuple[Redistribution, ...]:
    """The redistributions of these blocks, and those outside of blocks, in execution order."""
    space, found = pricer.space, []
    for use, path, _ in pricer.costs.moves(strategies):
        block = space.blocks[use.target] or ""
        if not path or (block and block not in blocks):
            continue
        names = [name_of(priced.step.axes, space.axis_names) for priced in path]
        how = tuple(f"{_action(priced.step)} over {name}" for priced, name in zip(path, names, strict=True))
        training = use.meta.requires_grad and pricer.prices.training
        found.append(Redistribution(
            block, _named(space, use.source, block), _named(space, use.target, block), layout_str(path[0].step.before),
            layout_str(path[-1].step.after), how,
            float(max(priced.elements for priced in path) * use.meta.dtype.itemsize),
            sum(priced.seconds[0] for priced in path), sum(priced.seconds[1] for priced in path) if training else 0.0,
            pricer.counts.of_parameter[use.source]))
    return tuple(found)


def _named(space: StrategySpace, index: int, block: str) -> str:
    """A decision as block layouts name it: an op by its module within the block, and the op; others by their names."""
    decision = space.decisions[index]
    if decision.kind != "op":
        return decision.name.removeprefix(block).lstrip(".") or decision.name
    node = space.graph.nodes[decision.node]
    where = node.module_path.removeprefix(block).lstrip(".")
    return f"{where} {node.op_name.removeprefix('aten.').rsplit('.', 1)[0]}".strip()


def _action(step: Step) -> str:
    """The collective of a redistribution step forward, and that of its backward if it is another one."""
    kinds = dict.fromkeys(kind.replace("_", "-") for kind in (step.forward, step.backward) if kind in COLLECTIVES)
    return ", backward ".join(kinds) or "local"


def memory_profile(pricer: SpacePricer, problem: Problem, strategies: Sequence[Strategy]) -> MemoryProfile:
    """Bytes by kind on the fullest rank along a step, from the same rows by which the search judged memory."""
    space, counts = pricer.space, pricer.counts
    usages = problem.usages.take(problem.cells(pricer.choice_of(strategies)))
    split = _split(pricer, strategies, usages, problem.ends[:, 0])
    length = 2 * len(space) + 2
    begin, end = problem.intervals.T
    ranks = max(1, len(counts.hybrid.groups) if counts.hybrid.stages > 1 else 1)
    steps = np.zeros((ranks * length + 1, len(KINDS)))
    np.add.at(steps, begin, split)
    np.subtract.at(steps, np.minimum(end, ranks * length), split)
    live = np.maximum(np.cumsum(steps, axis=0)[: ranks * length], 0.0)
    rank = int(live.sum(axis=1).argmax()) // length
    return _sampled(pricer, live[rank * length : rank * length + 2 * len(space) + 1] / pricer.live.share(rank))


def _split(pricer: SpacePricer, strategies: Sequence[Strategy], usages: np.ndarray, sources: np.ndarray) -> np.ndarray:
    """``usages`` of nodes and edges by kind; shape (nodes and edges, kinds). ``sources``: of the edges."""
    space, counts, numbers = pricer.space, pricer.counts, pricer.costs.kinds.numbers(strategies)
    found = np.zeros((len(usages), len(KINDS)))
    column = {kind: number for number, kind in enumerate(KINDS)}
    for decision, whole in zip(space.decisions, usages.tolist(), strict=False):
        s = space.strategy_sets[decision.index]
        if decision.kind == "parameter" and s.output_metas[0].requires_grad and pricer.prices.training:
            meta = s.output_metas[0]
            elements = space.spaces(meta).local_elements[s.outputs[0][numbers[decision.index]]]
            state = training_state(elements, kept_precision(meta, pricer.prices.cluster), pricer.prices.optimizer)
            away = float(pricer.costs.states.tier_bytes(decision.index)[numbers[decision.index]])
            leaves = pricer.costs.gradients.leave(decision.index)
            parameters = 0.0 if counts.away[decision.index].moves_parameters else float(state.parameters)
            kept = 0.0 if leaves else float(pricer.costs.gradients.bytes_of(decision.index)[numbers[decision.index]])
            here = parameters + float(state.optimizer) - away + kept
            scale = whole / here if whole and here else 0.0
            own = min(scale, 1.0) * parameters, min(scale, 1.0) * kept
            found[decision.index, :3] = *own, max(0.0, whole - sum(own))
        else:
            kind = {"parameter": "parameters", "op": "activations", "shared_read": "activations"}.get(
                decision.kind, "inputs and buffers")
            found[decision.index, column[kind]] = whole
    first, uses = len(space), len(space.uses)
    of_parameter = np.array([counts.of_parameter[use.source] for use in space.uses], bool)
    gathered = np.where(of_parameter, usages[first : first + uses], 0)
    summed = np.array([counts.of_parameter[use.source] and sums_gradients(counts, use) for use in space.uses], bool)
    found[first : first + uses, column["gathered parameters"]] = np.where(summed, gathered / 2, gathered)
    found[first : first + uses, column["gradients"]] = np.where(summed, gathered / 2, 0)
    found[first : first + uses, column["activations"]] = np.where(of_parameter, 0, usages[first : first + uses])
    rest = slice(first + uses, first + uses + len(counts.buffers))
    found[rest, column["communication buffers"]] = usages[rest]
    gathers = np.logical_or(counts.of_parameter, counts.views)[sources[rest.stop - first :]]
    found[rest.stop :, column["gathered parameters"]] = np.where(gathers, usages[rest.stop :], 0)
    found[rest.stop :, column["activations"]] = np.where(gathers, 0, usages[rest.stop :])    # in async windows
    if leaving := sum(map(pricer.costs.gradients.leave, range(len(space)))):
        found[-leaving:] = 0
        found[-leaving:, column["gradients"]] = usages[-leaving:]
    return found


def _sampled(pricer: SpacePricer, live: np.ndarray) -> MemoryProfile:
    """At most `MOST_PLACES` places; each stands for those after it until the next, by the fullest of them."""
    space, count = pricer.space, len(pricer.space)
    bounds = np.unique(np.linspace(0, len(live), MOST_PLACES + 1).astype(int))
    places = [int(a + live[a:b].sum(axis=1).argmax()) for a, b in itertools.pairwise(bounds) if b > a]
    kept = [number for number, kind in enumerate(KINDS) if live[places, number].any()]

    def name(place: int) -> str:
        index = min(max(place if place < count else 2 * count - place, 0), count - 1)
        node = space.graph.nodes[space.decisions[index].node]
        where = space.blocks[index] or node.module_path or space.decisions[index].name
        if index >= count - 1:
            return "end of forward" if place < count else "beginning of backward"
        return f"{'forward' if place < count else 'backward'} of {where}"

    return MemoryProfile(tuple(KINDS[k] for k in kept), tuple(map(name, places)),
                         tuple(round(place / count, 5) for place in places),
                         tuple(tuple(float(round(live[place, k])) for k in kept) for place in places))


__all__ = ["memory_profile", "redistributions", "workload"]
