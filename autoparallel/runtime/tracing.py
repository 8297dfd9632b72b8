"""Calls of a parallel module traced, planned and lowered: one compiled program per call form."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.tensor import DTensor

from autoparallel.capture import call_text, canonical_call
from autoparallel.capture.dependencies import Dependencies
from autoparallel.capture.numbers import is_number
from autoparallel.errors import CaptureError, InputError, clipped
from autoparallel.runtime import arguments, left_values
from autoparallel.runtime.failing import Closed
from autoparallel.runtime.form import Compiled, as_plain, form_of
from autoparallel.runtime.guards import Guards
from autoparallel.runtime.inputs import form_text
from autoparallel.runtime.local_inputs import lies_as_read
from autoparallel.runtime.placing import place
from autoparallel.runtime.state import State

_LOG = logging.getLogger("autoparallel")


def first_form(state: State) -> Compiled:
    """The first compiled call form. Raises InputError before the first trace, and after `close`."""
    if isinstance(state.together, Closed):
        state.together.check()
    first = state.forms.first()
    if first is None:
        raise InputError("the model has not been traced yet, so its parameters have no layout: call it once, or "
                         "give example_inputs or example_kwargs to autoparallel.compile")
    return first


def trace(module: nn.Module, state: State, args: Sequence[Any], kwargs: Mapping[str, Any], step: bool, runs: bool,
          called: str = "") -> Compiled:
    """The compiled form of the call ``module(*args, **kwargs)``, compiled now if its form is new.

    ``step``: as `ParallelModule.step` runs it, in micro-batches and pipeline stages; else as one forward.
    ``runs``: the call runs next, so that ranks compare it even if its form is known. ``called``: the method that the
    user has called, which ranks compare, too.
    """
    called = called or ("step" if step else "forward")
    state.together.check()
    arguments.check_call(args, kwargs)
    arguments.check_flag("step", step)
    args, kwargs = canonical_call(args, kwargs)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    plain = not step or state.hybrid.is_plain
    state.check()
    key = form_of(leaves, spec), state.modes(), state.trainable(), plain
    with left_values.hidden(state) as left:
        compiled = state.forms.find(key, leaves)
        if compiled is None and state.attributes is not None:
            state.attributes.merge()
            compiled = state.forms.find(key, leaves)
        if compiled is not None and runs:
            left_values.check_reads(state, _dependencies_of(compiled), left)
        if compiled is None or runs:
            known: tuple[Any, ...] = (state.forms.number(compiled), *(leaves[n] for n in compiled.numbers)) \
                if compiled is not None else (*map(form_text, leaves), state.modes(), state.trainable())
            ask = state.together.ask if compiled is not None and runs and _computes_first(compiled, leaves) \
                else state.together.agree
            marks = state.marks.of(leaves) if runs else ()
            ask((step, called, torch.is_grad_enabled(), known, marks),
                partial(_text_of, state, args, kwargs, called, key, marks))
        if compiled is None:
            compiled = _compiled(module, state, key, leaves, spec, plain)
            if runs:
                left_values.check_reads(state, _dependencies_of(compiled), left)
                if state.originals is not None:
                    state.originals.tell_if_behind()
    left_values.mark(state, _dependencies_of(compiled), runs)
    return compiled


def _dependencies_of(compiled: Compiled) -> Dependencies:
    """What the trace of a form read."""
    found = compiled.micro.whole.dependencies
    assert found is not None
    return found


def _computes_first(compiled: Compiled, leaves: Sequence[Any]) -> bool:
    """Whether a call may begin while ranks still compare it: all that it sends goes through `kernels.collectives`."""
    if not compiled.sends_by_kernels or not any(isinstance(leaf, DTensor) for leaf in leaves):
        return compiled.sends_by_kernels
    program = compiled.program
    read = {int(decision.path): layout for decision, layout in
            zip(program.placeholders, program.placeholder_layouts, strict=True) if decision.kind == "input"}
    return all(place in read and lies_as_read(leaf, read[place])
               for place, leaf in enumerate(leaves) if isinstance(leaf, DTensor))


def _compiled(module: nn.Module, state: State, key: Any, leaves: Sequence[Any], spec: pytree.TreeSpec, plain: bool
              ) -> Compiled:
    """Trace, plan and lower a call of a new form; the first one places the module's parameters."""
    state.take_modes()
    on_meta = any(p.device.type == "meta" for p in state.model.parameters())
    shapes = [as_plain(leaf, torch.device("meta") if on_meta else state.device) for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(shapes, spec)
    call, numbers = call_text(args, kwargs), state.forms.inputs_of(key, str(spec), leaves)
    fixed = dict(zip(_names(state, args, kwargs), map(_fixed_of, leaves), strict=True))
    if state.forms and dist.get_rank() == 0:  # compiling takes seconds
        changes = [*state.forms.changes(key, leaves), *state.forms.other_uses(key),
                   *state.forms.other_arguments(key, fixed)]
        why = f", since {clipped('; '.join(changes))}" if changes else ""
        _LOG.warning("%s is compiled for a call of another form (form %d): %s%s", type(state.model).__name__,
                     state.forms.compiled + 1, clipped(call), why)
    try:
        with _without_hooks():  # the user's are of what runs, not of what is traced
            compiled = state.compile_call(state.model, args, kwargs, state.layouts,
                                          plain and not state.hybrid.is_plain, numbers)
    except CaptureError as error:
        if state.calls_traced:
            error.args = (f"{error}\n  Traced before: {clipped('; '.join(state.calls_traced))}",)
        raise
    state.join(compiled.joint_axes)
    if not state.forms:
        with torch.inference_mode(False):  # parameters must be normal tensors, trainable later
            place(module, state, compiled)
    state.forms.add(key, str(spec), leaves, Guards(state.parts, _dependencies_of(compiled), leaves), compiled, fixed)
    _log_numbers(state, compiled, args, kwargs)
    state.calls_traced[call] = None
    return compiled


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Without hooks of saved tensors, as `torch.utils.checkpoint` has them around what it calls: under any, torch.func
    takes no gradients."""
    hooks = list[tuple[Any, Any]]()
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def _names(state: State, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """The names of a call's leaves, as past[0]['keys']."""
    return [f"{name}{pytree.keystr(path)}" for name, value in state.inputs.named(args, kwargs)
            for path, _ in pytree.tree_flatten_with_path(value)[0]]


def _fixed_of(leaf: Any) -> str:
    """What tracing fixes of an argument: of a number its type."""
    if is_number(leaf):
        return type(leaf).__name__
    return form_text(leaf) + (" with gradients" if isinstance(leaf, torch.Tensor) and leaf.requires_grad else "")


def _log_numbers(state: State, compiled: Compiled, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Log on rank 0, once each, which number arguments the programs read at every call, and which fix a form."""
    graph, names = compiled.micro.whole, _names(state, args, kwargs)
    texts = {place: f"{names[place]} is an input of the program from now on, which serves all its values"
             for place in graph.numbers}
    texts |= {place: f"each value of {names[place]} has a compiled form of its own: {why}"
              for place, why in graph.fixed.items()}
    for text in texts.values():
        if text not in state.numbers_told and dist.get_rank() == 0:
            _LOG.warning("%s: %s", type(state.model).__name__, text)
        state.numbers_told.add(text)


def _text_of(state: State, args: Sequence[Any], kwargs: Mapping[str, Any], called: str, key: Any,
             marks: Sequence[str]) -> tuple[str, str]:
    """A call with its batches, modes and changes, and the size of the model: error messages compare it with other
    ranks'."""
    leaves = pytree.tree_leaves((args, kwargs))
    modes, free = state.modes(), state.trainable()
    changes = state.forms.changes(key, leaves)
    text = "".join([
        called, call_text(args, kwargs),
        *(f" of {mark}" for mark in dict.fromkeys(filter(None, marks))),
        "" if torch.is_grad_enabled() else " under no_grad",
        " in train mode" if all(modes) else " in eval mode" if not any(modes) else
        f" with {sum(modes)} of {len(modes)} modules in train mode",
        "" if all(free) else f", {sum(free)} of {len(free)} parameters trainable",
        f", where {'; '.join(changes)}" if changes else ""])
    return text, f" of a model of {len(modes)} modules and {len(free)} parameters"
