"""Plans that people write for Megatron, DeepSpeed or torchtitan: degrees of parallelism, as roles of mesh axes.

    ByHand.of("dp=8,tp=8,pp=4,zero=1,virtual=2,micro_batch=1,recompute=selective,sequence_parallel")

    | key               | meaning                                                       | without it                 |
    |-------------------|---------------------------------------------------------------|----------------------------|
    | dp                | data-parallel ranks                                           | the devices that are left  |
    | tp                | tensor-parallel ranks: heads, MLP columns and rows, vocabulary | 1                         |
    | pp                | pipeline ranks                                                | 1                          |
    | split             | where pp cuts: work (between equal shares of the work),       | work                       |
    |                   | blocks (counts of blocks as equal as can be, the larger       |                            |
    |                   | first), ends (as blocks; the embedding and the head count as  |                            |
    |                   | a block each)                                                 |                            |
    | cp                | ranks that share each sequence                                | 1                          |
    | ep                | expert-parallel ranks, among those of dp; beside them those   | 1                          |
    |                   | of tp have whole experts (Megatron's expert tensor parallel   |                            |
    |                   | size of 1), each for other tokens                             |                            |
    | zero              | 0 to 3; 3 is FSDP                                             | 0                          |
    | shards            | data-parallel ranks among which zero shards (HSDP: one host)  | dp                         |
    | schedule          | gpipe, 1f1b, interleaved, zero_bubble                         | 1f1b; with virtual,        |
    |                   |                                                               | interleaved                |
    | virtual           | stages of each pipeline rank                                  | 1                          |
    | micro_batch       | sequences of a micro-batch on each data-parallel rank         | the batch in one; with pp  |
    |                   |                                                               | 1                          |
    | copies            | micro-batches that run at a time (multi-copy)                 | 1                          |
    | pieces            | of layers whose operand or result is sent; one travels while  | 1                          |
    |                   | the next is computed                                          |                            |
    | recompute         | none, selective, all_but_attention, full, offload; auto: of   | none                       |
    |                   | whole blocks, as few as memory requires                       |                            |
    | saved_on          | where what recompute=selective or offload saves of blocks     | device; of offload host    |
    |                   | waits for backward: host or disk                              |                            |
    | offload           | host (states and gradients), parameters (these too), disk,    | none                       |
    |                   | host/host/disk (parameters, gradients, states), ...           |                            |
    | sequence_parallel | norms and residuals are cut along the sequence over tp        | no                         |

Ranks are laid out as Megatron does: tensor innermost, then context, expert, data, pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from autoparallel.errors import PlanError, shown
from autoparallel.plans import Hybrid
from autoparallel.plans.roles import AxisRole, Roles
from autoparallel.schedule.schedules import SCHEDULES, usual
from autoparallel.schedule.step_config import KEEPS, RECOMPUTE
from autoparallel.schedule.tiers import PLACES, TIERS, offload_of

_COUNTS = ("dp", "tp", "pp", "cp", "ep", "shards", "virtual", "micro_batch", "copies", "pieces")
SPLITS = ("work", "blocks", "ends")
#: Recompute of whole blocks, as few as memory requires.
AUTO = "auto"
EXAMPLE = '"dp=8,tp=8,pp=4,zero=1,micro_batch=1,recompute=selective,sequence_parallel"'


@dataclass(frozen=True)
class ByHand:
    """The degrees and settings of a plan by hand; see the table above. Raises PlanError for what cannot go together."""

    dp: int | None = None
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    shards: int | None = None
    schedule: str | None = None
    split: str = "work"
    virtual: int = 1
    micro_batch: int | None = None
    copies: int = 1
    pieces: int = 1
    recompute: str = "none"
    saved_on: str = "device"
    offload: str = "none"
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise PlanError(f"by_hand: {name} is {shown(value)}: give a whole number, 1 or more")
        if isinstance(self.zero, bool) or not isinstance(self.zero, int) or self.zero not in (0, 1, 2, 3):
            raise PlanError(f"by_hand: zero is {shown(self.zero)}: give 0, 1, 2 or 3")
        if not isinstance(self.sequence_parallel, bool):
            raise PlanError(f"by_hand: sequence_parallel is {shown(self.sequence_parallel)}: write it alone, or give "
                            "true or false")
        if self.recompute not in (*RECOMPUTE, AUTO):
            raise PlanError(f"by_hand: recompute is {shown(self.recompute)}; there are {[*RECOMPUTE, AUTO]}")
        if self.saved_on not in TIERS or (self.saved_on != "device" and self.recompute not in KEEPS):
            raise PlanError(f"by_hand: saved_on is {shown(self.saved_on)} and recompute {self.recompute}: give one of "
                            f"{list(TIERS)}, with recompute={' or '.join(KEEPS)}, which save tensors of blocks")
        if self.offload not in PLACES:
            raise PlanError(f"by_hand: offload is {shown(self.offload)}; there are {list(PLACES)}")
        if self.schedule not in (None, *SCHEDULES):
            raise PlanError(f"by_hand: schedule is {shown(self.schedule)}; there are {list(SCHEDULES)}")
        if self.split not in SPLITS:
            raise PlanError(f"by_hand: split is {shown(self.split)}; there are {list(SPLITS)}")
        if self.split != "work" and self.pp == 1:
            raise PlanError(f"by_hand: split={self.split} is of a pipeline: give pp of 2 or more, or leave it out")
        if self.schedule is not None and self.pp == 1:
            raise PlanError(f"by_hand: schedule={self.schedule} is of a pipeline: give pp of 2 or more, or leave it "
                            "out")
        if self.virtual > 1 and self.pp == 1:
            raise PlanError(f"by_hand: virtual={self.virtual} stages of each pipeline rank need pp of 2 or more")
        if self.sequence_parallel and self.tp == 1:
            raise PlanError("by_hand: sequence_parallel cuts over the tensor-parallel ranks: give tp of 2 or more, or "
                            "cp for ranks that share each sequence")
        if self.shards is not None and (not self.zero or self.ep > 1 or (self.dp or self.shards) % self.shards):
            raise PlanError(f"by_hand: shards={self.shards} are the ranks of dp={self.dp} among which zero={self.zero} "
                            "shards: dp must be a multiple, zero 1 to 3, and ep 1")
        if self.ep > 1 and self.dp is not None and self.dp % self.ep:
            raise PlanError(f"by_hand: ep={self.ep} ranks are taken from those of dp={self.dp}: dp must be a multiple "
                            "of ep")

    @staticmethod
    def of(given: str | Mapping[str, Any] | ByHand) -> ByHand:
        """From text, a mapping or a ready one.

        >>> ByHand.of("dp=2,tp=4,sequence_parallel").tp, ByHand.of({"pp": 2, "micro_batch": 1}).pp
        (4, 2)

        Raises PlanError for unknown keys and values.
        """
        if isinstance(given, ByHand):
            return given
        if not isinstance(given, (str, Mapping)) or (isinstance(given, str) and not given.strip(" ,")):
            raise PlanError(f"by_hand is {shown(given)}: give text such as {EXAMPLE}, or a mapping with these keys")
        values = dict(given) if isinstance(given, Mapping) else _parsed(given)
        away = values.get("offload")
        if isinstance(away, Mapping) or "=" in str(away) or any("*" in str(key) or "." in str(key) for key in values):
            raise PlanError("by_hand has one offload for all parameters: give tiers by their names as the option "
                            "beside it, offload={'embed*': 'disk', '*': 'host'}, --offload 'embed*=disk,*=host'")
        known = [field.name for field in fields(ByHand)]
        if unknown := sorted(set(map(str, values)) - set(known)):
            raise PlanError(f"by_hand: unknown key {unknown[0]!r}; there are {', '.join(known)}")
        if (values.get("recompute"), values.get("saved_on")) == ("offload", "device"):
            raise PlanError("by_hand: saved_on is 'device' and recompute offload, which keeps nothing there: give host "
                            "or disk, or leave saved_on out")
        return ByHand(**values)

    def on(self, num_devices: int) -> ByHand:
        """This plan for so many devices, with dp = devices / (tp x pp x cp) if it was left out. Raises PlanError unless
        dp x tp x pp x cp = ``num_devices``."""
        others = self.tp * self.pp * self.cp
        dp = self.dp if self.dp is not None else max(1, num_devices // others)
        if dp * others != num_devices:
            raise PlanError(f"by_hand: dp x tp x pp x cp = {dp} x {self.tp} x {self.pp} x {self.cp} = {dp * others}, "
                            f"and the cluster has {num_devices} devices: the product must be that")
        return ByHand(**{**vars(self), "dp": dp})

    @property
    def needs_batch(self) -> bool:
        """Whether the batch is divided, over ranks or into micro-batches."""
        return (self.dp or 1) > 1 or self.pp > 1 or self.micro_batch is not None

    @property
    def mesh(self) -> tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]:
        """Sizes, names and roles (`planning.baselines.ROLES`) of the axes of a stage's mesh, without axes of size 1."""
        shards = self.shards or 1
        data = "shard" if self.zero and self.shards is None and (self.dp or 1) > 1 else "data"
        tensor = "sequence" if self.sequence_parallel else "tensor"
        axes = [((self.dp or 1) // self.ep // shards, "dp", data), (shards, "shard", "shard"),
                (self.ep, "ep", "expert shard" if self.zero else "expert"),
                (self.cp, "cp", "context shard" if self.zero else "context"),
                (self.tp, "tp", tensor)]
        sizes, names, roles = zip(*([axis for axis in axes if axis[0] > 1] or axes[:1]), strict=True)
        return sizes, names, roles

    @property
    def family(self) -> str:
        """The kind of plan (`Roles.family`)."""
        sizes, names, roles = self.mesh
        axes = tuple(AxisRole(name, size, role.split()[0].replace("sequence", "tensor").replace("shard", "data"))
                     for size, name, role in zip(sizes, names, roles, strict=True))
        return Roles(axes, 0 if self.dp == 1 else self.zero, self.pp).family

    def hybrid(self, batch: int) -> Hybrid:
        """The step configuration (pipeline, micro-batches, schedule, ZeRO, recompute; none where that is "auto") for a
        global ``batch`` of so many sequences. Raises PlanError unless dp x micro_batch divides it."""
        ranks = self.dp or 1
        each = self.micro_batch or (1 if self.pp > 1 else max(1, batch // ranks))
        if batch % ranks:
            raise PlanError(f"by_hand: a batch of {batch} is not divided by dp={ranks}: give a batch of a multiple of "
                            f"{ranks}, or another dp")
        if batch % (ranks * each):
            raise PlanError(f"by_hand: a batch of {batch} is not divided by dp x micro_batch = {ranks} x {each}: give "
                            f"a batch of a multiple of {ranks * each}, or another micro_batch")
        schedule = self.schedule or usual(self.virtual)
        return Hybrid(batch // (ranks * each), self.pp * self.virtual if self.pp > 1 else 1, self.pp, schedule,
                      zero_stage=self.zero, recompute="none" if self.recompute == AUTO else self.recompute,
                      copies=self.copies, pieces=self.pieces, offload=offload_of(self.offload),
                      saved_on=self.saved_on)

    def __str__(self) -> str:
        said = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)
                if f.type != "bool" and getattr(self, f.name) != f.default]
        return ",".join([*said, *(["sequence_parallel"] if self.sequence_parallel else [])]) or "dp=1"


def _parsed(text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key in values:
            raise PlanError(f"by_hand: {key} is given twice")
        if not equals:
            if key != "sequence_parallel":
                raise PlanError(f"by_hand: {part!r} has no value: write {key}=..., as in {EXAMPLE}")
            values[key] = True
        elif re.fullmatch(r"-?[0-9]+", value):
            values[key] = int(value)
        else:
            values[key] = {"true": True, "false": False}.get(value.lower(), value)
    return values
