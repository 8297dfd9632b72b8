"""Classical plans as restrictions of the same strategy space: ddp, fsdp, tensor_parallel, sequence_parallel, and plans
by hand (`planning.by_hand`).

A baseline assigns a role to each mesh axis. A role fixes the layouts of parameters and the redistributions that
parameters and activations may take; any other counts as a penalty. The search finds the plan with the fewest penalties
(none, if the model allows the classical plan), and the cheapest among those.

    | role     | parameters                | their redistributions | activations' redistributions          |
    |----------|---------------------------|-----------------------|---------------------------------------|
    | data     | replicated                | I -> R (all-reduce of | none (P -> I for batch statistics)    |
    |          |                           | the gradient)         |                                       |
    | shard    | S(first dim that can; of  | S -> R                | the same                              |
    |          | several axes: any)        |                       |                                       |
    | tensor   | matrices S, others I      | none                  | I -> R, P -> I                        |
    | sequence | the same                  | I -> R                | S(1) -> R, P -> S(1)                  |
    | context  | as data (context shard:   | I -> R (S -> R)       | none; inputs are S(1), products are   |
    |          | as shard)                 |                       | cut along the sequence                |
    | expert   | experts S(0), others as   | I -> R; of experts    | none (within the op rows travel to    |
    |          | data (expert shard: as    | none (S -> R)         | their experts: "dispatch")            |
    |          | shard)                    |                       |                                       |

Beside an expert axis, a tensor or sequence axis leaves experts whole and gives each of its ranks other tokens for them
(Megatron-LM's expert tensor parallelism of 1): their rows may be cut and gathered over it.

With several axes, tensor and sequence parallelism take the last one (the fastest links) and data parallelism the
others. FSDP gathers over all axes at once, so each rank's own shard crosses the slow links. Two gathers do the same if
the slow axis comes first, which is possible if the two axes shard different dims.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autoparallel.capture import TensorMeta
from autoparallel.errors import PlanError
from autoparallel.layout import Placement, RedistributionTable
from autoparallel.layout.redistribution import ACTIONS, COLLECTIVES, Axes
from autoparallel.pricing.chains import is_cast
from autoparallel.strategies.space import StrategySpace, TensorUse
from cost_models.compute import MATRIX

#: Penalties: of what a role may need, and the upper bound of an edge's penalties.
LITTLE, IMPOSSIBLE = 1e-2, 1e6
NAMES = ("ddp", "fsdp", "tensor_parallel", "sequence_parallel")
#: Those whose data-parallel ranks store parameters in shards.
SHARDING = ("fsdp",)
#: Redistributions of parameters that a role allows, and the dim of inputs that it shards.
_OF_PARAMETERS = {"data": ("IR",), "shard": ("SR", "IR"), "tensor": (), "sequence": ("IR",), "context": ("IR",),
                  "context shard": ("SR", "IR"), "expert": ("IR",), "expert shard": ("SR", "IR")}
_INPUT_DIMS = {"data": 0, "shard": 0, "expert": 0, "expert shard": 0, "context": 1, "context shard": 1}
_EXPERT = ("expert", "expert shard")
_ROLES = {"ddp": ("data", "data"), "fsdp": ("shard", "shard"), "tensor_parallel": ("data", "tensor"),
          "sequence_parallel": ("data", "sequence")}


@dataclass(frozen=True, eq=False)
class Baseline:
    """Penalties of strategies and redistributions under one role per mesh axis (see `pricing.Penalties`)."""

    name: str
    space: StrategySpace
    roles: tuple[str, ...]
    _made: dict[tuple[bool, bool, TensorMeta, int], np.ndarray] = field(default_factory=dict, repr=False)
    _by_use: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict, repr=False)

    def decision_penalties(self, index: int) -> np.ndarray:
        """Penalties of a decision, by strategy: mesh axes on which a parameter or input is not laid out as the role
        says."""
        decision, s = self.space.decisions[index], self.space.strategy_sets[index]
        penalties = np.zeros(len(s.strategies))
        if decision.kind not in ("parameter", "input"):
            return penalties + self._not_along_the_sequence(index) + self._not_to_the_experts(index)
        for axis, role in enumerate(self.roles):
            allowed = self._allowed_by_role(index, axis, role)
            penalties += ~np.array([r in allowed for r in s.array[:, axis]], dtype=bool)
        return penalties

    def _not_along_the_sequence(self, index: int) -> np.ndarray:
        """Context-parallel axes on which a product or attention is not cut, or cut by the batch, or computes with a
        shard of its weight as tensor parallelism does, by strategy."""
        s, found = self.space.strategy_sets[index], np.zeros(len(self.space.strategy_sets[index].strategies))
        if s.rule is None or s.rule.op_class not in MATRIX:
            return found
        by_batch = len(s.output_metas[0].shape) > 2
        weights = [use.position for use in self.space.uses_by[index] if use.source in self._of_parameters]
        other = np.array([not one.factor or (by_batch and one.outputs[0].is_shard and one.outputs[0].dim == 0)
                          or any(one.inputs[position].is_shard for position in weights) for one in s.axis_strategies])
        for axis, role in enumerate(self.roles):
            if role in ("context", "context shard"):
                found += other[s.array[:, axis]]
        return found

    def _not_to_the_experts(self, index: int) -> np.ndarray:
        """Of a mixture of experts beside an expert axis, by strategy: axes on which rows do not travel to their
        experts (expert), or which do not divide the tokens (others)."""
        s = self.space.strategy_sets[index]
        found = np.zeros(len(s.strategies))
        if not self.are_experts(index):
            return found
        for axis, role in enumerate(self.roles):
            wanted = "dispatch" if role in _EXPERT else "t"
            found += np.array([row.name != wanted for row in s.axis_strategies])[s.array[:, axis]]
        return found

    def are_experts(self, index: int) -> bool:
        """Whether a decision is of a mixture of experts beside an expert axis."""
        rule = self.space.strategy_sets[index].rule
        return self._has_experts_axis and rule is not None and "e" in rule.sizes

    @cached_property
    def _has_experts_axis(self) -> bool:
        return any(role in _EXPERT for role in self.roles)

    def _allowed_by_role(self, index: int, axis: int, role: str) -> set[int]:
        """The axis strategies of a parameter or input that its role allows."""
        decision, s = self.space.decisions[index], self.space.strategy_sets[index]
        rows = {one.outputs[0]: r for r, one in enumerate(s.axis_strategies)}
        possible = {s.axis_strategies[r].outputs[0]: r for r in set(s.array[:, axis].tolist())}
        shards = sorted(p for p in possible if p.is_shard)
        whole = {rows[Placement("I")]}
        if decision.kind == "input":
            cut = _INPUT_DIMS.get(role)
            return next(({possible[s]} for s in shards if s.dim == cut), whole)
        is_expert = index in self._experts
        if role in _EXPERT and is_expert and shards and shards[0].dim == 0:
            return {possible[shards[0]]}
        if role in ("shard", "context shard", "expert shard") and shards:
            return {possible[p] for p in (shards if len(self.roles) > 1 else shards[:1])}
        if is_expert and self._has_experts_axis:
            return whole
        if role in ("tensor", "sequence") and shards and index in self._matrices:
            vector = len(s.output_metas[0].shape) < 2  # a bias is laid out as the product's result
            return {possible[p] for p in shards} | (whole if vector else set())
        return whole

    @cached_property
    def _of_parameters(self) -> frozenset[int]:
        """Parameters, shared reads of them, their views and casts."""
        found: set[int] = set()
        for decision in self.space.decisions:
            sources = {use.source for use in self.space.uses_by.get(decision.index, ())}
            passes_on = sources and sources <= found and _passes_on(self.space, decision.index)
            if decision.kind == "parameter" or passes_on:
                found.add(decision.index)
        return frozenset(found)

    @cached_property
    def _experts(self) -> frozenset[int]:
        return expert_parameters(self.space)

    @cached_property
    def _matrices(self) -> frozenset[int]:
        return _matrix_parameters(self.space)

    def use_penalties(self, use: TensorUse, table: RedistributionTable) -> np.ndarray:
        """Penalties of a use, by (source strategy, target strategy): redistribution steps that the roles do not
        allow."""
        source, target = self.space.strategy_sets[use.source], self.space.strategy_sets[use.target]
        by_layout = self._penalties(use, table)
        key = id(source), use.output, id(target), use.position, id(by_layout)
        if key not in self._by_use:
            rows, columns = source.outputs[use.output], target.inputs[use.position]
            self._by_use[key] = np.minimum(by_layout[rows[:, None], columns], IMPOSSIBLE)
        return self._by_use[key]

    def _penalties(self, use: TensorUse, table: RedistributionTable) -> np.ndarray:
        of_parameter = self.reads_parameter(use)
        meta, expert = use.meta, use.source in self._experts
        key = (of_parameter, expert, meta, id(table))    # (prices keep their tables)
        if key not in self._made:

            def penalty(
                axes: Axes, source: Placement, target: Placement, before: np.ndarray, _: np.ndarray
            ) -> np.ndarray:
                return np.full(len(before), sum(self.penalty(use, axis, source, target) for axis in axes))

            self._made[key] = table.sum_along(penalty, by_dim=True)
        return self._made[key]

    def penalty(self, use: TensorUse, axis: int, source: Placement, target: Placement) -> float:
        """Of one step of a redistribution along a mesh axis (`step_penalty`)."""
        of_parameter, role = self.reads_parameter(use), self.role_of(use, axis)
        beside_experts = self._has_experts_axis and role in ("tensor", "sequence") and not of_parameter
        if beside_experts and any(p.is_shard and p.dim == 0 for p in (source, target)) and "P" not in (
                source.kind, target.kind):
            return LITTLE  # rows for the experts, and theirs
        return step_penalty(role, of_parameter, use.meta, source, target)

    def reads_parameter(self, use: TensorUse) -> bool:
        """Whether a use reads a parameter, by itself or through shared reads, views and casts."""
        return use.source in self._of_parameters

    def role_of(self, use: TensorUse, axis: int) -> str:
        """The role of an axis for what a use reads: weights of experts stay where they are, and tensor-parallel ranks,
        which take other tokens for them, sum their gradients as data-parallel ones do."""
        role = self.roles[axis]
        if use.source not in self._experts:
            return role
        return "tensor" if role in _EXPERT else "data" if role == "tensor" and self._has_experts_axis else role


def step_penalty(role: str, of_parameter: bool, meta: TensorMeta, source: Placement, target: Placement) -> float:
    """0 for local steps and the role's own communication, `LITTLE` for what it may need, 1 for anything else."""
    actions = ACTIONS[source.kind, target.kind]
    pair = source.kind + target.kind
    if pair == "SP":  # zeros and a sum instead of a gather
        return 1.0
    if meta.num_elements <= 1 or not (set(actions) if meta.requires_grad else {actions[0]}) & COLLECTIVES:
        return 0.0
    if of_parameter:
        return 0.0 if pair in _OF_PARAMETERS[role] else 1.0
    if role == "tensor":
        return 0.0 if pair in ("IR", "PI") else 1.0
    if role == "sequence":
        return 0.0 if (pair == "SR" and source.dim == 1) or (pair == "PS" and target.dim == 1) else 1.0
    if role in ("context", "context shard") and not meta.requires_grad:
        return LITTLE  # labels that are shifted along the sequence, positions
    return LITTLE if pair in ("PI", "PR", "IR") else 1.0  # statistics over the batch


