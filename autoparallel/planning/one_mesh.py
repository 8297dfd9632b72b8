"""One plan on one mesh: program -> strategy graph -> unit costs -> problem -> solution -> plan."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from autoparallel import clock
from autoparallel.errors import InfeasibleError, SearchError
from autoparallel.garbage import collected_later
from autoparallel.layout import Layout
from autoparallel.partition import (
    MicroBatches,
    Stages,
    Ungathered,
    place_cuts,
    stages_of,
    stored_sharded,
)
from autoparallel.planning.baselines import baseline
from autoparallel.planning.block_summary import block_layouts
from autoparallel.planning.bucket_sizes import check_named, in_fastest_buckets
from autoparallel.planning.candidates import First
from autoparallel.planning.facts import block_paths, facts_of, told_of_gradients, whole_state
from autoparallel.planning.faster_pieces import in_faster_pieces, tell_of_pieces, with_faster_experts
from autoparallel.planning.offloading import fastest_tier, tier_limits
from autoparallel.planning.options import Options
from autoparallel.planning.recompute import less_recomputed
from autoparallel.planning.study import TIME_LIMIT_S, Study
from autoparallel.planning.unequal_hosts import shares_of
from autoparallel.plans import Evidence, Hybrid, Plan, Prediction, apply_pins, pin_strings
from autoparallel.plans.record import Record
from autoparallel.pricing import ExecutionCounts, Penalties, Prices, SpacePricer, predict
from autoparallel.pricing.hidden import COUNTED, hidden_s, least_exposed, spans
from autoparallel.pricing.prediction import compute_seconds, stage_seconds
from autoparallel.pricing.record import memory_profile, redistributions, workload
from autoparallel.pricing.stage_devices import slowest_rank
from autoparallel.pricing.step_cost import ALL_EXPOSED
from autoparallel.schedule.step_config import check_sparse_tables
from autoparallel.search import INTERRUPTED, plan_within, solve
from autoparallel.search.alternatives import conflict
from autoparallel.search.model.problem import Problem, Solution, evaluate
from autoparallel.strategies.host_lookups import HostLookups, tables_of
from autoparallel.strategies.space import Strategy, StrategySpace
from autoparallel.strategies.sparse_tables import SparseTables, check_read_as_stored
from cost_models import Cluster

_LOG = logging.getLogger("autoparallel")
#: The number of searches among which recompute="auto" divides its time limit.
RECOMPUTE_TRIES = 4
#: The gap and the time limit of the search whose plan places the cuts.
ROUGH_GAP, ROUGH_S = 0.02, 3.0


@collected_later()
def plan_on(
    micro: MicroBatches,
    cluster: Cluster,
    mesh_shape: tuple[int, ...],
    axis_names: Sequence[str] | None,
    options: Options,
    hybrid: Hybrid,
    first: First | None = None,
    prices: Prices | None = None,
) -> Plan:
    """Plan a program on a mesh of ``cluster``, as `plan_in`, on a new strategy graph, or on that of ``prices``.

    ``first`` gives the strategies to begin with. Raises InfeasibleError if nothing fits, SearchError if the time was
    too short.
    """
    laps = _Laps()
    space = StrategySpace(micro.body, mesh_shape, axis_names) if prices is None else prices.space
    laps.lap("strategies")
    return plan_in(space, micro, cluster, options, {}, hybrid, laps, first, prices)


def prices_of(space: StrategySpace, cluster: Cluster, options: Options, pipeline_ranks: int) -> Prices:
    """The unit costs of a strategy graph under the options."""
    return Prices(space, cluster, options.optimizer, direct=bool(options.baseline), stages=pipeline_ranks,
                  same_limit=options.memory_limit_bytes is not None)


@collected_later()
def plan_in(space: StrategySpace, micro: MicroBatches, cluster: Cluster, options: Options,
             placed: Mapping[str, Layout], hybrid: Hybrid, laps: _Laps | None = None,
             first: First | None = None, prices: Prices | None = None) -> Plan:
    """The best plan found on a strategy graph; ``Plan.evidence.seconds`` has the CPU seconds of each phase.

    ``placed``: layouts of parameters that lie on the mesh already, which stay. ``first``: the strategies with which the
    search begins, where pins allow them. ``prices``: those of `prices_of`, if they are known. Raises
    InfeasibleError (it names conflicting pins), PinError, SearchError.
    """
    if options.recompute == "auto":
        return _plan_recomputing(space, micro, cluster, options, placed, hybrid)
    check_sparse_tables(space.graph.sparse_tables, hybrid)
    hybrid.fusion.check_axes(space.axis_names)
    laps = laps or _Laps()
    prices = prices_of(space, cluster, options, hybrid.pipeline_ranks) if prices is None else prices
    allowed = apply_pins(space, options.pins or {}, hybrid.pipeline_ranks > 1)
    tables = {*HostLookups(space, hybrid.on_host).tables, *SparseTables(space).density}  # are stored as read
    check_read_as_stored(space, tables, allowed)
    if options.zero_stage:
        allowed = {**{at: some for at, some in stored_sharded(space).items() if at not in tables}, **allowed}
    allowed.update(_placed_choices(space, placed))
    penalties = _penalties(space, options)
    limit, begin = options.limit_bytes(cluster), first(space) if first is not None else None

    def priced(hybrid: Hybrid) -> tuple[Stages, SpacePricer]:
        stages = stages_of(space, micro.loss, hybrid)
        return stages, SpacePricer(prices, limit, allowed, penalties, _counts(prices, hybrid, stages))

    if hybrid.stages > 1 and not hybrid.cuts:
        if begin is None:
            begin = _rough_strategies(priced(replace(hybrid, cuts=place_cuts(prices, micro.loss, hybrid)))[1])
        hybrid = replace(hybrid, cuts=place_cuts(prices, micro.loss, hybrid, begin))
    stages, pricer = priced(hybrid)
    problem = pricer.full()
    laps.lap("pricing")
    try:
        solution = solve(problem, options.search, options.time_limit_s, pricer, options.progress,
                         pricer.choice_near(begin) if begin is not None else None)
    except InfeasibleError as error:
        raise _naming_pins(error, pricer, options) from None
    searched, table = pricer, problem
    if penalties is None and not _tiers_hold(pricer, problem, solution, options):
        searched, table, solution = _within_tiers(pricer, problem, solution, options)
    laps.lap("search")
    if penalties is not None:  # the plan is priced without penalties
        strategies, pricer = (
            pricer.strategies_of(solution.choice),
            SpacePricer(prices, limit, allowed, counts=pricer.counts),
        )
        pricer, problem, solution = in_fastest_buckets(pricer, pricer.full(), solution, strategies, options, stages)
        check_named(pricer, strategies)
        return _plan_of(pricer, problem, solution, strategies, options, laps, stages, micro)
    chosen = pricer.strategies_of(solution.choice)
    if options.search != "local":  # which is of trial plans
        solution = _faster_hiding(searched, table, solution, options, laps)
        chosen = pricer.strategies_of(solution.choice)
        for faster in (in_faster_pieces, with_faster_experts):
            pricer = faster(pricer, chosen, solution.objective, options)
    return _in_fastest_buckets(pricer, problem, solution, options, laps, stages, micro, placed)


def _in_fastest_buckets(pricer: SpacePricer, problem: Problem, solution: Solution, options: Options, laps: _Laps,
                        stages: Stages, micro: MicroBatches, placed: Mapping[str, Layout]) -> Plan:
    """The plan of a solution, with its study; a trial plan's makes the same plan as the answer, in its fastest
    buckets."""
    chosen = pricer.strategies_of(solution.choice)
    pricer, problem, solution = in_fastest_buckets(pricer, problem, solution, chosen, options, stages)
    check_named(pricer, chosen)
    make = partial(_plan_of, pricer, problem, options=options, laps=laps, stages=stages, micro=micro)
    elsewhere = partial(_elsewhere, pricer, solution, micro, options, placed, stages)
    answer = partial(_in_fastest_buckets, pricer, problem, solution, replace(options, search="auto"), laps, stages,
                     micro, placed) if options.search == "local" else None
    study = Study(pricer, problem, solution, lambda strategies, found: make(found, strategies), elsewhere, answer)
    return replace(make(solution, chosen), study=study)


@collected_later()
def plan_as(prices: Prices, micro: MicroBatches, options: Options, hybrid: Hybrid, strategies: Sequence[Strategy],
            solution: Solution) -> Plan:
    """The plan with these ``strategies`` and no memory limit, priced as it is; ``solution`` says where they are
    from, by its solver, reason and seconds."""
    laps = _Laps()
    stages, pricer = _as_given(prices, micro, hybrid)
    problem = pricer.full()
    laps.lap("pricing")
    pricer, problem, solution = in_fastest_buckets(pricer, problem, solution, strategies, options, stages)
    check_named(pricer, strategies)
    return _plan_of(pricer, problem, solution, strategies, options, laps, stages, micro, as_given=True)


def study_as(prices: Prices, micro: MicroBatches, options: Options, plan: Plan, limit_bytes: float) -> Study:
    """The search problem behind a ``plan`` of `plan_as` under a memory limit, with its strategies as the solution, of
    which nothing is proven."""
    stages, pricer = _as_given(prices, micro, plan.hybrid, limit_bytes)
    problem, strategies = pricer.full(), plan.strategies_on(prices.space)
    choice = pricer.choice_of(strategies)
    judged = evaluate(problem, choice)
    solution = Solution(choice, judged.objective, -math.inf, judged.peak_bytes, plan.evidence.stop_reason,
                        plan.evidence.solver)
    make = partial(_plan_of, pricer, problem, options=options, laps=_Laps(), stages=stages, micro=micro)
    elsewhere = partial(_elsewhere, pricer, solution, micro, options, {}, stages)
    return Study(pricer, problem, solution, lambda strategies, found: make(found, strategies), elsewhere)


def _as_given(prices: Prices, micro: MicroBatches, hybrid: Hybrid, limit_bytes: float = math.inf
              ) -> tuple[Stages, SpacePricer]:
    space = prices.space
    stages = stages_of(space, micro.loss, hybrid)
    return stages, SpacePricer(prices, limit_bytes, counts=_counts(prices, hybrid, stages))


def _counts(prices: Prices, hybrid: Hybrid, stages: Stages) -> ExecutionCounts:
    return ExecutionCounts(prices.space, hybrid, stages.of_decisions(len(prices.space)),
                           recomputing=prices.recomputing, slowest=slowest_rank(prices, hybrid))


def _elsewhere(pricer: SpacePricer, solution: Solution, micro: MicroBatches, options: Options,
               placed: Mapping[str, Layout], stages: Stages, cluster: Cluster, limit_bytes: float, held: bool) -> Plan:
    """The solution as a plan (if ``held``), or the best plan, on another cluster or memory limit. Raises as
    `plan_in`."""
    options = replace(options, memory_limit_bytes=limit_bytes, progress=None,
                      search="auto" if options.search == "local" else options.search,  # of a trial plan
                      time_limit_s=min(options.time_limit_s, TIME_LIMIT_S))
    space, hybrid = pricer.space, pricer.counts.hybrid
    if not held:
        return plan_in(space, micro, cluster, options, placed, hybrid)
    prices = Prices(space, cluster, options.optimizer, stages=hybrid.pipeline_ranks)
    there = SpacePricer(prices, limit_bytes, pricer.allowed, counts=pricer.counts)
    return _plan_of(there, there.full(), solution, pricer.strategies_of(solution.choice), options, _Laps(), stages,
                    micro)


def _faster_hiding(pricer: SpacePricer, problem: Problem, solution: Solution, options: Options, laps: _Laps
                   ) -> Solution:
    """The fastest of some solutions, with overlap simulated: ``solution``, and those searched with only a part of
    parameter communication counted (`COUNTED`). The evidence of the others is their additive cost in ``problem``."""
    share, left = least_exposed(pricer), options.time_limit_s - solution.seconds["total"]
    if share == ALL_EXPOSED or solution.stop_reason == INTERRUPTED:
        return solution
    found = {solution.choice: solution}
    try:
        for part in COUNTED:
            if left <= 0:
                raise SearchError(f"the searches before it took the {options.time_limit_s:g} s of all")
            hiding = pricer.exposing(share.with_more(part))
            other = solve(hiding.full_like(problem), options.search, left, hiding, options.progress, solution.choice)
            left -= other.seconds["total"]
            judged = evaluate(problem, other.choice)
            found.setdefault(other.choice, replace(
                solution, choice=other.choice, objective=judged.objective, peak_bytes=judged.peak_bytes,
                stop_reason="faster with overlap"))
    except (InfeasibleError, SearchError, KeyboardInterrupt) as error:
        reason = f"{solution.stop_reason}; not searched with overlap: {str(error) or INTERRUPTED}"
        found[solution.choice] = replace(solution, stop_reason=reason)
    finally:
        laps.lap("search with overlap")
    if len(found) == 1:
        return found[solution.choice]
    return min(found.values(), key=lambda one: one.objective - hidden_s(pricer, pricer.strategies_of(one.choice)))


def _rough_strategies(pricer: SpacePricer) -> list[Strategy] | None:
    """Strategies of an approximate plan, found quickly, for placing the cuts; None if there is none."""
    found = plan_within(pricer.full(), ROUGH_GAP, ROUGH_S, pricer)
    return pricer.strategies_of(found.choice) if found is not None and found.choice is not None else None


def plan_call(space: StrategySpace, micro: MicroBatches, cluster: Cluster, options: Options,
              placed: Mapping[str, Layout], hybrid: Hybrid) -> Plan:
    """The best plan for one call of a compiled module, as `plan_in`. Where none fits and the options leave it open, as
    few blocks as memory requires are computed again in backward, then with ZeRO-3 too, if no parameter is ``placed``.

    Raises InfeasibleError (that of the plain step) if nothing fits; PinError, SearchError.
    """
    with clock.counted(options.time_limit_s):
        if not placed:
            options = options.with_tables(space.graph)
            hybrid = replace(hybrid, on_host=options.on_host, cached=options.cached)
        return _plan_call(space, micro, cluster, options, placed, hybrid)


def _plan_call(space: StrategySpace, micro: MicroBatches, cluster: Cluster, options: Options,
               placed: Mapping[str, Layout], hybrid: Hybrid) -> Plan:
    if options.offload == "auto":
        return fastest_tier(options, cluster, lambda chosen: _plan_call(
            space, micro, cluster, chosen, placed, _in_tier(hybrid, chosen)),
            lambda chosen: whole_state(space.graph, cluster, chosen), blocks=block_paths(space.graph),
            tables=tables_of(space.graph))
    try:
        return plan_in(space, micro, cluster, options, placed, hybrid)
    except InfeasibleError as error:
        if not options.is_open:
            raise
        for zero_stage in (None,) if placed else (None, 3):
            within = replace(options, recompute="auto", zero_stage=zero_stage)
            with suppress(InfeasibleError, SearchError):
                found = plan_in(space, micro, cluster, within, placed,
                                replace(hybrid, zero_stage=zero_stage or hybrid.zero_stage))
                reason = f"a step without recompute does not fit; {found.evidence.stop_reason}"
                _LOG.warning("the step does not fit into memory as it is: the plan has recompute=%r, zero_stage=%d",
                             found.hybrid.recompute, found.hybrid.zero_stage)
                return replace(found, evidence=replace(found.evidence, stop_reason=reason))
        error.args = (f"{error} (No plan was found with recompute and ZeRO-3 either. With micro_batches, which "
                      "parallel.step runs, less memory is needed.)"
                      f"{told_of_gradients(error, space.graph, cluster, options)}",)
        raise


def _in_tier(hybrid: Hybrid, options: Options) -> Hybrid:
    """The step configuration with training state in the options' tier, and their tables on the host. Raises PlanError
    where it does not go there."""
    zero_stage = 3 if options.tier.moves_parameters and options.zero_stage == 3 else hybrid.zero_stage
    return replace(hybrid, offload=options.tier, zero_stage=zero_stage, on_host=options.on_host,
                   cached=options.cached)


def _plan_recomputing(space: StrategySpace, micro: MicroBatches, cluster: Cluster, options: Options,
                      placed: Mapping[str, Layout], hybrid: Hybrid) -> Plan:
    """The plan without recompute if one fits, else the fastest plan found that recomputes some blocks."""
    started = clock.now()
    within = replace(options, recompute=None, time_limit_s=options.time_limit_s / RECOMPUTE_TRIES)
    make = partial(plan_in, space, micro, cluster, within, placed)
    try:
        return make(hybrid)
    except InfeasibleError:
        whole = make(replace(hybrid, recompute="full"))
    blocks = stages_of(space, micro.loss, whole.hybrid).blocks(space)
    return less_recomputed(whole, blocks, make, started + options.time_limit_s, options.saved_tiers)


def _naming_pins(error: InfeasibleError, pricer: SpacePricer, options: Options) -> InfeasibleError:
    """The error; if pins are the cause, its message names a smallest conflicting set of them."""
    free = SpacePricer(pricer.prices, pricer.limit_bytes, counts=pricer.counts)
    pins = {
        pattern: {decision: np.searchsorted(free.choices(decision), numbers).tolist()
                  for decision, numbers in apply_pins(free.space, {pattern: pin}).items()}
        for pattern, pin in (options.pins or {}).items()
    }
    found = conflict(free.full(), pins, options.time_limit_s) if pins else None
    if found is not None and found.pins:
        error.args = (f"{error} {found.explanation(pricer.limit_bytes)}",)
    return error


def _penalties(space: StrategySpace, options: Options) -> Penalties | None:
    if options.baseline:
        return baseline(options.baseline, space)
    return Ungathered(space) if options.zero_stage == 0 else None


def _plan_of(
    pricer: SpacePricer,
    problem: Problem,
    solution: Solution,
    strategies: Sequence[Strategy],
    options: Options,
    laps: _Laps,
    stages: Stages,
    micro: MicroBatches,
    as_given: bool = False,
) -> Plan:
    """The plan of ``strategies``, with the evidence of ``solution`` and its prediction; ``as_given``: that of a
    person, of which nothing is proven."""
    space = pricer.space
    judged = evaluate(problem, pricer.choice_of(strategies))
    named = f"baseline {options.baseline}" if options.baseline else "zero_stage=0" if options.zero_stage == 0 else ""
    named = solution.stop_reason if as_given else named
    evidence = Evidence(
        solution.solver, judged.objective, judged.objective if named else solution.lower_bound,
        0.0 if named else solution.gap, named or solution.stop_reason,
        {**laps.seconds, **{f"search: {k}": v for k, v in solution.seconds.items()}},
    )
    names, which = pricer.costs.memo.each(
        "names", pricer.costs.kinds.decision_codes(strategies), lambda at: space.strategy_sets[at].names(strategies[at])
    )
    named_strategies = {
        decision.name: names[kind] for decision, kind in zip(space.decisions, which.tolist(), strict=True)
    }
    tell_of_pieces(pricer, strategies)
    prediction = predict(pricer, problem, strategies, judged.peak_bytes, stages.sent_bytes(space, strategies))
    _check_tiers(prediction, pricer.prices.cluster, pricer.counts.hybrid, options)
    if pricer.counts.hybrid.cached:
        prediction = replace(prediction, uncached_s=_uncached_s(pricer, strategies, stages))
    return Plan(
        fingerprint=space.graph.fingerprint,
        mesh_shape=space.mesh_shape,
        axis_names=space.axis_names,
        strategies=named_strategies,
        cluster=pricer.prices.cluster.name,
        evidence=evidence,
        prediction=prediction,
        blocks=block_layouts(space, strategies),
        pins=pin_strings(space, options.pins or {}),
        direct=pricer.prices.direct,
        hybrid=pricer.counts.hybrid,
        recorder=partial(_record, pricer, problem, strategies, stages),
        model=facts_of(micro.whole, space.graph, pricer.counts.hybrid.cuts),
    )


def _uncached_s(pricer: SpacePricer, strategies: Sequence[Strategy], stages: Stages) -> float:
    """Predicted seconds of the same step, were its tables on the host looked up and stepped there, without caches."""
    space, hybrid = pricer.space, replace(pricer.counts.hybrid, cached=())
    plain = SpacePricer(pricer.prices, counts=_counts(pricer.prices, hybrid, stages))
    problem = plain.full()
    peak_bytes = evaluate(problem, plain.choice_of(strategies)).peak_bytes
    return predict(plain, problem, strategies, peak_bytes, stages.sent_bytes(space, strategies)).step_s


def _record(pricer: SpacePricer, problem: Problem, strategies: Sequence[Strategy], stages: Stages) -> Record:
    """The record of a plan for reports, without answers (alternatives, explanations) that are computed later."""
    shown = [block.paths[0] for block in block_layouts(pricer.space, strategies)]
    work = replace(workload(pricer, strategies), shares=shares_of(pricer, stages))
    found = Record(work, memory=memory_profile(pricer, problem, strategies),
                   redistributions=redistributions(pricer, strategies, shown),
                   compute_s=compute_seconds(pricer, strategies))
    if pricer.counts.hybrid.stages == 1:
        return replace(found, spans=tuple(spans(pricer, strategies)))
    sends, decisions = stages.sent_bytes(pricer.space, strategies), pricer.space.decisions
    names = tuple(tuple(decisions[at].name for at in sorted(part.decisions) if decisions[at].kind == "parameter")
                  for part in stages.parts)
    return replace(found, stages=stage_seconds(pricer, problem, strategies, sends), stage_parameters=names)


def _tiers_hold(pricer: SpacePricer, problem: Problem, solution: Solution, options: Options) -> bool:
    """Whether a solution keeps to the limits of host memory and disk."""
    if not (pricer.counts.hybrid.offload.is_away or pricer.counts.hybrid.on_host):
        return True
    prediction = predict(pricer, problem, pricer.strategies_of(solution.choice), solution.peak_bytes)
    try:
        _check_tiers(prediction, pricer.prices.cluster, pricer.counts.hybrid, options)
    except InfeasibleError:
        return False
    return True


def _within_tiers(pricer: SpacePricer, problem: Problem, solution: Solution, options: Options
                  ) -> tuple[SpacePricer, Problem, Solution]:
    """The search once more, with the limits of host memory and disk: (pricer, problem, solution); where no plan keeps
    to them, as before."""
    host, disk, _ = tier_limits(pricer.prices.cluster, options)
    limits = {tier: max(limit, 1.0) for tier, limit in (("host", host), ("disk", disk)) if limit < math.inf}
    limited = pricer.within(limits)
    try:
        found = solve(both := limited.full(), options.search, options.time_limit_s, limited, options.progress)
    except (InfeasibleError, SearchError):
        return pricer, problem, solution    # and `_check_tiers` says what it lacks
    device = evaluate(problem, found.choice).peak_bytes
    return limited, both, replace(found, peak_bytes=device, stop_reason=f"{found.stop_reason}; within host and disk")


def _check_tiers(prediction: Prediction, cluster: Cluster, hybrid: Hybrid, options: Options) -> None:
    """Raises InfeasibleError if what leaves a device exceeds its share of its host's memory, or a limit of the
    options."""
    host, disk, share = tier_limits(cluster, options)
    what, instead = _away(hybrid)
    if prediction.host_bytes > host:
        given = f"{cluster.name} has" if host == share else "host_memory_limit_bytes is"
        raise InfeasibleError(f"{what} needs {prediction.host_bytes:.3g} bytes of the host's memory for each device, "
                              f"and {given} {host:.3g}: take {instead}")
    if prediction.disk_bytes > disk:
        less = "more micro-batches or recompute='full'" if hybrid.saved_on == "disk" else "zero_stage=1 or more"
        raise InfeasibleError(f"{what} needs {prediction.disk_bytes:.3g} bytes of disk for each device, and "
                              f"disk_limit_bytes is {disk:.3g}: take more devices or {less}")


def _away(hybrid: Hybrid) -> tuple[str, str]:
    """What leaves the devices, and what takes less of their hosts' memory."""
    tables = f" with {len(hybrid.on_host)} tables on the host" if hybrid.on_host else ""
    if hybrid.offload.is_away:
        return f"offload={hybrid.offload.place!r}{tables}", "more devices, zero_stage=1 or more, or more on disk"
    if hybrid.saved_on != "device":
        return (f"recompute={hybrid.recompute!r}, saved_on={hybrid.saved_on!r}{tables}",
                "more micro-batches or recompute='full'" + " or saved_on='disk'" * (hybrid.saved_on == "host"))
    return f"a plan{tables}", "more devices or offload='disk', or pin fewer tables to it"


def _placed_choices(space: StrategySpace, placed: Mapping[str, Layout]) -> dict[int, np.ndarray]:
    """The strategy numbers of parameters that lie on the mesh already: those with their present layout."""
    found = {}
    for decision in space.decisions:
        if decision.kind == "parameter" and decision.path in placed:
            s = space.strategy_sets[decision.index]
            found[decision.index] = np.array([
                c for c, strategy in enumerate(s.strategies) if s.output_layout(strategy) == placed[decision.path]
            ])
    return found


class _Laps:
    """CPU seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.process_time()

    def lap(self, phase: str) -> None:
        now = time.process_time()
        self.seconds[phase] = now - self._last
        self._last = now


__all__ = ["plan_as", "plan_in", "plan_on", "prices_of", "study_as"]
