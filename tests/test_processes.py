"""The default tier's guard: processes that a test starts are noted, however it starts them."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import pytest

from tests.support.processes import started


@pytest.mark.ranks
def test_processes_are_noted_however_they_start() -> None:
    with started() as found:
        assert subprocess.run([sys.executable, "-c", "print(3)"], capture_output=True, text=True).stdout == "3\n"
        process = multiprocessing.get_context("spawn").Process(target=abs, args=(1,), name="spawned")
        process.start()
        process.join()
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
    assert process.exitcode == 0
    assert ["print(3)" in found[0], *found[1:]] == [True, "spawned", "os.fork()"]


@pytest.mark.ranks
def test_the_solvers_process_is_part_of_planning() -> None:
    with started() as found:
        subprocess.run([sys.executable, "-c", "", "highs_worker.py"], check=True)
    assert not found
