"""Failure of one rank in a call ends the call on all ranks, instead of a hang.

The failed rank writes the reason to the process group's store and closes its connections. A rank that waits for it gets
an error from its collective, reads the reason in the store, and closes its own connections. A process that has ended or
is stopped writes nothing: the others find it by its pulse (`peers.py`). Before a call, ranks compare in a group of its
own that they make the same one (`Together.agree`). (The one file that closes process groups.)
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import _StopRecomputationError

from autoparallel.errors import InputError, MeshError, PeerError
from autoparallel.kernels import collectives, groups
from autoparallel.runtime.peers import Peers

_KEY = "autoparallel/failed"
_LONGEST = 4_000  # characters of a message
_PART_S = 3.0  # in which a rank that has done its part and ended lets the others finish
_CALLS = "calls"
_TAG = 2**30 + 1  # of a receive that nobody sends for
_ANEW = ("call torch.distributed.destroy_process_group() and init_process_group(...) on all ranks and compile again, "
         "or restart them.")
#: Part of the description of a call with a batch that `shard_batch` made; what to do where ranks have others.
OF_SHARD_BATCH = "of shard_batch"
_SAME_BATCHES = ("\n  All ranks call shard_batch equally often, with the same global batch, of which it takes the "
                 "rank's shard. Where each rank has rows of its own (DistributedSampler): autoparallel.compile(..., "
                 "inputs=\"local\"), or parallel.local_batch(batch).")
_NO_MORE = f"  The process groups are closed and cannot be used again: {_ANEW}"


class _World:
    """Failure state of the default process group, shared by all models on it and dropped with it.

    ``peers``: None where ranks cannot watch each other (one rank, a group that is a fake). ``apart``: group of the
    comparisons before calls, None until the first model, or where there is no gloo.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.store = group.get_group_store()
        self.calls: WeakSet[Together] = WeakSet()
        self.failed: tuple[int, str] | None = None
        self.old = b""  # a failure that an earlier process group left in the same store
        self.apart: dist.ProcessGroup | None = None
        self.has_apart, self.models = False, 0
        self.peers: Peers | None = None
        self._lock, self._heard = threading.Lock(), 0
        with suppress(RuntimeError):  # torch's fake process groups have a store that does nothing
            self.old = self.store.get(_KEY) if self.store.check([_KEY]) else b""
            if dist.get_world_size() > 1:
                self.others_store: dist.Store = self.store.clone()  # type: ignore[attr-defined]
                self.peers = Peers(self.store, dist.get_rank(), dist.get_world_size(), self._news)

    def first(self, why: str, rank: int | None = None, store: dist.Store | None = None) -> tuple[int, str] | None:
        """(rank, reason) of the first failure, None if there is none. With a ``why``, ``rank`` (None: this one) enters
        the store unless another has."""
        store = store or self.store
        said = own = f"{dist.get_rank() if rank is None else rank} {why}" if why else ""
        with suppress(RuntimeError):  # the process that hosts the store may have ended
            if why:
                said = store.compare_set(_KEY, self.old.decode(), own).decode()
            elif store.check([_KEY]) and (found := store.get(_KEY)) != self.old:
                said = found.decode()
        found_rank, _, why = said.partition(" ")
        return (int(found_rank), why) if said else None

    def fault(self, error: BaseException) -> tuple[int, str] | None:
        """(rank, reason) of the failure behind an error of this rank: what the store says; a rank that is gone, if the
        error is of communication; else None."""
        found = self.failed or self.first("")
        if found is not None or self.peers is None or not _is_of_communication(error):
            return found
        gone = self.peers.missing(waited="imed out" in _cause(error))
        return self.failed or (None if gone is None else self.first(gone[1], gone[0]))

    def close(self, failed: tuple[int, str]) -> None:
        """Note the failure and close the process groups of all models, so that ranks that wait for this one get an
        error."""
        with self._lock:
            if self.failed is None:
                self.failed = failed
                for calls in self.calls:
                    calls.close()
                if self.apart is not None:
                    _close(self.apart, True)

    def _news(self, gone: tuple[int, str] | None) -> None:
        """From the thread that watches: a rank is gone; or None, and another rank may have found that one is. Closes
        the groups, for which this rank may wait, after the ranks that get an error have had a second to do so."""
        if self.failed is not None:
            return
        if gone is not None:
            self.failed_at(gone)
        elif (said := self.first("", store=self.others_store)) is not None:
            self._heard += 1
            if self._heard > 4:
                self.close(said)

    def failed_at(self, gone: tuple[int, str]) -> None:
        """A rank is gone: tell all, unless the store does not answer, and close."""
        if gone[0] == 0 and "store" in gone[1]:
            self.close(gone)
        else:
            self.close(self.first(gone[1], gone[0], self.others_store) or gone)


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
    except PeerError:
        raise
    except RuntimeError as error:
        world = _world()
        if (known := world.first("")) is not None:
            world.close(known)
            check_groups()
        if (failed := world.fault(error)) is not None:
            world.close(failed)
            rank, why = failed
            raise PeerError(f"rank {rank} failed: {why}\n{_NO_MORE}", rank) from error
        raise MeshError(f"the ranks do not reach each other: {error}\n  An earlier failure has closed their process "
                        f"groups, or a rank has ended. Look at the first error of all ranks, {_ANEW}") from error


