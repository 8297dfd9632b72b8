"""The checks, each run on every rank of one process group: equality, prediction, race, failure of a rank."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import autoparallel
from autoparallel.errors import AutoparallelError, MeshError, PeerError
from autoparallel.kernels import groups
from autoparallel.runtime.agree import decide_once
from autoparallel.runtime.verify import Verification
from autoparallel.selftest.subjects import SUBJECTS, Subject, wide_llama
from cost_models import Cluster

#: The largest difference of a loss (relative) and of a gradient (over the model's largest) that rounding explains.
TOLERANCE = 1e-5
WARM_UP = 2


@dataclass(frozen=True)
class Check:
    """One result. ``status``: "passed", "failed", "measured", "refused" (by name, which the text is) or "skipped" (no
    time, or a package is not there). ``figures``: seconds, ratios and differences by name."""

    part: str
    name: str
    status: str
    text: str
    figures: Mapping[str, float]
    seconds: float


@dataclass(frozen=True)
class Way:
    """One kind of plan: mesh and options of `autoparallel.compile`; ``by_step``: run by `ParallelModule.step`;
    ``calls``: the number of the call that is compared; those before have the batch in other orders."""

    mesh_shape: tuple[int, ...]
    options: Mapping[str, Any]
    by_step: bool = False
    calls: int = 1


def ways(size: int) -> dict[str, Way]:
    """The kinds of plan that so many ranks can run."""
    line, found = (size,), {}
    found["data parallel"] = Way(line, {"baseline": "ddp"})
    found["fully sharded"] = Way(line, {"baseline": "fsdp"})
    found["fully sharded, ZeRO-3, recompute"] = Way(line, {"baseline": "fsdp", "zero_stage": 3, "recompute": "full"})
    found["tensor parallel"] = Way(line, {"baseline": "tensor_parallel"})
    found["tensor parallel, layers in two pieces"] = Way(line, {"baseline": "tensor_parallel", "pieces": 2})
    found["data parallel, CUDA graphs"] = Way(line, {"baseline": "ddp", "cuda_graphs": True}, calls=3)
    found["tensor parallel, CUDA graphs"] = Way(line, {"baseline": "tensor_parallel", "cuda_graphs": True}, calls=3)
    found["searched"] = Way(line, {})
    found["two micro-batches"] = Way(line, {"micro_batches": 2}, by_step=True)
    found["ZeRO-2, two micro-batches"] = Way(line, {"micro_batches": 2, "zero_stage": 2}, by_step=True)
    found["two copies"] = Way(line, {"micro_batches": 2, "copies": 2}, by_step=True)
    found["selective recompute"] = Way(line, {"baseline": "ddp", "recompute": "selective"})
    found["gradients and states on the host"] = Way(line, {"offload": "host", "zero_stage": 1})
    found["parameters on the host"] = Way(line, {"offload": "parameters", "zero_stage": 3})
    if size % 2 == 0:
        grid = (2, size // 2)
        found["two stages"] = Way(grid, {"pipeline_stages": 2, "micro_batches": 2}, by_step=True)
        if size > 2:
            found["searched on two axes"] = Way(grid, {})
    return found


def device() -> torch.device:
    """This rank's: its GPU, if it sees one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def full_precision() -> Iterator[None]:
    """Convolutions and matrix products of GPUs without TF32, whose rounding would hide a wrong number."""
    cudnn, matmul = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = cudnn, matmul


def equality(subject_name: str, backends: tuple[str, ...], seconds: float) -> list[Check]:
    """Loss and gradients of a model under every kind of plan and backend, against this rank's own run of the model."""
    subject, deadline = SUBJECTS[subject_name], time.monotonic() + seconds
    found: list[Check] = []
    with full_precision():
        expected = loss_and_gradients(subject.model(device()), subject.inputs(device()), by_step=False)
        for backend in backends:
            for name, way in ways(dist.get_world_size()).items():
                found.append(_timed("equality", f"{subject.name}, {name}, {backend}", deadline,
                                    partial(_equal, subject, way, backend, expected)))
    return found


