"""Usual plans by hand as a person tunes them: larger micro-batches, less recompute, or parameters in fewer shards
(HSDP), while the step gets shorter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from autoparallel import clock
from autoparallel.errors import AutoparallelError
from autoparallel.partition import Splits
from autoparallel.partition.microbatch import batch_size
from autoparallel.planning.by_hand import AUTO, ByHand
from autoparallel.planning.candidates import Candidate
from autoparallel.planning.options import Options
from autoparallel.planning.plan_by_hand import estimate_by_hand, plan_by_hand
from autoparallel.planning.usual import FAR, UsualPlans, allowed, pricing_of
from autoparallel.plans import Plan
from cost_models import Cluster

#: A tuned plan that is estimated to take longer than the fastest plan by more than this factor is not priced.
MOST = 1.05
#: The steps from each kind of recompute to less of it; "auto" finds the fewest blocks by itself.
_LESS = {"full": ("selective", AUTO), "selective": ("none", AUTO)}


def tuned(usual: UsualPlans, split: Splits, cluster: Cluster, options: Options, ends: float) -> UsualPlans:
    """The usual plans, and a tuned one of each family whose most promising plan can be made faster within memory and
    ``options``; the most promising family comes first. Families that take more than `FAR` times as long as the fastest
    plan are left as they are. Nothing is priced after ``ends``, by the search's clock."""
    found, families = dict(usual.priced), dict[tuple[object, ...], tuple[ByHand, Plan]]()
    for text, plan in sorted(usual.fitting, key=lambda item: _promise(item[1], usual.limit_bytes)):
        hand = ByHand.of(text).on(cluster.num_devices)
        families.setdefault((hand.tp > 1, hand.pp > 1, hand.ep > 1, hand.zero), (hand, plan))
    for hand, plan in families.values():
        best_s = replace(usual, priced=found).fitting[0][1].prediction.step_s
        if hand.needs_batch and plan.prediction.step_s <= FAR * best_s:
            found.update(_climbed(hand, plan, MOST * best_s, usual.limit_bytes, split, cluster, options, ends))
    new = tuple(Candidate(plan.hybrid, plan.mesh_shape, plan.prediction.step_s) for text, plan in found.items()
                if text not in usual.priced)
    return replace(usual, priced=found, combinations=usual.combinations + new)


def _promise(plan: Plan, limit_bytes: float) -> float:
    """Seconds of a step whose recompute is as much less as memory is left, in relation to the memory that it takes."""
    made = plan.prediction
    return made.step_s - made.recompute_s * min(1.0, limit_bytes / made.peak_bytes - 1.0)


def _climbed(hand: ByHand, plan: Plan, near_s: float, limit_bytes: float, split: Splits, cluster: Cluster,
             options: Options, ends: float) -> dict[str, Plan]:
    """The plan after all changes that make it faster and fit, one at a time, by its text; empty if there are none, or
    if it is not estimated to be within ``near_s``. Changes are judged by estimates; the last of them that makes it
    faster in full counts."""
    batch, made = batch_size(split.graph), {str(hand): plan}

    def priced(other: ByHand) -> Plan:
        if str(other) not in made:
            pricing = pricing_of(options, other, ends - clock.now())
            made[str(other)] = plan_by_hand(split, cluster, pricing, other, limit_bytes)
        return made[str(other)]

    def judged(other: ByHand) -> tuple[float, float]:
        estimate = estimate_by_hand(split, cluster, pricing_of(options, other), other, limit_bytes)
        return estimate or (priced(other).prediction.step_s, priced(other).prediction.peak_bytes)

    (best_s, best_bytes), last, path = judged(hand), hand, list[ByHand]()
    todo, seen = list(_neighbours(hand, batch, cluster.devices_per_host)), {hand}
    while todo and clock.now() < ends:
        seen.add(other := todo.pop(0))
        with suppress(AutoparallelError):
            if allowed(other.hybrid(batch), options):
                step_s, peak_bytes = judged(other)
                if peak_bytes <= limit_bytes and step_s < best_s:
                    far = _jump(last, best_bytes, other, peak_bytes, limit_bytes, batch)
                    best_s, best_bytes, last = step_s, peak_bytes, other
                    near = _neighbours(other, batch, cluster.devices_per_host)
                    todo = [one for one in dict.fromkeys((*far, *near)) if one not in seen]
                    path.append(other)
    for other in reversed(path) if best_s <= near_s else ():
        with suppress(AutoparallelError):
            found = priced(other).prediction
            if found.peak_bytes <= limit_bytes and found.step_s < plan.prediction.step_s:
                return {str(other): made[str(other)]}
    return {}


