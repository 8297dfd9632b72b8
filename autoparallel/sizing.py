"""`autoparallel.size`: the smallest, or the cheapest, number of devices that trains a model as fast as is asked.

Each number of devices is planned by the joint search. The numbers double from one device; between the last that is too
slow and the first that is fast enough, three quarters of the latter are tried too. Nothing is searched where all
devices at their peak FLOP/s would take longer than the days that are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import nn

from autoparallel.api import plan
from autoparallel.errors import AutoparallelError, InfeasibleError, PlanError, SearchError, shown
from autoparallel.planning.options import MODEL_AND_CALL
from autoparallel.plans import Plan
from autoparallel.plans.reports.text import ReportConsole, as_text
from autoparallel.plans.reports.units import bytes_str, count_str, seconds_str
from cost_models import Cluster

#: Twice the devices must make a step so much shorter for still more to be tried.
LEAST_GAIN = 1.02
DAY_S = 86_400.0


@dataclass(frozen=True)
class Target:
    """What the devices have to do: a step in at most ``step_s``; or ``count`` tokens (samples of a model without
    tokens) in at most ``days``; for at most ``budget``, in the currency of the cluster's price, for all of them."""

    step_s: float = math.inf
    count: float = 0.0
    days: float = math.inf
    budget: float = math.inf

    def __post_init__(self) -> None:
        for name in ("step_s", "days", "budget"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise PlanError(f"{name} is {shown(value)}: give a number above 0")
        if isinstance(self.count, bool) or not isinstance(self.count, int | float) or not 0 <= self.count < math.inf:
            raise PlanError(f"count is {shown(self.count)}: give the number of tokens of the whole run, 0 or more")
        if self.step_s == self.days == math.inf:
            raise PlanError("nothing is asked of the devices: give step_s, or count and days")
        if (self.days < math.inf or self.budget < math.inf) and not self.count:
            raise PlanError("days and a budget are of a whole run: give the number of its tokens as count")


@dataclass(frozen=True)
class Size:
    """A number of devices and its plan, or why there is none (``refused``)."""

    cluster: Cluster
    plan: Plan | None
    refused: str = ""

    @property
    def devices(self) -> int:
        return self.cluster.num_devices

    @property
    def step_s(self) -> float:
        """Seconds of a step; inf without a plan."""
        return math.inf if self.plan is None else self.plan.prediction.step_s

    @property
    def per_s(self) -> float:
        """Tokens (or samples) per second of all devices; 0 where they are not known."""
        record = None if self.plan is None else self.plan.known
        return 0.0 if record is None or not record.workload.count else record.workload.count / self.step_s

    def days(self, count: float) -> float:
        """Days to train on so many tokens without interruption."""
        return count / self.per_s / DAY_S if self.per_s else math.inf

    def price(self, count: float) -> float | None:
        """Price of that; None where the cluster has none."""
        hourly = self.cluster.price_per_hour
        return self.days(count) * 24 * self.devices * hourly if hourly and self.per_s else None

    def lacks(self, target: Target) -> str:
        """What it does not do of the target, "" if it does all."""
        if self.plan is None:
            return self.refused
        price = self.price(target.count) if target.count else None
        slow = self.step_s > target.step_s or (target.count > 0 and self.days(target.count) > target.days)
        too = [("too slow", slow), ("too expensive", price is not None and price > target.budget)]
        return ", ".join(what for what, is_so in too if is_so)


@dataclass(frozen=True)
class Sizing:
    """The sizes that were planned, by cluster and number of devices, and what was asked of them."""

    target: Target
    sizes: tuple[Size, ...]

    @property
    def best(self) -> Size | None:
        """Of those that do what is asked the cheapest, where all have prices, else that of the fewest devices."""
        good = [size for size in self.sizes if not size.lacks(self.target)]
        prices = {id(size): size.price(self.target.count) for size in good} if self.target.count else {}
        if good and prices and all(price is not None for price in prices.values()):
            return min(good, key=lambda size: (prices[id(size)], size.devices))
        return min(good, key=lambda size: (size.devices, size.step_s), default=None)

    def report(self, width: int = 110) -> str:
        """The answer and a table of all sizes, as text of ``width`` columns."""
        return as_text(lambda console: print_sizing(self, console), width)


def size(
    model: Callable[[int], tuple[nn.Module, Sequence[Any], Mapping[str, Any]]],
    clusters: Sequence[str | Path] = ("h100-sxm",),
    *,
    step_s: float = math.inf,
    count: float = 0.0,
    days: float = math.inf,
    budget: float = math.inf,
    most: int = 4096,
    software: str | None = None,
    time_limit_s: float = 10.0,
    told: Callable[[Size], None] = lambda size: None,
    **options: Any,
) -> Sizing:
    """How many devices, and of which cluster, train a model as fast as is asked.

    model: from a number of devices, (model, example inputs, example keyword inputs) with the global batch for so many;
        the same whatever the number, if the batch is fixed.
    clusters: names of known clusters, or TOML files; prices of devices are theirs (`price_per_hour`).
    step_s: longest step. count, days: tokens (or samples) of the whole run, and in how many days at most, without
        interruptions. budget: the most that the run may cost, in the currency of the clusters' prices.
    most: the largest number of devices to try.
    software: whose speed counts, by a name of `cost_models.profile.SOFTWARE`.
    time_limit_s: of the search for each number.
    told: called with each size when it is planned.
    options: of `autoparallel.plan`.

    Raises PlanError where nothing, or nonsense, is asked.
    """
    target = Target(step_s, count, days, budget)
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise PlanError(f"most is {shown(most)}: give a number of devices, 1 or more")
    _check(model, clusters, told)
    free = [str(name) for name in clusters if not Cluster.load(name, software=software).price_per_hour]
    if budget < math.inf and free:
        raise PlanError(f"the budget is {budget:g}, and {', '.join(free)} has no price: give a TOML file with "
                        'based_on = "h100-sxm", name = "ours" and, in [device], price_per_hour = { value = 2.0, '
                        'source = "our contract" }; or leave the budget out')
    sizes = _Sizes(model, software, dict(joint=True, time_limit_s=time_limit_s, **options), told)
    for name in clusters:
        largest = [*_doubling(most)][-1]
        least = sizes.least_days(name, count) / largest if days < math.inf else 0.0
        if least > days:
            sizes.add(Size(sizes.cluster(name, largest), None, f"takes {least:.3g} days at peak FLOP/s"))
        else:
            sizes.until_enough(name, target, most)
    return Sizing(target, tuple(sorted(sizes.found, key=lambda one: (one.cluster.name, one.devices))))


@dataclass
class _Sizes:
    """Sizes that are planned with ``options`` of `plan`, and those that were ``found``; ``model``, ``software`` and
    ``told`` as of `size`."""

    model: Callable[[int], Any]
    software: str | None
    options: Mapping[str, Any]
    told: Callable[[Size], None]
    found: list[Size] = field(default_factory=list)

    def add(self, answer: Size) -> Size:
        self.found.append(answer)
        self.told(answer)
        return answer

    def cluster(self, name: str | Path, devices: int) -> Cluster:
        return Cluster.load(name, num_devices=devices, software=self.software)

    def until_enough(self, name: str | Path, target: Target, most: int) -> None:
        """Plan the numbers of devices up to the first that is fast enough, or from which on more gain little."""
        before: Size | None = None
        for devices in _doubling(most):
            now = self._planned(name, devices)
            if not now.lacks(target):
                if before is not None and devices >= 4 and devices * 3 // 4 > before.devices:
                    self._planned(name, devices * 3 // 4)
                break
            if before is not None and before.plan is not None and before.step_s < LEAST_GAIN * now.step_s \
                    and before.per_s > now.per_s / LEAST_GAIN:
                break
            before = now

    def least_days(self, name: str | Path, count: float) -> float:
        """Days that one device would compute on so many tokens at its peak FLOP/s; 0 where its FLOPs are not known."""
        try:    # by hand: priced whether it fits or not
            record = self._plan(self.cluster(name, 1), by_hand="dp=1").known
        except (InfeasibleError, SearchError):
            return 0.0
        work = None if record is None else record.workload
        return count / work.count * work.model_flops / work.peak_flops_per_s / DAY_S if work and work.count else 0.0

    def _planned(self, name: str | Path, devices: int) -> Size:
        cluster = self.cluster(name, devices)
        try:
            return self.add(Size(cluster, self._plan(cluster, **self.options)))
        except (InfeasibleError, SearchError) as error:
            return self.add(Size(cluster, None, _why(error)))

    def _plan(self, cluster: Cluster, **options: Any) -> Plan:
        made_for = self.model(cluster.num_devices)
        if not isinstance(made_for, tuple) or len(made_for) != 3:
            raise PlanError(f"the model for {cluster.num_devices} devices is {shown(made_for)}: return "
                            f"{MODEL_AND_CALL}")
        network, args, kwargs = made_for
        return plan(network, cluster, example_inputs=args, example_kwargs=kwargs, **options)


def _check(model: Any, clusters: Any, told: Any) -> None:
    if not callable(model) or isinstance(model, type | nn.Module):
        raise PlanError(f"model is {shown(model)}: give a function of a number of devices, which returns "
                        f"{MODEL_AND_CALL}")
    if not isinstance(clusters, list | tuple) or not clusters:
        raise PlanError(f"clusters is {shown(clusters)}: give names or files, for example ('h100-sxm',)")
    if not callable(told):
        raise PlanError(f"told is {shown(told)}: give a function")


def _why(error: AutoparallelError) -> str:
    needed = getattr(error, "needed_bytes", None)
    return f"needs {bytes_str(needed)} a device" if needed else str(error).split(". ", maxsplit=1)[0]


def _doubling(most: int) -> Iterator[int]:
    devices = 1
    while devices <= most:
        yield devices
        devices *= 2


def print_sizing(found: Sizing, console: ReportConsole) -> None:
    """Print the answer in one sentence, then a row for each number of devices."""
    target, best = found.target, found.best
    if best is None:
        console.print("None of these does what is asked.")
    else:
        price = best.price(target.count) if target.count else None
        days = f", {count_str(best.days(target.count))} days" if target.count else ""
        cost = f", {count_str(price)} in all" if price is not None else ""
        devices = f"{best.devices} device{'s' * (best.devices != 1)} of {best.cluster.name}"
        console.print(f"{devices}: {seconds_str(best.step_s)} a step{days}{cost}.")
    table = Table("cluster", *(f"{name}" for name in ("devices", "step", "per second", "days", "price")), "plan", "",
                  box=None, pad_edge=False)
    for one in found.sizes:
        price = one.price(target.count) if target.count else None
        table.add_row(one.cluster.name, str(one.devices), seconds_str(one.step_s) if one.plan is not None else "-",
                      count_str(one.per_s) if one.per_s else "-",
                      count_str(one.days(target.count)) if target.count and one.per_s else "-",
                      count_str(price) if price is not None else "-", _plan_words(one), one.lacks(target))
    console.print(table)


def _plan_words(one: Size) -> str:
    """The first line of the plan's summary."""
    return "" if one.plan is None else one.plan.summary().split("\n", 1)[0].rstrip(".")


__all__ = ["Size", "Sizing", "Target", "print_sizing", "size"]
