"""The zoo where torch sees a GPU: it refuses mixed devices, and makes gradients where the forward computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.exact.on_gpu import NOT_ON_A_GPU, PLAIN_ON_CPU
from tests.exact.test_wrap_zoo import CASES
from tests.exact.wrap_rig import Budget, Reference, check_training
from tests.fake_gpu.device import DEVICE

NOT_ON_THIS_ONE = {
    "recurrent": "torch has no fused cell for the CPU, and takes one on a GPU",
    "sparse-gradients": "it has no sparse tensors",
}
BUDGETS = (Budget("emulated", 1.0), Budget("emulated", 0.6), Budget("emulated", None, spills=True))
NAMES = [name for name in CASES if name not in NOT_ON_A_GPU and name not in NOT_ON_THIS_ONE]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=NAMES)
def reference(request: pytest.FixtureRequest) -> Reference:
    return Reference(CASES[request.param], DEVICE, plain_on_cpu=request.param in PLAIN_ON_CPU)


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_training_is_that_of_plain_torch(reference: Reference, budget: Budget, tmp_path: Path, no_leaks: None) -> None:
    check_training(reference, budget, tmp_path)
