"""einsum: the equation is the rule."""

from __future__ import annotations

import string
from collections.abc import Sequence

import torch

from autoparallel.rules.registry import OpView, rule_for
from autoparallel.rules.rule import Dims, Rule

aten = torch.ops.aten


def spelled_out(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Letters of each operand and of the result, with letters for an ellipsis and for a result that is not written.

    >>> spelled_out("...k,kn->...n", [3, 2])
    (['ABk', 'kn'], 'ABn')
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        once = sorted(letter for letter in set(left) - set(",.") if left.count(letter) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    spare = [letter for letter in string.ascii_uppercase + string.ascii_lowercase if letter not in equation]
    widths = [rank - len(term.replace("...", "")) if "..." in term else 0
              for term, rank in zip(terms, ranks, strict=True)]
    dots = "".join(spare[: max(widths)])
    terms = [term.replace("...", dots[len(dots) - width :]) for term, width in zip(terms, widths, strict=True)]
    return terms, right.replace("...", dots)


@rule_for(aten.einsum.default)
def einsum(op: OpView) -> Rule | None:
    """Each letter is a factor, but for one that an operand has twice (its diagonal) or broadcasts (size 1)."""
    terms, right = spelled_out(op.arg("equation"), [len(shape) for shape in op.shapes])
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, op.shapes, strict=True):
        for letter, size in zip(term, shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    points = 1.0
    for size in sizes.values():
        points *= size
    whole = {letter for term in terms for letter in term if term.count(letter) > 1}
    whole |= {letter for letter, size in sizes.items() if size == 1}
    factors = {letter: size for letter, size in sizes.items() if letter not in whole}

    def dims(term: str, shape: tuple[int, ...]) -> Dims:
        return tuple(f if f in factors and n != 1 else None for f, n in zip(term, shape, strict=True))

    return Rule(
        tuple(dims(term, shape) for term, shape in zip(terms, op.shapes, strict=True)), (dims(right, op.out.shape),),
        factors, reduce=frozenset(factors) - set(right), linear=tuple(frozenset({i}) for i in range(len(terms))),
        flops=(2.0 if len(terms) > 1 else 1.0) * points, op_class="matmul" if len(terms) > 1 else "reduction",
        saves=frozenset(range(len(terms))) if len(terms) > 1 else frozenset(),
    )
