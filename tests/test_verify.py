"""`parallel.verify`: predicted beside measured steps, what it leaves alone, and what the correction is worth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import autoparallel
from autoparallel.cli import app
from autoparallel.errors import InputError
from autoparallel.plans import Prediction
from autoparallel.plans.plan import CollectiveUse
from autoparallel.runtime.measured import Calls
from autoparallel.runtime.verify import Measured, Verification
from cost_models import Cluster, ClusterError, Correction
from tests.support.models import CASES
from tests.support.ranks import mesh_of


def prediction(**changes: Any) -> Prediction:
    plain = Prediction(forward_s=1.0, backward_s=2.0, optimizer_s=0.5, forward_communication_s=0.5,
                       backward_communication_s=1.0, state_bytes=1.0, activation_bytes=1.0, peak_bytes=2.0)
    return replace(plain, **changes)


def test_a_correction_brings_the_parts_to_what_was_measured() -> None:
    cluster = Cluster.load("h100-sxm", software="none")
    uses = tuple(CollectiveUse("all_reduce", "dp", "backward", 3, 1.0, 0.8, purpose)
                 for purpose in ("gradients", "activations"))
    found = Verification(prediction(collectives=uses, hidden_s=0.2),
                         Measured(8.0, 6.0, 2.0, None, {"all_reduce": Calls(3, 1.9, 1.5)}, (7, 9)), cluster)
    assert found.error == pytest.approx(4.3 / 8.0 - 1)
    assert tuple(vars(found.correction).values()) == pytest.approx((2.0, 2.0 / 1.3, 0.0))
    told = {line[:46].strip(): line[46:].split() for line in str(found).split("\n")}
    assert told["exposed all_reduce (3 calls)"] == ["1.4", "1.5"] and told["compute"] == ["3", "6"]
    assert told["bubbles, sends, waits, host"] == ["0", "0.5"] and "by rank: 7 9" in str(found)


def test_waits_in_a_pipeline_are_compute_of_others() -> None:
    found = Verification(prediction(waiting_s=1.0, forward_communication_s=0.0, backward_communication_s=0.1),
                         Measured(8.2, 6.0, 2.2, None, {}), Cluster.load("local-cpu"), pipeline_ranks=2)
    assert tuple(vars(found.correction).values()) == pytest.approx((2.0, 2.0, 0.0))


def test_parts_beyond_the_step_shrink_in_proportion() -> None:
    found = Verification(prediction(), Measured(3.0, 3.0, 0.0, None, {}), Cluster.load("local-cpu"))
    assert found.correction.compute == 1.0 and found.correction.communication == 1e-3
    assert "at its limit" in str(found)


def test_a_correction_slows_compute_and_communication(tmp_path: Path) -> None:
    plain = Cluster.load("h100-sxm", num_devices=4, software="none")
    slow = replace(plain, correction=Correction(2.0, 3.0, 0.25))
    x, model = torch.zeros(4096, 4096), torch.nn.Linear(4096, 4096)
    before, after = (autoparallel.plan(model, machine, example_inputs=(x,), mesh_shape=(4,), baseline="fsdp").prediction
                     for machine in (plain, slow))
    assert after.forward_s == pytest.approx(2 * before.forward_s, rel=0.01)
    assert after.forward_communication_s == pytest.approx(3 * before.forward_communication_s, rel=0.05)
    assert after.fixed_s == 0.25
    path = tmp_path / "slow.toml"
    Verification(prediction(), Measured(8.0, 6.0, 2.0, None, {}), slow).save(path)
    assert Cluster.load(path, num_devices=4).correction.compute == pytest.approx(4.0)


def test_a_correction_ranks_plans_anew() -> None:
    """FSDP's messages cost no more than its smaller optimizer saves, until communication is slower."""
    plain = Cluster.load("h100-sxm", num_devices=4, software="none")
    with torch.device("meta"):
        x, layers = torch.zeros(1024, 4096), [torch.nn.Linear(4096, 4096) for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    fastest = [min(("ddp", "fsdp"), key=lambda name, machine=machine: autoparallel.plan(    # type: ignore[misc]
        model, machine, example_inputs=(x,), mesh_shape=(4,), baseline=name).prediction.step_s)
        for machine in (plain, replace(plain, correction=Correction(1.0, 20.0, 0.0)))]
    assert fastest == ["fsdp", "ddp"]


def test_the_command_takes_a_plan_and_a_model() -> None:
    refused = CliRunner().invoke(app, ["verify", "a.json", "b.json", "--", "model.json"])
    assert isinstance(refused.exception, InputError) and "one plan and one model" in str(refused.exception)


FACTORY = """
import torch
def small(batch, tokens):
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 1), Mean()), (torch.zeros(batch, 32),), {}
class Mean(torch.nn.Module):
    def forward(self, x):
        return x.mean()
"""


@pytest.mark.ranks
def test_the_command_prints_and_writes_the_correction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_factory.py").write_text(FACTORY)
    said = ["--global-batch", "8"]
    calls = (["plan", "a_factory:small", "--devices", "2", "--cluster", "local-cpu", "--output", "plan.json", *said],
             ["verify", "plan.json", "--steps", "2", "--output", "fixed.toml", *said, "--",
              "a_factory:small"])
    for call in calls:
        found = CliRunner().invoke(app, call)
        assert found.exit_code == 0, (found.output, found.exception)
    alone = CliRunner().invoke(app, ["verify", "--ranks", "1", "--steps", "2", *said, "a_factory:small"])
    assert alone.exit_code == 0, (alone.output, alone.exception)
    told = found.output + capfd.readouterr().out
    assert "forward and backward" in told and "bubbles, sends, waits, host" in told and "optimizer" in told
    assert Cluster.load("fixed.toml", num_devices=2).correction != Correction()


@pytest.mark.parametrize("change", [{"compute": 0.0}, {"communication": 1e4}, {"fixed_s": -1.0}])
def test_impossible_corrections_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ClusterError, match="correction"):
        Correction(**change)


