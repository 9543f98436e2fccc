"""A pass that takes many times what the machine promised is told once, with what may help."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import hetero
from hetero.planning import TooSmallError
from tests.tiny_models import write_checkpoint


@pytest.mark.parametrize("is_slow", [True, False])
def test_slow_passes_are_told_once(
    is_slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, no_leaks: None
) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    with pytest.raises(TooSmallError) as refused:
        hetero.load(folder, device="cpu", cpu_memory=4096, context=64)
    monkeypatch.setattr("hetero.run.SLOW_S", 0.0)  # a tiny model's passes are short
    with hetero.load(folder, device="cpu", cpu_memory=refused.value.needs["cpu"], context=64) as run:
        run._expected_s = 1e-9 if is_slow else 1e9
        ids = run.model.dummy_inputs["input_ids"][:1]
        with caplog.at_level(logging.WARNING, "hetero"):
            for _ in range(8):
                run.model(ids[:, :1])
    told = [record.getMessage() for record in caplog.records if "OMP_NUM_THREADS=1" in record.getMessage()]
    assert len(told) == is_slow
