"""Which kind of file system a folder lies on, and whether scratch files belong there."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "coda", "glusterfs", "lustre", "gpfs", "beegfs",
     "orangefs", "pvfs2", "ncpfs"}
)  # fmt: skip
# Most others behind FUSE are mounts of something remote (sshfs, rclone, s3fs, gcsfuse, drive).
_LOCAL_FUSE = frozenset({"fuse.mergerfs", "fuse.bindfs", "fuse.ntfs-3g", "fuse.exfat", "fuse.fuse-overlayfs"})


def filesystem_type(path: str | os.PathLike[str], *, mountinfo: str | None = None) -> str | None:
    """The type of the file system `path` lies on, links resolved; None where the kernel does not tell.

    `mountinfo` is the text of /proc/self/mountinfo, which is read if it is not given.
    """
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError:
            return None
    real_path = os.path.realpath(path)
    found: tuple[int, str] | None = None
    for line in mountinfo.splitlines():
        # id parent major:minor root mount-point options [optional fields] - type source super-options
        before, _, after = line.partition(" - ")
        fields, type_and_source = before.split(" "), after.split(" ")
        if len(fields) < 6 or not type_and_source[0]:
            continue
        mount_point = _unescape(fields[4])
        inside = real_path == mount_point or real_path.startswith(mount_point.rstrip("/") + "/")
        # Of two mounts on one point the later one hides the earlier.
        if inside and (found is None or len(mount_point) >= found[0]):
            found = len(mount_point), type_and_source[0]
    return found[1] if found else None


def why_unfit_for_scratch(type_name: str | None) -> str | None:
    """The reason why a file system of this type must not hold scratch files, or None if it may."""
    if type_name in _MEMORY:
        return f"is on {type_name}, which is memory, not disk"
    if type_name in _NETWORK or ((type_name or "").startswith("fuse.") and type_name not in _LOCAL_FUSE):
        return f"is on {type_name}, a network file system"
    return None


def _unescape(text: str) -> str:
    """The kernel writes space, tab, newline and backslash in a path as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
