"""Local batches (each rank its own rows, as DDP scripts have them), and ranks that compare their global ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import autoparallel
from autoparallel.errors import AutoparallelError, PlanError
from autoparallel.runtime.inputs import digest
from tests.support.ranks import mesh_of
from tests.support.tiers import slow

SAMPLES, ROWS = 24, 2


class Numbers(Dataset[dict[str, Tensor]]):
    """Samples as a user's dataset has them, each another one."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "target": x.roll(1)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, target: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        loss = nn.functional.mse_loss(self.net(x), target)
        return {"loss": loss if scale is None else loss * scale}


def batches(rank: int, ranks: int) -> Any:
    sampler = DistributedSampler(Numbers(), num_replicas=ranks, rank=rank, shuffle=True, seed=3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        yield from DataLoader(Numbers(), batch_size=ROWS, sampler=sampler)


def trained(shape: tuple[int, ...], options: dict[str, Any], by_step: bool) -> tuple[list[float], dict[str, Tensor]]:
    """A DDP script, but for the line that wraps the model."""
    model = autoparallel.compile(Net(), mesh_of(*shape), inputs="local", **options)
    losses, optimizer = [], None
    for batch in batches(dist.get_rank(), dist.get_world_size()):
        if by_step:
            loss = model.step(**batch)
        else:
            loss = model(**batch)["loss"]
            loss.backward()
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, {name: p.full_tensor() for name, p in model.state_dict().items()}


def trained_alone(ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parts in zip(*(batches(rank, ranks) for rank in range(ranks)), strict=True):
        loss = model(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize(("shape", "options", "by_step"), [
    ((2,), {"baseline": "ddp"}, False),
    slow((4,), {"baseline": "ddp"}, False),
    slow((4,), {"baseline": "tensor_parallel"}, False),
    ((2, 2), {}, False),
    slow((2, 2), {"baseline": "fsdp"}, True),
    slow((4,), {"micro_batches": 4}, True),
    ((2, 2), {"micro_batches": 2, "pipeline_stages": 2}, True),
    ((2,), {"schedule": "gpipe", "pipeline_stages": 2}, True),
])
def test_a_ddp_script_runs_under_any_plan(ranks: Any, shape: tuple[int, ...], options: dict[str, Any], by_step: bool
                                         ) -> None:
    expected, parameters = trained_alone(math.prod(shape))
    names = set[str]()
    for losses, found in ranks(math.prod(shape)).run(trained, shape, options, by_step):
        assert losses == pytest.approx(expected, rel=1e-5)
        for name, value in found.items():
            torch.testing.assert_close(value, parameters[name], rtol=1e-5, atol=1e-6)
        names |= set(found)
    assert names == set(parameters)


def message_of(action: Any) -> str:
    try:
        action()
    except AutoparallelError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def kinds_of_arguments() -> tuple[list[float], Tensor, list[str], str]:
    """Local and global ones by name and by position, alone and with examples; the gradient of local rows."""
    rank, mesh = dist.get_rank(), mesh_of(2, 2)
    whole = {"x": torch.arange(64.0).view(8, 8) / 64, "target": torch.ones(8, 8)}
    x = whole["x"][2 * rank : 2 * rank + 2].clone().requires_grad_()
    target = whole["target"][2 * rank : 2 * rank + 2]
    scale = torch.tensor(2.0)
    all_local = autoparallel.compile(Net(), mesh, inputs="local", example_inputs=(x, target, scale))
    some = autoparallel.compile(Net(), mesh, inputs={"x": "local"})
    known = autoparallel.compile(Net(), mesh)
    on_count = autoparallel.compile(Net(), 4, inputs="local", example_kwargs={"x": x, "target": target})
    losses = [all_local(x, target, scale)["loss"], some(x, whole["target"], scale)["loss"],
              some(x, target=whole["target"], scale=scale)["loss"], known(**whole, scale=scale)["loss"],
              known(*known.local_batch((x, target)), scale)["loss"], 2 * on_count(x, target)["loss"],
              all_local(*all_local.shard_batch((x, target, scale)))["loss"]]
    assert len(all_local._state.forms) == 1
    losses[0].backward()
    assert x.grad is not None
    batch = known.local_batch({"x": x, "more": [target, 3, scale]})
    assert isinstance(batch["more"][0], DTensor) and batch["more"][1:] == [3, scale]
    return [float(loss.detach()) for loss in losses], x.grad, [str(list(batch["x"].shape))], message_of(
        lambda: known(x, target, scale))


def test_arguments_are_local_by_name(ranks: Any) -> None:
    net, whole = Net(), torch.arange(64.0).view(8, 8) / 64
    whole.requires_grad_()
    loss = net(whole, torch.ones(8, 8), torch.tensor(2.0))["loss"]
    loss.backward()
    for rank, (losses, gradient, shapes, told) in enumerate(ranks(4).run(kinds_of_arguments)):
        assert losses == pytest.approx([loss.item()] * 7, rel=1e-5) and shapes == ["[8, 8]"]
        torch.testing.assert_close(gradient, whole.grad[2 * rank : 2 * rank + 2], rtol=1e-5, atol=1e-8)
        assert "x: ranks [1, 2, 3] have other values than rank 0" in told and "target" not in told.splitlines()[0]
        assert 'inputs="local"' in told and "parallel.local_batch(batch)" in told and "dataloader" in told


def short_batch(options: dict[str, Any]) -> tuple[list[str], float]:
    """The last batch has a row less on the last rank; then they go on."""
    rank = dist.get_rank()
    parallel = autoparallel.compile(Net(), mesh_of(4), inputs="local", check_inputs=0, **options)
    full, short = torch.ones(2, 8) * (1 + rank), torch.ones(1 if rank == 3 else 2, 8)
    told = [message_of(lambda: parallel.step(short, short))]
    first = float(parallel.step(full, -full))
    told += [message_of(lambda: parallel.step(short, short)), message_of(lambda: parallel.local_batch({"x": short})),
             message_of(lambda: parallel.step(full, full.double() if rank == 1 else full)),
             message_of(lambda: parallel.step(x=full, **({} if rank == 1 else {"target": full})))]
    assert float(parallel.step(full, -full)) == pytest.approx(first)
    return told, first


@pytest.mark.parametrize("options", [{"baseline": "ddp"}, {"micro_batches": 2}])
def test_a_shorter_batch_on_one_rank_is_an_error_on_all(ranks: Any, options: dict[str, Any]) -> None:
    whole = torch.cat([torch.ones(2, 8) * (1 + rank) for rank in range(4)])
    expected = Net()(whole, -whole)["loss"].item()
    for (first, later, explicit, types, structure), loss in ranks(4).run(short_batch, options):
        assert loss == pytest.approx(expected, rel=1e-5)
        for told in (first, later):
            assert told.startswith("InputError") and "drop_last=True" in told
            assert "x: float32[2, 8] on ranks [0, 1, 2], float32[1, 8] on ranks [3]" in told
        assert "batch['x']: float32[2, 8] on ranks [0, 1, 2], float32[1, 8] on ranks [3]" in explicit
        assert "target: float32[2, 8] on ranks [0, 2, 3], float64[2, 8] on ranks [1]" in types
        assert "ranks [1] call with other arguments than rank 0" in structure


def padded_apart() -> str:
    """Each rank pads to the longest of its rows."""
    rank = dist.get_rank()
    parallel = autoparallel.compile(nn.Embedding(8, 4), mesh_of(2), inputs="local")
    return message_of(lambda: parallel(torch.ones(2 - rank, 3 + rank, dtype=torch.int64)))


def test_rows_that_each_rank_pads_to_its_own_length_are_told(ranks: Any) -> None:
    """They were told to leave out a last batch."""
    for told in ranks(2).run(padded_apart):
        assert "int64[2, 3] on ranks [0], int64[1, 4] on ranks [1]" in told and "padded_to((512,)" in told


def compared(period: int) -> list[str]:
    """What is told of calls in which rank 1 has other rows, as the 2nd and as the 5th and 6th."""
    parallel = autoparallel.compile(Net(), mesh_of(2), check_inputs=period, baseline="ddp")
    x = torch.arange(32.0).view(4, 8)
    other = x.flip(0) if dist.get_rank() == 1 else x
    told = [message_of(lambda x=x: parallel(x, x.sin())) for x in (x, other, x, x, other, other)]
    return [*told, message_of(lambda: parallel.step(x, x, torch.tensor(1.0 + dist.get_rank())))]


@pytest.mark.parametrize(("period", "expected"), [(0, "......."), (100, ".x....."), (6, ".x...x."), (7, ".x....s")])
def test_ranks_compare_global_tensors(ranks: Any, period: int, expected: str) -> None:
    """In the first three calls, and every so many after; where they are not compared, nothing is noticed."""
    for told in ranks(2).run(compared, period):
        letters = "".join("s" if "; scale" in text or "inputs: scale" in text else "x" if "InputError" in text else "."
                          for text in told)
        assert letters == expected
        assert all("ranks [1] have other values than rank 0" in text for text in told if text != "no error")


LOSSES: Any = {
    "gathered": lambda y, t, rank: y.gather(1, t[4 * rank :][:4]).mean(),    # rows of rank 0, with each rank's targets
    "permuted": lambda y, t, rank: nn.functional.cross_entropy(y, t.roll(rank, 0)[:, 0]),
    "weighted": lambda y, t, rank: nn.functional.cross_entropy(y, t[:, 0]) * (1 + rank),
    "equal": lambda y, t, rank: nn.functional.cross_entropy(y * (1 + 1e-6 * rank), t[:, 0]),
}


def losses_outside(period: int) -> list[str]:
    x, target, told = torch.arange(64.0).view(8, 8).sin(), torch.arange(8)[:, None], []
    for loss in LOSSES.values():
        parallel = autoparallel.compile(nn.Linear(8, 8), mesh_of(2), baseline="fsdp", outputs="whole",
                                        check_inputs=period, example_inputs=(x,))
        told.append(message_of(lambda parallel=parallel, loss=loss: loss(parallel(x), target, dist.get_rank())
                               .backward()))
    return told


def test_ranks_compare_the_gradients_of_whole_outputs(ranks: Any) -> None:
    """(Each rank trained on a loss of its own.)"""
    for *different, equal in ranks(2).run(losses_outside, 100):
        assert all("InputError: the ranks' gradients of an output of shape [8, 8] differ" in told for told in different)
        assert equal == "no error"
    assert ranks(2).run(losses_outside, 0) == [["no error"] * len(LOSSES)] * 2


def lonely() -> str:
    parallel = autoparallel.compile(Net(), mesh_of(1), inputs="local")
    parallel._state.inputs.period = 1
    before = dist.all_reduce
    dist.all_reduce = None  # type: ignore[assignment]  # nothing is sent
    try:
        return message_of(lambda: parallel(torch.ones(2, 8), torch.ones(2, 8)))
    finally:
        dist.all_reduce = before


def test_one_rank_has_nobody_to_compare_with(ranks: Any) -> None:
    assert ranks(1).run(lonely) == ["no error"]


def refusals() -> list[str]:
    mesh, net = mesh_of(2), Net()
    return [
        message_of(lambda: autoparallel.compile(net, mesh, inputs="mine")),
        message_of(lambda: autoparallel.compile(net, mesh, inputs={"x": 1})),
        message_of(lambda: autoparallel.compile(net, mesh, inputs={"labels": "local"})),
        message_of(lambda: autoparallel.compile(net, mesh, inputs={"targt": "local"})),
        message_of(lambda: autoparallel.compile(net, mesh, check_inputs=-1)),
        message_of(lambda: autoparallel.compile(net, mesh, check_inputs=True)),
    ]


def test_options_of_inputs_are_checked(ranks: Any) -> None:
    mine, kind, unknown, near, negative, truth = ranks(2).run(refusals)[0]
    assert mine.startswith("PlanError: inputs is 'mine': give 'global'") and "inputs is 1: give" in kind
    assert "forward has no such argument; there are ['x', 'target', 'scale']" in unknown
    assert "'targt'" in near and near.endswith("['target']")
    assert "check_inputs is -1" in negative and "check_inputs is True" in truth
    with pytest.raises(PlanError, match=r"inputs belongs to autoparallel\.compile"):
        autoparallel.plan(Net(), "local-cpu", example_inputs=(torch.ones(2, 8), torch.ones(2, 8)), inputs="local")


def test_digests_tell_bits_and_their_order() -> None:
    x = torch.arange(999).view(37, 27)
    same = [x.clone(), x.t().contiguous().t()]
    other = [x.flip(0), x.roll(1), x.view(-1).reshape(27, 37).t(), x + (x == 500), torch.zeros_like(x), -x, x[:-1]]
    assert {int(digest(y)) for y in same} == {int(digest(x))}
    assert len({int(digest(y)) for y in (x, *other)}) == len(other) + 1
    for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.uint8, torch.float64):
        y = torch.eye(5).to(dtype)
        assert int(digest(y)) == int(digest(y.clone())) != int(digest(y.roll(1, 0)))
    assert int(digest(torch.tensor(2.0).expand(1))) == int(digest(torch.tensor([2.0])))
    assert int(digest(torch.ones(3)[1:])) == int(digest(torch.ones(2))) and isinstance(int(digest(torch.ones(0))), int)
    assert int(digest(torch.tensor(0.0))) != int(digest(torch.tensor(-0.0)))
