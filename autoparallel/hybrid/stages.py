"""Pipeline stages: a program cut anywhere between its ops into parts that run on different devices.

All stages share one strategy space and one plan, so a value that crosses a cut has one layout. What does not depend on
the inputs (views of weights) goes to every stage that reads it, and so does what depends neither on parameters nor on
a gradient (masks, positions): computing it again is cheaper than sending it. A value that is read further down (skip
connections, an encoder's output) travels through the stages between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoparallel.errors import InfeasibleError, InputError, PlanError
from autoparallel.lower.emit import Part, Value
from autoparallel.plans import Hybrid
from autoparallel.pricing import Prices
from autoparallel.rules.space import Label, StrategySpace

#: How much longer the slowest rank of a pipeline may take so that less is sent between stages.
UNEVEN = 0.05


@dataclass(frozen=True)
class Stages:
    """``parts`` in order; ``shared`` are parameters (sites) of several stages, whose gradients must be added up."""

    parts: tuple[Part, ...]
    shared: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.parts)

    def of_sites(self, num_sites: int) -> list[tuple[int, ...]]:
        """The stages that have each site, in order; what no stage needs counts on the first."""
        return [tuple(s for s, part in enumerate(self.parts) if index in part.sites) or (0,)
                for index in range(num_sites)]

    def sent_bytes(self, space: StrategySpace, labels: Sequence[Label]) -> list[float]:
        """Bytes that one rank sends over each cut for one micro-batch, one way."""
        found = []
        for part in self.parts[:-1]:
            metas = [(space.strategies[site], labels[site], output) for site, output in part.sent]
            found.append(sum(
                float(space.spaces(s.output_metas[o]).local_elements[s.outputs[o][s.position[label]]])
                * s.output_metas[o].dtype.itemsize for s, label, o in metas
            ))
        return found


@dataclass(frozen=True)
class Flow:
    """What a program computes from what: ``main`` sites in order (ops and hubs on the way from input to loss),
    and ``repeated`` ones, which every stage that needs them runs itself."""

    space: StrategySpace
    main: tuple[int, ...]
    repeated: frozenset[int]


def flow_of(space: StrategySpace, loss: int) -> Flow:
    """The sites on which the loss and the buffers' new values depend."""
    needed = _needed(space, [s.index for s in space.sites if s.kind == "update" or s.name == f"output:{loss}"])
    fed: set[int] = set()  # from an input, through something with a gradient or a parameter
    plain: set[int] = set()  # neither parameters nor gradients
    for site in space.sites:
        sources = [k.source for k in space.links_into.get(site.index, ())]
        s = space.strategies[site.index]
        random = s.rule is not None and s.rule.random
        if site.kind in ("input", "buffer"):
            if not s.output_metas[0].requires_grad:
                plain.add(site.index)
            else:
                fed.add(site.index)
        elif site.kind != "parameter" and not random and all(k in plain for k in sources):
            plain.add(site.index)
        elif site.kind != "parameter" and (random or any(k in plain or k in fed for k in sources)):
            fed.add(site.index)
    kinds = ("op", "hub")
    main = tuple(s.index for s in space.sites if s.kind in kinds and s.index in fed and s.index in needed)
    return Flow(space, main, frozenset(s.index for s in space.sites if s.index in needed) - set(main))


def _needed(space: StrategySpace, ends: Sequence[int]) -> set[int]:
    needed: set[int] = set()
    stack = list(ends)
    while stack:
        index = stack.pop()
        if index not in needed:
            needed.add(index)
            stack.extend(k.source for k in space.links_into.get(index, ()))
    return needed


def place_cuts(prices: Prices, loss: int | None, count: int, ranks: int | None = None) -> tuple[str, ...]:
    """Names of the sites at which stages 1 .. count - 1 begin, so that the ``ranks`` of the pipeline (as many as stages
    unless given) take about equally long at the ops' best, and little is sent."""
    space = prices.space
    seconds = np.zeros(len(space))
    for site, s in zip(space.sites, space.strategies, strict=True):
        if site.kind == "op":
            seconds[site.index] = prices.op(s).total_s.min()
    cuts = cut_evenly(flow_of(space, _loss(loss)), seconds, count, ranks or count)
    return tuple(space.sites[index].name for index in cuts)


def stages_of(space: StrategySpace, loss: int | None, hybrid: Hybrid) -> Stages:
    """The stages of a plan; a program without a pipeline is one stage of all sites.

    Raises PlanError when a cut is not at an op on the way to the loss.
    """
    if hybrid.stages == 1:
        return Stages((Part(frozenset(range(len(space)))),), ())
    flow = flow_of(space, _loss(loss))
    places = {space.sites[index].name: index for index in flow.main if space.sites[index].kind == "op"}
    unknown = [name for name in hybrid.cuts if name not in places]
    cuts = sorted(places[name] for name in hybrid.cuts if name in places)
    if unknown or len(set(cuts)) != hybrid.stages - 1:
        raise PlanError(f"cuts {list(hybrid.cuts)} do not make {hybrid.stages} stages: "
                        + (f"{unknown} are no ops on the way to the loss" if unknown else "each must be another op"))
    return cut(flow, cuts, _loss(loss))


