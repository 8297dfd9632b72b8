"""Redistribution on two axes: steps and whole paths, forward and backward, on even and uneven meshes.

`test_redistribution_steps.py` takes each step on one axis. Here an outer axis is in every placement meanwhile, paths
are those that the compiler would emit, gradients are also checked as adjoints (by inner products, without a table of
duals), and spmd-types' own functions (not its `redistribute`) judge each step that they can express.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autoparallel.kernels import groups
from autoparallel.kernels.collectives import STEP_FUNCTIONS
from autoparallel.layout import (
    Layout,
    LayoutSpace,
    Placement,
    RedistributionTable,
    Step,
    layout_str,
    local_shape,
    parse_layout,
    shard,
    shards,
)
from autoparallel.layout.redistribution import ACTIONS, Axes, axes_together, name_of
from autoparallel.lower.emit import step_sizes
from tests.support.ranks import mesh_of
from tests.support.tiers import slow

DUAL = {"I": "I", "R": "P", "P": "I"}


def coordinates(mesh_shape: Sequence[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, mesh_shape)))


def numbers(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dual(layout: Layout) -> Layout:
    return tuple(p if p.is_shard else Placement(DUAL[p.kind]) for p in layout)


def held(whole: Tensor, layout: Layout, mesh_shape: Sequence[int], at: Sequence[int]) -> Tensor:
    """What the rank at this coordinate holds of a value; the summands along an axis are 1, 2, ... parts of it."""
    for p, n, rank in zip(layout, mesh_shape, at, strict=True):
        if p.kind == "P":
            whole = whole * ((rank + 1) / (n * (n + 1) / 2))
    return whole[places(tuple(whole.shape), layout, mesh_shape, at)]


def places(shape: tuple[int, ...], layout: Layout, mesh_shape: Sequence[int], at: Sequence[int]) -> tuple[Tensor, ...]:
    """The index of what the rank at this coordinate holds, cut axis by axis as `torch.chunk` and `_StridedShard` do."""
    index = [torch.arange(size) for size in shape]
    for p, n, rank in zip(layout, mesh_shape, at, strict=True):
        if p.is_shard:
            parts = [part.chunk(n)[rank] for part in index[p.dim].chunk(p.parts)]
            index[p.dim] = torch.cat(parts)
    return torch.meshgrid(*index, indexing="ij")


def assembled(
    parts: Sequence[Tensor], layout: Layout, shape: Sequence[int], mesh_shape: Sequence[int]
) -> tuple[Tensor, bool]:
    """(the global value of what all ranks hold, whether every rank that should hold the same does)."""
    total = torch.zeros(tuple(shape), dtype=parts[0].dtype)
    kept: dict[tuple[int, ...], Tensor] = {}
    agree = True
    for part, at in zip(parts, coordinates(mesh_shape), strict=True):
        own = tuple(0 if p.kind in "RI" else rank for p, rank in zip(layout, at, strict=True))
        if own in kept:
            agree &= torch.allclose(kept[own], part)
            continue
        kept[own] = part
        index, local = places(tuple(shape), layout, mesh_shape, at), local_shape(tuple(shape), layout, mesh_shape, at)
        assert tuple(part.shape) == local == index[0].shape, f"{layout_str(layout)}: local shape {tuple(part.shape)}"
        total[index] += part
    return total, agree


# ---------------------------------------------------------------------------------------------- all paths on two axes


def unit_cost(axes: Axes, p: Placement, q: Placement, before: Any, after: Any) -> Any:
    return 1.0 + 0.001 * (before + after)


#: Interleaved placements that tensors of some shapes have beside the others.
INTERLEAVED = {(12, 4): (shard(0, 3), shard(1, 2)), (24,): (shard(0, 3), shard(0, 2)),
               (4, 24): (shard(1, 3), shard(1, 4))}


def paths(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> list[list[Step]]:
    """One path for each ordered pair of legal layouts."""
    space = LayoutSpace(shape, mesh_shape, True, INTERLEAVED.get(shape, ()))
    table = RedistributionTable(space, 8, unit_cost)
    legal = [layout for layout, ok in zip(space.layouts, space.legal, strict=True) if ok]
    return [table.path(a, b) for a, b in itertools.permutations(legal, 2)]


def run_paths(shape: tuple[int, ...], mesh_shape: tuple[int, ...], every: int) -> list[tuple[Tensor, Tensor]]:
    """(local result, local gradient) of paths, by the functions and sizes that the compiler emits."""
    mesh = mesh_of(*mesh_shape)
    position, axes, at = groups.position_on(mesh, 1), groups.bind(mesh), mesh.get_coordinate() or ()
    for several in (some for some in axes_together(mesh_shape) if len(some) > 1):
        axes[name_of(several, position.axis_names)], _ = groups.joint_axis(position, several)
    whole, gradient = numbers(shape, 1), numbers(shape, 2)
    found = []
    for path in paths(shape, mesh_shape)[::every]:
        y = x = held(whole, path[0].before, mesh_shape, at).requires_grad_()
        with groups.use(axes):
            for step in path:
                sizes = step_sizes(shape, step, mesh_shape, at)
                y = STEP_FUNCTIONS[step.source.kind, step.target.kind](
                    y, name_of(step.axes, position.axis_names), str(step.source), str(step.target), *sizes
                )
        (back,) = torch.autograd.grad(y, x, held(gradient, dual(path[-1].after), mesh_shape, at))
        found.append((y.detach(), back))
    return found


@pytest.mark.parametrize(("shape", "mesh_shape", "every"), [
    slow((4, 6), (2, 2), 3),
    ((5, 7), (2, 2), 3),  # uneven, and unevenly again: 3 + 2, of which 2 + 1 and 1 + 1
    ((7, 6), (3,), 1),
    ((11, 9), (4,), 1),
    ((9,), (2, 2), 1),
    slow((12, 4), (2, 2), 7),
    ((24,), (2, 2), 1),
    ((4, 24), (2,), 1),
])
def test_paths_keep_value_and_gradient(
    ranks: Any, shape: tuple[int, ...], mesh_shape: tuple[int, ...], every: int
) -> None:
    """Value and gradient mean the same globally, replicas agree, between all layouts (of the larger ones a third)."""
    results = ranks(math.prod(mesh_shape)).run(run_paths, shape, mesh_shape, every)
    whole, gradient = numbers(shape, 1), numbers(shape, 2)
    for number, path in enumerate(paths(shape, mesh_shape)[::every]):
        source, target = path[0].before, path[-1].after
        name = f"{layout_str(source)} -> {layout_str(target)}"
        for which, layout, expected in ((0, target, whole), (1, dual(source), gradient)):
            value, agree = assembled([r[number][which] for r in results], layout, shape, mesh_shape)
            torch.testing.assert_close(value, expected, msg=f"{('value', 'gradient')[which]} of {name}")
            assert agree, f"replicas differ: {('value', 'gradient')[which]} of {name}"


# ------------------------------------------------------------------------------------------------------------ adjoints


def step_cases(num_ranks: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """(source, target, global shape): each step of the table on dims of even and of uneven shards."""
    shapes = [(num_ranks, 2 * num_ranks), (2 * num_ranks - 1, 3 * num_ranks + 1)]
    found = []
    for (a, b), shape in itertools.product(ACTIONS, shapes):
        if a == b == "S":
            found += [("S(0)", "S(1)", shape), ("S(1)", "S(0)", shape)]
        elif "S" in (a, b):
            found += [(f"S({d})" if a == "S" else a, f"S({d})" if b == "S" else b, shape) for d in range(2)]
        else:
            found.append((a, b, shape))
    return found


def inner_products(num_ranks: int) -> list[tuple[float, float]]:
    """Per step: sums over this rank of <result, g> and <x, gradient of x> for unrelated local x and g.

    As a linear map of all ranks' values together, a step and its backward are adjoint for what counts: x and g are
    valid (equal on replicas, for I and R), and replicas of a result or gradient that stand for one value count once.
    """
    mesh = mesh_of(num_ranks)
    axes = groups.bind(mesh)
    (axis,) = axes.values()
    found = []
    for number, (source, target, shape) in enumerate(step_cases(num_ranks)):
        a, b = Placement.parse(source), Placement.parse(target)
        x = valid_value(shape, a, axis.rank, num_ranks, number).requires_grad_()
        g = valid_value(shape, dual((b,))[0], axis.rank, num_ranks, number + 1000)
        sizes = [shards(shape[p.dim], num_ranks) if p.is_shard else () for p in (a, b)]
        with groups.use(axes):
            y = STEP_FUNCTIONS[a.kind, b.kind](x, axis.name, source, target, *sizes)
        (back,) = torch.autograd.grad(y, x, g)
        found.append((counted(y.detach(), g, b, axis.rank), counted(x.detach(), back, a, axis.rank)))
    return found


def valid_value(shape: tuple[int, ...], p: Placement, rank: int, num_ranks: int, seed: int) -> Tensor:
    """Anything that a rank may hold: summands are unrelated, replicas equal."""
    if p.kind == "P":
        return numbers(shape, seed * 10 + rank)
    return held(numbers(shape, seed), (p,), (num_ranks,), (rank,))


def counted(value: Tensor, gradient: Tensor, p: Placement, rank: int) -> float:
    """<value, gradient>: where both are replicated (I) once, everywhere else each rank's part."""
    return float((value * gradient).sum()) if p.kind != "I" or rank == 0 else 0.0


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_backward_is_the_adjoint(ranks: Any, num_ranks: int) -> None:
    """<A x, g> = <x, A* g>, summed over ranks: a gradient too large by the number of ranks cannot hide."""
    results = ranks(num_ranks).run(inner_products, num_ranks)
    for number, case in enumerate(step_cases(num_ranks)):
        left, right = (sum(r[number][side] for r in results) for side in (0, 1))
        assert left == pytest.approx(right, rel=1e-9), case


