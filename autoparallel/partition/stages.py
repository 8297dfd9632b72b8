"""Pipeline stages: a program cut between any two ops into parts that run on different devices.

All stages share one strategy graph and one plan, so a value that crosses a cut has one layout. Ops that do not depend
on the inputs (views of weights), or on neither parameters nor gradients (masks, positions), are repeated on every stage
that reads them, which is cheaper than sending. A value read several stages later (skip connections, an encoder's
output) passes through the stages between.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoparallel import clock
from autoparallel.capture import TensorMeta
from autoparallel.capture.blocks import block_path, equal_blocks
from autoparallel.errors import InfeasibleError, InputError, PlanError
from autoparallel.plans import Hybrid
from autoparallel.pricing import Prices, decision_seconds
from autoparallel.pricing.pipeline_steps import SentValue
from autoparallel.pricing.prediction import means
from autoparallel.pricing.stage_devices import along_pipeline, paces_of
from autoparallel.schedule.stage import Part, Value
from autoparallel.strategies.space import Strategy, StrategySpace, TensorUse
from cost_models import ClusterError, collectives
from cost_models.pipeline import blocks_of_stages

#: Largest average number of moves per cut in the final improvement.
MOST_MOVES = 10
#: How many bounds of the bytes sent are tried, the smallest first.
MOST_LIMITS = 16


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline, in order."""

    parts: tuple[Part, ...]

    def __len__(self) -> int:
        return len(self.parts)

    def of_decisions(self, num_decisions: int) -> list[tuple[int, ...]]:
        """By decision, the stages that have it, in order."""
        if len(self) == 1:
            return [(0,)] * num_decisions
        found: list[list[int]] = [[] for _ in range(num_decisions)]
        for number, part in enumerate(self.parts):
            for index in part.decisions:
                found[index].append(number)
        return list(map(tuple, found))

    def blocks(self, space: StrategySpace) -> list[list[str]]:
        """Paths of the blocks of each stage, in order; a block on several stages belongs to the first."""
        found: list[list[str]] = [[] for _ in range(len(self))]
        seen: set[str] = set()
        for decision, on in zip(space.decisions, self.of_decisions(len(space)), strict=True):
            path = block_path(space.graph.nodes[decision.node].module_path) if decision.kind == "op" else None
            if path is not None and on and path not in seen:
                seen.add(path)
                found[on[0]].append(path)
        return found

    def sent_bytes(self, space: StrategySpace, strategies: Sequence[Strategy]) -> list[tuple[float, float]]:
        """Over each cut, per micro-batch and in one direction: bytes that one rank sends, and the bytes of its part if
        ranks with the same values share them out."""
        ranks, found = math.prod(space.mesh_shape), []
        for values in self._sent(space, strategies):
            found.append((sum(local for local, _ in values),
                          sum(min(local, meta.num_bytes / ranks) for local, meta in values)))
        return found

    def sent_values(self, space: StrategySpace, strategies: Sequence[Strategy]) -> list[list[SentValue]]:
        """By cut, the values that cross it."""
        return [[SentValue(local, meta.requires_grad) for local, meta in values]
                for values in self._sent(space, strategies)]

    def _sent(self, space: StrategySpace, strategies: Sequence[Strategy]) -> Iterator[list[tuple[float, TensorMeta]]]:
        """By cut, bytes on a rank and form of each value."""
        for part in self.parts[:-1]:
            values = list[tuple[float, TensorMeta]]()
            for decision, o in part.sent:
                s = space.strategy_sets[decision]
                meta, number = s.output_metas[o], s.outputs[o][s.position[strategies[decision]]]
                values.append((float(space.spaces(meta).local_elements[number]) * meta.dtype.itemsize, meta))
            yield values


@dataclass(frozen=True)
class Flow:
    """The data flow of a program: ``main`` decisions in order (ops and shared reads on the path from input to loss),
    and ``repeated`` ones, which each stage that needs them runs itself."""

    space: StrategySpace
    main: tuple[int, ...]
    repeated: frozenset[int]


