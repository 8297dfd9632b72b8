"""Arrays of many owners, each distinct one once: blocks of a model share theirs, and so the work on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np


class Shared(Sequence[np.ndarray]):
    """One array per owner: owner i has ``distinct[numbers[i]]``. Arrays must not be written to."""

    def __init__(self, distinct: Sequence[np.ndarray], numbers: np.ndarray) -> None:
        self.distinct, self.numbers = list(distinct), numbers

    @classmethod
    def of(cls, arrays: Iterable[np.ndarray]) -> Shared:
        """By identity. O(owners)."""
        arrays = list(arrays)
        place: dict[int, int] = {}
        numbers = np.array([place.setdefault(id(array), len(place)) for array in arrays], np.int64)
        _, first = np.unique(numbers, return_index=True)
        return cls([arrays[owner] for owner in first.tolist()], numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, owner):  # type: ignore[no-untyped-def]
        if isinstance(owner, (slice, np.ndarray)):
            return Shared(self.distinct, self.numbers[owner])
        return self.distinct[self.numbers[owner]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.distinct[number] for number in self.numbers.tolist())

    def each(self, what: Callable[[np.ndarray], float]) -> np.ndarray:
        """A number per owner, worked out once per array."""
        return np.array([what(array) for array in self.distinct], float)[self.numbers]

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> Shared:
        return Shared([change(array) for array in self.distinct], self.numbers)

    @cached_property
    def _groups(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Every array in one row, and its owners."""
        order = np.argsort(self.numbers, kind="stable")
        borders = np.searchsorted(self.numbers[order], np.arange(len(self.distinct) + 1)).tolist()
        return [(array.reshape(-1), order[low:high])
                for array, low, high in zip(self.distinct, borders, borders[1:], strict=False)]

    def priced(self, extra: Shared, rates: np.ndarray) -> Shared:
        """Each array plus so many times the extra one of the same owner; equal sums once, unchanged arrays the same."""
        free = rates == 0.0
        kinds = paired(self.numbers, np.where(free, 0, extra.numbers + 1))
        first, numbers = firsts(paired(kinds, np.unique(rates, return_inverse=True)[1].reshape(-1)))
        return Shared([self[owner] if free[owner] else self[owner] + rates[owner] * extra[owner] for owner in first],
                      numbers)

    def take(self, cells: np.ndarray) -> np.ndarray:
        """The entry of each owner's array at its cell, counted row by row (of an array with one entry: that)."""
        found = np.zeros(len(self))
        for row, owners in self._groups:
            found[owners] = row[cells[owners]] if len(row) > 1 else row[0]
        return found


def firsts(numbers: np.ndarray) -> tuple[list[int], np.ndarray]:
    """(index of the first occurrence of each distinct number, for every number its index among the distinct ones)."""
    _, first, which = np.unique(numbers, return_index=True, return_inverse=True)
    return first.tolist(), which.reshape(-1)


def paired(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Small numbers for pairs of numbers (>= 0): equal pairs, equal number."""
    return np.unique(first * (int(second.max(initial=0)) + 1) + second, return_inverse=True)[1].reshape(-1)
