"""`autoparallel.advise`: which of data, tensor, pipeline, ZeRO and recompute to use, and what each choice costs.

Plans as people write them are priced for every way to divide the devices; a technique is used if the fastest plan that
fits uses it, and its price is the difference from the fastest that does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import nn

from autoparallel import clock
from autoparallel.capture import OpGraph, capture, find_blocks
from autoparallel.errors import AutoparallelError, InfeasibleError, PlanError, shown
from autoparallel.export import FORMATS, Exported, export_plan
from autoparallel.garbage import collected_later
from autoparallel.partition import Splits
from autoparallel.partition.microbatch import batch_size
from autoparallel.planning.by_hand import ByHand
from autoparallel.planning.call_checks import check_call, check_cluster
from autoparallel.planning.options import Options, options_of
from autoparallel.planning.plan_by_hand import plan_by_hand
from autoparallel.planning.plan_graph import plan_graph
from autoparallel.planning.server_traffic import ServerAdvice, server_advice
from autoparallel.planning.tuned import tuned
from autoparallel.planning.usual import UsualPlans
from autoparallel.plans import Plan
from autoparallel.plans.reports.text import ReportConsole, as_text
from autoparallel.plans.reports.units import bytes_str, seconds_str
from autoparallel.plans.roles import roles_of
from autoparallel.search import Progress
from cost_models import Cluster

#: Counted seconds in which plans that fit are tuned.
TUNING_S = 10.0
Uses = Callable[[ByHand], bool]
#: Techniques, and whether a plan by hand uses them.
TECHNIQUES: Mapping[str, Uses] = {
    "data parallelism": lambda hand: (hand.dp or 1) > 1,
    "tensor parallelism": lambda hand: hand.tp > 1,
    "pipeline parallelism": lambda hand: hand.pp > 1,
    "context parallelism": lambda hand: hand.cp > 1,
    "expert parallelism": lambda hand: hand.ep > 1,
    "ZeRO 1: optimizer state in shards": lambda hand: hand.zero == 1,
    "ZeRO 3 (FSDP): parameters in shards": lambda hand: hand.zero == 3,
    "recompute of activations": lambda hand: hand.recompute != "none",
    "several micro-batches": lambda hand: hand.micro_batch is not None and hand.pp == 1,
}


@dataclass(frozen=True)
class Alternative:
    """A plan by hand and its price. ``fits``: whether its peak is within the memory limit. ``refused``: why there is
    none, if ``plan`` is None."""

    by_hand: ByHand
    plan: Plan | None
    fits: bool
    refused: str = ""

    @property
    def step_s(self) -> float:
        return self.plan.prediction.step_s if self.plan is not None else math.inf

    @property
    def peak_bytes(self) -> float:
        return self.plan.prediction.peak_bytes if self.plan is not None else math.inf


@dataclass(frozen=True)
class Technique:
    """``with_it`` and ``without``: the fastest alternatives that fit and use, or do not use, it (None: none fits)."""

    name: str
    used: bool
    with_it: Alternative | None
    without: Alternative | None


@dataclass(frozen=True)
class Change:
    """The fastest plan by hand on a cluster with twice as much of one thing: ``what`` is a link's bandwidth, by the
    link's name, or the device's memory (``best`` None: none fits)."""

    what: str
    best: Alternative | None


@dataclass(frozen=True)
class Advice:
    """``alternatives``: the plans by hand that were priced, on ``cluster`` with ``limit_bytes`` of memory a device;
    ``best``: the fastest of them that fits (None: none does). ``techniques``: the fastest plans with and without each;
    ``changes``: what more bandwidth or memory would make of the step. ``searched``: the plan of the joint search (None:
    not searched, or none found). ``exports``: by framework, the best plan's files, or why there are none. ``servers``:
    whether parameter servers would be faster (None: one device, a batch that workers cannot share, or no plan that
    fits)."""

    cluster: Cluster
    limit_bytes: float
    alternatives: tuple[Alternative, ...]
    techniques: tuple[Technique, ...]
    changes: tuple[Change, ...]
    searched: Plan | None
    exports: Mapping[str, Exported | str]
    servers: ServerAdvice | None = None

    @property
    def best(self) -> Alternative | None:
        """The fastest plan by hand that fits; None: none does."""
        return fastest(self.alternatives)

    def report(self, width: int = 100) -> str:
        """The advice as text of ``width`` columns."""
        return as_text(lambda console: print_advice(self, console), width)


def fastest(alternatives: Sequence[Alternative]) -> Alternative | None:
    """The fastest of those that fit."""
    return min((one for one in alternatives if one.fits), key=lambda one: one.step_s, default=None)


def advise(model: nn.Module, cluster: Cluster | str | Path, *, example_inputs: Sequence[Any] | None = None,
           example_kwargs: Mapping[str, Any] | None = None, memory_limit_bytes: float | None = None,
           optimizer: str = "adamw", search_s: float = 5.0, uneven: float = 0.0,
           progress: Callable[[str], object] | None = None) -> Advice:
    """Which techniques to use for one training step of ``model`` on ``cluster``, by the planner's prices.

    example_inputs, example_kwargs: the arguments of a call with the global batch, as for `autoparallel.plan`.
    memory_limit_bytes: per device; None: what a plan may take (see `autoparallel.plan`).
    optimizer: the optimizer whose state is counted in memory, for example "adamw" or "sgd".
    search_s: seconds of a joint search's work beside the plans by hand (as ``time_limit_s`` of `autoparallel.plan`); 0:
        none. With more it may find a faster plan.
    uneven: how much the devices' steps vary, by chance: standard deviation over mean, for parameter servers.
    progress: called with a line of text for each plan that was priced, and during the search.

    Raises CaptureError, InputError, ClusterError, PlanError as `autoparallel.plan` does.
    """
    cluster = check_cluster(cluster)
    check_call(model, example_inputs, example_kwargs)
    if isinstance(search_s, bool) or not isinstance(search_s, (int, float)) or not search_s >= 0:
        raise PlanError(f"search_s is {search_s!r}: give seconds, 0 or more")
    if isinstance(uneven, bool) or not isinstance(uneven, (int, float)) or not 0 <= uneven <= 1:
        raise PlanError(f"uneven is {uneven!r}: give the share by which steps vary, from 0 to 1")
    if progress is not None and not callable(progress):
        raise PlanError(f"progress is {shown(progress)}: give a function of a line of text, or None")
    says = progress or (lambda line: None)
    options = options_of({"optimizer": optimizer, "memory_limit_bytes": memory_limit_bytes})
    with collected_later():
        graph = capture(model, example_inputs or (), example_kwargs or {})
    limit = options.limit_bytes(cluster)
    priced = _Priced(Splits(graph), cluster, Options(optimizer=optimizer), limit, says)
    found = tuple(priced.all())
    found = (*found, *priced.tuned(found))
    found = (*found, *priced.with_recompute(found))
    searched = None
    if search_s:
        with suppress(InfeasibleError):
            searched = plan_graph(graph, cluster, None, None, True,
                                  replace(options, time_limit_s=search_s, progress=_told_by(says)))
    best = fastest(found)
    return Advice(cluster, limit, found, tuple(_techniques(found, best)), tuple(_changes(priced, found)), searched,
                  _exports(best.plan) if best is not None and best.plan is not None else {},
                  _servers(graph, cluster, found, searched, uneven))


def _told_by(says: Callable[[str], object]) -> Progress:
    def tell(phase: str, best_s: float, bound_s: float) -> None:
        says(f"joint search ({phase}): " + (f"best {seconds_str(best_s)}" if best_s < math.inf else "no plan yet"))

    return tell


@dataclass(frozen=True)
class _Priced:
    """Prices plans by hand of one program on one cluster."""

    split: Splits
    cluster: Cluster
    options: Options
    limit_bytes: float
    says: Callable[[str], object]

    def all(self) -> Iterator[Alternative]:
        """Every division of the devices, with ZeRO; with micro-batches, recompute or both where it does not fit
        without."""
        for hand in _divisions(self.split.graph, self.cluster):
            plain = self.of(hand)
            yield plain
            if plain.fits or plain.plan is None:
                continue
            if hand.pp == 1 and batch_size(self.split.graph) > (hand.dp or 1):
                parts = self.of(replace(hand, micro_batch=1))
                yield parts
                if parts.fits:
                    continue
            again = self.of(replace(hand, recompute="full"))
            yield again
            if not again.fits and hand.micro_batch is None and batch_size(self.split.graph) > (hand.dp or 1):
                yield self.of(replace(hand, micro_batch=1, recompute="full"))

    def tuned(self, found: Sequence[Alternative]) -> Iterator[Alternative]:
        """Plans that fit and are near the fastest, with larger micro-batches or less recompute where that is faster."""
        plans = {str(one.by_hand): one.plan for one in found if one.fits and one.plan is not None}
        with clock.counted(TUNING_S):
            better = tuned(UsualPlans(plans, (), self.limit_bytes), self.split, self.cluster, self.options,
                           clock.now() + TUNING_S)
        for text, made in better.priced.items():
            if text not in plans:
                self.says(f"{text}: {seconds_str(made.prediction.step_s)}")
                yield Alternative(ByHand.of(text), made, True)

    def with_recompute(self, found: Sequence[Alternative]) -> Iterator[Alternative]:
        """The best with recompute, unless it has it; also without its micro-batches, which recompute may replace."""
        best = fastest(found)
        if best is not None and best.by_hand.recompute == "none":
            yield self.of(replace(best.by_hand, recompute="full"))
            if best.by_hand.pp == 1 and best.by_hand.micro_batch is not None:
                yield self.of(replace(best.by_hand, recompute="full", micro_batch=None))

    def of(self, hand: ByHand) -> Alternative:
        try:
            made = plan_by_hand(self.split, self.cluster, replace(self.options, by_hand=hand), hand)
        except AutoparallelError as error:
            self.says(f"{hand}: none")
            return Alternative(hand, None, False, str(error))
        fits = made.prediction.peak_bytes <= self.limit_bytes
        self.says(f"{hand}: {seconds_str(made.prediction.step_s)}" + ("" if fits else ", does not fit"))
        return Alternative(hand, made, fits)


def _divisions(graph: OpGraph, cluster: Cluster) -> Iterator[ByHand]:
    """Tensor within a host, pipelines of at most as many ranks as layers, data (then context) with what is left."""
    count, batch = cluster.num_devices, batch_size(graph)
    host = min(count, cluster.devices_per_host)
    layers = max(1, len(find_blocks(graph)))
    sequences = any(len(node.outputs[0].shape) > 1 and not node.outputs[0].dtype.is_floating_point
                    for node in graph.of_kind("input"))
    experts = any("routed_experts" in node.op_name for node in graph.of_kind("op"))
    for tp in _powers(host):
        for pp in _powers(min(count // tp, layers)):
            left = count // tp // pp
            if count % (tp * pp):
                continue
            dp = math.gcd(left, batch)
            cp = left // dp
            if cp > 1 and (pp > 1 or not sequences):
                continue
            zeros = (0,) if dp * cp == 1 else (0, 1, 3) if tp == pp == cp == 1 else (1, 3) if pp == 1 else (1,)
            micro_batch = 1 if pp > 1 else None
            for zero in zeros:
                hand = ByHand(dp=dp, tp=tp, pp=pp, cp=cp, zero=zero, micro_batch=micro_batch,
                              sequence_parallel=tp > 1 and sequences)
                yield hand
                if experts and dp > 1 and zero == 1 and tp == 1:
                    yield replace(hand, ep=dp)


def _powers(most: int) -> list[int]:
    return [2**k for k in range(max(1, most).bit_length()) if 2**k <= most]


def _techniques(found: Sequence[Alternative], best: Alternative | None) -> Iterator[Technique]:
    for name, uses in TECHNIQUES.items():
        having = [one for one in found if uses(one.by_hand)]
        if having:
            without = [one for one in found if not uses(one.by_hand)]
            yield Technique(name, best is not None and uses(best.by_hand), fastest(having), fastest(without))


def _changes(priced: _Priced, found: Sequence[Alternative]) -> Iterator[Change]:
    """Twice each link's bandwidth, and twice the memory."""
    cluster = priced.cluster
    reached = 1
    for link in cluster.links:
        if reached < cluster.num_devices:
            other = replace(link, bandwidth_bytes_per_s=2 * link.bandwidth_bytes_per_s)
            machine = replace(cluster, links=tuple(other if one is link else one for one in cluster.links))
            yield Change(f"bandwidth of {link.name}", _fastest_on(replace(priced, cluster=machine), found))
        reached = link.num_devices
    doubled = [replace(one, fits=one.peak_bytes <= 2 * priced.limit_bytes) for one in found]
    yield Change("memory per device", fastest(doubled))


