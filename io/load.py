"""A whole checkpoint into RAM as numpy arrays: page-aligned extents straight into arenas on huge pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hetero.io.arena import PAGE_NBYTES, Arena, round_up
from hetero.io.checkpoint import CheckpointIndex, TensorInfo
from hetero.io.engine import Engine, Request
from hetero.io.errors import CheckpointError
from hetero.io.operation import finish, give_up

_EXTENT_NBYTES = 64 << 20
"""An arena is filled by the disk while the next one is being touched; a larger tensor has an arena of its own."""
_MAX_HOLE_NBYTES = 1 << 20
"""Bytes between two wanted tensors that are read along, rather than asking the disk again."""


def load_arrays(
    engine: Engine, index: CheckpointIndex, names: Iterable[str] | None = None
) -> dict[str, npt.NDArray[np.uint8]]:
    """Read tensors (all, or those in `names`) and return their bytes, each a 1-D array, in the order asked for.

    Blocks until all are read. The arrays share arenas of about 64 MiB; an arena is freed when the last array over it
    dies. Takes the tensors' bytes in RAM, and at most 8 KiB and the small holes per arena on top. Raises
    CheckpointError if a file is not the one that was indexed, IOEngineError, OutOfMemoryError.
    """
    wanted = [index.tensors[name] for name in (index.tensors if names is None else names)]
    arrays: dict[str, npt.NDArray[np.uint8]] = {tensor.name: np.empty(0, np.uint8) for tensor in wanted}
    futures: list[Future[int]] = []
    files = {path: engine.open(path) for path in sorted({tensor.path for tensor in wanted})}
    try:
        for path, file in files.items():
            difference = index.files[path].difference(file.identity)
            if difference is not None:
                raise CheckpointError(path, f"{difference}; read its index again")
        for extent in _extents(wanted):
            start = extent[0].offset // PAGE_NBYTES * PAGE_NBYTES
            end = max(tensor.offset + tensor.nbytes for tensor in extent)
            arena = Arena(round_up(end - start, PAGE_NBYTES), name=f"tensors of {extent[0].path.name}")
            futures += engine.submit([Request(files[extent[0].path], start, arena.nbytes, arena.address)])
            for tensor in extent:
                arrays[tensor.name] = arena.array[tensor.offset - start :][: tensor.nbytes]
        finish(futures)
    except BaseException:
        give_up(futures)  # the arenas must outlive the transfers
        raise
    finally:
        for file in files.values():
            file.close()
    return arrays


def _extents(tensors: list[TensorInfo]) -> Iterator[list[TensorInfo]]:
    """Group tensors that are read as one: neighbours in one file, up to _EXTENT_NBYTES."""
    extent: list[TensorInfo] = []
    path, start, end = Path(), 0, 0
    for tensor in sorted(tensors, key=lambda t: (t.path, t.offset, t.nbytes)):
        if tensor.nbytes == 0:
            continue
        tensor_end = tensor.offset + tensor.nbytes
        joins = tensor.path == path and tensor.offset - end <= _MAX_HOLE_NBYTES
        if extent and not (joins and tensor_end - start <= _EXTENT_NBYTES):
            yield extent
            extent = []
        if not extent:
            path, start = tensor.path, tensor.offset
        extent.append(tensor)
        end = tensor_end
    if extent:
        yield extent
