"""Seconds and bytes of decisions and tensor uses in one step: what the problem sums, the prediction itemises and the
simulation schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autoparallel.capture import TensorMeta
from autoparallel.pricing.chains import fuses
from autoparallel.pricing.counts import ExecutionCounts, Summing
from autoparallel.pricing.equivalence import Equivalence
from autoparallel.pricing.host_activations import HostActivations
from autoparallel.pricing.layer_overlap import LayerOverlap, exposed_s
from autoparallel.pricing.memo import Memo
from autoparallel.pricing.op_costs import dtype_name, share_of_work
from autoparallel.pricing.redistribution_costs import PricedStep
from autoparallel.pricing.stage_devices import along_pipeline
from autoparallel.pricing.tier_costs import TierCosts
from autoparallel.pricing.unit_costs import Prices
from autoparallel.strategies.space import Strategy, StrategySet, TensorUse
from autoparallel.strategies.sparse_tables import as_stored
from cost_models import compute


class StepCost(NamedTuple):
    """Seconds of a decision in a step on one rank, by strategy; shape (strategies,) each.

    ``forward``: with exposed copies of results to the host. ``again``: recompute. ``backward``: with those back.
    ``summed``: a parameter's gradients over the pipeline ranks that hold it. ``moved``: them to the host, as far as
    backward does not hide it. ``update``: by the optimizer.
    """

    forward: np.ndarray
    again: np.ndarray
    backward: np.ndarray
    summed: np.ndarray
    moved: np.ndarray
    update: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return self.forward + self.again + self.backward + self.summed + self.moved + self.update


#: Fractions of a redistribution's seconds that count, in forward and in backward.
Ways = tuple[float, float]


class Exposed(NamedTuple):
    """Fractions of the seconds of communication that count: of parameter gathers, gradient reductions and activations
    (1: none of it overlaps with compute). ``by_use``: those of activations by use (target, position), where they
    differ; or the layers that a redistribution overlaps with, whose seconds limit it."""

    gathers: float = 1.0
    reductions: float = 1.0
    activations: float = 1.0
    by_use: Mapping[tuple[int, int], Ways | LayerOverlap] | None = None

    def with_more(self, part: float) -> Exposed:
        """The same with such a part of what of parameters' communication does not count."""
        return self._replace(gathers=self.gathers + part * (1 - self.gathers),
                             reductions=self.reductions + part * (1 - self.reductions))

    def of(self, use: TensorUse, of_parameter: bool) -> Ways | LayerOverlap:
        """Those of a use in forward and in backward."""
        if of_parameter:
            return self.gathers, self.reductions
        return (self.by_use or {}).get((use.target, use.position), (self.activations, self.activations))


ALL_EXPOSED = Exposed()


class Move(NamedTuple):
    """A use, its redistribution steps, and the number of its equivalence class: equal uses between equal strategies."""

    use: TensorUse
    path: Sequence[PricedStep]
    kind: int


class Picked(NamedTuple):
    """Strategy numbers of a decision; equal ones have an equal number ``pick``."""

    numbers: np.ndarray
    pick: int


def prices_of(prices: Prices, counts: ExecutionCounts, index: int, stage: int | None = None) -> Prices:
    """The unit costs of a decision on the devices of the stage (default: on the slowest of all its stages)."""
    return prices_of_stage(prices, counts, *(counts.stages_of[index] if stage is None else (stage,)))


def prices_of_stage(prices: Prices, counts: ExecutionCounts, *stages: int) -> Prices:
    """The unit costs on the devices of a stage, or on the slowest of several."""
    if counts.hybrid.by_rank and not counts.one_for_all:
        return prices.of_ranks((counts.slowest,))
    if counts.one_for_all or counts.hybrid.stages == 1:
        return prices
    return prices.of_ranks(counts.hybrid.ranks_of(*stages))


