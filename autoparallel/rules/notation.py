"""The notation in which users write rules, parsed strictly: unknown or missing names are errors."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autoparallel.errors import RuleError, shown
from autoparallel.rules.rule import Dims, expanded, parse_tensor

_EXAMPLE = "for example 'x[*b, k], w[n, k] -> y[*b, n]'"
_TENSOR = r"\s*\w+\s*\[[^\[\]]*\]\s*"
_FACTOR = r"\.|\*?[A-Za-z_]\w*"


@dataclass(frozen=True)
class Notation:
    """A pattern, and the names beside it. ``inputs`` and ``outputs``: each tensor's name and factors."""

    text: str
    inputs: tuple[tuple[str, Dims], ...]
    outputs: tuple[tuple[str, Dims], ...]
    reduce: tuple[str, ...]
    additive: tuple[str, ...]
    linear: tuple[str, ...]

    @classmethod
    def parse(cls, pattern: Any, reduce: Any = "", additive: Any = "", linear: Any = ()) -> Notation:
        """Raises RuleError for what cannot be read, and for names that the pattern does not have."""
        if not isinstance(pattern, str):
            raise RuleError(f"the pattern is {shown(pattern)}: give text, {_EXAMPLE}")
        if not re.fullmatch(rf"{_TENSOR}(,{_TENSOR})*->{_TENSOR}(,{_TENSOR})*", pattern):
            raise RuleError(f"cannot read the pattern {pattern!r}: write name[factor, factor, ...] for each tensor, "
                            f"with commas between them and one ->, {_EXAMPLE}")
        inputs, outputs = (tuple(parse_tensor(t) for t in re.findall(_TENSOR, side)) for side in pattern.split("->"))
        _refuse_tensors(pattern, inputs, outputs)
        given = [factor for _, dims in inputs for factor in dims if factor is not None]
        left = {factor for _, dims in outputs for factor in dims}
        for factor in sorted(left - {None, *given}, key=str):
            raise RuleError(f"pattern {pattern!r}: no input has the factor {factor!r} of a result"
                            f"{_nearest(str(factor), given)}; write . for a dim that the op makes")
        if isinstance(linear, str) or not isinstance(linear, Sequence):
            raise RuleError(f"linear is {shown(linear)}: give a list of groups of inputs, for example ['x', 'w']")
        factors = {factor.lstrip("*"): factor for factor in given}
        reduced = tuple(factors[n.lstrip("*")] for n in _names("reduce", reduce, factors, "factor", pattern))
        for factor in reduced:
            if factor in left:
                raise RuleError(f"reduce={reduce!r}: a result of {pattern!r} has the factor {factor!r}, so it is not "
                                "summed over")
        tensors = [name for name, _ in inputs]
        groups = tuple(" ".join(_names("linear", group, tensors, "input", pattern)) for group in linear)
        if "" in groups:
            raise RuleError(f"linear={list(linear)!r} has a group without inputs: name at least one of {tensors}")
        added = _names("additive", additive, tensors, "input", pattern)
        for name in added:
            if set(reduced) <= set(dict(inputs)[name]):
                raise RuleError(f"additive={additive!r}: {name!r} has every factor of reduce={reduce!r}, so nothing is "
                                "summed to which it would be added once")
        return cls(pattern, inputs, outputs, reduced, added, groups)

    def refuse_counts(self, num_inputs: int, num_outputs: int) -> None:
        """Inputs may be fewer (optional ones at the end)."""
        if not 0 < num_inputs <= len(self.inputs) or num_outputs != len(self.outputs):
            raise RuleError(f"rule {self.text!r} has {len(self.inputs)} inputs and {len(self.outputs)} results, the op "
                            f"{num_inputs} and {num_outputs}")

    def dims(self, shapes: Sequence[Sequence[int]]) -> list[Dims]:
        """The factors of inputs of these shapes, dim by dim."""
        return [expanded(dims, shape, self.text) for (_, dims), shape in zip(self.inputs, shapes, strict=False)]

    def reduced(self, shapes: Sequence[Sequence[int]]) -> list[str]:
        """Factors that are summed over, where inputs have these shapes."""
        plain = [factor for factor in self.reduce if not factor.startswith("*")]
        stars = [factor[1:] for factor in self.reduce if factor.startswith("*")]
        own = {factor for dims in self.dims(shapes) for factor in dims if factor is not None}
        return plain + sorted(f for f in own if any(re.fullmatch(rf"{star}\d+", f) for star in stars))


def _refuse_tensors(pattern: str, inputs: Iterable[tuple[str, Dims]], outputs: Iterable[tuple[str, Dims]]) -> None:
    names: set[str] = set()
    every = [*inputs, *outputs]
    stars = {d[1:] for _, dims in every for d in dims if d is not None and d.startswith("*")}
    for name, dims in every:
        if name in names:
            raise RuleError(f"pattern {pattern!r}: two tensors are called {name!r}")
        names.add(name)
        known = [d for d in dims if d is not None]
        for factor in known:
            if not re.fullmatch(_FACTOR, factor):
                raise RuleError(f"pattern {pattern!r}: {factor!r} is no factor: write a name, *name for all leading "
                                "dims, or . for a dim that stays whole, with commas between them")
            if known.count(factor) > 1:
                raise RuleError(f"pattern {pattern!r}: {name!r} has the factor {factor!r} twice; cutting a dim would "
                                "leave the other whole: write . for both")
            if factor in stars or re.sub(r"\d+$", "", factor) in stars:
                raise RuleError(f"pattern {pattern!r}: {factor!r} is also a dim of "
                                f"'*{re.sub(r'[0-9]+$', '', factor)}': give it another name")
        if sum(factor.startswith("*") for factor in known) > 1:
            raise RuleError(f"pattern {pattern!r}: {name!r} has more than one *: which dims are whose is not known")


def _names(option: str, text: Any, known: Iterable[str], kind: str, pattern: str) -> tuple[str, ...]:
    if not isinstance(text, str):
        raise RuleError(f"{option} has {shown(text)}: give names as text, for example {option}='k'"
                        if option != "linear" else f"linear has {shown(text)}: give text, for example 'x w'")
    for name in text.replace(",", " ").split():
        if name.lstrip("*") not in known:
            raise RuleError(f"{option}={text!r}: pattern {pattern!r} has no {kind} {name!r}"
                            f"{_nearest(name, known) or f'; it has {sorted(set(known))}'}")
    return tuple(text.replace(",", " ").split())


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, [str(k) for k in known], n=1, cutoff=0.3)
    return f"; the nearest is {close[0]!r}" if close else ""
