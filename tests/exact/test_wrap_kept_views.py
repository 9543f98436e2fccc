"""Views of weights that a module keeps across forwards: plainly they are the weight, and so they are here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import hetero
from tests.exact.feature_rig import DEVICES, WIDTH, assert_same, backward, batch, check, gradients, tight_budgets

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.parametrize("device", DEVICES)]
NUM_STEPS = 5


class Caching(nn.Linear):
    """A linear layer that transposes its weight once."""

    kept: Any = None

    def forward(self, x: Any) -> Any:
        if self.kept is None:
            self.kept = self.weight.t()
        return x @ self.kept + self.bias


class CachingDetached(Caching):
    """The view is no part of a graph: the weight learns from its decay only."""

    def forward(self, x: Any) -> Any:
        if self.kept is None:
            self.kept = self.weight.detach()
        return x @ self.kept.t() + self.bias


def caching(kind: type[Caching] = Caching, num_layers: int = 8) -> Any:
    torch.manual_seed(0)
    layers = [kind(WIDTH, WIDTH) if i % 2 else nn.Linear(WIDTH, WIDTH) for i in range(num_layers)]
    return nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh())))


def session(model: Any) -> list[Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen: list[Any] = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = model(batch(step)[0]).square().mean()
        for p in model.parameters():
            loss = loss + 0.01 * p.square().sum()
        backward(loss)
        seen += [loss.detach(), gradients(model)]
        optimizer.step()
        with torch.no_grad():
            seen.append(model(batch(9)[0]))
    return seen


@pytest.mark.parametrize("kind", [Caching, CachingDetached])
def test_a_view_that_a_module_keeps_is_the_weight_in_training(device: str, kind: type[Caching], tmp_path: Path) -> None:
    check(caching(kind), session, device, tmp_path)


def test_a_view_that_a_module_keeps_is_the_weight_without_gradients(device: str, tmp_path: Path) -> None:
    def forwards(model: Any) -> list[Any]:
        seen = []
        with torch.no_grad():
            for i in range(NUM_STEPS):
                seen.append(model(batch(i)[0]))
                for p in model.parameters():
                    p.mul_(0.9)
        return seen

    check(caching(), forwards, device, tmp_path, trains=False)


def test_a_view_kept_in_the_warm_up_is_the_weight_when_all_weights_have_a_place(device: str, tmp_path: Path) -> None:
    """The room is there at the first plan; in the warm-up of a forward something else had it."""
    model = caching()
    budgets: dict[str, Any] = tight_budgets(model, device, tmp_path)
    weights = sum(p.nbytes for p in model.parameters())
    budgets = {tier: nbytes + weights + (64 << 10) for tier, nbytes in budgets.items()}
    with hetero.wrap(model, device=device, disk=tmp_path, **budgets):
        assert_same(session(model), session(caching()))


def test_kept_views_hold_no_more_memory_with_time(device: str, tmp_path: Path) -> None:
    model = caching()
    budgets: dict[str, Any] = tight_budgets(model, device, tmp_path)
    with hetero.wrap(model, device=device, disk=tmp_path, **budgets) as run:
        session(model)
        kept = [len(executor.outlived()) for executor, _ in run.streaming.kept_views._executors]
        before = psutil.Process().memory_info().rss
        for _ in range(8):
            session(model)
        assert [len(executor.outlived()) for executor, _ in run.streaming.kept_views._executors] == kept
        assert psutil.Process().memory_info().rss - before < 4 << 20
        for module in model:
            module.kept = None
        assert any(kept) and not run.streaming.kept_views.has_any


def test_a_kept_view_shows_what_is_written_through_data(device: str, tmp_path: Path) -> None:
    def forwards(model: Any) -> list[Any]:
        seen = []
        with torch.no_grad():
            for step in range(NUM_STEPS):
                seen.append(model(batch(step)[0]))
                for p in model.parameters():
                    p.data.mul_(0.9)
        return seen

    check(caching(), forwards, device, tmp_path, trains=False)


@pytest.mark.parametrize("extra_nbytes", [0, 16 << 10, 64 << 10])
def test_room_for_activations_does_not_part_a_weight_from_a_view_of_it(
    device: str, extra_nbytes: int, tmp_path: Path
) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(*(module for _ in range(8) for module in (Caching(WIDTH, WIDTH), nn.Tanh())))

    def losses(model: Any) -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            loss = model(batch(step, 64)[0]).square().mean()
            backward(loss)
            optimizer.step()
            seen.append(loss.detach())
        return seen

    model = make()
    weights = sum(p.nbytes for p in model.parameters())
    first = 2 * weights + extra_nbytes
    budgets: dict[str, Any] = {"cpu_memory": (2 << 20) + first}
    if device == "emulated":
        budgets = {"gpu_memory": first, "cpu_memory": (2 << 20) + 2 * weights}
    with hetero.wrap(model, device=device, disk=tmp_path, **budgets):
        assert_same(losses(model), losses(make()))
