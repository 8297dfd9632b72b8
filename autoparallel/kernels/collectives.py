"""Differentiable redistribution steps, which emitted programs call one line each.

A step changes the placement on one mesh axis. Its backward is the step between the gradients' placements, so it can be
differentiated twice. The table of actions is in `autoparallel.layout.redistribution`. ``source_sizes`` and
``target_sizes`` are the lengths of all ranks' shards along the source's and the target's cut dim; they may be uneven.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from autoparallel.kernels import groups
from autoparallel.kernels.bucket_memory import is_held
from autoparallel.kernels.groups import Axis
from autoparallel.kernels.tracing import is_traced
from autoparallel.layout import Placement, dual, shard
from autoparallel.layout.redistribution import ACTIONS

Sizes = tuple[int, ...]
#: Awaits an issued collective and returns its result.
Finish = Callable[[], torch.Tensor]
#: torch's functional collectives, without the search for an overload at each call.
_c10d = SimpleNamespace(**{name: getattr(torch.ops._c10d_functional, name).default for name in (
    "all_reduce", "all_reduce_", "all_gather_into_tensor", "all_gather_into_tensor_out",
    "all_gather_into_tensor_coalesced", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced",
    "all_to_all_single", "wait_tensor")})


def _no_word(error: RuntimeError) -> None:
    """What `failing.lost` takes the place of where a runtime is loaded."""


#: Called with the error of a collective; raises PeerError where another rank is at fault (set by the runtime).
on_failure: Callable[[RuntimeError], None] = _no_word


#: Called before each collective of a program, in the thread that issues it (set by the runtime); None: nothing is.
before: ContextVar[Callable[[], None] | None] = ContextVar("before", default=None)


@dataclass
class Waited:
    """How often, and for how many seconds, this process has waited for collectives of tensors on the CPU: time in which
    it computes nothing. Devices of their own wait without the host."""

    calls: int = 0
    seconds: float = 0.0


waited = Waited()


def _begin(op: Any, sent: torch.Tensor, *args: Any, **kwargs: Any) -> Finish:
    return _awaiting(_issued(op, sent, *args, **kwargs), sent.device)


def _begin_group(op: Any, sent: Sequence[torch.Tensor], *args: Any) -> list[Finish]:
    """Issue one collective of several tensors."""
    return [_awaiting(pending, sent[0].device) for pending in _issued(op, list(sent), *args)]


def _issued(op: Any, *args: Any, **kwargs: Any) -> Any:
    if (wait := before.get()) is not None:
        wait()
    try:
        return op(*args, **kwargs)
    except RuntimeError as error:
        on_failure(error)
        raise


def _awaiting(pending: torch.Tensor, device: torch.device) -> Finish:
    def finish() -> torch.Tensor:
        started = time.perf_counter()
        try:
            return _c10d.wait_tensor(pending)
        except RuntimeError as error:
            on_failure(error)
            raise
        finally:
            if device.type == "cpu":
                waited.calls += 1
                waited.seconds += time.perf_counter() - started

    return finish


def padded(x: torch.Tensor, length: int, dim: int) -> torch.Tensor:
    """x, zero-padded along ``dim`` to ``length``."""
    if x.shape[dim] == length:
        return x
    return torch.cat([x, x.new_zeros((*x.shape[:dim], length - x.shape[dim], *x.shape[dim + 1 :]))], dim)


def joined(shards: torch.Tensor, dim: int, sizes: Sizes) -> torch.Tensor:
    """[ranks, *the longest shard] -> the whole tensor. Where that takes a copy, rows of shards are copied as they lie.
    (Shards whose cut dim was moved to the front took torch's kernels on CPUs up to twenty times as long.)"""
    if any(size != shards.shape[1 + dim] for size in sizes):
        return torch.cat([shard.narrow(dim, 0, size) for shard, size in zip(shards, sizes, strict=True)], dim)
    return shards.movedim(0, dim).flatten(dim, dim + 1)


def _in_shards(x: torch.Tensor, dim: int, sizes: Sizes) -> torch.Tensor:
    """The inverse of `joined`: the whole tensor -> [ranks, *the longest shard], contiguous."""
    if len(set(sizes)) == 1:
        return x.unflatten(dim, (len(sizes), sizes[0])).movedim(dim, 0).contiguous()
    return torch.stack([padded(part, max(sizes), dim) for part in x.split(list(sizes), dim)])


def begin_all_reduce(x: torch.Tensor, axis: Axis, op: str = "sum") -> Finish:
    return _begin(_c10d.all_reduce, x.contiguous(), op, axis.group_name)


def begin_all_reduce_own(x: torch.Tensor, axis: Axis) -> Finish:
    """All-reduce in place. Nobody else may hold the memory of ``x``. (Saves the copy of a gradient bucket.)"""
    return _begin(_c10d.all_reduce_, x, "sum", axis.group_name)


def _begin_whole(x: torch.Tensor, axis: Axis) -> Finish:
    """All-gather equal shards along dim 0 into memory allocated here.

    Without ``out`` gloo calls the operator "ALLGATHER_COALESCED". Its threads store the name of the last finished
    collective without a lock (``ProcessGroupGloo::runLoop``, torch 2.13), and a name of more than 15 letters lies on
    the heap: two threads that finish at once free it twice. The other collectives used here have shorter names.
    """
    if x.is_complex():  # gloo sends real numbers only
        real = _begin_whole(torch.view_as_real(x.resolve_conj()), axis)
        return lambda: torch.view_as_complex(real())
    if is_traced():  # torch's partitioner knows this form; a pass over the traced graphs puts `all_gather` in its place
        return _begin(_c10d.all_gather_into_tensor, x, axis.size, axis.group_name)
    return _begin(_all_gather, x, axis.size, axis.group_name)


def _all_gather(x: torch.Tensor, ranks: int, group_name: str) -> torch.Tensor:
    whole = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    return _c10d.all_gather_into_tensor_out(x, ranks, group_name, out=whole)


def _merges(axis: Axis, device: torch.device) -> bool:
    """Whether collectives of several tensors on this device can be one. gloo's read memory of the CPU only: those of
    GPU memory end the process."""
    return device.type != "cpu" and groups.sends(groups.group_of(axis), device)


def begin_whole_tensors(shards: Sequence[torch.Tensor], axis: Axis) -> list[Finish]:
    """All-gather equal shards along dim 0 of several tensors: by NCCL as one group of messages."""
    if len(shards) == 1 or not _merges(axis, shards[0].device):
        return [_begin_whole(x, axis) for x in shards]
    return _begin_group(_c10d.all_gather_into_tensor_coalesced, shards, axis.size, axis.group_name)


def begin_sums_of_shards(values: Sequence[torch.Tensor], axis: Axis) -> list[Finish]:
    """Reduce-scatter several tensors into equal shards along dim 0, as `begin_whole_tensors`."""
    if len(values) == 1 or not _merges(axis, values[0].device):
        return [_begin(_c10d.reduce_scatter_tensor, x, "sum", axis.size, axis.group_name) for x in values]
    return _begin_group(_c10d.reduce_scatter_tensor_coalesced, values, "sum", axis.size, axis.group_name)


def begin_all_gather(x: torch.Tensor, axis: Axis, dim: int, sizes: Sizes) -> Finish:
    return _contiguous(_begin_gathered(x, axis, dim, sizes))


def _contiguous(finish: Finish) -> Finish:
    return lambda: finish().contiguous()


def _begin_gathered(x: torch.Tensor, axis: Axis, dim: int, sizes: Sizes) -> Finish:
    """All-gather along ``dim``; the result may lie in memory as its parts came."""
    sent = padded(x, max(sizes), dim).contiguous()
    shape, gathered = sent.shape, _begin_whole(sent, axis)
    return lambda: joined(gathered().unflatten(0, (axis.size, shape[0])), dim, sizes)


def begin_reduce_scatter(x: torch.Tensor, axis: Axis, dim: int, sizes: Sizes) -> Finish:
    return _contiguous(_begin_scattered(x, axis, dim, sizes))


def _begin_scattered(x: torch.Tensor, axis: Axis, dim: int, sizes: Sizes) -> Finish:
    """Reduce-scatter along ``dim``; the result may be a part of what came."""
    sent = _in_shards(x, dim, sizes).flatten(0, 1)
    reduced = _begin(_c10d.reduce_scatter_tensor, sent, "sum", axis.size, axis.group_name)
    return lambda: reduced().narrow(dim, 0, sizes[axis.rank])


def _begin_all_to_all(x: torch.Tensor, axis: Axis, received: Sequence[int], sent: Sequence[int]) -> Finish:
    return _begin(_c10d.all_to_all_single, x, received, sent, axis.group_name)


def all_reduce_tensor(x: torch.Tensor, axis: Axis, op: str = "sum") -> torch.Tensor:
    return begin_all_reduce(x, axis, op)()


def all_gather_tensor(x: torch.Tensor, axis: Axis, dim: int, sizes: Sizes) -> torch.Tensor:
    return begin_all_gather(x, axis, dim, sizes)()


def all_to_all_tensor(
    x: torch.Tensor, axis: Axis, source: int, source_sizes: Sizes, target: int, target_sizes: Sizes
) -> torch.Tensor:
    """All-to-all: split along dim ``target``, send part r to rank r, concatenate received parts along ``source``."""
    return begin_all_to_all(x, axis, source, source_sizes, target, target_sizes)()


def begin_all_to_all(
    x: torch.Tensor, axis: Axis, source: int, source_sizes: Sizes, target: int, target_sizes: Sizes
) -> Finish:
    if x.is_complex():  # gloo sends real numbers only
        real = torch.view_as_real(x.resolve_conj())
        begun = begin_all_to_all(real, axis, source, source_sizes, target, target_sizes)
        return lambda: torch.view_as_complex(begun())
    shards = x.split(list(target_sizes), dim=target)
    shape, sent = list(shards[axis.rank].shape), [p.numel() for p in shards]
    shapes = [[*shape[:source], size, *shape[source + 1 :]] for size in source_sizes]
    counts = [int(torch.Size(s).numel()) for s in shapes]
    message = (_in_shards(x, target, target_sizes).view(-1) if len(set(target_sizes)) == 1
               else torch.cat([p.reshape(-1) for p in shards]))
    received = _begin_all_to_all(message, axis, counts, sent)
    return lambda: torch.cat([r.reshape(s) for r, s in zip(received().split(counts), shapes, strict=True)], dim=source)


def shifted(values: Sequence[torch.Tensor], axis: Axis) -> tuple[torch.Tensor, ...]:
    """The values of the previous rank of a ring, in one message. All ranks' values have these shapes and one dtype."""
    return begin_shifted(values, axis)()


def begin_shifted(values: Sequence[torch.Tensor], axis: Axis) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Begin `shifted`; returns a function that awaits the values."""
    numel = sum(value.numel() for value in values)
    counts = [[numel if r == (axis.rank + by) % axis.size else 0 for r in range(axis.size)] for by in (-1, 1)]
    message = _begin_all_to_all(torch.cat([value.reshape(-1) for value in values]), axis, *counts)
    shapes, sizes = [value.shape for value in values], [value.numel() for value in values]
    return lambda: tuple(part.view(shape) for part, shape in zip(message().split(sizes), shapes, strict=True))


def begin_rows_exchanged(values: Sequence[torch.Tensor], axis: Axis, received: Sequence[int], sent: Sequence[int]
                         ) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Begin `rows_exchanged_together`, without gradients; returns a function that awaits the rows."""
    begun = list[Finish]()
    for x in values:
        width = math.prod(x.shape[1:])
        counts = [[n * width for n in numbers] for numbers in (received, sent)]
        begun.append(_begin_all_to_all(x.reshape(-1), axis, *counts))
    shapes, rows = [x.shape[1:] for x in values], sum(received)
    return lambda: tuple(finish().view(rows, *shape) for finish, shape in zip(begun, shapes, strict=True))


class _Exchange(torch.autograd.Function):
    """All-to-all of rows (dim 0) with any counts; backward sends the rows' gradients back."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, received: Sequence[int], sent: Sequence[int], *values: torch.Tensor
                ) -> tuple[torch.Tensor, ...]:
        ctx.reverse = axis, sent, received
        ctx.set_materialize_grads(False)
        return begin_rows_exchanged(values, axis, received, sent)()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        back = iter(rows_exchanged_together([g for g in gradients if g is not None], *ctx.reverse))
        return None, None, None, *(None if g is None else next(back) for g in gradients)


def rows_exchanged_together(values: Sequence[torch.Tensor], axis: Axis, received: Sequence[int], sent: Sequence[int]
                            ) -> tuple[torch.Tensor, ...]:
    """`exchanged_rows` of several tensors with as many rows, all on their way at once."""
    return _Exchange.apply(axis, received, sent, *values) if values else ()


def exchanged_rows(x: torch.Tensor, axis: Axis, received: Sequence[int], sent: Sequence[int]) -> torch.Tensor:
    """Send the first ``sent[0]`` rows of x to rank 0, and so on; returns ``received[r]`` rows of each rank r, in order.
    Differentiable."""
    return rows_exchanged_together([x], axis, received, sent)[0]


def slice_tensor(x: torch.Tensor, axis: Axis, dim: int, sizes: Sizes) -> torch.Tensor:
    return x.narrow(dim, sum(sizes[: axis.rank]), sizes[axis.rank]).contiguous()


def pad_tensor(x: torch.Tensor, axis: Axis, dim: int, sizes: Sizes) -> torch.Tensor:
    whole = x.new_zeros((*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]))
    whole.narrow(dim, sum(sizes[: axis.rank]), sizes[axis.rank]).copy_(x)
    return whole


def _kept_or_zeros(x: torch.Tensor, kept: bool) -> torch.Tensor:
    return x.clone() if kept else torch.zeros_like(x)


# An op, so that the graphs traced on all ranks have the same nodes, of which the same are merged or left out.
_library = torch.library.Library("autoparallel", "FRAGMENT")
_library.define("kept_or_zeros(Tensor x, bool kept) -> Tensor")
_library.impl("kept_or_zeros", _kept_or_zeros, "CompositeExplicitAutograd")
torch.library.register_fake("autoparallel::kept_or_zeros", lambda x, kept: torch.empty_like(x), lib=_library)
# A bucket of gradients, flat. A compiler writes its parts into it directly, and `sum_bucket` is an all-reduce in place
# (Inductor copies the operand of `all_reduce`, unless nothing else reads it).
_library.define("bucket(Tensor[] parts) -> Tensor")
_library.impl("bucket", lambda parts: torch.cat([part.reshape(-1) for part in parts]), "CompositeExplicitAutograd")
torch.library.register_fake("autoparallel::bucket", lambda parts: parts[0].new_empty(
    sum(part.numel() for part in parts)), lib=_library)
_library.define("sum_bucket(Tensor(a!) bucket, str reduce_op, str group_name) -> Tensor(a!)")
_library.impl("sum_bucket", lambda bucket, reduce_op, group_name: _c10d.all_reduce_(bucket, reduce_op, group_name),
              "CompositeExplicitAutograd")
torch.library.register_fake("autoparallel::sum_bucket", lambda bucket, reduce_op, group_name: bucket, lib=_library)
# Two forms for compilers that plan memory and ops in place, as Inductor does. They see that what is sent is in use
# until it is awaited: `awaited` names it, as torch's `wait_tensor` does not.
_library.define("all_gather(Tensor x, int ranks, str group_name) -> Tensor")
_library.impl("all_gather", _all_gather, "CompositeExplicitAutograd")
torch.library.register_fake("autoparallel::all_gather", lambda x, ranks, group_name: x.new_empty(
    (ranks * x.shape[0], *x.shape[1:])), lib=_library)
_library.define("awaited(Tensor(a) received, Tensor sent) -> Tensor(a)")
_library.impl("awaited", lambda received, sent: _c10d.wait_tensor(received), "CompositeExplicitAutograd")
torch.library.register_fake("autoparallel::awaited", lambda received, sent: received, lib=_library)
torch.fx.node.has_side_effect(torch.ops.autoparallel.awaited.default)  # as `wait_tensor` has


def begin_action(action: str, x: torch.Tensor, axis: Axis, a: Placement, a_sizes: Sizes, b: Placement, b_sizes: Sizes
                 ) -> Finish:
    """Begin one action of the redistribution table, from placement a to placement b. Those without communication are
    done at once. Gathered and scattered tensors are made contiguous.

    An interleaved shard is a plain one of the tensor whose parts are dealt to the ranks (`dealt`), and treated so."""
    if a.is_interleaved or b.is_interleaved:
        return _begin_interleaved(action, x, axis, a, a_sizes, b, b_sizes)
    begun = begin_plain(action, x, axis, a, a_sizes, b, b_sizes)
    return _contiguous(begun) if action in ("all_gather", "reduce_scatter") else begun


def begin_plain(action: str, x: torch.Tensor, axis: Axis, a: Placement, a_sizes: Sizes, b: Placement, b_sizes: Sizes
                ) -> Finish:
    """`begin_action` between plain shards, whose result lies in memory as it came: for who copies it elsewhere."""
    match action:
        case "all_reduce":
            return begin_all_reduce(x, axis)
        case "all_gather":
            return _begin_gathered(x, axis, a.dim, a_sizes)
        case "reduce_scatter":
            return _begin_scattered(x, axis, b.dim, b_sizes)
        case "all_to_all":
            return begin_all_to_all(x, axis, a.dim, a_sizes, b.dim, b_sizes)
    made = _local_action(action, x, axis, a, a_sizes, b, b_sizes)
    return lambda: made


def _begin_interleaved(action: str, x: torch.Tensor, axis: Axis, a: Placement, a_sizes: Sizes, b: Placement,
                       b_sizes: Sizes) -> Finish:
    if a.is_shard and b.is_shard and a.dim == b.dim:
        return _begin_same_dim(x, axis, a, b)
    if b.is_interleaved:
        x = dealt(x, b, axis.size)
    begun = begin_action(action, x, axis, _plain(a), a_sizes, _plain(b), b_sizes)
    return (lambda: gathered_up(begun(), a, axis.size)) if a.is_interleaved else begun


def _plain(placement: Placement) -> Placement:
    return shard(placement.dim) if placement.is_shard else placement


def dealt(x: torch.Tensor, cut: Placement, ranks: int) -> torch.Tensor:
    """A whole tensor, whose dim ``cut.dim`` is (part, rank, place), with that dim as (rank, part, place), so that plain
    shards of it are the interleaved ones."""
    whole = x.unflatten(cut.dim, (cut.parts, ranks, -1))
    return whole.transpose(cut.dim, cut.dim + 1).flatten(cut.dim, cut.dim + 2)


def gathered_up(x: torch.Tensor, cut: Placement, ranks: int) -> torch.Tensor:
    """The inverse of `dealt`."""
    dealt = x.unflatten(cut.dim, (ranks, cut.parts, -1))
    return dealt.transpose(cut.dim, cut.dim + 1).flatten(cut.dim, cut.dim + 2).contiguous()


def _begin_same_dim(x: torch.Tensor, axis: Axis, a: Placement, b: Placement) -> Finish:
    """S(d;k) to S(d;l): an all-to-all of the elements that a rank lacks. (Both cuts are even.)"""
    if x.is_complex():  # gloo sends real numbers only
        begun = _begin_same_dim(torch.view_as_real(x.resolve_conj()), axis, a, b)
        return lambda: torch.view_as_complex(begun())
    blocks = x.unflatten(a.dim, (math.lcm(a.parts, b.parts), -1)).movedim(a.dim, 0)
    order, sent, received, place = _exchanged_blocks(a.parts, b.parts, axis.size, axis.rank)
    width = blocks[0].numel()
    message = blocks[_index(order, x.device)].reshape(-1)
    finish = _begin_all_to_all(message, axis, [width * n for n in received], [width * n for n in sent])
    return lambda: joined(finish().view(blocks.shape)[_index(place, x.device)], a.dim, (blocks.shape[1 + a.dim],)
                          ).contiguous()


@cache
def _exchanged_blocks(source: int, target: int, ranks: int, rank: int) -> tuple[tuple[int, ...], ...]:
    """Of a dim in lcm(source, target) * ranks blocks, of which a rank goes from an interleaved shard of ``source``
    parts to one of ``target`` parts: the order in which it sends its blocks, how many to and from each rank, and the
    place of each that it wants in what it received."""
    count = math.lcm(source, target) * ranks

    def held(parts: int, by: int) -> list[int]:    # by Python's numbers: tensors have no values while a graph is traced
        length = count // (parts * ranks)
        return [(part * ranks + by) * length + place for part in range(parts) for place in range(length)]

    mine, wanted = held(source, rank), held(target, rank)
    to = [[mine.index(block) for block in held(target, other) if block in mine] for other in range(ranks)]
    came = [[block for block in wanted if block in held(source, other)] for other in range(ranks)]
    received = [block for blocks in came for block in blocks]
    return (tuple(at for places in to for at in places), tuple(map(len, to)), tuple(map(len, came)),
            tuple(received.index(block) for block in wanted))


def _index(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.long, device=device)


def _local_action(action: str, x: torch.Tensor, axis: Axis, a: Placement, a_sizes: Sizes, b: Placement, b_sizes: Sizes
                  ) -> torch.Tensor:
    match action:
        case "none":
            return x
        case "mask":
            return torch.ops.autoparallel.kept_or_zeros(x, axis.rank == 0)
        case "pad":
            return pad_tensor(x, axis, a.dim, a_sizes)
        case "slice":
            return slice_tensor(x, axis, b.dim, b_sizes)
    raise ValueError(f"unknown action {action!r}")


def _redistributed(x: torch.Tensor, axis: Axis, source: Placement, target: Placement, source_sizes: Sizes,
                   target_sizes: Sizes) -> torch.Tensor:
    action = ACTIONS[source.kind, target.kind][0]
    if action == "none":
        return x.view_as(x)
    return begin_action(action, x, axis, source, source_sizes, target, target_sizes)()


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, source: Placement, target: Placement, source_sizes: Sizes,
                target_sizes: Sizes, sum_dtype: torch.dtype | None) -> torch.Tensor:
        ctx.step, ctx.sum_dtype = (axis, source, target, source_sizes, target_sizes), sum_dtype
        ctx.set_materialize_grads(False)  # of a parameter in a bucket with others that alone have a gradient: none
        return _redistributed(x, axis, source, target, source_sizes, target_sizes)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if gradient is None:
            return (None,) * 7
        axis, source, target, source_sizes, target_sizes = ctx.step
        summed = gradient.to(ctx.sum_dtype or gradient.dtype)
        back = act(summed, axis, dual(target), dual(source), target_sizes, source_sizes)
        return back.to(gradient.dtype), None, None, None, None, None, None


class _SumInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, source: Placement, target: Placement) -> torch.Tensor:
        ctx.step = axis, dual(target), dual(source)
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(x)
        begin_all_reduce_own(x, axis)()
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None if gradient is None else act(gradient, *ctx.step), None, None, None


def all_reduce_in_place(x: torch.Tensor, axis: str, source: str, target: str) -> torch.Tensor:
    """`all_reduce` that nobody else reads ``x`` after: in its own memory, unless another tensor has it too."""
    if is_traced() or is_held(x) or not x.is_contiguous():
        return redistribute(x, axis, source, target)
    return _SumInPlace.apply(x, groups.current(axis), Placement.parse(source), Placement.parse(target))


class _SumNumbers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, source: Placement, target: Placement, *values: torch.Tensor
                ) -> tuple[torch.Tensor, ...]:
        ctx.step = axis, source, target
        ctx.set_materialize_grads(False)
        summed = begin_all_reduce(torch.cat([value.reshape(1) for value in values]), axis)()
        made = tuple(part.clone().view(value.shape) for part, value in zip(summed.split(1), values, strict=True))
        ctx.mark_non_differentiable(*(x for x, graded in zip(made, ctx.needs_input_grad[3:], strict=True)
                                      if not graded))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        axis, source, target = ctx.step
        return None, None, None, *(None if g is None else act(g, axis, dual(target), dual(source)) for g in gradients)


def all_reduce_numbers(axis: str, source: str, target: str, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`all_reduce` of several tensors of one element and one dtype, in one message."""
    return _SumNumbers.apply(groups.current(axis), Placement.parse(source), Placement.parse(target), *values)


def act(x: torch.Tensor, axis: Axis, source: Placement, target: Placement, source_sizes: Sizes = (),
        target_sizes: Sizes = (), sum_dtype: torch.dtype | None = None) -> torch.Tensor:
    """`redistribute` on an `Axis` and parsed placements."""
    if x.requires_grad and torch.is_grad_enabled():
        return _Redistribute.apply(x, axis, source, target, source_sizes, target_sizes, sum_dtype)
    return _redistributed(x, axis, source, target, source_sizes, target_sizes)


def redistribute(
    x: torch.Tensor, axis: str, source: str, target: str, source_sizes: Sizes = (), target_sizes: Sizes = (),
    sum_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Change the placement of a local shard on mesh axis ``axis`` (``"S(0)"``, ``"R"``, ...). Gradients are summed in
    ``sum_dtype`` if given."""
    return act(x, groups.current(axis), Placement.parse(source), Placement.parse(target), source_sizes, target_sizes,
               sum_dtype)


def _named(name: str, doc: str) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, axis: str, source: str, target: str, source_sizes: Sizes = (),
             target_sizes: Sizes = (), sum_dtype: torch.dtype | None = None) -> torch.Tensor:
        return redistribute(x, axis, source, target, source_sizes, target_sizes, sum_dtype)

    step.__name__ = step.__qualname__ = name
    step.__doc__ = doc
    step.__module__ = __name__
    return step


all_gather = _named("all_gather", "S -> R or I: the whole tensor on every rank of the axis.")
all_reduce = _named("all_reduce", "P -> I or R: the sum on every rank of the axis.")
reduce_scatter = _named("reduce_scatter", "P -> S: one shard of the sum on each rank.")
all_to_all = _named("all_to_all", "S -> S': shards along another dim.")
take_shard = _named("take_shard", "I or R -> S: each rank slices its shard; no communication forward.")
place_shard = _named("place_shard", "S -> P: the shard, zero-padded to the whole; no communication.")
only_first = _named("only_first", "I or R -> P: the value on the first rank, zeros elsewhere; no communication.")
reduce_gradient = _named("reduce_gradient", "I -> R: identity forward; all-reduce backward.")
share_gradient = _named("share_gradient", "R -> I: identity forward; backward keeps the first rank's gradient.")

STEP_FUNCTIONS: dict[tuple[str, str], Callable[..., torch.Tensor]] = {
    ("S", "R"): all_gather,
    ("S", "I"): all_gather,
    ("S", "S"): all_to_all,
    ("S", "P"): place_shard,
    ("P", "I"): all_reduce,
    ("P", "R"): all_reduce,
    ("P", "S"): reduce_scatter,
    ("I", "R"): reduce_gradient,
    ("I", "S"): take_shard,
    ("I", "P"): only_first,
    ("R", "I"): share_gradient,
    ("R", "S"): take_shard,
    ("R", "P"): only_first,
}


def item(values: Sequence[torch.Tensor], index: int) -> torch.Tensor:
    """Result number ``index`` of an op with several results."""
    return values[index]
