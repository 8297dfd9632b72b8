"""Ranks agree before they run: all must issue the same collectives in the same order."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoparallel.errors import LoweringError
from autoparallel.lower import Program, order_digest


def agree(program: Program, mesh: DeviceMesh) -> None:
    """Compare the order of collectives over all ranks of the mesh.

    Raises LoweringError, naming the ranks that differ, instead of letting the program hang.
    """
    mine = order_digest(program)
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    different = [rank for rank, digest in enumerate(found) if digest != found[0]]
    if different:
        raise LoweringError(f"ranks {different} would issue other collectives than rank 0 on mesh {tuple(mesh.shape)}: "
                            "do all ranks compile the same model with the same inputs and options?")
