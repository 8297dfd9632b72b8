"""What an op allows, as data: a map from tensor dims to factors (loop indices), as einsum has it.

    Rule.parse("x[b, s, k], w[n, k], bias[n] -> y[b, s, n]", reduce="k", additive="bias")

The map gives the op's strategies on one mesh axis (`AxisStrategy`): the factor that the axis cuts, and from it the
placement of each tensor.

    axis assigned to ...             tensor with the factor    tensor without it        output without it
    a factor of some output          S(dim)                    R (its gradient is P)    -
    a reduced factor                 S(dim)                    R; additive inputs P     P
    nothing, work for everybody      I                         I                        I
    nothing, work for a part         R                         R                        R
    nothing, op linear in `linear`   P on those inputs         R on the others          P
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoparallel.errors import RuleError
from autoparallel.layout import INVARIANT, PARTIAL, REPLICATE, Placement, shard

Dims = tuple[str | None, ...]


@dataclass(frozen=True)
class Exchange:
    """Communication inside a variant, along its axis: ``action`` on ``bytes_per_element`` for each element of the shard
    of input ``input``, so often forward and backward. Actions: all_reduce, all_gather, all_to_all; neighbours: to one
    or two ranks; ring: a shard goes once around while the op computes; ring_gradients: its gradients follow one rank
    behind. ``kept``: the op works on an exchanged copy of its shard, which lives as long as what it makes. ``whole``:
    for each element of what the axis cuts, as of neighbours, who send as much however short shards are. ``fixed``:
    ``bytes_per_element`` are those of the whole message, however long the shard is."""

    action: str
    input: int
    bytes_per_element: float
    forward: int = 1
    backward: int = 0
    kept: bool = False
    whole: bool = False
    fixed: bool = False


@dataclass(frozen=True)
class AxisStrategy:
    """One way to run an op along one mesh axis.

    ``inputs`` and ``outputs`` are placements in the order of the node's tensors. ``factor`` is the loop index that the
    axis cuts ("" for none). ``even`` lists sizes that the number of shards must divide. A ``variant`` names a local
    program other than the op itself (`kernels.variants`), with communication of its own (``inside``); those named in
    ``apart`` cannot stand beside it on another axis. Inputs ``unsaved`` it does not keep for backward, unlike the op.
    Of a ``triangular`` strategy the last of n shards is the most work: 2 - 1/n times an even share; not where 2n
    divides the length ``halved``, so that ranks with two chunks each have equal work (0: never). An ``inner`` one cuts
    shards of its factor further: of the strategies of one factor, only inner ones may be on a later axis.
    """

    name: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    factor: str = ""
    even: tuple[int, ...] = ()
    variant: str = ""
    inside: tuple[Exchange, ...] = ()
    apart: frozenset[str] = frozenset()
    unsaved: frozenset[int] = frozenset()
    triangular: bool = False
    halved: int = 0
    inner: bool = False


@dataclass(frozen=True)
class Rule:
    """The factors of one op at one set of shapes.

    ``inputs[i][d]`` is the factor of dim d of tensor input i (None: the dim must stay whole). ``reduce``: factors
    summed over. ``additive``: inputs added to a sum (a bias). ``linear``: groups of inputs in which the op is jointly
    linear when the others are held. ``even[f]``: sizes that the shards of factor f must divide. ``fixed``: every tensor
    must be whole and the same everywhere (not R either; for ops whose result depends on more than their inputs).
    ``flops`` of one forward call; ``op_class`` names the efficiency curve; ``saves`` says which inputs (by position)
    and whether the output are kept for backward; ``alias`` ops move no data; ``extra_bytes[i]`` per element of input i
    are kept too (a dropout's mask, what a norm knows of a row), and so are ``work_bytes``, which the op makes inside as
    it works: a rank that does a part of the work makes a part of them. (``product_bytes``: of the results of products
    among them, all that selective recompute keeps.) ``backward_flops`` per forward flop, when all inputs need
    gradients. ``gradient_ops``: as many element-wise ops make an input's gradient (none where it is the output's, or an
    expanded view of it).
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    reduce: frozenset[str] = frozenset()
    additive: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    even: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    fixed: bool = False
    flops: float = 0.0
    op_class: str = "elementwise"
    saves: frozenset[int] = frozenset()
    saves_output: bool = False
    alias: bool = False
    random: bool = False
    extra_bytes: Mapping[int, float] = field(default_factory=dict)
    work_bytes: float = 0.0
    product_bytes: float = 0.0
    backward_flops: float = 2.0
    gradient_ops: int = 1
    variants: tuple[AxisStrategy, ...] = ()

    @property
    def keeps_own(self) -> bool:
        """Whether backward needs what the op makes: its output, or values that it makes inside."""
        return self.saves_output or bool(self.extra_bytes) or self.work_bytes > 0

    def axis_strategies(self) -> tuple[AxisStrategy, ...]:
        """All of them, repeated work first; what the mesh axis and the shapes forbid is left to the caller."""
        whole = tuple(INVARIANT for _ in self.inputs), tuple(INVARIANT for _ in self.outputs)
        found = [AxisStrategy("repeat", *whole)]
        if self.fixed:
            return tuple(found)
        if self.inputs:
            found.append(
                AxisStrategy("part", tuple(REPLICATE for _ in self.inputs), tuple(REPLICATE for _ in self.outputs))
            )
        for group in self.linear:
            inputs = tuple(PARTIAL if i in group else REPLICATE for i in range(len(self.inputs)))
            names = ",".join(str(i) for i in sorted(group))
            found.append(AxisStrategy(f"linear({names})", inputs, tuple(PARTIAL for _ in self.outputs)))
        found.extend(self._factor_strategy(factor) for factor in self.sizes)
        return (*found, *self.variants)

    def _factor_strategy(self, factor: str) -> AxisStrategy:
        inputs = []
        for position, dims in enumerate(self.inputs):
            if factor in dims:
                inputs.append(shard(dims.index(factor)))
            else:
                added = factor in self.reduce and position in self.additive
                inputs.append(PARTIAL if added else REPLICATE)
        outputs = tuple(shard(dims.index(factor)) if factor in dims else PARTIAL for dims in self.outputs)
        return AxisStrategy(factor, tuple(inputs), outputs, factor, self.even.get(factor, ()))


