"""Seconds of a step: the transformer's operators in closed form, each priced by cost_models.

One rank's micro-batch of T = micro_batch x seq_len / context tokens goes through a layer as matrix products [m, k] x
[k, n] (each twice more backward, for the input and for the weight), attention, element-wise traffic in bytes, and
collectives. Layers add up to stages, stages to a pipeline (`cost_models.pipeline`); then gradients are reduced and the
optimizer steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.published_runs.layer import Layer
from benchmarks.published_runs.machine import Machine
from benchmarks.published_runs.parameters import Parameters
from benchmarks.published_runs.rows import Run, is_torch
from cost_models import collectives
from cost_models.pipeline import pipeline_s
from cost_models.profile import Profile


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one step by part, all on the critical path."""

    step_s: float
    pipeline_s: float
    bubble_s: float
    data_s: float
    optimizer_s: float
    layer_forward_s: float
    layer_backward_s: float


class Pricer:
    """Prices one run with one set of constants: the layers of a stage, the stages of a step."""

    def __init__(self, run: Run, c: Profile) -> None:
        self.machine, self.run, self.c, self.m, self.p = Machine(run, c), run, c, run.model, run.plan
        self.layer, self.parameters = Layer(self.machine), Parameters(self.machine)
        self._passes: dict[bool, tuple[float, float]] = {}

    def micro_batch_s(self, mixed: bool) -> tuple[float, float]:
        """A layer's forward, and its backward with what is recomputed; FSDP's collectives beside them."""
        if mixed not in self._passes:
            self._passes[mixed] = self._micro_batch_s(mixed)
        return self._passes[mixed]

    def _micro_batch_s(self, mixed: bool) -> tuple[float, float]:
        c, p = self.c, self.p
        forward, backward = self.layer.passes(mixed)
        seconds, back = (way.seconds(c, p.expert_overlap) for way in (forward, backward))
        if p.modules:
            back += self.layer.again_s(mixed, seconds)
        elif p.recompute == "full":
            back += seconds - (self.machine.product_s(self.layer.linears(mixed)[-1:]) if c.early_stop else 0.0)
        elif p.recompute == "selective" and p.again is not None:
            back += p.again * seconds
        elif p.recompute == "selective" and is_torch(self.run.stack):
            back += 0.5 * max(0.0, seconds - self.layer.attention_s()[0])    # torch keeps every other product's output
        elif p.recompute == "selective" and not c.flash:
            back += self.layer.attention_s()[0]
        if p.fsdp and p.data * p.context > 1:
            gather, reduce = self.parameters.fsdp_s(mixed)
            again = gather if p.zero_stage >= 3 or not p.zero_stage else 0.0
            seconds, back = self.parameters.beside(seconds, gather), self.parameters.beside(back, again + reduce)
        return seconds, back

    def head_s(self) -> float:
        """Logits and loss of one micro-batch, forward and backward."""
        m, p, t = self.m, self.p, self.machine.tokens
        vocab = self.run.vocab / p.tensor
        products = [(t, vocab, m.hidden, 1), (t, m.hidden, vocab, 1), (m.hidden, vocab, t, 1)]
        loss = self.c.loss_bytes * t * vocab
        collective = float(collectives.all_reduce_s(t * m.hidden * 2, self.machine.group("tensor")))
        traffic = self.machine.traffic_s(loss) / self.machine.passes
        return self.machine.product_s(products, "float16") + traffic + collective

    def further_s(self) -> float:
        """A layer that predicts a further token: it reads a state and an embedding, brought to the width of one."""
        h, t = self.m.hidden, self.machine.tokens
        joined = self.machine.product_s([(t, h, 2 * h, 1), (t, 2 * h, h, 1), (2 * h, h, t, 1)])
        return sum(self.micro_batch_s(self.m.experts is not None)) + joined + self.head_s()

    def embedding_s(self) -> float:
        """Lookup and its gradient, with the sum over parts of the vocabulary."""
        t, m = self.machine.tokens, self.m
        rows = t * m.hidden * 2
        return self.machine.traffic_s(8 * rows) + float(collectives.all_reduce_s(rows, self.machine.group("tensor")))

    def hop_s(self) -> float:
        """Activations to the next stage: each tensor rank sends its part, then they gather."""
        p, m = self.p, self.m
        if p.pipeline == 1:
            return 0.0
        nbytes = self.machine.tokens * m.hidden * 2
        seconds = float(collectives.send_recv_s(nbytes / p.tensor, self.machine.group("pipeline")))
        if p.tensor > 1 and not p.sequence_parallel:
            seconds += float(collectives.all_gather_s(nbytes, self.machine.group("tensor")))
        return seconds

    def stages_s(self) -> list[float]:
        """Forward and backward of one micro-batch on each stage."""
        m, p, c = self.m, self.p, self.c
        mixed = m.mixed_layers / m.layers
        each = 0.0
        if mixed < 1:
            each += (1 - mixed) * sum(self.micro_batch_s(False))
        if mixed > 0:
            each += mixed * sum(self.micro_batch_s(True))
        hop = 2 * p.virtual * self.hop_s() * (1 - c.hide_pipe)
        stages = [layers * each + hop + c.micro_s for layers in self.parameters.stage_layers()]
        table_s = self.machine.grow_s(self.run.vocab * m.hidden / p.tensor)
        stages[0] += self.embedding_s() + self.parameters.root_s() / p.pipeline + table_s
        stages[-1] += self.head_s() + (0.0 if m.tied and p.pipeline == 1 else table_s)
        stages[-1] += m.further * self.further_s()
        return stages

    def step(self) -> Breakdown:
        stages, p = self.stages_s(), self.p
        pipe = pipeline_s(stages, p.micro_batches, p.virtual)
        forward, backward = self.micro_batch_s(self.m.mixed_layers * 2 > self.m.layers)
        layers = max(self.parameters.stage_layers())
        data = self.parameters.data_s(layers * backward, layers * forward) + self.parameters.tied_s()
        optimizer = self.parameters.optimizer_s()
        bubble = pipe - p.micro_batches * max(stages)
        total = pipe + data + optimizer + self.c.step_of(self.run.plan.devices)
        return Breakdown(total, pipe, bubble, data, optimizer, forward, backward)
