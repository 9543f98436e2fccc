"""The scratch store: one preallocated file per run, given out in extents.

On disk: `<folder>/hetero-scratch-<pid>-<random>/` with the marker `hetero-scratch.json` (who owns it, and the lock) and
`scratch.bin` of exactly the size asked for. The file has no layout of its own: what lies where is known to the run and
to nobody else, and it is never read by another one.
"""

from __future__ import annotations

import bisect
import errno
import os
import threading
import weakref
from pathlib import Path

from hetero.io.arena import PAGE_NBYTES, round_up
from hetero.io.engine import Engine, File
from hetero.io.errors import ConfigError, HeteroError, OutOfMemoryError
from hetero.io.extent import Extent
from hetero.io.filesystem import filesystem_type, why_unfit_for_scratch
from hetero.io.scratch_folder import RunFolder, sweep_stale


class FreeList:
    """Which runs of [0, nbytes) are free: first fit, freed runs join their neighbours. Integers only, no locking."""

    def __init__(self, nbytes: int) -> None:
        self._runs = [(0, nbytes)] if nbytes else []  # (offset, nbytes), sorted, never touching each other
        self.free_nbytes = nbytes

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._runs)

    @property
    def largest_nbytes(self) -> int:
        return max((nbytes for _, nbytes in self._runs), default=0)

    def take(self, nbytes: int) -> int | None:
        """Offset of the lowest free run that is long enough, from which the bytes are taken; None if none is."""
        for i, (offset, run_nbytes) in enumerate(self._runs):
            if run_nbytes >= nbytes:
                self._runs[i : i + 1] = [(offset + nbytes, run_nbytes - nbytes)] if run_nbytes > nbytes else []
                self.free_nbytes -= nbytes
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Take back a run. The caller guarantees that none of it is free."""
        self.free_nbytes += nbytes
        i = bisect.bisect(self._runs, (offset, 0))
        first, last, end = i, i, offset + nbytes
        if i > 0 and sum(self._runs[i - 1]) == offset:
            first, offset = i - 1, self._runs[i - 1][0]
        if i < len(self._runs) and self._runs[i][0] == end:
            last, end = i + 1, sum(self._runs[i])
        self._runs[first:last] = [(offset, end - offset)]


class ScratchStore:
    """One scratch file in a folder of its own. Owns both, and the lock on them; `close()` removes them. Thread-safe.

    folder: where to put it, on a local disk; made if only its last part is missing, and never removed.
    nbytes: the budget, allocated on disk at once, so that no later write can find the disk full; rounded down to pages.
    engine: opens `file` for reading and writing; without one `file` is None and only extents are managed.
    allow_any_filesystem: accept tmpfs, ramfs and network file systems, which are refused otherwise.

    Removed at `close()`, when the store is garbage, and at interpreter exit. A killed process leaves its folder, and
    the next store in the same folder removes that. Requests on an extent must be done before it is freed, and all of
    them before `close()`. Raises ConfigError if the folder or its free space will not do.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        nbytes: int,
        *,
        engine: Engine | None = None,
        allow_any_filesystem: bool = False,
    ) -> None:
        self.nbytes = nbytes // PAGE_NBYTES * PAGE_NBYTES
        if self.nbytes <= 0:
            raise ConfigError(f"disk: a scratch file needs at least {PAGE_NBYTES} bytes, got {nbytes}")
        parent = _checked_folder(Path(folder).absolute(), allow_any_filesystem)
        try:
            sweep_stale(parent)
            _check_free(parent, self.nbytes)
            run = RunFolder(parent)
        except OSError as error:
            raise ConfigError(f"disk: {parent} cannot hold scratch files: {error.strerror}") from error
        self.folder, self.path = run.path, run.data_path
        try:
            _preallocate(self.path, self.nbytes)
            self.file: File | None = engine.open(self.path, writable=True) if engine else None
        except BaseException:
            run.remove()
            raise
        self._finalizer = weakref.finalize(self, _release, self.file, run)
        self._lock = threading.Lock()
        self._free_list = FreeList(self.nbytes)
        self._holders: dict[Extent, str] = {}
        self.peak_nbytes = 0
        """The most that was ever given out at one moment."""

    @property
    def free_nbytes(self) -> int:
        with self._lock:
            return self._free_list.free_nbytes

    @property
    def used_nbytes(self) -> int:
        return self.nbytes - self.free_nbytes

    def holders(self) -> dict[str, int]:
        """Return who holds how much now."""
        with self._lock:
            return self._held()

    def can_allocate(self, nbytes: int) -> bool:
        """Whether one extent of this size could be had now."""
        with self._lock:
            return round_up(nbytes, PAGE_NBYTES) <= self._free_list.largest_nbytes

    def allocate(self, nbytes: int, *, holder: str) -> Extent:
        """Give out an extent of at least `nbytes`; its offset and size are multiples of 4096. Its bytes are zero or
        left over from before.

        `holder` names what it is for, in error messages. Raises OutOfMemoryError(tier="disk") past the budget.
        """
        if nbytes <= 0:
            raise HeteroError(f"an extent needs at least one byte, {holder} asked for {nbytes}")
        nbytes = round_up(nbytes, PAGE_NBYTES)
        with self._lock:
            self._check_open()
            offset = self._free_list.take(nbytes)
            if offset is None:
                raise self._out_of_space(nbytes, holder)
            extent = Extent(self.path, offset, nbytes)
            self._holders[extent] = holder
            self.peak_nbytes = max(self.peak_nbytes, self.nbytes - self._free_list.free_nbytes)
            return extent

    def free(self, extent: Extent) -> None:
        """Take an extent back. Raises HeteroError if it is not allocated."""
        with self._lock:
            if self._holders.pop(extent, None) is None:
                raise HeteroError(f"{extent} is not allocated: freed twice, or of another store")
            self._free_list.give(extent.offset, extent.nbytes)

    def close(self) -> None:
        """Close the engine's file and delete the folder. Idempotent; never raises for what cannot be deleted."""
        self._finalizer()
        self.file = None

    def __enter__(self) -> ScratchStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise HeteroError(f"the scratch store {self.folder} is closed")

    def _held(self) -> dict[str, int]:
        held: dict[str, int] = {}
        for extent, name in self._holders.items():
            held[name] = held.get(name, 0) + extent.nbytes
        return held

    def _out_of_space(self, nbytes: int, holder: str) -> OutOfMemoryError:
        held = self._held()
        largest = max(held, key=held.__getitem__, default=None)
        free_nbytes, run_nbytes = self._free_list.free_nbytes, self._free_list.largest_nbytes
        return OutOfMemoryError(
            f"disk: {holder} needs {nbytes} bytes of scratch; {free_nbytes} of {self.nbytes} are free, the longest run "
            f"{run_nbytes}" + (f"; {largest} holds {held[largest]}" if largest else "") + "; raise the disk budget",
            tier="disk",
            requested_nbytes=nbytes,
            free_nbytes=free_nbytes,
            largest_holder=largest,
        )


