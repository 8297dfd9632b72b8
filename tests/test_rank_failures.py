"""A rank that fails in a call: every rank gets an error soon, which says who failed and why, and none hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import autoparallel
from tests.support.failures import FailsAt
from tests.support.ranks import RankError, RankPool, mesh_of, pool_of

pytestmark = pytest.mark.ranks
SOON_S = 10.0  # process groups time out after 60 s


@pytest.fixture
def four_ranks() -> Iterator[RankPool]:
    """Ranks whose process groups are of no use afterwards."""
    yield pool_of(4)
    pool_of(4).stop()


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def products_of(call: Any) -> int:
    with FailsAt(0) as count:
        call()
    return -count.number


def told(call: Any) -> tuple[str, str, int, float]:
    """The error of a call: its name, what it says with its notes, the rank that it names, after how many seconds."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        return type(error).__name__, text, getattr(error, "rank", -1), time.monotonic() - began
    return "", "", -1, time.monotonic() - began


def one_fails(mesh_shape: tuple[int, ...], options: dict[str, Any], way: str, failing: int, dies: bool = False) -> Any:
    """Two calls of a model, in the first of which a rank fails half way."""
    x, rank = torch.randn(8, 32), torch.distributed.get_rank()
    parallel = autoparallel.compile(Deep(), mesh_of(*mesh_shape), example_inputs=(x,), **options)
    run = (lambda: parallel(x)) if way == "forward" else (lambda: parallel.step(x))
    half = products_of(run) // 2
    assert half > 0 or rank != failing
    with FailsAt(half if rank == failing else 0, dies):
        first = told(run)
    return first, told(run), told(lambda: parallel.step(x[:4]))


CASES_OF_FAILING = [
    ((2, 2), {"baseline": "fsdp", "pipeline_stages": 2, "micro_batches": 4, "schedule": "1f1b"}, "step", 1),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ((4,), {"baseline": "fsdp"}, "step", 1),
        ((4,), {"pipeline_stages": 4, "micro_batches": 4, "schedule": "gpipe"}, "step", 0),
        ((2, 2), {"baseline": "fsdp", "pipeline_stages": 4, "micro_batches": 4, "schedule": "interleaved"}, "step", 0),
        ((2, 2), {"baseline": "fsdp", "pipeline_stages": 4, "micro_batches": 4, "schedule": "zero_bubble"}, "step", 1),
        ((2, 2), {"micro_batches": 2, "zero_stage": 3, "baseline": "fsdp"}, "step", 2),
        ((2, 2), {"baseline": "tensor_parallel"}, "forward", 0),
    ]),
]


@pytest.mark.parametrize(("mesh_shape", "options", "way", "failing"), CASES_OF_FAILING)
def test_a_failed_rank_is_an_error_on_all(four_ranks: RankPool, mesh_shape: tuple[int, ...],
                                          options: dict[str, Any], way: str, failing: int) -> None:
    found = four_ranks.run(one_fails, mesh_shape, options, way, failing, timeout_s=50)
    for rank, (first, *later) in enumerate(found):
        name, text, named, seconds = first
        assert seconds < SOON_S
        assert (name != "PeerError") == (rank == failing) and name, first  # torch's pipelines wrap the one that fails
        assert f"rank {failing} failed" in text and "OutOfMemoryError: no memory for this product" in text, text
        assert "process groups are closed" in text
        assert named == (-1 if rank == failing else failing)
        for name, text, named, seconds in later:
            assert (name, named) == ("PeerError", failing) and seconds < 1
            assert text.startswith(f"rank {failing} failed in an earlier call: OutOfMemoryError: no memory for this")


@pytest.mark.slow
def test_a_dead_rank_is_an_error_on_all(four_ranks: RankPool) -> None:
    options = {"pipeline_stages": 4, "micro_batches": 4, "schedule": "1f1b"}    # by price, rank 0 has all layers
    with pytest.raises(RankError) as error:
        four_ranks.run(told_and_raises, options, timeout_s=50)
    assert error.value.states[0] == "died (exit code 3)"
    rest = [error.value.states[rank] for rank in (1, 2, 3)]
    assert all(state.startswith("raised PeerError: rank 0 failed: ") for state in rest), rest


def told_and_raises(options: dict[str, Any]) -> None:
    first, _, _ = one_fails((4,), options, "step", 0, dies=True)
    raise {"PeerError": autoparallel.errors.PeerError}.get(first[0], lambda text, _: RuntimeError(text))(*first[1:3])


def rows_of(ids: torch.Tensor, bad: int) -> tuple[str, str, int, float]:
    """Rows of a table for a batch, of which one rank's part asks for a row that is not there."""
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8))
    parallel = autoparallel.compile(model, mesh_of(4), example_inputs=(ids,), baseline="fsdp")
    (mine,) = parallel.shard_batch((ids,))
    if torch.distributed.get_rank() == bad:
        mine.to_local()[0, 0] = 99
    return told(lambda: [parallel(mine) for _ in range(2)])  # it may have sent all that the others need of the first


def test_a_bad_batch_on_one_rank_is_an_error_on_all(four_ranks: RankPool) -> None:
    found = four_ranks.run(rows_of, torch.randint(16, (8, 4)), 2)
    assert [name for name, *_ in found] == ["PeerError", "PeerError", "IndexError", "PeerError"], found
    assert all("rank 2 failed" in text and "index out of range" in text for _, text, *_ in found), found


