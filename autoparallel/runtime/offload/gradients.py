"""Gradients in the memory of the host, or on disk: each leaves the device when backward has reduced it.

A parameter's ``.grad`` is a DTensor as ever, whose shard is in host memory. It is copied while backward goes on: by a
thread, or on an accelerator by a stream of its own into pinned memory. When backward ends, all copies have ended.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoparallel.errors import InputError
from autoparallel.kernels import host_copies
from autoparallel.kernels.host_copies import Copies
from autoparallel.runtime.initialise import tiers_of
from autoparallel.runtime.offload.mapped import MappedFiles
from autoparallel.schedule.tiers import Offload

#: A DTensor's mark: its shard is in host memory.
_MARK = "_shard_on_host"


class HostGradients:
    """Moves gradients of one module's shards to the memory of the host, or to ``files``, as ``offload`` says of each
    parameter, at most ``in_flight_bytes`` of them (or one) at a time; whoever makes more waits. ``largest_bytes``: of
    gradients in the memory of the host at the end of a backward, at most so far."""

    def __init__(self, device: torch.device, in_flight_bytes: float, offload: Offload,
                 files: MappedFiles | None = None) -> None:
        self.device, self.in_flight_bytes, self.largest_bytes = device, in_flight_bytes, 0
        self.offload, self._files, self._tiers = offload, files, dict[str, Offload]()
        self._pool: ThreadPoolExecutor | None = None
        self._moving: deque[tuple[Future[None], int]] = deque()
        self._moving_bytes = 0
        self._parameters: dict[str, nn.Parameter] = {}
        self._before: dict[str, Tensor] = {}  # by parameter, the gradient to which this backward's is added
        self._task = -1

    def __deepcopy__(self, memo: dict[int, Any]) -> HostGradients:
        """Of a copied module, whose parameters are watched when it runs."""
        return HostGradients(self.device, self.in_flight_bytes, self.offload, deepcopy(self._files, memo))

    # --- gradients of parameters ------------------------------------------------------------------------------------

    def takes(self, name: str) -> bool:
        """Whether it moves the gradient of a parameter."""
        return leaves_by_itself(self._tiers[name])

    def files_of(self, name: str) -> MappedFiles | None:
        """The files in which a parameter's gradient lives; None: in the memory of the host."""
        return self._files if self._tiers[name].gradients == "disk" else None

    def watch(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Take the gradients of those of these parameters that leave from now on, under all their names, of which the
        first says the tiers."""
        self._settle()
        named, first = dict(parameters), dict[int, str]()
        self._tiers = {name: tiers_of(self.offload, first.setdefault(id(p), name), p) for name, p in named.items()}
        self._parameters = {name: parameter for name, parameter in named.items() if self.takes(name)}
        for name, parameter in self._parameters.items():
            hooks = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
            if parameter.requires_grad and not any(isinstance(hook, _Arrived) for hook in hooks):
                arrived = _Arrived(weakref.ref(self), name)
                parameter.register_hook(arrived.comes)
                parameter.register_post_accumulate_grad_hook(arrived)

    def has_hooks(self, name: str) -> bool:
        """Whether others have hooks on a parameter, which want its gradient on the device."""
        parameter = self._parameters[name]
        hooks = [parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)]
        return sum(len(some or ()) for some in hooks) > 2

    def give(self, name: str, shard: Tensor) -> None:
        """Add a gradient that `take` made to that of a parameter, in the parameter's dtype."""
        parameter = self._parameters[name]
        if shard.dtype != parameter.dtype:
            shard = _made(shard.shape, parameter.dtype, self.files_of(name)).copy_(shard)
        known: Any = parameter.grad
        if known is not None and not hasattr(known, _MARK):
            self.take(known._local_tensor, shard)
            known = None
        elif known is not None:
            known._local_tensor.add_(shard)
        if known is None:
            assert isinstance(parameter, DTensor)
            parameter.grad = _on_host(DTensor(parameter._local_tensor, parameter._spec, requires_grad=False), shard)
        self._settle()

    def _comes(self, name: str) -> None:
        """Before autograd adds a gradient: put one that is in host memory aside."""
        if self._task != (task := torch._C._current_graph_task_id()):
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._settle)
        parameter = self._parameters[name]
        if hasattr(parameter.grad, _MARK):
            self._before[name], parameter.grad = parameter.grad, None  # type: ignore[assignment]

    def _arrived(self, name: str) -> None:
        parameter = self._parameters[name]
        if (gradient := cast(Any, parameter.grad)) is None:    # of ops that gave none
            return
        if torch.is_grad_enabled():
            raise InputError("backward(create_graph=True) makes gradients that can be differentiated, and those of "
                             "this plan go to the memory of the host\n  Compile with offload='none', or with an "
                             "offload_fraction below 1, which leaves gradients on the device.")
        if gradient.placements != (wanted := cast(DTensor, parameter).placements):
            gradient = gradient.redistribute(placements=wanted)
        before: Any = self._before.pop(name, None)
        if before is None:
            shard, files = gradient._local_tensor, self.files_of(name)
            there = files is not None and files.holds(shard)
            parameter.grad = _on_host(gradient, shard if there else self.take(shard, files=files))
        else:
            self.take(gradient._local_tensor, before._local_tensor)
            torch.autograd.graph.increment_version(before)
            parameter.grad = before

    def _settle(self) -> None:
        """Wait for all copies; parameters that had a gradient and got none have it again."""
        self.wait()
        for name, gradient in self._before.items():
            if self._parameters[name].grad is None:
                self._parameters[name].grad = gradient
        self._before.clear()
        self.note({name: p.grad._local_tensor for name, p in self._parameters.items()
                   if isinstance(p.grad, DTensor) and hasattr(p.grad, _MARK)})

    def note(self, gradients: Mapping[str, Tensor]) -> None:
        """These gradients have left the device, by names of their parameters, of which some may be of the same."""
        there = {id(self._parameters[name]): shard.nbytes for name, shard in gradients.items()
                 if self.files_of(name) is None}
        self.largest_bytes = max(self.largest_bytes, sum(there.values()))

    # --- copies -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def take(self, gradient: Tensor, into: Tensor | None = None, files: MappedFiles | None = None) -> Tensor:
        """The tensor in host memory, or in ``files``, that will have a copy of ``gradient``, or ``into`` (there), to
        which it will be added; read it after `wait`."""
        while self._moving and self._moving_bytes + gradient.nbytes > self.in_flight_bytes:
            self._wait_for_one()
        if gradient.device.type == "cpu":
            made = _made(gradient.shape, gradient.dtype, files) if into is None else into
            work: Callable[[], Any] = partial(made.copy_ if into is None else made.add_, gradient)
        else:
            copies = host_copies.begin([gradient], host_copies.HOST)
            new = into is None and files is not None
            made = _made(gradient.shape, gradient.dtype, files) if new else copies.values[0] if into is None else into
            work = partial(_landed, copies, made, into is not None)
        self._moving.append((self.then(work), gradient.nbytes))
        self._moving_bytes += gradient.nbytes
        return made

    def then(self, work: Callable[[], None]) -> Future[None]:
        """Call ``work``, by the thread of the copies, when those that have begun are made."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "autoparallel-gradients")
        return self._pool.submit(_call, work)

    def wait(self) -> None:
        """Wait for all copies. Raises their errors."""
        while self._moving:
            self._wait_for_one()

    def close(self) -> None:
        """Wait, and end the thread."""
        self.wait()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _wait_for_one(self) -> None:
        moved, num_bytes = self._moving.popleft()
        self._moving_bytes -= num_bytes
        moved.result()


class _Arrived:
    """The hooks of one parameter."""

    def __init__(self, owner: weakref.ref[HostGradients], name: str) -> None:
        self.owner, self.name = owner, name

    def comes(self, _: Tensor) -> None:
        if (owner := self.owner()) is not None:
            owner._comes(self.name)

    def __call__(self, _: Tensor) -> None:
        if (owner := self.owner()) is not None:
            owner._arrived(self.name)


def _on_host(gradient: Any, shard: Tensor) -> Any:
    """The DTensor with another shard: it stays one of the device for autograd, which wants its parameter's."""
    gradient._local_tensor = shard
    setattr(gradient, _MARK, True)
    return gradient


def is_on_host(gradient: Tensor) -> bool:
    """Whether the shard of a parameter's gradient is in host memory, or on its way there."""
    return hasattr(gradient, _MARK)


def leaves_by_itself(away: Offload) -> bool:
    """Whether a gradient in these tiers is moved there, not made there by the program that fetches its parameter or
    looks it up."""
    return away.moves_gradients and (not away.moves_parameters or away.gradients == "disk")


def _made(shape: torch.Size, dtype: torch.dtype, files: MappedFiles | None) -> Tensor:
    return torch.empty(shape, dtype=dtype) if files is None else files.empty(shape, dtype)


def _call(work: Callable[[], Any]) -> None:
    with torch.no_grad():
        work()


def _landed(copies: Copies, into: Tensor, adds: bool) -> None:
    (there,) = copies.ready()
    if adds:
        into.add_(there)
    elif there is not into:
        into.copy_(there)


__all__ = ["HostGradients", "is_on_host", "leaves_by_itself"]