def _jump(hand: ByHand, hand_bytes: float, other: ByHand, other_bytes: float, limit_bytes: float, batch: int
          ) -> list[ByHand]:
    """After the step from ``hand`` to ``other`` without a pipeline: from a micro-batch of twice the size to the largest
    that fits, if memory grows on as in this step; after such a jump back to half the size, which may be faster.

    >>> [str(one) for one in _jump(ByHand(dp=2, micro_batch=1), 3.0, ByHand(dp=2, micro_batch=2), 4.0, 18.0, 64)]
    ['dp=2,micro_batch=16']
    >>> [str(one) for one in _jump(ByHand(dp=2, micro_batch=2), 4.0, ByHand(dp=2, micro_batch=16), 18.0, 18.0, 64)]
    ['dp=2,micro_batch=8']
    """
    each, now = hand.micro_batch, other.micro_batch
    if hand.pp > 1 or each is None or now is None or each == now:
        return []
    if now != 2 * each:
        return [replace(other, micro_batch=now // 2)]
    grown, found = max(other_bytes - hand_bytes, 1.0) / each, now
    while batch % (2 * found * (hand.dp or 1)) == 0 and hand_bytes + grown * (2 * found - each) <= limit_bytes:
        found *= 2
    return [replace(other, micro_batch=found)] if found > now else []


def _neighbours(hand: ByHand, batch: int, host_devices: int) -> Iterator[ByHand]:
    """The plan with less recompute, and with twice the micro-batch, where that divides the batch: last in a pipeline,
    which it gives more of a bubble. Then, with ZeRO-3 on several hosts, in other numbers of shards.

    >>> [str(one) for one in _neighbours(ByHand(dp=2, micro_batch=1, recompute="selective"), 8, 8)]
    ['dp=2,micro_batch=2,recompute=selective', 'dp=2,micro_batch=1', 'dp=2,micro_batch=1,recompute=auto']
    """
    less = [replace(hand, recompute=kind) for kind in _LESS.get(hand.recompute, ())]
    each = hand.micro_batch
    larger = [replace(hand, micro_batch=2 * each)] if each and batch % (2 * each * (hand.dp or 1)) == 0 else []
    yield from (*less, *larger) if hand.pp > 1 else (*larger, *less)
    yield from _in_other_shards(hand, host_devices)


def _in_other_shards(hand: ByHand, host_devices: int) -> Iterator[ByHand]:
    """The plan with parameters in fewer shards than data-parallel ranks (HSDP): first about as many as replicas of
    these, then twice and half as many; no fewer than a host has ranks.

    >>> [str(one) for one in _in_other_shards(ByHand(dp=64, zero=3), 8)]
    ['dp=64,zero=3,shards=8']
    >>> [str(one) for one in _in_other_shards(ByHand(dp=1024, zero=3, shards=32), 8)]
    ['dp=1024,zero=3,shards=64', 'dp=1024,zero=3,shards=16']
    """
    dp, inside = hand.dp or 1, max(2, host_devices // (hand.tp * hand.cp))
    if hand.zero != 3 or hand.ep > 1:
        return
    first = max(inside, 2 ** round(math.log2(dp) / 2))
    for shards in (first,) if hand.shards is None else (2 * hand.shards, hand.shards // 2):
        if inside <= shards <= dp // 2 and dp % shards == 0:
            yield replace(hand, shards=shards)


__all__ = ["tuned"]
