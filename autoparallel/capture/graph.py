"""The operator graph: what capture hands to everything after it.

    OpGraph
      nodes     in execution order: placeholders (parameter, buffer, input), ops, one output
      Node      target, args with `Ref`s in place of tensors, what each output looks like, where it came from
      Ref       (node index, output index): one tensor value
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree

from autoparallel.capture.dependencies import Dependencies
from autoparallel.capture.left import Left
from autoparallel.ops.user_function import user_function

PLAIN = (int, float, str, type(None))
_RESHAPE, _EXPAND = torch.ops.aten.reshape.default, torch.ops.aten.expand.default


@dataclass(frozen=True)
class TensorMeta:
    """Global shape and dtype of a value, and whether a gradient flows back through it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class Ref:
    """One tensor value: output ``output`` of node ``node``."""

    node: int
    output: int = 0

    def __repr__(self) -> str:
        return f"Ref(node={self.node}, output={self.output})"


def _add_refs(value: object, found: list[Ref]) -> None:
    """Those in arguments, which are nested as torch.fx nests them (torch's pytrees find the same, in a few times as
    long)."""
    if isinstance(value, (tuple, list)):
        for one in value:
            if isinstance(one, Ref):
                found.append(one)
            elif not isinstance(one, PLAIN):
                _add_refs(one, found)
    elif isinstance(value, Mapping):
        _add_refs([*value.values()], found)


@dataclass(frozen=True)
class Node:
    """One value or op of the program.

    ``kind`` is parameter, buffer, input, op or output. ``args``/``kwargs`` hold Refs where the op reads tensors.
    ``module_path`` and ``source`` say where in the user's code it came from; ``path`` is the parameter's or buffer's
    name in the model, or the input's place in the call. ``no_grad`` ops run under torch.no_grad.
    """

    index: int
    name: str
    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[TensorMeta, ...]
    module_path: str = ""
    source: str = ""
    path: str = ""
    no_grad: bool = False

    @cached_property
    def inputs(self) -> tuple[Ref, ...]:
        """The tensors that the node reads, in argument order (a tensor read twice occurs twice)."""
        found: list[Ref] = []
        _add_refs(self.args, found)
        if self.kwargs:
            _add_refs(self.kwargs, found)
        return tuple(found)

    @property
    def op_name(self) -> str:
        """``aten.linear.default`` for ops, a user's Function by its own name, the kind for everything else."""
        if self.kind != "op":
            return self.kind
        return self.args[0].partition("(")[0] if self.target is user_function else _name_of(self.target)

    def __str__(self) -> str:
        where = f" in {self.module_path}" if self.module_path else ""
        return f"{self.name} ({self.op_name}{where})"


@cache
def _name_of(target: object) -> str:
    return str(target)


