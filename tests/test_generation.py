"""transformers' ``generate`` on parallel modules: one process's tokens, with one program for the prompt and one for all
further tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import autoparallel
from tests.support.models import CASES
from tests.support.ranks import mesh_of

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


@pytest.mark.parametrize(("name", "mesh"), [pytest.param("llama", (2, 2), marks=pytest.mark.slow), ("gpt2", (4,))])
def test_tokens_are_one_process_s_and_two_programs_suffice(ranks: Any, name: str, mesh: tuple[int, ...]) -> None:
    for found in ranks(4).run(generated, name, mesh, {}, timeout_s=200):
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


@pytest.mark.slow
def test_a_dynamic_cache_may_be_asked_for(ranks: Any) -> None:
    for found in ranks(4).run(generated, "llama", (4,), {"cache_implementation": "dynamic"}, timeout_s=300):
        assert found["greedy"] and found["drawn"] and found["compiled"] == NEW


def lies_in_shards() -> tuple[bool, bool, float]:
    """Within ``generate``: whether logits are whole, whether keys are right, and this rank's share of them."""
    from transformers import StaticCache

    model: Any = CASES["llama"].build().eval()
    ids = torch.arange(20).reshape(4, 5)
    parallel: Any = autoparallel.compile(model, mesh_of(4), baseline="ddp")
    with torch.no_grad():
        parallel._state.gathers = True
        out = parallel(ids, past_key_values=StaticCache(model.config, max_cache_len=8), use_cache=True)
        expected = model(ids, past_key_values=StaticCache(model.config, max_cache_len=8), use_cache=True)
    keys: Any = out.past_key_values.layers[0].keys
    right = torch.allclose(keys.full_tensor(), expected.past_key_values.layers[0].keys, atol=1e-5)
    return type(out.logits) is torch.Tensor, right, keys.to_local().numel() / keys.numel()


def test_keys_and_values_stay_in_shards_between_tokens(ranks: Any) -> None:
    for whole, right, share in ranks(4).run(lies_in_shards, timeout_s=200):
        assert whole and right and share == 0.25
