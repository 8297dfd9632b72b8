"""Stages of a pipeline that run alike, such as those of equal blocks: one is simulated for all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoparallel.pricing.equivalence import numbered
from autoparallel.pricing.problem import SpacePricer
from autoparallel.pricing.rank_reads import members_of
from autoparallel.strategies.space import Strategy

#: A decision that a stage does not have.
ELSEWHERE = -1


def alike_stages(pricer: SpacePricer, strategies: Sequence[Strategy]) -> Sequence[int]:
    """By stage the first one whose rank runs the same tasks in the same order: equal decisions by their order in the
    stage, with equal strategies, operands and blocks.

    Itself each where stages may have devices, NICs, tables or tiers of their own.
    """
    counts, number = pricer.counts, pricer.counts.hybrid.stages
    hybrid = counts.hybrid
    if (pricer.prices.stages_differ or counts.one_for_all or hybrid.offload.is_away or hybrid.on_host
            or hybrid.saved_on != "device" or counts.sparse.density):
        return range(number)
    decisions, uses, blocks = _rows(pricer, strategies)
    sources, targets = pricer.costs.kinds.use_ends
    found, first = list[int](), dict[tuple[object, ...], int]()
    for stage in range(number):
        members = np.array(members_of(pricer).get(stage, []), np.int64)
        place = np.full(len(pricer.space), ELSEWHERE)
        place[members] = np.arange(len(members))
        here = np.flatnonzero(place[targets] != ELSEWHERE)
        ends = np.stack([place[sources[here]], place[targets[here]]])
        between = [np.searchsorted(members, ends_of_block[members]) for ends_of_block in blocks[3:]]
        key = (stage == 0, counts.micro_batches_on(stage), decisions[members].tobytes(), uses[here].tobytes(),
               ends.tobytes(), *(_renumbered(of[members]) for of in blocks[:3]), *(one.tobytes() for one in between))
        found.append(first.setdefault(key, stage))
    return found


def _rows(pricer: SpacePricer, strategies: Sequence[Strategy]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """A row of facts for each decision, and for each use; and by decision: the numbers of its block, of the one that is
    recomputed and of the one whose parameters are gathered together, and where recompute of that begins, stops and
    ends."""
    costs, counts, space = pricer.costs, pricer.counts, pricer.space
    kinds, again, nodes = costs.kinds, pricer.counts.blocks, space.graph.nodes
    numbers, (sources, _) = kinds.numbers(strategies), kinds.use_ends
    of = costs.memo.once("facts of stages", lambda: (
        np.stack([kinds.anywhere, numbered(at if len(at) > 1 else 0 for at in counts.stages_of),
                  numbered(d.kind for d in space.decisions), counts.views,
                  numbered(nodes[d.node].target if d.kind == "op" else None for d in space.decisions)], axis=1),
        np.stack([kinds.anywhere[sources], [use.output for use in space.uses], [use.position for use in space.uses],
                  list(map(counts.crosses, space.uses)), list(map(counts.saved.copy_is_kept, space.uses)),
                  list(map(counts.reads_again, space.uses))], axis=1),
        [np.array(numbered(some)) for some in (space.blocks, again.of, again.gathered)]
        + [np.array([ELSEWHERE if block is None else some.get(block, ELSEWHERE) for block in again.of])
           for some in (again.starts, again.ends, again.last)]))
    return (np.column_stack([of[0], numbers]), np.column_stack([of[1], numbers[sources]]), of[2])


def _renumbered(numbers: np.ndarray) -> bytes:
    """Numbers in order of appearance."""
    return np.array(numbered(numbers.tolist())).tobytes()


__all__ = ["alike_stages"]
