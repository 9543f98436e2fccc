"""Open files: a descriptor with O_DIRECT where the file system takes it, a plain one where that is needed."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

from hetero.io.arena import PAGE_NBYTES
from hetero.io.errors import IOEngineError
from hetero.io.tensor_info import FileIdentity

logger = logging.getLogger("hetero.io")

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_libc = ctypes.CDLL(None, use_errno=True)


class File:
    """One open file of an engine; made by `Engine.open`, which counts how often it was opened.

    `direct_fd` is -1 where O_DIRECT is not used; `plain_fd` is -1 for a direct file that is only read. The descriptors
    stay open until the last `close()` and the last request on the file, whichever is later.
    """

    def __init__(self, path: Path, *, writable: bool, direct: bool, on_close: Callable[[File], None]) -> None:
        self.path = path
        self.writable = writable
        self.direct_fd, self.plain_fd = _open_descriptors(path, writable, direct)
        self.direct = self.direct_fd >= 0
        self.identity = FileIdentity.of(self.direct_fd if self.direct else self.plain_fd)
        self.nbytes = self.identity.nbytes
        """Size when it was opened."""
        self.num_opens = 1
        self.num_pending = 0
        self._on_close = on_close

    def is_at(self, path: Path, writable: bool, identity: FileIdentity) -> bool:
        """Whether this is the open file for `path`, which has `identity` now, in the given mode."""
        if self.num_opens == 0 or (path, writable) != (self.path, self.writable):
            return False
        return (identity.device, identity.inode) == (self.identity.device, self.identity.inode)

    def current_nbytes(self) -> int:
        return os.fstat(self.direct_fd if self.direct else self.plain_fd).st_size

    def difference(self) -> str | None:
        """Say how the open file differs from what it was when it was opened, or None. A rename over it does not."""
        return self.identity.difference(FileIdentity.of(self.direct_fd if self.direct else self.plain_fd))

    def close(self) -> None:
        """Give back one `open`. Requests already submitted still run."""
        self._on_close(self)

    def close_descriptors(self) -> None:
        for fd in (self.direct_fd, self.plain_fd):
            if fd >= 0:
                os.close(fd)
        self.direct_fd = self.plain_fd = -1


def _open_descriptors(path: Path, writable: bool, direct: bool) -> tuple[int, int]:
    """Return (direct_fd, plain_fd), -1 for the one that is not needed. Raises IOEngineError."""
    flags = os.O_CLOEXEC | (os.O_RDWR if writable else os.O_RDONLY)
    direct_fd = _open_direct(path, flags) if direct else -1
    if direct_fd >= 0 and not writable:
        return direct_fd, -1
    try:
        return direct_fd, os.open(path, flags)
    except OSError as error:
        if direct_fd >= 0:
            os.close(direct_fd)
        raise IOEngineError(path, 0, 0, error.errno or errno.EIO) from error


def _open_direct(path: Path, flags: int) -> int:
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise IOEngineError(path, 0, 0, error.errno or errno.EIO) from error
        logger.info("%s: its file system refuses O_DIRECT; this file goes through the page cache", path)
        return -1
    alignment = direct_alignment(fd)
    if alignment == 0 or PAGE_NBYTES % alignment:
        os.close(fd)
        logger.info("%s: O_DIRECT needs alignment %d, not 4096; this file goes through the page cache", path, alignment)
        return -1
    return fd


def direct_alignment(fd: int) -> int:
    """Alignment in bytes that O_DIRECT needs for this file: 0 if it takes none, 4096 if the kernel does not say."""
    try:
        statx = _libc.statx
    except AttributeError:
        return PAGE_NBYTES
    answer = ctypes.create_string_buffer(256)  # struct statx: stx_mask at 0, stx_dio_{mem,offset}_align at 152, 156
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0:
        return PAGE_NBYTES
    fields = answer.raw
    if not int.from_bytes(fields[0:4], "little") & _STATX_DIOALIGN:
        return PAGE_NBYTES
    memory, offset = (int.from_bytes(fields[at : at + 4], "little") for at in (152, 156))
    return max(memory, offset) if memory and offset else 0
