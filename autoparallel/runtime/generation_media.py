"""Images, videos and sound in ``generate``: given to the program of the prompt, and repeated for beams."""

from __future__ import annotations

from typing import Any

import torch

from autoparallel.errors import InputError

_TOKENS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id",
           "audio_token_index")


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


__all__ = ["media_of", "repeated"]
