"""The page in headless Chromium: the policy lets its script run, nothing is asked of a network; and how quickly the
command line answers. Processes of their own, so in the slow tier."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.test_reports import made

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.parametrize("by_hand", ["dp=4,zero=3", "dp=2,pp=2,micro_batch=2"])
def test_the_page_runs_in_chromium(tmp_path: Path, by_hand: str) -> None:
    assert CHROMIUM is not None
    made(by_hand=by_hand).save_html(tmp_path / "report.html")
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
         f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'report.html'}"],
        capture_output=True, text=True, timeout=120, check=True)
    assert 'class="with-script"' in done.stdout  # the script ran, so its hash is that of the policy
    assert not re.findall(r"CONSOLE.*", done.stderr)
    picture = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=400,800",
         f"--screenshot={tmp_path / 'report.png'}", f"--user-data-dir={tmp_path / 'profile'}",
         f"file://{tmp_path / 'report.html'}"], capture_output=True, timeout=120, check=True)
    assert picture.returncode == 0 and (tmp_path / "report.png").stat().st_size > 10_000


@pytest.mark.parametrize(("words", "limit_s"), [(["--help"], 0.5), (["show", "plan.json"], 1.0)])
def test_the_command_line_answers_quickly(tmp_path: Path, words: list[str], limit_s: float) -> None:
    """The best of five, in processor time: other work on the machine does not count. Neither imports torch."""
    made(by_hand="dp=4,zero=3").save(tmp_path / "plan.json")
    code = ("import sys, time; from autoparallel.cli import app\n"
            f"try: app({words!r})\nexcept SystemExit: pass\n"
            "print(time.process_time(), 'torch' in sys.modules, file=sys.stderr)")
    seconds = []
    for _ in range(5):
        started = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60,
                              check=True, env={"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": ""})
        used, torch_there = done.stderr.split()[-2:]
        assert torch_there == "False" and done.stdout.strip() and time.monotonic() > started
        seconds.append(float(used))
    assert min(seconds) < limit_s
