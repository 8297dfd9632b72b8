"""Parameters of a run on a rank: their elements, gathers and gradient reductions over data ranks, and the optimizer."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.published_runs.machine import Machine
from cost_models import collectives, memory
from cost_models.pipeline import blocks_of_stages

#: Parameters of a layer: four weights, their biases, and those of two norms.
TENSORS = 12


class Parameters:
    """The parameters of the run on this machine; ``mixed``: of a layer with experts."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.run, self.c, self.m, self.p = machine, machine.run, machine.c, machine.m, machine.p

    def stage_layers(self) -> list[int]:
        """Layers of each pipeline rank."""
        p = self.p
        slots, layers = p.pipeline * p.virtual, self.m.layers
        if self.m.further and slots > 1:    # the last chunk, with them and the heads, has what the others leave
            last = max(0, layers - -(-layers // slots) * (slots - 1))
            counts = [*blocks_of_stages(layers - last, slots - 1), last]
        else:
            counts = blocks_of_stages(layers, slots, self.run.ends)
        return [sum(counts[rank :: p.pipeline]) for rank in range(p.pipeline)]

    def layer_parameters(self, mixed: bool) -> tuple[float, float]:
        """Elements of one layer on a rank: those reduced over all data ranks, and those of experts."""
        m, p = self.m, self.p
        dense, with_experts = m.mlp_parameters()
        attention = m.attention_parameters() / p.tensor
        if not mixed or m.experts is None:
            return attention + dense / p.tensor, 0.0
        e = m.experts
        local = m.mlp_factor * m.hidden * e.number * e.ffn
        return attention + (with_experts - local) / p.tensor, local / p.expert

    def stage_parameters(self, stage: int) -> tuple[float, float]:
        """Elements of a stage on a rank, embedding or head included: dense ones, and those of experts."""
        m, p = self.m, self.p
        layers = self.stage_layers()[stage]
        mixed = m.mixed_layers / m.layers
        dense = experts = 0.0
        for kind, part in ((False, 1 - mixed), (True, mixed)):
            if part:
                a, b = self.layer_parameters(kind)
                dense, experts = dense + part * layers * a, experts + part * layers * b
        ends = (stage == 0) + (stage == p.pipeline - 1) - (m.tied and p.pipeline == 1)
        if m.further and stage == p.pipeline - 1:
            a, b = self.layer_parameters(m.experts is not None)
            dense, experts = dense + m.further * (a + 2 * m.hidden**2 / p.tensor), experts + m.further * b
        return dense + ends * m.vocab * m.hidden / p.tensor, experts

    def fsdp_s(self, mixed: bool) -> tuple[float, float]:
        """One layer's gather, and the reduce-scatter of its gradients."""
        return self.sharded_s(sum(self.layer_parameters(mixed)))

    def root_s(self) -> float:
        """What FSDP gathers and scatters outside layers: before the first layer and after its backward nothing runs
        beside the embedding's; a head of its own is gathered and scattered beside layers."""
        if not self.p.fsdp or self.p.data * self.p.context == 1:
            return 0.0
        both = sum(self.sharded_s(self.m.vocab * self.m.hidden / self.p.tensor))
        return both * (1.0 if self.m.tied else 1.0 + self.c.interference)

    def sharded_s(self, elements: float) -> tuple[float, float]:
        """Gathering so many elements of parameters, and reducing and scattering their gradients: a layer's at once, or
        tensor by tensor."""
        calls = 1 if self.c.by_block else TENSORS
        gather, scatter = self._sharded_s(elements / calls)
        return calls * gather, calls * scatter

    def _sharded_s(self, elements: float) -> tuple[float, float]:
        group, replicas = self.machine.group("data"), 0.0
        if self.p.hybrid:
            group, across = self.machine.group("host"), self.machine.group("replicas")
            replicas = float(collectives.all_reduce_s(elements * 2 / group.size, across))
        width = 1 if self.p.precision == "fp8" and self.run.stack != "composer" else 2
        return (float(collectives.all_gather_s(elements * width, group)),
                float(collectives.reduce_scatter_s(elements * 2, group)) + replicas)

    def beside(self, compute_s: float, network_s: float) -> float:
        """FSDP fetches ahead: the slower of collectives and compute counts, and compute suffers; software that does not
        (DeepSpeed of 2021) does one after the other."""
        hidden = self.c.hide_data * (1 - self.c.interference) * min(compute_s, network_s)
        return compute_s + network_s - hidden

    def data_s(self, backward_s: float, forward_s: float) -> float:
        """Reducing gradients over data ranks once a step, and gathering parameters where ZeRO shards them.

        Only the last backward and the first forward of a stage can hide them.
        """
        p = self.p
        if p.fsdp or p.data * p.context == 1:
            return 0.0
        dense, experts = self.stage_parameters(0)
        reduce = gather = 0.0
        for elements, group in ((dense, self.machine.group("data")), (experts, self.machine.group("expert data"))):
            nbytes = elements * self.run.gradient_bytes
            if p.zero_stage:
                reduce += float(collectives.reduce_scatter_s(nbytes, group))
                gather += float(collectives.all_gather_s(elements * 2, group))
            else:
                reduce += float(collectives.all_reduce_s(nbytes, group))
        hidden = min(reduce, backward_s) + min(gather, forward_s)
        return reduce + gather - self.c.hide_data * hidden

    def tied_s(self) -> float:
        """First and last stage sum the gradients of the embedding that they share."""
        m, p = self.m, self.p
        if p.pipeline == 1 or not m.tied:
            return 0.0
        ends = self.machine.cluster.group((p.pipeline, p.data, p.context, p.tensor), 0)
        two = replace(ends, levels=tuple((min(2, n), link) for n, link in ends.levels), size=min(2, ends.size))
        return float(collectives.all_reduce_s(m.vocab * m.hidden / p.tensor * self.run.gradient_bytes, two))

    def optimizer_s(self) -> float:
        """Adam over what the rank holds, and norm, scaling and copies of gradients."""
        p = self.p
        elements = sum(self.stage_parameters(0))
        ranks = self.machine.shards()
        mine = elements / ranks if p.zero_stage or p.fsdp else elements
        update = float(memory.optimizer_step_s(mine, self.c.kept("bfloat16"), "adamw", self.machine.device))
        return update + self.machine.copied_s(mine * self.c.update_bytes)
