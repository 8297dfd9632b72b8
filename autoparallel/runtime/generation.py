"""Hugging Face's ``generate`` on a parallel module."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from inspect import signature
from typing import Any, cast

import torch

from autoparallel.capture.tracing.hf_caches import takes_static_cache
from autoparallel.errors import InputError
from autoparallel.runtime.agree import decide_once
from autoparallel.runtime.attributes import inherited
from autoparallel.runtime.generation_caches import Caches
from autoparallel.runtime.generation_media import methods_of_media
from autoparallel.runtime.state import State


@cache
def generating(module: Any, original: Any) -> Any:
    """A subclass of ``module`` (ParallelModule) and of the model's class ``original``, where ``generate`` looks for its
    methods and for the signature of ``forward``. Within ``generate``, calls return whole tensors (but for keys and
    values of static caches) and all ranks draw the first rank's numbers. It takes a static cache, also in place of a
    growing one: one program for the prompt, and one for all further tokens (`generation_caches`)."""

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(masks := kwargs.get("attention_mask"), dict):  # made from a set, whose order ranks do not share
            kwargs["attention_mask"] = dict(sorted(masks.items()))
        if self._state.caches is not None and getattr(self.config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", False)    # a loss for training, which generate does not return
        output = module.forward(self, *args, **kwargs)
        if (caches := self._state.caches) is not None:
            caches.last = getattr(output, "past_key_values", None)
        return output

    @functools.wraps(original.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        state: State = self._state
        model = _which_generates(state.model)
        if not state.forms and not self.config.is_encoder_decoder:
            _trace_prompt(self, args, kwargs)
        leaves_open = _leaves_cache_open(self, args, kwargs)
        if leaves_open and takes_static_cache(model):
            kwargs = {**kwargs, "cache_implementation": "static"}
        state.gathers, state.caches = True, Caches(model, leaves_open)
        try:
            state.together.agree("generate")
            with first_ranks_draws(state.device):
                return original.generate(self, *args, **kwargs)
        finally:
            state.gathers, state.caches = False, None

    def decoding(method: Any) -> Any:
        """A loop over tokens of ``generate``, which gives the cache back as it was asked for."""
        @functools.wraps(method)
        def decode(self: Any, *args: Any, **kwargs: Any) -> Any:
            result, state = method(self, *args, **kwargs), self._state
            if state.caches is None:
                return result
            with state.together.call():
                return state.caches.finish(result)

        return decode

    @functools.wraps(original._prepare_cache_for_generation)
    def prepare_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature(original._prepare_cache_for_generation).bind(self, *args, **kwargs).arguments
        made = original._prepare_cache_for_generation(self, *args, **kwargs)
        if (caches := self._state.caches) is not None:
            caches.prepare(given["generation_config"], given["model_kwargs"], given["generation_mode"],
                           given["max_cache_length"], getattr(self, "_previous_max_cache_length", 0))
        return made

    @functools.wraps(original.get_encoder)
    def get_encoder(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original.get_encoder(self, *args, **kwargs)
        generates = self._state.caches is not None and self.config.is_encoder_decoder
        return Encoder(self, found) if generates and found is not self else found

    @functools.wraps(original.resize_token_embeddings)
    def resize(self: Any, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        rows = self.get_input_embeddings().weight.shape[0]
        if self._state.forms and (new_num_tokens not in (None, rows) or args or kwargs.get("pad_to_multiple_of")):
            raise InputError(f"resize_token_embeddings of {rows} tokens to {new_num_tokens}: programs were compiled "
                             f"for {rows}\n  Resize the model before it is given to autoparallel.compile.")
        return original.resize_token_embeddings(self, new_num_tokens, *args, **kwargs)

    def compiles(self: Any, *args: Any, **kwargs: Any) -> bool:
        """Whether ``generate`` compiles the model by torch.compile: it is compiled already."""
        return False

    def namespace(members: dict[str, Any]) -> None:
        members.update(inherited(original, module))
        members.update({name: decoding(getattr(original, name)) for name in ("_sample", "_beam_search")})
        members.update(forward=forward, generate=generate, _prepare_cache_for_generation=prepare_cache,
                       get_encoder=get_encoder, resize_token_embeddings=resize, _valid_auto_compile_criteria=compiles,
                       device=property(lambda self: self._state.device),    # before the first call, too
                       __doc__=module.__doc__, **methods_of_media(original))

    return types.new_class(f"Parallel{original.__name__}", (module, original), {}, namespace)


@cache
def generating_adapted(module: Any, adapted: Any) -> Any:
    """A subclass of ``module`` for PEFT's class ``adapted`` around a model of transformers: ``generate`` is that of the
    model within, with calls of the whole parallel module."""

    @functools.wraps(adapted.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name, config in self.peft_config.items():
            if config.is_prompt_learning or getattr(config, "alora_invocation_tokens", None):
                raise InputError(f"the adapter {name!r} is of {type(config).__name__}, which changes the prompt within "
                                 "generate of peft: here adapters of layers generate (LoRA and the like)\n"
                                 "  Call parallel(...) for each token, or generate by the original in one process.")
        if kwargs.get("adapter_names") is not None:
            raise InputError("generate with adapter_names, an adapter for each sample, does not run on a parallel "
                             "module\n  Call parallel.set_adapter(name) and generate for its samples.")
        view = object.__new__(generating(module, cast(Any, type(_which_generates(self._state.model)))))
        view.__dict__ = self.__dict__
        return view.generate(*args, **kwargs)

    return types.new_class(f"Parallel{adapted.__name__}", (module,), {},
                           lambda members: members.update(generate=generate, __doc__=module.__doc__))


def generates(model: Any) -> bool:
    """Whether transformers' ``generate`` is a method of the model."""
    return callable(getattr(type(model), "_prepare_cache_for_generation", None))


