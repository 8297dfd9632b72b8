"""Refusals say what to write instead: of users' own lines, and of lines of installed libraries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoparallel.capture import capture
from autoparallel.capture.remedies import Line, instead, makes_number
from autoparallel.errors import CaptureError

USERS = Line("/home/me/model.py", 7, "forward", "x = self.conv(x, edges)")


class Applied(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def message(function: Any, *args: Tensor) -> str:
    with pytest.raises(CaptureError) as refused:
        capture(Applied(function), args)
    return str(refused.value)


def test_item_19_a_number_made_of_a_tensor_is_named_as_that() -> None:
    said = message(lambda x: x * int(torch.empty(1).uniform_(1, 4).item()), torch.ones(3))
    assert "makes a Python number of a tensor's value" in said and "pass it as an argument" in said
    assert "torch.where" not in said
    said = message(lambda x: x if x.sum() > 0 else -x, torch.ones(3))
    assert "Write torch.where(condition, a, b) instead of `if condition:`" in said


def test_item_19_packed_sequences_are_named_as_that() -> None:
    def packed(x: Tensor, lengths: Tensor) -> Tensor:
        rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(rows, batch_first=True)[0]

    said = message(packed, torch.ones(3, 5, 2), torch.tensor([5, 3, 2]))
    assert "a packed sequence has as many rows as the data say (pack_padded_sequence)" in said
    assert "Give the recurrent layer the padded batch" in said and __file__ in said


def test_remedies_for_packed_sequences_hold() -> None:
    torch.manual_seed(0)
    layer, x, lengths = nn.LSTM(4, 6, batch_first=True), torch.randn(3, 5, 4), torch.tensor([5, 3, 2])
    packed, (last, _) = layer(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))
    expected, _ = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
    found, _ = layer(x)
    mask = torch.arange(5) < lengths[:, None]
    torch.testing.assert_close(found * mask[..., None], expected)
    torch.testing.assert_close(found.gather(1, (lengths - 1).reshape(3, 1, 1).expand(3, 1, 6))[:, 0], last[0])


def test_item_19_torchs_text_of_the_graph_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    def long(x: Tensor) -> Tensor:
        for _ in range(200):
            x = x.sin()
        return x if x.sum() > 0 else -x

    said = message(long, torch.ones(3))
    shown = capfd.readouterr()
    assert len(said) < 2_000 and "sin" not in said
    assert "aten" not in shown.out + shown.err


@pytest.mark.parametrize(("line", "said"), [
    (Line("/v/site-packages/torchvision/models/detection/transform.py", 1, "torch_choice", "int(torch.empty(1))"),
     "compile model.backbone"),
    (Line("/v/site-packages/transformers/models/w/modeling_w.py", 1, "forward", "if not skip_the_layer:"),
     "config.layerdrop = 0.0"),
    (Line("/v/site-packages/other/model.py", 1, "route", "if x.any():"), "Give other options with which it does not"),
])
def test_item_19_lines_of_libraries_are_named_with_the_call_and_the_option(line: Line, said: str) -> None:
    text = instead([USERS, line], "Write torch.where.")
    assert f"The line is of {line.library}, in {line.function}\n  called at {USERS}" in text
    assert said in text and "torch.where" not in text
    assert instead([line, USERS], "Write torch.where.") == "  Write torch.where."


def test_which_lines_make_numbers() -> None:
    assert all(map(makes_number, ["n = int(x.max())", "y = x * s.item()", "for i in range(n):"]))
    assert not any(map(makes_number, ["if x.item() > 0:", "y = a if x.sum() > 0 else b", "y = x[mask]"]))
