"""Chains of element-wise ops that a compiler fuses into one kernel: which of their tensors pass through memory.

Two ops are in one chain if one reads the other's result and no matrix product, attention, convolution or lookup lies
between them on any path. Inside a chain values stay in registers, and backward computes them again from the chain's
inputs, as Inductor does. Views pass values on. Redistributions, which cut chains, are not known before the search and
are not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from autoparallel.strategies.space import StrategySet, StrategySpace, TensorUse

FUSED_CLASSES = frozenset({"elementwise", "reduction"})


@dataclass(frozen=True)
class InChain:
    """An op's part in its chain: the inputs that it reads from memory, whether it writes its result there, and whether
    backward reads those inputs (or the result) again."""

    reads: tuple[bool, ...]
    writes: bool
    saves: bool


def chains_of(space: StrategySpace) -> list[InChain | None]:
    """By decision: the op's part in its chain; None for ops that are kernels of their own and for views."""
    sets = space.strategy_sets
    fused = [_is_fused(space, index) for index in range(len(sets))]
    origin, level = _origins(space, fused), [0] * len(sets)
    readers = defaultdict[int, list[TensorUse]](list)
    for use in space.uses:    # ordered by target
        source = origin[use.source]
        level[use.target] = max(level[use.target], level[source] + (not fused[source]))
        if not _passes_on(space, use.target):
            readers[source].append(use)
    saves = _saving(space, fused, level, readers)
    found: list[InChain | None] = [None] * len(sets)
    for index in range(len(sets)):
        if fused[index]:
            sources = [origin[use.source] for use in space.uses_by.get(index, ())]
            inside = [fused[s] and level[s] == level[index] for s in sources]
            stays = readers[index] and all(fused[u.target] and level[u.target] == level[index] for u in readers[index])
            found[index] = InChain(tuple(not i for i in inside), not stays, saves[index])
    return found


def _is_fused(space: StrategySpace, index: int) -> bool:
    rule = space.strategy_sets[index].rule
    return (space.decisions[index].kind == "op" and rule is not None and not rule.alias and not rule.fixed
            and rule.op_class in FUSED_CLASSES)


def _passes_on(space: StrategySpace, index: int) -> bool:
    rule = space.strategy_sets[index].rule
    return space.decisions[index].kind == "shared_read" or (rule is not None and rule.alias and _is_one(space, index))


def _is_one(space: StrategySpace, index: int) -> bool:
    s: StrategySet = space.strategy_sets[index]
    return len(s.input_metas) == 1 and len(s.output_metas) == 1


def _origins(space: StrategySpace, fused: Sequence[bool]) -> list[int]:
    """By decision: the decision whose result it is, through views and shared reads."""
    origin = list(range(len(fused)))
    for index in range(len(fused)):
        if _passes_on(space, index) and index in space.uses_by:
            origin[index] = origin[space.uses_by[index][0].source]
    return origin


def _saving(space: StrategySpace, fused: Sequence[bool], level: Sequence[int],
            readers: dict[int, list[TensorUse]]) -> list[bool]:
    """By decision: whether its backward, or that of an op later in its chain, needs values of forward."""
    found = [False] * len(fused)
    for index in reversed(range(len(fused))):
        rule = space.strategy_sets[index].rule
        if fused[index] and rule is not None:
            later = (u.target for u in readers[index] if fused[u.target] and level[u.target] == level[index])
            found[index] = bool(rule.saves) or rule.saves_output or any(found[target] for target in later)
    return found
