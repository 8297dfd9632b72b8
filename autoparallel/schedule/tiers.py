"""Where training state lives between its uses: device, host memory or disk; sizes that pricing and runtime share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
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
#: The same while backward goes on, which ends before the last tile is stepped.
EARLY_TILE_BYTES = 2**23
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
    says. ``tile_bytes``: of the parameters that are stepped at once, a multiple of `BLOCK_BYTES`. ``groups``: patterns
    of parameters' names, each with one of `PLACES`: the first that matches a parameter says its tiers (`of`), and the
    fields above those of parameters that none matches. ``in_backward``: states outside of the device are stepped while
    backward goes on, each tile once its gradients are there; if all states are on the device, these (`steps_there`).
    Raises PlanError for values that cannot be.
    """

    states: str = "device"
    fraction: float = 1.0
    tile_bytes: int = TILE_BYTES
    parameters: str = "device"
    gradients: str = ""
    groups: tuple[tuple[str, str], ...] = ()
    in_backward: bool = False

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
        for pattern, place in self.groups:
            if place not in _TIERS_OF:
                raise PlanError(f"unknown offload {shown(place)} of {pattern!r}; there are {list(PLACES)}")

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

    def of(self, name: str, tables: Collection[str] = ()) -> Offload:
        """The tiers of one parameter. ``tables``: those that are looked up on the host, and so live there with their
        gradients, and with their states unless these are on disk."""
        found = next((one for (pattern, _), one in zip(self.groups, self.each[1:], strict=True)
                      if fnmatchcase(name, pattern)), self.each[0])
        return found._looked_up if name in tables else found

    @cached_property
    def _looked_up(self) -> Offload:
        return offload_of("host/host/disk" if self.states == "disk" else "parameters", tile_bytes=self.tile_bytes)

    @cached_property
    def each(self) -> tuple[Offload, ...]:
        """The tiers of parameters that no group has, then those of each group."""
        rest = replace(self, groups=()) if self.groups else self
        return rest, *(offload_of(place, tile_bytes=self.tile_bytes) for _, place in self.groups)

    @cached_property
    def is_away(self) -> bool:
        """Whether states leave the device, of some parameters."""
        return any(one.states != "device" for one in self.each)

    @cached_property
    def moves_gradients(self) -> bool:
        """Whether gradients leave the device during backward, of some parameters."""
        return any(one.gradients != "device" for one in self.each)

    @cached_property
    def moves_parameters(self) -> bool:
        """Whether some parameters live outside of the device, and are fetched for each use."""
        return any(one.parameters != "device" for one in self.each)

    @property
    def steps_there(self) -> bool:
        """Whether the device steps parameters while backward goes on, and lets each gradient go when it has."""
        return self.in_backward and not self.is_away

    @property
    def place(self) -> str | dict[str, str]:
        """The value of the option ``offload`` that says this, but for the fraction."""
        rest = next(place for place, tiers in _TIERS_OF.items() if tiers == self._as_option)
        if not self.groups:
            return rest
        return {**dict(self.groups), **({} if rest == "none" else {"*": rest})}

    @property
    def _as_option(self) -> tuple[str, str, str]:
        in_part = self.states == "host" and self.fraction != 1    # whose option is "host", too
        return self.parameters, "host" if in_part else self.gradients, self.states

    def in_tier(self, tier: str) -> tuple[str, ...]:
        """Which of "parameters", "gradients" and "optimizer states" live in a tier, of some parameters."""
        return tuple(what for what, name in (("parameters", "parameters"), ("gradients", "gradients"),
                                             ("optimizer states", "states"))
                     if any(getattr(one, name) == tier for one in self.each))

    def told(self, host: str = "in the memory of the host", disk: str = "on disk", between: str = "; ") -> str:
        """What leaves the device, and what backward steps, in words; "" if all stays and is stepped after backward.

        >>> offload_of({"embed*": "disk", "*": "host"}).told()
        'of embed*: optimizer states on disk; of the others: gradients and optimizer states in the memory of the host'
        """
        patterns = dict[Offload, list[str]]()
        for one, name in zip((*self.each[1:], self.each[0]), [*(pattern for pattern, _ in self.groups), "the others"],
                             strict=True):
            if one.is_away:
                patterns.setdefault(one, []).append(name)
        said = []
        for one, names in patterns.items():
            some = "" if one.fraction == 1 else f"{one.fraction:.0%} of "
            of = f"of {listed(some_of(names))}: " if self.groups else ""
            said.append(of + between.join(f"{some}{listed(there)} {words}" for tier, words in (
                ("host", host), ("disk", disk)) if (there := one.in_tier(tier))))
        if self.steps_there:
            return "parameters stepped during backward, each gradient let go then"
        return "; ".join(said) + (", stepped during backward" if self.in_backward else "")

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


def offload_of(place: str | Mapping[str, str], fraction: float = 1.0, tile_bytes: int = TILE_BYTES) -> Offload:
    """What one of `PLACES` means, or a mapping to them from patterns of parameters' names, of which "*" is last."""
    if isinstance(place, str):
        parameters, gradients, states = _TIERS_OF[place]
        gradients = "device" if place == "host" and fraction != 1 else gradients
        return Offload(states, fraction, tile_bytes, parameters, gradients)
    rest = offload_of(place.get("*", "none"), fraction, tile_bytes)
    return replace(rest, groups=tuple(item for item in place.items() if item[0] != "*"))


def places_in(text: str) -> list[str | dict[str, str]]:
    """Values of the option ``offload`` in a text, with commas between; all with "=" are one, a mapping.

    >>> places_in("none,host,embed*=disk,layers.0.*=host")
    ['none', 'host', {'embed*': 'disk', 'layers.0.*': 'host'}]
    """
    found, by_name = list[str | dict[str, str]](), dict[str, str]()
    for part in map(str.strip, text.split(",")):
        pattern, equals, place = map(str.strip, part.rpartition("="))
        if not equals:
            found.append(part)
        elif pattern in by_name:
            raise PlanError(f"offload: {pattern!r} is given twice")
        else:
            by_name[pattern] = place
    return [*found, *([by_name] if by_name else [])]


#: Names that are listed whole.
MOST_NAMES = 4


def some_of(names: Sequence[str]) -> list[str]:
    """The names, or the first and last of many.

    >>> some_of([f"layers.{n}.*" for n in range(9)])
    ['layers.0.*', 'layers.1.*', '5 more', 'layers.7.*', 'layers.8.*']
    """
    half = MOST_NAMES // 2
    return list(names) if len(names) <= MOST_NAMES + 1 else [
        *names[:half], f"{len(names) - MOST_NAMES} more", *names[-half:]]


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


def largest_tile(host_bytes: float, num_states: int, most: int) -> int:
    """The largest tile, of at most ``most`` bytes, with which those of so many states on disk fit into host memory; at
    least a block."""
    fits = min(host_bytes / (BUFFERS * max(1, num_states)), most)
    return max(1, int(fits) // BLOCK_BYTES) * BLOCK_BYTES
