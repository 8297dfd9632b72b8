"""Capture: one normal form, nothing lost, nothing silently changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoparallel.capture import Ref, capture, find_blocks
from autoparallel.errors import CaptureError
from tests.models import CASES


def traced(function: Any, *inputs: torch.Tensor) -> list[str]:
    """Op names of a function of tensors."""

    class Model(nn.Module):
        def forward(self, *args: torch.Tensor) -> Any:
            return function(*args)

    return [node.op_name for node in capture(Model(), inputs).of_kind("op")]


X = torch.ones(4, 6)


def test_views_have_one_form() -> None:
    assert traced(lambda x: x.view(2, -1).unsqueeze(0).flatten(), X) == ["aten.reshape.default"]
    assert traced(lambda x: x.t().transpose(0, 1), X) == ["aten.permute.default"] * 2
    assert traced(lambda x: x.split(3, dim=1)[1] + 1, X) == ["aten.slice.Tensor", "aten.add.Tensor"]


def test_means_are_sums() -> None:
    assert traced(lambda x: x.mean(), X) == ["aten.sum.dim_IntList", "aten.mul.Tensor"]
    names = traced(lambda x, y: nn.functional.cross_entropy(x, y), X, torch.zeros(4, dtype=torch.long))
    assert names[0] == "aten.cross_entropy_loss.default" and names[-1] == "aten.div.Tensor"


def test_in_place_ops_become_functional() -> None:
    assert traced(lambda x: (x + 1).add_(2).relu_(), X) == ["aten.add.Tensor"] * 2 + ["aten.relu.default"]


def test_writing_to_memory_seen_elsewhere_is_refused() -> None:
    def through_a_view(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y[0].add_(1)
        return y

    with pytest.raises(CaptureError, match="read later under another name"):
        traced(through_a_view, X)
    with pytest.raises(CaptureError, match="in place to its input"):
        traced(lambda x: x.add_(1), X)


def test_one_tensor_given_twice_is_two_inputs() -> None:
    ids = torch.zeros(2, 8, dtype=torch.long)
    graph = capture(CASES["llama"].build(), (), {"input_ids": ids, "labels": ids})
    embedding = next(node for node in graph if node.op_name == "aten.embedding.default")
    assert graph.nodes[embedding.inputs[1].node].name == "input_ids"


def test_tied_parameters_are_one() -> None:
    graph = capture(CASES["gpt2"].build(), *CASES["gpt2"].inputs(8))
    assert graph.aliases["lm_head.weight"] == "transformer.wte.weight"
    (tied,) = [node for node in graph.of_kind("parameter") if node.path == "transformer.wte.weight"]
    uses = graph.consumers[Ref(tied.index)]
    readers = {graph.nodes[index].op_name for index, _ in uses}
    assert readers == {"aten.embedding.default", "aten.linear.default"}


def test_repeated_blocks_share_a_template() -> None:
    blocks = find_blocks(capture(CASES["llama"].build(), *CASES["llama"].inputs(8)))
    layers = [b for b in blocks if b.path.startswith("model.layers.")]
    assert len(layers) == 2 and layers[0].template == layers[1].template
    assert len(layers[0].nodes) == len(layers[1].nodes)


def test_fingerprint_tells_programs_apart() -> None:
    small, args, kwargs = CASES["llama"].build(), *CASES["llama"].inputs(8)
    assert capture(small, args, kwargs).fingerprint == capture(CASES["llama"].build(), args, kwargs).fingerprint
    other_args, other_kwargs = CASES["llama"].inputs(4)
    assert capture(small, args, kwargs).fingerprint != capture(small, other_args, other_kwargs).fingerprint


def test_batch_norm_updates_its_buffers() -> None:
    graph = capture(nn.BatchNorm2d(3), (torch.zeros(2, 3, 4, 4),))
    assert sorted(graph.mutations) == ["num_batches_tracked", "running_mean", "running_var"]
    assert "aten.batch_norm.default" not in {node.op_name for node in graph}