def _fastest_on(priced: _Priced, found: Sequence[Alternative]) -> Alternative | None:
    """The fastest on another cluster; those are left out whose work without communication takes longer."""
    best: Alternative | None = None
    for one in sorted((one for one in found if one.fits), key=lambda one: one.step_s):
        parts = one.plan.prediction if one.plan is not None else None
        if parts is None:
            continue
        work_s = parts.step_s - parts.forward_communication_s - parts.backward_communication_s - parts.waiting_s
        if best is None or work_s < best.step_s:
            again = priced.of(one.by_hand)
            best = again if best is None or again.step_s < best.step_s else best
    return best


def _servers(graph: OpGraph, cluster: Cluster, found: Sequence[Alternative], searched: Plan | None, uneven: float
             ) -> ServerAdvice | None:
    even = next((one.plan for one in found if str(one.by_hand) == f"dp={cluster.num_devices}"), None)
    best = fastest(found)
    step_s = min(best.step_s if best is not None else math.inf,
                 searched.prediction.step_s if searched is not None else math.inf)
    if even is None or step_s == math.inf:
        return None
    return server_advice(graph, cluster, even.prediction, step_s, uneven)


def _exports(made: Plan) -> dict[str, Exported | str]:
    found: dict[str, Exported | str] = {}
    for name in sorted(FORMATS):
        try:
            found[name] = export_plan(made, name)
        except PlanError as error:
            found[name] = str(error)
    return found


