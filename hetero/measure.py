"""Quick measurements that a plan starts from. After the warm-up the prediction is made again with its times."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F

from hetero.cpu_kernels.dequantize import dequantize_rows
from hetero.cpu_kernels.formats import format_for, row_nbytes
from hetero.io.arena import Arena
from hetero.io.engine import Engine, File, Request
from hetero.io.operation import finish
from hetero.layout import Layout
from hetero.memory.device import Device

PROBE_NBYTES = 96 << 20
PROBE_WINDOW_NBYTES = 16 << 20
SAMPLE_NBYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class ComputeRates:
    """How fast this machine computes in one dtype. Rates are per second, the best of a few runs: other
    programs only ever slow a run down, and a plan that believes in slow compute reads too little ahead."""

    weight_bytes: float
    """Weight bytes through one matrix-vector product."""
    flops: float
    """Floating point operations of a wide matrix product."""
    packed_numbers: Mapping[str, float]
    """Numbers dequantised, by format."""

    def compute_s(self, layout: Layout, num_tokens: int) -> dict[int, float]:
        """Estimated seconds per chunk for a pass of `num_tokens` rows."""
        seconds = dict.fromkeys((chunk.chunk_id for chunk in layout.chunks), 0.0)
        for weight in layout.weights.values():
            numel = weight.source.nbytes // weight.row_nbytes * weight.num_cols
            one = numel * weight.dtype.itemsize / self.weight_bytes
            time_s = max(one, 2.0 * numel * num_tokens / self.flops if num_tokens > 1 else 0.0)
            if not weight.is_plain:
                time_s += numel / self.packed_numbers.get(weight.source.format, self.weight_bytes / 4)
            for chunk_id in weight.chunk_ids:
                seconds[chunk_id] += time_s / len(weight.chunk_ids)
        return seconds


def measure_compute(dtype: torch.dtype, formats: set[str], device: Device) -> ComputeRates:
    """Time a product and a dequantisation of a few MiB each where `device` computes. Blocks for about 50 ms."""
    where = device.torch_device
    cols = 1024
    weights = torch.zeros(SAMPLE_NBYTES // dtype.itemsize // cols, cols, dtype=dtype, device=where)
    row, rows = (torch.zeros(num, cols, dtype=dtype, device=where) for num in (1, 64))
    vector_s = _time(lambda: F.linear(row, weights), device)
    matrix_s = _time(lambda: F.linear(rows, weights), device)
    packed = {}
    for name in sorted(formats):
        if format_for(name).torch_dtype is None:
            blocks = torch.zeros(256, row_nbytes(name, cols), dtype=torch.uint8, device=where)
            out = torch.empty(256, cols, dtype=dtype, device=where)
            seconds = _time(partial(dequantize_rows, blocks, name, cols, out), device)
            packed[name] = out.numel() / seconds
    return ComputeRates(weights.nbytes / vector_s, 2.0 * weights.numel() * len(rows) / matrix_s, packed)


def measure_disk(engine: Engine, files: Mapping[Path, File], *, room_nbytes: int) -> float:
    """Bytes per second of reading the largest file with several blocks in flight. Blocks for 0.1 s or so.

    Direct reads, so the page cache has no part in it. Takes up to 16 MiB of memory, and at most `room_nbytes`.
    """
    file = max(files.values(), key=lambda file: file.nbytes)
    window = Arena(max(4096, min(PROBE_WINDOW_NBYTES, file.nbytes, room_nbytes // 4096 * 4096)), name="disk probe")
    try:
        block = min(engine.block_nbytes, window.nbytes)
        total = min(PROBE_NBYTES, file.nbytes) // 4096 * 4096
        requests = [
            Request(
                file, offset, min(block, total - offset), window.address + offset % (window.nbytes // block * block)
            )
            for offset in range(0, total, block)
        ]
        if not requests:
            return float(1 << 30)
        start = perf_counter()
        finish(engine.submit(requests))  # not one by one: at an error the others may still write to the window
        return total / (perf_counter() - start)
    finally:
        window.close()


def trim_heap() -> None:
    """Collect garbage and give free heap memory back to the system, where the C library can (glibc)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _time(run: Callable[[], object], device: Device, repeats: int = 5) -> float:
    """Least seconds of `run`, its compute done."""
    times = []
    for _ in range(repeats + 1):
        start = perf_counter()
        run()
        device.record().synchronize()
        times.append(perf_counter() - start)
    return max(min(times[1:]), 1e-9)
