"""Whether the code that Inductor generated leaves memory alone while a collective uses it.

From the issue of a collective to its wait, what it sends may be read and not written, and what it receives neither.
Inductor plans memory by a model of its own; here its Python code is read, whatever it planned.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import autoparallel.kernels.collectives  # noqa: F401  its ops are looked up by name

_COLLECTIVES = ("torch.ops._c10d_functional.", "torch.ops.autoparallel.all_gather.")
_WAIT = "torch.ops._c10d_functional.wait_tensor.default"
_LOOKS = ("assert_size_stride", "assert_alignment", "run_intermediate_hooks")


@dataclass(frozen=True)
class Memory:
    """Elements ``begin`` to ``end`` of the allocation that the name ``base`` got."""

    base: str
    begin: float = 0
    end: float = math.inf

    def overlaps(self, other: Memory) -> bool:
        return self.base == other.base and self.begin < other.end and other.begin < self.end


@dataclass(frozen=True)
class InFlight:
    """A collective that is not awaited yet."""

    call: str
    sent: Memory
    received: Memory


def misuse_of_memory(code: str) -> str | None:
    """The first statement of a wrapper's ``call`` that uses memory which a collective still uses; None if none does."""
    tree = ast.parse(code)
    reader = _Reader(dict(_written_by_kernels(tree)))
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name == "call":
            for statement in _statements(function.body):
                found = reader.read(statement)
                if found is not None:
                    return found
    return None


class _Reader:
    """Statements one by one. ``memory``: of each name; ``written``: kernel -> whether it writes each argument."""

    def __init__(self, written: dict[str, Sequence[bool]]) -> None:
        self.written = written
        self.memory: dict[str, Memory] = {}
        self.in_flight: list[InFlight] = []

    def read(self, statement: ast.stmt) -> str | None:
        """Follow a statement; what is wrong with it."""
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            made = statement.targets[0].id
            same = self._of(statement.value)
            self.memory[made] = same or Memory(made)
            return None if same else self._call(statement.value, self.memory[made])
        return self._call(statement.value, None) if isinstance(statement, ast.Expr) else None

    def _of(self, value: ast.expr) -> Memory | None:
        """The memory that an expression names; None if it makes a new one."""
        if isinstance(value, ast.Name):
            return self.memory.setdefault(value.id, Memory(value.id))
        if isinstance(value, ast.Call) and _name(value.func) in ("reinterpret_tensor", "alloc_from_pool"):
            whole = self._of(value.args[0])
            if whole is None or _name(value.func) == "alloc_from_pool":
                return whole
            size, stride, offset = (ast.literal_eval(arg) for arg in value.args[1:4])
            length = sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1 if math.prod(size) else 0
            return Memory(whole.base, whole.begin + offset, whole.begin + offset + length)
        return None

    def _call(self, value: ast.expr, made: Memory | None) -> str | None:
        if not isinstance(value, ast.Call) or (name := _name(value.func)) in _LOOKS:
            return None
        memories = [self._of(arg) for arg in value.args]
        if name == _WAIT:
            self.in_flight = [c for c in self.in_flight if memories[0] is None or c.received.base != memories[0].base]
            return None
        uses = [(memory, writes) for memory, writes in zip(memories, self._writes(name, value), strict=False) if memory]
        outs = [self._of(keyword.value) for keyword in value.keywords if keyword.arg == "out"]
        uses += [(memory, True) for memory in outs if memory]
        for memory, writes in uses:
            for pending in self.in_flight:
                if memory.overlaps(pending.received) or (writes and memory.overlaps(pending.sent)):
                    return f"{name} uses {memory.base}, before what {pending.call} sends and receives is awaited"
        if name.startswith(_COLLECTIVES) and uses:
            sent = uses[0][0]
            self.in_flight.append(InFlight(f"{name} of {sent.base}", sent, made or (*filter(None, outs), sent)[0]))
        return None

    def _writes(self, name: str, call: ast.Call) -> Sequence[bool]:
        """Whether a call writes each of its positional arguments."""
        kernel = name.removesuffix(".run")
        if kernel in self.written:
            return self.written[kernel]
        if name.startswith("torch.ops.higher_order."):
            return self._writes_of_inner(call)
        if name.startswith("torch.ops."):
            op: Any = torch.ops
            for part in name.split(".")[2:]:
                op = getattr(op, part)
            schema = op._schema if hasattr(op, "_schema") else getattr(op, op.overloads()[0])._schema
            return [bool(a.alias_info and a.alias_info.is_write) for a in schema.arguments if not a.kwarg_only]
        return [name.endswith("_") and number == 0 for number in range(len(call.args))]

    def _writes_of_inner(self, call: ast.Call) -> Sequence[bool]:
        """Whether a higher-order op writes each of its arguments: as the op among them does, whose arguments follow it
        (`graphsafe_run_with_rng_state(op, *args)`). Without such an op all count as written."""
        named = [number for number, arg in enumerate(call.args) if _name(arg).startswith("torch.ops.")]
        if not named:
            return [True] * len(call.args)
        inner = ast.Call(call.args[named[0]], call.args[named[0] + 1:], call.keywords)
        return [*(False for _ in range(named[0] + 1)), *self._writes(_name(inner.func), inner)]


def _written_by_kernels(tree: ast.Module) -> Iterator[tuple[str, Sequence[bool]]]:
    """Kernels that the code defines: C++ ones tell by their arguments' types, Triton's by their names."""
    for statement in tree.body:
        if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)):
            continue
        kernel, made = _name(statement.targets[0]), statement.value
        if _name(made.func) == "async_compile.cpp_pybinding":
            yield kernel, [not kind.startswith("const") for kind in ast.literal_eval(made.args[0])]
        elif _name(made.func) == "async_compile.triton":
            arguments = re.search(rf"def {re.escape(kernel)}\((.*?)\):", ast.literal_eval(made.args[1]), re.DOTALL)
            names = arguments[1].split(",") if arguments else []
            yield kernel, ["out_ptr" in name or "ws_ptr" in name for name in names]


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _statements(statement.body)
        else:
            yield statement


def _name(expression: ast.expr) -> str:
    """The dotted name of what is called or assigned to; "" if it has none."""
    return ast.unparse(expression) if isinstance(expression, (ast.Name, ast.Attribute)) else ""
