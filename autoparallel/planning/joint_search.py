"""The joint search of pipeline, mesh, micro-batches, ZeRO stage, recompute and sharding.

The combinations with the best estimates are planned for the whole model: a trial plan takes the strategies of the
reduced-depth model. This ends when no estimate beats the best trial plan; a full search continues from there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from autoparallel import clock
from autoparallel.capture import OpGraph
from autoparallel.errors import AutoparallelError, InfeasibleError, SearchError
from autoparallel.planning.bounding import Bounding
from autoparallel.planning.candidates import Candidate, CandidateSpace, Combination, Fixed
from autoparallel.planning.joint_candidates import JointSearch, Kept, Survey
from autoparallel.plans import Hybrid, Plan
from autoparallel.plans.record import Trial
from autoparallel.plans.reports.units import bytes_str
from autoparallel.schedule.fusion import BY_SIZE
from autoparallel.schedule.step_config import BUCKET_BYTES
from autoparallel.search import INTERRUPTED, NotRepairedError, Progress
from cost_models import Cluster

#: Smallest time limit of the full searches where nothing fits: a share of the time limit, within these seconds. That of
#: full searches where a plan fits, and of the last trials with fewer recomputed blocks: a share of it.
LEAST_FULL, LEAST_FULL_S, MOST_FULL_S, WITH_A_PLAN = 0.5, 3.0, 10.0, 0.4
#: The shares of the time limit at which estimates, and trial plans, end: in the first and the second round.
ROUNDS = ((0.4, 0.55), (0.65, 0.75))
#: The share that the second round leaves to trial plans with fewer recomputed blocks, if there is any use for them; the
#: share at which these end; the number of combinations that get them at most.
RESERVED, FEWER_RECOMPUTED, MOST_FEWER = 0.1, 0.9, 3
#: Most trial plans; most that are tried without one that fits; factors on expected seconds after a failure, and of
#: pipelines before the first trial plan; time limit of one trial plan.
MOST_TRIALS, MOST_FAILED, FAILED_RATIO, PIPELINE_EXCESS, TRIAL_S = 40, 8, 1.5, 1.07, 2.0
#: Candidates expected to exceed the best plan by more than this factor get no full search; the most that get one; the
#: most that get one after the deadline, where nothing fits.
SEARCH_ON, MOST_FULL, MOST_LATE = 1.02, 10, 2
#: Plans of other combinations that are kept beside the best, at most; so many are made if there is time.
MOST_KEPT, LEAST_KEPT = 5, 2
#: Smallest share of the memory limit that a repeated estimate is given.
LEAST_ROOM = 0.5


@dataclass(frozen=True)
class JointResult:
    """The best plan, the survey of candidates, how many of these were planned in full, and all combinations judged.
    ``runners_up``: the best plans of the other combinations, best first. ``interrupted``: by the user (Ctrl-C).
    ``tried_less``: the best plan's combination was tried with fewer recomputed blocks."""

    plan: Plan
    survey: Survey
    planned: int
    trials: tuple[Trial, ...] = ()
    runners_up: tuple[Plan, ...] = ()
    interrupted: bool = False
    tried_less: bool = False


class InFull(Protocol):
    """Plans a candidate for the whole model, beginning with its strategies; by the named search, or the user's."""

    def __call__(self, candidate: Candidate, seconds: float, search: str | None = ...) -> Plan: ...


class RecomputeLess(Protocol):
    """A callback that gives back ``plan``, or a faster plan of the same combination in which fewer blocks are
    recomputed. It plans trials of at most ``seconds`` each, by ``search`` (a solver's name), and begins none after
    ``deadline`` (a time of `autoparallel.clock`)."""

    def __call__(self, plan: Plan, deadline: float, seconds: float, search: str | None = ...) -> Plan: ...


