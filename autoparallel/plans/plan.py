"""`Plan`: the decisions, the evidence for them and the predicted cost; as JSON that people can read, edit and diff."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoparallel.errors import PlanError, shown
from autoparallel.plans.facts import ModelFacts
from autoparallel.plans.files import check_plan, data_of, nearest, packed, text_of
from autoparallel.plans.reading import read
from autoparallel.plans.record import Record
from autoparallel.schedule.step_config import Hybrid, first_axis_of
from cost_models.files import write_whole

if TYPE_CHECKING:
    from autoparallel.plans.answers import Choice, Sensitivity, Study
    from autoparallel.plans.reports.plots import Plots
    from autoparallel.strategies.space import Strategy, StrategySpace

VERSION = 2
Strategies = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Combinations:
    """How a joint search dealt with the combinations of pipeline, mesh, micro-batches, ZeRO and recompute: those
    ``estimated`` on the model of reduced depth (of these ``planned`` for the whole model; ``without_plan``: those for
    which no plan that fits was found), ``ruled_out`` by bounds of time or memory, ``left`` for lack of time."""

    estimated: int
    without_plan: int
    planned: int
    ruled_out: int
    left: int

    @property
    def total(self) -> int:
        return self.estimated + self.ruled_out + self.left

    def __str__(self) -> str:
        of = [f"{count:,} of them {what}" for count, what in (
            (self.planned, "planned in full"), (self.without_plan, "without a plan that fits")) if count]
        parts = [f"{self.estimated:,} estimated" + (f" ({', '.join(of)})" if of else ""),
                 f"{self.ruled_out:,} ruled out by bounds"]
        return ", ".join([*parts, f"{self.left:,} left for lack of time"] if self.left else parts)


@dataclass(frozen=True)
class Evidence:
    """The quality of the search's result: objective and lower bound, in seconds of the additive cost, and their gap.

    ``seconds``: planning time by phase. ``step_bound_s``: a lower bound of the step over all combinations that a joint
    search enumerated, and ``combinations`` (None: no joint search).
    """

    solver: str
    objective_s: float
    lower_bound_s: float
    gap: float
    stop_reason: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    step_bound_s: float | None = None
    combinations: Combinations | None = None


@dataclass(frozen=True)
class CollectiveUse:
    """The collectives of one kind, axis (or several: "data+model"), direction and purpose in a step: number, bytes per
    rank, predicted seconds; in a pipeline summed over the ranks of its axis (`Prediction.collectives_on_a_rank`).
    ``purpose``: what they move, "parameters", "gradients" (of parameters) or "activations" (and their gradients)."""

    kind: str
    axis: str
    direction: str
    count: int
    num_bytes: float
    seconds: float
    purpose: str = ""


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of one step by part, and bytes on the fullest rank by part.

    In a pipeline the parts are means over its ranks, and ``waiting_s`` is the time of filling, draining, sending and
    imbalance; without one, that in which ranks wait for one another's hosts. In both it includes the latency of
    communication in buckets that are not full, as far as it exceeds the time saved by overlap. ``recompute_s``: of
    ``forward_s``, what runs again in backward. ``hidden_s``: seconds saved by overlap; of these ``ahead_s`` since
    hosts launch kernels ahead, the rest since communication overlaps with compute. ``fixed_s``: of a step and of its
    micro-batches that no op takes (the framework's own). ``p50``, ``p90``: half, and nine in ten, of the predictions
    of the kind were off by no more than this share of the measured step, above or below it; ``basis``: which
    predictions (`cost_models.accuracy`). ``limit_bytes``: the memory limit of the search (0: none); on devices of
    unequal memory that of the smallest, and ``peak_bytes`` of a larger one count as its share of that.
    ``host_bytes``: of the host's memory for saved tensors (`Hybrid.saved_on`), optimizer states, gradients and
    parameters that live there, or for tiles of states on disk; ``disk_bytes``: of what is on disk.
    ``lookups_forward_s``, ``lookups_backward_s``: of ``forward_s`` and ``backward_s``, what the host does for tables
    in its memory; ``crossings_s``: of communication, their ids, results and gradients, and the rows that caches miss,
    on the link between host and device; ``uncached_s``: the same step without caches (0: there are none).
    ``repeated_ops``: ops without a rule, repeated on every rank.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    forward_communication_s: float
    backward_communication_s: float
    state_bytes: float
    activation_bytes: float
    peak_bytes: float
    collectives: tuple[CollectiveUse, ...] = ()
    repeated_ops: tuple[str, ...] = ()
    waiting_s: float = 0.0
    host_bytes: float = 0.0
    hidden_s: float = 0.0
    fixed_s: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    basis: str = ""
    limit_bytes: float = 0.0
    ahead_s: float = 0.0
    disk_bytes: float = 0.0
    recompute_s: float = 0.0
    lookups_forward_s: float = 0.0
    lookups_backward_s: float = 0.0
    crossings_s: float = 0.0
    uncached_s: float = 0.0

    def collectives_on_a_rank(self, pipeline_ranks: int) -> tuple[CollectiveUse, ...]:
        """The collectives of one rank, in the mean over those of the pipeline; numbers are rounded up."""
        return tuple(replace(use, count=-(-use.count // pipeline_ranks), num_bytes=use.num_bytes / pipeline_ranks,
                             seconds=use.seconds / pipeline_ranks) for use in self.collectives)

    @property
    def hidden_communication_s(self) -> float:
        """Seconds of communication that overlap with compute."""
        return min(self.hidden_s - self.ahead_s, self.forward_communication_s + self.backward_communication_s)

    @property
    def exposed_s(self) -> float:
        """Seconds of communication that overlap with nothing."""
        return self.forward_communication_s + self.backward_communication_s - self.hidden_communication_s

    @property
    def added_s(self) -> float:
        """The sum of all parts, without overlap. Without a pipeline, and less ``waiting_s``, the search's objective."""
        return (self.forward_s + self.backward_s + self.optimizer_s + self.forward_communication_s
                + self.backward_communication_s + self.waiting_s)

    @property
    def step_s(self) -> float:
        return self.added_s - self.hidden_s + self.fixed_s

    @property
    def nine_in_ten_s(self) -> tuple[float, float]:
        """The seconds between which the measured step lies if the prediction is off by no more than ``p90`` of it."""
        return self.step_s / (1 + self.p90), self.step_s / (1 - self.p90) if self.p90 < 1 else math.inf


