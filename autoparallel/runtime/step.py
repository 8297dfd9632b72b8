"""One training step in micro-batches: read parameters, forward and backward per micro-batch, reduce gradients.

Without a pipeline a rank's micro-batches run here in order; with one, torch's schedule runs them (`pipeline.py`).
Gradients reduced once per step are reduced during the last micro-batch's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoparallel.backends import EAGER
from autoparallel.backends.needed import with_needed_gradients
from autoparallel.errors import InputError
from autoparallel.kernels.groups import Axis
from autoparallel.kernels.regather import regathering
from autoparallel.lower.emit import Program
from autoparallel.lower.overlapped import overlapped
from autoparallel.plans import Hybrid
from autoparallel.runtime.offload.gradients import HostGradients
from autoparallel.runtime.stage_module import StageModule, _kept_less, compiled_by, gathered_blocks, in_blocks


class Forward(nn.Module):
    """A program as one forward of the whole batch, with recompute and ZeRO-3 gathers as ``hybrid`` says."""

    def __init__(self, program: Program, hybrid: Hybrid, backend: str) -> None:
        super().__init__()
        self.regathers = hybrid.zero_stage == 3 and (backend == EAGER or in_blocks(program.module, hybrid))
        self.bucket_bytes = hybrid.bucket_bytes
        if backend == EAGER:
            self.module: nn.Module = _kept_less(overlapped(program.module, hybrid, gathered_blocks(hybrid)), hybrid)
        else:
            self.module = with_needed_gradients(compiled_by(backend, program.module, hybrid, overlaps=True))

    def forward(self, *local: torch.Tensor) -> Any:
        with regathering(self.bucket_bytes) if self.regathers else nullcontext():
            return self.module(*local)


def run_micro_batches(module: StageModule, micro_batches: Sequence[int]) -> torch.Tensor:
    """Forward and backward of all micro-batches of a program with one stage; returns the sum of their losses."""
    losses, rounds = list[torch.Tensor](), micro_batches[:: module.copies]
    for first in rounds:
        if first == rounds[-1]:
            module.reduce_overlapped(len(rounds) == 1)
        made = module(micro_batch=first)
        if torch.is_grad_enabled():
            torch.autograd.backward(made)
        losses += (loss.detach() for loss in made)
    return torch.stack(losses).sum()


def loss_of(output: int | None) -> int:
    """``output``, the number of the output that is the loss. Raises InputError if it is None."""
    if output is None:
        raise InputError("step needs a scalar loss: return the loss from the model, alone, first in a tuple, or as "
                         "`loss` of a structure")
    return output


class StepRunner:
    """Runs steps of one compiled form in micro-batches or stages on this rank; ``programs`` by stage index.

    ``gradients``: moves them to the host, but for those of ``shared`` parameters, which pipeline ranks add up first.
    """

    def __init__(self, programs: Mapping[int, Program], loss: int | None, hybrid: Hybrid, axes: Mapping[str, Axis],
                 pipeline_group: dist.ProcessGroup | None, device: torch.device, backend: str,
                 gradients: HostGradients | None = None, shared: Collection[str] = ()) -> None:
        number = loss_of(loss)
        self.modules = {
            index: StageModule(program, number if index == hybrid.stages - 1 else None, hybrid, axes, backend,
                               gradients, shared)
            for index, program in programs.items()
        }
        self.micro_batches, self.pipeline, self.group = hybrid.micro_batches_of(0), None, pipeline_group
        if pipeline_group is not None:
            self.micro_batches = hybrid.micro_batches_of(dist.get_rank(pipeline_group))
        if pipeline_group is not None and hybrid.stages > 1:
            from autoparallel.runtime.pipeline import Pipeline  # imports torch's pipelining only if needed

            self.pipeline = Pipeline(hybrid, self.modules, pipeline_group, device)

    def run(self, parameters: Callable[[Program], list[torch.Tensor]],
            inputs: Callable[[Program, int], list[torch.Tensor]], seed: int) -> torch.Tensor:
        """Forward and backward of one step on this rank; returns its loss, a scalar. Gradients accumulate in the
        parameters, as after ``loss.backward()``.

        ``parameters``: program -> its local parameters; ``inputs``: (program, micro-batch) -> its other placeholders,
        in order; ``seed``: of the step's random ops, equal on all ranks.
        """
        for module in self.modules.values():
            micro_batches = {micro_batch: inputs(module.program, micro_batch) for micro_batch in self.micro_batches}
            module.begin(parameters(module.program), micro_batches, seed)
        loss = self.pipeline.run() if self.pipeline else self._own()
        for module in self.modules.values():
            module.finish()
        return loss

    def _own(self) -> torch.Tensor:
        """Forward and backward of this rank's micro-batches; returns the sum of all ranks' losses (in float64, where
        each rank has its own micro-batches)."""
        loss = run_micro_batches(self.modules[0], self.micro_batches)
        if self.group is None:
            return loss
        total = loss.double()
        dist.all_reduce(total, group=self.group)
        return total
