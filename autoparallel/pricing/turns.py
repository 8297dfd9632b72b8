"""How often each site and link of a program works in one step, and how long its values live.

Time runs over the sites of a stage forward (site i at time i) and backward (site i at time 2N - i); the stages' times
follow one another, so that one limit holds for each of them. What backward needs lives from the one to the other, once
for each micro-batch in flight; what is recomputed lives only while its block runs again. Parameters, gradients and
optimizer state live always.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autoparallel.capture.blocks import block_path
from autoparallel.plans import Hybrid
from autoparallel.rules.space import Link, StrategySpace
from cost_models.memory import in_flight_micro_batches

#: Classes of ops (`Rule.op_class`) whose results recompute="selective" keeps, as `lower.recompute` does.
KEPT_CLASSES = frozenset({"matmul", "attention", "conv"})


class Life(NamedTuple):
    """When a value is there, and how many of it."""

    interval: tuple[int, int]
    copies: int = 1


class Turns:
    """A hybrid step over one strategy space; ``stage_of`` by site (all 0 without a pipeline).

    In a sketch (`hybrid.sketch`) a site counts for ``counts`` sites, of which one rank holds ``held``.
    """

    def __init__(self, space: StrategySpace, hybrid: Hybrid | None = None, stage_of: Sequence[int] | None = None,
                 training: bool = True, counts: Sequence[int] | None = None, held: Sequence[int] | None = None) -> None:
        self.space, self.hybrid = space, hybrid or Hybrid()
        self.counts, self.held = counts or [1] * len(space), held or [1] * len(space)
        self.stage_of = stage_of if stage_of is not None else [0] * len(space)
        self.kept = _kept_values(space) if training else frozenset()
        self.last_use = _last_uses(space)
        self.block_of = [self._block(index) for index in range(len(space))]
        self.block_end = {block: index for index, block in enumerate(self.block_of) if block is not None}
        self.checkpoints = self._block_inputs() if self.hybrid.recompute != "none" else frozenset()
        self.kept |= self.checkpoints
        self.of_parameter = [self._is_parameter(index) for index in range(len(space))]

    def _block(self, index: int) -> tuple[int, str] | None:
        site = self.space.sites[index]
        if self.hybrid.recompute == "none" or site.kind not in ("op", "hub"):
            return None
        node = site.node if site.ref is None else site.ref.node
        path = block_path(self.space.graph.nodes[node].module_path)
        return (self.stage_of[index], path) if path else None

    def _block_inputs(self) -> frozenset[object]:
        """Values (site, output) that blocks keep to run again, or that others need of them; what passes a value on
        stands for that value."""
        found: set[object] = set()
        for link in sorted(self.space.links, key=lambda k: -k.target):
            target, rule = link.target, self.space.strategies[link.target].rule
            passes_on = self.space.sites[target].kind == "hub" or (rule is not None and rule.alias)
            crosses = self.block_of[link.source] != self.block_of[target]
            wanted = self.block_of[target] is not None or (link.source, link.output) in self.kept
            if (crosses and wanted) or (passes_on and (target, 0) in found):
                found.add((link.source, link.output))
        return frozenset(found)

    def _is_parameter(self, index: int) -> bool:
        site = self.space.sites[index]
        if site.kind == "hub":
            return all(self.space.sites[k.source].kind == "parameter" for k in self.space.links_into[index])
        return site.kind == "parameter"

    # --- how often --------------------------------------------------------------------------------------------------

    def again(self, index: int) -> bool:
        """Whether the site runs again in backward."""
        if self.block_of[index] is None:
            return False
        rule = self.space.strategies[index].rule
        return self.hybrid.recompute == "full" or rule is None or rule.op_class not in KEPT_CLASSES

    def op_times(self, index: int) -> tuple[int, int]:
        """How often the op runs (forward, backward) in a step."""
        count = self.hybrid.micro_batches * self.counts[index]
        return count * (2 if self.again(index) else 1), count

    def link_times(self, link: Link) -> tuple[int, int]:
        """How often the link's redistribution runs (forward, backward) in a step."""
        some = self.counts[link.target]
        count = self.hybrid.micro_batches * some
        if self.of_parameter[link.source]:
            return {0: (some, some), 1: (some, some), 2: (some, count), 3: (2 * count, count)}[self.hybrid.zero_stage]
        again = self.hybrid.recompute == "full" and self.block_of[link.target] is not None
        return count * (2 if again else 1), count

    # --- how long ---------------------------------------------------------------------------------------------------

    def _at(self, index: int) -> tuple[int, int]:
        """The start of the site's stage, and its turning point."""
        return self.stage_of[index] * (2 * len(self.space) + 2), 2 * len(self.space)

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations a stage holds at its fullest moment."""
        h = self.hybrid
        if h.stages == 1:
            return 1
        if h.schedule == "gpipe":
            return h.micro_batches
        # Stages dealt out in turn: a rank's later stages hold as many as the first, and one round more per chunk.
        return min(h.micro_batches, in_flight_micro_batches("1f1b", stage % h.pipeline_ranks, h.pipeline_ranks,
                                                            h.micro_batches) + h.pipeline_ranks
                   * ((h.stages - 1 - stage) // h.pipeline_ranks))

    def always(self, index: int) -> Life:
        start, turn = self._at(index)
        return Life((start, start + turn + 1), self.held[index])

    def site_life(self, index: int, outputs: Sequence[int]) -> Life:
        """Of an op's outputs."""
        if self.space.sites[index].kind in ("parameter", "buffer", "input"):
            return self.always(index)
        if any((index, o) in self.kept for o in outputs):
            inside = self.again(index) and not any((index, o) in self.checkpoints for o in outputs)
            return self._kept_life(index, inside)
        start, _ = self._at(index)
        return Life((start + index, start + max(index, self.last_use.get(index, index)) + 1))

    def _kept_life(self, index: int, inside: bool) -> Life:
        start, turn = self._at(index)
        if inside and (block := self.block_of[index]) is not None:
            return Life((start + turn - self.block_end[block], start + turn - index + 1))
        copies = self.held[index] * self.in_flight(self.stage_of[index])
        return Life((start + index, start + turn + 1 - index), copies)

    def copy_life(self, link: Link) -> Life:
        """Of the redistributed copy that a link makes."""
        start, _ = self._at(link.target)
        if self.of_parameter[link.source] and self.hybrid.zero_stage < 3 and not self.hybrid.is_plain:
            sums = self.hybrid.zero_stage < 2 and self.hybrid.micro_batches > 1
            whole = self.always(link.target)
            return Life(whole.interval, whole.copies * (2 if sums else 1))  # and the gradient of the whole
        transient = self.of_parameter[link.source] and self.hybrid.zero_stage == 3
        if ("copy", link.target, link.position) in self.kept and not transient:
            return self._kept_life(link.target, self.hybrid.recompute == "full" or self.again(link.target))
        return Life((start + link.target, start + link.target + 1))


