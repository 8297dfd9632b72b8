"""Caches of Hugging Face's ``generate``: a growing one runs as a static one, and is given back as it was asked for.

A program has fixed shapes, so a cache that grows by a token would be a program for each token. ``generate`` knows how
many tokens a sequence may have before its first call: a static cache with room for them has one program for the prompt
and one for all further tokens, and the same numbers, since attention's mask excludes the room that is not used yet.
Layers of sliding windows have room for all tokens too, and the caches of encoder-decoders are static in both halves.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoparallel.capture.tracing.hf_caches import joined_caches, static_cache, takes_static_cache
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

    def prepare(self, config: Any, call: dict[str, Any], mode: Any, most: int, room: int) -> None:
        """Put a static cache in place of a dynamic one, or of one of sliding windows, in the model's arguments
        ``call``. ``most``: the tokens that ``generate`` finds a cache to need, without those of a cache whose tokens
        are not in the prompt; ``room``: those for which its static caches have room."""
        from transformers.cache_utils import StaticCache

        cache = call.get("past_key_values")
        self.given = cache if getattr(cache, "_is_user_defined", False) else None
        if cache is None:
            return
        own, _ = _halves(cache)
        if type(own) is StaticCache:
            if self.given is None and not own.offloading:
                call["past_key_values"] = self._static(cache, room, call)
            return
        if reason := self._growing_programs(cache, mode):
            warnings.warn(f"generate of {type(self.model).__name__} compiles a program for each further token: "
                          f"{reason}", stacklevel=2)
            return
        self.grows = True
        needed = _tokens(config, call, own, most)
        room = max(_LEAST, 1 << (needed - 1).bit_length())
        warnings.warn(f"the dynamic cache runs as a static one with room for {room} tokens ({needed} are needed), so "
                      "that one program serves all further tokens. It takes memory for all of them from the start; "
                      'cache_implementation="static" has room for just those needed', stacklevel=2)
        call["past_key_values"] = self._static(cache, room, call)

    def _growing_programs(self, cache: Any, mode: Any) -> str:
        """Why a cache stays as it is, so that each length is a program; "": it need not."""
        from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

        if not takes_static_cache(self.model):
            return "it takes no static cache (it has states instead of keys and values)"
        if str(getattr(mode, "value", mode)) not in _ADDING:
            return f"{getattr(mode, 'value', mode)} takes tokens back from its cache"
        if odd := [half for half in _halves(cache) if half is not None and (
                type(half) is not DynamicCache or getattr(half, "offloading", False))]:
            return f"a {type(odd[0]).__name__} that is offloaded or of its own kind stays as it is"
        if odd := [layer for half in _halves(cache) if half is not None for layer in half.layers
                   if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)]:
            return f"a {type(odd[0]).__name__} in its cache stays as it is"
        implementation = getattr(self.model.config, "_attn_implementation", None) or ""
        return "attention by flash kernels reads no mask of a static cache" if "flash" in implementation else ""

    def _static(self, cache: Any, room: int, call: dict[str, Any]) -> Any:
        """A static cache with room for ``room`` tokens and the keys and values of ``cache``; of an encoder-decoder's,
        the other half has room for the encoder's tokens. Raises InputError for keys in shards."""
        own, cross = _halves(cache)
        made = self._filled(own, room)
        if cross is None:
            return made
        halves = made, self._filled(cross, call["encoder_outputs"][0].shape[1])
        return joined_caches(halves, cache.is_updated.items())

    def _filled(self, cache: Any, room: int) -> Any:
        """A static cache with the keys and values of another: those of a sliding window at the end of the tokens so
        far, whose others no mask admits."""
        with torch.device(self.model.device if self.model.device.type != "meta" else "cpu"):
            made = static_cache(self.model.config.get_text_config(decoder=True), room)
        for number, layer in enumerate(cache.layers):
            if count := int(cache.get_seq_length(number)):
                if isinstance(layer.keys, DTensor):
                    raise InputError("past_key_values is a dynamic cache of DTensors, and generate requires plain "
                                     "tensors [batch, heads, tokens, width] there, equal on all ranks: give the cache "
                                     "that an earlier generate returned, or keys.full_tensor()")
                gone = count - layer.keys.shape[-2]
                keys, values = (torch.nn.functional.pad(kept, (0, 0, gone, 0)) for kept in (layer.keys, layer.values))
                made.update(keys, values, number)
        return made

    def finish(self, result: Any) -> Any:
        """The result of ``generate``, whose cache is of the kind that was asked for; keys and values of the caller's
        own cache are those after the last token, as one process leaves them. All ranks call this."""
        returned = getattr(result, "past_key_values", None)
        if self.given is not None and self.grows and self.last is not None:
            made = self._dynamic(self.last)
            for own, half in zip(_halves(self.given), _halves(made), strict=True):
                if own is not None:
                    own.layers = half.layers
            if hasattr(made, "is_updated"):
                self.given.is_updated = made.is_updated
            if returned is not None:
                result.past_key_values = self.given
        elif returned is not None and (self.grows or self.leaves_open):
            result.past_key_values = self._dynamic(returned)
        return result

    def _dynamic(self, cache: Any) -> Any:
        """A dynamic cache with whole keys and values [batch, heads, tokens, width] of a static one, of sliding windows
        the last ones; others as they are."""
        from transformers import DynamicCache, EncoderDecoderCache, StaticCache

        own, cross = _halves(cache)
        if not isinstance(own, StaticCache):
            return cache
        config = self.model.config.get_text_config(decoder=True)
        halves = [DynamicCache(config=config) for half in (own, cross) if half is not None]
        for made, half in zip(halves, (own, cross), strict=False):
            for number, layer in enumerate(half.layers):
                if not layer.is_initialized:
                    continue
                count = int(layer.cumulative_length)
                keys, values = (_whole(kept)[:, :, :count].clone() for kept in (layer.keys, layer.values))
                made.update(keys, values, number)
        return halves[0] if cross is None else EncoderDecoderCache(*halves)


def _halves(cache: Any) -> tuple[Any, Any]:
    """The cache of the decoder's tokens, and that of the encoder's (None in models without one)."""
    return getattr(cache, "self_attention_cache", cache), getattr(cache, "cross_attention_cache", None)


def _whole(kept: Any) -> torch.Tensor:
    return kept.full_tensor() if isinstance(kept, DTensor) else kept


def _tokens(config: Any, call: dict[str, Any], cache: Any, most: int) -> int:
    """Tokens that the cache needs room for: ``most``, if the prompt has all tokens of the cache; else more. The mask
    and the positions have all of them."""
    names = ("decoder_attention_mask",) if "encoder_outputs" in call else ("attention_mask", "position_ids")
    known = [call[name].shape[-1] for name in names if call.get(name) is not None]
    if config.max_new_tokens is not None and known:
        return max(most, max(known) + config.max_new_tokens - 1, 1)
    return max(most + int(cache.get_seq_length()), 1)


__all__ = ["Caches"]
