"""Key-value caches of Hugging Face's models, which they return unless told not to, as trees of tensors.

transformers' own registration joins each tensor with an empty one as it rebuilds a cache, which DTensors do not allow;
here a layer of a cache is its tensors and its other attributes. Static caches, which have room for all tokens, are
rebuilt with layers that return new tensors instead of writing into the old ones, as a traced program must. Layers of
sliding windows have room for all tokens too: the window is in the mask, and one program serves every token.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from inspect import signature
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor, Replicate

from autoparallel.errors import InputError

#: The place of a tensor in a layer: (attribute, `_ITSELF`), or (attribute, key) in an attribute that is a dict of
#: states.
Place = tuple[str, Any]
#: Per layer: its class, its tensors' places, its other attributes.
Layers = tuple[tuple[type, tuple[Place, ...], dict[str, Any]], ...]
_ITSELF = "the attribute itself"


def register_caches() -> None:
    """Make transformers' caches known as trees, where transformers is in use; known ones stay as they are."""
    if "transformers.cache_utils" in sys.modules:
        _register()


@cache
def _register() -> None:
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

    for kind, flatten, unflatten in ((DynamicCache, _tensors, _cache), (StaticCache, _static_tensors, _static_cache),
                                     (EncoderDecoderCache, _halves, joined_caches)):
        if kind not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=_with_keys(flatten),
                                        serialized_type_name=f"{kind.__module__}.{kind.__name__}")


def _tensors(cache: Any) -> tuple[list[torch.Tensor], Layers]:
    found: list[torch.Tensor] = []
    layers = []
    for layer in cache.layers:
        tensors, rest = places(vars(layer))
        found += tensors.values()
        layers.append((type(layer), tuple(tensors), rest))
    return found, tuple(layers)


def _static_tensors(cache: Any) -> tuple[list[torch.Tensor], Layers]:
    """As `_tensors`, the same for a new cache and for one that a program has returned."""
    from transformers.cache_utils import StaticLayer

    found, layers = list[torch.Tensor](), list[tuple[type, tuple[Place, ...], dict[str, Any]]]()
    for layer in cache.layers:
        tensors, rest = places(dict(sorted(vars(layer).items())))
        found += tensors.values()
        layers.append((_functional() if type(layer) is StaticLayer else type(layer), tuple(tensors), rest))
    return found, tuple(layers)


def places(attributes: Mapping[str, Any]) -> tuple[dict[Place, torch.Tensor], dict[str, Any]]:
    """A layer's tensors by their places, and its other attributes, whose dicts are copies without tensors."""
    tensors: dict[Place, torch.Tensor] = {}
    rest: dict[str, Any] = {}
    for name, value in attributes.items():
        if isinstance(value, torch.Tensor):
            tensors[name, _ITSELF] = value
        elif isinstance(value, dict):
            tensors.update(((name, key), one) for key, one in value.items() if isinstance(one, torch.Tensor))
            rest[name] = {key: None if (name, key) in tensors else one for key, one in value.items()}
        else:
            rest[name] = value
    return tensors, rest


def _cache(tensors: Any, layers: Layers) -> Any:
    from transformers.cache_utils import DynamicCache

    cache, given = DynamicCache(), iter(tensors)
    cache.layers = [filled(object.__new__(kind), {place: next(given) for place in places}, rest)
                    for kind, places, rest in layers]
    return cache


