"""Saved tensors on the host: each storage once, two blocks' on the device at most, the block before fetched ahead."""

from __future__ import annotations

import copy
import errno
import gc
import mmap
import os
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures.thread import _WorkItem
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from autoparallel.errors import InputError
from autoparallel.kernels import regather, saved_on_disk, saved_on_host
from autoparallel.kernels.host_copies import Copies
from autoparallel.kernels.recomputed import Recomputed
from autoparallel.kernels.saved_on_disk import use_file
from autoparallel.kernels.saved_on_host import OffloadedBlock, SavedInOrder
from autoparallel.runtime.offload.saved_file import Room, SavedFile
from autoparallel.schedule.tiers import BLOCK_BYTES
from tests.support.tiers import slow

BLOCKS = 4


class Block(nn.Module):
    """Saves its inputs, which others keep, what the sine reads, ``wide``, ``rows``, its view's result, and its own."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
        wide = torch.sin(x @ weight)
        rows = wide.view(-1).exp()
        return ((wide * rows.view(wide.shape) * self.scale + x).tanh(),)


def blocks(ahead: bool = True, on_disk: bool = False, selective: bool = False) -> list[OffloadedBlock]:
    order, traced = SavedInOrder(ahead, on_disk), [fx.symbolic_trace(Block(1 + 0.1 * n)) for n in range(BLOCKS)]
    return [order.block(Recomputed(one, "selective") if selective else one) for one in traced]


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)


def run(modules: Sequence[nn.Module], x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    for module in modules:
        (x,) = module(x, weight)
    return x.square().sum()


@pytest.mark.parametrize("ahead", [True, False])
def test_gradients_are_those_of_the_blocks(ahead: bool) -> None:
    """Also of a second backward, of a forward beside another's backward, of a copy, and without gradients."""
    plain = [Block(1 + 0.1 * n) for n in range(BLOCKS)]
    x, weight = inputs()
    wanted = torch.autograd.grad(run(plain, x, weight), (x, weight))
    modules = blocks(ahead)
    first, second = (run(modules, x, weight) for _ in range(2))
    for loss in (first, first, second, run(copy.deepcopy(nn.ModuleList(modules)), x, weight)):  # type: ignore[arg-type]
        found = torch.autograd.grad(loss, (x, weight), retain_graph=loss is first)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    with torch.no_grad():
        assert torch.equal(run(modules, x, weight), first)


@pytest.mark.parametrize(("on_disk", "selective"), [(True, True), slow(True, False), (False, False), slow(False, True)])
def test_gradients_of_what_waits_on_disk_and_of_what_selective_recompute_keeps(
    on_disk: bool, selective: bool, tmp_path: Path,
) -> None:
    """In steps whose forwards overlap, and in a copy; files are used again. What is recomputed does not leave."""
    plain = [Block(1 + 0.1 * n) for n in range(BLOCKS)]
    x, weight = inputs()
    wanted = torch.autograd.grad(run(plain, x, weight), (x, weight))
    file, modules = SavedFile(tmp_path), blocks(on_disk=on_disk, selective=selective)
    sizes = []
    for _ in range(3):
        with use_file(file):
            losses = [run(modules, x, weight) for _ in range(2)]
        for loss in losses:
            found = torch.autograd.grad(loss, (x, weight))
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        del losses, loss
        gc.collect()
        sizes.append(file.used_bytes)
    # Of each block and forward a page for each storage: the matrix product alone, or also ``wide`` and ``rows``.
    kept = 2 * BLOCKS * (1 if selective else 3) * BLOCK_BYTES
    assert sizes == [kept if on_disk else 0] * 3
    with use_file(file):
        copied = run(copy.deepcopy(nn.ModuleList(modules)), x, weight)  # type: ignore[arg-type]
    assert torch.equal(torch.autograd.grad(copied, (x, weight))[0], wanted[0])


