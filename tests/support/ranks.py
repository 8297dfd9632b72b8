"""Run a function on several ranks, from a test, in tens of milliseconds, and never hang.

    results = pool_of(4).run(function, *args, timeout_s=60)      # one result per rank

The ranks are processes that live through the session with one gloo process group, so that a test pays neither for
importing torch nor for connecting. They are forked from multiprocessing's fork server, which has torch and
transformers imported: starting 8 ranks on two cores takes 0.2 s (1-2 s on a busy machine), where spawning them takes
6 s. A failure of any kind (an exception, a dead process, a rank that never answers) kills the pool, and the next
`run` starts it afresh: nothing of a broken collective reaches the next test.
"""

from __future__ import annotations

import atexit
import contextlib
import copyreg
import datetime
import faulthandler
import functools
import io
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

PROCESS_GROUP_TIMEOUT_S = 60.0
START_TIMEOUT_S = 60.0
GRACE_S = 2.0  # for the other ranks to report, once one has failed
MAX_POOLS_ALIVE = 2
MAX_GROUPS = 48  # a gloo group holds threads and sockets until its process ends
MAX_OUTPUT_CHARS = 4_000

FINISHED, RAISED, DIED, STUCK = "finished", "raised", "died", "stuck"


class RankError(RuntimeError):
    """A job failed on a rank.

    rank            the rank that failed first (a dead process comes before an exception, that before a stuck rank)
    exception_type  its exception's name, "ProcessDied" or "Timeout"
    traceback       its traceback as text; for a stuck rank, where it was
    states          rank -> "finished" | "raised <type>: <message>" | "died (exit code 1)" | "stuck"
    """

    def __init__(self, message: str, rank: int, exception_type: str, traceback: str, states: dict[int, str]) -> None:
        super().__init__(message)
        self.rank = rank
        self.exception_type = exception_type
        self.traceback = traceback
        self.states = states

    @property
    def stuck(self) -> list[int]:
        return [rank for rank, state in self.states.items() if state == STUCK]


class RankTimeoutError(RankError):
    """No rank failed, but some did not answer within the job's limit."""


@dataclass(frozen=True)
class _Outcome:
    """What became of a job on one rank; `detail` is a traceback, an exit code or a stack, by state."""

    state: str
    payload: bytes = b""
    exception_type: str = ""
    summary: str = ""
    detail: str = ""
    num_groups: int = 0

    def __str__(self) -> str:
        if self.state == RAISED:
            return f"raised {self.summary}"
        return f"died ({self.detail})" if self.state == DIED else self.state


# ---------------------------------------------------------------------------------------------- in a rank's process


@functools.cache
def mesh_of(*shape: int, axes: tuple[str, ...] | None = None) -> DeviceMesh:
    """The mesh of this shape over all ranks, for use inside a job: made once per process, since groups are costly."""
    return init_device_mesh("cpu", shape, mesh_dim_names=axes or ("x", "y", "z")[: len(shape)])


class _ResultPickler(pickle.Pickler):
    """Tensors travel as plain CPU tensors, whatever they hung on."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            raise TypeError("a job returned a DTensor, which means nothing outside its ranks; return full_tensor()")
        if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter):
            plain = value.detach().cpu()
            if plain.untyped_storage().nbytes() > plain.nbytes:
                plain = plain.clone()
            return plain.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        reduce = copyreg.dispatch_table.get(type(value))
        return reduce(value) if reduce else NotImplemented


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _ResultPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _perform(job: bytes) -> _Outcome:
    try:
        sys.path[:], call = pickle.loads(job)
        function, args, kwargs = pickle.loads(call)
        torch.manual_seed(0)
        payload = _pickled(function(*args, **kwargs))
        return _Outcome(FINISHED, payload, num_groups=len(dist.distributed_c10d._world.pg_map))
    except BaseException as error:
        name = type(error).__name__
        return _Outcome(RAISED, b"", name, f"{name}: {error}", traceback.format_exc())


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _redirect_output(folder: Path, rank: int) -> None:
    output = os.open(_output_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _join_world(rank: int, num_ranks: int, port: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks))
    timeout = datetime.timedelta(seconds=PROCESS_GROUP_TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)


def _serve(rank: int, num_ranks: int, port: int, folder: Path, connection: Connection) -> None:
    """The life of a rank: join the process group, then perform jobs until the parent hangs up."""
    _redirect_output(folder, rank)
    stacks = _stacks_file(folder, rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    _join_world(rank, num_ranks, port)
    connection.send(_Outcome(FINISHED))
    while True:
        try:
            job = connection.recv_bytes()
        except EOFError:
            os._exit(0)  # not sys.exit: destructors of groups whose other ranks are gone may wait for them
        outcome = _perform(job)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(outcome)


# ------------------------------------------------------------------------------------------------------- in the test


def _output_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.output"


def _stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stacks"


def _fork_server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    return context


@contextlib.contextmanager
def _main_that_can_be_imported() -> Iterator[None]:
    """multiprocessing imports the main script in each process, which cannot be when it was read from a pipe."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or Path(file).exists():
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file


