"""Plans to report on: of a transformer, plain, in a pipeline, found jointly."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import autoparallel
from autoparallel.capture import OpGraph, capture
from autoparallel.planning.by_hand import ByHand
from autoparallel.plans import Plan
from autoparallel.plans.record import Alternative, LeftOut
from cost_models import Cluster
from tests.support.captured import planning_on

HIDDEN, VOCABULARY, LAYERS, TOKENS, SEQUENCE = 256, 512, 2, 4096, 128


class Block(nn.Module):
    """Attention and MLP, before each a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (p(y).unflatten(-1, (8, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o_proj(y)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A small decoder with a loss."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def factory(batch: int, sequence: int) -> tuple[nn.Module, tuple[Tensor], dict[str, object]]:
    """For the command line."""
    return nn.Linear(sequence, 64), (torch.zeros(batch, sequence),), {}


def call(layers: int = LAYERS) -> tuple[Transformer, tuple[Tensor, Tensor]]:
    with torch.device("meta"):
        ids = torch.zeros(TOKENS // SEQUENCE, SEQUENCE, dtype=torch.int64)
        return Transformer(layers), (ids, ids)


@functools.cache
def graph(layers: int = LAYERS) -> OpGraph:
    return capture(*call(layers))


def made(devices: int = 4, cluster: Cluster | None = None, **options: object) -> Plan:
    (model, inputs), found = call(), cluster or Cluster.load("h100-sxm", num_devices=devices)
    with planning_on(graph()):
        return autoparallel.plan(model, found, example_inputs=inputs, time_limit_s=10.0, **options)


def plans_by_name() -> dict[str, Plan]:
    """Plans of the small transformer: searched, by hand, and pipelines by all schedules."""
    hand = {"fsdp": "dp=4,zero=3", "tensor": "dp=2,tp=2,zero=1,sequence_parallel", "1f1b": "dp=2,pp=2,micro_batch=2",
            "interleaved": "dp=2,pp=2,virtual=2,micro_batch=2", "gpipe": "dp=2,pp=2,micro_batch=4,schedule=gpipe",
            "zero_bubble": "dp=2,pp=2,micro_batch=2,schedule=zero_bubble",
            "copies": "dp=1,tp=4,micro_batch=8,copies=2,zero=1",
            "pairs": "dp=2,pp=2,micro_batch=2,copies=2"}
    found = {name: made(by_hand=text) for name, text in hand.items()}
    return {"searched": made(mesh_shape=(2, 2)), **found}


WEIGHT = "layers.0.mlp.0.weight"
NAMES = ("searched", "fsdp", "tensor", "1f1b", "interleaved", "gpipe", "zero_bubble", "copies", "pairs")
PIPELINES = ("1f1b", "interleaved", "gpipe", "zero_bubble", "pairs")


def another(step_s: float, peak_bytes: float, title: str = "", by_hand: str = "", family: str = "") -> Alternative:
    """Another plan, as planning notes it."""
    hand = ByHand.of(by_hand) if by_hand else None
    return Alternative(step_s, peak_bytes, (), title, by_hand, hand.family if hand else family,
                       hand.recompute if hand else "none")


def left(by_hand: str, why: str, least_bytes: float = 0.0) -> LeftOut:
    """A usual plan that was not priced, as planning notes it."""
    return LeftOut(by_hand, why, least_bytes, ByHand.of(by_hand).family)
