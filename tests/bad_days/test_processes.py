"""Processes that are killed, interrupted, stuck or several: nothing is left that a next run trips over."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hetero
from tests.bad_days.rig import load, logits_of, smallest

pytestmark = pytest.mark.usefixtures("no_leaks")

CHILD = Path(__file__).with_name("child.py")


def start(mode: str, folder: Path, *flags: str, extra_nbytes: int = 0) -> subprocess.Popen[str]:
    nbytes = smallest(folder, "cpu")["cpu_memory"] + extra_nbytes
    command = [sys.executable, *flags, str(CHILD), mode, str(folder), str(nbytes)]
    environment = os.environ | {"PYTHONPATH": str(Path(hetero.__file__).parents[1])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert line == "ready\n", f"{line!r} {process.stderr.read()}"


def listing(folder: Path) -> list[tuple[str, int, int]]:
    paths = sorted(folder.rglob("*"))
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def test_killed_runs_leave_nothing_behind(checkpoint: Path, reference: torch.Tensor) -> None:
    before = listing(checkpoint)
    processes = [start(mode, checkpoint, extra_nbytes=200_000) for mode in ("load", "generate")]
    for process in processes:
        with process:
            wait_until_ready(process)
            process.kill()
        assert process.returncode == -signal.SIGKILL
    assert listing(checkpoint) == before
    with load(checkpoint) as run:
        assert torch.equal(logits_of(run.model), reference)


def test_ctrl_c_ends_the_command_quietly_while_loading_and_while_generating(checkpoint: Path) -> None:
    before = listing(checkpoint)
    processes = [start(mode, checkpoint, extra_nbytes=200_000) for mode in ("command load", "command generate")]
    for process in processes:
        with process:
            wait_until_ready(process)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=30)
        assert process.returncode == 130, stderr
        assert "Traceback" not in stderr and "Exception" not in stderr
        assert len(stderr.splitlines()) <= 3, stderr  # loaded, read the prompt, the rates so far
    assert listing(checkpoint) == before


def test_processes_and_runs_share_one_checkpoint_and_one_disk_folder(
    checkpoint: Path, reference: torch.Tensor, tmp_path: Path
) -> None:
    with (
        start("answer", checkpoint) as other,
        load(checkpoint, disk=tmp_path) as first,
        load(checkpoint, "emulated", disk=tmp_path) as second,
    ):
        wait_until_ready(other)
        for _ in range(5):
            assert torch.equal(logits_of(first.model), reference)
            assert torch.equal(logits_of(second.model), reference)
        stdout, stderr = other.communicate(timeout=60)
    assert other.returncode == 0, stderr
    assert stdout.strip() == hashlib.sha256(reference.numpy().tobytes()).hexdigest()
    assert not any(tmp_path.iterdir())


def test_runs_that_nobody_closes_end_with_the_process_and_say_nothing(checkpoint: Path) -> None:
    with start("dropped", checkpoint, "-X", "dev", extra_nbytes=100_000) as process:
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (0, "ready\n"), stderr
    assert "Exception ignored" not in stderr and "Error" not in stderr and "hetero" not in stderr, stderr


def test_a_disk_stuck_for_ever_does_not_hold_up_the_exit(checkpoint: Path) -> None:
    with start("stuck", checkpoint) as process:
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert "no progress for 0.5 s" in stdout and str(checkpoint / "model.safetensors") in stdout
    assert "Traceback" not in stderr and "Exception" not in stderr, stderr
