"""offload="auto": plans with training state in each tier, compared by price."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from autoparallel import clock
from autoparallel.errors import InfeasibleError, PlanError, SearchError
from autoparallel.planning.baselines import SHARDING
from autoparallel.planning.options import Options
from autoparallel.plans import Plan
from autoparallel.schedule.tiers import ON_DEVICE, PLACES, Offload, listed, offload_of
from cost_models import Cluster
from cost_models.memory import TrainingState

#: Shares of the states on the host that are tried where all of them are more than memory requires; and of the blocks.
FRACTIONS = (0.25, 0.5, 0.75)
#: By tiers of all parameters that take these from the device, the tiers of the others where some blocks leave only.
_OTHERS = {"parameters": "host", "host/host/disk": "device/host/disk"}
#: The least share of the time limit for a search beyond the first.
LEAST_SHARE = 0.25
#: The share of the memory limit from which on memory counts as what binds a plan with states on the device.
BINDS = 0.9
#: A tier is taken where it makes a step shorter by more than this share.
LEAST_GAIN = 0.01

#: Tiers with states on disk, in the order in which they are tried.
ON_DISK = tuple(place for place in PLACES if offload_of(place).states == "disk")

#: A table of a smaller share of the largest is not worth the host's memory.
LEAST_TABLE = 0.01

Make = Callable[[Options], Plan]
StateOf = Callable[[Options], TrainingState]
#: Values of the options ``offload`` and ``offload_fraction``.
Choice = tuple[str | Mapping[str, str], float | None]


class Bounds(Protocol):
    """Which searches are in vain."""

    def may_fit(self, options: Options) -> bool:
        """Whether a plan with these options may fit."""

    def may_beat(self, options: Options, seconds: float) -> bool:
        """Whether its step may take less than so many seconds."""


def fastest_tier(options: Options, cluster: Cluster, make: Make, state: StateOf | None = None,
                 bounds: Bounds | None = None, blocks: Sequence[str] = (), tables: Sequence[tuple[str, int]] = ()
                 ) -> Plan:
    """The fastest of the plans by ``make`` with states on the device, on the host in part or whole, and with parameters
    there; on disk only where none of these fits: states alone, then gradients and parameters on the host, then these on
    disk too. Saved tensors may be on the host where recompute costs more. Where parameters leave, those of as few of
    the ``blocks`` (their paths) as memory requires alone are tried too; and with the largest of ``tables`` (name and
    bytes, the largest first) looked up on the host, as few as memory requires, or all. Tiers are left out where memory
    does not bind, where ``state`` (all parameters, gradients and optimizer states under some options, in bytes) exceeds
    what its hosts have, where the cluster's description does not say how fast they are, or where ``bounds`` rule them
    out: then parts of the states are tried first, and what more leaves the device only where it may be faster. Raises
    InfeasibleError (that of the device) if none fits."""
    return _Tiers(options, cluster, make, state, bounds, blocks, tables).fastest()


class _Tiers:
    """The plans of one call by tier. ``why``: of tiers without one, the reason."""

    def __init__(self, options: Options, cluster: Cluster, make: Make, state: StateOf | None, bounds: Bounds | None,
                 blocks: Sequence[str], tables: Sequence[tuple[str, int]]) -> None:
        self.blocks = blocks
        self.options, self.make, self.cluster, self.state, self.bounds = options, make, cluster, state, bounds
        self.tables = _worth_moving(tables, options) if options.looks_up else []
        self.most_s = math.inf    # of a plan that is of use
        self.ends = clock.now() + options.time_limit_s
        whole = options.baseline is not None and options.baseline not in SHARDING    # parameters, on each rank
        self.tiers = [tier for tier in _known(cluster) if tier in options.tiers
                      and not (whole and offload_of(tier).moves_parameters)]
        self.nothing = f"the description of {cluster.name} has no rates of its hosts for offload='host' or 'disk'"
        self.found, self.why = list[Plan](), list[str]()
        shared = cluster.host.shared_memory    # where the host's memory saves nothing
        self.saved_tiers = [tier for tier in ("host", "disk") if tier in self.tiers and not (shared and tier == "host")]

    def fastest(self) -> Plan:
        try:
            if said := self._exceeded(self.options, ON_DEVICE):
                raise InfeasibleError(f"no plan fits: {said}")
            here = self._plan(self._within("none"))
        except InfeasibleError as error:
            return self._elsewhere(error)
        if not _binds(here):
            return here
        self.most_s = (1 - LEAST_GAIN) * _step_s(here)
        self._try_tiers()
        best = min(self.found, key=_least, default=here)
        if best is here or _step_s(best) >= self.most_s:
            return here
        return _because(best, f"{_step_s(here) / _step_s(best):.2f} times as fast as with states in device memory, "
                        f"which bind it{self._told_of_tables(best)}")

    def _elsewhere(self, error: InfeasibleError) -> Plan:
        self._try_tiers()
        if not self.found:
            self._try_disk()
        if self.found:
            best = min(self.found, key=_least)
            return _because(best, "states in device memory do not fit" + self._told_of_tables(best))
        error.args = (f"{error} ({'; '.join(self.why or [self.nothing])})",)
        raise error

    def _try_tiers(self) -> None:
        """On the host: all, and as few as memory requires; with parameters, where recompute or nothing else fits; and
        tables."""
        if "host" in self.tiers:
            self._fewest("host", [("host", share) for share in FRACTIONS])
        binds = not self.found or any(plan.hybrid.recompute != "none" for plan in self.found)
        if "parameters" in self.tiers and binds:
            self._fewest("parameters", self._some_blocks("parameters"))
        if "host" in self.tiers and self.tables:
            self._try_tables()

    def _try_tables(self) -> None:
        """The largest tables on the host, as few as memory requires, by bisection; or all, with all states there."""
        if not self._add("none", tables=len(self.tables)):
            self._add("host", tables=len(self.tables))
            return
        low, high = 1, len(self.tables)
        while low < high:
            middle = (low + high) // 2
            if self._add("none", tables=middle):
                high = middle
            else:
                low = middle + 1

    def _try_disk(self) -> None:
        """The first of `ON_DISK` that fits with parameters on the device, and the first with these elsewhere."""
        for tier in ON_DISK:
            elsewhere = offload_of(tier).moves_parameters
            if tier in self.tiers and (elsewhere or not self.found) and self._fewest(
                    tier, self._some_blocks(tier) if elsewhere else ()) and elsewhere:
                return

    def _fewest(self, tier: str, some: Sequence[Choice]) -> bool:
        """A plan with all in a tier, and of ``some`` choices, in the order in which more leaves the device, the first
        that fits, by bisection; with bounds these are tried before. Returns whether any was found, or would be of no
        use if it were."""
        any_fits = self.bounds is None and self._add(tier)
        low, high = 0, len(some) if any_fits or self.bounds is not None else 0
        while low < high:
            middle = (low + high) // 2
            if self._add(*some[middle]):
                high, any_fits = middle, True
            else:
                low = middle + 1
        return self._add(tier) or any_fits if self.bounds is not None else any_fits

    def _some_blocks(self, tier: str) -> list[Choice]:
        """The first blocks in a tier, a quarter of all to three; the other parameters on the device."""
        count = len(self.blocks)
        if tier not in _OTHERS or count < 2:
            return []
        numbers = sorted({math.ceil(share * count) for share in FRACTIONS})
        return [({**{f"{path}.*": tier for path in self.blocks[:number]}, "*": _OTHERS[tier]}, None)
                for number in numbers]

    def _add(self, tier: str | Mapping[str, str], fraction: float | None = None, tables: int = 0) -> bool:
        """Whether a plan was found, or would be of no use if it were. ``tables``: so many more are on the host."""
        said_of = repr(tier) if isinstance(tier, str) else f"some blocks' {offload_of(tier).told()}"
        within, best_s = self._within(tier, fraction), min(map(_step_s, self.found), default=self.most_s)
        named = f"{tables} tables on the host with offload={said_of}" if tables else f"offload={said_of}"
        within = replace(within, on_host=(*within.on_host, *self.tables[:tables]))
        said = self._exceeded(within, offload_of(tier, fraction or 1.0))
        if not said and self.bounds is not None and not self.bounds.may_fit(within):
            said = "no combination of pipeline, mesh and micro-batches fits"
        if said:
            self.why.append(f"{named}: {said}")
            return False
        if self.bounds is not None and best_s < math.inf and not self.bounds.may_beat(within, best_s):
            return True
        try:
            self.found.append(self._plan(within))
        except (InfeasibleError, SearchError, PlanError) as error:
            self.why.append(f"{named}: {error}")
            return False
        return True

    def _exceeded(self, options: Options, away: Offload) -> str:
        """Why no plan keeps the state of this tier in the memory of hosts or devices, divided evenly; "" if one may, or
        groups have tiers of their own."""
        if self.state is None or away.groups:
            return ""
        state = self.state(options)
        sizes = {"parameters": state.parameters, "gradients": state.gradients,
                 "optimizer states": state.optimizer * away.fraction}
        (host, *_), (device, _) = tier_limits(self.cluster, self.options), self.options.wider_limits(self.cluster)
        stays = {"host": 0.0, "device": state.optimizer * (1 - away.fraction)}
        for tier, limit in (("host", host), ("device", device)):
            needed = (sum(sizes[what] for what in away.in_tier(tier)) + stays[tier]) / self.cluster.num_devices
            if needed > limit:
                what = listed([*away.in_tier(tier), *["some optimizer states"] * (stays[tier] > 0)])
                return f"{what} need {needed:.3g} bytes of the {tier} for each device, which has {limit:.3g}"
        return ""

    def _told_of_tables(self, plan: Plan) -> str:
        """Which tables are on the host that no pin puts there."""
        chosen = [name for name in plan.hybrid.on_host if name not in self.options.on_host]
        return f"; {listed(chosen)} on the host, looked up there" if chosen else ""

    def _within(self, tier: str | Mapping[str, str], fraction: float | None = None) -> Options:
        """The options of plans with states in a tier, with the time that is left."""
        left = max(LEAST_SHARE * self.options.time_limit_s, self.ends - clock.now())
        within = replace(self.options, offload=tier, offload_fraction=fraction, time_limit_s=left,
                         saved_tiers=self.saved_tiers)
        if within.tier.moves_parameters and within.by_hand is None:
            within = replace(within, zero_stage=3 if within.zero_stage is None else within.zero_stage)
        return within

    def _plan(self, within: Options) -> Plan:
        """The plan. Raises InfeasibleError, also for one by hand that does not fit."""
        made = self.make(within)
        limit = made.prediction.limit_bytes
        if self.options.by_hand is not None and 0 < limit < made.prediction.peak_bytes:
            raise InfeasibleError(f"the plan by hand needs {made.prediction.peak_bytes:.3g} bytes on a device, of "
                                  f"{limit:.3g}")
        return made


def _binds(plan: Plan) -> bool:
    """Whether more device memory could make a plan faster: it recomputes, shards parameters, or fills memory."""
    hybrid, p = plan.hybrid, plan.prediction
    return hybrid.recompute != "none" or hybrid.zero_stage == 3 or 0 < BINDS * p.limit_bytes < p.peak_bytes


def _step_s(plan: Plan) -> float:
    return plan.prediction.step_s


def _least(plan: Plan) -> tuple[float, bool, float, int]:
    """The order of plans in tiers: by seconds, then by how much leaves the device."""
    away = plan.hybrid.offload
    much = len(away.groups) or math.inf if away.moves_parameters else away.fraction
    return _step_s(plan), away.moves_parameters, much, len(plan.hybrid.on_host)


def _worth_moving(tables: Sequence[tuple[str, int]], options: Options) -> list[str]:
    """Names of the tables that are not on the host yet, the largest first; without those that are small beside it."""
    left = [(name, size) for name, size in tables if name not in options.on_host]
    return [name for name, size in left if size >= LEAST_TABLE * left[0][1]]


def _because(plan: Plan, why: str) -> Plan:
    return replace(plan, evidence=replace(plan.evidence, stop_reason=f"{why}; {plan.evidence.stop_reason}"))


def _known(cluster: Cluster) -> Iterator[str]:
    host = cluster.host
    links = host.to_device_bytes_per_s and host.from_device_bytes_per_s and host.memory_bandwidth_bytes_per_s
    if host.shared_memory or links:
        yield from ("host", "parameters")
        if host.disk_read_bytes_per_s and host.disk_write_bytes_per_s:
            yield from ON_DISK


def tiers_of(fetches: bool, has_disk: bool) -> tuple[str, ...]:
    """The tiers that "auto" may take where programs can fetch parameters for each use, and where there is a disk."""
    found = ((place, offload_of(place)) for place in PLACES[1:])
    return tuple(place for place, away in found if (fetches or not away.moves_parameters) and
                 (has_disk or not away.in_tier("disk")))


def tier_limits(cluster: Cluster, options: Options) -> tuple[float, float, float]:
    """Bytes for each device: of host memory and of disk, and the share of the host's memory that it has."""
    share = cluster.host.memory_bytes / cluster.devices_on_host or math.inf
    host = share if options.host_memory_limit_bytes is None else options.host_memory_limit_bytes
    return host, math.inf if options.disk_limit_bytes is None else options.disk_limit_bytes, share


__all__ = ["fastest_tier", "tier_limits", "tiers_of"]
