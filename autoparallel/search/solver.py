"""`solve`: which search runs when, under one clock, judged by `evaluate`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autoparallel import clock
from autoparallel.errors import InfeasibleError, SearchError
from autoparallel.garbage import collected_later
from autoparallel.search.high_width.aggregation import Shrunk, shrink
from autoparallel.search.high_width.bound_filter import Screened, bound_without_limit, screen
from autoparallel.search.high_width.event_form import compact_of, num_events
from autoparallel.search.high_width.minimum_memory import least_memory
from autoparallel.search.high_width.solve import FIRST_PLAN_S, WideSearch, quick_plan
from autoparallel.search.ilp.formulation import Program, cells
from autoparallel.search.low_width.bucket_elimination import HOPELESS_CELLS, Eliminator, TimeIsUpError
from autoparallel.search.low_width.double_recursion import search_axes
from autoparallel.search.low_width.lagrangian import LowestPeak, lowest_peak
from autoparallel.search.low_width.solve import (
    LEAST_PRICINGS,
    MAX_ROUNDS,
    TARGET_GAP,
    WORK_CELLS,
    Incumbent,
    Outcome,
    TimedPrices,
    affordable,
    elimination_cells,
    solve_exact,
    trivial_bound,
)
from autoparallel.search.low_width.variable_fixing import Priced
from autoparallel.search.model.dominance import Reduced, drop_dominated, untouched
from autoparallel.search.model.memory_rows import least_peak, memory_of
from autoparallel.search.model.problem import (
    FORBIDDEN,
    MemoryLimitError,
    NotRepairedError,
    Pricer,
    Problem,
    Solution,
    evaluate,
    single_limit,
)
from autoparallel.search.model.problem_pricer import ProblemPricer

Progress = Callable[[str, float, float], None]
#: `Solution.stop_reason` of a search that the user ended (Ctrl-C).
INTERRUPTED = "interrupted"
AUTO_GAP = 1e-3
SMALL_CELLS = 20_000
AT_ONCE_CELLS = 5e7  # a fifth of a second
SOON_CELLS_PER_S = 2.5e7  # of the time left: a tenth of what elimination does in it
SCREENINGS = 3
SHARES = (0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05)  # of the reach
NEAR_CELLS = 1e9
SLACK = 1e-9
SCREEN_CELLS = 3e7  # tables of 240 MB; messages need a few times as much
MAX_CELLS = 500_000
SCREENED_CELLS_PER_S = 2e7  # of tables: messages are set up, swept a few times and say what goes
ORDER_S, ORDER_SHARE = 3e-6, 0.1  # per node and edge, to find an order; of the time
WORK_CELLS_PER_S = 2e8  # a quarter of what one elimination does; if the limit binds, `solve_exact` knows its time
AUTO_CELLS = 50_000  # of tables between the choices that are left; beyond, HiGHS proves nothing about equal blocks
MAX_EVENTS = 8_000_000
LEAST_MEMORY_S = 5.0
MOST_REPAIR = 1.25


def table_cells(problem: Problem) -> int:
    return int(problem.sizes[problem.ends].prod(axis=1).sum())


class Run:
    """One call of `solve`: the problem, the clock, and the best plan and bound so far."""

    def __init__(self, problem: Problem, deadline: float, pricer: Pricer | None, progress: Progress | None,
                 gap: float = TARGET_GAP, first: Sequence[int] | None = None) -> None:
        self.problem, self.deadline, self.pricer, self.gap, self.first = problem, deadline, pricer, gap, first
        self._progress = progress
        self.best = Outcome(None, FORBIDDEN, trivial_bound(problem), "not started")
        self._left: Priced | None = None
        start = clock.now()
        self._work = min(WORK_CELLS, WORK_CELLS_PER_S * (deadline - start))
        self.reduced = untouched(problem)
        order_s = ORDER_S * (len(problem.nodes) + len(problem.edges))
        in_haste = order_s > ORDER_SHARE * (deadline - start) and not problem.has_strategies
        self.eliminator = Eliminator.none() if in_haste else Eliminator.of(problem)
        self._prices: TimedPrices | None = None
        cells = elimination_cells(self.eliminator, problem)
        self.can_eliminate = cells <= self._work
        self._expensive, self._soon = cells > AT_ONCE_CELLS, cells <= SOON_CELLS_PER_S * (deadline - start)
        self.best.seconds["presolve"] = clock.now() - start

    def reduce(self, left: Reduced) -> None:
        """Go on with fewer choices."""
        self.reduced = self.reduced.then(left)
        self.eliminator = Eliminator.of(left.problem)
        self.can_eliminate = affordable(self.eliminator, left.problem, self._work)

    def drop_dominated(self) -> None:
        start = clock.now()
        if not self.can_eliminate and self.eliminator.max_cells < HOPELESS_CELLS:
            left = drop_dominated(self.reduced.problem, deadline=self.deadline)
            if not self.late():
                self.reduce(left)
        self.best.seconds["presolve"] += clock.now() - start

    def late(self, seconds: float = 0.0) -> bool:
        """Whether there is a plan, and no time for what takes so long: a reason to stop."""
        if self.best.choice is None or clock.now() + seconds < self.deadline:
            return False
        if self.best.stop_reason != "optimal":
            self.best.stop_reason = "time limit"
        return True

    def note(self, found: Outcome, way_back: Reduced | None = None) -> None:
        """Take over a solver's answer: the better plan, the better bound, its reason and seconds."""
        if found.choice is not None and way_back is not None:
            found.choice = way_back.restore(found.choice)
        seconds = dict(self.best.seconds)
        for phase, spent in found.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + spent
        bound = max(self.best.lower_bound, found.lower_bound)
        best = min(self.best, found, key=lambda outcome: outcome.objective)
        reason = found.stop_reason
        if best.choice is not None:
            bound = min(bound, best.objective)
            if best.objective - bound <= TARGET_GAP * abs(best.objective):
                reason = "optimal"
            elif reason == "optimal":  # HiGHS's plan was better, and does not quite fit
                reason = "gap"
        self.best = Outcome(best.choice, best.objective, bound, reason, seconds)
        if self._progress is not None:
            self._progress(found.stop_reason, best.objective, bound)

    def exact(self) -> None:
        """Elimination, with prices for memory; where it is expensive, of what a first choice or double recursion, and
        messages, leave of the choices; where it is too wide even so, `wide`."""
        by_axes = self.problem.has_strategies
        if self._expensive and by_axes:
            if self._soon and self.can_eliminate and self.unlimited():
                return
            if self.first is None or not self._offer(self.first, "first"):
                self.recursive()
            self.screen(SCREENINGS)
        self.drop_dominated()
        if self.late():
            return
        if self.can_eliminate:
            self.eliminate()
            if self._left is not None or self.best.choice is not None:
                return
        if num_events(self.reduced.problem) > MAX_EVENTS:
            return
        known = self.best.choice or self.first
        search = WideSearch(self.reduced.problem, self.deadline, known and self.reduced.forward(known),
                            lambda better: self.note(better, self.reduced))
        search.run()
        self.note(search.outcome, self.reduced)

    def screen(self, turns: int = 1) -> None:
        """Bound, and drop choices, by messages at the prices of double recursion; while too many are left to eliminate,
        and there are turns, first a better plan and its prices from those with the least regrets."""
        if self.best.choice is None or table_cells(self.problem) > SCREEN_CELLS:
            return
        for turn in range(turns):
            if self.late(table_cells(self.reduced.problem) / SCREENED_CELLS_PER_S):
                return
            start, objective, choice = clock.now(), self.best.objective, self.reduced.forward(self.best.choice)
            found = screen(self.reduced.problem, objective, self._prices, self.gap, self.deadline)
            reach = max(0.0, objective - found.bound) + SLACK * abs(objective)
            self.note(Outcome(None, FORBIDDEN, found.bound, "bound", {"messages": clock.now() - start}))
            within = found.within(reach, choice)
            if turn + 1 < turns and not self._affords(within):
                self._look_near(found, reach, choice)
            self.reduce(within)
            if self.can_eliminate or self.best.objective == objective or clock.now() >= self.deadline:
                break

    def _affords(self, left: Reduced, work_cells: float | None = None) -> bool:
        return affordable(Eliminator.of(left.problem), left.problem, self._work if work_cells is None else work_cells)

    def _look_near(self, found: Screened, reach: float, choice: tuple[int, ...]) -> None:
        """Look for a better plan, and prices, among as many choices with small regrets as are quickly eliminated."""
        near = (found.within(share * reach, choice) for share in SHARES)
        left = next((left for left in near if self._affords(left, NEAR_CELLS)), None)
        if left is None:
            return
        way_back = self.reduced.then(left)

        def better(outcome: Outcome) -> None:
            self.note(replace(outcome, lower_bound=-FORBIDDEN), way_back)  # its bound is one for what is near

        eliminator = Eliminator.of(left.problem).until(self.deadline)
        best = solve_exact(left.problem, self.deadline, eliminator, better, self.gap, 1, left.forward(choice),
                           prices=self._prices)
        if best.left is not None:
            self._prices = best.left.memory.times, best.left.dual.prices
        better(best)

    @property
    def eliminates_soon(self) -> bool:
        """Whether the first elimination, whose bound without a memory limit is exact, takes little time."""
        return self.can_eliminate and not self._expensive

    def eliminate(self, quick: bool = False, enough_s: float = FORBIDDEN) -> None:
        first = self.best.choice or self.first
        first = None if first is None else self.reduced.forward(first)
        self.eliminator.until(self.deadline + (FIRST_PLAN_S if self.best.choice is None else 0.0))

        def better(outcome: Outcome) -> None:
            self.note(outcome, self.reduced)
            if self.best.choice is not None:
                self.eliminator.until(self.deadline)

        found = solve_exact(self.reduced.problem, self.deadline, self.eliminator, better, self.gap,
                            1 if quick else LEAST_PRICINGS, first, not quick, self._prices, enough_s)
        self._left = found.left
        self.note(found, self.reduced)

    def recursive(self) -> None:
        adapted = ProblemPricer(self.problem, self.pricer)
        start = clock.now()
        found = search_axes(adapted, self.deadline)
        choice, objective = None, FORBIDDEN
        if found is not None:
            judged = evaluate(self.problem, found.choice)
            self._prices = (found.times, found.prices) if len(found.times) else None
            if judged.feasible:
                choice, objective = found.choice, judged.objective
        reason = "time limit" if clock.now() >= self.deadline else "gap"
        self.note(Outcome(choice, objective, -FORBIDDEN, reason, {"recursive": clock.now() - start}))

    def relaxed_bound(self) -> None:
        """The optimum without memory limit, as a bound; where elimination is expensive, one at the prices of memory."""
        if self._expensive and table_cells(self.problem) <= SCREEN_CELLS:
            return self.screen()
        self.drop_dominated()
        if self.can_eliminate:
            self._unlimited()

    def unlimited(self) -> bool:
        """Whether the best plan without a memory limit fits: then it is the plan."""
        plan = self._unlimited()
        return plan is not None and self._offer(self.reduced.restore(plan), "optimal")

    def _unlimited(self) -> Sequence[int] | None:
        """The best plan without a memory limit, whose cost is a bound; None where time is up."""
        start = clock.now()
        try:
            bound, plan = self.eliminator.until(self.deadline).solve(self.reduced.problem.costs)
        except TimeIsUpError:
            return None
        self.note(Outcome(None, FORBIDDEN, bound, self.best.stop_reason, {"bound": clock.now() - start}))
        return plan

    def program(self, max_cells: int = MAX_CELLS) -> None:
        """The integer program over the choices that can still be part of a better plan, unless it is too large."""
        start = clock.now()
        if start >= self.deadline:
            return
        try:
            reduced = self._within_reach()
        except TimeIsUpError:
            return self.note(Outcome(None, FORBIDDEN, -FORBIDDEN, "time limit"))
        narrow = self._left is not None  # then merging makes little of it, in seconds
        if num_events(reduced.problem) > MAX_EVENTS or (narrow and table_cells(reduced.problem) > 4 * max_cells):
            self.note(Outcome(None, FORBIDDEN, -FORBIDDEN, "too large"))
            return
        left = shrink(compact_of(reduced.problem), until=self.deadline)
        found = Outcome(None, FORBIDDEN, -FORBIDDEN, "infeasible")
        if left.allowed:
            if cells(left.compact) > max_cells:
                self.note(Outcome(None, FORBIDDEN, -FORBIDDEN, "too large", {"ilp": clock.now() - start}))
                return
            if self.best.choice is None:
                self._try(reduced, left, quick_plan(left.compact, self.deadline))
            if self.late():
                return
            picks, answer = Program(left.compact).solve(self.deadline, self.best.objective)
            self._try(reduced, left, picks)
            found = Outcome(None, FORBIDDEN, answer.bound, answer.reason, {"ilp": clock.now() - start})
        if found.stop_reason == "infeasible":
            if self.best.choice is None:
                raise MemoryLimitError(self.problem.name, self.problem.limit, self.problem.limit)
            found.lower_bound, found.stop_reason = self.best.objective, "optimal"
        self.note(found)

    def _try(self, reduced: Reduced, left: Shrunk, picks: Sequence[int] | None) -> None:
        if picks is not None:
            self._offer(reduced.restore(left.restore(picks)), "better")

    def _offer(self, choice: Sequence[int], reason: str) -> bool:
        """Whether a choice fits; then it is one to be better than."""
        judged = evaluate(self.problem, choice)
        if judged.feasible:
            self.note(Outcome(tuple(choice), judged.objective, -FORBIDDEN, reason))
        return judged.feasible

    def _within_reach(self) -> Reduced:
        """Without the choices whose best priced plan costs more than the plan in hand, and without dominated ones.

        Raises TimeIsUpError.
        """
        if self._left is None or self.best.choice is None or self._left.dual.bound == FORBIDDEN:
            return self.reduced.then(drop_dominated(self.reduced.problem, deadline=self.deadline))
        wanted = self.reduced.forward(self.best.choice)
        left = self.reduced.then(self._left.narrowed(self.best.objective, wanted).reduced)
        return left.then(drop_dominated(left.problem, deadline=self.deadline))


