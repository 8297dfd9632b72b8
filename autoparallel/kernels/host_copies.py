"""Copies between the memories of a device and its host: the one way in which parameters, gradients and activations go.

Each device has a stream for each direction. It waits for the stream that made the sources, and whoever reads the copies
waits for it (`Copies.ready`): the host, or the current stream of the device. Memory of the device that a stream uses,
and that was allocated for another, is not used again before that stream is through (`record_stream`). Copies are
asynchronous from and to pinned memory only. On a CPU, where host and device are the same memory, they are made at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

Values = tuple[torch.Tensor, ...]
HOST = torch.device("cpu")


class Copies:
    """Copies that have begun: ``values``, on one device or the host, to be read after `ready`. ``far``: the device of
    the sources or copies. ``stream``: the one that copies, of `begin` with ``held``, which records no memory for it."""

    def __init__(self, values: Values, event: Any = None, far: torch.device = HOST, stream: Any = None) -> None:
        self.values, self._event, self._far, self._stream = values, event, far, stream

    def __del__(self) -> None:
        """Memory of copies on a device for which nobody has waited is not used again before they are made."""
        if self._stream is not None and self.values and self.values[0].device.type != "cpu":
            for value in self.values:
                value.record_stream(self._stream)

    def ready(self) -> Values:
        """The copies: those on the host when they are there, those on the device for the current stream, which
        waits."""
        if self._event is not None and self.values:
            if self.values[0].device.type == "cpu":
                self._event.synchronize()
            else:
                current: Any = torch.accelerator.current_stream(self.values[0].device)
                current.wait_event(self._event)
                self._stream = None
                for value in self.values:
                    value.record_stream(current)
        return self.values

    def wait(self) -> None:
        """Wait on the host until the copies are made."""
        if self._event is not None:
            self._event.synchronize()

    def free_sources(self) -> None:
        """The device's current stream waits for these copies (of `begin` with ``held``); then the caller may drop the
        sources."""
        if self._event is not None:
            torch.accelerator.current_stream(self._far).wait_event(self._event)

    def free_source(self, source: torch.Tensor) -> None:
        """The caller may drop one source: its memory is not used again before these copies are made."""
        if self._stream is not None:
            source.record_stream(self._stream)

    def back(self, which: Sequence[int]) -> Copies:
        """Begin copies of some of these to the device that they came from, in memory of its current stream, which reads
        them; on a CPU, these themselves."""
        values = tuple(self.values[number] for number in which)
        if self._event is None:
            return Copies(values)
        return begin(values, self._far, after=self._event, held=True)


def begin(sources: Sequence[torch.Tensor], device: torch.device, into: Sequence[torch.Tensor] | None = None,
          after: Any = None, held: bool = False) -> Copies:
    """Begin copies of ``sources``, all on the host or on one device, to the memory of ``device``: to new tensors, or
    ``into`` others there, of the same shapes. They are read and written when the current stream has got here, and
    ``after`` an event. A thread has a current stream of its own: one that copies for another runs `under` that one's.
    ``held``: the caller holds sources on a device until `Copies.free_sources`, and copies there until `Copies.ready`.
    Then their memory, of the current stream, needs no `record_stream`, which would keep it from reuse for longer.
    """
    far = _far(device, sources)
    if far is None:
        made = tuple(torch.empty(x.shape, dtype=x.dtype) for x in sources) if into is None else tuple(into)
        return Copies(tuple(one.copy_(x.detach()) for one, x in zip(made, sources, strict=True)))
    stream = _stream(far, device.type != "cpu")
    if held and into is None and device.type != "cpu":
        into = [torch.empty_like(x, device=device) for x in sources]
    stream.wait_stream(torch.accelerator.current_stream(far))
    if after is not None:
        stream.wait_event(after)
    with torch.no_grad(), under(stream):
        copies = tuple(_empty(x, device) for x in sources) if into is None else tuple(into)
        for one, x in zip(copies, sources, strict=True):
            one.copy_(x.detach(), non_blocking=all(y.device.type != "cpu" or y.is_pinned() for y in (one, x)))
        event = stream.record_event()
    for value in () if held else (*sources, *(into or ())):
        if value.device.type != "cpu":
            value.record_stream(stream)
    return Copies(copies, event, far, stream if held else None)


def current(device: torch.device) -> Any:
    """The current stream of a device; None on a CPU."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def now(device: torch.device) -> Any:
    """An event: the current stream of a device has got here; None on a CPU."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()


def after(event: Any, device: torch.device) -> Any:
    """The stream of a device that waits for events only: copies `under` it wait for this one and those before, and not
    for what the host has launched since; None on a CPU."""
    if event is None:
        return None
    stream = _stream(device, None)
    stream.wait_event(event)
    return stream


@contextmanager
def under(stream: Any) -> Iterator[None]:
    """With ``stream`` (of `current`) as this thread's current one. (A `torch.Stream` as a context keeps what was before
    in itself: two threads could not be under one.)"""
    if stream is None:
        yield
        return
    index, before = torch.accelerator.current_device_index(), torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


def host_memory(value: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory, pinned where there is an accelerator."""
    pinned = torch.accelerator.is_available()
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned).copy_(value.detach())


def table_memory(value: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory, not pinned: of a table that is looked up there."""
    return torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())


def settle() -> None:
    """Wait for all copies to the device: parameters on the host may be written to afterwards."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
        _stream(torch.device(kind, torch.accelerator.current_device_index()), True).synchronize()


def _far(device: torch.device, sources: Sequence[torch.Tensor]) -> torch.device | None:
    """The accelerator that copies are from or to, with its index; None: there is none."""
    far = next((place for place in (device, *(x.device for x in sources)) if place.type != "cpu"), None)
    if far is None or far.index is not None:
        return far
    return torch.device(far.type, torch.accelerator.current_device_index())


def _empty(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=device, pin_memory=device.type == "cpu")


@cache
def _stream(far: torch.device, to_device: bool | None) -> Any:
    """The stream of copies in one direction; None: of waits."""
    return torch.Stream(far)


def machine_bytes() -> float:
    """The memory of this machine, in bytes."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def process_bytes(processes: int) -> float:
    """What one of so many processes on this machine, as a device, may take of its memory, in bytes: an equal part of
    two thirds."""
    return machine_bytes() * 2 / 3 / processes


__all__ = ["HOST", "Copies", "Values", "after", "begin", "current", "host_memory", "machine_bytes", "now",
           "process_bytes", "settle", "table_memory", "under"]
