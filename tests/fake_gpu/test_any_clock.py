"""Plans follow measured times, so a budget that works must work whatever the clock says."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.memory import trace
from tests.exact.on_gpu import NOT_ON_A_GPU, PLAIN_ON_CPU
from tests.exact.test_wrap_zoo import CASES
from tests.exact.wrap_rig import Budget, Reference, check_training, minimal_budgets
from tests.fake_gpu.clock import Clock
from tests.fake_gpu.device import DEVICE
from tests.fake_gpu.test_training import NOT_ON_THIS_ONE

NAMES = [name for name in CASES if name not in NOT_ON_A_GPU and name not in NOT_ON_THIS_ONE]
NUM_CLOCKS = 5


@pytest.mark.parametrize("name", NAMES)
def test_the_least_budget_works_at_any_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    reference = Reference(CASES[name], DEVICE, plain_on_cpu=name in PLAIN_ON_CPU)
    reference.least_on_gpu = minimal_budgets(reference.case, "emulated", tmp_path, DEVICE)
    for seed in range(NUM_CLOCKS):
        monkeypatch.setattr(trace, "perf_counter", Clock(seed))
        check_training(reference, Budget("emulated", None, spills=True), tmp_path)


def test_clocks_change_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None) -> None:
    """Else they would show nothing."""
    reference, placements = Reference(CASES["transformer"], DEVICE), set()
    for seed in range(NUM_CLOCKS):
        monkeypatch.setattr(trace, "perf_counter", Clock(seed))
        run = check_training(reference, Budget("emulated", 0.6), tmp_path)
        placements.add(run.explain().partition("outside the budgets")[2])
    assert len(placements) > 1