def flow_of(space: StrategySpace, loss: int) -> Flow:
    """The data flow to the loss (output ``loss``) and to the new values of buffers."""
    needed = _needed(space, [s.index for s in space.decisions if s.kind == "update" or s.name == f"output:{loss}"])
    fed: set[int] = set()  # depends on an input, and on a parameter, a gradient or random numbers
    plain: set[int] = set()  # depends on neither parameters nor gradients
    for decision in space.decisions:
        sources = [k.source for k in space.uses_by.get(decision.index, ())]
        s = space.strategy_sets[decision.index]
        random = s.rule is not None and s.rule.random
        if decision.kind in ("input", "buffer"):
            if not s.output_metas[0].requires_grad:
                plain.add(decision.index)
            else:
                fed.add(decision.index)
        elif decision.kind != "parameter" and not random and all(k in plain for k in sources):
            plain.add(decision.index)
        elif decision.kind != "parameter" and (random or any(k in plain or k in fed for k in sources)):
            fed.add(decision.index)
    kinds = ("op", "shared_read")
    main = tuple(s.index for s in space.decisions if s.kind in kinds and s.index in fed and s.index in needed)
    return Flow(space, main, frozenset(s.index for s in space.decisions if s.index in needed) - set(main))


def _needed(space: StrategySpace, ends: Sequence[int]) -> set[int]:
    """The decisions on which ``ends`` depend, and ``ends``."""
    needed: set[int] = set()
    stack = list(ends)
    while stack:
        index = stack.pop()
        if index not in needed:
            needed.add(index)
            stack.extend(k.source for k in space.uses_by.get(index, ()))
    return needed


def place_cuts(prices: Prices, loss: int | None, hybrid: Hybrid, strategies: Sequence[Strategy] | None = None
               ) -> tuple[str, ...]:
    """The names of the decisions at which stages 1, 2, ... begin, minimising the seconds (compute and sends) of the
    slowest pipeline rank; on unequal devices a stage gets work by the speed of its own devices. Costs are those of
    ``strategies``, or of each op's cheapest strategy if None.

    Raises InputError without a scalar loss, InfeasibleError if there are fewer ops than stages.
    """
    space = prices.space
    if strategies is None:
        seconds = np.array([prices.op_of(decision.index).total_s.min() if decision.kind == "op" else 0.0
                            for decision, s in zip(space.decisions, space.strategy_sets, strict=True)])
    else:
        clock.did("decisions read", 2 * len(space))
        alike = numbers_alike(space, hybrid)    # which of them recompute slows down is decided after the cuts
        seconds = means(decision_seconds(prices, hybrid, strategies, alike), alike)
    network = along_pipeline(prices)

    def send_s(num_bytes: np.ndarray) -> np.ndarray:
        return np.where(num_bytes > 0, collectives.send_recv_s(num_bytes, network), 0.0)

    flow = flow_of(space, _loss(loss))
    paces = paces_of(prices, [hybrid.ranks_of(number) for number in range(len(hybrid.groups))])
    cuts = cut_evenly(flow, seconds, hybrid.stages, hybrid.groups, lambda k: _local_bytes(space, k, strategies), send_s,
                      paces)
    return tuple(space.decisions[index].name for index in cuts)


def cuts_by_blocks(space: StrategySpace, loss: int | None, stages: int, ends: bool = False) -> tuple[str, ...]:
    """The names of the decisions at which stages 1, 2, ... begin, by counts of the blocks (layers) on the path to the
    loss (`cost_models.pipeline.blocks_of_stages`).

    Raises PlanError if a stage would have no block.
    """
    first = dict[str, str]()
    for index in flow_of(space, _loss(loss)).main:
        if (path := space.blocks[index]) and space.decisions[index].kind == "op":
            first.setdefault(path, space.decisions[index].name)
    try:
        counts = blocks_of_stages(len(first), stages, ends)
    except ClusterError as error:
        raise PlanError(f"{error}, or split=work, which cuts between equal shares of the work") from None
    if not (counts[0] and counts[-1]):
        raise PlanError(f"{len(first)} blocks leave none to the first and last of {stages} stages: take fewer stages")
    begins = list(first.values())
    return tuple(begins[number] for number in itertools.accumulate(counts[:-1]))


