"""The benchmark of rules against ops: it finds what is possible, believes no wrong claim, and reads DTensor rightly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from autoparallel.errors import AutoparallelError
from autoparallel.layout import PARTIAL
from autoparallel.rules import Rule, registry
from autoparallel.rules.families.views import whole_dims
from autoparallel.rules.registry import family_of
from benchmarks.rule_truth import dtensor, report
from benchmarks.rule_truth.claims import claims
from benchmarks.rule_truth.kept import Kept
from benchmarks.rule_truth.study import OpStudy, Study, show
from benchmarks.rule_truth.truth import held, lies, possible
from tests.support.rule_cases import case_of

aten = torch.ops.aten
Database = Callable[[Sequence[str]], list[Any]]


@pytest.fixture(scope="module")
def study() -> Iterator[Study]:
    with dtensor.meshes((2,)) as meshes:
        yield Study((2,), 1, 0, lambda case, asked, size: dtensor.claimed(case, asked, meshes[size]),
                    lambda case, combination, size: dtensor.kept(case, combination, meshes[size]))


@pytest.fixture
def database() -> Database:
    """torch's; ten seconds of import."""
    pytest.importorskip("expecttest", reason="torch's op database needs it")
    from benchmarks.rule_truth.main import database

    return database


def test_possible_axis_strategies() -> None:
    """A product of matrices, and one that nobody can cut along the dim it orders."""
    assert {show(c) for c in possible(case_of(aten.mm.default, (4, 6), (6, 8)), 2)} == {
        "S(0) R -> S(0)", "R S(1) -> S(1)", "S(1) S(0) -> P", "P R -> P", "R P -> P",
    }
    assert {show(c) for c in possible(case_of(aten.cumsum.default, (4, 6), 1), 2)} == {"S(0) -> S(0)", "P -> P"}
    assert {show(c) for c in possible(case_of(aten.sort.default, (5, 6), 1), 2)} == {"S(0) -> S(0) S(0)"}


def test_a_wrong_claim_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax over a cut dim: shards of the right shape with the wrong numbers."""
    case = case_of(aten.softmax.int, (4, 6), 1)
    found, known = claims(case, 2)
    assert known and not any(claim.wrong for claim in found)

    def wrong(op: registry.OpView) -> Rule:
        return whole_dims(op, set())

    monkeypatch.setitem(registry._BUILDERS, aten.softmax.int, wrong)
    assert [claim.axis_strategy for claim in claims(case, 2)[0] if claim.wrong] == ["d1"]


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias with the batch cut, whose gradient would be taken for the whole's on every rank."""
    from benchmarks.rule_truth import claims as module

    case = case_of(aten.linear.default, (4, 6), (8, 6), (8,))
    assert not any(claim.wrong for claim in claims(case, 2)[0])
    monkeypatch.setitem(module.DUAL, "R", module.INVARIANT)
    assert any("gradient" in claim.wrong for claim in claims(case, 2)[0])


def test_dtensor_is_held_to_what_it_runs(study: Study) -> None:
    """Its argmax of a cut dim communicates, and is right; what it says of a convolution of summands is wrong; a norm
    of shards is not one of the summands that a sum makes whole."""
    argmax = study.judge(case_of(aten.argmax.default, (4, 6), -1)).counts
    assert argmax.dtensor_right > argmax.right and not argmax.dtensor_wrong
    assert study.judge(case_of(aten.conv1d.default, (1, 3, 4), (3, 3, 3), (3,), [2], [2])).counts.dtensor_wrong
    norm = study.judge(case_of(aten.linalg_vector_norm.default, (4, 6), 2, [1])).counts
    assert norm.dtensor_right == norm.right == 1 and not norm.dtensor_wrong


@pytest.mark.slow
def test_a_handful_of_ops(study: Study, database: Database) -> None:
    """Nothing wrong, nothing missed that DTensor claims, on ops of most families."""
    names = ["add", "mm", "softmax", "sum", "gather", "cat", "nn.functional.linear", "linalg.inv", "topk", "permute"]
    studies = [study.of(info) for info in database(names)]
    judged = report.distinct(studies)
    total = report.figures(judged)
    assert total.cases > 10 and total.counts.possible > 25
    assert not [line for j in judged for line in j.wrong]
    assert not [line for j in judged for line in j.dtensor_only]
    assert total.counts.right >= total.counts.dtensor_right > 20
    assert {"matmul", "linalg", "reduce", "views"} <= report.grouped(judged, "family").keys()


@pytest.mark.slow
def test_the_vocabulary_variant_is_tried(study: Study, database: Database) -> None:
    """It is not the op on shards; it counts as possible because it is right."""
    (embedding,) = database(["nn.functional.embedding"])
    judged = [j for j in study.of(embedding).judged if j.op == "aten.embedding.default"]
    assert judged and not any(j.wrong for j in judged) and all(j.counts.right for j in judged)


