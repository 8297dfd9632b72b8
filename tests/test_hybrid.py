"""Steps in micro-batches and stages compute the step of one process: loss, gradients, five updates."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

import autoparallel
from autoparallel.capture import capture
from autoparallel.errors import InfeasibleError, InputError, PlanError
from autoparallel.models import load_model
from autoparallel.partition import split_batch
from autoparallel.partition.stages import cut_evenly, flow_of
from autoparallel.plans import Hybrid
from autoparallel.pricing import Prices
from autoparallel.runtime.pipeline import with_messages
from autoparallel.schedule.in_flight import in_flight
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster
from tests.support.captured import graph_of, plan_of
from tests.support.models import CASES
from tests.support.ranks import RankError, mesh_of
from tests.support.reference import (
    SEED,
    gradients_of,
)
from tests.support.steps import Options, assert_one_process, train_by_step
from tests.support.tiers import slow

CONFIGS = Path(__file__).parents[1] / "benchmarks" / "configs"


@pytest.mark.parametrize(("case_name", "micro_batches"), [slow("transformer_encoder", 4), ("llama", 8), ("vit", 2)])
def test_micro_batches(ranks: Any, case_name: str, micro_batches: int) -> None:
    assert_one_process(ranks, case_name, (2, 2), {"micro_batches": micro_batches})


@pytest.mark.parametrize("zero_stage", [slow(0), 1, slow(2), 3])
def test_zero_stages_with_micro_batches(ranks: Any, zero_stage: int) -> None:
    assert_one_process(ranks, "llama", (4,), {"micro_batches": 2, "zero_stage": zero_stage}, "adamw")


@pytest.mark.parametrize(("case_name", "mesh_shape", "options"), [
    slow("llama", (2, 2), {"schedule": "gpipe", "micro_batches": 2}),
    slow("gpt2", (2, 2), {"schedule": "1f1b", "micro_batches": 4}),
    slow("bert", (4,), {"schedule": "1f1b", "micro_batches": 8, "pipeline_stages": 4}),
    ("llama", (2, 2), {"schedule": "interleaved", "micro_batches": 4, "pipeline_stages": 4}),
    ("gpt2", (2, 2), {"schedule": "zero_bubble", "micro_batches": 4, "pipeline_stages": 4}),
    slow("resnet", (2, 2), {"schedule": "gpipe"}),
    slow("t5", (2, 2), {"micro_batches": 2}),
    slow("mixtral", (2, 2), {"schedule": "gpipe"}),
    slow("deepseek_v3", (2, 2), {"schedule": "1f1b", "micro_batches": 4}),
    ("gpt2", (2, 2), {"schedule": "1f1b", "micro_batches": 2, "zero_stage": 3}),
])
def test_pipelines(ranks: Any, case_name: str, mesh_shape: tuple[int, ...], options: Options) -> None:
    assert_one_process(ranks, case_name, mesh_shape, {"pipeline_stages": 2, **options})


@pytest.mark.parametrize(("case_name", "mesh_shape", "options", "batch"), [
    ("llama", (3,), {"stage_replicas": (1, 2), "micro_batches": 4}, 8),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("gpt2", (3,), {"stage_replicas": (2, 1), "micro_batches": 2, "schedule": "gpipe"}, 8),
        ("gpt2", (3,), {"stage_replicas": (1, 2), "micro_batches": 8}, 8),
        ("llama", (4,), {"stage_replicas": (1, 3), "micro_batches": 3}, 6),
        ("gpt2", (4,), {"stage_replicas": (1, 3), "micro_batches": 6, "schedule": "gpipe"}, 6),
        ("gpt2", (4,), {"stage_replicas": (3, 1), "micro_batches": 6}, 6),
        ("gpt2", (4,), {"stage_replicas": (1, 2, 1), "micro_batches": 8, "recompute": "full"}, 8),
        ("t5", (4,), {"stage_replicas": (2, 1, 1), "micro_batches": 4}, 8),
        ("llama", (6,), {"stage_replicas": (2, 3, 1), "micro_batches": 6}, 6),
        ("gpt2", (3, 2), {"stage_replicas": (1, 2), "micro_batches": 4, "zero_stage": 1}, 8),
        ("llama", (3, 2), {"stage_replicas": (2, 1), "micro_batches": 2, "zero_stage": 2}, 8),
        ("gpt2", (3, 2), {"stage_replicas": (1, 2), "micro_batches": 4, "zero_stage": 3}, 8),
    ]),
])
def test_stages_on_several_ranks(ranks: Any, case_name: str, mesh_shape: tuple[int, ...], options: Options, batch: int
                                ) -> None:
    """Which share the micro-batches; the gradients of all of them are added up."""
    assert_one_process(ranks, case_name, mesh_shape, options, "adamw", batch)


@pytest.mark.parametrize(("case_name", "mesh_shape", "options"), [
    ("llama", (2,), {"micro_batches": (3, 1)}),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("gpt2", (3,), {"micro_batches": [1, 2, 5], "recompute": "full"}),
        ("gpt2", (2, 2), {"micro_batches": (1, 3), "zero_stage": 1}),
        ("llama", (2, 2), {"micro_batches": (3, 1), "zero_stage": 2}),
        ("llama", (2, 2), {"micro_batches": (5, 3), "zero_stage": 3}),
        ("t5", (2, 2), {"micro_batches": (1, 3), "backend": "aot_eager"}),
        ("gpt2", (2,), {"micro_batches": (3, 1), "reduce_dtype": "float32"}),
    ]),
])
def test_micro_batches_by_rank(ranks: Any, case_name: str, mesh_shape: tuple[int, ...], options: Options) -> None:
    """Ranks of the first axis run different numbers of micro-batches; the gradients of all of them are added up."""
    assert_one_process(ranks, case_name, mesh_shape, options, "adamw", 8)


class _Remembers(torch.nn.Module):
    """Its first and its last layer read what steps before have left: their number, and (``echo``) what came out."""

    def __init__(self, echo: bool) -> None:
        super().__init__()
        self.echo, self.first, self.last = echo, torch.nn.Linear(6, 8), torch.nn.Linear(8, 6)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("before", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1.0)
        y = self.last(torch.tanh(self.first(x + self.before) / self.steps)) * self.steps
        if self.echo:
            self.before.copy_(y.detach().sum(0))
        return y.square().sum()


def remembered(mesh_shape: tuple[int, ...], echo: bool, options: Options | None) -> tuple[list[float], list[Any]]:
    """The losses of three steps, and the buffers after them; without options on one process."""
    torch.manual_seed(SEED)
    model, x = _Remembers(echo), torch.randn(4, 6)
    if options is None:
        losses = [float(model(x).detach()) for _ in range(3)]
    else:
        model = autoparallel.compile(model, mesh_of(*mesh_shape), example_kwargs={"x": x}, **options)
        losses = [float(model.step(x=x)) for _ in range(3)]
    return losses, [model.get_buffer(name).tolist() for name in ("steps", "before")]


@pytest.mark.parametrize(("mesh_shape", "echo", "options"), [
    ((2,), True, {"pipeline_stages": 2, "schedule": "gpipe"}),
    ((2,), False, {"pipeline_stages": 2, "micro_batches": 2}),
    pytest.param((3,), False, {"stage_replicas": (1, 2), "micro_batches": 4}, marks=pytest.mark.slow),
])
def test_every_stage_reads_the_buffers_that_one_has_written(ranks: Any, mesh_shape: tuple[int, ...], echo: bool,
                                                            options: Options) -> None:
    losses, buffers = remembered((), echo, None)
    for found in ranks(math.prod(mesh_shape)).run(remembered, mesh_shape, echo, dict(options), timeout_s=100):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        for one, other in zip(found[1], buffers, strict=True):
            assert one == pytest.approx(other, rel=1e-5)


def step_of_an_input_that_learns(options: Options) -> torch.Tensor | None:
    torch.manual_seed(SEED)
    x = torch.randn(4, 6, requires_grad=True)
    parallel = autoparallel.compile(_Remembers(False), mesh_of(2), example_kwargs={"x": x}, **options)
    parallel.step(x=x)
    return x.grad


def test_gradients_of_inputs(ranks: Any) -> None:
    """In micro-batches they are whole; in a pipeline a rank would have its stages' part."""
    torch.manual_seed(SEED)
    x = torch.randn(4, 6, requires_grad=True)
    _Remembers(False)(x).backward()
    for gradient in ranks(2).run(step_of_an_input_that_learns, {"micro_batches": 2}):
        torch.testing.assert_close(gradient, x.grad)
    with pytest.raises(RankError, match="only the part of its own pipeline stages"):
        ranks(2).run(step_of_an_input_that_learns, {"pipeline_stages": 2, "micro_batches": 2})


