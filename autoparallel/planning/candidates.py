"""Candidates of the joint search: combinations of pipeline, mesh, micro-batches, ZeRO stage and recompute."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from autoparallel.errors import PlanError
from autoparallel.planning.unequal_hosts import divisions
from autoparallel.plans import Hybrid
from autoparallel.schedule.fusion import BY_SIZE, Fusion
from autoparallel.schedule.schedules import SCHEDULES, usual
from autoparallel.schedule.step_config import BUCKET_BYTES, ranks_told
from autoparallel.schedule.table_caches import TableCache
from autoparallel.schedule.tiers import ON_DEVICE, Offload
from autoparallel.strategies.space import Strategy, StrategySpace
from cost_models import Cluster

#: Limits: pipeline ranks, inner mesh axis, micro-batches, rounds of micro-batches over a pipeline, stages per rank.
MOST_PIPELINE, MOST_INNER, MOST_TURNS, MOST_ROUNDS, MOST_CHUNKS = 64, 64, 64, 8, 4
#: Ranks of a stage of which every divisor is tried as the inner axis.
MOST_OF_ANY = 16
#: Rounds of micro-batches over a pipeline below which schedules that split backward are among the first candidates.
FEW = 2


@dataclass(frozen=True)
class Fixed:
    """The user's choices; None is searched. ``tier_limits``: bytes for each device of host memory and of disk."""

    micro_batches: int | None = None
    pipeline_stages: int | None = None
    schedule: str | None = None
    recompute: str | None = None
    zero_stage: int | None = None
    mesh_shape: tuple[int, ...] | None = None
    replicas: tuple[int, ...] = ()
    by_rank: tuple[int, ...] = ()
    reduce_dtype: str | None = None
    bucket_bytes: float = BUCKET_BYTES
    fusion: Fusion = BY_SIZE
    copies: int | None = None
    offload: Offload = ON_DEVICE
    on_host: tuple[str, ...] = ()
    cached: tuple[TableCache, ...] = ()
    pieces: int = 1
    saved_on: str = "device"
    tier_limits: tuple[float, float] = (math.inf, math.inf)

    def __str__(self) -> str:
        """The choices that leave combinations out, as options."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        for name in ("reduce_dtype", "bucket_bytes", "fusion", "on_host", "cached", "tier_limits",
                     *(["pipeline_stages"] if self.replicas else [])):
            given.pop(name, None)
        if "offload" in given:
            given["offload"] = self.offload.told()
        if "by_rank" in given:
            given["micro_batches"] = given.pop("by_rank")
        return ", ".join(f"{'stage_' * (name == 'replicas')}{name}={value!r}" for name, value in given.items())


#: The pipeline's ranks and the mesh of a stage.
Mesh = tuple[int, tuple[int, ...]]
#: The step configuration and the stage mesh.
Combination = tuple[Hybrid, tuple[int, ...]]
#: Makes the strategies with which a search on the whole model's strategy graph begins.
First = Callable[[StrategySpace], Sequence[Strategy]]


@dataclass(frozen=True)
class Candidate:
    """One combination of step configuration and stage mesh.

    ``estimate_s``: estimated seconds of a step, or a lower bound (inf: no plan that fits). ``first``: the strategies of
    the estimate's plan (None: there is none). ``room``: the share of the memory limit that the estimate was given;
    ``filled``: the share that the plan takes (1: not known).
    """

    hybrid: Hybrid
    mesh_shape: tuple[int, ...]
    estimate_s: float = math.inf
    first: First | None = field(default=None, compare=False, repr=False)
    room: float = 1.0
    filled: float = field(default=1.0, compare=False)

    @property
    def key(self) -> Combination:
        """The combination, without its estimate."""
        return self.hybrid, self.mesh_shape

    @property
    def mesh(self) -> Mesh:
        return self.hybrid.pipeline_ranks, self.mesh_shape

    def __str__(self) -> str:
        h, mesh = self.hybrid, "x".join(map(str, self.mesh_shape))
        pipeline = f"{h.stages} stages on pipeline {h.pipeline_ranks} ({h.schedule}), " if h.stages > 1 else ""
        at_a_time = f" ({h.copies} at a time)" if h.copies > 1 else ""
        of_each = f" ({ranks_told(h.by_rank)})" if h.by_rank else ""
        return (f"{pipeline}mesh {mesh}, micro-batches {h.micro_batches}{of_each}{at_a_time}, ZeRO {h.zero_stage}, "
                f"recompute {h.recompute}")

    @property
    def is_bound(self) -> bool:
        """Whether ``estimate_s`` is a lower bound, without a plan."""
        return self.first is None and self.estimate_s < math.inf


def divisors(n: int) -> list[int]:
    """In ascending order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


