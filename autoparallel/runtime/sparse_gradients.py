"""Sparse gradients of tables on a mesh, and the optimizer that takes such gradients only.

A table's ``.grad`` then is a DTensor whose local shard is a sparse tensor: the rows of this rank's shard that were
looked up. Autograd sees a strided tensor, so that it adds up gradients by DTensor's ops; Python sees a sparse one, as
torch's optimizers ask for.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoparallel.errors import InputError
from autoparallel.runtime.cached_tables import CachedTable, has_cached, on_rows

aten = torch.ops.aten
#: The ops that run on the local shards.
_OPS = frozenset({
    aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor, aten.mul.Tensor, aten.mul_.Tensor,
    aten.mul.Scalar, aten.div.Tensor, aten.div_.Tensor, aten.neg.default, aten.zero_.default, aten.clone.default,
    aten.detach.default, aten._to_copy.default})


class SparseGradient(DTensor):
    """The gradient of a table, of which each rank has the rows of its shard that were looked up.

    ``to_dense()`` and ``full_tensor()`` have all rows. Gradients are added, scaled and set to zero as they are; other
    ops are refused (InputError).
    """

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        return True

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        return torch.sparse_coo

    def coalesce(self) -> SparseGradient:
        """The gradient with one entry for each row."""
        return sparse_gradient(self._local_tensor.coalesce(), self._spec)

    def is_coalesced(self) -> bool:
        return self._local_tensor.is_coalesced()

    def to_local(self, **_: Any) -> Tensor:
        """This rank's shard, which is sparse."""
        return self._local_tensor

    def to_dense(self, *_: Any, **__: Any) -> DTensor:
        return DTensor(self._local_tensor.to_dense(), self._spec, requires_grad=False)

    def full_tensor(self, **_: Any) -> Tensor:
        """The whole gradient, dense, on each rank; all ranks call this."""
        return self.to_dense().full_tensor()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._values.default:
            return _Entries(args[0]._local_tensor._values(), args[0]._spec, requires_grad=False)
        values = [value for value in args if isinstance(value, DTensor)]
        spec = values[0]._spec if values else None
        if func not in _OPS or spec is None or any(
                value.placements != spec.placements or value.shape != spec.shape for value in values):
            raise _refused(func)
        found = func(*(value._local_tensor if isinstance(value, DTensor) else value for value in args),
                     **(kwargs or {}))
        if isinstance(args[0], DTensor) and found is args[0]._local_tensor and func is not aten.detach.default:
            return args[0]
        return sparse_gradient(found, spec) if found.is_sparse else DTensor(found, spec, requires_grad=False)


class _Entries(DTensor):
    """The entries of a sparse gradient, for gradient scalers, which divide them in place and look for infinite ones."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return cls(args[0]._local_tensor, args[0]._spec, requires_grad=False)
        if func is not aten._amp_foreach_non_finite_check_and_unscale_.default:
            raise _refused(func)
        gradients = [DTensor(one._local_tensor, one._spec, requires_grad=False) if isinstance(one, cls) else one
                     for one in args[0]]
        return DTensor.__torch_dispatch__(func, (DTensor,), (gradients, *args[1:]), kwargs or {})


def _refused(func: Any) -> InputError:
    return InputError(f"{func} of a sparse gradient on a mesh\n  Such gradients are added, scaled and set to zero, "
                      "and clipped by parallel.clip_grad_norm_(...); p.grad.to_dense() has all rows, p.grad.to_local() "
                      "those of this rank's shard that were looked up.")


def sparse_gradient(local: Tensor, spec: Any) -> SparseGradient:
    """The gradient with this sparse local shard, of a parameter with layout ``spec``."""
    strided = torch.empty(0, dtype=local.dtype, device=local.device)
    made = cast(SparseGradient, DTensor.__new__(SparseGradient, strided, spec, requires_grad=False))
    made._local_tensor = local
    return made


def own_rows_of(gradient: Tensor) -> Tensor:
    """A sparse gradient with one entry for each row, in memory of its own. (Autograd's entries may be views of what
    the user gave to backward.)"""
    made = gradient.coalesce()
    return made.clone() if made is gradient or made._values().data_ptr() == gradient._values().data_ptr() else made


#: By optimizer, the number of the hook that gives it shards, or rows of cached tables.
_takes_shards: MutableMapping[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def step_sparse_shards(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer for which `swaps` is true compute on local shards, or on rows of cached tables, from the step
    on before which this is called: for the time of a step its groups have them in place of parameters. Its state stays
    of DTensors for everybody else."""
    taken, alive = ExitStack(), weakref.ref(optimizer)

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(callable(value) for value in (*args[1:], *kwargs.values())):
            raise InputError(f"{type(optimizer).__name__}.step(closure) of parameters on a mesh: call the closure "
                             "first, then step()")
        after()    # of a step that failed
        taken.enter_context(on_shards(optimizer))

    def after(*_: Any) -> None:
        taken.close()

    def zero_grad(set_to_none: bool = True) -> None:
        itself = alive()
        assert itself is not None
        after()
        type(itself).zero_grad(itself, set_to_none)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]  # of parameters, also after a step that failed
    optimizer.register_state_dict_pre_hook(after)
    optimizer.register_load_state_dict_pre_hook(after)
    _takes_shards[optimizer] = optimizer.register_step_pre_hook(before).id
    first = optimizer.register_step_post_hook(after).id
    cast(OrderedDict[int, Any], optimizer._optimizer_step_post_hooks).move_to_end(first, last=False)


