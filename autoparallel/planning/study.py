"""Questions to a plan whose search problem is still in memory: alternatives, costs of strategies, sensitivity."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace

from autoparallel.capture import OpGraph
from autoparallel.errors import InfeasibleError, PlanError, SearchError
from autoparallel.plans import Plan
from autoparallel.plans.answers import Choice, Sensitivity
from autoparallel.plans.answers import Study as StudyOfPlan
from autoparallel.pricing import SpacePricer
from autoparallel.search import alternatives as others
from autoparallel.search.model.problem import Problem, Solution
from autoparallel.strategies.space import Strategy, StrategySpace
from cost_models import Cluster

#: Fraction of all ops that must have another strategy for a plan to count as an alternative.
MEANINGFUL = 0.02
TIME_LIMIT_S = 20.0


@dataclass(frozen=True, eq=False)
class Study:
    """The search problem behind a plan, and its solution (implements `plans.answers.Study`).

    ``plan_of``: makes a plan of strategies and a solution. ``elsewhere(cluster, limit_bytes, held)``: this plan (if
    held) or the best plan on another cluster and memory limit, with the same pipeline, mesh and micro-batches.
    ``answer``: of a trial plan, makes the same plan with buckets of the sizes with which it is predicted fastest.
    """

    pricer: SpacePricer
    problem: Problem
    solution: Solution
    plan_of: Callable[[Sequence[Strategy], Solution], Plan]
    elsewhere: Callable[[Cluster, float, bool], Plan]
    answer: Callable[[], Plan] | None = None

    def alternatives(self, k: int) -> list[Plan]:
        """The ``k`` best plans found in which a fraction of at least `MEANINGFUL` of the ops differs, cheapest first.

        Raises PlanError if ``k`` is below 1.
        """
        check_count(k)
        ops = [decision.index for decision in self.pricer.space.decisions if decision.kind == "op"]
        least = max(1, int(MEANINGFUL * len(ops)))
        found = others.alternatives(self.problem, self.solution, k, least, ops, time_limit_s=TIME_LIMIT_S)
        return [self.plan_of(self.pricer.strategies_of(s.choice), s) for s in found]

    def explain(self, name: str) -> list[Choice]:
        """The cost of every strategy of a decision (an op, a parameter, an input), the chosen one first.

        For the three cheapest others the best plan with them is searched. Raises PlanError for an unknown name.
        """
        space = self.pricer.space
        if not isinstance(name, str) or name not in space.decision_named:
            raise PlanError(_unknown(space, str(name)))
        node = space.decision_named[name]
        first = others.explain(self.problem, self.solution, node)
        near = [o.pick for o in first if o.pick != self.solution.choice[node]][:3]
        options = others.explain(self.problem, self.solution, node, near, time_limit_s=TIME_LIMIT_S)
        options.sort(key=lambda o: (o.pick != self.solution.choice[node], o.resolved is None, o.resolved or o.least))
        s, choices = space.strategy_sets[node], self.pricer.choices(node)
        return [Choice(s.names(s.strategies[int(choices[o.pick])]), o.alone, o.least, o.resolved) for o in options]

    def sensitivity(self, factors: Sequence[float]) -> list[Sensitivity]:
        """The step time with the bandwidth of each link that the plan crosses, or the memory limit, times each factor.

        Raises PlanError for factors that are not positive numbers.
        """
        check_factors(factors)
        found = []
        for what, factor, cluster, limit in self._changes(factors):
            held, best, none_found = self.elsewhere(cluster, limit, True), None, False
            held_s = held.prediction.step_s if held.prediction.peak_bytes <= limit else float("inf")
            try:
                best = self.elsewhere(cluster, limit, False)
            except (InfeasibleError, SearchError) as error:
                none_found = isinstance(error, SearchError)
            if best is None or best.prediction.step_s >= held_s:
                found.append(Sensitivity(what, factor, held_s, held_s, 0, none_found))
            else:
                others = sum(best.strategies[decision.name] != held.strategies[decision.name]
                             for decision in self.pricer.space.decisions if decision.kind == "op")
                found.append(Sensitivity(what, factor, held_s, best.prediction.step_s, others))
        return found

    def _changes(self, factors: Sequence[float]) -> Iterator[tuple[str, float, Cluster, float]]:
        """(what changes, factor, cluster, memory limit) of each variation."""
        cluster, limit = self.pricer.prices.cluster, self.pricer.limit_bytes
        crossed = {link.name for group in self.pricer.prices.groups.values() for _, link, _ in group.crossed}
        if self.pricer.counts.hybrid.stages > 1:
            crossed = {link.name for link in cluster.links}
        for what, factor, other in with_links(cluster, crossed, factors):
            yield what, factor, other, limit
        if limit < float("inf"):
            for factor in factors:
                yield "memory limit", factor, cluster, factor * limit


def check_names(graph: OpGraph, names: Sequence[str]) -> None:
    """Raises PlanError for a name of which no plan of this program can explain strategies, before one is searched.

    Micro-batches add reads of a value whole (``sum_whole_0``): with these ends any name of the program is let pass."""
    space = StrategySpace(graph, (1,))
    for name in names:
        if name not in space.decision_named and name.rsplit("_whole_", 1)[0] not in space.decision_named:
            raise PlanError(_unknown(space, name))


def _unknown(space: StrategySpace, name: str) -> str:
    """The error about a decision that a plan lacks: the ops of the module of that name, or names like it."""
    ops = [d.name for d in space.decisions if d.kind == "op" and space.graph.nodes[d.node].module_path == name]
    if ops:
        return (f"{name!r} is a module: ask for one of its ops, {', '.join(ops[:8])}"
                + (f" and {len(ops) - 8} more" if len(ops) > 8 else ""))
    every, last = list(space.decision_named), name.split(".")[-1]
    close = [s for s in every if last in s][:5] or difflib.get_close_matches(name, every, n=5) or every[:5]
    return (f"the plan has no op, parameter or input {name!r}; is it one of {close}? plan.strategies has all "
            f"{len(every)} names")


@dataclass(frozen=True, eq=False)
class StudyByHand:
    """A plan by hand, which is priced and not searched (implements `plans.answers.Study`). ``on``: the same plan on
    another cluster; ``searched``: makes the study of its configuration, which knows no better than the plan."""

    plan: Plan
    cluster: Cluster
    on: Callable[[Cluster], Plan]
    searched: Callable[[], Study]

    def alternatives(self, k: int) -> list[Plan]:
        """Raises PlanError."""
        raise PlanError("this plan is by hand: it was priced, and no search compared it with others\n"
                        "  Leave by_hand out, or ask the plan of a search.")

    def explain(self, name: str) -> list[Choice]:
        """As `Study.explain`; some strategies may cost less than those by hand."""
        return self.searched().explain(name)

    def sensitivity(self, factors: Sequence[float]) -> list[Sensitivity]:
        """The step time with the bandwidth of each link, or the memory limit, times each factor; the plan stays.

        Raises PlanError for factors that are not positive numbers.
        """
        check_factors(factors)
        found = []
        for what, factor, cluster in with_links(self.cluster, {link.name for link in self.cluster.links}, factors):
            step_s = self.on(cluster).prediction.step_s
            found.append(Sensitivity(what, factor, step_s, step_s, 0))
        now = self.plan.prediction
        for factor in factors if now.limit_bytes else ():
            step_s = now.step_s if now.peak_bytes <= factor * now.limit_bytes else math.inf
            found.append(Sensitivity("memory limit", factor, step_s, step_s, 0))
        return found


@dataclass(frozen=True, eq=False)
class JointStudy:
    """The study of a joint search's answer, whose alternatives are also the ``others`` that the search found; a plan
    by hand that is the answer has these alone."""

    study: StudyOfPlan
    others: tuple[Plan, ...]

    def alternatives(self, k: int) -> list[Plan]:
        """As `Study.alternatives`."""
        check_count(k)
        own = [] if isinstance(self.study, StudyByHand) else self.study.alternatives(k)
        return sorted([*own, *self.others], key=lambda plan: plan.prediction.step_s)[:k]

    def explain(self, name: str) -> list[Choice]:
        return self.study.explain(name)

    def sensitivity(self, factors: Sequence[float]) -> list[Sensitivity]:
        return self.study.sensitivity(factors)


def check_count(k: int) -> None:
    """Raises PlanError for a number of alternatives below 1."""
    if not isinstance(k, int) or k < 1:
        raise PlanError(f"alternatives({k!r}): say how many, 1 or more")


def check_factors(factors: Sequence[float]) -> None:
    """Raises PlanError for factors that are not positive numbers."""
    numbers = isinstance(factors, Sequence) and all(isinstance(f, (int, float)) for f in factors)
    if not numbers or not all(0 < f < math.inf for f in factors):
        raise PlanError(f"sensitivity({factors!r}): give factors above 0, for example (0.5, 2.0)")


def with_links(cluster: Cluster, names: Container[str], factors: Sequence[float]
               ) -> Iterator[tuple[str, float, Cluster]]:
    """What changes, the factor, and the cluster, with the bandwidth of each of these links times each factor."""
    for link in (link for link in cluster.links if link.name in names):
        for factor in factors:
            other = replace(link, bandwidth_bytes_per_s=factor * link.bandwidth_bytes_per_s)
            links = tuple(other if k is link else k for k in cluster.links)
            yield f"bandwidth of {link.name}", factor, replace(cluster, links=links)