def after_a_failure(failing: int) -> list[tuple[str, str, int, float]]:
    """What each rank is told that compiles or calls another model after a call in which a rank has failed; and whether
    all is well in new process groups."""
    x, rank = torch.randn(8, 32), torch.distributed.get_rank()
    parallel, other, plain = (autoparallel.compile(Deep(), mesh_of(2), example_inputs=(x,)) for _ in range(3))
    with FailsAt(1 if rank == failing else 0):
        told(lambda: parallel(x))
    found = [told(lambda: autoparallel.compile(Deep(), mesh_of(2), example_inputs=(x,))),
             told(lambda: autoparallel.compile(Deep(), 2, example_inputs=(x,))),
             told(lambda: other(x)), told(lambda: plain.step(x[:4]))]
    store = torch.distributed.group.WORLD.get_group_store()  # type: ignore[union-attr]
    torch.distributed.destroy_process_group()
    found.append(told(lambda: other(x)))
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    mesh = init_device_mesh("cpu", (2,))
    return [*found, told(lambda: other(x)), told(lambda: autoparallel.compile(Deep(), mesh, example_inputs=(x,))(x))]


@pytest.fixture
def two_ranks() -> Iterator[RankPool]:
    """Ranks whose process groups are of no use afterwards."""
    yield pool_of(2)
    pool_of(2).stop()


def test_after_a_failure_other_models_are_refused_by_its_name(two_ranks: RankPool) -> None:
    """Whether compiled before or after, until the process groups are made anew (these ended in gloo's own errors)."""
    for *told, gone, old, anew in two_ranks.run(after_a_failure, 1, timeout_s=60):
        for name, text, rank, seconds in told:
            assert (name, rank) == ("PeerError", 1) and seconds < 5, (name, text)
            assert text.startswith("rank 1 failed in an earlier call: OutOfMemoryError: no memory for this product")
            assert "process groups are closed" in text and "init_process_group(...) on all ranks" in text
        for name, text, _, _ in (gone, old):
            assert name == "MeshError" and "have been destroyed since" in text and "compile again" in text, text
        assert anew[0] == "", anew


class Mean(nn.Module):
    """Its output is a shard, for which no rank waits for another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def a_rank_that_has_not_heard() -> tuple[str, str, int, float]:
    """Rank 1 fails in a call in which rank 0 waits for nobody, before rank 0 compiles something."""
    x, rank = torch.randn(8, 32), torch.distributed.get_rank()
    parallel = autoparallel.compile(Mean(), mesh_of(2), example_inputs=(x,), baseline="ddp")
    with FailsAt(1 if rank == 1 else 0):
        own = told(lambda: parallel(x))
    return own if rank == 1 else told(lambda: autoparallel.compile(Deep(), 2, example_inputs=(x,)))


def test_compiling_where_another_rank_has_failed_since(two_ranks: RankPool) -> None:
    (name, text, rank, seconds), own = two_ranks.run(a_rank_that_has_not_heard, timeout_s=60)
    assert own[0] == "OutOfMemoryError" and (name, rank) == ("PeerError", 1) and seconds < SOON_S, text
    assert "OutOfMemoryError: no memory for this product" in text and "process groups are closed" in text


class Interrupted(TorchDispatchMode):
    """Ctrl-C, of which the second rank hears when the first one has failed of it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("mm.default", "addmm.default"):
            time.sleep(torch.distributed.get_rank())
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def interrupted() -> str:
    parallel, x = autoparallel.compile(Mean(), mesh_of(2), example_inputs=(torch.ones(8, 32),)), torch.ones(8, 32)
    try:
        with Interrupted():
            parallel(x)
    except BaseException as error:
        return type(error).__name__
    return ""


def test_ranks_that_are_interrupted_say_so(two_ranks: RankPool) -> None:
    """A script that stops by ``except KeyboardInterrupt`` does so on all ranks: one had a PeerError."""
    assert two_ranks.run(interrupted, timeout_s=60) == ["KeyboardInterrupt"] * 2


def groups_closed_by_hand() -> tuple[str, str, int, float]:
    """Not by a model of ours: a receive that comes too late closes all of gloo's connections."""
    x = torch.randn(8, 32)
    if torch.distributed.get_rank() == 1:
        with suppress(RuntimeError):
            torch.distributed.irecv(torch.empty(1), src=0).wait(timedelta(milliseconds=1))
    return told(lambda: autoparallel.compile(Deep(), mesh_of(2), example_inputs=(x,)))


def test_groups_that_something_else_has_closed(two_ranks: RankPool) -> None:
    for name, text, _, seconds in two_ranks.run(groups_closed_by_hand, timeout_s=60):
        assert name == "MeshError" and seconds < SOON_S, (name, text)
        assert "the ranks do not reach each other" in text and "closed their process groups" in text
        assert "init_process_group(...) on all ranks" in text


def test_a_process_group_whose_store_does_nothing_will_do() -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        x = torch.randn(8, 32)
        parallel = autoparallel.compile(Deep(), init_device_mesh("cpu", (4,)), example_inputs=(x,))
        assert parallel(x).isfinite()
        with FailsAt(1):
            assert told(lambda: parallel(x))[0] == "OutOfMemoryError"
    finally:
        torch.distributed.destroy_process_group()
