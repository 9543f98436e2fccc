"""The GPU suite: all of it on a CUDA or XPU device, and its logic on the emulated one, so that CI knows it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_suite(*options: str | Path) -> str:
    """Run the suite as its users do; returns what it printed. It exits with 1 when a check fails."""
    command = [sys.executable, ROOT / "benchmarks" / "gpu_suite.py", "--no-report", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_the_suite_passes(tmp_path: Path) -> None:
    assert "FAILED" not in run_suite("--workdir", tmp_path)


def test_the_suite_runs_on_the_emulated_gpu(tmp_path: Path) -> None:
    printed = run_suite("--device", "emulated", "--tiny", "--workdir", tmp_path)
    for what in ("copies to the device", "copies beside compute", "an alias", "logits and greedy text", "bytes copied"):
        assert what in printed
    assert "FAILED" not in printed


def test_without_a_gpu_the_suite_says_so(tmp_path: Path) -> None:
    import torch

    if torch.accelerator.is_available():
        pytest.skip("there is a GPU here")
    assert "no CUDA or XPU device" in run_suite("--workdir", tmp_path)
