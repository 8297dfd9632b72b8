"""Rules for users' own ops: one line, proven against the op itself, when it is registered and for each call in a model.

    autoparallel.register_rule("mylib::scaled_linear", "x[*b, k], w[n, k] -> y[*b, n]", reduce="k")

The rule of a call is proven again where the call is unlike what was proven: other arguments, types, numbers of dims or
lengths. A call for which it does not hold is treated as one of an op without a rule, with a warning.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from autoparallel.capture.graph import Ref
from autoparallel.errors import RuleError, shown
from autoparallel.rules import registry
from autoparallel.rules.notation import Notation
from autoparallel.rules.proof import PIECES, TOLERANCE, Run, as_usual, call, prove
from autoparallel.rules.registry import OpView
from autoparallel.rules.rule import Rule, einsum_rule
from autoparallel.rules.samples import Samples, hidden_by, tells

MAGNITUDES = (1.0, 1e-2, 10.0)
#: Of all inputs together, for a proof at the lengths that a model has.
MOST_ELEMENTS = 1 << 22
#: Types whose rounding is far above `TOLERANCE` (which float32 has kept to at registration).
COARSE = {torch.bfloat16: 5e-2, torch.float16: 1e-2}


def register_rule(
    op: str | Any,
    pattern: str,
    *,
    reduce: str = "",
    additive: str = "",
    linear: Sequence[str] = (),
    flops_per_point: float | None = None,
    arguments: Mapping[str, Any] | None = None,
    example: Sequence[Tensor] | None = None,
) -> None:
    """Tell how a custom op may be cut, in the notation of `einsum_rule`.

    ``op`` is ``"library::name"`` or ``"library::name.overload"``, the op itself, or a torch.autograd.Function (whose
    ``apply`` is then given the tensors, and after them the values of ``arguments``). A factor that the result lacks is
    summed over; ``reduce`` names such factors, ``additive`` inputs added to that sum (a bias), ``linear`` groups of
    inputs in which the op is jointly linear. ``flops_per_point`` per product of all factor sizes, finite and at least 0
    (2 where something is reduced, else 1).

    The rule is proven before it counts: every way of cutting is run on 2 and 3 shards of unequal lengths and compared
    with the whole, forward and gradients, with the keyword ``arguments``. ``example`` tensors say which dims the op
    takes and what values are valid; the tests are made from them, with factors of 5 entries or more. Without them the
    tests are float32 tensors of random numbers. A call in a model that differs from what was proven (arguments, types,
    numbers of dims, lengths) is proven when the model is planned; one for which the rule does not hold is treated as an
    op without a rule, with a warning.

    Raises RuleError when the op is unknown, writes to its inputs or is not the same twice, when the pattern or a name
    in it does not fit, when the op runs on no tensors that tell, or does otherwise than the rule says.
    """
    notation = Notation.parse(pattern, reduce, additive, linear)
    target = _resolve(op)
    _refuse_writes(target)
    claim = _Claim(target, notation, _checked_flops(flops_per_point, 2.0 if reduce else 1.0),
                   Samples.of(notation, _checked_example(example)))
    run = partial(_outputs, target, _checked_arguments(arguments))
    with as_usual():
        claim.prove_registered(run)
    registry.describe(target, claim.rule)


@dataclass(frozen=True)
class _Claim:
    """A registered rule, and the calls for which it was proven."""

    target: Any
    notation: Notation
    points: float
    samples: Samples
    held: dict[object, bool] = field(default_factory=dict)

    def rule(self, view: OpView) -> Rule | None:
        """The builder: None where the rule does not hold for this call."""
        constants = pytree.tree_map_only(Ref, lambda ref: None, (view.node.args, dict(view.node.kwargs)))
        key = repr(constants), view.inputs
        if key not in self.held:
            with as_usual():
                problem = self._problem(view)
            self.held[key] = problem is None
            if problem is not None:
                shapes = [list(shape) for shape in view.shapes]
                warnings.warn(f"the registered rule of {self.target} does not hold for a call with tensors of shapes "
                              f"{shapes} and arguments {shown(constants)}, which is treated as an op without a rule: "
                              f"{problem}", stacklevel=2)
        return self._rule_of(view.shapes, [meta.shape for meta in view.outputs]) if self.held[key] else None

    def prove_registered(self, run: Run) -> None:
        samples = self.samples
        if samples.example is not None:
            self._prove(run, samples.example)
        shapes = samples.shapes()
        usual = [samples.drawn(shapes, samples.dtypes, magnitude) for magnitude in MAGNITUDES]
        if samples.example is not None and not any(_runs(run, tensors) for tensors in usual):
            varied, plain = samples.resampled(shapes)
            hidden = hidden_by(plain)
            if hidden is not None and _runs(run, plain) and not _runs(run, varied):
                raise RuleError(f"the example's tensor {self.notation.inputs[hidden][0]!r} has equal entries, which "
                                f"hide what cutting does, and {self.target} runs on no others that were tried: give an "
                                "example of different entries")
        try:
            self._prove_on_some(run, [*usual, *samples.resampled(shapes)])
        except _UntriedError as error:
            raise RuleError(f"{error}{self._length_at_fault(run)}") from error

    def _problem(self, view: OpView) -> RuleError | None:
        """Why the rule does not hold for a call, with the call's own arguments."""
        run = partial(call, view.node)
        dtypes = [meta.dtype for meta in view.inputs]
        tolerance = max([COARSE.get(dtype, TOLERANCE) for dtype in dtypes], default=TOLERANCE)
        try:
            rule = self._rule_of(view.shapes, [meta.shape for meta in view.outputs])
            shapes_of = self.samples.shapes_like(rule)
            short = shapes_of(view.shapes, None)
            self._prove_on_some(run, [self.samples.drawn(short, dtypes, 1.0), self.samples.picked(short, dtypes)],
                                tolerance)
            for factor in rule.sizes:
                shapes = shapes_of(view.shapes, factor)
                if shapes != short and sum(map(math.prod, shapes)) <= MOST_ELEMENTS:
                    self._prove_on_some(run, [self.samples.drawn(shapes, dtypes, 1.0),
                                              self.samples.picked(shapes, dtypes)], tolerance, [factor])
        except RuleError as error:
            return error
        return None

    def _prove_on_some(self, run: Run, draws: Iterable[list[Tensor]], tolerance: float = TOLERANCE,
                       factors: Sequence[str] | None = None) -> None:
        """Prove a claim on all example tensors that the op takes and that can refute it; raises `_UntriedError` if
        there are none."""
        problem: RuleError | None = None
        told = False
        for tensors in draws:
            try:
                made = run(*(t.clone() for t in tensors))
            except RuleError as error:
                problem = problem or error
                continue
            if tells(made):
                self._prove(run, tensors, tolerance, factors)
                told = True
        if not told:
            raise _UntriedError(str(problem or f"{self.target} gives the same number everywhere on all tensors that "
                                    "were tried, which shows nothing: give example= tensors on which it does not"))

    def _prove(self, run: Run, tensors: list[Tensor], tolerance: float = TOLERANCE,
               factors: Sequence[str] | None = None) -> None:
        given = [t.clone() for t in tensors]
        made = run(*given)
        self._refuse_state(run, tensors, given, made)
        rule = self._rule_of([t.shape for t in tensors], [t.shape for t in made])
        for axis_strategy in rule.axis_strategies():
            if (axis_strategy.factor or any(p.kind == "P" for p in axis_strategy.inputs)) and (
                factors is None or axis_strategy.factor in factors
            ):
                for shards in PIECES:
                    prove(run, str(self.target), axis_strategy, shards, tensors, tolerance)

    def _refuse_state(self, run: Run, tensors: list[Tensor], given: list[Tensor], made: list[Tensor]) -> None:
        if not all(map(_equal, tensors, given)):
            raise RuleError(f"{self.target} writes to the tensors that it is given: write to copies (x.clone())")
        if not all(map(_equal, made, run(*tensors))):
            raise RuleError(f"{self.target} is not the same twice: an op that draws random numbers or remembers calls "
                            "has no rule")
        turned = [t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim()))) for t in tensors]
        try:
            again = run(*turned)
        except RuleError:  # of contiguous tensors only, which shards are
            return
        if not all(map(_near, made, again)):
            raise RuleError(f"{self.target} gives other numbers for the same tensors in other memory (transposed), and "
                            "shards lie in memory of their own: call .contiguous() in the op")

    def _length_at_fault(self, run: Run) -> str:
        """Factors whose longer dims the op refuses, one at a time."""
        example = self.samples.example
        if example is None:
            return ". (Every factor has a length of its own here: dims that are always equal have one name, or are .)"
        found = []
        for factor in self.samples.lengths():
            shapes = self.samples.shapes([factor])
            if not any(_runs(run, t) for t in (self.samples.drawn(shapes, self.samples.dtypes, 1.0),
                                               *self.samples.resampled(shapes))):
                found.append(f"{factor} = {self.samples.lengths()[factor]}")
        return (f"; it does not run with {' or '.join(found)}: shards have any length, so write . for a dim of a "
                "length that must be as it is" if found else "")

    def _rule_of(self, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Rule:
        self.notation.refuse_counts(len(inputs), len(outputs))
        matmul = self.notation.reduce and len(inputs) > 1
        return einsum_rule(
            self.notation.text, inputs, outputs, reduce=" ".join(self.notation.reduced(inputs)),
            additive=" ".join(self.notation.additive), linear=self.notation.linear, flops_per_point=self.points,
            op_class="matmul" if matmul else "elementwise", saves=frozenset(range(len(inputs))))


class _UntriedError(RuleError):
    """No example tensors ran, or none of them could tell a true rule from a wrong one."""


def _runs(run: Run, tensors: list[Tensor]) -> bool:
    try:
        run(*(t.clone() for t in tensors))
    except RuleError:
        return False
    return True


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


def _near(a: Tensor, b: Tensor) -> bool:
    wide = torch.complex128 if a.is_complex() else torch.float64
    scale = COARSE.get(a.dtype, TOLERANCE)
    return a.shape == b.shape and torch.allclose(a.to(wide), b.to(wide), rtol=scale, atol=scale, equal_nan=True)


def _resolve(op: str | Any) -> Any:
    if isinstance(op, type) and issubclass(op, torch.autograd.Function):
        return op
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op.default
    if isinstance(op, torch._ops.OpOverload):
        return op
    if not isinstance(op, str):
        raise RuleError(f"{shown(op)} is neither an op nor a torch.autograd.Function")
    match = re.fullmatch(r"(\w+)::(\w+)(?:\.(\w+))?", op)
    if match is None:
        raise RuleError(f"cannot read the op {op!r}: write library::name or library::name.overload")
    try:
        return getattr(getattr(getattr(torch.ops, match[1]), match[2]), match[3] or "default")
    except AttributeError:
        raise RuleError(f"there is no op {op!r}: import the module that defines it (torch.library.custom_op) first"
                        ) from None


def _refuse_writes(target: Any) -> None:
    if not isinstance(target, type) and target._schema.is_mutable:
        raise RuleError(f"{target} writes to its inputs ({target._schema}): register an op that returns its results")


def _checked_flops(given: Any, usual: float) -> float:
    if given is None:
        return usual
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given) or given < 0:
        raise RuleError(f"flops_per_point is {shown(given)}: give a finite number that is at least 0")
    return float(given)


