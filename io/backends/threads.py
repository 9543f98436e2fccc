"""Blocking preadv/pwritev in a few threads: the same semantics where a kernel or a sandbox refuses io_uring."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import heapq
import os
import select
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from hetero.io.arena import PAGE_NBYTES
from hetero.io.backends.base import Block, Completion
from hetero.io.interrupts import Condition


@dataclass(slots=True)
class _Lane:
    """One thread and what it is doing. Written by its thread; read by the watchdog under the backend's lock."""

    slot_address: int
    block: Block | None = None
    progress_ns: int = 0
    cpu_s: float = 0.0


class ThreadsBackend:
    """Each lane is a daemon thread: it takes the lowest (priority, block_id) block and waits for it without the GIL."""

    name = "threads"
    direct = True

    def __init__(self, num_lanes: int, bounce_address: int, slot_nbytes: int) -> None:
        self.num_lanes = num_lanes
        self._changed = Condition()
        self._waiting: list[tuple[int, int, Block]] = []  # a heap
        self._num_left: Counter[int] = Counter()  # by request id: blocks waiting or in flight
        self._finished: deque[Completion] = deque()
        self._stopping = False
        self._closed = False
        self._num_running = num_lanes
        self._done_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._done_fd, select.POLLIN)
        self._lanes = [_Lane(bounce_address + i * slot_nbytes) for i in range(num_lanes)]
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"hetero-io-{i}", daemon=True)
            for i, lane in enumerate(self._lanes)
        ]
        for thread in self._threads:
            thread.start()

    def push(self, blocks: Sequence[Block]) -> None:
        with self._changed:
            for block in blocks:
                heapq.heappush(self._waiting, (block.priority, block.block_id, block))
                self._num_left[block.request_id] += 1
            self._changed.notify(len(blocks))

    def withdraw(self, priority: int, first_id: int, last_id: int, *, unless_started: bool) -> list[int]:
        with self._changed:
            found = [block for p, b, block in self._waiting if p == priority and first_id <= b <= last_id]
            ids = sorted(block.block_id for block in found)
            if unless_started and len(ids) != last_id - first_id + 1:
                return []
            if ids:
                gone = set(ids)
                if self._count_down(found[0].request_id, len(ids)):
                    # what is left of the request may already be in _finished, and did not count as news then
                    os.eventfd_write(self._done_fd, 1)
                self._waiting = [entry for entry in self._waiting if entry[1] not in gone]
                heapq.heapify(self._waiting)
            return ids

    def collect(self, timeout_s: float) -> list[Completion]:
        if self._poll.poll(timeout_s * 1000):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._done_fd)
        completions = []
        while self._finished:
            completions.append(self._finished.popleft())
        return completions

    def wake(self) -> None:
        if not self._closed:  # afterwards the number may be another file's
            os.eventfd_write(self._done_fd, 1)

    def in_flight(self) -> list[tuple[int, float]]:
        now_ns = time.monotonic_ns()
        with self._changed:
            return [
                (lane.block.block_id, (now_ns - lane.progress_ns) / 1e9)
                for lane in self._lanes
                if lane.block is not None
            ]

    def cpu_s(self) -> float:
        return sum(lane.cpu_s for lane in self._lanes)

    def close(self, timeout_s: float) -> bool:
        if self._closed:
            return True
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            self._closed = True
            if self._num_running == 0:
                os.close(self._done_fd)
            return self._num_running == 0

    def _run(self, lane: _Lane) -> None:
        while self._run_one(lane):
            pass
        with self._changed:
            self._num_running -= 1
            if self._closed and self._num_running == 0:  # we were left behind: the descriptor was ours to close
                os.close(self._done_fd)

    def _run_one(self, lane: _Lane) -> bool:
        """Wait for a block and carry it out. False when there is none and there will be none."""
        with self._changed:
            while not self._waiting and not self._stopping:
                self._changed.wait()
            if not self._waiting:
                return False
            block = heapq.heappop(self._waiting)[2]
            start_ns = lane.progress_ns = time.monotonic_ns()
            lane.block = block
        error, device_nbytes = self._transfer(lane, block)
        useful_nbytes = _take_from_slot(lane, block, device_nbytes, error)
        lane.cpu_s = time.thread_time()
        with self._changed:
            lane.block = None
            self._finished.append(
                Completion(block.block_id, error, useful_nbytes, device_nbytes, start_ns, time.monotonic_ns())
            )
            news = self._count_down(block.request_id, 1) or error
        if news:
            os.eventfd_write(self._done_fd, 1)
        return True

    def _count_down(self, request_id: int, num_blocks: int) -> bool:
        """True when these were the last blocks of their request."""
        self._num_left[request_id] -= num_blocks
        if self._num_left[request_id] > 0:
            return False
        del self._num_left[request_id]
        return True

    def _transfer(self, lane: _Lane, block: Block) -> tuple[int, int]:
        """Move one block, part by part if need be. Returns (errno or 0, bytes moved)."""
        address = lane.slot_address if block.copy_nbytes else block.address
        memory = (ctypes.c_char * block.nbytes).from_address(address)
        if block.write and block.copy_nbytes:
            ctypes.memmove(address, block.address, block.copy_nbytes)
        move = os.pwritev if block.write else os.preadv
        done = 0
        while done < block.nbytes:
            part = memoryview(memory)[done:] if done else memory
            try:
                moved = move(block.fd, [part], block.offset + done)
            except OSError as error:
                return error.errno or errno.EIO, done
            if moved == 0:
                return (errno.EIO if block.write else 0), done
            done += moved
            lane.progress_ns = time.monotonic_ns()
            if self._closed or (block.aligned and done % PAGE_NBYTES):
                break
        return 0, done


def _take_from_slot(lane: _Lane, block: Block, device_nbytes: int, error: int) -> int:
    """Copy a bounced read to its destination. Returns the useful bytes moved."""
    if not block.copy_nbytes:
        return device_nbytes
    useful_nbytes = min(max(device_nbytes - block.copy_skip, 0), block.copy_nbytes)
    if not block.write and not error:
        ctypes.memmove(block.address, lane.slot_address + block.copy_skip, useful_nbytes)
    return useful_nbytes
