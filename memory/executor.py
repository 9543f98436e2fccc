"""Carries a plan out: leases, prefetch, demand fetch.

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

import gc
import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from hetero.io.engine import Engine, File
from hetero.io.errors import HeteroError, OutOfMemoryError
from hetero.memory.chunk import Chunk
from hetero.memory.device import Device
from hetero.memory.residency import alias
from hetero.memory.ring import Ring, Space
from hetero.memory.schedule import Run, Schedule
from hetero.memory.states import ExecutorStats, Residency, Staged, State
from hetero.memory.transfer import ChunkRead

logger = logging.getLogger("hetero.memory")

DEMAND_PRIORITY = -1
URGENT = -1  # the index of a chunk that is staged out of turn
LAST_USE_UNKNOWN = 1 << 62  # such a residency ends when the model moves on to a later chunk


class Executor:
    """Leases chunks in the first tier and keeps the next ones coming.

    It owns no memory and no thread: `first` and `staging` are address ranges of arenas that outlive it, the engine and
    the device are the caller's. `resident` and `host` say where static residents lie (chunk id -> address); their bytes
    must have been loaded (`load`) before the first lease. `close` ends prefetching and waits for what is in flight.
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
        host: Mapping[int, int],
        schedule: Sequence[Run],
    ) -> None:
        self.stats = ExecutorStats()
        self.spans: list[tuple[str, str, float, float]] | None = None
        self._chunks = {chunk.chunk_id: chunk for chunk in chunks}
        self._device, self._engine, self._files = device, engine, files
        self._first, self._staging = first, staging
        self._host = dict(host)
        self._schedule = Schedule(schedule)
        self._changed = threading.Condition(threading.RLock())
        self._dead: deque[Residency] = deque()
        self._resident: dict[int, Residency] = {}
        for chunk_id, address in resident.items():
            chunk = self._chunks[chunk_id]
            self._resident[chunk_id] = Residency.resident(chunk, Space(address, chunk.nbytes, ()))
        self._live: dict[int, Residency] = {}
        self._staged: dict[int, Staged] = {}
        self._num_in_flight = 0
        self._urgent: Run | None = None
        self._next = 0  # schedule index that gets space in the first ring next
        self._next_read = 0  # schedule index whose disk read into staging starts next
        self._position = -1  # schedule index of the last streamed chunk that was leased
        self._operator = 0  # ident of the thread inside an operation
        self._is_started = False
        self._is_closed = False
        self._broken: BaseException | None = None

    # -- leases -------------------------------------------------------------------------------------------------------

    def acquire(self, chunk_ids: Sequence[int]) -> list[Residency]:
        """Make all of `chunk_ids` readable by compute issued after this call, and keep them so until `release`.

        Blocks until the transfers are issued (and, on CPU memory, finished). Raises what a transfer raised
        (IOEngineError), or OutOfMemoryError when the ring cannot hold the moment; no lease is open then.
        """
        start = perf_counter()
        with self._operation():
            self._check()
            self.stats.num_leases += 1
            self._is_started = True
            entries: list[Residency] = []
            try:
                self._take_all(chunk_ids, entries)
                self._pump()
                for entry in entries:
                    self._wait_issued(entry)
            except BaseException:
                self._undo(entries)
                raise
        for entry in entries:
            if entry.ready_event is not None:
                # Outside the lock: the copy's completion callback needs it.
                self._device.wait(entry.ready_event)
        self.stats.wait_s += perf_counter() - start
        return entries

    def release(self, chunk_ids: Sequence[int]) -> None:
        """Return the leases of one `acquire`. The caller must have dropped its views of streamed chunks."""
        with self._operation():
            for chunk_id in chunk_ids:
                entry = self._resident.get(chunk_id) or self._live[chunk_id]
                entry.leases -= 1
                entry.uses += 1
                if entry.leases == 0 and entry.uses >= entry.num_uses and not entry.is_resident:
                    self._retire(entry)
            self._drain()
            self._pump()

    @contextmanager
    def lease(self, chunk_ids: Sequence[int]) -> Iterator[list[Residency]]:
        entries = self.acquire(chunk_ids)
        try:
            yield entries
        finally:
            del entries
            self.release(chunk_ids)

    def bytes_of(self, entry: Residency) -> torch.Tensor:
        """The leased chunk as uint8, shape (nbytes,), with a storage of its own. Valid while the lease is open."""
        if entry.tensor is None:
            on_death = partial(self._dead.append, entry) if not entry.is_resident else _ignore
            entry.tensor = alias(entry.space.address, entry.chunk.nbytes, self._device.torch_device, on_death)
        return entry.tensor

    def is_resident(self, chunk_id: int) -> bool:
        return chunk_id in self._resident

    # -- schedule -----------------------------------------------------------------------------------------------------

    def follow(self, schedule: Sequence[Run]) -> None:
        """Prefetch in this order from now on; what was prefetched for another order is dropped."""
        with self._operation():
            self._check()
            if self._schedule.is_same(schedule):
                return
            for entry in self._idle():
                self._abandon(entry)
            for staged in list(self._staged.values()):
                self._abandon_staged(staged)
            self._schedule = Schedule(schedule)
            # Entries that stay are leased: they are older than anything of the new order.
            self._next = self._next_read = self._schedule.first_index_after(self._next)
            self._pump()

    def prefetch(self) -> None:
        """Start filling the ring before the first lease. Does not block."""
        with self._operation():
            self._check()
            self._is_started = True
            self._pump()

    def close(self) -> None:
        """Stop prefetching and wait until no transfer can still write. Idempotent."""
        with self._operation():
            self._is_closed = True
            for entry in self._idle():
                self._abandon(entry)
            for staged in list(self._staged.values()):
                self._abandon_staged(staged)
            self._changed.wait_for(lambda: self._num_in_flight == 0)
            for entry in self._resident.values():
                entry.drop_views()
            self._drain()

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """Hold the lock. A completion that fires on this thread meanwhile (a cancelled read) must not start transfers
        in the middle of what we change; every operation starts them at its end."""
        with self._changed:
            outer, self._operator = self._operator, threading.get_ident()
            try:
                yield
            finally:
                self._operator = outer

    # -- taking -------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._is_closed:
            raise HeteroError("this run is closed: load the model again")
        if self._broken is not None:
            raise self._broken

    def _take_all(self, chunk_ids: Sequence[int], taken: list[Residency]) -> None:
        try:
            self._take_each(chunk_ids, taken)
        except OutOfMemoryError:
            # The first chunks of the moment may lie where the others do not fit beside them, or an alias may only be
            # kept by a dead reference cycle: start from an empty ring.
            self._undo(taken)
            for entry in self._idle():
                self._abandon(entry)
            self.stats.num_collections += 1
            gc.collect()
            self._drain()
            self._take_each(chunk_ids, taken)

    def _take_each(self, chunk_ids: Sequence[int], taken: list[Residency]) -> None:
        """Lease the chunks of a moment; `taken` grows by each, so that the caller can undo, and ends in their order."""
        # What is there is leased first: taking the others would pass over it, or make room with it.
        for chunk_id in chunk_ids:
            entry = self._resident.get(chunk_id) or self._live.get(chunk_id)
            if entry is not None:
                self._lease(entry, taken)
        present = {entry.chunk.chunk_id for entry in taken}
        for chunk_id in chunk_ids:
            if chunk_id not in present:
                self._lease(self._live.get(chunk_id) or self._summon(chunk_id), taken)
        self._pass_over(self._position)
        by_id = {entry.chunk.chunk_id: entry for entry in taken}
        taken[:] = [by_id[chunk_id] for chunk_id in chunk_ids]

    def _lease(self, entry: Residency, taken: list[Residency]) -> None:
        entry.leases += 1
        taken.append(entry)
        self._position = max(self._position, entry.index)

    def _undo(self, taken: list[Residency]) -> None:
        for entry in taken:
            entry.leases -= 1
            if entry.leases == 0 and entry.state is State.FAILED:
                self._retire(entry)
        taken.clear()
        self._drain()

    def _summon(self, chunk_id: int) -> Residency:
        """Bring a chunk that has no residency: the next in line, one further down the schedule, or a surprise."""
        distance = self._schedule.distance(chunk_id, self._next)
        if distance is None or distance > max(1, len(self._schedule) // 2):
            self.stats.num_demands += 1
            self._urgent = Run(chunk_id, LAST_USE_UNKNOWN)
        else:
            if distance > 0:
                self.stats.num_demands += 1
                self._skip_to(self._next + distance)
            self._pass_over(self._next)
        try:
            while True:
                self._pump()
                entry = self._live.get(chunk_id)
                if entry is not None:
                    return entry
                self._raise_staged_error(chunk_id)
                if not self._make_room(self._chunks[chunk_id]):
                    assert self._num_in_flight > 0, "nothing is under way that could bring the chunk"
                    self._changed.wait()
                self._check()
        finally:
            self._urgent = None
            if URGENT in self._staged:
                self._abandon_staged(self._staged[URGENT])

    def _skip_to(self, index: int) -> None:
        """The model went on to `index`; whatever was staged for what lies between is of no use in this pass."""
        self._next = index
        self._next_read = max(self._next_read, index)
        for staged in [staged for staged in self._staged.values() if 0 <= staged.index < index]:
            self._abandon_staged(staged)

    def _pass_over(self, index: int) -> None:
        """Retire what the model has gone past, used or not."""
        for entry in [entry for entry in self._idle() if entry.index < index]:
            if entry.uses == 0:
                self.stats.num_abandoned += 1
            self._abandon(entry)

    def _make_room(self, chunk: Chunk) -> bool:
        """Free space for a chunk that is needed now, furthest next use first. False: wait for what is in flight."""
        staging = self._staging if self._staging is not None and chunk.chunk_id not in self._host else None
        if staging is not None and self._staged_copy_of(chunk.chunk_id) is None and not staging.can_fit(chunk.nbytes):
            others = [staged for staged in self._staged.values() if staged.read is not None]
            if others:
                furthest = max(others, key=lambda staged: staged.index)
                self._next_read = min(self._next_read, furthest.index)
                self._abandon_staged(furthest)
                return True
            return self._must_wait(chunk, staging, "cpu")
        if not self._first.can_fit(chunk.nbytes):
            idle = self._idle()
            if idle:
                furthest_entry = max(idle, key=lambda entry: entry.index)
                self._next = min(self._next, furthest_entry.index)
                self._next_read = min(self._next_read, self._next)
                self._abandon(furthest_entry)
                self._drain()
                return True
            return self._must_wait(chunk, self._first, "cpu" if self._staging is None else "gpu")
        return False

    def _must_wait(self, chunk: Chunk, ring: Ring, tier: str) -> bool:
        if self._num_in_flight > 0:
            return False
        raise OutOfMemoryError(
            f"no room for chunk {chunk.name!r} ({chunk.nbytes} bytes) in the {tier} ring of {ring.nbytes} bytes: "
            f"{ring.used_nbytes} bytes are leased or still referenced by a tensor outside the model. Drop references "
            f"to weights (views of them count), or raise {tier}_memory",
            tier=tier,
            requested_nbytes=chunk.nbytes,
            free_nbytes=ring.nbytes - ring.used_nbytes,
            largest_holder="tensors that alias released weights",
        )

    def _raise_staged_error(self, chunk_id: int) -> None:
        for staged in list(self._staged.values()):
            if staged.chunk.chunk_id == chunk_id and staged.error is not None:
                self._drop_staged(staged)
                self._next_read = min(self._next_read, max(staged.index, self._next))
                raise staged.error

    def _wait_issued(self, entry: Residency) -> None:
        while entry.state is State.FILLING and entry.ready_event is None:
            self._changed.wait()
            self._check()
        if entry.state is State.FAILED:
            assert entry.error is not None
            raise entry.error

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
        del self._live[entry.chunk.chunk_id]
        # Recorded after the last use on the compute queue; a copy nobody waited for must itself be waited for.
        used = (entry.space.address, entry.space.nbytes)
        entry.fence = self._device.record([used]) if entry.uses > 0 else entry.ready_event
        entry.retire()
        if entry.tensor is None:
            self._dead.append(entry)
        else:
            entry.drop_views()

    def _drain(self) -> None:
        while self._dead:
            entry = self._dead.popleft()
            if entry.state is not State.RETIRED:
                entry.tensor = None
                continue
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
        index, run = self._upcoming(self._next)
        if run is None or run.chunk_id in self._live:
            return False
        chunk = self._chunks[run.chunk_id]
        space = self._first.allocate(chunk.nbytes)
        if space is None:
            return False
        for fence in space.fences:
            fence.synchronize()
        entry = Residency(chunk, space, index, run.num_uses)
        self._live[run.chunk_id] = entry
        self._advance(index)
        priority = DEMAND_PRIORITY if run is self._urgent else index
        self._count_read(chunk)
        done = partial(self._read_done, entry, perf_counter())
        entry.read = ChunkRead(self._engine, self._files, chunk, space.address, priority, done)
        return True

    def _read_done(self, entry: Residency, start_s: float, error: BaseException | None) -> None:
        with self._changed:
            self._num_in_flight -= 1
            self._span("disk", entry.chunk.name, start_s)
            entry.filled(error)
            if entry.is_abandoned:
                entry.retire()
                self._dead.append(entry)
            self._pump_from_callback()

    def _start_staging(self) -> bool:
        """Disk -> cpu ring, on the way to the gpu."""
        assert self._staging is not None
        while True:
            if self._urgent is not None:
                if not self._needs_staging(self._urgent.chunk_id):
                    return False
                index, run = URGENT, self._urgent
                break
            if len(self._schedule) and self._needs_staging(self._schedule[self._next].chunk_id):
                # The next in line comes first, also when the copy that was staged for it served a surprise.
                self._next_read = self._next
            self._next_read = max(self._next_read, self._next)
            if not self._is_started or self._next_read >= self._next + len(self._schedule):
                return False
            index, run = self._next_read, self._schedule[self._next_read]
            if run.chunk_id not in self._host and index not in self._staged:
                break
            self._next_read += 1
        chunk = self._chunks[run.chunk_id]
        space = self._staging.allocate(chunk.nbytes)
        if space is None:
            return False
        for fence in space.fences:
            fence.synchronize()
        staged = self._staged[index] = Staged(chunk, index, space)
        if index >= 0:
            self._next_read = index + 1
        self._count_read(chunk)
        priority = DEMAND_PRIORITY if index < 0 else index
        done = partial(self._staged_done, staged, perf_counter())
        staged.read = ChunkRead(self._engine, self._files, chunk, space.address, priority, done)
        return True

    def _needs_staging(self, chunk_id: int) -> bool:
        return (
            chunk_id not in self._host and chunk_id not in self._live and self._staged_copy_of(chunk_id) is None
        )

    def _staged_copy_of(self, chunk_id: int) -> Staged | None:
        copies = [staged for staged in self._staged.values() if staged.chunk.chunk_id == chunk_id]
        return min(copies, key=lambda staged: staged.index, default=None)

    def _staged_done(self, staged: Staged, start_s: float, error: BaseException | None) -> None:
        with self._changed:
            self._num_in_flight -= 1
            self._span("disk", staged.chunk.name, start_s)
            staged.is_read = True
            staged.error = error
            if self._staged.get(staged.index) is not staged:  # abandoned meanwhile
                self._free_staging(staged.space)
            self._pump_from_callback()

    def _start_copy(self) -> bool:
        """Cpu -> gpu ring, in order."""
        index, run = self._upcoming(self._next)
        if run is None or run.chunk_id in self._live:
            return False
        chunk = self._chunks[run.chunk_id]
        staged = None
        source = self._host.get(run.chunk_id)
        if source is None:
            staged = self._staged_copy_of(run.chunk_id)
            if staged is None or not staged.is_read or staged.error is not None:
                return False
            source = staged.space.address
        space = self._first.allocate(chunk.nbytes)
        if space is None:
            return False
        if staged is not None:
            del self._staged[staged.index]
        entry = self._live[run.chunk_id] = Residency(chunk, space, index, run.num_uses)
        self._advance(index)
        self._num_in_flight += 1
        self.stats.num_copies += 1
        self.stats.copied_nbytes += chunk.nbytes
        entry.ready_event = self._device.copy(
            space.address,
            source,
            chunk.nbytes,
            to_device=True,
            after=space.fences,
            on_done=partial(self._copy_done, entry, staged, perf_counter()),
        )
        return True

    def _copy_done(self, entry: Residency, staged: Staged | None, start_s: float, error: BaseException | None) -> None:
        with self._changed:
            self._num_in_flight -= 1
            self._span("gpu link", entry.chunk.name, start_s)
            if staged is not None:
                self._free_staging(staged.space)
            if error is not None:
                self._broken = error
            if entry.state is State.FILLING:
                entry.filled(error)
            self._pump_from_callback()

    def _upcoming(self, index: int) -> tuple[int, Run | None]:
        if self._urgent is not None:
            # Its index is the model's place, so that it is passed over next and nothing prefetched is.
            return max(0, self._position), None if self._urgent.chunk_id in self._live else self._urgent
        if not self._is_started or not len(self._schedule):
            return index, None
        return index, self._schedule[index]

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

    def _pump_from_callback(self) -> None:
        if not self._is_closed and self._operator != threading.get_ident():
            try:
                with self._operation():
                    self._pump()
            except BaseException as error:  # surfaces at the next lease, on the model's thread
                self._broken = error
        self._changed.notify_all()

    def _span(self, lane: str, name: str, start_s: float) -> None:
        if self.spans is not None:
            self.spans.append((lane, name, start_s, perf_counter()))


def _ignore() -> None:
    """A resident chunk's alias dies with the run; nothing waits for it."""
