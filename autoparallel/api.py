"""`autoparallel.plan` and `autoparallel.compile`: their arguments, checked; `compiler` does the work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from autoparallel import clock, compiler
from autoparallel.errors import PlanError, shown
from autoparallel.planning.by_hand import ByHand
from autoparallel.planning.call_checks import check_axes, check_call, check_cluster
from autoparallel.planning.inference import plan_inference
from autoparallel.planning.options import (
    DECIDED_BY_A_PLAN,
    check_disk_path,
    check_groups,
    check_joint,
    check_limits,
    compared_by_hand,
    options_of,
    with_options,
    with_plan_by_hand,
)
from autoparallel.planning.unequal_hosts import on_grouped_hosts
from autoparallel.plans import Plan
from cost_models import Cluster

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from autoparallel.runtime.module import ParallelModule
    from autoparallel.search import Progress

#: Arguments of `plan` for inference, and those for a training step, which do not go with them.
_OF_INFERENCE = ("phase", "objective", "context", "concurrent")
_OF_TRAINING = (DECIDED_BY_A_PLAN - {"pins"}) | {"example_inputs", "example_kwargs", "joint", "by_hand",
                                                 "compare_by_hand", "host_memory_limit_bytes", "disk_limit_bytes"}


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
    compare_by_hand: str | Mapping[str, Any] | ByHand | None = None,
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
    time_limit_s: float | None = None,
    micro_batches: int | Sequence[int] | None = None,
    pipeline_stages: int | None = None,
    stage_replicas: Sequence[int] | None = None,
    schedule: str | None = None,
    recompute: str | None = None,
    saved_on: str | None = None,
    zero_stage: int | None = None,
    reduce_dtype: str | None = None,
    bucket_bytes: float | str | Mapping[str, float] | None = None,
    buckets: int | Sequence[str] | None = None,
    copies: int | None = None,
    pieces: int | None = None,
    offload: str | Mapping[str, str] | None = None,
    offload_fraction: float | None = None,
    step_in_backward: bool | None = None,
    host_memory_limit_bytes: float | None = None,
    disk_limit_bytes: float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The best plan for one training step of ``model`` on ``cluster``; the model may be on the meta device.

    model: as one process has it, in the mode (train or eval) to plan.
    cluster: a `Cluster`, the name of a known one, or a TOML file.
    example_inputs, example_kwargs: the arguments of a call with the global batch; values do not matter.
    mesh_shape: the sizes of the axes, the first of which is the pipeline's if there are stages; None tries all meshes
        of one or two axes (of as many as ``axis_names`` has).
    axis_names: names of the axes, for pins and reports; None: "axis0", "axis1", ...
    joint: search pipeline, mesh, micro-batches, ZeRO stage and recompute too, where options leave them open. Pins hold
        in the plan, but not in the estimates by which candidates are chosen.
    by_hand: price the plan that people write for Megatron, DeepSpeed or torchtitan instead of a search, as
        "dp=8,tp=8,pp=4,zero=1,micro_batch=1,recompute=selective,sequence_parallel" or a mapping (the keys are those of
        `autoparallel.planning.by_hand`; `autoparallel.import_plan` reads them from other frameworks' files), whether it
        fits into the devices' memory or not (a ``memory_limit_bytes`` is checked). Sequences are dim 1 of inputs and
        activations to cp and sequence_parallel.
    compare_by_hand: a plan as in ``by_hand``, or "usual" for the fastest of the usual ones on so many devices, with
        which the plan's report compares it, part by part (a joint search does that with the usual ones anyway).
    phase: plan inference by a transformers model instead of a training step: "prefill" (a prompt) or "decode" (one
        token more), without gradients and optimizer state, with a static cache of keys and values as input and output.
    context: tokens that a sequence's cache has room for; the prompt's length in prefill.
    concurrent: sequences at once; None: 1, and for throughput as many as fit and pay.
    objective: what a phase is planned for: "latency" (default) or "throughput" (tokens per second).
    OPTIONS

    Raises CaptureError, InputError, PinError, PlanError, MeshError, SearchError, InfeasibleError, ClusterError.
    """
    time_limit_s = clock.limit_s(joint) if time_limit_s is None else time_limit_s
    asked = locals()
    if any(asked[name] is not None for name in _OF_INFERENCE):
        if taken := sorted(name for name in _OF_TRAINING if asked[name] is not None and asked[name] is not False):
            raise PlanError(f"{', '.join(taken)} belong to a training step: leave them out, or leave out phase, "
                            "objective, context and concurrent")
        make = partial(plan, model, cluster, mesh_shape=mesh_shape, axis_names=axis_names, search=search, pins=pins,
                       memory_limit_bytes=memory_limit_bytes, memory_confidence=memory_confidence,
                       time_limit_s=time_limit_s, recompute="none", progress=progress)
        return plan_inference(lambda call: make(example_kwargs=call), model,
                              "latency" if objective is None else objective, phase, context, concurrent)
    chosen = options_of(asked)
    cluster = check_cluster(cluster)
    check_call(model, example_inputs, example_kwargs)
    check_groups(chosen, model)
    check_axes(mesh_shape, axis_names, cluster.num_devices)
    check_joint(joint, chosen, axis_names)
    if by_hand is not None:
        chosen = with_plan_by_hand(chosen, by_hand, cluster.num_devices,
                                   mesh_shape=mesh_shape, axis_names=axis_names, joint=joint)
    check_limits(chosen)
    if compare_by_hand is not None:
        chosen = compared_by_hand(chosen, compare_by_hand, cluster.num_devices)
    def on_hosts(hosts: Cluster) -> Plan:
        return compiler.plan(model, hosts, example_inputs or (), example_kwargs or {}, mesh_shape, axis_names, joint,
                             chosen)

    return on_hosts(cluster) if chosen.by_rank else on_grouped_hosts(cluster, on_hosts)    # ranks as they are given


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
    outputs: str = "layout",
    check_inputs: int = 100,
    max_forms: int = 64,
    peer_timeout_s: float = 60.0,
    backend: str = "eager",
    cuda_graphs: bool = False,
    disk_path: str | PathLike[str] | None = None,
    search: str = "auto",
    pins: Mapping[str, Any] | None = None,
    baseline: str | None = None,
    memory_limit_bytes: float | None = None,
    memory_confidence: float = 0.95,
    optimizer: str = "adamw",
    time_limit_s: float = 60.0,
    micro_batches: int | Sequence[int] | None = None,
    pipeline_stages: int | None = None,
    stage_replicas: Sequence[int] | None = None,
    schedule: str | None = None,
    recompute: str | None = None,
    saved_on: str | None = None,
    zero_stage: int | None = None,
    reduce_dtype: str | None = None,
    bucket_bytes: float | str | Mapping[str, float] | None = None,
    buckets: int | Sequence[str] | None = None,
    copies: int | None = None,
    pieces: int | None = None,
    offload: str | Mapping[str, str] | None = None,
    offload_fraction: float | None = None,
    step_in_backward: bool | None = None,
    host_memory_limit_bytes: float | None = None,
    disk_limit_bytes: float | None = None,
    progress: Progress | None = None,
) -> ParallelModule:
    """``model`` on ``mesh``: called like the original, computing the same numbers on all its devices together.

    It is traced at its first call, or now if there are example inputs. The original keeps its own parameters, which are
    not trained: save, load and evaluate the returned module.

    model: as one process has it; on the meta device, give it values by `ParallelModule.init_weights` or
        `load_state_dict`.
    mesh: a `torch.distributed.DeviceMesh`, or the number of devices. With a number the axes are the plan's, or else,
        with example inputs, the best that the search finds, or else a single axis.
    example_inputs, example_kwargs: the arguments of a call; None: those of the first call.
    plan: a ready plan to run, instead of a search; options are then for calls of another form (evaluation, shapes).
    cluster: prices the search, as for `plan`, with as many devices; None: the known one of devices with this GPU's name
        (`torch.cuda.get_device_name`; other GPUs need a description), or of this machine's CPU processes.
    inputs: "global": plain tensors are the same on all ranks; "local": each rank's rows (dim 0) of the global batch, in
        rank order, as a DistributedSampler deals them out (example inputs too); or a mapping from argument names to
        either, the others being global. Tensors without dims are always global.
    check_inputs: ranks compare global tensors in the first three calls and every so many after (0: never), and the
        shapes of local ones in every call (on GPUs without waiting, if the process group has a CPU backend too:
        "cpu:gloo,cuda:nccl"); in the same calls the gradients that a loss outside of the model gives plain outputs,
        if the process group has a CPU backend.
    outputs: "layout": what the plan shards comes back as a DTensor, other outputs as plain tensors; "whole": each rank
        gets every output whole, as a plain tensor (caches of keys and values stay sharded), for code that does not know
        DTensors: losses of plain targets, metrics. That gathers them at each call. Gradients are right where every rank
        computes the same of them. Pipelines give the loss of `ParallelModule.step` only, to every rank.
    backend: what runs the program: "eager", node by node; "inductor", forward and backward each one graph, traced by
        AOTAutograd with its collectives (in buckets, overlapped) and compiled, which takes a minute or more at the
        first call; "auto", Inductor on GPUs with Triton, eager elsewhere; "aot_eager", the traced graphs without
        Inductor, to find a fault. Compiled graphs have no double backward, and no backward with retain_graph.
    cuda_graphs: on GPUs, forward and backward are recorded at the second call of a form, and one launch each replays
        them: for steps in which the host is slower than the device. Each form keeps the memory of its recording.
        Programs that draw random numbers (dropout), or have shapes that depend on data, run without, and a warning says
        why; so does a call that comes before the backward of the last one. No second backward of a call, and none with
        create_graph. Raises LoweringError, at the second call, for an op that waits for the host.
    disk_path: the folder for what is on disk (``offload="disk"``), on a disk of each rank's machine.
    max_forms: compiled programs to keep, of calls of different forms; the least recently used is dropped.
    peer_timeout_s: a rank whose process shows no sign of life for so many seconds (stopped, hung, its machine gone) is
        named in a PeerError on the others; one whose process has ended, in a few seconds.
    OPTIONS

    Raises MeshError without a process group or when the mesh is not the world's size, PlanError when the options
    decide what the plan has decided, InputError on all ranks where local examples have different shapes.
    """
    from autoparallel.runtime.inputs import Inputs
    from autoparallel.runtime.state import OUTPUTS

    chosen = options_of(locals())
    check_call(model, example_inputs, example_kwargs)
    check_groups(chosen, model)
    taken = Inputs.of(model, inputs, check_inputs)
    if isinstance(max_forms, bool) or not isinstance(max_forms, int) or max_forms < 2:
        raise PlanError(f"max_forms is {shown(max_forms)}: give the number of compiled programs to keep, 2 or more")
    if isinstance(peer_timeout_s, bool) or not isinstance(peer_timeout_s, (int, float)) or not peer_timeout_s >= 1:
        raise PlanError(f"peer_timeout_s is {shown(peer_timeout_s)}: give seconds, 1 or more")
    if plan is not None and not isinstance(plan, Plan):
        raise PlanError(f"plan is {shown(plan)}: give a Plan, autoparallel.Plan.load(path) of a file")
    if plan and (decided := sorted(name for name in DECIDED_BY_A_PLAN if getattr(chosen, name) is not None)):
        raise PlanError(f"the plan decides {', '.join(decided)}: leave them out, or leave out the plan and search for "
                        "another")
    if not isinstance(outputs, str) or outputs not in OUTPUTS:
        raise PlanError(f"unknown outputs {shown(outputs)}; there are {list(OUTPUTS)}")
    check_disk_path(disk_path, chosen, plan)
    check_limits(chosen, plan)
    given = example_inputs is not None or example_kwargs is not None
    from autoparallel.runtime.failing import naming_peers

    with naming_peers():
        return compiler.compile(model, mesh, (example_inputs or (), example_kwargs or {}) if given else None, taken,
                                outputs, plan, cluster, chosen, backend, cuda_graphs, max_forms, peer_timeout_s,
                                None if disk_path is None else Path(disk_path))


__all__ = ["compile", "plan"]
