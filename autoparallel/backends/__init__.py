"""What runs an emitted program: Python node by node, or graphs traced by AOTAutograd and compiled by Inductor."""

from __future__ import annotations

import importlib.util
import logging
import shutil
from collections.abc import Collection
from typing import TYPE_CHECKING

from autoparallel.errors import PlanError, shown
from autoparallel.schedule.schedules import names_of
from autoparallel.schedule.step_config import Hybrid

if TYPE_CHECKING:
    from autoparallel.kernels.groups import MeshPosition

EAGER, TRACED, INDUCTOR, AUTO = "eager", "aot_eager", "inductor", "auto"
BACKENDS = (EAGER, INDUCTOR, TRACED, AUTO)
_LOG = logging.getLogger("autoparallel")


def chosen(backend: object, device_type: str) -> str:
    """The backend of this name on a device; "auto" is Inductor on a GPU with Triton, else eager, and says so.

    Raises PlanError for an unknown name, and for Inductor on a CPU without a C++ compiler.
    """
    if backend not in BACKENDS:
        raise PlanError(f"unknown backend {shown(backend)}; there are {list(BACKENDS)}")
    if backend == AUTO:
        compiles = device_type != "cpu" and importlib.util.find_spec("triton") is not None
        backend = INDUCTOR if compiles else EAGER
        _LOG.info("backend=\"auto\" is %r on %s", backend, device_type)
    if backend == INDUCTOR and device_type == "cpu" and shutil.which("g++") is None and shutil.which("clang++") is None:
        raise PlanError("backend=\"inductor\" on a CPU needs a C++ compiler (g++ or clang++), and none is installed: "
                        "install one, or take backend=\"eager\"")
    return str(backend)


def check(backend: str, hybrid: Hybrid, sparse: Collection[str] = ()) -> None:
    """Raises PlanError for a step configuration that this backend cannot run. ``sparse``: the tables with sparse
    gradients."""
    if backend == EAGER:
        return
    if hybrid.offload.moves_parameters:
        raise PlanError(f"offload={hybrid.offload.place!r} fetches parameters op by op, and backend={backend!r} reads "
                        "all at the beginning of its graphs: take offload='host', or backend='eager'")
    if hybrid.on_host:
        raise PlanError(f"tables on the host ({hybrid.on_host[0]!r}) are looked up op by op, and graphs of backend="
                        f"{backend!r} run on the device: leave the pin out, or take backend='eager'")
    if sparse:
        raise PlanError(f"{next(iter(sparse))} has sparse gradients (sparse=True), whose sizes depend on the ids, and "
                        f"graphs of backend={backend!r} have fixed ones: take backend='eager', or sparse=False")
    if hybrid.reads_alone and leaves_in_backward(hybrid):
        raise PlanError(f"schedule {hybrid.schedule!r} with ZeRO-3 makes a stage one graph of backend={backend!r}, and "
                        "gradients or saved tensors that leave the device during backward need a graph for each block: "
                        "keep them on the device, take zero_stage=2, or another schedule: "
                        f"{names_of(lambda how: not how.splits_backward)}, or backend='eager'")


def leaves_in_backward(hybrid: Hybrid) -> bool:
    """Whether gradients or saved tensors leave the device, or parameters are stepped, block by block in backward."""
    return hybrid.offload.moves_gradients or hybrid.offload.in_backward or hybrid.saved_on != "device"


def check_replays(hybrid: Hybrid, position: MeshPosition, sparse: Collection[str] = ()) -> None:
    """Raises PlanError for a step configuration, or devices, whose program cannot run as CUDA graphs. ``sparse``: the
    tables with sparse gradients."""
    def refuse(why: str) -> None:
        raise PlanError(f"cuda_graphs=True: {why}; leave it out")

    if (device := position.mesh.device_type) != "cuda":
        refuse(f"there are CUDA graphs on GPUs only, and the mesh is of {device!r}")
    if not hybrid.is_plain:
        refuse(f"a step of {hybrid.micro_batches} micro-batches, {hybrid.stages} stages and {hybrid.copies} copies is "
               "several programs, and only one forward and its backward are recorded")
    if hybrid.offload.in_backward:
        refuse("step_in_backward=True steps each parameter when its gradient comes, and a recording gives all "
               "gradients at its end")
    if hybrid.offload.is_away or hybrid.saved_on != "device" or hybrid.on_host:
        refuse("what goes to the host or comes from it waits for the host, which a recording cannot")
    if sparse:
        refuse(f"{next(iter(sparse))} has sparse gradients (sparse=True), whose sizes depend on the ids")
    import torch.distributed as dist

    if position.whole.size() > 1 and (how := dist.get_backend(position.whole.get_group(0))) != "nccl":
        refuse(f"{how} sends by the host; NCCL can be recorded")


__all__ = ["AUTO", "BACKENDS", "EAGER", "INDUCTOR", "TRACED", "check", "check_replays", "chosen",
           "leaves_in_backward"]
