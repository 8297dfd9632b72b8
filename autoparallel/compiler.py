"""The walk: model -> graph -> plan (`planning`: strategy space -> prices -> problem -> solution) -> program.

`plan` needs no process group and no devices; `compile` adds lowering and returns a module to call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from autoparallel.capture import OpGraph, capture
from autoparallel.errors import AutoparallelError, InfeasibleError, InputError, MeshError, PlanError, SearchError, shown
from autoparallel.garbage import collected_later
from autoparallel.layout import Layout
from autoparallel.partition import MicroBatches, split_batch, stages_of
from autoparallel.partition.microbatch import batch_size, loss_output
from autoparallel.planning.by_hand import ByHand
from autoparallel.planning.joint_candidates import Candidate, First, Fixed
from autoparallel.planning.joint_search import search_jointly
from autoparallel.planning.one_mesh import RECOMPUTE_TRIES, ROUGH_S, plan_in, plan_on
from autoparallel.planning.options import Options, check_axes, check_call, check_cluster, options_of, with_options
from autoparallel.planning.recompute import blocks_by_stage, fewest_recomputed
from autoparallel.planning.stage_replicas import is_uneven, on_several_ranks
from autoparallel.plans import Hybrid, Plan
from autoparallel.pricing import Prices
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from autoparallel.kernels.groups import MeshPosition
    from autoparallel.runtime.form import Compiled
    from autoparallel.runtime.module import ParallelModule
    from autoparallel.search import Progress


#: Options that a ready plan leaves no room for.
DECIDED_BY_A_PLAN = frozenset({"pins", "baseline", "micro_batches", "pipeline_stages", "stage_replicas", "schedule",
                               "recompute", "zero_stage", "reduce_dtype"})


@with_options
def plan(
    model: nn.Module,
    cluster: Cluster | str | Path,
    *,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    mesh_shape: Sequence[int] | None = None,
    axis_names: Sequence[str] | None = None,
    joint: bool = False,
    by_hand: str | Mapping[str, Any] | None = None,
    search: str = "auto",
    pins: Mapping[str, Any] | None = None,
    baseline: str | None = None,
    memory_limit_bytes: float | None = None,
    memory_confidence: float = 0.95,
    optimizer: str = "adamw",
    time_limit_s: float = 60.0,
    micro_batches: int | None = None,
    pipeline_stages: int | None = None,
    stage_replicas: Sequence[int] | None = None,
    schedule: str | None = None,
    recompute: str | None = None,
    zero_stage: int | None = None,
    reduce_dtype: str | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The best plan for one training step of ``model`` on ``cluster``; the model may be on the meta device.

    model: as one process has it, in the mode (train or eval) to plan.
    cluster: a `Cluster`, the name of a known one, or a TOML file.
    example_inputs, example_kwargs: the arguments of a call with the global batch; values do not matter.
    mesh_shape: the sizes of the axes, the first of which is the pipeline's if there are stages; None tries all meshes
        of one or two axes (of as many as ``axis_names`` has).
    axis_names: for pins and reports.
    joint: search pipeline, mesh, micro-batches, ZeRO stage and recompute too, where options leave them open. Pins hold
        in the plan, but not in the estimates by which candidates are chosen.
    by_hand: price the plan that people write for Megatron, DeepSpeed or torchtitan instead of a search, as
        "dp=8,tp=8,pp=4,zero=1,micro_batch=1,recompute=selective,sequence_parallel" or a mapping (the keys are those of
        `autoparallel.planning.by_hand`), whether it fits into the devices' memory or not (a ``memory_limit_bytes`` is
        checked). Sequences are dim 1 of inputs and activations to cp and sequence_parallel.
    OPTIONS

    Raises CaptureError, InputError, PinError, PlanError, MeshError, SearchError, InfeasibleError, ClusterError.
    """
    chosen = options_of(locals())
    cluster = check_cluster(cluster)
    check_call(model, example_inputs, example_kwargs)
    check_axes(mesh_shape, axis_names, cluster.num_devices)
    if not isinstance(joint, bool):
        raise PlanError(f"joint is {shown(joint)}: give True or False")
    if by_hand is not None:
        given = {"mesh_shape": mesh_shape, "axis_names": axis_names, "joint": joint,
                 **{name: getattr(chosen, name) for name in DECIDED_BY_A_PLAN - {"reduce_dtype"}}}
        if taken := sorted(name for name, value in given.items() if value):
            raise PlanError(f"by_hand decides {', '.join(taken)}: leave them out, or leave out by_hand and search")
        chosen = replace(chosen, by_hand=ByHand.of(by_hand).on(cluster.num_devices))
    if joint and (axis_names or chosen.baseline):
        raise PlanError("joint=True picks the axes and the plan: leave out axis_names and baseline")
    with collected_later():
        started = time.process_time()
        graph = capture(model, example_inputs or (), example_kwargs or {})
        captured = time.process_time() - started
    if chosen.by_hand is not None:
        best = _plan_by_hand(graph, cluster, chosen, chosen.by_hand)
    elif joint:
        best = _plan_jointly(graph, cluster, mesh_shape, chosen)
    else:
        best = _plan_plainly(graph, cluster, mesh_shape, axis_names, chosen)
    seconds = {"capture": captured, **best.evidence.seconds}
    return replace(best, evidence=replace(best.evidence, seconds=seconds))


