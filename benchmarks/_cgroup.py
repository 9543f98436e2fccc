"""Run one command inside a memory cgroup (v1 or v2) of its own, from a cold page cache."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self


class CgroupUnavailableError(RuntimeError):
    """No memory cgroup can be made here. The message is one line that says why and what to do."""


@dataclass(frozen=True, slots=True)
class _Names:
    """The control files of one cgroup version."""

    limit: str
    swap_limit: str
    peak: str
    events: str
    kill_count: str


_V1 = _Names(
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "memory.max_usage_in_bytes",
    "memory.oom_control",
    "oom_kill",
)
_V2 = _Names("memory.max", "memory.swap.max", "memory.peak", "memory.events", "oom_kill")


@dataclass(frozen=True, slots=True)
class LimitedRun:
    """How a command ended. `peak_nbytes` counts everything charged to the group: page cache and kernel memory too."""

    returncode: int
    stdout: str
    stderr: str
    wall_s: float
    peak_nbytes: int | None
    num_oom_kills: int

    @property
    def failure(self) -> str | None:
        """Why the command failed, in words; None when it did not."""
        if self.num_oom_kills:
            return "killed: out of memory"
        if self.returncode:
            lines = self.stderr.strip().splitlines()
            return f"exit {self.returncode}: {lines[-1] if lines else 'no message'}"
        return None


class MemoryCgroup:
    """A new cgroup with a hard limit of `limit_nbytes`, swap included; removed on exit, when it must be empty.

    Raises CgroupUnavailableError where that is not possible.
    """

    def __init__(self, limit_nbytes: int) -> None:
        version, parent = find_parent()
        self.version = version
        self._names = _V1 if version == 1 else _V2
        self.folder = parent / f"benchmark-{os.getpid()}-{time.monotonic_ns()}"
        self.folder.mkdir()
        try:
            (self.folder / self._names.limit).write_text(str(limit_nbytes))
            with suppress(OSError):  # the file is there only where the kernel accounts swap
                (self.folder / self._names.swap_limit).write_text(str(limit_nbytes if version == 1 else 0))
        except OSError as error:
            self.folder.rmdir()
            raise CgroupUnavailableError(f"the memory controller refuses a limit ({error.strerror})") from error

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> LimitedRun:
        """Run `command` to its end. A shell enters the group first, so that all the command touches is charged."""
        start = time.perf_counter()
        enter = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *command]
        with subprocess.Popen(enter, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            try:
                stdout, stderr = child.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                child.kill()
                stdout, stderr = child.communicate()
                stderr += f"\nstopped after {timeout_s:.0f} s"
        wall_s = time.perf_counter() - start
        return LimitedRun(child.returncode, stdout, stderr, wall_s, self._peak_nbytes(), self._num_oom_kills())

    def _peak_nbytes(self) -> int | None:
        try:
            return int((self.folder / self._names.peak).read_text())
        except (OSError, ValueError):  # memory.peak of v2 came with Linux 5.19
            return None

    def _num_oom_kills(self) -> int:
        with suppress(OSError):
            for line in (self.folder / self._names.events).read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == self._names.kill_count:
                    return int(value)
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(OSError):  # v1 only: hands the group's page cache back, which would keep it alive
            (self.folder / "memory.force_empty").write_text("0")
        for _ in range(50):
            try:
                self.folder.rmdir()
                return
            except OSError:  # the last process is still being torn down
                time.sleep(0.1)


def find_parent() -> tuple[int, Path]:
    """(version, folder in which groups with a memory limit can be made). Raises CgroupUnavailableError."""
    if os.geteuid() != 0:
        raise CgroupUnavailableError("memory limits need root: run this benchmark as root on Linux")
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in mounts:
        if mount[2] == "cgroup" and "memory" in mount[3].split(","):
            return 1, _own_folder(Path(mount[1]), "memory")
    for mount in mounts:
        if mount[2] == "cgroup2":
            top = Path(mount[1])
            if "memory" not in (top / "cgroup.controllers").read_text().split():
                continue
            try:
                (top / "cgroup.subtree_control").write_text("+memory")
            except OSError as error:
                raise CgroupUnavailableError(
                    f"cgroup v2 does not hand out its memory controller here ({error.strerror}): "
                    "run outside of a container"
                ) from error
            return 2, top
    raise CgroupUnavailableError("this kernel offers no memory cgroup, v1 or v2")


def _own_folder(top: Path, controller: str) -> Path:
    """This process's own v1 group, so that an outer limit goes on holding; the top where that is not visible."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") and (top / path.lstrip("/")).is_dir():
            return top / path.lstrip("/")
    return top


def drop_page_cache() -> None:
    """Write dirty pages out and forget all clean ones (root). Pages that a running process maps stay."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
