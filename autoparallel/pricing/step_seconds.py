"""Seconds of single redistribution steps on one cluster: collectives and copies, gradients in buckets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from autoparallel.capture.blocks import block_path
from autoparallel.layout import SUMS, Placement
from autoparallel.layout.redistribution import Axes, StepCost, actions_of, name_of
from autoparallel.pricing.counts import Summing
from autoparallel.pricing.message_seconds import MessageSeconds
from autoparallel.schedule.fusion import bytes_on
from autoparallel.schedule.step_config import BUCKET_BYTES, LARGE_BYTES
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster, Group, collectives


class StepSeconds:
    """Seconds of steps from placement to placement of one strategy graph. ``groups``: by mesh axes."""

    def __init__(self, space: StrategySpace, cluster: Cluster, groups: Mapping[Axes, Group]) -> None:
        self.space, self.cluster, self.groups, self.device = space, cluster, groups, cluster.working_device
        self.messages = MessageSeconds(groups, self.device)

    def there_and_back(self, trains: bool) -> StepCost:
        """Seconds of a step forward and, of what ``trains``, backward."""
        def cost(axes: Axes, source: Placement, target: Placement, before: np.ndarray, after: np.ndarray) -> Any:
            forward, backward = actions_of(axes, source, target, self.space.mesh_shape)
            seconds = self.action_s(forward, axes, source, target, before, after)
            return seconds + self.action_s(backward, axes, target, source, after, before) if trains else seconds

        return cost

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

    def in_block_s(self, summing: Summing, axes: Axes, action: str, cut: Placement, num_bytes: np.ndarray
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

    def forward_s(self, summing: Summing, axes: Axes, source: Placement, target: Placement, before: np.ndarray,
                   after: np.ndarray) -> np.ndarray:
        """Forward seconds of a step from ``source`` to ``target`` under ``summing``."""
        action, _ = actions_of(axes, source, target, self.space.mesh_shape)
        return (self.action_s(action, axes, source, target, before, after)
                + self.in_block_s(summing, axes, action, source, after))

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
            seconds = seconds + self.in_block_s(summing, axes, backward, source, scale * after)
        if scale == 1.0:
            return seconds
        return seconds + self.messages.copy_s((1 + scale) / 2 * (after + before))


__all__ = ["StepSeconds"]
