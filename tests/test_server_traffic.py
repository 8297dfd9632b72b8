"""Advice on parameter servers: recommended for sparse gradients and uneven workers only, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import autoparallel
from autoparallel.capture import capture
from autoparallel.errors import PlanError
from autoparallel.planning.server_traffic import server_advice, traffic_of
from autoparallel.servers.transport import Alone
from cost_models import Cluster
from tests.support.decoder import IDS, Decoder

CLUSTER = Cluster.load("h100-sxm", num_devices=4)


class Recommender(nn.Module):
    """Two tables, one of them read by ids and in bags."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.items, self.tags = nn.Embedding(rows, 16), nn.EmbeddingBag(rows, 16, mode="sum")
        self.head = nn.Linear(32, 1)

    def forward(self, ids: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.items(ids) + self.items(ids + 1), self.tags(tags)], 1)).square().mean()


def call(rows: int) -> tuple[nn.Module, tuple[Any, ...]]:
    with torch.device("meta"):
        return Recommender(rows), (torch.zeros(64, dtype=torch.long), torch.zeros(64, 8, dtype=torch.long))


def test_rows_count_once_and_at_most_all() -> None:
    model, args = call(10_000)
    traffic = traffic_of(capture(model, args, {}), 4)
    rows = 2 * 64 / 4 + 8 * 64 / 4  # of a worker's ids
    assert (traffic.dense_bytes, traffic.row_bytes, traffic.id_bytes) == (33 * 4, rows * 16 * 4, rows * 8)
    model, args = call(20)
    assert traffic_of(capture(model, args, {}), 4).row_bytes == (20 + 20) * 16 * 4
    dense = traffic_of(capture(Decoder(), (IDS,), {}), 4)
    assert dense.dense_bytes > 0


def test_the_bytes_are_those_that_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step of one worker whose ids are all different: tensors in pulls and pushes, and in their answers."""
    for name in ("RANK", "WORLD_SIZE", "AUTOPARALLEL_ROLE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    moved: dict[str, int] = {}
    sent = Alone.call

    def counting(self: Alone, to: Any, method: str, *args: Any, timeout_s: float) -> Any:
        answer = sent(self, to, method, *args, timeout_s=timeout_s)
        tensors = [leaf for leaf in tree_leaves((args, answer.value())) if isinstance(leaf, torch.Tensor)]
        moved[method] = moved.get(method, 0) + sum(tensor.nbytes for tensor in tensors)
        return answer

    monkeypatch.setattr(Alone, "call", counting)
    model, ids, tags = Recommender(10_000), torch.arange(0, 128, 2), torch.arange(512).reshape(64, 8)
    with autoparallel.serve_parameters() as servers:
        model.items = servers.embedding("items", 10_000, 16, optimizer=torch.optim.SGD, lr=0.1)
        model.tags = servers.embedding_bag("tags", 10_000, 16, optimizer=torch.optim.SGD, lr=0.1, mode="sum")
        model = servers.module(model, optimizer=torch.optim.SGD, lr=0.1)
        moved.clear()
        model(ids, tags).backward()
        servers.step()
    predicted = traffic_of(capture(*call(10_000), {}), 1)
    assert moved["pull"] == predicted.pulled_bytes and moved["push"] == predicted.pushed_bytes


def test_sparse_gradients_pay() -> None:
    model, args = call(4_000_000)
    found = autoparallel.advise(model, CLUSTER, example_inputs=args, search_s=0)
    assert found.servers is not None and found.servers.pays
    assert found.servers.server_s < found.servers.plan_s == found.best.step_s  # type: ignore[union-attr]
    assert "parameter servers pay: a step takes" in found.report(200)


@pytest.mark.slow
def test_dense_gradients_do_not_pay_and_uneven_workers_may() -> None:
    found = autoparallel.advise(Decoder(), CLUSTER, example_inputs=(IDS,), search_s=0)
    assert found.servers is not None and not found.servers.pays
    assert "a dense parameter crosses a link twice" in found.servers.why
    even = next(one.plan for one in found.alternatives if str(one.by_hand) == "dp=4")
    graph = capture(Decoder(), (IDS,), {})
    assert even is not None and found.best is not None
    uneven = [server_advice(graph, CLUSTER, even.prediction, found.best.step_s, spread) for spread in (0.0, 0.1, 0.4)]
    gains = [one.plan_s / one.server_s for one in uneven if one is not None]
    assert len(gains) == 3 and gains == sorted(gains) and gains[2] > 1.2 * gains[0]


def test_one_device_and_a_batch_that_workers_cannot_share_have_no_advice() -> None:
    found = autoparallel.advise(Decoder(), Cluster.load("h100-sxm", num_devices=1), example_inputs=(IDS,), search_s=0)
    assert found.servers is None
    with pytest.raises(PlanError, match="uneven is 2: give the share"):
        autoparallel.advise(Decoder(), CLUSTER, example_inputs=(IDS,), search_s=0, uneven=2)
