"""What memory this process can still have: the machine, the cgroups around it, and the accelerator.

Every function takes what it reads as it is now; nothing is cached, so measure once, after the heavy imports, and keep
the answer.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil
import torch

logger = logging.getLogger("hetero.memory")


@dataclass(frozen=True, slots=True)
class TierInfo:
    """One tier as found. `available_nbytes` is what we could still take: our own process is already subtracted."""

    total_nbytes: int
    available_nbytes: int
    limit_source: str
    """What sets the limit, for people: "the machine's free memory", "the cgroup v2 limit of /app"."""
    is_ours_alone: bool = False
    """A limit set for this process and its like (a cgroup), not memory that other programs need too."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the interpreter and its libraries hold before any weight is loaded; a ledger line of its own."""

    anonymous_nbytes: int
    file_nbytes: int
    """Mapped library code, shared memory included. The kernel may drop and re-read it, at the cost of speed."""

    @property
    def total_nbytes(self) -> int:
        return self.anonymous_nbytes + self.file_nbytes


@dataclass(frozen=True, slots=True)
class CgroupLimit:
    """One cgroup that limits this process, from its own control files."""

    version: int
    path: str
    limit_nbytes: int
    used_nbytes: int  # without the page cache that the kernel would drop first

    @property
    def available_nbytes(self) -> int:
        return max(self.limit_nbytes - self.used_nbytes, 0)


def detect_cpu(*, root: Path = Path("/")) -> TierInfo:
    """Return the tightest of the machine's memory and every cgroup limit (v1, v2 or both) around this process.

    `root` stands in for the file system root in tests.
    """
    machine = psutil.virtual_memory()
    total, available, source = int(machine.total), int(machine.available), "the machine's available memory"
    is_ours_alone = False
    for cgroup in cgroup_limits(root):
        total = min(total, cgroup.limit_nbytes)
        if cgroup.available_nbytes < available:
            available = cgroup.available_nbytes
            source = f"the cgroup v{cgroup.version} limit of {cgroup.path}"
            is_ours_alone = True
    return TierInfo(total, available, source, is_ours_alone)


def process_baseline(*, root: Path = Path("/")) -> Baseline:
    """Return this process's resident memory now. Blocks for one read of /proc; raises OSError without one."""
    status = (root / "proc/self/status").read_text()
    kib = {name: int(value) for name, value in re.findall(r"^Rss(\w+):\s*(\d+) kB$", status, re.MULTILINE)}
    return Baseline(kib.get("Anon", 0) << 10, (kib.get("File", 0) + kib.get("Shmem", 0)) << 10)


def detect_gpu(torch_device: torch.device) -> TierInfo:
    """Return the free and total memory of an accelerator. Creates its context, which itself takes memory there."""
    if torch_device.type == "cuda":
        free, total = torch.cuda.mem_get_info(torch_device)
    else:
        free, total = torch.accelerator.get_memory_info(torch_device)
    return TierInfo(int(total), int(free), f"the free memory of {torch_device}")


def installed_gpus() -> list[tuple[str, int, int]]:
    """Return (name, free_nbytes, total_nbytes) of every GPU that NVML knows, without creating a CUDA context.

    Sees GPUs that this build of torch cannot use and ignores CUDA_VISIBLE_DEVICES. Empty without NVML or a driver.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # NVML's error classes are made at import, which may be what failed
        logger.debug("NVML is not available: %s", error)
        return []
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            found.append((str(pynvml.nvmlDeviceGetName(handle)), int(memory.free), int(memory.total)))
        return found
    finally:
        pynvml.nvmlShutdown()


def cgroup_limits(root: Path = Path("/")) -> list[CgroupLimit]:
    """Return every finite memory limit from this process's cgroups up to the top of what is mounted."""
    try:
        memberships = (root / "proc/self/cgroup").read_text()
        mounts = (root / "proc/self/mountinfo").read_text()
    except OSError:
        return []
    found = []
    for version, mount_root, mount_point in _cgroup_mounts(mounts):
        membership = _membership(memberships, version)
        if membership is None:
            continue
        top = root / mount_point.lstrip("/")
        for folder in _folders_up(top, mount_root, membership):
            limit = _read_limit(folder, version)
            if limit is not None:
                path = "/" + os.path.relpath(folder, top).removeprefix(".")
                found.append(CgroupLimit(version, path, *limit))
    return found


def _cgroup_mounts(mountinfo: str) -> list[tuple[int, str, str]]:
    """Return (cgroup version, root within the hierarchy, mount point) of the mounts that may carry memory limits."""
    found = []
    for line in mountinfo.splitlines():
        # "36 35 98:0 /root /mount rw,relatime [optional fields] - fstype source super_options", see proc(5)
        left, separator, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if not separator or len(fields) < 5 or not kinds:
            continue
        if kinds[0] == "cgroup2":
            found.append((2, _unescape(fields[3]), _unescape(fields[4])))
        elif kinds[0] == "cgroup" and "memory" in kinds[-1].split(","):
            found.append((1, _unescape(fields[3]), _unescape(fields[4])))
    return found


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _membership(memberships: str, version: int) -> str | None:
    """Return this process's path in the v1 memory hierarchy or in the v2 one."""
    for line in memberships.splitlines():
        number, controllers, path = line.split(":", 2)
        if (version == 2 and number == "0" and not controllers) or (
            version == 1 and "memory" in controllers.split(",")
        ):
            return path
    return None


def _folders_up(top: Path, mount_root: str, membership: str) -> list[Path]:
    """Return the process's own cgroup folder and its parents up to the mount point, those that exist here.

    Inside a container without a cgroup namespace the membership is the host's path, of which only the part below the
    mount's root is visible; a path that does not lie below it says nothing, and the mount point is all we can see.
    """
    path, base = PurePosixPath(membership), PurePosixPath(mount_root)
    inside = path.relative_to(base) if path.is_relative_to(base) and ".." not in path.parts else PurePosixPath()
    folders = [top / inside, *(top / parent for parent in inside.parents)] if inside.parts else [top]
    return [folder for folder in folders if folder.is_dir()]


_V1_UNLIMITED = 1 << 60  # v1 writes "no limit" as the largest page multiple of a signed 64-bit number


def _read_limit(folder: Path, version: int) -> tuple[int, int] | None:
    """Return (limit, bytes in use without droppable cache), or None when the folder sets no limit."""
    limit_names = ["memory.limit_in_bytes"] if version == 1 else ["memory.max", "memory.high"]
    usage_name = "memory.usage_in_bytes" if version == 1 else "memory.current"
    limits = [limit for limit in (_read_int(folder / name) for name in limit_names) if limit is not None]
    usage = _read_int(folder / usage_name)
    if not limits or usage is None or min(limits) >= _V1_UNLIMITED:
        return None
    return min(limits), max(usage - _droppable_nbytes(folder, version), 0)


def _droppable_nbytes(folder: Path, version: int) -> int:
    """Return the page cache the kernel would drop before anything hurts: inactive, and not mapped by a process.

    Mapped file pages (our own libraries) are taken from the active list first and only then from the inactive one:
    dropping those means reading the code from disk again while it runs.
    """
    try:
        pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        stat = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    except (OSError, ValueError):
        return 0
    prefix, mapped_name = ("total_", "mapped_file") if version == 1 else ("", "file_mapped")
    inactive, active, mapped = (stat.get(prefix + name, 0) for name in ("inactive_file", "active_file", mapped_name))
    return min(max(inactive + active - mapped, 0), inactive)


def _read_int(path: Path) -> int | None:
    """Return the number in a control file, None for "max" or a file that is not there."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
