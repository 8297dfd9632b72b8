"""Torch's wrappers of modules for data parallelism, its tracers, converters and transforms are refused: the module is
parallel already, and a call of it is of many ranks.

Each wrapper leaves a trace on the module before it changes anything: DDP reads an attribute, FSDP sets one, and
fully_shard keeps a list of what was applied.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._C import _len_torch_function_stack
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint
from torch.utils._device import DeviceContext

from autoparallel.errors import InputError

#: Attribute that a wrapper reads -> the wrapper. (Others ask whether a module has FSDP's attribute, which it sets.)
_READ_BY = {"_ddp_params_and_buffers_to_ignore": "DistributedDataParallel"}
_SET_BY = {"_is_fsdp_managed_module": "FullyShardedDataParallel"}
#: Attribute that a converter of modules reads of what it converts, unless that has it -> the converter.
_CONVERTED_BY = {"qconfig": "torch.ao.quantization", "__prepare_scriptable__": "torch.jit.script"}

#: Attributes of DistributedDataParallel that scripts read, and what to write here.
_OF_DDP = {"module": "write parallel in place of parallel.module",
           "no_sync": "leave no_sync() out: gradients of several backward calls add up",
           "join": "leave join() out, and give all ranks as many batches"}


@contextmanager
def naming_ddp(attribute: str) -> Iterator[None]:
    """Where the original lacks an attribute that scripts for DistributedDataParallel read: say what to write."""
    try:
        yield
    except AttributeError as error:
        if f"no attribute '{attribute}'" in str(error) and (what := _OF_DDP.get(attribute)) is not None:
            error.args = (f"{error}\n  A parallel module is no DistributedDataParallel: {what}.",)
        raise


def refuse_reading(attribute: str, model: nn.Module | None) -> None:
    """Raises InputError if this attribute is one that a wrapper reads of what it wraps, or a converter of what it
    converts. ``model``: the original, which may have been converted itself."""
    if (wrapper := _READ_BY.get(attribute)) is not None:
        raise _refusal(wrapper)
    if (converter := _CONVERTED_BY.get(attribute)) is not None and not hasattr(model, attribute):
        raise InputError(f"{converter} does not convert a parallel module, whose layers are parts of this process's "
                         "programs\n  Save its weights, parallel.save_pretrained(folder), and convert the original "
                         "model with them.")


def refuse_setting(attribute: str) -> None:
    """Raises InputError if this attribute is one that a wrapper sets on what it wraps."""
    if (wrapper := _SET_BY.get(attribute)) is not None:
        raise _refusal(wrapper)


def refuse_composed(attributes: dict[str, Any]) -> None:
    """Raises InputError if these attributes of a module say that fully_shard or replicate has begun on it."""
    if applied := attributes.pop(REGISTRY_KEY, None):
        raise _refusal(next(iter(applied)))


def refuse_tracers() -> None:
    """Raises InputError where `torch.fx.Tracer.trace` asks what it traces for its name, as it does before the call."""
    caller = sys._getframe(2)    # by name: others wrap torch's method
    if caller.f_code.co_name == "trace" and caller.f_globals.get("__name__") == torch.fx.Tracer.__module__:
        raise _of_one_rank("torch.fx.symbolic_trace")


def _of_one_rank(within: str) -> InputError:
    return InputError(f"a parallel module is called within {within}, which would see one rank's part of it\n"
                      "  Apply it to the original model, or within the model that you compile (torch.func.grad and "
                      "vmap in forward are traced).")


def refuse_transforms(leaves: Sequence[Any]) -> None:
    """Raises InputError for a call within a trace or a transform of torch.func, which would see this rank's part only.
    ``leaves``: the call's arguments."""
    dual = forward_ad._current_level >= 0 and any(
        isinstance(leaf, torch.Tensor) and forward_ad.unpack_dual(leaf).tangent is not None for leaf in leaves)
    traced = any(isinstance(leaf, (torch.fx.Proxy, FakeTensor)) for leaf in leaves)
    within = ("torch.jit.trace" if torch.jit.is_tracing() else
              "make_fx" if get_proxy_mode() is not None else
              "a transform of torch.func (vmap, grad, jvp)" if peek_interpreter_stack() is not None else
              "forward-mode differentiation" if dual else
              "a TorchFunctionMode" if _len_torch_function_stack() and _has_users_mode() else
              "torch.fx or torch.export" if traced else "")
    if within:
        raise _of_one_rank(within)


def _has_users_mode() -> bool:
    """Whether a TorchFunctionMode is active that is not the default device's."""
    return any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def refuse_checkpoint() -> None:
    """Raises InputError for a call within `torch.utils.checkpoint`, of a program that draws random numbers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            raise InputError("a parallel module with dropout is called within torch.utils.checkpoint, which would draw "
                             "other numbers when it computes the call again\n  Leave checkpoint out, and give "
                             "recompute=\"full\" to autoparallel.compile.")
        frame = frame.f_back


def refuse_cached_weights(model: nn.Module) -> None:
    """Raises InputError within `torch.nn.utils.parametrize.cached`, if ``model`` has parametrizations."""
    if parametrize._cache_enabled and any(map(parametrize.is_parametrized, model.modules())):
        raise InputError("a parallel module is called within torch.nn.utils.parametrize.cached(), and its program "
                         "computes parametrized weights at each call\n  Leave cached() out.")


def _refusal(wrapper: str) -> InputError:
    return InputError(f"{wrapper} cannot wrap a parallel module, which shards its parameters and reduces its gradients "
                      "itself\n  Leave the wrapper out; to have what it does, write "
                      "autoparallel.compile(model, mesh, baseline=\"ddp\" or \"fsdp\").")


__all__ = ["naming_ddp", "refuse_cached_weights", "refuse_checkpoint", "refuse_composed", "refuse_reading",
           "refuse_setting", "refuse_tracers", "refuse_transforms"]