def filled(layer: Any, tensors: Mapping[Place, torch.Tensor], rest: Mapping[str, Any]) -> Any:
    """The ``layer``, whose attributes are replaced by these tensors and other attributes, as `places` gives them."""
    vars(layer).clear()
    vars(layer).update((name, dict(value) if isinstance(value, dict) else value) for name, value in rest.items())
    for (name, key), tensor in tensors.items():
        if key == _ITSELF:
            setattr(layer, name, tensor)
        else:
            vars(layer)[name][key] = tensor
    return layer


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of which a block changes its own layer only (a dynamic or static one)."""
    if "transformers.cache_utils" not in sys.modules:
        return False
    from transformers.cache_utils import DynamicCache, StaticCache

    return type(value) in (DynamicCache, StaticCache)


def own_states(model: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """A hook before forward within a trace: states (of Mamba, of linear attention), which forward writes into, become
    copies, since a program does not write into its inputs."""
    for given in (*args, *kwargs.values()):
        for layer in (getattr(given, "layers", None) or ()) if type(given) in pytree.SUPPORTED_NODES else ():
            for states in vars(layer).values():
                if isinstance(states, dict):
                    states.update((key, one.clone()) for key, one in states.items() if isinstance(one, torch.Tensor))


def _static_cache(tensors: Any, layers: Layers) -> Any:
    from transformers.cache_utils import StaticCache

    cache = object.__new__(StaticCache)
    if odd := [kind.__name__ for kind, _, _ in layers if kind is not _functional()]:
        raise InputError(f"a static cache with layers of type {odd[0]}, which write into their tensors: give a dynamic "
                         "cache (cache_implementation='dynamic')")
    vars(cache).update({**vars(_cache(tensors, layers)), "offloading": False})
    return cache


@cache
def _functional() -> Any:
    from transformers.cache_utils import StaticLayer

    class FunctionalStaticLayer(StaticLayer):
        """A layer of keys and values [batch, heads, most tokens, width], replaced at each update."""

        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
                   ) -> tuple[torch.Tensor, torch.Tensor]:
            if not self.is_initialized:
                self.dtype, self.device = key_states.dtype, key_states.device
                self.batch_size, self.num_heads = key_states.shape[:2]
                self.k_head_dim, self.v_head_dim = key_states.shape[-1], value_states.shape[-1]
                self.keys = key_states.new_zeros((*key_states.shape[:2], self.max_cache_len, self.k_head_dim))
                self.values = value_states.new_zeros((*value_states.shape[:2], self.max_cache_len, self.v_head_dim))
                self.is_initialized = True
            assert self.keys is not None and self.values is not None
            count = key_states.shape[-2]
            at = torch.arange(count, device=key_states.device) + self.cumulative_length
            self.cumulative_length = self.cumulative_length + count
            self.keys = self.keys.index_copy(2, at, key_states)
            self.values = self.values.index_copy(2, at, value_states)
            return self.keys, self.values

        def reorder_cache(self, beam_idx: torch.Tensor) -> None:
            if self.is_initialized:
                self.keys, self.values = (_rows(kept, beam_idx) for kept in (self.keys, self.values))

    return FunctionalStaticLayer


def _rows(kept: Any, rows: torch.Tensor) -> Any:
    """These rows of a tensor, the same on all ranks, in its layout."""
    if not isinstance(kept, DTensor):
        return kept.index_select(0, rows.to(kept.device))
    whole = [Replicate() if placement.is_shard(0) else placement for placement in kept.placements]
    parts = kept.redistribute(placements=whole).to_local().index_select(0, rows.to(kept.device))
    chosen = DTensor.from_local(parts, kept.device_mesh, whole, run_check=False, shape=kept.shape, stride=kept.stride())
    return chosen.redistribute(placements=kept.placements)


def takes_static_cache(model: Any) -> bool:
    """Whether all layers of a transformers model (of its decoder) take static caches that run here."""
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

    if "past_key_values" not in signature(type(model).forward).parameters:
        return False
    try:
        layers = StaticCache(model.config, max_cache_len=1).layers
    except (AttributeError, KeyError, TypeError, ValueError):  # of models with states instead of caches
        return False
    return bool(layers) and all(type(layer) in (StaticLayer, StaticSlidingWindowLayer) for layer in layers)


def static_cache(config: Any, room: int) -> Any:
    """An empty static cache with room for ``room`` tokens in every layer, also in those of sliding windows."""
    from transformers.cache_utils import StaticCache, StaticLayer

    made = StaticCache(config, max_cache_len=room)
    made.layers = [StaticLayer(room) for _ in made.layers]
    return made


def cached_leaves(spec: pytree.TreeSpec) -> frozenset[int]:
    """The numbers of an output structure's leaves that are keys and values of a static cache."""
    if "transformers.cache_utils" not in sys.modules:
        return frozenset()
    from transformers.cache_utils import EncoderDecoderCache, StaticCache

    whole = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    parts = list(whole.values()) if isinstance(whole, Mapping) else whole if isinstance(whole, (tuple, list)) else []
    halves = [half for part in parts for half in (
        (part.self_attention_cache, part.cross_attention_cache) if isinstance(part, EncoderDecoderCache) else (part,))]
    return frozenset(number for half in halves if isinstance(half, StaticCache) for layer in half.layers
                     for number in (vars(layer).get("keys"), vars(layer).get("values")) if isinstance(number, int))


def write_back(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    """The result of a call, in which a cache that the call was given takes the place of the one that the program has
    returned, with its keys and values: as a model leaves them. Warns where the program returns none."""
    if "transformers.cache_utils" not in sys.modules:
        return result
    from transformers.cache_utils import Cache, EncoderDecoderCache

    given = [value for value in (*args, *kwargs.values()) if isinstance(value, (Cache, EncoderDecoderCache))]
    names = list(result) if isinstance(result, Mapping) else range(len(result)) if type(result) is tuple else ()
    for own in given:
        place = next((name for name in names if type(result[name]) is type(own)), None)
        if place is None:
            warnings.warn(f"the {type(own).__name__} that the call was given does not get its keys and values, since "
                          "the model does not return it: call it with use_cache=True", stacklevel=3)
            continue
        _take_over(own, result[place])
        if isinstance(result, Mapping):
            result[place] = own  # type: ignore[index]  # a ModelOutput
        else:
            result = (*result[:place], own, *result[place + 1:])
    return result


def _take_over(own: Any, made: Any) -> None:
    if hasattr(own, "layers"):
        own.layers = made.layers
        return
    _take_over(own.self_attention_cache, made.self_attention_cache)
    _take_over(own.cross_attention_cache, made.cross_attention_cache)
    own.is_updated = made.is_updated


def _halves(cache: Any) -> tuple[list[Any], tuple[tuple[int, bool], ...]]:
    """The caches of the decoder's own tokens and of the encoder's, and the layers that have read the latter."""
    return [cache.self_attention_cache, cache.cross_attention_cache], tuple(sorted(cache.is_updated.items()))


def joined_caches(halves: Any, read: Iterable[tuple[int, bool]]) -> Any:
    """An encoder-decoder's cache of two ``halves``; ``read``: by layer, whether it has the encoder's keys."""
    from transformers.cache_utils import EncoderDecoderCache

    cache: Any = object.__new__(EncoderDecoderCache)  # its __init__ asks static caches for their length, a tensor
    cache.self_attention_cache, cache.cross_attention_cache = halves
    cache.is_updated = dict(read)
    return cache


def _with_keys(flatten: Any) -> Any:
    def run(cache: Any) -> Any:
        values, context = flatten(cache)
        return [(pytree.SequenceKey(i), value) for i, value in enumerate(values)], context

    return run