def search_jointly(
    graph: OpGraph, cluster: Cluster, fixed: Fixed, optimizer: str, limit_bytes: float, time_limit_s: float,
    in_full: InFull, recompute_less: RecomputeLess | None = None, starts: Sequence[Candidate] = (),
    progress: Progress | None = None, wider_limits: tuple[float, float] | None = None,
    by_hand: Sequence[Candidate] = (), kept: Kept | None = None, bounding: Bounding | None = None,
) -> JointResult:
    """The best plan over all combinations that ``fixed`` leaves open.

    Candidates are estimated, and the best of them get trial plans until no estimate beats the best trial plan; so do
    ``starts``, whose estimates are seconds of whole plans, and these with other numbers of stages. A second round does
    the same with what the trial plans have shown. The best that recompute are tried with fewer recomputed blocks
    (``recompute_less``; None: all or nothing). The remaining time goes to a full search from the best ones.
    ``progress`` is told of each estimate and plan, with the best step so far and the bound on that of all
    combinations. ``wider_limits``: bytes of the mean device and of the largest, of which pipelines make use, where
    ``limit_bytes`` is that of the smallest. ``by_hand``: combinations of plans by hand, with their steps. ``kept``: of
    other searches of the program. ``bounding``: bounds that are raised beside the search. An interrupt (Ctrl-C) ends
    the search with the best plan that there is.

    Raises InfeasibleError if nothing fits, or nothing was planned in time; KeyboardInterrupt before the first plan.
    """
    started, bound_s = clock.now(), -math.inf

    def tell(phase: str) -> None:
        if progress is not None:
            progress(phase, trials.best_s, bound_s)

    search = JointSearch(graph, cluster, fixed, optimizer, limit_bytes,
                         lambda count: tell(f"{count} combination{'s' * (count != 1)} estimated"),
                         starts, wider_limits, by_hand, kept, bounding)
    least_s = min(max(LEAST_FULL_S, LEAST_FULL * time_limit_s), MOST_FULL_S)
    trials = _TrialPlans(in_full, search.estimate, tell, search.floor_s, least_s)
    trials.left += (*starts, *(other for start in starts for other in search.in_other_stages(start)))
    trials.sure |= {*starts}
    interrupted = False
    try:
        for share_of_estimates, share_of_trials in ROUNDS:
            spare = RESERVED if recompute_less is not None and trials.recomputing else 0.0
            survey = search.run(started + (share_of_estimates - spare) * time_limit_s)
            bound_s = survey.bound_s
            trials.add(survey.candidates)
            trials.run(started + (share_of_trials - spare) * time_limit_s)
            if (best := trials.fastest) is not None:
                trials.add(list(search.in_pairs(best, trials.plans[best].prediction)))
                trials.run(started + (share_of_trials - spare) * time_limit_s)
            search.know(trials.updated())
            search.known_s = min(search.known_s, trials.best_s)
        if recompute_less is not None:
            trials.recompute_less(recompute_less, started + FEWER_RECOMPUTED * time_limit_s)
        trials.search_on(started + time_limit_s, search.sparing if trials.best is None else ())
        if trials.best is not None:
            trials.plan_others(started + time_limit_s)
            search.known_s = min(search.known_s, trials.best_s)
            survey = search.bounded(survey, started + time_limit_s)
    except KeyboardInterrupt:
        if trials.best is None:
            raise
        interrupted = True
    if trials.best is None:
        raise trials.nearest or _nothing_found(survey, search.space, limit_bytes, time_limit_s)
    planned = len({candidate.key for candidate in trials.plans} & {candidate.key for candidate in survey.candidates})
    return JointResult(trials.best, survey, planned, tuple(trials.told(survey)), tuple(trials.runners_up()),
                       interrupted, _combination(trials.best) in trials.tried_less)


def _nothing_found(survey: Survey, space: CandidateSpace, limit_bytes: float, time_limit_s: float) -> InfeasibleError:
    """The error that says why there is no plan: no combination exists, none fits, or time ran out."""
    if survey.left:
        return InfeasibleError(f"no combination was planned within time_limit_s={time_limit_s:g}: give more time")
    if survey.pruned:
        error = InfeasibleError(
            f"none of {survey.pruned} combinations of pipeline, mesh and micro-batches fits in {limit_bytes:,.0f} "
            f"bytes: each needs more than {survey.least_bytes:,.0f} bytes ({bytes_str(survey.least_bytes)}) on a "
            "device (parameters, optimizer state and saved tensors, divided evenly). Raise memory_limit_bytes or use "
            "more devices.")
        error.needed_bytes = survey.least_bytes  # type: ignore[attr-defined]
        return error
    why = f" ({space.refused})" if space.refused else ""
    return InfeasibleError(f"no combination of pipeline, mesh and micro-batches on {space.cluster.num_devices} devices "
                           f"allows {space.fixed}{why}: fix fewer options")


def _needed_bytes(error: AutoparallelError) -> float:
    return float(getattr(error, "needed_bytes", math.inf))


def _combination(plan: Plan) -> tuple[object, ...]:
    """The combination that a plan has: mesh and step configuration, without stage cuts, recomputed blocks and buckets,
    which are chosen within it."""
    return plan.mesh_shape, replace(plan.hybrid, cuts=(), recompute_blocks=None, bucket_bytes=BUCKET_BYTES,
                                    fusion=BY_SIZE)