def _passes_on(space: StrategySpace, index: int) -> bool:
    """Whether a decision's result is its input, in another form: a shared read, a view, a cast (as under autocast)."""
    rule = space.strategy_sets[index].rule
    return space.decisions[index].kind == "shared_read" or (rule is not None and (rule.alias or is_cast(space, index)))


def expert_parameters(space: StrategySpace) -> frozenset[int]:
    """Decisions of parameters whose first dim numbers experts, also through views and casts."""
    found: set[int] = set()
    for use in reversed(space.uses):
        rule = space.strategy_sets[use.target].rule
        numbered = rule is not None and rule.inputs[use.position][:1] == ("e",) and "e" in rule.sizes
        if numbered or (use.target in found and _passes_on(space, use.target)):
            found.add(use.source)
    return frozenset(found)


def _matrix_parameters(space: StrategySpace) -> frozenset[int]:
    """Decisions of parameters that matrix products or convolutions read, also through views and casts."""
    found: set[int] = set()
    for use in reversed(space.uses):
        rule = space.strategy_sets[use.target].rule
        product = rule is not None and rule.op_class in ("matmul", "conv")
        if product or (use.target in found and _passes_on(space, use.target)):
            found.add(use.source)
    return frozenset(found)


def by_roles(name: str, space: StrategySpace, roles: tuple[str, ...]) -> Baseline:
    """The restriction to given roles. Raises PlanError for expert parallelism of a model without experts."""
    made = Baseline(name, space, roles)
    if set(_EXPERT) & set(roles) and not expert_parameters(space):
        raise PlanError(f"{name}: no parameter of the model is known to have a dim of experts, so no axis can be "
                        "expert-parallel: leave out ep")
    return made


def baseline(name: str, space: StrategySpace) -> Baseline:
    """The baseline ``name`` on a strategy graph. Raises PlanError for an unknown name."""
    if name not in _ROLES:
        raise PlanError(f"unknown baseline {name!r}; there are {list(NAMES)}")
    outer, last = _ROLES[name]
    return Baseline(name, space, (outer,) * (len(space.mesh_shape) - 1) + (last,))

