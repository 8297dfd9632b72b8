"""One server: answers pulls and pushes, lets workers wait for one another, and finds those that are lost.

An event is in the journal before it changes the state, and changes the state before it is acknowledged.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from threading import Event
from time import monotonic
from typing import Any

import torch
from torch.futures import Future

from autoparallel.servers.journal import Journal
from autoparallel.servers.settings import Settings
from autoparallel.servers.state import State, Updates
from autoparallel.servers.waiting import NotYet, Refused, Requests

MOST_LOGGED = 100_000


@dataclass(frozen=True)
class Push:
    """A push as a server saw it.

    staleness: steps behind: the push's step less the steps whose pushes of all workers were in what it had read.
    read, applied: updates that the server had made when the worker first read in this step, and before this push.
    """

    server: int
    worker: int
    step: int
    staleness: int
    read: int
    applied: int


@dataclass
class _Member:
    heard: float
    read: tuple[int, int, int] = (-1, 0, 0)  # step, steps that all had pushed, version


class Server:
    """``ended`` is set when the job is over: ``failure`` says why it failed, if it did."""

    def __init__(self, state: State, settings: Settings, run: str, journal: Journal | None) -> None:
        self.state, self.settings, self._run, self._journal = state, settings, run, journal
        self._members = {worker: _Member(monotonic()) for worker in state.processes}
        self._lost: tuple[int, str] | None = None
        self._requests = Requests(lambda error: self._fail(f"{type(error).__name__}: {error}"))
        self._alone_since = monotonic()
        self._logged: deque[Push] = deque(maxlen=MOST_LOGGED)
        self._ticked = monotonic()
        self._begun_at, self._any_done = state.version, False
        self.failure: str | None = None
        self.ended = Event()

    def answer(self, method: str, args: tuple[Any, ...]) -> Future:
        """The transport's service: one of the methods below, by name without its underscore."""
        return self._requests.add(lambda: getattr(self, f"_{method}")(*args))

    def tick(self) -> None:
        """To be called a few times a second: finds lost workers, requests that have waited, and the end of the job."""
        with self._requests.lock:
            paused, self._ticked = monotonic() - self._ticked, monotonic()
            for worker, member in list(self._members.items()):
                member.heard += paused if paused > 1 else 0  # a long checkpoint: nobody could be heard
                silent = monotonic() - member.heard
                if silent > self.settings.lost_after_s:
                    self._lose(worker, f"nothing was heard of it for {silent:.0f} s")
            self._look_for_the_end()
        self._requests.go_on()

    def _record(self, event: str, *arguments: Any) -> None:
        if self._journal is not None:
            self._journal.append(event, list(arguments))
        self.state.events[event](*arguments)
        self._requests.changes += 1

    def _member(self, worker: int, process: int) -> _Member:
        """Raises Refused for a worker that is not of this job, or no more."""
        if self._lost is not None:
            raise Refused("lost", self._lost)
        if self.failure is not None:
            raise Refused("refused", f"server {self.state.server} has failed: {self.failure}")
        member = self._members.get(worker)
        if member is None or self.state.processes[worker] != process:
            raise Refused("refused", f"server {self.state.server} does not know worker {worker}: it was taken for "
                          "lost, or the server was started again without its state (checkpoint_dir); start the "
                          "worker again")
        member.heard = monotonic()
        return member

    # ---------------------------------------------------------------------------------------- methods of workers

    def _join(self, worker: int, process: int, agreed: Sequence[Any]) -> int:
        """A worker comes; the first step that it may take part in on this server."""
        if tuple(agreed) != self.settings.agreed:
            raise Refused("input", f"worker {worker} and server {self.state.server} were told other (servers, "
                          f"staleness, timeout_s, lost_after_s): {tuple(agreed)} and {self.settings.agreed}")
        if worker in self._members and self.state.processes[worker] != process:
            self._lose(worker, "another process has taken its number")
        if self._lost is not None:
            raise Refused("lost", self._lost)
        if worker not in self._members:
            self._record("join", worker, process)
            self._members[worker] = _Member(monotonic())
        return self.state.clocks.pushed[worker]

    def _begin(self, worker: int, process: int, step: int) -> None:
        self._member(worker, process)
        if self.state.clocks.pushed[worker] < step:
            self._record("begin", worker, step)

    def _declare(self, worker: int, process: int, table: dict[str, Any], values: torch.Tensor | None) -> None:
        self._member(worker, process)
        if (known := self.state.shards.get(table["name"])) is None:
            self._record("declare", table, values)
        elif known.table.plain() != table:
            mine = known.table.plain()
            differ = [f"{key}: {mine[key]} and {table[key]}" for key in table if mine[key] != table[key]]
            raise Refused("input", f"table {table['name']!r} is there with other {'; '.join(differ)}\n  All workers "
                          "must make a table alike: same arguments, and same initial values (seed, or load them)")

    def _pull(self, worker: int, process: int, step: int, rows: dict[str, torch.Tensor | None]
              ) -> dict[str, torch.Tensor]:
        member = self._admitted(worker, process, step)
        if unknown := sorted(rows.keys() - self.state.shards.keys()):
            raise Refused("refused", f"server {self.state.server} has no table {unknown}: it was started again "
                          "without its state (checkpoint_dir, durability); start the job again")
        if member.read[0] != step:
            member.read = (step, self.state.clocks.lowest, self.state.version)
        return {name: self.state.shards[name].read(wanted) for name, wanted in rows.items()}

    def _push(self, worker: int, process: int, step: int, updates: Updates) -> None:
        self._member(worker, process)
        if step < self.state.clocks.pushed[worker]:  # it was acknowledged, and the answer was lost
            return
        member = self._admitted(worker, process, step)
        if (name := self.state.other_rate(step, updates)) is not None:
            raise Refused("input", f"worker {worker} has another learning rate for table {name!r} at step {step} than "
                          "others: all workers must call set_lr alike")
        read = member.read if member.read[0] == step else (step, self.state.clocks.lowest, self.state.version)
        applied = self.state.version
        self._record("push", worker, step, dict(updates))
        self._log(Push(self.state.server, worker, step, step - read[1], read[2], applied))
        if self.state.version - self._begun_at >= self.settings.checkpoint_every:
            self.checkpoint()

    def _leave(self, worker: int, process: int, failure: str | None) -> None:
        """A worker goes: it has done its work, or it has failed."""
        if worker not in self._members or self.state.processes[worker] != process:
            return
        if failure is not None or self._lost is not None:
            self._lose(worker, failure or "another worker was lost")
        else:
            self._remove(worker)
            self._any_done = True

    def _beat(self, worker: int, process: int) -> None:
        self._member(worker, process)

    def _pushes(self, worker: int, process: int) -> list[dict[str, int]]:
        return [asdict(push) for push in self._logged]

    # --------------------------------------------------------------------------------------------------- the rest

    def checkpoint(self) -> None:
        """Write the whole state; the log begins anew."""
        if self._journal is not None:
            self._journal.begin({**self.state.dump(), "run": self._run})
            self._begun_at = self.state.version

    def _admitted(self, worker: int, process: int, step: int) -> _Member:
        member = self._member(worker, process)
        clocks = self.state.clocks
        if step > (pushed := clocks.pushed[worker]):
            raise Refused("refused", f"server {self.state.server} has {pushed} steps of worker {worker}, which had "
                          f"{step} acknowledged: it was started again from an older state (durability="
                          f"{self.settings.durability!r}); start the job again with resume=True")
        if not clocks.gathered:
            raise NotYet(f"{len(clocks.joined)} of {clocks.expected} workers have joined: {sorted(clocks.joined)}")
        if not clocks.admits(step):
            raise NotYet(", ".join(
                f"worker {other} has pushed {clocks.pushed[other]} steps and was heard of "
                f"{monotonic() - self._members[other].heard:.1f} s ago" for other in clocks.missing(step)))
        return member

    def _lose(self, worker: int, why: str) -> None:
        """A worker is gone. Where that is an error the state keeps it, so that no step is completed without it."""
        if self.settings.on_worker_loss == "continue":
            self._remove(worker)
            return
        del self._members[worker]
        self._lost = self._lost or (worker, why)
        self._requests.changes += 1

    def _remove(self, worker: int) -> None:
        del self._members[worker]
        self._record("remove", worker)
        self._alone_since = monotonic()

    def _look_for_the_end(self) -> None:
        gathered, alone = self.state.clocks.gathered, monotonic() - self._alone_since
        if self._members:
            return
        if self._lost is not None:
            self._fail(f"worker {self._lost[0]} was lost: {self._lost[1]}")
        elif not gathered and alone > self.settings.timeout_s:
            self._fail(f"{len(self.state.clocks.joined)} of {self.state.clocks.expected} workers have joined in "
                       f"{alone:.0f} s: {sorted(self.state.clocks.joined)}")
        elif self._any_done:
            self.ended.set()
        elif gathered:
            self._fail("all workers were lost")

    def _fail(self, why: str) -> str:
        self.failure = self.failure or why
        self._requests.changes += 1
        self.ended.set()
        return f"server {self.state.server} has failed: {self.failure}"

    def _log(self, push: Push) -> None:
        self._logged.append(push)
        if self._journal is not None:
            with (self._journal.folder / "pushes.jsonl").open("a") as file:
                file.write(json.dumps(asdict(push)) + "\n")


__all__ = ["Push", "Server"]