def parse_tensor(text: str) -> tuple[str, Dims]:
    match = re.fullmatch(r"\s*(\w+)\s*\[([^\]]*)\]\s*", text)
    if match is None:
        raise RuleError(f"cannot read {text!r}: write a tensor as name[factor, factor, ...], with . for a whole dim")
    dims = tuple(d.strip() for d in match[2].split(",") if d.strip())
    return match[1], tuple(None if d == "." else d for d in dims)


def einsum_rule(
    pattern: str,
    input_shapes: Sequence[Sequence[int]],
    output_shapes: Sequence[Sequence[int]],
    *,
    reduce: str = "",
    additive: str = "",
    linear: Sequence[str] = (),
    flops_per_point: float = 0.0,
    **rest: object,
) -> Rule:
    """A rule from a pattern such as ``x[*b, k], w[n, k], bias[n] -> y[*b, n]``.

    ``*b`` stands for as many leading dims as the tensor has more than named ones. ``.`` is a dim that stays whole, and
    so is every dim of size 1 (it is broadcast). Inputs may be fewer than the pattern's (optional ones at the end).
    FLOP are ``flops_per_point`` times the product of all factor sizes.

    Raises RuleError when the pattern does not fit the shapes.
    """
    left, right = (part.strip() for part in pattern.split("->"))
    named = [parse_tensor(t) for t in re.findall(r"\*?\w+\s*\[[^\]]*\]", left)][: len(input_shapes)]
    results = [parse_tensor(t) for t in re.findall(r"\w+\s*\[[^\]]*\]", right)]
    sizes: dict[str, int] = {}
    inputs = tuple(
        _bind(dims, shape, sizes, pattern) for (_, dims), shape in zip(named, input_shapes, strict=True)
    )
    outputs = tuple(_bind(dims, shape, sizes, pattern) for (_, dims), shape in zip(results, output_shapes, strict=True))
    positions = {name: i for i, (name, _) in enumerate(named)}
    points = 1.0
    for size in sizes.values():
        points *= size
    return Rule(
        inputs,
        outputs,
        sizes,
        reduce=frozenset(reduce.split()),
        additive=frozenset(positions[n] for n in additive.split() if n in positions),
        linear=tuple(frozenset(positions[n] for n in group.split() if n in positions) for group in linear),
        flops=flops_per_point * points,
        **rest,  # type: ignore[arg-type]
    )


def expanded(dims: Dims, shape: Sequence[int], pattern: str) -> Dims:
    """The dims of a tensor of this shape: ``*b`` becomes ``b0, b1, ...``.

    Raises RuleError when they are not as many as the tensor has.
    """
    stars = [i for i, d in enumerate(dims) if d is not None and d.startswith("*")]
    if stars:
        at, extra = stars[0], len(shape) - len(dims) + 1
        prefix = dims[at][1:]  # type: ignore[index]
        dims = (*dims[:at], *(f"{prefix}{i}" for i in range(extra)), *dims[at + 1 :])
    if len(dims) != len(shape):
        raise RuleError(f"rule {pattern!r} gives {len(dims)} dims to a tensor of shape {list(shape)}")
    return dims


def _bind(dims: Dims, shape: Sequence[int], sizes: dict[str, int], pattern: str) -> Dims:
    dims = expanded(dims, shape, pattern)
    bound: list[str | None] = []
    for factor, size in zip(dims, shape, strict=True):
        if factor is None or size == 1:
            bound.append(None)
        elif sizes.setdefault(factor, size) != size:
            raise RuleError(f"rule {pattern!r}: factor {factor} is {sizes[factor]} and {size} (shape {list(shape)})")
        else:
            bound.append(factor)
    return tuple(bound)