class CandidateSpace:
    """Enumerates the candidates for a program of ``num_blocks`` repeated blocks and ``batch`` samples on one cluster.

    ``fixed``: the user's choices, which all candidates have. ``paces``: by device, micro-batches that it runs in the
    same time as others; empty where all are as fast.
    """

    def __init__(self, cluster: Cluster, fixed: Fixed, num_blocks: int, batch: int, paces: Sequence[float] = ()
                 ) -> None:
        self.cluster, self.fixed, self.num_blocks, self.batch = cluster, fixed, num_blocks, batch
        self.paces, self.refused = paces, ""

    @property
    def recompute(self) -> list[str]:
        """The kinds of recompute; it is of blocks, so that a model without any has none."""
        if self.fixed.recompute:
            return [self.fixed.recompute]
        return ["none", "selective", "full"] if self.num_blocks else ["none"]

    def first_round(self) -> list[Candidate]:
        """The candidates that are considered first, for all pipelines and meshes."""
        return [
            *(Candidate(hybrid, shape)
              for ranks, shape in (self.shapes() if not self.fixed.by_rank else ())
              for micro_batches in self.micro_batches(ranks)
              for hybrid in self.hybrids(ranks, micro_batches)),
            *self._by_rank((1, 3)),
        ]

    def _by_rank(self, zero_stages: Iterable[int]) -> Iterator[Candidate]:
        """Candidates with micro-batches by rank: on an unequal cluster a first axis whose ranks differ in speed, and
        all meshes of a rank."""
        zeros = zero_stages if self.fixed.zero_stage is None else [self.fixed.zero_stage]
        for ranks, shape in self._shapes_by_rank():
            for by_rank, zero, again in itertools.product(self._divisions(ranks), zeros, self.recompute):
                for hybrid in self._valid(sum(by_rank), 1, ranks, usual(), zero, again, by_rank=by_rank):
                    yield Candidate(hybrid, shape)

    def _shapes_by_rank(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """All (ranks with their own micro-batches, mesh of a rank)."""
        count, fixed = self.cluster.num_devices, self.fixed
        asked = len(fixed.by_rank)
        if fixed.mesh_shape is not None:
            yield from [(fixed.mesh_shape[0], fixed.mesh_shape[1:] or (1,))] if asked else []
            return
        free = fixed.pipeline_stages in (None, 1) and fixed.schedule is None and not fixed.replicas
        for ranks in divisors(count):
            if ranks == asked or (not asked and free and self.paces and 1 < ranks <= MOST_PIPELINE):
                yield from ((ranks, shape) for shape in self._meshes_of(count // ranks))

    def _divisions(self, ranks: int) -> list[tuple[int, ...]]:
        """The numbers of micro-batches of each rank, by the speed of its slowest device."""
        if self.fixed.by_rank:
            return [self.fixed.by_rank]
        paces = np.array(self.paces).reshape(ranks, -1).min(axis=1).tolist()
        asked = self.fixed.micro_batches
        counts = [m for m in divisors(self.batch) if m <= max(MOST_TURNS, MOST_ROUNDS * ranks)]
        return divisions(counts if asked is None else [asked], paces)

    def shapes(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """All (pipeline ranks, mesh of a stage): pipelines of all lengths (of no more ranks than blocks, unless stages
        are fixed), stages of one or two axes, the inner axis of at most `MOST_INNER` ranks: with more than
        `MOST_OF_ANY` ranks of a stage a power of two, or a part of a host."""
        count, fixed = self.cluster.num_devices, self.fixed
        if fixed.mesh_shape is not None:
            whole = fixed.pipeline_stages in (None, 1)
            yield (1, fixed.mesh_shape) if whole else (fixed.mesh_shape[0], fixed.mesh_shape[1:] or (1,))
            return
        most = min(MOST_PIPELINE, max(1, self.num_blocks)) if fixed.pipeline_stages is None else count
        for ranks in divisors(count):
            if ranks > most or not self._pipeline_allowed(ranks):
                continue
            yield from ((ranks, shape) for shape in self._meshes_of(count // ranks))

    def _meshes_of(self, count: int) -> Iterator[tuple[int, ...]]:
        """The meshes of so many devices that are tried."""
        for inner in divisors(count):
            if inner == count > 1:  # the same mesh as with inner == 1
                continue
            usual_size = inner & (inner - 1) == 0 or self.cluster.devices_on_host % inner == 0
            if inner <= MOST_INNER and (count <= MOST_OF_ANY or usual_size):
                yield (count,) if inner == 1 else (count // inner, inner)

    def _pipeline_allowed(self, ranks: int) -> bool:
        stages = self.fixed.pipeline_stages
        if self.fixed.replicas:
            return ranks == sum(self.fixed.replicas)
        return stages is None or (stages % ranks == 0 and (ranks > 1) == (stages > 1))

    def micro_batches(self, ranks: int) -> list[int]:
        """Possible numbers of micro-batches (of an empty batch one); for a pipeline multiples of its ranks, if the
        batch has such divisors."""
        if self.fixed.micro_batches is not None:
            return [self.fixed.micro_batches]
        found = [m for m in divisors(self.batch) or [1] if m <= max(MOST_TURNS, MOST_ROUNDS * ranks)]
        if ranks == 1:
            return [m for m in found if m & (m - 1) == 0]
        if self.fixed.replicas:
            return [m for m in found if m % math.lcm(*self.fixed.replicas) == 0]
        return [m for m in found if m % ranks == 0] or [m for m in found if m >= ranks][:3] or found[-1:]

    def hybrids(self, ranks: int, micro_batches: int) -> Iterator[Hybrid]:
        """The first round's step configurations: 1F1B, and interleaved with several stages per rank (for long pipelines
        with few micro-batches per rank). With fewer micro-batches than `FEW` times the ranks also zero bubble, without
        recompute: it holds saved tensors for so long that recompute gains little. Parameters are gathered per step or
        per use."""
        fixed, schedules = self.fixed, self._schedules(ranks)
        zeros = [fixed.zero_stage] if fixed.zero_stage is not None else [2 if micro_batches == 1 else 1, 3]
        for (schedule, stages), recompute, zero in itertools.product(schedules, self.recompute, zeros):
            yield from self._valid(micro_batches, stages, ranks, schedule, zero, recompute)
        if fixed.schedule is None and ranks > 1 and micro_batches < FEW * ranks and "none" in self.recompute:
            for schedule in (how.name for how in SCHEDULES.values() if how.searched and how.splits_backward):
                yield from self._valid(micro_batches, schedules[-1][1], ranks, schedule, zeros[0], "none")

    def _valid(
        self, micro_batches: int, stages: int, ranks: int, schedule: str, zero: int, recompute: str, copies: int = 1,
        by_rank: tuple[int, ...] = (),
    ) -> Iterator[Hybrid]:
        """The step configuration, if it is valid; else nothing, and ``refused`` says why the first was not."""
        try:
            yield Hybrid(micro_batches, stages, ranks, schedule, zero_stage=zero, recompute=recompute,
                         reduce_dtype=self.fixed.reduce_dtype, replicas=self.fixed.replicas,
                         bucket_bytes=self.fixed.bucket_bytes, fusion=self.fixed.fusion, offload=self.fixed.offload,
                         copies=self.fixed.copies or copies, on_host=self.fixed.on_host, pieces=self.fixed.pieces,
                         saved_on=self.fixed.saved_on, cached=self.fixed.cached, by_rank=by_rank)
        except PlanError as error:
            self.refused = self.refused or str(error)

    def _schedules(self, ranks: int) -> list[tuple[str, int]]:
        """The first round's schedules and their numbers of stages."""
        fixed = self.fixed
        chunks = min(self._chunks(ranks), key=lambda c: (self.unevenness(c * ranks), -c))
        counts = [fixed.pipeline_stages] if fixed.pipeline_stages else sorted({ranks, chunks * ranks})
        if ranks == 1 or fixed.replicas:
            return [(fixed.schedule or usual(), fixed.pipeline_stages or 1)]
        return [(fixed.schedule or usual(n // ranks), n) for n in counts]

    def around(self, best: Candidate) -> Iterator[Candidate]:
        """Neighbours of a candidate that the first round leaves out: other schedules, ZeRO stages and recompute; and
        half or twice the micro-batches and the inner axis, with all possible numbers of stages per rank. Of one with
        micro-batches by rank the other ZeRO stage."""
        if best.hybrid.by_rank:
            yield from (c for c in self._by_rank((2,)) if c.mesh == best.mesh)
            return
        h, fixed, ranks = best.hybrid, self.fixed, best.hybrid.pipeline_ranks
        counts = [fixed.pipeline_stages] if fixed.pipeline_stages else [c * ranks for c in self._chunks(ranks)]
        for schedule, again, zero, count in itertools.product(
            [fixed.schedule] if fixed.schedule else [s.name for s in SCHEDULES.values() if s.searched], self.recompute,
            [fixed.zero_stage] if fixed.zero_stage is not None else [1, 2, 3], counts,
        ):
            if h.stages > 1 or schedule == h.schedule:
                for hybrid in self._valid(h.micro_batches, count, ranks, schedule, zero, again):
                    yield Candidate(hybrid, best.mesh_shape)
        for micro_batches, shape, again, count in itertools.product(
            _neighbours(h.micro_batches, self.micro_batches(ranks)),
            [shape for count, shape in self.shapes() if count == ranks and _near(shape, best.mesh_shape)],
            self.recompute, counts,
        ):
            schedule = fixed.schedule or usual(count // ranks)
            for hybrid in self._valid(micro_batches, count, ranks, schedule, h.zero_stage, again):
                yield Candidate(hybrid, shape)
        near = [shape for count, shape in self.shapes() if count == ranks and _near(shape, best.mesh_shape)]
        for micro_batches, shape in itertools.product(self._for_multi_copy(h), near):
            zero = fixed.zero_stage if fixed.zero_stage is not None else max(1, h.zero_stage)
            for hybrid in self._valid(micro_batches, 1, 1, h.schedule, zero, "none", copies=2):
                yield Candidate(hybrid, shape)
        for (micro_batches, copies), again in itertools.product(self._for_blocks(h), self.recompute):
            for hybrid in self._valid(micro_batches, 1, 1, h.schedule, 3, again, copies=copies):
                yield Candidate(hybrid, best.mesh_shape)

    def in_other_stages(self, candidate: Candidate) -> Iterator[Candidate]:
        """The same combination with other numbers of stages on each rank of its pipeline, and its strategies."""
        h, fixed = candidate.hybrid, self.fixed
        free = h.stages > 1 and not h.replicas and fixed.pipeline_stages is None and fixed.schedule is None
        for chunks in self._chunks(h.pipeline_ranks) if free else ():
            if chunks * h.pipeline_ranks != h.stages:
                for hybrid in self._valid(h.micro_batches, chunks * h.pipeline_ranks, h.pipeline_ranks, usual(chunks),
                                          h.zero_stage, h.recompute):
                    yield replace(candidate, hybrid=hybrid)

    def in_pairs(self, candidate: Candidate) -> Iterator[Candidate]:
        """The same combination of a pipeline with two micro-batches at a time on each stage (multi-copy): as many
        micro-batches, with its strategies, and twice as many."""
        h, ranks = candidate.hybrid, candidate.hybrid.pipeline_ranks
        free = h.stages > 1 and h.copies == 1 and self.fixed.copies is None
        for micro_batches in self.micro_batches(ranks) if free else ():
            if micro_batches in (h.micro_batches, 2 * h.micro_batches) and micro_batches >= 2 * ranks:
                first = candidate.first if micro_batches == h.micro_batches else None
                for hybrid in self._valid(micro_batches, h.stages, ranks, h.schedule, h.zero_stage, h.recompute,
                                          copies=2):
                    yield replace(candidate, hybrid=hybrid, first=first)

    def _for_multi_copy(self, h: Hybrid) -> list[int]:
        """Numbers of micro-batches, near those of a configuration, of which two can run at a time."""
        free = h.stages == 1 and self.fixed.copies is None and self.fixed.recompute in (None, "none")
        return [m for m in self.micro_batches(1) if m in (h.micro_batches, 2 * h.micro_batches)] if free else []

    def _for_blocks(self, h: Hybrid) -> list[tuple[int, int]]:
        """Numbers of micro-batches, near those of a ZeRO-3 configuration, with how many of them run block by block at a
        time: all, or two, which need less memory."""
        free = h.stages == 1 and h.zero_stage == 3 and self.fixed.copies is None
        near = {h.micro_batches, 2 * h.micro_batches} - {1} if free else ()
        return [(m, copies) for m in self.micro_batches(1) if m in near for copies in sorted({2, m}) if not m % copies]

    def _chunks(self, ranks: int) -> list[int]:
        """The possible numbers of stages per rank: up to one block a stage, and a last round of stages that fills only
        partly."""
        most = MOST_CHUNKS if ranks > 1 else 1
        return [1, *(c for c in range(2, most + 1) if (c - 1) * ranks < self.num_blocks)]

    def unevenness(self, stages: int) -> float:
        """How many times as many blocks the largest stage has as an equal share of them.

            >>> CandidateSpace(Cluster.load("local-cpu", num_devices=4), Fixed(), num_blocks=6, batch=8).unevenness(4)
            1.3333333333333333
        """
        return math.ceil(self.num_blocks / stages) * stages / self.num_blocks if self.num_blocks else 1.0


def _neighbours(count: int, counts: Sequence[int]) -> list[int]:
    """The neighbours of ``count`` in ``counts``, and itself."""
    place = counts.index(count) if count in counts else 0
    return list(counts[max(0, place - 1) : place + 2])


def _near(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether the inner axes are equal or differ by a factor of two."""
    inner, by = (s[-1] if len(s) > 1 else 1 for s in (shape, other))
    return max(inner, by) <= 2 * min(inner, by)
