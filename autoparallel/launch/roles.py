"""Roles of a job with parameter servers: which process is the scheduler, a server or a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoparallel.errors import LaunchError, shown
from autoparallel.launch.environment import identity_of

ROLE, INDEX = "AUTOPARALLEL_ROLE", "AUTOPARALLEL_INDEX"
SERVERS, WORKERS = "AUTOPARALLEL_SERVERS", "AUTOPARALLEL_WORKERS"
ROLES = ("scheduler", "server", "worker")


@dataclass(frozen=True)
class Role:
    """A process of the job. ``kind``: one of ``ROLES``, or "alone", server and worker in one.

    index: among those of its role; None: workers are counted as they come. rank: of a launcher that started all
    processes; None: each was started with its role.
    """

    kind: str
    index: int | None
    servers: int
    workers: int
    host: str = ""
    port: int = 0
    rank: int | None = None


def role_of(environment: Mapping[str, str], servers: int | None = None) -> Role:
    """The process that an environment describes: by ``AUTOPARALLEL_ROLE``, else by a launcher's rank. The first
    ``servers`` ranks are servers, the others workers. A process that nobody has started is alone.

    Raises LaunchError where a variable is missing or no number, or there are too few processes.
    """
    given = servers if servers is not None else _number(environment, SERVERS)
    if (kind := environment.get(ROLE)) is not None:
        if kind not in ROLES:
            raise LaunchError(f"{ROLE} is {shown(kind)}: one of {', '.join(ROLES)} is required")
        workers, host, port = (_number(environment, WORKERS), environment.get("MASTER_ADDR"),
                               _number(environment, "MASTER_PORT"))
        index = _number(environment, INDEX)
        missing = [name for name, value in ((SERVERS, given), (WORKERS, workers), ("MASTER_ADDR", host),
                                            ("MASTER_PORT", port)) if value is None]
        missing += [INDEX] if kind == "server" and index is None else []
        if given is None or workers is None or host is None or port is None or missing:
            raise LaunchError(f"{ROLE}={kind} needs {', '.join(missing)} too: numbers of servers and workers, the "
                              f"scheduler's host and port, and {INDEX}, a server's number")
        if kind == "server" and index is not None and index >= given:
            raise LaunchError(f"{INDEX} is {index}, and there are {given} servers: a number below that is required")
        return Role(kind, index, given, workers, host, port)
    identity = identity_of(environment)
    if identity is None:
        return Role("alone", 0, 1, 1)
    count = 1 if given is None else given
    if count >= identity.size:
        raise LaunchError(f"{identity.size} processes cannot be {count} servers and a worker: start more processes")
    kind, index = ("server", identity.rank) if identity.rank < count else ("worker", identity.rank - count)
    return Role(kind, index, count, identity.size - count, identity.master_addr, identity.master_port, identity.rank)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is not None and not text.isdigit():
        raise LaunchError(f"{name} is {shown(text)}: a whole number is required")
    return None if text is None else int(text)


__all__ = ["INDEX", "ROLE", "ROLES", "SERVERS", "WORKERS", "Role", "role_of"]
