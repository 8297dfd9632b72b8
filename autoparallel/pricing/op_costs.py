"""Seconds of one execution of an op, forward and backward, by strategy; without the exchanges inside its variants.

Two sources: the curves of the cluster's description (`CurveCosts`), or the fitted constants of the software that runs
there (`ProfileCosts`). `costs_of` picks one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import numpy as np

from autoparallel.capture import TensorMeta
from autoparallel.layout import shard
from autoparallel.layout.shapes import most_heads_read
from autoparallel.pricing.chains import InChain
from autoparallel.rules.rule import Dims, Rule
from autoparallel.strategies.space import Spaces, StrategySet
from cost_models import Cluster, compute
from cost_models.profile import Profile

Pair = tuple[np.ndarray, np.ndarray]


def operands_of(s: StrategySet) -> list[int]:
    """The inputs, by position, for each of which backward of a product or convolution computes a product, where it
    needs a gradient. (Numbers of experts and the like are no such operands.)"""
    rule = s.rule
    if rule is None or rule.op_class not in ("matmul", "conv"):
        return []
    return [i for i in sorted(rule.saves) if i < len(s.input_metas) and s.input_metas[i].dtype.is_floating_point]


class CurveCosts:
    """A roofline with the device's efficiency curves. ``spread``: divide the work by this number. ``pieces``: of
    products, those of one of so many equal pieces of the rows of the first operand."""

    def __init__(self, spaces: Spaces, cluster: Cluster, training: bool = True, spread: int = 1, pieces: int = 1
                 ) -> None:
        self.spaces, self.device, self.training, self.spread = spaces, cluster.working_device, training, spread
        self.pieces = pieces

    def work_s(self, s: StrategySet, chain: InChain | None = None) -> Pair:
        """Seconds (forward, backward) of an op that does work."""
        rule, zeros = s.rule, np.zeros(len(s.strategies))
        assert rule is not None
        flops = rule.flops * share_of_work(s) / self.spread / self.pieces
        inputs, outputs = self.read_bytes(s), [x / self.pieces for x in self.moved(s.output_metas, s.outputs)]
        inputs[:1] = [x / self.pieces for x in inputs[:1]]
        forward = self._roofline_s(rule, s, flops, sum(inputs, zeros) + sum(outputs, zeros))
        if not self.has_backward(s):
            return forward, zeros
        wanted = [i for i, m in enumerate(s.input_metas) if m.requires_grad]
        if rule.op_class == "elementwise" or not rule.gradient_ops:
            return forward, sum((self._gradient_s(rule, s, i, inputs, outputs) for i in wanted), zeros)
        operands = operands_of(s)
        share = sum(i in wanted for i in operands) / len(operands) if operands else 1.0  # a bias needs no product
        traffic = sum(outputs, zeros) + sum((inputs[i] for i in rule.saves if i < len(inputs)), zeros)
        traffic = traffic + sum((inputs[i] for i in wanted), zeros)
        backward = self._roofline_s(rule, s, flops * rule.backward_flops * share, traffic)
        calls = sum(i in wanted for i in operands) if operands else 1
        return forward, backward + max(0, calls - 1) * self.launch_s    # a kernel for each gradient

    def view_s(self, s: StrategySet) -> np.ndarray:
        """Backward seconds of a view, by strategy: gradients of parts are concatenated; of the whole value nothing."""
        metas = [*s.input_metas[:1], *s.output_metas]
        parts = len(metas) > 2 or metas[-1].num_elements < metas[0].num_elements
        if not (parts and self.training and metas[0].requires_grad):
            return np.zeros(len(s.strategies))
        nbytes = sum(self.moved(metas, [*s.inputs[:1], *s.outputs]))
        return self.element_wise_s(nbytes, dtype_name(metas[0]))

    def sum_s(self, s: StrategySet, readers: int, chain: InChain | None = None) -> np.ndarray:
        """Seconds of summing the gradients from several readers of a value, by strategy of the value. ``chain``: which
        of them chains add up."""
        (meta,), (numbers,) = s.output_metas, s.outputs
        if readers < 2 or not (meta.requires_grad and self.training):
            return np.zeros(len(numbers))
        nbytes = 3 * self.local_bytes(meta, numbers) / self.spread
        return (readers - 1) * self.element_wise_s(nbytes, dtype_name(meta))

    def element_wise_s(self, nbytes: Any, dtype: str) -> Any:
        """Seconds of one element-wise kernel."""
        return np.asarray(compute.op_time_s("elementwise", 0.0, nbytes, dtype, self.device))

    @property
    def launch_s(self) -> float:
        return self.device.launch_s

    def has_backward(self, s: StrategySet) -> bool:
        return self.training and any(m.requires_grad for m in s.output_metas)

    def read_bytes(self, s: StrategySet) -> list[np.ndarray]:
        """Bytes of each input; of a table in which rows are looked up no more than of the rows."""
        found = self.moved(s.input_metas, s.inputs)
        if s.rule is not None and s.rule.op_class == "gather" and s.output_metas:
            rows = self.moved(s.output_metas[:1], s.outputs[:1])[0]
            found[:1] = [np.minimum(nbytes, rows) for nbytes in found[:1]]
        return found

    def local_bytes(self, meta: TensorMeta, numbers: np.ndarray) -> np.ndarray:
        """Bytes on the fullest rank; by layout number in ``numbers``."""
        return self.spaces(meta).local_elements[numbers] * meta.dtype.itemsize

    def moved(self, metas: Sequence[TensorMeta], numbers: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [self.local_bytes(m, n) / self.spread for m, n in zip(metas, numbers, strict=True)]

    def _roofline_s(self, rule: Rule, s: StrategySet, flops: Any, nbytes: Any) -> Any:
        return compute.op_time_s(rule.op_class, flops, nbytes, dtype_name(worked_in(s)), self.device)

    def _gradient_s(self, rule: Rule, s: StrategySet, number: int, inputs: Sequence[np.ndarray],
                    outputs: Sequence[np.ndarray]) -> np.ndarray:
        """Seconds of an element-wise op's gradient of input ``number``, by strategy: the first kernel reads the
        output's gradient and the saved tensors and writes one tensor of the output's size; each further kernel reads
        and writes one; a broadcast input needs a sum."""
        dtype, whole = dtype_name(worked_in(s)), outputs[0]
        needs = [inputs[i] for i in rule.saves if i < len(inputs) and (i != number or len(inputs) == 1)]
        read = sum(needs, whole) + (whole if rule.saves_output else 0.0)
        moved = [read + whole, *(2 * whole for _ in range(rule.gradient_ops - 1))][: rule.gradient_ops]
        if rule.op_class == "elementwise" and _factors(rule.inputs[number]) < _factors(rule.outputs[0]):
            moved.append(whole + inputs[number])
        return sum((self.element_wise_s(nbytes, dtype) for nbytes in moved), np.zeros(len(s.strategies)))


class ProfileCosts(CurveCosts):
    """Matrix products by their tiles, attention and element-wise traffic by the software's fitted constants.

    A kernel takes the device no less time than the host needs to launch it. That holds where the host is behind; a host
    that is ahead launches while the device works, so predictions ask for both apart: ``part`` is "device" or "host".
    """

    def __init__(self, spaces: Spaces, cluster: Cluster, profile: Profile, training: bool = True,
                 spread: int = 1, part: str = "both", pieces: int = 1) -> None:
        super().__init__(spaces, cluster, training, spread, pieces)
        self.profile, self.kernel_s, self.part = profile, profile.kernel_s * cluster.correction.compute, part

    @property
    def launch_s(self) -> float:
        return 0.0 if self.part == "device" else self.kernel_s

    def work_s(self, s: StrategySet, chain: InChain | None = None) -> Pair:
        rule = s.rule
        assert rule is not None
        if rule.op_class == "matmul" and self.spread == 1 and (sizes := product_sizes(rule, s)) is not None:
            return self._product_s(rule, s, sizes)
        if rule.op_class == "attention":
            return self._attention_s(rule, s)
        if chain is not None:
            return self._in_chain_s(s, chain)
        return super().work_s(s)

    def sum_s(self, s: StrategySet, readers: int, chain: InChain | None = None) -> np.ndarray:
        if chain is None:
            return super().sum_s(s, readers)
        (meta,), (numbers,) = s.output_metas, s.outputs
        if not (meta.requires_grad and self.training):
            return np.zeros(len(numbers))
        nbytes = (chain.gradients - 1) * self.local_bytes(meta, numbers) / self.spread    # read once more each
        seconds = compute.traffic_s(nbytes, self.device, nbytes, self.profile.cache_bytes)
        return self._unlaunched(self.profile.passes * np.asarray(seconds))

    def element_wise_s(self, nbytes: Any, dtype: str) -> Any:
        seconds = compute.traffic_s(nbytes, self.device, np.asarray(nbytes) / 3, self.profile.cache_bytes)
        return self._launched(self.profile.kernel_bytes * seconds)

    def _launched(self, seconds: Any) -> Any:
        """Seconds of one kernel that takes the device so long; of none, 0."""
        if self.part == "device":
            return np.asarray(seconds)
        least = self.kernel_s if self.part == "host" else np.maximum(seconds, self.kernel_s)
        return np.where(np.asarray(seconds) > 0, least, 0.0)

    def _unlaunched(self, seconds: Any) -> Any:
        """Seconds of what another kernel does on the way."""
        return 0.0 * seconds if self.part == "host" else seconds

    def _roofline_s(self, rule: Rule, s: StrategySet, flops: Any, nbytes: Any) -> Any:
        if rule.op_class == "conv":
            return self._launched(super()._roofline_s(rule, s, flops, nbytes))
        if rule.op_class in compute.MATRIX:
            tiles = self.device.tiles
            assert tiles is not None
            peak = compute.peak_flops_per_s(rule.op_class, dtype_name(worked_in(s)), self.device)
            return self._launched(np.maximum(np.asarray(flops) / (peak * tiles.share),
                                             compute.traffic_s(nbytes, self.device)))
        return self.element_wise_s(nbytes, dtype_name(worked_in(s)))

    def _product_s(self, rule: Rule, s: StrategySet, sizes: tuple[np.ndarray, ...]) -> Pair:
        """A product, and one for each operand that needs a gradient."""
        m, n, k, count = np.ceil(sizes[0] / self.pieces), *sizes[1:]
        dtype = dtype_name(worked_in(s))
        forward = self._launched(compute.matmuls_s(m, n, k, count, dtype, self.device))
        left, right = sorted(rule.saves)
        backward = np.zeros(len(s.strategies))
        if self.training and s.input_metas[left].requires_grad:
            backward = backward + self._launched(compute.matmuls_s(m, k, n, count, dtype, self.device))
        if self.training and s.input_metas[right].requires_grad:
            backward = backward + self._launched(compute.matmuls_s(k, n, m, count, dtype, self.device))
        return forward, backward

    def _attention_s(self, rule: Rule, s: StrategySet) -> Pair:
        """Flash attention, or with scores in memory (`compute.attention_s`)."""
        query, key, value = s.input_metas[:3]
        causal = rule.flops < 2.0 * query.num_elements * key.shape[-2] * (1 + value.shape[-1] / query.shape[-1]) * 0.75
        heads = query.num_elements / (query.shape[-1] * query.shape[-2])
        work = share_of_work(s) / self.spread
        fused = compute.softmax_is_fused(np.round(heads * work, 6), float(key.shape[-2]))
        forward, backward = compute.attention_s(
            heads * work, float(query.shape[-2]), float(key.shape[-2]), (query.shape[-1], value.shape[-1]),
            self.profile, self.device, causal, fused, dtype=dtype_name(query))
        sums = self._ring_sums_s(s)
        forward, backward = forward + sums[0], backward + sums[1]
        moved = 2 * sum(self.moved([*s.input_metas[:3], *s.output_metas[:1]], [*s.inputs[:3], *s.outputs[:1]]),
                        np.zeros(len(s.strategies)))    # heads are brought together, and apart again
        copies = self.profile.passes * self.profile.unfused * compute.traffic_s(moved, self.device, moved / 8,
                                                                                self.profile.cache_bytes)
        if not self.has_backward(s):
            return self._launched(forward + copies), np.zeros(len(s.strategies))
        kernels = np.where(fused, 1.0, 1.0 + self._more_kernels) if self.part == "host" else 1.0
        return kernels * self._launched(forward + copies), kernels * self._launched(backward + copies)

    def _ring_sums_s(self, s: StrategySet) -> Pair:
        """Seconds of the sums over the rounds of a ring, by strategy; 0 of the others."""
        of_ring = np.array([one.variant == "ring" for one in s.axis_strategies])[s.array]
        rounds = np.where(of_ring, s.mesh_shape, 0).sum(axis=1)
        query, key, value, out = (nbytes / m.dtype.itemsize for nbytes, m in zip(
            self.moved([*s.input_metas[:3], *s.output_metas[:1]], [*s.inputs[:3], *s.outputs[:1]]),
            [*s.input_metas[:3], *s.output_metas[:1]], strict=True))
        return compute.ring_sums_s(rounds, out, query + key + value, s.output_metas[0].dtype.itemsize, self.profile,
                                   self.device)

    @property
    def _more_kernels(self) -> float:
        """Kernels of an attention whose softmax is not fused."""
        p = self.profile
        return 0.0 if p.flash else compute.UNFUSED_LAUNCHES * p.host_s / p.kernel_s

    def _in_chain_s(self, s: StrategySet, chain: InChain) -> Pair:
        """The chain's traffic that falls to this op: forward reads inputs from memory and writes what leaves the chain;
        backward reads those results' gradients and what it needs of forward, and writes the inputs' gradients."""
        zeros = np.zeros(len(s.strategies))
        if chain.loss:
            return self._loss_s(s)
        inputs, outputs = self.read_bytes(s), sum(self.moved(s.output_metas, s.outputs), zeros)
        read = sum((nbytes for nbytes, own in zip(inputs, chain.reads, strict=False) if own), zeros)
        forward = read + (outputs if chain.writes else 0.0)
        if not self.has_backward(s):
            return self._chain_s(forward, chain), zeros
        made = sum((nbytes for nbytes, own, m in zip(inputs, chain.reads, s.input_metas, strict=False)
                    if own and m.requires_grad), zeros)
        backward = made + (outputs if chain.writes else 0.0)
        if chain.saves:
            backward = backward + (outputs if chain.writes else read)
        return self._chain_s(forward, chain), self._chain_s(backward, chain)

    def _loss_s(self, s: StrategySet) -> Pair:
        """A loss over classes by the software's bytes for a logit, a third of them forward."""
        (numbers, *_), (logits, *_) = s.inputs, s.input_metas
        moved = self.profile.loss_bytes * self.spaces(logits).local_elements[numbers] / self.spread
        seconds = np.asarray(compute.traffic_s(moved, self.device))
        return self._launched(seconds / 3), self._launched(seconds / 1.5) if self.has_backward(s) else 0 * seconds

    def _chain_s(self, nbytes: Any, chain: InChain) -> Any:
        seconds = self.profile.passes * compute.traffic_s(nbytes, self.device, np.asarray(nbytes) / 3,
                                                               self.profile.cache_bytes)
        return self._launched(seconds) if chain.writes else self._unlaunched(seconds)


