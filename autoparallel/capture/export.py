"""The one place that touches torch.export: model and inputs -> ExportedProgram, or an error with a source line."""

from __future__ import annotations

import inspect
import logging
import re
import sysconfig
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from threading import get_ident
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from autoparallel.capture.contents import inside
from autoparallel.capture.dependencies import recorder, uncounted
from autoparallel.capture.left import can_be_returned
from autoparallel.capture.numbers import as_symbols, as_tensors
from autoparallel.capture.remedies import WITHOUT_FUNCTIONS, instead, lines_at, lines_of, makes_number
from autoparallel.capture.tracing.frames import OWN, stacks_read_late
from autoparallel.capture.tracing.hf_caches import own_states, register_caches
from autoparallel.capture.tracing.masked_rows.control_flow import REGIONS
from autoparallel.capture.tracing.masked_rows.dispatch import rows_by_value, tensors_of
from autoparallel.capture.tracing.stand_ins import TracedCalls, flex_attention_as_ops, traced_methods, without_checks
from autoparallel.capture.tracing.tensor_attributes import refusing_attributes
from autoparallel.errors import CaptureError, clipped
from autoparallel.ops.user_function import functions_as_ops

_STDLIB = sysconfig.get_path("stdlib")
#: Where torch logs of a trace that ends, at length: our message replaces it.
_TORCH_LOGS = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")


def trace(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], numbers: Sequence[int] = ()
          ) -> ExportedProgram:
    """Trace ``model(*args, **kwargs)`` in the mode (train or eval) that the model is in; the leaves ``numbers`` as
    symbols.

    Raises CaptureError when the model branches on the data, naming the line of the user's source.
    """
    args, kwargs = _distinct(args, kwargs)
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
    args, kwargs = as_tensors((args, kwargs), numbers)
    register_caches()
    known = [*model.parameters(), *tensors_of((args, kwargs))]
    given = _Given()
    hooks = (model.register_forward_pre_hook(given.note, with_kwargs=True),
             model.register_forward_pre_hook(own_states, with_kwargs=True),
             model.register_forward_hook(given.check, with_kwargs=True), model.register_forward_hook(_returned))
    try:
        with (_quiet(), uncounted(), torch.enable_grad(), functions_as_ops(), without_checks(), traced_methods(),
              flex_attention_as_ops(), rows_by_value(), TracedCalls(known), as_symbols(model, numbers),
              refusing_attributes(model), stacks_read_late(),
              _use_lazy_graph_module(True)):  # no Python code of graphs that are not called
            return torch.export.export(model, tuple(args), dict(kwargs), strict=False)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(_explain(model, error)) from error
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch logs and prints of a trace that ends, the graph so far: our message replaces it. And without
    its warning that attributes have to be buffers."""
    from torch.export import _trace  # seconds to import

    logs = {log: log.level for log in map(logging.getLogger, _TORCH_LOGS)}
    thread = get_ident()

    def elsewhere(*args: Any, **kwargs: Any) -> None:
        if get_ident() != thread:
            print(*args, **kwargs)

    for log in logs:
        log.setLevel(logging.CRITICAL)
    vars(_trace)["print"] = elsewhere
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The tensor attributes? ", UserWarning)
            yield
    finally:
        del vars(_trace)["print"]
        for log, level in logs.items():
            log.setLevel(level)


class _Given:
    """The lists and dicts of a call, with what is in them before forward runs."""

    def note(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self.before = [(value, [*inside(value)]) for value in _containers((args, kwargs))]
        if (active := recorder()) is not None:
            active.begins()

    def check(self, model: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Raises CaptureError if forward has changed one, which the caller's would not see."""
        for value, before in self.before:
            now = [*inside(value)]
            if len(now) != len(before) or not all(map(is_, now, before)):
                raise CaptureError(f"forward of {type(model).__name__} changes a {type(value).__name__} that it is "
                                   "given, and a program returns values only\n  Return what it puts there.")


def _containers(root: Any) -> list[Any]:
    """The lists and dicts among the arguments of a call."""
    found, waiting = list[Any](), [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (list, tuple, dict)):
            waiting += value.values() if isinstance(value, dict) else value
            if not isinstance(value, tuple):
                found.append(value)
    return found


def _returned(model: torch.nn.Module, args: Any, output: Any) -> Any:
    """What the trace returns: the model's output, and the attributes in which forward left tensors."""
    if (active := recorder()) is None:
        return None
    active.ends()
    if REGIONS.escaped(tensors_of(output)):
        raise CaptureError(f"{type(model).__name__} returns what is made in lines that the data say whether to run\n"
                           "  Return what is made for all rows.")
    left = {place: value for place, value in active.at_end.items()
            if can_be_returned(value) and not REGIONS.escaped(tensors_of(value))}
    active.returned = tuple(left)
    return (output, tuple(left.values())) if left else None


