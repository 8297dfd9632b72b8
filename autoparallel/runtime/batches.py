"""Batches of a parallel module: as DTensors in the layouts that its program reads, and data loaders of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sized
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from autoparallel.capture import canonical_call
from autoparallel.errors import InputError
from autoparallel.layout import Layout, to_torch
from autoparallel.runtime import data, initialise, streams
from autoparallel.runtime.batch_form import Form
from autoparallel.runtime.form import Compiled
from autoparallel.runtime.state import State

_LOG = logging.getLogger("autoparallel")


def as_call(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """A batch as (args, kwargs) of a call: a mapping is keyword arguments, a tuple or list positional ones, a tensor
    the only argument. Raises InputError for other types."""
    if isinstance(batch, Mapping):
        return (), batch
    if not isinstance(batch, (torch.Tensor, tuple, list)):
        raise InputError(f"a batch is of type {type(batch).__name__}: give a mapping of keyword arguments, a tuple of "
                         "arguments, or a tensor")
    return ((batch,) if isinstance(batch, torch.Tensor) else tuple(batch)), {}


def sharded(batch: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], compiled: Compiled, state: State) -> Any:
    """The call ``args``, ``kwargs``, made of ``batch``, with each tensor as a DTensor in the layout that the program of
    ``compiled`` reads; keyword arguments if ``batch`` is a mapping, else positional ones."""
    leaves, spec = pytree.tree_flatten(canonical_call(args, kwargs))
    for decision, layout in zip(compiled.program.placeholders, compiled.program.placeholder_layouts, strict=True):
        if decision.kind == "input" and isinstance(whole := leaves[int(decision.path)], DTensor):
            leaves[int(decision.path)] = whole.redistribute(state.mesh, to_torch(layout))
        elif decision.kind == "input":
            mine = initialise.local_shard(whole, state.mesh, layout).to(state.device).contiguous()
            leaves[int(decision.path)] = initialise.as_dtensor(mine, state.mesh, layout, tuple(whole.shape))
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return kwargs if isinstance(batch, Mapping) else args


def loader(state: State, trace: Callable[..., Compiled], dataset: Dataset[Any], batch_size: int, *, shuffle: bool,
           seed: int, collate: Callable[[list[Any]], Any] | None, per_sample: bool, drop_last: bool,
           options: Mapping[str, Any]) -> data.ShardedLoader | streams.StreamedLoader:
    """A loader of batches of ``batch_size`` samples over all ranks; arguments as of `ParallelModule.dataloader`.

    ``trace`` compiles the call of an example batch, whose input layouts say which rows each rank reads.
    """
    data.check_options(shuffle=shuffle, seed=seed, collate_fn=collate, per_sample=per_sample, drop_last=drop_last)

    def form_of(batch: Any, whole: bool) -> Form:
        layouts = _layouts_of(batch, trace(*as_call(batch))) if state.hybrid.is_plain else {}
        return Form.of(batch, layouts, state.mesh if layouts else state.position.whole, whole)

    if streams.is_stream(dataset):
        if shuffle or per_sample:
            raise InputError("a stream has one order, and is read whole: leave out "
                             f"{'shuffle' if shuffle else 'per_sample'} (shuffle in the dataset, with the same seed on "
                             "all ranks)")
        return streams.streamed_loader(dataset, batch_size, lambda batch: form_of(batch, True), state.device, seed=seed,
                                       collate=collate, drop_last=drop_last, as_dtensors=state.inputs.are_local,
                                       options=options)
    whole = collate is not None and not per_sample
    form = form_of(data.example_batch(dataset, batch_size, collate, by_row=not whole), whole)
    sharded = data.sharded_loader(dataset, form, state.device, batch_size, shuffle=shuffle, seed=seed, collate=collate,
                                  drop_last=drop_last, as_dtensors=state.inputs.are_local, options=options)
    if not drop_last:
        tell_of_rest(options.get("sampler") or dataset, batch_size, state.hybrid.micro_batches)
    return sharded


def tell_of_rest(samples: Any, batch_size: int, micro_batches: int) -> None:
    """Warn, before the epoch, of a last batch that `ParallelModule.step` will refuse."""
    rest = len(samples) % batch_size if isinstance(samples, Sized) else 0
    if rest % micro_batches:
        _LOG.warning("the last batch has %d samples, which step's %d micro-batches do not divide: it will refuse this "
                     "batch. parallel.dataloader(..., drop_last=True) leaves it out", rest, micro_batches)


def _layouts_of(batch: Any, compiled: Compiled) -> dict[int, Layout]:
    """Layouts of the inputs that the program reads, by leaf number of the batch."""
    leaves, spec = pytree.tree_flatten(batch)
    numbered = pytree.tree_unflatten(range(len(leaves)), spec)
    call = as_call(numbered) if numbered != 0 else ((0,), {})  # a tensor by itself
    numbers = pytree.tree_leaves(canonical_call(*call))
    program = compiled.program
    return {numbers[int(decision.path)]: layout
            for decision, layout in zip(program.placeholders, program.placeholder_layouts, strict=True)
            if decision.kind == "input"}
