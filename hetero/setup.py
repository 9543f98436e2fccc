"""What a plan and a load both start from: the source, the device, the limits, the links, the decision."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from hetero.io.engine import Engine, File
from hetero.io.errors import CheckpointError, ConfigError
from hetero.layout import build_layout, files_of
from hetero.measure import measure_compute, measure_disk, trim_heap
from hetero.memory.budget import Baseline, MemoryLimits, TierInfo, parse_size, resolve_budgets
from hetero.memory.device import Device, open_device
from hetero.memory.plan_types import Links
from hetero.native import report_missing_once
from hetero.planning import Wishes, decide, formats_of
from hetero.sources import Source, open_source


class Setup:
    """What a plan and a load both need: the source, the device, the limits. Owns device, engine and files."""

    def __init__(
        self,
        path_or_id: str | os.PathLike[str],
        *,
        device: str,
        gpu_memory: int | str,
        cpu_memory: int | str,
        disk: str | os.PathLike[str] | None,
        dtype: str | torch.dtype,
        link: int | str | None,
        wishes: Wishes,
        trust_remote_code: bool,
        revision: str | None = None,
        latency_s: float = 0.0,
        disk_bytes_per_s: float | None = None,
    ) -> None:
        if disk is not None and not Path(disk).is_dir():
            raise ConfigError(f"disk={os.fspath(disk)!r} is not a folder: create it first")
        report_missing_once()
        self.stack = ExitStack()
        try:
            self.source = open_source(path_or_id, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
            self.model = self.source.build_model()
            self.device = open_limited(device, gpu_memory, link, latency_s=latency_s)
            self.stack.callback(self.device.close)
            # What the libraries take for themselves they take now: it is part of the baseline, not of the budgets.
            self.tokenizer = _tokenizer_of(self.source)
            self.rates = measure_compute(self.source.dtype, formats_of(self.source), self.device)
            trim_heap()
            self.limits = limits_of(self.device, gpu_memory, cpu_memory)
            self.engine = self.stack.enter_context(Engine())
            self.files = self._open_files()
            room_nbytes = self.limits.cpu.nbytes - self.engine.bounce_nbytes
            disk_rate = disk_bytes_per_s or measure_disk(self.engine, self.files, room_nbytes=room_nbytes)
            self.links = links_of(self.device, disk_rate, self.limits, room_nbytes=room_nbytes)
            self.decision = decide(
                self.source,
                self.model,
                limits=self.limits,
                links=self.links,
                rates=self.rates,
                wishes=wishes,
                io_nbytes=self.engine.bounce_nbytes,
                device_name=self.device.name,
                is_remote=self.device.torch_device.type != "cpu",
            )
        except BaseException:
            self.stack.close()
            raise

    def _open_files(self) -> dict[Path, File]:
        layout = build_layout(self.source, self.model, 1 << 62)
        files = {path: self.engine.open(path) for path in sorted(files_of(layout))}
        check_identity(self.source, files)
        return files


def _tokenizer_of(source: Source) -> Any:
    """The source's tokenizer, or None: token ids go through a model without one."""
    try:
        return source.load_tokenizer()
    except ConfigError:
        return None


def open_limited(name: str, gpu_memory: int | str, link: int | str | None, *, latency_s: float = 0.0) -> Device:
    """Open a device by name; an emulated one is as large as `gpu_memory`, and its link as fast as `link`."""
    rate = None if link is None else float(_parse_rate(link))
    capacity = None
    if name == "emulated" and gpu_memory != "auto":
        capacity = parse_size(gpu_memory, name="gpu_memory")
    return open_device(name, capacity_nbytes=capacity, bandwidth_bytes_per_s=rate, latency_s=latency_s)


def limits_of(
    device: Device,
    gpu_memory: int | str,
    cpu_memory: int | str,
    *,
    cpu: TierInfo | None = None,
    baseline: Baseline | None = None,
) -> MemoryLimits:
    """Turn the two size options into limits on `device`; `cpu` and `baseline` as for `resolve_budgets`."""
    gpu = None
    if device.has_gpu_tier:
        free, total = device.memory_info()
        gpu = TierInfo(total_nbytes=total, available_nbytes=free, limit_source=device.name)
    limits = resolve_budgets(gpu_memory, cpu_memory, gpu=gpu, cpu=cpu, baseline=baseline)
    if gpu is not None and limits.gpu is None:
        raise ConfigError(
            f'gpu_memory={gpu_memory!r} leaves nothing of {device.name} to use: give it some, or choose device="cpu"'
        )
    return limits


def links_of(device: Device, disk_bytes_per_s: float, limits: MemoryLimits, *, room_nbytes: int) -> Links:
    """The rates of the links; the gpu link's is measured where the device does not know it."""
    if limits.gpu is None:
        return Links(disk_bytes_per_s)
    known = device.link_info()
    rate = known.bandwidth_bytes_per_s or measure_link(device, room_nbytes=min(room_nbytes, limits.gpu.nbytes))
    return Links(disk_bytes_per_s, rate, gpu_latency_s=known.latency_s or 0.0)


def _parse_rate(link: int | str) -> int:
    text = link.strip().removesuffix("/s") if isinstance(link, str) else link
    return parse_size(text, name="link")


def measure_link(device: Device, *, room_nbytes: int) -> float:
    """Bytes per second of copies from page-locked memory, `room_nbytes` at most, to the device. Blocks for 30 ms."""
    free, _ = device.memory_info()
    if free < 4096:
        return float(1 << 30)  # any rate will do: no plan fits, and the planner says what would
    nbytes = max(4096, min(32 << 20, free // 4, room_nbytes) // 4096 * 4096)
    host = device.allocate_host(nbytes, name="link probe")
    try:
        target = device.allocate(nbytes, name="link probe")
        try:
            device.copy(target.address, host.address, nbytes, to_device=True).synchronize()
            start = perf_counter()
            for _ in range(3):
                event = device.copy(target.address, host.address, nbytes, to_device=True)
            event.synchronize()
            return 3 * nbytes / (perf_counter() - start)
        finally:
            target.close()
    finally:
        host.close()


def check_identity(source: Source, files: Mapping[Path, File]) -> None:
    """Raise CheckpointError when a file is not the one whose header was read."""
    for path, file in files.items():
        difference = source.index.files[path].difference(file.identity)
        if difference is not None:
            raise CheckpointError(path, f"{difference}; load the model again")
