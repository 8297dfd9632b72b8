"""Lines that the data say whether to run: loops over places that are hit, and branches that save work.

They are run for all, if all that they do is to write rows (`ragged`), by the source of the function that is running;
what would not be come by is not written then.
"""

from __future__ import annotations

import ast
import sys
import traceback
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from autoparallel.capture.remedies import instead, lines_at
from autoparallel.capture.tracing.frames import OWN, function_source, statement_at
from autoparallel.errors import CaptureError

Tensor = torch.Tensor
#: Methods that write rows.
WRITES = frozenset({"index_add_"})


def refused(what: str) -> CaptureError:
    """A CaptureError about ``what``, with the user's line."""
    frame = sys._getframe(1)
    while "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename.startswith(OWN):
        if frame.f_back is None:
            break
        frame = frame.f_back
    place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    lines = [line for line in lines_at(traceback.extract_stack(frame)) if not line.path.startswith(OWN)
             and "/torch/" not in line.path]
    return CaptureError(f"{what}: a shape depends on the data\n  at {place}\n"
                        + instead(lines, "Write torch.where or a mask, so that the shape is known beforehand; or "
                                "autoparallel.bound(mask, at_most=n).take(x), which pads rows to n."))


@dataclass(frozen=True)
class Chosen:
    """A place in a loop over places: a number; as a tensor it has ``rank`` dims of length 1."""

    number: int
    rank: int = 1

    def __getitem__(self, index: Any) -> Chosen:
        return Chosen(self.number, 0)

    def __index__(self) -> int:
        return self.number

    __int__ = item = tolist = __index__

    def squeeze(self, *_: int) -> Chosen:
        return Chosen(self.number, 0)

    def __format__(self, spec: str) -> str:
        return format(self.number, spec)

    def __eq__(self, other: object) -> bool:
        return self.number == (other.number if isinstance(other, Chosen) else other)

    def __hash__(self) -> int:
        return hash(self.number)


@dataclass
class Region:
    """Lines of a running function that are run for all, and when they would be."""

    frame: FrameType
    first: int
    last: int
    condition: Tensor | None


