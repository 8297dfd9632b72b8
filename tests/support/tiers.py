"""Tiers of single cases of a test."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case of a parametrized test, of the tier `slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)
