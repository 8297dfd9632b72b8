"""Local ranks: one process per rank on this machine, on its CPU or its GPUs."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from autoparallel.errors import AutoparallelError, LaunchError, PeerError, shown
from autoparallel.kernels.groups import destroy_groups
from cost_models.files import write_whole

_LOG = logging.getLogger("autoparallel")
_FAILED = "failed-"  # with a rank: the file of the error that it raised


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def launch(function: Callable[..., Any], num_ranks: int, *args: Any, device: str | None = None) -> list[Any]:
    """Run ``function(*args)`` on ``num_ranks`` local processes with a process group; returns what each rank returned.

    ``function`` must be importable by name. An exception on any rank is raised here: one of ours as it is (of several
    the one that is no PeerError), others with that rank's traceback. Interrupts and SIGTERM end the ranks, too.
    ``device``: "cpu" (gloo; the ranks see no GPU), or "cuda": a GPU each (NCCL), or, where there are fewer, shared in
    turn (gloo, which does not send GPU memory from one rank to another: no pipelines). None: "cuda" where there is a
    GPU each, else "cpu". Raises LaunchError for "cuda" without a GPU.
    """
    gpus = torch.cuda.device_count()
    if device not in (None, "cpu", "cuda") or (device == "cuda" and not gpus):
        raise LaunchError(f"device is {shown(device)}: 'cpu', or 'cuda' where torch finds a GPU, is required")
    used = 0 if device == "cpu" or (device is None and gpus < num_ranks) else gpus
    if device is None and gpus and not used:
        _LOG.warning("%d processes were asked for and there are %d GPUs: they run on the CPU", num_ranks, gpus)
    with TemporaryDirectory() as made, _ended_by_sigterm():
        results = Path(made)
        ranks = mp.spawn(_rank_main, (num_ranks, used, free_port(), function, args, results), num_ranks, join=False)
        try:
            while not ranks.join():
                pass
        except mp.ProcessRaisedException as error:
            raise _told(results, error) from error
        finally:
            for process in ranks.processes:    # of a command that is stopped; else they have ended
                process.kill()
                process.join()
        return [pickle.loads((results / str(rank)).read_bytes()) for rank in range(num_ranks)]


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Within, SIGTERM (kill, timeout, a scheduler) is SystemExit, so that what was started is ended, too."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _told(results: Path, error: mp.ProcessRaisedException) -> Exception:
    """Our own error that ended the ranks, which needs no traceback; else the process's."""
    first = results / f"{_FAILED}{error.error_index}"
    if not first.exists():
        return error
    ours: list[Exception] = [pickle.loads(path.read_bytes()) for path in (first, *results.glob(f"{_FAILED}*"))]
    return next((one for one in ours if not isinstance(one, PeerError)), error)


def _rank_main(rank: int, num_ranks: int, gpus: int, port: int, function: Callable[..., Any], args: Any, results: Path
               ) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))
    if gpus:
        torch.cuda.set_device(rank % gpus)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""          # before the first call of CUDA, which reads it once
    backend = "cpu:gloo,cuda:nccl" if gpus >= num_ranks else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    try:
        write_whole(results / str(rank), pickle.dumps(function(*args)))
    except AutoparallelError as error:
        with suppress(Exception):                        # one that cannot be pickled is told with its traceback
            write_whole(results / f"{_FAILED}{rank}", pickle.dumps(error))
        raise
    finally:
        destroy_groups()