def print_advice(advice: Advice, console: ReportConsole) -> None:
    """Print the verdict, each technique's price, all alternatives, what would change, and the exports."""
    best = advice.best
    if best is None or best.plan is None:
        console.print(f"no plan by hand fits into {bytes_str(advice.limit_bytes)} per device of {advice.cluster.name}",
                      style="bold")
    else:
        p = best.plan.prediction
        console.print(f"on {advice.cluster.num_devices} devices of {advice.cluster.name}: {best.by_hand}", style="bold")
        console.print(f"a step takes {seconds_str(p.step_s)}, and {bytes_str(p.peak_bytes)} of "
                      f"{bytes_str(advice.limit_bytes)} per device; typical error of such predictions {p.p50:.0%}")
    if (searched := advice.searched) is not None:
        console.print(f"a searched plan takes {seconds_str(searched.prediction.step_s)} "
                      f"({roles_of(searched)}); autoparallel plan --joint finds it")
    console.print(_technique_table(advice))
    console.print(_alternative_table(advice))
    for change in advice.changes:
        told = "nothing fits" if change.best is None else _priced_str(change.best)
        same = best is not None and change.best is not None and change.best.by_hand == best.by_hand
        console.print(f"twice the {change.what}: {told}" + (" (the same plan)" if same else ""))
    if (servers := advice.servers) is not None:
        console.print(f"parameter servers {'pay' if servers.pays else 'do not pay'}: {servers.why}")
    for name, made in advice.exports.items():
        if isinstance(made, str):
            console.print(f"{name}: cannot. {made}")
        else:
            lost = f"; not expressed: {'; '.join(one.what for one in made.lost)}" if made.lost else ""
            console.print(f"{name}: {', '.join(made.files)}{lost}")


def _technique_table(advice: Advice) -> Table:
    table = Table(title="what to use: the fastest plans that fit with and without it", title_justify="left")
    for column in ("technique", "use", "with it", "without"):
        table.add_column(column)
    for one in advice.techniques:
        table.add_row(one.name, "yes" if one.used else "no", _priced_str(one.with_it), _priced_str(one.without))
    return table


def _priced_str(one: Alternative | None) -> str:
    return "none fits" if one is None else f"{seconds_str(one.step_s)} ({one.by_hand})"


def _alternative_table(advice: Advice) -> Table:
    table = Table(title="plans by hand, fastest first", title_justify="left")
    for column in ("plan", "step", "peak memory", "fits"):
        table.add_column(column)
    for one in sorted((one for one in advice.alternatives if one.plan is not None), key=lambda one: one.step_s):
        table.add_row(str(one.by_hand), seconds_str(one.step_s), bytes_str(one.peak_bytes), "yes" if one.fits else "no")
    return table


__all__ = ["Advice", "Alternative", "Change", "Technique", "advise"]
