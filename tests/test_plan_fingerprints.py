"""Plans are those that ``benchmarks/plan_fingerprints.json`` keeps: a few cheap cases here, all by the benchmark."""

from __future__ import annotations

import copy
import json

import pytest
from typer.testing import CliRunner

from benchmarks import plan_fingerprints
from benchmarks.plan_fingerprints import FILE, Case, Fingerprint, differences, fingerprints, verdict

#: Experts, an encoder with masks, a decoder, convolutions; and an encoder with a decoder, a vision transformer.
FEW, MORE = ["mixtral 8", "bert 8", "llama 8", "resnet 8"], ["t5 8", "vit 8x8"]


@pytest.fixture(scope="module")
def kept() -> dict[str, Fingerprint]:
    return dict(json.loads(FILE.read_text())["cases"])


def test_the_file_has_every_case(kept: dict[str, Fingerprint]) -> None:
    assert list(kept) == list(plan_fingerprints.all_cases())
    assert len(kept) == 46 * 2 + 4


@pytest.mark.parametrize("names", [FEW[1:], pytest.param(FEW[:1] + MORE, marks=pytest.mark.slow)])
def test_few_plans_are_as_they_were(kept: dict[str, Fingerprint], names: list[str]) -> None:
    if json.loads(FILE.read_text())["versions"] != plan_fingerprints.versions():
        pytest.skip(f"the file is of other versions than {plan_fingerprints.versions()}, which trace other programs")
    found = differences(kept, fingerprints(names))
    assert not found, f"{verdict(found)}: {found}"


def test_differences_are_reported_by_kind(kept: dict[str, Fingerprint]) -> None:
    """Other strategies at the same cost, another cost, another pipeline: each by its own kind."""
    now = copy.deepcopy({name: kept[name] for name in FEW})
    now["mixtral 8"]["strategies"] = "0" * 16
    now["bert 8"]["step_s"] *= 1 + 1e-8
    now["bert 8"]["objective_s"] *= 1 + 1e-10
    now["llama 8"]["hybrid"]["stages"] = 2
    now["resnet 8"]["counted"] = {"I": 1}
    found = [(d.case, d.kind, d.what) for d in differences(kept, now)]
    assert found == [("mixtral 8", "plan", "strategies"), ("bert 8", "cost", "step_s"),
                     ("llama 8", "plan", "hybrid.stages")]
    assert verdict(differences(kept, now)).startswith("1 cases cost something else, 2 have another plan")
    assert [d.what for d in differences({}, now)] == ["case"] * 4


def test_a_strategy_of_one_op_is_enough() -> None:
    case = Case("llama", (8, 16), 8, {"mesh_shape": (8,)})
    plan = case.plan()
    before = plan_fingerprints.fingerprint(case, plan)
    first = next(iter(plan.strategies))
    object.__setattr__(plan, "strategies", {**plan.strategies, first: ("S(1)",)})
    (found,) = differences({"llama": before}, {"llama": plan_fingerprints.fingerprint(case, plan)})
    assert found.what == "strategies" and "S(1)" in found.after


@pytest.mark.slow
def test_the_command_writes_and_compares(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """It exits with 1 where a plan differs, and shows what."""
    import typer

    app = typer.Typer()
    app.command()(plan_fingerprints.main)
    file, run = tmp_path / "kept.json", CliRunner().invoke
    assert run(app, ["bert 8", "--write", str(file)]).exit_code == 0
    assert run(app, ["bert 8", "--compare", str(file)]).exit_code == 0
    data = json.loads(file.read_text())
    data["cases"]["bert 8"]["strategies"] = "another"
    file.write_text(json.dumps(data))
    answer = run(app, ["bert 8", "--compare", str(file)])
    assert answer.exit_code == 1 and "of other ops" in answer.output
    assert run(app, ["brt 8", "--compare", str(file)]).exit_code == 2
    assert run(app, ["bert 8"]).exit_code == 2
