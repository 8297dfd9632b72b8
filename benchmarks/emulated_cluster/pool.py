"""One process per rank in the hosts' namespaces, which run functions together, as often as asked."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any

from benchmarks.emulated_cluster.network import TURN, EmulationError, Network

PORT = 29500
START_S, JOB_S, COLLECTIVE_S, END_S = 180.0, 240.0, 60.0, 5.0


class Pool:
    """Ranks that are up; see `pool`."""

    def __init__(self, ranks: list[connection.Connection]) -> None:
        self.ranks = ranks

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(*args)`` on all ranks together; what each returned. The function must be importable by name.

        Raises EmulationError with the first failing rank's traceback, or when a rank does not answer.
        """
        for rank in self.ranks:
            rank.send((function, args))
        waiting, results, deadline = dict(enumerate(self.ranks)), {}, time.monotonic() + JOB_S
        while waiting:
            ready = connection.wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise EmulationError(f"ranks {sorted(waiting)} did not finish {function.__name__} in {JOB_S:.0f} s")
            for number in [n for n, rank in waiting.items() if rank in ready]:
                results[number] = self._result(number, waiting.pop(number))
        return [results[number] for number in sorted(results)]

    @staticmethod
    def _result(number: int, rank: connection.Connection) -> Any:
        try:
            done, result = rank.recv()
        except EOFError:
            raise EmulationError(f"rank {number} died; what it printed is above") from None
        if not done:
            raise EmulationError(f"rank {number} failed:\n{result}")
        return result


@contextmanager
def pool(network: Network) -> Iterator[Pool]:
    """A process group over all ranks of the network while the block runs."""
    count = network.topology.num_ranks
    with tempfile.TemporaryDirectory(prefix="emulated-cluster-") as folder:
        address = str(Path(folder) / "ranks")
        started: list[subprocess.Popen[bytes]] = []
        with _short_turns(), connection.Listener(address, "AF_UNIX", backlog=count) as listener:
            try:
                started += [_start(network, rank, address) for rank in range(count)]
                yield Pool(_accept(listener, started))
            finally:
                _stop(started)


@contextmanager
def _short_turns() -> Iterator[None]:
    """Real-time processes of this machine take turns of a millisecond: a rank that computes for real would else keep
    one whose message has arrived off its core for 100 ms."""
    before = TURN.read_text()
    TURN.write_text("1")
    try:
        yield
    finally:
        TURN.write_text(before)


def _start(network: Network, rank: int, address: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    command = ("ip", "netns", "exec", network.host_of(rank), sys.executable, "-m", "benchmarks.emulated_cluster.pool",
               address, network.address(0), str(rank), str(network.topology.num_ranks))
    return subprocess.Popen(command, env=environment, start_new_session=True)


def _accept(listener: connection.Listener, started: list[subprocess.Popen[bytes]]) -> list[connection.Connection]:
    """A connection for each rank, in order."""
    found: dict[int, connection.Connection] = {}
    deadline, waiting = time.monotonic() + START_S, listener._listener._socket  # type: ignore[attr-defined]
    waiting.settimeout(1.0)
    while len(found) < len(started):
        ended = [process.returncode for process in started if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            raise EmulationError(f"ranks did not start: {len(found)} of {len(started)} are up, exit codes {ended}")
        try:
            rank = listener.accept()
        except TimeoutError:
            continue
        found[rank.recv()] = rank
    return [found[number] for number in sorted(found)]


def _stop(started: list[subprocess.Popen[bytes]]) -> None:
    for process in started:
        process.terminate()
    for process in started:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _main(address: str, first_host: str, rank: int, count: int) -> None:
    """What a rank does: join the group, then run what it is sent until the other end is closed."""
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    parent = connection.Client(address, "AF_UNIX")
    parent.send(rank)
    dist.init_process_group("gloo", init_method=f"tcp://{first_host}:{PORT}", rank=rank, world_size=count,
                            timeout=datetime.timedelta(seconds=COLLECTIVE_S))
    try:
        while True:
            parent.send(_answer(*parent.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the other end is closed; other ranks may be in a collective with this one: no goodbye


def _answer(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    """Whether it worked, and what it returned or the traceback."""
    try:
        return True, function(*args)
    except Exception:
        return False, traceback.format_exc()


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