def numbers_alike(space: StrategySpace, hybrid: Hybrid) -> np.ndarray:
    """Numbers by decision; those at one place of equal blocks have the same, and so have parameters that are read first
    at one place, but for stages on several ranks: these sum gradients."""
    decision_of = {
        (decision.kind, decision.node if decision.ref is None else decision.ref.node): decision.index
        for decision in space.decisions
    }
    found = np.arange(len(space))
    for blocks, kind in itertools.product(equal_blocks(space.graph), ("op", "shared_read")):
        for nodes in zip(*(block.nodes for block in blocks), strict=True):
            decisions = [decision_of[kind, node] for node in nodes if (kind, node) in decision_of]
            found[decisions] = min(decisions, default=0)
    first = {use.source: use for use in reversed(space.uses)} if not hybrid.replicas else {}
    number = dict[tuple[int, int], int]()
    for decision in space.decisions:
        if decision.kind == "parameter" and (use := first.get(decision.index)) is not None:
            found[decision.index] = number.setdefault((int(found[use.target]), use.position), decision.index)
    return found


def _local_bytes(space: StrategySpace, use: TensorUse, strategies: Sequence[Strategy] | None) -> float:
    """Bytes per rank of the value that a use reads; of an even shard if no strategies are given."""
    if strategies is None:
        return use.meta.num_bytes / math.prod(space.mesh_shape)
    s = space.strategy_sets[use.source]
    layout = s.outputs[use.output][s.position[strategies[use.source]]]
    return float(space.spaces(use.meta).local_elements[layout]) * use.meta.dtype.itemsize


def stages_of(space: StrategySpace, loss: int | None, hybrid: Hybrid) -> Stages:
    """The stages with the cuts of ``hybrid``; without a pipeline one stage with all decisions.

    Raises PlanError if a cut is not an op on the path to the loss, or occurs twice; InputError without a scalar loss.
    """
    if hybrid.stages == 1:
        return Stages((Part(frozenset(range(len(space)))),))
    flow = flow_of(space, _loss(loss))
    places = {space.decisions[index].name: index for index in flow.main if space.decisions[index].kind == "op"}
    unknown = [name for name in hybrid.cuts if name not in places]
    cuts = sorted(places[name] for name in hybrid.cuts if name in places)
    if unknown or len(set(cuts)) != hybrid.stages - 1:
        raise PlanError(f"cuts {list(hybrid.cuts)} do not make {hybrid.stages} stages: "
                        + (f"{unknown} are no ops on the path to the loss" if unknown else "each must be another op"))
    return cut(flow, cuts, _loss(loss))


def _loss(loss: int | None) -> int:
    if loss is None:
        raise InputError("a pipeline needs a scalar loss: return the loss from the model, alone, first in a tuple, or "
                         "as `loss` of a structure")
    return loss