def _release(file: File | None, run: RunFolder) -> None:
    if run.pid != os.getpid():
        return  # a forked child ends here, and the parent goes on
    if file is not None:
        file.close()
    run.remove()


def _checked_folder(folder: Path, allow_any_filesystem: bool) -> Path:
    try:
        folder.mkdir(exist_ok=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"disk: the folder {folder} cannot be used: {error}") from error
    reason = None if allow_any_filesystem else why_unfit_for_scratch(filesystem_type(folder))
    if reason is not None:
        raise ConfigError(f"disk: {folder} {reason}; give a folder on a local disk, or allow any file system")
    return folder


def _check_free(folder: Path, nbytes: int) -> None:
    status = os.statvfs(folder)
    free_nbytes = status.f_bavail * status.f_frsize
    if nbytes > free_nbytes:
        raise ConfigError(_too_full(folder, nbytes, free_nbytes))


def _too_full(folder: Path, nbytes: int, free_nbytes: int) -> str:
    return (
        f"disk: the scratch file needs {nbytes} bytes ({nbytes / 2**30:.1f} GiB), {folder} has {free_nbytes} free "
        f"({free_nbytes / 2**30:.1f} GiB); give a smaller disk budget or another folder"
    )


def _preallocate(path: Path, nbytes: int) -> None:
    """Make the file with all its blocks. Raises ConfigError: free space may be gone by now, or be under a quota."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            status = os.statvfs(path.parent)
            message = _too_full(path.parent.parent, nbytes, status.f_bavail * status.f_frsize)
            raise ConfigError(f"{message} ({error.strerror})") from error
        raise ConfigError(f"disk: {path} cannot be allocated: {error.strerror}") from error
    finally:
        os.close(fd)
