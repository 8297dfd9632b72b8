"""Lower bounds of the joint search's combinations, raised by a background task, the least first (`planning.beside`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from autoparallel import clock
from autoparallel.planning.beside import Beside, Task
from autoparallel.planning.candidates import Candidate, CandidateSpace, Combination
from autoparallel.planning.found_bounds import Found
from autoparallel.planning.step_bounds import StepBounds
from autoparallel.pricing.redistribution_costs import keep_apart


class Known(NamedTuple):
    """What the search tells: seconds of the best step that it knows; combinations whose neighbours are tried too, and
    others that are; decision graphs that it has bounded itself. ``ends_s``: the time at which bounding ends, from which
    on only the least bound of all is raised."""

    best_s: float
    around: tuple[Candidate, ...] = ()
    others: tuple[Candidate, ...] = ()
    found: tuple[Found, ...] = ()
    ends_s: float = math.inf


class Bounding:
    """The search's side: it sends its best step and its combinations, and receives bounds. A context manager.

    ``begin``: what is bounded, made anew (`JointSearch.to_bound`).
    """

    def __init__(self, begin: Callable[[], tuple[CandidateSpace, StepBounds]]) -> None:
        self._beside = Beside(partial(_bounds, begin))
        self._told, self._around, self._best_s = set[Combination](), set[Combination](), math.inf
        self._found = list[Found]()

    def __enter__(self) -> Bounding:
        self._beside.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._beside.__exit__(*raised)

    def best(self, best_s: float) -> None:
        """The best step that is known."""
        if best_s < self._best_s:
            self._best_s = best_s
            self._beside.tell(Known(best_s))
        self._found += [one for some in self._beside.hear() for one in some]

    def around(self, candidate: Candidate) -> None:
        """The neighbours of a combination are tried, too."""
        if candidate.key not in self._around:    # though it may have been told of itself
            self._around.add(candidate.key)
            self._beside.tell(Known(self._best_s, around=(_bare(candidate),)))

    def others(self, candidates: Iterable[Candidate]) -> None:
        """Combinations that are not among those and the first ones."""
        new = tuple(_bare(c) for c in candidates if c.key not in self._told)
        if new:
            self._told.update(c.key for c in new)
            self._beside.tell(Known(self._best_s, others=new))

    def found(self, found: Sequence[Found]) -> None:
        """Graphs that the search has bounded itself."""
        if found:
            self._beside.tell(Known(self._best_s, found=tuple(found)))

    def hear(self) -> list[Found]:
        """What was found since the last call."""
        self.best(self._best_s)
        found, self._found = self._found, []
        return found

    def last(self, best_s: float, ends_s: float) -> list[Found]:
        """What is still found until a time of the search's clock, at most, while it waits."""
        self._beside.tell(Known(min(best_s, self._best_s), ends_s=ends_s))
        self._found += [one for some in self._beside.last() for one in some]
        return self.hear()


def _bare(candidate: Candidate) -> Candidate:
    return replace(candidate, first=None)


class _Bounds:
    """The bounds of all combinations that are tried and may fit, as high as they are known to be."""

    def __init__(self, space: CandidateSpace, step_bounds: StepBounds) -> None:
        self.space, self.step_bounds = space, step_bounds
        self.best_s, self.ends_s = math.inf, math.inf
        self.candidates: dict[Combination, Candidate] = {}
        self.seconds, self.meshes, self.done = np.zeros(0), np.zeros(0, np.int64), np.zeros(0, bool)
        self._numbers = dict[object, int]()
        self.add(space.first_round())

    def add(self, candidates: Iterable[Candidate]) -> None:
        new = {c.key: c for c in candidates
               if c.key not in self.candidates and self.step_bounds.even.may_fit(c)}
        self.candidates |= new
        self.seconds = np.append(self.seconds, [self.step_bounds.step_s(c) for c in new.values()])
        numbers = [self._numbers.setdefault(c.mesh, len(self._numbers)) for c in new.values()]
        self.meshes = np.append(self.meshes, np.array(numbers, np.int64))
        self.done = np.append(self.done, np.zeros(len(new), bool))
        self._all = list(self.candidates.values())

    def hear(self, known: Known) -> None:
        if self.best_s == math.inf > known.best_s:
            self.done[:] = False    # memory has a price only beside a step that is known
        self.best_s, self.ends_s = min(self.best_s, known.best_s), min(self.ends_s, known.ends_s)
        for candidate in known.around:
            self.add(self.space.around(candidate))
        self.add(known.others)
        for mesh in self.step_bounds.found.take(known.found):
            self._again(mesh)

    def _again(self, mesh: object) -> None:
        for at in np.flatnonzero(self.meshes == self._numbers.get(mesh, -1)).tolist():
            self.seconds[at] = self.step_bounds.step_s(self._all[at])

    def raised(self) -> bool:
        """Bound one more decision graph, that of the least bound which can be raised; returns whether there is one."""
        ending = self.ends_s < math.inf
        while True:
            seconds = self.seconds if ending else np.where(self.done, math.inf, self.seconds)
            at = int(seconds.argmin()) if len(seconds) else 0
            if not len(seconds) or seconds[at] >= self.best_s or seconds[at] == math.inf or (ending and self.done[at]):
                return False
            if self.step_bounds.tighten(self._all[at], self.best_s, fully=self.best_s < math.inf):
                self._again(self._all[at].mesh)
                return True
            self.done[at] = True


def _bounds(begin: Callable[[], tuple[CandidateSpace, StepBounds]]) -> Task:
    """The work beside the search: each piece is a decision graph that is bounded, or memory that is priced there."""
    keep_apart()
    bounds = _Bounds(*begin())
    found = tuple[tuple[Found, ...], ...]()
    idle = False
    while True:
        for known in (yield None if idle else found):
            bounds.hear(known)
        if clock.now() >= bounds.ends_s:
            return
        idle = not bounds.raised()
        if idle and bounds.ends_s < math.inf:
            return
        found = () if idle else (tuple(bounds.step_bounds.found.new()),)


__all__ = ["Bounding"]
