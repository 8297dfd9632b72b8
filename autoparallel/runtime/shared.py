"""Gradients of parameters that several pipeline ranks hold: tied parameters, and stages replicated on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autoparallel.schedule.fusion import in_buckets

if TYPE_CHECKING:
    from autoparallel.plans import Hybrid
    from autoparallel.runtime.form import Compiled

#: Coordinates on the pipeline axis.
Ranks = tuple[int, ...]


def shared_parameters(compiled: Compiled, hybrid: Hybrid) -> Mapping[str, Ranks]:
    """The parameters that several pipeline ranks have, with these ranks: by the first form, or with micro-batches by
    rank all, whatever the first call was. ``hybrid``: of steps."""
    if not hybrid.by_rank:
        return compiled.shared
    return {decision.path: hybrid.ranks_of(0) for decision in compiled.space.decisions if decision.kind == "parameter"}


class SharedGradients:
    """Sums gradients of shared parameters over their pipeline ranks, once per step, in buckets.

    ``ranks_of``: shared parameters of this rank, name -> pipeline ranks; ``groups``: process group per set of several
    ranks; ``sum_dtype``: dtype of the sums (None: the gradient's); ``bucket_bytes``: of a bucket, at most.
    """

    def __init__(self, parameter: Callable[[str], nn.Parameter], ranks_of: Mapping[str, Ranks],
                 groups: Mapping[Ranks, dist.ProcessGroup], sum_dtype: torch.dtype | None,
                 bucket_bytes: float) -> None:
        self.parameter, self.ranks_of, self.groups, self.sum_dtype = parameter, ranks_of, groups, sum_dtype
        self.bucket_bytes = bucket_bytes

    @contextmanager
    def added_up(self) -> Iterator[Mapping[str, nn.Parameter]]:
        """Stand-ins for the shared parameters, by name: the step within reads them and accumulates their gradients.
        Afterwards the sums are passed to the parameters by backward, which calls their hooks."""
        leaves = {name: nn.Parameter(p.detach(), p.requires_grad)
                  for name, p in ((name, self.parameter(name)) for name in self.ranks_of)}
        yield leaves
        for names in self._summed_together():
            _add_up([leaves[name] for name in names], self.groups[self.ranks_of[names[0]]], self.sum_dtype)
        found = [(self.parameter(name), leaf.grad) for name, leaf in leaves.items() if leaf.grad is not None]
        leaves.clear()
        if found:
            torch.autograd.backward([parameter for parameter, _ in found], [gradient for _, gradient in found])

    def _summed_together(self) -> Iterator[list[str]]:
        """Buckets of names with equal ranks and dtype; equal on all ranks of a parameter."""
        by_kind: dict[tuple[Ranks, str], list[str]] = {}
        for name, ranks in sorted(self.ranks_of.items()):
            if len(ranks) > 1 and (parameter := self.parameter(name)).requires_grad:
                by_kind.setdefault((ranks, str(parameter.dtype)), []).append(name)
        for _, names in sorted(by_kind.items()):
            for bucket in in_buckets([_local(self.parameter(name)).nbytes for name in names], self.bucket_bytes):
                yield [names[n] for n in bucket]


def _add_up(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, sum_dtype: torch.dtype | None) -> None:
    """All-reduce the gradients of these parameters in one message; a parameter without a gradient on any rank keeps
    None."""
    shards = [torch.zeros_like(_local(p)) if p.grad is None else _local(p.grad) for p in parameters]
    dtype = sum_dtype or shards[0].dtype
    there = torch.tensor([p.grad is not None for p in parameters], dtype=dtype, device=shards[0].device)
    summed = torch.cat([there, *(local_shard.detach().reshape(-1).to(dtype) for local_shard in shards)])
    dist.all_reduce(summed, group=group)
    anywhere, *sums = summed.split([len(parameters), *(local_shard.numel() for local_shard in shards)])
    for number, (parameter, made) in enumerate(zip(parameters, sums, strict=True)):
        if parameter.grad is None and anywhere[number] > 0:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            local = _local(parameter.grad)
            local.copy_(made.view(local.shape))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return cast(DTensor, tensor).to_local()
