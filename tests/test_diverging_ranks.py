"""Ranks that make different calls, and ranks that end or are stopped: told on all ranks, by the rank at fault."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

import autoparallel
from tests.support.failures import Loss, said
from tests.support.ranks import RankPool, mesh_of, pool_of

LIMIT_S = 3.0


@pytest.fixture
def four_ranks() -> Iterator[RankPool]:
    yield pool_of(4)
    pool_of(4).stop()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.Linear(32, 32))


def different_calls() -> list[tuple[str, str, int, float]]:
    rank, x = torch.distributed.get_rank(), torch.randn(8, 32)
    parallel = autoparallel.compile(net(), mesh_of(4), example_inputs=(x,), baseline="fsdp", check_inputs=0)
    other = autoparallel.compile(net(), mesh_of(4), example_inputs=(x,), baseline="ddp", check_inputs=0)
    found = [said(lambda: parallel(x if rank != 1 else x[:4])),
             said(lambda: parallel(x if rank != 2 else x.double())),
             said(lambda: parallel.train(rank != 3)(x))]
    parallel.train()
    with torch.set_grad_enabled(rank != 0):
        found.append(said(lambda: parallel(x)))
    found.append(said(lambda: parallel(x) if rank != 1 else parallel.clip_grad_norm_(1.0)))
    found.append(said(lambda: (parallel if rank != 2 else other)(x)))
    parallel.get_submodule("1").p = 0.3 if rank == 3 else 0.1
    found.append(said(lambda: parallel(x)))
    parallel.get_submodule("1").p = 0.1
    return [*found, said(lambda: parallel(x).square().mean().backward())]


@pytest.mark.ranks
def test_different_calls_are_refused_on_all_ranks_and_nothing_is_closed(four_ranks: RankPool) -> None:
    """Shape, dtype, mode, gradients, method, model, attribute (they ended the processes: SIGABRT of gloo)."""
    expected = [r"forward\(float32\[4, 32\]\) in train mode on rank 1; ",
                r"forward\(float64\[8, 32\]\) in train mode on rank 2; ",
                r"forward\(float32\[8, 32\]\) in eval mode on rank 3; ",
                r"forward\(float32\[8, 32\]\) under no_grad in train mode on rank 0; ", "clip_grad_norm_ on rank 1; ",
                r" of model \d+ on rank 2; ", "where 1.p was 0.1 and is 0.3 on rank 3; "]
    for *found, after in four_ranks.run(different_calls, timeout_s=60):
        for (name, text, _, _), part in zip(found, expected, strict=True):
            assert name == "InputError" and "nothing was sent or changed" in text, (name, text)
            assert re.search(part, text), (part, text)
        assert after[0] == "", after


def different_first_calls() -> list[tuple[str, str, int, float]]:
    """Before the model is traced."""
    rank, x = torch.distributed.get_rank(), torch.randn(8, 32)
    first, second = (autoparallel.compile(Loss(), mesh_of(2), baseline="fsdp", check_inputs=0) for _ in range(2))
    return [said(lambda: first(x if rank == 0 else x[:4])),
            said(lambda: second(x) if rank == 0 else second.step(x))]


@pytest.mark.ranks
def test_first_calls_that_differ_are_told_by_the_method_that_was_called(ranks: Any) -> None:
    """(A forward was told as step.)"""
    for shapes, methods in ranks(2).run(different_first_calls, timeout_s=60):
        assert "step(" not in shapes[1] and "forward(float32[4, 32]) in train mode on rank 1" in shapes[1], shapes
        assert "forward(" in methods[1] and "step(" in methods[1] and methods[0] == "InputError", methods


def other_batches() -> list[tuple[str, str, int, float]]:
    """Calls with batches of which rank 1 has sharded, or read, one more, or other values; and one with equal ones."""
    rank, x = torch.distributed.get_rank(), torch.randn(24, 32)
    parallel = autoparallel.compile(net(), mesh_of(2), example_inputs=(x[:8],), baseline="fsdp")
    found = [said(lambda: parallel(*parallel.shard_batch((x[8 * rank :][:8],))))]
    loader = iter(parallel.dataloader(torch.utils.data.TensorDataset(x), 8))
    for more in (rank, 0):
        batch = [next(loader) for _ in range(more + 1)][-1]
        found.append(said(lambda batch=batch: parallel(*batch)))  # type: ignore[misc]
    found.append(said(lambda: parallel(*parallel.shard_batch((x[:8],))).square().mean().backward()))
    for _ in range(rank):
        parallel.shard_batch((x[:8],))
    return [*found, said(lambda: parallel(*parallel.shard_batch((x[:8],))))]


@pytest.mark.ranks
def test_a_rank_with_another_batch_is_told(ranks: Any) -> None:
    """(It took its shard of what it had: wrong numbers.)"""
    for values, ahead, behind, equal, once_more in ranks(2).run(other_batches):
        assert re.search("of batch 1 of shard_batch with values [0-9a-f]+ in train mode on rank 1", values[1]), values
        assert "inputs=\"local\"" in values[1]
        assert "of batch 1 of loader 1 in train mode on rank 0; " in ahead[1], ahead
        assert "of batch 3 of loader 1 in train mode on rank 1" in behind[1], behind
        assert equal[0] == "", equal
        assert "of batch 4 of shard_batch in train mode on rank 1" in once_more[1], once_more


def refused_before(call: Callable[[Any], Any]) -> list[tuple[str, str, int, float]]:
    """A call that rank 1 makes where the others make one of which it alone was refused its own; and the call after."""
    torch.manual_seed(0)                                     # rank 1 may have drawn more numbers
    rank, x = torch.distributed.get_rank(), torch.randn(8, 32)
    parallel = autoparallel.compile(net(), mesh_of(4), example_inputs=(x,), baseline="fsdp")
    if rank == 1:
        bias = parallel.get_submodule("0").bias
        parallel.get_submodule("0").bias = nn.Parameter(torch.zeros(32))
        assert "0.bias was replaced" in said(lambda: parallel(x))[1]
        parallel.get_submodule("0").bias = bias
    return [said(lambda: call(parallel) if rank == 1 else parallel(x)),
            said(lambda: parallel(x).square().mean().backward())]


def one_is_refused() -> list[list[tuple[str, str, int, float]]]:
    return [refused_before(call) for call in (
        lambda parallel: parallel.load_state_dict(net().state_dict()), lambda parallel: parallel(torch.randn(8, 32)),
        lambda _: autoparallel.compile(net(), mesh_of(4), baseline="ddp"))]


@pytest.mark.ranks
def test_a_rank_that_is_refused_alone_and_goes_on_is_told_with_the_others(four_ranks: RankPool) -> None:
    """The others compare their call, it the next one's inputs or the next call (they raised errors of Python, which
    closed the groups)."""
    for found in four_ranks.run(one_is_refused, timeout_s=60):
        for here, after in found:
            assert here[0] == "InputError" and "ranks make different calls: " in here[1], here
            assert after[0] == "", after


class Counted(nn.Module):
    """Batch norm and dropout, after ``op``."""

    def __init__(self, op: Any = None) -> None:
        super().__init__()
        self.layers, self.op = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.1)), op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x if self.op is None else self.op(x))
        return x.square().mean()


def compares_beside(sharded: bool) -> list[Any]:
    """A call that is late on rank 1, with seconds to the first product and to the end; then one that differs there.
    ``sharded``: its argument is a DTensor that lies as the program reads it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    rank, x, began = torch.distributed.get_rank(), torch.randn(8, 32), 0.0
    products: list[float] = []
    parallel = autoparallel.compile(Counted(), mesh_of(2), example_inputs=(x,), baseline="ddp", check_inputs=0)
    x = parallel.shard_batch((x,))[0] if sharded else x
    parallel.step(x)

    class Timed(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
                products.append(time.perf_counter() - began)
            return func(*args, **(kwargs or {}))

    torch.distributed.barrier()
    began = time.perf_counter()
    time.sleep(rank)
    with Timed():
        parallel.step(x)
    seconds = time.perf_counter() - began
    before = [{n: b.clone() for n, b in parallel.named_buffers()}, parallel.run_state()]
    told = said(lambda: parallel.train(rank == 0).step(x))
    parallel.train()
    after = [dict(parallel.named_buffers()), parallel.run_state()]
    same = before[1] == after[1] and all(torch.equal(before[0][n], b) for n, b in after[0].items())
    return [products[0], seconds, told, same, said(lambda: parallel.step(x))[0]]


@pytest.mark.ranks
@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_compare_a_call_beside_its_computation_and_before_its_first_collective(ranks: Any, sharded: bool) -> None:
    """A call that differs changes no buffer and no count of calls."""
    for rank, (product_s, seconds, told, same, after) in enumerate(ranks(2).run(compares_beside, sharded)):
        assert seconds > 1.0 and (rank == 1 or product_s < 0.5), (product_s, seconds)
        assert told[0] == "InputError" and "in eval mode on rank 1" in told[1], told
        assert same and after == ""


@torch.library.custom_op("tests::told", mutates_args=())
def told_op(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


told_op.register_fake(torch.empty_like)


def computes_first(users: bool) -> bool:
    x = torch.randn(8, 32)
    model = Counted(torch.ops.tests.told if users else torch.relu)
    parallel = autoparallel.compile(model, mesh_of(2), example_inputs=(x,), baseline="ddp", check_inputs=0)
    return parallel.trace((x,)).sends_by_kernels


@pytest.mark.ranks
def test_ops_of_other_libraries_run_after_the_comparison(ranks: Any) -> None:
    """They may communicate in their own way."""
    assert ranks(2).run(computes_first, False) == [True, True]
    assert ranks(2).run(computes_first, True) == [False, False]


def loses_one(guilty: int, number: int, way: str, options: dict[str, Any]) -> Any:
    """Steps, until rank ``guilty`` receives a signal from itself, at op ``number``."""
    from tests.support.failures import FailsAt

    rank, x = torch.distributed.get_rank(), torch.randn(8, 32)
    parallel = autoparallel.compile(Loss(), mesh_of(*options.pop("mesh")), example_inputs=(x,), peer_timeout_s=LIMIT_S,
                                    check_inputs=0, **options)

    class Signalled(FailsAt):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.number -= 1
            if self.number == 0:
                os.kill(os.getpid(), getattr(signal, way))
            return func(*args, **(kwargs or {}))

    with Signalled(number if rank == guilty else 0):
        backward = options.get("pipeline_stages", 1) == 1 and number % 2
        return said(lambda: [parallel(x).backward() if backward else parallel.step(x) for _ in range(20)])


CASES = [
    ((4,), {"baseline": "fsdp"}, "SIGKILL", 1, 121),
    ((4,), {"baseline": "fsdp"}, "SIGSTOP", 2, 130),
    ((2, 2), {"baseline": "fsdp", "pipeline_stages": 2, "micro_batches": 4, "schedule": "1f1b"}, "SIGKILL", 3, 50),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ((4,), {"baseline": "fsdp"}, "SIGKILL", 0, 40),
        ((4,), {"baseline": "ddp"}, "SIGSTOP", 0, 51),
        ((4,), {"pipeline_stages": 4, "micro_batches": 4, "schedule": "gpipe"}, "SIGSTOP", 1, 20),
        ((2, 2), {"pipeline_stages": 4, "micro_batches": 4, "schedule": "zero_bubble"}, "SIGKILL", 2, 33)])]


