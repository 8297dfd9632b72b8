"""The walk: model -> graph -> plan (`planning`: strategy graph -> costs -> problem -> solution) -> program of a rank.

`plan` needs no process group and no devices; `compile` adds lowering and returns a module to call. Their arguments are
those of `autoparallel.plan` and `autoparallel.compile`, checked.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autoparallel.capture import capture, capture_for_any, traced_on
from autoparallel.garbage import collected_later
from autoparallel.layout import Layout
from autoparallel.partition import MicroBatches, split_batch
from autoparallel.planning.history import SearchHistory
from autoparallel.planning.offloading import tiers_of
from autoparallel.planning.one_mesh import plan_call
from autoparallel.planning.options import Options
from autoparallel.planning.plan_graph import plan_graph
from autoparallel.plans import Hybrid, Plan
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from autoparallel.kernels.groups import MeshPosition
    from autoparallel.runtime.form import Compiled
    from autoparallel.runtime.inputs import Inputs
    from autoparallel.runtime.module import ParallelModule

Call = tuple[Sequence[Any], Mapping[str, Any]]  # the arguments of an example call: positional ones, and by name


def plan(model: nn.Module, cluster: Cluster, args: Sequence[Any], kwargs: Mapping[str, Any],
         mesh_shape: Sequence[int] | None, axis_names: Sequence[str] | None, joint: bool, options: Options) -> Plan:
    """The best plan for one training step, as `autoparallel.plan`."""
    history = SearchHistory(options.progress)
    with collected_later():
        started = time.process_time()
        graph = capture(model, args, kwargs)
        captured = time.process_time() - started
    best = plan_graph(graph, cluster, mesh_shape, axis_names, joint, replace(options, progress=history))
    evidence = replace(best.evidence, seconds={"capture": captured, **best.evidence.seconds})
    return replace(best, evidence=evidence, record=history.told(best))


def compile(model: nn.Module, mesh: DeviceMesh | int, example: Call | None, inputs: Inputs, outputs: str,
            plan: Plan | None, cluster: Cluster | str | Path | None, options: Options, backend: str, replays: bool,
            max_forms: int, peer_timeout_s: float, disk_path: Path | None) -> ParallelModule:
    """The model on a mesh, as `autoparallel.compile`; traced now if there is an ``example`` call."""
    import torch.distributed as dist

    from autoparallel import backends
    from autoparallel.kernels import groups
    from autoparallel.runtime.agree import made_equally
    from autoparallel.runtime.failing import agree_on, reached
    from autoparallel.runtime.let_go import Root
    from autoparallel.runtime.mesh import check_mesh, cluster_of
    from autoparallel.runtime.module import ParallelModule
    from autoparallel.runtime.offload.files import check_folder
    from autoparallel.runtime.offload.optimizer import Limits

    root = Root(model)
    model = root.module
    if dist.is_initialized():
        with reached():
            agree_on("autoparallel.compile", limit_s=peer_timeout_s)
        if disk_path is not None:
            made_equally("a disk_path", partial(check_folder, disk_path), lambda _: "")
    eager = backend == backends.EAGER
    options = replace(options, tiers=tiers_of(eager, disk_path is not None), looks_up=eager)
    if isinstance(mesh, int) and example is not None and plan is None:
        plan, cluster = _plan_on_devices(model, mesh, cluster, backend, inputs.of_all(*example, mesh), options)
        options = options.without_decided()
    mesh = check_mesh(mesh, plan)
    runs_by = backends.chosen(backend, mesh.device_type)
    machine = cluster_of(mesh, cluster, runs_by)
    hybrid = plan.hybrid if plan else options.hybrid(mesh.size(0) if options.has_first_axis else 1)
    position = groups.position_on(mesh, hybrid.pipeline_ranks)
    backends.check(runs_by, hybrid)
    if replays:
        backends.check_replays(hybrid, position)
    forms = _Forms(position, machine, options, hybrid, plan, runs_by, replays)
    parallel = ParallelModule(root, position, hybrid, forms.compiled, inputs, outputs, max_forms,
                              Limits.of(options.host_memory_limit_bytes, options.disk_limit_bytes, disk_path))
    if example is not None:
        parallel.trace(*parallel.taken(*example), called="compile")
    return parallel


def _plan_on_devices(model: nn.Module, count: int, cluster: Cluster | str | Path | None, backend: str, example: Call,
                     options: Options) -> tuple[Plan, Cluster]:
    """The best plan on so many devices, over all ways to cut them into axes, and the cluster that priced it."""
    from autoparallel import backends
    from autoparallel.runtime.agree import decide_once
    from autoparallel.runtime.mesh import check_mesh, cluster_of

    mesh = check_mesh(count)
    machine = cluster_of(mesh, cluster, backends.chosen(backend, mesh.device_type))
    if options.stages == 1 and options.micro_batches is None:
        options = replace(options, micro_batches=1)  # so that the module can be called, not only by its `step`
    with traced_on(torch.device(mesh.device_type)):
        return decide_once(lambda: plan(model, machine, *example, None, None, False, options)), machine


@dataclass
class _Forms:
    """Programs for each form of a module's calls. The first form decides where parameters and their states live and
    where the pipeline is cut; the others find them there. ``given``: a plan to take in place of a search."""

    position: MeshPosition
    cluster: Cluster
    options: Options
    hybrid: Hybrid
    given: Plan | None
    backend: str
    replays: bool
    first: Hybrid = field(init=False)

    def __post_init__(self) -> None:
        self.first = self.hybrid

    def compiled(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], placed: Mapping[str, Layout],
                 plain: bool, numbers: Sequence[int]) -> Compiled:
        """This rank's programs of one form: captured on every rank, planned by rank 0. ``placed``: layouts of the
        parameters, of all but the first form; ``plain``: a call that is not a training step; ``numbers``: as
        `capture_for_any` takes them."""
        from autoparallel.runtime.agree import made_equally

        how = self._how(bool(placed), plain)
        with traced_on(torch.device(self.position.mesh.device_type)):
            micro = made_equally(
                "a program", lambda: split_batch(capture_for_any(model, args, kwargs, numbers), how.micro_batches),
                lambda made: f"{made.whole.fingerprint} {how}", lines=lambda made: made.whole.described())
        if placed and how.stages > 1 and {*self.first.cuts} <= {node.name for node in micro.body.nodes}:
            how = replace(how, cuts=self.first.cuts)
        made = self._programs(micro, how, placed, None if placed or plain else self.given)
        if not placed:
            self.first = made.plan.hybrid
        return made

    def _how(self, follows: bool, plain: bool) -> Hybrid:
        """How a form runs; one that ``follows`` another, or is plain, has its parameters where the first has them."""
        asked, first = self.hybrid, self.first
        plainly = Hybrid(reduce_dtype=asked.reduce_dtype, bucket_bytes=asked.bucket_bytes, fusion=asked.fusion)
        how = plainly if plain else asked
        if not (follows or plain):
            return how
        stage = 3 if first.offload.moves_parameters else how.zero_stage
        return replace(how, offload=first.offload, zero_stage=stage, on_host=first.on_host, cached=first.cached)

    @collected_later()
    def _programs(self, micro: MicroBatches, how: Hybrid, placed: Mapping[str, Layout], given: Plan | None) -> Compiled:
        """Every rank makes its own programs, of the ``given`` plan or of that which rank 0 makes, and checks them."""
        from autoparallel.runtime.agree import decide_once
        from autoparallel.runtime.programs import compiled

        position, options = self.position, self.options
        if placed:
            options = replace(options, offload=None, offload_fraction=None)
        space = StrategySpace(micro.body, tuple(position.mesh.shape), position.axis_names, placed)

        def best() -> Plan:
            made = plan_call(space, micro, self.cluster, options, placed, how)
            return replace(made, record=made.known)  # for all ranks: what makes it stays on rank 0

        return compiled(given or decide_once(best), space, micro, position, self.cluster, options.optimizer,
                        self.backend, self.replays)
