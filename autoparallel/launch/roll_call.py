"""Hosts of a job report to host 0, or at a list of hosts on another machine (`host_list`), before torchrun's agent
starts, which would wait without a word for absent ones."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from autoparallel.errors import LaunchError, printable
from autoparallel.launch.host_list import check_open, is_list

#: Seconds without all hosts after which it is said what is awaited, and again after each so many.
SAID_AFTER_S, SAID_EVERY_S = 5.0, 60.0
_POLL_S = 0.2
#: Seconds in which a list of hosts answers.
ANSWER_S = 5.0
_COUNT = "autoparallel/hosts"
_NAME = "autoparallel/host/{}"


@dataclass(frozen=True)
class RollCall:
    """Who is awaited where. ``host``, ``port``: of host 0, or of the list; ``nodes``: hosts of the job, ``number``:
    this one's.

    ``least``: the fewest hosts that start. ``timeout_s``: how long they are awaited.
    """

    host: str
    port: int
    nodes: int
    number: int
    least: int
    timeout_s: float

    @property
    def master(self) -> str:
        """The address, as --master takes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def hold(self) -> dist.TCPStore:
        """Wait until the hosts are there. The store in which they reported, whose server torchrun's agent on host 0
        then uses too, unless it is a list's: keep it until the job has ended.

        Raises LaunchError where hosts do not come in time, or host 0's address is taken or not its own.
        """
        store = self._of_list() or (self._serve() if self.number == 0 else self._connect())
        own, name = socket.gethostname(), _NAME.format(self.number)
        try:
            other = store.compare_set(name, "", own).decode()
            if other != own and self.least == self.nodes:    # else it may have come in the place of a lost host
                raise LaunchError(f"the hosts {other} and {own} both have --node-rank {self.number}: give each host "
                                  f"another number, from 0 to {self.nodes - 1}")
            if store.add(f"{name}/times", 1) == 1:
                store.add(_COUNT, 1)
            self._await(lambda: store.add(_COUNT, 0) >= self.least, lambda: self._absent(store))
        except dist.DistError as error:
            raise LaunchError(f"host 0 of the job, or its list of hosts, has ended at {self.master} before all hosts "
                              "were there: read what it says, and start all hosts again") from error
        return store

    def _of_list(self) -> dist.TCPStore | None:
        """The store of a list of hosts, where one answers. In a thread of its own: torch waits for ever for the answer
        of another program."""
        found = list[dist.TCPStore]()

        def ask() -> None:
            with suppress(dist.DistError):
                store = dist.TCPStore(self.host, self.port, None, False, timedelta(seconds=ANSWER_S),
                                      wait_for_workers=False)
                found.extend([store] * is_list(store))

        if self._is_reached():
            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            thread.join(ANSWER_S)
        for store in found:
            check_open(store)
        return found[0] if found else None

    def _serve(self) -> dist.TCPStore:
        try:
            store = dist.TCPStore("localhost", self.port, None, True, timedelta(seconds=60), wait_for_workers=False,
                                  multi_tenant=True)
        except dist.DistError as error:
            raise LaunchError(f"host 0 cannot listen on port {self.port} of --master {self.master}: another program "
                              "has it, or a job that has not ended; give another port, the same on all hosts"
                              ) from error
        self._await(self._is_reached, lambda: f"{self.master} does not lead to this host, which is --node-rank 0: give "
                    "an address of this host as --master, or its number as --node-rank")
        return store

    def _connect(self) -> dist.TCPStore:
        self._await(self._is_reached, lambda: f"host 0 does not answer at {self.master}: start the same command with "
                    "--node-rank 0 there, or give its address as --master; a firewall may close the port")
        return dist.TCPStore(self.host, self.port, None, False, timedelta(seconds=60), wait_for_workers=False)

    def _is_reached(self) -> bool:
        with suppress(OSError), socket.create_connection((self.host, self.port), timeout=2.0):
            return True
        return False

    def _absent(self, store: dist.TCPStore) -> str:
        """What is to be done about the hosts that have not reported, for a user."""
        absent = [number for number in range(self.nodes) if not store.check([_NAME.format(number)])]
        some = "" if self.least == self.nodes else f", {self.least} of which start the job"
        named = ", ".join(str(number) for number in absent[:8]) + (", ..." if len(absent) > 8 else "")
        where = "the list of hosts" if is_list(store) else "host 0"
        return (f"{store.add(_COUNT, 0)} of {self.nodes} hosts{some} have reported to {where} at {self.master}; "
                f"absent: host {named}. Start the same command there, with its number as --node-rank")

    def _await(self, is_there: Callable[[], bool], missing: Callable[[], str]) -> None:
        """Until ``is_there``; says what is ``missing`` meanwhile. Raises LaunchError after the time."""
        began, said_s = time.monotonic(), SAID_AFTER_S
        while not is_there():
            passed_s = time.monotonic() - began
            if passed_s >= self.timeout_s:
                raise LaunchError(f"host {self.number} has waited {self.timeout_s:g} s (--join-timeout) in vain: "
                                  f"{missing()}")
            if passed_s >= said_s:
                said_s += SAID_EVERY_S
                told = f"host {self.number} waits, {self.timeout_s - passed_s:.0f} s more at most: {missing()}"
                print(printable(f"autoparallel launch: {told}"), file=sys.stderr, flush=True)
            time.sleep(_POLL_S)


__all__ = ["RollCall"]
