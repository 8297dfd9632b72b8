"""Every redistribution step, forward and backward, against its definition and against spmd-types as the judge.

What ranks hold means one global value: shards join (S), every rank has it (R, I), summands add up (P). A step must keep
the value; its backward must turn a gradient placed as the dual of the target into one placed as the dual of the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel.kernels import groups
from autoparallel.kernels.collectives import (
    STEP_FUNCTIONS,
    all_reduce_in_place,
    all_to_all_tensor,
    begin_all_gather,
    begin_all_reduce,
    begin_all_reduce_own,
    begin_reduce_scatter,
)
from autoparallel.layout import Placement, shard, shards
from autoparallel.layout.redistribution import ACTIONS
from tests.support.ranks import mesh_of

DUAL = {"I": "I", "R": "P", "P": "I"}
SHAPE = (6, 8, 5)


def placements(kind: str, num_dims: int) -> list[Placement]:
    return [shard(d) for d in range(num_dims)] if kind == "S" else [Placement(kind)]


def all_steps(num_dims: int) -> list[tuple[Placement, Placement]]:
    return [
        (a, b) for source, target in ACTIONS for a in placements(source, num_dims) for b in placements(target, num_dims)
        if a != b
    ]


def local_value(whole: torch.Tensor, p: Placement, rank: int, num_ranks: int) -> torch.Tensor:
    """What a rank holds of a global value; summands are unequal multiples that add up to it."""
    if p.is_shard:
        return whole.split(list(shards(whole.shape[p.dim], num_ranks)), p.dim)[rank].clone()
    if p.kind == "P":
        weights = torch.arange(1, num_ranks + 1, dtype=whole.dtype)
        return whole * (weights[rank] / weights.sum())
    return whole.clone()


def global_value(held: Sequence[torch.Tensor], p: Placement) -> torch.Tensor:
    """The global value of what all ranks hold; replicas must agree."""
    if p.is_shard:
        return torch.cat(list(held), p.dim)
    if p.kind == "P":
        return torch.stack(list(held)).sum(0)
    assert all(torch.equal(h, held[0]) for h in held)
    return held[0]


def dual(p: Placement) -> Placement:
    return p if p.is_shard else Placement(DUAL[p.kind])


def run_steps(num_dims: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(local result, local gradient) of every step, for a global value and gradient that all ranks know."""
    mesh = mesh_of(torch.distributed.get_world_size())
    axes = groups.bind(mesh)
    (axis,) = axes.values()
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    gradient = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    found = {}
    for a, b in all_steps(num_dims):
        x = local_value(whole, a, axis.rank, axis.size).requires_grad_()
        keywords = {name: shards(SHAPE[p.dim], axis.size)
                    for name, p in (("source_sizes", a), ("target_sizes", b)) if p.is_shard}
        with groups.use(axes):
            y = STEP_FUNCTIONS[a.kind, b.kind](x, axis.name, str(a), str(b), **keywords)
        y.backward(local_value(gradient, dual(b), axis.rank, axis.size))
        found[f"{a} {b}"] = y.detach(), x.grad
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_steps_keep_value_and_gradient(ranks: Any, num_ranks: int) -> None:
    """Six, eight and five over two, three and four ranks: even and uneven shards (not six over four: 2, 2, 2, 0)."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    gradient = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    results = ranks(num_ranks).run(run_steps, 3)
    for a, b in all_steps(3):
        held = [r[f"{a} {b}"] for r in results]
        torch.testing.assert_close(global_value([y for y, _ in held], b), whole, msg=f"value of {a} -> {b}")
        torch.testing.assert_close(global_value([g for _, g in held], dual(a)), gradient, msg=f"gradient of {a} -> {b}")


def summed_products(held: str) -> tuple[bool, torch.Tensor, list[torch.Tensor]]:
    """On each rank: whether a sum of products is where the product was, the sum, and the gradients of x and weight.
    ``held``: whether a view of the product is held, or the op saves it for its backward."""
    axes = groups.bind(mesh_of(torch.distributed.get_world_size()))
    (axis,) = axes.values()
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(4, 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    product = (x * (1 + axis.rank)) @ weight
    product = product.exp() if held == "saved" else product
    view, before = product[0] if held == "view" else None, product.detach().clone()
    place = product.data_ptr()
    with groups.use(axes):
        made = all_reduce_in_place(product, axis.name, "P", "I")
        gradients = torch.autograd.grad((made ** 3).sum(), (x, weight))
    assert view is None or torch.equal(view, before[0])
    return made.data_ptr() == place, made.detach(), list(gradients)


def summed_on_one(held: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The sum over two ranks, and the gradients of rank 0's x and weight, on one process."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(4, 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    inputs = [(x, weight), (x.detach(), weight.detach())]
    parts = [(a * (1 + rank)) @ b for rank, (a, b) in enumerate(inputs)]
    made = torch.stack([part.exp() if held == "saved" else part for part in parts]).sum(0)
    return made.detach(), list(torch.autograd.grad((made ** 3).sum(), (x, weight)))


@pytest.mark.parametrize("held", ["", "view", "saved"])
def test_sums_are_in_place_where_nobody_else_has_the_memory(ranks: Any, held: str) -> None:
    found = ranks(2).run(summed_products, held)
    made, gradients = summed_on_one(held)
    for in_place, summed, _ in found:
        assert in_place == (held == "")
        torch.testing.assert_close(summed, made)
    torch.testing.assert_close(found[0][2], gradients)


def conjugated() -> list[torch.Tensor]:
    """Shards along dim 1 of numbers that are conjugated only when they are read."""
    axes = groups.bind(mesh_of(torch.distributed.get_world_size()))
    (axis,) = axes.values()
    whole = torch.complex(*torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(1)))
    sizes = [shards(SHAPE[dim], axis.size) for dim in (0, 1)]
    with groups.use(axes):
        made = STEP_FUNCTIONS["S", "S"](whole.split(list(sizes[0]))[axis.rank].conj(), axis.name, "S(0)", "S(1)",
                                        source_sizes=sizes[0], target_sizes=sizes[1])
    return [made, whole]


def test_conjugates_change_their_dim(ranks: Any) -> None:
    held = ranks(2).run(conjugated)
    torch.testing.assert_close(torch.cat([made for made, _ in held], 1), held[0][1].conj().resolve_conj())


def judge_steps() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The same by spmd-types, for even shards (dim 1 of size 8)."""
    import spmd_types

    mesh = mesh_of(torch.distributed.get_world_size())
    rank, size = mesh.get_local_rank(), mesh.size()
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    gradient = torch.randn(SHAPE, generator=generator, dtype=torch.float64)

    def typed(p: Placement) -> Any:
        return spmd_types.S(p.dim) if p.is_shard else getattr(spmd_types, p.kind)

    found = {}
    for source, target in ACTIONS:
        a, b = (shard(1) if kind == "S" else Placement(kind) for kind in (source, target))
        if a == b:
            continue
        x = local_value(whole, a, rank, size).requires_grad_()
        y = spmd_types.redistribute(x, mesh.get_group(), src=typed(a), dst=typed(b))
        y.backward(local_value(gradient, dual(b), rank, size))
        found[f"{a} {b}"] = y.detach(), x.grad
    return found


