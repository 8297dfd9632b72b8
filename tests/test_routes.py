"""The two routes to the price of a published run: the closed form of a transformer, and its captured model's plan."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.published_runs.by_plan import by_hand, plan_of
from benchmarks.published_runs.predict import priced, profile_of
from benchmarks.published_runs.price import Pricer
from benchmarks.published_runs.rows import Run, read
from cost_models import ClusterError
from cost_models.pipeline import blocks_of_stages
from tests.support.tiers import slow


def run(title: str = "vTrain", locator: str = "data/ground_truth_single.csv", name: str = "GPT", notes: str = "",
        vocab: int = 50257, layers: int = 12, **plan: Any) -> Run:
    """A GPT of vTrain's rows on one host of A100s."""
    said = {"dp": 1, "tp": 1, "pp": 1, "cp": 1, "micro_batch": 2, "global_batch": 8, "precision": "fp16", **plan}
    return read({
        "id": "some-1", "source": {"title": title, "locator": locator}, "notes": notes,
        "model": {"name": name, "layers": layers, "hidden": 1024, "ffn": 4096, "heads": 16, "kv_heads": 16,
                  "vocab": vocab, "seq_len": 1024, "gated_mlp": False, "tied_embeddings": True, "moe": None},
        "hardware": {"gpu": "A100-80GB", "n_gpus": said["dp"] * said["tp"] * said["pp"], "gpus_per_node": 8},
        "plan": said, "measured": {}, "derived": {}})


@pytest.mark.slow
@pytest.mark.parametrize("plan", [
    slow({"tp": 2}), slow({"pp": 2}), {"tp": 2, "pp": 2, "dp": 2, "global_batch": 16}], ids=str)
def test_both_routes_agree(plan: dict[str, Any]) -> None:
    """Small layers, which launches bound, an odd vocabulary and gradients added over micro-batches."""
    some = run(**plan)
    assert plan_of(some).prediction.step_s == pytest.approx(priced(some)["step_time_s"], rel=0.03)


def test_unequal_stages_are_cut_alike() -> None:
    some = run("Megatron-LM 2021, SC21", "", layers=5, vocab=51200, pp=2, recompute="full")
    assert Pricer(some, profile_of(some)).parameters.stage_layers() == [3, 2] and by_hand(some)["split"] == "blocks"
    assert plan_of(some).prediction.step_s == pytest.approx(priced(some)["step_time_s"], rel=0.03)


def test_blocks_of_stages() -> None:
    assert blocks_of_stages(126, 128, ends=True) == [0, *[1] * 126, 0]
    with pytest.raises(ClusterError, match="3 blocks do not make 4 stages"):
        blocks_of_stages(3, 4)


def test_vocabularies_are_filled_up_as_the_software_does() -> None:
    assert run(tp=2).vocab == 50256 and run(tp=1).vocab == 50257    # vTrain's layers leave the rest out
    assert run("Megatron-LM", "", tp=2).vocab == 50432               # a multiple of 128 on each tensor rank


def test_masters_are_as_the_run_states() -> None:
    kept, pure = (profile_of(run("MosaicML llm-foundry", "", precision=name)) for name in ("bf16-amp", "bf16-pure"))
    assert (kept.kept("bfloat16"), pure.kept("bfloat16")) == ("bfloat16-master", "bfloat16")


def test_a_further_token_is_predicted_on_the_last_stage() -> None:
    """Layouts of DeepSeek-V3's recipes: E t*4 | (t*4 |)*14 t m L."""
    name, plan = "DeepSeekV3", {"pp": 16, "micro_batch": 1, "global_batch": 32}
    deep = run("Megatron-Bridge performance summary", "26.02", name, layers=61, **plan)
    less = run("Megatron-Bridge performance summary", "26.02", name, "w/o MTP", layers=61, **plan)
    assert (deep.model.further, less.model.further) == (1, 0)
    one, none = (Pricer(some, profile_of(some)) for some in (deep, less))
    assert one.parameters.stage_layers() == [*[4] * 15, 1]
    assert one.stages_s()[-1] - one.further_s() < none.stages_s()[-1] < one.stages_s()[-1]
