"""Models of libraries that look at their data: equal to the original, or refused with the library's call and the way
out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import autoparallel
from autoparallel.capture import Ref, capture
from autoparallel.errors import CaptureError
from autoparallel.runtime.interpret import values_of
from tests.support.language import llama
from tests.support.tiers import with_slow

SOUND = {"vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 32, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
         "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.0,
         "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0}
KINDS: dict[str, dict[str, Any]] = {"Wav2Vec2": {}, "Wav2Vec2Conformer": {"conformer_conv_dropout": 0.0}}


def speech(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SOUND, **KINDS[kind], **options)
    return getattr(transformers, f"{kind}ForCTC")(config).train()


def call(labels: Tensor) -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 400, generator=torch.Generator().manual_seed(1)), "labels": labels}


@pytest.mark.parametrize("kind", with_slow(KINDS, "Wav2Vec2Conformer"))
def test_item_20_speech_models_without_layer_drop(kind: str) -> None:
    """Loss and gradients, with labels of other lengths than the trace saw."""
    model = speech(kind, layerdrop=0.0, apply_spec_augment=False)
    graph = capture(model, (), call(torch.tensor([[3, 4, 5, 6], [7, 8, 9, 9]])))
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **graph.constant_tensors}
    for labels in ([[3, -100, -100, -100], [4, 4, 5, -100]], [[-100, 2, -100, 3], [1, 5, 6, 7]]):
        given = call(torch.tensor(labels))
        known = {Ref(n.index): list(given.values())[int(n.path)] for n in graph.of_kind("input")}
        known |= {Ref(n.index): state[n.path] for kind in ("parameter", "buffer") for n in graph.of_kind(kind)}
        found = values_of(graph, graph.outputs, known, torch.device("cpu"))[graph.outputs[0]]
        expected = model(**given).loss
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)
        parameters = list(model.parameters())
        both = [torch.autograd.grad(y, parameters, allow_unused=True, materialize_grads=True)
                for y in (found, expected)]
        torch.testing.assert_close(*both, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", with_slow(KINDS, "Wav2Vec2Conformer"))
@pytest.mark.slow
def test_item_20_layers_that_are_dropped_are_refused_with_the_option(kind: str) -> None:
    with pytest.raises(CaptureError, match=r"(?s)skip_the_layer.*is of transformers.*config\.layerdrop = 0\.0"):
        capture(speech(kind, layerdrop=0.1), (), call(torch.ones(2, 4, dtype=torch.long)))


@pytest.mark.slow
def test_item_20_masks_of_numpy_are_refused_by_name() -> None:
    """SpecAugment, of which Wav2Vec2 draws by numpy."""
    with pytest.raises(CaptureError, match=r"(?s)draws numbers from numpy\.random.*apply_spec_augment=False"):
        capture(speech("Wav2Vec2", layerdrop=0.0, mask_time_prob=0.5, mask_time_length=2), (),
                call(torch.ones(2, 4, dtype=torch.long)))


@pytest.mark.slow
def test_item_20_experts_that_take_lists_of_tokens_are_refused_by_name() -> None:
    config = transformers.JetMoeConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_key_value_heads=2, kv_channels=8, intermediate_size=32,
        num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32)
    with pytest.raises(CaptureError, match=r"(?s)depends on the data.*self_attention\.experts.*is of transformers.*"
                                           "A loop over experts"):
        capture(transformers.JetMoeForCausalLM(config), (), {"input_ids": torch.ones(2, 8, dtype=torch.long)})


@pytest.mark.parametrize("kind", ["AdaLora", "Lora"])
def test_adapters_that_make_and_put_tensors_in_forward(mesh_of_one: Any, kind: str) -> None:
    """AdaLoRA writes ``torch.eye(..., out=)``; LoRA of parameters registers a parametrization, which puts the parameter
    into itself."""
    import peft

    options: dict[str, Any] = {"AdaLora": {"init_r": 6, "target_r": 3, "total_step": 10, "task_type": "CAUSAL_LM"},
                               "Lora": {"target_parameters": ["mlp.down_proj.weight"], "init_lora_weights": False}}
    config = getattr(peft, f"{kind}Config")(target_modules=["q_proj"], **options[kind])
    model: Any = peft.get_peft_model(llama(), config)
    ids, found = torch.arange(20).view(2, 10), list[Any]()
    for one in (model, autoparallel.compile(model, mesh_of_one)):
        loss = one(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append((loss, {name: p.grad for name, p in one.named_parameters() if p.grad is not None}))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert len(found[0][1]) == len(found[1][1]) > 2
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name].full_tensor(), gradient, rtol=1e-4, atol=1e-6)
