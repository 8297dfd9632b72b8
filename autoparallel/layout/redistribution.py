"""Redistribution: paths between all layouts of a tensor, as shortest paths over single steps.

A step changes the placement on one axis. A sum of whole tensors (`JOINT`) may change several axes in the same way, by
one collective over all their ranks. Which collectives it needs, forward and backward, follows from the two placements
alone (the gradient of the source must come out of the gradient of the target):

    | step        | forward         | backward        | known as                          |
    |-------------|-----------------|-----------------|-----------------------------------|
    | S -> R      | all_gather      | reduce_scatter  | FSDP's parameter                  |
    | S -> I      | all_gather      | slice           |                                   |
    | S -> S'     | all_to_all      | all_to_all      | Ulysses                           |
    | S -> P      | pad             | slice           |                                   |
    | P -> I      | all_reduce      | -               | Megatron's g                      |
    | P -> R      | all_reduce      | all_reduce      |                                   |
    | P -> S      | reduce_scatter  | all_gather      | sequence parallelism              |
    | I -> R      | -               | all_reduce      | Megatron's f; DDP's gradient      |
    | I -> S      | slice           | all_gather      |                                   |
    | I -> P      | mask            | -               | a bias added once                 |
    | R -> I      | -               | mask            |                                   |
    | R -> S      | slice           | pad             |                                   |
    | R -> P      | mask            | mask            |                                   |

``mask`` keeps the value on the axis's first rank and zeroes it elsewhere. A dim sharded by several axes can only be
gathered or cut further on the innermost of them. Interleaved shards S(d;k) take the steps of S(d), with a copy that
puts the parts in order; S(d;k) -> S(d) is an all-to-all too.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from autoparallel.axis_names import together
from autoparallel.layout.placement import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Layout,
    Placement,
    invariant_on_unit_axes,
    shard,
)
from autoparallel.layout.shapes import Shape, can_cut, layout_fits

#: (forward, backward) action by the kinds of source and target.
ACTIONS: dict[tuple[str, str], tuple[str, str]] = {
    ("S", "R"): ("all_gather", "reduce_scatter"),
    ("S", "I"): ("all_gather", "slice"),
    ("S", "S"): ("all_to_all", "all_to_all"),
    ("S", "P"): ("pad", "slice"),
    ("P", "I"): ("all_reduce", "none"),
    ("P", "R"): ("all_reduce", "all_reduce"),
    ("P", "S"): ("reduce_scatter", "all_gather"),
    ("I", "R"): ("none", "all_reduce"),
    ("I", "S"): ("slice", "all_gather"),
    ("I", "P"): ("mask", "none"),
    ("R", "I"): ("none", "mask"),
    ("R", "S"): ("slice", "pad"),
    ("R", "P"): ("mask", "mask"),
}
COLLECTIVES = frozenset({"all_gather", "all_reduce", "reduce_scatter", "all_to_all"})
#: Those that add up what ranks have.
SUMS = frozenset({"all_reduce", "reduce_scatter"})
#: Kinds of source and target of a step that several axes may take at once: sums of whole tensors, forward or backward.
JOINT = frozenset({("P", "I"), ("P", "R"), ("I", "R")})
#: Seconds of a change on one axis when the fewest changes are looked for: more than a path takes, and so few that
#: paths that differ by 0.1 us still differ when sums of them are compared to 1e-12.
DIRECT_S = 1e4
#: The mesh axes of one step, in ascending order.
Axes = tuple[int, ...]


def name_of(axes: Axes, axis_names: Sequence[str]) -> str:
    """The name that programs have for mesh axes together."""
    return together(axis_names[axis] for axis in axes)


def axes_together(mesh_shape: Sequence[int]) -> tuple[Axes, ...]:
    """Each mesh axis by itself, and all sets of several whose ranks can sum a tensor at once.

    >>> axes_together((2, 4))
    ((0,), (1,), (0, 1))
    >>> axes_together((2, 1))     # an axis of one rank adds nobody
    ((0,), (1,))
    """
    several = [axis for axis, ranks in enumerate(mesh_shape) if ranks > 1]
    sets = (some for count in range(2, len(several) + 1) for some in itertools.combinations(several, count))
    return *((axis,) for axis in range(len(mesh_shape))), *sets


def actions_of(axes: Axes, source: Placement, target: Placement, mesh_shape: Sequence[int]) -> tuple[str, str]:
    """The actions of a step on mesh axes, forward and backward. On axes of one rank, which has the whole tensor in each
    placement, there are none.

    >>> actions_of((0,), PARTIAL, INVARIANT, (4, 1)), actions_of((1,), PARTIAL, INVARIANT, (4, 1))
    (('all_reduce', 'none'), ('none', 'none'))
    """
    several = any(mesh_shape[axis] > 1 for axis in axes)
    return ACTIONS[source.kind, target.kind] if several else ("none", "none")


@dataclass(frozen=True)
class Step:
    """The same placement change on one or several axes; ``before`` and ``after`` are whole layouts that differ on
    ``axes`` only."""

    axes: Axes
    before: Layout
    after: Layout

    def __post_init__(self) -> None:
        changed = tuple(a for a, (p, q) in enumerate(zip(self.before, self.after, strict=True)) if p != q)
        if changed != self.axes:
            raise ValueError(f"a step changes exactly its axes {self.axes}, not {changed}")
        alike = {(self.before[axis], self.after[axis]) for axis in changed}
        if len(changed) != 1 and (len(alike) != 1 or (self.source.kind, self.target.kind) not in JOINT):
            raise ValueError(f"no step changes {len(changed)} axes at once from {self.before} to {self.after}")

    @property
    def source(self) -> Placement:
        return self.before[self.axes[0]]

    @property
    def target(self) -> Placement:
        return self.after[self.axes[0]]

    @property
    def forward(self) -> str:
        return ACTIONS[self.source.kind, self.target.kind][0]

    @property
    def backward(self) -> str:
        return ACTIONS[self.source.kind, self.target.kind][1]


#: Steps on the same axes, as arrays: (axes, source placement, target placement, layout numbers before, after).
Steps = tuple[Axes, Placement, Placement, np.ndarray, np.ndarray]
#: Seconds (forward and, where the tensor needs a gradient, backward) of steps on the same axes, given arrays over
#: steps: (axes, source placement, target placement, largest local bytes before, after) -> seconds. Unless it is said to
#: be ``by_dim``, it tells shards apart by whether they are S(0) (`Placement.in_order`) only.
StepCost = Callable[[Axes, Placement, Placement, np.ndarray, np.ndarray], np.ndarray]
#: Steps by what they depend on: number of dims, mesh, interleaved placements and legal layouts, of which models have a
#: few dozen.
_STEPS: dict[tuple[int, tuple[int, ...], tuple[Placement, ...], bytes], tuple[list[Steps], list[Steps]]] = {}
MOST_STEPS = 512


@dataclass(frozen=True)
class LayoutSpace:
    """All layouts of a tensor of ``shape`` on a mesh, numbered: index = sum of code * radix over axes.

    Codes on one axis: 0 I, 1 R, 2 P, 3 + d for S(d), and then those of the placements in ``interleaved``. Layouts that
    do not fit (a rank left without elements) keep their number but are not ``legal``.
    """

    shape: Shape
    mesh_shape: tuple[int, ...]
    requires_grad: bool
    interleaved: tuple[Placement, ...] = ()

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        return (INVARIANT, REPLICATE, PARTIAL, *(shard(d) for d in range(len(self.shape))), *self.interleaved)

    @cached_property
    def _dims(self) -> np.ndarray:
        """The dim that each layout cuts on each axis, -1 for none; (layouts, axes)."""
        return np.array([p.dim for p in self.placements])[self.codes]

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(itertools.product(self.placements, repeat=len(self.mesh_shape)))

    @cached_property
    def radices(self) -> np.ndarray:
        base, axes = len(self.placements), len(self.mesh_shape)
        return np.array([base ** (axes - 1 - a) for a in range(axes)], dtype=np.int64)

    @cached_property
    def codes(self) -> np.ndarray:
        """The code of each layout on each axis; (layouts, axes)."""
        return (np.arange(len(self.layouts))[:, None] // self.radices) % len(self.placements)

    @cached_property
    def legal(self) -> np.ndarray:
        """By layout number, whether every rank has a part (`layout_fits`), and without a gradient none is R."""
        found = np.full(len(self.layouts), True) if self.requires_grad else ~(self.codes == 1).any(axis=1)
        some = list(itertools.product((False, True), repeat=len(self.mesh_shape)))
        weights = 2 ** np.arange(len(self.mesh_shape))[::-1]
        for dim, size in enumerate(self.shape):
            cuts = [tuple(itertools.compress(self.mesh_shape, axes)) for axes in some]
            fits = np.array([not cut or can_cut(size, cut) for cut in cuts])
            found &= fits[(self._dims == dim) @ weights]
        if self.interleaved:
            mixed = (self.codes >= 3 + len(self.shape)).any(axis=1)
            found[mixed] &= [layout_fits(self.shape, self.layouts[i], self.mesh_shape) for i in np.flatnonzero(mixed)]
        return found

    @cached_property
    def replicated(self) -> np.ndarray:
        """By layout number, whether ranks of some axis have copies whose gradients are added up (R)."""
        return np.asarray((self.codes == 1).any(axis=1))

    @cached_property
    def local_elements(self) -> np.ndarray:
        """Elements on the fullest rank, by layout number."""
        local = np.tile(np.array(self.shape, np.int64), (len(self.layouts), 1))
        for axis, ranks in enumerate(self.mesh_shape):
            for dim in range(len(self.shape)):
                cut = self._dims[:, axis] == dim
                local[cut, dim] = -(-local[cut, dim] // ranks)
        return local.prod(axis=1, dtype=np.float64)

    @property
    def single_steps(self) -> list[Steps]:
        """All steps between legal layouts, by axes and placements."""
        return self._steps[0]

    @property
    def merged_steps(self) -> list[Steps]:
        """`single_steps`, with those merged whose shards differ only in how they are not `Placement.in_order`."""
        return self._steps[1]

    @cached_property
    def _steps(self) -> tuple[list[Steps], list[Steps]]:
        key = len(self.shape), self.mesh_shape, self.interleaved, self.legal.tobytes()
        if key not in _STEPS:
            while len(_STEPS) >= MOST_STEPS:
                _STEPS.pop(next(iter(_STEPS)))
            single = self._single_steps()
            _STEPS[key] = single, _merged(single)
        return _STEPS[key]

    def _single_steps(self) -> list[Steps]:
        base, found = len(self.placements), list[Steps]()
        numbers, codes = np.arange(len(self.layouts)), self.codes
        for axes in axes_together(self.mesh_shape):
            inner = self._dims[:, axes[-1] + 1 :]
            for source, target in itertools.permutations(range(base), 2):
                p, q = self.placements[source], self.placements[target]
                if (p.kind, q.kind) not in (ACTIONS if len(axes) == 1 else JOINT):
                    continue
                before = numbers[(codes[:, axes] == source).all(axis=1)]
                after = before + (target - source) * self.radices[list(axes)].sum()
                ok = self.legal[before] & self.legal[after]
                for placement in (p, q):
                    if placement.is_shard:
                        ok &= ~(inner[before] == placement.dim).any(axis=1)
                if ok.any():
                    found.append((axes, p, q, before[ok], after[ok]))
        return found

    def code(self, placement: Placement) -> int:
        if placement.is_interleaved:
            return 3 + len(self.shape) + self.interleaved.index(placement)
        return 3 + placement.dim if placement.is_shard else {"I": 0, "R": 1, "P": 2}[placement.kind]

    def index(self, layout: Layout) -> int:
        return int(sum(self.code(p) * int(r) for p, r in zip(layout, self.radices, strict=True)))


def _merged(single_steps: Sequence[Steps]) -> list[Steps]:
    merged = defaultdict[tuple[Any, ...], list[Steps]](list)
    for steps in single_steps:
        axes, *placements = steps[:3]
        merged[axes, *((p.kind, p.is_shard and not p.in_order) for p in placements)].append(steps)
    return [(*some[0][:3], np.concatenate([steps[3] for steps in some]),
             np.concatenate([steps[4] for steps in some])) for some in merged.values()]


class RedistributionTable:
    """Seconds of the cheapest path between any two layouts of one tensor, and the path itself.

    ``direct``: of the paths with the fewest changes of a placement on an axis. ``chosen_by``: seconds by which the
    cheapest path is chosen, where they are others. ``joint_first``: steps on several axes begin paths only, as the
    reductions of a parameter's gradient must that overlap with backward (`schedule.async_windows`). Built once per
    distinct (shape, item size, needs gradient): min-plus closure, O(layouts^3) in numpy.
    """

    def __init__(self, space: LayoutSpace, item_bytes: int, step_cost: StepCost, direct: bool = False,
                 chosen_by: StepCost | None = None, joint_first: bool = False) -> None:
        self.space, self.item_bytes = space, item_bytes
        self.seconds = self._single_steps(chosen_by or step_cost)
        count = len(space.layouts)
        if direct:
            self.seconds += DIRECT_S * (space.codes[:, None] != space.codes[None]).sum(axis=2)
        self._via = np.tile(np.arange(count, dtype=np.int32), (count, 1))
        #: By (source, target), the layout after a step on several axes with which the path begins; -1: with none.
        self._begins = np.full((count, count), -1, np.int32)
        joint = self._take_joint() if joint_first else {}
        self._close(np.flatnonzero(space.legal))
        self._begin_with(joint)
        if direct or chosen_by is not None:
            self.seconds = self.sum_along(step_cost)

    def _take_joint(self) -> dict[tuple[int, int], float]:
        """The seconds of steps on several axes, by (source, target), which no path takes any more."""
        found = dict[tuple[int, int], float]()
        for axes, _, _, before, after in self.space.single_steps:
            if len(axes) > 1:
                found |= zip(zip(before.tolist(), after.tolist(), strict=True),
                             self.seconds[before, after].tolist(), strict=True)
                self.seconds[before, after] = np.inf
        return found

    def _begin_with(self, joint: Mapping[tuple[int, int], float]) -> None:
        """Begin paths with these steps where no other path is cheaper (by more than rounding, as in `_close`)."""
        closed = self.seconds.copy() if joint else self.seconds
        for (before, after), seconds in joint.items():
            through = seconds + closed[after]
            best = np.flatnonzero(np.isfinite(through) & (self.seconds[before] >= through * (1 - 1e-12)))
            self.seconds[before, best], self._begins[before, best] = through[best], after

    def _close(self, legal: np.ndarray) -> None:
        """Cheapest paths by way of these layouts, which lead nowhere else."""
        among = np.ix_(legal, legal)
        seconds, via = self.seconds[among], self._via[among]
        through, least = np.empty_like(seconds), np.empty_like(seconds)
        for k in range(len(legal)):
            np.add(seconds[:, k, None], seconds[None, k, :], out=through)
            better = through < np.multiply(seconds, 1 - 1e-12, out=least)
            np.copyto(seconds, through, where=better)
            np.copyto(via, via[:, k, None].copy(), where=better)
        self.seconds[among], self._via[among] = seconds, via

    def _single_steps(self, step_cost: StepCost, by_dim: bool = False) -> np.ndarray:
        count = len(self.space.layouts)
        seconds = np.full((count, count), np.inf)
        np.fill_diagonal(seconds, 0.0)
        local_bytes = self.space.local_elements * self.item_bytes
        for axes, p, q, before, after in self.space.single_steps if by_dim else self.space.merged_steps:
            seconds[before, after] = step_cost(axes, p, q, local_bytes[before], local_bytes[after])
        return seconds

    def sum_along(self, value: StepCost, by_dim: bool = False) -> np.ndarray:
        """Sums along the cheapest paths of another value of single steps (seconds, bytes), by (source, target)."""
        single = self._single_steps(value, by_dim)
        rows = np.arange(len(single))[:, None]
        total = np.zeros_like(single)
        for _ in range(3 * len(self.space.mesh_shape)):  # no cheapest path is longer
            total = np.where(self._via == rows, 0.0, single[rows, self._via] + total[self._via, rows.T])
        begins, goals = np.nonzero(self._begins >= 0)
        after = self._begins[begins, goals]
        total[begins, goals] = single[begins, after] + total[after, goals]
        return np.where(np.isfinite(self.seconds), total, np.inf)

    @cached_property
    def moves(self) -> np.ndarray:
        """Whether a path makes a copy, by (source, target): false for equal layouts and for changes of meaning only."""
        codes = self.space.codes[:, np.array(self.space.mesh_shape) > 1]
        held = np.where(codes == 1, 0, codes)  # R and I hold the same
        return ~(held[:, None, :] == held[None, :, :]).all(axis=2)

    def path(self, source: Layout, target: Layout) -> list[Step]:
        """The steps of the cheapest path from source to target; () if they are equal. An axis of one rank takes none
        (`invariant_on_unit_axes`). Raises ValueError if there is no path (a layout that does not fit the tensor)."""
        layouts = self.space.layouts
        here, goal = (self.space.index(invariant_on_unit_axes(x, self.space.mesh_shape)) for x in (source, target))
        if not np.isfinite(self.seconds[here, goal]):
            raise ValueError(f"no redistribution from {source} to {target} for a tensor of shape {self.space.shape}")
        steps: list[Step] = []
        while here != goal:
            begins = -1 if steps else int(self._begins[here, goal])
            there = int(self._via[here, goal]) if begins < 0 else begins
            before, after = layouts[here], layouts[there]
            steps.append(Step(tuple(a for a in range(len(before)) if before[a] != after[a]), before, after))
            here = there
        return steps


def is_local(steps: Sequence[Step], requires_grad: bool) -> bool:
    """Whether a path needs no communication, forward and (where there is a gradient) backward."""
    return not any(
        s.forward in COLLECTIVES or (requires_grad and s.backward in COLLECTIVES) for s in steps
    )
