"""Sums of whole tensors over several mesh axes: one collective of all their ranks, priced and run as such."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import autoparallel
from autoparallel.errors import MeshError
from autoparallel.layout import INVARIANT, REPLICATE, shard
from autoparallel.pricing import Prices
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster, collectives
from tests.support.captured import graph_of
from tests.support.overlapped import Tied, steps_on_ranks, two_steps
from tests.support.sent import Llama, Sent, second_step
from tests.support.tiers import slow


def test_gradients_cross_hosts_once() -> None:
    """One axis after the other, each device of a host sends the same sums to the other hosts; all ranks together, by
    their ring, each sends a share."""
    cluster = Cluster.load("h100-sxm", num_devices=64)
    space = StrategySpace(graph_of("mlp"), (8, 8))
    prices = Prices(space, cluster).redistribution
    use = max((use for use in space.uses if space.decisions[use.source].kind == "parameter"),
              key=lambda use: use.meta.num_bytes)
    (step,) = prices.steps(use, (INVARIANT, INVARIANT), (REPLICATE, REPLICATE))
    assert step.step.axes == (0, 1)
    together = float(collectives.all_reduce_s(use.meta.num_bytes, cluster.group_of((8, 8), (0, 1))))
    one_by_one = sum(float(collectives.all_reduce_s(use.meta.num_bytes, cluster.group((8, 8), axis)))
                     for axis in (0, 1))
    assert step.seconds == (0.0, pytest.approx(together)) and together < 0.7 * one_by_one


def test_the_cheaper_of_one_collective_and_several_is_taken() -> None:
    """Over gloo a message among four takes three times as long as among two: few bytes go one axis after the other, but
    for those of parameters, which travel with others."""
    model = torch.nn.Linear(64, 64, bias=False)
    space = StrategySpace(autoparallel.capture.capture(model, (torch.zeros(16, 64),)), (2, 2))
    prices = Prices(space, Cluster.load("local-cpu", num_devices=4)).redistribution
    paths = {space.decisions[use.source].kind: [step.axes for step in prices.table(use).path(
        (INVARIANT,) * 2, (REPLICATE,) * 2)] for use in space.uses if use.meta.requires_grad}
    assert sorted(paths["op"]) == [(0,), (1,)] and paths["parameter"] == [(0, 1)]


def test_few_bytes_of_a_baseline_are_one_sum_too() -> None:
    """Its paths are those of the fewest changes, which weigh much more than few bytes."""
    model = torch.nn.Linear(8, 8, bias=False)
    space = StrategySpace(autoparallel.capture.capture(model, (torch.zeros(16, 8),)), (2, 2))
    prices = Prices(space, Cluster.load("local-cpu", num_devices=4), direct=True).redistribution
    weight = next(use for use in space.uses if space.decisions[use.source].kind == "parameter")
    assert [step.axes for step in prices.table(weight).path((INVARIANT,) * 2, (REPLICATE,) * 2)] == [(0, 1)]


def test_a_stored_shard_is_reduced_before_it_is_gathered() -> None:
    """A reduction of whole gradients over all ranks, behind a gather, costs as much and does not overlap with
    backward: only reductions with which a path begins do."""
    cluster = Cluster.load("h100-sxm", num_devices=16_384)
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(4)))
    space = StrategySpace(autoparallel.capture.capture(model, (torch.zeros(16_384, 4096),)), (2048, 8))
    prices = Prices(space, cluster).redistribution
    use = next(use for use in space.uses if space.decisions[use.source].kind == "parameter")
    path = prices.table(use).path((INVARIANT, shard(0)), (REPLICATE, REPLICATE))
    assert [(step.axes, step.backward) for step in path] == [((0,), "all_reduce"), ((1,), "reduce_scatter")]


def test_an_axis_name_that_would_read_as_several_is_refused() -> None:
    with pytest.raises(MeshError, match=r"axis name 'a\+b' has a '\+'"):
        StrategySpace(graph_of("mlp"), (2, 2), ("a+b", "c"))


def hosts_of_two(devices: int) -> Cluster:
    """H100s, two in a host, and so slow a network that all ranks together are cheaper for any gradient."""
    cluster = Cluster.load("h100-sxm", num_devices=devices)
    return replace(cluster, links=(replace(cluster.links[0], num_devices=2),
                                   replace(cluster.links[1], bandwidth_bytes_per_s=1e6)))


def sent_in_a_step(mesh_shape: tuple[int, ...], options: dict[str, Any]) -> list[Sent]:
    return second_step(Llama(), mesh_shape, {"baseline": "ddp", "cluster": hosts_of_two(4), **options})[0].sent


def test_the_program_sends_what_is_priced(ranks: Any) -> None:
    """Gradients of all parameters in all-reduces of all ranks, and none along one axis."""
    total = sum(parameter.numel() for parameter in Llama().parameters())
    for sent in ranks(4).run(sent_in_a_step, (2, 2), {}, timeout_s=100):
        large = [(kind, group, count) for kind, group, count in sent if count > 2]    # than the loss's numbers
        assert {(kind, group) for kind, group, _ in large} == {("all_reduce_", (0, 1, 2, 3))}
        assert sum(count for *_, count in large) == total


@pytest.mark.parametrize(("mesh_shape", "options"), [
    slow((2, 2), {}), ((2, 2), {"backend": "aot_eager"}), ((2, 2), {"micro_batches": 2}),
    slow((2, 1, 2), {"recompute": "full"}), slow((2, 2), {"backend": "inductor"}),
    slow((2, 2), {"micro_batches": 2, "reduce_dtype": "float32"}), slow((2, 3), {}),
    slow((2, 2, 2), {"micro_batches": 4, "pipeline_stages": 2}), slow((2, 2, 2), {}),
], ids=str)
def test_the_numbers_are_those_of_one_process(ranks: Any, mesh_shape: tuple[int, ...], options: dict[str, Any]) -> None:
    expected, names = two_steps(Tied(), None), set[str]()
    options = {"baseline": "ddp", "cluster": hosts_of_two(math.prod(mesh_shape)), **options}
    for found, _, _ in ranks(math.prod(mesh_shape)).run(steps_on_ranks, mesh_shape, options, timeout_s=300):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
        names |= set(found)
    assert names == set(expected)
