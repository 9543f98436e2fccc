"""The folder of one run: made, locked, marked, removed; and the sweep of those that dead runs left behind.

Note [What is deleted]
Only `hetero-scratch-<pid>-<16 hex digits>` folders, and in them only the two files named below, one by one, never
through a link. A folder is swept if all of this holds: it is a real folder of this user; it holds nothing but those
files; its marker parses, is of a version known here and names this very folder; the lock on the marker can be taken;
and the process in the marker is dead. The lock is held from before the marker is written until the folder is gone, so
whoever gets it knows that the owner ended (the kernel releases it however it ends). A lock says nothing about another
machine that shares the folder: a marker of another boot counts as dead only if it is of this host. What is in doubt
stays.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import socket
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

logger = logging.getLogger("hetero.io")

MARKER_NAME = "hetero-scratch.json"
DATA_NAME = "scratch.bin"
MAX_MARKER_NBYTES = 4096
_FORMAT, _VERSION = "hetero-scratch", 1
_FOLDER_NAME = re.compile(r"hetero-scratch-[0-9]+-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Marker:
    """Who owns a scratch folder. Written as JSON with `format` and `version` beside these."""

    name: str
    pid: int
    start_time: int
    """Clock ticks from boot to the start of the process, which tells it from a later one with the same pid; 0 where
    the system does not say."""
    hostname: str
    boot_id: str

    @classmethod
    def of_this_process(cls, name: str) -> Marker:
        return cls(name, os.getpid(), process_start_time(os.getpid()) or 0, socket.gethostname(), _boot_id())

    def to_json(self) -> bytes:
        return json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(self)}, indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes) -> Marker | None:
        """None for anything that is not a marker of this version."""
        try:
            fields = json.loads(data)
            if fields.pop("format") != _FORMAT or fields.pop("version") != _VERSION:
                return None
            marker = cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        texts, numbers = (marker.name, marker.hostname, marker.boot_id), (marker.pid, marker.start_time)
        if all(type(text) is str for text in texts) and all(type(number) is int for number in numbers):
            return marker
        return None

    def owner_is_dead(self) -> bool:
        """Whether the owner is certainly gone, given that its lock is free."""
        if self.boot_id == _boot_id():
            alive = self.start_time != 0 and process_start_time(self.pid) == self.start_time
            # With the lock free, a marker of this very process is from before it replaced itself by exec.
            return not alive or self.pid == os.getpid()
        return self.hostname == socket.gethostname()


class RunFolder:
    """A new folder in `parent`, locked by this process. `remove()` deletes it and its files; idempotent.

    Holds one descriptor, of the marker, which carries the lock. Raises OSError.
    """

    def __init__(self, parent: Path) -> None:
        self.pid = os.getpid()
        self.path = parent / f"hetero-scratch-{self.pid}-{secrets.token_hex(8)}"
        self.data_path = self.path / DATA_NAME
        self._marker_fd = -1
        os.mkdir(self.path, 0o700)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._marker_fd = os.open(self.path / MARKER_NAME, flags, 0o600)
            # Locked before it says anything: an empty marker is no marker. A sweep may hold the lock for a moment.
            fcntl.flock(self._marker_fd, fcntl.LOCK_EX)
            os.write(self._marker_fd, Marker.of_this_process(self.path.name).to_json())
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Delete our files, then the folder if nothing else is in it, then release the lock. Never raises OSError.

        Not to be called in a forked child: everything belongs to the process that made it.
        """
        # The marker goes last: what a crash in between leaves behind can still be swept.
        for delete, path in ((os.unlink, self.data_path), (os.unlink, self.path / MARKER_NAME), (os.rmdir, self.path)):
            try:
                delete(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                logger.warning("%s cannot be removed: %s", path, error.strerror)
        if self._marker_fd >= 0:
            os.close(self._marker_fd)
            self._marker_fd = -1


def sweep_stale(parent: Path) -> list[Path]:
    """Delete the scratch folders in `parent` that dead runs left (see Note [What is deleted]); return their paths.

    Raises OSError only if `parent` cannot be listed; a folder that cannot be swept is logged and left.
    """
    swept = []
    parent_fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in sorted(os.listdir(parent_fd)):
            if not _FOLDER_NAME.fullmatch(name):
                continue
            try:
                reason = _sweep_one(parent_fd, name)
            except OSError as error:
                reason = error.strerror or str(error)
            if reason is None:
                swept.append(parent / name)
                logger.info("removed %s, left behind by a run that ended without cleaning up", parent / name)
            else:
                logger.debug("%s is left alone: %s", parent / name, reason)
    finally:
        os.close(parent_fd)
    return swept


def _sweep_one(parent_fd: int, name: str) -> str | None:
    """Delete one folder, or return why not."""
    folder_fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
    try:
        if os.fstat(folder_fd).st_uid != os.geteuid():
            return "it belongs to another user"
        entries = set(os.listdir(folder_fd))
        if MARKER_NAME not in entries or not entries <= {MARKER_NAME, DATA_NAME}:
            return "it does not hold what a scratch folder holds"
        for entry in entries:
            if not stat.S_ISREG(os.stat(entry, dir_fd=folder_fd, follow_symlinks=False).st_mode):
                return f"{entry} is not a regular file"
        # Non-blocking: were it replaced by a FIFO just now, opening must not hang.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        marker_fd = os.open(MARKER_NAME, flags, dir_fd=folder_fd)
        try:
            return _delete_if_dead(parent_fd, folder_fd, marker_fd, name, entries)
        finally:
            os.close(marker_fd)
    finally:
        os.close(folder_fd)


def _delete_if_dead(parent_fd: int, folder_fd: int, marker_fd: int, name: str, entries: set[str]) -> str | None:
    try:
        fcntl.flock(marker_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "its owner is alive"
    marker = Marker.from_json(os.pread(marker_fd, MAX_MARKER_NBYTES, 0))
    if marker is None or marker.name != name:
        return "its marker is not one of ours"
    if not marker.owner_is_dead():
        return f"process {marker.pid} on {marker.hostname} may be alive"
    for entry in sorted(entries - {MARKER_NAME}):
        os.unlink(entry, dir_fd=folder_fd)
    os.unlink(MARKER_NAME, dir_fd=folder_fd)
    os.rmdir(name, dir_fd=parent_fd)
    return None


def process_start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process; None if it is not there, or where there is no /proc."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The second field is the command in parentheses and may hold anything, so count from the last one: field 22.
    return int(status[status.rindex(b")") + 2 :].split()[19])


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
