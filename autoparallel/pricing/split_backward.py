"""The communication that a backward in two parts (zero bubble) puts off with the gradients of weights.

The second part runs an op's backward again for the gradients of weights from which a gradient path leads to the inputs'
paths in that op alone (`runtime.pipeline.backward_of_inputs`). Gradients of other weights belong to the first part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from autoparallel.pricing.rank_reads import RankReads, TimedStep
from autoparallel.strategies.space import TensorUse

#: A value that micro-batches read: (0, parameter, 0), or what steps that run once make of one for a use, (1, target,
#: position). In the order in which the program of a micro-batch takes them.
LeafValue = tuple[int, int, int]
#: Redistribution steps of operands by the decision that reads them, in program order.
StepsOf = Mapping[int, Sequence[TimedStep]]


class PutOff(NamedTuple):
    """The second part of op ``op``: the backward of ``decisions``, the op and the views of weights that lead to it,
    last first."""

    op: int
    decisions: tuple[int, ...]


class SplitBackward:
    """The two parts of backward on a stage that receives values: ``put_off``, the second in order; ``later``, views of
    weights that only the second part differentiates; ``first`` and ``second``, the steps whose backward each runs;
    ``op_of``: by leaf whose gradient the second part makes, the op."""

    def __init__(self, reads: RankReads) -> None:
        self.reads, self.space, self.counts = reads, reads.space, reads.counts
        moved = {move.use: number for move, number in zip(reads.moves, reads.once_of_leaves, strict=True)}
        self._once = {use: moved.get(use, 0) for use in self.space.uses if reads.here[use.target]}
        self._uses_from = defaultdict[int, list[TensorUse]](list)
        for use in self._once:
            self._uses_from[use.source].append(use)
        self._on_paths = self._paths_of_inputs()
        behind = {leaf: self._behind(uses) for leaf, uses in sorted(self._leaves().items())}
        ends = {leaf: ops for leaf, uses in behind.items() if (ops := {use.target for use in uses} & self._on_paths)}
        early = {use for leaf, ops in ends.items() if len(ops) > 1 for use in behind[leaf]}
        found = defaultdict[int, set[TensorUse]](set)
        for leaf, ops in ends.items():
            if len(ops) == 1:
                found[next(iter(ops))] |= set(behind[leaf]) - early
        self.op_of = {leaf: next(iter(ops)) for leaf, ops in ends.items() if len(ops) == 1}
        self.put_off = [PutOff(op, tuple(sorted({op, *(use.target for use in uses)}, reverse=True)))
                        for op, uses in found.items()]
        puts_off = set().union(*found.values())
        self.later = frozenset(use.target for use in puts_off) - self._on_paths - {use.target for use in early}
        self.first, self.second = (self._steps(lambda use: use not in puts_off), self._steps(puts_off.__contains__))

    def _steps(self, has: Callable[[TensorUse], bool]) -> StepsOf:
        found = defaultdict[int, list[TimedStep]](list)
        for use in filter(has, self._once):
            found[use.target] += self.reads.steps_of(use)
        return found

    def _paths_of_inputs(self) -> frozenset[int]:
        """The decisions from which gradients flow to what the stage receives."""
        found = set[int]()
        for use in self._once:  # in program order
            if use.meta.requires_grad and (use.source in found or self.counts.crosses(use)):
                found.add(use.target)
        return frozenset(found & self.space.differentiated)

    def _leaves(self) -> Mapping[LeafValue, Sequence[TensorUse]]:
        """The uses that read each leaf."""
        found = defaultdict[LeafValue, list[TensorUse]](list)
        for use, once in self._once.items():
            if once:
                found[1, use.target, use.position].append(use)
            elif self.space.decisions[use.source].kind == "parameter":
                found[0, use.source, 0].append(use)
        return found

    def _behind(self, uses: Sequence[TensorUse]) -> set[TensorUse]:
        """The uses from a leaf to the paths of inputs."""
        left, found = list(uses), set[TensorUse]()
        while left:
            use = left.pop()
            if use.target in self.space.differentiated and use.meta.requires_grad:
                found.add(use)
                if use.target not in self._on_paths:
                    left += [one for one in self._uses_from[use.target] if not self._once[one]]
        return found
