"""Failure of one rank in a call ends the call on all ranks, instead of a hang.

The failed rank writes the reason to the process group's store and closes its connections. A rank that waits for it gets
an error from its collective, reads the reason in the store, and closes its own connections. Calls that do not fail send
nothing for this. (The one file that closes process groups.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoparallel.errors import InputError, MeshError, PeerError

_KEY = "autoparallel/failed"
_LONGEST = 4_000  # characters of a message
_TAG = 2**30 + 1  # of a receive that nobody sends for
_ANEW = ("call torch.distributed.destroy_process_group() and init_process_group(...) on all ranks and compile again, "
         "or restart them.")
_NO_MORE = f"  The process groups are closed and cannot be used again: {_ANEW}"


class _World:
    """Failure state of the default process group, shared by all models on it and dropped with it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.store = group.get_group_store()
        self.calls: WeakSet[Together] = WeakSet()
        self.failed: tuple[int, str] | None = None
        self.old = b""  # a failure that an earlier process group left in the same store
        with suppress(RuntimeError):  # torch's fake process groups have a store that does nothing
            self.old = self.store.get(_KEY) if self.store.check([_KEY]) else b""

    def first(self, why: str) -> tuple[int, str] | None:
        """(rank, reason) of the first failure, None if there is none. With a ``why``, this rank enters the store unless
        another rank has."""
        said = own = f"{dist.get_rank()} {why}" if why else ""
        with suppress(RuntimeError):  # the process that hosts the store may have ended
            if why:
                said = self.store.compare_set(_KEY, self.old.decode(), own).decode()
            elif self.store.check([_KEY]) and (found := self.store.get(_KEY)) != self.old:
                said = found.decode()
        rank, _, why = said.partition(" ")
        return (int(rank), why) if said else None

    def close(self, failed: tuple[int, str]) -> None:
        """Note the failure and close the process groups of all models, so that ranks that wait for this one get an
        error."""
        self.failed = failed
        for calls in self.calls:
            calls.close()


_WORLDS: WeakKeyDictionary[dist.ProcessGroup, _World] = WeakKeyDictionary()


def _world() -> _World:
    group = dist.group.WORLD
    assert group is not None
    if group not in _WORLDS:
        _WORLDS[group] = _World(group)
    return _WORLDS[group]


def check_groups() -> None:
    """Raises PeerError if a failure has closed the process groups."""
    if (failed := _world().failed) is not None:
        rank, why = failed
        raise PeerError(f"rank {rank} failed in an earlier call: {why}\n{_NO_MORE}", rank)


@contextmanager
def reached() -> Iterator[None]:
    """Context of communication between calls. Raises PeerError if a failure has closed the process groups, MeshError if
    communication fails for another reason."""
    check_groups()
    try:
        yield
    except RuntimeError as error:
        world = _world()
        if (failed := world.first("")) is not None:
            world.close(failed)
            check_groups()
        raise MeshError(f"the ranks do not reach each other: {error}\n  An earlier failure has closed their process "
                        f"groups, or a rank has ended. Look at the first error of all ranks, {_ANEW}") from error


class Together:
    """The ranks of a mesh, whose calls fail together. ``groups``: closed on a failure; more may be appended."""

    def __init__(self, mesh: DeviceMesh) -> None:
        assert dist.group.WORLD is not None
        self.groups = [dist.group.WORLD, *(mesh.get_group(axis) for axis in range(mesh.ndim))]
        self._on_cpu, self._alone = mesh.device_type == "cpu", mesh.size() == 1
        _world().calls.add(self)

    def close(self) -> None:
        for group in self.groups:
            _close(group, self._on_cpu)

    def check(self) -> None:
        """Raises PeerError if a rank failed before, MeshError if the process groups have been destroyed."""
        if dist.group.WORLD is not self.groups[0]:
            raise MeshError("the model was compiled for process groups that have been destroyed since: after "
                            "init_process_group(...), make the mesh and compile again")
        check_groups()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Context of a call that all ranks make. An error of this rank ends the call on all ranks; an error because
        another rank failed becomes a PeerError. InputError passes: all ranks raise it before anything is sent."""
        try:
            yield
        except InputError:
            raise
        except BaseException as error:
            first = None if self._alone else _world().first(_cause(error))
            if first is None:
                raise
            rank, why = first
            _world().close(first)
            if rank != dist.get_rank():
                raise PeerError(f"rank {rank} failed: {why}\n{_NO_MORE}", rank) from error
            error.add_note(f"rank {rank} failed, and took the others with it: {why}\n{_NO_MORE}")
            raise


def _cause(error: BaseException) -> str:
    """The root of a chain of errors, as text. (torch's pipelines wrap errors.)"""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"[:_LONGEST]


def _close(group: dist.ProcessGroup, on_cpu: bool) -> None:
    """Close a process group: ranks that wait for this one, and this rank's pending collectives, get an error."""
    if not on_cpu:
        group.abort()
        return
    for rank in dist.get_process_group_ranks(group):
        if rank != dist.get_rank():  # gloo has no abort, but closes all connections when a receive times out
            with suppress(RuntimeError):
                work = dist.irecv(torch.empty(1), src=rank, group=group, tag=_TAG)
                assert work is not None
                work.wait(timedelta(milliseconds=1))
