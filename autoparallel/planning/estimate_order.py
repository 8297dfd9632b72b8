"""The order in which the joint search estimates its candidates: the most promising first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from autoparallel import clock
from autoparallel.planning.candidates import Candidate
from autoparallel.schedule.step_config import RECOMPUTE

#: Largest change of log(estimate / bound) per step between candidates; the ratio of candidates that do not fit.
SPREAD, UNFIT = 0.25, 4.0
#: Steps between ZeRO-3 and other stages, whose ratios say little about each other.
FAR = 3.0


class EstimateOrder:
    """The order of estimates: by expected seconds, bound times expected ratio of estimate to bound.

    The ratio (communication, uneven division) is similar for similar candidates. Each factor of two in ranks, axes or
    micro-batches, and each other difference, is one step; log(ratio) changes by at most `SPREAD` per step. Before any
    estimate, unusual candidates (`CandidateBounds.oddity`) are expected to be expensive. ``tighten`` makes the bounds
    (``floor``) of a candidate, and of others on the same mesh, higher if they are not yet, and says whether it did.
    """

    def __init__(self, candidates: Sequence[Candidate], floor: Callable[[Candidate], float],
                 oddity: Callable[[Candidate], float], least_bytes: Callable[[Candidate], float],
                 tighten: Callable[[Candidate], bool] = lambda candidate: False) -> None:
        self.candidates, self.floor, self.least_bytes, self.tighten = list(candidates), floor, least_bytes, tighten
        self.bytes = np.array([least_bytes(c) for c in self.candidates])
        self.floors = np.array([floor(c) for c in self.candidates])
        self.coordinates = np.array([_coordinates(c) for c in self.candidates])
        self.excess = SPREAD * np.array([oddity(c) for c in self.candidates])
        meshes = dict[object, int]()
        self.meshes = np.array([meshes.setdefault(mesh_of(c), len(meshes)) for c in self.candidates])
        self.open = np.ones(len(self.candidates), bool)

    def next(self, best_s: float, patience: float, deadline: float = math.inf) -> Candidate | None:
        """The open candidate with the least expected seconds, whose bound is as high as it can be made; None if all
        bounds exceed ``best_s``, or all expected seconds ``patience`` times that, or at ``deadline`` (of `clock`)."""
        while clock.now() < deadline:
            expected = np.where(self.open & (self.floors < best_s), self.floors * np.exp(self.excess), math.inf)
            if min(expected, default=math.inf) >= patience * best_s:
                break
            candidate = self.candidates[number := int(expected.argmin())]
            if not self.tighten(candidate):
                self.open[number] = False
                return candidate
            for other in np.flatnonzero(self.open & (self.floors < best_s) & (self.meshes == self.meshes[number])):
                self.floors[other] = self.floor(self.candidates[other])
        return None

    def learn(self, candidate: Candidate) -> None:
        """Update expected ratios by an estimate. One that does not fit counts as `UNFIT`, for candidates that need as
        much memory or more."""
        if not len(self.candidates):
            return
        steps = np.abs(self.coordinates - np.array(_coordinates(candidate))).sum(axis=1)
        excess = math.log(min(candidate.estimate_s / self.floor(candidate), UNFIT)) - SPREAD * steps
        equivalent = (candidate.estimate_s < math.inf) | (self.bytes >= self.least_bytes(candidate))
        self.excess = np.where(equivalent, np.maximum(self.excess, excess), self.excess)


def mesh_of(candidate: Candidate) -> tuple[int, tuple[int, ...]]:
    """The pipeline's ranks and the mesh of a stage."""
    return candidate.hybrid.pipeline_ranks, candidate.mesh_shape


def _coordinates(candidate: Candidate) -> tuple[float, ...]:
    """Coordinates in which each difference is one step (ZeRO-3 is `FAR` from other stages)."""
    h, shape = candidate.hybrid, candidate.mesh_shape
    inner = shape[-1] if len(shape) > 1 else 1
    sizes = (h.pipeline_ranks, h.stages / h.pipeline_ranks, h.micro_batches, inner)
    return (*(math.log2(n) for n in sizes), FAR * (h.zero_stage == 3), float(RECOMPUTE.index(h.recompute)),
            float(h.pipelining.splits_backward))
