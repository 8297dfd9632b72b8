"""A program as it runs eagerly: with its communication overlapped, norms by our kernels where torch has none."""

from __future__ import annotations

from torch.fx import GraphModule

from autoparallel.lower.activation_pass import overlap_activations
from autoparallel.lower.expert_pass import overlap_experts
from autoparallel.lower.in_place import sum_in_place
from autoparallel.lower.norm_kernels import norm_kernels
from autoparallel.lower.number_sums import sum_numbers_together
from autoparallel.lower.overlap_pass import BlockOf, overlap
from autoparallel.lower.pieces_pass import in_pieces
from autoparallel.schedule.step_config import Hybrid


def overlapped(module: GraphModule, hybrid: Hybrid, block_of: BlockOf | None = None) -> GraphModule:
    """The program with the communication of parameters (``block_of``: as for `overlap`), of activations and of experts'
    rows overlapped, and all-reduces of single numbers merged."""
    norms = norm_kernels(overlap(module, hybrid, block_of))
    return sum_numbers_together(activations_overlapped(norms, hybrid))


def activations_overlapped(module: GraphModule, hybrid: Hybrid) -> GraphModule:
    """The program with the communication of activations, that of experts' rows included, overlapped, and sums of
    products in the memory of the summands where it is synchronous."""
    return sum_in_place(overlap_activations(overlap_experts(in_pieces(module, hybrid), hybrid), hybrid), hybrid)


__all__ = ["activations_overlapped", "overlapped"]
