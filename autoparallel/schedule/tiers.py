"""Where training state lives between its uses: device, host memory or disk; sizes that pricing and runtime share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autoparallel.errors import PlanError, shown

TIERS = ("device", "host", "disk")
#: What the option ``offload`` may be.
PLACES = ("none", "host", "parameters", "disk")
#: Bytes of a state (as of the parameters) that are stepped at once, at most.
TILE_BYTES = 2**26
#: Tiles in host memory at once: one is read, one stepped, one written.
BUFFERS = 3
#: Buckets of gradients on their way to the host at once, at most.
BUCKETS_IN_FLIGHT = 2
#: Alignment of files, as direct I/O asks for it, and of each parameter's states within them.
BLOCK_BYTES, UNIT_BYTES = 4096, 64


@dataclass(frozen=True)
class Offload:
    """Where the optimizer's states live. ``fraction``: the share of each parameter's elements whose states are there;
    the states of the others stay on the device (Twin-Flow). ``parameters``: whether these are there too, and copied to
    the device for each use. ``tile_bytes``: of the parameters that are stepped at once,
    a multiple of `BLOCK_BYTES`. Raises PlanError for values that cannot be.
    """

    states: str = "device"
    fraction: float = 1.0
    tile_bytes: int = TILE_BYTES
    parameters: bool = False

    def __post_init__(self) -> None:
        if self.states not in TIERS:
            raise PlanError(f"unknown tier {shown(self.states)} of optimizer states; there are {list(TIERS)}")
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, (int, float)) or not 0 < self.fraction <= 1:
            raise PlanError(f"the offloaded fraction is {shown(self.fraction)}: give a number above 0, at most 1")
        if isinstance(self.tile_bytes, bool) or not isinstance(self.tile_bytes, int) or self.tile_bytes < BLOCK_BYTES \
                or self.tile_bytes % BLOCK_BYTES:
            raise PlanError(f"tile_bytes is {shown(self.tile_bytes)}: give a multiple of {BLOCK_BYTES}")

        if self.parameters and (self.states != "host" or self.fraction != 1):
            raise PlanError(f"parameters on the host go with all optimizer states there, not with {self.fraction:g} of "
                            f"them on the {self.states}: take offload='parameters' without offload_fraction")

    @property
    def is_away(self) -> bool:
        """Whether states leave the device."""
        return self.states != "device"

    @property
    def moves_gradients(self) -> bool:
        """Whether gradients leave the device during backward: where all states are in the memory of the host."""
        return self.states == "host" and self.fraction == 1.0

    def moved(self, elements: Any, item_bytes: float) -> Any:
        """The first elements of a shard whose states are in the tier, in whole units of `UNIT_BYTES`; arrays allowed.

        >>> float(Offload("host", 0.5).moved(100, 4))
        64.0
        """
        share = self.fraction if self.is_away else 0.0
        whole, unit = np.asarray(elements, float), max(1, UNIT_BYTES // int(item_bytes))
        return np.minimum(whole, np.ceil(whole * share / unit) * unit)[()]


#: States stay on the device.
ON_DEVICE = Offload()


def offload_of(place: str, fraction: float = 1.0, tile_bytes: int = TILE_BYTES) -> Offload:
    """What one of `PLACES` means."""
    if place == "none":
        return ON_DEVICE
    return Offload("host" if place == "parameters" else place, fraction, tile_bytes, place == "parameters")


def padded(num_bytes: Any, unit: int = UNIT_BYTES) -> Any:
    """``num_bytes`` rounded up to a multiple; arrays allowed."""
    return np.ceil(np.asarray(num_bytes, float) / unit)[()] * unit


def buffer_bytes(moved_bytes: float, tile_bytes: float) -> float:
    """Bytes of host memory for the tiles of a state of ``moved_bytes`` on disk."""
    return float(BUFFERS * min(padded(moved_bytes, BLOCK_BYTES), tile_bytes))


def largest_tile(host_bytes: float, num_states: int) -> int:
    """The largest tile, of at most `TILE_BYTES`, with which those of so many states on disk fit into host memory; at
    least a block."""
    fits = min(host_bytes / (BUFFERS * max(1, num_states)), TILE_BYTES)
    return max(1, int(fits) // BLOCK_BYTES) * BLOCK_BYTES
