"""What callers ask for, and how it is split into blocks: pure arithmetic on offsets and addresses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetero.io.arena import PAGE_NBYTES, round_up
from hetero.io.backends.base import Block

if TYPE_CHECKING:
    from hetero.io.file import File


@dataclass(frozen=True, slots=True)
class Request:
    """Move [offset, offset + nbytes) of a file to (or, with `write`, from) the memory at `address`.

    The memory belongs to the caller and must stay valid until the request's future is done. Lowest `priority` starts
    first; equal priorities in order of submission.
    """

    file: File
    offset: int
    nbytes: int
    address: int
    write: bool = False
    priority: int = 0


def split_request(request: Request, request_id: int, block_nbytes: int, slot_nbytes: int) -> list[Block]:
    """Split into blocks with rising ids, from `request_id` on, and rising offsets; an empty request has none.

    With O_DIRECT, whole 4096-byte pages whose file offset and address agree modulo 4096 go straight to their place, in
    blocks of `block_nbytes`. Other bytes of a read come through bounce slots, aligned outwards. Other bytes of a write
    take the file's plain descriptor where they cover part of a page (the page cache merges them, so that we never read,
    modify and write a page that a neighbour is changing) and bounce slots where they cover whole pages.
    """
    if request.nbytes == 0:
        return []
    start, end = request.offset, request.offset + request.nbytes
    body_start, body_end = round_up(start, PAGE_NBYTES), end // PAGE_NBYTES * PAGE_NBYTES
    agrees = (request.address - request.offset) % PAGE_NBYTES == 0
    steps: list[tuple[str, int, int]]
    if not request.file.direct:
        steps = [("plain", start, end)]
    elif body_start >= body_end:
        steps = [("plain" if request.write else "bounce", start, end)]
    elif request.write:
        body = "direct" if agrees else "bounce"
        steps = [("plain", start, body_start), (body, body_start, body_end), ("plain", body_end, end)]
    elif agrees:
        steps = [("bounce", start, body_start), ("direct", body_start, body_end), ("bounce", body_end, end)]
    else:
        steps = [("bounce", start, end)]
    blocks: list[Block] = []
    ids = itertools.count(request_id)
    for way, step_start, step_end in steps:
        if way == "bounce":
            blocks.extend(_bounced(request, step_start, step_end, request_id, ids, slot_nbytes))
        else:
            blocks.extend(_unbounced(request, step_start, step_end, request_id, ids, block_nbytes, way))
    return blocks


def _unbounced(
    request: Request, start: int, end: int, request_id: int, ids: Iterator[int], block_nbytes: int, way: str
) -> Iterator[Block]:
    aligned = way == "direct"
    fd = request.file.direct_fd if aligned else request.file.plain_fd
    for offset in range(start, end, block_nbytes):
        yield Block(
            block_id=next(ids),
            request_id=request_id,
            priority=request.priority,
            fd=fd,
            offset=offset,
            nbytes=min(block_nbytes, end - offset),
            address=request.address + offset - request.offset,
            write=request.write,
            aligned=aligned,
        )


def _bounced(
    request: Request, start: int, end: int, request_id: int, ids: Iterator[int], slot_nbytes: int
) -> Iterator[Block]:
    first_page = start // PAGE_NBYTES * PAGE_NBYTES
    for offset in range(first_page, end, slot_nbytes):
        copy_start, copy_end = max(start, offset), min(end, offset + slot_nbytes)
        yield Block(
            block_id=next(ids),
            request_id=request_id,
            priority=request.priority,
            fd=request.file.direct_fd,
            offset=offset,
            nbytes=round_up(copy_end, PAGE_NBYTES) - offset,
            address=request.address + copy_start - request.offset,
            write=request.write,
            aligned=True,
            copy_skip=copy_start - offset,
            copy_nbytes=copy_end - copy_start,
        )