def _ilp(run: Run) -> None:
    """Large programs get a plan, prices and so fewer choices from the other searches first, and may be too large even
    so; small ones stand on their own."""
    if cells(compact_of(run.problem)) > SMALL_CELLS:
        run.exact()
    run.program()


def _recursive(run: Run) -> None:
    run.recursive()
    run.relaxed_bound()


def _auto(run: Run) -> None:
    """Elimination first; the program only where a gap is left."""
    run.exact()
    best = run.best
    left_open = best.objective - best.lower_bound > AUTO_GAP * abs(best.objective) and best.stop_reason != "time limit"
    if left_open or best.choice is None:
        run.program(MAX_CELLS if run._left is None else AUTO_CELLS)


_SEARCHES: dict[str, Callable[[Run], None]] = {"auto": _auto, "exact": Run.exact, "ilp": _ilp, "recursive": _recursive}
SEARCHES = tuple(_SEARCHES)


@collected_later()
def solve(problem: Problem, search: str = "auto", time_limit_s: float | None = None, pricer: Pricer | None = None,
          progress: Progress | None = None, first: Sequence[int] | None = None) -> Solution:
    """The best plan that this search finds, with a lower bound that holds for every plan.

    ``progress(stop_reason, objective, lower_bound)`` is called after each phase. The same problem gives the same plan
    unless the clock stops the search. Ctrl-C ends the search with the best plan so far. ``first``: a choice to begin
    with, which need not fit; the search "local" repairs and improves it, and does no more.

    Raises:
        SearchError: unknown search, or no plan found in time though none is proven impossible.
        MemoryLimitError: no plan fits into the limit (says the least memory that plans need, or of "local" a bound).
        InfeasibleError: every plan is forbidden.
    """
    if search not in (SEARCHES if first is None else (*SEARCHES, "local")):
        raise SearchError(f"unknown search {search!r}; there are: {', '.join(SEARCHES)} and local, from "
                          "a choice to begin with")
    if problem.more_limits:
        return _solve_classes(problem, search, time_limit_s, pricer, progress, first)
    start = clock.now()
    deadline = FORBIDDEN if time_limit_s is None else start + time_limit_s
    run = None
    try:
        if search == "local":
            assert first is not None
            return _local(problem, first, deadline)
        run = Run(problem, deadline, pricer, progress, first=first)
        _SEARCHES[search](run)
        if run.best.choice is None and search != "ilp":
            run.program()
    except MemoryLimitError as error:
        if search == "local":
            raise
        raise _why_not(problem, error, deadline) from None
    except KeyboardInterrupt:
        if run is None or run.best.choice is None:
            raise
        run.best.stop_reason = INTERRUPTED
    best = run.best
    if best.choice is None:
        raise SearchError(f"{problem.name}: no plan that fits was found in {clock.now() - start:.1f} s, though "
                          "none is proven impossible. Allow more time (time_limit_s) or more memory.")
    judged = evaluate(problem, best.choice)
    seconds = {**best.seconds, "total": clock.now() - start}
    return Solution(best.choice, judged.objective, min(best.lower_bound, judged.objective), judged.peak_bytes,
                    best.stop_reason, search, seconds)


