"""Calls of a language model for inference: a prompt (prefill), or one token for each of several sequences (decode)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoparallel.capture.tracing.hf_caches import register_caches, static_cache, takes_static_cache
from autoparallel.errors import InfeasibleError, InputError, PlanError, shown
from autoparallel.planning.call_checks import check_call
from autoparallel.plans import Plan

PHASES = ("prefill", "decode")
OBJECTIVES = ("latency", "throughput")
#: Sequences at once: the most that are tried, and the least gain in tokens per second for which twice as many are.
MOST_SEQUENCES, WORTHWHILE = 2**14, 1.02


def check_inference(objective: Any, phase: Any, context: Any, concurrent: Any) -> None:
    """Raises PlanError for values that are none."""
    if not isinstance(objective, str) or objective not in OBJECTIVES:
        raise PlanError(f"objective is {shown(objective)}; there are {list(OBJECTIVES)}")
    if not isinstance(phase, str) or phase not in PHASES:
        raise PlanError(f"phase is {shown(phase)}; there are {list(PHASES)}: they have plans of their own")
    for name, value in (("context", context), ("concurrent", concurrent)):
        if (value is None and name == "context") or (value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1)):
            said = "tokens that a sequence's cache holds" if name == "context" else "sequences at once"
            raise PlanError(f"{name} is {shown(value)}: give {said}, a whole number of 1 or more")


def inference_call(model: nn.Module, phase: str, context: int, concurrent: int) -> dict[str, Any]:
    """The keyword arguments of a call of a transformers model as its ``generate`` makes it with a static cache.

    prefill: ``concurrent`` prompts of ``context`` tokens [concurrent, context], with room for as many keys and values.
    decode: a token of each sequence [concurrent, 1], whose caches have room for ``context`` tokens.
    Raises InputError for models that take no static cache, PlanError for a phase or numbers that are none.
    """
    check_inference(OBJECTIVES[0], phase, context, 0 if concurrent is None else concurrent)
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "generate"):
        raise InputError(f"{type(model).__name__} is no transformers model that generates: give example_inputs of a "
                         "call, and plan it under torch.no_grad() without phase")
    register_caches()
    if getattr(config, "is_encoder_decoder", False) or not takes_static_cache(model):
        raise InputError(f"{type(model).__name__} takes no static cache of whole sequences (it has states instead of "
                         "keys and values, or an encoder): phases of inference are planned of other models only")
    weight = next(model.parameters())
    with torch.device(weight.device):
        cache = static_cache(config.get_text_config(decoder=True), context)
        layers: list[Any] = cache.layers
        for layer in layers:
            layer.cumulative_length = torch.zeros((), dtype=torch.long)
        length = context if phase == "prefill" else 1
        call: dict[str, Any] = {
            "input_ids": torch.zeros(concurrent, length, dtype=torch.long), "past_key_values": cache,
            "position_ids": torch.zeros(concurrent, length, dtype=torch.long), "logits_to_keep": 1, "use_cache": True,
            "return_dict": True}
        if phase == "decode":
            heads, width = _heads(config)
            for layer in layers:
                keys = torch.zeros(concurrent, heads, 1, width, dtype=weight.dtype)
                layer.lazy_initialization(keys, keys)
        if (mask := _mask(model, call, weight.dtype)) is not None:
            call["attention_mask"] = mask
    return call


def _mask(model: Any, call: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """The mask that ``generate`` makes for a call (a dict of masks where kinds of layers have their own, None where
    attention is just causal)."""
    from transformers.masking_utils import create_masks_for_generate

    make = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    made = make(config=model.config, inputs_embeds=torch.empty(*call["input_ids"].shape, 0, dtype=dtype),
                attention_mask=None, past_key_values=call["past_key_values"], position_ids=call["position_ids"])
    return dict(sorted(made.items())) if isinstance(made, dict) else made


def _heads(config: Any) -> tuple[int, int]:
    """Heads of keys and values, and their width."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return heads, getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


@contextmanager
def inferring(model: nn.Module) -> Iterator[None]:
    """The model in eval mode and frozen, as it is for inference, and as it was afterwards."""
    modes = {module: module.training for module in model.modules()}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.eval().requires_grad_(False)
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training
        for parameter in trainable:
            parameter.requires_grad_(True)


def plan_inference(make: Callable[[Mapping[str, Any]], Plan], model: nn.Module, objective: Any, phase: Any,
                   context: Any, concurrent: Any) -> Plan:
    """The best plan of a phase; ``make`` plans a call. For throughput, of twice as many sequences as long as they fit
    and bring more tokens per second, unless their number is given.

    Raises InfeasibleError if not even one sequence (or those given) fits, and as `check_inference` and
    `inference_call` do.
    """
    check_call(model, None, None)
    check_inference(objective, phase, context, concurrent)
    each = context if phase == "prefill" else 1
    with inferring(model):
        count = concurrent or 1
        best = make(inference_call(model, phase, context, count))
        while objective == "throughput" and concurrent is None and count < MOST_SEQUENCES:
            try:
                more = make(inference_call(model, phase, context, 2 * count))
            except InfeasibleError:
                break
            if 2 * best.prediction.step_s < WORTHWHILE * more.prediction.step_s:
                break
            best, count = more, 2 * count
    rate = count * each / best.prediction.step_s
    said = f"{phase} for {objective}: {count} sequences at once, {rate:.4g} tokens/s; {best.evidence.stop_reason}"
    return replace(best, evidence=replace(best.evidence, stop_reason=said))


__all__ = ["MOST_SEQUENCES", "OBJECTIVES", "PHASES", "WORTHWHILE", "check_inference", "inference_call", "inferring",
           "plan_inference"]
