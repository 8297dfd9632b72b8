"""Arguments of the parallel module's methods, checked before anything is sent or written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.utils._pytree as pytree

from autoparallel.capture import refuse_other_layouts
from autoparallel.errors import InputError, shown


def check_path(name: str, value: Any) -> None:
    if not isinstance(value, (str, os.PathLike)) or not str(value) or "\0" in str(value):
        raise InputError(f"{name} is {shown(value)}: give the path of a folder (or file), a str or a pathlib.Path")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InputError(f"{name} is {shown(value)}: give True or False")


def check_optimizer(value: Any) -> None:
    if value is not None and not isinstance(value, torch.optim.Optimizer):
        raise InputError(f"optimizer is {shown(value)}: give a torch.optim.Optimizer over parallel.parameters(), or "
                         "None")


def check_step(value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise InputError(f"step is {shown(value)}: give the number of a checkpoint, 0 or more, or None")


def device_of(value: Any, default: torch.device) -> torch.device:
    """The device given, ``default`` for None."""
    if value is None:
        return default
    if isinstance(value, (str, torch.device)):
        with suppress(RuntimeError):
            return torch.device(value)
    raise InputError(f"device is {shown(value)}: give a torch.device or its name, as 'cuda' or 'cpu'")


def check_batch(batch: Any) -> None:
    """Raises InputError for tensors that cannot be cut into rows (sparse, nested) or have no values (meta)."""
    refuse_other_layouts(pytree.tree_leaves(batch))
    if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in pytree.tree_leaves(batch)):
        raise InputError("a tensor of the batch is on the meta device, and has no values: give a real one")


def check_call(args: Any, kwargs: Any) -> None:
    """The arguments of a call as `ParallelModule.trace` takes them."""
    if not isinstance(args, Sequence) or isinstance(args, (str, bytes)):
        raise InputError(f"args is {shown(args)}: give a tuple of the positional arguments of a call")
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise InputError(f"kwargs is {shown(kwargs)}: give a mapping of names to keyword arguments of a call")


__all__ = ["check_batch", "check_call", "check_flag", "check_optimizer", "check_path", "check_step", "device_of"]
