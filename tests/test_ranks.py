"""The pool of ranks itself: it computes, it reports, it never hangs, and it recovers."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support import ranks as ranks_module
from tests.support.ranks import MAX_GROUPS, RankError, RankPool, RankTimeoutError, mesh_of

Ranks = Callable[[int], RankPool]


def sum_of_ranks(offset: int = 0) -> torch.Tensor:
    value = torch.full((2,), float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return value


def row_sums() -> torch.Tensor:
    rows = distribute_tensor(torch.arange(30.0).reshape(10, 3), mesh_of(2, 2), [Shard(0), Shard(1)])
    return rows.sum(dim=1).full_tensor()


def fail_on(rank: int) -> None:
    print(f"about to meet, I am {dist.get_rank()}")
    if dist.get_rank() == rank:
        raise LookupError("no such thing")
    dist.barrier()


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1000)
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def process_id() -> int:
    return os.getpid()


def is_preloaded() -> bool:
    return "tests.support.preloaded" in sys.modules


def returned(value: object) -> object:
    return value


def returned_dtensor() -> object:
    return distribute_tensor(torch.zeros(4), mesh_of(2), [Shard(0)])


def drawn() -> torch.Tensor:
    return torch.rand(3)


def many_groups() -> None:
    for _ in range(MAX_GROUPS + 1):
        dist.new_group()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_collectives(ranks: Ranks, num_ranks: int) -> None:
    expected = float(sum(range(num_ranks)) + num_ranks)
    for result in ranks(num_ranks).run(sum_of_ranks, offset=1):
        assert torch.equal(result, torch.full((2,), expected))


def test_meshes_of_dtensors(ranks: Ranks) -> None:
    for result in ranks(4).run(row_sums):
        assert torch.equal(result, torch.arange(30.0).reshape(10, 3).sum(dim=1))


def test_processes_are_reused(ranks: Ranks) -> None:
    first = ranks(4).run(process_id)
    assert ranks(4).run(process_id) == first
    assert len(set(first)) == 4


def test_ranks_have_all_imports_of_the_fork_server(ranks: Ranks) -> None:
    """A preload that fails at an import is dropped without a word, and each rank then imports all that it uses."""
    assert all(ranks(2).run(is_preloaded))


def test_every_job_starts_with_the_same_seed(ranks: Ranks) -> None:
    a, b = ranks(2).run(drawn)
    assert torch.equal(a, b)
    assert torch.equal(a, ranks(2).run(drawn)[0])


def test_failing_rank_is_reported_while_the_others_wait(ranks: Ranks) -> None:
    ranks(4).run(sum_of_ranks)
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 2 of 4 raised LookupError: no such thing") as caught:
        ranks(4).run(fail_on, 2)
    assert time.monotonic() - start < 10
    error = caught.value
    assert (error.rank, error.exception_type, error.stuck) == (2, "LookupError", [0, 1, 3])
    assert "in fail_on" in error.traceback
    assert "dist.barrier" not in error.traceback
    assert "barrier" in str(error)  # where the others wait
    assert "about to meet, I am 3" in str(error)
    assert ranks(4).run(sum_of_ranks)[0][0] == 6


def test_all_ranks_failing_equally(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="TypeError") as caught:
        ranks(2).run(sum_of_ranks, "two")
    assert caught.value.stuck == []
    assert ranks(2).run(sum_of_ranks)[0][0] == 1


def test_hang_ends_at_the_limit_and_says_where(ranks: Ranks) -> None:
    start = time.monotonic()
    with pytest.raises(RankTimeoutError, match="no answer in 3 s") as caught:
        ranks(4).run(sleep_on, 1, timeout_s=3)
    assert time.monotonic() - start < 10
    assert caught.value.stuck == [0, 1, 2, 3]
    assert "in sleep_on" in str(caught.value)
    assert ranks(4).run(sum_of_ranks)[0][0] == 6


def test_dead_rank(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 4 died \(exit code 7\)") as caught:
        ranks(4).run(die_on, 1)
    assert (caught.value.rank, caught.value.exception_type) == (1, "ProcessDied")
    assert ranks(4).run(sum_of_ranks)[0][0] == 6


def test_output_of_ranks_reaches_the_test(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(2).run(print, "hello")
    assert capsys.readouterr().out == "[rank 0] hello\n[rank 1] hello\n"


def test_jobs_and_results_must_travel(ranks: Ranks) -> None:
    with pytest.raises(TypeError, match="module-level function"):
        ranks(2).run(lambda: None)
    with pytest.raises(RankError, match="full_tensor"):
        ranks(2).run(returned_dtensor)
    a, _ = ranks(2).run(returned, {"w": torch.nn.Parameter(torch.ones(3)), "n": (1, "x")})
    assert torch.equal(a["w"], torch.ones(3))
    assert a["n"] == (1, "x")


def test_at_most_two_pools_are_alive(ranks: Ranks) -> None:
    first = ranks(2).run(process_id)
    for num_ranks in (1, 3):
        ranks(num_ranks).run(process_id)
    assert len(ranks_module._alive) == 2
    assert set(ranks(2).run(process_id)).isdisjoint(first)


def test_pool_restarts_when_jobs_have_piled_up_groups(ranks: Ranks) -> None:
    first = ranks(2).run(process_id)
    ranks(2).run(many_groups)
    assert set(ranks(2).run(process_id)).isdisjoint(first)
