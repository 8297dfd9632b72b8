"""offload="auto": the first tier of optimizer states with which a plan fits, and as few of them as memory requires."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from autoparallel import clock
from autoparallel.errors import InfeasibleError, SearchError
from autoparallel.planning.options import Options
from autoparallel.plans import Plan
from cost_models import Cluster

#: Shares of the states on the host that are tried where all of them are more than memory requires.
FRACTIONS = (0.25, 0.5, 0.75)
#: The least share of the time limit for a search beyond the first.
LEAST_SHARE = 0.25


def first_that_fits(options: Options, cluster: Cluster, make: Callable[[Options], Plan]) -> Plan:
    """The plan by ``make`` with states on the device; where none fits, on the host; then on disk, for clusters whose
    description says how fast that is. Raises InfeasibleError (that of the device) if none fits."""
    ends = clock.now() + options.time_limit_s

    def within(tier: str, fraction: float | None = None) -> Plan:
        left = max(LEAST_SHARE * options.time_limit_s, ends - clock.now())
        return make(replace(options, offload=tier, offload_fraction=fraction, time_limit_s=left))

    try:
        return within("none")
    except InfeasibleError as error:
        tiers, others = [tier for tier in _tiers(cluster) if tier in options.tiers], list[str]()
        for tier in tiers:
            try:
                found = within(tier)
            except (InfeasibleError, SearchError) as other:
                others.append(f"offload={tier!r}: {other}")
                continue
            if tier == "host":
                found = _fewest(found, within)
            reason = f"states in device memory do not fit; {found.evidence.stop_reason}"
            return replace(found, evidence=replace(found.evidence, stop_reason=reason))
        if not tiers:
            others = [f"the description of {cluster.name} has no rates of its hosts for offload='host' or 'disk'"]
        error.args = (f"{error} ({'; '.join(others)})",)
        raise


def _fewest(whole: Plan, within: Callable[[str, float], Plan]) -> Plan:
    """The plan with the smallest of `FRACTIONS` that fits, by bisection; ``whole`` has all states on the host."""
    best, low, high = whole, 0, len(FRACTIONS)
    while low < high:
        middle = (low + high) // 2
        try:
            best, high = within("host", FRACTIONS[middle]), middle
        except (InfeasibleError, SearchError):
            low = middle + 1
    return best


def _tiers(cluster: Cluster) -> Iterator[str]:
    host = cluster.host
    links = host.to_device_bytes_per_s and host.from_device_bytes_per_s and host.memory_bandwidth_bytes_per_s
    if host.shared_memory or links:
        yield "host"
        if host.disk_read_bytes_per_s and host.disk_write_bytes_per_s:
            yield "disk"


__all__ = ["first_that_fits"]
