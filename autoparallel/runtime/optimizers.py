"""What becomes of a torch optimizer whose parameters lie on a mesh, at its first step.

Element-wise ones step local shards (`shard_steps.py`). Those that cannot train DTensor parameters are refused by name,
with an alternative. (torch has a global hook for optimizers' steps, none for their construction.)
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoparallel.capture.passes import autocast
from autoparallel.errors import InputError
from autoparallel.runtime.cached_tables import check_steps_rows, has_cached
from autoparallel.runtime.dtensors import is_watched
from autoparallel.runtime.loading import check_place
from autoparallel.runtime.offload.optimizer import OffloadedOptimizer
from autoparallel.runtime.originals import refuse_idle, refuse_originals, take_training
from autoparallel.runtime.shard_steps import step_shards, steps_shards, take_momentum
from autoparallel.runtime.sparse_gradients import keep_hooks_outside, on_shards, step_sparse_shards, swaps
from autoparallel.schedule.tiers import Offload

_LOG = logging.getLogger("autoparallel")
#: Class -> (reason, what to write instead).
REFUSED: Mapping[str, tuple[str, str]] = {
    "torch.optim.Adafactor": (
        "it writes in place to means over rows and columns that are not reduced over ranks yet",
        "autoparallel.optim.Adafactor(parallel.parameters(), ...), with the same options and numbers"),
    "transformers.optimization.Adafactor": (
        "it makes its means over rows and columns as plain tensors",
        "autoparallel.optim.transformers_adafactor(parallel.parameters(), ...), with the same options and numbers"),
    "torch.optim.lbfgs.LBFGS": (
        "it keeps all parameters as one flat vector, which shards of several layouts do not make",
        "another optimizer, or train the original in one process"),
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": (
        "it broadcasts whole parameters from the rank that steps them",
        "the optimizer itself, and zero_stage=1 of autoparallel.compile, which cuts its state"),
}
#: By the owner of parameters, the tiers of these by id. (Weak references to them would keep `init_weights` from filling
#: them.)
_offloaded: MutableMapping[object, Mapping[int, Offload]] = WeakKeyDictionary()
_passed: WeakSet[torch.optim.Optimizer] = WeakSet()
_stepped: WeakSet[torch.optim.Optimizer] = WeakSet()
#: Between an optimizer's first step and its second.
_stale: MutableMapping[torch.optim.Optimizer, _Stale] = WeakKeyDictionary()


def offload_states(owner: object, parameters: Mapping[int, Offload]) -> None:
    """Refuse, as long as their owner lives, optimizers that would keep the states of its ``parameters`` (by id) on the
    device, or step them there after backward, against what their `Offload` says."""
    _offloaded[owner] = parameters


@cache
def look_at_steps() -> None:
    """Refuse such optimizers from now on."""
    register_optimizer_step_pre_hook(_check)
    register_optimizer_step_post_hook(_look_at_reset)


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """The step hook: raises InputError on every rank, before any communication."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer in _stale and _stale.pop(optimizer).end() and dist.get_rank() == 0:
        _LOG.warning("gradients are added to those that %s has stepped with already\n  Reset them after each step: "
                     "optimizer.zero_grad(), or parallel.zero_grad(). (That of the model that was compiled does not: "
                     "the parallel module has parameters of its own.)", type(optimizer).__name__)
    if all(p.grad is None for p in parameters):
        refuse_idle(optimizer, parameters)
    if optimizer in _passed:
        keep_hooks_outside(optimizer)
        return
    if not any(is_watched(p) for p in parameters):
        refuse_originals(optimizer, parameters)
        return
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(optimizer).__mro__]
    ours = any(name.startswith("autoparallel.optim.") for name in names)
    for name in names:
        if name in REFUSED and not ours:
            why, write = REFUSED[name]
            raise InputError(f"{names[0]} cannot step parameters that lie on a mesh: {why}\n  Write {write}.")
    if not isinstance(optimizer, OffloadedOptimizer):
        _check_tier(optimizer, parameters)
    take_training(parameters)
    compute_on_shards(optimizer)


