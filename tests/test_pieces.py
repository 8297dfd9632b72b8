"""Linear layers in pieces that overlap with communication: the same numbers, priced as they run, chosen where they
pay."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn.functional import linear

import autoparallel
from autoparallel.capture import capture
from autoparallel.errors import PlanError
from autoparallel.kernels import groups
from autoparallel.kernels.collectives import redistribute
from autoparallel.kernels.in_pieces import gathered_products, reduced_product
from autoparallel.plans import Hybrid
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer
from autoparallel.pricing.layer_overlap import LayerOverlap, at_once_s, exposed_s
from autoparallel.pricing.overlap_simulation import RankStep
from autoparallel.pricing.pieced_products import PiecedStep
from autoparallel.pricing.rank_reads import COMPUTE, Message, Timed, TimedStep
from autoparallel.pricing.step_tasks import StepTasks
from autoparallel.schedule.activation_windows import NOWHERE
from autoparallel.schedule.pieces import TRIED
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster, Device, Link
from tests.support.launch_order import drawn_of
from tests.support.models import CASES
from tests.support.ranks import mesh_of
from tests.support.reference import gradients_of
from tests.support.tiers import slow

#: A slow network, beside which all compute can run, and which takes half of the time of the products.
DEVICE = Device("toy", {"float32": 2.5e9}, 1e12, 1.0, 1e12, 0.0, overlap_slowdown=1.0)
TOY = Cluster("toy", DEVICE, (Link("net", 4, 1e-6, 4e7),), 4)


@pytest.mark.parametrize(("name", "mesh_shape", "hybrid"), [
    ("llama", (2,), Hybrid(pieces=2)), slow("llama", (2,), Hybrid(recompute="full", pieces=2)),
    slow("llama", (4,), Hybrid(pieces=2)), slow("bert", (2, 2), Hybrid(zero_stage=3, pieces=2)),
    slow("llama", (4,), Hybrid(recompute="full", pieces=2)),
    slow("bert", (4,), Hybrid(recompute="selective", pieces=4)),
    slow("llama", (2, 2), Hybrid(2, zero_stage=3, pieces=2)), slow("t5", (4,), Hybrid(2, zero_stage=1, pieces=2)),
    slow("mixtral", (4,), Hybrid(pieces=2)), slow("gpt2", (4,), Hybrid(2, zero_stage=2, pieces=2)),
    slow("llama", (2,), Hybrid(4, 2, 2, "1f1b", zero_stage=1, pieces=2)),
    slow("bert", (2,), Hybrid(4, 4, 2, "interleaved", zero_stage=3, recompute="full", pieces=2)),
], ids=str)
def test_what_runs_in_pieces_is_what_is_priced(name: str, mesh_shape: tuple[int, ...], hybrid: Hybrid,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Of drawn plans: kind, bytes and order of all launches and waits."""
    found = 0
    for seed in range(3):
        drawn = drawn_of(name, mesh_shape, seed, hybrid, monkeypatch, 8)
        if hybrid.stages > 1:
            drawn.check_pipeline()
            continue
        drawn.check_order()
        pricer = SpacePricer(drawn.prices, counts=ExecutionCounts(drawn.space, hybrid))
        found += len(RankStep(pricer, drawn.strategies).activations.pieced)
    assert found or hybrid.stages > 1


def functions_of(value: torch.Tensor) -> set[str]:
    """The names of the functions that autograd has noted for a value."""
    found, todo = {value.grad_fn}, [value.grad_fn]
    while todo:
        before = {function for function, _ in todo.pop().next_functions if function is not None} - found
        found |= before
        todo += before
    return {function.name().split("::")[-1] for function in found}


