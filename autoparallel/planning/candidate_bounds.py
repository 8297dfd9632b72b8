"""Lower bounds of a candidate's memory and seconds, from the program's ops divided evenly over all devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autoparallel.capture.outputs import loss_output
from autoparallel.partition import bytes_at_cuts
from autoparallel.planning.baselines import expert_parameters
from autoparallel.planning.candidates import Candidate, Combination
from autoparallel.planning.recompute import kinds_of
from autoparallel.planning.reduced_model import ReducedModel
from autoparallel.plans import Hybrid
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer
from autoparallel.pricing.parameter_prices import parameter_update_s
from autoparallel.pricing.stage_devices import paces_of
from autoparallel.pricing.unit_costs import OpPrice
from autoparallel.schedule.in_flight import in_flight
from autoparallel.schedule.step_config import without_recompute
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster, collectives

#: Halvings of the seconds of a pipeline's slowest rank.
BISECTIONS = 40


class HostUpdate(NamedTuple):
    """Lower bounds of the seconds of the optimizer's step on the host (``whole_s``), and of its seconds beyond those of
    the same step on the devices (``more_s``)."""

    whole_s: float
    more_s: float


class CandidateBounds:
    """Lower bounds for the candidates of one program of ``batch`` samples; ``limit_bytes``: memory of one device,
    ``most_bytes``: of the largest, which counts for stages of a pipeline (default: as much); ``tier_limits``: bytes for
    each device of the host's memory, and of disk."""

    def __init__(self, reduced_model: ReducedModel, cluster: Cluster, optimizer: str, limit_bytes: float, batch: int,
                 most_bytes: float | None = None, tier_limits: tuple[float, float] = (math.inf, math.inf)) -> None:
        self.reduced_model, self.cluster, self.optimizer = reduced_model, cluster, optimizer
        self.limit, self.batch = limit_bytes, batch
        self.tier_limits: Mapping[str, float] = dict(zip(("host", "disk"), tier_limits, strict=True))
        self._most = limit_bytes if most_bytes is None else most_bytes
        #: By recompute mode, of which there are four, tier of states, and tables on the host.
        self._live: dict[tuple[object, ...], Mapping[tuple[str, bool], float]] = {}
        #: By number of shards, of which candidates have a few dozen; the next also by recompute mode.
        self._least: dict[int, tuple[float, float]] = {}
        self._again: dict[tuple[str, int], float] = {}
        self._saved: dict[tuple[object, ...], float] = {}
        #: By tier of states, and tables on the host; the next also by recompute mode.
        self._updates: dict[tuple[object, ...], HostUpdate] = {}
        self._fetches: dict[tuple[object, ...], float] = {}
        #: By pipeline and micro-batches, of which candidates have a few hundred.
        self._in_flight: dict[tuple[object, ...], np.ndarray] = {}
        #: By what `forced_again_s` depends on, which candidates share that differ in their ZeRO stage.
        self._forced: dict[tuple[object, ...], float] = {}
        self._bytes: dict[tuple[Combination, float], float] = {}
        #: By stages, micro-batches and mesh.
        self._sends: dict[tuple[object, ...], float] = {}
        self._at_cuts: tuple[list[float], float] | None = None

    def least_bytes(self, candidate: Candidate, times: float = 1.0) -> float:
        """A lower bound of peak bytes, were activations ``times`` as large: state and tensors live between forward and
        backward, divided evenly over the devices of a stage, and over the ranks of a pipeline so that the fullest has
        the least. Kept by combination.

        Let rank r take d_r bytes for all blocks, and e_r bytes of what lies outside of blocks, E together. Of the
        blocks it takes at most the share (L - e_r) / d_r, if no rank exceeds L bytes; these shares add up to 1 or more,
        so that L is at least (1 + E / max d) / sum(1 / d).
        """
        key = candidate.key, times
        if key not in self._bytes:
            self._bytes[key] = _even_bytes(candidate, self._kept(candidate.hybrid),
                                           self.least_in_flight(candidate.hybrid), times)
        return self._bytes[key]

    def limit_of(self, candidate: Candidate) -> float:
        """Bytes that no device of the candidate may exceed."""
        return self._most if candidate.hybrid.pipeline_ranks > 1 else self.limit

    def fullness(self, candidate: Candidate) -> float:
        """The bound of its memory as a share of what no device may exceed; or, if that is more, a lower bound of what
        blocks save in another tier for a device, divided as in `least_bytes`, as a share of that tier's limit."""
        h, here = candidate.hybrid, self.least_bytes(candidate) / self.limit_of(candidate)
        if (limit := self.tier_limits.get(h.saved_on, math.inf)) == math.inf:
            return here
        key = h.recompute, h.saved_on, h.offload, h.on_host, h.cached
        if key not in self._saved:
            pricer = self._whole_pricer(h, h.recompute, h.saved_on)
            self._saved[key] = sum(
                pricer.counts.multiplicities[decision.index] * float(pricer.costs.decision_bytes(decision.index).min())
                for decision in pricer.space.decisions if pricer.counts.offloads(decision.index).there)
        saved = self._saved[key] / h.micro_batches / math.prod(candidate.mesh_shape)
        return max(here, float(saved / (1 / self.least_in_flight(h)).sum()) / max(limit, 1.0))

    def may_fit(self, candidate: Candidate, times: float = 1.0) -> bool:
        """Whether the bound of its memory does not rule the candidate out, were activations ``times`` as large."""
        return self.least_bytes(candidate, times) <= self.limit_of(candidate)

    def work_s(self, candidate: Candidate) -> float:
        """A lower bound of the seconds of all micro-batches of the whole model on one rank: each op divided evenly over
        the devices of a stage, without communication, recompute and the host's launches."""
        micro_batches = candidate.hybrid.micro_batches
        return micro_batches * sum(self._least_compute(micro_batches * math.prod(candidate.mesh_shape)))

    @cached_property
    def launches_s(self) -> float:
        """A lower bound of the seconds in which a host launches the ops in blocks of one micro-batch, forward and
        backward: as many on shards as on whole tensors. The rest may be launched in the fixed time of a micro-batch."""
        profile = self.cluster.profile
        if profile is None:
            return 0.0
        prices, slower = self._whole_prices(1).of_host(), profile.kernel_backward_s / profile.kernel_s
        counts = self.reduced_model.counts(self._whole)
        each = [(counts[decision.index], prices.op_of(decision.index)) for decision in self._whole.decisions
                if decision.kind == "op" and self._whole.blocks[decision.index]]
        return sum(count * float((price.forward_s + slower * price.backward_s).min()) for count, price in each)

    def sends_s(self, candidate: Candidate) -> float:
        """A lower bound of the seconds in which the ranks of a pipeline, together, wait for messages at its cuts. Both
        ranks at a cut wait for one message a micro-batch, of a value divided evenly over the devices of a stage. The
        cuts are those of the model that send the fewest bytes, each once."""
        h, devices = candidate.hybrid, math.prod(candidate.mesh_shape)
        if h.stages == 1 or h.replicas:
            return 0.0
        key = h.stages, h.micro_batches, candidate.mesh
        if key not in self._sends:
            network = self.cluster.group((h.pipeline_ranks, *candidate.mesh_shape), 0, devices=())
            if self._at_cuts is None:
                self._at_cuts = _bytes_at_cuts(self._whole, self.reduced_model.inside(self._whole))
            ends, inside = self._at_cuts
            least = np.sort([*ends, *[inside] * (h.stages - 1)])[: h.stages - 1] / h.micro_batches / devices
            sent_s = np.where(least > 0, collectives.send_recv_s(least, network), 0.0)
            self._sends[key] = 2 * h.micro_batches * float(sent_s.sum())
        return self._sends[key]

    def again_s(self, candidate: Candidate, recompute: str | None = None) -> float:
        """As `work_s`, of the recompute of all blocks: the ops that run again, each divided evenly. ``recompute``: its
        kind (default: the candidate's)."""
        h, recompute = candidate.hybrid, recompute or candidate.hybrid.recompute
        if recompute in ("none", "offload"):
            return 0.0
        key = recompute, h.micro_batches * math.prod(candidate.mesh_shape)
        if key not in self._again:
            prices = self._least_prices(key[1])
            counts = ExecutionCounts(self._whole, Hybrid(recompute=recompute),
                                     recomputing=self._whole_prices(1).recomputing)
            again = [prices[index] for index in counts.blocks.runs_again if index in prices]
            self._again[key] = sum(count * float(price.forward_s.min()) for count, price in again)
        return h.micro_batches * self._again[key]

    def forced_again_s(self, candidate: Candidate, work_s: float) -> float:
        """A lower bound of the seconds of recompute, on one rank for all, that memory forces on any plan of the
        combination; without it the ``work_s`` seconds would be shared evenly by the ranks of the pipeline.

        Of n shares of the model a rank holds state, and tensors saved by the shares k <= n that it does not recompute.
        The ranks are given as many shares as they can do in equal time, the least in which all are done.
        """
        h = candidate.hybrid
        again_s = self.again_s(candidate, kinds_of(h)[0])    # which takes the fewest seconds; its own, the fewest bytes
        if not again_s or h.replicas:
            return 0.0
        devices, limit = math.prod(candidate.mesh_shape), self.limit_of(candidate)
        key = (h.recompute, h.saved_on, h.offload, h.on_host, h.cached, _flight_of(h), devices, limit, work_s)
        if key not in self._forced:
            kept = self._kept(without_recompute(h)), self._kept(h)
            self._forced[key] = _forced_s(h, devices, limit, kept, self.least_in_flight(h), again_s, work_s)
        return self._forced[key]

    def host_update(self, hybrid: Hybrid) -> HostUpdate:
        """A lower bound of the optimizer's step on the host: of states that are divided evenly over all devices."""
        key = hybrid.offload, hybrid.on_host, hybrid.cached
        if key not in self._updates:
            whole_s = more_s = 0.0
            pricer = self._whole_pricer(hybrid, hybrid.recompute)
            counts, prices, devices = pricer.counts, pricer.prices, self.cluster.num_devices
            for decision in pricer.space.decisions:
                if not (away := counts.away[decision.index]).is_away:
                    continue
                many = counts.multiplicities[decision.index]
                states = pricer.costs.states
                update_s = states.device_s if hybrid.offload.in_backward else states.update_s    # else hidden, at best
                there_s = many * float(update_s(decision.index, prices).min())
                here_s = many * counts.sparse.share(decision.index) * float(
                    parameter_update_s(prices, pricer.space.strategy_sets[decision.index]).min())
                whole_s += (there_s - (1 - away.fraction) * here_s) / devices
                gained_s = there_s - here_s    # negative for a faster host, which gains most on whole parameters
                more_s += gained_s / devices if gained_s > 0 else gained_s
            self._updates[key] = HostUpdate(whole_s, more_s)
        return self._updates[key]

    def fetch_s(self, hybrid: Hybrid) -> float:
        """A lower bound of a step in which parameters live outside of the devices: the seconds in which a rank fetches
        an even shard of each for each use, were all compute hidden behind them."""
        if not hybrid.offload.moves_parameters:
            return 0.0
        return hybrid.micro_batches * min(self._fetch_s(hybrid, kind) for kind in ("none", hybrid.recompute))

    def _fetch_s(self, hybrid: Hybrid, recompute: str) -> float:
        """Of one micro-batch, with this kind of recompute in all blocks."""
        key = hybrid.offload, hybrid.on_host, hybrid.cached, recompute
        if key not in self._fetches:
            parameters = (pricer := self._whole_pricer(hybrid, recompute)).costs.parameters
            each = [parameters.moving_s(use) for use in pricer.space.uses if parameters.fetches(use)]
            self._fetches[key] = sum(float(one.min()) for both in each for one in both) / self.cluster.num_devices
        return self._fetches[key]

    def _kept(self, hybrid: Hybrid) -> Mapping[tuple[str, bool], float]:
        """Bytes of the whole program that live between forward and backward, by ("state" or "micro_batch", whether
        inside blocks)."""
        key = hybrid.recompute, hybrid.saved_on, hybrid.offload, hybrid.on_host, hybrid.cached
        if key not in self._live:
            pricer = self._whole_pricer(hybrid, hybrid.recompute, hybrid.saved_on)
            space, inside = pricer.space, self.reduced_model.inside(pricer.space)
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

    def least_in_flight(self, h: Hybrid) -> np.ndarray:
        """By pipeline rank, the least number of micro-batches whose activations one of its stages holds at its fullest.
        Candidates that differ in ZeRO, recompute and sharding share it."""
        key = _flight_of(h)
        if key not in self._in_flight:
            groups = len(h.groups)
            least = [min(in_flight(h, stage) for stage in range(group, h.stages, groups)) for group in range(groups)]
            self._in_flight[key] = np.repeat(np.array(least, float), h.groups)
        return self._in_flight[key]

    def _least_compute(self, shards: int) -> tuple[float, float]:
        """Seconds (forward, backward) of the program's ops, each divided evenly into ``shards``."""
        if shards not in self._least:
            found = [0.0, 0.0]
            for count, price in self._least_prices(shards).values():
                found[0] += count * float(price.forward_s.min())
                found[1] += count * float(price.backward_s.min())
            self._least[shards] = (found[0], found[1])
        return self._least[shards]

    def _least_prices(self, shards: int) -> Mapping[int, tuple[int, OpPrice]]:
        """By decision of an op: how many it stands for, and what the device takes of it alone."""
        space, prices = self._whole, self._whole_prices(shards).of_device()
        counts = self.reduced_model.counts(space)
        return {decision.index: (counts[decision.index], prices.op_of(decision.index))
                for decision in space.decisions if decision.kind == "op"}

    @cached_property
    def _whole(self) -> StrategySpace:
        """The strategy graph of the whole batch on one device."""
        return StrategySpace(self.reduced_model.graph, (1,))

    def _whole_pricer(self, hybrid: Hybrid, recompute: str, saved_on: str = "device") -> SpacePricer:
        """The costs of the whole batch on one device, with the tiers of ``hybrid``."""
        space = self._whole
        return SpacePricer(self._whole_prices(1), counts=ExecutionCounts(
            space, Hybrid(recompute=recompute, saved_on=saved_on, offload=hybrid.offload, on_host=hybrid.on_host,
                          cached=hybrid.cached, zero_stage=3 if hybrid.offload.moves_parameters else 2),
            multiplicities=self.reduced_model.counts(space)))

    def _whole_prices(self, spread: int) -> Prices:
        return Prices(self._whole, self.cluster, self.optimizer, stages=self.cluster.num_devices, spread=spread)