def compute_on_shards(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer of parameters on a mesh, which is not to be refused, compute on local shards."""
    if not isinstance(optimizer, OffloadedOptimizer):
        _shard_states(optimizer)
        if hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):  # timm's Lookahead has none, its inner one has
            optimizer.register_load_state_dict_post_hook(_shard_states)
    if has_cached(optimizer):
        check_steps_rows(optimizer, steps_shards(type(optimizer)))
    if steps_shards(type(optimizer)):
        step_shards(optimizer)
    if swaps(optimizer):
        step_sparse_shards(optimizer)
    _passed.add(optimizer)


def step_some(optimizer: torch.optim.Optimizer, parameters: Sequence[Sequence[Tensor]]) -> None:
    """Step some of the parameters, by group, of an optimizer that computes on local shards, without the hooks of its
    steps."""
    groups = list(optimizer.param_groups)
    kept = [group["params"] for group in groups]
    for number, group in enumerate(groups):
        group["params"] = list(parameters[number]) if number < len(parameters) else []    # of one that was added since
    try:
        with torch.no_grad(), autocast.without_autocast(), \
                on_shards(optimizer) if swaps(optimizer) else nullcontext():
            inspect.unwrap(type(optimizer).step)(optimizer)
        if isinstance(optimizer, torch.optim.SGD):
            take_momentum(optimizer)
    finally:
        for group, whole in zip(groups, kept, strict=True):
            group["params"] = whole


def _shard_states(optimizer: torch.optim.Optimizer) -> None:
    """Lay whole states, of an optimizer of the original (`load_state_dict`), and those of other layouts out as their
    parameters. (Dense ones of other layouts would do; optimizers of sparse gradients read the shards of rows.) Raises
    InputError for shards that another rank has saved."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, DTensor) and is_watched(parameter):
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
                    if isinstance(value, DTensor):
                        check_place(f"{name} of a parameter of {list(value.shape)} in {type(optimizer).__name__}",
                                    value)
                    state[name] = _laid_out(value, parameter)


def _laid_out(value: Tensor, parameter: DTensor) -> Tensor:
    """The state with the layout of its parameter; a sparse one of another layout then is dense."""
    mesh, placements = parameter.device_mesh, parameter.placements
    if not isinstance(value, DTensor):
        whole = value.to_dense() if value.is_sparse else value
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)
    if value.device_mesh == mesh and value.placements == placements:
        return value
    dense = cast(DTensor, value.to_dense() if value.is_sparse else value)
    if value.device_mesh == mesh:
        return dense.redistribute(placements=placements)
    return distribute_tensor(dense.full_tensor(), mesh, placements, src_data_rank=None)


def _look_at_reset(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """After the first step: look whether its gradients are reset before those of the second are added."""
    if optimizer in _stepped:
        return
    _stepped.add(optimizer)
    parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    watched = next((p for p in parameters if is_watched(p) and p.grad is not None), None)
    if watched is not None:
        _stale[optimizer] = _Stale(watched)


class _Stale:
    """Whether a gradient that an optimizer has stepped with is kept, and others are added to it, until the next step.
    (Between them it may be: backward of a GAN's generator adds to the critic's, which are reset before they count.)"""

    def __init__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.parameter, self.version = parameter, parameter.grad._version
        self.gradient: Callable[[], Tensor | None] = ref(parameter.grad)
        self.is_added = False
        self.hooks = (parameter.register_hook(self._comes), parameter.register_post_accumulate_grad_hook(self._added))

    def _comes(self, _: Tensor) -> None:
        """Before a gradient is added; torch counts no version of zeros of several tensors."""
        old = self.gradient()
        if old is None or not _is_any(old) or (not self.is_added and old._version != self.version):
            self.end()

    def _added(self, parameter: Tensor) -> None:
        self.is_added = parameter.grad is not None and parameter.grad is self.gradient()
        if not self.is_added:
            self.end()

    def end(self) -> bool:
        """Before the next step: whether it steps with such a sum."""
        for hook in self.hooks:
            hook.remove()
        gradient, self.gradient = self.gradient(), lambda: None
        return self.is_added and gradient is not None and gradient is self.parameter.grad and _is_any(gradient)


def _is_any(gradient: Tensor) -> bool:
    """Whether this rank's shard of a gradient is not zero."""
    local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
    return bool((local._values() if local.is_sparse else local.detach()).any())


def _check_tier(optimizer: torch.optim.Optimizer, parameters: Iterable[Any]) -> None:
    wanted = set(map(id, parameters))
    away = next((known[number] for known in _offloaded.values() for number in wanted & known.keys()), None)
    if away is not None:
        kind = type(optimizer).__name__
        against = f"keeps optimizer states on the {away.states}, and {kind} would keep them on the device" \
            if away.is_away else f"steps parameters during backward (step_in_backward=True), and {kind} would step " \
            "them after it, with all gradients in memory"
        raise InputError(f"the plan {against}\n  Write parallel.optimizer({kind}, ...), with the same options.")


__all__ = ["compute_on_shards", "look_at_steps", "offload_states", "step_some"]