def _distinct(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give every tensor its own storage: export takes one tensor passed twice for one input, now and at every call."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.is_inference():
            leaf = leaf.clone()
        leaf = leaf.detach() if not leaf.requires_grad else leaf
        has_data = leaf.device.type != "meta" and not isinstance(leaf, FakeTensor)
        if id(leaf) in seen or (has_data and leaf.data_ptr() in seen):
            leaf = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        seen.update((id(leaf), leaf.data_ptr() if has_data else id(leaf)))
        kept.append(leaf)
        return leaf

    kept: list[torch.Tensor] = []  # ids stay taken while their tensors live
    return pytree.tree_map(own, (tuple(args), dict(kwargs)))


#: What torch.export says of an argument, and of a result, whose type is no pytree.
_UNKNOWN_INPUT = re.compile(r"Unsupported input type <class '([^']+)'>")
_UNKNOWN_TYPE = re.compile(r"Found <class '([^']+)'> in output, which is not a known type")


def _explain(model: torch.nn.Module, error: Exception) -> str:
    text = str(error)
    passed = lines_at(traceback.extract_tb(error.__traceback__))
    user = [line for line in passed if _is_users(line.path)] or [w for w in lines_of(text) if _is_users(w.path)]
    place = _module_that_raised(model, error)
    if user:
        place += f"\n  at {user[-1]}"
    if "data-dependent" in text and user and makes_number(user[-1].code):
        return (
            f"{type(model).__name__} makes a Python number of a tensor's value, which no traced program has.{place}\n"
            + instead(user, "Keep it a tensor, and compute with it as such; draw a number for each call outside "
                            "(random.uniform), and pass it as an argument.")
        )
    if "data-dependent" in text:
        return (
            f"{type(model).__name__} decides by the values of a tensor, which no traced program can follow.{place}\n"
            "  Required: control flow that depends on shapes and Python values only.\n"
            + instead(user, "Write torch.where(condition, a, b) instead of `if condition:`.")
        )
    if type(error).__name__ == "UncapturedHigherOrderOpError":
        return (f"{type(model).__name__} hands functions to an op of torch (cond, while_loop, scan, map), which is not "
                f"supported{place}\n{instead(user, WITHOUT_FUNCTIONS)}")
    if "missing nn_module_stack" in text:
        return (f"{type(model).__name__} assigns to a buffer a tensor that is another buffer{place}\n"
                "  Write to it: self.x.copy_(self.y), or with the two swapped by way of a clone.")
    if "masked_rows.types." in text:
        return (f"{type(model).__name__} returns rows that their values choose: a shape depends on the data\n"
                "  Return all rows, and the mask.")
    if unknown := _UNKNOWN_TYPE.search(text):
        return _unknown_container(model, "returns", unknown[1], "return a dict, a tuple or a NamedTuple")
    if unknown := _UNKNOWN_INPUT.search(text):
        if unknown[1].startswith("numpy."):
            give = "torch.from_numpy(x)" if unknown[1] == "numpy.ndarray" else "x.item(), a Python number"
            return f"{type(model).__name__} is given a {unknown[1]}, which is no tensor\n  Give {give}."
        return _unknown_container(model, "is given", unknown[1],
                                  "give a dict, a tuple or a NamedTuple, or its tensors one by one")
    first = clipped(text.strip().splitlines()[0]) if text.strip() else type(error).__name__
    if isinstance(error, TypeError) and passed[-1][2] == "_bind":  # of the signature, to the example's arguments
        taken = inspect.signature(model.forward)
        return f"{type(model).__name__} cannot be called so: {first}\n  Its forward takes {taken}."
    return (f"{type(model).__name__} could not be traced: {type(error).__name__}: {first}{place}\n"
            "  Required: a call that the model itself takes. Where it raises this alone, mend the call or that line.")


def _unknown_container(model: torch.nn.Module, does: str, kind: str, instead: str) -> str:
    name = kind.rpartition(".")[2]
    return (f"{type(model).__name__} {does} a {name}, and torch does not know which tensors are in it\n"
            f"  If it is a dataclass, write torch.export.register_dataclass({name}) after it. Else {instead}.")


def _module_that_raised(model: torch.nn.Module, error: BaseException) -> str:
    """The innermost part of the model whose code was running."""
    names = {id(part): name for name, part in model.named_modules() if name}
    running = [part for frame, _ in traceback.walk_tb(error.__traceback__)
               if id(part := frame.f_locals.get("self")) in names]
    return f"\n  in {names[id(running[-1])]} ({type(running[-1]).__name__})" if running else ""


def _is_users(path: str) -> bool:
    """Whether a line is a user's: not torch's, ours, Python's own, or made up."""
    return not (path.startswith(("<", OWN)) or "/torch/" in path
                or (path.startswith(_STDLIB) and "site-packages" not in path))