def _plan_plainly(graph: OpGraph, cluster: Cluster, mesh_shape: Sequence[int] | None, axis_names: Sequence[str] | None,
                  options: Options) -> Plan:
    """The best plan on the mesh given, or on any; where none fits and the options leave it open, with micro-batches,
    ZeRO and recompute."""
    shapes = [tuple(mesh_shape)] if mesh_shape is not None else \
        mesh_shapes(cluster.num_devices, options.stages, sum(options.replicas))
    shapes = [shape for shape in shapes if axis_names is None or len(shape) == len(axis_names)]
    if not shapes:
        raise MeshError(f"{cluster.num_devices} devices are not cut into {len(axis_names or ())} axes: give as many "
                        "axis_names as mesh_shape has axes")
    try:
        with collected_later():
            return best_of(graph, cluster, shapes, axis_names, options)
    except InfeasibleError as error:
        if axis_names is not None or not options.is_open:
            raise
        return _plan_fitting(graph, cluster, mesh_shape, options, error)


def _plan_fitting(graph: OpGraph, cluster: Cluster, mesh_shape: Sequence[int] | None, options: Options,
                  error: InfeasibleError) -> Plan:
    """The best plan with micro-batches, ZeRO and recompute, where a plain step does not fit (``error``); without
    micro-batches, which run by `ParallelModule.step` only, where the call returns no scalar loss. Raises that error if
    nothing fits."""
    options = replace(options, pipeline_stages=1)
    if loss_output(graph) is None:
        options = replace(options, micro_batches=1)
    try:
        found = _plan_jointly(graph, cluster, mesh_shape, options)
    except (InfeasibleError, SearchError, InputError):
        error.args = (f"{error} (This is of a step of one micro-batch without recompute; no plan was found with "
                      "micro-batches, ZeRO and recompute either.)",)
        raise error from None
    reason = ("a step of one micro-batch without recompute does not fit; "
              f"{found.evidence.stop_reason}")
    return replace(found, evidence=replace(found.evidence, stop_reason=reason))


def _plan_by_hand(graph: OpGraph, cluster: Cluster, options: Options, hand: ByHand) -> Plan:
    """The plan of a person, whose parameters and activations are laid out by the roles of its axes."""
    batch = batch_size(graph) if hand.needs_batch else 1
    hybrid = replace(hand.hybrid(batch), reduce_dtype=options.reduce_dtype)
    if hybrid.micro_batches > 1 and loss_output(graph) is None:
        raise InputError(f"by_hand: {hybrid.micro_batches} micro-batches need a scalar loss: return the loss from the "
                         "model, alone, first in a tuple, or as `loss` of a structure; or leave out micro_batch")
    shape, names, _ = hand.mesh
    try:
        micro = split_batch(graph, hybrid.micro_batches)
    except InfeasibleError as error:
        raise PlanError(f"by_hand: {hybrid.micro_batches} micro-batches: {error} In by_hand that is micro_batch="
                        f"{batch // (hand.dp or 1)}") from error
    made = plan_on(micro, cluster, shape, names, options, hybrid)
    limit, needed = options.memory_limit_bytes, made.prediction.peak_bytes
    if limit is not None and needed > limit:
        raise InfeasibleError(f"the plan by hand ({hand}) needs {needed:.4g} bytes on a device, and memory_limit_bytes "
                              f"is {limit:.4g}: without a limit it is priced all the same")
    return made