class OpCosts(Protocol):
    """Seconds of one execution of an op on some devices, as `CurveCosts` has them for devices of one kind."""

    def work_s(self, s: StrategySet, chain: InChain | None = None) -> Pair: ...

    def view_s(self, s: StrategySet) -> np.ndarray: ...

    def sum_s(self, s: StrategySet, readers: int, chain: InChain | None = None) -> np.ndarray: ...

    def local_bytes(self, meta: TensorMeta, numbers: np.ndarray) -> np.ndarray: ...


class MixedCosts:
    """Costs on devices of several kinds, whose shards are equal: those of the slowest; ``least``: of the fastest, for
    lower bounds."""

    def __init__(self, each: Sequence[CurveCosts], least: bool = False) -> None:
        self.each, self.least = each, least

    def work_s(self, s: StrategySet, chain: InChain | None = None) -> Pair:
        pairs = [one.work_s(s, chain) for one in self.each]
        return self._of([forward for forward, _ in pairs]), self._of([backward for _, backward in pairs])

    def view_s(self, s: StrategySet) -> np.ndarray:
        return self._of([one.view_s(s) for one in self.each])

    def sum_s(self, s: StrategySet, readers: int, chain: InChain | None = None) -> np.ndarray:
        return self._of([one.sum_s(s, readers, chain) for one in self.each])

    def local_bytes(self, meta: TensorMeta, numbers: np.ndarray) -> np.ndarray:
        return self.each[0].local_bytes(meta, numbers)

    def _of(self, seconds: Sequence[np.ndarray]) -> np.ndarray:
        return worst(seconds, self.least)


