"""The zoo once more, with every tensor that autograd saves on the move: to the cpu or to disk, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
import hetero.memory.activations
import hetero.memory.autograd
from hetero.wrapped import WrappedRun
from tests.exact.test_wrap_zoo import CASES, quick
from tests.exact.wrap_rig import Budget, Reference, assert_same, budgets_for, build, state_of, train

__all__ = ["quick"]  # a fixture, used by every test

SMALL_ONES_NBYTES = 32 << 10
"""What the footprint does not count, and the tests move all the same."""
PLACES = {"cpu-disk": ("cpu", "disk"), "emulated-cpu": ("emulated", "cpu"), "emulated-disk": ("emulated", "disk")}


@pytest.fixture(scope="module", params=list(CASES))
def reference(request: pytest.FixtureRequest) -> Reference:
    return Reference(CASES[request.param])


@pytest.mark.parametrize("place", list(PLACES))
def test_training_with_activations_elsewhere_is_that_of_plain_torch(
    reference: Reference, place: str, tmp_path: Path, no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, policy = PLACES[place]
    budgets = budgets_for(reference, Budget(device, 0.6), tmp_path)
    budgets = {tier: nbytes + SMALL_ONES_NBYTES for tier, nbytes in budgets.items()}
    monkeypatch.setattr(hetero.memory.activations, "LARGE_NBYTES", 1)
    monkeypatch.setattr(hetero.memory.activations, "WINDOW_NBYTES", 512)
    monkeypatch.setattr(hetero.memory.autograd, "SMALL_NBYTES", 1)
    model, batches = build(reference.case)
    sizes = {f"{tier}_memory": nbytes for tier, nbytes in budgets.items()}
    run: WrappedRun = hetero.wrap(model, device=device, disk=tmp_path, activations=policy, **sizes)
    with run:
        assert_same(train(reference.case, model, batches), reference.record)
        stats = run.stats()
    assert_same(state_of(model), reference.end)
    assert stats.activations_out_nbytes >= stats.activations_back_nbytes > 0


@pytest.mark.parametrize("place", list(PLACES))
def test_a_policy_is_followed_in_every_iteration_also_when_all_weights_are_resident(
    place: str, tmp_path: Path, no_leaks: None
) -> None:
    device, policy = PLACES[place]
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    sizes: dict[str, Any] = {"cpu_memory": "8MiB"} | ({"gpu_memory": "8MiB"} if device == "emulated" else {})
    run: WrappedRun = hetero.wrap(model, device=device, disk=tmp_path, activations=policy, **sizes)
    with run:
        moved = []
        for _ in range(4):
            before = run.stats().activations_out_nbytes
            model(torch.randn(512, 64)).square().mean().backward()
            moved.append(run.stats().activations_out_nbytes - before)
        assert run.plan.num_streamed == 0
        assert min(moved) == max(moved) >= 4 * 512 * 64 * 4
