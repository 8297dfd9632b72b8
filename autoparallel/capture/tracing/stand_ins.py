"""What stands in, while a model is traced, for what torch would compute from values that a trace does not have."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from threading import get_ident
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch._C._functorch import is_batchedtensor
from torch._dynamo import _trace_wrapped_higher_order_op as wrapped
from torch._functorch import eager_transforms
from torch.distributions import Distribution, Gamma
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils.weak import WeakIdKeyDictionary

from autoparallel.capture.contents import is_users
from autoparallel.capture.dependencies import recorder
from autoparallel.capture.graph import is_floating
from autoparallel.capture.passes.vmap_and_grad import gradient_as_op, gradient_of_function, pullback, pushforward
from autoparallel.capture.tracing.frames import caller, is_called_by, users_caller
from autoparallel.capture.tracing.known_values import NUMBERS, known_numbers
from autoparallel.capture.tracing.masked_rows.control_flow import REGIONS
from autoparallel.capture.tracing.masked_rows.dispatch import asked, noted, tensors_of
from autoparallel.capture.tracing.masked_rows.places import table_by_lengths
from autoparallel.capture.tracing.masked_rows.torch_functions import made
from autoparallel.capture.tracing.masked_rows.types import Rows
from autoparallel.capture.tracing.value_branches import READS, Branches
from autoparallel.errors import CaptureError
from autoparallel.ops import user_function
from autoparallel.ops.ctc import ctc_loss_as_op

_BATCH_NORM = _BatchNorm.forward
_ENGINE: Callable[..., Any] = torch.autograd._engine_run_backward
_TRACING = torch.export.export.__code__
_CHECKPOINTED = torch.utils.checkpoint.__file__


@contextmanager
def without_checks() -> Iterator[None]:
    """In this thread, skip two checks of values that cannot be traced and change no result: whether a mask of
    nn.Transformer is causal, and whether parameters of a distribution are valid."""
    checks = Distribution.__dict__["_validate_args"]
    Distribution._validate_args = _Here(False, checks)  # type: ignore[assignment]
    try:
        with _instead(transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: is_causal is True):
            yield
    finally:
        Distribution._validate_args = checks


@contextmanager
def traced_methods() -> Iterator[None]:
    """Replacements, while a model is traced, of functions that read numbers off tensors or change modules."""
    _device_constructors()  # torch keeps which functions follow `torch.device(...)`, as they are at the first call
    with (ExitStack() as stack,
          _instead(eager_transforms, "grad_and_value_impl", gradient_of_function),
          _instead(eager_transforms, "_vjp_with_argnums", pullback),
          _instead(eager_transforms, "_jvp_with_argnums", pushforward),
          _instead(_BatchNorm, "forward", _batch_norm), _instead(nn.SyncBatchNorm, "forward", _synced_batch_norm),
          _instead(nn.Module, "to", _to), _instead(Gamma, "rsample", _gamma_sample),
          _instead(torch.autograd, "_engine_run_backward", _backward),
          _instead(wrapped, "mod_index", torch.ops.aten.index.Tensor)):
        for name in ("ones", "zeros", "full"):
            stack.enter_context(_instead(torch, name, partial(made, getattr(torch, name))))
        yield


@contextmanager
def flex_attention_as_ops() -> Iterator[None]:
    """Flexible attention is what its functions of places make of all scores at once, as torch computes it without a
    compiler: memory grows with the square of the length, and a warning says so, once."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is None:  # nobody can call it
        yield
        return
    from torch._higher_order_ops.flex_attention import math_attention

    told = False

    def of_all_scores(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal told
        if not told:
            warnings.warn(f"flex_attention is captured as all its scores at once, {query.shape[-2]} x {key.shape[-2]} "
                          "a head, masked ones too: memory grows with the square of the length", stacklevel=2)
            told = True
        return math_attention(query, key, *args, **kwargs)

    flag = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    with (_instead(flex, "flex_attention_hop", of_all_scores), _instead(flex, flag, _TrueHere(getattr(flex, flag))),
          _instead(flex, "_validate_device", lambda *tensors: None),
          _instead(flex, "setup_compilation_env", lambda: nullcontext("eager"))):
        yield


def _requires_grad(x: torch.Tensor) -> bool:
    """As the call has it: under no_grad, which a trace is not, only its leaves may require gradients."""
    active = recorder()
    if x.requires_grad and not x.is_leaf and active is not None and is_users(caller().f_globals):
        return active.mode("is_grad_enabled", True)
    return x.requires_grad


class _Here:
    """A class attribute with another value in the thread that makes it."""

    def __init__(self, here: Any, elsewhere: Any) -> None:
        self._thread, self._here, self._elsewhere = get_ident(), here, elsewhere

    def __get__(self, holder: Any, owner: type | None = None) -> Any:
        return self._here if get_ident() == self._thread else self._elsewhere


class _TrueHere:
    """A flag that is true in the thread that makes it."""

    def __init__(self, elsewhere: bool) -> None:
        self._thread, self._elsewhere = get_ident(), elsewhere

    def __bool__(self) -> bool:
        return get_ident() == self._thread or self._elsewhere


@contextmanager
def _instead(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    """``stand_in`` in place of a function, in this thread: others call their own. (Of a flag it is a `_TrueHere`.)"""
    own, thread = getattr(owner, name), get_ident()

    def here(*args: Any, **kwargs: Any) -> Any:
        return (stand_in if get_ident() == thread else own)(*args, **kwargs)

    setattr(owner, name, here if callable(stand_in) else stand_in)
    try:
        yield
    finally:
        setattr(owner, name, own)


def _batch_norm(norm: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    """With ``momentum=None`` running statistics are means over all batches, whose number is a tensor."""
    if norm.training and norm.track_running_stats and is_called_by(_CHECKPOINTED):
        warnings.warn(f"{type(norm).__name__} is in a checkpoint: its running statistics count each batch once, where "
                      "torch counts it again when it recomputes the forward", stacklevel=2)
    if norm.momentum is not None or not (norm.training and norm.track_running_stats):
        return _BATCH_NORM(norm, x)
    norm._check_input_dim(x)
    assert norm.num_batches_tracked is not None and norm.running_mean is not None and norm.running_var is not None
    dims = [d for d in range(x.dim()) if d != 1]
    with torch.no_grad():
        norm.num_batches_tracked.add_(1)
        share, mean = 1.0 / norm.num_batches_tracked.to(norm.running_mean.dtype), x.mean(dims, keepdim=True)
        variance = (x - mean).square().sum(dims) / (x.numel() // x.shape[1] - 1)
        for running, batch in ((norm.running_mean, mean.flatten()), (norm.running_var, variance)):
            running.copy_(running * (1 - share) + batch * share)
    return torch.nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)


def _synced_batch_norm(norm: nn.SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
    """Batch norm of a program is of the rows of all ranks, whatever the plan, on every device. Raises CaptureError for
    the statistics of some ranks."""
    group = norm.process_group
    if group is not None and group.size() != torch.distributed.get_world_size():
        raise CaptureError(f"a SyncBatchNorm has a process group of {group.size()} of "
                           f"{torch.distributed.get_world_size()} ranks, and a program's batch norm is of the rows of "
                           "all ranks\n  Leave process_group out of convert_sync_batchnorm.")
    return _batch_norm(norm, x)


def _gamma_sample(gamma: Gamma, sample_shape: Sequence[int] = ()) -> torch.Tensor:
    """As torch's, of which gradients do not know that samples are no smaller than the least normal number."""
    shape = gamma._extended_shape(torch.Size(sample_shape))
    value = torch._standard_gamma(gamma.concentration.expand(shape)) / gamma.rate.expand(shape)
    return value + (torch.finfo(value.dtype).tiny - value.detach()).clamp(min=0)    # zero, but for the smallest


def _to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Raises CaptureError where it is not what it was before: its parameters would be others from then on."""
    dtype = torch._C._nn._parse_to(*args, **kwargs)[1]
    others = [t.dtype for t in (*module.parameters(), *module.buffers()) if is_floating(t.dtype) and t.dtype != dtype]
    if dtype is not None and others:
        raise CaptureError(f"the model casts its own {type(module).__name__} from {others[0]} to {dtype} as it "
                           "runs, which changes its parameters\n  Cast it before (model.part.to(dtype)), or "
                           "cast what it reads: F.linear(x, part.weight.to(dtype)).")
    return module


def _backward(*args: Any, **kwargs: Any) -> Any:
    """Raises CaptureError in a model that is traced, but in a user's torch.autograd.Function, which runs whole. Other
    threads' is done."""
    frames = list(_frames(sys._getframe(1)))
    if any(f.f_code is user_function.RUNS for f in frames) or not any(f.f_code is _TRACING for f in frames):
        return _ENGINE(*args, **kwargs)
    raise CaptureError("the model calls backward() as it runs, which adds to gradients that no program has"
                       f"{users_caller()}\n"
                       "  Write torch.autograd.grad(outputs, inputs), which returns them, or call backward() outside "
                       "the model.")


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _gaussian_likelihood(x: torch.Tensor, target: torch.Tensor, var: torch.Tensor | float, full: bool = False,
                         eps: float = 1e-6, reduction: str = "mean") -> torch.Tensor:
    """Whether variances are negative is not looked at; they are clamped where gradients do not see it."""
    var = torch.full_like(x, var) if isinstance(var, float) else var
    var = var.unsqueeze(-1) if var.shape == x.shape[:-1] else var
    var = var + (var.clamp(min=eps) - var).detach()
    losses = 0.5 * (torch.log(var) + (x - target).square() / var + (math.log(2 * math.pi) if full else 0.0))
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


def _ctc_loss(log_probs: torch.Tensor, targets: Any, input_lengths: Any, target_lengths: Any, *args: Any,
              **kwargs: Any) -> torch.Tensor:
    if isinstance(targets, Rows) and isinstance(target_lengths, torch.Tensor):
        targets = table_by_lengths(targets, target_lengths)
    return ctc_loss_as_op(log_probs, targets, input_lengths, target_lengths, *args, **kwargs)


def _counts(x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    """`torch.bincount` of numbers below ``minlength``; of others the scatter fails."""
    if not minlength:
        raise CaptureError("torch.bincount without minlength is as long as the largest number says\n"
                           "  Give minlength, of which all numbers are below.")
    if weights is None:
        weights = torch.ones_like(x, dtype=torch.long)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    return weights.new_zeros(minlength).scatter_add(0, x.long(), weights)


def _covariance(x: torch.Tensor, *, correction: int = 1, fweights: torch.Tensor | None = None,
                aweights: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.cov`, which looks at its weights' values, of observations [variables, n] or [n]."""
    if fweights is not None or aweights is not None:
        raise CaptureError(f"torch.cov is called with weights, whose values it checks{users_caller()}\n  Write it out: "
                           "centered = x - (x * w).sum(1, keepdim=True) / w.sum(); "
                           "centered * w @ centered.T / (w.sum() - correction), for fweights.")
    rows = x if x.dim() == 2 else x.reshape(1, -1)
    centered = rows - rows.mean(1, keepdim=True)
    made = centered @ centered.T.conj() / max(rows.shape[1] - correction, 0)
    return made if x.dim() == 2 else made.reshape(())


def _correlation(x: torch.Tensor) -> torch.Tensor:
    """`torch.corrcoef` of observations [variables, n] or [n]."""
    made = _covariance(x)
    if x.dim() < 2:
        return made / made
    scale = made.diagonal().real.sqrt() if made.is_complex() else made.diagonal().sqrt()
    made = made / scale[:, None] / scale
    return torch.complex(made.real.clip(-1, 1), made.imag.clip(-1, 1)) if made.is_complex() else made.clip(-1, 1)


#: Functions that look at values which do not matter.
_COVARIANCES: Mapping[Any, Callable[..., torch.Tensor]] = {
    torch.cov: _covariance, torch.Tensor.cov: _covariance, torch.corrcoef: _correlation,
    torch.Tensor.corrcoef: _correlation}


#: Products of which torch.vmap has no trace where a matrix that all samples share meets a vector of each.
_PRODUCTS = frozenset({torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mv, torch.Tensor.mv})


def _is_shared_matrix_by_vector(matrix: torch.Tensor, vector: torch.Tensor) -> bool:
    return (matrix.dim(), vector.dim()) == (2, 1) and is_batchedtensor(vector) and not is_batchedtensor(matrix)


def _data_written(tensor: torch.Tensor) -> CaptureError:
    """What to write instead: for averages of another network's parameters, for masks of weights, for buffers."""
    if not isinstance(tensor, nn.Parameter):
        what, instead = "a tensor", "Write buffer.copy_(value) under torch.no_grad() instead of buffer.data = value."
    elif tensor.requires_grad:
        what = "a parameter"
        instead = ("Compute with what it would be, torch.nn.functional.linear(x, weight * mask), or write to the "
                   "parallel module's after the step, under torch.no_grad().")
    else:
        what = "a parameter that is not trained"
        instead = ("Write to the parallel module's after the step: `with torch.no_grad(): theirs.lerp_(ours, 1 - m)` "
                   "for parameters of two networks (a momentum encoder).")
    return CaptureError(f"the model assigns to the data of {what}, which a trace does not see{users_caller()}\n"
                        f"  {instead}")


#: Hooks on values that a trace makes: nobody would call them in the program.
_HOOKS = frozenset({torch.Tensor.register_hook, torch.Tensor.retain_grad,
                    torch.Tensor.register_post_accumulate_grad_hook})
#: Functions that ask for the memory of a tensor, of which others of the same shape have another.
_STRIDES = frozenset({torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.storage_offset,
                      torch.Tensor.as_strided, torch.as_strided, torch.Tensor.dim_order})


#: Tensors that are no stand-ins of a trace; functions whose results have no gradient.
_REAL = (torch.Tensor, nn.Parameter)
_DETACHED = frozenset({torch.Tensor.detach, torch.detach})


class TracedCalls(TorchFunctionMode):
    """Calls that a trace would not see, as ops that it sees. ``known``: the model's parameters and inputs."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._known = set(map(id, known))
        self._branches = Branches()
        self._drawn = WeakIdKeyDictionary()  # numbers from 0 on, below 1

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        if not REGIONS.met:
            return self._called(function, args, kwargs)
        REGIONS.reads(tensors_of((args, kwargs or {})))
        made = self._called(function, args, kwargs)
        REGIONS.makes(tensors_of((args, kwargs or {})), tensors_of(made))
        return made

    def _called(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        if function == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        if function == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise _data_written(args[0])
        if function in _HOOKS:
            raise CaptureError(f"forward calls {function.__name__} on a value, and a program has no such hook"
                               f"{users_caller()}\n  Write what the hook does to the gradient as a "
                               "torch.autograd.Function; hooks of parameters may be set outside of forward.")
        if function in _STRIDES and (active := recorder()) is not None and is_users(caller().f_globals):
            active.strides = True
        if function == torch.Tensor.requires_grad.__get__:  # type: ignore[attr-defined]
            return _requires_grad(args[0])
        if getattr(function, "__name__", "") == "_pack_padded_sequence":
            raise CaptureError("a packed sequence has as many rows as the data say (pack_padded_sequence)"
                               f"{users_caller()}\n  Give the recurrent layer the padded batch. Forward in time its "
                               "outputs up to each length are the same, y[row, :length]: mask the others, and read "
                               "last states by y.gather at lengths - 1. Backward in time (bidirectional) they are not: "
                               "flip each row up to its length, run a second layer forward, and flip back.")
        if function is torch.nn.functional.gaussian_nll_loss:
            return _gaussian_likelihood(*args, **(kwargs or {}))
        if function in _COVARIANCES:
            return _COVARIANCES[function](*args, **(kwargs or {}))
        if function in _PRODUCTS and not kwargs and _is_shared_matrix_by_vector(*args):
            return args[1] @ args[0].t()
        if function in (torch.bincount, torch.Tensor.bincount):
            return _counts(*args, **(kwargs or {}))
        if function is torch.autograd.grad:
            return gradient_as_op(*args, **(kwargs or {}))
        if function is torch.nn.functional.ctc_loss:
            return _ctc_loss(*args, **(kwargs or {}))
        rows = asked(function, args, kwargs or {})
        if rows is not NotImplemented:
            return rows
        if function in NUMBERS and (numbers := known_numbers(function, args[0])) is not None:
            return numbers
        if function in READS:
            answer = self._branches.answer(args[0])
            if answer is not None:
                return answer
        if function in (torch.Tensor.lt, torch.Tensor.__lt__) and args[0] in self._drawn and args[1] == 0.0:
            return False  # as layers ask that are never dropped
        made = function(*args, **(kwargs or {}))
        noted(function, args, kwargs or {}, made)
        if function is torch.rand:
            self._drawn[made] = True
        if isinstance(made, torch.Tensor) and function not in _DETACHED and not torch.compiler.is_dynamo_compiling():
            self._refuse_unregistered((*args, *(kwargs or {}).values()))
        return made

    def _refuse_unregistered(self, args: Iterable[Any]) -> None:
        """Raises CaptureError for a tensor that would be trained beside the parameters: it would get no gradient."""
        for arg in chain.from_iterable(arg if isinstance(arg, list | tuple) else (arg,) for arg in args):
            if type(arg) in _REAL and arg.requires_grad and id(arg) not in self._known and torch.is_grad_enabled():
                kind = "a parameter" if isinstance(arg, nn.Parameter) else "a tensor"
                raise CaptureError(
                    f"forward reads {kind} {str(arg.dtype).removeprefix('torch.')}{list(arg.shape)} that requires a "
                    f"gradient and is not registered in the model{users_caller()}\n  Layers in a plain list, a dict or "
                    "another object are not the model's: put them in a torch.nn.ModuleList, ModuleDict or "
                    "ParameterList. If it is not trained: requires_grad_(False).")
