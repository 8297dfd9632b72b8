"""Lower bounds of a step from the decision graph of a combination: what must be computed, sent, updated and recomputed.

The graph is that of the reduced-depth model, without a memory limit, with all overlap that is possible: ops take the
device alone, hidden communication takes what it slows compute by. Its optimum, by elimination, is below every plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from autoparallel.errors import InfeasibleError
from autoparallel.planning.candidate_bounds import CandidateBounds
from autoparallel.planning.candidates import Candidate
from autoparallel.planning.reduced_model import ReducedModel
from autoparallel.plans import Hybrid
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer, equal_stages_s
from autoparallel.pricing.prediction import fixed_s
from autoparallel.pricing.step_cost import Exposed
from autoparallel.search.high_width.bound_filter import bound_without_limit
from autoparallel.search.low_width.bucket_elimination import Eliminator
from autoparallel.search.low_width.solve import elimination_cells
from autoparallel.search.model.problem import FORBIDDEN, Node, Problem, repeats
from cost_models import Cluster

#: Cells of an elimination beyond which messages bound the graph, which takes less time and is weaker.
MOST_CELLS = 1e8


class Kind(NamedTuple):
    """What the decision graph of a combination depends on: other schedules, stages per rank and recompute share its
    bound. ``per_use``: parameters are gathered for each use (ZeRO-3)."""

    micro_batches: int
    pipeline_ranks: int
    mesh_shape: tuple[int, ...]
    per_use: bool
    copies: int

    @classmethod
    def of(cls, candidate: Candidate) -> Kind:
        h = candidate.hybrid
        return cls(h.micro_batches, h.pipeline_ranks, candidate.mesh_shape, h.zero_stage == 3, h.copies)

    @property
    def hybrid(self) -> Hybrid:
        """The step configuration with the fewest executions; its pipeline is priced as one stage."""
        return Hybrid(self.micro_batches, zero_stage=3 if self.per_use else 1, copies=self.copies)


class StepBounds:
    """Lower bounds of a combination's steps: of all its plans, and of its plans that recompute every block.

    ``prices_of(micro_batches, pipeline_ranks, mesh_shape, cached)``: unit costs on the reduced-depth model, of the
    device alone (``cached``: as if all element-wise traffic stayed in its cache). ``micro_batches(pipeline_ranks)``:
    numbers of micro-batches that are tried. Before `tighten`, bounds are those of ops divided evenly.
    """

    def __init__(self, reduced_model: ReducedModel, cluster: Cluster, even: CandidateBounds,
                 prices_of: Callable[[int, int, tuple[int, ...], bool], Prices],
                 micro_batches: Callable[[int], Sequence[int]]) -> None:
        self.reduced_model, self.cluster, self.even = reduced_model, cluster, even
        self.prices_of, self.micro_batches = prices_of, micro_batches
        #: Seconds of all micro-batches of the whole model on one rank, by kind (a few hundred floats); and the same as
        #: a bound of kinds with more micro-batches, too.
        self._work_s: dict[Kind, float] = {}
        self._more_s: dict[Kind, float] = {}
        #: By numbers of micro-batches, pipeline ranks and copies.
        self._divisors: dict[tuple[int, int, int], list[int]] = {}

    def tighten(self, candidate: Candidate, best_s: float = FORBIDDEN) -> bool:
        """Bound the combination's decision graph, or one that is no more, unless that is done; returns whether it is
        new. Takes about 0.1 s.

        Without ZeRO-3 a step takes no longer, and with fewer micro-batches that divide these, none takes longer but for
        what stays in the cache: where such a step is above ``best_s``, it is bounded without that too.
        """
        kind = Kind.of(candidate)
        for per_use in sorted({False, kind.per_use}):
            for count in self._fewer(kind):
                one = kind._replace(micro_batches=count, per_use=per_use)
                if one not in self._work_s:
                    self._bound(one, best_s)
                    return True
        return False

    def _fewer(self, kind: Kind) -> list[int]:
        """Numbers of micro-batches that divide the kind's, and that itself, ascending."""
        key = kind.micro_batches, kind.pipeline_ranks, kind.copies
        if key not in self._divisors:
            counts = {*self.micro_batches(kind.pipeline_ranks), kind.micro_batches}
            self._divisors[key] = sorted(m for m in counts if kind.micro_batches % m == 0 and m % kind.copies == 0)
        return self._divisors[key]

    def _bound(self, kind: Kind, best_s: float) -> None:
        try:
            problem, prices = self._problem(kind, cached=False)
        except InfeasibleError:    # the model computes across samples, as batch norm does
            self._work_s[kind] = math.inf
            return
        self._work_s[kind] = _least_s(problem)
        if prices.cluster.profile is None:
            self._more_s[kind] = self._work_s[kind]
        elif self._work_s[kind] / kind.pipeline_ranks >= best_s:
            self._more_s[kind] = _least_s(self._problem(kind, cached=True)[0])

    def step_s(self, candidate: Candidate) -> float:
        """Seconds that no plan of the combination is below, though it may recompute as few blocks as memory allows."""
        work_s = self._known_work_s(candidate)
        if work_s == math.inf:
            return work_s
        return self._step_s(candidate, work_s, self.even.forced_again_s(candidate, work_s))

    def estimate_s(self, candidate: Candidate) -> float:
        """Seconds that no plan of the combination is below if all blocks are recomputed as it says (where it names
        blocks, as many as memory forces)."""
        if candidate.hybrid.recompute_blocks is not None:
            return self.step_s(candidate)
        return self._step_s(candidate, self._known_work_s(candidate), self.even.again_s(candidate))

    def _known_work_s(self, candidate: Candidate) -> float:
        kind = Kind.of(candidate)
        kinds = [kind._replace(per_use=per_use) for per_use in sorted({False, kind.per_use})]
        known = [self._work_s.get(one, 0.0) for one in kinds]
        known += [self._more_s.get(one._replace(micro_batches=count), 0.0)
                  for one, count in itertools.product(kinds, self._fewer(kind))]
        return max(self.even.work_s(candidate), *known)

    def _step_s(self, candidate: Candidate, work_s: float, again_s: float) -> float:
        """Seconds of a step: the longer of computing (the work of a rank, or its launches if they take longer, the
        bubble of an even pipeline, and what the optimizer takes longer on the host than on the devices) and of fetching
        parameters before the host's step; and what no op takes."""
        h, even_s = candidate.hybrid, self.even.work_s(candidate)
        once_s = (work_s - even_s) / h.pipeline_ranks
        update = self.even.host_update(h)
        launched_s = equal_stages_s(h, h.micro_batches * self.even.launches_s)
        computing_s = max(equal_stages_s(h, even_s + again_s) + once_s, launched_s) + update.more_s
        return fixed_s(self.cluster, h) + max(computing_s, self.even.fetch_s(h) + update.whole_s)

    def _problem(self, kind: Kind, cached: bool) -> tuple[Problem, Prices]:
        prices = self.prices_of(kind.micro_batches, kind.pipeline_ranks, kind.mesh_shape, cached)
        inside, stands_for = self.reduced_model.inside(prices.space), self.reduced_model.counts(prices.space)
        counts = ExecutionCounts(prices.space, kind.hybrid, multiplicities=stands_for)
        pricer = SpacePricer(prices, counts=counts, exposed=self._least_exposed(kind, prices))
        return with_free_ends(pricer.without_memory(), stands_for, inside), prices

    def _least_exposed(self, kind: Kind, prices: Prices) -> Exposed:
        """The shares of communication that count even where all of it overlaps with compute: by what it slows compute.
        Of n streams that overlap at a time, an n-th counts."""
        profile = self.cluster.profile
        share = (prices.device.overlap_slowdown - 1) / len(kind.mesh_shape)
        hidden = 1.0 if profile is None else profile.hide_data
        left = 1 - hidden * (1 - share)
        if profile is None or profile.overlaps_activations:
            return Exposed(left, left, share)
        of_activations = 1 - profile.hide_tensor    # the software hides a share of its own
        return Exposed(left, left, left * of_activations if kind.copies > 1 else of_activations)