def worst(seconds: Sequence[np.ndarray], least: bool = False) -> np.ndarray:
    """The largest of arrays of one shape, element by element; ``least``: the smallest."""
    if len(seconds) == 1:
        return seconds[0]
    return np.min(np.stack(seconds), axis=0) if least else np.max(np.stack(seconds), axis=0)


def costs_of(spaces: Spaces, kinds: Sequence[Cluster], training: bool = True, spread: int = 1, part: str = "both",
             cache: float = 1.0, least: bool = False, pieces: int = 1) -> OpCosts:
    """The costs of ops on devices of these kinds (`Cluster.kinds`), each by its profile, if it has one. ``part``: as in
    `ProfileCosts`; ``cache``: with so many times the device's cache; ``least``: on the fastest of the devices;
    ``pieces``: as in `CurveCosts`."""
    def of(kind: Cluster) -> CurveCosts:
        if kind.profile is None:
            return CurveCosts(spaces, kind, training, spread, pieces)
        profile = kind.profile if cache == 1 else replace(kind.profile, cache_bytes=cache * kind.profile.cache_bytes)
        return ProfileCosts(spaces, kind, profile, training, spread, part, pieces)

    return of(kinds[0]) if len(kinds) == 1 else MixedCosts([of(kind) for kind in kinds], least)