def plan_within(problem: Problem, gap: float, time_limit_s: float, pricer: Pricer | None = None,
                enough_s: float = FORBIDDEN) -> Outcome | None:
    """A plan whose cost is within ``gap`` (a share) of the least, or the best that was found in time, with its bound;
    None where none fits, or none was found. Without explanation or a second search: for problems of which there are
    many. Where no plan costs less than ``enough_s``, even without a memory limit, that bound is all."""
    run = Run(problem, clock.now() + time_limit_s, pricer, None, gap)
    if enough_s < FORBIDDEN and not run.eliminates_soon and (bound := bound_without_limit(problem)) >= enough_s:
        return Outcome(None, FORBIDDEN, bound, "bound")
    try:
        if run.can_eliminate:
            run.eliminate(quick=True, enough_s=enough_s)
            if run.best.stop_reason == "bound":
                return run.best
        else:
            run.exact()
    except InfeasibleError:
        return None
    return run.best if run.best.choice is not None else None


def _local(problem: Problem, first: Sequence[int], deadline: float) -> Solution:
    """What repair and descent make of a choice: a plan in little time, and no more of a bound than is trivial. Where
    that costs `MOST_REPAIR` times the choice, it is not what was asked for: a NotRepairedError too."""
    start, begun = clock.now(), evaluate(problem, first)
    incumbent = Incumbent(problem, memory_of(problem), deadline)
    incumbent.offer(tuple(first))
    if incumbent.choice is None or incumbent.objective > MOST_REPAIR * begun.objective:
        raise NotRepairedError(problem.name, begun.peak_bytes, problem.limit)
    judged, seconds = evaluate(problem, incumbent.choice), clock.now() - start
    return Solution(incumbent.choice, judged.objective, min(trivial_bound(problem), judged.objective),
                    judged.peak_bytes, "made to fit", "local", {"total": seconds})


