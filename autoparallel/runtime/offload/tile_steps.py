"""Tiles of optimizer states on their way through a step: fetched, stepped and put back, each by a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Semaphore
from typing import Generic, TypeVar

from autoparallel.runtime.offload.tiles import Tile
from autoparallel.schedule.tiers import BUFFERS

Fetched = TypeVar("Fetched")


class TileSteps(Generic[Fetched]):
    """Runs the tiles that are given to it, in their order, at most `BUFFERS` at a time. ``fetch``: a tile -> what is
    stepped; ``step`` and ``put``: that tile and what was fetched. ``ahead``: while a tile is stepped, the next is
    fetched and the one before is put back; else each tile runs when it is given, in the caller's thread."""

    def __init__(self, fetch: Callable[[Tile], Fetched], step: Callable[[Tile, Fetched], None],
                 put: Callable[[Tile, Fetched], None], ahead: bool) -> None:
        self._fetch, self._step, self._put = fetch, step, put
        names = ("fetch", "step", "put") if ahead else ()
        self._threads = [ThreadPoolExecutor(1, f"autoparallel-{name}") for name in names]
        self._puts = list[Future[None]]()
        self._free, self._failed = Semaphore(BUFFERS), False

    def give(self, tile: Tile) -> None:
        """Step a tile."""
        if not self._threads:
            fetched = self._fetch(tile)
            self._step(tile, fetched)
            self._put(tile, fetched)
            return
        fetcher, stepper, putter = self._threads
        coming = fetcher.submit(self._fetch_next, tile)
        stepped = stepper.submit(self._step_next, tile, coming)
        self._puts.append(putter.submit(self._put_next, tile, stepped))

    def end(self) -> None:
        """Wait for all tiles. Raises the error of the first that failed, after which none was stepped."""
        for thread in self._threads:
            thread.shutdown()
        for one in self._puts:
            one.result()

    def _fetch_next(self, tile: Tile) -> Fetched:
        self._free.acquire()
        return self._fetch(tile)

    def _step_next(self, tile: Tile, coming: Future[Fetched]) -> Fetched:
        try:
            fetched = coming.result()
            if self._failed:
                raise RuntimeError("a tile before this one failed")
            self._step(tile, fetched)
        except BaseException:
            self._failed = True
            raise
        return fetched

    def _put_next(self, tile: Tile, stepped: Future[Fetched]) -> None:
        try:
            self._put(tile, stepped.result())
        except BaseException:
            self._failed = True
            raise
        finally:
            self._free.release()


__all__ = ["TileSteps"]
