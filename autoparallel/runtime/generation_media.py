"""Images, videos and sound in ``generate``: given to the program of the prompt, and repeated for beams."""

from __future__ import annotations

import functools
from typing import Any

import torch

from autoparallel.errors import InputError

_TOKENS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id",
           "audio_token_index")


def methods_of_media(original: Any) -> dict[str, Any]:
    """The methods of a model's class by which ``generate`` handles images, videos and sound, by name: encoders of
    media run in the prompt's program, not before it."""

    @functools.wraps(original._expand_inputs_for_generation)
    def expand(self: Any, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None,
               **call: Any) -> Any:
        repeats_features = getattr(original, "_supports_mm_encoder_outputs", lambda _: False)(self)  # in place of media
        media = media_of(call) if expand_size > 1 and repeats_features else {}
        more = repeated(self.config, media, input_ids, expand_size) if media else {}
        call.update(dict.fromkeys(media))
        ids, call = original._expand_inputs_for_generation(self, expand_size, is_encoder_decoder, input_ids, **call)
        return ids, {**call, **more}

    def encodes_before(self: Any, *args: Any, **kwargs: Any) -> bool:
        """Whether ``generate`` calls encoders of media before the prompt."""
        return False

    return {"_expand_inputs_for_generation": expand, "_supports_mm_encoder_outputs": encodes_before}


def media_of(call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of images, videos and sound among the arguments of a model's prompt."""
    from transformers.generation import utils

    names = getattr(utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ())
    return {name: call[name] for name in names if isinstance(call.get(name), torch.Tensor)}


def repeated(config: Any, media: dict[str, torch.Tensor], ids: torch.Tensor | None, times: int
             ) -> dict[str, torch.Tensor]:
    """The media of a batch of which each sample is repeated. Of one sample all are repeated, of several each row.
    Raises InputError where rows are not one for each sample."""
    samples = 0 if ids is None else len(ids)
    if samples == 1:
        return {name: torch.cat([value] * times) for name, value in media.items()}
    tokens = [token for name in _TOKENS if isinstance(token := getattr(config, name, None), int)]
    counts = {0} if ids is None else {tuple(int((row == token).sum()) for token in tokens) for row in ids}
    if len(counts) > 1 or not tokens or any(len(value) != samples for value in media.values()):
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in media.items())
        raise InputError(f"several sequences for each of {samples} samples (num_beams, num_return_sequences) require "
                         f"one row of images for each sample, and as many tokens for it: given are {shapes}\n"
                         "  Generate for one sample at a time, or without beams.")
    return {name: value.repeat_interleave(times, dim=0) for name, value in media.items()}


__all__ = ["media_of", "methods_of_media", "repeated"]
