"""Gradients of parameters that several ranks of the pipeline have: tied ones, and those of stages on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autoparallel.lower.posting import in_buckets

#: Places on the pipeline axis.
Ranks = tuple[int, ...]


class SharedGradients:
    """Adds up, once a step and many at once, what the ranks of each parameter learnt of it.

    ``ranks_of``: the parameters, by name, of this rank that others have, too; ``groups``: process groups of such ranks.
    """

    def __init__(self, parameter: Callable[[str], nn.Parameter], ranks_of: Mapping[str, Ranks],
                 groups: Mapping[Ranks, dist.ProcessGroup], sum_dtype: torch.dtype | None) -> None:
        self.parameter, self.ranks_of, self.groups, self.sum_dtype = parameter, ranks_of, groups, sum_dtype

    @contextmanager
    def added_up(self) -> Iterator[None]:
        """Add up the gradients of the step within; those of earlier steps were added up already, and stay."""
        held = {name: self.parameter(name).grad for name in self.ranks_of}
        for name in held:
            self.parameter(name).grad = None
        try:
            yield
            for names in self._summed_together():
                self._add_up(names)
        except BaseException:
            for name, before in held.items():
                self.parameter(name).grad = before
            raise
        for name, before in held.items():
            parameter = self.parameter(name)
            if before is not None:
                parameter.grad = before if parameter.grad is None else parameter.grad + before

    def _add_up(self, names: Sequence[str]) -> None:
        """Of these parameters; one of which no rank has a gradient gets none."""
        found = [self.parameter(name) for name in names]
        pieces = [torch.zeros_like(_local(p)) if p.grad is None else _local(p.grad) for p in found]
        dtype = self.sum_dtype or pieces[0].dtype
        there = torch.tensor([p.grad is not None for p in found], dtype=dtype, device=pieces[0].device)
        summed = torch.cat([there, *(piece.detach().reshape(-1).to(dtype) for piece in pieces)])
        dist.all_reduce(summed, group=self.groups[self.ranks_of[names[0]]])
        anywhere, *sums = summed.split([len(names), *(piece.numel() for piece in pieces)])
        for number, (parameter, made) in enumerate(zip(found, sums, strict=True)):
            if parameter.grad is None and anywhere[number] > 0:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                local = _local(parameter.grad)
                local.copy_(made.view(local.shape))

    def _summed_together(self) -> Iterator[list[str]]:
        """Names in buckets: all ranks of a parameter come to the same."""
        alike: dict[tuple[Ranks, str], list[str]] = {}
        for name, ranks in sorted(self.ranks_of.items()):
            if (parameter := self.parameter(name)).requires_grad:
                alike.setdefault((ranks, str(parameter.dtype)), []).append(name)
        for _, names in sorted(alike.items()):
            for bucket in in_buckets([_local(self.parameter(name)).nbytes for name in names]):
                yield [names[n] for n in bucket]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return cast(DTensor, tensor).to_local()
