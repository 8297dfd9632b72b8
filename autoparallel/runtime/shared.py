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
        self._buckets: dict[tuple[bool, ...], list[list[str]]] = {}

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
        local = []
        for parameter in map(self.parameter, names):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local.append(_local(parameter.grad))
        dtype = self.sum_dtype or local[0].dtype
        summed = torch.cat([gradient.reshape(-1).to(dtype) for gradient in local])
        dist.all_reduce(summed, group=self.groups[self.ranks_of[names[0]]])
        for gradient, made in zip(local, summed.split([gradient.numel() for gradient in local]), strict=True):
            gradient.copy_(made.view(gradient.shape))

    def _summed_together(self) -> list[list[str]]:
        """Names in buckets, of parameters of which any of their ranks has a gradient: which is so in all steps or in
        none, unless the user freezes parameters, so that it is asked once."""
        learns = tuple(self.parameter(name).requires_grad for name in sorted(self.ranks_of))
        if learns not in self._buckets:
            alike: dict[tuple[Ranks, str], list[str]] = {}
            for name, ranks in sorted(self.ranks_of.items()):
                alike.setdefault((ranks, str(self.parameter(name).dtype)), []).append(name)
            learnt = [self._learnt(names, ranks) for (ranks, _), names in sorted(alike.items())]
            self._buckets[learns] = [
                [names[n] for n in bucket] for names in learnt
                for bucket in in_buckets([_local(self.parameter(name)).nbytes for name in names])
            ]
        return self._buckets[learns]

    def _learnt(self, names: Sequence[str], ranks: Ranks) -> list[str]:
        """The parameters of which one of these ranks has a gradient."""
        there = torch.tensor([self.parameter(name).grad is not None for name in names], dtype=torch.int32,
                             device=_local(self.parameter(names[0])).device)
        dist.all_reduce(there, dist.ReduceOp.MAX, group=self.groups[ranks])
        return [name for name, learnt in zip(names, there.tolist(), strict=True) if learnt]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return cast(DTensor, tensor).to_local()
