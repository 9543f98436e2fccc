"""Locks that Ctrl-C cannot leave locked.

Python raises KeyboardInterrupt after any call on the main thread. `with lock:` on a lock from C is safe: there is no
such moment between taking it and entering the block. `threading.Condition` and `Event` take theirs in a Python method,
and an interrupt just before that method returns leaves the lock taken for ever, with our own threads waiting for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Condition(threading.Condition):
    """A condition that the main thread may enter and wait on."""

    _lock: Any

    @property
    def __enter__(self) -> Callable[[], bool]:
        return self._lock.__enter__  # type: ignore[no-any-return]

    @property
    def __exit__(self) -> Callable[..., None]:
        return self._lock.__exit__  # type: ignore[no-any-return]

    def wait(self, timeout: float | None = None) -> bool:
        """As `threading.Condition.wait`; the lock is held again also when an interrupt ends it."""
        try:
            return super().wait(timeout)
        except BaseException:
            # The interrupt may have come just after `wait` gave the lock up, before it was ready to take it back.
            with suppress(RuntimeError):
                self.release()
            self.acquire()
            raise


class Latch:
    """Closed until `open` is called, once; then every `wait` returns."""

    __slots__ = ("_lock", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        self.is_open = True
        self._lock.release()

    def wait(self) -> None:
        with self._lock:
            pass
