"""`autoparallel study`: regions in words worked out by hand, pictures and JSON, and a sweep that follows the prices."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autoparallel
from autoparallel import regions
from autoparallel.cli import app
from autoparallel.errors import InputError, PlanError
from autoparallel.models import load_model
from autoparallel.region_reports import report, to_json, to_svg
from autoparallel.regions import Found, Point, Regions, context_recipes, traits_of
from cost_models import Cluster

CONTEXT, FSDP = "context parallel over hosts", "FSDP"
K = 1024


def point(sequence: int, plain_s: float, context_s: float, batch: int = 16, devices: int = 64) -> Point:
    """Where FSDP takes so long, alone and with context parallelism; inf: does not fit."""
    both = [Found((FSDP,), "dp=64,zero=3", plain_s, 2.0), Found((CONTEXT, FSDP), "cp=16,zero=3", context_s, 1.0)]
    return Point(sequence, batch, devices, tuple(sorted((one for one in both if math.isfinite(one.step_s)),
                                                        key=lambda one: one.step_s)), len(both))


SMALL = Regions("h100-sxm", (point(32 * K, 1.0, 1.5), point(64 * K, 2.0, 2.2), point(96 * K, 3.3, 3.0),
                             point(128 * K, math.inf, 4.0)))


# --- in words -----------------------------------------------------------------------------------------------------


def test_where_a_trait_begins_to_pay_is_told() -> None:
    assert SMALL.told == ("Context parallel over hosts pays beyond 64k tokens (from 96k tokens on): nothing else fits "
                          "(64 devices and a batch of 16).",)
    fits = Regions("h100-sxm", SMALL.points[:3])
    assert "up to 10% faster than the best plan without (64 devices and a batch of 16)" in fits.told[0]
    assert fits.kinds == (FSDP, f"{CONTEXT}, {FSDP}")


def test_equal_boundaries_are_one_sentence_and_others_are_not_told() -> None:
    """At 128 devices the boundary is the same; at 256 the trait comes and goes, which is no boundary."""
    more = [point(s * K, a, b, devices=n) for n, s, a, b in (
        (128, 32, 1.0, 2.0), (128, 64, 1.0, 2.0), (128, 96, 3.0, 2.0), (128, 128, 3.0, 2.0),
        (256, 32, 2.0, 1.0), (256, 64, 1.0, 2.0), (256, 96, 2.0, 1.0), (256, 128, 1.0, 2.0))]
    told = Regions("h100-sxm", (*SMALL.points, *more)).told
    assert [line for line in told if "64k tokens" in line and "64 devices and a batch of 16; 128 devices" in line]
    assert not any("256 devices and a batch" in line for line in told)


def test_a_trait_that_ceases_to_pay_is_told_and_a_tie_is_not() -> None:
    falls = Regions("x", (point(4 * K, 2.0, 1.0, batch=8), point(4 * K, 1.0, 1.2, batch=64)))
    assert falls.told == ("Context parallel over hosts pays up to a batch of 8 (not from a batch of 64 on): up to 100% "
                          "faster than the best plan without (64 devices and 4k tokens).",)
    assert Regions("x", (point(4 * K, 1.001, 1.0, batch=8), point(4 * K, 1.0, 1.2, batch=64))).told == ()


def test_the_report_its_json_and_the_picture() -> None:
    text = report(SMALL)
    assert "4 points on h100-sxm, 8 plans." in text and "+10.0%" in text and "cp=16,zero=3" in text
    assert "1 point on x, 2 plans." in " ".join(report(Regions("x", (replace(SMALL.points[0], priced=2),))).split())
    data = json.loads(to_json(SMALL))
    assert (data["schema"], data["points"][3]["plans"][0]["step_s"]) == ("autoparallel.study", 4.0)
    assert data["told"] == list(SMALL.told)
    empty = Regions("<x>", (*SMALL.points, Point(256 * K, 16, 64, refused="dp=64 needs 90 GiB a device")))
    drawn = ElementTree.fromstring(to_svg(empty))
    cells = [rect for rect in drawn.iter() if rect.tag.endswith("rect") and list(rect)]
    assert len(cells) == 5
    assert [cell[0].text for cell in cells][-1] == "dp=64 needs 90 GiB a device"
    assert len({cell.get("fill") for cell in cells}) == 3
    assert "dp=64 needs 90 GiB a device" in report(empty)


# --- the sweep ------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                                    for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def blocks(batch: int, sequence: int) -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, Any]]:
    with torch.device("meta"):
        return Blocks(1024, 2).bfloat16(), (torch.empty(batch, sequence, 1024, dtype=torch.bfloat16),), {}


LLAMA = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
         "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512}


@pytest.mark.slow
def test_sequences_are_cut_where_the_batch_is_smaller_than_the_devices() -> None:
    """Two sequences on eight devices leave two data-parallel ranks: the rest cut each sequence, or weights. Of 16
    sequences each device has two, and of so small a model nothing else pays. The prices are those of plans by hand."""
    found = autoparallel.study(lambda batch, length: load_model(LLAMA, batch, length, "bfloat16"),
                               sequences=[2 * K], batches=[2, 16], devices=[8], refine=0)
    few, many = found.points
    assert few.best is not None and many.best is not None
    assert {"context parallel inside hosts", "tensor parallel inside hosts"} & set(few.best.traits)
    assert many.best.traits in (("data parallel",), ("ZeRO-1",), ("FSDP",))
    cluster = Cluster.load("h100-sxm", 8)
    for point_ in found.points:
        assert [one.step_s for one in point_.found] == sorted(one.step_s for one in point_.found)
        model, args, kwargs = load_model(LLAMA, point_.batch, 2 * K, "bfloat16")
        best = point_.found[0]
        made = autoparallel.plan(model, cluster, example_inputs=args, example_kwargs=kwargs, by_hand=best.text)
        assert (made.prediction.step_s, traits_of(made, cluster)) == (pytest.approx(best.step_s), best.traits)


def test_a_point_without_a_plan_says_why() -> None:
    """Without tokens and attention no sequence can be cut, and two rows are not divided by eight ranks."""
    (found,) = autoparallel.study(blocks, sequences=[64], batches=[2], devices=[8]).points
    assert found.best is None and "cp=8,zero=3" in found.refused and "this model has none" in found.refused


def test_a_length_that_the_model_refuses_leaves_the_other_points() -> None:
    def model(batch: int, length: int) -> Any:
        if length > 64:
            raise InputError("the sequence length is beyond 64")
        return blocks(batch, length)

    short, long = autoparallel.study(model, sequences=[64, 128], batches=[8], devices=[8], refine=0).points
    assert short.best is not None and (long.best, long.refused) == (None, "the sequence length is beyond 64")
    with pytest.raises(InputError, match="beyond 64"):
        autoparallel.study(model, sequences=[128], batches=[8], devices=[8])


def test_the_fastest_of_each_kind_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds a, b, a, c of 3, 2, 1 and 4 seconds: a of one second, b, c."""
    monkeypatch.setattr(regions, "traits_of", lambda made, cluster: (made.kind,))
    plans = [(f"{kind}{step_s}", SimpleNamespace(kind=kind, prediction=SimpleNamespace(step_s=step_s, peak_bytes=1.0)))
             for kind, step_s in (("a", 3.0), ("b", 2.0), ("a", 1.0), ("c", 4.0))]
    found = regions._best_of_kinds(plans, Cluster.load("h100-sxm"))    # type: ignore[arg-type]
    assert [one.text for one in found] == ["a1.0", "b2.0", "c4.0"]