@pytest.mark.ranks
@pytest.mark.parametrize(("mesh", "options", "way", "guilty", "number"), CASES)
def test_a_rank_that_is_killed_or_stopped_is_named(four_ranks: RankPool, mesh: tuple[int, ...],
                                                   options: dict[str, Any], way: str, guilty: int, number: int) -> None:
    """(A survivor was named, or nobody for half an hour.) Also in a backward that the user calls."""
    found = four_ranks.run_losing(guilty, loses_one, guilty, number, way, {"mesh": mesh, **options}, timeout_s=40)
    for rank, told in enumerate(found):
        if rank != guilty:
            name, text, named, seconds = told
            assert (name, named) == ("PeerError", guilty) and seconds < 20, told
            assert "its process has ended or is stopped" in text, text


def one_does_not_come() -> tuple[str, str, int, float]:
    """Rank 1 lives on and makes no call, as after an error of the script that is caught."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    from autoparallel.runtime import failing

    x = torch.randn(8, 32)
    parallel = autoparallel.compile(Loss(), mesh_of(2), example_inputs=(x,))
    for group in (torch.distributed.group.WORLD, failing._world().apart):
        _set_pg_timeout(timedelta(seconds=LIMIT_S), group)
    parallel(x)
    return said(lambda: parallel.step(x) if torch.distributed.get_rank() == 0 else time.sleep(4 * LIMIT_S))


@pytest.mark.ranks
def test_a_rank_that_lives_and_does_not_come_is_named() -> None:
    """Also where the others compare their inputs first (it named a rank that waited)."""
    pool = pool_of(2)
    try:
        name, text, named, _ = pool.run(one_does_not_come, timeout_s=60)[0]
    finally:
        pool.stop()
    assert (name, named) == ("PeerError", 1) and "it has not come to call" in text, (name, text)


class Tail(nn.Module):
    """Parameters in the first stage only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(8):
            x = x.tanh() + x.sigmoid()
        return x.square().mean()


