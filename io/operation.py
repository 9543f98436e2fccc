"""One submitted request until it is done: its future, what is left of it, and what went wrong."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass

from hetero.io.arena import PAGE_NBYTES
from hetero.io.errors import IOEngineError
from hetero.io.interrupts import Condition
from hetero.io.request import Request


class IOFuture(Future[int]):
    """A future whose cancel() asks the engine whether the first block has started."""

    def __init__(self, withdraw: Callable[[int], bool], first_id: int) -> None:
        super().__init__()
        self._condition = Condition()  # theirs could stay locked after an interrupt, and the collector wait for ever
        self._withdraw = withdraw
        self._first_id = first_id

    def cancel(self) -> bool:
        if not self._withdraw(self._first_id):
            return self.cancelled()
        self.settle_cancelled()
        return True

    def settle_cancelled(self) -> None:
        super().cancel()
        self.set_running_or_notify_cancel()  # wakes concurrent.futures.wait() and as_completed()


@dataclass(slots=True)
class Operation:
    """One submitted request until its future is done. Guarded by the engine's lock."""

    request: Request
    future: IOFuture
    first_id: int
    last_id: int
    num_left: int
    transferred_nbytes: int = 0
    short_end: int | None = None  # file offset where the first short block stopped
    error: IOEngineError | None = None

    def fail(self, error_number: int, detail: str | None = None) -> None:
        if self.error is None:
            request = self.request
            self.error = IOEngineError(request.file.path, request.offset, request.nbytes, error_number, detail)


_kept: list[object] = []  # by `finish`


def judge_short(operation: Operation) -> None:
    """A short transfer is an error unless it stopped at the end of the file, less than a page before the request's."""
    end = operation.short_end
    if end is None or operation.error is not None:
        return
    file = operation.request.file
    missing_nbytes = operation.request.nbytes - operation.transferred_nbytes
    # what is only read must still be as long as when it was opened; what we write may have grown
    file_nbytes = file.current_nbytes() if file.writable else file.nbytes
    if operation.request.write:
        operation.fail(errno.EIO, f"short write: it stopped at offset {end}")
    elif end < file_nbytes:
        operation.fail(
            errno.EIO,
            f"short read: it stopped at offset {end}, but the file had {file.nbytes} bytes when it was opened "
            f"and has {file.current_nbytes()} now",
        )
    elif missing_nbytes >= PAGE_NBYTES:
        operation.fail(errno.EIO, f"read past the end of the file: it has {file_nbytes} bytes")


def resolve(operations: Sequence[Operation]) -> None:
    for operation in operations:
        if operation.error is not None:
            operation.future.set_exception(operation.error)
        else:
            operation.future.set_result(operation.transferred_nbytes)


def finish(futures: Sequence[Future[int]], *, memory: object = None) -> None:
    """Wait for every request, then raise the first error. Also when the wait itself is interrupted nothing is in
    flight afterwards: the caller may give the memory up. Except to a disk that does not answer: `memory`, which need
    not be named if it is an arena's, is then kept for ever (engine.py, Note [stuck disk])."""
    try:
        _settle(futures)
    except BaseException:
        give_up(futures)
        raise
    finally:
        if memory is not None and any(timed_out(future) for future in futures):
            _kept.append(memory)
    for future in futures:
        future.result()


def timed_out(future: Future[int]) -> bool:
    """Whether the request was given up, so that the kernel may still carry it out."""
    if not future.done() or future.cancelled():
        return False
    error = future.exception()
    return isinstance(error, IOEngineError) and error.errno == errno.ETIMEDOUT


def give_up(futures: Sequence[Future[int]]) -> None:
    """Cancel what has not started and wait for what has: nothing is in flight afterwards."""
    for future in futures:
        future.cancel()
    _settle(futures)


def _settle(futures: Sequence[Future[int]]) -> None:
    # Not concurrent.futures.wait: it holds the locks of all futures, and keeps them when it is interrupted there.
    for future in futures:
        with suppress(CancelledError):
            future.exception()
