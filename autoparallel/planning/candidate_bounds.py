"""Lower bounds of a candidate's memory and seconds, from the program's ops divided evenly over all devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import cached_property

from autoparallel.planning.candidates import Candidate
from autoparallel.planning.reduced_model import ReducedModel
from autoparallel.plans import Hybrid
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer, equal_stages_s
from autoparallel.pricing.prediction import fixed_s
from autoparallel.schedule.in_flight import in_flight
from autoparallel.schedule.tiers import Offload
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster


class CandidateBounds:
    """Lower bounds for the candidates of one program of ``batch`` samples; ``limit_bytes``: memory of one device."""

    def __init__(self, reduced_model: ReducedModel, cluster: Cluster, optimizer: str, limit_bytes: float, batch: int
                 ) -> None:
        self.reduced_model, self.cluster, self.optimizer = reduced_model, cluster, optimizer
        self.limit, self.batch = limit_bytes, batch
        #: By recompute mode, of which there are four, and tier of states.
        self._live: dict[tuple[str, Offload], Mapping[tuple[str, bool], float]] = {}
        #: By number of shards, of which candidates have a few dozen.
        self._least: dict[int, tuple[float, float]] = {}

    def least_bytes(self, candidate: Candidate) -> float:
        """A lower bound of peak bytes: state and tensors live between forward and backward, divided evenly over all
        devices."""
        h = candidate.hybrid
        kept = self._kept(h)
        chunks = range(0, h.stages, h.pipeline_ranks)
        copies = sum(in_flight(h, stage) for stage in chunks) / len(chunks)
        always = kept["state", True] / h.pipeline_ranks + kept["state", False]
        copies = 0.0 if h.recompute == "offload" else copies  # they are in the host's memory
        micro_batches = (
            kept["micro_batch", True] * copies / h.pipeline_ranks + kept["micro_batch", False]
        ) / h.micro_batches
        return (always + micro_batches) / math.prod(candidate.mesh_shape)

    def floor(self, candidate: Candidate) -> float:
        """A lower bound of the estimate, in seconds: each op of the batch divided evenly over the devices of its stage,
        without communication and launched ahead of time; and the time of a step that no op takes."""
        h = candidate.hybrid
        forward, backward = self._least_compute(h.micro_batches * math.prod(candidate.mesh_shape))
        again = 2.0 if h.recompute == "full" else 1.0
        ops_s = equal_stages_s(h, h.micro_batches * (again * forward + backward))
        return ops_s + fixed_s(self.cluster, h)

    def oddity(self, candidate: Candidate) -> float:
        """How unusual a candidate is, in factors of two: an inner axis that is not a host, fewer samples per
        micro-batch than shards of them, and (weight 4) a memory bound above half the limit. It only sets the initial
        order."""
        shape, host = candidate.mesh_shape, self.cluster.devices_per_host
        inner = shape[-1] if len(shape) > 1 or shape[0] <= host else 1
        samples, shards = self.batch / candidate.hybrid.micro_batches, math.prod(shape) / inner
        factors = (2 * self.least_bytes(candidate) / self.limit, shards / samples)
        full, few = (math.log2(max(1.0, factor)) for factor in factors)
        return abs(math.log2(inner / min(host, math.prod(shape)))) + few + 4 * full

    def _kept(self, hybrid: Hybrid) -> Mapping[tuple[str, bool], float]:
        """Bytes of the whole program that live between forward and backward, by ("state" or "micro_batch", whether
        inside blocks)."""
        key = hybrid.recompute, hybrid.offload
        if key not in self._live:
            space = self._whole
            inside = self.reduced_model.inside(space)
            pricer = SpacePricer(self._whole_prices(1), counts=ExecutionCounts(
                space, Hybrid(recompute=hybrid.recompute, offload=hybrid.offload,
                              zero_stage=3 if hybrid.offload.parameters else 2),
                multiplicities=self.reduced_model.counts(space)))
            found = dict.fromkeys(itertools.product(("state", "micro_batch"), (True, False)), 0.0)
            for decision, node in zip(space.decisions, pricer.full().nodes, strict=True):
                if node.interval[0] <= len(space) < node.interval[1]:
                    state = decision.kind in ("parameter", "buffer")
                    count = pricer.counts.multiplicities[decision.index]
                    found["state" if state else "micro_batch", inside[decision.index]] += count * float(
                        node.usages.min()
                    )
            self._live[key] = found
        return self._live[key]

    def _least_compute(self, shards: int) -> tuple[float, float]:
        """Seconds (forward, backward) of the program's ops, each divided evenly into ``shards``."""
        if shards not in self._least:
            space, found, prices = self._whole, [0.0, 0.0], self._whole_prices(shards)
            for decision in space.decisions:
                if decision.kind == "op":
                    count = self.reduced_model.stands_for.get(decision.name, 1)
                    apart = prices.host_and_device(decision.index)
                    price = prices.op_of(decision.index) if apart is None else apart[1]  # of the device alone
                    found[0] += count * float(price.forward_s.min())
                    found[1] += count * float(price.backward_s.min())
            self._least[shards] = (found[0], found[1])
        return self._least[shards]

    @cached_property
    def _whole(self) -> StrategySpace:
        """The strategy graph of the whole batch on one device."""
        return StrategySpace(self.reduced_model.graph, (1,))

    def _whole_prices(self, spread: int) -> Prices:
        return Prices(self._whole, self.cluster, self.optimizer, stages=self.cluster.num_devices, spread=spread)
