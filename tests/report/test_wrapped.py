"""What a wrapped run says of itself is what happened."""

from __future__ import annotations

from pathlib import Path

import pytest
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


def test_explain_counts_the_visits_and_prices_them(tmp_path: Path, no_leaks: None) -> None:
    with wrap(tmp_path) as run, torch.no_grad():
        assert run.explain().count("no iteration has used it yet") == NUM_LAYERS
        for _ in range(2):
            run.model(torch.ones(1, 128))
        lines = run.explain().splitlines()
        streams = [line for line in lines if "streams from disk, which costs" in line]
        stays = [line for line in lines if "stays in cpu, which saves at most" in line]
        assert len(streams) == run.plan.num_streamed > 0
        assert len(stays) == NUM_LAYERS - len(streams)
        assert all("64.0 KiB" in line and "once per iteration" in line for line in [*streams, *stays])
        slots = {chunk.slot_nbytes for chunk in run.streaming.streamed}  # a page longer where memory begins amid one
        costs = {round(1000 * nbytes / run.links.disk_bytes_per_s, 2) for nbytes in slots}
        assert all(float(line.split("costs ")[1].split(" ms")[0]) in costs for line in streams)


def test_the_plan_before_training_names_the_gradients(tmp_path: Path, no_leaks: None) -> None:
    model = make_model()
    with hetero.wrap(model, device="cpu", cpu_memory=2 * BUDGET_NBYTES, disk=tmp_path) as run:
        assert "training adds 1.0 MiB of gradients" in str(run.plan)
        model(torch.ones(1, 128)).sum().backward()
        assert "training adds" not in str(run.plan)
    with wrap(tmp_path) as run:
        assert "1.0 MiB of gradients, and what autograd saves, which do not fit: it needs cpu_memory=" in str(run.plan)
    with hetero.wrap(model.requires_grad_(False), device="cpu", disk=tmp_path) as run:
        assert "training adds" not in str(run.plan)


def test_stats_say_when_passes_are_seen_no_more(no_leaks: None) -> None:
    model = make_model()
    with hetero.wrap(model, device="cpu") as run:
        assert "unseen" not in str(run.stats())
        for _ in range(2):
            model(torch.ones(1, 128)).sum().backward()
        assert run.stats().passes["backward"] == 1 and not run.stats().sees_passes
        assert "passes run unseen" in str(run.stats())


def test_stats_say_it_of_forwards_without_gradients_as_well(no_leaks: None) -> None:
    model = make_model()
    with hetero.wrap(model, device="cpu") as run:
        for _ in range(3):
            with torch.no_grad():
                model(torch.ones(1, 128))
        assert run.stats().passes["forward"] == 1 and "passes run unseen" in str(run.stats())
        model(torch.ones(1, 128)).sum().backward()
        assert run.stats().passes["backward"] == 1
    assert "passes run unseen" in str(run.stats())


def test_explain_after_the_end_is_that_of_the_run(tmp_path: Path, no_leaks: None) -> None:
    with wrap(tmp_path) as run, torch.no_grad():
        for _ in range(2):
            run.model(torch.ones(1, 128))
        before = run.explain()
    assert run.explain() == before and "streams from disk, which costs" in before


def test_a_trace_into_no_folder_is_refused_by_name(tmp_path: Path, no_leaks: None) -> None:
    with wrap(tmp_path) as run, pytest.raises(hetero.ConfigError, match="there is no folder"):
        run.trace(tmp_path / "none" / "trace.json")
