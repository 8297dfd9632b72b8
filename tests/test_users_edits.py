"""What scripts write to parameters between calls, and add to a step: equal to one process, or refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint

import autoparallel
from autoparallel.errors import InputError
from autoparallel.runtime.dtensors import watch
from tests.support.ranks import mesh_of
from tests.support.reference import gathered, gradients_of
from tests.support.tiers import slow

X, Y = torch.linspace(-2, 2, 64).view(8, 8).cos(), torch.arange(8)
Made = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        made = self.last(self.norm(self.first(x)).tanh())
        return made if y is None else nn.functional.cross_entropy(made, y)


def net() -> Any:
    torch.manual_seed(7)
    return Net()


def assert_equal(found: Made, expected: Made) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-6), name


def is_close_on(mesh_shape: tuple[int, ...], baseline: str, script: Callable[[Any], Made]) -> None:
    """Run on each rank: the script's results with the parallel module are those with the model."""
    expected = script(net())
    parallel = autoparallel.compile(net(), mesh_of(*mesh_shape), baseline=baseline, example_inputs=(X,))
    assert_equal(script(parallel), expected)


# ------------------------------------------------------------------------------------------ writes to a part


def written_twice(weight: Any) -> None:
    """What was selected before other writes has their values, too."""
    row, rows = weight[3], weight[2:9]
    weight.mul_(2)
    rows.add_(1)
    row.mul_(3)
    row.sub_(1)


WRITES: dict[str, Callable[[Any], object]] = {
    "item": lambda w: w.__setitem__((0, 0), 7.0), "last row": lambda w: w.__setitem__(-1, w[-1] * 2),
    "rows": lambda w: w[2:9].mul_(3), "row": lambda w: w[12].zero_(), "rows of data": lambda w: w.data[:9].add_(1),
    "in place": lambda w: w[2:9].__imul__(2), "columns": lambda w: w[:, 2:5].mul_(3),
    "all": lambda w: w.view(-1).mul_(2),
    "part of a view": lambda w: w.view(-1)[3:200].mul_(0), "transposed": lambda w: w.t().mul_(2),
    "mask": lambda w: w.__setitem__(w < 0, 7.0), "plain mask": lambda w: w.__setitem__(torch.eye(16).bool(), 0.5),
    "mask of rows": lambda w: w.__setitem__(torch.arange(16) % 3 == 0, torch.tensor(2.0)),
    "diagonal": lambda w: w.diagonal().mul_(2), "chunk": lambda w: w.chunk(4)[2].zero_(),
    "row by one": lambda w: w.__setitem__(3, w[3].__iadd__(1)), "row of columns": lambda w: w[:, 2:9][11].mul_(3),
    "from plain": lambda w: w[5].copy_(torch.arange(16.0)), "detached": lambda w: w[12].detach().fill_(2),
    "data of a row": lambda w: w[12].data.fill_(2), "row of rows": lambda w: w[2:9].__setitem__(1, w[14] * 1),
    "item of a row": lambda w: w[13].__setitem__(2, 4.0), "twice": written_twice,
}


def write(baseline: str) -> list[str]:
    """Write to selections of a weight; returns the names of the writes that an InputError refused ("" for another
    error), after comparing the others with the model's."""
    parallel = autoparallel.compile(net(), mesh_of(2), baseline=baseline, example_inputs=(X,))
    refused = []
    for name, change in WRITES.items():
        model = net()
        parallel.load_state_dict(model.state_dict())
        with torch.no_grad():
            change(model.last.weight)
            try:
                change(parallel.last.weight)
            except (InputError, RuntimeError, NotImplementedError) as error:  # or in torch's words, not silently
                refused.append(name if isinstance(error, InputError) else "")
                continue
        assert_equal(gathered(parallel.named_parameters()), gathered(model.named_parameters()))
    return refused


