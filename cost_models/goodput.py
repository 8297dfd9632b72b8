"""Goodput: the share of a job's time in which it trains, where devices fail.

Failures come at random, at a rate in proportion to the devices (exponential times between them). A job writes a
checkpoint after every ``interval_s`` of training, which holds it up; after a failure it starts again from the last one
on a spare host, or waits until a broken one is repaired.

With failure rate f, restarts of R seconds and checkpoints that hold it up for C, a segment of T seconds of training
takes (1/f + R) (exp(f (T + C)) - 1) seconds in the mean (Daly 2006, eq. 13). With s spare hosts, and f r hosts broken
at once in the mean (r: seconds of a repair), the job waits for a repair the share of time in which s + 1 are broken,
as in Erlang's loss formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

#: Unexpected interruptions of Llama 3 405B on 16,384 H100s: 419 in 54 days (Grattafiori et al. 2024, arXiv 2407.21783,
#: section 3.3.4).
LLAMA3_PER_DEVICE_HOUR = 419 / (54 * 24 * 16_384)
HOUR_S = 3_600.0
#: Relative change of the interval at which the search for the best one ends.
_NEAR = 1e-3


@dataclass(frozen=True)
class Failures:
    """How often devices fail, and what a failure takes.

    per_device_hour: interruptions of the job per device and hour. restart_s: from a failure until the job trains again
    on other hosts: noticing it, starting, loading. checkpoint_s: how long writing a checkpoint holds training up (only
    the copy to host memory, if the rest is written beside the next steps). repair_s: until a broken host is back.
    """

    per_device_hour: float = LLAMA3_PER_DEVICE_HOUR
    restart_s: float = 300.0
    checkpoint_s: float = 10.0
    repair_s: float = 24 * HOUR_S

    def __post_init__(self) -> None:
        for name in ("per_device_hour", "restart_s", "checkpoint_s", "repair_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value!r}: give a number, 0 or more")

    def per_s(self, devices: int) -> float:
        """Failures of a job on so many devices, per second."""
        return self.per_device_hour * devices / HOUR_S

    def training(self, devices: int, interval_s: float) -> float:
        """The share of time in which a job trains that writes a checkpoint every ``interval_s`` of training and never
        waits for hosts.

        >>> f"{Failures().training(16_384, 1800.0):.3f}"
        '0.892'
        >>> Failures(per_device_hour=0.0, checkpoint_s=10.0).training(8, 990.0)
        0.99
        """
        rate, segment_s = self.per_s(devices), interval_s + self.checkpoint_s
        if not segment_s:    # checkpoints that cost nothing, at every moment
            return 1 / (1 + rate * self.restart_s)
        if not rate:
            return interval_s / segment_s if interval_s < math.inf else 1.0
        if rate * segment_s > 700:  # exp would overflow
            return 0.0
        return interval_s / ((1 / rate + self.restart_s) * math.expm1(rate * segment_s))

    def available(self, devices: int, spares: int) -> float:
        """The share of time in which at most ``spares`` hosts are broken, so that the job has all it needs."""
        broken = self.per_s(devices) * self.repair_s
        term = total = 1.0  # broken**n / n!, scaled down where it is large
        for n in range(1, spares + 2):
            term *= broken / n
            total += term
            if total > 1e200:
                term, total = term / total, 1.0
        return 1.0 - term / total

    def goodput(self, devices: int, interval_s: float, spares: int = 0) -> float:
        """The share of time in which the job trains."""
        return self.training(devices, interval_s) * self.available(devices, spares)

    def best_interval_s(self, devices: int) -> float:
        """Seconds of training between checkpoints with which most of the time is trained; inf where nothing fails or
        checkpoints cost nothing (0 then)."""
        rate = self.per_s(devices)
        if not rate:
            return math.inf
        if not self.checkpoint_s:
            return 0.0
        low, high = 1e-3 * self.checkpoint_s, 1e3 * math.sqrt(2 * self.checkpoint_s / rate) + 1e3
        golden = (math.sqrt(5) - 1) / 2
        while high > (1 + _NEAR) * low:  # the share has one maximum
            inner, outer = high - golden * (high - low), low + golden * (high - low)
            if self.training(devices, inner) < self.training(devices, outer):
                low = inner
            else:
                high = outer
        return (low + high) / 2

    def simulated(self, devices: int, interval_s: float, spares: int, days: float, seed: int = 0) -> float:
        """The share of time trained in one run of so many days, failure by failure."""
        rng, rate, ends = np.random.default_rng(seed), self.per_s(devices), 24 * HOUR_S * days
        now, trained, since, back = 0.0, 0.0, 0.0, list[float]()  # since: trained and not saved; back: repairs' ends
        while now < ends:
            left = rng.exponential(1 / rate) if rate else math.inf
            left = min(left, ends - now)
            segments, rest = divmod(left, interval_s + self.checkpoint_s)
            trained += segments * interval_s
            since = min(rest, interval_s)
            now += left
            if now >= ends:
                return (trained + since) / ends
            back = [end for end in back if end > now] + [now + rng.exponential(self.repair_s)]
            if len(back) > spares:
                now = sorted(back)[len(back) - spares - 1]
            restarted = 0.0
            while restarted < self.restart_s:  # a failure while restarting begins it anew
                restarted = rng.exponential(1 / rate) if rate else math.inf
                now += min(restarted, self.restart_s)
        return trained / ends


__all__ = ["LLAMA3_PER_DEVICE_HOUR", "Failures"]