class StepCosts:
    """The costs of one step: unit costs (`Prices`) times execution counts, memoised by equivalence class.

    ``exposed``: as `hidden.least_exposed` bounds it.
    """

    def __init__(self, prices: Prices, counts: ExecutionCounts, exposed: Exposed = ALL_EXPOSED) -> None:
        self.prices, self.counts, self.space, self.exposed = prices, counts, prices.space, exposed
        self.kinds, self.memo = Equivalence(prices, counts), Memo()
        self.tiers = TierCosts(prices, counts, self.memo)
        self.gradients, self.parameters, self.states = self.tiers.gradients, self.tiers.parameters, self.tiers.states
        self.lookups = self.tiers.lookups
        self.activations = HostActivations(prices, counts, self.memo, self.decision_bytes)

    # --- seconds of decisions ---------------------------------------------------------------------------------------

    def of(self, index: int, stage: int | None = None) -> StepCost:
        """The seconds of a decision in a step, on a rank of the stage (default: its first)."""
        s, kind, counts = self.space.strategy_sets[index], self.space.decisions[index].kind, self.counts
        prices = prices_of(self.prices, counts, index, stage)
        times, moves = counts.op_times(index, stage), counts.offloads(index)
        readers = int(self.kinds.readers[index]) if kind == "shared_read" else 0
        key = (id(s), kind, readers, self.prices.chains[index], times, moves, counts.ranks_with(index),
               self.gradients.leave(index), self.lookups.place(index), counts.sparse.density.get(index),
               id(counts.away[index]), id(prices))
        return self.memo.once(("cost", *key), lambda: self._cost(index, times, prices))

    def _cost(self, index: int, times: tuple[int, int], prices: Prices) -> StepCost:
        s, kind = self.space.strategy_sets[index], self.space.decisions[index].kind
        nothing = self._nothing(len(s.strategies))[0]
        cost = StepCost(nothing, nothing, nothing, nothing, nothing, nothing)
        if kind == "op" and self.lookups.runs(index):
            found = self.lookups.price(index)
            return cost._replace(forward=times[1] * (found.forward + found.there),
                                 again=(times[0] - times[1]) * (found.forward + found.there),
                                 backward=times[1] * (found.backward + found.back))
        if kind == "op":
            price, (there, back) = prices.op_of(index), self.activations.of(index)
            if index in self.counts.lookups.cached:
                missed = self.lookups.misses(index)
                there = there + times[1] * (missed.forward + missed.there + self.lookups.calls_s)
            return cost._replace(forward=times[1] * price.forward_s + there,
                                 again=(times[0] - times[1]) * price.forward_s,
                                 backward=times[1] * price.backward_s + back)
        if kind == "shared_read":
            return cost._replace(backward=times[1] * self.shared_read_s(index, prices))
        if kind == "parameter":
            some = self.counts.multiplicities[index]
            update = some * self.tiers.update_s(index, prices, self.of)
            if self.lookups.is_table(index):
                return cost._replace(update=update)
            return cost._replace(summed=some * self.shared_s(index), update=update,
                                 moved=self.tiers.gradients_s(index, self.of) if self.gradients.go else nothing)
        return cost

    def shared_bytes(self, index: int) -> np.ndarray:
        """Bytes of a parameter's gradient in the dtype in which pipeline ranks sum it, by strategy."""
        s, dtype = self.space.strategy_sets[index], self.counts.hybrid.sum_dtype
        meta = s.output_metas[0]
        return (dtype or meta.dtype).itemsize / meta.dtype.itemsize * self.prices.local_bytes(meta, s.outputs[0])

    def shared_s(self, index: int) -> np.ndarray:
        """Seconds of summing a parameter's gradients over the pipeline ranks that hold it, by strategy."""
        ranks = self.counts.ranks_with(index)
        if len(ranks) < 2:
            return self._nothing(len(self.space.strategy_sets[index].strategies))[0]
        return self.prices.redistribution.single.bucket_s(along_pipeline(self.prices, ranks, together=True),
                                                          self.shared_bytes(index), self.counts.hybrid.bucket_bytes)

    def shared_read_s(self, index: int, prices: Prices | None = None) -> np.ndarray:
        """Seconds of summing the gradients from a value's readers once, by strategy."""
        s, readers = self.space.strategy_sets[index], int(self.kinds.readers[index])
        if self.lookups.sums_there(index):
            trains = s.output_metas[0].requires_grad and self.prices.training
            moved = 3 * self.prices.local_bytes(s.output_metas[0], s.outputs[0])
            return trains * max(0, readers - 1) * self.lookups.sums_s(moved)
        there = prices_of(self.prices, self.counts, index) if prices is None else prices
        chain = there.chains[index]
        return self.memo.once(("shared_read", id(s), readers, chain, id(there)),
                              lambda: there.costs.sum_s(s, readers, chain))

    def _nothing(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        return self.memo.once(("nothing", size), lambda: (np.zeros(size),) * 2)

    # --- bytes of decisions -----------------------------------------------------------------------------------------

    def decision_bytes(self, index: int) -> np.ndarray:
        """Bytes of one copy of a decision's results (for a parameter its training state, but for what is on the host or
        disk, or goes there), by strategy."""
        s, kind = self.space.strategy_sets[index], self.space.decisions[index].kind
        saved = self.counts.saved
        nothing = index in saved.inside_only or in_registers(self.prices, index)
        how = nothing, saved.products_only(index), self.gradients.leave(index)
        if kind == "parameter" and self.lookups.is_table(index):
            return self._table_bytes(index)
        return self.memo.once(("bytes", id(s), kind, how, self.counts.sparse.density.get(index),
                               id(self.counts.away[index])),
                              lambda: self._bytes_of(index, *how))

    def _table_bytes(self, index: int) -> np.ndarray:
        """Bytes on the device of a table on the host: of its cache, but for a gradient that is let go."""
        s, leaves = self.space.strategy_sets[index], self.gradients.leave(index)
        if (cache := self.counts.lookups.cached.get(index)) is None:
            return self._nothing(len(s.strategies))[0]
        return self.memo.once(("cache", id(s), cache, leaves, self.counts.sparse.density.get(index)), lambda: (
            self.lookups.cache_bytes(index) - (self.gradients.bytes_of(index) if leaves else 0.0)))

    def _bytes_of(self, index: int, inside_only: bool, products_only: bool, leaves: bool) -> np.ndarray:
        s, kind = self.space.strategy_sets[index], self.space.decisions[index].kind
        if leaves:
            return self.states.device_bytes(index) - self.gradients.bytes_of(index)
        if kind == "parameter":
            return self.states.device_bytes(index) + self._sums_bytes(s.output_metas[0], s.outputs[0])
        total = _exchanged_bytes(self.prices, s)
        if kind in ("shared_read", "output", "update") or (s.rule is not None and s.rule.alias):
            return total
        for meta, numbers in zip(s.output_metas, s.outputs, strict=True) if not inside_only else ():
            total = total + self.prices.local_bytes(meta, numbers)
        if s.rule is not None and self.prices.training:
            for i, size in s.rule.extra_bytes.items():
                meta = s.input_metas[i]
                total = total + size / meta.dtype.itemsize * self.prices.local_bytes(meta, s.inputs[i])
            if s.rule.work_bytes:
                inside = s.rule.product_bytes if products_only else s.rule.work_bytes
                total = total + inside * share_of_work(s)
        return total

    def _sums_bytes(self, meta: TensorMeta, numbers: np.ndarray) -> np.ndarray:
        """Bytes of gradient accumulators kept beside the gradients, for layout numbers of a parameter."""
        return self.counts.accumulator_bytes(meta) / meta.dtype.itemsize * self.prices.local_bytes(meta, numbers)

    # --- uses -------------------------------------------------------------------------------------------------------

    def use_key(self, use: TensorUse) -> tuple[object, ...]:
        """A key that equivalent uses share."""
        return id(self.space.strategy_sets[use.source]), use.output, id(self.space.strategy_sets[use.target]), \
            use.position

    def use_s(self, use: TensorUse, rows: Picked, columns: Picked) -> np.ndarray:
        """Seconds of a use per step, by (row choice, column choice)."""
        forward, again, backward = self.counts.use_times(use)
        ways, prices = self.exposed.of(use, self.counts.of_parameter[use.source]), prices_of_use(self, use)
        sums, summing, moves = self.counts.sums(use), self.counts.summing(use), self.counts.offloads_copy(use)
        skips = self.counts.skips(use)

        def seconds() -> np.ndarray:
            found = _sent_s(self, prices, use, ways, (forward + again, backward), summing)
            if skips is not None:
                found = np.where(skips, _sent_s(self, prices, use, ways, (forward, backward), summing), found)
            found = found + (self.sums_s(use) if sums else 0.0)
            if moves.there:
                found = found + sum(self.activations.of_copy(use))
            if self.parameters.fetches(use):
                there, back = self.tiers.fetch_s(use, self.of)
                found = found + (there + back)[:, None]
            if self.lookups.is_table(use.source) or use.source in self.counts.sparse.density:
                found = np.where(as_stored(self.space, use), found, np.inf)
            every = [self._are_all(some, size) for some, size in zip((rows, columns), found.shape, strict=True)]
            return found if all(every) else found[rows.numbers[:, None], columns.numbers]

        key = "use", self.use_key(use), rows.pick, columns.pick, ways, forward, again, backward, sums, summing, moves, \
            skips is not None, id(self.counts.away[use.source]), self.lookups.place(use.source), \
            self.counts.sparse.density.get(use.source), id(prices)
        return self.memo.once(key, seconds)

    def _are_all(self, picked: Picked, size: int) -> bool:
        """Whether these are the numbers of all strategies, in order."""
        return self.memo.once(("all", picked.pick, size), lambda: np.array_equal(picked.numbers, np.arange(size)))

    def sums_s(self, use: TensorUse) -> np.ndarray:
        """Seconds per step of accumulating a parameter's gradients over micro-batches (two reads and a write each; with
        a separate accumulator one read of the gradient, a read and a write of the accumulator). Those of micro-batches
        at a time are of gathered parameters, and so are all below ZeRO-2. By (source strategy, target strategy)."""
        there = self.lookups.sums_there(use.source)
        key = "sums", self.use_key(use), self.counts.sums(use), there, self.counts.sparse.density.get(use.source)
        return self.memo.once(key, lambda: self._sums_s(use, there))

    def _sums_s(self, use: TensorUse, there: bool) -> np.ndarray:
        """As `sums_s`; ``there``: on the host."""
        source, target = self.space.strategy_sets[use.source], self.space.strategy_sets[use.target]
        rows, columns = source.outputs[use.output], target.inputs[use.position]
        hybrid, stored = self.counts.hybrid, self.prices.local_bytes(use.meta, rows)[:, None]
        read = self.prices.local_bytes(use.meta, columns)[None]
        rounds = hybrid.micro_batches // hybrid.copies
        share = (rounds - 1) / max(1, hybrid.micro_batches - 1) if hybrid.zero_stage >= 2 else 0.0
        held = np.broadcast_to(share * stored + (1 - share) * read, (len(rows), len(columns)))
        device, apart = self.prices.device, self.counts.accumulator_bytes(use.meta) / use.meta.dtype.itemsize
        profile, width = self.prices.cluster.profile, use.meta.dtype.itemsize
        each = profile.sum_bytes(width, apart * width) / width if profile is not None else 1 + 2 * apart if apart else 3
        moved = self.counts.sparse.share(use.source) * each * held
        if there:
            return self.counts.sums(use) * self.lookups.sums_s(moved)
        return self.counts.sums(use) * compute.op_time_s("elementwise", 0.0, moved, dtype_name(use.meta), device)

    def copy_bytes(self, use: TensorUse) -> np.ndarray:
        """Bytes of the redistributed copy of a use, and of its gradient's accumulator where that is separate (it
        replaces the accumulator of the stored shard). By (source strategy, target strategy)."""
        copies = self.prices.redistribution.use_copies(use)
        if self.parameters.fetches(use):
            return np.where(copies > 0, copies, self.parameters.bytes_of(use)[:, None])
        if not self.counts.of_parameter[use.source] or self.counts.hybrid.zero_stage >= 2:
            return copies
        source, target = self.space.strategy_sets[use.source], self.space.strategy_sets[use.target]
        whole = self._sums_bytes(use.meta, target.inputs[use.position])
        local_shard = self._sums_bytes(use.meta, source.outputs[use.output])
        return np.where(copies > 0, copies + np.maximum(whole[None, :] - local_shard[:, None], 0.0), 0.0)

    def gathered_bytes(self, use: TensorUse, rows: Picked, columns: Picked) -> np.ndarray:
        """Bytes of intermediate results of a parameter's gathers, and of the fetched shard that is gathered; by (row
        choice, column choice)."""
        def found() -> np.ndarray:
            gathered = self.prices.redistribution.use_gathered(use)
            if self.parameters.fetches(use):
                copies = self.prices.redistribution.use_copies(use)
                gathered = gathered + np.where(copies > 0, self.parameters.bytes_of(use)[:, None], 0.0)
            return gathered[rows.numbers[:, None], columns.numbers]

        return self.memo.once(("shards", self.use_key(use), rows.pick, columns.pick, self.parameters.fetches(use)),
                              found)

    def moves(self, strategies: Sequence[Strategy]) -> Sequence[Move]:
        """The redistributions of a plan, ordered by target. Uses without a redistribution are left out, unless they
        read a parameter."""
        def found() -> list[Move]:
            sources, targets = self.kinds.use_ends
            paths, which = self.memo.each("steps", self.kinds.use_codes(strategies), lambda at: self._steps(
                self.space.uses[at], strategies[sources[at]], strategies[targets[at]]))
            some = np.array([bool(path) for path in paths], bool)[which] | self.kinds.parameter_uses
            return [Move(self.space.uses[at], paths[kind], kind)
                    for at, kind in zip(np.flatnonzero(some).tolist(), which[some].tolist(), strict=True)]

        return self.memo.once(("moves", tuple(strategies)), found)

    def _steps(self, use: TensorUse, of_source: Strategy, of_target: Strategy) -> Sequence[PricedStep]:
        source = self.space.strategy_sets[use.source].output_layout(of_source, use.output)
        target = self.space.strategy_sets[use.target].input_layout(of_target, use.position)
        if source == target:
            return ()
        return prices_of_use(self, use).redistribution.steps(use, source, target, self.counts.summing(use))


def prices_of_use(costs: StepCosts, use: TensorUse) -> Prices:
    """The unit costs by which the value of a use is redistributed: where it is read, on the slowest of all its
    stages."""
    return prices_of(costs.prices, costs.counts, use.target)


def _sent_s(costs: StepCosts, prices: Prices, use: TensorUse, ways: Ways | LayerOverlap, times: tuple[int, int],
            summing: Summing) -> np.ndarray:
    """Exposed seconds of a use's redistribution, run ``times`` (forward, backward)."""
    if not isinstance(ways, LayerOverlap):
        return prices.redistribution.use_s(use, (ways[0] * times[0], ways[1] * times[1]), summing)
    there, back = costs.memo.once(("layer overlap", costs.use_key(use), ways, id(prices)),
                                  lambda: exposed_s(prices, use, ways))
    return times[0] * there + times[1] * back if times[1] else times[0] * there


def _exchanged_bytes(prices: Prices, s: StrategySet) -> np.ndarray:
    """Bytes of exchanged copies of inputs that an op keeps, by strategy."""
    total = np.zeros(len(s.strategies))
    for number, row in enumerate(s.axis_strategies):
        for exchange in (e for e in row.inside if e.kept):
            copies = prices.local_bytes(s.input_metas[exchange.input], s.inputs[exchange.input])
            total = total + np.where((s.array == number).any(axis=1), copies, 0.0)
    return total


def in_registers(prices: Prices, index: int) -> bool:
    """Whether a kernel keeps a decision's result in registers, in backward too."""
    chain = prices.chains[index]
    return fuses(prices.cluster) and chain is not None and not chain.writes and not chain.gradients
