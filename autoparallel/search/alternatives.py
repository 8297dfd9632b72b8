"""Next best plans, the cost of every other choice of a node, and the pins that contradict one another.

Pure functions of a `Problem` and a `Solution`; every plan that they return was searched for and judged by `evaluate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from autoparallel import clock
from autoparallel.errors import InfeasibleError, SearchError
from autoparallel.search.high_width.event_form import compact_of
from autoparallel.search.high_width.local_search import finite_limit
from autoparallel.search.high_width.trws import Messenger
from autoparallel.search.low_width.bucket_elimination import Eliminator
from autoparallel.search.low_width.solve import affordable
from autoparallel.search.model.dominance import select
from autoparallel.search.model.problem import FORBIDDEN, Problem, Solution, evaluate, single_limit
from autoparallel.search.solver import AUTO_GAP, SLACK, lowest_memory, solve

Pins = Mapping[int, Sequence[int]]
CHECK_S = 5.0
SETTLE_SWEEPS = 50
#: Of the time that a choice has, the share for a search among what plans of the least cost can have.
NEAR_SHARE = 0.5


def pinned(problem: Problem, pins: Pins) -> Problem:
    """The problem in which each node of ``pins`` may only take the choices given for it; choices keep their numbers.

    Raises SearchError for a node or a choice that there is not.
    """
    nodes = list(problem.nodes)
    for v, allowed in pins.items():
        if not 0 <= v < len(nodes) or any(not 0 <= pick < len(nodes[v].costs) for pick in allowed):
            raise SearchError(f"{problem.name}: node {v} with choices {list(allowed)} is not part of it")
        kept = np.isin(np.arange(len(nodes[v].costs)), list(allowed))
        nodes[v] = replace(nodes[v], costs=np.where(kept, nodes[v].costs, FORBIDDEN))
    return replace(problem, nodes=tuple(nodes))


def solve_pinned(problem: Problem, pins: Pins, search: str = "auto", time_limit_s: float | None = None) -> Solution:
    """`solve` with some nodes' choices fixed, as a smaller problem; the choice is in the problem's own numbers."""
    kept = [np.arange(len(node.costs)) if v not in pins else np.unique(list(pins[v]))
            for v, node in enumerate(pinned(problem, pins).nodes)]
    return _solve_kept(problem, kept, search, time_limit_s)


def _solve_kept(problem: Problem, kept: Sequence[np.ndarray], search: str, time_limit_s: float | None) -> Solution:
    found = solve(select(problem, kept), search, time_limit_s)
    return replace(found, choice=tuple(int(rows[pick]) for rows, pick in zip(kept, found.choice, strict=True)))


def solve_with(problem: Problem, least: Sequence[np.ndarray], node: int, pick: int, search: str = "auto",
               time_limit_s: float | None = None) -> Solution:
    """The best plan in which one node has one choice, as `solve_pinned`, but quicker: choices of other nodes whose
    `least_costs` are above this one's are left out first. The whole problem is solved only if memory, which the least
    costs do not count, leaves no plan as cheap."""
    start, bound = clock.now(), float(least[node][pick])
    kept = [np.flatnonzero(costs <= bound + SLACK * abs(bound)) for costs in least]
    kept[node] = np.array([pick])
    near: Solution | None = None
    if all(len(rows) for rows in kept):
        with suppress(InfeasibleError, SearchError):  # where memory binds, it may leave none of those
            near = replace(_solve_kept(problem, kept, search, time_limit_s and NEAR_SHARE * time_limit_s),
                           lower_bound=bound)
    if near is not None and near.objective <= bound + AUTO_GAP * abs(bound):
        return near
    left = None if time_limit_s is None else max(0.0, time_limit_s - (clock.now() - start))
    try:
        found = solve_pinned(problem, {node: [pick]}, search, left)
    except SearchError:
        if near is None:
            raise
        return near
    return found if near is None else min(near, found, key=lambda one: one.objective)


def least_costs(problem: Problem) -> list[np.ndarray]:
    """For every choice of every node a cost that no plan with it is below (seconds; memory left out of account)."""
    eliminator = Eliminator.of(problem)
    if affordable(eliminator, problem):
        least, _ = eliminator.solve(problem.costs)
        return [least + reduced_cost for reduced_cost in eliminator.reduced_costs(problem.costs)]
    compact = compact_of(replace(problem, limit=FORBIDDEN, more_limits=tuple(FORBIDDEN for _ in problem.more_limits)))
    messenger = Messenger(compact, finite_limit(compact))
    bare = messenger.costs(np.zeros(0))
    bound = messenger.settle(bare, SETTLE_SWEEPS)
    return [np.where(node.costs < FORBIDDEN, bound + reduced_cost, FORBIDDEN)
            for node, reduced_cost in zip(problem.nodes, messenger.reduced_costs(bare), strict=True)]


def alternatives(problem: Problem, solution: Solution, k: int, min_changed: int = 1, nodes: Sequence[int] | None = None,
                 search: str = "auto", time_limit_s: float | None = None) -> list[Solution]:
    """Up to k plans that differ from the solution and from each other in at least ``min_changed`` of ``nodes``.

    Cheapest first. Any other plan has some choice that the solution has not; so the problem is solved once more per
    such choice, in the order of what plans with it must cost at least, until no choice left can lead to a better one.
    With ``min_changed`` 1 and k 1 this is the second best plan (within the gaps of the searches); with more it is a
    selection of the best plans around each other choice. ``nodes`` (default: all) are those that matter.
    """
    start, matter = clock.now(), range(len(problem.nodes)) if nodes is None else nodes
    least = least_costs(problem)
    order = sorted((float(least[v][pick]), v, pick) for v in matter for pick in range(len(least[v]))
                   if pick != solution.choice[v] and least[v][pick] < FORBIDDEN)
    found: list[Solution] = []
    seen: list[Solution] = []
    for bound, v, pick in order if k > 0 else ():
        if len(found) >= k and bound >= found[k - 1].objective:
            break
        if any(one.choice[v] == pick and one.objective <= bound + SLACK * abs(bound) for one in seen):
            continue
        left = None if time_limit_s is None else time_limit_s - (clock.now() - start)
        if left is not None and left <= 0:
            break
        try:
            other = solve_with(problem, least, v, pick, search, left)
        except (InfeasibleError, SearchError):
            continue
        seen.append(other)
        known = [solution, *found]
        if all(_changed(other, one, matter) >= min_changed for one in known):
            found = sorted([*found, other], key=lambda one: (one.objective, one.choice))
    return found[:k]


def _changed(one: Solution, other: Solution, nodes: Sequence[int]) -> int:
    return sum(one.choice[v] != other.choice[v] for v in nodes)


@dataclass(frozen=True)
class Option:
    """One choice of a node: what a plan with it costs (seconds).

    ``alone``: the solution with only this node changed (inf: forbidden or too much memory). ``least``: no plan with it
    costs less. ``resolved``: the best plan found with it (inf: there is none, None: not searched for).
    """

    pick: int
    alone: float
    least: float
    resolved: float | None = None


def explain(problem: Problem, solution: Solution, node: int, resolve: Sequence[int] = (), search: str = "auto",
            time_limit_s: float | None = None) -> list[Option]:
    """What every choice of a node would cost, cheapest first; those of ``resolve`` by searching again with them."""
    floor = max(solution.lower_bound, 0.0)
    every = least_costs(problem)
    least = np.maximum(every[node], floor)
    options = []
    for pick in range(len(problem.nodes[node].costs)):
        choice = [pick if v == node else old for v, old in enumerate(solution.choice)]
        judged = evaluate(problem, choice)
        resolved: float | None = None
        if pick == solution.choice[node]:
            resolved = solution.objective
        elif pick in resolve:
            try:
                resolved = solve_with(problem, every, node, pick, search, time_limit_s).objective
            except InfeasibleError:
                resolved = FORBIDDEN
            except SearchError:  # none was found in time, and there may be one
                resolved = None
        options.append(Option(pick, judged.objective if judged.feasible else FORBIDDEN, float(least[pick]), resolved))
    return sorted(options, key=lambda option: (option.alone if option.resolved is None else option.resolved,
                                               option.pick))


@dataclass(frozen=True)
class Conflict:
    """Pins that cannot hold together: without any one of ``pins`` (and with the limit, if ``memory``) a plan exists.

    ``needed_bytes``: with all of them no plan needs less than this (inf: they contradict each other whatever the
    memory). ``without``: for each pin, a memory for which a plan is known once it is gone (inf: none is known).
    ``minimal`` is False where time ran out before each pin's part was certain.
    """

    pins: tuple[str, ...]
    memory: bool
    needed_bytes: float
    without: dict[str, float]
    minimal: bool

    def explanation(self, limit: float) -> str:
        """One sentence for an error's message: which pins, and what would do without one of them."""
        named = ", ".join(map(repr, self.pins))
        if len(self.pins) > 1:
            named = f"{named} together"
        if not self.memory:
            return f"No plan meets the pins {named}: leave one of them out."
        more = (self.needed_bytes - limit) / 2**30
        fits = [f"{enough / 2**30:.3g} GiB without {name!r}" for name, enough in self.without.items()
                if enough < FORBIDDEN]
        return (f"With the pins {named} every plan needs at least {more:.3g} GiB more than the limit; "
                f"there is a plan of {' or of '.join(fits)}." if fits else
                f"With the pins {named} every plan needs at least {more:.3g} GiB more than the limit.")


