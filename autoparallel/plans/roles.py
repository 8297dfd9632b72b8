"""Roles of a plan's mesh axes, in the field's words, recognised from strategies and layouts.

    roles_of(plan)  ->  Roles(axes=(AxisRole("dp", 2, "data", shards=True), AxisRole("tp", 2, "tensor", sequence=True)),
                              zero_stage=3, pipeline_ranks=1, micro_batches=1, ...)

    | role       | products and attention on this axis                                                        |
    |------------|--------------------------------------------------------------------------------------------|
    | data       | each rank has rows of the batch                                                            |
    | context    | each rank has a part of every sequence (or image)                                          |
    | tensor     | each rank has heads, columns or rows of weights                                            |
    | expert     | each rank has experts; everything else as data                                             |
    | replicated | all ranks compute the same                                                                 |

The role of an axis is that of most of the weights whose products it cuts (attention and other ops without a weight
count as one element); products with another are its departures.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autoparallel.plans.plan import Plan
from autoparallel.schedule.schedules import usual
from autoparallel.schedule.step_config import Hybrid

ROLES = ("data", "context", "tensor", "expert", "replicated")
_PLACEMENT = re.compile(r"S\(\d+(;\d+)?\)|[RIP]")
_ATTENTION = ("scaled_dot_product_attention", "flex_attention")
_EXPERTS = ("autoparallel.routed_experts",)
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d.input",
                 "conv_transpose3d.input")
_PRODUCTS = ("linear", "autoparallel.linear_sections", "mm", "matmul", "bmm", "addmm", "einsum", "_grouped_mm")
_NORMS = ("rsqrt", "rms_norm", "layer_norm", "native_layer_norm", "group_norm")


@dataclass(frozen=True)
class Product:
    """A product of matrices, convolution, attention or mixture of experts of a plan. ``module``: its path ("" outside
    modules). ``strategies``, ``layouts`` (of the result) and ``roles``: by mesh axis. ``flops``: forward, of a
    micro-batch (1 for each, where the plan does not know them)."""

    module: str
    op: str
    strategies: tuple[str, ...]
    layouts: tuple[str, ...]
    roles: tuple[str, ...]
    flops: float = 1.0


@dataclass(frozen=True)
class AxisRole:
    """The role of one mesh axis (a key of the table above).

    ``shards``: whether ranks of a data, context or expert axis store shards of parameters, which are gathered before
    they are read (FSDP, ZeRO). ``sequence``: whether norms and residuals on a tensor axis are cut along the sequence.
    ``experts``: whether it cuts experts. ``departures``: products with another role, as "path op: strategy (role)".
    ``departures_shard``: as ``shards``, of the weights of those that are data parallel. ``by_heads``: whether it cuts
    attention by heads. ``share``: of the products' FLOPs, those of products with the role. ``whole``: where it
    shards, the parameters that it stores whole all the same.
    """

    name: str
    size: int
    role: str
    shards: bool = False
    sequence: bool = False
    experts: bool = False
    departures: tuple[str, ...] = ()
    departures_shard: bool = False
    by_heads: bool = False
    share: float = 1.0
    whole: tuple[str, ...] = ()


@dataclass(frozen=True)
class Roles:
    """Degrees and settings of a plan. ``axes``: of a stage's mesh, slowest links first. ``zero_stage``: 0 if no
    parameter is stored in shards, else 1 to 3. ``by_speed``: data-parallel ranks of the mesh's first axis, each with
    its own number of micro-batches. ``virtual``: pipeline stages of each pipeline rank."""

    axes: tuple[AxisRole, ...]
    zero_stage: int = 0
    pipeline_ranks: int = 1
    virtual: int = 1
    schedule: str = usual()
    micro_batches: int = 1
    recompute: str = "none"
    by_speed: int = 1

    def degree(self, role: str) -> int:
        """Ranks along all axes of a role.

        >>> Roles((AxisRole("dp", 4, "data"), AxisRole("tp", 2, "tensor"))).degree("tensor")
        2
        """
        count = 1
        for axis in self.axes:
            count *= axis.size if axis.role == role else 1
        return count

    @property
    def data(self) -> int:
        """Data-parallel ranks, with those of expert axes, which share the batch as well."""
        return self.by_speed * self.degree("data") * self.degree("expert")

    @property
    def tensor(self) -> int:
        return self.degree("tensor")

    @property
    def context(self) -> int:
        return self.degree("context")

    @property
    def expert(self) -> int:
        """Ranks among which experts are divided, over whichever axes."""
        count = 1
        for axis in self.axes:
            count *= axis.size if axis.experts else 1
        return count

    @property
    def sequence_parallel(self) -> bool:
        return any(axis.sequence for axis in self.axes)

    @property
    def shards(self) -> int:
        """Data-parallel ranks among which parameters are stored in shards (HSDP: fewer than ``data``)."""
        count = 1
        for axis in self.axes:
            count *= axis.size if axis.shards and axis.role in ("data", "expert") else 1
        return count

    @property
    def departures(self) -> tuple[str, ...]:
        return tuple(f"axis {axis.name}: {text}" for axis in self.axes for text in axis.departures)

    @property
    def family(self) -> str:
        """The kind of plan, by what it has of pipeline, axes for experts, tensor and context parallelism and ZeRO ("":
        nothing). Experts that lie along a tensor-parallel axis make no other kind.

        >>> Roles((AxisRole("dp", 4, "data", shards=True), AxisRole("tp", 2, "tensor")), zero_stage=3).family
        'FSDP with tensor parallel'
        >>> Roles((AxisRole("dp", 4, "data"),)).family, Roles(()).family
        ('DDP', '')
        """
        experts = any(axis.role == "expert" for axis in self.axes)
        if self.pipeline_ranks > 1:
            return "pipeline and expert parallel" if experts else "pipeline parallel"
        if experts:
            return "expert parallel"
        if self.tensor > 1:
            return "FSDP with tensor parallel" if self.zero_stage == 3 else "tensor parallel"
        if self.context > 1:
            return "context parallel"
        zero = {3: "FSDP", 2: "ZeRO-2", 1: "ZeRO-1", 0: "DDP"}[self.zero_stage]
        return zero if self.data > 1 else ""

    def __str__(self) -> str:
        """``data 2 (in shards) x tensor 4 (with sequence), pipeline 2, ...``."""
        parts = [f"{axis.role} {axis.size}" + (" (in shards)" if axis.shards else "")
                 + (" (norms along the sequence)" if axis.sequence else "")
                 + (" (experts)" if axis.experts and axis.role != "expert" else "") for axis in self.axes]
        parts = [f"data {self.by_speed} (by speed)"] * (self.by_speed > 1) + parts
        settings = [f"pipeline {self.pipeline_ranks} ({self.schedule}" + (f", {self.virtual} stages a rank" if
                    self.virtual > 1 else "") + ")"] if self.pipeline_ranks > 1 else []
        settings += [f"ZeRO {self.zero_stage}"] if self.zero_stage else []
        settings += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        settings += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        return ", ".join([" x ".join(parts), *settings])


def roles_of(plan: Plan) -> Roles:
    """The roles of a plan's axes, searched or by hand, also of one read from a file."""
    products = list(products_of(plan))
    axes = tuple(_axis(plan, products, axis) for axis in range(len(plan.mesh_shape)))
    hybrid: Hybrid = plan.hybrid
    stored = any(axis.shards for axis in axes)
    piped, by_speed = (1, hybrid.pipeline_ranks) if hybrid.by_rank else (hybrid.pipeline_ranks, 1)
    return Roles(axes, max(1, hybrid.zero_stage) if stored else 0, piped,
                 max(1, hybrid.stages // hybrid.pipeline_ranks), hybrid.schedule, hybrid.micro_batches,
                 hybrid.recompute, by_speed)


def products_of(plan: Plan) -> Iterator[Product]:
    """The products, convolutions, attentions and mixtures of experts, in execution order within each block."""
    for block in plan.blocks:
        work = block.flops or (1.0,) * len(block.lines)
        for path in block.paths:
            for (name, strategy, layout), flops in zip(block.lines, work, strict=True):
                *module, op = name.split(" ")
                if op in (*_PRODUCTS, *_ATTENTION, *_EXPERTS, *_CONVOLUTIONS):
                    inside = "" if path == "outside blocks" else path
                    where = ".".join(filter(None, (inside, *module)))
                    strategies, layouts = tuple(strategy.split("·")), tuple(layout.split("·"))
                    roles = tuple(_role(op, s, at) for s, at in zip(strategies, layouts, strict=True))
                    yield Product(where, op, strategies, layouts, roles, flops)


def parameters_of(plan: Plan) -> dict[str, tuple[str, ...]]:
    """The storage of each parameter and buffer, by name: "S(0)" or "I" by mesh axis."""
    return {name: layout for name, layout in plan.strategies.items()
            if ("." in name or name in ("weight", "bias")) and ":" not in name
            and all(_PLACEMENT.fullmatch(placement) for placement in layout)}


def _role(op: str, strategy: str, layout: str) -> str:
    """The role of one strategy of one product on one axis."""
    if strategy in ("repeat", "part"):
        return "replicated"
    if op in _EXPERTS:
        return {"t": "data", "dispatch": "expert"}.get(strategy, "tensor")
    if op in _ATTENTION:
        return "data" if strategy[0] == "b" else "tensor" if strategy == "h" else "context"
    if op in _CONVOLUTIONS:
        return {"S(0)": "data", "S(1)": "tensor", "P": "tensor"}.get(layout, "context")
    if layout == "P" or strategy.partition(";")[0] in ("n", "k"):
        return "tensor"
    return "data" if strategy in ("b", "b0", "m") or layout == "S(0)" else "context"


def _axis(plan: Plan, products: list[Product], axis: int) -> AxisRole:
    votes = Counter[str]()
    for product in products:
        if product.op not in _EXPERTS:
            votes[product.roles[axis]] += 1 + math.prod(plan.model.parameters.get(f"{product.module}.weight", (0,)))
    role = max(ROLES, key=lambda one: votes[one]) if votes else _role_of_inputs(plan, axis)
    experts = [product for product in products if product.op in _EXPERTS]
    cut = any(product.strategies[axis] in ("e", "dispatch") for product in experts)
    if cut and role == "data":
        role = "expert"
    expected = {"expert": ("data",)}.get(role, (role,))
    others = [product for product in products if product.roles[axis] not in expected
              and not (product in experts and role in ("expert", "tensor") and (cut or _takes_tokens(product, axis)))]
    of_experts = tuple(f"{product.module}." for product in experts if cut)
    own = {name: layout for name, layout in parameters_of(plan).items() if not name.startswith(of_experts or "\0")}
    shards = role != "tensor" and _mostly_sharded(plan, own, axis)
    alone = {name: own[name] for p in others if p.roles[axis] == "data" and (name := f"{p.module}.weight") in own}
    departures = tuple(f"{p.module or 'the model'} {p.op}: {p.strategies[axis]} ({p.roles[axis]})" for p in others)
    return AxisRole(plan.axis_names[axis], plan.mesh_shape[axis], role, shards,
                    role == "tensor" and _is_cut_along_sequence(plan, axis), cut, departures,
                    bool(alone) and _mostly_sharded(plan, alone, axis),
                    any(p.op in _ATTENTION and p.strategies[axis] == "h" for p in products),
                    1 - sum(p.flops for p in others) / (sum(p.flops for p in products) or 1.0),
                    tuple(name for name, at in own.items() if at[axis] == "I" and name in plan.model.parameters)
                    if shards else ())


def _takes_tokens(experts: Product, axis: int) -> bool:
    """Whether ranks of an axis have other tokens for experts, whose rows travel over another axis."""
    return experts.strategies[axis] == "t" and "dispatch" in experts.strategies


def _mostly_sharded(plan: Plan, stored: Mapping[str, tuple[str, ...]], axis: int) -> bool:
    """Whether most elements of these parameters (of a plan without their shapes: most of them) are stored in shards on
    an axis."""
    shapes = plan.model.parameters
    sizes = {name: math.prod(shapes.get(name, (0,) if shapes else ())) for name in stored}
    return 2 * sum(sizes[name] for name, layout in stored.items() if layout[axis][0] == "S") > sum(sizes.values())


def _role_of_inputs(plan: Plan, axis: int) -> str:
    """The role of an axis in a plan without products: "data" or "context" if an input is sharded along dim 0 or 1, else
    "replicated"."""
    stored = parameters_of(plan)
    given = [layout[axis] for name, layout in plan.strategies.items()
             if name not in stored and len(layout) > axis and _PLACEMENT.fullmatch(layout[axis])]
    return "data" if "S(0)" in given else "context" if "S(1)" in given else "replicated"


def _is_cut_along_sequence(plan: Plan, axis: int) -> bool:
    """Whether some norm or sum of residuals is: a gather may come before or after a norm."""
    return any(layout.split("·")[axis] == "S(1)" for block in plan.blocks for name, _, layout in block.lines
               if name == "add" or name.rsplit(" ", 1)[-1] in _NORMS)


__all__ = ["ROLES", "AxisRole", "Product", "Roles", "parameters_of", "products_of", "roles_of"]
