"""Torch's wrappers for data parallelism are refused by name, and leave the parallel module as it was."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import autoparallel
from autoparallel.errors import InputError
from tests.support.ranks import mesh_of


def wrapped() -> tuple[list[str], bool]:
    torch.manual_seed(0)
    parallel = autoparallel.compile(nn.Linear(8, 4), mesh_of(2), example_inputs=(torch.ones(4, 8),), baseline="ddp")
    expected, told = parallel(torch.ones(4, 8)).full_tensor(), []
    for wrap in (DistributedDataParallel, partial(fully_shard, mesh=mesh_of(2)),
                 partial(FullyShardedDataParallel, device_id=torch.device("cpu"))):
        try:
            wrap(parallel)
            told.append("no error")
        except InputError as error:
            told.append(str(error))
    assert not getattr(parallel, "_is_fsdp_managed_module", False)  # as transformers' generate asks
    names = [name for name, _ in parallel.named_parameters()]
    return told, names == ["weight", "bias"] and torch.equal(parallel(torch.ones(4, 8)).full_tensor(), expected)


def test_wrappers_are_refused(ranks: Any) -> None:
    for (ddp, fully, fsdp), unchanged in ranks(2).run(wrapped):
        assert ddp.startswith("DistributedDataParallel cannot wrap a parallel module")
        assert fully.startswith("fully_shard cannot wrap") and fsdp.startswith("FullyShardedDataParallel cannot wrap")
        assert 'baseline="ddp" or "fsdp"' in ddp and unchanged
