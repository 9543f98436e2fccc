"""Chunks: runs of tensors that are used together, laid out so that a read from the file lands ready to use.

Note [layout]
    A chunk is one contiguous slot. It is filled by `Segment`s, each one read of a file range. Where the file's bytes
    are used as they are (zero copy), the range is aligned outwards to 4 KiB and the tensor is viewed at its offset
    inside, so its address modulo 4096, hence modulo 64, is that of the file: the bits of fp32 matrix-vector products
    depend on it. Where a parameter is stacked from several tensors, each piece is read to its own place in 64-aligned
    memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.io.arena import PAGE_NBYTES, round_up
from hetero.io.extent import Extent

STACK_ALIGNMENT_NBYTES = 64
MERGE_GAP_NBYTES = 64 << 10  # reading a gap this small costs less than another request


def align_down(value: int, alignment: int = PAGE_NBYTES) -> int:
    return value - value % alignment


@dataclass(frozen=True, slots=True)
class Segment:
    """One read of `nbytes` bytes at `offset` of `path` to `slot_offset` of the chunk's slot."""

    path: Path
    offset: int
    nbytes: int
    slot_offset: int


@dataclass(frozen=True, slots=True)
class Part:
    """Some whole rows of one tensor, or all of it: what a chunk holds.

    `pieces` are (extent, offset of that extent in the part's own contiguous bytes); one piece at 0 is zero copy.
    """

    name: str
    nbytes: int
    pieces: tuple[tuple[Extent, int], ...]
    first_row: int = 0
    num_rows: int | None = None

    @property
    def is_zero_copy(self) -> bool:
        return len(self.pieces) == 1 and self.pieces[0][1] == 0 and self.pieces[0][0].nbytes == self.nbytes


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """A part and where it starts inside the chunk's slot."""

    part: Part
    slot_offset: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The unit of placement and movement.

    `nbytes` is the size of a slot, a multiple of 4096; `read_nbytes` the bytes that filling it asks of the files.
    """

    chunk_id: int
    name: str
    nbytes: int
    read_nbytes: int
    segments: tuple[Segment, ...]
    parts: tuple[PlacedPart, ...]


def build_chunk(chunk_id: int, name: str, parts: Sequence[Part], file_nbytes: dict[Path, int]) -> Chunk:
    """Lay out `parts` in one slot, see Note [layout]."""
    segments: list[Segment] = []
    placed: dict[str, PlacedPart] = {}
    cursor = 0
    for run in _merge([part for part in parts if part.is_zero_copy]):
        first, last = run[0].pieces[0][0], max((part.pieces[0][0] for part in run), key=lambda extent: extent.end)
        start, end = align_down(first.offset), round_up(last.end)
        segments.append(Segment(first.path, start, end - start, cursor))
        for part in run:
            placed[_key(part)] = PlacedPart(part, cursor + part.pieces[0][0].offset - start)
        cursor += end - start
    for part in parts:
        if part.is_zero_copy:
            continue
        base = round_up(cursor, STACK_ALIGNMENT_NBYTES)
        for extent, offset in part.pieces:
            segments.append(Segment(extent.path, extent.offset, extent.nbytes, base + offset))
        placed[_key(part)] = PlacedPart(part, base)
        cursor = base + part.nbytes
    return Chunk(
        chunk_id=chunk_id,
        name=name,
        nbytes=round_up(max(cursor, 1)),
        read_nbytes=sum(min(s.nbytes, file_nbytes[s.path] - s.offset) for s in segments),
        segments=tuple(segments),
        parts=tuple(placed[_key(part)] for part in parts),
    )


def group_parts(units: Iterable[tuple[str, Sequence[Part]]], max_nbytes: int) -> list[tuple[str, list[Part]]]:
    """Pack units, in order of first use, into chunks of one group (a layer) and at most `max_nbytes`.

    A unit is (group, the parts that one module needs at once): it is never divided, so that a module waits for one
    chunk. A unit larger than `max_nbytes` gets a chunk of its own.
    """
    groups: list[tuple[str, list[Part]]] = []
    used = 0
    for group, parts in units:
        nbytes = sum(part.nbytes for part in parts)
        if not groups or groups[-1][0] != group or used + nbytes > max_nbytes:
            groups.append((group, []))
            used = 0
        groups[-1][1].extend(parts)
        used += nbytes
    return groups


def split_rows(part: Part, num_rows: int, row_nbytes: int, max_nbytes: int) -> list[Part]:
    """Cut a zero-copy part into blocks of whole rows of at most about `max_nbytes` each.

    Blocks hold a multiple of 64 rows, so every block keeps the part's address modulo 64.
    """
    rows = max(64, max_nbytes // row_nbytes // 64 * 64)
    if rows >= num_rows:
        return [part]
    extent = part.pieces[0][0]
    blocks = []
    for first in range(0, num_rows, rows):
        count = min(rows, num_rows - first)
        piece = Extent(extent.path, extent.offset + first * row_nbytes, count * row_nbytes)
        blocks.append(Part(part.name, piece.nbytes, ((piece, 0),), first, count))
    return blocks


def _key(part: Part) -> str:
    return f"{part.name}:{part.first_row}"


def _merge(parts: Sequence[Part]) -> list[list[Part]]:
    """Runs of parts whose file ranges touch or nearly touch."""
    runs: list[list[Part]] = []
    end = 0
    for part in sorted(parts, key=lambda part: (part.pieces[0][0].path, part.pieces[0][0].offset)):
        extent = part.pieces[0][0]
        if runs and runs[-1][0].pieces[0][0].path == extent.path and extent.offset - end <= MERGE_GAP_NBYTES:
            runs[-1].append(part)
            end = max(end, extent.end)
        else:
            runs.append([part])
            end = extent.end
    return runs
