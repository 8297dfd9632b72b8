"""``autoparallel doctor``: versions, devices, links measured quickly, and what works here."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata

#: Distributions: (name, whether it is needed, what for).
PACKAGES = (("torch", True, "models and collectives"), ("numpy", True, "prices"), ("ortools", True, "search"),
            ("typer", True, "the command line"), ("jinja2", False, "--html"), ("transformers", False, "config files"),
            ("accelerate", False, "the integration of that name"), ("lightning", False, "the integration of that name"))
COPY_BYTES = 2**26
REPEATS = 5


@dataclass(frozen=True)
class Finding:
    """One thing looked at: whether it works, what was found, and whether anything can be done without it."""

    what: str
    works: bool
    said: str
    needed: bool = True


def findings() -> Iterator[Finding]:
    """All that is looked at, in order; takes a few seconds."""
    import autoparallel

    version, python = autoparallel.__version__, platform.python_version()
    yield Finding("autoparallel", True, f"{version} on Python {python}, {platform.platform()}")
    yield from map(_package, PACKAGES)
    yield from _devices()
    yield _tried("planning", _plans, needed=True)
    yield _tried("process groups (gloo)", _groups, needed=True)
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    yield Finding("backend inductor", compiler is not None, compiler or "no C++ compiler: backend='eager' works",
                  needed=False)


def _package(entry: tuple[str, bool, str]) -> Finding:
    name, needed, use = entry
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, False, f"not installed; needed for {use}", needed)
    wanted = [line for line in _requirements() if line.startswith(f"{name}==")]
    exact = wanted[0].split(";")[0].removeprefix(f"{name}==").strip() if wanted else None
    fits = exact is None or version.split("+")[0] == exact
    return Finding(name, fits, version if fits else f"{version}; this autoparallel is made for {exact}", needed)


def _requirements() -> Sequence[str]:
    """The packages that this one asks for; none where it runs from a source tree that was not installed."""
    try:
        return metadata.requires("autoparallel") or ()
    except metadata.PackageNotFoundError:
        return ()


def _tried(what: str, work: Callable[[], str], needed: bool) -> Finding:
    try:
        return Finding(what, True, work(), needed)
    except Exception as error:  # whatever it is, it is what the user wants to know
        return Finding(what, False, f"{type(error).__name__}: {error}", needed)


def _devices() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding("GPUs", False, "none: plans can be made, and jobs run on CPU processes", needed=False)
        yield _tried("memory copies", lambda: _rate(torch.device("cpu"), torch.device("cpu")), needed=False)
        return
    count = torch.cuda.device_count()
    for number in range(count):
        known = torch.cuda.get_device_properties(number)
        yield Finding(f"GPU {number}", True, f"{known.name}, {known.total_memory / 2**30:.1f} GiB")
    first = torch.device("cuda", 0)
    yield _tried("copies inside GPU 0", lambda: _rate(first, first), needed=False)
    yield _tried("host to GPU 0", lambda: _rate(torch.device("cpu"), first), needed=False)
    for number in range(1, count):
        other = torch.device("cuda", number)
        yield _tried(f"GPU 0 to GPU {number}", lambda to=other: _rate(first, to), needed=False)  # type: ignore[misc]


def _rate(source: object, target: object) -> str:
    """The rate of copies of `COPY_BYTES`, the best of a few."""
    import torch

    assert isinstance(source, torch.device) and isinstance(target, torch.device)
    given = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=source)
    given = given.pin_memory() if source.type == "cpu" and target.type == "cuda" else given
    taken = torch.empty(COPY_BYTES, dtype=torch.uint8, device=target)
    best_s = float("inf")
    for _ in range(REPEATS):
        _finish(source, target)
        started = time.perf_counter()
        taken.copy_(given, non_blocking=True)
        _finish(source, target)
        best_s = min(best_s, time.perf_counter() - started)
    return f"{COPY_BYTES / best_s / 1e9:.1f} GB/s, of {COPY_BYTES >> 20} MiB (best of {REPEATS})"


def _finish(*devices: object) -> None:
    import torch

    for device in devices:
        if isinstance(device, torch.device) and device.type == "cuda":
            torch.cuda.synchronize(device)


def _plans() -> str:
    """A plan of a small model, from capture to prediction."""
    import torch

    import autoparallel

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    cluster = autoparallel.Cluster.load("h100-sxm", num_devices=2)
    started = time.perf_counter()
    autoparallel.plan(model, cluster, example_inputs=(torch.zeros(16, 8),), mesh_shape=(2,))
    return f"a small model in {time.perf_counter() - started:.2f} s"


def _groups() -> str:
    """A process group of this process alone, and a collective."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return f"initialised already, {dist.get_world_size()} ranks"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()
    nccl = "nccl too" if dist.is_nccl_available() else "no nccl in this torch"
    return f"one rank, all_reduce; {nccl}"


__all__ = ["Finding", "findings"]
