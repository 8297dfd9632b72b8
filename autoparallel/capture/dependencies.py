"""The state of a model that a trace reads beside its arguments: attributes of modules, variables of functions, modes,
strides.

A traced program is that of the model as it was: a dropout's ``p``, a scale in a config, a global constant are fixed in
it. `Recorder` notes what was read, so that whoever keeps the program can tell when it is no longer the model's
(`runtime/guards.py`). It also puts back the attributes that forward assigned (a trace would leave tensors without data
in the user's model), and refuses forwards that carry values from call to call in attributes.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from operator import is_
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from autoparallel.capture import environment, settings
from autoparallel.capture.contents import (
    FLAT,
    MOST,
    Change,
    Inventory,
    Missing,
    description,
    inside,
    is_mutable,
    is_plain,
    is_users,
    restore,
)
from autoparallel.capture.impure import OthersDrawError, RandomNumbers, Watch, draws_by_numpy, others_run
from autoparallel.capture.variables import ENVIRONMENT, HOOKS, Variable, is_installed, read_by
from autoparallel.errors import CaptureError, shown

aten = torch.ops.aten
#: Ops that read only the shape, dtype and device of their tensor; and ops that read only these of all but the first.
_MADE_LIKE = (aten.new_zeros, aten.new_ones, aten.new_full, aten.zeros_like, aten.ones_like, aten.full_like)
_AS_OTHER = (aten.type_as, aten.expand_as, aten.view_as, aten.reshape_as)
#: In place of the names of attributes: all, and how many they are.
ALL = "__dict__"
#: Lists of a recurrent layer's parameters, which follow those that are registered.
MIRRORS = frozenset({"_flat_weights", "_flat_weight_refs"})
_OF_ALL = frozenset({*dir(nn.Module), *vars(nn.Module())})
#: Attributes that every module has, and mirrors of them; hooks are watched apart from these.
INTERNAL = _OF_ALL | MIRRORS
_HOOK_TABLES = frozenset(name for name, value in vars(nn.Module()).items()
                         if isinstance(value, dict) and name not in ("_parameters", "_buffers", "_modules"))
#: torch's tables of hooks of all modules, by name.
_HOOKS_OF_ALL = {name: table for name, table in vars(nn.modules.module).items() if name in (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")}


def hooks_of_all() -> list[Any]:
    """The user's hooks of all modules (`torch.nn.modules.module.register_module_forward_hook` and its kin)."""
    return [hook for table in _HOOKS_OF_ALL.values() if table for hook in table.values()
            if is_users({"__name__": getattr(hook, "__module__", "")})]


@contextmanager
def uncounted() -> Iterator[None]:
    """Without torch's FlopCounterMode, which counts what runs, and its hooks of all modules, which hook values."""
    before = {name: dict(table) for name, table in _HOOKS_OF_ALL.items()}
    for table in _HOOKS_OF_ALL.values():
        for key, hook in list(table.items()):
            if getattr(hook, "__module__", "") == "torch.utils.module_tracker":
                del table[key]
    try:
        with ExitStack() as stack:
            while type(_get_current_dispatch_mode()).__module__ == "torch.utils.flop_counter":
                stack.enter_context(_pop_mode_temporarily())
            yield
    finally:
        for name, table in _HOOKS_OF_ALL.items():
            table.clear()
            table.update(before[name])


@dataclass(frozen=True)
class Dependencies:
    """All state that a trace read: names of attributes by module path (class attributes and absent ones included),
    variables, modes with their values, and whether strides of tensors were read. ``left``: names of attributes, by
    module path, in which forward left tensors of the call, as ``self.penalty = y.square().mean()`` does. ``found``: of
    ``attributes``, those that forward read before it assigned to them. ``plain``: by module path and name, the numbers,
    texts and Nones in attributes that forward has set, as ``self.penalty = None`` does."""

    attributes: Mapping[str, tuple[str, ...]]
    variables: tuple[Variable, ...]
    strides: bool
    modes: Mapping[str, Any]
    left: Mapping[str, tuple[str, ...]]
    found: Mapping[str, tuple[str, ...]]
    plain: Mapping[tuple[str, str], Any]


