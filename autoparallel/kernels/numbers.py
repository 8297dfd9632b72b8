"""Number arguments that a program reads at each call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from autoparallel.capture.numbers import Form, evaluate

_NONE: Mapping[int, Any] = {}
_values: ContextVar[Mapping[int, Any]] = ContextVar("number_arguments", default=_NONE)


@contextmanager
def use_numbers(values: Mapping[int, Any]) -> Iterator[None]:
    """Set the numbers of one call, by their place among its leaves."""
    token = _values.set(values)
    try:
        yield
    finally:
        _values.reset(token)


def call_numbers() -> Mapping[int, Any]:
    """The numbers set by `use_numbers`; none outside."""
    return _values.get()


def with_numbers(op: Any, positional: tuple[tuple[int, Form], ...], named: tuple[tuple[str, Form], ...], *args: Any,
                 **kwargs: Any) -> Any:
    """Run an op with the values of expressions of the call's numbers at these places of its arguments, which have
    None there."""
    values, given = _values.get(), list(args)
    for place, form in positional:
        given[place] = evaluate(form, values)
    return op(*given, **kwargs, **{name: evaluate(form, values) for name, form in named})


__all__ = ["call_numbers", "use_numbers", "with_numbers"]
