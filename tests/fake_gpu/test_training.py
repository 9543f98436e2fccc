"""The zoo where torch sees a GPU: operators refuse mixed devices, and gradients come to be beside the weights' copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exact.test_wrap_zoo import CASES
from tests.exact.wrap_rig import BUDGETS, Budget, Reference, check_training
from tests.fake_gpu.device import DEVICE


@pytest.fixture(scope="module", params=list(CASES))
def reference(request: pytest.FixtureRequest) -> Reference:
    return Reference(CASES[request.param], DEVICE, plain_on_cpu=True)


@pytest.mark.parametrize("budget", [budget for budget in BUDGETS if budget.device == "emulated"], ids=str)
def test_training_is_that_of_plain_torch(reference: Reference, budget: Budget, tmp_path: Path, no_leaks: None) -> None:
    check_training(reference, budget, tmp_path)
