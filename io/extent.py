"""A run of bytes of a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Extent:
    """`[offset, offset + nbytes)` of the file at `path`."""

    path: Path
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes
