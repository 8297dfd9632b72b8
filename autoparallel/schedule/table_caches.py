"""Caches on the devices for tables in the memory of the host: how many rows, and how often they are found there.

    pins={"tables*": autoparallel.Cached(rows=100_000, hits=0.9)}
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoparallel.errors import PinError, shown


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Cached:
    """A pin: tables live in the memory of the host, and the rows that were looked up last on the devices.

    ``rows``: how many of a table's rows the devices hold (an int), or which share of them (a float, at most 1.0). A
    device that has a shard of the table holds the same share of its shard's rows. ``hits``: the share of looked-up ids
    whose row is expected on the device (None: that of ids drawn evenly from all rows). Raises PinError.
    """

    rows: float
    hits: float | None = None

    def __post_init__(self) -> None:
        share = isinstance(self.rows, float)
        if not _is_number(self.rows) or not (0 < self.rows <= 1 if share else 1 <= self.rows <= 2**62):
            raise PinError(f"Cached(rows={shown(self.rows)}): give a number of rows, 1 or more, or a share of the "
                           "table's rows as a float, above 0.0 and at most 1.0")
        if self.hits is not None and not (_is_number(self.hits) and 0 <= self.hits <= 1):
            raise PinError(f"Cached(hits={shown(self.hits)}): give the share of looked-up ids whose row is expected on "
                           "the device, from 0 to 1")

    def of(self, name: str, table_rows: int) -> TableCache:
        """The cache of one table."""
        rows = math.ceil(self.rows * table_rows) if isinstance(self.rows, float) else min(int(self.rows), table_rows)
        return TableCache(name, rows, rows / max(1, table_rows) if self.hits is None else float(self.hits))

    def __str__(self) -> str:
        rows = f"{self.rows:g} of the rows" if isinstance(self.rows, float) else f"{self.rows:,} rows"
        return f"host, {rows} cached" + ("" if self.hits is None else f", hits {self.hits:g}")


@dataclass(frozen=True)
class TableCache:
    """The cache of one table: its name, how many of its rows the devices hold, and the expected share of hits."""

    name: str
    rows: int
    hits: float

    def slots(self, table_rows: int, local_rows: int) -> int:
        """Rows that a device holds of its shard of ``local_rows`` rows."""
        return min(local_rows, math.ceil(self.rows * local_rows / max(1, table_rows)))


__all__ = ["Cached", "TableCache"]
