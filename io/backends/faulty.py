"""Fault injection: a backend around a backend that makes chosen blocks fail, come short, late or never.

    Engine(wrap_backend=lambda inner: FaultyBackend(inner, lambda block: Fault(error=errno.EIO) if ... else None))

Tests of every layer use it. Blocks are really carried out; only what is said about them changes, so bookkeeping, lanes
and cancellation are those of the real backend.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetero.io.backends.base import Backend, Block, Completion


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a block. The default is nothing."""

    error: int = 0
    """errno to report instead of success."""
    short_nbytes: int | None = None
    """Transfer only this many bytes (a multiple of 4096 for O_DIRECT), as if the device had nothing more to give."""
    delay_s: float = 0.0
    """Report the completion this much later."""
    stuck: bool = False
    """Never report it, until `release_stuck()`."""


class FaultyBackend:
    """`fault(block)` is called once per block, on the submitting thread."""

    def __init__(self, inner: Backend, fault: Callable[[Block], Fault | None]) -> None:
        self.inner = inner
        self.name = inner.name
        self.direct = inner.direct
        self.num_lanes = inner.num_lanes
        self._fault = fault
        self._lock = threading.Lock()
        self._faults: dict[int, Fault] = {}
        self._late: list[tuple[float, Completion]] = []
        self._stuck: dict[int, Completion] = {}

    def push(self, blocks: Sequence[Block]) -> None:
        sent: list[Block] = []
        for block in blocks:
            fault = self._fault(block)
            if fault is not None:
                with self._lock:
                    self._faults[block.block_id] = fault
                if fault.short_nbytes is not None:
                    block = block._replace(
                        nbytes=fault.short_nbytes,
                        copy_nbytes=min(block.copy_nbytes, max(fault.short_nbytes - block.copy_skip, 1)),
                    )
            sent.append(block)
        self.inner.push(sent)

    def withdraw(self, priority: int, first_id: int, last_id: int, *, unless_started: bool) -> list[int]:
        return self.inner.withdraw(priority, first_id, last_id, unless_started=unless_started)

    def collect(self, timeout_s: float) -> list[Completion]:
        with self._lock:
            due_s = min((due for due, _ in self._late), default=None)
        if due_s is not None:
            timeout_s = max(0.0, min(timeout_s, due_s - time.monotonic()))
        finished = self.inner.collect(timeout_s)
        now_s = time.monotonic()
        told: list[Completion] = []
        with self._lock:
            for completion in finished:
                fault = self._faults.pop(completion.block_id, None)
                if fault is None:
                    told.append(completion)
                    continue
                if fault.error:
                    completion = completion._replace(error=fault.error)
                if fault.stuck:
                    self._stuck[completion.block_id] = completion
                else:
                    self._late.append((now_s + fault.delay_s, completion))
            told.extend(completion for due, completion in self._late if due <= now_s)
            self._late = [entry for entry in self._late if entry[0] > now_s]
        return told

    def release_stuck(self) -> None:
        """Report everything that was stuck, as a disk that comes back would."""
        with self._lock:
            self._late.extend((0.0, completion) for completion in self._stuck.values())
            self._stuck.clear()
        self.inner.wake()

    def wake(self) -> None:
        self.inner.wake()

    def in_flight(self) -> list[tuple[int, float]]:
        now_ns = time.monotonic_ns()
        with self._lock:
            kept = [*self._stuck.values(), *(completion for _, completion in self._late)]
            ages = [(completion.block_id, (now_ns - completion.end_ns) / 1e9) for completion in kept]
        return self.inner.in_flight() + ages

    def cpu_s(self) -> float:
        return self.inner.cpu_s()

    def close(self, timeout_s: float) -> bool:
        closed = self.inner.close(timeout_s)
        with self._lock:
            return closed and not self._stuck
