"""Seconds and bytes of a plan's step by part, on a rank of each stage; `prediction` adds them up to a step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoparallel.layout import COLLECTIVES, SUMS
from autoparallel.layout.redistribution import Axes, name_of
from autoparallel.pricing.exchanges import Inside
from autoparallel.pricing.overlap_simulation import Hidden
from autoparallel.pricing.problem import SpacePricer
from autoparallel.pricing.recomputing import Block
from autoparallel.pricing.step_cost import Move, prices_of
from autoparallel.pricing.unit_costs import Prices
from autoparallel.schedule.step_config import first_axis_of
from autoparallel.schedule.tiers import BLOCK_BYTES, padded
from autoparallel.search.model.problem import Problem
from autoparallel.strategies.space import Strategy
from cost_models.compute import larger
from cost_models.profile import Profile

#: (kind of collective, axis, direction, purpose) -> [count, bytes, seconds].
Found = dict[tuple[str, str, str, str], list[float]]


@dataclass
class Ahead:
    """Seconds of the ops in blocks in one direction: ``summed`` over kernels, each no shorter than its launch; of the
    ``device`` and of the ``host`` alone; and of ``collectives`` of activations, with what the host does for them in
    ``host``."""

    summed: float = 0.0
    device: float = 0.0
    host: float = 0.0
    collectives: float = 0.0

    def saved_s(self, profile: Profile, hidden_s: float = 0.0) -> float:
        """How much less than the sum they take: the host launches ahead, collectives overlap with compute (by
        ``hidden_s``, or by the software's share). Ranks that wait for one another wait for one another's hosts
        (`Profile.tied`)."""
        hidden = hidden_s if profile.overlaps_activations else profile.hide_tensor * min(self.collectives, self.summed)
        taken = larger(self.device + self.collectives - hidden, self.host, profile.tied if self.collectives else 6.0)
        return self.summed + self.collectives - float(taken) if self.summed else hidden

    @property
    def slower_host_s(self) -> float:
        """What a host half as fast adds."""
        busy = self.device + self.collectives
        return max(busy, 2 * self.host) - max(busy, self.host)

    def add(self, other: Ahead) -> None:
        for name in ("summed", "device", "host", "collectives"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Parts:
    """Seconds of one step and bytes, on each of the ``ranks`` ranks of a stage. ``host_bytes``, ``disk_bytes``: of
    activations and training state there; ``tiled_bytes``: of optimizer states on disk. ``once``: the seconds that do
    not depend on the number of micro-batches, ``once_forward`` those of them in forward. ``again``: compute of
    recompute. ``lookups_forward``, ``lookups_backward``, ``crossings``: of tables on the host. ``by_class``: compute of
    ops by their class. ``outside``: by how much launches prolong ops outside of blocks. All of these are in the others
    too, and so are ``ahead_forward`` and ``ahead_backward``."""

    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    forward_communication: float = 0.0
    backward_communication: float = 0.0
    once: float = 0.0
    once_forward: float = 0.0
    again: float = 0.0
    ahead_forward: Ahead = field(default_factory=Ahead)
    ahead_backward: Ahead = field(default_factory=Ahead)
    outside: float = 0.0
    state_bytes: float = 0.0
    live_bytes: float = 0.0
    always_bytes: float = 0.0
    host_bytes: float = 0.0
    disk_bytes: float = 0.0
    tiled_bytes: float = 0.0
    lookups_forward: float = 0.0
    lookups_backward: float = 0.0
    crossings: float = 0.0
    by_class: dict[str, float] = field(default_factory=dict)
    repeated: list[int] = field(default_factory=list)
    ranks: int = 1

    @property
    def total(self) -> float:
        return (self.forward + self.backward + self.optimizer + self.forward_communication
                + self.backward_communication)

    def beside_s(self, profile: Profile | None, micro_batches: int, hidden_s: float = 0.0) -> float:
        """Seconds saved as the host launches ahead, and ``hidden_s`` of communication of activations overlap with
        compute. Launches outside of blocks are counted in the fixed time of a micro-batch, as far as that goes."""
        if profile is None:
            return 0.0
        ways = self.ahead_forward, self.ahead_backward
        sent = sum(way.collectives for way in ways) or 1.0
        return (sum(way.saved_s(profile, hidden_s * way.collectives / sent) for way in ways)
                + min(self.outside, profile.micro_s * micro_batches))

    def hidden_s(self, profile: Profile | None, micro_batches: int, found: Hidden) -> float:
        """Seconds saved by overlap in all micro-batches alike. What hides communication of activations saves nothing
        where the host takes longer."""
        return found.each + (self.beside_s(profile, micro_batches, found.activations)
                             - self.beside_s(profile, micro_batches))


def together(stages: Sequence[Parts]) -> Parts:
    made = Parts(repeated=[index for s in stages for index in s.repeated])
    for name in ("forward", "backward", "optimizer", "forward_communication", "backward_communication", "once",
                 "once_forward", "again", "outside", "state_bytes", "live_bytes", "always_bytes", "host_bytes",
                 "disk_bytes", "tiled_bytes", "lookups_forward", "lookups_backward", "crossings"):
        setattr(made, name, sum(getattr(s, name) for s in stages))
    for stage in stages:
        made.ahead_forward.add(stage.ahead_forward)
        made.ahead_backward.add(stage.ahead_backward)
    return made


def _called_s(pricer: SpacePricer, axes: Axes) -> float:
    """Seconds of the host for a collective on mesh axes, and of its wait for the last rank."""
    profile = pricer.prices.cluster.profile
    return 0.0 if profile is None else profile.host_call_s + profile.late_s(pricer.prices.groups[axes].size)


def add_decisions(pricer: SpacePricer, strategies: Sequence[Strategy], stages: Sequence[Parts], found: Found) -> None:
    """Add the costs of decisions, once per equivalence class."""
    space, kinds = pricer.space, pricer.costs.kinds
    codes, numbers = kinds.decision_codes(strategies), kinds.numbers(strategies)
    _, first, which, counts = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
    for kind, (index, count) in enumerate(zip(first.tolist(), counts.tolist(), strict=True)):
        decision, strategy_set, number = space.decisions[index], space.strategy_sets[index], int(numbers[index])
        for place in pricer.counts.stages_of[index]:
            stage = stages[place]
            if decision.kind == "op":
                _add_op(pricer, index, number, count, place, stage, found)
                if not strategy_set.known and any(m.requires_grad for m in strategy_set.output_metas):
                    stage.repeated += np.flatnonzero(which == kind).tolist()
            elif decision.kind == "shared_read":
                stage.backward += count * float(pricer.costs.of(index, place).backward[number])
            elif decision.kind == "parameter":
                _add_parameter(pricer, index, number, count, stage, found)
                stage.state_bytes += count * float(pricer.costs.decision_bytes(index)[number])


def _add_op(pricer: SpacePricer, index: int, number: int, count: int, place: int, stage: Parts, found: Found) -> None:
    if pricer.costs.lookups.runs(index):
        _add_lookup(pricer, index, number, count, place, stage)
        return
    missed_s = _add_misses(pricer, index, number, count, place, stage)
    cost, before_s = pricer.costs.of(index, place), stage.forward + stage.backward
    stage.forward += count * float(cost.forward[number] + cost.again[number]) - missed_s
    stage.again += count * float(cost.again[number])
    stage.backward += count * float(cost.backward[number])
    forward, backward = pricer.counts.op_times(index, place)
    prices = prices_of(pricer.prices, pricer.counts, index, place)
    _add_ahead(pricer, prices, index, number, (count * forward, count * backward), stage)
    for exchanged in prices.op_of(index).inside:
        again = forward - backward if pricer.prices.training else 0
        stage.again -= count * again * float(exchanged.forward_s[number])
        _add_inside(pricer, exchanged, number, (count * forward, count * backward), stage, found)
    rule = pricer.space.strategy_sets[index].rule
    op_class = "" if rule is None else rule.op_class
    stage.by_class[op_class] = stage.by_class.get(op_class, 0.0) + stage.forward + stage.backward - before_s


def _add_lookup(pricer: SpacePricer, index: int, number: int, count: int, place: int, stage: Parts) -> None:
    """Add an op that runs on the host: its work there, and what crosses between the two memories as communication."""
    forward, backward = pricer.counts.op_times(index, place)
    each = pricer.costs.lookups.price(index)
    work_s, back_s, up_s, down_s = (count * times * float(seconds[number]) for times, seconds in zip(
        (forward, backward, forward, backward), each, strict=True))
    again = (forward - backward) / forward if forward else 0.0
    stage.forward, stage.backward, stage.again = (stage.forward + work_s, stage.backward + back_s,
                                                  stage.again + again * work_s)
    stage.forward_communication += up_s
    stage.backward_communication += down_s
    stage.lookups_forward += (1 - again) * work_s
    stage.lookups_backward += back_s
    stage.crossings += up_s + down_s


def _add_misses(pricer: SpacePricer, index: int, number: int, count: int, place: int, stage: Parts) -> float:
    """Add what a lookup's misses of a cache move: the host's work, and what crosses as communication. Returns the
    seconds of both."""
    if index not in pricer.counts.lookups.cached:
        return 0.0
    _, times = pricer.counts.op_times(index, place)
    each = pricer.costs.lookups.misses(index)
    work_s, there_s = (count * times * float(seconds[number]) for seconds in (each.forward, each.there))
    stage.forward += work_s
    stage.forward_communication += there_s
    stage.lookups_forward += work_s
    stage.crossings += there_s
    return work_s + there_s


def _add_ahead(pricer: SpacePricer, prices: Prices, index: int, number: int, times: tuple[int, int], stage: Parts
               ) -> None:
    """Add an op in a block to what the host launches ahead; exchanges inside are not launched so."""
    profile = pricer.prices.cluster.profile
    if profile is None or (apart := prices.host_and_device(index)) is None:
        return
    (host, device), price = apart, prices.op_of(index)
    inside_s = [sum(float(one[number]) for one in some) for some in (
        [i.forward_s for i in price.inside], [i.backward_s for i in price.inside])]
    summed_s = float(price.forward_s[number]) - inside_s[0], float(price.backward_s[number])
    backward_s = summed_s[1] - inside_s[1] if summed_s[1] else 0.0
    if not pricer.space.blocks[index]:
        stage.outside += (times[0] * (summed_s[0] - float(device.forward_s[number]))
                          + times[1] * (backward_s - float(device.backward_s[number])))
        return
    stage.ahead_forward.add(Ahead(times[0] * summed_s[0], times[0] * float(device.forward_s[number]),
                                   times[0] * float(host.forward_s[number])))
    slower = profile.kernel_backward_s / profile.kernel_s
    stage.ahead_backward.add(Ahead(times[1] * backward_s, times[1] * float(device.backward_s[number]),
                                    times[1] * float(host.backward_s[number]) * slower))


def _add_parameter(pricer: SpacePricer, index: int, number: int, count: int, stage: Parts, found: Found) -> None:
    cost = pricer.costs.of(index)
    updated, shared, moved = float(cost.update[number]), float(cost.summed[number]), float(cost.moved[number])
    stage.optimizer += count * updated
    if shared:
        some, axis = pricer.counts.multiplicities[index], first_axis_of(pricer.counts.hybrid)
        _count_use(found, ("all_reduce", axis, "backward", "gradients"), stage.ranks * count * some,
                   float(pricer.costs.shared_bytes(index)[number]), shared / some)
    stage.backward_communication += count * (shared + moved)
    stage.once += count * (updated + shared + (0.0 if pricer.costs.gradients.leave(index) else moved))
    if not pricer.counts.away[index].is_away:
        return
    tiers = pricer.costs.tiers
    stage.host_bytes += count * float(tiers.bytes_in(index, "host")[number])
    stage.disk_bytes += count * float(tiers.bytes_in(index, "disk")[number])
    stage.tiled_bytes += count * float(tiers.tiled_bytes(index)[number])


def _add_inside(pricer: SpacePricer, inside: Inside, number: int, times: tuple[int, int], stage: Parts,
                found: Found) -> None:
    """Move the seconds of a variant's exchange from compute to communication."""
    exchange = inside.exchange
    if not inside.seconds[number]:
        return
    ways = [("forward", times[0], exchange.forward, inside.forward_s)]
    if pricer.prices.training:
        ways.append(("backward", times[1], exchange.backward, inside.backward_s))
    for direction, often, each, seconds in ways:
        if n := often * each:
            axis, taken_s = pricer.space.axis_names[inside.axis], often * float(seconds[number])
            key = (f"{exchange.action} in {inside.variant}", axis, direction, "activations")
            _count_use(found, key, n * stage.ranks, float(inside.num_bytes[number]), taken_s / n)
            setattr(stage, direction, getattr(stage, direction) - taken_s)
            name = f"{direction}_communication"
            setattr(stage, name, getattr(stage, name) + taken_s)


def _count_use(found: Found, key: tuple[str, str, str, str], times: int, num_bytes: float, seconds: float) -> None:
    entry = found.setdefault(key, [0, 0.0, 0.0])
    for place, value in enumerate((1, num_bytes, seconds)):
        entry[place] += times * value


def add_live_bytes(
    pricer: SpacePricer, problem: Problem, strategies: Sequence[Strategy], stages: Sequence[Parts]
) -> None:
    """Add the bytes live at the end of each stage's forward pass, and those of them that live the whole step."""
    num_bytes = problem.usages.take(problem.cells(pricer.choice_of(strategies)))
    for holders, users in _holders(pricer, problem).items():
        moments = [pricer.live.turning_of(stage) for stage in holders]
        begin, end = problem.intervals[users].T
        live = float(num_bytes[users][(begin <= min(moments)) & (max(moments) < end)].sum())
        half = len(pricer.space)  # from the turn to the start, and to the end
        always = float(num_bytes[users][(begin <= min(moments) - half) & (max(moments) + half < end)].sum())
        counted = pricer.live.share(*holders)
        for stage in holders:
            stages[stage].live_bytes += live / counted
            stages[stage].always_bytes += always / counted


def _holders(pricer: SpacePricer, problem: Problem) -> Mapping[tuple[int, ...], Sequence[int]]:
    """The numbers of a problem's nodes and edges (nodes first), by the stages that hold their memory."""
    counts = pricer.counts
    if counts.hybrid.stages == 1:
        return {(0,): range(len(problem.intervals))}
    found, first = defaultdict[tuple[int, ...], list[int]](list), len(counts.stages_of) + len(pricer.space.uses)
    stages = [*counts.stages_of, *(counts.stages_of[edge.target] for edge in problem.edges)]
    stages[first : first + len(counts.buffers)] = [(buffer.stage,) for buffer in counts.buffers]
    for number, holders in enumerate(stages):
        found[holders].append(number)
    return found


def add_host_bytes(pricer: SpacePricer, strategies: Sequence[Strategy], stages: Sequence[Parts]) -> None:
    """Add the bytes of blocks' saved tensors on the host or on disk (`Hybrid.saved_on`)."""
    counts, tier = pricer.counts, pricer.counts.hybrid.saved_on
    if tier == "device":
        return
    by_block = defaultdict[Block, float](float)
    for index, num_bytes in _leaving(pricer, strategies):
        whole = num_bytes if tier == "host" else float(padded(num_bytes, BLOCK_BYTES))
        if (block := counts.blocks.evicted[index]) is not None:
            by_block[block] += num_bytes
        for holder in counts.stages_of[index]:
            held = whole * counts.held[index] * counts.in_flight[holder]
            name = f"{tier}_bytes"
            setattr(stages[holder], name, getattr(stages[holder], name) + held)
    if tier == "disk" and not pricer.prices.cluster.host.shared_memory:
        for stage, one in enumerate(stages):    # blocks on their way, for which `kernels.saved_on_disk` waits
            one.host_bytes += 2 * max((size for (first, _), size in by_block.items() if first == stage), default=0.0)


def _leaving(pricer: SpacePricer, strategies: Sequence[Strategy]) -> Iterator[tuple[int, float]]:
    """The saved values and redistributed copies that leave the device, each as its decision and its bytes of one
    micro-batch."""
    space, counts, numbers = pricer.space, pricer.counts, pricer.costs.kinds.numbers(strategies)
    for decision in space.decisions:
        if counts.offloads(decision.index).there:
            yield decision.index, float(pricer.costs.decision_bytes(decision.index)[numbers[decision.index]])
    for use in space.uses:
        if counts.offloads_copy(use).there:
            yield use.target, float(
                pricer.prices.redistribution.use_copies(use)[numbers[use.source], numbers[use.target]])


def add_uses(pricer: SpacePricer, strategies: Sequence[Strategy], stages: Sequence[Parts], found: Found) -> None:
    """Add the costs of uses, once per equivalence class."""
    moves, numbers = pricer.costs.moves(strategies), pricer.costs.kinds.numbers(strategies)
    counts, equivalent = Counter(move.kind for move in moves), {move.kind: move for move in reversed(moves)}
    for kind, move in equivalent.items():
        for place in pricer.counts.stages_of[move.use.target]:
            _add_use(pricer, numbers, move, counts[kind], place, stages[place], found)


def _add_use(pricer: SpacePricer, numbers: np.ndarray, move: Move, count: int, place: int, stage: Parts, found: Found
             ) -> None:
    space, counts, use = pricer.space, pricer.counts, move.use
    ends = tuple(numbers[[use.source, use.target]].tolist())
    if counts.sums(use):
        summed_s = count * float(pricer.costs.sums_s(use)[ends])
        stage.backward += summed_s
        if pricer.costs.lookups.sums_there(use.source):
            stage.lookups_backward += summed_s
        elif space.blocks[use.target]:
            stage.ahead_backward.add(Ahead(summed_s, summed_s))
    if counts.offloads_copy(use).there:
        there, back = pricer.costs.activations.of_copy(use)
        stage.forward += count * float(there[ends])
        stage.backward += count * float(back[ends])
    if pricer.costs.parameters.fetches(use):
        there, back = pricer.costs.tiers.fetch_s(use, pricer.costs.of)
        stage.forward_communication += count * float(there[ends[0]])
        stage.backward_communication += count * float(back[ends[0]])
    summing, (forward, again, backward) = counts.summing(use), counts.use_times(use, place, ends[1])
    times = forward + again, backward
    for step, seconds, elements in move.path:
        if pricer.prices.groups[step.axes].size == 1:    # one rank sends nothing, and no host waits for another
            continue
        axis = name_of(step.axes, space.axis_names)
        actions = zip(("forward", "backward"), (step.forward, step.backward), seconds, times, strict=True)
        for direction, kind, s, n in actions:
            if kind == "none" or (direction == "backward" and not (use.meta.requires_grad and pricer.prices.training)):
                continue
            scale = summing.scale if direction == "backward" and kind in SUMS else 1.0
            num_bytes = scale * float(elements) * use.meta.dtype.itemsize
            purpose = "activations"
            if counts.of_parameter[use.source]:
                purpose = "parameters" if direction == "forward" else "gradients"
            _count_use(found, (kind, axis, direction, purpose), count * n * stage.ranks, num_bytes, s)
            name = f"{direction}_communication" if kind in COLLECTIVES else direction
            setattr(stage, name, getattr(stage, name) + count * n * s)
            if kind in COLLECTIVES and not counts.of_parameter[use.source] and space.blocks[use.target]:
                ahead = stage.ahead_forward if direction == "forward" else stage.ahead_backward
                ahead.collectives += count * n * s
                ahead.host += count * n * _called_s(pricer, step.axes)
            if counts.of_parameter[use.source] and n == counts.multiplicities[use.target]:
                stage.once += count * s
                stage.once_forward += count * s if direction == "forward" else 0.0


__all__ = ["Ahead", "Found", "Parts", "add_decisions", "add_host_bytes", "add_live_bytes", "add_uses", "together"]