@contextmanager
def naming_peers() -> Iterator[None]:
    """Context of work that communicates in many places. Raises PeerError where another rank is at fault, else the error
    as it is."""
    try:
        yield
    except RuntimeError as error:
        lost(error)
        raise


def made_with_all(make: Callable[[], Any]) -> Any:
    """A process group that all ranks make: in a thread, since nothing ends the wait for a rank that goes meanwhile.
    Raises PeerError then, and where the script of another has ended before."""
    if _world().peers is None:
        return make()
    made, errors, done = list[Any](), list[BaseException](), threading.Event()

    def work() -> None:
        try:
            made.append(make())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=work, daemon=True, name="autoparallel group").start()
    while not done.wait(0.2):
        check_groups()
        store = _world().others_store                        # (the thread waits with the store's own connection)
        rank, ended = groups.rank_that_left(store), groups.rank_that_ended(store)
        if (rank is not None or ended is not None) and not done.wait(_PART_S):
            rank, what = (ended or 0, "process") if rank is None else (rank, "script")
            raise PeerError(f"rank {rank} failed: its {what} has ended, and others wait to make a process group with "
                            f"it\n{_NO_MORE}", rank)
    if errors:
        raise errors[0]
    return made[0]


def is_same(number: int, device: torch.device) -> bool:
    """Whether all ranks have the same number. Compared on the host if the process group has a CPU backend, which avoids
    waiting for the device, and apart from the programs' collectives if that is gloo. All ranks call this."""
    return _compared(number, device)() == 0


def spread(number: int, what: str) -> int:
    """The largest of all ranks' numbers less the least; ``what`` they are, as errors name it. 0 where ranks have no
    group for it. All ranks call this. Raises InputError on all ranks where some compare something else."""
    if _world().apart is None:
        return 0
    found = _compared(number, torch.device("cpu"))()
    if found:
        all_of(what, number)
    return found


def _compared(number: int, device: torch.device) -> Callable[[], int]:
    """Begin to compare a number over all ranks. Returns the wait for the largest less the least."""
    assert dist.group.WORLD is not None
    group, peers = _world().apart, _world().peers
    if peers is not None:
        peers.calls += 1
    on_host = group is not None or torch.device("cpu") in dist.group.WORLD._device_types
    both = torch.tensor([number, -number], device="cpu" if on_host else device)
    work = dist.all_reduce(both, dist.ReduceOp.MAX, group=group, async_op=True)
    assert work is not None

    def wait() -> int:
        work.wait()
        largest, least = both.tolist()
        return int(largest + least)

    return wait


