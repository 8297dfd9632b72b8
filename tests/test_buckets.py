"""Several tensors in one gather or reduce-scatter: in a bucket, by themselves, and mixed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel.kernels import buckets, groups
from autoparallel.kernels.collectives import all_to_all_tensor, begin_all_gather, begin_reduce_scatter
from benchmarks.in_process import on_every_rank

RANKS = 4
#: Shapes of whole tensors, cut dims, and lengths of shards.
SHAPES = (((8, 6), 0, (2, 2, 2, 2)), ((3,), 0, (1, 1, 1, 0)), ((16, 32), 0, (4, 4, 4, 4)), ((2, 8), 1, (2, 2, 2, 2)),
          ((4,), 0, (1, 1, 1, 1)), ((2, 7, 3), 1, (2, 2, 2, 1)), ((2, 3, 8), 2, (2, 2, 2, 2)))


def _gathered(coordinate: tuple[int, ...]) -> list[torch.Tensor]:
    (rank,) = coordinate
    cuts = [(dim, sizes) for _, dim, sizes in SHAPES]
    shards = [whole.split(list(sizes), dim=dim)[rank] for whole, (dim, sizes) in zip(_wholes(0), cuts, strict=True)]
    return list(buckets.begin_all_gathers(shards, groups.current("x"), cuts)())


def _reduced(coordinate: tuple[int, ...]) -> list[torch.Tensor]:
    cuts = [(dim, sizes) for _, dim, sizes in SHAPES]
    return list(buckets.begin_reduce_scatters(_wholes(coordinate[0]), groups.current("x"), cuts)())


def _wholes(seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(-9, 9, shape, generator=random).double() for shape, _, _ in SHAPES]


@pytest.mark.parametrize("large", [1, 512, 2**30])
def test_large_tensors_are_sent_by_themselves_with_equal_results(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "LARGE_BYTES", large)
    for made in on_every_rank((RANKS,), ("x",), _gathered).values():
        assert all(torch.equal(a, b) for a, b in zip(made, _wholes(0), strict=True))
    sums = [torch.stack(parts).sum(0) for parts in zip(*map(_wholes, range(RANKS)), strict=True)]
    for (rank,), made in on_every_rank((RANKS,), ("x",), _reduced).items():
        for mine, whole, (_, dim, sizes) in zip(made, sums, SHAPES, strict=True):
            assert torch.equal(mine, whole.split(list(sizes), dim=dim)[rank])


def test_a_large_tensor_is_not_copied() -> None:
    """Gathered by itself, a tensor is the memory that the collective wrote; from a bucket it is a copy."""
    split = buckets._Split.of([(0, (2, 2)), (1, (2, 2)), (0, (3, 1)), (0, (2, 2))], [buckets.LARGE_BYTES] * 3 + [64])
    assert split == buckets._Split((0,), (1, 2, 3))    # cut dim not the first, uneven, small
    assert split.merged(["a"], ["b", "c", "d"]) == ("a", "b", "c", "d")  # type: ignore[list-item]


class _Copies(TorchDispatchMode):
    """The tensors that copies read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
            self.read.append(args[-1])
        return func(*args, **(kwargs or {}))


def _strides_of_copies(coordinate: tuple[int, ...]) -> list[int]:
    axis, equal = groups.current("x"), (8,) * RANKS
    with _Copies() as copies:
        begin_all_gather(torch.ones(2, 3, 8), axis, 2, equal)()
        begin_reduce_scatter(torch.ones(2, 3, 32), axis, 2, equal)()
        all_to_all_tensor(torch.ones(2, 8, 32), axis, 1, equal, 2, equal)
        two = [torch.ones(2, 8), torch.ones(8, 2)], [torch.ones(2, 32), torch.ones(32, 2)]
        buckets.begin_all_gathers(two[0], axis, [(1, equal), (0, equal)])()
        buckets.begin_reduce_scatters(two[1], axis, [(1, equal), (0, equal)])()
    return [copied.stride(-1) for copied in copies.read]


def test_copies_read_rows() -> None:
    """No shard is copied element by element, as one is whose cut dim is moved to the front."""
    for strides in on_every_rank((RANKS,), ("x",), _strides_of_copies).values():
        assert len(strides) > 3 and set(strides) == {1}
