"""Layouts: shards tile the tensor exactly, as DTensor cuts them; redistribution paths are legal and the shortest."""

from __future__ import annotations

import itertools
import math

import networkx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from autoparallel.layout import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Layout,
    LayoutSpace,
    Placement,
    RedistributionTable,
    Step,
    can_cut,
    dual,
    from_torch,
    is_local,
    largest_local_shape,
    layout_fits,
    layout_str,
    local_box,
    local_shape,
    parse_layout,
    shard,
    shards,
    to_torch,
)
from autoparallel.layout.redistribution import ACTIONS, JOINT, Axes, axes_together
from autoparallel.layout.shapes import shard_of
from tests.support.tiers import slow

MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
SHAPES = st.lists(st.integers(1, 13), min_size=1, max_size=3).map(tuple)


def coordinates(mesh_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(n) for n in mesh_shape)))


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout, tuple[int, ...]]:
    """(global shape, layout, mesh shape); several axes may cut one dim, and not every layout fits."""
    shape, mesh_shape = draw(SHAPES), draw(MESHES)
    kinds = st.sampled_from([INVARIANT, REPLICATE, PARTIAL, *(shard(d) for d in range(len(shape)))])
    return shape, tuple(draw(st.lists(kinds, min_size=len(mesh_shape), max_size=len(mesh_shape)))), mesh_shape


# ------------------------------------------------------------------------------------------------------------ shapes


@given(st.integers(0, 200), st.integers(1, 20))
def test_shards_are_those_of_torch_chunk(size: int, num_ranks: int) -> None:
    """Of equal lengths but for the last ones; where torch.chunk gives fewer shards, the rest are empty."""
    chunks = [len(c) for c in torch.arange(size).chunk(num_ranks)] if size else []
    assert shards(size, num_ranks) == (*chunks, *[0] * (num_ranks - len(chunks)))
    ends = [0, *itertools.accumulate(shards(size, num_ranks))]
    assert [shard_of(size, num_ranks, r) for r in range(num_ranks)] == list(
        zip(ends, shards(size, num_ranks), strict=False)
    )


@given(laid_out())
def test_local_boxes_tile_the_tensor(case: tuple[tuple[int, ...], Layout, tuple[int, ...]]) -> None:
    """Each element lies on as many ranks as the axes that do not cut have together: none is lost, none doubled."""
    shape, layout, mesh_shape = case
    copies = math.prod(n for p, n in zip(layout, mesh_shape, strict=True) if not p.is_shard)
    count = np.zeros(shape, dtype=int)
    for coordinate in coordinates(mesh_shape):
        offsets, local = local_box(shape, layout, mesh_shape, coordinate)
        box = tuple(slice(start, start + length) for start, length in zip(offsets, local, strict=True))
        assert count[box].shape == local, "the shard lies within the tensor"
        count[box] += 1
    assert (count == copies).all()


@given(laid_out())
def test_local_boxes_are_dtensors(case: tuple[tuple[int, ...], Layout, tuple[int, ...]]) -> None:
    shape, layout, mesh_shape = case
    for coordinate in coordinates(mesh_shape):
        offsets, local = local_box(shape, layout, mesh_shape, coordinate)
        theirs_local, theirs_offsets = _compute_local_shape_and_global_offset(
            shape, mesh_shape, list(coordinate).__getitem__, to_torch(layout)
        )
        assert local == tuple(theirs_local)
        if math.prod(local):
            assert offsets == tuple(theirs_offsets)


@given(laid_out())
def test_a_layout_fits_when_every_rank_has_elements(case: tuple[tuple[int, ...], Layout, tuple[int, ...]]) -> None:
    shape, layout, mesh_shape = case
    locals_ = [local_shape(shape, layout, mesh_shape, c) for c in coordinates(mesh_shape)]
    assert layout_fits(shape, layout, mesh_shape) == all(math.prod(local) > 0 for local in locals_)
    assert largest_local_shape(shape, layout, mesh_shape) == tuple(map(max, zip(*locals_, strict=True)))


def test_can_cut_examples() -> None:
    """Ten over four leaves 3, 3, 3, 1; nine over eight leaves some with none; nine over three over three fits."""
    assert can_cut(10, (4,)) and not can_cut(9, (8,)) and can_cut(9, (3, 3))
    assert not can_cut(6, (4,)), "2, 2, 2, 0"
    assert not can_cut(4, (3,)), "2, 2, 0"
    assert not can_cut(10, (4, 2)), "the last shard has one element"
    assert not layout_fits((8,), (shard(1),), (2,)), "there is no dim 1"


# -------------------------------------------------------------------------------------------------------- placements


@given(laid_out())
def test_layouts_print_and_parse(case: tuple[tuple[int, ...], Layout, tuple[int, ...]]) -> None:
    _, layout, _ = case
    assert parse_layout(layout_str(layout)) == layout


