"""Aligned anonymous memory of exact size, on huge pages where the kernel grants them.

Note [who may unmap]
An arena's pages are unmapped when nobody can reach them any more, and never earlier:
- every array handed out keeps the mapping alive, so `close()` with live views is safe: the memory goes when the last
  view dies (a warning says so, because a budget may count on it);
- a range that the kernel may still write to (a transfer that timed out) is held with `hold_range`; a mapping that
  overlaps a held range outlives even its last view, until `release_range`;
- a forked child never unmaps: it has no copy of the arena (MADV_DONTFORK, below) and the addresses may be someone
  else's there.

Note [fork]
Arenas are not inherited by forked children. With an inherited arena every write of the parent would first copy the
page: the budget would double while data-loading workers live, and huge pages would fall apart. A child that touches
an arena is killed by SIGSEGV.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.io.errors import ConfigError, OutOfMemoryError

logger = logging.getLogger("hetero.io")

PAGE_NBYTES = 4096
HUGE_PAGE_NBYTES = 2 << 20

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module of 3.11
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def round_up(nbytes: int, multiple: int = PAGE_NBYTES) -> int:
    return -(-nbytes // multiple) * multiple


class Arena:
    """Own `nbytes` of memory (rounded up to 4096), zeroed, touched, its start aligned to 2 MiB.

    It takes exactly `nbytes` of RAM; the virtual space mapped to find an aligned start is given back, except one
    inaccessible page at each end, which keeps the arena a mapping of its own and stops an overrun. Construction blocks
    while the pages are touched (0.6 to 20 GB/s). Raises OutOfMemoryError when the kernel has no room.
    """

    def __init__(self, nbytes: int, *, name: str, huge_pages: bool = True) -> None:
        if nbytes <= 0:
            raise ConfigError(f"arena {name!r}: nbytes must be positive, got {nbytes}")
        self.name = name
        self.nbytes = round_up(nbytes, PAGE_NBYTES)
        self._mapping: _Mapping | None = _Mapping(self.nbytes, name, huge_pages)
        self.address = self._mapping.address

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The whole arena as uint8, shape (nbytes,). The array and its views keep the memory alive."""
        if self._mapping is None:
            raise ConfigError(f"arena {self.name!r} is closed")
        return np.asarray(self._mapping)

    @property
    def keeper(self) -> object:
        """Whoever holds this keeps the memory mapped, also after `close()`."""
        return self._mapping

    @property
    def huge_nbytes(self) -> int:
        """How many bytes sit on huge pages now, from /proc/self/smaps (0 where that cannot be read)."""
        return 0 if self._mapping is None else _huge_nbytes(self.address, self.nbytes)

    @property
    def closed(self) -> bool:
        return self._mapping is None

    def close(self) -> None:
        """Give the memory back, or leave that to the last view that is still alive (see Note [who may unmap])."""
        if self._mapping is None:
            return
        alive = weakref.ref(self._mapping)
        self._mapping = None
        if alive() is not None:
            logger.warning(
                "arena %r (%d bytes) was closed while arrays over it are alive; it is freed when the last one dies",
                self.name,
                self.nbytes,
            )

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Mapping:
    """The owner that arrays refer to: its death unmaps the pages."""

    def __init__(self, nbytes: int, name: str, huge_pages: bool) -> None:
        self.address = _map_aligned(nbytes, name)
        self.__array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }
        finalizer = weakref.finalize(self, _unmap_when_free, self.address, nbytes, os.getpid())
        finalizer.atexit = False  # views may outlive atexit handlers; the process's end frees everything anyway
        _libc.madvise(self.address, nbytes, mmap.MADV_DONTFORK)
        if huge_pages:
            # a kernel without transparent huge pages refuses: then these are ordinary pages, and huge_nbytes says so
            _libc.madvise(self.address, nbytes, mmap.MADV_HUGEPAGE)
        self._populate(nbytes, name)

    def _populate(self, nbytes: int, name: str) -> None:
        if _libc.madvise(self.address, nbytes, _MADV_POPULATE_WRITE) == 0:
            return
        error = ctypes.get_errno()
        if error in (12, 14):  # ENOMEM, EFAULT: no memory behind the pages
            raise _no_memory(name, nbytes, error)
        np.asarray(self)[::PAGE_NBYTES] = 0


def _map_aligned(nbytes: int, name: str) -> int:
    """Map fence page + aligned nbytes + fence page, and return the aligned address."""
    span = nbytes + HUGE_PAGE_NBYTES + 2 * PAGE_NBYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    base = _libc.mmap(None, span, _PROT_NONE, flags, -1, 0)
    if base == _MAP_FAILED:
        raise _no_memory(name, nbytes, ctypes.get_errno())
    address = round_up(base + PAGE_NBYTES, HUGE_PAGE_NBYTES)
    first, last = address - PAGE_NBYTES, address + nbytes + PAGE_NBYTES
    if first > base:
        _libc.munmap(base, first - base)
    if base + span > last:
        _libc.munmap(last, base + span - last)
    if _libc.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE) != 0:
        error = ctypes.get_errno()
        _libc.munmap(first, last - first)
        raise _no_memory(name, nbytes, error)
    return address


def _no_memory(name: str, nbytes: int, error: int) -> OutOfMemoryError:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return OutOfMemoryError(
        f"arena {name!r}: the kernel refused {nbytes} bytes of RAM ({os.strerror(error)}); {free} bytes are free. "
        "Ask for a smaller cpu_memory",
        tier="cpu",
        requested_nbytes=nbytes,
        free_nbytes=free,
    )


# ---- ranges the kernel may still write to (see Note [who may unmap]) ----

_lock = threading.RLock()  # reentrant: a mapping may die in a garbage collection that starts while it is held
_held: dict[int, tuple[int, int]] = {}
_undead: list[tuple[int, int, int]] = []
_next_hold = 0


def hold_range(address: int, nbytes: int) -> int:
    """Keep any arena that overlaps [address, address + nbytes) mapped until `release_range` of the returned token."""
    global _next_hold
    with _lock:
        _next_hold += 1
        _held[_next_hold] = (address, nbytes)
        return _next_hold


def release_range(token: int) -> None:
    """The kernel has given the range back: unmap arenas that were only waiting for it."""
    with _lock:
        _held.pop(token, None)
        waiting = _undead[:]
        _undead.clear()
        for mapping in waiting:
            _unmap_when_free(*mapping)


def _unmap_when_free(address: int, nbytes: int, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return
    with _lock:
        if any(start < address + nbytes and address < start + size for start, size in _held.values()):
            _undead.append((address, nbytes, owner_pid))
            return
    _libc.munmap(address - PAGE_NBYTES, nbytes + 2 * PAGE_NBYTES)


def _huge_nbytes(address: int, nbytes: int) -> int:
    total, inside = 0, False
    try:
        with open("/proc/self/smaps", encoding="ascii", errors="replace") as smaps:
            for line in smaps:
                field = line.split(None, 1)[0]
                if not field.endswith(":"):
                    start, end = (int(part, 16) for part in field.split("-"))
                    inside = start < address + nbytes and address < end
                elif inside and field == "AnonHugePages:":
                    total += int(line.split()[1]) * 1024
    except OSError:
        return 0
    return total
