"""What a plan costs, part by part: the same prices that the search added up, told apart for the report."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoparallel.layout import COLLECTIVES, SUMS
from autoparallel.plans import CollectiveUse, Hybrid, Prediction
from autoparallel.pricing.counts import Turns
from autoparallel.pricing.overlap_simulation import hidden_s
from autoparallel.pricing.problem import Move, SpacePricer
from autoparallel.pricing.unit_costs import Inside, Prices
from autoparallel.search.model.problem import Problem
from autoparallel.strategies.space import Label
from cost_models import collectives
from cost_models.pipeline import pipeline_s

#: (kind of collective, axis, direction) -> [count, bytes, seconds].
Found = dict[tuple[str, str, str], list[float]]


@dataclass
class _Parts:
    """Seconds of one step on a rank of one stage, of which there are ``ranks``; ``once`` is what of them does not
    depend on the number of turns."""

    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    forward_communication: float = 0.0
    backward_communication: float = 0.0
    once: float = 0.0
    state_bytes: float = 0.0
    live_bytes: float = 0.0
    host_bytes: float = 0.0
    repeated: list[int] = field(default_factory=list)
    ranks: int = 1

    @property
    def total(self) -> float:
        return (self.forward + self.backward + self.optimizer + self.forward_communication
                + self.backward_communication)


def predict(pricer: SpacePricer, problem: Problem, labels: Sequence[Label], peak_bytes: float,
            sends: Sequence[float] = ()) -> Prediction:
    """Seconds and bytes of the plan that takes ``labels``.

    Without a pipeline the parts add up to the search's objective. With one they are means over the ranks, and waiting
    is what the schedule adds; ``sends`` are the bytes of one micro-batch over each cut, one way. Of either, `beside`
    hides some.
    """
    hybrid, sites, nodes = pricer.turns.hybrid, pricer.space.sites, pricer.space.graph.nodes
    stages = [_Parts(ranks=len(hybrid.ranks_of(stage))) for stage in range(hybrid.stages)]
    found: dict[tuple[str, str, str], list[float]] = {}
    _add_sites(pricer, labels, stages, found)
    _add_links(pricer, labels, stages, found)
    _add_live_bytes(pricer, problem, labels, stages)
    _add_host_bytes(pricer, labels, stages)
    ranks = hybrid.pipeline_ranks
    by_rank = [_together([stages[stage] for stage in hybrid.stages_of(rank)]) for rank in range(ranks)]
    fullest = max(by_rank, key=lambda s: s.live_bytes)
    mean = _together(by_rank)
    step, hidden = mean.total, 0.0
    if hybrid.stages > 1:
        step = _pipelined_s(pricer, stages, sends)
        hidden = step - _pipelined_s(pricer, stages, sends, labels)
    else:
        hidden = hidden_s(pricer, labels)
    return Prediction(
        forward_s=mean.forward / ranks,
        backward_s=mean.backward / ranks,
        optimizer_s=mean.optimizer / ranks,
        forward_communication_s=mean.forward_communication / ranks,
        backward_communication_s=mean.backward_communication / ranks,
        state_bytes=fullest.state_bytes,
        activation_bytes=max(0.0, fullest.live_bytes - fullest.state_bytes),
        peak_bytes=peak_bytes,
        collectives=tuple(CollectiveUse(k, a, d, int(n), b, s) for (k, a, d), (n, b, s) in sorted(found.items())
                          if k in COLLECTIVES or " in " in k),
        repeated_ops=tuple(str(nodes[sites[index].node]) for index in sorted(set(mean.repeated))),
        host_bytes=max(s.host_bytes for s in by_rank),
        waiting_s=max(0.0, step - mean.total / ranks) if hybrid.stages > 1 else 0.0,
        hidden_s=hidden,
    )


def step_s(pricer: SpacePricer, labels: Sequence[Label], sends: Sequence[float]) -> float:
    """Seconds of a step in a pipeline, as `predict` adds them up; whether it fits or not."""
    stages = [_Parts() for _ in range(pricer.turns.hybrid.stages)]
    _add_sites(pricer, labels, stages, {})
    _add_links(pricer, labels, stages, {})
    return _pipelined_s(pricer, stages, sends)


def estimate(pricer: SpacePricer, labels: Sequence[Label]) -> float:
    """Seconds of a step whose stages are taken to be equal: for a sketch, which has no cuts."""
    hybrid, stage = pricer.turns.hybrid, _Parts()
    _add_sites(pricer, labels, [stage], {})
    _add_links(pricer, labels, [stage], {})
    once = (stage.once - hidden_s(pricer, labels)) * max(hybrid.groups) / hybrid.pipeline_ranks
    return equal_stages_s(hybrid, stage.total - stage.once) + once


def site_seconds(prices: Prices, hybrid: Hybrid, labels: Sequence[Label]) -> np.ndarray:
    """What each site of a plan, with the links into it, adds to a turn, in seconds: each as a stage of its own."""
    turns = Turns(prices.space, hybrid, [(index,) for index in range(len(prices.space))])
    pricer, sites = SpacePricer(prices, turns=turns), [_Parts() for _ in prices.space.sites]
    _add_sites(pricer, labels, sites, {})
    _add_links(pricer, labels, sites, {})
    return np.array([(site.total - site.once) / hybrid.turns_on(index) for index, site in enumerate(sites)])


def equal_stages_s(hybrid: Hybrid, turns_s: float) -> float:
    """Seconds of all turns, which take ``turns_s`` on one rank alone, in a pipeline whose ranks have equal shares."""
    share = turns_s / hybrid.micro_batches / hybrid.pipeline_ranks
    return float(pipeline_s([share * ranks for ranks in hybrid.groups], hybrid.micro_batches, _virtual(hybrid),
                            hybrid.groups))


def _virtual(hybrid: Hybrid) -> int:
    """How many parts of filling and draining a schedule leaves one of. Zero bubble (ZB-H1, Qi et al. 2023) fills two
    thirds of the bubble with gradients of weights."""
    return hybrid.stages // len(hybrid.groups) * (3 if hybrid.schedule == "zero_bubble" else 1)


def _together(stages: Sequence[_Parts]) -> _Parts:
    made = _Parts(repeated=[index for s in stages for index in s.repeated])
    for name in ("forward", "backward", "optimizer", "forward_communication", "backward_communication", "once",
                 "state_bytes", "live_bytes", "host_bytes"):
        setattr(made, name, sum(getattr(s, name) for s in stages))
    return made


def _pipelined_s(pricer: SpacePricer, stages: Sequence[_Parts], sends: Sequence[float],
                 labels: Sequence[Label] | None = None) -> float:
    """Seconds of a step under the schedule: turns in a pipeline, then what is done once, less what of it is hidden
    (given ``labels``).

    In a turn both stages beside a cut wait for a message: a value goes one way as a gradient comes the other.
    """
    hybrid, cluster = pricer.turns.hybrid, pricer.prices.cluster
    groups, link = hybrid.groups, cluster.group((hybrid.pipeline_ranks, *pricer.space.mesh_shape), 0)
    passed = [float(collectives.send_recv_s(b, link)) for b in sends] or [0.0] * (hybrid.stages - 1)
    turn = [(s.total - s.once) / hybrid.turns_on(number) + before + after
            for number, (s, before, after) in enumerate(zip(stages, [0.0, *passed], [*passed, 0.0], strict=True))]
    of_group = [sum(turn[g :: len(groups)]) for g in range(len(groups))]
    of_rank = [range(g, len(stages), len(groups)) for g in range(len(groups))]
    hidden = [hidden_s(pricer, labels, rank) if labels is not None else 0.0 for rank in of_rank]
    once = max(sum(stages[n].once for n in rank) - less for rank, less in zip(of_rank, hidden, strict=True))
    return float(pipeline_s(of_group, hybrid.micro_batches, _virtual(hybrid), groups)) + once


def _add_sites(pricer: SpacePricer, labels: Sequence[Label], stages: Sequence[_Parts], found: Found) -> None:
    """What sites do, once for all that are alike."""
    space, codes, numbers = pricer.space, pricer.site_codes(labels), pricer.numbers(labels)
    _, first, which, counts = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
    for kind, (index, count) in enumerate(zip(first.tolist(), counts.tolist(), strict=True)):
        site, strategies, number = space.sites[index], space.strategies[index], int(numbers[index])
        for place in pricer.turns.stages_of[index]:
            stage = stages[place]
            if site.kind == "op":
                _add_op(pricer, index, number, count, place, stage, found)
                if not strategies.known and any(m.requires_grad for m in strategies.output_metas):
                    stage.repeated += np.flatnonzero(which == kind).tolist()
            elif site.kind == "hub":
                times = pricer.turns.op_times(index, place)[1]
                stage.backward += count * times * float(pricer.hub_s(index)[number])
            elif site.kind == "parameter":
                _add_parameter(pricer, index, number, count * pricer.turns.counts[index], stage, found)
                stage.state_bytes += count * float(pricer.site_bytes(index)[number])


def _add_op(pricer: SpacePricer, index: int, number: int, count: int, place: int, stage: _Parts, found: Found) -> None:
    seconds, strategies = pricer.op_s(index, number, place), pricer.space.strategies[index]
    stage.forward += count * (seconds.forward + seconds.again)
    stage.backward += count * seconds.backward
    forward, backward = pricer.turns.op_times(index, place)
    for exchanged in pricer.prices.op(strategies).inside:
        _add_inside(pricer, exchanged, number, (count * forward, count * backward), stage, found)


def _add_parameter(pricer: SpacePricer, index: int, number: int, count: int, stage: _Parts, found: Found) -> None:
    updated, shared = (float(s[number]) for s in (pricer.parameter_s(index), pricer.shared_s(index)))
    stage.optimizer += count * updated
    if shared:
        _count_use(found, ("all_reduce", "pipeline", "backward"), stage.ranks * count,
                   float(pricer.shared_bytes(index)[number]), shared)
    stage.backward_communication += count * shared
    stage.once += count * (updated + shared)


def _add_inside(pricer: SpacePricer, inside: Inside, number: int, times: tuple[int, int], stage: _Parts,
                found: Found) -> None:
    """Tell what a variant exchanges apart from what it computes."""
    seconds, exchange = float(inside.seconds[number]), inside.exchange
    if not seconds:
        return
    counts = (times[0] * exchange.forward, times[1] * exchange.backward if pricer.prices.training else 0)
    for direction, n in zip(("forward", "backward"), counts, strict=True):
        if n:
            key = (f"{exchange.action} in {inside.variant}", pricer.space.axis_names[inside.axis], direction)
            _count_use(found, key, n * stage.ranks, float(inside.num_bytes[number]), seconds)
            setattr(stage, direction, getattr(stage, direction) - n * seconds)
            name = f"{direction}_communication"
            setattr(stage, name, getattr(stage, name) + n * seconds)


def _count_use(found: Found, key: tuple[str, str, str], times: int, num_bytes: float, seconds: float) -> None:
    entry = found.setdefault(key, [0, 0.0, 0.0])
    for place, value in enumerate((1, num_bytes, seconds)):
        entry[place] += times * value


def _add_live_bytes(pricer: SpacePricer, problem: Problem, labels: Sequence[Label], stages: Sequence[_Parts]) -> None:
    """Bytes live at the end of each stage's forward pass."""
    turns, num_bytes = pricer.turns, problem.usages.take(problem.cells(pricer.choice_of(labels)))
    for holders, users in _holders(pricer, problem).items():
        moments = [turns.turn_of(stage) for stage in holders]
        begin, end = problem.intervals[users].T
        live = float(num_bytes[users][(begin <= min(moments)) & (max(moments) < end)].sum())
        for stage in holders:
            stages[stage].live_bytes += live


