"""Random numbers and patterns written into DTensors: those of the whole tensor, as in one process.

torch lets each rank of a CPU mesh draw its shard by itself. With equal seeds all shards get the same numbers
(``nn.init.normal_`` makes rows that repeat), and of other seeds copies differ. ``torch.eye(out=)`` gives each rank the
whole as its shard. Here the whole is made on every rank, from the first rank's random state, and each keeps its shard:
the numbers are those of one process with the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from autoparallel.runtime.dtensors import Handler, as_before, is_watched, set_handler

aten = torch.ops.aten
#: Ops that write what does not depend on the values that were there.
_WRITTEN = (aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float, aten.exponential_.default,
            aten.log_normal_.default, aten.cauchy_.default, aten.geometric_.default, aten.random_.default,
            aten.random_.to, getattr(aten.random_, "from"), aten.rand_like.default, aten.randn_like.default,
            aten.randint_like.default, aten.randint_like.low_dtype, aten.eye.out, aten.eye.m_out,
            aten.arange.start_out)
#: Ops whose result depends on their arguments' values, too.
_READ = (aten.bernoulli.default, aten.bernoulli_.Tensor, aten.native_dropout.default, aten.normal.Tensor_float,
         aten.normal.float_Tensor, aten.normal.Tensor_Tensor, aten.multinomial.default)
#: Initialisers of `torch.nn.init` that look at the numbers that they drew, or write to places of the whole.
_INITIALISERS = ("_no_grad_trunc_normal_", "sparse_", "orthogonal_", "dirac_")


@cache
def draw_whole() -> None:
    """Make these ops do so, from now on, for DTensors on the meshes of parallel modules."""
    for op in (*_WRITTEN, *_READ):
        before: list[Handler | None] = []
        before.append(set_handler(op, partial(_run, before, op in _READ)))
    for name in _INITIALISERS:
        setattr(nn.init, name, _initialising(getattr(nn.init, name)))


def _initialising(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An initialiser that runs on the whole of a DTensor, of which each rank keeps its shard."""

    @wraps(function)
    def initialised(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not is_watched(tensor):
            return function(tensor, *args, **kwargs)
        assert isinstance(tensor, DTensor)
        whole = _whole(tensor, False)
        with torch.no_grad(), _first_ranks_state(kwargs.get("generator"), tensor):
            function(whole, *args, **kwargs)
            tensor._local_tensor.copy_(_sharded(whole, tensor)._local_tensor)
        return tensor

    return initialised


def _run(before: list[Handler | None], reads: bool, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    sharded = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
    if not all(map(is_watched, sharded)):
        return as_before(before, op, args, kwargs)
    first = sharded[0]
    with torch.no_grad():
        wholes = [_whole(leaf, reads) if isinstance(leaf, DTensor) else leaf for leaf in leaves]
        whole_args, whole_kwargs = pytree.tree_unflatten(wholes, spec)
        with _first_ranks_state(whole_kwargs.get("generator"), first):
            made = op(*whole_args, **whole_kwargs)
        if not op._schema.is_mutable:
            return pytree.tree_map_only(Tensor, lambda value: _sharded(value, first), made)
        written = args[0] if op not in (aten.eye.out, aten.eye.m_out, aten.arange.start_out) else kwargs["out"]
        written._local_tensor.copy_(_sharded(made, written)._local_tensor)
        return written


def _whole(value: DTensor, reads: bool) -> Tensor:
    if reads:
        return value.full_tensor()
    return torch.empty(value.shape, dtype=value.dtype, device=value._local_tensor.device)


def _sharded(whole: Tensor, like: DTensor) -> DTensor:
    """This rank's shard, laid out as ``like``; a summand's is whole, and so is what has another shape."""
    other = whole.shape != like.shape
    placements = [Replicate() if other or p.is_partial() else p for p in like.placements]
    return distribute_tensor(whole, like.device_mesh, placements, src_data_rank=None)


@contextmanager
def _first_ranks_state(generator: torch.Generator | None, like: DTensor) -> Iterator[None]:
    """With the first rank's random state. The state of a rank that had another one is left as it was."""
    device = like._local_tensor.device
    own = generator if generator is not None else _default(device)
    mine = own.get_state()
    shared = _from_first(mine, like.device_mesh, device)
    own.set_state(shared)
    try:
        yield
    finally:
        if not torch.equal(mine, shared):
            own.set_state(mine)


def _default(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def _from_first(state: Tensor, mesh: DeviceMesh, device: torch.device) -> Tensor:
    found = state.to(device, copy=True)
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            dist.broadcast(found, group=mesh.get_group(axis), group_src=0)
    return found.to(state.device)


__all__ = ["draw_whole"]