def trained_on_an_empty_stage(folder: str) -> list[Any]:
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    x = torch.randn(8, 32)
    parallel = autoparallel.compile(Tail(), mesh_of(2), example_inputs=(x,), pipeline_stages=2, micro_batches=2)
    count = len(dict(parallel.named_parameters()))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        losses.append(float(parallel.step(x)))
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    parallel.save(folder, optimizer, step=3)
    after = float(parallel.step(x))
    optimizer.step()
    parallel.load(folder, optimizer)
    whole = all(isinstance(p, DTensor) for p in parallel.state_dict().values())
    return [count, losses, after == float(parallel.step(x)), whole]


@pytest.mark.ranks
def test_a_stage_without_parameters_has_an_optimizer(ranks: Any, tmp_path: Path) -> None:
    """(torch: optimizer got an empty parameter list.)"""
    torch.manual_seed(0)
    x, model = torch.randn(8, 32), Tail()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(loss := model(x))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    found = ranks(2).run(trained_on_an_empty_stage, str(tmp_path), timeout_s=60)
    assert sorted(count for count, *_ in found) == [0, 2]
    for _, theirs, resumed, whole in found:
        torch.testing.assert_close(torch.tensor(theirs), torch.tensor([float(loss.detach()) for loss in losses]))
        assert resumed and whole


