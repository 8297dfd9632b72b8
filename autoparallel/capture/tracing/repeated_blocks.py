"""Equivalent blocks of a module list are traced twice, however many there are.

While a model is traced, calls of equivalent blocks (same classes, attributes, parameters' shapes) with equal arguments
become ops: the first two lie between marks, each further one is the op ``autoparallel::repeated_block``.
`unfold_blocks.py` then puts a copy of the first call's ops, with the block's own parameters, in place of each. The
second call is the proof: it has to be such a copy too. An integer that counts the blocks (``layer_idx``) may differ
between them as long as nobody looks at it, but to find the block's layer of a key-value cache (`own_layers.py`).
Any other difference raises UnlikeError, and the model is traced whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autoparallel.capture.tracing.hf_outputs import CollectedOutputs
from autoparallel.capture.tracing.own_layers import OwnLayer, caches_in, own_layer, with_cache, without_cache

#: Fewer are traced as they are.
FEWEST = 4
PLAIN = (int, float, complex, str, bool, type(None), torch.dtype, torch.device, torch.memory_format)
CONTAINERS = (tuple, list, dict)
#: Leaves, and their structure.
Tree = tuple[list[Any], pytree.TreeSpec]


class UnlikeError(Exception):
    """Blocks that looked equivalent are not: trace the model without copies."""


@dataclass(frozen=True, eq=False)
class Repeated:
    """A block: its path and module; ``kind`` is equal for equivalent blocks; ``counting``: modules in it whose
    attribute of that name counts the blocks."""

    path: str
    module: nn.Module
    kind: object
    counting: tuple[tuple[nn.Module, str], ...]


# --- which blocks are equivalent --------------------------------------------------------------------------------------


def find_repeated(model: nn.Module) -> list[Repeated]:
    """Blocks of module lists and sequences that have at least `FEWEST` equivalent ones; none lies in another."""
    named = [*model.named_modules(remove_duplicate=False), *model.named_parameters(remove_duplicate=False),
             *model.named_buffers(remove_duplicate=False)]
    times = Counter(id(value) for _, value in named)
    return list(_repeated_in(model, "", {key for key, count in times.items() if count > 1}))


def _repeated_in(module: nn.Module, path: str, shared: set[int]) -> Iterator[Repeated]:
    found = {}
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        blocks = list(_blocks_of(module, path, shared))
        equivalent = Counter(block.kind for block in blocks)
        found = {id(block.module): block for block in blocks if equivalent[block.kind] >= FEWEST}
    for name, child in module.named_children():
        if id(child) in found:
            yield found[id(child)]
        else:
            yield from _repeated_in(child, f"{path}.{name}" if path else name, shared)


def _blocks_of(container: nn.Module, path: str, shared: set[int]) -> Iterator[Repeated]:
    """The children with modules of their own, which nobody shares or has patched. An integer counts the blocks if it
    grows as their index does."""
    equivalent: dict[object, list[tuple[int, nn.Module, dict[tuple[str, str], int]]]] = {}
    for index, child in enumerate(container.children()):
        values = (*child.modules(), *child.parameters(), *child.buffers())
        whole = next(child.children(), None) is not None and "forward" not in vars(child)
        if whole and not any(id(value) in shared for value in values):
            rest, integers = _facts(child)
            equivalent.setdefault(rest, []).append((index, child, integers))
    for rest, members in equivalent.items():
        keys = members[0][2].keys()
        count = {key for key in keys if len({integers[key] for _, _, integers in members}) > 1
                 and len({integers[key] - index for index, _, integers in members}) == 1}
        for index, child, integers in members:
            fixed = tuple(value for key, value in integers.items() if key not in count)
            counting = tuple((child.get_submodule(inner), name) for inner, name in sorted(count))
            yield Repeated(f"{path}.{index}" if path else str(index), child, (path, rest, fixed), counting)


def _facts(block: nn.Module) -> tuple[object, dict[tuple[str, str], int]]:
    """All that classes, attributes and tensors say of a block; its integers are apart, by module and name."""
    rest: list[object] = []
    integers: dict[tuple[str, str], int] = {}
    for path, module in block.named_modules():
        rest.append((path, type(module)))
        for name, value in vars(module).items():
            if type(value) is int:
                integers[path, name] = value
            elif name not in ("_parameters", "_buffers", "_modules"):
                rest.append((name, _known(value)))
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        rest.append((name, type(tensor), *appearance(tensor)))
    return (*rest, *integers), integers


def _known(value: Any) -> object:
    """Hashable, and equal only for values that nothing can tell apart; what is not plain is equal to itself alone."""
    if type(value) in PLAIN:
        return type(value), value
    if type(value) in (tuple, list):
        return type(value), tuple(_known(v) for v in value)
    if isinstance(value, (dict, set)) and not value:
        return type(value)
    if type(value) is set and all(type(v) is str for v in value):
        return frozenset(value)
    return "the one at", id(value)


def appearance(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


# --- while the model is traced -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Call:
    """A call of a block. One that is traced has a ``result``: what it returns, the state in which it leaves its layer
    of a cache, and what it adds to collected outputs; another repeats its ``model``."""

    block: Repeated
    model: Call | None = None
    result: Tree | None = None


class Calls:
    """The calls of repeated blocks in one trace, by the names that their ops carry."""

    def __init__(self) -> None:
        self.named: dict[str, Call] = {}
        self.equivalent: dict[object, list[Call]] = {}
        self.looked_at: str | None = None

    @contextmanager
    def recorded(self, blocks: Sequence[Repeated]) -> Iterator[None]:
        """While a model is traced: calls of its blocks become ops, or lie between marks."""
        token = _RECORDED.set(self)
        try:
            for block in blocks:
                block.module.forward = self._instead(block, block.module.forward)
            yield
        finally:
            _RECORDED.reset(token)
            for block in blocks:
                vars(block.module).pop("forward", None)

    def _instead(self, block: Repeated, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            caches = caches_in((args, kwargs))
            own = own_layer(caches, [vars(module)[name] for module, name in block.counting]) if caches else None
            if caches and own is None:
                return forward(*args, **kwargs)
            given = without_cache((args, kwargs)), own and own.state()
            leaves, spec = pytree.tree_flatten(given)
            tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
            if not tensors or not _is_plain(leaves, spec):
                return forward(*args, **kwargs)
            outputs = CollectedOutputs()
            form = block.kind, own and own.kind, _form(leaves), spec, _modes(), outputs.names
            before = self.equivalent.setdefault(form, [])
            name, call = str(len(self.named)), Call(block, before[0] if len(before) == 2 else None)
            self.named[name] = call
            if call.model is not None:
                assert call.model.result is not None
                made, state, added = _with_tensors(call.model.result, repeated_block(name, tensors))
            else:
                before.append(call)
                made, state, added = self._traced(name, forward, own, (leaves, spec))
            outputs.add(added)
            if own:
                own.set(state)
            return made

        return run

    def _traced(self, name: str, forward: Callable[..., Any], own: OwnLayer | None, given: Tree) -> Any:
        """What the call of that name returns, the state in which it leaves its layer of a cache, and what it adds to
        collected outputs; between marks."""
        call = self.named[name]
        path = call.block.path
        tensors = [x for x in given[0] if isinstance(x, torch.Tensor)]
        outputs = CollectedOutputs()
        (args, kwargs), state = arguments = _with_tensors(given, block_begins(name, tensors))
        with self._watched(call.block), _unchanged(f"{path} changes its arguments", lambda: _objects(arguments)), \
                _unchanged(f"{path} changes its attributes", lambda: _attributes(call.block.module)):
            if own is None:
                made, left = forward(*args, **kwargs), None
            else:
                cache = own.apart(state, lambda number: type(number) is _Watched, lambda what: self._refuse(path, what))
                args, kwargs = with_cache((args, kwargs), cache)
                made = forward(*args, **kwargs)
                if (left := own.left(cache)) is None or caches_in(made):
                    raise UnlikeError(f"{path} changes or returns its cache")
            call.result = pytree.tree_flatten((made, left, outputs.added()))
        if not _is_plain(*call.result):
            raise UnlikeError(f"{path} returns more than tensors and plain values")
        results = [x for x in call.result[0] if isinstance(x, torch.Tensor)]
        return _with_tensors(call.result, block_ends(name, results))

    def _refuse(self, path: str, what: str) -> None:
        self.looked_at = f"{path}: {what}"
        raise UnlikeError(f"{self.looked_at} is looked at")

    @contextmanager
    def _watched(self, block: Repeated) -> Iterator[None]:
        """While a block runs, nobody may look at what counts the blocks."""
        held = [(vars(module), name, vars(module)[name]) for module, name in block.counting]
        try:
            for attributes, name, _ in held:
                attributes[name] = _Watched(self, f"{block.path}: {name}")
            yield
        finally:
            for attributes, name, value in held:
                attributes[name] = value


@contextmanager
def _unchanged(otherwise: str, objects: Callable[[], list[Any]]) -> Iterator[None]:
    """While a block runs, these objects may be written to in ops alone: a copy of its ops would not change them."""
    before = objects()
    yield
    after = objects()
    if len(before) != len(after) or any(one is not other for one, other in zip(before, after, strict=True)):
        raise UnlikeError(otherwise)


def _attributes(block: nn.Module) -> list[Any]:
    return [part for module in block.modules() for name, value in vars(module).items() for part in (
        name, *_objects(value))]


def _objects(tree: Any) -> list[Any]:
    """A value; of nested containers the containers themselves, their leaves and the keys of dicts."""
    if not issubclass(type(tree), CONTAINERS):    # isinstance would look at what is watched
        return [tree]
    inside = [part for pair in tree.items() for part in pair] if issubclass(type(tree), dict) else tree
    return [tree, *(part for value in inside for part in _objects(value))]


def _looks(watched: Any, *_: Any) -> Any:
    watched.calls.looked_at = watched.name
    raise UnlikeError(f"{watched.name} is looked at")


class _Watched:
    """In place of an integer. Whoever looks at it fails, and is remembered in case that is caught."""

    __class__ = property(_looks)  # what isinstance asks

    def __init__(self, calls: Calls, name: str) -> None:
        self.calls, self.name = calls, name


for _name, _value in vars(int).items():
    if _name not in ("__new__", "__getattribute__", "__doc__"):
        setattr(_Watched, _name, _looks if callable(_value) else property(_looks))


def _is_plain(leaves: Sequence[Any], spec: pytree.TreeSpec) -> bool:
    """Tensors and plain values in tuples, lists and dicts: nothing else can come in or out, or be written to."""
    inside = spec.is_leaf() or (spec.type in CONTAINERS and all(_is_plain((), child) for child in spec.children()))
    return inside and all(type(x) in PLAIN or isinstance(x, torch.Tensor) for x in leaves)


def _form(leaves: Sequence[Any]) -> tuple[object, ...]:
    """Equal for leaves that give the same trace: which tensors are the same object, their metadata, and the other
    values."""
    first: dict[int, int] = {}
    return tuple((type(x), first.setdefault(id(x), i), *appearance(x)) if isinstance(x, torch.Tensor) else (type(x), x)
                 for i, x in enumerate(leaves))


def _modes() -> tuple[object, ...]:
    kinds = ("cpu", "cuda")
    return (torch.is_grad_enabled(), *map(torch.is_autocast_enabled, kinds), *map(torch.get_autocast_dtype, kinds))


def _with_tensors(tree: Tree, tensors: Sequence[torch.Tensor]) -> Any:
    """A tree with other tensors in place of its own, in order."""
    given = iter(tensors)
    return pytree.tree_unflatten([next(given) if isinstance(x, torch.Tensor) else x for x in tree[0]], tree[1])


#: The calls of the trace that runs in this context: the ops below have them by name only.
_RECORDED: ContextVar[Calls | None] = ContextVar("recorded", default=None)
_library = torch.library.Library("autoparallel", "FRAGMENT")
for _name in ("block_begins", "block_ends", "repeated_block"):
    _library.define(f"{_name}(str call, Tensor[] tensors) -> Tensor[]")


def _the_same(call: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.view_as(x) for x in tensors]


def _like_its_model(call: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    calls = _RECORDED.get()
    assert calls is not None
    model = calls.named[call].model
    assert model is not None and model.result is not None
    made = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).requires_grad_(x.requires_grad)
            for x in model.result[0] if isinstance(x, torch.Tensor))
    return [x.view_as(x) for x in made]


_library.impl("block_begins", _the_same, "CompositeImplicitAutograd")
_library.impl("block_ends", _the_same, "CompositeImplicitAutograd")
_library.impl("repeated_block", _like_its_model, "CompositeImplicitAutograd")
block_begins = torch.ops.autoparallel.block_begins.default
block_ends = torch.ops.autoparallel.block_ends.default
repeated_block = torch.ops.autoparallel.repeated_block.default


__all__ = ["Call", "Calls", "UnlikeError", "appearance", "block_begins", "block_ends", "find_repeated",
           "repeated_block"]
