"""io_uring: blocks go to a native thread that owns the ring, so neither submission nor a busy GIL stops the disk."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Sequence

from hetero.io.backends.base import Block, Completion


class UringBackend:
    """Raises ImportError without the native module, OSError when the kernel refuses a ring."""

    name = "io_uring"
    direct = True

    def __init__(self, num_lanes: int, bounce_address: int, slot_nbytes: int) -> None:
        from hetero.io import _uring

        self.num_lanes = num_lanes
        self._ring = _uring.Ring(num_lanes, bounce_address, slot_nbytes)
        self._stopped = False
        self._done_fd = self._ring.done_fd  # the ring closes it
        self._poll = select.poll()
        self._poll.register(self._done_fd, select.POLLIN)

    def push(self, blocks: Sequence[Block]) -> None:
        self._ring.push(blocks)

    def withdraw(self, priority: int, first_id: int, last_id: int, *, unless_started: bool) -> list[int]:
        return self._ring.withdraw(priority, first_id, last_id, unless_started)

    def collect(self, timeout_s: float) -> list[Completion]:
        # Waiting in poll(), not in native code: a daemon thread may be ended inside a Python call without harm when
        # the interpreter goes down, but not inside a C++ frame.
        if self._poll.poll(timeout_s * 1000):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._done_fd)
        return [Completion._make(fields) for fields in self._ring.take()]

    def wake(self) -> None:
        if not self._stopped:  # afterwards the number may be another file's
            os.eventfd_write(self._done_fd, 1)

    def in_flight(self) -> list[tuple[int, float]]:
        return [(block_id, age_ns / 1e9) for block_id, age_ns in self._ring.in_flight()]

    def cpu_s(self) -> float:
        return self._ring.cpu_ns() / 1e9

    def close(self, timeout_s: float) -> bool:
        if self._stopped:
            return True
        self._ring.stop()
        deadline = time.monotonic() + timeout_s
        while not self._ring.join(0.05):  # in short waits, so that Ctrl-C gets through
            if time.monotonic() >= deadline:
                self._ring.leave_behind()
                self._stopped = True
                return False
        self._stopped = True
        return True
