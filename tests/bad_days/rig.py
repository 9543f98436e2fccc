"""What the bad-day tests share: a run at its smallest budgets, a disk that can be told to fail, and its answers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hetero
from hetero.io.backends.base import Block
from hetero.io.backends.faulty import Fault, FaultyBackend
from hetero.io.engine import Engine
from hetero.planning import TooSmallError

CONTEXT = 64
CHUNK_NBYTES = 48 << 10
DEVICES = ("cpu", "emulated")
IDS = torch.arange(5, 18)[None]


@functools.cache
def smallest(folder: Path, device: str) -> dict[str, int]:
    """The budgets, as arguments, that the error of a far too small one names."""
    gpu = {"gpu_memory": 4096} if device == "emulated" else {}
    with pytest.raises(TooSmallError) as caught:
        hetero.load(folder, device=device, cpu_memory=4096, context=CONTEXT, chunk_nbytes=CHUNK_NBYTES, **gpu)
    return {f"{tier}_memory": nbytes for tier, nbytes in caught.value.needs.items()}


def load(folder: Path, device: str = "cpu", *, extra_nbytes: int = 0, **options: Any) -> hetero.Run:
    """Load at the smallest budgets plus `extra_nbytes` per tier, so that (nearly) everything streams."""
    budgets = {name: nbytes + extra_nbytes for name, nbytes in smallest(folder, device).items()}
    return hetero.load(folder, device=device, context=CONTEXT, chunk_nbytes=CHUNK_NBYTES, **budgets, **options)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=IDS).logits
    return logits


def reference_logits(folder: Path) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    return logits_of(model.eval())


class Disk:
    """Every engine that `hetero.load` makes reads through this; `fault` decides what becomes of each block."""

    def __init__(self) -> None:
        self.fault: Callable[[Block], Fault | None] | None = None
        self.timeout_s = 60.0
        self.backends: list[FaultyBackend] = []

    def make_engine(self) -> Engine:
        return Engine(wrap_backend=self._wrap, timeout_s=self.timeout_s)

    def _wrap(self, inner: Any) -> FaultyBackend:
        self.backends.append(FaultyBackend(inner, lambda block: self.fault(block) if self.fault else None))
        return self.backends[-1]


def is_row(block: Block) -> bool:
    """Whether a block is a row of the embedding, not a part of a chunk."""
    return block.useful_nbytes < 1024