class RankPool:
    """`num_ranks` processes in one gloo process group that perform one job after another.

    Started by the first `run`. Each job begins with `torch.manual_seed(0)`; the process group, the meshes of
    `mesh_of` and whatever modules keep stay from job to job, until a job fails.
    """

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ValueError(f"a pool needs at least one rank, got num_ranks={num_ranks}")
        self.num_ranks = num_ranks
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._output_read: list[int] = []
        self._folder: Path | None = None
        self._store: dist.TCPStore | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> list[Any]:
        """`function(*args, **kwargs)` on every rank -> its results, by rank.

        `function` is importable (module-level), arguments and results can be pickled. What the ranks print is
        printed here, with the rank in front. Raises RankError when a rank raises or dies, RankTimeoutError when some
        rank does not answer within `timeout_s`.
        """
        job = self._job(function, args, kwargs)
        try:
            if not self._is_alive():
                self._start()
            _mark_as_used(self)
            outcomes = self._perform(job, timeout_s)
        except BaseException:
            self.stop()
            raise
        self._forward_output()
        if max(outcome.num_groups for outcome in outcomes) > MAX_GROUPS:
            self.stop()
        return [pickle.loads(outcome.payload) for outcome in outcomes]

    def run_losing(self, lost: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """As `run`, for a job that ends or stops rank ``lost``: the results of the others, None for it. The pool is
        stopped afterwards; nothing of it is left."""
        job = self._job(function, args, {})
        if not self._is_alive():
            self._start()
        _mark_as_used(self)
        try:
            for connection in self._connections:
                connection.send_bytes(job)
            outcomes, deadline = dict[int, _Outcome](), time.monotonic() + timeout_s
            while len(outcomes) < self.num_ranks - 1:
                waiting = {c: rank for rank, c in enumerate(self._connections) if rank not in (*outcomes, lost)}
                ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise self._error("job", outcomes, timeout_s)
                outcomes |= {waiting[connection]: self._receive(waiting[connection]) for connection in ready}
            if any(outcome.state != FINISHED for outcome in outcomes.values()):
                raise self._error("job", outcomes, timeout_s)
        finally:
            self.stop()
        return [pickle.loads(outcomes[rank].payload) if rank != lost else None for rank in range(self.num_ranks)]

    def stop(self) -> None:
        """End the processes; the next `run` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._connections, self._output_read = [], [], []
        self._folder = self._store = None

    def _job(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bytes:
        try:
            call = pickle.dumps((function, args, kwargs))
        except Exception as error:
            raise TypeError(
                f"ranks are other processes: {function!r} must be a module-level function of an importable module "
                f"and its arguments must be picklable ({type(error).__name__}: {error})"
            ) from error
        return pickle.dumps((sys.path, call))  # the path first: unpickling the call imports the function's module

    def _is_alive(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def _start(self) -> None:
        self.stop()
        self._folder = Path(tempfile.mkdtemp(prefix=f"autoparallel-{self.num_ranks}-ranks-"))
        # Port 0, bound by the store itself: no other process can take it between choosing and using it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = _fork_server()
        for rank in range(self.num_ranks):
            here, there = context.Pipe()
            arguments = (rank, self.num_ranks, self._store.port, self._folder, there)
            process = context.Process(target=_serve, args=arguments, name=f"rank {rank} of {self.num_ranks}")
            with _main_that_can_be_imported():
                process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)
            self._output_read.append(0)
        self._collect("start", START_TIMEOUT_S)

    def _perform(self, job: bytes, timeout_s: float) -> list[_Outcome]:
        for connection in self._connections:
            try:
                connection.send_bytes(job)
            except OSError:  # the process has just died; collecting says so
                continue
        return self._collect("job", timeout_s)

    def _collect(self, what: str, timeout_s: float) -> list[_Outcome]:
        """One outcome per rank, all of them `finished`, or an error."""
        outcomes: dict[int, _Outcome] = {}
        deadline = time.monotonic() + timeout_s
        failed = False
        while len(outcomes) < self.num_ranks:
            waiting = {c: rank for rank, c in enumerate(self._connections) if rank not in outcomes}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]
                outcomes[rank] = self._receive(rank)
                if outcomes[rank].state != FINISHED and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failed or len(outcomes) < self.num_ranks:
            raise self._error(what, outcomes, timeout_s)
        return [outcomes[rank] for rank in range(self.num_ranks)]

    def _receive(self, rank: int) -> _Outcome:
        try:
            return self._connections[rank].recv()
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(GRACE_S)
            code = process.exitcode
            name = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
            return _Outcome(DIED, b"", "ProcessDied", f"ProcessDied: {name}", name)

    def _error(self, what: str, reported: dict[int, _Outcome], timeout_s: float) -> RankError:
        outcomes = reported | self._stuck([rank for rank in range(self.num_ranks) if rank not in reported])
        order = (DIED, RAISED, STUCK, FINISHED)
        # Sorting keeps the order of arrival within a state: the first exception is the one that caused the others.
        rank, first = min(outcomes.items(), key=lambda item: order.index(item[1].state))
        states = {r: str(outcomes[r]) for r in range(self.num_ranks)}
        message = _message(what, rank, outcomes, states, timeout_s) + self._output_section()
        kind = RankTimeoutError if first.state == STUCK else RankError
        return kind(message, rank, first.exception_type, first.detail, states)

    def _stuck(self, ranks: list[int]) -> dict[int, _Outcome]:
        """Ask the ranks that have not answered where they are."""
        assert self._folder is not None
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):  # it died since
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        deadline = time.monotonic() + GRACE_S
        files = {rank: _stacks_file(self._folder, rank) for rank in ranks}
        while time.monotonic() < deadline and not all(file.exists() and file.stat().st_size for file in files.values()):
            time.sleep(0.05)
        time.sleep(0.05)  # for the last of them to be written to its end
        stacks = {rank: file.read_text() if file.exists() else "" for rank, file in files.items()}
        return {
            rank: _Outcome(STUCK, b"", "Timeout", "no answer", _own_frames_removed(stack) or "(no Python stack)\n")
            for rank, stack in stacks.items()
        }

    def _new_output(self, rank: int) -> str:
        assert self._folder is not None
        path = _output_file(self._folder, rank)
        data = path.read_bytes()[self._output_read[rank] :] if path.exists() else b""
        self._output_read[rank] += len(data)
        return data.decode(errors="replace")

    def _forward_output(self) -> None:
        for rank in range(self.num_ranks):
            for line in self._new_output(rank).splitlines():
                print(f"[rank {rank}] {line}")

    def _output_section(self) -> str:
        texts = {rank: self._new_output(rank)[-MAX_OUTPUT_CHARS:].rstrip() for rank in range(self.num_ranks)}
        return "".join(f"\n-- rank {rank} printed:\n{text}\n" for rank, text in texts.items() if text)


def _message(what: str, rank: int, outcomes: dict[int, _Outcome], states: dict[int, str], timeout_s: float) -> str:
    first = outcomes[rank]
    stuck = [r for r in sorted(outcomes) if outcomes[r].state == STUCK]
    if first.state == STUCK:
        header = f"{what}: no answer in {timeout_s:g} s from ranks {stuck} of {len(outcomes)}"
    else:
        header = f"{what}: rank {rank} of {len(outcomes)} {states[rank]}"
    others = [f"  rank {r} {state}" for r, state in states.items() if r != rank or first.state == STUCK]
    lines = [header, "", *([first.detail] if first.state == RAISED else []), *others]
    shown: dict[str, list[int]] = {}
    for r in stuck:
        shown.setdefault(outcomes[r].detail, []).append(r)
    for stack, ranks in shown.items():
        lines += [f"\n-- ranks {ranks} were here:", stack.rstrip()]
    return "\n".join(lines)


def _own_frames_removed(stacks: str) -> str:
    """A faulthandler dump less our own frames, the thread that waits for the parent's end, and threads' addresses."""
    threads = [text for text in stacks.split("\n\n") if "_exit_with_parent" not in text]
    threads = [re.sub(r'\n  File "[^"]*ranks.py", line \d+ in _perform\n.*', "", text, flags=re.S) for text in threads]
    return re.sub(r"hread 0x\w+", "hread", "\n\n".join(threads))


# ---------------------------------------------------------------------------------------------- pools of the session

_pools: dict[int, RankPool] = {}
_alive: list[RankPool] = []  # least recently used first


def _mark_as_used(pool: RankPool) -> None:
    """At most MAX_POOLS_ALIVE pools have processes; which pool object a test holds does not matter."""
    if pool in _alive:
        _alive.remove(pool)
    _alive.append(pool)
    while len(_alive) > MAX_POOLS_ALIVE:
        _alive.pop(0).stop()


def pool_of(num_ranks: int) -> RankPool:
    """The session's pool of this size."""
    if num_ranks not in _pools:
        _pools[num_ranks] = RankPool(num_ranks)
    return _pools[num_ranks]


@atexit.register
def stop_pools() -> None:
    """End the processes of every pool."""
    while _alive:
        _alive.pop().stop()


def restores(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a job that sets ``owner.name``: the next job of the same pool finds the old value again."""

    def decorate(job: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(job)
        def run(*args: Any, **kwargs: Any) -> Any:
            before = getattr(owner, name)
            try:
                return job(*args, **kwargs)
            finally:
                setattr(owner, name, before)

        return run

    return decorate