@dataclass(frozen=True)
class BlockLayouts:
    """The strategies of equal blocks: the blocks' paths, and an (op, strategy, output layout) line per op. ``flops``:
    by line, of products, convolutions and attention, forward, of a micro-batch (of others 0; empty: not known)."""

    paths: tuple[str, ...]
    lines: tuple[tuple[str, str, str], ...]
    flops: tuple[float, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A strategy for every decision of one program on one mesh.

    Lowering needs ``strategies`` (by decision name, the name of an axis strategy for each mesh axis), ``hybrid`` (the
    step configuration; with a pipeline ``mesh_shape`` is the mesh of one stage) and ``direct`` (redistribution with the
    fewest steps instead of the cheapest, for baselines). The other fields explain the plan. ``fingerprint`` identifies
    the traced program, and ``model`` has facts of it for reports and exports. ``devices``: the cluster's device at each
    place of the whole mesh, row by row, where a pipeline takes unequal hosts in another order (empty: as they are);
    `autoparallel.init` makes such a mesh. A plan may be edited by hand: compiling checks it. ``record``: what reports
    tell beside the decisions. ``study`` answers questions, and ``recorder`` makes the record; plans read from files
    have neither.
    """

    fingerprint: str
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    strategies: Strategies
    cluster: str
    evidence: Evidence
    prediction: Prediction
    blocks: tuple[BlockLayouts, ...] = ()
    pins: Mapping[str, str] = field(default_factory=dict)
    direct: bool = False
    hybrid: Hybrid = field(default_factory=Hybrid)
    model: ModelFacts = field(default_factory=ModelFacts)
    devices: tuple[int, ...] = ()
    study: Study | None = field(default=None, compare=False, repr=False)
    version: int = VERSION
    record: Record | None = field(default=None, repr=False)
    recorder: Callable[[], Record] | None = field(default=None, compare=False, repr=False)

    @property
    def known(self) -> Record | None:
        """The record: the plan's own, or made now."""
        return self.record if self.record is not None or self.recorder is None else self.recorder()

    @property
    def axes(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Sizes and names of the axes of the whole mesh, the pipeline's (or that of ranks by speed) first."""
        ranks = self.hybrid.pipeline_ranks
        if ranks == 1:
            return self.mesh_shape, self.axis_names
        return (ranks, *self.mesh_shape), (first_axis_of(self.hybrid), *self.axis_names)

    def strategies_on(self, space: StrategySpace) -> list[Strategy]:
        """The plan's strategies, one for each decision of ``space``.

        Raises PlanError if the plan belongs to another program or mesh, or names a strategy that a decision lacks.
        """
        if self.mesh_shape != space.mesh_shape:
            raise PlanError(f"the plan is for a mesh of shape {self.mesh_shape}, this mesh has {space.mesh_shape}: "
                            "plan again for this mesh, or run on the plan's")
        if self.fingerprint != space.graph.fingerprint:
            found = self.model.departures(space.graph, self.hybrid.micro_batches == 1)
            raise PlanError(f"the plan belongs to another program (fingerprint {self.fingerprint}, this model with "
                            f"these inputs has {space.graph.fingerprint}): the same model, mode, shapes and dtypes are "
                            f"required{''.join(f'; {one}' for one in found)}\n  The first program must be the plan's: "
                            "give compile the example inputs that it was planned for (of inference: "
                            "autoparallel.inference_call); other calls may follow")
        if unknown := [name for name in self.strategies if name not in space.decision_named]:
            raise PlanError(f"the plan has a strategy for {nearest(unknown[0], space.decision_named)}, which the "
                            "program has not")
        return [self._strategy(space, index) for index in range(len(space))]

    def _strategy(self, space: StrategySpace, index: int) -> Strategy:
        decision, strategy_set = space.decisions[index], space.strategy_sets[index]
        names = self.strategies.get(decision.name)
        if names is None:
            raise PlanError(f"the plan says nothing about {decision.name!r}")
        try:
            strategy = tuple(strategy_set.axis_strategy_named(name) for name in names)
        except KeyError as error:
            known = [axis_strategy.name for axis_strategy in strategy_set.axis_strategies]
            raise PlanError(f"{decision.name!r} has no strategy {error.args[0]!r}; it has {known}") from None
        if strategy not in strategy_set.position:
            raise PlanError(
                f"{decision.name!r} cannot take {names} on a mesh of {space.mesh_shape}: a dim does not divide"
            )
        return strategy

    def summary(self) -> str:
        """A line each: what plan this is, in the field's words; how fast, and how full the memory; where the time goes,
        and how sure that is; why no other, if others are known."""
        from autoparallel.plans.reports.build import report_of

        return "\n".join(report_of(self).summary)

    def report(self, width: int = 100, details: bool = False) -> str:
        """The plan as text of ``width`` columns: the summary, mesh, step time by part, memory, collectives, what is cut
        by what in each block, bound and gap; with ``details`` every op and collective."""
        from autoparallel.plans.reports.text import text_report

        return text_report(self, width, details)

    def save_html(self, path: str | Path) -> None:
        """Write the report as one page that needs no network. Raises PlanError when the file cannot be written.

        Needs jinja2: ``pip install 'autoparallel[report]'``.
        """
        from autoparallel.plans.reports.page import page

        _write(path, page(self))

    def save_trace(self, path: str | Path) -> None:
        """Write the predicted step in Chrome's trace format, which Perfetto (ui.perfetto.dev) opens. Raises PlanError
        for a plan without a timeline, and when the file cannot be written."""
        from autoparallel.plans.reports.trace import trace_json

        _write(path, trace_json(self))

    @property
    def plot(self) -> Plots:
        """Figures for notebooks: ``plan.plot.timeline()``, ``.memory()``, ``.pareto()`` (matplotlib)."""
        from autoparallel.plans.reports.plots import Plots

        return Plots(self)

    def _repr_html_(self) -> str:
        """The summary, for notebooks."""
        from html import escape

        return "".join(f"<p>{escape(line)}</p>" for line in self.summary().split("\n"))

    def __getstate__(self) -> dict[str, Any]:
        """Pickles omit ``study`` and ``recorder``: the search does not travel to other processes."""
        return {**self.__dict__, "study": None, "recorder": None}

    def alternatives(self, k: int) -> list[Plan]:
        """The ``k`` best plans that differ in more than a few ops, cheapest first.

        Raises PlanError if ``k`` is below 1, or if the plan has no study (it was read from a file).
        """
        return self._study().alternatives(k)

    def explain(self, name: str) -> list[Choice]:
        """The cost of every strategy of an op, parameter or input, the chosen one first: with all other decisions
        unchanged, as a lower bound, and with all others searched again.

        Raises PlanError for an unknown name, or if the plan has no study (it was read from a file).
        """
        return self._study().explain(name)

    def sensitivity(self, factors: Sequence[float] = (0.5, 2.0)) -> list[Sensitivity]:
        """The step time of this plan, and of the best plan, with each link's bandwidth or the memory limit multiplied
        by each factor. Pipeline, mesh and micro-batches stay; `Sensitivity.none_found` marks searches without a result.

        Raises PlanError for factors that are not above 0, or if the plan has no study (it was read from a file).
        """
        return self._study().sensitivity(factors)

    def _study(self) -> Study:
        if self.study is None:
            raise PlanError("this plan was read from a file, comes from another rank or is a baseline, and has no "
                            "search behind it: call autoparallel.plan(...) and ask its plan")
        return self.study

    def diff(self, other: Plan) -> str:
        """What differs in ``other``, one line each (mesh and step configuration, then decisions), and the change of
        predicted step time and peak memory.

        Raises PlanError if ``other`` is not a plan.
        """
        if not isinstance(other, Plan):
            raise PlanError(f"diff of {other!r}: give a Plan, Plan.load(path) of a file")
        lines = [f"mesh: {self.mesh_shape} -> {other.mesh_shape}"] if self.mesh_shape != other.mesh_shape else []
        lines += [f"{f.name}: {mine} -> {theirs}" for f in fields(Hybrid)
                  if (mine := getattr(self.hybrid, f.name)) != (theirs := getattr(other.hybrid, f.name))]
        for name in {**self.strategies, **other.strategies}:
            mine, theirs = self.strategies.get(name), other.strategies.get(name)
            if mine != theirs:
                lines.append(f"{name}: {_names(mine)} -> {_names(theirs)}")
        head = (f"{len(lines)} differences; predicted step {self.prediction.step_s:.6g} s -> "
                f"{other.prediction.step_s:.6g} s, peak {self.prediction.peak_bytes:.4g} B -> "
                f"{other.prediction.peak_bytes:.4g} B")
        return "\n".join([head, *lines])

    def to_json(self) -> str:
        """The plan as JSON, which `from_json` reads."""
        data = asdict(replace(self, study=None, recorder=None, record=None))
        del data["study"], data["recorder"], data["record"]
        text = json.dumps(data, indent=1)
        if (record := self.known) is None:
            return text
        compact = json.dumps(asdict(record), separators=(",", ":"))  # thousands of numbers, which nobody edits
        return f'{text[:-2]},\n "record": {compact}\n}}'

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, compressed by gzip if the name ends in ".gz". Raises PlanError when the file cannot
        be written; one that was there stays then."""
        text = self.to_json()
        _write(path, packed(text.encode()) if str(path).endswith(".gz") else text)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan written by `save`, checked as a whole.

        Raises PlanError when it is not one, of another format version, or no regular file.
        """
        return Plan.from_json(text_of(path), str(path))

    @staticmethod
    def from_json(text: str, origin: str = "plan") -> Plan:
        """Parse the result of `to_json`; ``origin`` names it in errors. Raises PlanError."""
        if not isinstance(text, (str, bytes)):
            raise PlanError(f"{origin} is {shown(text)}: give JSON as text, or Plan.load(path) of a file")
        data = data_of(text, origin)
        version = data.get("version") if isinstance(data, dict) else None
        if version is None:
            raise PlanError(f"{origin} is no plan of autoparallel: it says no version. Give a file that plan.save or "
                            "autoparallel plan --output has written")
        if version != VERSION:
            raise PlanError(f"{origin} has plan format version {version!r}, this autoparallel reads {VERSION}: "
                            "plan again")
        try:
            plan: Plan = read(Plan, data)
            check_plan(plan)
        except PlanError as error:
            raise PlanError(f"{origin} is not a plan of format {VERSION}: {error}") from error
        return plan


def _write(path: str | Path, text: str | bytes) -> None:
    try:
        write_whole(path, text)
    except (OSError, TypeError, ValueError) as error:
        raise PlanError(f"cannot write the file {path}: {getattr(error, 'strerror', error)}") from error


def _names(names: tuple[str, ...] | None) -> str:
    return "nothing" if names is None else "·".join(names)
