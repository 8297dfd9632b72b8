"""Seconds of a step's traffic through parameter servers, and of steps of uneven workers.

With n workers and m servers a worker's link carries its bytes b, and a server's n b / m: of dense parameters of P bytes
b = 2 P (pulled and pushed), where a ring all-reduce moves 2 P (n - 1) / n by each rank's link.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cost_models.collectives import send_recv_s
from cost_models.links import Link


@dataclass(frozen=True)
class ServerTraffic:
    """One worker's step. ``dense_bytes``: of parameters that it pulls and pushes whole; ``row_bytes``: of the rows of
    tables that it touches; ``id_bytes``: of their numbers, which go with the pull and with the push."""

    dense_bytes: float
    row_bytes: float
    id_bytes: float

    @property
    def pulled_bytes(self) -> float:
        return self.dense_bytes + self.row_bytes + self.id_bytes

    @property
    def pushed_bytes(self) -> float:
        return self.pulled_bytes


def server_step_s(traffic: ServerTraffic, workers: int, servers: int, link: Link) -> float:
    """Seconds in which all workers have pulled and pushed: the busiest link's bytes, and four messages (two requests
    and their answers). Without the servers' own work."""
    busiest = max(1.0, workers / servers)
    one_way = [busiest * traffic.pulled_bytes, busiest * traffic.pushed_bytes]
    return float(sum(send_recv_s(nbytes, link) for nbytes in one_way) + 2 * send_recv_s(0.0, link))


def stale_step_s(seconds: Any, staleness: int) -> float:
    """Mean seconds of a step, where worker w computes step c in ``seconds[w, c]``, and begins it when every worker has
    ended step ``c - 1 - staleness``. [workers, steps] -> the last worker's end over the steps."""
    times = np.asarray(seconds, dtype=float)
    ends = np.zeros((times.shape[0], times.shape[1] + 1))
    for step in range(times.shape[1]):
        all_ended = ends[:, max(0, step - staleness)].max()
        ends[:, step + 1] = np.maximum(ends[:, step], all_ended) + times[:, step]
    return float(ends[:, -1].max() / times.shape[1])


__all__ = ["ServerTraffic", "server_step_s", "stale_step_s"]
