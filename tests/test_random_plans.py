"""Random models under random plans compute what one process computes: loss, output, every gradient.

Models are drawn from `tests.support.programs`, plans strategy by strategy from the whole space; ranks are threads of
this process (`benchmarks.in_process`) and run the emitted programs as they are, in float64. ``-m slow``: 5,000 cases.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st
from transformers.modeling_outputs import SequenceClassifierOutput

from autoparallel.capture import capture
from autoparallel.strategies.space import StrategySpace
from benchmarks.model_zoo import truth
from tests.support.programs import Program, named, programs
from tests.support.random_plans import TOLERANCE, error_of, error_under, errors_of
from tests.support.tiers import with_slow

MESHES = [(2,), (3,), (4,), (2, 2)]


def run_cases(number: int, count: int) -> None:
    """``count`` random cases, the same for the same ``number``."""

    @seed(number)
    @settings(max_examples=count, database=None, suppress_health_check=list(HealthCheck))
    @given(programs(), st.sampled_from(MESHES), st.integers(0, 2**16))
    def check(program: Program, mesh: tuple[int, ...], plan: int) -> None:
        note(f"{program}\nmesh {mesh}, plan {plan}")
        error, name = error_of(program, mesh, plan)
        assert error <= TOLERANCE, name

    torch.set_num_threads(1)
    check()


def test_random_models_under_random_plans() -> None:
    run_cases(0, 5)


STATISTICS = {"p0": (4,), "p1": (4,), "p2": (4,)}
NAMED = {
    "weighed targets": named("loss = F.cross_entropy(x * p0, i0, weight=p1.detach().exp(), ignore_index=2, "
                             "label_smoothing=0.1) + F.cross_entropy(x, i0, weight=p1.detach().exp())",
                             (8, 4, 6), {"p0": (6,), "p1": (4,)}, {"i0": ((8, 6), 4)}),
    "groups of channels": named("""x = F.group_norm(x * p0, 4, p1, p2)
                                   loss = x.square().sum() + (x * p0).sin().sum()""",
                                (6, 8, 5), {"p0": (5,), "p1": (8,), "p2": (8,)}),
    "groups of one element, zero but for rounding": named(
        """x = F.group_norm(F.adaptive_avg_pool1d(x * p0, 1), 2, p1, eps=0.1)
           loss = x.square().mean() + p0.square().sum()""", (2, 2, 3), {"p0": (3,), "p1": (2,)}),
    "instances by running statistics": named(
        """x = F.instance_norm(x, p1.detach(), p2.detach().exp(), p0, use_input_stats=False)
           loss = x.square().sum()""", (6, 4, 5), STATISTICS),
    "bags of embeddings": named(
        """x = x * p0 + F.embedding_bag(i0, p1, mode="sum", padding_idx=2) + F.embedding_bag(i0, p1, mode="mean")
           x = x + F.embedding_bag(i0, p1, per_sample_weights=p2, mode="sum") + F.embedding_bag(i0, p1, mode="max")
           flat, starts = i0.flatten(), torch.tensor([0, 2, 7, 9, 9, 20])
           x = x + F.embedding_bag(flat, p1, starts, mode="mean", padding_idx=1)
           x = x + F.embedding_bag(flat, p1, starts, mode="sum", per_sample_weights=p2.flatten(), padding_idx=1)
           loss = x.square().sum()""",
        (6, 8), {"p0": (8,), "p1": (9, 8), "p2": (6, 4)}, {"i0": ((6, 4), 9)}),
    "frequencies written in place": named(
        """s = torch.fft.rfft(x * p0, dim=1)
           kept = torch.zeros_like(s)
           kept[:, :2], kept[:, 3] = s[:, 1:3] * torch.view_as_complex(p1), s[:, 0]
           x = torch.fft.irfft(kept, n=6, dim=1)
           loss = x.square().sum()""", (4, 6, 4), {"p0": (4,), "p1": (4, 2)}),
    "a scale that a norm forgets": named("""x = F.normalize(x * p0, dim=0)
                                            x = torch.softmax(x, dim=0)
                                            loss = x.square().mean() + p0.square().sum()""", (4, 4, 4), {"p0": (4,)}),
    "covariances, and places of a constant mask": named(
        """x = x * p0
           x = torch.cov(x, correction=0) + torch.corrcoef(x @ p1) + x.masked_select(x.detach()[:, :1] > 0).sum()
           x = x + torch.masked_select(x, ~torch.eye(4, dtype=torch.bool)).view(4, 3).sum(1, keepdim=True)
           loss = x.square().sum()""", (4, 6), {"p0": (6,), "p1": (6, 5)}),
    "tokens and the next": named("""x = torch.tanh(x * p0)
                                    x = F.pad(x[:, 1:] - x[:, :-1], [0, 0, 0, 1], value=0.5)
                                    loss = x.square().mean()""", (2, 9, 4), {"p0": (4,)}),
}


@pytest.mark.parametrize("plans", [range(1), pytest.param(range(1, 8), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", with_slow(
    NAMED, "weighed targets", "groups of channels", "bags of embeddings", "tokens and the next",
    "covariances, and places of a constant mask"))
def test_named_models_under_random_plans(name: str, plans: range) -> None:
    tried = itertools.product(MESHES, plans)
    for (mesh, plan), (error, worst) in zip(tried, errors_of(NAMED[name], MESHES, plans), strict=True):
        assert error <= TOLERANCE, f"{worst} on {mesh}, plan {plan}"


def test_instance_norm_updates_its_statistics() -> None:
    """They are means over the batch, wherever that is cut."""
    norm = torch.nn.InstanceNorm1d(4, affine=True, track_running_stats=True).double()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.weight = norm, torch.nn.Parameter(torch.ones(4, 1, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> SequenceClassifierOutput:
            made = self.norm(x * self.weight)
            return SequenceClassifierOutput(loss=made.pow(3).sum(), logits=made)

    model, inputs = Model(), {"x": torch.randn(6, 4, 5, dtype=torch.float64)}
    expected, graph = truth(model, inputs), capture(model, (), inputs)
    assert {"norm.running_mean", "norm.running_var"} <= set(graph.mutations)
    for mesh, plan in itertools.product(MESHES, range(2)):
        error, worst = error_under(model, inputs, expected, StrategySpace(graph, mesh), plan)
        assert error <= TOLERANCE, f"{worst} on {mesh}, plan {plan}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(1, 21))
def test_many_random_models_under_random_plans(number: int) -> None:
    """Twenty times 250."""
    run_cases(number, 250)
