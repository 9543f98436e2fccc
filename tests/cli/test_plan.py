"""`hetero plan`: two tables, or the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from hetero.cli import render


@pytest.mark.parametrize("width", ["80", "200"])
def test_tables_show_placement_bound_and_bottleneck(
    hetero_command: Callable[..., Any], plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    outcome = hetero_command("plan", "tiny.gguf", "--cpu-memory", "48MiB")

    assert outcome.exit_code == 0
    rows = [" ".join(line.split()) for line in outcome.stdout.splitlines()]
    assert rows[0] == "tiny.gguf: 92.0 MiB in bfloat16 on emulated, context 2048"
    assert "gpu 24.0 MiB 16.0 MiB 6.0 MiB 2.0 MiB - -" in rows
    assert "disk - - - - 40.0 MiB 3.9 GB/s" in rows
    assert "decode 1 40.0 MiB 76.0 MiB 12.5 ms 10.7 ms disk 80.00" in rows
    assert "18 MiB more of cpu memory would keep everything in RAM" in rows
    assert plan["arguments"]["cpu_memory"] == "48MiB"


def test_json_is_the_plan_itself(hetero_command: Callable[..., Any], plan: dict[str, Any]) -> None:
    outcome = hetero_command("plan", "tiny.gguf", "--json")
    assert json.loads(outcome.stdout) == {key: value for key, value in plan.items() if key != "arguments"}


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), ((1 << 20) - 1, "1.0 MiB"), (5 << 40, "5.0 TiB")],
)
def test_sizes_are_binary(nbytes: int, text: str) -> None:
    assert render.format_nbytes(nbytes) == text


@pytest.mark.parametrize(("rate", "text"), [(999, "999 B/s"), (3.94e9, "3.9 GB/s"), (999_960, "1.0 MB/s")])
def test_rates_are_decimal(rate: float, text: str) -> None:
    assert render.format_rate(rate) == text
