"""Programs, plans and orders of collectives of models, for processes with other hash seeds to compare.

``python -m tests.support.hash_seeds NAMES`` prints a JSON object: model -> fingerprint of its program, the plan's
strategies, its report, and the digests of the order of collectives of two ranks.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import autoparallel
from autoparallel.capture import capture
from autoparallel.lower import emit, order_digest
from autoparallel.pricing import Prices
from autoparallel.strategies.space import StrategySpace
from benchmarks.model_zoo import toy_cluster
from benchmarks.zoo import build, inputs_of

MESH = (2, 2)
RANKS = (0, 0), (1, 1)


class LoopsOverSets(nn.Module):
    """Constants, casts and updated buffers by name, in the order in which a set has the names."""

    KINDS = frozenset({"near", "far", "up", "down", "all"})

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        for kind in sorted(self.KINDS):
            self.register_buffer(f"seen_{kind}", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = {}
        for kind in self.KINDS:
            made[kind] = torch.tensor([float(len(kind)), 1.0]).cos().sum() * x.detach().mean(0)
            getattr(self, f"seen_{kind}").add_(made[kind])
        y = self.linear(x) * made["near"] + made["far"] * made["up"]
        scales = {kind: torch.tensor(float(len(kind))).sin() for kind in self.KINDS}
        return (y * scales["down"] - made["down"] * scales["all"] + made["all"] * scales["near"]).square().sum()


def model_of(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    if name == "sets":
        return LoopsOverSets(), (torch.ones(8, 16),), {}
    return build(name), (), inputs_of(name)


def made_of(name: str) -> dict[str, Any]:
    model, args, kwargs = model_of(name)
    graph, cluster = capture(model, args, kwargs), toy_cluster()
    plan = autoparallel.plan(model, cluster, example_inputs=args, example_kwargs=kwargs, mesh_shape=MESH)
    space = StrategySpace(graph, MESH)
    strategies, path = plan.strategies_on(space), Prices(space, cluster).path
    report = replace(plan, evidence=replace(plan.evidence, seconds={})).report()
    return {"fingerprint": graph.fingerprint, "strategies": plan.strategies, "report": report,
            "collectives": len(plan.prediction.collectives),
            "orders": [order_digest(emit(space, strategies, path, rank)) for rank in RANKS]}


if __name__ == "__main__":
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(json.dumps({name: made_of(name) for name in sys.argv[1:]}))
