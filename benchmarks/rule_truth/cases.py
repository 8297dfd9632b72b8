"""Samples of torch's own op database, captured: a case for each op of the normal form that a sample becomes."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from autoparallel.capture import OpGraph, Ref, capture
from autoparallel.capture.graph import Node, TensorMeta

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

NUM_DRAWS = 2
#: Lengths of the dims of the database's samples: its own, of which 2 and 3 cut few evenly, and some that both do.
LENGTHS: tuple[Mapping[str, int], ...] = ({}, {"S": 6, "M": 12, "L": 24, "XS": 4})
DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool)
READ_AT_MOST = 200


@dataclass(frozen=True)
class Case:
    """One op with its arguments. ``draws``: values of its tensor inputs, several for the same shapes and arguments."""

    graph: OpGraph
    node: Node
    draws: tuple[tuple[Tensor, ...], ...]

    @property
    def inputs(self) -> tuple[TensorMeta, ...]:
        return tuple(self.graph.meta(ref) for ref in self.node.inputs)

    def run(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The op on whole tensors."""
        return run(self.node, values)


class Call(nn.Module):
    """An op on one sample, whose tensors are the inputs."""

    def __init__(self, info: OpInfo, sample: SampleInput) -> None:
        super().__init__()
        self.info = info
        self.leaves, self.spec = pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Tensor))

    @property
    def structure(self) -> object:
        """Equal for samples that differ in their tensors' values only."""
        return self.spec, [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else str(leaf)
                           for leaf in self.leaves]

    def forward(self, *tensors: Tensor) -> Any:
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.info.op(first, *args, **kwargs)


def run(node: Node, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The node's op on these values of its tensor inputs."""
    args, kwargs = called_with(node, values)
    made = node.target(*args, **kwargs)
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)


def called_with(node: Node, values: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The node's arguments with these values of its tensor inputs. (By hand, as it is done most often of all.)"""
    remaining = iter(values)

    def filled(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return type(argument)([filled(each) for each in argument])
        return next(remaining) if isinstance(argument, Ref) else argument

    return filled(node.args), {name: filled(value) for name, value in node.kwargs.items()}


def calls_of(info: OpInfo, num_samples: int, seed: int) -> Iterator[tuple[Call, ...]]:
    """Samples, each drawn several times; ``num_samples`` of each kind of lengths, chosen by ``seed``."""
    dtype = next((dtype for dtype in DTYPES if dtype in info.supported_dtypes("cpu")), None)
    if dtype is None:
        return
    for lengths in LENGTHS:
        with lengths_of_samples(lengths):
            drawn = [_samples(info, dtype, seed + draw) for draw in range(NUM_DRAWS)]
        numbers = list(range(len(drawn[0])))
        if len(numbers) > num_samples:
            numbers = sorted(random.Random(seed).sample(numbers, num_samples))
        for number in numbers:
            first = drawn[0][number]
            equivalent = [made[number] for made in drawn[1:] if number < len(made)]
            yield (first, *(call for call in equivalent if call.structure == first.structure))


def _samples(info: OpInfo, dtype: torch.dtype, seed: int) -> list[Call]:
    """What the database gives until it fails (some samples cannot be had with other lengths)."""
    grad = bool(info.supports_autograd and dtype.is_floating_point)
    found: list[Call] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            for sample in itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=grad), READ_AT_MOST):
                found.append(Call(info, sample))
        except Exception:
            return found
    return found


@contextmanager
def lengths_of_samples(lengths: Mapping[str, int]) -> Iterator[None]:
    """Set the database's names of lengths, wherever they were imported to."""
    prefix = "torch.testing._internal."
    modules = [m for name, m in sys.modules.items()
               if name.startswith((prefix + "opinfo", prefix + "common_methods_invocations"))]
    before = [(m, name, getattr(m, name)) for m in modules for name in lengths if hasattr(m, name)]
    try:
        for module, name, _ in before:
            setattr(module, name, lengths[name])
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def captured(calls: Sequence[Call]) -> OpGraph:
    """The normal form of a sample. Raises CaptureError."""
    tensors = calls[0].tensors
    return capture(calls[0], [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors])


def cases_of(graph: OpGraph, calls: Sequence[Call]) -> list[Case]:
    """A case for each op that reads tensors, with what it reads when the sample's draws run."""
    draws = [_values(graph, [t.detach() for t in call.tensors]) for call in calls]
    return [
        Case(*alone(node, [graph.meta(ref) for ref in node.inputs]),
             tuple(tuple(values[ref] for ref in node.inputs) for values in draws))
        for node in graph.of_kind("op") if node.inputs
    ]


def _values(graph: OpGraph, tensors: Sequence[Tensor]) -> dict[Ref, Tensor]:
    values: dict[Ref, Tensor] = {}
    for node in graph:
        made: Sequence[Tensor] = ()
        if node.kind == "input":
            made = [tensors[int(node.path)]]
        elif node.kind == "buffer":
            made = [graph.constant_tensors[node.path]]
        elif node.kind == "op":
            made = run(node, [values[ref] for ref in node.inputs])
        values.update({Ref(node.index, output): value for output, value in enumerate(made)})
    return values


def alone(node: Node, metas: Sequence[TensorMeta]) -> tuple[OpGraph, Node]:
    """A graph of one op, each of whose operands (as ``metas`` say) is an input of its own."""
    inputs = [Node(i, f"x{i}", "input", None, (), {}, (meta,), path=str(i)) for i, meta in enumerate(metas)]
    numbers = iter(range(len(metas)))
    args, kwargs = pytree.tree_map(
        lambda leaf: Ref(next(numbers)) if isinstance(leaf, Ref) else leaf, (node.args, dict(node.kwargs))
    )
    op = Node(len(inputs), "op", "op", node.target, args, kwargs, node.outputs, no_grad=node.no_grad)
    results = tuple(Ref(op.index, output) for output in range(len(node.outputs)))
    end = Node(op.index + 1, "output", "output", None, results, {}, ())
    spec = pytree.tree_structure(())
    return OpGraph((*inputs, op, end), spec, spec, {}, results, {}, {}), op
