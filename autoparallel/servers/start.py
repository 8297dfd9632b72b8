"""`autoparallel.serve_parameters`: one script for scheduler, servers and workers."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from pathlib import Path
from time import sleep

from autoparallel.errors import ServerError
from autoparallel.launch.roles import Role, role_of
from autoparallel.servers.client import Client
from autoparallel.servers.directory import Directory
from autoparallel.servers.journal import Journal
from autoparallel.servers.server import Server
from autoparallel.servers.settings import Settings
from autoparallel.servers.state import State
from autoparallel.servers.transport import Alone, Transport
from autoparallel.servers.waiting import PATIENCE_S
from autoparallel.servers.worker import Servers

TICK_S = 0.2


def serve_parameters(*, servers: int | None = None, staleness: int = 0, checkpoint_dir: str | Path | None = None,
                     checkpoint_every: int = 1000, durability: str = "log", on_worker_loss: str = "error",
                     resume: bool = False, timeout_s: float = 300.0, lost_after_s: float = 30.0) -> Servers:
    """Take this process's part in a job of parameter servers. Returns in workers only: a server, or the scheduler,
    does its work within this call and then ends the process (SystemExit). A process that no launcher has started is
    server and worker in one.

    servers: number of server processes; None: AUTOPARALLEL_SERVERS, else 1. Under a launcher the first ranks are the
        servers; without one, AUTOPARALLEL_ROLE says what a process is.
    staleness: steps that a worker may be ahead of the slowest. 0: synchronous, each update is the mean of all workers'
        gradients, equal to one process with the whole batch; above: each worker's gradient is an update of its own.
    checkpoint_dir: folder of the servers' states; None: a server that ends cannot be started again.
    checkpoint_every: updates between whole states.
    durability: what a push that `Servers.step` has returned from survives: "log", the end of the server's process;
        "fsync", also of its machine; "checkpoint", nothing until the next whole state.
    on_worker_loss: "error", the others raise PeerError; "continue", they go on without it.
    resume: whether to go on from an earlier job's states in checkpoint_dir, at the last step that all servers have
        completed.
    timeout_s: limit of every wait, which then says who is missing.
    lost_after_s: seconds of silence after which a worker is lost.

    Raises LaunchError for an environment that lacks something, ServerError for arguments, a checkpoint_dir that does
    not fit, servers that do not come, InputError if another process was told other arguments.
    """
    role = role_of(os.environ, servers)
    settings = Settings(role.servers, role.workers, staleness, None if checkpoint_dir is None else Path(checkpoint_dir),
                        checkpoint_every, durability, on_worker_loss, resume, timeout_s, lost_after_s)
    directory = Directory(role, timeout_s, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if role.kind == "alone":
        return _alone(role, settings, directory)
    if role.kind == "worker":
        return _work(role, settings, directory)
    if role.kind == "scheduler":
        directory.watch(2 * timeout_s)  # workers that wait for a server give up first, and say so
    else:
        _serve(role, settings, directory)
    sys.exit(0)


def _work(role: Role, settings: Settings, directory: Directory) -> Servers:
    worker = directory.number("workers") if role.index is None else role.index
    return _joined(directory, Transport("worker", directory.number("processes"), threads=2), worker, settings)


def _alone(role: Role, settings: Settings, directory: Directory) -> Servers:
    server, journal = _made_server(role, settings, directory)

    def end() -> None:
        if server.failure is None:
            server.checkpoint()
        if journal is not None:
            journal.close()

    transport = Alone(server.answer, end)
    directory.publish(0, transport.address)
    return _joined(directory, transport, 0, settings)


def _joined(directory: Directory, transport: Transport | Alone, worker: int, settings: Settings) -> Servers:
    try:
        made = Servers(Client(directory, transport, worker, settings), transport, settings)
    except BaseException:
        transport.close()
        raise
    atexit.register(lambda: made.close(None if getattr(sys, "last_value", None) is None else repr(sys.last_value)))
    return made


def _made_server(role: Role, settings: Settings, directory: Directory) -> tuple[Server, Journal | None]:
    assert role.index is not None
    run, journal = directory.run(), None
    state = State(role.index, role.servers, settings.staleness, settings.workers)
    if settings.checkpoint_dir is not None:
        journal = Journal(settings.checkpoint_dir / f"server-{role.index}", settings.durability)
        recover(state, journal, settings, directory, run)
    return Server(state, settings, run, journal), journal


def _serve(role: Role, settings: Settings, directory: Directory) -> None:
    assert role.index is not None
    try:
        server, journal = _made_server(role, settings, directory)
        transport = Transport("server", directory.number("processes"), server.answer)
        directory.publish(role.index, transport.address)
        while not server.ended.wait(TICK_S):
            server.tick()
            with suppress(ServerError):  # workers do not need the scheduler once they know the servers
                directory.beat(role.index)
        if server.failure is not None:
            sleep(PATIENCE_S)  # workers that ask now are told
            raise ServerError(server.failure)
        server.checkpoint()
        if journal is not None:
            journal.close()
        transport.close()
    except Exception as error:
        with suppress(ServerError):
            directory.end(role.index, str(error))
        raise
    with suppress(ServerError):
        directory.end(role.index)


def recover(state: State, journal: Journal, settings: Settings, directory: Directory, run: str) -> None:
    """Bring a server's state to what its folder has: all of it in the same job; in a later one, as of the last step
    that all servers completed. Raises ServerError if that cannot be."""
    generations = journal.generations()
    saved = journal.state(generations[0]) if generations else None
    if saved is not None and saved["servers"] != settings.servers:
        raise ServerError(f"{journal.folder} is of a job with {saved['servers']} servers, and this one has "
                          f"{settings.servers}: start as many")
    if saved is not None and saved["run"] == run:
        _replay(state, journal, generations[0], None)
        journal.resume(generations[0])
        return
    if saved is not None and not settings.resume:
        raise ServerError(f"{journal.folder} has the state of another job: give resume=True to go on from it, or "
                          "another checkpoint_dir")
    if saved is not None:
        _replay(state, journal, generations[0], None)
    if settings.resume:
        steps = directory.agree(state.server, "step", state.step, settings.timeout_s)
        if settings.staleness == 0 and min(steps) < state.step:
            _return_to(min(steps), state, journal)
        state.events["restart"](max(steps) if settings.staleness else min(steps))
    journal.begin({**state.dump(), "run": run}, kept=1)


def _return_to(step: int, state: State, journal: Journal) -> None:
    for generation in journal.generations():
        if _replay(state, journal, generation, step):
            return
    raise ServerError(f"{journal.folder} has no state of step {step}, the last that all servers completed: give the "
                      "folders of one job to all servers")


def _replay(state: State, journal: Journal, generation: int, step: int | None) -> bool:
    """Make the state of a generation, and the events after it until ``step`` is the next (None: all)."""
    state.load(journal.state(generation))
    for name, arguments in journal.events(generation):
        if state.step == step:
            break
        state.events[name](*arguments)
    return step is None or state.step == step


__all__ = ["recover", "serve_parameters"]
