"""Unit costs of redistributions: seconds and bytes of paths between layouts on one cluster, gradients in buckets."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from contextvars import ContextVar
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from autoparallel import clock
from autoparallel.capture import TensorMeta
from autoparallel.capture.blocks import block_path
from autoparallel.layout import COLLECTIVES, SUMS, Layout, Placement, RedistributionTable, Step
from autoparallel.layout.redistribution import Axes, StepCost, actions_of, name_of
from autoparallel.pricing.counts import ALONE, Summing
from autoparallel.pricing.message_seconds import MessageSeconds
from autoparallel.schedule.fusion import bytes_on
from autoparallel.schedule.step_config import BUCKET_BYTES, LARGE_BYTES
from autoparallel.strategies.space import StrategySpace, TensorUse, is_parameter
from cost_models import Cluster, Group, collectives

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
        self.space, self.cluster, self.groups, self.training = space, cluster, groups, training
        self.direct, self.device, self._machine = direct, cluster.working_device, machine
        #: Each by the tensor's form (`form_of`), of which models have a few dozen.
        self._tables: dict[tuple[Any, ...], RedistributionTable] = {}
        self._weighted: dict[tuple[Any, ...], np.ndarray] = {}
        self._steps: dict[tuple[Any, ...], list[PricedStep]] = {}
        self.messages = MessageSeconds(groups, self.device)
        #: Of recently asked prices only.
        self._uses: dict[tuple[Any, ...], np.ndarray] = {}
        #: Those whose paths these have (`by`).
        self._whole: RedistributionPrices | None = None

    def by(self, groups: Mapping[Axes, Group]) -> RedistributionPrices:
        """The unit costs of the same paths by other groups."""
        made = copy(self)
        made.groups, made.messages, made._whole = groups, MessageSeconds(groups, self.device), self._whole or self
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

            def cost(axes: Axes, source: Placement, target: Placement, before: np.ndarray, after: np.ndarray) -> Any:
                return self._both_s(grad, axes, source, target, before, after)

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

    def action_s(
        self, action: str, axes: Axes, source: Placement, target: Placement, before: np.ndarray, after: np.ndarray
    ) -> np.ndarray:
        """Seconds of one action on mesh axes; ``before`` and ``after``: local bytes (arrays)."""
        match action:
            case "none":
                return np.zeros_like(before)
            case "mask" | "slice" | "pad":
                return self.messages.copy_s(np.maximum(before, after))
            case "all_reduce":
                return self.messages.sent_s(collectives.all_reduce_s, axes, before)
            case "all_gather":
                copy = 0.0 if source.in_order else self.messages.copy_s(after)
                return self.messages.sent_s(collectives.all_gather_s, axes, after) + copy
            case "reduce_scatter":
                copy = 0.0 if target.in_order else self.messages.copy_s(before)
                return self.messages.sent_s(collectives.reduce_scatter_s, axes, before) + copy
            case "all_to_all":
                return self.messages.sent_s(collectives.all_to_all_s, axes, before) + self.messages.copy_s(before)
        raise ValueError(f"unknown action {action!r}")

    def bucket_s(self, group: Group, num_bytes: np.ndarray, bucket_bytes: float) -> np.ndarray:
        """Seconds of a gradient of ``num_bytes`` in a bucket of ``bucket_bytes``: its share of the all-reduce and of
        the copy into the bucket."""
        alone = collectives.all_reduce_s(num_bytes, group)
        if not bucket_bytes:
            return alone
        whole = collectives.all_reduce_s(bucket_bytes, group) + collectives.copy_s(bucket_bytes, self.device)
        return np.where(num_bytes < bucket_bytes, np.minimum(alone, num_bytes / bucket_bytes * whole), alone)

    @cached_property
    def block_bytes(self) -> float:
        """Bytes of the parameters of a block, which our programs and FSDP gather, and whose gradients they scatter, as
        one; 0: software that treats each parameter by itself."""
        profile, blocks = self.cluster.profile, defaultdict[str, float](float)
        if profile is not None and not profile.by_block:
            return 0.0
        for decision, s in zip(self.space.decisions, self.space.strategy_sets, strict=True):
            if decision.kind == "parameter" and (path := block_path(decision.path.rpartition(".")[0])):
                blocks[path] += s.output_metas[0].num_bytes
        return sum(blocks.values()) / len(blocks) if blocks else BUCKET_BYTES

    def _in_block_s(self, summing: Summing, axes: Axes, action: str, cut: Placement, num_bytes: np.ndarray
                    ) -> np.ndarray:
        """How much less a parameter's gather or reduce-scatter takes as a share of its block's, with the copy out of or
        into the bucket (which `action_s` counts of shards that are not ``in_order``). Where the copy takes longer than
        what is saved: 0, so that no plan is priced below the bounds of its combination."""
        if not (summing.in_block and self.block_bytes and action in ("all_gather", "reduce_scatter")):
            return np.zeros_like(num_bytes)
        one_way = collectives.all_gather_s if action == "all_gather" else collectives.reduce_scatter_s
        alone, whole = (self.messages.sent_s(one_way, axes, some) for some in (num_bytes, np.array(self.block_bytes)))
        copied = cut.in_order & (num_bytes < LARGE_BYTES)
        copy_s = np.where(copied, self.messages.copy_s(num_bytes), 0.0)
        return np.asarray(np.minimum(num_bytes / self.block_bytes * whole + copy_s - alone, 0.0))

    def _forward_s(self, summing: Summing, axes: Axes, source: Placement, target: Placement, before: np.ndarray,
                   after: np.ndarray) -> np.ndarray:
        """Forward seconds of a step from ``source`` to ``target`` under ``summing``."""
        action, _ = actions_of(axes, source, target, self.space.mesh_shape)
        return (self.action_s(action, axes, source, target, before, after)
                + self._in_block_s(summing, axes, action, source, after))

    def summed_s(self, summing: Summing, axes: Axes, source: Placement, target: Placement, before: np.ndarray,
                 after: np.ndarray) -> np.ndarray:
        """Backward seconds of a step from ``source`` to ``target`` under ``summing``: gradients of unsharded parameters
        in buckets, and casts to and from another dtype."""
        _, backward = actions_of(axes, source, target, self.space.mesh_shape)
        scale = summing.scale if backward in SUMS else 1.0
        bucket_bytes = bytes_on(summing.axis_bytes, name_of(axes, self.space.axis_names), summing.bucket_bytes)
        if bucket_bytes and (source.kind, target.kind) == ("I", "R"):
            seconds = self.bucket_s(self.groups[axes], scale * after, bucket_bytes)
        else:
            seconds = self.action_s(backward, axes, target, source, scale * after, scale * before)
            seconds = seconds + self._in_block_s(summing, axes, backward, source, scale * after)
        if scale == 1.0:
            return seconds
        return seconds + self.messages.copy_s((1 + scale) / 2 * (after + before))

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
        forward = self._forward_s(summing, step.axes, step.source, step.target, before, after)
        if not (meta.requires_grad and self.training):
            return float(forward[0]), 0.0
        backward = self.summed_s(summing, step.axes, step.source, step.target, before, after)
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
                if self.block_bytes and summing.in_block:
                    seconds = seconds + times[0] * self._more_forward(use, summing)
            self._uses[key] = seconds[rows[:, None], columns]
        return self._uses[key]

    def _more_by(self, use: TensorUse, summing: Summing) -> np.ndarray:
        """Extra seconds (or savings) of backward under ``summing``; by (layout, layout)."""
        key = (self.form_of(use), summing)
        if key not in self._weighted:

            def cost(axes: Axes, source: Placement, target: Placement, before: np.ndarray, after: np.ndarray) -> Any:
                return (self.summed_s(summing, axes, source, target, before, after)
                        - self.summed_s(ALONE, axes, source, target, before, after))

            more = self.table(use).sum_along(cost)
            self._weighted[key] = np.where(np.isfinite(more), more, 0.0)
        return self._weighted[key]

    def _more_forward(self, use: TensorUse, summing: Summing) -> np.ndarray:
        """As `_more_by`, for forward."""
        key = (self.form_of(use), "forward", summing)
        if key not in self._weighted:

            def cost(axes: Axes, source: Placement, target: Placement, before: np.ndarray, after: np.ndarray) -> Any:
                forward, _ = actions_of(axes, source, target, self.space.mesh_shape)
                return self._in_block_s(summing, axes, forward, source, after)

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
                return self.action_s(forward, axes, source, target, before, after)

            self._weighted[key] = table.sum_along(cost)
        more = times[0] - times[1]  # the rest runs in one direction only
        forward = np.minimum(self._weighted[key], once)
        one_way = forward if more > 0 else once - np.where(forward < np.inf, forward, 0.0)
        return _repeated(min(times), once) + abs(more) * one_way

    def _once(self, use: TensorUse) -> np.ndarray:
        """Seconds of forward and backward along the paths of a use; by (layout, layout)."""
        if self._whole is None:
            return self.table(use).seconds
        grad = use.meta.requires_grad and self.training

        def cost(axes: Axes, source: Placement, target: Placement, before: np.ndarray, after: np.ndarray) -> Any:
            return self._both_s(grad, axes, source, target, before, after)

        return self.summed_along(use, "once", cost)

    def _both_s(self, grad: bool, axes: Axes, source: Placement, target: Placement, before: np.ndarray,
                after: np.ndarray) -> np.ndarray:
        """Seconds of a step forward and, of what has a gradient, backward."""
        forward, backward = actions_of(axes, source, target, self.space.mesh_shape)
        seconds = self.action_s(forward, axes, source, target, before, after)
        return seconds + self.action_s(backward, axes, target, source, after, before) if grad else seconds

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
