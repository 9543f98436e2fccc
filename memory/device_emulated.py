"""A GPU made of RAM: hard capacity, own memory, a copy thread per direction at a set speed, NaN poison, races found.

It runs the executor's code for a real GPU in CI, and answers "what if I bought that card". It computes on the CPU, on
the calling thread, so its compute queue is always empty, except that `event_lag_s` lets every recorded event pass only
that much later: whoever relies on compute being finished without waiting for it is then caught.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hetero.io.arena import PAGE_NBYTES, Arena, round_up
from hetero.io.errors import ConfigError, OutOfMemoryError
from hetero.io.interrupts import Latch
from hetero.memory.device import POISON, ArenaLike, Event, LinkInfo, Range
from hetero.memory.races import RaceDetector
from hetero.memory.sizes import format_size

logger = logging.getLogger("hetero.memory")

OnDone = Callable[[BaseException | None], None]


class ComputeEvent:
    """Passes at a moment of the clock, `event_lag_s` after it was recorded."""

    __slots__ = ("clock", "number", "passes_at_s", "queue")

    def __init__(self, number: int, passes_at_s: float) -> None:
        self.queue = "compute"
        self.number = number
        self.clock = {self.queue: number}
        self.passes_at_s = passes_at_s

    def query(self) -> bool:
        return time.perf_counter() >= self.passes_at_s

    def synchronize(self) -> None:
        _sleep_until(self.passes_at_s)


class CopyEvent:
    """Passes when its copy thread has set it. `passes_at_s` is then the moment the link was free again."""

    __slots__ = ("_done", "clock", "error", "number", "passes_at_s", "queue")

    def __init__(self, queue: str, number: int) -> None:
        self.queue = queue
        self.number = number
        self.clock = {queue: number}
        self.passes_at_s = 0.0
        self.error: BaseException | None = None
        self._done = Latch()

    def query(self) -> bool:
        return self._done.is_open

    def wait(self) -> None:
        self._done.wait()

    def synchronize(self) -> None:
        self._done.wait()
        if self.error is not None:
            raise self.error

    def set(self, passes_at_s: float, error: BaseException | None) -> None:
        self.passes_at_s, self.error = passes_at_s, error
        self._done.open()


@dataclass(frozen=True, slots=True)
class _Copy:
    dst: int
    src: int
    nbytes: int
    after: tuple[Event, ...]
    event: CopyEvent
    on_done: OnDone | None
    issued_at_s: float


class _Link:
    """One direction: a thread that carries out copies in order, each at its due time.

    Due times are absolute (the later of issue, `after` and the previous copy's end, plus latency and transfer), so late
    wake-ups do not add up. The bytes move as late as they can: compute that did not wait finds poison.
    """

    def __init__(self, name: str, bandwidth_bytes_per_s: float | None, latency_s: float) -> None:
        self.name = name
        self._copies: queue.SimpleQueue[_Copy | Latch | None] = queue.SimpleQueue()
        self._num_issued = 0
        self._is_closed = False
        self._first_error: BaseException | None = None
        self._bandwidth, self._latency_s = bandwidth_bytes_per_s, latency_s
        self._free_at_s = 0.0
        self._memory_bytes_per_s = 8e9  # how fast memmove is here; measured with every large copy
        self._thread = threading.Thread(target=self._run, name=f"hetero-copy-{name.replace(' ', '-')}", daemon=True)
        self._thread.start()

    def new_event(self) -> CopyEvent:
        self._num_issued += 1
        return CopyEvent(self.name, self._num_issued)

    def issue(self, copy: _Copy) -> None:
        self._copies.put(copy)

    def drain(self) -> None:
        """Block until every copy issued so far has ended, well or not; also one whose issuer was interrupted."""
        if not self._is_closed:  # not `is_alive`, which an interrupt in it makes say no for ever
            latch = Latch()
            self._copies.put(latch)
            latch.wait()

    def synchronize(self) -> None:
        self.drain()
        if self._first_error is not None:
            raise self._first_error

    def close(self) -> None:
        self._is_closed = True
        self._copies.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (copy := self._copies.get()) is not None:
            if isinstance(copy, Latch):
                copy.open()
                continue
            error: BaseException | None = None
            try:
                self._carry_out(copy)
            except BaseException as caught:  # of an event in `after`; the next copies go on
                error = caught
                self._first_error = self._first_error or caught
            copy.event.set(max(self._free_at_s, time.perf_counter()), error)
            if copy.on_done is not None:
                try:
                    copy.on_done(error)
                except Exception:
                    logger.exception("a completion callback failed")
            del copy

    def _carry_out(self, copy: _Copy) -> None:
        start_s = max(copy.issued_at_s, self._free_at_s)
        for event in copy.after:
            event.synchronize()
            start_s = max(start_s, getattr(event, "passes_at_s", 0.0))
        transfer_s = copy.nbytes / self._bandwidth if self._bandwidth is not None else 0.0
        self._free_at_s = start_s + self._latency_s + transfer_s
        _sleep_until(self._free_at_s - copy.nbytes / self._memory_bytes_per_s)
        moved_from_s = time.perf_counter()
        ctypes.memmove(copy.dst, copy.src, copy.nbytes)  # without the GIL
        if copy.nbytes >= 1 << 20:
            self._memory_bytes_per_s = copy.nbytes / max(time.perf_counter() - moved_from_s, 1e-9)
        _sleep_until(self._free_at_s)


class _DeviceArena:
    """Memory of the emulated gpu tier, counted against its capacity until closed."""

    def __init__(self, nbytes: int, on_close: Callable[[_DeviceArena], None]) -> None:
        self.address, self.nbytes = 0, nbytes
        self._arena: Arena | None = None
        self._on_close = on_close

    def back(self, arena: Arena) -> None:
        """Put memory behind it."""
        self.address, self._arena = arena.address, arena

    @property
    def keeper(self) -> object:
        return self._arena.keeper if self._arena is not None else None

    @property
    def huge_nbytes(self) -> int:
        return self._arena.huge_nbytes if self._arena is not None else 0

    def close(self) -> None:
        if self._arena is not None:
            self._on_close(self)
            self._arena.close()
            self._arena = None


class EmulatedDevice:
    """`Device` on CPU memory. Its arenas are RAM of this process but count as the gpu tier, not against cpu_memory.

    `bandwidth_bytes_per_s` (per direction, None: as fast as memmove) and `latency_s` shape every copy. `poison` fills
    new and retired memory with NaN; `detect_races` raises RaceError from `copy` and `retire`. Turn both off only to
    time. `torch_device` is what tensors over its memory say they are on: the tests have one that torch takes for a GPU.
    Owns two threads, which `close` ends.
    """

    name = "emulated"
    has_gpu_tier = True

    def __init__(
        self,
        capacity_nbytes: int,
        *,
        bandwidth_bytes_per_s: float | None = None,
        latency_s: float = 0.0,
        event_lag_s: float = 0.0,
        poison: bool = True,
        detect_races: bool = True,
        torch_device: torch.device | None = None,
    ) -> None:
        if capacity_nbytes <= 0:
            raise ConfigError(f"an emulated GPU needs a capacity above 0 bytes, got {capacity_nbytes}")
        if (bandwidth_bytes_per_s is not None and not bandwidth_bytes_per_s > 0) or not latency_s >= 0:
            raise ConfigError(
                f"a link needs a bandwidth above 0 bytes/s and a latency of 0 s or more, got {bandwidth_bytes_per_s} "
                f"and {latency_s}"
            )
        self.torch_device = torch_device or torch.device("cpu")
        self.capacity_nbytes = capacity_nbytes
        self._link_info = LinkInfo(bandwidth_bytes_per_s, latency_s)
        self._event_lag_s, self._poison = event_lag_s, poison
        self._arenas: list[_DeviceArena] = []
        self._last_recorded = ComputeEvent(0, 0.0)
        self._races = RaceDetector() if detect_races else None
        self._lock = threading.Lock()  # issue order, arenas, races; never held while a callback or a memset runs
        self._links = {
            True: _Link("to device", bandwidth_bytes_per_s, latency_s),
            False: _Link("from device", bandwidth_bytes_per_s, latency_s),
        }
        self._adopted: set[Range] = set()
        self._is_closed = False

    def allocate(self, nbytes: int, *, name: str) -> ArenaLike:
        arena = _DeviceArena(round_up(nbytes, PAGE_NBYTES), self._forget)
        try:
            self._count(arena, nbytes, name)
            arena.back(Arena(nbytes, name=name))
            if self._poison:
                ctypes.memset(arena.address, POISON, arena.nbytes)
        except BaseException:
            if arena in self._arenas:
                self._arenas.remove(arena)  # nobody will close it
            raise
        return arena

    def _count(self, arena: _DeviceArena, nbytes: int, name: str) -> None:
        """Count it against the capacity, before there is memory behind it."""
        with self._lock:
            free = self._free_nbytes()
            if arena.nbytes > free:
                largest = max((arena.nbytes for arena in self._arenas), default=0)
                raise OutOfMemoryError(
                    f"the emulated GPU of {format_size(self.capacity_nbytes)} has {format_size(free)} free; {name!r} "
                    f"asks for {format_size(nbytes)}. Raise its capacity, or ask for less gpu_memory",
                    tier="gpu",
                    requested_nbytes=nbytes,
                    free_nbytes=free,
                    largest_holder=f"an arena of {format_size(largest)}" if largest else None,
                )
            self._arenas.append(arena)

    def allocate_host(self, nbytes: int, *, name: str) -> ArenaLike:
        return Arena(nbytes, name=name)

    def copy(
        self,
        dst: int,
        src: int,
        nbytes: int,
        *,
        to_device: bool,
        after: Sequence[Event] = (),
        on_done: OnDone | None = None,
    ) -> Event:
        link = self._links[to_device]
        with self._lock:
            assert not self._is_closed, "a copy was issued to a closed device"
            device_side = (dst if to_device else src, nbytes)
            is_ours = self._owns(device_side) or device_side in self._adopted
            assert is_ours, f"the copy's device side {device_side} is not inside the device's memory"
            self._adopted.discard(device_side)
            event = link.new_event()
            try:
                if self._races is not None:
                    self._races.copied((dst, nbytes), (src, nbytes), event, after)
                link.issue(_Copy(dst, src, nbytes, tuple(after), event, on_done, time.perf_counter()))
            except BaseException:  # an interrupt: a copy that was not issued must not be waited for
                if self._races is not None:
                    self._races.withdraw(event)
                raise
        return event

    def adopt(self, where: Range) -> None:
        with self._lock:
            self._adopted.add(where)

    def record(self, uses: Sequence[Range] = ()) -> Event:
        with self._lock:
            event = ComputeEvent(self._last_recorded.number + 1, time.perf_counter() + self._event_lag_s)
            self._last_recorded = event
            if self._races is not None and uses:
                self._races.used(uses, event)
        return event

    def wait(self, event: Event) -> None:
        if not isinstance(event, ComputeEvent):  # the compute queue is in order: it never waits for itself
            event.synchronize()

    def retire(self, address: int, nbytes: int) -> None:
        with self._lock:
            if self._races is not None:
                self._races.retired((address, nbytes), is_device_memory=self._owns((address, nbytes)))
        if self._poison:
            ctypes.memset(address, POISON, nbytes)  # without the GIL

    def memory_info(self) -> tuple[int, int]:
        with self._lock:
            return self._free_nbytes(), self.capacity_nbytes

    def link_info(self) -> LinkInfo:
        return self._link_info

    def synchronize(self) -> None:
        self._last_recorded.synchronize()
        for link in self._links.values():
            link.synchronize()

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        for link in self._links.values():
            link.close()

    def _free_nbytes(self) -> int:
        return self.capacity_nbytes - sum(arena.nbytes for arena in self._arenas)

    def _owns(self, where: Range) -> bool:
        return any(
            arena.address <= where[0] and where[0] + where[1] <= arena.address + arena.nbytes for arena in self._arenas
        )

    def _forget(self, arena: _DeviceArena) -> None:
        for link in self._links.values():
            link.drain()  # a copy that still comes would write to unmapped memory
        with self._lock:
            if arena in self._arenas:
                self._arenas.remove(arena)
            if self._races is not None:
                self._races.forget((arena.address, arena.nbytes))


def _sleep_until(moment_s: float) -> None:
    while (left_s := moment_s - time.perf_counter()) > 0:
        time.sleep(left_s)