def test_errors_of_the_disk_come_where_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No room in forward; what was written to the file in between, in backward."""
    x, weight = inputs()
    file, modules = SavedFile(tmp_path), blocks(on_disk=True)
    with use_file(file):
        loss = run(modules, x, weight)
    for _ in range(saved_on_disk.THREADS):    # all is written before
        saved_on_disk._threads("writes").submit(time.sleep, 0.1).result()
    os.pwrite(file._file.fileno(), memoryview(mmap.mmap(-1, file.used_bytes)), 0)
    with pytest.raises(InputError, match="read from disk otherwise than it was written"):
        torch.autograd.grad(loss, (x, weight))

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InputError, match=r"no room for saved tensors of blocks of .* No space left"):
        SavedFile(tmp_path, 2**20)
    with use_file(file), pytest.raises(InputError, match="no room for saved tensors"):
        _ = run(modules, x, weight), run(modules, x, weight)


@pytest.mark.parametrize("move", ["pwrite", "preadv"])
def test_a_step_whose_disk_failed_says_so_and_the_next_one_is_right(
    move: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while somebody holds what the failed forward has made, as a traceback does."""
    x, weight = inputs()
    file, modules, held = SavedFile(tmp_path), blocks(on_disk=True), []

    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def step() -> tuple[torch.Tensor, ...]:
        made = x
        with use_file(file):
            for module in modules:
                (made,) = module(made, weight)
                held.append(made)
        return torch.autograd.grad(made.square().sum(), (x, weight))

    with monkeypatch.context() as now:
        now.setattr(os, move, failing)
        with pytest.raises(InputError, match=r"a saved tensor was not (written|read) whole \(Input/output error\)"):
            step()
    wanted = torch.autograd.grad(run([Block(1 + 0.1 * n) for n in range(BLOCKS)], x, weight), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(step(), wanted, strict=True))


