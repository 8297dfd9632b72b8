"""Sums of single numbers over ranks that go in one all-reduce (`schedule.number_sums`), in the simulated step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from autoparallel.pricing.rank_reads import RankReads, TimedStep
from autoparallel.pricing.redistribution_costs import PricedStep
from autoparallel.schedule.number_sums import Item, summed_together
from autoparallel.strategies.space import TensorUse

#: The step of a use: (target, position of the operand, number on its path).
StepKey = tuple[int, int, int]


class NumberSums:
    """The order of a plan's steps of activations on a rank, as the program has it after `lower.number_sums`.

    ``paths``: uses with their steps; ``alone``: steps that overlap with compute, and are no sums of numbers here."""

    def __init__(self, reads: RankReads, paths: Iterable[tuple[TensorUse, Sequence[TimedStep], Sequence[PricedStep]]],
                 alone: frozenset[StepKey]) -> None:
        self.reads, self.space, self.alone = reads, reads.space, alone
        self._paths = {(use.target, use.position): (use, steps, priced) for use, steps, priced in paths}
        self._items, self._keys, self._last = list[Item](), list[StepKey | None](), dict[tuple[int, int], int]()
        self._made = dict[int, int]()

    def groups(self) -> Mapping[StepKey, tuple[int, Sequence[StepKey]]]:
        """By sum that is the last of several or that waits for them: the decision before which it runs, and the steps
        in its message, itself included; by the others of a message: no steps."""
        for index in self.reads.members:
            self._add(index)
        if sum(item.kind is not None for item in self._items) < 2:
            return {}
        found, place = dict[StepKey, tuple[int, Sequence[StepKey]]](), 0
        for group in summed_together(self._items):
            keys = [key for number in group if (key := self._keys[number]) is not None]
            place = max([place, *(key[0] for key in keys)])
            if len(keys) > 1 or (keys and keys[0][0] < place):
                found.update(dict.fromkeys(keys, (place, ())))
                found[keys[-1]] = place, keys
        return found

    def _add(self, index: int) -> None:
        """Add the items of a decision: the steps of what it reads, and its op."""
        read = [self._read(use) for use in self.space.uses_by.get(index, ())]
        known = [number for number in read if number is not None]
        if self.space.decisions[index].kind == "op":
            self._made[index] = self._item(Item(known, None, self._makes_number(index)), None)
        elif known:
            self._made[index] = known[0]

    def _read(self, use: TensorUse) -> int | None:
        at = self._made.get(use.source)
        _, steps, priced = self._paths.get((use.target, use.position), (use, (), ()))
        for number, (_, one) in enumerate(zip(steps, priced, strict=True)):
            key = use.target, use.position, number
            kind = None if key in self.alone else self._kind(use, one)
            at = self._item(Item(() if at is None else (at,), kind, kind is not None), key)
        return at

    def _item(self, item: Item, key: StepKey | None) -> int:
        self._items.append(item)
        self._keys.append(key)
        return len(self._items) - 1

    def _kind(self, use: TensorUse, priced: PricedStep) -> object:
        """What sums of one message have in common; None of other steps."""
        step, meta = priced.step, use.meta
        if step.forward != "all_reduce" or meta.num_elements != 1:
            return None
        return step.axes, str(step.source), str(step.target), meta.dtype, self.space.blocks[use.target]

    def _makes_number(self, index: int) -> bool:
        """Whether the program has an op of torch's for a decision, whose result is one number."""
        s, node = self.space.strategy_sets[index], self.space.graph.nodes[self.space.decisions[index].node]
        chosen = s.array[self.reads.numbers[index]].tolist()
        own = isinstance(node.target, torch._ops.OpOverload) and not any(s.axis_strategies[r].variant for r in chosen)
        return (own and not (s.rule is not None and s.rule.random) and len(node.outputs) == 1
                and node.outputs[0].num_elements == 1)


__all__ = ["NumberSums", "StepKey"]