# ----------------------------------------------------------------------------------------------------------- the judge


def judges() -> dict[tuple[str, str], Callable[[Tensor, Any], Tensor]]:
    """spmd-types' own function for each step, on shards of dim 1 (all-to-all: to dim 0)."""
    import spmd_types as t

    S = t.S(1)
    return {
        ("S(1)", "R"): lambda x, g: t.all_gather(x, g, src=S, dst=t.R),
        ("S(1)", "I"): lambda x, g: t.all_gather(x, g, src=S, dst=t.I),
        ("S(1)", "S(0)"): lambda x, g: t.all_to_all(x, g, src=S, dst=t.S(0)),
        ("S(1)", "P"): lambda x, g: t.convert(x, g, src=S, dst=t.P, expert_mode=True),
        ("P", "I"): lambda x, g: t.all_reduce(x, g, src=t.P, dst=t.I),
        ("P", "R"): lambda x, g: t.all_reduce(x, g, src=t.P, dst=t.R),
        ("P", "S(1)"): lambda x, g: t.reduce_scatter(x, g, src=t.P, dst=S),
        ("I", "R"): lambda x, g: t.convert(x, g, src=t.I, dst=t.R, expert_mode=True),
        ("I", "S(1)"): lambda x, g: t.convert(x, g, src=t.I, dst=S, expert_mode=True),
        ("I", "P"): lambda x, g: t.convert(x, g, src=t.I, dst=t.P, expert_mode=True),
        ("R", "I"): lambda x, g: t.convert(x, g, src=t.R, dst=t.I, expert_mode=True),
        ("R", "S(1)"): lambda x, g: t.convert(x, g, src=t.R, dst=S, expert_mode=True),
        ("R", "P"): lambda x, g: t.convert(x, g, src=t.R, dst=t.P, expert_mode=True),
    }


