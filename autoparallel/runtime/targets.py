"""The call in a batch, and the rest of the batch: targets of a loss outside of the model, in the layout of the outputs.

``for x, y in parallel.dataloader(dataset, 32): loss = criterion(parallel(x), y)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoparallel.errors import CaptureError, InputError
from autoparallel.layout import INVARIANT, Layout, to_torch
from autoparallel.runtime import initialise
from autoparallel.runtime.form import Compiled


def as_call(batch: Any, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call in a batch, as (args, kwargs): of a mapping the entries that forward names, of a tuple or list as many
    first ones as forward takes by position, or a tensor, which is the only argument. The rest are targets.

    Raises InputError for other types, and for a mapping that lacks an argument which forward requires.
    """
    if not isinstance(batch, (torch.Tensor, Mapping, tuple, list)):
        raise InputError(f"a batch is of type {type(batch).__name__}: give a mapping of keyword arguments, a tuple of "
                         "arguments, or a tensor")
    signature = inspect.signature(model.forward)
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    if not isinstance(batch, Mapping):
        values = (batch,) if isinstance(batch, torch.Tensor) else tuple(batch)
        count = sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
                    for kind in kinds.values())
        return values if inspect.Parameter.VAR_POSITIONAL in kinds.values() else values[:count], {}
    if inspect.Parameter.VAR_KEYWORD in kinds.values():
        return (), dict(batch)
    if lacking := [name for name, parameter in signature.parameters.items() if name not in batch
                   and parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL]:
        raise InputError(f"the batch has {', '.join(map(str, batch))}, and {type(model).__name__}.forward requires "
                         f"{', '.join(lacking)}\n  Name the entries of a batch as the arguments of forward. (Further "
                         "ones, such as targets, are not part of the call.) Or let a batch be a tuple.")
    return (), {name: value for name, value in batch.items() if name in kinds}


@contextmanager
def naming_optional(batch: Any, args: Sequence[Any], model: nn.Module) -> Iterator[None]:
    """Where the call ``args`` of a batch cannot be captured: say which values of it are optional arguments, and may be
    meant as targets."""
    try:
        yield
    except CaptureError as error:
        positional = [*inspect.signature(model.forward).parameters.values()][: len(args)]
        optional = [f"{number} as {parameter.name}" for number, parameter in enumerate(positional)
                    if parameter.default is not parameter.empty]
        if optional and not isinstance(batch, torch.Tensor):
            error.args = (f"{error}\n  Of the batch, forward gets entry {', '.join(optional)}. If that is a target: "
                          "let a sample be a mapping, in which targets have other names than arguments of forward.",)
        raise


def layout_of_targets(compiled: Compiled, gives_whole: bool) -> Layout | None:
    """The layout of tensors that go with the outputs of a call: their rows (dim 0) are cut as those of the first output
    of which a rank has a part. None where all outputs are plain tensors, with which DTensors do not mix."""
    cut = next((layout for layout in compiled.program.output_layouts
                if layout is not None and any(placement != INVARIANT for placement in layout)), None)
    if gives_whole or cut is None:
        return None
    return tuple(placement if placement.in_order else INVARIANT for placement in cut)


def placed(values: Any, layout: Layout | None, mesh: DeviceMesh, device: torch.device) -> Any:
    """A structure of targets with its tensors in this layout (None: whole and plain): plain ones, which are the global
    value, or DTensors. Tensors without dims are on all ranks."""

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if layout is None:
            return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf.to(device)
        lies = layout if leaf.dim() else (INVARIANT,) * mesh.ndim
        if isinstance(leaf, DTensor):
            return leaf.redistribute(mesh, to_torch(lies))
        mine = initialise.local_shard(leaf, mesh, lies).to(device).contiguous()
        return initialise.as_dtensor(mine, mesh, lies, tuple(leaf.shape))

    return pytree.tree_map(place, values)


__all__ = ["as_call", "layout_of_targets", "naming_optional", "placed"]
