"""The programs of a plan on one rank: emitted, checked, and compared between ranks."""

from __future__ import annotations

from collections.abc import Sequence

from autoparallel import backends
from autoparallel.errors import PlanError
from autoparallel.kernels.groups import MeshPosition
from autoparallel.layout.redistribution import Axes
from autoparallel.lower import check, emit, order_digest, sum_gradients_in
from autoparallel.lower.emit import PathFinder
from autoparallel.lower.fetch_pass import fetch_parameters
from autoparallel.lower.lookup_pass import look_up_in_caches, look_up_on_host
from autoparallel.partition import MicroBatches, stages_of
from autoparallel.plans import Plan
from autoparallel.pricing import Prices
from autoparallel.runtime.agree import made_equally
from autoparallel.runtime.form import Compiled
from autoparallel.schedule.step_config import check_sparse_tables
from autoparallel.strategies.host_lookups import HostLookups
from autoparallel.strategies.space import Strategy, StrategySpace
from cost_models import Cluster


def compiled(plan: Plan, space: StrategySpace, micro: MicroBatches, position: MeshPosition, cluster: Cluster,
             optimizer: str, backend: str, replays: bool = False) -> Compiled:
    """A call form as this rank runs it; all ranks call this. Raises PlanError for a plan of another model, and on all
    ranks where the ranks of a stage would communicate in different orders."""
    def digest(made: Compiled) -> str:
        return "".join(order_digest(program) for program in made.programs.values())

    return made_equally("an order of collectives",
                        lambda: _own(plan, space, micro, position, cluster, optimizer, backend, replays),
                        digest, position.pipeline_rank)


def _joint_axes(space: StrategySpace, strategies: Sequence[Strategy], path: PathFinder) -> tuple[Axes, ...]:
    """The sets of several mesh axes on whose ranks together steps of a plan run, on whichever stage."""
    found = set[Axes]()
    for use in space.uses:
        source = space.strategy_sets[use.source].output_layout(strategies[use.source], use.output)
        target = space.strategy_sets[use.target].input_layout(strategies[use.target], use.position)
        if source != target:
            found |= {step.axes for step in path(use, source, target) if len(step.axes) > 1}
    return tuple(sorted(found))


def _own(plan: Plan, space: StrategySpace, micro: MicroBatches, position: MeshPosition, cluster: Cluster,
         optimizer: str, backend: str, replays: bool) -> Compiled:
    sparse = space.graph.sparse_tables
    check_sparse_tables(sparse, plan.hybrid)
    backends.check(backend, plan.hybrid, sparse)
    strategies = plan.strategies_on(space)
    stages = stages_of(space, micro.loss, plan.hybrid)
    blocks = {name for names in stages.blocks(space) for name in names}
    if unknown := sorted(set(plan.hybrid.recompute_blocks or ()) - blocks):
        raise PlanError(f"the plan recomputes blocks {unknown}, which the model has not; it has {sorted(blocks)}")
    path = Prices(space, cluster, optimizer, direct=plan.direct, stages=position.pipeline_ranks).path
    own = position.pipeline_rank if plan.hybrid.pipeline_ranks > 1 else 0    # a plain call runs on each rank
    programs = {
        number: emit(space, strategies, path, position.coordinate, position.mesh.device_type, stages.parts[number])
        for number in plan.hybrid.stages_of(own)
    }
    lookups = HostLookups(space, plan.hybrid.on_host, plan.hybrid.cached)
    for program in programs.values():
        check(program, space, position.coordinate)
        sum_gradients_in(program, plan.hybrid.sum_dtype)
        away = plan.hybrid.offload
        fetched = {one.index for one in program.placeholders
                   if one.kind == "parameter" and away.of(one.path).moves_parameters} - lookups.tables
        if fetched:
            fetch_parameters(program.module, fetched, space.mesh_shape, position.mesh.device_type)
        if lookups.ops:
            look_up_on_host(program.module, lookups.ops, position.mesh.device_type)
        if lookups.cached:
            look_up_in_caches(program.module, lookups.cached)
    if replays:
        backends.check_replays(plan.hybrid, position, sparse)
    made = Compiled(plan, space, micro, stages, programs, backend, cluster, replays,
                    _joint_axes(space, strategies, path))
    if added_up := sorted((sparse.keys() | {*plan.hybrid.on_host}) & made.shared.keys()):
        has, instead = (("has sparse gradients (sparse=True)", "Write sparse=False") if added_up[0] in sparse else
                        ("lives in the memory of the host", "Leave its pin out"))
        raise PlanError(f"{added_up[0]} {has} and is looked up on several pipeline ranks, which add up dense gradients "
                        f"of their devices\n  {instead}, or leave the pipeline out.")
    return made