def conflict(problem: Problem, pins: Mapping[str, Pins], time_limit_s: float | None = None) -> Conflict | None:
    """A minimal set of named pins that leaves no plan under the problem's limits; None: none is proven.

    Deletion filter: every pin is left out once, and stays out if there is no plan without it either. One least-memory
    search per pin, of at most `CHECK_S` seconds each.
    """
    deadline = FORBIDDEN if time_limit_s is None else clock.now() + time_limit_s

    def needs(names: Sequence[str]) -> tuple[float, float]:
        """Bytes that are needed at least, and bytes that do."""
        together: dict[int, list[int]] = {}
        for name in names:
            for v, allowed in pins[name].items():
                together[v] = [pick for pick in together.get(v, allowed) if pick in set(allowed)]
        tight = single_limit(pinned(problem, together))
        if any(not (node.costs < FORBIDDEN).any() for node in tight.nodes):
            return FORBIDDEN, FORBIDDEN
        least = lowest_memory(tight, min(deadline, clock.now() + CHECK_S))
        return least.bound, least.peak

    limit = max((one for one in problem.limits if one < FORBIDDEN), default=FORBIDDEN)
    names = list(pins)
    needed, _ = needs(names)
    if needed <= limit and needed < FORBIDDEN:
        return None
    minimal, without = True, {}
    forbidden = needed == FORBIDDEN
    for name in list(names):
        rest = [other for other in names if other != name]
        least, enough = needs(rest)
        if least == FORBIDDEN or (not forbidden and least > limit):
            names, needed = rest, least
            continue
        without[name] = enough
        minimal = minimal and (enough < FORBIDDEN if forbidden else enough <= limit)
    return Conflict(tuple(names), not forbidden, needed, without, minimal)
