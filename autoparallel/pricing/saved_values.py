"""The values that a step keeps from forward for backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autoparallel.pricing.recomputing import KEPT_CLASSES, RecomputedBlocks
from autoparallel.rules.rule import Rule
from autoparallel.strategies.space import StrategySet, StrategySpace, TensorUse

#: A value (decision, output), or a redistributed copy ("copy", decision, input).
Value = tuple[int, int] | tuple[str, int, int]


class SavedValues:
    """The values and redistributed copies that live from forward to backward; none outside training.

    ``crossing``: the uses (target, position) that send their value to a later stage. ``first_saver``: by value, the
    first op that saves it.
    ``inside_only``: the decisions of whose results backward needs none, but values that the op makes inside.
    ``checkpoints``: the values that a recomputed block keeps: its inputs, and those of its values that others need.
    """

    def __init__(self, space: StrategySpace, blocks: RecomputedBlocks, crossing: frozenset[tuple[int, int]],
                 training: bool) -> None:
        self.space, self.blocks, self.crossing = space, blocks, crossing
        self.first_saver: dict[Value, int] = {}
        self.kept = self._kept_values() if training else frozenset()
        self.checkpoints = self._block_inputs() if blocks.some else frozenset()
        self.kept |= self.checkpoints | (self._results_kept() if training else frozenset())
        self.inside_only = self._keep_inside() if training else frozenset()

    def _crosses(self, use: TensorUse) -> bool:
        return (use.target, use.position) in self.crossing

    def copy_is_kept(self, use: TensorUse) -> bool:
        return ("copy", use.target, use.position) in self.kept

    @cached_property
    def first_need(self) -> dict[int, int]:
        """By decision with saved results, the first op that saves one (0: kept without being needed)."""
        found: dict[int, int] = {}
        for value in self.kept:
            if len(value) == 2:
                needs = self.first_saver.get(value, 0)
                found[value[0]] = min(needs, found.get(value[0], needs))
        return found

    def inputs_needed(self, index: int) -> Collection[int]:
        """The inputs that backward of an op needs, by position."""
        return _Needs.of(self.space.strategy_sets[index]).inputs

    def skips(self, use: TensorUse) -> np.ndarray | None:
        """Whether each strategy of the target is a variant that does not save this input; None: no strategy is."""
        s = self.space.strategy_sets[use.target]
        rows = [r for r, axis_strategy in enumerate(s.axis_strategies) if use.position in axis_strategy.unsaved]
        return np.asarray(np.isin(s.array, rows).any(axis=1)) if rows else None

    def inside(self, index: int) -> bool:
        """Whether the decision's results are needed only inside its block and leave the device until its backward."""
        if self.blocks.evicted[index] is None or not self.blocks.away(index):
            return False
        outputs = range(len(self.space.strategy_sets[index].output_metas))
        return not any((index, o) in self.checkpoints for o in outputs)

    def copy_is_away(self, use: TensorUse) -> bool:
        """Whether a saved redistributed copy is recomputed, or fetched from the host."""
        kept = self.copy_is_kept(use) and self.blocks.evicted[use.target] is not None
        return kept and (self.blocks.sends_again or self.blocks.away(use.target))

    def _kept_values(self) -> frozenset[Value]:
        """Values and copies that backward needs; also fills `first_saver`.

        Views and shared reads use the memory of their inputs, so a saved view counts as its input.
        """
        space, kept = self.space, set[Value]()
        known = {key: _Needs.of(s) for key, s in {id(s): s for s in space.strategy_sets}.items()}
        needs = [known[id(s)] for s in space.strategy_sets]
        for index in range(len(needs) - 1, -1, -1):
            passes_on, output, inputs = needs[index]
            passes_on = passes_on or space.decisions[index].kind == "shared_read"
            if output:
                kept.add((index, 0))
                self.first_saver[index, 0] = index
            if not inputs and not (passes_on and (index, 0) in kept):
                continue
            saver = self.first_saver.get((index, 0), index) if passes_on else index
            for use in space.uses_by.get(index, ()):
                if passes_on or use.position in inputs:
                    kept.add(("copy", index, use.position))
                    if not self._crosses(use):
                        value = (use.source, use.output)
                        kept.add(value)
                        before = self.first_saver.get(value, saver)
                        self.first_saver[value] = saver if saver < before else before
        return frozenset(kept)

    def _block_inputs(self) -> frozenset[Value]:
        """Values (decision, output) that a block keeps: its inputs, which it reads when it runs again, and its values
        that others need. Views and shared reads stand for the values that they pass on."""
        found: set[Value] = set()
        for use in reversed([use for use in self.space.uses if not self._crosses(use)]):  # ordered by target
            target, rule = use.target, self.space.strategy_sets[use.target].rule
            passes_on = self.space.decisions[target].kind == "shared_read" or (rule is not None and rule.alias)
            crosses = self.blocks.evicted[use.source] != self.blocks.evicted[target]
            wanted = self.blocks.evicted[target] is not None or (use.source, use.output) in self.kept
            if (crosses and wanted) or (passes_on and (target, 0) in found):
                found.add((use.source, use.output))
        return frozenset(found)

    def _results_kept(self) -> frozenset[Value]:
        """Results that recompute keeps, whether backward needs them or not, to avoid running their ops again."""
        if self.blocks.hybrid.recompute not in KEPT_CLASSES:
            return frozenset()
        inside = (i for i, block in enumerate(self.blocks.of) if block is not None and not self.blocks.again(i))
        return frozenset((i, 0) for i in inside if self.space.strategy_sets[i].output_metas[0].requires_grad
                         and not self.products_only(i))

    def products_only(self, index: int) -> bool:
        """Whether selective recompute keeps the results of the products inside an op, and runs the rest of it again."""
        rule, blocks = self.space.strategy_sets[index].rule, self.blocks
        return (rule is not None and rule.product_bytes > 0 and blocks.of[index] is not None
                and blocks.hybrid.recompute == "selective" and not blocks.how.core_only)


    def _keep_inside(self) -> frozenset[int]:
        """Keep what ops make inside, also where backward needs no result of theirs; returns these ops."""
        found = set[int]()
        for index, s in enumerate(self.space.strategy_sets):
            wanted = any((index, output) in self.kept for output in range(len(s.output_metas)))
            if not wanted and s.rule is not None and s.rule.keeps_own and s.output_metas[0].requires_grad:
                found.add(index)
                self.first_saver.setdefault((index, 0), index)
        self.kept |= {(index, 0) for index in found}
        return frozenset(found)


