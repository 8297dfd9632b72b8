"""Usual plans by hand: those which people write first for a number of devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from autoparallel import clock
from autoparallel.capture import OpGraph
from autoparallel.errors import AutoparallelError
from autoparallel.garbage import collected_later
from autoparallel.partition import Splits
from autoparallel.partition.microbatch import batch_size
from autoparallel.planning.by_hand import ByHand
from autoparallel.planning.candidates import Candidate
from autoparallel.planning.facts import whole_state
from autoparallel.planning.hand_layouts import HandEstimate
from autoparallel.planning.options import Options
from autoparallel.planning.plan_by_hand import estimate_by_hand, plan_by_hand
from autoparallel.plans import Hybrid, Plan
from autoparallel.plans.record import EXCLUDED, FAR_SLOWER, LARGER, LATE, SLOWER, Alternative, LeftOut, Record
from autoparallel.plans.reports.asked import alternative_of, with_comparison
from cost_models import Cluster
from cost_models.memory import TrainingState

EXPERTS = "routed_experts"
#: Letters of an error that says why a plan is not possible, at most.
MOST_LETTERS = 150
#: Seconds in which a recipe that is begun finds the fewest recomputed blocks, at least.
BEGUN_S = 4.0
#: Estimated steps, in relation to the fastest plan's, beyond which no plan of a family is priced.
FAR = 1.5
#: Relative difference up to which two step times count as equal.
EQUAL_STEPS = 1e-3


def recipes(devices: int, host_devices: int, experts: bool = False) -> Iterator[str]:
    """DDP, ZeRO-1 and FSDP (also in micro-batches, there ZeRO-2 too, with recompute, with both); on one host also
    tensor parallelism and a pipeline of two stages; on several hosts tensor parallelism inside a host, with ZeRO-1,
    with pipelines over hosts (with less recompute, or a smaller bubble), and with FSDP; with experts first expert
    parallelism inside a host, and later with pipelines. Of plans that look for the fewest recomputed blocks, which take
    longest to price, FSDP comes early, since it is the one that fits most often.

    >>> list(recipes(8, 8))[:4]
    ['dp=8', 'dp=8,zero=1', 'dp=8,zero=3', 'dp=8,micro_batch=1']
    """
    inner = min(devices, host_devices)
    if experts and inner > 1 and devices % inner == 0:
        yield from (f"dp={devices},ep={inner},zero=1{more}" for more in ("", ",recompute=selective"))
    yield from (f"dp={devices}{more}" for more in ("", ",zero=1", ",zero=3", ",micro_batch=1", ",zero=1,micro_batch=1",
                                                   ",zero=2,micro_batch=1", ",zero=3,micro_batch=1",
                                                   ",zero=3,micro_batch=1,recompute=selective",
                                                   ",zero=1,micro_batch=1,recompute=full", ",zero=3,recompute=auto"))
    yield from _divided(devices, host_devices, experts and inner > 1)
    yield f"dp={devices},zero=3,micro_batch=1,recompute=auto"


def _divided(devices: int, host_devices: int, experts: bool) -> Iterator[str]:
    """The recipes with tensor or pipeline parallelism."""
    inner = min(devices, host_devices)
    if 1 < devices <= host_devices:
        yield f"tp={devices},sequence_parallel,recompute=auto"
        yield from ["pp=2,micro_batch=1,zero=1,recompute=auto"] if devices % 2 == 0 else []
    if devices <= host_devices or devices % host_devices:
        return
    if experts:
        yield from (f"pp={stages},micro_batch=1,ep={inner},zero=1,recompute=full" for stages in (8, 16)
                    if devices // inner % stages == 0)
    tensor = f"tp={inner},zero=1,sequence_parallel" if inner > 1 else "zero=1"
    if inner > 1:
        yield from (f"{tensor}{more},recompute=selective" for more in ("", ",micro_batch=1"))
    pipelines = [stages for stages in (2, 4, 8, 16) if devices // inner % stages == 0]
    yield from (f"pp={stages},micro_batch=1,{tensor},recompute=selective" for stages in pipelines)
    if inner > 1:
        yield f"tp={inner},zero=3,sequence_parallel,recompute=auto"
    yield from (f"pp={stages},virtual=4,micro_batch=1,{tensor},recompute=full" for stages in pipelines)


@dataclass(frozen=True)
class UsualPlans:
    """Usual plans by hand: those ``priced`` by their texts (also if they exceed ``limit_bytes`` on a device), and those
    ``left_out``. ``combinations``: of all whose steps are priced or estimated."""

    priced: Mapping[str, Plan]
    left_out: Sequence[LeftOut]
    limit_bytes: float
    combinations: tuple[Candidate, ...] = ()

    @property
    def fitting(self) -> Sequence[tuple[str, Plan]]:
        """The texts and plans of those that fit, fastest first."""
        return sorted(((text, plan) for text, plan in self.priced.items()
                       if plan.prediction.peak_bytes <= self.limit_bytes), key=lambda item: item[1].prediction.step_s)

    @property
    def fastest(self) -> tuple[str, Plan] | None:
        """The text and plan of the fastest that fits."""
        return next(iter(self.fitting), None)

    @property
    def plain_fits(self) -> bool:
        """Whether one of them fits that runs the batch as a whole, without pipeline and recompute."""
        return any(plan.prediction.peak_bytes <= self.limit_bytes for plan in self.priced.values()
                   if plan.hybrid.micro_batches == plan.hybrid.stages == 1 and plan.hybrid.recompute == "none")

    def noted(self, record: Record, plan: Plan) -> Record:
        """The record of ``plan`` with these plans as alternatives, fastest first, those left out, and its comparison
        with the fastest of them, unless that is almost the same."""
        seen, found = {_figures(plan)}, list[Alternative]()
        for text, other in sorted(self.priced.items(), key=lambda item: item[1].prediction.step_s):
            if _figures(other) not in seen:
                seen.add(_figures(other))
                found.append(alternative_of(plan, other, text))
        record = replace(record, alternatives=(*record.alternatives, *found), left_out=tuple(self.left_out))
        if self.fastest is None or _is_alike(self.fastest[1], plan):
            return record
        return with_comparison(record, plan, self.fastest[1], f"by hand {self.fastest[0]}")


def usual_plans(split: Splits, cluster: Cluster, options: Options, seconds: float = math.inf,
                texts: Iterable[str] | None = None, near: float = math.inf,
                tell: Callable[[float], None] = lambda best_s: None) -> UsualPlans:
    """Price each of the `recipes` (or ``texts``) that ``options`` and the model allow; the others are left out, with
    the reason. Once one plan fits in memory, no further recipe is begun after ``seconds``. ``near``: in the order of
    their estimates, those that fit first, and only those that are estimated to take at most so many times as long as
    the fastest plan that fits, or `FAR` times if they are the first of their family. ``tell`` is called between recipes
    with the step of the fastest plan that fits."""
    experts = any(EXPERTS in node.op_name for node in split.graph.of_kind("op"))
    pricing = _Pricing(split, cluster, options, clock.now() + seconds, seconds > 0)
    with collected_later():
        given = texts if texts is not None else recipes(cluster.num_devices, cluster.devices_per_host, experts)
        recipes_left = [(text, hand) for text in given if (hand := pricing.possible(text)) is not None]
        if near < math.inf:
            pricing.estimate(recipes_left, tell)
            recipes_left.sort(key=lambda one: pricing.order(one[0]))
        for text, hand in recipes_left:
            pricing.price(text, hand, near)
            tell(pricing.best_s)
    return UsualPlans(pricing.priced, pricing.left_out, pricing.limit, tuple(pricing.combinations()))


class _Pricing:
    """Usual plans as they are priced until ``ends`` (by `clock`), and then until one fits, if there is ``any_time``."""

    def __init__(self, split: Splits, cluster: Cluster, options: Options, ends: float, any_time: bool) -> None:
        self.split, self.cluster, self.options, self.ends, self.any_time = split, cluster, options, ends, any_time
        self.limit, self.state = options.limit_bytes(cluster), whole_state(split.graph, cluster, options, options.tier)
        self.priced, self.left_out = dict[str, Plan](), list[LeftOut]()
        self._unknown = set[str]()    # for whose estimates there was no time
        self._seen, self._families = set[tuple[Hybrid, object, str]](), set[str]()
        self._estimates = dict[str, tuple[Hybrid, tuple[int, ...], HandEstimate]]()
        self.best_s = math.inf

    def possible(self, text: str) -> ByHand | None:
        """A plan by hand that the bound of its memory, the batch and the options allow, and no earlier text means."""
        hand = ByHand.of(text).on(self.cluster.num_devices)
        if state_bytes(hand, replace(self.state, optimizer=0.0)) > self.limit:
            least = state_bytes(hand, self.state)
            self.left_out.append(LeftOut(text, "weights, gradients and optimizer states", least, hand.family))
            return None
        try:
            hybrid = hand.hybrid(batch_size(self.split.graph) if hand.needs_batch else 1)
        except AutoparallelError as error:
            self._leave_out(text, hand, _reason(self.split.graph, hand, error))
            return None
        if (key := (hybrid, hand.mesh, hand.recompute)) in self._seen:
            return None
        self._seen.add(key)
        if not allowed(hybrid, self.options):
            self._leave_out(text, hand, EXCLUDED)
            return None
        return hand

    def estimate(self, hands: Sequence[tuple[str, ByHand]], tell: Callable[[float], None]) -> None:
        """Estimate plans until half of the time is up; pricing says why one is not possible."""
        half = (clock.now() + self.ends) / 2
        for text, hand in hands:
            if clock.now() < half:
                with suppress(AutoparallelError):
                    options = pricing_of(self.options, hand)
                    found = estimate_by_hand(self.split, self.cluster, options, hand, self.limit)
                    if found is not None:
                        hybrid = hand.hybrid(batch_size(self.split.graph) if hand.needs_batch else 1)
                        self._estimates[text] = hybrid, hand.mesh[0], found
            else:
                self._unknown.add(text)
            tell(self.best_s)

    def order(self, text: str) -> tuple[bool, bool, float]:
        """Those that fit by their estimates first, the fastest of them first; of the others the smallest; last those
        for whose estimates there was no time."""
        if text not in self._estimates:
            return True, text in self._unknown, math.inf
        found = self._estimates[text][-1]
        fits = found.peak_bytes <= self.limit
        return not fits, True, found.step_s if fits else found.peak_bytes

    def price(self, text: str, hand: ByHand, near: float) -> None:
        """Price a plan, unless it is estimated to be of no use beside those that are priced."""
        estimate, known = self._estimates.get(text), hand.family in self._families
        if estimate is not None and estimate[-1].step_s > (near if known else max(near, FAR)) * self.best_s:
            self._leave_out(text, hand, SLOWER if known else FAR_SLOWER)
        elif estimate is not None and known and self._fits and self.order(text)[0]:
            self._leave_out(text, hand, LARGER)
        elif (clock.now() >= self.ends or text in self._unknown) and not (self.any_time and not self._fits):
            self._leave_out(text, hand, LATE)
        else:
            try:
                options = pricing_of(self.options, hand, max(BEGUN_S, self.ends - clock.now()))
                made = self.priced[text] = plan_by_hand(self.split, self.cluster, options, hand, self.limit)
            except AutoparallelError as error:
                self._leave_out(text, hand, _reason(self.split.graph, hand, error))
                return
            self._families.add(hand.family)
            if made.prediction.peak_bytes <= self.limit:
                self.best_s = min(self.best_s, made.prediction.step_s)

    @property
    def _fits(self) -> bool:
        return self.best_s < math.inf

    def combinations(self) -> Iterator[Candidate]:
        """The combinations of the plans that were priced, and of those that were only estimated as they are."""
        for plan in self.priced.values():
            yield Candidate(plan.hybrid, plan.mesh_shape, plan.prediction.step_s)
        for text, (hybrid, mesh_shape, estimate) in self._estimates.items():
            if text not in self.priced and ByHand.of(text).recompute == hybrid.recompute:
                yield Candidate(hybrid, mesh_shape, estimate.step_s)

    def _leave_out(self, text: str, hand: ByHand, why: str) -> None:
        self.left_out.append(LeftOut(text, why, family=hand.family))


def _reason(graph: OpGraph, hand: ByHand, error: AutoparallelError) -> str:
    """Why a plan by hand is not possible, in few words."""
    ranks = hand.dp or 1
    if ranks > 1 and (batch := batch_size(graph)) % ranks:
        how = "smaller than" if batch < ranks else "not divided by"
        return f"a batch of {batch:,} is {how} {ranks:,} data-parallel ranks"
    said = str(error).removeprefix("by_hand: ")
    return said if len(said) <= MOST_LETTERS else f"{said[:MOST_LETTERS]}..."


def pricing_of(options: Options, hand: ByHand, left_s: float = math.inf) -> Options:
    """The options that prices of a plan by hand depend on, without a memory limit."""
    return Options(optimizer=options.optimizer, reduce_dtype=options.reduce_dtype, bucket_bytes=options.bucket_bytes,
                   buckets=options.buckets, by_hand=hand, offload=options.offload,
                   offload_fraction=options.offload_fraction, step_in_backward=options.step_in_backward,
                   host_memory_limit_bytes=options.host_memory_limit_bytes, disk_limit_bytes=options.disk_limit_bytes,
                   time_limit_s=min(Options.time_limit_s, left_s))


def _figures(plan: Plan) -> tuple[object, ...]:
    """Mesh, step and memory, which plans share that run the same program."""
    return plan.mesh_shape, round(plan.prediction.step_s, 9), round(plan.prediction.peak_bytes)


def _is_alike(plan: Plan, other: Plan) -> bool:
    """Whether two plans have the same configuration and, up to `EQUAL_STEPS`, the same step time."""
    steps = plan.prediction.step_s, other.prediction.step_s
    kinds = [(one.mesh_shape, replace(one.hybrid, cuts=(), recompute_blocks=None)) for one in (plan, other)]
    return kinds[0] == kinds[1] and max(steps) <= (1 + EQUAL_STEPS) * min(steps)


def state_bytes(hand: ByHand, state: TrainingState) -> float:
    """A lower bound of a device's bytes under a plan by hand, of weights, gradients and optimizer states that take so
    many bytes in all.

    >>> state_bytes(ByHand(dp=2, tp=4, zero=1), TrainingState(8e9, 8e9, 16e9))
    6000000000.0
    """
    data, ranks = hand.dp or 1, hand.tp * hand.pp * hand.ep
    parts = ((state.parameters, 3), (state.gradients, 2), (state.optimizer, 1))
    return sum(whole / ranks / (data if hand.zero >= first else 1) for whole, first in parts)


def allowed(hybrid: Hybrid, options: Options) -> bool:
    """Whether a step configuration has the values of all options that fix it (micro-batches, stages, schedule, ...)."""
    asked = {"micro_batches": options.step_micro_batches, "by_rank": options.by_rank or None,
             "stages": options.pipeline_stages, "schedule": options.schedule,
             "recompute": None if options.recompute == "auto" else options.recompute, "saved_on": options.saved_on,
             "zero_stage": options.zero_stage, "copies": options.copies, "pieces": options.pieces}
    return options.stage_replicas is None and options.baseline is None and all(
        value is None or getattr(hybrid, name) == value for name, value in asked.items())


__all__ = ["UsualPlans", "allowed", "pricing_of", "recipes", "usual_plans"]
