"""HiGHS's process: one for each thread, and none is left when the process that asked ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from autoparallel.search import evaluate, solve
from tests.search.problems import random_problem

ROOT = Path(__file__).parents[2]


def test_threads_get_the_answers_to_their_own_problems() -> None:
    problems = [random_problem(seed, limited=True, max_nodes=6) for seed in range(24)]

    def cost(number: int) -> float:
        try:
            return evaluate(problems[number], solve(problems[number], "ilp").choice).objective
        except ValueError:  # nothing fits
            return -1.0

    expected = [cost(n) for n in range(24)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(cost, range(24)))
    assert found == pytest.approx(expected)
    assert len(set(expected)) > 10


def _is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.ranks
@pytest.mark.skipif(not Path("/proc").exists(), reason="Linux's /proc tells which processes there are")
def test_a_killed_planner_leaves_no_process() -> None:
    code = """
        import time
        from autoparallel.search import solve
        from autoparallel.search.ilp import highs
        from tests.search.problems import random_problem
        for seed in range(100):
            try:
                solve(random_problem(seed, limited=True, max_nodes=6), "ilp")
            except ValueError:  # nothing fits
                continue
            if highs._process._running is not None:
                break
        print(highs._process._running.pid, flush=True)
        time.sleep(60)
        """
    asker = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert asker.stdout is not None
        helper = int(asker.stdout.readline())
        assert _is_there(helper)
    finally:
        os.kill(asker.pid, signal.SIGKILL)
        asker.wait()
    ends = time.monotonic() + 10
    while _is_there(helper) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not _is_there(helper)
