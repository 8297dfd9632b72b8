"""The blocks that a step recomputes or offloads: which decisions run again in backward, and until where."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from autoparallel.plans import Hybrid
from autoparallel.strategies.space import StrategySpace

#: By mode of recompute, the op classes (`Rule.op_class`) whose results are kept, as in `kernels.recomputed`.
KEPT_CLASSES = {"selective": frozenset({"matmul", "attention", "conv"}), "all_but_attention": frozenset({"attention"})}
#: A block of a stage: its number, and the module path.
Block = tuple[int, str]


class Recomputing(NamedTuple):
    """How software recomputes: whether a block's recompute ends where backward has all it needs (torch's early stop),
    and whether "selective" runs the core of attention again and nothing else (Megatron), or all but products,
    attention and convolutions."""

    early_stop: bool = True
    core_only: bool = False


class RecomputedBlocks:
    """The recomputed or offloaded blocks of a strategy graph, whose decisions run on ``stages_of``.

    ``evicted``: by decision, its block, if that is recomputed or offloaded, so that its saved values leave the device
    between forward and backward (else None). ``of``: its block, if that is recomputed.
    ``last``: by block, its last decision. ``gathered``: by decision, the block whose parameters are gathered together
    (`Hybrid.gathers_blocks`), also where it is not recomputed.
    """

    def __init__(self, space: StrategySpace, hybrid: Hybrid, stages_of: Sequence[tuple[int, ...]],
                 how: Recomputing) -> None:
        self.space, self.hybrid, self.how = space, hybrid, how
        self.some = hybrid.recompute != "none"
        whole = [(stages[0], path) if path else None for stages, path in zip(stages_of, space.blocks, strict=True)]
        self.evicted = [block if block and self.some and hybrid.recomputed(block[1]) else None for block in whole]
        self.of = self.evicted if hybrid.recompute != "offload" else [None] * len(whole)
        self.gathered = whole if hybrid.gathers_blocks else self.evicted
        self.last = {block: index for index, block in enumerate(self.evicted) if block is not None}

    def around(self, index: int) -> tuple[int, int]:
        """(first, last) decision of the block with which a decision's parameters are gathered; outside blocks the
        decision itself, twice."""
        block = self.gathered[index]
        return (index, index) if block is None else self._ends_of_gathered[block]

    @cached_property
    def _ends_of_gathered(self) -> dict[Block, tuple[int, int]]:
        found = dict[Block, tuple[int, int]]()
        for index, block in enumerate(self.gathered):
            if block is not None:
                found[block] = (found[block][0] if block in found else index, index)
        return found

    def again(self, index: int) -> bool:
        """Whether recompute runs the decision again in backward."""
        if self.of[index] is None:
            return False
        rule = self.space.strategy_sets[index].rule
        if self.hybrid.recompute == "selective" and self.how.core_only:
            return rule is not None and rule.op_class == "attention"
        return rule is None or rule.op_class not in KEPT_CLASSES.get(self.hybrid.recompute, ())

    @property
    def sends_again(self) -> bool:
        """Whether recompute runs the communication of blocks again, whose results "selective" keeps."""
        return self.hybrid.recompute in ("all_but_attention", "full")

    def moves(self, index: int) -> bool:
        """Whether what is saved of a decision's results waits for backward outside of the device."""
        return self.hybrid.saved_on != "device" and self.evicted[index] is not None and not self.again(index)

    def away(self, index: int) -> bool:
        """Whether the decision's results leave the device between forward and backward (recomputed or offloaded)."""
        return self.again(index) or self.moves(index)

    @cached_property
    def runs_again(self) -> frozenset[int]:
        """Decisions that recompute runs again: those before the early stop of their block."""
        inside = ((index, block) for index, block in enumerate(self.of) if block is not None)
        return frozenset(index for index, block in inside if self.again(index) and index < self.ends[block])

    @cached_property
    def ends(self) -> dict[Block, int]:
        """By block, the decision before which its recompute stops: the last op that saves an input, or after the last
        op that saves what it makes (torch's early stop); the end of the block with zero bubble, whose backward has two
        parts. A block that saves nothing, such as a sum that a cut leaves alone, is not recomputed (0)."""
        if not self.how.early_stop:
            return {block: last + 1 for block, last in self.last.items()}
        if self.hybrid.puts_off_weights:
            return {block: last + 1 if block in self.starts else 0 for block, last in self.last.items()}
        found = dict.fromkeys(self.last if self.hybrid.recompute != "offload" else (), 0)
        for block, index in self.starts.items():
            rule = self.space.strategy_sets[index].rule
            found[block] = index + (rule is not None and rule.keeps_own)
        return found

    @cached_property
    def next_offloaded(self) -> dict[Block, Block | None]:
        """By offloaded block, the next one of its stage, during whose backward its values come back (None: it is the
        last), as `kernels.saved_on_host` fetches them."""
        found, last = dict[Block, Block | None](), dict[int, Block]()
        for block in sorted(self.last, key=self.last.__getitem__, reverse=True):
            found[block] = last.get(block[0])
            last[block[0]] = block
        return found

    @cached_property
    def starts(self) -> dict[Block, int]:
        """By block, the decision whose backward starts its recompute: the last op that saves anything."""
        found = dict[Block, int]()
        for index, (block, s) in enumerate(zip(self.of, self.space.strategy_sets, strict=True)):
            saves = s.rule is not None and (s.rule.saves or s.rule.keeps_own)
            if block is not None and saves and any(m.requires_grad for m in s.output_metas):
                found[block] = index
        return found
