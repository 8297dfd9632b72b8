"""Local ranks: one process per rank on this machine, on its CPU or its GPUs."""

from __future__ import annotations

import logging
import os
import pickle
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from autoparallel.errors import LaunchError, shown
from autoparallel.kernels.groups import destroy_groups

_LOG = logging.getLogger("autoparallel")


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def launch(function: Callable[..., Any], num_ranks: int, *args: Any, device: str | None = None) -> list[Any]:
    """Run ``function(*args)`` on ``num_ranks`` local processes with a process group; returns what each rank returned.

    ``function`` must be importable by name. An exception on any rank is raised here with that rank's traceback.
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
    with mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        mp.spawn(_rank_main, (num_ranks, used, free_port(), function, args, results), nprocs=num_ranks, join=True)
        return [pickle.loads(results[rank]) for rank in range(num_ranks)]


def _rank_main(rank: int, num_ranks: int, gpus: int, port: int, function: Callable[..., Any], args: Any, results: Any
               ) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))
    if gpus:
        torch.cuda.set_device(rank % gpus)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""          # before the first call of CUDA, which reads it once
    backend = "cpu:gloo,cuda:nccl" if gpus >= num_ranks else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    try:
        results[rank] = pickle.dumps(function(*args))    # so that the manager need not import what it is made of
    finally:
        destroy_groups()
