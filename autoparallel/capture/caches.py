"""Key-value caches of Hugging Face's models, which they return unless told not to: trees of tensors to torch.export."""

from __future__ import annotations

import sys
from typing import Any

import torch.utils._pytree as pytree


def register_caches() -> None:
    """Make transformers' caches known as trees, where transformers is in use; registered ones stay as they are."""
    if "transformers" not in sys.modules:
        return
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache
    from transformers.integrations.executorch import register_dynamic_cache_export_support

    if DynamicCache not in pytree.SUPPORTED_NODES:
        register_dynamic_cache_export_support()
    if EncoderDecoderCache not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(EncoderDecoderCache, _halves, _joined,
                                    serialized_type_name="transformers.cache_utils.EncoderDecoderCache")


def _halves(cache: Any) -> tuple[list[Any], None]:
    return [cache.self_attention_cache, cache.cross_attention_cache], None


def _joined(halves: Any, context: None) -> Any:
    from transformers.cache_utils import EncoderDecoderCache

    return EncoderDecoderCache(*halves)
