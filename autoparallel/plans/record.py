"""What planning knew beside the decisions: the work of a step, its timeline, its memory, what else was tried.

Reports, pages and traces are made of this; lowering needs none of it. Plans that another version wrote have none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autoparallel.errors import PlanError
from autoparallel.plans.answers import Choice, Comparison, Sensitivity


@dataclass(frozen=True)
class Share:
    """What the devices of one rank of the pipeline axis are, on an unequal cluster, and what they get: their
    ``numbers`` in the cluster ("0-7"), what they are, how many blocks and ops their stages have, and the memory of the
    smallest of them."""

    numbers: str
    devices: str
    blocks: int
    ops: int
    memory_bytes: float


@dataclass(frozen=True)
class Workload:
    """What a step computes, and the devices that do it.

    ``unit``: what is counted, "tokens" (looked up in the table of tokens by a program with attention, an encoder's and
    a decoder's together; without such a table, of the largest integer input) or "samples" (dim 0 of the inputs),
    ``count`` of them in a step; ``tokens_of``: "encoder and decoder", where the table is read for both.
    ``model_flops``: of matrix products, convolutions and attention of all devices together, forward once and backward
    at twice that, as the model needs them (causal attention at the half that it computes).
    ``hardware_flops``: as the devices run them, with recompute and with work that several ranks repeat.
    ``peak_flops_per_s``: of one device, for ``dtype``, that of most of these FLOPs. ``price_per_hour`` and
    ``watts``: of one device; 0 is not known. ``links``: by mesh axis, the slowest link that its groups cross.
    ``host_devices``: devices joined by the innermost link. ``link_names``: the links that these devices need, innermost
    first. ``software``: the profile by whose speed ops are priced ("": none).
    ``described``: the cluster's description (TOML) where it has the name of a known one and other figures, else "".
    ``state_bytes``: of one element of most trained parameters, by what it is for ("parameter", "gradient", ...), before
    any sharding; empty where nothing is trained. ``shares``: by pipeline rank, where devices are unequal (there
    ``peak_flops_per_s``, price and power are means, and ``memory_bytes`` is the least).
    """

    unit: str
    count: float
    parameters: float
    model_flops: float
    hardware_flops: float
    dtype: str
    peak_flops_per_s: float
    devices: int
    device: str
    memory_bytes: float
    host_devices: int = 0
    price_per_hour: float = 0.0
    watts: float = 0.0
    links: Mapping[str, str] = field(default_factory=dict)
    link_names: tuple[str, ...] = ()
    state_bytes: Mapping[str, float] = field(default_factory=dict)
    software: str = ""
    tokens_of: str = ""
    shares: tuple[Share, ...] = ()
    described: str = ""


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one stage of a pipeline: forward and backward of a micro-batch, what is done once per step, and
    sending one micro-batch to the next stage. ``state_bytes`` stay for the step (parameters, gathered ones
    too, gradients, optimizer state, buffers), ``activation_bytes`` for each micro-batch in flight.
    ``forward_communication_s``, ``backward_communication_s``, ``once_communication_s``: of those seconds, exposed
    communication; ``recompute_s``: of backward, computing activations again."""

    forward_s: float
    backward_s: float
    once_s: float
    send_s: float
    state_bytes: float
    activation_bytes: float
    forward_communication_s: float = 0.0
    backward_communication_s: float = 0.0
    recompute_s: float = 0.0
    once_communication_s: float = 0.0


#: A task of a rank: name, stream, start and end in seconds, and the numbers of the tasks of other streams that it
#: waited for.
Span = tuple[str, str, float, float, tuple[int, ...]]


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes on the fullest rank by kind along a step, without time: forward, then backward. ``at[i]`` names the
    place, ``passed[i]`` is its share of forward (0 to 1) and of backward (1 to 2), ``num_bytes[i][k]`` are those of
    ``kinds[k]``. Between places shown, the fullest counts."""

    kinds: tuple[str, ...]
    at: tuple[str, ...]
    passed: tuple[float, ...]
    num_bytes: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Redistribution:
    """A tensor that one decision makes and another reads with another layout: ``how``, a step for each mesh axis
    changed, bytes of the larger local shard, and seconds of one execution forward and backward. ``block``: the first of
    the equal blocks in which it is read ("": outside blocks)."""

    block: str
    source: str
    target: str
    before: str
    after: str
    how: tuple[str, ...]
    num_bytes: float
    forward_s: float
    backward_s: float
    of_parameter: bool


@dataclass(frozen=True)
class Trial:
    """A combination that was planned in full (or, with ``estimated``, on the model of reduced depth): step seconds, and
    bytes of the fullest rank (0: not known). ``too_large``: planned in full, no plan that fits was found."""

    what: str
    step_s: float
    peak_bytes: float = 0.0
    estimated: bool = False
    too_large: bool = False


@dataclass(frozen=True)
class Alternative:
    """Another plan: its step time and memory, in what it differs, a line each, and its ``title`` in the field's words
    ("": that of the plan on the same mesh). ``by_hand``: the text of a usual plan by hand ("": the search found it).
    ``family``: `Roles.family`, of its structure. ``recompute``: of its blocks, as in `Hybrid`."""

    step_s: float
    peak_bytes: float
    differences: tuple[str, ...]
    title: str = ""
    by_hand: str = ""
    family: str = ""
    recompute: str = ""


#: Why usual plans by hand are not priced, apart from memory and the batch.
LATE, EXCLUDED = "not priced for lack of time", "excluded by the options given"
#: And by an estimate: where another plan of its kind was priced; where none was.
SLOWER, LARGER = "slower by an estimate than another of its kind", "too large by an estimate, unlike others of its kind"
FAR_SLOWER = "much slower by an estimate"


@dataclass(frozen=True)
class LeftOut:
    """A usual plan by hand, by its text, that was not priced, and ``why``. ``least_bytes``: of weights, gradients and
    optimizer states a device, at least, where these exceed the memory limit (0: they do not). ``family``: as of an
    `Alternative`."""

    by_hand: str
    why: str
    least_bytes: float = 0.0
    family: str = ""


@dataclass(frozen=True)
class Record:
    """What planning knew. ``spans``: the timeline of a rank, without a pipeline; ``stages``: seconds by stage, with
    one. ``redistributions``: of one block of each kind, and outside blocks. ``trials``: combinations that were tried.
    ``search``: (seconds since the start, phase, best, bound) after each phase. ``compute_s``: seconds of a step's
    matrix products ("matmul") and attention ("attention"), forward and backward, on a rank (the mean over a
    pipeline's). ``alternatives``: other plans that planning found, or that were asked for; ``left_out``: usual plans by
    hand that were not priced; ``comparisons``: with plans by hand, line by line. ``sensitivities`` and
    ``explanations`` (by name of the decision) are answers that were asked for. ``stage_parameters``: of each pipeline
    stage the names of its parameters, tied ones on each stage that reads them (empty: no pipeline)."""

    workload: Workload
    spans: tuple[Span, ...] = ()
    stages: tuple[StageSeconds, ...] = ()
    memory: MemoryProfile | None = None
    redistributions: tuple[Redistribution, ...] = ()
    trials: tuple[Trial, ...] = ()
    search: tuple[tuple[float, str, float, float], ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    sensitivities: tuple[Sensitivity, ...] = ()
    explanations: Mapping[str, tuple[Choice, ...]] = field(default_factory=dict)
    compute_s: Mapping[str, float] = field(default_factory=dict)
    comparisons: tuple[Comparison, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    stage_parameters: tuple[tuple[str, ...], ...] = ()


def check_record(record: Record) -> None:
    """Raises PlanError for times, bytes and counts that are no amounts, and tables whose rows differ in length."""
    for where, value in _amounts(record):
        if not 0 <= value < math.inf:
            raise PlanError(f"record.{where} is {value!r}: give an amount, 0 or more")
    if record.workload.devices < 1 or record.workload.peak_flops_per_s <= 0:
        raise PlanError("record.workload needs a device, and its peak_flops_per_s above 0")
    for number, (_, _, start_s, end_s, after) in enumerate(record.spans):
        if not 0 <= start_s <= end_s < math.inf or any(not 0 <= n < number for n in after):
            raise PlanError(f"record.spans[{number}] must start at 0 or later, end after that, and wait for earlier "
                            "ones")
    if (memory := record.memory) is not None:
        widths = {len(row) for row in memory.num_bytes} | {len(memory.kinds)}
        if len(widths) > 1 or not len(memory.at) == len(memory.passed) == len(memory.num_bytes):
            raise PlanError("record.memory needs a place, its share and bytes of each kind in every row")


def _amounts(record: Record) -> Iterator[tuple[str, float]]:
    parts = [("workload", record.workload), *((f"stages[{n}]", stage) for n, stage in enumerate(record.stages)),
             *((f"redistributions[{n}]", one) for n, one in enumerate(record.redistributions)),
             *((f"trials[{n}]", trial) for n, trial in enumerate(record.trials)),
             *((f"alternatives[{n}]", one) for n, one in enumerate(record.alternatives)),
             *((f"left_out[{n}]", one) for n, one in enumerate(record.left_out))]
    for where, part in parts:
        for name, value in vars(part).items():
            if isinstance(value, (int, float)):
                yield f"{where}.{name}", value
    yield from ((f"compute_s[{kind}]", value) for kind, value in record.compute_s.items())
    if record.memory is not None:
        for n, row in enumerate((record.memory.passed, *record.memory.num_bytes)):
            yield from ((f"memory row {n}", value) for value in row)