def _loss(loss: int | None) -> int:
    if loss is None:
        raise InputError("a pipeline needs a scalar loss: return the loss from the model, alone, first in a tuple, or "
                         "as `loss` of a structure")
    return loss


def cut_evenly(flow: Flow, seconds: np.ndarray, count: int, ranks: int) -> tuple[int, ...]:
    """Sites at which stages 1 .. count - 1 begin: of the cuts that send least those that make the stages' seconds (by
    site) most even, as long as the slowest rank takes at most `UNEVEN` longer than with cuts between any ops.

    Raises InfeasibleError when there are fewer ops than stages.
    """
    ops = [i for i in flow.main if flow.space.sites[i].kind == "op"]
    if len(ops) < count:
        raise InfeasibleError(f"{len(ops)} ops cannot be cut into {count} pipeline stages: take at most {len(ops)}")
    before, sent = np.concatenate([[0.0], np.cumsum(seconds[ops])]), _sent_bytes(flow, ops)

    def slowest(cuts: np.ndarray) -> float:
        stages = np.diff(before[[0, *cuts, len(ops)]])
        return max(float(stages[rank::ranks].sum()) for rank in range(ranks))

    best = _nearest(before, np.arange(1, len(ops)), count)
    most = (1 + UNEVEN) * slowest(best)
    for limit in np.unique(sent[1:]):
        places = 1 + np.flatnonzero(sent[1:] <= limit)
        if len(places) >= count - 1 and slowest(found := _nearest(before, places, count)) <= most:
            best = found
            break
    return tuple(ops[c] for c in best)


def _nearest(before: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
    """Of the places (in order) count - 1 that are nearest to even parts of what is before them."""
    cuts: list[int] = []
    for stage in range(1, count):
        low, high = (cuts[-1] + 1 if cuts else 0), len(places) - (count - stage)
        nearest = int(np.argmin(np.abs(before[places] - before[-1] * stage / count)))
        cuts.append(min(max(nearest, low), high))
    return places[cuts]


def _sent_bytes(flow: Flow, ops: Sequence[int]) -> np.ndarray:
    """Bytes that a cut before each of the ops sends."""
    space, main = flow.space, frozenset(flow.main)
    last: dict[tuple[int, int], int] = {}
    sizes: dict[tuple[int, int], int] = {}
    for link in space.links:
        if {link.source, link.target} <= main and space.sites[link.target].kind != "hub":  # a hub lies with its value
            value = (link.source, link.output)
            last[value] = max(last.get(value, 0), link.target)
            sizes[value] = link.meta.num_bytes
    change = np.zeros(len(ops) + 1)
    for value, end in last.items():
        change[bisect_right(ops, value[0])] += sizes[value]
        change[bisect_right(ops, end)] -= sizes[value]
    return np.cumsum(change[:-1])


def cut(flow: Flow, cuts: Sequence[int], loss: int) -> Stages:
    """The stages that begin at these sites (the first begins with the program)."""
    space, count = flow.space, len(cuts) + 1
    stage_of = {index: bisect_right(cuts, index) for index in flow.main}
    for index in flow.main:  # a hub reads where its value is made
        if space.sites[index].kind == "hub":
            stage_of[index] = stage_of[space.links_into[index][0].source]
    for site in space.sites:
        if site.name == f"output:{loss}":
            stage_of[site.index] = count - 1
        elif site.kind == "update":
            stage_of[site.index] = max(
                (stage_of[k.source] for k in space.links_into[site.index] if k.source in stage_of), default=0
            )
    sites = [_with_repeated(flow, {i for i, s in stage_of.items() if s == stage}, stage_of) for stage in range(count)]
    crossing = _crossing(space, sites, stage_of)
    parts = []
    for stage in range(count):
        received = tuple(v for v, (made, used) in crossing.items() if made < stage <= used)
        sent = tuple(v for v, (made, used) in crossing.items() if made <= stage < used)
        parts.append(Part(frozenset(sites[stage]), received, sent))
    parameters = [s.index for s in space.sites if s.kind == "parameter"]
    shared = tuple(p for p in parameters if sum(p in s for s in sites) > 1)
    return Stages(tuple(parts), shared)


def _with_repeated(flow: Flow, own: set[int], stage_of: dict[int, int]) -> set[int]:
    """The stage's own sites and all repeated ones on which they depend."""
    found, stack = set(own), list(own)
    while stack:
        for link in flow.space.links_into.get(stack.pop(), ()):
            if link.source not in stage_of and link.source not in found:
                found.add(link.source)
                stack.append(link.source)
    return found


def _crossing(space: StrategySpace, sites: Sequence[set[int]], stage_of: dict[int, int]
              ) -> dict[Value, tuple[int, int]]:
    """For each value that a later stage reads: (the stage that makes it, the last that reads it), in order."""
    last: dict[Value, int] = {}
    for stage, members in enumerate(sites):
        for index in members:
            for link in space.links_into.get(index, ()):
                if link.source in stage_of and stage_of[link.source] < stage:
                    value = (link.source, link.output)
                    last[value] = max(last.get(value, 0), stage)
    return {value: (stage_of[value[0]], used) for value, used in sorted(last.items())}