def all_of(what: str, mine: Any) -> list[Any]:
    """The values of all ranks, by rank. All ranks call this, after `is_same` has said that they differ.

    ``what`` is compared, as errors name it. Raises InputError on all ranks where some compare something else: one that
    was refused its call by itself is at its next one.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (what, mine), group=_world().apart)
    if len({theirs for theirs, _ in found}) > 1:
        _refuse([value if theirs == _CALLS else (theirs, "", 0) for theirs, value in found])
    return [value for _, value in found]


@dataclass
class _Asked:
    """A comparison of calls that has begun. ``mine``: this rank's call, its model, and that model's number."""

    waits: Callable[[], int]
    mine: Callable[[], tuple[str, str, int]]

    @cached_property
    def is_same(self) -> bool:
        """Whether all ranks make the same call; waits for them."""
        return self.waits() == 0

    def refuse(self) -> None:
        """Raises InputError where calls differ."""
        if not self.is_same:
            _refuse(all_of(_CALLS, self.mine()))


class _DifferentCallsError(InputError):
    """Ends a computation that ran beside a comparison of calls."""


def agree_on(call: object, described: Callable[[], tuple[str, str]] | None = None, model: int = 0,
             limit_s: float = 0.0) -> None:
    """As `Together.agree`, of a model by its number; 0: of none. (Makes the group that it needs.) ``limit_s``: the time
    without a sign of life after which a rank is gone, from now on; 0: as it is."""
    if (asked := _ask(call, described, model, limit_s)) is not None:
        asked.refuse()


def _ask(call: object, described: Callable[[], tuple[str, str]] | None, model: int, limit_s: float = 0.0
         ) -> _Asked | None:
    """Begin what `agree_on` does; None where ranks have no group for it."""
    world = _world()
    if world.peers is None:
        return None
    world.peers.limit_s = limit_s or world.peers.limit_s
    if not world.has_apart:
        world.apart, world.has_apart = made_with_all(groups.apart), True
        world.peers.met = world.apart is not None
    if world.apart is None:
        return None
    text = f"{model} {call!r}"
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
    return _Asked(_compared(number, torch.device("cpu")),
                  lambda: (*(described() if described else (str(call), "")), model))


def _refuse(every: Sequence[tuple[str, str, int]]) -> None:
    """Raises InputError for calls that differ. ``every``: `_Asked.mine` by rank."""
    several = len({number for *_, number in every if number}) > 1
    alike = len({theirs for theirs, *_ in every}) == 1
    ranks: dict[str, list[int]] = {}
    for rank, (theirs, whose, number) in enumerate(every):
        ranks.setdefault(theirs + whose * alike + f" of model {number}" * (several and number > 0), []).append(rank)
    said = "; ".join(f"{theirs} on {'rank' if len(some) == 1 else 'ranks'} {', '.join(map(str, some))}"
                     for theirs, some in sorted(ranks.items(), key=lambda item: len(item[1])))
    raise InputError(f"ranks make different calls: {said}\n  All ranks must make the same calls in the same order, "
                     "with tensors of the same shapes and dtypes, in the same mode; nothing was sent or changed."
                     f"{_SAME_BATCHES if OF_SHARD_BATCH in said else ''}")


#: Held during a call of a parallel module: two threads would mix their collectives. Ranks whose threads come in another
#: order find that in `agree_on`.
one_at_a_time = threading.RLock()


class Together:
    """The ranks of a mesh, whose calls fail together. ``groups``: closed on a failure; `own` adds to them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        assert dist.group.WORLD is not None
        self.groups = [dist.group.WORLD, *(mesh.get_group(axis) for axis in range(mesh.ndim))]
        self._own: list[dist.ProcessGroup] = []
        finalize(self, groups.release, self._own).atexit = False
        self._asked: _Asked | None = None
        self._on_cpu, self._alone, self._process = mesh.device_type == "cpu", mesh.size() == 1, os.getpid()
        world = _world()
        world.calls.add(self)
        self._number = world.models = world.models + 1

    def own(self, group: dist.ProcessGroup) -> None:
        """Add a group that lives as long as this does."""
        self.groups.append(group)
        self._own.append(group)

    def close(self) -> None:
        for group in self.groups:
            _close(group, self._on_cpu)

    def check(self) -> None:
        """Raises PeerError if a rank failed before, MeshError if the process groups have been destroyed, InputError in
        a process that was forked: nobody would answer it."""
        if not self._alone and os.getpid() != self._process:
            raise InputError("a parallel module is called in another process than the one that compiled it, as in a "
                             "worker of a DataLoader: its process groups are of that process\n  Call it outside of "
                             "the dataset and collate_fn, or with num_workers=0; or give workers the model that it was "
                             "made of.")
        if dist.group.WORLD is not self.groups[0]:
            raise MeshError("the model was compiled for process groups that have been destroyed since: after "
                            "init_process_group(...), make the mesh and compile again")
        check_groups()

    def agree(self, call: object, described: Callable[[], tuple[str, str]] | None = None) -> None:
        """Compare over all ranks which call this is: ``call`` by its repr; for the error, ``described`` gives the call
        and, told where the calls look alike, the model. Nothing where the process group has no gloo. Raises InputError
        on all ranks if they differ: nothing has been sent."""
        self.ask(call, described)
        with self.call():
            self.settle()

    def ask(self, call: object, described: Callable[[], tuple[str, str]] | None = None) -> None:
        """Begin what `agree` does. Nothing may be sent or changed before `settle`."""
        self.check()
        with self.call():
            self.settle()
            self._asked = _ask(call, described, self._number)

    def settle(self) -> None:
        """Wait for the end of what `ask` began, if it did. Raises as `agree`. To be called within `call`."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.refuse()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Context of computation beside what `ask` began: its first collective waits for that, and its end."""

        def hold() -> None:  # (the program's modes are set: `settle` describes the call outside of them)
            if self._asked is not None and not self._asked.is_same:
                raise _DifferentCallsError

        token = collectives.before.set(hold)
        try:
            yield
        except InputError:
            self.settle()  # where calls differ, the others wait for this rank's description
            raise
        finally:
            collectives.before.reset(token)
        self.settle()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Context of a call that all ranks make. An error of this rank ends the call on all ranks; an error because
        another rank failed becomes a PeerError; KeyboardInterrupt stays one. InputError passes: all ranks raise it
        before anything is sent; so does the end of what `torch.utils.checkpoint` computes again, which is at the same
        place on all ranks."""
        try:
            yield
        except (InputError, _StopRecomputationError):
            raise
        except BaseException as error:
            world = _world()
            first = None if self._alone else world.fault(error) or world.first(_cause(error))
            if first is None:
                raise
            rank, why = first
            world.close(first)
            if isinstance(error, PeerError):
                raise
            if isinstance(error, KeyboardInterrupt):    # this process was asked to stop, as all were by Ctrl-C
                raise
            if rank != dist.get_rank():
                raise PeerError(f"rank {rank} failed: {why}\n{_NO_MORE}", rank) from error
            error.add_note(f"rank {rank} failed, and took the others with it: {why}\n{_NO_MORE}")
            raise


class Closed(Together):
    """In place of the ranks of a module that is closed: raises InputError where they would be needed."""

    def __init__(self, name: str) -> None:
        self.name, self.groups, self._asked = name, [], None

    def check(self) -> None:
        raise InputError(f"this parallel {self.name} is closed: it has no programs and process groups any more\n  "
                         "Compile the model again; close a module after its last call.")

    @contextmanager
    def call(self) -> Iterator[None]:
        self.check()
        yield


def lost(error: RuntimeError) -> None:
    """For a collective outside `call`, in a backward of the user: raises PeerError if another rank's failure is behind
    its error."""
    if not dist.is_initialized() or dist.group.WORLD not in _WORLDS or isinstance(error, PeerError):
        return
    world = _world()
    found = world.fault(error)
    if found is not None and found[0] != dist.get_rank():
        world.close(found)
        raise PeerError(f"rank {found[0]} failed: {found[1]}\n{_NO_MORE}", found[0]) from error


_COMMUNICATION = ("gloo", "nccl", "connection", "timed out", "broken pipe", "socket")


def _is_of_communication(error: BaseException) -> bool:
    """Whether an error is of a collective that another rank did not take part in."""
    while error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or any(
        word in str(error).lower() for word in _COMMUNICATION))


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


collectives.on_failure = lost
