"""The joint search: pipeline, mesh, micro-batches, ZeRO, recompute and sharding together.

Of the combinations with the best estimates, what their sketches do is done in the whole model (a draft), until no
estimate left is better than the best draft; the search goes on from that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from autoparallel.capture import OpGraph
from autoparallel.errors import AutoparallelError, InfeasibleError, SearchError
from autoparallel.planning.joint_candidates import Candidate, Fixed, JointSearch, Survey
from autoparallel.plans import Hybrid, Plan
from autoparallel.search import NotRepairedError
from cost_models import Cluster

LEAST_FULL_S = 10.0
#: Until which share of the time there are estimates, and drafts, the first and the second time.
ROUNDS = ((0.4, 0.6), (0.75, 0.85))
MOST_DRAFTS, MOST_FAILED, FAILED_RATIO, PIPELINE_EXCESS, DRAFT_S = 40, 8, 1.5, 1.15, 2.0
#: A candidate that is expected to take so many times as long as the best plan is not searched on.
SEARCH_ON = 1.02
#: What a sketch is given of the memory at least, where plans in full need more than sketches say.
LEAST_ROOM = 0.5


@dataclass(frozen=True)
class JointResult:
    """The best plan, what was looked at, and how many were planned in full."""

    plan: Plan
    survey: Survey
    planned: int


class InFull(Protocol):
    """Plans a candidate for the whole model, from what its sketch found on: by a search named, or the user's."""

    def __call__(self, candidate: Candidate, seconds: float, search: str = ...) -> Plan: ...


def search_jointly(
    graph: OpGraph, cluster: Cluster, fixed: Fixed, optimizer: str, limit_bytes: float, time_limit_s: float,
    in_full: InFull,
) -> JointResult:
    """Estimate all combinations, make drafts of the best until no estimate left beats the best draft, both once more
    with what the drafts turned out to be, and search on from the best.

    A draft does in each block what the sketch's did, made to fit. Raises InfeasibleError when nothing fits.
    """
    started = time.monotonic()
    search = JointSearch(graph, cluster, fixed, optimizer, limit_bytes)
    drafts = _Drafts(in_full, search.estimate)
    for share_of_estimates, share_of_drafts in ROUNDS:
        survey = search.run(started + share_of_estimates * time_limit_s)
        drafts.add(survey.candidates)
        drafts.run(started + share_of_drafts * time_limit_s)
        search.known.update({c.key: c for c in drafts.learnt()})
    for candidate in drafts.in_order():
        left = started + time_limit_s - time.monotonic()
        if drafts.best is not None and (left <= 0 or drafts.expected_s(candidate) > SEARCH_ON * drafts.best_s):
            break
        drafts.take(candidate, max(LEAST_FULL_S, left))
    if drafts.best is None:
        raise drafts.nearest or _nothing_found(survey, fixed, cluster, limit_bytes, time_limit_s)
    return JointResult(drafts.best, survey, drafts.planned)


def _nothing_found(survey: Survey, fixed: Fixed, cluster: Cluster, limit_bytes: float, time_limit_s: float
                   ) -> InfeasibleError:
    """Why no combination came as far as a plan: there is none, none fits, or there was no time."""
    if survey.left:
        return InfeasibleError(f"no combination was planned within time_limit_s={time_limit_s:g}: give more time")
    if survey.pruned:
        error = InfeasibleError(
            f"none of {survey.pruned} combinations of pipeline, mesh and micro-batches fits in {limit_bytes:,.0f} "
            f"bytes: each needs more than {survey.least_bytes:,.0f} bytes on a device (parameters, optimizer state and "
            "what backward needs, cut evenly). Raise memory_limit_bytes or use more devices.")
        error.needed_bytes = survey.least_bytes  # type: ignore[attr-defined]
        return error
    asked = {name: value for name, value in vars(fixed).items() if value not in (None, ())}
    return InfeasibleError(f"no combination of pipeline, mesh and micro-batches on {cluster.num_devices} devices goes "
                           f"with {', '.join(f'{name}={value!r}' for name, value in asked.items())}: fix less of it")


def _needed_bytes(error: AutoparallelError) -> float:
    return float(getattr(error, "needed_bytes", math.inf))