def _checked_arguments(given: Any) -> Mapping[str, Any]:
    if given is not None and not (isinstance(given, Mapping) and all(isinstance(name, str) for name in given)):
        raise RuleError(f"arguments is {shown(given)}: give a dict of argument names and values")
    return given or {}


def _checked_example(given: Any) -> list[Tensor] | None:
    if given is None:
        return None
    if isinstance(given, Tensor) or not isinstance(given, Sequence) or not all(isinstance(t, Tensor) for t in given):
        raise RuleError(f"example is {shown(given)}: give a list of the op's tensors, one example")
    for t in given:
        if t.layout != torch.strided or t.is_meta or type(t) not in (Tensor, torch.nn.Parameter) or not t.numel():
            raise RuleError(f"example has a {type(t).__name__} of shape {list(t.shape)}, {t.layout}, on {t.device}: "
                            "give plain tensors with values")
    return [t.detach().clone() for t in given]


def _outputs(target: Any, arguments: Mapping[str, Any], *tensors: Tensor) -> list[Tensor]:
    try:
        if isinstance(target, type):
            made = target.apply(*tensors, *arguments.values())  # type: ignore[attr-defined]
        else:
            made = target(*tensors, **arguments)
    except Exception as error:
        shapes = [list(t.shape) for t in tensors]
        raise RuleError(f"{target} does not run on tensors of shapes {shapes}: {error}. Give example= (tensors) and "
                        "arguments= (the rest) that it runs on") from error
    results = list(made) if isinstance(made, (tuple, list)) else [made]
    if not results or not all(isinstance(result, Tensor) for result in results):
        raise RuleError(f"{target} returns {shown(made)}: an op with a rule returns tensors")
    return results
