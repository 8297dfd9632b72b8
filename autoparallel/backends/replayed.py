"""CUDA graphs: forward and backward of a program recorded once, and replayed by one launch each.

A replay reads and writes the memory of the recording. So inputs are copied into it, results and gradients out of it;
parameters stay where they are (a recording is made anew when they have moved); and activations are those of the last
recorded forward: until its backward has run, or its results are gone, further calls run without the recording.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from copy import deepcopy
from dataclasses import InitVar, dataclass
from typing import Any, Protocol
from weakref import ref

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule

from autoparallel.backends.untraceable import why_data_decide
from autoparallel.errors import InputError, LoweringError
from autoparallel.kernels import rng

_LOG = logging.getLogger("autoparallel")
#: Calls that run as they are before the program is recorded: they compile, and set up what is set up at first use.
BEFORE = 1
#: Recordings after which a warning says that parameters move.
MANY = 4


class Recorder(Protocol):
    """Records a forward and its backward."""

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run as in a recording, without one."""

    def record(self, run: Callable[[], Sequence[Tensor | None]]) -> tuple[Sequence[Tensor | None], Callable[[], None]]:
        """Record a run; returns its tensors, and a function that replays it, which writes to these tensors again."""


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
        if node.target is rng.random_op:
            return f"it draws random numbers ({node.args[0]}), which a recording would repeat"
        if (reason := why_data_decide(node)) is not None:
            return reason
    return None


class Replayed(nn.Module):
    """``module``, called with local tensors, from its second call on as recordings; one with and one without gradients.

    ``stays``: for each argument, whether its memory stays the same from call to call (parameters, buffers).
    ``starts``: indices of the losses among the result's tensors, from which backward starts (None: all of them).
    """

    def __init__(self, module: nn.Module, stays: Sequence[bool], starts: frozenset[int] | None,
                 recorder: Callable[[], Recorder] | None = None) -> None:
        super().__init__()
        self.module, self.stays, self.starts, self.recorder = module, stays, starts, recorder or CudaRecorder
        self.calls: dict[bool, int] = {}
        self.recordings: dict[bool, Recording] = {}
        self.recorded, self.turned, self.pauses, self.told = 0, 0, False, False
        self.moved = 0.0    # times that parameters had new memory; -inf once told

    def __deepcopy__(self, memo: dict[int, Any]) -> Replayed:
        """Recordings are not copied: they are of this one's parameters."""
        return Replayed(deepcopy(self.module, memo), self.stays, self.starts, self.recorder)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, calls run the module itself."""
        self.pauses = True
        try:
            yield
        finally:
            self.pauses = False

    def forward(self, *local: Tensor) -> Any:
        graded = torch.is_grad_enabled()
        if self.pauses or (graded and self.turned > 1):
            return self.module(*local)
        self.calls[graded] = self.calls.get(graded, 0) + 1
        kept = self.recordings.get(graded)
        held = kept is not None and kept.is_held
        if held and not self.told:
            self.told = True
            _LOG.warning("a call while results of the one before wait for their backward: it runs without CUDA graphs, "
                         "which hold the activations of one call (evaluate under torch.no_grad)")
        if self.calls[graded] <= BEFORE or held:
            return self.module(*local)
        if kept is None or not kept.serves(local):
            self.moved += kept is not None
            self.recordings.pop(graded, None)     # its memory goes before the next one takes some
            del kept
            kept = self.recordings[graded] = self._recording(local)
        if not graded:
            return kept.structured(kept.forward(local))
        return kept.structured(_Replay.apply(self, kept, *local))

    def _recording(self, local: Sequence[Tensor]) -> Recording:
        self.recorded += 1
        if self.moved == MANY - 1:
            self.moved = -math.inf
            _LOG.warning("a program was recorded as CUDA graphs %d times, since its parameters have new memory each "
                         "time: set values in place (copy_), or compile with cuda_graphs=False", MANY)
        first = self.calls[torch.is_grad_enabled()] == BEFORE + 1
        try:
            return Recording(self.module, local, self.stays, self.starts, self.recorder(), first)
        except RuntimeError as error:
            raise LoweringError("the program cannot be recorded as CUDA graphs, where ops must not wait for the host: "
                                "compile it with cuda_graphs=False\n  " + str(error)) from error

    def start_from(self, results: frozenset[int]) -> None:
        """Backward starts from these results: record so from now on; or no more, where that has changed before."""
        self.turned, self.starts = self.turned + 1, results
        self.recordings.pop(True, None)
        if self.turned == 2:
            _LOG.warning("backward starts from different results of the model from call to call, and a recording has "
                         "one backward: calls with gradients run without CUDA graphs")


class _Held:
    """Lives as long as the results of a recorded forward, or until its backward."""


class _Replay(torch.autograd.Function):
    """A call of a recording with gradients."""

    @staticmethod
    def forward(ctx: Any, owner: Replayed, recording: Recording, *local: Tensor) -> tuple[Tensor, ...]:
        made = recording.forward(local)
        ctx.owner, ctx.recording, ctx.held = owner, recording, recording.hold()
        ctx.set_materialize_grads(False)
        fixed = [x for x, graded in zip(made, recording.differentiable, strict=True) if not graded]
        ctx.mark_non_differentiable(*fixed)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        recording: Recording = ctx.recording
        starts = frozenset(number for number, g in enumerate(gradients) if g is not None)
        if not starts:
            return (None,) * (2 + len(recording.arguments))
        if torch.is_grad_enabled():
            raise InputError("backward(create_graph=True): gradients of CUDA graphs cannot be differentiated\n  "
                             "Compile with cuda_graphs=False.")
        if ctx.held is None:
            raise InputError("a second backward of one call: CUDA graphs can run backward once per call\n  Compile "
                             "with cuda_graphs=False for backward(retain_graph=True).")
        ctx.held = None
        if starts == recording.starts:
            return None, None, *recording.backward(gradients)
        ctx.owner.start_from(starts)
        return None, None, *recording.backward_of(starts, gradients)


@dataclass(eq=False)
class Recording:
    """One recorded forward, and its backward from the results ``starts`` (None: from all that have gradients).

    ``warms_up``: it runs once before it is recorded. (Not where a rank may record again by itself: a recording sends
    nothing, and a run does.)
    """

    module: nn.Module
    local: InitVar[Sequence[Tensor]]
    stays: Sequence[bool]
    starts: frozenset[int] | None
    recorder: Recorder
    warms_up: InitVar[bool]

    def __post_init__(self, local: Sequence[Tensor], warms_up: bool) -> None:
        graded, self.context = torch.is_grad_enabled(), copy_context()
        with torch.inference_mode(False), torch.set_grad_enabled(graded):
            self.arguments = [_alias(x) if kept else _copy(x) for x, kept in zip(local, self.stays, strict=True)]
            self.addresses, self._held = _addresses(local, self.stays), ref(_Held())
            self.taking = [x for x in self.arguments if x.requires_grad]
            self.made = list[Tensor]()
            if warms_up:
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
            self.replay_forward()
            return [x.clone() for x in self.results]

    def hold(self) -> _Held:
        """What lives until backward: so long, `is_held`."""
        held = _Held()
        self._held = ref(held)
        return held

    @property
    def is_held(self) -> bool:
        """Whether a backward of the last forward may still come, which needs its activations."""
        return self._held() is not None

    def structured(self, made: Sequence[Tensor]) -> Any:
        """The module's results, from their tensors."""
        leaves = list(self.others)
        for place, x in zip(self.places, made, strict=True):
            leaves[place] = x
        return pytree.tree_unflatten(leaves, self.spec)

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
