"""Tiers of single cases of a test."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case of a parametrized test, of the tier `slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def with_slow(cases: Iterable[Any], *later: Any) -> list[Any]:
    """All the cases of a parametrized test, those named ``later`` in the tier `slow`. Raises ValueError for one that is
    no case."""
    every = list(cases)
    if unknown := [case for case in later if case not in every]:
        raise ValueError(f"no cases of this test: {unknown}")
    return [slow(case) if case in later else case for case in every]
