"""A disk that errs, comes short, or never answers: one error that names the file, and nothing left behind."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.io.backends.base import Block
from hetero.io.backends.faulty import Fault
from hetero.io.errors import HeteroError, IOEngineError
from tests.bad_days.rig import DEVICES, Disk, is_row, load, logits_of

pytestmark = pytest.mark.usefixtures("no_leaks", "no_memory_left")

FAULTS = {"EIO": Fault(error=errno.EIO), "short": Fault(short_nbytes=4096)}


def only_chunks(fault: Fault) -> Callable[[Block], Fault | None]:
    return lambda block: None if is_row(block) else fault


def fail_until_raised(run: hetero.Run, tries: int = 4) -> IOEngineError:
    """Run passes; the first may still live on what was prefetched."""
    for _ in range(tries):
        try:
            logits_of(run.model)
        except IOEngineError as error:
            return error.with_traceback(None)
    raise AssertionError("no pass failed")


def check_names(error: IOEngineError, folder: Path) -> None:
    file = folder / "model.safetensors"
    assert error.path == file
    assert 0 <= error.offset < error.offset + error.nbytes <= file.stat().st_size + 4096
    assert str(file) in str(error) and f"offset {error.offset}" in str(error)


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("moment", ["probe", "residents"])
def test_a_fault_while_loading_is_one_error_and_leaves_nothing(
    checkpoint: Path, disk: Disk, device: str, kind: str, moment: str
) -> None:
    load(checkpoint, device).close()  # finds the smallest budgets while the disk is well

    def start(progress: Any) -> None:
        disk.fault = only_chunks(FAULTS[kind])

    if moment == "probe":
        start(None)
    with pytest.raises(IOEngineError) as caught:
        load(checkpoint, device, extra_nbytes=200_000, progress=start)
    check_names(caught.value, checkpoint)


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_run_outlives_a_fault_while_decoding(
    checkpoint: Path, reference: torch.Tensor, disk: Disk, device: str, kind: str
) -> None:
    with load(checkpoint, device) as run:
        disk.fault = only_chunks(FAULTS[kind])
        check_names(fail_until_raised(run), checkpoint)
        disk.fault = None
        for _ in range(3):
            assert torch.equal(logits_of(run.model), reference)


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_outlives_a_fault_in_an_embedding_row(
    checkpoint: Path, reference: torch.Tensor, disk: Disk, device: str
) -> None:
    with load(checkpoint, device) as run:
        disk.fault = lambda block: Fault(error=errno.EIO) if is_row(block) else None
        check_names(fail_until_raised(run, tries=1), checkpoint)
        disk.fault = None
        assert torch.equal(logits_of(run.model), reference)


@pytest.mark.parametrize("device", DEVICES)
def test_every_single_read_may_fail_once(checkpoint: Path, reference: torch.Tensor, disk: Disk, device: str) -> None:
    # Each round fails another read: whatever state the executor is in then, the next good pass is right.
    with load(checkpoint, device) as run:
        for round_number in range(16):
            countdown = [round_number]

            def choose(block: Block, countdown: list[int] = countdown) -> Fault | None:
                countdown[0] -= 1
                return Fault(error=errno.EIO) if countdown[0] == -1 else None

            disk.fault = choose
            for _ in range(2):
                with suppress(IOEngineError):
                    assert torch.equal(logits_of(run.model), reference)
            disk.fault = None
            assert torch.equal(logits_of(run.model), reference)


def test_a_failed_generation_can_be_asked_again(checkpoint: Path, disk: Disk) -> None:
    with load(checkpoint) as run:
        expected = run.generate("w5 w6 w7", max_tokens=4)
        disk.fault = lambda block: Fault(error=errno.EIO)
        with pytest.raises(IOEngineError):
            run.generate("w5 w6 w7", max_tokens=4)
        disk.fault = None
        assert run.generate("w5 w6 w7", max_tokens=4) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_a_stuck_disk_ends_a_load(checkpoint: Path, disk: Disk, device: str) -> None:
    load(checkpoint, device).close()
    disk.timeout_s = 0.3

    def start(progress: Any) -> None:
        disk.fault = lambda block: Fault(stuck=True)

    with pytest.raises(IOEngineError, match=r"no progress for 0\.3 s") as caught:
        load(checkpoint, device, extra_nbytes=200_000, progress=start)
    check_names(caught.value, checkpoint)
    disk.backends[-1].release_stuck()


@pytest.mark.parametrize("where", ["chunks", "rows"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_stuck_disk_ends_a_pass_and_the_run_says_so_ever_after(
    checkpoint: Path, disk: Disk, device: str, where: str
) -> None:
    disk.timeout_s = 0.3
    with load(checkpoint, device) as run:
        disk.fault = lambda block: Fault(stuck=True) if is_row(block) == (where == "rows") else None
        error = fail_until_raised(run)
        assert error.errno == errno.ETIMEDOUT
        check_names(error, checkpoint)
        # The disk comes back and its late transfer may land anywhere we gave it: nothing may use that memory again.
        disk.fault = None
        with pytest.raises(IOEngineError, match="no progress"):
            logits_of(run.model)
    disk.backends[-1].release_stuck()


def test_a_run_closes_while_the_disk_is_stuck(checkpoint: Path, disk: Disk) -> None:
    disk.timeout_s = 0.3
    run = load(checkpoint)
    disk.fault = lambda block: Fault(stuck=True)
    with pytest.raises(IOEngineError):
        logits_of(run.model)
    run.close()
    with pytest.raises(HeteroError, match="closed"):
        logits_of(run.model)
    disk.backends[-1].release_stuck()