PLACES: dict[str, Callable[[Any], object]] = {
    "number": lambda w: w.__setitem__((0, 0), 7.0), "row": lambda w: w.__setitem__(3, torch.arange(16.0)),
    "own row": lambda w: w.__setitem__(-1, w[2] * 2), "rows": lambda w: w.__setitem__(slice(2, 9), 0.5),
    "each third": lambda w: w.__setitem__(slice(None, None, 3), torch.arange(16.0)),
    "column": lambda w: w.__setitem__((slice(None), 2), torch.arange(16.0)),
    "last column": lambda w: w.__setitem__((..., -1), w[:, 1]), "all": lambda w: w.__setitem__(None, 1.0),
    "ids": lambda w: w.__setitem__(torch.tensor([9, 1]), torch.ones(2, 16)),
    "list": lambda w: w.__setitem__([1, 12], torch.tensor(4.0)),
    "swapped": lambda w: w.__setitem__([0, 15], w.full_tensor()[[15, 0]] if isinstance(w, DTensor) else w[[15, 0]]),
    "pairs": lambda w: w.__setitem__((torch.tensor([1, 12]), torch.tensor([3, 4])), 9.0),
    "masked rows": lambda w: w.__setitem__(torch.arange(16) > 9, torch.ones(6, 16)),
    "data": lambda w: w.data.__setitem__(torch.tensor([4, 14]), 5.0),
    "diagonal": lambda w: w.fill_diagonal_(3.0), "wrapped": lambda w: w.fill_diagonal_(fill_value=3.0, wrap=True),
}