def paces_by_device(bounds: CandidateBounds) -> list[float]:
    """How many times as fast each device runs all ops as the slowest of all; empty where all are as fast."""
    kinds = bounds.cluster.kinds_by_device if bounds.cluster.is_unequal else ()
    one_of_each = {kind: number for number, kind in enumerate(kinds)}
    each = paces_of(bounds._whole_prices(1), [(number,) for number in one_of_each.values()]) if kinds else []
    known = dict(zip(one_of_each, each, strict=True))
    return [known[kind] for kind in kinds] if len({*each}) > 1 else []


def dense_parameter_bytes(bounds: CandidateBounds) -> float:
    """Bytes of the parameters of the whole model, without those of experts."""
    space, counts = bounds._whole, bounds.reduced_model.counts(bounds._whole)
    experts = expert_parameters(space)
    each = [(counts[n], space.strategy_sets[n].output_metas[0].num_bytes) for n, decision in enumerate(space.decisions)
            if decision.kind == "parameter" and n not in experts]
    return float(sum(count * num_bytes for count, num_bytes in each))


def _bytes_at_cuts(space: StrategySpace, inside: Sequence[bool]) -> tuple[list[float], float]:
    """Bytes that cuts send of the whole batch: of each cut outside of blocks, and the least of all inside. None of a
    model without a scalar loss, which no pipeline runs."""
    if (loss := loss_output(space.graph)) is None:
        return [], 0.0
    found = bytes_at_cuts(space, loss)
    return ([sent for index, sent in found.items() if not inside[index]],
            min((sent for index, sent in found.items() if inside[index]), default=math.inf))


