"""Agreement before a run: ranks compare program, plan and order of collectives, so that a difference is an error on
every rank instead of a hang."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar, cast

import torch.distributed as dist

from autoparallel.errors import AutoparallelError, LoweringError
from autoparallel.runtime.failing import reached

T = TypeVar("T")


class _Failure(NamedTuple):
    """An error in picklable form: class, message, attributes. (The class's constructor may take anything.)"""

    kind: type[AutoparallelError]
    message: str
    facts: dict[str, Any]

    @staticmethod
    def of(error: Exception) -> _Failure:
        if isinstance(error, AutoparallelError):
            return _Failure(type(error), str(error), vars(error))
        return _Failure(LoweringError, f"{type(error).__name__}: {error}", {})

    def error(self, where: str = "") -> AutoparallelError:
        made = self.kind.__new__(self.kind, self.message)
        made.args = (where + self.message,)
        made.__dict__.update(self.facts)
        return made


def agree(what: str, mine: str | _Failure, among: int = 0, lines: Callable[[], Sequence[str]] | None = None) -> None:
    """Compare a digest over all ranks that give the same ``among``.

    Raises LoweringError on every rank, naming those that differ from the first of theirs, and the first of the
    ``lines`` that does; where a rank has a failure instead, that.
    """
    found: list[Any] = [None] * dist.get_world_size()
    with reached():
        dist.all_gather_object(found, (among, mine))
    first: dict[int, str] = {}
    different = []
    for rank, (part, digest) in enumerate(found):
        if isinstance(digest, _Failure):
            raise digest.error(f"on rank {rank}: ")
        if first.setdefault(part, digest) != digest:
            different.append(rank)
    if different:
        raise LoweringError(f"ranks {different} have {what} other than the first rank's of their group: "
                            "do all ranks compile the same model with the same inputs and options?"
                            + (_first_difference(lines()) if lines is not None else ""))


def _first_difference(mine: Sequence[str]) -> str:
    """A text of the first line in which a rank differs from rank 0, for an error; "" if no line differs."""
    found: list[Any] = [None] * dist.get_world_size()
    with reached():
        dist.all_gather_object(found, list(mine))
    rank = next((rank for rank, lines in enumerate(found) if lines != found[0]), None)
    if rank is None:
        return ""
    pairs = zip_longest(found[0], found[rank], fillvalue="nothing")
    first, other = next((one, two) for one, two in pairs if one != two)
    told = f"\n  They differ first at\n    rank 0: {first}\n    rank {rank}: {other}"
    if Counter(map(_unnumbered, found[0])) != Counter(map(_unnumbered, found[rank])):
        return told
    return (f"{told}\n  The ops are the same, in another order. A loop over a Python set of names has another order in "
            "each process: loop over sorted(names), or start all ranks with the same PYTHONHASHSEED.")


def _unnumbered(line: str) -> str:
    """A line without what only the order of ops makes of it."""
    return re.sub(r"(?<=node=)\d+|_\d+\b", "", line)


def made_equally(what: str, make: Callable[[], T], digest: Callable[[T], str], among: int = 0,
               lines: Callable[[T], Sequence[str]] | None = None) -> T:
    """What every rank makes for itself. Raises its own error where it fails, and where others do or differ theirs;
    ``lines`` are what it consists of, for the error."""
    try:
        made = make()
    except Exception as error:
        with suppress(AutoparallelError):
            agree(what, _Failure.of(error), among)
        raise
    agree(what, digest(made), among, partial(lines, made) if lines is not None else None)
    return made


def decide_once(decide: Callable[[], T]) -> T:
    """The result of ``decide()`` on rank 0, broadcast to all. Its error is raised on every rank."""
    box: list[Any] = [None]
    mine: Exception | None = None
    if dist.get_rank() == 0:
        try:
            box = [decide()]
        except Exception as error:
            mine, box = error, [_Failure.of(error)]
    with reached():
        dist.broadcast_object_list(box, src=0)
    if mine is not None:
        raise mine
    if isinstance(box[0], _Failure):
        raise box[0].error()
    return cast(T, box[0])
