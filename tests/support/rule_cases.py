"""Single ops whose rules are tried on several numbers of ranks."""

from __future__ import annotations

from typing import Any

import torch

from autoparallel.capture.graph import Node, Ref, TensorMeta
from benchmarks.rule_truth.cases import Case, alone
from benchmarks.rule_truth.claims import claims


def case_of(op: Any, *args: Any) -> Case:
    """A case with two draws of random inputs of the given shapes (tuples), and other arguments as they are."""
    shapes = [a for a in args if isinstance(a, tuple)]
    metas = [TensorMeta(shape, torch.float64, True) for shape in shapes]
    numbers = iter(range(len(shapes)))
    refs = tuple(Ref(next(numbers)) if isinstance(a, tuple) else a for a in args)
    generator = torch.Generator().manual_seed(1)
    draws = tuple(tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes) for _ in range(2))
    made = op(*(draws[0][a.node] if isinstance(a, Ref) else a for a in refs))
    outputs = tuple(TensorMeta(tuple(t.shape), t.dtype, t.is_floating_point())
                    for t in (made if isinstance(made, (tuple, list)) else (made,)))
    return Case(*alone(Node(0, "op", "op", op, refs, {}, outputs), metas), draws)


def strategies_that_hold(*arguments: Any) -> set[str]:
    """Names of the axis strategies claimed on 2, 3 and 4 ranks, forward and gradients; none may be wrong."""
    case, names = case_of(*arguments), set[str]()
    for num_ranks in (2, 3, 4):
        found, known = claims(case, num_ranks)
        assert known and not [claim for claim in found if claim.wrong]
        names |= {claim.axis_strategy for claim in found}
    return names
