"""A small model that must stream, what it does plainly, and a check that nothing was touched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import hetero
from hetero.wrapped import WrappedRun

BOUNCE_NBYTES = 2 << 20
WIDTH, NUM_LAYERS, BATCH = 64, 6, 32
LAYER_NBYTES = WIDTH * WIDTH * 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu() + x
        return x


def x(seed: int = 0) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, seed: int = 0) -> list[Tensor]:
    """One forward and backward; the output and every gradient."""
    model.zero_grad()
    output = model(x(seed))
    output.square().mean().backward()
    return [output.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def tight(device: str, *, num_layers: int = 2, training: bool = True, with_activations: bool = True) -> dict[str, Any]:
    """Budgets with room for `num_layers` layers' weights in the first tier, a ring's included. Behind a gpu tier RAM
    holds two, so that both links are used. Without `training` much of the weights has to leave at once."""
    small = NUM_LAYERS * WIDTH * 4
    gradients = NUM_LAYERS * (LAYER_NBYTES + WIDTH * 4)
    activations = 2 * (NUM_LAYERS + 1) * BATCH * WIDTH * 4 if with_activations else 6 * BATCH * WIDTH * 4
    first = small + num_layers * LAYER_NBYTES + (gradients + activations if training else 0)
    if device == "cpu":
        return {"device": device, "cpu_memory": BOUNCE_NBYTES + first}
    return {"device": device, "gpu_memory": first, "cpu_memory": BOUNCE_NBYTES + 3 * LAYER_NBYTES}


def wrap(model: nn.Module, folder: Path, device: str = "cpu", **options: Any) -> WrappedRun:
    run: WrappedRun = hetero.wrap(model, disk=folder, **(tight(device) | options))
    return run


def num_hooks() -> int:
    """Of torch's global module hooks."""
    return sum(
        len(found) for name, found in vars(torch_module).items() if name.startswith("_global_") and "hooks" in name
    )


def parts(model: Any) -> list[tuple[Any, ...]]:
    """Everything about a module that a wrap could change."""
    if not isinstance(model, nn.Module):
        return []
    found: list[tuple[Any, ...]] = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        is_lazy = isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer))
        address = tensor.data_ptr() if not is_lazy and tensor.layout is torch.strided else 0
        found.append((name, id(tensor), address, tensor._version, type(tensor), tensor.device))
    for name, module in model.named_modules():
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        found.append((name, id(module), sorted(module.__dict__), hooks))
    return found


@contextmanager
def untouched(model: Any, folder: Path) -> Iterator[None]:
    """Check that the body changes nothing: no tensor, no module, no hook, no file."""
    before, hooks, files = parts(model), num_hooks(), sorted(folder.iterdir()) if folder.is_dir() else []
    yield
    assert parts(model) == before
    assert num_hooks() == hooks
    assert (sorted(folder.iterdir()) if folder.is_dir() else []) == files
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