class _Swaps(torch.nn.Module):
    """Two buffers, each of which becomes the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)
        self.register_buffer("one", torch.tensor(1.0))
        self.register_buffer("two", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.one.clone()
        self.one.copy_(self.two)
        self.two.copy_(one)
        return (self.layer(x) * self.one).square().sum()


def swapped(options: Options | None) -> list[float]:
    """The losses of three steps; without options on one process."""
    torch.manual_seed(SEED)
    model, x = _Swaps(), torch.randn(4, 6)
    if options is None:
        return [float(model(x).detach()) for _ in range(3)]
    parallel = autoparallel.compile(model, mesh_of(2), example_inputs=(x,), **options)
    return [float(parallel.step(x)) for _ in range(3)]


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}, {"pipeline_stages": 2, "micro_batches": 2}], ids=str)
def test_buffers_that_become_one_another(ranks: Any, options: Options) -> None:
    for found in ranks(2).run(swapped, dict(options)):
        assert found == pytest.approx(swapped(None), rel=1e-5)


@pytest.mark.slow
def test_replicas_drop_the_same_in_micro_batches(ranks: Any) -> None:
    """A turn draws its own numbers, wherever it runs."""
    def losses(mesh_shape: tuple[int, ...], options: Options) -> list[float]:
        everywhere = ranks(mesh_shape[0]).run(train_by_step, "gpt2_dropout", mesh_shape, dict(options), "sgd", 8,
                                              timeout_s=100)
        return list(everywhere[0].losses)

    once = losses((2,), {"pipeline_stages": 2, "micro_batches": 4})
    assert losses((3,), {"stage_replicas": (1, 2), "micro_batches": 4}) == pytest.approx(once, rel=1e-6)
    assert losses((2,), {"pipeline_stages": 2, "micro_batches": 2}) != pytest.approx(once, rel=1e-6)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("replicas", [(1, 2), (2, 1), (3, 1), (2, 3), (2, 1, 3, 1), (3, 2, 2), (1, 4, 1)])
def test_messages_between_stages_on_several_ranks(replicas: tuple[int, ...], schedule: str) -> None:
    """Every rank runs its micro-batches there and back, and two ranks see their messages in one order."""
    micro_batches = 2 * math.lcm(*replicas)
    hybrid = Hybrid(micro_batches, len(replicas), sum(replicas), schedule, replicas=replicas)
    made = {rank: [(action.computation_type.value, action.microbatch_index) for action in actions]
            for rank, actions in with_messages(hybrid).items()}
    assert set(made) == set(range(hybrid.pipeline_ranks))
    passed: dict[tuple[int, int], list[object]] = {}
    for rank, actions in made.items():
        (stage,) = hybrid.stages_of(rank)
        for kind in "FB":
            assert [micro_batch for action, micro_batch in actions if action == kind] == list(
                hybrid.micro_batches_of(rank)
            )
        for action, micro_batch in actions:
            way, _, what = action.partition("_")
            if what:
                other = hybrid.rank_of(stage + (1 if (way == "SEND") == (what == "F") else -1), micro_batch)
                passed.setdefault((rank, other), []).append((rank if way == "SEND" else other, what, micro_batch))
    assert all(messages == passed[other, rank] for (rank, other), messages in passed.items())
    assert sum(map(len, passed.values())) == 4 * micro_batches * (hybrid.stages - 1)


@pytest.mark.parametrize(("options", "parts"), [
    ({"schedule": "gpip"}, ("unknown schedule 'gpip'", "gpipe")),
    ({"recompute": "some"}, ("unknown recompute 'some'", "selective")),
    ({"recompute_blocks": ("a",)}, ("of the blocks ['a']", "'full'")),
    ({"recompute": "full", "recompute_blocks": ()}, ("name some",)),
    ({"zero_stage": 4}, ("unknown zero_stage 4",)),
    ({"stages": 3, "pipeline_ranks": 2}, ("3 pipeline stages on 2 ranks", "a multiple of 2")),
    ({"stages": 4, "pipeline_ranks": 2, "micro_batches": 4}, ("one stage per rank", "interleaved")),
    ({"stages": 4, "pipeline_ranks": 4, "micro_batches": 3}, ("at least as many micro-batches", "gpipe")),
    ({"stages": 2, "pipeline_ranks": 2, "micro_batches": 3, "schedule": "zero_bubble"}, ()),
    ({"stages": 2, "pipeline_ranks": 2, "micro_batches": 5, "schedule": "zero_bubble"}, ("rounds of 2",)),
    ({"stages": 2, "pipeline_ranks": 2, "micro_batches": 2, "schedule": "zero_bubble", "recompute": "selective"},
     ("two parts", "'full'")),
    ({"stages": 2, "pipeline_ranks": 4, "micro_batches": 6, "replicas": (1, 3)}, ()),
    ({"stages": 2, "pipeline_ranks": 4, "micro_batches": 4, "replicas": (1, 3)}, ("[1, 3]", "multiples of 3")),
    ({"stages": 2, "pipeline_ranks": 4, "micro_batches": 6, "replicas": (1, 2)}, ("3 ranks together", "has 4")),
    ({"stages": 2, "pipeline_ranks": 3, "micro_batches": 6, "replicas": (1, 1, 1)}, ("2 pipeline stages",)),
    ({"stages": 1, "pipeline_ranks": 3, "micro_batches": 6, "replicas": (3,)}, ("of one stage",)),
    ({"stages": 2, "pipeline_ranks": 3, "micro_batches": 6, "replicas": (1, 2), "schedule": "zero_bubble"},
     ("'zero_bubble' runs each stage on one rank", "take '1f1b'")),
])
def test_incompatible_options_are_refused(options: Options, parts: tuple[str, ...]) -> None:
    if not parts:
        Hybrid(**options)
        return
    with pytest.raises(PlanError) as error:
        Hybrid(**options)
    assert all(part in str(error.value) for part in parts), error.value


def test_micro_batches_that_do_not_divide_name_those_that_do() -> None:
    with pytest.raises(InputError, match=r"3 micro-batches do not divide the batch of 8: take one of \[1, 2, 4, 8\]"):
        split_batch(graph_of("mlp"), 3)


def test_batch_norm_cannot_be_split() -> None:
    with pytest.raises(InfeasibleError, match=r"batch norm in training mode .*Use micro_batches=1") as error:
        split_batch(graph_of("resnet"), 2)
    assert "linear" not in str(error.value), error.value


def test_the_line_that_computes_across_samples_is_named() -> None:
    class Centred(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.up(x).tanh()
            y = y - y.mean(0)
            return self.down(y).square().mean()

    with pytest.raises(InfeasibleError, match=r"across its samples: sub .*y = y - y\.mean\(0\)\. Use"):
        split_batch(capture(Centred(), (torch.zeros(4, 8),)), 2)


def test_more_stages_than_ops() -> None:
    micro = split_batch(graph_of("mlp"), 1)
    space = StrategySpace(micro.body, (2,))
    with pytest.raises(InfeasibleError, match="cannot be cut into 50 pipeline stages: take at most"):
        cut_evenly(flow_of(space, 0), np.ones(len(space)), 50, [1] * 50, lambda use: 1.0, np.zeros_like)


@pytest.mark.parametrize(("bytes_per_s", "width"), [(512, 8), (2048, 64)])
def test_cuts_send_little_where_that_is_faster(bytes_per_s: float, width: int) -> None:
    """Between blocks where an uneven stage costs less than what is sent between even ones."""
    layers = [part for _ in range(3) for part in (torch.nn.Linear(8, 64), torch.nn.Linear(64, 8))]
    graph = capture(torch.nn.Sequential(*layers), (torch.zeros(4, 8),))
    flow = flow_of(space := StrategySpace(graph, (1,)), 0)
    seconds = np.array([float(decision.kind == "op") for decision in space.decisions])
    (cut,) = cut_evenly(flow, seconds, 2, [1, 1], lambda use: use.meta.num_bytes, lambda sent: sent / bytes_per_s)
    assert space.uses_by[cut][0].meta.shape == (4, width)


def test_both_stages_at_a_cut_wait_for_its_sends() -> None:
    """Cuts as even as the ops, however expensive messages are: these are the same wherever it is cut."""
    layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(12)]
    flow = flow_of(space := StrategySpace(capture(torch.nn.Sequential(*layers), (torch.zeros(4, 8),)), (1,)), 0)
    seconds = np.array([float(decision.kind == "op") for decision in space.decisions])
    ops = [decision.index for decision in space.decisions if decision.kind == "op"]
    (half,) = cut_evenly(flow, seconds, 2, [1, 1], lambda use: 1.0, lambda sent: 5 * sent)
    assert ops.index(half) == 6
    # The stage in the middle waits at both of its ends: 12 ops and 8 for messages, in three.
    cuts = cut_evenly(flow, seconds, 3, [1, 1, 1], lambda use: 1.0, lambda sent: 2 * sent)
    loads = np.diff([0, *(ops.index(cut) for cut in cuts), 12]) + np.array([2, 4, 2])
    assert loads.max() == 7


@pytest.mark.parametrize(("groups", "begins"), [([1, 3], [3]), ([3, 1], [9]), ([2, 1, 3], [4, 6])])
def test_stages_on_several_ranks_get_more(groups: list[int], begins: list[int]) -> None:
    """As many times the work as they have ranks."""
    layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(12)]
    flow = flow_of(space := StrategySpace(capture(torch.nn.Sequential(*layers), (torch.zeros(4, 8),)), (1,)), 0)
    seconds = np.array([float(decision.kind == "op") for decision in space.decisions])
    cuts = cut_evenly(flow, seconds, len(groups), groups, lambda use: use.meta.num_bytes, np.zeros_like)
    ops = [decision.index for decision in space.decisions if decision.kind == "op"]
    assert [ops.index(cut) for cut in cuts] == begins


def test_a_mixture_of_experts_in_micro_batches() -> None:
    """Its products are priced in the dtype of its tokens, though its results are in that of their weights; what is one
    number everywhere is made by each turn for itself."""
    config = json.loads((CONFIGS / "deepseek-v3.json").read_text())
    config |= {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    model, args, kwargs = load_model(config, 16, 1024, "bfloat16")
    micro = split_batch(capture(model, args, kwargs), 2)
    assert not [node for node in micro.body.of_kind("input") if "full" in node.name]
    space, cluster = StrategySpace(micro.body, (1,)), Cluster.load("h100-sxm", num_devices=1)
    (decision,) = [
        decision for decision in space.decisions if decision.kind == "op" and "routed_experts" in decision.name
    ]
    experts = space.strategy_sets[decision.index]
    assert [experts.input_metas[0].dtype, experts.output_metas[0].dtype] == [torch.bfloat16, torch.float32]
    seconds = float(Prices(space, cluster).op(experts).forward_s[0])
    assert experts.rule is not None and experts.rule.flops / seconds > cluster.device.peak_flops_per_s["float32"]


def clipped(case_name: str, mesh_shape: tuple[int, ...], options: Options, norm_type: float
            ) -> tuple[float, int, Any]:
    """The norm, the number of collectives (the comparison of calls among them), the gradients."""
    case = CASES[case_name]
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build(), mesh_of(*mesh_shape), example_inputs=args, example_kwargs=kwargs,
                                    **options)
    parallel.step(*args, **kwargs)
    with CommDebugMode() as communication:
        norm = float(parallel.clip_grad_norm_(0.05, norm_type))
    return norm, communication.get_total_counts(), gradients_of(parallel)


@pytest.mark.parametrize(("mesh_shape", "options", "norm_type"), [
    ((2, 2), {"pipeline_stages": 2, "micro_batches": 2, "zero_stage": 1}, 2.0),
    slow((2, 2), {"baseline": "tensor_parallel"}, 2.0),
    slow((2, 2), {"pipeline_stages": 2, "micro_batches": 2}, float("inf")),
    ((2, 2), {"baseline": "fsdp"}, 3.0),
    slow((4,), {"baseline": "fsdp"}, float("inf")),
    slow((4,), {"stage_replicas": (1, 2, 1), "micro_batches": 4}, 2.0),
])
def test_clipping_by_the_norm_of_all_gradients(ranks: Any, mesh_shape: tuple[int, ...], options: Options,
                                               norm_type: float) -> None:
    """Tied embeddings, on both stages, count once, and so does what several ranks of a stage have."""
    case = CASES["gpt2"]
    model = case.build()
    args, kwargs = case.inputs(8)
    case.loss(model(*args, **kwargs)).backward()
    expected = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type))
    wanted = gradients_of(model)
    for norm, reductions, gradients in ranks(4).run(clipped, "gpt2", mesh_shape, dict(options), norm_type,
                                                    timeout_s=100):
        # two: the norm, and that ranks make the same call
        assert norm == pytest.approx(expected, rel=1e-5) and norm > 0.05 and reductions == 2
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)


class _Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(width), torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.gelu(self.linear(self.norm(x)))


class _LongThenWide(torch.nn.Module):
    """First long sequences and few parameters, then none and many: little passes between the two only."""

    def __init__(self) -> None:
        super().__init__()
        self.long = torch.nn.ModuleList([_Block(256) for _ in range(4)])
        self.widen, self.wide = torch.nn.Linear(256, 4096), torch.nn.ModuleList([_Block(4096) for _ in range(16)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.long:
            x = block(x)
        x = self.widen(x.mean(1))
        for block in self.wide:
            x = block(x)
        return x.square().mean()


@pytest.mark.slow
def test_stages_on_several_ranks_where_that_pays() -> None:
    """Three hosts and a slow network: two take turns on the first part, which makes two thirds of the work."""
    machine = Cluster.load("a100-sxm", num_devices=3)
    host, network = machine.links[0], machine.links[-1]
    machine = dataclasses.replace(machine, links=(
        dataclasses.replace(host, num_devices=1),
        dataclasses.replace(network, bandwidth_bytes_per_s=2.5e8, nics_per_host=1),
    ))
    with torch.device("meta"):
        model, x = _LongThenWide(), torch.zeros(12288, 1024, 256)

    def seconds(**options: Any) -> tuple[Hybrid, float]:
        made = autoparallel.plan(model, machine, example_inputs=(x,), memory_limit_bytes=math.inf, **options)
        return made.hybrid, made.prediction.step_s

    hybrid, best_s = seconds(joint=True, time_limit_s=30)
    assert hybrid.replicas == (2, 1)
    again, again_s = seconds(mesh_shape=(3,), stage_replicas=(2, 1), micro_batches=hybrid.micro_batches)
    assert again.replicas == (2, 1) and again_s == pytest.approx(best_s, rel=0.05)
    equal = [seconds(mesh_shape=(3,)), seconds(mesh_shape=(3,), baseline="fsdp")]
    equal += [seconds(mesh_shape=(3,), pipeline_stages=3, micro_batches=micro_batches) for micro_batches in (6, 12, 24)]
    equal += [seconds(mesh_shape=(3,), pipeline_stages=12, micro_batches=6, schedule="zero_bubble")]
    assert min(other_s for _, other_s in equal) > 1.2 * best_s, (best_s, equal)


#: On 8 ranks. ResNet's batch norm and Mixtral's balancing loss look across the batch: one micro-batch.
SPLITS = ["llama", "gpt2", "bert", "t5", "deepseek_v3"]
HYBRIDS: list[tuple[tuple[int, ...], Options]] = [
    ((2, 2, 2), {"schedule": "gpipe", "micro_batches": 1}),
    ((2, 2, 2), {"schedule": "1f1b", "micro_batches": 4}),
    ((2, 2, 2), {"schedule": "interleaved", "pipeline_stages": 4, "micro_batches": 4}),
    ((2, 2, 2), {"schedule": "zero_bubble", "micro_batches": 8}),
    ((4, 2), {"schedule": "1f1b", "pipeline_stages": 4, "micro_batches": 8}),
    ((2, 4), {"micro_batches": 2, "zero_stage": 1}),
    ((2, 4), {"micro_batches": 2, "zero_stage": 2}),
    ((2, 4), {"micro_batches": 2, "zero_stage": 3}),
    ((2, 2, 2), {"micro_batches": 2, "recompute": "selective"}),
    ((2, 2, 2), {"micro_batches": 2, "recompute": "full"}),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("mesh_shape", "options"), HYBRIDS)
@pytest.mark.parametrize("case_name", SPLITS)
def test_hybrids_on_eight_ranks(ranks: Any, case_name: str, mesh_shape: tuple[int, ...], options: Options) -> None:
    assert_one_process(ranks, case_name, mesh_shape, {"pipeline_stages": 2, **options}, "adamw")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [{}, {"zero_stage": 1}, {"zero_stage": 3}, {"recompute": "full"}])
@pytest.mark.parametrize("mesh_shape", [(2, 2, 2), (4, 2)])
@pytest.mark.parametrize("case_name", ["resnet", "mixtral"])
def test_one_micro_batch_on_eight_ranks(ranks: Any, case_name: str, mesh_shape: tuple[int, ...],
                                        options: Options) -> None:
    stages = {"pipeline_stages": mesh_shape[0], "schedule": "gpipe"}
    assert_one_process(ranks, case_name, mesh_shape, {**stages, **options})


def test_fewer_micro_batches_than_ranks() -> None:
    """Each stage holds those there are; the last one of interleaved runs backward after each forward. A rank's first
    stage was taken to hold two of one, its last none, and of what only its loss needs less than none: an error."""
    for schedule, last in (("interleaved", 1), ("zero_bubble", 3)):
        assert [in_flight(Hybrid(1, 4, 2, schedule), stage) for stage in range(4)] == [1, 1, 1, 1]
        assert [in_flight(Hybrid(3, 8, 4, schedule), stage) for stage in range(8)] == [3, 3, 3, 3, 3, 3, 3, last]
    made = plan_of("gpt2", Cluster.load("h100-sxm", num_devices=2), mesh_shape=(2, 1), pipeline_stages=4,
                   micro_batches=1, schedule="zero_bubble")
    assert made.hybrid.stages == 4 and made.prediction.activation_bytes > 0
