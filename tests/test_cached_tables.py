"""Tables on the host whose hot rows the device caches: equal to one process; flushed, saved, priced, refused."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import autoparallel
from autoparallel.runtime.cached_tables import CachedTable
from tests.support.messages import message_of
from tests.support.ranks import mesh_of
from tests.support.tiers import slow

ROWS, WIDTH, BATCH = 23, 8, 12


class Tables(nn.Module):
    """Lookups one by one, in bags of one length, in bags with offsets and trained weights, and twice in one table."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ROWS, WIDTH, sparse=True, padding_idx=3)
        self.tags = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="mean")
        self.words = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum", padding_idx=5)
        self.shared = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.scale, self.head = nn.Parameter(torch.ones(3)), nn.Linear(4 * WIDTH, 1)

    def forward(self, ids: Tensor, tags: Tensor, words: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        scaled = (weights.view(-1, 3) * self.scale).flatten()
        pooled = self.words(words, offsets, per_sample_weights=scaled)
        both = self.shared(ids[:, 0]) * self.shared(ids[:, 1])
        read = torch.cat([self.items(ids).sum(1), self.tags(tags), pooled, both], 1)
        return (self.head(read).squeeze(1) - 1).square().mean()


NAMES = ("items", "tags", "words", "shared")


def zipf(*shape: int) -> Tensor:
    """Row numbers of which few are frequent."""
    return torch.multinomial(1 / torch.arange(1.0, ROWS + 1), int(torch.tensor(shape).prod()), True).view(shape)


def example() -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    """The model, and a batch for each step."""
    torch.manual_seed(0)
    model, batches = Tables().double(), []
    offsets = torch.arange(0, 3 * BATCH, 3)
    offsets[1::3] += 2    # bags of 5, 1 and 3
    for _ in range(5):
        batches.append((zipf(BATCH, 3), zipf(BATCH, 2), zipf(3 * BATCH), offsets, torch.rand(3 * BATCH).double()))
    return model, batches


def optimizers(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    tables = [p for name, p in model.named_parameters() if name.split(".")[0] in NAMES]
    rest = [p for name, p in model.named_parameters() if name.split(".")[0] not in NAMES]
    return [getattr(torch.optim, kind)(tables, lr=0.05), torch.optim.AdamW(rest, lr=0.01)]


def whole(value: Any) -> Any:
    return value.full_tensor().clone() if isinstance(value, DTensor) else value


def trained(model: nn.Module, batches: list[tuple[Tensor, ...]], kind: str) -> dict[str, Any]:
    made, losses = optimizers(model, kind), []
    for step, batch in enumerate(batches):
        loss = model(*batch)
        loss.backward()
        losses.append(float(loss))
        for one in made:
            one.step()
            one.zero_grad(set_to_none=step % 2 == 0)
    state = {name: {key: whole(value) for key, value in made[0].state.get(p, {}).items()}
             for name, p in model.named_parameters()}
    return {"losses": losses, "parameters": {name: whole(p).detach() for name, p in model.named_parameters()},
            "state": state}


def pins(rows: float, *placements: Any) -> dict[str, Any]:
    of_tables = {f"{name}.weight": placements for name in NAMES} if placements else {}
    return {**dict.fromkeys(NAMES, autoparallel.Cached(rows)), **of_tables}


def on_ranks(shape: tuple[int, ...], options: dict[str, Any], kind: str) -> dict[str, Any]:
    model, batches = example()
    parallel = autoparallel.compile(model, mesh_of(*shape), example_inputs=batches[0], **options)
    found = trained(parallel, batches, kind)
    return found | {"cached": {name for name, p in parallel.named_parameters() if isinstance(p, CachedTable)}}


@pytest.mark.ranks
@pytest.mark.parametrize(("shape", "options", "kind"), [
    slow((1,), {"pins": pins(ROWS)}, "SparseAdam"), slow((1,), {"pins": pins(14)}, "Adagrad"),
    ((1,), {"pins": pins(3)}, "SparseAdam"), ((1,), {"pins": pins(1)}, "SGD"),
    ((2,), {"pins": pins(12, Shard(0))}, "SparseAdam"), ((2,), {"pins": pins(0.3, Shard(1))}, "Adagrad"),
    slow((2,), {"pins": pins(14, Replicate())}, "SGD"),
    ((2, 2), {"pins": pins(6, Shard(0), Shard(1)), "zero_stage": 3}, "SparseAdam"),
    slow((4,), {"pins": pins(5)}, "Adagrad"),
])
def test_equal_to_one_process(ranks: Any, shape: tuple[int, ...], options: dict[str, Any], kind: str) -> None:
    wanted = trained(*example(), kind)
    for found in ranks(int(torch.tensor(shape).prod())).run(on_ranks, shape, options, kind, timeout_s=120):
        assert found["cached"] == {f"{name}.weight" for name in NAMES}
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-9)
        for name, value in wanted["parameters"].items():
            torch.testing.assert_close(found["parameters"][name], value, rtol=1e-9, atol=1e-11)
            for key, state in wanted["state"][name].items():
                torch.testing.assert_close(found["state"][name][key], state, rtol=1e-9, atol=1e-11)


def in_each_way(kind: str) -> list[dict[str, Any]]:
    """The same steps with lookups on the host, then with caches that hold all rows, some rows, and one."""
    return [on_ranks((1,), {"pins": some}, kind)
            for some in (dict.fromkeys(NAMES, "host"), pins(ROWS), pins(6), pins(1))]


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["SparseAdam", "Adagrad", "SGD"])
def test_numbers_are_those_without_a_cache(ranks: Any, kind: str) -> None:
    """To the bit: losses, parameters and states."""
    without, *found = ranks(1).run(in_each_way, kind, timeout_s=120)[0]
    for one in found:
        assert one["losses"] == without["losses"]
        for name, value in without["parameters"].items():
            assert torch.equal(one["parameters"][name], value), name
            for key, state in without["state"][name].items():
                assert torch.equal(torch.as_tensor(one["state"][name][key]), torch.as_tensor(state)), (name, key)


