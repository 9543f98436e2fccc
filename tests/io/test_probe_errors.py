"""A probe that meets an error leaves nothing in flight behind it: its memory goes when it returns."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from hetero.io.backends.faulty import Fault, FaultyBackend
from hetero.io.engine import Engine
from hetero.io.errors import IOEngineError
from hetero.measure import measure_disk


def test_the_disk_probe_waits_for_what_an_error_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(4 << 20))

    def first_fails_the_others_are_late(block: Any) -> Fault:
        return Fault(error=errno.EIO) if block.offset == 0 else Fault(delay_s=0.1)

    engine = Engine(
        block_nbytes=1 << 20, wrap_backend=lambda inner: FaultyBackend(inner, first_fails_the_others_are_late)
    )
    with engine:
        with pytest.raises(IOEngineError, match=r"weights\.bin"):
            measure_disk(engine, {path: engine.open(path)}, room_nbytes=64 << 20)
        assert engine.stats().in_flight == 0
