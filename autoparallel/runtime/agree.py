"""Ranks agree before they run: one program, one plan, one order of collectives.

A disagreement is an error on every rank, instead of a hang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch.distributed as dist

from autoparallel.errors import AutoparallelError, LoweringError

T = TypeVar("T")


class _Failure(NamedTuple):
    """An error as it travels: whatever its constructor takes, it arrives with its message and its facts."""

    kind: type[AutoparallelError]
    message: str
    facts: dict[str, Any]

    def error(self) -> AutoparallelError:
        made = self.kind.__new__(self.kind, self.message)
        made.args = (self.message,)
        made.__dict__.update(self.facts)
        return made


def agree(what: str, mine: str, among: int = 0) -> None:
    """Compare a digest over all ranks that give the same ``among``.

    Raises LoweringError on every rank, naming those that differ from the first of theirs.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (among, mine))
    first: dict[int, str] = {}
    different = [rank for rank, (part, digest) in enumerate(found) if first.setdefault(part, digest) != digest]
    if different:
        raise LoweringError(f"ranks {different} have {what} other than the first rank's of their group: "
                            "do all ranks compile the same model with the same inputs and options?")


def decide_once(decide: Callable[[], T]) -> T:
    """What rank 0 decides, on every rank; an error of ours that it meets is raised on every rank."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box = [decide()]
        except AutoparallelError as error:
            box = [_Failure(type(error), str(error), vars(error))]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], _Failure):
        raise box[0].error()
    return cast(T, box[0])
