"""Counters of an engine: bytes, operations and busy time per file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hetero.io.backends.base import Block, Completion

_MAX_NUM_SPANS = 64


@dataclass(frozen=True, slots=True)
class FileStats:
    """What was done on one file since the engine started: all of every request that is done, perhaps not yet of others.

    A bounced read moves more device bytes than useful ones.
    """

    path: Path
    num_reads: int
    """Blocks read, not requests."""
    read_nbytes: int
    """Bytes the device delivered, alignment included."""
    useful_read_nbytes: int
    """Bytes that reached the callers' memory."""
    num_writes: int
    written_nbytes: int
    busy_s: float
    """Time with at least one block of this file in flight: read_nbytes / busy_s is the rate of the link."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    backend: str
    files: tuple[FileStats, ...]
    cpu_s: float
    """CPU seconds of the engine's own threads (kernel time of their system calls included, io-wq workers not)."""
    in_flight: int
    """Requests submitted and not done."""

    @property
    def read_nbytes(self) -> int:
        return sum(file.read_nbytes for file in self.files)

    @property
    def written_nbytes(self) -> int:
        return sum(file.written_nbytes for file in self.files)


@dataclass(slots=True)
class FileCounters:
    """The running account behind a FileStats. Not thread-safe: the engine's lock guards it."""

    path: Path
    num_reads: int = 0
    read_nbytes: int = 0
    useful_read_nbytes: int = 0
    num_writes: int = 0
    written_nbytes: int = 0
    _settled_ns: int = 0
    _spans: list[tuple[int, int]] = field(default_factory=list)

    def add(self, block: Block, completion: Completion) -> None:
        if block.write:
            self.num_writes += 1
            self.written_nbytes += completion.device_nbytes
        else:
            self.num_reads += 1
            self.read_nbytes += completion.device_nbytes
            self.useful_read_nbytes += completion.useful_nbytes
        self._add_span(completion.start_ns, completion.end_ns)

    def snapshot(self) -> FileStats:
        busy_ns = self._settled_ns + _length(self._spans)
        return FileStats(
            self.path,
            self.num_reads,
            self.read_nbytes,
            self.useful_read_nbytes,
            self.num_writes,
            self.written_nbytes,
            busy_ns / 1e9,
        )

    def _add_span(self, start: int, end: int) -> None:
        """Merge into the union of busy spans. Blocks end almost in order, so only the newest spans can still grow."""
        keep: list[tuple[int, int]] = []
        while self._spans and self._spans[-1][1] >= start:
            span = self._spans.pop()
            if span[0] > end:
                keep.append(span)
            else:
                start, end = min(start, span[0]), max(end, span[1])
        self._spans.append((start, end))
        self._spans.extend(reversed(keep))
        if len(self._spans) > _MAX_NUM_SPANS:
            half = _MAX_NUM_SPANS // 2
            self._settled_ns += _length(self._spans[:half])
            del self._spans[:half]


def _length(spans: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in spans)
