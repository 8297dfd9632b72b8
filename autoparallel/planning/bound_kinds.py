"""What the decision graph of a combination depends on, and the least that communication counts there."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from autoparallel.planning.bucket_sizes import LARGEST_BYTES
from autoparallel.planning.candidates import Candidate, Mesh
from autoparallel.plans import Hybrid
from autoparallel.pricing import Prices
from autoparallel.pricing.layer_overlap import LayerOverlap
from autoparallel.pricing.step_cost import Exposed, Ways
from autoparallel.schedule.activation_windows import NOWHERE, PRODUCTS
from autoparallel.schedule.fusion import Fusion
from autoparallel.schedule.pieces import TRIED
from autoparallel.strategies.space import StrategySpace, TensorUse

#: None of it overlaps.
WHOLE: Ways = 1.0, 1.0


class Kind(NamedTuple):
    """What the decision graph of a combination depends on: other schedules, stages per rank and recompute share its
    bound. ``zero_stage``: 1 also for 0; 0: a bound for all of them, with the fewest executions and all overlap.
    ``puts_off``: backward computes the gradients of weights last (zero bubble). ``pieces``: the most in which linear
    layers run. ``bucket_bytes``, ``fusion``: buckets as in `Hybrid`, the largest that the search may choose."""

    micro_batches: int
    pipeline_ranks: int
    mesh_shape: tuple[int, ...]
    zero_stage: int
    copies: int
    puts_off: bool
    pieces: int
    bucket_bytes: float
    fusion: Fusion

    @classmethod
    def of(cls, candidate: Candidate) -> Kind:
        h = candidate.hybrid
        return cls(h.micro_batches, h.pipeline_ranks, candidate.mesh_shape, max(1, h.zero_stage), h.copies,
                   h.puts_off_weights, max(h.pieces, *TRIED), h.bucket_bytes if h.fusion.given else LARGEST_BYTES,
                   h.fusion)

    def least(self, micro_batches: int) -> Kind:
        """Of so many micro-batches, the kind that is a bound of all ZeRO stages, in one part of backward or two."""
        return self._replace(micro_batches=micro_batches, zero_stage=0, puts_off=False)

    @property
    def mesh(self) -> Mesh:
        return self.pipeline_ranks, self.mesh_shape

    @property
    def hybrid(self) -> Hybrid:
        """The step configuration with the fewest executions; its pipeline is priced as one stage."""
        return Hybrid(self.micro_batches, zero_stage=max(1, self.zero_stage), copies=self.copies,
                      bucket_bytes=self.bucket_bytes, fusion=self.fusion)

    @property
    def filling(self) -> float:
        """The longest bubble of its schedules, of equal stages, as a share of all micro-batches on a rank (of the bound
        of all ZeRO stages, which takes less time, none)."""
        return self.copies * (self.pipeline_ranks - 1) / self.micro_batches if self.zero_stage else 0.0

    def least_exposed(self, prices: Prices, sent: float = 0.0, limited: bool = True, recomputed: bool = False
                      ) -> Exposed:
        """The fractions of communication that count even where all of it overlaps that may: what it slows compute by,
        while at most one collective runs on each stream. What runs before all micro-batches (gathers of ZeRO-0 and 1)
        or after them (zero bubble) overlaps with its own copies and with other streams at most. ``sent``: so many times
        the seconds that communication of parameters takes at least, with all streams busy, count as well. ``limited``:
        layers hide no more than their own seconds (not where the bound is for more micro-batches, too, whose layers'
        launches may take longer). ``recomputed``: all blocks are, so that nothing starts where it is made."""
        profile = prices.cluster.profile
        streams = max(1, len({group.crossed[-1][1].name for group in prices.groups.values() if group.crossed}))
        share = (prices.device.overlap_slowdown - 1) / streams
        left = 1 - (1.0 if profile is None else profile.hide_data) * (1 - share)
        plain = self.micro_batches == self.pipeline_ranks == 1
        early = not self.puts_off and (plain or self.zero_stage != 1)
        busy = 1 / (streams + 1)
        gathers, reductions = (left if overlaps else max(left, busy) for overlaps in (early, not self.puts_off))
        exposed = Exposed(gathers + sent * busy, reductions + sent * busy)
        if profile is not None and not profile.overlaps_activations:    # the software hides a share of its own
            of_activations = 1 - profile.hide_tensor
            return exposed._replace(activations=left * of_activations if self.copies > 1 else of_activations)
        if self.puts_off:
            return exposed
        by_use = _of_activations(prices, share, self.pieces, limited, recomputed) if self.copies == 1 else None
        return exposed._replace(activations=share, by_use=by_use)


def _of_activations(prices: Prices, share: float, pieces: int, limited: bool, recomputed: bool
                    ) -> Mapping[tuple[int, int], Ways | LayerOverlap]:
    """By use (target, position) of an activation, the least fractions of its redistribution that are exposed, as far as
    windows of activations and layers in ``pieces`` allow overlap (`schedule.activation_windows`, `schedule.pieces`):
    only the slowdown ``share`` where products lie between value and reader (not in ``recomputed`` blocks), or other ops
    between a shared read and its first reader; the rest of what the linear layers that make or read it can hide
    (``limited``: in their seconds); else all."""
    space, representatives = prices.space, dict[object, int]()
    products = defaultdict[str | None, list[int]](list)    # by block, ascending as the ops are
    for decision, s in zip(space.decisions, space.strategy_sets, strict=True):
        if s.rule is not None and s.rule.op_class in PRODUCTS:
            products[space.blocks[decision.index]].append(decision.index)
    layers = {decision.index for decision in space.decisions if decision.kind == "op"
              and space.graph.nodes[decision.node].target is torch.ops.aten.linear.default}
    ops = [decision.index for decision in space.decisions if decision.kind == "op"]

    def representative(index: int) -> int:
        """The first layer with the strategies and seconds of this one."""
        return representatives.setdefault((id(space.strategy_sets[index]), prices.chains[index]), index)

    def ways(use: TensorUse) -> Ways | LayerOverlap:
        readers = _reading(space, use.target)
        source, reader = _made_by(space, use.source), min(readers, default=use.target)
        is_again = recomputed and space.blocks[reader]
        if not is_again and _any_between(products[space.blocks[reader]], source, reader):
            return share, share
        if _any_between(ops, use.target, reader):
            return share, share
        own = space.readers_of.get(use.target, ()) if space.decisions[use.target].kind == "shared_read" else (
            (use.target,) if use == space.uses_by[use.target][0] else ())
        read_by = tuple(representative(one) for one in own if one in layers)
        is_made_for_it = use.source in layers and len(space.readers_of[use.source]) == 1
        maker = representative(use.source) if is_made_for_it else NOWHERE
        if not read_by and maker == NOWHERE:
            return WHOLE
        if not limited:
            of_piece = 1 - (1 - share) * (pieces - 1) / pieces
            return of_piece, share if read_by else of_piece
        return LayerOverlap(share, pieces, read_by, 0 < len(read_by) == len(own), maker)

    return {(use.target, use.position): ways(use) for use in space.uses}


def _any_between(numbers: Sequence[int], low: int, high: int) -> bool:
    """Whether an ascending sequence has a number between two others.

    >>> _any_between([2, 5], 2, 5), _any_between([2, 5], 1, 5)
    (False, True)
    """
    above = bisect.bisect_right(numbers, low)
    return above < len(numbers) and numbers[above] < high


def _reading(space: StrategySpace, target: int) -> list[int]:
    """The ops that read the result of a redistribution before ``target``: it, or the readers of a shared read."""
    if space.decisions[target].kind != "shared_read":
        return [target]
    return [reader for one in space.readers_of.get(target, ()) for reader in _reading(space, one)]


def sends_on(space: StrategySpace, index: int) -> bool:
    """Whether a decision's value is read in another block than its own, or outside of blocks."""
    return any(space.blocks[reader] != space.blocks[index] for one in space.readers_of.get(index, ())
               for reader in _reading(space, one))


def _made_by(space: StrategySpace, source: int) -> int:
    """The decision that makes a value, also through shared reads."""
    while space.decisions[source].kind == "shared_read":
        source = space.uses_by[source][0].source
    return source


__all__ = ["Kind", "sends_on"]