def counted(rows: int) -> dict[str, Any]:
    """What caches count, in lookups and in a log, beside what the ids say."""
    model, batches = example()
    parallel = autoparallel.compile(model, mesh_of(1), example_inputs=batches[0],
                                    pins={**pins(rows), "items": autoparallel.Cached(rows, hits=0.5)})
    table: Any = parallel.get_parameter("items.weight")
    log, made, found = autoparallel.StepLog(parallel, every=1), optimizers(parallel, "SparseAdam"), []
    for batch in batches:
        parallel(*batch).backward()
        for one in made:
            one.step()
            one.zero_grad()
        log.step()
        found.append(parallel.table_lookups()["items.weight"])
    before = parallel.table_lookups(forget=True)
    assert before["items.weight"] == found[-1] and parallel.table_lookups()["items.weight"].ids == 0
    assert log.last is not None and log.last.hits is not None and "of lookups on the device" in str(log.last)
    return {"found": found, "slots": table.cache.slots, "hits": log.last.hits, "given": log.last.plan_hits}


@pytest.mark.ranks
def test_lookups_are_counted(ranks: Any) -> None:
    """With a slot for each row, a row is loaded once, and none is written back; with fewer, evicted rows are."""
    _, batches = example()
    first = {int(row) for row in batches[0][0].flatten()}
    (all_fit,) = ranks(1).run(counted, ROWS, timeout_s=120)
    start, *_, end = all_fit["found"]
    assert (start.ids, start.hits, start.loaded, start.written) == (3 * BATCH, 0, len(first), 0)
    assert end.ids == 5 * 3 * BATCH and end.written == 0 and 0.5 < end.hit_rate < 1
    assert end.loaded == len({int(row) for ids, *_ in batches for row in ids.flatten()})
    assert all_fit["hits"] > 0.9 and 0 < all_fit["given"] < 1
    (some_fit,) = ranks(1).run(counted, 10, timeout_s=120)
    last = some_fit["found"][-1]
    assert some_fit["slots"] == 10 and last.written > 0 and last.loaded > end.loaded and last.hit_rate < end.hit_rate


