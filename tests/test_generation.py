"""transformers' ``generate`` on parallel modules: one process's tokens, with one program for the prompt and one for all
further tokens."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor

import autoparallel
from autoparallel.capture.tracing.hf_caches import write_back
from tests.support.language import encoded, windowed
from tests.support.models import CASES
from tests.support.ranks import mesh_of
from tests.support.tiers import slow

NEW = 6


def generated(name: str, mesh: tuple[int, ...], how: dict[str, Any]) -> dict[str, Any]:
    model: Any = CASES[name].build().eval()
    ids = torch.arange(20).reshape(4, 5)
    parallel: Any = autoparallel.compile(model, mesh_of(*mesh), example_kwargs={"input_ids": ids})
    known = parallel._state.forms.compiled
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "use_cache": True, **how}
    greedy = parallel.generate(ids, do_sample=False, **call)
    compiled = parallel._state.forms.compiled - known
    more = parallel.generate(ids, do_sample=False, num_beams=2, **call) if not how else None
    beams = None if more is None else torch.equal(more, model.generate(ids, do_sample=False, num_beams=2, **call))
    by_beams = parallel._state.forms.compiled - known - compiled
    torch.manual_seed(3)
    expected = [model.generate(ids, do_sample=True, **call) for _ in range(2)]
    torch.manual_seed(3)
    drawn = [parallel.generate(ids, do_sample=True, **call) for _ in range(2)]
    torch.manual_seed(3 + dist.get_rank())  # a rank's own draws stay its own
    again = parallel.generate(ids, do_sample=True, **call)
    after, _ = torch.rand(()), torch.manual_seed(3 + dist.get_rank())
    return {"greedy": torch.equal(greedy, model.generate(ids, do_sample=False, **call)),
            "drawn": all(map(torch.equal, drawn, expected)) and not torch.equal(*drawn), "compiled": compiled,
            "first": torch.equal(again, drawn[0]), "own": bool(after == torch.rand(())) == (dist.get_rank() > 0),
            "beams": beams, "compiled by beams": by_beams,
            "more": parallel._state.forms.compiled - known - compiled - by_beams}


@pytest.mark.parametrize(("name", "mesh"), [pytest.param("llama", (2, 2), marks=pytest.mark.slow), ("gpt2", (2,))])
def test_tokens_are_one_process_s_and_two_programs_suffice(ranks: Any, name: str, mesh: tuple[int, ...]) -> None:
    for found in ranks(math.prod(mesh)).run(generated, name, mesh, {}, timeout_s=200):
        assert found == {"greedy": True, "drawn": True, "first": True, "own": True, "compiled": 2, "more": 0,
                         "beams": True, "compiled by beams": 2}


def searched_by_beams(name: str, mesh: tuple[int, ...], hows: list[dict[str, Any]]) -> list[tuple[bool, int]]:
    model: Any = CASES[name].build().eval()
    ids = torch.arange(20).reshape(4, 5)
    parallel: Any = autoparallel.compile(model, mesh_of(*mesh), example_kwargs={"input_ids": ids}, baseline="ddp")
    found = []
    for how in hows:
        known = parallel._state.forms.compiled
        call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "use_cache": True, **how}
        torch.manual_seed(3)
        expected = model.generate(ids, **call)
        torch.manual_seed(3)
        found.append((torch.equal(parallel.generate(ids, **call), expected), parallel._state.forms.compiled - known))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [("gpt2", (4,)), ("llama", (2, 2))])
def test_beams_take_two_programs_too(ranks: Any, name: str, mesh: tuple[int, ...]) -> None:
    """Beams move between the rows of the cache, which lie in shards."""
    hows = [{"num_beams": 3, "do_sample": False}, {"num_beams": 3, "do_sample": True, "length_penalty": 0.5},
            {"num_beams": 3, "do_sample": False, "num_return_sequences": 2, "early_stopping": True}]
    for found in ranks(4).run(searched_by_beams, name, mesh, hows, timeout_s=200):
        assert found == [(True, 2), (True, 0), (True, 0)]


def grown(name: str, mesh: tuple[int, ...]) -> dict[str, Any]:
    """Tokens and caches of calls with dynamic caches, and the call forms that each compiles."""
    model: Any = CASES[name].build().eval()
    ids = torch.arange(20).reshape(4, 5)
    parallel: Any = autoparallel.compile(model, mesh_of(*mesh), example_kwargs={"input_ids": ids}, baseline="ddp")
    asked = {"cache_implementation": "dynamic", "use_cache": True, "return_dict_in_generate": True,
             "max_new_tokens": NEW}
    hows: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False}, "sampled": {"do_sample": True}, "beams": {"do_sample": False, "num_beams": 2},
        "padded": {"attention_mask": torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0), "do_sample": False},
        "longer": {"do_sample": False, "max_new_tokens": 2 * NEW}}
    found = {}
    for case, how in hows.items():
        known = parallel._state.forms.compiled
        call = {"attention_mask": torch.ones_like(ids), **asked, **how}
        torch.manual_seed(3)
        expected = model.generate(ids, **call)
        torch.manual_seed(3)
        with pytest.warns(UserWarning, match="static one with room for 16 tokens"):
            got = parallel.generate(ids, **call)
        found[case] = (torch.equal(got.sequences, expected.sequences),
                       same(got.past_key_values, expected.past_key_values), parallel._state.forms.compiled - known)
    return found


def same(one: Any, other: Any) -> bool:
    """Whether caches are of one kind and have the same keys and values, whole."""
    return type(one) is type(other) and len(one.layers) == len(other.layers) and all(
        type(a.keys) is torch.Tensor and a.keys.shape == b.keys.shape and torch.allclose(a.keys, b.keys, atol=1e-5)
        and torch.allclose(a.values, b.values, atol=1e-5) for a, b in zip(one.layers, other.layers, strict=True))


@pytest.mark.parametrize(("name", "mesh"), [("gpt2", (2,)), pytest.param("llama", (2, 2), marks=pytest.mark.slow)])
def test_a_dynamic_cache_takes_two_programs_too(ranks: Any, name: str, mesh: tuple[int, ...]) -> None:
    """What is returned is one process's dynamic cache; a padded prompt has a mask, which is another form."""
    for found in ranks(math.prod(mesh)).run(grown, name, mesh, timeout_s=300):
        assert found == {"greedy": (True, True, 2), "sampled": (True, True, 0), "beams": (True, True, 2),
                         "padded": (True, True, 1), "longer": (True, True, 0)}


