"""`autoparallel.fit`: whether training fits on so many devices, in which tier of memory, with how large a batch.

A bound of memory says with which batch a tier is planned first, by the joint search: then with twice as much at a time
until it does not fit, or with half as much until it does. Bounds leave batches out without a search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import nn

from autoparallel.api import plan
from autoparallel.capture import capture, once_each
from autoparallel.errors import InfeasibleError, PlanError, SearchError, shown
from autoparallel.planning.call_checks import check_call
from autoparallel.planning.joint_plan import times_that_may_fit
from autoparallel.planning.options import MODEL_AND_CALL, Options, check_groups, limits_in_vain, options_of
from autoparallel.plans import Plan
from autoparallel.plans.reports.text import ReportConsole, as_text
from autoparallel.plans.reports.units import bytes_str, count_str, seconds_str
from autoparallel.schedule.tiers import FITTED, PLACES, offload_of
from cost_models import Cluster
from cost_models.errors import ClusterError

#: From a global batch, (model, example inputs, example keyword inputs).
Model = Callable[[int], tuple[nn.Module, Sequence[Any], Mapping[str, Any]]]


@dataclass(frozen=True)
class Fit:
    """What fits with training state in one tier (``offload``): ``plan`` of the largest batch of ``batch`` samples, all
    of them at a time, or in micro-batches where the smallest fits so only; None: nothing does, and ``refused`` says
    why."""

    offload: str | Mapping[str, str]
    plan: Plan | None = None
    batch: int = 0
    refused: str = ""


@dataclass(frozen=True)
class Fitting:
    """What was planned, by tier, on ``cluster``."""

    cluster: Cluster
    tiers: tuple[Fit, ...]

    @property
    def fits(self) -> tuple[Fit, ...]:
        """Those with a plan, in the order in which more leaves the device."""
        return tuple(one for one in self.tiers if one.plan is not None)

    def report(self, width: int = 110) -> str:
        """The answer and a table of the tiers, as text of ``width`` columns."""
        return as_text(lambda console: print_fitting(self, console), width)


def fit(
    model: Model,
    cluster: Cluster | str | Path,
    *,
    devices: int | None = None,
    smallest: int | None = None,
    most: int = 4096,
    tiers: Sequence[str | Mapping[str, str]] = FITTED,
    software: str | None = None,
    time_limit_s: float = 10.0,
    told: Callable[[Fit], None] = lambda fit: None,
    **options: Any,
) -> Fitting:
    """Whether a model's training fits on a cluster, in which tier of memory, and with how many samples at a time.

    model: from a global batch, a number of samples, (model, example inputs, example keyword inputs) with such a batch.
    cluster: a cluster, the name of a known one, or a TOML file.
    devices: of a cluster given by name; None: as many as its description says.
    smallest: samples of the smallest batch; None: one for each device. most: of the largest that is tried.
    tiers: values of ``offload``, as `autoparallel.plan` takes it, which are tried; each has an entry in the result.
    software: whose speed and memory count, by a name of `cost_models.profile.SOFTWARE`.
    time_limit_s: of the search for each batch.
    told: called with each tier when it is known.
    options: of `autoparallel.plan`.

    A tier is refused where no plan fits or is found in time, or where the cluster does not say how fast it is; with
    parameters outside of the device only the first that fits is planned, since the others leave as much there. Raises
    PlanError for arguments that cannot be, and whatever `autoparallel.plan` raises of the model.
    """
    _check(model, tiers, devices, smallest, most, told)
    vain = [limits_in_vain(options_of({**options, "offload": tier})) for tier in tiers]
    for name in set.intersection(*map(set, vain)):
        raise PlanError(f"{name}={options[name]:g}, and nothing goes there with offload {', '.join(map(str, tiers))}: "
                        f"leave it out, or give tiers too with {vain[0][name]}")
    machine = cluster if isinstance(cluster, Cluster) else Cluster.load(cluster, num_devices=devices, software=software)
    least = smallest or machine.num_devices
    if most < least:
        whose = "" if smallest else f", one sample for each of {least} devices"
        raise PlanError(f"most={most} (--most) is below the smallest batch, {least}{whose}: give most={least} or more, "
                        "or fewer devices")
    with once_each():
        return Fitting(machine, tuple(_of_tiers(
            model, machine, tiers, least, most, {**options, "time_limit_s": time_limit_s}, told)))


def _of_tiers(model: Model, machine: Cluster, tiers: Sequence[str | Mapping[str, str]], smallest: int, most: int,
              options: Mapping[str, Any], told: Callable[[Fit], None]) -> list[Fit]:
    found, calls = list[Fit](), cache(model)
    for tier in tiers:
        nearer = next((one.offload for one in found if one.plan and _moves_all(one.offload)), None)
        if nearer is not None and _moves_all(tier):
            found.append(Fit(tier, refused=f"not tried: as much is on the device with {nearer}, which fits"))
            told(found[-1])
            continue
        vain = limits_in_vain(options_of({**options, "offload": tier}))
        of_tier = {name: value for name, value in options.items() if name not in vain}
        found.append(_Tier(calls, machine, tier, of_tier).largest(smallest, most))
        told(found[-1])
    return found


def _moves_all(tier: str | Mapping[str, str]) -> bool:
    """Whether all parameters leave the device."""
    return isinstance(tier, str) and offload_of(tier).moves_parameters


@dataclass(frozen=True)
class _Tier:
    """Plans of one tier: ``calls``: model and call of a batch."""

    calls: Model
    cluster: Cluster
    offload: str | Mapping[str, str]
    options: Mapping[str, Any]

    def largest(self, smallest: int, most: int) -> Fit:
        """The largest batch that is the smallest, doubled some times; the smallest also in micro-batches."""
        try:
            batch = begin = smallest * max(1, self._times(smallest, most / smallest))
            best = None
            while batch > smallest and best is None:
                best, batch = self._at_once(batch), batch // 2
            best = best or Fit(self.offload, self._planned(smallest), smallest)
        except (InfeasibleError, SearchError, ClusterError) as error:
            needed = getattr(error, "needed_bytes", None)
            return Fit(self.offload, refused=f"needs {bytes_str(needed)} a device" if needed else
                       str(error).split(". ", maxsplit=1)[0])
        while best.batch >= begin and 2 * best.batch <= most and (more := self._at_once(2 * best.batch)) is not None:
            best = more
        return best

    def _at_once(self, batch: int) -> Fit | None:
        """With the whole batch at a time, unless the options say how many micro-batches; None: that does not fit."""
        if not self._times(batch, 1):
            return None
        try:
            return Fit(self.offload, self._planned(batch, **{"micro_batches": 1, **self.options}), batch)
        except (InfeasibleError, SearchError):
            return None

    def _times(self, batch: int, most: float) -> int:
        """`times_that_may_fit` of a batch, of all its samples at a time."""
        network, args, kwargs = self._call(batch)
        chosen = options_of({"micro_batches": 1, **self.options, "offload": self.offload})
        return times_that_may_fit(capture(network, args, kwargs), self.cluster, chosen, most)

    def _planned(self, batch: int, **more: Any) -> Plan:
        network, args, kwargs = self._call(batch)
        return plan(network, self.cluster, example_inputs=args, example_kwargs=kwargs, joint=True,
                    **{**self.options, "offload": self.offload, **more})

    def _call(self, batch: int) -> tuple[Any, Any, Any]:
        made = self.calls(batch)
        if not isinstance(made, tuple) or len(made) != 3:
            raise PlanError(f"the model for a batch of {batch} is {shown(made)}: return {MODEL_AND_CALL}")
        check_call(*made)
        check_groups(Options(offload=self.offload, buckets=self.options.get("buckets")), made[0])
        return made


def _check(model: Any, tiers: Any, devices: Any, smallest: Any, most: Any, told: Any) -> None:
    if not callable(model) or isinstance(model, type | nn.Module):
        raise PlanError(f"model is {shown(model)}: give a function of a global batch, which returns {MODEL_AND_CALL}")
    if isinstance(tiers, str) or not isinstance(tiers, Sequence) or not tiers or not all(
            isinstance(tier, Mapping) or tier in PLACES for tier in tiers):
        raise PlanError(f"tiers is {shown(tiers)}: give some of {list(PLACES)}, or mappings to them from patterns of "
                        "parameters' names")
    for name, value in (("devices", devices), ("smallest", smallest), ("most", most)):
        if (value is None and name != "most") or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
            continue
        raise PlanError(f"{name} is {shown(value)}: give a whole number, 1 or more")
    if not callable(told):
        raise PlanError(f"told is {shown(told)}: give a function")


def tier_text(tier: str | Mapping[str, str]) -> str:
    """
    >>> tier_text("host"), tier_text({"embed*": "disk", "*": "host"})
    ('host', 'embed*=disk,*=host')
    """
    return tier if isinstance(tier, str) else ",".join(f"{pattern}={place}" for pattern, place in tier.items())


def _words(place: str | Mapping[str, str]) -> str:
    """
    >>> _words("host/host/disk")
    'parameters and gradients on the host and optimizer states on disk'
    """
    return offload_of(place).told("on the host", between=" and ") or "all on the device"


def _told(one: Fit) -> str:
    """The tensors that leave the device, those saved for backward included."""
    words, saved = _words(one.offload), "device" if one.plan is None else one.plan.hybrid.saved_on
    joined = "but for" if words.startswith("all") else "and"
    return words if saved == "device" else f"{words}, {joined} saved tensors of blocks on the {saved}"


def print_fitting(found: Fitting, console: ReportConsole) -> None:
    """Print the answer in one sentence, then a row for each tier."""
    devices, first = found.cluster.num_devices, next(iter(found.fits), None)
    where = f"{devices} device{'s' * (devices != 1)} of {found.cluster.name}"
    if first is None:
        console.print(f"It does not fit on {where}, in any tier that was tried.")
    else:
        most = max(found.fits, key=lambda one: one.batch)
        console.print(f"It fits on {where} with {_told(first)}; of the batches "
                      "tried, each twice the one before, the largest that fits at a time (autoparallel plan runs "
                      f"larger ones in micro-batches) is {most.batch}, with {_told(most)}.")
    table = Table("offload", "batch", "step", "per second", "device", "host", "disk", "plan", box=None, pad_edge=False)
    for one in found.tiers:
        if one.plan is None:
            table.add_row(tier_text(one.offload), "-", "-", "-", "-", "-", "-", one.refused)
            continue
        p, record = one.plan.prediction, one.plan.known
        count = record.workload.count if record is not None else 0
        table.add_row(tier_text(one.offload), str(one.batch), seconds_str(p.step_s),
                      count_str(count / p.step_s) if count else "-",
                      *(bytes_str(size) if size else "-" for size in (p.peak_bytes, p.host_bytes, p.disk_bytes)),
                      one.plan.summary().split("\n", 1)[0].rstrip("."))
    console.print(table)


__all__ = ["Fit", "Fitting", "fit", "print_fitting", "tier_text"]
