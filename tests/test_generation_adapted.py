"""``generate`` of models that are more than a decoder: PEFT's adapters, states instead of caches, images."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers

import autoparallel
from autoparallel.errors import InputError
from autoparallel.runtime.generation_media import repeated
from tests.support.language import VOCABULARY, adapted, llama
from tests.support.ranks import mesh_of

IDS = torch.arange(10).reshape(2, 5) + 2
HOW: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 3, "do_sample": False}


def strong(model: Any) -> Any:
    """The model with weights that make tokens differ."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model.eval()


class Weighed(transformers.LlamaForCausalLM):
    """Its class has values for what the model and its calls set."""

    penalty: Any = 0.0
    scale = 1.0

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = 2.0

    def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
        made = super().forward(input_ids, **others)
        self.penalty = made.logits.square().mean()
        return made

    def named(self) -> str:
        return "of the class"


def with_states() -> Any:
    torch.manual_seed(0)
    return strong(transformers.MambaForCausalLM(transformers.MambaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4, eos_token_id=None, pad_token_id=0)))


def seeing() -> Any:
    """A small model of images [3, 8, 8], each of four tokens 63."""
    sizes: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    return strong(transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**sizes, vocab_size=64, eos_token_id=None, pad_token_id=0),
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4),
        image_token_index=63, vision_feature_layer=-1)))


def generated_with_adapters() -> list[bool]:
    """Tokens with each adapter, without, and by beams, beside one process's."""
    tokens: list[list[torch.Tensor]] = []
    for is_parallel in (False, True):
        one = adapted()
        one.add_adapter("second", one.peft_config["default"])
        one.config.use_cache, one = True, strong(one)
        if is_parallel:
            one = autoparallel.compile(one, mesh_of(2), example_kwargs={"input_ids": IDS}, baseline="fsdp")
        made = [one.generate(input_ids=IDS, **HOW), one.generate(IDS, **HOW, num_beams=2)]
        one.set_adapter("second")
        made.append(one.generate(input_ids=IDS, **HOW))
        with one.disable_adapter():
            made.append(one.generate(input_ids=IDS, **HOW))
        tokens.append(made)
    return [*map(torch.equal, *tokens)]


def test_adapters_generate(ranks: Any) -> None:
    for found in ranks(2).run(generated_with_adapters, timeout_s=200):
        assert found == [True] * 4


def test_an_adapter_for_each_sample_and_adapters_of_prompts_are_refused(mesh_of_one: Any) -> None:
    parallel: Any = autoparallel.compile(adapted(), mesh_of_one)
    with pytest.raises(InputError, match=r"Call parallel\.set_adapter"):
        parallel.generate(IDS, **HOW, adapter_names=["default", "__base__"])
    parallel.peft_config["default"].alora_invocation_tokens = [1]
    with pytest.raises(InputError, match="'default' is of LoraConfig, which changes the prompt"):
        parallel.generate(IDS, **HOW)


def test_a_loss_of_routers_is_not_computed_between_tokens(mesh_of_one: Any) -> None:
    """The loss took the masks of static caches for one tensor."""
    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = strong(transformers.MixtralForCausalLM(transformers.MixtralConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=2, output_router_logits=True,
        eos_token_id=None, pad_token_id=0)))
    parallel: Any = autoparallel.compile(model, mesh_of_one)
    losses = [one(IDS, labels=IDS).aux_loss for one in (model, parallel)]
    torch.testing.assert_close(*losses)
    assert torch.equal(parallel.generate(IDS, **HOW), model.generate(IDS, **HOW))


def test_attributes_of_a_model_hide_those_of_its_class(mesh_of_one: Any) -> None:
    """As in one process: what ``__init__`` sets, what a call leaves, a method replaced on the model."""
    model = Weighed(llama().config)
    model.named = lambda: "of the model"  # type: ignore[method-assign]
    parallel: Any = autoparallel.compile(model, mesh_of_one)
    assert parallel.penalty == 0.0 and Weighed.scale == type(parallel).scale == 1.0
    for one in (model, parallel):
        one(IDS)
    torch.testing.assert_close(parallel.penalty, model.penalty)
    assert parallel.scale == 2.0 and parallel.named() == "of the model"
    parallel.scale = 3.0
    assert parallel.scale == 3.0


