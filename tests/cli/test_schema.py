"""The dictionaries of a real run are those that the schema describes and the command line renders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import hetero
from hetero.cli import render
from hetero.report import schema
from tests.tiny_models import write_checkpoint


def assert_keys(value: Mapping[str, Any], description: type) -> None:
    assert set(value) == set(description.__annotations__), description.__name__


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_real_run_speaks_the_schema(device: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama")
    gpu_memory = "64MiB" if device == "emulated" else "auto"
    with hetero.load(folder, device=device, gpu_memory=gpu_memory, cpu_memory="64MiB", context=64) as run:
        plan, stats = run.plan.to_dict(), run.stats().to_dict()

    assert_keys(plan, schema.PlanDict)
    for tier in plan["tiers"]:
        assert_keys(tier, schema.TierPlan)
    for phase in plan["phases"]:
        assert_keys(phase, schema.PhasePlan)
    assert_keys(stats, schema.StatsDict)
    for link in stats["links"].values():
        assert_keys(link, schema.LinkStats)
    for used in stats["tiers"].values():
        assert_keys(used, schema.TierStats)
    json.dumps([plan, stats])
    render.print_plan(Console(quiet=True), plan)
    assert "peak" in render.stats_line(stats)
