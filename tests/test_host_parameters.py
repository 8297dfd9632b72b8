"""Parameters in the memory of the host, fetched for each use: equal to the bit with those of device memory; few at a
time on the device; planned, priced and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import autoparallel
from autoparallel.errors import PlanError
from autoparallel.kernels import fetching, regather
from autoparallel.plans import Plan
from autoparallel.schedule.tiers import Offload
from cost_models import Cluster
from tests.support.models import CASES
from tests.support.offloaded import ADAMW, Options, same, trained
from tests.support.ranks import mesh_of
from tests.support.reference import Trained, assert_same_parameters, gathered, scalar, train_reference
from tests.support.tiers import slow


@pytest.mark.ranks
@pytest.mark.parametrize(("case", "shape", "options", "norm", "calls"), [
    ("llama", (4,), {}, 0.5, 1),
    ("gpt2", (1,), {"micro_batches": 4, "recompute": "full"}, None, 1),
    ("llama", (2, 2), {"micro_batches": 2, "recompute": "full"}, 0.5, 2),
    slow("llama", (1,), {}, None, 1),
    slow("bert", (4,), {"recompute": "selective"}, None, 1),
    slow("bert", (2,), {"micro_batches": 8, "reduce_dtype": "float32"}, 0.1, 2),
    slow("mixtral", (2, 2), {}, None, 1),
    slow("mixtral", (1,), {"recompute": "full"}, 0.5, 1),
])
def test_equal_to_parameters_on_the_device(ranks: Any, case: str, shape: tuple[int, ...], options: Options,
                                           norm: float | None, calls: int) -> None:
    """Losses, gradients, states and parameters, to the bit; and as one process."""
    pool, options = ranks(int(torch.Size(shape).numel())), {"zero_stage": 3, **options}
    kept = pool.run(trained, case, shape, options, "none", norm, calls, timeout_s=200)
    moved = pool.run(trained, case, shape, options, "parameters", norm, calls, timeout_s=200)
    for before, after in zip(kept, moved, strict=True):
        wrong = [name for name, value in before.items() if name not in ("bytes", "memory") and
                 not same(after[name], value)]
        assert wrong == []
        counted, predicted = after["memory"]
        assert counted["device"] == counted["disk"] == 0 and counted["host"] <= 1.05 * predicted + 8192
    assert max(after["memory"][0]["host"] for after in moved) == pytest.approx(moved[0]["memory"][1], rel=0.05, abs=8192)
    if norm is None and calls == 1:
        expected = train_reference(CASES[case], "adamw", num_steps=3, batch_size=8)
        everything = Trained(0, [], {}, expected.parameters | moved[0]["whole"], {})
        assert moved[0]["losses"] == pytest.approx(expected.losses, rel=1e-5)
        assert_same_parameters(everything.parameters, expected, 1e-4)


def fetched(recompute: str) -> tuple[int, int, float]:
    """Bytes of the largest live set of fetched copies in a step, of all parameters, and of the first as planned."""
    case = CASES["llama"]
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build(), mesh_of(1), example_inputs=args, example_kwargs=kwargs,
                                    offload="parameters", bucket_bytes=4096, recompute=recompute)
    live: list[tuple[StorageWeakRef, int]] = []
    most, forward, again = 0, fetching.Fetches.forward, regather.begin_copies

    def counted(finish: Any) -> Any:
        nonlocal most
        live[:] = [one for one in live if not one[0].expired()]
        live.extend((StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes()) for x in finish())
        most = max(most, sum(size for _, size in live))
        return finish

    with patch.object(fetching.Fetches, "forward", lambda *given: counted(forward(*given))), \
            patch.object(regather, "begin_copies", lambda *given: counted(again(*given))):
        with torch.no_grad():
            parallel(*args, **kwargs)
        parallel.step(*args, **kwargs)
    assert parallel.plan.known is not None and parallel.plan.known.memory is not None
    memory = parallel.plan.known.memory
    at = [memory.kinds.index(kind) for kind in ("gathered parameters", "gradients")]
    planned = max(sum(row[kind] for kind in at) for row in memory.num_bytes)
    return most, sum(p.nbytes for p in parallel.parameters()), planned


@pytest.mark.ranks
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_few_parameters_are_on_the_device_at_a_time(ranks: Any, recompute: str) -> None:
    (most, everything, planned), = ranks(1).run(fetched, recompute)
    assert 0 < most < everything / 2 and planned < everything
    assert most <= 1.3 * planned
