"""Attention masks: one that hides nothing is dropped, others stay and are made once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoparallel.capture import Ref, capture
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
    """Whole, and in blocks."""
    from autoparallel.capture.passes import attention_masks

    for cells in (attention_masks.BLOCK_CELLS, 12):
        monkeypatch.setattr(attention_masks, "BLOCK_CELLS", cells)
        assert attention_inputs_under(triangle) == (3, True)
        assert attention_inputs_under(least) == (3, True)
        assert attention_inputs_under(lambda q: triangle(q) * 0.5 + 1) == (4, False)
        assert attention_inputs_under(lambda q: least(q) / 1e38) == (4, False)
        assert attention_inputs_under(lambda q: torch.zeros(q.shape[-2], q.shape[-2])) == (3, False)


def test_masks_that_say_something_stay() -> None:
    """A sliding window, one that looks ahead by one, one that differs by sample, one of the data."""
    assert attention_inputs_under(lambda q: (positions(q)[1] <= positions(q)[0]) & (
        positions(q)[0] - positions(q)[1] < 3)) == (4, False)
    assert attention_inputs_under(lambda q: positions(q)[1] <= positions(q)[0] + 1) == (4, False)
    assert attention_inputs_under(lambda q: packed(q) & (positions(q)[0] - positions(q)[1]
                                                         < 6 - torch.arange(2)[:, None, None, None])) == (4, False)
    assert attention_inputs_under(lambda q: (q.sum((1, 3)) > 0)[:, None, None, :] | torch.eye(6).bool()) == (4, False)


def test_large_masks_are_compared_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoparallel.capture.passes import attention_masks

    monkeypatch.setattr(attention_masks, "BLOCK_CELLS", 12)
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