def _figures(plan: Plan) -> tuple[object, ...]:
    """Mesh, step time and peak memory, which combinations share that run the same program: ZeRO-1 and ZeRO-2 of one
    micro-batch, for example."""
    return plan.mesh_shape, round(plan.prediction.step_s, 9), round(plan.prediction.peak_bytes)


class _TrialPlans:
    """Trial plans of the whole model, in order of expected seconds. Estimates of ``sure`` candidates are seconds of
    whole plans.

    ``floor``: seconds that no plan of a candidate is below. ``least_s``: seconds of a full search, at least,
    where nothing fits.

    Expected seconds are the estimate times the ratio of trial plan to estimate seen with the same kind of pipeline: its
    stages (never quite equal, the less so the more there are), and what decides how much memory they take, also
    micro-batches, since a plan that is repaired to fit may take far longer. For a kind not tried yet it is the smallest
    ratio seen with other pipelines, at most `PIPELINE_EXCESS`; for candidates estimated with less memory it is 1. A
    candidate that fits as a reduced-depth model but not in full (a stage has more than its share) is estimated again
    with less memory.
    """

    def __init__(self, in_full: InFull, estimate: Callable[[Candidate, float], Candidate],
                 tell: Callable[[str], None] = lambda phase: None,
                 floor: Callable[[Candidate], float] = lambda candidate: 0.0, least_s: float = MOST_FULL_S) -> None:
        self.least_s = least_s
        self.in_full, self.estimate, self.tell, self.floor = in_full, estimate, tell, floor
        self.left: list[Candidate] = []
        self.best: Plan | None = None
        self.failure: AutoparallelError | None = None
        self.nearest: AutoparallelError | None = None
        self._nearest = (True, math.inf)
        self.trial_s: dict[Candidate, float] = {}
        self.plans: dict[Candidate, Plan] = {}
        self.ratios: dict[tuple[object, ...], float] = {}
        self.failed: dict[Hybrid, float] = {}
        #: Bytes of trial plans that did not fit.
        self.needed_bytes: dict[Combination, float] = {}
        self.sure = set[Candidate]()
        #: The combinations of plans that were tried with fewer recomputed blocks.
        self.tried_less = set[tuple[object, ...]]()

    def add(self, candidates: Sequence[Candidate]) -> None:
        """Add candidates that are not known, or are estimated to be faster than a ``sure`` one is; while none has a
        finite estimate, a few without one are taken."""
        sure_s = {c.key: c.estimate_s for c in self.left if c in self.sure}
        known = {c.key for c in self.trial_s} | ({c.key for c in self.left} - {*sure_s})
        new = [c for c in candidates if c.key not in known and not sure_s.get(c.key, math.inf) < c.estimate_s]
        self.left += [c for c in new if c.estimate_s < math.inf]
        if not self.left and not self.trial_s:
            self.left = new[:MOST_FAILED]

    def updated(self) -> Iterator[Candidate]:
        """Candidates with the seconds of their trial plans, or with estimates for less memory."""
        for candidate, seconds in self.trial_s.items():
            yield replace(candidate, estimate_s=seconds)
        yield from (c for c in self.left if c.room < 1.0)

    def told(self, survey: Survey) -> Iterator[Trial]:
        """The combinations for the report: planned for the whole model, and only estimated."""
        planned = {candidate.key for candidate in self.plans}
        failed = {candidate.key for candidate, seconds in self.trial_s.items() if seconds == math.inf}
        best = dict[object, tuple[Candidate, Plan]]()  # a combination may be planned more than once
        for candidate, made in self.plans.items():
            known = best.setdefault(candidate.key, (candidate, made))
            if made.prediction.step_s < known[1].prediction.step_s:
                best[candidate.key] = candidate, made
        for candidate, made in best.values():
            yield Trial(str(candidate), made.prediction.step_s, made.prediction.peak_bytes)
        for candidate in survey.candidates:
            if candidate.key not in planned and not candidate.is_bound and candidate.estimate_s < math.inf:
                yield Trial(str(candidate), candidate.estimate_s, estimated=True, too_large=candidate.key in failed)

    def runners_up(self) -> Iterator[Plan]:
        """The best plans of other combinations than the best plan's, best first, at most `MOST_KEPT`."""
        assert self.best is not None
        seen, same = {_combination(self.best)}, {_figures(self.best)}
        for made in sorted(self.plans.values(), key=lambda plan: plan.prediction.step_s):
            if _combination(made) not in seen and _figures(made) not in same and len(seen) <= MOST_KEPT:
                seen.add(_combination(made))
                same.add(_figures(made))
                yield made

    @property
    def fastest(self) -> Candidate | None:
        """The candidate of the best plan, with its strategies."""
        best = min(self.plans, key=lambda one: self.plans[one].prediction.step_s, default=None)
        return None if best is None else replace(best, first=self.plans[best].strategies_on)

    @property
    def planned(self) -> int:
        return len(self.trial_s)

    @property
    def best_s(self) -> float:
        return math.inf if self.best is None else self.best.prediction.step_s

    @staticmethod
    def _kind(candidate: Candidate) -> tuple[object, ...]:
        h = candidate.hybrid
        if h.stages == 1:
            return h.stages, h.schedule
        return (h.stages, h.pipeline_ranks, h.schedule, h.zero_stage == 3, h.recompute, candidate.mesh_shape,
                h.micro_batches)

    def expected_s(self, candidate: Candidate, excess: float = PIPELINE_EXCESS) -> float:
        """The expected seconds of a candidate's plan: those of its trial plan, if one fits. ``excess``: the assumed
        ratio of pipelines to their estimates, before the first trial plan of one."""
        trial_s = self.trial_s.get(candidate, math.inf)
        if trial_s < math.inf or candidate in self.sure:
            return trial_s if trial_s < math.inf else candidate.estimate_s
        pipelined = [ratio for (stages, *_), ratio in self.ratios.items() if stages != 1]
        typical = min(excess, *pipelined) if pipelined else excess
        typical = typical if candidate.hybrid.stages > 1 else 1.0
        ratio = self.ratios.get(self._kind(candidate), typical) if candidate.room == 1.0 else 1.0
        return candidate.estimate_s * ratio * self.failed.get(candidate.hybrid, 1.0)

    def search_on(self, deadline: float, sparing: Sequence[Candidate] = ()) -> None:
        """Search in full from the candidates that are expected to be within `SEARCH_ON` of the best, whether they have
        a trial plan or not, and whose bounds are below it; if none fits, as `search_sparing`."""
        self.search_sparing(sparing, deadline)
        searched = set[Candidate]()
        while self.best is not None and len(searched) < MOST_FULL:
            left = [*self.trial_s, *(c for c in self.left if c.first is not None)]
            left = [c for c in left if c not in searched and self.floor(c) < self.best_s]
            left_s = deadline - clock.now()
            if not left or left_s <= 0:
                break
            candidate = min(left, key=lambda c: (self.expected_s(c, 1.0), c.estimate_s))
            if self.expected_s(candidate, 1.0) > SEARCH_ON * self.best_s:
                break
            searched.add(candidate)
            first = self.plans[candidate].strategies_on if candidate in self.plans else candidate.first
            step_s = self.take(replace(candidate, first=first), max(WITH_A_PLAN * self.least_s, left_s))
            if candidate in self.left:
                self.left.remove(candidate)
                self.trial_s[candidate] = step_s

    def search_sparing(self, sparing: Sequence[Candidate], deadline: float) -> None:
        """Search in full until one fits: first those whose trial plans took the fewest bytes, then alternately the
        others with trial plans and the ``sparing`` ones, each in order. After the deadline at most `MOST_LATE` searches
        begin, which have the seconds of one; none where there was no time for any trial plan."""
        if not self.trial_s and clock.now() >= deadline:
            return
        known = {c.key: c for c in sorted(self.trial_s, key=lambda c: (self.expected_s(c, 1.0), c.estimate_s))}
        failed = sorted(self.needed_bytes, key=self.needed_bytes.__getitem__)
        in_turn = itertools.zip_longest(known, (c.key for c in sparing))
        late = 0
        for key in dict.fromkeys((*failed, *filter(None, itertools.chain(*in_turn)))):
            late += clock.now() >= deadline
            if self.best is not None or late > MOST_LATE:
                break
            candidate = known.get(key) or Candidate(*key)
            seconds = max(self.least_s / MOST_LATE, deadline - clock.now())
            self.trial_s[candidate] = self.take(candidate, seconds)

    def run(self, deadline: float) -> None:
        """Make trial plans until no candidate is expected to beat the best; the most promising, and if none fits, a few
        even after the deadline."""
        made = 0
        while self.left and self.planned < MOST_TRIALS:
            late = clock.now() >= deadline
            if late and self.best is None and self.planned >= MOST_FAILED:
                break
            promising = [c for c in self.left if self.best is None
                         or (self.expected_s(c, 1.0) < self.best_s and self.floor(c) < self.best_s)]
            if not promising:
                break
            candidate = min(promising, key=self.expected_s)
            if late and self.best is not None and (made or self.expected_s(candidate) >= self.best_s):
                break
            made += 1
            self.left.remove(candidate)
            step_s = self.take(candidate, TRIAL_S, "local") if candidate.first is not None else math.inf
            self.trial_s[candidate] = step_s
            if step_s == math.inf and (again := self._tighter(candidate)) is not None:
                self.left.append(again)
            elif step_s == math.inf:  # estimates may be too low on other meshes as well
                self.failed[candidate.hybrid] = FAILED_RATIO * self.failed.get(candidate.hybrid, 1.0)
            elif math.isfinite(candidate.estimate_s) and candidate not in self.sure:
                self.ratios[self._kind(candidate)] = step_s / candidate.estimate_s

    @property
    def recomputing(self) -> list[Candidate]:
        """Those whose plans would be the best if they recomputed nothing, fastest first; without those that recompute
        as few blocks as they can."""
        def is_hopeful(plan: Plan) -> bool:
            h, p = plan.hybrid, plan.prediction
            return h.recompute != "none" and h.recompute_blocks is None and p.step_s - p.recompute_s < self.best_s

        some = [candidate for candidate, plan in self.plans.items() if is_hopeful(plan)]
        return sorted(some, key=lambda candidate: self.plans[candidate].prediction.step_s)

    def recompute_less(self, of_plan: RecomputeLess, deadline: float) -> None:
        """Try the best trial plans with fewer recomputed blocks, if these could make one the best: the first, and up
        to `MOST_FEWER` until the deadline."""
        for tried, candidate in enumerate(self.recomputing[:MOST_FEWER]):
            if (tried and clock.now() >= deadline) or candidate not in self.recomputing:
                continue
            self.tried_less.add(_combination(self.plans[candidate]))
            share = (deadline - clock.now()) / (MOST_FEWER - tried)
            least_s = WITH_A_PLAN * self.least_s
            made = of_plan(self.plans[candidate], clock.now() + max(share, least_s), TRIAL_S, "local")
            self.tried_less.add(_combination(made))
            if made.prediction.step_s < self.plans[candidate].prediction.step_s:
                self._keep(candidate, made)
                self.trial_s[candidate] = made.prediction.step_s

    def plan_others(self, deadline: float) -> None:
        """With time left, make trial plans of the most promising of the rest, until `LEAST_KEPT` are kept."""
        rest = sorted((c for c in self.left if c.first is not None), key=self.expected_s)
        for candidate in rest[:MOST_FAILED]:
            left_s = deadline - clock.now()
            if left_s <= 0 or len(list(self.runners_up())) >= LEAST_KEPT:
                break
            self.left.remove(candidate)
            self.trial_s[candidate] = self.take(candidate, min(TRIAL_S, left_s), "local")

    def _tighter(self, candidate: Candidate) -> Candidate | None:
        """A candidate that did not fit, estimated with less memory; None if its need is unknown or too large, or if the
        estimate finds no plan."""
        error = self.failure if candidate.first is not None else None
        if not isinstance(error, NotRepairedError):
            return None
        room = candidate.room * error.limit_bytes / error.peak_bytes
        if room < LEAST_ROOM:
            return None
        again = self.estimate(replace(candidate, room=room), self.best_s)
        return again if again.first is not None and again.estimate_s < math.inf else None

    def take(self, candidate: Candidate, seconds: float, *search: str) -> float:
        """Plan a candidate for the whole model, with the configuration of its trial plan if it has one; returns the
        step's seconds (inf: no plan that fits was found). An interrupt that ended its search with a plan goes on."""
        again = candidate
        if candidate in self.plans:
            h = self.plans[candidate].hybrid    # recomputed blocks belong to the stages that they were chosen in
            again = replace(candidate, hybrid=h if h.recompute_blocks else replace(h, cuts=candidate.hybrid.cuts))
        try:
            made = self.in_full(again, seconds, *search)
        except (InfeasibleError, SearchError) as error:
            self.failure = error
            if isinstance(error, NotRepairedError):
                self.needed_bytes[candidate.key] = error.peak_bytes
            found = bool(search), _needed_bytes(error)    # trial plans do not tell how much is enough
            if self.nearest is None or found < self._nearest:
                self.nearest, self._nearest = error, found
            return math.inf
        self._keep(candidate, made)
        if INTERRUPTED in made.evidence.stop_reason:
            raise KeyboardInterrupt
        return made.prediction.step_s

    def _keep(self, candidate: Candidate, made: Plan) -> None:
        if made.prediction.step_s < self.best_s:
            self.best = made
        self.plans[candidate] = replace(made, study=None, recorder=None)
        count = len({c.key for c in self.plans})
        self.tell(f"{count} combination{'s' * (count > 1)} planned in full")
