"""Loaders' copies to the device one batch ahead: their order on streams, positions and errors, without a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.utils.data import Dataset

import autoparallel
from autoparallel.runtime import prefetch
from autoparallel.runtime.prefetch import copy_stream, placed
from tests.support.ranks import mesh_of


class Recorded:
    """Takes the place of `CopyStream`: notes the copies and joins."""

    def __init__(self, events: list[str]) -> None:
        self.events, self.copying = events, False

    @contextmanager
    def beside(self) -> Iterator[None]:
        self.copying = True
        yield
        self.copying = False

    def join(self, tensors: Iterable[Tensor]) -> None:
        self.events.append(f"join {[int(tensor.sum()) for tensor in tensors]}")


def read(events: list[str], last: int, fails_at: int | None = None) -> Iterator[tuple[int, int]]:
    try:
        for number in range(last):
            if number == fails_at:
                raise OSError(f"batch {number} cannot be read")
            events.append(f"read {number}")
            yield number, 10 + number
    finally:
        events.append("closed")


def placing(events: list[str], stream: Recorded | None) -> Any:
    def place(number: int, count: int) -> dict[str, Any]:
        assert stream is None or stream.copying
        events.append(f"copy {number} of {count}")
        return {"x": torch.tensor([number]), "name": "rows"}
    return place


def test_a_batch_is_copied_while_the_one_before_is_used() -> None:
    events: list[str] = []
    stream: Any = Recorded(events)
    for batch, count in placed(read(events, 3), placing(events, stream), stream):
        events.append(f"use {int(batch['x'])} of {count}")
    assert events == ["read 0", "copy 0 of 10", "join [0]", "read 1", "copy 1 of 11", "use 0 of 10",
                      "join [1]", "read 2", "copy 2 of 12", "use 1 of 11",
                      "join [2]", "closed", "use 2 of 12"]


def test_without_a_stream_nothing_is_read_ahead() -> None:
    events: list[str] = []
    for batch, _ in placed(read(events, 2), placing(events, None), None):
        events.append(f"use {int(batch['x'])}")
    assert events == ["read 0", "copy 0 of 10", "use 0", "read 1", "copy 1 of 11", "use 1", "closed"]


def test_an_error_is_raised_at_its_batch() -> None:
    events: list[str] = []
    stream: Any = Recorded(events)
    batches = placed(read(events, 3, fails_at=2), placing(events, stream), stream)
    assert [int(next(batches)[0]["x"]) for _ in range(2)] == [0, 1]
    assert events[-1] == "closed", "the next batch has failed already"
    with pytest.raises(OSError, match="batch 2 cannot be read"):
        next(batches)


@pytest.mark.slow
def test_a_dropped_iterator_reads_no_more_and_frees_its_batches() -> None:
    events: list[str] = []
    stream: Any = Recorded(events)
    batches = placed(read(events, 9), placing(events, stream), stream)
    first = weakref.ref(next(batches)[0]["x"])
    assert events[-2:] == ["read 1", "copy 1 of 11"]
    del batches
    gc.collect()
    assert events[-1] == "closed" and first() is None


def test_two_batches_are_held_at_most() -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def place(number: int, _: int) -> Tensor:
        alive.add(batch := torch.tensor([number]))
        assert len(alive) <= 2
        return batch

    stream: Any = Recorded([])
    for batch, _ in placed(read([], 5), place, stream):
        del batch
    assert len(alive) <= 1


class FakeStream:
    """A stream of torch that notes what it is asked to do."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def wait_stream(self, other: FakeStream) -> None:
        self.events.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self.events.append(f"on {self.name}")

    def __exit__(self, *_: object) -> None:
        self.events.append(f"off {self.name}")


class FakeTensor:
    def __init__(self, events: list[str]) -> None:
        self.events = events

    def record_stream(self, stream: FakeStream) -> None:
        self.events.append(f"kept for {stream.name}")


def test_the_calls_of_torchs_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    device = torch.device("cuda", 0)

    def stream_of(given: torch.device) -> FakeStream:
        assert given == device
        return FakeStream("copies", events)

    monkeypatch.setattr(prefetch.torch, "Stream", stream_of)
    monkeypatch.setattr(prefetch.torch.accelerator, "current_stream", lambda given: FakeStream("model", events))
    stream = copy_stream(device, True)
    assert stream is not None
    with stream.beside():
        events.append("copy")
    tensors: Any = [FakeTensor(events)]
    stream.join(tensors)
    assert events == ["copies waits for model", "on copies", "copy", "off copies",
                      "model waits for copies", "kept for model"]


def test_a_cpu_has_no_copies() -> None:
    assert copy_stream(torch.device("cpu"), True) is None
    assert copy_stream(torch.device("cuda", 0), False) is None


class Numbered(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((3,), float(index))}


class Streamed:
    """A stream without a position of its own."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (Numbered()[index] for index in range(12))


class Positioned(Streamed):
    """A stream that saves its own position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.at < 12:
            self.at += 1
            yield Numbered()[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Total(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sum()


def run(kind: type[Any]) -> tuple[list[int], list[str], list[float], list[float]]:
    """Of two batches: samples of the position, and events; sums of these and of those that a new loader goes on with.
    ``pin_memory`` does nothing on a CPU, so that a stand-in for the stream is set."""
    parallel = autoparallel.compile(Total(), mesh_of(2), pins={"x": Shard(0)})
    positions, events, totals = list[int](), list[str](), list[list[float]]()
    state: dict[str, Any] = {}
    for taken in (2, 3):
        loader = parallel.dataloader(kind(), 4, pin_memory=True)
        assert loader.stream is None and not loader.loader.pin_memory
        loader.stream = Recorded(events if not state else [])  # type: ignore[assignment]
        if state:
            loader.load_state_dict(state)
        totals.append([])
        for batch in loader:
            totals[-1].append(float(parallel(**batch)))
            positions.append(loader.state_dict()["samples"])
            if len(totals[-1]) == taken:
                break
        state = loader.state_dict()
    return positions, events, totals[0], totals[1]


@pytest.mark.parametrize("kind", [Numbered, Streamed, Positioned])
def test_a_position_is_that_of_the_batches_given_out(ranks: Any, kind: type[Any]) -> None:
    for rank, (positions, events, totals, after) in enumerate(ranks(2).run(run, kind)):
        assert positions == [4, 8, 12] and totals + after == [18.0, 66.0, 114.0]
        first = 3 * (1 if rank == 0 else 5)  # the sum of this rank's half of the first batch
        assert events == ([] if kind is Positioned else [f"join [{first}]", f"join [{first + 24}]"])


class Broken(Numbered):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= 8:
            raise OSError(f"sample {index} cannot be read")
        return super().__getitem__(index)


def broken() -> tuple[int, str]:
    parallel = autoparallel.compile(Total(), mesh_of(2), pins={"x": Shard(0)})
    loader = parallel.dataloader(Broken(), 4)
    loader.stream = Recorded([])  # type: ignore[assignment]
    taken = 0
    try:
        for batch in loader:
            parallel(**batch)
            taken += 1
    except OSError as error:
        return taken, str(error)
    return taken, "no error"


def test_a_loader_fails_at_the_sample_that_fails(ranks: Any) -> None:
    for taken, error in ranks(2).run(broken):
        assert taken == 2 and error.startswith("sample ")
