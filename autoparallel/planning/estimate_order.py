"""The order in which the joint search estimates its candidates: the most promising first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from autoparallel import clock
from autoparallel.planning.candidates import Candidate, Mesh

#: Mean of log(estimate / bound) for each factor of two of `oddity`. Standard deviations: of the
#: constant, of the slope along a coordinate, of the Laplacian kernel (its length scale is `REACH` steps), of the noise
#: of an estimate and of a plan by hand.
UNUSUAL, LEVEL, SLOPE, CURVE, REACH, NOISE, BY_HAND = 0.12, 1.0, 0.15, 0.4, 4.0, 0.05, 0.15
#: How many times as long as the estimate of its combination a plan by hand is expected to take. (Of two combinations of
#: Llama-3-405B 1.02 and 1.10.)
SLOWER = 1.07
#: Standard deviations below the mean at which a candidate is expected (a lower confidence bound).
HOPE = 0.5
#: Factor on the expected seconds of a candidate like one that did not fit; its logarithm decays over `REACH` steps, and
#: counts by the probability of not fitting before that is known. That is 1/2 at `HALF_FULL`, the lower bound of memory
#: as a share of the limit; `STEEP`: the exponent (of 531 combinations of DeepSeek-V3 47 % at 0.3 to 0.4, nearly all at
#: 0.6).
UNFIT, HALF_FULL, STEEP = 4.0, 0.38, 6.0
#: Steps between ZeRO-3 and other stages, whose ratios say little about each other.
FAR = 3.0
#: Steps between kinds of recompute.
_AGAIN = {"none": 0.0, "selective": 1.0, "all_but_attention": 1.5, "full": 2.0, "offload": 3.0}


def inner_ranks(mesh_shape: Sequence[int], devices_of_host: int) -> int:
    """The ranks of a mesh's inner axis; 1 of a mesh of one axis that is larger than a host."""
    return mesh_shape[-1] if len(mesh_shape) > 1 or mesh_shape[0] <= devices_of_host else 1


