"""Look at the machine and say what it offers to hetero, what is wrong with it and what that costs."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hetero.cli.render import format_nbytes, format_rate
from hetero.io.errors import HeteroError

Status = Literal["ok", "note", "warn", "fail"]

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy", "psutil", "aiofiles")
_CPU_FEATURES = ("avx2", "avx512_f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_tile", "neon", "sve")
_MEASURED_NBYTES = 128 << 20
_NUM_COPIES = 8
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "ceph", "glusterfs")


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `status` is fail only where hetero cannot work; `advice` says what to do about a warn or fail."""

    name: str
    status: Status
    value: str
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine(folder: Path) -> list[Check]:
    """Run every check; `folder` is where scratch data would go. Takes a second or two and writes a file of 128 MiB
    there, which it removes. A check that breaks becomes a finding instead of an exception."""
    checks: list[Check] = []
    for title, probe in _PROBES:
        try:
            checks.extend(probe(folder))
        except (HeteroError, OSError, RuntimeError, ImportError, ValueError) as error:
            checks.append(Check(title, "fail", f"{type(error).__name__}: {error}"))
    return checks


def _versions(folder: Path) -> Iterator[Check]:
    from hetero import __version__

    system = f"Python {platform.python_version()} on {platform.system()} {platform.release()} {platform.machine()}"
    yield Check("hetero", "ok", f"{__version__} with {system}")
    found = {name: _installed_version(name) for name in _PACKAGES}
    yield Check("packages", "ok", ", ".join(f"{name} {version}" for name, version in found.items() if version))
    if found["transformers"] is None:
        yield Check("transformers", "warn", "not installed", "Models by name need it: install hetero[hf].")


def _compiled_parts(folder: Path) -> Iterator[Check]:
    from hetero.native import PARTS

    for part in PARTS:
        if part.present:
            yield Check("compiled", "ok", part.name)
        elif part.expected:
            advice = "Install again with a C++ compiler and HETERO_REQUIRE_NATIVE=1 to see why it was left out."
            yield Check("compiled", "warn", f"{part.name} missing; instead: {part.reference}", advice)
    yield Check("CPU kernels", "ok", "torch reference")
    ipex = _installed_version("intel-extension-for-pytorch")
    if ipex is None:
        yield Check("IPEX", "note", "retired upstream; hetero uses PyTorch")
    else:
        advice = "Uninstall it: importing it beside another torch than 2.8 raises."
        yield Check("IPEX", "note", f"{ipex} installed, not used", advice)


def _cpu(folder: Path) -> Iterator[Check]:
    import torch

    capabilities = torch.cpu.get_capabilities()
    features = [name for name in _CPU_FEATURES if capabilities.get(name)]
    name = capabilities.get("cpu_name") or platform.processor() or platform.machine()
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    value = f"{name}, {allowed} of {os.cpu_count()} cores, {torch.get_num_threads()} torch threads"
    yield Check("CPU", "ok", f"{value}; {', '.join(features) or 'no SIMD features known to torch'}")


def _memory(folder: Path) -> Iterator[Check]:
    from hetero.memory.budget import detect_cpu

    info = detect_cpu()
    value = f"{format_nbytes(info.available_nbytes)} free of {format_nbytes(info.total_nbytes)}"
    yield Check("RAM", "ok", f"{value} (limit: {info.limit_source})")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else format_nbytes(soft)
    yield Check("page-lock limit", "ok", limit)


def _huge_pages(folder: Path) -> Iterator[Check]:
    from hetero.io.arena import Arena

    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    mode = setting.read_text().partition("[")[2].partition("]")[0] if setting.exists() else "absent"
    with_pages = Arena(16 << 20, name="doctor")
    try:
        got = f"{format_nbytes(with_pages.huge_nbytes)} of {format_nbytes(with_pages.nbytes)}"
        missing = with_pages.huge_nbytes < with_pages.nbytes
    finally:
        with_pages.close()
    advice = f"Direct reads are slower into small pages: write madvise to {setting}." if missing else ""
    yield Check("huge pages", "warn" if missing else "ok", f"{got} (transparent_hugepage: {mode})", advice)


def _copy_rate(folder: Path) -> Iterator[Check]:
    import torch

    source = torch.ones(_MEASURED_NBYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)  # both written here, so that no page is touched first while timing
    start_s = time.perf_counter()
    for _ in range(_NUM_COPIES):
        target.copy_(source)
    elapsed_s = time.perf_counter() - start_s
    yield Check("memory copy", "ok", f"{format_rate(_NUM_COPIES * _MEASURED_NBYTES / elapsed_s)} copied")


