"""Tensors that a block saves for its backward, in the memory of the host or on disk until then.

A block's tensors are copied away once its forward has ended, and their device memory is released when forward of the
next offloaded block has ended: it holds those of at most two blocks. They are fetched during backward of that next
block; those of the last block are on the device still when backward begins. Gathered parameters of ZeRO-3 are not saved
but gathered again (`regather`). `pricing` counts bytes and seconds of the same rules.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autoparallel.kernels import regather
from autoparallel.kernels.host_copies import HOST, Copies, begin
from autoparallel.kernels.recomputed import Recomputed
from autoparallel.kernels.saved_on_disk import FromDisk, OnDisk
from autoparallel.kernels.saved_views import Form, Here, has_storage


class SavedInOrder:
    """The offloaded blocks of one program, in the order of its forward. ``ahead``: a block's tensors are fetched during
    backward of the next block; else each tensor at its use, for a backward in two parts. ``on_disk``: they wait there
    (within `saved_on_disk.use_file`), else on the host."""

    def __init__(self, ahead: bool, on_disk: bool = False) -> None:
        self.ahead, self.on_disk, self._blocks = ahead, on_disk, 0
        self._last: Callable[[], _Saved | None] = _none    # the block that has ended last

    def __deepcopy__(self, memo: dict[int, Any]) -> SavedInOrder:
        return SavedInOrder(self.ahead, self.on_disk)

    def block(self, body: nn.Module) -> OffloadedBlock:
        """The next block of the program, in which ``body`` runs. Of a `Recomputed` one the kept results leave, else all
        that autograd saves."""
        self._blocks += 1
        return OffloadedBlock(body, self, self._blocks == 1)

    def run(self, body: nn.Module, values: Sequence[torch.Tensor], is_first: bool) -> Any:
        """Run a block, and copy the tensors that it saves away. ``values``: its inputs, which stay on the device, since
        others hold them; ``is_first``: whether it is the first block of this forward."""
        last, self._last = self._last(), _none    # nothing of a forward that fails here is awaited in the next
        saved = _Saved(last if self.ahead and not is_first else None, self.ahead, values)
        if isinstance(body, Recomputed):
            made = body.saving(values, saved.pack, _unpack)
        else:
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, _unpack):
                made = body(*values)
        saved.leave(made, OnDisk if self.on_disk else _to_host)
        if last is not None:
            last.release()
        self._last = weakref.ref(saved)
        return made


class OffloadedBlock(nn.Module):
    """A block whose saved tensors are on the host or disk between forward and backward."""

    def __init__(self, body: nn.Module, order: SavedInOrder, is_first: bool) -> None:
        super().__init__()
        self.body, self.order, self.is_first = body, order, is_first

    def forward(self, *values: torch.Tensor) -> Any:
        return self.order.run(self.body, values, self.is_first) if torch.is_grad_enabled() else self.body(*values)


@dataclass(frozen=True)
class _View:
    """Stands for a tensor that autograd saved, the ``place``-th of a block: a view of storage ``number``."""

    saved: _Saved
    place: int
    number: int
    form: Form


class _Saved:
    """The storages that one run of a block saved, each as a flat tensor, by number. ``before``: those of the previous
    block, fetched during backward of this one; ``inputs``: the block's."""

    def __init__(self, before: _Saved | None, ahead: bool, inputs: Sequence[torch.Tensor]) -> None:
        self._before, self._ahead = before, ahead
        self._kept = {_address(value) for value in inputs if has_storage(value)}
        self._numbers: dict[int, int] = {}    # by storage, while the block runs
        self._stay = list[Here | None]()    # by place, the tensor if it stays on the device
        self._here: dict[int, torch.Tensor] = {}    # those on the device
        self._uses: list[int] = []    # reads left in backward
        self._number_at: list[int] = []    # by place, while the block runs
        self._away: dict[int, int] = {}    # of what is copied, its place among the copies
        self._copies: Copies | OnDisk | None = None
        self._released = False    # whether the sources of the copies are free
        self._coming: tuple[Sequence[int], Copies | FromDisk] | None = None

    def pack(self, value: torch.Tensor) -> Any:
        """The pack hook of autograd."""
        again = regather.pack(value)
        if not isinstance(again, Here) or not (has_storage(value) and value.numel()) or _address(value) in self._kept:
            return again
        storage = value.untyped_storage()
        number = self._numbers.setdefault(_address(value), len(self._uses))
        if number == len(self._uses):
            self._here[number] = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
            self._uses.append(0)
        self._uses[number] += 1
        self._stay.append(again)
        self._number_at.append(number)
        return _View(self, len(self._stay) - 1, number, Form.of(value))

    def leave(self, results: Any, begin: Callable[[Sequence[torch.Tensor]], Copies | OnDisk]) -> None:
        """Copy all storages by ``begin``, except those of the block's ``results``, which others hold too, and, on an
        accelerator, storages in host memory."""
        kept = (x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor) and has_storage(x))
        stay = {self._numbers.get(_address(value)) for value in kept}
        if any(one.device.type != "cpu" for one in self._here.values()):
            stay |= {number for number, one in self._here.items() if one.device.type == "cpu"}
        self._here = {number: one for number, one in self._here.items() if number not in stay}
        self._away = {number: place for place, number in enumerate(self._here)}
        self._stay = [one if number in stay else None
                      for one, number in zip(self._stay, self._number_at, strict=True)]
        if self._here:
            self._copies = begin(list(self._here.values()))
        self._numbers.clear()
        self._number_at.clear()

    def release(self) -> None:
        """Free the device memory of copied storages, as soon as the copies are made."""
        if self._copies is not None and self._coming is None and self._here:
            self._copies.free_sources()
            self._here.clear()
            self._released = True

    def fetch(self) -> None:
        """Begin to copy back the storages that backward will read."""
        numbers = [number for number in self._away if self._uses[number] and number not in self._here]
        if self._coming is None and numbers:
            self._coming = numbers, self._back(numbers)

    def read(self, view: _View) -> torch.Tensor:
        """The tensor, for backward; begins to fetch the previous block's."""
        number, here = view.number, self._stay[view.place]
        if here is not None:
            return here.read()
        if not self._uses[number] or not (self._ahead or number in self._here):
            return view.form.view(self._back([number]).ready()[0])
        self.fetch()
        if self._before is not None:
            self._before.fetch()
            self._before = None
        if number not in self._here:
            assert self._coming is not None
            (numbers, copies), self._coming = self._coming, None
            self._here.update(zip(numbers, copies.ready(), strict=True))
        whole = self._here[number]
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._here[number]
            if self._copies is not None and not self._released:    # and may be read again, from the host
                self._copies.free_source(whole)
        return view.form.view(whole)

    def _back(self, numbers: Sequence[int]) -> Copies | FromDisk:
        assert self._copies is not None
        return self._copies.back([self._away[number] for number in numbers])


def _none() -> None:
    return None


def _to_host(sources: Sequence[torch.Tensor]) -> Copies:
    return begin(sources, HOST, held=True)


def _address(value: torch.Tensor) -> int:
    """The address of a tensor's storage object, which an empty one has too."""
    return value.untyped_storage()._cdata


def _unpack(packed: Any) -> torch.Tensor:
    return packed.saved.read(packed) if isinstance(packed, _View) else regather.unpack(packed)


__all__ = ["OffloadedBlock", "SavedInOrder"]
