"""Programs of the model zoo for GPUs, run forward on tensors of device "cuda" without data, on a machine that has none.

    python -m benchmarks.cuda_without_gpu [names]

What an op would refuse, tensors of several devices together first of all, it refuses here: of each architecture the
program of a drawn plan on (2, 2), of the last rank, as it runs: with its communication overlapped. A program runs until
an op needs values (to which expert a token goes), and the line says so. torch's builds without CUDA want a guard that
sets the current device; one that does nothing is compiled (g++) and loaded.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer

from autoparallel.capture import capture
from autoparallel.strategies.host_lookups import tables_of
from benchmarks.architectures import ARCHITECTURES
from benchmarks.model_zoo import looking_up, random_candidate, run_without_data, toy_cluster
from benchmarks.zoo import build, inputs_of

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, &guard);
}
"""


def load_guard() -> None:
    """Make this process take tensors of device "cuda" that have no data. For processes that do nothing else."""
    if torch.backends.cuda.is_built():
        return
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD)
        subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}", str(source), "-o",
                        str(library), f"-L{root / 'lib'}", "-lc10"], check=True)
        ctypes.CDLL(str(library))


def run(name: str, on_host: bool = False) -> tuple[bool, int]:
    """Run one architecture's program: whether it ran to its end, and how many tables are on the host (none, unless all
    that can be are to be). Raises its error."""
    graph = capture(build(name), (), inputs_of(name))
    tables, candidate = [table for table, _ in tables_of(graph)] if on_host else [], random_candidate(graph, (2, 2), 0)
    candidate = looking_up(candidate, tables, 0)
    return run_without_data(candidate, toy_cluster(), coordinates=[(1, 1)], on_host=tables), len(tables)


def main(names: Annotated[list[str] | None, typer.Argument(help="architectures; without, all 46")] = None,
         tables_on_host: Annotated[bool, typer.Option(help="with all tables that can be looked up on the host "
                                                           "there")] = False) -> None:
    """Every architecture; the exit status is 1 if one fails."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    load_guard()
    failed = 0
    for name in names or ARCHITECTURES:
        try:
            whole, tables = run(name, tables_on_host)
            print(name, "runs" if whole else "runs until an op that needs values",
                  f"with {tables} tables on the host" if tables_on_host else "", flush=True)
        except Exception as error:
            failed += 1
            print(name, f"fails: {type(error).__name__}: {error}", flush=True)
    raise typer.Exit(failed > 0)


if __name__ == "__main__":
    typer.run(main)
