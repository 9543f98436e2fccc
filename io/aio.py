"""The asyncio face, on aiofiles: small files read and replaced without blocking the event loop.

For configuration, indexes, cache entries and the server's files. Weights go through the engine: here every call costs a
hop to a thread of the loop's default executor, and the bytes go through the page cache.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import aiofiles

from hetero.io.errors import IOEngineError

Data = bytes | bytearray | memoryview


async def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Read a whole file. Raises IOEngineError, whose errno is ENOENT if there is none."""
    with _named_errors(Path(path), 0):
        async with aiofiles.open(path, "rb") as file:
            data: bytes = await file.read()
            return data


async def write_atomic(path: str | os.PathLike[str], data: Data, *, mode: int = 0o666) -> None:
    """Replace the file at `path`: afterwards it is there in full and on the disk, and before that the old one is.

    The bytes go to a new file in the same folder, which takes the name when it is safe. `mode`, less the umask, is the
    new file's; a link at `path` is replaced, not followed. `data` must not change until this returns.

    Raises IOEngineError. Before the new file has the name, the old one is untouched and the temporary removed; should
    only the very last step fail, the new one is in place but may not survive a power cut. A cancelled call lets the
    write end first, because its thread cannot be stopped: the file is then the old or the new one, whole.
    """
    write = asyncio.ensure_future(_write_atomic(Path(path), data, mode))
    try:
        await asyncio.shield(write)
    except asyncio.CancelledError:
        await asyncio.wait([write])
        if not write.cancelled():
            write.exception()  # looked at, so that asyncio does not report it once more
        raise


async def _write_atomic(path: Path, data: Data, mode: int) -> None:
    with _named_errors(path, len(data)), _temporary_beside(path) as temporary:
        async with aiofiles.open(temporary, "xb", opener=_opener(mode)) as file:
            await file.write(data)
            await file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        await asyncio.to_thread(_publish, temporary, path)


def write_atomic_sync(path: str | os.PathLike[str], data: Data, *, mode: int = 0o666) -> None:
    """`write_atomic` for code without an event loop. Blocks until the disk has the bytes."""
    path = Path(path)
    with _named_errors(path, len(data)), _temporary_beside(path) as temporary:
        with open(temporary, "xb", opener=_opener(mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _publish(temporary, path)


def _opener(mode: int) -> Callable[[str, int], int]:
    """Gives a new file its mode from the start, so that a private one is never readable by others."""
    return lambda path, flags: os.open(path, flags, mode)


@contextmanager
def _temporary_beside(path: Path) -> Iterator[Path]:
    """A new name in the folder of `path` (a rename must not cross file systems); its file is removed on failure."""
    temporary = path.parent / f".hetero-{os.getpid()}-{secrets.token_hex(8)}.tmp"
    try:
        yield temporary
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _publish(temporary: Path, path: Path) -> None:
    """Give the file its name. The file's bytes must be on the disk already: a rename may reach it before them."""
    os.replace(temporary, path)
    folder_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder_fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync a folder
            raise
    finally:
        os.close(folder_fd)


@contextmanager
def _named_errors(path: Path, nbytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise IOEngineError(path, 0, nbytes, error.errno or errno.EIO) from error
