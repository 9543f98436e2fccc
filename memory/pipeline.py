"""Keeps the next chunks coming: transfers, the slots they fill, and when those may be used again.

Note [threads]
    One condition guards all state. It is entered by the thread that runs the model (acquire, release), by the I/O
    engine's threads (a read is done) and by the device's threads (a copy is done). None of them blocks inside, except
    `acquire`, which waits on the condition. The finalizer of an alias may run anywhere, also inside our own lock, so it
    only appends to a deque; `_drain` acts on it later.

Note [reuse of a slot]
    Bytes of the ring are handed to a new owner only when (1) no lease is open, (2) no tensor aliases the residency any
    more: its storage's death is the signal, and (3) whoever writes next waits for the fence recorded after the last
    use. (1) is `_retire`, (2) is `_drain`, (3) is `Ring.allocate`.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter

from hetero.io.engine import Engine, File
from hetero.io.errors import HeteroError, IOEngineError
from hetero.io.interrupts import Condition
from hetero.memory.chunk import Chunk
from hetero.memory.device import Device, Range
from hetero.memory.ring import Ring, Space
from hetero.memory.schedule import Schedule, Stay
from hetero.memory.states import ExecutorStats, Residency, Staged, State
from hetero.memory.transfer import ChunkRead

DEMAND_PRIORITY = -1
URGENT = -1  # the index of a chunk that is staged out of turn


class InterruptedPassError(HeteroError):
    """A KeyboardInterrupt hit the bookkeeping. What is in flight is no longer known here, only by engine and device."""

    @classmethod
    def by(cls, error: BaseException) -> InterruptedPassError:
        return cls(
            f"this run was interrupted ({type(error).__name__}) in the middle of a transfer: close it and load the "
            "model again"
        )


class Pipeline:
    """Moves streamed chunks through the rings in the order of the schedule, as far ahead as there is space.

    It owns no memory and no thread: `first` and `staging` are address ranges of arenas that outlive it, the engine and
    the device are the caller's. `resident` and `host` say where static residents lie (chunk id -> address, and for
    `host` how many bytes of it to copy); their bytes must have been loaded before the first lease. Aliases hold
    `keepers` (those of the arenas), so that a view that somebody keeps never dangles. `close` ends prefetching and
    waits for what is in flight.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        device: Device,
        engine: Engine,
        files: Mapping[Path, File],
        first: Ring,
        staging: Ring | None,
        resident: Mapping[int, int],
        host: Mapping[int, Range],
        schedule: Sequence[Stay],
        keepers: Sequence[object] = (),
    ) -> None:
        self.stats = ExecutorStats()
        self.spans: MutableSequence[tuple[str, str, float, float]] | None = None
        self._chunks = {chunk.chunk_id: chunk for chunk in chunks}
        self._device, self._engine, self._files = device, engine, files
        self._first, self._staging = first, staging
        self._host = dict(host)
        self._keepers = tuple(keepers)
        self._schedule = Schedule(schedule)
        self._lock = threading.RLock()
        self._changed = Condition(self._lock)
        self._dead: deque[Residency] = deque()
        self._outlived: list[Residency] = []
        self._resident: dict[int, Residency] = {}
        for chunk_id, address in resident.items():
            chunk = self._chunks[chunk_id]
            self._resident[chunk_id] = Residency.resident(chunk, Space(address, chunk.nbytes, ()))
        self._live: dict[int, Residency] = {}
        self._staged: dict[int, Staged] = {}
        self._num_in_flight = 0
        self._urgent: Stay | None = None
        self._next = 0  # schedule index that gets space in the first ring next
        self._next_read = 0  # schedule index whose disk read into staging starts next
        self._stop_at: int | None = None  # schedule index at which prefetching ends; None: it goes on for ever
        self._position = -1  # schedule index of the last streamed chunk that was leased
        self._operator = 0  # ident of the thread inside an operation
        self._is_started = False
        self._is_closed = False
        self._broken: BaseException | None = None
        self._harmless: BaseException | None = None

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def keepers(self) -> tuple[object, ...]:
        return self._keepers

    def outlived(self) -> list[Residency]:
        """Residencies that have ended and that somebody's tensors still look at. Also after `close`."""
        with self._lock:
            dead = {id(entry) for entry in list(self._dead)}
            self._outlived = [e for e in self._outlived if e.state is State.RETIRED and id(e) not in dead]
            return list(self._outlived)

    def check(self) -> None:
        """Raise what makes every further lease impossible."""
        with self._lock:
            self._check()

    def refuse(self, error: BaseException) -> None:
        """Answer every lease from now on with `error`."""
        with self._lock:
            self._broken = self._broken or error
            self._changed.notify_all()

    def close(self) -> None:
        """Stop prefetching and wait until no transfer can still write. Idempotent."""
        with self._lock, self._operation():
            self._is_closed = True
            # After an interrupt our records cannot be trusted: engine and device, closed next, wait for what they have.
            is_in_order = not isinstance(self._broken, InterruptedPassError)
            if is_in_order:
                for entry in self._idle():
                    self._abandon(entry)
                for staged in list(self._staged.values()):
                    self._abandon_staged(staged)
                while self._num_in_flight > 0 and is_in_order:
                    self._changed.wait()
                    is_in_order = not isinstance(self._broken, InterruptedPassError)
            # Also what an interrupted pass has leased: nothing of ours looks at the memory any more.
            for entry in [*self._resident.values(), *self._live.values()]:
                entry.drop_views()
            if is_in_order:
                self._drain()
            self._keepers = ()

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """Enter under the lock. A completion that fires on this thread meanwhile (a cancelled read) must not start
        transfers in the middle of what we change; every operation starts them at its end.

        The lock is the caller's `with`: an interrupt can fall into the entry of a context manager written in Python.
        """
        outer, self._operator = self._operator, threading.get_ident()
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and error is not self._harmless:
                self._broken = InterruptedPassError.by(error)
            raise
        finally:
            self._operator = outer

    def _wait(self) -> None:
        """Wait for a completion. The only place in an operation where an interrupt leaves everything in order."""
        try:
            self._changed.wait()
        except BaseException as error:
            self._harmless = error
            raise

    def _check(self) -> None:
        if self._is_closed:
            raise HeteroError("this run is closed: load the model again")
        if self._broken is not None:
            raise self._broken

    # -- ending -------------------------------------------------------------------------------------------------------

    def _idle(self) -> list[Residency]:
        return [entry for entry in self._live.values() if entry.leases == 0]

    def _abandon(self, entry: Residency) -> None:
        if entry.state is State.FILLING and entry.read is not None:
            # The kernel may still write: the space is free when the read has ended.
            entry.is_abandoned = True
            entry.read.cancel()
            self._live.pop(entry.chunk.chunk_id, None)
        else:
            self._retire(entry)

    def _retire(self, entry: Residency) -> None:
        """End a residency. Its space follows when the last alias is gone, Note [reuse of a slot]."""
        # Recorded after the last use on the compute queue; a copy nobody waited for must itself be waited for.
        used = (entry.space.address, entry.space.nbytes)
        entry.fence = self._device.record([used]) if entry.uses > 0 else entry.ready_event
        entry.retire()
        if entry.tensor is None:
            self._dead.append(entry)
        else:
            entry.drop_views()
            entry.is_outlived = entry not in self._dead
            if entry.is_outlived:
                self._outlived.append(entry)
        # Last, so that `close` finds it, and the alias that it holds, whatever line an interrupt hit.
        del self._live[entry.chunk.chunk_id]

    def _drain(self) -> None:
        while self._dead:
            entry = self._dead.popleft()
            if entry.state is not State.RETIRED:
                entry.tensor = None
                continue
            if entry.is_outlived:
                # Somebody's view of it lived on, and what was computed with that view may still be queued.
                entry.fence = self._device.record([(entry.space.address, entry.space.nbytes)])
            if entry.fence is None or entry.fence.query():
                self._device.retire(entry.space.address, entry.space.nbytes)
            self._first.free(entry.space, entry.fence)
            entry.free()

    # -- starting transfers -------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Start every transfer there is space for, in the order of the schedule. Never blocks."""
        self._drain()
        if self._staging is None:
            while self._start_read():
                pass
        else:
            while self._start_staging() or self._start_copy():
                pass

    def _start_read(self) -> bool:
        """Disk -> ring, without a gpu tier."""
        index, stay = self._upcoming(self._next)
        if stay is None or stay.chunk_id in self._live:
            return False
        chunk = self._chunks[stay.chunk_id]
        space = self._first.allocate(chunk.nbytes)
        if space is None:
            return False
        assert not space.fences, "the CPU computes before it releases"
        entry = Residency(chunk, space, index, stay.num_uses)
        self._live[stay.chunk_id] = entry
        self._advance(index)
        priority = DEMAND_PRIORITY if stay is self._urgent else index
        self._count_read(chunk)
        done = partial(self._read_done, entry, perf_counter())
        entry.read = ChunkRead(self._engine, self._files, chunk, space.address, priority, done)
        return True

    def _read_done(self, entry: Residency, start_s: float, error: BaseException | None) -> None:
        with self._lock, self._completion():
            self._num_in_flight -= 1
            self._span("disk", entry.chunk.name, start_s)
            entry.filled(error)
            self._refuse_if_stuck(error)
            if entry.is_abandoned:
                entry.retire()
                self._dead.append(entry)

    def _start_staging(self) -> bool:
        """Disk -> cpu ring, on the way to the gpu."""
        assert self._staging is not None
        while True:
            if self._urgent is not None:
                if not self._needs_staging(self._urgent.chunk_id):
                    return False
                index, stay = URGENT, self._urgent
                break
            if self._is_ahead(self._next) and self._needs_staging(self._schedule[self._next].chunk_id):
                # The next in line comes first, also when the copy that was staged for it served a surprise.
                self._next_read = self._next
            self._next_read = max(self._next_read, self._next)
            if not self._is_started or self._next_read >= self._next + len(self._schedule):
                return False
            if self._stop_at is not None and self._next_read >= self._stop_at:
                return False
            index, stay = self._next_read, self._schedule[self._next_read]
            if stay.chunk_id not in self._host and index not in self._staged:
                break
            self._next_read += 1
        chunk = self._chunks[stay.chunk_id]
        space = self._staging.allocate(chunk.nbytes)
        if space is None:
            return False
        assert not space.fences, "staging is given back when the copy from it is done"
        staged = self._staged[index] = Staged(chunk, index, space)
        if index >= 0:
            self._next_read = index + 1
        self._count_read(chunk)
        priority = DEMAND_PRIORITY if index < 0 else index
        done = partial(self._staged_done, staged, perf_counter())
        staged.read = ChunkRead(self._engine, self._files, chunk, space.address, priority, done)
        return True

    def _needs_staging(self, chunk_id: int) -> bool:
        return chunk_id not in self._host and chunk_id not in self._live and self._staged_copy_of(chunk_id) is None

    def _staged_copy_of(self, chunk_id: int) -> Staged | None:
        copies = [staged for staged in self._staged.values() if staged.chunk.chunk_id == chunk_id]
        return min(copies, key=lambda staged: staged.index, default=None)

    def _staged_done(self, staged: Staged, start_s: float, error: BaseException | None) -> None:
        with self._lock, self._completion():
            self._num_in_flight -= 1
            self._span("disk", staged.chunk.name, start_s)
            staged.is_read = True
            staged.error = error
            self._refuse_if_stuck(error)
            if self._staged.get(staged.index) is not staged:  # abandoned meanwhile
                self._free_staging(staged.space)

    def _start_copy(self) -> bool:
        """Cpu -> gpu ring, in order."""
        index, stay = self._upcoming(self._next)
        if stay is None or stay.chunk_id in self._live:
            return False
        chunk = self._chunks[stay.chunk_id]
        staged = None
        source = self._host.get(stay.chunk_id)
        if source is None:
            staged = self._staged_copy_of(stay.chunk_id)
            if staged is None or not staged.is_read or staged.error is not None:
                return False
            source = staged.space.address, chunk.nbytes
        space = self._first.allocate(chunk.nbytes)
        if space is None:
            return False
        if staged is not None:
            del self._staged[staged.index]
        entry = self._live[stay.chunk_id] = Residency(chunk, space, index, stay.num_uses)
        self._advance(index)
        self._num_in_flight += 1
        self.stats.num_copies += 1
        self.stats.copied_nbytes += source[1]
        entry.ready_event = self._device.copy(
            space.address,
            *source,
            to_device=True,
            after=space.fences,
            on_done=partial(self._copy_done, entry, staged, perf_counter()),
        )
        return True

    def _copy_done(self, entry: Residency, staged: Staged | None, start_s: float, error: BaseException | None) -> None:
        with self._lock, self._completion():
            self._num_in_flight -= 1
            self._span("gpu link", entry.chunk.name, start_s)
            if staged is not None:
                self._free_staging(staged.space)
            if error is not None:
                self._broken = error
            if entry.state is State.FILLING:
                entry.filled(error)

    def _refuse_if_stuck(self, error: BaseException | None) -> None:
        """After a timeout the kernel may write to the slot at any later time: nothing may be put there again."""
        if isinstance(error, IOEngineError) and error.errno == errno.ETIMEDOUT:
            self._broken = self._broken or error

    def _upcoming(self, index: int) -> tuple[int, Stay | None]:
        if self._urgent is not None:
            # Its index is the model's place, so that it is passed over next and nothing prefetched is.
            return max(0, self._position), None if self._urgent.chunk_id in self._live else self._urgent
        if not self._is_started or not self._is_ahead(index):
            return index, None
        return index, self._schedule[index]

    def _is_ahead(self, index: int) -> bool:
        """Whether the schedule goes on to `index`."""
        return len(self._schedule) > 0 and (self._stop_at is None or index < self._stop_at)

    def _advance(self, index: int) -> None:
        if self._urgent is None:
            self._next = index + 1

    def _count_read(self, chunk: Chunk) -> None:
        self._num_in_flight += 1
        self.stats.num_reads += 1
        self.stats.read_nbytes += chunk.read_nbytes

    def _free_staging(self, space: Space) -> None:
        assert self._staging is not None
        self._staging.free(space, None)

    def _abandon_staged(self, staged: Staged) -> None:
        self.stats.num_abandoned += 1
        if staged.is_read:
            self._drop_staged(staged)
        else:
            del self._staged[staged.index]
            assert staged.read is not None
            staged.read.cancel()

    def _drop_staged(self, staged: Staged) -> None:
        del self._staged[staged.index]
        self._free_staging(staged.space)

    @contextmanager
    def _completion(self) -> Iterator[None]:
        """What a thread of the engine or the device does when a transfer has ended: note it, start what fits now, and
        wake whoever waits. Whatever goes wrong surfaces at the next lease, on the model's thread. Enter under the
        lock."""
        try:
            yield
            if not self._is_closed and self._broken is None and self._operator != threading.get_ident():
                with self._operation():
                    self._pump()
        except BaseException as error:
            self._broken = self._broken or error
        finally:
            self._changed.notify_all()

    def _span(self, lane: str, name: str, start_s: float) -> None:
        if self.spans is not None:
            self.spans.append((lane, name, start_s, perf_counter()))
