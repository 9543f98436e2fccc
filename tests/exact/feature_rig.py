"""Does the same things to a plain model and to a wrapped copy of it, in budgets where its weights must stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hetero
from hetero.planning import TooSmallError
from hetero.wrapped import WrappedRun

DEVICES = ("cpu", "emulated")
WIDTH = 64
ROOM_NBYTES = 96 << 10
"""What saved activations have beside the weights: too little for all of them."""


class Block(nn.Module):
    """64 KiB of weights, 5 KiB of activations per row of eight."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Any) -> Any:
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


class Tower(nn.Module):
    """400 KiB of weights in blocks, one after the other."""

    def __init__(self, num_blocks: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tower(seed: int = 0, **arguments: Any) -> Any:
    torch.manual_seed(seed)
    return Tower(**arguments)


def batch(seed: int, num_rows: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, num_rows, WIDTH, generator=generator)
    return x, y


def loss_of(model: Any, seed: int) -> Tensor:
    x, y = batch(seed)
    return functional.mse_loss(model(x), y)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def train(model: Any, num_steps: int = 3, optimizer: Any = None) -> list[Any]:
    """Losses and gradients of some steps; the optimizer is one that wrap never heard of."""
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    seen: list[Any] = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        backward(loss)
        seen += [loss.detach(), gradients(model)]
        optimizer.step()
    return seen


def backward(loss: Tensor, **arguments: Any) -> None:
    loss.backward(**arguments)  # type: ignore[no-untyped-call]


# -- budgets -----------------------------------------------------------------------------------------------------------


_needs: dict[tuple[Any, ...], dict[str, int]] = {}  # opening a run takes a while


def tight_budgets(model: nn.Module, device: str, folder: Path, *, trains: bool = True) -> dict[str, int]:
    """The least that wrap accepts; gradients and some room for activations beside it if the model `trains`."""
    key = device, *((name, tuple(t.shape), t.dtype) for name, t in [*model.named_parameters(), *model.named_buffers()])
    if key not in _needs:
        budgets = {"cpu_memory": 4096} | ({"gpu_memory": 4096} if device == "emulated" else {})
        with pytest.raises(TooSmallError) as caught:
            hetero.wrap(model, device=device, disk=folder, **budgets)
        _needs[key] = {f"{tier}_memory": nbytes for tier, nbytes in caught.value.needs.items()}
    budgets = dict(_needs[key])
    if trains:
        first = "gpu_memory" if device == "emulated" else "cpu_memory"
        budgets[first] += sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad) + ROOM_NBYTES
    return budgets


@contextmanager
def tight(model: nn.Module, device: str, folder: Path, *, trains: bool = True, **more: Any) -> Iterator[WrappedRun]:
    """Wrap in tight budgets; at the end, budgets must have held and the scratch file be gone."""
    budgets = tight_budgets(model, device, folder, trains=trains)
    with hetero.wrap(model, device=device, disk=folder, **(budgets | more)) as run:
        yield run
        for tier, use in run.stats().tiers.items():
            assert use.peak_nbytes <= use.limit_nbytes, tier
    assert list(folder.iterdir()) == []


def assert_streamed(run: WrappedRun) -> None:
    """Weights came through the ring, so that equality says something."""
    executor = run.stats().executor
    assert executor["num_leases"] > 0
    assert executor["read_nbytes"] + executor["copied_nbytes"] > 0
    assert run.streaming.streamed


# -- the comparison ----------------------------------------------------------------------------------------------------


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    """Bit for bit, with types and lengths, through lists and mappings."""
    if isinstance(theirs, Tensor):
        assert isinstance(ours, Tensor), where
        assert ours.dtype == theirs.dtype, where
        assert torch.equal(ours, theirs), f"{where} differs by up to {(ours.double() - theirs.double()).abs().max()}"
    elif isinstance(theirs, Mapping):
        assert list(ours) == list(theirs), where
        for name in theirs:
            assert_same(ours[name], theirs[name], f"{where}.{name}")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), where
        for i, (mine, yours) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(mine, yours, f"{where}[{i}]")
    else:
        assert ours == theirs, where


def check(
    model: Any, session: Callable[[Any], Any], device: str, folder: Path, *, trains: bool = True, **more: Any
) -> None:
    """Do `session` to a plain copy and to a wrapped one; what it returns and the models afterwards must be equal."""
    plain, wrapped = deepcopy(model), deepcopy(model)
    torch.manual_seed(7)
    theirs = session(plain)
    with tight(wrapped, device, folder, trains=trains, **more) as run:
        torch.manual_seed(7)
        ours = session(wrapped)
        assert_streamed(run)
        assert_same(ours, theirs)
        assert_same(wrapped.state_dict(), plain.state_dict())
    assert_same(wrapped.state_dict(), plain.state_dict())