class _Drafts:
    """Plans of the whole model, those first that are expected to be best: by their estimate, times what plans of their
    kind of pipeline turned out to be over theirs. (Stages are never quite equal, and the more of them the less.) Of a
    kind of pipeline not tried yet the least that others turned out to be over theirs is expected, and at first
    `PIPELINE_EXCESS`; of what was given less room nothing more. What a sketch says fits, and in full does not (some
    stage has more than its share), is estimated again with as much less room."""

    def __init__(self, in_full: InFull, estimate: Callable[[Candidate, float], Candidate]) -> None:
        self.in_full, self.estimate = in_full, estimate
        self.left: list[Candidate] = []
        self.best: Plan | None = None
        self.failure: AutoparallelError | None = None
        self.nearest: AutoparallelError | None = None
        self.drafted: dict[Candidate, float] = {}
        self.plans: dict[Candidate, Plan] = {}
        self.ratios: dict[tuple[int, int, str], float] = {}
        self.failed: dict[Hybrid, float] = {}

    def add(self, candidates: Sequence[Candidate]) -> None:
        """More to make drafts of; while none has an estimate that fits, a few of those that have none."""
        known = {c.key for c in (*self.drafted, *self.left)}
        new = [c for c in candidates if c.key not in known]
        self.left += [c for c in new if c.estimate_s < math.inf]
        if not self.left and not self.drafted:
            self.left = new[:MOST_FAILED]

    def learnt(self) -> Iterator[Candidate]:
        """Candidates with the seconds of their drafts, or with estimates for less room."""
        for candidate, seconds in self.drafted.items():
            yield replace(candidate, estimate_s=seconds)
        yield from (c for c in self.left if c.room < 1.0)

    @property
    def planned(self) -> int:
        return len(self.drafted)

    @property
    def best_s(self) -> float:
        return math.inf if self.best is None else self.best.prediction.step_s

    @staticmethod
    def _kind(candidate: Candidate) -> tuple[int, int, str]:
        h = candidate.hybrid
        return h.stages, h.pipeline_ranks, h.schedule

    def expected_s(self, candidate: Candidate, excess: float = PIPELINE_EXCESS) -> float:
        """Seconds of the plan of a candidate: of its draft, where there is one that fits. ``excess``: by what pipelines
        exceed their estimates, before there is a draft of any."""
        drafted = self.drafted.get(candidate, math.inf)
        if drafted < math.inf:
            return drafted
        pipelined = [ratio for (stages, *_), ratio in self.ratios.items() if stages > 1]
        typical = min(pipelined, default=excess) if candidate.hybrid.stages > 1 else 1.0
        ratio = self.ratios.get(self._kind(candidate), typical) if candidate.room == 1.0 else 1.0
        return candidate.estimate_s * ratio * self.failed.get(candidate.hybrid, 1.0)

    def in_order(self) -> Iterator[Candidate]:
        """What was drafted, with its draft, the best first; what did not come to fit last."""
        for c in sorted(self.drafted, key=lambda c: (self.drafted[c], c.estimate_s)):
            yield replace(c, first=self.plans[c].strategies_on) if c in self.plans else c

    def run(self, deadline: float) -> None:
        """Drafts, until none is expected to beat the best; without one that fits, a few when time is up too."""
        while self.left and self.planned < MOST_DRAFTS:
            if time.monotonic() >= deadline and (self.best is not None or self.planned >= MOST_FAILED):
                break
            promising = [c for c in self.left if self.best is None or self.expected_s(c, 1.0) < self.best_s]
            if not promising:
                break
            candidate = min(promising, key=self.expected_s)
            self.left.remove(candidate)
            step_s = self.take(candidate, DRAFT_S, "local") if candidate.first is not None else math.inf
            self.drafted[candidate] = step_s
            if step_s == math.inf and (again := self._tighter(candidate)) is not None:
                self.left.append(again)
            elif step_s == math.inf:  # on other meshes it may need more than sketches say too
                self.failed[candidate.hybrid] = FAILED_RATIO * self.failed.get(candidate.hybrid, 1.0)
            elif math.isfinite(candidate.estimate_s):
                self.ratios[self._kind(candidate)] = step_s / candidate.estimate_s

    def _tighter(self, candidate: Candidate) -> Candidate | None:
        """What was just found not to fit, estimated so that it should; None where that is not known, or comes to
        nothing."""
        error = self.failure if candidate.first is not None else None
        if not isinstance(error, NotRepairedError):
            return None
        room = candidate.room * error.limit_bytes / error.peak_bytes
        if room < LEAST_ROOM:
            return None
        again = self.estimate(replace(candidate, room=room), self.best_s)
        return again if again.first is not None and again.estimate_s < math.inf else None

    def take(self, candidate: Candidate, seconds: float, *search: str) -> float:
        """Plan it, with the stages of its draft if it has one; returns its seconds (inf: none that fits was found)."""
        again = candidate
        if candidate in self.plans:
            again = replace(candidate, hybrid=replace(self.plans[candidate].hybrid, cuts=candidate.hybrid.cuts))
        try:
            made = self.in_full(again, seconds, *search)
        except (InfeasibleError, SearchError) as error:
            self.failure = error
            self.nearest = min(self.nearest or error, error, key=_needed_bytes)
            return math.inf
        if made.prediction.step_s < self.best_s:
            self.best = made
        self.plans[candidate] = replace(made, study=None)
        return made.prediction.step_s
