"""The layer of a key-value cache that belongs to one block, before and after its call, as tensors and plain values:
calls of equivalent blocks that are given one cache can be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from autoparallel.capture.tracing.hf_caches import Place, filled, is_cache, places

#: In a call's arguments, in place of its cache.
CACHE = "the cache"
#: Tensors of a layer by their places, and its other attributes.
State = tuple[dict[Place, torch.Tensor], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class OwnLayer:
    """Layer ``number`` of a ``cache``."""

    cache: Any
    number: int

    @property
    def kind(self) -> object:
        """Equal for layers that a program may take for one another, but for their state."""
        return id(self.cache), type(self._layer)

    def state(self) -> State:
        return places(vars(self._layer))

    def set(self, state: State) -> None:
        filled(self._layer, *state)

    def apart(self, state: State, is_number: Callable[[object], bool], refuse: Callable[[str], None]) -> Any:
        """A cache for one call of the block, whose own layer has ``state``. ``is_number`` tells the block's own number
        from others; ``refuse`` is called as soon as the block looks at another layer."""
        cache: Any = object.__new__(type(self.cache))
        layer = filled(object.__new__(type(self._layer)), *state)
        vars(cache).update({**vars(self.cache), "layers": _Layers(layer, is_number, refuse),
                            "layer_class_to_replicate": None})    # this layer is there already
        return cache

    def left(self, apart: Any) -> State | None:
        """The own layer's state in a cache made by `apart`, unless the block has changed more than that."""
        changed = {name for name, value in vars(apart).items() if value is not vars(self.cache).get(name)}
        layers = vars(apart)["layers"]
        if changed - {"layers", "layer_class_to_replicate"} or type(layers) is not _Layers or len(layers.held) != 1:
            return None
        return places(vars(layers.held[0]))

    @property
    def _layer(self) -> Any:
        return self.cache.layers[self.number]


def own_layer(caches: Sequence[Any], numbers: Sequence[int]) -> OwnLayer | None:
    """The layer of the one cache that a block is given, where ``numbers``, the integers that count the block, agree on
    one; None where it is not known."""
    if len({id(cache) for cache in caches}) != 1 or len(set(numbers)) != 1:
        return None
    (cache, *_), (number, *_) = caches, numbers
    if cache.offloading or not 0 <= number < len(cache.layers):
        return None
    return OwnLayer(cache, number)


def caches_in(tree: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(tree, is_leaf=is_cache) if is_cache(leaf)]


def without_cache(tree: Any) -> Any:
    """The tree with `CACHE` in place of a cache."""
    return pytree.tree_map(lambda leaf: CACHE if is_cache(leaf) else leaf, tree, is_leaf=is_cache)


def with_cache(tree: Any, cache: Any) -> Any:
    return pytree.tree_map(lambda leaf: cache if leaf is CACHE else leaf, tree)


class _Layers:
    """In place of the list of a cache's layers: the block's own alone, by the block's own number."""

    def __init__(self, layer: Any, is_number: Callable[[object], bool], refuse: Callable[[str], None]) -> None:
        self.held, self._is_number, self._refuse = [layer], is_number, refuse

    def __getitem__(self, number: object) -> Any:
        if not self._is_number(number):
            self._refuse(f"layers[{number!r}] of its cache")
        return self.held[0]

    def __len__(self) -> int:
        self._refuse("the number of layers of its cache")
        return 0

    def __iter__(self) -> Any:
        self._refuse("all layers of its cache")

    def __setitem__(self, number: object, layer: Any) -> None:
        self._refuse("another layer of its cache")


__all__ = ["CACHE", "OwnLayer", "State", "caches_in", "own_layer", "with_cache", "without_cache"]