class _Needs(NamedTuple):
    """The values that backward of an op needs: its output, and these inputs. ``passes_on``: the op is a view."""

    passes_on: bool
    output: bool
    inputs: Collection[int]

    @classmethod
    def of(cls, s: StrategySet) -> _Needs:
        rule = s.rule
        if rule is None:
            return cls(False, False, ())
        grad = any(m.requires_grad for m in s.output_metas)
        output = bool(rule.saves_output) and s.output_metas[0].requires_grad
        return cls(rule.alias, output, _saved_inputs(s, rule) if grad and not rule.alias else ())


def _saved_inputs(s: StrategySet, rule: Rule) -> Collection[int]:
    """`Rule.saves`, without a factor of a product whose other factor needs no gradient."""
    if rule.op_class != "matmul" or len(rule.saves) != 2:
        return rule.saves
    left, right = sorted(rule.saves)
    return [i for i, other in ((left, right), (right, left)) if s.input_metas[other].requires_grad]


def last_uses(space: StrategySpace, uses: Sequence[TensorUse]) -> dict[int, int]:
    """The last reader of each decision's results, also through shared reads."""
    last: dict[int, int] = {}
    for use in reversed(uses):  # ordered by target
        passes_on = space.decisions[use.target].kind == "shared_read"
        read = last.get(use.target, use.target) if passes_on else use.target
        last[use.source] = max(last.get(use.source, 0), read)
    return last
