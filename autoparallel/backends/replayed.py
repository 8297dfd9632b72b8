"""CUDA graphs: forward and backward of a program recorded once, and replayed by one launch each.

A replay reads and writes the memory of the recording. So inputs are copied into it, results and gradients out of it;
parameters stay where they are (a recording is made anew when they have moved); and activations are those of the last
forward: a backward of an earlier one is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.fx import GraphModule

from autoparallel.backends.untraceable import why_not_traced
from autoparallel.errors import InputError, LoweringError
from autoparallel.kernels import rng

_LOG = logging.getLogger("autoparallel")
#: Calls of a program before it is recorded: they compile, and start what is started at first use.
BEFORE = 1
#: Recordings after which it is told that the parameters move.
MANY = 4


class Recorder(Protocol):
    """Records runs of one forward and of its backward. A run's tensors keep their memory in its replays."""

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run as in a recording, without one."""

    def record(self, run: Callable[[], Sequence[Tensor | None]]) -> tuple[Sequence[Tensor | None], Callable[[], None]]:
        """Record a run; returns its tensors, and a function that replays it."""


class CudaRecorder:
    """CUDA graphs in one pool of memory."""

    def __init__(self) -> None:
        self.pool: Any = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], object]) -> None:
        """On a stream of its own, where libraries make their workspaces."""
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            run()
        torch.cuda.synchronize()

    def record(self, run: Callable[[], Sequence[Tensor | None]]) -> tuple[Sequence[Tensor | None], Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            made = run()
        return made, graph.replay


def why_not_recorded(program: GraphModule) -> str | None:
    """Why a program cannot be recorded: each call would replay what one call decided. None if it can be."""
    for node in program.graph.nodes:
        if node.target in (rng.random_op, rng.random_op_of_copy):
            return f"it draws random numbers ({node.args[0]}), which a recording would repeat"
        if (reason := why_not_traced(node)) is not None:
            return reason
    return None


class Replayed(nn.Module):
    """``module``, called with local tensors, from its second call on as recordings; one with and one without gradients.

    ``stays``: for each argument, whether its memory stays the same from call to call (parameters, buffers).
    ``differentiated``: the number of the result that backward starts from, if it is known.
    """

    def __init__(self, module: nn.Module, stays: Sequence[bool], differentiated: int | None,
                 recorder: Callable[[], Recorder] | None = None) -> None:
        super().__init__()
        self.module, self.stays, self.recorder = module, stays, recorder or CudaRecorder
        self.calls: dict[bool, int] = {}
        self.recordings: dict[bool, Recording] = {}
        self.starts = None if differentiated is None else frozenset([differentiated])
        self.recorded, self.pauses = 0, False

    def __deepcopy__(self, memo: dict[int, Any]) -> Replayed:
        """Recordings are not copied: they are of this one's parameters."""
        copied = Replayed(deepcopy(self.module, memo), self.stays, None, self.recorder)
        copied.starts = self.starts
        return copied

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, calls run the module itself."""
        self.pauses = True
        try:
            yield
        finally:
            self.pauses = False

    def forward(self, *local: Tensor) -> Any:
        if self.pauses:
            return self.module(*local)
        graded = torch.is_grad_enabled()
        self.calls[graded] = self.calls.get(graded, 0) + 1
        if self.calls[graded] <= BEFORE:
            return self.module(*local)
        kept = self.recordings.get(graded)
        if kept is None or not kept.serves(local):
            self.recordings.pop(graded, None)     # its memory goes before the next one takes some
            del kept
            kept = self.recordings[graded] = self._recording(local)
        if not graded:
            return kept.structured(kept.forward(local))
        return kept.structured(_Replay.apply(self, kept, *local))

    def _recording(self, local: Sequence[Tensor]) -> Recording:
        self.recorded += 1
        if self.recorded == MANY:
            _LOG.warning("a program was recorded as CUDA graphs %d times, since its parameters have new memory each "
                         "time: set values in place (copy_), or compile with cuda_graphs=False", MANY)
        try:
            return Recording(self.module, local, self.stays, self.starts, self.recorder())
        except RuntimeError as error:
            raise LoweringError("the program cannot be recorded as CUDA graphs: compile it with cuda_graphs=False\n  "
                                + str(error)) from error

    def start_from(self, results: frozenset[int]) -> None:
        """Backward starts from these results: record so from now on."""
        self.starts = results
        self.recordings.pop(True, None)


class _Replay(torch.autograd.Function):
    """A call of a recording with gradients."""

    @staticmethod
    def forward(ctx: Any, owner: Replayed, recording: Recording, *local: Tensor) -> tuple[Tensor, ...]:
        made = recording.forward(local)
        ctx.owner, ctx.recording, ctx.number = owner, recording, recording.number
        ctx.set_materialize_grads(False)
        fixed = [x for x, graded in zip(made, recording.differentiable, strict=True) if not graded]
        ctx.mark_non_differentiable(*fixed)
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        recording: Recording = ctx.recording
        recording.check(ctx.number)
        starts = frozenset(number for number, g in enumerate(gradients) if g is not None)
        if starts == recording.starts:
            return None, None, *recording.backward(gradients)
        ctx.owner.start_from(starts)
        return None, None, *recording.backward_of(starts, gradients)


@dataclass(eq=False)
class Recording:
    """One recorded forward, and its backward from the results ``starts`` (None: from all that have gradients)."""

    module: nn.Module
    local: Sequence[Tensor]
    stays: Sequence[bool]
    starts: frozenset[int] | None
    recorder: Recorder
    number: int = field(default=0, init=False)
    used: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        graded, self.context = torch.is_grad_enabled(), copy_context()
        with torch.inference_mode(False), torch.set_grad_enabled(graded):
            self.arguments = [_alias(x) if kept else _copy(x) for x, kept in zip(self.local, self.stays, strict=True)]
            self.addresses, self.local = _addresses(self.local, self.stays), ()
            self.taking = [x for x in self.arguments if x.requires_grad]
            self.made = list[Tensor]()
            self.recorder.warm_up(self._once)
            made, self.replay_forward = self.recorder.record(self._run)
            self.differentiable = [x is not None and x.requires_grad for x in made]
            self.results = [x.detach() for x in made if x is not None]
            whole = frozenset(number for number, differs in enumerate(self.differentiable) if differs)
            self.starts = whole if self.starts is None else self.starts & whole
            if self.starts:
                self.given = {number: torch.zeros_like(self.results[number]) for number in sorted(self.starts)}
                self.gradients, self.replay_backward = self.recorder.record(lambda: self._differentiate(self.given))
        self.made = []

    def _run(self) -> Sequence[Tensor]:
        leaves, self.spec = pytree.tree_flatten(self.module(*self.arguments))
        self.places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.made = [leaves[n] for n in self.places]
        return self.made

    def _differentiate(self, given: dict[int, Tensor]) -> Sequence[Tensor | None]:
        return torch.autograd.grad([self.made[n] for n in given], self.taking, list(given.values()), allow_unused=True)

    def _once(self) -> None:
        made = self._run()
        if torch.is_grad_enabled() and (graded := {n: torch.zeros_like(x) for n, x in enumerate(made)
                                                   if x.requires_grad and (self.starts is None or n in self.starts)}):
            self._differentiate(graded)
        self.made = []

    def serves(self, local: Sequence[Tensor]) -> bool:
        """Whether what stays is where it was."""
        return self.addresses == _addresses(local, self.stays)

    def forward(self, local: Sequence[Tensor]) -> list[Tensor]:
        """Replay; returns results in memory of their own."""
        with torch.no_grad():
            pairs = [(kept, x) for kept, x, stays in zip(self.arguments, local, self.stays, strict=True) if not stays]
            for kept, x in pairs:
                kept.copy_(x)
            self.number += 1
            self.replay_forward()
            return [x.clone() for x in self.results]

    def structured(self, made: Sequence[Tensor]) -> Any:
        """The module's results, from their tensors."""
        leaves = list(self.others)
        for place, x in zip(self.places, made, strict=True):
            leaves[place] = x
        return pytree.tree_unflatten(leaves, self.spec)

    def check(self, number: int) -> None:
        """Raises InputError unless the activations are those of forward ``number``, for its first backward."""
        if number != self.number:
            raise InputError("backward of a call after which the model was called again: CUDA graphs hold the "
                             "activations of the last call only\n  Call backward before the next forward, or compile "
                             "with cuda_graphs=False.")
        if self.used == number:
            raise InputError("a second backward of one call: CUDA graphs have one only\n  Compile with "
                             "cuda_graphs=False for backward(retain_graph=True).")
        self.used = number

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay; returns the gradients of the arguments in memory of their own."""
        for number, kept in self.given.items():
            kept.copy_(gradients[number])  # type: ignore[arg-type]
        self.replay_backward()
        found = [x for x in self.gradients if x is not None]
        copies = [torch.empty_like(x) for x in found]
        torch._foreach_copy_(copies, found)
        return self._padded(self.gradients, copies)

    def backward_of(self, starts: frozenset[int], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients from other results than those recorded: forward runs once more, and backward, op by op."""
        with torch.enable_grad():
            self.context.run(self._run)
            found = self._differentiate({n: gradients[n] for n in sorted(starts)})  # type: ignore[misc]
        self.made = []
        return self._padded(found, [x for x in found if x is not None])

    def _padded(self, found: Sequence[Tensor | None], values: Sequence[Tensor]) -> list[Tensor | None]:
        """For each argument its gradient, of ``values`` where one was ``found``."""
        left = iter(values)
        taken = iter([None if x is None else next(left) for x in found])
        return [next(taken) if x.requires_grad else None for x in self.arguments]


def _alias(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)


def _copy(x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(x.detach()).requires_grad_(x.requires_grad)


def _addresses(local: Sequence[Tensor], stays: Sequence[bool]) -> list[tuple[int, ...]]:
    return [(x.data_ptr(), *x.stride()) for x, kept in zip(local, stays, strict=True) if kept]


__all__ = ["CudaRecorder", "Recorder", "Replayed"]