def calls_of_two_threads() -> dict[int, tuple[str, str, int, float]]:
    """Two parallel modules, each called by a thread of its own; the second thread comes first on rank 1."""
    made = [autoparallel.compile(net(), mesh_of(2), example_inputs=(torch.zeros(8, 32),), baseline="ddp",
                                 check_inputs=0) for _ in range(2)]
    found: dict[int, tuple[str, str, int, float]] = {}

    def call(number: int) -> None:
        found[number] = said(lambda: made[number](torch.full((8, 32), float(number))))

    threads = [threading.Thread(target=call, args=(number,)) for number in (0, 1)]
    for thread in threads if torch.distributed.get_rank() == 0 else reversed(threads):
        thread.start()
        time.sleep(0.5)  # it holds the lock, and waits for the other rank
    for thread in threads:
        thread.join(30)
    return found


def test_calls_of_two_threads_do_not_mix(ranks: Any) -> None:
    """They are in another order on each rank: refused on both, where they waited for each other without end."""
    for found in ranks(2).run(calls_of_two_threads, timeout_s=60):
        assert found.keys() == {0, 1}
        assert all(name == "InputError" and "ranks make different calls" in text for name, text, _, _ in found.values())


def killed_while_it_compiles() -> tuple[str, str, int, float]:
    from torch._inductor import compile_fx

    from autoparallel.backends import agreement, aot

    rank, x, store = torch.distributed.get_rank(), torch.randn(8, 32), _get_default_store()

    def ends(*args: Any, **kwargs: Any) -> None:
        store.set("it compiles", "")
        time.sleep(1)    # in which the other rank begins to wait
        os.kill(os.getpid(), signal.SIGKILL)

    def after_the_other(graph: Any) -> Any:
        if rank == 0:
            store.wait(["it compiles"], timedelta(seconds=50))
        return agreement.one_first(graph)

    parallel = autoparallel.compile(net(), mesh_of(2), example_inputs=(x,), baseline="ddp", backend="inductor",
                                    peer_timeout_s=LIMIT_S)
    with mock.patch.object(compile_fx, "compile_fx_inner", ends), mock.patch.object(aot, "one_first", after_the_other):
        return said(lambda: parallel(x))


@pytest.mark.ranks
def test_a_rank_that_is_killed_while_it_compiles_ends_the_wait_for_its_code() -> None:
    """The others waited for half an hour."""
    try:
        (name, text, named, _), _ = pool_of(2).run_losing(1, killed_while_it_compiles, timeout_s=110)
    finally:
        pool_of(2).stop()
    assert (name, named) == ("PeerError", 1) and "no sign of it" in text