def steps_of(name: str, options: dict[str, Any], batch: int) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Loss and gradients of a step in whole layers, and in pieces."""
    case, found = CASES[name], []
    args, kwargs = case.inputs(batch)
    for pieces in (1, 2):
        parallel = autoparallel.compile(case.build(), mesh_of(4), example_inputs=args, example_kwargs=kwargs,
                                        pieces=pieces, **options)
        loss = case.loss(parallel(*args, **kwargs))
        if "backend" not in options and "recompute" not in options:
            assert bool(functions_of(loss) & {"_GatheredBackward", "_ReducedBackward"}) == (pieces > 1)
        loss.backward()
        found.append((loss.detach(), gradients_of(parallel)))
    return found


@pytest.mark.parametrize(("name", "options", "batch"), [
    slow("llama", {"baseline": "sequence_parallel"}, 8), slow("llama", {"baseline": "sequence_parallel"}, 1),
    ("gpt2", {"baseline": "tensor_parallel"}, 8), slow("t5", {"baseline": "tensor_parallel"}, 8),
    ("llama", {"baseline": "sequence_parallel", "recompute": "full"}, 8),
    slow("llama", {"baseline": "sequence_parallel", "backend": "inductor"}, 8),
    slow("llama", {"baseline": "sequence_parallel", "backend": "aot_eager"}, 8),
    slow("llama", {"baseline": "tensor_parallel", "backend": "aot_eager"}, 8),
], ids=str)
def test_a_step_in_pieces_has_the_numbers_of_whole_layers(ranks: Any, name: str, options: dict[str, Any], batch: int
                                                          ) -> None:
    for (whole, expected), (loss, gradients) in ranks(4).run(steps_of, name, options, batch, timeout_s=280):
        torch.testing.assert_close(loss, whole)
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-6, msg=key)


def gradients_twice(cut: tuple[int, int, bool]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of gradients, and of gradients of their squares: of layers in pieces, and of whole ones."""
    torch.manual_seed(0)
    x, weight, other, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 4, 6), (8, 6), (6, 8), (8,)))
    axis, found = {"axis": "data", "source_sizes": (), "target_sizes": ()}, []
    with groups.use(groups.bind(init_device_mesh("cpu", (2,), mesh_dim_names=("data",)))):
        rank = torch.distributed.get_rank()
        mine = x.chunk(2, 1)[rank]

        def in_pieces(x: torch.Tensor, weight: torch.Tensor, other: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            up, more = gathered_products(x, ((weight, bias), (weight * 2, None)), **{
                **axis, "source": "S(1)", "target": "R", "source_sizes": (2, 2)}, cut=cut)
            return reduced_product(up.tanh() + more, (other, None), **{
                **axis, "source": "P", "target": "S(1)", "target_sizes": (2, 2)}, cut=cut)

        def whole(x: torch.Tensor, weight: torch.Tensor, other: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            x = redistribute(x, "data", "S(1)", "R", (2, 2))
            up, more = linear(x, weight, bias), linear(x, weight * 2)
            return redistribute(linear(up.tanh() + more, other), "data", "P", "S(1)", (), (2, 2))

        for twice in (False, True):
            both = []
            for run in (in_pieces, whole):
                leaves = [value.clone().requires_grad_() for value in (mine, weight, other, bias)]
                made = torch.autograd.grad(run(*leaves).square().sum(), leaves, create_graph=twice)
                if twice:
                    made = torch.autograd.grad(sum(one.square().sum() for one in made), leaves)
                both.append(made)
            found += zip(*both, strict=True)
    return found


@pytest.mark.parametrize("cut", [(2, 0, False), (2, 1, True)], ids=["batch", "sequence"])
def test_gradients_and_gradients_of_gradients(ranks: Any, cut: tuple[int, int, bool]) -> None:
    for pairs in ranks(2).run(gradients_twice, cut, timeout_s=60):
        for mine, expected in pairs:
            torch.testing.assert_close(mine, expected)


def planned(cluster: Cluster, **options: Any) -> autoparallel.Plan:
    x = torch.zeros(256, 512)
    model = torch.nn.Sequential(OrderedDict((f"layer_{n}", torch.nn.Linear(512, 512, bias=False)) for n in range(6)))
    return autoparallel.plan(model, cluster, example_inputs=(x,), mesh_shape=(4,), **options)


def test_a_search_takes_pieces_where_they_pay() -> None:
    """Where communication can travel beside compute; not where both take twice as long."""
    pins = {"*.weight": Shard(1)}    # each layer's result is a sum over ranks
    made = planned(TOY, pins=pins)
    assert made.hybrid.pieces > 1
    assert made.prediction.step_s < 0.97 * planned(TOY, pins=pins, pieces=1).prediction.step_s
    slowed = replace(TOY, device=replace(DEVICE, overlap_slowdown=2.0))
    assert planned(slowed, pins=pins).hybrid.pieces == 1
    assert "in 2 pieces" in str(planned(TOY, pins=pins, pieces=2).report())


def test_pieces_shorten_a_step_by_what_travels_beside_products() -> None:
    """Of each of three sums in two pieces the first one travels while the second one's product is computed, and so do
    the gradients of two of them, while whole layers compute a weight's gradient beside these."""
    whole, halves = (planned(TOY, baseline="tensor_parallel", pieces=pieces) for pieces in (1, 2))
    product_s = 2.0 * 256 * 512 * 512 / 4 / 2.5e9
    assert whole.prediction.hidden_s == pytest.approx(2 * product_s, rel=1e-3)
    assert halves.prediction.hidden_s == pytest.approx(3 * product_s / 2 + 2 * product_s / 2, rel=1e-2)
    spans = [(name, begin, end) for name, stream, begin, end, _ in halves.record.spans if stream != COMPUTE]
    assert sum("in pieces" in name for name, *_ in spans) >= 4


def test_pieces_of_no_layer_are_told(caplog: pytest.LogCaptureFixture) -> None:
    planned(TOY, baseline="ddp", pieces=2)
    assert "pieces=2 changes nothing" in caplog.text
    caplog.clear()
    planned(TOY, baseline="tensor_parallel", pieces=2)
    assert "pieces" not in caplog.text


def test_what_pieces_do_not_go_with_is_refused() -> None:
    with pytest.raises(PlanError, match="pieces=2 with copies=2"):
        Hybrid(2, copies=2, pieces=2)
    with pytest.raises(PlanError, match="runs backward in two parts"):
        Hybrid(4, 2, 2, "zero_bubble", zero_stage=1, pieces=2)
    with pytest.raises(PlanError, match="pieces"):
        planned(TOY, pieces=0)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("behind", [False, True])
def test_no_more_overlaps_than_layers_take(seed: int, behind: bool) -> None:
    """Of drawn seconds: the simulated step of a layer in pieces saves no more than the bound of what overlaps, less the
    slowdown; in forward exactly that where pieces of both take equally long."""
    draw, pieces, slowdown = random.Random(seed), random.Random(seed).choice(TRIED), 1.2
    product_s, weights_s = draw.uniform(0.1, 2), draw.uniform(0, 1)
    sent_s = product_s if seed % 3 == 0 else draw.uniform(0.1, 3)
    timed = Timed(sent_s / pieces, "links", Message("all_gather", "model", 8.0))
    nothing = (0.0, 0.0)
    step = PiecedStep(0, (0,), behind, pieces, TimedStep(0, "S -> R", timed, timed, timed), product_s / pieces,
                      product_s / pieces, weights_s, nothing, (product_s + sent_s, product_s + weights_s + sent_s))
    saved = list[float]()
    for run in (step.forward, step.backward):
        tasks = StepTasks()
        run(tasks, 1.0)
        tasks.flush()
        saved.append(tasks.hidden_s(slowdown))
    after = None if behind else np.array(weights_s)
    most = [(2 - slowdown) * float(at_once_s(np.array(sent_s), np.array(product_s), pieces, behind_last))
            for behind_last in (None, after)]
    assert all(0 < one <= limit * (1 + 1e-9) for one, limit in zip(saved, most, strict=True))
    if seed % 3 == 0:
        assert saved[0] == pytest.approx(most[0])


class Pair(torch.nn.Module):
    """Two layers of this width, added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = (torch.nn.Linear(width, width, bias=False, device="meta") for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() + self.down(self.up(x.cos()).relu())


@pytest.mark.parametrize("pieces", TRIED)
@pytest.mark.parametrize(("name", "rows", "width"), [("slow network", 256, 512), ("h100-sxm", 16384, 8192),
                                                     slow("h100-sxm", 2048, 2048)])
def test_bounds_count_what_pieces_take_longer(name: str, rows: int, width: int, pieces: int) -> None:
    """Each layer of a plan saves no more in pieces than the bound of its redistribution says."""
    cluster = (replace(TOY, device=replace(DEVICE, overlap_slowdown=1.2)) if name == "slow network" else
               Cluster.load(name, num_devices=4))
    x = torch.zeros(4, rows // 4, width, device="meta")
    model = torch.nn.Sequential(*(Pair(width) for _ in range(2)))
    made = autoparallel.plan(model, cluster, example_inputs=(x,), mesh_shape=(4,), baseline="sequence_parallel",
                             pieces=pieces)
    space = StrategySpace(capture(model, (x,)), (4,))
    prices, strategies = Prices(space, cluster, "adamw"), made.strategies_on(space)
    reads = RankStep(SpacePricer(prices, counts=ExecutionCounts(space, Hybrid(pieces=pieces))), strategies)
    slowdown, found = cluster.working_device.overlap_slowdown, list[float]()
    for one in reads.activations.pieced.values():
        use = next(use for use in space.uses_by[one.step.target] if not one.behind or use.source == one.layers[0])
        layers = LayerOverlap(slowdown - 1, pieces, () if one.behind else tuple(one.layers), not one.behind,
                              one.layers[0] if one.behind else NOWHERE)
        ends = tuple(space.strategy_sets[at].position[strategies[at]] for at in (use.source, use.target))
        for run, exposed, times in zip((one.forward, one.backward), exposed_s(prices, use, layers),
                                       ((1, 0), (0, 1)), strict=True):
            tasks = StepTasks()
            run(tasks, 1.0)
            tasks.flush()
            most = float((prices.redistribution.use_s(use, times) - exposed)[ends])
            assert tasks.hidden_s(slowdown) <= most * (1 + 1e-9)
            found.append(most)
    assert len(found) >= 2 and (max(found) > 0) == (rows != 2048)


def test_pieces_take_no_less_than_the_whole() -> None:
    """Though of a row of tokens per rank of this model the table of an A100's products has two halves of a gradient at
    a higher rate than the whole: costs of decision graphs are not negative."""
    width, cluster = 20480, Cluster.load("a100-sxm", num_devices=56)
    x = torch.zeros(7, 2048, width, dtype=torch.bfloat16, device="meta")
    space = StrategySpace(capture(Pair(width).bfloat16(), (x,)), (7, 8))
    prices = Prices(space, cluster, "adamw")
    *_, layer = (decision.index for decision in space.decisions if decision.kind == "op"
                 and space.graph.nodes[decision.node].target is torch.ops.aten.linear.default)
    use, whole = space.uses_by[layer][0], prices.op_of(layer)
    for pieces in TRIED:
        piece = prices.piece_of(layer, pieces)
        assert (pieces * piece.forward_s >= whole.forward_s).all()
        assert (pieces * piece.backward_s >= whole.backward_s).all()
    for seconds in exposed_s(prices, use, LayerOverlap(0.1, max(TRIED), (layer,), True)):
        assert (seconds >= 0).all()