def _solve_classes(problem: Problem, search: str, time_limit_s: float | None, pricer: Pricer | None,
                   progress: Progress | None, first: Sequence[int] | None) -> Solution:
    """Several device classes: as one limit; see `single_limit`. Errors count from the lowest limit."""
    start = clock.now()
    single, lowest = single_limit(problem), min(problem.limits)
    more = lowest - single.limit if lowest < FORBIDDEN else 0.0
    if first is not None:
        first = (*first, *[0] * (len(single.nodes) - len(problem.nodes)))
    if time_limit_s is not None:
        time_limit_s -= clock.now() - start
    try:
        found = solve(single, search, time_limit_s, pricer, progress, first)
    except MemoryLimitError as error:
        raise MemoryLimitError(problem.name, error.needed_bytes + more, lowest, error.sufficient_bytes + more) from None
    except NotRepairedError as error:
        raise NotRepairedError(problem.name, error.peak_bytes + more, lowest) from None
    choice = found.choice[:len(problem.nodes)]
    return replace(found, choice=choice, peak_bytes=evaluate(problem, choice).peak_bytes)


def lowest_memory(problem: Problem, deadline: float) -> LowestPeak:
    """The least memory of any plan, by what suits the problem: a program, elimination, messages or double recursion."""
    reduced = drop_dominated(replace(problem, limit=0.0), deadline=deadline)
    bare = reduced.problem
    eliminator = Eliminator.of(bare)
    cells = elimination_cells(eliminator, bare)
    known = _little_memory(problem, deadline) if cells > AT_ONCE_CELLS else None
    if table_cells(bare) > SMALL_CELLS and cells <= WORK_CELLS:
        found = lowest_peak(bare, eliminator.solve, deadline, MAX_ROUNDS)
    elif num_events(bare) <= MAX_EVENTS:
        found = least_memory(bare, deadline)
    else:
        found = LowestPeak(least_peak(problem), FORBIDDEN, None)
    if known is not None and known.peak < found.peak:
        return replace(known, bound=found.bound)
    return replace(found, plan=None if found.plan is None else reduced.restore(found.plan))


def _little_memory(problem: Problem, deadline: float) -> LowestPeak | None:
    """A plan of double recursion that uses little memory, where nodes have strategies by mesh axis."""
    if not problem.has_strategies:
        return None
    found = search_axes(ProblemPricer(replace(problem, limit=0.0)), deadline)
    if found is None:
        return None
    return LowestPeak(0.0, evaluate(problem, found.choice).peak_bytes, found.choice)


def _why_not(problem: Problem, error: MemoryLimitError, deadline: float) -> InfeasibleError:
    """The error with the least memory of any plan, as exactly as it can be found in a few seconds."""
    least = lowest_memory(problem, min(deadline, clock.now() + LEAST_MEMORY_S))
    if least.bound == FORBIDDEN:
        return InfeasibleError(f"{problem.name}: every plan is forbidden by some node's or edge's table, whatever the "
                               "memory. Look for pins that contradict each other.")
    needed = max(least.bound, error.needed_bytes, math.nextafter(problem.limit, FORBIDDEN))
    return MemoryLimitError(problem.name, min(needed, least.peak), problem.limit, least.peak)
