"""Variable fixing: the choices that a better plan may still contain, by their reduced costs at given memory prices.

A choice's regret at these prices is by how much the best priced plan with it exceeds the best. Where bound + regret is
above the plan in hand, no better plan has that choice. What is left is eliminated in a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from autoparallel.search.low_width.bucket_elimination import Eliminator
from autoparallel.search.low_width.lagrangian import Dual, priced, raise_bound
from autoparallel.search.model.dominance import Reduced, keep, selected
from autoparallel.search.model.interned import Shared, firsts, paired
from autoparallel.search.model.memory_rows import Memory
from autoparallel.search.model.problem import Problem

SLACK = 1e-6


@dataclass(frozen=True, eq=False)
class Priced:
    """What is left of a problem; ``memory`` and ``dual`` count times and room as the whole problem's do."""

    reduced: Reduced
    memory: Memory
    eliminator: Eliminator
    dual: Dual

    @property
    def problem(self) -> Problem:
        return self.reduced.problem

    def relax(self, costs: Shared) -> tuple[float, tuple[int, ...]]:
        return self.eliminator.solve(costs)

    def work(self) -> float:
        """Cells of one elimination."""
        return self.eliminator.work(priced(self.problem, self.memory, self.dual.prices))

    def raised(self, deadline: float, rounds: int, on_plan: Callable[[tuple[int, ...]], float], gap: float) -> Priced:
        """Better prices, in so many more rounds; ``on_plan`` sees plans of the whole problem."""
        def offer(plan: tuple[int, ...]) -> float:
            return on_plan(self.reduced.restore(plan))

        dual = raise_bound(self.problem, self.memory, self.relax, deadline, rounds, offer, gap, dual=self.dual)
        return replace(self, dual=dual)

    def narrowed(self, objective: float, choice: tuple[int, ...]) -> Priced:
        """The problem without the choices that are in no plan cheaper than ``objective``, by the bound; those of the
        plan ``choice`` stay.

        Nodes with equal arrays keep the same choices, so that equal blocks stay equal.
        """
        problem = self.problem
        room = (objective - self.dual.bound) * (1 + SLACK) + 1e-9 * abs(objective)
        wanted = self.reduced.forward(choice)
        reduced_costs = Shared.of(self.eliminator.reduced_costs(priced(problem, self.memory, self.dual.prices)))
        count = len(problem.nodes)
        kinds = paired(problem.costs.numbers[:count], problem.usages.numbers[:count])
        needed = [np.zeros(problem.sizes[v], bool) for v in firsts(kinds)[0]]
        for v in firsts(paired(kinds, reduced_costs.numbers))[0]:
            needed[kinds[v]] |= reduced_costs[v] <= room
        for v in firsts(paired(kinds, np.array(wanted)))[0]:
            needed[kinds[v]][wanted[v]] = True
        kept = [np.flatnonzero(mask) for mask in needed]
        left = keep(problem, [kept[kind] for kind in kinds.tolist()])
        memory = replace(self.memory, extra=selected(self.memory.extra, problem.ends, left.kept))
        eliminator = Eliminator.of(left.problem).until(self.eliminator.deadline)
        return Priced(self.reduced.then(left), memory, eliminator, _surviving(self.dual, left))


def _surviving(dual: Dual, left: Reduced) -> Dual:
    """The dual with only those plans, and their cuts, all of whose choices are left in the smaller problem: without the
    others its bound may rise further."""
    plans = [left.forward(plan) for plan in dual.plans]
    alive = [i for i, plan in enumerate(plans) if left.restore(plan) == dual.plans[i]]
    return replace(dual, plans=[plans[i] for i in alive], cuts=[dual.cuts[i] for i in alive], active=[*dual.active],
                   exact=False)
