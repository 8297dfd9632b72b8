"""Recurrent layers: the batch may be cut; time and features stay whole."""

from __future__ import annotations

import torch

from autoparallel.rules.registry import OpView, rule_for
from autoparallel.rules.rule import Rule

aten = torch.ops.aten
#: Tensors of the hidden state's size that a layer saves for backward at each time step: gates and states (of an LSTM
#: four gates, the cell, its tanh and the hidden state).
KEPT = {aten.lstm.input: 7, aten.gru.input: 6, aten.rnn_tanh.input: 2, aten.rnn_relu.input: 2}


@rule_for(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
def recurrent(op: OpView) -> Rule | None:
    """input[t, b, i] (or [b, t, i]), state[layers, b, h] for one or two states, parameters -> output, state(s)."""
    if len(op.shapes[0]) != 3:
        return None
    num_states = len(op.outputs) - 1
    first = (("b", None, None) if op.arg("batch_first") else (None, "b", None))
    state = (None, "b", None)
    batch = op.shapes[0][first.index("b")]
    if batch == 1:
        return None
    parameters = op.inputs[1 + num_states :]
    points = op.inputs[0].num_elements / op.shapes[0][-1]
    layers, _, hidden = op.shapes[num_states]  # of both directions; an LSTM's hidden state may be shorter than its cell
    return Rule(
        (first, *[state] * num_states, *((None,) * len(m.shape) for m in parameters)), (first, *[state] * num_states),
        {"b": batch}, flops=2.0 * points * sum(m.num_elements for m in parameters), op_class="matmul",
        saves=frozenset(range(len(op.inputs))), saves_output=True,
        work_bytes=float(KEPT[op.target] * layers * points * hidden * op.inputs[0].dtype.itemsize),
        random=bool(op.arg("train") and op.arg("dropout")),
    )
