"""`autoparallel selftest` at a small size: it passes, and a wrong number, a broken part and bad requests show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from autoparallel.cli import app
from autoparallel.errors import AutoparallelError
from autoparallel.selftest import checks, job
from autoparallel.selftest.checks import Check
from autoparallel.selftest.job import Request, _worst, as_page
from tests.support.ranks import mesh_of
from tests.support.tiers import slow


@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.parametrize("minutes", ["0.1", slow("0.5")])
def test_small_models_pass(minutes: str, tmp_path: Path) -> None:
    """Equality, and a rank's failure, with more time also a race and a prediction; JSON and page say the same."""
    asked = ["--ranks", "2", "--minutes", minutes, "--models", "mlp", "--output", str(tmp_path / "self.json")]
    result = CliRunner().invoke(app, ["selftest", *asked])
    assert result.exit_code == 0, result.output
    told = json.loads((tmp_path / "self.json").read_text())
    by_status: dict[str, list[str]] = {}
    for check in told["checks"]:
        by_status.setdefault(check["status"], []).append(f"{check['part']} {check['name']}")
    assert "failure a rank raises in backward" in by_status["passed"] and "failed" not in by_status
    assert len([name for name in by_status["passed"] if name.startswith("equality mlp")]) >= 1
    page = (tmp_path / "self.md").read_text()
    assert all(check["name"] in page for check in told["checks"]) and told["environment"]["ranks"] == 2


class Wrong(nn.Module):
    """Computes other numbers than the model that it stands for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def step(self, **inputs: torch.Tensor) -> torch.Tensor:
        loss = self(**inputs)
        loss.backward()
        return loss

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = 1.001 * self.model(**inputs)
        return loss


def wrong_numbers() -> list[Check]:
    """On a rank: the equality part with a `compile` that makes wrong programs."""
    import autoparallel

    mesh_of(1)
    right = checks.autoparallel
    checks.autoparallel = type("Stub", (), {"compile": staticmethod(  # type: ignore[assignment]
        lambda model, mesh, **options: model if options.get("baseline") == "ddp" else Wrong(model))})
    try:
        return checks.equality("mlp", ("eager",), 60.0)
    finally:
        checks.autoparallel = right
        assert right is autoparallel


@pytest.mark.ranks
def test_wrong_numbers_fail(ranks: object) -> None:
    (found,) = ranks(1).run(wrong_numbers)                        # type: ignore[operator]
    right = [way.options.get("baseline") == "ddp" and not way.options.get("cuda_graphs")    # it records nothing
             for way in checks.ways(1).values()]
    assert [check.status for check in found] == ["passed" if one else "failed" for one in right] and not all(right)


def test_the_page_shows_failures_first() -> None:
    passed, failed = (Check("equality", "x", status, "a|b", {}, 1.0) for status in ("passed", "failed"))
    page = as_page([passed, failed], {"ranks": 4, "gpus": []})
    assert page.index("## Failed") < page.index("## Passed") and "a\\|b" in page and "gpus" not in page
    assert _worst([passed, failed]) is failed and _worst([passed, passed]) is passed


def test_no_processes_are_started_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("autoparallel.launch.local.launch", refuse)
    (found,) = job._on_local_ranks(2, "cpu")(checks.equality, "mlp", ("eager",), 0.0)
    assert (found.part, found.name, found.status, found.text) == ("equality", "mlp", "skipped", "no time left")


@pytest.mark.parametrize(("request_", "said"), [
    ({"models": ("resnet",)}, "unknown model 'resnet'; there are mlp, images"),
    ({"ranks": 1}, "at least two processes"), ({"backends": ("tpu",)}, "unknown backend 'tpu'"),
    ({"minutes": 0.0}, "--minutes 0.0: give a positive number")])
def test_requests_are_checked(request_: dict[str, object], said: str) -> None:
    with pytest.raises(AutoparallelError, match=said):
        Request(**{"ranks": 2, "minutes": 1.0, **request_})       # type: ignore[arg-type]
