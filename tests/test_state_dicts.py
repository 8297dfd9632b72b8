"""Loading values: all or nothing, no other rank's shards, and the parameters stay the objects that optimizers know."""

from __future__ import annotations

import io
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import autoparallel
from autoparallel.errors import AutoparallelError
from tests.support.ranks import mesh_of

X = torch.linspace(-1, 1, 64).view(8, 8)


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
            self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.second(self.first(x).relu())) - x).square().mean()


class Turning(Net):
    """With a buffer that no state dict holds."""

    def __init__(self, can_reset: bool = True) -> None:
        super().__init__()
        self.micro_batch = nn.Module()
        self.micro_batch.register_buffer("angle", torch.ones(8), persistent=False)
        if can_reset:
            self.micro_batch.reset_parameters = lambda: self.micro_batch.angle.fill_(1)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.micro_batch.angle.sum()


def compiled(model: nn.Module | None = None, shape: tuple[int, ...] = (2, 2), baseline: str | None = "fsdp",
             **options: Any) -> Any:
    model = Net() if model is None else model
    x = X.to("meta") if any(p.is_meta for p in model.parameters()) else X
    return autoparallel.compile(model, mesh_of(*shape), example_inputs=(x,), baseline=baseline, **options)


def whole(module: nn.Module) -> dict[str, Tensor]:
    return {name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for name, value in module.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def message_of(action: Any) -> str:
    try:
        action()
    except AutoparallelError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def read_back(state: Any, rank: int | None) -> Any:
    """A state dict through `torch.save` and `torch.load`: this rank's file, or on all ranks that of one."""
    file = io.BytesIO()
    torch.save(state, file)
    box = [file.getvalue()]
    if rank is not None:
        dist.broadcast_object_list(box, rank)
    return torch.load(io.BytesIO(box[0]), weights_only=False)


def saved_by_one_rank(shape: tuple[int, ...], options: dict[str, Any]) -> list[tuple[str, bool]]:
    """What is told of a file of rank 0's, or 1's, and whether all is as it was."""
    trained, found = compiled(Net(1), shape, **options), []
    before = whole(Net())
    for rank in (0, 1):
        file = read_back(trained.state_dict(), rank)
        parallel = compiled(Net(), shape, **options)
        told = message_of(lambda parallel=parallel, file=file: parallel.load_state_dict(file))
        kept = {name: value for name, value in before.items() if name in parallel.state_dict()}
        found.append((told, same(whole(parallel), kept)))
        changed = {name: value.detach().clone() for name, value in file.items()}  # they forget who saved them
        told = message_of(lambda parallel=parallel, changed=changed: parallel.load_state_dict(changed))
        found.append((told, same(whole(parallel), kept)))
        early = autoparallel.compile(model := Net(), mesh_of(*shape), **options)
        found.append((message_of(lambda early=early, file=file: early.load_state_dict(file)),
                      same(whole(model), before)))
    return found


@pytest.mark.parametrize(("shape", "options"), [
    ((4,), {"baseline": "fsdp"}),
    ((2, 2), {"baseline": "tensor_parallel"}),
    ((2, 2), {"baseline": "fsdp", "pipeline_stages": 2, "micro_batches": 2, "eval": True}),
])
def test_shards_that_another_rank_saved_are_refused(ranks: Any, shape: tuple[int, ...], options: dict[str, Any]
                                                   ) -> None:
    """They were loaded on all ranks, as the shards of each ("All keys matched")."""
    job = saved_by_one_rank if not options.pop("eval", False) else saved_in_a_pipeline
    for found in ranks(4).run(job, shape, options):
        for told, unchanged in found:
            assert told.startswith("InputError") and ": one rank saved it, and all load it" in told, told
            assert "torch.distributed.checkpoint" in told and "full_tensor()" in told
            assert unchanged


def optimizer_of_one_rank(begun: bool) -> list[str]:
    """What a step tells of an optimizer's state that this rank has saved, and of rank 0's, before or after steps."""
    def trained() -> tuple[Any, Any]:
        parallel = compiled(shape=(2,))
        optimizer = torch.optim.AdamW(parallel.parameters())
        parallel(X).backward()
        if begun:
            optimizer.step()
        return parallel, optimizer

    _, optimizer = trained()
    optimizer.step()
    state, found = optimizer.state_dict(), []
    for rank in (None, 0):
        file = read_back(state, rank)
        _, other = trained()

        def go_on(other: Any = other, file: Any = file) -> None:
            other.load_state_dict(file)
            other.step()

        found.append(message_of(go_on))
    return found


@pytest.mark.parametrize("begun", [False, True])
def test_optimizer_states_that_another_rank_saved_are_refused(ranks: Any, begun: bool) -> None:
    """They were loaded on all ranks, as the shards of each."""
    (own, first), (other, told) = ranks(2).run(optimizer_of_one_rank, begun)
    assert own == first == other == "no error"
    assert told.startswith("InputError: exp_avg of a parameter of [16, 8] in AdamW is a DTensor"), told
    assert ": one rank saved it, and all load it" in told and "full_tensor()" in told


class Plain(nn.Sequential):
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def saved_in_a_pipeline(shape: tuple[int, ...], options: dict[str, Any]) -> list[tuple[str, bool]]:
    parallel = compiled(Plain(), shape, **options)
    file, before = read_back(parallel.state_dict(), 0), whole(parallel)
    for value in file.values():
        value.to_local().add_(1)
    told = message_of(lambda: parallel.load_state_dict(file, strict=False))
    return [(told, same(whole(parallel), before))]


def loaded_rightly() -> list[bool]:
    """Files of each rank, whole tensors of one, DTensors of other plans and meshes: everything that can be right."""
    expected, found = whole(Net(1)), []
    trained = compiled(Net(1))
    other = compiled(Net(1), (4,), "tensor_parallel")
    whole_file = read_back(whole(trained), 0)
    replicated = {name: DTensor.from_local(value, mesh_of(2, 2), [Replicate()] * 2, run_check=False)
                  for name, value in expected.items()}
    odd = {name: value.redistribute(placements=[Replicate(), Shard(0)]) if value.dim() else value
           for name, value in replicated.items()}
    for state in (read_back(trained.state_dict(), None), whole_file, trained.state_dict(), other.state_dict(),
                  read_back(replicated, 1), odd):
        for parallel in (compiled(), autoparallel.compile(Net(), mesh_of(2, 2), example_inputs=None)):
            result = parallel.load_state_dict(state)
            assert not result.missing_keys and not result.unexpected_keys
            parallel.trace((X,))
            found.append(same(whole(parallel), expected))
    return found


def test_every_right_state_dict_is_loaded(ranks: Any) -> None:
    for found in ranks(4).run(loaded_rightly):
        assert found == [True] * 12


def failing_loads() -> list[tuple[str, bool]]:
    """Loads that fail at the last name, or on one rank, and whether all is as it was."""
    rank, found = dist.get_rank(), []
    good = whole(Net(1))
    last = list(good)[-2]
    mesh = mesh_of(2, 2)
    states = [
        {**good, last: torch.ones(9)},
        {**good, last: 3},
        {name: value for name, value in good.items() if name != last},
        {**good, "second.bias": torch.ones(9) if rank == 2 else good["second.bias"]},
        {**good, "second.bias": good["second.bias"] + rank // 3},
        {**good, "first.weight": good["first.weight"].t().contiguous()},
    ]
    for state in states:
        parallel = compiled()
        before = whole(parallel)
        told = message_of(lambda parallel=parallel, state=state: parallel.load_state_dict(state))
        found.append((told, same(whole(parallel), before)))
    for state in (states[0], states[2], states[5]):  # before the first call: torch's own error
        early = autoparallel.compile(model := Net(), mesh)
        objects = [id(p) for p in model.parameters()]
        with pytest.raises(RuntimeError, match="state_dict"):
            early.load_state_dict(state, assign=state is states[5])
        found.append(("", same(whole(model), whole(Net())) and objects == [id(p) for p in model.parameters()]))
    with torch.device("meta"):
        empty = Turning(can_reset=False)
    parallel = compiled(empty)
    told = message_of(lambda: parallel.load_state_dict(good))
    found.append((told, all(p.is_meta for p in parallel.parameters())))
    early = autoparallel.compile(empty, mesh)
    found.append((message_of(lambda: early.load_state_dict(good)), True))
    return found


def test_a_load_that_fails_leaves_all_as_it_was(ranks: Any) -> None:
    for rank, found in enumerate(ranks(4).run(failing_loads)):
        shape, kind, missing, one, values, turned, *early, lost, meta = found
        assert all(unchanged for _, unchanged in found), found
        assert "the value given [9]" in shape[0] and "no tensors for" in kind[0] and "missing ['norm." in missing[0]
        told = "StateDictError: " + ("" if rank == 2 else "on rank 2: ")
        assert one[0].startswith(f"{told}second.bias has shape [8]")
        assert "ranks load different values: second.bias on ranks [3]" in values[0]
        assert "first.weight has shape [16, 8], the value given [8, 16]" in turned[0]
        assert len(early) == 3
        assert "micro_batch (Module) owns tensors and has no reset_parameters()" in lost[0]
        assert "on the meta device and has not been traced" in meta[0]


def made_before(how: str, step: bool) -> tuple[list[float], list[str], bool]:
    """Losses of an optimizer that was made while the model had no values, hooks that were called, and whether the
    parameters are the same objects."""
    with torch.device("meta"):
        model = Turning()
    parallel = compiled(model, **({"micro_batches": 2} if step else {}))
    parameters, called = dict(parallel.named_parameters()), []
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    parameters["first.weight"].register_hook(lambda gradient: called.append("gradient"))
    handle = parameters["first.weight"].register_post_accumulate_grad_hook(lambda p: called.append("after"))
    parameters["first.weight"].mark = 3
    if how == "load":
        parallel.load_state_dict(Turning().state_dict())
    else:
        parallel.init_weights()
        parallel.load_state_dict(Turning().state_dict())
    losses = []
    for number in range(3):
        loss = parallel.step(X) if step else parallel(X)
        if not step:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        if number == 1:
            handle.remove()
    now = dict(parallel.named_parameters())
    kept = now.keys() == parameters.keys() and all(now[name] is parameters[name] for name in now)
    return losses, called, kept and now["first.weight"].mark == 3 and not now["first.weight"].is_meta


@pytest.mark.parametrize(("how", "step"), [("load", False), ("init", False), ("load", True)])
def test_an_optimizer_made_before_values_trains_them(ranks: Any, how: str, step: bool) -> None:
    model, expected = Turning(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        losses = [model(part) / 2 for part in X.chunk(2)] if step else [model(X)]
        loss = torch.stack(losses).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for losses, called, kept in ranks(4).run(made_before, how, step):
        if not step:  # batch norm of micro-batches is not that of the batch
            assert losses == pytest.approx(expected, rel=1e-4)
        assert losses[2] < losses[1] < losses[0]
        assert called == ["gradient", "after"] * 2 + ["gradient"] and kept


def referred_to() -> tuple[str, str, bool, bool]:
    """Parameters that something was made of, or is known to by a weak reference, while they had no values."""
    with torch.device("meta"):
        model = Net()
    parallel = compiled(model)
    products = [2 * p for p in parallel.parameters()]
    watched = weakref.ref(parallel.second.bias)
    told = message_of(parallel.init_weights), message_of(lambda: parallel.load_state_dict(Net(1).state_dict()))
    still = all(p.is_meta for p in parallel.parameters())
    del watched
    parallel.load_state_dict(Net(1).state_dict())
    assert all(x.is_meta for x in products)
    return *told, still, same(whole(parallel), whole(Net(1)))


def test_parameters_with_weak_references_get_no_values(ranks: Any) -> None:
    for at_init, at_load, still, loaded in ranks(4).run(referred_to):
        assert "InputError: second.bias is on the meta device" in at_init and "weak reference" in at_load
        assert still and loaded


class Probed(nn.Module):
    """A probe whose result is returned beside the loss, which does not depend on it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.probe = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = x
        for layer in self.layers:
            y = layer(y).tanh()
        return {"loss": (y - x).square().mean(), "probe": self.probe(y)}


def of_two_stages() -> tuple[list[str], torch.dtype]:
    parallel = autoparallel.compile(Probed().double(), mesh_of(2), example_inputs=(X.double(),),
                                    pipeline_stages=2, micro_batches=4)
    parallel.step(X.double())
    for p in parallel.parameters():
        if dist.get_rank():
            p.grad = None
    return list(parallel.state_dict()), parallel.clip_grad_norm_(1.0).dtype


def test_a_parameter_that_no_stage_reads_is_kept(ranks: Any) -> None:
    """On every rank; and a rank without gradients gets the norm in the others' dtype."""
    found = ranks(2).run(of_two_stages)
    assert {name for names, _ in found for name in names} == set(Probed().state_dict())
    assert all({"probe.weight", "probe.bias"} <= set(names) for names, _ in found)
    assert [dtype for _, dtype in found] == [torch.float64] * 2
