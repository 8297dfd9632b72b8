"""The predicted peak of a step is that of its tensors, at the loss too, where gradients of logits are made."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

import autoparallel
from benchmarks.subjects import gpt2, llama, token_batch
from cost_models import Cluster
from tests.support.peaks import MostBytes
from tests.support.tiers import slow

VOCABULARY, LENGTH = 20_000, 64
#: Parameter and two moments of AdamW: at the loss there are no gradients of parameters.
KEPT = 3
MODELS = {"gpt2": lambda: gpt2(VOCABULARY, 64, 2, LENGTH), "llama": lambda: llama(VOCABULARY, 64, 176, 2, 2, heads=4)}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def predicted_over_measured(mesh: DeviceMesh, model: nn.Module, kwargs: dict[str, torch.Tensor]) -> float:
    cluster = Cluster.load("h200", num_devices=1, software="torch-eager")
    parallel = autoparallel.compile(model, mesh, example_kwargs=kwargs, cluster=cluster)
    parameters = [local(p) for p in parallel.parameters()]
    with MostBytes([*parameters, *map(local, parallel.buffers()), *kwargs.values(), *model.parameters()]) as seen:
        made = parallel(**kwargs)
        made = made if isinstance(made, torch.Tensor) else made.loss    # logits go, as they do not with ``outputs = ``
        made.backward()
    return parallel.plan.prediction.peak_bytes / (seen.most + KEPT * sum(p.nbytes for p in parameters))


@pytest.mark.parametrize(("name", "batch"), [("llama", 2), slow("gpt2", 8), slow("llama", 8), slow("gpt2", 2)])
def test_peaks_of_eager_steps(mesh_of_one: DeviceMesh, name: str, batch: int) -> None:
    """Where logits outweigh the parameters' gradients (batch 8), and where they do not."""
    kwargs = token_batch(VOCABULARY, batch, LENGTH)
    assert predicted_over_measured(mesh_of_one, MODELS[name](), kwargs) == pytest.approx(1, rel=0.03)


class Head(nn.Module):
    """An embedding and a linear layer, and a loss of logits as models have it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 64, sparse=how == "sparse")
        self.head, self.how = nn.Linear(64, VOCABULARY, bias=False), how
        if how == "tied":
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embed(ids)).flatten(0, 1)
        if self.how == "capped":
            logits = torch.tanh(logits / 30) * 30
        if self.how == "by hand":
            return functional.nll_loss(functional.log_softmax(logits.float(), -1), ids.flatten())
        loss = functional.cross_entropy(logits, ids.flatten())
        if self.how == "z-loss":
            return loss + logits.logsumexp(-1).square().mean()
        return loss + logits.square().mean() if self.how == "squares" else loss


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 4096), nn.Linear(4096, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(functional.gelu(self.a(x)).square()).square().mean()


@pytest.mark.parametrize("how", [slow("tied"), slow("capped"), "by hand", slow("squares"), slow("z-loss"), "sparse"])
def test_peaks_of_losses(mesh_of_one: DeviceMesh, how: str) -> None:
    ratio = predicted_over_measured(mesh_of_one, Head(how), {"ids": torch.arange(512).view(8, 64)})
    assert 0.99 < ratio < 1.08


def test_a_sparse_gradient_takes_its_rows_alone(mesh_of_one: DeviceMesh) -> None:
    """Where the logits are smaller than the gradient of the table that it is not."""
    ratio = predicted_over_measured(mesh_of_one, Head("sparse"), {"ids": torch.arange(32).view(1, 32)})
    assert ratio == pytest.approx(1, rel=0.01)


def test_a_peak_of_wide_layers(mesh_of_one: DeviceMesh) -> None:
    assert predicted_over_measured(mesh_of_one, Wide(), {"x": torch.ones(2048, 64)}) == pytest.approx(1, rel=0.03)


@pytest.mark.slow
def test_compiled_steps_take_less() -> None:
    """Kernels keep what they fuse in registers. (Measured on an H200: docs/measurements/gpu.md.)"""
    def peak(software: str) -> float:
        with torch.device("meta"):
            model: nn.Module = MODELS["gpt2"]()
        cluster = Cluster.load("h200", num_devices=1, software=software)
        return autoparallel.plan(model, cluster, example_kwargs=token_batch(VOCABULARY, 8, LENGTH), mesh_shape=(1,),
                                 micro_batches=1).prediction.peak_bytes

    assert peak("torch-compile") < 0.8 * peak("torch-eager")
