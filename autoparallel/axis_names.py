"""Names of several mesh axes whose ranks do something together."""

from __future__ import annotations

from collections.abc import Iterable

#: Joins the names of the axes.
JOINED = "+"


def together(names: Iterable[str]) -> str:
    """One name of several mesh axes.

    >>> together(("data", "model")), apart("data+model")
    ('data+model', ('data', 'model'))
    """
    return JOINED.join(names)


def apart(name: str) -> tuple[str, ...]:
    """The mesh axes of a name that `together` made."""
    return tuple(name.split(JOINED))


__all__ = ["JOINED", "apart", "together"]