def test_the_next_forward_takes_the_rooms_of_the_last_one_however_slow_threads_are(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where their executor holds finished work for a while, and the disk is slow."""
    def held(item: Any, run: Callable[..., None] = _WorkItem.run) -> None:
        run(item)
        time.sleep(0.02)

    def slow(room: Room, value: torch.Tensor, write: Callable[..., None] = Room.write) -> None:
        time.sleep(0.02)
        write(room, value)

    monkeypatch.setattr(_WorkItem, "run", held)
    monkeypatch.setattr(Room, "write", slow)
    file, modules, sizes = SavedFile(tmp_path), blocks(on_disk=True)[:3], []
    for _ in range(3):
        with use_file(file):
            run(modules, *inputs()).sum().backward()
        sizes.append(file.used_bytes)
    assert 0 < sizes[0] == sizes[-1]


def test_conjugated_and_negated_tensors_are_so_in_backward() -> None:
    """As torch has them: by a bit of the tensor, which its storage does not have."""
    def body(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
        turned = torch.complex(x, x @ weight).conj()
        return (turned.imag * weight.sum() + (turned * turned.exp().conj()).real,)

    x, weight = inputs()
    wanted = torch.autograd.grad(body(x, weight)[0].sum(), (x, weight))
    block = SavedInOrder(True).block(Body(body))
    found = torch.autograd.grad(block(x, weight)[0].sum(), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_sparse_tensors_stay() -> None:
    def body(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.sparse.mm(torch.eye(3).to_sparse(), x @ weight).sin(),)

    x, weight = inputs()
    wanted = torch.autograd.grad(body(x, weight)[0].sum(), (x, weight))
    found = torch.autograd.grad(SavedInOrder(True).block(Body(body))(x, weight)[0].sum(), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_gathered_parameters_are_read_as_they_were_saved() -> None:
    """Complex views of real ones, and conjugated ones, when ZeRO-3 gathers them again."""
    whole = torch.randn(4, 2)
    with regather.regathering(25e6):
        run = regather._run.get()
        assert run is not None
        gather = regather._Gather(lambda numbers, sources: lambda: list(sources), (whole.clone(),))
        run.gathers.add(gather)
        run.add(whole, gather, 0)
        for saved in (torch.view_as_complex(whole), torch.view_as_complex(whole).conj()[1:]):
            packed = regather.pack(saved)
            assert isinstance(packed, regather._Saved) and torch.equal(regather.unpack(packed), saved)


@pytest.mark.parametrize("written", ["input", "result"])
def test_what_stays_and_is_written_to_before_backward_is_refused(written: str) -> None:
    """As by autograd itself, without hooks."""
    x, weight = inputs()
    (made,) = blocks()[0](x, weight)
    loss = made.sum()
    with torch.no_grad():
        (x if written == "input" else made).add_(1)
    with pytest.raises(InputError, match="written to between forward and backward"):
        loss.backward()


class Body(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., tuple[torch.Tensor]]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor]:
        return self.function(*values)


class Far(Copies):
    """Copies that tell what happens to them."""

    def __init__(self, values: Sequence[torch.Tensor], number: int, told: list[tuple[str, int]]) -> None:
        super().__init__(tuple(value.clone() for value in values))
        self.number, self.told = number, told

    def free_sources(self) -> None:
        self.told.append(("free", self.number))

    def back(self, which: Sequence[int]) -> Copies:
        self.told.append(("fetch", self.number))
        return Copies(tuple(self.values[number].clone() for number in which))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What happens to each block's copies, in order, as if the host were far."""
    found: list[tuple[str, int]] = []

    def begin(values: Sequence[torch.Tensor], device: torch.device, held: bool) -> Copies:
        assert held
        number = sum(what == "leave" for what, _ in found) % BLOCKS
        found.append(("leave", number))
        assert sum(value.nbytes for value in values) == 3 * (3 * 8 * 4)    # each storage once, and no result
        return Far(values, number, found)

    monkeypatch.setattr(saved_on_host, "begin", begin)
    return found


def test_two_blocks_are_there_and_the_one_before_comes_ahead(told: list[tuple[str, int]]) -> None:
    modules, (x, weight) = blocks(), inputs()
    loss = run(modules, x, weight)
    assert told == [("leave", 0), ("leave", 1), ("free", 0), ("leave", 2), ("free", 1), ("leave", 3), ("free", 2)]
    told.clear()
    loss.backward()
    assert told == [("fetch", 2), ("fetch", 1), ("fetch", 0)]    # the last is there still
    told.clear()
    run(modules, x, weight)
    assert told.count(("free", 3)) == 0    # that of the first forward was read


def test_the_last_block_of_a_forward_leaves_when_another_forward_follows(told: list[tuple[str, int]]) -> None:
    modules, (x, weight) = blocks(), inputs()
    first = run(modules, x, weight)
    told.clear()
    second = run(modules, x, weight)
    assert told[:2] == [("leave", 0), ("free", 3)]
    told.clear()
    first.backward()
    assert told == [("fetch", 3), ("fetch", 2), ("fetch", 1), ("fetch", 0)]
    told.clear()
    second.backward()
    assert told == [("fetch", 2), ("fetch", 1), ("fetch", 0)]


def test_in_two_parts_each_tensor_comes_at_its_use(told: list[tuple[str, int]]) -> None:
    modules, (x, weight) = blocks(ahead=False), inputs()
    loss = run(modules, x, weight)
    told.clear()
    torch.autograd.grad(loss, x, retain_graph=True)
    once = len(told)
    torch.autograd.grad(loss, weight)
    assert {number for _, number in told[:once]} == {0, 1, 2} and len(told) > once


def test_nothing_is_kept_of_a_forward_without_backward() -> None:
    modules, (x, weight) = blocks(), inputs()
    loss: Any = run(modules, x, weight)
    last = weakref.ref(modules[0].order._last())
    assert last() is not None
    del loss
    gc.collect()
    assert last() is None
