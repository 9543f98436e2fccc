"""Run fio as the yardstick of the I/O benchmarks: same file, block size, depth and kind of buffer."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HUGE_PAGE_NBYTES = 2 << 20
_NR_HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")

FioEngine = Literal["io_uring", "psync"]
FIO_ENGINES: tuple[FioEngine, ...] = ("io_uring", "psync")


@dataclass(frozen=True, slots=True, kw_only=True)
class FioJob:
    """One pass over a whole file. psync has `num_threads` blocking threads, each on its own part of the file."""

    path: Path
    file_nbytes: int
    block_nbytes: int
    queue_depth: int
    num_threads: int
    engine: FioEngine
    write: bool
    huge_pages: bool

    def command(self) -> list[str]:
        num_jobs = self.num_threads if self.engine == "psync" else 1
        part_nbytes = self.file_nbytes // num_jobs // self.block_nbytes * self.block_nbytes
        command = ["fio", "--name=pass", f"--filename={self.path}", f"--rw={'write' if self.write else 'read'}"]
        command += ["--direct=1", f"--bs={self.block_nbytes}", f"--size={part_nbytes}", f"--ioengine={self.engine}"]
        command += [f"--numjobs={num_jobs}", f"--offset_increment={part_nbytes}", "--thread", "--group_reporting"]
        command += [f"--iodepth={self.queue_depth if self.engine == 'io_uring' else 1}", "--overwrite=1"]
        command += ["--iomem=mmaphuge", f"--hugepage-size={HUGE_PAGE_NBYTES}"] if self.huge_pages else ["--iomem=mmap"]
        return [*command, "--output-format=json"] + ([] if self.write else ["--readonly"])


@dataclass(frozen=True, slots=True)
class FioResult:
    nbytes: int
    seconds: float
    cpu_s: float
    """As fio counts it: its I/O threads, without kernel helpers; the filling of its buffers is included."""


def why_no_fio() -> str | None:
    return None if shutil.which("fio") else "not installed (no fio on PATH)"


def fio_version() -> str:
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def run_fio(job: FioJob) -> FioResult:
    """Run one pass. Raises RuntimeError with fio's own words when it fails."""
    done = subprocess.run(job.command(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"fio failed: {(done.stderr or done.stdout).strip()[-400:]}")
    # warnings may come before the JSON
    report = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    side = report["write" if job.write else "read"]
    cpu_s = (report["usr_cpu"] + report["sys_cpu"]) / 100 * report["job_runtime"] / 1000
    return FioResult(side["io_bytes"], side["runtime"] / 1000, cpu_s)


@contextlib.contextmanager
def reserved_huge_pages(block_nbytes: int, queue_depth: int, num_threads: int) -> Iterator[bool]:
    """Reserve what fio's buffers need, and restore the setting. False where that is not allowed or not granted."""
    # fio rounds each thread's buffers up and takes slack
    num_pages = max(queue_depth, num_threads) * -(-block_nbytes // HUGE_PAGE_NBYTES) + 2 * num_threads + 2
    free = _meminfo("HugePages_Free") - _meminfo("HugePages_Rsvd")
    if free >= num_pages and _meminfo("Hugepagesize") * 1024 == HUGE_PAGE_NBYTES:
        yield True
        return
    if not os.access(_NR_HUGE_PAGES, os.W_OK):
        yield False
        return
    before = _NR_HUGE_PAGES.read_text()
    try:
        _NR_HUGE_PAGES.write_text(str(int(before) + num_pages - free))
        yield _meminfo("HugePages_Free") >= num_pages
    finally:
        _NR_HUGE_PAGES.write_text(before)


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    return 0
