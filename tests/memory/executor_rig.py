"""An executor over a file of known bytes, so that every lease can be checked byte for byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero.io.arena import Arena
from hetero.io.engine import Engine
from hetero.io.extent import Extent
from hetero.memory.chunk import Chunk, Part, build_chunk
from hetero.memory.device import CpuDevice, Device
from hetero.memory.executor import Executor
from hetero.memory.loader import ResidentLoader
from hetero.memory.ring import Ring
from hetero.memory.schedule import Stay


def write_chunks(folder: Path, sizes: Sequence[int], seed: int = 0) -> tuple[list[Chunk], list[np.ndarray[Any, Any]]]:
    """One file, one tensor per chunk, at offsets that are not page-aligned; and the bytes each chunk must show."""
    rng = np.random.default_rng(seed)
    contents = [rng.integers(0, 255, nbytes, dtype=np.uint8) for nbytes in sizes]
    path = folder / "weights.bin"
    offsets, cursor = [], 88
    for content in contents:
        offsets.append(cursor)
        cursor += len(content) + 8
    blob = np.zeros(cursor, np.uint8)
    for offset, content in zip(offsets, contents, strict=True):
        blob[offset : offset + len(content)] = content
    blob.tofile(path)
    chunks = []
    for i, (offset, content) in enumerate(zip(offsets, contents, strict=True)):
        part = Part(f"w{i}", len(content), ((Extent(path, offset, len(content)), 0),))
        chunks.append(build_chunk(i, f"chunk {i}", [part], {path: cursor}))
    return chunks, contents


class Rig:
    """Everything an executor needs, and `check`, which leases chunks and compares them with the file."""

    def __init__(self, chunks: list[Chunk], contents: list[Any], executor: Executor, engine: Engine, file: Any) -> None:
        self.chunks, self.contents = chunks, contents
        self.executor, self.engine, self.file = executor, engine, file

    def bytes_of(self, entry: Any) -> torch.Tensor:
        placed = entry.chunk.parts[0]
        return self.executor.bytes_of(entry)[placed.slot_offset : placed.slot_offset + placed.part.nbytes]

    def check(self, *chunk_ids: int) -> None:
        entries = self.executor.acquire(chunk_ids)
        try:
            for chunk_id, entry in zip(chunk_ids, entries, strict=True):
                assert np.array_equal(self.bytes_of(entry).numpy(), self.contents[chunk_id]), f"chunk {chunk_id}"
        finally:
            del entry, entries
            self.executor.release(chunk_ids)

    def check_all(self, order: Iterable[int]) -> None:
        for chunk_id in order:
            self.check(chunk_id)

    @property
    def read_nbytes(self) -> int:
        return sum(file.useful_read_nbytes for file in self.engine.stats().files)


@contextmanager
def rig(
    folder: Path,
    sizes: Sequence[int],
    *,
    ring_nbytes: int,
    schedule: Sequence[Stay] | None = None,
    resident: Sequence[int] = (),
    device: Device | None = None,
    host: Sequence[int] = (),
    staging_nbytes: int = 0,
    engine: Engine | None = None,
) -> Iterator[Rig]:
    """Build a rig; with a `device` that has a gpu tier, `host` chunks lie in RAM and the rest is staged."""
    chunks, contents = write_chunks(folder, sizes)
    device = device or CpuDevice(poison=True)
    engine = engine or Engine()
    arenas: list[Any] = []

    def place(ids: Sequence[int], extra: int, on_gpu: bool) -> tuple[dict[int, int], Ring]:
        total = sum(chunks[i].nbytes for i in ids) + extra
        allocate = device.allocate if on_gpu else device.allocate_host
        arena: Any = allocate(max(total, 4096), name="test")
        arenas.append(arena)
        address, places = arena.address, {}
        for i in ids:
            places[i] = address
            address += chunks[i].nbytes
        return places, Ring(address, extra)

    file = engine.open(folder / "weights.bin")
    files = {folder / "weights.bin": file}
    loader = ResidentLoader(engine, files, device)
    has_gpu = device.has_gpu_tier
    in_first, first = place(resident, ring_nbytes, has_gpu)
    in_host, staging = place(host, staging_nbytes, False) if has_gpu else ({}, None)
    if has_gpu and resident:
        whole: Any = Arena(max(chunks[i].nbytes for i in resident), name="load")
        loader.load([(chunks[i], a) for i, a in in_first.items()], staging=Ring(whole.address, whole.nbytes))
        whole.close()
    elif resident:
        loader.load([(chunks[i], a) for i, a in in_first.items()])
    if in_host:
        loader.load([(chunks[i], a) for i, a in in_host.items()])
    streamed = [i for i in range(len(chunks)) if i not in resident]
    executor = Executor(
        chunks,
        device=device,
        engine=engine,
        files=files,
        first=first,
        staging=staging,
        resident=in_first,
        host={i: (address, chunks[i].nbytes) for i, address in in_host.items()},
        schedule=[Stay(i, 1) for i in streamed] if schedule is None else schedule,
    )
    try:
        yield Rig(chunks, contents, executor, engine, file)
    finally:
        executor.close()
        engine.close()
        device.close()
        for arena in arenas:
            arena.close()
