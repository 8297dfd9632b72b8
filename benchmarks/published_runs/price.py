"""Seconds of a step: the transformer's operators in closed form, each priced by cost_models.

One rank's micro-batch of T = micro_batch x seq_len / context tokens goes through a layer as matrix products [m, k] x
[k, n] (each twice more backward, for the input and for the weight), attention, element-wise traffic in bytes, and
collectives. Layers add up to stages, stages to a pipeline (`cost_models.pipeline`); then gradients are reduced and the
optimizer steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.published_runs.rows import TRACED, Run, is_torch
from cost_models import Cluster, Group, collectives, memory
from cost_models.compute import UNFUSED_LAUNCHES, attention_s, larger, matmul_time_s, softmax_is_fused, traffic_s
from cost_models.pipeline import blocks_of_stages, pipeline_s
from cost_models.profile import Profile

#: Parameters of a layer: four weights, their biases, and those of two norms.
TENSORS = 12
Product = tuple[float, float, float, float]    # m, n, k, how many

_DTYPES = {"bf16": "float16", "fp8": "float8_e4m3fn", "fp4": "float4_e2m1fn"}


@dataclass(frozen=True)
class Pass:
    """Seconds of a layer in one direction: of the device's arithmetic, of its collectives by kind, and of the host."""

    compute_s: float
    tensor_s: float
    experts_s: float
    host_s: float

    def seconds(self, c: Profile, overlap: bool | None = None) -> float:
        """Device and host work side by side, the slower one counts; what collectives cannot hide adds up. ``overlap``:
        whether expert dispatch is hidden, where that is known."""
        share = c.hide_experts if overlap is None else 0.9 * overlap
        hidden = c.hide_tensor * min(self.tensor_s, self.compute_s) + share * min(self.experts_s, self.compute_s)
        device = self.compute_s + self.tensor_s + self.experts_s - hidden
        return float(larger(device, self.host_s, c.tied if self.tensor_s > 0 else 6.0))


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


def places(number: float, draws: int) -> float:
    """How many of ``number`` places a token is sent to that draws one ``draws`` times."""
    return number * (1 - (1 - 1 / number) ** draws)


