"""A padded device clock: programs compute for real, and wait until a device of the emulated speed would be ready.

Every op counts for the seconds that a roofline gives it: FLOP by torch's own counter, bytes of what it reads and
writes, both independent of autoparallel's rules. Ops only add to the clock; a rank waits for the clock where it
communicates (and at the end of a step), as a host that runs ahead of its device does. What is late even so is an
overrun: the real machine was too slow for the emulated one, and the measurement is worth as much less.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.distributed import Work
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from cost_models import Device

aten = torch.ops.aten
#: FLOP formulas of torch's counter, and of the attention that CPUs have, which it does not list.
FLOPS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}
#: Neither read nor write: what comes before the memory is used, and a view that the schema calls a copy.
FREE = frozenset({aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty,
                  aten.new_empty_strided, aten._local_scalar_dense, aten.lift_fresh})
#: Ops that return nothing: positions of the arguments that they write.
WRITTEN = {aten._fused_adamw_: (0, 2, 3)}
COMMUNICATION = frozenset({"c10d", "_c10d_functional"})
#: Posted ahead of the device, as a receive is: what arrives is waited for elsewhere.
POSTED = frozenset({"recv_", "recv_any_source_"})
#: Real-time priorities of a rank's thread: a device takes no time from its network, but what ranks compute for real
#: would take it from the threads that pass on the messages of others.
COMPUTING, COMMUNICATING = 1, 2


class DeviceClock(TorchDispatchMode):
    """Counts the seconds of every op that runs under it on this thread; ``overrun_s`` adds up what came too late."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.overrun_s = self.busy_s = 0.0
        self.priority = 0
        self._since, self._ahead = time.monotonic(), 0.0
        self._known: dict[Any, float] = {}

    def restart(self, moment: float) -> None:
        """The device has nothing to do, from this moment on."""
        self._since, self._ahead = moment, 0.0

    def take(self, priority: int) -> None:
        """This thread's real-time priority from now on, if it is a real-time one."""
        if self.priority not in (0, priority):
            os.sched_setparam(0, os.sched_param(priority))
            self.priority = priority

    def wait(self) -> None:
        """Sleep until the device has done what it was given."""
        ready = self._since + self._ahead
        late = time.monotonic() - ready
        if late < 0:
            time.sleep(-late)
        self.overrun_s += max(0.0, late)
        self.busy_s += self._ahead
        self.restart(max(ready, ready + late))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a DTensor's own ops come by, on local tensors
        if func.namespace in COMMUNICATION:
            return self._communicate(func, args, kwargs or {})
        self.take(COMPUTING)
        result = func(*args, **(kwargs or {}))
        self._ahead += self._seconds(func, args, kwargs or {}, result)
        return result

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.take(COMMUNICATING)
        if func._schema.name.split("::")[1] in POSTED:
            return func(*args, **kwargs)
        self.wait()
        result = func(*args, **kwargs)
        self.restart(time.monotonic())
        return result

    def _seconds(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        packet = func.overloadpacket
        if func.is_view or packet in FREE:
            return 0.0
        written = [args[i] for i in WRITTEN[packet]] if packet in WRITTEN else result
        tensors = [x for x in pytree.tree_leaves((args, kwargs, written)) if isinstance(x, torch.Tensor)]
        key = (func, *((t.shape, t.dtype, t.untyped_storage().size()) for t in tensors))
        if key not in self._known:
            flops = FLOPS[packet](*args, **kwargs, out_val=result) if packet in FLOPS else 0
            self._known[key] = roofline_s(flops, sum(map(memory_bytes, tensors)), self.device)
        return self._known[key]


def memory_bytes(tensor: torch.Tensor) -> int:
    """Bytes behind a tensor; what is expanded is there once."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().size())


def roofline_s(flops: float, nbytes: float, device: Device) -> float:
    """Seconds of an op: arithmetic or traffic, whichever takes longer, and the launch.

    >>> roofline_s(3e6, 1e3, Device("toy", {"float32": 3e9}, 1e9, 1.0, 1e9, 1e-4))
    0.0011
    """
    memory_s = nbytes / (device.memory_bandwidth_bytes_per_s * device.memory_bandwidth_efficiency)
    return max(flops / device.peak_flops_per_s["float32"], memory_s) + device.launch_s


@contextmanager
def ticking(clock: DeviceClock, since: float) -> Iterator[None]:
    """Run under the clock, started at ``since``; waiting for a message or collective first waits for the device."""
    wait, before = Work.wait, os.sched_getparam(0).sched_priority

    def wait_for_both(work: Work, *args: Any) -> Any:
        clock.take(COMMUNICATING)
        clock.wait()
        try:
            return wait(work, *args)
        finally:
            clock.restart(time.monotonic())

    Work.wait = wait_for_both  # type: ignore[assignment, method-assign]
    try:
        with clock:
            clock.priority = before
            clock.restart(since)
            yield
            clock.take(COMMUNICATING)
            clock.wait()
    finally:
        clock.take(before)
        Work.wait = wait  # type: ignore[method-assign]
