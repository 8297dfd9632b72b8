"""Parameters, gradients and states in tiers of their own, on the host and on disk: equal to the bit with those of device
memory, bytes of each tier as planned, plans, refusals."""

from __future__ import annotations

import errno
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import autoparallel
from autoparallel.errors import InfeasibleError, InputError, PlanError
from autoparallel.plans import Plan
from autoparallel.runtime.offload import mapped
from autoparallel.runtime.offload.mapped import MappedFiles
from autoparallel.schedule.tiers import Offload, offload_of
from cost_models import Cluster, offload
from tests.support.models import CASES
from tests.support.offloaded import ADAMW, Options, differing, trained
from tests.support.ranks import mesh_of
from tests.support.reference import Trained, assert_same_parameters, gathered, scalar, train_reference
from tests.support.tiers import slow


@pytest.mark.ranks
@pytest.mark.parametrize(("case", "shape", "tier", "options", "norm", "calls"), [
    ("llama", (4,), "host/host/disk", {}, 0.5, 1),
    ("gpt2", (1,), "disk/disk/disk", {"micro_batches": 4, "recompute": "full"}, None, 1),
    ("bert", (2, 2), "device/host/disk", {"zero_stage": 1, "micro_batches": 2}, 0.5, 2),
    slow("llama", (2, 2), "disk/disk/disk", {"recompute": "full"}, 0.5, 2),
    slow("mixtral", (2,), "host/disk/disk", {"micro_batches": 2, "reduce_dtype": "float32"}, None, 1),
    slow("gpt2", (4,), "device/host/disk", {"zero_stage": 0}, None, 1),
    slow("gpt2", (4,), "device/host/disk", {"zero_stage": 2, "micro_batches": 8}, None, 1),
    slow("llama", (4,), "device/host/disk", {"zero_stage": 3, "recompute": "selective"}, 0.1, 1),
    slow("bert", (2,), "host/host/disk", {"micro_batches": 8, "recompute": "selective"}, 0.1, 2),
    slow("mixtral", (1,), "host/host/disk", {"recompute": "full"}, 0.5, 1),
    slow("bert", (4,), "disk/disk/disk", {"micro_batches": 2}, None, 1),
])
def test_equal_to_all_on_the_device(ranks: Any, tmp_path: Path, case: str, shape: tuple[int, ...], tier: str,
                                    options: Options, norm: float | None, calls: int) -> None:
    """Losses, gradients, states and parameters, to the bit; and as one process. Bytes of each tier as predicted."""
    pool = ranks(int(torch.Size(shape).numel()))
    options = {"zero_stage": 3, **options}
    kept = pool.run(trained, case, shape, options, "none", norm, calls, timeout_s=200)
    moved = pool.run(trained, case, shape, {**options, "disk_path": tmp_path}, tier, norm, calls, timeout_s=200)
    for before, after in zip(kept, moved, strict=True):
        assert differing(after, before) == []
        assert after["memory"][0]["device"] == 0 and after["memory"][0]["host"] > 0
    for name, at in (("memory", "host"), ("disk", "disk")):
        most, planned = max(after["memory"][0][at] for after in moved), moved[0][name][1]
        rooms = 4096 * 2 * len(moved[0]["parameters"]) if at == "disk" and tier.count("disk") > 1 else 0
        assert planned > 0 and planned <= most * 1.05 + 3 * 8192 and most <= 1.05 * planned + 3 * 8192 + rooms
    if norm is None and calls == 1:
        expected = train_reference(CASES[case], "adamw", num_steps=3, batch_size=8)
        everything = Trained(0, [], {}, expected.parameters | moved[0]["whole"], {})
        assert moved[0]["losses"][:3] == pytest.approx(expected.losses, rel=1e-5)
        assert_same_parameters(everything.parameters, expected, 1e-4)
    assert list(tmp_path.iterdir()) == []
