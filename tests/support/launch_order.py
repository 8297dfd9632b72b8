"""The order of collectives that a rank launches and awaits, run and simulated, under random plans."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from autoparallel.capture import capture
from autoparallel.partition import split_batch
from autoparallel.plans import Hybrid
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer
from autoparallel.pricing.overlap_simulation import Launch, RankStep
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster
from tests.support.recorded import Event, RecordedStep, recorded_step

CLUSTER = Cluster.load("h100-sxm", num_devices=8)


def sorted_waits(events: Sequence[Event]) -> list[Event]:
    """The events, consecutive waits in the order of their launches: which of them comes first changes nothing."""
    return [event for waits, run in itertools.groupby(events, lambda event: event[0] == "wait")
            for event in (sorted(run) if waits else run)]


def simulated(step: RankStep) -> list[Event]:
    """What a rank launches and awaits in a step, as the simulation has it."""
    numbers, found = dict[int, int](), list[Event]()
    for event in step.communication():
        if isinstance(event, Launch):
            numbers[event.task] = sum(one[0] == "launch" for one in found)
            found.append(("launch", *event.message))
        else:
            found.append(("wait", numbers[event.task]))
    return found


def check_order(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], mesh_shape: tuple[int, ...],
                seed: int, hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the random plan of this seed, a rank launches and awaits what the simulation does: kind, axis, bytes and
    order. Interleaved micro-batches give it the gradients that they have one after the other (not compared where ops
    draw random numbers: ranks that are threads share torch's generator)."""
    torch.set_num_threads(1)
    micro = split_batch(capture(model, args, kwargs), hybrid.micro_batches)
    space = StrategySpace(micro.body, mesh_shape)
    draw, prices = random.Random(seed), Prices(space, CLUSTER)
    strategies = tuple(draw.choice(strategy_set.strategies) for strategy_set in space.strategy_sets)
    told = simulated(RankStep(SpacePricer(prices, counts=ExecutionCounts(space, hybrid)), strategies))

    def run(step: Hybrid) -> RecordedStep:
        return recorded_step(model, args, kwargs, micro, space, strategies, prices.path, step, monkeypatch)

    found = run(hybrid)
    assert sorted_waits(found.events) == sorted_waits(told)
    if hybrid.copies > 1 and not any(s.rule is not None and s.rule.random for s in space.strategy_sets):
        torch.testing.assert_close(found.gradients, run(replace(hybrid, copies=1)).gradients, rtol=1e-4, atol=1e-6)