@pytest.mark.slow
def test_a_run_goes_on_where_it_ended(study: Study, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                     ) -> None:
    """Slices share a folder; what is there under the same settings is not studied again."""
    from benchmarks.rule_truth import main

    class InThisProcess:
        def __init__(self, infos: Sequence[Any], sizes: tuple[int, ...], num_samples: int) -> None:
            self.infos = infos

        def ask(self, number: int, search: bool) -> OpStudy:
            asked.append(self.infos[number].name)
            return study.of(self.infos[number])

        def stop(self) -> None:
            pass

    asked: list[str] = []
    monkeypatch.setattr(main, "_Worker", InThisProcess)
    infos, kept = database(["abs", "permute", "cumsum"]), Kept(tmp_path, {"samples": 1})
    made = {s.name: s for part in ("1/2", "2/2") for s in main.studied(main.sliced(infos, part), (2,), 1, kept)}
    again = list(main.studied(infos, (2,), 1, kept))
    assert sorted(asked) == ["abs", "cumsum", "permute"]
    assert again == [made[s.name] for s in again] and all(s.judged and s.seconds for s in again)
    assert kept.read("abs") and Kept(tmp_path, {"samples": 2}).read("abs") is None
    with pytest.raises(AutoparallelError, match="--slice 3/2 is no part"):
        main.sliced(infos, "3/2")


@pytest.mark.slow
def test_unknown_names_are_refused(database: Database) -> None:
    with pytest.raises(AutoparallelError, match=r"has no linalg\.solv: write names as it does"):
        database(["linalg.solv"])


#: Ops that DTensor describes and no rule or rewriting of ours does, with arguments (a tuple is a tensor's shape).
ONLY_DTENSORS: dict[Any, tuple[Any, ...]] = {
    aten.convolution.default: ((2, 4, 8), (6, 4, 3), (6,), [1], [1], [1], False, [0], 1),
    aten.native_batch_norm.default: ((4, 6, 5), (6,), (6,), None, None, True, 0.1, 1e-5),
    aten._linalg_det.default: ((4, 5, 5),),
    aten._linalg_slogdet.default: ((4, 5, 5),),
    aten._linalg_solve_ex.default: ((4, 5, 5), (4, 5, 3)),
    aten._linalg_eigh.default: ((4, 5, 5),),
    aten._linalg_svd.default: ((4, 5, 5),),
    aten._fft_r2c.default: ((4, 6, 8), [2], 0, True),
    aten._adaptive_avg_pool2d.default: ((4, 6, 8, 8), [2, 2]),
    aten._adaptive_avg_pool3d.default: ((4, 6, 4, 4, 4), [2, 2, 2]),
    aten.upsample_nearest1d.default: ((4, 6, 5), [10]),
    aten.upsample_nearest2d.default: ((4, 6, 5, 5), [10, 10]),
    aten.upsample_nearest3d.default: ((4, 6, 2, 2, 2), [4, 4, 4]),
    aten._upsample_nearest_exact1d.default: ((4, 6, 5), [10]),
    aten._upsample_nearest_exact2d.default: ((4, 6, 5, 5), [10, 10]),
    aten._upsample_nearest_exact3d.default: ((4, 6, 2, 2, 2), [4, 4, 4]),
    aten.upsample_linear1d.default: ((4, 6, 5), [7], False),
    aten.upsample_bilinear2d.default: ((4, 6, 5, 5), [7, 7], False),
    aten.upsample_trilinear3d.default: ((4, 6, 3, 3, 3), [4, 4, 4], False),
    aten.upsample_bicubic2d.default: ((4, 6, 5, 5), [7, 7], False),
    aten._upsample_bicubic2d_aa.default: ((4, 6, 5, 5), [7, 7], False),
    aten.linalg__powsum.default: ((4, 6), 2.0),
    torch.ops.prims.bessel_j0.default: ((4, 6),),
    torch.ops.prims.sum.default: ((4, 6), [1]),
    torch.ops.prims.prod.default: ((4, 6), [1]),
}


@pytest.mark.parametrize("op", list(ONLY_DTENSORS), ids=str)
def test_dtensors_rules_are_found_by_running(op: Any, study: Study) -> None:
    """DTensor is no second provider of rules: of what it claims rightly and we do not describe, discovery finds all."""
    assert family_of(op) is None
    judged = study.judge(case_of(op, *ONLY_DTENSORS[op]))
    assert judged.counts.right and not judged.wrong and not judged.dtensor_only


def test_cancellation_is_measured_against_the_summands() -> None:
    """Summands of both leave zero but for their own rounding; what is off by more is not."""
    x = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shards = [one - other for one, other in zip(held(x, PARTIAL, 3, seed=0), held(x, PARTIAL, 3, seed=1), strict=True)]
    assert any(float(total) != 0 for total in sum(shards))
    assert lies(shards, PARTIAL, torch.zeros(5, dtype=torch.float64))
    assert not lies([shards[0] * (1 + 1e-4), *shards[1:]], PARTIAL, torch.zeros(5, dtype=torch.float64))
