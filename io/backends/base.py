"""The protocol every backend keeps: blocks go in, completions come out, lowest (priority, block_id) starts first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Block(NamedTuple):
    """One transfer of at most `block_nbytes`; the field order is the wire format of the native module.

    A direct block moves [offset, offset + nbytes) of `fd` to or from `address` itself. A bounced block
    (`copy_nbytes > 0`) moves the same extent through its lane's bounce slot: a read then copies `copy_nbytes` from
    slot + `copy_skip` to `address`; a write first copies `copy_nbytes` from `address` to the slot's start.
    """

    block_id: int  # rises with submission order, and with the offset inside a request
    request_id: int  # the id of the request's first block
    priority: int
    fd: int
    offset: int
    nbytes: int
    address: int
    write: bool
    aligned: bool  # `fd` is O_DIRECT: a count that is no multiple of 4096 means end of file
    copy_skip: int = 0
    copy_nbytes: int = 0

    @property
    def useful_offset(self) -> int:
        return self.offset + self.copy_skip

    @property
    def useful_nbytes(self) -> int:
        return self.copy_nbytes or self.nbytes


class Completion(NamedTuple):
    """What became of one block. Times are CLOCK_MONOTONIC nanoseconds."""

    block_id: int
    error: int  # errno, 0 for success; a success may be short at end of file
    useful_nbytes: int  # bytes that reached the caller's memory, or the file
    device_nbytes: int  # bytes the kernel says it moved, alignment included
    start_ns: int
    end_ns: int


class Backend(Protocol):
    """Own the threads (and ring) that carry out blocks. Thread-safe; `collect` is for one thread at a time."""

    name: str
    direct: bool
    """Whether files should be opened with O_DIRECT."""
    num_lanes: int
    """How many blocks are in flight at most; lane i owns bounce slot i."""

    def push(self, blocks: Sequence[Block]) -> None:
        """Queue blocks. Never blocks on I/O."""

    def withdraw(self, priority: int, first_id: int, last_id: int, *, unless_started: bool) -> list[int]:
        """Take the waiting blocks with these ids out of the queue and return their ids.

        With `unless_started`, withdraw all of them or, when one has already started, none.
        """

    def collect(self, timeout_s: float) -> list[Completion]:
        """Wait, without the GIL, for news, a `wake()` or the timeout; return what is finished, in order.

        News is a block that failed, or the last block of a request: the blocks before it do not wake Python.
        """

    def wake(self) -> None:
        """Make a running `collect`, or the next one, return at once."""

    def in_flight(self) -> list[tuple[int, float]]:
        """(block_id, seconds without progress) of every block that has started and not finished."""

    def cpu_s(self) -> float:
        """CPU seconds its threads have used."""

    def close(self, timeout_s: float) -> bool:
        """Stop the threads once nothing is in flight and release everything; idempotent.

        The queue must be empty. False means that a block was still in flight after timeout_s: its thread was left
        behind and starts no more I/O; the kernel may still use the block's memory.
        """