def judged(num_ranks: int) -> list[str]:
    """Steps whose local result or local gradient differ from spmd-types', rank by rank."""
    mesh = mesh_of(num_ranks)
    axes = groups.bind(mesh)
    (axis,) = axes.values()
    shape = (2 * num_ranks, 3 * num_ranks)
    found = []
    for number, ((source, target), judge) in enumerate(judges().items()):
        a, b = Placement.parse(source), Placement.parse(target)
        x = valid_value(shape, a, axis.rank, num_ranks, number)
        g = valid_value(shape, dual((b,))[0], axis.rank, num_ranks, number + 1000)
        sizes = [shards(shape[p.dim], num_ranks) if p.is_shard else () for p in (a, b)]
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        with groups.use(axes):
            y = STEP_FUNCTIONS[a.kind, b.kind](mine, axis.name, source, target, *sizes)
        z = judge(theirs, mesh.get_group())
        y.backward(g)
        z.backward(g.clone())
        assert mine.grad is not None and theirs.grad is not None
        if y.shape != z.shape or not torch.allclose(y, z):
            found.append(f"value of {source} -> {target} on rank {dist.get_rank()}")
        if not torch.allclose(mine.grad, theirs.grad):
            found.append(f"gradient of {source} -> {target} on rank {dist.get_rank()}")
    return found


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_spmd_types_functions_agree(ranks: Any, num_ranks: int) -> None:
    """Each step of the table, its value and gradient, on every rank."""
    kinds = {tuple(Placement.parse(text).kind for text in step) for step in judges()}
    assert kinds == set(ACTIONS), "every step has a judge"
    for different in ranks(num_ranks).run(judged, num_ranks):
        assert not different


def test_the_helpers_see_mistakes() -> None:
    """A missing summand, a replica that differs and shards in the wrong order are found."""
    whole, mesh_shape = numbers((4, 6), 1), (2, 2)
    for text in ("S(0)·S(0)", "P·S(1)", "I·P", "S(1)·R"):
        layout = parse_layout(text)
        parts = [held(whole, layout, mesh_shape, at) for at in coordinates(mesh_shape)]
        value, agree = assembled(parts, layout, whole.shape, mesh_shape)
        assert agree and torch.allclose(value, whole)
        value, agree = assembled([*parts[:1], parts[1] + 1, *parts[2:]], layout, whole.shape, mesh_shape)
        assert not (agree and torch.allclose(value, whole)), text