def best_of(graph: OpGraph, cluster: Cluster, shapes: Sequence[tuple[int, ...]], axis_names: Sequence[str] | None,
            options: Options) -> Plan:
    """The fastest plan over mesh shapes; shapes on which nothing fits, or the pipeline cannot run, are passed over
    while another one does."""
    plans: list[Plan] = []
    failures: list[AutoparallelError] = []
    for shape in shapes:
        try:
            plans.append(_plan_of_shape(graph, cluster, shape, axis_names, options))
        except (InfeasibleError, PlanError) as error:
            failures.append(error)
    if not plans:
        raise min(failures, key=lambda error: getattr(error, "needed_bytes", float("inf")))
    return _with_rivals(sorted(plans, key=lambda p: p.prediction.step_s))


def _with_rivals(plans: Sequence[Plan]) -> Plan:
    """The fastest plan (the first), whose evidence names the meshes whose plans the prediction's error cannot tell from
    it."""
    best = plans[0]
    least, error = best.prediction.step_s, best.prediction.p50
    near = [f"{'x'.join(map(str, p.mesh_shape))} (+{p.prediction.step_s / least - 1:.1%})" for p in plans[1:]
            if p.prediction.step_s <= (1 + error) * least]
    if not near:
        return best
    reason = f"{best.evidence.stop_reason}; within the error of predictions: mesh {', '.join(near)}"
    return replace(best, evidence=replace(best.evidence, stop_reason=reason))


def _plan_of_shape(graph: OpGraph, cluster: Cluster, shape: tuple[int, ...], axis_names: Sequence[str] | None,
                   options: Options) -> Plan:
    """The best plan on one mesh, whose first axis is the pipeline's if there are stages."""
    hybrid = options.hybrid(shape[0] if options.stages > 1 else 1)
    micro = split_batch(graph, hybrid.micro_batches)
    if options.stages == 1:
        return plan_on(micro, cluster, shape, axis_names, options, hybrid)
    names = axis_names[1:] if axis_names else None
    return plan_on(micro, cluster, shape[1:] or (1,), names, options, hybrid)


def _plan_jointly(graph: OpGraph, cluster: Cluster, mesh_shape: Sequence[int] | None, options: Options) -> Plan:
    """The best of pipelines, meshes, micro-batches, ZeRO and recompute; what options fix stays. With time left, the
    best recomputes fewer blocks, if it may."""
    started, open_ = time.monotonic(), options.recompute in (None, "auto")
    deadline = started + options.time_limit_s
    options = replace(options, recompute=None if open_ else options.recompute)
    stages = None if options.pipeline_stages is None and options.stage_replicas is None else options.stages
    fixed = Fixed(options.micro_batches, stages, options.schedule, options.recompute, options.zero_stage,
                  tuple(mesh_shape) if mesh_shape is not None else None, options.reduce_dtype, options.replicas)

    split = cache(partial(split_batch, graph))

    def in_full(candidate: Candidate, seconds: float, search: str = options.search) -> Plan:
        micro, end = split(candidate.hybrid.micro_batches), time.monotonic() + seconds

        def plan_as(hybrid: Hybrid, first: First | None, seconds: float) -> Plan:
            within = replace(options, time_limit_s=seconds, search=search)
            return plan_on(micro, cluster, candidate.mesh_shape, None, within, hybrid, first)

        made = plan_as(candidate.hybrid, candidate.first, seconds)
        fixed_stages = stages is not None or options.schedule not in (None, "gpipe", "1f1b") or candidate.hybrid.cuts
        if fixed_stages or not is_uneven(made):
            return made
        space = StrategySpace(micro.body, made.mesh_shape)
        prices = Prices(space, cluster, options.optimizer, stages=made.hybrid.pipeline_ranks)
        other = on_several_ranks(made, prices, micro.loss)
        with suppress(InfeasibleError, SearchError):
            if other is not None:
                again = plan_as(other, made.strategies_on, max(ROUGH_S, end - time.monotonic()))
                made = min(made, again, key=lambda p: p.prediction.step_s)
        return made

    def with_blocks(whole: Plan, again: tuple[str, ...]) -> Plan:
        candidate = Candidate(
            replace(whole.hybrid, recompute_blocks=again), whole.mesh_shape, first=whole.strategies_on
        )
        return in_full(candidate, min(options.time_limit_s / RECOMPUTE_TRIES, deadline - time.monotonic()))

    found = search_jointly(graph, cluster, fixed, options.optimizer, options.limit_bytes(cluster),
                           options.time_limit_s, in_full)
    best = found.plan
    if open_ and best.hybrid.recompute != "none":
        micro = split(best.hybrid.micro_batches)
        space = StrategySpace(micro.body, best.mesh_shape)
        blocks = blocks_by_stage(space, stages_of(space, micro.loss, best.hybrid))
        best = fewest_recomputed(best, blocks, partial(with_blocks, best), deadline)
    evidence, seen = best.evidence, found.survey
    reason = (f"{evidence.stop_reason} on the best of {len(seen.candidates)} combinations ({seen.without_plan} without "
              f"a plan that fits); {seen.pruned} more bounded away, {seen.left} left for lack of time; "
              f"{found.planned} planned in full")
    seconds = {**evidence.seconds, "joint": time.monotonic() - started}
    return replace(best, evidence=replace(evidence, stop_reason=reason, seconds=seconds, step_bound_s=seen.bound_s))


