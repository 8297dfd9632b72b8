"""A worker's calls to all servers: repeated while a server is started again, and with a limit to every wait."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

from torch.futures import Future

from autoparallel.errors import InputError, PeerError, ServerError
from autoparallel.servers.directory import Directory, StoreLostError
from autoparallel.servers.settings import Settings
from autoparallel.servers.transport import Address, Alone, Transport
from autoparallel.servers.waiting import PATIENCE_S

_RETRY_S = 0.2


class Client:
    """Calls of worker ``worker``, which are safe to repeat: a server knows what it has had."""

    def __init__(self, directory: Directory, transport: Transport | Alone, worker: int, settings: Settings) -> None:
        self._directory, self._transport, self._settings = directory, transport, settings
        self.worker, self.me = worker, (worker, transport.address.number)
        self._addresses: dict[int, Address] = {}
        self._gone: dict[int, str] = {}
        self._closed = Event()
        self._beats = Thread(target=self._beat, name="autoparallel-beats", daemon=True)

    def all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What each server answers to its arguments, sent to all at once.

        Raises ServerError for a server, or workers waited for, not heard of within ``timeout_s``, or a state that was
        lost; PeerError where a worker was lost; InputError for what does not fit the other workers'.
        """
        until = monotonic() + self._settings.timeout_s
        sent = [self._send(server, method, args, until) for server, args in enumerate(arguments)]
        return [self._answer(server, method, args, sent[server], until) for server, args in enumerate(arguments)]

    def same(self, method: str, *args: Any) -> list[Any]:
        """What the servers answer to the same arguments."""
        return self.all(method, [args] * self._settings.servers)

    def start(self) -> None:
        """Tell the servers from now on that this worker lives."""
        self._beats.start()

    def close(self, failure: str | None) -> None:
        """Leave: each server is told once."""
        self._closed.set()
        if self._beats.ident is not None:
            self._beats.join()
        for server, address in list(self._addresses.items()):
            with suppress(RuntimeError):
                self._transport.call(address, "leave", *self.me, failure, timeout_s=PATIENCE_S).wait()
            del self._addresses[server]

    def _send(self, server: int, method: str, args: tuple[Any, ...], until: float) -> Future | None:
        """None: its address is not known."""
        try:
            address = self._addresses.get(server) or self._directory.address(server)
        except StoreLostError as error:
            known = self._gone.get(server, "its address is not known")
            self._gone[server] = known if str(error) in known else f"{known}; {error}"
            return None
        if address is None:
            return None
        self._addresses[server] = address
        return self._transport.call(address, method, *self.me, *args,
                                    timeout_s=max(1.0, until - monotonic()) + PATIENCE_S)

    def _answer(self, server: int, method: str, args: tuple[Any, ...], sent: Future | None, until: float) -> Any:
        while True:
            kind, value = self._outcome(server, sent)
            if kind == "done":
                return value
            if kind == "input":
                raise InputError(value)
            if kind == "lost":
                raise PeerError(f"worker {value[0]} was lost: {value[1]}\n  Start the job again with resume=True; with "
                                "on_worker_loss='continue' the others go on without it", value[0])
            if kind == "refused":
                raise ServerError(value)
            if monotonic() > until:
                raise ServerError(f"{method} of worker {self.worker} has waited {self._settings.timeout_s:g} s on "
                                  f"server {server}: {value}")
            if kind == "gone":
                sleep(_RETRY_S)
            sent = self._send(server, method, args, until)

    def _outcome(self, server: int, sent: Future | None) -> tuple[str, Any]:
        if sent is None:
            return "gone", self._gone.get(server, "it has not come")
        try:
            kind, value = sent.wait()
            return kind, value
        except RuntimeError as error:  # the server has ended; it may be started again elsewhere
            self._addresses.pop(server, None)
            self._gone[server] = f"it cannot be reached ({str(error).splitlines()[0]})"
            return "gone", self._gone[server]

    def _beat(self) -> None:
        while not self._closed.wait(min(1.0, self._settings.lost_after_s / 5)):
            for server in range(self._settings.servers):
                address = self._addresses.get(server)
                with suppress(ServerError):  # it may have been started again; what failed is told to the next call
                    address = self._directory.address(server) or address
                with suppress(RuntimeError):
                    if address is not None:
                        self._transport.call(address, "beat", *self.me, timeout_s=PATIENCE_S)


__all__ = ["Client"]
