"""Carries a plan out: leases, and what happens when the model does something else than the plan said."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter

import torch

from hetero.io.errors import OutOfMemoryError
from hetero.memory.chunk import Chunk
from hetero.memory.device import Range
from hetero.memory.pipeline import URGENT, Pipeline
from hetero.memory.residency import alias
from hetero.memory.ring import Ring
from hetero.memory.schedule import Schedule, Stay
from hetero.memory.states import Residency, State

LAST_USE_UNKNOWN = 1 << 62  # such a residency ends when the model moves on to a later chunk


class Executor(Pipeline):
    """Leases chunks in the first tier. One thread at a time runs the model; see `Pipeline` for what it owns."""

    # -- leases -------------------------------------------------------------------------------------------------------

    def acquire(self, chunk_ids: Sequence[int], *, may_collect: bool = True) -> list[Residency]:
        """Make all of `chunk_ids` readable by compute issued after this call, and keep them so until `release`.

        Blocks until the transfers are issued (and, on CPU memory, finished). Raises what a transfer raised
        (IOEngineError), or OutOfMemoryError when the ring cannot hold the moment; no lease is open then. `may_collect`:
        before that, look for dead reference cycles that keep slots, which may take a large part of a second.
        """
        start = perf_counter()
        with self._lock, self._operation():
            self._check()
            self.stats.num_leases += 1
            self._is_started = True
            entries: list[Residency] = []
            try:
                self._take_all(chunk_ids, entries, may_collect)
                self._pump()
                for entry in entries:
                    self._wait_issued(entry)
            except BaseException:
                self._undo(entries)
                raise
        try:
            for entry in entries:
                if entry.ready_event is not None:
                    # Outside the lock: the copy's completion callback needs it.
                    self._device.wait(entry.ready_event)
        except BaseException:
            with self._lock, self._operation():
                self._undo(entries)
            raise
        self.stats.wait_s += perf_counter() - start
        return entries

    def release(self, chunk_ids: Sequence[int]) -> None:
        """Return the leases of one `acquire`. The caller must have dropped its views of streamed chunks."""
        with self._lock, self._operation():
            for chunk_id in chunk_ids:
                entry = self._resident.get(chunk_id) or self._live[chunk_id]
                entry.leases -= 1
                entry.uses += 1
                if entry.leases == 0 and entry.uses >= entry.num_uses and not entry.is_resident:
                    self._retire(entry)
            self._drain()
            self._pump()

    def take_back(self) -> None:
        """End every lease: the pass that held them was interrupted and will not."""
        with self._lock, self._operation():
            self._check()
            leased = [entry for entry in [*self._resident.values(), *self._live.values()] if entry.leases]
        for entry in leased:
            if entry.ready_event is not None:
                # The interrupt may have come before compute was made to wait; outside the lock, as in `acquire`.
                self._device.wait(entry.ready_event)
        with self._lock, self._operation():
            for entry in leased:
                entry.leases, entry.uses = 0, entry.uses + 1
            for entry in self._idle():
                self._abandon(entry)
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
            # It holds the entry, hence the entry must not hold the tensor for ever: `drop_views`.
            on_death = partial(self._dead.append, entry) if not entry.is_resident else _ignore
            where = entry.space.address, entry.chunk.nbytes
            entry.tensor = alias(*where, self._device.torch_device, on_death, self._keepers)
        return entry.tensor

    def is_resident(self, chunk_id: int) -> bool:
        return chunk_id in self._resident

    def host_address(self, chunk_id: int) -> int | None:
        """Where the cpu tier, behind a gpu tier, holds the chunk for the whole run; None when it does not."""
        where = self._host.get(chunk_id)
        return where[0] if where is not None else None

    # -- schedule -----------------------------------------------------------------------------------------------------

    def follow(self, schedule: Sequence[Stay]) -> None:
        """Prefetch in this order from now on; what was prefetched for another order is dropped."""
        with self._lock, self._operation():
            self._check()
            if not self._schedule.is_same(schedule):
                self._take_order(schedule)
                self._pump()

    def restart(self, schedule: Sequence[Stay]) -> None:
        """Drop whatever was read ahead, and prefetch in this order from its start to its end, once; an empty one stops.

        For weights that can change: between passes their homes are the only copies.
        """
        with self._lock, self._operation():
            self._check()
            self._take_order(schedule)
            self._stop_at = self._next + len(schedule)
            self._is_started = bool(schedule)
            self._pump()

    def _take_order(self, schedule: Sequence[Stay]) -> None:
        for entry in self._idle():
            self._abandon(entry)
        for staged in list(self._staged.values()):
            self._abandon_staged(staged)
        self._schedule = Schedule(schedule)
        # Entries that stay are leased: they are older than anything of the new order.
        self._next = self._next_read = self._schedule.first_index_after(self._next)

    def drop(self, chunk_id: int) -> bool:
        """Forget copies of a chunk whose home has changed. False: one is leased, so it had to stay."""
        with self._lock, self._operation():
            entry = self._live.get(chunk_id)
            if entry is not None and entry.leases:
                return False
            if entry is not None:
                self._abandon(entry)
            for staged in [staged for staged in self._staged.values() if staged.chunk.chunk_id == chunk_id]:
                self._abandon_staged(staged)
            self._drain()
            return True

    def set_host(self, chunk_id: int, where: Range | None) -> None:
        """Say that the chunk's home is now these bytes of the cpu tier, or (None) its extent of the file."""
        with self._lock, self._operation():
            if where is None:
                self._host.pop(chunk_id, None)
            else:
                self._host[chunk_id] = where

    def prefetch(self) -> None:
        """Start filling the ring before the first lease. Does not block."""
        with self._lock, self._operation():
            self._check()
            self._is_started = True
            self._pump()

    def settle(self) -> None:
        """Block until everything that is read ahead has arrived and the rings take no more."""
        with self._lock, self._operation():
            self._pump()
            # Completions start what fits next under the lock, so nothing in flight means nothing to come.
            self._changed.wait_for(lambda: self._num_in_flight == 0)

    def ahead(self) -> tuple[int, int]:
        """Bytes that were read from disk, and copied to the gpu tier, for moments still to come.

        What a pass needs is exact; what lies ahead when it ends is not, because the gaps of a ring depend on timing.
        """
        with self._lock, self._operation():
            waiting = [entry.chunk for entry in self._live.values() if entry.uses == entry.leases == 0]
            read = [chunk for chunk in waiting if chunk.chunk_id not in self._host]
            read += [staged.chunk for staged in self._staged.values()]
            copied = sum(chunk.nbytes for chunk in waiting) if self._staging is not None else 0
            return sum(chunk.read_nbytes for chunk in read), copied

    # -- taking -------------------------------------------------------------------------------------------------------

    def _take_all(self, chunk_ids: Sequence[int], taken: list[Residency], may_collect: bool) -> None:
        try:
            self._take_each(chunk_ids, taken)
        except OutOfMemoryError:
            # The first chunks of the moment may lie where the others do not fit beside them, or an alias may only be
            # kept by a dead reference cycle: start from an empty ring.
            self._undo(taken)
            for entry in self._idle():
                self._abandon(entry)
            if may_collect:
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
        if distance is not None and not self._is_ahead(self._next + distance):
            distance = None
        if distance is None or distance > max(1, len(self._schedule) // 2):
            self.stats.num_demands += 1
            self._urgent = Stay(chunk_id, LAST_USE_UNKNOWN)
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
                    self._wait()
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
            self._wait()
            self._check()
        if entry.state is State.FAILED:
            assert entry.error is not None
            raise entry.error


def _ignore() -> None:
    """A resident chunk's alias dies with the run; nothing waits for it."""
