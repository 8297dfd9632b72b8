"""Types that an op does not take together, which a trace, of tensors without data, does not always see.

An op whose tensors are not all of one floating type runs once on small real ones, of sizes that stand for its own.
Where torch refuses them, and takes the same tensors in other types, the model fails so by itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch.fx import Graph

from autoparallel.capture.numbers import with_examples
from autoparallel.capture.passes.editing import Node, source_line
from autoparallel.errors import CaptureError

aten = torch.ops.aten
SMALL = 8  # sizes up to it stay, as numbers of groups and heads do
MOST_ELEMENTS = 1 << 22
#: Ops whose CUDA kernels assert sums, counts or truth of values, which stand-ins need not meet: tried on a CPU only.
ASSERTING = frozenset({aten.masked_scatter.default, aten.repeat_interleave.Tensor, aten.repeat_interleave.self_Tensor,
                       aten._assert_async.default, aten._assert_async.msg})


class Refused(NamedTuple):
    """torch's error for the dtypes of an op, and dtypes that the op takes."""

    error: str
    wanted: tuple[torch.dtype, ...]


def refuse_types(graph: Graph) -> None:
    """Raises CaptureError for an op that does not take its tensors' types."""
    seen: set[object] = set()
    for node in graph.nodes:
        types = {getattr(n.meta.get("val"), "dtype", None) for n in node.all_input_nodes}
        if len(types) == 1 and (one := types.pop()) is not None and one.is_floating_point:
            continue  # most ops, at little cost
        tensors = _tensors_of(node)
        constants = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: None)
        key = (node.target, repr(constants), tuple((t.dtype, t.shape) for t in tensors))
        if key in seen or (refused := refusal(node)) is None:
            seen.add(key)
            continue
        given = ", ".join(f"{_name(t.dtype)}{list(t.shape)}" for t in tensors)
        wanted = next(w for t, w in zip(tensors, refused.wanted, strict=True) if t.dtype != w)
        raise CaptureError(
            f"{node.target} does not take tensors of these types: {given}{source_line(node)}\n"
            f"  torch says: {refused.error}\n"
            f"  Required: types as in ({', '.join(map(_name, refused.wanted))}).\n"
            f"  Write x.to({wanted}) before it, or give the model inputs of that type.")


def refusal(node: Node) -> Refused | None:
    """The refusal of an op whose tensors have dtypes that torch does not take; None if torch takes them, or if small
    example tensors cannot decide it."""
    tensors = _tensors_of(node)
    given = tuple(t.dtype for t in tensors)
    floating = Counter(t for t in given if t.is_floating_point)
    if not given or (floating and len(set(given)) == 1) or any(t.is_complex for t in given) or not _is_plain(node):
        return None
    usual = floating.most_common(1)[0][0] if floating else torch.get_default_dtype()
    cpu = torch.device("cpu")
    error = _error(node, tensors, given, cpu)
    lower = {usual: torch.float32} if len(floating) == 1 else {}  # what a CPU does not compute in it, others may
    if error is not None and usual in lower:
        error = _error(node, tensors, [lower.get(t, t) for t in given], cpu)
    if error is not None and tensors[0].device.type not in ("cpu", "meta"):
        error = None if node.target in ASSERTING else _error(node, tensors, given, tensors[0].device)
    # What a CPU does not implement, the device that a model on the meta device is planned for may.
    if error is None or (isinstance(error, NotImplementedError) and (len(floating) > 1 or tensors[0].is_meta)):
        return None
    pairs = [(usual, torch.int64), (usual, torch.bool), (usual, usual), (torch.bool, torch.bool), (torch.int64,) * 2]
    for fraction, whole in pairs:
        wanted = tuple(fraction if t.is_floating_point else whole for t in given)
        if wanted != given and _error(node, tensors, [lower.get(t, t) for t in wanted], cpu) is None:
            return Refused(str(error).strip().splitlines()[0], wanted)
    return None


def _is_plain(node: Node) -> bool:
    """An op of torch's own that draws no numbers."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "aten" \
        and torch.Tag.nondeterministic_seeded not in target.tags


def _tensors_of(node: Node) -> list[torch.Tensor]:
    """The tensors among the arguments of an op, in order; [] if one of them is not a plain tensor."""
    values: list[Any] = [n.meta.get("val") for n in pytree.tree_leaves((node.args, dict(node.kwargs)))
              if isinstance(n, torch.fx.Node)]
    return values if all(isinstance(value, torch.Tensor) for value in values) else []


def _error(node: Node, tensors: Sequence[torch.Tensor], types: Sequence[torch.dtype], device: torch.device
           ) -> Exception | None:
    """What torch raises on a device for stand-ins of these types, whatever they hold (`_values`)."""
    sizes = sorted({n for t in tensors for n in t.shape if n > SMALL})
    stands = {n: SMALL + 1 + i for i, n in enumerate(sizes)}
    shapes = [[stands.get(n, n) for n in t.shape] for t in tensors]
    counts = [abs(stands.get(n, n)) for n in pytree.tree_leaves((node.args, dict(node.kwargs)))
              if isinstance(n, int) and n]
    if math.prod(counts) * sum(map(math.prod, shapes)) > MOST_ELEMENTS:
        return None
    raised: Exception | None = None
    for value_of in _values(device):
        made = iter([torch.full(shape, value_of(t), dtype=t, device=device)
                     for shape, t in zip(shapes, types, strict=True)])

        def stand_in(leaf: Any, made: Iterator[torch.Tensor] = made) -> Any:
            if isinstance(leaf, torch.fx.Node):
                return next(made)
            leaf = with_examples(leaf)
            return stands.get(leaf, leaf) if type(leaf) is int else leaf

        args, kwargs = torch.fx.node.map_aggregate((node.args, dict(node.kwargs)), stand_in)
        try:
            with torch.no_grad():
                node.target(*args, **kwargs)
        except Exception as error:
            raised = error
        else:
            return None
    return raised


def _values(device: torch.device) -> tuple[Callable[[torch.dtype], int], ...]:
    """What stand-ins hold, by dtype, in the order of attempts. On a CPU first 1, then 0: nobody divides by 0, and row 1
    may be missing. On a GPU, asked only for what a CPU refuses, an assertion that fails in a kernel ends all work of
    the process, so there is one attempt: numbers of rows are 0, truths and numbers to calculate with 1."""
    if device.type == "cpu":
        return lambda dtype: 1, lambda dtype: 0
    return (lambda dtype: int(dtype.is_floating_point or dtype == torch.bool),)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
