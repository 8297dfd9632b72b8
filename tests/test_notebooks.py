"""The notebooks run from top to bottom, and are stored without outputs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
CHECK = """
if __name__ == "__main__":
    assert plan.prediction.step_s <= min(pinned.prediction.step_s, ddp.prediction.step_s) * (1 + 1e-9)
    assert plan.evidence.gap <= 1e-3
    assert max(abs(a - b) for a, b in zip(losses, measured.losses)) < 1e-4
    print("checked")
"""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_cells_run(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells), "store notebooks without outputs"
    body = "\n\n".join(cell.source for cell in cells)
    indented = "\n".join("    " + line for line in body.splitlines())
    script = tmp_path / "notebook.py"
    script.write_text(f'if __name__ == "__main__":\n{indented}\n{CHECK}')
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("checked")