def _holders(pricer: SpacePricer, problem: Problem) -> Mapping[tuple[int, ...], Sequence[int]]:
    """The nodes and edges of a problem by the stages that hold what they stand for."""
    turns = pricer.turns
    if turns.hybrid.stages == 1:
        return {(0,): range(len(problem.intervals))}
    found, first = defaultdict[tuple[int, ...], list[int]](list), len(turns.stages_of) + len(pricer.space.links)
    stages = [*turns.stages_of, *(turns.stages_of[edge.target] for edge in problem.edges)]
    stages[first : first + len(turns.buffers)] = [(buffer.stage,) for buffer in turns.buffers]
    for number, holders in enumerate(stages):
        found[holders].append(number)
    return found


def _add_host_bytes(pricer: SpacePricer, labels: Sequence[Label], stages: Sequence[_Parts]) -> None:
    """Bytes that wait in the host's memory for backward."""
    space, turns, numbers = pricer.space, pricer.turns, pricer.numbers(labels)
    if turns.hybrid.recompute != "offload":
        return
    for site in space.sites:
        if turns.offloads(site.index):
            num_bytes = float(pricer.site_bytes(site.index)[numbers[site.index]])
            _hold(turns, stages, turns.stages_of[site.index], num_bytes * turns.held[site.index])
    for link in space.links:
        if turns.offloads_copy(link):
            num_bytes = float(pricer.prices.link_copies(link)[numbers[link.source], numbers[link.target]])
            _hold(turns, stages, turns.stages_of[link.target], num_bytes * turns.held[link.target])


