"""Lower bounds of a step from the decision graph of a combination: what must be computed, sent, updated and recomputed.

The graph is that of the reduced-depth model, with all overlap that is possible: ops take the device alone, hidden
communication takes what it slows compute by. Its optimum, by elimination, is below every plan; so is that with a price
on memory, less the price of the room (`memory_bounds`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autoparallel import clock
from autoparallel.errors import InfeasibleError
from autoparallel.planning.bound_kinds import Kind, sends_on
from autoparallel.planning.candidate_bounds import CandidateBounds
from autoparallel.planning.candidates import Candidate, Combination
from autoparallel.planning.found_bounds import Found, FoundBounds, Work
from autoparallel.planning.least_in_flight import least_in_flight
from autoparallel.planning.memory_bounds import least_fitting_s
from autoparallel.planning.recompute import kinds_of
from autoparallel.planning.reduced_model import ReducedModel
from autoparallel.plans import Hybrid
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer, equal_stages_s
from autoparallel.pricing.prediction import fixed_s
from autoparallel.pricing.step_cost import Exposed
from autoparallel.schedule.step_config import RECOMPUTE
from autoparallel.schedule.tiers import ON_DEVICE
from autoparallel.search.high_width.bound_filter import bound_without_limit
from autoparallel.search.low_width.bucket_elimination import Eliminator
from autoparallel.search.low_width.solve import elimination_cells
from autoparallel.search.model.problem import FORBIDDEN, Node, Problem, repeats
from cost_models import Cluster

#: Cells of an elimination beyond which messages bound the graph, which takes less time and is weaker.
MOST_CELLS = 1e8
#: A step with ZeRO-3 takes no less than its compute, nor than its communication of parameters; nor than a mean of both,
#: in which the latter has this weight.
SENT = 0.75


class StepBounds:
    """Lower bounds of a combination's steps: of all its plans, and of its plans that recompute every block.

    ``prices_of(micro_batches, pipeline_ranks, mesh_shape, cache)``: unit costs on the reduced-depth model, of the
    device alone (``cache``: with so many times its cache). ``micro_batches(pipeline_ranks)``:
    numbers of micro-batches that are tried. Before `tighten`, bounds are those of ops divided evenly.
    """

    def __init__(self, reduced_model: ReducedModel, cluster: Cluster, even: CandidateBounds,
                 prices_of: Callable[[int, int, tuple[int, ...], float], Prices],
                 micro_batches: Callable[[int], Sequence[int]]) -> None:
        self.reduced_model, self.cluster, self.even = reduced_model, cluster, even
        self.prices_of, self.micro_batches = prices_of, micro_batches
        self.found = FoundBounds()
        #: By numbers of micro-batches, pipeline ranks and copies.
        self._divisors: dict[tuple[int, int, int], list[int]] = {}
        #: By pipeline ranks.
        self._largest: dict[int, int] = {}
        #: By combination, and whether all its blocks are recomputed: its bound, and how many bounds of its mesh there
        #: were then.
        self._steps: dict[tuple[Combination, bool], tuple[int, float]] = {}

    def tighten(self, candidate: Candidate, best_s: float = FORBIDDEN, fully: bool = True) -> bool:
        """Bound the combination's decision graph, or one that is no more, unless that is done; returns whether it is
        new. Takes about 0.1 s. Not ``fully``: none that bounds this combination alone.

        Its own graph comes last, and before it those that bound other ZeRO stages, too: of the fewest micro-batches
        that divide its own, and of its own. No step of a divisor takes longer, but for what stays in the cache: the
        first such step is bounded as one of all its multiples, and so is any above ``best_s``. After the graphs memory
        has a price.
        """
        kind = Kind.of(candidate)
        fewest, own = kind.least(self._fewer(kind)[0]), kind.least(kind.micro_batches)
        if fewest != own and fewest not in self.found.more:
            self._bound_more(fewest)
            return True
        for one in (own, *([kind] if fully else [])):
            if one not in self.found.work:
                self._bound(one, best_s)
                return True
        if not fully or not self._has_memory(candidate) or self.found.work[kind].alone_s == math.inf:
            return False
        for key in self._of_memory(candidate):
            if key not in self.found.fitting:
                self.found.note(Found("fitting", key, self._least_fitting_s(candidate, str(key[-1]), best_s)))
                return True
        return False

    @staticmethod
    def _of_memory(candidate: Candidate) -> list[tuple[object, ...]]:
        """The bounds with priced memory that hold for a combination: of any recompute ("any"), and its own."""
        h = candidate.hybrid
        return [(Kind.of(candidate), h.schedule, h.stages, recompute) for recompute in ("any", h.recompute)]

    def _has_memory(self, candidate: Candidate) -> bool:
        """Whether memory is limited, all that a combination keeps from forward to backward is on its devices, and each
        of its ranks has its own stages, as `least_in_flight` counts."""
        h = candidate.hybrid
        return (self.even.limit_of(candidate) < math.inf and h.saved_on == "device" and h.offload == ON_DEVICE
                and not h.on_host and not h.replicas and not h.by_rank)

    def _fewer(self, kind: Kind) -> list[int]:
        """Numbers of micro-batches that divide the kind's, and that itself, ascending."""
        key = kind.micro_batches, kind.pipeline_ranks, kind.copies
        if key not in self._divisors:
            counts = {*self.micro_batches(kind.pipeline_ranks), kind.micro_batches}
            self._divisors[key] = sorted(m for m in counts if kind.micro_batches % m == 0 and m % kind.copies == 0)
        return self._divisors[key]

    def _most(self, kind: Kind) -> int:
        """The most micro-batches for which a bound of kinds with more micro-batches holds."""
        ranks = kind.pipeline_ranks
        if ranks not in self._largest:
            self._largest[ranks] = max(self.micro_batches(ranks))
        return max(kind.micro_batches, self._largest[ranks])

    def _bound(self, kind: Kind, best_s: float) -> None:
        try:
            work = self._least_work(kind)
        except InfeasibleError:    # the model computes across samples, as batch norm does
            self.found.note(Found("work", kind, Work(math.inf, math.inf, 1.0)))
            return
        self.found.note(Found("work", kind, work))
        if kind.zero_stage:
            return
        if self.cluster.profile is None:
            self.found.note(Found("more", kind, work))
        elif work.alone_s / kind.pipeline_ranks >= best_s and kind not in self.found.more:
            self._bound_more(kind)

    def _bound_more(self, kind: Kind) -> None:
        """Bound the steps of a kind, and of kinds with a multiple of its micro-batches."""
        try:
            work = self._least_work(kind, self._most(kind) / kind.micro_batches)
        except InfeasibleError:
            work = Work(math.inf, math.inf, 1.0)
        self.found.note(Found("more", kind, work))

    def step_s(self, candidate: Candidate) -> float:
        """Seconds that no plan of the combination is below, though it may recompute as few blocks as memory allows."""
        return self._once(candidate, False, self._least_step_s)

    def _once(self, candidate: Candidate, whole: bool, bound_s: Callable[[Candidate], float]) -> float:
        """A bound, which is worked out again where others of its mesh were found."""
        key, found = (candidate.key, whole), self.found.of_mesh[candidate.mesh]
        known = self._steps.get(key)
        if known is None or known[0] != found:
            self._steps[key] = known = found, bound_s(candidate)
        return known[1]

    def _least_step_s(self, candidate: Candidate) -> float:
        work_s = self._known_work_s(candidate, 1.0)
        if work_s == math.inf:
            return work_s
        return self._step_s(candidate, self.even.forced_again_s(candidate, work_s))

    def estimate_s(self, candidate: Candidate) -> float:
        """Seconds that no plan of the combination is below if all blocks are recomputed as it says (where it names
        blocks, as many as memory forces)."""
        if candidate.hybrid.recompute_blocks is not None:
            return self.step_s(candidate)
        return self._once(candidate, True, lambda one: self._step_s(one, self.even.again_s(one)))

    def _known_work_s(self, candidate: Candidate, longer: float) -> float:
        """Seconds on one rank of a pipeline in which all micro-batches take ``longer`` times as long."""
        kind, even_s = Kind.of(candidate), self.even.work_s(candidate)
        known = [self.found.work.get(one) for one in (kind, kind.least(kind.micro_batches))]
        known += [self.found.more.get(one) for one in map(kind.least, self._fewer(kind))
                  if kind.micro_batches <= self._most(one)]
        return max([longer * even_s, *(work.at(longer, even_s) for work in known if work is not None)])

    def _step_s(self, candidate: Candidate, again_s: float) -> float:
        """Seconds of a step: the longer of computing (the work of a rank and its waits for messages, or its launches if
        they take longer, the bubble of an even pipeline, and what the optimizer takes longer on the host than on the
        devices) and of fetching parameters before the host's step; and what no op takes."""
        h = candidate.hybrid
        longer = h.pipeline_ranks * equal_stages_s(h, 1.0)
        update = self.even.host_update(h)
        launched_s = equal_stages_s(h, h.micro_batches * self.even.launches_s)
        known = self.found.fitting
        fitting_s = max(known.get(key, 0.0) for key in self._of_memory(candidate)) if known else 0.0
        worked_s = max(self._known_work_s(candidate, longer) + longer * again_s, fitting_s)
        worked_s += longer * self.even.sends_s(candidate)
        computing_s = max(worked_s / h.pipeline_ranks, launched_s) + update.more_s
        return fixed_s(self.cluster, h) + max(computing_s, self.even.fetch_s(h) + update.whole_s)

    def _other_than_ops_s(self, candidate: Candidate) -> float:
        """Seconds of a step that its ops do not take, on any rank."""
        h = candidate.hybrid
        sent_s = equal_stages_s(h, self.even.sends_s(candidate))
        return fixed_s(self.cluster, h) + sent_s + self.even.host_update(h).more_s

    def _least_work(self, kind: Kind, cache: float = 1.0) -> Work:
        """The optima of a kind's graph on a device with ``cache`` times its cache. With so many times the micro-batches
        each tensor is so many times smaller at least, and finds no more of itself in the cache."""
        clock.did("combinations judged")
        prices = self.prices_of(kind.micro_batches, kind.pipeline_ranks, kind.mesh_shape, cache)
        inside, stands_for = self.reduced_model.inside(prices.space), self.reduced_model.counts(prices.space)
        counts = ExecutionCounts(prices.space, kind.hybrid, multiplicities=stands_for)
        limited = self.cluster.profile is None or cache == 1.0
        pricer = SpacePricer(prices, counts=counts, exposed=kind.least_exposed(prices, limited=limited))
        found = _least_work(with_free_ends(pricer.without_memory(), stands_for, inside), counts.of_parameter, kind)
        if kind.zero_stage < 3 or found.alone_s == math.inf:
            return found
        sent = pricer.exposing(kind.least_exposed(prices, SENT / (1 - SENT), limited))
        problem = with_free_ends(sent.without_memory(), stands_for, inside)
        return found._replace(sent_s=(1 - SENT) * _least_s(problem, Eliminator.of(problem)))

    def _least_fitting_s(self, candidate: Candidate, recompute: str, best_s: float) -> float:
        """The seconds on one rank, as long as they are in its pipeline, of those of a combination's plans that fit and
        are faster than ``best_s``, each of whose blocks recomputes nothing or so (or as it likes, "any")."""
        clock.did("combinations judged")
        h, kind = candidate.hybrid, Kind.of(candidate)
        most_s = best_s - self._other_than_ops_s(candidate)
        prices = self.prices_of(h.micro_batches, h.pipeline_ranks, candidate.mesh_shape, 1.0)
        space, longer = prices.space, h.pipeline_ranks * equal_stages_s(h, 1.0)
        several, some = [count > 1 for count in self.reduced_model.counts(space)], {"none", *kinds_of(h)}
        if (held := self._least_held(candidate, prices, most_s)) is None:
            return most_s * h.pipeline_ranks
        ways = [self._way(prices, replace(kind.hybrid, recompute=one), held,
                          kind.least_exposed(prices, recomputed=one != "none"), longer - 1)
                for one in RECOMPUTE[:-1] if one in some or recompute == "any"]
        several += [True] * (len(ways[0].nodes) - len(several))    # copies, which are read by one block
        found = least_fitting_s(ways, several, len(space), h.pipeline_ranks * self.even.limit_of(candidate))
        return min(found, most_s * h.pipeline_ranks)

    def _way(self, prices: Prices, hybrid: Hybrid, held: Sequence[float], exposed: Exposed, more: float) -> Problem:
        inside, stands_for = self.reduced_model.inside(prices.space), self.reduced_model.counts(prices.space)
        counts = ExecutionCounts(prices.space, hybrid, multiplicities=stands_for, held=held,
                                 recomputing=prices.recomputing)
        pricer = SpacePricer(prices, counts=counts, exposed=exposed)
        return _longer(with_free_ends(pricer.of_uses(), stands_for, inside), counts.of_parameter, more)

    def _least_held(self, candidate: Candidate, prices: Prices, most_s: float) -> list[float] | None:
        """By decision, the least number of its values that all ranks hold together between forward and backward (of one
        micro-batch at a time, without a pipeline), where the stages take ``most_s`` seconds at most; None: they take
        longer.

        In a pipeline what blocks send to others does not count.
        """
        space, h = prices.space, candidate.hybrid
        counts = self.reduced_model.counts(space)
        if h.pipeline_ranks == 1:
            return list(map(float, counts))
        block_s, fewest = _repeated_block_s(prices, counts), float(self.even.least_in_flight(h).min())
        of_blocks = least_in_flight(h, most_s / block_s) if 0 < block_s < math.inf else fewest
        if of_blocks == math.inf:
            return None
        of_blocks, fewest = of_blocks / h.copies, fewest / h.copies    # `Kind.hybrid` has so many at a time
        return [float(count) if decision.kind in ("parameter", "buffer", "input") else
                0.0 if sends_on(space, decision.index) else count * (of_blocks if count > 1 else fewest)
                for decision, count in zip(space.decisions, counts, strict=True)]


