"""Small random cases of the joint search, and all of their combinations planned in full."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

import autoparallel
from autoparallel.capture import OpGraph, capture
from autoparallel.errors import InfeasibleError, SearchError
from autoparallel.partition import Splits
from autoparallel.planning.candidates import Candidate, Fixed
from autoparallel.planning.joint_candidates import JointSearch
from autoparallel.planning.one_mesh import plan_on
from autoparallel.planning.options import Options
from autoparallel.planning.plan_graph import plan_graph
from cost_models import Cluster
from cost_models.unequal import OtherHosts, Slow


class _Block(nn.Module):
    def __init__(self, width: int, inner: int, normed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if normed else nn.Identity()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class _Model(nn.Module):
    def __init__(self, blocks: int, width: int, inner: int, normed: bool, classes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width, inner, normed) for _ in range(blocks))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


@dataclass(frozen=True)
class SmallCase:
    """A model of 3 to 6 equal blocks on 4 or 8 devices; some seeds have a memory limit that binds, some options are
    fixed. Options that the case leaves open are searched. ``unequal``: the second half of the devices is slow, or of
    another kind (odd seeds)."""

    seed: int
    unequal: bool = False

    @cached_property
    def _draw(self) -> dict[str, Any]:
        draw = random.Random(self.seed)
        return {"devices": draw.choice((4, 8)), "blocks": draw.randint(3, 6), "width": 256 * draw.randint(1, 8),
                "inner": 512 * draw.randint(1, 8), "batch": draw.choice((4, 8)), "tokens": draw.choice((64, 512, 2048)),
                "normed": draw.random() < 0.5, "classes": draw.choice((8, 1000, 8192)),
                "cluster": draw.choice(("h100-sxm", "a100-sxm", "l4")),
                "share": draw.choice((None, None, 0.9, 0.7, 0.5)),
                "recompute": draw.choice((None, "none", "full")), "zero_stage": draw.choice((None, 1))}

    @cached_property
    def graph(self) -> OpGraph:
        d = self._draw
        with torch.device("meta"):
            model = _Model(d["blocks"], d["width"], d["inner"], d["normed"], d["classes"])
            return capture(model, (torch.zeros(d["batch"], d["tokens"], d["width"]),))

    @cached_property
    def cluster(self) -> Cluster:
        found = Cluster.load(self._draw["cluster"], num_devices=self._draw["devices"])
        half = tuple(range(found.num_devices // 2, found.num_devices))
        if not self.unequal:
            return found
        if self.seed % 2 == 0:
            return replace(found, slow=(Slow(half, random.Random(self.seed).choice((0.25, 0.5, 0.8))),))
        other = Cluster.load("a100-pcie")
        return replace(found, host=replace(found.host, devices=2),
                       others=(OtherHosts("a100-pcie", half, other.device, other.profile),))

    @cached_property
    def options(self) -> Options:
        """With a limit that is a share of what data parallelism takes."""
        d = self._draw
        options = Options(recompute=d["recompute"], zero_stage=d["zero_stage"], memory_limit_bytes=float("inf"),
                          time_limit_s=300.0)
        if d["share"] is None:
            return options
        alone = plan_on(Splits(self.graph)(1), self.cluster, (d["devices"],), None, options, options.hybrid(1))
        return Options(**{**vars(options), "memory_limit_bytes": d["share"] * alone.prediction.peak_bytes})

    @cached_property
    def search(self) -> JointSearch:
        d, options = self._draw, self.options
        fixed = Fixed(recompute=d["recompute"], zero_stage=d["zero_stage"], **options.given)
        return JointSearch(self.graph, self.cluster, fixed, options.optimizer, options.limit_bytes(self.cluster))

    @cached_property
    def combinations(self) -> list[Candidate]:
        """All that the search may come by."""
        found = {c.key: c for c in self.search.space.first_round()}
        for candidate in list(found.values()):
            found.update({c.key: c for c in self.search.space.around(candidate)})
        return list(found.values())

    def planned(self, combinations: list[Candidate]) -> Iterator[tuple[Candidate, autoparallel.Plan]]:
        """Each with its best plan, of those that fit."""
        split = Splits(self.graph)
        for candidate in combinations:
            try:
                micro = split(candidate.hybrid.micro_batches)
                yield candidate, plan_on(micro, self.cluster, candidate.mesh_shape, None, self.options,
                                         candidate.hybrid)
            except (InfeasibleError, SearchError):
                continue

    def jointly(self) -> autoparallel.Plan:
        return plan_graph(self.graph, self.cluster, None, None, True, self.options)