@with_options
def compile(
    model: nn.Module,
    mesh: DeviceMesh | int,
    *,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    plan: Plan | None = None,
    cluster: Cluster | str | Path | None = None,
    inputs: str | Mapping[str, str] = "global",
    check_inputs: int = 100,
    max_forms: int = 64,
    peer_timeout_s: float = 60.0,
    backend: str = "eager",
    search: str = "auto",
    pins: Mapping[str, Any] | None = None,
    baseline: str | None = None,
    memory_limit_bytes: float | None = None,
    memory_confidence: float = 0.95,
    optimizer: str = "adamw",
    time_limit_s: float = 60.0,
    micro_batches: int | None = None,
    pipeline_stages: int | None = None,
    stage_replicas: Sequence[int] | None = None,
    schedule: str | None = None,
    recompute: str | None = None,
    zero_stage: int | None = None,
    reduce_dtype: str | None = None,
    progress: Progress | None = None,
) -> ParallelModule:
    """``model`` on ``mesh``: called like the original, computing the same numbers on all its devices together.

    It is traced at its first call, or now if there are example inputs. The original keeps its own parameters, which are
    not trained: save, load and evaluate the returned module.

    model: as one process has it; on the meta device, give it values by `ParallelModule.init_weights` or
        `load_state_dict`.
    mesh: a `torch.distributed.DeviceMesh`, or the number of devices: then the axes are the plan's, or, with example
        inputs, the best that the search finds, or one.
    example_inputs, example_kwargs: the arguments of a call.
    plan: a ready plan to run, instead of a search; options are then for calls of another form (evaluation, shapes).
    cluster: prices the search; None: the machine that the mesh's device type suggests.
    inputs: "global": plain tensors are the same on all ranks; "local": each rank's rows (dim 0) of the global batch, in
        rank order, as a DistributedSampler deals them out (example inputs too); or a mapping from argument names to
        either, the others being global. Tensors without dims are always global.
    check_inputs: ranks compare global tensors in the first three calls and every so many after (0: never), and the
        shapes of local ones in every call (on GPUs without waiting, if the process group has a CPU backend too:
        "cpu:gloo,cuda:nccl").
    backend: what runs the program: "eager", node by node; "inductor", forward and backward each one graph, traced by
        AOTAutograd with its collectives (in buckets, overlapped) and compiled, which takes a minute or more at the
        first call; "auto", Inductor on GPUs with Triton and eager elsewhere; "aot_eager", the traced graphs without
        Inductor, to find a fault. Compiled graphs have no double backward, and no backward with retain_graph.
    max_forms: compiled programs to keep, of calls of different forms; the least recently used is dropped.
    peer_timeout_s: a rank whose process shows no sign of life for so many seconds (stopped, hung, its machine gone) is
        named in a PeerError on the others; one whose process has ended, in a few seconds.
    OPTIONS

    Raises MeshError without a process group or when the mesh is not the world's size, PlanError when the options
    decide what the plan has decided, InputError on all ranks where local examples have different shapes.
    """
    import torch.distributed as dist

    from autoparallel import backends
    from autoparallel.kernels import groups
    from autoparallel.runtime.agree import made_equally
    from autoparallel.runtime.failing import agree_on, reached
    from autoparallel.runtime.inputs import Inputs
    from autoparallel.runtime.module import ParallelModule

    chosen = options_of(locals())
    check_call(model, example_inputs, example_kwargs)
    taken = Inputs.of(model, inputs, check_inputs)
    if isinstance(max_forms, bool) or not isinstance(max_forms, int) or max_forms < 2:
        raise PlanError(f"max_forms is {shown(max_forms)}: give the number of compiled programs to keep, 2 or more")
    if isinstance(peer_timeout_s, bool) or not isinstance(peer_timeout_s, (int, float)) or not peer_timeout_s >= 1:
        raise PlanError(f"peer_timeout_s is {shown(peer_timeout_s)}: give seconds, 1 or more")
    if plan is not None and not isinstance(plan, Plan):
        raise PlanError(f"plan is {shown(plan)}: give a Plan, autoparallel.Plan.load(path) of a file")
    given = example_inputs is not None or example_kwargs is not None
    if dist.is_initialized():
        with reached():
            agree_on("autoparallel.compile")
    if isinstance(mesh, int) and given and plan is None:
        call = taken.of_all(example_inputs or (), example_kwargs or {}, mesh)
        plan, chosen = _plan_on_devices(model, mesh, cluster, call, chosen)
    mesh = check_mesh(mesh, plan)
    runs_by = backends.chosen(backend, mesh.device_type)
    machine = cluster_of(mesh, cluster, runs_by)
    if plan and (decided := sorted(name for name in DECIDED_BY_A_PLAN if getattr(chosen, name) is not None)):
        raise PlanError(f"the plan decides {', '.join(decided)}: leave them out, or leave out the plan and search for "
                        "another")
    several = (plan.hybrid.stages if plan else chosen.stages) > 1
    hybrid = plan.hybrid if plan else chosen.hybrid(mesh.size(0) if several else 1)
    position = groups.position_on(mesh, hybrid.pipeline_ranks)
    backends.check(runs_by, hybrid)

    def compile_call(
        model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], placed: Mapping[str, Layout], plain: bool
    ) -> Compiled:
        given = None if placed or plain else plan
        how = Hybrid(reduce_dtype=hybrid.reduce_dtype) if plain else hybrid
        micro = made_equally("a program", lambda: split_batch(capture(model, args, kwargs), how.micro_batches),
                           lambda made: f"{made.whole.fingerprint} {how}", lines=lambda made: made.whole.described())
        return _compile_call(micro, position, machine, chosen, how, given, placed, runs_by)

    parallel = ParallelModule(model, position, hybrid, compile_call, taken, max_forms, peer_timeout_s)
    if given:
        parallel.trace(*parallel.taken(example_inputs or (), example_kwargs or {}))
    return parallel


