"""KeyboardInterrupt at any call of a wrapped iteration: the next one is right, and the run closes without a trace."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
import hetero.memory.activations
from hetero.memory.weights import Place
from tests.interrupting import InterruptAt

pytestmark = pytest.mark.usefixtures("no_leaks")

NUM_MOMENTS = 200
X = torch.linspace(-1, 1, 32 * 96).reshape(32, 96)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(5))
        self.norm = nn.LayerNorm(96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        out: torch.Tensor = self.norm(x)
        return out


def iteration(model: nn.Module) -> list[torch.Tensor]:
    """One forward and backward: the loss and every gradient."""
    model.zero_grad()
    loss = model(X).pow(2).mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def budgets(device: str, model: nn.Module) -> dict[str, Any]:
    """The gradients, a third of the weights, and enough for what is saved."""
    weights = sum(p.nbytes for p in model.parameters())
    first = weights + weights // 3 + 150_000
    if device == "cpu":
        return {"cpu_memory": (2 << 20) + first}
    return {"gpu_memory": first, "cpu_memory": (2 << 20) + weights // 2 + 40_000}


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_an_interrupt_at_any_call_of_an_iteration_is_survived(device: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Residual()
    reference = iteration(copy.deepcopy(model))
    weights = [p.detach().clone() for p in model.parameters()]
    run = hetero.wrap(model, device=device, disk=tmp_path, **budgets(device, model))
    try:
        for _ in range(2):
            iteration(model)
        assert run.plan.num_streamed > 0
        with InterruptAt(0) as counted:
            iteration(model)
        for number in random.Random(device).sample(range(1, counted.num_seen), NUM_MOMENTS):
            try:
                with InterruptAt(number):
                    iteration(model)
            except KeyboardInterrupt:
                pass
            found = iteration(model)
            assert len(found) == len(reference)
            assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True)), number
    finally:
        run.close()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
    assert not list(tmp_path.iterdir())


def test_recovery_makes_room_in_ram_for_what_went_to_disk_in_the_interrupted_pass(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Residual()
    reference = iteration(copy.deepcopy(model))
    weights = sum(p.nbytes for p in model.parameters())
    sizes = {"gpu_memory": weights + weights // 2 + 170_000, "cpu_memory": (2 << 20) + weights * 3 // 2}
    with hetero.wrap(model, device="emulated", disk=tmp_path, **sizes) as run:
        for _ in range(3):
            iteration(model)
        assert run.plan.num_streamed > 0 and run.streaming._ring_sizes[1] == 0, "all of them are in memory"
        run.ledger.take("cpu", "others", run.ledger.free("cpu") - 1000)

        def interrupt(*_: Any) -> None:
            run.streaming.make_room(weights)  # there is none in RAM, so weights go to disk
            raise KeyboardInterrupt

        handle = model.norm.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            iteration(model)
        handle.remove()
        assert any(chunk.place is Place.DISK for chunk in run.streaming.chunks)
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(iteration(model), reference, strict=True))
        run.ledger.give("cpu", "others", run.ledger.holders("cpu")["others"])


def test_recovery_waits_for_copies_of_activations_that_are_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hetero.memory.activations, "LARGE_NBYTES", 1)
    torch.manual_seed(0)
    model = Residual()
    reference = iteration(copy.deepcopy(model))
    weights = sum(p.nbytes for p in model.parameters())
    sizes = {"gpu_memory": 2 * weights + (1 << 20), "cpu_memory": (2 << 20) + weights + (1 << 20)}
    with hetero.wrap(model, device="emulated", disk=tmp_path, activations="cpu", link="1MB/s", **sizes) as run:
        iteration(model)
        events = []
        device_copy = run._device.copy

        def copying(*where: int, **more: Any) -> Any:
            events.append(device_copy(*where, **more))
            return events[-1]

        vars(run._device)["copy"] = copying

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        handle = model.norm.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            iteration(model)
        handle.remove()
        assert any(not event.query() for event in events), "all copies were over before"
        run._recover()
        assert all(event.query() for event in events)
        assert all(torch.equal(a, b) for a, b in zip(iteration(model), reference, strict=True))


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("then", ["forward", "close"])
def test_what_is_written_to_weights_after_an_interrupt_stays(device: str, then: str, tmp_path: Path) -> None:
    """The interrupted module still shows its slot when its owner loads a checkpoint into it."""
    torch.manual_seed(0)
    model = Residual()
    state = {name: tensor * 0.5 for name, tensor in model.state_dict().items()}
    run = hetero.wrap(model, device=device, disk=tmp_path, **budgets(device, model))
    for _ in range(2):
        iteration(model)
    assert run.plan.num_streamed > 0
    for layer in model.layers:
        handle = layer.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            model(X)
        handle.remove()
        model.load_state_dict(state)
        if then == "forward":
            with torch.no_grad():
                model(X)
            assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    run.close()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    slots = {chunk.home[0].data_ptr() if chunk.home else 0 for chunk in run.streaming.chunks}
    assert slots == {0}, "nothing of the run looks at the weights any more"
    with hetero.wrap(model, device=device, disk=tmp_path, **budgets(device, model)):
        iteration(model)
