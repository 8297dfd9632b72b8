"""The source of functions that are running while a model is traced."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch.fx.proxy

import autoparallel

#: The folder of this package, whose frames are not the user's.
OWN = str(Path(autoparallel.__file__).parent)
HANDLERS = frozenset({"__torch_function__", "_called", "_requires_grad", "answer"})


def caller() -> FrameType:
    """The function that calls torch: torch's and our handlers of its calls are between."""
    frame = sys._getframe(1)
    while frame.f_code.co_name in HANDLERS and frame.f_back is not None:
        frame = frame.f_back
    return frame


def users_caller() -> str:
    """The user's line that calls torch, for a message: a new line, "at file:line in function: code"; or nothing."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path, line = frame.f_code.co_filename, frame.f_lineno
        if _is_users(frame) and not path.startswith("<"):
            return f"\n  at {path}:{line} in {frame.f_code.co_name}: {linecache.getline(path, line).strip()}"
        frame = frame.f_back
    return ""


def is_called_by(path: str) -> bool:
    """Whether a function of this file is running, and waits for the one that asks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != path:
        frame = frame.f_back
    return frame is not None


def statement_at(frame: FrameType, *kinds: type[Any]) -> Any:
    """The statement of these kinds (branch, assertion, loop) whose head the frame is at; None if it is at none."""
    line, _, column, _ = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    place = (line or 0, column or 0)
    for node in ast.walk(function_source(frame.f_code)):
        if isinstance(node, kinds):  # Python has the jump at the statement's place, or at its condition's
            head = node.iter if isinstance(node, ast.For) else node.test
            start, end = (head.lineno, head.col_offset), (head.end_lineno or 0, head.end_col_offset or 0)
            if place == (node.lineno, node.col_offset) or start <= place < end:
                return node
    return None


def _is_users(frame: FrameType) -> bool:
    """Whether the frame is of neither torch nor this package."""
    return not ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename.startswith(OWN))


def writes_to_part() -> bool:
    """Whether the user's function executes ``x[index] += value``, where no other variable refers to ``x[index]``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    if frame is None:
        return False
    place = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    return any(isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript)
               and (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == place
               for node in ast.walk(function_source(frame.f_code)))


def calls(frame: FrameType, name: str) -> bool:
    """Whether the frame, of neither torch nor this package, is at a call of this function."""
    if not _is_users(frame):
        return False
    place = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    return any(isinstance(node, ast.Call) and getattr(node.func, "id", "") == name
               and (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == place
               for node in ast.walk(function_source(frame.f_code)))


@lru_cache(maxsize=256)
def function_source(code: CodeType) -> ast.Module:
    """The function's source, parsed, with the lines and columns of its file; empty where there is none."""
    try:
        lines, first = inspect.getsourcelines(code)
        indented = lines[0][:1].isspace()
        tree = ast.parse("".join(["if 1:\n", *lines] if indented else lines))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])
    ast.increment_lineno(tree, first - (2 if indented else 1))
    if indented:
        tree.body = tree.body[0].body  # type: ignore[attr-defined]
    return tree


class _Stack:
    """The frames that torch's CapturedTraceback has; a line of source is read when a frame is written out."""

    @staticmethod
    def extract() -> type[_Stack]:
        return _Stack

    @staticmethod
    def summary() -> traceback.StackSummary:
        """The frames of the caller, outermost first."""
        frames = [traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name, lookup_line=False)
                  for frame, line in traceback.walk_stack(sys._getframe(1))]
        return traceback.StackSummary(reversed(frames))


@contextmanager
def stacks_read_late() -> Iterator[None]:
    """Meanwhile a node that torch adds to a graph has the same stack trace as ever, at less cost: torch reads the
    source of all frames, and writes out a few."""
    before = torch.fx.proxy.CapturedTraceback
    torch.fx.proxy.CapturedTraceback = _Stack  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.fx.proxy.CapturedTraceback = before  # type: ignore[misc]


__all__ = ["OWN", "caller", "calls", "function_source", "stacks_read_late", "statement_at", "users_caller",
           "writes_to_part"]