class Recorder:
    """Records what the forward of ``model`` reads and assigns while `recording`, in this thread."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._paths = {id(vars(module)): path for path, module in model.named_modules()}
        self._read: dict[str, dict[str, None]] = {path: {} for path in self._paths.values()}
        self._found: dict[str, dict[str, None]] = {path: {} for path in self._read}
        self._assigned: dict[tuple[str, str], Any] = {}
        self._plain: dict[tuple[str, str], Any] = {}
        self.at_end: dict[tuple[str, str], Any] = {}  # attributes that forward left with other values, in this trace
        self._left: dict[str, dict[str, None]] = {}
        self.returned: tuple[tuple[str, str], ...] = ()    # of these, what the trace returns (`export.py`)
        self._tables: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._buffers_set: set[tuple[str, str]] = set()  # in this trace
        self._read_now: set[tuple[str, str]] = set()  # in this trace
        self._read_first: set[tuple[str, str]] = set()
        self._ambient = settings.ambient()
        self._modes: dict[str, Any] = {}
        self.strides = False
        self._before = {module: dict(vars(module)) for module in model.modules()}
        self._hooks = [(table, dict(table)) for values in self._before.values()
                       for name, table in values.items() if name in _HOOK_TABLES]
        self._registered = [(table, dict(table)) for module in self._before
                            for table in (module._parameters, module._buffers, module._modules)]
        read = read_by(model)
        self._variables, self._settings, self._may_ask = read.variables, read.settings, read.may_ask
        self._of_environment: dict[tuple[int, str], Variable] = {}
        self._values = [variable.value() for variable in self._variables]
        self._inventory = Inventory(read.names)
        self._moving: dict[tuple[str, str], Any] = {}
        self._changes: list[Change] = []
        self._reassigned: list[tuple[str, Any, Any]] = []  # variables, in this trace
        self._cached: list[tuple[str, torch.Tensor]] = []  # in this trace, by functools.lru_cache
        for module, values in self._before.items():
            path = self._paths[id(vars(module))]
            for name in values.keys() - INTERNAL:
                if (moving := self._inventory.add(f"{path}.{name}".strip("."), values[name], True)) is not Missing:
                    self._moving[path, name] = moving
            for name in HOOKS[:2]:
                for hook in values[name].values():    # what is in its object, or in the arguments of a partial
                    self._inventory.add(f"the hook {getattr(hook, '__qualname__', type(hook).__name__)}",
                                        getattr(hook, "__self__", hook), True)
        for variable, value in zip(self._variables, self._values, strict=True):
            if (moving := self._inventory.add(variable.name, value, False)) is not Missing:
                self._refuse_moving(variable.name, moving)
        for module in model.modules() if read.bypasses else ():
            self.reads_all(module)
        self._numbers, self._watches = RandomNumbers(), False

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record while the model is traced; afterwards the model's attributes have their old values."""
        key = threading.get_ident()
        self.returned = ()
        for found in (self._assigned, self.at_end, self._read_now, self._read_first, self._buffers_set, self._tables):
            found.clear()
        with _LOCK:
            _RECORDERS[key] = self
            if len(_RECORDERS) == 1:
                _install()
        watch = Watch()
        imported = [(variable, variable.value()) for variable in self._settings]
        for variable, function in imported:
            variable.set(settings.function_of(function))
        try:
            with watch.watching() if self._watches or self._may_ask else nullcontext():
                yield self
        finally:
            for variable, function in imported:
                variable.set(function)
            with _LOCK:
                del _RECORDERS[key]
                if not _RECORDERS:
                    _remove()
            self._restore()
            drawn = self._numbers.restore()
        if watch.seeds:
            raise CaptureError(f"forward of {type(self.model).__name__} sets the state of torch's generator, and the "
                               "random numbers of a program have seeds of their own\n  Draw the numbers outside of "
                               "forward, and pass them; parallel.manual_seed(...) seeds a run.")
        if watch.asked:
            raise CaptureError(f"forward of {type(self.model).__name__} asks {watch.asked}, which answers differently "
                               "at each call: a program has the answer of its trace\n  Ask outside of forward, and "
                               "pass the answer; draw numbers by torch (torch.rand).")
        if drawn and others_run() and not self._watches:
            self._watches, self._numbers = True, RandomNumbers()
            raise OthersDrawError
        if drawn and (watch.draws or not self._watches or any(draws_by_numpy(value) for value in self._values)):
            raise CaptureError(f"forward of {type(self.model).__name__} draws numbers from {drawn}, others at each "
                               "call: a program has those of its trace\n"
                               "  Draw them by torch (torch.rand), or outside of forward and pass them. "
                               "(Of transformers' SpecAugment: config.apply_spec_augment=False.)")

    # --- what the forward does ---------------------------------------------------------------------------------

    def _path_of(self, module: nn.Module) -> str | None:
        """The path of a module by its attributes, which the model that the user has may share with the one traced."""
        return self._paths.get(id(object.__getattribute__(module, "__dict__")))

    def reads(self, module: nn.Module, name: str) -> None:
        if name not in INTERNAL and (path := self._path_of(module)) is not None:
            self._read[path][name] = None
            self._read_now.add((path, name))
            if (path, name) not in self._assigned:
                self._found[path][name] = None
            if (path, name) in self._moving:
                self._refuse_moving(f"{path}.{name}".strip("."), self._moving[path, name])

    def reads_all(self, module: nn.Module) -> None:
        """As `reads` of every attribute, those that it has not too (noted as `ALL`)."""
        if (path := self._path_of(module)) is not None:
            own = object.__getattribute__(module, "__dict__")
            self._read[path] |= dict.fromkeys([ALL, *(name for name in own if name not in INTERNAL)])

    def assigns(self, module: nn.Module, name: str, value: Any) -> None:
        path = self._path_of(module)
        if path is not None and name in module._buffers:    # which torch.export follows
            self._buffers_set.add((path, name))
        elif path is not None and name not in INTERNAL:
            if (path, name) not in self._assigned and (path, name) in self._read_now:
                self._read_first.add((path, name))
            self._assigned[path, name] = value

    def reads_environment(self, variable: Variable) -> None:
        self._of_environment[id(variable.holder), variable.name] = variable

    def mode(self, name: str, inside: Any) -> Any:
        """The answer to a user who asks for a setting: that of the call, unless the forward itself changed it."""
        self._modes.setdefault(name, self._ambient.get(name, inside))
        return settings.answer(name, self._ambient, inside)

    def begins(self) -> None:
        """Note the parameters, buffers and submodules with which the forward begins: those of the trace."""
        self._tables = [(path, table, dict(table)) for path, module in self._modules()
                        for table in (module._parameters, module._buffers, module._modules)]

    def ends(self) -> None:
        """When forward returns: note the attributes whose values it has changed (torch.export puts some back). Raises
        CaptureError for a parameter, buffer or submodule that it has made or put in place of another one, other than by
        assigning to a buffer."""
        self.at_end = {(path, name): value for path, module in self._modules() for name, value in vars(module).items()
                        if name not in INTERNAL and value is not self._before[module].get(name, Missing)}
        own = {path: vars(module) for path, module in self._modules()}
        self._plain = {(path, name): value for (path, name), value in self._assigned.items()
                       if is_plain(value) and own[path].get(name, Missing) is value}
        for path, table, before in self._tables:
            now = {name: value for name, value in table.items()
                   if name not in before or (path, name) not in self._buffers_set}
            same = {name for name, value in now.items() if before.get(name, Missing) is value}
            for name in [name for name in {**before, **now} if name not in same and (name in now or name not in table)]:
                done = "makes" if name not in before else "puts another tensor in" if name in table else "removes"
                raise CaptureError(
                    f"forward of {type(self.model).__name__} {done} {f'{path}.{name}'.strip('.')}, and a program has "
                    "the parameters, buffers and submodules that the model had\n  Make them before the model is "
                    "compiled (in __init__; of a table that a first call makes, call the model itself once); write to "
                    "a buffer by self.x.copy_(...).")

    def _modules(self) -> list[tuple[str, nn.Module]]:
        return [(self._paths[id(vars(module))], module) for module in self._before]

    # --- afterwards --------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Give the model its attributes back."""
        for module, before in self._before.items():
            now = vars(module)
            for name in [n for n in {**now, **before} if n not in _OF_ALL]:
                if name not in before:
                    del now[name]
                elif now.get(name, Missing) is not before[name]:
                    now[name] = before[name]
        for table, values in (*self._hooks, *self._registered):
            if table.keys() != values.keys() or not all(map(is_, table.values(), values.values())):
                table.clear()
                table.update(values)
        self._cached.clear()
        for name, function, results in self._inventory.newly_cached():
            if tensors := [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]:
                self._cached += ((name, tensor) for tensor in tensors)
                function.cache_clear()  # of tensors without data
        self._reassigned = []
        for variable, before in zip(self._variables, self._values, strict=True):
            now = variable.value()
            if now is not before and ((is_plain(before) and description(now) != description(before))
                                      or isinstance(now, FakeTensor)):
                self._reassigned.append((variable.name, before, now))
                variable.set(before)
        self._changes = self._inventory.changes()
        restore(change for change in self._changes if change.owned or _has_no_data(change.now))

    def _refuse_moving(self, name: str, value: Any) -> None:
        kind = type(getattr(value, "__self__", value)).__name__
        raise CaptureError(f"forward of {type(self.model).__name__} reads {name}, which is or has a {kind}: it gives "
                           "another value at each call, and a program has that of its trace\n  Take the value outside "
                           "of forward, and pass it; draw numbers by torch (torch.rand).")

    def refuse_memory(self, graph: Graph) -> None:
        """Raises CaptureError for state that forward leaves for its next call: an attribute that it reads before it
        assigns another value, changed contents of a list, a dict or an object. Values that depend on no argument of a
        call may stay."""
        for path, name in sorted(self._read_first):
            before = self._before[self.model.get_submodule(path)].get(name, Missing)
            after = self._assigned[path, name]
            if _depends_on_call(after, graph) or _is_counted(before, after):
                raise self.memory(f"reads {f'{path}.{name}'.strip('.')} and assigns another value to it "
                                   f"({_kind(before)}, then {_kind(after)})")
        self._note_left(graph)
        for change in self._changes:
            if not _is_longer(change) and (changed := _memory_in(change.before, change.now, graph)):
                raise self.memory(f"changes what is in {change.name} ({type(change.value).__name__}: {changed})")
        for name, tensor in self._cached:
            if _depends_on_call(tensor, graph):
                raise self.memory(f"has a result of {name} kept by functools.lru_cache, which is made of arguments, "
                                  "parameters or random numbers")
        for name, before, now in self._reassigned:
            if is_plain(before) or _depends_on_call(now, graph):
                raise self.memory(f"assigns to the variable {name} ({_kind(before)}, then {_kind(now)})")

    def _note_left(self, graph: Graph) -> None:
        """Note the attributes that have tensors of the call after a trace, and the lists and dicts in attributes to
        which such tensors were added. Raises CaptureError for others, which a script may read by a name of its own (but
        not of a model with hooks, which add to them, as users are warned)."""
        self._left = {}
        for (path, name), value in self.at_end.items():
            if _holds_of_call(value, graph):
                self._left.setdefault(path, {})[name] = None
        attributes = {id(value): (path, name) for path, module in self._modules()
                      for name, value in self._before[module].items()}
        for change in self._changes:
            if not _holds_of_call(_added(change), graph, FakeTensor):    # others are of other threads
                continue
            if (place := attributes.get(id(change.value))) is not None:
                self._left.setdefault(place[0], {})[place[1]] = None
            elif not any(self._hooks_of_users()):
                raise CaptureError(f"forward of {type(self.model).__name__} adds tensors to what is in {change.name}, "
                                   "and a program returns outputs only\n  Return them from forward too, in a tuple or "
                                   "a dict. If it is what a first call keeps for later ones (a table of positions), "
                                   "call the model itself once, before it is compiled.")

    def _hooks_of_users(self) -> Iterator[Any]:
        return (hook for module in self._before for name in HOOKS[:2] for hook in vars(module)[name].values()
                if is_users({"__name__": getattr(hook, "__module__", "")}))

    @contextmanager
    def grown(self, graph: Graph) -> Iterator[str]:
        """With what the trace added to the model's lists and dicts left in them: if it reads it, another trace is a
        different one. (Not tables, which it would make again.) Yields the name of such a container, or ""."""
        longer = [change for change in self._changes if _is_longer(change)]
        for change in longer:
            if isinstance(change.value, dict):
                change.value.update({key: value for key, value in change.now.items() if key not in change.before and (
                    not isinstance(value, torch.Tensor) or _depends_on_call(value, graph))})
            else:
                change.value.extend(change.now[len(change.value):])
        yield longer[0].name if longer else ""
        restore(change for change in longer if change.owned or _has_no_data(change.now))

    def memory(self, what: str) -> CaptureError:
        return CaptureError(f"forward of {type(self.model).__name__} {what}, which its next call would read: a "
                            "program has no such memory\n  Keep a tensor in a buffer (register_buffer, and in forward "
                            "self.x.copy_(...)), or pass it and return it; count outside of forward. If it is what a "
                            "first call keeps for later ones (a table of positions), call the model itself once, "
                            "before it is compiled.")

    def dependencies(self, equivalent: Iterable[Sequence[str]] = ()) -> Dependencies:
        """All that was read. ``equivalent``: paths of blocks of which only some were traced: what is read in one is
        read in each, and what it assigns."""
        equivalent, plain = [*equivalent], dict(self._plain)
        for blocks in equivalent if self._plain else ():
            given = {(path.removeprefix(block), name): value for block in blocks
                     for (path, name), value in self._plain.items() if f"{path}.".startswith(f"{block}.")}
            plain |= {(f"{block}{path}", name): value for block in blocks for (path, name), value in given.items()}
        for blocks, read in product(equivalent, (self._read, self._found)):
            names = dict[str, dict[str, None]]()
            for block in blocks:
                for path in self._inside(block):
                    names.setdefault(path.removeprefix(block), {}).update(read[path])
            for block in blocks:
                for path in self._inside(block):
                    read[path].update(names[path.removeprefix(block)])
        attributes, found = ({path: tuple(names) for path, names in read.items() if names}
                             for read in (self._read, self._found))
        variables = [variable for variable, before in zip(self._variables, self._values, strict=True)
                     if variable is not ENVIRONMENT  # of which parts are noted
                     and description(variable.value()) == description(before)]  # others are its own caches
        left = {path: tuple(names) for path, names in self._left.items()}
        return Dependencies(attributes, (*variables, *self._of_environment.values()), self.strides, dict(self._modes),
                            left, found, plain)

    def _inside(self, block: str) -> list[str]:
        return [path for path in self._read if path == block or path.startswith(f"{block}.")]