def factor_lengths(s: StrategySet) -> dict[str, tuple[float, np.ndarray]]:
    """By factor that a mesh axis may shard: its size, and the length of the longest shard, by strategy."""
    known = s.rule.sizes if s.rule is not None else {}
    sizes = {one.factor: known.get(one.factor) or _factor_size(s, number)
             for number, one in enumerate(s.axis_strategies) if one.factor}
    found = {}
    for factor, size in sizes.items():
        uses = np.array([one.factor == factor for one in s.axis_strategies])[s.array]
        length = np.full(len(s.strategies), float(size))
        for axis, n in enumerate(s.mesh_shape):
            length = np.where(uses[:, axis], np.ceil(length / n), length)
        found[factor] = (float(size), length)
    return found


def share_of_work(s: StrategySet) -> np.ndarray:
    """The largest rank's share of the op's work, by strategy: the product of ceil(size / shards) / size over sharded
    factors. With k shards of a triangular factor (causal attention) the last one has 2 - 1/k times the mean, unless
    ranks have an early and a late part each."""
    share = np.ones(len(s.strategies))
    for size, length in factor_lengths(s).values():
        share *= length / size if size else 1.0
    uneven = np.array([[one.triangular and (not one.halved or one.halved % (2 * n) > 0) for n in s.mesh_shape]
                       for one in s.axis_strategies])[s.array, np.arange(len(s.mesh_shape))]
    shards = np.where(uneven, np.array(s.mesh_shape), 1).prod(axis=1)
    return np.where(shards > 1, 2 - 1 / shards, 1.0) * share


