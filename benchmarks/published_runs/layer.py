"""Seconds of one layer of a run on a rank: products, attention, traffic, tensor and expert parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.published_runs.machine import Machine, Product
from cost_models import collectives
from cost_models.compute import UNFUSED_LAUNCHES, attention_s, larger, ring_sums_s, softmax_is_fused
from cost_models.profile import Profile


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


def places(number: float, draws: int) -> float:
    """How many of ``number`` places a token is sent to that draws one ``draws`` times."""
    return number * (1 - (1 - 1 / number) ** draws)


class Layer:
    """A layer of the run on this machine; ``mixed``: with experts."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.run, self.c, self.m, self.p = machine, machine.run, machine.c, machine.m, machine.p

    def passes(self, mixed: bool) -> tuple[Pass, Pass]:
        """Forward and backward of one layer; recomputed parts are in neither."""
        c, p = self.c, self.p
        products = self.linears(mixed)
        inputs = [(m, k, n, count) for m, n, k, count in products]
        weights = [(k, n, m, count) for m, n, k, count in products]
        attend, attend_back = self.attention_s()
        traffic = self.machine.traffic_s(self.elementwise(mixed), 2.0 * self.machine.tokens * self.m.hidden)
        quantise = self.quantise_s(products)
        grow = self.machine.grow_s(sum(n * k * count for _, n, k, count in products))
        tensor, calls = self.tensor_s(mixed), 2 * (p.tensor > 1)
        experts = self.experts_s() if mixed else 0.0
        kernels = (self.expert_kernels() if mixed else 1) + (0 if c.flash or self.fused_softmax else UNFUSED_LAUNCHES)
        late = calls * (c.host_call_s + c.sync_s * (p.tensor - 1))
        host = c.host_s * kernels + late
        forward = Pass(self.machine.product_s(products) + attend + traffic + quantise, tensor, experts, host)
        backward = Pass(self.machine.product_s(inputs + weights) + attend_back + 1.6 * traffic + 1.5 * quantise + grow,
                        tensor * (1.5 if p.sequence_parallel else 1), experts,
                        c.host_s * c.host_backward * kernels + late)
        return forward, backward

    def linears(self, mixed: bool) -> list[Product]:
        """Forward products of a layer's projections, on one rank."""
        m, t, tp = self.m, self.machine.tokens, self.p.tensor
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
        forward, backward = map(float, attention_s(heads, rows, columns, (d_qk, d_v), c, self.machine.device, True,
                                                   self.fused_softmax))
        if c.flash and p.context > 1:
            ring, groups = self._ring_s(heads, d_qk + d_v), p.micro_batch * m.query_groups / p.tensor
            sums = ring_sums_s(p.context, heads * rows * d_v, (heads * d_qk + groups * (d_qk + d_v)) * rows, 2.0, c,
                               self.machine.device)
            return float(larger(forward + sums[0], ring)), float(larger(backward + sums[1], 2 * ring))
        return forward, backward

    @property
    def fused_softmax(self) -> bool:
        return bool(softmax_is_fused(self.p.micro_batch * self.m.heads / self.p.tensor, self.m.seq_len))

    def _ring_s(self, heads: float, width: float) -> float:
        """Keys and values of the other context ranks come by."""
        m, p = self.m, self.p
        kv = p.micro_batch * m.query_groups / p.tensor * m.seq_len * width * 2
        return float(collectives.all_gather_s(kv, self.machine.group("context")))

    def elementwise(self, mixed: bool) -> float:
        """Bytes of norms, biases, dropout, residuals, activation and transposes of one layer forward."""
        m, t, p = self.m, self.machine.tokens, self.p
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
        return self.machine.traffic_s(self.c.quantise * sum(m * k * count for m, _, k, count in products))

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
        nbytes = self.machine.tokens * self.m.hidden * 2
        group, times = self.machine.group("tensor"), 1 if mixed and self.p.sequence_parallel else 2
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
        rows = self.machine.tokens / (p.tensor if p.sequence_parallel else 1)
        group = self.machine.group("expert")
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

    def again_s(self, mixed: bool, forward_s: float) -> float:
        """The modules of a layer that Megatron-Core runs again when named, by its own names; at least their share of
        the host's time, a tenth of a layer each."""
        m, t, tp = self.m, self.machine.tokens, self.p.tensor
        rows = t / (tp if self.p.sequence_parallel else 1)
        linears, z, e = self.linears(mixed), self.m.latent, self.m.experts
        inner = rows * e.top_k * e.ffn if mixed and e else t * m.ffn / tp
        seconds = {
            "core_attn": self.attention_s()[0],
            "layernorm": self.machine.traffic_s(8.0 * rows * m.hidden),
            "mla_up_proj": self.machine.product_s(linears[:4]) if z else 0.0,
            "mlp": 0.0 if mixed else self.machine.product_s(linears[-2:]),
            "moe_act": self.machine.traffic_s(6.0 * inner),
            "shared_experts": self.machine.product_s(linears[-2:]) if mixed and e and e.shared_ffn else 0.0,
            "moe": 0.6 * forward_s if mixed else 0.0,
        }
        host = 0.1 * self.c.host_s
        return sum(larger(seconds.get(name, 0.0), host) for name in sorted(self.p.modules))
