"""Unit costs of redistributions: seconds and bytes of paths between layouts on one cluster, gradients in buckets."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextvars import ContextVar
from copy import copy
from typing import Any, NamedTuple

import numpy as np

from autoparallel import clock
from autoparallel.capture import TensorMeta
from autoparallel.layout import COLLECTIVES, Layout, Placement, RedistributionTable, Step
from autoparallel.layout.redistribution import Axes, StepCost, actions_of
from autoparallel.pricing.counts import ALONE, Summing
from autoparallel.pricing.step_seconds import StepSeconds
from autoparallel.schedule.step_config import BUCKET_BYTES
from autoparallel.strategies.space import StrategySpace, TensorUse, is_parameter
from cost_models import Cluster, Group

#: Redistribution tables of recent strategy graphs, shared by call forms, by lowering and by candidates of a joint
#: search; as many of this table's size as have so many cells, of 12 bytes each.
_TABLES: dict[tuple[Any, ...], RedistributionTable] = {}
MOST_CELLS = 1.2e7
#: Prices whose seconds of uses are kept, for step configurations and bounds of the same micro-batches and mesh; work
#: beside a search has its own (`apart`), so that it counts the same in a process of its own.
_RECENT: ContextVar[list[weakref.ref[RedistributionPrices]]] = ContextVar("recent prices")
MOST_RECENT = 6


class PricedStep(NamedTuple):
    """One redistribution step: seconds (forward, backward), and elements of the larger of its two local shards."""

    step: Step
    seconds: tuple[float, float]
    elements: int


class Form(NamedTuple):
    """A tensor as its redistributions depend on it. ``bucketed``: a trainable parameter, which travels with others."""

    shape: tuple[int, ...]
    item_bytes: int
    requires_grad: bool
    bucketed: bool


class RedistributionPrices:
    """Unit costs of the redistributions of one strategy graph.

    ``groups``: by mesh axes (`axes_together`). ``direct``: paths take the fewest steps instead of the cheapest, as
    baselines do. ``machine``: equal for redistributions with equal tables, which they share.
    """

    def __init__(self, space: StrategySpace, cluster: Cluster, groups: Mapping[Axes, Group], training: bool,
                 direct: bool, machine: tuple[Any, ...]) -> None:
        self.space, self.training, self.direct, self._machine = space, training, direct, machine
        #: Each by the tensor's form (`form_of`), of which models have a few dozen.
        self._tables: dict[tuple[Any, ...], RedistributionTable] = {}
        self._weighted: dict[tuple[Any, ...], np.ndarray] = {}
        self._steps: dict[tuple[Any, ...], list[PricedStep]] = {}
        self.single = StepSeconds(space, cluster, groups)
        #: Of recently asked prices only.
        self._uses: dict[tuple[Any, ...], np.ndarray] = {}
        #: Those whose paths these have (`by`).
        self._whole: RedistributionPrices | None = None

    def by(self, groups: Mapping[Axes, Group]) -> RedistributionPrices:
        """The unit costs of the same paths by other groups."""
        made = copy(self)
        made.single, made._whole = StepSeconds(self.space, self.single.cluster, groups), self._whole or self
        made._weighted, made._steps, made._uses = {}, {}, {}
        return made

    def form_of(self, use: TensorUse) -> Form:
        """What the table of a use depends on."""
        meta = use.meta
        bucketed = meta.requires_grad and self.training and is_parameter(self.space, use.source)
        return Form(meta.shape, meta.dtype.itemsize, meta.requires_grad, bucketed)

    def table(self, use: TensorUse) -> RedistributionTable:
        """For the value of a use, the redistribution path between each two layouts that is cheapest in seconds, forward
        and backward together; of a trainable parameter as its share of a bucket, as which it travels unless the plan
        says otherwise."""
        if self._whole is not None:
            return self._whole.table(use)
        meta, key = use.meta, self.form_of(use)
        grad = meta.requires_grad and self.training
        shared = *self._machine, self.space.spaces(meta).interleaved, *key
        if key not in self._tables and (known := _TABLES.get(shared)) is not None:
            self._tables[key] = known
        if key not in self._tables:
            cost = self.single.there_and_back(grad)

            def of_share(axes: Axes, source: Placement, target: Placement, before: np.ndarray, after: np.ndarray
                         ) -> Any:
                times = np.maximum(1.0, BUCKET_BYTES / np.maximum(before, after))
                return cost(axes, source, target, times * before, times * after) / times

            self._tables[key] = RedistributionTable(self.space.spaces(meta), meta.dtype.itemsize, cost, self.direct,
                                                    of_share if key.bucketed else None, joint_first=key.bucketed)
            while len(_TABLES) * self._tables[key].seconds.size >= MOST_CELLS:
                _TABLES.pop(next(iter(_TABLES)))
            _TABLES[shared] = self._tables[key]
        return self._tables[key]

    def steps(self, use: TensorUse, source: Layout, target: Layout, summing: Summing = ALONE) -> list[PricedStep]:
        """The priced steps of a use from layout to layout, memoised."""
        meta, key = use.meta, (self.form_of(use), source, target, summing)
        if key not in self._steps:
            space = self.space.spaces(meta)
            self._steps[key] = [
                PricedStep(step, self._step_s(meta, step, summing), max(
                    int(space.local_elements[space.index(layout)]) for layout in (step.before, step.after)))
                for step in self.table(use).path(source, target)]
        return self._steps[key]

    def piece_s(self, meta: TensorMeta, step: Step, pieces: int) -> tuple[float, float]:
        """Seconds (forward, backward) of one step of one of so many equal pieces of a tensor; together no less than of
        the whole, though messages of a size may take another protocol."""
        of_piece, of_whole = (self._step_s(meta, step, ALONE, count) for count in (pieces, 1))
        return max(of_piece[0], of_whole[0] / pieces), max(of_piece[1], of_whole[1] / pieces)

    def _step_s(self, meta: TensorMeta, step: Step, summing: Summing, pieces: int = 1) -> tuple[float, float]:
        """Seconds (forward, backward) of one step."""
        space = self.space.spaces(meta)
        before, after = (np.array([space.local_elements[space.index(x)] * meta.dtype.itemsize / pieces])
                         for x in (step.before, step.after))
        forward = self.single.forward_s(summing, step.axes, step.source, step.target, before, after)
        if not (meta.requires_grad and self.training):
            return float(forward[0]), 0.0
        backward = self.single.summed_s(summing, step.axes, step.source, step.target, before, after)
        return float(forward[0]), float(backward[0])

    def use_s(self, use: TensorUse, times: tuple[float, float] = (1, 1), summing: Summing = ALONE) -> np.ndarray:
        """Seconds of a use's redistribution, run ``times`` (forward, backward); by (source strategy, target
        strategy)."""
        source, target = self.space.strategy_sets[use.source], self.space.strategy_sets[use.target]
        key = id(source), use.output, id(target), use.position, self.form_of(use), times, summing
        if key not in self._uses:
            _keep_recent(self)
            rows, columns = source.outputs[use.output], target.inputs[use.position]
            clock.did("cells priced", len(rows) * len(columns))
            seconds = self._seconds(use, times)
            if summing != ALONE:
                seconds = seconds + times[1] * self._more_by(use, summing)
                if self.single.block_bytes and summing.in_block:
                    seconds = seconds + times[0] * self._more_forward(use, summing)
            self._uses[key] = seconds[rows[:, None], columns]
        return self._uses[key]

    def _more_by(self, use: TensorUse, summing: Summing) -> np.ndarray:
        """Extra seconds (or savings) of backward under ``summing``; by (layout, layout)."""
        key = (self.form_of(use), summing)
        if key not in self._weighted:

            def cost(axes: Axes, source: Placement, target: Placement, before: np.ndarray, after: np.ndarray) -> Any:
                return (self.single.summed_s(summing, axes, source, target, before, after)
                        - self.single.summed_s(ALONE, axes, source, target, before, after))

            more = self.table(use).sum_along(cost)
            self._weighted[key] = np.where(np.isfinite(more), more, 0.0)
        return self._weighted[key]

    def _more_forward(self, use: TensorUse, summing: Summing) -> np.ndarray:
        """As `_more_by`, for forward."""
        key = (self.form_of(use), "forward", summing)
        if key not in self._weighted:

            def cost(axes: Axes, source: Placement, target: Placement, before: np.ndarray, after: np.ndarray) -> Any:
                forward, _ = actions_of(axes, source, target, self.space.mesh_shape)
                return self.single.in_block_s(summing, axes, forward, source, after)

            more = self.table(use).sum_along(cost)
            self._weighted[key] = np.where(np.isfinite(more), more, 0.0)
        return self._weighted[key]

    def _seconds(self, use: TensorUse, times: tuple[float, float]) -> np.ndarray:
        """Seconds for ``times`` (forward, backward) along the cheapest path for one of each; by (layout, layout)."""
        table, grad, once = self.table(use), use.meta.requires_grad and self.training, self._once(use)
        if times[0] == times[1] or not grad:
            return _repeated(times[0], once)
        key = (self.form_of(use), "forward")
        if key not in self._weighted:

            def cost(axes: Axes, source: Placement, target: Placement, before: np.ndarray, after: np.ndarray) -> Any:
                forward, _ = actions_of(axes, source, target, self.space.mesh_shape)
                return self.single.action_s(forward, axes, source, target, before, after)

            self._weighted[key] = table.sum_along(cost)
        more = times[0] - times[1]  # the rest runs in one direction only
        forward = np.minimum(self._weighted[key], once)
        one_way = forward if more > 0 else once - np.where(forward < np.inf, forward, 0.0)
        return _repeated(min(times), once) + abs(more) * one_way

    def _once(self, use: TensorUse) -> np.ndarray:
        """Seconds of forward and backward along the paths of a use; by (layout, layout)."""
        if self._whole is None:
            return self.table(use).seconds
        return self.summed_along(use, "once", self.single.there_and_back(use.meta.requires_grad and self.training))

    def use_copies(self, use: TensorUse) -> np.ndarray:
        """Bytes of the redistributed copy (0: no redistribution); by (source strategy, target strategy)."""
        rows = self.space.strategy_sets[use.source].outputs[use.output]
        columns = self.space.strategy_sets[use.target].inputs[use.position]
        elements = self.space.spaces(use.meta).local_elements[columns] * use.meta.dtype.itemsize
        moved = self.table(use).moves[rows[:, None], columns]
        return np.where(moved, elements[None, :], 0.0)

    def use_travels(self, use: TensorUse) -> np.ndarray:
        """Whether a use's redistribution communicates, forward or backward; by (source strategy, target strategy)."""
        meta, table = use.meta, self.table(use)
        key = (self.form_of(use), "travels")
        if key not in self._weighted:

            def cost(axes: Axes, source: Placement, target: Placement, before: np.ndarray, after: np.ndarray) -> Any:
                forward, backward = actions_of(axes, source, target, self.space.mesh_shape)
                return np.full(len(before), float(forward in COLLECTIVES or (
                    meta.requires_grad and backward in COLLECTIVES)))

            travels = table.sum_along(cost)
            self._weighted[key] = np.isfinite(travels) & (travels > 0)
        rows = self.space.strategy_sets[use.source].outputs[use.output]
        columns = self.space.strategy_sets[use.target].inputs[use.position]
        return np.asarray(self._weighted[key][rows[:, None], columns])

    def summed_along(self, use: TensorUse, what: str, value: StepCost) -> np.ndarray:
        """Sums of a value of single steps along the paths of a use, kept under the name ``what``; by (layout, layout),
        infinite where there is no path."""
        key = (self.form_of(use), what)
        if key not in self._weighted:
            self._weighted[key] = self.table(use).sum_along(value)
        return self._weighted[key]

    def use_gathered(self, use: TensorUse) -> np.ndarray:
        """Bytes of intermediate results of gathers on the path to the copy; as `use_copies`."""
        table, key = self.table(use), (self.form_of(use), "gathered")
        if key not in self._weighted:

            def cost(axes: Axes, source: Placement, target: Placement, before: np.ndarray, after: np.ndarray) -> Any:
                forward, _ = actions_of(axes, source, target, self.space.mesh_shape)
                return np.where(forward == "all_gather", after, 0.0)

            gathered = table.sum_along(cost)
            self._weighted[key] = np.where(np.isfinite(gathered), gathered, 0.0)
        rows = self.space.strategy_sets[use.source].outputs[use.output]
        columns = self.space.strategy_sets[use.target].inputs[use.position]
        return np.maximum(self._weighted[key][rows[:, None], columns] - self.use_copies(use), 0.0)


def keep_apart() -> None:
    """From here on, what is kept of recent prices in this context is its own."""
    _RECENT.set([])


def _keep_recent(prices: RedistributionPrices) -> None:
    """Prices of which seconds of uses are kept: the last `MOST_RECENT` that computed some."""
    if (recent := _RECENT.get(None)) is None:
        _RECENT.set(recent := [])
    if recent and recent[-1]() is prices:
        return
    recent[:] = [one for one in recent if one() is not None and one() is not prices]
    recent.append(weakref.ref(prices))
    if len(recent) > MOST_RECENT and (oldest := recent.pop(0)()) is not None:
        oldest._uses.clear()


def _repeated(count: float, seconds: np.ndarray) -> np.ndarray:
    """``count`` times these seconds; infinite where there is no path, also when it is never run (not 0 * inf)."""
    return np.where(np.isfinite(seconds), count * np.where(np.isfinite(seconds), seconds, 0.0), np.inf)