def _equal(subject: Subject, way: Way, backend: str, expected: dict[str, Tensor]) -> tuple[str, str, dict[str, float]]:
    inputs = subject.inputs(device())
    try:
        parallel = autoparallel.compile(subject.model(device()), _mesh(way.mesh_shape), example_kwargs=inputs,
                                        backend=backend, time_limit_s=10.0, **way.options)
        for left in reversed(range(way.calls)):
            parallel.zero_grad()
            rolled = {name: value.roll(left, 0) for name, value in inputs.items()}
            actual = loss_and_gradients(parallel, rolled, way.by_step)
    except (PeerError, MeshError):
        raise
    except AutoparallelError as error:
        return "refused", str(error).splitlines()[0], {}
    names: list[set[str]] = [set()] * dist.get_world_size()      # a pipeline's ranks have those of their stages
    dist.all_gather_object(names, set(actual))
    if missing := sorted(expected.keys() - set().union(*names)):
        return "failed", f"no rank has a gradient of {missing[0]}", {}
    largest = max(float(v.abs().max()) for k, v in expected.items() if k != "loss")
    difference = {name: float((actual[name] - value).abs().max()) / (float(value.abs()) if name == "loss" else largest)
                  for name, value in expected.items() if name in actual}
    worst = max(difference, key=lambda name: difference[name])
    gradients = [value for name, value in difference.items() if name != "loss"]
    figures = {"loss": difference["loss"], "gradients": max(gradients, default=0.0)}
    status = "passed" if all(value <= TOLERANCE for value in difference.values()) else "failed"
    if status == "passed" and way.options.get("cuda_graphs") and not getattr(parallel, "replays", False):
        return "failed", "it ran without CUDA graphs", figures
    return status, f"largest difference {difference[worst]:.1e} ({worst})", figures


def loss_and_gradients(model: nn.Module, inputs: dict[str, Tensor], by_step: bool) -> dict[str, Tensor]:
    """In float64 on the CPU, by parameter name, and the loss as "loss". Collective for a parallel module."""
    if by_step:
        loss = _loss(model.step(**inputs))                       # type: ignore[operator]
    else:
        loss = _loss(model(**inputs))
        loss.backward()
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: _whole(value).detach().double().cpu() for name, value in {"loss": loss, **named}.items()}


def prediction(seconds: float) -> list[Check]:
    """How well a step is predicted on these devices: calibrate them (collectives, ops), predict a data-parallel step of
    a Llama, measure it, and predict it again with the correction that `verify` finds. ``seconds``: the time limit."""
    from autoparallel.calibration.measure import calibrate

    deadline, subject = time.monotonic() + seconds, wide_llama()
    inputs, model = subject.inputs(device()), subject.model(device())

    def verified(cluster: Cluster) -> Verification:
        parallel = autoparallel.compile(model, _mesh((dist.get_world_size(),)), example_kwargs=inputs, baseline="ddp",
                                        cluster=cluster)
        return parallel.verify(**inputs)                         # type: ignore[arg-type]

    def check() -> tuple[str, str, dict[str, float]]:
        cluster = calibrate("selftest", dist.get_world_size(), repeats=3).cluster
        first = verified(cluster)
        again = verified(first.corrected)
        figures = {"predicted_s": first.predicted_s, "measured_s": first.measured.step_s, "error": first.error,
                   "error_after_correction": again.error}
        return "measured", (f"predicted {first.predicted_s:.3g} s, measured {first.measured.step_s:.3g} s "
                            f"({first.error:+.0%}); after the correction {again.error:+.0%}"), figures

    return [_timed("prediction", "data-parallel step of a Llama", deadline, check)]