class Pricer:
    """Prices one run with one set of constants."""

    def __init__(self, run: Run, c: Profile) -> None:
        self.run, self.c, self.m, self.p = run, c, run.model, run.plan
        devices = 1 if run.stack == TRACED else run.plan.devices    # traces are of one rank
        self.device = c.device(run.cluster.device, run.plan.precision, devices)
        self.cluster = _network(replace(run.cluster, device=self.device), c.network)
        self.tokens = self.p.micro_batch * self.m.seq_len / self.p.context
        self.passes = c.passes * c.unfused
        self._passes: dict[bool, tuple[float, float]] = {}
        self.compute_dtype = _DTYPES[self.p.precision]

    # --- groups ---------------------------------------------------------------------------------------------------

    def group(self, kind: str) -> Group:
        """Ranks are laid out as Megatron does: tensor innermost, then context, data, pipeline."""
        known, key = self.run.groups, (kind, self.c.network)
        if key not in known:
            known[key] = self._group(kind)
        return known[key]

    def _group(self, kind: str) -> Group:
        p = self.p
        shape = (p.pipeline, p.data, p.context, p.tensor)
        if kind in ("expert", "expert data"):
            inside = p.data * p.context * p.tensor
            expert = min(p.expert, inside)
            return self.cluster.group((p.pipeline, inside // expert, expert), 2 if kind == "expert" else 1)
        if kind in ("host", "replicas"):
            inside = max(1, min(p.data, self.cluster.links[0].num_devices // (p.context * p.tensor)))
            return self.cluster.group((p.pipeline, p.data // inside, inside, p.context * p.tensor),
                                      2 if kind == "host" else 1)
        if kind == "data":
            return self.cluster.group_of(shape, (1, 2))
        return self.cluster.group(shape, {"pipeline": 0, "context": 2, "tensor": 3}[kind])

    # --- one layer ------------------------------------------------------------------------------------------------

    def product_s(self, products: Sequence[Product], dtype: str | None = None) -> float:
        return sum(matmul_time_s(m, n, k, dtype or self.compute_dtype, self.device, count)
                   for m, n, k, count in products if min(m, n, k, count) > 0)

    def traffic_s(self, nbytes: float, tensor: float = math.inf) -> float:
        """Of tensors of ``tensor`` bytes each: what one kernel leaves in the cache, the next need not read."""
        return self.passes * float(traffic_s(nbytes, self.device, tensor, self.c.cache_bytes))

    def linears(self, mixed: bool) -> list[Product]:
        """Forward products of a layer's projections, on one rank."""
        m, t, tp = self.m, self.tokens, self.p.tensor
        products: list[Product] = []
        if m.latent is None:
            width = m.heads * m.head_dim
            products += [(t, (width + 2 * m.query_groups * m.head_dim) / tp, m.hidden, 1), (t, m.hidden, width / tp, 1)]
        else:
            z = m.latent
            if z.query_rank:
                products += [(t, z.query_rank, m.hidden, 1), (t, m.heads * z.query_key / tp, z.query_rank, 1)]
            else:
                products.append((t, m.heads * z.query_key / tp, m.hidden, 1))
            products += [(t, z.key_value_rank + z.rope, m.hidden, 1),
                         (t, m.heads * (z.query_key - z.rope + z.value) / tp, z.key_value_rank, 1),
                         (t, m.hidden, m.heads * z.value / tp, 1)]
        up = 2 if m.gated else 1
        if not mixed:
            return [*products, (t, up * m.ffn / tp, m.hidden, 1), (t, m.hidden, m.ffn / tp, 1)]
        e = m.experts
        assert e is not None
        local = max(1.0, e.number / self.p.expert)
        rows = t / (tp if self.p.sequence_parallel else 1) * e.top_k * self.p.expert / e.number
        products += [(rows, up * e.ffn, m.hidden, local), (rows, m.hidden, e.ffn, local)]
        if e.shared_ffn:
            products += [(t, up * e.shared_ffn / tp, m.hidden, 1), (t, m.hidden, e.shared_ffn / tp, 1)]
        return products

    def attention_s(self) -> tuple[float, float]:
        """Core attention forward and backward, seconds; with scores in memory unless ``flash``."""
        m, p, c = self.m, self.p, self.c
        d_qk, d_v = (m.latent.query_key, m.latent.value) if m.latent else (m.head_dim, m.head_dim)
        heads, s = p.micro_batch * m.heads / p.tensor, m.seq_len
        rows, columns = s / p.context, float(s)
        if 0 < m.window < s:
            columns *= 0.5 + m.window / s    # every other layer: window of the s/2 that a causal row has in the mean
        if not c.flash:
            rows, columns = float(s), float(s)
        forward, backward = map(float, attention_s(heads, rows, columns, (d_qk, d_v), c, self.device, True,
                                                   self.fused_softmax))
        if c.flash and p.context > 1:
            ring = self._ring_s(heads, d_qk + d_v)
            return float(larger(c.ring * forward, ring)), float(larger(c.ring * backward, 2 * ring))
        return forward, backward

    @property
    def fused_softmax(self) -> bool:
        return bool(softmax_is_fused(self.p.micro_batch * self.m.heads / self.p.tensor, self.m.seq_len))

    def _ring_s(self, heads: float, width: float) -> float:
        """Keys and values of the other context ranks come by."""
        m, p = self.m, self.p
        kv = p.micro_batch * m.query_groups / p.tensor * m.seq_len * width * 2
        return float(collectives.all_gather_s(kv, self.group("context")))

    def elementwise(self, mixed: bool) -> float:
        """Bytes of norms, biases, dropout, residuals, activation and transposes of one layer forward."""
        m, t, p = self.m, self.tokens, self.p
        rows = t / (p.tensor if p.sequence_parallel else 1)
        width = (m.heads + 2 * m.query_groups) * m.head_dim / p.tensor
        nbytes = rows * m.hidden * 2 * (2 + 3.5) * 2 + t * width * 4 + t * m.heads * m.head_dim / p.tensor * 4
        ffn = m.ffn / p.tensor
        if mixed and m.experts:
            e = m.experts
            ffn = e.top_k * e.ffn / (p.tensor if p.sequence_parallel else 1) + e.shared_ffn / p.tensor
            nbytes += rows * e.top_k * m.hidden * 2 * 8    # permute, and back, with the sums over top_k
            if e.biased and p.graphs != "step":
                nbytes += self.biases(rows * e.top_k)
        return nbytes + t * ffn * 2 * (3 if m.gated else 2)

    def biases(self, rows: float) -> float:
        """Bytes of adding each expert's vector after both its products, where no kernel does so on the way: the vector
        times the router's share in float32, a sum, one tensor of all experts' parts, and a cast (megatron/core/
        transformer/moe/experts.py: TEGroupedMLP._apply_bias)."""
        e = self.m.experts
        assert e is not None
        outputs = (2 if self.m.gated else 1) * e.ffn + self.m.hidden
        return rows * outputs * ((4 + 2 + 4 + 4) + (4 + 4) + (4 + 2))

    def quantise_s(self, products: Sequence[Product]) -> float:
        """Inputs read in two bytes, written in one, twice (as they are and transposed), with their largest values."""
        if self.p.precision == "bf16":
            return 0.0
        return self.traffic_s(self.c.quantise * sum(m * k * count for m, _, k, count in products))

    def layer(self, mixed: bool) -> tuple[Pass, Pass]:
        """Forward and backward of one layer; recomputed parts are in neither."""
        c, p = self.c, self.p
        products = self.linears(mixed)
        inputs = [(m, k, n, count) for m, n, k, count in products]
        weights = [(k, n, m, count) for m, n, k, count in products]
        attend, attend_back = self.attention_s()
        traffic = self.traffic_s(self.elementwise(mixed), 2.0 * self.tokens * self.m.hidden)
        quantise = self.quantise_s(products)
        grow = self.grow_s(sum(n * k * count for _, n, k, count in products))
        tensor, calls = self.tensor_s(mixed), 2 * (p.tensor > 1)
        experts = self.experts_s() if mixed else 0.0
        kernels = (self.expert_kernels() if mixed else 1) + (0 if c.flash or self.fused_softmax else UNFUSED_LAUNCHES)
        late = calls * (c.host_call_s + c.sync_s * (p.tensor - 1))
        host = c.host_s * kernels + late
        forward = Pass(self.product_s(products) + attend + traffic + quantise, tensor, experts, host)
        backward = Pass(self.product_s(inputs + weights) + attend_back + 1.6 * traffic + 1.5 * quantise + grow,
                        tensor * (1.5 if p.sequence_parallel else 1), experts,
                        c.host_s * c.host_backward * kernels + late)
        return forward, backward

    def grow_s(self, elements: float) -> float:
        """Adding a micro-batch's gradients to those before: in their type; or in float32."""
        if self.p.micro_batches == 1:
            return 0.0
        return self.copied_s(self.c.sum_bytes(2.0, 4.0 if self.run.float32_sums else 0.0) * elements)

    def copied_s(self, nbytes: float) -> float:
        """Bytes that are moved once, whatever the software."""
        return float(traffic_s(nbytes, self.device))

    def expert_kernels(self) -> float:
        """The host's time for a layer with experts, in those for one without: products and casts are launched expert
        by expert (transformer_engine's GroupedLinear), but for what CUDA graphs launch."""
        e, c = self.m.experts, self.c
        assert e is not None
        each = c.host_expert * max(1.0, e.number / self.p.expert)
        return {"none": c.host_experts + each, "parts": c.host_graphed * c.host_experts + each, "step": 0.1}[
            self.p.graphs]

    def tensor_s(self, mixed: bool) -> float:
        """Forward collectives of tensor parallelism: after attention and after the MLP."""
        if self.p.tensor == 1:
            return 0.0
        nbytes = self.tokens * self.m.hidden * 2
        group, times = self.group("tensor"), 1 if mixed and self.p.sequence_parallel else 2
        if self.p.sequence_parallel:
            one = float(collectives.all_gather_s(nbytes, group) + collectives.reduce_scatter_s(nbytes, group))
        else:
            one = float(collectives.all_reduce_s(nbytes, group))
        return times * (one + self.c.sync_s * (self.p.tensor - 1))

    def experts_s(self) -> float:
        """Tokens go to their experts and come back."""
        p, e = self.p, self.m.experts
        if p.expert == 1 or e is None:
            return 0.0
        rows = self.tokens / (p.tensor if p.sequence_parallel else 1)
        group = self.group("expert")
        inside = group.levels[0][0]
        if p.dispatcher == "alltoall":
            nbytes = rows * self.m.hidden * 2 * e.top_k
        elif inside < group.size:    # a token crosses once to each host that has an expert of its, and spreads there
            hosts = group.size / inside
            crossing = places(hosts, e.top_k) * (hosts - 1) / hosts
            nbytes = rows * self.m.hidden * 2 * crossing * group.size / (group.size - inside)
        else:
            nbytes = rows * self.m.hidden * 2 * places(group.size, e.top_k)
        return 2 * float(collectives.all_to_all_s(nbytes, group))

    # --- stages and the step --------------------------------------------------------------------------------------

    def micro_batch_s(self, mixed: bool) -> tuple[float, float]:
        """A layer's forward, and its backward with what is recomputed; FSDP's collectives beside them."""
        if mixed not in self._passes:
            self._passes[mixed] = self._micro_batch_s(mixed)
        return self._passes[mixed]

    def _micro_batch_s(self, mixed: bool) -> tuple[float, float]:
        c, p = self.c, self.p
        forward, backward = self.layer(mixed)
        seconds, back = (way.seconds(c, p.expert_overlap) for way in (forward, backward))
        if p.modules:
            back += self.again_s(mixed, seconds)
        elif p.recompute == "full":
            back += seconds - (self.product_s(self.linears(mixed)[-1:]) if c.early_stop else 0.0)
        elif p.recompute == "selective" and p.again is not None:
            back += p.again * seconds
        elif p.recompute == "selective" and is_torch(self.run.stack):
            back += 0.5 * max(0.0, seconds - self.attention_s()[0])    # torch keeps every other product's output
        elif p.recompute == "selective" and not c.flash:
            back += self.attention_s()[0]
        if p.fsdp and p.data * p.context > 1:
            gather, reduce = self.fsdp_s(mixed)
            again = gather if p.zero_stage >= 3 or not p.zero_stage else 0.0
            seconds, back = self.beside(seconds, gather), self.beside(back, again + reduce)
        return seconds, back

    def again_s(self, mixed: bool, forward_s: float) -> float:
        """The modules of a layer that Megatron-Core runs again when named, by its own names; at least their share of
        the host's time, a tenth of a layer each."""
        m, t, tp = self.m, self.tokens, self.p.tensor
        rows = t / (tp if self.p.sequence_parallel else 1)
        linears, z, e = self.linears(mixed), self.m.latent, self.m.experts
        inner = rows * e.top_k * e.ffn if mixed and e else t * m.ffn / tp
        seconds = {
            "core_attn": self.attention_s()[0],
            "layernorm": self.traffic_s(8.0 * rows * m.hidden),
            "mla_up_proj": self.product_s(linears[:4]) if z else 0.0,
            "mlp": 0.0 if mixed else self.product_s(linears[-2:]),
            "moe_act": self.traffic_s(6.0 * inner),
            "shared_experts": self.product_s(linears[-2:]) if mixed and e and e.shared_ffn else 0.0,
            "moe": 0.6 * forward_s if mixed else 0.0,
        }
        host = 0.1 * self.c.host_s
        return sum(larger(seconds.get(name, 0.0), host) for name in sorted(self.p.modules))

    def beside(self, compute_s: float, network_s: float) -> float:
        """FSDP fetches ahead: the slower of collectives and compute counts, and compute suffers; software that does not
        (DeepSpeed of 2021) does one after the other."""
        hidden = self.c.hide_data * (1 - self.c.interference) * min(compute_s, network_s)
        return compute_s + network_s - hidden

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
        group, replicas = self.group("data"), 0.0
        if self.p.hybrid:
            group, across = self.group("host"), self.group("replicas")
            replicas = float(collectives.all_reduce_s(elements * 2 / group.size, across))
        width = 1 if self.p.precision == "fp8" and self.run.stack != "composer" else 2
        return (float(collectives.all_gather_s(elements * width, group)),
                float(collectives.reduce_scatter_s(elements * 2, group)) + replicas)

    def head_s(self) -> float:
        """Logits and loss of one micro-batch, forward and backward."""
        m, p, t = self.m, self.p, self.tokens
        vocab = self.run.vocab / p.tensor
        products = [(t, vocab, m.hidden, 1), (t, m.hidden, vocab, 1), (m.hidden, vocab, t, 1)]
        loss = self.c.loss_bytes * t * vocab
        collective = float(collectives.all_reduce_s(t * m.hidden * 2, self.group("tensor")))
        return self.product_s(products, "float16") + self.traffic_s(loss) / self.passes + collective

    def further_s(self) -> float:
        """A layer that predicts a further token: it reads a state and an embedding, brought to the width of one."""
        h, t = self.m.hidden, self.tokens
        joined = self.product_s([(t, h, 2 * h, 1), (t, 2 * h, h, 1), (2 * h, h, t, 1)])
        return sum(self.micro_batch_s(self.m.experts is not None)) + joined + self.head_s()

    def embedding_s(self) -> float:
        """Lookup and its gradient, with the sum over parts of the vocabulary."""
        t, m = self.tokens, self.m
        rows = t * m.hidden * 2
        return self.traffic_s(8 * rows) + float(collectives.all_reduce_s(rows, self.group("tensor")))

    def hop_s(self) -> float:
        """Activations to the next stage: each tensor rank sends its part, then they gather."""
        p, m = self.p, self.m
        if p.pipeline == 1:
            return 0.0
        nbytes = self.tokens * m.hidden * 2
        seconds = float(collectives.send_recv_s(nbytes / p.tensor, self.group("pipeline")))
        if p.tensor > 1 and not p.sequence_parallel:
            seconds += float(collectives.all_gather_s(nbytes, self.group("tensor")))
        return seconds

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
        stages = [layers * each + hop + c.micro_s for layers in self.stage_layers()]
        table_s = self.grow_s(self.run.vocab * m.hidden / p.tensor)
        stages[0] += self.embedding_s() + self.root_s() / p.pipeline + table_s
        stages[-1] += self.head_s() + (0.0 if m.tied and p.pipeline == 1 else table_s)
        stages[-1] += m.further * self.further_s()
        return stages

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

    def data_s(self, backward_s: float, forward_s: float) -> float:
        """Reducing gradients over data ranks once a step, and gathering parameters where ZeRO shards them.

        Only the last backward and the first forward of a stage can hide them.
        """
        p = self.p
        if p.fsdp or p.data * p.context == 1:
            return 0.0
        dense, experts = self.stage_parameters(0)
        reduce = gather = 0.0
        for elements, group in ((dense, self.group("data")), (experts, self.group("expert data"))):
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
        ends = self.cluster.group((p.pipeline, p.data, p.context, p.tensor), 0)
        two = replace(ends, levels=tuple((min(2, n), link) for n, link in ends.levels), size=min(2, ends.size))
        return float(collectives.all_reduce_s(m.vocab * m.hidden / p.tensor * self.run.gradient_bytes, two))

    def shards(self) -> int:
        """Ranks among which ZeRO or FSDP shards."""
        return self.group("host").size if self.p.hybrid else self.p.data * self.p.context

    def optimizer_s(self) -> float:
        """Adam over what the rank holds, and norm, scaling and copies of gradients."""
        p = self.p
        elements = sum(self.stage_parameters(0))
        ranks = self.shards()
        mine = elements / ranks if p.zero_stage or p.fsdp else elements
        update = float(memory.optimizer_step_s(mine, self.c.kept("bfloat16"), "adamw", self.device))
        return update + self.copied_s(mine * self.c.update_bytes)

    def step(self) -> Breakdown:
        stages, p = self.stages_s(), self.p
        pipe = pipeline_s(stages, p.micro_batches, p.virtual)
        forward, backward = self.micro_batch_s(self.m.mixed_layers * 2 > self.m.layers)
        layers = max(self.stage_layers())
        data, optimizer = self.data_s(layers * backward, layers * forward) + self.tied_s(), self.optimizer_s()
        bubble = pipe - p.micro_batches * max(stages)
        total = pipe + data + optimizer + self.c.step_s
        return Breakdown(total, pipe, bubble, data, optimizer, forward, backward)


def _network(cluster: Cluster, share: float) -> Cluster:
    """The outermost links at a share of their rate."""
    outer = cluster.links[-1]
    outer = replace(outer, bandwidth_bytes_per_s=outer.bandwidth_bytes_per_s * share)
    return replace(cluster, links=(*cluster.links[:-1], outer))
