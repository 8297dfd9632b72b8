"""One op of the database: its samples captured, every claim tried, everything possible looked for."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from autoparallel.capture import op_signature
from autoparallel.layout import REPLICATE
from autoparallel.rules.registry import family_of, find_rule
from benchmarks.rule_truth.cases import Case, calls_of, captured, cases_of
from benchmarks.rule_truth.claims import claims
from benchmarks.rule_truth.truth import Combination, Placed, count_combinations, input_combinations, possible, telling

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo

#: Beyond so many combinations of inputs only those that somebody claims are tried.
MOST_COMBINATIONS = 1500
#: DTensor is asked about every combination up to so many, then only about the possible ones.
MOST_QUESTIONS = 24
#: Larger cases are left out: every comparison reads all of their numbers.
MOST_ELEMENTS = 1 << 20
#: Families of ops that no rule describes, by their names; the first that fits.
OTHERS = (
    ("linalg", r"linalg|cholesky|lu_|qr|svd|triangular_solve|ormqr|geqrf|lstsq|pinverse|det|inverse"),
    ("spectral", r"fft|stft|complex|polar"), ("conv", r"conv|pool|fold|upsample|interpolate|grid|pixel|im2col|col2im"),
    ("loss", r"loss"), ("norm", r"norm"), ("reduce", r"sum|mean|cum|median|aminmax|count"),
    ("gather", r"scatter|index|gather|take|put|masked|embedding_bag|search|bincount"),
)
Asked = Callable[[Case, Iterable[Placed], int], Iterable[Combination]]
Kept = Callable[[Case, Combination, int], bool]


@dataclass(frozen=True)
class Counts:
    """Combinations of placements on one axis, over cases and sizes of the axis."""

    possible: int = 0
    right: int = 0
    wrong: int = 0
    dtensor_right: int = 0
    dtensor_wrong: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[int, ...]:
        return self.possible, self.right, self.wrong, self.dtensor_right, self.dtensor_wrong


@dataclass(frozen=True)
class Judged:
    """One case on axes of every size: lines to read of what is wrong, possible and not claimed, DTensor's alone."""

    op: str
    family: str
    case: str
    known: bool
    counts: Counts
    wrong: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    dtensor_only: tuple[str, ...] = ()
    dtensor_wrong: tuple[str, ...] = ()


@dataclass
class OpStudy:
    """What became of one op of the database. ``left_out``: why samples or ops of them were not judged -> how often;
    ``seconds`` of CPU that it took."""

    name: str
    num_samples: int = 0
    judged: list[Judged] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def counts(self) -> Counts:
        return sum((j.counts for j in self.judged), Counts())


class Study:
    """Judges cases, each distinct one once. Without ``search`` only what is claimed is tried."""

    def __init__(self, sizes: Sequence[int], num_samples: int, seed: int, dtensor: Asked, kept: Kept,
                 search: bool = True) -> None:
        self.sizes, self.num_samples, self.seed = tuple(sizes), num_samples, seed
        self.dtensor, self.kept, self.search = dtensor, kept, search
        self._made: dict[object, Judged] = {}

    def of(self, info: OpInfo) -> OpStudy:
        """All samples of one op."""
        study, clock = OpStudy(info.formatted_name), time.process_time()
        seen: set[object] = set()
        for calls in calls_of(info, self.num_samples, self.seed):
            study.num_samples += 1
            try:
                cases = cases_of(captured(calls), calls)
            except Exception as error:  # shapes that depend on the data, samples that are no tensor program
                study.left_out[_first_line(error)] += 1
                continue
            for case in cases:
                key = op_signature(case.graph, case.node)
                if key not in seen:
                    seen.add(key)
                    self._add(study, key, case)
        study.seconds = time.process_time() - clock
        return study

    def _add(self, study: OpStudy, key: object, case: Case) -> None:
        rule, known = find_rule(case.graph, case.node)
        if torch.Tag.nondeterministic_seeded in case.node.target.tags and (rule.random or not known):
            study.left_out["random"] += 1
            return
        if sum(meta.num_elements for meta in (*case.inputs, *case.node.outputs)) > MOST_ELEMENTS:
            study.left_out["too large"] += 1
            return
        try:
            if key not in self._made:
                self._made[key] = self.judge(case)
        except Exception as error:  # an op that does not run twice alike, or not on plain tensors
            study.left_out[f"{case.node.op_name} not judged: {_first_line(error)}"] += 1
            return
        study.judged.append(self._made[key])

    def judge(self, case: Case) -> Judged:
        key = op_signature(case.graph, case.node)
        judged = Judged(case.node.op_name, family(case.node.target), str(key), True, Counts())
        tells = self.search and telling(case)
        for size in self.sizes:
            judged = self._on_axis(judged, case, size, tells)
        return judged

    def _on_axis(self, judged: Judged, case: Case, size: int, tells: bool) -> Judged:
        ours, known = claims(case, size)
        right = {claim.combination for claim in ours if not claim.wrong}
        wrong = [claim for claim in ours if claim.wrong]
        many = count_combinations(case, size)
        can = possible(case, size) if tells and many <= MOST_COMBINATIONS else set()
        asked = input_combinations(case, size) if can and many <= MOST_QUESTIONS else {i for i, _ in can | right}
        theirs = {combination for combination in self.dtensor(case, asked, size) if not _trivial(combination)}
        can |= right
        can |= {claim for claim in theirs - can if self.kept(case, claim, size)}
        here = f"{_describe(case)} on {size}: "

        def lines(combinations: set[Combination]) -> tuple[str, ...]:
            return tuple(here + show(combination) for combination in sorted(combinations, key=str))

        return replace(
            judged, known=judged.known and known,
            counts=judged.counts + Counts(len(can), len(right), len(wrong), len(theirs & can), len(theirs - can)),
            wrong=judged.wrong + tuple(f"{here}{show(c.combination)} ({c.axis_strategy}): {c.wrong}" for c in wrong),
            missed=judged.missed + lines(can - right),
            dtensor_only=judged.dtensor_only + lines(theirs & can - right),
            dtensor_wrong=judged.dtensor_wrong + lines(theirs - can),
        )


def family(target: Any) -> str:
    """The rules' family that describes an op, or what its name says."""
    name = target._schema.name
    return family_of(target) or next((family for family, pattern in OTHERS if re.search(pattern, name)), "other")


def _trivial(combination: Combination) -> bool:
    return all(p == REPLICATE for placed in combination for p in placed)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:100]}"


def show(combination: Combination) -> str:
    inputs, outputs = combination
    return f"{' '.join(map(str, inputs))} -> {' '.join(map(str, outputs))}"


def _describe(case: Case) -> str:
    shapes = " ".join(str(list(meta.shape)) for meta in case.inputs)
    others = [a for a in (*case.node.args, *case.node.kwargs.values())
              if isinstance(a, (int, float, bool, str)) or (isinstance(a, list) and all(isinstance(n, int) for n in a))]
    return f"{case.node.op_name} {shapes}{' ' + str(others) if others else ''}"