def test_spmd_types_agrees(ranks: Any) -> None:
    """On 2 ranks, for every step that it has: the same global value and gradient, and the same shards and replicas."""
    judged, ours = ranks(2).run(judge_steps), ranks(2).run(run_steps, 3)
    assert len(judged[0]) == len(ACTIONS) - 1  # all but S -> S of one dim
    for step in judged[0]:
        a, b = (Placement.parse(text) for text in step.split())
        for which, p in ((0, b), (1, dual(a))):
            mine, theirs = [r[step][which] for r in ours], [r[step][which] for r in judged]
            torch.testing.assert_close(global_value(mine, p), global_value(theirs, p), msg=step)
            if p.kind != "P":
                assert all(torch.allclose(m, t) for m, t in zip(mine, theirs, strict=True)), step


class Underneath(TorchDispatchMode):
    """The operators of process groups that functional collectives come down to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and "wait" not in func.__name__:
            with self:
                return func._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))
        self.seen |= {func._opname} if func.namespace == "c10d" else set()
        return func(*args, **(kwargs or {}))


def operators_underneath() -> set[str]:
    axis = next(iter(groups.bind(mesh_of(2)).values()))
    x = torch.randn(8, 8)
    with Underneath() as mode:
        for begin in (begin_all_reduce(x, axis), begin_all_reduce_own(x.clone(), axis),
                      begin_all_gather(x, axis, 1, (8, 8)), begin_all_gather(x.to(torch.complex64), axis, 0, (8, 8)),
                      begin_reduce_scatter(x, axis, 1, (4, 4))):
            begin()
        all_to_all_tensor(x, axis, 0, (8, 8), 1, (4, 4))
    return mode.seen


def test_no_collective_has_a_name_that_damages_the_heap(ranks: Any) -> None:
    """Gloo's threads free names of more than 15 letters twice when two collectives end at once; see
    `lower.collectives._begin_whole`."""
    short = {"allreduce_": "ALLREDUCE", "allreduce_coalesced_": "ALLREDUCE", "_allgather_base_": "ALLGATHER",
             "reduce_scatter_tensor_coalesced_": "ALLREDUCE", "alltoall_base_": "ALLTOALL"}
    for seen in ranks(2).run(operators_underneath):
        assert {"_allgather_base_", "alltoall_base_"} <= seen <= set(short)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.bfloat16, torch.int64])
def test_gathers_take_every_dtype(ranks: Any, dtype: torch.dtype) -> None:
    for found, expected in ranks(2).run(gathered, dtype):
        assert found.dtype == dtype and torch.equal(found, expected)


def gathered(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    axis = next(iter(groups.bind(mesh_of(2)).values()))
    whole = (torch.arange(15.0) - 7).to(dtype).view(5, 3)
    shards = whole.split([3, 2])
    return begin_all_gather(shards[axis.rank], axis, 0, (3, 2))(), whole