def share_read(s: StrategySet, number: int) -> np.ndarray:
    """The share of an input's shard that the op reads, by strategy: an inner axis strategy (`AxisStrategy.inner`) cuts
    heads of grouped queries, and picks the heads of keys that serve them."""
    factors = {one.factor for one in s.axis_strategies if one.inner}
    cuts = [one.inputs[number] for one in s.axis_strategies if one.factor in factors and one.inputs[number].is_shard]
    if not cuts:
        return np.ones(len(s.strategies))
    dim, inner = cuts[0].dim, np.array([one.inner for one in s.axis_strategies])[s.array]
    outer = np.array([one.inputs[number] == shard(dim) for one in s.axis_strategies])[s.array]
    heads, groups = (s.input_metas[place].shape[dim] for place in (0, number))
    read = [most_heads_read(heads, groups, tuple(n for n, cuts in zip(s.mesh_shape, row, strict=True) if cuts))
            for row in (inner | outer).tolist()]
    return np.array(read) * np.where(outer, np.array(s.mesh_shape), 1).prod(axis=1) / groups


def product_sizes(rule: Rule, s: StrategySet) -> tuple[np.ndarray, ...] | None:
    """Local (m, n, k, count) of ``count`` products [m, k] x [k, n], by strategy; None for ops that are no plain
    product of two operands."""
    if len(rule.saves) != 2 or max(rule.saves) >= len(rule.inputs) or not rule.outputs:
        return None
    left, right = (set(_factors(rule.inputs[i])) for i in sorted(rule.saves))
    whole = [size for i in sorted(rule.saves) for size, dim in zip(s.input_metas[i].shape, rule.inputs[i], strict=True)
             if dim is None and size > 1]
    sections = any(one.variant == "sections" for one in rule.variants)
    if whole and not sections:
        return None
    lengths, result = factor_lengths(s), _factors(rule.outputs[0])

    def length(factors: set[str | None]) -> np.ndarray:
        total = np.ones(len(s.strategies))
        for factor in factors:
            assert factor is not None
            total = total * (lengths[factor][1] if factor in lengths else float(rule.sizes[factor]))
        return total

    if (left ^ right) - result:
        return None
    if sections:    # of results side by side, each cut by "n", a factor of the variant alone
        size, cut = lengths.get("n", (1.0, np.ones(len(s.strategies))))
        return length(left - right), math.prod(whole) * cut / size, length(left & right), length(set())
    return (length(left - right), length(right - left), length((left & right) - result), length(left & right & result))


def _factor_size(s: StrategySet, number: int) -> int:
    strategy = s.axis_strategies[number]
    metas = zip((*strategy.inputs, *strategy.outputs), (*s.input_metas, *s.output_metas), strict=True)
    return min(meta.shape[p.dim] for p, meta in metas if p.is_shard)


def _factors(dims: Dims) -> frozenset[str | None]:
    return frozenset(dims) - {None}


def worked_in(s: StrategySet) -> TensorMeta:
    """The tensor whose dtype the op computes in: the first operand of products (a mixture's result has the dtype of its
    routing weights), else the result."""
    product = s.rule is not None and s.rule.op_class in ("matmul", "attention", "conv")
    return s.input_metas[0] if product or not s.output_metas else s.output_metas[0]


@cache
def _name_of(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return name if dtype.is_floating_point else "float32"


def dtype_name(meta: TensorMeta) -> str:
    """The dtype's name in `cost_models`; integers count as float32."""
    return _name_of(meta.dtype)


def kept_precision(meta: TensorMeta, cluster: Cluster) -> str:
    """The precision (`cost_models.memory.PRECISIONS`) in which the cluster's software trains parameters of a dtype."""
    return dtype_name(meta) if cluster.profile is None else cluster.profile.kept(dtype_name(meta))