def _kept_values(space: StrategySpace) -> frozenset[object]:
    """Values (site, output) and copies ("copy", site, input) that backward needs.

    What an aliasing op or a hub passes on is its input's memory, so a need of theirs is a need of their input's.
    """
    kept: set[object] = set()
    for index in range(len(space.sites) - 1, -1, -1):
        strategies, site = space.strategies[index], space.sites[index]
        rule = strategies.rule
        passes_on = site.kind == "hub" or (rule is not None and rule.alias)
        if rule is not None and rule.saves_output and strategies.output_metas[0].requires_grad:
            kept.add((index, 0))
        grad = any(m.requires_grad for m in strategies.output_metas)
        for link in space.links_into.get(index, ()):
            saved = grad and rule is not None and not passes_on and link.position in rule.saves
            if saved or (passes_on and (index, 0) in kept):
                kept.add(("copy", index, link.position))
                kept.add((link.source, link.output))
    return frozenset(kept)


def _last_uses(space: StrategySpace) -> dict[int, int]:
    last: dict[int, int] = {}
    for link in sorted(space.links, key=lambda k: -k.target):
        passes_on = space.sites[link.target].kind == "hub"
        use = last.get(link.target, link.target) if passes_on else link.target
        last[link.source] = max(last.get(link.source, 0), use)
    return last
