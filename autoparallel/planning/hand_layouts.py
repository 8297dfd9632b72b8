"""The layouts of a plan by hand: found on the reduced-depth model, priced on the whole one.

Plans written by hand give equal blocks equal layouts, so one block is searched for all. Programs, strategy graphs, unit
costs and layouts are kept in `Splits` for further plans by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autoparallel.capture import OpGraph
from autoparallel.partition import MicroBatches, Splits, cuts_by_blocks, place_cuts
from autoparallel.planning.baselines import by_roles
from autoparallel.planning.by_hand import ByHand
from autoparallel.planning.departures import departures, told
from autoparallel.planning.joint_candidates import Kept, kept_of
from autoparallel.planning.one_mesh import plan_as
from autoparallel.planning.options import Options
from autoparallel.planning.reduced_model import ReducedModel
from autoparallel.plans import Hybrid, Plan
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer
from autoparallel.pricing.prediction import estimate
from autoparallel.pricing.problem import Allowed
from autoparallel.search import solve
from autoparallel.search.model.problem import Problem, Solution
from autoparallel.strategies.space import Strategy, StrategySpace
from cost_models import Cluster

#: By how much more redistributions may take on the whole model, by rounding.
APART = 1e-4
#: Seconds for layouts, whatever the time limit: those of a search that ends early are not a person's.
LAYOUTS_S = 60.0


class HandEstimate(NamedTuple):
    """Estimated seconds of a step and bytes of a device, from the reduced-depth model with equal stages."""

    step_s: float
    peak_bytes: float

    def towards(self, other: HandEstimate, limit_bytes: float) -> HandEstimate:
        """The estimate of the smallest share of ``other``, which takes less memory, that keeps to a limit.

        >>> HandEstimate(1.0, 80.0).towards(HandEstimate(2.0, 40.0), 70.0)
        HandEstimate(step_s=1.25, peak_bytes=70.0)
        """
        if self.peak_bytes <= limit_bytes:
            return self
        if other.peak_bytes >= limit_bytes:
            return other
        share = (self.peak_bytes - limit_bytes) / (self.peak_bytes - other.peak_bytes)
        return HandEstimate(self.step_s + share * (other.step_s - self.step_s), limit_bytes)


@dataclass(frozen=True)
class HandLayouts:
    """The layouts by the roles of the mesh axes of ``hand``, in plans of its step configurations."""

    split: Splits
    cluster: Cluster
    options: Options
    hand: ByHand

    def plan(self, hybrid: Hybrid) -> Plan:
        """The plan with a step configuration. Which blocks are recomputed does not change the layouts."""
        prices, micro = self.prices(hybrid), self.split(hybrid.micro_batches)
        uncut = replace(hybrid, recompute_blocks=None, cuts=())
        strategies, solution = self.split.once((id(prices), self._roles, uncut), lambda: self._found(prices, uncut))
        return plan_as(prices, micro, self.options, self._cut(prices, micro, hybrid, strategies), strategies,
                       replace(solution, stop_reason=f"by hand: {self.hand}{solution.stop_reason}"))

    def estimated(self, hybrid: Hybrid) -> HandEstimate | None:
        """The estimate of a step configuration; None where the model has no block that stands for others, so that its
        plan takes no longer."""
        if not self._reduced.twins:
            return None
        pricer = self._small(hybrid)
        strategies, solution, _ = self._solved_once(pricer)
        return self.split.once(("estimate", id(pricer.prices), self._roles, hybrid), lambda: HandEstimate(
            estimate(pricer, strategies), solution.peak_bytes))

    def prices(self, hybrid: Hybrid) -> Prices:
        """Unit costs of the whole model."""
        return self._prices(self.split(hybrid.micro_batches).body, hybrid)

    @property
    def _kept(self) -> Kept:
        """What joint searches of the program share."""
        return kept_of(self.split, self.cluster, self.options)

    @property
    def _reduced(self) -> ReducedModel:
        return self._kept.reduced_model

    @property
    def _roles(self) -> tuple[str, ...]:
        return self.hand.mesh[2]

    def _prices(self, graph: OpGraph, hybrid: Hybrid) -> Prices:
        (shape, names, _), stages = self.hand.mesh, hybrid.pipeline_ranks
        optimizer, same_limit = self.options.optimizer, self.options.memory_limit_bytes is not None
        space = self.split.once((id(graph), shape, names), lambda: StrategySpace(graph, shape, names))
        return self.split.once((id(space), stages, optimizer, same_limit, id(self.cluster)), lambda: Prices(
            space, self.cluster, optimizer, direct=True, stages=stages, same_limit=same_limit))

    def _found(self, prices: Prices, hybrid: Hybrid) -> tuple[Sequence[Strategy], Solution]:
        """The strategies with the fewest departures from the roles, of these the fastest; and the solution, whose
        reason names the departures. Those of the reduced-depth model count where the whole has no more redistributions:
        there a block follows on one like itself."""
        space, reduced = prices.space, self._reduced
        whole = self._pricer(prices, ExecutionCounts(space, hybrid, recomputing=prices.recomputing))
        if not reduced.twins:
            strategies, solution, _ = self._solved(whole)
        else:
            small = self._small(hybrid, whole)
            strategies, solution, moves_s = self._solved_once(small)
            strategies = reduced.strategies(space, small.space, strategies)
            if _moves_s(whole.full(), whole.choice_of(strategies)) > (1 + APART) * moves_s:
                strategies, solution, _ = self._solved(whole)
        away = departures(by_roles("by hand", space, self._roles), whole, strategies)
        return strategies, replace(solution, stop_reason=told(away))

    def _solved_once(self, pricer: SpacePricer) -> tuple[Sequence[Strategy], Solution, float]:
        """`_solved` of the reduced-depth model, which estimates and plans share."""
        allowed = tuple((index, left.tobytes()) for index, left in sorted(pricer.allowed.items()))
        return self.split.once(("solved", id(pricer.prices), self._roles, pricer.counts.hybrid, allowed),
                               lambda: self._solved(pricer))

    def _solved(self, pricer: SpacePricer) -> tuple[Sequence[Strategy], Solution, float]:
        problem, options = pricer.full(), self.options
        solution = solve(problem, options.search, LAYOUTS_S, pricer, options.progress)
        return pricer.strategies_of(solution.choice), solution, _moves_s(problem, solution.choice)

    def _pricer(self, prices: Prices, counts: ExecutionCounts, allowed: Allowed | None = None) -> SpacePricer:
        return SpacePricer(prices, allowed=allowed, penalties=by_roles("by hand", prices.space, self._roles),
                           counts=counts)

    def _small(self, hybrid: Hybrid, whole: SpacePricer | None = None) -> SpacePricer:
        """Prices of the reduced-depth model. It repeats the ops on all ranks that the ``whole`` model repeats (those
        that are small in relation to it)."""
        reduced, body = self._reduced, self._kept.split(hybrid.micro_batches).body
        prices = self._prices(body, hybrid)
        space, allowed = prices.space, None
        if whole is not None:
            numbers = {whole.space.decisions[index].name: left for index, left in whole.allowed.items()}
            allowed = {space.decision_named[name]: left for name, left in numbers.items()
                       if name in space.decision_named}
        counts = ExecutionCounts(space, hybrid, multiplicities=reduced.counts(space), held=reduced.held(space, hybrid),
                                 recomputing=prices.recomputing)
        return self._pricer(prices, counts, allowed)

    def _cut(self, prices: Prices, micro: MicroBatches, hybrid: Hybrid, strategies: Sequence[Strategy]) -> Hybrid:
        """The step configuration with the pipeline's cuts, where ``hand`` has them."""
        if hybrid.stages == 1 or hybrid.cuts:
            return hybrid
        how = self.hand.split
        if how != "work":
            return replace(hybrid, cuts=cuts_by_blocks(prices.space, micro.loss, hybrid.stages, ends=how == "ends"))
        return replace(hybrid, cuts=place_cuts(prices, micro.loss, hybrid, strategies))


def _moves_s(problem: Problem, choice: Sequence[int]) -> float:
    """Seconds of a choice's redistributions, and their penalties."""
    return sum(problem.costs.take(problem.cells(choice))[len(problem.nodes):].tolist())


__all__ = ["HandEstimate", "HandLayouts"]
