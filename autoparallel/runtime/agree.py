"""Agreement before a run: ranks compare program, plan and order of collectives, so that a difference is an error on
every rank instead of a hang."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
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


def agree(what: str, mine: str | _Failure, among: int = 0) -> None:
    """Compare the digest ``mine`` of ``what`` over the ranks with the same ``among``. All ranks call this.

    Raises LoweringError on every rank with the ranks that differ from the first of their group; if a rank gives a
    failure instead of a digest, raises that error.
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
                            "do all ranks compile the same model with the same inputs and options?")


def made_equally(what: str, make: Callable[[], T], digest: Callable[[T], str], among: int = 0) -> T:
    """The result of ``make()`` on this rank, if all ranks succeed with equal digests. All ranks call this.

    Raises this rank's own error if its ``make`` fails, else another rank's, or LoweringError if digests differ.
    """
    try:
        made = make()
    except Exception as error:
        with suppress(AutoparallelError):
            agree(what, _Failure.of(error), among)
        raise
    agree(what, digest(made), among)
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
