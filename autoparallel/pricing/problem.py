"""Strategy space x prices -> the search problem.

Time runs over the sites forward (site i at time i) and backward (site i at time 2N - i). What backward needs lives from
the one to the other; parameters, gradients and optimizer state live always. A redistributed copy uses memory on its
edge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from autoparallel.layout import RedistributionTable
from autoparallel.pricing.prices import Prices
from autoparallel.rules.space import Label, Link, StrategySpace
from autoparallel.search.problem import Edge, Node, Problem

Allowed = Mapping[int, np.ndarray]
#: Seconds that one fault counts for: more than any step takes.
FAULT_S = 1e3
SIDE_SHARE = 1e-3


class Faults(Protocol):
    """Choices that should not be taken (see `autoparallel.baselines`): a count by strategy."""

    def site_faults(self, index: int) -> np.ndarray: ...

    def link_faults(self, link: Link, table: RedistributionTable) -> np.ndarray: ...


class SpacePricer:
    """Builds problems for one strategy space: all strategies, or only some labels of each site.

    ``allowed`` (choice numbers by site; sites left out are free) holds what pins leave; it binds every problem.
    ``faults`` are priced above everything else. Side computations (positions, causal masks, rotary tables: nothing of
    the input, no gradient, hardly any bytes) are done on every rank; who needs a piece of one takes it, which is local.
    """

    def __init__(self, prices: Prices, limit_bytes: float = float("inf"), allowed: Allowed | None = None,
                 faults: Faults | None = None) -> None:
        self.faults = faults
        self.prices, self.space, self.limit_bytes = prices, prices.space, limit_bytes
        self.allowed = {**_side_computations(self.space), **(allowed or {})}
        self.axis_names = self.space.axis_names
        self.kept = _kept_values(self.space) if prices.training else frozenset()
        self.last_use = _last_uses(self.space)
        self._arrays: dict[object, np.ndarray] = {}

    @property
    def num_nodes(self) -> int:
        return len(self.space)

    def choices(self, site: int) -> np.ndarray:
        """Choice numbers (into the site's strategies) that pins leave."""
        found = self.allowed.get(site)
        return np.arange(len(self.space.strategies[site].labels)) if found is None else found

    def rows(self, node: int, axis: int) -> Sequence[int]:
        return sorted({int(r) for r in self.space.strategies[node].array[self.choices(node), axis]})

    def labels(self, node: int) -> Sequence[Label]:
        s = self.space.strategies[node]
        return [s.labels[c] for c in self.choices(node)]

    def repeat_row(self, node: int, axis: int) -> int:
        return self.rows(node, axis)[0]

    def full(self) -> Problem:
        """The problem with every strategy that pins leave."""
        return self._problem([self.choices(site) for site in range(len(self.space))])

    def problem(self, allowed: Sequence[Sequence[Label]]) -> Problem:
        """The problem with exactly these labels; labels that a site does not have are left out."""
        chosen = []
        for site, labels in enumerate(allowed):
            position, free = self.space.strategies[site].position, set(self.choices(site).tolist())
            numbers = [position[tuple(x)] for x in labels if tuple(x) in position]
            chosen.append(np.array([n for n in numbers if n in free], dtype=np.int64))
        return self._problem(chosen)

    def choice_of(self, labels: Sequence[Label]) -> tuple[int, ...]:
        """Choice numbers in `full()` of one label per site."""
        found = []
        for site, label in enumerate(labels):
            number = self.space.strategies[site].position[label]
            found.append(int(np.searchsorted(self.choices(site), number)))
        return tuple(found)

    def labels_of(self, choice: Sequence[int]) -> list[Label]:
        """The inverse of `choice_of`."""
        return [self.space.strategies[s].labels[int(self.choices(s)[c])] for s, c in enumerate(choice)]

    def _problem(self, chosen: Sequence[np.ndarray]) -> Problem:
        nodes = tuple(self._node(site, numbers) for site, numbers in enumerate(chosen))
        edges = tuple(self._edge(link, chosen) for link in self.space.links)
        return Problem(nodes, edges, self.limit_bytes, "strategy space")

    def _memo(self, key: object, make: object) -> np.ndarray:
        if key not in self._arrays:
            self._arrays[key] = make()  # type: ignore[operator]
        return self._arrays[key]

    def _node(self, index: int, numbers: np.ndarray) -> Node:
        site, s = self.space.sites[index], self.space.strategies[index]
        kept = tuple((index, o) in self.kept for o in range(len(s.output_metas)))
        key = (id(s), site.kind, numbers.tobytes(), kept)
        costs = self._memo(("cost", *key), lambda: self._site_s(index)[numbers])
        usages = self._memo(("usage", *key), lambda: self._site_bytes(index)[numbers])
        if self.faults is not None:
            costs = costs + FAULT_S * self.faults.site_faults(index)[numbers]
        labels = s.labels if len(numbers) == len(s.labels) else tuple(s.labels[n] for n in numbers)
        return Node(site.name, costs, usages, self._interval(index, any(kept)), labels)

    def _site_s(self, index: int) -> np.ndarray:
        s, kind = self.space.strategies[index], self.space.sites[index].kind
        if kind == "op":
            return self.prices.op(s).total_s
        return self.prices.parameter_s(s) if kind == "parameter" else np.zeros(len(s.labels))

    def _site_bytes(self, index: int) -> np.ndarray:
        s, kind = self.space.strategies[index], self.space.sites[index].kind
        if kind == "parameter":
            return self.prices.parameter_bytes(s)
        total = np.zeros(len(s.labels))
        if kind in ("hub", "output", "update") or (s.rule is not None and s.rule.alias):
            return total
        for meta, numbers in zip(s.output_metas, s.outputs, strict=True):
            total = total + self.prices.local_bytes(meta, numbers)
        if s.rule is not None and s.rule.extra_bytes and self.prices.training:
            elements = self.prices.local_bytes(s.input_metas[0], s.inputs[0]) / s.input_metas[0].dtype.itemsize
            total = total + elements * s.rule.extra_bytes
        return total

    def _interval(self, index: int, kept: bool) -> tuple[int, int]:
        end = 2 * len(self.space) + 1
        if self.space.sites[index].kind in ("parameter", "buffer", "input"):
            return 0, end
        return (index, end - index) if kept else (index, max(index, self.last_use.get(index, index)) + 1)

    def _edge(self, link: Link, chosen: Sequence[np.ndarray]) -> Edge:
        rows, columns = chosen[link.source], chosen[link.target]
        s, t = self.space.strategies[link.source], self.space.strategies[link.target]
        key = (id(s), link.output, id(t), link.position, rows.tobytes(), columns.tobytes())
        pick = np.ix_(rows, columns)
        costs = self._memo(("link", *key), lambda: self.prices.link_s(link)[pick])
        usages = self._memo(("copy", *key), lambda: self.prices.link_copies(link)[pick])
        if self.faults is not None:
            costs = costs + FAULT_S * self.faults.link_faults(link, self.prices.table(link.meta))[pick]
        kept = ("copy", link.target, link.position) in self.kept
        end = 2 * len(self.space) + 1 - link.target if kept else link.target + 1
        return Edge(link.source, link.target, costs, usages if usages.any() else None, (link.target, end))


def _kept_values(space: StrategySpace) -> frozenset[object]:
    """Values (site, output) and copies ("copy", site, input) that backward needs.

    What an aliasing op or a hub passes on is its input's memory, so a need of theirs is a need of their input's.
    """
    kept: set[object] = set()
    for index in range(len(space.sites) - 1, -1, -1):
        strategies, site = space.strategies[index], space.sites[index]
        rule = strategies.rule
        passes_on = site.kind == "hub" or (rule is not None and rule.alias)
        if rule is not None and rule.saves_output and strategies.output_metas[0].requires_grad:
            kept.add((index, 0))
        grad = any(m.requires_grad for m in strategies.output_metas)
        for link in space.links_into.get(index, ()):
            saved = grad and rule is not None and not passes_on and link.position in rule.saves
            if saved or (passes_on and (index, 0) in kept):
                kept.add(("copy", index, link.position))
                kept.add((link.source, link.output))
    return frozenset(kept)


def _side_computations(space: StrategySpace) -> dict[int, np.ndarray]:
    """Ops that read no input and need no gradient, with at most `SIDE_SHARE` of all ops' bytes: only repeated."""
    from_input = {site.index for site in space.sites if site.kind == "input"}
    for link in space.links:  # in the order of their targets
        if link.source in from_input:
            from_input.add(link.target)
    ops = [site for site in space.sites if site.kind == "op"]
    sizes = {s.index: sum(m.num_bytes for m in space.strategies[s.index].output_metas) for s in ops}
    most = SIDE_SHARE * sum(sizes.values())
    found = {}
    for index, size in sizes.items():
        s = space.strategies[index]
        grad = any(m.requires_grad for m in (*s.input_metas, *s.output_metas))
        if index not in from_input and size <= most and not grad:
            found[index] = np.flatnonzero((s.array == 0).all(axis=1))
    return found


def _last_uses(space: StrategySpace) -> dict[int, int]:
    last: dict[int, int] = {}
    for link in sorted(space.links, key=lambda k: -k.target):
        passes_on = space.sites[link.target].kind == "hub"
        use = last.get(link.target, link.target) if passes_on else link.target
        last[link.source] = max(last.get(link.source, 0), use)
    return last

