"""Questions to a plan whose search is still at hand: what else was there, and why this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from autoparallel.errors import PlanError
from autoparallel.plans import Plan
from autoparallel.pricing import SpacePricer
from autoparallel.rules.space import Label
from autoparallel.search import alternatives as others
from autoparallel.search.problem import Problem, Solution

MEANINGFUL = 0.02  # of all ops must run otherwise for a plan to count as another one
TIME_LIMIT_S = 20.0


@dataclass(frozen=True)
class Choice:
    """One strategy of a site: names by axis, and seconds of the step if only this site changes (inf: it cannot alone),
    that no plan with it is below, and of the best plan with it."""

    strategy: tuple[str, ...]
    alone_s: float
    least_s: float
    resolved_s: float | None


@dataclass(frozen=True, eq=False)
class Study:
    """The problem behind a plan; ``plan_of`` makes a plan of a solution."""

    pricer: SpacePricer
    problem: Problem
    solution: Solution
    plan_of: Callable[[Sequence[Label], Solution], Plan]

    def alternatives(self, k: int) -> list[Plan]:
        """The k best plans found in which at least `MEANINGFUL` of the ops run otherwise, cheapest first."""
        ops = [site.index for site in self.pricer.space.sites if site.kind == "op"]
        least = max(1, int(MEANINGFUL * len(ops)))
        found = others.alternatives(self.problem, self.solution, k, least, ops, time_limit_s=TIME_LIMIT_S)
        return [self.plan_of(self.pricer.labels_of(s.choice), s) for s in found]

    def explain(self, name: str) -> list[Choice]:
        """What every strategy of a site (an op, a parameter, an input) would cost, the chosen one first.

        The three cheapest others are searched for again with them fixed. Raises PlanError for an unknown name.
        """
        space = self.pricer.space
        if name not in space.site_named:
            known = [s for s in space.site_named if name.split(".")[-1] in s][:5]
            raise PlanError(f"the plan has no site {name!r}" + (f"; is it one of {known}?" if known else ""))
        node = space.site_named[name]
        first = others.explain(self.problem, self.solution, node)
        near = [o.pick for o in first if o.pick != self.solution.choice[node]][:3]
        options = others.explain(self.problem, self.solution, node, near, time_limit_s=TIME_LIMIT_S)
        options.sort(key=lambda o: (o.pick != self.solution.choice[node], o.resolved is None, o.resolved or o.least))
        s, choices = space.strategies[node], self.pricer.choices(node)
        return [Choice(s.names(s.labels[int(choices[o.pick])]), o.alone, o.least, o.resolved) for o in options]


def explanation(name: str, choices: Sequence[Choice]) -> Table:
    """The answer of `Study.explain` for a terminal."""
    from autoparallel.report.text import seconds_str

    table = Table(title=f"{name}: what each strategy would cost in one step", title_justify="left")
    for column in ("strategy", "nothing else changed", "best plan with it", "none is below"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for c in choices:
        alone = "not possible" if c.alone_s == float("inf") else seconds_str(c.alone_s)
        resolved = "" if c.resolved_s is None else "none" if c.resolved_s == float("inf") else seconds_str(c.resolved_s)
        table.add_row("·".join(c.strategy), alone, resolved, seconds_str(c.least_s))
    return table
