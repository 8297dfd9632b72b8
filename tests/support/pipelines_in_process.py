"""Pipelines on ranks that are threads of this process: torch's schedules run as they are, their messages in memory."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules, stage
from torch.distributed.pipelining._utils import InferenceMode

from autoparallel.runtime import pipeline

TIMEOUT_S = 60.0
#: Called with ("send" or "receive", the other rank, bytes): where a message is sent, and where one is awaited.
Note = Callable[[tuple[str, int, float]], None]


class Link:
    """The messages from one rank to another, in order."""

    def __init__(self) -> None:
        self.sent, self.asked, self.there = list[torch.Tensor](), 0, threading.Condition()

    def put(self, tensor: torch.Tensor) -> None:
        with self.there:
            self.sent.append(tensor.detach().clone())
            self.there.notify_all()

    def get(self, number: int) -> torch.Tensor:
        with self.there:
            assert self.there.wait_for(lambda: len(self.sent) > number, TIMEOUT_S), "no message"
            return self.sent[number]


class Message(NamedTuple):
    """`torch.distributed.P2POp`."""

    op: Callable[..., Any]
    tensor: torch.Tensor
    peer: int
    group: Any = None


@dataclass
class Work:
    """`torch.distributed.Work`: ``finish`` runs when it is awaited."""

    finish: Callable[[], None]

    def wait(self) -> None:
        self.finish()


class Distributed:
    """`torch.distributed` as far as pipelines use it, for one pipeline rank per thread; the rest is torch's."""

    P2POp = Message

    def __init__(self, ranks: int, note: Note) -> None:
        self.ranks, self.note, self.here = ranks, note, threading.local()
        self.links = defaultdict[tuple[Any, int, int], Link](Link)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def enter(self, rank: int, cell: Sequence[int]) -> None:
        """This thread is pipeline rank ``rank`` at coordinate ``cell`` of the other axes."""
        self.here.rank, self.here.cell = rank, tuple(cell)

    def get_rank(self, group: Any = None) -> int:
        return int(self.here.rank)

    def get_world_size(self, group: Any = None) -> int:
        return self.ranks

    def get_global_rank(self, group: Any, rank: int) -> int:
        return rank

    def all_reduce(self, tensor: torch.Tensor, group: Any = None) -> None:
        """Of the sum of losses, which belongs to no collective of the program."""

    def batch(self, messages: Sequence[Message], desc: str | None = None) -> list[Work]:
        return [self._issue(message) for message in messages]

    def by_peer(self, messages: Sequence[Message], desc: str | None = None) -> dict[int, list[Work]]:
        found = defaultdict[int, list[Work]](list)
        for message in messages:
            found[message.peer] += self.batch([message])
        return found

    def _issue(self, message: Message) -> Work:
        num_bytes, rank, cell = float(message.tensor.nbytes), self.get_rank(), self.here.cell
        if message.op is dist.isend:
            self.note(("send", message.peer, num_bytes))
            self.links[cell, rank, message.peer].put(message.tensor)
            return Work(lambda: None)
        link = self.links[cell, message.peer, rank]
        number, link.asked = link.asked, link.asked + 1

        def finish() -> None:
            message.tensor.copy_(link.get(number))
            self.note(("receive", message.peer, num_bytes))

        return Work(finish)


@contextmanager
def pipelines_in_process(ranks: int, note: Note, monkeypatch: Any) -> Iterator[Distributed]:
    """Let `runtime.pipeline` run on threads, each of which calls `Distributed.enter` first."""
    ours = Distributed(ranks, note)

    def warmed_up(schedule: Any, stages: Sequence[Any], *_: Any) -> None:
        for one in stages:
            one._inference_mode = InferenceMode.STATIC

    with monkeypatch.context() as patch:
        for module in (pipeline, stage, schedules):
            patch.setattr(module, "dist", ours)
        patch.setattr(schedules, "_batch_p2p", ours.batch)
        patch.setattr(schedules, "_sorted_batch_p2p", ours.by_peer)
        patch.setattr(schedules._PipelineSchedule, "_warmup_p2p", warmed_up)
        yield ours