def race(rounds: int, seconds: float) -> list[Check]:
    """Step times of DDP and FSDP2 over ours with the same layouts, all in turn: above 1, ours is faster."""
    deadline, subject = time.monotonic() + seconds, wide_llama()
    return [_timed("race", f"{ours} against {theirs}", deadline,
                   partial(_raced, subject, ours, theirs, rounds))
            for ours, theirs in (("ddp", "DDP"), ("fsdp", "FSDP2"))]


def _raced(subject: Subject, baseline: str, theirs: str, rounds: int) -> tuple[str, str, dict[str, float]]:
    mesh, inputs, rank = _mesh((dist.get_world_size(),)), subject.inputs(device()), dist.get_rank()
    parallel = autoparallel.compile(subject.model(device()), mesh, example_kwargs=inputs, baseline=baseline)
    mine = {name: value.chunk(mesh.size())[rank] for name, value in inputs.items()}
    steps = {"ours": _step(parallel, parallel.shard_batch(inputs)),
             theirs: _step(_by_torch(subject.model(device()), theirs, mesh), mine)}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM_UP + rounds):
        for name, step in steps.items():
            dist.barrier()
            started = time.perf_counter()
            step()
            dist.barrier()
            if turn >= WARM_UP:
                taken[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    ratio = medians[theirs] / medians["ours"]
    text = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in medians.items())
    return "measured", f"{text}: {ratio:.2f}", {**{f"{k}_s": v for k, v in medians.items()}, "ratio": ratio}


def _by_torch(model: nn.Module, how: str, mesh: DeviceMesh) -> nn.Module:
    if how == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for block in model.model.layers:                             # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _step(model: nn.Module, inputs: dict[str, Any]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        loss = _loss(model(**inputs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        float(_whole(loss.detach()))

    return step


def failure() -> list[Check]:
    """The last rank raises in backward: every other one must hear of it, in its next step at the latest, and be told
    its number. Ends the groups."""
    guilty = dist.get_world_size() - 1
    subject = SUBJECTS["mlp"]
    inputs = subject.inputs(device())

    def check() -> tuple[str, str, dict[str, float]]:
        parallel = autoparallel.compile(subject.model(device()), _mesh((dist.get_world_size(),)), baseline="ddp",
                                        micro_batches=2, example_kwargs=inputs)

        def fail(_: Tensor) -> None:
            raise ValueError("raised by the selftest")

        if dist.get_rank() == guilty:
            next(parallel.parameters()).register_hook(fail)
        started = time.monotonic()
        try:
            for _ in range(2):
                parallel.step(**inputs)
        except PeerError as error:
            taken = time.monotonic() - started
            return ("passed" if error.rank == guilty else "failed",
                    f"rank {error.rank} was named after {taken:.1f} s", {"seconds": taken})
        except ValueError:
            return "passed", "raised here", {}
        return "failed", "two steps ended though a rank had failed in the first", {}

    return [_timed("failure", "a rank raises in backward", math.inf, check)]


def _timed(part: str, name: str, deadline: float, check: Callable[[], tuple[str, str, dict[str, float]]]) -> Check:
    """The check, or that rank 0's clock leaves no time for it."""
    started = time.monotonic()
    if not decide_once(lambda: started < deadline):
        return Check(part, name, "skipped", "no time left", {}, 0.0)
    try:
        status, text, figures = check()
    except Exception as error:    # ends the part: ranks may be at different places
        error.add_note(f"in the check {name}")
        raise
    return Check(part, name, status, text, figures, time.monotonic() - started)


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh(device().type, shape)


def _loss(output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output.loss
    return found


def _whole(value: Tensor) -> Tensor:
    """The whole tensor. (torch's own gathering of GPU memory by gloo ends the process: there, of a copy on the CPU.)"""
    if not isinstance(value, DTensor):
        return value
    if not all(groups.sends(group, value.device) for group in value.device_mesh.get_all_groups()):
        value = DTensor(value._local_tensor.detach().cpu(), value._spec, requires_grad=False)
    return value.full_tensor()


__all__ = ["Check", "Way", "equality", "failure", "prediction", "race", "ways"]
