"""Rendezvous of a job's ranks at the TCPStore of rank 0, or of torchrun's agent; missing ranks are named in errors."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from autoparallel.errors import LaunchError
from autoparallel.launch.environment import Identity

_LOG = logging.getLogger("autoparallel")
_COUNT, _HERE, _ABSENT = "autoparallel/count", "autoparallel/here {}", "autoparallel/absent"
_TELL_S = 10.0   # after which rank 0 says for whom it waits
_ANSWER_S = 5.0  # for which the others wait for rank 0's answer after the time limit


def store_of(identity: Identity, timeout: timedelta) -> dist.TCPStore:
    """The store of the job, once all ranks have come. Raises LaunchError for a port that is taken, a rank 0 that does
    not answer, and ranks that do not come within ``timeout``, by their numbers."""
    at, made, errors = f"{identity.master_addr}:{identity.master_port}", list[dist.TCPStore](), list[Exception]()
    is_agents = _is_agents()

    def make() -> None:
        try:
            made.append(dist.TCPStore(identity.master_addr, identity.master_port, identity.size,
                                      identity.rank == 0 and not is_agents, timeout, wait_for_workers=False,
                                      multi_tenant=not is_agents))
        except Exception as error:
            errors.append(error)

    # in a thread: torch waits without limit for the answer of another program at the port, and Ctrl-C does not end it
    thread = threading.Thread(target=make, daemon=True, name="autoparallel store")
    if (identity.rank == 0 and not is_agents) or _is_reached(identity, timeout):
        thread.start()
        thread.join(timeout.total_seconds() + _ANSWER_S)
    if not made:
        _refuse(identity, at, timeout, errors[0] if errors else None)
    made[0].set_timeout(timeout)
    _await_all(of_attempt(made[0]), identity, timeout, at)
    return made[0]


def _is_reached(identity: Identity, timeout: timedelta) -> bool:
    """Wait until something listens where rank 0 should; whether it does in time."""
    began = time.monotonic()
    while time.monotonic() - began < timeout.total_seconds():
        with suppress(OSError), socket.create_connection((identity.master_addr, identity.master_port), timeout=2.0):
            return True
        time.sleep(0.1)
    return False


def of_attempt(store: dist.Store) -> dist.Store:
    """The part of a store that ranks have not used before. torchrun's agent may keep its own store over restarts, with
    the addresses of ranks that it started before; one that rank 0 makes is new, and agents that joined later count
    fewer restarts."""
    if not _is_agents():
        return store
    return dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _is_agents() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _refuse(identity: Identity, at: str, timeout: timedelta, error: Exception | None) -> NoReturn:
    """Raises LaunchError for a store that was not made, or an ``error`` of another kind as it is."""
    if error is not None and "EADDRINUSE" in str(error):
        raise LaunchError(f"port {identity.master_port} of rank 0's host is taken, by another program or another rank "
                          "0: set MASTER_PORT to a free one, the same for all ranks") from error
    if error is not None and not isinstance(error, dist.DistError):
        raise error
    raise LaunchError(f"rank {identity.rank} of {identity.size} does not reach rank 0 at {at} in "
                      f"{timeout.total_seconds():g} s (timeout_s): rank 0 has not started or has ended, MASTER_ADDR is "
                      "not its host, a firewall closes the port, or another program listens there (set MASTER_PORT)"
                      ) from error


def _await_all(store: dist.Store, identity: Identity, timeout: timedelta, at: str) -> None:
    """Until all ranks have come to the store. Raises LaunchError on all that have, with the numbers of the others."""
    try:
        mine = f"process {os.getpid()} on {socket.gethostname()}"
        first = store.compare_set(_HERE.format(identity.rank), "", mine).decode()
        if first != mine:
            raise LaunchError(f"two processes say that they are rank {identity.rank} of {identity.size}: {first} and "
                              f"{mine}; each needs a rank of its own")
        store.add(_COUNT, 1)
        absent = _absent(store, identity, timeout, at)
    except dist.DistError as error:
        raise LaunchError(f"rank 0 at {at} has ended before all ranks had come: look at its output") from error
    if absent:
        raise LaunchError(f"{absent} of {identity.size} did not come to rank 0 at {at} in "
                          f"{timeout.total_seconds():g} s (timeout_s): not started, or ended before "
                          "autoparallel.init(); look at the output there")


def _absent(store: dist.Store, identity: Identity, timeout: timedelta, at: str) -> str:
    """Names of the ranks that do not come, "" if all do: rank 0 looks, and tells the others."""
    began, told = time.monotonic(), identity.rank > 0
    while not store.check([_ABSENT]):
        waited = timedelta(seconds=time.monotonic() - began)
        all_here = identity.rank == 0 and store.add(_COUNT, 0) >= identity.size
        if all_here or (identity.rank == 0 and waited > timeout):
            store.set(_ABSENT, "" if all_here else _missing(store, identity.size))
        elif waited > timeout + timedelta(seconds=_ANSWER_S):
            return "rank 0"
        elif waited.total_seconds() > _TELL_S and not told:
            told = True
            _LOG.warning("rank 0 waits at %s for %s of %d", at, _missing(store, identity.size), identity.size)
        else:
            time.sleep(min(0.01 + waited.total_seconds() / 10, 0.5))
    absent = store.get(_ABSENT).decode()
    if absent and identity.rank == 0:
        time.sleep(1.0)                                  # the others read it at rank 0
    return absent


def _missing(store: dist.Store, size: int) -> str:
    absent = [str(rank) for rank in range(size) if not store.check([_HERE.format(rank)])]
    return f"rank{'s' * (len(absent) > 1)} {', '.join(absent[:8])}{', ...' * (len(absent) > 8)}"


__all__ = ["of_attempt", "store_of"]