@dataclass(frozen=True)
class OpGraph:
    """A traced program.

    ``in_spec``/``out_spec`` are the pytree structures of ``(args, kwargs)`` and of what forward returns; ``constants``
    are the non-tensor leaves of the call by position; ``outputs`` lists the leaves of the results (Refs or Python
    values); ``mutations`` maps buffer names to the value that each has after the call; ``aliases`` maps every other
    name of a tied parameter or buffer to the name under which the graph knows it; ``dependencies`` are what the trace
    read in addition to the arguments; ``numbers`` are the leaves of the call that are read at each call
    (`numbers.Number` in the arguments of ops), ``fixed`` those that could not be, with the reason; ``left`` are
    attributes whose values are the last of ``outputs``.
    """

    nodes: tuple[Node, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    constants: Mapping[int, Any]
    outputs: tuple[Any, ...]
    mutations: Mapping[str, Ref]
    aliases: Mapping[str, str]
    constant_tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    dependencies: Dependencies | None = None
    numbers: tuple[int, ...] = ()
    fixed: Mapping[int, str] = field(default_factory=dict)
    left: tuple[Left, ...] = ()

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def meta(self, ref: Ref) -> TensorMeta:
        return self.nodes[ref.node].outputs[ref.output]

    def of_kind(self, *kinds: str) -> list[Node]:
        return [node for node in self.nodes if node.kind in kinds]

    @cached_property
    def consumers(self) -> Mapping[Ref, tuple[tuple[int, int], ...]]:
        """For each value the (node, input position) pairs that read it, in execution order."""
        found: dict[Ref, list[tuple[int, int]]] = {}
        for node in self.nodes:
            for position, ref in enumerate(node.inputs):
                found.setdefault(ref, []).append((node.index, position))
        return {ref: tuple(uses) for ref, uses in found.items()}

    @cached_property
    def sparse_tables(self) -> Mapping[str, float]:
        """The trained tables whose gradients are sparse, by name: the share of their rows that a call looks up at
        most."""
        from autoparallel.capture.sparse import sparse_tables

        return sparse_tables(self)

    @cached_property
    def op_kinds(self) -> Mapping[int, int]:
        """For each op a number that is the same for ops with the same `op_signature`."""
        kinds, metas = dict[object, int](), dict[TensorMeta, int]()
        looks: dict[int, list[int]] = {}  # by outputs, which many nodes share: numbers of what they look like
        for node in self.nodes:
            if id(node.outputs) not in looks:
                looks[id(node.outputs)] = [metas.setdefault(meta, len(metas)) for meta in node.outputs]
        outputs, found = [looks[id(node.outputs)] for node in self.nodes], {}
        for node in self.of_kind("op"):
            seen = op_signature(self, node, outputs.__getitem__)
            found[node.index] = kinds.setdefault(seen, len(kinds))
        return found

    @cached_property
    def fingerprint(self) -> str:
        """Changes when the program, a shape, a dtype or a parameter's name changes; the same on every machine."""
        return hashlib.sha256("".join(self.lines()).encode()).hexdigest()[:16]

    def described(self) -> list[str]:
        """The text of the fingerprint, line by line, with the user's line for each op."""
        count, lines = len(self.nodes), self.lines()
        ops = (f"{node}: {line.strip()} {node.source}" for node, line in zip(self.nodes, lines[:count], strict=True))
        return [*ops, *(line.strip() for line in lines[count:])]

    def lines(self) -> list[str]:
        """Each node as a line of text: op, arguments, looks of its outputs; then each update of a buffer. Devices,
        which differ between ranks, are told as the CPU."""
        lines, looks = list[str](), dict[int, str]()
        for node in self.nodes:
            if (made := looks.get(id(node.outputs))) is None:
                made = looks[id(node.outputs)] = str([(m.shape, m.dtype, m.requires_grad) for m in node.outputs])
            kwargs = sorted(node.kwargs.items(), key=str) if node.kwargs else "[]"
            line = f"{node.op_name}|{node.path}|{node.args}|{kwargs}|{made}\n"
            lines.append(_DEVICE.sub("device(type='cpu')", line) if "device(type=" in line else line)
        return [*lines, *(f"update|{name}|{ref}\n" for name, ref in self.mutations.items())]


#: A device as `repr` tells it.
_DEVICE = re.compile(r"device\(type='\w+'(, index=\d+)?\)")


def op_signature(graph: OpGraph, node: Node, looks: Callable[[int], Sequence[object]] | None = None
                 ) -> tuple[object, ...]:
    """Equal for two ops if and only if rules and prices cannot tell them apart. ``looks``: the values that represent
    the `TensorMeta`s of a node's outputs."""
    looks = looks or (lambda index: graph.nodes[index].outputs)
    return (node.op_name, _without_refs(node.args), _without_refs(node.kwargs) if node.kwargs else (),
            tuple([looks(ref.node)[ref.output] for ref in node.inputs]), tuple(looks(node.index)), copies(graph, node))


def _without_refs(value: object) -> object:
    """Arguments as a hashable value with every Ref replaced by a mark."""
    if isinstance(value, Ref):
        return "ref"
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(["ref" if isinstance(v, Ref) else v if isinstance(v, PLAIN) else _without_refs(v) for v in value])
    if isinstance(value, Mapping):
        return tuple(sorted((k, _without_refs(v)) for k, v in value.items()))
    return str(value)


def copies(graph: OpGraph, node: Node) -> bool:
    """Whether a reshape cannot be a view: its input is an expanded tensor, whose elements lie on one another."""
    return node.target is _RESHAPE and graph.nodes[node.inputs[0].node].target is _EXPAND


def is_floating(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def on_device(op: Any, kwargs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """An op's keyword arguments, for a device other than the one that it was traced on. Tensors that are made without
    a device (numbers of ``torch.where``) are made there too: made on the host, each call would copy them and wait."""
    made = {k: device if isinstance(v, torch.device) else v for k, v in kwargs.items() if k != "pin_memory"}
    return made if device.type == "cpu" or not _makes_tensors(op) else {**made, "device": device}


@cache
def _makes_tensors(op: Any) -> bool:
    """Whether an op makes a tensor on a device from numbers alone."""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    arguments = op._schema.arguments
    return any(a.name == "device" for a in arguments) and not any("Tensor" in str(a.type) for a in arguments)
