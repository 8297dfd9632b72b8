"""The state of one server as a function of events, so that a log of events makes it again, to the bit.

Events: a table is declared; a worker joins, begins at a step, is removed; a worker pushes a step. With staleness 0 the
pushes of a step are one update, their mean, once every worker's is there; else each push is an update of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autoparallel.servers.clocks import Clocks
from autoparallel.servers.tables import Shard, Table, Update

#: By table, what one worker pushes of a step.
Updates = Mapping[str, Update]


class State:
    """``version``: updates applied. ``clocks``: steps pushed by each worker. ``processes``: numbers of the workers'
    processes."""

    def __init__(self, server: int, servers: int, staleness: int, expected: int) -> None:
        self.server, self.servers = server, servers
        self.clocks = Clocks(staleness, expected)
        self.shards: dict[str, Shard] = {}
        self.processes: dict[int, int] = {}
        self.version = 0
        self._reached = 0  # steps pushed by workers that have been removed
        self._pending: dict[int, dict[int, Updates]] = {}
        self.events: Mapping[str, Callable[..., None]] = {
            "declare": self._declare, "join": self._join, "begin": self._begin, "remove": self._remove,
            "push": self._push, "restart": self._restart}

    @property
    def step(self) -> int:
        """The first step that is not complete; where a worker that joins now would begin."""
        return self.clocks.lowest if self.clocks.pushed else self._reached

    def other_rate(self, step: int, updates: Updates) -> str | None:
        """The table for which a push of this step that waits has another learning rate."""
        return next((name for push in self._pending.get(step, {}).values() for name in updates
                     if name in push and push[name][2] != updates[name][2]), None)

    def _declare(self, table: dict[str, Any], values: torch.Tensor | None) -> None:
        self.shards[table["name"]] = Shard.initial(Table(**table), values, self.server, self.servers)

    def _join(self, worker: int, process: int) -> None:
        self.clocks.pushed[worker] = self.step
        self.clocks.joined.add(worker)
        self.processes[worker] = process

    def _begin(self, worker: int, step: int) -> None:
        """A worker that joins begins at the same step on all servers: the latest at which one of them stood."""
        self.clocks.pushed[worker] = max(step, self.clocks.pushed[worker])
        self._complete()

    def _remove(self, worker: int) -> None:
        self._reached = max(self._reached, self.clocks.pushed.pop(worker))
        del self.processes[worker]
        self._complete()

    def _push(self, worker: int, step: int, updates: Updates) -> None:
        self.clocks.pushed[worker] = step + 1
        if self.clocks.staleness:
            self._apply([updates])
        else:
            self._pending.setdefault(step, {})[worker] = updates
            self._complete()

    def _restart(self, step: int) -> None:
        """A new job goes on from this step: it has other workers, and pushes of incomplete steps are made again."""
        self._pending.clear()
        self.processes.clear()
        self.clocks = Clocks(self.clocks.staleness, self.clocks.expected)
        self._reached = step

    def _complete(self) -> None:
        """Apply the steps that every worker has pushed, in order; the sum is in the order of the workers' numbers."""
        for step in sorted(self._pending):
            if all(pushed > step for pushed in self.clocks.pushed.values()):
                pushes = self._pending.pop(step)
                self._apply([pushes[worker] for worker in sorted(pushes)])

    def _apply(self, pushes: list[Updates]) -> None:
        names = [name for name in self.shards if any(name in updates for updates in pushes)]
        for name in names:
            self.shards[name].step([updates[name] for updates in pushes if name in updates], len(pushes))
        self.version += 1

    def dump(self) -> dict[str, Any]:
        """All of it as plain values and tensors, for `load`. The tensors are not copied."""
        return {"server": self.server, "servers": self.servers, "staleness": self.clocks.staleness,
                "pushed": dict(self.clocks.pushed), "joined": sorted(self.clocks.joined),
                "processes": dict(self.processes), "version": self.version,
                "reached": self._reached, "pending": self._pending,
                "shards": [shard.dump() for shard in self.shards.values()]}

    def load(self, state: Mapping[str, Any]) -> None:
        self.clocks.pushed, self.clocks.joined = dict(state["pushed"]), set(state["joined"])
        self.processes = dict(state["processes"])
        self.version, self._reached, self._pending = state["version"], state["reached"], dict(state["pending"])
        self.shards = {one["table"]["name"]: Shard.load(one) for one in state["shards"]}


__all__ = ["State", "Updates"]