def continued(kind: str, mesh: tuple[int, ...]) -> list[tuple[bool, bool, int]]:
    """A conversation of three turns on the caller's own cache."""
    from transformers import DynamicCache, StaticCache

    model: Any = CASES["llama"].build().eval()
    parallel: Any = autoparallel.compile(model, mesh_of(*mesh), example_kwargs={"input_ids": torch.arange(5)[None]})

    def made() -> Any:
        return DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=32)

    mine, other, ids, found = made(), made(), torch.arange(20).reshape(4, 5), []
    for turn in range(3):
        known = parallel._state.forms.compiled
        call = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 4, "use_cache": True}
        expected = model.generate(ids, past_key_values=other, **call)
        got = parallel.generate(ids, past_key_values=mine, **call)
        layers = mine.layers if kind == "dynamic" else []
        found.append((torch.equal(got, expected), all(torch.allclose(a.keys, b.keys, atol=1e-5) for a, b in zip(
            layers, other.layers, strict=kind == "dynamic")), parallel._state.forms.compiled - known))
        ids = torch.cat([got, torch.full((4, 2), 7 + turn)], 1)
    return found


@pytest.mark.filterwarnings("ignore:the dynamic cache runs")
@pytest.mark.parametrize(("kind", "mesh"), [pytest.param("dynamic", (2, 2), marks=pytest.mark.slow), ("static", (2,))])
def test_a_conversation_goes_on_with_the_caller_s_cache(ranks: Any, kind: str, mesh: tuple[int, ...]) -> None:
    """A prompt that follows cached tokens is another form than the first one; 20 tokens need room for 32, not 16."""
    for found in ranks(math.prod(mesh)).run(continued, kind, mesh, timeout_s=300):
        assert [turn[:2] for turn in found] == 3 * [(True, True)]
        assert [turn[2] for turn in found] == [2, 1, 2 if kind == "dynamic" else 0]