def _hold(turns: Turns, stages: Sequence[_Parts], holders: Sequence[int], num_bytes: float) -> None:
    for holder in holders:
        stages[holder].host_bytes += num_bytes * turns.in_flight(holder)


def _add_links(pricer: SpacePricer, labels: Sequence[Label], stages: Sequence[_Parts], found: Found) -> None:
    """What links do, once for all that are alike."""
    moves = pricer.moves(labels)
    counts, alike = Counter(move.kind for move in moves), {move.kind: move for move in reversed(moves)}
    for kind, move in alike.items():
        for place in pricer.turns.stages_of[move.link.target]:
            _add_link(pricer, labels, move, counts[kind], place, stages[place], found)


def _add_link(pricer: SpacePricer, labels: Sequence[Label], move: Move, count: int, place: int, stage: _Parts,
              found: Found) -> None:
    space, turns, link = pricer.space, pricer.turns, move.link
    ends = tuple(pricer.numbers(labels)[[link.source, link.target]].tolist())
    if turns.sums(link):
        stage.backward += count * float(pricer.sums_s(link)[ends])
    if turns.offloads_copy(link):
        there, back = pricer.offload_copy_s(link)
        stage.forward += count * float(there[ends])
        stage.backward += count * float(back[ends])
    summing, times = turns.summing(link), turns.link_times(link, place)
    for step, seconds, elements in move.path:
        axis = space.axis_names[step.axis]
        actions = zip(("forward", "backward"), (step.forward, step.backward), seconds, times, strict=True)
        for direction, kind, s, n in actions:
            if kind == "none" or (direction == "backward" and not (link.meta.requires_grad and pricer.prices.training)):
                continue
            scale = summing.scale if direction == "backward" and kind in SUMS else 1.0
            num_bytes = scale * float(elements) * link.meta.dtype.itemsize
            _count_use(found, (kind, axis, direction), count * n * stage.ranks, num_bytes, s)
            name = f"{direction}_communication" if kind in COLLECTIVES else direction
            setattr(stage, name, getattr(stage, name) + count * n * s)
            if turns.of_parameter[link.source] and n == turns.counts[link.target]:
                stage.once += count * s
