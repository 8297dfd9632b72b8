"""Random edits of a model between calls: the parallel module computes what the model computes, or refuses."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import autoparallel
from autoparallel.errors import AutoparallelError
from tests.support.edits import EDITS, Edited, Model, undone
from tests.support.tiers import slow

EDITS_OF_A_MODEL = 6
#: Seeds of one test; 200 models with at most 6 edits each are more than 1,000 edits.
SEEDS = 10


def called(model: Any, x: torch.Tensor, how: str) -> torch.Tensor:
    with (torch.autocast("cpu", torch.bfloat16) if how == "autocast" else torch.no_grad() if how == "no_grad"
          else nullcontext()):
        made = model(x)
    return made.full_tensor() if hasattr(made, "full_tensor") else made


def differs(edited: Edited, x: torch.Tensor, how: str) -> str:
    """How the two differ after a call each, "" where they are equal: in the result, its dtype, or a buffer. Raises
    AutoparallelError if the parallel module refuses."""
    found, expected = called(edited.parallel, x, how), called(edited.model, x, how)
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"{found.dtype} {list(found.shape)} for {expected.dtype} {list(expected.shape)}"
    error, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    if not error <= (3e-2 if how == "autocast" else 1e-4) * largest + 1e-6:
        return f"error {error} of {largest}"
    for (name, one), (_, other) in zip(edited.model.named_buffers(), edited.parallel.named_buffers(), strict=True):
        if not torch.allclose(one.double(), other.double(), rtol=1e-3, atol=1e-3):
            return f"buffer {name}"
        if how == "autocast":  # whose rounding stays in the statistics of a batch norm
            other.copy_(one)
    return ""


def run_edits(seed: int, mesh: Any) -> tuple[Counter[str], list[str]]:
    """Counts of equal and refused edits of one model, and what was wrong. The first refusal is the last edit."""
    draw, counts, log = random.Random(seed), Counter[str](), list[str]()
    torch.manual_seed(seed)
    model, x = Model(), torch.randn(8, 4)
    parallel = autoparallel.compile(model, mesh, example_inputs=(x,), check_inputs=0, max_forms=50)
    edited = Edited(model, parallel, draw)
    for _ in range(EDITS_OF_A_MODEL):
        name, how = draw.choice(sorted(EDITS)), draw.choice(["", "", "no_grad", "autocast"])
        log.append(f"{name} {how}".strip())
        try:
            EDITS[name](edited)
            if wrong := differs(edited, x, how):
                return counts, [f"seed {seed}, {log}: {wrong}"]
        except AutoparallelError:
            counts["refused"] += 1
            break
        counts["equal"] += 1
    return counts, []


@pytest.mark.parametrize("first", [0, *(slow(SEEDS * n) for n in range(1, 20))])
def test_random_edits_are_never_wrong(mesh_of_one: Any, first: int) -> None:
    """Errors that are not ours fail, those of the edited model itself too."""
    counts, wrong = Counter[str](), list[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(first, first + (SEEDS if first else 1)):
            with undone():
                more, bad = run_edits(seed, mesh_of_one)
            counts, wrong = counts + more, wrong + bad
    print(f"edits: {dict(counts)}")
    assert not wrong, "\n".join(wrong)
    assert counts["equal"] >= 2 * counts["refused"]