def generates_adapted(model: Any) -> bool:
    """Whether the model is PEFT's around one that generates."""
    return (not generates(model) and callable(getattr(type(model), "generate", None))
            and callable(getattr(type(model), "get_base_model", None)) and generates(_which_generates(model)))


def _which_generates(model: Any) -> Any:
    """The model of transformers: ``model``, or that within PEFT's."""
    return model if generates(model) else model.get_base_model()


def _trace_prompt(parallel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Trace a call of the prompt, tokens or embeddings, if ``generate`` was given one."""
    ids = next((ids for ids in (kwargs.get("inputs"), kwargs.get("input_ids"), *args[:1]) if ids is not None), None)
    given = {"inputs_embeds": kwargs.get("inputs_embeds")} if ids is None else {"input_ids": ids}
    if all(isinstance(prompt, torch.Tensor) for prompt in given.values()):
        parallel.trace(*parallel.taken((), {**given, "use_cache": False}), step=False, called="generate")


class Encoder:
    """The encoder of a parallel encoder-decoder within ``generate``, which calls it once: a program of the whole model
    with one token for the decoder, of which the encoder's outputs are kept."""

    def __init__(self, parallel: Any, part: Any) -> None:
        self.parallel = parallel
        self.forward = functools.partial(type(part).forward, part)  # generate reads its signature

    def __call__(self, **given: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        call = {name: value for name, value in given.items()
                if value is not None and value is not False and name != "labels"}  # which evaluation passes on
        rows = next(value for value in call.values() if isinstance(value, torch.Tensor))
        start = torch.zeros(rows.shape[0], 1, dtype=torch.long, device=rows.device)
        made = self.parallel(**call, decoder_input_ids=start, use_cache=False)
        return BaseModelOutput(last_hidden_state=made.encoder_last_hidden_state,
                               hidden_states=made.encoder_hidden_states, attentions=made.encoder_attentions)


@contextmanager
def first_ranks_draws(device: torch.device) -> Iterator[None]:
    """Within, torch's generators (of the CPU and of ``device``) are in the states of the first rank's: tokens are those
    of one process with that seed. Ranks whose states were equal go on as it does, others with their own."""
    mine = _generators(device)
    first = decide_once(lambda: mine)
    _set_generators(device, first)
    try:
        yield
    finally:
        if not all(torch.equal(own, other) for own, other in zip(mine, first, strict=True)):
            _set_generators(device, mine)


def _generators(device: torch.device) -> list[torch.Tensor]:
    found = [torch.get_rng_state()]
    return found if device.type == "cpu" else [*found, torch.get_device_module(device).get_rng_state(device)]


def _set_generators(device: torch.device, states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)


def _leaves_cache_open(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of ``generate`` says nothing of a cache."""
    config = kwargs.get("generation_config") or model.generation_config
    said = ("past_key_values", "cache_implementation", "assistant_model", "prompt_lookup_num_tokens",
            "custom_generate")
    return (len(args) < 2 and not any(kwargs.get(name) is not None for name in said)
            and config.cache_implementation is None and kwargs.get("use_cache", config.use_cache) is not False)
