"""Attention masks: one that hides nothing is dropped, others stay and are made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from autoparallel.capture import Ref, capture
from autoparallel.capture.passes import attention_mask_runs, attention_masks
from autoparallel.runtime.interpret import values_of


def attention_inputs_under(mask_of: Any, length: int = 6) -> tuple[int, bool]:
    """How many tensors attention reads, and whether it is causal, for a mask computed in the model."""

    def attend(q: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask_of(q))

    class Model(nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return attend(q) + attend(q + 1)

    q = torch.randn(2, 3, length, 4)
    graph = capture(Model(), (q,))
    first, _ = [n for n in graph.of_kind("op") if n.op_name.startswith("aten.scaled_dot_product")]
    outputs = [v for v in graph.outputs if isinstance(v, Ref)]
    (node,) = graph.of_kind("input")
    found = values_of(graph, outputs, {Ref(node.index): q}, torch.device("cpu"))[outputs[0]]
    torch.testing.assert_close(found, Model()(q))
    return len(first.inputs), bool(first.kwargs.get("is_causal"))


def positions(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = torch.arange(q.shape[-2])
    return p[:, None], p[None, :]


def packed(q: torch.Tensor) -> torch.Tensor:
    """As Hugging Face writes it: causal, within samples that counted positions tell apart."""
    row, column = positions(q)
    counted = torch.arange(q.shape[-2])[None].expand(q.shape[0], -1)
    sample = (counted.diff(dim=-1, prepend=counted[:, :1] - 1) != 1).cumsum(-1)
    same = sample[:, None, :, None] == sample[:, None, None, :]
    return (column <= row) & same


def packed_by_sample(q: torch.Tensor) -> torch.Tensor:
    """The same, looked up sample by sample."""
    counted = torch.arange(q.shape[-2])[None].expand(q.shape[0], -1)
    sample = (counted.diff(dim=-1, prepend=counted[:, :1] - 1) != 1).cumsum(-1)
    batch, (row, column) = torch.arange(q.shape[0])[:, None, None, None], positions(q)
    same = sample[batch, row[None, None]] == sample[batch, column[None, None]]
    return torch.where((column <= row) & same, 0.0, -torch.inf)


def test_masks_that_say_nothing_are_dropped() -> None:
    assert attention_inputs_under(lambda q: positions(q)[1] <= positions(q)[0]) == (3, True)
    assert attention_inputs_under(packed) == (3, True)
    assert attention_inputs_under(lambda q: torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool)) == (3, False)


def triangle(q: torch.Tensor) -> torch.Tensor:
    """As torch writes it: minus infinity above the diagonal."""
    length = q.shape[-2]
    return torch.full((length, length), -torch.inf).triu(1)


def least(q: torch.Tensor) -> torch.Tensor:
    """As Hugging Face writes it for eager attention."""
    row, column = positions(q)
    return torch.where(column <= row, 0.0, torch.finfo(q.dtype).min)


def test_masks_of_numbers_that_say_nothing_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As runs of keys, whole, and in blocks."""
    for cells, runs in ((attention_masks.BLOCK_CELLS, 64), (attention_masks.BLOCK_CELLS, 0), (12, 0)):
        monkeypatch.setattr(attention_masks, "BLOCK_CELLS", cells)
        monkeypatch.setattr(attention_mask_runs, "MOST_RUNS", runs)
        assert attention_inputs_under(triangle) == (3, True)
        assert attention_inputs_under(least) == (3, True)
        assert attention_inputs_under(lambda q: triangle(q) * 0.5 + 1) == (4, False)
        assert attention_inputs_under(lambda q: least(q) / 1e38) == (4, False)
        assert attention_inputs_under(lambda q: torch.zeros(q.shape[-2], q.shape[-2])) == (3, False)


def test_masks_that_say_something_stay() -> None:
    """A sliding window, one that looks ahead by one, one that differs by sample, one of the data."""
    assert attention_inputs_under(lambda q: (positions(q)[1] <= positions(q)[0]) & (
        positions(q)[0] - positions(q)[1] < 3)) == (4, False)
    assert attention_inputs_under(lambda q: (positions(q)[1] <= positions(q)[0]) & (
        positions(q)[1] > positions(q)[0] - 3)) == (4, False)
    assert attention_inputs_under(lambda q: positions(q)[1] <= positions(q)[0] + 1) == (4, False)
    assert attention_inputs_under(lambda q: positions(q)[1].flip(-1) <= positions(q)[0]) == (4, False)
    assert attention_inputs_under(lambda q: packed(q) & (positions(q)[0] - positions(q)[1]
                                                         < 6 - torch.arange(2)[:, None, None, None])) == (4, False)
    assert attention_inputs_under(lambda q: (q.sum((1, 3)) > 0)[:, None, None, :] | torch.eye(6).bool()) == (4, False)


def test_masks_of_any_length_are_recognised_by_runs() -> None:
    """One of 2^18 tokens has 7 x 10^10 cells."""
    def kind(mask: Callable[[], torch.Tensor]) -> str:
        graph = make_fx(mask, tracing_mode="fake")().graph
        return attention_masks.kind_of(graph.output_node().args[0])

    rows, columns = (lambda: torch.arange(1 << 18)[:, None]), lambda: torch.arange(1 << 18)[None]
    assert kind(lambda: (columns() <= rows()) & (columns() < 1 << 18)) == "causal"
    assert kind(lambda: (columns() <= rows()) | (columns() == 5)) == ""
    assert kind(lambda: rows() - columns() >= 0) == ""    # not known to be runs
    assert kind(lambda: torch.where(columns() > rows(), -torch.inf, 0.0)) == "causal"
    assert kind(lambda: columns() < rows()) == ""
    assert kind(lambda: (columns()[0] <= rows()) & (columns()[0] < 1 << 19) & torch.ones(()).to(torch.bool)) == "causal"
    assert kind(lambda: (columns() <= rows()) | (columns() > rows())) == "all"


def test_large_masks_are_compared_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_masks, "BLOCK_CELLS", 12)
    monkeypatch.setattr(attention_mask_runs, "MOST_RUNS", 0)
    assert attention_inputs_under(packed) == (3, True)
    assert attention_inputs_under(packed_by_sample, 10) == (3, True)
    assert attention_inputs_under(lambda q: packed_by_sample(q).roll(1, -1), 10) == (4, False)
    assert attention_inputs_under(lambda q: (positions(q)[1] <= positions(q)[0]) | (positions(q)[1] == 5)) == (4, False)
    monkeypatch.setattr(attention_masks, "MOST_CELLS", 35)
    assert attention_inputs_under(packed) == (4, False)


def test_a_shared_mask_is_made_once() -> None:
    """As numbers, and so it is saved once for backward."""

    class Model(nn.Module):
        def forward(self, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                q = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
            return q

    graph = capture(Model(), (torch.randn(2, 3, 6, 4), torch.ones(6, 6, dtype=torch.bool).tril()))
    assert [n.op_name for n in graph.of_kind("op")].count("aten.where.self") == 1
    readers = [n for n in graph.of_kind("op") if n.op_name.startswith("aten.scaled_dot_product")]
    assert len(readers) == 3 and len({n.inputs[3] for n in readers}) == 1
