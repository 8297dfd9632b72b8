"""Bounds of decision graphs that were found, here or beside the search."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from autoparallel.planning.bound_kinds import Kind
from autoparallel.planning.candidates import Mesh


class Work(NamedTuple):
    """A lower bound of the seconds of all micro-batches of the whole model on one rank, by how much longer they take in
    a pipeline that fills and drains: without that, and ``most`` times as long (by the ends of a concave function).
    ``sent_s``: a bound for both that counts what the rank sends rather than what it computes."""

    alone_s: float
    longest_s: float
    most: float
    sent_s: float = 0.0

    def at(self, longer: float, even_s: float) -> float:
        """Where they take ``longer`` times as long; ``even_s``: at least so much of them does."""
        if self.alone_s == math.inf:
            return math.inf
        share = min(1.0, (longer - 1) / (self.most - 1)) if self.most > 1 else 0.0
        between_s = (1 - share) * self.alone_s + share * self.longest_s
        return max(between_s, self.alone_s + (longer - 1) * even_s, self.sent_s)


class Found(NamedTuple):
    """A bound that was found: of a decision graph (``work``), of kinds with more micro-batches, too (``more``), or with
    priced memory (``fitting``); ``key``: what it is of."""

    what: str
    key: Any
    value: Any

    @property
    def mesh(self) -> Mesh:
        """The mesh whose combinations it bounds."""
        kind: Kind = self.key[0] if self.what == "fitting" else self.key
        return kind.mesh


class FoundBounds:
    """By kind, of which there are a few hundred: ``work``, and the same as a bound of kinds with more micro-batches,
    too, ``more``. ``fitting``: seconds on one rank of plans that fit, by what `StepBounds` says."""

    def __init__(self) -> None:
        self.work: dict[Kind, Work] = {}
        self.more: dict[Kind, Work] = {}
        self.fitting: dict[object, float] = {}
        #: How many were found, by the mesh whose combinations they bound.
        self.of_mesh = Counter[Mesh]()
        self._new: list[Found] = []

    def note(self, found: Found) -> None:
        """Keep what was found here."""
        self._keep(found)
        self._new.append(found)

    def new(self) -> list[Found]:
        """What was found here since the last call, for `take` of others."""
        found, self._new = self._new, []
        return found

    def take(self, found: Iterable[Found]) -> set[Mesh]:
        """Keep what others found; returns the meshes whose combinations it bounds."""
        meshes = set[Mesh]()
        for one in found:
            self._keep(one)
            meshes.add(one.mesh)
        return meshes

    def _keep(self, found: Found) -> None:
        self.of_mesh[found.mesh] += 1
        match found.what:
            case "work":
                self.work[found.key] = found.value
            case "more":
                self.more[found.key] = found.value
            case "fitting":    # beside several best steps
                self.fitting[found.key] = max(found.value, self.fitting.get(found.key, 0.0))


__all__ = ["Found", "FoundBounds", "Work"]
