"""Filling a slot from files: one chunk, several reads, one completion."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from pathlib import Path

from hetero.io.engine import Engine, File, Request
from hetero.memory.chunk import Chunk

Done = Callable[[BaseException | None], None]


class ChunkRead:
    """The reads that fill one slot. `on_done(error)` is called once, when no read can still write to the slot."""

    def __init__(
        self, engine: Engine, files: Mapping[Path, File], chunk: Chunk, address: int, priority: int, on_done: Done
    ) -> None:
        self._remaining = len(chunk.segments)
        self._error: BaseException | None = None
        self._on_done = on_done
        self._lock = threading.Lock()
        requests = [
            Request(files[s.path], s.offset, s.nbytes, address + s.slot_offset, priority=priority)
            for s in chunk.segments
        ]
        self._futures: list[Future[int]] = []
        try:
            self._futures = engine.submit(requests)
        except Exception as error:  # the same way out as for a read that fails later
            on_done(error)
            return
        for future in self._futures:
            future.add_done_callback(self._one_done)

    def cancel(self) -> None:
        """Give up reads that have not started; `on_done` still follows, with CancelledError."""
        for future in self._futures:
            future.cancel()

    def _one_done(self, future: Future[int]) -> None:
        error = CancelledError() if future.cancelled() else future.exception()
        with self._lock:
            # A real failure says more than the cancellations that follow from it.
            if error is not None and (self._error is None or isinstance(self._error, CancelledError)):
                self._error = error
            self._remaining -= 1
            last = self._remaining == 0
        if last:
            self._on_done(self._error)
