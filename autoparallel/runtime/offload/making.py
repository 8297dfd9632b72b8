"""`ParallelModule.optimizer`: an optimizer with its states in the plan's tier, made on all ranks or on none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoparallel.errors import InputError, shown
from autoparallel.runtime import tracing
from autoparallel.runtime.agree import made_equally
from autoparallel.runtime.arguments import check_flag
from autoparallel.runtime.initialise import tiers_of
from autoparallel.runtime.offload.on_device import DeviceSteps, check_steps
from autoparallel.runtime.offload.optimizer import OffloadedOptimizer
from autoparallel.runtime.offload.states import FUSED_ON_DEVICE, fused_by_default
from autoparallel.runtime.offload.threads import step_threads
from autoparallel.runtime.state import State


def optimizer(parallel: nn.Module, state: State, kind: type[torch.optim.Optimizer], params: Any, tile_bytes: int | None,
              prefetch: bool, threads: int | None, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """An optimizer ``kind(params, **options)`` of the module's parameters (None: all), with its states where the plan
    puts them: on the device, as torch makes it, which backward steps in buckets of ``tile_bytes`` (None: the plan's
    ``bucket_bytes``) where the plan says so; on the host or disk, an `OffloadedOptimizer` that steps ``tile_bytes`` of
    parameters at a time (None: the plan's) on ``threads`` threads (None: this rank's share of the cores) and, with
    ``prefetch``, reads the next tile meanwhile.

    All ranks call this. Raises InputError for a ``kind`` that is no optimizer and for parameters on the meta device;
    and on all ranks, before any state is made, where states exceed the limits of host memory or disk.
    """
    hybrid = tracing.first_form(state).plan.hybrid
    check_flag("prefetch", prefetch)
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        raise InputError(f"the optimizer is {shown(kind)}: give a class of torch.optim, as torch.optim.AdamW")
    chosen: list[Any] = list(parallel.parameters() if params is None else params)
    if not state.offload.is_away:
        bucket_bytes = hybrid.bucket_bytes if tile_bytes is None else tile_bytes
        if state.offload.steps_there:
            check_steps(kind, options)
        if kind not in FUSED_ON_DEVICE:
            return _on_device(kind(chosen, **options), state, bucket_bytes)
        chosen = [{**group, "params": list(group["params"])}    # it is read twice, and may be a generator
                  if isinstance(group, dict) and not isinstance(group.get("params", ()), torch.Tensor)
                  and "params" in group else group for group in chosen]
        groups = torch.optim.Optimizer(chosen, {}).param_groups
        return _on_device(kind(chosen, **options, **fused_by_default(kind, groups, options)), state, bucket_bytes)
    if any(p.is_meta for p in parallel.parameters()):
        raise InputError("parameters are on the meta device, and have no values: call init_weights(), load_pretrained "
                         "or load_state_dict before the optimizer is made")
    away = state.offload if tile_bytes is None else replace(state.offload, tile_bytes=tile_bytes)
    tiers = {id(p): tiers_of(away, name, p) for name, p in parallel.named_parameters()}
    if state.offload.in_backward and state.host_gradients is not None:    # whose hooks run first
        state.host_gradients.watch(parallel.named_parameters(remove_duplicate=False))
    state.together.agree("optimizer")
    count = step_threads(threads)
    found = made_equally(
        "an optimizer",
        lambda: OffloadedOptimizer(kind, chosen, options, lambda p: tiers.get(id(p), away.each[0]), state.limits,
                                   prefetch, state.host_gradients, state.files, count, state.optimizers,
                                   state.offload.in_backward),
        lambda made: f"{kind.__qualname__} {away}")
    state.optimizers.add(found)
    return found


def _on_device(optimizer: torch.optim.Optimizer, state: State, bucket_bytes: float) -> torch.optim.Optimizer:
    """The optimizer, which steps buckets of parameters during backward if the plan says so, in the place of one that
    was made for them before."""
    if state.offload.steps_there:
        steps = DeviceSteps(optimizer, bucket_bytes)
        for other in [other for other in state.optimizers if other.shares_with(steps)]:
            other.give_up()
            state.optimizers.discard(other)
        state.optimizers.add(steps)
    return optimizer
