"""The order of collectives that a rank launches and awaits, run and simulated, under random plans."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from autoparallel.capture import OpGraph, capture
from autoparallel.partition import split_batch, stages_of
from autoparallel.partition.stages import Stages, flow_of
from autoparallel.plans import Hybrid
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer
from autoparallel.pricing.expert_exchanges import ROWS
from autoparallel.pricing.overlap_simulation import RankStep
from autoparallel.pricing.pipeline_steps import PipelineRankStep
from autoparallel.pricing.step_tasks import Launch, Passed, Wait
from autoparallel.schedule.schedules import usual
from autoparallel.strategies.space import Strategy, StrategySpace
from cost_models import Cluster
from tests.support.captured import graph_of
from tests.support.models import CASES
from tests.support.recorded import Event, Recorded, RecordedStep

CLUSTER = Cluster.load("h100-sxm", num_devices=8)


def sorted_waits(events: Sequence[Event]) -> list[Event]:
    """The events, consecutive waits in the order of their launches: which of them comes first changes nothing."""
    return [event for waits, run in itertools.groupby(events, lambda event: event[0] == "wait")
            for event in (sorted(run) if waits else run)]


def simulated(communication: Iterable[Launch | Wait | Passed]) -> list[Event]:
    """What a rank launches, awaits and sends in a step, as the simulation has it; rows of experts, of which the data
    say how many there are, without their bytes."""
    numbers, found = dict[int, int](), list[Event]()
    for event in communication:
        if isinstance(event, Launch):
            numbers[event.task] = sum(one[0] == "launch" for one in found)
            action, axis, num_bytes = event.message
            found.append(("launch", action, axis, 0.0 if action == ROWS else num_bytes))
        elif isinstance(event, Passed):
            found.append(("send" if event.sent else "receive", event.peer, event.num_bytes))
        else:
            found.append(("wait", numbers[event.task]))
    return found


class Drawn:
    """A model in micro-batches on a mesh, with random strategies: what a run launches, and what is simulated.
    ``graph``: of the model, if it is captured already."""

    def __init__(self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any],
                 mesh_shape: tuple[int, ...], seed: int, hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch,
                 graph: OpGraph | None = None) -> None:
        torch.set_num_threads(1)
        self.model, self.args, self.kwargs = model, args, kwargs
        self.hybrid, self.monkeypatch = hybrid, monkeypatch
        self.micro = split_batch(graph or capture(model, args, kwargs), hybrid.micro_batches)
        self.space, self.draw = StrategySpace(self.micro.body, mesh_shape), random.Random(seed)
        self.prices = Prices(self.space, CLUSTER, stages=hybrid.pipeline_ranks)
        self.strategies = tuple(self.draw.choice(strategy_set.strategies) for strategy_set in self.space.strategy_sets)
        self.recorded = self.recorded_with(self.strategies)

    def recorded_with(self, strategies: Sequence[Strategy]) -> Recorded:
        return Recorded(self.model, self.args, self.kwargs, self.micro, self.space, strategies, self.prices.path,
                        self.monkeypatch)

    def take(self, variant: str) -> None:
        """Let each op that has a variant run as that, by a strategy drawn among those that do."""
        strategies = list(self.strategies)
        for index, s in enumerate(self.space.strategy_sets):
            some = [s.strategies[number] for number, row in enumerate(s.array.tolist())
                    if any(s.axis_strategies[one].variant == variant for one in row)]
            strategies[index] = self.draw.choice(some) if some else strategies[index]
        self.strategies = tuple(strategies)
        self.recorded = self.recorded_with(self.strategies)

    def check(self) -> None:
        """`check_order`; with stages `check_pipeline`."""
        if self.hybrid.stages > 1:
            self.check_pipeline()
        else:
            self.check_order()

    def check_order(self) -> None:
        """A rank launches and awaits what the simulation does: kind, axis, bytes and order. Micro-batches of multi-copy
        give it the gradients that they have one after the other, and those with ZeRO-2 the gradients that ZeRO-1 gives
        (not compared where ops draw random numbers: ranks that are threads share torch's generator)."""
        pricer = SpacePricer(self.prices, counts=ExecutionCounts(self.space, self.hybrid))
        told, found = simulated(RankStep(pricer, self.strategies).communication()), self.recorded.step(self.hybrid)
        assert sorted_waits(found.events) == sorted_waits(told)
        other = replace(self.hybrid, copies=1) if self.hybrid.copies > 1 else self._reducing_once(self.hybrid)
        if other != self.hybrid and not any(s.rule is not None and s.rule.random for s in self.space.strategy_sets):
            alone = self.recorded.step(other)
            torch.testing.assert_close(found.gradients, alone.gradients, rtol=1e-4, atol=1e-6)

    @staticmethod
    def _reducing_once(hybrid: Hybrid) -> Hybrid:
        """ZeRO-1 in place of ZeRO-2 in micro-batches."""
        return replace(hybrid, zero_stage=1) if hybrid.gathers_once else hybrid

    def check_pipeline(self) -> None:
        """The same on each rank of a pipeline with random cuts; with sends, and receives where they are awaited. A
        backward in two parts gives the gradients of 1F1B, ZeRO-2 those of ZeRO-1, multi-copy those of one micro-batch
        at a time."""
        assert self.micro.loss is not None
        flow = flow_of(self.space, self.micro.loss)
        ops = [self.space.decisions[index].name for index in flow.main if self.space.decisions[index].kind == "op"]
        cuts = sorted(self.draw.sample(range(1, len(ops)), self.hybrid.stages - 1))
        hybrid = replace(self.hybrid, cuts=tuple(ops[n] for n in cuts))
        stages = stages_of(self.space, self.micro.loss, hybrid)
        counts = ExecutionCounts(self.space, hybrid, stages.of_decisions(len(self.space)))
        pricer, sent = SpacePricer(self.prices, counts=counts), stages.sent_values(self.space, self.strategies)
        found = self.recorded.pipeline(hybrid, stages)
        for rank, ran in enumerate(found):
            told = simulated(PipelineRankStep(pricer, self.strategies, rank, sent).communication())
            assert sorted_waits(ran.events) == sorted_waits(told), f"pipeline rank {rank}, cuts {hybrid.cuts}"
        other = replace(self._reducing_once(hybrid), copies=1)
        if hybrid.puts_off_weights:
            other = replace(hybrid, schedule=usual())
        if other != hybrid:
            self.check_gradients(found, other, stages)

    def check_gradients(self, found: Sequence[RecordedStep], hybrid: Hybrid, stages: Stages) -> None:
        expected = self.recorded.pipeline(hybrid, stages)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.gradients, theirs.gradients, rtol=1e-4, atol=1e-6)


def check_order(case_name: str, mesh_shape: tuple[int, ...], seed: int, hybrid: Hybrid,
                monkeypatch: pytest.MonkeyPatch, batch: int = 8) -> None:
    """`Drawn.check` of a case."""
    drawn_of(case_name, mesh_shape, seed, hybrid, monkeypatch, batch).check()


def drawn_of(case_name: str, mesh_shape: tuple[int, ...], seed: int, hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch,
             batch: int = 8) -> Drawn:
    case = CASES[case_name]
    return Drawn(case.build(), *case.inputs(batch), mesh_shape, seed, hybrid, monkeypatch, graph_of(case_name, batch))