def test_adapters_of_transformers_are_switched(mesh_of_one: Any) -> None:
    from peft import LoraConfig

    model = llama()
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    parallel: Any = autoparallel.compile(model, mesh_of_one)
    made = []
    for one in (model, parallel):
        found = [one(IDS).logits]
        one.disable_adapters()
        found.append(one(IDS).logits)
        one.enable_adapters()
        made += [[*found, one(IDS).logits]]
    torch.testing.assert_close(*made)
    assert not torch.equal(made[0][0], made[0][1])


def generated_with_states() -> tuple[list[bool], int]:
    """Tokens by states of Mamba, greedy and by beams, beside one process's; the programs of the greedy ones."""
    model = with_states()
    parallel: Any = autoparallel.compile(model, mesh_of(2), example_kwargs={"input_ids": IDS},
                                         baseline="tensor_parallel")
    right = [torch.equal(parallel.generate(IDS, **HOW), model.generate(IDS, **HOW))]
    programs = parallel._state.forms.compiled
    right.append(torch.equal(parallel.generate(IDS, **HOW, num_beams=2), model.generate(IDS, **HOW, num_beams=2)))
    return right, programs


def test_states_take_one_program_for_all_further_tokens(ranks: Any) -> None:
    for right, programs in ranks(2).run(generated_with_states, timeout_s=200):
        assert right == [True, True] and programs == 3


@pytest.mark.slow
def test_states_that_the_caller_keeps_go_on(mesh_of_one: Any) -> None:
    model = with_states()
    parallel: Any = autoparallel.compile(model, mesh_of_one, example_kwargs={"input_ids": IDS})
    made = []
    with torch.no_grad():
        for one in (model, parallel):
            cache = one(IDS[:, :4], use_cache=True).cache_params
            made += [one(IDS[:, token:token + 1], use_cache=True, cache_params=cache).logits for token in (4, 3)]
    torch.testing.assert_close(made[:2], made[2:])


@pytest.mark.slow
def test_images_are_of_the_prompt(mesh_of_one: Any) -> None:
    model, pixels = seeing(), torch.randn(2, 3, 8, 8)
    ids = torch.tensor([[5, 63, 63, 63, 63, 7], [9, 63, 63, 63, 63, 2]])
    call = {"input_ids": ids, "pixel_values": pixels, "attention_mask": torch.ones_like(ids)}
    parallel: Any = autoparallel.compile(model, mesh_of_one, example_kwargs=call)
    two = torch.cat([ids[:1], ids[1:]], 1)  # two images of one sample
    for given, how in ((call, {}), (call, {"num_beams": 2}),
                       ({**call, "input_ids": two, "attention_mask": torch.ones_like(two)}, {"num_beams": 2})):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [one.generate(**given, **how, max_new_tokens=3, do_sample=False) for one in (parallel, model)]
        assert torch.equal(*found)


def test_images_that_are_not_one_for_each_sample_are_not_repeated() -> None:
    ids = torch.tensor([[63, 63, 5, 6], [1, 2, 3, 4]])
    with pytest.raises(InputError, match=r"one row of images for each sample.*pixel_values \[2, 3\]"):
        repeated(seeing().config, {"pixel_values": torch.ones(2, 3)}, ids, 2)


def test_a_vocabulary_is_resized_before_the_first_trace(mesh_of_one: Any) -> None:
    parallel: Any = autoparallel.compile(llama(), mesh_of_one)
    parallel.resize_token_embeddings(VOCABULARY + 4)
    assert parallel(IDS + VOCABULARY - 9).logits.shape[-1] == VOCABULARY + 4
    parallel.resize_token_embeddings(VOCABULARY + 4)
    with pytest.raises(InputError, match=r"Resize the model before it is given to autoparallel\.compile"):
        parallel.resize_token_embeddings(VOCABULARY)
