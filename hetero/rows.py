"""Rows of embedding tables, from resident chunks or straight from the file."""

from __future__ import annotations

import ctypes
import errno
from bisect import bisect_right
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

from hetero.cpu_kernels.dequantize import dequantize_rows
from hetero.cpu_kernels.formats import format_for
from hetero.io.engine import Engine, File, Request
from hetero.io.errors import IOEngineError
from hetero.io.operation import finish
from hetero.layout import Layout, Weight
from hetero.memory.device import ArenaLike
from hetero.memory.executor import Executor
from hetero.memory.pipeline import InterruptedPassError


class TableRows:
    """Looks up rows of one table for any ids. Owns nothing; `buffer` (host memory) is shared by all tables.

    Blocks until the rows are read; raises IOEngineError. The result is a new tensor on the compute device.
    """

    def __init__(
        self,
        weight: Weight,
        layout: Layout,
        executor: Executor,
        engine: Engine,
        files: Mapping[Path, File],
        buffer: ArenaLike,
        buffer_bytes: Tensor,
        device: torch.device,
    ) -> None:
        self._weight, self._executor, self._engine, self._files = weight, executor, engine, files
        self._buffer, self._buffer_bytes, self._device = buffer, buffer_bytes, device
        self._extent = weight.source.pieces[0].tensor
        chunks = {chunk.chunk_id: chunk for chunk in layout.chunks}
        self._slot_offsets = [
            next(p.slot_offset for p in chunks[chunk_id].parts if p.part.name == weight.source.name)
            for chunk_id in weight.chunk_ids
        ]
        assert buffer.nbytes >= weight.row_nbytes, "a row of the table must fit the buffer"

    def __call__(self, ids: Tensor) -> Tensor:
        """Rows of 1-D `ids`, shape (len(ids), dim), in the compute dtype."""
        self._executor.check()
        weight, row_nbytes = self._weight, self._weight.row_nbytes
        out = torch.empty(len(ids), weight.num_cols, dtype=weight.dtype)
        batch = max(1, self._buffer.nbytes // row_nbytes)
        wanted = ids.tolist()
        for start in range(0, len(wanted), batch):
            rows = wanted[start : start + batch]
            self._fill(rows)
            packed = self._buffer_bytes[: len(rows) * row_nbytes].view(len(rows), row_nbytes)
            target = out[start : start + len(rows)]
            if format_for(weight.source.format).torch_dtype == weight.dtype:
                target.copy_(packed.view(weight.dtype))
            else:
                dequantize_rows(packed, weight.source.format, weight.num_cols, target)
        return out.to(self._device)

    def _fill(self, rows: list[int]) -> None:
        """Put the rows' file bytes into the buffer, one after the other."""
        row_nbytes = self._weight.row_nbytes
        requests = []
        for position, row in enumerate(rows):
            block = bisect_right(self._weight.first_rows, row) - 1
            chunk_id = self._weight.chunk_ids[block]
            start = self._slot_offsets[block] + (row - self._weight.first_rows[block]) * row_nbytes
            host_address = self._executor.host_address(chunk_id)
            if host_address is not None:
                ctypes.memmove(self._buffer.address + position * row_nbytes, host_address + start, row_nbytes)
                continue
            if self._executor.is_resident(chunk_id):
                with self._executor.lease((chunk_id,)) as (entry,):
                    source = self._executor.bytes_of(entry)[start : start + row_nbytes]
                    self._buffer_bytes[position * row_nbytes : (position + 1) * row_nbytes].copy_(source)
                continue
            offset = self._extent.offset + row * row_nbytes
            file = self._files[self._extent.path]
            requests.append(Request(file, offset, row_nbytes, self._buffer.address + position * row_nbytes))
        futures: list[Future[int]] | None = None
        try:
            futures = self._engine.submit(requests)
            finish(futures)
        except BaseException as error:
            # Where the kernel may yet write to the buffer that every look-up uses, there must be no other look-up.
            if isinstance(error, IOEngineError) and error.errno == errno.ETIMEDOUT:
                self._executor.refuse(error)
            elif not isinstance(error, Exception) and not (futures and all(future.done() for future in futures)):
                self._executor.refuse(InterruptedPassError.by(error))
            raise
