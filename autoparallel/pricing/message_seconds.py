"""Seconds of collectives and copies: steps between the layouts of one tensor move the same bytes many times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from autoparallel.layout.redistribution import Axes
from cost_models import Device, Group, collectives

#: Collectives of parameters and gradients, which go in buckets.
_IN_BUCKETS = {"all_reduce": collectives.all_reduce_s, "all_gather": collectives.all_gather_s,
               "reduce_scatter": collectives.reduce_scatter_s}
#: Of how many the seconds are kept.
MOST_KEPT = 2000


class MessageSeconds:
    """Of the groups of a mesh, by axes, and a device; equal messages are worked out once."""

    def __init__(self, groups: Mapping[Axes, Group], device: Device) -> None:
        self.groups, self.device = groups, device
        self._kept: dict[tuple[Any, ...], np.ndarray] = {}

    def sent_s(self, collective: Callable[..., Any], axes: Axes, num_bytes: np.ndarray) -> np.ndarray:
        """Seconds of a collective (of `cost_models.collectives`) on mesh axes."""
        return self._once((collective, axes, num_bytes.shape, num_bytes.tobytes()),
                          lambda: collective(num_bytes, self.groups[axes]))

    def copy_s(self, num_bytes: np.ndarray) -> np.ndarray:
        """Seconds of a copy in device memory."""
        return self._once((num_bytes.shape, num_bytes.tobytes()), lambda: collectives.copy_s(num_bytes, self.device))

    def latency_s(self, action: str, axes: Axes, sizes: np.ndarray, full_bytes: float) -> float:
        """Seconds by which one collective of tensors of these ``sizes`` together, in bytes, takes longer than their
        shares of one of ``full_bytes`` (0: each by itself); negative if that is less than they are together."""
        if action not in _IN_BUCKETS:
            return 0.0
        alone, whole = (self.sent_s(_IN_BUCKETS[action], axes, some) for some in (sizes, sizes.sum(keepdims=True)))
        if full_bytes:
            share = sizes / full_bytes * self.sent_s(_IN_BUCKETS[action], axes, np.array(full_bytes))
            alone = np.where(sizes < full_bytes, np.minimum(alone, share), alone)
        return float(whole[0]) - float(alone.sum())

    def _once(self, key: tuple[Any, ...], make: Callable[[], np.ndarray]) -> np.ndarray:
        if key not in self._kept:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[key] = make()
        return self._kept[key]


__all__ = ["MessageSeconds"]
