"""The model zoo judges plans rightly, and a handful of architectures pass it; ``-m slow`` runs all 46."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput

import autoparallel.rules.families.matmul as matmul
from autoparallel.capture import capture
from autoparallel.kernels import collectives
from autoparallel.layout import shard
from autoparallel.rules import Rule, registry
from autoparallel.strategies.space import StrategySpace
from benchmarks import model_zoo
from benchmarks.architectures import ARCHITECTURES
from benchmarks.in_process import on_every_rank
from benchmarks.model_zoo import Candidate, Ranks, examine, random_candidate, toy_cluster, truth, worst_error
from benchmarks.zoo import build, inputs_of
from tests.support.reference import assert_same_tensors
from tests.support.sources import ROOT
from tests.support.tiers import slow

#: One of each kind: experts, an encoder with masks, shifted labels written in place, convolutions, einsum.
HANDFUL = ["vit", *map(slow, ("mixtral", "convnext", "xlnet"))]


@pytest.fixture(autouse=True)
def quiet() -> None:
    import transformers

    transformers.logging.set_verbosity_error()


def test_46_architectures() -> None:
    assert len(ARCHITECTURES) == 46


@pytest.mark.parametrize("name", ["llama", "swin"])
def test_same_model_and_inputs_every_time(name: str) -> None:
    assert_same_tensors(build(name).state_dict(), build(name).state_dict(), tolerance=0)
    torch.testing.assert_close(inputs_of(name), inputs_of(name), rtol=0, atol=0)


@pytest.mark.parametrize("name", HANDFUL)
def test_a_handful(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Chosen, tensor-parallel, whole batch, and two random plans; no op without a rule, no work repeated."""
    monkeypatch.setattr(model_zoo, "NUM_RANDOM", 2)
    report = examine(name)
    assert report.passed, "\n".join(report.lines())
    assert not report.repeated and not report.undescribed


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_programs_for_gpus_run_on_tensors_without_data(part: int) -> None:
    """All 46, in processes of their own, which load a device guard."""
    if shutil.which("g++") is None and not torch.backends.cuda.is_built():
        pytest.skip("torch is built without CUDA, and there is no g++ to compile a guard")
    command = [sys.executable, "-m", "benchmarks.cuda_without_gpu", *list(ARCHITECTURES)[part::6]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.ranks
def test_tables_on_the_host_are_read_there_by_programs_for_gpus() -> None:
    if shutil.which("g++") is None and not torch.backends.cuda.is_built():
        pytest.skip("torch is built without CUDA, and there is no g++ to compile a guard")
    command = [sys.executable, "-m", "benchmarks.cuda_without_gpu", "--tables-on-host", "bert", "t5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("runs with 2 tables on the host") == 2


class Depthwise(torch.nn.Module):
    """A convolution of as many groups as channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(8, 16, 3, groups=8)

    def forward(self, x: torch.Tensor) -> BaseModelOutput:
        return SequenceClassifierOutput(loss=self.conv(x).square().sum())


def test_each_rank_convolves_its_own_groups() -> None:
    torch.manual_seed(0)
    model, inputs = Depthwise(), {"x": torch.randn(4, 8, 9)}
    space = StrategySpace(capture(model, (), inputs), (4,))
    convolution = space.decision_named["conv1d"]
    strategies = [
        (s.axis_strategy_named("g"),) if i == convolution else s.strategies[0]
        for i, s in enumerate(space.strategy_sets)
    ]
    ranks = Ranks(Candidate(space, tuple(strategies)), toy_cluster())
    assert worst_error(truth(model, inputs), ranks.step(model, inputs))[0] < 1e-5
    calls = [node for node in ranks.programs[(3,)].module.graph.nodes if node.name == "conv1d"]
    assert [node.args[6] for node in calls] == [2]


class Excluded(torch.nn.Module):
    """Classes that cannot be, as a logit of minus infinity: the first of all and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> BaseModelOutput:
        excluded = torch.arange(12) % 11 == 0
        logits = self.linear(x).masked_fill(excluded, float("-inf"))
        return SequenceClassifierOutput(loss=torch.nn.functional.cross_entropy(logits, torch.arange(4) + 3))


def test_cut_classes_may_be_excluded() -> None:
    """What a rank has of other ranks' targets counts nothing, and no number times infinity is zero. In float64, which
    stays so."""
    torch.manual_seed(0)
    model, inputs = Excluded().double(), {"x": torch.randn(4, 8, dtype=torch.float64)}
    space = StrategySpace(capture(model, (), inputs), (4,))
    loss = next(decision.index for decision in space.decisions if decision.name.startswith("cross_entropy"))
    strategies = [
        (s.axis_strategy_named("classes"),) if i == loss else s.strategies[0] for i, s in enumerate(space.strategy_sets)
    ]
    ranks = Ranks(Candidate(space, tuple(strategies)), toy_cluster())
    assert worst_error(truth(model, inputs), ranks.step(model, inputs))[0] < 1e-12


def test_a_plan_that_cuts_the_batch_nowhere() -> None:
    """BERT's decisions with a whole batch: heads and hidden dims are cut, the first dim of no activation is."""
    graph = capture(build("bert"), (), inputs_of("bert"))
    candidate = model_zoo.whole_batch_candidate(graph, toy_cluster())
    cut = set()
    for decision, s, strategy in zip(
        candidate.space.decisions, candidate.space.strategy_sets, candidate.strategies, strict=True
    ):
        if decision.kind in ("input", "op", "shared_read") and s.output_metas[0].shape[:1] == (8,):
            cut |= {p for p in s.output_layout(strategy) if p.is_shard}
    assert cut and shard(0) not in cut


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_architecture(name: str) -> None:
    report = examine(name)
    assert report.passed, "\n".join(report.lines())
    assert not report.repeated and not report.undescribed


# -------------------------------------------------------------------------------------------- the judge can say no


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias that every rank adds to its summand: the program is well-formed and wrong."""
    model, inputs = build("bert"), inputs_of("bert")
    graph = capture(model, (), inputs)
    expected, linear = truth(model, inputs), torch.ops.aten.linear.default
    registry.find_rule(graph, graph.of_kind("op")[0])  # the families are there

    def wrong(op: registry.OpView) -> Rule | None:
        return replace(matmul.linear(op), additive=frozenset())

    def cut_sums() -> Ranks:
        space = StrategySpace(graph, (4,))
        at = [decision.kind == "op" and graph.nodes[decision.node].target is linear for decision in space.decisions]
        strategies = [
            (s.axis_strategy_named("k"),) if cut else s.strategies[0]
            for cut, s in zip(at, space.strategy_sets, strict=True)
        ]
        return Ranks(Candidate(space, tuple(strategies)), toy_cluster())

    assert worst_error(expected, cut_sums().step(model, inputs))[0] < 1e-5
    monkeypatch.setitem(registry._BUILDERS, linear, wrong)
    error, tensor = worst_error(expected, cut_sums().step(model, inputs))
    assert error > 1e-2 and "bias" in tensor


@pytest.mark.slow
def test_a_gradient_too_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every all-reduce of floating-point numbers sums twice."""
    model, inputs = build("bert"), inputs_of("bert")
    ranks = Ranks(random_candidate(capture(model, (), inputs), (4,), 0), toy_cluster())
    assert worst_error(truth(model, inputs), ranks.step(model, inputs))[0] < 1e-5
    once = collectives.begin_all_reduce
    monkeypatch.setattr(collectives, "begin_all_reduce",
                        lambda x, *args: lambda: once(x, *args)() * (1 + x.is_floating_point()))
    assert worst_error(truth(model, inputs), ranks.step(model, inputs))[0] > 0.1


def test_collectives_in_memory() -> None:
    """On a 2 x 2 mesh the ranks meet along one axis at a time, each group for itself."""

    def work(coordinate: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        number = torch.full((2,), float(2 * coordinate[0] + coordinate[1]))
        summed = collectives.redistribute(number, "x", "P", "I")
        gathered = collectives.redistribute(number, "y", "S(0)", "I", (2, 2))
        return summed, gathered

    for coordinate, (summed, gathered) in on_every_rank((2, 2), ("x", "y"), work).items():
        first = 2.0 * coordinate[0]
        assert summed.tolist() == [2.0 + 2 * coordinate[1]] * 2
        assert gathered.tolist() == [first, first, first + 1, first + 1]


def test_ranks_that_disagree_do_not_hang() -> None:
    def work(coordinate: tuple[int, ...]) -> torch.Tensor:
        target = "I" if coordinate[0] else "S(0)"
        return collectives.redistribute(torch.ones(4), "x", "P", target, (), () if coordinate[0] else (2, 2))

    with pytest.raises(RuntimeError, match="different collectives"):
        on_every_rank((2,), ("x",), work)


def test_buffers_that_are_rounding_are_known() -> None:
    """The running mean of what a norm has centred is zero but for rounding; masks of bools are no numbers."""
    from benchmarks.model_zoo import _zero

    buffers = {"mean": torch.full((3,), 1e-18), "deviation": torch.ones(3), "mask": torch.ones(3, dtype=torch.bool)}
    assert _zero(buffers) == {"mean"}