def decoded_by_hand(kind: str, mesh: tuple[int, ...]) -> tuple[bool, bool]:
    """A loop of the caller's own, which keeps the cache that it gives: logits, whether it is what is returned."""
    from transformers import DynamicCache, StaticCache

    model: Any = CASES["llama"].build().eval()
    ids = torch.arange(20).reshape(4, 5)
    parallel: Any = autoparallel.compile(model, mesh_of(*mesh), example_kwargs={"input_ids": ids}, baseline="fsdp")
    found, kept = [], []
    with torch.no_grad():
        for module in (model, parallel):
            cache = DynamicCache() if kind == "dynamic" else StaticCache(model.config, max_cache_len=8)
            steps = [module(given, past_key_values=cache, use_cache=True) for given in (ids, ids[:, :1], ids[:, 1:2])]
            found.append([whole(step.logits) for step in steps])
            kept.append(all(step.past_key_values is cache for step in steps))
    right = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))
    return right, all(kept)


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.parametrize(("kind", "mesh"), [("dynamic", (2,)), pytest.param("static", (2, 2), marks=pytest.mark.slow)])
def test_a_cache_of_the_caller_s_has_the_keys_of_each_call(ranks: Any, kind: str, mesh: tuple[int, ...]) -> None:
    found = ranks(math.prod(mesh)).run(decoded_by_hand, kind, mesh, timeout_s=300)
    assert found == math.prod(mesh) * [(True, True)]


def test_a_cache_that_is_not_returned_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="the DynamicCache that the call was given .* call it with use_cache=True"):
        assert write_back((), {"past_key_values": transformers.DynamicCache()}, (1, 2)) == (1, 2)


class Sampler(torch.nn.Linear):
    """A model with a ``generate`` of its own."""

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(self(x))


def generated_by_its_own() -> tuple[bool, list[str]]:
    """A model's own ``generate``; and what is said where tokens are taken back."""
    own: Any = Sampler(8, 8)
    x = torch.arange(32.0).reshape(4, 8)
    parallel: Any = autoparallel.compile(own, mesh_of(4), example_inputs=(x,))
    right = torch.allclose(parallel.generate(x), own.generate(x))
    model: Any = CASES["llama"].build().eval()
    ids = torch.arange(8).reshape(1, 8) % 4
    parallel = autoparallel.compile(model, mesh_of(4), example_kwargs={"input_ids": ids}, baseline="tensor_parallel")
    call = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 3, "use_cache": True,
            "prompt_lookup_num_tokens": 2}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = parallel.generate(ids, **call)
    right &= torch.equal(found, model.generate(ids, **call))
    return right, [str(one.message) for one in said]


@pytest.mark.slow
def test_a_cache_that_stays_dynamic_is_announced(ranks: Any) -> None:
    for right, said in ranks(4).run(generated_by_its_own, timeout_s=300):
        assert right and any("LlamaForCausalLM compiles a program for each further token: assisted_generation takes "
                             "tokens back" in text for text in said)


def generated_by(kind: str, mesh: tuple[int, ...]) -> list[tuple[bool, bool, int]]:
    """Of calls of ``generate``, greedy, by beams, by static and dynamic caches: whether tokens and caches are those of
    one process, and the call forms compiled."""
    windows = kind in ("mistral", "gemma3")
    model: Any = (windowed if windows else encoded)(kind).eval()
    batch = torch.randn(4, 4, 16) if kind == "whisper" else torch.arange(28).reshape(4, 7) + 1
    example = {model.main_input_name: batch}
    if not windows:
        example["decoder_input_ids"] = torch.zeros(4, 1, dtype=torch.long)
    parallel: Any = autoparallel.compile(model, mesh_of(*mesh), example_kwargs=example, baseline="tensor_parallel")
    call: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "use_cache": True}
    if kind != "whisper":
        call["attention_mask"] = torch.ones_like(batch).index_fill(1, torch.tensor([0]), 0)
    found = []
    for how in ({}, {"num_beams": 2}, {"cache_implementation": "static"},
                {"cache_implementation": "dynamic", "return_dict_in_generate": True}):
        known = parallel._state.forms.compiled
        expected, got = model.generate(batch, **call, **how), parallel.generate(batch, **call, **how)
        tokens = [made if isinstance(made, torch.Tensor) else made["sequences"] for made in (expected, got)]
        caches = [getattr(made, "past_key_values", None) for made in (expected, got)]
        equal = all(same(getattr(caches[1], half), getattr(caches[0], half)) if hasattr(caches[0], half) else True
                    for half in ("self_attention_cache", "cross_attention_cache"))
        equal &= caches[0] is None or not windows or same(caches[1], caches[0])
        found.append((torch.equal(*tokens), equal, parallel._state.forms.compiled - known))
    return found