def write_places(mesh_shape: tuple[int, ...], baseline: str | None, pins: Any) -> tuple[Any, ...]:
    parallel = autoparallel.compile(net(), mesh_of(*mesh_shape), baseline=baseline, pins=pins, example_inputs=(X,))
    for name, change in PLACES.items():
        model = net()
        parallel.load_state_dict(model.state_dict())
        with torch.no_grad():
            change(model.last.weight)
            change(parallel.last.weight)
        for (path, value), wanted in zip(parallel.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(value.detach().full_tensor(), wanted), (name, path)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        parallel.last.weight[3] = 0.0
    with pytest.raises(InputError, match="ranks read or write other places"), torch.no_grad():
        parallel.last.weight[3] = torch.full((16,), float(torch.distributed.get_rank()))
    return parallel.last.weight.placements


@pytest.mark.parametrize(("mesh_shape", "baseline", "pins"), [
    ((2,), "fsdp", None), ((2,), "ddp", None), slow((2,), "tensor_parallel", None),
    slow((2, 2), None, {"last.weight": (Shard(0), Shard(1))})])
def test_places_of_parameters_are_written_to(ranks: Any, mesh_shape: tuple[int, ...], baseline: str | None, pins: Any
                                             ) -> None:
    found = ranks(math.prod(mesh_shape)).run(write_places, mesh_shape, baseline, pins)
    assert pins is None or found[0] == pins["last.weight"]


def write_interleaved() -> None:
    mesh = mesh_of(2)
    watch(mesh)
    for name, change in PLACES.items():
        value = torch.arange(256.0).view(16, 16)
        held = DTensor.from_local(value.clone(), mesh, [Replicate()]).redistribute(
            placements=[_StridedShard(0, split_factor=2)])
        change(value)
        change(held)
        assert held.placements == (_StridedShard(0, split_factor=2),)
        assert torch.equal(held.full_tensor(), value), name


def test_places_of_interleaved_shards_are_written_to(ranks: Any) -> None:
    ranks(2).run(write_interleaved)


def written_outputs(model: Any) -> Made:
    """Places of outputs are written to, with gradients, plain values among them; a diagonal, as of similarities."""
    plain, made = torch.ones(16, requires_grad=True), model(X) * 1.0
    made[3], made[6], made[7] = 0.0, plain * 2, model.last.bias * 3
    made[:, 0] = made[:, 1]
    made[torch.tensor([5, 1])] = 2.0
    alike = made @ made.T
    alike.fill_diagonal_(-1.0)
    (made.square().mean() + alike.sigmoid().mean()).backward()
    return {**gathered([("made", made.detach()), ("alike", alike.detach()), ("plain", plain.grad)]),
            **gradients_of(model)}


@pytest.mark.parametrize("baseline", ["fsdp", slow("ddp"), slow("tensor_parallel")])
def test_places_of_outputs_are_written_to(ranks: Any, baseline: str) -> None:
    ranks(2).run(is_close_on, (2,), baseline, written_outputs)


@pytest.mark.parametrize("baseline", ["fsdp", slow("ddp"), slow("tensor_parallel")])
def test_a_part_is_written_to(ranks: Any, baseline: str) -> None:
    """torch selects along a sharded dim from a gathered copy: what is written to that changes nothing."""
    for refused in ranks(2).run(write, baseline):
        assert not refused


def write_with_gradients() -> None:
    parallel = autoparallel.compile(net(), mesh_of(2), baseline="fsdp", example_inputs=(X,))
    made = parallel(X) * 1.0
    for change in (lambda: made[3].mul_(2), lambda: parallel.last.weight[3].mul_(2),
                   lambda: parallel.last.weight[3].detach()[1:].mul_(2)):
        with pytest.raises(InputError, match="changes nothing of it"):
            change()


def test_a_write_to_a_part_that_would_lose_a_gradient_is_refused(ranks: Any) -> None:
    ranks(2).run(write_with_gradients)


def read(model: Any) -> Made:
    """Rows, entries and masked values of parameters and outputs, with gradients."""
    ids, made, weight = torch.tensor([9, 1, 1, -1]), model(X), model.last.weight
    mask = torch.arange(16) % 3 == 0
    found = {"rows": weight[ids], "listed": weight[[3, 12]], "pairs": weight[ids, ids - 1], "columns": weight[:, ids],
             "mask": weight[mask], "plain": weight[mask.outer(mask)], "own": weight[weight > 0.05],
             "chosen": made[torch.arange(8), Y], "bias": model.last.bias[ids], "half": weight[2:9, ids]}
    sum((n + 1) * value.sin().sum() for n, value in enumerate(found.values())).backward()
    return {**gathered((name, value.detach()) for name, value in found.items()), **gradients_of(model)}


def read_other_places() -> None:
    parallel = autoparallel.compile(net(), mesh_of(2), baseline="fsdp", example_inputs=(X,))
    with pytest.raises(InputError, match="ranks read or write other places"):
        parallel.last.weight[torch.tensor([torch.distributed.get_rank()])]


@pytest.mark.parametrize("baseline", ["fsdp", slow("ddp"), slow("tensor_parallel")])
def test_places_are_read(ranks: Any, baseline: str) -> None:
    """(torch refuses plain indices of a DTensor.)"""
    ranks(2).run(is_close_on, (2,), baseline, read)
    ranks(2).run(read_other_places)


# ------------------------------------------------------------------------------------------- random numbers


def draw(model: Any) -> Made:
    """Weights by torch's initialisers, and noise."""
    torch.manual_seed(3)
    nn.init.kaiming_uniform_(model.first.weight)
    nn.init.normal_(model.last.weight, std=0.1)
    nn.init.trunc_normal_(model.last.bias, std=2.0, a=-0.5, b=0.5)
    nn.init.trunc_normal_(model.first.bias, std=0.02)
    nn.init.sparse_(model.first.weight, 0.25)
    with torch.no_grad():
        model.last.bias.add_(torch.randn_like(model.last.bias))
        model.norm.weight.bernoulli_(0.5)
        model.norm.bias.exponential_()
        model.first.bias.copy_(nn.functional.dropout(model.norm.bias, 0.5))
    made = gathered(model.named_parameters())
    made.update(gathered([("sampled", model.first.weight.detach().softmax(0).multinomial(3).float())]))
    nn.init.eye_(model.last.weight)
    return {**made, "eye": gathered([("", model.last.weight)])[""], "state": torch.get_rng_state().float()}


def draw_after_other_seeds() -> None:
    """Ranks with random states of their own: copies stay equal, and each rank's state is left as it was."""
    mesh = mesh_of(2)
    parallel = autoparallel.compile(net(), mesh, baseline="ddp", example_inputs=(X,))
    torch.manual_seed(mesh.get_rank())
    before = torch.get_rng_state()
    nn.init.normal_(parallel.last.weight)
    torch.testing.assert_close(parallel.last.weight.to_local(), torch.empty(16, 16).normal_(
        generator=torch.Generator().manual_seed(0)))
    assert mesh.get_rank() == 0 or torch.equal(torch.get_rng_state(), before)
    sampled = torch.multinomial(parallel.last.weight.detach().softmax(1), 2).to_local()
    torch.manual_seed(0)
    torch.empty(16, 16).normal_()
    assert torch.equal(sampled, torch.multinomial(parallel.last.weight.to_local().detach().softmax(1), 2))


def draw_on_other_meshes() -> None:
    """DTensors that are no parallel module's are drawn as torch does."""
    mesh = mesh_of(2)
    autoparallel.compile(net(), mesh, baseline="fsdp", example_inputs=(X,))
    other = distribute_tensor(torch.zeros(4, 4), torch.distributed.init_device_mesh("cpu", (2,)), src_data_rank=None)
    torch.manual_seed(1)
    own = torch.empty(4, 4).normal_(generator=torch.Generator().manual_seed(1))
    assert torch.equal(other.normal_().to_local(), own)


@pytest.mark.parametrize(("shape", "baseline"), [((2,), "fsdp"), pytest.param((2, 2), "tensor_parallel",
                                                                              marks=pytest.mark.slow)])
def test_random_numbers_are_those_of_the_whole(ranks: Any, shape: tuple[int, ...], baseline: str) -> None:
    """torch gives each shard of a CPU mesh the same rows."""
    ranks(torch.Size(shape).numel()).run(is_close_on, shape, baseline, draw)


def test_random_numbers_of_ranks_with_other_seeds(ranks: Any) -> None:
    ranks(2).run(draw_after_other_seeds)
    ranks(2).run(draw_on_other_meshes)


# --------------------------------------------------------------------------------------------- what a step adds


def regularised(model: Any) -> Made:
    """Terms of the parameters are added to the loss; and elastic weights, by the square of gradients."""
    model(X, Y).backward()
    weights = {name: p.grad.detach() ** 2 for name, p in model.named_parameters()}
    before = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
    model.zero_grad()
    loss = model(X, Y) + 1e-2 * sum(p.pow(2).sum() + p.abs().sum() for p in model.parameters())
    loss = loss + model.last.weight.norm()
    loss = loss + 100 * sum((weights[name] * (p - before[name]) ** 2).sum() for name, p in model.named_parameters())
    loss.backward()
    return {**gradients_of(model), **gathered([("loss", loss.detach())])}


def given_gradients(model: Any) -> Made:
    """Backward of an output with a plain gradient."""
    model(X).backward(torch.linspace(0, 1, 128).view(8, 16))
    return gradients_of(model)


def recomputed(model: Any) -> Made:
    """Within torch's checkpoint, which stops early when it computes again."""
    x = X.clone().requires_grad_()
    for _ in range(2):
        checkpoint(model, x, Y, use_reentrant=False).backward()
    assert x.grad is not None
    return {**gradients_of(model), **gathered([("x", x.grad)])}


def resumed(model: Any) -> Made:
    """With the states of an optimizer of the model in one process, before the first step and after it."""
    single = net()
    theirs = torch.optim.AdamW(single.parameters(), lr=1e-2, eps=1e-3)
    single(X, Y).backward()
    theirs.step()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for _ in range(2):
        optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
        model.zero_grad()
        model(X, Y).backward()
        optimizer.step()
    made = gathered(model.named_parameters())
    states = ((f"state {name}", optimizer.state[p]["exp_avg"]) for name, p in model.named_parameters())
    return {**made, **gathered(states)}


@pytest.mark.parametrize("script", [regularised, given_gradients, recomputed, resumed])
@pytest.mark.parametrize(("shape", "baseline"), [
    ((2,), "fsdp"), pytest.param((2, 2), "tensor_parallel", marks=pytest.mark.slow),
    pytest.param((2,), "ddp", marks=pytest.mark.slow)])
def test_what_a_step_adds(ranks: Any, shape: tuple[int, ...], baseline: str, script: Callable[[Any], Made]) -> None:
    ranks(torch.Size(shape).numel()).run(is_close_on, shape, baseline, script)


# ------------------------------------------------------------------------------------------------- containers


EDITS: dict[str, Callable[[Any], object]] = {
    "2 was replaced": lambda m: m.__class__.__setitem__(m, 2, nn.Linear(16, 2)),
    "2 is gone": lambda m: m.__class__.__delitem__(m, -1), "3 is new": lambda m: m.append(nn.Linear(16, 2)),
    "1 was replaced": lambda m: m.insert(1, nn.Linear(16, 16)),
}


def sequential() -> Any:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))


@pytest.mark.parametrize("said", EDITS)
def test_parts_of_a_container_are_replaced_before_the_first_trace_only(mesh_of_one: Any, said: str) -> None:
    """(They were TypeErrors of ParallelModule.)"""
    model, parallel, change = sequential(), autoparallel.compile(sequential(), mesh_of_one), EDITS[said]
    for changed in (model, parallel):
        torch.manual_seed(8)
        change(changed)
    found, expected = parallel(X), model(X)
    assert len(parallel) == len(model) and [*map(type, parallel)] == [*map(type, model)]
    torch.testing.assert_close(found.full_tensor() if isinstance(found, DTensor) else found, expected)
    traced: Any = autoparallel.compile(sequential(), mesh_of_one, example_inputs=(X,))
    change(traced)
    with pytest.raises(InputError, match=said):
        traced(X)


def test_other_models_have_no_length(mesh_of_one: Any) -> None:
    parallel: Any = autoparallel.compile(net(), mesh_of_one, example_inputs=(X,))
    assert parallel and not hasattr(parallel, "__len__")
    with pytest.raises(TypeError, match="no len"):
        len(parallel)
