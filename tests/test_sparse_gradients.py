"""Tables with sparse gradients (``sparse=True``): equal to one process in every layout, or refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import autoparallel
from autoparallel.backends import check
from autoparallel.errors import InfeasibleError, PlanError
from autoparallel.kernels.sparse_rows import own_bags, own_rows
from autoparallel.kernels.variants import vocabulary_bags, vocabulary_embedding
from autoparallel.schedule.step_config import Hybrid
from cost_models import Cluster
from tests.support.captured import plan_again
from tests.support.messages import says
from tests.support.ranks import mesh_of
from tests.support.tiers import slow

ROWS, WIDTH, BATCH = 23, 8, 12


class Tables(nn.Module):
    """Lookups one by one, in bags of one length, in bags with offsets and weights, and twice in one table."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.items = nn.Embedding(ROWS, WIDTH, sparse=sparse, padding_idx=3)
        self.tags = nn.EmbeddingBag(ROWS, WIDTH, sparse=sparse, mode="mean")
        self.words = nn.EmbeddingBag(ROWS, WIDTH, sparse=sparse, mode="sum", padding_idx=5)
        self.shared = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.head = nn.Linear(4 * WIDTH, 1)

    def forward(self, ids: Tensor, tags: Tensor, words: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        pooled = self.words(words, offsets, per_sample_weights=weights)
        both = self.shared(ids[:, 0]) * self.shared(ids[:, 1])
        read = torch.cat([self.items(ids).sum(1), self.tags(tags), pooled, both], 1)
        return (self.head(read).squeeze(1) - 1).square().mean()


def example(sparse: bool = True) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = Tables(sparse).double()
    ids = torch.randint(ROWS, (BATCH, 3))
    ids[::4] = 3
    words = torch.randint(ROWS, (3 * BATCH,))
    offsets = torch.arange(0, 3 * BATCH, 3)
    offsets[1::3] += 2    # bags of 5, 1 and 3
    return model, (ids, torch.randint(ROWS, (BATCH, 2)), words, offsets, torch.rand(3 * BATCH).double())


def optimizers(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    tables = [p for name, p in model.named_parameters() if not name.startswith("head")]
    rest = [p for name, p in model.named_parameters() if name.startswith("head")]
    return [getattr(torch.optim, kind)(tables, lr=0.05), torch.optim.AdamW(rest, lr=0.01)]


def trained(model: nn.Module, batch: tuple[Tensor, ...], kind: str, calls: int = 1, steps: int = 4) -> dict[str, Any]:
    made, losses, entries = optimizers(model, kind), [], {}
    for step in range(steps):
        for call in range(calls):
            moved = tuple(value.roll(step + call, 0) if value.dtype == torch.int64 and value.dim() > 1 else value
                          for value in batch)
            loss = model(*moved)
            loss.backward()
            losses.append(float(loss))
        entries = {name: p.grad for name, p in model.named_parameters()}
        for one in made:
            one.step()
            one.zero_grad(set_to_none=step % 2 == 0)
    full = {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in model.named_parameters()}
    state = {name: {key: value.full_tensor() if isinstance(value, DTensor) else value
                    for key, value in made[0].state.get(p, {}).items()} for name, p in model.named_parameters()}
    return {"losses": losses, "parameters": full, "state": state,
            "sparse": {name for name, g in entries.items() if g is not None and g.is_sparse}}


def on_ranks(shape: tuple[int, ...], options: dict[str, Any], kind: str, calls: int) -> dict[str, Any]:
    model, batch = example()
    parallel = autoparallel.compile(model, mesh_of(*shape), example_inputs=batch, **options)
    found = trained(parallel, batch, kind, calls)
    return found


def tables(*placements: Any) -> dict[str, Any]:
    return {f"{name}.weight": placements for name in ("items", "tags", "words", "shared")}


HOST = dict.fromkeys(("items", "tags", "words", "shared"), "host")


@pytest.mark.ranks
@pytest.mark.parametrize(("shape", "options", "kind", "calls"), [
    ((2,), {"pins": tables(Shard(0))}, "SparseAdam", 1),
    ((4,), {"pins": tables(Shard(0))}, "Adagrad", 2),
    slow((2,), {"pins": tables(Shard(1))}, "SparseAdam", 2),
    ((2, 2), {"pins": tables(Shard(0), Shard(1)), "zero_stage": 3}, "SparseAdam", 1),
    slow((2,), {"pins": tables(Replicate())}, "SGD", 1),
    slow((4,), {}, "SparseAdam", 1),
    ((4,), {"baseline": "ddp"}, "SGD", 2),
    slow((2, 2), {"baseline": "fsdp"}, "Adagrad", 1),
    slow((2,), {"pins": HOST}, "SparseAdam", 2),
    ((4,), {"pins": {**HOST, **tables(Shard(0))}, "zero_stage": 1}, "Adagrad", 1),
    slow((1,), {}, "SparseAdam", 2),
])
def test_equal_to_one_process(ranks: Any, shape: tuple[int, ...], options: dict[str, Any], kind: str, calls: int
                              ) -> None:
    model, batch = example()
    wanted = trained(model, batch, kind, calls)
    count = int(torch.tensor(shape).prod())
    for found in ranks(count).run(on_ranks, shape, options, kind, calls, timeout_s=120):
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-9)
        assert found["sparse"] == wanted["sparse"]
        for name, value in wanted["parameters"].items():
            torch.testing.assert_close(found["parameters"][name], value, rtol=1e-9, atol=1e-11)
            for key, state in wanted["state"][name].items():
                torch.testing.assert_close(found["state"][name][key], state, rtol=1e-9, atol=1e-11)


def in_micro_batches(options: dict[str, Any], host: bool) -> list[float]:
    """Steps with clipping, on (2,) or in a pipeline on (2, 2)."""
    model, batch = micro_model()
    pins = {"table*": "host"} if host else {"table.weight": (Shard(0),), "other.weight": (Shard(1),)}
    mesh = mesh_of(2, 2) if "pipeline_stages" in options else mesh_of(2)
    parallel = autoparallel.compile(model, mesh, example_inputs=batch, pins=pins, **options)
    return micro_steps(parallel, batch, parallel.step, parallel.clip_grad_norm_)


PATHS = ("table.weight", "other.weight")


class Micro(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.other = nn.Embedding(ROWS, WIDTH, sparse=True), nn.EmbeddingBag(ROWS, WIDTH, sparse=True)
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        read = torch.cat([self.table(ids).sum(1), self.other(ids)], 1)
        return (self.head(read).squeeze(1) - 1).square().mean()


def micro_model() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Micro().double(), (torch.randint(ROWS, (8, 3)),)


def micro_steps(model: nn.Module, batch: tuple[Tensor, ...], step: Any, clip: Any) -> list[float]:
    tables, rest = ([p for name, p in model.named_parameters() if ("head" in name) == dense] for dense in (False, True))
    made: list[torch.optim.Optimizer] = [torch.optim.SparseAdam(tables, lr=0.1)] if tables else []
    made += [torch.optim.SGD(rest, lr=0.1)] if rest else []    # pipeline ranks have some of both
    losses = []
    for _ in range(4):
        losses += [float(step(*batch)), float(clip(0.05))]
        for one in made:
            one.step()
            one.zero_grad()
    return losses


def clip_by_hand(model: nn.Module, most: float) -> Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, which takes no sparse gradients."""
    parameters: list[Any] = list(model.parameters())
    for p in parameters:
        p.grad = p.grad.coalesce() if p.grad.is_sparse else p.grad
    values = [p.grad._values() if p.grad.is_sparse else p.grad for p in parameters]
    norm = torch.stack([value.norm() for value in values]).norm()
    for value in values:
        value.mul_(min(1.0, most / (float(norm) + 1e-6)))
    return norm


@pytest.mark.ranks
@pytest.mark.parametrize(("options", "host"), [
    slow({"micro_batches": 4}, False), ({"micro_batches": 2, "zero_stage": 2}, True),
    ({"micro_batches": 2, "copies": 2}, False), ({"recompute": "full"}, False),
    slow({"micro_batches": 4, "pipeline_stages": 2, "zero_stage": 1}, False),
    ({"micro_batches": 4, "pipeline_stages": 4, "schedule": "zero_bubble"}, False)])
def test_micro_batches_and_clipping(ranks: Any, options: dict[str, Any], host: bool) -> None:
    model, batch = micro_model()

    def step(*batch: Tensor) -> Tensor:
        loss: Tensor = model(*batch)
        loss.backward()
        return loss.detach()

    wanted = micro_steps(model, batch, step, lambda most: clip_by_hand(model, most))
    for found in ranks(4 if "pipeline_stages" in options else 2).run(in_micro_batches, options, host, timeout_s=120):
        assert found == pytest.approx(wanted, rel=1e-6)    # norms are told in float32


def step_with_plain_gradient(weight: Any) -> None:
    given, weight.grad = weight.grad, weight.grad.full_tensor().to_sparse(1)
    try:
        torch.optim.SparseAdam([weight]).step()
    finally:
        weight.grad = given


def users_code() -> dict[str, Any]:
    model, batch = micro_model()
    parallel = autoparallel.compile(model, mesh_of(2), example_inputs=batch, pins={"table.weight": (Shard(0),)})
    weight: Any = parallel.get_parameter("table.weight")
    found: dict[str, Any] = {}
    seen: list[bool] = []

    def double(gradient: Tensor) -> Tensor:
        seen.append(gradient.is_sparse)
        return gradient * 2

    handle = weight.register_hook(double)
    parallel(*batch).backward()
    handle.remove()
    doubled = weight.grad.full_tensor()
    weight.grad = None
    parallel(*batch).backward()
    once = weight.grad
    found["hook"], found["doubled"] = seen, torch.equal(doubled, 2 * once.full_tensor())
    dense = once.full_tensor()
    once *= 0.5
    found["scaled"] = torch.equal(once.full_tensor(), dense / 2)
    weight.grad = weight.grad / 2 + weight.grad / 2
    found["added"] = torch.allclose(weight.grad.full_tensor(), dense / 2) and weight.grad.is_sparse
    found["text"] = repr(weight.grad)
    for name, call in {"norm": lambda: weight.grad.norm(), "exp": lambda: weight.grad.exp(),
                       "torch clip": lambda: torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0),
                       "adamw": lambda: torch.optim.AdamW(parallel.parameters()).step(),
                       "sparse of dense": lambda: torch.optim.SparseAdam(parallel.parameters()).step(),
                       "closure": lambda: torch.optim.SparseAdam([weight]).step(lambda: parallel(*batch)),
                       "plain": lambda: step_with_plain_gradient(weight),
                       "graph": lambda: parallel(*batch).backward(create_graph=True)}.items():
        try:
            found[name] = repr(call())
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    weight.grad = weight.grad.to_dense()
    torch.optim.AdamW([weight]).step()
    return found


SAID = {
    "norm": ("InputError: aten.norm", "clipped by parallel.clip_grad_norm_", "p.grad.to_dense() has all rows"),
    "exp": ("InputError: aten.exp", "added, scaled and set to zero"),
    "torch clip": ("InputError", "clipped by parallel.clip_grad_norm_"),
    "adamw": ("RuntimeError: Adam does not support sparse gradients",),    # torch's own
    "sparse of dense": ("InputError: SparseAdam takes sparse gradients only", "[1, 16] is dense"),
    "plain": ("InputError: the gradient of a parameter [23, 8] on a mesh is a plain tensor", "Give a DTensor"),
    "closure": ("InputError: SparseAdam.step(closure)", "call the closure first"),
    "graph": ("InputError: backward(create_graph=True) through lookups with sparse gradients", "sparse=False")}


@pytest.mark.ranks
def test_what_users_do_with_them(ranks: Any) -> None:
    for found in ranks(2).run(users_code, timeout_s=120):
        assert found["hook"] == [True] and found["doubled"] and found["scaled"] and found["added"]
        assert "layout=torch.sparse_coo" in found["text"] and "Shard(dim=0)" in found["text"]
        for name, parts in SAID.items():
            assert all(part in found[name] for part in parts), found[name]


def steps_on(model: nn.Module, batch: tuple[Tensor, ...], kind: str, steps: int, made: Any = None, scaler: Any = None
             ) -> tuple[list[float], Any]:
    """Steps of one optimizer over the tables, with momentum where it has that; returns losses and optimizer."""
    kept = {"momentum": 0.9} if kind == "SGD" else {}
    made = made or getattr(torch.optim, kind)([model.get_parameter(name) for name in PATHS], lr=0.1, **kept)
    losses = []
    for _ in range(steps):
        loss = model(*batch)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            made.step()
        else:
            scaler.unscale_(made)
            scaler.step(made)
            scaler.update()
        model.zero_grad()
        losses.append(float(loss))
    return losses, made


def in_another_layout(kind: str, folder: str) -> list[list[float]]:
    """Two more steps after two in another layout: with the optimizer's state dict, and from a checkpoint."""
    found = []
    for by_file in (False, True):
        model, batch = micro_model()
        model.head.requires_grad_(False)
        first, other = (autoparallel.compile(model, mesh_of(2), example_inputs=batch, pins={
            name: (Shard(dim),) for name in PATHS}) for dim in (0, 1))
        losses, made = steps_on(first, batch, kind, 2)
        _, again = steps_on(other, batch, kind, 0)
        if by_file:
            first.save(folder, made)
            other.load(folder, again)
        else:
            other.load_state_dict(first.state_dict())
            again.load_state_dict(made.state_dict())
        found.append(losses + steps_on(other, batch, kind, 2, again)[0])
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["SparseAdam", slow("SGD"), slow("Adagrad")])
def test_states_go_to_another_layout(ranks: Any, kind: str, tmp_path: Path) -> None:
    model, batch = micro_model()
    wanted, _ = steps_on(model, batch, kind, 4)
    for found in ranks(2).run(in_another_layout, kind, str(tmp_path), timeout_s=120):
        assert all(losses == pytest.approx(wanted, rel=1e-9) for losses in found)


def hooks_and_scaler() -> dict[str, Any]:
    """What step hooks see, of before and after the first step; steps with scaled gradients, one of them infinite."""
    model, batch = micro_model()
    parallel = autoparallel.compile(model, mesh_of(2), example_inputs=batch, pins={"table.weight": (Shard(0),)})
    _, made = steps_on(parallel, batch, "SparseAdam", 0)
    seen: list[bool] = []

    def see(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.extend(isinstance(p, DTensor) and p.grad is not None for p in optimizer.param_groups[0]["params"])

    for _ in range(2):
        made.register_step_pre_hook(see)
        made.register_step_post_hook(see)
        steps_on(parallel, batch, "SparseAdam", 1, made)
    found: dict[str, Any] = {"seen": seen.copy()}
    for name, scaler in (("ours", autoparallel.GradScaler("cpu", 8.0)), ("torchs", torch.amp.GradScaler("cpu", 8.0))):
        weight: Any = parallel.get_parameter("table.weight")
        before = weight.full_tensor().clone()
        handle = weight.register_hook(lambda gradient: gradient * float("inf"))
        steps_on(parallel, batch, "SparseAdam", 1, made, scaler)
        handle.remove()
        found[name] = torch.equal(before, weight.full_tensor()), scaler.get_scale()
        found[f"{name}, losses"] = steps_on(parallel, batch, "SparseAdam", 2, made, scaler)[0]
    return found


@pytest.mark.ranks
def test_hooks_see_parameters_and_scalers_divide(ranks: Any) -> None:
    model, batch = micro_model()
    losses, made = steps_on(model, batch, "SparseAdam", 2)
    wanted = [steps_on(model, batch, "SparseAdam", 2, made)[0] for _ in range(2)]
    for found in ranks(2).run(hooks_and_scaler, timeout_s=120):
        assert found["seen"] == [True] * 12
        for name, losses in zip(("ours", "torchs"), wanted, strict=True):
            assert found[name] == (True, 4.0) and found[f"{name}, losses"] == pytest.approx(losses, rel=1e-9)


# --- without processes ----------------------------------------------------------------------------------------------

SHARDS = ((0, 10), (10, 15), (15, ROWS))


def test_rows_of_shards_are_those_of_the_whole() -> None:
    """Rows of other shards and the padding's have no entry."""
    torch.manual_seed(0)
    table, upstream = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(20, WIDTH)
    ids = torch.randint(ROWS, (20,))
    (wanted,) = torch.autograd.grad(nn.functional.embedding(ids, table, padding_idx=7), table, upstream)
    for start, end in SHARDS:
        shard = table.detach()[start:end].requires_grad_()
        (found,) = torch.autograd.grad(own_rows(shard, ids, start, ROWS, 7), shard, upstream)
        assert found._nnz() == int(((ids >= start) & (ids < end) & (ids != 7)).sum())
        torch.testing.assert_close(found.to_dense(), wanted[start:end])


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("bad", [-1, ROWS])
def test_ids_that_the_table_has_not_are_torchs_error(bad: int, sparse: bool) -> None:
    ids = torch.tensor([[1, bad], [12, 22]])
    for start, end in SHARDS:
        shard = torch.randn(ROWS, WIDTH)[start:end]
        with pytest.raises(IndexError, match="index out of range"):
            vocabulary_embedding(shard, ids, -1, False, sparse, start=start, length=ROWS)
        with pytest.raises(RuntimeError, match=r"idx|valid range"):
            vocabulary_bags(shard, ids, None, None, 0, False, None, sparse, start=start, length=ROWS)


@pytest.mark.parametrize("last", [True, False])
def test_bags_of_shards_add_up_to_the_whole(last: bool) -> None:
    torch.manual_seed(0)
    table, weights = torch.randn(ROWS, WIDTH, requires_grad=True), torch.rand(20, requires_grad=True)
    ids, offsets = torch.randint(ROWS, (20,)), torch.tensor([0, 0, 4, 11, *([20] if last else [])])
    whole = nn.functional.embedding_bag(ids, table, offsets, mode="sum", per_sample_weights=weights,
                                        include_last_offset=last, padding_idx=7)
    upstream = torch.randn_like(whole)
    of_table, of_weights = torch.autograd.grad(whole, (table, weights), upstream)
    sums = [torch.zeros_like(whole), torch.zeros_like(weights)]
    for start, end in SHARDS:
        shard = table.detach()[start:end].requires_grad_()
        made = own_bags(shard, ids, weights, offsets, 0, last, 7, start, ROWS)
        found, own_weights = torch.autograd.grad(made, (shard, weights), upstream)
        assert found.is_sparse
        torch.testing.assert_close(found.to_dense(), of_table[start:end])
        sums = [sums[0] + made, sums[1] + own_weights]
    torch.testing.assert_close(sums, [whole, of_weights])


MACHINE = Cluster.load("h100-sxm", num_devices=4)


@functools.cache
def with_large_tables(sparse: bool) -> Micro:
    """A batch reads few of their rows."""
    with torch.device("meta"):
        model = Micro()
        model.table = nn.Embedding(200_000, WIDTH, sparse=sparse)
        model.other = nn.EmbeddingBag(100_000, WIDTH, sparse=sparse)
    return model


def planned(sparse: bool, **options: Any) -> autoparallel.plans.Plan:
    batch = (torch.zeros(64, 3, dtype=torch.int64),)
    return plan_again(with_large_tables(sparse), MACHINE, batch, **{"mesh_shape": (4,), **options})


@pytest.mark.parametrize("options", [
    {}, {"baseline": "ddp"}, {"zero_stage": 3}, {"micro_batches": 2}, {"pins": {"table*": "host", "other*": "host"}}])
def test_sparse_tables_are_read_as_stored_and_stepped_by_rows(options: dict[str, Any]) -> None:
    dense, plan = planned(False, **options), planned(True, **options)
    for name, op in (("table.weight", "embedding"), ("other.weight", "embedding_bag_default")):
        assert plan.strategies[op] == (READ_AS[plan.strategies[name]],)
    assert plan.prediction.optimizer_s < 0.1 * dense.prediction.optimizer_s


@pytest.mark.parametrize("host", [False, True])
def test_memory_is_of_weights_and_states(host: bool) -> None:
    pins = {name: (Shard(1),) for name in PATHS} | ({"table": "host", "other": "host"} if host else {})
    sparse, dense = (planned(sparse, pins=pins).prediction for sparse in (True, False))
    found = sparse.host_bytes / dense.host_bytes if host else sparse.peak_bytes / dense.peak_bytes
    assert 0.74 < found < 0.78    # two states, no gradient


#: By the layout of a table, how its rows are looked up where they are.
READ_AS: dict[tuple[str, ...], str] = {("S(0)",): "vocabulary", ("S(1)",): "h", ("I",): "repeat"}


def test_micro_batches_add_up_rows() -> None:
    """Seven additions of whole tables, two reads and a write each, are left out."""
    pins = {name: (Replicate(),) for name in PATHS}
    added = {sparse: planned(sparse, pins=pins, micro_batches=8).prediction.backward_s
             - planned(sparse, pins=pins, micro_batches=1).prediction.backward_s for sparse in (True, False)}
    read_s = 7 * 3 * 4 * 300_000 * WIDTH / MACHINE.device.memory_bandwidth_bytes_per_s
    assert added[False] - added[True] > 0.9 * read_s


def test_steps_elsewhere_are_refused() -> None:
    says(InfeasibleError, "table.weight has sparse gradients", "{'table.weight': 'none', '*': 'host'}",
         of=lambda: planned(True, offload="host"))


@pytest.mark.parametrize("host", [False, True])
def test_means_of_bags_are_not_cut_by_rows(host: bool) -> None:
    """Of bags of several lengths."""
    model, batch = example()
    model.words.mode = "mean"
    given = (*batch[:-1], None)
    pins = {"words": "host"} if host else {}
    says(InfeasibleError, "words.weight is looked up as it is stored", "cannot look it up as its pin lays it out",
         "Pin 'words.weight' by columns, Shard(1)", of=lambda: autoparallel.plan(
             model, MACHINE, example_inputs=given, mesh_shape=(4,), pins={**pins, "words.weight": (Shard(0),)}))


def test_compiled_graphs_are_refused() -> None:
    says(PlanError, "table.weight has sparse gradients", "take backend='eager'",
         of=lambda: check("inductor", Hybrid(), ["table.weight"]))
