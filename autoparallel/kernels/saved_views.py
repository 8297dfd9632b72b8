"""Saved tensors as views of a storage, to be rebuilt on another storage; or kept, with their versions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autoparallel.errors import InputError


@dataclass(frozen=True)
class Form:
    """The view of a storage that a tensor is. ``conjugate``, ``negative``: torch's lazy conjugation and negation."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.is_conj(),
                   tensor.is_neg())

    def view(self, whole: torch.Tensor) -> torch.Tensor:
        """The same view of the storage of ``whole``."""
        made = torch.empty(0, dtype=self.dtype, device=whole.device)
        made.set_(whole.untyped_storage(), self.offset, self.size, self.stride)
        made = made.conj() if self.conjugate else made
        return torch._neg_view(made) if self.negative else made


class Here:
    """A saved tensor that stays on the device, with its version. (Autograd checks no versions where hooks pack.)"""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: an op that saves its own result would otherwise be a reference cycle.
        self._value, self._version = tensor.detach(), tensor._version

    def read(self) -> torch.Tensor:
        """The tensor, for backward. Raises InputError if it has been written to."""
        if self._value._version != self._version:
            raise InputError(f"a tensor {list(self._value.shape)} that backward reads was written to between forward "
                             "and backward, which would take its new values\n  Write to it after backward, or to a "
                             "copy, x.clone().")
        return self._value


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of one storage, as a sparse one is not."""
    return tensor.layout == torch.strided


__all__ = ["Form", "Here", "has_storage"]