def read_by_others() -> dict[str, bool]:
    """Whoever reads or writes a table between steps sees all of it, and is seen."""
    model, batches = example()
    reference, _ = example()
    parallel = autoparallel.compile(model, mesh_of(1), example_inputs=batches[0], pins=pins(6))
    ours, theirs = optimizers(parallel, "SparseAdam"), optimizers(reference, "SparseAdam")

    def step(batch: tuple[Tensor, ...]) -> None:
        for module, made in ((parallel, ours), (reference, theirs)):
            module(*batch).backward()
            for one in made:
                one.step()
                one.zero_grad()

    def same(found: Any) -> bool:
        return all(torch.allclose(whole(value), wanted, rtol=1e-9) for value, wanted in zip(
            found, reference.state_dict().values(), strict=True))

    table: Any = parallel.get_parameter("items.weight")
    step(batches[0])
    found = {"state dict": same(parallel.state_dict().values())}
    step(batches[1])
    copied = copy.deepcopy(parallel)
    found["copy"] = same(p for p in copied.parameters())
    kept, before = parallel.state_dict(), whole(table)
    step(batches[2])
    found["alias"] = same(kept.values()) and same(parallel.parameters())
    found["copy stays"] = torch.equal(whole(copied.get_parameter("items.weight")), before)
    with torch.no_grad():
        for module in (parallel, reference):
            module.get_parameter("items.weight").mul_(0.5)
            module.get_parameter("tags.weight").data.view(-1).add_(1.0)
    step(batches[3])
    found["written in place"] = same(parallel.parameters())
    parallel.load_state_dict(reference.state_dict())
    step(batches[4])
    found["loaded"] = same(parallel.parameters())
    state = ours[0].state[table]["exp_avg"]
    found["optimizer state"] = torch.allclose(whole(state), theirs[0].state[reference.items.weight]["exp_avg"])
    ours[0].load_state_dict(copy.deepcopy(theirs[0].state_dict()))
    step(batches[0])
    found["loaded state"] = same(parallel.parameters())
    parallel.eval(), reference.eval()
    with torch.no_grad():
        found["eval"] = torch.allclose(whole(parallel(*batches[1])), reference(*batches[1]))
    file = io.BytesIO()
    torch.save(parallel.state_dict(), file)
    file.seek(0)
    found["file"] = same(torch.load(file, weights_only=False).values())
    return found


@pytest.mark.ranks
def test_others_read_and_write_whole_tables(ranks: Any) -> None:
    (found,) = ranks(1).run(read_by_others, timeout_s=120)
    assert found and all(found.values()), found


def one_optimizer(parallel: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parallel.parameters(), lr=0.05)


def steps(model: Any, batches: list[tuple[Tensor, ...]], made: torch.optim.Optimizer) -> list[float]:
    losses = []
    for batch in batches:
        loss = model(*batch)
        loss.backward()
        made.step()
        made.zero_grad()
        losses.append(float(whole(loss.detach())))
    return losses


def saved_and_loaded(folder: Path, some: list[dict[str, Any]]) -> list[list[float]]:
    """The losses of steps that follow a checkpoint under the first pins, continued under each of them."""
    found = []
    for number, given in enumerate(some):
        model, batches = example()
        parallel = autoparallel.compile(model, mesh_of(2), example_inputs=batches[0], pins=given)
        made = one_optimizer(parallel)
        if not number:
            steps(parallel, batches[:2], made)
            parallel.save(folder / "saved", made, step=2)
            parallel.save_pretrained(folder / "weights")
        else:
            parallel.load(folder / "saved", made)
        found.append(steps(parallel, batches[2:], made))
    with torch.device("meta"):
        empty = Tables().double()
    loaded = autoparallel.compile(empty, mesh_of(2), example_inputs=batches[0], pins=pins(5))
    loaded.load_pretrained(folder / "weights")
    assert isinstance(loaded.get_parameter("items.weight"), CachedTable)
    return [*found, [float(whole(loaded(*batches[2]).detach()))]]


@pytest.mark.ranks
def test_checkpoints_go_to_plans_with_and_without_caches(ranks: Any, tmp_path: Path) -> None:
    model, batches = example()
    wanted = steps(model, batches, one_optimizer(model))
    some = [pins(6), {}, dict.fromkeys(NAMES, "host"), pins(4, Shard(0)), pins(0.5, Shard(1))]
    for found in ranks(2).run(saved_and_loaded, tmp_path, some, timeout_s=120):
        assert len(found) == len(some) + 1
        for losses in found[:-1]:
            assert losses == pytest.approx(wanted[2:], rel=1e-9)
        assert found[-1] == pytest.approx([wanted[2]], rel=1e-9)


# --- beside other options ---------------------------------------------------------------------------------------------