def _even_bytes(candidate: Candidate, kept: Mapping[tuple[str, bool], float], in_flight: np.ndarray, times: float
                ) -> float:
    """`CandidateBounds.least_bytes`, of what is ``kept`` of the whole program and micro-batches in flight by rank."""
    h, devices = candidate.hybrid, math.prod(candidate.mesh_shape)
    away = h.saved_on != "device"    # what blocks save
    held = np.zeros(h.pipeline_ranks) if away else in_flight
    blocks = kept["state", True] + times * kept["micro_batch", True] / h.micro_batches * held
    if h.by_rank:    # each rank has all blocks
        blocks = blocks[:1]
    ends = kept["state", False] + times * kept["micro_batch", False] / h.micro_batches
    if not blocks.all():
        return float(ends / len(blocks) / devices)
    return float((1 + ends / blocks.max()) / (1 / blocks).sum() / devices)


def _flight_of(h: Hybrid) -> tuple[object, ...]:
    """What the micro-batches in flight depend on."""
    return h.schedule, h.stages, h.pipeline_ranks, h.replicas, h.micro_batches, h.copies


def _forced_s(h: Hybrid, devices: int, limit: float, kept: tuple[Mapping[tuple[str, bool], float], ...],
              in_flight: np.ndarray, again_s: float, work_s: float) -> float:
    """`CandidateBounds.forced_again_s` on stages of so many devices, of which all blocks would run again in
    ``again_s``. ``kept``: without recompute, and with it."""
    (keeping, again), ranks, per_share = kept, h.pipeline_ranks, devices * h.micro_batches
    most, least = (some["micro_batch", True] / per_share * in_flight for some in kept)
    state = keeping["state", True] / devices
    if ranks == 1:
        limit -= keeping["state", False] / devices + again["micro_batch", False] / per_share
    each = np.maximum(most - least, 1.0)    # bytes that recompute saves of a share
    more_s, per_share_s = again_s * limit / each, work_s + again_s * (state + most) / each
    fitting = limit / np.maximum(state + least, 1.0)

    def shares(seconds: float) -> float:
        forced = (seconds + more_s) / per_share_s
        return float(np.add.reduce(np.minimum(np.minimum(seconds / work_s, forced), fitting)))

    low, high = work_s / ranks, (work_s + again_s)
    if shares(low) >= 1.0 or shares(high) < 1.0:    # nothing is forced; or no plan fits, which is not for here
        return 0.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if shares(middle) >= 1.0 else (middle, high)
    return max(0.0, ranks * low - work_s)
