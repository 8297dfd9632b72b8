"""Where training state lives between its uses: device, host memory or disk; sizes that pricing and runtime share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoparallel.errors import PlanError, shown

TIERS = ("device", "host", "disk")
#: By value of the option ``offload``, the tiers of parameters, gradients and optimizer states. Those with a name first;
#: the others are written as their tiers.
_TIERS_OF = {
    "none": ("device", "device", "device"), "host": ("device", "host", "host"), "parameters": ("host", "host", "host"),
    "disk": ("device", "device", "disk"), "device/host/disk": ("device", "host", "disk"),
    "host/host/disk": ("host", "host", "disk"), "host/disk/disk": ("host", "disk", "disk"),
    "disk/disk/disk": ("disk", "disk", "disk"),
}
#: What the option ``offload`` may be; its first four have a name.
PLACES = tuple(_TIERS_OF)
#: Of these, those that `autoparallel.fit` tries unless others are named.
FITTED = ("none", "host", "parameters", "disk", "host/host/disk", "disk/disk/disk")
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
    """The tiers in which the optimizer's ``states``, ``gradients`` and ``parameters`` live between their uses.

    ``fraction``: the share of each parameter's elements whose states are in their tier; the states of the others stay
    on the device (Twin-Flow), and so do gradients. ``gradients`` "": on the host where all states are there, or with
    the parameters. Parameters outside of the device are copied to it for each use. Which tiers go together, `PLACES`
    says. ``tile_bytes``: of the parameters that are stepped at once, a multiple of `BLOCK_BYTES`. Raises PlanError for
    values that cannot be.
    """

    states: str = "device"
    fraction: float = 1.0
    tile_bytes: int = TILE_BYTES
    parameters: str = "device"
    gradients: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, (int, float)) or not 0 < self.fraction <= 1:
            raise PlanError(f"the offloaded fraction is {shown(self.fraction)}: give a number above 0, at most 1")
        if isinstance(self.tile_bytes, bool) or not isinstance(self.tile_bytes, int) or self.tile_bytes < BLOCK_BYTES \
                or self.tile_bytes % BLOCK_BYTES:
            raise PlanError(f"tile_bytes is {shown(self.tile_bytes)}: give a multiple of {BLOCK_BYTES}")
        if not self.gradients:
            with_states = "host" if self.states == "host" and self.fraction == 1 else "device"
            object.__setattr__(self, "gradients", with_states if self.parameters == "device" else self.parameters)
        for what, tier in (("optimizer states", self.states), ("gradients", self.gradients),
                           ("parameters", self.parameters)):
            if tier not in TIERS:
                raise PlanError(f"unknown tier {shown(tier)} of {what}; there are {list(TIERS)}")
        self._check_order()

    def _check_order(self) -> None:
        if self.fraction != 1 and self.gradients != "device":
            raise PlanError(f"parameters or gradients outside of the device go with all optimizer states there, not "
                            f"with {self.fraction:g} of them on the {self.states}: leave offload_fraction out")
        if self._as_option not in _TIERS_OF.values():
            raise PlanError(f"parameters on the {self.parameters}, gradients on the {self.gradients} and optimizer "
                            f"states on the {self.states} do not go together: take one of {list(PLACES)}")

    @staticmethod
    def upgraded(data: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a plan file has of it, as this version writes it: before, ``parameters`` were on the host or not."""
        before = data.get("parameters")
        return {**data, "parameters": "host" if before else "device"} if isinstance(before, bool) else data

    @property
    def is_away(self) -> bool:
        """Whether states leave the device."""
        return self.states != "device"

    @property
    def moves_gradients(self) -> bool:
        """Whether gradients leave the device during backward."""
        return self.gradients != "device"

    @property
    def moves_parameters(self) -> bool:
        """Whether parameters live outside of the device, and are fetched for each use."""
        return self.parameters != "device"

    @property
    def place(self) -> str:
        """The value of the option ``offload`` that says this, but for the fraction."""
        return next(place for place, tiers in _TIERS_OF.items() if tiers == self._as_option)

    @property
    def _as_option(self) -> tuple[str, str, str]:
        in_part = self.states == "host" and self.fraction != 1    # whose option is "host", too
        return self.parameters, "host" if in_part else self.gradients, self.states

    def in_tier(self, tier: str) -> tuple[str, ...]:
        """Which of "parameters", "gradients" and "optimizer states" live in a tier."""
        all_of = ("parameters", self.parameters), ("gradients", self.gradients), ("optimizer states", self.states)
        return tuple(what for what, where in all_of if where == tier)

    def moved(self, elements: Any, item_bytes: float) -> Any:
        """The first elements of a shard whose states are in the tier, in whole units of `UNIT_BYTES`; arrays allowed.

        >>> float(Offload("host", 0.5).moved(100, 4))
        64.0
        """
        import numpy as np  # not above: the command line shows names without it

        share = self.fraction if self.is_away else 0.0
        whole, unit = np.asarray(elements, float), max(1, UNIT_BYTES // int(item_bytes))
        return np.minimum(whole, np.ceil(whole * share / unit) * unit)[()]


#: States stay on the device.
ON_DEVICE = Offload()


def offload_of(place: str, fraction: float = 1.0, tile_bytes: int = TILE_BYTES) -> Offload:
    """What one of `PLACES` means."""
    parameters, gradients, states = _TIERS_OF[place]
    gradients = "device" if place == "host" and fraction != 1 else gradients
    return Offload(states, fraction, tile_bytes, parameters, gradients)


def listed(some: Sequence[str]) -> str:
    """
    >>> listed(("parameters", "gradients", "optimizer states"))
    'parameters, gradients and optimizer states'
    """
    *first, last = some
    return f"{', '.join(first)} and {last}" if first else last


def padded(num_bytes: Any, unit: int = UNIT_BYTES) -> Any:
    """``num_bytes`` rounded up to a multiple; arrays allowed."""
    import numpy as np

    return np.ceil(np.asarray(num_bytes, float) / unit)[()] * unit


def buffer_bytes(moved_bytes: float, tile_bytes: float) -> float:
    """Bytes of host memory for the tiles of a state of ``moved_bytes`` on disk."""
    return float(BUFFERS * min(padded(moved_bytes, BLOCK_BYTES), tile_bytes))


def largest_tile(host_bytes: float, num_states: int) -> int:
    """The largest tile, of at most `TILE_BYTES`, with which those of so many states on disk fit into host memory; at
    least a block."""
    fits = min(host_bytes / (BUFFERS * max(1, num_states)), TILE_BYTES)
    return max(1, int(fits) // BLOCK_BYTES) * BLOCK_BYTES
