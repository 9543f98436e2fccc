"""Choose a backend: what was asked for, else what HETERO_IO says, else the best that this kernel allows."""

from __future__ import annotations

import errno
import logging
import os
from typing import Literal, get_args

from hetero.io.backends.base import Backend
from hetero.io.backends.buffered import BufferedBackend
from hetero.io.backends.threads import ThreadsBackend
from hetero.io.backends.uring import UringBackend
from hetero.io.errors import ConfigError, UnsupportedError

logger = logging.getLogger("hetero.io")

BackendName = Literal["auto", "io_uring", "threads", "buffered"]

MAX_NUM_THREADS = 2
"""One blocking thread reaches the disk's rate on huge pages; the second hides Python's share of the work."""

_fallback_announced = False


def requested_backend(backend: str) -> str:
    """Resolve "auto" through HETERO_IO. Raises ConfigError for a word that is no backend."""
    choices = get_args(BackendName)
    if backend not in choices:
        raise ConfigError(f"backend={backend!r} is unknown; use one of {', '.join(choices)}")
    if backend != "auto":
        return backend
    chosen = os.environ.get("HETERO_IO", "auto")
    if chosen not in choices:
        raise ConfigError(f"HETERO_IO={chosen!r} is unknown; use one of {', '.join(choices)}, or unset it")
    return chosen


def num_lanes_for(name: str, queue_depth: int) -> int:
    """Blocks in flight for a resolved backend name ("auto" may become either, and counts as io_uring)."""
    return queue_depth if name in ("auto", "io_uring") else min(queue_depth, MAX_NUM_THREADS)


def make_backend(name: str, queue_depth: int, bounce_address: int, slot_nbytes: int) -> Backend:
    """Start the backend with this resolved name. "auto" tries io_uring, then threads, and says so once per process."""
    match name:
        case "threads":
            return ThreadsBackend(num_lanes_for(name, queue_depth), bounce_address, slot_nbytes)
        case "buffered":
            return BufferedBackend(num_lanes_for(name, queue_depth), bounce_address, slot_nbytes)
        case "io_uring" | "auto":
            try:
                return UringBackend(queue_depth, bounce_address, slot_nbytes)
            except (ImportError, OSError) as error:
                reason = _why_not(error)
                if name == "io_uring":
                    raise UnsupportedError(
                        f"io_uring is not available: {reason}. Use backend='auto' or HETERO_IO=threads"
                    ) from error
            _announce_fallback(reason)
            return make_backend("threads", queue_depth, bounce_address, slot_nbytes)
        case _:
            raise AssertionError(f"unresolved backend {name!r}")


def _why_not(error: ImportError | OSError) -> str:
    if isinstance(error, ImportError):
        return f"the native module is not built ({error})"
    known = {
        errno.EPERM: "the kernel or a container's seccomp profile forbids it (EPERM)",
        errno.ENOSYS: "this kernel does not have it (ENOSYS)",
        errno.EINVAL: "this kernel's version of it is too old (EINVAL)",
        errno.ENOMEM: "the locked-memory limit is too small for a ring (ENOMEM)",
    }
    return known.get(error.errno or 0, str(error))


def _announce_fallback(reason: str) -> None:
    global _fallback_announced
    if not _fallback_announced:
        _fallback_announced = True
        logger.info("io_uring is not available: %s; using threads", reason)
