"""Key-value caches of Hugging Face's models, which they return unless told not to, as trees of tensors.

transformers' own registration joins each tensor with an empty one as it rebuilds a cache, which DTensors do not allow;
here a layer of a cache is its tensors and its other attributes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.utils._pytree as pytree

#: Per layer: its class, its tensors' names, its other attributes.
Layers = tuple[tuple[type, tuple[str, ...], dict[str, Any]], ...]


def register_caches() -> None:
    """Make transformers' caches known as trees, where transformers is in use; known ones stay as they are."""
    if "transformers" not in sys.modules:
        return
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    for kind, flatten, unflatten in ((DynamicCache, _tensors, _cache), (EncoderDecoderCache, _halves, _joined)):
        if kind not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=_with_keys(flatten),
                                        serialized_type_name=f"{kind.__module__}.{kind.__name__}")


def _tensors(cache: Any) -> tuple[list[torch.Tensor], Layers]:
    found: list[torch.Tensor] = []
    layers = []
    for layer in cache.layers:
        tensors = {name: value for name, value in vars(layer).items() if isinstance(value, torch.Tensor)}
        found += tensors.values()
        rest = {name: value for name, value in vars(layer).items() if name not in tensors}
        layers.append((type(layer), tuple(tensors), rest))
    return found, tuple(layers)


def _cache(tensors: Any, layers: Layers) -> Any:
    from transformers.cache_utils import DynamicCache

    cache, given = DynamicCache(), iter(tensors)
    cache.layers = []
    for kind, names, rest in layers:
        layer: Any = object.__new__(kind)
        vars(layer).update(rest)
        vars(layer).update((name, next(given)) for name in names)
        cache.layers.append(layer)
    return cache


def _halves(cache: Any) -> tuple[list[Any], None]:
    return [cache.self_attention_cache, cache.cross_attention_cache], None


def _joined(halves: Any, context: None) -> Any:
    from transformers.cache_utils import EncoderDecoderCache

    return EncoderDecoderCache(*halves)


def _with_keys(flatten: Any) -> Any:
    def run(cache: Any) -> Any:
        values, context = flatten(cache)
        return [(pytree.SequenceKey(i), value) for i, value in enumerate(values)], context

    return run
