"""Processes with other hash seeds make the same program, plan and order of collectives of a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.architectures import ARCHITECTURES

FEW_SEEDS, SEEDS = (0, 1), (0, 1, 2)
#: One that loops over sets of names itself, and one with loops over experts.
FEW = ["sets", "mixtral"]


def made_under_seeds(names: list[str], seeds: tuple[int, ...], timeout_s: float) -> list[dict[str, Any]]:
    """What processes with these hash seeds, all at once, make of the models."""
    command = [sys.executable, "-m", "tests.support.hash_seeds", *names]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True,
                                  env={**os.environ, "PYTHONHASHSEED": str(seed)}) for seed in seeds]
    try:
        said = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(seeds)
    return [json.loads(text.splitlines()[-1]) for text in said]


def assert_all_equal(names: list[str], seeds: tuple[int, ...], timeout_s: float) -> None:
    first, *others = made_under_seeds(names, seeds, timeout_s)
    assert list(first) == names
    different = [(name, what) for other in others for name in names for what in first[name]
                 if other[name][what] != first[name][what]]
    assert not different
    assert sum(made["collectives"] > 0 for made in first.values()) > len(names) / 2


@pytest.mark.ranks
def test_few_models_under_two_hash_seeds() -> None:
    assert_all_equal(FEW, FEW_SEEDS, 280.0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_architecture_under_three_hash_seeds() -> None:
    assert_all_equal(list(ARCHITECTURES), SEEDS, 1500.0)