@pytest.mark.parametrize(("kind", "mesh"), [
    *(pytest.param(kind, mesh, marks=pytest.mark.slow) for kind, mesh in
      [("mistral", (4,)), ("bart", (4,)), ("whisper", (2, 2)), ("t5", (2, 2))]), ("gemma3", (2,)), ("t5", (2,))])
def test_windows_and_encoders_take_one_program_for_further_tokens(ranks: Any, kind: str, mesh: tuple[int, ...]) -> None:
    """An encoder is a third program at the first call. A dynamic cache has room for 16 tokens, and so its own forms."""
    encoder = kind not in ("mistral", "gemma3")
    for found in ranks(math.prod(mesh)).run(generated_by, kind, mesh, timeout_s=300):
        assert [made[:2] for made in found] == [(True, True)] * 4
        assert [made[2] for made in found] == [2 + encoder, 2, 0, 2]


def lies_in_shards() -> tuple[bool, bool, float]:
    """Within ``generate``: whether logits are whole, whether keys are right, and this rank's share of them."""
    from transformers import StaticCache

    model: Any = CASES["llama"].build().eval()
    ids = torch.arange(20).reshape(4, 5)
    parallel: Any = autoparallel.compile(model, mesh_of(2), baseline="ddp")
    with torch.no_grad():
        parallel._state.gathers = True
        out = parallel(ids, past_key_values=StaticCache(model.config, max_cache_len=8), use_cache=True)
        expected = model(ids, past_key_values=StaticCache(model.config, max_cache_len=8), use_cache=True)
    keys: Any = out.past_key_values.layers[0].keys
    right = torch.allclose(keys.full_tensor(), expected.past_key_values.layers[0].keys, atol=1e-5)
    return type(out.logits) is torch.Tensor, right, keys.to_local().numel() / keys.numel()


def test_keys_and_values_stay_in_shards_between_tokens(ranks: Any) -> None:
    for whole, right, share in ranks(2).run(lies_in_shards, timeout_s=200):
        assert whole and right and share == 0.5


@pytest.mark.parametrize("name", ["", slow("input_ids")])
def test_generate_may_come_first(mesh_of_one: Any, name: str) -> None:
    """The prompt is the example."""
    model: Any = CASES["llama"].build().eval()
    ids = torch.arange(8).reshape(2, 4)
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 2, "do_sample": False}
    parallel: Any = autoparallel.compile(model, mesh_of_one, cluster="h200")
    found = parallel.generate(**{name: ids}, **how) if name else parallel.generate(ids, **how)
    assert torch.equal(found, model.generate(ids, **how))


def test_a_first_generate_takes_embeddings_and_a_parallel_assistant(mesh_of_one: Any) -> None:
    """Both ended in an InputError: transformers asks for the parameters' device before the first call."""
    model: Any = CASES["llama"].build().eval()
    ids = torch.arange(5)[None]
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0,
           "use_cache": True}
    embedded = model.get_input_embeddings()(ids).detach()
    parallel: Any = autoparallel.compile(model, mesh_of_one)
    assert torch.equal(parallel.generate(inputs_embeds=embedded, **how), model.generate(inputs_embeds=embedded, **how))
    assistant: Any = autoparallel.compile(CASES["llama"].build().eval(), mesh_of_one)
    found = parallel.generate(ids, assistant_model=assistant, **how)
    assert torch.equal(found, model.generate(ids, **how))
