"""Copies between host and device: at once on a CPU, by the rules of streams on an accelerator (recorded)."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from autoparallel.kernels import host_copies
from autoparallel.kernels.host_copies import HOST, begin

GPU = torch.device("cuda", 1)


def test_copies_on_a_cpu_are_made_at_once() -> None:
    source = torch.arange(6.0, requires_grad=True).view(2, 3).t()
    copies = begin([source, torch.ones(2, dtype=torch.float16)], HOST)
    first, second = copies.ready()
    assert torch.equal(first, source) and first.is_contiguous() and not first.requires_grad
    assert second.dtype == torch.float16 and copies.back([0]).ready()[0] is first
    place = torch.zeros(3, 2)
    assert begin([source], HOST, into=[place]).ready()[0] is place and torch.equal(place, source)
    assert host_copies.current(HOST) is None
    with host_copies.under(None):
        copies.wait()


class Stream:
    """What is told to a stream, in order."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.device = name, log, GPU

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for event of {event.name}")

    def record_event(self) -> Event:
        self.log.append(f"{self.name} records")
        return Event(self.name, self.log)


class Event:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")


class Value:
    """A tensor somewhere."""

    def __init__(self, name: str, device: torch.device, log: list[str], pinned: bool = False) -> None:
        self.name, self.device, self.log, self.pinned = name, device, log, pinned

    def detach(self) -> Value:
        return self

    def is_pinned(self) -> bool:
        return self.pinned

    def copy_(self, source: Value, non_blocking: bool) -> None:
        self.log.append(f"{source.name} to {self.name} {'async' if non_blocking else 'blocking'}")

    def record_stream(self, stream: Stream) -> None:
        self.log.append(f"{self.name} kept for {stream.name}")


@pytest.fixture
def log() -> Any:
    """The log of a machine with an accelerator, whose current stream is "main"; new tensors are called "made"."""
    told: list[str] = []
    streams = {True: Stream("up", told), False: Stream("down", told), None: Stream("events", told)}
    with patch.object(host_copies, "_stream", lambda far, to_device: streams[to_device]), \
            patch.object(host_copies, "under", lambda stream: nullcontext()), \
            patch.object(host_copies, "_empty", lambda x, device: Value("made", device, told, device == HOST)), \
            patch.object(torch, "empty_like", lambda x, device: Value("made", device, told)), \
            patch.object(torch.accelerator, "current_stream", lambda device: Stream("main", told)):
        yield told


def test_a_copy_to_the_host_waits_for_its_source_and_is_waited_for(log: list[str]) -> None:
    copies = begin([Value("gradient", GPU, log)], HOST)  # type: ignore[list-item]
    assert log == ["down waits for main", "gradient to made async", "down records", "gradient kept for down"]
    del log[:]
    copies.ready()
    assert log == ["host waits for down"]
    del log[:]
    back = copies.back([0])
    assert log == ["up waits for main", "up waits for event of down", "made to made async", "up records"]
    del log[:]
    back.ready()
    assert log == ["main waits for event of up", "made kept for main"]
    del back, log[:]
    assert not log


def test_memory_of_the_current_stream_is_not_used_again_while_another_copies(log: list[str]) -> None:
    """A source that is freed without a wait, and copies that nobody has waited for."""
    source = Value("saved", GPU, log)
    copies = begin([source], HOST, held=True)  # type: ignore[list-item]
    assert not any("kept" in line for line in log)
    copies.free_source(source)  # type: ignore[arg-type]
    assert log[-1] == "saved kept for down"
    back = copies.back([0])
    del log[:], back
    assert log == ["made kept for up"]


def test_copies_of_steps_during_backward_wait_for_an_event_alone(log: list[str]) -> None:
    """Not for what the host has launched since: the rest of backward."""
    read = host_copies.now(GPU)
    assert host_copies.now(HOST) is None and host_copies.after(None, HOST) is None
    log.append("main goes on")
    stream = host_copies.after(read, GPU)
    with patch.object(torch.accelerator, "current_stream", lambda device: stream):
        begin([Value("parameter", GPU, log)], HOST)  # type: ignore[list-item]
    assert log[:4] == ["main records", "main goes on", "events waits for event of main", "down waits for events"]


def test_only_pinned_memory_is_copied_asynchronously(log: list[str]) -> None:
    shard = Value("shard", GPU, log)
    for pinned in (True, False):
        begin([Value("tile", HOST, log, pinned)], GPU, into=[shard])  # type: ignore[list-item]
    assert [line for line in log if "to shard" in line] == ["tile to shard async", "tile to shard blocking"]
    assert log.count("shard kept for up") == 2


def test_threads_are_under_one_stream_at_a_time_of_their_own() -> None:
    """What was current before is current again, in each thread, also after an error."""
    here = threading.local()
    main, told = Stream("main", []), list[str]()

    def name() -> str:
        return getattr(here, "name", "default")

    def set_stream(stream: Stream) -> None:
        here.name = stream.name

    def work() -> None:
        with pytest.raises(ValueError), host_copies.under(main):
            told.append(name())
            raise ValueError
        told.append(name())

    with patch.multiple(torch.accelerator, current_stream=lambda device: Stream(name(), []), set_stream=set_stream,
                        current_device_index=lambda: 0, set_device_index=lambda index: None):
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(told) == ["default", "default", "main", "main"]
