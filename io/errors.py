"""Every exception hetero raises on purpose. The lowest layer owns them, so that all layers can raise them."""

from __future__ import annotations

import os
from pathlib import Path


class HeteroError(Exception):
    """Base of all errors that hetero raises on purpose."""


class ConfigError(HeteroError, ValueError):
    """An option or an input that cannot work: names the option, its value, the limit and the remedy."""


class UnsupportedError(HeteroError, NotImplementedError):
    """Something hetero refuses by name, with what to do instead."""


class CheckpointError(HeteroError, ValueError):
    """A checkpoint file that is malformed, truncated, or not the one that was planned for."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        self.path = Path(path)
        self.reason = reason
        super().__init__(f"{self.path}: {reason}")


class OutOfMemoryError(HeteroError, MemoryError):
    """A tier's budget would be exceeded. Sizes are bytes."""

    def __init__(
        self, message: str, *, tier: str, requested_nbytes: int, free_nbytes: int, largest_holder: str | None = None
    ) -> None:
        self.tier = tier
        self.requested_nbytes = requested_nbytes
        self.free_nbytes = free_nbytes
        self.largest_holder = largest_holder
        super().__init__(message)


class IOEngineError(HeteroError, OSError):
    """A read or write that failed, came back short, or never came back. Names file, offset, length and errno."""

    def __init__(
        self, path: str | os.PathLike[str], offset: int, nbytes: int, error_number: int, detail: str | None = None
    ) -> None:
        self.path = Path(path)
        self.offset = offset
        self.nbytes = nbytes
        reason = detail or os.strerror(error_number)
        super().__init__(error_number, f"{reason} ({nbytes} bytes at offset {offset} of {self.path})")
