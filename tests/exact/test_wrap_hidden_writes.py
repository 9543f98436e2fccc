"""Weights written where no version counter shows it: through `.data` and numpy, inside a module's own forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hetero
from tests.exact.feature_rig import DEVICES, WIDTH, assert_same, backward, batch, check, gradients, tight_budgets

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.parametrize("device", DEVICES)]
NUM_STEPS = 5


def clamp(weight: nn.Parameter) -> None:
    weight.data.clamp_(-0.08, 0.08)


def decay(weight: nn.Parameter) -> None:
    weight.data.mul_(0.9)


def by_numpy(weight: nn.Parameter) -> None:
    array = weight.detach().numpy()
    array *= 0.9


def seen_and_unseen(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(1.1)
    weight.data.clamp_(-0.08, 0.08)


WRITES = [clamp, decay, by_numpy, seen_and_unseen]


class Writing(nn.Linear):
    """A linear layer that changes its own weight first, as a critic of WGAN or a binary network does."""

    def __init__(self, write: Callable[[nn.Parameter], None]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.write = write

    def forward(self, x: Any) -> Any:
        assert isinstance(self.weight, nn.Parameter)
        self.write(self.weight)
        return functional.linear(x, self.weight, self.bias)


def writing(write: Callable[[nn.Parameter], None]) -> Any:
    torch.manual_seed(0)
    layers = [nn.Sequential(Writing(write), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(5)]
    is_twice = write is not seen_and_unseen  # which autograd would refuse
    return nn.Sequential(*layers, *layers[1:2] * is_twice)


def session(model: Any) -> list[Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen: list[Any] = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = model(batch(step)[0]).square().mean()
        backward(loss)
        seen += [loss.detach(), gradients(model)]
        optimizer.step()
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
    return seen


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__.replace("_", "-"))
def test_what_a_forward_writes_unseen_is_trained_with(
    device: str, write: Callable[[nn.Parameter], None], tmp_path: Path
) -> None:
    check(writing(write), session, device, tmp_path)


@pytest.mark.parametrize("write", [clamp, decay], ids=lambda write: write.__name__)
def test_what_a_forward_writes_unseen_is_kept_without_gradients(
    device: str, write: Callable[[nn.Parameter], None], tmp_path: Path
) -> None:
    def forwards(model: Any) -> list[Any]:
        with torch.no_grad():
            return [[model(batch(i)[0]), {n: p.clone() for n, p in model.named_parameters()}] for i in range(NUM_STEPS)]

    check(writing(write), forwards, device, tmp_path, trains=False)


def test_a_phase_that_writes_is_seen_after_one_that_does_not(device: str, tmp_path: Path) -> None:
    def only_in_training(weight: nn.Parameter) -> None:
        if torch.is_grad_enabled():
            decay(weight)

    def both(model: Any) -> list[Any]:
        with torch.no_grad():
            seen: list[Any] = [model(batch(i)[0]) for i in range(2)]
        return [seen, session(model)]

    check(writing(only_in_training), both, device, tmp_path)


def test_only_what_is_written_unseen_is_copied_home(device: str, tmp_path: Path) -> None:
    model = writing(decay)
    budgets: dict[str, Any] = tight_budgets(model, device, tmp_path)
    with hetero.wrap(model, device=device, disk=tmp_path, **budgets) as run:
        assert_same(session(model), session(writing(decay)))
        leased = [chunk for chunk in run.streaming.chunks if chunk.phases_checked]
        assert {c.name for c in leased if c.is_written_unseen} == {f"{i}.0.weight" for i in range(5)}
        assert {c.name for c in leased if not c.is_written_unseen} == {f"{i}.2.weight" for i in range(5)}


def test_a_weight_that_another_module_writes_between_two_uses_in_a_pass_is_the_new_one(
    device: str, tmp_path: Path
) -> None:
    class Stepping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                assert isinstance(layer, nn.Linear)
                x = layer(x)
                layer.weight.mul_(0.5)
                x = torch.tanh(layer(x))
            return x

    def forwards(model: Any) -> list[Any]:
        with torch.no_grad():
            return [model(batch(step)[0]) for step in range(NUM_STEPS)]

    torch.manual_seed(0)
    check(Stepping(), forwards, device, tmp_path, trains=False)