def _plan_on_devices(model: nn.Module, count: int, cluster: Cluster | str | Path | None, call: tuple[Any, Any],
                     options: Options) -> tuple[Plan, Options]:
    """The best plan on so many devices, over all ways to cut them into axes; and the options that it leaves open."""
    from autoparallel.runtime.agree import decide_once

    machine = cluster_of(check_mesh(count), cluster)
    given = {name: value for name, value in vars(options).items() if name != "by_hand"}
    if options.stages == 1 and options.micro_batches is None:
        given["micro_batches"] = 1    # so that the module can be called, not only by its `step`
    found = decide_once(lambda: plan(model, machine, example_inputs=call[0], example_kwargs=call[1], **given))
    return found, Options(**{**vars(options), **dict.fromkeys(DECIDED_BY_A_PLAN)})


@collected_later()
def _compile_call(micro: MicroBatches, position: MeshPosition, cluster: Cluster, options: Options, hybrid: Hybrid,
                  given: Plan | None, placed: Mapping[str, Layout], backend: str) -> Compiled:
    """One call form: rank 0 plans it (or the plan is given), every rank emits its own programs and checks them."""
    from autoparallel import backends
    from autoparallel.lower import check, emit, order_digest, sum_gradients_in
    from autoparallel.runtime.agree import decide_once, made_equally
    from autoparallel.runtime.form import Compiled

    space = StrategySpace(micro.body, tuple(position.mesh.shape), position.axis_names)
    found = given or decide_once(lambda: plan_in(space, micro, cluster, options, placed, hybrid))

    def lowered() -> Compiled:
        backends.check(backend, found.hybrid)
        strategies = found.strategies_on(space)
        stages = stages_of(space, micro.loss, found.hybrid)
        blocks = {name for names in blocks_by_stage(space, stages) for name in names}
        if unknown := sorted(set(found.hybrid.recompute_blocks or ()) - blocks):
            raise PlanError(f"the plan recomputes blocks {unknown}, which the model has not; it has {sorted(blocks)}")
        path = Prices(space, cluster, options.optimizer, direct=found.direct, stages=position.pipeline_ranks).path
        programs = {
            number: emit(space, strategies, path, position.coordinate, position.mesh.device_type, stages.parts[number])
            for number in found.hybrid.stages_of(position.pipeline_rank)
        }
        for program in programs.values():
            check(program, space, position.coordinate)
            sum_gradients_in(program, found.hybrid.sum_dtype)
        return Compiled(found, space, micro, stages, programs, backend, cluster)

    return made_equally("an order of collectives", lowered,
                      lambda made: "".join(order_digest(p) for p in made.programs.values()), position.pipeline_rank)


