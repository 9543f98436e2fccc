"""Long copies beside short compute, again and again: a wait that is missing shows as NaN, a race error or a wrong bit.

The emulated GPU fills what may be reused with NaN, moves the bytes of a copy as late as it can, and looks for unordered
accesses.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import hetero
from hetero.memory.activations import Policy

pytestmark = pytest.mark.usefixtures("no_leaks")

NUM_REPETITIONS = 200
FEW, MANY = (torch.linspace(-1, 1, rows * 64).reshape(rows, 64) for rows in (4, 256))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small are faster on one, above all where other programs hold the other core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Chain(nn.Module):
    """Layers whose product is over long before the next weight has come; the first one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = torch.tanh(layer(x)) + x
        return x


def iteration(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("activations", "x", "extra_nbytes", "link"),
    [("keep", FEW, 0, "60MB/s"), ("cpu", MANY, 400_000, "600MB/s"), ("disk", MANY, 400_000, "600MB/s")],
)
def test_short_compute_behind_long_copies_is_exact(
    activations: Policy, x: torch.Tensor, extra_nbytes: int, link: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Chain()
    expected = iteration(copy.deepcopy(model), x)
    weights = sum(p.nbytes for p in model.parameters())
    with hetero.wrap(
        model,
        device="emulated",
        gpu_memory=weights + weights // 2 + extra_nbytes,
        cpu_memory=(2 << 20) + weights * 3 // 4 + 4 * extra_nbytes,
        disk=tmp_path,
        activations=activations,
        link=link,
    ) as run:
        for _ in range(NUM_REPETITIONS):
            found = iteration(model, x)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        stats = run.stats()
        assert run.plan.num_streamed >= 3
        assert stats.executor["num_copies"] > NUM_REPETITIONS * run.plan.num_streamed
        assert stats.num_unleased == 0
        assert (stats.activations_back_nbytes > 0) == (activations != "keep")
