"""The walk: model -> graph -> plan (`planning`: strategy space -> prices -> problem -> solution) -> program.

`plan` needs no process group and no devices; `compile` adds lowering and returns a module to call.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from autoparallel.capture import capture, capture_for_any
from autoparallel.errors import PlanError, shown
from autoparallel.garbage import collected_later
from autoparallel.layout import Layout
from autoparallel.partition import MicroBatches, split_batch, stages_of
from autoparallel.planning.by_hand import ByHand
from autoparallel.planning.history import SearchHistory
from autoparallel.planning.inference import plan_inference
from autoparallel.planning.one_mesh import plan_call
from autoparallel.planning.options import (
    DECIDED_BY_A_PLAN,
    Options,
    check_axes,
    check_call,
    check_cluster,
    check_joint,
    options_of,
    with_options,
    with_plan_by_hand,
)
from autoparallel.planning.plan_graph import plan_graph
from autoparallel.planning.recompute import blocks_by_stage
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
    by_hand: str | Mapping[str, Any] | ByHand | None = None,
    objective: str | None = None,
    phase: str | None = None,
    context: int | None = None,
    concurrent: int | None = None,
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
        `autoparallel.planning.by_hand`; `autoparallel.import_plan` reads them from other frameworks' files), whether it
        fits into the devices' memory or not (a ``memory_limit_bytes`` is checked). Sequences are dim 1 of inputs and
        activations to cp and sequence_parallel.
    phase: plan inference by a transformers model instead of a training step: "prefill" (a prompt) or "decode" (one
        token more), without gradients and optimizer state, with a static cache of keys and values as input and output.
    context: tokens that a sequence's cache has room for; the prompt's length in prefill.
    concurrent: sequences at once; None: 1, and for throughput as many as fit and pay.
    objective: of a phase: "latency" (default) or "throughput" (tokens per second).
    OPTIONS

    Raises CaptureError, InputError, PinError, PlanError, MeshError, SearchError, InfeasibleError, ClusterError.
    """
    if phase is not None or objective is not None or context is not None or concurrent is not None:
        given = {"example_inputs": example_inputs, "example_kwargs": example_kwargs, "joint": joint, "by_hand": by_hand,
                 "baseline": baseline, "micro_batches": micro_batches, "pipeline_stages": pipeline_stages,
                 "stage_replicas": stage_replicas, "schedule": schedule, "recompute": recompute,
                 "zero_stage": zero_stage, "reduce_dtype": reduce_dtype}
        if taken := sorted(name for name, value in given.items() if value):
            raise PlanError(f"{', '.join(taken)} belong to a training step: leave them out, or leave out phase, "
                            "objective, context and concurrent")
        make = partial(plan, model, cluster, mesh_shape=mesh_shape, axis_names=axis_names, search=search, pins=pins,
                       memory_limit_bytes=memory_limit_bytes, memory_confidence=memory_confidence,
                       time_limit_s=time_limit_s, recompute="none", progress=progress)
        return plan_inference(lambda call: make(example_kwargs=call), model, objective or "latency", phase or "",
                              context or 0, concurrent)
    chosen = options_of(locals())
    cluster, history = check_cluster(cluster), SearchHistory(chosen.progress)
    chosen = replace(chosen, progress=history)
    check_call(model, example_inputs, example_kwargs)
    check_axes(mesh_shape, axis_names, cluster.num_devices)
    check_joint(joint, chosen, axis_names)
    if by_hand is not None:
        chosen = with_plan_by_hand(chosen, by_hand, cluster.num_devices,
                                   mesh_shape=mesh_shape, axis_names=axis_names, joint=joint)
    with collected_later():
        started = time.process_time()
        graph = capture(model, example_inputs or (), example_kwargs or {})
        captured = time.process_time() - started
    best = plan_graph(graph, cluster, mesh_shape, axis_names, joint, chosen)
    seconds = {"capture": captured, **best.evidence.seconds}
    return replace(best, evidence=replace(best.evidence, seconds=seconds), record=history.told(best))


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
    from autoparallel.runtime.mesh import check_mesh, cluster_of
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
            agree_on("autoparallel.compile", limit_s=peer_timeout_s)
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
        model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], placed: Mapping[str, Layout], plain: bool,
        numbers: Sequence[int],
    ) -> Compiled:
        given = None if placed or plain else plan
        how = Hybrid(reduce_dtype=hybrid.reduce_dtype) if plain else hybrid
        micro = made_equally("a program",
                           lambda: split_batch(capture_for_any(model, args, kwargs, numbers), how.micro_batches),
                           lambda made: f"{made.whole.fingerprint} {how}", lines=lambda made: made.whole.described())
        return _compile_call(micro, position, machine, chosen, how, given, placed, runs_by)

    parallel = ParallelModule(model, position, hybrid, compile_call, taken, max_forms)
    if given:
        parallel.trace(*parallel.taken(example_inputs or (), example_kwargs or {}))
    return parallel


def _plan_on_devices(model: nn.Module, count: int, cluster: Cluster | str | Path | None, call: tuple[Any, Any],
                     options: Options) -> tuple[Plan, Options]:
    """The best plan on so many devices, over all ways to cut them into axes; and the options that it leaves open."""
    from autoparallel.runtime.agree import decide_once
    from autoparallel.runtime.mesh import check_mesh, cluster_of

    machine = cluster_of(check_mesh(count), cluster)
    given = {name: value for name, value in vars(options).items() if name != "by_hand"}
    if options.stages == 1 and options.micro_batches is None:
        given["micro_batches"] = 1    # so that the module can be called, not only by its `step`
    found = decide_once(lambda: plan(model, machine, example_inputs=call[0], example_kwargs=call[1], **given))
    return found, Options(**{**vars(options), **dict.fromkeys(DECIDED_BY_A_PLAN)})


def _recorded(plan: Plan) -> Plan:
    """The plan with its record made, so that all ranks have it: what makes it stays on rank 0."""
    return replace(plan, record=plan.known)


@collected_later()
def _compile_call(micro: MicroBatches, position: MeshPosition, cluster: Cluster, options: Options, hybrid: Hybrid,
                  given: Plan | None, placed: Mapping[str, Layout], backend: str) -> Compiled:
    """One call form: rank 0 plans it (or the plan is given), every rank emits its own programs and checks them."""
    from autoparallel import backends
    from autoparallel.lower import check, emit, order_digest, sum_gradients_in
    from autoparallel.runtime.agree import decide_once, made_equally
    from autoparallel.runtime.form import Compiled

    space = StrategySpace(micro.body, tuple(position.mesh.shape), position.axis_names)
    found = given or decide_once(lambda: _recorded(plan_call(space, micro, cluster, options, placed, hybrid)))

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


__all__ = ["compile", "plan"]
