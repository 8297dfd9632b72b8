"""Batches of a parallel module: as DTensors in the layouts that its program reads, and data loaders of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sized
from itertools import count
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from autoparallel.capture import canonical_call
from autoparallel.errors import InputError
from autoparallel.layout import INVARIANT, Layout, to_torch
from autoparallel.runtime import data, initialise, streams, targets
from autoparallel.runtime.batch_form import Form, flattened, is_texts
from autoparallel.runtime.form import Compiled
from autoparallel.runtime.inputs import local_batch
from autoparallel.runtime.state import State

_LOG = logging.getLogger("autoparallel")


def sharded(batch: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], compiled: Compiled, state: State) -> Any:
    """The batch of the call ``args``, ``kwargs``, with each tensor of the call as a DTensor in the layout that the
    program of ``compiled`` reads, and targets in that of its outputs. A dict if ``batch`` is a mapping, else a tuple
    (a namedtuple, if that is one).
    """
    named = [name for name, _ in state.inputs.named(args, kwargs)]
    leaves, spec = pytree.tree_flatten(canonical_call(args, kwargs))
    for decision, layout in zip(compiled.program.placeholders, compiled.program.placeholder_layouts, strict=True):
        if decision.kind == "input" and isinstance(whole := leaves[int(decision.path)], DTensor):
            leaves[int(decision.path)] = whole.redistribute(state.mesh, to_torch(layout))
        elif decision.kind == "input":
            mine = initialise.local_shard(whole, state.mesh, layout).to(state.device).contiguous()
            leaves[int(decision.path)] = initialise.as_dtensor(mine, state.mesh, layout, tuple(whole.shape))
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    rest: Any = () if isinstance(batch, torch.Tensor) else tuple(batch)[len(args):]
    if isinstance(batch, Mapping):
        rest = {name: value for name, value in batch.items() if name not in kwargs}
    if any(state.inputs.kind(name) == "local" for name in named):
        rest = local_batch(rest, state.mesh, state.device)
    rest = targets.placed(rest, _layout_of_targets(compiled, state), state.mesh, state.device)
    if isinstance(batch, Mapping):
        return {**kwargs, **rest}
    made = *args, *rest
    return type(batch)(*made) if hasattr(batch, "_fields") else made    # a namedtuple


def _layout_of_targets(compiled: Compiled, state: State) -> Layout | None:
    training = state.model.training
    return targets.layout_of_targets(compiled, state.gives_whole(training, compiled.micro.loss is not None))


def loader(state: State, trace: Callable[..., Compiled], dataset: Dataset[Any], batch_size: int, *, shuffle: bool,
           seed: int, collate: Callable[[list[Any]], Any] | None, per_sample: bool, drop_last: bool,
           options: Mapping[str, Any]) -> data.ShardedLoader | streams.StreamedLoader:
    """A loader of batches of ``batch_size`` samples over all ranks; arguments as of `ParallelModule.dataloader`.

    ``trace`` compiles the call of an example batch, whose input layouts say which rows each rank reads.
    """
    data.check_options(shuffle=shuffle, seed=seed, collate_fn=collate, per_sample=per_sample, drop_last=drop_last)

    def form_of(batch: Any, whole: bool) -> Form:
        if not state.hybrid.is_plain:
            return Form.of(batch, {}, state.position.whole, whole)
        args, kwargs = targets.as_call(batch, state.model)
        with targets.naming_optional(batch, args, state.model):
            compiled = trace(args, kwargs)
        layouts, rest = _layouts_of(batch, compiled, state.model)
        if rest and (layout := _layout_of_targets(compiled, state)) is not None:
            leaves, _ = flattened(batch)
            layouts |= {number: layout if leaves[number].dim() else (INVARIANT,) * len(layout) for number in rest}
            rest = frozenset()
        return Form.of(batch, layouts, state.mesh if layouts else state.position.whole, whole or bool(rest), rest)

    if streams.is_stream(dataset):
        if shuffle or per_sample:
            raise InputError("a stream has one order, and is read whole: leave out "
                             f"{'shuffle' if shuffle else 'per_sample'} (shuffle in the dataset, with the same seed on "
                             "all ranks)")
        streamed = streams.streamed_loader(dataset, batch_size, lambda batch: form_of(batch, True), state.device,
                                           seed=seed, collate=collate, drop_last=drop_last,
                                           as_dtensors=state.inputs.are_local, options=options)
        streamed.finish = _Finish(state, trace)
        return streamed
    whole = collate is not None and not per_sample
    form = form_of(data.example_batch(dataset, batch_size, collate, by_row=not whole), whole)
    sharded = data.sharded_loader(dataset, form, state.device, batch_size, shuffle=shuffle, seed=seed, collate=collate,
                                  drop_last=drop_last, as_dtensors=state.inputs.are_local, options=options)
    sharded.finish = _Finish(state, trace)
    if not drop_last:
        tell_of_rest(options.get("sampler") or dataset, batch_size, state.hybrid.micro_batches)
    return sharded


class _Finish:
    """Lays out targets of a batch as the outputs of its own call, which may be cut otherwise than those of the example
    that a loader was made for: a last batch has fewer rows, and perhaps fewer than ranks. Marks the batch."""

    def __init__(self, state: State, trace: Callable[..., Compiled]) -> None:
        self._state, self._trace = state, trace
        self._layouts: dict[object, Layout | None] = {}    # by mode and shapes of the batch
        self._loader, self._numbers = state.marks.next_loader(), count(1)

    def __call__(self, batch: Any) -> Any:
        return self._state.marks.mark_read(self._laid_out(batch), self._loader, next(self._numbers))

    def _laid_out(self, batch: Any) -> Any:
        state = self._state
        leaves, spec = flattened(batch)
        if not state.hybrid.is_plain or not (rest := _not_in_call(batch, state.model)):
            return batch
        form = state.modes(), *((leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
        if form not in self._layouts:
            self._layouts[form] = _layout_of_targets(self._trace(*targets.as_call(batch, state.model)), state)
        placed = [targets.placed(leaf, self._layouts[form], state.mesh, state.device) if number in rest else leaf
                  for number, leaf in enumerate(leaves)]
        return pytree.tree_unflatten(placed, spec)


def tell_of_rest(samples: Any, batch_size: int, micro_batches: int) -> None:
    """Warn, before the epoch, of a last batch that `ParallelModule.step` will refuse."""
    rest = len(samples) % batch_size if isinstance(samples, Sized) else 0
    if rest % micro_batches:
        _LOG.warning("the last batch has %d samples, which step's %d micro-batches do not divide: it will refuse this "
                     "batch. parallel.dataloader(..., drop_last=True) leaves it out", rest, micro_batches)


def _layouts_of(batch: Any, compiled: Compiled, model: nn.Module) -> tuple[dict[int, Layout], frozenset[int]]:
    """By leaf number of the batch: layouts of the inputs that the program reads; tensors that are not in the call."""
    numbers, program = _in_call(batch, model), compiled.program
    layouts = {numbers[int(decision.path)]: layout
               for decision, layout in zip(program.placeholders, program.placeholder_layouts, strict=True)
               if decision.kind == "input"}
    return layouts, _not_in_call(batch, model)


def _in_call(batch: Any, model: nn.Module) -> list[Any]:
    """The leaf numbers of the batch of the leaves of the call in it, in order."""
    leaves, spec = flattened(batch)
    numbered = pytree.tree_unflatten([[n] * len(leaf) if is_texts(leaf) else n for n, leaf in enumerate(leaves)], spec)
    call = ((0,), {}) if isinstance(batch, torch.Tensor) else targets.as_call(numbered, model)
    return pytree.tree_leaves(canonical_call(*call))


def _not_in_call(batch: Any, model: nn.Module) -> frozenset[int]:
    """The leaf numbers of tensors of the batch that are not in the call."""
    numbers = frozenset(_in_call(batch, model))
    return frozenset(number for number, leaf in enumerate(flattened(batch)[0])
                     if isinstance(leaf, torch.Tensor) and number not in numbers)