class Micro(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.other = nn.Embedding(ROWS, WIDTH, sparse=True), nn.EmbeddingBag(ROWS, WIDTH, sparse=True)
        self.frozen = nn.Embedding(ROWS, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(2 * WIDTH, 2 * WIDTH) for _ in range(4))
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        read = torch.cat([self.table(ids).sum(1) + self.frozen(ids[:, 0]), self.other(ids)], 1)
        for layer in self.layers:
            read = layer(read).relu()
        return (self.head(read).squeeze(1) - 1).square().mean()


def micro() -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    torch.manual_seed(0)
    return Micro().double(), [(zipf(8, 3),) for _ in range(4)]


def micro_steps(model: Any, batches: list[tuple[Tensor, ...]], step: Any, clip: Any, make: Any, calls: int
                ) -> list[float]:
    tables, rest = ([p for name, p in model.named_parameters()
                     if p.requires_grad and name.startswith(("table", "other")) == table] for table in (True, False))
    made = [make(kind, some) for kind, some in (("SparseAdam", tables), ("SGD", rest)) if some]
    losses = []
    for batch in batches:
        losses += [float(step(*batch)) for _ in range(calls)]
        losses += [float(clip(model))] if clip else []
        for one in made:
            one.step()
            one.zero_grad()
    return losses


def clip_by_hand(model: nn.Module) -> Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, which takes no sparse gradients."""
    for p in model.parameters():
        p.grad = p.grad.coalesce() if p.grad is not None and p.grad.is_sparse else p.grad
    values = [p.grad._values() if p.grad.is_sparse else p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([value.norm() for value in values]).norm()
    for value in values:
        value.mul_(min(1.0, 0.05 / (float(norm) + 1e-6)))
    return norm


def micro_on_ranks(shape: tuple[int, ...], options: dict[str, Any], calls: int) -> list[float]:
    model, batches = micro()
    parallel = autoparallel.compile(model, mesh_of(*shape), example_inputs=batches[0], **options)
    assert parallel.plan.hybrid.cached
    in_backward = "step_in_backward" in options

    def make(kind: str, some: Any) -> Any:
        ours = in_backward or (kind == "SGD" and "offload" in options)    # tiers step dense gradients
        found: Any = getattr(torch.optim, kind)
        return parallel.optimizer(found, some, lr=0.1) if ours else found(some, lr=0.1)

    return micro_steps(parallel, batches, parallel.step, None if in_backward else lambda _: parallel.clip_grad_norm_(
        0.05), make, calls)


MICRO = {"table": autoparallel.Cached(4), "other": autoparallel.Cached(12), "frozen": autoparallel.Cached(0.2)}


@pytest.mark.ranks
@pytest.mark.parametrize(("shape", "options", "calls"), [
    slow((2,), {"micro_batches": 4}, 1), ((2,), {"micro_batches": 2, "zero_stage": 2}, 2),
    ((2,), {"micro_batches": 2, "copies": 2, "zero_stage": 3}, 1), slow((2,), {"recompute": "full"}, 1),
    slow((2,), {"recompute": "selective"}, 1), ((2,), {"recompute": "offload", "micro_batches": 2}, 1),
    slow((2,), {"micro_batches": 4, "pipeline_stages": 2, "schedule": "zero_bubble"}, 1),
    slow((1,), {"step_in_backward": True}, 1), ((2,), {"step_in_backward": True, "micro_batches": 2}, 1),
    slow((2, 2), {"micro_batches": 4, "pipeline_stages": 2, "zero_stage": 1}, 1),
    ((2,), {"offload": {"table.*": "none", "other.*": "none", "frozen.*": "none", "*": "parameters"}}, 1)])
def test_goes_with_other_options(ranks: Any, shape: tuple[int, ...], options: dict[str, Any], calls: int) -> None:
    model, batches = micro()

    def step(*batch: Tensor) -> Tensor:
        loss: Tensor = model(*batch)
        loss.backward()
        return loss.detach()

    clip = None if "step_in_backward" in options else clip_by_hand
    wanted = micro_steps(model, batches, step, clip, lambda kind, some: getattr(torch.optim, kind)(some, lr=0.1), calls)
    count = int(torch.tensor(shape).prod())
    for found in ranks(count).run(micro_on_ranks, shape, {**options, "pins": MICRO}, calls, timeout_s=120):
        assert found == pytest.approx(wanted, rel=1e-6)    # norms are told in float32


def refused_in_steps() -> list[str]:
    model, batches = example()
    parallel = autoparallel.compile(model, mesh_of(1), example_inputs=batches[0], pins=pins(6))
    tables = [p for name, p in parallel.named_parameters() if name.split(".")[0] in NAMES]
    parallel(*batches[0]).backward()
    dense: Any = tables[0].grad
    tables[0].grad = dense.to_dense()
    found = [message_of(torch.optim.SparseAdam([tables[0]]).step)]
    tables[0].grad = dense
    found += [message_of(made.step) for made in (torch.optim.SGD(tables, lr=1.0, momentum=0.5),
                                                 torch.optim.AdamW(tables, lr=1.0))]
    found.append(message_of(lambda: torch.optim.Adagrad(tables).step(lambda: 0.0)))
    later = torch.optim.SGD(tables, lr=0.0)
    later.step()
    later.param_groups[0]["momentum"] = 0.25
    found.append(message_of(later.step))
    ids = batches[0][0].clone()
    ids[0] = ROWS
    found.append(message_of(lambda: parallel(ids, *batches[0][1:])))
    return found


@pytest.mark.ranks
def test_refused_in_steps(ranks: Any) -> None:
    dense, momentum, adam, closure, later, beyond = ranks(1).run(refused_in_steps, timeout_s=120)[0]
    assert "SparseAdam takes sparse gradients only" in dense
    assert "SGD(momentum=0.5) cannot step a table [23, 8] with a cache" in momentum
    assert "SparseAdam, Adagrad, or SGD without momentum" in momentum
    assert "SGD(momentum=0.25) cannot step a table [23, 8] with a cache" in later
    assert "AdamW cannot step a table" in adam and "call the closure first" in closure
    assert "IndexError: index out of range" in beyond


def after_a_failed_step(model: nn.Module, batches: list[tuple[Tensor, ...]], resets: bool) -> dict[str, Any]:
    """Steps of which one fails before it changes anything; its gradients are reset, or those of the next added."""
    tables = [p for name, p in model.named_parameters() if name.split(".")[0] in NAMES]
    made, losses = torch.optim.SparseAdam(tables, lr=0.05), []
    for number, batch in enumerate(batches):
        loss = model(*batch)
        loss.backward()
        losses.append(float(loss))
        betas = made.param_groups[0]["betas"]
        if number == 2:
            made.param_groups[0]["betas"] = None
        try:
            made.step()
        except TypeError:
            assert number == 2
            assert not resets or [len(p) for p in made.state_dict()["state"].values()] == [3] * 4
        made.param_groups[0]["betas"] = betas
        if number != 2 or resets:
            made.zero_grad()
    return {"losses": losses, **{name: whole(p).detach() for name, p in model.named_parameters()}}


def after_failed_steps() -> list[dict[str, Any]]:
    found = []
    for resets in (True, False):
        model, batches = example()
        parallel = autoparallel.compile(model, mesh_of(1), example_inputs=batches[0], pins=pins(3))
        found.append(after_a_failed_step(parallel, batches, resets))
    return found


@pytest.mark.ranks
def test_steps_after_one_that_failed(ranks: Any) -> None:
    for resets, found in zip((True, False), ranks(1).run(after_failed_steps, timeout_s=120)[0], strict=True):
        wanted = after_a_failed_step(*example(), resets)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def scaled_steps() -> list[tuple[list[float], bool]]:
    """Losses with scaled gradients; whether an infinite one changed nothing."""
    found = []
    for options in ({"pins": MICRO}, {"pins": MICRO, "baseline": "ddp"}):
        model, batches = micro()
        parallel = autoparallel.compile(model, mesh_of(2), example_inputs=batches[0], **options)
        scaler, made, losses = autoparallel.GradScaler("cpu", 8.0), torch.optim.Adagrad(_trained(parallel)), []
        table: Any = parallel.get_parameter("table.weight")
        for number, batch in enumerate([batches[0], *batches]):
            before = whole(table)
            hook = table.register_hook(lambda gradient: gradient * float("inf")) if not number else None
            loss = parallel(*batch)
            scaler.scale(loss).backward()
            scaler.step(made)
            scaler.update()
            made.zero_grad()
            if hook is not None:
                hook.remove()
                skipped = torch.equal(before, whole(table))
            else:
                losses.append(float(whole(loss.detach())))
        found.append((losses, skipped))
    return found


@pytest.mark.ranks
def test_gradients_are_scaled(ranks: Any) -> None:
    model, batches = micro()
    wanted = steps(model, batches, torch.optim.Adagrad(_trained(model)))
    for found in ranks(2).run(scaled_steps, timeout_s=120):
        assert all(skipped and losses == pytest.approx(wanted, rel=1e-6) for losses, skipped in found)
