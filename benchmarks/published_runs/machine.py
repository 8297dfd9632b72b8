"""A published run on its machine: groups of ranks, and seconds of products and of memory traffic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.published_runs.rows import TRACED, Run
from cost_models import Cluster, Group
from cost_models.compute import matmul_time_s, traffic_s
from cost_models.profile import Profile

Product = tuple[float, float, float, float]    # m, n, k, how many
_DTYPES = {"bf16": "float16", "fp8": "float8_e4m3fn", "fp4": "float4_e2m1fn"}


class Machine:
    """One rank of a run, with the constants ``c`` of its software. ``tokens``: of one micro-batch on the rank."""

    def __init__(self, run: Run, c: Profile) -> None:
        self.run, self.c, self.m, self.p = run, c, run.model, run.plan
        devices = 1 if run.stack == TRACED else run.plan.devices    # traces are of one rank
        self.device = c.device(run.cluster.device, run.plan.precision, devices)
        self.cluster = _network(replace(run.cluster, device=self.device), c.network)
        self.tokens = self.p.micro_batch * self.m.seq_len / self.p.context
        self.passes = c.passes * c.unfused
        self.compute_dtype = _DTYPES[self.p.precision]

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

    def product_s(self, products: Sequence[Product], dtype: str | None = None) -> float:
        return sum(matmul_time_s(m, n, k, dtype or self.compute_dtype, self.device, count)
                   for m, n, k, count in products if min(m, n, k, count) > 0)

    def traffic_s(self, nbytes: float, tensor: float = math.inf) -> float:
        """Of tensors of ``tensor`` bytes each: what one kernel leaves in the cache, the next need not read."""
        return self.passes * float(traffic_s(nbytes, self.device, tensor, self.c.cache_bytes))

    def copied_s(self, nbytes: float) -> float:
        """Bytes that are moved once, whatever the software."""
        return float(traffic_s(nbytes, self.device))

    def grow_s(self, elements: float) -> float:
        """Adding a micro-batch's gradients to those before: in their type; or in float32."""
        if self.p.micro_batches == 1:
            return 0.0
        return self.copied_s(self.c.sum_bytes(2.0, 4.0 if self.run.float32_sums else 0.0) * elements)

    def shards(self) -> int:
        """Ranks among which ZeRO or FSDP shards."""
        return self.group("host").size if self.p.hybrid else self.p.data * self.p.context


def _network(cluster: Cluster, share: float) -> Cluster:
    """The outermost links at a share of their rate."""
    outer = cluster.links[-1]
    outer = replace(outer, bandwidth_bytes_per_s=outer.bandwidth_bytes_per_s * share)
    return replace(cluster, links=(*cluster.links[:-1], outer))
