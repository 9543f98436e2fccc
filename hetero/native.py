"""Which compiled parts this install has, and what runs in their place when it has not."""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from dataclasses import dataclass

_log = logging.getLogger("hetero.native")


@dataclass(frozen=True, slots=True)
class NativePart:
    """A compiled module and the part of hetero that does its work without it."""

    name: str
    module: str
    reference: str
    platforms: tuple[str, ...]

    @property
    def expected(self) -> bool:
        """Whether a complete install on this platform has it."""
        return sys.platform in self.platforms

    @property
    def present(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


PARTS = (
    NativePart(
        name="disk I/O by io_uring",
        module="hetero.io._uring",
        reference="threads with preadv and pwritev",
        platforms=("linux",),
    ),
)


def missing_parts() -> tuple[NativePart, ...]:
    """Return the parts a complete install would have here and this one lacks."""
    return tuple(part for part in PARTS if part.expected and not part.present)


@functools.cache
def report_missing_once() -> None:
    """Log one INFO line, in the life of the process, naming what runs on the reference path. Silent when complete."""
    missing = missing_parts()
    if missing:
        parts = "; ".join(f"{part.name} (instead: {part.reference})" for part in missing)
        _log.info("Installed without compiled code, so on the reference path: %s", parts)