def cut_evenly(
    flow: Flow,
    seconds: np.ndarray,
    count: int,
    groups: Sequence[int],
    num_bytes: Callable[[TensorUse], float],
    send_s: Callable[[np.ndarray], np.ndarray],
    paces: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """The decisions at which stages 1, ..., count - 1 begin, so that the slowest rank takes least.

    For each bound on the bytes sent, the cuts that make the slowest stage fastest are found by bisection; the best of
    these is improved by moving single cuts. ``seconds``: by decision. ``groups``: ranks of each group of stages, which
    share its seconds; stage s belongs to group ``s % len(groups)``. ``send_s``: seconds of sending bytes, for which
    both stages at a cut wait. ``paces``: how many times as fast as by ``seconds`` each group computes.

    Raises InfeasibleError if there are fewer ops than stages.
    """
    ops = [i for i in flow.main if flow.space.decisions[i].kind == "op"]
    if len(ops) < count:
        raise InfeasibleError(f"{len(ops)} ops cannot be cut into {count} pipeline stages: take at most {len(ops)}")
    before, sent = np.concatenate([[0.0], np.cumsum(seconds[ops])]), _sent_bytes(flow, ops, num_bytes)
    loads = _Loads(before, np.concatenate([[0.0], send_s(sent[1:]), [0.0]]), np.array(groups, float),
                   np.ones(len(groups)) if paces is None else np.array(paces, float))
    limits = np.unique(sent[1:])
    tried = [1 + np.flatnonzero(sent[1:] <= limit) for limit in (*limits[:MOST_LIMITS], limits[-1])]
    best = min((loads.even(places, count) for places in tried if len(places) >= count - 1),
               key=lambda cuts: float(loads.of_ranks(cuts).max()))
    return tuple(ops[c] for c in loads.evened(best))


@dataclass(frozen=True, eq=False)
class _Loads:
    """Seconds per rank. A cut at position c has ``before[c]`` seconds of compute before it, and costs both stages
    ``sends[c]``; the ranks of a group share the seconds of its stages, and compute ``paces`` times as fast."""

    before: np.ndarray
    sends: np.ndarray
    groups: np.ndarray
    paces: np.ndarray

    def _group(self, stage: int) -> tuple[float, float]:
        """Ranks and pace of a stage."""
        number = stage % len(self.groups)
        return float(self.groups[number]), float(self.paces[number])

    def of_ranks(self, cuts: np.ndarray) -> np.ndarray:
        """Seconds per rank of each group, with these cuts."""
        places = np.concatenate([[0], cuts, [len(self.before) - 1]])
        count = len(self.groups)
        compute, sent = np.diff(self.before[places]), self.sends[places[:-1]] + self.sends[places[1:]]
        of_group = np.array([compute[g::count].sum() / self.paces[g] + sent[g::count].sum() for g in range(count)])
        return of_group / self.groups

    def even(self, places: np.ndarray, count: int) -> np.ndarray:
        """The ``count - 1`` of ``places`` that minimise the slowest stage; among equals the most even ones."""
        end = len(self.before) - 1
        stops = np.append(places, end)
        ranks = np.cumsum([math.prod(self._group(stage)) for stage in range(count)])
        low, high = self.before[-1] / ranks[-1], float(self.before[-1] / self.paces.min() + 2 * self.sends.max())
        while high - low > 1e-4 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._enough(stops, middle, count) else (middle, high)
        furthest = self._furthest(stops, high)
        reaching = self._reaching(furthest, count)
        cuts: list[int] = []
        for stage in range(1, count):
            last = cuts[-1] if cuts else -1
            furthest_stop = int(furthest[self._group(stage - 1)][last + 1])
            most = min(max(furthest_stop, last + 1), len(places) - (count - stage))
            least = min(max(last + 1, reaching[stage]), most)
            near = np.abs(self.before[stops[least : most + 1]] - self.before[-1] * ranks[stage - 1] / ranks[-1])
            cuts.append(least + int(near.argmin()))
        return places[cuts]

    def _furthest(self, stops: np.ndarray, most_s: float) -> dict[tuple[float, float], np.ndarray]:
        """By number of ranks and pace: for a stage that begins at the start or at each stop, the last stop that it
        reaches in at most ``most_s`` seconds per rank."""
        found, begins = {}, np.append(0, stops)
        for ranks, pace in {self._group(number) for number in range(len(self.groups))}:
            reached = np.minimum.accumulate((self.before[stops] + pace * self.sends[stops])[::-1])[::-1]
            starts = self.before[begins] - pace * self.sends[begins] + ranks * pace * most_s
            found[ranks, pace] = np.searchsorted(reached, starts, side="right") - 1
        return found

    def _enough(self, stops: np.ndarray, most_s: float, count: int) -> bool:
        """Whether ``count`` stages of at most ``most_s`` seconds per rank cover the program."""
        furthest, begin = self._furthest(stops, most_s), 0
        for stage in range(count):
            last = int(furthest[self._group(stage)][begin])
            if last < begin:
                return False
            begin = last + 1
            if begin == len(stops):
                return True
        return False

    def _reaching(self, furthest: Mapping[tuple[float, float], np.ndarray], count: int) -> list[int]:
        """For each stage, the first stop from which it and the later stages reach the end."""
        numbers = np.arange(len(furthest[self._group(0)]))  # of the beginning and of each stop
        reaches, found = numbers == numbers[-1], [0] * count
        for stage in range(count - 1, 0, -1):
            last = furthest[self._group(stage)]
            reaches = reaches | (np.append(reaches[1:], True)[last] & (last >= numbers))
            found[stage] = int(reaches[1:].argmax())
        return found

    def evened(self, cuts: np.ndarray) -> np.ndarray:
        """Move single cuts of the slowest rank while that makes the slower of the two ranks at the cut faster."""
        cuts = cuts.copy()
        for _ in range(MOST_MOVES * len(cuts)):
            loads = self.of_ranks(cuts)
            slowest = int(loads.argmax())
            found = [self._best_place(cuts, loads, number) for number in range(len(cuts))
                     if slowest in (number % len(loads), (number + 1) % len(loads))]
            most, number, place = min(found, default=(math.inf, 0, 0))
            if most >= loads[slowest] * (1 - 1e-9):
                break
            cuts[number] = place
        return cuts

    def _best_place(self, cuts: np.ndarray, loads: np.ndarray, number: int) -> tuple[float, int, int]:
        """The best position of cut ``number``: (seconds of the slower of its two ranks, number, position)."""
        around = np.concatenate([[0], cuts, [len(self.before) - 1]])
        low, here, high = around[number : number + 3]
        places = np.arange(low + 1, high)
        later = self.before[places] - self.before[here]
        sent = self.sends[places] - self.sends[here]
        (ranks, pace), (next_ranks, next_pace) = self._group(number), self._group(number + 1)
        left = loads[number % len(loads)] + (sent + later / pace) / ranks
        right = loads[(number + 1) % len(loads)] + (sent - later / next_pace) / next_ranks
        most = np.maximum(left, right)
        return float(most.min()), number, int(places[most.argmin()])


def bytes_at_cuts(space: StrategySpace, loss: int | None) -> dict[int, float]:
    """Bytes of all that a cut sends, of whole tensors, by the op before which it is. Raises InputError without a scalar
    loss."""
    flow = flow_of(space, _loss(loss))
    ops = [i for i in flow.main if space.decisions[i].kind == "op"]
    return dict(zip(ops[1:], _sent_bytes(flow, ops, lambda use: use.meta.num_bytes)[1:].tolist(), strict=True))


def _sent_bytes(flow: Flow, ops: Sequence[int], num_bytes: Callable[[TensorUse], float]) -> np.ndarray:
    """Bytes that a cut before each op sends."""
    space, main = flow.space, frozenset(flow.main)
    last: dict[tuple[int, int], int] = {}
    sizes: dict[tuple[int, int], float] = {}
    for use in space.uses:
        if {use.source, use.target} <= main and space.decisions[
            use.target
        ].kind != "shared_read":  # a shared read stays with its value
            value = (use.source, use.output)
            last[value] = max(last.get(value, 0), use.target)
            sizes[value] = num_bytes(use)
    change = np.zeros(len(ops) + 1)
    for value, end in last.items():
        change[bisect_right(ops, value[0])] += sizes[value]
        change[bisect_right(ops, end)] -= sizes[value]
    return np.cumsum(change[:-1])


def cut(flow: Flow, cuts: Sequence[int], loss: int) -> Stages:
    """The stages that begin at ``cuts`` (the first begins with the program)."""
    space, count = flow.space, len(cuts) + 1
    stage_of = {index: bisect_right(cuts, index) for index in flow.main}
    for index in flow.main:  # a shared read stays with its value
        if space.decisions[index].kind == "shared_read":
            stage_of[index] = stage_of[space.uses_by[index][0].source]
    for decision in space.decisions:
        if decision.name == f"output:{loss}":
            stage_of[decision.index] = count - 1
        elif decision.kind == "update":
            stage_of[decision.index] = max(
                (stage_of[k.source] for k in space.uses_by[decision.index] if k.source in stage_of), default=0
            )
    decisions = [
        _with_repeated(flow, {i for i, s in stage_of.items() if s == stage}, stage_of) for stage in range(count)
    ]
    crossing = _crossing(space, decisions, stage_of)
    parts = []
    for stage in range(count):
        received = tuple(v for v, (made, used) in crossing.items() if made < stage <= used)
        sent = tuple(v for v, (made, used) in crossing.items() if made <= stage < used)
        parts.append(Part(frozenset(decisions[stage]), received, sent))
    return Stages(tuple(parts))


def _with_repeated(flow: Flow, own: set[int], stage_of: dict[int, int]) -> set[int]:
    """A stage's own decisions and the repeated ones on which they depend."""
    found, stack = set(own), list(own)
    while stack:
        for use in flow.space.uses_by.get(stack.pop(), ()):
            if use.source not in stage_of and use.source not in found:
                found.add(use.source)
                stack.append(use.source)
    return found


def _crossing(space: StrategySpace, decisions: Sequence[set[int]], stage_of: dict[int, int]
              ) -> dict[Value, tuple[int, int]]:
    """For each value that a later stage reads, in order: (its stage, the last stage that reads it)."""
    last: dict[Value, int] = {}
    for stage, members in enumerate(decisions):
        for index in members:
            for use in space.uses_by.get(index, ()):
                if use.source in stage_of and stage_of[use.source] < stage:
                    value = (use.source, use.output)
                    last[value] = max(last.get(value, 0), stage)
    return {value: (stage_of[value[0]], used) for value, used in sorted(last.items())}
