"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support.processes import started
from tests.support.ranks import RankPool, pool_of, stop_pools

if TYPE_CHECKING:
    from autoparallel import Plan

# Bytecode is written: without it both workers, and each process that a test starts, compile all modules anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tiny models gain nothing from threads, and on a busy machine lose tenfold: OpenMP's threads wait for each other.
torch.set_num_threads(1)
# One example may take long on a busy machine; what takes too long altogether has a time limit of its own.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


#: Most processes in which a tier runs at once, by its expression of marks; those of `ranks` have a pool of ranks each.
MOST_WORKERS = {"not slow and not ranks": 4, "ranks and not slow": 2}
#: After so many tests the collector leaves out what lives: modules that they import, and what they share.
LEFT_OUT_EACH = 10
_tests = itertools.count(1)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A whole tier runs on all processors; chosen tests, and the slow ones, run one by one."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.getoption("usepdb")
    return min(MOST_WORKERS.get(config.getoption("markexpr"), 0), os.cpu_count() or 1) if whole else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that run on several processes are of the tier `ranks`."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)


def pytest_collection_finish() -> None:
    """Tests leave little garbage, so that the collector looks rarely. `test_garbage.py` has it as it is for users."""
    gc.set_threshold(10_000, 20, 20)
    leave_out()


def leave_out() -> None:
    """The collector looks no more at what lives now: imports alone make 400,000 objects, and a parallel module collects
    garbage at its second call, which took longer than all else of many a test."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    if next(_tests) % LEFT_OUT_EACH == 0:
        leave_out()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test of the default tier that starts a process fails. Joint searches make none there, which changes no plan."""
    if any(item.get_closest_marker(tier) for tier in ("ranks", "slow")):
        return (yield)
    with started() as found, patch("autoparallel.planning.beside.may_fork", return_value=False):
        result = yield
    if found:
        pytest.fail(f"started {found}: a test that starts processes is of the tier `ranks` or `slow`; mark it so")
    return result


@pytest.fixture(scope="session")
def plans() -> dict[str, Plan]:
    """Plans of a small transformer by name (`tests.support.reported.NAMES`), for reports."""
    from tests.support.reported import plans_by_name

    return plans_by_name()


@pytest.fixture(scope="module")
def mesh_of_one() -> Iterator[DeviceMesh]:
    """A mesh of this process alone, with its process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """ranks(4).run(function, *args): run on 4 ranks; the pools live through the session."""
    yield pool_of
    stop_pools()
