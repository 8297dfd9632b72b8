"""Steps of parameters, without communication, that run once for all micro-batches, where these reduce gradients
themselves (ZeRO-2 and 3): the values that they make are leaves, whose gradients go through the steps as they arrive
(`runtime.stage_module`)."""

from __future__ import annotations

from collections import defaultdict

from autoparallel.pricing.rank_reads import RankReads, TimedStep


class Leaves:
    """``steps``: all steps that run once, in program order; ``reduced``: by decision, paths of steps whose backward
    takes the gradients that the decision completes, in order; ``backward``: all of these, path by path, in the order
    of the first leaf that each makes."""

    def __init__(self, reads: RankReads) -> None:
        self.reads, self.space = reads, reads.space
        self._paths = defaultdict[tuple[int, int], list[TimedStep]](list)  # by the use that has their first step
        self._place = dict[tuple[int, int], int]()  # the first decision that reads a path's values
        self._made = dict[tuple[int, int], tuple[int, int]]()  # the first use before which a path has made a leaf
        self.steps = list[TimedStep]()
        self._note()
        self.reduced = defaultdict[int, list[list[TimedStep]]](list)
        for first, path in self._paths.items():
            if first in self._place:
                self.reduced[self._place[first]].append(path)
        for index, paths in self.reduced.items():
            if reads.in_several_ops(index):
                paths.reverse()

    @property
    def backward(self) -> list[TimedStep]:
        firsts = sorted(self._paths.keys() & self._place.keys(), key=self._made.__getitem__)
        return [timed for first in firsts for timed in reversed(self._paths[first])]

    def _note(self) -> None:
        made = dict[int, tuple[int, int] | None]()  # by shared read whose steps all run once, the use of the first
        last = dict[int, tuple[int, int]]()  # and that of the last
        for (use, path, _), before in zip(self.reads.moves, self.reads.once, strict=True):
            is_parameter = self.space.decisions[use.source].kind == "parameter"
            if not (is_parameter or use.source in made):
                continue
            first, here = (None, None) if is_parameter else (made[use.source], last.get(use.source))
            if before:
                here = use.target, use.position
                first = first or here
                self.steps += (done := self.reads.once_steps[use.target, use.position])
                self._paths[first] += done
            if before == len(path) and self.space.decisions[use.target].kind == "shared_read":
                made[use.target] = first
                if here is not None:
                    last[use.target] = here
            elif first is not None and here is not None and use.target in self.space.differentiated:
                self._place[first] = min(use.target, self._place.get(first, use.target))
                self._made[first] = min(here, self._made.get(first, here))