def test_context_recipes_divide_the_batch() -> None:
    """Where ranks have several sequences, also one at a time: a batch of 64 long ones fits one host so only."""
    machine = Cluster.load("h100-sxm", 16)
    assert list(context_recipes(machine, 4)) == [
        "cp=4,zero=3", "cp=4,zero=3,recompute=full", *(
            f"cp={degree},zero=3{more}" for degree in (8, 16)
            for more in ("", ",recompute=full", ",micro_batch=1", ",micro_batch=1,recompute=full")),
        *(f"tp=8,sequence_parallel,cp=2,zero=3{more}"
          for more in ("", ",recompute=full", ",micro_batch=1", ",micro_batch=1,recompute=full"))]
    assert list(context_recipes(Cluster.load("h100-sxm", 1), 16)) == []


@pytest.mark.parametrize(("given", "said"), [
    ({"sequences": [0]}, "sequences is [0]: give whole numbers above 0"),
    ({"devices": "8"}, "devices is '8': give whole numbers above 0"),
    ({"refine": 9}, "refine is 9: give a whole number from 0 to 8"),
    ({"model": nn.Linear}, "give a function of (global batch, sequence length), which returns (model, example inputs"),
    ({"model": lambda batch, sequence: None}, "the model of a batch of 8 and 64 tokens is None: return ("),
])
def test_mistakes_are_told(given: dict[str, Any], said: str) -> None:
    call = {"model": blocks, "sequences": [64], "batches": [8], "devices": [8], **given}
    with pytest.raises(PlanError) as caught:
        autoparallel.study(call.pop("model"), **call)
    assert said in str(caught.value)


def test_a_list_that_cannot_be_read_is_refused() -> None:
    result = CliRunner().invoke(app, ["study", "x.json", "--cluster", "h100-sxm", "--devices", "8,,x"])
    assert "--devices is '8,,x': give whole numbers above 0, as 8,64 (8k is 8,192)" in str(result.exception)


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(LLAMA))
    result = CliRunner().invoke(app, ["study", str(tmp_path / "model.json"), "--cluster", "h100-sxm", "--devices", "2",
                                      "--sequence-lengths", "1k", "--global-batches", "2", "--svg",
                                      str(tmp_path / "a.svg"), "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert [(one["devices"], one["sequence"]) for one in data["points"]] == [(2, 1024)]
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
