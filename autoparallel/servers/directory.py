"""What the processes of a job tell one another: where the servers are, and whether they live."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic, sleep

import torch.distributed as dist

from autoparallel.errors import ServerError
from autoparallel.launch.roles import INDEX, Role
from autoparallel.servers.transport import Address


class StoreLostError(ServerError):
    """The scheduler's store cannot be reached."""


class Directory:
    """The job's store: addresses of servers, unique numbers, signs of life, the end."""

    def __init__(self, role: Role, timeout_s: float, attempt: str = "0") -> None:
        self.servers, self._where = role.servers, f"{role.host}:{role.port}"
        wait = timedelta(seconds=timeout_s)
        with self._reached():
            if role.kind == "alone":
                store: dist.Store = dist.HashStore()
            elif role.rank is None:
                store = dist.TCPStore(role.host, role.port, is_master=role.kind == "scheduler",
                                                  wait_for_workers=False, timeout=wait)
            else:
                size = role.servers + role.workers
                store, _, _ = next(iter(dist.rendezvous("env://", role.rank, size, timeout=wait)))
            self._store = dist.PrefixStore(f"parameter servers {attempt}", store)

    def run(self) -> str:
        """A name of this job, the same in all its processes."""
        with self._reached():
            return self._store.compare_set("run", "", uuid.uuid4().hex).decode()

    def number(self, what: str) -> int:
        """0, 1, 2, ...: another one for each call of any process."""
        with self._reached():
            return self._store.add(f"number of {what}", 1) - 1

    def publish(self, server: int, address: Address) -> None:
        self._set(f"address {server}", address.text())

    def address(self, server: int) -> Address | None:
        """Where a server listens; None: it has not come yet. Raises ServerError if it has failed."""
        if (failure := self._get(f"failure {server}")) is not None:
            raise ServerError(f"server {server} has failed: {failure}")
        text = self._get(f"address {server}")
        return None if text is None else Address.of(text)

    def beat(self, server: int) -> None:
        """A server lives."""
        with self._reached():
            self._store.add(f"beats {server}", 1)

    def end(self, server: int, failure: str | None = None) -> None:
        """A server has done its work, or failed."""
        self._set(f"failure {server}" if failure else f"end {server}", failure or "done")

    def agree(self, server: int, name: str, value: int, timeout_s: float) -> list[int]:
        """The values that all servers give. Raises ServerError after ``timeout_s``, naming those that did not."""
        self._set(f"{name} {server}", str(value))
        until = monotonic() + timeout_s
        while None in (found := [self._get(f"{name} {one}") for one in range(self.servers)]):
            if monotonic() > until:
                missing = [one for one, text in enumerate(found) if text is None]
                raise ServerError(f"servers {missing} have not come within {timeout_s:g} s")
            sleep(0.1)
        return [int(text) for text in found if text is not None]

    def watch(self, timeout_s: float) -> None:
        """The scheduler's work: keep the store until all servers have ended.

        Raises ServerError if one has failed, or none was heard of for ``timeout_s``.
        """
        heard: dict[int, tuple[str | None, float]] = {}
        while ending := [one for one in range(self.servers) if self._get(f"end {one}") is None]:
            for server in ending:
                self.address(server)
                beats = self._get(f"beats {server}")
                if server not in heard or heard[server][0] != beats:
                    heard[server] = (beats, monotonic())
                elif monotonic() - heard[server][1] > timeout_s:
                    raise ServerError(f"server {server} has not been heard of for {timeout_s:g} s: start it again "
                                      f"with {INDEX}={server}, or end the job")
            sleep(0.2)

    def _get(self, key: str) -> str | None:
        with self._reached():
            return self._store.get(key).decode() if self._store.check([key]) else None

    def _set(self, key: str, text: str) -> None:
        with self._reached():
            self._store.set(key, text)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise StoreLostError(f"the scheduler's store at {self._where} cannot be reached: "
                                 f"{str(error).splitlines()[0]}") from error


__all__ = ["Directory", "StoreLostError"]
