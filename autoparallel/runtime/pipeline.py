"""Pipeline schedules of torch.distributed.pipelining over our stage modules. (The one file that touches them.)

Metadata of what stages exchange is known from the plan, so torch infers nothing; micro-batches are cut by us, so its
chunking is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from autoparallel.plans import Hybrid

if TYPE_CHECKING:
    from autoparallel.runtime.step import TurnModule


def _loss(output: Any, target: Any) -> torch.Tensor:
    return output[0] if isinstance(output, (tuple, list)) else output


class Pipeline:
    """One schedule over the stages of this rank.

    ``modules`` by stage index (the same stages per rank on each rank); ``group`` is the pipeline axis's process group.
    """

    def __init__(self, hybrid: Hybrid, modules: Mapping[int, TurnModule], group: dist.ProcessGroup,
                 device: torch.device) -> None:
        from torch.distributed import pipelining as torch_pp

        classes: dict[str, Any] = {
            "gpipe": torch_pp.ScheduleGPipe, "1f1b": torch_pp.Schedule1F1B,
            "interleaved": torch_pp.ScheduleInterleaved1F1B, "zero_bubble": torch_pp.ScheduleInterleavedZeroBubble,
        }
        self.group, self.micro_batches, self.device = group, hybrid.micro_batches, device
        self.stages = [
            torch_pp.PipelineStage(module, index, hybrid.stages, device, input_args=_metas(module.received),
                                   output_args=_metas(module.results), group=group)
            for index, module in sorted(modules.items())
        ]
        several = hybrid.schedule in ("interleaved", "zero_bubble")
        self.schedule = classes[hybrid.schedule](
            self.stages if several else self.stages[0], hybrid.micro_batches, loss_fn=_loss, scale_grads=False
        )
        self.last_rank = (hybrid.stages - 1) % hybrid.pipeline_ranks

    def run(self) -> torch.Tensor:
        """Forward and backward of all turns; returns the sum of their losses (float32), on every rank."""
        for stage in self.stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        losses: list[torch.Tensor] = []
        turns: list[Any] = [{"turn": number} for number in range(self.micro_batches)]
        self.schedule._step_microbatches(
            [()] * self.micro_batches, turns, [None] * self.micro_batches, losses, return_outputs=False
        )
        here = dist.get_rank(self.group) == self.last_rank
        total = torch.stack(losses).detach().float().sum() if here else torch.zeros((), device=self.device)
        dist.broadcast(total, dist.get_global_rank(self.group, self.last_rank), group=self.group)
        return total


def _metas(nodes: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    return tuple(node.meta["val"].clone().requires_grad_(node.meta["global_meta"].requires_grad) for node in nodes)
