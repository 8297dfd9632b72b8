"""Local ranks: one process per rank on this machine, over gloo, or NCCL if there is a GPU per rank."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from autoparallel.kernels.groups import destroy_groups


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def launch(function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """Run ``function(*args)`` on ``num_ranks`` local processes with a process group; returns what each rank returned.

    ``function`` must be importable by name. An exception on any rank is raised here with that rank's traceback.
    """
    with mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        mp.spawn(_rank_main, (num_ranks, free_port(), function, args, results), nprocs=num_ranks, join=True)
        return [pickle.loads(results[rank]) for rank in range(num_ranks)]


def _rank_main(rank: int, num_ranks: int, port: int, function: Callable[..., Any], args: Any, results: Any) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))
    gpus = torch.cuda.device_count() >= num_ranks
    if gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if gpus else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks
    )
    try:
        results[rank] = pickle.dumps(function(*args))    # so that the manager need not import what it is made of
    finally:
        destroy_groups()
