"""Memoisation by key: equal decisions and tensor uses are priced once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

Made = TypeVar("Made")


class Memo:
    """Results by key; as many as there are equivalence classes, for as long as the pricer that owns it."""

    def __init__(self) -> None:
        self._made: dict[object, Any] = {}

    def once(self, key: object, make: Callable[[], Made]) -> Made:
        """Memoise ``make()`` under ``key``."""
        if key not in self._made:
            self._made[key] = make()
        found: Made = self._made[key]
        return found

    def each(self, name: object, codes: np.ndarray, make: Callable[[int], Made]) -> tuple[list[Made], np.ndarray]:
        """``make(first position)`` for each distinct code, memoised under ``name``; and the number of each position's
        code."""
        values, first, which = np.unique(codes, return_index=True, return_inverse=True)
        made = [self.once((name, code), partial(make, at))
                for code, at in zip(values.tolist(), first.tolist(), strict=True)]
        return made, which.reshape(-1)