def _repeated_block_s(prices: Prices, counts: Sequence[int]) -> float:
    """A lower bound of one micro-batch's seconds in blocks for which one of the reduced-depth model stands (of several
    such, the fewest; infinite without any)."""
    found = dict[str, float]()
    for decision, count in zip(prices.space.decisions, counts, strict=True):
        if decision.kind == "op" and count > 1 and (block := prices.space.blocks[decision.index]):
            price = prices.op_of(decision.index)
            found[block] = found.get(block, 0.0) + count * float((price.forward_s + price.backward_s).min())
    return min(found.values(), default=math.inf)


def _least_work(problem: Problem, of_parameter: Sequence[bool], kind: Kind) -> Work:
    """The optima of a problem without a memory limit: as it is, and where the kind's micro-batches take longest."""
    eliminator = Eliminator.of(problem)
    alone_s = _least_s(problem, eliminator)
    if not kind.filling or alone_s == math.inf:
        return Work(alone_s, alone_s, 1.0)
    longest_s = _least_s(_longer(problem, of_parameter, kind.filling), eliminator)
    return Work(alone_s, longest_s, 1 + kind.filling)


def _longer(problem: Problem, of_parameter: Sequence[bool], more: float) -> Problem:
    """A problem, without a limit, in which what each micro-batch does takes ``more`` times as many seconds in addition.
    ``of_parameter``: by node, whether it is of parameters, whose seconds (of communication and updates) count once."""
    once = np.zeros(len(problem.nodes), bool)
    once[: len(of_parameter)] = of_parameter
    each = ~np.concatenate([once, once[problem.ends[:, 0]]])
    return problem.with_costs(problem.costs.priced(problem.costs, more * each), FORBIDDEN)


def _least_s(problem: Problem, eliminator: Eliminator) -> float:
    """The optimum of a problem without a memory limit, or a bound of it where that takes long."""
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


__all__ = ["StepBounds", "with_free_ends"]