def _accelerator(folder: Path) -> Iterator[Check]:
    import torch

    if not torch.accelerator.is_available():
        yield Check("accelerator", "note", "none; the first tier is RAM (--device emulated imitates one)")
        return
    kind = torch.accelerator.current_accelerator()
    for index in range(torch.accelerator.device_count()):
        device = torch.device(str(kind), index)
        module = torch.get_device_module(device)
        free, total = module.mem_get_info(device)
        value = f"{module.get_device_name(device)}, {format_nbytes(free)} free of {format_nbytes(total)}"
        yield Check(str(device), "ok", value)


def _folder(folder: Path) -> Iterator[Check]:
    import psutil

    usage = psutil.disk_usage(str(folder))
    kind = _file_system(folder)
    value = f"{folder} on {kind}, {format_nbytes(usage.free)} free of {format_nbytes(usage.total)}"
    if kind in _MEMORY_FILE_SYSTEMS:
        yield Check("scratch folder", "warn", value, "This folder is RAM; name one on a disk with --disk.")
    elif kind in _NETWORK_FILE_SYSTEMS:
        yield Check("scratch folder", "warn", value, "This folder is on a network; name a local one with --disk.")
    else:
        yield Check("scratch folder", "ok", value)


def _disk(folder: Path) -> Iterator[Check]:
    from hetero.io.engine import Engine

    try:
        Engine(backend="io_uring").close()
        yield Check("io_uring", "ok", "available")
    except (HeteroError, OSError, ImportError) as error:
        advice = "Threads do the work; containers need a seccomp profile that allows io_uring."
        yield Check("io_uring", "warn", f"not available: {error}", advice)
    with tempfile.TemporaryDirectory(prefix="hetero-doctor-", dir=folder) as scratch:
        path = Path(scratch) / "measured.bin"
        write_s, read_s, backend = _time_transfers(path)
        direct = _direct_io_error(path)
    advice = "Reads go through the page cache, which takes RAM and time of its own." if direct else ""
    yield Check("O_DIRECT", "warn" if direct else "ok", direct or "works", advice)
    value = f"{format_rate(_MEASURED_NBYTES / read_s)} read, {format_rate(_MEASURED_NBYTES / write_s)} written"
    yield Check("disk rate", "ok", f"{value} ({backend}, {format_nbytes(_MEASURED_NBYTES)})")


def _time_transfers(path: Path) -> tuple[float, float, str]:
    """Write and read the measured bytes with hetero's own engine; return both times and the backend's name."""
    from hetero.io.arena import Arena
    from hetero.io.engine import Engine, Request

    arena = Arena(_MEASURED_NBYTES, name="doctor")
    try:
        arena.array[:] = 0xA5  # not zeros: some disks and file systems do not store those
        with open(path, "wb") as created:
            os.posix_fallocate(created.fileno(), 0, _MEASURED_NBYTES)
        with Engine() as engine:
            file = engine.open(path, writable=True)
            times_s = []
            for write in (True, False):
                start_s = time.perf_counter()
                request = Request(file=file, offset=0, nbytes=_MEASURED_NBYTES, address=arena.address, write=write)
                engine.submit([request])[0].result()
                times_s.append(time.perf_counter() - start_s)
            return times_s[0], times_s[1], engine.backend_name
    finally:
        arena.close()


def _direct_io_error(path: Path) -> str:
    """Return why O_DIRECT does not work on this file, or an empty text."""
    if not hasattr(os, "O_DIRECT"):
        return f"not offered by {sys.platform}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        return os.strerror(error.errno or 0)
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            os.preadv(descriptor, [page], 0)
    except OSError as error:
        return os.strerror(error.errno or 0)
    finally:
        os.close(descriptor)
    return ""


def _file_system(folder: Path) -> str:
    """Return the type of the file system that holds `folder`, "unknown" where the system does not tell."""
    import psutil

    path = folder.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown"


def _installed_version(distribution: str) -> str | None:
    """Look the version up without importing: a broken package must not break the diagnosis."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


_PROBES: tuple[tuple[str, Callable[[Path], Iterator[Check]]], ...] = (
    ("versions", _versions),
    ("compiled parts", _compiled_parts),
    ("CPU", _cpu),
    ("RAM", _memory),
    ("huge pages", _huge_pages),
    ("memory copy", _copy_rate),
    ("accelerator", _accelerator),
    ("scratch folder", _folder),
    ("disk", _disk),
)
