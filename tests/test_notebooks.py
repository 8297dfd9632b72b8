"""The notebooks run from top to bottom in a fresh process, and are stored without outputs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
LIMIT_S = 180
#: Executes the code cells in order in one namespace; a traceback names the cell. What is asked for is the last line.
RUNNER = """
import json, sys, nbformat

if __name__ == "__main__":
    names = {"__name__": "notebook"}
    code = [cell.source for cell in nbformat.read(sys.argv[1], as_version=4).cells if cell.cell_type == "code"]
    for number, source in enumerate(code, 1):
        exec(compile(source, f"<code cell {number}>", "exec"), names)
    print(json.dumps(eval(sys.argv[2], names)))
"""


def run_notebook(path: Path, asked: str, folder: Path) -> Any:
    """Runs the cells without a Jupyter kernel and returns the value of the expression ``asked`` after the last one."""
    script = folder / "run_cells.py"
    script.write_text(RUNNER)
    done = subprocess.run(
        [sys.executable, str(script), str(path), asked], capture_output=True, text=True, timeout=LIMIT_S, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_stored_without_outputs(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.ranks
@pytest.mark.timeout(LIMIT_S + 30)
def test_quickstart(tmp_path: Path) -> None:
    found = run_notebook(
        Path(__file__).parent.parent / "notebooks" / "quickstart.ipynb",
        """{
            "chosen_s": plan.prediction.step_s, "pinned_s": pinned.prediction.step_s, "ddp_s": ddp.prediction.step_s,
            "gap": plan.evidence.gap, "same": loaded == plan, "pins": len(pinned.pins), "diff": plan.diff(pinned),
            "one": losses, "two": measured.losses, "parameter_error": measured.parameter_error,
        }""",
        tmp_path,
    )
    assert 0 < found["chosen_s"] <= min(found["pinned_s"], found["ddp_s"]) * (1 + 1e-9)
    assert 0 <= found["gap"] <= 0.05  # of the plan that is faster with overlap, by its cost without
    assert found["same"] and found["pins"] == 2 and "down_proj" in found["diff"]
    assert found["two"] == pytest.approx(found["one"], rel=1e-5)
    assert found["one"][-1] < found["one"][0]
    assert found["parameter_error"] < 1e-4


#: What must hold after the last cell of each of the other notebooks.
HOLDS = {
    "read-a-plan": "plan.prediction.step_s <= ddp.prediction.step_s * (1 + 1e-9) and len(choices) > 1 "
                   "and len(list(folder.iterdir())) == 3",
    "your-own-model-and-loop": "losses[-1] < losses[0] and log.last.steps == 11 and len(profile.comparison.rows) > 2",
    "pins-and-by-hand": "len(pinned.pins) > 0 and 'must be that' in refused "
                        "and plan.prediction.step_s <= hands['dp=2,tp=4'].prediction.step_s",
    "pipelines-and-memory": "best.prediction.peak_bytes <= 2 * GIB and "
                            "schedules['1f1b'].prediction.peak_bytes < schedules['gpipe'].prediction.peak_bytes",
    "a-cluster-of-your-own": "slow_plan.prediction.step_s >= fast_plan.prediction.step_s and len(slow.links) == 2",
    "from-plan-to-megatron-or-torchtitan": "again.hybrid.zero_stage == plan.hybrid.zero_stage "
                                           "and all(made.files for made in exported.values())",
    "how-the-search-proves-its-answer": "found.objective == best and e.lower_bound_s <= e.objective_s * (1 + 1e-9)",
}


def test_every_notebook_is_run() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"quickstart", *HOLDS}


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("name", HOLDS)
def test_notebooks_compute_what_they_say(name: str, tmp_path: Path) -> None:
    assert run_notebook(Path(__file__).parent.parent / "notebooks" / f"{name}.ipynb", f"bool({HOLDS[name]})", tmp_path)


@pytest.mark.ranks
def test_a_failing_cell_is_named(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in ("a = 1", "a / 0")])
    nbformat.write(notebook, tmp_path / "broken.ipynb")
    with pytest.raises(AssertionError, match="<code cell 2>"):
        run_notebook(tmp_path / "broken.ipynb", "a", tmp_path)
