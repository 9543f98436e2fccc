"""A disk of a known rate: a backend around a backend that gives every block its turn on one slow, serial device.

    Engine(wrap_backend=lambda inner: ThrottledBackend(inner, bytes_per_s=200e6, latency_s=1e-4))

Tests hold predictions against it, and it answers "what if that disk were slower". The bytes really move, as soon as a
block's turn comes; its completion is told when the slow device would be done. Due times are absolute (the later of
submission and the previous block's end, plus transfer), so late wake-ups do not add up. The latency counts when the
device was idle: a queue hides it otherwise.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hetero.io.backends.base import Backend, Block, Completion
from hetero.io.errors import ConfigError


@dataclass(slots=True)
class _Turn:
    """The block that the device works on."""

    block: Block
    start_s: float
    due_s: float
    completion: Completion | None = None


class ThrottledBackend:
    """Blocks take turns by (priority, block id). `bytes_per_s` counts device bytes, those of an aligned read."""

    num_lanes = 1

    def __init__(self, inner: Backend, *, bytes_per_s: float, latency_s: float = 0.0) -> None:
        if not bytes_per_s > 0 or not latency_s >= 0:
            raise ConfigError(
                f"a disk needs a rate above 0 and a latency of 0 or more, got {bytes_per_s=} {latency_s=}"
            )
        self.inner = inner
        self.name = inner.name
        self.direct = inner.direct
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, int, float, Block]] = []  # (priority, block id, submitted at, block), a heap
        self._turn: _Turn | None = None
        self._free_at_s = 0.0
        self._woken = threading.Event()

    def push(self, blocks: Sequence[Block]) -> None:
        now_s = time.monotonic()
        with self._lock:
            for block in blocks:
                heapq.heappush(self._waiting, (block.priority, block.block_id, now_s, block))
            is_idle = self._turn is None
        if is_idle:
            self.wake()

    def withdraw(self, priority: int, first_id: int, last_id: int, *, unless_started: bool) -> list[int]:
        with self._lock:
            ids = sorted(
                entry[1] for entry in self._waiting if entry[0] == priority and first_id <= entry[1] <= last_id
            )
            if unless_started and len(ids) != last_id - first_id + 1:
                return []
            gone = set(ids)
            self._waiting = [entry for entry in self._waiting if entry[1] not in gone]
            heapq.heapify(self._waiting)
            return ids

    def collect(self, timeout_s: float) -> list[Completion]:
        self._woken.clear()
        turn = self._next_turn()
        if turn is None or turn.completion is None:
            for completion in self.inner.collect(timeout_s):
                assert turn is not None and completion.block_id == turn.block.block_id
                turn.completion = completion
            if turn is None or turn.completion is None:
                return []
        left_s = turn.due_s - time.monotonic()
        if left_s > 0:
            self._woken.wait(min(timeout_s, left_s))
        if time.monotonic() < turn.due_s:
            return []
        with self._lock:
            self._free_at_s = turn.due_s
            self._turn = None
        start_ns, end_ns = int(turn.start_s * 1e9), int(turn.due_s * 1e9)
        told = turn.completion._replace(start_ns=start_ns, end_ns=end_ns)
        self._next_turn()  # its bytes move while this one's owner is told
        return [told]

    def _next_turn(self) -> _Turn | None:
        with self._lock:
            if self._turn is not None or not self._waiting:
                return self._turn
            _, _, submitted_s, block = heapq.heappop(self._waiting)
            start_s = max(self._free_at_s, submitted_s)
            latency_s = self._latency_s if submitted_s > self._free_at_s else 0.0
            due_s = start_s + latency_s + block.nbytes / self._bytes_per_s
            turn = self._turn = _Turn(block, start_s, due_s)
        # A request of its own: a backend may tell of a request only when its last block is done.
        self.inner.push([block._replace(request_id=block.block_id)])
        return turn

    def wake(self) -> None:
        self._woken.set()
        self.inner.wake()

    def in_flight(self) -> list[tuple[int, float]]:
        """The inner backend's; a block that only waits for its due time makes progress."""
        return self.inner.in_flight()

    def cpu_s(self) -> float:
        return self.inner.cpu_s()

    def close(self, timeout_s: float) -> bool:
        return self.inner.close(timeout_s)
