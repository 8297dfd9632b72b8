"""Seconds of collectives and copies: steps between the layouts of one tensor move the same bytes many times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from autoparallel.layout.redistribution import Axes
from cost_models import Device, Group, collectives

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

    def _once(self, key: tuple[Any, ...], make: Callable[[], np.ndarray]) -> np.ndarray:
        if key not in self._kept:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[key] = make()
        return self._kept[key]


__all__ = ["MessageSeconds"]