def _kind(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else "absent" if value is Missing else shown(value)


def _is_counted(before: Any, after: Any) -> bool:
    """Whether one number or text was put in place of another one."""
    return is_plain(after) and type(before) in (int, float, complex, str, bytes, bool) \
        and description(before) != description(after)


def _memory_in(before: Any, now: Any, graph: Graph) -> str:
    """A change of a container that its next reader would see, as text; "" where it can be what a call computes once and
    keeps (a table, made where it is missing)."""
    if isinstance(before, dict):
        if gone := [key for key in before if key not in now]:
            return f"{shown(gone[0])} is gone"
        for key, old in before.items():
            if (value := now[key]) is not old and (_depends_on_call(value, graph) or _is_counted(old, value)):
                return f"{shown(key)} was {_kind(old)} and is {_kind(value)}"
        return ""
    if isinstance(before, set):
        return "elements are gone" if before - now else ""
    if isinstance(before, bytes):
        return "it was written to"
    if len(before) != len(now):
        return f"it had {len(before)} elements and has {len(now)}"
    at = next(n for n, (a, b) in enumerate(zip(before, now, strict=True)) if a is not b)
    return f"element {at} was {_kind(before[at])} and is {_kind(now[at])}"


def _has_no_data(contents: Any) -> bool:
    """Whether there are tensors of a trace among what is in a container."""
    values = contents.values() if isinstance(contents, dict) else contents if isinstance(contents, (list, set)) else ()
    return any(isinstance(value, FakeTensor) for value in values)


def _is_longer(change: Change) -> bool:
    """Whether elements were added to a list or a dict, and nothing else was done."""
    value, before, now = change.value, change.before, change.now
    if isinstance(value, dict):
        return len(now) > len(before) and all(map(is_, before.values(), map(now.get, before)))
    return isinstance(value, (list, deque)) and len(now) > len(before) and all(map(is_, before, now))


def _added(change: Change) -> list[Any]:
    """What was added to a list, a dict or an object."""
    before, now = change.before, change.now
    if isinstance(before, dict):
        return [value for key, value in now.items() if key not in before]
    return list(now[len(before):]) if _is_longer(change) else []


def _depends_on_call(value: Any, graph: Graph) -> bool:
    """Whether a value is a traced tensor that is made of arguments, parameters, buffers or random numbers."""
    if not isinstance(value, torch.Tensor):
        return False
    memory = value.untyped_storage()._cdata
    stack = [node for node in graph.nodes if isinstance(made := node.meta.get("val"), torch.Tensor)
             and made.layout == torch.strided and made.untyped_storage()._cdata == memory]
    if not stack:
        return True
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node.op == "placeholder" or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return True
        more = [n for n in _values_of(node) if n not in seen]
        seen.update(more)
        stack.extend(more)
    return False


def _values_of(node: Node) -> list[Node]:
    """The inputs of a node whose values it reads; of others it takes the shape, type and device."""
    packet = getattr(node.target, "overloadpacket", node.target)
    if packet in _MADE_LIKE:
        return []
    return node.all_input_nodes if packet not in _AS_OTHER and node.target is not aten.to.other else \
        [n for n in node.args[:1] if isinstance(n, Node)]


def _holds_of_call(root: Any, graph: Graph, kind: type[torch.Tensor] = torch.Tensor) -> bool:
    """Whether a value, or a container or object of the user's in it, has such a tensor that `_depends_on_call`."""
    waiting, known = [root], set[int]()
    while waiting and len(known) < MOST:
        value = waiting.pop()
        if id(value) in known:
            continue
        known.add(id(value))
        if isinstance(value, kind) and _depends_on_call(value, graph):
            return True
        if is_mutable(value) and not isinstance(value, FLAT):
            waiting.extend(inside(value))
    return False


# --- while any thread records --------------------------------------------------------------------------------------

_LOCK = threading.Lock()
#: The recorder of each thread that traces, by thread id.
_RECORDERS: dict[int, Recorder] = {}
_SET = nn.Module.__setattr__


def recorder() -> Recorder | None:
    """Whoever records in this thread."""
    return _RECORDERS.get(threading.get_ident())


def _get(module: nn.Module, name: str) -> Any:
    if (active := _RECORDERS.get(threading.get_ident())) is not None:
        active.reads(module, name)
        if name == ALL and is_users(sys._getframe(1).f_globals):
            active.reads_all(module)
    return object.__getattribute__(module, name)


def _set(module: nn.Module, name: str, value: Any) -> None:
    if (active := _RECORDERS.get(threading.get_ident())) is not None:
        active.assigns(module, name, value)
        if isinstance(value, torch.Tensor) and module._buffers.get(name) is value:
            return    # `self.x = self.x`, as of .to(device): torch.export would copy it
    _SET(module, name, value)


def _asked(name: str, inside: Any, asking: Mapping[str, Any]) -> Any:
    active = _RECORDERS.get(threading.get_ident())
    if active is None or not is_users(asking) or (name in settings.TRACED and is_installed(asking)):
        return inside
    return active.mode(name, inside)


def _reads_environment(variable: Variable) -> None:
    if (active := _RECORDERS.get(threading.get_ident())) is not None:
        active.reads_environment(variable)


def _install() -> None:
    nn.Module.__getattribute__ = _get  # type: ignore[method-assign,assignment]
    nn.Module.__setattr__ = _set  # type: ignore[method-assign,assignment]
    settings.install(_asked)
    environment.install(_reads_environment)


def _remove() -> None:
    del nn.Module.__getattribute__
    nn.Module.__setattr__ = _SET  # type: ignore[method-assign]
    settings.remove()
    environment.remove()
