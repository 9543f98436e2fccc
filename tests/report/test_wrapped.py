"""What a wrapped run says of itself is what happened."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import hetero
from hetero.report.progress import Progress

LAYER_NBYTES = 4 * 128 * 128
NUM_LAYERS = 16
BUDGET_NBYTES = (2 << 20) + 12 * LAYER_NBYTES  # bounce buffers, and three quarters of the weights


def make_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(NUM_LAYERS)))


def wrap(folder: Path, told: list[Progress] | None = None) -> hetero.WrappedRun:
    tell = None if told is None else told.append
    return hetero.wrap(make_model(), device="cpu", cpu_memory=BUDGET_NBYTES, disk=folder, progress=tell)


def test_progress_ends_at_its_total(tmp_path: Path, no_leaks: None) -> None:
    told: list[Progress] = []
    with wrap(tmp_path, told) as run:
        on_disk = run.plan.tiers["disk"].weights_nbytes
        assert on_disk > 0
        assert (told[-1].done_nbytes, told[-1].total_nbytes) == (on_disk, on_disk)
        num_told = len(told)
    assert told[-1].message != told[num_told - 1].message
    assert told[-1].done_nbytes == told[-1].total_nbytes


def test_scratch_space_in_use_is_counted(tmp_path: Path, no_leaks: None) -> None:
    with wrap(tmp_path) as run:
        assert run.plan.tiers["disk"].weights_nbytes > 0
        disk = run.stats().tiers["disk"]
        assert NUM_LAYERS * LAYER_NBYTES <= disk.used_nbytes <= disk.peak_nbytes <= disk.limit_nbytes


def test_traffic_is_not_foretold_before_it_is_known(tmp_path: Path, no_leaks: None) -> None:
    with wrap(tmp_path) as run, torch.no_grad():
        assert "from disk" not in str(run.plan)
        for _ in range(2):
            run.model(torch.ones(1, 128))
        assert run.plan.disk_nbytes > 0
        assert "from disk" in str(run.plan)