def verified(path: str) -> tuple[float, float, bool]:
    """The prediction's error before one correction and after it, against the same measurement (other work on the
    machine would change another); and whether gradients, buffers and run state stayed."""
    case, mesh = CASES["llama"], mesh_of(4)
    args, kwargs = case.inputs(8)

    def compiled(cluster: str) -> autoparallel.ParallelModule:
        return autoparallel.compile(case.build(), mesh, example_inputs=args, example_kwargs=kwargs, baseline="ddp",
                                    cluster=cluster)

    parallel = compiled("local-cpu")
    parallel.step(*args, **kwargs)
    gradients, state = [p.grad.to_local().clone() for p in parallel.parameters()], parallel.run_state()
    found = parallel.verify(*args, steps=5, **kwargs)
    same = all(torch.equal(p.grad.to_local(), g) for p, g in zip(parallel.parameters(), gradients, strict=True))
    if torch.distributed.get_rank() == 0:
        found.save(path)
    torch.distributed.barrier()
    again = replace(found, predicted=compiled(path).plan.prediction)
    return abs(found.error), abs(again.error), same and parallel.run_state() == state


def test_one_correction_halves_the_error(ranks: Any, tmp_path: Path) -> None:
    for before, after, same in ranks(4).run(verified, str(tmp_path / "corrected.toml")):
        assert same
        assert after <= 0.5 * before, (before, after)


def test_options_after_the_dashes_are_named() -> None:
    result = CliRunner().invoke(app, ["verify", "plan.json", "--", "train:job", "--ranks", "2"])
    assert isinstance(result.exception, InputError) and "--ranks stands after --" in str(result.exception)


def test_a_config_file_that_is_missing_is_told_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoparallel.launch.local.launch", lambda *_: pytest.fail("ranks were started"))
    result = CliRunner().invoke(app, ["verify", "no_such_config.json"])
    assert isinstance(result.exception, InputError) and "no_such_config.json: No such file" in str(result.exception)


@pytest.mark.ranks
def test_an_error_of_ours_on_a_local_rank_is_one_message() -> None:
    """Not the traceback of a process: `main` tells it with exit code 2."""
    result = CliRunner().invoke(app, ["verify", "no_such_module:job", "--ranks", "2"])
    assert isinstance(result.exception, InputError) and "no_such_module:job" in str(result.exception)
