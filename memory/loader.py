"""Bringing static residents home to their slots before the first pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from hetero.io.engine import Engine, File
from hetero.io.interrupts import Condition
from hetero.memory.chunk import Chunk
from hetero.memory.device import Device, Event
from hetero.memory.ring import Ring
from hetero.memory.transfer import ChunkRead

Progress = Callable[[int], None]


class ResidentLoader:
    """Reads chunks to fixed addresses: straight into host memory, or through a staging ring to the gpu tier.

    `load` blocks until every byte is in place; after an error or an interrupt, until nothing is in flight any more:
    reads that have not started are then given up.
    """

    def __init__(self, engine: Engine, files: Mapping[Path, File], device: Device) -> None:
        self._engine, self._files, self._device = engine, files, device
        self._changed = Condition()
        self._num_in_flight = 0
        self._loaded_nbytes = 0
        self._reads: list[ChunkRead] = []
        self._error: BaseException | None = None

    def load(
        self, chunks: Iterable[tuple[Chunk, int]], *, staging: Ring | None = None, progress: Progress | None = None
    ) -> None:
        """Fill the slot at each address. With `staging` the addresses are of the gpu tier."""
        try:
            for priority, (chunk, address) in enumerate(chunks):
                if staging is None:
                    self._read(chunk, address, priority, self._done)
                else:
                    self._stage(chunk, address, priority, staging)
                if self._error is not None:
                    break
                if progress is not None:
                    progress(self._loaded_nbytes)
            with self._changed:
                while self._num_in_flight > 0 and self._error is None:
                    self._changed.wait(0.1)
                    if progress is not None:
                        progress(self._loaded_nbytes)
            if self._error is not None:
                raise self._error
        except BaseException:
            for read in self._reads:
                read.cancel()
            raise
        finally:
            self._reads.clear()
            # Not before the kernel and the device are done with the memory, whatever raised.
            with self._changed:
                self._changed.wait_for(lambda: self._num_in_flight <= 0)

    def _read(
        self, chunk: Chunk, address: int, priority: int, done: Callable[[Chunk, BaseException | None], None]
    ) -> None:
        with self._changed:
            self._num_in_flight += 1
        try:
            read = ChunkRead(self._engine, self._files, chunk, address, priority, lambda error: done(chunk, error))
        except BaseException:
            # Interrupted: nobody may ever tell us of this read. The engine knows, and is closed before the memory.
            with self._changed:
                self._num_in_flight -= 1
            raise
        self._reads.append(read)

    def _done(self, chunk: Chunk, error: BaseException | None) -> None:
        with self._changed:
            self._num_in_flight -= 1
            if error is None:
                self._loaded_nbytes += chunk.read_nbytes
            elif self._error is None:
                self._error = error
            self._changed.notify_all()

    def _stage(self, chunk: Chunk, address: int, priority: int, staging: Ring) -> None:
        with self._changed:
            space = staging.allocate(chunk.nbytes)
            while space is None:
                assert self._num_in_flight, f"staging of {staging.nbytes} bytes cannot hold {chunk.nbytes}"
                self._changed.wait()
                space = staging.allocate(chunk.nbytes)

        def copied(error: BaseException | None) -> None:
            with self._changed:
                staging.free(space, None)
            self._done(chunk, error)

        def was_read(chunk: Chunk, error: BaseException | None) -> None:
            if error is not None:
                copied(error)
                return
            after: tuple[Event, ...] = ()
            self._device.copy(address, space.address, chunk.nbytes, to_device=True, after=after, on_done=copied)

        self._read(chunk, space.address, priority, was_read)
