"""Caches of Hugging Face's ``generate``: a growing one runs as a static one, and is given back as it was asked for.

A program has fixed shapes, so a cache that grows by a token would be a program for each token. ``generate`` knows how
many tokens a sequence may have before its first call: a static cache with room for them has one program for the prompt
and one for all further tokens, and the same numbers, since attention's mask excludes the room that is not used yet.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoparallel.capture.tracing.hf_caches import takes_static_cache
from autoparallel.errors import InputError

#: Modes of ``generate`` that only add tokens to a cache; others take some back (assisted decoding).
_ADDING = ("greedy_search", "sample", "beam_search", "beam_sample")
#: Tokens for which a growing cache has room, at least.
_LEAST = 16


@dataclass
class Caches:
    """Of one call of ``generate``. ``leaves_open``: the call says nothing of a cache. ``given``: the caller's own.
    ``grows``: a dynamic one is wanted. ``last``: of the latest call of the model."""

    model: Any
    leaves_open: bool
    given: Any = field(default=None, init=False)
    grows: bool = field(default=False, init=False)
    last: Any = field(default=None, init=False)

    def prepare(self, config: Any, call: dict[str, Any], mode: Any, most: int) -> None:
        """Put a static cache in place of a dynamic one in the model's arguments ``call``. ``most``: the tokens that
        ``generate`` finds a cache to need, without those of a cache whose tokens are not in the prompt."""
        from transformers.cache_utils import StaticCache

        cache = call.get("past_key_values")
        self.given = cache if getattr(cache, "_is_user_defined", False) else None
        if cache is None or type(cache) is StaticCache:
            return
        if reason := self._growing_programs(cache, mode):
            warnings.warn(f"generate of {type(self.model).__name__} compiles a program for each further token: "
                          f"{reason}", stacklevel=2)
            return
        self.grows = True
        needed = _tokens(config, call, cache, most)
        room = max(_LEAST, 1 << (needed - 1).bit_length())
        warnings.warn(f"the dynamic cache runs as a static one with room for {room} tokens ({needed} are needed), so "
                      "that one program serves all further tokens. It takes memory for all of them from the start; "
                      'cache_implementation="static" has room for just those needed', stacklevel=2)
        call["past_key_values"] = self._filled(cache, room)

    def _growing_programs(self, cache: Any, mode: Any) -> str:
        """Why a cache stays as it is, so that each length is a program; "": it need not."""
        from transformers.cache_utils import DynamicCache, DynamicLayer

        if not takes_static_cache(self.model):
            return "it takes no static cache of whole sequences (it has states, sliding windows, or an encoder)"
        if str(getattr(mode, "value", mode)) not in _ADDING:
            return f"{getattr(mode, 'value', mode)} takes tokens back from its cache"
        if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
            return f"a {type(cache).__name__} that is offloaded or of its own kind stays as it is"
        if odd := [layer for layer in cache.layers if type(layer) is not DynamicLayer]:
            return f"a {type(odd[0]).__name__} in its cache stays as it is"
        implementation = getattr(self.model.config, "_attn_implementation", None) or ""
        return "attention by flash kernels reads no mask of a static cache" if "flash" in implementation else ""

    def _filled(self, cache: Any, room: int) -> Any:
        """A static cache with the keys and values of a dynamic one. Raises InputError for those in shards."""
        from transformers import StaticCache

        with torch.device(self.model.device if self.model.device.type != "meta" else "cpu"):
            made = StaticCache(self.model.config.get_text_config(decoder=True), max_cache_len=room)
        for number, layer in enumerate(cache.layers):
            if cache.get_seq_length(number):
                if isinstance(layer.keys, DTensor):
                    raise InputError("past_key_values is a dynamic cache of DTensors, and generate requires plain "
                                     "tensors [batch, heads, tokens, width] there, equal on all ranks: give the cache "
                                     "that an earlier generate returned, or keys.full_tensor()")
                made.update(layer.keys, layer.values, number)
        return made

    def finish(self, result: Any) -> Any:
        """The result of ``generate``, whose cache is of the kind that was asked for; keys and values of the caller's
        own cache are those after the last token, as one process leaves them. All ranks call this."""
        returned = getattr(result, "past_key_values", None)
        if self.given is not None and self.grows and self.last is not None:
            self.given.layers = _dynamic(self.last).layers
            if returned is not None:
                result.past_key_values = self.given
        elif returned is not None and (self.grows or self.leaves_open):
            result.past_key_values = _dynamic(returned)
        return result


def _tokens(config: Any, call: dict[str, Any], cache: Any, most: int) -> int:
    """Tokens that the cache needs room for: ``most``, if the prompt has all tokens of the cache; else more. The mask
    and the positions have all of them."""
    known = [call[name].shape[-1] for name in ("attention_mask", "position_ids") if call.get(name) is not None]
    if config.max_new_tokens is not None and known:
        return max(most, max(known) + config.max_new_tokens - 1, 1)
    return max(most + int(cache.get_seq_length()), 1)


def _dynamic(cache: Any) -> Any:
    """A dynamic cache with whole keys and values [batch, heads, tokens, width] of a static one; others as they are."""
    from transformers import DynamicCache, StaticCache

    if not isinstance(cache, StaticCache):
        return cache
    made = DynamicCache()
    layers: list[Any] = cache.layers
    for number, layer in enumerate(layers):
        count = int(layer.cumulative_length)
        keys, values = (kept.full_tensor() if isinstance(kept, DTensor) else kept
                        for kept in (layer.keys, layer.values))
        made.update(keys[:, :, :count].clone(), values[:, :, :count].clone(), number)
    return made


__all__ = ["Caches"]
