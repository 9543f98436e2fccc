"""The I/O engine: submit(requests) -> futures, next-needed first, several blocks in flight, the same on every backend.

Note [threads and locks]
Callers submit under `_lock`, which gives block ids their order. The backend's threads carry blocks out. One collector
thread settles completions under `_lock` and resolves futures outside it, so a completion callback may submit. Lock
order: `_close_lock` -> `_lock` -> the backend's own.

Note [stuck disk]
A block without progress for `timeout_s` fails its request with ETIMEDOUT, but nothing can take its memory back from the
kernel. Such a block is *abandoned*: its lane stays taken, `abandoned()` lists its memory, arenas that overlap it stay
mapped even when closed (arena.hold_range), and other memory must be kept by the caller. If the kernel does answer, the
range is released and the lane works again. When every lane is stuck, waiting requests fail too.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from hetero.io.arena import PAGE_NBYTES, Arena, hold_range, release_range
from hetero.io.backends.base import Backend, Block, Completion
from hetero.io.backends.probe import BackendName, make_backend, num_lanes_for, requested_backend
from hetero.io.errors import ConfigError, HeteroError, IOEngineError
from hetero.io.file import File
from hetero.io.interrupts import Condition
from hetero.io.operation import IOFuture, Operation, judge_short, resolve
from hetero.io.request import Request, split_request
from hetero.io.stats import EngineStats, FileCounters, FileStats
from hetero.io.tensor_info import FileIdentity

__all__ = ["Engine", "EngineStats", "File", "FileStats", "Request"]

logger = logging.getLogger("hetero.io")

_QUIET_S, _QUIET_ROUNDS = 0.05, 10
_LAST_CHANCE_S = 1.0  # how long close() waits for a backend of which a block has already timed out


class Engine:
    """Own the backend's threads, a bounce arena of `bounce_nbytes` and the open files; `close()` releases all of them.

    `backend` "auto" takes HETERO_IO if that is set, else io_uring, else threads. Raises ConfigError for a value that
    cannot work, UnsupportedError if io_uring is asked for by name and cannot be had. An engine belongs to the process
    that made it. `wrap_backend` is the seam for fault injection (backends/faulty.py).
    """

    def __init__(
        self,
        *,
        backend: BackendName = "auto",
        block_nbytes: int = 4 << 20,
        queue_depth: int = 8,
        bounce_nbytes: int = 2 << 20,
        timeout_s: float = 60.0,
        wrap_backend: Callable[[Backend], Backend] | None = None,
    ) -> None:
        name = requested_backend(backend)
        num_lanes = num_lanes_for(name, queue_depth)
        self._slot_nbytes = _checked_slot_nbytes(block_nbytes, queue_depth, bounce_nbytes, num_lanes, timeout_s)
        self.block_nbytes = block_nbytes
        self.timeout_s = timeout_s
        # a buffered backend never bounces, so it needs no arena
        self._bounce = Arena(bounce_nbytes, name="io bounce") if name != "buffered" else None
        self.bounce_nbytes = self._bounce.nbytes if self._bounce else 0
        try:
            inner = make_backend(name, queue_depth, self._bounce.address if self._bounce else 0, self._slot_nbytes)
        except BaseException:
            if self._bounce:
                self._bounce.close()
            raise
        self._backend = wrap_backend(inner) if wrap_backend else inner
        self.backend_name = self._backend.name

        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle = Condition(self._lock)  # the collector notifies when no operation is left
        self._close_lock = threading.Lock()
        self._closing = False
        self._closed = False
        self._files: list[File] = []
        self._counters: dict[Path, FileCounters] = {}
        self._operations: dict[int, Operation] = {}  # by first block id
        self._blocks: dict[int, tuple[Operation, Block]] = {}  # waiting or in flight
        self._abandoned: dict[int, tuple[Path, Block, int]] = {}  # with the token of the held range
        self._next_id = 0
        self._watch_s = min(timeout_s / 4, 1.0)
        self._next_watch_s = 0.0
        self._collector_cpu_s = 0.0
        self._stop_collector = False
        self._collector = threading.Thread(target=self._collect, name="hetero-io-collect", daemon=True)
        self._collector.start()
        _live_engines.add(self)

    # ---- files ----

    def open(self, path: str | os.PathLike[str], writable: bool = False) -> File:
        """Open an existing file, or return the open one if `path` still is that file. Raises IOEngineError."""
        self._check_process()
        where = Path(path).absolute()
        file = self._reuse(where, writable)
        if file is None:
            # outside the lock: a slow file system must not hold up submissions
            opened = File(where, writable=writable, direct=self._backend.direct, on_close=self._close_file)
            try:
                file = self._reuse(where, writable, otherwise=opened)
            finally:
                if file is not opened:
                    opened.close_descriptors()
        assert file is not None
        return file

    def _reuse(self, path: Path, writable: bool, otherwise: File | None = None) -> File | None:
        """Count one more open of the file that is at `path` now; if it is not open, adopt `otherwise`."""
        try:
            identity = FileIdentity.of(path)
        except OSError as error:
            raise IOEngineError(path, 0, 0, error.errno or errno.EIO) from error
        with self._lock:
            self._check_open()
            for file in self._files:
                if file.is_at(path, writable, identity):
                    file.num_opens += 1
                    return file
            if otherwise is not None:
                self._files.append(otherwise)
            return otherwise

    def _close_file(self, file: File) -> None:
        with self._lock:
            file.num_opens = max(file.num_opens - 1, 0)
            self._release_if_unused(file)

    def _release_if_unused(self, file: File) -> None:
        if file.num_opens or file.num_pending:
            return
        if file in self._files:
            self._files.remove(file)
            file.close_descriptors()

    # ---- requests ----

    def submit(self, requests: Sequence[Request]) -> list[Future[int]]:
        """Queue requests and return their futures, in order; the result is the number of bytes transferred.

        Never blocks on I/O. Raises ConfigError, before anything is queued, for a request that cannot be meant. What
        goes wrong later is an IOEngineError on that request's future only. A request may end up to 4095 bytes past the
        end of the file (an extent aligned outwards): it then transfers fewer bytes. Callbacks run on the collector
        thread.
        """
        self._check_process()
        for request in requests:
            _check_request(request)
        futures: list[Future[int]] = []
        blocks: list[Block] = []
        with self._lock:
            self._check_open()
            for request in requests:
                if request.file.num_opens == 0:
                    raise ConfigError(f"{request.file.path} is closed; open it again before submitting")
            for request in requests:
                operation, new_blocks = self._add_operation(request)
                futures.append(operation.future)
                blocks.extend(new_blocks)
            self._backend.push(blocks)
        for request, future in zip(requests, futures, strict=True):
            if request.nbytes == 0:
                future.set_result(0)
        return futures

    def _add_operation(self, request: Request) -> tuple[Operation, list[Block]]:
        first_id = self._next_id
        blocks = split_request(request, first_id, self.block_nbytes, self._slot_nbytes)
        future = IOFuture(self._withdraw_unstarted, first_id)
        operation = Operation(request, future, first_id, first_id + len(blocks) - 1, len(blocks))
        if blocks:
            self._next_id += len(blocks)
            self._operations[first_id] = operation
            self._blocks.update((block.block_id, (operation, block)) for block in blocks)
            request.file.num_pending += 1
        return operation, blocks

    def _withdraw_unstarted(self, first_id: int) -> bool:
        """Take a request back if none of its blocks has started."""
        self._check_process()
        with self._lock:
            operation = self._operations.get(first_id)
            if operation is None or not self._withdraw(operation, unless_started=True):
                return False
            self._forget(operation)
            return True

    def _withdraw(self, operation: Operation, *, unless_started: bool) -> bool:
        """Take waiting blocks out of the queue. True if that leaves the operation without blocks."""
        ids = self._backend.withdraw(
            operation.request.priority, operation.first_id, operation.last_id, unless_started=unless_started
        )
        for block_id in ids:
            del self._blocks[block_id]
        operation.num_left -= len(ids)
        return operation.num_left == 0

    def _forget(self, operation: Operation) -> None:
        del self._operations[operation.first_id]
        operation.request.file.num_pending -= 1
        self._release_if_unused(operation.request.file)
        if not self._operations:
            self._idle.notify_all()

    # ---- the collector thread ----

    def _collect(self) -> None:
        try:
            while not self._stop_collector:
                self._settle(self._backend.collect(self._watch_s))
                self._watch()
                self._collector_cpu_s = time.thread_time()
        except BaseException as error:
            # Nobody is left to settle completions: an error for every caller, now, rather than a hang.
            logger.exception("the collector thread of the I/O engine failed")
            with self._lock:
                self._closing = True
                stranded = list(self._operations.values())
                for operation in stranded:
                    self._abandon(operation, errno.EIO, f"the engine failed: {error!r}")
            resolve(stranded)

    def _settle(self, completions: list[Completion]) -> None:
        done: list[Operation] = []
        with self._lock:
            for completion in completions:
                entry = self._blocks.pop(completion.block_id, None)
                if entry is None:
                    self._release_abandoned(completion)
                    continue
                operation, block = entry
                self._account(operation, block, completion)
                if operation.error is not None:
                    self._withdraw(operation, unless_started=False)
                if operation.num_left == 0:
                    judge_short(operation)
                    self._forget(operation)
                    done.append(operation)
        resolve(done)

    def _account(self, operation: Operation, block: Block, completion: Completion) -> None:
        path = operation.request.file.path
        counters = self._counters.get(path)
        if counters is None:
            counters = self._counters[path] = FileCounters(path)
        counters.add(block, completion)
        operation.num_left -= 1
        operation.transferred_nbytes += completion.useful_nbytes
        if completion.error:
            operation.fail(completion.error)
        elif completion.useful_nbytes < block.useful_nbytes:
            end = block.useful_offset + completion.useful_nbytes
            operation.short_end = end if operation.short_end is None else min(end, operation.short_end)

    def _watch(self) -> None:
        """Fail requests whose blocks made no progress for timeout_s (see Note [stuck disk])."""
        now_s = time.monotonic()
        if now_s < self._next_watch_s:
            return
        self._next_watch_s = now_s + self._watch_s
        with self._lock:
            overdue = [block_id for block_id, age_s in self._backend.in_flight() if age_s > self.timeout_s]
            if not overdue:
                return
            if len(overdue) >= self._backend.num_lanes:
                stuck = list(self._operations.values())
            else:
                found = [self._blocks[block_id][0] for block_id in overdue if block_id in self._blocks]
                stuck = list({operation.first_id: operation for operation in found}.values())
            for operation in stuck:
                self._abandon(
                    operation, errno.ETIMEDOUT, f"no progress for {self.timeout_s:g} s: the disk does not answer"
                )
        resolve(stuck)

    def _abandon(self, operation: Operation, error_number: int, detail: str, *, is_known: bool = True) -> None:
        """Fail an operation whose blocks may still be carried out, unless the backend does not know them."""
        self._withdraw(operation, unless_started=False)
        path = operation.request.file.path
        for block_id in range(operation.first_id, operation.last_id + 1):
            entry = self._blocks.pop(block_id, None)
            if entry is not None and is_known:
                block = entry[1]
                token = hold_range(block.address, block.useful_nbytes)
                self._abandoned[block_id] = (path, block, token)
        operation.fail(error_number, detail)
        logger.warning("%s", str(operation.error))  # the error itself would keep frames alive in the record
        self._forget(operation)

    def _release_abandoned(self, completion: Completion) -> None:
        abandoned = self._abandoned.pop(completion.block_id, None)
        if abandoned is not None:
            release_range(abandoned[2])

    def abandoned(self) -> list[tuple[Path, int, int]]:
        """(path, address, nbytes) of memory that a timed-out block may still be using."""
        with self._lock:
            return [(path, block.address, block.useful_nbytes) for path, block, _ in self._abandoned.values()]

    # ---- the rest ----

    def stats(self) -> EngineStats:
        with self._lock:
            files = tuple(counters.snapshot() for counters in self._counters.values())
            in_flight = len(self._operations)
        cpu_s = self._backend.cpu_s() + self._collector_cpu_s
        return EngineStats(self.backend_name, files, cpu_s, in_flight)

    def quiesce(self) -> None:
        """Block until nothing that was submitted is in flight any more, well or not. For whoever lost its futures."""
        with self._close_lock:
            self._await_operations()

    def close(self) -> None:
        """Cancel requests that have not started, wait for those that have, release threads, memory and descriptors.

        Idempotent. Blocks at most timeout_s beyond the last progress of the disk; then what is stuck is left to the
        kernel (see Note [stuck disk]) and its thread stays behind. In a forked child it does nothing: everything
        belongs to the parent. Must not be called from a completion callback.
        """
        if os.getpid() != self._pid:
            return
        if threading.current_thread() is self._collector:
            raise HeteroError("Engine.close() was called from a completion callback, which it would wait for")
        with self._close_lock:
            if self._closed:
                return
            self._cancel_unstarted()
            self._await_operations()
            self._stop_collector = True
            self._backend.wake()
            self._collector.join()
            self._release_everything()
            self._closed = True

    def _await_operations(self) -> None:
        """Wait until every operation has ended.

        One that the backend does not know never will: a KeyboardInterrupt hit its submitter between our records and
        the backend's. It is given up when nothing has been in flight, and nothing has ended, for a while.
        """
        num_quiet = 0
        with self._idle:
            while self._operations and num_quiet < _QUIET_ROUNDS:
                known = len(self._operations)
                self._idle.wait(_QUIET_S)
                is_quiet = known == len(self._operations) and not self._backend.in_flight()
                num_quiet = num_quiet + 1 if is_quiet else 0
            lost = list(self._operations.values())
            for operation in lost:
                self._abandon(operation, errno.EINTR, "its submission was interrupted", is_known=False)
        resolve(lost)

    def _cancel_unstarted(self) -> None:
        cancelled: list[Operation] = []
        with self._lock:
            self._closing = True
            for operation in list(self._operations.values()):
                if self._withdraw(operation, unless_started=True):
                    self._forget(operation)
                    cancelled.append(operation)
        for operation in cancelled:
            operation.future.settle_cancelled()

    def _release_everything(self) -> None:
        stuck = not self._backend.close(_LAST_CHANCE_S if self._abandoned else self.timeout_s)
        if not stuck:
            for _, _, token in self._abandoned.values():
                release_range(token)
            self._abandoned.clear()
        for file in list(self._files):
            file.num_opens = file.num_pending = 0
            self._release_if_unused(file)
        if self._bounce is not None:
            if stuck:
                hold_range(self._bounce.address, self._bounce.nbytes)
            self._bounce.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise HeteroError(
                f"this Engine belongs to process {self._pid}, not to its forked child {os.getpid()}; "
                "make a new Engine in the child, or start it with the spawn method"
            )

    def _check_open(self) -> None:
        if self._closing:
            raise ConfigError("the engine is closed")


_live_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_live_engines() -> None:
    """Stop before the interpreter frees the memory that a lane may still copy into."""
    for engine in list(_live_engines):
        engine.close()


def _check_request(request: Request) -> None:
    if request.offset < 0 or request.nbytes < 0 or request.address < 0 or (request.nbytes and not request.address):
        raise ConfigError(
            f"request on {request.file.path}: offset={request.offset}, nbytes={request.nbytes} and "
            f"address={request.address:#x} must be 0 or more, and the address a real one"
        )
    if request.write and not request.file.writable:
        raise ConfigError(f"{request.file.path} was opened for reading; open it with writable=True to write")


def _checked_slot_nbytes(
    block_nbytes: int, queue_depth: int, bounce_nbytes: int, num_lanes: int, timeout_s: float
) -> int:
    """Check the engine's options and return the size of one lane's bounce slot."""
    if block_nbytes <= 0 or block_nbytes % PAGE_NBYTES or block_nbytes > 1 << 30:
        raise ConfigError(f"block_nbytes={block_nbytes} must be a multiple of {PAGE_NBYTES}, at most 1 GiB")
    if not 1 <= queue_depth <= 256:
        raise ConfigError(f"queue_depth={queue_depth} must be 1 to 256")
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s={timeout_s} must be more than 0")
    slot_nbytes = bounce_nbytes // num_lanes // PAGE_NBYTES * PAGE_NBYTES
    if slot_nbytes < PAGE_NBYTES:
        raise ConfigError(
            f"bounce_nbytes={bounce_nbytes} gives {num_lanes} lanes less than a page each; "
            f"use at least {num_lanes * PAGE_NBYTES}"
        )
    return slot_nbytes
