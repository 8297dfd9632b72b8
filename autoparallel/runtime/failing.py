"""A rank that fails in a call takes the others out of it: nobody waits for what will not come.

It writes to the process group's store why it failed, and closes its connections. Whoever waits for it, or comes to it
later, gets an error from its collective, finds the reason in the store, and closes its own connections in turn. While
nothing fails, nothing is sent and nothing is watched. (The one file that closes process groups.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoparallel.errors import InputError, PeerError

_KEY = "autoparallel/failed"
_LONGEST = 4_000  # letters of a message
_TAG = 2**30 + 1  # nobody sends with it
_NO_MORE = ("  The process groups are closed: end the processes, or destroy them, initialise them anew and compile "
            "again.")


class Together:
    """The ranks of a mesh, which end a call together. ``groups`` are closed when one fails (more may be added)."""

    def __init__(self, mesh: DeviceMesh) -> None:
        assert dist.group.WORLD is not None
        self.groups = [dist.group.WORLD, *(mesh.get_group(axis) for axis in range(mesh.ndim))]
        self.failed: tuple[int, str] | None = None
        self._on_cpu, self._alone = mesh.device_type == "cpu", mesh.size() == 1
        self._store = dist.group.WORLD.get_group_store()
        self._old = b""  # what an earlier process group left in the store; of this one only what has compiled can fail
        with suppress(RuntimeError):  # torch's fake process groups have a store that does nothing
            self._old = self._store.get(_KEY) if self._store.check([_KEY]) else b""

    def check(self) -> None:
        """Raises PeerError where a rank failed before."""
        if self.failed is not None:
            rank, why = self.failed
            raise PeerError(f"rank {rank} failed in an earlier call: {why}\n{_NO_MORE}", rank)

    @contextmanager
    def call(self, ends: bool = True) -> Iterator[None]:
        """What all ranks do. Raises PeerError where another rank has failed.

        ``ends``: whether no rank can go on after an error of this one (but an InputError, which all ranks raise before
        anything is sent).
        """
        try:
            yield
        except InputError:
            raise
        except BaseException as error:
            first = None if self._alone else self._first(_cause(error), ends)
            if first is None:
                raise
            self.failed = rank, why = first
            for group in self.groups:
                _close(group, self._on_cpu)
            if rank != dist.get_rank():
                raise PeerError(f"rank {rank} failed: {why}\n{_NO_MORE}", rank) from error
            error.add_note(f"rank {rank} failed, and took the others with it: {why}\n{_NO_MORE}")
            raise

    def _first(self, why: str, ends: bool) -> tuple[int, str] | None:
        """Who failed first, and why: this rank, if no other and ``ends``."""
        said = own = f"{dist.get_rank()} {why}" if ends else ""
        with suppress(RuntimeError):  # the process that has the store is gone
            if ends:
                said = self._store.compare_set(_KEY, self._old.decode(), own).decode()
            elif self._store.check([_KEY]) and (found := self._store.get(_KEY)) != self._old:
                said = found.decode()
        rank, _, why = said.partition(" ")
        return (int(rank), why) if said else None


def _cause(error: BaseException) -> str:
    """What began it: torch's pipelines wrap what they meet."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"[:_LONGEST]


def _close(group: dist.ProcessGroup, on_cpu: bool) -> None:
    """Let whoever waits for this rank in the group, and this rank's own collectives under way, end in an error."""
    if not on_cpu:
        group.abort()
        return
    for rank in dist.get_process_group_ranks(group):
        if rank != dist.get_rank():  # gloo cannot abort, but closes all connections when a receive comes too late
            with suppress(RuntimeError):
                work = dist.irecv(torch.empty(1), src=rank, group=group, tag=_TAG)
                assert work is not None
                work.wait(timedelta(milliseconds=1))
