"""The zoo where torch sees a GPU: it refuses mixed devices, and makes gradients where the forward computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.exact.test_wrap_zoo import CASES
from tests.exact.wrap_rig import BUDGETS, Budget, Reference, check_training
from tests.fake_gpu.device import DEVICE

NOT_ON_A_GPU = {
    "custom-functions": "its functions make tensors on the CPU, and keep a parameter on their context",
    "recurrent": "torch has no fused cell for the CPU, and takes one on a GPU",
    "sparse-gradients": "the fake GPU has no sparse tensors",
    "interleaved": "torch.autograd.grad by parameters that stream",
    "penalty": "weights on two devices: a norm adds what each has",
    "replaced": "a weight in memory of the user's own on the CPU",
    "replaced-before-backward": "a weight in memory of the user's own on the CPU",
    "swapped": "a weight in memory of the user's own on the CPU",
    "user-memory": "a weight in memory of the user's own on the CPU",
    "writes": "numpy writes to no GPU's memory",
    "writes-before-backward": "numpy writes to no GPU's memory",
}
# `model.to(gpu)` parts weights that share memory.
PLAIN_ON_CPU = {"tied-by-storage", "overlapping", "untied"}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=[name for name in CASES if name not in NOT_ON_A_GPU])
def reference(request: pytest.FixtureRequest) -> Reference:
    return Reference(CASES[request.param], DEVICE, plain_on_cpu=request.param in PLAIN_ON_CPU)


@pytest.mark.parametrize("budget", [budget for budget in BUDGETS if budget.device == "emulated"], ids=str)
def test_training_is_that_of_plain_torch(reference: Reference, budget: Budget, tmp_path: Path, no_leaks: None) -> None:
    check_training(reference, budget, tmp_path)
