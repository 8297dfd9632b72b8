"""Large DTensors that an op needs whole on each rank: gathered, and told once for each op."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autoparallel.capture.tracing.frames import users_caller
from autoparallel.plans.reports.units import bytes_str
from autoparallel.runtime.dtensors import replicated

_LOG = logging.getLogger("autoparallel")
#: Tensors of fewer bytes are gathered without a word.
TOLD_BYTES = 2**20
_told: set[str] = set()


def gathered(op: Any, value: Any) -> Any:
    """``value`` with all of it on each rank, as ``op`` needs it; anything but a DTensor as it is. The first time that
    an op gathers as many bytes, rank 0 warns, with the user's line."""
    if isinstance(value, DTensor) and op._opname not in _told and not value.is_meta:
        size_bytes = value.numel() * value.element_size()
        if size_bytes >= TOLD_BYTES and any(not p.is_replicate() and value.device_mesh.size(axis) > 1
                                            for axis, p in enumerate(value.placements)):
            _told.add(op._opname)
            if dist.get_rank() == 0:
                _LOG.warning("%s of a DTensor %s with placements %s: it is gathered, and each rank has all of its %s, "
                             "at each call%s\n  In the model's forward the plan shards or counts it; "
                             "what needs the whole on purpose: value.full_tensor(), once.", op._opname,
                             list(value.shape), value.placements, bytes_str(size_bytes), users_caller())
    return replicated(value)


__all__ = ["TOLD_BYTES", "gathered"]