@pytest.mark.parametrize("text", ["", "S", "S()", "S(-1)", "S(a)", "X", "r", "S(0)x", "Shard(0)", "S(0;)", "S(;2)"])
def test_unknown_placements_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a placement: .* \(one of S\(dim\), S\(dim;parts\), R, I, P\)"):
        Placement.parse(text)


def test_to_torch_and_back() -> None:
    """R and I are both Replicate(), which comes back as I."""
    layout = (shard(2), INVARIANT, REPLICATE, PARTIAL)
    assert to_torch(layout) == (Shard(2), Replicate(), Replicate(), Partial())
    assert from_torch(to_torch(layout)) == (shard(2), INVARIANT, INVARIANT, PARTIAL)


def test_an_average_is_no_sum() -> None:
    """A Partial("avg") taken for a sum would be wrong by the number of ranks."""
    with pytest.raises(ValueError, match=r"only Partial\('sum'\) can be placed"):
        from_torch((Partial("avg"),))


# ---------------------------------------------------------------------------------------------------- redistribution


def some_cost(axes: Axes, p: Placement, q: Placement, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Any positive cost that tells axes, placements and sizes apart."""
    weight = 1 + (7 * axes[0] + 2 * len(axes) + 3 * ord(p.kind) + 5 * ord(q.kind) + p.in_order - 2 * q.in_order) % 11
    return weight + 0.01 * before + 0.02 * after


SPACES = [
    LayoutSpace((6, 4), (2, 2), True),
    LayoutSpace((7, 5), (2, 3), True),  # uneven
    LayoutSpace((8,), (2, 2, 2), True),  # three cuts of one dim
    LayoutSpace((8, 4), (2, 2), False),  # without a gradient: no R
    LayoutSpace((3, 4), (4,), True),  # dim 0 is too short to cut
    LayoutSpace((), (2, 2), True),
    LayoutSpace((12, 4), (2, 2), True, (shard(0, 3),)),
    LayoutSpace((24,), (3, 2), True, (shard(0, 2), shard(0, 4))),
    LayoutSpace((9, 8), (2,), True, (shard(0, 3), shard(1, 2))),  # nine is not cut evenly
]


def legal_steps(space: LayoutSpace) -> list[Step]:
    """Written anew: one axis changes, to something in the table, and a dim is cut or joined on its innermost axis."""
    found = []
    for layout, axes in itertools.product(space.layouts, axes_together(space.mesh_shape)):
        for q in space.placements:
            p, axis = layout[axes[0]], axes[-1]
            after = tuple(q if a in axes else placement for a, placement in enumerate(layout))
            if p == q or any(layout[a] != p for a in axes):
                continue
            if (p.kind, q.kind) not in (ACTIONS if len(axes) == 1 else JOINT):
                continue
            if not all(space.legal[space.index(x)] for x in (layout, after)):
                continue
            if not any(x.is_shard and y.is_shard and x.dim == y.dim for x in (p, q) for y in layout[axis + 1 :]):
                found.append(Step(axes, layout, after))
    return found


def seconds_of(space: LayoutSpace, step: Step) -> float:
    before, after = (space.local_elements[space.index(x)] * 4 for x in (step.before, step.after))
    return float(some_cost(step.axes, step.source, step.target, before, after))


@pytest.mark.parametrize("joint_first", [slow(False), True])
@pytest.mark.parametrize("space", SPACES, ids=lambda s: f"{s.shape}-{s.mesh_shape}-{len(s.interleaved)}")
def test_paths_are_legal_chains_and_the_shortest(space: LayoutSpace, joint_first: bool) -> None:
    """Between all pairs of legal layouts, against networkx on the graph of legal steps. ``joint_first``: nodes are
    layouts at the begin of a path, from which steps on several axes go, and further on it."""
    table = RedistributionTable(space, 4, some_cost, joint_first=joint_first)
    steps = legal_steps(space)
    graph = networkx.DiGraph()
    graph.add_nodes_from((x, True) for x, legal in zip(space.layouts, space.legal, strict=True) if legal)
    graph.add_weighted_edges_from(((s.before, begins), (s.after, False), seconds_of(space, s))
                                  for s in steps for begins in (True, False)
                                  if begins or len(s.axes) == 1 or not joint_first)
    shortest = dict(networkx.all_pairs_dijkstra_path_length(graph))
    allowed = set(steps)
    for source, target in itertools.product(space.layouts, repeat=2):
        expected = shortest.get((source, True), {}).get((target, False), math.inf)
        expected = 0.0 if source == target and space.legal[space.index(source)] else expected
        assert table.seconds[space.index(source), space.index(target)] == pytest.approx(
            expected if source != target else 0.0
        )
        if not math.isfinite(expected):
            continue
        path = table.path(source, target)
        ends = [source, *(s.after for s in path)]
        assert [s.before for s in path] == ends[:-1] and ends[-1] == target
        assert set(path) <= allowed and not (joint_first and any(len(s.axes) > 1 for s in path[1:]))
        assert sum(seconds_of(space, s) for s in path) == pytest.approx(expected)


@pytest.mark.parametrize("space", SPACES, ids=lambda s: f"{s.shape}-{s.mesh_shape}-{len(s.interleaved)}")
def test_no_detour_is_shorter_and_every_legal_layout_is_reached(space: LayoutSpace) -> None:
    seconds = RedistributionTable(space, 4, some_cost).seconds[np.ix_(space.legal, space.legal)]
    assert np.isfinite(seconds).all()
    assert (seconds[:, None, :] <= seconds[:, :, None] + seconds[None, :, :] + 1e-9).all()


@pytest.mark.parametrize("joint_first", [False, True])
@pytest.mark.parametrize("space", SPACES[:3], ids=lambda s: f"{s.shape}-{s.mesh_shape}-{len(s.interleaved)}")
def test_sums_along_paths(space: LayoutSpace, joint_first: bool) -> None:
    """`sum_along` of another value, here of ones, is the number of steps of each path."""
    table = RedistributionTable(space, 4, some_cost, joint_first=joint_first)
    counts = table.sum_along(lambda axes, p, q, before, after: np.ones_like(before))
    for source, target in itertools.product(np.flatnonzero(space.legal), repeat=2):
        assert counts[source, target] == len(table.path(space.layouts[source], space.layouts[target]))


def test_an_outer_cut_of_a_dim_is_joined_after_the_inner_one() -> None:
    """S(0)·S(0) -> I·S(0) cannot gather axis 0 first: the shards would lie in the wrong order."""
    space = LayoutSpace((8, 8), (2, 2), True)
    path = RedistributionTable(space, 4, some_cost).path((shard(0), shard(0)), (INVARIANT, shard(0)))
    assert path[0].axes == (1,)


def test_no_path_leads_to_a_layout_that_does_not_fit() -> None:
    space = LayoutSpace((3, 8), (4,), True)
    with pytest.raises(ValueError, match=r"no redistribution from .* for a tensor of shape \(3, 8\)"):
        RedistributionTable(space, 4, some_cost).path((INVARIANT,), (shard(0),))


def test_a_step_changes_its_axes_only() -> None:
    for after in ((INVARIANT, PARTIAL), (REPLICATE, REPLICATE), (INVARIANT, INVARIANT)):
        with pytest.raises(ValueError, match=r"a step changes exactly its axes \(0,\)"):
            Step((0,), (INVARIANT, INVARIANT), after)


def test_sums_alone_run_on_several_axes_together() -> None:
    whole = (INVARIANT, INVARIANT)
    assert Step((0, 1), whole, (REPLICATE, REPLICATE)).backward == "all_reduce"
    assert Step((0, 1), (PARTIAL, PARTIAL), whole).forward == "all_reduce"
    for before, after in ((whole, (PARTIAL, PARTIAL)), (whole, (REPLICATE, PARTIAL)), ((shard(0), shard(1)), whole)):
        with pytest.raises(ValueError, match="no step changes 2 axes at once"):
            Step((0, 1), before, after)


def test_an_axis_of_one_rank_joins_no_other() -> None:
    space = LayoutSpace((8, 8), (1, 2, 1, 2), True)
    assert {axes for axes, *_ in space.single_steps if len(axes) > 1} == {(1, 3)}


def test_local_paths_need_no_communication_in_either_direction() -> None:
    """I -> S is a slice forward and a gather backward: local only where there is no gradient."""
    cut = [Step((0,), (INVARIANT,), (shard(0),))]
    assert is_local(cut, requires_grad=False) and not is_local(cut, requires_grad=True)
    assert is_local([Step((0,), (REPLICATE,), (shard(0),))], requires_grad=True)


@settings(max_examples=30)
@given(SHAPES, MESHES.filter(lambda m: len(m) < 3))
def test_layout_numbers(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> None:
    """`index` is the place in `layouts`, and legal means that it fits."""
    space = LayoutSpace(shape, mesh_shape, True)
    assert [space.index(layout) for layout in space.layouts] == list(range(len(space.layouts)))
    assert space.legal.tolist() == [layout_fits(shape, layout, mesh_shape) for layout in space.layouts]


def test_backward_is_a_step_too() -> None:
    """The one from where the result's gradient lies to where the source's does; so gradients have gradients."""
    for (source, target), (_, backward) in ACTIONS.items():
        assert ACTIONS[dual(Placement(target)).kind, dual(Placement(source)).kind][0] == backward