def mesh_shapes(num_devices: int, stages: int = 1, pipeline_ranks: int = 0) -> list[tuple[int, ...]]:
    """Every way to cut a device count into one or two axes of at least two devices, behind a pipeline axis if there
    are stages (of ``pipeline_ranks``, if that is given).

    Raises PlanError when the stages cannot be dealt out evenly to a part of the devices.
    """
    if stages == 1:
        pairs = [(a, num_devices // a) for a in range(2, num_devices // 2 + 1) if num_devices % a == 0]
        return [(num_devices,), *pairs]
    ranks = [r for r in range(2, num_devices + 1) if num_devices % r == 0
             and (r == pipeline_ranks if pipeline_ranks else stages % r == 0)]
    if pipeline_ranks and not ranks:
        raise PlanError(f"stage_replicas are {pipeline_ranks} ranks together, and do not divide {num_devices} devices")
    if not ranks:
        raise PlanError(f"{stages} pipeline stages cannot be dealt out evenly to {num_devices} devices: a number above "
                        "1 must divide both")
    return [(r, *shape) if num_devices > r else (r,) for r in ranks for shape in mesh_shapes(num_devices // r)]


def check_mesh(mesh: DeviceMesh | int, plan: Plan | None = None) -> DeviceMesh:
    """The mesh, checked against the world; of a device count with the plan's axes, or one."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    from autoparallel.runtime.failing import check_groups

    if not isinstance(mesh, (int, DeviceMesh)) or isinstance(mesh, bool):
        raise MeshError(f"mesh is {shown(mesh)}: give a torch.distributed.DeviceMesh, as init_device_mesh makes, or a "
                        "device count")
    if not dist.is_initialized():
        raise MeshError("no process group: start the program with torchrun, mpirun or srun and call "
                        "autoparallel.init() before autoparallel.compile")
    check_groups()
    world = dist.get_world_size()
    if isinstance(mesh, int):
        if mesh != world:
            raise MeshError(f"{mesh} devices were asked for and the world has {world} ranks: start {mesh} processes")
        shape, names = ((mesh,), ("devices",)) if plan is None else plan.axes
        if math.prod(shape) != mesh:
            raise MeshError(f"the plan is for a mesh of {shape}, and {mesh} devices were asked for: start "
                            f"{math.prod(shape)} processes, or plan again")
        return init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", shape, mesh_dim_names=names)
    if mesh.size() != world:
        raise MeshError(f"the mesh has {mesh.size()} devices {tuple(mesh.shape)} and the world {world} ranks: "
                        "every rank must be on the mesh")
    return mesh


def cluster_of(mesh: DeviceMesh, cluster: Cluster | str | Path | None, backend: str = "eager") -> Cluster:
    """The cluster that prices the search: the one given, or what the mesh's devices suggest, with the software profile
    of the backend."""
    if isinstance(cluster, Cluster):
        if cluster.num_devices != mesh.size():
            raise MeshError(f"the cluster has {cluster.num_devices} devices and the mesh {mesh.size()}")
        return cluster
    if cluster is None:
        cluster = _known_name(mesh.device_type)
    found = Cluster.load(cluster, num_devices=mesh.size())
    if found.profile is None or backend != "inductor":
        return found
    return Cluster.load(cluster, num_devices=mesh.size(), software="torch-compile")


def _known_name(device_type: str) -> str:
    import torch

    if device_type == "cpu":
        return "local-cpu"
    name = torch.cuda.get_device_name() if device_type == "cuda" else device_type
    for part, cluster in (("H200", "h200"), ("H100", "h100-sxm"), ("A100", "a100-sxm")):
        if part in name:
            return cluster
    raise MeshError(f"no cluster description for devices of type {name!r}: give cluster=, a name or a TOML file")


__all__ = ["Options", "best_of", "check_mesh", "cluster_of", "compile", "mesh_shapes", "plan"]
