"""Chains of element-wise ops that a compiler fuses into one kernel: which of their tensors pass through memory.

Two ops are in one chain if one reads the other's result and no matrix product, attention, convolution or lookup lies
between them on any path. Inside a chain values stay in registers, and backward computes them again from the chain's
inputs, as Inductor does. A trainable value that ops of other kinds or of later chains read too, such as the residual
stream, is written, and ends its chain: norms are kernels of their own. Views pass values on. Redistributions, which cut
chains, are not known before the search and are not counted.

A loss over classes (cross-entropy) is one kernel with the casts before it, whose traffic software has as a constant of
its own (`Profile.loss_bytes`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass

from autoparallel.strategies.space import StrategySet, StrategySpace, TensorUse
from cost_models import Cluster

FUSED_CLASSES = frozenset({"elementwise", "reduction"})


@dataclass(frozen=True)
class InChain:
    """An op's part in its chain: the inputs that it reads from memory (of several ops of a chain that read one tensor,
    the first), whether it writes its result there, and whether backward reads those inputs (or the result) again.
    ``gradients``, of a value with several readers: how many of its readers' gradients come out of different kernels;
    a chain adds them: one of these kernels as it writes its own, or that of the value's op as it reads them.
    ``loss``: the op is the loss over classes."""

    reads: tuple[bool, ...]
    writes: bool
    saves: bool
    gradients: int = 0
    loss: bool = False


#: Of casts before a loss, which it counts.
FREE = InChain((), False, False)
LOSS = "cross_entropy_loss"


def fuses(cluster: Cluster) -> bool:
    """Whether the software compiles chains of ops to kernels."""
    return cluster.profile is not None and bool(cluster.profile.fused)


def chains_of(space: StrategySpace) -> list[InChain | None]:
    """By decision: the op's part in its chain; None for ops that are kernels of their own and for views."""
    sets = space.strategy_sets
    fused = [_is_fused(space, index) for index in range(len(sets))]
    origin, readers = _origins(space, fused), defaultdict[int, list[TensorUse]](list)
    level = _levels(space, fused, origin, _ends(space, fused, origin))
    for use in space.uses:
        if not passes_on(space, use.target):
            readers[origin[use.source]].append(use)
    saves, chain = _saving(space, fused, level, readers), _chains(fused, level, readers)
    found: list[InChain | None] = [None] * len(sets)
    seen: set[tuple[int, int, int]] = set()
    for index in range(len(sets)):
        uses = space.uses_by.get(index, ())
        if fused[index]:
            read = []
            for use in uses:
                source = origin[use.source]
                tensor = (chain[index], source, use.output if source == use.source else -1)
                read.append(chain[source] != chain[index] and tensor not in seen)
                seen.add(tensor)
            stays = readers[index] and all(chain[u.target] == chain[index] for u in readers[index])
            found[index] = InChain(tuple(read), not stays, saves[index])
    for index, targets in _shared(space).items():
        kernels = {chain[target] for target in targets}
        if len(kernels) < len(targets) or fused[origin[index]] or any(fused[target] for target in targets):
            found[index] = InChain((), False, False, len(kernels))
    return found


def with_losses(space: StrategySpace, found: Sequence[InChain | None]) -> list[InChain | None]:
    """The chains, with losses over classes and the casts before them, which cost nothing beside these."""
    made = list(found)
    for index, decision in enumerate(space.decisions):
        if decision.kind == "op" and LOSS in space.graph.nodes[decision.node].op_name:
            made[index] = InChain((), False, False, loss=True)
            source = space.uses_by[index][0].source
            while passes_on(space, source) or is_cast(space, source):
                made[source] = FREE if is_cast(space, source) else made[source]
                source = space.uses_by[source][0].source
    return made


def is_cast(space: StrategySpace, index: int) -> bool:
    """Whether a decision changes a tensor's dtype and nothing else."""
    s = space.strategy_sets[index]
    if space.decisions[index].kind != "op" or not _is_one(space, index):
        return False
    before, after = s.input_metas[0], s.output_metas[0]
    return before.dtype != after.dtype and before.shape == after.shape


def _levels(space: StrategySpace, fused: Sequence[bool], origin: Sequence[int], ends: Container[int]) -> list[int]:
    """By decision: how many kernels of other kinds, and ends of chains, lie before it."""
    level = [0] * len(fused)
    for use in space.uses:    # ordered by target
        source = origin[use.source]
        level[use.target] = max(level[use.target], level[source] + (not fused[source] or source in ends))
    return level


def _ends(space: StrategySpace, fused: Sequence[bool], origin: Sequence[int]) -> set[int]:
    """Fused ops with trainable results that both their own chain and others read."""
    level, inside, outside = _levels(space, fused, origin, ()), set[int](), set[int]()
    for use in space.uses:
        source = origin[use.source]
        if fused[source] and use.meta.requires_grad and not passes_on(space, use.target):
            (inside if fused[use.target] and level[use.target] == level[source] else outside).add(source)
    return inside & outside


def _chains(fused: Sequence[bool], level: Sequence[int], readers: dict[int, list[TensorUse]]) -> list[int]:
    """By decision: the first op of its chain; of others themselves."""
    first = list(range(len(fused)))

    def root(index: int) -> int:
        while first[index] != index:
            first[index] = first[first[index]]
            index = first[index]
        return index

    for index, uses in readers.items():
        for use in uses:
            if fused[index] and fused[use.target] and level[index] == level[use.target]:
                one, other = sorted((root(index), root(use.target)))
                first[other] = one
    return [root(index) for index in range(len(fused))]


def _shared(space: StrategySpace) -> dict[int, list[int]]:
    """By value with several readers: its readers, through views."""
    found = defaultdict[int, list[int]](list)
    top = list(range(len(space.strategy_sets)))
    for index in range(len(top)):
        if passes_on(space, index) and space.decisions[index].kind != "shared_read" and index in space.uses_by:
            top[index] = top[space.uses_by[index][0].source]
    for use in space.uses:
        source = top[use.source]
        if not passes_on(space, use.target) and space.decisions[source].kind == "shared_read":
            found[source].append(use.target)
    return found


def _is_fused(space: StrategySpace, index: int) -> bool:
    rule = space.strategy_sets[index].rule
    return (space.decisions[index].kind == "op" and rule is not None and not rule.alias and not rule.fixed
            and rule.op_class in FUSED_CLASSES)


def passes_on(space: StrategySpace, index: int) -> bool:
    """Whether a decision's result, and so its gradient, is its input's memory."""
    rule = space.strategy_sets[index].rule
    return space.decisions[index].kind == "shared_read" or (rule is not None and rule.alias and _is_one(space, index))


def _is_one(space: StrategySpace, index: int) -> bool:
    s: StrategySet = space.strategy_sets[index]
    return len(s.input_metas) == 1 and len(s.output_metas) == 1


def _origins(space: StrategySpace, fused: Sequence[bool]) -> list[int]:
    """By decision: the decision whose result it is, through views and shared reads."""
    origin = list(range(len(fused)))
    for index in range(len(fused)):
        if passes_on(space, index) and index in space.uses_by:
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