@dataclass
class Regions:
    """`met`: whether there were any. `made`: what was made in them, and under which conditions."""

    open: list[Region] = field(default_factory=list)
    writing: bool = False
    met: bool = False
    made: MutableMapping[Tensor, list[Tensor]] = field(default_factory=WeakIdKeyDictionary)

    def escaped(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one was made under a condition that does not hold here: a list or a closure has kept it."""
        known = {id(c) for c in self.conditions()}
        return any(id(c) not in known for x in tensors for c in self.made.get(x, ()))

    def reads(self, tensors: Iterable[Tensor]) -> None:
        if self.escaped(tensors):
            raise refused("what was made in lines that the data say whether to run, and is read elsewhere")

    def makes(self, given: Iterable[Tensor], tensors: Iterable[Tensor]) -> None:
        conditions = self.conditions()
        if conditions:
            before = {id(x) for x in given}
            self.made.update({x: conditions for x in tensors if id(x) not in before})

    def close(self) -> None:
        """At the end of a trace."""
        self.met = False
        self.open.clear()
        self.made.clear()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """What is written in place now are rows, which are valid or not."""
        before, self.writing = self.writing, True
        try:
            yield
        finally:
            self.writing = before

    def conditions(self) -> list[Tensor]:
        """The conditions of the branches around the current line."""
        found, frame = [], sys._getframe(1)
        while frame is not None:
            found += [r.condition for r in self.open if r.frame is frame and r.first <= frame.f_lineno <= r.last
                      and r.condition is not None]
            frame = frame.f_back  # type: ignore[assignment]
        return found

    def loop(self, hit: Tensor, frame: FrameType) -> Iterator[Chosen]:
        statement = statement_at(frame, ast.For)
        if not isinstance(statement, ast.For) or not isinstance(statement.iter, ast.Name | ast.Attribute | ast.Call):
            raise refused("a loop over places that the data say")
        if isinstance(statement.iter, ast.Call) and getattr(statement.iter.func, "attr", "") != "nonzero":
            raise refused("a loop over places that the data say, and over more")
        if statement.orelse or not harmless(statement.body, frame, statement.target):
            raise refused("a loop over places that the data say, which does more than write rows")
        region = Region(frame, statement.body[0].lineno, statement.body[-1].end_lineno or 0, None)

        def run() -> Iterator[Chosen]:
            self.met = True
            self.open.append(region)
            for number in range(hit.shape[0]):
                region.condition = hit[number]
                yield Chosen(number)
            self.open.remove(region)

        return run()

    def branch(self, frame: FrameType, statement: ast.If, condition: Tensor) -> bool | None:
        """Whether the branch is to be taken, always, as all that depends on it is to write rows; what would not be come
        by does not write them. None where it does more."""
        body, taken = statement.body, True
        if len(body) == 1 and isinstance(body[0], ast.Continue):
            body, taken, condition = _rest_of_loop(statement, frame), False, condition.logical_not()
        elif any(isinstance(n, ast.Continue) for s in body for n in ast.walk(s)):
            return None
        if statement.orelse or not body or not harmless(body, frame, None) or body[0].lineno == statement.lineno:
            return None
        region = Region(frame, body[0].lineno, body[-1].end_lineno or 0, condition)
        self.open = [r for r in self.open if (r.frame, r.first, r.last) != (frame, region.first, region.last)]
        self.open.append(region)
        self.met = True
        return taken


def _rest_of_loop(statement: ast.If, frame: FrameType) -> list[ast.stmt]:
    """The statements of a loop that `continue` skips."""
    for loop in ast.walk(function_source(frame.f_code)):
        if isinstance(loop, ast.For) and statement in loop.body:
            return loop.body[loop.body.index(statement) + 1:]
    return []


def harmless(body: Sequence[ast.stmt], frame: FrameType, target: ast.expr | None) -> bool:
    """Whether statements do nothing but write rows: what else they assign is read by themselves only, afterwards."""
    assigned: set[str] = {target.id} if isinstance(target, ast.Name) else set()
    own = set[int]()

    def is_tensor(value: ast.expr) -> bool:
        return isinstance(value, ast.Name) and isinstance(frame.f_locals.get(value.id), Tensor)

    def fits(statement: ast.stmt) -> bool:
        if any(isinstance(n, ast.NamedExpr | ast.Yield | ast.Await) for n in ast.walk(statement)):
            return False
        own.update(id(n) for n in ast.walk(statement))
        if isinstance(statement, ast.With):
            return all(item.optional_vars is None for item in statement.items) and all(map(fits, statement.body))
        if isinstance(statement, ast.If):
            return all(map(fits, (*statement.body, *statement.orelse)))
        if isinstance(statement, ast.Continue):
            return True
        if isinstance(statement, ast.Expr):
            call = statement.value
            return isinstance(call, ast.Constant) or (
                isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in WRITES
                and is_tensor(call.func.value))
        if isinstance(statement, ast.AugAssign):
            return isinstance(statement.target, ast.Subscript) and is_tensor(statement.target.value)
        if not isinstance(statement, ast.Assign):
            return False
        for each in statement.targets:
            names = each.elts if isinstance(each, ast.Tuple) else [each]
            for name in names:
                if isinstance(name, ast.Name):
                    assigned.add(name.id)
                elif not isinstance(name, ast.Subscript) or isinstance(each, ast.Tuple) or not is_tensor(name.value):
                    return False
        return True

    if not all(map(fits, body)):
        return False
    kept = {id(n) for n in ast.walk(target)} if target is not None else set()
    source = function_source(frame.f_code)
    outside = {n.id for n in ast.walk(source) if isinstance(n, ast.Name) and id(n) not in own and id(n) not in kept}
    return not assigned & outside and _assigned_first(body, assigned, target)


def _assigned_first(body: Sequence[ast.stmt], names: set[str], target: ast.expr | None) -> bool:
    """Whether nothing is read that another round of the loop has left."""
    known: set[str] = {target.id} if isinstance(target, ast.Name) else set()

    def visit(statement: ast.stmt) -> bool:
        if isinstance(statement, ast.With | ast.If):
            heads = [i.context_expr for i in statement.items] if isinstance(statement, ast.With) else [statement.test]
            inner = [*statement.body, *(statement.orelse if isinstance(statement, ast.If) else [])]
            fits = all(_reads(h) <= known for h in heads)
            before = set(known)
            fits = fits and all(map(visit, inner))
            if isinstance(statement, ast.If):  # what it assigns may be of another round
                known.intersection_update(before)
            return fits
        if not (_reads(statement) & names) <= known:
            return False
        known.update(n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        return True

    def _reads(node: ast.AST) -> set[str]:
        return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} & names

    return all(map(visit, body))


REGIONS = Regions()


__all__ = ["REGIONS", "Chosen", "refused"]
