"""Loaders' batches copied to the device one ahead, on a stream of its own, while the model computes (``pin_memory``).

The calls of torch's streams are all in `CopyStream`, which has not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor


class CopyStream:
    """A stream of ``device`` beside the one on which the model computes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._stream = device, torch.Stream(device)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Work inside is done on this stream, after all that the current stream has been given so far."""
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self._stream:
            yield

    def join(self, tensors: Iterable[torch.Tensor]) -> None:
        """The current stream waits for this one; memory of ``tensors`` is not reused before the current stream is done
        with them. The host does not wait."""
        current = torch.accelerator.current_stream(self.device)
        current.wait_stream(self._stream)
        for tensor in tensors:
            tensor.record_stream(current)


def copy_stream(device: torch.device, pin_memory: bool) -> CopyStream | None:
    """The stream for a loader's copies to ``device``: None on a CPU, and without pinned memory, whose copies the host
    waits for."""
    return CopyStream(device) if pin_memory and device.type != "cpu" else None


def placed(read: Iterator[tuple[Any, int]], place: Callable[[Any, int], Any], stream: CopyStream | None
           ) -> Iterator[tuple[Any, int]]:
    """(batch on the device, number of samples) of each (rows, number of samples) in ``read``.

    With a ``stream`` the next batch is read and its copy begun before a batch is given out, so that two are on the
    device. What reading or placing it raises is raised where that batch would come.
    """
    if stream is None:
        for rows, count in read:
            yield place(rows, count), count
        return
    coming = _begun(read, place, stream)
    while (found := coming) is not None:
        if isinstance(found, Exception):
            raise found
        stream.join(_tensors(found[0]))
        coming = _begun(read, place, stream)
        yield found


def _begun(read: Iterator[tuple[Any, int]], place: Callable[[Any, int], Any], stream: CopyStream
           ) -> tuple[Any, int] | Exception | None:
    """The next batch, its copy begun; None after the last; or the error in its place."""
    try:
        if (found := next(read, None)) is None:
            return None
        with stream.beside():
            return place(*found), found[1]
    except Exception as error:
        return error


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    """A batch's tensors on this rank."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            yield leaf.to_local() if isinstance(leaf, DTensor) else leaf


__all__ = ["CopyStream", "copy_stream", "placed"]
