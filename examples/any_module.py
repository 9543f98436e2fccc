"""Train a CNN within budgets that do not hold it, with an ordinary loop, and check that nothing changed.

The same training runs twice from the same start: inside hetero.wrap, weights and activations moving between a GPU made
of RAM, RAM and disk, then as plain torch. Fails when one loss, weight or buffer differs by a bit.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

import torch
from _common import Parser, at_least_one, check_equal, compute_device, copy_of, moving_bar, run, tracked, wrap_options
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hetero

NUM_CLASSES = 10
NUM_PIXELS = 32
BUDGETS: dict[str, tuple[int | str, int | str]] = {"emulated": ("64MiB", "16MiB"), "cpu": ("auto", "64MiB")}


def main() -> None:
    gpu_memory, cpu_memory = "64MiB on emulated", "16MiB on emulated, 64MiB on cpu"
    parser = Parser(__doc__, device="emulated", gpu_memory=gpu_memory, cpu_memory=cpu_memory)
    parser.add_argument("--steps", type=at_least_one, default=10, help="optimizer steps (%(default)s)")
    parser.add_argument("--batch", type=at_least_one, default=32, help="images per step (%(default)s)")
    parser.add_argument("--width", type=at_least_one, default=64, help="channels of the first layer (%(default)s)")
    options = parser.parse()

    torch.manual_seed(0)
    model = make_model(options.width)
    start = copy_of(model)
    with moving_bar() as bar, hetero.wrap(model, **wrap_options(options, BUDGETS), progress=bar) as wrapped:
        print(f"before: {wrapped.plan}")
        losses = train(model, options, "wrapped")
        print(f"after: {wrapped.plan}\n{wrapped.stats()}")
        if options.timeline is not None:
            wrapped.trace(options.timeline)
    weights = copy_of(model)

    model.load_state_dict(start)
    plain_losses = train(model.to(compute_device(options)), options, "plain torch")
    print("losses: " + ", ".join(f"{loss.item():.3f}" for loss in losses.values()))
    what = f"{len(losses)} losses and {len(weights)} weights and buffers"
    check_equal(what, plain_losses | copy_of(model), losses | weights)


def train(model: nn.Module, options: argparse.Namespace, description: str) -> dict[str, Tensor]:
    """Your own loop. Returns the losses."""
    device = compute_device(options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = {}
    for step, (images, labels) in enumerate(tracked(batches(options), options.steps, description)):
        loss: Any = cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[f"loss {step}"] = loss.detach()
    optimizer.zero_grad()
    return losses


def make_model(width: int) -> nn.Module:
    """A residual CNN; at width 64 its weights are 37 MiB."""
    blocks = [Block(width * inside, width * outside) for inside, outside in ((1, 2), (2, 4), (4, 8), (8, 8))]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, NUM_CLASSES)]
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *blocks, *head)


class Block(nn.Module):
    """Two convolutions, and one beside them; halves the image."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.beside = nn.Conv2d(inside, outside, 1, stride=2)

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.body(images) + self.beside(images))


def batches(options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Noisy stripes; the class is their angle."""
    random = torch.Generator().manual_seed(1)
    line = torch.linspace(-1, 1, NUM_PIXELS)
    y, x = torch.meshgrid(line, line, indexing="ij")
    for _ in range(options.steps):
        labels = torch.randint(NUM_CLASSES, (options.batch,), generator=random)
        angles = (labels * (math.pi / NUM_CLASSES)).reshape(-1, 1, 1, 1)
        phases = torch.rand(options.batch, 1, 1, 1, generator=random) * (2 * math.pi)
        stripes = torch.sin(9 * (x * angles.cos() + y * angles.sin()) + phases)
        yield stripes + 0.3 * torch.randn(options.batch, 3, NUM_PIXELS, NUM_PIXELS, generator=random), labels


if __name__ == "__main__":
    run(main)
