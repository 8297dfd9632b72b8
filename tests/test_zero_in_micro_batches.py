"""ZeRO-2 in micro-batches, and ZeRO-2 and 3 in pipelines: parameters and gradients go in buckets, beside compute, in
one order on all ranks of a group; the numbers are those of one process."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
import torch

from autoparallel.plans import Hybrid
from autoparallel.schedule.async_windows import AsyncWindows, Read
from autoparallel.schedule.schedules import SCHEDULES
from tests.support.overlapped import Tied, steps_on_ranks, two_steps
from tests.support.sent import Llama, Sent, second_step
from tests.support.tiers import slow

#: Of a stage that has one block or two with the embedding or the head; about a block of the four-layer Llama.
BUCKET_BYTES = 150_000
EACH_SCHEDULE = [{"schedule": name, "pipeline_stages": 4 if how.several_stages else 2}
                 for name, how in SCHEDULES.items()]


def sent_in_a_step(mesh_shape: tuple[int, ...], options: dict[str, Any]) -> tuple[dict[str, int], list[Sent], int]:
    """On each rank: counts, the collectives in order, and the buckets of its programs."""
    found, buckets = second_step(Llama(), mesh_shape, {"baseline": "fsdp", "bucket_bytes": BUCKET_BYTES, **options})
    counts = {**found.counts(), "most": found.most, "beside": found.beside, "alone": found.alone}
    return counts, found.sent, buckets


def test_zero_2_sends_buckets_in_each_micro_batch(ranks: Any) -> None:
    """One gather a bucket, in the first micro-batch; one reduction a bucket and micro-batch, awaited before the next is
    issued, with products beside it. One by one they were as many as parameters."""
    parameters = sum(1 for _ in Llama().parameters())
    for counts, _, buckets in ranks(2).run(sent_in_a_step, (2,), {"micro_batches": 4, "zero_stage": 2}, timeout_s=100):
        assert 4 <= buckets < parameters / 4
        assert counts["reduce_scatter_tensor"] == 4 * buckets
        assert counts["all_gather_into_tensor"] == buckets
        assert counts["most"] == 1 and counts["beside"] > counts["alone"]


@pytest.mark.parametrize(("zero_stage", "options"), [
    slow(2, EACH_SCHEDULE[0]), (2, EACH_SCHEDULE[2]), (3, EACH_SCHEDULE[0]), slow(2, EACH_SCHEDULE[1]),
    slow(2, EACH_SCHEDULE[3]), slow(3, EACH_SCHEDULE[1]), slow(3, EACH_SCHEDULE[2]), slow(3, EACH_SCHEDULE[3]),
], ids=str)
def test_pipelines_send_buckets_in_one_order(ranks: Any, zero_stage: int, options: dict[str, Any]) -> None:
    """All ranks of a group issue the same collectives in the same order, or they would wait for ever."""
    found = ranks(4).run(sent_in_a_step, (2, 2), {"micro_batches": 4, "zero_stage": zero_stage, **options},
                         timeout_s=200)
    by_group = defaultdict[tuple[int, ...], list[list[Sent]]](list)
    for rank, (counts, sent, buckets) in enumerate(found):
        for group in {group for _, group, _ in sent if len(group) > 1}:
            assert rank in group
            by_group[group].append([one for one in sent if one[1] == group])
        if options["schedule"] == "zero_bubble" and zero_stage == 3:
            continue    # each parameter by itself
        assert 2 <= buckets < 10 and counts["reduce_scatter_tensor"] == 4 * buckets
        again = 2 * 4 if zero_stage == 3 else 1
        assert buckets <= counts["all_gather_into_tensor"] <= again * buckets
        assert counts["beside"]
    assert {(0, 1), (2, 3)} <= by_group.keys()
    for group, orders in by_group.items():
        assert len(orders) == len(group) and all(order == orders[0] for order in orders)


WAYS: list[Any] = [
    slow((3,), {"micro_batches": 4, "zero_stage": 2}), ((2, 2), {"micro_batches": 2, "zero_stage": 2}),
    ((3,), {"micro_batches": 2, "zero_stage": 2, "recompute": "full", "reduce_dtype": "float32"}),
    slow((3,), {"micro_batches": 1, "zero_stage": 2}), slow((3,), {"micro_batches": 1, "zero_stage": 3}),
    slow((3,), {"micro_batches": 2, "zero_stage": 3}), slow((3,), {"micro_batches": 4, "zero_stage": 3}),
    slow((3,), {"micro_batches": 4, "zero_stage": 2, "backend": "inductor"}),
    slow((3,), {"micro_batches": 2, "zero_stage": 3, "backend": "inductor"}),
    slow((2, 2), {"micro_batches": 4, "zero_stage": 2, "copies": 2}),
    *(slow((2, 2), {"micro_batches": 4, "zero_stage": zero_stage, "backend": "inductor", **options})
      for zero_stage in (2, 3) for options in EACH_SCHEDULE if options["schedule"] != "zero_bubble"),
    ((2, 3), {"micro_batches": 4, "zero_stage": 2, **EACH_SCHEDULE[2]}),
    slow((2, 3), {"micro_batches": 4, "zero_stage": 2, **EACH_SCHEDULE[0]}),
    *(((2, 3), {"micro_batches": 4, "zero_stage": 3, **options}) for options in EACH_SCHEDULE[:1]),
    *(slow((2, 3), {"micro_batches": 4, "zero_stage": 2, **options}) for options in EACH_SCHEDULE[1::2]),
    *(slow((2, 3), {"micro_batches": 4, "zero_stage": 3, **options}) for options in EACH_SCHEDULE[1:]),
    *(slow((2, 2), {"micro_batches": 2, "zero_stage": zero_stage, "pipeline_stages": 2, "recompute": "full"})
      for zero_stage in (2, 3)),
]


@pytest.mark.parametrize(("mesh_shape", "options"), WAYS, ids=str)
def test_the_numbers_are_those_of_one_process(ranks: Any, mesh_shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """With tied, frozen and unused parameters and shards of unequal lengths; two steps that add up, clipped."""
    expected, names = two_steps(Tied(), None), set[str]()
    for found, _, _ in ranks(math.prod(mesh_shape)).run(steps_on_ranks, mesh_shape, {"baseline": "fsdp", **options},
                                                        timeout_s=300):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
        names |= set(found)
    assert names == set(expected)


def test_a_reduction_of_whole_gradients_is_awaited_where_the_next_begins() -> None:
    """Where they are added to others, its bucket is memory of its own; else all wait for the end."""
    reads = [Read(None, "reduction", "x", "float32", 4.0, 10 * n) for n in range(3)]
    found = {hybrid.micro_batches: {pair.steps: pair.begin for pair in AsyncWindows.of(reads, hybrid).reduced}
             for hybrid in (Hybrid(1, bucket_bytes=4), Hybrid(2, zero_stage=1, bucket_bytes=4))}
    assert found == {count: {(0,): -1, (1,): -1, (2,): -1} for count in (1, 2)}
    adding = AsyncWindows.of(reads, Hybrid(2, zero_stage=2, bucket_bytes=4))
    assert {pair.steps: pair.begin for pair in adding.reduced} == {(0,): -1, (1,): 0, (2,): 10}
    backward = [(event.action, event.pair.steps) for event in reversed(adding.events[10])]
    assert backward == [("wait", (1,)), ("launch", (2,))]    # issued, and then the one before it awaited
