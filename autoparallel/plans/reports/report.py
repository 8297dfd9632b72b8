"""`Report`: all that text, JSON and pages say of a plan, computed once.

    MFU = model FLOPs of a step / (step seconds x devices x peak FLOP/s of a device)
    HFU = the same of the FLOPs that devices run, with recompute and repeated work

Model FLOPs are those of matrix products, convolutions and attention: forward once, backward at twice that; causal
attention at the half that it computes (`plans.record.Workload`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autoparallel.plans.plan import Combinations
from autoparallel.plans.record import Record
from autoparallel.plans.reports.blocks import BlockRows
from autoparallel.plans.reports.words import AxisWords

#: The ends of a search (`autoparallel.search.Solution.stop_reason`, `planning.one_mesh`) in plain words.
REASONS = {"optimal": "ended with a proof", "gap": "ended within the gap", "time limit": "ended by the time limit",
           "made to fit": "the sharding of the model of fewer blocks, made to fit",
           "faster with overlap": "a second search, which counts overlap, found a faster one",
           "interrupted": "interrupted: the best so far"}
#: The part of a step that takes back launches which cost nothing, in the glossary too.
LAUNCHED = "less launches ahead of the device"
#: Of tables on the host.
LOOKED_UP, CROSSED = "lookups on the host", "their ids, results, gradients, missed rows between host and device"
PURPOSES = ("parameters", "gradients", "activations")


@dataclass(frozen=True)
class Speed:
    """The predicted seconds of a step, ``step_s``, with error bars, rates and costs.

    ``p50``, ``p90``: half, and nine in ten, of the predictions that were compared with measured steps (``basis`` says
    which) were off by no more than this share of the measured step, above or below it. ``p90_least_s``, ``p90_s``: the
    measured step lies between these seconds if this one is off by no more than ``p90`` (inf: no end is known).
    ``unit``: of the rates ``per_s`` and ``per_device_per_s``, such as tokens. ``mfu``, ``hfu``: shares of the peak
    FLOP/s. None: not known.
    """

    step_s: float
    p50: float
    p90: float
    p90_s: float
    basis: str
    p90_least_s: float = 0.0
    unit: str | None = None
    per_device_per_s: float | None = None
    per_s: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    price_per_step: float | None = None
    price_per_1e12: float | None = None
    joules_per_step: float | None = None
    joules_per_unit: float | None = None

    def not_told_apart(self, steps_s: Iterable[float]) -> list[float]:
        """Those of other plans' steps that differ from this plan's by no more than the typical error, fastest first."""
        return sorted(step_s for step_s in steps_s
                      if max(step_s, self.step_s) <= (1 + self.p50) * min(step_s, self.step_s))


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank. ``limit_bytes``: what tensors may take (0: no limit). ``kinds``: at the peak.
    ``fullest``: the place of the peak. ``device_bytes``: of the device (0: not known). ``stepped_bytes``: at the peak,
    if ``step_in_backward`` let gradients go (0: it does not apply, or that is not known)."""

    peak_bytes: float
    limit_bytes: float
    state_bytes: float
    activation_bytes: float
    host_bytes: float
    disk_bytes: float
    kinds: tuple[tuple[str, float], ...] = ()
    fullest: str = ""
    device_bytes: float = 0.0
    stepped_bytes: float = 0.0

    @property
    def margin_bytes(self) -> float:
        return self.limit_bytes - self.peak_bytes


@dataclass(frozen=True)
class Time:
    """A part of the step, in seconds; the parts add up to the step, but for overlapped communication, which runs
    overlapped with compute (``beside``)."""

    part: str
    seconds: float
    beside: bool = False


@dataclass(frozen=True)
class Collectives:
    """Collectives of one purpose, kind, axis and direction in a step of one rank, in the mean over a pipeline's."""

    purpose: str
    kind: str
    axis: str
    direction: str
    count: int
    num_bytes: float
    seconds: float


@dataclass(frozen=True)
class Proof:
    """How good the plan is known to be. ``searched``: a search made it, rather than a person or a rule.
    ``within``: its additive cost is at most so much above that of the best sharding, as a share (None: nothing was
    proven). ``within_any``: its step above any combination (None: no joint search). ``reason``: why the search
    ended. ``combinations``: how a joint search dealt with them. ``in_tiers``: these have training state in the tiers of
    the plan, outside of the devices; other tiers are not proven slower."""

    searched: bool
    solver: str
    objective_s: float
    lower_bound_s: float
    reason: str
    within: float | None
    within_any: float | None
    step_bound_s: float | None
    phases: tuple[tuple[str, float], ...]
    combinations: Combinations | None = None
    in_tiers: bool = False

    @property
    def said(self) -> str:
        """The reason for the end of the search in plain words."""
        return "; ".join(REASONS.get(part, part) for part in self.reason.split("; "))


@dataclass(frozen=True)
class Answer:
    """What the first screen says to one question: ``label``, and sentences or the entries of a list."""

    label: str
    entries: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """A plan for people. ``summary``: three lines, and a fourth where other plans are known. ``first_screen``: the same
    by question. ``exposed_share``: communication that nothing hides, of the step.
    ``cuts``: the ops at which pipeline stages 1, 2, ... begin. ``recomputed``: the blocks that recompute, if not all.
    ``record``: what planning kept (None: an older plan file). ``family``: the kind of plan (`Roles.family`).
    ``by_rank``: micro-batches of each rank of the mesh's first axis (`Hybrid.by_rank`). ``interleaved``: parameters of
    which ranks store a shard of each section, ``*`` for numbers, and their layouts."""

    summary: tuple[str, ...]
    first_screen: tuple[Answer, ...]
    title: str
    cluster: str
    fingerprint: str
    axes: tuple[AxisWords, ...]
    departures: tuple[str, ...]
    speed: Speed
    memory: Memory
    times: tuple[Time, ...]
    exposed_share: float
    collectives: tuple[Collectives, ...]
    blocks: tuple[BlockRows, ...]
    proof: Proof
    pins: tuple[tuple[str, str], ...]
    cuts: tuple[str, ...]
    recomputed: tuple[str, ...]
    repeated_ops: tuple[str, ...]
    record: Record | None
    family: str = ""
    interleaved: tuple[tuple[str, str], ...] = ()
    by_rank: tuple[int, ...] = ()

    @property
    def collectives_s(self) -> tuple[tuple[str, float], ...]:
        """Seconds of all collectives of a step, of them those hidden under compute, and the rest, exposed as in
        ``times``."""
        hidden_s, exposed_s = (self.seconds_of(f"{what} communication") for what in ("hidden", "exposed"))
        return (("all", sum(use.seconds for use in self.collectives)), ("hidden", hidden_s),
                ("exposed", exposed_s)) if self.collectives else ()

    def seconds_of(self, part: str) -> float:
        """Seconds of the parts of the step with this name."""
        return sum(time.seconds for time in self.times if time.part == part)


__all__ = ["PURPOSES", "Answer", "Collectives", "Memory", "Proof", "Report", "Speed", "Time"]
