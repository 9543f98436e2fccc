"""An interrupt at a chosen moment."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from concurrent import futures
from pathlib import Path
from types import FrameType

import torch

import hetero
from hetero.io import interrupts
from hetero.memory import executor

# An editable install finds hetero.io and hetero.memory beside hetero, not in it.
OURS = tuple(
    str(file)
    for file in (
        Path(hetero.__file__).parent,
        Path(interrupts.__file__ or "").parent,
        Path(executor.__file__ or "").parent,
        Path(futures.__file__ or "").parent,
        threading.__file__,
        contextlib.__file__,
    )
)


class InterruptAt:
    """Raises KeyboardInterrupt on this thread at its n-th call or return from C: where Python itself may raise one.

    Only those in our code and in the standard library's locks count. A timer finds few of them. What the garbage
    collector calls is left alone: there Python prints an interrupt and forgets it.
    """

    def __init__(self, number: int) -> None:
        self._number, self.num_seen = number, 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(OURS):
            return
        self.num_seen += 1
        if self.num_seen == self._number:
            sys.setprofile(None)
            raise KeyboardInterrupt

    def __enter__(self) -> InterruptAt:
        gc.collect()
        gc.disable()
        sys.setprofile(self)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)
        gc.enable()
        torch.set_grad_enabled(True)
