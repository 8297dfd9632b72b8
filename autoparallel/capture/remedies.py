"""What to write instead of a line that a trace refuses: the user's own, or one of an installed library, which he cannot
edit."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Sequence
from typing import NamedTuple

_STDLIB = sysconfig.get_path("stdlib")
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/([\w.-]+)")
#: (library, part of the refused line or of its function's name) -> what avoids it.
_OPTIONS: Sequence[tuple[str, str, str]] = (
    ("transformers", "skip_the_layer", "Set config.layerdrop = 0.0: a program runs the same layers at each call."),
    ("transformers", "layerdrop", "Set config.layerdrop = 0.0: a program runs the same layers at each call."),
    ("transformers", "expert_size",
     "These experts take lists of tokens, of lengths that the data say. A loop over experts, each of which takes "
     "x[torch.where(mask)], can be run."),
    ("torchvision", "",
     "Detection models make lists of boxes, of lengths that the data say: compile model.backbone, and call the rest "
     "outside."),
)


class Line(NamedTuple):
    """A line of source that was running."""

    path: str
    number: int
    function: str
    code: str

    @property
    def library(self) -> str:
        """The installed package that it is of; "" for the user's own."""
        found = _INSTALLED.match(self.path)
        return found[1].removesuffix(".py") if found else ""

    def __str__(self) -> str:
        return f"{self.path}:{self.number} in {self.function}" + (f": {self.code.strip()}" if self.code else "")


def lines_of(text: str) -> list[Line]:
    """The lines that a stack trace in text names."""
    found = re.findall(r'File "([^"]+)", line (\d+), in (\S+)(?:\n\s*(.+))?', text)
    return [Line(path, int(number), function, code) for path, number, function, code in found]


def lines_at(frames: traceback.StackSummary) -> list[Line]:
    return [Line(f.filename, f.lineno or 0, f.name, f.line or "") for f in frames]


#: In place of functions that an op of torch calls, as torch.cond does.
WITHOUT_FUNCTIONS = "Write torch.where(condition, a, b), or a Python loop of fixed length."


def instead(lines: Sequence[Line], own: str) -> str:
    """What to do about the last of the lines that were running: ``own``, where the user can edit it."""
    if not lines or not (library := lines[-1].library):
        return f"  {own}"
    last = lines[-1]
    where = f"{last.function} {last.code}"
    known = next((what for name, part, what in _OPTIONS if name == library and part in where), "")
    callers = [line for line in lines[:-1] if not line.library and not line.path.startswith(("<", _STDLIB))]
    called = f"\n  called at {callers[-1]}" if callers else ""
    general = f"Give {library} options with which it does not do so, or call it outside of the model."
    return f"  The line is of {library}, in {last.function}{called}\n  {known or general}"


#: What makes a Python number of a tensor, but for a branch.
_NUMBER = re.compile(r"\.(item|tolist)\(\)|\b(int|float|bool|range)\(")
_BRANCH = re.compile(r"\s*(if|elif|while|assert)\b|\bif\b.*\belse\b")


def makes_number(code: str) -> bool:
    """Whether a line that reads a value makes a Python number of it, rather than to branch on it."""
    return bool(_NUMBER.search(code)) and not _BRANCH.match(code)


__all__ = ["Line", "instead", "lines_at", "lines_of", "makes_number"]