def _least_s(problem: Problem) -> float:
    """The optimum of a problem without a memory limit, or a bound of it where that takes long."""
    eliminator = Eliminator.of(problem)
    if elimination_cells(eliminator, problem) <= MOST_CELLS:
        return eliminator.solve(problem.costs)[0]
    return bound_without_limit(problem)


def with_free_ends(problem: Problem, multiplicities: Sequence[int], inside: Sequence[bool]) -> Problem:
    """The problem in which a block that stands for several need not lie as its neighbours do, so that the optimum is no
    more than that of the model, whose blocks may differ from one another.

    ``multiplicities``, ``inside``: by node, how many it stands for, and whether it is in a block. What such a block
    reads of another (and another of it) is read from a copy of the value that costs nothing.
    """
    several, block = np.array(multiplicities) > 1, np.array(inside)
    source, target = problem.ends.T
    between = block[source] & block[target] & (several[source] != several[target])
    if not between.any():
        return problem
    made, sources = list[Node](), source.tolist()
    place = dict[int, int]()
    for edge in np.flatnonzero(between).tolist():
        of = sources[edge]
        if of not in place:
            place[of] = len(problem.nodes) + len(made)
            node = problem.nodes[of : of + 1][0]
            made.append(Node(f"{node.name}:copy", np.where(node.costs < FORBIDDEN, 0.0, FORBIDDEN),
                             np.zeros(len(node.costs)), (0, 0), node.strategies))
        sources[edge] = place[of]
    return Problem(repeats(problem.nodes).followed_by(made), repeats(problem.edges).but(source=sources),
                   problem.limit, problem.name)


__all__ = ["Kind", "StepBounds", "with_free_ends"]
