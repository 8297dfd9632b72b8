"""Tables on the host whose hot rows the device caches: equal to one process; flushed, saved, priced, refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import autoparallel
from autoparallel.runtime.cached_tables import CachedTable
from tests.support.ranks import mesh_of

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
    ((1,), {"pins": pins(ROWS)}, "SparseAdam"), ((1,), {"pins": pins(14)}, "Adagrad"),
    ((1,), {"pins": pins(3)}, "SparseAdam"), ((1,), {"pins": pins(1)}, "SGD"),
    ((2,), {"pins": pins(12, Shard(0))}, "SparseAdam"), ((2,), {"pins": pins(0.3, Shard(1))}, "Adagrad"),
    ((2,), {"pins": pins(14, Replicate())}, "SGD"),
    ((2, 2), {"pins": pins(6, Shard(0), Shard(1)), "zero_stage": 3}, "SparseAdam"),
    ((4,), {"pins": pins(5)}, "Adagrad"),
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