def swaps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer steps `on_shards`: a `torch.optim.SparseAdam`, and one of cached tables."""
    return isinstance(optimizer, torch.optim.SparseAdam) or has_cached(optimizer)


def on_shards(optimizer: torch.optim.Optimizer) -> ExitStack:
    """Until it is closed, the groups of a `torch.optim.SparseAdam` have local shards in place of parameters; those of
    any optimizer have the device's rows in place of cached tables."""
    is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    for group in optimizer.param_groups if is_sparse else ():
        _check(group["params"])
    start_states(optimizer, cached=True)
    with on_rows(optimizer) as taken:
        for group in optimizer.param_groups if is_sparse else ():
            taken.callback(_take_shards(optimizer, group))
        return taken.pop_all()


def keep_hooks_outside(optimizer: torch.optim.Optimizer) -> None:
    """Called before each step: let the user's hooks, of whenever, run while the groups have parameters."""
    if (last := _takes_shards.get(optimizer)) is not None:
        cast(OrderedDict[int, Any], optimizer._optimizer_step_pre_hooks).move_to_end(last)


def start_states(optimizer: torch.optim.Optimizer, cached: bool = False) -> None:
    """Make the states of a `torch.optim.SparseAdam` that has none yet, as its first step does. (torch's state dicts of
    models make them by a step with dense gradients.) ``cached``: of each cached table with a gradient that has none."""
    if isinstance(optimizer, torch.optim.SparseAdam) and (cached or not optimizer.state):
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
            if not cached or (isinstance(parameter, CachedTable) and parameter.grad is not None
                              and not optimizer.state.get(parameter)):
                optimizer.state[parameter] = {"step": 0, "exp_avg": torch.zeros_like(parameter),
                                              "exp_avg_sq": torch.zeros_like(parameter)}


def _check(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        if parameter.grad is not None and isinstance(parameter, DTensor) and not isinstance(parameter.grad, DTensor):
            raise InputError(f"the gradient of a parameter {list(parameter.shape)} on a mesh is a plain tensor\n  Give "
                             "a DTensor: of a dense one, distribute_tensor(gradient, p.device_mesh, p.placements), and "
                             "another optimizer; or the sparse gradient of backward, scaled.")
        if parameter.grad is not None and not parameter.grad.is_sparse:
            raise InputError(f"SparseAdam takes sparse gradients only, and that of a parameter "
                             f"{list(parameter.shape)} is dense\n  Give it the tables with sparse=True alone, and the "
                             "other parameters to another optimizer, as torch.optim.AdamW.")


def _take_shards(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Callable[[], None]:
    """Put local shards, with their gradients and state, in the place of a group's parameters; returns the way back."""
    parameters: list[Any] = group["params"]
    on_mesh = [isinstance(p, DTensor) and not isinstance(p, CachedTable) for p in parameters]
    shards = [p._local_tensor.detach() if takes else p for p, takes in zip(parameters, on_mesh, strict=True)]
    for parameter, shard, takes in zip(parameters, shards, on_mesh, strict=True):
        if takes:
            shard.grad = parameter.grad._local_tensor if isinstance(parameter.grad, DTensor) else None
            state = optimizer.state.pop(parameter, {})
            optimizer.state[shard] = {key: value._local_tensor if isinstance(value, DTensor) else value
                                      for key, value in state.items()}

    def back() -> None:
        group["params"] = parameters
        for parameter, shard, takes in zip(parameters, shards, on_mesh, strict=True):
            if takes:
                shard.grad = None
                if state := optimizer.state.pop(shard, None):
                    optimizer.state[parameter] = {
                        key: DTensor(value, parameter._spec, requires_grad=False)
                        if isinstance(value, Tensor) and value.dim() else value for key, value in state.items()}

    group["params"] = shards
    return back


__all__ = ["SparseGradient", "keep_hooks_outside", "on_shards", "own_rows_of", "sparse_gradient", "start_states",
           "step_sparse_shards", "swaps"]
