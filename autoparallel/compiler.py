"""The walk: model -> graph -> strategy space -> prices -> problem -> solution -> plan -> program.

`plan` needs no process group and no devices; `compile` adds lowering and returns a module to call.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from autoparallel.baselines import baseline
from autoparallel.capture import OpGraph, capture
from autoparallel.errors import InfeasibleError, MeshError
from autoparallel.layout import Layout
from autoparallel.plans import Evidence, Plan, apply_pins, pin_strings
from autoparallel.pricing import Prices, SpacePricer, predict
from autoparallel.report import block_layouts
from autoparallel.rules.space import Label, StrategySpace
from autoparallel.search import solve
from autoparallel.search.problem import Problem, Solution, evaluate
from cost_models import Cluster

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from autoparallel.runtime.module import Compiled, ParallelModule


@dataclass(frozen=True)
class Options:
    """What `plan` and `compile` share.

    ``search``: auto, ilp, recursive or exact. ``pins``: placements by name pattern. ``baseline``: a classical plan
    instead of the search's own. ``memory_limit_bytes`` per device (None: what the device has; inf: no limit).
    ``optimizer``: whose state is counted. ``time_limit_s`` bounds the search.
    """

    search: str = "auto"
    pins: Mapping[str, Any] | None = None
    baseline: str | None = None
    memory_limit_bytes: float | None = None
    optimizer: str = "adamw"
    time_limit_s: float = 60.0


def plan(
    model: nn.Module,
    cluster: Cluster | str,
    *,
    example_inputs: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    mesh_shape: Sequence[int] | None = None,
    axis_names: Sequence[str] | None = None,
    **options: Any,
) -> Plan:
    """The best plan for one training step of ``model`` on ``cluster``; the model may be on the meta device.

    ``mesh_shape`` fixes the axes; without it the search tries every way to cut the devices into one or two axes.
    Further keywords are those of `Options`. Raises CaptureError, PinError, InfeasibleError, ClusterError.
    """
    cluster = Cluster.load(cluster) if isinstance(cluster, str) else cluster
    started = time.process_time()
    graph = capture(model, example_inputs, example_kwargs or {})
    captured = time.process_time() - started
    shapes = [tuple(mesh_shape)] if mesh_shape is not None else mesh_shapes(cluster.num_devices)
    best = _best_of(graph, cluster, shapes, axis_names, Options(**options))
    seconds = {"capture": captured, **best.evidence.seconds}
    return replace(best, evidence=replace(best.evidence, seconds=seconds))


def _best_of(graph: OpGraph, cluster: Cluster, shapes: Sequence[tuple[int, ...]], axis_names: Sequence[str] | None,
             options: Options) -> Plan:
    """The fastest plan over mesh shapes; shapes on which nothing fits are passed over while another one does."""
    plans, failures = [], []
    for shape in shapes:
        try:
            plans.append(_plan_on(graph, cluster, shape, axis_names, options))
        except InfeasibleError as error:
            failures.append(error)
    if not plans:
        raise min(failures, key=lambda error: getattr(error, "needed_bytes", float("inf")))
    return min(plans, key=lambda p: p.evidence.objective_s)


def compile(
    model: nn.Module,
    mesh: DeviceMesh | int,
    *,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    plan: Plan | None = None,
    cluster: Cluster | str | None = None,
    **options: Any,
) -> ParallelModule:
    """``model`` on ``mesh``: called like the original, computing the same numbers on all its devices together.

    ``mesh`` is a `torch.distributed.DeviceMesh`, or a device count (then one axis). Traced at the first call, or now
    when example inputs are given. ``plan`` runs a ready plan instead of searching. ``cluster`` prices the search (by
    default the machine that the mesh's device type suggests). Further keywords are those of `Options`.

    Raises MeshError without a process group or when the mesh is not the world's size.
    """
    from autoparallel.runtime.module import ParallelModule

    mesh = check_mesh(mesh)
    machine = cluster_of(mesh, cluster)
    chosen = Options(**options)

    def compile_call(
        model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], placed: Mapping[str, Layout]
    ) -> Compiled:
        return _compile_call(capture(model, args, kwargs), mesh, machine, chosen, plan if not placed else None, placed)

    parallel = ParallelModule(model, mesh, compile_call)
    if example_inputs is not None or example_kwargs is not None:
        parallel.trace(example_inputs or (), example_kwargs or {})
    return parallel


def _compile_call(graph: OpGraph, mesh: DeviceMesh, cluster: Cluster, options: Options, given: Plan | None,
                  placed: Mapping[str, Layout]) -> Compiled:
    """One call form: rank 0 plans it (or the plan is given), every rank emits its own program and checks it."""
    from autoparallel.lower import check, emit, order_digest
    from autoparallel.runtime import groups
    from autoparallel.runtime.agree import agree, decide_once
    from autoparallel.runtime.module import Compiled

    shape, names = tuple(mesh.shape), groups.axis_names(mesh)
    agree("a program", graph.fingerprint)
    found = given or decide_once(lambda: _plan_on(graph, cluster, shape, names, options, placed))
    space = StrategySpace(graph, shape, names)
    coordinate = mesh.get_coordinate() or ()
    path = Prices(space, cluster, options.optimizer, direct=found.direct).path
    program = emit(space, found.labels(space), path, coordinate, mesh.device_type)
    check(program, space, coordinate)
    agree("an order of collectives", order_digest(program))
    return Compiled(found, space, program)


def _plan_on(
    graph: OpGraph,
    cluster: Cluster,
    mesh_shape: tuple[int, ...],
    axis_names: Sequence[str] | None,
    options: Options,
    placed: Mapping[str, Layout] | None = None,
) -> Plan:
    """Space, prices, problem, solution, plan; with the CPU seconds of each."""
    clock = _Clock()
    space = StrategySpace(graph, mesh_shape, axis_names)
    clock.lap("strategies")
    prices = Prices(space, cluster, options.optimizer, direct=options.baseline is not None)
    allowed = apply_pins(space, options.pins or {})
    allowed.update(_placed_choices(space, placed or {}))
    faults = baseline(options.baseline, space) if options.baseline else None
    limit = cluster.device.usable_bytes if options.memory_limit_bytes is None else options.memory_limit_bytes
    pricer = SpacePricer(prices, limit, allowed, faults)
    problem = pricer.full()
    clock.lap("pricing")
    solution = solve(problem, options.search, time_limit_s=options.time_limit_s, pricer=pricer)
    clock.lap("search")
    labels = pricer.labels_of(solution.choice)
    if faults is not None:  # told apart from the price of the plan that they led to
        pricer = SpacePricer(prices, limit, allowed)
        problem = pricer.full()
    return _plan_of(pricer, problem, solution, labels, options, clock)


def _plan_of(pricer: SpacePricer, problem: Problem, solution: Solution, labels: Sequence[Label], options: Options,
             clock: _Clock) -> Plan:
    space = pricer.space
    judged = evaluate(problem, pricer.choice_of(labels))
    baseline_bound = judged.objective if options.baseline else solution.lower_bound
    evidence = Evidence(
        solution.solver, judged.objective, baseline_bound, 0.0 if options.baseline else solution.gap,
        f"baseline {options.baseline}" if options.baseline else solution.stop_reason,
        {**clock.seconds, **{f"search: {k}": v for k, v in solution.seconds.items()}},
    )
    strategies = {
        site.name: s.names(label) for site, s, label in zip(space.sites, space.strategies, labels, strict=True)
    }
    return Plan(
        fingerprint=space.graph.fingerprint,
        mesh_shape=space.mesh_shape,
        axis_names=space.axis_names,
        strategies=strategies,
        cluster=pricer.prices.cluster.name,
        evidence=evidence,
        prediction=predict(pricer, problem, labels, judged.peak_bytes),
        blocks=block_layouts(space, labels),
        pins=pin_strings(space, options.pins or {}),
        direct=pricer.prices.direct,
    )


def _placed_choices(space: StrategySpace, placed: Mapping[str, Layout]) -> dict[int, np.ndarray]:
    """Parameters that lie on the mesh already stay where they are."""
    found = {}
    for site in space.sites:
        if site.kind == "parameter" and site.path in placed:
            s = space.strategies[site.index]
            found[site.index] = np.array([
                c for c, label in enumerate(s.labels) if s.output_layout(label) == placed[site.path]
            ])
    return found


class _Clock:
    """CPU seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.process_time()

    def lap(self, phase: str) -> None:
        now = time.process_time()
        self.seconds[phase] = now - self._last
        self._last = now


def mesh_shapes(num_devices: int) -> list[tuple[int, ...]]:
    """Every way to cut a device count into one or two axes of at least two devices."""
    pairs = [(a, num_devices // a) for a in range(2, num_devices // 2 + 1) if num_devices % a == 0]
    return [(num_devices,), *pairs]


def check_mesh(mesh: DeviceMesh | int) -> DeviceMesh:
    """The mesh, made from a device count when that is what was given; checked against the world."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        raise MeshError("no process group: start the program with torchrun and call "
                        "torch.distributed.init_process_group() before autoparallel.compile")
    world = dist.get_world_size()
    if isinstance(mesh, int):
        if mesh != world:
            raise MeshError(f"{mesh} devices were asked for and the world has {world} ranks: start {mesh} processes")
        return init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (mesh,), mesh_dim_names=("devices",))
    if mesh.size() != world:
        raise MeshError(f"the mesh has {mesh.size()} devices {tuple(mesh.shape)} and the world {world} ranks: "
                        "every rank must be on the mesh")
    return mesh


def cluster_of(mesh: DeviceMesh, cluster: Cluster | str | None) -> Cluster:
    """The cluster that prices the search: the one given, or what the mesh's devices suggest."""
    if isinstance(cluster, Cluster):
        if cluster.num_devices != mesh.size():
            raise MeshError(f"the cluster has {cluster.num_devices} devices and the mesh {mesh.size()}")
        return cluster
    if cluster is None:
        cluster = _known_name(mesh.device_type)
    return Cluster.load(cluster, num_devices=mesh.size())


def _known_name(device_type: str) -> str:
    import torch

    if device_type == "cpu":
        return "local-cpu"
    name = torch.cuda.get_device_name() if device_type == "cuda" else device_type
    for part, cluster in (("H200", "h200"), ("H100", "h100-sxm"), ("A100", "a100-sxm")):
        if part in name:
            return cluster
    raise MeshError(f"no cluster description for devices of type {name!r}: give cluster=, a name or a TOML file")


__all__ = ["Options", "check_mesh", "cluster_of", "compile", "mesh_shapes", "plan"]