def oddity(candidate: Candidate, devices_of_host: int, batch: int) -> float:
    """How unusual a candidate is, in factors of two: an inner axis that is not a host, fewer samples per micro-batch
    than shards of them, parameters that are gathered for each of several micro-batches."""
    h, shape = candidate.hybrid, candidate.mesh_shape
    inner = inner_ranks(shape, devices_of_host)
    few = math.log2(max(1.0, math.prod(shape) / inner * h.micro_batches / max(1, batch)))
    again = math.log2(h.micro_batches // h.copies) if h.zero_stage == 3 else 0.0
    return abs(math.log2(inner / min(devices_of_host, math.prod(shape)))) + few + again


class Ratios:
    """Expected ratios of estimate to lower bound, by regression on known ratios.

    log(ratio) is a Gaussian process over ``coordinates`` (candidates, dims); Rasmussen and Williams 2006, algorithm
    2.1. Its mean is ``prior`` (by candidate); its covariance a constant, a linear kernel and a Laplacian kernel. Each
    observation adds a row to the inverse of the covariance's Cholesky factor, so that n take n^2 operations each, not
    n^3."""

    def __init__(self, coordinates: np.ndarray, prior: np.ndarray) -> None:
        self.coordinates, self.prior = coordinates, prior
        self._middle = coordinates.mean(axis=0) if len(coordinates) else 0.0
        self._points = np.empty((0, coordinates.shape[-1]))
        self._inverse = np.empty((0, 0))                     # of the lower Cholesky factor
        self._columns = np.empty((0, len(coordinates)))      # the inverse times covariances with the candidates
        self._residuals = np.empty(0)                        # the inverse times residuals
        self._mean = np.zeros(len(coordinates))
        offsets = (coordinates - self._middle)**2
        self._variance = LEVEL**2 + CURVE**2 + SLOPE**2 * offsets.sum(axis=-1)

    def learn(self, point: np.ndarray, prior: float, log_ratio: float, noise: float) -> None:
        """Add an observation at ``point``, whose prior mean is ``prior``; ``noise``: its standard deviation."""
        row, count = self._inverse @ self._covariance(self._points, point), len(self._points)
        deviation = math.sqrt(float(self._covariance(point, point)) + noise**2 - float(row @ row))
        inverse = np.zeros((count + 1, count + 1))
        inverse[:count, :count] = self._inverse
        inverse[count] = np.append(-row @ self._inverse, 1.0) / deviation
        column = (self._covariance(self.coordinates, point) - row @ self._columns) / deviation
        residual = (log_ratio - prior - float(row @ self._residuals)) / deviation
        self._inverse, self._points = inverse, np.vstack([self._points, point])
        self._columns, self._residuals = np.vstack([self._columns, column]), np.append(self._residuals, residual)
        self._mean += column * residual
        self._variance -= column**2

    def _covariance(self, points: np.ndarray, other: np.ndarray) -> np.ndarray:
        linear = ((points - self._middle) * (other - self._middle)).sum(axis=-1)
        decaying = np.exp(-np.abs(points - other).sum(axis=-1) / REACH)
        return np.asarray(LEVEL**2 + SLOPE**2 * linear + CURVE**2 * decaying)

    def expected(self) -> np.ndarray:
        """By candidate, the logarithm of the ratio, `HOPE` standard deviations below its mean."""
        if not len(self._points):
            return self.prior
        return np.asarray(self.prior + self._mean - HOPE * np.sqrt(np.maximum(self._variance, 0.0)))


class EstimateOrder:
    """The order of estimates: by expected seconds, bound (``floor``) times expected ratio of estimate to bound.

    The ratio (communication, uneven division) is similar for similar candidates (`Ratios`). Each factor of two in
    ranks, axes or micro-batches, and each other difference, is one step. Before any estimate, unusual candidates
    (``oddity_of``: `oddity`) are expected to be expensive, and full ones (``fullness``) not to fit.
    ``tighten`` makes the bounds of a candidate, and of others on the same mesh, higher if they are not yet, and says
    whether it did.
    """

    def __init__(self, candidates: Sequence[Candidate], floor: Callable[[Candidate], float],
                 oddity_of: Callable[[Candidate], float], fullness: Callable[[Candidate], float],
                 tighten: Callable[[Candidate], bool] = lambda candidate: False) -> None:
        self.candidates, self.floor, self.tighten = list(candidates), floor, tighten
        self.oddity_of, self.fullness_of = oddity_of, fullness
        self.fullness = np.array([fullness(c) for c in self.candidates])
        self.floors = np.array([floor(c) for c in self.candidates])
        self.coordinates = np.array([_coordinates(c) for c in self.candidates])
        self.ratios = Ratios(self.coordinates, np.array([self._prior(c) for c in self.candidates]))
        self.unfit = math.log(UNFIT) / (1 + (HALF_FULL / np.maximum(self.fullness, 1e-6)) ** STEEP)
        self.fits = np.zeros(len(self.candidates))    # 1: another that fits tells that it does
        self.meshes = dict[Mesh, int]()
        self.on_mesh = np.array([self.meshes.setdefault(c.mesh, len(self.meshes)) for c in self.candidates])
        self.open = np.ones(len(self.candidates), bool)
        self._excess: np.ndarray | None = None

    def _prior(self, candidate: Candidate) -> float:
        return UNUSUAL * self.oddity_of(candidate)

    @property
    def excess(self) -> np.ndarray:
        """By candidate, the expected logarithm of the ratio of estimate to bound, with what memory may add."""
        if self._excess is None:
            self._excess = self.ratios.expected() + self.unfit * (1 - self.fits)
        return self._excess

    def next(self, best_s: float, patience: float, deadline: float = math.inf,
             hear: Callable[[], set[Mesh]] = set) -> Candidate | None:
        """The open candidate with the least expected seconds, whose bound is as high as it can be made; None if all
        bounds exceed ``best_s``, or all expected seconds ``patience`` times that, or at ``deadline`` (of `clock`).
        ``hear``: on which meshes bounds were raised elsewhere."""
        while clock.now() < deadline:
            for mesh in hear():
                self._bounded_again(self.meshes.get(mesh, -1), best_s)
            expected = np.where(self.open & (self.floors < best_s), self.floors * np.exp(self.excess), math.inf)
            if min(expected, default=math.inf) >= patience * best_s:
                break
            candidate = self.candidates[number := int(expected.argmin())]
            if not self.tighten(candidate):
                self.open[number] = False
                return candidate
            self._bounded_again(int(self.on_mesh[number]), best_s)
        return None

    def _bounded_again(self, mesh: int, best_s: float) -> None:
        for other in np.flatnonzero(self.open & (self.floors < best_s) & (self.on_mesh == mesh)):
            self.floors[other] = self.floor(self.candidates[other])

    def leave_length(self, pipeline_ranks: int) -> None:
        """Leave out all candidates of a pipeline length."""
        for (ranks, _), number in self.meshes.items():
            if ranks == pipeline_ranks:
                self.open[self.on_mesh == number] = False

    def learn(self, candidate: Candidate, noise: float = NOISE, fits: bool = False) -> None:
        """Update expected ratios by an estimate (``noise``: standard deviation of its logarithm; ``fits``: it has a
        plan that fits). Where none fits, or only one that takes `UNFIT` times its bound, `UNFIT` times as much is
        expected of candidates that need as much memory or more. Where one fits, nothing is added for candidates whose
        memory fits too, if it exceeds their bounds by as much."""
        if not len(self.candidates):
            return
        self._excess, point = None, np.array(_coordinates(candidate))
        fullness, estimate_s, floor_s = self.fullness_of(candidate), candidate.estimate_s, self.floor(candidate)
        near = np.exp(-(np.abs(self.coordinates - point).sum(axis=1) / REACH) ** 2)
        if estimate_s == math.inf or estimate_s >= UNFIT * floor_s:
            self.unfit = np.maximum(self.unfit, (self.fullness >= fullness) * math.log(UNFIT) * near)
            return
        self.ratios.learn(point, self._prior(candidate), math.log(estimate_s / floor_s), noise)
        if fits:
            more = max(0.0, candidate.filled - fullness)
            self.fits = np.maximum(self.fits, (self.fullness + more <= max(1.0, fullness + more)) * near)


def _coordinates(candidate: Candidate) -> tuple[float, ...]:
    """Coordinates in which each difference is one step (ZeRO-3 is `FAR` from other stages)."""
    h, shape = candidate.hybrid, candidate.mesh_shape
    inner = shape[-1] if len(shape) > 1 else 1
    sizes = (h.pipeline_ranks, h.stages / h.pipeline_ranks, h.micro_batches, inner)
    return (*(math.log2(n) for n in sizes), FAR * (h.zero_stage == 3), _AGAIN[h.recompute],
            float(h.pipelining.splits_backward))
