"""The list of an elastic job's hosts on a machine that is none of them, so that the job outlives each of its hosts."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from autoparallel.errors import LaunchError

_MARK, _ENDED = "autoparallel/host-list", "autoparallel/host-list/ended"


def serve(port: int) -> None:
    """Keep the list until this process is stopped. Raises LaunchError for a port that is taken."""
    try:
        store = dist.TCPStore("localhost", port, None, True, timedelta(seconds=60), wait_for_workers=False)
    except dist.DistError as error:
        raise LaunchError(f"cannot listen on port {port}: another program has it; give another --port") from error
    store.set(_MARK, "")
    print(f"autoparallel host-list: start each host of the job with --master {socket.gethostname()}:{port} and "
          "--min-nodes; Ctrl-C ends the list", flush=True)
    threading.Event().wait()


def is_list(store: dist.Store) -> bool:
    """Whether the store is that of `serve`, and no host's."""
    return bool(store.check([_MARK]))


def check_open(store: dist.Store) -> None:
    """Raises LaunchError for the list of a job that has ended."""
    if store.check([_ENDED]):
        raise LaunchError("the list of hosts at --master is of a job that has ended: start autoparallel host-list anew")


def end(store: dist.Store) -> None:
    """Say that the job has ended."""
    with suppress(dist.DistError):    # the list has been stopped
        store.set(_ENDED, "")


__all__ = ["check_open", "end", "is_list", "serve"]
