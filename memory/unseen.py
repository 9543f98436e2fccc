"""Keeping what hetero computes for itself from the modes of others: a selective checkpoint that counts operations, a
profiler, our own `OutsideReads`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def unseen() -> Iterator[None]:
    """No torch function and no operator inside reaches a mode, nor a tensor subclass's `__torch_function__`."""
    with torch._C.DisableTorchFunction():
        if torch._C._len_torch_dispatch_stack():
            with _disable_current_modes():
                yield
        else:
            yield
